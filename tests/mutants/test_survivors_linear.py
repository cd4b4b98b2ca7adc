"""What mutants survived before: linear algebra that is seldom reached, each by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.linear import GMRES, BlockSubstitution
from implicitkit.linear.factors.ordering import Ordering
from implicitkit.sets.spectral import positive_part
from implicitkit.sparsity.colouring import _greedy

D = torch.float64


def _operator(M: Tensor, structure: Any = None) -> Operator:
    """Of one matrix."""
    return Operator(
        lambda v: v @ M.mT,
        lambda w: w @ M,
        lambda: M.unsqueeze(0),
        batch=1,
        size=len(M),
        like=M[:1],
        structure=structure,
    )


def test_linear_products_of_a_function_whose_gradient_is_a_constant() -> None:
    """The gradient of ``sign`` is zero whatever it is multiplied by: no graph leads through it."""
    z, v = torch.tensor([[0.5, -2.0]], dtype=D), torch.ones(1, 2, dtype=D)
    mv, rmv = autodiff.rectangular(torch.sign, z)
    assert torch.equal(mv(v), torch.zeros_like(v)) and torch.equal(rmv(v), torch.zeros_like(v))


def test_gmres_ends_where_its_space_does() -> None:
    """``A b = 0``: the space of ``b`` has one dimension, whatever the size of ``A``."""
    A = torch.diag(torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=D))
    answer = GMRES().solve(_operator(A), torch.eye(4, dtype=D)[:1], rtol=1e-6, atol=0.0, max_steps=None)
    assert answer.steps.tolist() == [1]
    assert torch.equal(answer.x, torch.zeros(1, 4, dtype=D)) and not bool(answer.converged)


def test_gmres_takes_no_step_along_rounding() -> None:
    """``x_1 = 1`` and ``0 x_2 = 1``: in the plane of ``b`` and ``A b`` nothing says what ``x_2`` is, and it is not 1e15."""
    A, b = torch.diag(torch.tensor([1.0, 0.0], dtype=D)), torch.ones(1, 2, dtype=D)
    answer = GMRES().solve(_operator(A), b, rtol=1e-6, atol=0.0, max_steps=None)
    assert float(answer.x[0, 0]) == pytest.approx(1)
    assert float(answer.x[0, 1].abs()) < 10
    assert float(answer.residual_norm) == pytest.approx(1) and not bool(answer.converged)


def test_linear_order_of_another_pattern_with_as_many_entries_in_each_column() -> None:
    """Unknowns in pairs, (0, 1) and (2, 3), then (0, 2) and (1, 3)."""
    ordering, b = Ordering(), np.arange(1.0, 5.0)
    for pairs in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]):
        A = 4 * np.eye(4)
        for i, j in pairs:
            A[i, j], A[j, i] = 1 + i, 2 + j
        solved = ordering.factor(sp.csc_matrix(A), 0.1).solve(b)
        np.testing.assert_allclose(A @ solved, b, rtol=1e-13)


class _Pair:
    """``[[A, 0], [C, B]]`` by its blocks."""

    unsolved: frozenset[str] = frozenset()

    def __init__(self, A: Tensor, B: Tensor, C: Tensor) -> None:
        self.blocks, self.C, self.n = (A, B), C, len(A)

    def __len__(self) -> int:
        return 2

    def name(self, i: int) -> str:
        return "AB"[i]

    def solved(self, i: int) -> bool:
        return True

    def explicit(self, i: int) -> bool:
        return False

    def take(self, i: int, b: Tensor) -> Tensor:
        return b[:, self.n :] if i else b[:, : self.n]

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)

    def diagonal(self, i: int) -> Operator:
        return _operator(self.blocks[i])

    def couple(self, i: int, x: Tensor) -> dict[int, Tensor]:
        return {} if i else {1: x @ self.C.mT}

    def whole(self) -> Tensor:
        A, B = self.blocks
        return torch.cat([torch.cat([A, torch.zeros_like(self.C.mT)], 1), torch.cat([self.C, B], 1)])


def test_linear_blocks_report_the_residual_of_the_whole() -> None:
    """One step for each of two blocks leaves a residual in both, ``|b - M x|^2 = |r_1|^2 + |r_2|^2``."""
    pair = _Pair(
        torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=D),
        torch.tensor([[1.0, 0.5], [-0.5, 3.0]], dtype=D),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D),
    )
    M, b = pair.whole(), torch.tensor([[1.0, 2.0, 2.0, 1.0]], dtype=D)
    answer = BlockSubstitution(GMRES()).solve(_operator(M, pair), b, rtol=1e-9, atol=0.0, max_steps=1)
    left = b - answer.x @ M.mT
    assert float(left[:, :2].norm()) > 0.1 and float(left[:, 2:].norm()) > 0.1
    assert float(answer.residual_norm) == pytest.approx(float(left.norm()), rel=1e-12)
    assert answer.steps.tolist() == [2] and not bool(answer.converged)


def test_gradient_of_the_positive_part_where_factors_do_not_commute() -> None:
    """Divided differences of ``max(t, 0)`` at 2 and -1: ``(2 - 0) / (2 + 1)`` (Daleckii & Krein)."""
    X = torch.diag(torch.tensor([2.0, -1.0], dtype=D)).requires_grad_()
    G = torch.tensor([[3.0, 1.0], [1.0, 5.0]], dtype=D)
    (got,) = torch.autograd.grad(positive_part(X), X, G)
    torch.testing.assert_close(got, torch.tensor([[3.0, 2 / 3], [2 / 3, 0.0]], dtype=D), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_coloured_as_one_after_the_other_would_be(seed: int) -> None:
    """Whole waves of columns at once, each column when all before it have their colours: no colour more than by turns."""
    pattern = sp.random(90, 60, density=0.05, random_state=seed, format="csr").astype(bool)
    near = (pattern.T.astype(int) @ pattern.astype(int)).toarray() > 0
    np.fill_diagonal(near, False)
    order = np.lexsort((np.random.default_rng(0).permutation(60), -near.sum(1)))
    colours = np.full(60, -1)
    for column in order:
        colours[column] = next(c for c in range(60) if c not in colours[near[column]])
    np.testing.assert_array_equal(_greedy(pattern), colours)
