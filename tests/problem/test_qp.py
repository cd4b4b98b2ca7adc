"""Quadratic programs: planted solutions, other solvers, every transform, degenerate cases, statuses."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik
from implicitkit.diagnostics import degeneracy
from implicitkit.extend import KKT, DegenerateWarning
from implicitkit.problem.qp_data import QPData, natural_residual
from implicitkit.problem.qp_jacobian import QPJacobian
from implicitkit.solver.qp import interior_point as ip
from implicitkit.solver.qp.plain import solve_qp

F64 = torch.float64
EXTERNAL = {"daqp": "daqp", "piqp": "piqp", "proxqp": "proxsuite", "osqp": "osqp", "clarabel": "clarabel"}
SOLVERS = [
    "interior_point",
    "qp",
    "newton",
    *(
        pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}"))
        for name, module in EXTERNAL.items()
    ),
]
Parts = dict[str, Tensor]


def planted(
    seed: int, batch: tuple[int, ...] = (), n: int = 5, p: int = 1, m: int = 6, active: int = 2
) -> tuple[Parts, Parts]:
    """A strictly convex program and its solution ``z``, ``y``, ``lam``: the first ``active`` rows are active."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*batch, *shape, generator=g, dtype=F64)  # noqa: E731
    S, A, G, z, y = draw(n, n), draw(p, n), draw(m, n), draw(n), draw(p)
    P = S.mT @ S / n + 0.5 * torch.eye(n, dtype=F64)
    on = torch.arange(m) < active
    lam = torch.where(on, draw(m).abs() + 0.3, 0)
    slack = torch.where(on, 0, draw(m).abs() + 0.3)
    mv = lambda M, x: (M @ x.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    q = -(mv(P, z) + mv(A.mT, y) + mv(G.mT, lam))
    return {"P": P, "q": q, "A": A, "b": mv(A, z), "G": G, "h": mv(G, z) + slack}, {"z": z, "y": y, "lam": lam}


def stacked(solver: Any = "auto", **fixed: Any) -> Callable[..., Tensor]:
    """``(P, q, A, b, G, h) -> (z, y, lam)`` in one vector."""

    def function(*parts: Tensor) -> Tensor:
        solution = ik.solve(ik.QuadraticProgram(*parts, **fixed), solver=solver)
        return torch.cat([solution.value, *solution.multipliers], -1)

    return function


def truth(parts: Parts, active: Tensor) -> Callable[..., Tensor]:
    """The same by a dense solve of the KKT system of the active set: an oracle that autograd differentiates."""
    n, p, m = parts["q"].shape[-1], parts["b"].shape[-1], parts["h"].shape[-1]
    rows = active.nonzero().squeeze(1)

    def function(P: Tensor, q: Tensor, A: Tensor, b: Tensor, G: Tensor, h: Tensor) -> Tensor:
        C, c = torch.cat([A, G[rows]]), torch.cat([b, h[rows]])
        k = len(c)
        K = torch.cat([torch.cat([0.5 * (P + P.T), C.T], 1), torch.cat([C, C.new_zeros(k, k)], 1)])
        x = torch.linalg.solve(K, torch.cat([-q, c]))
        lam = x.new_zeros(m).index_put((rows,), x[n + p :])
        return torch.cat([x[:n], x[n : n + p], lam])

    return function


# ---------------------------------------------------------------------------------------------------------- solutions
@pytest.mark.parametrize("solver", SOLVERS)
def test_planted_solutions(solver: str) -> None:
    parts, solution = planted(0, (4,))
    found = ik.solve(ik.QuadraticProgram(**parts), solver=solver)
    assert found.converged.all()
    torch.testing.assert_close(found.value, solution["z"], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.multipliers.equality, solution["y"], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.multipliers.inequality, solution["lam"], rtol=0, atol=1e-9)


ABSENT = [(), ("P",), ("A", "b"), ("G", "h"), ("P", "A", "b")]


@pytest.mark.parametrize("absent", ABSENT, ids=str)
@pytest.mark.parametrize("solver", ["interior_point", "qp"])
def test_absent_parts(absent: tuple[str, ...], solver: str) -> None:
    parts, _ = planted(1, (3,))
    parts = {k: v for k, v in parts.items() if k not in absent}
    if "P" in absent:  # bounded: a box
        eye = torch.eye(5, dtype=F64)
        parts["G"], parts["h"] = torch.cat([eye, -eye]), torch.ones(10, dtype=F64)
        parts.pop("A", None), parts.pop("b", None)
    found = ik.solve(ik.QuadraticProgram(**{"P": None} | parts), solver=solver)
    if "P" in absent:
        torch.testing.assert_close(found.value, -parts["q"].sign(), rtol=0, atol=1e-9)
    assert float(found.residual_norm.max()) < 1e-9
    assert (found.multipliers.equality is None) == ("A" not in parts)


def test_two_sided_constraints() -> None:
    """``min |z - v|^2 / 2, lower <= z <= upper`` is clipping; the multiplier is ``v - z``, signed."""
    v = torch.tensor([[2.0, 0.3, -4.0]], dtype=F64)
    eye = torch.eye(3, dtype=F64)
    for solver in ("interior_point", "qp"):
        s = ik.solve(
            ik.QuadraticProgram(eye, -v, G=eye, h=torch.ones(3, dtype=F64), lower=-2 * torch.ones(3, dtype=F64)),
            solver=solver,
        )
        torch.testing.assert_close(s.value, v.clamp(-2, 1), rtol=0, atol=1e-11)
        torch.testing.assert_close(s.multipliers.inequality, v - v.clamp(-2, 1), rtol=0, atol=1e-10)


def test_infinite_bounds_are_absent_rows() -> None:
    v = torch.tensor([2.0, -3.0], dtype=F64)
    eye, inf = torch.eye(2, dtype=F64), torch.inf
    h, lower = torch.tensor([inf, 1.0], dtype=F64), torch.tensor([0.0, -inf], dtype=F64)
    s = ik.solve(ik.QuadraticProgram(eye, -v, G=eye, h=h, lower=lower))
    torch.testing.assert_close(s.value, v, rtol=0, atol=1e-12)


def test_equality_programs_have_the_closed_form() -> None:
    parts, _ = planted(2, (), active=0)
    P, q, A, b = (parts[k] for k in "PqAb")
    K = torch.cat([torch.cat([P, A.T], 1), torch.cat([A, torch.zeros(1, 1, dtype=F64)], 1)])
    x = torch.linalg.solve(K, torch.cat([-q, b]))
    s = ik.solve(ik.QuadraticProgram(P, q, A, b))
    torch.testing.assert_close(torch.cat([s.value, s.multipliers.equality]), x)


@pytest.mark.parametrize("seed", range(12))
def test_linear_programs_against_scipy(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    G = torch.randn(18, 6, generator=g, dtype=F64)
    h = torch.rand(18, generator=g, dtype=F64) + 0.1
    c = -G.T @ (torch.rand(18, generator=g, dtype=F64) * (torch.rand(18, generator=g) < 0.5))
    expected = scipy.optimize.linprog(c.numpy(), G.numpy(), h.numpy(), bounds=(None, None))
    s = ik.solve(ik.QuadraticProgram(None, c, G=G, h=h), solver="interior_point")
    assert abs(float(c @ s.value) - expected.fun) < 1e-9
    assert float(s.residual_norm) < 1e-9


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)], ids=str)
def test_batches_and_shared_parts(batch: tuple[int, ...]) -> None:
    parts, _ = planted(3, ())
    q = parts["q"] + 0.1 * torch.arange(float(torch.Size(batch).numel()), dtype=F64).reshape(*batch, 1)
    shared = {k: v.clone().requires_grad_() for k, v in parts.items() if k != "q"}
    s = ik.solve(ik.QuadraticProgram(q=q, **shared))
    assert s.value.shape == (*batch, 5)
    assert s.status.shape == batch
    s.value.square().sum().backward()
    total = {k: torch.zeros_like(v) for k, v in shared.items()}
    for row in q.reshape(-1, 5):
        alone = {k: v.detach().clone().requires_grad_() for k, v in shared.items()}
        ik.solve(ik.QuadraticProgram(q=row, **alone)).value.square().sum().backward()
        total = {k: total[k] + alone[k].grad for k in total}
    for name, t in shared.items():  # a sum over the batch, not a mean
        torch.testing.assert_close(t.grad, total[name], rtol=1e-9, atol=1e-11, msg=name)


