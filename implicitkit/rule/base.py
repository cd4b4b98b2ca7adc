"""What a rule is: how the derivative of a solution is formed."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation.options import Configured
from implicitkit.foundation.wording import kind_of
from implicitkit.problem.kind import Kind
from implicitkit.rule.request import Request


class Rule(Configured):
    r"""How the derivative is formed.

    :meth:`attach` returns the packed solution, differentiable by the rule, and the figures of the solve.
    ``needs`` names the problem kinds it is made for (empty: all).  ``exact = False`` says that it is an approximation of the
    derivative by intention (:func:`implicitkit.testing.check_rule` then asks for its direction only).

    With ``A = dF/dz`` at the solution every rule stands for ``dz/d\theta = -A^{-1} dF/d\theta`` or for an approximation
    of ``A^{-1}``.  Shapes: the packed solution is ``(batch, n)``, the adjoint ``u`` of ``A^T u = g`` likewise, sample by
    sample.  Units: those of ``z`` by those of ``\theta``; options are dimensionless.

    Raises (when differentiated): :class:`~implicitkit.ConvergenceError` where the linear solve of the derivative fails;
        (when solved) :class:`~implicitkit.CapabilityError` for a kind of problem that it is not made for.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = True

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """``(z, stats)``: ``(batch, n)``, and what :meth:`Request.solve` returned beside it."""
        raise NotImplementedError(f"{type(self).__name__} must define attach(request)")

    def attached(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """What :meth:`attach` returns, looked at.

        Raises:
            TypeError: it is not the pair of a point like ``request.z0`` and figures.
        """
        found: Any = self.attach(request)
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
            if request.z0 is None or found[0].shape == request.z0.shape:
                return found
            got = f"z of shape {tuple(found[0].shape)} where the start has {tuple(request.z0.shape)}"
        else:
            got = f"a tuple of {len(found)}" if isinstance(found, tuple) else kind_of(found)
        raise TypeError(
            f"{type(self).__name__}.attach must return a pair, z and the figures of the solve: what "
            f"request.solve(linear_solver) returns, or (request.unroll(steps), None); it returned {got}"
        )

    def solver_for(self, kind: Kind) -> str | None:
        """The solver that ``solver="auto"`` stands for under this rule; ``None``: what fits the problem."""
        return None
