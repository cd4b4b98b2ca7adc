"""Factors that are kept from one solve to the next, for sequences of systems that change little."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options


class Stale:
    """A preconditioner that remembers: the factors of the last matrix, until they stop paying.

        keep = ik.linear.Stale()
        for x, y in data:
            z = ik.root(residual, z0, (x, theta), solver=ik.NewtonKrylov(preconditioner=keep),
                        rule=ik.Implicit(preconditioner=keep)).value

    The first system is factored (sparse where the Jacobian has a pattern, else dense).  Later ones, of the same shape, use
    these factors as a preconditioner; once one system has taken more than ``products`` products with them, the next one is
    factored again.  Solutions and derivatives do not depend on it, only how many products they take.

    With the old factors ``M = L U`` the system ``M^{-1} A u = M^{-1} b`` is solved.  Dimensionless but for ``A`` itself.
    Source: Knoll & Keyes (2004), "Jacobian-free Newton-Krylov methods", section 3, on lagged preconditioners.

    One object serves one loop: solver and derivative may share it, different problems should not.

    Args:
        products: that one system may take with old factors.

    Attributes:
        factorisations: how many have been made.

    Raises:
        ValueError: ``products`` is out of range.
    """

    def __init__(self, products: int = 20) -> None:
        self.products = products
        check_options(self, products=at_least(1))
        self.factorisations = 0
        self._held: Any = None
        self._shape: tuple[int, ...] = ()
        self._used = 0

    def __repr__(self) -> str:
        return f"Stale(products={self.products})"

    def factors(self, A: Operator) -> Any:
        """The factors to be used for ``A``, with ``solve`` and ``T``."""
        shape = A.batch, A.size
        if self._held is None or self._shape != shape or self._used > self.products:
            from implicitkit.linear.factors.dense_blocks import DenseBlocks

            blocks = A.sparse()
            self._held = DenseBlocks(A.dense()) if blocks is None else blocks
            self._shape = shape
            self.factorisations += 1
        self._used = 0
        return _Counted(self, self._held)


class _Counted:
    """Factors whose uses are counted."""

    def __init__(self, owner: Stale, held: Any) -> None:
        self.owner, self.counted = owner, held

    @property
    def T(self) -> _Counted:
        """The transposed."""
        return _Counted(self.owner, self.counted.T)

    def solve(self, b: Tensor) -> Tensor:
        """``M^{-1} b``."""
        self.owner._used += 1
        found: Tensor = self.counted.solve(b)
        return found
