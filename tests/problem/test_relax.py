"""Soft sorting and ranking, Fenchel-Young losses and perturbed choices against brute force and closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik

F64 = torch.float64
MODES = {"rev": jacrev, "fwd": jacfwd}
PAIRS = list(itertools.product(MODES, MODES))
N = 4
RHO = torch.arange(N, 0, -1, dtype=F64)


def _points(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# ------------------------------------------------------------------------------------------------------ sorts and ranks
def _nearest_in_hull(z: Tensor, w: Tensor) -> Tensor:
    """The point of the hull of all orders of ``w`` nearest to ``z``: nonnegative least squares over the orders."""
    orders = np.stack([w.numpy()[list(p)] for p in itertools.permutations(range(N))], 1)
    system = np.vstack([orders, np.full(orders.shape[1], 1e4)])
    share, _ = scipy.optimize.nnls(system, np.append(z.numpy(), 1e4), maxiter=10000)
    return torch.from_numpy(orders @ share)


@pytest.mark.parametrize("strength", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_projections_onto_the_permutahedron(strength: float, seed: int) -> None:
    v = _points(seed, N)
    table = [
        (ik.relax.soft_sort(v, strength, descending=True), _nearest_in_hull(RHO / strength, v)),
        (ik.relax.soft_sort(v, strength), -_nearest_in_hull(RHO / strength, -v)),
        (ik.relax.soft_rank(v, strength), _nearest_in_hull(v / strength, RHO)),
        (ik.relax.soft_rank(v, strength, descending=True), _nearest_in_hull(-v / strength, RHO)),
    ]
    for found, wanted in table:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_limits_of_sorting_and_ranking() -> None:
    v = torch.tensor([3.0, 1.0, 2.0, 10.0], dtype=F64)
    torch.testing.assert_close(ik.relax.soft_sort(v, 1e-3), torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=F64))
    torch.testing.assert_close(ik.relax.soft_sort(v, 1e6), v.mean().expand(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(ik.relax.soft_rank(v, 1e-3), torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=F64))
    torch.testing.assert_close(
        ik.relax.soft_rank(v, 1e-3, descending=True), torch.tensor([2.0, 4.0, 3.0, 1.0], dtype=F64)
    )
    torch.testing.assert_close(ik.relax.soft_rank(v, 1e6), torch.full((4,), 2.5, dtype=F64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["soft_sort", "soft_rank"])
def test_derivatives_and_batches_of_sorting(name: str) -> None:
    function = getattr(ik.relax, name)
    v, strength = _points(4, 3, N), torch.tensor([0.3, 0.7, 2.0], dtype=F64)
    assert torch.autograd.gradcheck(function, (v.clone().requires_grad_(), strength.clone().requires_grad_()))
    together = function(v, strength)
    torch.testing.assert_close(vmap(function)(v, strength), together)
    torch.testing.assert_close(torch.stack([function(x, float(t)) for x, t in zip(v, strength, strict=True)]), together)
    cubes = lambda x: (function(x, 0.7) ** 3).sum()  # noqa: E731
    J = jacrev(lambda x: function(x, 0.7))(v[0])
    wanted = 6 * J.mT @ torch.diag(function(v[0], 0.7)) @ J  # piecewise linear
    for outer, inner in PAIRS:
        torch.testing.assert_close(MODES[outer](MODES[inner](cubes))(v[0]), wanted, msg=f"{outer} over {inner}")


# ---------------------------------------------------------------------------------------------------------------- losses
def test_the_logistic_loss_is_one() -> None:
    scores, classes = _points(5, 6, N), torch.tensor([0, 2, 1, 3, 3, 0])
    labels = torch.nn.functional.one_hot(classes, N)
    found = ik.relax.FenchelYoung(ik.project.kl_simplex())(scores, labels)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(scores, classes, reduction="none"))


def test_the_sparsemax_loss_by_its_own_formula() -> None:
    """Martins & Astudillo (2016, eq. 15): ``-z_k + sum_S (z_j^2 - tau^2) / 2 + 1/2``."""
    scores, classes = _points(6, 6, N), torch.tensor([0, 2, 1, 3, 3, 0])
    p = ik.project.simplex()(scores)
    support = p > 0
    tau = (torch.where(support, scores - p, 0).sum(1) / support.sum(1)).unsqueeze(1)
    wanted = 0.5 * torch.where(support, scores**2 - tau**2, 0).sum(1) + 0.5 - scores[torch.arange(6), classes]
    found = ik.relax.FenchelYoung(ik.project.simplex())(scores, torch.nn.functional.one_hot(classes, N))
    torch.testing.assert_close(found, wanted)


def _bernoulli(p: Tensor) -> Tensor:
    return (torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum(-1)


LOSSES = {
    "simplex": ik.relax.FenchelYoung(ik.project.simplex()),
    "kl_simplex": ik.relax.FenchelYoung(ik.project.kl_simplex()),
    "sigmoid": ik.relax.FenchelYoung(torch.sigmoid, _bernoulli),
    "l2_ball": ik.relax.FenchelYoung(ik.project.l2_ball(0.8)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_prediction_less_label(name: str) -> None:
    loss = LOSSES[name]
    scores, labels = _points(7, N), torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=F64)
    torch.testing.assert_close(grad(loss)(scores, labels), loss.predict(scores) - labels)
    assert torch.autograd.gradcheck(loss, (scores.clone().requires_grad_(), labels.clone().requires_grad_()))
    assert torch.autograd.gradgradcheck(loss, (scores.clone().requires_grad_(), labels.clone().requires_grad_()))
    J = jacrev(loss.predict)(scores)
    for outer, inner in PAIRS:
        torch.testing.assert_close(
            MODES[outer](MODES[inner](lambda s: loss(s, labels)))(scores), J, msg=f"{outer} over {inner}"
        )
    at_its_best = loss.predict(scores)
    torch.testing.assert_close(loss(scores, at_its_best), torch.zeros((), dtype=F64), rtol=0, atol=1e-14)
    assert float(loss(scores, labels)) > 0.01
    batch = torch.stack([scores, 2 * scores])
    torch.testing.assert_close(vmap(lambda s: loss(s, labels))(batch), loss(batch, labels.expand(2, -1)))


def test_a_loss_over_couplings() -> None:
    scores, labels = _points(8, 2, 3, 3), torch.eye(3, dtype=F64).expand(2, 3, 3)
    loss = ik.relax.FenchelYoung(ik.project.birkhoff(), dims=2)
    assert loss(scores, labels).shape == (2,)
    torch.testing.assert_close(grad(lambda s: loss(s, labels).sum())(scores), ik.project.birkhoff()(scores) - labels)


# ------------------------------------------------------------------------------------------------------ perturbed choices
def _best(scores: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores / 0.7, -1)


def test_gumbel_noise_gives_the_softmax_to_second_order() -> None:
    """Value, Jacobian and a Hessian within five standard errors (from independent halves) of those of the softmax."""
    scores, weights = _points(9, N), torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=F64)
    quantities: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
        "value": lambda f: f(scores),
        "Jacobian": lambda f: jacrev(f)(scores),
        "Hessian": lambda f: hessian(lambda s: (weights * f(s)).sum())(scores),
    }
    for name, quantity in quantities.items():
        choices = [ik.relax.Perturbed(_best, 20000, 0.7, "gumbel", seed=s) for s in range(8)]
        draws = torch.stack([quantity(choice) for choice in choices])
        error = (draws.mean(0) - quantity(_softmax)).abs()
        spread = draws.std(0) / len(draws) ** 0.5
        assert bool((error <= 5 * spread + 1e-12).all()), f"{name}: {error} against standard errors {spread}"
        assert float(spread.max()) < 0.05, f"{name}: {spread} says nothing"


def test_the_mean_of_the_maximum() -> None:
    """With Gumbel noise ``sigma (log sum exp(scores / sigma) + 0.5772...)``, within five standard errors."""
    scores, euler = _points(9, N), 0.5772156649015329
    draws = torch.stack([ik.relax.Perturbed(_best, 20000, 0.7, "gumbel", seed=s).maximum(scores) for s in range(8)])
    wanted = 0.7 * (torch.logsumexp(scores / 0.7, -1) + euler)
    assert float((draws.mean() - wanted).abs()) <= 5 * float(draws.std()) / 8**0.5 < 0.05


def test_normal_noise_gives_the_normal_distribution_to_second_order() -> None:
    """Of two the larger: ``P(first) = Phi((a - b) / (sqrt(2) sigma))``."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=F64), torch.ones((), dtype=F64))
    scores, sigma = torch.tensor([0.3, -0.1], dtype=F64), 0.6
    u = (scores[0] - scores[1]) / (2**0.5 * sigma)
    density = normal.log_prob(u).exp() / (2**0.5 * sigma)
    curvature = -u * density / (2**0.5 * sigma)
    signs = torch.tensor([1.0, -1.0], dtype=F64)
    choices = [ik.relax.Perturbed(_best, 20000, sigma, seed=s) for s in range(8)]
    table = [
        (lambda f: f(scores)[0], normal.cdf(u)),
        (lambda f: grad(lambda s: f(s)[0])(scores), density * signs),
        (lambda f: hessian(lambda s: f(s)[0])(scores), curvature * torch.outer(signs, signs)),
    ]
    for quantity, wanted in table:
        draws = torch.stack([quantity(choice) for choice in choices])
        assert bool(((draws.mean(0) - wanted).abs() <= 5 * draws.std(0) / 8**0.5).all())


