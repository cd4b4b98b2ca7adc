"""Fixed points that plain acceleration does not reach: giving up in time, continuation, and the relay of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik

F64 = torch.float64


# ------------------------------------------------------------------------------------------------- giving up in time
@pytest.mark.parametrize(
    ("rate", "horizon", "given_up"),
    [(0.5, 100.0, False), (0.9, 100.0, True), (0.9, 300.0, False), (0.999, 300.0, True), (-1.0, 1e6, True)],
)
def test_a_method_gives_up_where_its_rate_says_that_it_is_too_far_away(
    rate: float, horizon: float, given_up: bool
) -> None:
    """Picard on z = rate z + 1 needs log(1e-8) / log(rate) steps from residual 1: 27, 175, 18,411."""
    solver = ik.extend.Impatient(ik.Picard(), window=10, horizon=horizon)
    z0 = torch.zeros(1, dtype=F64)
    found = ik.fixed_point(lambda z: rate * z + 1, z0, solver=solver, rtol=0.0, atol=1e-8, on_failure="ignore")
    assert found.status.item() == (ik.Status.STALLED if given_up else ik.Status.CONVERGED)
    if given_up:
        assert int(found.steps) == 11  # the second look, a window after the first


def test_only_the_sample_that_gets_nowhere_is_given_up() -> None:
    rates = torch.tensor([0.5, 1.0, 0.3], dtype=F64)
    found = ik.fixed_point(
        lambda z, r: r * z + 1,
        torch.zeros(3, 1, dtype=F64),
        (rates.unsqueeze(1),),
        solver=ik.extend.Impatient(ik.Picard(), window=5),
        batch_dims=1,
        in_dims=(0,),
        on_failure="ignore",
    )
    assert found.converged.tolist() == [True, False, True]
    torch.testing.assert_close(found.value[[0, 2], 0], 1 / (1 - rates[[0, 2]]))


def test_far_out_is_no_solution_of_a_map_that_is_nearly_the_identity_there() -> None:
    """z + (cos(z) - z) / (1 + z^4): one fixed point, .739; at 1000 the residual is 1e-9, and so it would be all the way."""
    function = lambda z: z + (torch.cos(z) - z) / (1 + z**4)  # noqa: E731
    for reach, near in ((3.0, True), (math.inf, False)):
        solver = ik.extend.Impatient(_Away(), horizon=math.inf, reach=reach)
        found = ik.fixed_point(
            function, torch.full((1,), 0.5, dtype=F64), solver=solver, rtol=1e-6, on_failure="ignore"
        )
        assert (abs(float(found.value)) < 5) == near
        assert not (near and bool(found.converged))
    found = ik.fixed_point(function, torch.full((1,), 0.5, dtype=F64), solver="relay")
    assert float(found.value) == pytest.approx(0.7390851332, abs=1e-8)


@dataclass(frozen=True)
class _Away(ik.Method):
    """Doubles z."""

    name: ClassVar[str] = "away"
    solves: ClassVar[str] = "fixed_point"

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return 2 * z, state


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ik.extend.Impatient(ik.Picard(), window=1), ValueError),
        (lambda: ik.extend.Impatient(ik.Picard(), reach=0.0), ValueError),
        (lambda: ik.extend.Impatient(ik.Picard(), horizon=0.0), ValueError),
        (lambda: ik.extend.Impatient("picard"), TypeError),
        (lambda: ik.extend.Continuation(length=0.0), ValueError),
        (lambda: ik.extend.Continuation(shortest=-1.0), ValueError),
        (lambda: ik.Relay(()), ValueError),
        (lambda: ik.Relay(work=0.0), ValueError),
        (lambda: ik.Relay(trial=0), ValueError),
    ],
)
def test_options_out_of_range(make: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


# ------------------------------------------------------------------------------------------------------- continuation
def _zigzag(z: Tensor) -> Tensor:
    """Piecewise linear and bounded, slopes 0, -6, 5, 0: z = f(z) only at 2.5 / 1.1, behind two sharp kinks of the path."""
    return torch.where(z < 0.5, 3.0, torch.where(z < 1.0, 6.0 - 6 * z, 0.0 + 5 * (z - 1.0))).clamp(0.0, 2.2)


MAPS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "steep": (lambda z: 3 * torch.cos(4 * z), 1),
    "turns_back": (lambda z: 2 * torch.tanh(5 * (z - 1)) + 1.2 * torch.sin(3 * z), 1),
    "zigzag": (_zigzag, 1),
    "rotation": (lambda z: 2 * torch.tanh(torch.stack([-4 * z[1] + 0.3, 4 * z[0] + 0.2])), 2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MAPS)
def test_continuation_finds_a_fixed_point_of_a_bounded_map(name: str) -> None:
    """From 11 starts; Newton's method and Anderson's fail on some of each map, continuation on one of all at most."""
    function, size = MAPS[name]
    solved = {"continuation": 0, "relay": 0}
    for solver in solved:
        for start in torch.linspace(-2, 2, 11).tolist():
            z0 = torch.full((size,), start, dtype=F64)
            found = ik.fixed_point(function, z0, solver=solver, rtol=1e-10, atol=1e-12, on_failure="ignore")
            solved[solver] += bool(found.converged)
            if bool(found.converged):
                torch.testing.assert_close(function(found.value), found.value, rtol=1e-9, atol=1e-9)
    assert solved["continuation"] >= 10 and solved["relay"] == 11


def _layer_norm_of_relu(seed: int, samples: int, size: int = 16) -> tuple[Callable[..., Tensor], Tensor]:
    """Bounded, so that a fixed point exists (Brouwer); piecewise smooth, and far from contracting: |W|_2 = 6."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(size, size, dtype=F64, generator=generator)
    W *= 6 / torch.linalg.matrix_norm(W, 2)
    b = torch.randn(samples, size, dtype=F64, generator=generator)
    return lambda z, b: nn.functional.layer_norm(torch.relu(z @ W.mT + b), (size,)), b


