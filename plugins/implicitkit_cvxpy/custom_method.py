"""A user's own forward and backward for a layer: ``custom_method=(forward, backward)``, as cvxpylayers 0.1 has it.

    forward(parameters, context) -> (variables, info)        lists of float64 arrays
    backward(cotangents, context) -> (gradients, info)        ``context.info``, ``context.sol``: what forward gave

The library stands aside: what the two return is the solution and its derivative, by ``backward`` and of first order.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend

_ONLY_BACKWARD = (
    "custom_method= gives first derivatives by backward() and nothing else: its functions are not known to torch. Leave it "
    "out for {what}"
)


class CustomMethod:
    """``forward`` and ``backward`` on NumPy arrays as a differentiable function.

    ``context`` has ``gp``, ``batch``, ``batch_size``, ``batch_sizes`` (zero for a parameter without batch dimension),
    ``param_order``, ``param_ids``, ``variables``, ``solver_args``, ``solve_and_derivative``; in ``backward`` also
    ``params``, ``sol`` and ``info``.

    Args:
        pair: the two functions. parameters, variables: of the layer, in its order. gp: is it a geometric program?

    Raises:
        TypeError: not a pair of callables.
    """

    def __init__(self, pair: Any, parameters: Sequence[Any], variables: Sequence[Any], gp: bool) -> None:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(callable, pair))):
            raise TypeError("custom_method must be a pair of functions (forward, backward)")
        self.forward, self.backward = pair
        self.parameters, self.variables, self.gp = list(parameters), list(variables), gp

    def __call__(
        self, values: Sequence[Tensor], lead: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """The variables, ``lead + shape`` each.

        Raises:
            CapabilityError: under a transform of ``torch.func`` or in forward mode; more than one batch dimension.
            ValueError: a function returned something that does not fit.
        """
        if extend.transforms_active() or extend.has_forward_level():
            raise ik.CapabilityError(_ONLY_BACKWARD.format(what="torch.func and forward mode"))
        if len(lead) > 1:
            raise ik.CapabilityError(f"custom_method= takes one batch dimension at most, got the batch {lead}")
        sizes = [v.shape[0] if v.ndim > len(p.shape) else 0 for v, p in zip(values, self.parameters, strict=True)]
        context = {
            "gp": self.gp, "batch": bool(lead), "batch_size": lead[0] if lead else 1, "batch_sizes": sizes,
            "param_order": self.parameters, "param_ids": [p.id for p in self.parameters], "variables": self.variables,
            "solver_args": dict(options), "solve_and_derivative": any(v.requires_grad for v in values),
        }  # fmt: skip
        found: tuple[Tensor, ...] = _Custom.apply(self, context, lead, dtype, *values)
        return found

    def arrays(self, found: Any, shapes: Sequence[tuple[int, ...]], what: str) -> tuple[list[Any], Any]:
        """What a function returned, checked: a list of arrays of these shapes, and its info."""
        if not (isinstance(found, (tuple, list)) and len(found) == 2):
            raise ValueError(f"{what} of custom_method must return two things: a list of arrays, and info")
        given, info = found
        arrays = [np.asarray(a, dtype=np.float64) for a in given]
        if [a.shape for a in arrays] != [tuple(s) for s in shapes]:
            raise ValueError(
                f"{what} of custom_method returned arrays of shapes {[a.shape for a in arrays]}; expected "
                f"{[tuple(s) for s in shapes]}"
            )
        return arrays, info


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, method: CustomMethod, context: dict[str, Any], lead: tuple[int, ...], dtype: Any, *values: Tensor
    ) -> tuple[Tensor, ...]:
        params = [_array(v) for v in values]
        shapes = [lead + tuple(v.shape) for v in method.variables]
        found = method.forward(list(params), types.SimpleNamespace(**context))
        sol, info = method.arrays(found, shapes, "forward")
        ctx.method, ctx.context = method, context | {"params": params, "sol": sol, "info": info}
        ctx.like = [(v.shape, v.dtype, v.device) for v in values]
        device = values[0].device if values else torch.device("cpu")
        return tuple(torch.from_numpy(s.copy()).to(dtype=dtype, device=device) for s in sol)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ik.CapabilityError(_ONLY_BACKWARD.format(what="second derivatives (create_graph=True)"))
        call: Callable[..., Any] = ctx.method.backward
        found = call([_array(t) for t in g], types.SimpleNamespace(**ctx.context))
        grads, _ = ctx.method.arrays(found, [shape for shape, _, _ in ctx.like], "backward")
        moved = (torch.from_numpy(a.copy()).to(dtype=d, device=v) for a, (_, d, v) in zip(grads, ctx.like, strict=True))
        return None, None, None, None, *moved


def _array(t: Tensor) -> Any:
    return t.detach().to("cpu", torch.float64).contiguous().numpy().copy()