def test_all_modes_of_a_perturbed_choice_agree() -> None:
    scores = _points(10, N)
    choice = ik.relax.Perturbed(_best, 60, 0.7, seed=3)
    torch.testing.assert_close(jacfwd(choice)(scores), jacrev(choice)(scores))
    second = {pair: MODES[pair[0]](MODES[pair[1]](lambda s: (choice(s) ** 2).sum()))(scores) for pair in PAIRS}
    for pair in PAIRS:
        torch.testing.assert_close(second[pair], second["rev", "rev"], msg=" over ".join(pair))
    J = jacrev(choice)(scores)
    for outer, inner in PAIRS:  # the maximum has the choice for gradient and its Jacobian for Hessian
        torch.testing.assert_close(MODES[outer](MODES[inner](choice.maximum))(scores), J, msg=f"{outer} over {inner}")
    torch.testing.assert_close(grad(choice.maximum)(scores), choice(scores))


def test_seeds_batches_and_loops() -> None:
    scores = _points(11, 3, N)
    choice = ik.relax.Perturbed(_best, 60, 0.7, seed=3)
    torch.testing.assert_close(choice(scores), torch.stack([choice(s) for s in scores]))
    torch.testing.assert_close(vmap(choice)(scores), choice(scores))
    torch.testing.assert_close(vmap(jacrev(choice))(scores), torch.stack([jacrev(choice)(s) for s in scores]))
    one_by_one = ik.relax.Perturbed(lambda s: _best(s) if s.ndim == 1 else s / 0, 60, 0.7, batch="loop", seed=3)
    torch.testing.assert_close(one_by_one(scores), choice(scores))
    free = ik.relax.Perturbed(_best, 60, 0.7)
    assert not torch.equal(free(scores), free(scores))
    same = vmap(free)(scores[:1].expand(2, N).clone())
    assert not torch.equal(same[0], same[1]), "samples of a batch share their noise"


