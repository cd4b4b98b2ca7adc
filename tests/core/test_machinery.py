"""PyTorch's machinery around a solve: dropped rows, callbacks, inference mode, forks, scaled losses, a user's own solver."""

from __future__ import annotations

import collections
import gc
import itertools
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import implicitkit as ik
from implicitkit import extend

D = torch.float64


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=D)


# ------------------------------------------------------------------------------------------------------------ dropped rows
X = torch.tensor([[0.6, 0.7], [1.2, 0.5], [0.9, 1.3]], dtype=D)


def _uneven(z: Tensor, x: Tensor) -> Tensor:
    return ((z - x) ** 2 * torch.tensor([1.0, 50.0], dtype=D)).sum(-1)


SETS: dict[str, dict[str, Any]] = {
    "bounds": {"bounds": (0.9, 1.4)},
    "bounds of one sample's shape": {"bounds": (torch.tensor([0.9, 0.6], dtype=D), None)},
    "bounds of each sample": {"bounds": (torch.tensor([[0.9], [0.4], [1.1]], dtype=D).expand(3, 2), None)},
    "project": {"project": ik.project.simplex()},
    "prox": {"prox": ik.prox.l1(0.1)},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ["auto", "proximal_gradient", "projected_gradient"])
@pytest.mark.parametrize("name", SETS)
def test_sets_where_one_sample_converges_first(name: str, solver: str) -> None:
    options = {"solver": solver, "batch_dims": 1, **SETS[name]}
    dropped = ik.argmin(_uneven, zeros(3, 2), (X,), in_dims=(0,), **options).value
    kept = ik.argmin(_uneven, zeros(3, 2), (X,), **options).value
    torch.testing.assert_close(dropped, kept, rtol=0, atol=1e-7)


@pytest.mark.parametrize("verb", ["fixed_point", "root", "steady_state"])
@pytest.mark.parametrize("rows", ["wrong", "right"])
def test_captured_rows_that_are_not_those_left(rows: str, verb: str) -> None:
    """``fixed[: len(z)]`` are the first rows, whichever have converged; found through the function that is called, too."""
    g = torch.Generator().manual_seed(0)
    W = torch.diag(torch.linspace(0.05, 0.95, 8, dtype=D))
    fixed = torch.linspace(0.01, 1, 6, dtype=D)[:, None] * torch.randn(6, 8, generator=g, dtype=D)
    y = torch.randn(6, 8, generator=g, dtype=D)
    cell = lambda z, y: torch.tanh(z @ W + (fixed[: len(z)] if rows == "wrong" else fixed.sum()) + 0 * y)  # noqa: E731
    f = cell if verb == "fixed_point" else lambda z, y: cell(z, y) - z
    solver = {"fixed_point": "picard"}.get(verb, "auto")
    run = lambda: getattr(ik, verb)(f, zeros(6, 8), (y,), batch_dims=1, in_dims=(0,), solver=solver)  # noqa: E731
    if rows == "wrong":
        with pytest.raises(ValueError, match=r"were dropped .* left the function has other values.*'fixed'"):
            run()
    else:
        z = run().value
        torch.testing.assert_close(cell(z, y), z, rtol=0, atol=1e-8)


@pytest.mark.parametrize("leaves_one", [False, True], ids=["fails", "broadcasts"])
def test_a_captured_tensor_that_carries_the_batch_is_named(leaves_one: bool) -> None:
    g = torch.Generator().manual_seed(0)
    W = torch.diag(torch.linspace(0.05, 0.95, 8, dtype=D))
    rows = 2 if leaves_one else 6
    fixed = torch.linspace(0.01, 1, rows, dtype=D)[:, None] * torch.randn(rows, 8, generator=g, dtype=D)
    if leaves_one:
        fixed[0] = 0
    y = torch.randn(rows, 8, generator=g, dtype=D)
    f = lambda z, y: torch.tanh(z @ W + fixed + 0 * y)  # noqa: E731
    with pytest.raises((RuntimeError, ValueError), match=r"were dropped .* captures carries the batch .*'fixed'"):
        ik.fixed_point(f, zeros(rows, 8), (y,), batch_dims=1, in_dims=(0,), solver="picard")
    ik.fixed_point(lambda z, y, fixed: torch.tanh(z @ W + fixed + 0 * y), zeros(rows, 8), (y, fixed), batch_dims=1,
                   in_dims=(0, 0), solver="picard")  # fmt: skip


