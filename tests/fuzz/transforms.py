"""The grammar of transforms: a composition is a list of levels ``name:variable``, outermost first.

A level takes a function of named tensors, ``g(values) -> Tensor``, and gives another one: ``grad:x`` is the gradient in
``x`` of a scalar made of ``g``, ``vmap:w`` its values on a stack of three ``w``.  The same composition is applied to the
solve and to the closed form.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

__all__ = ["LEVELS", "WITHOUT_TRANSFORMS", "compose", "draw_levels", "order"]

Values = dict[str, Tensor]
Function = Callable[[Values], Tensor]


def scalar(out: Tensor) -> Tensor:
    """A number that depends on every entry, and not linearly."""
    if out.is_complex():
        out = torch.view_as_real(out)
    flat = out.reshape(-1)
    weights = torch.linspace(0.5, 1.5, flat.shape[0], dtype=flat.dtype)
    return (weights * flat).sum() + 0.3 * (flat * flat).sum()


def direction(t: Tensor) -> Tensor:
    """A tangent or cotangent for ``t``, different in every entry."""
    steps = torch.linspace(1.0, 0.4, max(t.numel(), 1), dtype=torch.float64)[: t.numel()]
    return steps.reshape(t.shape).to(t.dtype)


def _in(g: Function, values: Values, name: str) -> Callable[[Tensor], Tensor]:
    return lambda t: g({**values, name: t})


def _grad(g: Function, values: Values, name: str) -> Tensor:
    return grad(lambda t: scalar(g({**values, name: t})))(values[name])


def _vjp(g: Function, values: Values, name: str) -> Tensor:
    out, pullback = vjp(_in(g, values, name), values[name])
    return pullback(direction(out))[0]


def _jvp(g: Function, values: Values, name: str) -> Tensor:
    return jvp(_in(g, values, name), (values[name],), (direction(values[name]),))[1]


def _jacrev(g: Function, values: Values, name: str) -> Tensor:
    return jacrev(_in(g, values, name))(values[name])


def _jacfwd(g: Function, values: Values, name: str) -> Tensor:
    return jacfwd(_in(g, values, name))(values[name])


def _hessian(g: Function, values: Values, name: str) -> Tensor:
    return hessian(lambda t: scalar(g({**values, name: t})))(values[name])


def _stack(t: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([t, 0.95 * t, 1.05 * t], dim)


def _vmap(g: Function, values: Values, name: str) -> Tensor:
    return vmap(_in(g, values, name))(_stack(values[name]))


def _vmap_last(g: Function, values: Values, name: str) -> Tensor:
    # torch gets out_dims=-1 wrong where the output is not batched: moved by hand
    return vmap(_in(g, values, name), in_dims=-1)(_stack(values[name], -1)).movedim(0, -1)


def _vmap_chunks(g: Function, values: Values, name: str) -> Tensor:
    return vmap(_in(g, values, name), chunk_size=2)(_stack(values[name]))


def _vmap_all(g: Function, values: Values, name: str) -> Tensor:
    return vmap(g)({key: _stack(t) for key, t in values.items()})


def _dual(g: Function, values: Values, name: str) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(values[name], direction(values[name]))
        primal, tangent = forward_ad.unpack_dual(g({**values, name: dual}))
        return torch.zeros_like(primal) if tangent is None else tangent


def _backward(g: Function, values: Values, name: str) -> Tensor:
    leaf = nn.Parameter(values[name].detach().clone())
    (got,) = torch.autograd.grad(scalar(g({**values, name: leaf})), leaf, create_graph=True)
    return got


def _accumulate(g: Function, values: Values, name: str) -> Tensor:
    leaf = nn.Parameter(values[name].detach().clone())
    out = g({**values, name: leaf})
    (0.5 * scalar(out)).backward(retain_graph=True)
    (0.5 * scalar(out)).backward()
    assert leaf.grad is not None, "no gradient"
    return leaf.grad


def _jacobian(g: Function, values: Values, name: str) -> Tensor:
    return torch.autograd.functional.jacobian(_in(g, values, name), values[name], vectorize=True)


def _checkpoint(g: Function, values: Values, name: str) -> Tensor:
    names = list(values)
    return checkpoint(lambda *ts: g(dict(zip(names, ts, strict=True))), *values.values(), use_reentrant=False)


class _Of(nn.Module):
    """``g`` as a module whose parameter is the variable."""

    def __init__(self, g: Function, values: Values, name: str) -> None:
        super().__init__()
        self.g, self.values, self.name = g, values, name
        self.held = nn.Parameter(torch.zeros((), dtype=values[name].dtype))

    def forward(self, factor: float) -> Tensor:
        return self.g({**self.values, self.name: factor * self.held})


def _functional_call(g: Function, values: Values, name: str) -> Tensor:
    return functional_call(_Of(g, values, name), {"held": 0.5 * values[name]}, (2.0,))


def _checkpoint_reentrant(g: Function, values: Values, name: str) -> Tensor:
    names = list(values)
    return checkpoint(lambda *ts: g(dict(zip(names, ts, strict=True))), *values.values(), use_reentrant=True)


def _saved_elsewhere(g: Function, values: Values, name: str) -> Tensor:
    """What is saved for the backward is kept as a copy, as when it is moved to another device."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return _backward(g, values, name)


