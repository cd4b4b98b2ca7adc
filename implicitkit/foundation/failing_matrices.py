r"""``torch.linalg`` on batches of which some matrices have no factors: NaN in their place, and no error.

``cholesky`` of a matrix that is not positive definite, ``inv`` and ``solve`` of a singular one, ``svd`` and ``eig`` of one
with NaN raise, and with one matrix of a batch the batch is lost.  Inside :class:`failing_as_nan`

    f(A)_i = f(A_i) where f has a value at A_i,   NaN elsewhere

with derivative zero elsewhere: ``f`` is evaluated at the identity there.  Which matrices fail, ``cholesky_ex`` and
``lu_factor_ex`` say, by the very factorisation that would raise; of eigenvectors and singular values, numbers that are not
finite.  Shapes: ``A (*, m, n)``.  Where no matrix fails so, the error is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat
from implicitkit.foundation.trees import tree_flatten, tree_map

_WORDS = ("linalg.", "torch.linalg.")  # with which errors of lu_factor and eig begin, which are no LinAlgError


def attempted(call: Callable[..., Any], batch: int, *args: Any) -> tuple[Any, str]:
    """``call(*args)``, and the error that it met, in words, if matrices have failed: NaN is in their place then.

    Args:
        call: an evaluation of a function. batch: of so many samples; the error of a single one, outside of transforms, is
            its own.

    Raises:
        RuntimeError: another error, or that of ``torch.linalg``, where nothing else is finite.
    """
    try:
        return call(*args), ""
    except RuntimeError as error:
        return despite(error, call, batch, *args)


def despite(error: RuntimeError, call: Callable[..., Any], batch: int, *args: Any) -> tuple[Any, str]:
    """:func:`attempted`, after the ``error`` of the attempt."""
    of_matrices = isinstance(error, torch.linalg.LinAlgError) or str(error).startswith(_WORDS)
    if not of_matrices or (batch == 1 and not compat.transforms_active()):
        raise error
    with failing_as_nan():
        out = call(*args)
    leaves = [compat.physical(t) for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
    if not any(bool(torch.isfinite(t.detach()).any()) for t in leaves):
        raise error
    return out, str(error).partition("\n")[0]


class failing_as_nan(TorchFunctionMode):
    """Inside, what ``torch.linalg`` raises for some matrices of a batch becomes NaN in their places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        fails = _FAILS.get(func)
        if fails is None:
            return func(*args, **named)
        try:
            return func(*args, **named)
        except RuntimeError:
            return _one_by_one(func, fails, args, named)


def _one_by_one(func: Any, fails: Callable[[Tensor], Tensor], args: Any, named: Any) -> Any:
    """``func`` with the identity in the place of the matrices that fail, and NaN in that of what comes of these."""
    given = dict(named)
    A = args[0] if args else given.pop("A" if "A" in given else "input")
    if A.ndim < 2:  # no matrix: torch says so
        return func(*args, **named)
    rest = args[1:]
    failed = fails(A)
    identity = torch.eye(*A.shape[-2:], dtype=A.dtype, device=A.device)
    out = func(torch.where(failed[..., None, None], identity, A), *rest, **given)
    vectors = func in _SOLVES and _is_vector(A, rest[0] if rest else given["B"])

    def blank(t: Any) -> Any:
        if not isinstance(t, Tensor) or not (t.is_floating_point() or t.is_complex()):
            return t
        behind = (1 if vectors else 2) if func in _SOLVES else t.ndim - failed.ndim
        return torch.where(failed.reshape(*failed.shape, *(1,) * behind), torch.nan, t)

    return type(out)(map(blank, out)) if type(out).__module__ == "torch.return_types" else tree_map(blank, out)


def _is_vector(A: Tensor, B: Tensor) -> bool:
    """Is ``B`` a batch of vectors to ``torch.linalg.solve``?"""
    return B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])


def _not_definite(A: Tensor) -> Tensor:
    return torch.linalg.cholesky_ex(A.detach()).info != 0


def _singular(A: Tensor) -> Tensor:
    return torch.linalg.lu_factor_ex(A.detach()).info != 0


def _not_finite(A: Tensor) -> Tensor:
    return ~torch.isfinite(A.detach()).flatten(-2).all(-1)


_SOLVES = frozenset([torch.linalg.solve])
_FAILS: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys([torch.linalg.cholesky, torch.cholesky, Tensor.cholesky], _not_definite),
    **dict.fromkeys(
        [torch.linalg.solve, torch.linalg.inv, torch.inverse, Tensor.inverse, torch.linalg.lu_factor], _singular
    ),
    **dict.fromkeys(
        [
            torch.linalg.eigh,
            torch.linalg.eigvalsh,
            torch.linalg.eig,
            torch.linalg.eigvals,
            torch.linalg.svd,
            torch.linalg.svdvals,
            torch.linalg.pinv,
            torch.svd,
            Tensor.svd,
            Tensor.pinverse,
            torch.pinverse,
        ],
        _not_finite,
    ),
}
