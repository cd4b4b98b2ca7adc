r"""The pattern of the equations of all steps, and the colours of its columns, which follow from those of a right-hand side.

Row ``(k, i, w)``, number ``w`` at point ``i`` of step ``k``, has the columns ``(k, j, v)`` of the numbers ``v`` that ``f_w``
looks at, and of itself, at all points ``j`` of its step, and ``(k - 1, s, w)``, where the step begins.  So columns share no
row whose numbers ``v`` have different colours in the pattern of ``df/dy + I``, or which stand at different points, or at
different places in time but for the last points of two steps in a row: ``s + 1`` times the colours of ``df/dy + I``.

Of explicit steps, of one point each, row ``(k, w)`` has the columns ``(k, w)`` and ``(k - 1, v)`` of the numbers ``v`` that
the six stages of step ``k`` look at: twice the colours of ``(df/dy + I)^6``.

Source: Curtis, Powell & Reid (1974), IMA J. Appl. Math. 13, for what colours are for.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.factors.analysis import WIDEST_BAND, Analysis, analyse, of_repeated_parts
from implicitkit.linear.factors.block_triangular import SMALLEST_PART
from implicitkit.linear.factors.complex_pairs import pairs_of
from implicitkit.sparsity.colouring import groups_of_columns, of_columns
from implicitkit.sparsity.compression import Coloured

_KEPT = 1 << 20  # entries of a pattern that is kept for the next solve, at most


def coloured_steps(
    coupling: sp.csr_matrix, steps: int, stages: int, event: bool, linked: bool = False
) -> Coloured | None:
    """The pattern, and its colours; ``None`` where these are not fewer than half the unknowns.

    Args:
        coupling: the pattern ``(n, n)`` of ``df/dy``. event: its time is the last unknown, which all equations depend on,
            and its equation the last, of the state at the end. linked: of explicit steps, below.
    """
    coupling = _sorted(_reached(coupling) if linked else coupling)
    if steps * stages**2 * coupling.nnz > _KEPT:
        return _coloured(coupling, steps, stages, event, linked)
    said = (coupling.shape[0], coupling.indptr.tobytes(), coupling.indices.tobytes(), coupling.indices.dtype)
    return _known(said, steps, stages, event, linked)


@functools.lru_cache(maxsize=8)
def _known(
    said: tuple[int, bytes, bytes, np.dtype[Any]], steps: int, stages: int, event: bool, linked: bool
) -> Coloured | None:
    """The coloured steps of a pattern that is given by its numbers, which can be looked up: the next solve need not find
    them."""
    n, pointer, indices, kind = said
    found = np.frombuffer(indices, dtype=kind), np.frombuffer(pointer, dtype=kind)
    coupling = sp.csr_matrix((np.ones(len(found[0]), dtype=bool), *found), shape=(n, n))
    return _coloured(coupling, steps, stages, event, linked)


def _reached(coupling: sp.csr_matrix) -> sp.csr_matrix:
    """What an explicit step of six stages looks at."""
    one = sp.csr_matrix(coupling + sp.identity(coupling.shape[0])).astype(bool)
    three = one @ one @ one
    return three @ three


def _coloured(coupling: sp.csr_matrix, steps: int, stages: int, event: bool, linked: bool) -> Coloured | None:
    n, s = coupling.shape[0], stages
    inner = sp.csr_matrix(coupling + sp.identity(n, dtype=bool, format="csr")).astype(bool)
    found = groups_of_columns(inner)
    colours, count = (np.arange(n), n) if found is None else found
    parity = np.arange(steps).reshape(-1, 1, 1) % 2
    place = np.arange(s).reshape(1, -1, 1) + (np.arange(s) == s - 1).reshape(1, -1, 1) * parity
    groups, total = (place * count + colours).reshape(-1), (s + 1) * count
    rows: list[int] = []
    whole = _chain(coupling, steps) if linked else _pattern(coupling, steps, s)
    if event:
        whole = _with_event(whole, n)
        groups, total, rows = np.append(groups, total), total + 1, [whole.shape[0] - 1]
    told = of_columns(groups, total, rows)
    if 2 * told.products > whole.shape[0]:
        return None
    ready = Coloured(whole, "given", told=told)
    if not event and 2 * s * n > WIDEST_BAND:
        ready.remembered((analyse,), lambda: _analysis(whole, s * n, pairs_of(inner) is not None))
    return ready


def _analysis(whole: sp.csr_matrix, step: int, is_complex: bool) -> Analysis:
    """What looking at all of the pattern would find, of ``step`` unknowns a step: that the steps, or a few small ones
    together, are parts that follow each other, and alike."""
    size = whole.shape[0]
    each = -(-SMALLEST_PART // step) * step
    if 2 * each > size:
        return analyse(whole)
    return of_repeated_parts(whole, np.append(np.arange(0, size, each), size), is_complex)


def _pattern(coupling: sp.csr_matrix, steps: int, s: int) -> sp.csr_matrix:
    """Blocks on the diagonal, the identity of the last stage below them."""
    n = coupling.shape[0]
    block = sp.kron(np.ones((s, s), dtype=bool), coupling) + sp.identity(s * n, dtype=bool)
    last = sp.csr_matrix(([True] * s, (range(s), [s - 1] * s)), shape=(s, s))
    before = sp.kron(last, sp.identity(n, dtype=bool))
    whole = sp.kron(sp.identity(steps, dtype=bool), block) + sp.kron(sp.eye(steps, k=-1, dtype=bool), before)
    return _sorted(whole)


def _chain(coupling: sp.csr_matrix, steps: int) -> sp.csr_matrix:
    """The identity on the diagonal, and blocks below it."""
    below = sp.kron(sp.eye(steps, k=-1, dtype=bool), coupling)
    return _sorted(sp.identity(steps * coupling.shape[0], dtype=bool) + below)


def _with_event(whole: sp.csr_matrix, n: int) -> sp.csr_matrix:
    """Its time is everywhere, and its own equation looks at the state at the end, and at it."""
    size = whole.shape[0]
    end = sp.csr_matrix(([True] * n, ([0] * n, range(size - n, size))), shape=(1, size))
    return _sorted(sp.bmat([[whole, np.ones((size, 1), dtype=bool)], [end, np.ones((1, 1), dtype=bool)]]))


def _sorted(matrix: Any) -> sp.csr_matrix:
    found = sp.csr_matrix(matrix).astype(bool)
    found.sum_duplicates()
    found.eliminate_zeros()  # a product with a full block is made of full blocks
    found.sort_indices()
    return found
