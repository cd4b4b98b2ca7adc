"""What ``auto`` does with few unknowns: Newton's steps where they pay, and other methods from where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import lacks_second_derivative
from implicitkit.manifold import SO3
from implicitkit.problem.robust import LOSSES
from implicitkit.solver import probing
from implicitkit.sparsity.known import SMALLEST

F64 = torch.float64
G = torch.Generator().manual_seed(3)
A = torch.randn(50, 20, generator=G, dtype=F64)
Y = torch.randn(50, generator=G, dtype=F64)


def ridge(w: Tensor) -> Tensor:
    return 0.5 * (A @ w - Y).square().sum() + 0.5 * w.square().sum()


def test_a_quadratic_takes_one_step() -> None:
    s = ik.argmin(ridge, torch.zeros(20, dtype=F64))
    assert int(s.steps) == 1 and s.solver == "auto (newton)" and s.evaluations < 12
    torch.testing.assert_close(s.value, torch.linalg.solve(A.mT @ A + torch.eye(20, dtype=F64), A.mT @ Y))


def test_samples_that_are_not_convex_go_on_otherwise() -> None:
    """``cos`` is convex at the second start only; both end in minima."""
    start = torch.tensor([[0.5], [2.5]], dtype=F64)
    s = ik.argmin(lambda z: torch.cos(z).sum(-1), start, batch_dims=1)
    assert s.solver == "auto (newton, lbfgs)"
    torch.testing.assert_close(torch.cos(s.value), -torch.ones(2, 1, dtype=F64))
    torch.testing.assert_close(s.value[1], torch.full((1,), torch.pi, dtype=F64))


def test_a_step_that_overshoots_is_halved() -> None:
    """``sqrt(1 + z^2)`` is convex, and Newton's iteration ``z -> -z^3`` goes to and fro between 1 and -1: half of the first
    step ends in the minimum.  From 100 ten halvings are not enough, and others go on."""
    well = lambda z: (1 + z.square()).sqrt().sum()  # noqa: E731
    s, far = (ik.argmin(well, torch.full((1,), start, dtype=F64)) for start in (1.0, 100.0))
    assert float(s.value) == 0 and int(s.steps) == 1
    assert abs(float(far.value)) < 1e-8 and "newton" not in far.solver and int(far.steps) <= 15


def test_of_a_line_of_minima_no_far_one_is_taken() -> None:
    """The Hessian is singular: descent from the origin finds the nearest of them."""
    z = ik.argmin(lambda z: (z[0] - z[1] - 1) ** 2, torch.zeros(2, dtype=F64)).value
    torch.testing.assert_close(z, torch.tensor([0.5, -0.5], dtype=F64))


class Once(torch.autograd.Function):
    """A square whose second derivative ends in an error that says ``words``."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, words: str) -> Tensor:
        ctx.save_for_backward(z)
        ctx.words = words
        return z.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(ctx.words)
        (z,) = ctx.saved_tensors
        return 2 * z * g, None


def test_no_second_derivative_is_needed() -> None:
    s = ik.argmin(lambda z: Once.apply(z - 1, "no second derivative").sum(), torch.zeros(3, dtype=F64))
    torch.testing.assert_close(s.value, torch.ones(3, dtype=F64))
    assert s.solver == "auto (lbfgs)"


@pytest.mark.parametrize("n", [3, SMALLEST])
def test_newton_cg_says_that_a_second_derivative_is_missing(n: int) -> None:
    """Of ``pdist`` torch has none, and says so at the first product with the Hessian."""
    x = torch.linspace(0, 1, 2 * n, dtype=F64).cos().view(n, 2)
    with pytest.raises(ik.ConvergenceError, match="no second derivative"):
        ik.argmin(lambda z: (torch.pdist(z) - 1).square().sum(), x, solver="newton_cg")


@pytest.mark.parametrize(("solver", "n"), [("auto", 3), ("newton_cg", 3), ("newton_cg", SMALLEST)])
def test_an_error_inside_a_hessian_is_the_users(solver: str, n: int) -> None:
    """Not one more objective without a second derivative."""
    with pytest.raises(RuntimeError, match="the table of weights is empty"):
        ik.argmin(
            lambda z: Once.apply(z - 1, "the table of weights is empty").sum(), torch.zeros(n, dtype=F64), solver=solver
        )


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (RuntimeError("derivative for aten::_histogram is not implemented"), True),
        (RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable"), True),
        (RuntimeError("torch.compile with aot_autograd does not currently support double backward"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("out of memory in a derivative"), False),
        (ik.CapturedTensorError("its derivative would be lost"), False),
        (ik.ChangedFunctionError("for the derivative, it is 0.3"), False),
    ],
)
def test_which_errors_mean_that_there_is_no_second_derivative(error: RuntimeError, lacks: bool) -> None:
    assert lacks_second_derivative(error) is lacks


