"""Derivatives of stiff trajectories of many unknowns, along what moves and what is at rest beside it: right, or told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.problem.trajectory import steps_along_variations
from implicitkit.problem.trajectory.integrators import auto

DOUBLE = {"dtype": torch.float64}


def springs(n: int, low: float, high: float) -> np.ndarray:
    """``u' = v, v' = -w^2 u`` of ``n`` frequencies."""
    w = np.linspace(low, high, n)
    return np.block([[np.zeros((n, n)), np.eye(n)], [-np.diag(w**2), np.zeros((n, n))]])


def heat(n: int) -> np.ndarray:
    return (np.diag(np.full(n, -2.0)) + np.diag(np.ones(n - 1), 1) + np.diag(np.ones(n - 1), -1)) * (n + 1.0) ** 2


def network(n: int) -> np.ndarray:
    """Dense, with eigenvalues from -1 to -1e6."""
    Q = np.linalg.qr(np.random.default_rng(3).normal(size=(n, n)))[0]
    return (Q * -np.logspace(0, 6, n)) @ Q.T


#: what moves, and what is at rest beside it, as matrices; and the end
LINEAR: dict[str, tuple[np.ndarray, np.ndarray, float]] = {
    "heat beside springs": (heat(60), springs(30, 5.0, 40.0), 1.0),
    "heat beside a growth that turns": (heat(60), springs(30, 5.0, 40.0) + np.eye(60), 1.0),
    "a dense network beside springs": (network(40), springs(15, 5.0, 40.0), 1.0),
    "heat beside a long transport": (heat(80), -20.0 * (np.eye(80) - np.eye(80, k=-1)), 1.0),
}


def one(name: str) -> tuple[Callable[..., Tensor], Tensor, np.ndarray, np.ndarray, float]:
    moving, resting, end = LINEAR[name]
    m, A = len(moving), scipy.linalg.block_diag(moving, resting)
    matrices = [torch.from_numpy(M.T.copy()) for M in (moving, resting)]
    start = np.concatenate((np.sin(np.pi * np.arange(1, m + 1) / (m + 1)), np.zeros(len(resting))))
    force = np.concatenate((np.zeros(m), np.ones(len(resting))))
    diagonals = [(k, torch.from_numpy(np.diagonal(A, k).copy())) for k in range(-len(A) + 1, len(A)) if np.diagonal(A, k).any()]
    pushed = torch.from_numpy(force)

    def rhs(t: Tensor, y: Tensor, p: Tensor) -> Tensor:
        if "dense" in name:
            return torch.cat((y[..., :m] @ matrices[0], y[..., m:] @ matrices[1]), -1) + p * pushed
        pad = torch.nn.functional.pad
        return sum(pad(d * y[..., max(k, 0) : len(A) + min(k, 0)], (max(-k, 0), max(k, 0))) for k, d in diagonals) + p * pushed

    return rhs, torch.from_numpy(start), A, force, end


def wanted(A: np.ndarray, force: np.ndarray, end: float) -> tuple[np.ndarray, np.ndarray]:
    """``dy(T)/dy0``, and ``dy(T)/dp``."""
    whole = scipy.linalg.expm(end * np.block([[A, force[:, None]], [np.zeros((1, len(A) + 1))]]))
    return whole[:-1, :-1], whole[:-1, -1]


def off(found: Any, true: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found) - true) / np.linalg.norm(true))


@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_beside_what_is_at_rest(name: str) -> None:
    """In the start, a parameter and the end time; by the steps of what moves they were off by up to themselves."""
    rhs, start, A, force, end = one(name)
    y0, p, t = start.requires_grad_(), torch.zeros((), **DOUBLE, requires_grad=True), torch.tensor([0.0, end], **DOUBLE)
    t.requires_grad_()
    last = ik.solve(ik.InitialValue(rhs, t), y0, (p,)).value[-1]
    w = np.random.default_rng(1).normal(size=len(A)) * (force + 0.1)
    slopes = torch.autograd.grad(last @ torch.from_numpy(w), (y0, p, t))
    in_start, in_p = wanted(A, force, end)
    assert off(slopes[0], w @ in_start) < 1e-3
    assert off(slopes[1], w @ in_p) < 1e-3
    assert off(slopes[2][1], w @ A @ in_start @ start.detach().numpy()) < 1e-3
