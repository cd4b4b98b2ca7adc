"""What a row of the fuzzer is: a problem, and its solution in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

from .states import STATES, in_structure

__all__ = ["Row", "Setting", "eliminate", "matrix", "problem", "times"]

LINEAR = ("auto", "lu", "gmres", "bicgstab", "lsmr", "broyden")
SYMMETRIC = (*LINEAR, "cg")
SERIES = (*LINEAR, "neumann")


@dataclass(frozen=True)
class Setting:
    """What a row needs to pose its problem once.

    Attributes:
        x, w: the tensors that derivatives are taken in, of shape ``batch + (n,)`` or such as broadcast to it.
        hold: ``hold(kernel, **tensors) -> (function, args)``: the kernel as the user might have written it.
        options: keywords for the solve. start: ``start(number) -> z0``. batched: ``batch_dims`` is 1. state: the structure
            of the unknowns, of :data:`~states.STATES`.
    """

    x: Tensor
    w: Tensor
    hold: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
    options: Mapping[str, Any]
    start: Callable[[float], Tensor]
    batched: bool = False
    state: str = ""

    def held(self, kernel: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.hold(kernel, x=self.x, w=self.w)


@dataclass(frozen=True)
class Row:
    """A problem with parameters ``x`` and ``w`` and a solution known in closed form.

    Attributes:
        run: poses and solves it; returns the solution as one tensor. closed: ``(x, w) ->`` the same tensor.
        solvers, rules, linear, dtypes, sizes: what may be drawn.
        held: which variables holders may hold; the problem itself gets the others, as bounds, weights, parts of a program.
        batch: has a batched form. scalar_w: ``w`` may be a number. in_dims: the row takes ``in_dims``. states: the unknowns
            may stand in a structure. starts: has a start to which the derivative is zero. callback: takes one.
        prepare: called with the number of unknowns before any transform is entered. weight: how often the row is drawn.
    """

    run: Callable[[Setting], Tensor]
    closed: Callable[[Tensor, Tensor], Tensor]
    solvers: tuple[str, ...] = ("auto",)
    rules: tuple[str, ...] = ("implicit",)
    linear: tuple[str, ...] = LINEAR
    held: tuple[str, ...] = ("x", "w")
    batch: bool = True
    scalar_w: bool = True
    dtypes: tuple[str, ...] = ("float64", "float32")
    sizes: tuple[int, ...] = (1, 2, 3)
    in_dims: bool = True
    states: bool = False
    starts: bool = True
    callback: bool = True
    prepare: Callable[[int], Any] | None = None
    weight: float = 1.0


def problem(
    solve: Callable[..., ik.Solution], kernel: Callable[..., Any], start: float = 1.0, **extra: Any
) -> Callable[[Setting], Tensor]:
    """``run`` of a row that is one call of a verb, with the unknowns in any structure."""

    def run(s: Setting) -> Tensor:
        function, args = s.held(kernel)
        function = in_structure(function, s.state, solve in (ik.root, ik.fixed_point, ik.steady_state))
        split, join = STATES[s.state]
        return join(solve(function, split(s.start(start)), args, **extra, **s.options).value)

    return run


def matrix(n: int, like: Tensor) -> Tensor:
    """A fixed, well-conditioned, not symmetric matrix, diagonally dominant: ``2 I +`` small."""
    i = torch.arange(n, dtype=torch.float64)
    off = torch.sin(1.0 + 2.0 * i[:, None] + 3.0 * i[None, :]) * 0.4
    return (2 * torch.eye(n, dtype=torch.float64) + off).to(like.dtype)


def times(A: Tensor, v: Tensor) -> Tensor:
    """``A v`` for batches of vectors."""
    return (A @ v.unsqueeze(-1)).squeeze(-1)


def eliminate(A: Tensor, b: Tensor) -> Tensor:
    """``A^{-1} b`` by elimination without pivoting, in elementary operations.

    Not ``torch.linalg.solve``: its reverse-over-forward derivative is silently zero (torch 2.13).
    """
    n = A.shape[-1]
    rows = [torch.cat([A[..., i, :], b[..., i : i + 1].expand(A[..., i, :1].shape)], -1) for i in range(n)]
    for i in range(n):
        rows[i] = rows[i] / rows[i][..., i : i + 1]
        rows = [row if j == i else row - row[..., i : i + 1] * rows[i] for j, row in enumerate(rows)]
    return torch.stack([row[..., n] for row in rows], -1)
