"""What parts of other people's making hand back: the message names the part and what is wrong with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import implicitkit as ik

D = torch.float64
_ROOT = torch.full((3,), 2**0.5, dtype=D)
_COUNT = itertools.count()


def equation(z: Tensor, c: float | Tensor = 2.0) -> Tensor:
    return z**2 - c


_STEPS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda z: z[0], r"Mine\.step must return a new z like .*\(1, 3\) .*it returned \(3,\)"),
    "fewer unknowns": (lambda z: z[:, :2], r"it returned \(1, 2\)"),
    "more samples": (lambda z: torch.cat([z, z]), r"it returned \(2, 3\)"),
    "another dtype": (lambda z: z.float(), r"of torch\.float64; it returned \(1, 3\) of torch\.float32"),
    "complex numbers": (lambda z: z + 0j, r"of torch\.complex128"),
    "nothing": (lambda z: None, r"Mine\.step must return a new z, a tensor .*it returned a NoneType"),
    "a list": (lambda z: z.tolist(), r"it returned a list"),
}


@pytest.mark.parametrize("row", _STEPS)
def test_a_step(row: str) -> None:
    change, message = _STEPS[row]

    class Mine(ik.Method):
        solves = "root"

        def init(self, f: Any, z: Tensor) -> Any:
            return ()

        def step(self, f: Any, z: Tensor, state: Any) -> Any:
            return change(z - 0.3 * f(z)), state

    with pytest.raises(TypeError, match=message):
        ik.root(equation, torch.ones(3, dtype=D), solver=Mine())


def test_a_state_that_is_not_one_row_a_sample_is_named() -> None:
    class Mine(ik.Method):
        solves = "fixed_point"

        def init(self, f: Any, z: Tensor) -> Any:
            return torch.zeros(2, dtype=D)  # shared by eight samples

        def step(self, f: Any, z: Tensor, state: Any) -> Any:
            return f(z), state

    a = torch.cat([torch.full((4,), 0.01, dtype=D), torch.linspace(0.5, 0.9, 4, dtype=D)])[:, None]
    with pytest.raises(TypeError, match="Mine: a tensor in its state has fewer rows than the batch, 8"):
        ik.fixed_point(
            lambda z, a: a * torch.cos(z), torch.zeros(8, 1, dtype=D), (a,), batch_dims=1, in_dims=0, solver=Mine()
        )


_KEPT: dict[str, tuple[Any, str]] = {
    "nothing": (None, r"Mine\.keep must return a dictionary of tensors; it returned a NoneType"),
    "a number": ({"steps": 3}, r"with one row a sample, \d here: 'steps' is of an int"),
    "of no sample": ({"steps": torch.zeros(())}, r"'steps' is of shape \(\)"),
    "too few rows": ({"steps": torch.zeros(7, 2)}, r"one row a sample, [48] here: 'steps' is of shape \(7, 2\)"),
}


@pytest.mark.parametrize("row", _KEPT)
def test_what_a_method_keeps(row: str) -> None:
    found, message = _KEPT[row]

    class Mine(ik.Method):
        solves = "fixed_point"

        def step(self, f: Any, z: Tensor, state: Any) -> Any:
            return f(z), state

        def keep(self, state: Any) -> Any:
            return found

    a = torch.cat([torch.full((4,), 0.01, dtype=D), torch.linspace(0.5, 0.9, 4, dtype=D)])[:, None]
    for in_dims in (0, None):  # where rows are dropped, and at the end
        with pytest.raises(TypeError, match=message):
            ik.fixed_point(
                lambda z, a: a * torch.cos(z),
                torch.zeros(8, 1, dtype=D),
                (a,),
                batch_dims=1,
                in_dims=in_dims,
                solver=Mine(),
            )


@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_a_function_that_returns_one_buffer_is_told_so(solver: str) -> None:
    buffer = torch.empty(3, dtype=D)

    def cosine(z: Tensor) -> Tensor:
        return buffer.copy_(torch.cos(z))

    with pytest.raises(
        RuntimeError, match="writes its result into the same tensor at every call, by out= or into a buffer"
    ):
        ik.fixed_point(cosine, torch.zeros(3, dtype=D), solver=solver)


_FOUND: dict[str, tuple[Any, type[Exception] | None, str]] = {
    "nothing": (None, TypeError, "box returned None: a solver returns the solution"),
    "nothing inside": (ik.Found(None), TypeError, "box returned None"),
    "SciPy's result": (
        scipy.optimize.OptimizeResult(x=_ROOT.numpy()), TypeError, r"box returned an OptimizeResult: .* its \.x"),
    "a pair": ((_ROOT, 3), TypeError, r"box returned a tuple: .*what else it knows goes into ik\.Found"),
    "a dictionary": ({"z": _ROOT}, TypeError, "box returned a dict"),
    "text": ("x", TypeError, "box returned a str"),
    "complex numbers": (_ROOT + 1j, TypeError, r"box returned complex numbers \(imaginary parts up to 1\) where z0 is real"),
    "too many numbers": (torch.ones(4, dtype=D), ValueError, r"returned a point of shape \(4,\)"),
    "steps below zero": (ik.Found(_ROOT, steps=-4), ValueError, r"box returned Found\(steps=-4\).* a whole number >= 0"),
    "steps in words": (ik.Found(_ROOT, steps="x"), ValueError, r"box returned Found\(steps='x'\)"),  # type: ignore[arg-type]
    "half a step": (ik.Found(_ROOT, steps=3.5), ValueError, r"Found\(steps=3\.5\)"),  # type: ignore[arg-type]
    "complex numbers that are real": (_ROOT + 0j, None, ""),
    "a list of numbers": (_ROOT.tolist(), None, ""),
    "steps as a tensor": (ik.Found(_ROOT, steps=torch.tensor(3)), None, ""),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("row", _FOUND)
@pytest.mark.filterwarnings("error")
def test_a_black_box(row: str) -> None:
    found, error, message = _FOUND[row]
    name = f"box_{next(_COUNT)}"

    @ik.register_solver(name, solves="root")
    def box(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Any:
        return found

    def solve() -> ik.Solution:
        return ik.root(equation, torch.ones(3, dtype=D), solver=name)

    if error is None:
        torch.testing.assert_close(solve().value, _ROOT)
    else:
        with pytest.raises(error, match=message.replace("box", name)):
            solve()


def test_a_pair_for_one_unknown_is_no_pair_of_numbers() -> None:
    """``(z, steps)`` was taken for two numbers, and refused for its shape."""
    box = ik.extend.BlackBox(lambda f, z0, **_: (z0, 3), "box", "root", "loop")
    with pytest.raises(TypeError, match=r"box returned a tuple: .*what else it knows goes into ik\.Found"):
        ik.root(equation, torch.ones(1, dtype=D), solver=box)


def test_a_transposed_point_is_not_taken_for_rows() -> None:
    box = ik.extend.BlackBox(lambda f, z0, **limits: f(z0).mT, "box", "fixed_point", "native")
    with pytest.raises(ValueError, match=r"point of shape \(3, 2\) for a start of shape \(2, 3\)"):
        ik.fixed_point(lambda z: z / 2 + 1, torch.zeros(2, 3, dtype=D), solver=box, batch_dims=1)


_RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda r: None, r"Mine\.attach must return a pair, z and the figures .*it returned a NoneType"),
    "z alone": (lambda r: r.solve("lu")[0], "it returned a Tensor"),
    "one of two": (lambda r: r.solve("lu")[:1], "it returned a tuple of 1"),
    "another shape": (lambda r: (r.solve("lu")[0][:, :2], None), r"z of shape \(1, 2\) where the start has \(1, 3\)"),
    "a point without derivative": (
        lambda r: r.find(r.z0, r.theta),
        r"request\.find .* has no derivative\. A rule calls",
    ),
    "an option that there is not": (lambda r: r.solve("lu", tolerance=1e-3), "unexpected keyword argument 'tolerance'"),
}


def _rule(attach: Callable[[Any], Any]) -> ik.Rule:
    class Mine(ik.Rule):
        name = "mine"

        def attach(self, request: Any) -> Any:
            return attach(request)

    return Mine()


@pytest.mark.parametrize("row", _RULES)
def test_a_rule(row: str) -> None:
    attach, message = _RULES[row]
    c = torch.tensor(2.0, dtype=D, requires_grad=True)
    with pytest.raises(TypeError, match=message):
        ik.root(equation, torch.ones(3, dtype=D), (c,), rule=_rule(attach))


@pytest.mark.parametrize("options", [{}, {"rtol": 1e-8}, {"rtol": 1e-8, "atol": 0.0}])
def test_a_rule_need_not_say_how_exactly(options: Any) -> None:
    c = torch.tensor(2.0, dtype=D, requires_grad=True)
    rule = _rule(lambda request: request.solve(ik.linear.LU(), **options))
    value = ik.root(equation, torch.ones(3, dtype=D), (c,), rule=rule).value
    assert abs(float(torch.autograd.grad(value.sum(), c)[0]) - 3 / 8**0.5) < 1e-9


_DATA: dict[str, tuple[dict[str, Any], str]] = {
    "NaN in P": ({"P": torch.full((2, 2), torch.nan, dtype=D)}, r"No z can satisfy the data: P \(nan\)\."),
    "an infinite objective": ({"q": torch.full((2,), torch.inf, dtype=D)}, r"q \(inf\)"),
    "NaN in one sample": ({"q": torch.tensor([[1.0, 1.0], [1.0, torch.nan]], dtype=D)}, r"q \(nan\)"),
    "nothing is below": ({"h": torch.full((2,), -torch.inf, dtype=D)}, r"h \(-inf\)"),
    "nothing is above": ({"lower": torch.full((2,), torch.inf, dtype=D)}, r"lower \(inf\)"),
}


@pytest.mark.parametrize("row", _DATA)
def test_the_data_of_a_program(row: str) -> None:
    given, message = _DATA[row]
    eye, ones = torch.eye(2, dtype=D), torch.ones(2, dtype=D)
    program = ik.QuadraticProgram(**({"P": eye, "q": ones, "G": eye, "h": ones} | given))
    with pytest.raises(ik.ConvergenceError, match=message):
        ik.solve(program)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_function_that_is_differentiated_twice() -> None:
    """Solvers do without its second derivative, the derivative of a minimum does not."""
    compiled = torch.compile(lambda z: torch.cos(z) - z, backend="aot_eager")
    state = ik.steady_state(compiled, torch.zeros(3, dtype=D)).value
    torch.testing.assert_close(state, torch.cos(state), rtol=1e-9, atol=0)
    compiled = torch.compile(lambda z, p: (torch.cos(z) * p - z).square().sum(), backend="aot_eager")
    p = torch.ones((), dtype=D, requires_grad=True)
    minimum = ik.argmin(compiled, torch.zeros(3, dtype=D), (p,)).value
    torch.testing.assert_close(minimum.detach(), state, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match=r"has first derivatives only.*as it was before torch\.compile"):
        minimum.sum().backward()


_OUTCOMES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a point": (lambda z, n: z, r"Mine\.run must return an implicitkit\.extend\.Outcome; it returned a Tensor"),
    "a number": (lambda z, n: ik.extend.Outcome(z, n[0], n.long(), n.long()), r"residual_norm is a tensor \(2,\)"),
    "fewer samples": (lambda z, n: ik.extend.Outcome(z[:1], n, n.long(), n.long()), r"whose z is a tensor \(2, 3\)"),
    "a list": (lambda z, n: ik.extend.Outcome(z, n, n.long(), [0, 0]), r"whose status is .*; it is of a list"),  # type: ignore[arg-type]
    "yes or no": (lambda z, n: ik.extend.Outcome(z, n, n.long(), n < 1), r"status are ik\.Status numbers.*bool"),
    "half steps": (lambda z, n: ik.extend.Outcome(z, n, n, n.long()), r"whose steps are whole numbers; .*torch\.float"),
}


def _solver(make: Callable[[Tensor, Tensor], Any]) -> ik.extend.Solver:
    class Mine(ik.extend.Solver):
        solves = "root"  # type: ignore[assignment]

        def run(self, f: Any, z0: Tensor, options: Any) -> Any:
            return make(z0, torch.zeros_like(z0[:, 0]))

    return Mine()


@pytest.mark.parametrize("row", _OUTCOMES)
def test_an_outcome(row: str) -> None:
    make, message = _OUTCOMES[row]
    with pytest.raises(TypeError, match=message):
        ik.root(equation, torch.ones(2, 3, dtype=D), solver=_solver(make), batch_dims=1)


@pytest.mark.parametrize("where", ["z", "|F|"])
def test_nan_has_not_converged_whatever_a_solver_says(where: str) -> None:
    def make(z: Tensor, n: Tensor) -> ik.extend.Outcome:
        nan = torch.tensor([torch.nan, 0.0], dtype=D)
        z, n = (z + nan[:, None], n) if where == "z" else (z, n + nan)
        return ik.extend.Outcome(z * 2**0.5, n, n.new_zeros(2).long(), n.new_zeros(2).long())

    solution = ik.root(equation, torch.ones(2, 3, dtype=D), solver=_solver(make), batch_dims=1, on_failure="ignore")
    assert solution.converged.tolist() == [False, True]


def test_calls_of_a_black_box_share_the_steps_that_it_may_take() -> None:
    """What is relative to the solution is asked for anew once that is known: each time with the steps that are left."""
    allowed: list[int] = []

    def steps(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
        allowed.append(max_steps)
        z, taken = z0, 0
        while taken < max_steps and float(f.residual(z).norm()) > atol:
            z, taken = f(z), taken + 1
        return ik.Found(z, steps=taken)

    box = ik.extend.BlackBox(steps, "steps", "fixed_point", "loop")
    z0 = torch.tensor([[1.0], [-1000.0]], dtype=D)
    solution = ik.fixed_point(
        lambda z: 0.5 * z + 1e-6, z0, solver=box, batch_dims=1, max_steps=16, rtol=1e-2, atol=0.0, on_failure="ignore"
    )
    assert len(allowed) > 2 and int(solution.steps.max()) == 16, (allowed, solution.steps)


_W = torch.tensor([[0.2, -0.1, 0.3], [0.1, 0.3, 0.0], [-0.2, 0.1, 0.1]], dtype=torch.float64)


def _by_out() -> Callable[[Tensor], Tensor]:
    buffer = torch.zeros(3, dtype=torch.float64)

    def function(z: Tensor) -> Tensor:
        return torch.mv(_W, z.clone(), out=buffer).tanh_().add_(0.5)

    return function


def _by_numpy() -> Callable[[Tensor], Tensor]:
    """Whose writes torch does not count."""
    buffer = np.zeros(3)

    def function(z: Tensor) -> Tensor:
        buffer[:] = np.tanh(_W.numpy() @ z.detach().numpy()) + 0.5
        return torch.from_numpy(buffer)

    return function


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("solver", ["auto", "anderson", "aitken"])
@pytest.mark.parametrize("make", [_by_out, _by_numpy])
def test_a_function_that_returns_one_buffer_at_every_call_is_refused(
    make: Callable[[], Callable[[Tensor], Tensor]], solver: str, start: float
) -> None:
    """What the solver remembers of it changes: points far from any solution were called converged."""
    z0 = torch.full((3,), start, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"in place.*into the same tensor at every call, by out= or into a buffer"):
        ik.fixed_point(make(), z0, solver=solver)


def test_a_function_may_return_the_same_constant_at_every_call() -> None:
    constant = torch.ones(3, dtype=torch.float64)
    assert torch.equal(ik.fixed_point(lambda z: constant, 0 * constant, solver="anderson").value, constant)
