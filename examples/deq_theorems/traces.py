r"""Traces and log-determinants of a Jacobian from products alone, and how far off they are.

    tr A,  A = J^T J  (|J|_F^2, what a Jacobian penalty estimates),    log |det (I - J)| = log det (I - J)^T (I - J) / 2

of ``J = df/dz`` at the equilibrium of ``f = tanh(W z + b)``, for two ``W``: one whose singular values fall like ``1 / i``,
and a Gaussian one, whose singular values hardly fall.  A product with ``A`` is one with ``J`` and one with ``J^T``; the
penalty's estimator ``|J^T v|^2``, ``v`` normal, needs only the second.

Hutchinson's error falls like ``k^{-1/2}`` with the number ``k`` of products.  Hutch++ finds the large part of ``A`` first
and estimates only what is left: it is far better where singular values fall, and no better where they do not.

Source: Hutchinson (1990), Commun. Stat. Simul. Comput. 19, 433-450; Meyer, Musco, Musco & Woodruff (2021), "Hutch++", SOSA;
Ubaru, Chen & Saad (2017), SIAM J. Matrix Anal. Appl. 38, 1075-1099.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from common import band, figure, table
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import jacobian_penalty

from .claims import Setting, claim

Product = Callable[[Tensor], Tensor]
METHODS = ("jacobian_penalty", "hutchinson", "hutch++")


def jacobian(falling: bool, n: int, generator: torch.Generator) -> Tensor:
    """``J`` at the equilibrium of ``tanh(W z + b)``, ``|W|_2 = 0.9``."""
    W, b = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((n, n), (n,)))
    if falling:
        U, _, Vh = torch.linalg.svd(W)
        W = U @ torch.diag(1 / torch.arange(1, n + 1, dtype=torch.float64)) @ Vh
    W = 0.9 * W / torch.linalg.matrix_norm(W, 2)

    def cell(z: Tensor) -> Tensor:
        return torch.tanh(W @ z + 0.5 * b)

    z = ik.fixed_point(cell, torch.zeros_like(b), rtol=1e-12, atol=0.0).value
    found: Tensor = torch.func.jacrev(cell)(z)
    return found


def spread(
    J: Tensor, method: str, counts: tuple[int, ...], draws: int, seed: int
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Relative errors of ``tr J^T J`` by number of products, a list of draws each, and how many standard errors the mean of
    the draws is away from the truth."""
    truth = float(J.square().sum())
    product: Product = lambda V: (V @ J.T) @ J  # noqa: E731
    linear: Product = lambda z: z @ J.T  # noqa: E731

    def once(k: int, generator: torch.Generator) -> Tensor:
        if method == "jacobian_penalty":
            return len(J) * jacobian_penalty(linear, J[:1], probes=k, generator=generator).detach()
        return ik.linear.trace(product, J[0], products=k, method=method, generator=generator).value

    errors, bias = {}, {}
    for k in counts:
        generator = torch.Generator().manual_seed(seed + k)
        values = torch.stack([once(k, generator) for _ in range(draws)])
        errors[k] = ((values - truth).abs() / truth).tolist()
        bias[k] = float((values.mean() - truth).abs() / (values.std() / draws**0.5).clamp_min(1e-12 * truth))
    return errors, bias


def exponent(errors: dict[int, list[float]]) -> float:
    """``p`` of ``error ~ k^p``, by least squares through the root mean squares."""
    x = torch.tensor([math.log(k) for k in errors], dtype=torch.float64)
    y = torch.tensor([0.5 * math.log(sum(e * e for e in found) / len(found)) for found in errors.values()])
    x, y = x - x.mean(), y.to(x) - y.to(x).mean()
    return float((x * y).sum() / (x * x).sum())


