"""A part of the function that autograd does not see: its derivative is another function's, and that is said."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd

import implicitkit as ik
from implicitkit.rule import hidden_dependence

D, N = torch.float64, 4
W = 0.2 * torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=D)
X = torch.linspace(-1.0, 1.2, N, dtype=D)
Map = Callable[[Tensor, Tensor], Tensor]


class _Wrong(torch.autograd.Function):
    """``sin`` with the derivative of ``cos``."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return torch.sin(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g * torch.sin(ctx.saved_tensors[0])


def _without_grad(z: Tensor) -> Tensor:
    with torch.no_grad():
        return 0.3 * torch.sin(z)


HIDDEN: dict[str, Callable[[], Map]] = {
    "detached": lambda: lambda z, x: torch.tanh(z @ W + 0.3 * z.detach().sin() + x),
    "data": lambda: lambda z, x: torch.tanh(z @ W + 0.3 * z.data.sin() + x),
    "number": lambda: lambda z, x: torch.tanh(z @ W + 0.3 * float(z.detach().sum()) + x),
    "numpy": lambda: lambda z, x: torch.tanh(z @ W + torch.from_numpy(0.3 * z.detach().numpy()) + x),
    "no_grad": lambda: lambda z, x: torch.tanh(z @ W + _without_grad(z) + x),
    "wrong backward": lambda: lambda z, x: torch.tanh(z @ W + 0.3 * _Wrong.apply(z) + x),
    "steps too fine to see": lambda: lambda z, x: torch.round(3e6 * torch.sin(z)) / 1e7 + x,
    "straight through": lambda: lambda z, x: torch.tanh(z @ W + 0.3 * (z + (torch.round(z) - z).detach()) + x),
}
SEEN: dict[str, Callable[[], Map]] = {
    "smooth": lambda: lambda z, x: torch.tanh(z @ W + x),
    "kinks at the solution": lambda: lambda z, x: torch.relu(z @ W + 0 * x),
    "a kink in every other equation": lambda: lambda z, x: 0.3 * torch.relu(z - x) + x,
    "soft threshold": lambda: lambda z, x: torch.nn.functional.softshrink(0.5 * z + x, 0.3),
    "steps": lambda: lambda z, x: 0.3 * torch.sin(z) + x + 0.01 * torch.round(z * 10),
    "steep": lambda: lambda z, x: 1e-3 * torch.sin(200 * z) + x,
    "units": lambda: lambda z, x: 0.3 * z + x * torch.tensor([1e9, 1.0, 1e-9, 1e-3]).to(x),
    "sorted": lambda: lambda z, x: 0.3 * torch.sort(z, -1)[0] + x,
    "a loose solve inside": lambda: (
        lambda z, x: (
            0.5 * ik.fixed_point(lambda y, z: 0.5 * torch.cos(y) + 0.1 * z, torch.zeros_like(z), (z,), rtol=1e-3).value
            + x
        )
    ),
}


@pytest.fixture(autouse=True)
def _nothing_was_asked_before() -> None:
    hidden_dependence._asked.clear()


def _solved(function: Map, x: Tensor, **options: Any) -> Tensor:
    z: Tensor = ik.fixed_point(function, torch.zeros_like(x), (x,), **options).value
    return z


def _warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in seen if issubclass(w.category, ik.ImpureFunctionWarning)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [n for n in HIDDEN if n not in ("numpy", "number", "wrong backward")])
def test_a_part_out_of_sight_is_said(name: str, dtype: torch.dtype) -> None:
    function = HIDDEN[name]()
    cast = lambda z, x: function(z.to(D), x.to(D)).to(dtype)  # noqa: E731
    (said,) = _warned(lambda: grad(lambda x: _solved(cast, x).sum())(X.to(dtype)))
    assert "out of autograd's sight" in said and "z.detach()" in said


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("batched", [False, True])
def test_so_it_is_without_transforms(name: str, batched: bool) -> None:
    x = torch.stack([X, X + 1, X - 1]) if batched and name != "number" else X.clone()
    (said,) = _warned(lambda: _solved(HIDDEN[name](), x.requires_grad_(), batch_dims=x.ndim - 1).sum().backward())
    assert ("of sample" in said) == (x.ndim == 2)


