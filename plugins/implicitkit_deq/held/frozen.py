"""One cell, one map: random numbers and normalisation statistics are held fixed during a solve and its derivative."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.compat import computed_again, is_batched, unseen
from implicitkit_deq.held import generators, hoist
from implicitkit_deq.held.buffers import Buffers
from implicitkit_deq.held.generators import Drawing
from implicitkit_deq.held.hooks import Shown

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_TRACKING = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_OF_SHAPES = ("shape", "size", "channels", "dimension")  # in what torch says of arguments that do not fit
_OF_PRECISIONS = ("the same dtype", "expected scalar type", "expected m1 and m2", "should be the same")

_MOVED = (
    "the cell {} {}, and a checkpoint (use_reentrant=True) computes its layer again, for the backward: the first call has "
    "moved them, so that this would be the derivative of another equilibrium. Leave the layer, which keeps no iterates, out "
    "of the checkpoint, or put what writes them in eval() mode (of normalisations GroupNorm and LayerNorm write none)"
)


class Frozen:
    """The map ``(z, weights, *injected) -> z`` of one call of a layer.

    - Whatever the cell draws (dropout, noise), it draws the same at every evaluation: the state of the random number
      generators at the first evaluation is put back before each later one (the "variational" dropout that DEQs use).  After
      the call (:meth:`finish`) the generators stand where one evaluation leaves them.  Python's and NumPy's are among them
      once a cell was seen to draw there.
    - Buffers that the cell writes to (running statistics, moving averages, counters) are what they were when the call
      began, and written to once, at the equilibrium.  BatchNorm in training mode uses its running statistics, so that
      samples stay independent and training solves the same equation as evaluation.
    - What modules of the cell keep of an evaluation, and hooks see of the last, is that at the equilibrium, differentiable.
    - Reparametrised weights are read from ``weights``.

    Args:
        function: ``(z, *injected) -> z``. module: whose weights and normalisations are meant (the cell).
        check: raises unless the first output fits the state.
        independent: samples are solved one by one (else BatchNorm may couple them by its batch statistics).
        may_draw: whether random numbers may be drawn; if not, :class:`Drawing` is raised when they are.
        elsewhere: whether they may be drawn from Python's or NumPy's generator, and alike.
        previous: a map that draws before this one in the same call: this one draws what comes after.

    Raises:
        ik.CapabilityError: a reentrant checkpoint calls again, in its backward, what moved the statistics that it needs.
    """

    identified_by = ("function", "independent", "training")  # it is made anew at every call of the layer
    reaches = ("function",)  # modules of the cell; all else that it holds is of these, or the layer's own

    def __init__(
        self,
        function: Callable[..., Any],
        module: Any,
        places: Sequence[hoist.Place],
        check: Callable[[Any], None],
        device: torch.device,
        *,
        independent: bool,
        may_draw: bool,
        elsewhere: bool,
        previous: Frozen | None = None,
    ) -> None:
        self.previous, self.elsewhere = previous, elsewhere
        self.function, self.places, self.check, self.device = function, places, check, device
        self.name, self.training = type(module).__name__, bool(getattr(module, "training", False))
        self.hint = functools.partial(_second, module)
        self.independent, self.may_draw = independent, may_draw
        modules = ik.extend.below(module) if isinstance(module, nn.Module) else []
        self.norms, self.shown = _updating_norms(modules) if independent else [], Shown(modules)
        self.buffers = Buffers(modules)
        if any(m.momentum != 0 for m in self.norms) and computed_again():
            raise ik.CapabilityError(
                _MOVED.format(self.name, "has BatchNorm in training mode, with running statistics")
            )
        self.statistics = [(_copy(m.running_mean), _copy(m.running_var)) for m in self.norms]
        self.before: list[Any] | None = None
        self.after: list[Any] | None = None  # set when the cell is found to draw

    def problem(self, injected: tuple[Any, ...]) -> ik.Problem:
        """What holds at the equilibrium; its arguments are ``(weights, *injected)``."""
        return ik.FixedPoint(self)

    def __call__(self, z: Any, weights: Sequence[Tensor], *injected: Any) -> Any:
        """One evaluation."""
        same = self.before is not None and self.after is None
        if same and not (self.places or self.norms or self.buffers.moving):
            return self.function(z, *injected)
        with self._as_it_was(weights), self.buffers.held():
            return self._first(z, injected) if self.before is None else self._again(z, injected)

    def _again(self, z: Any, injected: tuple[Any, ...]) -> Any:
        if self.after is None:
            return self.function(z, *injected)
        outside = self._generators()
        assert self.before is not None
        self._put(self.before)
        try:
            with _may_draw(self.name):
                return self.function(z, *injected)
        finally:
            self._put(outside)

    @contextlib.contextmanager
    def _as_it_was(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Inside, weights and normalisations are those of this call."""
        with hoist.held(self.places, weights), _held(self.norms, self.statistics):
            yield

    def _first(self, z: Any, injected: tuple[Any, ...]) -> Any:
        outside, marks = self._generators(), None if self.elsewhere else generators.marks()
        chained = None if self.previous is None else self.previous.after
        before = outside if chained is None else chained
        if chained is not None:
            self._put(chained)
        given = ("z", z), *(("and then", i) for i in injected)
        with _may_draw(self.name), called(self.name, *given, hint=self.hint), self.buffers.watched():
            out = self.function(z, *injected)
        after = self._generators()
        drawn = not all(map(_same, before, after))
        if drawn or chained is not None:
            self._put(outside)
        if marks is not None and generators.marks() != marks:
            raise Drawing(elsewhere=True)
        if drawn and not self.may_draw:
            raise Drawing
        if drawn and _batched(out) and not _batched(z):
            raise ik.CapabilityError(
                f'{self.name} draws random numbers, and inside torch.vmap(..., randomness="different") they would differ '
                'between members and evaluations: map with randomness="same", or give the layer all samples as one '
                "batch, in which each has a draw of its own"
            )
        self.after = after if drawn else chained
        self.check(out)
        self.before = before
        return out

    def finish(self, z: Any, weights: Sequence[Tensor], injected: tuple[Any, ...]) -> None:
        """After the solve: let the cell write to its buffers, by one evaluation at the equilibrium ``z``, show one to
        whoever reads what it leaves behind (:class:`Shown`), and let the generators move on."""
        if (self._may_move() or self.norms) and _finite(z):
            with ik.extend.modules_held(), torch.no_grad(), hoist.held(self.places, weights):
                if self.before is not None and self.after is not None:
                    self._put(self.before)
                self.function(z, *injected)
        if self.shown.anything():
            with ik.extend.modules_held(), self._as_it_was(weights), self.buffers.shown():
                self._again(z, injected)
        if self.after is not None:
            self._put(self.after)

    def _generators(self) -> list[Any]:
        """The states of the generators that the cell may draw from."""
        return _generators(self.device) + ([generators.states()] if self.elsewhere else [])

    def _put(self, states: list[Any]) -> None:
        """Let them stand there."""
        _set_generators(self.device, states)
        if self.elsewhere:
            generators.put(states[-1])

    def _own(self) -> list[str]:
        """The buffers that move, but for those of normalisations, which in training do not read them."""
        return [name for m, name, _ in self.buffers.moving if not isinstance(m, _TRACKING)]

    def _may_move(self) -> bool:
        """Are there buffers to be written to?  Not inside transforms, where what is to be written is wrapped; raises where a
        checkpoint has computed this again with those that the first call has moved."""
        own = self._own()
        if own and computed_again():
            raise ik.CapabilityError(_MOVED.format(self.name, f"writes to its buffers ({', '.join(own)})"))
        if not (own and ik.extend.transforms_active()):
            return bool(self.buffers.moving)
        ik.extend.warn(
            f"{self.name} writes to its buffers ({', '.join(own)}), which transforms of torch.func do not let it: they are "
            "as they were before this call. Call the layer once more outside, or put what writes them in eval() mode",
            ik.ImpureFunctionWarning,
        )
        return False


