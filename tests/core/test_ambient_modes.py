"""What a caller's modes leave alone: values, and derivatives of values, are the same under each of them."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ, cells, condition_number, jacobian_penalty, scale_to_radius, spectral_radius

D = torch.float64
X = torch.tensor([0.6, -0.9, 1.3], dtype=D)


def _map(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.3 * z + x)


def _cell() -> cells.MLP:
    torch.manual_seed(0)
    return cells.MLP(3, 4).to(D)


def _at_rest(of: Callable[..., Any], **options: Any) -> Any:
    return of(_cell(), torch.zeros(1, 4, dtype=D), (X[None],), **options)


def _norm(cone: str) -> Tensor:
    """``min |z|^2 / 2 - p'z`` on a ball, a set of positive semidefinite matrices, below an exponential, above a power."""
    cp = pytest.importorskip("cvxpy")
    from implicitkit_cvxpy import ConvexLayer

    z, p = cp.Variable(3), cp.Parameter(3)
    constraint = {
        "second order": lambda: cp.norm(z) <= 0.5,
        "semidefinite": lambda: cp.bmat([[1.0, z[0]], [z[0], z[1]]]) >> 0,
        "exponential": lambda: cp.exp(z[0]) <= z[1],
        "power": lambda: cp.power(z[0], 3) <= z[1],
    }[cone]()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(z) / 2 - p @ z), [constraint]), [p], [z])
    return layer(X)[0]


def _radius() -> Tensor:
    layer = DEQ(_cell(), (4,), rtol=1e-9)
    scale_to_radius(layer, (0.1 * X[None],), 0.5)
    return layer(X[None]).detach()


def _constrained() -> ik.Solution:
    below = [ik.Inequality(lambda z, x: z - 1)]
    return ik.argmin(lambda z, x: (z - x).square().sum(), torch.zeros(3, dtype=D), (X,), constraints=below)


def _two() -> Any:
    node = ik.FixedPoint(_map)
    joint = ik.compose({"a": (node, "x"), "b": (node, "a")}, output="b")
    return joint, ik.solve(joint, {"a": torch.zeros(3, dtype=D), "b": torch.zeros(3, dtype=D)}, (X,)).value


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "certify, a fixed point": lambda: ik.certify(ik.fixed_point(_map, torch.zeros(3, dtype=D), (X,), rtol=1e-4)).error,
    "certify, a minimum": lambda: (
        ik.certify(
            ik.argmin(lambda z, x: (z - x).square().sum() + z.exp().sum(), torch.zeros(3, dtype=D), (X,), rtol=1e-4)
        ).error
    ),
    "degeneracy": lambda: ik.diagnostics.degeneracy(_constrained()).condition,
    "stability": lambda: (
        ik.diagnostics.stability(
            ik.steady_state(lambda z, x: x - z - z**3, torch.zeros(3, dtype=D), (X,))
        ).eigenvalues.real
    ),
    "analyse": lambda: torch.tensor(_two()[0].analyse(_two()[1], (X,)).joint_radius),
    "spectral radius": lambda: _at_rest(spectral_radius),
    "condition number": lambda: _at_rest(condition_number),
    "penalty": lambda: _at_rest(jacobian_penalty, exact=True),
    "scaled to a radius": _radius,
    "conformance": lambda: torch.tensor(ik.testing.check_solver("newton", raise_on_failure=False).passed),
    **{f"cone, {c}": lambda c=c: _norm(c) for c in ("second order", "semidefinite", "exponential", "power")},
}


def _slope(of: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    def slope() -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(of(x).sum(), x)[0]

    return slope


def _chain(z: Tensor, x: Tensor) -> Tensor:
    left, right = torch.nn.functional.pad(z, (1, 1))[:-2], torch.nn.functional.pad(z, (1, 1))[2:]
    return 2 * z - left - right + 0.1 * z**3 - x


def _cubic(z: Tensor, x: Tensor) -> Tensor:
    return z**3 + z - x


ZERO = torch.zeros(3, dtype=D)
DERIVATIVES: dict[str, Callable[[], Tensor]] = {
    "root": _slope(lambda x: ik.root(_cubic, ZERO, (x,)).value),
    "root, SciPy": _slope(lambda x: ik.root(_cubic, ZERO, (x,), solver="scipy.root.hybr").value),
    "root, bracket": _slope(lambda x: ik.root(_cubic, args=(x,), bracket=(-9.0, 9.0), batch_dims=1).value),
    "root, sparse": _slope(lambda x: ik.root(_chain, torch.zeros(150, dtype=D), (x.sum(),)).value),
    "fixed point": _slope(lambda x: ik.fixed_point(_map, ZERO, (x,)).value),
    "minimum": _slope(lambda x: ik.argmin(lambda z, x: ((z - x) ** 2).sum() + z.exp().sum(), ZERO, (x,)).value),
    "minimum, bounds": _slope(
        lambda x: ik.argmin(lambda z, x: ((z - x) ** 2).sum(), ZERO, (x,), bounds=(-0.5, 0.8)).value
    ),
    "fit": _slope(lambda x: ik.least_squares(lambda z, x: torch.cat([z - x, z**2]), ZERO, (x,)).value),
    "steady state": _slope(lambda x: ik.steady_state(lambda z, x: x - z - z**3, ZERO, (x,)).value),
    "trajectory": _slope(lambda x: ik.solve(ik.InitialValue(lambda t, y: -y, (0.0, 1.0)), x).value),
    "program": _slope(
        lambda x: (
            ik.solve(
                ik.QuadraticProgram(torch.eye(3, dtype=D), x, G=torch.eye(3, dtype=D), h=torch.full((3,), 0.2, dtype=D))
            ).value
        )
    ),
}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        with torch.autograd.detect_anomaly(check_nan=True):
            yield


MODES: dict[str, Callable[[], Any]] = {
    "anomaly": _anomaly,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),  # which leaves float64 alone
    "deterministic": _deterministic,
    "NumPy raises": lambda: np.errstate(all="raise"),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "without hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
    "forward level": torch.autograd.forward_ad.dual_level,
}
OFF: dict[str, Callable[[], Any]] = {"inference": torch.inference_mode, "no_grad": torch.no_grad}


def _rows() -> Iterator[Any]:
    for mode, context in (MODES | OFF).items():
        for name, function in (FUNCTIONS | ({} if mode in OFF else DERIVATIVES)).items():
            marks = pytest.mark.slow if name == "conformance" and mode not in ("inference", "forward level") else ()
            yield pytest.param(function, context, id=f"{name}-{mode}", marks=marks)


@functools.cache
def _outside(function: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(1)
    return function()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("function", "context"), list(_rows()))
def test_it_gives_what_it_gives_outside(function: Callable[[], Tensor], context: Callable[[], Any]) -> None:
    want = _outside(function)
    torch.manual_seed(1)
    with context():
        found = function()
    assert torch.isfinite(want.double()).all()
    torch.testing.assert_close(found.detach(), want.detach(), rtol=1e-9, atol=1e-12)
