r"""On which sides of its switches a right-hand side is looked at.

A function that compares, chooses, clamps or rounds is smooth as long as the outcomes of all that are what they were.  While
a :class:`Sides` lasts these are kept, number by number: the sign of ``a - b`` for ``max(a, b)`` and ``a < b``, of ``x`` for
``relu(x)`` and ``|x|``, of ``x - b`` for each bound ``b`` of ``clamp``, and the integer itself where one is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import compat

_CHOOSING = re.compile(  # names of operations that return numbers, whether of torch or of a tensor, in place or not
    "(abs|absolute|am(ax|in)|aminmax|angle|a(rc)?tan2|ceil|clamp(_max|_min)?|clip|copysign|cum(max|min)|eq|fix"
    "|r?floor(_divide|div)?|f(max|min|mod)|frac|g[et]|greater(_equal)?|grid_sample.*|hard.*|heaviside|kthvalue|l1_loss|l[et]"
    "|leaky_relu|less(_equal)?|masked_fill|max(imum)?|.*max_pool.*|(nan)?median|min(imum)?|msort|ne|(nan)?quantile"
    "|r?p?relu6?|remainder|renorm|r?mod|round|r?relu|selu|sgn|sign|softshrink|sort|threshold|topk|trunc|unique.*|where"
    "|.*_reduce|.*(embedding|margin|ranking).*_loss|nextafter)"
)
_ROOTS = re.compile(
    "r?sqrt|(linalg_)?(matrix_|vector_)?norm|r?pow|float_power|hypot|cdist|dist|(cosine|pairwise)_.*|normalize"
    "|std(_mean)?|(linalg_)?(svd|eig).*|lp_pool.*"
)
_LENGTHS = ("norm", "linalg_norm", "linalg_vector_norm", "dist", "cdist")


class Sides(TorchFunctionMode):
    """Attributes:
    seen: has something compared, chosen, clamped or rounded, or made integers or truth values of numbers?
    hidden: and some of it where its side is not kept: inside a transform that the function itself has begun, or by an
        operation without a rule.
    rooted: have roots been taken, of which quotients may jump?
    made: the sides, vectors of numbers, if they are to be ``kept``.
    """

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.seen = self.hidden = self.rooted = False
        self._level, self._kept, self.made = compat.level(), kept, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        self.rooted = self.rooted or _ROOTS.fullmatch(name) is not None
        chooses = _CHOOSING.fullmatch(name) is not None or bool(kwargs.get("rounding_mode"))
        chooses = chooses or (name in _SOMETIMES and _SOMETIMES[name](args, kwargs))
        given = _numbers((*args, *kwargs.values())) if chooses else None
        sides = self._before(name, args, kwargs) if chooses and given else None
        found = func(*args, **kwargs)
        whole = [v for v in (found if isinstance(found, tuple) else (found,)) if _counts(v)]
        if not chooses and not (whole and _numbers((*args, *kwargs.values()))):
            return found
        self.seen = True
        if name in ("where", "masked_fill"):  # the condition has been kept
            return found
        self._keep(whole or sides)
        return found

    def _before(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """Sides of what an operation is given, where there is a rule."""
        rounded = kwargs.get("rounding_mode")
        rule = _RULES.get("floor_divide" if rounded else name)
        if rule is None or compat.level() > self._level:
            return None
        try:
            return rule(*args, **{k: v for k, v in kwargs.items() if k not in ("inplace", "rounding_mode", "out")})
        except TypeError:  # another form of it
            return None

    def _keep(self, sides: list[Tensor] | None) -> None:
        if not sides or compat.level() > self._level:
            self.hidden = True
        elif self._kept:
            self.made += [side.detach().to(torch.float32).flatten() for side in sides]


def _numbers(values: Sequence[Any]) -> bool:
    return any(isinstance(a, Tensor) and a.is_floating_point() for a in values)


def _counts(a: Any) -> bool:
    return isinstance(a, Tensor) and not (a.is_floating_point() or a.is_complex())


def _between(low: Any = None, high: Any = None) -> Callable[..., list[Tensor]]:
    def rule(x: Tensor, min: Any = low, max: Any = high, *rest: Any) -> list[Tensor]:
        return [x > bound for bound in (min, max) if bound is not None]

    return rule


def _of_two(a: Tensor, b: Any = None, **more: Any) -> list[Tensor]:
    if isinstance(b, Tensor) and b.is_floating_point():
        return [a > b]
    if b is None and not more:  # of all numbers
        return [a == a.amax(), a == a.amin()]
    raise TypeError  # gives indices


def _is_kinked(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Is a length that of numbers by their size, or of the largest of them?"""
    given = (*args, kwargs.get("ord"), kwargs.get("p"))
    return any(isinstance(a, (int, float)) and not isinstance(a, bool) and abs(a) in (1, math.inf) for a in given[1:])


