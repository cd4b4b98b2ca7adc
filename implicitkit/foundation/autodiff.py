"""Products with Jacobians that work at every level: plain autograd, ``torch.func`` transforms, forward AD, hooks.

``torch.func.vjp`` alone does not do: it refuses to run under saved-tensor hooks (activation checkpointing), and legacy
``autograd.Function``s, custom operators and in-place BatchNorm fail inside it.  ``torch.autograd.grad`` alone does not
work inside transforms.  So: the first when a transform is active, the second when none is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from implicitkit.foundation import compat, graph, seeded, tracers
from implicitkit.foundation.errors import CapturedTensorError, ChangedFunctionError, ConvergenceError
from implicitkit.foundation.faithful import transposed, unfused
from implicitkit.foundation.graph_size import Matrices, has_own_matrices, nodes_of, read_by_products, size_of_graph
from implicitkit.foundation.operators import Operator, seem_alike
from implicitkit.foundation.own_functions import Judge
from implicitkit.foundation.structured import WORTH, rows_by_structure, side_by_side
from implicitkit.foundation.wording import COMPILED_ONCE, NOT_DIFFERENTIABLE

__all__ = [
    "gradient",
    "jacobian",
    "jacobian_of",
    "jvp",
    "lacks_second_derivative",
    "linearise",
    "matrix",
    "one_for_all",
    "products",
    "recorded",
    "refuse_hidden",
    "vjp",
]

T = TypeVar("T")
_FEW_NUMBERS = 1 << 16  # that go through a graph for all rows of a Jacobian: calls are what it costs
_HELD = 1 << 24  # numbers held at once while a dense Jacobian is formed, beside its own
_ALIKE = 64.0  # units of rounding that products with matrices which are the same may differ by
_SAME = 1e-2  # of the largest number: what the same function, made of other operations, may differ by
_UNKNOWN = 50  # nodes that one counts as whose work is not known: somebody's own, factors of matrices, convolutions


def vjp(
    function: Callable[..., Tensor], *primals: Tensor, beside: Sequence[Tensor] = ()
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """``function(*beside, *primals)`` and the map ``w -> (df/dp_i)^T w`` for every primal.

    As in ``torch.func.vjp``; differentiable again in ``w``, in the primals and in what is beside them.
    """
    of = functools.partial(function, *beside)
    # a view of each: it is a node of its own, and strips the wrapper of a transform that has ended (torch strips one
    # wrapper only, so that a second one around it is an internal error where the derivative is zero)
    if compat.transforms_active():
        with compat.own_graphs(), unfused():
            points = [p.view_as(p) for p in primals]
            return graph.pulled_at_a_level(of, *points, judge=Judge(function, points, beside))
    attention = unfused() if torch.is_grad_enabled() else contextlib.nullcontext()
    with torch.enable_grad(), compat.own_graphs(), attention:
        points = [p.view_as(p) for p in primals]
        points = [p if p.requires_grad else p.requires_grad_() for p in points]  # detach would drop a tangent
        out = of(*points)

    def pullback(w: Tensor) -> tuple[Tensor, ...]:
        if not out.requires_grad:
            return tuple(torch.zeros_like(p) for p in points)
        with compat.own_graphs():
            judge = Judge(function, points, beside) if torch.is_grad_enabled() else None
            grads = graph.pulled(out, points, w, create_graph=judge is not None, judge=judge)
        return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(grads, points, strict=True))

    return out, pullback


def jvp(function: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    """``sum_i (df/dp_i) t_i`` by two reverse passes: ``w -> J^T w`` is linear, and its transpose is ``J``.  That is taken at
    ones: linear in ``w`` or not, what torch computes it by may not like zeros (a logarithm of cotangents).

    Needs no forward-mode level, and so nests under ``forward_ad.dual_level`` and ``torch.func.jvp``, where
    ``torch.func.jvp`` itself refuses ("Nested forward mode AD is not supported").
    """
    with transposed():
        out, pullback = vjp(function, *primals)
    with torch.enable_grad():
        w = torch.ones_like(out)
        if compat.transforms_active():
            with compat.own_graphs():
                return torch.func.vjp(pullback, w)[1](tuple(tangents))[0]
        w.requires_grad_()
        rows = pullback(w)
    pairs = [(r, t) for r, t in zip(rows, tangents, strict=True) if r.requires_grad]
    if not pairs:
        return torch.zeros_like(out)
    with compat.own_graphs():
        rows, given = zip(*pairs, strict=True)
        (result,) = graph.pulled(rows, (w,), given, create_graph=torch.is_grad_enabled())
    return torch.zeros_like(out) if result is None else result


def gradient(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``(batch,)`` of a scalar function of each row of ``z``, and its gradient ``(batch, n)``."""
    values, pullback = vjp(function, z)
    if not values.requires_grad and not compat.transforms_active():
        refuse_hidden(function, z, values)
    return values, pullback(torch.ones_like(values))[0]


