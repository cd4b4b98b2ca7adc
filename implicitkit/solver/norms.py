"""Norms of a residual that stopping tests may use in place of the 2-norm: ``norm="max"``, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.constants import look
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.foundation.trees import Layout
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome
from implicitkit.solver.evaluations import Evaluations


def matrix_norm(norm: Any, layout: Layout) -> Callable[[Tensor], Tensor] | None:
    """``norm`` as a function of packed rows, ``(batch, n) -> (batch,)``; ``None``: the 2-norm.

    Args:
        norm: ``"l2"``; ``"max"``, the largest absolute value (of a complex number, of its parts); or a function of a pytree
            like the state, with its batch dimensions, that returns one number a sample. layout: of the state.

    Raises:
        TypeError, ValueError: it is none of these, or the function returns something else (when it is called).
    """
    if norm is None or (isinstance(norm, str) and norm == "l2"):
        return None
    if isinstance(norm, str) and norm == "max":
        return lambda rows: rows.abs().amax(1)
    if not callable(norm) or isinstance(norm, type):
        raise ValueError(f"norm must be 'l2', 'max' or a function of something like z, got {norm!r}")
    return _Trees(norm, layout)


class _Trees:
    """A norm of pytrees as one of packed rows."""

    def __init__(self, norm: Callable[[Any], Any], layout: Layout) -> None:
        self.norm, self.layout, self.seen = norm, layout, False

    def __call__(self, rows: Tensor) -> Tensor:
        layout = self.layout
        if len(rows) > layout.batch:  # under vmap
            return torch.func.vmap(self._checked)(rows.reshape(-1, layout.batch, layout.size)).flatten()
        return self._checked(rows)

    def _checked(self, rows: Tensor) -> Tensor:
        found = self.norm(self.layout.unpack(rows))
        if not isinstance(found, Tensor) or found.numel() != len(rows) or found.is_complex():
            got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(
                f"norm= must return one real number for each of {len(rows)} sample(s), got {got}: take it over all but the "
                f"first {self.layout.batch_dims} dimension(s)"
            )
        if not self.seen:
            self.seen = True
            look(_check_sign, found)
        return found.detach().reshape(len(rows)).to(rows.dtype)


def _check_sign(norms: Tensor) -> None:
    if bool((norms < 0).any()):
        raise ValueError(
            f"norm= must not be negative, got {float(norms.min()):.6g}: whatever it is of would be near zero"
        )


def warn_of_seminorm(f: Evaluations, z0: Tensor, outcome: Outcome, options: Options) -> None:
    """Warn where a function of the user's has taken points whose residual it does not see: its largest entry alone, or the
    whole, is zero to it beside random numbers, and the 2-norm would have refused them."""
    norm = options.norm
    if not isinstance(norm, _Trees):
        return
    claims = outcome.status == int(Status.CONVERGED)
    if not bool(claims.any()):
        return
    F = f.beside("root").residual(outcome.z).detach().to(outcome.residual_norm)
    size, eps = F.abs(), torch.finfo(F.dtype).eps
    largest = size.amax(1)
    alone = torch.where(size == largest.unsqueeze(1), F, 0)
    random = 0.5 + seeded.uniform(*F.shape, seed=0x5E).to(F)
    least = eps**0.5 * norm(random) * largest
    unseen = claims & (largest > 0) & (torch.minimum(norm(F), norm(alone)) <= least)
    if not bool(unseen.any()):
        return
    scale = outcome.z if f.kind.iteration else f.beside("root").residual(z0).detach()
    left = torch.linalg.vector_norm(F, dim=1)
    unseen &= left > options.atol + options.rtol * torch.linalg.vector_norm(scale.to(F), dim=1)
    if bool(unseen.any()):
        warn(
            f"norm= leaves out a part of F, as no norm does: it is {float(norm(F)[unseen].max()):.3g} where |F| = "
            f"{float(left[unseen].max()):.3g}. What was found solves the rest, and its derivatives are those of a solution "
            "of all equations. Weigh what matters less, but not by zero",
            ConvergenceWarning,
        )


def start_size(z: Tensor) -> Tensor:
    """The largest entry of each start, 1 at most, ``(batch,)``: what is far is so in its units; 0 where it has none."""
    return z.abs().amax(1).nan_to_num(1.0, 1.0).clamp_max(1)
