"""What an evaluation costs, and when it costs more to leave rows out of it than to keep them.

Counted in numbers that it touches (:mod:`implicitkit.linear.price`), by the operations that were seen when the function was
lifted: as much as a product with its Jacobian, whose graph has two nodes for each.
"""

from __future__ import annotations

from implicitkit.linear.price import CALL, cost_of_product
from implicitkit.solver.evaluations import Evaluations

__all__ = ["cost_of", "dropping_pays"]

_DROPPED = 100 * CALL  # to leave rows out costs so much, with a method that remembers steps ...
_EVALUATIONS = 4  # ... and is worth it where they cost more in so many evaluations


def cost_of(f: Evaluations) -> float | None:
    """What one evaluation costs, in numbers; ``None`` where that is not known."""
    system, work = f.system, f.system.lifted.work
    if not work.operations:
        return None
    part = system.batch / max(1, system.layout.batch)
    numbers, through = system.batch * system.size, int(3 * work.numbers * part)
    return cost_of_product(numbers, 2 * work.operations + 1, through, int(work.products * part / max(1, numbers)))


def dropping_pays(f: Evaluations, share: float) -> bool:
    """Does it cost less to go on with a share of the rows than to evaluate all a few times more?  With a method that does
    not weigh that, it does."""
    cost = cost_of(f) if f.weighs else None
    return cost is None or _EVALUATIONS * (1 - share) * cost >= _DROPPED
