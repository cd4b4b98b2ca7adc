r"""Theorems 2 and 3: one equilibrium layer is enough, and weight tying loses nothing.

Theorem 2: two equilibria one upon another are one equilibrium, of ``\Gamma([w1, w2]; x) = [f(w1; x), v(w2; w1)]``: the same
value, the same derivatives.  Its Jacobian is block lower triangular, so ``rho(J_\Gamma) = max(rho(J_f), rho(J_v))``.  What
is equal is the *set* of fixed points: where ``v`` has several, joint and sequential solves may select different ones.

Theorem 3: a network of ``L`` layers, whatever their widths and activations, is one tied layer
``z <- \sigma(W_z z + W_x x + b)`` of the sum of the widths.  ``W_z`` is nilpotent: it arrives after ``L`` steps from any
start, its implicit gradient is backpropagation, and the adjoint iteration ends after ``L - 1`` steps.

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", theorems 2 and 3.
"""

from __future__ import annotations

from typing import Any

import torch
from common import figure, table
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, tie_weights

from .claims import Setting, claim

DIMS = (6, 9, 5, 12, 7, 4)  # input, then z[1..5]


class Affine(nn.Module):
    """``tanh(W z + U x + b)``; ``W`` of the spectral norm ``norm``."""

    def __init__(self, inputs: int, features: int, norm: float, generator: torch.Generator) -> None:
        super().__init__()
        W = torch.randn(features, features, dtype=torch.float64, generator=generator)
        self.W = nn.Parameter(W * norm / torch.linalg.matrix_norm(W, 2))
        self.U = nn.Parameter(torch.randn(features, inputs, dtype=torch.float64, generator=generator) / inputs**0.5)
        self.b = nn.Parameter(0.1 * torch.randn(features, dtype=torch.float64, generator=generator))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + x @ self.U.T + self.b)


def _gradients(value: Tensor, c: Tensor, leaves: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad((value * c).sum(), leaves)])