def determinants(
    J: Tensor, depths: tuple[int, ...], draws: int, seed: int
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Errors of ``log |det (I - J)|`` by steps of Lanczos' method, 20 probes, a list of draws each; and how many of the
    standard errors that come with the estimates they are, in the root mean square."""
    M = torch.eye(len(J), dtype=J.dtype) - J
    truth = float(torch.linalg.slogdet(M).logabsdet)
    generator = torch.Generator().manual_seed(seed)
    errors: dict[int, list[float]] = {}
    shares: dict[int, float] = {}
    for steps in depths:
        once = functools.partial(
            ik.linear.log_determinant, lambda V: (V @ M.T) @ M, J[0], steps=steps, generator=generator
        )
        estimates = [once() for _ in range(draws)]
        errors[steps] = [abs(float(e.value) / 2 - truth) for e in estimates]
        squares = [(error / float(e.error / 2)) ** 2 for error, e in zip(errors[steps], estimates, strict=True)]
        shares[steps] = (sum(squares) / draws) ** 0.5
    return errors, shares


def run(setting: Setting) -> dict[str, Any]:
    """Errors by products for both spectra, and of the log-determinant by steps."""
    n, draws = (60, 60) if setting.quick else (200, 200)
    counts, depths = (12, 24, 48), (2, 4, 8, 16, 32)
    if not setting.quick:
        counts, depths = (*counts, 96, 192), (*depths, 64)
    generator = torch.Generator().manual_seed(setting.seed)
    cases = {"falling": jacobian(True, n, generator), "flat": jacobian(False, n, generator)}
    found: dict[str, Any] = {"exponent": {}, "gain": {}, "bias": 0.0, "determinant": {}}
    rows = []
    with figure(setting.output / "deq_theory_traces.png", 3) as axes:
        for axis, (name, J) in zip(axes, cases.items(), strict=False):
            middle = {}
            for method in METHODS:
                errors, bias = spread(J, method, counts, draws, setting.seed)
                found["exponent"][name, method] = exponent(errors)
                found["bias"] = max(found["bias"], *bias.values())
                middle[method] = sorted(errors[counts[-1]])[draws // 2]
                band(axis, counts, list(zip(*errors.values(), strict=True)), method, (0.25, 0.75))
                rows += [(name, method, k, sorted(e)[draws // 2], max(e), bias[k]) for k, e in errors.items()]
            found["gain"][name] = middle["hutchinson"] / middle["hutch++"]
            title = f"{name.capitalize()} singular values"
            axis.set(title=title, xlabel="products with $J^T J$", ylabel="relative error of the trace")
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(counts, [str(k) for k in counts])
            axis.minorticks_off()
            axis.legend()
        for name, J in cases.items():
            errors, found["determinant"][name] = determinants(J, depths, draws, setting.seed)
            band(axes[2], depths, list(zip(*errors.values(), strict=True)), name, (0.25, 0.75))
        axes[2].set(
            title="20 probes", xlabel="steps of Lanczos' method", ylabel="error of log |det (I - J)|", yscale="log"
        )
        axes[2].legend()
    headings = ("singular values", "method", "products", "median error", "largest", "bias / s.e.")
    print(table(f"tr J^T J, n = {n}, {draws} draws", headings, rows))
    claim(found["bias"] < 4, f"no bias: the means are within {found['bias']:.1f} standard errors of the truth")
    for name in cases:
        for method in METHODS[:2]:
            p = found["exponent"][name, method]
            claim(-0.75 < p < -0.25, f"{name}: the error of {method} falls like k^{p:.2f}")
    gain = found["gain"]
    claim(gain["falling"] > 3, f"Hutch++ is {gain['falling']:.1f} times nearer where singular values fall,")
    claim(gain["flat"] < 2, f"and {gain['flat']:.2f} times where they do not: there it has nothing to find")
    for name, shares in found["determinant"].items():
        text = ", ".join(f"{k}: {share:.1f}" for k, share in shares.items())
        claim(shares[depths[-1]] < 1.5, f"{name}: errors of log |det (I - J)| in standard errors, by steps: {text}")
    few, many = (found["determinant"]["flat"][k] for k in (depths[0], depths[-1]))
    claim(
        few > 1.3 * many, "with two steps that of the quadrature comes on top, which the standard error does not tell"
    )
    return found
