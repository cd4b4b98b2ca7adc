"""``norm=``: what ``|F|`` is in every test of convergence; and what happens when both tolerances are zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev, vmap

import implicitkit as ik

F64 = torch.float64
b = torch.linspace(-1, 1, 60, dtype=F64).reshape(2, 30)
Z0 = torch.zeros(2, 30, dtype=F64)


def f(z: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(0.5 * z) + b


NORMS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "l2": ("l2", lambda t: t.norm(dim=-1)),
    "max": ("max", lambda t: t.abs().amax(-1)),
    "a function": (lambda t: t.abs().sum(-1), lambda t: t.abs().sum(-1)),
}
SOLVERS = ("picard", "anderson", "newton", "broyden", "newton_krylov", "trust_region", "df_sane", "lbfgs", "auto",
           "levenberg_marquardt", "scipy.root.krylov", "relay")  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_norm_judges(name: str, solver: str) -> None:
    norm, length = NORMS[name]
    s = ik.fixed_point(f, Z0, (b,), batch_dims=1, norm=norm, solver=solver, rtol=1e-7, atol=0)
    residual = length(f(s.value, b) - s.value)
    torch.testing.assert_close(s.residual_norm, residual, rtol=0, atol=1e-12)
    assert bool(s.converged.all()) and bool((residual <= 1e-7 * length(s.value)).all())


def test_the_norm_decides_when_to_stop() -> None:
    """Of 30 equal components the 2-norm is 5.5 times the largest, the sum 30 times; Picard's steps follow."""
    b = torch.full((1, 30), 0.7, dtype=F64)
    steps = {
        name: int(ik.fixed_point(f, b, (b,), batch_dims=1, norm=n, solver="picard", rtol=0, atol=1e-6).steps)
        for name, (n, _) in NORMS.items()
    }
    assert steps["max"] < steps["l2"] < steps["a function"]


def test_a_root_is_judged_by_the_norm_of_its_ratios() -> None:
    """Rows of very different units: every one holds by its own scale, whatever the norm."""
    units = torch.tensor([1e-6, 1.0, 1e6], dtype=F64)
    for norm, _ in NORMS.values():
        s = ik.root(lambda z: units * (z**3 + z - 2), torch.full((3,), 0.5, dtype=F64), norm=norm)
        torch.testing.assert_close(s.value, torch.ones(3, dtype=F64), rtol=1e-7, atol=0)


def test_norms_under_transforms() -> None:
    rows = torch.stack([b, 2 * b, 3 * b])
    norm = NORMS["a function"][0]
    solve = lambda b: ik.fixed_point(f, Z0, (b,), batch_dims=1, norm=norm).value  # noqa: E731
    torch.testing.assert_close(vmap(solve)(rows), torch.stack([solve(r) for r in rows]))
    one = lambda b: ik.fixed_point(f, Z0[0], (b,), norm=lambda t: t.abs().sum()).value  # noqa: E731
    torch.testing.assert_close(vmap(vmap(one))(rows), torch.stack([solve(r) for r in rows]))
    z = one(b[0])
    slope = 1 - 0.5 / torch.cosh(0.5 * z).square()
    torch.testing.assert_close(vmap(jacrev(one))(b)[0], torch.diag(1 / slope))


