"""Newton's method for minimisation with conjugate gradients in a trust region."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options, optional, positive
from implicitkit.linear.iterative.by_entries import ByEntries
from implicitkit.linear.iterative.frugal import looks, products_ahead
from implicitkit.linear.iterative.inner_cg import left_by_minimal_residuals
from implicitkit.solver.base import Options, Outcome
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluating.differentiated import MOST, kept_graphs
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.failed_products import FailedProducts
from implicitkit.solver.steps.forcing import aim_of_model
from implicitkit.solver.steps.hessian_factors import HessianFactors
from implicitkit.solver.steps.line_search import decrease
from implicitkit.solver.steps.paths import End, Path, way_to_boundary
from implicitkit.solver.steps.region import POOR, Region
from implicitkit.solver.steps.spectral_trust_region import SpectralStep, price_of_spectrum
from implicitkit.solver.steps.trials import Trials
from implicitkit.sparsity.patterns import SMALLEST

WORTH = 7.0  # products that factors must cost for conjugate gradients to be tried
_AGAIN = 50.0  # ... and those of a step, for them to be tried again after it
_SEVERAL = 3.0  # factorisations of a step that ends at the boundary
_HALVINGS = 4  # of a step inside the region
# of a radius, who needs none, and the shift: p, what is promised, the shift, factorisations, and factors if p is Newton's
_Factors = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, float, Any]]


class Model(NamedTuple):
    """What a step is to minimise, and how far, as :func:`steihaug` is told."""

    H: Operator
    g: Tensor
    radius: Tensor
    target: Tensor
    done: Tensor
    inner_steps: int


@register_solver("newton_cg", solves="minimise")
@dataclass(frozen=True)
class NewtonCG(Method):
    r"""Minimise the model ``g'p + p'Hp / 2`` within ``|p| <= radius`` by conjugate gradients, sample by sample.

    Steihaug's method (1983; Nocedal & Wright 2006, algorithm 7.2): along a direction of negative curvature, or where an
    iterate leaves the region, it goes to the boundary, so that indefinite Hessians do no harm.  The inner residual is cut to
    ``min(0.5, sqrt(|g| / |g_0|)) |g|``, which makes the outer convergence superlinear, and as far as a claim asks once a
    step has shown that the objective is quadratic (:func:`~implicitkit.solver.steps.forcing.aim_of_model`).  Once products
    go by the entries of the Hessian they are preconditioned by its diagonal, where that is uneven.  A step is taken when
    ``rho``, the decrease over the one the model promised, exceeds ``1e-4``; below 1/4 the radius shrinks to a quarter of
    the step, above 3/4 at the boundary it doubles (algorithm 4.1).  One linearisation, and one path
    (:mod:`implicitkit.solver.steps.paths`), serve until a step is accepted.

    From 128 unknowns on, a Hessian with a sparsity pattern (``jac_sparsity``) is factored sparse, and the minimiser of the
    model within the region is the exact one (Moré & Sorensen 1983); where factors cost as much as seven products or more
    (:mod:`implicitkit.linear.price`) only once conjugate gradients have taken as many for a step, or would at the rate of
    their first few; and these are tried again after a step whose factorisations, of which one that ends at the boundary
    takes several, cost as much as fifty, until those that end at the boundary have cost as much as three factorisations.  Of
    fewer unknowns it is the exact one too, by Cholesky's factors or eigenvalues of dense Hessians
    (:mod:`~implicitkit.solver.steps.spectral_trust_region`), from the step on whose products would cost more.  Else
    matrix-free: one Hessian product an inner iteration; memory ``O(batch n)``.
    A sample whose radius has shrunk to rounding is given up.

    Args:
        radius: the first radius, times ``max(1, |z|)``; of 128 unknowns and more, times ``max(sqrt(n), |z|)``.
        inner_steps: products at most in one trial; ``None``: ``2 n``, at most 500.

    Raises:
        ValueError: an option out of range.
    """

    radius: float = 1.0
    inner_steps: int | None = None
    default_max_steps: ClassVar[int] = 5000

    def __post_init__(self) -> None:
        check_options(self, radius=positive(), inner_steps=optional(at_least(1)))

    def keeps_graphs(self, z0: Tensor) -> bool:
        return z0.numel() <= MOST

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        with kept_graphs(f, self.keeps_graphs(z0)):
            return super().run(f, z0, options)

    def init(self, f: Evaluations, z: Tensor) -> Any:
        n = z.shape[1]
        length = torch.linalg.vector_norm(z, dim=1).clamp_min(n**0.5 if n >= SMALLEST else 1.0)
        radius, first = self.radius * length, torch.linalg.vector_norm(f(z), dim=1)
        spent = {"made": 0.0, "rent": 0.0, "begins": True}
        return {"radius": radius, "first": first, "shift": torch.zeros_like(radius)} | spent

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        g, value = f(z), f.value(z)
        norm = torch.linalg.vector_norm(g, dim=1)
        radius = state["radius"]
        target = aim_of_model(f, g, 0.5, state)
        smallest = torch.finfo(z.dtype).eps * torch.linalg.vector_norm(z, dim=1).clamp_min(torch.finfo(z.dtype).eps)
        inner_steps = self.inner_steps or min(2 * z.shape[1], 500)
        region, path, rent, stuck = Region(radius, z, ~f.active), Path(g), state["rent"], f.stuck
        try:
            H = f.linearize(z)
            model = Model(H, g, radius, target, region.found, inner_steps)
            tried, factors = self._begun(f, model, path, state["made"], rent, state["begins"])
            made, shift = 0.0, state["shift"]
            if f.stuck is not stuck:
                return z, state
            if tried is None and factors is None:
                path = Path(g)
                tried = steihaug(*model, path=path)
        except RuntimeError as error:
            if not autodiff.lacks_second_derivative(error):
                raise
            f.stuck = torch.ones_like(f.active)
            f.remark = "the objective has no second derivative"
            return z, state
        cut, whole = False, None
        while True:
            if factors is not None:
                p, promised, shift, more, whole = factors(region.radius, region.found, shift)
                made += more
            else:
                p, promised = (
                    tried
                    or path.cut(region.radius)
                    or steihaug(H, g, region.radius, target, region.found, inner_steps, path=path)
                )
            tried = None
            length = torch.linalg.vector_norm(p, dim=1)
            if factors is not None:  # a step that is shifted is one to the boundary, near enough
                length = torch.where(shift > 0, torch.maximum(length, region.radius), length)
            cut = cut or (factors is None and bool((region.reaches(length) & ~region.found).any()))
            region.judge(*_on_the_way(f, z, g, value, p, length, promised, region))
            hopeless = region.hopeless(smallest)
            if bool((region.found | hopeless).all()):
                break
        f.stuck = hopeless
        if factors is not None and g.shape[1] >= SMALLEST and len(z) == f.system.batch:  # for the derivative
            f.system.factored = whole
            f.curved = None if whole is None else HessianFactors(whole.diagonal, whole.solve)
        rent = rent + path.walked + 1 if cut else rent if factors is None else 0.0
        after = {"radius": region.radius, "first": state["first"], "made": made, "shift": shift, "rent": rent}
        after["begins"] = False
        if path.left is not None and factors is None and torch.equal(region.z, z + p):
            after |= {"left": path.left, "norm": norm}
        return region.z, after

    def _begun(
        self,
        f: Evaluations,
        model: Model,
        path: Path | None,
        made: float,
        rent: float = 0.0,
        begins: bool = False,
    ) -> tuple[tuple[Tensor, Tensor] | None, _Factors | None]:
        """A step by products while they cost less than factors would, else factors; ``None`` for the other, and for both
        where there is no pattern.  ``made``: factorisations of all samples that the last step took, if it took any; those of
        a step that ends at the boundary are several.  ``rent``: products of the steps since then that ended there, where the
        exact ones fall further.  ``begins``: in the first step of a solve products are not tried where they were in vain in
        solves of this function before (:class:`~implicitkit.solver.steps.trials.Trials`)."""
        H, g = model.H, model.g
        few = g.shape[1] < SMALLEST
        if few and f.eps > torch.finfo(g.dtype).eps:  # a Hessian of half the digits says little of its eigenvalues
            return None, None
        if few:
            price: float | None = 0.0 if made else price_of_spectrum(H)
        else:
            known = None if 0 < made <= 1 else H.price()
            paid = known is None or rent >= _SEVERAL * known.factors
            price = None if known is None or paid else max(1.0, made) * known.factors
        if price is not None and price >= (_AGAIN if made else WORTH):
            trials = None if few or not begins else f.remembered(g, "conjugate gradients", Trials)
            failed = f.remembered(g, "products failed", FailedProducts)
            in_vain = failed is not None and failed.are_of(lambda: _entries(H))
            if not in_vain and (trials is None or trials.is_due()):
                tried = steihaug(*model, price, path=path)
                if trials is not None:
                    trials.note(tried is not None)
                if tried is not None:
                    return tried, None
                if failed is not None:
                    failed.note(_entries(H))
        if not few:
            return None, _by_factors(H, g)
        if price == math.inf:
            return None, None
        found = SpectralStep(H, g)
        f.curved = found.factors
        return None, lambda radius, done, shift: (*found.within(radius, done), 1.0, None)


def _on_the_way(
    f: Evaluations,
    z: Tensor,
    g: Tensor,
    value: Tensor,
    p: Tensor,
    length: Tensor,
    promised: Tensor,
    region: Region,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the region judges: the trial, its length, its decrease and the promised one, ``(2 t - t^2) promised`` for
    ``t p``.  A step that ends inside, of a definite Hessian, is halved where it falls by less than a quarter of that: in the
    metric of the Hessian a part of it may do where any step of that length promises too much (a surface that is steep along
    its edge).  Where no part does, it is the whole one, and the region shrinks.

    Source: damped Newton steps, Boyd & Vandenberghe (2004), "Convex optimization", section 9.5.
    """
    t, inside = torch.ones_like(length), ~region.found & ~region.reaches(length)
    trial = region.tried(z + p)
    whole = trial, length, decrease(f, z, value, g, trial), promised
    found = whole
    for _ in range(_HALVINGS):
        poor = inside & ~(found[2] >= POOR * found[3])
        if not bool(poor.any()):
            return found
        t = torch.where(poor, 0.5 * t, t)
        trial = region.tried(z + t.unsqueeze(1) * p)
        found = trial, t * length, decrease(f, z, value, g, trial), t * (2 - t) * promised
    poor = inside & ~(found[2] >= POOR * found[3])
    if not bool(poor.any()):
        return found
    trial = whole[0] if bool(poor.all()) else torch.where(poor.unsqueeze(1), whole[0], trial)
    length, fallen, promised = (torch.where(poor, a, b) for a, b in zip(whole[1:], found[1:], strict=True))
    return trial, length, fallen, promised


