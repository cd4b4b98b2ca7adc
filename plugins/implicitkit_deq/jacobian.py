r"""Numbers of the Jacobian ``J = df/dz`` of a cell, per sample and matrix-free: what decides whether a DEQ is solvable.

The fixed-point iteration converges near ``z*`` if the spectral radius of ``J`` is below one; the gradient passes through
``(I - J)^{-1}`` and explodes as ``I - J`` becomes singular; training lets both grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import options
from implicitkit_deq.held.frozen import statistics_held

_METHODS = ("arnoldi", "power")
_GENERATOR = options.optional(options.instance("a torch.Generator", torch.Generator))


@ik.extend.despite_inference_mode
def jacobian_penalty(
    cell: Callable[..., Any],
    z: Any,
    inputs: tuple[Any, ...] = (),
    *,
    probes: int = 1,
    exact: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""``|J|_F^2 / n``, mean over the samples: a regulariser that keeps a DEQ solvable (Bai, Koltun & Kolter 2021, eq. 7).

    Hutchinson's estimate ``E_v |J^T v|^2 / n`` with ``v ~ N(0, I)``, differentiable in everything the cell uses.

        loss = task_loss + 0.5 * jacobian_penalty(layer.cell, layer.solution.value, (x,))

    Dimensionless: ``J`` maps states to states.

    Args:
        cell: ``(z, *inputs) -> z``, samples independent. z: a state, every leaf with the batch first. inputs: a tuple.
        probes: vectors ``v``; the standard deviation of the estimate falls with their square root.
        exact: the sum over all ``n`` unit vectors instead, ``n`` products.
        generator: of the probes.

    Raises:
        ValueError: ``probes`` less than 1.
    """
    options.check_arguments(
        "jacobian_penalty",
        probes=(options.at_least(1), probes),
        exact=(options.flag(), exact),
        generator=(_GENERATOR, generator),
    )
    y, product = _transposed_product("jacobian_penalty", cell, z, inputs)
    batch, n = y.shape
    if exact:
        vectors = (row.expand(batch, n) for row in torch.eye(n, dtype=y.dtype, device=y.device))
        return sum((product(v).square().sum() for v in vectors), y.new_zeros(())) / (batch * n)
    total = y.new_zeros(())
    for _ in range(probes):
        v = torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=generator)
        total = total + product(v).square().sum()
    return total / (probes * batch * n)


@ik.extend.despite_inference_mode
def spectral_radius(
    cell: Callable[..., Any],
    z: Any,
    inputs: tuple[Any, ...] = (),
    *,
    method: str = "arnoldi",
    steps: int = 30,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""``max |\lambda_i(J)|`` of each sample, shape ``(batch,)``, without a graph.

    Both methods use products with ``J^T``, which has the same spectrum, from one evaluation of the cell.

    - ``"arnoldi"``: the largest Ritz value of a Krylov space of ``steps`` dimensions; exact when ``steps >= n``.
    - ``"power"``: the mean growth of ``|J^k v|`` over the second half of ``steps`` products.  Complex pairs of eigenvalues,
      for which the usual Rayleigh quotient gives any number, only make it converge as slowly as ``1 / steps``.

    Dimensionless.  Source: Arnoldi (1951); Saad (2011), *Numerical Methods for Large Eigenvalue Problems*, chapter 6.

    Args:
        cell, z, inputs: as in :func:`jacobian_penalty`. steps: products. generator: of the first vector.

    Raises:
        ValueError: an unknown method, or fewer than 2 steps.
    """
    options.check_arguments(
        "spectral_radius",
        method=(options.one_of(*_METHODS), method),
        steps=(options.at_least(2), steps),
        generator=(_GENERATOR, generator),
    )
    with torch.no_grad():
        y, product = _transposed_product("spectral_radius", cell, z, inputs)
        v = torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=generator)
        if method == "arnoldi":
            hessenberg = _arnoldi(product, v, min(steps, y.shape[1]))
            return torch.linalg.eigvals(hessenberg[:, :-1]).abs().amax(1).to(y.dtype)
        return _growth(product, v, steps)


@ik.extend.despite_inference_mode
def condition_number(
    cell: Callable[..., Any],
    z: Any,
    inputs: tuple[Any, ...] = (),
    *,
    steps: int = 30,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""``cond_2(I - J)`` of each sample, from below, shape ``(batch,)``, without a graph.

    The condition number of ``I - J`` on a Krylov space of ``steps`` dimensions (``(I - J^T) V_m = V_{m+1} (\bar I - \bar
    H)``): a lower bound, exact when ``steps >= n``.  The gradient is at most ``|(I - J)^{-1}|`` times that of one
    application of the cell.

    Dimensionless.  Source: Arnoldi (1951); Saad (2003), section 6.3.

    Args:
        cell, z, inputs, steps, generator: as in :func:`spectral_radius`.

    Raises:
        ValueError: fewer than 2 steps.
    """
    options.check_arguments("condition_number", steps=(options.at_least(2), steps), generator=(_GENERATOR, generator))
    with torch.no_grad():
        y, product = _transposed_product("condition_number", cell, z, inputs)
        v = torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=generator)
        hessenberg = _arnoldi(product, v, min(steps, y.shape[1]))
        identity = torch.eye(*hessenberg.shape[1:], dtype=hessenberg.dtype, device=y.device)
        values = torch.linalg.svdvals(identity - hessenberg)
        return (values[:, 0] / values[:, -1]).to(y.dtype)


