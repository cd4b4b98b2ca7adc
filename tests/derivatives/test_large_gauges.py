"""Gauges of sparse systems, too large for singular values: solved, and differentiated in reverse mode, by sparse factors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import DegenerateWarning
from implicitkit.linear.conditions.least_norm import LeastNorm

SIDE = 34  # 1,156 nodes: more than singular values are taken of
NODES = SIDE * SIDE
DRAWN = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAWN, dtype=torch.float64)


SOURCE, START = drawn(NODES), drawn(400, 3)
WHEN = torch.linspace(0, 12, 400, dtype=torch.float64)
PATH = torch.stack([WHEN * WHEN.cos(), WHEN * WHEN.sin(), WHEN], 1)
ENDS = torch.cat([torch.arange(399), torch.arange(380)]), torch.cat([torch.arange(1, 400), torch.arange(20, 400)])
USED = (torch.arange(NODES) % 7 != 0).double()
GRID = torch.stack(torch.meshgrid(*[torch.arange(24, dtype=torch.float64)] * 2, indexing="ij"), -1)


def flow(p: Tensor) -> Tensor:
    """Convection and diffusion on a torus: a concentration up to a constant."""
    source = (p * SOURCE).view(SIDE, SIDE)
    source = source - source.mean()

    def equations(u: Tensor) -> Tensor:
        around = sum(u.roll(by, axis) for by in (1, -1) for axis in (0, 1))
        return 4 * u - around + 3 * (u - u.roll(1, 1)) - source

    u = ik.root(equations, torch.zeros_like(source)).value
    return (u - u.mean()).square().sum()


def unused(p: Tensor) -> Tensor:
    """Every seventh unknown is in no equation, and every seventh equation says nothing."""

    def equations(u: Tensor) -> Tensor:
        v = torch.nn.functional.pad(USED * u, (1, 1))
        return USED * (3 * u + u**3 - v[2:] - v[:-2] - p * SOURCE)

    return (USED * ik.root(equations, torch.zeros_like(SOURCE)).value ** 2).sum()


def relative(a: Tensor, b: Tensor) -> Tensor:
    """A pose as another one sees it."""
    c, s, d = a[:, 2].cos(), a[:, 2].sin(), b - a
    return torch.stack([c * d[:, 0] + s * d[:, 1], c * d[:, 1] - s * d[:, 0], d[:, 2]], 1)


def poses(p: Tensor, **options: float) -> Tensor:
    """A pose graph without an anchor."""
    seen = relative(PATH[ENDS[0]], PATH[ENDS[1]]) * (1 + 0.01 * p)
    x = ik.least_squares(lambda x: relative(x[ENDS[0]], x[ENDS[1]]) - seen, PATH + 0.05 * START, **options).value
    return (x[0, :2] - x[-1, :2]).square().sum()


def truss(p: Tensor) -> Tensor:
    """Springs that nothing holds: a shape up to a motion of the plane."""
    lengths = 1 + 0.05 * p * SOURCE[: 24 * 24].view(24, 24)

    def energy(x: Tensor) -> Tensor:
        length = lambda d: d.square().sum(-1).sqrt()  # noqa: E731
        down, right, across = x[1:] - x[:-1], x[:, 1:] - x[:, :-1], x[1:, 1:] - x[:-1, :-1]
        return (
            (length(down) - lengths[1:]).square().sum()
            + (length(right) - lengths[:, 1:]).square().sum()
            + (length(across) - 2**0.5 * lengths[1:, 1:]).square().sum()
        )

    x = ik.argmin(energy, GRID).value
    return (x[0, 0] - x[-1, -1]).square().sum()


GAUGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a flow on a torus": flow,
    "unknowns that are not used": unused,
    "poses": poses,
    "a truss": truss,
}


@pytest.mark.parametrize("row", GAUGES)
def test_what_a_gauge_leaves_alone_has_a_derivative(row: str) -> None:
    f, p, h = GAUGES[row], torch.tensor(1.3, dtype=torch.float64, requires_grad=True), 1e-4
    with pytest.warns(DegenerateWarning, match="a gauge"):
        (found,) = torch.autograd.grad(f(p), p)
    with torch.no_grad():
        wanted = (f(p + h) - f(p - h)) / (2 * h)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("row", ["a flow on a torus", "a truss"])
def test_what_a_gauge_leaves_alone_has_a_second_derivative(row: str) -> None:
    f, p, h = GAUGES[row], torch.tensor(1.3, dtype=torch.float64), 1e-4
    with pytest.warns(DegenerateWarning, match="a gauge"):
        found = torch.func.hessian(f)(p)
        wanted = (torch.func.grad(f)(p + h) - torch.func.grad(f)(p - h)) / (2 * h)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def test_a_null_space_is_known_as_well_as_the_solution() -> None:
    p = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    with pytest.warns(DegenerateWarning, match="a gauge"):
        (found,) = torch.autograd.grad(poses(p, rtol=1e-3), p)
        (wanted,) = torch.autograd.grad(poses(p), p)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd])
def test_what_changes_along_a_gauge_is_refused_and_all_in_forward_mode(derivative: Callable[..., Callable]) -> None:
    forward = derivative is torch.func.jacfwd

    def asked(p: Tensor) -> Tensor:
        source = p * (SOURCE - SOURCE.mean())
        u = ik.root(lambda u: 2 * u - u.roll(1) - u.roll(-1) - source, torch.zeros_like(SOURCE)).value
        return u[0] - u[1] * forward

    with pytest.raises(ik.ConvergenceError, match="singular"):
        derivative(asked)(torch.tensor(1.0, dtype=torch.float64))


def test_a_double_root_in_a_sparse_system_is_no_gauge() -> None:
    """``z_0^2 = p`` at ``p = 0`` beside a chain that begins at ``z_0^2``: what is asked for lies in the range of ``A^T``."""

    def equations(z: Tensor, p: Tensor) -> Tensor:
        rest = z[1:] - 0.5 * torch.cat([z[:1] ** 2, z[1:-1]])
        return torch.cat([z[:1] ** 2 - p, rest])

    p = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    z = ik.root(equations, torch.zeros(1200, dtype=torch.float64), (p,)).value
    with pytest.raises(ik.ConvergenceError, match="singular"):
        torch.autograd.grad(z[5], p)


def test_newtons_method_takes_the_step_of_least_norm() -> None:
    """A linear system with a gauge, whose Krylov spaces are long, is solved by one step or two."""
    source = (SOURCE - SOURCE.mean()).view(4, -1)[0].repeat(4)
    solution = ik.root(
        lambda u: 2 * u - u.roll(1) - u.roll(-1) - source + source.mean(), torch.zeros_like(source), solver="newton"
    )
    assert int(solution.steps) <= 3
    torch.testing.assert_close(solution.value.mean(), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_a_vector_is_split_into_null_space_and_range(scale: float) -> None:
    rng = np.random.default_rng(0)
    left, right = (sp.random(40, 30, 0.2, random_state=seed).toarray() for seed in (1, 2))
    A = scale * left @ right.T
    factors, c = LeastNorm(sp.csr_matrix(A)), rng.standard_normal(40)
    x, w = factors.split(c)
    range_of = np.linalg.pinv(A, rcond=1e-10) @ A
    np.testing.assert_allclose(x, c - range_of @ c, atol=1e-7)
    np.testing.assert_allclose(x + A.T @ w, c, atol=1e-9)
    np.testing.assert_allclose(factors.solve(A @ c), range_of @ c, atol=1e-7)


def test_no_warning_where_nothing_is_singular() -> None:
    p = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        u = ik.root(lambda u: 3 * u - u.roll(1) - u.roll(-1) - p * SOURCE, torch.zeros_like(SOURCE)).value
        torch.autograd.grad(u.square().sum(), p)