@pytest.mark.parametrize("name", HIDDEN)
def test_it_is_asked_once_for_a_function_and_not_where_all_is_ignored(name: str) -> None:
    x, function = X.clone().requires_grad_(), HIDDEN[name]()
    assert not _warned(lambda: _solved(function, x, on_failure="ignore").sum().backward())
    made_anew = lambda: _solved(HIDDEN[name](), x).sum().backward()  # noqa: E731
    assert len(_warned(made_anew)) == 1
    assert not _warned(made_anew)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SEEN)
def test_what_autograd_sees_is_not_doubted(name: str, dtype: torch.dtype) -> None:
    x, function = X.to(dtype, copy=True).requires_grad_(), SEEN[name]()
    wide = name in ("smooth", "kinks at the solution")  # W is of float64
    cast = lambda z, x: function(z.to(D), x.to(D)).to(dtype) if wide else function(z, x)  # noqa: E731
    assert not _warned(lambda: _solved(cast, x).sum().backward())
    assert not _warned(lambda: jacfwd(lambda x: _solved(cast, x))(x.detach()))


@pytest.mark.parametrize("size", [3e-5, 3e-4])
def test_noise_is_no_hidden_part(size: float) -> None:
    """It makes differences larger than the slope, and others for another step."""
    function = lambda z, x: 0.3 * z + x + size * torch.sin(1e9 * z.detach() + torch.arange(1e3).to(z))  # noqa: E731
    x = torch.linspace(-1, 1, 1000, dtype=D).requires_grad_()
    assert not _warned(lambda: _solved(function, x, rtol=1e-2).sum().backward())


@pytest.mark.parametrize(("cast", "n"), [("autocast", 8), ("inside", 8), ("autocast", 3), ("inside", 3)])
def test_few_digits_are_no_hidden_part(cast: str, n: int) -> None:
    """Steps of a precision that the function rounds to are seen in some equations, and by chance twice in one; of three
    equations, in none (the map looks constant)."""
    for seed in range(24):
        hidden_dependence._asked.clear()
        torch.manual_seed(seed)
        linear, x = torch.nn.Linear(n, n, dtype=torch.float32), torch.randn(2 * n, n, dtype=torch.float32)
        linear.weight.data *= 0.4
        if cast == "autocast":
            function = lambda z, x, linear=linear: torch.tanh(linear(z).float() + x)  # noqa: E731
        else:
            linear.to(torch.bfloat16)
            function = lambda z, x, linear=linear: torch.tanh(linear(z.to(torch.bfloat16)).float() + x)  # noqa: E731

        def run(function: Any = function, x: Tensor = x) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast == "autocast"):
                z = _solved(function, x, batch_dims=1, rtol=2e-2, on_failure="warn")
            z.sum().backward()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ik.ConvergenceWarning)
            assert not _warned(run)


def test_a_hidden_part_without_a_derivative_is_none() -> None:
    """Of third order at the solution: its difference quotient grows with the step."""
    x = X[:3].clone().requires_grad_()
    function = lambda z, x: z - x + 1e10 * (z.detach() - X[:3]) ** 3  # noqa: E731
    assert not _warned(lambda: ik.root(function, X[:3].clone(), (x,)).value.sum().backward())
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


def _evaluations(function: Map, solves: int = 1) -> list[int]:
    """What each derivative evaluates."""
    calls = itertools.count()

    def counted(z: Tensor, x: Tensor) -> Tensor:
        next(calls)
        return function(z, x)

    counts = []
    for _ in range(solves):
        z = _solved(counted, X.clone().requires_grad_())
        before = next(calls)
        z.sum().backward()
        counts.append(next(calls) - before - 1)
    return counts


def _cosine(k: float, thing: object) -> Map:
    return lambda z, x: torch.cos(k * z) + x + 0 * (thing is None)


class _Switched:
    def __init__(self) -> None:
        self.share, self.inner = 0.0, {"share": 0.0}

    def method(self, z: Tensor, x: Tensor) -> Tensor:
        return _partly(z, x, self.share)

    def deeper(self, z: Tensor, x: Tensor) -> Tensor:
        return _partly(z, x, self.inner["share"])


