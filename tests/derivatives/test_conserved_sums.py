"""States at rest of flows that conserve sums: derivatives at constant sums, and along those of the start."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.autodiff import linearise
from implicitkit.foundation.errors import DegenerateWarning
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.rule import constant_sums

D = torch.float64


def _enzyme(z: Tensor, k: Tensor) -> Tensor:
    """Enzyme, substrate, complex and product in a closed vessel: ``E + C`` and ``S + C + P`` stay what they are."""
    E, S, C, P = z.unbind(-1)
    bound, released = k[0] * E * S - k[1] * C, k[2] * C - 0.1 * E * P
    return torch.stack([released - bound, -bound, bound - released, released], -1)


def _binding(z: Tensor, k: Tensor) -> Tensor:
    A, B, C = z.unbind(-1)
    rate = k[0] * A * B - k[1] * C * (1 + k[2])
    return torch.stack([-rate, -rate, rate], -1)


def _epidemic(z: Tensor, k: Tensor) -> Tensor:
    """Susceptible, infected, and immune for a while."""
    well, ill, immune = z.unbind(-1)
    infected = k[0] * well * ill
    return torch.stack([k[2] * immune - infected, infected - k[1] * ill, k[1] * ill - k[2] * immune], -1)


def _chain(z: Tensor, k: Tensor) -> Tensor:
    """A Markov chain, whose rows add up to one."""
    pull = torch.tensor([1.0, -1.0, 0.5, 0.2], dtype=k.dtype)
    P = torch.softmax(torch.cat([torch.outer(k, pull) + torch.eye(3, 4, dtype=k.dtype), 0 * pull[None]]), 1)
    return z @ P - z


def _insulated(z: Tensor, k: Tensor) -> Tensor:
    """Heat in a rod that none leaves, with a current through it."""
    places = torch.linspace(0, 1, z.shape[-1] - 1, dtype=z.dtype)
    flux = z.diff(dim=-1) * (1 + k[0] * places) + k[1] * torch.sin(9 * places) - k[2] * places
    pad = torch.nn.functional.pad
    return pad(flux, (0, 1)) - pad(flux, (1, 0))


FLOWS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], list[float]]] = {
    "enzyme": (_enzyme, [1.0, 5.0, 0.0, 0.0], [1.0, 0.5, 0.3]),
    "binding": (_binding, [1.0, 2.0, 0.1], [1.0, 0.5, 0.3]),
    "epidemic": (_epidemic, [0.99, 0.01, 0.0], [0.5, 0.1, 0.05]),
    "chain": (_chain, [0.25] * 4, [0.3, 0.2, 0.9]),
    "insulated": (_insulated, torch.linspace(0, 1, 8).tolist(), [0.3, 0.2, 0.9]),
}


def _verb(verb: str, flow: str, dtype: torch.dtype = D) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]:
    """A number of the state at rest, as a function of the start and the parameters, and these."""
    rhs, start, k = FLOWS[flow]
    solve: Any = ik.steady_state if verb == "steady_state" else ik.fixed_point
    f = rhs if verb == "steady_state" else lambda z, k: z + 0.3 * rhs(z, k)

    def value(z0: Tensor, k: Tensor) -> Tensor:
        z = solve(f, z0, (k,)).value
        return (z * torch.cos(torch.arange(z.shape[-1], dtype=z.dtype))).sum(-1)

    return value, torch.tensor(start, dtype=dtype), torch.tensor(k, dtype=dtype)


def _slope(f: Callable[[Tensor], Tensor], x: Tensor, h: float = 1e-4) -> Tensor:
    """By differences of a batch of solves."""
    steps = h * torch.eye(len(x), dtype=x.dtype)
    after, before = torch.func.vmap(f)(torch.cat([x + steps, x - steps])).chunk(2)
    return (after - before).movedim(0, -1) / (2 * h)


CASES = [(verb, flow) for flow in FLOWS for verb in ("steady_state", "fixed_point")]
CASES = [case for case in CASES if case != ("fixed_point", "epidemic")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("verb", "flow"), CASES)
@pytest.mark.parametrize("mode", [torch.func.jacrev, torch.func.jacfwd], ids=["reverse", "forward"])
def test_derivatives_keep_what_the_flow_keeps(mode: Any, verb: str, flow: str) -> None:
    """Beside finite differences of the solve: of parameters and start, and of both again.  (They were refused.)"""
    value, z0, k = _verb(verb, flow)
    by_k, by_start = lambda z0, k: mode(value, 1)(z0, k), lambda z0, k: mode(value)(z0, k)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", DegenerateWarning)
        close(by_k(z0, k), _slope(lambda k: value(z0, k), k))
        close(by_start(z0, k), _slope(lambda z0: value(z0, k), z0))
        close(mode(by_start, 1)(z0, k), _slope(lambda k: by_start(z0, k), k))
        close(mode(by_k, 1)(z0, k), _slope(lambda k: by_k(z0, k), k))


@pytest.mark.parametrize("flow", ["enzyme", "chain"])
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_everyday_backward_gives_start_and_parameters_at_once(flow: str, dtype: torch.dtype) -> None:
    value, z0, k = _verb("steady_state", flow, dtype)
    leaves = z0.requires_grad_(), k.requires_grad_()
    found = torch.autograd.grad(value(*leaves), leaves)
    value, z0, k = _verb("steady_state", flow)
    wanted = _slope(lambda z0: value(z0, k), z0), _slope(lambda k: value(z0, k), k)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.to(D), b, rtol=1e-3 if dtype == torch.float32 else 1e-6, atol=1e-4)


def test_each_sample_keeps_sums_of_its_own() -> None:
    """The third has one more, the second a flow that leaks and keeps none."""
    z0 = torch.tensor([[1.0, 2.0, 0.1], [1.0, 2.0, 0.1], [1.0, 2.0, 0.1]], dtype=D)
    open_ = torch.tensor([[0.0], [1.0], [0.0]], dtype=D)
    active = torch.tensor([[1.0], [1.0], [0.0]], dtype=D)

    def rhs(z: Tensor, k: Tensor) -> Tensor:
        leak = torch.tensor([0.3, 0.2, 0.1], dtype=D) - 0.1 * z
        return active * _binding(z, k) + open_ * leak - (1 - active) * torch.tensor([0.0, 0.0, 1.0]) * (z - k[0])

    def value(k: Tensor) -> Tensor:
        return ik.steady_state(rhs, z0, (k,), batch_dims=1).value

    k = torch.tensor([1.0, 0.5, 0.3], dtype=D)
    torch.testing.assert_close(torch.func.jacrev(value)(k), _slope(value, k), rtol=1e-5, atol=1e-6)
    together = torch.func.vmap(lambda z0: _verb("steady_state", "enzyme")[0](z0, k))
    starts = torch.tensor([[1.0, 5.0, 0.0, 0.0], [2.0, 3.0, 0.1, 0.0]], dtype=D)
    alone = torch.func.jacrev(lambda s: torch.stack([_verb("steady_state", "enzyme")[0](z, k) for z in s]))(starts)
    torch.testing.assert_close(torch.func.jacrev(together)(starts), alone, rtol=1e-6, atol=1e-8)
    one = _verb("steady_state", "enzyme")[0]
    for mode in (torch.func.jacrev, torch.func.jacfwd):  # inside of vmap: every start has sums of its own
        each = torch.func.vmap(mode(one), (0, None))(starts, k)
        torch.testing.assert_close(each, alone.diagonal().T, rtol=1e-6, atol=1e-8)


def test_a_function_may_refuse_other_sums() -> None:
    """What it is elsewhere cannot be asked then: refused as a singular system is, not in the function's words."""
    _, z0, k = _verb("steady_state", "binding")

    def rhs(z: Tensor, k: Tensor) -> Tensor:
        if bool((z[..., 0] + z[..., 2] > 1.2).any()):
            raise ValueError("more than there is")
        return _binding(z, k)

    with pytest.raises(ik.ConvergenceError, match="singular"):
        ik.steady_state(rhs, z0, (k.requires_grad_(),)).value[0].backward()


