"""The linear systems of fixed-point maps: by GMRES, or by the plain series where that costs less."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from matrices import with_eigenvalues
from torch import Tensor

from implicitkit.foundation.autodiff import linearise
from implicitkit.linear import GMRES, Operator
from implicitkit.linear.auto import Auto
from implicitkit.linear.factors.lu import LU
from implicitkit.linear.iterative.contraction import Contraction, _crawls, _dearer
from implicitkit.linear.iterative.neumann import NeumannSeries
from implicitkit.linear.price import cost_of_product

F64 = torch.float64
N, SAMPLES = 200, 8
spectrum = functools.partial(with_eigenvalues, N)


def system(*blocks: Tensor) -> tuple[Operator, Tensor]:
    """``J - I`` of these Jacobians, and right-hand sides."""
    M = torch.stack(blocks) - torch.eye(N, dtype=F64)
    b = torch.randn(len(M), N, generator=torch.Generator().manual_seed(9), dtype=F64)

    def product(M: Tensor, v: Tensor) -> Tensor:
        return (M @ v.unsqueeze(2)).squeeze(2)

    return Operator(
        lambda v: product(M, v), lambda w: product(M.mT, w), lambda: M, batch=len(M), size=N, like=b, fixed_point=True
    ), b


def orthogonalised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each cycle of GMRES asked for, from here on."""
    import importlib

    module, seen = importlib.import_module("implicitkit.linear.iterative.contraction"), list[int]()
    arnoldi = module.arnoldi

    def counted(*given: object) -> object:
        found = arnoldi(*given)
        seen.append(int(found.steps.max()))
        return found

    monkeypatch.setattr(module, "arnoldi", counted)
    return seen


LIMITS = {"rtol": 1e-6, "atol": 0.0}


