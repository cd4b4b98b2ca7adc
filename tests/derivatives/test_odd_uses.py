"""Uses that combine what other files test apart, each against a closed form: solves inside solves inside transforms, layers
whose parameters are arguments, captured tensors in odd places."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import implicitkit as ik
from implicitkit_deq import DEQ

D, C = torch.float64, torch.complex128
ROW: dict[str, Callable[[], tuple[Any, Any]]] = {}


def row(f: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """What is found, and what is true."""
    ROW[f.__name__.strip("_")] = f
    return f


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=D) if len(numbers) != 1 else torch.tensor(numbers[0], dtype=D)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=D)


def root(x: Tensor) -> Tensor:
    """The square root, of a tensor that is captured."""
    value: Tensor = ik.root(lambda z: z * z - x, torch.ones_like(x)).value
    return value


def orders(f: Callable[[Tensor], Tensor], x: Tensor, n: int) -> list[Tensor]:
    """The value and ``n`` derivatives by reverse mode."""
    found = [f(x)]
    for _ in range(n):
        f = grad(f)
        found.append(f(x))
    return found


class Cell(nn.Module):
    def __init__(self, scale: float = 0.3) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3, dtype=D)
        with torch.no_grad():
            self.lin.weight.copy_(scale * torch.linspace(-1, 1, 9, dtype=D).reshape(3, 3))
            self.lin.bias.copy_(t(0.1, -0.2, 0.3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.lin(z) + x


def layer(scale: float = 0.3) -> DEQ:
    return DEQ(Cell(scale), (3,), rtol=1e-12, max_steps=300)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The equilibrium of :class:`Cell`."""
    return torch.linalg.solve(torch.eye(3, dtype=D) - weight, (x + bias).mT).mT


X = torch.linspace(-1, 1, 6, dtype=D).reshape(2, 3)


# ------------------------------------------------------------------------------------------------------- solves in solves
@row
def _third_derivative_of_a_root_of_a_root() -> Any:
    f = lambda x: ik.root(lambda z: z * z - root(x), ones()).value  # noqa: E731
    return orders(f, t(2.0), 3), orders(lambda x: x**0.25, t(2.0), 3)


@row
def _three_levels_that_all_capture() -> Any:
    """y = sqrt(a y) + a, of which a is the only scale: y = a ((1 + sqrt 5) / 2)^2."""
    f = lambda a: ik.root(lambda y: y - ik.root(lambda u: u * u - a * y, ones()).value - a, t(5.0)).value  # noqa: E731
    s = ((1 + 5**0.5) / 2) ** 2
    return orders(f, t(2.0), 2), [t(2 * s), t(s), t(0.0)]


@row
def _a_root_in_a_minimum_under_vmap() -> Any:
    f = lambda a: ik.argmin(lambda x: (root(x) - a) ** 2, t(1.5)).value  # noqa: E731
    a = t(1.2, 1.5)
    return [vmap(g)(a) for g in (f, grad(f), grad(grad(f)))], [a * a, 2 * a, torch.full_like(a, 2.0)]


@row
def _a_minimum_in_a_root() -> Any:
    f = lambda a: ik.root(lambda y: ik.argmin(lambda z: (z - y * y) ** 2 + a * z, t(0.0)).value - 1, ones()).value  # noqa: E731
    return orders(f, t(0.5), 2), orders(lambda a: (1 + a / 2).sqrt(), t(0.5), 2)


@row
def _a_program_in_a_fixed_point() -> Any:
    def f(a: Tensor) -> Tensor:
        bounds = {"G": -torch.eye(2, dtype=D), "h": torch.zeros(2, dtype=D)}
        step = lambda z: 0.5 * ik.solve(ik.QuadraticProgram(torch.eye(2, dtype=D), -(z + a), **bounds)).value  # noqa: E731
        return ik.fixed_point(step, ones(2)).value

    a = t(1.0, 2.0)
    return [f(a), jacrev(f)(a), jacfwd(f)(a)], [a, torch.eye(2, dtype=D), torch.eye(2, dtype=D)]


@row
def _shooting() -> Any:
    """y' = a y with y(1) = c y(0): a = log c."""

    def f(c: Tensor) -> Tensor:
        end = lambda a: ik.solve(ik.InitialValue(lambda s, y: a * y, t(0.0, 1.0)), ones(1)).value[-1, 0]  # noqa: E731
        return ik.root(lambda a: end(a) - c, t(0.3)).value

    c = t(2.0)
    return orders(f, c, 2), orders(torch.log, c, 2)


