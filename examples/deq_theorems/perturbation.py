r"""The perturbation bound (lemma 2): how far fixed points move when the map does, and what a residual certifies.

    |z_u - z_v| <= min(1 / (1 - L_u), 1 / (1 - L_v)) max_z |u(z) - v(z)|
    |z - z*| <= |f(z) - z| / (1 - L)                                        (v the constant map z -> f(z))

since ``z_u - z_v = [u(z_u) - u(z_v)] + [u(z_v) - v(z_v)]``.  The maximum is over a set that has both fixed points in it.

Source: "Separation and bias of deep equilibrium models on expressivity and learning dynamics" (NeurIPS 2024), lemma 2.
"""

from __future__ import annotations

from typing import Any

import torch
from common import figure, table
from torch import Tensor

import implicitkit as ik

from .claims import Setting, claim


def curved(z: Tensor, W: Tensor, a: Tensor) -> Tensor:
    """``tanh(W z + a)``; ``W (batch, n, n)``."""
    return torch.tanh((W @ z.unsqueeze(2)).squeeze(2) + a)


def straight(z: Tensor, W: Tensor, a: Tensor) -> Tensor:
    """``W z + a``: with ``W = L I`` and a constant shift the bound is attained."""
    return (W @ z.unsqueeze(2)).squeeze(2) + a


def ripple(z: Tensor, W: Tensor, a: Tensor, size: Tensor, phase: Tensor) -> Tensor:
    """``curved`` and a shift that varies with ``z``, of norm ``size`` at most."""
    shift = torch.sin(z + phase)
    return curved(z, W, a) + size * shift / z.shape[1] ** 0.5


def run(setting: Setting) -> dict[str, Any]:
    """The largest ratio of distance to bound over random pairs, and the certificate of loose solves."""
    generator = torch.Generator().manual_seed(setting.seed)
    pairs, n = (200, 4) if setting.quick else (2000, 8)

    def draw(*shape: int) -> Tensor:
        return torch.randn(pairs, *shape, dtype=torch.float64, generator=generator)

    L = torch.rand(pairs, 1, dtype=torch.float64, generator=generator) * 0.98
    W = draw(n, n)
    W *= (L / torch.linalg.matrix_norm(W, 2).unsqueeze(1)).unsqueeze(2)
    a, z0 = draw(n), torch.zeros(pairs, n, dtype=torch.float64)
    size = 10 ** (-4 * torch.rand(pairs, 1, dtype=torch.float64, generator=generator))
    options: dict[str, Any] = {"solver": "anderson", "batch_dims": 1, "rtol": 1e-12, "atol": 1e-13}

    def distance(left: Tensor, right: Tensor) -> Tensor:
        return torch.linalg.vector_norm(left - right, dim=1, keepdim=True)

    z_u = ik.fixed_point(curved, z0, (W, a), **options).value
    z_v = ik.fixed_point(ripple, z0, (W, a, size, 3 * draw(n)), **options).value
    ratios = {"tanh, rippled": distance(z_u, z_v) * (1 - L) / size}
    scaled = L.unsqueeze(2) * torch.eye(n, dtype=torch.float64)
    shift = draw(n)
    z_u, z_v = (ik.fixed_point(straight, z0, (scaled, a + s), **options).value for s in (0, shift))
    ratios["L z + a, shifted"] = distance(z_u, z_v) * (1 - L) / torch.linalg.vector_norm(shift, dim=1, keepdim=True)

    # the library's certificate of solves that stopped early
    count = 40 if setting.quick else 200
    W9 = 0.9 * W[:count] / L[:count].unsqueeze(2)
    exact = ik.fixed_point(curved, z0[:count], (W9, a[:count]), **options).value
    loose = ik.fixed_point(curved, z0[:count], (W9, a[:count]), **{**options, "solver": "picard", "rtol": 1e-3})
    errors = distance(loose.value, exact)[:, 0]
    banach = loose.residual_norm / (1 - 0.9)
    certificate = ik.certify(loose)
    ratios["|z - z*| <= |f(z) - z| / (1 - L), L = 0.9"] = (errors / banach).unsqueeze(1)
    ratios["|z - z*| <= ik.certify(solution).error"] = (errors / certificate.error).unsqueeze(1)

    rows = [(name, float(r.max()), float(r.median()), len(r)) for name, r in ratios.items()]
    headings = ("distance / bound", "largest", "median", "pairs")
    print(table("Perturbation bound", headings, rows))
    claim(max(float(r.max()) for r in ratios.values()) <= 1 + 1e-6, "no pair exceeds the bound")
    claim(float(ratios["L z + a, shifted"].min()) > 1 - 1e-6, "linear maps attain it")
    claim(bool(certificate.holds.all()), "every early stop is certified")

    with figure(setting.output / "deq_theory_perturbation.png") as axes:
        for (name, r), marker in zip(list(ratios.items())[:2], ".x", strict=True):
            axes.plot(L[:, 0].numpy(), r[:, 0].numpy(), marker, markersize=4, label=name, alpha=0.6)
        axes.plot([0.9] * count, (errors / banach).numpy(), "_", label="early stops")
        axes.axhline(1, color="0.5", linewidth=1)
        axes.set(xlabel="Lipschitz constant L", ylabel="distance / bound", title="Lemma 2")
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.96))
    return {name: float(r.max()) for name, r in ratios.items()}
