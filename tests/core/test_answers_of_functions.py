"""What functions of the user's answer where there is more than one way to write it: a callback, an event, a map that returns
a tensor as it is, an option given to the verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik

W = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64)
ZERO = torch.zeros(3, dtype=torch.float64)


def half(z: Tensor) -> Tensor:
    return 0.5 * torch.cos(z)


# -------------------------------------------------------------------------------------------------------------- callbacks
STOPS: dict[str, Callable[[Tensor], Any]] = {
    "python": lambda norm: bool(norm.max() < 1e-2),
    "torch": lambda norm: norm.max() < 1e-2,
    "one entry": lambda norm: (norm < 1e-2).all().reshape(1),
    "numpy": lambda norm: np.max(norm.numpy()) < 1e-2,
    "numpy array": lambda norm: np.array(np.max(norm.numpy()) < 1e-2),
}
GOES_ON: dict[str, Any] = {
    "none": None,
    "count": 1,
    "text": "stop",
    "list": [True],
    "number": torch.ones(()),
    "no": np.False_,
}


@pytest.mark.parametrize("row", STOPS)
@pytest.mark.parametrize("solver", ["picard", "auto"])
def test_a_callback_stops_in_any_spelling_of_true(row: str, solver: str) -> None:
    steps: list[int] = []

    def callback(step: int, z: Tensor, norm: Tensor) -> Any:
        steps.append(step)
        return STOPS[row](norm)

    solution = ik.fixed_point(
        half, ZERO.expand(2, 3), batch_dims=1, solver=solver, callback=callback, on_failure="ignore"
    )
    assert solution.status.tolist() == [ik.Status.STOPPED] * 2
    assert float(solution.residual_norm.max()) < 1e-2 and len(steps) == int(solution.steps.max())


@pytest.mark.parametrize("row", GOES_ON)
def test_what_else_a_callback_returns_is_no_answer(row: str) -> None:
    assert ik.fixed_point(half, ZERO, callback=lambda *_: GOES_ON[row]).converged


def test_a_callback_has_one_answer_for_all_samples() -> None:
    with pytest.raises(TypeError, match=r"callback returned 2 truth values, of shape \(2,\).*\.all\(\)"):
        ik.fixed_point(half, ZERO.expand(2, 3), batch_dims=1, callback=lambda step, z, norm: norm < 1e-3)


# ------------------------------------------------------------------------------------------- a tensor returned as it is
def plus(z: Tensor, a: Tensor) -> Tensor:
    return 0.5 * torch.cos(z) + a


def as_node(w: Tensor) -> Tensor:
    joint = ik.compose({"a": (lambda z: w,), "b": (plus, "a")}, output="b")
    found: Tensor = ik.solve(joint, {"a": ZERO, "b": ZERO}).value["b"]
    return found


def as_part(w: Tensor) -> Tensor:
    found: Tensor = ik.fixed_point(lambda z: {"a": w, "b": plus(z["b"], z["a"])}, {"a": ZERO, "b": ZERO}).value["b"]
    return found


def as_aux(w: Tensor) -> Tensor:
    solution = ik.fixed_point(lambda z: (plus(z, ZERO), w), ZERO, has_aux=True)
    aux: Tensor = solution.aux
    return plus(ZERO, aux) - 0.5 + ik.fixed_point(lambda z: plus(z, aux), ZERO).value - aux


def inside(w: Tensor) -> Tensor:
    return ik.fixed_point(lambda z: plus(z, ik.fixed_point(lambda u: w, ZERO).value), ZERO).value


RETURNED = {
    "alone": lambda w: ik.fixed_point(lambda z: plus(z, ZERO), ZERO).value + ik.fixed_point(lambda z: w, ZERO).value,
    "part of a state": as_part,
    "node of a graph": as_node,
    "aux": as_aux,
    "solve inside": inside,
}


def exact(row: str, w: Tensor) -> Tensor:
    def loop(a: Tensor) -> Tensor:
        z = ZERO
        for _ in range(80):
            z = plus(z, a)
        return z

    return loop(ZERO) + w if row == "alone" else loop(w)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["backward", "grad", "jacfwd", "vmap", "hessian"])
@pytest.mark.parametrize("row", RETURNED)
def test_a_captured_tensor_returned_as_it_is_has_its_derivative(row: str, way: str) -> None:
    def derivative(solve: Callable[[Tensor], Tensor]) -> Tensor:
        total = lambda w: solve(w).square().sum()  # noqa: E731
        if way == "backward":
            w = W.clone().requires_grad_()
            return torch.autograd.grad(total(w), w)[0]
        if way == "vmap":
            return torch.func.vmap(torch.func.grad(total))(torch.stack([W, 2 * W]))
        return {"grad": torch.func.grad, "jacfwd": torch.func.jacfwd, "hessian": torch.func.hessian}[way](total)(W)

    torch.testing.assert_close(derivative(RETURNED[row]), derivative(lambda w: exact(row, w)), rtol=1e-8, atol=1e-8)


# ----------------------------------------------------------------------------------------------------------------- others
@pytest.mark.parametrize("event", [lambda t, y: y[0] < 0.5, lambda t, y: (10 * y[0]).long() - 5])
def test_an_event_without_a_sign_is_refused(event: Callable[..., Tensor]) -> None:
    problem = ik.InitialValue(lambda t, y: -y, (0.0, 5.0), event=event)
    with pytest.raises(TypeError, match=r"event must return a real number, whose sign changes.*y - 0\.5, not y < 0\.5"):
        ik.solve(problem, torch.ones(1, dtype=torch.float64))


def test_an_option_of_a_part_of_ones_own_is_written_as_it_is() -> None:
    """Not as ``ik.Ponderous``, which there is none of."""

    @ik.register_solver("ponderous", solves="fixed_point", override=True)
    @dataclass(frozen=True)
    class Ponderous(ik.Method):
        """Short steps.

        Args:
            ponderosity: of the step.
        """

        ponderosity: float = 0.5

        def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
            return z + self.ponderosity * (f(z) - z), state

    with pytest.raises(TypeError, match=r"an option of Ponderous: solver=Ponderous\(ponderosity=\.\.\.\)"):
        ik.fixed_point(half, ZERO, solver="ponderous", ponderosity=0.3)  # type: ignore[call-arg]