def test_it_costs_two_evaluations_the_first_time_and_seldom_later() -> None:
    counts = _evaluations(_cosine(0.5, X), 130)
    assert [i + 1 for i, n in enumerate(counts) if n == 3] == [1, 4, 8, 16, 32, 64, 128]
    assert {*counts} == {1, 3}


@pytest.mark.parametrize(
    "made", [lambda i: (0.5 + i / 1000, X), lambda i: (0.6, _Switched())], ids=["numbers", "objects"]
)
def test_of_functions_that_are_always_others_sixteen_are_asked(made: Callable[[int], Any]) -> None:
    counts = [_evaluations(_cosine(*made(i)))[0] for i in range(40)]
    assert counts[:16] == 16 * [3] and counts[16:].count(3) <= 1


def _partly(z: Tensor, x: Tensor, share: float) -> Tensor:
    """With so much of it out of sight."""
    return torch.tanh(z @ W + 0.3 * (z + share * (z.detach() - z)).sin() + x)


_SHARE, _ONE, _TENSOR = 0.0, _Switched(), torch.zeros((), dtype=D)


def _globally(z: Tensor, x: Tensor) -> Tensor:
    return _partly(z, x, _SHARE)


def _by_keyword(share: float) -> Map:
    def function(z: Tensor, x: Tensor, *, share: float = share) -> Tensor:
        return _partly(z, x, share)

    return function


def _set(share: float) -> Callable[..., Tensor]:
    global _SHARE
    _SHARE = _ONE.share = _ONE.inner["share"] = share
    _TENSOR.fill_(share)
    return _globally


def _flag(on: bool) -> Map:
    return lambda z, x: _partly(z, x, float(on))


SWITCHES: dict[str, Callable[[float], tuple[Callable[..., Tensor], tuple[Any, ...]]]] = {
    "number": lambda b: (lambda z, x: _partly(z, x, b), ()),
    "flag": lambda b: (_flag(b > 0.1), ()),
    "tuple": lambda b: ((lambda pair: lambda z, x: _partly(z, x, pair[1]))((1, b)), ()),
    "partial": lambda b: (functools.partial(_partly, share=b), ()),
    "keyword": lambda b: (_by_keyword(b), ()),
    "global": lambda b: (_set(b), ()),
    "attribute": lambda b: (_set(b) and _ONE.method, ()),
    "entry": lambda b: (_set(b) and _ONE.deeper, ()),
    "argument": lambda b: (_partly, (b,)),
    "tensor": lambda b: (_set(b) and (lambda z, x: _partly(z, x, float(_TENSOR))), ()),
}


@pytest.mark.parametrize("before", [0.0, 0.01])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_function_of_the_code_of_one_that_was_asked_is_asked_itself(name: str, before: float) -> None:
    def solve(share: float) -> list[str]:
        function, more = SWITCHES[name](share)
        x = X.clone().requires_grad_()
        return _warned(lambda: ik.fixed_point(function, torch.zeros_like(x), (x, *more)).value.sum().backward())

    assert not solve(before)
    assert len(solve(1.0)) == 1 and not solve(1.0)


@pytest.mark.parametrize("place", ["row", "column"])
def test_what_lies_across_the_change_of_the_residual_is_seen(place: str) -> None:
    """The change through the first unknown, or of the first equation, turned by a quarter."""
    across = torch.zeros(N, N, dtype=D)
    (across[:, 0] if place == "row" else across[0])[1] = 0.15
    hidden = lambda z, x: 0.5 * z + z.detach() @ across + x  # noqa: E731
    x = X.clone().requires_grad_()
    assert any(_warned(lambda: _solved(hidden, x).sum().backward()) for _ in range(4))


@pytest.mark.parametrize(
    "solve",
    [
        lambda f, x: ik.root(lambda z, x: f(z, x) - z, torch.zeros_like(x), (x,)),
        lambda f, x: ik.least_squares(lambda z, x: torch.cat([f(z, x) - z, 0.1 * z]), torch.zeros_like(x), (x,)),
    ],
    ids=["root", "least_squares"],
)
def test_so_are_roots_and_fits(solve: Callable[..., Any]) -> None:
    x = X.clone().requires_grad_()
    assert not _warned(lambda: solve(SEEN["smooth"](), x).value.sum().backward())
    hidden = lambda z, x: torch.tanh(z @ W + 0.1 * z.detach().sin() + x)  # noqa: E731
    assert len(_warned(lambda: solve(hidden, x).value.sum().backward())) == 1