LAST = torch.linspace(0, 3, 16, dtype=D).view(8, 2)  # one row a sample


class Codes(torch.nn.Module):
    """A parameter with one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.nn.Parameter(LAST)

    def forward(self, z: Tensor, a: Tensor) -> Tensor:
        return a * torch.cos(z) + self.codes[: len(z)]


# what does not name a tensor of so many rows
UNNAMED: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "a module's parameter": Codes,
    "in a list": lambda: (lambda held: lambda z, a: a * torch.cos(z) + held[0][: len(z)])([LAST]),
    "in a dict": lambda: (lambda held: lambda z, a: a * torch.cos(z) + held["x"][: len(z)])({"x": LAST}),
    "an array": lambda: (lambda held: lambda z, a: a * torch.cos(z) + torch.from_numpy(held[: len(z)]))(LAST.numpy()),
    "numbers": lambda: (lambda held: lambda z, a: a * torch.cos(z) + torch.tensor(held[: len(z)], dtype=D))(
        LAST.tolist()
    ),
    "a default": lambda: lambda z, a, held=LAST: a * torch.cos(z) + held[: len(z)],
    "counted rows": lambda: lambda z, a: a * torch.cos(z) + 0.2 * torch.arange(2 * len(z), dtype=D).view(-1, 2),
    "an argument that is shared": lambda: lambda z, a: a * torch.cos(z) + a.mean(),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_rows_that_no_name_tells_of_are_found_by_their_values(name: str) -> None:
    function = UNNAMED[name]()
    a = torch.cat([torch.full((4,), 0.01, dtype=D), torch.linspace(0.5, 0.9, 4, dtype=D)])[:, None].expand(8, 2)
    run = lambda in_dims: ik.fixed_point(  # noqa: E731
        function, zeros(8, 2), (a,), batch_dims=1, in_dims=in_dims, solver="picard", rtol=1e-12
    )
    with pytest.raises(
        ValueError, match=r"4 of 8 rows have converged and were dropped .* left the function has other values"
    ):
        run(0)
    z = run(None).value
    torch.testing.assert_close(function(z, a), z, rtol=0, atol=1e-8)


class Turns:
    """What a map adds: other numbers from one call to the next."""

    def __init__(self, values: list[float]) -> None:
        self.values = itertools.cycle(values)

    def __call__(self, z: Tensor, a: Tensor) -> Tensor:
        return a * torch.cos(z) + next(self.values)


@pytest.mark.parametrize("values", [[0.0, 0.3], [0.0, 0.3, 0.5], [0.0, 0.0, 0.3, 0.0, 0.0, 0.5, 0.1]], ids=str)
def test_a_function_that_changes_between_calls_is_not_blamed_on_rows_that_were_dropped(values: list[float]) -> None:
    rows = torch.tensor([0.0, 0.0, 0.7, 0.9], dtype=D)[:, None]

    def stop(step: int, z: Tensor, residual_norm: Tensor) -> bool:
        return step > 60

    with pytest.raises((ValueError, ik.ConvergenceError), match=r"same point differ by .* counts its calls"):
        ik.fixed_point(
            Turns(values), zeros(4, 1), (rows,), batch_dims=1, in_dims=0, solver="picard", atol=0.35, callback=stop
        )


def test_a_function_is_asked_once_whether_its_rows_are_independent() -> None:
    calls = collections.Counter[int]()

    def f(z: Tensor, a: Tensor) -> Tensor:
        calls[len(z)] += 1
        return a * torch.cos(z)

    a = torch.cat([torch.full((4,), 0.01, dtype=D), torch.linspace(0.5, 0.9, 4, dtype=D)])[:, None].expand(8, 2)
    spent = []
    for _ in range(4):
        before = calls.total()
        solution = ik.fixed_point(f, zeros(8, 2), (a,), batch_dims=1, in_dims=0, solver="picard")
        spent.append(calls.total() - before - solution.evaluations)
    # of its rows, at the first drop, and at the first drop in a solve; then never again
    assert 4 in calls and spent == [4, 1, 0, 0]


# ------------------------------------------------------------------------------------------------- real and complex leaves
@pytest.mark.parametrize("kinds", ["rc", "cr", "crc"])
def test_complex_leaves_beside_an_odd_number_of_reals(kinds: str) -> None:
    start = {f"{i}": zeros(2).to(torch.complex128) if k == "c" else zeros(1) for i, k in enumerate(kinds)}

    def f(z: dict[str, Any], a: Tensor) -> dict[str, Any]:
        size = sum(leaf.abs().sum() for leaf in z.values())
        of = lambda x: 0.3 * x.conj() * a + a + 0.05 * size if x.is_complex() else (0.2 * x + 0.1 * size + a.imag.sum())  # noqa: E731
        return {k: of(x) for k, x in z.items()}

    a = torch.tensor([0.3 + 0.1j, 0.4 - 0.2j], dtype=torch.complex128, requires_grad=True)
    unrolled = start
    for _ in range(100):
        unrolled = f(unrolled, a)
    loss = lambda z: sum((x * (1 + 2j)).real.sum() + x.abs().pow(2).sum() for x in z.values())  # noqa: E731
    found, want = (
        torch.autograd.grad(loss(z), a)[0] for z in (ik.fixed_point(f, start, (a,), rtol=1e-13).value, unrolled)
    )
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------------- default devices
def _highest(scores: Tensor) -> Tensor:
    return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)


ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "bounds": lambda x: (
        ik.argmin(lambda z, x: ((z - x) ** 2).sum(), torch.zeros_like(x), (x,), bounds=(-9.0, 0.5)).value
    ),
    "bracket": lambda x: ik.root(lambda z, x: z**3 + z - x, args=(x,), bracket=(-9.0, 9.0), batch_dims=1).value,
    "trajectory": lambda x: ik.solve(ik.InitialValue(lambda t, y: -y, (0.0, 1.0)), x).value,
    "sparse": lambda x: ik.root(lambda z, x: z**3 + 3 * z - x + 0.1 * z.roll(1), x.new_zeros(130), (x.sum(),)).value,
    "SciPy": lambda x: ik.root(lambda z, x: z**3 + z - x, torch.zeros_like(x), (x,), solver="scipy.root.hybr").value,
    "certificate": lambda x: x + ik.certify(ik.root(lambda z, x: z**3 + z - x, x, (x,), rtol=1e-3)).error,
    "SciPy's matrices": lambda x: ik.solve(ik.QuadraticProgram(scipy.sparse.eye(3).tocsr() * 2.0, x)).value,
    "arrays": lambda x: ik.root(lambda z, x, a: {"b": z["b"] * a - x}, {"b": np.ones(3)}, (x, np.full(3, 2.0))).value[
        "b"
    ],
    "a choice": lambda x: ik.relax.Perturbed(_highest, samples=10, seed=0)(x),
    "a choice of one at a time": lambda x: ik.relax.Perturbed(_highest, samples=10, seed=0, batch="loop")(x),
    "a user's numbers": lambda x: ik.implicit(ik.Root(lambda z, x: z - x))(lambda z0, x: x.tolist())(x, x),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_solve_is_where_its_tensors_are_whatever_the_default_device(name: str) -> None:
    x = torch.tensor([0.3, 0.7, 0.2], dtype=D, requires_grad=True)
    want = ELSEWHERE[name](x)
    (slope,) = torch.autograd.grad(want.sum(), x)
    with torch.device("meta"):
        found = ELSEWHERE[name](x)
        (found_slope,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close((found, found_slope), (want, slope))


# ------------------------------------------------------------------------------------------------- figures and callbacks
def test_unrolled_steps_are_reported_as_they_are() -> None:
    s = ik.fixed_point(torch.cos, zeros(1), solver="picard", rule=ik.Unroll(steps=2))
    assert s.residual_norm.item() == pytest.approx((s.value.cos() - s.value).abs().item())
    assert not s.converged.item()
    assert s.steps.item() == 2
    many = ik.fixed_point(torch.cos, zeros(1), solver="picard", rule=ik.Unroll(steps=500))
    assert many.converged.item()


def test_a_callback_cannot_write_into_the_iterate() -> None:
    def clamp(step: int, z: Tensor, norm: Tensor) -> None:
        z.clamp_(-0.1, 0.1)
        norm.zero_()

    s = ik.fixed_point(torch.cos, zeros(3), callback=clamp)
    torch.testing.assert_close(s.value, s.value.cos(), rtol=0, atol=1e-8)
    assert s.residual_norm.item() == pytest.approx((s.value.cos() - s.value).norm().item(), abs=1e-15)


# ------------------------------------------------------------------------------------------------------------ inference mode
@pytest.mark.parametrize("solver", ["auto", "newton", "lbfgs"])
def test_tensors_made_in_inference_mode_may_be_captured(solver: str) -> None:
    with torch.inference_mode():
        h, layer = torch.tensor([0.6, 0.9, 1.3], dtype=D), nn.Linear(3, 3, dtype=D)
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        if solver == "lbfgs":
            z = ik.argmin(lambda z: ((layer(z) - h) ** 2).sum(), zeros(3), solver=solver).value
            torch.testing.assert_close(z, h, rtol=0, atol=1e-7)
            return
        z = ik.root(lambda z: layer(z) * h + z**3 - 1, zeros(3), solver=solver).value
        assert float((z * h + z**3 - 1).abs().max()) < 1e-8


# ----------------------------------------------------------------------------------------------------------------- sharding
class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.lin.weight.data.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        f = lambda z, x: torch.tanh(self.lin(z) + x)  # noqa: E731
        return ik.fixed_point(f, torch.zeros_like(x), (x,), batch_dims=1).value


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [False, True])
def test_parameters_that_fsdp_has_moved(original: bool) -> None:
    """FSDP takes parameters out of their modules, and for the backward sets what it has gathered as attributes."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    alone = Tanh()
    alone(x).sum().backward()
    want = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = FSDP(Tanh(), use_orig_params=original, device_id=torch.device("cpu"))
        for _ in range(2):
            sharded.zero_grad()
            sharded(x).sum().backward()
        got = torch.cat([p.grad.flatten() for p in sharded.parameters() if p.grad is not None])
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(got, want)


