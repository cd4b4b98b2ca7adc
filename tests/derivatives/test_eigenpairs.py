"""Hermitian eigenpairs as a root: the phase of the eigenvector is free, so that the Jacobian has a kernel, ``i v``.

``A v = l v``, ``(|v|^2 - 1) / 2 = 0`` for complex ``v`` and real ``l`` are as many real equations as unknowns.  With
``A = A^H`` the kernel of the Jacobian is ``(i v, 0)``, and so is that of its transpose.  Hence

* the linear system of reverse mode, ``J^T u = g``, has solutions exactly where ``Re <g, i v> = 0``: for every function of
  the pair that does not depend on the phase; ``u`` is determined up to ``t (i v, 0)``,
* and that part adds ``t Re <i v, dA v> = -t Im(v^H dA v)`` to the derivative along ``dA``, zero where ``dA`` is Hermitian.

The derivative of what does not depend on the phase is determined along Hermitian directions, whichever solution of the
singular system is taken; along others there is no derivative, as there is no pair with a real ``l``.  Of least norm, ``u``
is the derivative by parallel transport, ``v^H dv = 0``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

import implicitkit as ik

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
    (slope,) = torch.autograd.grad(OF_THE_PHASE(v, value), A)
    _, want = jvp(OF_THE_PHASE, (v.detach(), value.detach()), moved(v.detach(), value.detach()))
    torch.testing.assert_close((slope.conj() * ALONG).sum().real, want, rtol=1e-9, atol=1e-10)
