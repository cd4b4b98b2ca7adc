"""What a layer does in training with the few samples that no solver could solve."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit_deq.advice import advice, ended
from implicitkit_deq.starting.extrapolation import Onward, Trend
from implicitkit_deq.wrapped_linear_solver import Around

_DERIVATIVES = ("truncated", "none")
_EXACT = ("auto", "implicit")
_DEAR = 300  # evaluations in one training call, above which a few samples are not worth it
_WORK = 4000.0  # evaluations that each dear member of a relay may be worth in one training call ...
_MORE = 4 * _WORK  # ... where too many samples would fail without
_TRIED = 8  # samples that the dear members are asked about first, where almost all are left, ...
_HOPELESS = 0.25  # ... of a call of which so many may fail, at most
_RESTING = 0.25  # of the share that may fail: so many may be left without the dear members
_REACH = 100.0  # of a position's start and first step
_CURE = (
    "I - J is nearly singular at these equilibria: bound the weights (bound_weights), add jacobian_penalty to the loss, or "
    "lower the learning rate; and rtol, since a small residual may be far from the equilibrium there"
)


class ForgivenWarning(UserWarning):
    """Some samples of a training call have no solution; the step goes on without them, or with an approximation."""


@dataclass(frozen=True)
class Forgive(extend.Configured):
    r"""A policy for training (``on_failure=``): a step goes on although a few of its samples were not solved.

    A sample without solution has the best iterate ``\hat z`` as its value, one that ran away (``DIVERGED``) the start.  Its
    derivative is biased, whichever is chosen:

    - ``"truncated"``: that of one application of the cell, ``df/d\theta`` at ``\hat z`` held constant (the derivative is
      ``(I - J)^{-1} df/d\theta`` at an equilibrium: here the inverse is cut off after its first term).  The task still
      teaches the sample, in a direction that has a positive product with the exact one where ``|J| < 1``, and any direction
      else.
    - ``"none"``: the sample teaches nothing in this step, so that the loss is that of the solvable samples: a bias towards
      them.

    The same goes for a sample whose forward solve succeeded and whose backward solve did not (``I - J`` nearly singular):
    ``u = g`` in place of ``(I - J)^{-T} g``, or zero.  By default any share of them: a gated cell that learns to close its
    gate has equilibria at which ``I - J`` is singular and the loss is small all the same, and training with ``u = g`` for
    every sample is a method of its own (Fung et al. 2022).

    Where two equilibria are about to meet, ``I - J`` is nearly singular, and one sample's derivative is exact and outweighs
    all others; it holds in a neighbourhood as much smaller, and Adam, which divides by a running mean of squares, then takes
    short steps for hundreds of steps.  So ``u`` keeps its direction and is scaled down to ``|u| = amplification |g| / s``
    where it is larger.  ``s``, at most 1, is the largest ``|A g| / |g|`` of the samples solved, ``A = (I - J)^T``: where a
    cell takes short steps, ``(1 - a) z + a f(z)``, it is ``a`` times that of ``f`` for all samples, and none outweighs the
    others.  Under ``torch.func`` transforms and in forward mode, where the derivative itself is meant, nothing is scaled.

    A few hard samples would cost most of a training: the later members of the ``"relay"`` take hundreds of evaluations for
    them in every step.  So where these were in vain, or a call took more than 300 evaluations, the next ``every - 1``
    training calls do without them (:meth:`ik.Relay.brief`) and forgive what Anderson and Broyden leave, unless that is more
    than a quarter of ``share``, or than ``share`` where the later members left samples too (:meth:`spares`).  Nor does a
    training call grant each of these members more than 4,000 evaluations are worth (``ik.Relay(work=)``), or 16,000 where
    the call would raise; nor is it asked about more than eight samples, where almost all are left and these are in vain.

    ``every=1`` where the loss counts more than the time.  What each of these costs and saves was measured
    (``docs/trainings.md``).

    How many they were, ``layer.solution.converged``, ``layer.solution.backward.converged`` and a :class:`Monitor` tell; the
    first time, forward and backward each, a :class:`ForgivenWarning`.  Under ``torch.func`` transforms nothing is forgiven.

    Shapes: ``u`` and ``g`` are ``(batch, n)``, each sample by itself.  Units: as those of the derivative that it stands
    for.  Source: this library; the truncated term is that of Fung et al. (2022), arXiv 2103.12803.

    Args:
        share: of the samples of a call whose forward solve may fail, in [0, 1]; more raise :class:`ik.ConvergenceError`.
        derivative: ``"truncated"`` or ``"none"``.
        backward_share: of the samples whose backward solve may fail, in [0, 1].
        amplification: the largest ``s |u| / |g|``, above 1; a larger ``u`` is scaled down, counted in
            ``layer.solution.backward.converged`` and warned of once; ``inf``: nothing is.
        every: training calls from one in which the whole relay was dear, or in vain, to the next that may use it; 1: every
            call may.

    Raises:
        ValueError: an option out of range.
    """

    share: float = 0.25
    derivative: str = "truncated"
    backward_share: float = 1.0
    every: int = 30
    amplification: float = 100.0

    def __post_init__(self) -> None:
        part = extend.options.part_of_one()
        extend.options.check_options(
            self,
            share=part,
            backward_share=part,
            every=extend.options.at_least(1),
            amplification=extend.options.above(1),
            derivative=extend.options.one_of(*_DERIVATIVES),
        )

    def rule(self, rule: Any) -> Any:
        """The rule with a backward that forgives; one that solves no linear system to a tolerance is as it was."""
        rule = _meant(rule)
        if not isinstance(rule, ik.Implicit):
            return rule
        asked = extend.transforms_active() or extend.has_forward_level()  # for a derivative, by name
        return _Rule(rule, replace(self, amplification=math.inf) if asked else self)

    def exceeded(self, failed: Tensor) -> bool:
        """Did too many fail?  At least one has."""
        return int(failed.sum()) > self.share * failed.numel()

    def spares(self, failed: Tensor, vain: bool) -> bool:
        """May a call do without the dear members of the relay, where the cheap ones fail on these samples?

        Where they are at most a quarter of the ``share`` that may fail, or a single one that may; all that may, where the
        dear members have left samples too when they were last asked (``vain``)."""
        few = vain or int(failed.sum()) <= max(1.0, _RESTING * self.share * failed.numel())
        return few and not self.exceeded(failed)

    def refuse(self, solution: ik.Solution, first: bool, cell: Any = None, limit: int | None = None) -> None:
        """Raise for a call of which too many samples failed, of this ``cell``; ``first``: none before has gone well;
        ``limit``: of the steps, if somebody set one."""
        said = advice(solution, first, cell, limit)
        try:
            solution.raise_for_status()
        except ik.ConvergenceError as error:
            text = f"{error} {said}. Forgive(share=1) goes on whatever fails."
            raise ik.ConvergenceError(text, error.solution, error.samples, error.residual_norms) from None

    def tell(self, solution: ik.Solution, spared: bool, anew: bool, limit: int | None = None) -> None:
        """Warn that samples of a call are forgiven; ``spared``: dearer solvers were not asked; ``anew``: no solve starts
        where the sample's last one ended; ``limit``: as in :meth:`refuse`."""
        failed = ~solution.converged
        found = f"have no equilibrium that {solution.solver} could find"
        if early := ended(solution, limit):
            found = f"are not solved, {early}"
        elif spared:
            found = f"were left by the cheap solvers, and dearer ones are asked in one of {self.every} calls"
        hint = (
            "Where samples come back, layer(x, index=their numbers) starts from their last equilibria, which solves most of "
            "these and keeps each at one of several equilibria. "
        )
        broken = int((solution.status == int(ik.Status.NONFINITE)).sum())
        if broken:
            found += (
                f" (of {broken} because NaN or Inf came up: where an input holds it all gradients of weights become NaN, "
                "as behind any layer; leave such samples out)"
            )
        extend.warn(
            f"{int(failed.sum())} of {failed.numel()} samples of a training call {found}: they get their best iterate and "
            f"the derivative {self.derivative!r} (see Forgive). Further ones are only counted, in layer.solution.converged "
            f"and by a Monitor; evaluation, and a share above {self.share:g}, raise. {hint if anew else ''}"
            'on_failure="raise" forgives nothing',
            ForgivenWarning,
        )


