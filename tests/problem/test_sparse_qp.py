"""Quadratic programs with sparse matrices: the values, multipliers and derivatives of the same programs made dense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik

D = torch.float64
N = 40


def program(n: int = N) -> dict[str, Any]:
    """Neighbours that repel each other, sums of ten held, a box of which some bounds are active."""
    rng = np.random.default_rng(0)
    A = sp.csr_matrix((np.ones(n), (np.arange(n) // 10, np.arange(n))), shape=(n // 10, n))
    return {
        "P": sp.diags([-1.0, 2.2, -1.0], [-1, 0, 1], shape=(n, n)).tocsc(),
        "q": rng.standard_normal(n),
        "A": A,
        "b": 0.1 * rng.standard_normal(n // 10),
        "G": sp.vstack([sp.identity(n), -sp.identity(n)]).tocsr(),
        "h": np.r_[np.full(n, 0.4), np.full(n, 0.3)],
    }


def as_dense(parts: dict[str, Any]) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v.toarray() if sp.issparse(v) else v, dtype=D) for k, v in parts.items()}


def loss(s: ik.Solution) -> Tensor:
    z = s.value
    found = (torch.cos(torch.arange(z.shape[-1], dtype=D)) * z).sum()
    for t in s.multipliers:
        found = found if t is None else found + (t * torch.sin(torch.arange(t.shape[-1], dtype=D))).sum()
    return found


def solve(parts: dict[str, Any], **options: Any) -> ik.Solution:
    fixed = {k: v if sp.issparse(v) else torch.as_tensor(v) for k, v in parts.items()}
    return ik.solve(ik.QuadraticProgram(fixed.pop("P", None), fixed.pop("q"), **fixed, **options))


ABSENT = [(), ("A", "b"), ("G", "h"), ("A", "b", "G", "h"), ("P",)]


@pytest.mark.parametrize("degenerate", ["lstsq", "smooth"])
@pytest.mark.parametrize("absent", ABSENT, ids=str)
def test_values_and_multipliers_are_those_of_dense_matrices(absent: tuple[str, ...], degenerate: str) -> None:
    parts = {k: v for k, v in program().items() if k not in absent}
    found, same = solve(parts, degenerate=degenerate), solve(as_dense(parts), degenerate=degenerate)
    torch.testing.assert_close(found.value, same.value, rtol=0, atol=1e-8)
    for one, other in zip(found.multipliers, same.multipliers, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def test_two_sided_constraints() -> None:
    parts = program()
    parts |= {"G": sp.identity(N).tocsr(), "h": np.full(N, 0.4), "lower": np.full(N, -0.3)}
    parts["h"][3] = np.inf
    found, same = solve(parts), solve(as_dense(parts))
    torch.testing.assert_close(found.value, same.value, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.multipliers.inequality, same.multipliers.inequality, rtol=0, atol=1e-8)
    assert bool((found.multipliers.inequality < -1e-3).any()) and bool((found.multipliers.inequality > 1e-3).any())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_derivatives_reach_the_entries(layout: str) -> None:
    parts, leaves = program(), {}
    given: dict[str, Tensor] = {}
    for name, part in parts.items():
        if sp.issparse(part):
            coo = part.tocoo()
            leaves[name] = v = torch.as_tensor(coo.data, dtype=D).clone().requires_grad_()
            given[name] = torch.sparse_coo_tensor(np.stack([coo.row, coo.col]), v, coo.shape).coalesce()
            given[name] = given[name].to_sparse_csr() if layout == "csr" else given[name]
        else:
            leaves[name] = given[name] = torch.as_tensor(part).requires_grad_()
    dense = {k: t.requires_grad_() for k, t in as_dense(parts).items()}
    found = torch.autograd.grad(loss(ik.solve(ik.QuadraticProgram(**given))), list(leaves.values()))
    expected = torch.autograd.grad(loss(ik.solve(ik.QuadraticProgram(**dense))), list(dense.values()))
    for (name, part), one, other in zip(parts.items(), found, expected, strict=True):
        if sp.issparse(part):
            coo = part.tocoo()
            other = other[torch.as_tensor(coo.row, dtype=torch.long), torch.as_tensor(coo.col, dtype=torch.long)]
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_transforms() -> None:
    parts = program()
    q = torch.as_tensor(parts.pop("q"))
    dense = as_dense(parts)
    f = lambda q: loss(solve(parts | {"q": q}))  # noqa: E731
    same = lambda q: loss(ik.solve(ik.QuadraticProgram(dense["P"], q, *list(dense.values())[1:])))  # noqa: E731
    batch = torch.stack([q, -q, 0.5 * q])
    torch.testing.assert_close(torch.func.vmap(f)(batch), torch.stack([same(row) for row in batch]))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(f))(batch), torch.func.vmap(torch.func.grad(same))(batch)
    )
    torch.testing.assert_close(torch.func.hessian(f)(q), torch.func.hessian(same)(q), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(torch.func.jvp(f, (q,), (q,))[1], torch.func.jvp(same, (q,), (q,))[1])
    torch.testing.assert_close(solve(parts | {"q": batch}).value[1], solve(parts | {"q": batch[1]}).value)


def test_no_solution_is_told_from_no_success() -> None:
    q, eye = np.ones(N), sp.identity(N).tocsr()
    rows = sp.vstack([eye, -eye]).tocsr()
    cases = {
        ik.Status.INFEASIBLE: {"P": eye, "q": q, "G": rows, "h": np.r_[np.zeros(N), -np.ones(N)]},
        ik.Status.UNBOUNDED: {"q": q, "G": eye, "h": np.ones(N)},
        ik.Status.NONCONVEX: {"P": -eye, "q": q, "G": rows, "h": np.ones(2 * N)},
        ik.Status.NONFINITE: {"P": eye, "q": q * np.nan, "G": rows, "h": np.ones(2 * N)},
    }
    for status, parts in cases.items():
        with pytest.raises(ik.ConvergenceError) as raised:
            solve(parts)
        assert int(raised.value.solution.status) == int(status)


@pytest.mark.parametrize("n", [5_000])
def test_five_thousand_unknowns(n: int) -> None:
    """No dense matrix; optimal by the conditions themselves."""
    parts = program(n)
    s = solve(parts)
    z, y, lam = s.value.numpy(), s.multipliers.equality.numpy(), s.multipliers.inequality.numpy()
    P, q, A, b, G, h = parts.values()
    assert np.abs(P @ z + q + A.T @ y + G.T @ lam).max() < 1e-9
    assert np.abs(A @ z - b).max() < 1e-9 and (G @ z - h).max() < 1e-9
    assert lam.min() > -1e-12 and np.abs(lam * (G @ z - h)).max() < 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": sp.csr_matrix(np.ones((1, N)))}, "only P, A and G may be sparse"),
        ({"A": torch.ones(2, 4, N, dtype=D), "b": torch.ones(2, 4, dtype=D)}, "share"),
        ({"P": sp.identity(N + 1)}, "must be"),
        ({"P": sp.identity(N, dtype=np.int64)}, "floating point"),
    ],
    ids=["q", "batch", "shape", "integers"],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        solve(program() | change)


def test_solvers_of_dense_programs_say_so() -> None:
    parts = {k: v if sp.issparse(v) else torch.as_tensor(v) for k, v in program().items()}
    with pytest.raises(ik.CapabilityError, match="takes dense matrices"):
        ik.solve(ik.QuadraticProgram(**parts), solver="daqp")
    assert bool(ik.solve(ik.QuadraticProgram(**parts), solver="interior_point").converged)
