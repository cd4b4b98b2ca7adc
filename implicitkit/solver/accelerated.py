"""Anderson acceleration of any method."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import adopts, check_arguments, part
from implicitkit.solver.base import Solver
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.anderson import Anderson
from implicitkit.solver.method import Method


@adopts("method", "solves", "max_size", "default_max_steps")
class Accelerated(Method):
    r"""``ik.Accelerated("gradient_descent")``: the method's step taken for a fixed-point map ``z -> step(z)``, and that map
    accelerated by Anderson mixing, with the safeguards of :class:`~implicitkit.Anderson`.

        ik.argmin(objective, z0, solver=ik.Accelerated(ik.GradientDescent(step_size=0.1)))

    With ``w_k = step(z_k)``, ``r_k = w_k - z_k``: ``z_{k+1} = w_k - dW gamma``, ``gamma = argmin |r_k - dR gamma|``
    (Walker & Ni 2011, eq. 2.2; Fang & Saad 2009 for minimisers; Mai & Johansson 2020 for proximal gradients).  It pays where
    a step is much the same map from one to the next: fixed step lengths, sweeps, splittings.  A method that has a memory of
    its own (lbfgs, broyden) sees points it did not choose, and gains little.  Convergence is judged by the problem's
    residual as everywhere; a sample that does badly goes back to its best point and on by plain steps of the method.

    Args:
        method: a configured :class:`~implicitkit.Method`, or the name of one. memory, ridge, period, safeguard, patience: as
            in :class:`~implicitkit.Anderson`; ``period=1`` (the default here) mixes in every step.

    Raises:
        TypeError: ``method`` is not iterative. ValueError: an option out of range.
    """

    name: ClassVar[str] = "accelerated"

    def __init__(
        self,
        method: Any,
        *,
        memory: int = 8,
        ridge: float | None = None,
        period: int | None = 1,
        safeguard: float = 4.0,
        patience: int = 50,
    ) -> None:
        check_arguments("Accelerated", method=(part("solver", Solver), method))
        method = get_solver(method)
        if not isinstance(method, Method):
            raise TypeError(f"Accelerated takes a method with steps; {method.name or type(method).__name__!r} has none")
        self.method = method
        self.mixing = Anderson(memory=memory, ridge=ridge, period=period, safeguard=safeguard, patience=patience)

    def __repr__(self) -> str:
        return f"Accelerated({self.method!r}, memory={self.mixing.memory})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accelerated) and (self.method, self.mixing) == (other.method, other.mixing)

    def __hash__(self) -> int:
        return hash((type(self.method), self.mixing))

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        return {"method": self.method.init(f, z), "mixing": self.mixing.init(f, z)}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        plain, inner = self.method.step(f, z, state["method"])
        usable = torch.isfinite(plain).all(1, keepdim=True)
        view: Any = _Map(f, torch.where(usable, plain, z), z)
        z_next, mixing = self.mixing.step(view, z, state["mixing"])
        return torch.where(usable, z_next, plain), {"method": inner, "mixing": mixing}

    def select(self, state: dict[str, Any], index: Tensor) -> dict[str, Any]:
        method, mixing = state["method"], state["mixing"]
        return {"method": self.method.select(method, index), "mixing": self.mixing.select(mixing, index)}


class _Map:
    """The step as the fixed-point map that Anderson mixing asks for, at the one point where it is known."""

    def __init__(self, f: Evaluations, plain: Tensor, z: Tensor) -> None:
        self.plain, self.moved = plain, plain - z
        self.norm, self.best, self.best_norm = f.norm, f.best, f.best_norm
        self.ahead = 1

    def __call__(self, z: Tensor) -> Tensor:
        return self.plain

    def residual(self, z: Tensor) -> Tensor:
        return self.moved