@contextlib.contextmanager
def called(name: str, *arguments: tuple[str, Any], hint: Callable[[], str] = str) -> Iterator[None]:
    """Inside, what torch says of shapes that do not fit, and Python of arguments, is said of the cell, with what it was
    called with, and a ``hint``."""
    try:
        yield
    except TypeError as error:
        if "positional argument" not in str(error):
            raise
        state = dict(arguments).get("z")
        cure = (
            "A module with one argument becomes a cell as in DEQ(lambda z, x: torch.tanh(module(z) + x), state=(64,))"
        )
        if isinstance(state, (list, tuple)):
            cure = f"z is one argument, a {type(state).__name__}: DEQ(lambda z, *inputs: f(*z, *inputs), state)"
        elif taken := [name for name in ("z0", "index", "at") if repr(name) in str(error)]:
            cure = f"{taken[0]}= is the layer's own: what the cell calls so is given by position, layer(x, {taken[0]})"
        raise TypeError(
            f"a cell is called as cell(z, x, ...), the state and the inputs of the layer, and returns the next state: "
            f"{error.__cause__ or error}. {cure}"
        ) from error
    except RuntimeError as error:
        if type(error) is RuntimeError and any(words in str(error) for words in _OF_PRECISIONS):
            given = ", ".join(f"{what} {_told(value, lambda t: t.dtype)}" for what, value in arguments)
            raise RuntimeError(
                f"the cell {name} was called with {given}, and its parameters, or the state, are of another dtype: convert "
                f"the inputs, x.to(dtype), or the layer, layer.to(dtype). torch says: {error}"
            ) from error
        if type(error) is not RuntimeError or not any(word in str(error) for word in _OF_SHAPES):
            raise
        shapes = ", ".join(f"{what} {_told(value, lambda t: tuple(t.shape))}" for what, value in arguments)
        raise RuntimeError(
            f"the cell {name} was called with {shapes} (shapes, the batch in front), and they do not fit it: was it made "
            f"for another width of an input, or of the state?{hint()} torch says: {error}"
        ) from error


