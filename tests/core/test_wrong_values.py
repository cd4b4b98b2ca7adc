"""A wrong value of any argument of any public name is refused at once, by name (the rule: ``wrong_values``)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from wrong_values import Row, complaints

import implicitkit as ik

F64 = {"dtype": torch.float64}
ONES, VECTOR, EYE = torch.ones(1, **F64), torch.ones(2, **F64), torch.eye(2, **F64)
POSITIVE = "tensor"  # a number, or a tensor of them
ANY_NUMBER = "negative whole real tensor"


def contraction(z: Any, *args: Any) -> Any:
    return 0.5 * z + 1


def cube(z: Any, *args: Any) -> Any:
    return z**3 - 1


def bowl(z: Any, *args: Any) -> Any:
    return ((z - 1) ** 2).sum()


_OF_SOLVE = {n: p.annotation for n, p in inspect.signature(ik.solve).parameters.items() if p.kind is p.KEYWORD_ONLY}
#: what every verb passes on; ``None`` stands for the default
_NONE = {n: "none" for n in ("rtol", "atol", "max_steps", "in_dims", "callback", "norm")}
STRUCTURE = {"jac_sparsity": "none tensor"}
_FREE = "z0 args"  # pytrees of the user's: looked at by the solve, and by tests of their own


def verb(call: Any, function: str, of: Any, takes: Any = None) -> Row:
    return Row(call, lambda: {function: of, "z0": VECTOR}, _NONE | dict(takes or {}), _FREE, _OF_SOLVE)


ROWS: dict[str, Row] = {
    "solve": verb(ik.solve, "problem", ik.FixedPoint(contraction)),
    "root": verb(ik.root, "residual", cube),
    "fixed_point": verb(ik.fixed_point, "map", contraction),
    "argmin": verb(ik.argmin, "objective", bowl, {"constraints": "none"}),
    "least_squares": verb(
        ik.least_squares, "residuals", cube, {"f_scale": "whole real tensor", "x_scale": "whole real list dict"}
    ),
    "steady_state": verb(ik.steady_state, "rhs", lambda z, *args: 1 - z),
    "curve_fit": Row(
        ik.curve_fit,
        lambda: {
            "f": lambda t, p: p * t,
            "xdata": torch.linspace(0, 1, 5, **F64),
            "ydata": torch.linspace(0, 2, 5, **F64),
            "p0": ONES,
        },
        _NONE | {"p0": "list", "sigma": "whole real"},
        "xdata ydata",  # what the model is evaluated at is the model's
        {n: a for n, a in _OF_SOLVE.items() if n != "batch_dims"},
    ),
    "implicit": Row(ik.implicit, lambda: {"problem": ik.Root(cube)}, {"rule": ""}),
    "FixedPoint": Row(ik.FixedPoint, lambda: {"map": contraction}, STRUCTURE),
    "Root": Row(ik.Root, lambda: {"equation": cube}, STRUCTURE),
    "SteadyState": Row(ik.SteadyState, lambda: {"rhs": cube}, STRUCTURE),
    "Argmin": Row(ik.Argmin, lambda: {"objective": bowl}, STRUCTURE | {"constraints": "none"}),
    "LeastSquares": Row(
        ik.LeastSquares,
        lambda: {"residuals": cube},
        STRUCTURE | {"f_scale": "whole real tensor", "x_scale": "whole real list dict tensor"},
    ),
    "InitialValue": Row(ik.InitialValue, lambda: {"rhs": contraction, "t": torch.linspace(0, 1, 3, **F64)}),
    "QuadraticProgram": Row(
        ik.QuadraticProgram,
        lambda: {"P": EYE, "q": VECTOR, "A": VECTOR[None], "b": ONES, "G": EYE, "h": VECTOR, "lower": -VECTOR},
        {"P": "none", "lower": "none"},
    ),
    "Equality": Row(ik.Equality, lambda: {"function": cube}),
    "Inequality": Row(ik.Inequality, lambda: {"function": cube}),
    "compose": Row(ik.compose, lambda: {"nodes": {"a": (ik.FixedPoint(contraction), "x")}, "output": "a"}, said="node"),
    "tie": Row(ik.tie, lambda: {"layers": torch.nn.Sequential(torch.nn.Linear(2, 2))}),
    "certify": Row(ik.certify, lambda: {"solution": ik.root(cube, VECTOR)}),
    "stability": Row(ik.stability, lambda: {"subject": ik.SteadyState(cube), "z": VECTOR}, free="z args"),
    "register_solver": Row(ik.register_solver, lambda: {"name": "nobody", "solves": "root"}),
    "register_rule": Row(ik.register_rule, lambda: {"name": "nobody"}),
    "register_linear_solver": Row(ik.register_linear_solver, lambda: {"name": "nobody"}),
    "Accelerated": Row(ik.Accelerated, lambda: {"method": "picard"}, {"period": "none"}),
    "Broyden": Row(ik.Broyden, takes={"scale": "negative", "line_search": "none"}),
    "GradientDescent": Row(ik.GradientDescent, takes={"optimum": "negative"}),
    "TorchOptim": Row(ik.TorchOptim, lambda: {"optimizer": torch.optim.SGD}),
    "linear.log_determinant": Row(ik.linear.log_determinant, lambda: {"product": lambda v: 2 * v, "like": VECTOR}),
    "linear.trace": Row(ik.linear.trace, lambda: {"product": lambda v: 2 * v, "like": VECTOR}),
    "project.affine": Row(ik.project.affine, lambda: {"A": EYE, "b": VECTOR}),
    "project.box": Row(
        ik.project.box, lambda: {"lower": 0.0, "upper": 9.0}, dict.fromkeys(("lower", "upper"), ANY_NUMBER)
    ),
    "project.box_section": Row(
        ik.project.box_section,
        lambda: {"lower": 0.0, "upper": 9.0},
        dict.fromkeys(("lower", "upper", "total"), ANY_NUMBER),
    ),
    "project.halfspace": Row(ik.project.halfspace, lambda: {"a": VECTOR}, {"b": ANY_NUMBER}),
    "project.hyperplane": Row(ik.project.hyperplane, lambda: {"a": VECTOR}, {"b": ANY_NUMBER}),
    "project.polyhedron": Row(ik.project.polyhedron, lambda: {"A": EYE, "b": VECTOR, "G": EYE, "h": VECTOR}),
    "project.sparse_simplex": Row(
        ik.project.sparse_simplex, lambda: {"max_nonzero": 1}, {"radius": "whole real tensor"}
    ),
    "project.kl_transport": Row(ik.project.kl_transport, lambda: {"rows": VECTOR, "columns": VECTOR}),
    "project.transport": Row(ik.project.transport, lambda: {"rows": VECTOR, "columns": VECTOR}),
    "prox.group_lasso": Row(ik.prox.group_lasso, takes={"groups": "whole list", "weight": "whole real tensor"}),
    "relax.FenchelYoung": Row(ik.relax.FenchelYoung, lambda: {"predict": cube, "regulariser": bowl}),
    "relax.Perturbed": Row(ik.relax.Perturbed, lambda: {"choose": cube}),
    "relax.soft_rank": Row(ik.relax.soft_rank, lambda: {"v": VECTOR}, {"strength": "whole real tensor"}),
    "relax.soft_sort": Row(ik.relax.soft_sort, lambda: {"v": VECTOR}, {"strength": "whole real tensor"}),
    "manifold.Product": Row(
        ik.manifold.Product, lambda: {"parts": (ik.manifold.SO3(),)}, {"parts": "none"}, said="manifold"
    ),
    "callbacks.progress": Row(ik.callbacks.progress, takes={"description": "text"}),
    "testing.check_solver": Row(
        ik.testing.check_solver,
        lambda: {"solver": "picard", "checks": ["honours_max_steps"]},
        {"checks": "none"},
        said="check",
    ),
    "testing.check_linear_solver": Row(
        ik.testing.check_linear_solver,
        lambda: {"linear_solver": "lu", "checks": ["any_size"]},
        {"checks": "none"},
        said="check|linear",
    ),
    "testing.check_rule": Row(
        ik.testing.check_rule,
        lambda: {"rule": "one_step", "checks": ["keeps_the_solution"]},
        {"checks": "none"},
        said="check|rule|solver",
    ),
    "testing.known_problems": Row(
        ik.testing.known_problems, lambda: {"kind": "root", "batch": 1, "size": 2}, free="device"
    ),
    "testing.parametrize_with_checks": Row(
        ik.testing.parametrize_with_checks, lambda: {"solvers": ["picard"]}, {"kind": "none"}, said="solver|check|kind"
    ),
    "extend.solve_qp": Row(
        ik.extend.solve_qp, lambda: {"P": EYE, "q": VECTOR, "G": EYE, "h": VECTOR}, {"P": "none"}, said="P"
    ),
    "extend.Kind": Row(
        ik.extend.Kind, lambda: {"name": "nobody's"}, {"name": "text", "solver": "text", "flow": "negative"}
    ),
    "extend.Stage": Row(ik.extend.Stage, lambda: {"solver": "picard"}, {"solver": "text", "scale": "negative none"}),
    "extend.BlackBox": Row(ik.extend.BlackBox, lambda: {"find": cube}, {"name": "text", "solves": "text"}),
    "extend.Impatient": Row(ik.extend.Impatient, lambda: {"method": ik.Picard()}),
    "extend.Polyalgorithm": Row(ik.extend.Polyalgorithm, lambda: {"stages": ("picard",)}),
    "extend.check_policy": Row(ik.extend.check_policy, lambda: {"on_failure": "raise"}),
    "extend.check_degenerate": Row(ik.extend.check_degenerate, lambda: {"policy": "raise"}, said="degenerate"),
}
ROWS |= {
    f"project.{name}": Row(getattr(ik.project, name), takes={"radius": "whole real tensor", "centre": ANY_NUMBER})
    for name in ("Simplex", "simplex", "kl_simplex", "l1_ball", "l1_sphere", "l2_ball", "l2_sphere", "linf_ball")
}
ROWS |= {
    f"prox.{name}": Row(getattr(ik.prox, name), takes=dict.fromkeys(("weight", "l1", "l2"), "whole real tensor"))
    for name in ("elastic_net", "l1", "l2", "nonnegative", "nonnegative_ridge", "nuclear", "ridge", "total_variation")
}
#: What has no options of a user's: records that solves return, errors, bases of parts, tables, and functions on plain
#: tensors for authors of parts, whose wrong arguments torch names.
_RECORDS = "Certificate CurveFit Found Solution Stability Status"
_BASES = "LinearSolver Method Problem Rule Solver"
_TABLES = "linear_solvers plugins problems register_problem rules solvers"
_MATRICES = "cholesky_batched factor_batched lstsq_batched solve_batched"
_OF_LINEAR = "BlockStructure Estimate Factor InverseEstimate LinearSolution LinearSolver Operator"
_OF_TESTING = "Check CheckResult ConformanceReport Known SolverCheck"
NOT_ASKED = {
    *f"{_RECORDS} {_BASES} {_TABLES} project.Projection prox.Prox manifold.Manifold".split(),
    *(f"linear.{n}" for n in f"{_OF_LINEAR} {_MATRICES}".split()),
    *(f"testing.{n}" for n in _OF_TESTING.split()),
}


def public() -> dict[str, Any]:
    """Every public name that can be called, but errors and warnings."""
    rooms = ("linear", "project", "prox", "relax", "manifold", "callbacks", "testing")
    found = {n: getattr(ik, n) for n in ik.__all__}
    found |= {f"{room}.{n}": getattr(getattr(ik, room), n) for room in rooms for n in getattr(ik, room).__all__}
    return {
        name: thing
        for name, thing in found.items()
        if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, BaseException))
    }


def asked() -> dict[str, Row]:
    """The rows above; for every other public name one without arguments that it needs."""
    return {n: Row(thing) for n, thing in public().items() if n not in NOT_ASKED} | ROWS


@pytest.mark.parametrize("name", asked())
def test_wrong_values_are_refused_at_once_and_by_name(name: str) -> None:
    assert complaints(name.rpartition(".")[2], asked()[name]) == []


def test_the_lists_are_those_of_the_library() -> None:
    assert set(public()) >= NOT_ASKED and not NOT_ASKED & set(ROWS)
    assert {n for n in ROWS if not n.startswith("extend.")} <= set(public())
    assert len(asked()) > 110


def test_a_careless_function_would_be_found() -> None:
    def careless(steps: int, rate: float = 1.0) -> float:
        return steps * rate

    said = complaints("careless", Row(careless, lambda: {"steps": 2}))
    assert "steps=negative: taken without a word" in said and "rate=nan: taken without a word" in said
    assert any(line.startswith("steps=object: named nowhere: unsupported operand") for line in said)
