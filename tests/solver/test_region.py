"""The ball in which a model is believed, by Nocedal & Wright (2006), algorithm 4.1."""

from __future__ import annotations

import math

import pytest
import torch

import implicitkit as ik
from implicitkit.foundation.operators import Operator
from implicitkit.solver.steps.region import Region
from implicitkit.solver.steps.spectral_trust_region import SpectralStep

D = torch.float64

#: how much of the promise was kept, the length of the step in a radius of 2: is it taken, and the next radius
ROWS = {
    "nothing promised": (1.0, 0.0, 1.0, False, 0.25),
    "worse": (-1.0, 1.0, 2.0, False, 0.5),
    "uphill, as promised": (-1.0, -1.0, 2.0, False, 0.5),
    "no value": (math.nan, 1.0, 2.0, False, 0.5),
    "poor": (0.2, 1.0, 1.0, True, 0.25),
    "fair": (0.5, 1.0, 2.0, True, 2.0),
    "good, inside": (1.0, 1.0, 1.0, True, 2.0),
    "good, at the boundary": (1.0, 1.0, 2.0, True, 4.0),
    "no step": (0.0, 1.0, 0.0, False, 0.5),
}


def region() -> Region:
    n = len(ROWS)
    return Region(torch.full((n,), 2.0, dtype=D), torch.zeros(n, 3, dtype=D), torch.zeros(n, dtype=torch.bool))


@pytest.mark.parametrize("row", range(len(ROWS)), ids=list(ROWS))
def test_the_radius_follows_the_promise(row: int) -> None:
    kept, promised, length, _, _ = torch.tensor(list(ROWS.values()), dtype=D).T
    ball = region()
    accept, _ = ball.judge(torch.ones(len(ROWS), 3, dtype=D), length, kept, promised)
    _, _, _, taken, radius = list(ROWS.values())[row]
    assert bool(accept[row]) == bool(ball.found[row]) == bool(ball.z[row].all()) == taken
    assert float(ball.radius[row]) == radius


def test_whoever_has_a_trial_keeps_it() -> None:
    ball = region()
    ball.found[0] = True
    kept, one = torch.ones(len(ROWS), dtype=D), torch.ones(len(ROWS), dtype=D)
    ball.judge(torch.ones(len(ROWS), 3, dtype=D), 2 * one, kept, one)
    assert float(ball.z[0].sum()) == 0
    assert float(ball.radius[0]) == 2


def test_without_a_trial_at_the_smallest_radius_there_is_no_hope() -> None:
    ball = region()
    ball.found[0] = True
    assert ball.hopeless(torch.full((len(ROWS),), 2.0, dtype=D)).tolist() == [False] + [True] * (len(ROWS) - 1)
    assert not ball.hopeless(torch.full((len(ROWS),), 1.0, dtype=D)).any()


