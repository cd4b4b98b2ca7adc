"""Least squares by products with the Jacobian, for as long as factors would cost more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.graph_size import nodes_of, size_of_graph
from implicitkit.foundation.operators import Operator
from implicitkit.linear.price import Work, price_of_dense_fit
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.least_squares.levenberg_marquardt import LevenbergMarquardt, is_dear
from implicitkit.solver.minimise.newton_cg import steihaug
from implicitkit.solver.steps.failed_products import FailedProducts
from implicitkit.solver.steps.forcing import after_step, forcing_term, how_wrong, least_share
from implicitkit.solver.steps.line_search import decrease
from implicitkit.solver.steps.paths import Path
from implicitkit.solver.steps.region import Region
from implicitkit.solver.steps.robust_model import curvature, next_share
from implicitkit.sparsity.last_entries import LastEntries

_WORTH = 120.0  # products that all factors together must cost for conjugate gradients to be tried
_FEW = 16  # unknowns from which they are
_FACTORISATIONS, _SINGULAR = 3.0, 8.0  # that Levenberg-Marquardt takes, where it is easy; those by singular values
_HARD, _BEGINNING = 100.0, 1 / 6  # products that a fit takes whose gradient grows before it falls; when that is asked
_DOUBLING = 64  # samples of which the hardest takes twice as many
_EVALUATION = 1.5  # products that a trial point costs, with its gradient
_LEAST, _PART = 4.0, 1 / 6  # products for a step, and the part of those that are left: the first steps are the dearest
_FORCING, _FINEST = 0.2, 1e-3  # of the gradient of the model that a step leaves, at most and at least
_LINEAR = 1e-6  # of a gradient, by which the model of the step before was wrong where residuals are linear
_TRIALS = 6  # radii of a step
_MOST = 500  # products in one trial


@dataclass(frozen=True)
class FrugalLevenbergMarquardt(LevenbergMarquardt):
    r"""``levenberg_marquardt``, its steps by conjugate gradients for as long as factors of ``R'R`` would cost more.

    A step minimises Gauss and Newton's model, ``|R p + r|`` in a ball ``|p| <= radius``, by Steihaug's conjugate gradients
    on ``R'R p = -R'r``, from products with ``R`` and ``R'``, until a share ``\eta \le 0.2`` of the gradient is left.  One
    factorisation costs as much as ``P`` of these products (:mod:`implicitkit.linear.price`), and Levenberg-Marquardt takes
    ``k = 3`` of them or so (8 where it uses singular values).  Of the ``k P`` a step may take its share of what is left,

        (k P - spent) \log(1 / \eta) / \log(|g| / tolerance)

    products, a sixth of it at least and ``P`` at most.  Once a sample needs more, or would at the rate of its first
    few (:mod:`implicitkit.linear.iterative.frugal`), or the radius has to shrink six times in a row, this is
    ``levenberg_marquardt`` from the point that has been reached.  So it is where ``k P`` is less than about what a
    fit takes whose gradient grows before it falls (100, and of 64 samples the hardest 200), and that of a sample has not
    fallen when a sixth of ``k P`` is spent.  Of residuals that the first step has shown to be linear the next one is the
    last, and ``k`` is one.

    So it is at once below 16 unknowns, where ``k P < 120``, in half precision, elsewhere than on a processor, and where the
    units of the unknowns are to be those of the Jacobian (``x_scale="jac"``).

    Source: Steihaug (1983), SIAM J. Numer. Anal. 20; Nocedal & Wright (2006), section 10.3; Dembo, Eisenstat & Steihaug
    (1982) for ``\eta``; the rule is that of ski rental (Karlin, Manasse, Rudolph & Sleator 1988).
    """

    name: ClassVar[str] = "levenberg_marquardt"
    solves: ClassVar[str] = "least_squares"

    def init(self, f: Evaluations, z: Tensor) -> Any:
        n = z.shape[1]
        asked = n >= _FEW and z.dtype in (torch.float32, torch.float64) and z.device.type == "cpu"
        if not asked or f.problem.x_scale == "jac":
            return {"radius": None, "factored": super().init(f, z)}
        radius = torch.linalg.vector_norm(z, dim=1).clamp_min(n**0.5)
        return {
            "radius": radius,
            "eta": None,
            "norm": None,
            "spent": 0.0,
            "price": None,
            "first": None,
            "left": None,
            "factored": super().init(f, z),  # which has the model of a robust loss, too
        }

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        if state["radius"] is not None:
            ready = f.residuals_pattern(z)
            failed = None if ready is None else ready.remembered("products failed", FailedProducts)
            if failed is None or not failed.are_of(lambda: _entries(f, z)):
                found = _by_products(f, z, state)
                if found is not None:
                    return found
            z_next, factored = super().step(f, z, state["factored"])
            if failed is not None:
                failed.note(ready.analysed(LastEntries).entries)
        else:
            z_next, factored = super().step(f, z, state["factored"])
        return z_next, {"radius": None, "factored": factored}


def _entries(f: Evaluations, z: Tensor) -> Any:
    found = f.residuals_sparse(z)
    return None if found is None else found[1]


def _by_products(f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any] | None:
    """A step in the trust region, and the state after it; ``None`` where factors are the better choice."""
    out, point = f.residuals_graph(z)
    price = _price(f, z, out) if state["price"] is None else state["price"]
    factorisations, g = _FACTORISATIONS if is_dear(f, z) else _SINGULAR, f(z)
    wrong = how_wrong(g, state)
    linear = bool((wrong <= _LINEAR)[f.active].all())  # then the first factors solve it
    most, first = (1 if linear else factorisations) * price, f.norm if state["first"] is None else state["first"]
    hard = _HARD * (1 + math.log(len(z), _DOUBLING))
    if (most < _WORTH and not linear) or (_BEGINNING * most <= state["spent"] and most < hard and _has_grown(f, first)):
        return None
    left = most - state["spent"]
    value, region = f.value(z), Region(state["radius"], z, ~f.active)
    eta = forcing_term(f, state, _FORCING).nan_to_num(nan=_FORCING).clamp(_FINEST, _FORCING)
    eta = least_share(f, torch.fmin(eta, wrong.to(eta)))
    target, share = eta.to(z) * f.norm.to(z), max(_LEAST, left) if linear else min(price, _share(f, eta, left))
    model = state["factored"]["share"]
    A, count = _gauss_newton(out, point, curvature(f, z, model))
    bounded, at_once, kept = torch.zeros_like(f.active), None, torch.zeros_like(region.radius)
    path, many = Path(g), min(_MOST, 2 * z.shape[1])
    for _ in range(_TRIALS):
        tried = path.cut(region.radius) or steihaug(A, g, region.radius, target, region.found, many, share, path=path)
        if tried is None:
            return None
        p, promised = tried
        trial, length = region.tried(z + p), torch.linalg.vector_norm(p, dim=1)
        at_boundary = region.reaches(length)
        accept, rho = region.judge(trial, length, decrease(f, z, value, g, trial), promised)
        at_once, kept = accept if at_once is None else at_once, torch.where(accept, rho, kept)
        bounded = bounded | (accept & at_boundary)
        count[0] += _EVALUATION
        if bool(region.found.all()):
            after = after_step(eta, torch.where(bounded, 0.0, 1.0).to(f.norm), f.norm)
            state["factored"]["share"] = next_share(model, kept, at_once)
            whole = path.left is not None and torch.equal(region.z, z + p)
            state = state | after | {"radius": region.radius, "spent": state["spent"] + count[0]}
            state["left"] = path.left if whole else None
            return region.z, state | {"price": price, "first": first}
    return None


def _has_grown(f: Evaluations, first: Tensor) -> bool:
    """Is the gradient of a sample at work no smaller than it was at first?"""
    return bool(((f.norm >= first) & f.active).any())


def _gauss_newton(out: Tensor, point: Tensor, k: Tensor | None) -> tuple[Operator, list[float]]:
    """``R' diag(k) R`` by its products, ``R`` the Jacobian of ``out`` at ``point``, and how many have been made."""
    mv, rmv = autodiff.products(out, point)
    count = [0.0]

    def product(v: Tensor) -> Tensor:
        count[0] += 1
        return rmv(mv(v) if k is None else k * mv(v))

    def dense() -> Tensor:
        raise NotImplementedError("only products are known")

    z = point.detach()
    return Operator(product, product, dense, batch=len(z), size=z.shape[1], like=z, symmetric=True), count


def _share(f: Evaluations, eta: Tensor, left: float) -> float:
    """Products of those that are ``left`` for a step which leaves ``eta`` of the gradient."""
    missing = -(f.tolerance / f.norm).log().clamp_max(-torch.finfo(eta.dtype).eps)
    return max(_LEAST, left * float((-eta.log() / missing).clamp(_PART, 1)[f.active].amin()))


def _price(f: Evaluations, z: Tensor, out: Tensor) -> float:
    """What the Jacobian of the residuals ``out`` and factors of ``R'R`` cost, in products with that."""
    ready, weight = f.residuals_pattern(z), sum(t.numel() for t in f.theta)
    if ready is not None:
        from implicitkit.linear.factors.sparse_normal import price_of_factors

        nodes, numbers, placed = ready.remembered(("through", len(z)), lambda: size_of_graph(nodes_of(out)))
        return price_of_factors(len(z), ready, Work(nodes, numbers, placed, weight))
    work = Work(*size_of_graph(nodes_of(out)), weight)
    return price_of_dense_fit(len(z), out.shape[1], z.shape[1], work, singular=not is_dear(f, z))
