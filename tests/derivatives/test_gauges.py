"""What does not change along a family of solutions has a derivative in reverse mode, by default; the rest is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import DegenerateWarning

WINS = torch.tensor([[0, 3, 2, 5], [4, 0, 1, 2], [6, 2, 0, 3], [1, 7, 4, 0]], dtype=torch.float64)
LEADS = torch.tensor([[0, 2, 0, 1], [2, 0, 3, 0], [0, 3, 0, 5], [1, 0, 5, 0]], dtype=torch.float64)
CURRENTS = torch.tensor([2.0, -1.0, -0.5, -0.5], dtype=torch.float64)
P = torch.tensor([0.7, 1.3], dtype=torch.float64)


def unlikely(s: Tensor, p: Tensor) -> Tensor:
    """Bradley and Terry's model of who wins against whom."""
    wins = WINS + p[0] * WINS.T.roll(1, 0).fill_diagonal_(0) + p[1] * WINS.square()
    return -(wins * torch.nn.functional.logsigmoid(s[:, None] - s)).sum()


def balance(v: Tensor, p: Tensor) -> Tensor:
    """Kirchhoff's law in a network without a ground; currents grow with the voltage and its cube."""
    over = v[:, None] - v
    return (LEADS * (p[0] * over + over**3)).sum(1) - p[1] * CURRENTS


def sweep(f: Tensor, p: Tensor) -> Tensor:
    """Sinkhorn's, of potentials."""
    cost, a = LEADS, torch.full_like(f, 0.25).log()
    g = p[0] * (a - torch.logsumexp((f[:, None] - p[1] * cost) / p[0], 0))
    return p[0] * (a - torch.logsumexp((g - p[1] * cost) / p[0], 1))


#: name -> (verb, function, its equations).
GAUGES: dict[str, tuple[Callable[..., ik.Solution], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "ratings": (ik.argmin, unlikely, torch.func.grad(unlikely)),
    "potentials": (ik.root, balance, balance),
    "duals of transport": (ik.fixed_point, sweep, lambda f, p: sweep(f, p) - f),
}


def free(name: str, p: Tensor, **options: object) -> Tensor:
    verb, function, _ = GAUGES[name]
    return verb(function, 0.1 * CURRENTS.to(p), (p,), **options).value


def grounded(name: str, p: Tensor) -> Tensor:
    """The same with its first unknown at zero, and without its first equation."""
    whole = lambda s: torch.cat([0 * s[:1], s])  # noqa: E731
    s = ik.root(lambda s, p: GAUGES[name][2](whole(s), p)[1:], 0.1 * CURRENTS[1:], (p,)).value
    return whole(s)


@pytest.mark.parametrize("name", GAUGES)
def test_differences_have_derivatives_and_it_is_said_that_they_are_all_that_has(name: str) -> None:
    differences = lambda z: z - z[0]  # noqa: E731
    wanted = torch.func.jacrev(lambda p: differences(grounded(name, p)))(P)
    with pytest.warns(DegenerateWarning, match="a gauge"):
        found = torch.func.jacrev(lambda p: differences(free(name, p)))(P)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    with pytest.warns(DegenerateWarning, match="a gauge"):
        each = torch.vmap(torch.func.jacrev(lambda p: differences(free(name, p))))(torch.stack([P, 1.1 * P]))
    torch.testing.assert_close(each[0], wanted, rtol=1e-7, atol=1e-9)
    with warnings.catch_warnings():  # who asks for least norm knows
        warnings.simplefilter("error", DegenerateWarning)
        least = ik.Implicit(linear_solver="lsmr")
        found = torch.func.jacfwd(lambda p: differences(free(name, p, rule=least)))(P)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", GAUGES)
def test_what_changes_along_the_family_is_refused(name: str) -> None:
    with pytest.raises(ik.ConvergenceError, match="singular"):
        torch.func.jacrev(lambda p: free(name, p)[1])(P)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("what", [lambda z: z[1], lambda z: z[1] - z[0]], ids=["beside it", "across it"])
def test_a_double_root_is_no_family(what: Callable[[Tensor], Tensor], mapped: bool) -> None:
    """``z_0^2 = p, z_1 = z_0^2 (+ z_0)`` at ``p = 0``: what is asked for lies in the range of ``A^T``, and its derivative
    is one towards ``p > 0``, not zero, or infinite."""
    across = float(what(torch.tensor([1.0, 1.0])) == 0)
    f = lambda z, p: torch.stack([z[0] ** 2 - p, z[1] - z[0] ** 2 - across * z[0]])  # noqa: E731
    derivative = torch.func.jacrev(lambda p: what(ik.root(f, p.new_zeros(2), (p,)).value))
    with pytest.raises(ik.ConvergenceError, match="singular"):
        if mapped:
            torch.vmap(derivative)(torch.zeros(2, dtype=torch.float64))
        else:
            derivative(torch.zeros((), dtype=torch.float64))


#: equations with a root of higher order at zero, and a function of the unknowns that lies in the range of ``A^T`` there.
ORDERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "of order three": (lambda z, p: torch.stack([z[0] ** 3 - p, z[1] - z[0] ** 3]), lambda z: z[1]),
    "of order three, across": (
        lambda z, p: torch.stack([z[0] ** 3 - p, z[1] - z[0]]),
        lambda z: z[1] - z[0] + z[0] ** 3,
    ),
    "of order four": (lambda z, p: torch.stack([z[0] ** 4 - p, z[1] - z[0] ** 4]), lambda z: z[1]),
    "of order five": (lambda z, p: torch.stack([z[0] ** 5 - p, z[1] - z[0] ** 5]), lambda z: z[1]),
    "a pitchfork": (
        lambda z, p: torch.stack([z[0] ** 3 - p * z[0] - 4 * z[0] * (z[1] - z[0] ** 2), 2 * (z[1] - z[0] ** 2)]),
        lambda z: z[1],
    ),
}


