"""The loops beside which ``bench_deq_rows.py`` measures a layer ``z = tanh(W z + U x + b)``, forward and backward.

The plain iteration with a test of the whole batch, the evaluations and products of another method with nothing around them,
and the same with what acceleration does to whole vectors.
"""

from __future__ import annotations

import torch
from bench_deq import TanhCell
from torch import Tensor

__all__ = ["as_many", "bare", "with_vectors"]


def bare(cell: TanhCell, x: Tensor, c: Tensor, tol: float, limit: int) -> bool:
    """The plain loop both ways, stopped when the whole batch has met the tolerance; did it?"""
    with torch.no_grad():
        (injected,) = cell.inject(x)
        z = torch.zeros_like(injected)
        for _ in range(limit):
            z, old = cell.update(z, injected), z
            if bool(((z - old).norm(dim=1) <= tol * z.norm(dim=1)).all()):
                break
        else:
            return False
    z = z.requires_grad_()
    f = cell.update(z, *cell.inject(x))
    u = c
    for _ in range(limit):
        (v,) = torch.autograd.grad(f, z, u, retain_graph=True)
        v, u = c + v, u
        if bool(((v - u).norm(dim=1) <= tol * v.norm(dim=1)).all()):
            break
        u = v
    torch.autograd.grad(f, [cell.W, cell.U, cell.b], u)
    return True


def as_many(cell: TanhCell, x: Tensor, c: Tensor, evaluations: int, products: int) -> None:
    """The loop without anything around it: these evaluations, these products with the transposed, one derivative."""
    with torch.no_grad():
        (injected,) = cell.inject(x)
        z = torch.zeros_like(injected)
        for _ in range(evaluations):
            z = cell.update(z, injected)
    z = z.requires_grad_()
    f, u = cell.update(z, *cell.inject(x)), c
    for _ in range(products):
        (u,) = torch.autograd.grad(f, z, u, retain_graph=True)
    torch.autograd.grad(f, [cell.W, cell.U, cell.b], u)


def with_vectors(cell: TanhCell, x: Tensor, c: Tensor, evaluations: int, products: int, memory: int = 8) -> None:
    """The same loop, with the vectors of acceleration: mixing in one step of three, one Gram-Schmidt pass a product.

    What would be mixed in is multiplied by zero, so that the numbers stay those of the plain loop, and finite.
    """
    with torch.no_grad():
        (injected,) = cell.inject(x)
        z = torch.zeros_like(injected)
        (batch, n), last = z.shape, None
        history, none = z.new_zeros(batch, memory, 2 * n), z.new_zeros(batch, 1, memory)
        for k in range(evaluations):
            w = cell.update(z, injected)
            r = w - z
            torch.linalg.vector_norm(r, dim=1)
            if last is not None:
                row = history[:, k % memory]
                torch.sub(r, last[0], out=row[:, :n])
                torch.sub(w, last[1], out=row[:, n:])
            last = r, w
            if k % 3 == 0:
                torch.bmm(history[:, :3, :n], history[:, :, :n].mT)
                w = torch.baddbmm(w.unsqueeze(1), none, history[:, :, n:], alpha=-1).squeeze(1)
            z = w
    z = z.requires_grad_()
    f, basis = cell.update(z, *cell.inject(x)), c.new_empty(products + 1, *c.shape)
    V = basis.transpose(0, 1)
    v = torch.div(c, torch.linalg.vector_norm(c, dim=1, keepdim=True), out=basis[0])
    for j in range(products):
        (w,) = torch.autograd.grad(f, z, v, retain_graph=True)
        known, w = V[:, : j + 1], w.unsqueeze(1)
        w = torch.baddbmm(w, torch.bmm(w, known.mT), known, alpha=-1)
        v = torch.div(w.squeeze(1), torch.linalg.vector_norm(w, dim=2), out=basis[j + 1])
    u = torch.bmm(c.new_ones(batch, 1, products), V[:, :products]).squeeze(1)
    torch.autograd.grad(f, [cell.W, cell.U, cell.b], u)