@functools.cache
def _exact() -> ik.Implicit:
    """The exact rule, made once, as :func:`_relay` is."""
    return ik.Implicit()


def _meant(rule: Any) -> Any:
    """The exact rule where a name of it was given."""
    return _exact() if isinstance(rule, str) and rule in _EXACT else rule


@functools.lru_cache(maxsize=8)
def _relay(work: float | None = None, trial: int | None = None) -> ik.Relay:
    """The relay that a name means, made once: its options are checked, which takes as long as some evaluations."""
    return ik.Relay(work=work, trial=trial)


class Effort:
    """How much of the relay a layer's calls spend on samples that its policy forgives (``Forgive(every=)``)."""

    def __init__(self) -> None:
        self.pause = 0  # training calls still to come without the dear members
        self.spared = False  # were they left out in the last call?
        self.vain = False  # did they leave samples when they were last asked?

    def spend(self, find: Callable[..., ik.Solution], solver: Any, policy: Any, training: bool = True) -> ik.Solution:
        """``find(solver)``, or in ``training`` with fewer members of it, by the ``policy``.

        What the first of several solves has found is where the next begins: ``find(solver, found)`` (:func:`gone_on`).  The
        figures of the solution are those of the last one.
        """
        named = isinstance(solver, str) and solver == "relay"
        relay = _relay() if named else solver
        self.spared = False
        if not isinstance(relay, ik.Relay):
            return find(solver)
        grants = [relay]
        if relay.work is None:
            trial = relay.trial or (_TRIED if policy == "raise" or _fails(policy) else None)
            works = (_WORK, _MORE)
            grants = [_relay(w, trial) if named else replace(relay, work=w, trial=trial) for w in works]
        if not (training and isinstance(policy, Forgive)) or extend.transforms_active():
            return find(grants[-1])
        relay = grants[0]
        found, spent = None, 0
        if self.pause:
            self.pause -= 1
            found = find(relay.brief())
            if policy.spares(~found.converged, self.vain):
                self.spared = True
                return found
            spent = found.evaluations
        solved = False
        for granted in grants:
            found = find(granted, found)
            spent += found.evaluations
            solved = extend.holds(found.converged.all())
            if solved or not policy.exceeded(~found.converged):
                break
        assert found is not None
        self.vain = not solved
        self.pause = policy.every - 1 if self.vain or spent > _DEAR else 0
        return found