def _in_thread(g: Function, values: Values, name: str) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(g, values).result()


def _linearize(g: Function, values: Values, name: str) -> Tensor:
    return linearize(_in(g, values, name), values[name])[1](direction(values[name]))


def _jacrev_chunks(g: Function, values: Values, name: str) -> Tensor:
    return jacrev(_in(g, values, name), chunk_size=1)(values[name])


def _batched_backward(g: Function, values: Values, name: str) -> Tensor:
    """Several cotangents at once, by autograd's own vmap (which has no rule for the views of complex numbers).

    The derivative of what is linear does not depend on the leaf, at which torch stops: zero times the leaf is added.
    """
    leaf = nn.Parameter(values[name].detach().clone())
    out = g({**values, name: leaf}) + 0 * leaf.sum()
    cotangents = torch.stack([direction(out), 2 * direction(out)])
    (got,) = torch.autograd.grad(out, leaf, cotangents, is_grads_batched=True, create_graph=True)
    return got


def _compile(g: Function, values: Values, name: str) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(lambda t: g({**values, name: t}), backend="eager")(values[name])


def _twice(g: Function, values: Values, name: str) -> Tensor:
    return g(values) + g({**values, name: 1.1 * values[name]})


def _no_grad(g: Function, values: Values, name: str) -> Tensor:
    with torch.no_grad():
        return g(values)


def _inference(g: Function, values: Values, name: str) -> Tensor:
    with torch.inference_mode():
        return g(values)


Level = Callable[[Function, Values, str], Tensor]

