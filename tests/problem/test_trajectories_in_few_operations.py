"""What a trajectory costs, counted: operations of an explicit step, steps and methods where an equation is stiff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit.foundation import compat
from implicitkit.foundation.faithful import faithful
from implicitkit.foundation.trees import Layout
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.linear.iterative.frugal import Frugal
from implicitkit.linear.steps_pattern import coloured_steps
from implicitkit.problem.trajectory.collocation import Collocation, Mesh
from implicitkit.problem.trajectory.explicit_steps import March
from implicitkit.problem.trajectory.integrators import auto, get_integrator

DOUBLE = {"dtype": torch.float64}


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Looks(TorchFunctionMode):
    """Counts what a mode of a solve around this one is asked to look at."""

    watches, count = True, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_explicit_step_takes_few_operations() -> None:
    """168 if every term of every stage is multiplied and added for itself, and norms one by one."""
    t = torch.linspace(0, 5, 4, **DOUBLE)
    with torch.no_grad(), Operations() as mode:
        walk = March(lambda t, y: y.neg(), t, torch.ones(3, 2, **DOUBLE), 1e-6)
        begun = mode.count
        walk.run()
    steps = len(walk.path[0]) - 1
    assert steps > 10
    assert mode.count - begun <= 66 * steps


def test_a_solve_around_it_looks_at_no_step() -> None:
    """Of some thousand operations."""
    with torch.no_grad(), Looks() as mode:
        ik.InitialValue(lambda t, y: y.neg(), (0.0, 5.0)).restate(torch.ones(3, 2, **DOUBLE), (), 1)
    assert mode.count <= 100


def test_forward_mode_follows_no_step() -> None:
    """Tangents of parameters were carried through the steps of the integrator, and torch's own functions replaced there."""
    seen = []

    def rhs(t: Tensor, y: Tensor, p: Tensor) -> Tensor:
        out = -p * y
        tangent = not compat.transforms_active() and compat.has_tangent(out)
        modes = torch.overrides._get_current_function_mode_stack()
        seen.append((tangent, any(type(mode).__name__ == "_Instead" for mode in modes)))
        return out

    p, y0 = torch.tensor(2.0, **DOUBLE), torch.ones(2, **DOUBLE)
    problem = ik.InitialValue(rhs, (0.0, 1.0))
    with faithful(), forward_ad.dual_level():
        out = ik.solve(problem, y0, (forward_ad.make_dual(p, torch.ones_like(p)),)).value[-1]
        found = forward_ad.unpack_dual(out).tangent
    assert torch.allclose(found, -torch.exp(-p) * y0, atol=1e-5)
    assert sum(tangent for tangent, _ in seen) < 10 < len(seen)
    assert sum(replaced for _, replaced in seen) < 0.6 * len(seen), len(seen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_variation_is_followed_without_mapping(dtype: torch.dtype) -> None:
    """From rest; mapped over points of time, each of its slopes took two to three times as long."""
    mapped = []

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        mapped.append(compat.transforms_active())
        return torch.stack((y[1], -4 * y[0].sin()))

    with torch.no_grad():
        ik.InitialValue(rhs, (0.0, 3.0)).restate(torch.zeros(2, dtype=dtype), (), 0)
    assert len(mapped) > 150
    assert sum(mapped) < 20


def advection(n: int) -> tuple[Callable[..., Tensor], Tensor]:
    """A pulse that is carried around a circle of ``n`` points and spreads."""
    x = torch.arange(n, **DOUBLE) / n

    def rhs(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
        before, after = y.roll(1, -1), y.roll(-1, -1)
        return k * (before + after - 2 * y) * n**2 - (y - before) * n

    return rhs, torch.exp(-100 * (x - 0.5) ** 2)


def test_a_stiff_trajectory_has_the_steps_of_an_implicit_method() -> None:
    """Not those, on top, that an explicit one took until it was seen that stability, not accuracy, ruled them."""
    rhs, y0 = advection(200)
    k = torch.tensor(0.01, **DOUBLE)
    slope = lambda t, y: rhs(t, y, k)  # noqa: E731
    t = torch.tensor([0.0, 0.5], **DOUBLE)
    with torch.no_grad():
        ours = auto(slope, t, y0[None], 1e-6)
        radau = get_integrator("scipy.Radau")(slope, t, y0[None], 1e-6)
    assert ours.stiff
    assert len(ours.edges) <= 1.5 * len(radau.edges)
    torch.testing.assert_close(ours.states[-1], radau.states[-1], rtol=0, atol=1e-5)


def test_a_stiff_trajectory_is_solved_by_factors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is its derivative; what SciPy says in between its steps is where the equations are solved from."""
    tried = []
    monkeypatch.setattr(Frugal, "solve", lambda *_, **__: tried.append(1))
    rhs, y0 = advection(100)
    k = torch.tensor(0.2, requires_grad=True, **DOUBLE)

    def end(k: Tensor) -> Tensor:
        return ik.solve(ik.InitialValue(rhs, (0.0, 0.2)), y0, (k,)).value[-1].square().sum()

    solution = ik.solve(ik.InitialValue(rhs, (0.0, 0.2)), y0, (k,))
    assert int(solution.steps) <= 1
    (found,) = torch.autograd.grad(solution.value[-1].square().sum(), k)
    assert not tried
    with torch.no_grad():
        wanted = (end(k + 1e-5) - end(k - 1e-5)) / 2e-5
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("steps", [20, 21])
@pytest.mark.parametrize("n", [17, 40, 120])
def test_what_is_known_of_steps_is_what_looking_at_all_of_them_finds(n: int, steps: int) -> None:
    coupling = sp.csr_matrix(sp.diags_array([np.ones(n - 1), np.ones(n), np.ones(n - 1)], offsets=[-1, 0, 1]) != 0)
    ready = coloured_steps(coupling, steps, 3, False)
    assert ready is not None
    known, looked_at = ready.analysed(analyse), analyse(sp.csr_matrix(ready.pattern))
    assert known.pairs is None and known.symmetric == looked_at.symmetric
    assert looked_at.reach / 1.5 <= known.reach <= 1.5 * looked_at.reach
    assert known.parts is not None and looked_at.parts is not None
    assert len(known.of_parts) == len(known.parts.bounds) - 1
    assert [a.pattern.shape[0] for a in known.of_parts] == np.diff(known.parts.bounds).tolist()
    values = np.random.default_rng(0).uniform(-1, 1, (1, ready.pattern.nnz))
    A, b = ready.matrix(values[0]) + 6 * sp.identity(ready.shape[0]), torch.randn(1, ready.shape[0], **DOUBLE)
    blocks = SparseBlocks(ready, sp.csr_matrix(A).data[None])
    for some, matrix in ((blocks, A), (blocks.T, A.T)):
        np.testing.assert_allclose(matrix @ some.solve(b)[0].numpy(), b[0].numpy(), rtol=1e-9, atol=1e-9)


def test_complex_states_keep_the_pairs_of_their_steps() -> None:
    n = 40
    two = sp.csr_matrix(np.ones((2, 2), dtype=bool))
    chain = sp.csr_matrix(sp.diags_array([np.ones(n), np.ones(n - 1)], offsets=[0, 1]) != 0)
    ready = coloured_steps(sp.csr_matrix(sp.kron(sp.csr_matrix(sp.kron(chain, two)), np.ones((4, 4)))), 10, 3, False)
    assert ready is not None and ready.analysed(analyse).pairs is not None


@pytest.mark.parametrize("known", [True, False])
def test_a_known_pattern_is_not_looked_for_again_however_many_steps_there_are(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("implicitkit.problem.trajectory.collocation._ENTRIES", 1)
    n = 32
    layout = Layout(torch.zeros(n, **DOUBLE), 0)
    mesh = Mesh.even(1, 20, torch.float64, torch.device("cpu"))
    coupling = sp.csr_matrix(sp.identity(n, dtype=bool)) if known else None
    found = Collocation(lambda t, y: -y, mesh, layout, 3, coupling=coupling).jac_sparsity
    assert (found == "auto") is not known
