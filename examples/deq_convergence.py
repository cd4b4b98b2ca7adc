"""Convergence to equilibrium: residual by evaluations, iterations by sequence length, and what tolerances cost.

    python examples/deq_convergence.py --quick
    python examples/deq_convergence.py

1. The residual against evaluations of the cell, for the unrolled network and for Picard, Anderson, Broyden, Newton-Krylov:
   of cells as training starts with them, which contract, and of the same cells after 300 steps of training to
   repeat what they saw five positions before, when they need not.
2. Broyden's iterations, and GMRES's of the backward, against sequence lengths of 16 to 128, for the trained TrellisNet and
   transformer cell.  That they hardly grow with the length holds for the transformer, which sees every position at once;
   the trained TrellisNet hands on from position to position, and needs more for longer sequences.  And the time of an
   iteration, of solves from 1e-2 to 1e-8: what a solve costs is the number of its iterations.
   What came out (seed 0): the trained TrellisNet, whose 60 layers have not come to rest, is solved to 1e-2 in 126
   evaluations by the plain iteration, 35 by Anderson, 51 by Broyden, 74 by Newton-Krylov, and to 1e-8 in 145, 113,
   152 and 189: it is far from the solution that acceleration pays. The transformer contracts after training as
   before it (19, 17, 16 and 46), and its 60 layers are its equilibrium. An iteration takes the same time to 1 % in
   solves of 51 and of 152, for the transformer to 30 % in solves of 5 and of 16, the first of which carry the
   start.
3. The error of the gradient against the forward and the backward tolerance: the larger of the two decides.

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models": convergence, and Broyden iterations by sequence length.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import COLOURS, figure, options, table
from deq_theorems.claims import claim
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, ForgivenWarning, cells, spectral_radius

UNROLLED = "unrolled, 60 layers"
KINDS = ("TrellisNet", "Transformer")
LAG, LIMIT = 5, 1000  # positions back; steps that a solver gets


def make(kind: str, features: int, seed: int) -> cells.Cell:
    """A cell as training starts with it, but in float64."""
    torch.manual_seed(seed)
    if kind == "TrellisNet":
        return cells.TrellisNet(features, features, scale=0.9, dtype=torch.float64)
    return cells.Transformer(features, features, heads=4, hidden=2 * features, scale=0.7, dtype=torch.float64)


@functools.lru_cache(maxsize=8)
def trained(kind: str, features: int, seed: int, steps: int) -> tuple[cells.Cell, list[float], float]:
    """A cell after ``steps`` steps of Adam, the losses, and the share of samples that were solved on the way.

    The layer is a plain :class:`DEQ`; the task is to say what the sequence was ``LAG`` positions before.
    """
    cell = make(kind, features, seed)
    layer, read = DEQ(cell, rtol=1e-3, rule=ik.Implicit("gmres", rtol=1e-2)), nn.Linear(features, features).double()
    optimizer = torch.optim.Adam([*layer.parameters(), *read.parameters()], lr=1e-2)
    losses, solved = list[float](), 0.0
    for _ in range(steps):
        x = torch.randn(8, 24, features, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgivenWarning)  # counted below
            z = layer(x)
        loss = (read(z)[:, LAG:] - x[:, :-LAG]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        assert layer.solution is not None
        solved += float(layer.solution.converged.double().mean()) / steps
    return cell, losses, solved if steps else 1.0


def prepared(
    kind: str, features: int, length: int, seed: int, steps: int = 0
) -> tuple[cells.Cell, Tensor, tuple[Tensor, ...], Tensor]:
    """The cell after ``steps`` of training, an input, what is computed of it once, and zeros for a state."""
    cell, _, _ = trained(kind, features, seed, steps)
    torch.manual_seed(seed + 1)
    x = torch.randn(1, length, features, dtype=torch.float64)
    with torch.no_grad():
        return cell, x, cell.inject(x), x.new_zeros(1, *cell.state_shape(x))


# ---------------------------------------------------------------------------------------------- residual by evaluations
def traces(
    kind: str, features: int, length: int, seed: int, steps: int
) -> tuple[dict[str, list[tuple[int, float]]], float]:
    """(evaluations, relative residual) after each step, by solver, a product with the Jacobian counted as an evaluation;
    and the largest Ritz value of the Jacobian at the equilibrium (not its spectral radius, where it is far from normal, as
    that of a causal cell)."""
    cell, _, injected, z0 = prepared(kind, features, length, seed, steps)
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

            options: dict[str, Any] = {"rtol": 1e-10, "atol": 0.0, "max_steps": LIMIT, "on_failure": "ignore"}
            ik.fixed_point(counted, z0, injected, solver=solver, batch_dims=1, callback=note, **options)
            found[solver if isinstance(solver, str) else "newton_krylov"] = points
        z = ik.fixed_point(cell.update, z0, injected, solver="relay", batch_dims=1, rtol=1e-10, atol=0.0).value
    return found, float(spectral_radius(cell.update, z, injected))


def to_reach(points: list[tuple[int, float]], residual: float) -> int | None:
    """Evaluations until the residual is as small."""
    return next((spent for spent, size in points if size <= residual), None)


# ------------------------------------------------------------------------------------------ iterations by length
def by_length(kind: str, features: int, length: int, seed: int, steps: int, rtol: float = 1e-6) -> dict[str, float]:
    """Iterations of a forward and a backward solve (infinite: not found), milliseconds an iteration, and those of the cell
    alone."""
    cell, x, injected, z0 = prepared(kind, features, length, seed, steps)
    result: dict[str, float] = {}
    for solver in ("picard", "anderson"):
        options: dict[str, Any] = {"rtol": rtol, "atol": 0.0, "max_steps": LIMIT, "on_failure": "ignore"}
        with torch.no_grad():
            run = ik.fixed_point(cell.update, z0, injected, solver=solver, batch_dims=1, **options)
        result[solver] = int(run.steps.max()) if bool(run.converged.all()) else math.inf
    cotangent = torch.randn_like(z0)
    start = time.process_time()
    rule = ik.Implicit("gmres", rtol=rtol)
    limits: dict[str, Any] = {"rtol": rtol, "atol": 0.0, "max_steps": LIMIT, "on_failure": "ignore"}
    solution = ik.fixed_point(cell.update, z0, cell.inject(x), solver="broyden", batch_dims=1, rule=rule, **limits)
    middle = time.process_time()
    solution.value.backward(cotangent)
    end = time.process_time()
    assert solution.backward is not None
    result["forward"], result["backward"] = (
        int(found.steps.max()) if bool(found.converged.all()) else math.inf for found in (solution, solution.backward)
    )
    result["forward_ms"] = 1e3 * (middle - start) / solution.evaluations
    result["backward_ms"] = 1e3 * (end - middle) / max(1, int(solution.backward.steps.max()))
    with torch.no_grad():
        start = time.process_time()
        for _ in range(5):
            cell.update(z0, *injected)
        result["cell_ms"] = 1e3 * (time.process_time() - start) / 5
    return result


def by_effort(kind: str, features: int, length: int, seed: int, steps: int) -> dict[float, tuple[int, float, float]]:
    """By tolerance: Broyden's evaluations, and CPU milliseconds of one: the median of nine solves and half the distance of
    their quartiles.  The solves of all tolerances take turns, so that other work on the machine meets all of them."""
    cell, _, injected, z0 = prepared(kind, features, length, seed, steps)
    tolerances, times, counts = (1e-2, 1e-4, 1e-6, 1e-8), dict[float, list[float]](), dict[float, int]()
    for _ in range(9):
        for rtol in tolerances:
            limits: dict[str, Any] = {"rtol": rtol, "atol": 0.0, "max_steps": LIMIT, "on_failure": "ignore"}
            start = time.process_time()
            with torch.no_grad():
                run = ik.fixed_point(cell.update, z0, injected, solver="broyden", batch_dims=1, **limits)
            times.setdefault(rtol, []).append(1e3 * (time.process_time() - start) / run.evaluations)
            counts[rtol] = run.evaluations
    quartiles = {rtol: torch.tensor(t).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist() for rtol, t in times.items()}
    return {rtol: (counts[rtol], q[1], (q[2] - q[0]) / 2) for rtol, q in quartiles.items()}


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


def draw(
    folder: Path,
    found: dict[tuple[str, str], dict[str, list[tuple[int, float]]]],
    iterations: dict[tuple[str, int], dict[str, float]],
    errors: dict[tuple[float, float], float],
    length: int,
) -> None:
    """Two pictures of two panels each."""
    with figure(folder / "deq_convergence.png", 2, size=(7.2, 3.4)) as axes:
        for axis, kind in zip(axes, KINDS, strict=True):
            for name, points in found[kind, "trained"].items():
                thick = {"linewidth": 3, "alpha": 0.6} if name == UNROLLED else {}
                axis.loglog(*zip(*points, strict=True), label=name.replace("_", "-"), **thick)
            axis.set(xlabel="evaluations of the cell", ylabel="relative residual", ylim=(1e-11, None))
            axis.set_title(f"{kind}, trained, {length} positions")
        axes[0].legend(loc="lower left")
    with figure(folder / "deq_convergence_length.png", 2, size=(7.2, 3.4)) as axes:
        lengths = sorted({T for _, T in iterations})
        for kind, colour in zip(KINDS, COLOURS[:2], strict=True):
            for what, style in (("forward", "o-"), ("backward", "s--")):
                counts = [iterations[kind, T][what] for T in lengths]
                axes[0].plot(lengths, counts, style, color=colour, label=f"{kind}, {what}", markersize=4)
        axes[0].set(xscale="log", ylim=(0, None), xlabel="sequence length (positions)", ylabel="iterations to 1e-6")
        axes[0].set_xticks(lengths, [str(T) for T in lengths])
        axes[0].set_title("iterations by length, trained")
        axes[0].minorticks_off()
        axes[0].legend()
        tolerances = sorted({f for f, _ in errors}, reverse=True)
        for f in tolerances:
            line = [errors[f, b] for b in tolerances]
            axes[1].loglog(tolerances, line, "o-", label=f"forward {f:.0e}", markersize=3)
        axes[1].set(xlabel="backward tolerance", ylabel="relative error of the gradient")
        axes[1].set_title("gradient error, TrellisNet")
        axes[1].legend(fontsize=6.5)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the three parts; returns their numbers."""
    chosen = options(__doc__).parse_args(arguments)
    features, length = (8, 24) if chosen.quick else (16, 64)
    lengths = (16, 64) if chosen.quick else (16, 32, 64, 128)
    tolerances = (1e-1, 1e-4, 1e-8) if chosen.quick else (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10)

    steps = 40 if chosen.quick else 300
    found: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    rows, radii = [], {}
    for kind in KINDS:
        for when, count in (("at first", 0), ("trained", steps)):
            found[kind, when], radii[kind, when] = traces(kind, features, length, chosen.seed, count)
            for name, points in found[kind, when].items():
                reached = (str(to_reach(points, goal) or "-") for goal in (1e-2, 1e-4, 1e-6, 1e-8))
                rows.append((kind, when, radii[kind, when], name, *reached))
    title = f"Evaluations to a relative residual, {length} positions, {features} features"
    print(table(title, ("cell", "", "Ritz value of J", "method", "1e-2", "1e-4", "1e-6", "1e-8"), rows))
    for kind in KINDS:
        _, losses, solved = trained(kind, features, chosen.seed, steps)
        claim(
            losses[-1] < 0.97 * losses[0],
            f"{kind}: {steps} steps, {losses[0]:.2f} to {losses[-1]:.2f}, {solved:.1%} solved",
        )
        for when in ("at first", "trained"):
            needed = {name: to_reach(points, 1e-8) or math.inf for name, points in found[kind, when].items()}
            claim(
                min(needed["anderson"], needed["broyden"]) < LIMIT,
                f"{kind} {when}: acceleration reaches 1e-8: {needed}",
            )
        first, later = (to_reach(found[kind, when]["anderson"], 1e-8) or LIMIT for when in ("at first", "trained"))
        print(f"  {kind}: Anderson needs {first} evaluations to 1e-8 at first, {later} after training")

    columns = ("picard", "anderson", "forward", "backward", "forward_ms", "backward_ms", "cell_ms")
    iterations = {(kind, T): by_length(kind, features, T, chosen.seed, steps) for kind in KINDS for T in lengths}
    rows = [(kind, T, *(one[name] for name in columns)) for (kind, T), one in iterations.items()]
    headings = (
        "cell",
        "length",
        "Picard",
        "Anderson",
        "Broyden",
        "GMRES backward",
        "ms forward",
        "ms backward",
        "ms cell",
    )
    print(table("Iterations to 1e-6 by sequence length; milliseconds an iteration", headings, rows))
    for kind in KINDS:
        counts = [iterations[kind, T]["forward"] for T in lengths]
        growth, stretch = counts[-1] / counts[0], lengths[-1] / lengths[0]
        text = f"{kind}, trained: {counts} iterations; {growth:.1f} times as many for {stretch:g} times the length"
        if kind == "Transformer":
            claim(growth < stretch**0.5, text)
        else:  # what it says travels from position to position, so that a longer sequence needs more
            claim(growth < 1.5 * stretch, text)

    efforts = {kind: by_effort(kind, features, length, chosen.seed, steps) for kind in KINDS}
    rows = [
        (kind, f"{rtol:.0e}", n, f"{ms:.3f} ± {half:.3f}")
        for kind in KINDS
        for rtol, (n, ms, half) in efforts[kind].items()
    ]
    print(table("Milliseconds an evaluation of Broyden's", ("cell", "tolerance", "evaluations", "ms each"), rows))
    for kind, effort in efforts.items():
        (fewest, least, _), (most, more, _) = min(effort.values()), max(effort.values())
        claim(most > 1.5 * fewest, f"{kind}: {fewest} to {most} evaluations")
        claim(0.6 < more / least < 1.6, f"{kind}: each takes {more / least:.2f} times as long in the longest solve")

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

    draw(chosen.output, found, iterations, errors, length)
    return {
        "traces": found,
        "radii": radii,
        "iterations": iterations,
        "efforts": efforts,
        "gradient": errors,
        "ratio": ratio,
    }


if __name__ == "__main__":
    main()
