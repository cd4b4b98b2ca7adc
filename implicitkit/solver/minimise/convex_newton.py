"""Newton's steps on an objective of few unknowns, for as long as it looks convex and they pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.linear.dense import cholesky_batched
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.minimise.newton_cg import steihaug
from implicitkit.solver.steps.line_search import backtrack

__all__ = ["ConvexNewton"]

_PAYS = 0.5  # of |g| that a step may leave
_CHEAP = 5.0  # products that factors may cost (implicitkit.linear.price) for one step that leaves more to be forgiven
_PRODUCTS, _NEAR = (
    3,
    0.1,
)  # of the step that is tried before dear Hessians, and what they may leave of its model's gradient
_HALVINGS = 10  # of a step
_SINGULAR = 1e3  # units of rounding: a pivot of that size beside the largest is none


@dataclass(frozen=True)
class ConvexNewton(Method):
    r"""``z <- z - H^{-1} g`` by a dense Cholesky factor, sample by sample; a quadratic takes one step.

    A step is halved until it lowers the objective as the slope promises (Armijo 1966).  A sample is given up (status
    ``STALLED``) as soon as its Hessian is not positive definite beyond rounding, ten halvings are not enough, or a step
    leaves more than half of its gradient, where Hessians are cheap the second in a row: other methods go on from there.  So
    is every sample of an objective that has no second derivative.  Where they are dear, a step by three products with the
    first tells beforehand whether the objective of any sample is as its model says.

    An evaluation or a few and ``n`` Hessian products (in one batched call) a step, ``O(batch n^3)`` work.  Source: Boyd &
    Vandenberghe (2004), *Convex Optimization*, section 9.5.
    """

    name: ClassVar[str] = "newton"
    solves: ClassVar[str] = "minimise"
    default_max_steps: ClassVar[int] = 50
    hands_over: ClassVar[bool] = True

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        idle = torch.zeros_like(f.active, dtype=torch.int64)
        return {"idle": idle, "cheap": f.price(z) <= _CHEAP, "first": True}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g, norm = f(z), f.norm
        try:
            A = f.linearize(z)
            tried = state["cheap"] or not state["first"] or bool(_is_as_its_model(f, A, z, g).any())
            H = A.dense() if tried else None
        except RuntimeError as error:
            if not autodiff.lacks_second_derivative(error):
                raise
            H = None
        if H is None:
            f.stuck = torch.ones_like(f.active)
            return z, state
        H = H if H.dtype in (torch.float32, torch.float64) else H.float()
        L, convex = cholesky_batched(H)
        low, high = L.diagonal(dim1=1, dim2=2).aminmax(dim=1)
        convex = convex & ((low / high).square() > _SINGULAR * torch.finfo(L.dtype).eps)
        if not bool((convex & f.active).any()):
            f.stuck = f.active
            return z, state
        d = -torch.cholesky_solve(g.to(L.dtype).unsqueeze(2), L).squeeze(2).to(z.dtype)
        d = d if bool(convex.all()) else torch.where(convex.unsqueeze(1), d, 0)
        search = backtrack(f, z, d, _HALVINGS)
        pays = torch.linalg.vector_norm(f(search.z), dim=1) <= _PAYS * norm
        idle = torch.where(pays, 0, state["idle"] + 1)
        good = convex & search.found & (idle <= int(state["cheap"]))
        f.stuck = f.active & ~good
        return search.z, state | {"idle": idle, "first": False}


def _is_as_its_model(f: Evaluations, A: Operator, z: Tensor, g: Tensor) -> Tensor:
    """Where a step by a few products, ``A p`` near ``-g``, leaves a gradient that differs from ``g + A p`` by no more than
    the full step may leave, ``(batch,)``: the full one, which is longer, would leave as much or more."""
    norm = torch.linalg.vector_norm(g, dim=1)
    p, promised = steihaug(A, g, torch.full_like(norm, torch.inf), _NEAR * norm, ~f.active, _PRODUCTS)
    left = torch.linalg.vector_norm(f(z + p) - g - A.mv(p), dim=1)
    return f.active & (promised > 0) & (left <= _PAYS * norm)
