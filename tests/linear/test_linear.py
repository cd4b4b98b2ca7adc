"""Linear solvers against torch.linalg: every method, the shapes that break things, and what is said on failure."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import operator, randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit.linear import (
    CG,
    GMRES,
    LSMR,
    LU,
    Auto,
    BiCGStab,
    BroydenLinear,
    DampedSeries,
    LinearSolver,
    NeumannSeries,
    Operator,
    factor_batched,
    lstsq_batched,
    solve_batched,
)

ROOT = Path(__file__).parents[2]
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
GENERAL: dict[str, LinearSolver] = {
    "lu": LU(),
    "gmres": GMRES(),
    "bicgstab": BiCGStab(),
    "lsmr": LSMR(),
    "broyden": BroydenLinear(),
}
EVERY = {**GENERAL, "cg": CG(), "neumann": NeumannSeries()}


def with_spectrum(batch: int, n: int, condition: float, *, symmetric: bool = False) -> Tensor:
    """Blocks with singular values (eigenvalues) from 1 to 1 / condition."""
    left = torch.linalg.qr(randn(batch, n, n, seed=1))[0]
    right = left if symmetric else torch.linalg.qr(randn(batch, n, n, seed=2))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
    blocks: Tensor = left * values @ right.mT
    return blocks


def contraction(batch: int, n: int, radius: float = 0.9) -> Tensor:
    """``J - I`` with the spectral radius of ``J`` given."""
    J = randn(batch, n, n, seed=3)
    J = J * (radius / torch.linalg.eigvals(J).abs().amax(dim=1))[:, None, None] if batch else J
    return J - torch.eye(n, dtype=J.dtype)


def structured(name: str, batch: int, n: int) -> tuple[Tensor, dict[str, bool]]:
    """A well-conditioned system that the method is made for."""
    if name == "cg":
        return with_spectrum(batch, n, 30.0, symmetric=True), {"symmetric": True}
    return contraction(batch, n, 0.7), {"fixed_point": True}


def solve(solver: LinearSolver, A: Operator, b: Tensor, rtol: float = 1e-10, atol: float = 0.0, **kw: Any) -> Any:
    with torch.no_grad():
        return solver.solve(A, b, rtol=rtol, atol=atol, **{"max_steps": None, **kw})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", RTOL, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("batch", "n"), [(0, 3), (1, 1), (5, 1), (1, 7), (16, 20), (3, 110)], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_solves(name: str, batch: int, n: int, dtype: torch.dtype) -> None:
    M, flags = structured(name, batch, n)
    M, b = M.to(dtype), randn(batch, n, seed=5).to(dtype)
    found = solve(EVERY[name], operator(M, **flags), b, rtol=RTOL[dtype])
    assert found.x.dtype == dtype
    assert found.x.shape == (batch, n)
    assert found.steps.dtype == torch.int64
    assert found.residual_norm.shape == found.converged.shape == found.steps.shape == (batch,)
    assert found.converged.all(), found.reason
    assert found.reason == ""
    exact = torch.stack([torch.linalg.solve(m.double(), r.double()) for m, r in zip(M, b, strict=True)]) if batch else b
    scale = exact.norm(dim=1, keepdim=True) if batch else 1
    assert ((found.x - exact).abs() <= 60 * RTOL[dtype] * scale).all()


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5], ids="cond={:g}".format)
@pytest.mark.parametrize("name", ["lu", "gmres", "lsmr", "cg"])
def test_conditioning(name: str, condition: float) -> None:
    """To a residual of 1e-8 in float64, with products enough."""
    M = with_spectrum(4, 30, condition, symmetric=name == "cg")
    x = randn(4, 30, seed=6)
    b = torch.einsum("bij,bj->bi", M, x)
    found = solve(EVERY[name], operator(M, symmetric=name == "cg"), b, rtol=1e-8, max_steps=20000)
    assert found.converged.all(), found.reason
    assert (torch.einsum("bij,bj->bi", M, found.x) - b).norm(dim=1).le(1.01e-8 * b.norm(dim=1)).all()


@pytest.mark.parametrize("name", GENERAL)
def test_transposed_operator(name: str) -> None:
    M, b = contraction(4, 9, 0.6), randn(4, 9)
    A = operator(M, fixed_point=True).T
    found = solve(GENERAL[name], A, b)
    assert found.converged.all(), found.reason
    torch.testing.assert_close(found.x, torch.linalg.solve(M.mT, b), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", EVERY)
def test_answer_does_not_depend_on_neighbours(name: str) -> None:
    M, flags = structured(name, 6, 12)
    b = randn(6, 12) * torch.logspace(-3, 3, 6, dtype=torch.float64)[:, None]
    whole = solve(EVERY[name], operator(M, **flags), b)
    for i in range(6):
        alone = solve(EVERY[name], operator(M[i : i + 1], **flags), b[i : i + 1])
        torch.testing.assert_close(whole.x[i], alone.x[0], rtol=1e-9, atol=1e-12)
        assert abs(int(whole.steps[i] - alone.steps[0])) <= 1


@pytest.mark.parametrize("name", EVERY)
def test_zero_right_hand_side_costs_nothing(name: str) -> None:
    M, flags = structured(name, 3, 8)
    b = randn(3, 8)
    b[1] = 0
    found = solve(EVERY[name], operator(M, **flags), b)
    assert found.converged.all()
    assert found.x[1].eq(0).all()
    assert found.steps[1] == 0
    assert (found.steps[[0, 2]] > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("where", ["matrix", "rhs"])
@pytest.mark.parametrize("name", EVERY)
def test_not_finite_is_contained(name: str, where: str, bad: float) -> None:
    M, flags = structured(name, 4, 10)
    b = randn(4, 10)
    clean = solve(EVERY[name], operator(M, **flags), b)
    (M if where == "matrix" else b)[2].view(-1)[3] = bad
    found = solve(EVERY[name], operator(M, **flags), b)
    others = [0, 1, 3]
    assert found.converged.tolist() == [True, True, False, True]
    assert found.reason
    torch.testing.assert_close(found.x[others], clean.x[others], rtol=1e-12, atol=1e-14)
    assert found.steps[others].equal(clean.steps[others])


@pytest.mark.parametrize("name", GENERAL)
def test_tolerance_is_absolute_plus_relative(name: str) -> None:
    M, b = contraction(3, 15, 0.8), randn(3, 15)
    loose = solve(GENERAL[name], operator(M, fixed_point=True), b, rtol=0.0, atol=0.3)
    true = (torch.einsum("bij,bj->bi", M, loose.x) - b).norm(dim=1)
    assert loose.converged.all()
    assert (true <= 0.3).all()
    torch.testing.assert_close(true, loose.residual_norm, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
@pytest.mark.parametrize("name", ["gmres", "cg", "bicgstab", "lsmr", "broyden", "neumann"])
def test_max_steps_is_kept_and_reported(name: str, limit: int) -> None:
    M, flags = structured(name, 3, 40)
    b = randn(3, 40)
    found = solve(EVERY[name], operator(M, **flags), b, rtol=1e-12, max_steps=limit)
    assert not found.converged.any()
    assert (found.steps <= limit).all()
    assert found.reason
    assert (found.residual_norm <= b.norm(dim=1) * (1 + 1e-12)).all()


def singular(batch: int, n: int, rank: int) -> Tensor:
    return randn(batch, n, rank, seed=7) @ randn(batch, rank, n, seed=8) / n


@pytest.mark.parametrize("consistent", [True, False], ids=["consistent", "inconsistent"])
@pytest.mark.parametrize(("n", "rank"), [(2, 1), (12, 5), (30, 29)], ids=str)
def test_lsmr_finds_the_minimum_norm_solution(n: int, rank: int, consistent: bool) -> None:
    M = singular(4, n, rank)
    b = torch.einsum("bij,bj->bi", M, randn(4, n)) if consistent else randn(4, n)
    found = solve(LSMR(), operator(M), b, rtol=1e-12, max_steps=20000)
    exact = torch.einsum("bij,bj->bi", torch.linalg.pinv(M, rtol=1e-10), b)
    assert found.converged.all(), found.reason
    torch.testing.assert_close(found.x, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "lsmr"])
def test_others_report_an_inconsistent_system(name: str) -> None:
    M, flags = structured(name, 3, 6)
    M[1] = torch.eye(6, dtype=M.dtype) * (1 if name == "cg" else -0.5)
    M[1, 0, 0] = 0
    found = solve(EVERY[name], operator(M, **flags), torch.ones(3, 6, dtype=M.dtype))
    assert found.converged.tolist() == [True, False, True]
    assert found.reason


@pytest.mark.parametrize("name", ["lu", "gmres"])
def test_singular_names_the_way_out(name: str) -> None:
    M = singular(2, 8, 7)
    found = solve(GENERAL[name], operator(M), randn(2, 8))
    assert not found.converged.any()
    assert "singular" in found.reason
    assert "lsmr" in found.reason


@pytest.mark.parametrize("kind", ["indefinite", "negative"])
def test_cg_is_for_definite_matrices_of_either_sign(kind: str) -> None:
    """Of one that is neither it says so; ``J - I`` of a contraction is negative definite."""
    M, b = with_spectrum(3, 10, 10.0, symmetric=True), randn(3, 10)
    M[1] = -M[1] if kind == "negative" else M[1] - 0.3 * torch.eye(10, dtype=M.dtype)
    found = solve(CG(), operator(M, symmetric=True), b)
    if kind == "negative":
        assert found.converged.tolist() == [True] * 3
        torch.testing.assert_close(found.x, torch.linalg.solve(M, b), rtol=1e-6, atol=1e-8)
        return
    assert found.converged.tolist() == [True, False, True]
    assert "not definite" in found.reason
    assert "gmres" in found.reason


def test_neumann_reports_divergence() -> None:
    M = torch.stack([contraction(1, 8, 0.5)[0], contraction(1, 8, 1.5)[0]])
    found = solve(NeumannSeries(), operator(M, fixed_point=True), randn(2, 8))
    assert found.converged.tolist() == [True, False]
    assert "diverges" in found.reason


@pytest.mark.parametrize("terms", [0, 1, 4])
def test_truncated_series_is_the_sum(terms: int) -> None:
    M, b = contraction(3, 6, 1.2), randn(3, 6)
    J = M + torch.eye(6, dtype=M.dtype)
    exact = -sum((torch.linalg.matrix_power(J, i) @ b.unsqueeze(2)).squeeze(2) for i in range(terms + 1))
    solver = NeumannSeries(terms=terms)
    found = solve(solver, operator(M, fixed_point=True), b)
    torch.testing.assert_close(found.x, exact)
    assert found.converged.all()
    assert found.steps.eq(terms).all()
    assert not solver.exact
    assert NeumannSeries().exact
    assert replace(solver, terms=None).exact


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.3), (4, 0.5), (6, 1.0)], ids=str)
def test_damped_series_is_the_sum(steps: int, damping: float) -> None:
    M, b = contraction(3, 6), randn(3, 6)
    step = torch.eye(6, dtype=M.dtype) + damping * M
    powers = [(torch.linalg.matrix_power(step, i) @ b.unsqueeze(2)).squeeze(2) for i in range(steps)]
    found = solve(DampedSeries(steps, damping), operator(M, fixed_point=True), b)
    torch.testing.assert_close(found.x, -damping * sum(powers))
    assert found.converged.all()
    assert not DampedSeries.exact
    if damping == 1:
        torch.testing.assert_close(found.x, solve(NeumannSeries(terms=steps - 1), operator(M, fixed_point=True), b).x)


@pytest.mark.parametrize("when_full", ["ring", "stop"])
@pytest.mark.parametrize("memory", [3, 100])
def test_broyden_with_little_memory(memory: int, when_full: Any) -> None:
    M, b = contraction(4, 25, 0.5), randn(4, 25)
    found = solve(BroydenLinear(memory=memory, when_full=when_full), operator(M, fixed_point=True), b, rtol=1e-9)
    assert found.converged.all(), found.reason


@pytest.mark.parametrize("restart", [1, 4, 50])
def test_gmres_restarts(restart: int) -> None:
    M, b = contraction(4, 60, 0.5), randn(4, 60)
    found = solve(GMRES(restart=restart), operator(M), b)
    assert found.converged.all(), found.reason
    torch.testing.assert_close(found.x, torch.linalg.solve(M, b), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("restart", "numbers", "most"), [(None, 1 << 24, 50), (None, 25 * 80, 25), (None, 80, 12), (30, 80, 30)], ids=str
)
def test_gmres_keeps_fewer_vectors_of_big_states(
    restart: int | None, numbers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    module = importlib.import_module("implicitkit.linear.iterative.gmres")
    seen: list[int] = []
    arnoldi = module.arnoldi
    monkeypatch.setattr(module, "_NUMBERS", numbers)
    monkeypatch.setattr(module, "arnoldi", lambda *a: seen.append(a[-1]) or arnoldi(*a))
    M = with_spectrum(1, 80, 1e3)
    solve(GMRES(restart=restart), operator(M), randn(1, 80), rtol=1e-6, max_steps=200)
    assert seen[0] == most


def test_a_cycle_that_solves_one_sample_does_not_end_the_others() -> None:
    """2 I is solved by the first of several cycles; its neighbour, and one that asks for nothing, have their own ends."""
    M, b = 2 * torch.eye(12, dtype=torch.float64).repeat(3, 1, 1), randn(3, 12)
    M[1:] += with_spectrum(2, 12, 5.0)
    b[2] = 0
    found = solve(GMRES(restart=3), operator(M), b)
    assert found.converged.all() and int(found.steps[0]) == 1 and int(found.steps[1]) > 3 and int(found.steps[2]) == 0
    torch.testing.assert_close(found.x, torch.linalg.solve(M, b), rtol=1e-8, atol=1e-12)


def test_gmres_gives_up_where_it_would_not_get_there() -> None:
    """Not halved in 60 products, and too far from the target for the products left; with more of them it goes on."""
    M = torch.diag(torch.linspace(0.001, 4, 100, dtype=torch.float64))[None]
    b = torch.ones(1, 100, dtype=torch.float64)
    slow = solve(GMRES(restart=10), operator(M), b, max_steps=200)
    assert not bool(slow.converged) and int(slow.steps) < 100 and "too slowly" in slow.reason, slow
    assert bool(solve(GMRES(restart=10), operator(M), b, max_steps=20000).converged)


def test_gmres_breaks_down_happily() -> None:
    """The Krylov space ends early: the identity, a shift, a rank-one change, a permutation."""
    n = 6
    eye = torch.eye(n, dtype=torch.float64)
    M = torch.stack([eye, -2 * eye, eye + torch.ones_like(eye), eye.roll(1, 0)])
    b = torch.zeros(4, n, dtype=torch.float64)
    b[:, 0] = 1
    found = solve(GMRES(), operator(M), b)
    assert found.converged.all(), found.reason
    torch.testing.assert_close(found.x, torch.linalg.solve(M, b))
    assert found.steps.tolist() == [1, 1, 2, n]


def test_lu_refuses_what_is_too_large() -> None:
    with pytest.raises(ValueError, match="gmres"):
        solve(LU(max_size=5), operator(contraction(1, 6)), randn(1, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GMRES(restart=0),
        lambda: BroydenLinear(memory=0),
        lambda: BroydenLinear(when_full="drop"),  # type: ignore[arg-type]
        lambda: NeumannSeries(terms=-1),
        lambda: DampedSeries(steps=0),
        lambda: DampedSeries(damping=0.0),
    ],
    ids=["restart", "memory", "when_full", "terms", "steps", "damping"],
)
def test_options_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        make()


# --- dense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", RTOL, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("columns", [None, 1, 3], ids="columns={}".format)
@pytest.mark.parametrize(("batch", "n"), [(0, 3), (3, 0), (1, 1), (5, 4), (2, 110)], ids=str)
def test_dense_solve(batch: int, n: int, columns: int | None, dtype: torch.dtype) -> None:
    A = contraction(batch, n).to(dtype) if n else torch.zeros(batch, 0, 0, dtype=dtype)
    b = randn(batch, n, *([] if columns is None else [columns])).to(dtype)
    x, ok, reason = solve_batched(A, b)
    factor = factor_batched(A)
    transposed = factor.solve(b, transpose=True)
    assert x.dtype == transposed.dtype == dtype
    assert x.shape == transposed.shape == b.shape
    assert ok.shape == (batch,)
    assert ok.all()
    assert factor.ok.all()
    assert reason == ""
    rhs = b.double() if columns is not None else b.double().unsqueeze(2)
    for i in range(batch):
        scale = RTOL[dtype] * 30
        for block, found in ((A[i].double(), x[i]), (A[i].double().mT, transposed[i])):
            exact = torch.linalg.solve(block, rhs[i]).view(b[i].shape)
            size = float(exact.abs().amax()) if n else 0.0
            torch.testing.assert_close(found.double(), exact, rtol=scale, atol=scale * size)


@pytest.mark.parametrize("n", [4, 120])
def test_dense_singular_and_nan_blocks_are_contained(n: int) -> None:
    A, b = contraction(6, n), randn(6, n)
    A[1, 0] = A[1, 1]  # singular up to rounding
    A[2] = 0
    A[3, 0, 0] = torch.nan
    b[4, 0] = torch.inf
    x, ok, reason = solve_batched(A, b)
    assert ok.tolist() == [True, False, False, False, False, True]
    assert "singular" in reason
    assert x[1:4].isnan().all()
    for i in (0, 5):
        torch.testing.assert_close(x[i], torch.linalg.solve(A[i], b[i]))


def test_bad_row_units_are_not_singular() -> None:
    A = torch.stack([torch.diag(torch.tensor([1.0, 1e-20])), torch.tensor([[1.0, 2.0], [1e-20, 3e-20]])]).double()
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    factor = factor_batched(A)
    assert factor.ok.all()
    torch.testing.assert_close(factor.solve(torch.einsum("bij,bj->bi", A, x)), x)
    y = x / A.abs().amax(dim=2)
    torch.testing.assert_close(factor.solve(torch.einsum("bij,bi->bj", A, y), transpose=True), y)


def test_factors_of_uneven_matrices_are_differentiated() -> None:
    """Whoever calls them may: nothing that a derivative needs is overwritten."""
    A = (contraction(2, 4).double() * torch.logspace(0, -6, 4, dtype=torch.float64).unsqueeze(1)).requires_grad_()
    b = torch.ones(2, 4, dtype=torch.float64)
    factor = factor_batched(A)
    assert factor.row_scale is not None
    (found,) = torch.autograd.grad(factor.solve(b).sum(), A)
    (wanted,) = torch.autograd.grad(torch.linalg.solve(A, b).sum(), A)
    torch.testing.assert_close(found, wanted)


def test_a_finite_matrix_is_looked_at_as_a_whole() -> None:
    """Its sum is finite; to look at each entry is for those whose sum is not (an overflow is no fault of theirs), and
    no sizes of all entries are made."""
    full: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = call(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape == (2, 6, 6) and (out.dtype == torch.bool or "abs" in str(call)):
                full.append(str(call))
            return out

    even = contraction(2, 6).double()
    uneven = even * torch.logspace(0, -5, 6).unsqueeze(1)
    for A in (even, uneven):
        with Seen():
            assert factor_batched(A).ok.all()
        assert not full
    large = 1e308 * torch.tensor([[[1.0, 0.5], [0.5, 1.0]], [[1.0, 0.5], [0.5, torch.inf]]]).double()
    assert factor_batched(large).ok.tolist() == [True, False]


@pytest.mark.parametrize(("m", "n"), [(6, 4), (4, 6), (5, 5), (120, 110)], ids=str)
@pytest.mark.parametrize("columns", [None, 2], ids="columns={}".format)
def test_dense_least_squares(m: int, n: int, columns: int | None) -> None:
    A = randn(3, m, n)
    A[:, :, 1] = A[:, :, 0]  # rank-deficient
    b = randn(3, m, *([] if columns is None else [columns]))
    exact = torch.stack([torch.linalg.pinv(A[i], rtol=1e-12) @ b[i] for i in range(3)])
    A[1, 0, 0] = torch.nan
    x, ok, reason = lstsq_batched(A, b)
    assert ok.tolist() == [True, False, True]
    assert reason
    torch.testing.assert_close(x[[0, 2]], exact[[0, 2]])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(batch, n, n\)"):
        solve_batched(torch.zeros(3, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(batch, m, n\)"):
        lstsq_batched(torch.zeros(3, 3), torch.zeros(3))


HANG = """
import torch
torch.set_num_threads(2)
from implicitkit.linear import LU, Operator, factor_batched, lstsq_batched, solve_batched
A = torch.randn(4, 200, 200) + 30 * torch.eye(200)
b = torch.randn(4, 200)
x, ok, _ = solve_batched(A, b)
f = factor_batched(A)
f.solve(b, transpose=True)
f.solve(torch.randn(4, 200, 3))
lstsq_batched(A, b)
assert ok.all() and (torch.einsum("bij,bj->bi", A, x) - b).abs().max() < 1e-3
print("returned")
"""


def test_dense_solves_do_not_hang_with_two_threads() -> None:
    """torch 2.13 on the CPU hangs or errs in batched LU from n of about 150 with two threads; the guard loops."""
    done = subprocess.run(
        [sys.executable, "-c", HANG], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert "returned" in done.stdout, done.stderr


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("condition", [10.0, 1e8])
def test_a_dear_matrix_is_formed_where_products_do_not_do(symmetric: bool, condition: float) -> None:
    """700 unknowns without a pattern: well conditioned it is never formed."""
    n = 700
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
    v, w = (x / x.norm() for x in (randn(n, seed=3), randn(n, seed=3 if symmetric else 4)))
    M = torch.diag(values) - 2 * torch.outer(v, (values * v))
    M = M - 2 * torch.outer(M @ w, w)  # reflections of the diagonal
    A, formed = operator(M.unsqueeze(0), symmetric=symmetric), []
    A._dense = lambda: (formed.append(1), M.unsqueeze(0))[1]
    b = randn(1, n, seed=5)
    found = Auto().solve(A, b, rtol=1e-9, atol=0.0, max_steps=None)
    assert bool(found.converged) and float((b - A.mv(found.x)).norm()) <= 1e-8 * float(b.norm())
    assert bool(formed) == (condition > 10)


_CLAIMS = {
    "right, and writes into b": (lambda A, b: b.copy_(torch.linalg.solve(A.dense(), b.unsqueeze(2)).squeeze(2)), ""),
    "transposed": (lambda A, b: torch.linalg.solve(A.dense().mT, b.unsqueeze(2)).squeeze(2), "does not bear out"),
    "another sign": (lambda A, b: -torch.linalg.solve(A.dense(), b.unsqueeze(2)).squeeze(2), "does not bear out"),
    "NaN": (lambda A, b: torch.nan * b, "does not bear out"),
    "of low precision": (
        lambda A, b: torch.linalg.solve(A.dense().half().float(), b.float().unsqueeze(2)).squeeze(2),
        "in torch.float32 for a system in torch.float64",
    ),
    "another shape": (lambda A, b: b.unsqueeze(2), "tensors of shapes"),
    "nothing": (lambda A, b: None, "tensors of shapes"),
}


_FIGURES: dict[str, tuple[Callable[[Tensor], tuple[Any, Any]], str]] = {
    "steps of the batch": (lambda ones: (3, ones > 0), r"\(1,\), an int, \(1,\)"),
    "all or nothing": (lambda ones: (ones, True), r"\(1,\), \(1,\), a bool"),
    "converged in numbers": (lambda ones: (ones, ones), "must say in torch.bool what has converged"),
}


@pytest.mark.parametrize("name", _FIGURES)
def test_figures_of_a_plugin_are_named(name: str) -> None:
    """In a solve, and in its conformance suite, which failed with ``'int' object has no attribute 'shape'``."""
    figures, said = _FIGURES[name]

    class Claims(LinearSolver):
        def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> Any:
            x = torch.linalg.solve(A.dense(), b.unsqueeze(2)).squeeze(2)
            return ik.extend.LinearSolution(x, torch.zeros(len(b)), *figures(torch.ones(len(b), dtype=torch.int64)))

    t = torch.ones(1, dtype=torch.float64, requires_grad=True)
    z = ik.root(lambda z, t: 2 * z - t, torch.zeros(1).double(), (t,), rule=ik.Implicit(linear_solver=Claims())).value
    with pytest.raises(TypeError, match=said):
        z.backward()
    checks = ["solves_well_conditioned_systems"]
    (result,) = ik.testing.check_linear_solver(Claims(), checks=checks, raise_on_failure=False).results
    assert result.mend == "what it returns" and re.search(said.replace("1,", "3,"), result.message), result.message


@pytest.mark.parametrize("directions", [1, 3])
@pytest.mark.parametrize("name", _CLAIMS)
def test_what_a_plugin_claims_is_judged_by_a_product(name: str, directions: int) -> None:
    find, said = _CLAIMS[name]

    class Claims(LinearSolver):
        def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> Any:
            ones = torch.ones(len(b), dtype=torch.int64)
            return ik.extend.LinearSolution(find(A, b), torch.zeros(len(b)), ones, ones > 0)

    M = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.5, 0.0, 4.0]], dtype=torch.float64)
    t = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    rule = ik.Implicit(linear_solver=Claims())
    z = ik.root(lambda z, t: z @ M.mT - t, torch.zeros(2, 3).double(), (t,), rule=rule, batch_dims=1).value
    seeds = torch.randn(directions, 2, 3, dtype=torch.float64)

    def pulled() -> Tensor:
        return torch.autograd.grad(z, t, seeds, is_grads_batched=True)[0]

    if not said:
        torch.testing.assert_close(pulled(), seeds @ torch.linalg.inv(M))
        return
    with pytest.raises((TypeError, ik.ConvergenceError), match=said):
        pulled()
