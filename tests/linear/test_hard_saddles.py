"""Conditions of optimality of control problems: most rows of ``H`` are zero, and the pivots of ``K`` are tiny."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions.sparse_saddle import SparseSaddle

D = torch.float64


def heat(points: int, times: int, price: float) -> tuple[sp.csc_matrix, int]:
    """``K`` of heat in a rod, controlled at both ends, that is to have a temperature at the last time; how many unknowns.

    ``y' = y_xx``, implicit Euler; ``h |y(1) - d|^2 / 2 + price dt |q|^2 / 2``.
    """
    h, dt = 1 / (points + 1), 1 / times
    T = sp.diags([1.0, -2.0, 1.0], [-1, 0, 1], shape=(points, points)) * dt / h**2
    before = sp.diags([1.0], [-1], shape=(times, times))
    ends = sp.csr_matrix((np.full(2, -dt / h**2), ([0, points - 1], [0, 1])), shape=(points, 2))
    states = sp.kron(sp.eye(times), sp.eye(points) - T) - sp.kron(before, sp.eye(points))
    C = sp.hstack([states, sp.kron(sp.eye(times), ends)])
    n = points * times
    H = np.zeros(n + 2 * times)
    H[n - points : n], H[n:] = h, price * dt
    return with_diagonal(sp.block_array([[sp.diags(H), C.T], [C, None]])), len(H)


def with_diagonal(K: sp.spmatrix) -> sp.csc_matrix:
    """The same with every entry of the diagonal in its pattern."""
    K = sp.coo_matrix(K)
    i = np.arange(K.shape[0])
    rows, columns = np.concatenate([K.row, i]), np.concatenate([K.col, i])
    return sp.csc_matrix((np.concatenate([K.data, np.zeros(len(i))]), (rows, columns)), shape=K.shape)


PRICES = {"dear": 1e-1, "cheap": 1e-3, "all but free": 1e-5}


@pytest.mark.parametrize("price", PRICES.values(), ids=PRICES)
def test_states_without_curvature(price: float) -> None:
    """The signs are those of ``K``, though its pivots are as small as what regularises them; so are solutions, though
    refinement with these factors does not get there."""
    K, n = heat(40, 40, price)
    saddle = SparseSaddle(K, n)
    assert saddle.negative == K.shape[0] - n
    want = np.random.default_rng(0).standard_normal(K.shape[0])
    x, error = saddle.solve(K @ want)
    assert error < 1e-12
    assert np.abs(K @ (x - want)).max() < 1e-12 * (abs(K) @ np.abs(want)).max()
    assert saddle.regular
    once = saddle.once(K @ want)
    once = once + saddle.once(K @ (want - once))
    assert np.abs(K @ (once - want)).max() < 1e-11 * (abs(K) @ np.abs(want)).max()


def test_curvature_that_is_negative_is_seen() -> None:
    """A control that pays: one direction along the constraints goes down, and it is no rounding."""
    K, n = heat(40, 40, 1e-3)
    K = K.tolil()
    K[n - 1, n - 1] = -1.0
    assert SparseSaddle(with_diagonal(K), n).negative > K.shape[0] - n


def test_constraints_that_depend_are_singular() -> None:
    """A row that is the sum of others, but for rounding: there is no inverse, whatever refinement and other pivots say."""
    K, n = heat(20, 20, 1e-3)
    H, C = K[:n, :n], sp.vstack([K[n:, :n], sp.csc_matrix(K[n:, :n].sum(0) / 7)])
    saddle = SparseSaddle(with_diagonal(sp.block_array([[H, C.T], [C, None]])), n)
    rhs = np.concatenate([np.ones(n), np.zeros(C.shape[0])])
    x, error = saddle.solve(rhs)
    assert error < 1e-6
    assert np.abs(x).max() < 1e6
    assert not saddle.regular
    rhs[-1] = 1.0  # and the others ask for zero
    x, _ = SparseSaddle(saddle.K, n).solve(rhs)
    assert np.abs(x).max() < 1e13
    assert not saddle.hard


def test_what_only_rounding_keeps_from_being_singular_is_singular() -> None:
    """Two unknowns beside the rod, held by two rows that are one but for 1e-14, of which the right-hand side asks nothing:
    the solution is right, by pivots of any row, and there is no inverse."""
    K, n = heat(40, 40, 1e-5)
    H, C = (
        sp.block_diag([K[:n, :n], sp.eye(2)]),
        sp.block_diag([K[n:, :n], sp.csc_matrix([[1.0, 1.0], [1.0, 1 + 1e-14]])]),
    )
    K = with_diagonal(sp.block_array([[H, C.T], [C, None]]))
    saddle, rhs = SparseSaddle(K, n + 2), np.zeros(K.shape[0])
    rhs[:n] = np.random.default_rng(0).standard_normal(n)
    x, error = saddle.solve(rhs)
    assert error < 1e-12
    assert np.abs(K @ x - rhs).max() < 1e-12 * (abs(K) @ np.abs(x)).max()
    assert saddle.hard
    assert not saddle.regular


def test_what_is_in_the_null_space_is_left_alone() -> None:
    """Flow in a network: the potentials are given but for one number, and demands whose sum is not zero have no flow.
    Pivots of any row would find none either, and are not tried; those that have one are met without them."""
    rng = np.random.default_rng(0)
    nodes, edges = 60, 200
    tail, head = rng.integers(0, nodes, edges), rng.integers(0, nodes, edges)
    ways = np.arange(edges)
    C = sp.coo_matrix(
        (np.r_[np.ones(edges), -np.ones(edges)], (np.r_[tail, head], np.r_[ways, ways])), shape=(nodes, edges)
    )
    K = with_diagonal(sp.block_array([[sp.diags(rng.uniform(0.5, 2, edges)), C.T], [C, None]]))
    saddle = SparseSaddle(K, edges)
    rhs = np.r_[np.zeros(edges), rng.standard_normal(nodes)]
    saddle.solve(rhs)
    assert not saddle.hard and "_pivoted" not in vars(saddle)
    rhs[edges:] -= rhs[edges:].mean()
    x, error = saddle.solve(rhs)
    assert error < 1e-12
    assert np.abs(C @ x[:edges] - rhs[edges:]).max() < 1e-12
    assert "_pivoted" not in vars(saddle)


@pytest.mark.parametrize("size", [(20, 40), (50, 40)], ids=str)
def test_a_heated_rod_by_defaults(size: tuple[int, int]) -> None:
    """A quadratic program with equations only is one step, of any size and condition; so is its derivative."""
    points, times = size
    h, dt, price = 1 / (points + 1), 1 / times, 1e-3

    def objective(z: dict[str, Tensor], d: Tensor) -> Tensor:
        return 0.5 * h * (z["y"][-1] - d).square().sum() + 0.5 * price * dt * z["q"].square().sum()

    def heated(z: dict[str, Tensor], d: Tensor) -> Tensor:
        y, q = z["y"], z["q"]
        before = torch.cat([torch.zeros(1, points, dtype=D), y[:-1]])
        across = torch.cat([q[:, :1], y, q[:, 1:]], 1)
        return y - before - dt / h**2 * (across[:, :-2] - 2 * y + across[:, 2:])

    d = torch.sin(3 * torch.linspace(h, 1 - h, points, dtype=D)).requires_grad_()
    start = {"y": torch.zeros(times, points, dtype=D), "q": torch.zeros(times, 2, dtype=D)}
    solution = ik.argmin(objective, start, d, constraints=ik.Equality(heated))
    assert (
        solution.steps <= 2
    )  # the second, and questions about rounding, where the first leaves just more than is asked
    assert solution.evaluations <= 60
    (slope,) = torch.autograd.grad(solution.value["q"].sum(), d)
    K, n = heat(points, times, price)
    lu, m = sp.linalg.splu(K), points * times
    rhs = np.zeros(K.shape[0])
    rhs[m - points : m] = h * d.detach().numpy()
    want = lu.solve(rhs)
    want += lu.solve(rhs - K @ want)
    pulled = np.zeros(K.shape[0])
    pulled[m:n] = 1.0
    back = lu.solve(pulled)
    back += lu.solve(pulled - K @ back)
    np.testing.assert_allclose(solution.value["q"].detach().numpy().ravel(), want[m:n], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope.numpy(), h * back[m - points : m], rtol=1e-9, atol=1e-9)