@row
def _the_least_value_of_a_minimum() -> Any:
    def least(x: Tensor) -> Tensor:
        z = ik.argmin(lambda z: (z - x) ** 2 + z**4, t(0.0)).value
        return (z - x) ** 2 + z**4

    x = t(1.3)
    z = ik.root(lambda z: 2 * (z - x) + 4 * z**3, ones()).value
    return orders(least, x, 2)[1:], [-2 * (z - x), -2 * (2 / (2 + 12 * z * z) - 1)]


@row
def _constraints_that_capture() -> Any:
    """The nearest point to (a, a) of those whose sum is a^2: both entries a^2 / 2."""

    def f(a: Tensor) -> Tensor:
        on = [ik.Equality(lambda z: z.sum() - a * a)]
        return ik.argmin(lambda z: ((z - a) ** 2).sum(), ones(2), constraints=on).value.square().sum()

    return orders(f, t(1.5), 2), orders(lambda a: a**4 / 2, t(1.5), 2)


@row
def _bounds_that_are_differentiated_and_batched() -> Any:
    def f(a: Tensor) -> Tensor:
        return ik.argmin(lambda z: (z**2).sum(), 3 * ones(2), bounds=(a * a, None)).value.square().sum()

    a = t(1.0, 0.5)
    found = [jacrev(f)(a), hessian(f)(a), vmap(grad(f))(torch.stack([a, 2 * a]))]
    return found, [4 * a**3, torch.diag(12 * a**2), torch.stack([4 * a**3, 32 * a**3])]


@row
def _a_node_that_captures_what_is_differentiated() -> Any:
    def f(a: Tensor) -> Tensor:
        nodes = {
            "u": (ik.FixedPoint(lambda u, x: a * u + x), "x"),
            "v": (ik.FixedPoint(lambda v, u: 0.25 * v + a * u), "u"),
        }
        return ik.solve(ik.compose(nodes, output="v"), {"u": t(0.0), "v": t(0.0)}, (t(1.0),)).value["v"]

    true = lambda a: a / (1 - a) / 0.75  # noqa: E731
    a = t(0.1, 0.5)
    return [*orders(f, a[1], 2), vmap(grad(f))(a)], [*orders(true, a[1], 2), vmap(grad(true))(a)]


# ----------------------------------------------------------------------------------------------------------------- layers
def _named(d: nn.Module) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor], Tensor], Tensor]]:
    p = {name: q.detach().clone() for name, q in d.named_parameters()}
    (weight,), (bias,) = ([n for n in p if word in n] for word in ("weight", "bias"))
    return p, lambda p, x: linear(x, p[weight], p[bias])


@row
def _gradients_of_every_sample_by_its_parameters() -> Any:
    d = layer()
    p, true = _named(d)
    of = lambda f: vmap(grad(lambda p, x: f(p, x[None]).square().sum()), (None, 0))(p, X)  # noqa: E731
    return of(lambda p, x: functional_call(d, p, (x,))), of(true)


@row
def _a_step_of_training_that_is_differentiated() -> Any:
    d = layer()
    p, true = _named(d)

    def after(f: Callable[[dict[str, Tensor], Tensor], Tensor]) -> Any:
        loss = lambda p: f(p, X).square().sum()  # noqa: E731
        return grad(
            lambda p: loss({n: q - 0.1 * g for (n, q), g in zip(p.items(), grad(loss)(p).values(), strict=True)})
        )(p)

    return after(lambda p, x: functional_call(d, p, (x,))), after(true)


@row
def _an_ensemble_of_layers() -> Any:
    layers = [layer(s) for s in (0.1, 0.2, 0.3)]
    state = stack_module_state(layers)  # type: ignore[arg-type]
    found = vmap(lambda p, b: functional_call(layers[0], (p, b), (X,)))(*state)
    return found, torch.stack([linear(X, d.cell.lin.weight, d.cell.lin.bias) for d in layers]).detach()


@row
def _a_layer_twice_whose_weight_decodes_too() -> Any:
    d = layer()
    x = X.clone().requires_grad_()
    once = lambda x: linear(x, d.cell.lin.weight, d.cell.lin.bias)  # noqa: E731
    of = [x, d.cell.lin.weight, d.cell.lin.bias]
    slopes = lambda f: torch.autograd.grad((f(f(x)) @ d.cell.lin.weight).square().sum(), of)  # noqa: E731
    return slopes(d), slopes(once)


