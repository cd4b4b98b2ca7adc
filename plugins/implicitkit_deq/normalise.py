r"""Bounds on weights that hold at every moment of training, as parametrisations of the weights themselves.

A DEQ is sure to have one equilibrium, and Picard's iteration to find it, while its cell is a contraction; bounding the
norms of the weights that multiply the state is the simplest way to keep it one.  The layer computes a bounded weight once
per call, so that exact norms (one singular value decomposition a call) cost little beside a solve.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicitkit.extend import options

_MODULE = options.instance("an nn.Module", nn.Module)
_WEIGHTS = options.optional(options.instance("parameters, as in [layer.weight]", list, tuple, Iterator))


def _spectral(W: Tensor) -> Tensor:
    r"""``|W|_2``; for a convolution an upper bound of its operator norm, whatever the stride, dilation and zero padding.

    A convolution is a sum over the taps of its kernel, of which each is a matrix applied to a shifted input, so that the
    sum of the taps' spectral norms bounds it; so does ``sqrt(taps)`` times that of the taps side by side.
    """
    if W.ndim == 2:
        return torch.linalg.matrix_norm(W, 2)
    taps = W.flatten(2).permute(2, 0, 1)
    separate = torch.linalg.matrix_norm(taps, 2).sum()
    together = len(taps) ** 0.5 * torch.linalg.matrix_norm(taps.transpose(0, 1).flatten(1), 2)
    return torch.minimum(separate, together)


def _frobenius(W: Tensor) -> Tensor:
    r"""``|W|_F >= |W|_2``, times ``sqrt(taps)`` for a convolution: cheap, and smooth."""
    return torch.linalg.vector_norm(W) * (W[0, 0].numel() ** 0.5 if W.ndim > 2 else 1.0)


def _row_sum(W: Tensor) -> Tensor:
    r"""``|W|_\infty``, the largest sum of absolute values in a row: the Lipschitz constant in the maximum norm."""
    return W.abs().flatten(1).sum(1).max()


def _rows(W: Tensor) -> Tensor:
    """The 2-norm of each row (output channel), as in weight normalisation."""
    return torch.linalg.vector_norm(W.flatten(1), dim=1).view(-1, *[1] * (W.ndim - 1))


_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "spectral": _spectral,
    "frobenius": _frobenius,
    "row_sum": _row_sum,
    "rows": _rows,
}


#: whose weights are normalised when nobody says which
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class WeightBound(nn.Module):
    r"""The parametrisation ``W = V \min(1, bound / |V|)``: a weight within the bound is left as it is.

    Shapes: ``W`` ``(out, in, ...)``, seen as the matrix ``(out, in * ...)``.  Units: ``bound`` has those of ``W``.
    Source: Gouk, Frank, Pfahringer & Cree (2021), "Regularisation of neural networks by enforcing Lipschitz
    continuity".

    Args:
        bound: positive. norm: ``"spectral"`` (exact for matrices, an upper bound for convolutions), ``"frobenius"``,
            ``"row_sum"`` (the induced maximum norm) or ``"rows"`` (each row for itself: weight normalisation, clipped).

    Raises:
        ValueError: ``bound`` not positive, or an unknown norm.
    """

    def __init__(self, bound: float, norm: str = "spectral") -> None:
        super().__init__()
        options.check_arguments("WeightBound", bound=(options.positive(), bound), norm=(options.one_of(*_NORMS), norm))
        self.bound, self.norm = bound, norm

    def forward(self, V: Tensor) -> Tensor:
        """``W``."""
        return V * (self.bound / _NORMS[self.norm](V).clamp_min(self.bound))

    def right_inverse(self, W: Tensor) -> Tensor:
        """A weight within the bound is its own; one outside is projected at the next reading."""
        return W

    def extra_repr(self) -> str:
        """The bound and its norm."""
        return f"bound={self.bound}, norm={self.norm!r}"


class _WeightNorm(nn.Module):
    r"""``W = g V / |V|`` row by row, ``|g| <= bound``."""

    def __init__(self, bound: float | None) -> None:
        super().__init__()
        options.check_arguments("weight_norm", bound=(options.optional(options.positive()), bound))
        self.bound = bound

    def forward(self, g: Tensor, V: Tensor) -> Tensor:
        if self.bound is not None:
            g = g.clamp(-self.bound, self.bound)
        return g * V / _rows(V)

    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        size = _rows(W)
        return size, torch.where(size > 0, W, 1.0)  # a row of zeros has no direction of its own


def bound_weights(
    module: nn.Module, bound: float, norm: str = "spectral", *, weights: Iterable[Tensor] | None = None
) -> nn.Module:
    r"""Keep weights within a norm: see :class:`WeightBound`.

        bound_weights(cell, 0.95, weights=cell.recurrent_weights())

    ``W = V \min(1, bound / |V|)``; shapes, units and source as in :class:`WeightBound` (Gouk et al. 2021).

    Args:
        module: the cell. bound, norm: as in :class:`WeightBound`, for each weight by itself.
        weights: parameters of ``module``; ``None``: every parameter with two dimensions or more below it.

    Returns:
        The module itself.

    Raises:
        ValueError: a weight is not a parameter of the module, or reparametrised already.
    """
    return _register("bound_weights", module, weights, WeightBound(bound, norm))


def weight_norm(module: nn.Module, bound: float | None = None, *, weights: Iterable[Tensor] | None = None) -> nn.Module:
    r"""Weight normalisation (Salimans & Kingma 2016), ``W = g V / |V|`` per row, optionally with ``|g| <= bound``.

    Shapes: ``V (out, in, ...)``, ``g (out, 1, ...)``.  Units: ``g`` and ``bound`` have those of ``W``.

    Args:
        module: the cell. bound: the largest 2-norm of a row (``|W|_2 <= sqrt(rows) bound``).
        weights: parameters of ``module``; ``None``: the weights of its linear and convolution layers, and nothing else (no
            embedding, no bias of an attention), as in TorchDEQ.

    Returns:
        The module itself.

    Raises:
        ValueError: as in :func:`bound_weights`.
    """
    return _register("weight_norm", module, weights, _WeightNorm(bound), _LAYERS)


def free_weights(module: nn.Module) -> nn.Module:
    """Undo every reparametrisation below a module; the weights keep their present values."""
    options.check_arguments("free_weights", module=(_MODULE, module))
    for m in module.modules():
        if parametrize.is_parametrized(m):
            for name in list(m.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(m, name, leave_parametrized=True)
    return module


def _register(
    of: str,
    module: nn.Module,
    weights: Iterable[Tensor] | None,
    form: nn.Module,
    layers: tuple[type[nn.Module], ...] = (),
) -> nn.Module:
    options.check_arguments(of, module=(_MODULE, module), weights=(_WEIGHTS, weights))
    homes: dict[int, tuple[nn.Module, str]] = {}
    for m in module.modules():
        if not isinstance(m, parametrize.ParametrizationList):
            homes.update({id(p): (m, name) for name, p in m.named_parameters(recurse=False)})
    chosen: list[Any] = (
        [place for place in homes.values() if (_is_weight(place, layers) if layers else getattr(*place).ndim > 1)]
        if weights is None
        else [homes.get(id(w)) for w in weights]
    )
    if None in chosen:
        raise ValueError("a weight given is not a parameter of the module, or is reparametrised already (free_weights)")
    if not chosen:
        kind = (
            "no linear or convolution layer whose weight could be normalised"
            if layers
            else "no weight of two dimensions"
        )
        raise ValueError(f"{type(module).__name__} has {kind}: say which parameters are meant, weights=[...]")
    for owner, name in chosen:
        parametrize.register_parametrization(owner, name, copy.copy(form))
    return module


def _is_weight(place: tuple[nn.Module, str], layers: tuple[type[nn.Module], ...]) -> bool:
    owner, name = place
    return name == "weight" and isinstance(owner, layers)
