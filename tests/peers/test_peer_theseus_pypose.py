"""What a user of Theseus, pypose or GTSAM relies on, and its result here."""

from __future__ import annotations

import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import jacrev, jvp

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.manifold import SE3, SO3

F64 = torch.float64
M = SE3()
STEP = torch.tensor([1.0, 0.2, 0.0, 0.0, 0.1, 0.4], dtype=F64)
EYE4 = torch.eye(4, dtype=F64)


def chain(n: int) -> Tensor:
    """Poses that each take the same step from the one before."""
    poses = [EYE4]
    for _ in range(n - 1):
        poses.append(M.retract(poses[-1], STEP))
    return torch.stack(poses)


def errors(T: Tensor, steps: Tensor, loop: Tensor) -> tuple[Tensor, ...]:
    """A prior on the first pose, odometry, and a closed loop."""
    between = torch.linalg.inv(T[:-1]) @ T[1:]
    return M.local(EYE4, T[0]), M.local(steps, between), 3 * M.local(loop, torch.linalg.inv(T[0]) @ T[-1])


def solve(steps: Tensor, loop: Tensor, **options: object) -> Tensor:
    start = EYE4.repeat(len(steps) + 1, 1, 1)
    value: Tensor = ik.least_squares(errors, start, (steps, loop), manifold=M, **options).value
    return value


def test_a_pose_graph_that_fits() -> None:
    truth = chain(4)
    steps = torch.linalg.inv(truth[:-1]) @ truth[1:]
    torch.testing.assert_close(solve(steps, truth[-1]), truth, rtol=0, atol=1e-7)


def test_its_derivative_by_differences() -> None:
    truth = chain(3)
    steps = torch.linalg.inv(truth[:-1]) @ truth[1:]
    loop = lambda t: M.retract(truth[-1], t * torch.tensor([0.3, -0.2, 0.5, 0.1, 0.2, -0.1], dtype=F64))  # noqa: E731
    one = torch.ones((), dtype=F64)
    found = jvp(lambda t: solve(steps, loop(t), rtol=1e-12), (one,), (one,))[1]
    h = 1e-5
    expected = (solve(steps, loop(one + h), rtol=1e-12) - solve(steps, loop(one - h), rtol=1e-12)) / (2 * h)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_local_is_the_difference_in_the_body_frame() -> None:
    T = M.retract(EYE4, 2 * STEP)
    torch.testing.assert_close(M.local(T, M.retract(T, STEP)), STEP)
    torch.testing.assert_close(SO3().local(T[:3, :3], M.retract(T, STEP)[:3, :3]), STEP[3:])


@pytest.mark.parametrize("loss", ["huber", "cauchy"])
def test_robust_losses_ignore_an_outlier(loss: str) -> None:
    R = SO3().retract(torch.eye(3, dtype=F64), STEP[3:])
    turns = SO3().retract(R.expand(9, 3, 3), 0.01 * torch.randn(9, 3, dtype=F64))
    turns = torch.cat([turns, SO3().retract(R, torch.tensor([2.0, 0.0, 0.0], dtype=F64))[None]])

    def mean(loss: str) -> Tensor:
        local = lambda R: SO3().local(R, turns)  # noqa: E731
        value: Tensor = ik.least_squares(local, R, manifold=SO3(), loss=loss, f_scale=0.02).value
        return value

    off = {name: float(SO3().local(R, mean(name)).norm()) for name in ("linear", loss)}
    assert off[loss] < 0.02 < 0.1 < off["linear"]


@pytest.mark.slow
def test_a_graph_of_many_poses_is_solved_by_its_sparse_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    """240 unknowns, noisy measurements: the minimum is SciPy's, and neither the Jacobian nor the Hessian is formed dense."""
    n, g = 40, torch.Generator().manual_seed(3)
    truth = chain(n)
    i = torch.cat([torch.arange(n - 1), torch.arange(0, n - 4, 5)])
    j = torch.cat([torch.arange(1, n), torch.arange(4, n, 5)])
    noise = lambda m: 0.05 * torch.randn(m, 6, generator=g, dtype=F64)  # noqa: E731
    measured = M.retract(torch.linalg.inv(truth[i]) @ truth[j], noise(len(i)))
    start = M.retract(truth, noise(n))

    def edges(T: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        return M.local(EYE4, T[0]), M.local(measured, torch.linalg.inv(T[i]) @ T[j])

    def flat(delta: Tensor) -> Tensor:
        return torch.cat([e.flatten() for e in edges(M.retract(start, delta.view(n, 6)), measured)])

    least = scipy.optimize.least_squares(
        lambda d: flat(torch.from_numpy(d)).numpy(), torch.zeros(6 * n, dtype=F64).numpy(),
        jac=lambda d: jacrev(flat)(torch.from_numpy(d)).numpy(), xtol=1e-14, ftol=1e-14, gtol=1e-14,
    ).x  # fmt: skip

    def dense(*_: object, **__: object) -> None:
        raise AssertionError("a dense matrix was formed")

    monkeypatch.setattr(autodiff, "jacobian", dense)
    monkeypatch.setattr(Operator, "dense", dense)
    measured.requires_grad_()
    T = ik.least_squares(edges, start, (measured,), manifold=M, solver="levenberg_marquardt").value
    expected = M.retract(start, torch.from_numpy(least).view(n, 6))
    torch.testing.assert_close(T.detach(), expected, rtol=0, atol=1e-6)
    (g_measured,) = torch.autograd.grad(M.local(EYE4, T[-1])[0], measured)
    assert bool(torch.isfinite(g_measured).all()) and float(g_measured.abs().max()) > 0.01


def test_a_mean_of_rotations_takes_few_evaluations() -> None:
    """Two a step, and not many more to judge it: pypose's eight Gauss-Newton steps take sixteen."""
    turns = SO3().retract(torch.eye(3, dtype=F64), torch.linspace(-0.6, 0.5, 90, dtype=F64).sin().view(30, 3))
    s = ik.least_squares(SO3().local, torch.eye(3, dtype=F64), (turns,), manifold=SO3())
    assert float(SO3().local(s.value, turns).mean(0).abs().max()) < 1e-10
    assert int(s.steps) <= 10 and s.evaluations <= 20
