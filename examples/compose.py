"""Equilibrium modules wired into a graph: solved as one map, block by block, or by hand, with the same derivatives.

    python examples/compose.py [--plot PATH]

An encoder feeds two modules that listen to each other (a feedback loop); a head reads both.  The script prints the
composition, solves it in three ways, compares values and gradients with nested solves by hand, shows what each way costs,
and lets the analysis say which to use.  Last, an ordinary network becomes one weight-tied equilibrium.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import implicitkit as ik

D = torch.float64


class Cell(nn.Module):
    """``tanh(z W + sum_i u_i U_i + b)``, a contraction in ``z``."""

    def __init__(self, size: int, *reads: int) -> None:
        super().__init__()
        W = torch.randn(size, size, dtype=D)
        self.W = nn.Parameter(0.8 * W / torch.linalg.matrix_norm(W, 2))
        self.U = nn.ParameterList(torch.randn(r, size, dtype=D) / (2 * r**0.5) for r in reads)
        self.b = nn.Parameter(torch.zeros(size, dtype=D))

    def forward(self, z: Tensor, *reads: Tensor) -> Tensor:
        """The map."""
        return torch.tanh(z @ self.W + sum(u @ U for u, U in zip(reads, self.U, strict=True)) + self.b)


def by_hand(nodes: dict[str, Cell], x: Tensor, start: dict[str, Tensor]) -> Tensor:
    """The same equilibrium without composition: one solve after another, the loop as a solve inside a solve."""
    options = {"batch_dims": 1, "rtol": 1e-12, "atol": 1e-12, "rule": ik.Implicit(rtol=1e-12)}
    code = ik.fixed_point(nodes["encoder"], start["encoder"], (x,), **options).value

    def right_of(left: Tensor) -> Tensor:
        return ik.fixed_point(nodes["right"], start["right"], (left,), **options).value

    left = ik.fixed_point(lambda z, code: nodes["left"](z, code, right_of(z)), start["left"], (code,), **options).value
    return ik.fixed_point(nodes["head"], start["head"], (left, right_of(left)), **options).value


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--plot", help="write a picture of the graph there (needs matplotlib)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"encoder": 8, "left": 6, "right": 6, "head": 3}
    nodes = {"encoder": Cell(8, 4), "left": Cell(6, 8, 6), "right": Cell(6, 6), "head": Cell(3, 6, 6)}
    joint = ik.compose(
        {
            "encoder": (nodes["encoder"], "x"),
            "left": (nodes["left"], "encoder", "right"),
            "right": (nodes["right"], "left"),
            "head": (nodes["head"], "left", "right"),
        },
        output="head",
    )
    print(joint)
    x = torch.randn(16, 4, dtype=D, requires_grad=True)
    start = {name: torch.zeros(16, size, dtype=D) for name, size in sizes.items()}
    parameters = [p for cell in nodes.values() for p in cell.parameters()]

    want = by_hand(nodes, x, start)
    wanted = torch.autograd.grad(want.pow(2).sum(), [x, *parameters])
    ways = {"joint": "anderson", "blocks": ik.Blocks(), "blocks, concurrent": ik.Blocks(mode="concurrent")}
    rule = ik.Implicit(rtol=1e-12)
    for name, solver in ways.items():
        solution = ik.solve(joint, start, (x,), solver=solver, rule=rule, batch_dims=1, rtol=1e-12, atol=1e-12)
        value = joint.output(solution.value)
        gradients = torch.autograd.grad(value.pow(2).sum(), [x, *parameters])
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, wanted, strict=True))
        off = float((value - want).detach().abs().max())
        print(f"\n{name}: value off by {off:.1e}, gradients by {error:.1e} (relative)")
        if solution.blocks is None:
            print(f"{solution.evaluations} evaluations of every node, {4 * solution.evaluations} in all")
        else:
            print(solution.blocks)
        assert error < 1e-9

    print()
    print(joint.analyse(solution.value, (x,), batch_dims=1))

    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    tied = ik.tie(network)
    found = ik.solve(tied, tied.start(x), (x,), solver="picard", batch_dims=1)
    error = float((tied.output(found.value) - network(x)).detach().abs().max())
    print(f"\na network of {tied.depth} layers as one equilibrium: {int(found.steps.max())} steps, off by {error:.1e}")

    if arguments.plot:
        drawn = joint.draw().figure
        for path in (Path(arguments.plot), Path(arguments.plot).with_suffix(".pdf")):
            drawn.savefig(path, dpi=300, bbox_inches="tight")
        print(f"figure: {arguments.plot}, and as a PDF beside it")


if __name__ == "__main__":
    main()
