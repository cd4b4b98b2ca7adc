r"""Problems whose solutions are known, for checking solvers: two of each kind, one linear and one not.

Every sample of a batch has an argument of its own, chosen so that a given ``z*`` solves it exactly; nothing about the
solution can be guessed from the start.  All are well conditioned (condition numbers below about 10), so that a residual
within the tolerance means a solution within ten times as much.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_arguments, one_of, torch_dtype
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.kind import as_kind
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.root import Root
from implicitkit.problem.steady_state import SteadyState

MOST = 50_000  # evaluations in one check: four times what the dearest solver of this library needs (SciPy's CG)

_left: ContextVar[list[int] | None] = ContextVar("_left", default=None)


class Endless(BaseException):
    """A solve does not end (no ``Exception``: a solver that swallows those would go on)."""


class _Own(Exception):
    """What a user's function raises."""


class _Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises, from a user who has waited long enough."""


ERRORS = _Own, _Interrupt
"""What a function may raise that nobody else is to catch."""


@dataclass(frozen=True)
class Known:
    """A batch of problems and their solutions.

    ``z0`` and ``solution``: ``(batch, n)``.  ``theta``: ``(batch, m)``, the one argument; sample ``i`` depends on row
    ``i`` only.  ``residual(z, theta)``: what is zero at the solution, written out by hand, ``(batch, n)``.
    """

    name: str
    problem: Problem
    z0: Tensor
    theta: Tensor
    solution: Tensor
    residual: Callable[[Tensor, Tensor], Tensor]


def _matrix(n: int, norm: float, like: Tensor, seed: int) -> Tensor:
    """A fixed ``n x n`` matrix of the given spectral norm."""
    generator = torch.Generator("cpu").manual_seed(seed)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64, device="cpu")
    return (norm * matrix / torch.linalg.matrix_norm(matrix, 2)).to(like)


def _linear_map(z: Tensor) -> Known:
    """``z = A z + b``."""
    A = _matrix(z.shape[1], 0.5, z, 1)

    def map(y: Tensor, b: Tensor) -> Tensor:
        return y @ A.mT + b

    return _known("linear map", FixedPoint(map), z, z - z @ A.mT, lambda y, b: map(y, b) - y)


def _tanh_map(z: Tensor) -> Known:
    """``z = tanh(W z + x)``."""
    W = _matrix(z.shape[1], 0.8, z, 2)

    def map(y: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(y @ W.mT + x)

    z = 0.9 * torch.tanh(z)
    return _known("tanh layer", FixedPoint(map), z, torch.atanh(z) - z @ W.mT, lambda y, x: map(y, x) - y)


def _linear_equation(z: Tensor) -> Known:
    """``A z = b``, ``A = I + E``, ``|E|_2 = 0.5``."""
    E = _matrix(z.shape[1], 0.5, z, 3)

    def residual(y: Tensor, b: Tensor) -> Tensor:
        return y + y @ E.mT - b

    return _known("linear equation", Root(residual), z, z + z @ E.mT, residual)


def _cubic_equation(z: Tensor) -> Known:
    """``z^3 + z + E z = t``, ``|E|_2 = 0.3``."""
    E = _matrix(z.shape[1], 0.3, z, 4)

    def residual(y: Tensor, t: Tensor) -> Tensor:
        return y**3 + y + y @ E.mT - t

    return _known("cubic equation", Root(residual), z, z**3 + z + z @ E.mT, residual)


def _quadratic(z: Tensor) -> Known:
    """Minimise ``z' Q z / 2 - b' z``; the eigenvalues of ``Q`` lie in ``[1, 5]``."""
    M = _matrix(z.shape[1], 2.0, z, 5)
    Q = M @ M.mT + torch.eye(z.shape[1], dtype=z.dtype, device=z.device)

    def objective(y: Tensor, b: Tensor) -> Tensor:
        return (y * (0.5 * y @ Q - b)).sum(-1)

    return _known("quadratic", Argmin(objective), z, z @ Q, lambda y, b: y @ Q - b)


def _log_cosh(z: Tensor) -> Known:
    r"""Minimise ``\sum log cosh z + z' Q z / 2 - b' z``."""
    M = _matrix(z.shape[1], 1.5, z, 6)
    Q = M @ M.mT + 0.5 * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)

    def objective(y: Tensor, b: Tensor) -> Tensor:
        magnitude = y.abs()  # log cosh y = |y| + log(1 + exp(-2 |y|)) - log 2
        return (magnitude + torch.nn.functional.softplus(-2 * magnitude) + y * (0.5 * y @ Q - b)).sum(-1)

    return _known("log-cosh", Argmin(objective), z, torch.tanh(z) + z @ Q, lambda y, b: torch.tanh(y) + y @ Q - b)


def _linear_fit(z: Tensor) -> Known:
    """Least squares ``M z ~ y``, ``M`` of shape ``(2n, n)``, with a residual at the solution."""
    n = z.shape[1]
    M = torch.cat([torch.eye(n, dtype=z.dtype, device=z.device) + _matrix(n, 0.5, z, 7), _matrix(n, 1.0, z, 8)])
    rest = _null_vector(M.expand(len(z), -1, -1))

    def residuals(x: Tensor, y: Tensor) -> Tensor:
        return x @ M.mT - y

    return _known("linear fit", LeastSquares(residuals), z, z @ M.mT - rest, lambda x, y: residuals(x, y) @ M)


def _curve_fit(z: Tensor) -> Known:
    """Least squares with ``m(z) = [z + sin(z) / 5; B z + z^2 / 10]``, ``|B|_2 = 1/2``, and a residual at the solution."""
    n = z.shape[1]
    B, eye = _matrix(n, 0.5, z, 9), torch.eye(n, dtype=z.dtype, device=z.device)

    def model(x: Tensor) -> Tensor:
        return torch.cat([x + 0.2 * torch.sin(x), x @ B.mT + 0.1 * x**2], -1)

    def jacobian(x: Tensor) -> Tensor:
        diagonal = torch.diag_embed
        return torch.cat([eye + diagonal(0.2 * torch.cos(x)), B + diagonal(0.2 * x)], -2)

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return ((model(x) - y).unsqueeze(-2) @ jacobian(x)).squeeze(-2)

    rest = _null_vector(jacobian(z))
    return _known("curve fit", LeastSquares(lambda x, y: model(x) - y), z, model(z) - rest, gradient)


def _null_vector(J: Tensor) -> Tensor:
    """For each ``J (2n, n)`` a vector of norm 0.3 with ``J' r = 0``: the residual of a fit that is not exact."""
    target = J.new_ones(J.shape[0], J.shape[1], 1)
    r = target - J @ torch.linalg.lstsq(J, target).solution
    return (0.3 * r / torch.linalg.vector_norm(r, dim=-2, keepdim=True)).squeeze(-1)


