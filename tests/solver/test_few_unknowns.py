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
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps import convex_model
from implicitkit.solver.verdict import stationary_fit
from implicitkit.sparsity.patterns import SMALLEST

F64 = torch.float64


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


A, Y = drawn(50, 20), drawn(50, seed=4)


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
    assert s.solver == "auto (newton, newton_cg)"
    torch.testing.assert_close(torch.cos(s.value), -torch.ones(2, 1, dtype=F64))
    torch.testing.assert_close(s.value[1], torch.full((1,), torch.pi, dtype=F64))


def test_a_step_that_overshoots_is_halved() -> None:
    """``sqrt(1 + z^2)`` is convex, and Newton's iteration ``z -> -z^3`` goes to and fro between 1 and -1: half of the first
    step ends in the minimum.  From 100 ten halvings are not enough, and others go on."""
    well = lambda z: (1 + z.square()).sqrt().sum()  # noqa: E731
    s, far = (ik.argmin(well, torch.full((1,), start, dtype=F64)) for start in (1.0, 100.0))
    assert float(s.value.abs()) < 1e-12 and int(s.steps) <= 2
    assert abs(float(far.value)) < 1e-8 and far.solver == "auto (newton_cg)" and int(far.steps) <= 15


def _wells(z: Tensor, x: Tensor) -> Tensor:
    return ((z * z - 1) ** 2 - 0.5 * z * (z.roll(1, -1) + z.roll(-1, -1)) - 0.1 * x * z).sum(-1)


def _valley(z: Tensor, x: Tensor) -> Tensor:
    return (100 * (0.5 * (z.roll(1, -1) + z.roll(-1, -1)) - z * z) ** 2 + (x - z) ** 2).sum(-1)


@pytest.mark.parametrize(
    ("objective", "n", "batch", "most"),
    [(_wells, 10, 64, 25), (_wells, 65, 64, 40), (_valley, 10, 64, 90), (_valley, 30, 1, 45), (_valley, 65, 1, 80)],
)
def test_out_of_wells_and_along_valleys_steps_are_newtons(objective: Any, n: int, batch: int, most: int) -> None:
    """In a trust region, by the eigenvalues of dense Hessians or by a few products; L-BFGS evaluates 50 to 240 times."""
    x = torch.linspace(0.5, 1.5, n, dtype=F64) * (1 + 1.5 * torch.arange(batch).unsqueeze(1) / batch)
    s = ik.argmin(objective, torch.zeros(batch, n, dtype=F64), (x,), batch_dims=1)
    assert s.solver.endswith("newton_cg)") and int(s.evaluations) <= most, s
    assert (torch.linalg.eigvalsh(torch.func.vmap(torch.func.hessian(objective))(s.value, x)) > 0).all()


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
    """Of bags of embeddings torch has none, and says so at the first product with the Hessian."""
    bags, weights = torch.arange(n).view(n, 1), torch.ones(n, 2, dtype=F64)
    with pytest.raises(ik.ConvergenceError, match="no second derivative"):
        ik.argmin(
            lambda z: (
                (torch.nn.functional.embedding_bag(bags, weights, per_sample_weights=z.view(n, 1), mode="sum") - 1)
                .square()
                .sum()
            ),
            torch.zeros(n, dtype=F64),
            solver="newton_cg",
        )


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
        (
            NotImplementedError("You must implement either the backward or vjp method for your Function"),
            True,
        ),
        (RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("out of memory in a derivative"), False),
        (ik.CapturedTensorError("its derivative would be lost"), False),
        (ik.ChangedFunctionError("for the derivative, it is 0.3"), False),
    ],
)
def test_which_errors_mean_that_there_is_no_second_derivative(error: RuntimeError, lacks: bool) -> None:
    assert lacks_second_derivative(error) is lacks


def robust_mean(loss: Any, seed: int, **options: Any) -> ik.Solution:
    """Of eight rotations, most of which are outliers."""
    M, eye = SO3(), torch.eye(3, dtype=F64)
    turns = M.retract(eye.expand(8, 3, 3), 0.3 * drawn(8, 3, seed=seed))
    return ik.least_squares(lambda R, t: M.local(R, t), eye, (turns,), manifold=M, loss=loss, f_scale=0.1, **options)


@pytest.mark.parametrize("name", ["huber", "soft_l1", "cauchy", "arctan"])
def test_robust_means_take_few_steps(name: str) -> None:
    """Without the negative curvature of outliers the last two take 15 to 112."""
    steps = sorted(int(robust_mean(name, seed).steps) for seed in range(4))
    assert steps[2] <= 12 and steps[-1] <= 30, steps


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["huber", "cauchy", "soft_l1"])
def test_robust_means_take_few_steps_under_a_loss_of_somebody_else(name: str) -> None:
    """Levenberg-Marquardt alone does not see the curvature."""
    loss = lambda s: s * LOSSES[name](s)  # noqa: E731
    s, slow = (robust_mean(loss, 0, solver=solver) for solver in ("auto", "levenberg_marquardt"))
    torch.testing.assert_close(s.value, slow.value, rtol=0, atol=1e-8)
    assert int(s.steps) <= 20
    assert name == "soft_l1" or int(slow.steps) > 2 * int(s.steps)


