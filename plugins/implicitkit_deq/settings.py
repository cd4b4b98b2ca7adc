"""How a layer's equilibrium is found and differentiated: one frozen object for training, one for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
