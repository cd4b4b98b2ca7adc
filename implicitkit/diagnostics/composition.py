r"""What the Jacobian of a composition says about how to solve it.

Over its strongly connected components in topological order the Jacobian ``J`` of the joint map is block lower triangular,
so that its spectrum is the union of the spectra of the diagonal blocks and its radius the largest of theirs.  Coupling
between components changes none of that, but it makes ``J`` non-normal: the norms ``|J^t|`` of its powers may grow
before they fall.  Inside a loop the coupling does change the spectrum: blocks that contract alone may not together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicitkit.composition.blocks import Blocks
from implicitkit.composition.gamma import Gamma
from implicitkit.composition.jacobian import JacobianByComponent
from implicitkit.composition.joint import Joint
from implicitkit.composition.nodes import Nodes
from implicitkit.composition.wiring import Wiring
from implicitkit.foundation import autodiff
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.foundation.trees import Layout
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.solving.verbs import solve
from implicitkit.system import System

_SAMPLES = 4  # of a batch, that are looked at
_DENSE = 1024  # unknowns a sample up to which matrices are formed


@dataclass(frozen=True)
class Cost:
    """What one way to solve takes: node evaluations, and how many must follow one another (``None``: it fails)."""

    evaluations: int | None
    depth: int | None

    def __str__(self) -> str:
        return (
            "does not converge" if self.evaluations is None else f"{self.evaluations} evaluations, depth {self.depth}"
        )


@dataclass(frozen=True)
class Analysis:
    """The Jacobian of a composition at a state, and what follows.

    Attributes:
        coupling: ``(consumer, producer) -> |df_consumer / dz_producer|_2``, the largest of the samples, for every edge, and
            for every node and itself.  Zero on the diagonal: the node is explicit.
        radius: spectral radius of each block, by its nodes. joint_radius: the largest of them, that of the joint map.
        growth: ``max_t |J^t|_2`` of the joint map, 1 if no power of ``J`` is larger than the identity.
        costs: predicted cost by mode: ``"joint"``, ``"sequential"``, ``"concurrent"``.
        recommendation: ``"joint"`` or ``"blocks"``, by evaluations. reason: a sentence. warnings: what to look at.
    """

    coupling: dict[tuple[str, str], float]
    radius: dict[tuple[str, ...], float]
    joint_radius: float
    growth: float
    costs: dict[str, Cost]
    recommendation: str
    reason: str
    warnings: tuple[str, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        lines = [f"spectral radius of the joint map {self.joint_radius:.3g}, largest power {self.growth:.3g}"]
        lines += [f"  block {{{', '.join(b)}}}: spectral radius {r:.3g}" for b, r in self.radius.items()]
        lines += [f"  {mode}: {cost}" for mode, cost in self.costs.items()]
        lines += [f"recommended: {self.recommendation}. {self.reason}"]
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


@despite_inference_mode
def analyse(
    joint: Joint,
    state: Mapping[str, Any],
    inputs: Any = (),
    *,
    batch_dims: int = 0,
    rtol: float = 1e-6,
    solver: Any = "anderson",
) -> Analysis:
    r"""Look at the Jacobian of a composition, best at its solution.

    The cost of each mode is predicted by running it on the composition linearised at the state ``z^*``,
    ``z_k <- f_k(z^*) + sum_j J_kj (z_j - z_j^*)``, from zero, to ``rtol``: this calls none of the maps.

    Args:
        joint: the composition. state: where to look. inputs, batch_dims: as in ``solve``; the first few samples count.
        rtol: the tolerance of the prediction. solver: the iterative method of the prediction.

    Warns:
        ConvergenceWarning: a feedback loop does not contract.

    Raises:
        ValueError: more unknowns a sample than matrices can be formed for (1024).
    """
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    layout = Layout(dict(state), batch_dims, name="state")
    if layout.size > _DENSE:
        raise ValueError(
            f"the analysis forms matrices, and {layout.size} unknowns a sample are more than {_DENSE}: analyse a smaller "
            "instance of the composition"
        )
    system = System.at(joint, layout, dict(state), inputs)
    parts = Nodes(joint.map, system)
    z = layout.pack(dict(state)).detach()
    blocks = JacobianByComponent(parts, z, [t.detach() for t in system.lifted.theta])
    matrices = _jacobian(blocks, parts)
    states = {name: part[:_SAMPLES] for name, part in parts.split(z).items()}
    values = {n: v.detach()[:_SAMPLES] for n, v in parts.split(blocks.join(blocks.values)).items()}
    coupling = {edge: torch.linalg.matrix_norm(J, 2).max().item() for edge, J in matrices.items()}
    radius = {block: _radius(_assemble(matrices, block, states)) for block in joint.blocks}
    costs = _costs(joint, matrices, states, values, rtol, solver)
    found = []
    for block, r in radius.items():
        name = f"{{{', '.join(block)}}}"
        if block in joint.wiring.cyclic and r >= 1:
            found.append(
                f"the feedback loop {name} does not contract here (spectral radius {r:.3g}): the plain iteration diverges, "
                "accelerated sweeps may not converge"
            )
        elif r >= 1:
            found.append(f"node {name} does not contract here (spectral radius {r:.3g})")
    for text in found:
        warn(text, ConvergenceWarning)
    growth = _growth(_assemble(matrices, tuple(n for block in joint.blocks for n in block), states))
    choice, reason = _recommend(costs)
    return Analysis(coupling, radius, max(radius.values()), growth, costs, choice, reason, tuple(found))


# ------------------------------------------------------------------------------------------------------------- details
def _jacobian(blocks: JacobianByComponent, parts: Nodes) -> dict[tuple[str, str], Tensor]:
    """``df_k / dz_j`` ``(samples, n_k, n_j)`` for every edge and every node with itself."""
    found = {}
    for i, component in enumerate(blocks.components):
        rows = [parts.sizes[n] for n in component]
        for j in (i, *blocks.parents[i]):
            product, point = blocks.products(i, j)[1], blocks.points[j]
            J = autodiff.matrix(_of_some(product), sum(rows), point)
            if i == j:
                J = J + torch.eye(sum(rows), dtype=J.dtype, device=J.device)  # the residual's has -I
            names = blocks.components[j]
            for name, band in zip(component, J.split(rows, 1), strict=True):
                reads = {*parts.wiring.parents[name], name}
                for other, block in zip(names, band.split([parts.sizes[n] for n in names], 2), strict=True):
                    if other in reads:
                        found[name, other] = block
    return found


def _of_some(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The product, of the first samples only."""
    return lambda w: product(w)[:_SAMPLES]