@pytest.mark.parametrize(("nodes", "cycles"), [(8, []), (100, [6])], ids=["cheap", "dear"])
def test_a_disk_is_left_to_the_series(nodes: int, cycles: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where products are cheap, else after six steps of GMRES; no more is orthogonalised, and the answer meets the
    tolerance by its true residual."""
    A, b = system(*(spectrum(0.8, [], seed) for seed in range(SAMPLES)))
    A.graph = lambda: (nodes, 0, 0)
    seen = orthogonalised(monkeypatch)
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    assert seen == cycles and bool(found.converged.all())
    left = torch.linalg.vector_norm(A.mv(found.x) - b, dim=1)
    torch.testing.assert_close(left, found.residual_norm)
    assert bool((left <= 1e-6 * torch.linalg.vector_norm(b, dim=1)).all())
    least = GMRES().solve(A, b, **LIMITS, max_steps=None).steps
    assert bool((found.steps >= least).all() and (found.steps <= 2 * least).all())


def test_gmres_goes_faster_the_more_of_all_dimensions_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a larger disk, to twelve digits: of 200 dimensions it needs some 120, and the series more than 250 products, dear
    ones here."""
    A, b = system(*(spectrum(0.9, [], seed) for seed in range(SAMPLES)))
    A.graph = lambda: (100, 0, 0)
    seen = orthogonalised(monkeypatch)
    found = Contraction().solve(A, b, rtol=1e-12, atol=0.0, max_steps=None)
    assert min(seen) > 6 and bool(found.converged.all())
    assert torch.equal(found.steps, GMRES().solve(A, b, rtol=1e-12, atol=0.0, max_steps=None).steps)


def test_what_a_product_of_gmres_costs_beside_one_of_the_series() -> None:
    """As measured, to a third: one layer of ``n`` unknowns, float32, what a product more costs from 6 to 16, and to 40."""
    measured = {
        (64, 128): (3.2, 3.7), (64, 256): (2.1, 2.7), (256, 128): (2.5, 3.9), (256, 256): (1.8, 2.5),
        (64, 512): (1.5, 1.7), (8, 512): (2.1, 2.1), (256, 512): (1.3, 2.2), (16, 128): (3.5, 3.1),
    }  # fmt: skip
    few, many = torch.tensor(22.0), torch.tensor(46.0)  # against half of so many vectors each is orthogonalised
    for (batch, n), ratios in measured.items():
        r = torch.empty(batch, n, device="meta")
        nothing = lambda v: v  # noqa: E731
        A = Operator(nothing, nothing, lambda r=r: r, batch=batch, size=n, like=r, fixed_point=True)
        A.weight = (batch * n + 2 * n * n) // batch
        for products, ratio in zip((few, many), ratios, strict=True):
            found = float(_dearer(A, r, 50, products))
            assert ratio / 1.35 < found < 1.35 * ratio, (batch, n, found)
        A.weight = n  # no parameters: a product costs less, and what GMRES adds is more of it
        assert _dearer(A, r, 50, many) > found
        A.graph = lambda r=r: (400, 800 * r.numel(), 0)  # a deep one
        assert 1 < _dearer(A, r, 50, many) < 1.25


def test_what_cheap_products_of_gmres_cost_beside_those_of_the_series() -> None:
    """As measured, to a third: a band and a grid, float64, whose product is so many nodes of a graph and nothing else; what
    one costs more of the first 6 and of 12."""
    measured = {
        (1, 1000, 9): (2.6, 2.6), (1, 10_000, 9): (2.8, 3.0), (64, 300, 9): (3.0, 3.5), (64, 289, 16): (2.8, 3.0),
        (64, 1000, 9): (3.1, 3.6), (1, 100_000, 9): (2.6, 3.0), (1, 99_856, 16): (2.1, 2.5), (64, 4000, 9): (2.7, 4.0),
        (1, 1_000_000, 9): (2.0, 3.0),
    }  # fmt: skip
    for (batch, n, nodes), ratios in measured.items():
        r = torch.empty(batch, n, device="meta")
        nothing = lambda v: v  # noqa: E731
        A = Operator(nothing, nothing, lambda r=r: r, batch=batch, size=n, like=r, fixed_point=True)
        A.weight, A.graph = n, lambda r=r, nodes=nodes: (nodes, nodes * r.numel(), 0)
        for products, ratio in zip((6.0, 12.0), ratios, strict=True):
            found = float(_dearer(A, r, 50, torch.tensor(products)))
            assert ratio / 1.35 < found < 1.35 * ratio, (batch, n, found)


def test_products_of_two_sizes_cost_what_they_take() -> None:
    """One layer at (64, 128) and at (256, 512): 48 and 1660 microseconds, and 22 at (16, 32); to a tenth of the ratio, and
    less near where calls are most of it."""
    small, large, tiny = (cost_of_product(n, 5, through, k) for n, through, k in (
        (64 * 128, 49_152, 128), (256 * 512, 786_432, 512), (16 * 32, 3072, 32),
    ))  # fmt: skip
    assert large / small == pytest.approx(1660 / 48, rel=0.1)
    assert small / tiny == pytest.approx(48 / 22, rel=0.4)


def test_what_a_product_costs_is_seen_in_the_graph() -> None:
    """Of a function of fifty layers each is dear, and GMRES is not given up for more of them."""

    def layers(count: int) -> Callable[[Tensor], Tensor]:
        def function(z: Tensor) -> Tensor:
            y = z
            for _ in range(count):
                y = y + 1.0
            return (y - count) @ J.mT - z

        return function

    J, b = spectrum(0.8, [], 0), torch.randn(4, N, generator=torch.Generator().manual_seed(9), dtype=F64)
    for count, dear in ((1, False), (300, True)):
        _, A = linearise(layers(count), torch.zeros_like(b), fixed_point=True)
        for operator in (A, A.T):
            found, least = (s.solve(operator, b, **LIMITS, max_steps=None) for s in (Contraction(), GMRES()))
            assert torch.equal(found.steps, least.steps) == dear and bool((found.steps >= least.steps).all())
            torch.testing.assert_close(operator.mv(found.x), b, rtol=0, atol=1e-5)


def test_a_strong_contraction_is_left_to_the_series_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No orthogonalisation, the products of the plain series, and one for what is left; a sample that is done waits."""
    A, b = system(spectrum(0.2, []), spectrum(0.1, [], 1), spectrum(0.02, [], 2))
    seen = orthogonalised(monkeypatch)
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    series = NeumannSeries().solve(A, b, **LIMITS, max_steps=None)
    assert not seen and bool(found.converged.all())
    assert bool(((found.steps - series.steps).abs() <= 1).all()) and int(found.steps[2]) < int(found.steps[0])
    torch.testing.assert_close(A.mv(found.x), b, rtol=0, atol=1e-4)


def test_a_short_series_is_not_given_up_for_a_second_product_that_gains_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eigenvalues in a disk polynomials have nothing to win, whatever the first product leaves; where the series would be
    longer, and products are dear, they are tried."""
    for radius, nodes, cycles in ((0.2, 8, 0), (0.3, 100, 1)):
        J = spectrum(radius, [], 7)
        A, b = system(J)
        A.graph = lambda nodes=nodes: (nodes, 0, 0)
        weak = torch.linalg.svd(J).Vh[N // 2 :]  # of the first product little is left
        b = b @ weak.mT @ weak
        with monkeypatch.context() as watched:
            seen = orthogonalised(watched)
            found = Contraction().solve(A, b, **LIMITS, max_steps=None)
        assert len(seen) == cycles and bool(found.converged.all())
        torch.testing.assert_close(A.mv(found.x), b, rtol=0, atol=1e-4)


def test_auto_does_not_factor_what_a_few_products_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four maps of 64 unknowns, whose factors cost more than thirty products; of one such map they cost three."""

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("a matrix is factored")

    weights = spectrum(0.5, [])[:64, :64]
    for batch, factored in ((64, False), (1, True)):
        M = weights.expand(batch, 64, 64) - torch.eye(64, dtype=F64)
        b = torch.randn(batch, 64, generator=torch.Generator().manual_seed(9), dtype=F64)
        mv, rmv = (lambda v, M=m: (M @ v.unsqueeze(2)).squeeze(2) for m in (M, M.mT))
        A = Operator(mv, rmv, lambda M=M: M, batch=batch, size=64, like=b, fixed_point=True)
        with monkeypatch.context() as without:
            if not factored:
                without.setattr(LU, "solve_many", refuse)
            found = Auto().solve(A, b, **LIMITS, max_steps=None)
        assert bool(found.converged.all()) and (int(found.steps.max()) <= 1 or not factored)


def test_real_spectra_are_left_to_gmres_where_products_are_dear() -> None:
    """The second product leaves more than the first did: GMRES halves what is left, and costs no product more for the two.
    Of few numbers a third more of products costs less than its other calls, and a quarter less than to orthogonalise where
    they are many and a product is a few operations."""
    for n, weight, dear in ((200, 200, False), (4000, 4000**2, True), (400_000, 400_000, False)):
        spread = torch.linspace(-0.3, 0.3, n, dtype=F64) - 1
        b = torch.randn(2, n, generator=torch.Generator().manual_seed(9), dtype=F64)
        product = lambda v, s=spread: s * v  # noqa: E731
        A = Operator(product, product, None, batch=2, size=n, like=b, fixed_point=True)
        A.weight, A.graph = weight, lambda n=n: (1, 2 * n, 0)
        solvers = (Contraction(), GMRES(), NeumannSeries())
        found, gmres, plain = (s.solve(A, b, **LIMITS, max_steps=None) for s in solvers)
        assert torch.equal(found.steps, gmres.steps) == dear and bool((gmres.steps < plain.steps).all())
        torch.testing.assert_close(found.x, gmres.x, rtol=0, atol=1e-5)


def test_a_cycle_of_gmres_costs_calls_beside_its_products() -> None:
    """Nine products of GMRES, but with all its calls they cost more than fourteen of the series."""
    spread = 0.25 * torch.linspace(0, 1, N, dtype=F64) ** 1.5 - 1
    b = torch.ones(1, N, dtype=F64)
    product = lambda v: spread * v  # noqa: E731
    A = Operator(product, product, None, batch=1, size=N, like=b, fixed_point=True)
    A.graph = lambda: (20, 0, 0)
    limits = {"rtol": 1e-9, "atol": 0.0, "max_steps": None}
    found, gmres, plain = (int(s.solve(A, b, **limits).steps) for s in (Contraction(), GMRES(), NeumannSeries()))
    assert gmres < 10 and found == plain == 14


def test_a_series_that_slows_down_is_kept_as_far_as_it_helped() -> None:
    """An eigenvalue at 0.95 that little of the right-hand side lies along: a few products more than GMRES."""
    J = spectrum(0.15, [], 4)
    J[:, 0], J[0] = 0, 0
    J[0, 0] = 0.95
    A, b = system(J)
    b[0, 0] = 1e-3
    found, gmres = (s.solve(A, b, **LIMITS, max_steps=None) for s in (Contraction(), GMRES()))
    assert bool(found.converged.all()) and int(found.steps) <= int(gmres.steps) + 3
    torch.testing.assert_close(A.mv(found.x), b, rtol=0, atol=1e-4)


def test_a_sample_that_is_done_adds_no_terms() -> None:
    """``J b = 1e-8 e_2`` is little enough; ``J^2 b = 1e-2 e_3`` and more, which the other's series would bring, are not."""
    J = torch.diag(torch.full((N - 1,), 1e2, dtype=F64), -1)
    J[1, 0], J[2, 1] = 1e-8, 1e6
    A, b = system(J, spectrum(0.2, []))
    b[0] = torch.eye(N, dtype=F64)[0]
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    assert bool(found.converged.all()) and int(found.steps[0]) == 1


@pytest.mark.parametrize("outer", [[0.97, 0.96, 0.95], [-1.5, -1.4]], ids=["slow", "diverging"])
def test_eigenvalues_that_lie_apart_are_left_to_gmres(outer: list[float]) -> None:
    """As many products as GMRES: neither the look nor the first product of the series costs one."""
    A, b = system(*(spectrum(0.3, outer, seed) for seed in range(SAMPLES)))
    found, gmres = (s.solve(A, b, **LIMITS, max_steps=None) for s in (Contraction(), GMRES()))
    assert torch.equal(found.steps, gmres.steps)
    torch.testing.assert_close(found.x, gmres.x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nodes", [8, 100], ids=["cheap", "dear"])
def test_a_sample_for_which_the_series_is_too_slow_is_given_back(nodes: int) -> None:
    """The others decide that the series is taken; the sample with an eigenvalue at 0.99, or outside the disk, ends by GMRES,
    with far fewer products than its series would take."""
    disks = [spectrum(0.8, [], seed) for seed in range(SAMPLES)]
    A, b = system(*disks, spectrum(0.3, [0.99]), spectrum(0.3, [-1.2]))
    A.graph = lambda: (nodes, 0, 0)
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    assert bool(found.converged.all())
    assert int(found.steps[-2:].max()) < 60
    torch.testing.assert_close(A.mv(found.x), b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("nodes", "looks"), [(8, 0), (100, 1)], ids=["cheap", "dear"])
def test_the_last_samples_are_given_back_if_they_need_many_products_more(
    nodes: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eigenvalue at 0.92 is no reason to leave the series at once: it would end after some 160 products.  When the others
    have ended, GMRES needs a few."""
    A, b = system(*(spectrum(0.7, [], seed) for seed in range(SAMPLES)), spectrum(0.7, [0.92], SAMPLES))
    A.graph = lambda: (nodes, 0, 0)
    seen = orthogonalised(monkeypatch)
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    assert len(seen) == 1 + looks and bool(found.converged.all())
    assert int(found.steps[-1]) < int(found.steps[:-1].max()) + 20 < 65
    torch.testing.assert_close(A.mv(found.x), b, rtol=0, atol=1e-4)
    A, b = system(*(spectrum(0.5, [], seed) for seed in range(SAMPLES)), spectrum(0.65, [], SAMPLES))
    seen.clear()  # a few products more are as quickly done
    assert bool(Contraction().solve(A, b, **LIMITS, max_steps=None).converged.all()) and not seen


@pytest.mark.parametrize("outer", [[0.97, 0.96, 0.95], [-1.5, -1.4], [0.85]], ids=["slow", "diverging", "apart"])
def test_what_a_window_of_the_series_leaves_apart_is_given_to_gmres(
    outer: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first two products look like those of a disk, eight of them leave what lies along the eigenvectors apart,
    and GMRES does the rest: a product more than it would need alone, and eight that are not orthogonalised."""
    A, b = system(*(spectrum(0.4, outer, seed) for seed in range(SAMPLES)))
    seen = orthogonalised(monkeypatch)
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    gmres = GMRES().solve(A, b, **LIMITS, max_steps=None).steps
    assert len(seen) == 1 and seen[0] <= int(gmres.max()) - 7
    assert bool(found.converged.all()) and bool((found.steps <= gmres + 1).all())
    torch.testing.assert_close(A.mv(found.x), b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("growing", "tried"), [(3, True), (6, False)], ids=["a third grow", "most grow"])
def test_the_series_is_tried_where_residuals_fall(growing: int, tried: bool) -> None:
    """Where those of most samples rise, GMRES begins at once, with as many products as alone."""
    disks = [*[0.7] * (9 - growing), *[1.6] * growing]
    A, b = system(*(spectrum(radius, [], seed) for seed, radius in enumerate(disks)))
    found, least = (s.solve(A, b, **LIMITS, max_steps=None) for s in (Contraction(), GMRES()))
    assert torch.equal(found.steps, least.steps) != tried and bool(found.converged[: 9 - growing].all())


def test_a_series_that_enlarged_a_residual_is_forgotten_where_gmres_does_not_make_it_good() -> None:
    """Eigenvalues on a circle beyond one: of 200 dimensions GMRES needs all but a few, and comes as far as alone, from cycle
    to cycle, beside samples for which the series is right."""
    angles = torch.linspace(0.2, 6.08, N // 2, dtype=F64)
    turn = torch.block_diag(
        *(torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])]) for a in angles)
    )
    Q = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(3), dtype=F64)).Q
    A, b = system(*(spectrum(0.7, [], seed) for seed in range(6)), Q @ (1.3 * turn) @ Q.mT)
    limits = {"rtol": 1e-3, "atol": 0.0, "max_steps": 400}
    found, least = (s.solve(A, b, **limits) for s in (Contraction(), GMRES()))
    assert bool(found.converged[:-1].all())
    assert float(found.residual_norm[-1]) <= 1.05 * float(least.residual_norm[-1])