def _linear_decay(z: Tensor) -> Known:
    """``dz/dt = b - A z``, stable: ``A = I + E``, ``|E|_2 = 0.5``."""
    E = _matrix(z.shape[1], 0.5, z, 10)

    def rhs(y: Tensor, b: Tensor) -> Tensor:
        return b - y - y @ E.mT

    return _known("linear decay", SteadyState(rhs), z, z + z @ E.mT, rhs)


def _cubic_decay(z: Tensor) -> Known:
    """``dz/dt = t - z - z^3 - E z``, stable."""
    E = _matrix(z.shape[1], 0.3, z, 11)

    def rhs(y: Tensor, t: Tensor) -> Tensor:
        return t - y - y**3 - y @ E.mT

    return _known("cubic decay", SteadyState(rhs), z, z**3 + z + z @ E.mT, rhs)


def turning(kind: str, batch: int, size: int) -> Known:
    """``A z = b`` as an equation, a fixed point or a state at rest; ``A`` turns pairs of unknowns by 45 degrees: it is as
    well conditioned as can be, and steps by its transposed make an error grow.

    Of a fixed point ``z = (I - A) z + b``, ``I - A`` is 0.7 times a turn by 50 degrees.
    """
    iteration = as_kind(kind).iteration
    angle = math.radians(50 if iteration else 45)
    z = known_problems(kind, batch=batch, size=size)[0].solution
    turn = torch.eye(size, dtype=z.dtype, device=z.device)
    for i in range(0, size - 1, 2):
        turn[i : i + 2, i : i + 2] = z.new_tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        )
    A = torch.eye(size, dtype=z.dtype, device=z.device) - 0.7 * turn if iteration else turn
    b = z @ A.mT
    residual = lambda y, b: y @ A.mT - b  # noqa: E731
    problems: dict[str, Problem] = {
        "fixed_point": FixedPoint(lambda y, b: y - residual(y, b)),
        "steady_state": SteadyState(lambda y, b: -residual(y, b)),
    }
    return _known("equation that turns", problems.get(kind, Root(residual)), z, b, residual)


