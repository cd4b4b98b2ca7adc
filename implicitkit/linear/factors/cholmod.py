"""Cholesky factors of sparse matrices by CHOLMOD, from cvxopt, by name (:mod:`implicitkit.linear.factors.definite`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import scipy.sparse as sp

from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.definite import definite_factors
from implicitkit.linear.factors.sparse_elsewhere import FactorsElsewhere

__all__ = ["Cholmod"]


@register_linear_solver("cholmod")
@dataclass(frozen=True)
class Cholmod(FactorsElsewhere):
    """Sparse Cholesky by CHOLMOD, for symmetric definite blocks: minima, diffusion (``pip install "implicitkit[cholmod]"``).

    Equation: ``P D^{-1/2} A D^{-1/2} P' = L L'``.  A block that is not definite is marked as not converged.
    Source: Chen, Davis, Hager & Rajamanickam (2008), "Algorithm 887: CHOLMOD".
    """

    needs: ClassVar[tuple[str, ...]] = ("symmetric",)
    package: ClassVar[str] = "cvxopt"
    module: ClassVar[str] = "cvxopt.cholmod"
    failure: ClassVar[str] = (
        'the matrix is not definite (a saddle point or a maximum), or singular; use linear_solver="sparse_lu"'
    )

    def factorise(self, A: sp.csc_matrix) -> Any:
        return definite_factors(A)