def test_budget_and_what_is_not_finite() -> None:
    """No more products than allowed; a right-hand side that is not finite fails by itself."""
    A, b = system(*(spectrum(0.8, [], seed) for seed in range(SAMPLES)))
    b[0, 0] = torch.nan
    few = Contraction().solve(A, b, **LIMITS, max_steps=20)
    assert int(few.steps.max()) <= 20 and not bool(few.converged.any())
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    assert found.converged.tolist() == [False] + [True] * (SAMPLES - 1)
    assert "not finite" in found.reason


def test_a_sample_whose_residual_hardly_falls_in_a_window_is_given_back() -> None:
    """Whether or not others are left, and whatever its first products gained; so is one that is not finite."""
    before = torch.ones(4, dtype=F64)
    length = torch.tensor([0.69, 0.71, 1.5, torch.nan], dtype=F64)
    for pace in (None, torch.full((4,), -1e-3, dtype=F64)):
        found = _crawls(length, before, before, 1e-4 * before, pace, False)
        assert found.tolist() == [False, True, True, True]


def test_gmres_is_asked_after_a_window_where_the_series_would_go_on_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 0.9, cheap products: six steps of GMRES cost a small part of what the series takes."""
    A, b = system(*(spectrum(0.9, [], seed) for seed in range(SAMPLES)))
    A.graph = lambda: (8, 0, 0)
    seen = orthogonalised(monkeypatch)
    assert bool(Contraction().solve(A, b, **LIMITS, max_steps=None).converged.all()) and seen


@pytest.mark.parametrize("radius", [0.75, 0.5], ids=["twenty products more", "few"])
def test_samples_leave_the_series_together_where_many_leave_it(radius: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them have eigenvalues apart: the others, which would take some products more, are solved beside them."""
    A, b = system(*(spectrum(*((0.4, [0.97]) if seed % 2 else (radius, [])), seed) for seed in range(SAMPLES)))
    A.graph = lambda: (8, 0, 0)
    seen, stepped, products = orthogonalised(monkeypatch), Operator.stepped, list[Tensor]()
    monkeypatch.setattr(Operator, "stepped", lambda A, v: products.append(v) or stepped(A, v))
    found = Contraction().solve(A, b, **LIMITS, max_steps=None)
    assert bool(found.converged.all()) and len(seen) == 1 and int(found.steps.max()) <= 8 + seen[0] + 1
    assert len(products) == 6  # of the window of eight, two of which are known before