def test_a_root_has_no_start() -> None:
    """Of an equation that is no flow nothing is kept."""
    _, z0, k = _verb("steady_state", "binding")
    k.requires_grad_()
    with pytest.raises(ik.ConvergenceError, match="singular"):
        ik.root(_binding, z0, (k,)).value[0].backward()


@pytest.mark.parametrize("start", [(0.0, 0.0), (0.0, 0.5), (0.0, 1e-10)])
def test_a_double_root_keeps_nothing(start: tuple[float, float]) -> None:
    """``dx/dt = k - 1 - x^3`` at ``k = 1``: singular at zero, where nothing but ``x`` itself is small."""
    k = torch.ones((), dtype=D, requires_grad=True)
    flow = lambda z, k: torch.stack([k - 1 - z[0] ** 3, k - 1 - z[1]])  # noqa: E731
    with pytest.raises(ik.ConvergenceError, match="singular"):
        ik.steady_state(flow, torch.tensor(start, dtype=D), (k,)).value.sum().backward()


@pytest.mark.filterwarnings("ignore:the Jacobian of the equations is singular")  # what does not depend on it
@pytest.mark.parametrize("mode", [torch.func.jacrev, torch.func.jacfwd])
def test_who_is_left_of_an_epidemic_depends_on_the_way(mode: Any) -> None:
    """A few ill are left, down to 1e-72, and ``dz/dk`` came out as if there were an equilibrium of them: -0.10 for -0.27,
    unsaid."""

    def left(k: Tensor) -> Tensor:
        flow = lambda z, k: _epidemic(z, torch.cat([k, 0 * k[:1]]))  # noqa: E731
        z0 = torch.tensor([0.999, 0.001, 0.0], dtype=D)
        return ik.fixed_point(lambda z, k: z + 0.3 * flow(z, k), z0, (k,)).value

    with pytest.raises(ik.ConvergenceError, match=r"one of many beside each other.*InitialValue"):
        mode(left)(torch.tensor([2.0, 1.0], dtype=D))


