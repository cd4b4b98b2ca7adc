"""Functions that are not functions, and options that are not options.

Each row does one thing that goes wrong in practice and returns ``(got, want)``, or raises.  Right is the true answer;
refused is an error that has one of ``words`` in it; anything else is wrong or unhelpful.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik

from .messy_kinds import MESSY_KINDS

__all__ = ["MESSY", "Mess"]

D = torch.float64
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Row:
    """``run(r) -> (got, want)``; ``words``: what a refusal must name (any of them)."""

    run: Callable[[random.Random], Pair]
    words: tuple[str, ...]


def _x(r: random.Random) -> Tensor:
    return torch.tensor([r.uniform(0.2, 0.6) for _ in range(r.randint(1, 3))], dtype=D)


def _solver(r: random.Random) -> str:
    return r.choice(["auto", "picard", "anderson", "newton", "broyden"])


def _derivative(out: Tensor, x: Tensor) -> Tensor:
    """What ``backward()`` leaves in a leaf: nothing is zero."""
    if out.requires_grad:
        out.sum().backward()
    return torch.zeros_like(x) if x.grad is None else x.grad


def _of_tanh(z: Tensor, k: float) -> Tensor:
    """``dz/dx`` of ``z = tanh(k z + x)``."""
    slope = 1 - z.detach() ** 2
    return slope / (1 - k * slope)


# ------------------------------------------------------------------------------------- the function of another moment
def late_binding(r: random.Random) -> Pair:
    x, outs, ks = _x(r).requires_grad_(), [], [0.2, 0.5, 0.8]
    for k in ks:

        def map(z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(k * z + x)  # noqa: B023  that is the point

        outs.append(ik.fixed_point(map, torch.zeros_like(x), (x,), solver=_solver(r)).value)
    return _derivative(sum(outs), x), sum(_of_tanh(z, k) for z, k in zip(outs, ks, strict=True))  # type: ignore[arg-type]


def changed_constant(r: random.Random) -> Pair:
    x, c = _x(r).requires_grad_(), torch.tensor(0.8, dtype=D)
    z = ik.fixed_point(lambda z, x: torch.tanh(c * z + x), torch.zeros_like(x), (x,), solver=_solver(r)).value
    c.fill_(0.1)
    return _derivative(z, x), _of_tanh(z, 0.8)


def changed_buffer(r: random.Random) -> Pair:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.tensor(0.7, dtype=D))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.k * z + x)

    x, net = _x(r).requires_grad_(), Net()
    z = ik.fixed_point(net, torch.zeros_like(x), (x,), solver=_solver(r)).value
    with torch.no_grad():
        net.k.mul_(0.2)  # type: ignore[operator]
    return _derivative(z, x), _of_tanh(z, 0.7)


def changed_parameter(r: random.Random) -> Pair:
    """An optimiser's step between the solve and its backward."""
    x, k = _x(r).requires_grad_(), nn.Parameter(torch.tensor(0.7, dtype=D))
    z = ik.fixed_point(lambda z, x: torch.tanh(k * z + x), torch.zeros_like(x), (x,), solver=_solver(r)).value
    with torch.no_grad():
        k.mul_(0.2)
    return _derivative(z, x), _of_tanh(z, 0.7)


def changed_list(r: random.Random) -> Pair:
    x, box = _x(r).requires_grad_(), [0.7]
    z = ik.fixed_point(lambda z, x: torch.tanh(box[0] * z + x), torch.zeros_like(x), (x,), solver=_solver(r)).value
    box[0] = 0.1
    return _derivative(z, x), _of_tanh(z, 0.7)


# ---------------------------------------------------------------------------------------------- derivatives that hide
def branch_on_value(r: random.Random) -> Pair:
    """At the solution another tensor is used than at the start."""
    x, a, b = _x(r), torch.tensor(0.3, dtype=D, requires_grad=True), torch.tensor(0.5, dtype=D, requires_grad=True)

    def map(z: Tensor, x: Tensor) -> Tensor:
        return (a if bool((z.abs() < 0.05).any()) else b) * z + x

    z = ik.fixed_point(map, torch.zeros_like(x), (x,), solver=_solver(r)).value
    return _derivative(z, b), (x / (1 - b) ** 2).sum().detach()


