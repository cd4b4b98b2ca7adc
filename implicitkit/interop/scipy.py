"""SciPy's solvers under their own names: ``scipy.root.hybr``, ``scipy.minimize.BFGS``, ``scipy.least_squares.trf``, ...

One adapter for all of them.  PyTorch supplies every Jacobian, gradient and Hessian product that a method takes; SciPy's
own tolerances are set so tight that it does not stop before :class:`~implicitkit.interop.session.Session` stops it.  A
step is an iteration where SciPy reports them, otherwise an evaluation of ``f`` at a new point (``hybr``, ``lm``,
``fsolve``, ``least_squares``, ``root_scalar``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse.linalg
import torch
from torch import Tensor

from implicitkit.interop.session import Session
from implicitkit.solver.base import Found
from implicitkit.solver.black_box import BlackBoxFunction
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.steps.bracketing import check_ends, ends_of

_TINY = 1e-300  # where SciPy wants a positive tolerance
_EPS = float(np.finfo(np.float64).eps)

Run = Callable[..., Found]


@dataclass(frozen=True)
class SciPySolver:
    """One of SciPy's methods as a black-box solver: called with one sample, ``z0`` of shape ``(n,)``.

    Attributes:
        name: registered name. solves: what kind of ``f`` it is given. run: ``run(session, **options)``.
        step: what a step is, ``"iteration"`` or ``"evaluation"``. options: its own options and their defaults.
        text: what it is, for people.
    """

    name: str
    solves: str
    run: Run
    step: str
    options: tuple[tuple[str, Any], ...]
    text: str

    def __post_init__(self) -> None:
        kind = inspect.Parameter
        fixed = [kind("f", kind.POSITIONAL_OR_KEYWORD), kind("z0", kind.POSITIONAL_OR_KEYWORD)]
        named = [kind(n, kind.KEYWORD_ONLY) for n in ("rtol", "atol", "max_steps")]
        own = [kind(n, kind.KEYWORD_ONLY, default=value) for n, value in self.options]
        object.__setattr__(self, "__signature__", inspect.Signature([*fixed, *named, *own]))
        object.__setattr__(self, "__doc__", self.text)
        object.__setattr__(self, "__qualname__", self.name)

    def __call__(
        self, f: BlackBoxFunction, z0: Tensor, *, rtol: float, atol: float, max_steps: int, **options: Any
    ) -> Found:
        session = Session(f, z0, rtol=rtol, atol=atol, max_steps=max_steps, step=self.step)
        return self.run(session, **(dict(self.options) | options))

    def __reduce__(self) -> Any:
        return _by_name, (self.name,)


SOLVERS: dict[str, SciPySolver] = {}
"""Every SciPy solver by its registered name."""


def _by_name(name: str) -> SciPySolver:
    return SOLVERS[name]


def _register(
    name: str, solves: str, run: Run, text: str, step: str = "iteration", max_size: int | None = None, **options: Any
) -> None:
    solver = SciPySolver(name, solves, run, step, tuple(options.items()), text)
    SOLVERS[name] = register_solver(name, solves=solves, batch="loop", max_size=max_size)(solver)


# --------------------------------------------------------------------------------------------------------------- equations
def _minpack(session: Session, method: str, factor: float) -> Found:
    """MINPACK's hybrj and lmder, always with the exact Jacobian: their finite differences take steps of relative size."""
    options = {"xtol": 0.0, "factor": factor, ("maxfev" if method == "hybr" else "maxiter"): 1_000_000}
    if method == "lm":
        options |= {"ftol": 0.0, "gtol": 0.0}
    return session.run(
        lambda x: scipy.optimize.root(session.f, x, jac=session.jacobian, method=method, options=options).message
    )


def _fsolve(session: Session, factor: float) -> Found:
    def attempt(x: np.ndarray) -> str:
        answer = scipy.optimize.fsolve(
            session.f, x, fprime=session.jacobian, full_output=True, xtol=0.0, maxfev=1_000_000, factor=factor
        )
        return str(answer[3])

    return session.run(attempt)


