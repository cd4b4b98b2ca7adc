"""What the code in docstrings takes as given: it is run after ``COMMON`` and after what its own docstring presumes."""

from __future__ import annotations

COMMON = """
from dataclasses import dataclass

import scipy.optimize
import torch

import implicitkit as ik

objective = lambda z: (z - 1).square().sum(-1)
residuals = lambda z: torch.stack([z[0] - 1, z[1] - 2, z[0] * z[1] - 2])
residual = lambda z, theta: z**3 + z - theta
z0, theta = torch.ones(2), torch.tensor([2.0, 10.0])
scores = torch.randn(4, 3)
"""

SOLVER = """
import sys

class MySolver(ik.Method):
    "Newton's method with a damped step."

    def __init__(self, memory=2):
        self.memory = memory

    def step(self, f, z, state):
        return z - torch.linalg.solve(f.jacobian(z), f(z)[..., None])[..., 0], state

sys.modules["__main__"].MySolver = MySolver
ik.register_solver("my_solver", solves="root", override=True)(MySolver)
"""

PARTS = """
import sys
import implicitkit as ik

main = sys.modules["__main__"]
main.MyLinear = type("MyLinear", (ik.linear.LU,), {"__module__": "__main__"})
main.MyRule = type("MyRule", (ik.OneStep,), {"__module__": "__main__"})
ik.register_linear_solver("my_linear_solver", override=True)(main.MyLinear)
ik.register_rule("my_rule", override=True)(main.MyRule)
"""

DEQ = """
from implicitkit_deq import *
from implicitkit_deq import cells

cell = cells.MLP(32, 64)
layer = DEQ(cell)
x, y = torch.randn(4, 32), torch.randn(4, 64)
z = layer(x)
train = lambda: layer(x).sum().backward()
task_loss, criterion, head = torch.zeros(()), torch.nn.functional.mse_loss, torch.nn.Identity()
"""

CONVEX = """
import cvxpy as cp
from implicitkit_cvxpy import ConvexLayer

x, A, b = cp.Variable(3), cp.Parameter((4, 3)), cp.Parameter(4)
problem = cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b)), [x >= 0])
A_tensor, b_tensor = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
"""

# file and name of the docstring -> code that is run before it
PRESUMED = {
    "late_binding.py::<module>": "steps, dt, rhs, u = 3, 0.1, torch.sin, torch.ones(2)",
    "callbacks.py::progress": "cell = lambda z, x: 0.5 * z + x\nx = torch.ones(2)",
    "joint.py::compose": "f = lambda z, x: 0.5 * z + x\nv = lambda z, w: 0.5 * z + w",
    "tied.py::Tied": "network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())\nx = torch.ones(4, 2)",
    "fitting.py::curve_fit": "x = torch.linspace(0, 1, 9)\ny = 2 * torch.exp(-x)",
    "options.py::<module>": (
        "from implicitkit import Method\nfrom implicitkit.foundation.options import at_least, between, check_options"
    ),
    "couplings.py::KLTransport": "cost = torch.rand(3, 3)\nr = c = torch.full((3,), 1 / 3)",
    "couplings.py::KLBirkhoff": "scores = torch.randn(3, 3)",
    "fenchel_young.py::FenchelYoung": (
        "best = lambda s: torch.nn.functional.one_hot(s.argmax(-1), s.shape[-1]).to(s)\ncheapest_path = best\n"
        "labels = best(torch.randn(4, 3))\nscores.requires_grad_()"
    ),
    "direct_search.py::GoldenSection": "z0 = torch.zeros(3, 1)",
    "direct_search.py::NelderMead": "",
    "manifold/__init__.py::<module>": (
        "z0 = T0 = torch.eye(4)\nX0, data = torch.randn(5, 3), torch.randn(5, 3)\n"
        "def residuals(z, y=data):\n"
        "    T, x = (z, data) if torch.is_tensor(z) else (z['pose'], z['points'])\n"
        "    return {'at': x @ T[:3, :3].mT + T[:3, 3] - y, 'prior': 0.1 * (x - X0)}"
    ),
    "groups.py::UnitQuaternion": "residuals = lambda q: q - torch.tensor([0.6, 0.8, 0.0, 0.0])",
    "groups.py::SE3": "x = torch.randn(5, 3)\ny = x + 0.1",
    "groups.py::SO3": "a = torch.randn(5, 3)\nb = a[:, [1, 2, 0]]",
    "initial_value.py::InitialValue": "rhs = lambda t, y, theta: -theta * y\ny0, t = torch.ones(2), torch.linspace(0, 1, 5)",
    "series.py::Neumann": "inner = lambda w, theta: (w - theta).square().sum()\nw0 = torch.zeros(2)",
    "stale.py::Stale": (
        "residual = lambda z, x, theta: z**3 + z - theta - x\nz0, data = torch.ones(2), [(torch.zeros(2), None)]"
    ),
    "verbs.py::root": "c = torch.arange(5.0) + 1",
    "testing/__init__.py::<module>": SOLVER + PARTS,
    "conformance.py::check_linear_solver": PARTS,
    "conformance.py::check_rule": PARTS,
    "conformance.py::check_solver": SOLVER,
    "conformance.py::parametrize_with_checks": SOLVER,
    "implicitkit_cvxpy/__init__.py::<module>": CONVEX,
    "layer.py::ConvexLayer": CONVEX,
    "implicitkit_deq/__init__.py::<module>": DEQ,
    "shine.py::Shine": DEQ + "cell = cells.MLP(32, 64)",
    "layer.py::DEQ": DEQ,
    "monitor.py::Monitor": DEQ + "TensorBoard = lambda folder: lambda call, figures: None",
    "normalise.py::bound_weights": DEQ,
    "correction.py::fixed_point_correction": DEQ,
    "jacobian.py::jacobian_penalty": DEQ,
    "checkpoints.py::load_torchdeq": DEQ
    + 'model = torch.nn.Module()\nmodel.func = cells.MLP(32, 64)\ntorch.save(model.state_dict(), "model.pt")\n',
}
