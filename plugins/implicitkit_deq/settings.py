"""How a layer's equilibrium is found and differentiated: one frozen object for training, one for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import implicitkit as ik
from implicitkit.extend import POLICIES, get_rule, get_solver, options
from implicitkit_deq.unsolved_samples import Forgive


@dataclass(frozen=True)
class Settings(ik.extend.Configured):
    """The options of :func:`ik.solve` that a layer uses; meanings and defaults are its own.

    Args:
        solver, rule: a registered name or a configured object (``ik.Anderson(memory=8)``, ``ik.Phantom(5, 0.5)``).
        rtol, atol: a sample has converged when ``|f(z) - z|_2 <= atol + rtol |z|_2``; ``None``: by the dtype.
        max_steps: ``None``: the solver's own limit.
        on_failure: ``"raise"``, ``"warn"``, ``"ignore"`` or ``"nan"``, forward and backward; or a :class:`Forgive`.
        trace: keep the residual norm of every step in ``layer.solution.trace``.
        callback: ``(step, z, residual_norm)`` after each step; ``True`` stops the solve.

    Raises:
        TypeError: a number that is none. ValueError: an option out of range. UnknownNameError: no solver has this name.
    """

    solver: Any = "relay"
    rule: Any = "auto"
    rtol: float | None = None
    atol: float | None = None
    max_steps: int | None = None
    on_failure: str | Forgive = "raise"
    trace: bool = False
    callback: Callable[[int, Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        for part, find in ((self.solver, get_solver), (self.rule, get_rule)):
            if not (isinstance(part, str) and part == "auto"):
                find(part)  # what is none is refused here, not at the first call
        tolerance = options.optional(options.not_negative())
        options.check_options(
            self,
            rtol=tolerance,
            atol=tolerance,
            max_steps=options.optional(options.at_least(1)),
            trace=options.flag(),
            callback=options.optional(options.function("callback(step, z, residual_norm)")),
        )
        if not isinstance(self.on_failure, Forgive) and self.on_failure not in POLICIES:
            raise ValueError(
                f"on_failure must be one of {', '.join(map(repr, POLICIES))} or a Forgive(...), got {self.on_failure!r}"
            )

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with some of them replaced.

        Raises:
            TypeError: a name that is no setting.
        """
        return dataclasses.replace(self, **changes)

    def options(self) -> dict[str, Any]:
        """These settings as keyword arguments of :func:`ik.solve`: a :class:`Forgive` ignores failures there, and forgives
        them here."""
        given = dict(vars(self))
        policy = self.on_failure
        if isinstance(policy, Forgive):
            given |= {"on_failure": "ignore", "rule": policy.rule(self.rule)}
        return given


@dataclass(frozen=True)
class Pretraining(ik.extend.Configured):
    """Training by a shallow unrolled network first: ``steps`` applications of the cell, ordinary backpropagation.

        z_L,  z_{k+1} = cell(z_k, x),  L = steps, or drawn for each call from {steps, ..., deepest}

    The warm-up of Bai, Kolter & Koltun 2019 (appendix) and of MDEQ (2020): near its initialisation a cell need not have an
    equilibrium worth finding, and a few tied layers train faster.  What is trained at one depth holds for that depth: the
    iteration need not come to rest, and the loss at the equilibrium, if there is one, may be any.  At a depth that changes
    from call to call the output cannot depend on it, so that the iterates come to rest (``deepest``).  May be replaced at
    any time (``layer.pretraining``), by ``None`` to be implicit from the next call on.

    Args:
        calls: training calls of the layer that are unrolled; afterwards it is implicit.
        steps: applications of the cell in each, or the fewest.
        deepest: applications at most, all numbers from ``steps`` on equally often.  The number depends on that of the call
            only: the same in every process, and in a training that is gone on with.  ``None``: always ``steps``.

    Raises:
        ValueError: a number less than 1, or ``deepest`` less than ``steps``.

    Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", appendix.  Varied depth: this library's, measured on the
    copy-memory task (docs/trainings.md); in the spirit of Anil et al. (2022), "Path independent equilibrium models can
    better exploit test-time computation".
    """

    calls: int
    steps: int
    deepest: int | None = None

    def __post_init__(self) -> None:
        count = options.at_least(1)
        options.check_options(self, calls=count, steps=count, deepest=options.optional(count))
        if self.deepest is not None and self.deepest < self.steps:
            raise ValueError(f"deepest ({self.deepest}) must be at least steps ({self.steps})")

    def depth(self, call: int) -> int:
        """Applications of the cell in the training call of this number, from 0 on."""
        if self.deepest is None:
            return self.steps
        own = torch.Generator().manual_seed(call)  # nobody else's numbers
        drawn = torch.randint(self.steps, self.deepest + 1, (), generator=own, device="cpu")
        return int(drawn)
