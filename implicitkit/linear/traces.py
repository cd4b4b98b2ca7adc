r"""Traces and log-determinants of matrices that are known by their products only.

    \mathrm{tr} A = E[g^T A g],    \log \det A = \mathrm{tr} \log A,    E[g g^T] = I

A matrix is a function on rows, ``(k, n) -> (k, n)``, ``V -> V A^T`` (``A`` times each row), as the products of an
:class:`~implicitkit.Operator` and ``torch.func.vmap`` of a Jacobian's product are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_arguments, function, instance, one_of, optional, tensor

Product = Callable[[Tensor], Tensor]
_GENERATOR = optional(instance("a torch.Generator", torch.Generator))


class Estimate(NamedTuple):
    """A random estimate ``value`` and its standard ``error``, numbers without dimension beyond those of the matrix."""

    value: Tensor
    error: Tensor


def trace(
    product: Product,
    like: Tensor,
    *,
    products: int = 60,
    method: str = "hutch++",
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""An unbiased estimate of ``tr A`` from a number of products with ``A``.

    - ``"hutchinson"``: the mean of ``g_i^T A g_i`` over random signs ``g_i``; its variance is
      ``2 (|A|_F^2 - \sum_i a_ii^2) / products`` for symmetric ``A``: the error falls as ``products^{-1/2}``.
    - ``"hutch++"``: a third of the products finds an orthonormal ``Q`` for the range of ``A S``, ``S`` random signs; then
      ``tr(Q^T A Q)`` is exact and only the rest ``(I - Q Q^T) A (I - Q Q^T)`` is estimated.  For positive semidefinite ``A``
      the error falls as ``tr A / products``, and vanishes for matrices of rank up to a third of ``products``.

    The estimate is differentiable through ``product``, and its derivative unbiased.  Units: those of ``A``.

    Source: Hutchinson (1990), Commun. Stat. Simul. Comput. 19, 433-450; Meyer, Musco, Musco & Woodruff (2021), "Hutch++:
    optimal stochastic trace estimation", SOSA, algorithm 1.

    Args:
        product: ``A`` times each row, ``(k, n) -> (k, n)``. like: ``(n,)``, for size, dtype and device.
        products: at least 2; for ``"hutch++"`` at least 6. method: ``"hutch++"`` or ``"hutchinson"``.
        generator: of the random signs.

    Returns:
        :class:`Estimate`; the error of ``"hutch++"`` is zero where ``Q`` spans everything.

    Raises:
        ValueError: another method, too few products, or a ``like`` that is no vector.
    """
    check_arguments(
        "trace",
        product=(function("product(rows)"), product),
        like=(tensor(), like),
        products=(at_least(2), products),
        method=(one_of("hutch++", "hutchinson"), method),
        generator=(_GENERATOR, generator),
    )
    least = 6 if method == "hutch++" else 2
    if products < least:
        raise ValueError(f"method {method!r} needs {least} products or more, got {products}")
    n = _size(like)
    if method == "hutchinson":
        return _mean(*_quadratic(product, _signs(products, like, generator)))
    third = products // 3
    with torch.no_grad():
        sketch = product(_signs(min(third, n), like, generator))
        Q = torch.linalg.qr(sketch.T)[0].T  # rows, orthonormal
    exact = (Q * product(Q)).sum()
    rest = _signs(products - third - len(Q), like, generator)
    rest = rest - rest @ Q.T @ Q
    if len(Q) == n:
        return Estimate(exact, torch.zeros_like(exact.detach()))
    estimate = _mean(*_quadratic(product, rest))
    return Estimate(exact + estimate.value, estimate.error)