def test_a_function_may_refuse_points_beside_the_solution() -> None:
    """At the edge of its domain, and a tenth of the solution away from it."""

    def within(z: Tensor, low: float, high: float) -> Tensor:
        if bool((z < low).any()) or bool((z > high).any()):
            raise ValueError("outside of the domain")
        return z

    x = torch.tensor([0.0, 1.0, 2.0], dtype=D).requires_grad_()
    assert not _warned(lambda: _solved(lambda z, x: 0.5 * within(z, 0, 9) + 0.5 * x, x).sum().backward())
    torch.testing.assert_close(x.grad, torch.ones(3, dtype=D))
    y, start = torch.ones(3, dtype=D).requires_grad_(), torch.full((3,), 0.79, dtype=D)
    objective = lambda z, y: (0.5 * (within(z, 0.77, 0.84) - y).square() + 0.1 * z**3).sum()  # noqa: E731
    assert not _warned(lambda: ik.argmin(objective, start, (y,), solver="newton_cg").value.sum().backward())
    torch.testing.assert_close(y.grad, 2.2**-0.5 * torch.ones(3, dtype=D))


OBJECTIVES: dict[str, Map] = {
    "detached": lambda z, x: 0.5 * (z - x).square().sum() + 0.3 * z.detach().square().sum(),
    "numpy": lambda z, x: 0.5 * (z - x).square().sum() + torch.from_numpy(z.detach().numpy()).sin().sum(),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("options", [{}, {"bounds": (-9.0, 9.0)}, {"project": ik.project.box(-9.0, 9.0)}], ids=str)
def test_of_an_objective_too(name: str, options: dict[str, Any]) -> None:
    """The gradient that autograd has is one of another objective, the derivative of that gradient its own."""
    x = X.clone().requires_grad_()
    solve = lambda f: ik.argmin(f, torch.zeros_like(x), (x,), **options).value.sum().backward()  # noqa: E731
    (said,) = _warned(lambda: solve(OBJECTIVES[name]))
    assert "objective" in said and "The solution is that of what autograd sees" in said
    assert not _warned(
        lambda: solve(lambda z, x: 0.5 * (z - x).square().sum() + 0.3 * z.square().sum() + z.exp().sum())
    )


def test_of_a_constraint_too() -> None:
    x = X.clone().requires_grad_()
    objective = lambda z, x: 0.5 * (z - x).square().sum()  # noqa: E731

    def solve(h: Callable[[Tensor], Tensor]) -> None:
        constraint = ik.Equality(lambda z, x: h(z))
        ik.argmin(objective, torch.zeros_like(x), (x,), constraints=constraint).value.square().sum().backward()

    (said,) = _warned(lambda: solve(lambda z: z.sum() - 1 + 0.3 * z.detach()[0] ** 2))
    assert "with the constraints" in said
    assert not _warned(lambda: solve(lambda z: z.sum() - 1 + 0.3 * z[0] ** 2))


def test_of_a_right_hand_side_too() -> None:
    """Of the change of a step's equations most is that of the states at its ends."""
    x = X.clone().requires_grad_()

    def solve(hide: Callable[[Tensor], Tensor]) -> None:
        problem = ik.InitialValue(lambda t, y, x: x - y - 0.3 * hide(y).sin(), (0.0, 1.0))
        ik.solve(problem, torch.ones_like(x), (x,)).value.sum().backward()

    (said,) = _warned(lambda: solve(Tensor.detach))
    assert "the residual changes by" in said
    assert not _warned(lambda: solve(lambda y: y))


def _simplex(y: Tensor, hide: Callable[[Tensor], Tensor]) -> Tensor:
    """The nearest point of the simplex, its threshold perhaps out of sight."""
    u = y.sort(descending=True)[0]
    k = torch.arange(1, len(y) + 1, dtype=y.dtype)
    threshold = hide(((u.cumsum(0) - 1) / k)[u * k > u.cumsum(0) - 1][-1])
    return (y - threshold).clamp_min(0)


TERMS: dict[str, tuple[str, dict[str, Any]]] = {
    "seen": ("", {"project": lambda y: _simplex(y, lambda t: t)}),
    "a part of a set": ("project= or prox=", {"project": lambda y: _simplex(y, Tensor.detach)}),
    "a part of a term": ("project= or prox=", {"prox": lambda y, t: y - (y * t / (1 + t)).detach()}),
    "a set": ("no z in it", {"project": lambda y: torch.from_numpy(y.detach().numpy().clip(0, 1))}),
    "a term": ("no z in it", {"prox": torch.no_grad()(lambda y, t: y.sign() * (y.abs() - 0.1 * t).clamp_min(0))}),
    "one point": ("", {"project": lambda y: torch.full_like(y, 0.25)}),
}


@pytest.mark.parametrize("name", TERMS)
def test_of_a_set_or_a_term_too(name: str) -> None:
    """Beside ``|z - x|^2 / 2`` the change of ``z - P(z - g)`` is right, and its part in the derivative may be lost."""
    x = X.clone().requires_grad_()
    wanted, options = TERMS[name]
    value = ik.argmin(lambda z, x: 0.5 * (z - x).square().sum(), torch.full_like(x, 0.25), (x,), **options).value
    if wanted == "no z in it":
        with pytest.raises(ik.CapturedTensorError, match=wanted):
            value.sum().backward()
    else:
        said = _warned(lambda: value.sum().backward())
        assert len(said) == bool(wanted) and all(wanted in text for text in said), said


# ----------------------------------------------------------------------------- numbers made of what the solution depends on
Scalar = Callable[[Tensor, Tensor, Tensor], Tensor]  # of z, a, and a captured w


def _number(a: Tensor) -> float:
    with torch.no_grad():
        return a.item()


NUMBERS: dict[str, Scalar] = {
    "item": lambda z, a, w: z - a.item() * torch.cos(0.3 * z) - w,
    "float": lambda z, a, w: z - float(a) * torch.cos(0.3 * z) - w,
    "complex": lambda z, a, w: z - complex(a).real * torch.cos(0.3 * z) - w,
    "tolist": lambda z, a, w: z - torch.cos(0.3 * z) * a.view(1).tolist()[0] - w,
    "numpy": lambda z, a, w: z - torch.cos(0.3 * z) * torch.from_numpy(a.detach().view(1).numpy()) - w,
    "tensor": lambda z, a, w: z - torch.tensor([a, 1.0, 2.0], dtype=z.dtype) * torch.cos(0.3 * z) - w,
    "linspace": lambda z, a, w: z - torch.linspace(0, a, 3, dtype=z.dtype) * torch.cos(0.3 * z) - w,
    "of what it captures": lambda z, a, w: z - w.item() * torch.cos(0.3 * z) - a,
    "of what is computed": lambda z, a, w: z - (a * w).item() * torch.cos(0.3 * z) - a,
}
NO_NUMBERS: dict[str, Scalar] = {
    "a branch": lambda z, a, w: z - (a if a.item() > 0 else -a) * torch.cos(0.3 * z) - w,
    "a whole number": lambda z, a, w: z - a * torch.cos(int(a + 0.5) * 0.3 * z) - w,
    "a step size": lambda z, a, w: (z - a * torch.cos(0.3 * z) - w) / (1 + float(w)),
    "detached": lambda z, a, w: z - a.detach() * torch.cos(0.3 * z) - w,
    "under no_grad": lambda z, a, w: z - _number(a) * torch.cos(0.3 * z) - w,
    "of a constant": lambda z, a, w: z - a * X[3].item() * torch.cos(0.3 * z) - w,
}


def _number(a: Tensor) -> float:
    with torch.no_grad():
        return a.item()


def _scalar(name: str, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Tensor]:
    function, w = (NUMBERS | NO_NUMBERS)[name], torch.tensor(0.4, dtype=dtype, requires_grad=True)
    start = torch.ones(3, dtype=dtype)
    return lambda a: ik.root(lambda z, a: function(z, a, w), start, (a,)).value.sum(), torch.tensor(0.7, dtype=dtype)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("derivative", ["backward", "grad", "jvp"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*NUMBERS, *NO_NUMBERS])
def test_numbers_that_a_function_makes_of_tensors_are_said(name: str, dtype: torch.dtype, derivative: str) -> None:
    f, a = _scalar(name, dtype)
    if name in ("numpy", "tensor", "linspace") and derivative != "backward":
        pytest.skip("torch itself refuses, or warns of, these inside a transform")
    run = {
        "backward": lambda: f(a.requires_grad_()).backward(),
        "grad": lambda: grad(f)(a),
        "jvp": lambda: torch.func.jvp(f, (a,), (torch.ones_like(a),)),
    }[derivative]
    said = _warned(run)
    assert len(said) == (name in NUMBERS)
    assert all("makes numbers of tensors" in text and "The solution is right" in text for text in said)


def test_numbers_are_said_of_samples_modules_and_objectives_once() -> None:
    a, linear = torch.tensor([2.0, 3.0], dtype=D, requires_grad=True), torch.nn.Linear(1, 1, dtype=D)
    each = lambda z, a: z**2 - a.view(-1, 1) * torch.tensor([[float(a[0])]] * len(a)).to(z)  # noqa: E731
    c = torch.tensor(0.3 + 0.1j, requires_grad=True, dtype=torch.complex128)
    of_module = lambda z, a: z**3 + linear(z) - a.view(-1, 1) * (1 + linear.bias.item())  # noqa: E731
    solves: list[Callable[[], Tensor]] = [
        lambda: ik.root(each, torch.ones(2, 1, dtype=D), (a,), batch_dims=1).value,
        lambda: ik.root(of_module, torch.ones(2, 1, dtype=D), (a,), batch_dims=1).value,
        lambda: ik.argmin(lambda z, a: (z - a[0].item() * a).square().sum(), a.detach(), (a,)).value,
        lambda: ik.least_squares(lambda z, a: z - a[0].item() * a, a.detach(), (a,)).value,
        lambda: ik.root(lambda z, c: z - c.real - 1j * c.imag.item(), torch.zeros(2, dtype=c.dtype), (c,)).value.abs(),
    ]
    for solve in solves:
        (said,) = _warned(lambda solve=solve: solve().sum().backward())  # type: ignore[misc]
        assert "makes numbers of tensors" in said
        assert not _warned(lambda solve=solve: solve().sum().backward())  # type: ignore[misc]


LOOKED_AT: dict[str, Map] = {  # constants and numbers that nothing is computed with, beside a tensor that is detached
    "a log": lambda z, a: (a.item(), z.norm().item(), torch.tanh(z))[2],
    "a list": lambda z, a: (a.view(1).tolist(), torch.tanh(z))[1],
    "an array": lambda z, a: (z.detach().numpy(), torch.tanh(z))[1],
    "full_like": lambda z, a: torch.tanh(z) + torch.full_like(z, 0.5),
    "new_full": lambda z, a: torch.tanh(z) + z.new_full((3,), 0.5),
    "as_tensor": lambda z, a: torch.as_tensor(torch.tanh(a * z)),
    "asarray": lambda z, a: torch.asarray(torch.tanh(a * z)),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("name", LOOKED_AT)
def test_numbers_that_are_only_looked_at_are_not_said(name: str) -> None:
    a = torch.tensor(0.3, dtype=D, requires_grad=True)
    function = lambda z, a: 0.3 * LOOKED_AT[name](z, a) * a + a.detach() + X[:3]  # noqa: E731
    start = torch.zeros(3, dtype=D)
    assert not _warned(lambda: ik.fixed_point(function, start, (a,)).value.sum().backward())


@pytest.mark.parametrize("dtype", [D, torch.float32], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.1, 1e-2])
def test_numbers_are_said_however_little_of_all_they_carry(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, scale = torch.nn.Linear(8, 8, dtype=dtype), torch.tensor(0.3, dtype=dtype, requires_grad=True)
    function = lambda z: 0.3 * torch.tanh(linear(z) + share * scale.item() * torch.cos(z))  # noqa: E731
    (said,) = _warned(lambda: ik.fixed_point(function, torch.zeros(8, dtype=dtype)).value.sum().backward())
    assert "makes numbers of tensors" in said


@pytest.mark.parametrize("more", ["there", "here"])
def test_numbers_of_another_branch_say_nothing(more: str) -> None:
    """Beside it more or fewer of them are made: what they carry cannot be told."""
    a = torch.tensor(0.3, dtype=D, requires_grad=True)
    one, two = (lambda a: a.item()), (lambda a: a.item() + 0 * a.item())
    here, there = (one, two) if more == "there" else (two, one)
    function = lambda z, a: z - (here(a) if a.detach() == 0.3 else there(a)) - X[:3] + 0 * a  # noqa: E731
    assert not _warned(lambda: ik.root(function, torch.zeros(3, dtype=D), (a,)).value.sum().backward())


PROGRAMS: dict[str, tuple[bool, Map, dict[str, Any]]] = {  # is it said?  The objective, and what constrains it
    "equality": (
        True,
        lambda z, k: (z - 1).square().sum(),
        {"constraints": ik.Equality(lambda z, k: z.sum() - k.item())},
    ),
    "bounds": (True, lambda z, k: (z - k.item()).square().sum(), {"bounds": (0.0, 3.0)}),
    "set": (True, lambda z, k: (z - k.item()).square().sum(), {"project": ik.project.box(0.0, 3.0)}),
    "inactive": (
        False,
        lambda z, k: (z - k).square().sum(),
        {"constraints": ik.Inequality(lambda z, k: z.sum() - 10 * k.item())},
    ),
    "offset": (False, lambda z, k: (z - k).square().sum() + k.item(), {"bounds": (0.0, 3.0)}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_in_programs_are_said_where_the_solution_depends_on_them(name: str) -> None:
    said, objective, how = PROGRAMS[name]
    k = torch.tensor(0.5, dtype=D, requires_grad=True)
    found = _warned(lambda: ik.argmin(objective, torch.zeros(2, dtype=D), (k,), **how).value.sum().backward())
    assert ["makes numbers of tensors" in text for text in found] == [True] * said
    assert said or (k.grad is not None and float(k.grad) == pytest.approx(2.0))


def test_numbers_of_arguments_that_are_constants_are_not_said() -> None:
    a, k, one = (torch.tensor([v], dtype=D) for v in (2.0, 3.0, 1.0))
    solve = lambda a, k: ik.root(lambda z, a, k: z**2 - a * k.item(), one, (a, k)).value  # noqa: E731
    assert not _warned(lambda: solve(a.requires_grad_(), k).sum().backward())
    assert len(_warned(lambda: solve(a, k.requires_grad_()).sum().backward())) == 0  # the function was asked about
    hidden_dependence._asked.clear()
    assert len(_warned(lambda: solve(a, k).sum().backward())) == 1


def test_a_step_size_is_none_where_the_solution_is_loose() -> None:
    """It scales what is left of the residual."""
    w = torch.tensor(0.5, dtype=D, requires_grad=True)
    step = lambda z, w: z - (z - X + 0.1 * torch.sin(z)) / (1 + w.item())  # noqa: E731
    solution = ik.fixed_point(step, torch.zeros_like(X), (w,), solver="picard", rtol=1e-2)
    assert float(solution.residual_norm) > 1e-4
    assert not _warned(lambda: solution.value.sum().backward())
    assert w.grad is not None and float(w.grad) == 0


@pytest.mark.parametrize(("kept", "said"), [(0.0, 0), (0.3, 1)])
def test_what_is_flat_beside_a_solution_of_the_size_of_rounding(kept: float, said: int) -> None:
    """An epidemic below its threshold: ``1 - exp(-R z)`` moves by units in the last place of one, and ``z`` by less."""

    def infected(z: Tensor, R: Tensor) -> Tensor:
        return 1 - torch.exp(-R * z) + kept * (z.detach() - z)

    R = torch.tensor(0.8, dtype=D)
    warned = _warned(lambda: grad(lambda R: ik.fixed_point(infected, torch.tensor(0.5, dtype=D), (R,)).value)(R))
    assert len(warned) == said


@pytest.mark.parametrize("unit", [1e-6, 1e-12, 1e-14, 1e-20])
def test_nor_is_a_function_in_small_units_flat(unit: float) -> None:
    """Along a ``v`` that is longer by far than what the function varies over nothing is seen, and nothing is explained."""

    def residual(z: Tensor, a: Tensor) -> Tensor:
        return (z / unit) ** 2 + z / unit - a + 0.5 * z.detach() / unit

    a = torch.ones((), dtype=D)
    assert (
        len(_warned(lambda: grad(lambda a: ik.root(residual, torch.tensor(0.5 * unit, dtype=D), (a,)).value)(a))) == 1
    )
