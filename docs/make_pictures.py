"""The picture of the README: python docs/make_pictures.py

Left: what autograd keeps for the backward pass of ``z = tanh(W z + x)``, by a recorded loop and by implicitkit, for more and
more steps.  Right: the relative error of first and second derivatives, of the loop, of the usual hook, of implicitkit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

import implicitkit as ik

sys.path.append(str(Path(__file__).parent / "_ext"))
import pictures

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
SIZE = 50
W = torch.randn(SIZE, SIZE)
W = 0.9 * W / torch.linalg.matrix_norm(W, 2)
X = torch.randn(SIZE)


def layer(z: Tensor, x: Tensor) -> Tensor:
    """The map."""
    return torch.tanh(W @ z + x)


def loop(x: Tensor, steps: int, f: Callable = layer) -> Tensor:
    """Recorded by autograd."""
    z = torch.zeros_like(x)
    for _ in range(steps):
        z = f(z, x)
    return z


def hook(x: Tensor, steps: int, f: Callable = layer) -> Tensor:
    """The usual first attempt: one recorded step, and a hook that solves for the gradient."""
    with torch.no_grad():
        z = loop(x, steps, f)
    z = f(z, x)
    _, pull = torch.func.vjp(lambda z: f(z, x), z.detach())

    def backward(v: Tensor) -> Tensor:
        u = v
        for _ in range(steps):
            u = v + pull(u)[0]
        return u

    z.register_hook(backward)
    return z


def implicit(x: Tensor, steps: int, f: Callable = layer) -> Tensor:
    """implicitkit, with as many steps."""
    options = {"solver": "picard", "rtol": 1e-15, "atol": 0.0, "max_steps": steps, "on_failure": "ignore"}
    return ik.fixed_point(f, torch.zeros_like(x), (x,), **options).value


def saved(function: Callable[[Tensor, int], Tensor], steps: int) -> int:
    """Bytes that the backward pass keeps, beside W."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function(X.clone().requires_grad_(), steps)
    sizes.pop(W.untyped_storage().data_ptr(), None)
    assert kept.shape == X.shape
    return sum(sizes.values())


def errors(function: Callable[..., Tensor]) -> tuple[float, float]:
    """Relative errors of the first and second derivative of a scalar equilibrium, against their formulas."""
    t = torch.tensor(0.3, requires_grad=True)
    z = function(t, 300, lambda z, t: torch.tanh(0.6 * z + t))
    (first,) = torch.autograd.grad(z, t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    z = z.detach()
    s, k = 1 - z**2, 1 - 0.6 * (1 - z**2)
    exact = s / k, -2 * z * s / k**3
    return tuple(abs((got / wanted - 1).item()) for got, wanted in zip((first.detach(), second), exact, strict=True))  # type: ignore[return-value]


def main() -> None:
    """Draw."""
    steps = [5, 10, 20, 50, 100, 200, 500]
    pictures.style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.6, 2.9), layout="constrained", width_ratios=(2, 3))
    for name, function, style in (("implicitkit", implicit, "o-"), ("recorded loop", loop, "s--")):
        left.loglog(steps, [saved(function, n) / 1024 for n in steps], style, label=name)
    left.set(xlabel="steps of the solver", ylabel="KiB kept for backward")
    left.set_title("memory", fontsize=10)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08))
    names = ["recorded loop", "hook", "implicitkit"]
    found = [errors(function) for function in (loop, hook, implicit)]
    for k, name in enumerate(("first derivative", "second derivative")):
        heights = [max(error[k], 1e-16) for error in found]
        where = [i + 0.35 * k for i in range(3)]
        right.bar(where, heights, 0.33, bottom=0, label=name, color=pictures.COLOURS[2 + k])
    right.set(yscale="log", ylim=(1e-17, 10))
    right.set_title("relative error of derivatives", fontsize=10)
    right.set_xticks([i + 0.17 for i in range(3)], names)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08))
    if wrong := pictures.faults(figure):
        raise ValueError("; ".join(wrong))
    path = Path(__file__).parent / "pictures" / "readme.png"
    figure.savefig(path, dpi=150)
    print(f"{path.name}: second derivative of the hook off by {found[1][1]:.2f}, of implicitkit by {found[2][1]:.0e}")


if __name__ == "__main__":
    main()