# name: (what it does, how often it is drawn, how much it multiplies the entries of the output, order of the derivative)
LEVELS: dict[str, tuple[Level, float, int, int]] = {
    "grad": (_grad, 3, 1, 1),
    "vjp": (_vjp, 3, 1, 1),
    "jvp": (_jvp, 3, 1, 1),
    "jacrev": (_jacrev, 3, 3, 1),
    "jacfwd": (_jacfwd, 3, 3, 1),
    "hessian": (_hessian, 2, 3, 2),
    "vmap": (_vmap, 3, 3, 0),
    "vmap_last": (_vmap_last, 1, 3, 0),
    "vmap_chunks": (_vmap_chunks, 0.3, 3, 0),
    "vmap_all": (_vmap_all, 1, 3, 0),
    "dual": (_dual, 2, 1, 1),
    "backward": (_backward, 3, 1, 1),
    "accumulate": (_accumulate, 1, 1, 1),
    "jacobian": (_jacobian, 0.5, 3, 1),
    "linearize": (_linearize, 0.5, 1, 1),
    "jacrev_chunks": (_jacrev_chunks, 0.3, 3, 1),
    "saved_elsewhere": (_saved_elsewhere, 0.5, 1, 1),
    "batched_backward": (_batched_backward, 0.5, 2, 1),
    "in_thread": (_in_thread, 0.3, 1, 0),
    "checkpoint_reentrant": (_checkpoint_reentrant, 0.3, 1, 0),
    "checkpoint": (_checkpoint, 1, 1, 0),
    "twice": (_twice, 0.7, 1, 0),
    "functional_call": (_functional_call, 1, 1, 0),
    "compile": (_compile, 0.1, 1, 0),
    "no_grad": (_no_grad, 0.2, 1, 0),
    "inference": (_inference, 0.2, 1, 0),
}
_OUTERMOST = ("no_grad", "inference", "accumulate")
_TRACED = ("checkpoint", "checkpoint_reentrant", "compile", "in_thread")
_GRAPH = frozenset(["backward", "accumulate", "jacobian", "saved_elsewhere", "batched_backward"])
_BY_AUTOGRAD = frozenset(["backward", "accumulate", "twice", "checkpoint"])  # torch.func refuses these
WITHOUT_TRANSFORMS = _GRAPH | _BY_AUTOGRAD | {"functional_call", "in_thread", "no_grad", "inference"}  # of torch.func


def _jvp_by_reverse(g: Function, values: Values, name: str) -> Tensor:
    """``J t`` as the derivative of ``c' J t`` in ``c``: two reverse passes."""
    out, pullback = vjp(_in(g, values, name), values[name])
    through = vjp(lambda c: pullback(c)[0], torch.zeros_like(out))[1]
    return through(direction(values[name]))[0]


def _hessian_by_reverse(g: Function, values: Values, name: str) -> Tensor:
    return jacrev(jacrev(lambda t: scalar(g({**values, name: t}))))(values[name])


_BY_REVERSE: dict[str, Level] = {
    "jvp": _jvp_by_reverse,
    "dual": _jvp_by_reverse,
    "linearize": _jvp_by_reverse,
    "jacfwd": _jacrev,
    "hessian": _hessian_by_reverse,
}


def compose(g: Function, levels: Sequence[tuple[str, str]], by_reverse: bool = False) -> Function:
    """``levels[0]`` of ``levels[1]`` of ... of ``g``.  ``by_reverse``: without forward mode, for a second opinion."""
    for name, variable in reversed(levels):
        level = LEVELS[name][0]
        g = _level(g, _BY_REVERSE.get(name, level) if by_reverse else level, variable)
    return g


def _level(g: Function, level: Level, variable: str) -> Function:
    return lambda values: level(g, values, variable)


def order(levels: Sequence[tuple[str, str]]) -> int:
    """The order of the derivative."""
    return sum(LEVELS[name][3] for name, _ in levels)


def draw_levels(r: random.Random, variables: Sequence[str]) -> list[tuple[str, str]]:
    """A composition of depth zero to three, of derivatives up to the third order."""
    names = list(LEVELS)
    weights: list[Any] = [LEVELS[name][1] for name in names]
    depth = r.choices([0, 1, 2, 3], [1, 4, 6, 4])[0]
    levels: list[tuple[str, str]] = []
    while len(levels) < depth:
        name = r.choices(names, weights)[0]
        if (name in _OUTERMOST and levels) or (name in _TRACED and not _BY_AUTOGRAD.issuperset(dict(levels))):
            continue
        if name in _GRAPH and "inference" in dict(levels):  # nothing is recorded there, of any function
            continue
        if order(levels) + LEVELS[name][3] <= 3:
            levels.append((name, r.choice(variables)))
    if any(name in _GRAPH for name, _ in levels):  # there a start that has no part in the solution is not in the graph
        levels = [(name, variables[0] if variable == "s" else variable) for name, variable in levels]
    return levels