def _worst(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float(((a - b).abs().max() / b.abs().max()).detach())


def merged(setting: Setting) -> dict[str, float]:
    """Theorem 2: joint against sequential against unrolled."""
    generator = torch.Generator().manual_seed(setting.seed)
    positions, inputs, features = 3, 16, 16 if setting.quick else 64
    first, second = (Affine(i, features, 0.8, generator) for i in (inputs, features))
    x = torch.randn(positions, inputs, dtype=torch.float64, generator=generator, requires_grad=True)
    c = torch.randn(positions, features, dtype=torch.float64, generator=generator)
    zeros, leaves = torch.zeros_like(c), [*first.parameters(), *second.parameters(), x]
    tight: dict[str, Any] = {"rtol": 1e-14, "atol": 1e-14, "rule": ik.Implicit(rtol=1e-14), "batch_dims": 1}

    w1 = ik.fixed_point(first, zeros, (x,), **tight).value
    sequential = ik.fixed_point(second, zeros, (w1,), **tight).value
    expected = _gradients(sequential, c, leaves)

    joint = ik.FixedPoint(first) >> ik.FixedPoint(second)
    start = dict.fromkeys(joint.map.functions, zeros)
    results, rows = {}, []
    for label, solver in (("blocks", ik.Blocks("anderson")), ("anderson", "anderson"), ("picard", "picard")):
        value = ik.solve(joint, start, (x,), solver=solver, **tight).value[joint.output_node]
        results[label] = _worst(value, sequential), _worst(_gradients(value, c, leaves), expected)
        rows.append((f"joint, {label}", *results[label]))

    options: dict[str, Any] = {"state": (features,), "rtol": 1e-14, "atol": 1e-14, "rule": ik.Implicit(rtol=1e-14)}
    layers = DEQ(first, **options) >> DEQ(second, **options)
    value = layers(x)
    results["DEQ >> DEQ"] = _worst(value, sequential), _worst(_gradients(value, c, leaves), expected)
    rows.append(("DEQ >> DEQ", *results["DEQ >> DEQ"]))

    w1 = w2 = zeros
    for _ in range(300):  # two chains of applications, differentiated by backpropagation
        w1 = first(w1, x)
    for _ in range(300):
        w2 = second(w2, w1)
    results["unrolled"] = _worst(w2, sequential), _worst(_gradients(w2, c, leaves), expected)
    rows.append(("unrolled", *results["unrolled"]))
    title = f"Theorem 2: {positions} samples, {features} + {features} unknowns, against one solve after the other"
    print(table(title, ("how", "value", "gradients"), rows))

    # Gamma as one function of the stacked state of one sample
    def gamma(w: Tensor) -> Tensor:
        one, two = w.split(features)
        return torch.cat([first(one, x[0].detach()), second(two, one)])

    solution = torch.cat([ik.fixed_point(first, zeros[:1], (x[:1],), batch_dims=1).value[0], sequential[0]]).detach()
    J = torch.autograd.functional.jacobian(gamma, solution)
    blocks = [J[:features, :features], J[features:, features:]]
    radii = [float(torch.linalg.eigvals(B).abs().max()) for B in (J, *blocks)]
    claim(max(v for v, _ in results.values()) < 1e-12, "joint, merged and unrolled values equal the sequential one")
    claim(max(g for _, g in results.values()) < 1e-12, "and so do the derivatives of both layers' weights and of x")
    claim(not J[:features, features:].any(), "the Jacobian of Gamma is block lower triangular (upper right block 0.0)")
    claim(abs(radii[0] - max(radii[1:])) < 1e-9, f"rho(J_Gamma) = {radii[0]:.4f} = max({radii[1]:.4f}, {radii[2]:.4f})")
    return {"value": max(v for v, _ in results.values()), "gradients": max(g for _, g in results.values())}


def selected() -> dict[str, float]:
    """With a bistable second map, joint Picard and the sequential solve end at different fixed points, both exact."""

    def slow(w1: Tensor, x: Tensor) -> Tensor:  # towards x, from far below
        return 0.9 * w1 + 0.1 * x

    def bistable(w2: Tensor, w1: Tensor) -> Tensor:
        return torch.tanh(2 * w2 + 0.2 * w1)

    x, low, zero = (torch.tensor([v], dtype=torch.float64) for v in (1.0, -3.0, 0.0))
    w1 = ik.fixed_point(slow, low, (x,), solver="picard").value
    sequential = ik.fixed_point(bistable, zero, (w1,), solver="picard").value
    joint = ik.FixedPoint(slow) >> ik.FixedPoint(bistable)
    state = ik.solve(joint, {"slow": low, "bistable": zero}, (x,), solver="picard").value
    together = state["bistable"]
    residuals = [float((bistable(z, x) - z).abs()) for z in (sequential, together)]
    print(f"  bistable second map: sequential {float(sequential):+.4f}, joint Picard {float(together):+.4f}")
    claim(max(residuals) < 1e-9, "both are fixed points of the second map")
    claim(
        float(sequential) > 0.9 and float(together) < -0.8, "yet not the same: the sets are equal, the selection is not"
    )
    return {"sequential": float(sequential), "joint": float(together)}


def tied(setting: Setting) -> dict[str, Any]:
    """Theorem 3: a network of five layers as one tied map."""
    torch.manual_seed(setting.seed)
    activations = (nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.Softplus(), nn.Identity())
    parts = [m for i, act in enumerate(activations) for m in (nn.Linear(*DIMS[i : i + 2], dtype=torch.float64), act)]
    network, depth = nn.Sequential(*parts), len(activations)
    x = torch.randn(8, DIMS[0], dtype=torch.float64, requires_grad=True)
    c = torch.randn(8, DIMS[-1], dtype=torch.float64)
    leaves = [*network.parameters(), x]
    expected = network(x)
    backprop = _gradients(expected, c, leaves)

    problem, layer = ik.tie(network), tie_weights(network, rule=ik.Implicit(rtol=1e-14))
    plain = ik.solve(problem, problem.start(x), (x,), solver="picard", batch_dims=1, rule=ik.Implicit(rtol=1e-14))
    outputs = {"ik.tie": plain.value[problem.output_node], "tie_weights": layer(x)}
    errors = {
        name: (_worst(out, expected), _worst(_gradients(out, c, leaves), backprop)) for name, out in outputs.items()
    }
    rows = [(name, *pair) for name, pair in errors.items()]
    print(table(f"Theorem 3: {depth} layers of {DIMS[1:]}, five activations", ("how", "value", "gradients"), rows))

    W_z = problem.matrices().W_z.detach()
    powers = [W_z.matrix_power(k) for k in range(1, depth + 1)]
    # from a start far away, block k is exact after k steps, and step L + 1 moves nothing
    with torch.no_grad():
        truth, below = {}, x
        for name, function in problem.map.functions.items():
            below = truth[name] = function(None, below)
        state = {name: 100 * torch.randn_like(t) for name, t in truth.items()}
        history = []
        for _ in range(depth + 1):
            state = problem.map(state, x)
            history.append([float((state[name] - truth[name]).abs().max()) for name in truth])
    # the adjoint iteration u <- c + J^T u
    one = {name: t[0] for name, t in truth.items()}
    layout = ik.extend.trees.Layout(one, 0)
    flat = layout.pack(one)[0]

    def stacked(z: Tensor) -> Tensor:
        return layout.pack(problem.map(layout.unpack(z[None]), x[0].detach()))[0]

    J = torch.autograd.functional.jacobian(stacked, flat)
    cotangent = torch.zeros_like(flat)
    cotangent[-DIMS[-1] :] = c[0]
    exact = torch.linalg.solve((torch.eye(len(flat), dtype=flat.dtype) - J).T, cotangent)
    u, adjoint = cotangent, []
    for _ in range(depth):
        u = cotangent + J.T @ u
        adjoint.append(float((u - exact).abs().max() / exact.abs().max()))
    claim(max(v for v, _ in errors.values()) < 1e-13, "the tied map computes what the network computes")
    claim(max(g for _, g in errors.values()) < 1e-12, "and its implicit gradient is backpropagation")
    claim(len(W_z) == sum(DIMS[1:]), f"the price is width: {len(W_z)} = {' + '.join(map(str, DIMS[1:]))}")
    claim(bool(powers[-2].any()) and not powers[-1].any(), "W_z is nilpotent: W_z^4 != 0, W_z^5 = 0")
    claim(
        all(history[k][k] < 1e-14 for k in range(depth)),
        "block k is exact after k steps, from a random start 100 times as large",
    )
    claim(history[depth - 2][-1] > 1e-6 and max(history[-1]) < 1e-14, "all of it after exactly L")
    claim(adjoint[depth - 2] < 1e-14 < adjoint[depth - 3], "the adjoint iteration ends after L - 1 steps")

    with figure(setting.output / "deq_theory_one_layer.png", 2) as (left, right):
        steps = range(1, depth + 2)
        for k in range(depth):
            left.semilogy(steps, [max(h[k], 1e-18) for h in history], "osD^v"[k] + "-", label=f"z[{k + 1}]")
        left.set_yticks([1e-18, 1e-15, 1e-10, 1e-5, 1, 1e5], ["0", *(f"$10^{{{p}}}$" for p in (-15, -10, -5, 0, 5))])
        left.axhspan(1e-19, 1e-17, color="0.9", zorder=0)  # no number is there but zero
        left.set(
            xlabel="steps from a random start",
            ylabel="largest error (grey: exactly zero)",
            ylim=(1e-19, 1e5),
            title="Theorem 3: block k is exact after k steps",
        )
        left.legend()
        image = right.imshow(W_z.abs().numpy(), cmap="magma")
        right.set(title="$|W_z|$: the layers' weights below the diagonal", xlabel="column", ylabel="row")
        right.figure.colorbar(image, ax=right)
    return {
        "value": max(v for v, _ in errors.values()),
        "gradients": max(g for _, g in errors.values()),
        "width": len(W_z),
    }


def run(setting: Setting) -> dict[str, Any]:
    """Both theorems."""
    return {"merged": merged(setting), "selected": selected(), "tied": tied(setting)}
