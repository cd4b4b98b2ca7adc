"""What the checks of linear solvers are given: matrices that are known by their products, and right-hand sides."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.claims import check_answer
from implicitkit.registry.table import TABLES
from implicitkit.testing.known import spend
from implicitkit.testing.rules import RuleSubject


class Products:
    """Blocks ``(batch, n, n)`` as an operator, which counts products and may refuse to form its matrix.

    ``error``: what is raised in place of an answer.
    """

    def __init__(
        self,
        M: Tensor,
        *,
        symmetric: bool,
        fixed_point: bool,
        formed: bool = True,
        error: BaseException | None = None,
    ) -> None:
        self.M, self.formed, self.count, self.error = M, formed, 0, error
        how: dict[str, Any] = {"symmetric": symmetric, "fixed_point": fixed_point}
        how |= {"batch": len(M), "size": M.shape[1], "like": M[:, 0]}
        self.operator = Operator(self._times(M), self._times(M.mT), self._dense, **how)

    def _times(self, M: Tensor) -> Callable[[Tensor], Tensor]:
        def product(v: Tensor) -> Tensor:
            spend("products were taken with the matrix")
            self.count += 1
            if self.error is not None:
                raise self.error
            return (M @ v.unsqueeze(-1)).squeeze(-1)

        return product

    def _dense(self) -> Tensor:
        if self.error is not None:
            raise self.error
        assert self.formed, "the matrix is formed, A.dense(), which large systems cannot afford"
        return self.M


@dataclass(frozen=True)
class LinearSubject:
    """A linear solver under test.

    Attributes:
        part: the configured object. accuracy: the tightest ``rtol`` that is asked of it in float64.
    """

    part: Any
    accuracy: float

    @property
    def symmetric(self) -> bool:
        """Is it for symmetric matrices only?"""
        return "symmetric" in self.part.needs

    @property
    def fixed_point(self) -> bool:
        """Is it for ``J - I`` of a contraction only?"""
        return "fixed_point" in self.part.needs

    def matrices(self, batch: int = 3, n: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
        """Blocks of condition 4 at most with the structure that the solver needs, not symmetric unless it needs that."""
        generator = torch.Generator("cpu").manual_seed(0)
        E = torch.randn(batch, n, n, generator=generator, dtype=torch.float64, device="cpu")
        E = (E + E.mT) if self.symmetric else E
        E = 0.5 * E / torch.linalg.matrix_norm(E, 2)[:, None, None]
        eye = torch.eye(n, dtype=torch.float64, device="cpu")
        return ((E - eye) if self.fixed_point else 2 * (eye + E)).to(dtype)

    def right_sides(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random vectors, always the same."""
        generator = torch.Generator("cpu").manual_seed(1)
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)

    def products(self, M: Tensor, **how: Any) -> Products:
        """Blocks as an operator that counts."""
        return Products(M, symmetric=self.symmetric, fixed_point=self.fixed_point, **how)

    def solve(self, M: Tensor, b: Tensor, **options: Any) -> Any:
        """What it says of ``M x = b``, or of as many right-hand sides as ``b`` has in front."""
        return self.answer(self.products(M).operator, b, **options)

    def answer(self, A: Operator, b: Tensor, **options: Any) -> Any:
        """What it says of ``A x = b``, with its shapes looked at."""
        eps = torch.finfo(b.dtype).eps
        rtol = self.accuracy if b.dtype == torch.float64 else max(self.accuracy, eps ** (2 / 3))
        limits = {"rtol": rtol, "atol": 0.0, "max_steps": None} | options
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it cannot solve may be warned of
            found = (self.part.solve if b.ndim == 2 else self.part.solve_many)(A, b, **limits)
        check_answer(self.part, found, b.flatten(0, -2))
        if found.steps.is_floating_point():
            raise TypeError(f"steps are whole numbers, torch.int64; it returned {found.steps.dtype}")
        if found.x.dtype != b.dtype:
            raise TypeError(f"x is of the dtype of b, {b.dtype}; it returned {found.x.dtype}")
        return found

    def example(self) -> Tensor:
        """Right-hand sides."""
        return self.right_sides(3, 5)

    def act(self, b: Tensor) -> Tensor:
        """The solutions."""
        return self.solve(self.matrices(), b).x

    def rule(self) -> RuleSubject:
        """The implicit rule with this linear solver."""
        entry = TABLES["rules"].find("implicit").target
        kinds = ("fixed_point",) if self.fixed_point else ("argmin",) if self.symmetric else ("root", "argmin")
        rule = entry(linear_solver=self.part, rtol=self.accuracy)
        return RuleSubject(rule, self.accuracy, kinds=kinds)