# ------------------------------------------------------------------------------------------------------------- details
def _transposed_product(
    of: str, cell: Callable[..., Any], z: Any, inputs: tuple[Any, ...]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The packed state ``(batch, n)`` and ``v -> J^T v``, all products from one evaluation."""
    given = (options.function("cell(z, *inputs)"), cell), (options.instance("a tuple, as in (x,)", tuple), inputs)
    options.check_arguments(of, cell=given[0], inputs=given[1])
    layout = ik.extend.trees.Layout(z, 1, "z")

    def packed(y: Tensor) -> Tensor:
        out = cell(layout.unpack(y), *inputs)
        layout.check(out, f"the cell {type(cell).__name__}", cast=torch.is_autocast_enabled(y.device.type))
        return layout.pack(out)

    y = layout.pack(z)
    with statistics_held(cell):
        _, pullback = ik.extend.autodiff.vjp(packed, y)
    return y, lambda v: pullback(v)[0]


def _growth(product: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> Tensor:
    log = v.new_zeros(len(v))
    for k in range(steps):
        norm = torch.linalg.vector_norm(v, dim=1)
        v = product(v / norm.clamp_min(torch.finfo(v.dtype).tiny).unsqueeze(1))
        if k >= steps // 2:
            log = log + torch.linalg.vector_norm(v, dim=1).log()
    return (log / (steps - steps // 2)).exp()


def _arnoldi(product: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> Tensor:
    """The extended Hessenberg matrix ``(batch, steps + 1, steps)``; exhausted Krylov spaces get a new direction."""
    batch, n = v.shape
    working = torch.float64 if v.dtype == torch.float64 else torch.float32
    basis = torch.zeros(batch, steps + 1, n, dtype=working, device=v.device)
    hessenberg = torch.zeros(batch, steps + 1, steps, dtype=working, device=v.device)
    basis[:, 0] = torch.nn.functional.normalize(v.to(working), dim=1)
    scale = torch.zeros(batch, dtype=working, device=v.device)
    for k in range(steps):
        known = basis[:, : k + 1]
        w = product(basis[:, k].to(v.dtype)).to(working)
        scale = torch.maximum(scale, torch.linalg.vector_norm(w, dim=1))
        w, coefficients = _orthogonalise(w, known)
        hessenberg[:, : k + 1, k] = coefficients
        if k + 1 == n:
            break
        norm = torch.linalg.vector_norm(w, dim=1)
        alive = norm > 10 * n**0.5 * torch.finfo(working).eps * scale
        hessenberg[:, k + 1, k] = torch.where(alive, norm, 0)
        fresh, _ = _orthogonalise(basis[:, 0].roll(k + 1, 1) + 1 / n, known)
        basis[:, k + 1] = torch.nn.functional.normalize(torch.where(alive.unsqueeze(1), w, fresh), dim=1, eps=0)
    return hessenberg


def _orthogonalise(w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """``w`` less its components along ``basis (batch, k, n)``, and these; classical Gram-Schmidt, twice is enough."""
    total = w.new_zeros(w.shape[0], basis.shape[1])
    for _ in range(2):
        h = torch.einsum("bkn,bn->bk", basis, w)
        w = w - torch.einsum("bkn,bk->bn", basis, h)
        total = total + h
    return w, total
