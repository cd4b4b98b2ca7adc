"""Tensors without numbers, tracers that record instead of running, and writes that no version counter counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import implicitkit as ik
from implicitkit_deq import DEQ, cells

F64 = {"dtype": torch.float64}
START, SHIFT = torch.zeros(3, **F64), torch.full((3,), 0.3, **F64)
NO_NUMBERS = r"a solve needs numbers, and .* have none: .* torch\.empty_like\(z0\) stands for it"


def contraction(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * torch.cos(z) + x


class Solving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ik.fixed_point(contraction, torch.zeros_like(x), (x,)).value


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = DEQ(cells.MLP(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("inputs", [False, True], ids=["fake only", "others too"])
@pytest.mark.parametrize("of", ["solve", "layer"])
def test_fake_tensors_are_refused_inside_their_mode(of: str, inputs: bool) -> None:
    layer = Holding()
    with FakeTensorMode(allow_non_fake_inputs=inputs), pytest.raises(ik.CapabilityError, match=NO_NUMBERS):
        layer(torch.ones(2, 3)) if of == "layer" else Solving()(torch.ones(3))


@pytest.mark.parametrize("place", ["z0", "args"])
def test_fake_tensors_are_refused_outside_their_mode(place: str) -> None:
    with FakeTensorMode():
        fake = torch.ones(3, **F64)
    z0, x = (fake, SHIFT) if place == "z0" else (START, fake)
    with pytest.raises(ik.CapabilityError, match=NO_NUMBERS) as caught:
        ik.fixed_point(contraction, z0, (x,))
    assert place in str(caught.value)


@pytest.mark.parametrize("module", [Solving, Holding])
def test_a_symbolic_trace_is_refused_and_a_leaf_is_not(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), module())
    with pytest.raises(ik.CapabilityError, match=r"torch.fx.symbolic_trace.*is_leaf_module"):
        torch.fx.symbolic_trace(model)

    class AroundSolves(torch.fx.Tracer):  # as the message says
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, module) or super().is_leaf_module(m, name)

    x = torch.ones(2, 3)
    torch.testing.assert_close(torch.fx.GraphModule(model, AroundSolves().trace(model))(x), model(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for call, name in (
        (lambda: ik.fixed_point(contraction, nested, (SHIFT,)), "z0"),
        (lambda: DEQ(cells.MLP(3, 3))(nested), "input 0 of the layer"),
        (lambda: ik.project.simplex()(nested), "the point"),
    ):
        with pytest.raises(TypeError, match=rf"{name} is a nested tensor: pad it \(torch.nested.to_padded_tensor\)"):
            call()


def _masked(t: Tensor) -> Tensor:
    return torch.masked.masked_tensor(t, t > 0)


def _distributed(t: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    return distribute_tensor(t, init_device_mesh("cpu", (1,)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_masked, r"a MaskedTensor: .* pass its \.to_tensor\(value\)"),
        pytest.param(_distributed, r"a DTensor: .* pass its \.full_tensor\(\)", marks=pytest.mark.slow),
    ],
)
def test_tensors_without_a_number_everywhere_are_refused_by_name(make: Callable[[Tensor], Tensor], said: str) -> None:
    if make is _distributed:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        odd = make(torch.tensor([0.5, -1.0]))
        with pytest.raises(TypeError, match="z0 is " + said):
            ik.fixed_point(contraction, odd, (torch.ones(2),))
        with pytest.raises(TypeError, match="what FixedPoint's function returned is " + said):
            ik.fixed_point(lambda z: make(0.5 * z.detach()), torch.ones(2))
    finally:
        if make is _distributed:
            torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------- writes that nobody counts
def by_data(z: Tensor) -> None:
    z.data.mul_(0.9)


def by_numpy(z: Tensor) -> None:
    z.detach().numpy()[...] *= 0.9


def by_exchange(z: Tensor) -> None:
    z.data = 0.9 * z.data


WRITES = [by_data, by_numpy, by_exchange]
SOLVES: dict[str, Callable[..., Any]] = {
    "fixed_point": lambda f, solver: ik.fixed_point(f(contraction), START, (SHIFT,), solver=solver),
    "root": lambda f, solver: ik.root(f(lambda z, x: z**3 + z - x), START, (SHIFT,), solver=solver),
    "argmin": lambda f, solver: ik.argmin(f(lambda z, x: ((z - x) ** 2).sum()), START, (SHIFT,), solver=solver),
    "from a solution": lambda f, solver: ik.root(f(lambda z, x: z - x), SHIFT.clone(), (SHIFT,), solver=solver),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["auto", "newton", "scipy.root.hybr"])
@pytest.mark.parametrize("late", [False, True], ids=["before its use", "after"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", SOLVES)
def test_a_write_behind_the_back_of_autograd_is_noticed(
    name: str, write: Callable[[Tensor], None], late: bool, solver: str
) -> None:
    """The state is zero at first, where a product writes nothing: it is looked at in two evaluations."""

    def writing(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(z: Tensor, x: Tensor) -> Any:
            if not late:
                write(z)
            value = function(z, x)
            if late:
                write(z)
            return value

        return changed

    with pytest.raises(RuntimeError, match="the function changes its state z in place"):
        SOLVES[name](writing, solver)
    assert bool(SOLVES[name](lambda f: f, solver).converged.all())


@pytest.mark.parametrize("start", [SHIFT, START], ids=["from a point", "from zero"])
@pytest.mark.parametrize("write", WRITES)
def test_a_step_that_writes_so_is_noticed(write: Callable[[Tensor], None], start: Tensor) -> None:
    """From zero, where a product writes nothing, its second step is looked at."""

    class Writing(ik.Method):
        solves = "fixed_point"

        def init(self, f: Any, z: Tensor) -> dict[str, Any]:
            return {}

        def step(self, f: Any, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            new = f(z)
            write(z)
            return new, state

    with pytest.raises(TypeError, match=r"Writing.step wrote into the z that it was given"):
        ik.fixed_point(contraction, start.clone(), (SHIFT,), solver=Writing())


def test_a_function_that_is_given_nan_does_not_write() -> None:
    start = torch.tensor([float("nan"), 1.0], **F64)
    with pytest.raises(ik.ConvergenceError, match="NaN"):
        ik.root(lambda z: z**2 - 2, start)


# ------------------------------------------------------------------------------------------------- compiled objectives
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_objective_is_minimised_far_out_too() -> None:
    """Whether a minimum beyond five is one was asked of second derivatives that there are not."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def bowl(z: Tensor, x: Tensor) -> Tensor:
        return ((z - x) ** 2).sum() + 1e-3 * (z**4).sum()

    found = ik.argmin(bowl, START, (SHIFT + 8,))
    assert float(found.value.abs().min()) > 5
    torch.testing.assert_close(
        2 * (found.value - SHIFT - 8) + 4e-3 * found.value**3, torch.zeros_like(START), rtol=0, atol=1e-8
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["argmin", "bounds", "prox", "least_squares", "mixed"])
def test_the_derivative_of_a_compiled_minimisation_is_refused_in_words(kind: str) -> None:
    """AOTAutograd has no second derivative of what it compiled, and where the state is a view says so by zeros."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def bowl(z: Tensor, x: Tensor) -> Tensor:
        return ((z - x) ** 2).sum() + 0.1 * (z**4).sum()

    @torch.compile(backend="aot_eager")
    def alone(z: Tensor) -> Tensor:
        return (z**4).sum()

    @torch.compile(backend="aot_eager")
    def residuals(z: Tensor, x: Tensor) -> Tensor:
        return torch.cat([z - x, 0.1 * z**2])

    x = SHIFT.clone().requires_grad_()
    solve: dict[str, Callable[[], Any]] = {
        "argmin": lambda: ik.argmin(bowl, START, (x,)),
        "bounds": lambda: ik.argmin(bowl, START, (x,), bounds=(0.0, 5.0)),
        "prox": lambda: ik.argmin(bowl, START, (x,), prox=ik.prox.l1(0.01)),
        "least_squares": lambda: ik.least_squares(residuals, START, (x,)),
        "mixed": lambda: ik.argmin(lambda z, x: ((z - x) ** 2).sum() + alone(z), START, (x,)),
    }
    solution = solve[kind]()
    assert bool(solution.converged.all())
    with pytest.raises(
        RuntimeError, match=r"compiled by torch.compile has first derivatives only.*before torch.compile"
    ):
        solution.value.sum().backward()
    want = torch.func.grad(lambda x: ik.argmin(lambda z, x: bowl(z, x), START, (x,)).value.sum())(SHIFT)
    z = solution.value.detach()
    if kind == "argmin":  # under torch.func compiled functions run as they were written
        torch.testing.assert_close(want, 2 / (2 + 1.2 * z**2), rtol=1e-6, atol=1e-8)
