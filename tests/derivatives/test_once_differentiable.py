"""Functions of the user's own (``autograd.Function``) that have a first derivative and no second one.

``torch.autograd.grad`` takes the derivative of one that is marked ``@once_differentiable`` for a constant, or for another
leaf, and says nothing: second derivatives come out zero, and products ``J v`` without that part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

import implicitkit as ik
from implicitkit.foundation import autodiff, own_functions

D = torch.float64
A = torch.tensor([0.7, 0.2], dtype=D)


class Once(torch.autograd.Function):
    """``x^3``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class Loud(torch.autograd.Function):
    """``3 x^2 g``, without a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RuntimeError("this kernel does not support double backward")


class Refusing(torch.autograd.Function):
    """``x^3``, which says so itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return Loud.apply(*ctx.saved_tensors, g)


CUBES: dict[str, Callable[[Tensor], Tensor]] = {"once": Once.apply, "refusing": Refusing.apply}


def steady(a: Tensor, cube: Callable[[Tensor], Tensor] = Once.apply, **options: Any) -> Tensor:
    return ik.steady_state(lambda z, a: a - z - cube(z), torch.zeros(2, dtype=D), (a,), **options).value


def fixed(a: Tensor, cube: Callable[[Tensor], Tensor] = Once.apply, **options: Any) -> Tensor:
    return ik.fixed_point(lambda z, a: a - 0.5 * cube(z), torch.zeros(2, dtype=D), (a,), **options).value


def many(a: Tensor, cube: Callable[[Tensor], Tensor]) -> Tensor:
    """More unknowns than matrices are formed of."""
    line = torch.linspace(0, 1, 300, dtype=D)
    coupled = lambda z, a: z + cube(z) + 0.1 * z.roll(7) * z.mean() - a[0] * line  # noqa: E731
    return ik.root(coupled, torch.zeros(300, dtype=D), (a,)).value


def difference(solve: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """Along ones."""
    h = 1e-5
    return (solve(a + h) - solve(a - h)) / (2 * h)


SOLVES: dict[str, Callable[[Tensor], Tensor]] = {
    "of z": steady,
    "of z - a": lambda a: ik.root(lambda z, a: z + Once.apply(z - 2 * a) - a, torch.zeros(2, dtype=D), (a,)).value,
    "of a": lambda a: ik.root(lambda z, a: z + z**3 - Once.apply(a), torch.zeros(2, dtype=D), (a,)).value,
    "fixed point": fixed,
    "least squares, beside no residual": lambda a: (
        ik.least_squares(lambda z, a: z + Once.apply(z) - a, torch.zeros(2, dtype=D), (a,), solver="gauss_newton").value
    ),
}


@pytest.mark.parametrize("name", SOLVES)
def test_a_second_derivative_is_refused(name: str) -> None:
    """It was zero, or without a part of it."""
    a = A.clone().requires_grad_()
    if name.startswith("least"):  # whose first derivative has second ones of the residuals
        with pytest.raises(RuntimeError, match="@once_differentiable: Once"):
            SOLVES[name](a).sum().backward()
        return
    (slope,) = torch.autograd.grad(SOLVES[name](a).sum(), a, create_graph=True)
    torch.testing.assert_close(slope, difference(lambda a: SOLVES[name](a).detach(), A), rtol=1e-7, atol=1e-9)
    with pytest.raises(RuntimeError, match="@once_differentiable: Once"):
        torch.autograd.grad(slope.sum(), a)


def _written(name: str, backward: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """``x^3``, by a Function for all transforms with this ``backward`` of ``x``, ``3 x^2`` as it was, and ``g``."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.kept = 3 * inputs[0].detach() ** 2

    parts = {
        "generate_vmap_rule": True,
        "forward": staticmethod(lambda x: x**3),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(lambda ctx, g: backward(ctx.saved_tensors[0], ctx.kept, g)),
    }
    made: Any = type(name, (torch.autograd.Function,), parts)
    return cast("Callable[[Tensor], Tensor]", made.apply)


def _blind(x: Tensor, kept: Tensor, g: Tensor) -> Tensor:
    with torch.no_grad():
        return 3 * x**2 * g


LOST: dict[str, Callable[..., Tensor]] = {
    "detached": lambda x, kept, g: 3 * x.detach() ** 2 * g,
    "half": lambda x, kept, g: 3 * x * x.detach() * g,
    "kept": lambda x, kept, g: kept * g,
    "blind": _blind,
}


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("place", ["of z", "captured"])
@pytest.mark.parametrize("how", LOST)
def test_a_backward_that_is_a_constant_is_not_differentiated(how: str, place: str, transformed: bool) -> None:
    """Second derivatives came without the Function's part, unsaid; the first one is right, in forward mode too."""
    cube, name = _written(how.title(), LOST[how]), f"the derivative of {how.title()} changes"
    solve, a = (lambda a: PLACES[place](a, cube)), A.clone().requires_grad_()
    if transformed:
        with pytest.raises(RuntimeError, match=name):
            slope_of(slope_of(solve))(A)
        return
    (slope,) = torch.autograd.grad(solve(a).sum(), a, create_graph=True)
    want = torch.func.jacrev(lambda a: PLACES[place](a, lambda x: x**3))(A)
    torch.testing.assert_close(slope, want.sum(0), rtol=1e-8, atol=1e-9)
    with pytest.raises(RuntimeError, match=name):
        torch.autograd.grad(slope.sum(), a)
    if how != "blind" and place == "of z":  # that loses what products with J are made of
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(solve(forward_ad.make_dual(A, torch.ones(2, dtype=D)))).tangent
        torch.testing.assert_close(tangent, want.sum(1), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "backward",
    [lambda x, kept, g: 3 * x**2 * g, lambda x, kept, g: g, lambda x, kept, g: (3 * x**2 * g).clamp(-50, 50)],
    ids=["right", "straight through", "clipped"],
)
def test_a_backward_that_autograd_sees_is_differentiated(backward: Callable[..., Tensor]) -> None:
    """One that is meant to be another function's, too."""
    solve = lambda a: ik.root(lambda z, a: z - _written("Own", backward)(a), torch.zeros(2, dtype=D), (a,)).value  # noqa: E731
    a = A.clone().requires_grad_()
    (slope,) = torch.autograd.grad(solve(a).sum(), a, create_graph=True)
    (want,) = torch.autograd.grad(backward(a, 3 * A**2, torch.ones_like(a)).sum() + 0 * a.sum(), a)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), a)[0], want)


