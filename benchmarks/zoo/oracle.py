"""What value and gradient are, found without either library: plain iteration and SciPy's GMRES, in double precision."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

from benchmarks.zoo.base import Model

__all__ = ["Exact", "doubled", "exact", "flat", "gradient"]


@dataclass(frozen=True)
class Exact:
    """The equilibrium, all of its leaves flat; the loss there; its gradient by the first input and every parameter, flat."""

    state: Tensor
    loss: float
    gradient: Tensor


def flat(tensors: Any) -> Tensor:
    """A tensor, or several, as one vector in double precision."""
    return torch.cat([t.detach().double().flatten() for t in ([tensors] if isinstance(tensors, Tensor) else tensors)])


def doubled(model: Model, inputs: Sequence[Tensor], target: Tensor) -> tuple[Model, tuple[Tensor, ...], Tensor]:
    """The same weights and data in double precision; the first input is a leaf."""
    first, *others = (t.detach().double() for t in inputs)
    goal = target.double() if target.is_floating_point() else target
    return copy.deepcopy(model).double(), (first.requires_grad_(), *others), goal


def gradient(model: Model, inputs: Sequence[Tensor], loss: Tensor) -> Tensor:
    """By the first input and every parameter that takes part, flat."""
    wanted = [inputs[0], *model.parameters()]
    return flat(torch.autograd.grad(loss, wanted, materialize_grads=True))


def exact(model: Model, inputs: Sequence[Tensor], target: Tensor, steps: int = 4000) -> Exact:
    """The equilibrium to rounding by plain iteration, and ``(I - J)^T u = g`` by GMRES.

    Raises:
        RuntimeError: so many steps do not come down to rounding, or GMRES does not.
    """
    model, inputs, target = doubled(model, inputs, target)
    with torch.no_grad():
        injected, z = model.inject(*inputs), model.start(*inputs)
        for _ in range(steps):
            z, old = model.update(z, *injected), z
            if (flat(z) - flat(old)).norm() <= 1e-14 * flat(z).norm():
                break
        else:
            raise RuntimeError(f"{type(model).__name__}: plain iteration has not come to rest after {steps} steps")
    leaves = [z] if isinstance(z, Tensor) else list(z)
    points = [leaf.clone().requires_grad_() for leaf in leaves]
    pack = lambda parts: parts[0] if isinstance(z, Tensor) else tuple(parts)  # noqa: E731
    image = model.update(pack(points), *model.inject(*inputs))
    images = [image] if isinstance(z, Tensor) else list(image)
    right = torch.autograd.grad(model.loss(pack(points), target), points, materialize_grads=True)

    def split(v: Any) -> list[Tensor]:
        parts = torch.as_tensor(v).split([leaf.numel() for leaf in leaves])
        return [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]

    def product(v: Any) -> Any:
        found = torch.autograd.grad(images, points, split(v), retain_graph=True, materialize_grads=True)
        return v - flat(found).numpy()

    g = flat(right).numpy()
    system = scipy.sparse.linalg.LinearOperator((len(g), len(g)), matvec=product, dtype=np.float64)
    u, failed = scipy.sparse.linalg.gmres(
        system, g, rtol=1e-13, atol=1e-13 * np.linalg.norm(g), restart=150, maxiter=20
    )
    if failed and np.linalg.norm(product(u) - g) > 1e-11 * np.linalg.norm(g):
        raise RuntimeError(f"{type(model).__name__}: GMRES has not solved the adjoint system")
    # d loss = (partial loss) + u . df: one surrogate whose gradient is the total one
    held = pack([leaf.detach() for leaf in leaves])
    surrogate = model.loss(held, target) + sum((a * b).sum() for a, b in zip(images, split(u), strict=True))
    return Exact(flat(leaves), float(model.loss(held, target).detach()), gradient(model, inputs, surrogate))
