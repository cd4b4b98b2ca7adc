"""Matrices of which nobody said that they are symmetric: conjugate gradients where their Krylov vectors tell it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.auto import Auto
from implicitkit.linear.iterative import symmetry
from implicitkit.linear.iterative.cg import CG
from implicitkit.linear.iterative.cycles import Task
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.linear.iterative.inner_cg import conjugate
from implicitkit.linear.iterative.symmetry import Unsaid

D = torch.float64
N = 400
LIMITS = {"rtol": 1e-10, "atol": 0.0, "max_steps": None}


def _counted(diagonals: list[Tensor], skew: list[float], symmetric: bool = False) -> tuple[Operator, list[int]]:
    """Tridiagonal blocks ``d_i``, ``-1 + s`` above and ``-1 - s`` below the diagonal; how often they are multiplied."""
    d, s = torch.stack(diagonals), torch.tensor(skew, dtype=D).unsqueeze(1)
    count = [0]

    def product(v: Tensor, s: Tensor) -> Tensor:
        count[0] += 1
        out = d * v
        out[:, :-1] += (s - 1) * v[:, 1:]
        out[:, 1:] -= (1 + s) * v[:, :-1]
        return out

    def dense() -> Tensor:
        raise AssertionError("no dense matrix is asked for")

    shape = {"batch": len(d), "size": d.shape[1], "like": d, "symmetric": symmetric}
    return Operator(lambda v: product(v, s), lambda v: product(v, -s), dense, **shape), count


def _rhs(batch: int, n: int = N) -> Tensor:
    return torch.randn(batch, n, dtype=D, generator=torch.Generator().manual_seed(3))


FAR = torch.full((N,), 2.003, dtype=D)  # from the identity: its condition is about 1,300
BOTH = torch.where(torch.arange(N) % 2 == 0, 3.0, -3.0).to(D)
ROWS = {
    "positive": (FAR, 0.0, True),
    "negative": (-FAR, 0.0, True),
    "of both signs": (BOTH, 0.0, False),
    "skew in part": (FAR, 0.1, False),
    "slow and skew": (FAR, 0.02, False),
}


@pytest.mark.parametrize("name", ROWS)
def test_conjugate_gradients_where_vectors_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many products as conjugate gradients take where the matrix is symmetric and definite; where it is not they are
    not begun, and it takes those of GMRES."""
    d, skew, definite = ROWS[name]
    begun: list[bool] = []
    monkeypatch.setattr(symmetry, "conjugate", lambda *task: begun.append(True) or conjugate(*task))
    b = _rhs(1)
    A, count = _counted([d], [skew])
    found = Unsaid().solve(A, b, **LIMITS)
    spent = count[0]
    assert bool(begun) is definite
    assert bool(found.converged.all()) and float((A.mv(found.x) - b).norm()) <= 1.01e-10 * float(b.norm())
    B, others = _counted([d], [skew], symmetric=definite)
    assert bool((CG() if definite else GMRES()).solve(B, b, **LIMITS).converged.all())
    assert spent <= others[0] + 20 * definite, (spent, others[0])
    if definite:
        C, restarted = _counted([d], [skew])
        GMRES().solve(C, b, **LIMITS)
        assert spent < 0.8 * restarted[0], (spent, restarted[0])


def test_a_batch_of_both_kinds() -> None:
    """One sample that is not symmetric leaves all of them to GMRES, and to a right answer each."""
    A, _ = _counted([FAR, FAR, BOTH], [0.0, 0.1, 0.0])
    b = _rhs(3)
    found = Unsaid().solve(A, b, rtol=1e-8, atol=0.0, max_steps=4000)
    left = (A.mv(found.x) - b).norm(dim=1)
    assert bool(found.converged.all()) and bool((left <= 1.01e-8 * b.norm(dim=1)).all()), left


@pytest.mark.parametrize(("seen", "top"), [(1e-3, 900.0), (0.1, 100.0)])
def test_a_curvature_of_the_other_sign_leaves_the_rest_to_gmres(seen: float, top: float) -> None:
    """One eigenvalue below zero, of a vector that the first products hardly see; where more is seen of it, conjugate
    gradients end farther off than they began."""
    d = torch.linspace(1.0, top, N, dtype=D)
    d[0] = -1e-2
    b = torch.ones(1, N, dtype=D)
    b[0, 0] = seen
    count = [0]

    def mv(v: Tensor) -> Tensor:
        count[0] += 1
        return d * v

    A = Operator(mv, mv, lambda: torch.diag(d).unsqueeze(0), batch=1, size=N, like=b)
    found = Unsaid().solve(A, b, rtol=1e-9, atol=0.0, max_steps=3000)
    assert bool(found.converged.all()) and float((found.x - b / d).norm()) <= 1e-5 * float((b / d).norm())


def test_the_default_goes_this_way() -> None:
    """Where no matrix can be formed (its products are all that there is) and nothing is said of it."""
    n = 9000
    A, count = _counted([torch.full((n,), 2.003, dtype=D)], [0.0])
    b = _rhs(1, n)
    assert bool(Auto().solve(A, b, **LIMITS).converged.all())
    B, others = _counted([torch.full((n,), 2.003, dtype=D)], [0.0], symmetric=True)
    assert bool(CG().solve(B, b, **LIMITS).converged.all())
    assert count[0] <= others[0] + 20, (count[0], others[0])


def test_what_is_askew_beyond_the_first_vectors_ends_conjugate_gradients() -> None:
    """A symmetric block, and one that is not, of which the right-hand side holds next to nothing: the first vectors see the
    former alone, and conjugate gradients grow along the latter.  No more products than GMRES takes."""
    beside = [torch.ones(n - 1, dtype=D) for n in (300, N - 300)]
    plain = 2.003 * torch.eye(300, dtype=D) - beside[0].diag(1) - beside[0].diag(-1)
    M = torch.block_diag(plain, torch.eye(N - 300, dtype=D) + beside[1].diag(1) - beside[1].diag(-1))
    for share in (1e-6, 1e-9):
        b = _rhs(1) * torch.where(torch.arange(N) < 300, 1.0, share)
        taken = []
        for method in (Unsaid(), GMRES()):
            count = [0]

            def mv(v: Tensor, count: list[int] = count) -> Tensor:
                count[0] += 1
                return v @ M.T

            A = Operator(mv, lambda v: v @ M, lambda: M[None], batch=1, size=N, like=b)
            found = method.solve(A, b, rtol=1e-6, atol=0.0, max_steps=None)
            assert bool(found.converged.all()), (share, method)
            taken.append(count[0])
        assert taken[0] <= 1.1 * taken[1], (share, taken)


@pytest.mark.parametrize(("dtype", "condition", "rtol"), [(D, 1e12, 1e-10), (torch.float32, 1e5, 1e-5)])
def test_nor_do_rounding_errors_end_them(dtype: torch.dtype, condition: float, rtol: float) -> None:
    d = torch.cat(
        [torch.ones(N - 20, dtype=D), torch.logspace(0, -torch.log10(torch.tensor(condition)), 20, dtype=D)]
    ).to(dtype)
    b, d = torch.sqrt(d)[None] * _rhs(1).to(dtype), d[None]
    size = torch.linalg.vector_norm(b, dim=1)
    _, _, steps, definite = conjugate(
        Operator(lambda v: d * v, lambda v: d * v, lambda: torch.diag_embed(d), batch=1, size=N, like=b),
        Task(b, size, rtol * size, torch.ones(1, dtype=torch.bool), torch.tensor([2 * N])),
        (),
        lambda left, done: False,
    )
    assert definite, int(steps)