def test_what_is_used_up_is_decided_by_sums() -> None:
    """1e-28 of the substrate is left: no rate moves what has become of it, and all of the start does.  (It did not.)"""
    flow = lambda z, k: _enzyme(z, k) + 0.1 * z[..., :1] * z[..., 3:] * torch.tensor([1.0, 0, -1.0, 1.0], dtype=D)  # noqa: E731
    one = lambda z0, k: ik.steady_state(flow, z0, (k,)).value  # noqa: E731
    by_start, by_rates = torch.func.jacfwd(one, (0, 1))(*(torch.tensor(v, dtype=D) for v in FLOWS["enzyme"][1:]))
    torch.testing.assert_close(by_rates, torch.zeros_like(by_rates))
    torch.testing.assert_close(by_start[0], torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=D))
    torch.testing.assert_close(by_start[3], torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=D))


def _walk(n: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """A random walk on a graph, each of whose ``3 n`` edges ``k`` makes likelier or not; and a way for ``k``."""
    g = torch.Generator().manual_seed(0)
    here = torch.arange(n).repeat(3)
    there = torch.cat([(torch.arange(n) + 1) % n, torch.randint(0, n, (2 * n,), generator=g)])
    rates, pull = torch.rand(3 * n, generator=g, dtype=D) + 0.1, torch.randn(3 * n, generator=g, dtype=D)

    def step(p: Tensor, k: Tensor) -> Tensor:
        each = rates * torch.exp(k * pull)
        moved = each / torch.zeros(n, dtype=D).index_add(0, here, each)[here] * p[..., here]
        return torch.zeros_like(p).index_add(-1, there, moved)

    return step, torch.tensor(0.3, dtype=D)


@pytest.mark.parametrize("solver", ["auto", "newton"])
@pytest.mark.parametrize("n", [60, 200])
def test_newtons_steps_of_a_map_keep_its_sums(n: int, solver: str) -> None:
    """Dense, and sparse.  (They ended at a multiple by chance, 0.99994 or less, converged.)"""
    step, k = _walk(n)
    way = torch.cos(torch.arange(n, dtype=D))

    def found(k: Tensor) -> Tensor:
        return ik.fixed_point(step, torch.full((n,), 2.0 / n, dtype=D), (k,), solver=solver).value

    def wanted(k: Tensor) -> Tensor:
        A = torch.stack([step(row, k) for row in torch.eye(n, dtype=D)], 1) - torch.eye(n, dtype=D)
        return torch.linalg.solve(A + 1, torch.full((n,), 2.0, dtype=D))

    torch.testing.assert_close(found(k), wanted(k), rtol=1e-6, atol=1e-9)
    slope = torch.func.jacrev(lambda k: wanted(k) @ way)(k)
    torch.testing.assert_close(torch.func.jacrev(lambda k: found(k) @ way)(k), slope, rtol=1e-5, atol=1e-7)


def test_where_the_solver_has_left_the_sums_they_are_not_claimed() -> None:
    """Another member of the family than the start names."""
    _, z0, k = _verb("fixed_point", "binding")
    step = lambda z, k: z + 0.3 * _binding(z, k)  # noqa: E731
    mine = ik.implicit(ik.FixedPoint(step))(lambda z0, k: ik.fixed_point(step, 1.2 * z0, (k,)).value)
    with pytest.raises(ik.ConvergenceError, match="singular"):
        mine(z0, k.requires_grad_())[0].backward()


def test_a_parameter_that_breaks_a_sum_is_named() -> None:
    """One entry of a stochastic matrix cannot change by itself; where its rows do together nothing is wrong."""
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]], dtype=D).log().requires_grad_()
    P = torch.softmax(weights, 1)
    with pytest.warns(DegenerateWarning, match="conserve"):
        p = ik.fixed_point(lambda p: p @ P, torch.full((3,), 1 / 3, dtype=D)).value
        found = torch.autograd.grad(p[0], weights)[0]

    def first(w: Tensor) -> Tensor:
        values, vectors = torch.linalg.eig(torch.softmax(w, 1).T)
        v = vectors[:, values.real.argmax()].real
        return v[0] / v.sum()

    h = 1e-6 * torch.eye(9, dtype=D).view(9, 3, 3)
    w = weights.detach()
    slope = torch.stack([(first(w + e) - first(w - e)) / 2e-6 for e in h]).view(3, 3)
    torch.testing.assert_close(found, slope, rtol=1e-6, atol=1e-8)