# ------------------------------------------------------------------------------------------------------------- what is held
def test_a_detached_solution_holds_neither_graph_nor_arguments() -> None:
    x = torch.ones(3, requires_grad=True)
    argument = 2 * x
    held = weakref.ref(argument)
    solution = ik.fixed_point(lambda z, x: torch.tanh(0.3 * z + x), torch.zeros(3), (argument,)).detach()
    del argument
    gc.collect()
    assert held() is None
    assert bool(solution.converged)


# ---------------------------------------------------------------------------------------------------------------------- fork
def _child() -> None:
    layer = nn.Linear(3, 3)
    ik.fixed_point(lambda z: torch.tanh(0.3 * layer(z) + 1), torch.zeros(3))
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_forked_while_another_thread_solves() -> None:
    held, done = threading.Event(), threading.Event()

    def other() -> None:
        with extend.modules_held():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(10)
    child = multiprocessing.get_context("fork").Process(target=_child)
    child.start()
    child.join(20)
    stuck = child.is_alive()
    child.kill()
    done.set()
    thread.join()
    assert not stuck


# --------------------------------------------------------------------------------------------------------- scaled losses
def test_an_overflowing_scaled_loss_is_no_failure(scale_after: Callable[..., float]) -> None:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(0.05 * torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))

        def forward(self, h: Tensor) -> Tensor:
            return ik.fixed_point(
                lambda z, h: torch.tanh(z @ self.W + h), torch.zeros_like(h), (h,), batch_dims=1
            ).value

    scales = [scale_after(middle, 100.0, 1e-4) for middle in (Equilibrium(), nn.Tanh())]
    assert scales[0] == scales[1] < 2.0**127


