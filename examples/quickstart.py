"""An equilibrium classifier on scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels.

The hidden state of an image ``x`` is defined by an equation, not by a stack of layers:

    z = tanh(W z + U x + b)

``ik.fixed_point`` solves it for every image of the batch, and the implicit rule differentiates the solution exactly,
whatever solver found it.  The example trains the classifier twice, with the built-in Anderson acceleration and with a
solver that it registers itself, and compares them.

    make demo            (or: python examples/quickstart.py [--epochs 25])
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm

import implicitkit as ik

PICTURE = Path(__file__).parent / "output" / "quickstart.png"


# ------------------------------------------------------------------------------------------------- a solver of one's own
@ik.register_solver("heavy_ball", solves="fixed_point")
@dataclass(frozen=True)
class HeavyBall(ik.Method):
    """Fixed-point steps with momentum (Polyak, 1964), forgotten by a sample where it points backwards.

    ``f`` maps a matrix ``(batch, n)`` to another.  Tolerances, freezing samples that have converged, traces and failure
    are not this class's business.
    """

    momentum: float = 0.5

    def init(self, f: Any, z: Tensor) -> Any:
        return torch.zeros_like(z)

    def step(self, f: Any, z: Tensor, velocity: Tensor) -> tuple[Tensor, Any]:
        residual = f(z) - z
        backwards = (velocity * residual).sum(1, keepdim=True) < 0
        velocity = residual + torch.where(backwards, 0, self.momentum * velocity)
        return z + velocity, velocity


# ------------------------------------------------------------------------------------------------------------ the model
class Cell(nn.Module):
    """``tanh(W z + U x + b)`` with the rows of ``W`` scaled so that it is a contraction: one equilibrium, always."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.inject = nn.Linear(inputs, width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        rows = self.weight.abs().sum(1, keepdim=True)
        return torch.tanh(z @ (self.weight * (0.95 / rows.clamp(min=0.95))).T + self.inject(x))


class Classifier(nn.Module):
    """Ten scores, read linearly from the equilibrium of the cell."""

    def __init__(self, solver: Any, inputs: int = 64, width: int = 64, rtol: float = 1e-4) -> None:
        super().__init__()
        self.solver, self.width, self.rtol = solver, width, rtol
        self.cell = Cell(inputs, width)
        self.read = nn.Linear(width, 10)

    def equilibrium(self, x: Tensor, **options: Any) -> ik.Solution:
        """Solve ``z = cell(z, x)``: one sample a row, and ``x`` has its samples in dimension 0."""
        z0 = x.new_zeros(len(x), self.width)
        rule = ik.Implicit(linear_solver="gmres", rtol=self.rtol)
        return ik.fixed_point(
            self.cell,
            z0,
            (x,),
            batch_dims=1,
            in_dims=(0,),
            solver=self.solver,
            rule=rule,
            rtol=self.rtol,
            atol=0.0,
            **options,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ik.Solution]:
        solution = self.equilibrium(x)
        return self.read(solution.value), solution


class Data(NamedTuple):
    """Images as rows with entries in [0, 1], and their digits."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load() -> Data:
    """The digits, shuffled; every fifth image is kept for the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    test = torch.arange(len(y)) % 5 == 0
    return Data(x[~test], y[~test], x[test], y[test])


class Run(NamedTuple):
    """What came of one training."""

    model: Classifier
    accuracy: float
    evaluations: int
    seconds: float
    trace: Tensor


def train(solver: str, data: Data, epochs: int, batch: int = 128) -> Run:
    """Train from the same start and in the same order of images, whatever the solver."""
    torch.manual_seed(0)
    model = Classifier(solver)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    evaluations, start = 0, time.perf_counter()
    for _ in (bar := tqdm(range(epochs), desc=solver.rjust(8), unit="epoch")):
        for rows in torch.randperm(len(data.train_y)).split(batch):
            scores, solution = model(data.train_x[rows])
            loss = nn.functional.cross_entropy(scores, data.train_y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            evaluations += solution.evaluations
        bar.set_postfix(loss=f"{loss.item():.3f}", steps=f"{solution.steps.float().mean():.1f}")
    seconds = time.perf_counter() - start
    with torch.no_grad():
        tested = model.equilibrium(data.test_x, trace=True)
        accuracy = (model.read(tested.value).argmax(1) == data.test_y).float().mean().item()
    assert tested.trace is not None
    return Run(model, accuracy, evaluations, seconds, tested.trace)


# ----------------------------------------------------------------------------------------------------------- the checks
def derivative_error(run: Run, data: Data, step: float = 1e-5) -> float:
    """Relative error of the implicit derivative against central differences, in float64, along a random direction."""
    model = Classifier(run.model.solver, rtol=1e-12).double()
    model.load_state_dict(run.model.state_dict())
    x, y = data.test_x[:32].double(), data.test_y[:32]
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    length = torch.stack([d.square().sum() for d in direction]).sum().sqrt()
    direction = [d / length for d in direction]

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x)[0], y)

    gradients = torch.autograd.grad(loss(), parameters)
    exact = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
    values = []
    with torch.no_grad():
        for shift in (step, -2 * step):
            for p, d in zip(parameters, direction, strict=True):
                p += shift * d
            values.append(loss().item())
    return abs(exact - (values[0] - values[1]) / (2 * step)) / abs(exact)


def draw(runs: dict[str, Run]) -> None:
    """Residual norms over the steps: the median of the test images, and the range of the middle nine tenths."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        norms = run.trace.flatten(1)
        low, middle, high = torch.quantile(norms, torch.tensor([0.05, 0.5, 0.95]), dim=1)
        steps = torch.arange(len(norms))
        (line,) = axes.semilogy(steps, middle, marker="o", markersize=3, label=name)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel="residual norm  |cell(z, x) - z|", title="Equilibria of the test images")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    axes.grid(alpha=0.3)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    """Train with both solvers, compare, check and draw."""
    parser = argparse.ArgumentParser(description="An equilibrium classifier on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=25)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # the matrices are small: on a busy machine, sharing them out costs far more
    data = load()
    runs = {solver: train(solver, data, epochs) for solver in ("anderson", "heavy_ball")}
    errors = {name: derivative_error(run, data) for name, run in runs.items()}

    print(f"\n{'solver':<10}{'test accuracy':>15}{'evaluations':>13}{'seconds':>9}{'derivative error':>18}")
    for name, run in runs.items():
        print(f"{name:<10}{run.accuracy:>15.2%}{run.evaluations:>13,}{run.seconds:>9.1f}{errors[name]:>18.1e}")
    draw(runs)
    print(f"\nconvergence traces: {PICTURE}")

    for name, run in runs.items():
        assert run.accuracy >= 0.95, f"{name}: test accuracy {run.accuracy:.2%} is below 95 %"
        assert errors[name] < 1e-6, f"{name}: the derivative is off by {errors[name]:.1e} (relative)"


if __name__ == "__main__":
    main()