PASSED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {  # the value, and what gradients are multiplied by
    "rounded": (torch.round, 1.0),
    "scaled": (torch.clone, 0.1),
    "reversed": (torch.clone, -0.1),
}


@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
@pytest.mark.parametrize("name", PASSED)
def test_second_derivatives_where_gradients_are_passed_on(name: str) -> None:
    """Straight through, scaled, reversed: inside of other functions they were refused, since differences say others."""
    value, by = PASSED[name]
    parts = {"forward": lambda ctx, x: value(x), "backward": lambda ctx, g: by * g}
    made: Any = type(name, (torch.autograd.Function,), {k: staticmethod(part) for k, part in parts.items()})

    def second(passed: Callable[[Tensor], Tensor]) -> Tensor:
        residual = lambda z, a: z + 0.3 * z**3 - 0.05 * passed(3 * z * a).square() - a  # noqa: E731
        a = A.clone().requires_grad_()
        found = ik.root(residual, torch.zeros(2, dtype=D), (a,)).value
        (slope,) = torch.autograd.grad(found.sum(), a, create_graph=True)
        return torch.autograd.grad(slope.sum(), a)[0]

    torch.testing.assert_close(second(made.apply), second(lambda x: by * x + (value(x) - by * x).detach()))


def _product(backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
    parts = {
        "generate_vmap_rule": True,
        "forward": staticmethod(lambda x, w: x * w),
        "setup_context": staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs)),
        "backward": staticmethod(lambda ctx, g: backward(*ctx.saved_tensors, g)),
    }
    made: Any = type("Product", (torch.autograd.Function,), parts)
    return cast("Callable[[Tensor, Tensor], Tensor]", made.apply)


@pytest.mark.parametrize(
    "backward",
    [
        lambda x, w, g: (g * w.detach(), g * x),
        lambda x, w, g: (g * w, g * x.detach()),
        lambda x, w, g: (g * w.detach(), g * x.detach()),
    ],
    ids=["by x", "by w", "both"],
)
def test_a_backward_that_is_a_constant_to_another_input(backward: Callable[..., Any]) -> None:
    """Of a product of the unknowns and a parameter, each derivative of which is that of a linear function."""
    product = _product(backward)
    solve = lambda a: ik.root(lambda z, a: z + 0.3 * z**3 - product(z, a) - 1, torch.zeros(2, dtype=D), (a,)).value  # noqa: E731
    with pytest.raises(RuntimeError, match="the derivative of Product changes"):
        slope_of(slope_of(solve))(A)


def test_a_backward_that_is_right_by_one_input_is_asked_for_the_other() -> None:
    product = _product(lambda x, w, g: (g * w.detach(), g * x))
    f = lambda x, w: (product(x, w) + x**3).sum()  # noqa: E731
    x, w = A.clone().requires_grad_(), A.flip(0).clone().requires_grad_()
    for points, refused in (((x,), False), ((x, w), True)):
        found = autodiff.vjp(lambda *p: f(*p, *(x, w)[len(p) :]), *points)[1](torch.ones((), dtype=D))
        if refused:
            with pytest.raises(RuntimeError, match="the derivative of Product changes"):
                sum(found).sum().backward()
        else:
            found[0].sum().backward()


