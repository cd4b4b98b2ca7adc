"""Fixed points to which the iteration leads: acceleration also finds those that it leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point import attracting, frugal
from implicitkit.solver.fixed_point.attracting import outward


def riccati(seed, n, dtype):
    """``P -> I + A' P A - A' P B (1 + B' P B)^-1 B' P A`` of a random plant, unstable from seed 5 on, and its solution."""
    generator = torch.Generator().manual_seed(10 * seed + n)
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    A = A / torch.linalg.eigvals(A).abs().max() * (0.8 + 0.05 * seed)
    B = torch.randn(n, max(1, n // 2), generator=generator, dtype=torch.float64) * 10.0 ** -(seed % 3)
    right = scipy.linalg.solve_discrete_are(A.numpy(), B.numpy(), np.eye(n), np.eye(B.shape[1]))
    a, b = A.to(dtype), B.to(dtype)
    one, eye = torch.eye(n, dtype=dtype), torch.eye(B.shape[1], dtype=dtype)

    def step(P):
        K = torch.linalg.solve(eye + b.T @ P @ b, b.T @ P @ a)
        return one + a.T @ P @ a - a.T @ P @ b @ K

    return step, one, torch.from_numpy(right)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("seed", [2, 5, 6, 7, 8, 10, 11])
def test_riccati(seed, n, dtype):
    """The solution of a Riccati equation that control engineers mean, where Anderson's steps come to another one."""
    step, start, right = riccati(seed, n, dtype)
    found = ik.fixed_point(step, start)
    close = 1e-7 if dtype == torch.float64 else 2e-2
    assert (found.value.double() - right).norm() <= close * right.norm(), found


def magnet(m, field):
    """Mean-field equation of ten spins, coupled beyond the critical strength."""
    return torch.tanh(0.3 * m.sum(-1, keepdim=True).expand_as(m) + field)


def test_magnet_and_derivative():
    """From zero: the magnetised state that the field prefers, not the one near zero, which any step leaves."""
    field = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    found = ik.fixed_point(magnet, torch.zeros(10, dtype=torch.float64), field)
    m = found.value[0].detach()
    assert m > 0.99
    torch.testing.assert_close(m, torch.tanh(3 * m + 0.01))
    (slope,) = torch.autograd.grad(found.value[0], field)
    torch.testing.assert_close(slope, (1 - m**2) / (1 - 3 * (1 - m**2)), rtol=1e-6, atol=0)


def test_each_sample_by_itself():
    """Samples of a batch whose iteration leads elsewhere are found there, whoever is beside them."""
    fields = torch.tensor([0.01, -0.01, 0.2, 1.0, -1.0], dtype=torch.float64)
    strengths = torch.tensor([0.3, 0.3, 0.05, 0.02, 0.3], dtype=torch.float64).unsqueeze(1)

    def step(m, field, strength):
        return torch.tanh(strength * m.sum(-1, keepdim=True).expand_as(m) + field.unsqueeze(1))

    start = torch.zeros(5, 10, dtype=torch.float64)
    together = ik.fixed_point(step, start, (fields, strengths), batch_dims=1).value
    for i in range(5):
        alone = ik.fixed_point(step, start[i : i + 1], (fields[i : i + 1], strengths[i : i + 1]), batch_dims=1).value
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-8, atol=1e-8, msg=f"sample {i}")
    assert (together[:2, 0].abs() > 0.99).all()


REPELLING = {
    "steep": (lambda z: 1 - 2 * z, 1 / 3),
    "cycle": (lambda z: 3.5 * z * (1 - z), 1 - 1 / 3.5),
    "chaos": (lambda z: 3.9 * z * (1 - z), 1 - 1 / 3.9),
    "turned": (lambda z: torch.stack([-2 * z[1] + 1, 2 * z[0]]), None),
}


@pytest.mark.parametrize("name", REPELLING)
def test_no_other(name):
    """Where the iteration leads nowhere the fixed point that it leaves is a solution like any other, soon found."""
    step, value = REPELLING[name]
    found = ik.fixed_point(step, torch.full((2,), 0.3, dtype=torch.float64))
    torch.testing.assert_close(step(found.value), found.value, rtol=1e-8, atol=1e-8)
    if value is not None:
        torch.testing.assert_close(found.value, torch.full_like(found.value, value), rtol=1e-7, atol=0)
    assert found.evaluations < 250, found


