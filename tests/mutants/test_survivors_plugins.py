"""What mutants survived before: the two plugins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import randn
from torch import Tensor

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConvexLayer  # noqa: E402
from implicitkit_cvxpy.backends import Data, Found, Status  # noqa: E402
from implicitkit_cvxpy.cones import Cones, DualCone  # noqa: E402
from implicitkit_cvxpy.kkt import ConeKKT  # noqa: E402
from implicitkit_cvxpy.polish import finish  # noqa: E402
from implicitkit_cvxpy.program import ConeProgram, KKTOperator  # noqa: E402
from implicitkit_deq.held.buffers import Buffers  # noqa: E402
from implicitkit_deq.held.frozen import statistics_held  # noqa: E402

D = torch.float64


def assert_near(got: Any, want: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# --------------------------------------------------------------------------------------------------------- convex layer


def _conditions(transposed: bool) -> KKTOperator:
    """A program with linear rows, one on and one off, and a second-order cone of three rows."""
    n, batch = 4, 2
    root = randn(batch, n, n)
    P, A = root @ root.mT + torch.eye(n, dtype=D), randn(batch, 5, n, seed=1)
    dual = DualCone(Cones(nonneg=2, soc=(3,)))
    v = torch.cat([torch.tensor([[1.0, -1.0]] * batch, dtype=D), torch.tensor([[0.2, 1.0, -0.5]] * batch, dtype=D)], 1)
    J = KKTOperator(P, A, *dual.derivative(v))
    return J.T if transposed else J


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_products_of_the_conditions_are_those_of_their_matrix(transposed: bool) -> None:
    J, w = _conditions(transposed), randn(2, 9, seed=2)
    M = J.dense()
    assert_near(J.mv(w), torch.einsum("bij,bj->bi", M, w))
    assert_near(J.rmv(w), torch.einsum("bij,bi->bj", M, w))
    assert_near(J.T.dense(), M.mT)
    assert_near(ConeKKT().solve(J, w).x, torch.linalg.solve(M, w.unsqueeze(2)).squeeze(2), rtol=1e-7, atol=1e-8)


def _large() -> tuple[Any, int]:
    n = 50
    x, h, z = cp.Parameter(n), cp.Parameter(n), cp.Variable(n)
    return ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(z - x)), [z <= h]), [x, h], [z]), n


def test_convex_layers_above_64_unknowns() -> None:
    """``min(x, h)``, first and second order."""
    layer, n = _large()
    x, h = randn(2, n).requires_grad_(), randn(2, n, seed=1).requires_grad_()
    (z,) = layer(x, h)
    assert_near(z, torch.minimum(x, h), rtol=1e-6, atol=1e-7)
    gx, gh = torch.autograd.grad(z.pow(3).sum() / 3, (x, h), create_graph=True)
    below = (x < h).to(D)
    assert_near(gx, below * x**2, rtol=1e-6, atol=1e-7)
    assert_near(gh, (1 - below) * h**2, rtol=1e-6, atol=1e-7)
    assert_near(torch.autograd.grad(gx.sum(), x)[0], 2 * below * x, rtol=1e-6, atol=1e-7)


def test_convex_layer_in_nested_vmap_with_a_matrix_parameter() -> None:
    """``min |z|^2 / 2 - b'z`` with ``S z = c``: by formula, in vmap over one and then the other."""
    S, b, z = cp.Parameter((1, 3)), cp.Parameter(3), cp.Variable(3)
    layer = ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(z) - b @ z), [S @ z == 1]), [S, b], [z])

    def formula(S: Tensor, b: Tensor) -> Tensor:
        s = S[0]
        return b - s * (s @ b - 1) / (s @ s)

    Ss, bs = 1 + 0.3 * randn(2, 1, 3), randn(3, 3, seed=1)
    vmap, grad = torch.func.vmap, torch.func.grad

    def nested(f: Any) -> Tensor:
        weigh = grad(lambda S, b: (f(S, b) * torch.arange(1.0, 4.0, dtype=D)).sum())
        return vmap(lambda S: vmap(lambda b: weigh(S, b))(bs))(Ss)

    assert_near(nested(lambda S, b: layer(S, b)[0]), nested(formula), rtol=1e-6, atol=1e-7)
    swapped = vmap(lambda b: vmap(lambda S: layer(S, b)[0], in_dims=1)(Ss.movedim(0, 1)))(bs)
    assert_near(swapped, vmap(lambda b: vmap(lambda S: formula(S, b))(Ss))(bs), rtol=1e-6, atol=1e-7)


def test_convex_layer_beside_a_sample_that_is_not_finite() -> None:
    layer, n = _large()
    x, h = randn(2, n), torch.zeros(2, n, dtype=D)
    x[1, 0] = torch.nan
    x.requires_grad_()
    (z,) = (
        layer(x, h, on_failure="nan") if "on_failure" in layer.forward.__code__.co_varnames else _with_nan(layer, x, h)
    )
    (g,) = torch.autograd.grad(z[0].sum(), x)
    assert_near(g[0], (x[0] < 0).to(D), rtol=1e-6, atol=1e-7)


