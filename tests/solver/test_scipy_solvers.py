"""SciPy's solvers through the adapter: each way in which SciPy misleads a wrapper, survived; and all of them at work."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.interop.scipy import SOLVERS
from implicitkit.testing.known import known_problems

F64 = torch.float64

ROOT = [name for name in SOLVERS if SOLVERS[name].solves == "root" and "scalar" not in name]
NEWTON = ["scipy.root.hybr", "scipy.root.lm", "scipy.fsolve", "scipy.root.krylov", "scipy.newton_krylov"]
MIXING = [
    f"scipy.root.{m}" for m in ("broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing")
]
MINIMIZE = [name for name in SOLVERS if name.startswith("scipy.minimize")]
DERIVATIVE_FREE = ["scipy.minimize.Nelder-Mead", "scipy.minimize.Powell", "scipy.minimize.COBYQA"]
LEAST_SQUARES = [name for name in SOLVERS if name.startswith("scipy.least_squares")]
SCALAR = [name for name in SOLVERS if name.startswith("scipy.root_scalar")]


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.detach()))


def _contraction(z: Tensor, b: Tensor) -> Tensor:
    return 0.5 * torch.tanh(z.flip(-1)) + b


def _cubic(z: Tensor, b: Tensor) -> Tensor:
    return z**3 + 2 * z + 0.3 * z.flip(-1) - b


B = torch.tensor([1.0, -0.5, 0.25], dtype=F64)
Z0 = torch.zeros(3, dtype=F64)


# --------------------------------------------------------------------------------------------- the fifteen traps, by name
@pytest.mark.parametrize("name", ROOT)
def test_trap_01_success_flags_lie(name: str) -> None:
    """``x^2 - 2x`` from 1 (a singular Jacobian; SciPy's hybr: success at ``|F| = 1``), ``x^2 + 1`` (no root at all)."""
    for residual in (lambda z: z**2 - 2 * z, lambda z: z**2 + 1):
        start = torch.ones(1, dtype=F64)
        solution = ik.root(residual, start, solver=name, max_steps=100, on_failure="ignore")
        norm = _norm(residual(solution.value))
        assert float(solution.residual_norm) == pytest.approx(norm, abs=1e-14)
        assert bool(solution.converged) == (norm <= 3.7e-11 * 2.01), f"{norm}"


def test_trap_01_success_is_not_denied_either() -> None:
    """Linear systems, of which hybr says "not making good progress" when they are solved."""
    A = torch.eye(4, dtype=F64) + 0.1 * torch.ones(4, 4, dtype=F64)
    for name in NEWTON:
        solution = ik.root(lambda z: A @ z - 1, torch.zeros(4, dtype=F64), solver=name)
        assert bool(solution.converged), name


@pytest.mark.parametrize("name", [*NEWTON, "scipy.root.df-sane", "scipy.root.broyden1", "scipy.root.anderson"])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-10])
def test_trap_02_tol_means_the_residual(name: str, tolerance: float) -> None:
    """One meaning of the tolerance for all methods: ``|F|_2 <= atol``, met and not met a thousand times over needlessly."""
    solution = ik.root(_cubic, Z0, (B,), solver=name, atol=tolerance, rtol=0)
    assert _norm(_cubic(solution.value, B)) <= tolerance
    tight = ik.root(_cubic, Z0, (B,), solver=name, atol=1e-12, rtol=0)
    assert solution.evaluations <= tight.evaluations + 3  # what only atol takes is looked at once more


@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, "scipy.minimize.BFGS"])
def test_trap_03_float32(name: str) -> None:
    """float32 in, float32 out, solved to float32 accuracy (SciPy's lm returns the start, with success)."""
    seen = set()

    def residual(z: Tensor) -> Tensor:
        seen.add(z.dtype)
        return _cubic(z, B.float())

    solution = ik.root(residual, Z0.float(), solver=name)
    assert solution.value.dtype == torch.float32 and seen == {torch.float32}
    assert _norm(_cubic(solution.value, B.float())) <= 1e-4


@pytest.mark.parametrize("name", ROOT)
def test_trap_04_finite_differences_are_not_used(name: str) -> None:
    """The manual's 2 x 2 example from the origin, where MINPACK's steps are ``1e-24``: the quick ones solve it."""

    def residual(z: Tensor) -> Tensor:
        cube = 0.5 * (z[0] - z[1]) ** 3
        return torch.stack([z[0] + cube - 1, z[1] - cube])

    solution = ik.root(residual, torch.zeros(2, dtype=F64), solver=name, on_failure="ignore")
    norm = _norm(residual(solution.value))
    assert bool(solution.converged) == (norm <= 1e-10)
    if name in NEWTON:
        assert norm <= 1e-10
        assert torch.allclose(solution.value, torch.tensor([0.8411639, 0.1588361], dtype=F64), atol=1e-6)