def test_watched_or_not():
    """A trace and a callback see the steps of the iteration, too, and change nothing."""
    start, seen = torch.zeros(10, dtype=torch.float64), []
    plain = ik.fixed_point(magnet, start, 0.01)
    watched = ik.fixed_point(magnet, start, 0.01, trace=True, callback=lambda step, z, norm: seen.append(step))
    assert torch.equal(plain.value, watched.value)
    assert seen == list(range(1, len(seen) + 1))
    assert len(watched.trace) == len(seen) + 1


def test_all_samples_are_shown():
    """A callback sees the whole batch in every step, also while one sample only goes on."""
    shapes = set()
    fields = torch.tensor([[0.01], [5.0]], dtype=torch.float64)
    found = ik.fixed_point(
        magnet,
        torch.zeros(2, 10, dtype=torch.float64),
        fields,
        batch_dims=1,
        in_dims=(0,),
        callback=lambda step, z, norm: shapes.add((*z.shape, len(norm))),
    )
    assert shapes == {(2, 10, 2)} and (found.value > 0.99).all()


def test_step_limit():
    """``max_steps`` is for all of it."""
    found = ik.fixed_point(magnet, torch.zeros(10, dtype=torch.float64), 0.01, max_steps=12, on_failure="ignore")
    assert int(found.steps) <= 12


def test_contraction_costs_nothing():
    """No Jacobian is asked where the map contracts: as many evaluations as acceleration alone."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(20, 20, generator=generator, dtype=torch.float64)
    W = 0.9 * W / torch.linalg.matrix_norm(W, 2)
    b = torch.randn(20, generator=generator, dtype=torch.float64)
    counts = [
        ik.fixed_point(lambda z: torch.tanh(W @ z + b), torch.zeros(20, dtype=torch.float64), solver=s).evaluations
        for s in ("auto", "anderson")
    ]
    assert counts[0] == counts[1]


class Hidden(torch.autograd.Function):
    """The magnet with steps of NumPy's, and no derivative."""

    @staticmethod
    def forward(ctx, m):
        total = m.detach().numpy().sum(-1, keepdims=True)
        return torch.from_numpy(np.tanh(0.3 * total + 0.01)).expand_as(m)


UNDIFFERENTIATED = {
    "no_backward": Hidden.apply,
    "detached": lambda m: magnet(m.detach(), 0.01),
    "no_grad": torch.no_grad()(lambda m: magnet(m, 0.01)),
}


@pytest.mark.parametrize("name", UNDIFFERENTIATED)
def test_maps_without_a_derivative(name):
    """Whether a point repels is asked of the map, not of autograd: no derivative is needed, and none is missed."""
    found = ik.fixed_point(UNDIFFERENTIATED[name], torch.zeros(10, dtype=torch.float64), rule="one_step")
    assert (found.value > 0.99).all(), found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    found = ik.fixed_point(magnet, torch.zeros(10, dtype=dtype), torch.tensor(0.01, dtype=dtype))
    assert found.value.dtype == dtype and (found.value > 0.95).all(), found


@pytest.mark.parametrize("large", [0, frugal._LARGE], ids=["when it ends", "in the end"])
def test_each_sample_is_looked_at_once(monkeypatch, large):
    """What has been remembered of a sample is looked at once, and not for every other that ends."""
    looked = []
    monkeypatch.setattr(frugal, "_LARGE", large)
    for module in (frugal, attracting):
        monkeypatch.setattr(module, "outward", lambda history: looked.append(len(history)) or outward(history))
    levels = torch.linspace(0.05, 0.95, 40, dtype=torch.float64).unsqueeze(1)
    found = ik.fixed_point(lambda z, a: a * torch.cos(z), torch.zeros(40, 4, dtype=torch.float64), levels, batch_dims=1)
    assert len(found.steps.unique()) > 3
    assert 20 < sum(looked) <= 40


