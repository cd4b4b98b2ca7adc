r"""Eigenvalues and singular values, of which a function has a kink where they coincide or vanish.

A function of a matrix through its eigenvalues is smooth where two of them coincide if it changes alike with both, as a trace
or a logarithm of a determinant does; it has a kink there if not, as the largest has.  Through singular values it has one,
too, where one vanishes that it does not depend on by its square: the nuclear norm.

Source: Lewis (1996), "Derivatives of spectral functions", Math. Oper. Res. 21, 576-588.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat, trees

_NEAR = 1e-2  # of the largest: values that nearly vanish or coincide
_APART = (1e-4, 1e-4 / 16)  # of the largest: how far apart values are kept, so that each of several has its own part
_UNLIKE = 0.1  # of the largest change with any of them: it changes otherwise with these two
_NORMS = {"linalg_matrix_norm": "ord", "linalg_norm": "ord", "norm": "p"}


class Spectra(TorchFunctionMode):
    """Collects the eigenvalues and singular values that a function meets, with something of their own added, by which the
    function can be differentiated.

    Args:
        apart: how far they are kept apart, of the largest of them.

    Attributes:
        met: the values, ``(..., k)`` in order, what is added, and whether they are singular values.
    """

    def __init__(self, apart: float) -> None:
        super().__init__()
        self._apart = apart
        self.met: list[tuple[Tensor, Tensor, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("linalg_eigvalsh", "linalg_svdvals"):
            return self._moved(func(*args, **kwargs), name == "linalg_svdvals")
        which = kwargs.get(_NORMS[name], args[1] if len(args) > 1 else None) if name in _NORMS else None
        of_matrix = name == "linalg_matrix_norm" and len(args) + len(kwargs) == 2
        of_matrix = of_matrix or (name in _NORMS and len(args) + len(kwargs) == 2 and args[0].ndim == 2)
        if of_matrix and (which == "nuc" or (which in (2, -2) and name != "norm")):
            values = self._moved(torch.linalg.svdvals(args[0]), True)
            return values.sum(-1) if which == "nuc" else values.amax(-1) if which == 2 else values.amin(-1)
        return func(*args, **kwargs)

    def _moved(self, values: Tensor, singular: bool) -> Tensor:
        values = values.detach()
        size = values.abs().amax(-1, keepdim=True)
        places = torch.arange(values.shape[-1], dtype=values.dtype, device=values.device)
        places = places.flip(0) if singular else places  # which are in descending order
        added = self._apart * torch.where(size > 0, size, 1) * places
        if not compat.is_wrapped(added):
            added.requires_grad_()
        self.met.append((values, added, singular))
        return values + added


def beside_kinks(function: Any, batch: int) -> Tensor | None:
    """Samples of which what ``function`` gives has a kink in nearby eigenvalues or singular values, ``(batch,)``;
    ``None``: it meets none, or they are inside a transform.

    A change that is in proportion to how far values are apart is none at a kink.

    Args:
        function: calls it at the point in question, twice.
    """
    found = [_pulls(function, apart) for apart in _APART]
    if found[0] is None or found[1] is None or len(found[0]) != len(found[1]):
        return None
    beside = torch.zeros(batch, dtype=torch.bool, device=found[1][0][0].device)
    for (values, singular, pull), (_, _, far) in zip(found[1], found[0], strict=True):
        if values.numel() and values.numel() % (batch * values.shape[-1]) == 0:
            beside = beside | _beside(values, pull, far, singular).reshape(batch, -1).any(1)
    return beside


def _pulls(function: Any, apart: float) -> list[tuple[Tensor, bool, Tensor]] | None:
    """All values that ``function`` meets, whether they are singular values, and its derivative by each."""
    with compat.own_graphs(), torch.enable_grad():
        with Spectra(apart) as spectra:
            out = function()
        if not spectra.met or any(compat.is_wrapped(values) for values, _, _ in spectra.met):
            return None
        total = torch.stack([t.sum() for t in trees.tree_flatten(out)[0]]).sum()
        if not total.requires_grad:
            return None
        added = [moved for _, moved, _ in spectra.met]
        pulls = torch.autograd.grad(total, added, allow_unused=True)
    made = zip(spectra.met, pulls, strict=True)
    return [
        (values, singular, torch.zeros_like(values) if pull is None else pull) for (values, _, singular), pull in made
    ]


def _beside(values: Tensor, pull: Tensor, far: Tensor, singular: bool) -> Tensor:
    """Whether two in order nearly coincide, or one nearly vanishes, whose part in the function is another, ``(...)``."""
    near = _NEAR * values.abs().amax(-1, keepdim=True)
    unlike = _UNLIKE * torch.maximum(pull.abs(), far.abs()).amax(-1, keepdim=True)
    found = ((values.diff(dim=-1).abs() <= near) & (pull.diff(dim=-1).abs() > unlike)).any(-1)
    return found | ((values <= near) & (pull.abs() > unlike)).any(-1) if singular else found
