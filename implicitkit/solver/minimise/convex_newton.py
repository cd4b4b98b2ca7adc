"""Newton's steps on an objective, for as long as it looks convex and they pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import check_options, flag
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.solver.base import Options, Outcome
from implicitkit.solver.evaluating.differentiated import kept_graphs, may_keep_graphs
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.minimise.newton_cg import WORTH, steihaug
from implicitkit.solver.steps.convex_model import by_factors
from implicitkit.solver.steps.factored import is_noise, leave
from implicitkit.solver.steps.forcing import aim_of_model, how_wrong
from implicitkit.solver.steps.line_search import backtrack
from implicitkit.solver.steps.paths import End

_PAYS = 0.5  # of |g| that a step may leave, if it is not to be forgiven
_FORGIVEN = 40.0  # products that such steps in a row may cost
_TARGET = 0.1  # of |g| that these may leave of the model's
_TRIED = 50.0  # products of a step, at most, where there are no factors to turn to
_QUADRATIC = 1e-6  # of a gradient, by which the model of the step before was wrong where the objective is quadratic
_FAR = 1e6  # steps as long as that, by max(|z|, 1), are none of a convex model
_HALVINGS = 10  # of a step


@dataclass(frozen=True)
class ConvexNewton(Method):
    r"""``z <- z - H^{-1} g`` by a dense Cholesky factor, sample by sample; a quadratic takes one step.

    Where factors cost more than seven products (:mod:`implicitkit.linear.price`) by conjugate gradients, to ``|H d + g| <=
    min(0.1, sqrt(|g| / |g_0|)) |g|``, and as far as a claim asks once a step has shown that the objective is quadratic,
    until a step has taken as many products as factors cost, or would at the rate of its first few; then by factors.
    Matrices that are not to be ``formed`` are never factored: a sample is given up once a step takes fifty products, or
    would, of an objective that is not quadratic.

    A step is halved until it lowers the objective as the slope promises (Armijo 1966).  A sample is given up (status
    ``STALLED``) as soon as its Hessian is not positive definite beyond rounding, ten halvings are not enough, or steps that
    cost as much as forty products have each left more than half of the gradient, one after another: the damped phase of a
    convex objective ends, a curved valley does not.  So is every sample of an objective that has no second derivative.
    Other methods go on from there.  Once more samples wait for these than are at work, those at work go with them: the
    others' steps take no longer for that, and a step here costs as much for one sample as for all.

    An evaluation or a few (of many unknowns one more) and at most ``n`` Hessian products (in one batched call) a step,
    ``O(batch n^3)`` work.  Source: Boyd & Vandenberghe (2004), *Convex Optimization*, section 9.5; Nocedal & Wright (2006),
    algorithm 7.1, for the products.

    Args:
        formed: may dense Hessians be?
    """

    formed: bool = True

    name: ClassVar[str] = "newton"
    solves: ClassVar[str] = "minimise"
    default_max_steps: ClassVar[int] = 50
    hands_over: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, formed=flag())

    def keeps_graphs(self, z0: Tensor) -> bool:
        return self.formed and may_keep_graphs(z0)

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        with kept_graphs(f, self.keeps_graphs(z0)):
            return super().run(f, z0, options)

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        idle = torch.zeros_like(f.active, dtype=torch.int64)
        return {
            "idle": idle,
            "waiting": 0,
            "price": None,
            "frugal": True,
            "first": torch.linalg.vector_norm(f(z), dim=1),
        }

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g, norm = f(z), f.norm
        try:
            A = f.linearize(z)
            price = state["price"] or (f.price_of_dense(z, A=A) if self.formed else _TRIED)
            frugal = state["frugal"] and price >= WORTH
            end, target = End(), aim_of_model(f, g, _TARGET, state)
            known = not self.formed and bool((how_wrong(g, state) <= _QUADRATIC)[f.active].all())
            most = max(price, z.shape[1]) if known else price  # nothing else does better
            found = _by_products(f, A, z, g, target, most, end) if frugal else None
            if found is None and not self.formed:
                f.stuck = f.active
                return z, state
            H = A.dense() if found is None else None
            d, convex, f.curved = (*found, None) if found is not None else by_factors(A.dense(), g)
        except RuntimeError as error:
            if not autodiff.lacks_second_derivative(error):
                raise
            f.stuck = torch.ones_like(f.active)
            return z, state
        if not bool((convex & f.active).any()):
            f.stuck = f.active
            return z, state
        d = d if bool(convex.all()) else torch.where(convex.unsqueeze(1), d, 0)
        search = backtrack(f, z, d, _HALVINGS)
        pays = torch.linalg.vector_norm(f(search.z), dim=1) <= _PAYS * norm
        idle = torch.where(pays, 0, state["idle"] + 1)
        good = convex & search.found & (idle <= int(_FORGIVEN / (price if found is None else WORTH)))
        f.stuck = f.active & ~good
        failed = f.active & convex & ~search.found
        if H is not None and bool(failed.any()):
            leave(f, failed & is_noise(DenseBlocks(H), z, norm, g))
        given_up = int(f.stuck.count_nonzero())
        waiting = state["waiting"] + given_up
        if waiting > f.at_work - given_up:
            f.stuck = f.active
        left = end.left if found is not None and torch.equal(search.z, z + d) else None
        after = {"idle": idle, "waiting": waiting, "price": price, "frugal": found is not None, "left": left}
        return search.z, state | after | {"norm": norm}


def _by_products(
    f: Evaluations, A: Operator, z: Tensor, g: Tensor, target: Tensor, price: float, end: End
) -> tuple[Tensor, Tensor] | None:
    """What :func:`by_factors` returns, by conjugate gradients as far as a step needs it; ``None`` where these cost more than
    factors."""
    far = _FAR * torch.linalg.vector_norm(z, dim=1).clamp_min(1)
    found = steihaug(A, g, far, target, ~f.active, z.shape[1], price, path=end)
    return None if found is None else (found[0], torch.linalg.vector_norm(found[0], dim=1) < 0.5 * far)
