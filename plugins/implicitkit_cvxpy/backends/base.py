"""What a solver of cone programs is given, and what it gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_cvxpy.cones.form import Cones
from implicitkit_cvxpy.storage import DENSE, Entries, Held

Status = ik.Status


class Data(NamedTuple):
    """A batch of programs, plain float64 tensors: ``P (B, n, n)``, ``q (B, n)``, ``A (B, m, n)``, ``b (B, m)``; or of ``P``
    and ``A`` the entries, ``(B, nnz)``."""

    P: Tensor
    q: Tensor
    A: Tensor
    b: Tensor
    cones: Cones
    P_held: Held = DENSE
    A_held: Held = DENSE

    @property
    def sparse(self) -> bool:
        """Are the matrices held by their entries?"""
        return isinstance(self.A_held, Entries)

    def rows(self, keep: Tensor) -> Data:
        """Some of the programs."""
        return self._replace(**{name: getattr(self, name).index_select(0, keep) for name in ("P", "q", "A", "b")})


class Found(NamedTuple):
    """``w = (x, y)`` ``(B, n + m)``, a :class:`Status` number and the steps for each sample ``(B,)``; ``w`` is zero where
    there is no solution."""

    w: Tensor
    status: Tensor
    steps: Tensor


def loop(one: Any, data: Data) -> Found:
    """One sample at a time through ``one(P, q, A, b) -> (x, y, status, steps)`` on NumPy arrays, ``P`` and ``A`` of SciPy's
    sparse ones where they are held so."""
    arrays = [np.asarray(t.detach().cpu()) for t in data[:4]]
    batch, n, m = data.q.shape[0], data.q.shape[1], data.b.shape[1]
    w, status, steps = np.zeros((batch, n + m)), np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
    for i in range(batch):
        P, q, A, b = (a[i] for a in arrays)
        x, y, status[i], steps[i] = one(data.P_held.array(P), q, data.A_held.array(A), b)
        if x is not None and np.isfinite(x).all() and np.isfinite(y).all():
            w[i, :n], w[i, n:] = x, y
    device = data.q.device
    return Found(*(torch.from_numpy(v).to(device) for v in (w, status, steps)))