def test_float32_in_float32_out() -> None:
    parts, solution = planted(4, (2,))
    s = ik.solve(ik.QuadraticProgram(**{k: v.float() for k, v in parts.items()}))
    assert s.value.dtype == torch.float32
    torch.testing.assert_close(s.value.double(), solution["z"], rtol=1e-4, atol=1e-4)


def test_the_plain_function() -> None:
    parts, solution = planted(5, (3,), p=2)
    z, y, lam, status = solve_qp(*parts.values())
    assert (status == int(ik.Status.CONVERGED)).all()
    for found, name in ((z, "z"), (y, "y"), (lam, "lam")):
        torch.testing.assert_close(found, solution[name], rtol=0, atol=1e-9)
    assert max(float(r.abs().max()) for r in natural_residual(z, y, lam, QPData(*parts.values()))) < 1e-10
    alone = solve_qp(*(t[0] for t in parts.values()))
    torch.testing.assert_close(alone[0], z[0])


# --------------------------------------------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("solver", ["qp", "interior_point"])
def test_derivatives_against_the_active_set_system(seed: int, solver: str) -> None:
    parts, solution = planted(seed)
    oracle, ours = truth(parts, solution["lam"] > 0), stacked(solver)
    args = tuple(parts.values())
    for which, transform in (("jacrev", jacrev), ("jacfwd", jacfwd)):
        for mine, exact, name in zip(
            transform(ours, tuple(range(6)))(*args), jacrev(oracle, tuple(range(6)))(*args), parts, strict=True
        ):
            torch.testing.assert_close(mine, exact, rtol=1e-8, atol=1e-9, msg=f"{which} {name}")
    loss = lambda f: lambda *a: (f(*a) ** 2).sum()  # noqa: E731
    for a, b in zip(hessian(loss(ours), (1, 4, 5))(*args), hessian(loss(oracle), (1, 4, 5))(*args), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_gradcheck(batch: tuple[int, ...]) -> None:
    args = [t.requires_grad_() for t in planted(6, batch, n=3, m=4, active=1)[0].values()]
    assert torch.autograd.gradcheck(stacked(), args, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(stacked(), args, fast_mode=True)


def test_vmap_and_vmap_of_grad() -> None:
    parts, _ = planted(7, (3,))
    args = tuple(parts.values())
    loss = lambda *a: (stacked()(*a) ** 2).sum()  # noqa: E731
    torch.testing.assert_close(vmap(stacked())(*args), stacked()(*args))
    mapped = vmap(grad(loss, tuple(range(6))))(*args)
    for i in range(3):
        alone = grad(loss, tuple(range(6)))(*(t[i] for t in args))
        for a, b in zip(mapped, alone, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-9, atol=1e-10)
    one = vmap(lambda q: stacked()(parts["P"][0], q, *(t[0] for t in args[2:])), in_dims=1)(parts["q"].T.contiguous())
    torch.testing.assert_close(one[0], stacked()(*(t[0] for t in args)))
    nested = vmap(vmap(lambda q: stacked()(parts["P"][0], q, *(t[0] for t in args[2:]))))(parts["q"].expand(2, 3, 5))
    torch.testing.assert_close(nested[1], one)


def test_second_order_through_a_layer() -> None:
    """``x(q) = q``, ``q = t^2``, ``L = x^2``: ``L''(2) = 12 t^2 = 48``."""

    def loss(t: Tensor) -> Tensor:
        x = ik.solve(ik.QuadraticProgram(torch.eye(1, dtype=F64), -(t**2).reshape(1))).value
        return (x**2).sum()

    t = torch.tensor(2.0, dtype=F64)
    assert float(hessian(loss)(t)) == pytest.approx(48.0, abs=1e-9)
    assert float(torch.autograd.functional.hessian(loss, t)) == pytest.approx(48.0, abs=1e-9)
    t = t.requires_grad_()
    (g,) = torch.autograd.grad(loss(t), t, create_graph=True)
    assert float(torch.autograd.grad(g, t)[0]) == pytest.approx(48.0, abs=1e-9)


def test_compile_copy_and_pickle() -> None:
    parts, _ = planted(8)
    args = tuple(parts.values())
    compiled = torch.compile(stacked(), backend="eager")
    torch.testing.assert_close(compiled(*args), stacked()(*args))
    problem = ik.QuadraticProgram(**parts)
    for other in (copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        torch.testing.assert_close(ik.solve(other).value, ik.solve(problem).value)
    solution = pickle.loads(pickle.dumps(ik.solve(problem)))
    torch.testing.assert_close(solution.multipliers.inequality, ik.solve(problem).multipliers.inequality)


def test_a_parameter_used_twice_and_captured_tensors() -> None:
    parts, _ = planted(9)
    scale = torch.tensor(1.3, dtype=F64, requires_grad=True)
    f = lambda s: ik.solve(ik.QuadraticProgram(s * parts["P"], s * parts["q"], G=parts["G"], h=s * parts["h"])).value  # noqa: E731
    assert torch.autograd.gradcheck(f, (scale,))


# ---------------------------------------------------------------------------------------------------------- degenerate
def _face(p: Tensor, **options: Any) -> ik.Solution:
    """``min x1 + x2`` subject to ``x1 + x2 >= p``: a face of solutions."""
    return ik.solve(
        ik.QuadraticProgram(None, torch.ones(2, dtype=F64), G=-torch.ones(1, 2, dtype=F64), h=-p.reshape(1), **options),
        solver="interior_point",
    )


@pytest.mark.filterwarnings("ignore:the conditions of optimality do not determine")
def test_lp_face_takes_the_derivative_of_least_norm() -> None:
    J = jacrev(lambda p: _face(p).value)(torch.tensor(1.0, dtype=F64))
    torch.testing.assert_close(J, torch.full((2,), 0.5, dtype=F64))
    c = torch.ones(2, dtype=F64)
    dc = jacrev(
        lambda c: (
            ik.solve(
                ik.QuadraticProgram(None, c, G=-torch.ones(1, 2, dtype=F64), h=-torch.ones(1, dtype=F64)),
                solver="interior_point",
            ).value
        )
    )(c)
    torch.testing.assert_close(dc, torch.zeros(2, 2, dtype=F64))


def test_degenerate_raise() -> None:
    p = torch.tensor(1.0, dtype=F64, requires_grad=True)
    with pytest.raises(ik.ConvergenceError, match="degenerate"):
        _face(p, degenerate="raise").value.square().sum().backward()


def test_lp_vertex_has_the_derivatives_of_its_rows() -> None:
    eye = torch.eye(2, dtype=F64)
    f = lambda c, h: ik.solve(ik.QuadraticProgram(None, c, G=-eye, h=h), solver="interior_point").value  # noqa: E731
    dc, dh = jacrev(f, (0, 1))(torch.tensor([1.0, 2.0], dtype=F64), torch.zeros(2, dtype=F64))
    torch.testing.assert_close(dc, torch.zeros(2, 2, dtype=F64))
    torch.testing.assert_close(dh, -eye)


def test_a_gradient_that_is_zero_by_structure_is_said_once() -> None:
    from implicitkit.problem import quadratic_program

    quadratic_program._warned = False
    eye, zero = torch.eye(2, dtype=F64), torch.zeros(2, dtype=F64)

    def backward() -> Tensor:
        c = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
        ik.solve(ik.QuadraticProgram(None, c, G=-eye, h=zero)).value.sum().backward()
        return c.grad

    with pytest.warns(DegenerateWarning, match="vertex"):
        assert not bool(backward().any())
    backward()  # warnings are errors here


def test_smooth_follows_the_central_path() -> None:
    """``min c x, x >= 0`` relaxed: ``x = kappa / c``, ``dx/dc = -kappa / c^2``, at every order."""
    eye, zero = torch.eye(1, dtype=F64), torch.zeros(1, dtype=F64)
    f = lambda c: ik.solve(ik.QuadraticProgram(None, c.reshape(1), G=-eye, h=zero, degenerate="smooth")).value.sum()  # noqa: E731
    c = torch.tensor(0.5, dtype=F64)
    assert float(f(c)) == pytest.approx(1e-3 / 0.5, rel=1e-9)
    assert float(grad(f)(c)) == pytest.approx(-1e-3 / 0.25, rel=1e-7)
    assert float(grad(grad(f))(c)) == pytest.approx(2e-3 / 0.125, rel=1e-6)


_BOX = torch.cat([torch.eye(5, dtype=F64), -torch.eye(5, dtype=F64)])


def _relaxed(
    dtype: torch.dtype, unit: float, cost: float, row: float, width: float
) -> tuple[ik.Solution, Tensor, Tensor]:
    """A fit within a box, relaxed: unknowns, objective and rows in these units; the solution, ``G`` and ``h``."""
    g = torch.Generator().manual_seed(0)
    A, b = torch.randn(7, 5, generator=g, dtype=F64), torch.randn(7, generator=g, dtype=F64)
    r = 10 ** torch.linspace(0, torch.tensor(row).log10().item(), 10, dtype=F64)
    G, h = (_BOX * r.unsqueeze(1) / unit).to(dtype), (width * r).to(dtype)
    P, q = (cost * A.T @ A / unit**2).to(dtype), (-cost * width * (A.T @ b) / unit).to(dtype)
    return ik.solve(ik.QuadraticProgram(P, q, G=G, h=h, degenerate="smooth")), G.to(F64), h.to(F64)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("unit", "cost", "row", "width"),
    [(1.0, 1.0, 1.0, 0.2), (1e-12, 1.0, 1.0, 0.2), (1e8, 1.0, 1.0, 0.2), (1.0, 1e8, 1.0, 0.2), (1.0, 1.0, 1e-8, 0.2),
     (1.0, 1.0, 1e8, 0.2), (1.0, 100.0, 1e-2, 0.2), (1.0, 1.0, 1.0, 2e3), (1.0, 1.0, 1.0, 2e-2)],
)  # fmt: skip
def test_a_relaxed_program_keeps_its_promise_in_any_units(
    unit: float, cost: float, row: float, width: float, dtype: torch.dtype
) -> None:
    """``lam s = 1e-3``, to what rounding leaves of ``s``."""
    solution, G, h = _relaxed(dtype, unit, cost, row, width)
    z, lam = solution.value.to(F64), solution.multipliers.inequality.to(F64)
    noise = 8 * torch.finfo(dtype).eps * (G.abs() @ z.abs() + h)
    assert bool(((lam * (h - G @ z) - 1e-3).abs() <= 1e-5 + lam * noise).all())


@pytest.mark.parametrize("width", [1e-12, 1e-6])
def test_a_relaxed_program_that_cannot_keep_its_promise_is_refused(width: float) -> None:
    """Within a millionth, ``1e-3`` of objective is more than all that it can differ by."""
    with pytest.raises(ik.ConvergenceError, match="inaccurate"):
        _relaxed(torch.float32, 1.0, 1.0, 1.0, width)


def test_duplicated_rows_share_their_multiplier() -> None:
    G = torch.tensor([[-1.0], [-1.0]], dtype=F64)
    f = lambda h: ik.solve(  # noqa: E731
        ik.QuadraticProgram(torch.eye(1, dtype=F64), torch.ones(1, dtype=F64), G=G, h=h), solver="interior_point"
    )
    h = torch.zeros(2, dtype=F64)
    torch.testing.assert_close(f(h).multipliers.inequality, torch.full((2,), 0.5, dtype=F64), rtol=0, atol=1e-8)
    torch.testing.assert_close(jacrev(lambda h: f(h).value)(h).sum(), torch.tensor(-1.0, dtype=F64))


def test_redundant_equalities() -> None:
    """Projection on ``sum z = 1``, stated twice: the Jacobian is ``I - 1 1' / n``."""
    A, b = torch.ones(2, 3, dtype=F64), torch.ones(2, dtype=F64)
    f = lambda v: ik.solve(ik.QuadraticProgram(torch.eye(3, dtype=F64), -v, A, b)).value  # noqa: E731
    J = jacrev(f)(torch.tensor([0.3, 1.0, -0.5], dtype=F64))
    torch.testing.assert_close(J, torch.eye(3, dtype=F64) - torch.ones(3, 3, dtype=F64) / 3, rtol=0, atol=1e-8)


# ---------------------------------------------------------------------------------------------------------------- ends
def _mixed(solver: str, **options: Any) -> tuple[ik.Solution, Tensor]:
    """Four boxes ``-h2 <= z1 <= h1``: fine, infeasible, NaN, fine."""
    G = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]], dtype=F64)
    h = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [1, torch.nan, 0], [1, 0, 0]], dtype=F64).requires_grad_()
    q = -torch.ones(4, 2, dtype=F64)
    return ik.solve(ik.QuadraticProgram(torch.eye(2, dtype=F64), q, G=G, h=h), solver=solver, **options), h


