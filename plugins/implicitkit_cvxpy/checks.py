"""What is wrong with a problem, said before anything is solved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cvxpy as cp

from implicitkit_cvxpy.compat import affine_in_parameters, is_dpp


def check_problem(problem: Any, parameters: Any, variables: Any, gp: bool) -> None:
    """Raise unless a layer can be built.

    Raises:
        TypeError: not a problem, a parameter or a variable. ValueError: integer variables, not convex, not DPP, lists that
            do not fit the problem; the message names the sub-expression and how to rewrite it.
    """
    if not isinstance(problem, cp.Problem):
        raise TypeError(f"problem must be a cvxpy.Problem, got {type(problem).__name__}")
    for name, values, kind in (("parameters", parameters, cp.Parameter), ("variables", variables, cp.Variable)):
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of cvxpy.{kind.__name__}, got {type(values).__name__}")
        for i, value in enumerate(values):
            if not isinstance(value, kind):
                raise TypeError(f"{name}[{i}] is a {type(value).__name__}, not a cvxpy.{kind.__name__}")
    discrete = [v.name() for v in problem.variables() if v.attributes["integer"] or v.attributes["boolean"]]
    if discrete:
        raise ValueError(
            f"variable(s) {', '.join(discrete)} are integer or boolean: the solution of a mixed-integer program does not "
            "depend smoothly on its parameters. Relax them to a continuous interval"
        )
    complex_ = [leaf.name() for leaf in (*problem.variables(), *problem.parameters()) if leaf.is_complex()]
    if complex_:
        raise ValueError(f"{', '.join(complex_)} are complex: write the program in real and imaginary parts")
    _check_curvature(problem, gp)
    own, given = {p.id: p for p in problem.parameters()}, {p.id: p for p in parameters}
    if len(given) != len(parameters):
        raise ValueError("parameters names one parameter twice")
    if missing := [p.name() for key, p in own.items() if key not in given]:
        raise ValueError(
            f"parameter(s) {', '.join(missing)} of the problem are not in parameters=: the layer must have them all"
        )
    if extra := [p.name() for key, p in given.items() if key not in own]:
        raise ValueError(f"parameter(s) {', '.join(extra)} in parameters= do not appear in the problem")
    known = {v.id for v in problem.variables()} | {d.id for c in problem.constraints for d in c.dual_variables}
    if extra := [v.name() for v in variables if v.id not in known]:
        raise ValueError(
            f"variable(s) {', '.join(extra)} in variables= are neither variables of the problem nor dual variables of its "
            "constraints"
        )
    if not variables:
        raise ValueError("variables= is empty: the layer would return nothing")


def _check_curvature(problem: cp.Problem, gp: bool) -> None:
    rules, convex = ("DGP", problem.is_dgp()) if gp else ("DCP", problem.is_dcp())
    places = _places(problem)
    if not convex and not (not gp and is_dpp(problem)):
        test = (lambda e: e.is_dgp()) if gp else (lambda e: e.is_dcp())
        found = _offenders([(place, thing, test) for place, thing in places], lambda e: "" if gp else _curvature(e))
        hint = (
            "Set gp=True if this is a geometric program"
            if not gp and problem.is_dgp()
            else "Geometric programs need positive variables and parameters (pos=True), and monomials or posynomials"
            if gp
            else "Minimise convex and maximise concave expressions, subject to convex <= concave and affine == affine"
        )
        raise ValueError(f"the problem is not convex by cvxpy's rules ({rules}): {found}. {hint}")
    if not is_dpp(problem, gp):
        objective, *constraints = places
        tests = [(*objective, lambda e: is_dpp(e, gp))]  # only there may a quadratic form have a parameter
        tests += [
            (place, thing, lambda e: e.is_dgp(dpp=True) if gp else e.is_dcp(dpp=True)) for place, thing in constraints
        ]
        found = _offenders(tests, lambda e: _rewrite(e, gp))
        raise ValueError(f"the problem must be DPP (affine in its parameters), and is not: {found}")


def _places(problem: cp.Problem) -> list[tuple[str, Any]]:
    return [("the objective", problem.objective), *((f"constraint {i}", c) for i, c in enumerate(problem.constraints))]


def _offenders(places: Sequence[tuple[str, Any, Any]], advice: Callable[[Any], str]) -> str:
    texts = []
    for place, thing, good in places:
        if good(thing):
            continue
        smallest = _smallest(thing, good)
        texts.append(f"{place}: {_clip(smallest)}{advice(smallest)}")
    return "; ".join(texts) or "no single expression is to blame"


def _clip(expression: Any) -> str:
    text = str(expression)
    return text if len(text) <= 120 else text[:117] + "..."


def _children(thing: Any) -> Iterator[Any]:
    yield from getattr(thing, "args", ())


def _smallest(thing: Any, good: Any) -> Any:
    """The deepest sub-expression that fails while all of its own parts pass."""
    for child in _children(thing):
        if isinstance(child, cp.Expression) and not good(child):
            return _smallest(child, good)
    return thing


def _curvature(thing: Any) -> str:
    """Why an objective, or an expression, is not convex: the term to blame, or a parameter whose sign nobody declared."""
    if isinstance(thing, (cp.Minimize, cp.Maximize)):
        wanted, wrong = ("convex", "concave") if isinstance(thing, cp.Minimize) else ("concave", "convex")
        (sum_,) = thing.args
        terms = sum_.args if type(sum_).__name__ == "AddExpression" else [sum_]
        bad = [t for t in terms if not (t.is_convex() if wanted == "convex" else t.is_concave())]
        return f" (of which {', '.join(map(_clip, bad))} is {wrong}, not {wanted})"
    factors = [a for a in getattr(thing, "args", ()) if a.parameters() and not a.variables() and a.sign == "UNKNOWN"]
    if not factors or not any(a.variables() and not a.is_affine() for a in thing.args):
        return ""
    names = ", ".join(dict.fromkeys(p.name() for a in factors for p in a.parameters()))
    return f" (the sign of parameter {names} decides its curvature: declare it, cp.Parameter(nonneg=True))"


def _rewrite(expression: Any, gp: bool) -> str:
    """What to write instead, for the cases that people meet."""
    if gp:
        return " (in a geometric program a parameter may be a coefficient, or an exponent, not both)"
    names = [p.name() for p in expression.parameters()] if hasattr(expression, "parameters") else []
    if not names:
        return ""
    parametric = [a for a in getattr(expression, "args", ()) if a.parameters()]
    kind = type(expression).__name__
    if kind in ("QuadForm", "SymbolicQuadForm"):
        return (
            f" (a quadratic form in the parameter {names[0]} is allowed in the objective only; pass a square root instead: "
            f"sum_squares(L.T @ x) with Parameter L, {names[0]} = L L')"
        )
    if len(parametric) >= 2 and not any(a.variables() for a in parametric):
        return (
            f" (a product of parameters {' and '.join(dict.fromkeys(names))}: replace the product by one new Parameter and "
            "compute it in torch)"
        )
    if len(parametric) >= 2:
        return (
            " (parameters on both sides of a product: introduce a Variable equal to one of the factors, "
            "z == factor, or one Parameter for the product)"
        )
    if parametric and not parametric[0].variables():
        if expression.variables() and affine_in_parameters(parametric[0]):
            return (
                f" (cvxpy has no rule for the parameter {names[0]} there: write a product, A @ x or multiply(a, x), with a "
                "Parameter whose entries are computed in torch)"
            )
        return f" (nonlinear in the parameter {names[0]}: make its value a new Parameter and compute that in torch)"
    return (
        f" (not affine in the parameter {names[0]}: replace the nonlinear part by a new Parameter, computed in torch)"
    )
