"""What a black-box solver is given: ``f`` and its derivatives, from plain tensors to plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.linear.base import Operator
from implicitkit.solver.evaluations import Function

__all__ = ["PlainFunction"]


class PlainFunction:
    """``f(z)`` for a black box, with everything that PyTorch can tell it about ``f``.

    What ``f`` is depends on what the solver solves (table in :class:`~implicitkit.Method`).  Shapes, by ``batch`` of the
    solver: ``"loop"``: ``z`` is ``(n,)``, one sample; ``"native"``: ``(batch, n)``, and every result has the batch in
    front; ``"joint"``: ``(batch * n,)``, one system, with block-diagonal matrices and summed values.

    ========================  =========================================  ===============
    method                    result                                     shape (loop)
    ========================  =========================================  ===============
    ``f(z)``                  map, residual or gradient                  ``(n,)``
    ``f.residual(z)``         what convergence is judged by              ``(n,)``
    ``f.jacobian(z)``         Jacobian of ``f`` (minimisers: Hessian)    ``(n, n)``
    ``f.jvp(z, v)``           ``f.jacobian(z) @ v``, matrix-free         ``(n,)``
    ``f.value(z)``            objective (minimisers, least squares)      ``()``
    ``f.residuals(z)``        vector ``r`` of least squares              ``(m,)``
    ``f.residuals_jacobian``  ``dr/dz``                                  ``(m, n)``
    ``f.second(z)``           ``d^2 f/dz^2`` of scalar equations         ``(1,)``
    ========================  =========================================  ===============

    Arguments are copied and results belong to the caller: neither side can change the other's memory.  What is asked
    at one point (equal numbers) costs one evaluation for values and gradients together, and one for products and
    Jacobians together.

    Attributes:
        kind: the kind of the problem behind ``f``.
        error: the exception of the user's function that was raised last, if any.
    """

    def __init__(self, function: Function, context: Tensor, *, slot: int | None = None, joint: bool = False) -> None:
        self._function, self._context, self._slot, self._joint = function, context, slot, joint
        self._seen: Tensor | None = None
        self._matrix = context
        self._operator: Operator | None = None
        self.kind = function.problem.kind
        self.error: Exception | None = None

    def __call__(self, z: Any) -> Tensor:
        """``f(z)``."""
        return self._vector(self._ask(self._function, z))

    def residual(self, z: Any) -> Tensor:
        """The residual of the problem."""
        return self._vector(self._ask(self._function.residual, z))

    def value(self, z: Any) -> Tensor:
        """The objective."""
        values = self._ask(self._function.value, z)
        return values.sum() if self._joint else values.clone() if self._slot is None else values[self._slot].clone()

    def residuals(self, z: Any) -> Tensor:
        """The vector of which half the squared norm is minimised."""
        return self._vector(self._ask(self._function.residuals, z))

    def jacobian(self, z: Any) -> Tensor:
        """The Jacobian of ``f``."""
        return self._blocks(self._ask(lambda y: self._linearised(y).dense(), z))

    def residuals_jacobian(self, z: Any) -> Tensor:
        """The Jacobian of :meth:`residuals`."""
        return self._blocks(self._ask(self._function.residuals_jacobian, z))

    def jvp(self, z: Any, v: Any) -> Tensor:
        """The Jacobian of ``f`` times ``v`` (for minimisers, the Hessian times ``v``)."""
        direction = self._expand(torch.as_tensor(v).detach().to(self._context), torch.zeros_like(self._context))
        return self._vector(self._ask(lambda y: self._linearised(y).mv(direction), z))

    def second(self, z: Any) -> Tensor:
        """The second derivative of scalar equations."""
        return self._vector(self._ask(self._function.second_derivative, z))

    # ------------------------------------------------------------------------------------------------------- details
    def _ask(self, what: Callable[[Tensor], Tensor], z: Any) -> Tensor:
        point = torch.as_tensor(z).detach()
        if self._seen is None or point.dtype != self._seen.dtype or not torch.equal(point, self._seen):
            self._seen, self._operator = point.clone(), None
            self._matrix = self._expand(self._seen.to(self._context), self._context)
        try:
            return what(self._matrix).detach()
        except Exception as error:
            self.error = error
            raise

    def _linearised(self, matrix: Tensor) -> Operator:
        if self._operator is None:
            self._operator = self._function.linearize(matrix)
        return self._operator

    def _expand(self, z: Tensor, context: Tensor) -> Tensor:
        if self._slot is None:
            return z.reshape(context.shape)
        return context.index_copy(0, torch.tensor([self._slot], device=context.device), z.reshape(1, -1))

    def _vector(self, rows: Tensor) -> Tensor:
        """``(batch, k)`` as the black box wants it."""
        if self._slot is not None:
            return rows[self._slot].clone()
        return rows.reshape(-1).clone() if self._joint else rows.clone()

    def _blocks(self, blocks: Tensor) -> Tensor:
        """``(batch, m, n)`` as the black box wants it."""
        if self._slot is not None:
            return blocks[self._slot].clone()
        return torch.block_diag(*blocks) if self._joint else blocks.clone()