def _orientation(session: Session, alpha: float | None) -> tuple[float, float | None]:
    """Sign and scale for methods that start from the inverse Jacobian ``-alpha I``: they want a residual like ``G(z) - z``.

    A fixed point's is that already, with ``alpha = 1``.  Of any other residual the Rayleigh quotient ``q = F'JF / F'F`` at
    the start tells: the sign is turned where ``q > 0``, and ``alpha = 1 / |q|``, or less if the first step would then be
    longer than half the start, or 1/2 (SciPy's default).
    """
    if session.kind.iteration:
        return 1.0, 1.0 if alpha is None else alpha
    q = session.quotient()
    if not np.isfinite(q) or q == 0:
        return 1.0, alpha
    cautious = 0.5 * max(float(np.linalg.norm(session.start)), 1.0) / session.start_norm
    return (-1.0 if q > 0 else 1.0), (min(1 / abs(q), cautious) if alpha is None else alpha)


def _mixing(session: Session, method: str, alpha: float | None, line_search: str | None, **jac_options: Any) -> Found:
    """The quasi-Newton and mixing methods of ``scipy.optimize.root``; each iteration is counted."""
    if session.settled:
        return session.run(lambda x: "")
    sign, alpha = _orientation(session, alpha)

    def attempt(x: np.ndarray) -> str:
        answer = scipy.optimize.root(
            lambda y: sign * session.f(y), x, method=method, callback=session.count,
            options={
                "fatol": 0.0, "xatol": 0.0, "maxiter": 1_000_000, "line_search": line_search,
                "jac_options": {"alpha": alpha, **jac_options},
            },
        )  # fmt: skip
        return str(answer.message)

    return session.run(attempt)


def _krylov(session: Session, inner: str, inner_maxiter: int, line_search: str | None) -> Found:
    """Newton-Krylov with exact Jacobian-vector products.

    SciPy takes a function in place of the name of an inner solver; ours ignores SciPy's finite differences and multiplies
    with the Jacobian at the point that SciPy last reported.
    """
    solvers = {
        "gmres": partial(scipy.sparse.linalg.gmres, restart=inner_maxiter, maxiter=1, atol=0.0),
        "lgmres": partial(scipy.sparse.linalg.lgmres, inner_m=inner_maxiter, maxiter=1, atol=0.0),
        "bicgstab": partial(scipy.sparse.linalg.bicgstab, maxiter=inner_maxiter, atol=0.0),
        "tfqmr": partial(scipy.sparse.linalg.tfqmr, maxiter=inner_maxiter, atol=0.0),
    }
    if inner not in solvers:
        raise ValueError(f"inner must be one of {', '.join(map(repr, solvers))}; got {inner!r}")
    n = session.start.size

    def attempt(x: np.ndarray) -> str:
        at = [x.copy()]

        def solve(_: Any, b: np.ndarray, rtol: float, **__: Any) -> tuple[np.ndarray, int]:
            operator = scipy.sparse.linalg.LinearOperator((n, n), lambda v: session.jvp(at[0], v), dtype=np.float64)
            return solvers[inner](operator, b, rtol=rtol)

        def count(y: np.ndarray, F: np.ndarray) -> None:
            at[0] = np.array(y)
            session.count()

        answer = scipy.optimize.root(
            session.f, x, method="krylov", callback=count,
            options={
                "fatol": 0.0, "xatol": 0.0, "maxiter": 1_000_000, "line_search": line_search,
                "jac_options": {"method": solve},
            },
        )  # fmt: skip
        return str(answer.message)

    return session.run(attempt)


def _df_sane(session: Session, memory: int, line_search: str) -> Found:
    def attempt(x: np.ndarray) -> str:
        answer = scipy.optimize.root(
            session.f, x, method="df-sane", callback=session.count,
            options={"fatol": 0.0, "ftol": 0.0, "maxfev": 100_000_000, "M": memory, "line_search": line_search},
        )  # fmt: skip
        return str(answer.message)

    return session.run(attempt)


_EXACT = "the Jacobian comes from PyTorch"
_own: dict[str, Any]
_register("scipy.root.hybr", "root", partial(_minpack, method="hybr"),
          f"Powell's hybrid method of MINPACK (``hybrj``); {_EXACT}.", "evaluation", factor=100.0)  # fmt: skip
_register("scipy.root.lm", "root", partial(_minpack, method="lm"),
          f"Levenberg-Marquardt of MINPACK (``lmder``) for equations; {_EXACT}.", "evaluation", factor=100.0)  # fmt: skip