@pytest.mark.parametrize("name", NEWTON)
def test_trap_05_complex(name: str) -> None:
    """``z^2 + 0.1 z + 1 = 0`` has no real root; complex states are solved through their real view."""
    solution = ik.root(lambda z: z**2 + 0.1 * z + 1, torch.tensor([0.3 + 0.5j], dtype=torch.complex128), solver=name)
    assert solution.value.dtype == torch.complex128
    wanted = complex(-0.05, (1 - 0.05**2) ** 0.5)
    assert abs(complex(solution.value) - wanted) < 1e-9


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, *MINIMIZE])
def test_trap_06_exceptions_that_are_not_noconvergence(name: str) -> None:
    """NaN at the start, NaN on the way, overflow, zero Jacobians: a failure, never SciPy's exception."""
    rows = {
        "NaN at the start": lambda z: torch.log(z - 10),
        "NaN on the way": lambda z: torch.sqrt(z - 0.99) + 1 + z,
        "overflow": lambda z: torch.exp(torch.exp(z)) + 1,
        "constant": lambda z: torch.ones_like(z) + 0 * z,
    }
    for what, residual in rows.items():
        solution = ik.root(residual, torch.ones(2, dtype=F64), solver=name, max_steps=30, on_failure="ignore")
        assert not bool(solution.converged), what
        assert bool(torch.isfinite(solution.value).all()), what
        with pytest.raises(ik.ConvergenceError):
            ik.root(residual, torch.ones(2, dtype=F64), solver=name, max_steps=30)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, *MINIMIZE, *SCALAR, "integrate"])
def test_trap_07_one_name_for_the_step_limit(name: str) -> None:
    """``max_steps`` bounds the steps reported and the evaluations made, and raising it does not cost anything."""
    b, z0 = (B[:1], Z0[:1]) if name in SCALAR else (B, Z0)
    for limit in (1, 2, 5):
        solution = ik.root(_cubic, z0, (b,), solver=name, max_steps=limit, on_failure="ignore", rtol=1e-14, atol=1e-15)
        assert int(solution.steps) <= limit
        assert solution.evaluations <= 100 * limit + 110
        assert bool(solution.converged) or int(solution.steps) >= 1
    enough = ik.root(_cubic, z0, (b,), solver=name, max_steps=200, on_failure="ignore")
    if bool(enough.converged.all()):
        assert enough.evaluations == ik.root(_cubic, z0, (b,), solver=name, max_steps=100_000).evaluations


@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, "scipy.minimize.BFGS", "scipy.minimize.L-BFGS-B"])
def test_trap_08_aliasing(name: str) -> None:
    """A function that returns one buffer again and again is solved; the start is not overwritten (SciPy's df-sane does); a
    function that writes into its argument is refused."""
    buffer = torch.empty(3, dtype=F64)

    def residual(z: Tensor) -> Tensor:
        with torch.no_grad():
            buffer.copy_(_cubic(z, B))
        return buffer + (_cubic(z, B) - buffer) if z.requires_grad else buffer

    start = Z0.clone()
    solution = ik.root(residual, start, solver=name)
    assert torch.equal(start, Z0)
    assert _norm(_cubic(solution.value, B)) <= 1e-9

    def writes(z: Tensor) -> Tensor:
        out = _cubic(z, B)
        with torch.no_grad():
            z.zero_()
        return out

    with pytest.raises(RuntimeError, match="in place"):
        ik.root(writes, Z0 + 1, solver=name)


