"""Values that make no sense are refused in tensors as in numbers, whatever transforms surround the call.

What is learned may leave its range in training: a weight below zero, a lower bound above the upper one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import implicitkit as ik

D = torch.float64
FOUR = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=D)
ZEROS = torch.zeros(2, dtype=D)
X, Y = torch.linspace(0, 1, 5, dtype=D), torch.linspace(1, 2, 5, dtype=D) ** 2
SIGN, ORDER = "(cannot be negative|must be positive)", "the lower bound must not be above the upper one"
TERMS = ("l1", "ridge", "nonnegative", "nonnegative_ridge", "l2", "total_variation", "group_lasso")
SETS = ("simplex", "l1_ball", "l2_ball", "linf_ball", "l1_sphere", "l2_sphere", "kl_simplex")


def line(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a + b * x


def fit(w: Tensor, **options: Tensor) -> Tensor:
    value: Tensor = ik.least_squares(lambda z: z[0] + z[1] * X - Y, ZEROS, loss="huber", **options).value
    return w * value


ROWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = (
    # name: (a function of a number that is good at 0.5, bad at -0.5 and, alone, at NaN; message)
    {name: (lambda w, n=name: getattr(ik.prox, n)(weight=w)(FOUR), SIGN) for name in TERMS}
    | {name: (lambda w, n=name: getattr(ik.project, n)(w)(FOUR), SIGN) for name in SETS}
    | {
        "nuclear": (lambda w: ik.prox.nuclear(w)(FOUR.reshape(2, 2)), SIGN),
        "elastic_net": (lambda w: ik.prox.elastic_net(l2=w)(FOUR), SIGN),
        "sparse_simplex": (lambda w: ik.project.sparse_simplex(2, w)(FOUR), SIGN),
        "soft_sort": (lambda w: ik.relax.soft_sort(FOUR, w), SIGN),
        "soft_rank": (lambda w: ik.relax.soft_rank(FOUR, w), SIGN),
        "f_scale": (lambda w: fit(w, f_scale=w), SIGN),
        "x_scale": (lambda w: fit(w, x_scale=w), SIGN),
        "box": (lambda w: ik.project.box(0.0, w)(FOUR), ORDER),
        "box_section": (lambda w: ik.project.box_section(0.0, w)(FOUR), ORDER),
        "bounds": (lambda w: ik.argmin(lambda z: (z - 3).square().sum(), ZEROS, bounds=(0.0, w)).value, ORDER),
        "bounds of a fit": (lambda w: ik.least_squares(lambda z: z - 3, ZEROS, bounds=(0.0, w)).value, ORDER),
        "a covariance": (
            lambda w: ik.curve_fit(line, X, Y, ZEROS, w * torch.eye(5, dtype=D)).parameters,
            "sigma.* must be symmetric and positive definite",
        ),
    }
)


@pytest.mark.parametrize("name", ROWS)
def test_refused_under_every_transform(name: str) -> None:
    function, message = ROWS[name]
    total = lambda w: function(w).sum()  # noqa: E731
    good, bad, nan = (torch.tensor(w, dtype=D) for w in (0.5, -0.5, torch.nan))
    assert bool(vmap(grad(total))(torch.stack([good, good])).isfinite().all())
    for of, w in (
        (total, bad),
        (total, nan),
        (grad(total), bad),
        (vmap(total), torch.stack([good, bad])),
        (vmap(grad(total)), torch.stack([good, bad])),
    ):
        with pytest.raises(ValueError, match=message):
            of(w)


@pytest.mark.parametrize("name", [*TERMS, *SETS, "nuclear", "elastic_net", "sparse_simplex", "soft_rank", "box"])
def test_what_is_no_number_spoils_its_own_sample(name: str) -> None:
    function, _ = ROWS[name]
    found = vmap(function)(torch.tensor([0.5, torch.nan], dtype=D)).flatten(1)
    assert bool(found[0].isfinite().all()) and bool(found[1].isnan().any())


def test_a_covariance_that_is_not_symmetric() -> None:
    """Cholesky's factor is that of its lower half, which is the covariance of other data."""
    sigma = torch.eye(5, dtype=D)
    sigma[0, 1] = 0.5
    with pytest.raises(ValueError, match="must be symmetric"):
        ik.curve_fit(line, X, Y, ZEROS, sigma)


@pytest.mark.parametrize("make", [lambda r: ik.project.l2_ball(r), lambda r: ik.prox.l1(r)], ids=["set", "term"])
def test_looking_stops_no_compiler(make: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
    compiled = torch.compile(lambda r, v: make(r)(v), backend="eager", fullgraph=True)
    radius = torch.tensor(0.5, dtype=D)
    torch.testing.assert_close(compiled(radius, FOUR), make(radius)(FOUR))


def test_tensors_without_numbers_are_not_looked_at() -> None:
    traced = make_fx(lambda r, v: ik.project.l2_ball(r)(v), tracing_mode="fake")(torch.tensor(1.0, dtype=D), FOUR)
    torch.testing.assert_close(traced(torch.tensor(0.5, dtype=D), FOUR), ik.project.l2_ball(0.5)(FOUR))