def test_who_is_above_one_by_the_norms_of_powers():
    """Spectral radii 0.5 ... 1.2 of matrices of any norm, some not finite: whose eigenvalue is above one is found, and
    whoever is not found has none."""
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(200, 6, 6, dtype=torch.float64, generator=generator)
    radius = torch.linspace(0.5, 1.2, 200, dtype=torch.float64)
    H = H * (radius / torch.linalg.eigvals(H).abs().amax(1)).view(-1, 1, 1)
    H[::7, 0, 1:] *= 0
    H[::7, 0, 1] = 1e3  # the radius stays below 1.2, the norm does not
    H[::7, 1:, 0] = 0
    H[3, 2, 2], H[199, 0, 0] = torch.nan, torch.inf
    finite = torch.isfinite(H).flatten(1).all(1)
    above = torch.linalg.eigvals(torch.where(finite.view(-1, 1, 1), H, 0)).abs().amax(1) > 1 + 2e-3
    samples = torch.cat([torch.arange(0, 100), torch.arange(120, 200)])
    found = attracting._exceeding(H, samples)
    asked = torch.zeros(200, dtype=torch.bool).index_fill(0, samples, True)
    said = torch.zeros_like(asked).index_fill(0, found, True)
    assert not bool((asked & (above | ~finite) & ~said).any())
    assert not bool((said & ~asked).any())
    powers = torch.linalg.matrix_power(torch.where(finite.view(-1, 1, 1), H, 0), 4)
    small = torch.linalg.matrix_norm(powers) ** 0.25 <= 1 + 1e-3
    assert not bool((said & small & finite).any()) and int((small & asked).sum()) > 20


@pytest.mark.parametrize("large", [0, frugal._LARGE], ids=["when it ends", "in the end"])
@pytest.mark.parametrize("in_dims", [None, 0])
def test_what_ended_early_is_remembered(monkeypatch, large, in_dims):
    """Samples that come to a repelling point while others go on, dropped or not, many steps after."""
    monkeypatch.setattr(frugal, "_LARGE", large)
    strengths = torch.tensor([0.0999, 0.3, 0.3, 0.3], dtype=torch.float64).unsqueeze(1)

    def step(m, strength):
        return torch.tanh(strength * m.sum(-1, keepdim=True).expand_as(m) + 0.01 + 0.02 * m**2)

    found = ik.fixed_point(step, torch.zeros(4, 10, dtype=torch.float64), strengths, batch_dims=1, in_dims=in_dims)
    assert (found.value[1:] > 0.99).all(), found.value[:, 0]


@pytest.mark.parametrize("in_dims", [None, (0,)])
def test_steps_count_on(in_dims):
    """One sample has a repelling fixed point only, the other none: whoever is at work, steps are counted on, the trace has
    all of them, and a callback that asks to stop is asked no more."""
    kinds, seen = torch.tensor([[-3.5], [1.0]], dtype=torch.float64), []

    def step(z, kind):
        return torch.where(kind < 0, -kind * z * (1 - z), z + 1.5 + torch.sin(z))

    def solve(**options):
        start = torch.full((2, 2), 0.3, dtype=torch.float64)
        return ik.fixed_point(step, start, kinds, batch_dims=1, in_dims=in_dims, on_failure="ignore", **options)

    found = solve(trace=True, callback=lambda k, z, norm: seen.append(k))
    assert seen == list(range(1, len(seen) + 1)) and len(found.trace) == len(seen) + 1
    assert int(found.steps[0]) > 40, "the plain iteration's, in vain, are counted"
    for last in (9, 60, 100, 200):
        seen.clear()
        found = solve(callback=lambda k, z, norm, last=last: seen.append(k) or k == last)
        assert seen == list(range(1, last + 1)), last
        assert ik.Status(int(found.status[1])) is ik.Status.STOPPED, (last, found)


# ---------------------------------------------------------------------------------------------------------------------
# Fixed points that repel slowly cost no thousand steps, nor do contractions that first stretch.
F64 = torch.float64
_TURN = torch.tensor([[0.78, -0.657], [0.657, 0.78]], dtype=F64)  # by 0.7, times 1.02