@row
def _weights_that_are_tied_inside() -> Any:
    a, b = (nn.Linear(2, 2, bias=False, dtype=D) for _ in range(2))
    b.weight = a.weight
    with torch.no_grad():
        a.weight.copy_(torch.tensor([[0.2, -0.1], [0.3, 0.1]]))
    x = t(1.0, -2.0)
    z = ik.fixed_point(lambda z: a(b(z)) + x, torch.zeros(2, dtype=D)).value
    true = torch.linalg.solve(torch.eye(2, dtype=D) - a.weight @ a.weight, x)
    return torch.autograd.grad(z.sum(), a.weight), torch.autograd.grad(true.sum(), a.weight)


@row
def _a_module_as_an_argument_and_a_copy_of_it() -> Any:
    m = nn.Linear(1, 1, dtype=D)
    with torch.no_grad():
        m.weight.fill_(0.5), m.bias.fill_(1.0)
    slopes = []
    for module in (m, copy.deepcopy(m)):
        z = ik.fixed_point(lambda z, m: m(z), torch.zeros(1, dtype=D), (module,)).value
        slopes += torch.autograd.grad(z.sum(), list(module.parameters()))
    return slopes, [t(4.0).reshape(1, 1), t(2.0).reshape(1)] * 2


# ------------------------------------------------------------------------------------------------- where a tensor is held
@dataclasses.dataclass
class Held:
    slope: Any
    rest: Any


@row
def _held_in_a_dataclass_a_partial_a_default_and_a_dict_of_lists() -> Any:
    k = [t(number).requires_grad_() for number in (1.0, 2.0, 3.0, 4.0)]
    kept = {"rest": [k[3]]}

    def f(z: Tensor, held: Held, *, by_keyword: Tensor, by_default: Tensor = k[2]) -> Tensor:
        return 0.5 * z + held.slope * by_keyword * by_default * kept["rest"][0]

    z = ik.fixed_point(functools.partial(f, by_keyword=k[1]), t(0.0), (Held(k[0], None),)).value
    return torch.autograd.grad(z, k), [t(48.0), t(24.0), t(16.0), t(12.0)]


@row
def _an_argument_that_is_captured_too_and_the_start() -> Any:
    x = t(2.0).requires_grad_()
    z = ik.root(lambda z, y: z * z - x * y, x, (x,)).value
    return torch.autograd.grad(z, x)[0], t(1.0)


@row
def _views_of_one_parameter_made_inside_and_outside() -> Any:
    w = t(0.1, 0.2, 1.0, 2.0).requires_grad_()
    slopes = w[:2]
    z = ik.fixed_point(lambda z: slopes * z + w[2:], torch.zeros(2, dtype=D)).value
    return torch.autograd.grad(z.sum(), w)[0], torch.cat([t(1 / 0.81, 2 / 0.64), t(1 / 0.9, 1 / 0.8)])


@row
def _an_index_that_is_batched_and_captured() -> Any:
    x, i = torch.arange(1.0, 9.0, dtype=D).reshape(2, 4), torch.tensor([3, 1])
    return vmap(lambda x, i: root(x[i]))(x, i), t(2.0, 6.0**0.5)


@row
def _a_backward_on_another_thread() -> Any:
    x, found = t(2.0, 3.0).requires_grad_(), []
    z = root(x)
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(z.sum(), x)))
    thread.start()
    thread.join()
    return found, [0.5 * x.detach() ** -0.5]


# ---------------------------------------------------------------------------------------------------------------- complex
@row
def _a_map_that_conjugates_in_both_modes() -> Any:
    a, b, along = (torch.tensor(c, dtype=C) for c in (0.3 + 0.2j, 1 - 1j, 0.7 + 0.1j))
    f = lambda b: ik.fixed_point(lambda z: a * z.conj() + b, torch.zeros((), dtype=C)).value  # noqa: E731
    true = lambda b: (b + a * b.conj()) / (1 - abs(a) ** 2)  # noqa: E731
    each = lambda f: [f(b), jvp(f, (b,), (along,))[1], vjp(f, b)[1](along)[0]]  # noqa: E731
    return each(f), each(true)


@row
def _a_real_beside_a_complex_unknown() -> Any:
    def f(a: Tensor) -> Tensor:
        start = {"r": ones(), "c": torch.tensor(0.1 + 1j, dtype=C)}
        z = ik.root(lambda z: {"r": z["r"] ** 2 - a, "c": z["c"] * z["c"] + a}, start).value
        return z["r"] + z["c"].imag

    a = t(2.0, 3.0)
    return [*orders(f, a[0], 2), vmap(grad(f))(a)], [*orders(lambda a: 2 * a.sqrt(), a[0], 2), a**-0.5]