def test_threads_that_ask_at_once_are_all_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that asked while another one compared had a derivative of zero."""
    cube, together, compared = _written("Asked", LOST["detached"]), threading.Barrier(2), own_functions.Judge._compared
    a, b = (A.clone().requires_grad_() for _ in range(2))
    values = [steady(t, cube).sum() for t in (a, b)]
    monkeypatch.setattr(own_functions.Judge, "_compared", lambda *of: (together.wait(1), compared(*of))[1])

    def refused(value: Tensor, t: Tensor) -> None:
        (slope,) = torch.autograd.grad(value, t, create_graph=True)
        with pytest.raises(RuntimeError, match="the derivative of Asked changes"):
            slope.sum().backward()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refused, values, (a, b)))


def test_what_goes_another_way_has_its_second_derivative() -> None:
    """By what such a function does not see."""
    a, c = A.clone().requires_grad_(), (A / 3).requires_grad_()

    def solve(a: Tensor) -> Tensor:
        return ik.root(lambda z, a, c: z + z**3 - a + Once.apply(c), torch.zeros(2, dtype=D), (a, c)).value

    (slope,) = torch.autograd.grad(solve(a).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), a)
    z = solve(A).detach()
    torch.testing.assert_close(second, -6 * z / (1 + 3 * z**2) ** 3, rtol=1e-8, atol=0)


class OnceInTransforms(torch.autograd.Function):
    """``x^3``, for the transforms of ``torch.func``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


PLACES: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "of z": steady,
    "of z - a": lambda a, cube: ik.root(lambda z, a: z + cube(z - 2 * a) - a, torch.zeros(2, dtype=D), (a,)).value,
    "captured": lambda a, cube: ik.root(lambda z: z + cube(z * a) - 1, torch.zeros(2, dtype=D)).value,
}


def slope_of(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda a: f(a).sum())


FIRST: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "grad": lambda f: slope_of(f)(A),
    "vmap of grad": lambda f: torch.func.vmap(slope_of(f))(torch.stack((A, 1.1 * A))),
    "jacrev of vmap": lambda f: torch.func.jacrev(torch.func.vmap(f))(torch.stack((A, 1.1 * A))),
}
SECOND: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad of grad": lambda f: slope_of(slope_of(f))(A),
    "vmap of grad of grad": lambda f: torch.func.vmap(slope_of(slope_of(f)))(torch.stack((A, 1.1 * A))),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f))(A),
    "backward of grad": lambda f: slope_of(f)(A.clone().requires_grad_()).sum().backward(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", FIRST)
def test_first_derivatives_in_transforms(transform: str, place: str) -> None:
    got = FIRST[transform](lambda a: PLACES[place](a, OnceInTransforms.apply))
    torch.testing.assert_close(got, FIRST[transform](lambda a: PLACES[place](a, lambda x: x**3)), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", SECOND)
def test_second_derivatives_in_transforms_are_refused(transform: str, place: str) -> None:
    """They came without the Function's part."""
    with pytest.raises(RuntimeError, match="@once_differentiable: OnceInTransforms"):
        SECOND[transform](lambda a: PLACES[place](a, OnceInTransforms.apply))


@pytest.mark.parametrize("cube", CUBES)
def test_forward_mode_by_a_krylov_method(cube: str) -> None:
    """``J v`` by the rows of ``J``, where it cannot be had by two reverse passes: the part was left out, or an error."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones(2, dtype=D))
        found = fixed(dual, CUBES[cube], rule=ik.Implicit(linear_solver="gmres"))
        tangent = forward_ad.unpack_dual(found).tangent
    torch.testing.assert_close(tangent, 1 / (1 + 1.5 * fixed(A) ** 2), rtol=1e-8, atol=0)


@pytest.mark.parametrize("cube", CUBES)
@pytest.mark.parametrize("solve", [steady, many])
def test_solvers_that_multiply_by_the_jacobian(solve: Callable[..., Tensor], cube: str) -> None:
    """Those were refused that say so themselves."""
    a = A.clone().requires_grad_()
    found = solve(a, CUBES[cube])
    want = solve(A, lambda z: z**3)
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-10)
    (slope,) = torch.autograd.grad(found.sum(), a)
    torch.testing.assert_close(slope.sum(), difference(lambda a: solve(a, lambda z: z**3), A).sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cube", CUBES)
@pytest.mark.parametrize("constrained", [False, True])
def test_a_minimum_without_second_derivatives(constrained: bool, cube: str) -> None:
    """Is found by the default solver, and has no derivative: of one that is marked it was wrong."""
    a = A.clone().requires_grad_()
    constraints = [ik.Equality(lambda z, a: z[:1] + CUBES[cube](z[1:]) - 1)] if constrained else []

    def loss(z: Tensor, a: Tensor) -> Tensor:
        return ((z - a) ** 2).sum() + (0 if constrained else CUBES[cube](z * 1.0).sum() / 3)

    found = ik.argmin(loss, torch.zeros(2, dtype=D), (a.detach(),), constraints=constraints).value
    slope = 2 * (found - A) + (0 if constrained else found**2)
    along = slope - slope[0] * torch.stack((found[0] * 0 + 1, 3 * found[1] ** 2)) if constrained else slope
    torch.testing.assert_close(along, torch.zeros(2, dtype=D), rtol=0, atol=1e-7)
    with pytest.raises(RuntimeError, match=r"differentiate twice|double backward"):
        ik.argmin(loss, torch.zeros(2, dtype=D), (a,), constraints=constraints).value.sum().backward()
