"""Proximal maps against their definition, Moreau's identity and closed forms, with derivatives."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

import implicitkit as ik

WEIGHT = 0.4


def _points(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Term = Callable[[Tensor], Tensor]
TABLE: dict[str, tuple[Callable[..., Tensor], Term, tuple[int, ...]]] = {
    # name: (map, phi of one point, its shape)
    "l1": (ik.prox.l1(WEIGHT), lambda x: WEIGHT * x.abs().sum(), (6,)),
    "l2": (ik.prox.l2(WEIGHT), lambda x: WEIGHT * x.norm(), (6,)),
    "ridge": (ik.prox.ridge(WEIGHT), lambda x: 0.5 * WEIGHT * x.square().sum(), (6,)),
    "elastic_net": (ik.prox.elastic_net(WEIGHT, 0.7), lambda x: WEIGHT * x.abs().sum() + 0.35 * x.square().sum(), (6,)),
    "nonnegative": (
        ik.prox.nonnegative(WEIGHT),
        lambda x: WEIGHT * x.sum() + torch.where((x < -1e-12).any(), torch.inf, 0.0),
        (6,),
    ),
    "nonnegative_ridge": (
        ik.prox.nonnegative_ridge(WEIGHT),
        lambda x: 0.5 * WEIGHT * x.square().sum() + torch.where((x < -1e-12).any(), torch.inf, 0.0),
        (6,),
    ),
    "total_variation": (ik.prox.total_variation(WEIGHT), lambda x: WEIGHT * x.diff().abs().sum(), (6,)),
    "group_lasso": (
        ik.prox.group_lasso((2, 3, 1), WEIGHT),
        lambda x: WEIGHT * (x[:2].norm() + x[2:5].norm() + x[5:].norm()),
        (6,),
    ),
    "group_lasso equal": (ik.prox.group_lasso(3, WEIGHT), lambda x: WEIGHT * (x[:3].norm() + x[3:].norm()), (6,)),
    "nuclear": (ik.prox.nuclear(WEIGHT), lambda x: WEIGHT * torch.linalg.svdvals(x).sum(), (3, 4)),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("step", [1.0, 0.3])
def test_it_minimises_its_definition(name: str, step: float) -> None:
    prox, phi, shape = TABLE[name]
    v = _points(1, *shape)
    p = prox(v, step)
    value = lambda x: step * phi(x) + 0.5 * (x - v).square().sum()  # noqa: E731
    best = float(value(p))
    generator = torch.Generator().manual_seed(2)
    for size in (1e-4, 1e-2, 1.0):
        for _ in range(50):
            other = p + size * torch.randn(*shape, generator=generator, dtype=torch.float64)
            # strong convexity: value(x) >= value(p) + |x - p|^2 / 2
            assert float(value(other)) >= best + 0.5 * float((other - p).square().sum()) - 1e-12


@pytest.mark.parametrize("name", TABLE)
def test_batches_and_derivatives(name: str) -> None:
    prox, _, shape = TABLE[name]
    v = _points(3, 4, *shape)
    steps = torch.tensor([0.2, 0.5, 1.0, 1.5], dtype=torch.float64)
    together = prox(v, steps)
    torch.testing.assert_close(together, torch.stack([prox(x, t) for x, t in zip(v, steps, strict=True)]))
    torch.testing.assert_close(vmap(prox)(v, steps), together)
    x = v[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(prox, (x,), atol=1e-6)
    assert torch.autograd.gradgradcheck(prox, (x,), atol=1e-5)
    torch.testing.assert_close(jacfwd(prox)(v[1]), jacrev(prox)(v[1]), rtol=1e-8, atol=1e-9)


def test_moreau() -> None:
    """``v = prox_f(v) + prox_f*(v)``; the conjugate of ``w |.|_1`` is the indicator of the l-infinity ball of radius w."""
    v = _points(4, 5, 6)
    pairs = [(ik.prox.l1(WEIGHT), ik.project.linf_ball(WEIGHT)), (ik.prox.l2(WEIGHT), ik.project.l2_ball(WEIGHT))]
    for prox, ball in pairs:
        torch.testing.assert_close(prox(v) + ball(v), v)


@pytest.mark.parametrize("weight", [1e-3, 0.1, 0.7, 3.0, 50.0])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 33])
def test_total_variation_against_its_dual(weight: float, n: int) -> None:
    """``v - D'u`` with ``u`` from the bounded least squares ``|v - D'u|^2``, ``|u| <= weight``, by SciPy's active set."""
    v = _points(12, 4, n).cumsum(-1)
    found = ik.prox.total_variation(weight)(v)
    D = np.diff(np.eye(n), axis=0)
    for row, x in zip(v.numpy(), found, strict=True):
        u = scipy.optimize.lsq_linear(D.T, row, bounds=(-weight, weight), method="bvls", tol=1e-14).x if n > 1 else []
        torch.testing.assert_close(x, torch.from_numpy(row - D.T @ np.asarray(u)), rtol=0, atol=1e-12)