def test_rows_are_dropped_under_a_norm_of_ones_own() -> None:
    z0 = torch.zeros(4, 2, dtype=F64)
    a = torch.tensor([0.01, 0.02, 0.5, 0.95], dtype=F64).unsqueeze(1)
    s = ik.fixed_point(lambda z, a: a * z.cos() + 1, z0, (a,), batch_dims=1, in_dims=(0,), solver="picard",
                       norm=lambda t: t.abs().amax(-1))  # fmt: skip
    assert s.sample_evaluations < 4 * s.evaluations and bool(s.converged.all())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an unknown word": (
        lambda: ik.fixed_point(f, Z0, (b,), norm="min"), ValueError, "norm must be 'l2', 'max' or a function"),
    "one number for a batch": (
        lambda: ik.fixed_point(f, Z0, (b,), batch_dims=1, norm=lambda t: t.abs().sum()), TypeError,
        r"one real number for each of 2 sample\(s\), got a tensor of shape \(\)"),
    "a negative number": (
        lambda: ik.fixed_point(f, Z0, (b,), norm=lambda t: -t.norm()), ValueError, "must not be negative"),
    "a negative number, mapped over": (
        lambda: vmap(lambda b: ik.fixed_point(f, Z0[0], (b,), norm=lambda t: t[0]).value)(b - 9), ValueError, "negative"),
    "multipliers": (
        lambda: ik.argmin(lambda z: z.square().sum(), Z0[0], constraints=[ik.Equality(torch.sum)], norm=torch.sum),
        ik.CapabilityError, "judged by more than that"),
    "blocks": (
        lambda: ik.solve(
            ik.compose({"v": (f, "x"), "w": (lambda w, v: 0.5 * w + v, "v")}, output="w"), {"v": Z0, "w": Z0}, (b,),
            solver=ik.Blocks(), norm="max"),
        ik.CapabilityError, "judges every node by the 2-norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_norms_that_cannot_be_used(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_constrained_problems_take_the_largest_component() -> None:
    box = (torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64))
    aim = torch.tensor([-1.0, 0.5, 2.0], dtype=F64)
    for solver in ("auto", "scipy.slsqp", "sqp"):
        s = ik.argmin(
            lambda z: (z - aim).square().sum(), torch.full((3,), 0.3, dtype=F64), bounds=box, norm="max", solver=solver
        )
        torch.testing.assert_close(s.value, aim.clamp(0, 1), rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------------------------------- nothing is asked
@pytest.mark.parametrize("solver", ["picard", "gradient_descent", "bisection"])
def test_both_tolerances_zero_run_to_the_limit(solver: str) -> None:
    s = ik.fixed_point(f, Z0[:, :1], (b[:, 3:4],), batch_dims=1, solver=solver, rtol=0, atol=0, max_steps=4)
    assert s.steps.tolist() == [4, 4] and s.status.tolist() == [int(ik.Status.MAX_STEPS)] * 2
    assert not bool(s.converged.any()) and bool((s.residual_norm > 0).all())
    with pytest.raises(ik.ConvergenceError):
        s.raise_for_status()


def test_both_tolerances_zero_and_nothing_left() -> None:
    s = ik.root(lambda z: z - 1, torch.zeros(2, dtype=F64), rtol=0, atol=0)
    assert bool(s.converged) and torch.equal(s.value, torch.ones(2, dtype=F64))


def test_both_tolerances_zero_hide_no_other_failure() -> None:
    with pytest.raises(ik.ConvergenceError, match="nonfinite"):
        ik.fixed_point(lambda z: z * torch.nan, torch.ones(2), rtol=0, atol=0, solver="picard")


def test_the_last_word_is_by_the_norm_too() -> None:
    """A residual in units of its own is judged by the norm of ``|F_i| / (atol + rtol S_i)``: here a thousandfold."""
    f = lambda z: 0.5 * (z - 1).square().sum()  # noqa: E731
    solve = lambda norm: ik.argmin(  # noqa: E731
        f, torch.zeros(4, dtype=F64), solver=ik.GradientDescent(step_size=0.3), rtol=1e-6, atol=1e-13, norm=norm
    )
    plain, strict = solve("l2"), solve(lambda t: 1e3 * torch.linalg.vector_norm(t))
    assert bool(strict.converged) and float((plain.value - 1).abs().max()) > 1e-8
    assert float((strict.value - 1).abs().max()) < 1e-8


#: name -> a function that is zero of some residuals, a start
SEMINORMS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "zero": (lambda r: 0 * r.norm(), torch.zeros(4, dtype=F64)),
    "two of four": (lambda r: r[:2].norm(), torch.zeros(4, dtype=F64)),
    "differences": (lambda r: r.diff().norm(), torch.full((4,), 0.3, dtype=F64)),
}


@pytest.mark.parametrize("name", SEMINORMS)
def test_a_part_that_is_left_out_is_told(name: str) -> None:
    norm, z0 = SEMINORMS[name]
    x = torch.tensor([0.0, 0.0, 3.0, 3.0], dtype=F64) if name == "two of four" else torch.ones(4, dtype=F64)
    with pytest.warns(ik.ConvergenceWarning, match="leaves out a part of F, as no norm does"):
        ik.fixed_point(lambda z: 0.5 * z + x, z0, solver="picard", norm=norm)


@pytest.mark.filterwarnings("error")
def test_weights_and_parts_that_hold_are_no_seminorm() -> None:
    weights = torch.tensor([1.0, 1e-3, 1e-6], dtype=F64)
    norms = (lambda r: (weights * r).norm(), lambda r: r[:1].norm())  # of the second: the others hold as well
    for norm in norms:
        assert bool(ik.root(lambda z: z**2 - 2, torch.ones(3, dtype=F64), norm=norm).converged)


# ------------------------------------------------------------------------------------------------------ what overflows
OVERFLOW: dict[str, Callable[[], Any]] = {
    "a root": lambda: ik.root(lambda z: z - 1e25, torch.zeros(4)),
    "a minimum": lambda: ik.argmin(lambda z: (z - 1e25).square().sum(), torch.zeros(4)),
    "a fit": lambda: ik.least_squares(lambda z: z - 1e25, torch.zeros(4)),
    "bfloat16": lambda: ik.root(lambda z: z - 1e30, torch.zeros(4, dtype=torch.bfloat16)),
    "by SciPy": lambda: ik.root(lambda z: z - 1e25, torch.zeros(4), solver="scipy.root.hybr"),
    # |F| is finite, what it is measured by is not: everything would do
    "|z| only": lambda: ik.fixed_point(lambda z: 0.99 * z + 2e17, torch.full((4,), 3e19), solver="picard"),
    "|z| only, by hand": lambda: ik.implicit(ik.FixedPoint(lambda z: 0.99 * z + 2e17))(lambda z: z + 1e15)(
        torch.full((4,), 3e19)
    ),
}


@pytest.mark.parametrize("name", OVERFLOW)
def test_squares_that_overflow_are_named(name: str) -> None:
    with pytest.raises(ik.ConvergenceError, match=r"nonfinite.*their squares, which norms add up, overflow in torch"):
        OVERFLOW[name]()


@pytest.mark.parametrize("name", NORMS)
def test_later_stages_know_the_start_in_the_same_norm(name: str) -> None:
    seen = []

    class Told(ik.extend.Solver):
        name = "told"
        solves = "fixed_point"

        def run(self, f: Any, z0: Tensor, options: Any) -> Any:
            seen.append(options.start_norm)
            return ik.Anderson().run(f, z0, options)

    norm, length = NORMS[name]
    stages = ik.extend.Polyalgorithm((ik.extend.Stage(ik.Picard(), max_steps=1), Told()))
    ik.fixed_point(f, Z0, (b,), batch_dims=1, norm=norm, solver=stages)
    torch.testing.assert_close(seen[0], length(b))
