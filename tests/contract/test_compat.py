"""The private names of torch that are used, held to their contract; and the traps of torch that say nothing.

The first half fails when a release of torch moves or changes what ``foundation/compat.py``, ``pytrees.py``, ``graph.py`` and
``tracers.py`` rely on.
The second half holds one row for every way known to us in which a derivative of an implicit function is lost without an
error: ours must be right, or refuse.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import subprocess
import sys
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrices import randn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode

import implicitkit as ik
from implicitkit.foundation import compat, graph, pytrees, tracers

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}
HELD: dict[str, Tensor] = {}  # a global that captures
TWO = torch.tensor(2.0, dtype=D)
Point = namedtuple("Point", ["x", "y"])
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def assert_near(got: Any, want: Any, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# ------------------------------------------------------------------------------------------------------------ contracts
def inside(transform: str, probe: Callable[[Tensor], Any], x: Tensor | None = None) -> Any:
    """What ``probe`` says of a tensor inside a transform."""
    said: list[Any] = []

    def run(t: Tensor) -> Tensor:
        said.append(probe(t))
        return t.sum()

    x = torch.ones(3, dtype=D) if x is None else x
    if transform == "grad":
        grad(run)(x)
    elif transform == "jvp":
        jvp(run, (x,), (x,))
    elif transform == "vmap":
        vmap(run)(x.reshape(3, 1))
    elif transform == "vmap of grad":
        vmap(grad(run))(x.reshape(3, 1))
    else:
        run(x)
    return said[0]


LEVELS = ("grad", "jvp", "vmap", "vmap of grad")


def test_trees() -> None:
    tree = {"b": [torch.ones(1), 2], "a": (None, OrderedDict(k=torch.zeros(2))), "p": Point(torch.ones(3), "s")}
    leaves, spec = pytrees.tree_flatten(tree)
    assert isinstance(spec, pytrees.TreeSpec)
    again = pytrees.tree_unflatten(leaves, spec)
    assert list(again) == ["b", "a", "p"]  # keys keep their order
    assert isinstance(again["p"], Point)
    assert isinstance(again["a"][1], OrderedDict)
    assert pytrees.tree_flatten(again)[1] == spec
    assert pytrees.tree_flatten({"b": 1})[1] != pytrees.tree_flatten({"a": 1})[1]
    assert pytrees.tree_flatten((1,))[1] != pytrees.tree_flatten([1])[1]

    bare, spec = pytrees.tree_flatten(TWO)
    assert pytrees.tree_unflatten(bare, spec) is TWO and spec == pytrees.tree_flatten(1)[1]


def test_tensors_in() -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    found = pytrees.tensors_in((a, [3, None, "b", (b,)], {"k": c, "e": {}}, Point(d, "s"), torch.float32, slice(1, 2)))
    assert list(map(id, found)) == list(map(id, (a, b, c, d)))
    assert pytrees.tensors_in(torch.ones(2, 2).max(1))[1].dtype == torch.int64  # what operations return by name


def test_untracked() -> None:
    for on in (True, False):
        with torch.set_grad_enabled(on):
            with compat.untracked():
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled() == on


def test_underived() -> None:
    x = TWO.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(TWO, TWO)
        with compat.underived():
            assert not compat.has_tangent(3 * dual)
            assert not (3 * x).requires_grad
        assert compat.has_tangent(3 * dual)
        assert (3 * x).requires_grad

    def inside(x: Tensor) -> Tensor:
        with compat.underived():
            kept = 3 * x
        return x * kept

    assert jvp(inside, (TWO,), (TWO,))[1].equal(3 * TWO * TWO)


def test_tree_map() -> None:
    assert pytrees.tree_map(lambda x: x + 1, {"a": (1, [2])}) == {"a": (2, [3])}
    kept = pytrees.tree_map(lambda x: "leaf", [(1, 2), 3], is_leaf=lambda x: isinstance(x, tuple))
    assert kept == ["leaf", "leaf"]


def test_paths() -> None:
    tree = {"h": [10, (20, 30)]}
    assert pytrees.tree_flatten_with_path(tree) == [("['h'][0]", 10), ("['h'][1][0]", 20), ("['h'][1][1]", 30)]
    assert [leaf for _, leaf in pytrees.tree_flatten_with_path(tree)] == pytrees.tree_flatten(tree)[0]
    assert pytrees.key_path(tree, 2) == "['h'][1][1]"
    assert pytrees.key_path(7, 0) == ""


def test_transforms_active() -> None:
    assert not compat.transforms_active()
    for level in LEVELS:
        assert inside(level, lambda _: compat.transforms_active()), level
    assert not compat.transforms_active()
    with forward_ad.dual_level():
        assert not compat.transforms_active()


def test_is_wrapped() -> None:
    assert not compat.is_wrapped(torch.ones(1, requires_grad=True))
    for level in LEVELS:
        assert inside(level, compat.is_wrapped), level
        assert not inside(level, lambda _: compat.is_wrapped(TWO)), level
        assert inside(level, lambda t: compat.is_wrapped(t.detach())), level


def test_unwrap_dead_wrappers() -> None:
    w, kept = torch.ones(2, requires_grad=True), []
    torch.func.grad(lambda x: (kept.append(1.0 * w), x.sum())[1])(torch.ones(2))
    (alive,) = compat.unwrap_dead_wrappers(kept)
    assert compat.is_wrapped(kept[0]) and not kept[0].requires_grad
    assert not compat.is_wrapped(alive) and alive.requires_grad


def test_around() -> None:
    """A wrapper like that of another has the same level and sizes, and is differentiated by, and batched, as that one is."""
    x, y = torch.arange(6.0, dtype=D).view(2, 3), torch.ones(2, 3, dtype=D)

    def look(t: Tensor) -> Tensor:
        other = compat.around(y, t)
        assert compat.level(other) == compat.level(t) and other.shape == t.shape
        return (other * t).sum()

    torch.testing.assert_close(torch.func.vmap(look)(x), x.sum(1))
    torch.testing.assert_close(torch.func.grad(look)(x), y)


def test_unwrap() -> None:
    x = torch.arange(3.0, dtype=D)
    for level in ("grad", "jvp", "vmap"):
        plain = inside(level, compat.unwrap, x)
        assert not compat.is_wrapped(plain), level
        assert torch.equal(plain.flatten().detach(), x), level
    twice = inside("vmap of grad", lambda t: (compat.unwrap(t), compat.unwrap(compat.unwrap(t))), x)
    assert not compat.is_wrapped(twice[1])


def test_is_legacy_batched() -> None:
    seen: list[bool] = []
    x = torch.ones(3, requires_grad=True)

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(compat.is_legacy_batched(g))
            return g * 2

    y = Probe.apply(x)
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert seen == [True, False]
    assert not inside("vmap", compat.is_legacy_batched)


def test_below_legacy_batch() -> None:
    x = torch.ones(3, requires_grad=True)
    seen: list[Any] = []

    def plain(rows: Tensor) -> Tensor:
        seen.append((compat.is_legacy_batched(rows), tuple(rows.shape)))
        torch.rand(1)  # refused while batches of this kind are open
        return 2 * rows if bool(rows.sum() > 0) else rows

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return compat.below_legacy_batch(plain, g) if compat.is_legacy_batched(g) else 2 * g

    y = Probe.apply(x)
    rows = torch.arange(12.0).view(4, 3)
    (found,) = torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True)
    assert_near(found, 2 * rows)
    assert seen == [(False, (4, 3))]

    def inner(g: Tensor) -> Tensor:  # two levels, and one of two
        return torch.autograd.grad(y, x, rows + g.sum(), is_grads_batched=True, retain_graph=True)[0].sum(0)

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            once = torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True)[0].sum(0)
            return inner(g) + once + compat.below_legacy_batch(plain, g)

    z = Outer.apply(x)
    outer = torch.arange(6.0).view(2, 3)
    (found,) = torch.autograd.grad(z, x, outer, is_grads_batched=True, retain_graph=True)
    assert_near(found, torch.stack([2 * (rows + g.sum()).sum(0) + 2 * rows.sum(0) + 2 * g for g in outer]))
    with pytest.raises(RuntimeError, match="random"):  # the mode is back
        torch.autograd.grad(Bad.apply(x), x, outer, is_grads_batched=True)


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        compat.below_legacy_batch(lambda rows: rows, g)
        return g + torch.rand(1)


def test_tracked() -> None:
    assert not compat.tracked(torch.ones(2))
    assert compat.tracked(torch.ones(2, requires_grad=True))
    assert compat.tracked(torch.ones(2, requires_grad=True) * 2)
    for level in LEVELS:
        assert inside(level, compat.tracked), level
        assert not inside(level, lambda _: compat.tracked(TWO * 2)), level  # wrapped, perhaps, but constant
    assert not inside("grad", lambda t: compat.tracked(t.detach()))
    leaf = torch.ones(2, requires_grad=True)
    assert inside("grad", lambda t: compat.tracked(leaf * t.detach()[0]))  # an outer level's
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert compat.tracked(dual)
        assert compat.tracked(dual * 2)
        assert not compat.tracked(torch.ones(2))


def test_physical() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert compat.physical(leaf) is leaf
    for level in LEVELS:
        assert not compat.is_wrapped(inside(level, compat.physical)), level
    assert inside("vmap", compat.physical).shape == (3, 1)  # the batch is there
    assert inside("grad", lambda _: compat.physical(leaf * 2).requires_grad)


def test_level() -> None:
    plain = torch.ones(1)
    assert compat.level() == compat.level(plain) == 0

    def inner(t: Tensor) -> Tensor:
        assert compat.level(t) == compat.level() == 2
        assert compat.level(outer[0]) == 1
        assert compat.level(plain) == 0
        return t * outer[0]

    outer: list[Tensor] = []

    def middle(t: Tensor) -> Tensor:
        outer.append(t)
        assert compat.level(t) == compat.level() == 1
        return torch.func.vmap(inner)(plain).sum()

    assert torch.func.grad(middle)(torch.tensor(2.0)) == 1


def test_at_level_of() -> None:
    """What an inner level hides of an outer one; and the stack of transforms is as it was afterwards."""
    x = torch.ones(2, dtype=D)
    seen: list[bool] = []

    def look(outer: Tensor, inner: Tensor) -> Tensor:
        blind = forward_ad.unpack_dual(outer).tangent is not None
        with compat.at_level_of(outer):
            seen.append(not blind and forward_ad.unpack_dual(outer).tangent is not None)
        return (outer * inner).sum()

    jvp(lambda w: grad(lambda y: look(w, y))(x), (x,), (x,))
    assert_near(jvp(lambda w: jvp(lambda y: look(w, y), (x,), (x,))[1], (x,), (x,))[1], torch.tensor(2.0, dtype=D))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        grad(lambda y: look(dual, y))(x)
    assert seen == [True] * 3


def test_marked() -> None:
    for level in LEVELS:
        leaf = inside(level, lambda t: compat.marked(compat.physical(t)))
        assert leaf.is_leaf and leaf.requires_grad and not compat.is_wrapped(leaf), level
    assert compat.marked(TWO).requires_grad
    assert not TWO.requires_grad
    with pytest.raises(RuntimeError):  # what it goes around is still refused
        grad(lambda t: TWO.detach().requires_grad_() * t)(TWO)


@pytest.mark.parametrize(
    ("transform", "there"),
    [
        (torch.func.hessian, True),
        (lambda f: torch.func.jacfwd(torch.func.grad(f)), True),
        (lambda f: torch.func.jacrev(torch.func.jacfwd(f)), False),
        (lambda f: torch.func.jacrev(torch.func.grad(f)), False),
        (torch.func.jacfwd, False),
        (torch.func.grad, False),
        (lambda f: f, False),
    ],
)
def test_reverse_inside_forward(transform: Callable[..., Any], there: bool) -> None:
    said: list[bool] = []
    transform(lambda t: said.append(compat.reverse_inside_forward()) or t.square().sum())(torch.ones(2))
    assert set(said) == {there}


def test_empty_batch() -> None:
    assert not compat.empty_batch()
    for transform in (vmap, lambda f: vmap(grad(f)), lambda f: vmap(vmap(f), in_dims=1)):
        said: list[bool] = []
        for n in (0, 2):
            transform(lambda t: said.append(compat.empty_batch()) or t.sum())(torch.ones(n, 2))  # noqa: B023
        assert said == [True, False]


def test_batches() -> None:
    """Whose levels are known, come off, and go on again; whatever transforms are between."""
    assert compat.mapped_over() == []
    said: list[Any] = []

    def look(t: Tensor) -> Tensor:
        plain, count = compat.batches_in_front(t)
        levels, sizes = zip(*compat.mapped_over(), strict=True)
        again = compat.with_batches(plain, levels)
        said.append(
            (count, sizes, tuple(plain.shape), torch.equal(*(compat.batches_in_front(x)[0] for x in (t, again))))
        )
        assert compat.level(again) == levels[-1] and again.shape == t.shape
        return t.sum()

    x = torch.arange(24.0).reshape(2, 3, 4)
    vmap(vmap(look), in_dims=1)(x)
    vmap(grad(lambda t: vmap(look)(t).sum()))(x)
    vmap(vmap(grad(look)))(x)
    assert said == [(2, (3, 2), (3, 2, 4), True), *[(2, (2, 3), (2, 3, 4), True)] * 2]


def test_plain_sample() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not compat.plain_sample(leaf).requires_grad
    for level in LEVELS:
        t = inside(level, lambda t: (compat.plain_sample(t), t.shape))
        assert not compat.tracked(t[0]), level
        assert t[0].shape == t[1], level
    columns = torch.arange(6.0).reshape(2, 3)
    said: list[Tensor] = []
    vmap(lambda t: said.append(compat.plain_sample(t)) or t, in_dims=1)(columns)
    assert torch.equal(said[0], columns[:, 0])  # the sample, not the batch, whatever dimension it lies along


def test_has_forward_level() -> None:
    assert not compat.has_forward_level()
    with forward_ad.dual_level():
        assert compat.has_forward_level()
    assert inside("jvp", lambda _: compat.has_forward_level())
    assert not inside("grad", lambda _: compat.has_forward_level())
    assert not compat.has_forward_level()


@pytest.mark.parametrize("default", [torch.float32, D], ids=str)
def test_own_tangents(default: torch.dtype) -> None:
    w, before = torch.tensor(1.5, dtype=torch.float32), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        tangent = lambda f: torch.func.jvp(f, (w,), (torch.ones_like(w),))[1]  # noqa: E731
        assert tangent(lambda w: 0.5 * w).dtype == D  # what it is for; if not, it may go
        mended = tangent(lambda w: compat.own_tangents(0.5 * w))
        assert mended.dtype == torch.float32 and float(mended) == 0.5
        assert compat.own_tangents(w) is w
    finally:
        torch.set_default_dtype(before)


def test_has_tangent() -> None:
    x = torch.ones(2, dtype=D)
    assert not compat.has_tangent(x)
    with forward_ad.dual_level():
        assert compat.has_tangent(forward_ad.make_dual(x, x))
        assert not compat.has_tangent(x)
        assert not compat.has_tangent(torch.ones(2, dtype=torch.int64))
        assert compat.has_tangent(forward_ad.make_dual(x.to(torch.complex128), x.to(torch.complex128)))
    assert inside("jvp", compat.has_tangent)
    assert not inside("jvp", lambda _: compat.has_tangent(TWO))
    outer: list[bool] = []  # while an inner level is current
    inner = lambda w: grad(lambda y: (outer.append(compat.has_tangent(w)), (w * y).sum())[1])(x)  # noqa: E731
    jvp(inner, (x,), (x,))
    vmap(inner)(x)
    jvp(vmap(inner), (x,), (x,))
    assert outer == [True, False, True]


def test_forward_ad_enabled() -> None:
    """pytorch/pytorch#197867: the second tangent of x^3 at 2 is 12, and 0 without the context."""

    def cube(enabled: bool) -> Any:
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x**3

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_forward(*inputs)

            @staticmethod
            def jvp(ctx: Any, t: Tensor) -> Tensor:
                if not enabled:
                    (x,) = ctx.saved_tensors
                    return 3 * x**2 * t
                with compat.forward_ad_enabled(ctx.saved_tensors) as (x,):
                    return 3 * x**2 * t

        return Cube.apply

    def second(f: Any) -> float:
        first = lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]  # noqa: E731
        return float(jvp(first, (TWO,), (torch.ones_like(TWO),))[1])

    assert second(cube(True)) == 12.0
    assert second(cube(False)) in (0.0, 12.0)  # 12 as soon as torch has mended it


