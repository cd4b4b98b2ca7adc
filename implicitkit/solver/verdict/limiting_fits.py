r"""Does a fit tend to a limit on the way to infinity?

``z_1 s / (z_2 + s)`` is the straight line ``(z_1 / z_2) s`` in the end: out there the residuals ``r`` hardly change with the
length of ``z``, the gradient along it vanishes as ``1 / |z|^2``, and what ``J`` has of that direction is rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

_OUT = (1.1, 2.0, 16.0, 256.0, 4096.0)  # times z, where a fit is no worse than at z
_IN = (16.0, 1e3, 1e6, 1e9, 1e12)  # parts of z, at one of which it is another one
_OTHER = 16.0  # times what equal values may differ by: values that are not equal


def has_a_limit(f: Evaluations, J: Tensor, r: Tensor, z: Tensor, which: Tensor) -> Tensor:
    r"""Where a fit is no worse further out along the ray through ``z``, and another one further in, ``(batch,)``.

    ``|r(c z)| <= |r(z)| + eps^(2/3) (|r| + max_k |J_k z_k|)`` for ``c`` from 1.1 to 4096: out of a minimum one of them is
    more, as far as any residual depends on the length of ``z``.  Where none does on all the way to the origin
    (``z_1 / z_2``), every point of the ray is a fit as good; and where no ``J_k z_k`` is left, it ends on a plateau.  Five
    evaluations, and up to five more where these agree.

    Args:
        f: the problem's. J: ``dr/dz``, ``(batch, m, n)``. r: ``(batch, m)``. z: ``(batch, n)``. which: the samples in
            question, ``(batch,)``.
    """
    norm, terms = torch.linalg.vector_norm(r, dim=1), (torch.linalg.vector_norm(J, dim=1) * z.abs()).amax(1)
    same = f.eps ** (2 / 3) * (norm + terms)

    def at(times: float, less: Tensor | float = 0.0) -> Tensor:
        there = f.problem.flat_residuals(f.kernel, times * z).detach().to(r)
        return torch.linalg.vector_norm(there - less, dim=1).nan_to_num(torch.inf, torch.inf)

    still, moved = which & (terms > _OTHER * same), torch.zeros_like(which)
    for times in _OUT:
        if bool(still.any()):
            still = still & (at(times) <= norm + same)
    for part in _IN:
        if bool((still & ~moved).any()):
            moved = moved | (at(1 / part, less=r) > _OTHER * same)
    return still & moved