def _volumes(z: Tensor, k: Tensor) -> Tensor:
    """Two vessels: ``k_0 a + k_1 b`` stays what it is."""
    a, b = z.unbind(-1)
    flux = k[2] * (a - b * b)
    return torch.stack([-flux / k[0], flux / k[1]], -1)


def _absorbed(z: Tensor, k: Tensor) -> Tensor:
    """A walk that ends at either side, with chances that depend on ``k``."""
    up, down = 0.5 * torch.sigmoid(k), 0.3 * torch.cos(k)
    inner = z[..., 1:-1]
    rise, fall, pad = inner * up, inner * down, torch.nn.functional.pad
    return pad(rise, (2, 0)) + pad(fall, (0, 2)) - pad(rise + fall, (1, 1))


@pytest.mark.parametrize(
    ("flow", "start", "k"),
    [(_volumes, [1.0, 0.3], [0.7, 1.3, 2.0]), (_absorbed, [0.0, 0.6, 0.0, 0.4, 0.0], [0.3, 0.2, 0.9])],
)
@pytest.mark.parametrize("verb", [ik.steady_state, ik.fixed_point])
def test_sums_may_depend_on_parameters(verb: Any, flow: Any, start: list[float], k: list[float]) -> None:
    """``C dz = C dz_0 - dC (z - z_0)``, of which nothing at rest knows.  (It was zero, beside a remark or none.)"""
    z0, k_ = torch.tensor(start, dtype=D), torch.tensor(k, dtype=D)
    of = flow if verb is ik.steady_state else lambda z, k: z + 0.3 * flow(z, k)
    value = lambda z0, k: verb(of, z0, (k,), rtol=1e-11).value  # noqa: E731
    wanted = _slope(lambda k: value(z0, k), k_)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DegenerateWarning)
        for mode in (torch.func.jacrev, torch.func.jacfwd):
            torch.testing.assert_close(mode(value, 1)(z0, k_), wanted, rtol=1e-5, atol=1e-6)
        leaf, first = k_.clone().requires_grad_(), torch.eye(len(z0), dtype=D)[0]
        z = value(z0, leaf)
        torch.testing.assert_close(
            torch.autograd.grad(z, leaf, first, retain_graph=True)[0], wanted[0], rtol=1e-5, atol=1e-6
        )
        batched = torch.autograd.grad(z, leaf, torch.eye(len(z0), dtype=D), is_grads_batched=True)[0]
        torch.testing.assert_close(batched, wanted, rtol=1e-5, atol=1e-6)
        each = torch.func.vmap(torch.func.jacrev(value, 1), (0, None))(torch.stack([z0, z0.flip(0) + 0.1]), k_)
        torch.testing.assert_close(each[0], wanted, rtol=1e-5, atol=1e-6)
        begin = z0.clone()
        z = value(begin, leaf)
        begin.copy_(z.detach())  # where the next solve is to start
        torch.testing.assert_close(torch.autograd.grad(z, leaf, first)[0], wanted[0], rtol=1e-5, atol=1e-6)
    weights = torch.linspace(1, 2, len(z0), dtype=D)
    loss = lambda z0, k: (weights * value(z0, k) ** 2).sum()  # noqa: E731
    slopes = torch.func.grad(loss, 1)
    by_start, by_rate = _slope(lambda z0: slopes(z0, k_), z0), _slope(lambda k: slopes(z0, k), k_)
    for outer in (torch.func.jacrev, torch.func.jacfwd):
        for inner in (torch.func.jacrev, torch.func.jacfwd):
            torch.testing.assert_close(outer(inner(loss, 1), 1)(z0, k_), by_rate, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(outer(inner(loss, 1), 0)(z0, k_), by_start, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(outer(inner(loss, 0), 1)(z0, k_), by_start.T, rtol=1e-5, atol=1e-5)
    each = torch.func.vmap(torch.func.hessian(loss, 1), (0, None))(torch.stack([z0, z0.flip(0) + 0.1]), k_)
    torch.testing.assert_close(each[0], by_rate, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(loss(z0, leaf), leaf, create_graph=True)
    (batched,) = torch.autograd.grad(slope, leaf, torch.eye(len(k_), dtype=D), is_grads_batched=True)
    torch.testing.assert_close(batched, by_rate, rtol=1e-5, atol=1e-5)


def test_what_is_slow_is_not_conserved() -> None:
    """Beside rates of 1e6, and a sum; from the state at rest, where every sum is what it was.  (It had no derivative.)"""

    def rhs(z: Tensor, k: Tensor) -> Tensor:
        x, y, a, b = z.unbind(-1)
        return torch.stack([1e6 * (k[0] - x), 1e-7 * (k[1] - y), b - k[0] * a, k[0] * a - b], -1)

    z0, k = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=D), torch.tensor([1.0, 2.0], dtype=D)
    by_start, by_k = torch.func.jacrev(lambda z0, k: ik.steady_state(rhs, z0, (k,)).value, (0, 1))(z0, k)
    torch.testing.assert_close(by_k, torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.5, 0.0], [0.5, 0.0]], dtype=D))
    half = torch.full((2, 2), 0.5, dtype=D)
    torch.testing.assert_close(by_start, torch.block_diag(torch.zeros(2, 2, dtype=D), half))


