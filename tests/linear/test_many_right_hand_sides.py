"""Many right-hand sides as one block: few products, one matrix, and nothing taken on trust."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from matrices import randn
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit.foundation import compat
from implicitkit.linear import GMRES, Auto, Operator
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.direct import MANY, refined
from implicitkit.linear.factors.sparse import combined, is_near, solve_with
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.sparsity.compression import coloured

D = torch.float64


class Counted:
    """An operator of given matrices that counts the rows it multiplies."""

    def __init__(self, M: Tensor, **flags: Any) -> None:
        self.rows, self.formed = 0, 0

        def mv(v: Tensor) -> Tensor:
            self.rows += compat.physical(v).numel() // M.shape[1]
            return torch.einsum("bij,bj->bi", M, v)

        def dense() -> Tensor:
            self.formed += 1
            return M

        self.A = Operator(
            mv,
            lambda w: torch.einsum("bij,bi->bj", M, w),
            dense,
            batch=len(M),
            size=M.shape[1],
            like=M[:, :, 0],
            **flags,
        )


def tridiagonal(batch: int, n: int) -> tuple[Tensor, SparseBlocks]:
    bands = [randn(batch, n - abs(d), seed=d + 5) + 5.0 * (d == 0) for d in (-1, 0, 1)]
    M = sum(torch.diag_embed(band, d) for band, d in zip(bands, (-1, 0, 1), strict=True))
    ready = coloured(sp.csr_matrix(M[0].numpy() != 0))
    rows, columns = np.repeat(np.arange(n), np.diff(ready.pattern.indptr)), ready.pattern.indices
    return M, SparseBlocks(ready, M.numpy()[:, rows, columns])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_a_block_of_right_hand_sides_takes_few_products(form: str, batch: int, transposed: bool) -> None:
    M, blocks = tridiagonal(batch, 60)
    if form == "dense":
        blocks = DenseBlocks(M)
    if transposed:
        M, blocks = M.mT, blocks.T
    counted, b = Counted(M), randn(50, batch, 60)
    found = solve_with(blocks, counted.A, b, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(found.x.view(50, batch, 60), torch.linalg.solve(M, b.permute(1, 2, 0)).permute(2, 0, 1))
    assert bool(found.converged.all()) and counted.rows <= 4 * batch


@pytest.mark.parametrize("wrong", ["one entry", "everything"])
def test_matrices_that_are_not_the_operators_are_found_out(wrong: str) -> None:
    """One entry in 60 x 60 that is 1e-7 off must show in a hundred solutions judged to 1e-10."""
    M, blocks = tridiagonal(1, 60)
    if wrong == "one entry":
        M[0, 30, 31] += 1e-7
    else:
        M = M * (1 + 1e-7)
    counted, b = Counted(M), randn(100, 1, 60)
    found = solve_with(blocks, counted.A, b, rtol=1e-10, atol=0.0)
    residual = torch.linalg.vector_norm(found.x @ M[0].T - b[:, 0], dim=1)
    assert bool((residual <= 1e-10 * torch.linalg.vector_norm(b[:, 0], dim=1)).all())
    assert bool(found.converged.all()) and not is_near(counted.A, blocks)


def test_solutions_that_ask_for_nothing_and_bad_ones_disturb_no_other() -> None:
    M, blocks = tridiagonal(1, 60)
    b = randn(MANY + 5, 1, 60)
    b[2], b[4, 0, 7] = 0.0, torch.nan
    counted = Counted(M)
    found = solve_with(blocks, counted.A, b, rtol=1e-10, atol=0.0)
    assert counted.rows <= 4  # the NaN is in no combination
    good = [i for i in range(len(b)) if i != 4]
    torch.testing.assert_close(found.x[good] @ M[0].T, b[good, 0])
    assert found.converged.tolist() == [i != 4 for i in range(len(b))] and int(found.steps[2]) == 0


def test_combinations_weigh_each_solution_of_each_block_by_itself() -> None:
    x, weights, normal = randn(7, 3, 5), randn(7, 3, seed=1), randn(4, 7, seed=2)
    torch.testing.assert_close(combined(x, weights, normal), torch.einsum("jk,kb,kbn->jbn", normal, weights, x))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("wrong", ["nothing", "a column", "a digit of all", "a NaN"])
def test_a_crowd_of_residuals_is_judged_by_a_few_combinations(wrong: str, batch: int) -> None:
    """One of 100 solutions that is off by 3e-9 must show, and be mended, where 1e-9 is asked."""
    M, b = randn(batch, 40, 40, seed=3) + 10 * torch.eye(40, dtype=D), randn(batch, 40, 100, seed=4)
    b = b / torch.linalg.vector_norm(b, dim=1, keepdim=True)
    columns: list[int] = []

    def product(x: Tensor) -> Tensor:
        columns.append(x.shape[2])
        return M @ x

    def inverse(r: Tensor) -> Tensor:
        x = torch.linalg.solve(M, r)
        if wrong == "a column" and len(columns) == 0:
            x[-1, :, 70] += torch.linalg.solve(M[-1], 3e-9 * b[-1, :, 0])
        if wrong == "a digit of all":
            x = x * (1 + 2e-9)
        if wrong == "a NaN":
            x[-1, 3, 70] = torch.nan
        return x

    ok, target = torch.ones(batch, dtype=torch.bool), torch.full((batch, 100), 1e-9, dtype=D)
    if wrong == "a column":
        target[:, :70] = 1e-5  # the others need not be so exact
    found = refined(inverse, product, b, target, lambda x: 1e-15 + 0 * x[:, 0], ok, "", by_combinations=True)
    residual = torch.linalg.vector_norm(M @ found.x.view(100, batch, 40).permute(1, 2, 0) - b, dim=1).T.reshape(-1)
    bad = torch.zeros(100 * batch, dtype=torch.bool)
    bad[70 * batch + batch - 1] = wrong == "a NaN"
    limit = target.T.reshape(-1)[~bad]
    assert bool((residual[~bad] <= limit).all()) and bool((found.residual_norm[~bad] <= limit).all())
    assert torch.equal(found.converged, ~bad)
    assert (sum(columns) == 8) == (wrong == "nothing")


def test_factors_of_another_point_do_not_serve_a_whole_jacobian() -> None:
    """For many right-hand sides a matrix of one's own is cheaper than refinement with old factors."""
    M, _ = tridiagonal(1, 100)
    old = DenseBlocks(M * 1.1 + 0.01 * randn(1, 100, 100))
    counted = Counted(M)
    counted.A.known = old
    found = Auto().solve_many(counted.A, randn(100, 1, 100), rtol=1e-10, atol=0.0, max_steps=None)
    assert bool(found.converged.all()) and counted.formed == 1 and counted.rows <= 2
    counted = Counted(M)
    counted.A.known = DenseBlocks(M)  # of this very matrix: nothing is formed
    found = Auto().solve_many(counted.A, randn(100, 1, 100), rtol=1e-10, atol=0.0, max_steps=None)
    assert bool(found.converged.all()) and counted.formed == 0 and counted.rows <= 12