@pytest.mark.slow
def test_continuation_through_kinks() -> None:
    """Of 32 equilibria of LayerNorm(ReLU(W z + b)) Anderson and Newton find few, continuation and the relay nearly all."""
    function, b = _layer_norm_of_relu(1, 32)
    z0 = torch.zeros(32, 16, dtype=F64)
    options: dict[str, Any] = {"batch_dims": 1, "in_dims": (0,), "rtol": 1e-8, "on_failure": "ignore"}
    share = {
        name: ik.fixed_point(function, z0, (b,), solver=name, max_steps=steps, **options)
        .converged.double()
        .mean()
        .item()
        for name, steps in (("anderson", 300), ("newton", 100), ("continuation", 400), ("relay", None))
    }
    assert share["relay"] >= 0.96
    assert share["continuation"] >= 0.87 > max(share["anderson"], share["newton"])


def test_continuation_is_exact_for_linear_maps() -> None:
    """H is linear in z: with I - tJ regular up to t = 1, one prediction after another, then the solution of the system."""
    generator = torch.Generator().manual_seed(3)
    A = torch.randn(4, 6, 6, dtype=F64, generator=generator)
    A -= 3 * torch.eye(6, dtype=F64)
    b = torch.randn(4, 6, dtype=F64, generator=generator)
    found = ik.fixed_point(
        lambda z, A, b: (A @ z.unsqueeze(2)).squeeze(2) + b,
        torch.zeros(4, 6, dtype=F64),
        (A, b),
        solver="continuation",
        batch_dims=1,
        in_dims=(0, 0),
        rtol=1e-12,
        on_failure="ignore",
    )
    exact = torch.linalg.solve(torch.eye(6, dtype=F64) - A, b.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found.value[found.converged], exact[found.converged], rtol=1e-9, atol=1e-10)
    assert int(found.converged.sum()) >= 3  # an unbounded map may send the path to infinity


# -------------------------------------------------------------------------------------------------------------- relay
def test_a_contraction_never_leaves_the_first_stage() -> None:
    b = torch.linspace(-1, 1, 8, dtype=F64)
    found = ik.fixed_point(lambda z, b: 0.7 * torch.tanh(z) + b, torch.zeros(8, dtype=F64), (b,), solver="relay")
    plain = ik.fixed_point(lambda z, b: 0.7 * torch.tanh(z) + b, torch.zeros(8, dtype=F64), (b,), solver="anderson")
    assert found.solver == "relay (anderson)" and found.evaluations == plain.evaluations
    assert torch.equal(found.value, plain.value)


def test_where_the_residual_does_not_fall_before_the_map_comes_to_rest_the_plain_iteration_is_followed() -> None:
    """A network of 24 layers as one fixed point, all layers the state: 24 plain steps are exact.  Until then the residual
    does not fall, accelerated steps get nowhere and Newton's do not descend."""
    torch.manual_seed(0)
    layers, width = 24, 64
    W = 4.0 * torch.randn(layers, width, width, dtype=F64) / width**0.5
    x = torch.randn(2, width, dtype=F64)

    def network(z: Tensor) -> Tensor:
        before = torch.cat([x.unsqueeze(1), z[:, :-1]], 1)
        return torch.sin(torch.einsum("lij,blj->bli", W, before))

    wanted = z0 = torch.zeros(2, layers, width, dtype=F64)
    for _ in range(layers):
        wanted = network(wanted)
    found = ik.fixed_point(network, z0, batch_dims=1, solver="relay", rtol=1e-10, atol=0)
    torch.testing.assert_close(found.value, wanted)
    assert found.solver == "relay (picard)" and found.evaluations < 100