def _fails(policy: Any) -> bool:
    """Does a call fail of which as many samples do as those among which the dear members of a relay begin with a few?"""
    return isinstance(policy, Forgive) and policy.share <= _HOPELESS


@dataclass(frozen=True)
@extend.options.adopts("inner", "name")
class _Rule(ik.Rule):
    """The exact rule, whose linear solver forgives (``policy``), and begins where the last ones ended (``trend``)."""

    inner: ik.Implicit
    policy: Forgive | None
    trend: Trend | None = None

    def attach(self, request: Any) -> Any:
        return self.inner.attach(cast(extend.Request, _Request(request, self.policy, self.trend)))


def followed(rule: Any, trend: Trend) -> Any:
    """The rule, if it is the exact one, with linear systems that begin where the last ones let expect their solutions; not
    inside transforms, where there is one call for many, or none at all."""
    if extend.transforms_active() or extend.has_forward_level():
        return rule
    if isinstance(rule, _Rule):
        return replace(rule, trend=trend)
    rule = _meant(rule)
    return _Rule(rule, None, trend) if isinstance(rule, ik.Implicit) else rule


class _Request:
    """A request that passes another linear solver on."""

    def __init__(self, request: Any, policy: Forgive | None, trend: Trend | None) -> None:
        self._request, self._policy, self._trend = request, policy, trend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def solve(self, linear_solver: ik.LinearSolver, **options: Any) -> Any:
        if self._trend is not None:
            linear_solver = Onward(linear_solver, self._trend)
        if self._policy is None:
            return self._request.solve(linear_solver, **options)
        return self._request.solve(_Linear(linear_solver, self._policy), watched=True, **options)