# ---------------------------------------------------------------------------------------- what it gives to transforms inside
def in_every_way(f: Callable[[Tensor], Tensor], a: Tensor) -> list[Tensor]:
    """Values, two derivatives, and the same in forward mode and under vmap, by ``backward`` at last."""
    leaf = a.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    second = torch.autograd.grad(first, leaf)[0]
    return [*orders(f, a, 2), jacfwd(f)(a), jacfwd(jacfwd(f))(a), vmap(grad(f))(a.expand(2)), first, second]


@row
def _points_that_depend_on_what_is_differentiated() -> Any:
    """z = m (z / 2 + a), where the mean of the points is m = a / 3."""

    def f(a: Tensor) -> Tensor:
        points = a * t(1.0, 2.0, 3.0) / 6
        return ik.fixed_point(lambda z: vmap(lambda x: 0.5 * z * x + a * x)(points).mean(), t(0.0)).value

    return in_every_way(f, t(0.7)), in_every_way(lambda a: a * a / 3 / (1 - a / 6), t(0.7))


@row
def _points_of_two_maps() -> Any:
    """z = a b (z / 2 + 1), the means of the products of the points."""

    def f(a: Tensor) -> Tensor:
        first, second = a * t(0.5, 1.5), torch.stack([a, a]) * 0.5
        inner = lambda z: vmap(lambda x: vmap(lambda y: x * y * (0.5 * z + 1))(second).mean())(first).mean()  # noqa: E731
        return ik.fixed_point(inner, t(0.0)).value

    return in_every_way(f, t(0.7)), in_every_way(lambda a: a * a / 2 / (1 - a * a / 4), t(0.7))


@row
def _a_differential_equation_at_points_made_inside() -> Any:
    """u = z x^3 has u'' = 6 z x, of mean 3 z: z^3 + 3 z = a."""

    def f(a: Tensor) -> Tensor:
        points = torch.linspace(0.0, 1.0, 5, dtype=D)
        curvature = grad(grad(lambda x, z: z * x**3))
        return ik.root(lambda z: vmap(lambda x: curvature(x, z))(points).mean() + z**3 - a, ones()).value

    return in_every_way(f, t(4.0)), in_every_way(
        lambda a: ik.root(lambda z, a: z**3 + 3 * z - a, ones(), (a,)).value, t(4.0)
    )


def _by_a_gradient(x: Tensor, *args: Tensor) -> Tensor:
    """z = 1 + x^2 z / 2, by the gradient of x^3 z / 6."""
    of = lambda x, z: x**3 * z / 6  # noqa: E731
    value: Tensor = ik.fixed_point(lambda z, x=x: 1 + grad(of)(x, z), ones(), args).value
    return value


@row
def _a_gradient_by_what_is_captured() -> Any:
    true = lambda x: 1 / (1 - x * x / 2)  # noqa: E731
    each = lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0]  # noqa: E731
    x = t(0.7).requires_grad_()
    twice = lambda f: [f(x), each(f, x), torch.autograd.grad(each(f, x), x)[0]]  # noqa: E731
    given = lambda x: _by_a_gradient(x, x)  # noqa: E731
    return [*twice(_by_a_gradient), in_every_way(given, t(0.7))], [*twice(true), in_every_way(true, t(0.7))]


@row
def _constants_of_numpy_in_a_solve_within_a_solve() -> Any:
    """3 y + z = 3 a^2 and z = y / 4: numbers that no operation of torch made, wrapped by the transforms around."""

    def inner(z: Tensor, a: Tensor) -> Tensor:
        three = lambda: torch.from_numpy(np.array(3.0)) * torch.DoubleTensor([1.0]).sum()  # noqa: E731
        return ik.root(lambda y: three() * y + z - three() * a * a, ones()).value

    f = lambda a: ik.root(lambda z: z - inner(z, a) * torch.from_numpy(np.array(0.25)), ones()).value  # noqa: E731
    return in_every_way(f, t(0.7)), in_every_way(lambda a: 0.25 * a * a / (1 + 0.25 / 3), t(0.7))


@pytest.mark.parametrize("transform", [grad, jacfwd])
def test_a_gradient_by_what_is_captured_under_a_transform_is_refused_in_words(transform: Callable[..., Any]) -> None:
    with pytest.raises(ik.CapturedTensorError, match=r"a torch\.func transform around the solve .* Pass that tensor"):
        transform(_by_a_gradient)(t(0.7))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ROW)
def test_an_odd_use_has_its_closed_form(name: str) -> None:
    found, want = ROW[name]()
    detached = lambda tree: torch.utils._pytree.tree_map(torch.Tensor.detach, tree)  # noqa: E731
    leaves, true = (torch.utils._pytree.tree_leaves(detached(tree)) for tree in (found, want))
    assert len(leaves) == len(true)
    for leaf, other in zip(leaves, true, strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-5, atol=1e-6)
