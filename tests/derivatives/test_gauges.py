"""What does not change along a family of solutions has a derivative in reverse mode, by default; the rest is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

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


def bend(z: Tensor) -> Tensor:
    """A scalar of differences, of which no second derivative vanishes."""
    d = z - z.mean()
    return (d * torch.arange(1.0, 5.0, dtype=torch.float64)).sum().exp() + d.pow(3).sum()


#: how a matrix of second derivatives is asked for.
SECOND: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "hessian": torch.func.hessian,
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "double backward": lambda f: lambda p: torch.autograd.functional.hessian(f, p),
    "vmap of hessian": lambda f: lambda p: torch.vmap(torch.func.hessian(f))(torch.stack([1.1 * p, p]))[1],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", SECOND)
@pytest.mark.parametrize("name", GAUGES)
def test_differences_have_second_derivatives(name: str, how: str) -> None:
    wanted = torch.func.hessian(lambda p: bend(grounded(name, p)))(P)
    with pytest.warns(DegenerateWarning, match="a gauge"):
        found = SECOND[how](lambda p: bend(free(name, p)))(P)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_second_derivatives_where_a_parameter_moves_nothing() -> None:
    """The currents and all leads times ``p_0``, which moves no potential: what is left of it is rounding."""
    solve = lambda p: ik.root(lambda v: p[0] * balance(v, p[1:]), 0.1 * CURRENTS).value  # noqa: E731
    p = torch.cat([P.new_tensor([3.0]), P])
    with pytest.warns(DegenerateWarning, match="a gauge"):
        found = torch.func.hessian(lambda p: bend(solve(p)))(p)
    wanted = torch.func.hessian(lambda p: bend(grounded("potentials", p)))(P)
    torch.testing.assert_close(found[1:, 1:], wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[0], torch.zeros_like(p), rtol=0, atol=1e-8)


@pytest.mark.parametrize("modes", [(torch.func.jacrev, torch.func.jacfwd), (torch.func.jacfwd, torch.func.jacfwd)])
def test_nothing_shows_what_is_asked_of_a_tangent(modes: tuple[Callable[..., Callable], ...]) -> None:
    outer, inner = modes
    with pytest.raises(ik.ConvergenceError, match="singular"):
        outer(inner(lambda p: bend(free("potentials", p))))(P)


@pytest.mark.parametrize("how", ["hessian", "double backward"])
def test_second_derivatives_along_a_change_that_leaves_no_solutions_are_refused(how: str) -> None:
    """One more unit of current into a network, and none out of it."""
    into = torch.eye(4, dtype=torch.float64)[0]
    leaking = lambda p: ik.root(lambda v: balance(v, p[:2]) + p[2] * into, 0.1 * CURRENTS).value  # noqa: E731
    with pytest.raises(ik.ConvergenceError, match="singular"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateWarning)
        SECOND[how](lambda p: bend(leaking(p)))(torch.cat([P, P.new_zeros(1)]))


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
    for share in (1e-6, 1e-8, 1e-10):  # beside what the gauge leaves alone: its derivative would be zero
        z = lambda p: ik.root(equations, P.new_zeros(5), (p,)).value  # noqa: E731
        with pytest.raises(ik.ConvergenceError, match="singular"):
            torch.func.jacrev(lambda p: z(p)[0] - z(p)[1] + share * z(p)[4])(P.new_ones(1))  # noqa: B023


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


# ---------------------------------------------------------------------------------------------------------------------
# Hermitian eigenpairs as a root: the phase of the eigenvector is free, so that the Jacobian has a kernel, ``i v``.
#
# ``A v = l v``, ``(|v|^2 - 1) / 2 = 0`` for complex ``v`` and real ``l`` are as many real equations as unknowns.  With
# ``A = A^H`` the kernel of the Jacobian is ``(i v, 0)``, and so is that of its transpose.  Hence
#
# * the linear system of reverse mode, ``J^T u = g``, has solutions exactly where ``Re <g, i v> = 0``: for every function of
#   the pair that does not depend on the phase; ``u`` is determined up to ``t (i v, 0)``,
# * and that part adds ``t Re <i v, dA v> = -t Im(v^H dA v)`` to the derivative along ``dA``, zero where ``dA`` is Hermitian.
#
# The derivative of what does not depend on the phase is determined along Hermitian directions, whichever solution of the
# singular system is taken; along others there is no derivative, as there is no pair with a real ``l``.  Of least norm, ``u``
# is the derivative by parallel transport, ``v^H dv = 0``.
C, D = torch.complex128, torch.float64
_g = torch.Generator().manual_seed(7)
_draw = lambda: torch.randn(4, 4, dtype=C, generator=_g)  # noqa: E731
_hermitian = lambda M: (M + M.mH) / 2  # noqa: E731
H, ALONG, WEIGHT = (_hermitian(_draw()) for _ in range(3))
VALUES, VECTORS = torch.linalg.eigh(H)

#: Functions of the pair, and their derivatives along ``ALONG`` by perturbation theory, at the vector ``v`` that was found.
INVARIANT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eigenvalue": lambda v, value: value,
    "projector": lambda v, value: (v.conj() @ WEIGHT @ v).real,
    "both": lambda v, value: value * (v.conj() @ WEIGHT @ v).real + v.abs().square().sum(),
}
OF_THE_PHASE: Callable[[Tensor, Tensor], Tensor] = lambda v, value: v[0].real + 2 * v[1].imag  # noqa: E731


def pair(A: Tensor, linear_solver: str, solver: str = "newton") -> tuple[Tensor, Tensor]:
    def equations(z: dict[str, Tensor], A: Tensor) -> dict[str, Tensor]:
        v, value = z["v"], z["value"]
        return {"v": A @ v - value * v, "value": (v.abs().square().sum() - 1) / 2}

    start = {"v": VECTORS[:, -1] * torch.exp(torch.tensor(0.3j, dtype=C)) + 0.01, "value": VALUES[-1] + 0.01}
    z = ik.root(equations, start, (A,), solver=solver, rtol=1e-13, rule=ik.Implicit(linear_solver=linear_solver)).value
    return z["v"], z["value"]


def moved(v: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``dv`` with ``v^H dv = 0`` and ``dl`` along ``ALONG``: first-order perturbation theory."""
    rest, others = VALUES[:-1], VECTORS[:, :-1]
    return others @ ((others.mH @ ALONG @ v) / (value - rest)), (v.conj() @ ALONG @ v).real