@pytest.mark.parametrize("row", ORDERS)
def test_a_root_of_higher_order_is_no_family(row: str) -> None:
    equations, what = ORDERS[row]
    derivative = torch.func.jacrev(lambda p: what(ik.root(equations, p.new_zeros(2), (p,)).value))
    with pytest.raises(ik.ConvergenceError, match="singular"):
        derivative(torch.zeros((), dtype=torch.float64))


def test_units_in_which_nobody_knows_what_is_zero() -> None:
    """A network without a ground beside an equation in units of 1e-13, which is no zero like the gauge's: refused."""

    def equations(z: Tensor, p: Tensor) -> Tensor:
        return torch.cat([balance(z[:4], P), 1e-13 * (z[4:] - p)])

    derivative = torch.func.jacrev(lambda p: ik.root(equations, P.new_zeros(5), (p,)).value[4] * 1e-12)
    with pytest.raises(ik.ConvergenceError, match="singular"):
        derivative(P.new_ones(1))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_curved_family_is_one(size: float) -> None:
    """``z^2 = p`` of a vector, which may be turned, said twice: ``d |z|^2 / dp = 1``."""
    f = lambda z, p: (z.square().sum() - p).expand(2)  # noqa: E731
    z0 = size**0.5 * torch.tensor([0.8, 0.5], dtype=torch.float64)
    p = torch.tensor(size, dtype=torch.float64)
    with pytest.warns(DegenerateWarning, match="a gauge"):
        found = torch.func.jacrev(lambda p: ik.root(f, z0, (p,)).value.square().sum())(p)
    torch.testing.assert_close(found, torch.ones_like(p), rtol=1e-6, atol=0)


def test_a_double_root_is_refused_in_both_modes() -> None:
    solve = lambda c: ik.root(lambda z, c: z**3 - c**3, c.new_zeros(2), (c,)).value.sum()  # noqa: E731
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(ik.ConvergenceError, match="singular"):
            derivative(solve)(torch.zeros(2, dtype=torch.float64))
