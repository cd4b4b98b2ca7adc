"""What a linear solver is given, and what it gives back.

Every derivative of a solution is the solution of a linear system with the Jacobian of the residual,
``A u = b`` with ``A = dF/dz`` or its transpose, one independent block per sample.  A linear solver sees
that system as an :class:`Operator` and plain ``(batch, n)`` matrices: no pytrees, no autograd, no transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator, repeated
from implicitkit.foundation.options import Configured

__all__ = ["LinearSolution", "LinearSolver", "Operator"]

_NUMBERS = 1 << 27  # held at once for many right-hand sides (1 GB in double precision)
_BASIS = 50  # vectors that a method may need for each


class LinearSolution(NamedTuple):
    """The answer of a linear solver, one entry per sample.

    ``x``: ``(batch, n)``.  ``residual_norm``: ``(batch,)``, ``|A x - b|_2``.  ``steps``: ``(batch,)`` int64, products
    with ``A`` or ``A^T`` that the sample needed.  ``converged``: ``(batch,)`` bool.  ``reason``: one clause for people,
    used when something did not converge ("the matrix is singular", "stagnated after 20 restarts").
    ``doubt``: a sentence for a warning where something converged in the sense of least squares only.  ``error``: what to
    raise, whatever ``on_failure`` says, told the samples that have failed: there the solution has no derivative.

    Units: ``x`` as the unknowns, ``residual_norm`` as ``b``.
    """

    x: Tensor
    residual_norm: Tensor
    steps: Tensor
    converged: Tensor
    reason: str = ""
    doubt: str = ""
    error: Callable[[tuple[int, ...]], Exception] | None = None


@dataclass(frozen=True)
class LinearSolver(Configured):
    """Base class of linear solvers: a frozen dataclass of options with one method, :meth:`solve`.

    ``needs`` names the structure the method relies on: ``"symmetric"`` or ``"fixed_point"``.  An approximate
    method (``exact = False``: a truncated series) is not judged by its residual.

    Shapes: ``b`` and ``x`` are ``(batch, n)``, ``A`` is ``batch`` blocks ``n x n``.  Units: ``x`` has those of ``b`` by
    those of ``A``; ``rtol`` is relative to ``|b|`` and dimensionless, ``atol`` has the units of ``b``.

    Raises: nothing for the values of ``A`` and ``b`` (a sample that fails is marked); :class:`~implicitkit.CapabilityError`
        (from the solve) where ``A`` has not the structure in ``needs``.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = True
    matrix_free: ClassVar[bool] = True
    preconditions: ClassVar[bool] = False  # it uses A.preconditioner
    factors: ClassVar[bool] = False  # one factorisation serves many right-hand sides, in solve_many
    has_units: ClassVar[bool] = False  # what it finds depends on the units of the unknowns: a solution of least norm

    @property
    def checks_itself(self) -> bool:
        """Does it call converged only what products with ``A`` bear out?  What others say is judged by one product more."""
        return type(self).__module__.partition(".")[0] == "implicitkit"

    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        """Solve ``A x = b``; per sample ``|A x - b| <= atol + rtol |b|``.

        Args:
            A: the operator. b: shape ``(batch, n)``.
            rtol, atol: tolerances per sample. max_steps: products allowed; ``None`` is the method's own default.

        A sample that fails (singular block, NaN) must not disturb the others, and nothing is raised for it: it is
        marked in ``converged``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solve method")

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        """Solve for ``b`` of shape ``(k, batch, n)``: ``k`` right-hand sides of every block.

        The solution has ``k * batch`` rows, the blocks running fastest.  A direct method factors once; by default the
        blocks are repeated, as many at a time as leave room for a Krylov basis.
        """
        answers = []
        for part in b.split(max(1, _NUMBERS // max(1, _BASIS * A.batch * A.size))):
            many = A if len(part) == 1 else repeated(A, len(part))
            answers.append(self.solve(many, part.flatten(0, 1), rtol=rtol, atol=atol, max_steps=max_steps))
        if len(answers) == 1:
            return answers[0]
        x, residual_norm, steps, converged = (torch.cat(tensors) for tensors in list(zip(*answers, strict=True))[:4])
        rest = (
            next((said for said in all_said if said), all_said[0]) for all_said in list(zip(*answers, strict=True))[4:]
        )
        return LinearSolution(x, residual_norm, steps, converged, *rest)