_register("scipy.fsolve", "root", _fsolve, f"``scipy.optimize.fsolve``; {_EXACT}.", "evaluation", factor=100.0)
for _name, _text, _own in (
    ("broyden1", "Broyden's good method", {"max_rank": None, "reduction_method": "restart"}),
    ("broyden2", "Broyden's bad method", {"max_rank": None, "reduction_method": "restart"}),
    ("anderson", "(extended) Anderson mixing", {"M": 20, "w0": 1e-6}),
    ("linearmixing", "Scalar Jacobian approximation, one step length", {}),
    ("diagbroyden", "Diagonal Broyden approximation", {}),
    ("excitingmixing", "Diagonal approximation with tuned step lengths", {"alphamax": 1.0}),
):  # fmt: skip
    _register(f"scipy.root.{_name}", "root", partial(_mixing, method=_name),
              f"{_text} of SciPy; sign and initial scale of the residual are chosen for it.",
              alpha=None, line_search="armijo", **_own)  # fmt: skip
for _name in ("scipy.root.krylov", "scipy.newton_krylov"):
    _register(_name, "root", _krylov,
              "Newton-Krylov of SciPy (Knoll & Keyes 2004), with exact Jacobian-vector products from PyTorch.",
              inner="gmres", inner_maxiter=20, line_search="wolfe")  # fmt: skip
_register("scipy.root.df-sane", "root", _df_sane, "Derivative-free spectral residual method (La Cruz et al. 2006).",
          memory=10, line_search="cruz")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ minimisation
# Trust regions keep no memory: begin again, with values taken from the new start, once the gradient is so much smaller.
_AGAIN = {"gtol": 1e-6}
# What each method takes from PyTorch, and the settings under which it does not stop early.
_DERIVATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "Nelder-Mead": ("", {"xatol": 1e-11, "fatol": np.inf, "adaptive": True}),
    "Powell": ("", {"xtol": _EPS, "ftol": 0.0}),
    "COBYQA": ("", {"final_tr_radius": 1e-11}),
    "CG": ("jac", {"gtol": 0.0}),
    "BFGS": ("jac", {"gtol": 0.0}),
    "L-BFGS-B": ("jac", {"gtol": 0.0, "ftol": 0.0, "maxfun": 100_000_000}),
    "TNC": ("jac", {"gtol": 0.0, "ftol": 0.0, "xtol": 0.0, "maxfun": 100_000_000}),
    "SLSQP": ("jac", {"ftol": 0.0}),
    "Newton-CG": ("hessp", {"xtol": 0.0}),
    "trust-ncg": ("hessp", _AGAIN),
    "trust-krylov": ("hessp", _AGAIN),
    "trust-constr": ("hessp", {"gtol": 0.0, "xtol": 1e-15}),
    "dogleg": ("hess", _AGAIN),
    "trust-exact": ("hess", _AGAIN),
}


def _minimize(session: Session, method: str) -> Found:
    """``scipy.optimize.minimize``, unconstrained; stationarity is what counts, never a small decrease of the objective."""
    takes, options = _DERIVATIVES[method]
    derivatives: dict[str, Any] = {"jac": session.gradient} if takes else {}
    if takes == "hessp":
        derivatives["hessp"] = session.hessp
    if takes == "hess":
        derivatives["hess"] = session.hessian
    limits = {} if method == "TNC" else {"maxiter": 1_000_000}
    if method in ("Nelder-Mead", "Powell", "COBYQA"):
        limits["maxfev"] = 100_000_000

    def attempt(x: np.ndarray) -> str:
        answer = scipy.optimize.minimize(
            session.value, x, method=method, callback=session.count, options=dict(options) | limits, **derivatives
        )
        return str(answer.message)

    return session.run(attempt)


for _name, (_takes, _) in _DERIVATIVES.items():
    _with = {"": "no derivatives", "jac": "gradients", "hessp": "gradients and Hessian-vector products",
             "hess": "gradients and Hessians"}[_takes]  # fmt: skip
    _register(f"scipy.minimize.{_name}", "minimise", partial(_minimize, method=_name),
              f"``scipy.optimize.minimize(method={_name!r})`` with {_with} from PyTorch.")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- least squares
