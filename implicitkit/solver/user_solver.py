r"""A user's own function ``(z0, *args) -> z`` as a solver: what ``@ik.implicit`` makes a layer of.

Multipliers of a point that it has found follow from that.

With ``g`` the gradient of the objective and ``J`` the Jacobian of the constraints ``c``, rows ``i`` of both by ``|J_i|``, so
that no unit of a constraint counts:

    minimise over lam   |g + J' lam|^2 + sum_i (c_i lam_i / |z|)^2,    the sum over inequalities

At a point with multipliers both terms vanish: where the active constraints are independent these are the only ones.  An
inequality that is not active has none, whatever the weight; those below zero by rounding are raised to it.

Beside bounds, another set or a term the first term is ``|z - prox(v)|^2``, ``v = z - g - J' lam``, by Gauss-Newton steps
with ``d prox/dv``, which is symmetric: ``prox`` is the gradient of a convex function (Moreau).

Source: Glad & Polak (1979), "A multiplier method with automatic limitation of penalty growth", Math. Programming 17,
140-155; Qi & Sun (1993), "A nonsmooth version of Newton's method", Math. Programming 58, 353-367, for the steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, trees, wording
from implicitkit.foundation.trees import Layout, hint_of_pair
from implicitkit.linear.factors.dense import lstsq_batched
from implicitkit.linear.factors.user_factor import UserFactor
from implicitkit.solution import Status
from implicitkit.solver.base import Found, Options, Outcome, Solver
from implicitkit.solver.black_box import MISTAKES, verdict
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.return_checks import point
from implicitkit.solver.verdict.judge import Judge

_CUT = 1e-12  # singular values below that share of the largest are none, and below ten units of rounding
_STEPS = 20  # through a proximal map, which is made of few pieces as a rule


@dataclass(frozen=True)
class UserSolver(Solver):
    """A user's function ``(z0, *args) -> z`` as a solver: it is given his own pytrees, detached, one call a sample.

    Of a program it is given, and returns, the unknowns without their multipliers, which are found afterwards
    (:mod:`~implicitkit.solver.user_solver`).  What it solves is the user's word: ``f`` is the residual of his
    problem, which judges what it returns.  With ``has_aux`` it returns ``(z, info)``, and the outcome has a list of what it
    said, one entry a call.
    """

    function: Any
    name: str = ""  # type: ignore[misc]
    has_aux: bool = False
    solves: ClassVar[str] = "root"
    general: ClassVar[bool] = True

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """Call it once for each user-level call in the batch, then judge."""
        layout, judge = f.system.layout, Judge(f, options)
        start = judge.norm(f.residual(z0))
        judge.tolerance(z0, start)
        whole, layout = layout, f.problem.layout if f.kind.returns_program else layout
        hidden = f.problem.hidden if f.kind.returns_program else 0
        points, message, raised = [], "", None
        factors: list[Any] = []
        said: list[Any] = []
        for state, args in f.system.user_calls(z0, f.theta):
            part = state[:, : layout.size]
            try:
                # clones: the solver may write into what it is given
                found = self.function(*trees.tree_map(_own, (layout.unpack(part), *args[hidden:])))
            except MISTAKES:  # of the program: no point was looked for
                raise
            except Exception as error:
                message, raised = wording.raised(self.name, error), error
                points.append(part)
                said.append(None)
                continue
            if self.has_aux:
                found, info = _pair(found, self.name)
                said.append(info)
            points.append(layout.pack(_like(found, part, layout, self.name)).to(part))
            given = found.factorisation if isinstance(found, Found) else None
            factors.extend(given if layout.batch > 1 and given is not None else [given])
        z = torch.cat(points)
        if whole is not layout:
            z = with_multipliers(f, z)
        steps = torch.zeros(z0.shape[0], dtype=torch.int64, device=z0.device)
        outcome = verdict(judge, f, z0, z, start, steps, 1, options, message)
        outcome.error, outcome.said = raised, said
        if len(factors) == len(z0) and all(factor is not None for factor in factors):
            f.system.factored = UserFactor(factors)
        return outcome


class Start(Solver):
    """Takes no step: the start itself, judged (``max_steps=0``)."""

    name: ClassVar[str] = "start"
    solves: ClassVar[str] = "root"
    general: ClassVar[bool] = True

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """Evaluate at ``z0``."""
        judge = Judge(f, options)
        start = judge.norm(f.residual(z0))
        steps = torch.zeros(z0.shape[0], dtype=torch.int64, device=z0.device)
        outcome = verdict(judge, f, z0, z0, start, steps, 0, options, "")
        outcome.status = torch.where(outcome.status == int(Status.STALLED), int(Status.MAX_STEPS), outcome.status)
        return outcome


def _pair(out: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or isinstance(out, Found) or len(out) != 2:
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) and not isinstance(out, Found) else type(out).__name__
        raise TypeError(f"with has_aux=True the solver {name} must return a pair (z, info); it returned {got}")
    return out


def _own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _vector(found: Any) -> Any:
    """A list of numbers as one tensor, anything else as it is."""
    if len(found) < 2 or not all(isinstance(x, (int, float, complex)) for x in found):
        return found
    kind = torch.complex128 if any(isinstance(x, complex) for x in found) else torch.float64
    return torch.tensor(found, dtype=kind, device="cpu")


def _like(found: Any, part: Tensor, layout: Layout, name: str) -> Any:
    """What a user's solver returned, as a tree of tensors like ``z0``."""
    if isinstance(found, Found):
        found = found.z
    state = layout.unpack(part)
    template, spec = trees.tree_flatten(state)
    if found is None:  # no leaf of a tree
        point(found, part, name)
    if len(template) == 1 and layout.bare and isinstance(found, (list, tuple)):
        found = _vector(found)
    with contextlib.suppress(ValueError):  # another structure, with as many tensors or not
        found = trees.in_order(found, state)
    leaves = trees.tree_flatten(found)[0]
    if len(leaves) != len(template):
        raise ValueError(f"{name} returned {len(leaves)} tensor(s), but z0 has {len(template)}{hint_of_pair(found)}")
    converted = [point(x, t, name) for x, t in zip(leaves, template, strict=True)]
    for x, t in zip(converted, template, strict=True):
        if x.shape != t.shape:
            raise ValueError(f"{name} returned shape {tuple(x.shape)} where z0 has {tuple(t.shape)}")
    return trees.tree_unflatten(converted, spec)


