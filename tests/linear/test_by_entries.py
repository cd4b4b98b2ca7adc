"""Krylov methods write a sparse matrix down where that costs less than the products to come."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.linear.auto import Auto
from implicitkit.linear.equilibrated import equilibrated
from implicitkit.linear.factors.sparse_form import sparse_blocks
from implicitkit.linear.iterative.by_entries import ByEntries
from implicitkit.solver.minimise import newton_cg
from implicitkit.solver.minimise.newton_cg import steihaug
from implicitkit.sparsity.patterns import Sparsity

D = torch.float64
SIDE = 16


def space(z: Tensor) -> Tensor:
    """The Laplacian on a grid in space, ``(..., n)``."""
    u = pad(z.unflatten(-1, (SIDE,) * 3), (1,) * 6)
    inner = slice(1, -1)
    sides = (u[..., 2:, inner, inner], u[..., :-2, inner, inner], u[..., inner, 2:, inner], u[..., inner, :-2, inner])
    sides = (*sides, u[..., inner, inner, 2:], u[..., inner, inner, :-2])
    return (6 * u[..., inner, inner, inner] - sum(sides)).flatten(-3)


def upwind(z: Tensor) -> Tensor:
    """Its matrix is not symmetric."""
    return space(z) + 0.5 * (z - z.roll(1, -1))


def operator(function: Callable[[Tensor], Tensor], z: Tensor) -> Operator:
    """Its Jacobian at ``z`` ``(batch, n)``."""
    sparsity = Sparsity(function)
    return autodiff.linearise(function, z, sparse=sparse_blocks(lambda: sparsity, function, z))[1]


def varied(function: Callable[[Tensor], Tensor], batch: int, dtype: torch.dtype = D) -> Operator:
    """Of ``f + z^3``: every sample has another matrix."""
    z = torch.rand(batch, SIDE**3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return operator(lambda z: function(z) + z**3, z)


def counted(A: Operator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the graph of the function is gone through from now on."""
    count, mv, rmv = [0], A._mv, A._rmv
    monkeypatch.setattr(A, "_mv", lambda v: (count.append(count.pop() + 1), mv(v))[1])
    monkeypatch.setattr(A, "_rmv", lambda v: (count.append(count.pop() + 1), rmv(v))[1])
    return count


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_products_are_those_of_the_graph(batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    A = varied(upwind, batch, dtype)
    by = ByEntries(A)
    v = torch.randn(batch, A.size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    want = A.mv(v), A.rmv(v)
    torch.testing.assert_close((by.operator.mv(v), by.operator.rmv(v)), want, rtol=0, atol=0)
    by.expect(10)
    assert not by.written, "few products do not pay"
    assert 150 < by.affords(100) < 200 and by.affords(8) == 8
    by.expect(1000)
    assert by.written and ByEntries(A).written
    assert by.affords(100) == 200
    count = counted(A, monkeypatch)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close((by.operator.mv(v), by.operator.rmv(v)), want, **near)
    torch.testing.assert_close(by.operator.T.mv(v), want[1], **near)
    if batch > 1:
        index = torch.tensor([3, 1])
        some = by.operator.select(index)
        assert some is not None
        torch.testing.assert_close((some.mv(v[index]), some.rmv(v[index])), tuple(w[index] for w in want), **near)
        again = some.select(torch.tensor([0]))
        assert again is not None
        torch.testing.assert_close(again.mv(v[[3]]), want[0][[3]], **near)
    assert count == [0]


def test_a_matrix_that_all_samples_share() -> None:
    z = torch.rand(40, SIDE**3, dtype=D, generator=torch.Generator().manual_seed(0))
    A = operator(space, z)
    by = ByEntries(A)
    by.expect(1000)
    assert by.written and A.formed.is_one
    torch.testing.assert_close(by.operator.rmv(z), space(z))
    some = by.operator.select(torch.tensor([7, 9, 30]))
    assert some is not None
    torch.testing.assert_close(some.mv(z[[7, 9, 30]]), space(z[[7, 9, 30]]))


def test_what_it_holds_is_freed_with_it() -> None:
    """By itself, not when the collector comes: it holds the graph of the function, and the matrix."""
    by = ByEntries(varied(space, 1))
    by.operator.mv(torch.ones(1, SIDE**3, dtype=D))
    by.expect(1000)
    gone = weakref.ref(by)
    gc.disable()
    try:
        del by
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("without", ["pattern", "real numbers"])
def test_without_a_pattern_it_is_the_operator_itself(without: str) -> None:
    A = varied(space, 1)
    if without == "pattern":
        A.price = lambda alike=None: None
    else:
        A.like = A.like.cfloat()
    by = ByEntries(A)
    by.expect(1000)
    assert by.operator is A and not by.written and not by.looks


@pytest.mark.parametrize("function", [space, upwind])
def test_a_solve_goes_through_the_graph_no_more_than_that_takes(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    A = varied(function, 1)
    b = torch.randn(1, A.size, dtype=D, generator=torch.Generator().manual_seed(2))
    count = counted(A, monkeypatch)
    found = Auto().solve(A, b, rtol=1e-11, atol=0.0, max_steps=None)
    assert bool(found.converged) and float((A.mv(found.x) - b).norm()) <= 1e-11 * float(b.norm())
    assert int(found.steps) >= 30, "not by factors"
    assert count[0] <= 20, "eight, those side by side that show the entries, and checks"


def test_minimisation_does_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def energy(z: Tensor, x: Tensor) -> Tensor:
        return 50 * (z * space(z)).sum() + 0.25 * (z**4).sum() - z @ x

    calls = []
    expect = ByEntries.expect
    monkeypatch.setattr(ByEntries, "expect", lambda self, k: (expect(self, k), calls.append(self.written))[0])
    x = torch.randn(SIDE**3, dtype=D, generator=torch.Generator().manual_seed(3)) + 9
    solution = ik.argmin(energy, torch.zeros_like(x), (x,), solver="newton_cg")
    z = solution.value
    torch.testing.assert_close(100 * space(z) + z**3, x, rtol=1e-6, atol=1e-6)
    assert any(calls)


def test_what_is_not_written_down_is_no_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    A = varied(space, 1)
    count, price = counted(A, monkeypatch), A.price()
    monkeypatch.setattr(newton_cg, "looks", lambda price: ())
    monkeypatch.setattr(ByEntries, "expect", lambda self, products: None)
    g, one, factors = torch.ones_like(A.like), A.like.new_ones(1), 2.0 * price.products + 4
    ball = (torch.inf * one, 1e-14 * one, torch.zeros(1, dtype=torch.bool))
    assert ByEntries(A).affords(factors) > factors
    assert steihaug(A, g, *ball, 500, factors) is None and count[0] == factors


def test_the_derivative_is_right() -> None:
    x = torch.randn(SIDE**3, dtype=D, generator=torch.Generator().manual_seed(4)).requires_grad_()
    z = ik.root(lambda z, x: upwind(z) + z**3 - x, torch.zeros(SIDE**3, dtype=D), (x,)).value
    w = torch.randn(SIDE**3, dtype=D, generator=torch.Generator().manual_seed(5))
    (grad,) = torch.autograd.grad(z @ w, x)
    (back,) = torch.func.vjp(lambda z: upwind(z) + z**3, z.detach())[1](grad)
    torch.testing.assert_close(back, w, rtol=1e-7, atol=1e-8)


def bordered() -> Operator:
    """Sparse but for a number that all unknowns share."""
    z = torch.rand(5, SIDE**3, dtype=D, generator=torch.Generator().manual_seed(0))
    return operator(lambda z: upwind(z) + z**3 + z.mean(-1, keepdim=True), z)


def in_like_units() -> Operator:
    """Of unknowns and equations in units of their own, made of like size."""
    units = torch.logspace(-5, 5, SIDE**3, dtype=D)
    z = torch.rand(5, SIDE**3, dtype=D, generator=torch.Generator().manual_seed(0)) * units
    A = operator(lambda z: upwind(z / units) + (z / units) ** 3, z)
    like = equilibrated(A, A.mv(z), z, False)
    assert like is not None
    return like.A


@pytest.mark.parametrize("make", [bordered, in_like_units])
def test_matrices_of_another_make(make: Callable[[], Operator]) -> None:
    A, index = make(), torch.tensor([3, 1])
    v = torch.randn(A.batch, A.size, dtype=D, generator=torch.Generator().manual_seed(1))
    want, by = (A.mv(v), A.rmv(v)), ByEntries(A)
    by.expect(1000)
    assert by.written
    torch.testing.assert_close((by.plain.mv(v), by.plain.rmv(v)), want, rtol=1e-11, atol=1e-11)
    some = by.plain.select(index)
    assert some is not None
    found = some.mv(v[index]), some.rmv(v[index])
    torch.testing.assert_close(found, tuple(w[index] for w in want), rtol=1e-11, atol=1e-11)


def conducting() -> Operator:
    """Conductivities between 1 and 1e4; not symmetric."""
    c = torch.logspace(0, 4, SIDE**3, dtype=D)
    return operator(lambda z: c * upwind(z) + z**3, torch.rand(5, SIDE**3, dtype=D))


def shared_conducting() -> Operator:
    c = torch.logspace(0, 4, SIDE**3, dtype=D)
    return operator(lambda z: c * upwind(z) + z.mean(-1, keepdim=True), torch.rand(5, SIDE**3, dtype=D))


@pytest.mark.parametrize("make", [conducting, shared_conducting, in_like_units])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_uneven_diagonal_is_made_even(make: Callable[[], Operator], transposed: bool) -> None:
    A, index = make(), torch.tensor([3, 1])
    A = A.T if transposed else A
    by = ByEntries(A)
    assert by.scale is None
    by.expect(1000)
    assert by.scale is not None
    v = torch.randn(A.batch, A.size, dtype=D, generator=torch.Generator().manual_seed(1))
    S = by.scale
    torch.testing.assert_close(by.operator.mv(v), S * A.mv(S * v), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(by.operator.rmv(v), S * A.rmv(S * v), rtol=1e-10, atol=1e-9)
    some = by.operator.select(index)
    assert some is not None
    torch.testing.assert_close(some.mv(v[index]), by.operator.mv(v)[index], rtol=1e-10, atol=1e-9)
    few = torch.zeros_like(v).index_fill_(1, torch.arange(0, A.size, 500), 1)  # no two of them linked
    each = (few * by.operator.mv(few))[:, ::500]
    torch.testing.assert_close(each, each[:, :1].expand_as(each), rtol=1e-2, atol=0)


def test_an_even_diagonal_is_left_alone() -> None:
    by = ByEntries(varied(upwind, 2))
    by.expect(1000)
    assert by.written and by.scale is None
