"""Train an equilibrium classifier on the handwritten digits of scikit-learn with the solver of this plugin.

pip install ./examples/custom_solver_plugin scikit-learn
python examples/custom_solver_plugin/train.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import implicitkit as ik


class Classifier(nn.Module):
    """``z = tanh(W z + U x)``, ``|W|_2 <= 0.9``; logits are linear in ``z``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.recurrent = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width, bias=False))
        self.inject, self.read = nn.Linear(64, width), nn.Linear(width, 10)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        inject, weight = self.inject(x), 0.9 * self.recurrent.weight
        solution = ik.fixed_point(
            lambda z, u, w: torch.tanh(z @ w.mT + u), torch.zeros_like(inject), (inject, weight),
            solver="squarem", batch_dims=1, in_dims=(0, None), rtol=1e-4,
        )  # fmt: skip
        self.steps = int(solution.steps.max())
        return self.read(solution.value)


def main(epochs: int = 15) -> float:
    """Train, print, and return the accuracy on the last 360 images."""
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for rows in torch.randperm(1437).split(96):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    accuracy = float((model(x[1437:]).argmax(1) == y[1437:]).float().mean())
    print(f"accuracy {accuracy:.3f}, {model.steps} steps of squarem in the last solve")
    return accuracy


if __name__ == "__main__":
    main()
