"""Samples without a solution under a policy that goes on: what all samples share has the derivative of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ

D = torch.float64
N = 4  # samples as well as unknowns: a weight may look like a batch
_G = torch.Generator().manual_seed(3)
W = 0.3 * torch.randn(N, N, generator=_G, dtype=D)
X = torch.randn(N, N, generator=_G, dtype=D)
KEEP = [0, 2, 3]
NAN = float("nan")


def _map(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.mT + torch.sinh(x))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=D)


def _declared(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    return ik.fixed_point(_map, _zeros(x), (W, x), batch_dims=1, in_dims=(None, 0), **o).value


def _arguments(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    return ik.fixed_point(_map, _zeros(x), (W, x), batch_dims=1, **o).value


def _captured(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    return ik.fixed_point(lambda z: _map(z, W, x), _zeros(x), batch_dims=1, **o).value


def _second_dimension(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    turned = lambda z, W, x: _map(z, W, x.mT)  # noqa: E731
    return ik.fixed_point(turned, _zeros(x), (W, x.mT), batch_dims=1, in_dims=(None, 1), **o).value


def _mapped(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    return torch.vmap(lambda x: ik.fixed_point(_map, _zeros(x), (W, x), **o).value)(x)


def _mapped_batches(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    """Two batches side by side, with a weight of their own each: the lost sample stands beside others of its batch."""
    W = torch.stack([W, W])
    each = lambda W, x: _declared(W, x, **o)  # noqa: E731
    return torch.vmap(each)(W, torch.stack([x, x])).mean(0)


def _mapped_weights(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    """The same samples under two weights: a lost one is lost under both."""
    return torch.vmap(lambda W: _declared(W, x, **o))(torch.stack([W, W])).mean(0)


def _two_dimensions(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    return ik.fixed_point(_map, _zeros(x).view(len(x), 1, N), (W, x.view(len(x), 1, N)), batch_dims=2, **o).value[:, 0]


def _equation(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    f = lambda z, W, x: z + z**3 - torch.log(x.exp() + (z @ W.mT) ** 2)  # noqa: E731
    return ik.root(f, _zeros(x), (W, x), batch_dims=1, **o).value


def _minimum(W: Tensor, x: Tensor, **o: Any) -> Tensor:
    energy = lambda z, W, x: (torch.cosh(z @ W.mT) + (z - x).square()).sum(1)  # noqa: E731
    return ik.argmin(energy, _zeros(x), (W, x), batch_dims=1, **o).value


_SOLVES: dict[str, Callable[..., Tensor]] = {
    "rows declared": _declared,
    "rows of arguments": _arguments,
    "rows captured": _captured,
    "rows along the second dimension": _second_dimension,
    "mapped": _mapped,
    "batches mapped": _mapped_batches,
    "weights mapped": _mapped_weights,
    "two dimensions": _two_dimensions,
    "equation": _equation,
    "minimum": _minimum,
}
_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "backward": lambda loss: torch.autograd.grad(loss(w := W.clone().requires_grad_()), w)[0],
    "grad": lambda loss: torch.func.grad(loss)(W),
    "jacfwd": lambda loss: torch.func.jacfwd(loss)(W),
    "hessian": lambda loss: torch.func.hessian(lambda s: loss(s * W))(torch.ones((), dtype=D)),
    "reverse over forward": lambda loss: torch.func.jacrev(torch.func.jacfwd(lambda s: loss(s * W)))(
        torch.ones((), dtype=D)
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["ignore", "nan"])
@pytest.mark.parametrize("name", _SOLVES)
def test_the_derivative_is_that_of_the_others(name: str, policy: str) -> None:
    solve = _SOLVES[name]
    x = X.clone()
    x[1, 2] = NAN
    for kind, take in _DERIVATIVES.items():
        found = take(lambda W: solve(W, x, on_failure=policy)[KEEP].square().sum())
        wanted = take(lambda W: solve(W, X[KEEP], on_failure=policy).square().sum())
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9, msg=lambda m: f"{name}, {kind}: {m}")  # noqa: B023


@pytest.mark.one_in(3)
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize("linear_solver", ["lu", "gmres", "bicgstab"])
@pytest.mark.parametrize("policy", ["ignore", "nan"])
def test_each_direction_of_each_sample_has_its_own(policy: str, linear_solver: str, transform: Any) -> None:
    """Several directions of several samples were told from each other by the order of another way of mapping."""
    rule = ik.Implicit(linear_solver=linear_solver, rtol=1e-13)
    solve = lambda x: ik.fixed_point(_map, _zeros(x), (W, x), on_failure=policy, rule=rule).value  # noqa: E731
    x = X.clone()
    x[1] = NAN
    found, alone = torch.vmap(transform(solve))(x), torch.stack([transform(solve)(x[i]) for i in KEEP])
    torch.testing.assert_close(found[KEEP], alone, rtol=1e-9, atol=1e-11)
    assert not bool(found[1].any())


@pytest.mark.parametrize("name", ["rows declared", "rows captured", "mapped"])
def test_the_lost_sample_has_derivative_zero(name: str) -> None:
    x = X.clone()
    x[1, 2] = NAN
    x.requires_grad_()
    (slope,) = torch.autograd.grad(_SOLVES[name](W, x, on_failure="ignore").square().sum(), x)
    assert bool((slope[1] == 0).all()) and bool((slope[KEEP] != 0).all()), slope


@pytest.mark.parametrize("name", _SOLVES)
def test_where_all_are_lost_it_is_zero(name: str) -> None:
    w = W.clone().requires_grad_()
    value = _SOLVES[name](w, torch.full_like(X, NAN), on_failure="ignore")
    (slope,) = torch.autograd.grad(value.nan_to_num().sum(), w)
    assert bool((slope == 0).all())


def test_an_infinite_slope_spoils_no_other() -> None:
    """At the start of a root of a negative number the derivative of ``sqrt(z)`` is infinite, and zero times it NaN."""
    a = torch.tensor(1.0, dtype=D, requires_grad=True)
    f = lambda z, a, x: a * torch.sqrt(z.abs()) - x  # noqa: E731
    x = torch.tensor([[2.0], [-1.0], [3.0]], dtype=D)
    start = torch.tensor([[1.0], [0.0], [1.0]], dtype=D)
    found = ik.root(f, start, (a, x), batch_dims=1, in_dims=(None, 0), on_failure="nan")
    assert found.converged.tolist() == [True, False, True]
    (slope,) = torch.autograd.grad(found.value[[0, 2]].sum(), a)  # z = (x / a)^2
    torch.testing.assert_close(slope, torch.tensor(-26.0, dtype=D))


def test_nor_does_a_minimum_in_a_kink() -> None:
    """``a sqrt(z^2 + x) + z / 10`` is lowest at zero where ``x`` is, without a slope."""
    a = torch.tensor(1.0, dtype=D, requires_grad=True)
    f = lambda z, a, x: (a * torch.sqrt(z.square() + x) + 0.1 * z).sum(1)  # noqa: E731
    x = torch.tensor([[1.0], [0.0], [1.0]], dtype=D)
    found = ik.argmin(f, torch.zeros(3, 1, dtype=D), (a, x), batch_dims=1, in_dims=(None, 0), on_failure="ignore")
    assert found.status.tolist() == [int(s) for s in (ik.Status.CONVERGED, ik.Status.STALLED, ik.Status.CONVERGED)]
    (slope,) = torch.autograd.grad(found.value[[0, 2]].sum(), a)  # z = -(100 a^2 - 1)^(-1/2)
    torch.testing.assert_close(slope, torch.tensor(200 * 99**-1.5, dtype=D), rtol=1e-6, atol=0)


def test_a_weight_that_looks_like_a_batch_is_none() -> None:
    """Of zeros, whose rows are all alike: its derivative stays where it is."""
    x = X.clone()
    x[1] = NAN
    for hide in (_arguments, _captured):
        w = torch.zeros(N, N, dtype=D, requires_grad=True)
        (found,) = torch.autograd.grad(hide(w, x, on_failure="ignore")[KEEP].square().sum(), w)
        (wanted,) = torch.autograd.grad(hide(w, X[KEEP], on_failure="ignore").square().sum(), w)
        torch.testing.assert_close(found, wanted)


def test_what_all_share_is_nobodys_although_it_has_as_many_entries() -> None:
    """``z^2 = c (1 + s) w`` with ``s`` from four signs that all samples share, and a sample far from any root beside."""
    c = torch.tensor([[1.0], [torch.nan], [-1e3], [4.0]], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 2.0, 1.0], dtype=torch.float64)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    f = lambda z, w: z**2 - c * (1 + 0.01 * (signs > 0).sum()) * w  # noqa: E731
    z = ik.root(f, torch.ones(4, 1, dtype=torch.float64), w, batch_dims=1, on_failure="ignore").value
    (found,) = torch.autograd.grad(z[0].sum() + z[3].sum(), w)
    wanted = (z[0] + z[3]).detach().squeeze(0) / (2 * w.detach())
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# What follows on a failure: the derivative of a solve that did not converge, and a solver of one's own that raises.
UNKNOWNS = 80


def _unstable() -> Tensor:
    """Weights with which ``z = tanh(W z + x)`` is chaotic: no iteration converges, and no backward either."""
    return 6 * torch.randn(UNKNOWNS, UNKNOWNS, generator=torch.Generator().manual_seed(0), dtype=D) / UNKNOWNS**0.5


def _worst(backward: object) -> int:
    return int(torch.as_tensor(backward.steps).max())  # type: ignore[attr-defined]


@pytest.mark.parametrize("linear_solver", ["auto", "gmres", "bicgstab", "lsmr"])
def test_a_backward_of_nothing_takes_no_more_products_than_the_solve_had_steps(linear_solver: str) -> None:
    W, x = _unstable(), torch.linspace(-1, 1, UNKNOWNS, dtype=D).repeat(2, 1).requires_grad_()
    s = ik.fixed_point(
        lambda z, x: torch.tanh(z @ W.T + x), torch.zeros(2, UNKNOWNS, dtype=D), (x,), batch_dims=1, solver="picard",
        max_steps=15, rule=ik.Implicit(linear_solver=linear_solver), on_failure="ignore",
    )  # fmt: skip
    s.value.sum().backward()
    assert not bool(s.converged.any())
    assert 0 < _worst(s.backward) <= 15


def test_nor_does_that_of_a_layer() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(_unstable())

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z @ self.W.T + x)

    layer = DEQ(Cell(), (UNKNOWNS,), solver="anderson", max_steps=15, rtol=1e-6, on_failure="ignore")
    layer(torch.linspace(-1, 1, UNKNOWNS, dtype=D).repeat(2, 1)).sum().backward()
    assert not bool(layer.solution.converged.any())
    assert _worst(layer.solution.backward) <= 15


def _newton(z0: Tensor, x: Tensor) -> Tensor:
    z = z0.detach().requires_grad_()
    for _ in range(20):
        r = z**3 + z - x
        z = (z - r / torch.autograd.grad(r.sum(), z)[0]).detach().requires_grad_()
    return z.detach()


def _residual(z: Tensor, x: Tensor) -> Tensor:
    return z**3 + z - x


def test_a_solver_that_needs_autograd_is_told_that_it_runs_without() -> None:
    x = torch.full((3,), 2.0, dtype=D, requires_grad=True)
    with pytest.raises(ik.ConvergenceError, match=r"torch\.no_grad.*torch\.enable_grad\(\)") as caught:
        ik.implicit(ik.Root(_residual))(_newton)(torch.zeros(3, dtype=D), x)
    assert "max_steps" not in str(caught.value) and "does not require grad" in str(caught.value)

    @ik.implicit(ik.Root(_residual))
    @torch.enable_grad()  # type: ignore[untyped-decorator]
    def newton(z0: Tensor, x: Tensor) -> Tensor:
        return _newton(z0, x)

    z = newton(torch.zeros(3, dtype=D), x)
    z.sum().backward()
    torch.testing.assert_close(z.detach(), torch.ones(3, dtype=D))
    torch.testing.assert_close(x.grad, torch.full((3,), 0.25, dtype=D))


@pytest.mark.parametrize("transform", ["jacfwd", "hessian", "vmap", "dual level"])
def test_a_failure_in_forward_mode_is_that_of_the_solve(transform: str) -> None:
    """With its samples and its solution; it was the singular linear system of the derivative, at what is no solution."""
    a = torch.tensor([1.0, -1.0, 4.0], dtype=D)

    def square(a: Tensor) -> Tensor:
        return ik.root(lambda z, a: z**2 - a, torch.ones_like(a), (a,), batch_dims=a.ndim).value

    with pytest.raises(ik.ConvergenceError, match="1 of 3 samples did not converge: 1 x stalled") as caught:
        if transform == "dual level":
            with torch.autograd.forward_ad.dual_level():
                square(torch.autograd.forward_ad.make_dual(a, torch.ones_like(a)))
        elif transform == "vmap":
            torch.vmap(lambda x: torch.func.jvp(square, (x,), (x,)))(a)
        else:
            (torch.func.jacfwd if transform == "jacfwd" else torch.func.hessian)(lambda a: square(a).sum())(a)
    assert caught.value.samples == (1,)
    assert caught.value.solution is not None and caught.value.solution.converged.tolist() == [True, False, True]
