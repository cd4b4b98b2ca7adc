"""Patterns that are known: said by the user, or found once for a function and kept.

A pattern is believed only as long as every use of it is confirmed (:meth:`Coloured.values` compares with one product).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicitkit.foundation.errors import SparsityWarning, warn

if TYPE_CHECKING:
    from implicitkit.sparsity.compression import Coloured
    from implicitkit.sparsity.low_rank import Bordered

SMALLEST = 128  # unknowns from which a pattern is looked for
_KEPT = 128  # functions whose pattern is remembered
_FRACTION = 8  # a matrix with more than one entry in so many is not worth the name sparse ...
_FRACTION_SMALL = 4  # ... of few unknowns: a pattern saves products still
_FEW = 2048
_LARGE = 768  # unknowns from which a low-rank part is looked for: below, a dense matrix is cheap
_EACH, _MEMBERS = 64, 1 << 22  # dependencies, in the mean of a number or of one intermediate result: they take a second
_BUDGET = 1 << 20  # of one intermediate result, of which numbers have names
_SCALARS = 12  # numbers that all unknowns share, at most ...
_MORE_SCALARS = 64  # ... where the equations for them, the square of so many for each unknown, take ...
_NUMBERS = 1 << 25  # ... no more than so many numbers
_found: OrderedDict[Hashable, Any] = OrderedDict()


class Sparsity:
    """The pattern of one function's Jacobian, looked for when somebody asks.

    Args:
        key: what tells this function from others (:mod:`implicitkit.sparsity.identity`, shapes); patterns are remembered by
            it.
        given: ``"auto"``, ``None`` (there is none), or the user's: a SciPy or torch sparse matrix, a dense one, or
            bandwidths ``(lower, upper)``.
        diagonal: what is given is the pattern of a map ``f``, and that of ``f(z) - z`` is wanted.
        symmetric: the Jacobian is.
        smallest: unknowns from which a pattern is looked for.
    """

    def __init__(
        self,
        key: Hashable,
        given: Any = "auto",
        diagonal: bool = False,
        symmetric: bool = False,
        smallest: int = SMALLEST,
    ) -> None:
        self.key, self.given, self.diagonal, self.symmetric, self.smallest = key, given, diagonal, symmetric, smallest
        self._ready: Coloured | None = None  # what was given
        self._refuted = 0
        self._hopeless = False

    def find(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Coloured | None:
        """The pattern of ``function: (batch, n) -> (batch, m)`` at ``z``; ``None`` where there is none worth having.

        Raises:
            ValueError: the user's pattern does not have the shape of the Jacobian.
        """
        if self.given is None:
            return None
        if not isinstance(self.given, str):
            return self._given(function, z)
        if z.shape[1] < self.smallest or self._refuted > 1:
            return None
        if self.key not in _found:
            _remember(self.key, detected(function, z, self.symmetric))
        _found.move_to_end(self.key)
        return _found[self.key]

    @property
    def is_known(self) -> bool:
        """Has a pattern worth having been found before, with a few shared numbers or without?"""
        return _found.get(self.key) is not None or _found.get(("bordered", self.key)) is not None

    def find_bordered(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Bordered | None:
        """The pattern of a matrix that has none, as it is, but would have without a few numbers that all unknowns share;
        ``None`` where it is not one of those, or small."""
        if self.given != "auto" or z.shape[1] < _LARGE or self._hopeless:
            return None
        key = ("bordered", self.key)
        if key not in _found:
            _remember(key, _detected_bordered(function, z))
        _found.move_to_end(key)
        return _found[key]

    def find_either(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Coloured | Bordered | None:
        """:meth:`find`, else :meth:`find_bordered`."""
        found = self.find(function, z)
        return self.find_bordered(function, z) if found is None else found

    def refute_bordered(self) -> None:
        """Note that a product has shown an entry that the pattern of :meth:`find_bordered` does not have."""
        self._hopeless = True
        _found[("bordered", self.key)] = None

    def refute(self, found: Coloured, error: float) -> None:
        """A product has shown an entry that the pattern does not have: it is not used again."""
        self._refuted += 1
        if found.origin == "given":
            warn(
                f"jac_sparsity is wrong: the Jacobian has entries that it does not have (products differ by {error:.1e}, "
                "relative); the pattern is ignored, and looked for automatically",
                SparsityWarning,
            )
            self.given, self._refuted = "auto", 0
            return
        _found.pop(self.key, None)
        if self._refuted > 1:
            _found[self.key] = None
            warn(
                "the sparsity pattern found in one evaluation does not hold in others (control flow on values, or numbers "
                f"that leave torch; products differ by {error:.1e}, relative): the function is treated as dense; pass "
                "jac_sparsity= to say what holds everywhere",
                SparsityWarning,
            )

    def _given(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Coloured | None:
        if self._ready is None:
            from implicitkit.sparsity.compression import Coloured, as_pattern, coloured

            if isinstance(self.given, Coloured):  # a problem of ours that knows its colours, too
                self._ready = self.given
                return self._ready
            with torch.no_grad():
                rows = function(z).shape[1]
            pattern = as_pattern(self.given, rows, z.shape[1], self.diagonal)
            self._ready = coloured(pattern, "given", self.symmetric)
            if self._ready is None:
                self.given = None
        return self._ready


def detected(function: Callable[[Tensor], Tensor], z: Tensor, symmetric: bool = False) -> Coloured | None:
    """The pattern of ``function`` at ``z``, by watching one evaluation; ``None`` where there is none worth having."""
    from implicitkit.sparsity.accumulation import follows
    from implicitkit.sparsity.compression import coloured
    from implicitkit.sparsity.detection import detect

    batch, n = z.shape
    with torch.no_grad():
        longest = max(n, function(z).shape[1])
    fraction = _FRACTION_SMALL if n <= _FEW else _FRACTION
    most = max(_EACH * batch * longest, _MEMBERS)  # of all samples, which are watched together
    each = max(32, min(n // fraction, most // (batch * longest)))
    found = detect(function, z, budget=batch * longest * each, each=each)
    if found.pattern is None or found.pattern.nnz * fraction > found.pattern.shape[0] * n:
        return None
    return coloured(found.pattern, symmetric=symmetric, followed=follows(found.seen))


def _detected_bordered(function: Callable[[Tensor], Tensor], z: Tensor) -> Bordered | None:
    from implicitkit.sparsity.detection import detect
    from implicitkit.sparsity.low_rank import bordered

    scalars = max(_SCALARS, min(_MORE_SCALARS, int((_NUMBERS / z.shape[1]) ** 0.5)))
    found = detect(function, z, budget=max(_BUDGET, 64 * z.numel()), scalars=scalars)
    if found.pattern is None or not found.named:
        return None
    return bordered(found.pattern, z.shape[1])


def _remember(key: Hashable, found: Any) -> None:
    _found[key] = found
    while len(_found) > _KEPT:
        _found.popitem(last=False)
