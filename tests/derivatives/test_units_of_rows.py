"""Rows and columns in units of their own, 1e-13 to 1e13: values and derivatives are those of the problem in like units.

Each row solves ``F(z) = 0`` as ``D F(z / T) = 0`` for diagonal ``D`` and ``T`` (a map as ``T f(z / T)``, an objective as
``f(z / T)`` with the rows of its constraints times ``D``) and compares ``z / T``, and the derivative of a sum of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.operators import Operator
from implicitkit.linear.equilibrated import equilibrated
from implicitkit.linear.factors.dense import factor_batched
from implicitkit.linear.factors.dense_blocks import DenseBlocks

D64 = torch.float64
Case = tuple[str, int, str, str, torch.dtype]


def sizes(n: int, how: str, dtype: torch.dtype) -> Tensor:
    t = torch.ones(n, dtype=D64)
    if how.startswith("half "):
        t[: n // 2] = float(how[5:])
    elif how.startswith("one "):
        t[0] = float(how[4:])
    elif how.startswith("all "):
        t[:] = float(how[4:])
    elif how == "spread":
        t = 10 ** torch.linspace(-8, 8, n, dtype=D64)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    return t[order].to(dtype)


def problem(kind: str, n: int, D: Tensor, T: Tensor) -> tuple[Callable[..., ik.Solution], Tensor]:
    """``(x -> solution)`` and ``x``."""
    dtype, generator = D.dtype, torch.Generator().manual_seed(n)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=D64)  # noqa: E731
    W, x, C = draw(n, n) / n**0.5, draw(n), draw(max(1, n // 4), n) / n**0.5
    S = W @ W.T + torch.eye(n, dtype=D64)
    W, x, C, S = (t.to(dtype) for t in (W, x, C, S))
    z0, m = torch.zeros_like(x), len(C)

    def F(z: Tensor, x: Tensor) -> Tensor:
        return D * (3 * z / T + (z / T) ** 3 + 0.5 * W @ (z / T) - x)

    def objective(z: Tensor, x: Tensor) -> Tensor:
        y = z / T
        return 0.5 * y @ S @ y + 0.25 * y.pow(4).sum() - x @ y

    def rows(z: Tensor, x: Tensor) -> Tensor:
        return D[:m] * (C @ (z / T) - 0.2)

    if kind == "linear root":
        return lambda x: ik.root(lambda z, x: D * (3 * z / T + 0.5 * W @ (z / T) - x), z0, (x,)), x
    if kind == "root":
        return lambda x: ik.root(F, z0, (x,)), x
    if kind == "fixed point":
        return lambda x: ik.fixed_point(lambda z, x: T * (0.5 * torch.tanh(W @ (z / T)) + x), z0, (x,)), x
    if kind == "least squares":
        return lambda x: ik.least_squares(F, z0, (x,)), x
    if kind == "dependent equality":
        twice = ik.Equality(lambda z, x: torch.cat([rows(z, x), rows(z, x)]))
        return lambda x: ik.argmin(objective, z0, (x,), constraints=[twice]), x
    if kind == "root by gmres":
        return lambda x: ik.root(F, z0, (x,), solver="newton", rule=ik.Implicit(linear_solver="gmres")), x
    if kind in ("equality", "inequality"):
        constraint = ik.Equality(rows) if kind == "equality" else ik.Inequality(rows)
        return lambda x: ik.argmin(objective, z0, (x,), constraints=[constraint]), x
    sparse = kind == "sparse program"
    P = (torch.diag(S.diagonal()) if sparse else S) / T / T.unsqueeze(1)
    A, G = D[:m].unsqueeze(1) * C / T, torch.diag(D / T)
    P, A, G = (t.to_sparse() if sparse else t for t in (P, A, G))
    return lambda x: ik.solve(ik.QuadraticProgram(P, -x / T, A=A, b=0.1 * D[:m], G=G, h=0.4 * D)), x


def answer(case: Case) -> tuple[Tensor, Tensor]:
    kind, n, rows, columns, dtype = case
    T = sizes(n, columns, dtype)
    solve, x = problem(kind, n, sizes(n, rows, dtype), T)
    x.requires_grad_()
    z = solve(x).value / T
    weights = torch.linspace(1, 2, n, dtype=dtype)
    return z.detach(), torch.autograd.grad(z @ weights, x)[0]


CASES: list[Case] = [
    *(("linear root", n, f"half {s}", "", D64) for n in (40, 600) for s in ("1e13", "1e-13")),
    ("linear root", 600, "one 1e-13", "", D64),
    *(("root", n, rows, "", D64) for n in (3, 40, 300) for rows in ("half 1e13", "half 1e-13", "spread")),
    *(("root", n, "", columns, D64) for n in (3, 40, 300) for columns in ("half 1e13", "half 1e-13", "spread")),
    ("root", 40, "spread", "spread", D64),
    *(("fixed point", n, "", "spread", D64) for n in (40, 300)),
    ("least squares", 40, "", "spread", D64),
    *((kind, n, "", columns, D64) for kind in ("equality", "inequality") for n in (3, 40) for columns in ("all 1e-12",)),
    ("equality", 40, "", "half 1e-13", D64),
    ("dependent equality", 40, "", "all 1e-12", D64),
    *(("root by gmres", 60, "", columns, D64) for columns in ("half 1e-13", "half 1e9", "spread")),
    *((kind, 40, "", columns, D64) for kind in ("program", "sparse program")
      for columns in ("all 1e-12", "all 1e12", "half 1e13", "half 1e-13", "spread")),
    *((kind, 40, rows, "", D64) for kind in ("program", "sparse program") for rows in ("half 1e13", "half 1e-13")),
]  # fmt: skip
SINGLE: list[Case] = [
    *(("root", n, rows, "", torch.float32) for n in (3, 300) for rows in ("half 1e13", "half 1e-13")),
    *(("root", n, "", columns, torch.float32) for n in (40, 300) for columns in ("half 1e13", "half 1e-13")),
    ("least squares", 3, "all 1e-12", "", torch.float32),
    ("program", 40, "", "half 1e13", torch.float32),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES + SINGLE, ids=lambda c: f"{c[0]}, {c[1]}, {c[2]}, {c[3]}, {str(c[4])[6:]}")
def test_units_of_rows_and_columns_do_not_matter(case: Case) -> None:
    value, slope = answer(case)
    other, expected = answer((case[0], case[1], "", "", D64))
    tolerance = 1e-6 if case[4] == D64 else 1e-2
    for found, true in ((value, other), (slope, expected)):
        torch.testing.assert_close(found.double(), true, rtol=0, atol=tolerance * float(true.abs().max()))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("size", [3, 40, 150])
def test_dense_factors_know_no_units(size: int, transpose: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    M = torch.randn(2, size, size, generator=generator, dtype=D64)
    rows, columns = sizes(size, "spread", D64), sizes(size, "spread", D64).flip(0)
    A = rows.unsqueeze(1) * M * columns
    x = torch.randn(2, size, generator=generator, dtype=D64) / (rows if transpose else columns)
    factor = factor_batched(A)
    found = factor.solve(((A.mT if transpose else A) @ x.unsqueeze(2)).squeeze(2), transpose)
    assert bool(factor.ok.all())
    torch.testing.assert_close(found * (rows if transpose else columns), x * (rows if transpose else columns))
    M[0, 0] = M[0, 1]
    assert factor_batched(rows.unsqueeze(1) * M * columns).ok.tolist() == [False, True]


def operator(M: Tensor, **known: Any) -> Operator:
    product = lambda matrix: lambda v: (matrix @ v.unsqueeze(2)).squeeze(2)  # noqa: E731
    return Operator(product(M), product(M.mT), lambda: M, batch=len(M), size=M.shape[1], like=M[:, 0], **known)


@pytest.mark.parametrize("structure", ["none", "symmetric", "fixed point"])
@pytest.mark.parametrize("transposed", [False, True])
def test_equilibrated_systems_have_rows_and_columns_of_like_size(structure: str, transposed: bool) -> None:
    n = 60
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(2, n, n, generator=generator, dtype=D64)
    T, rows = sizes(n, "spread", D64), sizes(n, "half 1e6", D64)
    if structure == "symmetric":
        J = (M + M.mT + n * torch.eye(n)) / T / T.unsqueeze(1)
    elif structure == "fixed point":
        J = T.unsqueeze(1) * (M / n) / T - torch.eye(n)
    else:
        J = rows.unsqueeze(1) * (M + n * torch.eye(n)) / T
    known = {"symmetric": structure == "symmetric", "fixed_point": structure == "fixed point"}
    A = operator(J, **known)
    z = T * torch.randn(2, n, generator=generator, dtype=D64)
    found = equilibrated(A.T if transposed else A, torch.ones(2, n, dtype=D64), z, transposed)
    assert found is not None
    scaled = found.A.dense()
    assert torch.linalg.cond(scaled).max() < 1e3 < 1e10 < torch.linalg.cond(J).max()
    torch.testing.assert_close(found.A.mv(z.sign()), (scaled @ z.sign().unsqueeze(2)).squeeze(2))
    if structure == "symmetric":
        torch.testing.assert_close(scaled, scaled.mT)
    if structure == "fixed point":
        torch.testing.assert_close(scaled.diagonal(dim1=1, dim2=2), J.diagonal(dim1=1, dim2=2))


def test_like_sizes_are_left_alone() -> None:
    M = torch.randn(2, 60, 60, generator=torch.Generator().manual_seed(0), dtype=D64)
    z = M[:, 0]
    assert equilibrated(operator(M), z, z, False) is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_known", [True, False])
def test_factors_nearby_say_how_large_rows_and_columns_are(is_known: bool, transposed: bool) -> None:
    """``|J| |z|`` of them, and no product with ``J``; by six where there are none."""
    n, asked = 40, []
    units = torch.logspace(-9, 9, n, dtype=torch.float64)
    shape = torch.eye(n, dtype=torch.float64) + torch.diag(torch.full((n - 1,), 0.3, dtype=torch.float64), 1)
    J = 10 ** (4 * torch.cos(torch.arange(n, dtype=torch.float64))).unsqueeze(1) * shape / units

    def product(M: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda v: (asked.append(v), v @ M.mT)[1]  # type: ignore[func-returns-value]

    A = Operator(product(J), product(J.mT), lambda: J[None], batch=1, size=n, like=units[None])
    A.known = DenseBlocks(J[None]) if is_known else None
    if transposed:
        A = A.T
        A.known = DenseBlocks(J.mT[None]) if is_known else None
    even = equilibrated(A, torch.ones(1, n, dtype=torch.float64), units[None], transposed)
    assert even is not None and len(asked) == (0 if is_known else 6)
    matrix = J.mT if transposed else J
    M = (even.left.unsqueeze(2) * matrix * even.right.unsqueeze(1))[0].abs()
    assert 0.1 < float(M.amax(0).min()) <= float(M.amax(1).max()) < 10