def test_one_sample_with_an_infinite_derivative_disturbs_no_other() -> None:
    x = torch.rand(3, 2, dtype=D, requires_grad=True)
    z = ik.fixed_point(lambda z, x: torch.tanh(0.5 * z + x), zeros(3, 2), (x,), batch_dims=1).value
    weight = torch.ones(3, 2, dtype=D)
    weight[1] = torch.inf
    (got,) = torch.autograd.grad(z, x, weight, retain_graph=True)
    (want,) = torch.autograd.grad(z, x, torch.ones(3, 2, dtype=D))
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])
    assert not bool(torch.isfinite(got[1]).any())


# ------------------------------------------------------------------------------------------------------- a user's own solver
def _cubic(z: Tensor, x: Tensor) -> Tensor:
    return z**3 + z - x


def test_what_a_users_solver_raises_is_the_cause() -> None:
    @ik.implicit(ik.Root(_cubic))
    def newton(z0: Tensor, x: Tensor) -> Tensor:
        z = z0.detach().requires_grad_()
        for _ in range(20):
            r = _cubic(z, x)
            z = (z - r / torch.autograd.grad(r.sum(), z)[0]).detach().requires_grad_()
        return z.detach()

    with pytest.raises(
        ik.ConvergenceError, match=r"newton raised RuntimeError: .*use torch\.enable_grad\(\) inside"
    ) as info:
        newton(zeros(3), torch.ones(3, dtype=D, requires_grad=True))
    assert isinstance(info.value.__cause__, RuntimeError)


