"""The root methods one by one, and the polyalgorithm: what each option does, samples on their own, failure told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors.dense import svd_batched
from implicitkit.solver.auto import stages

METHODS: dict[str, Any] = {
    "newton": ik.Newton(),
    "newton, full steps": ik.Newton(line_search=False),
    "chord": ik.Chord(),
    "newton_krylov": ik.NewtonKrylov(),
    "newton_krylov, short": ik.NewtonKrylov(restart=2, forcing=0.1),
    "dogleg": ik.TrustRegion(),
    "dogleg, unscaled": ik.TrustRegion(scaling=False, radius=1.0),
    "levenberg_marquardt": ik.TrustRegion(subproblem="levenberg_marquardt"),
    "df_sane": ik.DFSANE(),
}
SAFEGUARDED = ("newton", "chord", "newton_krylov", "dogleg", "levenberg_marquardt")


def cubic(z: Tensor, t: Tensor) -> Tensor:
    """Coupled and monotone: one root for every ``t``."""
    return z**3 + z + 0.3 * torch.roll(z, 1, -1) - t


def batch(rows: int = 7, n: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    t = 5 * torch.randn(rows, n, generator=g, dtype=torch.float64)
    return torch.zeros(rows, n, dtype=dtype), t.to(dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batch_is_solved_and_equals_the_loop(name: str, dtype: torch.dtype) -> None:
    z0, t = batch(dtype=dtype)
    solution = ik.root(cubic, z0, (t,), solver=METHODS[name], batch_dims=1, in_dims=0)
    assert solution.value.dtype == dtype and bool(solution.converged.all())
    tight = 1e-8 if dtype == torch.float64 else 2e-3
    for i in range(len(t)):
        alone = ik.root(cubic, z0[i], (t[i],), solver=METHODS[name])
        torch.testing.assert_close(solution.value[i], alone.value, rtol=tight, atol=tight)
        assert int(solution.steps[i]) == int(alone.steps) or dtype == torch.float32


@pytest.mark.parametrize("name", METHODS)
def test_one_bad_sample_spoils_no_other(name: str) -> None:
    z0, t = batch()
    t[3] = torch.nan
    solution = ik.root(cubic, z0, (t,), solver=METHODS[name], batch_dims=1, on_failure="ignore")
    assert solution.converged.tolist() == [i != 3 for i in range(len(t))]
    assert int(solution.status[3]) == ik.Status.NONFINITE


@pytest.mark.parametrize("name", [*METHODS, "auto"])
def test_no_root_is_never_claimed(name: str) -> None:
    """``z^2 + 1 = 0``, alone and beside a sample that has a root."""
    c = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    solution = ik.root(
        lambda z, c: z**2 + c, torch.ones_like(c), (c,), solver=METHODS.get(name, name), batch_dims=1, in_dims=0,
        on_failure="ignore",
    )  # fmt: skip
    assert solution.converged.tolist() == [False, True]
    assert solution.residual_norm[0] >= 1.0
    torch.testing.assert_close(solution.value[1], torch.tensor([2.0], dtype=torch.float64).sqrt())


@pytest.mark.parametrize("name", SAFEGUARDED)
def test_damping_keeps_arctan_from_diverging(name: str) -> None:
    """Undamped Newton steps on ``arctan`` diverge from beyond 1.39."""
    z0 = torch.tensor([[3.0], [-20.0]], dtype=torch.float64)
    assert bool(ik.root(torch.atan, z0, solver=METHODS[name], batch_dims=1).converged.all())
    plain = ik.root(torch.atan, z0, solver=METHODS["newton, full steps"], batch_dims=1, on_failure="ignore")
    assert not bool(plain.converged.any())


@pytest.mark.parametrize("name", [*SAFEGUARDED, "auto"])
def test_a_singular_jacobian_at_the_start(name: str) -> None:
    def f(z: Tensor) -> Tensor:
        return torch.stack([z[0] ** 2 + z[1] - 1, z[0] ** 2 - z[1]])

    solution = ik.root(f, torch.zeros(2, dtype=torch.float64), solver=METHODS.get(name, name), on_failure="ignore")
    value = f(solution.value)
    assert bool(solution.converged) == bool(value.norm() <= 1e-9)
    if name == "auto":
        assert int(solution.status) in (ik.Status.CONVERGED, ik.Status.STALLED, ik.Status.MAX_STEPS)


def test_the_trust_region_does_not_mind_units() -> None:
    def f(z: Tensor, unit: Tensor) -> Tensor:
        x = z * unit
        return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    for subproblem in ("dogleg", "levenberg_marquardt"):
        steps = []
        for unit in (torch.ones(2, dtype=torch.float64), torch.tensor([1e4, 1e-3], dtype=torch.float64)):
            start = torch.tensor([-1.2, 1.0], dtype=torch.float64) / unit
            steps.append(int(ik.root(f, start, (unit,), solver=ik.TrustRegion(subproblem=subproblem)).steps))
        assert abs(steps[0] - steps[1]) <= 1, (subproblem, steps)


def test_chord_keeps_its_jacobian_while_it_contracts() -> None:
    """Evaluations: the start, one a step, and one for each Jacobian (and each step not taken)."""
    t = torch.full((1, 4), 0.5, dtype=torch.float64)
    for contraction, jacobians in ((0.9, 1), (1e-9, None)):
        solution = ik.root(
            cubic,
            torch.zeros_like(t),
            (t,),
            solver=ik.Chord(contraction=contraction),
            batch_dims=1,
            rtol=0.0,
            atol=1e-10,
        )
        formed = solution.evaluations - int(solution.steps.max()) - 1
        assert formed == jacobians if jacobians else formed >= int(solution.steps.max())


# ---------------------------------------------------------------------------------------------------------- Krylov


def test_a_preconditioner_saves_products() -> None:
    n = 300
    A = 2 * torch.eye(n, dtype=torch.float64)
    A -= torch.diag(torch.ones(n - 1, dtype=torch.float64), 1) + torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    inverse = torch.linalg.inv(A)
    applied = 0

    def f(z: Tensor, c: Tensor) -> Tensor:
        return z @ A - c * torch.exp(z)

    def precondition(z: Tensor, v: Tensor) -> Tensor:
        nonlocal applied
        applied += 1
        return v @ inverse

    c = torch.tensor([[2e-5], [1e-5]], dtype=torch.float64)
    z0 = torch.zeros(2, n, dtype=torch.float64)
    method = ik.NewtonKrylov(preconditioner=precondition)
    solution = ik.root(f, z0, (c,), solver=method, batch_dims=1, atol=1e-12, rtol=0.0)
    plain = ik.root(f, z0, (c,), solver=ik.NewtonKrylov(restart=n), batch_dims=1, atol=1e-12, rtol=0.0)
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-6, atol=1e-8)
    assert 0 < applied < 40


@pytest.mark.parametrize("forcing", [0.9, 0.1])
def test_newton_krylov_is_superlinear(forcing: float) -> None:
    z0, t = batch()
    solution = ik.root(
        cubic, z0, (t,), solver=ik.NewtonKrylov(forcing=forcing), batch_dims=1, trace=True, rtol=0.0, atol=1e-9
    )
    norms = solution.trace.amax(1)
    assert norms[-1] / norms[-2] < 1e-2 and int(solution.steps.max()) <= 15


def test_newton_krylov_ends_soon_where_only_rounding_is_left() -> None:
    """Started at a solution of ``-Laplace u = 3 exp(u)``: full steps change nothing, and 50 of them were waited for."""
    side = 128

    def bratu(u: Tensor) -> Tensor:
        v = torch.nn.functional.pad(u.reshape(side, side), (1, 1, 1, 1))
        laplace = 4 * v[1:-1, 1:-1] - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:]
        return ((side + 1) ** 2 * laplace - 3 * v[1:-1, 1:-1].exp()).reshape(-1)

    start = ik.root(bratu, torch.zeros(side**2, dtype=torch.float64)).value
    solution = ik.root(bratu, start, solver=ik.NewtonKrylov(preconditioner="ilu"))
    assert bool(solution.converged) and int(solution.steps) <= 15


# ---------------------------------------------------------------------------------------------------- polyalgorithm
def freudenstein_roth(z: Tensor) -> Tensor:
    x, y = z.unbind(-1)
    return torch.stack([-13 + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y], -1)


def test_only_what_failed_goes_on_and_the_finishers_are_named() -> None:
    starts = torch.tensor([[6.0, 3.0], [0.5, -2.0], [5.0, 4.5]], dtype=torch.float64)
    shared = ik.extend.Polyalgorithm((ik.TrustRegion(), ik.Newton(line_search=False)))
    solution = ik.root(freudenstein_roth, starts, solver=shared, batch_dims=1)
    assert solution.solver == "auto (trust_region, newton)"
    assert bool(solution.converged.all())
    alone = ik.root(freudenstein_roth, starts, solver="trust_region", batch_dims=1, on_failure="ignore")
    assert alone.converged.tolist() == [True, False, True]
    assert torch.equal(alone.value[0], solution.value[0]) and torch.equal(alone.value[2], solution.value[2])
    assert solution.steps[1] > alone.steps[1]


def test_rows_are_dropped_between_stages() -> None:
    rows = 64
    starts = torch.tensor([[6.0, 3.0]], dtype=torch.float64).repeat(rows, 1)
    starts[17] = torch.tensor([0.5, -2.0])
    zero = torch.zeros(rows, 1, dtype=torch.float64)
    seen: list[int] = []

    def f(z: Tensor, shift: Tensor) -> Tensor:
        seen.append(len(z))
        return freudenstein_roth(z) + shift

    solver = ik.extend.Polyalgorithm((ik.TrustRegion(), ik.Newton(line_search=False)))
    solution = ik.root(f, starts, (zero,), solver=solver, batch_dims=1, in_dims=0)
    assert bool(solution.converged.all()) and seen[0] == rows and 1 in seen


def test_no_stage_solves_it() -> None:
    solution = ik.root(
        lambda z: z**2 + 1, torch.full((1,), 0.7, dtype=torch.float64), on_failure="ignore"
    )  # fmt: skip
    assert solution.solver == "auto" and not bool(solution.converged)
    assert solution.residual_norm < 1.01
    with pytest.raises(ik.ConvergenceError, match="auto"):
        ik.root(lambda z: z**2 + 1, torch.full((1,), 0.7, dtype=torch.float64))


@pytest.mark.parametrize("limit", [1, 3, 20])
def test_max_steps_limits_all_stages_together(limit: int) -> None:
    solution = ik.root(
        lambda z: z**2 + 1, torch.full((1,), 0.7, dtype=torch.float64), on_failure="ignore", max_steps=limit
    )  # fmt: skip
    assert int(solution.steps) <= limit


def test_trace_and_callback_run_through_the_stages() -> None:
    seen: list[int] = []
    start = torch.tensor([0.5, -2.0], dtype=torch.float64)
    solver = ik.extend.Polyalgorithm((ik.TrustRegion(), ik.Newton(line_search=False)))
    solution = ik.root(
        freudenstein_roth, start, solver=solver, trace=True, callback=lambda step, z, norm: seen.append(step)
    )  # fmt: skip
    assert seen == list(range(1, int(solution.steps) + 1))
    assert len(solution.trace) == int(solution.steps) + 1
    stopped = ik.root(
        freudenstein_roth, start, solver=solver, callback=lambda *_: True, on_failure="ignore"
    )  # fmt: skip
    assert int(stopped.status) == ik.Status.STOPPED and int(stopped.steps) == 1


def test_the_tolerance_stays_that_of_the_start() -> None:
    """A later stage does not measure ``rtol`` against the smaller residual where it begins, nor a larger one."""
    start = torch.tensor([0.5, -2.0], dtype=torch.float64)
    solver = ik.extend.Polyalgorithm((ik.TrustRegion(), ik.extend.Stage(ik.Newton(line_search=False), scale=1e6)))
    solution = ik.root(freudenstein_roth, start, solver=solver, rtol=1e-6, atol=0.0, on_failure="ignore")
    assert bool(solution.converged)
    assert solution.residual_norm <= 1e-6 * freudenstein_roth(start).norm()


@pytest.mark.parametrize("power", [3, 9])
def test_a_far_start_does_not_excuse_a_large_residual(power: int) -> None:
    """``rtol |F(z0)|`` is 1e8 and more here, and met long before the root."""

    def f(z: Tensor, c: Tensor) -> Tensor:
        return z**power - c

    c = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    solution = ik.root(f, torch.full_like(c, 1e9), (c,), batch_dims=1, in_dims=0)
    torch.testing.assert_close(solution.value, c ** (1 / power), rtol=1e-8, atol=0)


def test_a_residual_in_large_units_may_be_as_large_as_rounding_makes_it() -> None:
    def f(z: Tensor) -> Tensor:
        return 1e12 * (torch.cos(z) - z)

    solution = ik.root(f, torch.ones(3, dtype=torch.float64))
    assert bool(solution.converged)
    torch.testing.assert_close(solution.value, torch.full((3,), 0.7390851332151607, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "size", "first", "second"),
    [
        ("root", 10, "newton", "newton"),
        ("steady_state", 512, "pseudo_transient", "newton"),
        ("root", 1000, "newton", "newton"),
        ("root", 1200, "newton", "newton"),
        ("root", 10_000, "newton_krylov", "newton_krylov"),
        ("fixed_point", 10, "anderson", "picard"),
        ("fixed_point", 10_000, "anderson", "picard"),
    ],
)
def test_what_auto_tries_first(kind: str, size: int, first: str, second: str) -> None:
    names = [stage.make().name for stage in stages(kind, 1, size) if not stage.sparse]
    assert names[:2] == [first, second]
    assert len(names) == 1 or "df_sane" in names


def test_auto_on_a_fixed_point_where_the_iteration_diverges() -> None:
    """``z = 3 cos(z)``: at first, and at two of its fixed points, slopes are beyond one; the third one attracts."""
    z0 = torch.linspace(-2, 2, 9, dtype=torch.float64).unsqueeze(1)
    solution = ik.fixed_point(lambda z: 3 * torch.cos(z), z0, batch_dims=1)
    torch.testing.assert_close(3 * torch.cos(solution.value), solution.value, rtol=1e-9, atol=1e-9)
    assert solution.solver.startswith(("auto (anderson", "auto (picard"))


def test_auto_under_vmap_and_grad() -> None:
    starts = torch.tensor([[6.0, 3.0], [0.5, -2.0]], dtype=torch.float64)

    def value(c: Tensor, start: Tensor) -> Tensor:
        return ik.root(lambda z, c: freudenstein_roth(z) - c, start, (c,)).value.sum()

    shifts = torch.zeros(2, 2, dtype=torch.float64)
    grads = torch.vmap(torch.func.grad(value))(shifts, starts)
    J = torch.func.jacrev(freudenstein_roth)(torch.tensor([5.0, 4.0], dtype=torch.float64))
    expected = torch.linalg.solve(J.mT, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(grads, expected.expand(2, 2), rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------------- bad options
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "newton halvings": (ik.Newton, {"halvings": -1}, "halvings"),
    "newton patience": (ik.Newton, {"patience": -1}, "patience"),
    "chord contraction": (ik.Chord, {"contraction": 1.0}, "contraction"),
    "chord halvings": (ik.Chord, {"halvings": -1}, "halvings"),
    "krylov forcing": (ik.NewtonKrylov, {"forcing": 1.0}, "forcing"),
    "krylov restart": (ik.NewtonKrylov, {"restart": 0}, "restart"),
    "trust region subproblem": (ik.TrustRegion, {"subproblem": "doglegs"}, "subproblem"),
    "trust region radius": (ik.TrustRegion, {"radius": 0.0}, "radius"),
    "df_sane memory": (ik.DFSANE, {"memory": 0}, "memory"),
    "df_sane cuts": (ik.DFSANE, {"cuts": 0}, "cuts"),
    "stage steps": (ik.extend.Stage, {"solver": "newton", "max_steps": 0}, "max_steps"),
    "stage scale": (ik.extend.Stage, {"solver": "newton", "scale": float("nan")}, "scale"),
    "no stage": (ik.extend.Polyalgorithm, {"stages": ()}, "at least one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(name: str) -> None:
    cls, options, match = BAD[name]
    with pytest.raises(ValueError, match=match):
        cls(**options)


def test_a_preconditioner_is_checked() -> None:
    with pytest.raises(TypeError, match="preconditioner"):
        ik.NewtonKrylov(preconditioner=3.0)
    with pytest.raises(ValueError, match="Did you mean 'ilu'"):
        ik.NewtonKrylov(preconditioner="ilut")


# ---------------------------------------------------------------------------------------------------------- SVD
def test_svd_of_blocks_of_which_one_is_not_finite() -> None:
    A = torch.randn(3, 5, 4, dtype=torch.float64)
    A[1, 0, 0] = torch.nan
    U, s, Vh = svd_batched(A)
    assert bool(torch.isnan(s[1]).all())
    for i in (0, 2):
        torch.testing.assert_close((U[i] * s[i]) @ Vh[i], A[i])
    with pytest.raises(ValueError, match="batch"):
        svd_batched(A[0])


@pytest.mark.parametrize("solver", ["newton", "auto"])
def test_newton_evaluates_each_point_once(solver: str) -> None:
    """The graph of a trial is the next step's; the first point alone is one that lifting has seen."""
    calls = []

    def f(z: Tensor, c: Tensor) -> Tensor:
        calls.append(z)
        return z**3 + z.flip(0) - c

    s = ik.root(
        f, torch.ones(3, dtype=torch.float64), (torch.tensor([2.0, 5.0, 3.0], dtype=torch.float64),), solver=solver
    )
    assert int(s.steps) > 3 and s.evaluations == len(calls) == int(s.steps) + 2
