"""What follows on a failure: the derivative of a solve that did not converge, and a solver of one's own that raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ

D = torch.float64
N = 80


def _unstable() -> Tensor:
    """Weights with which ``z = tanh(W z + x)`` is chaotic: no iteration converges, and no backward either."""
    return 6 * torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=D) / N**0.5


def _worst(backward: object) -> int:
    return int(torch.as_tensor(backward.steps).max())  # type: ignore[attr-defined]


@pytest.mark.parametrize("linear_solver", ["auto", "gmres", "bicgstab", "lsmr"])
def test_a_backward_of_nothing_takes_no_more_products_than_the_solve_had_steps(linear_solver: str) -> None:
    W, x = _unstable(), torch.linspace(-1, 1, N, dtype=D).repeat(2, 1).requires_grad_()
    s = ik.fixed_point(
        lambda z, x: torch.tanh(z @ W.T + x), torch.zeros(2, N, dtype=D), (x,), batch_dims=1, solver="picard",
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

    layer = DEQ(Cell(), (N,), solver="anderson", max_steps=15, rtol=1e-6, on_failure="ignore")
    layer(torch.linspace(-1, 1, N, dtype=D).repeat(2, 1)).sum().backward()
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
