"""Learning the parameters of convex programs: a sparsemax layer, a learned polyhedron, and a Hessian through a program.

python examples/convex_layer.py
"""

from __future__ import annotations

import cvxpy as cp
import torch
from torch import Tensor, nn

from implicitkit_cvxpy import ConvexLayer

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def sparsemax() -> None:
    """The projection onto the simplex as the last layer of a classifier: probabilities that can be exactly zero."""
    scores, p = cp.Parameter(3), cp.Variable(3)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(p - scores)), [p >= 0, cp.sum(p) == 1]), [scores], [p])
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    labels = torch.randint(3, (60,))
    points = centres[labels] + 0.6 * torch.randn(60, 2)
    model = nn.Linear(2, 3)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    wanted = nn.functional.one_hot(labels, 3)
    for step in range(40):
        (probabilities,) = layer(model(points))
        loss = (probabilities - wanted).square().sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in (0, 39):
            accuracy = (probabilities.argmax(1) == labels).double().mean()
            zeros = (probabilities < 1e-12).double().mean()
            print(f"sparsemax   step {step:2d}  loss {loss:.4f}  accuracy {accuracy:.2f}  exact zeros {zeros:.2f}")


def learned_polyhedron() -> None:
    """Constraints ``A x <= b`` recovered from projections onto the set that they define."""
    target, A, b, x = cp.Parameter(2), cp.Parameter((4, 2)), cp.Parameter(4), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x - target)), [A @ x <= b]), [target, A, b], [x])
    box = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    points = 2 * torch.randn(100, 2)
    (observed,) = layer(points, box, torch.tensor([0.5, 0.8, 0.3, 1.0]))
    sides = nn.Parameter(box + 0.3 * torch.randn(4, 2))
    offsets = nn.Parameter(torch.ones(4))
    optimiser = torch.optim.Adam([sides, offsets], lr=0.03)
    for step in range(80):
        (projected,) = layer(points, sides, offsets)
        loss = (projected - observed).square().sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in (0, 79):
            print(f"polyhedron  step {step:2d}  loss {loss:.2e}")


def hessian() -> None:
    """A second derivative through a program: ``x(q) = q``, ``q = t^2``, ``L = x^2``, so that ``L''(2) = 48``."""
    q, x = cp.Parameter(), cp.Variable()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.square(x - q))), [q], [x])

    def loss(t: Tensor) -> Tensor:
        return layer(t**2)[0] ** 2

    t = torch.tensor(2.0)
    print(
        f"hessian     {torch.func.hessian(loss)(t):.1f}, and of a batch "
        f"{torch.func.vmap(torch.func.hessian(loss))(t + torch.arange(3)).tolist()}"
    )


if __name__ == "__main__":
    sparsemax()
    learned_polyhedron()
    hessian()