def _second(module: Any) -> str:
    """What is to be said of a cell whose layers take the batch as their second dimension."""
    found = (m for m in (module.modules() if isinstance(module, nn.Module) else ()))
    names = sorted({type(m).__name__ for m in found if getattr(m, "batch_first", True) is False})
    if not names:
        return ""
    return (
        f" Or the batch, which {' and '.join(names)} without batch_first=True takes as the second dimension? A layer's "
        "inputs and its state, DEQ(..., state=(shape of one sample,)), have it in front."
    )


@contextlib.contextmanager
def _may_draw(name: str) -> Iterator[None]:
    """Inside, what torch says where a transform lets nobody draw random numbers comes with what to do."""
    try:
        yield
    except RuntimeError as error:
        if "random operation" not in str(error):
            raise
        raise RuntimeError(
            f"{name} draws random numbers (dropout in training, noise), which torch.func.vmap does not allow by default, "
            "and jacrev, jacfwd and hessian are made of it. Without the draw: layer.eval(). With one draw for all: "
            'torch.func.vmap or jacfwd with randomness="same"; torch.autograd.functional.jacobian or hessian; or jacrev by '
            'hand, out, pull = torch.func.vjp(f, x), and torch.func.vmap(pull, randomness="same")(basis). '
            f"torch says: {error}"
        ) from error


def _told(value: Any, what: Callable[[Tensor], Any]) -> str:
    """Something of the tensors in a value; other leaves by their type."""
    leaves = ik.extend.trees.tree_flatten(value)[0]
    return ", ".join(str(what(t)) if isinstance(t, Tensor) else type(t).__name__ for t in leaves)


@contextlib.contextmanager
def statistics_held(module: Any) -> Iterator[None]:
    """Inside, BatchNorm below ``module`` uses its running statistics, whatever its mode; no buffer is written to."""
    modules = ik.extend.below(module) if isinstance(module, nn.Module) else []
    norms = _updating_norms(modules)
    with Buffers(modules).watched(), _held(norms, [(m.running_mean, m.running_var) for m in norms]):
        yield


def _held(norms: Sequence[Any], statistics: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, these BatchNorms normalise by these statistics."""
    return _normalising(norms, statistics) if norms else contextlib.nullcontext()


@contextlib.contextmanager
def _normalising(norms: Sequence[Any], statistics: Sequence[Any]) -> Iterator[None]:
    old = [(m.training, m.running_mean, m.running_var) for m in norms]
    try:
        for m, (mean, var) in zip(norms, statistics, strict=True):
            m.training, m.running_mean, m.running_var = False, mean, var
        yield
    finally:
        for m, before in zip(norms, old, strict=True):
            m.training, m.running_mean, m.running_var = before


def _updating_norms(modules: Iterable[nn.Module]) -> list[Any]:
    return [m for m in modules if isinstance(m, BATCH_NORMS) and m.training and m.running_mean is not None]


def _finite(z: Any) -> bool:
    try:
        return all(bool(torch.isfinite(t).all()) for t in ik.extend.trees.tree_flatten(z)[0])
    except RuntimeError as error:  # vmap shows no values
        raise ik.CapabilityError(
            "BatchNorm in training cannot update its statistics under torch.vmap: put the cell in eval() mode, pass the "
            "samples as one batch, or use GroupNorm or LayerNorm"
        ) from error


def _batched(state: Any) -> bool:
    return any(isinstance(t, Tensor) and is_batched(t) for t in ik.extend.trees.tree_flatten(state)[0])


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the default generators that operations on ``device`` draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(getattr(torch, device.type).get_rng_state(*_which(device)))
    return states


def _same(a: Any, b: Any) -> bool:
    """Are two states equal?  Asked unseen: a cell that looks at tensors is evaluated once more, as it may branch."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    with unseen():
        if not ik.extend.transforms_active():
            return torch.equal(a, b)
        return np.array_equal(np.from_dlpack(a), np.from_dlpack(b))  # as transforms of torch.func let be asked


def _set_generators(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        getattr(torch, device.type).set_rng_state(states[1], *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
