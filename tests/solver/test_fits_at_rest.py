"""Fits of a batch that end at different times: those at rest are not factored again, and keep factors for the derivative."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import jacobian
from implicitkit.linear.factors.gram import Gram
from implicitkit.linear.factors.sparse_normal import NormalFactors, SparseNormal
from implicitkit.problem.robust import LOSSES, Robust
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps import normal_equations
from implicitkit.solver.steps.robust_model import next_share, root
from implicitkit.solver.verdict.along_the_ray import has_a_limit

D = torch.float64
N = 150
HEIGHTS = torch.tensor([0.01, 1.0, 2.0, 2.5], dtype=D).unsqueeze(1)


def chain(z: Tensor, x: Tensor) -> Tensor:
    return torch.cat([2.1 * z + z**3 - z.roll(1, -1) - z.roll(-1, -1) - x, 0.1 * z], -1)


def dense(z: Tensor, x: Tensor) -> Tensor:
    W = torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=D) / N**0.5
    return torch.cat([2.1 * z + z**3 - z @ W.T - x, 0.1 * z], -1)


def gradient(f: Any, heights: Tensor, solver: str) -> tuple[Any, Tensor]:
    x = (heights * torch.linspace(0.5, 1.5, N, dtype=D)).requires_grad_()
    s = ik.least_squares(f, torch.zeros_like(x), (x,), batch_dims=1, solver=solver)
    return s, torch.autograd.grad(s.value.square().sum(), x)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("f", [chain, dense], ids=["chain", "dense"])
@pytest.mark.parametrize("solver", ["levenberg_marquardt", "gauss_newton", "dogleg"])
def test_each_fit_and_its_derivative_are_those_alone(f: Any, solver: str) -> None:
    s, slope = gradient(f, HEIGHTS, solver)
    assert bool(s.converged.all()) and len(set(s.steps.tolist())) > 1
    for i in range(len(HEIGHTS)):
        alone, of_alone = gradient(f, HEIGHTS[i : i + 1], solver)
        torch.testing.assert_close(s.value[i : i + 1], alone.value, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(slope[i : i + 1], of_alone, rtol=1e-6, atol=1e-9)


def test_a_fit_at_rest_is_not_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    """One factorisation for each sample that a trial step is asked of; the derivative has factors of all of them."""
    asked, made, left = [0], [0], list[Any]()
    solve, factor = SparseNormal.solve, Gram.factor

    def counting(self: SparseNormal, mu: Tensor, g: Tensor, which: Tensor) -> Tensor:
        asked[0] += int(which.sum())
        found = solve(self, mu, g, which)
        assert not bool(found[~which].any())
        left.append(self.factors)
        return found

    monkeypatch.setattr(SparseNormal, "solve", counting)
    monkeypatch.setattr(Gram, "factor", lambda *given: (made.__setitem__(0, made[0] + 1), factor(*given))[1])
    s, _ = gradient(chain, HEIGHTS, "levenberg_marquardt")
    assert bool(s.converged.all()) and all(isinstance(factors, NormalFactors) for factors in left)
    assert asked[0] < len(left) * len(HEIGHTS) and made[0] == asked[0]


def test_dense_factors_of_some_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the others stand, and their steps are zero."""
    R = torch.randn(3, 40, 30, generator=torch.Generator().manual_seed(1), dtype=D)
    g, mu, rows = R.sum(1), torch.ones(3, dtype=D), []
    cholesky = normal_equations.cholesky_batched
    monkeypatch.setattr(normal_equations, "cholesky_batched", lambda A: (rows.append(len(A)), cholesky(A))[1])
    model, which = normal_equations._Dense(R), torch.tensor([False, True, False])
    model.solve(mu, g, ~which)
    p = model.solve(4 * mu, g, which)
    assert rows == [3, 1] and not bool(p[~which].any())
    A = R.mT @ R + torch.diag_embed(torch.tensor([1.0, 4.0, 1.0], dtype=D)[:, None].expand(3, 30))
    torch.testing.assert_close(p[1], -torch.linalg.solve(A[1], g[1]), rtol=1e-9, atol=0)
    torch.testing.assert_close(model.factors.solve(g), torch.linalg.solve(A, g), rtol=1e-9, atol=0)


