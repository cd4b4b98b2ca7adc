"""A different variable at every level of transforms, captured or given: every composition up to depth three against the same
composition of the closed form."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import implicitkit as ik

D = torch.float64
TIGHT = {"rtol": 1e-13, "atol": 1e-13}
Scalar = Callable[[Tensor], Tensor]
LAYER = nn.Linear(1, 1, dtype=D)


def _dual(f: Scalar, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(f(forward_ad.make_dual(v, torch.ones_like(v)))).tangent
    return torch.zeros_like(v) if out is None else out.detach()


def _autograd(f: Scalar, v: Tensor) -> Tensor:
    leaf = v.clone().requires_grad_()
    out = f(leaf)
    return torch.autograd.grad(out, leaf)[0] if out.requires_grad else torch.zeros_like(v)


LEVELS: dict[str, Callable[[Scalar, Tensor], Tensor]] = {
    "grad": lambda f, v: grad(f)(v),
    "vjp": lambda f, v: vjp(f, v)[1](torch.ones_like(v))[0],
    "jacrev": lambda f, v: jacrev(f)(v),
    "jvp": lambda f, v: jvp(f, (v,), (torch.ones_like(v),))[1],
    "jacfwd": lambda f, v: jacfwd(f)(v),
    "hessian": lambda f, v: hessian(f)(v),
    "vmap": lambda f, v: vmap(f)(torch.stack([v, 1.3 * v])).sum(),
    "vmap grad": lambda f, v: vmap(grad(f))(torch.stack([v, 1.3 * v])).sum(),
    "dual_level": _dual,  # torch allows it outermost, and no other forward mode inside
    "autograd": _autograd,  # outermost too: what was made in the transforms inside is differentiated after they have ended
}
FORWARD = {"jvp", "jacfwd", "hessian"}


def _compositions(depth: int) -> list[tuple[str, ...]]:
    return [
        names
        for names in itertools.product(LEVELS, repeat=depth)
        if not {"dual_level", "autograd"} & set(names[1:])
        and not (names[0] == "dual_level" and FORWARD & set(names[1:]))
    ]


def closed_form(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return x * (1 + y**2) / w**2 + x * w * y


def _root(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    residual = lambda z: x * (1 + y**2) - (z - x * w * y) * w**2  # noqa: E731
    return ik.root(residual, torch.ones((), dtype=D), **TIGHT).value


def _root_mixed(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    residual = lambda z, w: x * (1 + y**2) - (z - x * w * y) * w**2  # noqa: E731
    return ik.root(residual, torch.ones((), dtype=D), (w,), **TIGHT).value


def _fixed_point(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    def step(z: Tensor, target: dict[str, Tensor]) -> Tensor:
        return 0.5 * z + 0.5 * (target["x"] * (1 + y**2) / w**2 + target["x"] * w * y)

    return ik.fixed_point(step, torch.ones((), dtype=D), ({"x": x},), **TIGHT).value


def _argmin(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return ik.argmin(lambda z: (w**2 * (z - closed_form(x, w, y)) ** 2).sum(), torch.ones((), dtype=D), **TIGHT).value


def _functional_call(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    def residual(z: Tensor, x: Tensor) -> Tensor:  # z w^2 - w^3 x y - x (1 + y^2)
        parameters = {"weight": (w**2).reshape(1, 1), "bias": (-(w**3) * x * y).reshape(1)}
        return functional_call(LAYER, parameters, (z,)) - x * (1 + y**2)

    return ik.root(residual, torch.ones(1, dtype=D), (x,), **TIGHT).value.squeeze(0)


def _nested(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    def outer(z: Tensor) -> Tensor:
        inner = ik.root(lambda u: u * w**2 - x * (1 + y**2) - 0.5 * z, torch.ones((), dtype=D), **TIGHT).value
        return inner - 0.5 * z / w**2 + x * w * y - 0.5 * (z - closed_form(x, w, y))

    return ik.fixed_point(outer, torch.ones((), dtype=D), solver="newton", **TIGHT).value


def _nested_alone(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """One variable is used by the solve inside only."""

    def outer(z: Tensor) -> Tensor:
        square = ik.root(lambda v: v - w**2, torch.ones((), dtype=D), **TIGHT).value
        product = ik.root(lambda v: v - y * w, torch.ones((), dtype=D), **TIGHT).value
        return x * (1 + y**2) / square + x * product - z

    return ik.root(outer, torch.ones((), dtype=D), **TIGHT).value


def _bounds(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z0 = torch.zeros(2, dtype=D)
    lower = torch.stack([closed_form(x, w, y), closed_form(x, w, y) - 100.0])
    solution = ik.argmin(lambda z: ((z + w) ** 2).sum(), z0, bounds=(lower, None), **TIGHT)
    return solution.value[0] + 0 * solution.value[1]


SOLVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "root": _root,
    "root, one given": _root_mixed,
    "fixed point": _fixed_point,
    "argmin": _argmin,
    "functional_call": _functional_call,
    "nested": _nested,
    "nested alone": _nested_alone,
    "bounds": _bounds,
}
POINT = (1.5, 2.0, 0.7)


def _apply(f: Callable[..., Tensor], names: tuple[str, ...], order: tuple[int, ...]) -> Tensor:
    values = [torch.tensor(v, dtype=D) for v in POINT]

    def level(k: int, current: list[Tensor]) -> Tensor:
        if k == len(names):
            return f(*current)
        i = order[k]
        return LEVELS[names[k]](lambda v: level(k + 1, [*current[:i], v, *current[i + 1 :]]), current[i])

    return level(0, values)


def _compare(kind: str, names: tuple[str, ...], order: tuple[int, ...]) -> None:
    got, want = _apply(SOLVES[kind], names, order), _apply(closed_form, names, order)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", [*_compositions(1), *_compositions(2)], ids=" of ".join)
def test_two_levels_over_a_closure(names: tuple[str, ...]) -> None:
    for order in ((0, 1, 2), (1, 0, 2)):
        _compare("root", names, order)


DRAWN: list[Any] = [
    (kind, *drawn)
    for number, kind in enumerate(SOLVES)
    for drawn in random.Random(number).sample(
        [(names, order) for names in _compositions(3) for order in itertools.permutations(range(3))], 8
    )
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "names", "order"), DRAWN, ids=lambda x: x if isinstance(x, str) else "")
def test_three_levels(kind: str, names: tuple[str, ...], order: tuple[int, ...]) -> None:
    _compare(kind, names, order)


@pytest.mark.parametrize("kind", [k for k in SOLVES if k != "root"])
def test_the_pairs_that_torch_hides_from_each_other(kind: str) -> None:
    hidden = (("jvp", "grad"), ("jvp", "vjp"), ("jacfwd", "jacfwd"), ("jvp", "jvp"), ("dual_level", "grad"))
    for names in (*hidden, ("autograd", "vjp"), ("autograd", "jacrev")):
        _compare(kind, names, (1, 0, 2))
