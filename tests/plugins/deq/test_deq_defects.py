"""The defects of a naive deep equilibrium layer, B1 to B27: the right behaviour of each, asserted.

The naive layer is the one found in tutorials: a loop that stops when the norm of the whole batch's step falls below an
absolute tolerance, and an ``autograd.Function`` that solves a dense system built across the batch.
"""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
import implicitkit_deq
from implicitkit_deq import DEQ, cells

ROOT = Path(__file__).parents[3]
F64 = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


class Tutorial(nn.Module):
    """The tutorials' cell, two dense layers on [z, x], made a contraction (its printed form is not one: B27)."""

    def __init__(self, features: int = 20, in_features: int = 10, norm: float = 0.7, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.first = nn.Linear(features + in_features, features, dtype=dtype)
        self.second = nn.Linear(features, features, dtype=dtype)
        with torch.no_grad():
            self.first.weight[:, :features].mul_(norm / torch.linalg.matrix_norm(self.first.weight[:, :features], 2))
            self.second.weight.mul_(1 / torch.linalg.matrix_norm(self.second.weight, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(torch.cat([z, x], -1))))


def unrolled(cell: Any, x: Tensor, features: int = 20, steps: int = 200) -> Tensor:
    z = x.new_zeros(len(x), features)
    for _ in range(steps):
        z = cell(z, x)
    return z


def dense_gradient(cell: Any, z: Tensor, x: Tensor, g: Tensor) -> Tensor:
    """dL/dx sample by sample from the dense Jacobian: (df/dx)^T (I - J)^{-T} g, solved by NumPy's LU."""
    rows = []
    for zi, xi, gi in zip(z.detach(), x.detach(), g, strict=True):
        one = lambda z, x: cell(z.unsqueeze(0), x.unsqueeze(0)).squeeze(0)  # noqa: E731
        J, Jx = torch.func.jacrev(one, (0, 1))(zi, xi)
        import numpy as np

        u = np.linalg.solve(np.eye(len(zi)) - J.detach().numpy().T, gi.numpy())
        rows.append(torch.from_numpy(Jx.detach().numpy().T @ u))
    return torch.stack(rows)


# ------------------------------------------------------------------------------------------------------------ B1: examples


def test_b1_there_are_examples_in_the_docs() -> None:
    """They are run, and what they print is compared, in ``tests/docs``."""
    assert "DEQ(" in (implicitkit_deq.__doc__ or "")
    page = (ROOT / "docs" / "migration_torchdeq.md").read_text()
    assert len(re.findall(r"```python\n(.*?)```", page, re.S)) >= 5


# ---------------------------------------------------------------------------------------------- B2-B5, B19: termination
@pytest.mark.parametrize("solver", ["picard", "anderson", "newton"])
@pytest.mark.parametrize("rtol", [1e-1, 1e-4, 1e-8])
def test_b2_the_point_returned_has_the_residual_reported(solver: str, rtol: float) -> None:
    cell = Tutorial()
    layer = DEQ(cell, (20,), solver=solver, rtol=rtol, atol=0.0)
    x = torch.randn(5, 10, dtype=F64)
    z = layer(x)
    true = (cell(z, x) - z).norm(dim=1)
    torch.testing.assert_close(layer.solution.residual_norm, true, rtol=1e-6, atol=1e-13)
    assert bool((true <= rtol * z.norm(dim=1)).all())


def test_b2_no_evaluation_is_wasted() -> None:
    calls = [0]

    def cell(z: Tensor, x: Tensor) -> Tensor:
        calls[0] += 1
        return 0.5 * torch.tanh(z) + x

    layer = DEQ(cell, (4,), solver="picard", rtol=1e-6, atol=0.0)
    x = torch.randn(3, 4, dtype=F64)
    layer(x)
    assert calls[0] == layer.solution.evaluations == int(layer.solution.steps.max()) + 1
    layer = DEQ(cell, (4,), solver="picard", atol=1e9)
    assert float(layer(x).abs().max()) == 0.0 and layer.solution.evaluations == 1, "z0 was good enough, judged once"


@pytest.mark.parametrize("solver", ["picard", "anderson", "newton"])
def test_b3_a_sample_alone_equals_itself_in_a_batch(solver: str) -> None:
    layer = DEQ(Tutorial(), (20,), solver=solver, rtol=1e-3, atol=0.0)
    x = torch.randn(64, 10, dtype=F64)
    together, steps = layer(x), layer.solution.steps
    for i in (0, 17, 63):
        torch.testing.assert_close(layer(x[i : i + 1])[0], together[i], rtol=1e-12, atol=1e-12)
        assert int(layer.solution.steps[0]) == int(steps[i])
    layer(x.repeat(64, 1))  # 4096 samples
    assert layer.solution.steps.max() == steps.max()


def test_b4_a_large_neighbour_changes_nothing() -> None:
    layer = DEQ(Tutorial(), (20,), rtol=1e-4, atol=0.0)
    x = torch.randn(4, 10, dtype=F64)
    z, steps = layer(x), layer.solution.steps
    x[3] *= 1000
    other = layer(x)
    torch.testing.assert_close(other[:3], z[:3], rtol=1e-12, atol=1e-12)
    assert layer.solution.steps[:3].tolist() == steps[:3].tolist()


def test_b4_the_criterion_is_relative() -> None:
    linear = lambda z, x: 0.5 * z + x  # noqa: E731
    steps = []
    for scale in (1e-6, 1.0, 1e6):
        layer = DEQ(linear, (4,), solver="picard", rtol=1e-6, atol=0.0)
        torch.manual_seed(0)
        layer(scale * torch.randn(3, 4, dtype=F64))
        steps.append(layer.solution.steps.tolist())
    assert steps[0] == steps[1] == steps[2]


def test_b5_divergence_is_loud_and_per_sample() -> None:
    cell = lambda z, x, a: a * z + x  # noqa: E731
    a = torch.tensor([[0.5], [3.0], [0.9]], dtype=F64)
    x = torch.ones(3, 4, dtype=F64)
    layer = DEQ(cell, (4,), solver="picard", rtol=1e-8)
    with pytest.raises(ik.ConvergenceError, match="1 of 3 samples did not converge") as caught:
        layer(x, a)
    assert caught.value.solution.converged.tolist() == [True, False, True]
    with pytest.warns(ik.ConvergenceWarning), layer.using(on_failure="warn"):
        z = layer(x, a)
    assert layer.solution.converged.tolist() == [True, False, True]
    assert bool(torch.isfinite(z).all()), "the best iterate, not the last"
    with layer.using(on_failure="ignore"):
        x[0] = torch.nan
        layer(x, a)
        assert layer.solution.status.tolist()[0] == ik.Status.NONFINITE and int(layer.solution.steps[0]) == 0


def test_b19_no_steps_at_all_is_refused_and_one_is_reported() -> None:
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        DEQ(Tutorial(), (20,), max_steps=0)
    layer = DEQ(Tutorial(), (20,), max_steps=1, on_failure="ignore", **TIGHT)
    x = torch.randn(2, 10, dtype=F64)
    z = layer(x)
    assert layer.solution.evaluations == 2 and layer.solution.steps.tolist() == [1, 1]
    torch.testing.assert_close(layer.solution.residual_norm, (layer.cell(z, x) - z).norm(dim=1))


# ----------------------------------------------------------------------------------------------------------- B6: memory
def test_b6_b26_saved_bytes_are_constant_in_the_steps() -> None:
    x = torch.randn(4, 10, dtype=F64)
    cell = Tutorial(norm=0.95)

    def saved(run: Any) -> int:
        total = [0]

        def pack(t: Tensor) -> Tensor:
            total[0] += t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run()
        return total[0]

    implicit, loops = [], []
    for steps in (5, 50, 500):
        layer = DEQ(cell, (20,), solver="picard", max_steps=steps, on_failure="ignore", rtol=1e-15)
        implicit.append(saved(lambda layer=layer: layer(x)))
        loops.append(saved(lambda steps=steps: unrolled(cell, x, steps=steps)))
    assert len(set(implicit)) == 1
    assert loops[2] > 50 * loops[0] and loops[2] > 50 * implicit[2]


# ----------------------------------------------------------------------------------------------- B7, B8: dtypes, shapes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64, torch.complex128], ids=str)
def test_b7_the_state_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    A = 0.2 * torch.randn(6, 6, dtype=F64).to(dtype)
    x = torch.randn(3, 6, dtype=dtype, requires_grad=True)
    layer = DEQ(lambda z, x: z @ A + x, (6,), solver="picard")
    z = layer(x)
    assert z.dtype == dtype
    z.abs().float().sum().backward()
    assert x.grad.dtype == dtype and bool(torch.isfinite(x.grad.abs()).all())
    layer = DEQ(lambda z, x: z @ A + x, (6,), atol=1e9)  # z0 itself is returned
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("shape", [(), (5,), (7, 5), (2, 3, 4, 5)], ids=str)
def test_b8_states_of_any_shape(shape: tuple[int, ...]) -> None:
    layer = DEQ(lambda z, x: 0.5 * torch.sin(z) + x, shape, **TIGHT)
    x = torch.randn(3, *shape, dtype=F64, requires_grad=True)
    z = layer(x)
    (g,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(g, 1 / (1 - 0.5 * torch.cos(z.detach())), rtol=1e-9, atol=1e-11)


# ----------------------------------------------------------------------------------------------------- B9-B18: gradients
def test_b9_b15_b16_parameters_have_the_true_gradient() -> None:
    cell = Tutorial()
    layer = DEQ(cell, (20,), rtol=1e-12, atol=1e-12, max_steps=500)
    x = torch.randn(4, 10, dtype=F64, requires_grad=True)
    z = layer(x)
    assert z.requires_grad
    z.square().sum().backward()
    exact = torch.autograd.grad(unrolled(cell, x).square().sum(), [*cell.parameters(), x])
    got = [*(p.grad for p in cell.parameters()), x.grad]
    assert all(float(g.norm()) > 0.1 for g in exact)
    torch.testing.assert_close(got, list(exact), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("linear_solver", ["lu", "gmres", "bicgstab", "lsmr", "neumann"])
def test_b10_b11_the_adjoint_is_transposed_and_of_one_sample(linear_solver: str) -> None:
    cell = Tutorial()  # J is far from symmetric
    options = {"terms": 2000} if linear_solver == "neumann" else {}
    solver = ik.linear.NeumannSeries(**options) if options else linear_solver
    layer = DEQ(cell, (20,), rule=ik.Implicit(linear_solver=solver, rtol=1e-11), **TIGHT)
    x = torch.randn(4, 10, dtype=F64, requires_grad=True)
    g = torch.randn(4, 20, dtype=F64)
    z = layer(x)
    (got,) = torch.autograd.grad(z, x, g)
    torch.testing.assert_close(got, dense_gradient(cell, z, x, g), rtol=1e-7, atol=1e-9)


def test_b12_samples_do_not_mix() -> None:
    layer = DEQ(Tutorial(20, 20), (20,), **TIGHT)  # batch = features: what a naive system confuses
    x = torch.randn(20, 20, dtype=F64, requires_grad=True)
    z = layer(x)
    for i in (0, 7, 19):
        (g,) = torch.autograd.grad(z[i].sum(), x, retain_graph=True)
        assert float(g[i].abs().max()) > 0
        g[i] = 0
        assert float(g.abs().max()) == 0.0


def test_b13_a_cell_without_further_arguments() -> None:
    theta = torch.tensor(0.3, dtype=F64, requires_grad=True)
    layer = DEQ(lambda z, x: torch.cos(theta * z) + 0 * x, (1,), **TIGHT)
    z = layer(torch.zeros(2, 1, dtype=F64))
    (g,) = torch.autograd.grad(z.sum(), theta)
    zi = z.detach()[0, 0]
    s = torch.sin(theta.detach() * zi)
    torch.testing.assert_close(g, 2 * (-s * zi) / (1 + s * theta.detach()))
    solution = ik.fixed_point(lambda z: torch.cos(theta * z), torch.zeros(1, dtype=F64), **TIGHT)  # none at all
    torch.testing.assert_close(torch.autograd.grad(solution.value.sum(), theta)[0], g / 2)


@pytest.mark.parametrize("solver", ["picard", "anderson", "newton"])
def test_b14_the_start_has_no_gradient(solver: str) -> None:
    layer = DEQ(Tutorial(), (20,), solver=solver, rtol=1e-2)
    x = torch.randn(3, 10, dtype=F64, requires_grad=True)
    z0 = torch.randn(3, 20, dtype=F64, requires_grad=True)
    g = torch.autograd.grad(layer(x, z0=z0).square().sum(), z0, allow_unused=True)[0]
    assert g is None or float(g.abs().max()) == 0.0


def test_b17_b18_any_argument_besides_tensors() -> None:
    def cell(z: Tensor, x: Tensor, power: int, options: dict[str, Any], index: Tensor, gain: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z) ** power + options["shift"] + x[:, index] * gain

    layer = DEQ(cell, (4,), **TIGHT)
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    gain = torch.ones(4, dtype=F64)  # a constant: needs no gradient, and gets none
    z = layer(x, 2, {"shift": 0.1, "name": None}, torch.tensor([0, 2, 4, 5]), gain)
    z.sum().backward()
    assert x.grad is not None and gain.grad is None
    assert x.grad[:, [1, 3]].abs().max() == 0.0 and bool((x.grad[:, [0, 2, 4, 5]] != 0).all())


# --------------------------------------------------------------------------------------- B20-B23: a good citizen of torch
def test_b20_freed_without_the_garbage_collector() -> None:
    layer = DEQ(Tutorial(), (20,), **TIGHT)
    x = torch.randn(3, 10, dtype=F64, requires_grad=True)
    layer(x)
    gc.collect()
    gc.disable()
    try:
        alive = []
        for backward in (True, False):
            for _ in range(10):
                z = layer(x)
                if backward:
                    z.sum().backward()
                alive.append(weakref.ref(z))
                del z
        assert sum(ref() is not None for ref in alive) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_b21_changes_in_place_before_backward_are_detected(what: str) -> None:
    layer = DEQ(Tutorial(), (20,), **TIGHT)
    x = torch.randn(3, 10, dtype=F64)
    z = layer(x)
    with torch.no_grad():
        (layer.cell.first.weight if what == "parameter" else x).mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_b22_second_derivatives() -> None:
    w = torch.tensor(0.6, dtype=F64, requires_grad=True)
    layer = DEQ(lambda z, x: torch.tanh(w * z + x), (1,), **TIGHT)
    x = torch.full((1, 1), 0.5, dtype=F64)
    (g,) = torch.autograd.grad(layer(x).sum(), w, create_graph=True)
    (h,) = torch.autograd.grad(g, w)

    def value(shift: float) -> float:
        v, z = float(w.detach()) + shift, 0.0
        for _ in range(300):
            z = float(torch.tanh(torch.tensor(v * z + 0.5, dtype=F64)))
        return z

    step = 1e-4
    difference = (value(step) - 2 * value(0.0) + value(-step)) / step**2
    assert abs(h.item() - difference) < 1e-5
    assert torch.autograd.gradgradcheck(lambda w: DEQ(lambda z, x: torch.tanh(w * z + x), (1,), **TIGHT)(x), (w,))


def test_b23_function_transforms() -> None:
    layer = DEQ(Tutorial(5, 3), (5,), **TIGHT)
    x = torch.randn(4, 3, dtype=F64)
    f = lambda x: layer(x)  # noqa: E731
    J = torch.func.jacrev(lambda x: unrolled(layer.cell, x, 5))(x)
    torch.testing.assert_close(torch.func.jacrev(f)(x), J, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(torch.func.jacfwd(f)(x), J, rtol=1e-8, atol=1e-10)
    t = torch.randn_like(x)
    _, tangent = torch.func.jvp(f, (x,), (t,))
    torch.testing.assert_close(tangent, torch.einsum("abcd,cd->ab", J, t), rtol=1e-8, atol=1e-10)
    stacked = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(f)(stacked), torch.stack([f(x), f(2 * x)]), rtol=1e-9, atol=1e-11)
    one = lambda x: layer(x.unsqueeze(0)).square().sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(one))(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(f(leaf).square().sum(), leaf)[0], rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------------------------------- B24, B25, B27: the rest
def test_b24_dropout_and_batch_norm_are_frozen() -> None:
    class Live(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.dropout = Tutorial(), nn.BatchNorm1d(20, dtype=F64), nn.Dropout(0.3)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return self.dropout(0.5 * self.norm(self.inner(z, x)))

    layer = DEQ(Live(), (20,), **TIGHT)
    x = torch.randn(6, 10, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = layer(x)
    assert bool(layer.solution.converged.all()) and layer.solution.evaluations < 60
    assert int(layer.cell.norm.num_batches_tracked) == 1
    assert 0 < int((z == 0).sum()) < z.numel(), "one mask, and it was applied"


def test_b25_no_matrix_across_the_batch_or_of_large_states() -> None:
    layer = DEQ(cells.MLP(8, 512, scale=0.5), rtol=1e-4, rule=ik.Implicit(rtol=1e-4))
    x = torch.randn(64, 8, requires_grad=True)
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, Tensor):
                    largest[0] = max(largest[0], t.numel())
            return out

    with Watch():
        layer(x).sum().backward()
    assert largest[0] <= 64 * 512 * 64, "a few dozen states, not 64 matrices of 512 x 512"


def test_b27_whether_a_cell_is_a_contraction_can_be_asked_and_does_not_decide() -> None:
    assert (
        float(
            implicitkit_deq.spectral_radius(
                Tutorial(), torch.zeros(4, 20, dtype=F64), (torch.ones(4, 10, dtype=F64),)
            ).max()
        )
        < 1
    )
    cell = cells.MLP(10, 20, scale=1.5, activation=nn.Identity(), dtype=F64)
    x = torch.randn(4, 10, dtype=F64)
    layer = DEQ(cell, solver="picard")
    with pytest.raises(ik.ConvergenceError, match="4 of 4"):
        layer(x)
    radius = implicitkit_deq.spectral_radius(cell, layer.solution.value, (x,))
    torch.testing.assert_close(radius, torch.full((4,), 1.5, dtype=F64))
    for solver in ("newton", ik.Anderson(memory=20)):
        with layer.using(solver=solver, **TIGHT):
            z = layer(x)
        torch.testing.assert_close(cell(z, x), z, rtol=1e-9, atol=1e-9)


def test_overflowing_scaled_losses_are_skipped_as_without_a_layer(scale_after: Callable[..., float]) -> None:
    scales = [scale_after(middle, 100.0, 0.01) for middle in (DEQ(cells.MLP(6, 6), rtol=1e-4), nn.Tanh())]
    assert scales[0] == scales[1] < 2.0**127


@pytest.mark.filterwarnings("ignore")
def test_a_traced_layer_is_refused() -> None:
    layer = DEQ(cells.MLP(4, 6))
    with pytest.raises(ik.CapabilityError, match="cannot be traced"):
        torch.jit.trace(layer, (torch.ones(2, 4),))
