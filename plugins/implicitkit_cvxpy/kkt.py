r"""The linear systems of derivatives: ``J u = g`` and ``J'u = g`` with the KKT matrix, and what to do where it is singular.

They are solved as those of any other constrained problem (:class:`implicitkit.extend.KKT`): LU where they are small, one
Cholesky factor of an ``n x n`` matrix for quadratic programs, sparse factors of sparse programs, and where the matrix is
singular the policy that was asked for, which here names the samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

import implicitkit as ik
from implicitkit import extend

__all__ = ["ConeKKT", "DegenerateError"]

_RTOL = 1e-9


class DegenerateError(ik.ConvergenceError):
    """The solution is not a differentiable function of the parameters at some sample (under ``degenerate="raise"``)."""


@ik.register_linear_solver("cone_kkt")
@dataclass(frozen=True)
class ConeKKT(ik.LinearSolver):
    """Direct solution of KKT systems, with a policy for singular ones.

    A sample whose right-hand side is zero has the answer zero, whatever its matrix.

    Source: Agrawal, Barratt, Boyd, Busseti & Moursi (2019), "Differentiating through a cone program".

    Args:
        degenerate: ``"lstsq"`` (and ``"smooth"``, whose matrices are regular): the minimum-norm least-squares solution
            where the matrix is singular; ``"raise"``: :class:`DegenerateError`, which names the samples.
    """

    degenerate: str = "lstsq"
    _solver: extend.KKT = field(init=False, repr=False, compare=False)
    _of_sparse: extend.KKT = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        extend.check_degenerate(self.degenerate)
        policy = "raise" if self.degenerate == "raise" else "lstsq"
        object.__setattr__(self, "_solver", extend.KKT(policy, dense_size=2**31))
        object.__setattr__(self, "_of_sparse", extend.KKT(policy))

    def solve(
        self, A: ik.extend.Operator, b: Tensor, *, rtol: float = _RTOL, atol: float = 0.0, max_steps: int | None = None
    ) -> ik.extend.LinearSolution:
        solver = self._solver if A.sparse() is None else self._of_sparse
        found = solver.solve(A, b, rtol=max(rtol, _RTOL), atol=atol, max_steps=max_steps)
        if self.degenerate == "raise" and not bool(found.converged.all()):
            names = (~found.converged).nonzero().squeeze(1).tolist()
            listed = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
            raise DegenerateError(
                f"the solution of sample(s) {listed} is not differentiable: {extend.SINGULAR}", None, tuple(names)
            )
        return found

    def answer(self, A: ik.extend.Operator, b: Tensor) -> Tensor:
        """The solution alone, ``(batch, n)``."""
        return self.solve(A, b).x