def log_determinant(
    product: Product, like: Tensor, *, probes: int = 20, steps: int = 30, generator: torch.Generator | None = None
) -> Estimate:
    r"""An estimate of ``\log \det A``, ``A`` symmetric and positive definite, by stochastic Lanczos quadrature.

    For each of ``probes`` vectors of random signs ``g``, Lanczos' method gives a tridiagonal ``T`` of ``steps`` rows, with
    eigenvalues ``\theta_j`` and first components ``\tau_j`` of its eigenvectors:
    ``g^T \log(A) g \approx n \sum_j \tau_j^2 \log \theta_j``, Gauss's rule for the spectral measure of ``g``.  Two errors:
    that of the rule, which falls as ``((\sqrt\kappa - 1) / (\sqrt\kappa + 1))^{2 steps}``, ``\kappa`` the condition number,
    and that of the mean, which ``error`` tells and which falls as ``probes^{-1/2}``.

    The derivative is ``tr(A^{-1} dA)`` on the same probes: ``x_i^T dA g_i`` with ``x_i \approx A^{-1} g_i`` from the same
    Lanczos basis.  It flows through ``product``, once.

    Dimensionless where ``A`` is.  For ``\log |\det(I - J)|`` pass ``M^T M`` with ``M = I - J``, and take half.

    Source: Ubaru, Chen & Saad (2017), "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM J. Matrix Anal.
    Appl. 38, 1075-1099, algorithm 1; the derivative: Dong, Eriksson, Nickisch, Bindel & Wilson (2017), NeurIPS, section 3.1.

    Args:
        product: ``A`` times each row, ``(k, n) -> (k, n)``. like: ``(n,)``, for size, dtype and device.
        probes: at least 2. steps: of Lanczos' method, each one product with all probes. generator: of the random signs.

    Returns:
        :class:`Estimate`.

    Raises:
        ValueError: an eigenvalue that is not positive was met, too few probes or steps, or a ``like`` that is no vector.
    """
    check_arguments(
        "log_determinant",
        product=(function("product(rows)"), product),
        like=(tensor(), like),
        probes=(at_least(2), probes),
        steps=(at_least(1), steps),
        generator=(_GENERATOR, generator),
    )
    n = _size(like)
    g = _signs(probes, like, generator)
    with torch.no_grad():
        basis, T = _lanczos(product, g, min(steps, n))
        theta, vectors = torch.linalg.eigh(T)
        if not bool((theta > 0).all()):
            raise ValueError(
                f"log_determinant needs a positive definite matrix; an eigenvalue of {float(theta.min()):.3g} was met. For "
                "a matrix M that is not symmetric pass M^T M, and halve"
            )
        tau = vectors[:, 0]
        values = n * (tau.square() * theta.log()).sum(1)
        inverse = n**0.5 * torch.einsum("pkj,pj,pj->pk", vectors, tau, 1 / theta)
        x = torch.einsum("pk,pkn->pn", inverse, basis)
    slope = (x * product(g)).sum(1).mean()
    estimate = _mean(values, probes)
    return Estimate(estimate.value + (slope - slope.detach()), estimate.error)


def _size(like: Tensor) -> int:
    if like.ndim != 1 or not like.is_floating_point():
        raise ValueError(f"like must be a real vector (n,), got shape {tuple(like.shape)} and dtype {like.dtype}")
    return len(like)


def _signs(count: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random signs ``(count, n)``."""
    bits = torch.randint(0, 2, (count, len(like)), generator=generator, device=like.device)
    return 2 * bits.to(like.dtype) - 1


def _quadratic(product: Product, g: Tensor) -> tuple[Tensor, int]:
    return (g * product(g)).sum(1), len(g)


def _mean(values: Tensor, count: int) -> Estimate:
    return Estimate(values.mean(), values.detach().std() / count**0.5)


def _lanczos(product: Product, g: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Orthonormal bases ``(k, steps, n)`` and tridiagonal matrices ``(k, steps, steps)``, from each row of ``g``.

    Each new vector is orthogonalised against all before, twice.  Where a Krylov space is exhausted its ``T`` goes on with
    ones on the diagonal, which no quadrature sees: the components there are zero.
    """
    k, n = g.shape
    basis = g.new_zeros(k, steps, n)
    diagonal, beside = g.new_ones(k, steps), g.new_zeros(k, steps)
    v, alive = g / torch.linalg.vector_norm(g, dim=1, keepdim=True), torch.ones(k, dtype=torch.bool, device=g.device)
    size = g.new_zeros(k)
    for j in range(steps):
        basis[:, j] = v
        w = product(v)
        size = torch.maximum(size, torch.linalg.vector_norm(w, dim=1))
        diagonal[:, j] = torch.where(alive, (w * v).sum(1), 1)
        for _ in range(2):
            known = basis[:, : j + 1]
            w = w - torch.einsum("pjn,pj->pn", known, torch.einsum("pjn,pn->pj", known, w))
        norm = torch.linalg.vector_norm(w, dim=1)
        alive = alive & (norm > 10 * n**0.5 * torch.finfo(g.dtype).eps * size)
        beside[:, j] = torch.where(alive, norm, 0)
        v = torch.where(alive.unsqueeze(1), w / norm.clamp_min(torch.finfo(g.dtype).tiny).unsqueeze(1), 0)
    above = torch.diag_embed(beside, 1)[:, :steps, :steps]
    return basis, torch.diag_embed(diagonal) + above + above.mT