def test_many_right_hand_sides_of_a_fixed_point_map_are_worth_a_matrix() -> None:
    M = 0.4 * randn(1, 400, 400) / 20 - torch.eye(400, dtype=D)
    few, many = Counted(M, fixed_point=True), Counted(M, fixed_point=True)
    assert bool(Auto().solve_many(few.A, randn(3, 1, 400), rtol=1e-9, atol=0.0, max_steps=None).converged.all())
    found = Auto().solve_many(many.A, randn(100, 1, 400), rtol=1e-9, atol=0.0, max_steps=None)
    assert few.formed == 0 and many.formed == 1 and bool(found.converged.all())


@pytest.mark.parametrize(("batch", "n", "direct"), [(1, 100, True), (1, 200, True), (64, 100, False), (1, 400, False)])
def test_one_small_fixed_point_map_is_factored(batch: int, n: int, direct: bool) -> None:
    """A few hundred unknowns of one sample: its factors cost less than a Krylov method's twenty small operations."""
    M = 0.4 * randn(1, n, n) / n**0.5 - torch.eye(n, dtype=D)
    counted = Counted(M.expand(batch, n, n), fixed_point=True)
    found = Auto().solve(counted.A, randn(batch, n), rtol=1e-9, atol=0.0, max_steps=None)
    assert bool(found.converged.all()) and counted.formed == int(direct)


def test_a_singular_fixed_point_map_is_left_to_a_krylov_method() -> None:
    """``I - J`` is singular and the system consistent (a map with a line of fixed points): no LU, but a solution."""
    M = 0.4 * randn(1, 100, 100) / 10 - torch.eye(100, dtype=D)
    M[:, :, 0] = 0.0
    b = (M @ randn(1, 100, 1)).squeeze(2)
    found = Auto().solve(Counted(M, fixed_point=True).A, b, rtol=1e-9, atol=0.0, max_steps=None)
    assert bool(found.converged.all())
    torch.testing.assert_close((M @ found.x.unsqueeze(2)).squeeze(2), b)


N = 3000
LINE = torch.linspace(0.5, 1.5, N, dtype=D)


def chain(z: Tensor, p: Tensor) -> Tensor:
    ends = torch.nn.functional.pad(z, (1, 1))
    return 2.5 * z - 0.7 * ends[2:] - 0.9 * ends[:-2] + p[0] * z**3 - p[1] * LINE


def contraction(z: Tensor, p: Tensor) -> Tensor:
    return torch.tanh(0.3 * p[0] * z.roll(1) - 0.2 * z.roll(-2) + p[1] * LINE)


P, ROWS = torch.tensor([0.7, 1.1], dtype=D), randn(20, N)