# Newton's method on the natural map and PIQP (which stops at its step limit there) cannot tell
CERTIFYING = [s for s in SOLVERS if s != "newton" and getattr(s, "values", ("",))[0] != "piqp"]


@pytest.mark.parametrize("solver", CERTIFYING)
def test_status_is_per_sample(solver: str) -> None:
    s, h = _mixed(solver, on_failure="nan")
    assert s.status.tolist() == [0, int(ik.Status.INFEASIBLE), int(ik.Status.NONFINITE), 0]
    assert torch.isnan(s.value).all(1).tolist() == [False, True, True, False]
    torch.testing.assert_close(s.value[0], torch.ones(2, dtype=F64), rtol=0, atol=1e-8)
    s.value[[0, 3]].sum().backward()
    assert torch.isfinite(h.grad[[0, 1, 3]]).all()


def test_failure_raises_and_names_the_samples() -> None:
    with pytest.raises(ik.ConvergenceError, match=r"sample 1 \(infeasible\)") as caught:
        _mixed("qp")
    assert set(caught.value.samples) == {1, 2}
    with pytest.warns(ik.ConvergenceWarning, match="infeasible"):
        _mixed("qp", on_failure="warn")


def test_a_failed_sample_leaves_shared_gradients_alone() -> None:
    G = torch.tensor([[1.0], [-1.0]], dtype=F64, requires_grad=True)
    h = torch.tensor([[1.0, 1.0], [-1.0, 0.0]], dtype=F64)
    q = torch.tensor([[-2.0], [-2.0]], dtype=F64)
    s = ik.solve(ik.QuadraticProgram(torch.eye(1, dtype=F64), q, G=G, h=h), on_failure="nan")
    torch.nan_to_num(s.value).sum().backward()
    torch.testing.assert_close(G.grad, torch.tensor([[-1.0], [0.0]], dtype=F64))