def _entries(H: Operator) -> Any:
    blocks = H.sparse()
    return None if blocks is None else blocks.found[1]


def _by_factors(H: Operator, g: Tensor) -> _Factors | None:
    """Steps by sparse factors; ``None`` where there is no pattern."""
    sparse = H.sparse()
    if sparse is None:
        return None
    from implicitkit.solver.steps.sparse_trust_region import sparse_step

    return lambda radius, done, shift: sparse_step(sparse, g, radius, done, shift)


@overload
def steihaug(
    H: Operator, g: Tensor, radius: Tensor, target: Tensor, done: Tensor, max_steps: int, *, path: End | None = None
) -> tuple[Tensor, Tensor]:
    """Whatever the products cost there is a step."""


@overload
def steihaug(
    H: Operator,
    g: Tensor,
    radius: Tensor,
    target: Tensor,
    done: Tensor,
    max_steps: int,
    price: float,
    *,
    path: End | None = None,
) -> tuple[Tensor, Tensor] | None:
    """``None`` where products cost more than factors."""


def steihaug(
    H: Operator,
    g: Tensor,
    radius: Tensor,
    target: Tensor,
    done: Tensor,
    max_steps: int,
    price: float = math.inf,
    *,
    path: End | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Approximate minimisers ``p`` ``(batch, n)`` of ``g'p + p'Hp / 2`` in a ball.

    Args:
        H: Hessians, by products. g: gradients. radius: of each ball. target: of the inner residual ``|H p + g|``.
        done: samples that need no step (theirs is zero). max_steps: products. price: of factors, in products.
        path: gets the points on the way.

    Returns:
        ``p``, and the decrease of that model ``(batch,)``; ``None`` where a sample takes more products than ``price``, or
        would at the rate of its first few (:func:`~implicitkit.linear.iterative.frugal.products_ahead`).
    """
    p, r, d = torch.zeros_like(g), g, -g
    residuals, by, asks = [g.square().sum(1)], ByEntries(H), looks(price)
    scale, rr, operator = by.scale, residuals[0], by.plain
    for k in range(1, max_steps + 1):
        if k == 1 or by.scale is not scale:  # conjugate directions begin anew
            scale = by.scale
            y = _preconditioned(scale, r)
            rr, d = (r * y).sum(1), torch.where(done.unsqueeze(1), 0, -y)
        Hd = operator.mv(d)
        curvature = (d * Hd).sum(1)
        alpha = rr / curvature
        ahead = torch.addcmul(p, alpha.unsqueeze(1), d)
        inside = (curvature > 0) & (torch.linalg.vector_norm(ahead, dim=1) < radius)
        length = torch.where(inside, alpha, way_to_boundary(p, d, radius)).nan_to_num(0, 0, 0)
        length = torch.where(done, 0, length).unsqueeze(1)
        p, r = torch.addcmul(p, length, d), torch.addcmul(r, length, Hd)
        if path is not None:
            path.add(p, r)
        size = r.square().sum(1)
        done = done | ~inside | ~(size > target.square())
        if bool(done.all()):
            break
        residuals.append(size)
        if k in asks or k in by.looks:
            more = products_ahead(left_by_minimal_residuals(residuals), target, min(asks, default=0))
            more = torch.where(done, 0, more)
            if k in asks and not bool((more <= by.affords(price - k)).all()):
                return None
            by.expect(float(more.amax()))
        if k >= (by.affords(price) if by.written else price):
            return None
        y = _preconditioned(scale, r)
        new = (r * y).sum(1)
        d = torch.addcmul(-y, (new / rr).unsqueeze(1), d)
        d = torch.where(done.unsqueeze(1), 0, d)
        rr = new
    p, r = torch.where(torch.isfinite(p), p, 0), torch.where(torch.isfinite(r), r, g)
    return p, -0.5 * ((g + r) * p).sum(1)  # r = H p + g


def _preconditioned(scale: Tensor | None, r: Tensor) -> Tensor:
    return r if scale is None else scale.square() * r