def test_inside_enable_grad_a_users_solver_may_differentiate() -> None:
    @ik.implicit(ik.Root(_cubic))
    @torch.enable_grad()
    def newton(z0: Tensor, x: Tensor) -> Tensor:
        z = z0.detach().requires_grad_()
        for _ in range(30):
            r = _cubic(z, x)
            z = (z - r / torch.autograd.grad(r.sum(), z)[0]).detach().requires_grad_()
        return z.detach()

    x = torch.ones(3, dtype=D, requires_grad=True)
    z = newton(zeros(3), x)
    (g,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(g, 1 / (3 * z.detach() ** 2 + 1))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "tolerance as text": (
        lambda: ik.fixed_point(torch.cos, zeros(3), rtol="1e-3"), TypeError, r"rtol must be a number, got '1e-3' \(a str\)"),
    "tolerance of many": (
        lambda: ik.fixed_point(torch.cos, zeros(3), atol=zeros(3)), TypeError,
        r"atol must be one number for all samples, got a tensor of shape \(3,\)"),
    "tolerance that is a list": (lambda: ik.fixed_point(torch.cos, zeros(3), atol=[1]), TypeError, r"atol must be a number"),
    "tolerance that is a truth value": (
        lambda: ik.fixed_point(torch.cos, zeros(3), atol=True), TypeError, r"atol must be a number, got True"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str) -> None:
    call, error, message = REFUSED[row]
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------------------------------- what is taken as a start
def test_floats_and_arrays_are_starts() -> None:
    x = torch.tensor(0.3, dtype=D, requires_grad=True)
    s = ik.fixed_point(lambda z, x: torch.cos(z) * x, 0.5, (x,))
    assert s.value.dtype == D
    assert s.value.shape == ()
    s.value.backward()
    assert bool(torch.isfinite(x.grad))
    start = np.zeros((2, 3))
    s = ik.root(lambda z: {"a": z["a"] ** 3 + 1, "b": z["b"] - 2}, {"a": start - 0.5, "b": 0.25})
    torch.testing.assert_close(s.value["a"], torch.full((2, 3), -1.0, dtype=D))
    assert s.value["b"].item() == pytest.approx(2.0)
    assert float(np.abs(start).max()) == 0


@pytest.mark.parametrize("shape", [(0, 3), (4, 0, 3)], ids=str)
def test_an_empty_batch_has_an_empty_solution(shape: tuple[int, ...]) -> None:
    dims, layer = len(shape) - 1, nn.Linear(3, 3, dtype=D)
    x = zeros(*shape).requires_grad_()
    s = ik.fixed_point(lambda z, x: torch.tanh(0.3 * layer(z) + x), zeros(*shape), (x,), batch_dims=dims)
    assert s.value.shape == shape
    assert s.converged.shape == s.steps.shape == s.residual_norm.shape == shape[:-1]
    assert "empty" in repr(s)
    s.raise_for_status()
    s.value.sum().backward()
    assert float(layer.weight.grad.abs().max()) == 0
    assert x.grad.shape == shape
    bounded = ik.argmin(lambda z: (z**2).sum(-1), zeros(*shape), batch_dims=dims, bounds=(0.0, 1.0))
    assert bounded.value.shape == shape
    f = lambda x: ik.fixed_point(lambda z, x: torch.cos(z) + x, zeros(*shape), (x,), batch_dims=dims).value.sum()  # noqa: E731
    assert torch.func.grad(f)(x.detach()).shape == shape


@pytest.mark.parametrize(
    "transform", [torch.vmap, lambda f: torch.vmap(torch.func.jacrev(f))], ids=["vmap", "vmap of jacrev"]
)
def test_a_batch_of_vmap_that_is_empty_is_refused(transform: Callable[..., Any]) -> None:
    f = lambda x: ik.fixed_point(lambda z: 0.5 * z.cos() + x, zeros(2)).value  # noqa: E731
    with pytest.raises(ik.CapabilityError, match=r"torch\.vmap over an empty batch.*batch_dims=1"):
        transform(f)(zeros(0, 2))


def test_an_empty_batch_of_trajectories_and_nothing_to_certify() -> None:
    y0 = zeros(0, 2).requires_grad_()
    path = ik.solve(ik.InitialValue(lambda t, y: -y, torch.linspace(0, 1, 3, dtype=D)), y0, batch_dims=1)
    assert path.value.shape == (0, 3, 2)
    path.value.sum().backward()
    assert y0.grad.shape == (0, 2)
    with pytest.raises(ValueError, match="batch is empty"):
        ik.certify(path)


@pytest.mark.parametrize(
    "answer",
    [[1.1, 2.2], torch.tensor([1.1 + 0j, 2.2], dtype=torch.complex128), np.array([1.1, 2.2])],
    ids=lambda a: type(a).__name__,
)
def test_what_a_solver_returns_keeps_its_digits(answer: object) -> None:
    goal = torch.tensor([1.1, 2.2], dtype=D, requires_grad=True)
    z = ik.implicit(ik.Root(lambda z, a: z - a))(lambda z0, a: answer)(zeros(2), goal)
    assert torch.equal(z.detach(), goal.detach())


@pytest.mark.parametrize("solver", ["df_sane", "anderson", "broyden", "newton", "picard"])
def test_a_callback_sees_the_point_that_the_norm_belongs_to(solver: str) -> None:
    """Also where the residual grows on the way, and where other samples have been dropped."""
    c = torch.tensor([[0.5], [20.0], [3.0]], dtype=D)
    rises = []

    def look(step: int, z: torch.Tensor, norm: torch.Tensor) -> None:
        torch.testing.assert_close((c * torch.cos(z) - z).norm(dim=1), norm, rtol=1e-9, atol=1e-12)
        rises.append(norm)

    f = lambda z, c: c * torch.cos(z)  # noqa: E731
    ik.fixed_point(f, zeros(3, 1), (c,), solver=solver, batch_dims=1, callback=look, max_steps=25, on_failure="ignore")
    assert solver == "newton" or any(bool((b > a).any()) for a, b in itertools.pairwise(rises))


def test_functions_that_do_not_depend_on_z_are_none_that_hide_it() -> None:
    a = torch.tensor(2.0, dtype=D, requires_grad=True)
    z = ik.fixed_point(lambda z, a: a * torch.ones(3, dtype=D), zeros(3), (a,)).value
    assert torch.autograd.grad(z.sum(), a)[0].item() == 3
    assert ik.argmin(lambda z: torch.tensor(3.0, dtype=D), zeros(3)).converged.item()
    assert ik.least_squares(lambda z: torch.ones(4, dtype=D), zeros(3)).converged.item()


def test_no_steps_are_an_evaluation() -> None:
    for problem in (ik.Root(lambda z: z**2 - 2), ik.FixedPoint(torch.cos), ik.Argmin(lambda z: (z**4).sum())):
        s = ik.solve(problem, torch.ones(3, dtype=D), max_steps=0, on_failure="ignore")
        assert torch.equal(s.value, torch.ones(3, dtype=D))
        assert s.steps.item() == 0
        assert not s.converged.item()
        assert s.residual_norm.item() > 0.1
    with pytest.raises(ik.ConvergenceError, match="step limit"):
        ik.root(lambda z: z**2 - 2, torch.ones(3, dtype=D), max_steps=0)
    exact = ik.root(lambda z, x: z - x, torch.ones(3, dtype=D), (torch.ones(3, dtype=D),), max_steps=0)
    assert exact.converged.item()


def test_in_dims_count_from_the_end() -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=D)
    f = lambda z, x: torch.tanh(0.5 * z + x.mT)  # noqa: E731
    kept = ik.fixed_point(f, zeros(6, 3), (x,), batch_dims=1, solver="picard").value
    for entry in (1, -1):
        got = ik.fixed_point(f, zeros(6, 3), (x,), batch_dims=1, solver="picard", in_dims=(entry,)).value
        torch.testing.assert_close(got, kept, rtol=0, atol=1e-9)