@pytest.mark.parametrize("linear_solver", ["lsmr", "gmres", "kkt"])
@pytest.mark.parametrize("name", INVARIANT)
def test_the_phase_is_free_and_what_does_not_depend_on_it_has_its_derivative(name: str, linear_solver: str) -> None:
    of = lambda A: INVARIANT[name](*pair(A, linear_solver))  # noqa: E731
    v, value = (t.detach() for t in pair(H, linear_solver))
    dv, dvalue = moved(v, value)
    _, want = jvp(INVARIANT[name], (v, value), (dv, dvalue))
    torch.testing.assert_close((grad(of)(H).conj() * ALONG).sum().real, want, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(jvp(of, (H,), (ALONG,))[1], want, rtol=1e-9, atol=1e-10)


def test_the_second_derivative_of_an_eigenvalue() -> None:
    """``d^2 l = 2 sum_k |v_k^H dA v|^2 / (l - l_k)``."""
    of = lambda t: pair(H + t * ALONG, "lsmr")[1]  # noqa: E731
    v, rest, others = VECTORS[:, -1], VALUES[:-1], VECTORS[:, :-1]
    want = 2 * ((others.mH @ ALONG @ v).abs().square() / (VALUES[-1] - rest)).sum()
    zero = torch.zeros((), dtype=D)
    torch.testing.assert_close(grad(grad(of))(zero), want, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(jvp(grad(of), (zero,), (torch.ones_like(zero),))[1], want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("solver", ["newton", "trust_region", "scipy.root.hybr"])
@pytest.mark.parametrize("linear_solver", ["auto", "lu"])
@pytest.mark.parametrize("name", [*INVARIANT, "phase"])
def test_factors_of_a_singular_matrix_are_refused_or_right(name: str, linear_solver: str, solver: str) -> None:
    """Rounding decides whether the matrix is singular to a factorisation; nothing wrong comes out without a word."""
    of = INVARIANT.get(name, OF_THE_PHASE)
    A = H.clone().requires_grad_()
    v, value = pair(A, linear_solver, solver)
    try:
        (slope,) = torch.autograd.grad(of(v, value), A)
    except ik.ConvergenceError as error:
        assert 'linear_solver="lsmr"' in str(error)
    except ik.ConvergenceWarning as warning:
        assert name == "phase" and "singular" in str(warning)
    else:
        assert name != "phase"
        _, want = jvp(of, (v.detach(), value.detach()), moved(v.detach(), value.detach()))
        torch.testing.assert_close((slope.conj() * ALONG).sum().real, want, rtol=1e-6, atol=1e-6)


def test_a_function_of_the_phase_is_refused_or_differentiated_by_parallel_transport() -> None:
    A = H.clone().requires_grad_()
    with pytest.raises(
        (ik.ConvergenceError, ik.ConvergenceWarning), match=r"did not converge: gmres|Jacobian .* is singular"
    ):
        torch.autograd.grad(OF_THE_PHASE(*pair(A, "gmres")), A)
    v, value = pair(A, "lsmr")
    with pytest.warns(ik.extend.DegenerateWarning, match="has no solution.*parallel transport"):
        (slope,) = torch.autograd.grad(OF_THE_PHASE(v, value), A)
    _, want = jvp(OF_THE_PHASE, (v.detach(), value.detach()), moved(v.detach(), value.detach()))
    torch.testing.assert_close((slope.conj() * ALONG).sum().real, want, rtol=1e-9, atol=1e-10)
