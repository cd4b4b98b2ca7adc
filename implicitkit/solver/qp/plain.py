"""Quadratic programs on plain tensors, without derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_arguments, optional, positive, tensor
from implicitkit.problem.qp_data import QPData
from implicitkit.solver.qp.interior_point import interior_point


def solve_qp(
    P: Tensor | None,
    q: Tensor,
    A: Tensor | None = None,
    b: Tensor | None = None,
    G: Tensor | None = None,
    h: Tensor | None = None,
    *,
    tol: float = 1e-9,
    max_steps: int = 60,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve a batch of convex quadratic programs on plain tensors (no derivative: see ``ik.QuadraticProgram``).

    It minimises ``z'Pz/2 + q'z`` subject to ``Az = b``, ``Gz <= h``.  Units: ``lam`` has those of the objective by
    those of ``h``.  Source: :class:`ik.InteriorPoint` (Mehrotra 1992).

    Args:
        P: ``(B, n, n)``, symmetric positive semidefinite, or ``None`` for a linear program. q: ``(B, n)``.
        A, b: ``(B, p, n)``, ``(B, p)``: ``Az = b``. G, h: ``(B, m, n)``, ``(B, m)``: ``Gz <= h``, with ``h = inf`` for
            rows that are absent.  Each pair may be ``None``.  Any of the tensors may lack the batch dimension if it is
            shared; without it in any, the batch is of one and the results have no batch dimension either.
        tol: relative accuracy of the interior-point phase; the polish then goes to rounding where it can.
        max_steps: interior-point steps.

    Returns:
        ``(z, y, lam, status)``: the point, the multipliers of ``Az = b`` and of ``Gz <= h`` (``lam >= 0``) and
        :class:`~implicitkit.Status` numbers, one a sample: ``CONVERGED``, ``INFEASIBLE``, ``UNBOUNDED``, ``INACCURATE``,
        ``MAX_STEPS``, ``NONFINITE`` (NaN in the data), ``NONCONVEX`` (``P`` is not positive semidefinite).

    Raises:
        ValueError: shapes do not fit.
    """
    check_arguments("solve_qp", tol=(positive(), tol), max_steps=(at_least(1), max_steps))
    for name, given in (("P", P), ("q", q), ("A", A), ("b", b), ("G", G), ("h", h)):
        check_arguments("solve_qp", **{name: (tensor() if name == "q" else optional(tensor()), given)})
    data, batched = collect(P, q, A, b, G, h)
    dtype = q.dtype
    point = interior_point(QPData(*(t.to(torch.float64) for t in data)), tol=tol, max_steps=max_steps)
    z, y, lam = (t.to(dtype) for t in point[:3])
    return (z, y, lam, point.status) if batched else (z[0], y[0], lam[0], point.status[0])


def collect(
    P: Tensor | None, q: Tensor, A: Tensor | None, b: Tensor | None, G: Tensor | None, h: Tensor | None
) -> tuple[QPData, bool]:
    """Absent parts filled in, shared ones expanded to the batch; was there a batch dimension?

    Raises:
        ValueError: shapes do not fit.
    """
    n = q.shape[-1]
    if (A is None) != (b is None) or (G is None) != (h is None):
        raise ValueError("A and b, and G and h, come in pairs: give both or neither")
    parts: list[tuple[str, Tensor, int]] = [
        ("P", q.new_zeros(n, n) if P is None else P, 2),
        ("q", q, 1),
        ("A", q.new_zeros(0, n) if A is None else A, 2),
        ("b", q.new_zeros(0) if b is None else b, 1),
        ("G", q.new_zeros(0, n) if G is None else G, 2),
        ("h", q.new_zeros(0) if h is None else h, 1),
    ]
    batch: int | None = None
    for name, t, event in parts:
        if t.ndim not in (event, event + 1):
            raise ValueError(f"{name} must have {event} dimensions, or {event + 1} with a batch; got {tuple(t.shape)}")
        if t.ndim == event + 1:
            if batch is not None and t.shape[0] != batch:
                raise ValueError(f"batch sizes disagree: {name} has {t.shape[0]}, another part has {batch}")
            batch = t.shape[0]
    p, m = parts[2][1].shape[-2], parts[4][1].shape[-2]
    shapes = {"P": (n, n), "q": (n,), "A": (p, n), "b": (p,), "G": (m, n), "h": (m,)}
    for name, t, event in parts:
        if tuple(t.shape[-event:]) != shapes[name]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, but the other parts ask for {shapes[name]}")
    size = 1 if batch is None else batch
    return QPData(*(t.expand(size, *t.shape[-event:]) for _, t, event in parts)), batch is not None