def test_an_empty_batch_of_quadratic_programs() -> None:
    q = zeros(0, 2).requires_grad_()
    eye = torch.eye(2, dtype=D)
    s = ik.solve(ik.QuadraticProgram(eye, q, G=eye, h=torch.ones(2, dtype=D)))
    assert s.value.shape == s.multipliers.inequality.shape == (0, 2)
    s.value.sum().backward()
    assert q.grad.shape == (0, 2)


# ------------------------------------------------------------------------------------------------------------- compiled maps
def test_a_compiled_map_with_batches_of_two_sizes() -> None:
    torch.manual_seed(0)
    cell = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(D)
    plain = lambda z, x: torch.tanh(0.3 * cell(z) + x)  # noqa: E731
    compiled = torch.compile(plain, backend="aot_eager")
    for rows in (4, 4, 3):
        x = torch.randn(rows, 16, dtype=D, requires_grad=True)
        got, want = (
            torch.autograd.grad(ik.fixed_point(f, torch.zeros_like(x), (x,), batch_dims=1).value.sum(), x)[0]
            for f in (compiled, plain)
        )
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------- cotangents that nearly overflow
@pytest.mark.parametrize("linear", ["auto", "lu", "gmres", "bicgstab", "lsmr", "neumann"])
def test_a_huge_cotangent_is_solved_in_its_own_unit(linear: str) -> None:
    """Its square overflows; its entries, and those of the derivative, do not."""
    W = torch.tensor([[0.3, 0.1], [-0.2, 0.4]])
    x = torch.tensor([[0.2, -0.5], [0.7, 0.1], [0.3, 0.9]], requires_grad=True)
    rule = ik.Implicit(linear_solver=linear)
    z = ik.fixed_point(lambda z, x: torch.tanh(z @ W + x), torch.zeros(3, 2), (x,), rule=rule, batch_dims=1).value
    g = torch.tensor([[1.0, 2.0], [1e30, -1e30], [3.0, torch.inf]])
    (got,) = torch.autograd.grad(z, x, g, retain_graph=True)
    (unit,) = torch.autograd.grad(z, x, torch.tensor([[1.0, 2.0], [1.0, -1.0], [1.0, 1.0]]))
    torch.testing.assert_close(got[:2], unit[:2] * torch.tensor([[1.0], [1e30]]), rtol=1e-3, atol=0)
    assert not bool(torch.isfinite(got[2]).any())