@dataclass(frozen=True)
class _Linear(Around):
    r"""``A u = b`` with ``A = J - I``: where the solver fails, ``u = -b`` (the first term of its series) or zero."""

    policy: Forgive

    def solve(self, A: Any, b: Tensor, **options: Any) -> ik.extend.LinearSolution:
        return self._forgiving(self.inner.solve(A, b, **options), A, b.unsqueeze(0))

    def solve_many(self, A: Any, b: Tensor, **options: Any) -> ik.extend.LinearSolution:
        return self._forgiving(self.inner.solve_many(A, b, **options), A, b)

    def _forgiving(self, answer: ik.extend.LinearSolution, A: Any, b: Tensor) -> ik.extend.LinearSolution:
        return self._scaled(self._instead(answer, b.flatten(0, 1)), A, b)

    def _instead(self, answer: ik.extend.LinearSolution, b: Tensor) -> ik.extend.LinearSolution:
        """Something else for what was not solved."""
        if bool(answer.converged.all()):
            return answer
        # what overflows is solved again in units of its own, and what is infinite is no failure: whoever asked does both
        failed = ~answer.converged & (b.abs().amax(1) <= torch.finfo(b.dtype).max ** 0.25)
        if not bool(failed.any()):
            return answer
        if int(failed.sum()) > self.policy.backward_share * len(failed):
            raise ik.ConvergenceError(
                f"the linear solve of the backward did not converge: {self.name}, {int(failed.sum())} of {len(failed)} "
                f"samples, more than the backward_share of {self.policy.backward_share:g} that Forgive allows. "
                f"{answer.reason}. {_CURE}"
            )
        extend.warn(  # one text, so that it is shown once
            "samples of a training call have an equilibrium and no derivative there: they get the derivative "
            f"{self.policy.derivative!r} (see Forgive), and are counted in layer.solution.backward.converged. {_CURE}",
            ForgivenWarning,
        )
        instead = -b if self.policy.derivative == "truncated" else torch.zeros_like(b)
        return answer._replace(x=torch.where(failed.unsqueeze(1), instead, answer.x))

    def _scaled(self, answer: ik.extend.LinearSolution, A: Any, b: Tensor) -> ik.extend.LinearSolution:
        """What was solved and is much larger than ``b`` lets expect, with less weight; reported as not solved."""
        size, reached = (torch.linalg.vector_norm(t, dim=1) for t in (b.flatten(0, 1), answer.x))
        largest = self.policy.amplification * size
        if not bool((answer.converged & (reached > largest)).any()):
            return answer
        largest = largest / _step_length(A, b, answer.converged.view(b.shape[:2]).all(0))
        over = answer.converged & (reached > largest)
        if not bool(over.any()):
            return answer
        extend.warn(  # one text, so that it is shown once
            "samples of a training call have a derivative that would outweigh all others: it is scaled down to "
            f"{self.policy.amplification:g} times that of one full step of the cell (see Forgive), and counted in "
            f"layer.solution.backward.converged. {_CURE}. Forgive(amplification=math.inf) scales nothing",
            ForgivenWarning,
        )
        share = torch.where(over, largest / reached, 1)
        return answer._replace(
            x=answer.x * share.unsqueeze(1),
            residual_norm=answer.residual_norm + (1 - share) * size,
            converged=answer.converged & ~over,
        )


def _step_length(A: Any, b: Tensor, which: Tensor) -> Tensor:
    """The largest ``|A b| / |b|`` of the samples ``which``, at most 1; ``b (k, batch, n)``, of each the largest of ``k``."""
    sizes = torch.linalg.vector_norm(b, dim=2)
    longest = sizes.argmax(0)
    samples = torch.arange(len(longest), device=b.device)
    moved = torch.linalg.vector_norm(A.mv(b[longest, samples]), dim=1) / sizes[longest, samples]
    moved = moved.masked_fill(
        ~(which & (moved > 0)), 0
    ).amax()  # NaN: of samples with nothing to differentiate, or not finite
    return torch.where(moved > 0, moved.clamp(max=1), 1)


def gone_on(before: ik.Solution, start: Any) -> Any:
    """Where a solve begins that goes on from another: solved samples at their solutions, the others at the ``start`` again.

    Samples are independent, so that nothing is lost by either: a solved one takes one evaluation more, and one that failed
    is solved as it would have been.  Not from its best iterate: how far out a member of the relay may go is measured from
    the start, and what stands near a point that is no equilibrium far out would be let go farther.
    """
    return masked(before.converged, extend.trees.tree_map(Tensor.detach, before.value), start)


def near(status: Tensor, z: Any, start: Any, first: Callable[[], Any] | None) -> Any:
    """The iterates ``z``, without graph, of samples that ran away the start; with ``first``, which returns the map there, of
    causal sequences: of all positions from the first on that is further out than 100 times its start, the first step, and
    the position before."""
    if first is None:
        return extend.trees.tree_map(Tensor.detach, masked(status != int(ik.Status.DIVERGED), z, start))
    with torch.no_grad(), extend.modules_held():
        moved = first()

    def choose(z: Tensor, z0: Tensor, f0: Tensor) -> Tensor:
        size, reach = (
            t.abs().reshape(*t.shape[:2], -1).amax(2) for t in (z.detach(), torch.maximum(z0.abs(), f0.abs()))
        )
        before = torch.nn.functional.pad(size[:, :-1], (1, 0))
        stands = (size <= _REACH * torch.maximum(reach, before)).cummin(1).values
        return torch.where(stands.view(*stands.shape, *[1] * (z.ndim - 2)), z.detach(), z0)

    return extend.trees.tree_map(choose, z, start, moved)


def masked(converged: Tensor, solved: Any, instead: Any) -> Any:
    """By sample ``solved`` where ``converged``, else ``instead``: pytrees of tensors ``(batch, ...)``."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(converged.view(-1, *[1] * (a.ndim - 1)), a, b)

    return ik.extend.trees.tree_map(choose, solved, instead)
