"""What a test system is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import implicitkit as ik

__all__ = ["TestSystem", "system", "systems"]

KINDS = {"root": ik.Root, "fixed_point": ik.FixedPoint, "steady_state": ik.SteadyState}
_makers: dict[str, dict[str, Callable[[], TestSystem]]] = {}


@dataclass(frozen=True)
class TestSystem:
    """A system of nonlinear equations with a parameter and a start.

    Attributes:
        function: ``(z, theta) -> Tensor`` like ``z``: residual, map or right-hand side by ``kind``.
        start: float64, ``(n,)``, or ``(batch, n)`` with ``batch_dims=1``. theta: float64, a constant of the problem, any
            shape; with ``batch_dims=1`` one row a sample.
        kind: ``"root"``, ``"fixed_point"`` or ``"steady_state"``.
        regular: the Jacobian at the solution is not singular, so that ``dz/dtheta`` exists.
        source: where the problem is from.
    """

    __test__ = False  # not a test for pytest

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    start: Tensor
    theta: Tensor
    kind: str = "root"
    batch_dims: int = 0
    regular: bool = True
    source: str = ""

    @property
    def problem(self) -> ik.Problem:
        """The problem to hand to ``ik.solve``."""
        return KINDS[self.kind](self.function)

    @property
    def size(self) -> int:
        """Unknowns of one sample."""
        return self.start.shape[-1]

    def residual(self, z: Tensor) -> Tensor:
        """``F(z, theta)``."""
        out = self.function(z, self.theta)
        return out - z if self.kind == "fixed_point" else out

    def from_start(self, factor: float) -> TestSystem:
        """The same with the start times ``factor``; a start at the origin becomes ``(factor, ..., factor)``, as in
        MINPACK's drivers."""
        if factor == 1:
            return self
        origin = not bool(self.start.any())
        start = torch.full_like(self.start, factor) if origin else factor * self.start
        return replace(self, name=f"{self.name} x{factor:g}", start=start)

    def solve(self, **options: object) -> ik.Solution:
        """``ik.solve`` on it; with a batch, converged samples are dropped."""
        in_dims = 0 if self.batch_dims and self.theta.ndim else None
        return ik.solve(self.problem, self.start, (self.theta,), batch_dims=self.batch_dims, in_dims=in_dims, **options)


def system(group: str, *sizes: int) -> Callable[[Callable[..., TestSystem]], Callable[..., TestSystem]]:
    """Register a function that makes a system, once for each size it is called with (or once, without any)."""

    def register(make: Callable[..., TestSystem]) -> Callable[..., TestSystem]:
        table = _makers.setdefault(group, {})
        for n in sizes:
            table[f"{make.__name__}{n}"] = lambda n=n: replace(make(n), name=f"{make.__name__}{n}")
        if not sizes:
            table[make.__name__] = lambda: replace(make(), name=make.__name__)
        return make

    return register


def systems(*groups: str) -> list[TestSystem]:
    """All systems of the groups (none named: all)."""
    return [make() for group in groups or tuple(_makers) for make in _makers[group].values()]


def vector(*values: float) -> Tensor:
    """A float64 vector, or a number if there is one value."""
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)


def count(n: int) -> Tensor:
    """``1, ..., n`` in float64."""
    return torch.arange(1, n + 1, dtype=torch.float64)