@pytest.mark.parametrize("solver", ["interior_point", "qp", "daqp", "clarabel"])
def test_unbounded(solver: str) -> None:
    module = EXTERNAL.get(solver)
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    problem = ik.QuadraticProgram(
        torch.diag(torch.tensor([1.0, 0.0], dtype=F64)),
        torch.tensor([0.0, -1.0], dtype=F64),
        G=torch.tensor([[1.0, 0.0]], dtype=F64),
        h=torch.ones(1, dtype=F64),
    )
    s = ik.solve(problem, solver=solver, on_failure="ignore")
    assert int(s.status) == int(ik.Status.UNBOUNDED)


# Newton's method on the natural map finds stationary points, and not from everywhere: it is left out below
NOT_CONVEX = {
    "negative": [[-1.0, 0.0], [0.0, -1.0]],
    "saddle": [[1.0, 0.0], [0.0, -1.0]],
    "slightly": [[1.0, 0.0], [0.0, -1e-4]],
    "zero diagonal": [[0.0, 1.0], [1.0, 0.0]],
}


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "newton"])
@pytest.mark.parametrize("name", NOT_CONVEX)
def test_not_convex_is_not_called_solved(solver: str, name: str) -> None:
    """Within a box, where a stationary point exists; and the convex program of the same batch is solved."""
    module = EXTERNAL.get(solver)
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    P = torch.stack([torch.tensor(NOT_CONVEX[name], dtype=F64), torch.eye(2, dtype=F64)])
    eye, q = torch.eye(2, dtype=F64), torch.tensor([0.1, 0.2], dtype=F64)
    problem = ik.QuadraticProgram(P, q, G=torch.cat([eye, -eye]), h=torch.ones(4, dtype=F64))
    s = ik.solve(problem, solver=solver, on_failure="ignore")
    assert s.status.tolist() == [int(ik.Status.NONCONVEX), int(ik.Status.CONVERGED)]
    torch.testing.assert_close(s.value[1], -q)
    with pytest.raises(ik.ConvergenceError, match="not positive semidefinite"):
        ik.solve(problem, solver=solver)


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "newton"])
def test_one_unknown_between_many_bounds(solver: str) -> None:
    """The middle of ``lower <= G z <= h`` binds at ``z = 0.5`` and at ``z = -0.25``."""
    G = torch.tensor([[1.0], [-2.0], [4.0], [0.5]], dtype=F64)
    h = torch.tensor([2.0, 0.5, 2.0, torch.inf], dtype=F64)
    lower = torch.tensor([-torch.inf, -4.0, -3.0, -2.0], dtype=F64)
    for q, expected in ((-3.0, 0.5), (3.0, -0.25), (-0.1, 0.1)):
        P = torch.ones(1, 1, dtype=F64)
        problem = ik.QuadraticProgram(P, torch.tensor([q], dtype=F64), G=G, h=h, lower=lower)
        torch.testing.assert_close(ik.solve(problem, solver=solver).value, torch.tensor([expected], dtype=F64))


