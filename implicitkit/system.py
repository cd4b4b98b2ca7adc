"""One solve as a system of equations on matrices: ``F(z, *theta)`` with ``z`` of shape ``(batch, n)``.

This is what the primitive and the drivers see: no pytrees, no modules, no closures.  ``torch.vmap`` over a solve gives
the same kind of object with more samples (:meth:`System.batched`), and dropping converged samples one with fewer
(:meth:`System.select`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.autocast import cast_as_now, casts, precision, under
from implicitkit.foundation.failing_matrices import despite, failing_as_nan
from implicitkit.foundation.faithful import faithful, mapped
from implicitkit.foundation.numbers import real_parts
from implicitkit.foundation.trees import Layout, hint_of_no_tensor, hint_of_pair, tree_flatten
from implicitkit.foundation.wording import check_returned, kind_of, of_the_objective
from implicitkit.lifting.fewer_rows import Larger, watched
from implicitkit.lifting.lifted import Lifted, lift
from implicitkit.lifting.reach import captured_rows
from implicitkit.sparsity.identity import identity_of, settings_of, size_of
from implicitkit.sparsity.patterns import Sparsity

Kernel = Callable[..., Tensor]
LevelKernel = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
"""``(matrices of states, theta) -> tensors``, each result with the batch in front."""


class Equations(Protocol):
    """What a system asks of the problem behind it (see :class:`implicitkit.Problem`)."""

    @property
    def kind(self) -> Any:
        """Its :class:`~implicitkit.extend.Kind`."""

    def unpack(self, layout: Layout, matrix: Tensor) -> Any:
        """What the user's function is given for a matrix."""

    def flat_residual(self, kernel: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """``F`` on the packed state."""

    def drops_rows(self) -> bool:
        """May converged samples be dropped?"""

    def pattern_of(self, what: str) -> Any:
        """What the user says of the sparsity of a Jacobian."""


def explicit(function: Callable[..., Any], z: Any, *args: Any) -> Lifted:
    """``function(z, *args)`` as a function of ``z`` and of all tensors that it uses, ``lifted(z, lifted.theta)``."""
    return lift(function, z, args, lambda out: None)


class System:
    """A block-diagonal system: independent samples, ``samples_per_row`` of them for each row of the leading dimension.

    Attributes:
        problem, layout: what holds, and how the user's state is packed.
        kernel: the user's function on matrices, ``(z, *theta) -> Tensor``, pure in its arguments.
        live: the same, valid (and cheaper) during the call of ``solve`` only.
        batch, samples_per_row: samples in all, and in one row.
        row_dims: for each tensor of theta the dimension its rows lie along, ``None`` if shared; ``None`` altogether
            when it is not known, so that converged samples cannot be dropped.
        parent, dims: the system this one is a batch of (``torch.vmap``), and the batched dimension of each tensor.
        autocast: the context in which the user's function is called.
        factored: the last ``dF/dz`` of all samples that somebody factored, with ``solve(b)`` and ``T``; else ``None``.
        rows_named: names of captured tensors with as many rows as the whole batch; ``None``: not asked yet.
    """

    def __init__(
        self,
        problem: Equations,
        layout: Layout,
        kernel: Kernel,
        live: Kernel,
        *,
        batch: int,
        samples_per_row: int,
        row_dims: tuple[int | None, ...] | None,
        lifted: Lifted,
        parent: System | None = None,
        dims: tuple[int | None, ...] = (),
        autocast: Callable[[], Any] = contextlib.nullcontext,
        origin: System | None = None,
    ) -> None:
        self.problem: Any = problem
        self.layout, self.kernel, self.live = layout, kernel, live
        self.batch, self.samples_per_row, self.row_dims = batch, samples_per_row, row_dims
        self.lifted, self.parent, self.dims, self.autocast = lifted, parent, dims, autocast
        self.size = layout.size
        self._origin: System | None = origin
        self.factored: Any = None
        self.rows_named: list[str] | None = None
        self._sparsity: dict[str, Sparsity] = {}

    @property
    def eps(self) -> float:
        """The rounding unit of the precision in which the function computes, under autocast too."""
        return torch.finfo(precision(self.layout.dtype, self.autocast)).eps

    @property
    def origin(self) -> System:
        """The system that this one is a batch or a part of, in the end; itself, if of none (no attribute: a circle)."""
        return self if self._origin is None else self._origin

    @staticmethod
    def of(problem: Equations, layout: Layout, lifted: Lifted, in_dims: Any, args: tuple[Any, ...]) -> System:
        """The system of a lifted function."""
        autocast = cast_as_now(layout.device.type)
        pack = _packer(problem, layout)

        def evaluated(function: Callable[[Any, Any], Any], z: Tensor, theta: Any) -> Tensor:
            if lifted.compiled or (lifted.as_torch and not compat.has_forward_level()):
                return despite_failures(function, z, theta)
            with faithful(as_torch=lifted.as_torch):
                return despite_failures(function, z, theta)

        def despite_failures(function: Callable[[Any, Any], Any], z: Tensor, theta: Any) -> Tensor:
            """With NaN for samples of which a matrix has no factors; of one sample alone the error is its own."""
            if lifted.failed:
                with failing_as_nan():
                    return pack(function(problem.unpack(layout, z), theta), z)
            try:  # a function may take its containers to pieces: they are made anew for each call
                return pack(function(problem.unpack(layout, z), theta), z)
            except RuntimeError as error:
                again = lambda: function(problem.unpack(layout, z), theta)  # noqa: E731
                found, lifted.failed = despite(error, again, layout.batch)
                return pack(found, z)

        def kernel(z: Tensor, *theta: Tensor) -> Tensor:
            out = evaluated(lifted, z, theta)
            lifted.cut = lifted.cut or not compat.physical(out).requires_grad
            return out

        def live(z: Tensor, *theta: Tensor) -> Tensor:
            return evaluated(lifted.on_the_spot, z, theta)

        return System(
            problem,
            layout,
            under(autocast, kernel),
            under(autocast, live),
            batch=layout.batch,
            samples_per_row=layout.samples_per_row,
            row_dims=_row_dims(in_dims, args, layout, len(lifted.theta)) if problem.drops_rows() else None,
            lifted=lifted,
            autocast=autocast,
        )

    @staticmethod
    def at(problem: Any, layout: Layout, z: Any, args: tuple[Any, ...], in_dims: Any = None) -> System:
        """The system of a problem whose function is evaluated at the state ``z``; ``lifted.theta`` are its tensors."""
        lifted = lift(problem.function, z, args, check_output(problem, layout))
        return System.of(problem, layout, lifted, in_dims, args)

    def residual(self, z: Tensor, *theta: Tensor) -> Tensor:
        """``F(z, *theta)``, pure in its arguments and differentiable at any level."""
        return self.problem.flat_residual(lambda y: self.kernel(y, *theta), z)

    def batched(self, dims: Sequence[int | None], batch: int) -> System:
        """This system ``batch`` times over: ``theta[i]`` has one dimension more, ``dims[i]``, or is shared (``None``)."""
        dims = tuple(dims)

        def over(kernel: Kernel) -> Kernel:
            def one(z: Tensor, *theta: Tensor) -> Tensor:
                with mapped():
                    return kernel(z, *theta)

            over_all = torch.func.vmap(one, in_dims=(0, *dims), randomness="same")

            def batched_kernel(z: Tensor, *theta: Tensor) -> Tensor:
                return over_all(z.reshape(-1, self.batch, z.shape[1]), *theta).flatten(0, 1)

            return batched_kernel

        return System(
            self.problem,
            self.layout,
            over(self.kernel),
            over(self.live),
            batch=batch * self.batch,
            samples_per_row=self.batch,
            row_dims=dims,
            lifted=self.lifted,
            parent=self,
            dims=dims,
            autocast=self.autocast,
            origin=self.origin,
        )

    @property
    def can_select(self) -> bool:
        """May rows be dropped?"""
        return self.row_dims is not None and self.batch > self.samples_per_row

    def select(self, rows: Tensor, theta: Sequence[Tensor]) -> tuple[System, tuple[Tensor, ...]]:
        """The system of these rows only, and its tensors."""
        assert self.row_dims is not None
        chosen = tuple(t if d is None else t.index_select(d, rows) for t, d in zip(theta, self.row_dims, strict=True))
        small = System(
            self.problem,
            self.layout,
            self.kernel,
            self.live if self.parent is not None or not self.origin.layout.batch_shape else self._of_fewer(theta, rows),
            batch=len(rows) * self.samples_per_row,
            samples_per_row=self.samples_per_row,
            row_dims=self.row_dims,
            lifted=self.lifted,
            parent=self.parent,
            dims=self.dims,
            autocast=self.autocast,
            origin=self.origin,
        )
        return small, chosen

    def _of_fewer(self, theta: Sequence[Tensor], rows: Tensor) -> Kernel:
        """The live kernel on these rows, watched."""
        whole = self.origin
        total = whole.layout.batch_shape[0]
        if whole.rows_named is None:
            whole.rows_named = captured_rows(whole.lifted.function, total)
        before = Larger(self.live, theta, rows, self.batch)
        return watched(whole.live, total, before, whole.rows_named, whole.identity_now)

    def sparsity(self, what: str = "residual") -> Sparsity:
        """The pattern of the Jacobian of one sample's ``"residual"``, or ``"residuals"``, shared by all systems of one
        origin."""
        origin, problem = self.origin, self.origin.problem
        if what not in origin._sparsity:
            shapes = tuple(tuple(t.shape) for t in self.lifted.theta)
            kind, key = problem.kind, (what, *origin.identity, shapes)
            symmetric = what in ("saddle", "hessian") or (what == "residual" and kind.symmetric)
            origin._sparsity[what] = Sparsity(key, problem.pattern_of(what), kind.iteration, symmetric)
        return origin._sparsity[what]

    @functools.cached_property
    def identity(self) -> tuple[Hashable, ...]:
        """What tells this system's function, its mode, and the shape of its state, complex or not, from others."""
        lifted = self.lifted
        modules = [m for places in (*lifted.slots, *(p for p, _ in lifted.frozen)) for m, _, _ in places]
        events = (*map(tuple, self.layout.events), *self.layout.complex)
        return type(self.origin.problem), identity_of(lifted.function), events, *(m.training for m in modules)

    @property
    def identity_now(self) -> tuple[Hashable, ...]:
        """The :attr:`identity` and how its objects are set: for what is asked once of a function as it is, and never checked
        again."""
        return *self.identity, self.settings_now

    @property
    def settings_now(self) -> tuple[Hashable, ...]:
        """How the objects behind the function are set (:func:`~implicitkit.sparsity.identity.settings_of`)."""
        return settings_of(self.lifted.function)

    def situation(self, theta: Sequence[Tensor]) -> tuple[Hashable, ...]:
        """What tells a solve from others of one function, where they are to be alike: how many samples there are, flags and
        words among the arguments, and how large numbers and tensors are, to a power of two: a time that changes from solve
        to solve is no other situation each time."""
        sizes = [torch.linalg.vector_norm(t.detach()).item() for t in theta if t.is_floating_point() or t.is_complex()]
        return self.batch, *_given(self.lifted, theta), *(math.frexp(size)[1] for size in sizes)

    def setting(self, theta: Sequence[Tensor]) -> tuple[Hashable, ...]:
        """What tells functions of one code from each other by the values that they compute with, as far as it is cheap to
        know: how objects are set, flags and words, and how large single numbers are, to a power of two."""
        single = [size_of(t.item()) for t in theta if t.numel() == 1 and t.device.type == "cpu"]
        return *settings_of(self.lifted.function, size_of), *_given(self.lifted, theta), *single

    @property
    def is_batched(self) -> bool:
        """Does this system stand for several of one, by ``torch.vmap``?"""
        return self.parent is not None

    def over_levels(self, base: LevelKernel) -> LevelKernel:
        """A function ``(states, theta) -> tensors`` of the innermost system as one of this system.

        ``states`` are matrices ``(batch, k)``, ``theta`` the first so many of the system's tensors, and each result has
        the batch in front; at every level of ``torch.vmap`` one batch dimension is mapped over and flattened again.
        """
        parent = self.parent
        if parent is None:
            return base
        inner, rows = parent.over_levels(base), parent.batch

        def batched(states: Sequence[Tensor], theta: Sequence[Tensor]) -> tuple[Tensor, ...]:
            given, dims = len(states), self.dims[: len(theta)]
            if not given and all(d is None for d in dims):  # nothing differs between the batches
                return tuple(t.expand(self.batch // rows, *t.shape).flatten(0, 1) for t in inner((), theta))
            mapped = torch.func.vmap(
                lambda *tensors: inner(tensors[:given], tensors[given:]),
                in_dims=(*(0,) * given, *dims),
                randomness="same",
            )
            out = mapped(*(m.reshape(-1, rows, m.shape[-1]) for m in states), *theta)
            return tuple(o.flatten(0, 1) for o in out)

        return batched

    def user_calls(self, z: Tensor, theta: Sequence[Tensor]) -> list[tuple[Tensor, tuple[Any, ...]]]:
        """The user-level calls that this batch stands for: each packed state with the ``args`` that go with it."""
        if self.parent is None:
            return [(z, self.lifted.rebuild(theta[: self.lifted.from_args]))]
        calls = []
        for i, part in enumerate(z.reshape(-1, self.parent.batch, self.size)):
            chosen = [t if d is None else t.select(d, i) for t, d in zip(theta, self.dims, strict=True)]
            calls.extend(self.parent.user_calls(part, chosen))
        return calls


def _packer(problem: Equations, layout: Layout) -> Callable[[Any, Tensor], Tensor]:
    """The function's output as a matrix: ``(batch, n)``, ``(batch,)`` or ``(batch, m)`` by what the problem ``returns``."""
    if problem.kind.returns_state:
        return lambda out, z: layout.pack(out)
    if problem.kind.returns_scalar:
        return lambda out, z: out.reshape(z.shape[0]).to(z.dtype)

    def vector(out: Any, z: Tensor) -> Tensor:
        leaves = [real_parts(leaf).reshape(z.shape[0], -1) for leaf in tree_flatten(out)[0]]
        return (leaves[0] if len(leaves) == 1 else torch.cat(leaves, 1)).to(z.dtype)

    return vector


def check_output(problem: Equations, layout: Layout) -> Callable[[Any], None]:
    """Raises unless an output of the user's function has the form that the problem needs."""
    name = f"{type(problem).__name__}'s function"
    cast = casts(layout.device.type)

    def check(out: Any) -> None:
        if problem.kind.returns_state:
            layout.check(out, name, cast=cast, aux=True)
            return
        leaves = tree_flatten(out)[0]
        alone = problem.kind.returns_scalar and len(leaves) == 1
        for leaf in [out] if alone else leaves:
            if not isinstance(leaf, Tensor):
                hint = hint_of_pair(out) or hint_of_no_tensor(leaf)
                raise TypeError(f"{name} returned {kind_of(leaf)}, not a tensor{hint}")
            check_returned(leaf, layout.device, name, real=problem.kind.returns_scalar)
        if not leaves:
            raise TypeError(f"{name} returned {kind_of(out)} without a tensor in it")
        others = {leaf.real.dtype for leaf in leaves} - {layout.dtype}
        if others and not cast:
            start = "start from a z0 of the dtype that the function returns"
            raise TypeError(f"{name} returned dtype {others.pop()}, but z has {layout.dtype}; {start}")
        shape, batch = tuple(leaves[0].shape), tuple(layout.batch_shape)
        if problem.kind.returns_scalar and (not alone or shape != batch):
            got = f"shape {shape}" if alone else f"{len(leaves)} tensors{hint_of_pair(out)}"
            raise ValueError(of_the_objective(name, batch, got))
        for found in (tuple(leaf.shape) for leaf in leaves):
            if found[: len(batch)] != batch:
                must = f"{name} must return tensors whose first dimensions are the batch {batch}"
                raise ValueError(f"{must}; it returned shape {found}")
        if not any(leaf.shape[len(batch) :].numel() for leaf in leaves):
            raise ValueError(f"{name} returned no number (shape {shape}): there is nothing to find z from")

    return check


def _given(lifted: Lifted, theta: Sequence[Tensor]) -> list[Hashable]:
    """Flags and words among the arguments, and how large numbers are."""
    args = tree_flatten(lifted.rebuild(theta[: lifted.from_args]))[0]
    return [size_of(arg) for arg in args if isinstance(arg, (bool, int, float, complex, str))]


def _row_dims(in_dims: Any, args: tuple[Any, ...], layout: Layout, count: int) -> tuple[int | None, ...] | None:
    """``in_dims`` (one entry per argument) as one entry per tensor of theta."""
    if in_dims is None:
        return None
    if isinstance(in_dims, int):
        in_dims = (in_dims,) * len(args)
    if not layout.batch_dims:
        raise ValueError("in_dims says where the batch lies in the arguments, but batch_dims is 0: pass batch_dims=1")
    if len(in_dims) != len(args):
        raise ValueError(
            f"in_dims has {len(in_dims)} entries for {len(args)} arguments; give one each (None if shared)"
        )
    if any(entry is not None and (not isinstance(entry, int) or isinstance(entry, bool)) for entry in in_dims):
        raise TypeError(f"in_dims holds one dimension (or None if shared) for each argument, got {in_dims!r}")
    dims: list[int | None] = []
    rows = layout.batch_shape[0]
    for number, (entry, arg) in enumerate(zip(in_dims, args, strict=True)):
        for leaf in tree_flatten(arg)[0]:
            if not isinstance(leaf, Tensor):
                continue
            if entry is not None and (not -leaf.ndim <= entry < leaf.ndim or leaf.shape[entry] != rows):
                raise ValueError(
                    f"in_dims says that argument {number} carries the batch in dimension {entry}, but its shape is "
                    f"{tuple(leaf.shape)} and the batch has {rows} rows"
                )
            dims.append(None if entry is None else entry % leaf.ndim)
    return (*dims, *([None] * (count - len(dims))))