def _closed(current: Tensor, made: Tensor) -> Tensor:
    """What comes into the cells of a rod that nothing leaves, and what comes up in them."""
    return torch.nn.functional.pad(current, (1, 1)).diff(dim=-1) + made


def _reacting(z: Tensor, k: Tensor) -> Tensor:
    """``A + B <-> C`` in a rod that nothing leaves: ``A + C`` and ``B + C`` stay what they are, 3 x 200 unknowns."""
    places = torch.linspace(0, 1, z.shape[-1] // 3, dtype=z.dtype)
    A, B, C = z.unflatten(-1, (3, -1)).unbind(-2)
    rate = k[0] * A * B * (1 + places) - k[1] * C
    return torch.cat([_closed(w.diff(dim=-1), s * rate) for w, s in ((A, -1), (k[2] * B, -1), (0.3 * C, 1))], -1)


def _drawn(z: Tensor, k: Tensor) -> Tensor:
    """A crowd that nobody leaves, which spreads by how dense all of it is."""
    dense = z.square().mean(-1, keepdim=True)
    pull = k[1] * torch.sin(torch.linspace(0, 6, z.shape[-1] - 1, dtype=z.dtype)) / 100
    return _closed(z.diff(dim=-1) * (1 + k[0] * dense) + (pull + k[2] / 100) * (z[..., 1:] + z[..., :-1]), 0 * z)


def _tubes(z: Tensor, k: Tensor) -> Tensor:
    """Twelve rods beside each other."""
    rods = z.unflatten(-1, (12, -1))
    current = k[0] * torch.linspace(0, 1, rods.shape[-1] - 1, dtype=z.dtype) + k[1] * rods[..., 1:] ** 2 / 50
    return _closed(rods.diff(dim=-1) * (1 + k[2]) + current, 0 * rods).flatten(-2)


LARGE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "reacting": (_reacting, 600),
    "drawn": (_drawn, 780),
    "tubes": (_tubes, 600),
}


