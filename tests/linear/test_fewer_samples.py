"""Samples that are solved are left out of later products, and no number changes by it (``linear/iterative/dropping.py``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.foundation.operators import Operator, minus, repeated, shifted, single
from implicitkit.linear.equilibrated import _scaled
from implicitkit.linear.iterative import contraction, dropping
from implicitkit.linear.iterative.contraction import Contraction
from implicitkit.linear.iterative.frugal import Frugal
from implicitkit.linear.iterative.gmres import _Space
from implicitkit.problem import linearised_samples

BATCH, SIZE = 16, 24


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are left out however few numbers that spares."""
    monkeypatch.setattr(dropping, "_SPARED", 0)


class Counted:
    """An operator of matrices, and how many rows its products have had."""

    def __init__(self, matrices: Tensor, selects: bool = True, **known: Any) -> None:
        self.rows, self.selects, self.known = 0, selects, known
        self.A = self.of(matrices)

    def of(self, matrices: Tensor) -> Operator:
        def times(transposed: bool) -> Callable[[Tensor], Tensor]:
            def product(v: Tensor) -> Tensor:
                self.rows += len(v)
                return torch.einsum("bji,bj->bi" if transposed else "bij,bj->bi", matrices, v)

            return product

        batch, n, _ = matrices.shape
        A = Operator(
            times(False), times(True), lambda: matrices, batch=batch, size=n, like=matrices[:, 0], **self.known
        )
        if self.selects:
            A.selects = lambda samples: self.of(matrices.index_select(0, samples))
        return A


