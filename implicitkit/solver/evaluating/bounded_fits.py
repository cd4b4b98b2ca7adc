r"""What a fit within bounds asks for at a point, all from one evaluation of the residuals ``r``.

That is ``r``, half its squared norm, the gradient ``R'r`` of that, and the graph that gives products with ``R``.

A program asks for its objective, for the slope of that and for residuals at different times: a trial for its value, the
driver for the residual of the conditions, the next step for the slope and the Jacobian.  What is known of the last two
points is remembered, by what they are; of the last one the graph, too, which may be large.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, graph

_KEPT = 2  # points


class FittedPoint:
    """One point.

    Attributes:
        z: ``(batch, n)``. residuals: ``r`` ``(batch, m)``. value: ``|r|^2 / 2``, ``(batch,)``.
    """

    def __init__(self, residuals: Callable[[Tensor], Tensor], z: Tensor) -> None:
        self.z, self._function = z, residuals
        vector, leaf = autodiff.recorded(residuals, z)
        self._graph: tuple[Tensor, Tensor] | None = (vector, leaf)
        self.residuals = vector.detach()
        self.value = 0.5 * self.residuals.square().sum(1)
        self._slope: Tensor | None = None

    @property
    def graph(self) -> tuple[Tensor, Tensor]:
        """``r`` with its graph, and the point that this leads to."""
        if self._graph is None:
            self._graph = autodiff.recorded(self._function, self.z)
        return self._graph

    @property
    def slope(self) -> Tensor:
        """``R'r``, ``(batch, n)``.

        Raises:
            RuntimeError: the residuals change with ``z``, and autograd sees no ``z`` in them.
        """
        if self._slope is None:
            vector, leaf = self.graph
            g = graph.pulled(vector, (leaf,), self.residuals)[0] if vector.requires_grad else None
            if g is None or not bool(g.any()):
                half = lambda y: 0.5 * self._function(y).square().sum(1)  # noqa: E731
                autodiff.refuse_hidden(half, self.z, self.value)
            self._slope = torch.zeros_like(self.z) if g is None else g
        return self._slope

    def let_go(self) -> None:
        """Let go of the graph; its slope is kept."""
        self._graph = None


class Fits:
    """The last points of a fit.

    Args:
        residuals: ``(batch, n) -> (batch, m)``, counted.
    """

    def __init__(self, residuals: Callable[[Tensor], Tensor]) -> None:
        self._residuals = residuals
        self._points: list[FittedPoint] = []

    def at(self, z: Tensor) -> FittedPoint:
        """What is known at ``z``, from an evaluation there if nothing is."""
        for known in reversed(self._points):
            if known.z is z or (known.z.shape == z.shape and torch.equal(known.z, z)):
                return known
        for known in self._points:
            known.let_go()
        found = FittedPoint(self._residuals, z.detach())
        self._points = [*self._points, found][-_KEPT:]
        return found
