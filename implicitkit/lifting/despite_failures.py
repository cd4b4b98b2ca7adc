"""Lifting a function that has no value for some samples of the batch at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from implicitkit.foundation.failing_matrices import attempted
from implicitkit.lifting.lifted import Lifted, lift


def lift_despite_failures(
    function: Callable[..., Any], z0: Any, args: tuple[Any, ...], check: Callable[[Any], None], batch: int
) -> Lifted:
    """:func:`~implicitkit.lifting.lifted.lift` where some samples have matrices without factors: these fail by themselves,
    and ``Lifted.failed`` says why."""

    def made() -> tuple[Lifted, list[Any]]:
        seen: list[Any] = []

        def look(out: Any) -> None:
            check(out)
            seen.append(out)

        return lift(function, z0, args, look), seen

    found, failed = attempted(made, batch)
    lifted: Lifted = found[0]
    lifted.failed = failed
    return lifted
