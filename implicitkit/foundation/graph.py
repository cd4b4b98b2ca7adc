"""The nodes of a graph of autograd, one by one: what they are, and what they give for a cotangent.

The private names of torch for them, as in :mod:`~implicitkit.foundation.compat`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.vmap import lazy_load_decompositions
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from implicitkit.foundation import compat

__all__ = [
    "Edge",
    "age",
    "between_passes",
    "called",
    "checkpoint_of",
    "dims_of",
    "dtype_at",
    "each",
    "is_freed",
    "is_leaf",
    "is_pointwise",
    "mapped",
    "nodes_behind",
    "operation_of",
    "pulled",
    "pulled_at_a_level",
    "pulled_from",
    "refuse_wrong_rules",
    "saved",
    "shape_at",
]

T = TypeVar("T")
# without what torch's own caller does besides: it looks for a logger's level, and hands a context to threads of devices
_run: Any = torch.autograd.Variable._execution_engine.run_backward
_AS_GRAD = {"allow_unreachable": True, "accumulate_grad": False}
_functorch: Any = torch._C._functorch
_MAPPED_WRONGLY = ("Cdist", "AsStridedScatter")  # of torch 2.13, of all that its table of operations samples
Edge: TypeAlias = tuple[Any, int]
"""A node, and which of its results: a tensor, as a graph knows it."""
Asked: TypeAlias = frozenset[tuple[Any, tuple[int, ...]]]  # Functions, and those of their inputs that a point leads to
Judge: TypeAlias = Callable[[int, Asked], str]  # why derivatives in a point have none


def is_freed() -> bool:
    """Asked within a backward: does it free what its graph has saved (no ``retain_graph=True``)?"""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def operation_of(node: Any) -> str:
    """The name of the operation that ``node`` is the derivative of, ``"addmm"``; of what torch does not derive itself (a
    leaf, an ``autograd.Function``) an empty one."""
    return _operation_of(type(node).__name__)


@functools.lru_cache(maxsize=1024)
def _operation_of(name: str) -> str:
    found = re.fullmatch(r"(\w+)Backward\d+", name)
    return "" if found is None else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found.group(1)).lower()


@functools.lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Has the operation of this name results of which each entry depends on one entry of each argument, by torch's tags?"""
    packet = getattr(torch.ops.aten, name, None) if name else None
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def age(node: Any) -> int:
    """A number, higher for those that were recorded later; of leaves the highest there is."""
    return int(node._sequence_nr())


def shape_at(edge: Edge) -> tuple[int, ...]:
    """The shape of the tensor there, and so of its cotangents."""
    return tuple(edge[0]._input_metadata[edge[1]].shape)


def dtype_at(edge: Edge) -> torch.dtype:
    """The dtype of the tensor there, and so of its cotangents."""
    found: torch.dtype = edge[0]._input_metadata[edge[1]].dtype
    return found


def is_leaf(node: Any, point: Tensor) -> bool:
    """Does the graph end here, at ``point``?"""
    return getattr(node, "variable", None) is point


