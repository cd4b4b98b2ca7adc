"""Trial points where the user's function fails instead of returning NaN.

``torch.linalg.cholesky`` raises outside the positive definite matrices, ``inv`` and ``solve`` at singular ones, ``eigh`` of
numbers that are not finite: a step that leads there is a trial like one out of the domain of ``log``, from where NaN
comes back, and is shortened like it.  So is one at which NumPy raises its ``LinAlgError``, Python an ``ArithmeticError`` in
its own words (a division by zero, an overflow), or :mod:`math` its "math domain error"; and one for which a solve inside
the function has no solution (a bilevel problem, tried far out).  At the start, where nothing is
known yet, the error is the user's, and so is any other error anywhere: a ``ValueError`` may mean a fault as well as a
domain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError

_RAISED = (torch.linalg.LinAlgError, ConvergenceError, ArithmeticError, ValueError)
# what Python, its math module and NumPy say of numbers; others who raise these errors say something else
_OF_MATH = ("math domain error", "math range error")
_OF_NUMBERS = ("division by zero", "modulo by zero", "negative power", "out of range", "too large", "encountered in")


class Outside:
    """The last points where the function did not fail, by their number of columns; of samples that fail elsewhere the
    value is NaN, and that of all others is their own.  ``inner``: what the last solve inside said that had no solution."""

    def __init__(self) -> None:
        self._inside: dict[int, Tensor] = {}
        self.inner = ""

    def evaluate(self, kernel: Callable[..., Tensor], z: Tensor, theta: Sequence[Tensor] = ()) -> Tensor:
        """``kernel(z, *theta)``, ``z`` ``(batch, k)``, with NaN for samples where it raises an error of its domain.

        Raises:
            Exception: the function's, where no point is known at which it has a value, or of another kind.
        """
        try:
            out = kernel(z, *theta)
        except _RAISED as error:
            if not _is_of_a_domain(error):
                raise
            known = self._inside.get(z.shape[1])
            if known is None or len(known) != len(z):
                raise
            if isinstance(error, ConvergenceError):
                self.inner = f"a solve inside the function failed where it was tried: {str(error).partition('. ')[0]}"
            at: Callable[[Tensor], Tensor] = lambda y: kernel(y, *theta)  # noqa: E731
            failed = _failed(at, z, known)
            out = at(torch.where(_rows(failed, z), known, z))
            return torch.where(_rows(failed, out), torch.nan * z.sum(1).reshape(-1, *(1,) * (out.ndim - 1)), out)
        if not compat.transforms_active():
            self._inside[z.shape[1]] = z.detach() if z.requires_grad else z
        return out

    def select(self, samples: Tensor) -> Outside:
        """What is known of some samples."""
        few = Outside()
        few._inside = {k: z.index_select(0, samples) for k, z in self._inside.items()}
        return few


def _is_of_a_domain(error: Exception) -> bool:
    """Does an error say that a function has no value here?  NumPy's ``LinAlgError`` is a ``ValueError`` (and NumPy need not
    be there)."""
    if isinstance(error, (torch.linalg.LinAlgError, ConvergenceError)) or type(error).__name__ == "LinAlgError":
        return True
    said = str(error)
    return said in _OF_MATH or (isinstance(error, ArithmeticError) and any(words in said for words in _OF_NUMBERS))


def _rows(which: Tensor, like: Tensor) -> Tensor:
    return which.reshape(-1, *(1,) * (like.ndim - 1))


def _failed(kernel: Callable[[Tensor], Tensor], z: Tensor, known: Tensor) -> Tensor:
    """Which samples fail: halves of those in doubt are put among points that are known, ``2 log2(batch)`` evaluations for
    one."""
    failed = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    doubtful = [torch.arange(len(z), device=z.device)]
    while doubtful:
        rows = doubtful.pop()
        asked = torch.zeros_like(failed).index_fill(0, rows, True)
        if len(rows) < len(z):  # all of them are known to fail together
            try:
                with torch.no_grad():
                    kernel(torch.where(asked.unsqueeze(1), z, known))
                continue
            except _RAISED as error:
                if not _is_of_a_domain(error):
                    raise
        if len(rows) == 1:
            failed = failed | asked
        else:
            doubtful.extend(rows.tensor_split(2))
    return failed