def test_sparse_factors_of_a_sample_at_rest() -> None:
    """They are those of the point before, in its units, whatever is done to the others."""
    x = HEIGHTS * torch.linspace(0.5, 1.5, N, dtype=D)
    problem = ik.LeastSquares(chain)
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def watch(f: Evaluations, z: Tensor, free: Tensor | None = None, **options: Any) -> Any:
        found = f.residuals_sparse(z)
        seen.append((found, z, f.active))
        return plain(f, z, free, **options)

    plain = normal_equations.normal_equations
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("implicitkit.solver.least_squares.levenberg_marquardt.normal_equations", watch)
        ik.solve(problem, torch.zeros_like(x), (x,), batch_dims=1, solver="levenberg_marquardt")
    (found, z, _), scale = seen[1], torch.full_like(x, 3.0)
    first = SparseNormal(*found, z)
    first.scale(2 * scale)
    first.solve(torch.ones(4, dtype=D), z)
    before, rest = first.factors, torch.tensor([True, False, False, True])
    assert before is not None
    b = torch.sin(torch.arange(4 * N, dtype=D)).view(4, N)
    kept = before.solve(b)
    model = SparseNormal(*seen[2][0], seen[2][1], before, rest)
    assert not bool(model.columns[rest].any()) and bool((model.columns[~rest] > 0).all())
    assert not bool(model.times(b)[rest].any()) and bool(model.times(b)[~rest].any(1).all())
    model.scale(scale)
    assert model.largest()[rest].tolist() == [0.0, 0.0]
    p = model.solve(torch.full((4,), 0.5, dtype=D), b)
    assert not bool(p[rest].any()) and model.factors is not None
    solved = model.factors.solve(b)
    torch.testing.assert_close(solved[rest], kept[rest], rtol=1e-12, atol=0)
    torch.testing.assert_close(solved[~rest], -p[~rest], rtol=1e-12, atol=0)
    assert np.array_equal(model.D[1], scale[1].numpy())
    some = b * ~rest.unsqueeze(1)
    torch.testing.assert_close(model.factors.solve(some), solved * ~rest.unsqueeze(1), rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Fits whose residuals tend to a limit as the unknowns go to infinity have diverged there, however small the gradient.
_S = torch.linspace(0.5, 4, 9)
_DATA = 3 * _S / (0.7 + _S) + 0.02 * torch.cos(7 * _S)


def _saturation(z: Tensor) -> Tensor:
    s = _S.to(z)
    return z[..., :1] * s / (z[..., 1:] + s) - _DATA.to(z)


def _line(z: Tensor) -> Tensor:
    """What ``_saturation`` fits perfectly, at infinity only."""
    s = _S.to(z)
    return z[..., :1] * s / (z[..., 1:] + s) - 2 * s


def _ratio(z: Tensor) -> Tensor:
    return (z[..., :1] / z[..., 1:] - 2) * _S.to(z) - _DATA.to(z)


def _plateau(z: Tensor) -> Tensor:
    return torch.cat([z[..., :1], torch.relu(1 - z[..., 1:]) + 1], -1)


# a fit, where it is asked, and whether it has a limit out there
_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float], bool]] = {
    "a straight line in the end": (_saturation, (-1.68e7, -2.03e7), True),
    "from the other side": (_saturation, (9.04e12, 1.0925e13), True),
    "a perfect one in the end": (_line, (9.3e8, 4.65e8), True),
    "the fit itself": (_saturation, (3.0, 0.7), False),
    "in units of a millionth": (lambda z: _saturation(1e-6 * z), (3e6, 7e5), False),
    "a worse one further out": (_saturation, (9.04e2, 1.0925e3), False),
    "of a ratio only": (_ratio, (2.98e6, 1.05e6), False),
    "at a plateau": (_plateau, (0.0, 20.0), False),
    "refused further out": (lambda z: _saturation(z) + 0 * torch.sqrt(1e10 - z[..., :1]), (9e9, 1.1e10), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", _ROWS)
def test_what_a_ray_says(name: str, dtype: torch.dtype) -> None:
    """Beside a sample that is not asked."""
    function, at, expected = _ROWS[name]
    z = torch.tensor([at, at], dtype=dtype)
    f = SimpleNamespace(
        problem=SimpleNamespace(flat_residuals=lambda kernel, z: kernel(z)), kernel=function, eps=torch.finfo(dtype).eps
    )
    found = has_a_limit(f, jacobian(function, z), function(z), z, torch.tensor([True, False]))
    assert found.tolist() == [expected, False]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "start", "converged"),
    [(_saturation, (-1.68e7, -2.03e7), False), (_saturation, (9.04e5, 1.0925e6), False), (_line, (2e8, 1e8), False),
     (_saturation, (2.0, 1.0), True), (_ratio, (3e6, 1e6), True)],
)  # fmt: skip
@pytest.mark.parametrize("solver", ["auto", "gauss_newton", "levenberg_marquardt"])
def test_what_is_no_fit_is_not_claimed(
    function: Callable[[Tensor], Tensor], start: tuple[float, float], converged: bool, solver: str
) -> None:
    z0 = torch.tensor([start])
    found = ik.least_squares(function, z0, batch_dims=1, solver=solver, on_failure="ignore")
    if not converged and float(found.value.abs().max()) > 10:  # else it has come back to the fit itself
        assert ik.Status(int(found.status)).name in ("DIVERGED", "SADDLE"), found
    else:
        assert bool(found.converged), found


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("solver", "unknown", "data", "dtype"),
    [
        ("auto", 1e-6, 1.0, torch.float64),
        *(
            ("levenberg_marquardt", unknown, data, dtype)
            for unknown in (1e-9, 1e-6, 1.0, 1e6)
            for data in (1e-6, 1.0, 1e6)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
)
def test_a_straight_line_is_no_saturation_in_any_units(
    solver: str, unknown: float, data: float, dtype: torch.dtype
) -> None:
    """``z_1 s / (z_2 + s)`` fitted to a line: counted in units so small that no ``z`` is large, it runs away as well."""
    s = torch.linspace(0.1, 3, 40, dtype=dtype)

    def residuals(z):
        return data * (z[0] / unknown * s / (z[1] / unknown + s) - 2 * s)

    start = torch.full((2,), unknown, dtype=dtype)
    found = ik.least_squares(residuals, start, solver=solver, on_failure="ignore")
    assert not bool(found.converged), found


# ---------------------------------------------------------------------------------------------------------------------
# Robust losses with outliers of any size, in small and large fits: the model of the loss, steps, and SciPy's answers.
F64 = torch.float64
NAMES = ("huber", "soft_l1", "cauchy", "arctan")


@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("start", [(1e6, 4e4), (4e6, 4.9e4)])
def test_a_fit_on_its_way_along_a_valley_is_not_at_rest(start: tuple[float, float], dtype: torch.dtype) -> None:
    """Arrhenius' law in SI units: ``J'r`` is below ``atol``, by the units of the unknowns, where Gauss and Newton's step is
    to leave 3 % of the residuals.  (Single precision ended there, as run away.)"""
    T = torch.linspace(300, 400, 12, dtype=dtype)
    law = lambda p: p[0] * torch.exp(-p[1] / (8.314 * T))  # noqa: E731
    truth = torch.tensor([5e6, 5e4], dtype=dtype)
    s = ik.least_squares(lambda p: law(truth) - law(p), torch.tensor(start, dtype=dtype))
    torch.testing.assert_close(s.value, truth, rtol=1e-4, atol=0.0)
    assert s.evaluations < 80, s


@pytest.mark.parametrize("share", [1.0, 0.1, 1e-4, 0.0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("loss", NAMES)
def test_the_curvature_is_the_larger_of_two(loss: str, scale: float, share: float) -> None:
    """``max(rho' + 2 s rho'', share rho')``, by torch, over the square of the derivative of ``r w^1/2``; in the end the
    first of the two."""
    r = torch.tensor([1e-9, 1e-3, 0.03, 0.2, 0.55, 0.9, 1.2, 3.0, 40.0], dtype=F64) * scale
    leaf = (r / scale).square().requires_grad_()
    rho = leaf * LOSSES[loss](leaf)
    (first,) = torch.autograd.grad(rho.sum(), leaf, create_graph=True)
    second = torch.autograd.grad(first.sum(), leaf)[0] if first.requires_grad else torch.zeros_like(r)
    robust, x = Robust(lambda z: z, loss, scale), r.clone().requires_grad_()
    (slope,) = torch.autograd.grad(robust(x).sum(), x)
    k = robust.curvature(robust(r).unsqueeze(0), torch.tensor([share], dtype=F64))
    assert k is not None
    s, d = leaf.detach(), first.detach()
    exact = d + 2 * s * second
    want = torch.maximum(exact, share * d) if share else exact
    torch.testing.assert_close(k[0] * slope.square(), want, rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("loss", NAMES)
def test_the_curvature_of_outliers_is_a_positive_number(loss: str, dtype: torch.dtype) -> None:
    robust = Robust(lambda z: z, loss, 1e-3)
    r = robust(torch.tensor([[0.0, 1e-30, 1.0, 1e4, 1e12]], dtype=dtype))
    k = robust.curvature(r, torch.tensor([1e-4], dtype=dtype))
    assert k is not None and bool(torch.isfinite(k).all()) and bool((k > 0).all()) and float(k[0, 0]) == 1


def test_a_loss_of_somebody_else_or_of_several_scales_has_no_model() -> None:
    r, share = torch.ones(1, 3, dtype=F64), torch.ones(1, dtype=F64)
    assert Robust(lambda z: z, lambda s: s / (1 + s), 1.0).curvature(r, share) is None
    assert Robust(lambda z: z, "huber", torch.ones(3, dtype=F64)).curvature(r, share) is None
    one = torch.full((1,), 0.5, dtype=F64)
    several, number = (Robust(lambda z: z, "cauchy", scale).curvature(r, share) for scale in (one, 0.5))
    torch.testing.assert_close(several, number)


def test_the_root_of_a_model_with_negative_curvature() -> None:
    """Of samples in which it is definite, and no others."""
    R = torch.linspace(1, 2, 24, dtype=F64).cos().view(2, 4, 3).contiguous()
    R = R + torch.eye(4, 3, dtype=F64)
    k, g = torch.tensor([[1.0, 2.0, 3.0, -0.1], [1.0, -2.0, 3.0, 1.0]], dtype=F64), torch.ones(2, 3, dtype=F64)
    S, s, ok = root(R, k, g)
    assert ok.tolist() == [True, False] and S.shape == R.shape and s.shape == k.shape
    torch.testing.assert_close((S.mT @ S)[0], R[0].T @ (k[0].unsqueeze(1) * R[0]))
    torch.testing.assert_close(S[0].T @ s[0], g[0])
    assert not bool(root(R[:, :2], k[:, :2], g)[2].any())


def test_the_share_follows_the_promise() -> None:
    share = torch.tensor([1.0, 1.0, 0.01, 0.01, 0.01, 1e-4, 0.01])
    ratio = torch.tensor([0.9, 0.5, 0.9, 0.2, 0.9, 0.9, 0.5])
    at_once = torch.tensor([True, True, True, True, False, True, True])
    expected = torch.tensor([0.1, 1.0, 1e-3, 0.1, 0.1, 1e-4, 0.01])
    torch.testing.assert_close(next_share(share, ratio, at_once), expected)


# ------------------------------------------------------------------------------------------------------------- whole fits
def decay(outliers: float) -> tuple[Any, Tensor, Tensor]:
    """Three unknowns, sixty observations, eight of them wrong."""
    rng = np.random.default_rng(3)
    t = torch.linspace(0, 4, 60, dtype=F64)
    y = 2 * torch.exp(-0.9 * t) + 0.5 + 0.02 * torch.from_numpy(rng.standard_normal(60))
    y[torch.from_numpy(rng.permutation(60)[:8])] += outliers * torch.from_numpy(1 + rng.random(8))
    return lambda p, y: p[0] * torch.exp(-p[1] * t) + p[2] - y, torch.tensor([1.0, 0.5, 0.2], dtype=F64), y


def walk(outliers: float) -> tuple[Any, Tensor, Tensor]:
    """A path of 70 points in the plane, seen from three beacons and from each other; one in ten distances is wrong."""
    rng = np.random.default_rng(5)
    angle = np.linspace(0, 5, 70)
    true = torch.from_numpy(np.stack([3 * np.cos(angle), 2 * np.sin(angle)], 1))
    beacons = torch.tensor([[6.0, 5.0], [-6.0, 4.0], [0.0, -7.0]], dtype=F64)

    def distances(z: Tensor) -> Tensor:
        p = z.view(-1, 2)
        return torch.cat([(p[:, None] - beacons).norm(dim=2).reshape(-1), (p[1:] - p[:-1]).reshape(-1)])

    y = distances(true.reshape(-1))
    y = y + 0.02 * torch.from_numpy(rng.standard_normal(len(y)))
    wrong = torch.from_numpy(rng.permutation(210)[:21])
    y[wrong] += outliers * torch.from_numpy(rng.standard_normal(21))
    start = true.reshape(-1) + 0.3 * torch.from_numpy(rng.standard_normal(140))
    return lambda z, y: distances(z) - y, start, y


FITS = {"small": decay, "large": walk}
# of a path of 120 points Gauss and Newton's model of the losses took 26, 45, 31 and 526, and this one 6, 6, 8 and 36
STEPS = {"huber": 20, "soft_l1": 20, "cauchy": 40, "arctan": 60}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("outliers", [1.0, 1e4])
@pytest.mark.parametrize("loss", NAMES)
@pytest.mark.parametrize("size", FITS)
@pytest.mark.parametrize("bounded", [False, True])
def test_outliers_of_any_size(size: str, loss: str, outliers: float, bounded: bool) -> None:
    f, z0, y = FITS[size](outliers)
    scale, bounds = 0.05, (torch.full_like(z0, -20), torch.full_like(z0, 20)) if bounded else None
    s = ik.least_squares(f, z0, (y,), loss=loss, f_scale=scale, bounds=bounds)
    robust = Robust(f, loss, scale)
    cost = lambda z: float(0.5 * robust(z, y).square().sum())  # noqa: E731
    jac = torch.func.jacrev(lambda z: f(z, y))
    found = scipy.optimize.least_squares(
        lambda z: f(torch.from_numpy(z), y).numpy(), z0.numpy(), jac=lambda z: jac(torch.from_numpy(z)).numpy(),
        loss=loss, f_scale=scale, x_scale="jac", max_nfev=60,
    )  # fmt: skip
    assert cost(s.value) <= cost(torch.from_numpy(found.x)) * (1 + 1e-7), (cost(s.value), found.cost)
    assert int(s.steps) <= STEPS[loss], (s, found.nfev)


def test_the_verdict_on_a_fit_that_is_determined_asks_little() -> None:
    """The last graph of the residuals, and their Jacobian, serve it: 12 evaluations before."""
    t = torch.linspace(0, 4, 20, dtype=D)
    noise = 0.02 * torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=D)
    found = ik.least_squares(lambda p: p[0] * t / (p[1] + t) - (3 * t / (1 + t) + noise), torch.ones(2, dtype=D))
    assert bool(found.converged)
    assert found.evaluations <= 11
