"""The layer: an ``nn.Module`` whose output is the equilibrium of a cell."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import options
from implicitkit_deq.causal.causality import per_position
from implicitkit_deq.causal.claim import check_causal
from implicitkit_deq.cells.base import Cell
from implicitkit_deq.cells.stacked import Composed
from implicitkit_deq.held import hoist
from implicitkit_deq.held.frozen import Frozen
from implicitkit_deq.held.frozen_stack import FrozenStack
from implicitkit_deq.held.generators import Drawing
from implicitkit_deq.held.hooks import Copied
from implicitkit_deq.held.sharding import gathered
from implicitkit_deq.inputs import by_position, check_returned, check_use, describe, factors, refuse_unbatched
from implicitkit_deq.merging import Composable, merged
from implicitkit_deq.pretraining import Pretrained, Pretraining
from implicitkit_deq.rows import Rows
from implicitkit_deq.settings import Settings
from implicitkit_deq.starting import start
from implicitkit_deq.starting.extrapolation import Trend
from implicitkit_deq.starting.warm_start import Last
from implicitkit_deq.trajectory import Visit, check_steps, given_away, refuse_mapped
from implicitkit_deq.unsolved_samples import Effort, Forgive, followed, gone_on, masked, near


class Equation(NamedTuple):
    """What one call solves: ``z = the_map(z, weights, *injected)``, from ``initial`` on."""

    the_map: Frozen | FrozenStack
    initial: Any
    weights: Sequence[Tensor]
    injected: tuple[Any, ...]

    def once(self, z: Any) -> Any:
        """The cell applied to ``z``."""
        return self.the_map(z, self.weights, *self.injected)


class DEQ(ik.extend.Configured, Composable, Copied, Pretrained):
    r"""A deep equilibrium model: ``layer(x) = z*`` with ``z* = cell(z*, x)``, differentiable, in constant memory.

    The derivative is that of the equilibrium, ``dz*/d\theta = (I - J)^{-1} df/d\theta`` with ``J = df/dz`` (Bai, Kolter &
    Koltun 2019, theorem 1), for whatever solver found it; ``rule=`` exchanges it for a cheaper approximation.

        layer = DEQ(cells.MLP(32, 64), solver="anderson", rtol=1e-3, evaluation={"rtol": 1e-6})
        z = layer(x)                  # (batch, 64);  layer.solution: steps, residuals, convergence of every sample

    Within a call the cell is one and the same map: injections and reparametrised weights are computed once, dropout masks
    and buffers that the cell writes to (running statistics, moving averages) are held, and these are written to once, at the
    equilibrium.  Of that is, too, what a cell keeps (``self.load = ...``) and forward hooks see last.

    Units: ``z`` has those of the cell's output; ``atol`` too, ``rtol`` is dimensionless.

    Args:
        cell: ``z_next = cell(z, *inputs)``, a :class:`Cell`, a module, or a function, whose modules are not the layer's.
        state: the shape of one sample's state, or a pytree of shapes, or a function ``(*inputs)`` that returns one;
            ``None``: the cell says (``cell.state_shape``).
        init: where a solve starts: ``None``: zero, but where in training the very tensors of the last call come back after a
            step of the optimiser (full batches) where the last equilibria lead, 30 times of 31, each sample by itself (of a
            causal layer each position); ``"zeros"``; ``"learned"`` (a parameter, trained by :meth:`start_loss`); ``"last"``
            (the same in every call whose shapes agree, or the last equilibrium of the sample ``index``); or a function or
            module ``(*inputs) -> state``.
        solver, rule, rtol, atol, max_steps, on_failure, trace, callback: as in :func:`ik.solve`, in training (and in
            evaluation, unless changed there).  ``on_failure=None``: :class:`Forgive`, and ``"raise"`` in evaluation.
        evaluation: what is different in ``eval()`` mode, as in ``{"rtol": 1e-6}``.
        batch_dims: 1: samples are independent; 0: the batch is one joint system (a cell that couples its samples).
        in_dims: as in :func:`ik.solve`, for what the cell gets after ``z``.  ``"auto"``: what a :class:`Cell` declares;
            ``0`` for another module with one input; else not known, so that converged samples are frozen, not dropped.
        causal: position ``t`` of the state (its first dimension after the batch) depends on none after it (else the first
            call is refused): every solver is made one whose future does not leak into the past (:func:`per_position`).
            ``None``: what the cell says.
        dtype: of the state; ``None``: that of the inputs (of the cell's parameters if no input is floating point), but
            float32 under autocast: the solve stays in full precision, only the cell is cast.
        pretraining: a first phase of unrolled training.

    Attributes:
        train_settings, eval_settings: the :class:`Settings` in use in either mode; may be replaced at any time.
        solution: the :class:`ik.Solution` of the last call, without graph; ``None`` before, and after unrolled calls.

    Raises:
        TypeError, ValueError: the parts do not fit together; the message says which and what to do.
        ik.ConvergenceError (when called): some samples have no equilibrium, under ``on_failure="raise"``.
    """

    def __init__(
        self,
        cell: Callable[..., Any],
        state: Any = None,
        *,
        init: Any = None,
        solver: Any = "relay",
        rule: Any = "auto",
        rtol: float | None = None,
        atol: float | None = None,
        max_steps: int | None = None,
        on_failure: str | Forgive | None = None,
        trace: bool = False,
        callback: Callable[[int, Any, Tensor], Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        batch_dims: int = 1,
        in_dims: Any = "auto",
        causal: bool | None = None,
        dtype: torch.dtype | None = None,
        pretraining: Pretraining | None = None,
    ) -> None:
        """Make a layer of ``cell``; what every argument means is said of the class, ``help(DEQ)``."""
        super().__init__()
        options.check_arguments(
            "DEQ",
            cell=(options.function("cell(z, *inputs)"), cell),
            evaluation=(options.optional(options.instance("a dict of settings", Mapping)), evaluation),
            causal=(options.optional(options.flag()), causal),
            dtype=(options.optional(options.torch_dtype()), dtype),
            pretraining=(options.optional(options.instance("a Pretraining(calls, steps)", Pretraining)), pretraining),
        )
        if state is None and not isinstance(cell, Cell):
            raise TypeError(
                "state is missing: the shape of one sample's state, as in DEQ(cell, state=(64,)); only a Cell with a "
                "state_shape method can do without"
            )
        if state is not None:
            start.check_state(state)
        if type(batch_dims) is not int or batch_dims not in (0, 1):
            raise ValueError(f"batch_dims must be 1 (independent samples) or 0 (one joint system), got {batch_dims!r}")
        if not (isinstance(in_dims, str) and in_dims == "auto"):
            start.check_dims("DEQ: in_dims", in_dims)
        self.cell, self.state = cell, state
        self.batch_dims, self.in_dims, self.dtype = batch_dims, in_dims, dtype
        self.causal = bool(getattr(cell, "causal", False)) if causal is None else causal
        lenient = Forgive() if on_failure is None else on_failure
        self.train_settings = Settings(solver, rule, rtol, atol, max_steps, lenient, trace, callback)
        strict = {"on_failure": "raise"} if isinstance(lenient, Forgive) else {}
        self.eval_settings = self.train_settings.changed(strict | dict(evaluation or {}))
        self.init = start.make(init, state)
        self.pretraining = pretraining
        if pretraining is not None:
            self._count()
        self.solution: ik.Solution | None = None
        self._rows = Rows()
        self._start: tuple[Any, Any] | None = None
        self._effort, self._again = Effort(), start.Again(init is None, self.causal)
        self._last, self._trend = self.init if isinstance(self.init, Last) else None, Trend()
        self._used = self._is_causal = self._forgave = False  # what was seen of the cell and its samples

    # -------------------------------------------------------------------------------------------------------- calling
    @ik.extend.opaque_to_compile
    def forward(
        self, *inputs: Any, z0: Any = None, index: Tensor | None = None, at: Sequence[int] | None = None, **named: Any
    ) -> Any:
        """The equilibrium for these inputs, whose leading dimension is the batch.

        Args:
            inputs, named: what the cell gets after ``z`` (``named``: by its own names); the first tensor tells the batch.
            z0: where to start, if not as ``init`` says; a state, or ``"last"``.
            index: the number of each sample in the data set (integers, shape ``(batch,)``): start from the equilibrium that
                it had when it was seen last; with ``init="last"``, or zeros (then at first, and in one training call of 31;
                in training where its last ones lead, as full batches do: four states a sample are kept).
            at: return what :meth:`states` does instead (for a wrapper that only calls, as ``DistributedDataParallel``).

        Returns:
            ``cell.output(z*)``, for most cells ``z*`` itself, differentiable; the caller may change it in place.
        """
        ik.extend.refuse_tracing(linearisable=True)
        inputs = by_position(self.cell, inputs, named) if named else inputs
        if at is None:
            return self._call(inputs, z0, index)[-1]
        return self._call(inputs, z0, index, check_steps(at))

    def states(self, *inputs: Any, at: Sequence[int] = (2, 4, 8), z0: Any = None) -> list[Any]:
        """Outputs along the way and at the end, each with a derivative: for losses on what the solver passes through.

        For each step in ``at`` that the solve takes, one application of the cell to the iterate after it, which has the
        one-step derivative; last the equilibrium, as :meth:`forward` returns it.  See :func:`fixed_point_correction`.

        Args:
            at: step numbers, at least 1, increasing. inputs, z0: as in :meth:`forward`.

        Raises:
            ValueError: no increasing step numbers. ik.CapabilityError: under ``torch.vmap``.
        """
        found: list[Any] = self(*inputs, z0=z0, at=at)  # a call like any other: hooks see it
        return found

    def residual(self, z: Any, *inputs: Any) -> Any:
        """``cell(z, *inputs) - z``, differentiable."""
        return ik.extend.trees.tree_map(lambda new, old: new - old, self.cell(z, *inputs), z)

    def __rshift__(self, other: DEQ) -> DEQ:
        """``self >> other``: one DEQ whose output is ``other(self(x))``; see :func:`merge`."""
        result: DEQ = merged(self, other, DEQ)
        return result

    def start_loss(self) -> Tensor:
        """Mean over the samples of ``|z0 - z*|^2 / |z*|^2`` of the last call, for a start with parameters.

        The equilibrium is a constant in it: the start learns to be near it (Bai, Koltun & Kolter 2022, section 3.2).

        Raises:
            RuntimeError: the start has no parameters, or there has been no call.
        """
        if self._start is None:
            raise RuntimeError(
                'there is no start to train: use init="learned" or a module that requires grad, and call the layer first'
            )
        initial, state = self._start
        layout = ik.extend.trees.Layout(state, 1)
        goal = layout.pack(state)
        size = goal.square().sum(1).clamp_min(torch.finfo(goal.dtype).tiny)
        return ((layout.pack(initial) - goal).square().sum(1) / size).mean()

    # ------------------------------------------------------------------------------------------------------- settings
    @property
    def settings(self) -> Settings:
        """The settings of the present mode, training or evaluation."""
        return self.train_settings if self.training else self.eval_settings

    @contextlib.contextmanager
    def using(self, **changes: Any) -> Iterator[DEQ]:
        """Other settings for a while, in both modes: ``with layer.using(rtol=1e-8): ...``.

        Raises:
            TypeError: a name that is no setting.
        """
        old = self.train_settings, self.eval_settings
        self.train_settings, self.eval_settings = (s.changed(changes) for s in old)
        try:
            yield self
        finally:
            self.train_settings, self.eval_settings = old

    def extra_repr(self) -> str:
        """The state's shape and the settings."""
        s = self.train_settings
        shape = "of the cell" if self.state is None else self.state
        names = [getattr(p, "name", "") or p for p in (s.solver, s.rule)]
        return f"state={shape}, solver={names[0]}, rule={names[1]}, rtol={s.rtol}, atol={s.atol}"

    # -------------------------------------------------------------------------------------------------------- details
    @gathered
    def _call(self, inputs: tuple[Any, ...], z0: Any, index: Tensor | None, at: tuple[int, ...] = ()) -> list[Any]:
        """The outputs after the steps ``at`` and at the equilibrium."""
        cell = self.cell
        batch, _, device = like = describe(cell, inputs, self.dtype)
        initial = self._initial(inputs, like, z0, index)
        plain = self.training and z0 is None and index is None and not at and not self._unrolling()
        initial = self._again(inputs, initial, self.settings if plain else None)
        if device.type == "meta":  # shapes only
            return [self._output(cell, initial)] * (1 + len(at))
        places = hoist.places(cell)
        with ik.extend.modules_held() if places else contextlib.nullcontext():
            weights = hoist.computed(places)
        samples = batch if self.batch_dims else None
        function, injected, dims = factors(cell, inputs, self.in_dims, samples, places, weights)
        layout = ik.extend.trees.Layout(initial, self.batch_dims)
        dims = self._rows.dims(cell, self.training, function, initial, injected, dims, places, weights)

        def frozen(dims: Any) -> Frozen | FrozenStack:
            how: dict[str, Any] = {"independent": self.batch_dims == 1, **self._rows.draws(self.training, dims)}
            if isinstance(cell, Composed):
                return FrozenStack(cell, places, device, **how)

            check = functools.partial(check_returned, cell, layout, device)
            return Frozen(function, cell, places, check, device, **how)

        def solve(dims: Any) -> tuple[Equation, Any]:
            equation = Equation(frozen(dims), initial, weights, injected)
            if self._unrolling():
                return equation, self._unrolled(equation)
            return equation, self._equilibrium(equation, dims, visit, trend)

        visited: list[Any] = []
        trend = self._followed(z0) if index is None else None
        visit = Visit(at, visited, self.settings.callback) if at else self.settings.callback
        while True:
            try:
                equation, z = solve(dims)
                break
            except Drawing as drawing:
                self._rows.never(self.training, drawing.elsewhere)
                dims = None
        state = ik.extend.trees.tree_map(lambda t: t.detach(), z)
        self._used = self._used or check_use(cell, state, inputs)
        if self.batch_dims:
            refuse_unbatched(cell, state, inputs)
        self._again.keep(inputs, cell, state, self.settings if self.training else None)
        if self._last is not None and (z0 is None or isinstance(z0, str)):
            self._last.keep(state, index, cell)
        self._start = (initial, state) if start.is_learned(self.init) else None
        refuse_mapped(visited, state)
        with ik.extend.modules_held() if visited else contextlib.nullcontext():
            outputs = [self._output(cell, equation.once(point)) for point in visited]
        equation.the_map.finish(z, weights, injected)
        return [*outputs, self._output(cell, z)]

    def _output(self, cell: Any, z: Any) -> Any:
        return given_away(cell.output(z) if isinstance(cell, Cell) else z)

    def _equilibrium(self, equation: Equation, dims: Any, visit: Any, trend: Any) -> Any:
        the_map, initial, weights, injected = equation
        asked = {**self.settings.options(), "callback": visit}
        if trend is not None:
            asked["rule"] = followed(asked["rule"], trend)
        if self.causal:
            asked["solver"] = per_position(asked["solver"], initial, self.batch_dims, isinstance(the_map, FrozenStack))
            self._is_causal = self._is_causal or check_causal(self.cell, equation.once, initial, not self.batch_dims)
        if dims is not None:
            asked["in_dims"] = (None, *dims)
        policy, solver = self.settings.on_failure, asked.pop("solver")
        problem, theta = the_map.problem(injected), (weights, *injected)

        def find(solver: Any, before: ik.Solution | None = None) -> ik.Solution:
            start = initial if before is None else gone_on(before, initial)
            return ik.solve(problem, start, theta, batch_dims=self.batch_dims, solver=solver, **asked)

        try:
            solution = self._effort.spend(find, solver, policy, self.training)
        except ik.ConvergenceError as error:
            if error.solution is not None:
                self.solution = error.solution.detach()
            raise
        self.solution = solution.detach()
        return self._forgiven(equation, solution, policy) if isinstance(policy, Forgive) else solution.value

    def _forgiven(self, equation: Equation, solution: ik.Solution, policy: Forgive) -> Any:
        """The value (of what ran away the start), with another derivative for the samples that have no solution."""
        z, converged = solution.value, solution.converged
        if ik.extend.transforms_active():
            return solution.raise_for_status().value
        if solution.truncated or ik.extend.holds(converged.all()):
            return z
        if policy.exceeded(~converged):
            policy.refuse(solution, not self._used, self.cell, self.settings.max_steps)
        if not self._forgave:
            self._forgave = True
            anew = self.init == "zeros" and self._last is None
            policy.tell(solution, self._effort.spared, anew, self.settings.max_steps)
        initial = equation.initial
        held = near(solution.status, z, initial, (lambda: equation.once(initial)) if self.causal else None)
        if policy.derivative == "truncated" and torch.is_grad_enabled():
            with ik.extend.modules_held():
                once = equation.once(held)
            # the value is the iterate, the derivative that of one application of the cell
            held = ik.extend.trees.tree_map(lambda t, f: t + (f - f.detach()), held, once)
        return masked(converged, z, held)

    def _unrolled(self, equation: Equation) -> Any:
        assert self.pretraining is not None
        z = equation.initial
        with ik.extend.modules_held():
            for _ in range(self.pretraining.depth(int(self.calls))):
                z = equation.once(z)
        self.calls += 1
        self.solution = None
        return z

    def _followed(self, z0: Any) -> Trend | None:
        """What the backwards of calls are to learn from each other, where equilibria do."""
        last = isinstance(z0, str) or (z0 is None and isinstance(self.init, Last))
        if not (self.training and torch.is_grad_enabled() and (last or (z0 is None and self._again.wanted))):
            return None
        if not (last or self._again.follows):
            self._trend = Trend()
        return self._trend

    def _initial(self, inputs: tuple[Any, ...], like: tuple[int, Any, Any], z0: Any, index: Tensor | None) -> Any:
        shapes = start.shapes_of(self.cell, inputs) if self.state is None else self.state
        if callable(shapes):
            shapes = shapes(*inputs)
        if shapes is not self.state:
            start.check_shapes(shapes)
        template = start.zeros(shapes, *like)
        index = None if index is None else start.check_index(index, like[0])
        if isinstance(z0, str) or (z0 is None and index is not None and self.init == "zeros"):
            if z0 not in (None, "last"):
                raise ValueError(f'z0 must be a state, or "last"; got {z0!r}')
            self._last = self._last or Last(self.solution, leads=True, by_position=self.causal)
            return self._last(template, index, self.cell if z0 is None and self.training else None)
        if z0 is not None:
            return start.fitting(z0, template, "z0")
        if isinstance(self.init, Last):
            return self.init(template, index)
        if isinstance(self.init, start.Learned):
            return self.init(template)
        if callable(self.init):
            return start.fitting(self.init(*inputs), template, "what init returned")
        return template
