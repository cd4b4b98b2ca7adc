r"""Least squares within bounds: minimise ``|r(z)|^2 / 2`` over ``lower <= z <= upper``.

A constrained minimisation that also gives ``r`` itself, for the methods that live on it.

The optimality conditions and the derivative are those of :mod:`implicitkit.problem.constrained`,
``z - P(z - R'r) = 0`` with ``P`` the projection on the box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.trees import Layout
from implicitkit.problem.base import Kernel
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.robust import Robust


class Residuals(NamedTuple):
    """Asks for the residual vector instead of the objective."""

    z: Any


@dataclass(frozen=True)
class BoundedLeastSquares(ConstrainedMinimisation):
    """See the top of this file.  Made by :class:`~implicitkit.LeastSquares` with ``bounds=``.

    The kernel gives the residuals ``(batch, m)`` for a matrix of two columns more than the state has.  Where the objective
    has a unit ``c`` of its own (``costed``, :mod:`implicitkit.problem.unit_of_objective`) they are ``\\sqrt{c} r``.

    Attributes:
        residuals: ``(z, *args) ->`` a pytree of residuals. x_scale: ``"jac"``, or 1 where the unknowns have units
            already. jac_sparsity: of the Jacobian of the residuals.
    """

    residuals: Callable[..., Any] | None = None
    x_scale: Any = "auto"
    jac_sparsity: Any = field(default="auto", compare=False)
    title: ClassVar[str] = "LeastSquares"
    is_fit: ClassVar[bool] = True

    @staticmethod
    def of(program: ConstrainedMinimisation, residuals: Callable[..., Any], **said: Any) -> BoundedLeastSquares:
        """The program of ``|r|^2 / 2`` and bounds with its residuals, and what is said of them."""
        known = {f.name: getattr(program, f.name) for f in fields(program)}
        return BoundedLeastSquares(**known, residuals=residuals, **said)

    def __repr__(self) -> str:
        name = getattr(self.residuals, "__qualname__", type(self.residuals).__name__)
        return f"LeastSquares({name}, bounded)"

    def evaluate(self, state: Any, *args: Any) -> Any:
        if isinstance(state, Residuals):
            assert self.residuals is not None
            r = self.residuals(state.z, *args[self.hidden :])
            return trees.tree_map(lambda t: t * _over(args[0].sqrt(), t), r) if self.costed else r
        return super().evaluate(state, *args)

    def unpack(self, layout: Layout, matrix: Tensor) -> Any:
        if matrix.shape[1] == layout.size + 2:
            return Residuals(layout.unpack(matrix[:, :-2]).z)
        return super().unpack(layout, matrix)

    def pattern_of(self, what: str) -> Any:
        return self.jac_sparsity if what == "residuals" else "auto"

    def flat_residuals(self, kernel: Kernel, z: Tensor) -> Tensor:
        """``r``, ``(batch, m)``."""
        return kernel(torch.cat([z, z.new_zeros(len(z), 2)], 1))

    def flat_curvature(self, r: Tensor, share: Tensor) -> Tensor | None:
        """The curvature of a robust loss (:meth:`~implicitkit.problem.robust.Robust.curvature`); ``None``, Gauss and
        Newton's, where residuals have another unit than its scale: that takes a twentieth more evaluations."""
        return self.residuals.curvature(r, share) if isinstance(self.residuals, Robust) and not self.costed else None


def _over(samples: Tensor, t: Tensor) -> Tensor:
    """One number a sample, to be multiplied with a tensor of the batch's shape and more."""
    return samples.reshape(samples.shape + (1,) * (t.ndim - samples.ndim))