def real(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    Q = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(seed), dtype=F64)).Q
    return (Q * values) @ Q.mT


SPREAD = torch.linspace(0, 1, N, dtype=F64)
SPECTRA = {
    "disk 0.6": spectrum(0.6, [], 3),
    "disk 0.9": spectrum(0.9, [], 3),
    "interval 0.6": real(1.2 * SPREAD - 0.6),
    "positive 0.6": real(0.6 * SPREAD),
    "negative 0.45": real(-0.45 * SPREAD),
    "one apart 0.6": spectrum(0.15, [0.6], 3),
    "one apart 0.9": spectrum(0.15, [0.9], 3),
    "three apart 0.6": spectrum(0.3, [0.6, -0.58, 0.57], 3),
    "logarithmic 0.9": real(0.9 * 10 ** (-3 * SPREAD)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("nodes", [4, 20, 40])
def test_by_what_products_cost_no_choice_is_far_from_the_best(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the spectrum and however many operations a product takes: no more than 1.4 times what the better one of GMRES
    and the series costs, beside four products; those for the last samples are of the whole batch, too."""
    A, b = system(*[SPECTRA[name]] * 32)
    A.graph = lambda: (nodes, nodes * b.numel(), 0)
    A.weight, ratios = 2 * N, {}
    for rtol in (1e-4, 1e-8):
        limits = {"rtol": rtol, "atol": 0.0, "max_steps": None}
        gmres, plain = (int(s.solve(A, b, **limits).steps.max()) for s in (GMRES(), NeumannSeries()))
        with monkeypatch.context() as watched:
            seen = orthogonalised(watched)
            found = Contraction().solve(A, b, **limits)
        assert bool(found.converged.all())
        dearer, every = float(_dearer(A, b, 50, torch.tensor(float(gmres)))), int(found.steps.max())
        spent = sum(seen) * dearer + max(0, every - sum(seen))
        ratios[rtol] = round((spent - 4) / min(gmres * dearer, plain), 2), every, seen, gmres, plain, dearer
    assert max(r[0] for r in ratios.values()) < 1.4, ratios
