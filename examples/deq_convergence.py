"""Convergence to equilibrium: residual by evaluations, iterations by sequence length, and what tolerances cost.

    python examples/deq_convergence.py --quick
    python examples/deq_convergence.py

1. The residual against evaluations of the cell, for the unrolled network and for Picard, Anderson, Broyden, Newton-Krylov.
2. Broyden's iterations, forward and backward, against sequence lengths of 16 to 1024, for the TrellisNet and the transformer
   cell, and the time of an iteration: what a solve costs is the number of its iterations.
3. The error of the gradient against the forward and the backward tolerance: the larger of the two decides.

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models": convergence, and Broyden iterations by sequence length.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import figure, options, table
from deq_theorems.claims import claim
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import cells

UNROLLED = "unrolled, 60 layers"
KINDS = ("TrellisNet", "Transformer")


def make(kind: str, features: int, seed: int) -> cells.Cell:
    """A cell as training starts with it, but in float64."""
    torch.manual_seed(seed)
    if kind == "TrellisNet":
        return cells.TrellisNet(features, features, scale=0.9, dtype=torch.float64)
    return cells.Transformer(features, features, heads=4, hidden=2 * features, scale=0.7, dtype=torch.float64)


def prepared(kind: str, features: int, length: int, seed: int) -> tuple[cells.Cell, Tensor, tuple[Tensor, ...], Tensor]:
    """The cell, an input, what is computed of it once, and zeros for a state."""
    cell = make(kind, features, seed)
    x = torch.randn(1, length, features, dtype=torch.float64)
    with torch.no_grad():
        return cell, x, cell.inject(x), x.new_zeros(1, *cell.state_shape(x))


# ---------------------------------------------------------------------------------------------- residual by evaluations
def traces(kind: str, features: int, length: int, seed: int) -> dict[str, list[tuple[int, float]]]:
    """(evaluations, relative residual) after each step, by solver; a product with the Jacobian counts as an evaluation."""
    cell, _, injected, z0 = prepared(kind, features, length, seed)
    found: dict[str, list[tuple[int, float]]] = {UNROLLED: []}
    spent, points = 0, list[tuple[int, float]]()

    def counted(z: Tensor, *args: Tensor) -> Tensor:
        nonlocal spent
        spent += 1
        return cell.update(z, *args)

    def note(step: int, z: Tensor, norm: Tensor) -> None:
        points.append((spent, float(norm / z.norm())))

    def counting_identity(z: Tensor, v: Tensor) -> Tensor:  # called at every product of Newton-Krylov
        nonlocal spent
        spent += 1
        return v

    with torch.no_grad():
        z = z0
        for layer in range(1, 61):
            new = cell.update(z, *injected)
            found[UNROLLED].append((layer, float((new - z).norm() / new.norm())))
            z = new
        solvers = ("picard", "anderson", "broyden", ik.NewtonKrylov(preconditioner=counting_identity))
        for solver in solvers:
            spent, points = 0, list[tuple[int, float]]()

            ik.fixed_point(counted, z0, injected, solver=solver, batch_dims=1, rtol=1e-10, atol=0.0, callback=note)
            found[solver if isinstance(solver, str) else "newton_krylov"] = points
    return found


def to_reach(points: list[tuple[int, float]], residual: float) -> int | None:
    """Evaluations until the residual is as small."""
    return next((spent for spent, size in points if size <= residual), None)


# ------------------------------------------------------------------------------------------ iterations by length
def by_length(kind: str, features: int, length: int, seed: int, rtol: float = 1e-6) -> dict[str, float]:
    """Iterations of a forward and a backward solve, milliseconds an iteration, and those of the cell alone."""
    cell, x, injected, z0 = prepared(kind, features, length, seed)
    result: dict[str, float] = {}
    for solver in ("picard", "anderson"):
        with torch.no_grad():
            run = ik.fixed_point(cell.update, z0, injected, solver=solver, batch_dims=1, rtol=rtol, atol=0.0)
        result[solver] = int(run.steps.max())
    cotangent = torch.randn_like(z0)
    start = time.process_time()
    solution = ik.fixed_point(
        cell.update,
        z0,
        cell.inject(x),
        solver="broyden",
        batch_dims=1,
        rtol=rtol,
        atol=0.0,
        rule=ik.Implicit("broyden", rtol=rtol),
    )
    middle = time.process_time()
    solution.value.backward(cotangent)
    end = time.process_time()
    assert solution.backward is not None
    result["forward"], result["backward"] = int(solution.steps.max()), int(solution.backward.steps.max())
    result["forward_ms"] = 1e3 * (middle - start) / solution.evaluations
    result["backward_ms"] = 1e3 * (end - middle) / max(1, result["backward"])
    with torch.no_grad():
        start = time.process_time()
        for _ in range(5):
            cell.update(z0, *injected)
        result["cell_ms"] = 1e3 * (time.process_time() - start) / 5
    return result


# -------------------------------------------------------------------------------------------------- gradient by tolerance
def gradient_errors(
    kind: str, features: int, length: int, seed: int, tolerances: tuple[float, ...]
) -> dict[tuple[float, float], float]:
    """Relative error of the gradient with respect to all weights and the input, by (forward, backward) tolerance."""
    cell, x, _, z0 = prepared(kind, features, length, seed)
    x.requires_grad_()
    c = torch.randn_like(z0)
    leaves = [*(p for p in cell.parameters() if p.requires_grad), x]

    def gradient(forward: float, backward: float) -> Tensor:
        rule = ik.Implicit("gmres", rtol=backward)
        solution = ik.fixed_point(
            cell.update, z0, cell.inject(x), solver="anderson", batch_dims=1, rtol=forward, atol=0.0, rule=rule
        )
        parts = torch.autograd.grad((solution.value * c).sum(), leaves)
        return torch.cat([p.flatten() for p in parts])

    truth = gradient(1e-13, 1e-13)
    return {(f, b): float((gradient(f, b) - truth).norm() / truth.norm()) for f in tolerances for b in tolerances}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the three parts; returns their numbers."""
    chosen = options(__doc__).parse_args(arguments)
    features, length = (8, 24) if chosen.quick else (32, 128)
    lengths = (16, 64) if chosen.quick else (16, 32, 64, 128, 256, 512, 1024)
    tolerances = (1e-1, 1e-4, 1e-8) if chosen.quick else (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10)

    found = {kind: traces(kind, features, length, chosen.seed) for kind in KINDS}
    rows = [
        (kind, name, *(str(to_reach(points, goal) or "-") for goal in (1e-2, 1e-4, 1e-6, 1e-8)))
        for kind in KINDS
        for name, points in found[kind].items()
    ]
    title = f"Evaluations to a relative residual, {length} positions, {features} features"
    print(table(title, ("cell", "method", "1e-2", "1e-4", "1e-6", "1e-8"), rows))
    for kind in KINDS:
        needed = {name: to_reach(points, 1e-8) for name, points in found[kind].items() if name != UNROLLED}
        claim(None not in needed.values(), f"{kind}: every solver reaches 1e-8 ({needed})")
        fastest = min(needed["anderson"] or 0, needed["broyden"] or 0)
        claim(fastest <= 1.1 * (needed["picard"] or 0), f"{kind}: acceleration costs at most a tenth more than Picard")
        first = found[kind]["broyden"][0][1]
        claim(
            any(s <= 1e-2 * first for n, s in found[kind]["broyden"] if n <= 40),
            f"{kind}: Broyden gains two digits in 40 evaluations",
        )

    columns = ("picard", "anderson", "forward", "backward", "forward_ms", "backward_ms", "cell_ms")
    iterations = {(kind, T): by_length(kind, features, T, chosen.seed) for kind in KINDS for T in lengths}
    rows = [(kind, T, *(one[name] for name in columns)) for (kind, T), one in iterations.items()]
    headings = (
        "cell",
        "length",
        "Picard",
        "Anderson",
        "Broyden",
        "backward",
        "ms forward",
        "ms backward",
        "ms cell",
    )
    print(table("Iterations to 1e-6 by sequence length; milliseconds an iteration", headings, rows))
    for kind in KINDS:
        counts = [iterations[kind, T]["forward"] for T in lengths]
        growth, stretch = counts[-1] / counts[0], lengths[-1] / lengths[0]
        claim(
            growth < stretch**0.5,
            f"{kind}: {counts} iterations; {growth:.1f} times as many for {stretch:g} times the length",
        )

    errors = gradient_errors("TrellisNet", features, 16, chosen.seed, tolerances)
    rows = [(f"{f:.0e}", *(errors[f, b] for b in tolerances)) for f in tolerances]
    print(
        table(
            "Gradient error by forward (rows) and backward (columns) tolerance",
            ("", *(f"{b:.0e}" for b in tolerances)),
            rows,
        )
    )
    ratio = max(e / (f + b) for (f, b), e in errors.items())
    tight = tolerances[-1]
    claim(ratio < 5, f"the error is at most {ratio:.2f} times the sum of the two tolerances")
    claim(errors[tolerances[0], tight] > 1e2 * errors[tight, tight], "a loose forward solve cannot be mended backward")
    claim(errors[tight, tolerances[0]] > 1e2 * errors[tight, tight], "nor a loose backward solve forward")

    with figure(chosen.output / "deq_convergence.png", 4, size=(20, 4.4)) as axes:
        for axis, kind in zip(axes, KINDS, strict=False):
            for name, points in found[kind].items():
                axis.semilogy(
                    *zip(*points, strict=True),
                    label=name,
                    linewidth=3 if name == UNROLLED else 1.2,
                    alpha=0.6 if name == UNROLLED else 1,
                )
            axis.set(
                xlabel="evaluations of the cell",
                ylabel="relative residual",
                title=f"{kind}, {length} positions",
                ylim=(1e-11, None),
            )
            axis.legend(fontsize=8)
        for kind, colour in zip(KINDS, ("C0", "C1"), strict=True):
            for what, style in (("forward", "o-"), ("backward", "s--")):
                axes[2].plot(
                    lengths, [iterations[kind, T][what] for T in lengths], style, color=colour, label=f"{kind}, {what}"
                )
        axes[2].set(
            xscale="log",
            ylim=(0, None),
            xlabel="sequence length",
            ylabel="Broyden iterations to 1e-6",
            title="Iterations by length",
        )
        axes[2].set_xticks(lengths, [str(T) for T in lengths])
        axes[2].minorticks_off()
        axes[2].legend(fontsize=8)
        for f in tolerances:
            axes[3].loglog(tolerances, [errors[f, b] for b in tolerances], "o-", label=f"forward {f:.0e}", markersize=4)
        axes[3].set(
            xlabel="backward tolerance", ylabel="relative error of the gradient", title="Gradient error, TrellisNet"
        )
        axes[3].legend(fontsize=8)
    return {"traces": found, "iterations": iterations, "gradient": errors, "ratio": ratio}


if __name__ == "__main__":
    main()
