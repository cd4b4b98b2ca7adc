"""Values of first and second derivatives of every projection and proximal map, in every mode, against differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

import implicitkit as ik

N = 5
Map = Callable[[Tensor], Tensor]


def _points(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