def _looped(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    z = f(p)
    return torch.stack([torch.autograd.grad(z, p, row, retain_graph=True)[0] for row in ROWS])


def _grads_batched(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    return torch.autograd.grad(f(p), p, ROWS, is_grads_batched=True)[0]


def _vmapped(f: Callable[[Tensor], Tensor]) -> Tensor:
    _, pull = vjp(f, P)
    return vmap(lambda row: pull(row)[0])(ROWS)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "is_grads_batched": _grads_batched,
    "vmap of vjp": _vmapped,
    "jacrev": lambda f: jacrev(lambda p: ROWS @ f(p))(P),
    "jacfwd": lambda f: jacfwd(lambda p: ROWS @ f(p))(P),
    "vectorised": lambda f: torch.autograd.functional.jacobian(lambda p: ROWS @ f(p), P, vectorize=True),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("verb", "function", "linear"),
    [
        (ik.root, chain, "auto"),
        (ik.root, chain, "sparse_lu"),
        (ik.root, chain, "gmres"),
        (ik.fixed_point, contraction, "auto"),
        (ik.fixed_point, contraction, "bicgstab"),
    ],
    ids=["root auto", "root sparse_lu", "root gmres", "map auto", "map bicgstab"],
)
def test_a_large_system_has_all_its_derivatives_at_once(way: str, verb: Any, function: Any, linear: str) -> None:
    """3,000 unknowns: no dense matrix, in particular not for batched gradients."""
    rule = ik.Implicit(linear_solver=linear, rtol=1e-12)
    f = lambda p: verb(function, torch.zeros(N, dtype=D), (p,), rule=rule, rtol=1e-12, on_failure="warn").value  # noqa: E731
    torch.testing.assert_close(WAYS[way](f), _looped(f), rtol=1e-8, atol=1e-9)


def test_right_hand_sides_are_taken_in_parts_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from implicitkit.linear import base

    sizes: list[int] = []

    class Watched(GMRES):
        def solve(self, A: Operator, b: Tensor, **keywords: Any) -> Any:
            sizes.append(len(b))
            return super().solve(A, b, **keywords)

    M, _ = tridiagonal(2, 60)
    b = randn(10, 2, 60)
    whole = Watched().solve_many(Counted(M).A, b, rtol=1e-10, atol=0.0, max_steps=None)
    monkeypatch.setattr(base, "_NUMBERS", 3 * 2 * 60 * 50)
    parts = Watched().solve_many(Counted(M).A, b, rtol=1e-10, atol=0.0, max_steps=None)
    assert sizes == [20, 6, 6, 6, 2]
    torch.testing.assert_close(parts.x, whole.x)
    assert parts.converged.shape == (20,) and parts.residual_norm.shape == (20,) and parts.steps.shape == (20,)


class Work(TorchDispatchMode):
    """What is done with matrices of ``n`` rows and more: factorisations, and vectors that they are multiplied by."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.factored, self.columns = n, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.factored += name == "linalg_lu_factor_ex" and args[0].shape[-1] >= self.n
        if name in ("mm", "bmm") and min(args[0].shape[-1], args[1].shape[-2]) >= self.n:
            shape = args[0].shape[-2], args[1].shape[-1]
            self.columns += min(shape) if max(shape) >= self.n else 0
        return function(*args, **(kwargs or {}))


SIZE = 140
MIX = torch.eye(SIZE, dtype=D) + 0.5 * randn(SIZE, SIZE) / SIZE**0.5
HALF = torch.full((SIZE,), 0.5, dtype=D)


def bent(power: int, x: Tensor) -> Tensor:
    return ik.root(lambda z, x: MIX @ z + 0.01 * z**power - x, 0 * HALF, (x,)).value


def in_chunks(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return jacrev(f, chunk_size=SIZE // 2)


@pytest.mark.parametrize(
    ("derivative", "power", "factored", "columns"),
    [(jacrev, 3, 2, 60), (jacfwd, 3, 2, 60), (in_chunks, 3, 2, 90), (jacrev, 1, 1, 60), (jacfwd, 1, 1, 60)],
)
def test_a_whole_jacobian_is_one_matrix_factored_once(
    derivative: Callable[..., Any], power: int, factored: int, columns: int
) -> None:
    """Newton's method takes one, and the derivative one at the solution, unless they are the same; what serves one chunk
    serves the next, and no column is multiplied by the matrix to be judged."""
    derivative(lambda x: bent(power, x))(HALF)
    with Work(SIZE) as work:
        found = derivative(lambda x: bent(power, x))(HALF)
    z = bent(power, HALF)
    torch.testing.assert_close(found, torch.linalg.inv(MIX + torch.diag(0.01 * power * z ** (power - 1))))
    assert (work.factored, work.columns <= columns) == (factored, True), work.columns


def test_a_hessian_takes_the_factors_of_its_gradient() -> None:
    def loss(s: Tensor) -> Tensor:
        return bent(3, HALF * s.sum()).square().sum()

    with Work(SIZE) as gradient:
        jacfwd(lambda s: bent(3, HALF * s.sum()))(torch.full((9,), 0.1, dtype=D))
    with Work(SIZE) as work:
        found = hessian(loss)(torch.full((9,), 0.1, dtype=D))
    assert work.factored == gradient.factored
    torch.testing.assert_close(found, found[0, 0].expand(9, 9))
