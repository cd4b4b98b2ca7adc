"""Solving a composition by its blocks, one after another or at once, and what is reported of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.composition import concurrent
from implicitkit.composition.joint import Joint
from implicitkit.composition.nodes import Component, Nodes
from implicitkit.composition.stepper import ComponentStepper
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import check_options, one_of, part, positive
from implicitkit.problem.base import Problem
from implicitkit.solution import Status
from implicitkit.solver import auto
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.catalogue import check_serves, get_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.anderson import Anderson
from implicitkit.solver.method import Method

_MODES = ("sequential", "concurrent")
_SWEEPS = Anderson(memory=10, period=1)


@dataclass(frozen=True)
class Blocks(Solver):
    r"""Solve a composition component by component.

    Strongly connected components in topological order, each solved with everything it reads held at its solution, so that
    an acyclic composition is solved exactly as its layers would be one after another.  A component with a loop is swept:
    ``z_k <- f_k`` for its nodes in turn, each reading the newest states (Gauss-Seidel), the sweep accelerated as one
    fixed-point map by ``cyclic``.  Every node of every sample meets ``|f_k - z_k| <= atol / sqrt(K) + rtol |z_k|`` (``K``
    components), which implies the tolerance of the joint residual.  Nodes that cannot reach the output are left at their
    start, with derivative zero.  ``solution.blocks`` has evaluations per node and the depth.

    ``mode="concurrent"``: all components step at once, each with a memory of its own.  One that has converged is frozen,
    and one that reads others waits while their relative residuals are above ``gate`` or above ``gate`` times its own:
    nearly the evaluations of the sequential mode at less depth (two equal stacked layers: 1.04 times the evaluations, 0.65
    times the depth), for use where nodes run in parallel.  Where a map has
    several fixed points, the modes may find different ones, each exact: a downstream iteration that starts while its
    inputs still move can be led into another basin.

    When is the joint iteration (any other solver) better?  Where loops are tight, or launches and not arithmetic are what
    costs: it has the depth of one solve, but acceleration with one set of coefficients for all blocks takes more
    evaluations (two equal stacked layers: 1.3 times those of this solver, unequal ones more).

    A problem that is no composition is one block.

    Source: Tarjan (1972) for the components; Ortega & Rheinboldt (1970), chapter 7, for nonlinear Gauss-Seidel.

    Args:
        inner: the solver of single nodes: a registered name or a configured object; or a dict ``{node: solver}``
            (``"anderson"`` for those not in it).  Concurrent mode needs an iterative method for fixed points or roots.
        cyclic: the method that accelerates the sweep of a component with a loop; or a dict ``{node: method}``, where any
            node of the component may stand for it.  A sweep costs as much as all its nodes: hence ``Anderson(memory=10,
            period=1)``, which mixes in every sweep, also where plain ones are nearly as good.
        mode: ``"sequential"`` or ``"concurrent"``.
        gate: concurrent mode, positive: how much better than downstream upstream must be solved for downstream to step.

    Raises:
        ValueError: an unknown mode, a gate that is not positive, a name in a dict that is no node.
        CapabilityError: a solver of the wrong kind.
    """

    inner: Any = "anderson"
    cyclic: Any = _SWEEPS
    mode: str = "sequential"
    gate: float = 0.1
    name: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        solvers = part("solver", Solver, Mapping)
        check_options(self, inner=solvers, cyclic=solvers, mode=one_of(*_MODES), gate=positive())
        for option in (self.inner, self.cyclic):
            for name, solver in option.items() if isinstance(option, Mapping) else (("", option),):
                part("solver", Solver).check(f"the solver of node {name!r}" if name else "inner", solver, "Blocks: ")
                if isinstance(solver, Blocks):
                    raise ValueError("the solver of single blocks cannot be Blocks itself")
                if solver != "auto":
                    get_solver(solver)  # an unknown name is said here, not at the first solve

    @property
    def solves(self) -> str:  # type: ignore[override]
        return "fixed_point"

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        joint = f.problem
        self._check_names(joint)
        if not isinstance(joint, Joint):
            return self._inner(f, "", None).run(f, z0, options)
        if options.norm is not None:
            raise CapabilityError(
                "a solve by blocks judges every node by the 2-norm of its own part: leave norm= out, or solve it "
                "as a whole (solver='anderson')"
            )
        return _Run(self, joint, f, z0, options).run()

    # -------------------------------------------------------------------------------------------------------- choosing
    def _inner(self, f: Evaluations, node: str, size: int | None) -> Any:
        choice = self.inner.get(node, "anderson") if isinstance(self.inner, Mapping) else self.inner
        if isinstance(choice, str) and choice == "auto":
            return auto.choose(f.problem, f.batch, f.size if size is None else size)
        solver = get_solver(choice)
        check_serves(solver, f.problem, f.size if size is None else size)
        return solver

    def _method(self, solver: Any, role: str) -> Method:
        if not isinstance(solver, Method) or solver.solves not in ("fixed_point", "root"):
            name = getattr(solver, "name", "") or type(solver).__name__
            raise CapabilityError(
                f"{role} needs an iterative method for fixed points or roots, such as 'anderson', 'picard' or 'broyden'; "
                f"{name!r} is not one"
            )
        return solver

    def _cyclic(self, nodes: tuple[str, ...]) -> Method:
        choice = self.cyclic
        if isinstance(choice, Mapping):
            choice = next((choice[n] for n in nodes if n in choice), _SWEEPS)
        return self._method(get_solver(choice), f"the feedback loop {{{', '.join(nodes)}}}")

    def _check_names(self, problem: Problem) -> None:
        nodes = list(problem.graph) if isinstance(problem, Joint) else []
        for role, option in (("inner", self.inner), ("cyclic", self.cyclic)):
            unknown = [n for n in option if n not in nodes] if isinstance(option, Mapping) else []
            if unknown:
                raise ValueError(
                    f"{role} names {', '.join(map(repr, unknown))}, which is not a node; "
                    + (f"the nodes are {', '.join(map(repr, nodes))}" if nodes else "the problem is not a composition")
                )


class _Run:
    """One solve by blocks."""

    def __init__(self, config: Blocks, joint: Joint, f: Evaluations, z0: Tensor, options: Options) -> None:
        self.config, self.joint, self.f, self.z0 = config, joint, f, z0
        self.parts = Nodes(joint.map, f.system)
        self.states = self.parts.split(z0)
        wiring = joint.wiring
        self.live = [block for block in wiring.blocks if wiring.live.issuperset(block)]
        self.options = replace(options, atol=options.atol / len(self.live) ** 0.5)
        # one evaluation at the start has been made while the maps were prepared: the first of those that read no other
        self.probed = f.evaluations
        self.values = self.parts.split(f(z0)) if self.probed else {}
        self.evaluations = dict.fromkeys(joint.graph, self.probed)
        self.sample_evaluations = f.sample_evaluations * len(self.evaluations)
        self.norms: dict[str, Tensor] = {}
        self.status = torch.full((z0.shape[0],), int(Status.CONVERGED), dtype=torch.int64, device=z0.device)
        self.steps = torch.zeros_like(self.status)
        self.trace: list[Tensor] = []
        self.messages: list[str] = []
        self.stopped = False

    def run(self) -> BlockOutcome:
        depth = self._concurrently() if self.config.mode == "concurrent" else self._in_turn()
        square = torch.stack([norm.square() for norm in self.norms.values()]).sum(0)
        unsolved = frozenset(self.joint.graph) - self.joint.live
        report = BlockReport(
            self.evaluations,
            depth,
            {n: self.norms[n] for n in self.joint.graph if n in self.norms},
            tuple(n for n in self.joint.graph if n in unsolved),
        )
        return BlockOutcome(
            self.parts.join(self.states),
            square.sqrt(),
            self.steps,
            self.status,
            report.total,
            self.sample_evaluations,
            self.trace if self.options.trace else [],
            "; ".join(self.messages),
            report=report,
            unsolved=unsolved,
        )

    # ---------------------------------------------------------------------------------------------------- sequential
    def _in_turn(self) -> int:
        """Returns the depth: blocks that do not depend on each other could run at once."""
        reached: dict[str, int] = {}
        for nodes in self.live:
            cyclic = nodes in self.joint.wiring.cyclic
            block = self.parts.component(nodes, sweep=cyclic)
            took = self._swept(block) if cyclic else self._solved(block)
            longest = max((reached[p] for p in block.parents), default=0) + took
            reached.update(dict.fromkeys(nodes, longest))
            if self.stopped:
                self._give_up(nodes)
                break
        return max(reached.values())

    def _solved(self, block: Component) -> int:
        """A single node, by any solver, through its ``run``."""
        (name,) = block.nodes
        solver = self.config._inner(self.f, name, block.system.size)
        part = Evaluations(block.system, block.theta(self.states, self.f.theta), solver.solves)
        z = block.gather(self.states)
        primed = bool(self.values) and not block.parents
        if primed:
            part.prime(z, self.values[name])
        outcome = solver.run(part, z, self._watched(block))
        self.evaluations[name] += outcome.evaluations - primed
        self.sample_evaluations += outcome.sample_evaluations - primed * block.system.batch
        self._finish(block, outcome.z, outcome.residual_norm.unsqueeze(1), outcome.steps, outcome.status)
        self.trace += outcome.trace
        return outcome.evaluations

    def _swept(self, block: Component) -> int:
        """A component with a loop, by an accelerated sweep."""
        stepper = ComponentStepper(
            block,
            self.config._cyclic(block.nodes),
            block.gather(self.states),
            block.theta(self.states, self.f.theta),
            self.options,
            confirm=True,
        )
        watch = self._watched(block).callback
        while True:
            stepper.evaluate()
            stepper.settle()
            norm = torch.linalg.vector_norm(stepper.norm, dim=1)
            self.trace.append(norm)
            if watch is not None and stepper.taken and watch(stepper.taken, stepper.z, norm) is True:
                stepper.status = torch.where(stepper.running, int(Status.STOPPED), stepper.status)
            if not bool(stepper.running.any()):
                break
            stepper.advance(stepper.running)
        self._absorb(stepper)
        return stepper.depth

    def _watched(self, block: Component) -> Options:
        """The options of one block; a callback sees the joint state with this block's present part in it."""
        callback, before = self.options.callback, int(self.steps.max())
        if callback is None:
            return self.options

        def call(step: int, z: Tensor, norm: Tensor) -> bool:
            states = dict(self.states)
            block.scatter(z, states)
            self.stopped = self.stopped or callback(step + before, self.parts.join(states), norm) is True
            return self.stopped

        return replace(self.options, callback=call)

    def _give_up(self, last: tuple[str, ...]) -> None:
        """A callback has stopped the solve: the blocks after ``last`` stay at their start."""
        for nodes in self.live[self.live.index(last) + 1 :]:
            for name in nodes:
                self.norms[name] = torch.full_like(self.norms[last[0]], torch.nan)
            self.status = torch.where(self.status == int(Status.CONVERGED), int(Status.STOPPED), self.status)

    # ---------------------------------------------------------------------------------------------------- concurrent
    def _concurrently(self) -> int:
        steppers = []
        for nodes in self.live:
            cyclic = nodes in self.joint.wiring.cyclic
            block = self.parts.component(nodes, sweep=cyclic)
            method = (
                self.config._cyclic(nodes)
                if cyclic
                else self.config._method(self.config._inner(self.f, nodes[0], block.system.size), 'mode="concurrent"')
            )
            theta = block.theta(self.states, self.f.theta)
            stepper = ComponentStepper(block, method, block.gather(self.states), theta, self.options, confirm=cyclic)
            if self.values and not cyclic and not block.parents:
                stepper.f.prime(stepper.z, self.values[nodes[0]])
                self.evaluations[nodes[0]] -= 1  # counted there
                self.sample_evaluations -= block.system.batch
            steppers.append(stepper)
        depth = concurrent.run(
            steppers, self.parts, self.states, self.f.theta, self.options, self.config.gate, self.trace
        )
        for stepper in steppers:
            self._absorb(stepper)
        self.steps = torch.stack([s.steps for s in steppers]).amax(0)
        return depth

    # ------------------------------------------------------------------------------------------------------- results
    def _absorb(self, stepper: ComponentStepper) -> None:
        stepper.review()
        for name, count in stepper.evaluations.items():
            self.evaluations[name] += count
        self.sample_evaluations += stepper.sample_evaluations
        self._finish(stepper.block, stepper.z, stepper.norm, stepper.steps, stepper.status)

    def _finish(self, block: Component, z: Tensor, norms: Tensor, steps: Tensor, status: Tensor) -> None:
        """Keep a block's result; name the blocks at which samples failed first."""
        block.scatter(z, self.states)
        self.norms.update(zip(block.nodes, norms.unbind(1), strict=True))
        self.steps = self.steps + steps
        sound = self.status == int(Status.CONVERGED)
        new = sound & (status != int(Status.CONVERGED))
        if bool(new.any()):
            kind = "feedback loop" if len(block.nodes) > 1 else "node"
            name = f"{{{', '.join(block.nodes)}}}" if len(block.nodes) > 1 else repr(block.nodes[0])
            ends = {Status(int(s)) for s in status[new].unique()}
            how = ", ".join(sorted("diverged" if s is Status.NONFINITE else s.meaning for s in ends))
            many = f" in {int(new.sum())} of {len(new)} samples" if len(new) > 1 else ""
            hint = "; joint.analyse(state, inputs) shows whether the loop contracts" if kind == "feedback loop" else ""
            self.messages.append(f"{kind} {name}{many}: {how}{hint}")
        self.status = torch.where(sound, status, self.status)


@dataclass(frozen=True)
class BlockReport:
    """Figures of a solve by blocks (``solution.blocks``).

    Attributes:
        evaluations: node -> calls of its map, the one call at the start included that every solve makes.
        depth: the longest chain of calls that had to follow one another.
        residual_norm: node -> ``|f_k - z_k|_2`` of each sample, ``(batch,)``; nodes that were not solved have none.
        unsolved: nodes from which the output cannot be reached: left at their start.
    """

    evaluations: dict[str, int]
    depth: int
    residual_norm: dict[str, Tensor]
    unsolved: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Calls of all maps."""
        return sum(self.evaluations.values())

    def __str__(self) -> str:
        width = max(map(len, self.evaluations))
        lines = [f"{self.total} evaluations, depth {self.depth}"]
        for name, count in self.evaluations.items():
            norm = self.residual_norm.get(name)
            state = "not solved" if norm is None else f"residual {norm.max().item():.2e}"
            lines.append(f"  {name:<{width}}  {count:>6} evaluations  {state}")
        return "\n".join(lines)


@dataclass
class BlockOutcome(Outcome):
    """An outcome with its report; ``unsolved`` as there."""

    report: BlockReport | None = None
    unsolved: frozenset[str] = field(default_factory=frozenset)