# ----------------------------------------------------------------------------------------------------------------- tracing
class _Solving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ik.fixed_point(lambda z, x: 0.5 * torch.cos(z) + x, torch.zeros_like(x), (x,)).value


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jit.trace": lambda m, x: torch.jit.trace(m, (x,)),
    "export": lambda m, x: torch.export.export(m, (x,), strict=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_solves_are_refused(tracer: str) -> None:
    with pytest.raises(ik.CapabilityError, match="cannot be traced"):
        TRACERS[tracer](_Solving(), torch.ones(2))
    with pytest.raises(ik.CapabilityError, match="cannot be traced"), torch.no_grad():
        TRACERS[tracer](_Solving(), torch.ones(2))


def test_a_strict_export_says_that_it_is_a_solve() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="reason: a solve cannot be traced or exported"):
        torch.export.export(_Solving(), (torch.ones(2),), strict=True)


# ---------------------------------------------------------------------------------------------------- saved-tensor hooks
def _offloaded(s: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        return s(x)


HOOKED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "offloaded": _offloaded,
    "checkpointed": lambda s, x: torch.utils.checkpoint.checkpoint(s, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", HOOKED)
def test_derivatives_of_second_order_under_saved_tensor_hooks(name: str) -> None:
    """The graphs inside a solve are not the hooks' business; what they are asked to keep comes back right."""
    w = torch.tensor([0.7, 0.4], dtype=D, requires_grad=True)

    def s(x: Tensor) -> Tensor:
        return ik.fixed_point(lambda z, x: 0.5 * torch.tanh(w * z) + x**2, zeros(2), (x,), rtol=1e-12).value

    found = []
    for run in (s, lambda x: HOOKED[name](s, x)):
        x = torch.tensor([0.6, -0.9], dtype=D, requires_grad=True)
        (g,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), (x, w)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


class LosesItself(ik.Method):
    """Halves the way to the solution; beyond one it returns NaN."""

    solves = "root"

    def init(self, f: Any, z: Tensor) -> None:
        return None

    def step(self, f: Any, z: Tensor, state: None) -> tuple[Tensor, None]:
        return torch.where(z[:, :1] > 1, torch.full_like(z, torch.nan), z - 0.5 * f(z)), state


def test_a_step_to_nan_is_no_solution_whatever_the_function_makes_of_it() -> None:
    """A function that compares takes NaN for a number, here for a zero of its own: that sample ends where it last was a
    point, and the others are solved."""
    solution = ik.root(
        lambda z, t: torch.where(z <= 2, z - t, 0.0),
        torch.tensor([[0.0], [1.5]], dtype=D),
        (torch.tensor([[0.5], [1.8]], dtype=D),),
        solver=LosesItself(),
        batch_dims=1,
        on_failure="ignore",
    )
    assert solution.status.tolist() == [int(ik.Status.CONVERGED), int(ik.Status.NONFINITE)]
    torch.testing.assert_close(solution.value, torch.tensor([[0.5], [1.5]], dtype=D))


@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_a_sample_whose_norm_overflows_claims_nothing_without_rtol(solver: str) -> None:
    """``0 |z|`` is NaN there: nobody knows what is asked, and nothing meets it."""
    z0 = torch.tensor([[1e200, 0.0], [0.0, 0.0]], dtype=D)
    f = lambda z: torch.where(torch.arange(2) == 0, z, 0.5 * z + 1)  # noqa: E731
    options: dict[str, Any] = {"batch_dims": 1, "on_failure": "ignore"}
    solution = ik.fixed_point(f, z0, solver=solver, rtol=0.0, atol=1e-6, **options)
    assert solution.status.tolist() == [int(ik.Status.NONFINITE), int(ik.Status.CONVERGED)]