def _assemble(matrices: Mapping[tuple[str, str], Tensor], nodes: Sequence[str], states: Mapping[str, Tensor]) -> Tensor:
    """The Jacobian over some nodes, ``(samples, n, n)``."""

    def block(k: str, j: str) -> Tensor:
        J = matrices.get((k, j))
        return states[k].new_zeros(len(states[k]), states[k].shape[1], states[j].shape[1]) if J is None else J

    return torch.cat([torch.cat([block(k, j) for j in nodes], 2) for k in nodes], 1)


def _radius(J: Tensor) -> float:
    return torch.linalg.eigvals(J).abs().max().item()


def _growth(J: Tensor) -> float:
    """The largest of ``|J^t|_2`` over ``t = 0`` and ``t = 2^k, 3 2^k`` up to 384 (the norms vary slowly with ``t``)."""
    largest, power = 1.0, J
    for _ in range(8):
        for candidate in (power, power @ power @ power):
            if not bool(torch.isfinite(candidate).all()):
                return float("inf")
            largest = max(largest, torch.linalg.matrix_norm(candidate, 2).max().item())
        power = power @ power
    return largest


def _costs(
    joint: Joint,
    matrices: Mapping[tuple[str, str], Tensor],
    states: dict[str, Tensor],
    values: Mapping[str, Tensor],
    rtol: float,
    solver: Any,
) -> dict[str, Cost]:
    """Every mode run on the linearised composition."""
    wiring = joint.wiring
    reads = {name: tuple(p for p in wiring.parents[name] if p != name) for name in joint.graph}
    maps = {name: _linear(name, values[name], reads[name], matrices, states) for name in joint.graph}
    model = Joint(Gamma(maps, Wiring(reads, joint.output_node)))
    start = {name: torch.zeros_like(z) for name, z in states.items()}
    size = torch.cat(list(values.values()), 1).norm().item()
    costs = {}
    for mode, method in {
        "joint": solver,
        "sequential": Blocks(solver, cyclic=solver),
        "concurrent": Blocks(solver, cyclic=solver, mode="concurrent"),
    }.items():
        with torch.no_grad():
            s = solve(model, start, (), solver=method, batch_dims=1, rtol=rtol, atol=1e-3 * rtol * size or rtol,
                      on_failure="ignore")  # fmt: skip
        if not bool(s.converged.all()):
            costs[mode] = Cost(None, None)
        elif s.blocks is None:
            costs[mode] = Cost(s.evaluations * len(joint.graph), s.evaluations)
        else:
            costs[mode] = Cost(s.blocks.total, s.blocks.depth)
    return costs


def _linear(
    name: str,
    here: Tensor,
    reads: Sequence[str],
    matrices: Mapping[tuple[str, str], Tensor],
    states: Mapping[str, Tensor],
) -> Any:
    """``f_k(z^*) + sum_j J_kj (z_j - z_j^*)``, ``here`` the first."""
    pairs = [(matrices[name, p].mT, states[p]) for p in (name, *reads)]

    def linear(*known: Tensor) -> Tensor:
        total = here
        for z, (Jt, centre) in zip(known, pairs, strict=True):
            total = total + torch.bmm((z - centre).unsqueeze(1), Jt).squeeze(1)
        return total

    return linear


def _recommend(costs: Mapping[str, Cost]) -> tuple[str, str]:
    joint, blocks = costs["joint"], costs["sequential"]
    if blocks.evaluations is None:
        if joint.evaluations is None:
            return "blocks", "Neither way converges on the linearised maps; by blocks the failing component is named."
        return "joint", "By blocks the linearised composition does not converge; the joint iteration does."
    if joint.evaluations is None or blocks.evaluations <= joint.evaluations:
        against = "does not converge" if joint.evaluations is None else f"takes {joint.evaluations}"
        return "blocks", (
            f"By blocks {blocks.evaluations} evaluations are predicted, jointly it {against}; where nodes run in parallel, "
            f"the concurrent mode has depth {costs['concurrent'].depth}, the sequential one {blocks.depth}."
        )
    return "joint", (
        f"Jointly {joint.evaluations} evaluations in depth {joint.depth} are predicted, by blocks {blocks.evaluations} in "
        f"depth {blocks.depth}."
    )