def test_total_variation_of_few_levels() -> None:
    """A long signal with equal neighbours, steps far apart and a weight for each sample; zero weight changes nothing."""
    v = torch.tensor([0.0, 1.0, 1.0, -2.0], dtype=torch.float64).repeat_interleave(50).repeat(3, 1)
    weight = torch.tensor([[0.0], [5.0], [1e4]], dtype=torch.float64)
    x = ik.prox.total_variation(weight)(v)
    torch.testing.assert_close(x[0], v[0])
    # steps up at the left, down at the right: + w / 50, - 2 w / 100, + w / 50
    torch.testing.assert_close(
        x[1], v[1] + torch.tensor([0.1, -0.1, -0.1, 0.1], dtype=torch.float64).repeat_interleave(50)
    )
    torch.testing.assert_close(x[2], v[2].mean().expand(200))
    J = jacrev(ik.prox.total_variation(5.0))(v[1])
    torch.testing.assert_close(J[:50, :50], torch.full((50, 50), 0.02, dtype=torch.float64))


def test_nuclear_against_the_singular_value_decomposition() -> None:
    X = _points(5, 4, 3, 5)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    expected = U @ ((s - WEIGHT).clamp_min(0).unsqueeze(-1) * Vh)
    torch.testing.assert_close(ik.prox.nuclear(WEIGHT)(X), expected)


def test_nuclear_has_a_derivative_where_singular_values_coincide() -> None:
    X = torch.eye(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ik.prox.nuclear(WEIGHT), (X,), atol=1e-6)


def test_weights_are_differentiated() -> None:
    v = _points(6, 6)
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for name in ("l1", "l2", "ridge", "nonnegative", "nonnegative_ridge", "total_variation"):
        assert torch.autograd.gradcheck(lambda t, n=name: getattr(ik.prox, n)(t)(v), (w,)), name


def test_weights_by_sample_and_by_group() -> None:
    v = _points(9, 4, 6)
    w = torch.tensor([0.2, 0.5, 0.9, 1.4], dtype=torch.float64)
    for name, event in (("l2", 1), ("nuclear", 2)):
        x = v if event == 1 else _points(10, 4, 3, 2)
        together = getattr(ik.prox, name)(w.reshape(-1, *(1,) * event))(x)
        alone = torch.stack([getattr(ik.prox, name)(float(t))(row) for t, row in zip(w, x, strict=True)])
        torch.testing.assert_close(together, alone, msg=name)
    groups = ik.prox.group_lasso(2, w[:3])(v)
    torch.testing.assert_close(
        groups, torch.cat([ik.prox.l2(float(w[k]))(v[:, 2 * k : 2 * k + 2]) for k in range(3)], 1)
    )


@pytest.mark.parametrize("name", TABLE)
def test_nan_stays_nan_in_its_sample(name: str) -> None:
    prox, _, shape = TABLE[name]
    v = _points(11, 3, *shape)
    v[1] = torch.nan
    out = prox(v)
    assert out[1].isnan().any(), "a sample of NaN came back as numbers"
    torch.testing.assert_close(out[[0, 2]], prox(v[[0, 2]]))