def called(node: Any, given: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """What ``node`` makes of cotangents of its results, by their numbers: one for each argument of its operation, as large
    as that would be were it not expanded."""
    found = node(*(given.get(k) for k in range(len(node._input_metadata))))
    return found if isinstance(found, tuple) else (found,)


@functools.lru_cache(maxsize=1024)
def _is_mapped_wrongly(name: str) -> bool:
    return name.startswith(_MAPPED_WRONGLY)


def nodes_behind(roots: Iterable[Any]) -> list[Any]:
    """These nodes of a graph, but for ``None``, and every one that they lead to, each once."""
    seen = dict.fromkeys(roots)
    seen.pop(None, None)
    open_ = list(seen)
    while open_:
        for after, _ in open_.pop().next_functions:
            if after is not None and after not in seen:
                seen[after] = None
                open_.append(after)
    return list(seen)


def refuse_wrong_rules(nodes: Iterable[Any]) -> None:
    """Raise if torch maps the derivative of an operation behind these nodes wrongly: ``torch.func.vmap`` over cotangents
    gives other numbers than one by one, without a word.

    Raises:
        RuntimeError: it does, as where an operation has no batching rule.
    """
    for node in nodes_behind(nodes):
        if _is_mapped_wrongly(type(node).__name__):
            raise RuntimeError(f"{type(node).__name__} has no batching rule that is right")


def each(product: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
    """``product`` of each of the vectors, side by side, or one by one where an operation has no batching rule, or a wrong
    one."""
    try:
        return mapped(product, vectors)
    except RuntimeError:
        return torch.stack([product(v) for v in vectors])


def mapped(product: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
    """``torch.func.vmap(product)(vectors)``, which looks for trees of tensors all around, and takes a few times as long as a
    small product."""
    _load_rules()
    level = _functorch._vmap_increment_nesting(len(vectors), "error")
    try:
        out = product(_functorch._add_batch_dim(vectors, 0, level))
        found: Tensor = _functorch._remove_batch_dim(out, level, len(vectors), 0)
        return found
    finally:
        _functorch._vmap_decrement_nesting()


_load_rules = functools.cache(lazy_load_decompositions)


def pulled(
    out: Tensor | Sequence[Tensor],
    points: Sequence[Tensor],
    cotangent: Tensor | Sequence[Tensor],
    *,
    retain_graph: bool = True,
    create_graph: bool = False,
    judge: Judge | None = None,
) -> Sequence[Tensor | None]:
    """``sum_k (d out_k / d point)^T cotangent_k`` for every point; ``None`` for one that the graph does not lead to.
    ``judge``: of the user's own Functions.

    As ``torch.autograd.grad(out, points, cotangent, retain_graph=..., create_graph=..., allow_unused=True)``.  Where outputs
    and cotangents are plain tensors of the same shapes nothing is left to check of the arguments, which takes torch a
    quarter of a small product, and of the first in a process the 0.4 s that importing SymPy takes.
    """
    points = tuple(points)
    found: Sequence[Tensor | None]
    if (
        isinstance(out, Tensor)
        and isinstance(cotangent, Tensor)
        and not create_graph
        and _plain(out, points, cotangent)
    ):
        found = _run((out,), (cotangent,), retain_graph, False, points, **_AS_GRAD)
        return found
    outs, ws = ((out,), (cotangent,)) if isinstance(out, Tensor) else (tuple(out), tuple(cotangent))
    if any(map(compat.is_wrapped, ws)):
        refuse_wrong_rules(o.grad_fn for o in outs if o.grad_fn is not None)
    whole = True
    for o, w in zip(outs, ws, strict=True):
        whole = whole and o.shape == w.shape and o.dtype == w.dtype and not compat.is_legacy_batched(w)
    if not whole or torch.overrides.has_torch_function((*outs, *points, *ws)):
        found = torch.autograd.grad(
            outs, points, ws, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
    else:
        found = _engine_run_backward(
            outs, ws, retain_graph, create_graph, points, allow_unreachable=True, accumulate_grad=False
        )
    own = _own_functions(outs, points, judge) if create_graph else []
    return _refusing(found, own, points, ws) if own else found


def _plain(out: Tensor, points: tuple[Tensor, ...], w: Tensor) -> bool:
    """Is ``w`` a cotangent of ``out``, on the CPU, of the same shape and precision, and is no transform, subclass or mode
    about?"""
    if not out.is_cpu or out.shape != w.shape or out.dtype != w.dtype or compat.is_wrapped(w):
        return False
    return not (compat.is_legacy_batched(w) or torch.overrides.has_torch_function((out, *points, w)))


def pulled_at_a_level(
    function: Callable[..., Tensor], *points: Tensor, judge: Judge | None = None
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """``torch.func.vjp(function, *points)``, whose products refuse a derivative where there is none to be had, as those of
    :func:`pulled` do."""
    own: list[Own] = []

    def looked_at(*given: Tensor) -> Tensor:
        out = function(*given)
        own.extend(_own_functions((out,), given, judge))
        return out

    out, pullback = torch.func.vjp(looked_at, *points)[:2]
    if not own:
        return out, pullback
    return out, lambda w: cast("tuple[Tensor, ...]", tuple(_refusing(pullback(w), own, points, (w,))))


_ONCE = once_differentiable(lambda ctx: None).__code__  # that of every function that it returns
_MARKED = "trying to differentiate twice a function that was marked with @once_differentiable: {}"
_CONSTANT = "differentiating a backward that autograd does not see (torch.no_grad(), NumPy), trying to: that of {}"


class Own(NamedTuple):
    """The user's own Functions (``autograd.Function``) between a point and results: their names, what is said where a
    derivative in the point has no derivative there, and whether it has none in the cotangents either."""

    names: str = ""
    said: str = ""
    whole: bool = False


def _own_functions(outs: Sequence[Tensor], points: Sequence[Tensor], judge: Judge | None) -> list[Own]:
    """For each point the Functions before it; an empty list where there are none at all."""
    nodes = nodes_behind(o.grad_fn for o in outs)
    own = {n: _written(n._forward_cls) for n in nodes if hasattr(n, "_forward_cls")}
    own = {n: f for n, f in own.items() if f.__module__.partition(".")[0] not in ("implicitkit", "torch")}
    if not own:
        return []
    before: dict[Any, list[Any]] = {}  # the nodes that lead straight to one
    for node in nodes:
        for after, _ in node.next_functions:
            before.setdefault(after, []).append(node)
    return [_said(i, _between(own, get_gradient_edge(p).node, before), judge) for i, p in enumerate(points)]


def _between(own: dict[Any, Any], end: Any, before: dict[Any, list[Any]]) -> Asked:
    """Functions that lead to a node, each with the inputs that do."""
    leading, open_ = {end}, [end]
    while open_:
        new = [node for node in before.get(open_.pop(), ()) if node not in leading]
        leading.update(new)
        open_.extend(new)
    found = ((f, tuple(k for k, (after, _) in enumerate(n.next_functions) if after in leading)) for n, f in own.items())
    return frozenset((f, inputs) for f, inputs in found if inputs)


def _said(i: int, asked: Asked, judge: Judge | None) -> Own:
    functions = {f for f, _ in asked}
    marked = [f.__name__ for f in functions if getattr(f.backward, "__code__", None) is _ONCE]
    if marked:
        return Own(marked[0], _MARKED.format(marked[0]), True)
    said = judge(i, asked) if asked and judge is not None else ""
    return Own(", ".join(sorted(f.__name__ for f in functions)), said)


def _written(function: Any) -> Any:
    """The ``autograd.Function`` that the user has written: at the level of a transform, and mapped by ``vmap``, torch calls
    it from others that it makes, ``autograd_function`` there."""
    while "autograd_function" in (names := getattr(getattr(function.backward, "__code__", None), "co_freevars", ())):
        function = function.backward.__closure__[names.index("autograd_function")].cell_contents
    return function


def _refusing(
    found: Sequence[Tensor | None], own: Sequence[Own], points: Sequence[Tensor], ws: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Products as they are, or, where something is said of their derivative, with a gate to what they depend on."""

    moving = any(compat.tracked(w, batched=False) for w in ws)  # and products are linear in these

    def guarded(g: Tensor | None, own: Own) -> Tensor | None:
        if g is None or not own.names:
            return g
        lost = moving and not compat.tracked(g, batched=False) and bool(compat.batches_in_front(g != 0)[0].any())
        said = own.said or (_CONSTANT.format(own.names) if lost else "")
        if not said:
            return g
        of = (*points, *ws) if own.whole or lost else points
        return (g.detach() if own.whole else g) + _Gate.apply(said, *of).to(g.dtype)

    return [guarded(g, o) for g, o in zip(found, own, strict=True)]


class _Gate(compat.Function):
    """Zero, through which no derivative goes to what it depends on; a pass that asks for none does not come here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(said: str, *of: Tensor) -> Tensor:
        return of[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.said = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ctx.said)

    jvp = backward


def pulled_from(edges: Sequence[Edge], point: Tensor, cotangents: Sequence[Tensor]) -> Tensor:
    """``sum_k (d edge_k / d point)^T cotangent_k``; the graph is kept."""
    if any(map(compat.is_wrapped, cotangents)):
        refuse_wrong_rules(node for node, _ in edges)
    found: Sequence[Tensor | None] = _engine_run_backward(
        tuple(GradientEdge(*edge) for edge in edges),
        tuple(cotangents),
        True,
        False,
        (point,),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return torch.zeros_like(point) if found[0] is None else found[0]


def saved(node: Any, name: str) -> Any:
    """A tensor, or a number, that the operation of ``node`` has saved under the name of its argument.

    Raises:
        RuntimeError: the graph has been freed, or the tensor changed since.
    """
    return getattr(node, f"_saved_{name}")


def between_passes(run: Callable[[], T]) -> T:
    """``run()``, in which nodes may be called that are none of the backward pass around it, if there is one: a node that is
    called asks the innermost pass what is wanted of it, and one that asks for some gradients only wants nothing of others.
    """
    if torch._C._current_graph_task_id() == -1:
        return run()
    found: list[T] = []
    with torch.enable_grad():
        start = torch.zeros((), device="cpu", requires_grad=True)
        end = start.view(())
    end.register_hook(lambda _: found.append(run()))
    end.backward()  # of everything, and so everything is wanted
    return found[0]


def leads_to(point: Tensor) -> bool:
    """Does the backward pass that is running ask for the derivative by what has made a tensor?  One by a cotangent does
    not."""
    node = point.grad_fn
    return node is None or torch._C._will_engine_execute_node(node)


def checkpoint_of() -> Any:
    """What ``torch.utils.checkpoint`` (the one without passes inside passes) keeps of the innermost region that an operation
    is in now, to compute it once more in the backward: its ``recompute_fn``; ``None`` outside, and while it does so."""
    if torch.compiler.is_compiling():  # the compiler's own: it does not trace what comes
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    code = None if hooks is None else getattr(hooks[0], "__code__", None)
    if hooks is None or code is None or "frame" not in code.co_freevars:
        return None
    cells: Any = hooks[0].__closure__
    frame = cells[code.co_freevars.index("frame")].cell_contents
    return frame if hasattr(frame, "recompute_fn") else None


def dims_of(node: Any, ndim: int) -> list[int]:
    """The dimensions of a tensor of ``ndim`` of them that a reduction has gone over; all, where it names none."""
    dims = getattr(node, "_saved_dim", None)
    dims = range(ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    return [(d - 2**64 if d >= 2**63 else d) % ndim for d in dims]  # negative ones come as unsigned