def test_opaque_to_compile() -> None:
    def original(a: int, b: Tensor, *, flag: bool = False) -> Tensor:
        """What it does."""
        return b + a

    wrapped = tracers.opaque_to_compile(original)
    assert inspect.signature(wrapped) == inspect.signature(original)
    assert (wrapped.__name__, wrapped.__doc__) == ("original", "What it does.")
    assert torch.equal(wrapped(1, torch.ones(1)), torch.full((1,), 2.0))
    seen: list[bool] = []

    @tracers.opaque_to_compile
    def outside(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + float(x.sum())  # .item() would be refused inside

    compiled = torch.compile(lambda x: outside(x * 2) * 3, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 18.0))
    assert seen == [False]
    again = tracers.opaque_to_compile(lambda x: outside(compiled(x)))  # inside, the compiler is at work once more
    assert torch.equal(again(torch.ones(2)), torch.full((2,), 54.0))
    assert seen == [False] * 3
    torch.compiler.reset()


def test_modes_active() -> None:
    """Whatever records is seen, and at no level of a transform is there more than torch knows of."""
    seen: list[tuple[bool, bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((compat.modes_active(), get_proxy_mode() is not None))
        return 2 * x

    for run in (
        look,
        torch.func.grad(lambda x: look(x).sum()),
        make_fx(look),
        make_fx(look, pre_dispatch=True),
        make_fx(torch.func.grad(lambda x: look(x).sum())),
    ):
        run(torch.ones(2))
    assert seen == [(False, False)] * 2 + [(True, True)] * 3
    with tracers.TorchDispatchMode():
        assert compat.modes_active()


def test_inference() -> None:
    """Inference mode is seen below transforms, where torch denies it, and can be left."""
    probe = lambda t: compat.in_inference()  # noqa: E731
    assert not compat.in_inference() and not inside("grad", probe)
    with torch.inference_mode():
        made = torch.ones(2)
        assert compat.in_inference() and all(inside(name, probe) for name in ("grad", "jvp", "vmap"))
        for mode in (torch.no_grad, torch.enable_grad):
            with mode(), compat.autograd_on():
                assert not compat.in_inference() and torch.is_grad_enabled() is (mode is torch.enable_grad)
                assert not forward_ad._is_fwd_grad_enabled()
        assert compat.in_inference()

        @compat.outside_inference
        def square(x: Tensor, n: int) -> Tensor:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad((leaf**n).sum(), leaf)[0]

        assert torch.equal(square(made, 2), torch.full((2,), 2.0))
    assert made.is_inference() and not compat.ordinary(made).is_inference()
    plain = torch.ones(1)
    assert compat.ordinary(plain) is plain and compat.ordinary("x") == "x"


def test_own_parametrizations() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    assert not compat.keeps_parametrizations() and layer.weight is not layer.weight
    with torch.nn.utils.parametrize.cached():
        assert compat.keeps_parametrizations()
        outside = layer.weight
        with contextlib.suppress(KeyError), compat.own_parametrizations():
            inside = layer.weight
            assert inside is not outside and layer.weight is inside
            raise KeyError
        assert layer.weight is outside
    assert layer.weight is not outside


def test_own_graphs() -> None:
    """Hooks on saved tensors do not apply inside, and do again afterwards, also after an error."""
    packed: list[str] = []

    def hooks(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(name) or t, lambda t: t)

    x = torch.ones(1, requires_grad=True)
    with compat.own_graphs():
        x.exp()
    with hooks("outer"), hooks("inner"):
        with contextlib.suppress(KeyError), compat.own_graphs():
            grad(lambda t: t.exp().sum())(x.detach())  # torch.func refuses under hooks
            x.exp()
            raise KeyError
        assert packed == []
        x.exp()
    with hooks("after"):
        x.exp()
    assert packed == ["inner", "after"]


class Watch(tracers.TorchDispatchMode):
    """The operations below autograd, by name, and whether each writes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(tracers.operation(func))
        return func(*args, **(kwargs or {}))


def test_dispatch() -> None:
    """A mode sees every operation below autograd by its name, and whether it writes; dynamo is not imported for it."""
    x = torch.ones(2)
    with Watch() as watch:
        (x * 2).add_(1)
    assert watch.seen == [("aten::mul", False), ("aten::add_", True)]
    assert not hasattr(Watch.__torch_dispatch__, "__wrapped__")  # as those are that dynamo leaves alone


class _Twice(compat.Function):
    """``2 x``, whose rules say ``3``: so that a derivative that took another way shows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, int]:
        return _Twice.apply(x), in_dims[0]


def test_function_is_as_torchs() -> None:
    x = TWO.clone().requires_grad_()
    y = _Twice.apply(x)
    assert y.item() == 4.0 and torch.autograd.grad(y, x)[0].item() == 3.0
    assert grad(_Twice.apply)(TWO).item() == 3.0
    assert_near(vmap(grad(_Twice.apply))(torch.ones(3, dtype=D)), torch.full((3,), 3.0, dtype=D))
    kept: list[Tensor] = []
    grad(lambda t: kept.append(t) or t)(TWO)  # type: ignore[func-returns-value]
    assert _Twice.apply(kept[0]).item() == 4.0  # a tensor that has outlived its transform


def test_is_compiled() -> None:
    class WithMethod(nn.Linear):
        forward = torch.compile(nn.Linear.forward, backend="eager")

    def plain(x: Tensor) -> Tensor:
        return 2 * x

    own, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    own.forward = torch.compile(own.forward, backend="eager")  # type: ignore[method-assign]
    in_place.compile(backend="eager")
    compiled = torch.compile(plain, backend="eager"), torch.compile(nn.Linear(2, 2), backend="eager")
    assert tracers.compiles()
    for x in (*compiled, WithMethod(2, 2), own, in_place):
        assert tracers.is_compiled(x), x
    for x in (plain, torch.compiler.disable(plain), nn.Linear(2, 2), ik.fixed_point, TWO, None):
        assert not tracers.is_compiled(x), x


def test_unseen() -> None:
    class Counting(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.seen += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        TWO.clone()
        before = Counting.seen
        with compat.unseen():
            TWO.detach().clone()
    assert 0 < before == Counting.seen


def test_unwatched() -> None:
    class Counting(TorchFunctionMode):
        def __init__(self, watches: bool) -> None:
            super().__init__()
            self.watches, self.seen = watches, 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    modes = Counting(True), Counting(False), Counting(True), Counting(False)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        with contextlib.suppress(KeyError), compat.unwatched():
            TWO.clone()
            with compat.unwatched(), Counting(True) as inner:  # what is entered inside is seen by itself
                TWO.clone()
            raise KeyError
        assert [mode.seen for mode in (*modes, inner)] == [0, 2, 0, 2, 1]
        TWO.clone()
    TWO.clone()
    assert [mode.seen for mode in modes] == [1, 3, 1, 3]


def test_refuse_tracing() -> None:
    tracers.refuse_tracing()
    refused: list[str] = []

    def run(*anything: Any) -> Tensor:
        try:
            tracers.refuse_tracing()
        except ik.CapabilityError as error:
            refused.append(str(error))
        return TWO

    class Layer(nn.Module):
        forward = run

    make_fx(run)(TWO)
    torch.fx.symbolic_trace(lambda x: run(x))
    with FakeTensorMode():
        run()
    torch.compile(run, backend="eager")()
    run()
    wanted = ("torch.func.linearize", "torch.fx.symbolic_trace", "FakeTensorMode")
    assert len(refused) == 3 and all(word in text for word, text in zip(wanted, refused, strict=True)), refused


def test_is_fake() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert tracers.is_fake(fake) and not tracers.is_fake(TWO) and not tracers.is_fake(torch.ones(2, device="meta"))
    assert "FakeTensorMode" in tracers.NO_NUMBERS.format(what="tensors inside FakeTensorMode")


def test_pulled() -> None:
    z, y = (torch.tensor([0.3, -2.0], dtype=D, requires_grad=True) for _ in range(2))
    out, w = z.sin() * 3, torch.tensor([2.0, 5.0], dtype=D, requires_grad=True)
    for keep in (True, False):  # the graph is kept, until it need not be
        got, other = graph.pulled(out, [z, y], w, retain_graph=keep)
        assert got is not None and torch.equal(got, 3 * z.cos() * w) and not got.requires_grad and z.grad is None
        assert other is None
    with pytest.raises(RuntimeError, match="second time"):
        graph.pulled(out, [z], w)
    out = z.sin() * 3
    for wrong in (w[:1], w.reshape(1, 2)):  # what torch says of them, it says
        with pytest.raises(RuntimeError, match="shape"):
            graph.pulled(out, [z], wrong)
    (doubled,) = torch.autograd.grad((2 * z).sin(), z, w, create_graph=True)
    with torch.no_grad():  # through a graph of a derivative, as products with J are made
        (second,) = graph.pulled(doubled, [z], torch.ones_like(z))
    assert second is not None
    torch.testing.assert_close(second, -4 * (2 * z).sin().detach() * w.detach())
    several = graph.pulled([z.sin(), z * y], [z, y], [w, TWO.to(D).expand(2)], create_graph=True)
    torch.testing.assert_close(several, (z.cos() * w + 2 * y, 2 * z))
    assert all(g is not None and g.requires_grad for g in several)  # differentiable, in the cotangent too


def test_pulled_at_a_level() -> None:
    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(z: Tensor) -> Tensor:
            return z * z

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g * ctx.saved_tensors[0]

    z, y = torch.tensor([0.3, -2.0], dtype=D), torch.tensor([1.5, 0.5], dtype=D)

    def slopes(z: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        out, pull = graph.pulled_at_a_level(lambda z, y: f(z) * y, z, y)
        return pull(torch.ones_like(out))[0]

    torch.testing.assert_close(vmap(slopes, in_dims=(0, None))(z[None], Square.apply)[0], 2 * z * y)
    torch.testing.assert_close(jacrev(slopes)(z, torch.sin), torch.diag(-z.sin() * y))
    with pytest.raises(RuntimeError, match="Square"):
        jacrev(slopes)(z, Square.apply)


def test_lost_second_derivative() -> None:
    z, x = torch.full((3,), 0.5, dtype=D, requires_grad=True), torch.ones(3, dtype=D)

    def cube(z: Tensor, x: Tensor) -> Tensor:
        return (z - x).pow(3).sum()

    for function, lost in ((cube, False), (torch.compile(cube, backend="aot_eager"), True)):
        value = function(z.view_as(z), x)
        (g,) = torch.autograd.grad(value + z.square().sum(), z, create_graph=True)
        for result, is_lost in ((value, False), (g, lost)):
            nodes = graph.nodes_behind([result.grad_fn])
            assert tracers.lost_second_derivative(nodes.copy) == is_lost


def test_nodes() -> None:
    z, A = torch.ones(3, dtype=D, requires_grad=True), torch.ones(4, 3, dtype=D)
    product = A @ z
    out = torch.log1p(product.float())
    double = out.grad_fn.next_functions[0]  # type: ignore[union-attr]
    assert graph.operation_of(out.grad_fn) == "log1p" and graph.operation_of(double[0]) == "to_copy"
    assert graph.dtype_at(double) == torch.float32 and graph.dtype_at((product.grad_fn, 0)) == D
    assert graph.operation_of(product.grad_fn) == "mv" and graph.shape_at((product.grad_fn, 0)) == (4,)
    assert graph.age(out.grad_fn) > graph.age(double[0]) > graph.age(product.grad_fn)
    leaf = product.grad_fn.next_functions[1][0]  # type: ignore[union-attr]
    assert graph.is_leaf(leaf, z) and not graph.is_leaf(leaf, A) and not graph.is_leaf(out.grad_fn, z)
    assert graph.operation_of(leaf) == "" and graph.age(leaf) > graph.age(out.grad_fn)
    assert torch.equal(graph.saved(product.grad_fn, "self"), A)
    added = torch.addmv(z, z.new_ones(3, 3), z, alpha=3, beta=2).grad_fn
    assert (graph.saved(added, "alpha"), graph.saved(added, "beta")) == (3, 2)
    product.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        graph.saved(product.grad_fn, "self")
    for dims, keep in ((0, False), (-1, True), ((0, -1), False), (None, False)):
        reduced = (A * z).mean(dims, keepdim=keep)
        wanted = [0, 1] if dims is None else [d % 2 for d in (dims if isinstance(dims, tuple) else (dims,))]
        assert graph.dims_of(reduced.grad_fn, 2) == wanted, dims
    assert graph.dims_of(torch.logsumexp(A * z, -1).grad_fn, 2) == [1]


def test_pointwise() -> None:
    by_entry = (
        "tanh sigmoid relu leaky_relu gelu silu softplus exp log1p pow mul div add sub neg where clamp maximum square"
    )
    assert all(map(graph.is_pointwise, by_entry.split()))
    others = [
        "",
        "mm",
        "softmax",
        "cumsum",
        "sum",
        "index",
        "native_layer_norm",
        "convolution",
        "gather",
        "sort",
        "no_such",
    ]
    assert not any(map(graph.is_pointwise, others))


def test_called() -> None:
    z = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    given = torch.arange(6, dtype=D).view(2, 3)
    twice = (z * given).grad_fn
    first, second = graph.called(twice, {0: given})
    assert first is not None and torch.equal(first, given * given) and second is None  # of both rows, not of their sum
    (whole,) = graph.called(z.split([1, 2])[0].grad_fn, {1: torch.tensor([5, 6])})
    assert whole is not None and whole.tolist() == [0, 5, 6]


def test_wrong_rules() -> None:
    """torch maps the derivative of ``cdist`` wrongly; once it no longer does, ``graph`` need not refuse it."""
    x = torch.arange(10.0).sin().view(5, 2).requires_grad_()
    d = torch.cdist(x, x.detach().cos())
    given = torch.arange(50.0).cos().view(2, 5, 5)
    one_by_one = torch.stack([torch.autograd.grad(d, x, w, retain_graph=True)[0] for w in given])
    mapped = vmap(lambda w: torch.autograd.grad(d, x, w, retain_graph=True)[0])(given)
    assert not torch.allclose(mapped, one_by_one)
    assert torch.allclose(graph.each(lambda w: graph.pulled(d, (x,), w)[0], given), one_by_one)
    with pytest.raises(RuntimeError, match="no batching rule"):
        graph.refuse_wrong_rules([d.grad_fn])
    graph.refuse_wrong_rules([x.sin().grad_fn])


def test_nodes_behind() -> None:
    x = torch.tensor([0.3, 2.0], requires_grad=True)
    y = x.sin() * x.cos()
    found = [type(node).__name__.rstrip("0123456789") for node in graph.nodes_behind([y.grad_fn, None, y.grad_fn])]
    assert sorted(found) == ["AccumulateGrad", "CosBackward", "MulBackward", "SinBackward"]


def test_mapped() -> None:
    """What ``torch.func.vmap`` gives, inside it too, and its refusals; the level is closed whatever happens inside."""
    x = torch.tensor([0.3, -2.0, 1.0], dtype=D, requires_grad=True)
    y, eye = x.sin() * x.flip(0), torch.eye(3, dtype=D)
    product = lambda w: graph.pulled(y, (x,), w)[0]  # noqa: E731
    assert_near(graph.mapped(product, eye), vmap(product)(eye))
    assert_near(graph.mapped(lambda w: x.detach(), eye), x.detach().expand(3, 3))  # of no sample: the same for each
    assert_near(vmap(lambda t: graph.mapped(lambda w: w * t, eye))(x.detach()), x.detach().view(3, 1, 1) * eye)
    for refused in (lambda w: w * w.item(), lambda w: w + torch.rand(3)):
        with pytest.raises(RuntimeError, match="vmap"):
            graph.mapped(refused, eye)
    assert not compat.transforms_active()


def test_pulled_from() -> None:
    z = torch.tensor([0.3, -2.0], dtype=D, requires_grad=True)
    y = z.sin()
    a, b = y * 2, y.exp()
    given = [torch.tensor([[1.0, 0.0], [0.0, 5.0]], dtype=D), torch.tensor([[2.0, 0.0], [0.0, 7.0]], dtype=D)]
    edges: list[graph.Edge] = [(a.grad_fn, 0), (b.grad_fn, 0)]
    got = vmap(lambda *w: graph.pulled_from(edges, z, w))(*given)
    wanted = torch.stack([(2 * u + v * y.exp()) * z.cos() for u, v in zip(*given, strict=True)])
    torch.testing.assert_close(got, wanted.detach())
    assert not got.requires_grad and z.grad is None


def test_between_passes() -> None:
    z = torch.ones(2, dtype=D, requires_grad=True)
    other = torch.ones(2, dtype=D, requires_grad=True)
    node = other.sin().grad_fn
    seen: list[tuple[Any, Any]] = []

    def look(g: Tensor) -> Tensor:
        one = {0: torch.ones(2, dtype=D)}
        seen.append((graph.called(node, one)[0], graph.between_passes(lambda: graph.called(node, one)[0])))
        return g

    out = z * 2
    out.register_hook(look)
    torch.autograd.grad(out.sum(), z)
    (within, between) = seen[0]
    assert within is None and torch.equal(between, other.cos())
    assert graph.between_passes(lambda: 3) == 3 and other.grad is None

    def fails() -> None:
        raise KeyError("mine")

    out = z * 2
    out.register_hook(lambda _: graph.between_passes(fails))
    with pytest.raises(KeyError, match="mine"):
        torch.autograd.grad(out.sum(), z)


def test_checkpoint_of() -> None:
    seen: list[Any] = []

    def part(y: Tensor) -> Tensor:
        seen.append(graph.checkpoint_of())
        return y.sin()

    x = torch.ones(1, requires_grad=True)
    part(x)
    with torch.autograd.graph.save_on_cpu():
        part(x)
    torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sum().backward()
    outside, offloaded, inside, again = seen
    assert outside is None and offloaded is None and again is None and callable(inside.recompute_fn)


@pytest.mark.parametrize("retained", [False, True])
def test_whether_a_graph_is_freed(retained: bool) -> None:
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(graph.is_freed())
            return g

    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    Asks.apply(x).sum().backward(retain_graph=retained)
    torch.autograd.grad(Asks.apply(x).sum(), x, create_graph=True)
    assert seen == [not retained, False]


#: The test of each name that is used.
CONTRACTS = {
    test_pulled_from: "Edge pulled_from",
    test_mapped: "mapped",
    test_nodes: "age dims_of dtype_at is_leaf operation_of saved shape_at",
    test_between_passes: "between_passes",
    test_called: "called",
    test_checkpoint_of: "checkpoint_of",
    test_whether_a_graph_is_freed: "is_freed",
    test_pointwise: "is_pointwise",
    test_nodes_behind: "nodes_behind",
    test_wrong_rules: "each refuse_wrong_rules",
    test_function_is_as_torchs: "Function",
    test_dispatch: "TorchDispatchMode operation",
    test_trees: "TreeSpec tree_flatten tree_unflatten",
    test_at_level_of: "at_level_of",
    test_around: "around",
    test_inference: "autograd_on in_inference ordinary outside_inference",
    test_forward_ad_enabled: "forward_ad_enabled",
    test_has_forward_level: "has_forward_level",
    test_has_tangent: "has_tangent",
    test_own_tangents: "own_tangents",
    test_is_fake: "NO_NUMBERS is_fake",
    test_is_compiled: "compiles is_compiled",
    test_lost_second_derivative: "lost_second_derivative",
    test_refuse_tracing: "refuse_tracing",
    test_unseen: "unseen",
    test_unwatched: "unwatched",
    test_untracked: "untracked",
    test_underived: "underived",
    test_empty_batch: "empty_batch",
    test_is_legacy_batched: "is_legacy_batched",
    test_below_legacy_batch: "below_legacy_batch",
    test_is_wrapped: "is_wrapped",
    test_paths: "key_path tree_flatten_with_path",
    test_level: "level",
    test_marked: "marked",
    test_modes_active: "modes_active",
    test_opaque_to_compile: "opaque_to_compile",
    test_own_graphs: "own_graphs",
    test_own_parametrizations: "keeps_parametrizations own_parametrizations",
    test_physical: "physical",
    test_batches: "mapped_over with_batches",
    test_plain_sample: "plain_sample",
    test_pulled: "pulled",
    test_pulled_at_a_level: "pulled_at_a_level",
    test_reverse_inside_forward: "reverse_inside_forward",
    test_tracked: "tracked",
    test_tensors_in: "tensors_in",
    test_transforms_active: "transforms_active",
    test_tree_map: "tree_map",
    test_unwrap: "unwrap",
    test_unwrap_dead_wrappers: "unwrap_dead_wrappers",
}


def test_every_name_has_a_contract() -> None:
    names = [name for module in (compat, graph, pytrees, tracers) for name in module.__all__]
    assert sorted(" ".join(CONTRACTS.values()).split()) == sorted(names)


def test_a_solve_does_not_load_the_compiler() -> None:
    """Nor what torch imports for the arguments of a product with a derivative, four tenths of a second of a first call."""
    code = """
import sys, torch, implicitkit as ik
x = torch.tensor([1.0, 2.0], requires_grad=True)
for verb, f in (
    (ik.fixed_point, lambda z, x: 0.5 * z + x), (ik.root, lambda z, x: z**3 + z - x), (ik.steady_state, lambda z, x: x - z),
    (ik.argmin, lambda z, x: ((z - x) ** 2).sum()), (ik.least_squares, lambda z, x: torch.cat([z - x, 0.1 * z**2])),
    (ik.root, lambda z, x: 1e-6 * (z**3 + z - x)),  # small: is this derivative determined?
):
    torch.autograd.grad(verb(f, torch.zeros(2), (x,)).value.sum(), x)
W = torch.randn(200, 200) / 40
dense = ik.root(lambda z, x: z**3 + z + torch.tanh(z) @ W - x.sum(), torch.zeros(200), (x,), solver="newton_krylov")
torch.autograd.grad(dense.value.sum(), x)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------------------- the traps
def cubic(t: Tensor) -> Tensor:
    """x^3 + x = t: x(2) = 1, x' = 1/4, x'' = -3/32, x''' = 21/256."""
    return ik.root(lambda x, t: x**3 + x - t, torch.zeros_like(t), (t,), solver="newton", **TIGHT).value


@pytest.mark.parametrize("order", [2, 3])
def test_nested_forward_mode_is_not_zero(order: int) -> None:
    f: Callable[[Tensor], Tensor] = cubic
    for _ in range(order):
        f = (lambda g: lambda t: jvp(g, (t,), (torch.ones_like(t),))[1])(f)
    assert float(f(TWO)) == pytest.approx({2: -3 / 32, 3: 21 / 256}[order])


def test_forward_mode_over_reverse_inside_a_dual_level() -> None:
    leaf = TWO.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, torch.ones((), dtype=D))
        (g,) = torch.autograd.grad(cubic(dual), leaf, create_graph=True)
        assert forward_ad.unpack_dual(g).tangent.item() == pytest.approx(-3 / 32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "transform", [grad, jacrev, jacfwd, lambda f: grad(grad(f))], ids=["grad", "jacrev", "jacfwd", "2"]
)
def test_the_compiler_does_not_drop_the_derivative(transform: Callable[..., Any]) -> None:
    compiled = torch.compile(lambda t: transform(cubic)(t * 1.0), backend="eager")
    assert_near(compiled(TWO), transform(cubic)(TWO))
    assert float(compiled(TWO)) in (pytest.approx(0.25), pytest.approx(-3 / 32))
    torch.compiler.reset()


def test_the_compiler_does_not_drop_a_captured_parameter() -> None:
    layer, x = Layer(), randn(3, 4, seed=1)
    compiled = torch.compile(layer, backend="aot_eager")
    want = torch.autograd.grad(layer(x).pow(2).sum(), list(layer.parameters()))
    assert_near(torch.autograd.grad(compiled(x).pow(2).sum(), list(layer.parameters())), want)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fullgraph_is_refused() -> None:
    with pytest.raises(Exception, match=r"(?s)(disable|[Uu]nsupported|skip)"):
        torch.compile(cubic, backend="eager", fullgraph=True)(TWO)
    torch.compiler.reset()


class Layer(nn.Module):
    """z = tanh(W z + x) with the bound method as the map: its parameters are captured, never passed."""

    def __init__(self) -> None:
        super().__init__()
        W = randn(4, 4, seed=2)
        self.W = nn.Parameter(0.5 * W / torch.linalg.matrix_norm(W, 2))

    def map(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.mT + x)

    def forward(self, x: Tensor) -> Tensor:
        return ik.fixed_point(self.map, torch.zeros_like(x), (x,), **TIGHT).value


def unrolled(W: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(100):
        z = torch.tanh(z @ W.mT + x)
    return z


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian], ids=lambda t: t.__name__)
def test_functional_call_is_seen_after_it_has_ended(transform: Callable[..., Any]) -> None:
    """Backward runs when the module holds its own parameters again; the derivative is at those it was called with."""
    layer, x = Layer(), randn(4, seed=3)
    W = layer.W.detach() * 0.3
    got = transform(lambda W: functional_call(layer, {"W": W}, (x,)).pow(2).sum())(W)
    assert_near(got, transform(lambda W: unrolled(W, x).pow(2).sum())(W))


def test_functional_call_per_sample() -> None:
    layer, xs = Layer(), randn(3, 4, seed=4)
    W = layer.W.detach() * 0.3
    f = lambda W, x: functional_call(layer, {"W": W}, (x,)).pow(2).sum()  # noqa: E731
    assert_near(
        vmap(grad(f), in_dims=(None, 0))(W, xs), vmap(grad(lambda W, x: unrolled(W, x).pow(2).sum()), (None, 0))(W, xs)
    )


def test_a_pullback_outlives_its_transform() -> None:
    """Tensors of a level that has ended are dead wrappers: used as they are, they count as constants."""
    layer, x = Layer(), randn(4, seed=5)
    W = layer.W.detach()
    out, pullback = vjp(lambda W, x: functional_call(layer, {"W": W}, (x,)), W, x)
    want_out, want = vjp(unrolled, W, x)
    g = randn(4, seed=6)
    assert_near(out, want_out)
    assert_near(pullback(g), want(g))
    assert_near(pullback(2 * g), want(2 * g))
    escaped: list[Tensor] = []
    grad(lambda x: escaped.append(x * 1.0) or x.sum())(x)
    z = ik.fixed_point(lambda z, W: torch.tanh(z @ W.mT + escaped[0]), torch.zeros(4, dtype=D), (W,), **TIGHT).value
    assert_near(z, unrolled(W, x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["closure", "default", "list", "object", "global", "partial"])
def test_captured_tensors_are_not_constants(how: str) -> None:
    x = randn(3, seed=7)

    def loss(w: Tensor) -> Tensor:
        box, thing = [w], types.SimpleNamespace(w=w)
        maps: dict[str, Callable[[Tensor], Tensor]] = {
            "closure": lambda z: 0.5 * torch.tanh(w * z) + x,
            "default": lambda z, w=w: 0.5 * torch.tanh(w * z) + x,
            "list": lambda z: 0.5 * torch.tanh(box[0] * z) + x,
            "object": lambda z: 0.5 * torch.tanh(thing.w * z) + x,
            "global": lambda z: 0.5 * torch.tanh(HELD["w"] * z) + x,
            "partial": functools.partial(lambda w, z: 0.5 * torch.tanh(w * z) + x, w),
        }
        HELD["w"] = w
        return ik.fixed_point(maps[how], torch.zeros(3, dtype=D), **TIGHT).value.sum()

    def by_hand(w: Tensor) -> Tensor:
        z = torch.zeros(3, dtype=D)
        for _ in range(100):
            z = 0.5 * torch.tanh(w * z) + x
        return z.sum()

    w = torch.tensor(0.8, dtype=D)
    leaf = w.clone().requires_grad_()
    assert_near(torch.autograd.grad(loss(leaf), leaf)[0], grad(by_hand)(w))
    for transform in (grad, jacfwd, lambda f: grad(grad(f)), lambda f: jacfwd(jacfwd(f))):
        assert_near(transform(loss)(w), transform(by_hand)(w))
    ws = torch.stack([w, -w])
    assert_near(vmap(grad(loss))(ws), vmap(grad(by_hand))(ws))
    HELD.clear()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(z, w)
        return z * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        z, w = ctx.saved_tensors
        return g * w, (g * z).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_custom_function_that_captures_is_refused_or_right() -> None:
    """z = 0.5 w z + 1, so z = 1/(1 - w/2) and dz/dw = z^2/2."""
    w = torch.tensor(0.6, dtype=D, requires_grad=True)
    want = 0.5 / (1 - 0.3) ** 2
    solve = lambda f, args=(): ik.fixed_point(f, torch.zeros((), dtype=D), args, **TIGHT).value  # noqa: E731
    explicit = solve(lambda z, w: 0.5 * Scale.apply(z, w) + 1, (w,))
    assert torch.autograd.grad(explicit, w)[0].item() == pytest.approx(want)
    module = nn.Bilinear(1, 1, 1).to(D)  # w z + 1 for a state z and an input 1/2
    with torch.no_grad():
        module.weight.fill_(0.6)
        module.bias.fill_(1.0)
    example = torch.zeros(1, dtype=D)
    traced = torch.jit.trace(module, (example, example), check_trace=False)
    point = torch.full((1,), 0.5, dtype=D)
    captured: list[tuple[Callable[[Tensor], Tensor], Tensor, tuple[int, ...]]] = [
        (lambda z: 0.5 * Scale.apply(z, w) + 1, w, ()),
        (lambda z: traced(z, point), traced.weight, (1,)),
    ]
    for function, leaf, shape in captured:
        try:
            value = ik.fixed_point(function, torch.zeros(shape, dtype=D), **TIGHT).value
        except ik.CapturedTensorError as error:
            assert "Pass that tensor as an argument" in str(error)
        else:
            assert torch.autograd.grad(value.sum(), leaf)[0].item() == pytest.approx(want)


@pytest.mark.parametrize("what", ["argument", "captured"])
def test_a_tensor_changed_before_backward_is_detected(what: str) -> None:
    W = (0.1 * randn(3, 3, seed=8)).requires_grad_()
    b = randn(3, seed=9)
    if what == "argument":
        z = ik.fixed_point(lambda z, W: torch.tanh(W @ z) + b, torch.zeros(3, dtype=D), (W,)).value
    else:
        z = ik.fixed_point(lambda z: torch.tanh(W @ z) + b, torch.zeros(3, dtype=D)).value
    with torch.no_grad():
        W.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_the_solution_changed_before_backward_is_detected() -> None:
    x = torch.ones(3, dtype=D, requires_grad=True)
    z = ik.fixed_point(lambda z, x: 0.5 * torch.tanh(z) + x, torch.zeros(3, dtype=D), (x,)).value
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_saved_tensors_moved_by_hooks() -> None:
    """torch.func refuses to run under saved-tensor hooks, and the backward must not need it there."""
    x = randn(3, seed=10).requires_grad_()
    f = lambda z, x: 0.5 * torch.tanh(z.flip(0)) + x  # noqa: E731
    gradients = []
    for hooked in (False, True):
        packed: list[Tensor] = []
        pack: Callable[[Tensor], Tensor] = lambda t, packed=packed: packed.append(t) or t.clone()  # noqa: E731
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t) if hooked else contextlib.nullcontext()
        with hooks:
            z = ik.fixed_point(f, torch.zeros(3, dtype=D), (x,), **TIGHT).value
            (g,) = torch.autograd.grad(z.pow(2).sum(), x, create_graph=True)
            (h,) = torch.autograd.grad(g.sum(), x)
        assert bool(packed) == hooked
        gradients.append((g, h))
    assert_near(gradients[0], gradients[1])


def test_checkpoint_inside_the_map_is_right_or_refused() -> None:
    layer, x = Layer(), randn(4, seed=11)
    inner = lambda z, x: torch.utils.checkpoint.checkpoint(layer.map, z, x, use_reentrant=False)  # noqa: E731
    want = torch.autograd.grad(layer(x).pow(2).sum(), layer.W)[0]
    z = ik.fixed_point(inner, torch.zeros_like(x), (x,), **TIGHT).value
    try:
        (got,) = torch.autograd.grad(z.pow(2).sum(), layer.W)
    except (RuntimeError, torch.utils.checkpoint.CheckpointError):
        return
    assert_near(got, want)


def test_autocast_is_entered_again_in_backward() -> None:
    seen: list[torch.dtype] = []
    W = (0.3 * torch.randn(8, 8)).requires_grad_()

    def f(z: Tensor, x: Tensor) -> Tensor:
        h = z @ W.mT
        seen.append(h.dtype)
        return torch.tanh(h.float() + x)

    x = torch.randn(2, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = ik.fixed_point(f, torch.zeros(2, 8), (x,), batch_dims=1, rtol=1e-2).value
    count = len(seen)
    z.sum().backward()
    assert len(seen) > count
    assert set(seen) == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", ["make_fx", "make_fx of grad", "linearize", "functionalize", "export"])
def test_tracers_are_refused_or_right(tracer: str) -> None:
    """A solver that ran on plain numbers must not be baked into a graph as a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    other = torch.tensor(10.0, dtype=D)  # x^3 + x = 10 at x = 2, x' = 1/13

    class Module(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return cubic(t)

    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "make_fx": (lambda: make_fx(cubic)(TWO)(other), 2.0),
        "make_fx of grad": (lambda: make_fx(grad(cubic))(TWO)(other), 1 / 13),
        "linearize": (lambda: torch.func.linearize(cubic, TWO)[1](torch.ones_like(TWO)), 0.25),
        "functionalize": (lambda: torch.func.functionalize(grad(cubic))(TWO), 0.25),
        "export": (lambda: torch.export.export(Module(), (TWO,)).module()(other), 2.0),
    }
    call, want = calls[tracer]
    try:
        got = call()
    except Exception as error:
        assert not isinstance(error, AssertionError), error
        assert str(error)
    else:
        assert float(got) == pytest.approx(want)
    torch.compiler.reset()


def test_a_scalar_unknown_has_a_derivative() -> None:
    t = torch.tensor(2.0, dtype=D, requires_grad=True)
    (g,) = torch.autograd.grad(cubic(t), t)
    assert g.item() == pytest.approx(0.25)


def test_coupled_unknowns_keep_their_off_diagonal_blocks() -> None:
    """u + v/2 = s, v - u/2 = 0: u = s/1.25, v = u/2; a block-diagonal Jacobian would give du/ds = 1."""
    f = lambda z, s: {"u": z["u"] + 0.5 * z["v"] - s, "v": z["v"] - 0.5 * z["u"]}  # noqa: E731
    zero = {"u": torch.zeros((), dtype=D), "v": torch.zeros((), dtype=D)}
    slopes = jacrev(lambda s: ik.root(f, zero, (s,), **TIGHT).value)(TWO)
    assert_near(slopes, {"u": torch.tensor(0.8, dtype=D), "v": torch.tensor(0.4, dtype=D)})


@pytest.mark.parametrize("outer", [jacfwd, jacrev], ids=lambda t: t.__name__)
@pytest.mark.parametrize("inner", [jacfwd, jacrev], ids=lambda t: t.__name__)
def test_a_linear_system_inside_the_function(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    """``torch.linalg.solve`` and ``det`` differentiated twice, forward mode first, are silently wrong in torch 2.13; a
    solve forms forward mode by reverse mode, and is right around them."""
    A, B, b = randn(3, 3, seed=20) + 3 * torch.eye(3, dtype=D), randn(3, 3, seed=21), randn(3, seed=22)

    def squared(t: Tensor) -> Tensor:
        f = lambda z, t: torch.linalg.solve(A + t * B + 0.1 * torch.diag(z), b) - z  # noqa: E731
        return ik.root(f, torch.zeros(3, dtype=D), (t,), **TIGHT).value.square().sum()

    t, h = torch.tensor(0.7, dtype=D), 1e-4
    by_differences = (squared(t + h) - 2 * squared(t) + squared(t - h)) / h**2
    assert_near(outer(inner(squared))(t), by_differences, rtol=1e-6, atol=1e-6)


def test_grad_of_legacy_batched_gradients() -> None:
    t = randn(3, seed=12).requires_grad_()
    eye = torch.eye(3, dtype=D)
    (batched,) = torch.autograd.grad(cubic(t), t, eye, is_grads_batched=True)
    assert_near(batched, jacrev(cubic)(t.detach()))


def test_nothing_is_kept_alive() -> None:
    """No reference cycle: the graph of a solve goes when its value goes, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        layer, x = Layer(), randn(4, seed=13).requires_grad_()
        solution = ik.fixed_point(layer.map, torch.zeros(4, dtype=D), (x,))
        solution.value.sum().backward()
        watched = [weakref.ref(solution), weakref.ref(solution.value)]
        del solution
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------- maps that torch.func dislikes
@torch.library.custom_op("implicitkit_tests::halved_tanh", mutates_args=())
def halved_tanh(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(x)


def _halved_tanh_backward(ctx: Any, g: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return g * (0.5 - 2 * y**2)


halved_tanh.register_autograd(
    _halved_tanh_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


class Parametrised(nn.Module):
    """A map with weight normalisation, batch normalisation in evaluation and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, dtype=D))
        self.norm = nn.BatchNorm1d(4, dtype=D).eval()
        self.register_buffer("shift", torch.full((4,), 0.1, dtype=D))

    def forward(self, z: Tensor, w: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.norm(self.linear(z.unsqueeze(0)))[0] * w) + self.shift


def energy_by_autograd(z: Tensor, w: Tensor) -> Tensor:
    """z minus a gradient step on an energy, by torch.autograd.grad inside the map."""
    with torch.enable_grad():
        leaf = z if z.requires_grad else z.detach().requires_grad_()
        energy = 0.5 * leaf.square().sum() + 0.1 * (w * leaf).cos().sum() - leaf.sum()
        (g,) = torch.autograd.grad(energy, leaf, create_graph=True)
    return z - 0.7 * g


def energy_by_func(z: Tensor, w: Tensor) -> Tensor:
    """The same by torch.func.grad."""
    return z - 0.7 * grad(lambda z: 0.5 * z.square().sum() + 0.1 * (w * z).cos().sum() - z.sum())(z)


def in_place_on_its_own(z: Tensor, w: Tensor) -> Tensor:
    h = z * w
    h.mul_(0.5).tanh_()
    out = torch.zeros_like(h)
    out[0] = h[1] + 0.2
    out[1:] = h[:-1]
    return out


def legacy_function(z: Tensor, w: Tensor) -> Tensor:
    return 0.5 * Scale.apply(z.sin(), w[0]) + 0.1


def custom_operator(z: Tensor, w: Tensor) -> Tensor:
    return halved_tanh(z * w) + 0.3


UNUSUAL: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {  # the map, and whether torch.func can do it
    "energy, torch.func": (energy_by_func, True),
    "energy, torch.autograd": (energy_by_autograd, False),
    "in place on its own tensors": (in_place_on_its_own, True),
    "legacy autograd.Function": (legacy_function, False),
    "custom operator": (custom_operator, False),
    "parametrised module": (Parametrised(), True),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_maps(name: str) -> None:
    function, in_transforms = UNUSUAL[name]
    w = 0.8 + 0.1 * randn(4, seed=14)

    def solve(w: Tensor) -> Tensor:
        return ik.fixed_point(function, torch.zeros(4, dtype=D), (w,), **TIGHT).value.pow(2).sum()

    def by_hand(w: Tensor) -> Tensor:
        z = torch.zeros(4, dtype=D)
        for _ in range(60):
            z = function(z, w)
        return z.pow(2).sum()

    results = []
    for f in (solve, by_hand):
        leaf = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        results.append((g.detach(), torch.autograd.grad(g.sin().sum(), leaf)[0]))
    assert_near(results[0], results[1])
    try:
        got = grad(solve)(w)
    except RuntimeError as error:
        assert not in_transforms, error
        assert str(error)
    else:
        assert_near(got, results[1][0])


def energy_of_a_copy(z: Tensor, w: Tensor) -> Tensor:
    """Always differentiates at a copy: what it returns does not depend on z as far as autograd can see."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        (g,) = torch.autograd.grad(0.5 * leaf.square().sum() + (w * leaf).cos().sum(), leaf, create_graph=True)
    return z - 0.7 * g


def test_a_map_that_detaches_its_state_is_refused() -> None:
    w = torch.ones(4, dtype=D, requires_grad=True)
    with pytest.raises(ik.CapturedTensorError):
        ik.fixed_point(energy_of_a_copy, torch.zeros(4, dtype=D), (w,))


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_a_map_that_differentiates_keeps_no_graph(captured: bool) -> None:
    tracked: list[bool] = []
    w = (0.8 + 0.1 * randn(4, seed=15)).requires_grad_()

    def watched(z: Tensor, *args: Tensor) -> Tensor:
        tracked.append(z.requires_grad)
        return energy_by_autograd(z, w if captured else args[0])

    args = () if captured else (w,)
    z = ik.fixed_point(watched, torch.zeros(4, dtype=D), args, solver="picard", **TIGHT).value
    assert sum(tracked) <= 1  # the check whether a derivative is lost, never the solver's steps
    want = ik.fixed_point(energy_by_func, torch.zeros(4, dtype=D), (w,), **TIGHT).value
    assert_near(torch.autograd.grad(z.sum(), w)[0], torch.autograd.grad(want.sum(), w)[0])


# ----------------------------------------------------------------------------------------------- watching operations
def test_a_dispatch_mode_sees_what_autograd_and_functorch_do() -> None:
    x = randn(3).requires_grad_()
    with Watch() as watch:
        (g,) = torch.autograd.grad(x.sin().sum(), x)
        vmap(grad(lambda t: t.exp()))(x.detach())
        g.add_(1)
    wanted = [("aten::sin", False), ("aten::cos", False), ("aten::exp", False), ("aten::add_", True)]
    assert set(wanted) <= set(watch.seen)  # forward and backward