def with_multipliers(f: Evaluations, z: Tensor) -> Tensor:
    """The state of a program at ``z`` ``(batch, n)``: ``(batch, n + m)``."""
    model = Model(f)
    if not model.count:
        return z
    at = model.local(z)
    size, length = torch.linalg.vector_norm(at.jacobian, dim=2), torch.linalg.vector_norm(z, dim=1, keepdim=True)
    size, length = (torch.where(t > 0, t, 1) for t in (size, length))
    J = at.jacobian / size.unsqueeze(2)
    weight = torch.where(model.one_sided, at.constraints / (size * length), 0)
    found = _least(J, at.slope, weight, torch.zeros_like(weight))
    if model.problem.prox is not None:
        found = _through_prox(model, z, at.slope, J, weight, found)
    found = found / size
    return model.join(z, torch.where(model.one_sided, found.clamp_min(0), found))


def _least(J: Tensor, gap: Tensor, weight: Tensor, lam: Tensor) -> Tensor:
    """The step ``d`` that minimises ``|gap + J' d|^2 + |weight (lam + d)|^2``, ``(batch, m)``."""
    A = torch.cat([J.mT, torch.diag_embed(weight)], 1)
    b = -torch.cat([gap, weight * lam], 1)
    return lstsq_batched(A, b, rcond=max(_CUT, 10 * torch.finfo(J.dtype).eps))[0]


def _through_prox(model: Model, z: Tensor, slope: Tensor, J: Tensor, weight: Tensor, lam: Tensor) -> Tensor:
    """The multipliers beside a set or a term, from ``lam`` on, ``(batch, m)``: of all steps those with the least sum."""
    best, least = lam, torch.full_like(lam[:, 0], torch.inf)
    for _ in range(_STEPS):
        v = z - slope - (J * lam.unsqueeze(2)).sum(1)
        image, pullback = autodiff.vjp(lambda y: model.proximal(y, 1.0), v)
        gap = z - image.detach()
        left = gap.square().sum(1) + (weight * lam).square().sum(1)
        better = left < least  # false for NaN
        if not bool(better.any()):
            break
        best, least = torch.where(better.unsqueeze(1), lam, best), torch.where(better, left, least)
        rows = torch.stack([pullback(row)[0].detach() for row in J.unbind(1)], 1)
        lam = lam + _least(rows, gap, weight, lam)
    return best