@pytest.mark.parametrize("flow", LARGE)
def test_sums_of_many_unknowns(flow: str) -> None:
    """Sparse systems are made regular by a few numbers on their diagonal.  (They were refused above 512 unknowns.)"""
    rhs, n = LARGE[flow]
    z0 = 1 + 0.5 * torch.cos(torch.arange(n, dtype=D))
    k, w = torch.tensor([0.3, 0.2, 0.9], dtype=D), torch.sin(torch.linspace(0, 7, n, dtype=D))
    value = lambda z0, k: ik.steady_state(rhs, z0, (k,), rtol=1e-11).value @ w  # noqa: E731
    by_k, by_start = torch.func.grad(value, 1), torch.func.grad(value)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5)  # noqa: E731
    slope, way = _slope(lambda k: value(z0, k), k), torch.cos(2 * torch.arange(n, dtype=D))
    close(by_k(z0, k), slope)
    close(torch.func.jacfwd(value, 1)(z0, k), slope)
    close(by_start(z0, k) @ way, _slope(lambda t: value(z0 + t * way, k), torch.zeros(1, dtype=D), 1e-3).squeeze())
    close(torch.func.jvp(lambda z: value(z, k), (z0,), (way,))[1], by_start(z0, k) @ way)
    close(torch.func.jacrev(by_k, 1)(z0, k), _slope(lambda k: by_k(z0, k), k))


def test_sums_of_many_rounded_unknowns() -> None:
    """Sparse factors of a Jacobian that has been rounded to single precision are regular by chance.  (Forward mode gave 30
    times the derivative without a word.)"""

    def value(k: Tensor) -> Tensor:
        z0 = (1 + 0.5 * torch.cos(torch.arange(240, dtype=D))).to(k)
        return ik.steady_state(_tubes, z0, (k,)).value[::40]

    k = torch.tensor([0.3, 0.2, 0.9], dtype=D)
    wanted = torch.func.jacrev(value)(k)
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(mode(value)(k.float()).to(D), wanted, rtol=1e-3, atol=1e-4)