def test_the_plain_iteration_is_followed_past_a_point_that_is_nearly_fixed() -> None:
    """z + (z^2 + gap) (1.5 - z) / 5 is nearly fixed at 0, where everything that lowers |f(z) - z| stays; the iteration
    passes by in some sixty steps, along which the residual falls and rises, and comes to the only fixed point, 1.5."""
    z0 = -1 + 0.1 * torch.rand(1, 1100, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = ik.fixed_point(
        lambda z: z + 0.2 * (z.square() + 0.02) * (1.5 - z), z0, batch_dims=1, solver="relay", rtol=1e-8
    )
    torch.testing.assert_close(found.value, torch.full_like(z0, 1.5), rtol=0, atol=1e-6)
    assert found.solver == "relay (picard)" and found.evaluations < 200


@pytest.mark.slow
def test_samples_are_solved_as_if_alone_and_derivatives_are_exact() -> None:
    function, b = _layer_norm_of_relu(1, 6)
    z0, b = torch.zeros(6, 16, dtype=F64), b.requires_grad_()
    options: dict[str, Any] = {"solver": "relay", "batch_dims": 1, "in_dims": (0,), "rtol": 1e-11, "atol": 1e-12}
    together = ik.fixed_point(function, z0, (b,), **options).value
    for i in range(6):
        alone = ik.fixed_point(function, z0[:1], (b[i : i + 1],), **options).value
        torch.testing.assert_close(alone[0], together[i], rtol=1e-8, atol=1e-8)
    (g,) = torch.autograd.grad(together.sin().sum(), b)
    z = together.detach()
    J_z, J_b = torch.func.vmap(torch.func.jacrev(function, argnums=(0, 1)))(z, b.detach())
    want = torch.linalg.solve((torch.eye(16, dtype=F64) - J_z).mT, z.cos().unsqueeze(2))
    torch.testing.assert_close(g, (J_b.mT @ want).squeeze(2), rtol=1e-7, atol=1e-9)


def test_what_nothing_solves_is_reported_with_the_best_point() -> None:
    found = ik.fixed_point(lambda z: z + 1, torch.zeros(3, dtype=F64), solver="relay", on_failure="ignore")
    assert not bool(found.converged.any()) and math.isfinite(float(found.residual_norm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_continuation_solves_in_half_precision(dtype: torch.dtype) -> None:
    """A layer whose cell is in half precision comes to it by the relay."""
    c = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
    found = ik.fixed_point(
        lambda z, c: torch.tanh(-3 * z + c), torch.zeros_like(c), (c,), solver="continuation", batch_dims=1, rtol=3e-2
    )
    assert found.value.dtype == dtype and bool(found.converged.all())
    want = ik.fixed_point(
        lambda z, c: torch.tanh(-3 * z + c), torch.zeros_like(c).double(), (c.double(),), batch_dims=1
    )
    torch.testing.assert_close(found.value.double(), want.value, rtol=0, atol=0.02)


def test_a_chain_of_layers_is_walked_once() -> None:
    """24 layers of 16 tanh units with steep weights, no loop: nilpotent, and the forward pass to the last bit."""
    g, depth, n = torch.Generator().manual_seed(0), 24, 16
    W = 4 * torch.randn(depth, n, n, generator=g, dtype=F64) / n**0.5
    b, x = 0.3 * torch.randn(depth, n, generator=g, dtype=F64), torch.randn(3, n, generator=g, dtype=F64)

    def layers(z: Tensor, x: Tensor) -> Tensor:
        below = torch.cat([x.unsqueeze(1), z[:, :-1]], 1)
        return torch.tanh(torch.einsum("bli,lij->blj", below, W) + b)

    z0 = torch.zeros(3, depth, n, dtype=F64)
    found = ik.fixed_point(layers, z0, (x,), solver="relay", batch_dims=1, in_dims=(0,))
    assert bool(found.converged.all()) and found.evaluations < 80
    h = x
    for i in range(depth):
        h = torch.tanh(h @ W[i] + b[i])
        torch.testing.assert_close(found.value[:, i], h, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_members_that_factor_jacobians_take_no_more_than_they_are_granted() -> None:
    """A step of continuation is worth some three evaluations at 16 unknowns: 4,000 are enough for all, 100 for none."""
    function, b = _layer_norm_of_relu(1, 6)
    z0 = torch.zeros(6, 16, dtype=F64)
    options: dict[str, Any] = {"batch_dims": 1, "in_dims": (0,), "rtol": 1e-8, "on_failure": "ignore"}
    whole, enough, some, little = (
        ik.fixed_point(function, z0, (b,), solver=ik.Relay(work=work), **options)
        for work in (None, 4000.0, 230.0, 100.0)
    )
    assert "continuation" in whole.solver and whole.evaluations == enough.evaluations
    assert torch.equal(whole.value, enough.value) and not whole.message
    assert bool(whole.converged.all()) and "continuation" in some.solver and not bool(some.converged.all())
    assert little.evaluations < whole.evaluations and not bool(little.converged.all())
    assert "continuation" not in little.solver
    assert "Relay(work=math.inf)" in little.message and not some.message


def test_newtons_method_takes_no_more_products_than_it_is_granted() -> None:
    """A linear equation of 64 unknowns: 500 products a step solve it, 2 do not."""
    generator = torch.Generator().manual_seed(0)
    A, b = torch.randn(64, 64, dtype=F64, generator=generator) / 4, torch.ones(64, dtype=F64)
    stages = (ik.extend.Stage("picard", max_steps=1), ik.extend.Stage("newton_krylov", scale=None, max_steps=40))
    for work in (None, 80.0):
        found = ik.fixed_point(
            lambda z: A @ z + b,
            torch.zeros(64, dtype=F64),
            solver=ik.Relay(stages, work),
            rtol=1e-8,
            on_failure="ignore",
        )
        assert bool(found.converged) == (work is None)


@pytest.mark.parametrize(("hopeless", "asked_first"), [(32, 8), (20, 8), (0, 8)])
def test_dear_members_are_asked_about_a_few_samples_first(hopeless: int, asked_first: int) -> None:
    """``z = cos(z) - 4 z``, one fixed point, which repels; or ``z = z + 1 + z^2``, of which there is none."""
    b = (torch.arange(32, dtype=F64) * 13 % 32 < hopeless).double().unsqueeze(1)
    stages = (ik.extend.Stage("picard", max_steps=3), ik.extend.Stage("newton_krylov", scale=None, max_steps=7))

    def solve(trial: int | None) -> ik.Solution:
        return ik.fixed_point(
            lambda z, b: torch.where(b > 0, z + 1 + z * z, torch.cos(z) - 4 * z),
            torch.full((32, 200), 0.3, dtype=F64),
            (b,),
            solver=ik.Relay(stages, trial=trial),
            batch_dims=1,
            in_dims=(0,),
            rtol=1e-9,
            on_failure="ignore",
        )

    found, whole = solve(asked_first), solve(None)
    assert whole.converged.tolist() == (b == 0).flatten().tolist() and not whole.message
    if hopeless == 32:
        assert found.sample_evaluations < 0.5 * whole.sample_evaluations
        assert "solved 0 of 8 samples that they were asked about first" in found.message
        assert "not asked about the other 24" in found.message
    elif hopeless == 20:  # three of eight are less than half
        assert int(found.converged.sum()) == 3 and "solved 3 of 8" in found.message
    else:
        torch.testing.assert_close(found.value, whole.value, rtol=1e-9, atol=0.0)
        assert torch.equal(found.converged, whole.converged) and not found.message


def test_a_few_samples_are_not_asked_about_first_where_that_saves_little_or_shows() -> None:
    """The cheap members solve a quarter of 32, or all together are few numbers; or steps are counted, or seen."""
    stages = (ik.extend.Stage("picard", max_steps=2), ik.extend.Stage("newton_krylov", scale=None, max_steps=2))

    def evaluations(trial: int | None, easy: int, unknowns: int = 200, **options: Any) -> int:
        b = (torch.arange(32, dtype=F64) < easy).double().unsqueeze(1)
        options = {"rtol": 1e-9, "on_failure": "ignore", "batch_dims": 1, "in_dims": (0,)} | options
        return ik.fixed_point(
            lambda z, b: torch.where(b > 0, 0.3 + 0 * z, z + 1 + z * z),
            torch.zeros(32, unknowns, dtype=F64),
            (b,),
            solver=ik.Relay(stages, trial=trial),
            **options,
        ).sample_evaluations

    cases: list[dict[str, Any]] = [{"max_steps": 30}, {"trace": True}, {"in_dims": None}, {"unknowns": 100}]
    for easy, options in ((8, {}), *((0, case) for case in cases)):
        assert evaluations(8, easy, **options) == evaluations(None, easy, **options)
    assert evaluations(8, 7) < evaluations(None, 7)