def _maps(slow: int, radius: float = 0.9) -> Tensor:
    """``J - I``: in the last samples ``J`` has this spectral radius (in a quarter of them a little more), in the others a
    tenth of it."""
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(BATCH, SIZE, SIZE, generator=g, dtype=torch.float64)).Q
    i = torch.arange(BATCH).flip(0)
    sizes = torch.where(i < slow, torch.where(i < slow // 4, 1 - (1 - radius) / 2, radius), 0.1 * radius).view(-1, 1, 1)
    spread = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    return sizes * (Q * spread) @ Q.mT - torch.eye(SIZE, dtype=torch.float64)


SOLVERS: dict[str, Any] = {
    "gmres": ik.linear.GMRES(),
    "gmres, restarted": ik.linear.GMRES(restart=6),
    "bicgstab": ik.linear.BiCGStab(),
    "cg": ik.linear.CG(),
    "lsmr": ik.linear.LSMR(),
    "neumann": ik.linear.NeumannSeries(),
    "broyden": ik.linear.BroydenLinear(),
    "broyden, few pairs": ik.linear.BroydenLinear(memory=30, when_full="stop"),
    "contraction": Contraction(),
    "frugal": Frugal(40.0),
}


@pytest.mark.parametrize("slow", [3, 8, 1])
@pytest.mark.parametrize("name", SOLVERS)
def test_answers_are_those_of_the_whole_batch(name: str, slow: int) -> None:
    solver, matrices = SOLVERS[name], _maps(slow)
    b = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b[0] = 0
    known = {"symmetric": True, "fixed_point": True}
    some, all_ = Counted(matrices, **known), Counted(matrices, selects=False, **known)
    found, whole = (solver.solve(counted.A, b, rtol=1e-9, atol=0.0, max_steps=None) for counted in (some, all_))
    gives_up = name == "frugal"  # what takes more products than factors
    assert gives_up or bool(whole.converged.all()), name
    torch.testing.assert_close(found.x, whole.x, rtol=1e-7, atol=1e-9)
    assert torch.equal(found.steps, whole.steps), name
    assert torch.equal(found.converged, whole.converged), name
    exact = torch.linalg.solve(matrices, b.unsqueeze(2)).squeeze(2)
    good = whole.converged
    torch.testing.assert_close(found.x[good], exact[good], rtol=1e-6, atol=1e-7)
    assert some.rows < 0.9 * all_.rows, (name, some.rows, all_.rows)


def test_the_series_leaves_out_what_it_has_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of it: the one that is fast from the start, and the one that follows six steps of GMRES."""
    b = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr(contraction, "_pays", lambda Ht, *_: torch.ones(len(Ht), dtype=torch.bool))
    for radius in (0.33, 0.8):
        some, all_ = (Counted(_maps(4, radius), selects=s, fixed_point=True) for s in (True, False))
        found, whole = (Contraction().solve(c.A, b, rtol=1e-12, atol=0.0, max_steps=None) for c in (some, all_))
        assert bool(found.converged.all()), radius
        torch.testing.assert_close(found.x, whole.x, rtol=1e-10, atol=1e-12)
        assert some.rows < 0.8 * all_.rows, radius


def test_a_failed_sample_is_reported_as_ever() -> None:
    """One singular block of sixteen: the others are solved, it is marked, whether they are left out or not."""
    matrices = _maps(4)
    matrices[2] = 0
    b = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b[5, 3] = torch.nan
    for name in ("gmres", "bicgstab", "neumann", "broyden", "contraction", "lsmr"):
        known = {"fixed_point": True}
        some, all_ = (Counted(matrices, selects=s, **known) for s in (True, False))
        found, whole = (
            SOLVERS[name].solve(c.A, b, rtol=1e-9, atol=0.0, max_steps=60 if name != "lsmr" else 2000)
            for c in (some, all_)
        )
        assert torch.equal(found.converged, whole.converged), name
        assert found.reason == whole.reason, name
        good = torch.arange(BATCH) > 5
        torch.testing.assert_close(found.x[good], whole.x[good], rtol=1e-7, atol=1e-9)


def _made() -> dict[str, Callable[[Operator], Operator]]:
    g = torch.Generator().manual_seed(2)
    other = torch.randn(BATCH, SIZE, SIZE, generator=g, dtype=torch.float64)
    shift, scale = torch.randn(2, BATCH, generator=g, dtype=torch.float64)
    left, right = torch.rand(2, BATCH, SIZE, generator=g, dtype=torch.float64) + 0.5
    return {
        "itself": lambda A: A,
        "transposed": lambda A: A.T,
        "shifted": lambda A: shifted(A, shift, scale),
        "shifted by a number": lambda A: shifted(A, 2.0),
        "difference": lambda A: minus(A, Counted(other).A),
        "scaled": lambda A: _scaled(A, left, right),
        "for three right-hand sides": lambda A: repeated(A, 3),
        "in single precision": lambda A: single(A),
    }


@pytest.mark.parametrize("name", _made())
def test_what_is_made_of_operators_can_be_selected(name: str) -> None:
    skew = torch.ones(SIZE, SIZE, dtype=torch.float64).triu(1)  # so that a matrix is not its own transposed
    A = _made()[name](Counted(_maps(4) + skew).A)
    times = A.batch // BATCH
    samples = torch.tensor([1, 4, 6] if times == 1 else [1, 4, 6, BATCH + 4, 2 * BATCH + 2])
    small = A.select(samples)
    assert small is not None and small.batch == len(samples)
    v = torch.randn(A.batch, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(A.like.dtype)
    for product, of_some in ((A.mv, small.mv), (A.rmv, small.rmv)):
        torch.testing.assert_close(of_some(v[samples]), product(v)[samples])
    again = small.select(torch.tensor([0, 2])) if times == 1 else None
    if again is not None:
        torch.testing.assert_close(again.mv(v[samples[[0, 2]]]), A.mv(v)[samples[[0, 2]]])
    assert minus(A, Counted(_maps(4).repeat(times, 1, 1), selects=False).A).select(samples) is None


# ------------------------------------------------------------------------------------------------- of the user's function
class Cell(nn.Module):
    """One sample in eight is slow; ``rows``: how many samples each evaluation had."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.W, self.rows = nn.Linear(SIZE, SIZE, dtype=torch.float64), []

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.rows.append(len(z))
        return torch.tanh(1.2 * self.W(z) / torch.linalg.matrix_norm(self.W.weight.detach(), 2) + x)


def _inputs() -> Tensor:
    x = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x * torch.where(torch.arange(16) % 8 == 0, 0.05, 3.0).unsqueeze(1)


def _solve(cell: Any, x: Tensor, **options: Any) -> Tensor:
    start = torch.zeros(x.shape[0], SIZE, dtype=x.dtype)
    given = {"in_dims": (0,), "rule": ik.Implicit("gmres", rtol=1e-12), "solver": "newton", "rtol": 1e-13} | options
    return ik.fixed_point(cell, start, (x,), batch_dims=1, **given).value


def test_derivatives_are_those_of_the_whole_batch() -> None:
    """Backward, double backward and every transform, beside the solve of which nothing is known by rows."""
    x, w = _inputs(), torch.randn(16, SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cell = Cell()

    def loss(x: Tensor, dims: Any = (0,)) -> Tensor:
        return (_solve(cell, x, in_dims=dims) * w).sum()

    def whole(x: Tensor) -> Tensor:
        return loss(x, None)

    def first(x: Tensor) -> Tensor:
        return _solve(cell, x)[:, 0]

    def first_of_all(x: Tensor) -> Tensor:
        return _solve(cell, x, in_dims=None)[:, 0]

    results = {}
    for name, f, column in (("some", loss, first), ("whole", whole, first_of_all)):
        y = x.clone().requires_grad_()
        value = f(y)
        once = torch.autograd.grad(value, [y, *cell.parameters()], create_graph=True)
        twice = torch.autograd.grad(once[0].square().sum(), [y, cell.W.weight])
        few = x[:8]
        results[name] = [
            *once,
            *twice,
            torch.func.grad(f)(x),
            torch.func.jvp(f, (x,), (w,))[1],
            torch.func.vmap(torch.func.grad(f))(torch.stack([x, 0.9 * x])),
            torch.func.jacrev(column)(few),
            torch.func.jacfwd(column)(few),
        ]
        y = x.clone().requires_grad_()
        value = f(y)
        cell.rows.clear()
        value.backward()
        assert (min(cell.rows) < 16) == (name == "some"), (name, cell.rows)
        results[name].append(y.grad)
    for k, (a, b) in enumerate(zip(results["some"], results["whole"], strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda said, k=k: f"result {k}: {said}")


def test_many_samples_to_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """``vmap`` over a batch: rows are members of it, and samples of theirs are left out by rows."""
    x = torch.stack([_inputs() + 12.0, _inputs(), _inputs() + 13.0, _inputs() + 14.0])
    cell = Cell()
    chosen, samples_of = [], linearised_samples._samples_of
    monkeypatch.setattr(
        linearised_samples, "_samples_of", lambda rows, n: chosen.append(rows.tolist()) or samples_of(rows, n)
    )
    found, whole = (
        torch.func.vmap(torch.func.grad(lambda t, dims=dims: _solve(cell, t, in_dims=dims).square().sum()))(x)
        for dims in ((0,), None)
    )
    torch.testing.assert_close(found, whole, rtol=1e-8, atol=1e-9)
    assert [1] in chosen  # the slow one of four


def _captures(x: Tensor, cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    c = torch.linspace(3.0, 0.0, 16, dtype=torch.float64).unsqueeze(1)
    return lambda z, x: cell(z, x + c[: len(z)])


def _captures_far_out(x: Tensor, cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    """Values differ by a thousandth of the state, derivatives by all they are."""
    c = torch.linspace(1.0, 0.1, 16, dtype=torch.float64).unsqueeze(1)
    return lambda z, x: 1e4 + c[: len(z)] * cell(z - 1e4, x)


def _draws(x: Tensor, cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    def function(z: Tensor, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return cell(z, x + torch.rand(len(z), 1, dtype=torch.float64))

    return function


def _fails(x: Tensor, cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    c = torch.ones(16, 1, dtype=torch.float64)
    return lambda z, x: cell(z, x) + c


def _broadcasts(x: Tensor, cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    """One slow sample is left, which goes with any number of rows."""
    x[0] *= 60
    return _fails(x, cell)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("linear_solver", ["gmres", "neumann"])
@pytest.mark.parametrize(
    "made", [_captures, _captures_far_out, _draws, _fails, _broadcasts], ids=lambda made: made.__name__[1:]
)
def test_a_function_that_is_not_one_of_samples_is_not_selected(made: Any, linear_solver: str) -> None:
    """The solve begins at its solution, so that it drops nothing and tells nothing; the series, unlike GMRES, has no look at
    a residual by the whole matrix."""
    x, cell = _inputs(), Cell()
    function = made(x, cell)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dims in ((0,), None):
            y = x.clone().requires_grad_()
            start = cell(torch.zeros(16, SIZE, dtype=torch.float64), x)
            z = ik.fixed_point(function, start, (y,), batch_dims=1, solver="picard", rtol=1e-10, max_steps=3000).value
            found = ik.fixed_point(
                function,
                z.detach(),
                (y,),
                batch_dims=1,
                in_dims=dims,
                rtol=1e-9,
                rule=ik.Implicit(linear_solver, rtol=1e-12),
            )
            found.value.square().sum().backward()
            assert bool(found.backward.converged.all())
            results.append(y.grad)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_hooks_see_whole_numbers_of_samples_and_leave_no_trace() -> None:
    """What forward hooks see may be fewer samples; the state of the module is as it was."""
    cell, x = Cell(), _inputs()
    norm = nn.BatchNorm1d(SIZE, dtype=torch.float64).eval()
    seen: list[int] = []
    norm.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    y = x.clone().requires_grad_()
    _solve(lambda z, x: norm(cell(z, x)), y).square().sum().backward()
    assert min(seen) < 16
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())


def test_statistics_of_a_batch_are_refused_as_ever() -> None:
    """BatchNorm in training couples the samples: an error, and no selection."""
    cell, x = Cell(), _inputs()
    norm = nn.BatchNorm1d(SIZE, dtype=torch.float64, track_running_stats=False)
    y = x.clone().requires_grad_()
    with pytest.raises(ValueError, match="independent"):
        _solve(lambda z, x: 0.5 * norm(cell(z, x)), y, solver="picard", rtol=1e-9).square().sum().backward()


def test_newtons_products_leave_out_solved_samples_and_count_what_that_takes() -> None:
    """Newton's method by products: the same points, by evaluations more, which are counted, of few samples."""
    results = []
    for dims in ((0,), None):
        cell, x = Cell(), _inputs()
        start = torch.zeros(16, SIZE, dtype=torch.float64)
        solver = ik.NewtonKrylov(inner_steps=40)
        found = ik.fixed_point(cell, start, (x,), batch_dims=1, in_dims=dims, solver=solver, rtol=1e-12)
        assert bool(found.converged.all())
        results.append(found)
    some, whole = results
    torch.testing.assert_close(some.value, whole.value, rtol=1e-9, atol=1e-10)
    assert some.evaluations > whole.evaluations
    assert some.sample_evaluations <= whole.sample_evaluations == 16 * whole.evaluations
    assert some.sample_evaluations < 0.75 * 16 * some.evaluations


@pytest.mark.parametrize(
    ("left", "ahead", "drops"), [(8, 2.0, False), (8, 2.1, True), (4, 1.3, False), (4, 1.4, True), (4, None, True)]
)
def test_a_selection_is_asked_for_where_it_spares_more_than_a_product(
    left: int, ahead: float | None, drops: bool
) -> None:
    """It is compared with one of the whole: with half of the samples left two products are the price, with a quarter 4/3."""
    one = Counted(_maps(4))
    some = dropping.Fewer(one.A)
    known = None if ahead is None else (lambda: ahead)
    index = some.drop(torch.arange(BATCH) < left, left, lambda: (torch.zeros(BATCH),), known)
    assert (index is not None) is drops
    assert (some.A is not one.A) is drops


def test_how_many_products_are_ahead() -> None:
    """By hand, after two of them: a square that has fallen by 16 and shall fall by 256 needs two more, and one that has
    not fallen is never done; nor do samples count that are done, or were never asked for."""
    rows = (
        ([16.0, 64.0, 4.0], [256.0, 64.0, 0.0], 2.0),
        ([16.0, 4.0, 4.0], [256.0, 64.0, 1.0], 4.0),
        ([1.0, 4.0, 4.0], [4.0, 4.0, 4.0], torch.inf),
    )
    for size, limit, products in rows:
        square = (torch.tensor(t, dtype=torch.float64).unsqueeze(1) for t in (size, limit))
        space: Any = SimpleNamespace(**dict(zip(("size", "limit"), square, strict=True)), H=[None, None])
        assert _Space.ahead(space) == pytest.approx(products), (size, limit)
