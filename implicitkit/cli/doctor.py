r"""A self-test of an installation in ten seconds: each part does one small thing whose answer is known by a formula.

    python -m implicitkit doctor

The equation of most tests is ``z^3 + z = \theta`` with the root ``z = 1`` at ``\theta = 2``, where ``dz/d\theta = 1/4`` and
``d^2z/d\theta^2 = -6 z / (3 z^2 + 1)^3 = -3/32``.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.problem.root import Root
from implicitkit.registry.plugins import plugins
from implicitkit.solver.catalogue import get_solver
from implicitkit.solving import verbs
from implicitkit.solving.layer import implicit

_START = 0.7


@dataclass(frozen=True)
class Finding:
    """What one test found. ``problem``: one line, empty if all is well. ``seconds``: how long it took."""

    name: str
    problem: str
    seconds: float


def examine() -> Iterator[Finding]:
    """Run every test that this installation offers: the core, one for each device, one for each plugin."""
    for name, test in _tests().items():
        begun = time.perf_counter()
        try:
            test()
            problem = ""
        except Exception as error:  # whatever it is: the doctor reports it and goes on
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).partition("\n")[0]
            problem = f"{type(error).__name__}: {said} ({where.filename}:{where.lineno})"
        yield Finding(name, problem, time.perf_counter() - begun)
    for plugin in plugins():
        problem = "" if plugin.loaded else f"{plugin.distribution} {plugin.version} failed to load: {plugin.error}"
        yield Finding(f"plugin {plugin.name}", problem, 0.0)


def devices() -> list[str]:
    """The devices that torch can use here."""
    found = ["cpu"]
    found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _tests() -> dict[str, Callable[[], None]]:
    tests: dict[str, Callable[[], None]] = {
        "derivatives of a root, first and second": _orders,
        "a module in the function": _module,
        "a batch, by vmap and by batch_dims": _batch,
        "a black box of SciPy": _scipy,
        "a solver of one's own": _own,
        "a quadratic program": _program,
        "a failure is raised": _failure,
    }
    return tests | {f"device {name}": lambda name=name: _device(name) for name in devices()}


def _cubic(z: Tensor, theta: Tensor) -> Tensor:
    return z**3 + z - theta


def _root(theta: Tensor, **options: Any) -> Tensor:
    return verbs.root(_cubic, torch.full_like(theta, _START), (theta,), **options).value


def _expect(value: Any, wanted: float, tolerance: float = 1e-6) -> None:
    if not bool((torch.as_tensor(value) - wanted).abs().max() <= tolerance):
        raise AssertionError(f"expected {wanted}, got {value}")


def _orders() -> None:
    theta = torch.tensor(2.0, dtype=torch.float64)
    _expect(_root(theta), 1.0)
    _expect(torch.func.grad(_root)(theta), 0.25)
    _expect(torch.func.jacfwd(_root)(theta), 0.25)
    _expect(torch.func.hessian(_root)(theta), -3 / 32)


def _module() -> None:
    layer = torch.nn.Linear(3, 3).double()
    with torch.no_grad():
        layer.weight.copy_(0.5 * torch.eye(3))
    z = verbs.fixed_point(layer, torch.zeros(3, dtype=torch.float64)).value  # (I - W)^-1 b = 2 b
    (slope,) = torch.autograd.grad(z.sum(), layer.bias)
    _expect(slope, 2.0)


def _batch() -> None:
    theta = torch.tensor([2.0, 10.0], dtype=torch.float64)
    wanted = torch.tensor([1 / 4, 1 / 13], dtype=torch.float64)
    _expect(torch.vmap(torch.func.grad(_root))(theta) - wanted, 0.0)
    given = theta.clone().requires_grad_()
    _expect(torch.autograd.grad(_root(given, batch_dims=1).sum(), given)[0] - wanted, 0.0)


def _scipy() -> None:
    get_solver("scipy.root.hybr")
    _expect(torch.func.grad(lambda t: _root(t, solver="scipy.root.hybr"))(torch.tensor(2.0, dtype=torch.float64)), 0.25)


def _own() -> None:
    own = implicit(Root(_cubic))(lambda z0, theta: torch.ones_like(theta))
    _expect(torch.func.grad(lambda t: own(torch.zeros_like(t), t))(torch.tensor(2.0, dtype=torch.float64)), 0.25)


def _program() -> None:
    """The projection of ``(1, 0)`` on ``z_1 + z_2 = 0`` is ``(1/2, -1/2)``, and moves by half of what the point does."""
    P, A = torch.eye(2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)

    def first(q: Tensor) -> Tensor:
        return verbs.solve(QuadraticProgram(P, q, A, torch.zeros(1, dtype=torch.float64))).value[0]

    q = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    _expect(first(q), 0.5)
    _expect(torch.func.grad(first)(q)[0], -0.5)


def _failure() -> None:
    try:
        verbs.fixed_point(lambda z: 2 * z + 1, torch.zeros(1), solver="picard", max_steps=5)
    except RuntimeError:
        return
    raise AssertionError("a diverging solve raised nothing")


def _device(name: str) -> None:
    theta = torch.tensor([2.0, 10.0], device=name, requires_grad=True)
    z = _root(theta, batch_dims=1)
    _expect(torch.autograd.grad(z.sum(), theta)[0].cpu() - torch.tensor([1 / 4, 1 / 13]), 0.0, 1e-4)
