"""Compositions to test on, each with a reference that solves the layers by hand, one after the other.

A loop is solved by nesting: its first node's equation over the solutions of the others, differentiated through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik

D = torch.float64
BATCH, N = 3, 5
TIGHT = {"batch_dims": 1, "rtol": 1e-13, "atol": 1e-13, "rule": ik.Implicit(rtol=1e-13)}


class Cell(nn.Module):
    """``tanh(z W + sum_i u_i U_i + b)``, a contraction in ``z`` for ``gain < 1``."""

    def __init__(self, *reads: int, size: int = N, gain: float = 0.6) -> None:
        super().__init__()
        W = torch.randn(size, size, dtype=D)
        self.W = nn.Parameter(gain * W / torch.linalg.matrix_norm(W, 2))
        self.U = nn.ParameterList(0.6 * torch.randn(r, size, dtype=D) / (r * size) ** 0.25 for r in reads)
        self.b = nn.Parameter(0.2 * torch.randn(size, dtype=D))

    def forward(self, z: Tensor, *reads: Tensor) -> Tensor:
        total = z @ self.W + self.b
        for read, U in zip(reads, self.U, strict=True):
            total = total + read @ U
        return torch.tanh(total)


class ConvCell(nn.Module):
    """A convolutional cell on ``(batch, 2, 4, 4)``, injected with an image of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, dtype=D)
        with torch.no_grad():
            self.conv.weight.mul_(0.4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(z) + x)


class Head(Cell):
    """A cell that reads an image, flattened."""

    def forward(self, z: Tensor, *reads: Tensor) -> Tensor:
        return super().forward(z, *(r.flatten(1) for r in reads))


@dataclass
class Built:
    """A composition, its start, its inputs, and the states of all nodes by hand."""

    joint: Any
    start: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    by_hand: Callable[..., dict[str, Tensor]]

    @property
    def leaves(self) -> list[Tensor]:
        """Everything there is a derivative for."""
        maps = [data["map"] for _, data in self.joint.graph.nodes(data=True)]
        parameters = {id(p): p for m in maps if isinstance(m, nn.Module) for p in m.parameters()}
        return [*parameters.values(), *self.inputs]


def zeros(size: int = N) -> Tensor:
    """A start."""
    return torch.zeros(BATCH, size, dtype=D)


_options: list[dict[str, Any]] = [TIGHT]


def solved(cell: Callable[..., Tensor], *reads: Tensor, start: Tensor | None = None) -> Tensor:
    """One layer, by hand."""
    z0 = zeros() if start is None else start
    return ik.fixed_point(cell, z0, reads, solver="anderson", **_options[-1]).value


def solved_with(
    options: dict[str, Any], by_hand: Callable[..., dict[str, Tensor]], *inputs: Tensor
) -> dict[str, Tensor]:
    """The layers by hand with other options than the tight ones."""
    _options.append(options)
    try:
        return by_hand(*inputs)
    finally:
        _options.pop()


def _input(*shape: int) -> Tensor:
    return torch.randn(BATCH, *(shape or (N,)), dtype=D, requires_grad=True)


def pair() -> Built:
    f, v = Cell(N), Cell(N)

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        w = solved(f, x)
        return {"f": w, "v": solved(v, w)}

    return Built(
        ik.compose({"f": (f, "x"), "v": (v, "f")}, output="v"), {"f": zeros(), "v": zeros()}, (_input(),), by_hand
    )


def arrow() -> Built:
    """The same by ``>>``, with names of its own."""
    f, v = Cell(N), Cell(N)
    joint = ik.FixedPoint(f) >> ik.FixedPoint(v)

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        w = solved(f, x)
        return {"cell": w, "cell_2": solved(v, w)}

    return Built(joint, {"cell": zeros(), "cell_2": zeros()}, (_input(),), by_hand)


def chain() -> Built:
    f, g, h = Cell(3, size=4), Cell(4, size=5), Cell(5, size=2)
    start = {"a": zeros(4), "b": zeros(5), "c": zeros(2)}

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        a = solved(f, x, start=start["a"])
        b = solved(g, a, start=start["b"])
        return {"a": a, "b": b, "c": solved(h, b, start=start["c"])}

    return Built(ik.compose({"a": (f, "x"), "b": (g, "a"), "c": (h, "b")}, output="c"), start, (_input(3),), by_hand)


def diamond() -> Built:
    f, left, right, out = Cell(N), Cell(N), Cell(N), Cell(N, N)
    nodes = {"out": (out, "left", "right"), "left": (left, "top"), "right": (right, "top"), "top": (f, "x")}

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        top = solved(f, x)
        a, b = solved(left, top), solved(right, top)
        return {"top": top, "left": a, "right": b, "out": solved(out, a, b)}

    return Built(ik.compose(nodes, output="out"), {n: zeros() for n in nodes}, (_input(),), by_hand)


def skip() -> Built:
    f, g, h = Cell(N), Cell(N, N), Cell(N, N, N)
    nodes = {"f": (f, "x"), "g": (g, "f", "x"), "h": (h, "g", "f", "x")}

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        a = solved(f, x)
        b = solved(g, a, x)
        return {"f": a, "g": b, "h": solved(h, b, a, x)}

    return Built(ik.compose(nodes, output="h"), {n: zeros() for n in nodes}, (_input(),), by_hand)


def fan_in() -> Built:
    """Two branches with inputs of their own; both use the same cell."""
    shared, out = Cell(N), Cell(N, N)
    nodes = {"one": (shared, "x"), "two": (shared, "y"), "out": (out, "one", "two")}

    def by_hand(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = solved(shared, x), solved(shared, y)
        return {"one": a, "two": b, "out": solved(out, a, b)}

    return Built(ik.compose(nodes, output="out"), {n: zeros() for n in nodes}, (_input(), _input()), by_hand)


def feedback() -> Built:
    a, b = Cell(N, N), Cell(N)

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        za = solved(lambda z, x: a(z, solved(b, z), x), x)
        return {"a": za, "b": solved(b, za)}

    joint = ik.compose({"a": (a, "b", "x"), "b": (b, "a")}, output="b")
    return Built(joint, {"a": zeros(), "b": zeros()}, (_input(),), by_hand)


def cycle() -> Built:
    """Three in a ring, read by a fourth."""
    a, b, c, out = Cell(N, N), Cell(N), Cell(N), Cell(N)
    nodes = {"a": (a, "c", "x"), "b": (b, "a"), "c": (c, "b"), "out": (out, "c")}

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        za = solved(lambda z, x: a(z, solved(c, solved(b, z)), x), x)
        zb = solved(b, za)
        zc = solved(c, zb)
        return {"a": za, "b": zb, "c": zc, "out": solved(out, zc)}

    return Built(ik.compose(nodes, output="out"), {n: zeros() for n in nodes}, (_input(),), by_hand)


def conv_mlp() -> Built:
    conv, head = ConvCell(), Head(32)
    image = torch.zeros(BATCH, 2, 4, 4, dtype=D)

    def by_hand(x: Tensor) -> dict[str, Tensor]:
        w = solved(conv, x, start=image)
        return {"conv": w, "mlp": solved(head, w)}

    joint = ik.compose({"conv": (conv, "x"), "mlp": (head, "conv")}, output="mlp")
    return Built(joint, {"conv": image, "mlp": zeros()}, (_input(2, 4, 4),), by_hand)


TABLE: dict[str, Callable[[], Built]] = {
    f.__name__: f for f in (pair, arrow, chain, diamond, skip, fan_in, feedback, cycle, conv_mlp)
}