def branch_in_composition(r: random.Random) -> Pair:
    x, a, b = _x(r), torch.tensor(0.3, dtype=D, requires_grad=True), torch.tensor(0.5, dtype=D, requires_grad=True)

    def first(u: Tensor, x: Tensor) -> Tensor:
        return (a if bool((u.abs() < 0.05).any()) else b) * u + x

    joint = ik.FixedPoint(first) >> ik.FixedPoint(lambda z, u: 0.5 * z + u)
    names = list(joint.graph)
    value = ik.solve(joint, {n: torch.zeros_like(x) for n in names}, (x,)).value[names[-1]]
    return _derivative(value, b), (2 * x / (1 - b) ** 2).sum().detach()


def branch_in_nested(r: random.Random) -> Pair:
    x, a, b = _x(r), torch.tensor(0.3, dtype=D, requires_grad=True), torch.tensor(0.5, dtype=D, requires_grad=True)

    def inner(u: Tensor, x: Tensor) -> Tensor:
        return (a if bool((u.abs() < 0.05).any()) else b) * u + x

    def outer(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + ik.fixed_point(inner, torch.zeros_like(x), (x,)).value

    value = ik.fixed_point(outer, torch.zeros_like(x), (x,), solver=_solver(r)).value
    return _derivative(value, b), (2 * x / (1 - b) ** 2).sum().detach()


def shape_branch(r: random.Random) -> Pair:
    """A branch on the number of entries that a mask selects."""
    x, b = _x(r), torch.tensor(0.5, dtype=D, requires_grad=True)

    def map(z: Tensor, x: Tensor) -> Tensor:
        return (0.3 if (z.abs() > 0.05).nonzero().shape[0] == 0 else b) * z + x

    z = ik.fixed_point(map, torch.zeros_like(x), (x,), solver=_solver(r)).value
    return _derivative(z, b), (x / (1 - b) ** 2).sum().detach()


def cached_weight(r: random.Random) -> Pair:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.cache = nn.Parameter(torch.tensor(1.4, dtype=D)), None

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = self.k / 2
            return self.cache * z + x

    x, net = _x(r), Cached()
    z = ik.fixed_point(net, torch.zeros_like(x), (x,), solver=_solver(r)).value
    return _derivative(z, net.k), (0.5 * x / (1 - 0.7) ** 2).sum()


def under_no_grad(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    z = ik.fixed_point(torch.no_grad()(lambda z, x: 0.5 * z + x), torch.zeros_like(x), (x,), solver=_solver(r)).value
    return _derivative(z, x), torch.full_like(x, 2.0)


def ignored_argument(r: random.Random) -> Pair:
    """The derivative in an argument that is not used is zero."""
    x, y = _x(r), torch.ones(2, dtype=D, requires_grad=True)
    z = ik.fixed_point(lambda z, x, y: 0.5 * z + x, torch.zeros_like(x), (x, y), solver=_solver(r)).value
    return torch.autograd.grad(z.sum(), y)[0], torch.zeros(2, dtype=D)


def unroll_steps(r: random.Random) -> Pair:
    """The verdict is about the point that is returned."""
    x = _x(r)
    s = ik.fixed_point(lambda z, x: torch.tanh(0.9 * z + x), torch.zeros_like(x), (x,), solver="picard",
                       rule=ik.Unroll(steps=2), on_failure="ignore")  # fmt: skip
    residual = (torch.tanh(0.9 * s.value + x) - s.value).norm()
    return s.residual_norm, residual


def writing_callback(r: random.Random) -> Pair:
    x = _x(r)
    s = ik.fixed_point(
        lambda z, x: 0.5 * z + x, torch.zeros_like(x), (x,), callback=lambda k, z, n: z.clamp_(-0.1, 0.1)
    )
    return s.value, 2 * x


# ------------------------------------------------------------------------------------------------------ no function
def in_place_state(r: random.Random) -> Pair:
    x = _x(r)
    s = ik.fixed_point(lambda z, x: z.mul_(0.5).add_(x), torch.zeros_like(x), (x,), solver=_solver(r))
    return s.value, 2 * x


def in_place_argument(r: random.Random) -> Pair:
    x = _x(r)
    return ik.fixed_point(lambda z, x: 0.5 * z + x.mul_(0.9), torch.zeros_like(x), (x,), solver=_solver(r)).value, None


def random_map(r: random.Random) -> Pair:
    x = _x(r)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ik.ImpureFunctionWarning)
        z = ik.fixed_point(lambda z, x: 0.5 * z + x + torch.rand_like(z), torch.zeros_like(x), (x,), max_steps=50).value
    return z, None


def not_finite(r: random.Random) -> Pair:
    x = _x(r)
    solver = r.choice(["auto", "newton", "trust_region", "broyden", "scipy.root.hybr"])
    return ik.root(lambda z, x: torch.log(z) - x, -torch.ones_like(x), (x,), solver=solver).value, None


def not_finite_argument(r: random.Random) -> Pair:
    x = _x(r)
    x[0] = torch.nan
    return ik.fixed_point(lambda z, x: 0.5 * z + x, torch.zeros_like(x), (x,), solver=_solver(r)).value, None


def no_fixed_point(r: random.Random) -> Pair:
    x = _x(r)
    return ik.fixed_point(lambda z, x: torch.sqrt(z * z + 1 + x), torch.zeros_like(x), (x,)).value, None


def shifted_forever(r: random.Random) -> Pair:
    x = _x(r)
    return ik.fixed_point(lambda z, x: z + x, torch.zeros_like(x), (x,), solver=_solver(r)).value, None


def no_root(r: random.Random) -> Pair:
    x = _x(r)
    solver = r.choice(["auto", "newton", "trust_region", "broyden", "scipy.root.hybr"])
    return ik.root(lambda z, x: z * z + x, torch.ones_like(x), (x,), solver=solver).value, None


def far_start(r: random.Random) -> Pair:
    x = _x(r)
    solver = r.choice(["auto", "newton", "trust_region", "broyden", "scipy.root.hybr"])
    return ik.root(lambda z, x: torch.exp(z) - x, torch.full_like(x, 30.0), (x,), solver=solver).value, x.log()


def unbounded(r: random.Random) -> Pair:
    x = _x(r)
    return ik.argmin(lambda z, x: (x * z).sum(), torch.ones_like(x), (x,), max_steps=200).value, None


def maximum(r: random.Random) -> Pair:
    x = _x(r)
    solver = r.choice(["auto", "newton", "lbfgs"])
    s = ik.argmin(lambda z, x: torch.cos(z).sum() + 0 * x.sum(), torch.full((2,), 0.1, dtype=D), (x,), solver=solver)
    return torch.cos(s.value), torch.full((2,), -1.0, dtype=D)


def returns_none(r: random.Random) -> Pair:
    return ik.root(lambda z: None, _x(r)).value, None


def returns_another_shape(r: random.Random) -> Pair:
    return ik.root(lambda z: torch.cat([z, z]), _x(r)).value, None


def returns_number(r: random.Random) -> Pair:
    return ik.argmin(lambda z: 1.0, _x(r)).value, None


def returns_vector(r: random.Random) -> Pair:
    return ik.argmin(lambda z: torch.cat([z, z]).square(), _x(r)).value, None


def returns_integers(r: random.Random) -> Pair:
    return ik.root(lambda z: z.long(), _x(r)).value, None


def raises(r: random.Random) -> Pair:
    def map(z: Tensor) -> Tensor:
        raise KeyError("weights of the cell are missing")

    return ik.fixed_point(map, _x(r)).value, None


def wrong_arity(r: random.Random) -> Pair:
    return ik.fixed_point(lambda z: 0.5 * z, _x(r), (_x(r),)).value, None


MESSY: dict[str, Row] = {
    "late_binding": Row(late_binding, ()),
    "changed_constant": Row(changed_constant, ("no longer", "changed")),
    "changed_buffer": Row(changed_buffer, ("no longer", "changed")),
    "changed_parameter": Row(changed_parameter, ("no longer", "changed", "modified by an inplace")),
    "changed_list": Row(changed_list, ()),
    "branch_on_value": Row(branch_on_value, ("branches",)),
    "branch_in_composition": Row(branch_in_composition, ("branches",)),
    "branch_in_nested": Row(branch_in_nested, ("branches",)),
    "shape_branch": Row(shape_branch, ("branches",)),
    "cached_weight": Row(cached_weight, ("cache", "first call", "keeps", "holds")),
    "under_no_grad": Row(under_no_grad, ("no_grad", "detach")),
    "ignored_argument": Row(ignored_argument, ("nothing may be refused here",)),
    "unroll_steps": Row(unroll_steps, ("nothing may be refused here",)),
    "writing_callback": Row(writing_callback, ("callback", "did not converge")),
    "in_place_state": Row(in_place_state, ("in place",)),
    "in_place_argument": Row(in_place_argument, ("in place",)),
    "random_map": Row(random_map, ("random",)),
    "not_finite": Row(not_finite, ("not finite", "NaN")),
    "not_finite_argument": Row(not_finite_argument, ("NaN or Inf in: args",)),
    "no_fixed_point": Row(no_fixed_point, ("did not converge",)),
    "shifted_forever": Row(shifted_forever, ("did not converge",)),
    "no_root": Row(no_root, ("did not converge",)),
    "far_start": Row(far_start, ("did not converge",)),
    "unbounded": Row(unbounded, ("unbounded", "did not converge")),
    "maximum": Row(maximum, ("saddle", "maximum", "did not converge")),
    "returns_none": Row(returns_none, ("returned",)),
    "returns_another_shape": Row(returns_another_shape, ("returned", "shape")),
    "returns_number": Row(returns_number, ("returned",)),
    "returns_vector": Row(returns_vector, ("scalar", "one number")),
    "returns_integers": Row(returns_integers, ("dtype",)),
    "raises": Row(raises, ("weights of the cell are missing",)),
    "wrong_arity": Row(wrong_arity, ("argument",)),
    **{name: Row(*row) for name, row in MESSY_KINDS.items()},
}


@dataclass(frozen=True)
class Mess:
    """One run of a row; ``str`` and :meth:`parse` as of a :class:`~case.Case`."""

    name: str
    seed: int = 0

    def __str__(self) -> str:
        return f"messy.{self.name} seed={self.seed}"

    @classmethod
    def parse(cls, line: str) -> Mess:
        name, _, seed = line.removeprefix("messy.").partition(" seed=")
        if name not in MESSY:
            raise ValueError(f"unknown row {name!r}; there are {', '.join(MESSY)}")
        return cls(name, int(seed or 0))

    def outcome(self) -> tuple[str, str]:
        """``(kind, detail)``; where the row says that there is no right answer, any answer is wrong."""
        row = MESSY[self.name]
        torch.manual_seed(self.seed)
        try:
            got, want = row.run(random.Random(self.seed))
        except Exception as error:
            said = any(word in str(error) for word in row.words)
            return "refused" if said else "unhelpful", f"{type(error).__name__}: {str(error)[:160]}"
        if want is None:
            return "wrong", f"returned {got}, and there is no answer"
        error = float((torch.as_tensor(got) - want).abs().max())
        return ("right", "") if error < 1e-6 else ("wrong", f"off by {error:.2g}: {got} instead of {want}")