def _with_nan(layer: Any, x: Tensor, h: Tensor) -> Any:
    layer.on_failure = "nan"
    return layer(x, h)


def _linear_program(answer: tuple[float, float], says: Status, start: Tensor | None) -> tuple[Any, list[int]]:
    """``min -x`` with ``x <= 1``, ``(x, y) = (1, 1)``, from a solver that gives ``answer``; and how often it was asked."""
    asked: list[int] = []

    class Solver:
        def __call__(self, data: Data) -> Found:
            asked.append(len(data.q))
            one = torch.ones(1, dtype=torch.int64)
            return Found(torch.tensor([answer], dtype=D), one * int(says), one)

        def closely(self) -> Solver:
            return self

    unit = torch.ones(1, 1, dtype=D)
    cones = Cones(nonneg=1)
    data = Data(torch.zeros(1, 1, 1, dtype=D), -unit, unit.unsqueeze(0), unit, cones)
    found = finish(ConeProgram(DualCone(cones), 1), Solver(), data, torch.zeros(1, 0, dtype=D), start)
    return found, asked


def test_a_warm_start_where_newton_stands_still_is_no_solution() -> None:
    """At (-5, 1/2) the constraint is off and ``F = (-1/2, 1/2)``, orthogonal to the columns of ``J``."""
    (w, status, norm, steps, *_), asked = _linear_program(
        (1, 1), Status.CONVERGED, torch.tensor([[-5.0, 0.5]], dtype=D)
    )
    assert_near(w, torch.ones(1, 2, dtype=D))
    assert asked == [1] and steps.tolist() == [1]
    assert status.tolist() == [int(Status.CONVERGED)] and float(norm) < 1e-12


@pytest.mark.parametrize(
    ("says", "verdict"),
    [(Status.CONVERGED, Status.INACCURATE), (Status.MAX_STEPS, Status.MAX_STEPS)],
    ids=["convergence", "a limit"],
)
def test_a_solver_that_claims_a_point_where_newton_stands_still_is_not_believed(says: Status, verdict: Status) -> None:
    (_, status, norm, *_), _ = _linear_program((-5, 0.5), says, None)
    assert status.tolist() == [int(verdict)]
    assert float(norm) == pytest.approx(0.5**0.5)


# ----------------------------------------------------------------------------------------------------------------- DEQ
def test_frobenius_bound_of_a_convolution_bounds_its_operator() -> None:
    """A kernel whose taps are all equal is as strong as it can be: ``sqrt(taps) |W|_F``."""
    from implicitkit_deq.normalise import WeightBound

    W = torch.ones(1, 1, 3, 3, dtype=D)
    bounded = WeightBound(0.9, "frobenius")(W)
    image = torch.ones(1, 1, 24, 24, dtype=D)
    gain = torch.nn.functional.conv2d(image, bounded).norm() / image.norm()
    assert float(gain) <= 0.9


def test_monotone_cell_steps_by_the_inverse_of_its_slope() -> None:
    """``1 / L``, ``L = |I - W|``: the fixed point is that of any step, ``z = relu(W z + U x + b)``."""
    from implicitkit_deq import DEQ, cells

    torch.manual_seed(0)
    cell = cells.Monotone(3, 5, dtype=D)
    x = randn(2, 3)
    injected, operator, step = (t.detach() for t in cell.inject(x))
    assert_near(step, 1 / torch.linalg.matrix_norm(operator, 2), rtol=1e-9)
    z = DEQ(cell, (5,), rtol=1e-10)(x).detach()
    torch.testing.assert_close(z, torch.relu(z - z @ operator.mT + injected), rtol=1e-7, atol=1e-8)


def test_start_loss_is_the_relative_square_by_hand() -> None:
    from implicitkit_deq import DEQ, cells

    torch.manual_seed(0)
    layer = DEQ(cells.MLP(3, 4, dtype=D), (4,), init="learned", rtol=1e-10)
    z = layer(randn(2, 3)).detach()
    start = next(p for name, p in layer.named_parameters() if name.startswith("init"))
    initial = start.detach().expand_as(z) if start.numel() == 4 else None
    assert initial is not None
    want = ((initial - z).square().sum(1) / z.square().sum(1)).mean()
    assert_near(layer.start_loss().detach(), want, rtol=1e-7)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("independent", [True, False])
def test_a_normalisation_is_left_as_it_was_found(independent: bool, training: bool) -> None:
    """Mode, statistics and count, whatever the mode; also where what was called in between has failed."""
    norm = torch.nn.BatchNorm1d(3).train(training)
    found = norm.training, norm.running_mean, norm.running_var, norm.num_batches_tracked
    count, mean = norm.num_batches_tracked.clone(), norm.running_mean.clone()
    held = statistics_held(norm) if independent else Buffers([norm]).watched()
    with pytest.raises(ZeroDivisionError), held:
        norm(torch.ones(4, 3))
        assert norm.training == (training and not independent) and norm.running_mean is not found[1]
        raise ZeroDivisionError
    after = norm.training, norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert all(a is b for a, b in zip(after, found, strict=True))
    assert torch.equal(norm.running_mean, mean) and torch.equal(norm.num_batches_tracked, count)