@pytest.mark.parametrize("name", ["huber", "cauchy", "soft_l1"])
@pytest.mark.parametrize("own", [False, True])
def test_robust_means_take_few_steps(name: str, own: bool) -> None:
    """Levenberg-Marquardt alone takes 50 to 70 steps here under a loss of somebody else: it does not see the curvature."""
    loss: Any = (lambda s: s * LOSSES[name](s)) if own else name
    M, eye = SO3(), torch.eye(3, dtype=F64)
    turns = M.retract(eye.expand(8, 3, 3), 0.3 * torch.randn(8, 3, generator=G, dtype=F64))
    s = ik.least_squares(lambda R, t: M.local(R, t), eye, (turns,), manifold=M, loss=loss, f_scale=0.1)
    slow = ik.least_squares(
        lambda R, t: M.local(R, t), eye, (turns,), manifold=M, loss=loss, f_scale=0.1, solver="levenberg_marquardt"
    )
    torch.testing.assert_close(s.value, slow.value, rtol=0, atol=1e-8)
    assert int(s.steps) <= 20
    assert (name == "soft_l1" or int(slow.steps) > 2 * int(s.steps)) if own else int(slow.steps) <= 20


def test_a_batch_of_good_fits_is_judged_without_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took more time than all steps of 64 fits of 30 unknowns."""
    asked = list[int]()
    plain = probing._by_normal_equations

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("singular values have been taken")

    monkeypatch.setattr(probing, "lstsq_batched", refuse)
    monkeypatch.setattr(probing, "_by_normal_equations", lambda *given: (asked.append(1), plain(*given))[1])
    x = torch.linspace(0.5, 1.5, 20, dtype=F64).expand(8, 20)
    fit = lambda z, x: torch.cat([z + z**3 - x, 0.1 * z], -1)  # noqa: E731
    s = ik.least_squares(fit, torch.zeros(8, 20, dtype=F64), (x,), batch_dims=1, rtol=1e-4)
    assert bool(s.converged.all()) and asked


def energy(z: Tensor, x: Tensor) -> Tensor:
    """Its Hessian at zero has an eigenvalue of 0.1, along which a full Newton step goes far."""
    return (1.05 * z.square() + z**4 / 4 - z * z.roll(1, -1) - x * z).sum(-1)


@pytest.mark.parametrize("n", [10, 30])
def test_one_step_that_overshoots_is_shortened(n: int) -> None:
    """Where Hessians are cheap, Newton's steps go on, and are fewer than those of any other method."""
    x, start = torch.linspace(0.5, 1.5, n, dtype=F64), torch.zeros(n, dtype=F64)
    s, want = ik.argmin(energy, start, (x,)), ik.argmin(energy, start, (x,), solver="lbfgs")
    assert s.solver == "auto (newton)" and int(s.steps) <= 8 and int(s.evaluations) < int(want.evaluations)
    torch.testing.assert_close(s.value, want.value, rtol=0, atol=1e-8)


def test_dear_hessians_are_not_formed_where_the_objective_is_not_as_its_model() -> None:
    """Those of 256 samples of 30 unknowns: three products and two evaluations later L-BFGS goes on, and nobody asks whether
    the start may be a minimum."""
    x, start = torch.linspace(0.5, 1.5, 30, dtype=F64).expand(256, 30), torch.zeros(256, 30, dtype=F64)
    s, want = (ik.argmin(energy, start, (x,), batch_dims=1, solver=name) for name in ("auto", "lbfgs"))
    assert s.solver == "auto (lbfgs)" and int(s.evaluations) <= int(want.evaluations) + 5


def test_dear_hessians_are_formed_where_a_sample_is_as_its_model() -> None:
    """Every other sample is quadratic, and takes one step; the rest go on otherwise."""
    x, start = torch.linspace(0.5, 1.5, 30, dtype=F64).expand(256, 30), torch.zeros(256, 30, dtype=F64)
    quartic = 20.0 * (torch.arange(256, dtype=F64) % 2)
    f = lambda z, x, c: (2 * z.square() + c.unsqueeze(1) * z**4 - z * z.roll(1, -1) - x * z).sum(-1)  # noqa: E731
    s = ik.argmin(f, start, (x, quartic), batch_dims=1)
    steps = s.steps.view(128, 2)
    assert s.solver == "auto (newton, lbfgs)" and bool((steps[:, 0] == 1).all() and (steps[:, 1] > 5).all()), s.steps


def test_a_curved_valley_is_left_to_others() -> None:
    """Two halved steps in a row along it leave more than half of the gradient."""
    valley = lambda z: 100 * (z[1] - z[0] ** 2) ** 2 + (1 - z[0]) ** 2  # noqa: E731
    s = ik.argmin(valley, torch.tensor([-1.2, 1.0], dtype=F64))
    torch.testing.assert_close(s.value, torch.ones(2, dtype=F64))
    assert s.solver == "auto (lbfgs)"