def refuse_hidden(objective: Callable[[Tensor], Tensor], z: Tensor, values: Tensor) -> None:
    """Raise ``RuntimeError`` where autograd sees no ``z`` in the values ``(batch,)`` of an objective, and yet they change.

    To be asked where the gradient at ``z`` is exactly zero, or not there.  It must be so at another point, where values are
    others, and on the way there, ever nearer to ``z``: a well may be narrow, and lie in a plain.
    """
    for k in range(18):
        other, pullback = vjp(objective, z.detach() + torch.where(z != 0, 0.25 * z.detach(), 0.25) / 8**k)
        changed = bool(((other != values) & torch.isfinite(other)).any()) or k > 0
        if not changed or bool(pullback(torch.ones_like(other))[0].any()):
            return
    raise RuntimeError(
        "the objective changes with z, but autograd sees no z in it, so that its gradient would be zero everywhere. Does "
        "the function use z.detach(), z.data, z.item(), torch.tensor(z), torch.no_grad(), or steps (round, sign)?"
    )


def lacks_second_derivative(error: RuntimeError) -> bool:
    """Does an error raised by a Hessian mean that the function cannot be differentiated twice?

    torch says so in many words ("derivative for aten::op is not implemented", "differentiate twice a function that was
    marked with @once_differentiable", "does not support double backward"), and so may a Function of the user's; one that
    has no backward, or a backward in NumPy, has no derivative either.  A solve inside that failed, memory that is used up,
    or an error in the user's own code mean something else.
    """
    if isinstance(error, (ConvergenceError, CapturedTensorError, ChangedFunctionError, torch.OutOfMemoryError)):
        return False
    return any(words in str(error) for words in NOT_DIFFERENTIABLE)


def linearise(
    function: Callable[[Tensor], Tensor],
    z: Tensor,
    *,
    symmetric: bool = False,
    fixed_point: bool = False,
    of_map: bool = False,
    sparse: Callable[[Operator], Any] | None = None,
    made: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Operator]:
    """The value at ``z`` and the Jacobian ``A = df/dz`` there, from **one** evaluation whose graph all products share.

    Args:
        function: ``(batch, n) -> (batch, n)``, row by row. z: plain tensor ``(batch, n)``.
        symmetric: ``A = A^T`` (then ``A v`` costs one reverse pass, not two). fixed_point: ``A = J - I``.
        of_map: ``function`` is the map of a fixed point, and ``f(z) = function(z) - z``: products are made of those with its
            Jacobian ``J``, which the series asks for (:meth:`Operator.stepped`), and take one subtraction more.
        sparse: how the operator becomes sparse (see :class:`Operator`).
        made: that evaluation, where there has been one: :func:`recorded`.

    Returns:
        ``f(z)``, attached to the graph of this one evaluation, and the :class:`Operator`.
    """
    moved, point = recorded(function, z) if made is None else made
    out = moved
    if of_map:
        with torch.enable_grad():
            out = moved - point
    if not out.requires_grad:  # f does not depend on z
        zero = torch.zeros_like(z)
        return out, Operator(
            lambda v: zero,
            lambda w: zero,
            lambda: z.new_zeros(*z.shape, z.shape[1]),
            batch=z.shape[0],
            size=z.shape[1],
            like=z,
            symmetric=symmetric,
            fixed_point=fixed_point,
        )
    again = functools.partial(recorded, function, z, twice=True)
    nodes = _once(lambda: nodes_of(out))
    step = products(moved, point, again, nodes) if of_map else None
    mv, rmv = products(out, point, again, nodes) if step is None else map(_less, step)

    def dense() -> Tensor:
        found = one_for_all(rmv, z.shape[1], z)
        found = _by_structure(out, point, read) if found is None else found
        return matrix(rmv, z.shape[1], z) if found is None else found

    read = _once(lambda: read_by_products(nodes()))
    A = Operator(
        rmv if symmetric else mv,
        rmv,
        dense,
        batch=z.shape[0],
        size=z.shape[1],
        like=z,
        symmetric=symmetric,
        fixed_point=fixed_point,
        sparse=sparse,
    )
    A.step = step and ((step[1], step[1]) if symmetric else step)
    A.nodes = nodes
    A.graph = gone_through = _once(lambda: size_of_graph(nodes(), _UNKNOWN))
    A.read = read
    A.own = _once(lambda: has_own_matrices(nodes(), z))
    price = getattr(sparse, "price", None)
    if price is not None:
        A.price = lambda alike=None: price(alike, gone_through)
    return out, A