def _of_length(x: Tensor, *rest: Any, **more: Any) -> list[Tensor]:
    if any(isinstance(a, Tensor) for a in rest):
        raise TypeError
    dim, size = more.get("dim"), x.abs()
    return [x > 0, *_extreme(size, () if dim is None else dim)]


def _extreme(x: Tensor, dim: Any = (), keepdim: bool = False) -> list[Tensor]:
    dim = () if dim is None else dim
    return [x == x.amax(dim, keepdim=True), x == x.amin(dim, keepdim=True)]


_zero: Callable[..., list[Tensor]] = lambda x, *rest, **more: [x > 0]  # noqa: E731
_SOMETIMES: dict[str, Callable[..., bool]] = {  # else they have no kink
    **dict.fromkeys(_LENGTHS, _is_kinked),
    "elu": lambda args, kwargs: kwargs.get("alpha", 1.0) != 1.0,
    "logit": lambda args, kwargs: len(args) > 1 or kwargs.get("eps") is not None,
    "smooth_l1_loss": lambda args, kwargs: kwargs.get("beta", 1.0) == 0,
}
_RULES: dict[str, Callable[..., list[Tensor]]] = {
    **dict.fromkeys(
        ("abs", "absolute", "relu", "leaky_relu", "prelu", "rrelu", "elu", "selu", "sgn", "sign", "heaviside"), _zero
    ),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin", "max", "min"), _of_two),
    **dict.fromkeys(("amax", "amin", "aminmax"), lambda x, dim=(), keepdim=False: _extreme(x, dim)),
    **dict.fromkeys(_LENGTHS, _of_length),
    **dict.fromkeys(("median", "nanmedian"), lambda x: [x >= x.nanmedian()]),
    "copysign": lambda a, b: [a > 0, b > 0],
    **dict.fromkeys(("clamp", "clip"), _between()),
    "l1_loss": lambda x, target, **more: [x > target],
    "clamp_min": lambda x, min: [x > min],
    "clamp_max": lambda x, max: [x > max],
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: [x > min_val, x > max_val],
    "relu6": _between(0, 6),
    **dict.fromkeys(("hardsigmoid", "hardswish"), lambda x: [x > -3, x > 3]),
    **dict.fromkeys(("softshrink", "hardshrink"), lambda x, lambd=0.5: [x > -lambd, x > lambd]),
    "threshold": lambda x, threshold, value: [x > threshold],
    **dict.fromkeys(("floor", "ceil", "trunc", "fix", "frac"), lambda x: [x.floor(), x.ceil()]),
    "round": lambda x, decimals=0: [(x * 10**decimals).round()],
    **dict.fromkeys(("floor_divide", "floordiv", "remainder", "fmod"), lambda a, b: [(a / b).floor(), (a / b).ceil()]),
    **dict.fromkeys(("rfloordiv", "rmod"), lambda a, b: [(b / a).floor(), (b / a).ceil()]),
}