@pytest.mark.parametrize("solver", ["auto", "interior_point"])
def test_not_convex_without_inequalities(solver: str) -> None:
    P = torch.tensor(NOT_CONVEX["zero diagonal"], dtype=F64)
    s = ik.solve(ik.QuadraticProgram(P, torch.ones(2, dtype=F64)), solver=solver, on_failure="ignore")
    assert int(s.status) == int(ik.Status.NONCONVEX)


@pytest.mark.parametrize("solver", ["auto", "interior_point"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_no_rows_are_no_constraints(solver: str, batch: tuple[int, ...]) -> None:
    q = torch.randn(*batch, 3, generator=torch.Generator().manual_seed(0), dtype=F64).requires_grad_()
    none, empty = torch.zeros(0, 3, dtype=F64), torch.zeros(0, dtype=F64)
    s = ik.solve(ik.QuadraticProgram(torch.eye(3, dtype=F64), q, none, empty, none, empty), solver=solver)
    torch.testing.assert_close(s.value, -q)
    assert s.multipliers.equality.shape == s.multipliers.inequality.shape == (*batch, 0)
    torch.testing.assert_close(torch.autograd.grad(s.value.sum(), q)[0], -torch.ones_like(q))


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ik.QuadraticProgram(torch.eye(2), torch.zeros(3)), ValueError, "P has shape"),
    (lambda: ik.QuadraticProgram(None, torch.zeros(())), ValueError, "number of unknowns"),
    (lambda: ik.QuadraticProgram(torch.eye(2), torch.zeros(2), torch.ones(1, 2)), ValueError, "pairs"),
    (lambda: ik.QuadraticProgram(torch.eye(2), torch.zeros(2), G=torch.ones(1, 2)), ValueError, "G comes with"),
    (
        lambda: ik.QuadraticProgram(torch.eye(2).expand(3, 2, 2), torch.zeros(2, 2)),
        ValueError,
        "batch sizes of the parts disagree",
    ),
    (lambda: ik.QuadraticProgram(torch.eye(2), [0.0, 0.0]), TypeError, "must be a tensor"),
    (lambda: ik.QuadraticProgram(torch.eye(2), torch.zeros(2).double()), ValueError, "float32"),
    (lambda: ik.QuadraticProgram(torch.eye(2), torch.zeros(2), degenerate="what"), ValueError, "degenerate"),
    (lambda: ik.solve(ik.QuadraticProgram(torch.eye(2), torch.zeros(2)), args=(1,)), ValueError, "holds its data"),
    (lambda: ik.solve(ik.QuadraticProgram(torch.eye(2), torch.zeros(2)), torch.zeros(3)), ValueError, "z0 must be"),
    (lambda: ik.solve(ik.QuadraticProgram(torch.eye(2), torch.zeros(2)), solver="sqp"), ik.CapabilityError, "fit"),
    (lambda: ik.solve(ik.Root(lambda z: z)), TypeError, "needs z0"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_a_solver_that_is_not_installed_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "piqp", None)
    with pytest.raises(ImportError, match="pip install piqp"):
        ik.solve(ik.QuadraticProgram(torch.eye(2), torch.zeros(2)), solver="piqp")


@pytest.mark.slow  # beside tests/linear/test_linear.py::test_dense_solves_do_not_hang_with_two_threads
def test_large_blocks_with_two_threads_do_not_hang() -> None:
    """torch's batched LU on the CPU hangs from about 150 unknowns with two threads; nothing here may call it."""
    code = (
        "import torch, implicitkit as ik; torch.set_num_threads(2); torch.manual_seed(0); n = 170\n"
        "q = torch.randn(2, n, dtype=torch.float64, requires_grad=True); eye = torch.eye(n, dtype=torch.float64)\n"
        "s = ik.solve(ik.QuadraticProgram(eye, q, G=-eye, h=torch.zeros(n, dtype=torch.float64)),"
        " solver='interior_point')\n"
        "s.value.square().sum().backward(); print(float((s.value - (-q).clamp_min(0)).abs().max()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) < 1e-9


@pytest.mark.parametrize(
    ("q", "weak", "active", "regular"),
    [([1.0, -1.0], 0, 1, True), ([0.0, -1.0], 1, 0, False), ([1.0, 1.0], 0, 2, True)],
)
def test_degeneracy_report(q: list[float], weak: int, active: int, regular: bool) -> None:
    """``min |z|^2 / 2 + q'z, z >= 0``: at ``q_i = 0`` the constraint is weakly active."""
    eye, h = torch.eye(2, dtype=F64), torch.zeros(2, dtype=F64)
    vector = torch.tensor(q, dtype=F64)
    solutions = [
        ik.solve(ik.QuadraticProgram(eye, vector, G=-eye, h=h)),
        ik.argmin(lambda z: z.square().sum() / 2 + vector @ z, h, constraints=ik.Inequality(lambda z: -z)),
    ]
    for solution in solutions:
        report = degeneracy(solution)
        assert (int(report.weakly_active), int(report.active), bool(report.regular)) == (weak, active, regular)
        assert "regular" in str(report)
    with pytest.raises(ValueError, match="constrained"):
        degeneracy(ik.root(lambda z: z - 1, torch.zeros(1)))


def test_rows_that_are_almost_weakly_active_are_solved_to_rounding() -> None:
    """Where a multiplier and its slack are both below the tolerance of the interior-point phase, it goes on."""
    n, m, batch = 5, 40, 1000
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=F64)  # noqa: E731
    S = normal(batch, n, n) / n**0.5 + torch.eye(n, dtype=F64)
    G, z = normal(batch, m, n) / n**0.5, normal(batch, n)
    force, slack = torch.zeros(batch, m, dtype=F64), torch.rand(batch, m, generator=draw, dtype=F64)
    force[:, :4], slack[:, :4] = normal(batch, 4).abs(), 0
    force[:, 0], slack[:, 4] = 10 ** (-8 - 2 * torch.rand(batch, generator=draw, dtype=F64)), 1e-9
    P = S @ S.mT
    q = -(P @ z.unsqueeze(2) + G.mT @ force.unsqueeze(2)).squeeze(2)
    h = (G @ z.unsqueeze(2)).squeeze(2) + slack
    s = ik.solve(ik.QuadraticProgram(P, q, G=G, h=h), solver="interior_point")
    torch.testing.assert_close(s.value, z, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("n", "m", "method"),
    [(500, 3000, "daqp"), (500, 3001, "interior_point"), (1200, 3, "daqp"), (1201, 3, "interior_point")],
)
def test_the_choice_of_the_solver_by_size(n: int, m: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("daqp")
    from implicitkit.solver.qp import builtin, external

    asked: list[str] = []
    monkeypatch.setattr(external.DAQP, "find", lambda *_: asked.append("daqp") or 1 / 0)
    monkeypatch.setattr(builtin, "interior_point", lambda *_, **__: asked.append("interior_point") or 1 / 0)
    eye = torch.eye(n, dtype=F64)
    with pytest.raises(ZeroDivisionError):
        rows = (eye[:1] + eye[1:2]).expand(m, n)  # no bounds, which have a method of their own
        ik.solve(ik.QuadraticProgram(eye, eye[0], G=rows, h=eye[:1, 0].expand(m)))
    assert asked == [method]


@pytest.mark.parametrize("policy", ["lstsq", "raise", "smooth"])
def test_a_whole_edge_that_is_optimal_has_no_derivative_without_a_word(policy: str) -> None:
    """The conditions leave half of the incoming derivative: its least-squares solution is no solution."""
    q = -torch.ones(2, dtype=torch.float64).requires_grad_()
    G = torch.cat([torch.ones(1, 2, dtype=torch.float64), -torch.eye(2, dtype=torch.float64)])
    h = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    z = ik.solve(ik.QuadraticProgram(torch.zeros(2, 2, dtype=torch.float64), q, G=G, h=h, degenerate=policy)).value
    loss = z[0] + 2 * z[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if policy == "lstsq":
            with pytest.raises(DegenerateWarning, match="the solution is not unique there"):
                loss.backward()
        elif policy == "raise":
            with pytest.raises(ik.ConvergenceError, match="degenerate"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("policy", ["lstsq", "raise"])
@pytest.mark.parametrize(
    ("name", "curvature", "point", "determined"),
    [
        ("the end of an optimal edge", 0.0, [1.0, 0.0, 1.0, 0.0, 0.0], False),
        ("the middle of it", 0.0, [0.5, 0.5, 1.0, 0.0, 0.0], False),
        ("a strictly convex program at a kink", 1.0, [1.0, 0.0, 0.0, 0.0, 0.0], True),
    ],
)
def test_a_kink_has_a_derivative_where_both_sides_have_one(
    name: str, curvature: float, point: list[float], determined: bool, policy: str
) -> None:
    """``min c |z|^2 / 2 - sum(z) (c = 0), -z_1 (c = 1),  sum(z) <= 1, z >= 0``, at a point and its multipliers."""
    eye = torch.eye(2, dtype=F64)
    q = -torch.ones(2, dtype=F64) if curvature == 0 else torch.tensor([-1.0, 0.0], dtype=F64)
    G, h = torch.cat([torch.ones(1, 2, dtype=F64), -eye]), torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    part = {"P": curvature * eye[None], "q": q[None], "G": G[None], "h": h[None]}
    A = QPJacobian.of(part, torch.tensor([point], dtype=F64), 0.0).operator()
    b = torch.tensor([[1.0, 2.0, 0.0, 0.0, 0.0]], dtype=F64)
    found = KKT(policy).solve(A.T, b, rtol=1e-10, atol=1e-10, max_steps=None)
    assert (found.doubt == "" and bool(found.converged.all())) == determined, name
    if not determined:
        assert ("do not determine" in found.doubt) if policy == "lstsq" else ("degenerate" in found.reason), name


def test_constraints_said_twice_have_a_derivative_without_a_word() -> None:
    """Their conditions are singular, and determine the derivative of the solution all the same."""
    q = torch.tensor([-3.0, 0.0], dtype=torch.float64, requires_grad=True)
    eye = torch.eye(2, dtype=torch.float64)
    program = ik.QuadraticProgram(eye, q, G=torch.cat([eye[:1], eye[:1]]), h=torch.ones(2, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (slope,) = torch.autograd.grad(ik.solve(program).value.sum(), q)
    torch.testing.assert_close(slope, torch.tensor([0.0, -1.0], dtype=torch.float64))


@pytest.mark.parametrize("degenerate", ["lstsq", "smooth"])
def test_programs_of_a_batch_may_have_units_of_their_own(degenerate: str) -> None:
    """Curvatures of 1e-6 to 1e9: no units suit them all, and none is lost."""
    generator = torch.Generator().manual_seed(0)
    q, G = (torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    h = torch.rand(4, dtype=torch.float64, generator=generator)
    P = 10.0 ** torch.tensor([-6.0, 0.0, 6.0, 9.0], dtype=torch.float64).view(4, 1, 1) * torch.eye(
        3, dtype=torch.float64
    )
    found = ik.solve(ik.QuadraticProgram(P, q, G=G, h=h, degenerate=degenerate)).value
    for one, p, c in zip(found, P, q, strict=True):
        alone = ik.solve(ik.QuadraticProgram(p, c, G=G, h=h, degenerate=degenerate)).value
        torch.testing.assert_close(one, alone, rtol=1e-6, atol=1e-9 * float(alone.abs().max()))


# ------------------------------------------------------------------------------------------ from a point nearby
#: What is said of a solution, in terms of it, and is it enough for all samples?
NEARBY: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "the solution": (lambda t: t, True),
    "roughly": (lambda t: t * 1.01, True),
    "nothing of one sample": (lambda t: t * (torch.arange(len(t)) != 1).unsqueeze(1), False),
    "the opposite": (lambda t: -t, False),
    "no numbers": (lambda t: t * torch.nan, False),
}


@pytest.mark.parametrize("name", NEARBY)
def test_a_program_is_solved_by_active_sets_from_a_point_nearby(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same point, and from inside only those samples for which the point does not do."""
    generator = torch.Generator().manual_seed(0)
    R, q, A, G, h = (
        torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        for shape in ((12, 12), (12,), (2, 12), (20, 12), (20,))
    )
    units = torch.logspace(-2, 2, 20, dtype=torch.float64)
    data = QPData(30 * R.mT @ R, 100 * q, A, A.sum(2), G * units[:, None], (G.sum(2) + h.abs()) * units)
    whole = ip.interior_point(data)
    assert bool((whole.lam > 1e-3).any(1).all())
    inside: list[int] = []
    iterate = ip._iterate
    monkeypatch.setattr(ip, "_iterate", lambda part, *more: inside.append(len(part.q)) or iterate(part, *more))  # type: ignore[func-returns-value]
    change, enough = NEARBY[name]
    found = ip.interior_point(data, near=(change(whole.z), change(whole.y), change(whole.lam)))
    for a, b in zip(found[:3], whole[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert bool((found.status == 0).all()) and (not inside) is enough