def _known(name: str, problem: Problem, solution: Tensor, theta: Tensor, residual: Callable[..., Tensor]) -> Known:
    return Known(name, _counted(problem), torch.zeros_like(solution), theta, solution, residual)


def _counted(problem: Any) -> Problem:
    counted_problem: Problem = type(problem)(counting(problem.function))
    return counted_problem


def counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which ends a solve that does not end by itself (:func:`limited`)."""

    def counted(*arguments: Tensor) -> Tensor:
        spend("evaluations of the function were made")
        return function(*arguments)

    return counted


def spend(what: str) -> None:
    """Count one evaluation, or one product.

    Raises:
        Endless: there have been :data:`MOST`, inside :func:`limited`.
    """
    left = _left.get()
    if left is not None:
        left[0] -= 1
        if left[0] < 0:
            raise Endless(f"{MOST:,} {what}")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Inside, the functions of all known problems together may be evaluated :data:`MOST` times.

    Raises:
        Endless: they have been.
    """
    token = _left.set([MOST])
    try:
        yield
    finally:
        _left.reset(token)


KNOWN: dict[str, tuple[Callable[[Tensor], Known], ...]] = {
    "fixed_point": (_linear_map, _tanh_map),
    "root": (_linear_equation, _cubic_equation),
    "argmin": (_quadratic, _log_cosh),
    "least_squares": (_linear_fit, _curve_fit),
    "steady_state": (_linear_decay, _cubic_decay),
}
"""By problem kind: from the solution wanted, ``(batch, n)``, to the problem."""


def known_problems(
    kind: str, *, batch: int, size: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Known]:
    """The problems of one kind, with solutions drawn from the unit normal distribution (always the same ones)."""
    check_arguments(
        "known_problems",
        kind=(one_of(*KNOWN), kind),
        batch=(at_least(1), batch),
        size=(at_least(1), size),
        dtype=(torch_dtype(), dtype),
    )
    generator = torch.Generator("cpu").manual_seed(0)
    z = torch.randn(batch, size, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
    return [build(z) for build in KNOWN[kind]]


def unsolvable(kind: str, *, batch: int, size: int) -> tuple[Problem, Tensor]:
    """A problem that has no solution, and where to start.

    ``z = z + sqrt(z^2 + 1)``;  ``z^2 + 1 = 0``, whose ``|F|`` has a stationary point that is no root;  minimise
    ``sum z``;  steady state of ``z^2 + 1``.  Sums of squares always have an infimum: least squares are given the equation.
    """
    z0 = torch.full((batch, size), 0.3, dtype=torch.float64, device="cpu")
    problems: dict[str, Problem] = {
        "fixed_point": FixedPoint(lambda z: z + torch.sqrt(z.square() + 1)),
        "argmin": Argmin(lambda z: z.sum(-1)),
        "steady_state": SteadyState(lambda z: z.square() + 1),
    }
    return _counted(problems.get(kind, Root(lambda z: z.square() + 1))), z0


def twofold(kind: str, *, batch: int, size: int) -> tuple[Problem, Tensor]:
    """A problem with two solutions in every unknown, which differ in sign, and one choice of them, ``(batch, size)``.

    ``z = tanh 2z``;  ``z = z^3``, which zero solves too;  minimise ``sum (z^2 - 1)^2 / 4``;  least squares of
    ``z^2 - 1``;  steady state of ``z - z^3``.
    """
    signs = 1 - 2 * (torch.arange(batch * size, device="cpu").reshape(batch, size) % 3 % 2).to(torch.float64)
    flat = torch.ones_like(signs)
    for _ in range(60):
        flat = torch.tanh(2 * flat)
    known: dict[str, tuple[Problem, Tensor]] = {
        "fixed_point": (FixedPoint(lambda z: torch.tanh(2 * z)), flat * signs),
        "argmin": (Argmin(lambda z: (z.square() - 1).square().sum(-1) / 4), signs),
        "least_squares": (LeastSquares(lambda z: z.square() - 1), signs),
        "steady_state": (SteadyState(lambda z: z - z**3), signs),
    }
    problem, chosen = known.get(kind, (Root(lambda z: z - z**3), signs))
    return _counted(problem), chosen
