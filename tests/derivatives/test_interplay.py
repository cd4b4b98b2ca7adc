"""Solves inside everything else: other solves, torch.compile, DDP, autocast, checkpoints, threads, copies."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problems_table import CASES, inputs, oracle, ours
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik

TIGHT = {"rtol": 1e-13, "atol": 1e-13}


class Cell(nn.Module):
    """z = tanh(W z + U x + b), W scaled to a contraction."""

    def __init__(self, dim: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.W = nn.Linear(dim, dim, dtype=dtype)
        self.U = nn.Linear(dim, dim, dtype=dtype)
        with torch.no_grad():
            self.W.weight.mul_(0.5 / torch.linalg.matrix_norm(self.W.weight, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


def _unrolled(cell: nn.Module, x: Tensor, steps: int = 80) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(steps):
        z = cell(z, x)
    return z


# -------------------------------------------------------------------------------------------------------- nested solves
def _inner_solution(y: Tensor, t: Tensor, W: Tensor, explicit: bool) -> Tensor:
    if explicit:
        return ik.fixed_point(lambda u, y, W: torch.tanh(0.3 * W @ u + y), torch.zeros_like(y), (y, W), **TIGHT).value
    return ik.fixed_point(lambda u: torch.tanh(0.3 * W @ u + y), torch.zeros_like(y), **TIGHT).value


def _nested(W: Tensor, t: Tensor, explicit: bool) -> Tensor:
    """z + u(z, W)/2 = t where u solves its own fixed point at every z: a solve inside the residual of another."""

    def residual(z: Tensor, W_: Tensor, t_: Tensor) -> Tensor:
        return z + 0.5 * _inner_solution(z, t_, W_ if explicit else W, explicit) - (t_ if explicit else t)

    return ik.root(residual, torch.zeros_like(t), (W, t), **TIGHT).value


def _nested_flat(W: Tensor, t: Tensor) -> Tensor:
    """The same as one joint root, by native Newton steps."""
    n = len(t)

    def joint(zu: Tensor) -> Tensor:
        z, u = zu[:n], zu[n:]
        return torch.cat([z + 0.5 * u - t, torch.tanh(0.3 * W @ u + z) - u])

    zu = torch.zeros(2 * n, dtype=t.dtype)
    for _ in range(12):
        zu = zu - torch.linalg.solve(jacrev(joint)(zu), joint(zu))
    return zu[:n]


NESTED_TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "value": lambda f, W, t: f(W, t),
    "grad": lambda f, W, t: grad(lambda W: f(W, t).pow(2).sum())(W),
    "jacfwd": lambda f, W, t: jacfwd(lambda t: f(W, t))(t),
    "hessian": lambda f, W, t: hessian(lambda t: f(W, t).pow(2).sum())(t),
    "vmap": lambda f, W, t: vmap(lambda t: f(W, t))(torch.stack([t, 2 * t])),
    "vmap_grad": lambda f, W, t: vmap(grad(lambda t: f(W, t).sum()))(torch.stack([t, 2 * t])),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("explicit", [True, False], ids=["arguments", "closures"])
@pytest.mark.parametrize("name", NESTED_TRANSFORMS)
def test_nested_solves(name: str, explicit: bool) -> None:
    _, W, t = inputs()
    transform = NESTED_TRANSFORMS[name]
    got = transform(lambda W, t: _nested(W, t, explicit), W, 0.3 * t)
    want = transform(_nested_flat, W, 0.3 * t)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("explicit", [True, False], ids=["arguments", "closures"])
def test_nested_solves_backward_twice(explicit: bool) -> None:
    _, W, t = inputs()
    results = []
    for solve in (lambda W, t: _nested(W, t, explicit), _nested_flat):
        W_, t_ = W.clone().requires_grad_(), (0.3 * t).requires_grad_()
        g = torch.autograd.grad(solve(W_, t_).pow(2).sum(), (W_, t_), create_graph=True)
        results.append((*g, *torch.autograd.grad(g[0].pow(2).sum() + g[1].sum(), (W_, t_))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-7, atol=1e-9)


def _cube_root(z: Tensor, t: Tensor, explicit: bool) -> Tensor:
    """``y^3 + y = z + t``: the Jacobian of this inner solve depends on neither ``z`` nor ``t``."""
    if explicit:
        return ik.root(lambda y, z, t: y**3 + y - z - t, torch.zeros_like(t), (z, t), **TIGHT).value
    return ik.root(lambda y: y**3 + y - z - t, torch.zeros_like(t), **TIGHT).value


@pytest.mark.one_in(2)
@pytest.mark.parametrize("explicit", [True, False], ids=["arguments", "closures"])
@pytest.mark.parametrize("second", [jacrev, jacfwd])
@pytest.mark.parametrize("first", [jacrev, jacfwd])
def test_second_derivative_of_a_nested_solve_with_a_constant_jacobian(
    first: Callable[..., Any], second: Callable[..., Any], explicit: bool
) -> None:
    def nested(t: Tensor) -> Tensor:  # z = y / 2 with y^3 + y / 2 = t
        return ik.fixed_point(lambda z, t: _cube_root(z, t, explicit) / 2, torch.zeros_like(t), (t,), **TIGHT).value

    y = torch.tensor([0.5, -0.3], dtype=torch.float64)
    got = second(first(nested))(y**3 + y / 2).diagonal(dim1=0, dim2=1).diagonal()
    torch.testing.assert_close(got, -3 * y / (3 * y**2 + 0.5) ** 3, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad, hessian], ids=["backward", "grad", "hessian"])
def test_functional_call_hands_a_module_its_own_parameters(transform: Callable[..., Any]) -> None:
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(0.3)
    z0 = torch.zeros(3, dtype=torch.float64)
    weight = layer.weight

    def loss(bias: Tensor, owned: bool) -> Tensor:
        parameters = {"weight": weight, "bias": bias}
        if owned:
            cell = lambda z: torch.tanh(torch.func.functional_call(layer, parameters, (z,)))  # noqa: E731
        else:
            cell = lambda z: torch.tanh(weight @ z + bias)  # noqa: E731
        return ik.fixed_point(cell, z0, **TIGHT).value.sum()

    results = []
    for owned in (True, False):
        value = transform(lambda b, owned=owned: loss(b, owned))(layer.bias)
        results.append(torch.autograd.grad(value.sum(), (layer.bias, layer.weight)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------- tensors that only the solution's branch uses
def _other_branch(b: Tensor, scale: Any = 1.0) -> Tensor:
    """``z^2 = b``, but far from the solution ``z = 4``: at the start the function does not use ``b``."""

    def residual(z: Tensor, scale: Any) -> Tensor:
        return (4.0 - z) * scale if z.item() < 1.0 else (z**2 - b) * scale

    return ik.root(residual, torch.tensor(0.5, dtype=torch.float64), (scale,), solver="newton").value


BRANCHES: dict[str, Callable[[Tensor], Any]] = {
    "nothing else tracked": lambda b: _other_branch(b.requires_grad_()),
    "something else tracked": lambda b: torch.autograd.grad(_other_branch(b.requires_grad_(), b * 1.0), b),
    "grad": torch.func.grad(_other_branch),
    "grad, something else": torch.func.grad(lambda b: _other_branch(b, b * 1.0)),
    "jvp": lambda b: torch.func.jvp(_other_branch, (b,), (b,)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_tensor_used_in_a_branch_that_the_start_does_not_take(name: str) -> None:
    with pytest.raises(ik.CapturedTensorError, match=r"at the solution .* branches on values.* Pass that tensor"):
        BRANCHES[name](torch.tensor(3.0, dtype=torch.float64))


def test_branching_function_with_its_tensors_as_arguments() -> None:
    b = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    residual = lambda z, b: 4.0 - z if z.item() < 1.0 else z**2 - b  # noqa: E731
    solution = ik.root(residual, torch.tensor(0.5, dtype=torch.float64), (b,), solver="newton")
    torch.testing.assert_close(torch.autograd.grad(solution.value, b)[0], 0.5 / b.detach().sqrt())
    calls = []
    solution = ik.root(lambda z: calls.append(1) or residual(z, 3.0), torch.tensor(0.5), solver="newton")
    assert solution.evaluations == len(calls)


def test_solution_of_one_solve_feeds_another() -> None:
    cell, other = Cell(), Cell()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    z = ik.fixed_point(cell, torch.zeros_like(x), (x,), batch_dims=1, **TIGHT).value
    y = ik.fixed_point(other, torch.zeros_like(z), (z,), batch_dims=1, **TIGHT).value
    want = _unrolled(other, _unrolled(cell, x))
    leaves = [x, *cell.parameters(), *other.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y.pow(2).sum(), leaves),
        torch.autograd.grad(want.pow(2).sum(), leaves),
        rtol=1e-8,
        atol=1e-10,
    )


# ------------------------------------------------------------------------------------------------------- torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_around_the_call(backend: str) -> None:
    cell = Cell()
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        z = ik.fixed_point(cell, torch.zeros_like(x), (x.sin(),), batch_dims=1, **TIGHT).value
        return (z.cos() ** 2).sum()

    compiled = torch.compile(loss, backend=backend)
    results = []
    for f in (compiled, loss):
        cell.zero_grad()
        x_ = x.clone().requires_grad_()
        f(x_).backward()
        results.append([x_.grad, *(p.grad.clone() for p in cell.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
    assert all(g.abs().sum() > 0 for g in results[0])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled", ["call", "function"])
@pytest.mark.parametrize("kind", ["complex", "mixed"])
def test_compile_with_complex_states(kind: str, compiled: str) -> None:
    x = torch.tensor([1.2 + 0.1j, 0.8 - 0.3j], dtype=torch.complex128)
    w = torch.tensor([1.0 + 0.2j, 0.9 - 0.1j], dtype=torch.complex128)
    start = {"complex": torch.ones_like(w), "mixed": {"z": torch.ones_like(w), "r": torch.ones(1, dtype=torch.float64)}}

    def residual(z: Any, w: Tensor) -> Any:
        return z * w - x if kind == "complex" else {"z": z["z"] * w - x, "r": z["r"] - 2.0}

    f = torch.compile(residual, backend="eager") if compiled == "function" else residual

    def loss(w: Tensor) -> Tensor:
        z = ik.root(f, start[kind], (w,)).value
        return ((z if kind == "complex" else z["z"]).abs() ** 2).sum()

    leaf, again = w.clone().requires_grad_(), w.clone().requires_grad_()
    (torch.compile(loss, backend="eager") if compiled == "call" else loss)(leaf).backward()
    ((x / again).abs() ** 2).sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad, rtol=1e-8, atol=1e-10)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compile_of_a_transform() -> None:
    case, (z0, W, b) = CASES["root"], inputs()
    f = lambda b: ours(case, "newton")(z0, W, b).pow(2).sum()  # noqa: E731
    got = torch.compile(lambda b: grad(f)(b), backend="eager")(b)
    torch.testing.assert_close(got, grad(lambda b: oracle(case)(z0, W, b).pow(2).sum())(b), rtol=1e-8, atol=1e-10)
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------- precision, contexts
def test_autocast_bfloat16() -> None:
    cell = Cell(16, torch.float32)
    x = torch.randn(8, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = ik.fixed_point(cell, torch.zeros(8, 16), (x,), batch_dims=1)
        loss = solution.value.float().pow(2).sum()
    loss.backward()
    assert solution.value.dtype == torch.float32
    assert bool(solution.converged.all())
    exact = torch.autograd.grad(_unrolled(cell, x).pow(2).sum(), x)[0]
    assert (x.grad - exact).norm() / exact.norm() < 0.05


_M = torch.linspace(-1, 2, 16).reshape(4, 4)
_POINTS, _TURN = torch.linspace(-1, 2, 21).reshape(7, 3).sin(), ik.manifold.SO3()
#: parts of ours that multiply matrices, in single precision
OURS: dict[str, Callable[[], Tensor]] = {
    "cone": lambda: ik.project.psd_cone()(_M + _M.T),
    "cone, in a solve": lambda: (
        ik.argmin(
            lambda z: (z - _M - _M.T).square().sum(), torch.eye(4), project=ik.project.psd_cone(), rtol=1e-5, atol=0.0
        ).value
    ),
    "nuclear norm": lambda: ik.prox.nuclear(0.3)(_M),
    "rotation": lambda: _TURN.retract(torch.eye(3), torch.tensor([0.3, 0.4, -0.5])),
    "rotation, in a solve": lambda: (
        ik.least_squares(
            lambda R, a: (a[:, None] * R).sum(-1) - a.roll(1, 1),
            torch.eye(3),
            (_POINTS,),
            manifold=_TURN,
            rtol=1e-4,
            atol=1e-5,
        ).value
    ),
    "trajectory": lambda: ik.solve(ik.InitialValue(lambda t, y: -y, (0.0, 1.0)), torch.tensor([3.0, 7.0])).value,
    "stiff": lambda: (
        ik.solve(
            ik.InitialValue(lambda t, y: -torch.tensor([1.0, 1e4]) * y, (0.0, 1.0)), torch.tensor([9.0, 7.0])
        ).value
    ),
    "event": lambda: ik.solve(
        ik.InitialValue(lambda t, y: -y, (0.0, 9.0), event=lambda t, y: y[0] - 1),
        torch.tensor([3.0, 7.0]),
        rtol=1e-5,
        atol=0.0,
    ).value["time"],
}


@pytest.mark.parametrize("name", OURS)
def test_autocast_reaches_no_part_of_ours(name: str) -> None:
    plain = OURS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = OURS[name]()
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, plain, rtol=3e-5, atol=3e-5)


def test_autocast_casts_the_right_hand_side_of_a_trajectory() -> None:
    A = torch.tensor([[-1.0, 0.3], [0.2, -0.7]], requires_grad=True)
    start, seen = torch.tensor([3.0, 7.0]), []

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        seen.append((A @ y).dtype)
        return A @ y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        end = ik.solve(ik.InitialValue(rhs, (0.0, 1.0)), start).value[-1]
    assert set(seen) == {torch.bfloat16} and end.dtype == torch.float32
    exact = torch.linalg.matrix_exp(A) @ start
    torch.testing.assert_close(end, exact, rtol=2e-2, atol=0.0)
    (found,), (expected,) = (torch.autograd.grad(v.sum(), A) for v in (end, exact))
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_state(dtype: torch.dtype) -> None:
    cell = Cell(8, torch.float32).to(dtype)
    x = torch.randn(5, 8, dtype=dtype, requires_grad=True)
    solution = ik.fixed_point(cell, torch.zeros_like(x), (x,), batch_dims=1, solver="picard")
    solution.value.float().pow(2).sum().backward()
    exact = _unrolled(copy.deepcopy(cell).float(), x.detach().float())
    assert solution.value.dtype == dtype
    assert (solution.value.float() - exact).abs().max() < 20 * torch.finfo(dtype).eps ** (2 / 3)
    assert bool(torch.isfinite(x.grad).all())


def test_checkpoint_around_a_module_solve() -> None:
    cell = Cell()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    f = lambda x: ik.fixed_point(cell, torch.zeros_like(x), (x,), batch_dims=1, **TIGHT).value  # noqa: E731
    z = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    leaves = [x, *cell.parameters()]
    got = torch.autograd.grad(z.pow(2).sum(), leaves)
    want = torch.autograd.grad(_unrolled(cell, x).pow(2).sum(), leaves)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_parameter_changed_before_backward_is_detected() -> None:
    cell = Cell()
    x = torch.randn(3, 4, dtype=torch.float64)
    z = ik.fixed_point(cell, torch.zeros_like(x), (x,), batch_dims=1).value
    with torch.no_grad():
        cell.W.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_threads_share_a_module() -> None:
    cell = Cell()
    xs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(4)]
    results: list[Tensor | None] = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = ik.fixed_point(cell, torch.zeros_like(xs[i]), (xs[i],), batch_dims=1, **TIGHT).value.detach()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x, got in zip(xs, results, strict=True):
        torch.testing.assert_close(got, _unrolled(cell, x).detach(), rtol=1e-9, atol=1e-11)


DDP = """
import os, sys, torch, torch.distributed as dist
sys.path[:0] = {paths!r}
from test_interplay import Cell
import implicitkit as ik

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
    def forward(self, x):
        return ik.fixed_point(self.cell, torch.zeros_like(x), (x,), batch_dims=1, rtol=1e-13, atol=1e-13).value

def loss_gradients(model, x):
    model(x).pow(2).sum(1).mean().backward()
    return [p.grad for p in model.parameters()]

if __name__ == "__main__":
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(6, 4, dtype=torch.float64)
    alone = [g.clone() for g in loss_gradients(layer, x)]
    layer.zero_grad()
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    parallel = torch.nn.parallel.DistributedDataParallel(layer)
    together = loss_gradients(parallel, x[rank * 3 : rank * 3 + 3])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-11)
    dist.barrier()
    dist.destroy_process_group()
    print("gradients equal on rank", rank, flush=True)
    os._exit(0)  # threads of gloo do not always survive the interpreter's own way out
"""


@pytest.mark.slow
def test_ddp_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    here = Path(__file__).parent
    script.write_text(DDP.format(paths=[str(here), str(here.parent / "tables")]))
    command = [sys.executable, str(script)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [w.communicate(timeout=300)[0] for w in workers]
    for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0, output
        assert f"gradients equal on rank {rank}" in output
