"""Dicts are known by their keys: in whatever order a function, a bound or a start has them, values and derivatives are those
of the state's own order."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import implicitkit as ik
from implicitkit.foundation import arrays, pytrees

D = torch.float64
A = torch.tensor([0.3, 0.7], dtype=D)
State = dict[str, Tensor]


def start(*shape: int) -> State:
    return {"u": torch.zeros(*shape, dtype=D), "v": torch.zeros(*shape, dtype=D)}


def turned(state: State) -> State:
    return dict(reversed(state.items()))


def mixed(z: State, a: Tensor) -> State:
    """A contraction in which u and v play different parts."""
    return {"u": 0.4 * torch.cos(z["u"]) + a, "v": 0.5 * torch.sin(z["v"]) + z["u"] ** 2}


def far(z: State, a: Tensor) -> Tensor:
    return (z["u"] - 3 * a).square().sum() + (z["v"] - 5 * a).square().sum() + 0.1 * z["v"].pow(4).sum()


def clamped(z: State, *_: Any) -> State:
    return {"u": z["u"].clamp(max=0.5), "v": z["v"].clamp(max=1.5)}


def limits() -> tuple[State, State]:
    return (
        {"u": torch.full((2,), -1.0, dtype=D), "v": torch.full((2,), -2.0, dtype=D)},
        {"u": torch.full((2,), 0.5, dtype=D), "v": torch.full((2,), 1.5, dtype=D)},
    )


@ik.implicit(ik.Root(lambda z, a: {"u": z["u"] - a, "v": z["v"] - 2 * a}))
def known(z0: State, a: Tensor) -> State:
    return {"u": a, "v": 2 * a}


@ik.implicit(ik.Root(lambda z, a: {"u": z["u"] - a, "v": z["v"] - 2 * a}))
def known_turned(z0: State, a: Tensor) -> State:
    return {"v": 2 * a, "u": a}


Order = Callable[[State], State]
USES: dict[str, Callable[[Order, Tensor], State]] = {
    "fixed point": lambda o, a: ik.fixed_point(lambda z, a: o(mixed(z, a)), start(2), (a,)).value,
    "fixed point, Newton": lambda o, a: (
        ik.fixed_point(lambda z, a: o(mixed(z, a)), start(2), (a,), solver="newton").value
    ),
    "root": lambda o, a: ik.root(lambda z, a: o({k: z[k] - f for k, f in mixed(z, a).items()}), start(2), (a,)).value,
    "steady state": lambda o, a: (
        ik.steady_state(lambda z, a: o({k: f - z[k] for k, f in mixed(z, a).items()}), start(2), (a,)).value
    ),
    "unrolled": lambda o, a: (
        ik.fixed_point(lambda z, a: o(mixed(z, a)), start(2), (a,), solver="picard", rule=ik.Unroll(60)).value
    ),
    "complex beside real": lambda o, a: {
        k: torch.view_as_real(x) if x.is_complex() else x
        for k, x in ik.fixed_point(
            lambda z, a: o({"u": 0.2 * z["u"].conj() + 1j * a, "v": 0.3 * z["v"] + z["u"].abs()}),
            {"u": torch.zeros(2, dtype=torch.complex128), "v": torch.zeros(2, dtype=D)},
            (a,),
        ).value.items()
    },
    "in turns": lambda o, a: in_turns(o, a),
    "projection": lambda o, a: ik.argmin(far, start(2), (a,), project=lambda z: o(clamped(z))).value,
    "proximal map": lambda o, a: ik.argmin(far, start(2), (a,), prox=lambda z, t: o(clamped(z))).value,
    "bounds": lambda o, a: ik.argmin(far, start(2), (a,), bounds=tuple(map(o, limits()))).value,
    "bounds of a fit": lambda o, a: (
        ik.least_squares(
            lambda z, a: torch.cat([z["u"] - 3 * a, z["v"] - 5 * a]), start(2), (a,), bounds=tuple(map(o, limits()))
        ).value
    ),
    "scales of a fit": lambda o, a: (
        ik.least_squares(
            lambda z, a: torch.cat([z["u"] - 3 * a, z["v"] - 5 * a * z["u"], z["v"] ** 3]),
            start(2),
            (a,),
            x_scale=o({"u": torch.ones(2, dtype=D), "v": torch.full((2,), 100.0, dtype=D)}),
        ).value
    ),
    "trajectory": lambda o, a: (
        ik.solve(
            ik.InitialValue(lambda t, y, a: o({"u": -a * y["u"], "v": -2 * a * y["v"]}), torch.linspace(0, 1, 3)),
            {"u": torch.ones(2, dtype=D), "v": torch.full((2,), 2.0, dtype=D)},
            (a,),
        ).value
    ),
    "a solver of one's own": lambda o, a: (known if o is same else known_turned)(start(2), a),
}


def same(state: State) -> State:
    return state


def in_turns(o: Order, a: Tensor) -> State:
    """The order changes from call to call."""
    calls = []

    def f(z: State, a: Tensor) -> State:
        calls.append(0)
        return mixed(z, a) if len(calls) % 2 else o(mixed(z, a))

    solution: State = ik.fixed_point(f, start(2), (a,), solver="anderson").value
    return solution


@pytest.mark.parametrize("name", USES)
def test_the_order_of_keys_is_no_matter(name: str) -> None:
    found = []
    for order in (same, turned):
        a = A.clone().requires_grad_()
        state = USES[name](order, a)
        assert list(state) == ["u", "v"]  # as in z0
        gradients = [torch.autograd.grad(x.sum(), a, retain_graph=True)[0] for x in state.values()]
        found.append((dict(state), gradients))
    (values, gradients), (values_turned, gradients_turned) = found
    torch.testing.assert_close(values_turned, values, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gradients_turned, gradients, rtol=1e-7, atol=1e-9)
    assert not torch.allclose(values["u"], values["v"])  # confused, they would show


def test_other_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="another structure than z"):
        ik.fixed_point(lambda z: {"u": z["u"], "w": z["v"]}, start(2))
    with pytest.raises(ValueError, match="another structure than z0"):
        ik.argmin(far, start(2), (A,), bounds=({"u": 0.0, "w": 0.0}, 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# Pytrees of tuples of tensors are taken apart by hand, as torch takes them apart.
Pair = namedtuple("Pair", "a b")
T = torch.zeros(2)
TREES: dict[str, Any] = {
    "one": T,
    "empty": (),
    "pair": (T, T + 1),
    "nested": ((), T, (T + 1, (T + 2,))),
    "with None": (T, None),
    "with a number": (T, (1.0, T)),
    "with a list": (T, [T]),
    "with a dict": ((T,), {"b": T, "a": T + 1}),
    "named": Pair(T, (T,)),
    "named inside": (Pair(T, T),),
    "ordered": (OrderedDict(b=T, a=T),),
    "size": (torch.Size([2]), T),
    "parameter": (torch.nn.Parameter(T.clone()),),
    "nothing in it": ((), ((),)),
}


@pytest.mark.parametrize("name", TREES)
def test_the_same_leaves_and_structure(name: str) -> None:
    tree = TREES[name]
    leaves, spec = pytrees.tree_flatten(tree)
    right, wanted = _pytree.tree_flatten(tree)
    assert len(leaves) == len(right) and all(a is b for a, b in zip(leaves, right, strict=True))
    assert spec == wanted and repr(spec) == repr(wanted)
    again = pytrees.tree_unflatten(leaves, spec)
    assert type(again) is type(tree)
    leaves.append(None)  # what somebody does with the leaves is nobody else's
    assert len(pytrees.tree_flatten(tree)[0]) == len(right)


def test_one_structure_is_made_once() -> None:
    assert pytrees.tree_flatten((T, (T,)))[1] is pytrees.tree_flatten((T + 1, (T,)))[1]
    assert pytrees.tree_flatten((T, (T,)))[1] != pytrees.tree_flatten(((T,), T))[1]


def test_leaves_that_somebody_names() -> None:
    leaves, _ = pytrees.tree_flatten((T, (T,)), is_leaf=lambda x: isinstance(x, tuple) and len(x) == 1)
    assert len(leaves) == 2 and leaves[1] == (T,)


def test_arguments_without_arrays_stay_what_they_are() -> None:
    import numpy as np

    args = ((), T, {"a": 1.0})
    assert arrays.as_args(args) is args
    found = arrays.as_args((np.ones(2), (np.float64(2.0), T)))
    assert isinstance(found[0], torch.Tensor) and found[1][0] == 2.0 and type(found[1][0]) is float