def _least_squares(session: Session, method: str, x_scale: Any, tr_solver: str | None = None) -> Found:
    """``scipy.optimize.least_squares`` without loss function or bounds: those state another problem."""
    tolerance = 1.01 * _EPS  # smaller ones are refused
    tolerances: dict[str, float | None] = {"ftol": tolerance, "xtol": tolerance, "gtol": tolerance}
    if method != "lm":
        tolerances |= {"ftol": None, "gtol": None}

    x_scale = x_scale if isinstance(session.x_scale, str) else 1.0  # the problem has units of its own

    def attempt(x: np.ndarray) -> str:
        answer = scipy.optimize.least_squares(
            session.residuals, x, jac=session.residuals_jacobian, method=method, x_scale=x_scale, tr_solver=tr_solver,
            max_nfev=1_000_000, **tolerances,
        )  # fmt: skip
        return str(answer.message)

    return session.run(attempt)


for _name, _text, _own in (
    ("trf", "Trust region reflective", {"tr_solver": None}),
    ("dogbox", "Dogleg in rectangular trust regions", {"tr_solver": None}),
    ("lm", "Levenberg-Marquardt of MINPACK (``lmder``)", {}),
):  # fmt: skip
    _register(f"scipy.least_squares.{_name}", "least_squares", partial(_least_squares, method=_name),
              f"{_text} of ``scipy.optimize.least_squares``; {_EXACT}.", "evaluation", x_scale="jac", **_own)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- scalar equations
_DOUBLINGS = 60


def _bracket(f: Callable[[float], float], x: float, bracket: tuple[float, float] | None) -> tuple[float, float] | str:
    """Two points where ``f`` has opposite signs: those given, or the first found by doubling steps to both sides."""
    if bracket is not None:
        low, high = bracket
        if not np.sign(f(low)) * np.sign(f(high)) <= 0:
            return f"f has no change of sign between {low} and {high}"
        return low, high
    inner = {-1.0: x, 1.0: x}
    sign = np.sign(f(x))
    step = 0.1 * max(1.0, abs(x))
    for _ in range(_DOUBLINGS):
        for side in list(inner):
            outer = x + side * step
            value = f(outer)
            if not np.isfinite(value):
                del inner[side]  # the end of where f is defined
            elif np.sign(value) != sign:
                return min(inner[side], outer), max(inner[side], outer)
            else:
                inner[side] = outer
        step *= 2
    return f"no change of sign was found around {x}: pass bracket=(low, high)"


def _scalar(session: Session, method: str, bracket: Any = None) -> Found:
    """``scipy.optimize.root_scalar``; a change of sign at a pole is no root, and is not taken for one.

    ``bracket``: ``(low, high)``, numbers or tensors with one number for each sample.
    """
    check_ends(bracket)
    number, count = session.sample
    if bracket is not None:
        like = torch.zeros(count, 1, dtype=torch.float64, device="cpu")
        bracket = tuple(float(end[number]) for end in ends_of(bracket, like))

    def f(x: float) -> float:
        return float(session.f(np.array([x]))[0])

    settings: dict[str, Any] = {"method": method, "maxiter": 1_000_000, "xtol": _TINY, "rtol": 4 * _EPS}

    def attempt(start: np.ndarray) -> str:
        x = float(start.reshape(-1)[0])
        if method in ("newton", "halley"):
            settings["fprime"] = lambda y: float(session.jacobian(np.array([y])).reshape(-1)[0])
            if method == "halley":
                settings["fprime2"] = lambda y: session.second(np.array([y]))
            settings["x0"] = x
        elif method == "secant":
            settings.update(x0=x, x1=x + 1e-4 * max(1.0, abs(x)))
        else:
            found = _bracket(f, x, bracket)
            if isinstance(found, str):
                return found
            settings["bracket"] = found
        answer = scipy.optimize.root_scalar(f, **settings)
        return str(answer.flag)

    return session.run(attempt)


for _name in ("bisect", "brentq", "brenth", "ridder", "toms748"):
    _register(f"scipy.root_scalar.{_name}", "root", partial(_scalar, method=_name),
              f"``scipy.optimize.{_name}`` for scalar equations, in a bracket that is given or searched for.", "evaluation",
              1, bracket=None)  # fmt: skip
for _name in ("newton", "secant", "halley"):
    _register(f"scipy.root_scalar.{_name}", "root", partial(_scalar, method=_name),
              f"``scipy.optimize.root_scalar(method={_name!r})``; derivatives come from PyTorch.", "evaluation",
              1)  # fmt: skip