def _once(ask: Callable[[], T]) -> Callable[[], T]:
    """``ask``, which is asked once: to make a ``functools.cache`` takes longer than to ask of most graphs."""
    known: list[T] = []

    def answer() -> T:
        if not known:
            known.append(ask())
        return known[0]

    return answer


def _less(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``v -> J v - v``."""
    return lambda v: product(v) - v


def products(
    out: Tensor,
    point: Tensor,
    again: Callable[[], tuple[Tensor, Tensor]] | None = None,
    nodes: Callable[[], Sequence[Any]] | None = None,
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """``v -> J v`` and ``w -> J^T w``, ``J = d out / d point``, on the graph that leads from ``point`` to ``out``; where
    this cannot be differentiated twice, the first on that which ``again()`` makes, or else by the rows of ``J``.
    ``nodes()``: those of this graph, and perhaps of what follows, where they are known.

    Raises:
        RuntimeError: the graph goes through the derivative of a compiled function.
    """
    if tracers.lost_second_derivative(nodes or (lambda: nodes_of(out))):
        raise RuntimeError(COMPILED_ONCE)
    if not out.requires_grad:
        return lambda v: torch.zeros_like(out), lambda w: torch.zeros_like(point)
    made = _Products(out, point, again)
    return made.mv, made.rmv


class _Products:
    """Products of :func:`products`; ``transposed``: ``w`` and ``J^T w``. rows: of ``J``, where there is no other way."""

    def __init__(self, out: Tensor, point: Tensor, again: Callable[[], tuple[Tensor, Tensor]] | None) -> None:
        self.out, self.point, self.again = out, point, again
        self.transposed: tuple[Tensor, Tensor] | None = None
        self.rows: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> _Products:
        return self  # as functions are: a graph cannot be copied, and what is made of it is remembered for all

    def rmv(self, w: Tensor) -> Tensor:
        return _grad(self.out, self.point, w)

    def mv(self, v: Tensor) -> Tensor:
        if self.rows is not None:
            return (self.rows @ v.unsqueeze(-1)).squeeze(-1)
        try:
            return self._through(v, self.out, self.point)
        except RuntimeError as error:
            return self._otherwise(v, error)

    def _through(self, v: Tensor, out: Tensor, point: Tensor) -> Tensor:
        if self.transposed is None:  # the double-backward trick: w -> J^T w is linear, its transpose is J
            with torch.enable_grad(), compat.own_graphs():
                w = torch.ones_like(out, requires_grad=True)
                (g,) = graph.pulled(out, (point,), w, create_graph=True)
            self.transposed = w, torch.zeros_like(point) if g is None else g
        w, g = self.transposed
        return _grad(g, w, v) if g.requires_grad else torch.zeros_like(out)

    def _otherwise(self, v: Tensor, error: RuntimeError) -> Tensor:
        out, point = self.out, self.point
        if not lacks_second_derivative(error):
            raise error
        self.transposed = None
        if self.again is not None:
            other, at = self.again()
            apart, most = (other - out).detach(), torch.maximum(out.detach().abs().max(), point.detach().abs().max())
            if float(apart.abs().max()) <= _SAME * float(most):  # it draws no other random numbers
                try:
                    return self._through(v, other, at)
                except RuntimeError as another:
                    error = another
        if not lacks_second_derivative(error) or out.shape[1] * point.numel() > _HELD:
            raise error
        self.rows = matrix(self.rmv, out.shape[1], point.detach())
        return self.mv(v)


def recorded(function: Callable[[Tensor], Tensor], z: Tensor, twice: bool = False) -> tuple[Tensor, Tensor]:
    """``function(point)`` with its graph, and the ``point``, equal to ``z``, that this leads to; ``twice``: one that can be
    differentiated so."""
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        if not twice:
            return function(point), point
        with transposed():
            return function(point), point


def jacobian(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The Jacobian of ``function: (batch, n) -> (batch, m)``, row by row, at ``z``: ``(batch, m, n)``.

    By rows (``m`` reverse passes) or, where that is more than twice as many and the numbers are not few, by columns (``n``
    of the double-backward kind, which takes a graph more), from one evaluation.
    """
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        return jacobian_of(function(point), point)


def jacobian_of(out: Tensor, point: Tensor) -> Tensor:
    """The Jacobian ``(batch, m, n)`` of ``out`` ``(batch, m)`` by ``point`` ``(batch, n)``, by going through the graph of
    ``out``, which is kept."""
    nodes = _once(lambda: nodes_of(out))
    if tracers.lost_second_derivative(nodes):
        raise RuntimeError(COMPILED_ONCE)
    (batch, n), m = point.shape, out.shape[1]
    z = point.detach()
    if not out.requires_grad:
        return z.new_zeros(batch, m, n)
    few = m * m * batch <= _FEW_NUMBERS and m * size_of_graph(nodes())[1] <= _FEW_NUMBERS
    if few or m <= 2 * n:
        found = _by_structure(out, point, lambda: read_by_products(nodes()))
        return matrix(lambda e: _grad(out, point, e), m, z) if found is None else found
    with torch.enable_grad():
        w = torch.ones_like(out, requires_grad=True)
        (g,) = graph.pulled(out, (point,), w, create_graph=True)
    if g is None or not g.requires_grad:
        return z.new_zeros(batch, m, n)
    return matrix(lambda e: _grad(g, w, e), n, z).mT


def _by_structure(out: Tensor, point: Tensor, read: Callable[[], Matrices]) -> Tensor | None:
    """What :func:`matrix` gives, with fewer products; ``None`` where that does not go, or they are cheap.  ``read``: what
    one of them multiplies by."""
    rows = out.shape[1]
    if rows < 2:
        return None
    worth = point.numel() * rows**2 >= WORTH or rows * read().read >= 2 * WORTH
    return rows_by_structure(out, point, _HELD) if worth else None


def _grad(out: Tensor, point: Tensor, cotangent: Tensor) -> Tensor:
    (g,) = graph.pulled(out, (point,), cotangent)
    return torch.zeros_like(point) if g is None else g


def matrix(product: Callable[[Tensor], Tensor], rows: int, like: Tensor) -> Tensor:
    """``product(e_i)``, each ``(batch, k)``, for all unit vectors ``e_i`` of length ``rows``: ``(batch, rows, k)``."""
    batch, n = like.shape
    if rows == 1:
        return product(like.new_ones(batch, 1)).unsqueeze(1)
    eye = torch.eye(rows, dtype=like.dtype, device=like.device).unsqueeze(1)
    if rows > 4:
        some = side_by_side(like, batch * max(rows, n))
        parts = [graph.each(product, e.expand(-1, batch, -1)) for e in eye.split(some)]
        return torch.cat(parts).transpose(0, 1)
    return torch.stack([product(e.expand(batch, -1)) for e in eye], 1)


def one_for_all(product: Callable[[Tensor], Tensor], rows: int, like: Tensor) -> Tensor | None:
    """What :func:`matrix` gives, where the matrices of all samples are the same (a linear equation for many right-hand
    sides): one of them, expanded.  ``None`` where they are not, or there are few.

    They are if a random vector has the same product with each, to what rounding leaves of ``|v| |A|``.  To show the matrix,
    each sample is given another unit vector, ``rows / batch`` times.  That vector gives each row the size one, so that a
    large row does not hide how samples differ in a small one.
    """
    if not seem_alike(product, rows, like):
        return None
    batch, n = like.shape
    count = -(-rows // batch)
    eye = torch.eye(count * batch, rows, dtype=like.dtype, device=like.device).view(count, batch, rows)
    some = side_by_side(like, batch * max(rows, n))
    parts = [graph.each(product, e) for e in eye.split(some)]
    found = torch.cat(parts).flatten(0, 1)[:rows]
    size = found.abs().amax(1)
    v = seeded.normal(1, rows, seed=0xA11CE).to(like) / torch.where(size > 0, size, 1)
    shown = product(v.expand(batch, -1))
    rounding = _ALIKE * torch.finfo(like.dtype).eps * (v.abs() @ found.abs())
    return found.expand(batch, -1, -1) if bool(((shown - v @ found).abs() <= rounding).all()) else None
