"""What is kept from one call for the next: entries and factors of a matrix that is the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import kept
from implicitkit.foundation.kept import Kept
from implicitkit.linear.conditions import sparse_saddle
from implicitkit.linear.conditions.sparse_saddle import SparseSaddle
from implicitkit.linear.factors.banded import SymmetricBand
from implicitkit.linear.factors.gram import Gram, _LastGrams
from implicitkit.linear.factors.last_matrix import LastMatrix
from implicitkit.sparsity.compression import Coloured

D = torch.float64
N = 160


def chain(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.cat([w * (z[..., 1:] + 0.5 * z[..., :-1]) - y, 0.1 * z], -1)


def by_hand(y: Tensor, w: Tensor) -> Tensor:
    eye = torch.eye(N, dtype=D)
    A = torch.cat([w.unsqueeze(1) * (eye[1:] + 0.5 * eye[:-1]), 0.1 * eye])
    return torch.linalg.solve(A.mT @ A, A.mT @ torch.cat([y, torch.zeros(N, dtype=D)]))


def fit() -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    return ik.least_squares, lambda z, y, w: chain(z, y, w)


def minimum() -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    return ik.argmin, lambda z, y, w: chain(z, y, w).square().sum()


@pytest.mark.parametrize("make", [fit, minimum])
def test_the_same_design_is_told_by_one_product_and_factored_once(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five calls with other data, and others of one weight, once by a billionth; values and derivatives are those by hand
    in each."""
    made = {"entries": 0, "factors": 0}

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            made[name] += 1
            return plain(*given)

        return call

    monkeypatch.setattr(Coloured, "_entries_anew", counted("entries", Coloured._entries_anew))
    monkeypatch.setattr(SymmetricBand, "cholesky", counted("factors", SymmetricBand.cholesky))
    solve, function = make()
    c, counts = torch.cos(torch.arange(N, dtype=D)), []
    for k, change in enumerate((0.0, 0.0, 0.0, 1.0, 1.0, 1.0 + 1e-9)):
        y = (0.1 * torch.sin((1 + k) * torch.arange(N - 1, dtype=D))).requires_grad_()
        w = torch.linspace(0.5, 1.5, N - 1, dtype=D)
        w[7] += change
        w.requires_grad_()
        made.update(entries=0, factors=0)
        z, want = solve(function, torch.zeros(N, dtype=D), (y, w)).value, by_hand(y, w)
        found = torch.autograd.grad((c * z).sum(), (y, w))
        counts.append((bool(made["entries"]), bool(made["factors"])))
        torch.testing.assert_close(z, want, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(found, torch.autograd.grad((c * want).sum(), (y, w)), rtol=1e-9, atol=1e-11)
    assert counts[:4] == [(True, True), (False, False), (False, False), (True, True)] and counts[5] == (True, True)


def test_products_that_have_failed_for_a_design_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that spread over a graph, by conjugate gradients before there are factors."""
    from implicitkit.solver.minimise import newton_cg

    tried, plain = [], newton_cg.steihaug
    monkeypatch.setattr(newton_cg, "steihaug", lambda *given, **named: (tried.append(1), plain(*given, **named))[1])
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(600, 2, generator=generator, dtype=D)
    j = torch.cdist(points, points).topk(6, largest=False).indices[:, 1:]

    def energy(z: Tensor, m: Tensor) -> Tensor:
        return (z.unsqueeze(1) - z[j]).square().sum() + 4 * (z[:30] - m).square().sum() + 1e-3 * z.square().sum()

    for k in range(2):
        tried.clear()
        ik.argmin(energy, torch.zeros(600, dtype=D), (torch.sin((k + 1) * torch.arange(30, dtype=D)),))
        assert bool(tried) == (k == 0)


def test_factors_of_the_same_matrix_to_the_last_bit() -> None:
    """Neither of one nearby, nor of one whose entries stand elsewhere; and ``None`` is not remembered."""
    last, made = LastMatrix(), []
    A = sp.csc_matrix(np.array([[2.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 1.0]]))
    near, moved = A.copy(), sp.csc_matrix(np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 1.0]]))
    near.data = A.data * (1 + 1e-15)
    moved.data = A.data
    for matrix, count in ((A, 1), (A, 1), (moved, 2), (near, 3), (near, 3), (A, 4)):
        last.factors(matrix, lambda: made.append(1) or "factors", lambda _: 9)
        assert len(made) == count
    none = LastMatrix()
    assert [none.factors(A, lambda: made.append(1), lambda _: 9) for _ in range(2)] == [None] * 2 and len(made) == 6


def test_what_is_kept_keeps_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first, what is too large is not kept, and what was kept in vain is kept more and more rarely."""
    monkeypatch.setattr(kept, "_MOST", 100)
    monkeypatch.setattr(Kept, "_all", type(Kept._all)())
    places = [Kept() for _ in range(4)]
    for place, numbers in zip(places, (40, 40, 40, 101), strict=True):
        place.put("it", numbers)
    assert [place.value for place in places] == [None, "it", "it", None]
    places[1].put(None, 0)
    assert places[1].value is None and places[2].value == "it"
    count = len(Kept._all)
    places.pop(2)  # who had it is gone
    gc.collect()
    assert len(Kept._all) == count - 1
    place, wanted = Kept(), []
    for _ in range(20):
        wanted.append(place.is_wanted())
        place.served(False) if wanted[-1] else None
    assert [k for k, is_wanted in enumerate(wanted) if is_wanted] == [0, 2, 6, 14]


def test_several_right_hand_sides_are_solved_for_at_once() -> None:
    A = sp.csc_matrix(sp.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(40, 40)))
    saddle, b = SparseSaddle(A, 40, layout=sparse_saddle.Layout(A)), np.random.default_rng(0).standard_normal((40, 3))
    np.testing.assert_allclose(A @ saddle.once(b), b, rtol=0, atol=1e-14)
    np.testing.assert_allclose(saddle.once(b)[:, 1], saddle.once(b[:, 1]), rtol=0, atol=1e-15)


def test_entries_that_were_infinite_are_not_those_of_every_matrix() -> None:
    """A slope of infinity at the start is gone after it: taken for all that came later it made ten times the evaluations."""

    def energy(z: Tensor, a: Tensor) -> Tensor:
        root = (2 / 3 * z[:1] ** 1.5).sum()
        return root + z[1:].square().sum() - (a * z).sum() + 0.05 * (z[2:] - z[1:-1]).square().sum()

    a, z0 = torch.linspace(1, 1.2, 200, dtype=D), torch.linspace(1, 2, 200, dtype=D)
    found = [ik.argmin(energy, z0.index_fill(0, torch.tensor([0]), first), (a,)) for first in (0.0, 1.5)]
    torch.testing.assert_close(found[0].value, found[1].value, rtol=1e-6, atol=0)
    assert found[1].evaluations <= 12


def test_squares_and_the_entries_that_they_are_of_are_put_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may ask at any time."""
    last, grams, asked = _LastGrams(), [[gram] for gram in _grams(2)], []
    old, new = np.zeros((1, 3)), np.ones((1, 3))
    last.keep(old, grams[0])
    plain = Kept.put
    monkeypatch.setattr(Kept, "put", lambda *given: (asked.append(last.of(new)), plain(*given))[1])
    last.keep(new, grams[1])
    assert asked == [None] and last.of(new) is grams[1] and last.of(old) is None


def _grams(count: int) -> list[Gram]:
    A = sp.csc_matrix(np.eye(3))
    return [Gram(A, np.zeros((0, 3)), np.zeros(0)) for _ in range(count)]