class _Enough(Exception):
    pass


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, *MINIMIZE, "integrate"])
@pytest.mark.parametrize("error", [_Enough, StopIteration, ValueError, KeyError, ZeroDivisionError])
def test_trap_09_exceptions_of_the_function_surface(name: str, error: type[Exception]) -> None:
    """Whatever the user's function raises in the middle arrives as it was raised; SciPy takes some for its own."""
    calls = 0

    def residual(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error("of the user")
        return _cubic(z, B)

    with pytest.raises(error, match="of the user"):
        ik.root(residual, Z0, solver=name, rtol=1e-14, atol=1e-15, on_failure="ignore")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, "scipy.minimize.BFGS"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_trap_10_shapes(name: str, shape: tuple[int, ...]) -> None:
    """A number stays a number, a matrix a matrix; an empty state and systems that are not square are refused."""
    solution = ik.root(lambda z: z**3 + z - 1, torch.zeros(shape, dtype=F64), solver=name)
    assert solution.value.shape == shape
    assert torch.allclose(solution.value, torch.full(shape, 0.6823278038280193, dtype=F64))
    with pytest.raises(ValueError, match="size zero"):
        ik.root(lambda z: z, torch.zeros(0, dtype=F64), solver=name)
    with pytest.raises(ValueError, match="one equation per unknown"):
        ik.root(lambda z: z[:1], torch.zeros(2, dtype=F64), solver=name)


@pytest.mark.parametrize("name", [*ROOT, *LEAST_SQUARES, "scipy.minimize.BFGS"])
def test_trap_11_tensors_that_require_grad(name: str) -> None:
    """A start and an argument with gradients: the solution's derivative is that of the equation, and zero in the start."""
    z0, b = Z0.clone().requires_grad_(), B.clone().requires_grad_()
    value = ik.root(_cubic, z0, (b,), solver=name).value
    J = torch.stack([torch.autograd.grad(v, b, retain_graph=True)[0] for v in value])
    wanted = torch.linalg.inv(torch.autograd.functional.jacobian(lambda z: _cubic(z, B), value.detach()))
    assert torch.allclose(J, wanted, atol=1e-8)
    (gradient,) = torch.autograd.grad(value.sum(), z0, allow_unused=True)
    assert gradient is None or not bool(gradient.any())


@pytest.mark.parametrize("inner", ["gmres", "lgmres", "bicgstab", "tfqmr"])
def test_trap_12_krylov_options_do_what_they_say(inner: str) -> None:
    """``inner_maxiter`` sets the dimension of the Krylov space, for lgmres too (SciPy overwrites it there)."""
    n = 40
    d = torch.linspace(1, 50, n, dtype=F64)

    def products(inner_maxiter: int) -> int:
        count = 0

        @ik.register_solver("test.counting", solves="root", override=True)
        def counting(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Any:
            nonlocal count
            plain = f.jvp

            def jvp(z: Tensor, v: Tensor) -> Tensor:
                nonlocal count
                count += 1
                return plain(z, v)

            f.jvp = jvp
            krylov = ik.extend.get_solver("scipy.root.krylov", inner=inner, inner_maxiter=inner_maxiter)
            return krylov(f, z0, rtol=rtol, atol=atol, max_steps=max_steps)

        solution = ik.root(lambda z: d * z - 1 + 0.01 * z**3, torch.zeros(n, dtype=F64), solver="test.counting")
        assert bool(solution.converged)
        return count

    assert products(3) != products(30)
    with pytest.raises(TypeError, match="no option 'inner_max_iter'"):
        ik.extend.get_solver("scipy.root.krylov", inner_max_iter=3)


def test_trap_13_line_search_of_krylov() -> None:
    """Wolfe, not Armijo, is the default: Broyden's banded system, where SciPy's own default stops at ``|F| = 0.44``."""

    def banded(z: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(z * (1 + z), (5, 1))
        near = sum(padded[k : k + len(z)] for k in range(7) if k != 5)
        return z * (2 + 5 * z**2) + 1 - near

    for name in ("scipy.root.krylov", "scipy.newton_krylov"):
        solution = ik.root(banded, -torch.ones(200, dtype=F64), solver=name)
        assert _norm(banded(solution.value)) <= 1e-8


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_trap_14_sign_and_scale(name: str, sign: float) -> None:
    """Fixed points by ``f(z) - z`` with ``alpha = 1``; equations of either sign at the same cost."""
    solution = ik.fixed_point(_contraction, Z0, (B,), solver=name)
    assert solution.evaluations <= 60, f"{solution.evaluations} evaluations for a contraction by one half"
    plain = ik.root(lambda z, b: _contraction(z, b) - z, Z0, (B,), solver=name)
    turned = ik.root(lambda z, b: sign * (_contraction(z, b) - z), Z0, (B,), solver=name)
    assert turned.evaluations == plain.evaluations
    assert torch.allclose(turned.value, solution.value, atol=1e-8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "outer", ["scipy.root.hybr", "scipy.root.krylov", "scipy.root.broyden1", "scipy.minimize.BFGS"]
)
@pytest.mark.parametrize("inner", ["scipy.root.lm", "scipy.root.anderson", "scipy.least_squares.trf"])
def test_trap_15_reentrancy(outer: str, inner: str) -> None:
    """One solve inside another: ``z + y(z) = 2``, ``y^3 + y = z``, with the derivative through both."""

    def residual(z: Tensor, total: Tensor) -> Tensor:
        y = ik.root(lambda y, z: y**3 + y - z, torch.zeros(1, dtype=F64), (z,), solver=inner).value
        return z + y - total

    total = torch.tensor([2.0], dtype=F64, requires_grad=True)
    value = ik.root(residual, torch.zeros(1, dtype=F64), (total,), solver=outer).value
    y = 0.7709169970592481  # y^3 + 2 y = 2
    assert float(value.detach()) == pytest.approx(2 - y, abs=1e-8)
    (gradient,) = torch.autograd.grad(value.sum(), total)
    assert float(gradient) == pytest.approx(1 - 1 / (3 * y**2 + 2), abs=1e-7)


def test_trap_15_threads() -> None:
    """Four threads at once give what one gives."""
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        results[i] = ik.root(_cubic, Z0, (B + i,), solver=NEWTON[i % 3]).value

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        assert _norm(_cubic(results[i], B + i)) <= 1e-9


# ------------------------------------------------------------------------------------------------------------ the adapter
def test_every_method_of_scipy_that_fits_is_there() -> None:
    """All of ``root`` and of ``minimize`` but COBYLA, made for constraints; all of ``least_squares`` and ``root_scalar``."""
    wanted = {"hybr", "lm", "broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing", "krylov",
              "df-sane"}  # fmt: skip
    assert {f"scipy.root.{m}" for m in wanted} <= set(ik.solvers())
    assert len(MINIMIZE) >= 13 and len(LEAST_SQUARES) == 3 and len(SCALAR) == 8
    assert {"scipy.fsolve", "scipy.newton_krylov"} <= set(ik.solvers())


def test_no_warning_of_scipy_escapes() -> None:
    """Nor is a root claimed of what has none."""
    claimed = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in [*ROOT, *MINIMIZE, *LEAST_SQUARES]:
            solution = ik.root(
                lambda z: torch.exp(z) + 1e-3, torch.ones(1, dtype=F64), solver=name, max_steps=30, on_failure="ignore"
            )
            claimed += [name] * bool(solution.converged)
    assert claimed == []


def test_warnings_of_the_function_do_escape() -> None:
    def residual(z: Tensor) -> Tensor:
        warnings.warn("of the user", UserWarning, stacklevel=1)
        return z - 1

    with pytest.warns(UserWarning, match="of the user"):
        ik.root(residual, torch.zeros(1, dtype=F64), solver="scipy.root.hybr")


def test_what_scipy_said_is_told() -> None:
    with pytest.raises(ik.ConvergenceError, match="SciPy"):
        ik.root(lambda z: z**2 + 1, torch.ones(1, dtype=F64), solver="scipy.root.lm")
    with pytest.raises(ik.ConvergenceError, match=r"m < n|Method .lm."):
        ik.least_squares(lambda z: z[:1] ** 2 - 3 + z[1:2], torch.ones(2, dtype=F64), solver="scipy.least_squares.lm")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MINIMIZE)
def test_minimize(name: str) -> None:
    """Rosenbrock's function and its derivative with respect to the parameter ``a``: ``z = (a, a^2)``."""
    a = torch.tensor(0.8, dtype=F64, requires_grad=True)
    solution = ik.argmin(
        lambda z, a: 100 * (z[1] - z[0] ** 2) ** 2 + (a - z[0]) ** 2, torch.tensor([-1.2, 1.0], dtype=F64), (a,),
        solver=name, rtol=1e-7, max_steps=5000, on_failure="ignore",
    )  # fmt: skip
    assert bool(solution.converged), solution
    assert torch.allclose(solution.value, torch.tensor([0.8, 0.64], dtype=F64), atol=1e-4)
    rows = [torch.autograd.grad(v, a, retain_graph=True)[0].item() for v in solution.value]
    assert rows == pytest.approx([1.0, 1.6], abs=1e-3)


def test_dogleg_says_that_it_needs_positive_definite_hessians() -> None:
    def indefinite(z: Tensor) -> Tensor:
        return z[0] ** 2 - z[1] ** 2 + z[1] ** 4

    with pytest.raises(ik.ConvergenceError, match="psd"):
        ik.argmin(indefinite, torch.full((2,), 0.1, dtype=F64), solver="scipy.minimize.dogleg")


@pytest.mark.parametrize("name", [m for m in MINIMIZE if m not in DERIVATIVE_FREE])
def test_minimize_reaches_stationarity(name: str) -> None:
    """``|g| <= 1e-8 |g_0|`` where the objective stays at 10^4 (``L-BFGS-B`` with ``tol=1e-8`` ends at 1e-3)."""
    d = torch.logspace(0, 3, 6, dtype=F64)
    solution = ik.argmin(
        lambda z: 1e4 + (torch.cosh(z) - 1).sum() + 0.5 * (d * (z - 0.3) ** 2).sum(), torch.zeros(6, dtype=F64),
        solver=name, rtol=1e-8, on_failure="ignore",
    )  # fmt: skip
    gradient = torch.sinh(solution.value) + d * (solution.value - 0.3)
    start = _norm(-0.3 * d)
    assert _norm(gradient) <= 1e-8 * start + 1e-10, solution


@pytest.mark.parametrize("name", LEAST_SQUARES)
def test_least_squares(name: str) -> None:
    """A fit with a residual, against SciPy itself, and the derivative against differences of SciPy's solutions."""
    t = np.linspace(0, 2, 12)
    y = 2 * np.exp(-1.1 * t) + 0.2 * np.cos(5 * t)

    def numpy_fit(y: np.ndarray) -> np.ndarray:
        def gradient(z: np.ndarray) -> np.ndarray:
            model = np.exp(-z[1] * t)
            return np.stack([model, -z[0] * t * model]) @ (z[0] * model - y)

        rough = scipy.optimize.least_squares(lambda z: z[0] * np.exp(-z[1] * t) - y, np.ones(2)).x
        return scipy.optimize.root(gradient, rough, tol=1e-14).x

    data = torch.from_numpy(y).requires_grad_()
    times = torch.from_numpy(t)
    solution = ik.least_squares(
        lambda z, d: z[0] * torch.exp(-z[1] * times) - d, torch.ones(2, dtype=F64), (data,), solver=name
    )
    assert np.allclose(solution.value.detach().numpy(), numpy_fit(y), atol=1e-7)
    (gradient,) = torch.autograd.grad(solution.value[1], data)
    for i in (0, 5):
        step = np.zeros_like(y)
        step[i] = 1e-4
        difference = (numpy_fit(y + step)[1] - numpy_fit(y - step)[1]) / 2e-4
        assert float(gradient[i]) == pytest.approx(difference, abs=1e-6)


@pytest.mark.parametrize("name", SCALAR)
def test_root_scalar(name: str) -> None:
    """Kepler's equation for a batch of anomalies and its derivative ``1 / (1 - e cos E)``."""
    M = torch.linspace(0.1, 3.0, 5, dtype=F64).unsqueeze(1).requires_grad_()
    e = 0.7
    solution = ik.root(lambda E, M: E - e * torch.sin(E) - M, M.detach(), (M,), solver=name, batch_dims=1, in_dims=(0,))
    assert _norm(solution.value - e * torch.sin(solution.value) - M) <= 1e-9
    (gradient,) = torch.autograd.grad(solution.value.sum(), M)
    assert torch.allclose(gradient, 1 / (1 - e * torch.cos(solution.value)), atol=1e-7)


@pytest.mark.parametrize("name", [s for s in SCALAR if s.split(".")[-1] not in ("newton", "secant", "halley")])
def test_brackets(name: str) -> None:
    """Searched for where none is given; a pole is no root; no change of sign is said to be that; vectors are refused."""
    far = ik.root(lambda z: z - 1000, torch.zeros(1, dtype=F64), solver=name)
    assert float(far.value) == pytest.approx(1000)
    edge = ik.root(lambda z: torch.log(z) + 5, torch.ones(1, dtype=F64), solver=name, on_failure="ignore")
    assert bool(edge.converged) == (_norm(torch.log(edge.value) + 5) < 1e-9)
    given = ik.root(torch.cos, torch.zeros(1, dtype=F64), solver=ik.extend.get_solver(name, bracket=(4.0, 5.0)))
    assert float(given.value) == pytest.approx(1.5 * torch.pi)
    pole = ik.root(
        lambda z: 1 / z,
        torch.ones(1, dtype=F64),
        solver=ik.extend.get_solver(name, bracket=(-1.0, 2.0)),
        on_failure="ignore",
    )
    assert not bool(pole.converged)
    with pytest.raises(ik.ConvergenceError, match="no change of sign"):
        ik.root(lambda z: z**2 + 1, torch.ones(1, dtype=F64), solver=name)
    with pytest.raises(ik.CapabilityError):
        ik.root(lambda z: z, torch.ones(2, dtype=F64), solver=name)


@pytest.mark.parametrize(
    "name", ["scipy.root.hybr", "scipy.root.anderson", "scipy.least_squares.trf", "scipy.minimize.BFGS"]
)
def test_batches_by_sample(name: str) -> None:
    """One hopeless sample (``z^2 = c`` with ``c < 0``) leaves the others alone, with and without ``in_dims``."""
    c = torch.linspace(0.5, 4, 6, dtype=F64)
    c[2] = -1
    for in_dims in (None, (0,)):
        solution = ik.root(
            lambda z, c: z**2 - c.unsqueeze(1), torch.ones(6, 1, dtype=F64), (c,), solver=name, batch_dims=1,
            in_dims=in_dims, max_steps=200, on_failure="ignore",
        )  # fmt: skip
        good = torch.tensor([True, True, False, True, True, True])
        assert solution.converged.tolist() == good.tolist()
        assert torch.allclose(solution.value[good, 0], c[good].sqrt(), atol=1e-8)


def test_start_at_the_solution_costs_next_to_nothing() -> None:
    """SciPy's hybr spends 7 evaluations there."""
    z = ik.root(_cubic, Z0, (B,), solver="scipy.root.hybr", atol=1e-13, rtol=0).value
    for name in ROOT:
        assert ik.root(_cubic, z, (B,), solver=name, atol=1e-9).evaluations <= 3, name


def test_options_are_checked_by_name_and_value() -> None:
    with pytest.raises(TypeError, match="Did you mean 'line_search'"):
        ik.extend.get_solver("scipy.root.broyden1", line_serch="wolfe")
    solver = ik.extend.get_solver("scipy.root.broyden1", line_search="sideways")
    with pytest.raises(ik.ConvergenceError, match="ValueError"):
        ik.root(_cubic, Z0, (B,), solver=solver)


@pytest.mark.parametrize("name", ["scipy.root.hybr", "scipy.minimize.BFGS", "scipy.root_scalar.brentq"])
def test_copies_and_pickles(name: str) -> None:
    solver = ik.extend.get_solver(name)
    assert pickle.loads(pickle.dumps(solver)) == solver == copy.deepcopy(solver)


@pytest.mark.parametrize("name", ["scipy.root.hybr", "scipy.root.krylov", "scipy.root.broyden1"])
def test_transforms(name: str) -> None:
    """``vmap`` of the gradient and the Jacobian by both modes, against the inverse Jacobian of the equation."""

    def solve(b: Tensor) -> Tensor:
        return ik.root(_cubic, Z0, (b,), solver=name).value

    bs = torch.stack([B, B + 1])
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        J = torch.func.vmap(derivative(solve))(bs)
        for i in range(2):
            z = solve(bs[i])
            wanted = torch.linalg.inv(torch.autograd.functional.jacobian(lambda z: _cubic(z, B), z))
            assert torch.allclose(J[i], wanted, atol=1e-8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*NEWTON, "scipy.minimize.BFGS", "scipy.least_squares.trf"])
def test_gpu_tensors_come_back(name: str) -> None:
    b = B.cuda().requires_grad_()
    value = ik.root(_cubic, Z0.cuda(), (b,), solver=name).value
    assert value.device.type == "cuda" and _norm(_cubic(value, b)) <= 1e-9
    assert torch.autograd.grad(value.sum(), b)[0].device.type == "cuda"


def test_integration_asks_no_more_than_single_precision_has() -> None:
    """Its steps shrank to nothing where rounding was all of their error: 1000 of them, and no rest."""
    (known,) = (k for k in known_problems("steady_state", batch=2, size=4, dtype=torch.float32) if "cubic" in k.name)
    options: Any = {"rtol": 2.4e-5, "atol": 2.4e-5, "batch_dims": 1, "in_dims": (0,), "on_failure": "ignore"}
    found = ik.solve(known.problem, known.z0, (known.theta,), solver="integrate", **options)
    assert found.converged.all() and found.steps.sum() <= 200, found.steps


CONFORM = [
    *ROOT,
    *LEAST_SQUARES,
    *SCALAR,
    *(m for m in MINIMIZE if m not in (*DERIVATIVE_FREE, "scipy.minimize.dogleg")),
]


@pytest.mark.slow
@ik.testing.parametrize_with_checks(CONFORM)
def test_conformance(solver: Any, check: Any) -> None:
    check(solver)
