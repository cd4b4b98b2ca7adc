"""Derivatives that the primitive refuses."""

from __future__ import annotations

from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapabilityError


def refuse_batched_below(b: Tensor) -> None:
    """Raise :class:`CapabilityError` for a batched cotangent under a transform, where the primitive does not see it."""
    if compat.is_legacy_batched(compat.physical(b)):
        raise CapabilityError(
            "batched gradients (is_grads_batched=True, torch.autograd.functional.jacobian(vectorize=True)) of a solve are "
            "not possible inside torch.func transforms: what is recorded of them there would be lost. Use "
            "torch.func.jacrev, or torch.func.vmap over torch.func.vjp"
        )


def refuse_batched_tangents(g: Tensor, *used: Tensor) -> None:
    """Raise :class:`CapabilityError` where torch, for a batched cotangent ``g``, would refuse without a reason."""
    if compat.is_legacy_batched(g) and any(map(compat.has_tangent, used)):
        raise CapabilityError(
            "batched gradients (is_grads_batched=True, torch.autograd.functional.jacobian(vectorize=True)) of a solve are "
            "not possible where a forward_ad.dual_level around them has given what the solve uses a tangent: torch batches "
            "no forward mode. Use torch.func.jacrev"
        )
