"""Does a function meet operations with a kink, and has a solve come near one of them?"""

from __future__ import annotations

from torch import Tensor

from implicitkit.problem.epigraph import Seen
from implicitkit.problem.kinked_operations import NEAR
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.kinks import beside_spectra


def meets_kinks(f: Evaluations, z: Tensor, since: Tensor | None = None) -> bool:
    """Does the function, or a constraint, meet operations with a kink, and is ``z`` near one (asked if it is known ``since``
    where)?  Beside one of eigenvalues or singular values, no: no epigraph stands for that.  One evaluation, of these two
    more; none of compiled functions, whose operations nobody sees."""
    if f.system.lifted.compiled:
        return False
    seen = _seen(f, z)
    counts = any(site.counts for site in seen.sites)
    if counts and since is not None and not seen.near:
        counts = _have_closed(seen, _seen(f, since))
    return counts and not (f.kind.minimisation and f.system.lifted.spectral and bool(beside_spectra(f, z).any()))


def _have_closed(now: Seen, before: Seen) -> bool:
    """Is any gap far smaller than it was: have numbers that are alike gone to their kinks together?"""
    if now.sites != before.sites:
        return False
    return any(bool((a <= NEAR * b).any()) for a, b in zip(now.gaps, before.gaps, strict=True))


def _seen(f: Evaluations, z: Tensor) -> Seen:
    with Seen(z, (), f.system.layout.batch_dims) as seen:
        f.kernel(z)
    f.evaluations += 1
    f.sample_evaluations += len(z)
    return seen