EMPTY = {
    "soft_sort": ik.relax.soft_sort,
    "soft_rank": ik.relax.soft_rank,
    "a choice": ik.relax.Perturbed(_best, 10),
    "choices one by one": ik.relax.Perturbed(_best, 10, batch="loop"),
}


@pytest.mark.parametrize("shape", [(0, N), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_of_nothing_comes_nothing(name: str, shape: tuple[int, ...]) -> None:
    v = torch.zeros(shape, dtype=F64, requires_grad=True)
    found = EMPTY[name](v)
    found.sum().backward()
    assert found.shape == shape
    assert v.grad is not None and v.grad.shape == shape


def test_it_learns_through_a_choice() -> None:
    """Descent on the loss of a perturbed choice of the two largest finds scores that make it."""

    def two(scores: Tensor) -> Tensor:
        return torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)

    labels = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=F64)
    loss = ik.relax.FenchelYoung(ik.relax.Perturbed(two, 200, 0.5, seed=0))
    scores = torch.zeros(4, dtype=F64)
    for _ in range(100):
        scores = scores - 0.5 * grad(loss)(scores, labels)
    torch.testing.assert_close(two(scores), labels)
    assert float((loss.predict(scores) - labels).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ik.relax.soft_sort(torch.arange(3)), TypeError, "floating-point"),
        (lambda: ik.relax.soft_sort(torch.tensor(1.0)), ValueError, "single number"),
        (lambda: ik.relax.soft_rank(torch.ones(3), 0.0), ValueError, "strength"),
        (lambda: ik.relax.soft_rank(torch.ones(3), "1"), TypeError, "strength"),
        (lambda: ik.relax.FenchelYoung(torch.sigmoid), TypeError, "regulariser"),
        (lambda: ik.relax.FenchelYoung(3), TypeError, "predict must be callable"),
        (lambda: ik.relax.FenchelYoung(ik.project.simplex(), dims=0), ValueError, "dims"),
        (lambda: ik.relax.FenchelYoung(ik.relax.Perturbed(_best), dims=2), ValueError, "dims is 2"),
        (lambda: ik.relax.FenchelYoung(ik.project.simplex())(torch.ones(3, 2), torch.ones(3)), ValueError, "one_hot"),
        (lambda: ik.relax.Perturbed(3), TypeError, "callable"),
        (lambda: ik.relax.Perturbed(_best, samples=1), ValueError, "samples"),
        (lambda: ik.relax.Perturbed(_best, sigma=0), ValueError, "sigma"),
        (lambda: ik.relax.Perturbed(_best, noise="uniform"), ValueError, "gumbel"),
        (lambda: ik.relax.Perturbed(_best, dims=0), ValueError, "dims"),
        (lambda: ik.relax.Perturbed(_best, batch="joint"), ValueError, "loop"),
        (lambda: ik.relax.Perturbed(lambda s: s.argmax(-1))(torch.ones(3)), ValueError, "choose returned shape"),
        (lambda: ik.relax.Perturbed(lambda s: s.argmax(), batch="loop")(torch.ones(3)), ValueError, "choose returned"),
        (lambda: ik.relax.Perturbed(_best)(torch.arange(3)), TypeError, "floating-point"),
        (lambda: ik.relax.Perturbed(_best, dims=2)(torch.ones(3)), ValueError, "2 dimension"),
    ],
)
def test_bad_input(make: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