def test_pytrees() -> None:
    tree = {"a": _points(7, 3), "b": [_points(8, 2, 2)]}
    out = ik.prox.l1(0.2)(tree)
    torch.testing.assert_close(out["b"][0], ik.prox.l1(0.2)(tree["b"][0]))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ik.prox.l1(-1.0), ValueError, "weight cannot be negative"),
        (lambda: ik.prox.group_lasso((2, 0)), ValueError, "sizes >= 1"),
        (lambda: ik.prox.group_lasso((2, 2))(torch.zeros(5)), ValueError, "add up"),
        (lambda: ik.prox.group_lasso(2, torch.ones(2))(torch.zeros(6)), ValueError, "number of groups, 3"),
        (lambda: ik.prox.l2(torch.ones(5))(torch.zeros(5)), ValueError, "whole norm"),
        (lambda: ik.prox.nuclear(torch.ones(2))(torch.zeros(2, 1, 1)), ValueError, "two dimensions must be 1"),
        (lambda: ik.prox.nuclear()(torch.zeros(5)), ValueError, "matrices"),
        (lambda: ik.prox.total_variation(-1.0), ValueError, "weight cannot be negative"),
        (lambda: ik.prox.total_variation(torch.ones(5))(torch.zeros(5)), ValueError, "whole norm"),
        (lambda: ik.prox.nonnegative_ridge(-1.0), ValueError, "weight cannot be negative"),
        (lambda: ik.prox.l1()(torch.arange(3)), TypeError, "floating-point"),
    ],
)
def test_bad_input(make: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


# ---------------------------------------------------------------------------------------------------------------------
# Values of first and second derivatives of every projection and proximal map, in every mode, against differences.
N = 5
Map = Callable[[Tensor], Tensor]


V, ROW, RECTANGLE, SQUARE = 1.5 * _points(1, N), _points(2, N), _points(3, 2, 3), _points(4, 3, 3)
G = _points(5, 3, N)
HALVES = torch.tensor([0.3, 0.7], dtype=torch.float64)
THIRDS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

PROJECTIONS: dict[str, tuple[Map, Tensor]] = {
    # name, with what is special about the row after a comma: (map, point off its kinks)
    "box": (ik.project.box(-0.5, 0.7), V),
    "box_section": (ik.project.box_section(-0.5, 0.7, 0.4), V),
    "box_section, weights": (ik.project.box_section(-0.5, torch.inf, 0.4, ROW), V),
    "simplex": (ik.project.simplex(1.3), V),
    "sparse_simplex": (ik.project.sparse_simplex(3, 1.3), V),
    "kl_simplex": (ik.project.kl_simplex(1.3), V),
    "kl_birkhoff": (ik.project.kl_birkhoff(), SQUARE),
    "kl_transport": (ik.project.kl_transport(HALVES, THIRDS), RECTANGLE),
    "l1_sphere": (ik.project.l1_sphere(1.3), V),
    "l1_sphere, from inside": (ik.project.l1_sphere(9.0), V),
    "l2_sphere": (ik.project.l2_sphere(0.8, ROW), V),
    "l1_ball": (ik.project.l1_ball(1.3), V),
    "l1_ball, inside": (ik.project.l1_ball(9.0), V),
    "l2_ball": (ik.project.l2_ball(0.8), V),
    "l2_ball, centre": (ik.project.l2_ball(0.8, ROW), V),
    "linf_ball": (ik.project.linf_ball(0.6), V),
    "halfspace": (ik.project.halfspace(ROW, -2.0), V),
    "hyperplane": (ik.project.hyperplane(ROW, 1.0), V),
    "affine": (ik.project.affine(G[:2], torch.ones(2, dtype=torch.float64)), V),
    "polyhedron": (ik.project.polyhedron(G=G, h=G @ V - 0.3), V),
    "nonnegative": (ik.project.nonnegative(), V),
    "second_order_cone": (ik.project.second_order_cone(), V),
    "second_order_cone, inside": (ik.project.second_order_cone(), V.abs() + torch.tensor([9.0, 0, 0, 0, 0])),
    "monotone": (ik.project.monotone(), V),
    "monotone, decreasing": (ik.project.monotone(decreasing=True), V),
    "psd_cone": (ik.project.psd_cone(), SQUARE),
    "birkhoff": (ik.project.birkhoff(), 0.4 * SQUARE),
    "transport": (ik.project.transport(HALVES, THIRDS), 0.4 * RECTANGLE),
}
PROX: dict[str, tuple[Map, Tensor]] = {
    "l1": (ik.prox.l1(0.5), V),
    "l2": (ik.prox.l2(0.4), V),
    "ridge": (ik.prox.ridge(0.4), V),
    "nonnegative_ridge": (ik.prox.nonnegative_ridge(0.4), V),
    "total_variation": (ik.prox.total_variation(0.3), V),
    "elastic_net": (ik.prox.elastic_net(0.5, 0.7), V),
    "nonnegative": (ik.prox.nonnegative(0.1), V),
    "group_lasso": (ik.prox.group_lasso((2, 3), 0.4), V),
    "nuclear": (ik.prox.nuclear(0.4), RECTANGLE),
    "nuclear, tall": (ik.prox.nuclear(0.4), _points(6, 3, 2)),
}
CASES = {f"project.{name}": case for name, case in PROJECTIONS.items()} | {
    f"prox.{name}": case for name, case in PROX.items()
}
MODES = {"rev": jacrev, "fwd": jacfwd}


def _differences(function: Map, v: Tensor, h: float = 1e-5) -> Tensor:
    """Central differences of fourth order, the direction as last dimensions, like a Jacobian."""
    columns = []
    for i in range(v.numel()):
        e = torch.zeros(v.numel(), dtype=v.dtype)
        e[i] = h
        e = e.reshape(v.shape)
        near, far = function(v + e) - function(v - e), function(v + 2 * e) - function(v - 2 * e)
        columns.append((8 * near - far) / (12 * h))
    return torch.stack(columns, -1).unflatten(-1, v.shape)


@pytest.mark.parametrize("name", CASES)
def test_first_derivatives(name: str) -> None:
    function, v = CASES[name]
    wanted = _differences(function, v)
    for mode, jacobian in MODES.items():
        torch.testing.assert_close(
            jacobian(function)(v), wanted, rtol=1e-6, atol=1e-7, msg=lambda m, k=mode: f"{k}: {m}"
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    """Of ``sum P(v)^3``: ``6 P J J' + 3 P^2 H``, so that both the Jacobian and its derivative are seen.

    The differences are those of the gradient, which the first derivatives above have checked.
    """
    function, v = CASES[name]

    def cubes(x: Tensor) -> Tensor:
        return (function(x) ** 3).sum()

    wanted = _differences(jacrev(cubes), v, 1e-3)
    for outer, over in MODES.items():
        for inner, jacobian in MODES.items():
            found = over(jacobian(cubes))(v)
            said = lambda m, k=f"{outer} over {inner}": f"{k}: {m}"  # noqa: E731
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=said)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_third_derivatives_agree_in_every_mode(name: str) -> None:
    function, v = CASES[name]
    direction = _points(7, *v.shape)

    def along(t: Tensor) -> Tensor:
        return (function(v + t * direction) ** 3).sum()

    zero, h = torch.zeros((), dtype=torch.float64), 1e-3
    second = jacrev(jacrev(along))
    wanted = (second(zero + h) - second(zero - h)) / (2 * h)
    for first in MODES.values():
        for then in MODES.values():
            for last in MODES.values():
                found = last(then(first(along)))(zero)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_batches_of_second_derivatives(name: str) -> None:
    function, v = CASES[name]
    batch = torch.stack([v, 1.01 * v])
    hessian = jacfwd(jacrev(lambda x: (function(x) ** 3).sum()))
    torch.testing.assert_close(vmap(hessian)(batch), torch.stack([hessian(x) for x in batch]), rtol=1e-7, atol=1e-8)


def test_every_public_name_has_a_row() -> None:
    for module, table in ((ik.project, PROJECTIONS), (ik.prox, PROX)):
        public = {n for n in module.__all__ if n[0].islower() and inspect.isclass(getattr(module, n))}
        assert public <= {name.split(",")[0] for name in table}, public - {name.split(",")[0] for name in table}
