r"""Which entries of a Jacobian can be other than zero, from one evaluation of the function.

For ``F: R^n -> R^m`` the pattern is ``{(i, j)}`` with ``dF_i/dz_j`` not identically zero.  One evaluation is watched, and
the set of unknowns that each intermediate number depends on is propagated through every operation (Griewank & Walther,
*Evaluating Derivatives*, 2nd ed., SIAM 2008, section 7.1: "index domains"), so that no value can hide an entry: ``0 * z_j``
depends on ``z_j``.  An operation that is not known makes its results depend on all its arguments: too much, never too
little.  Control flow on values gives the pattern of the branch taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from implicitkit.sparsity import index_sets
from implicitkit.sparsity.index_sets import IndexSets, TooDense
from implicitkit.sparsity.rules import RULES
from implicitkit.sparsity.tracing import NotTraceable, Trace, watching


@dataclass(frozen=True)
class Detected:
    """What watching an evaluation has found.

    Attributes:
        pattern: boolean ``(m, n)`` in compressed rows, the same for every sample; ``None`` if there is none to be had.
        reason: why there is none. guessed: operations without a rule, which may have made the pattern larger than need be.
        named: how many numbers have got names. seen: names of the operations that have met an unknown.
    """

    pattern: IndexSets | None
    reason: str = ""
    guessed: tuple[str, ...] = field(default=())
    named: int = 0
    seen: frozenset[str] = frozenset()


def detect(
    function: Callable[[Tensor], Tensor], z: Tensor, budget: int | None = None, each: int = 0, scalars: int = 0
) -> Detected:
    """The pattern of ``d function / dz``.

    Args:
        function: ``(batch, n) -> (batch, m)``, row by row independent. z: ``(batch, n)``, plain.
        budget, each: dependencies of one intermediate result, and of one number in it on average: where both are passed
            the matrix counts as dense.
        scalars: so many numbers that depend on many unknowns get names, and count as unknowns ``n, n + 1, ...``.

    Returns:
        One pattern ``(m, n)``, or ``(m, n + scalars)``, that holds for each sample.  An error of the function itself is
        raised by whoever evaluates it next, without the trace: here it is a reason.
    """
    batch, unknowns = z.shape
    point = z.detach().clone()
    trace = Trace(RULES, unknowns, scalars, batch)
    trace.write(point, index_sets.identity(point.numel(), unknowns, scalars))
    try:
        with index_sets.limited(budget, each), watching(trace):
            out = function(point)
        sets = trace.read(out.detach() if out.requires_grad else out)
    except TooDense as error:
        return Detected(None, f"the Jacobian is dense: {error}", tuple(trace.guessed))
    except NotTraceable as error:
        return Detected(None, str(error), tuple(trace.guessed))
    except Exception as error:  # whatever the function does that a trace does not allow
        return Detected(None, f"{type(error).__name__} while tracing: {error}", tuple(trace.guessed))
    if batch > 1:
        rows = out.shape[1]
        sets = index_sets.merge(sets, np.arange(batch * rows) % rows, rows)
    return Detected(sets, "", tuple(dict.fromkeys(trace.guessed)), trace.named, frozenset(trace.seen))