#: map, unknowns, and how many evaluations it may take
_AWAY: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "-1.02 z + 1": (lambda z: -1.02 * z + 1, 1, 36),
    "-1.02 z + 1, three": (lambda z: -1.02 * z + 1, 3, 36),
    "1.02 z + 1": (lambda z: 1.02 * z + 1, 1, 50),
    "-1.02 z + 1 and a little of a sine": (lambda z: -1.02 * z + 1 + 0.01 * torch.sin(z), 2, 50),
    "one of three": (lambda z: torch.tensor([1.02, 0.5, -0.3], dtype=z.dtype) * z + 1, 3, 54),
    "a rotation": (lambda z: _TURN.to(z) @ z + 1, 2, 125),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", list(_AWAY))
def test_what_leads_away_is_known_without_going_there(name: str, dtype: torch.dtype) -> None:
    step, n, most = _AWAY[name]
    found = ik.fixed_point(step, torch.zeros(n, dtype=dtype))
    close = 1e-7 if dtype == F64 else 1e-3
    torch.testing.assert_close(step(found.value), found.value, rtol=close, atol=close)
    assert found.evaluations <= most, found


#: maps that are affine near the fixed point that repels, and lead to another one, ``(map, start, where to)``
_ELSEWHERE: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float]]] = {
    "cut off further out": (lambda z: torch.clamp(1.02 * z + 0.01, -40, 40), [0.0], [40.0]),
    "bent a hundred times as far": (lambda z: 100 * torch.tanh(0.012 * z + 1e-4), [0.5], [65.86]),
    "contracts at the start": (
        lambda z: torch.stack([(1.3 - 0.8 * z[1] ** 2) * z[0], z[1] + 0.1 * z[1] * (1 - z[1] ** 2)]),
        [1.0, 0.4],
        [0.0, 1.0],
    ),
}


@pytest.mark.parametrize("name", list(_ELSEWHERE))
def test_what_leads_elsewhere_is_followed(name: str) -> None:
    step, start, there = _ELSEWHERE[name]
    found = ik.fixed_point(step, torch.tensor(start, dtype=F64))
    torch.testing.assert_close(found.value, torch.tensor(there, dtype=F64), rtol=1e-3, atol=1e-3)


def test_each_sample_of_a_batch_by_itself() -> None:
    """One that leads away beside one that leads elsewhere, and one that contracts."""
    kinds = torch.tensor([[-1.02, 1e9], [1.02, 40.0], [0.5, 1e9]], dtype=F64)

    def step(z: Tensor, kind: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(kind[:, :1] * z + 0.01, kind[:, 1:]), -kind[:, 1:])

    start = torch.zeros(3, 1, dtype=F64)
    found = ik.fixed_point(step, start, kinds, batch_dims=1, in_dims=0)
    torch.testing.assert_close(found.value.squeeze(1), torch.tensor([0.01 / 2.02, 40.0, 0.02], dtype=F64))


def _triangular(seed: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.triu(torch.randn(n, n, generator=generator, dtype=F64), 1) * (3 / n**0.5)
    A = A + torch.diag(torch.rand(n, generator=generator, dtype=F64) * 0.9)
    return A, torch.randn(n, generator=generator, dtype=F64)


@pytest.mark.parametrize("seed", range(4))
def test_what_stretches_before_it_contracts_is_no_false_alarm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triangular, with a diagonal below 0.9: powers of it grow for some twenty steps."""
    A, b = _triangular(seed, 20)
    alarms = []
    run = attracting.stretches

    def watched(f: Evaluations, z: Tensor, which: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        repels, v = run(f, z, which, direction)
        alarms.append(bool(repels.any()))
        return repels, v

    monkeypatch.setattr(attracting, "stretches", watched)
    found = ik.fixed_point(lambda z: A @ z + b, torch.zeros(20, dtype=F64))
    exact = torch.linalg.solve(torch.eye(20, dtype=F64) - A, b)
    torch.testing.assert_close(found.value, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    assert not any(alarms)
    assert found.evaluations < 120