def test_a_regular_jacobian_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether factors of a step nearby hide a singular one takes a product or two more; by solving for what is known it took
    as many as a derivative."""
    count, weights = [0], torch.cos(torch.arange(200**2, dtype=D)).view(200, 200) / 20

    def counted(product: Any) -> Any:
        def of(A: Operator, v: Tensor) -> Tensor:
            count[0] += 1
            found: Tensor = product(A, v)
            return found

        return of

    for name in ("mv", "rmv"):
        monkeypatch.setattr(Operator, name, counted(getattr(Operator, name)))
    x = torch.linspace(-1, 1, 200, dtype=D).repeat(8, 1).requires_grad_()
    cell, options = lambda z, x: torch.tanh(z @ weights + x), {"solver": "newton", "batch_dims": 1}
    for _ in range(3):  # what is asked of a function, at its first derivative and at its fourth, has been
        z = ik.fixed_point(cell, torch.zeros_like(x), (x,), **options).value
        products, count[0] = [], 0
        for _ in range(2):
            torch.autograd.grad(z.sum(), x, retain_graph=True)
            products.append(count[0] - sum(products))
    assert 4 <= products[1] < products[0] <= products[1] + 2, products


@pytest.mark.parametrize("off", [1e-4, 1e-2, 0.2])
@pytest.mark.parametrize("singular", [False, True])
def test_refinement_by_factors_nearby_leaves_a_null_space_as_it_is(singular: bool, off: float) -> None:
    """So it tells a singular matrix from others in a product or a few; what it does not tell is asked of a solve."""
    n, g = 40, torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, n, dtype=D, generator=g))[0] for _ in range(2))
    sizes = torch.linspace(1, 2, n, dtype=D)
    sizes[0] = 0.0 if singular else 1.0
    M = U @ (sizes.unsqueeze(1) * V)
    A, asked = linearise(lambda z: z @ M.mT, torch.zeros(1, n, dtype=D))[1], []
    A.known = DenseBlocks((M + off * torch.randn(n, n, dtype=D, generator=g) / n**0.5).unsqueeze(0))

    def solve(b: Tensor) -> Tensor:  # to the end, as Krylov vectors do
        asked.append(1)
        x = torch.zeros_like(b)
        for _ in range(100):
            x = x + A.known.solve(b - x @ M.mT)
        return x

    assert constant_sums.is_ambiguous(A, solve) is singular
    assert bool(asked) is singular


def test_large_samples_keep_sums_of_their_own() -> None:
    """The second one leaks, and the third has no state at rest that is finite."""
    z0 = (1 + 0.5 * torch.cos(torch.arange(600, dtype=D))).repeat(3, 1)
    leaks = torch.tensor([[0.0], [0.1], [0.0]], dtype=D)
    broken = torch.tensor([[0.0], [0.0], [torch.nan]], dtype=D)

    def value(k: Tensor) -> Tensor:
        rhs = lambda z, k: _tubes(z, k) + leaks * (k[0] - z) + broken  # noqa: E731
        return ik.steady_state(rhs, z0, (k,), batch_dims=1, on_failure="ignore").value[:2, ::7]

    k = torch.tensor([0.3, 0.2, 0.9], dtype=D)
    torch.testing.assert_close(torch.func.jacfwd(value)(k), _slope(value, k), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.func.jacrev(value)(k), _slope(value, k), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("samples", "n"), [(2, 300), pytest.param(3, 520, marks=pytest.mark.slow)])
def test_factors_lead_to_no_other_state(samples: int, n: int) -> None:
    """Beside one that leaks, whose units make pivots large that are rounding, and one that has failed, where factors of a
    step nearby serve all.  Forward mode came to another member of the family, without a word."""
    z0 = (1 + 0.5 * torch.cos(torch.arange(n, dtype=D))).repeat(3, 1)

    def first(k: Tensor, samples: int) -> Tensor:
        leaks = [[0.0], [0.1], [torch.nan]]
        rhs = lambda z, k: _drawn(z, k) + z.new_tensor(leaks)[: len(z)] * (k[0] - z)  # noqa: E731
        return ik.steady_state(rhs, z0[:samples], (k,), batch_dims=1, on_failure="ignore").value[0, ::7]

    k = torch.tensor([0.3, 0.2, 0.9], dtype=D)
    alone, beside = (torch.func.jacfwd(lambda k, m=m: first(k, m))(k) for m in (1, samples))  # type: ignore[misc]
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-6)


def test_large_volumes_may_depend_on_parameters() -> None:
    places = torch.linspace(0, 1, 600, dtype=D)

    def value(k: Tensor) -> Tensor:
        rhs = lambda z, k: _tubes(z, k) / (1 + k[0] * places**2)  # noqa: E731
        return ik.steady_state(rhs, 1 + places, (k,)).value[::7]

    k = torch.tensor([0.3, 0.2, 0.9], dtype=D)
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(mode(value)(k), _slope(value, k), rtol=1e-5, atol=1e-6)
    slopes = torch.func.grad(lambda k: value(k).square().sum())
    torch.testing.assert_close(torch.func.jacfwd(slopes)(k), _slope(slopes, k), rtol=1e-4, atol=1e-4)


def test_second_derivatives_of_a_chain_whose_matrix_is_made_outside() -> None:
    """``pi`` of ``exp(t K)`` normalised by rows, against linear equations with the sum in the place of one.  (They were
    refused: each entry of the matrix alone would break the sum.)"""
    K = torch.cos(torch.arange(36, dtype=D).view(6, 6) ** 1.5)
    weights = torch.linspace(0, 2, 6, dtype=D)

    def matrix(t: Tensor) -> Tensor:
        return torch.softmax(t[0] * K + t[1] * weights, 1)

    def loss(t: Tensor) -> Tensor:
        P = matrix(t)
        pi = ik.fixed_point(lambda x: P.mT @ x, torch.full((6,), 1 / 6, dtype=D)).value
        return (weights * pi**2).sum()

    def directly(t: Tensor) -> Tensor:
        A = torch.cat([(matrix(t).mT - torch.eye(6, dtype=D))[:-1], torch.ones(1, 6, dtype=D)])
        pi = torch.linalg.inv(A)[:, -1]  # torch has no third derivative of its solve
        return (weights * pi**2).sum()

    t = torch.tensor([1.3, 0.4], dtype=D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateWarning)
        for outer in (torch.func.jacrev, torch.func.jacfwd):
            for inner in (torch.func.jacrev, torch.func.jacfwd):
                torch.testing.assert_close(outer(inner(loss))(t), torch.func.hessian(directly)(t), rtol=1e-6, atol=1e-7)
        third = torch.func.jacrev(torch.func.hessian(loss))(t)
    torch.testing.assert_close(third, torch.func.jacrev(torch.func.hessian(directly))(t), rtol=1e-5, atol=1e-6)
