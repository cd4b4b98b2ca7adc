"""``residual(z, *args) = 0``, and the same between ends that belong to a transform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.problem.base import Problem, Restated, deeper, require_callable
from implicitkit.problem.kind import ROOT, Kind
from implicitkit.problem.wrapping import Around


@dataclass(frozen=True, repr=False)
class Root(Problem):
    r"""Find ``z`` with ``F(z, \theta) = 0``, one equation per unknown.

    Implicit function theorem: where ``dF/dz`` is regular, ``dz/d\theta = -(dF/dz)^{-1} dF/d\theta``
    (Krantz & Parks, *The Implicit Function Theorem*, 2002, theorem 3.3.1).

    Args:
        equation: ``residual(z, *args)``, a function or ``nn.Module`` returning the structure, shapes and dtypes of ``z``.
        jac_sparsity: the pattern of the residual's Jacobian, for one sample, unknowns
            in the order of the flattened leaves: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``, or
            ``"auto"``: found by itself from 128 unknowns on.
        symmetric, positive_definite: what you know of that Jacobian; checked at the first derivative.
        has_aux: the function returns ``(value, aux)``; ``solution.aux`` is ``aux`` at the solution, differentiable.

    Raises:
        TypeError: ``residual`` is not callable.
    """

    equation: Callable[..., Any]
    jac_sparsity: Any = field(default="auto", compare=False, kw_only=True)
    symmetric: bool = field(default=False, kw_only=True)
    positive_definite: bool = field(default=False, kw_only=True)
    has_aux: bool = field(default=False, kw_only=True)
    kind: ClassVar[Kind] = ROOT

    def __post_init__(self) -> None:
        require_callable(self, self.equation, "residual")
        self._state_structure()

    @property
    def function(self) -> Callable[..., Any]:
        return self._value_of(self.equation)

    def residual(self, z: Any, *args: Any) -> Any:
        return self.function(z, *args)


@dataclass(frozen=True, repr=False)
class RootBetween(Root):
    """:class:`Root` with a bracket: ``z = low + t (high - low)``, solved for ``t`` in ``[0, 1]``.

    A solver runs below all transforms of ``torch.func`` and cannot be given ends that do not exist there; the equation in
    ``t`` has the same ends for every sample, and the true ones among its arguments.  The solution does not depend on the
    ends: its derivative by them is zero, and is not formed.

    Args:
        ends: ``(low, high)``, numbers or tensors that broadcast against ``z``, or of the batch's shape.
    """

    ends: Any = field(default=None, kw_only=True)

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        low, high = (_like(torch.as_tensor(end, device=z0.device).to(z0).detach(), z0) for end in self.ends)
        inner = Root(
            _Between(self.equation),
            jac_sparsity=self.jac_sparsity,
            symmetric=self.symmetric,
            positive_definite=self.positive_definite,
            has_aux=self.has_aux,
        )
        start = (z0.detach() - low) / (high - low)
        return deeper(inner, start, args, batch_dims, (low, high - low), lambda t, g: g[0] + t * g[1])


def _like(end: Tensor, z0: Tensor) -> Tensor:
    """An end, for every entry of ``z0``."""
    if end.ndim and end.shape == z0.shape[: end.ndim]:
        end = end.reshape(*end.shape, *(1,) * (z0.ndim - end.ndim))
    return end.expand_as(z0)


class _Between(Around):
    """``function(low + t (high - low), *args)`` as a function of ``t``, with ``(low, high - low)`` the first argument."""

    def __call__(self, t: Tensor, ends: tuple[Tensor, Tensor], *args: Any) -> Any:
        return self.function(ends[0] + t * ends[1], *args)