def test_a_batch_of_good_fits_is_judged_without_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took more time than all steps of 64 fits of 30 unknowns."""
    asked = list[int]()
    plain = stationary_fit._by_normal_equations

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("singular values have been taken")

    monkeypatch.setattr(stationary_fit, "lstsq_batched", refuse)
    monkeypatch.setattr(stationary_fit, "_by_normal_equations", lambda *given: (asked.append(1), plain(*given))[1])
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


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a dense Hessian has been factored")


def test_dear_hessians_are_not_formed_where_products_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 256 samples of 30 unknowns: a step takes a few products by conjugate gradients, and overshoots at first."""
    x, start = torch.linspace(0.5, 1.5, 30, dtype=F64).expand(256, 30), torch.zeros(256, 30, dtype=F64)
    want = ik.argmin(energy, start, (x,), batch_dims=1, solver="lbfgs")
    monkeypatch.setattr(convex_model, "cholesky_batched", refused)
    s = ik.argmin(energy, start, (x,), batch_dims=1)
    assert s.solver == "auto (newton)" and int(s.evaluations) < int(want.evaluations)
    torch.testing.assert_close(s.value, want.value, rtol=0, atol=1e-8)


def test_dear_hessians_are_not_formed_where_the_objective_is_not_convex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product shows it: others go on by products, and nobody asks whether the start may be a minimum."""
    monkeypatch.setattr(convex_model, "cholesky_batched", refused)
    x, start = torch.linspace(0.5, 1.5, 30, dtype=F64).expand(256, 30), torch.full((256, 30), 0.1, dtype=F64)
    wells = lambda z, x: ((z.square() - x) ** 2).sum(-1)  # noqa: E731
    s, want = (ik.argmin(wells, start, (x,), batch_dims=1, solver=name) for name in ("auto", "lbfgs"))
    assert s.solver == "auto (newton_cg)" and int(s.evaluations) <= int(want.evaluations) + 5
    torch.testing.assert_close(s.value, x.sqrt(), rtol=0, atol=1e-8)


def test_dear_hessians_are_formed_where_products_do_not() -> None:
    """Of a condition of a million: conjugate gradients would take as many products as there are unknowns, or more."""
    x, start = torch.linspace(0.5, 1.5, 30, dtype=F64).expand(256, 30), torch.zeros(256, 30, dtype=F64)
    scale = torch.logspace(0, 6, 30, dtype=F64)
    f = lambda z, x: (scale * (z - x).square() + (z - x) ** 4).sum(-1)  # noqa: E731
    s = ik.argmin(f, start, (x,), batch_dims=1)
    assert s.solver == "auto (newton)" and int(s.steps.max()) <= 15 and int(s.evaluations) <= 60
    torch.testing.assert_close(s.value, x, rtol=0, atol=1e-7)


def _total_variation(u: Tensor, x: Tensor) -> Tensor:
    """Convex, and nearly not smooth: a long damped phase."""
    return 0.5 * (u - x).square().sum() + 0.3 * ((u[1:] - u[:-1]).square() + 1e-4).sqrt().sum()


def _logistic(w: Tensor, x: Tensor) -> Tensor:
    """Of features whose sizes differ a hundredfold."""
    i, j = torch.arange(400, dtype=F64), torch.arange(len(x), dtype=F64)
    X = torch.sin(1 + 7.3 * i.unsqueeze(1) * (1 + j).sqrt()) * torch.logspace(0, -2, len(x), dtype=F64)
    margin = X @ w
    return torch.nn.functional.softplus(margin).mean() - ((X @ x > 0) * margin).mean() + 1e-6 * w.square().sum()


def _geodesic(u: Tensor, x: Tensor) -> Tensor:
    """The shortest graph over a line."""
    p = torch.cat([u.new_zeros(1), u + 0 * x, u.new_ones(1)])
    return (1 / len(p) ** 2 + (p[1:] - p[:-1]).square()).sqrt().sum()


def _quadratic(u: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (torch.logspace(0, 6, len(u), dtype=F64) * u.square()).sum() - (x * u).sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [40, 60, 120])
@pytest.mark.parametrize("objective", [_total_variation, _logistic, _geodesic, _quadratic])
def test_convex_objectives_of_some_unknowns_take_newton_steps(objective: Any, n: int) -> None:
    """Less than half of the evaluations of L-BFGS, with the same end."""
    t = torch.linspace(0, 1, n, dtype=F64)
    x = (t > 0.5).double() + 0.1 * torch.sin(60 * t)
    s = ik.argmin(objective, t**3, (x,))
    other = ik.argmin(objective, t**3, (x,), solver="lbfgs", on_failure="ignore", max_steps=300)
    assert s.solver == "auto (newton)" and 2 * int(s.evaluations) < int(other.evaluations)
    assert float(objective(s.value, x)) <= float(objective(other.value, x)) + 1e-12


@pytest.mark.parametrize("price", [None, 45.0], ids=["its own price", "dear factors"])
def test_a_step_by_products_is_forgiven_as_often_as_products_cost_little(
    price: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of these overshoot; a few products for each are no reason to go over to L-BFGS, nor are steps taken
    so exactly that they cost more evaluations than they save.  What factors would have cost does not count."""
    if price is not None:
        monkeypatch.setattr(Evaluations, "price_of_dense", lambda self, z, **kwargs: price)
    i, n, batch = torch.arange(3600.0, dtype=F64).view(60, 60), 60, 64
    Q = torch.sin(1 + 1.7 * i)
    Q, b = Q @ Q.mT / n + 0.1 * torch.eye(n, dtype=F64), torch.cos(2.3 * torch.arange(batch * n * 1.0, dtype=F64))
    f = lambda u, b: (0.5 * u * (u @ Q) - b * u + 0.1 * u**4).sum(-1)  # noqa: E731
    s = ik.argmin(f, torch.zeros(batch, n, dtype=F64), (b.view(batch, n),), batch_dims=1)
    assert s.solver == "auto (newton)" and int(s.evaluations) <= 55, s


