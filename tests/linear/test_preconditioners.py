"""Preconditioners change how many products a solution takes, never which one it is; and factors that are kept."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.linear.factors.sparse_form import sparse_blocks
from implicitkit.linear.iterative.preconditioners import preconditioner
from implicitkit.sparsity.patterns import Sparsity

D = torch.float64
M = 12
N = M * M  # above the size from which patterns are looked for
LINE = torch.linspace(0.5, 1.5, N, dtype=D)


def transport(z: Tensor, p: Tensor) -> Tensor:
    """Convection, diffusion, reaction on a grid; the Jacobian is far from symmetric and badly scaled."""
    U = torch.nn.functional.pad(z.unflatten(-1, (M, M)), (1, 1, 1, 1))
    x, y = slice(1, -1), slice(1, -1)
    spread = 4 * U[..., x, y] - U[..., 2:, y] - U[..., :-2, y] - U[..., x, 2:] - U[..., x, :-2]
    drift = U[..., x, y] - U[..., x, :-2]
    scale = 1 + 50 * LINE.view(M, M) ** 4
    return (scale * (p[0] * spread + p[1] * drift + 0.1 * U[..., x, y] ** 3) - p[2]).flatten(-2)


def symmetric(z: Tensor, p: Tensor) -> Tensor:
    U = torch.nn.functional.pad(z.unflatten(-1, (M, M)), (1, 1, 1, 1))
    spread = 4 * U[1:-1, 1:-1] - U[2:, 1:-1] - U[:-2, 1:-1] - U[1:-1, 2:] - U[1:-1, :-2]
    return (p[0] * spread + p[1] * (1 + 50 * LINE.view(M, M) ** 4) * U[1:-1, 1:-1] - p[2]).flatten()


P = torch.tensor([1.0, 3.0, 0.7], dtype=D)
V = torch.tensor([0.3, -1.0, 0.5], dtype=D)
W = torch.sin(torch.arange(N, dtype=D))


def matrix(p: Tensor = P, z: Tensor | None = None) -> Tensor:
    return torch.func.jacrev(lambda y: transport(y, p))(torch.zeros(N, dtype=D) if z is None else z)


def operator(batch: int) -> tuple[Any, Tensor]:
    """The operator at ``batch`` points, and its dense matrices."""
    z = 0.3 * torch.randn(batch, N, dtype=D, generator=torch.Generator().manual_seed(1))
    function = lambda y: vmap(lambda one: transport(one, P))(y)  # noqa: E731
    sparsity = Sparsity("test", sp.csr_matrix(matrix().numpy() != 0))
    _, A = autodiff.linearise(function, z, sparse=sparse_blocks(lambda: sparsity, function, z))
    return A, torch.stack([matrix(P, one) for one in z])


INVERSE = torch.linalg.inv(matrix())
LU = sla.splu(sp.csc_matrix(matrix().numpy()))
CHOICES: dict[str, Any] = {
    "jacobi": "jacobi",
    "block_jacobi": "block_jacobi",
    "ilu": "ilu",
    "amg": pytest.param("amg", marks=pytest.mark.skipif(find_spec("pyamg") is None, reason="needs pyamg")),
    "callable": lambda z, v: v @ INVERSE.T,
    "of the state": lambda z, v: v / (1 + z**2),
    "pair": (
        lambda z, v: torch.from_numpy(v.numpy() @ INVERSE.numpy().T),
        lambda z, v: torch.from_numpy(v.numpy() @ INVERSE.numpy()),
    ),
    "factorisation": LU,
    "stale": "stale",
}


def chosen(choice: Any) -> Any:
    return ik.linear.Stale() if isinstance(choice, str) and choice == "stale" else choice


every = pytest.mark.parametrize(
    "choice", [c if hasattr(c, "marks") else pytest.param(c, id=name) for name, c in CHOICES.items()]
)


def solution(choice: Any, linear: str = "gmres", **options: Any) -> Callable[[Tensor], Tensor]:
    rule = ik.Implicit(linear_solver=linear, preconditioner=chosen(choice), rtol=1e-11)
    solver = ik.NewtonKrylov()  # leaves no factors
    return lambda p: (
        ik.root(
            transport, torch.zeros(N, dtype=D), (p,), solver=solver, rule=rule, rtol=1e-12, atol=1e-12, **options
        ).value
    )


def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda p: (W * f(p) ** 2).sum()


MODES: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "backward": lambda f: torch.autograd.functional.jacobian(loss(f), P),
    "grad": lambda f: grad(loss(f))(P),
    "jvp": lambda f: jvp(f, (P,), (V,))[1],
    "jacrev": lambda f: jacrev(lambda p: f(p)[:12])(P),
    "jacfwd": lambda f: jacfwd(f)(P),
    "hessian": lambda f: hessian(loss(f))(P),
    "vmap of grad": lambda f: vmap(grad(loss(f)))(torch.stack([P, 1.1 * P])),
    "is_grads_batched": lambda f: torch.autograd.functional.jacobian(lambda p: f(p)[:12], P, vectorize=True),
}
_exact: dict[str, Tensor] = {}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@every
def test_derivatives_do_not_depend_on_it(choice: Any, mode: str) -> None:
    if choice in ("block_jacobi", "amg") and mode not in ("backward", "jacfwd"):
        pytest.skip("their other modes are those of the diagonal and of incomplete factors")
    if mode not in _exact:
        _exact[mode] = MODES[mode](solution(None, "lu"))
    torch.testing.assert_close(MODES[mode](solution(choice)), _exact[mode], rtol=1e-6, atol=1e-8)


def test_the_backward_uses_the_transposed() -> None:
    """With the exact inverse two products do; with the inverse not transposed they do not."""
    counts = []
    for pair in ((INVERSE, INVERSE.T), (INVERSE, INVERSE)):
        p = P.clone().requires_grad_()
        applied = tuple(lambda z, v, M=M: v @ M.T for M in pair)
        rule = ik.Implicit(linear_solver="gmres", preconditioner=applied)
        s = ik.root(transport, torch.zeros(N, dtype=D), (p,), solver=ik.NewtonKrylov(), rule=rule)
        s.value.sum().backward()
        counts.append(int(s.backward.steps))
    assert counts[0] <= 15 < counts[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("linear", ["auto", "gmres", "bicgstab"])
@every
def test_it_saves_products(choice: Any, linear: str) -> None:
    if choice is CHOICES["of the state"]:
        pytest.skip("it is a poor one: what counts is that it does no harm to the derivative")
    assert _products(choice, linear) <= 0.8 * _products(None, "gmres") + 2


@functools.cache
def _products(choice: Any, linear: str) -> int:
    p = P.clone().requires_grad_()
    rule = ik.Implicit(linear_solver=linear, preconditioner=chosen(choice))
    s = ik.root(transport, torch.zeros(N, dtype=D), (p,), solver=ik.NewtonKrylov(), rule=rule)
    s.value.sum().backward()
    return int(s.backward.steps)


@pytest.mark.parametrize("name", ["jacobi", "block_jacobi", "amg"])
def test_conjugate_gradients_use_symmetric_ones(name: str) -> None:
    if name == "amg":
        pytest.importorskip("pyamg")
    steps, found = [], []
    for choice in (None, name):
        p = P.clone().requires_grad_()
        rule = ik.Implicit(linear_solver="cg", preconditioner=choice, rtol=1e-10)
        problem = ik.Root(symmetric, symmetric=True)
        s = ik.solve(problem, torch.zeros(N, dtype=D), (p,), solver=ik.NewtonKrylov(), rule=rule)
        found.append(torch.autograd.grad((W * s.value).sum(), p)[0])
        steps.append(int(s.backward.steps))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)
    assert steps[1] < 0.6 * steps[0]


@pytest.mark.parametrize("batch", [1, 3])
@every
def test_the_transposed_is_the_transposed(choice: Any, batch: int) -> None:
    A, _ = operator(batch)
    made = preconditioner(chosen(choice), A, 0.1 * torch.ones(batch, N, dtype=D))
    eye = torch.eye(N, dtype=D).expand(batch, N, N)
    there, back = made.solve(eye), made.T.solve(eye)
    tight = {"rtol": 1e-8, "atol": 1e-10} if choice != "amg" else {"rtol": 0.0, "atol": 1e-3 * float(there.abs().max())}
    torch.testing.assert_close(back, there.mT, **tight)  # the V-cycle of the transposed has a hierarchy of its own
    torch.testing.assert_close(made.solve(eye[:, :, 5]), there[:, :, 5], rtol=1e-9, atol=1e-12)
    if not isinstance(choice, str):
        return
    true = torch.linalg.inv(torch.stack([matrix(P, one) for one in A.like]))
    error = torch.linalg.matrix_norm(there - true) / torch.linalg.matrix_norm(true)
    assert bool((error < {"ilu": 0.1, "stale": 1e-8}.get(choice, 1.0)).all())


def test_blocks_are_the_blocks_of_the_matrix() -> None:
    A, dense = operator(2)
    made = preconditioner("block_jacobi", A, A.like)
    b = torch.ones(2, N, dtype=D)
    for first in range(0, N, 16):
        part = slice(first, min(first + 16, N))
        torch.testing.assert_close(made.solve(b)[:, part], torch.linalg.solve(dense[:, part, part], b[:, part]))
    torch.testing.assert_close(preconditioner("jacobi", A, A.like).solve(b), b / dense.diagonal(dim1=1, dim2=2))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "name": ("ilut", ValueError, "Did you mean 'ilu'"),
    "far name": ("cholesky_of_sorts", ValueError, "must be one of 'jacobi'"),
    "number": (1.0, TypeError, "must be a name"),
    "pair of numbers": ((1, 2), TypeError, "must be a name"),
    "class": (ik.Anderson, TypeError, "must be a name"),
    "function of a vector": (lambda v: v, TypeError, r"preconditioner is called as preconditioner\(z, v\)"),
    "pair of which one": (
        (lambda z, v: v, lambda v: v),
        TypeError,
        r"preconditioner is called as preconditioner\(z, v\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("make", [ik.Implicit, ik.NewtonKrylov])
def test_bad_values_are_refused(make: Any, name: str) -> None:
    choice, error, text = BAD[name]
    with pytest.raises(error, match=text):
        make(preconditioner=choice)


def _backward(rule: Any, problem: Any = None) -> None:
    p = P.clone().requires_grad_()
    solver = ik.NewtonKrylov()
    ik.solve(
        problem or ik.Root(transport), torch.zeros(N, dtype=D), (p,), solver=solver, rule=rule
    ).value.sum().backward()


def test_what_takes_none_says_so() -> None:
    for linear in ("lu", "sparse_lu", "lsmr"):
        with pytest.raises(ik.CapabilityError, match="takes no preconditioner"):
            _backward(ik.Implicit(linear_solver=linear, preconditioner="jacobi"))
    with pytest.raises(ik.CapabilityError, match="incomplete LU is not symmetric"):
        _backward(ik.Implicit(linear_solver="cg", preconditioner="ilu"), ik.Root(symmetric, symmetric=True))


def test_what_leaves_torch_needs_its_transposed() -> None:
    for leaves in (lambda z, v: torch.from_numpy(v.detach().numpy() * 2), lambda z, v: torch.from_numpy(v.numpy() * 2)):
        with pytest.raises(ik.CapabilityError, match="apply_transposed"):
            _backward(ik.Implicit(linear_solver="gmres", preconditioner=leaves))
    with pytest.raises(ValueError, match=r"returned \(1, 3\)"):
        _backward(ik.Implicit(linear_solver="gmres", preconditioner=(lambda z, v: v, lambda z, v: v[:, :3])))
    with pytest.raises(ValueError, match=r"returned \(1, 3\)"):
        _backward(ik.Implicit(linear_solver="gmres", preconditioner=lambda z, v: v[:, :3]))


def test_a_matrix_that_cannot_be_had_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    from implicitkit.linear.iterative import preconditioners

    monkeypatch.setattr(preconditioners, "_NUMBERS", 100)
    rule = ik.Implicit(linear_solver="gmres", preconditioner="ilu")
    with pytest.raises(ik.CapabilityError, match="no sparsity pattern"):
        _backward(rule, ik.Root(transport, jac_sparsity=None))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyamg", None)
    with pytest.raises(ik.CapabilityError, match=r"implicitkit\[amg\]"):
        _backward(ik.Implicit(linear_solver="gmres", preconditioner="amg"))


def test_a_singular_matrix_does_without_its_factors() -> None:
    """A row of zeros: the incomplete factors break down, and the diagonal must stand in for them, ones for its zeros."""
    A, _ = operator(1)
    blocks = A.sparse()
    blocks.values[:, : int(blocks.ready.pattern.indptr[1])] = 0.0
    made = preconditioner("ilu", A, A.like).solve(torch.ones(1, N, dtype=D))
    assert bool(made.isfinite().all())


@pytest.mark.parametrize("name", ["jacobi", "ilu", "stale"])
def test_newton_krylov_takes_the_same(name: str) -> None:
    solver = ik.NewtonKrylov(preconditioner=chosen(name))
    s = ik.root(transport, torch.zeros(N, dtype=D), (P,), solver=solver, rtol=1e-10)
    torch.testing.assert_close(s.value, solution(None)(P), rtol=1e-6, atol=1e-8)
    assert bool(s.converged)


def test_kept_factors_are_made_again_only_when_they_stop_paying() -> None:
    keep = ik.linear.Stale(products=8)
    solver, rule = (
        ik.NewtonKrylov(preconditioner=keep),
        ik.Implicit(preconditioner=keep, linear_solver="gmres", rtol=1e-11),
    )

    def run(p: Tensor) -> tuple[Tensor, Tensor]:
        p = p.clone().requires_grad_()
        z = ik.root(transport, torch.zeros(N, dtype=D), (p,), solver=solver, rule=rule, rtol=1e-10).value
        return z.detach(), torch.autograd.grad((W * z).sum(), p)[0]

    def agrees(p: Tensor) -> None:
        z, g = run(p)
        exact = p.clone().requires_grad_()
        truth = solution(None, "lu")(exact)
        torch.testing.assert_close(z, truth.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(g, torch.autograd.grad((W * truth).sum(), exact)[0], rtol=1e-6, atol=1e-8)

    run(P)
    made = keep.factorisations
    for step in range(5):
        agrees(P * (1 + 1e-3 * step))
    assert keep.factorisations == made  # near enough
    agrees(P * torch.tensor([1.0, -4.0, 1.0], dtype=D))  # the wind turns
    assert keep.factorisations > made
    made = keep.factorisations
    run(P)  # three unknown samples at once: another shape
    vmap(lambda p: ik.root(transport, torch.zeros(N, dtype=D), (p,), solver=solver).value)(torch.stack([P, P, P]))
    assert keep.factorisations > made
    with pytest.raises(ValueError, match="at least 1"):
        ik.linear.Stale(products=0)


def test_kept_factors_hold_for_dense_matrices() -> None:
    keep = ik.linear.Stale()
    A = torch.randn(40, 40, dtype=D, generator=torch.Generator().manual_seed(0)) / 7 + 2 * torch.eye(40, dtype=D)
    for _ in range(3):
        p = torch.ones(40, dtype=D, requires_grad=True)
        rule = ik.Implicit(linear_solver="gmres", preconditioner=keep)
        s = ik.root(lambda z, p: z @ A.T + z**3 - p, torch.zeros(40, dtype=D), (p,), solver="newton_krylov", rule=rule)
        (g,) = torch.autograd.grad(s.value.sum(), p)
        J = A + torch.diag(3 * s.value.detach() ** 2)
        torch.testing.assert_close(g, torch.linalg.solve(J.T, torch.ones(40, dtype=D)), rtol=1e-7, atol=1e-9)
        assert int(s.backward.steps) <= 3
    assert keep.factorisations == 1
    assert np.isfinite(keep.products)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("choice", ["jacobi", "block_jacobi", "ilu"])
@pytest.mark.parametrize("make", [ik.linear.GMRES, ik.linear.BiCGStab])
def test_a_name_on_the_linear_solver_itself(make: Any, choice: str) -> None:
    b = torch.stack([W, W.flip(0)])
    for transposed in (False, True):
        A, dense = operator(2)
        A, dense = (A.T, dense.mT) if transposed else (A, dense)
        s = make(preconditioner=choice).solve_many(A, torch.stack([b, 2 * b]), rtol=1e-10, atol=0.0, max_steps=2000)
        expected = torch.linalg.solve(dense, b.unsqueeze(2)).squeeze(2)
        assert make is not ik.linear.GMRES or bool(s.converged.all())  # BiCGStab breaks down on one of the transposed
        both = torch.cat([expected, 2 * expected])
        torch.testing.assert_close(s.x[s.converged], both[s.converged], rtol=1e-6, atol=1e-8)


def test_a_name_on_the_linear_solver_saves_products() -> None:
    limits: dict[str, Any] = {"rtol": 1e-8, "atol": 0.0, "max_steps": 1000}
    b = torch.stack([W, W.flip(0)])
    plain, named = (ik.linear.GMRES(preconditioner=c).solve(operator(2)[0], b, **limits) for c in (None, "ilu"))
    assert bool(named.converged.all()) and int(named.steps.max()) < 0.3 * int(plain.steps.max())


def test_the_derivative_does_not_depend_on_the_name() -> None:
    def value(p: Tensor, linear: Any) -> Tensor:
        rule = ik.Implicit(linear_solver=linear, max_steps=2000)
        return ik.root(transport, torch.zeros(N, dtype=D), (p,), rule=rule).value @ W

    plain = jacrev(lambda p: value(p, "lu"))(P)
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(transform(lambda p: value(p, ik.linear.GMRES(preconditioner="ilu")))(P), plain)


@pytest.mark.parametrize(
    "make", [lambda: ik.linear.GMRES(preconditioner="ilue"), lambda: ik.linear.CG(preconditioner="ilu")]
)
def test_names_that_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="jacobi"):
        make()
