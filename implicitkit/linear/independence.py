"""Are the samples of a batch independent, as ``batch_dims`` says?"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, seeded
from implicitkit.foundation.linear_map import Map
from implicitkit.foundation.operators import Operator

_SEEN: dict[Hashable, None] = {}  # what has been found in order, the oldest first
_MANY = 4096
_CURE = "Make one system of them with batch_dims=0, or let the function treat every sample alone (module.eval())"


def refuse_coupled(A: Operator, key: Hashable) -> None:
    r"""Raise unless ``dF_i/dz_j = 0`` for samples ``i != j``.

    Everything is solved and differentiated sample by sample, by the blocks ``dF_i/dz_i`` of the Jacobian alone.  A residual
    can vanish all the same where samples are coupled (by a mean over the batch, say), but its derivative would be wrong.
    A product tells: where weights ``w`` are zero on half of the samples, so is ``J^T w``; an entry there above
    ``eps^{3/4}`` of the largest comes from another sample.  Of four products every sample has weights in two.  Up to six
    samples have a pair of their own each, so that for any two of them one product sees the one without the other: nothing
    is missed.  More samples draw theirs at random: a coupling of just two is missed with a probability below 1/6.

    Args:
        A: ``J = dF/dz``, or ``J - I``. key: what tells the function from others; it is asked once for each.

    Raises:
        ValueError: the samples depend on each other.
    """
    if A.batch == 1 or key in _SEEN:
        return
    if said := _coupled(A.rmv, A.like.new_empty(A.batch, A.size)):
        raise ValueError(f"{said}, and a derivative formed sample by sample would be wrong. {_CURE}")
    _SEEN[key] = None
    if len(_SEEN) > _MANY:
        del _SEEN[next(iter(_SEEN))]


def why_coupled(residual: Map, z: Tensor) -> str:
    """A sentence for a search that failed, if samples are coupled at ``z``, where it ended, or nearer to zero."""
    with contextlib.suppress(Exception):  # the function is not to be differentiated, or not to be called there
        for point in (z, z / (1 + z.abs())) if len(z) > 1 else ():
            pull = autodiff.vjp(residual, point)[1]
            if said := _coupled(lambda w: pull(w)[0], z):  # noqa: B023
                return f"{said[0].upper()}{said[1:]}, and moving each of them for itself may lead nowhere. {_CURE}."
    return ""


def _coupled(pull: Map, like: Tensor) -> str:
    """Half a sentence that says so, and of which sample, if products with ``J^T`` see that samples are.

    Args:
        pull: a product, of matrices ``like`` that, ``(batch, n)``.
    """
    weights = seeded.uniform(*like.shape, seed=1).to(like) + 0.5
    for given in _looks(len(like)).to(like.device):
        pulled = pull(torch.where(given.unsqueeze(1), weights, 0)).detach().abs().nan_to_num(0, 0, 0).amax(1)
        foreign = torch.where(given, 0, pulled)
        if float(foreign.max()) > torch.finfo(pulled.dtype).eps ** 0.75 * float(pulled.max()):
            return (
                "the samples of the batch are not independent, as batch_dims says they are: the equations of others depend "
                f"on the unknowns of sample {int(foreign.argmax())} (a mean or a norm over the batch does that, batch "
                "normalisation in training mode, or attention and recurrent layers without batch_first=True)"
            )
    return ""


def _looks(batch: int) -> torch.Tensor:
    """Which samples have weights in each product, ``(looks, batch)``, with some in each and some not."""
    if batch <= 3:  # each alone
        return torch.eye(batch, dtype=torch.bool, device="cpu")
    pairs = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    order = seeded.uniform(batch, seed=0).argsort()
    return torch.tensor(pairs, dtype=torch.bool, device="cpu")[order % len(pairs)].T