def _noisy(m: int, seed: int) -> torch.Tensor:
    image = 0.2 * torch.randn(m, m, dtype=D, generator=torch.Generator().manual_seed(seed))
    image[m // 4 : 3 * m // 4, m // 3 : 2 * m // 3] += 1
    return image


def _total_variation(u: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    slopes = u.diff(dim=-2)[..., :-1].square() + u.diff(dim=-1)[..., :-1, :].square()
    return (u - image).square().sum((-1, -2)) / 2 + 0.2 * (slopes + 1e-4).sqrt().sum((-1, -2))


def test_parts_of_a_newton_step_before_a_smaller_region() -> None:
    """Where few cells are steep no short step is as promised, but half of Newton's is: 48 steps before."""
    image = _noisy(32, 0)
    found = ik.argmin(lambda u: _total_variation(u, image), image)
    assert "newton_cg" in found.solver and int(found.steps) <= 25, found


def test_minimal_surface_that_is_steep_along_its_edge() -> None:
    """The area of a graph over the square: 24 steps before."""
    m = 32
    x = torch.linspace(0, 1, m + 2, dtype=D)
    edge = 1.3 * torch.sin(3 * x)

    def area(u: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([edge[0].expand(m, 1), u, edge[-1].expand(m, 1)], 1)
        p = torch.cat([edge[None], inner, 1.3 * x.square()[None]]) * (m + 1)
        return (1 + p.diff(dim=0)[:, :-1].square() + p.diff(dim=1)[:-1].square()).sqrt().mean()

    found = ik.argmin(area, torch.zeros(m, m, dtype=D))
    assert "newton_cg" in found.solver and int(found.steps) <= 14, found


def test_samples_whose_steps_are_halved_and_others() -> None:
    """Newton's steps of ``(1 + z^2)^{1/2}`` are ``-z (1 + z^2)``: from 1.5 half of one serves, from 6 not a sixteenth."""
    z0, solver = torch.tensor([[0.5], [1.5], [6.0], [0.0]], dtype=D), ik.NewtonCG(radius=1e3)
    length = lambda z: (1 + z.square()).sqrt().sum(-1)  # noqa: E731
    together = ik.argmin(length, z0, solver=solver, batch_dims=1)
    for i, z in enumerate(z0):
        alone = ik.argmin(length, z, solver=solver)
        torch.testing.assert_close(together.value[i], alone.value, rtol=0, atol=1e-12)
        assert int(together.steps[i]) == int(alone.steps), i


#: Hessian, gradient, radius: inside, at the boundary, indefinite, no slope along its negative eigenvalue or next to none,
#: two scales
MODELS = {
    "inside": ([[2.0, 0.5], [0.5, 1.0]], [1.0, -1.0], 5.0),
    "to the boundary": ([[2.0, 0.5], [0.5, 1.0]], [10.0, -7.0], 0.5),
    "indefinite": ([[2.0, 1.5], [1.5, -1.0]], [1.0, -1.0], 3.0),
    "hard": ([[-1.0, 0.0], [0.0, 1.0]], [0.0, 1.0], 2.0),
    "hard but for less than rounding": ([[-1.0, 0.0], [0.0, 1.0]], [1e-40, 1.0], 2.0),
    "negative": ([[-3.0, 0.0], [0.0, -1e-8]], [1e-6, 1.0], 1.0),
    "without curvature": ([[0.0, 0.0], [0.0, 1.0]], [1.0, 1.0], 4.0),
}


def _spectral(H: torch.Tensor, g: torch.Tensor) -> SpectralStep:
    mv = lambda v: (H @ v.unsqueeze(2)).squeeze(2)  # noqa: E731
    return SpectralStep(Operator(mv, mv, lambda: H, batch=len(H), size=2, like=H, symmetric=True), g)


def test_a_spectral_step_minimises_the_model_in_the_ball() -> None:
    H, g, radius = (torch.tensor(part, dtype=D) for part in zip(*MODELS.values(), strict=True))
    step = _spectral(H, g)
    for share in (1.0, 0.25):  # of one point, whatever the radius
        r = share * radius
        p, promised, mu = step.within(r, torch.zeros(len(g), dtype=torch.bool))
        length = torch.linalg.vector_norm(p, dim=1)
        angle = torch.linspace(0, 2 * math.pi, 2001, dtype=D)
        ball = torch.stack([angle.cos(), angle.sin()], 1) * torch.linspace(0, 1, 41, dtype=D)[:, None, None]
        all_of = r[:, None, None] * ball.flatten(0, 1)
        model = -(all_of @ g.unsqueeze(2)).squeeze(2) - 0.5 * (all_of @ H * all_of).sum(2)
        assert bool((promised >= model.amax(1) * (1 - 0.03)).all())
        torch.testing.assert_close(promised, -(g * p).sum(1) - 0.5 * (p.unsqueeze(1) @ H @ p.unsqueeze(2)).flatten())
        assert bool((length <= r * (1 + 1e-9)).all()) and ((length >= 0.97 * r) | (mu == 0)).all()


def test_a_spectral_step_takes_none_of_what_rounding_errors_say() -> None:
    """Nothing changes along ``(1, 1)`` but by rounding; of a Hessian that is not finite nothing is known: the step is the
    steepest one, to the boundary."""
    H = torch.tensor([[[1.0, -1.0], [-1.0, 1.0 - 1e-16]], [[math.nan, 0.0], [0.0, 1.0]]], dtype=D)
    g = torch.tensor([[1.0, -1.0 + 1e-16], [1.0, 1.0]], dtype=D)
    p, promised, _ = _spectral(H, g).within(torch.full((2,), 10.0, dtype=D), torch.zeros(2, dtype=torch.bool))
    torch.testing.assert_close(p[0], torch.tensor([-0.5, 0.5], dtype=D))
    torch.testing.assert_close(p[1], torch.full((2,), -(50**0.5), dtype=D), rtol=0.03, atol=0.0)
    torch.testing.assert_close(promised[1], torch.tensor(200**0.5, dtype=D), rtol=0.03, atol=0.0)