def test_dear_steps_of_a_long_damped_phase_are_left() -> None:
    """Of 600 unknowns without a pattern: one that leaves more than half of the gradient is the last."""
    n = 600
    turn, t = torch.linalg.qr(drawn(n, n))[0], torch.linspace(0, 1, n, dtype=F64)
    x = (t > 0.5).double() + 0.1 * torch.sin(60 * t)
    rough = lambda v: ((turn @ v)[1:] - (turn @ v)[:-1]).square()  # noqa: E731
    f = lambda v: 0.5 * (turn @ v - x).square().sum() + 0.3 * (rough(v) + 1e-6).sqrt().sum()  # noqa: E731
    assert ik.argmin(f, torch.zeros(n, dtype=F64)).solver == "auto (lbfgs)"


@pytest.mark.parametrize(("convex", "finisher"), [(1, "auto (newton_cg)"), (2, "auto (newton, newton_cg)")])
def test_a_minority_goes_on_with_the_others(convex: int, finisher: str) -> None:
    """``a z + sinh(z)^2 / 2`` from far out takes Newton's method many steps, each the time of all rows; two samples are not
    convex at their start."""
    a = torch.linspace(1, 2, 4, dtype=F64)[:, None]
    bent = torch.arange(4)[:, None] < 2

    def objective(z: Tensor, a: Tensor) -> Tensor:
        return (bent * torch.cos(z) + ~bent * (a * z + z.sinh().square() / 2)).sum(-1)  # nothing with a kink

    rows = torch.arange(2 + convex)
    bent = bent[rows]
    start = torch.where(bent, 0.5, 8.0).to(F64)
    s = ik.argmin(objective, start, (a[rows],), batch_dims=1)
    assert s.solver == finisher
    far = s.value[2:]
    torch.testing.assert_close(a[rows][2:] + far.sinh() * far.cosh(), torch.zeros_like(far), rtol=0, atol=1e-7)


def test_a_curved_valley_is_left_to_others() -> None:
    """Steps along it leave more than half of the gradient each, and there are many."""
    valley = lambda z: (100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()  # noqa: E731
    start = torch.full((100,), -1.0, dtype=F64)
    s, want = (ik.argmin(valley, start, solver=name) for name in ("auto", "lbfgs"))
    torch.testing.assert_close(s.value, torch.ones(100, dtype=F64))
    assert s.solver != "auto (newton)" and int(s.evaluations) < 1.2 * int(want.evaluations)


def test_newton_steps_through_attention() -> None:
    """Torch's fast kernel of it has one derivative: the graph of a trial is that of the formula."""
    keys = drawn(1, 1, 5, 4, seed=7)

    def objective(z: Tensor) -> Tensor:
        seen = torch.nn.functional.scaled_dot_product_attention(z.view(1, 1, 3, 4), keys, keys)
        return (seen - 0.1).square().sum() + 0.5 * z.square().sum()

    s = ik.argmin(objective, torch.ones(12, dtype=F64))
    assert s.solver == "auto (newton)" and s.evaluations <= 2 * int(s.steps) + 4, s
