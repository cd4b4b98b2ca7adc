"""Watching a DEQ while it trains: steps, residuals, and whether its equilibrium is about to be lost."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import implicitkit as ik
from implicitkit.extend import options
from implicitkit_deq.advice import cure
from implicitkit_deq.jacobian import condition_number, spectral_radius
from implicitkit_deq.layer import DEQ

Sink = Callable[[int, Mapping[str, float]], Any]


class StabilityWarning(UserWarning):
    """The equilibrium of a layer is about to be lost, or its gradient about to explode."""


class Monitor(ik.extend.Configured):
    r"""Reports the figures of every so many training calls of a layer to any number of sinks.

        with Monitor(layer, TensorBoard("runs/deq"), every=50):
            train()

    Figures, the worst or the mean over the samples: ``steps`` (mean), ``steps_max``, ``residual`` (largest, relative to
    ``|z|``), ``converged`` (share), ``unsolved`` (samples), ``evaluations``; of the last backward before,
    ``backward_steps`` (mean), ``backward_residual`` (largest), ``backward_converged``; and, with ``jacobian=True``,
    ``spectral_radius`` and ``condition`` (largest) at the equilibrium of up to ``samples`` samples.

    A :class:`StabilityWarning` is given when the spectral radius exceeds ``radius_limit``, the condition number of
    ``I - J`` exceeds ``condition_limit``, or a sample has not converged: while training may still look healthy.

    Args:
        layer: a DEQ. sinks: called as ``sink(call, figures)``; ``monitor.history`` keeps the figures besides.
        every: calls between two reports. jacobian: costs ``krylov`` products with the Jacobian a report.
        krylov: dimensions of the Krylov space for it. samples: how many samples at most are looked at for it.
        radius_limit, condition_limit: beyond which to warn.

    Raises:
        TypeError, ValueError: no DEQ, a sink that cannot be called, an option of the wrong type or out of range.
    """

    def __init__(
        self,
        layer: DEQ,
        *sinks: Sink,
        every: int = 1,
        jacobian: bool = True,
        krylov: int = 20,
        samples: int = 8,
        radius_limit: float = 1.0,
        condition_limit: float = 1e4,
    ) -> None:
        options.check_arguments(
            "Monitor",
            layer=(options.instance("a DEQ", DEQ), layer),
            every=(options.at_least(1), every),
            jacobian=(options.flag(), jacobian),
            krylov=(options.at_least(2), krylov),
            samples=(options.at_least(1), samples),
            radius_limit=(options.positive(), radius_limit),
            condition_limit=(options.positive(), condition_limit),
        )
        for sink in sinks:
            options.check_arguments("Monitor", sink=(options.function("sink(call, figures)"), sink))
        self.layer, self.sinks, self.every, self.jacobian = layer, sinks, every, jacobian
        self.krylov, self.samples = krylov, samples
        self.radius_limit, self.condition_limit = radius_limit, condition_limit
        self.history: list[tuple[int, dict[str, float]]] = []
        self.calls = 0
        self._last: ik.Solution | None = None
        self._handle = layer.register_forward_hook(self._called)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _called(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not layer.training or layer.solution is None:
            return
        previous, self._last = self._last, layer.solution
        self.calls += 1
        if (self.calls - 1) % self.every:
            return
        figures = _forward_figures(layer.solution) | _backward_figures(previous)
        if self.jacobian:
            figures |= self._jacobian_figures(layer, inputs)
        self.history.append((self.calls, figures))
        for sink in self.sinks:
            sink(self.calls, figures)
        self._judge(figures)

    def _jacobian_figures(self, layer: DEQ, inputs: tuple[Any, ...]) -> dict[str, float]:
        assert layer.solution is not None
        state, batch = layer.solution.value, len(ik.extend.trees.tree_flatten(layer.solution.value)[0][0])
        if layer.batch_dims == 1 and batch > self.samples and all(_batched(i, batch) for i in inputs):
            state, inputs = (ik.extend.trees.tree_map(lambda t: t[: self.samples], tree) for tree in (state, inputs))
        generator = torch.Generator(ik.extend.trees.tree_flatten(state)[0][0].device).manual_seed(0)
        random = torch.get_rng_state()
        try:
            how: dict[str, Any] = {"steps": self.krylov, "generator": generator}
            radius = spectral_radius(layer.cell, state, inputs, **how)
            condition = condition_number(layer.cell, state, inputs, **how)
        finally:
            torch.set_rng_state(random)
        return {"spectral_radius": float(radius.max()), "condition": float(condition.max())}

    def _judge(self, figures: Mapping[str, float]) -> None:
        alarms = []
        if figures["converged"] < 1:
            alarms.append(f"{1 - figures['converged']:.0%} of the samples have not converged")
        if not figures.get("spectral_radius", 0.0) <= self.radius_limit:
            alarms.append(f"the spectral radius of the Jacobian is {figures['spectral_radius']:.3g}")
        if not figures.get("condition", 0.0) <= self.condition_limit:
            alarms.append(f"the condition number of I - J is at least {figures['condition']:.3g}")
        if alarms:
            ik.extend.warn(
                f"call {self.calls} of the layer: {'; '.join(alarms)}. To keep its equilibria {cure(self.layer.cell)}",
                StabilityWarning,
            )


class TensorBoard(ik.extend.Configured):
    """A sink that writes scalars for TensorBoard.

    Args:
        target: a log directory, or a ``SummaryWriter`` (anything with ``add_scalar(tag, value, step)``).
        prefix: of the tags.

    Raises:
        ImportError: a directory is given and tensorboard is not installed (``pip install tensorboard``).
    """

    def __init__(self, target: Any, prefix: str = "deq") -> None:
        options.check_arguments("TensorBoard", prefix=(options.string(), prefix))
        if inspect.isclass(target) or not hasattr(target, "add_scalar"):
            place = options.instance("a directory, or a SummaryWriter (add_scalar(tag, value, step))", str, os.PathLike)
            options.check_arguments("TensorBoard", target=(place, target))
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("writing for TensorBoard needs it: pip install tensorboard") from error
            target = SummaryWriter(target)
        self.writer, self.prefix = target, prefix

    def __call__(self, call: int, figures: Mapping[str, float]) -> None:
        """Write the figures of one call."""
        for name, value in figures.items():
            self.writer.add_scalar(f"{self.prefix}/{name}", value, call)


def _forward_figures(solution: ik.Solution) -> dict[str, float]:
    leaves = ik.extend.trees.tree_flatten(solution.value)[0]
    shape = solution.residual_norm.shape
    squares: Any = sum(leaf.abs().square().reshape(*shape, -1).sum(-1) for leaf in leaves)
    relative = solution.residual_norm / squares.sqrt().clamp_min(torch.finfo(leaves[0].dtype).tiny)
    steps = solution.steps.double()
    return {
        "steps": float(steps.mean()),
        "steps_max": float(steps.max()),
        "residual": float(torch.nan_to_num(relative, nan=math.inf).max()),
        "converged": float(solution.converged.double().mean()),
        "unsolved": float((~solution.converged).sum()),
        "evaluations": float(solution.evaluations),
    }


def _backward_figures(solution: ik.Solution | None) -> dict[str, float]:
    if solution is None or solution.backward is None:
        return {}
    report = solution.backward
    return {
        "backward_steps": float(report.steps.double().mean()),
        "backward_residual": float(torch.nan_to_num(report.residual_norm, nan=math.inf).max()),
        "backward_converged": float(report.converged.double().mean()),
    }


def _batched(x: Any, batch: int) -> bool:
    leaves: Sequence[Any] = ik.extend.trees.tree_flatten(x)[0]
    return all(isinstance(t, torch.Tensor) and t.ndim > 0 and t.shape[0] == batch for t in leaves)
