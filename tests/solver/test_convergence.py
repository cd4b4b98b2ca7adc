"""What is called converged is a solution, whoever says so and wherever the solve began; what is right is not refused.

Every system of ``convergence_table`` from seven starts over twelve orders of magnitude (the samples of one solve) by every
named solver in float32 and float64, at default tolerances.  The oracle is independent: Newton with least-squares steps in
float64 from the point that was returned.  A claim is *wrong* if that leads nowhere, or further away than a thousand times
what the tolerance promises, ``|J^-1| (atol + rtol |J z|)``, or, of a minimisation, to no minimum.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

sys.path.insert(0, str(Path(__file__).parents[1] / "tables"))
from convergence_table import FACTORS, Claim, claims

_LOOSE, _SHARP = 1e3, 0.5  # times the promise: what no claim may exceed, and what must not be refused
_STEPS = 60
F64 = torch.float64
TABLE = {claim.name: claim for claim in claims()}


@dataclass(frozen=True)
class Verdict:
    """How a solve from one start ended, and what the oracle says: is there a solution within the loosened promise?"""

    claim: str
    solver: str
    dtype: torch.dtype
    factor: float
    status: int
    right: bool
    sharp: bool
    small: bool  # the test of |F| against |F(z0)| would have been passed
    text: str


def polished(claim: Claim, z: Tensor) -> tuple[Tensor, Tensor]:
    """``(batch, n)``: where damped Newton steps of least squares lead, and whether they arrive, ``(batch,)``."""
    residual, jacobian = torch.func.vmap(claim.residual), torch.func.vmap(claim.jacobian)
    d = torch.full_like(z, torch.inf)
    for _ in range(_STEPS):
        F, J = residual(z), jacobian(z)
        unit = z.abs().maximum(1e-6 * z.abs().amax(1, keepdim=True))  # else a bent valley far out has a null space
        unit = torch.where(unit > 0, unit, 1)
        scaled = J * unit.unsqueeze(1)
        usable = torch.isfinite(scaled).flatten(1).all(1) & torch.isfinite(F).all(1)
        J, scaled = (torch.where(usable[:, None, None], matrix, 0) for matrix in (J, scaled))
        F = torch.where(usable[:, None], F, torch.inf)
        rows = scaled.abs().amax(2, keepdim=True)
        rows = torch.where(rows > 0, rows, 1)
        step = torch.linalg.pinv(scaled / rows, rtol=1e-14) @ torch.where(usable[:, None], -F, 0).unsqueeze(2).div(rows)
        d = torch.where(usable[:, None], unit * step.squeeze(2), torch.inf)
        hopeless = ((J == 0).all(2) & (F != 0)).any(1)  # an equation that nothing changes
        if not bool((torch.linalg.vector_norm(d, dim=1) > 1e-15 * torch.linalg.vector_norm(z, dim=1)).any()):
            break
        t, found = torch.ones(len(z), 1, dtype=z.dtype), torch.zeros(len(z), 1, dtype=torch.bool)
        old = torch.linalg.vector_norm(F, dim=1, keepdim=True)
        for _ in range(25):
            trial = z + t * torch.nan_to_num(d, posinf=0.0)
            found = found | (torch.linalg.vector_norm(residual(trial), dim=1, keepdim=True) < old)
            if bool(found.all()):
                break
            t = torch.where(found, t, t / 2)
        z = torch.where(found, z + t * d, z)
        if not bool(found.any()):
            break
    F = torch.linalg.vector_norm(residual(z), dim=1)
    size = torch.linalg.vector_norm(z, dim=1)
    arrived = (~hopeless & (d.abs() <= 1e-7 * z.abs().clamp_min(1)).all(1)) | (F == 0)
    return z, arrived & torch.isfinite(size)


def _fitted(claim: Claim, p: Tensor) -> Tensor:
    """Of least squares: is Gauss and Newton's correction small?  A Hessian of condition 1e20 has lost what this sees."""
    if claim.kind != "least_squares":
        return torch.ones(len(p), dtype=torch.bool)
    r, J = (torch.nan_to_num(torch.func.vmap(g)(p)) for g in (claim.function, torch.func.jacrev(claim.function)))
    size = torch.linalg.vector_norm(J, dim=1).clamp_min(1e-300)
    d = (torch.linalg.pinv(J / size.unsqueeze(1), rtol=1e-12) @ r.unsqueeze(2)).squeeze(2) / size
    return (d.abs() <= 0.1 * p.abs().maximum(p.abs().amax(1, keepdim=True).clamp_min(1) * 1e-3)).all(1)


def right(claim: Claim, z: Tensor, rtol: float, atol: float, eps: float) -> tuple[Tensor, Tensor]:
    """``(batch,)`` each: is there a solution within a thousand times the promise of ``z``, and within half of it?

    At a singular solution no distance is promised: the residual must be small there by the scale at ``z`` itself.
    """
    if claim.solutions is not None:
        error = torch.stack(
            [torch.linalg.vector_norm(z - known, dim=1) for known in (*claim.solutions, torch.inf)]
        ).amin(0)
        return error <= _LOOSE * (rtol + atol), error <= _SHARP * (rtol + atol)
    p, arrived = polished(claim, z)
    J = torch.nan_to_num(torch.func.vmap(claim.jacobian)(p))
    values = torch.linalg.svdvals(J)
    size = torch.linalg.vector_norm(p, dim=1)
    aside = torch.ones_like(p).index_fill_(1, torch.arange(0, p.shape[1], 2), -1.0)
    there = torch.func.vmap(claim.jacobian)(p + 0.01 * size.clamp_min(1)[:, None] * aside)
    beside = torch.linalg.svdvals(torch.nan_to_num(there))
    singular = (values[:, -1] <= 1e-12 * values[:, 0]) | (values[:, -1] <= 1e-4 * beside[:, -1])

    def scale(matrix: Tensor, point: Tensor) -> Tensor:
        if claim.kind == "fixed_point":
            return torch.linalg.vector_norm(point, dim=1)
        return torch.linalg.vector_norm((matrix @ point.unsqueeze(2)).squeeze(2), dim=1)

    promise = (atol + rtol * scale(J, p)) / values[:, -1].clamp_min(1e-300) + eps * size.clamp_min(1)
    arrived = arrived & (p.abs().amax(1) <= claim.within)
    error = torch.linalg.vector_norm(p - z, dim=1)
    near = error <= torch.maximum(0.1 * size.clamp_min(0.1), 10 * promise)
    there = torch.nan_to_num(torch.func.vmap(claim.jacobian)(z))
    excess = torch.linalg.vector_norm(torch.func.vmap(claim.residual)(z), dim=1) / (atol + rtol * scale(there, z))
    if claim.kind in ("argmin", "least_squares"):
        curvature = torch.linalg.eigvalsh(0.5 * (J + J.mT))
        arrived = arrived & _fitted(claim, p) & (curvature[:, 0] >= -1e-6 * curvature[:, -1].abs().clamp_min(1e-300))
    near = [near, error <= 0.1 * size.clamp_min(0.1)]
    return tuple(
        arrived & close & torch.where(singular, excess <= k, error <= k * promise)
        for k, close in zip((_LOOSE, _SHARP), near, strict=True)
    )  # type: ignore[return-value]


def audit(claim: Claim, solver: str, dtype: torch.dtype, factors: tuple[float, ...] = FACTORS) -> list[Verdict]:
    """One solve, its starts the samples of a batch."""
    rows = [FACTORS.index(factor) for factor in factors]
    z0 = claim.starts(dtype)[rows]
    eps = torch.finfo(dtype).eps
    tolerance = eps ** (2 / 3)
    s = ik.solve(claim.problem(), z0, batch_dims=1, solver=solver, on_failure="ignore", max_steps=300)
    z = s.value.double()
    residual = torch.func.vmap(claim.residual)
    start, norm = (torch.linalg.vector_norm(residual(y), dim=1) for y in (z0.double(), z))
    scale = torch.linalg.vector_norm(z, dim=1) if claim.kind == "fixed_point" else start
    small = norm <= tolerance * (1 + torch.nan_to_num(scale, posinf=0.0))
    good, sharp = right(claim, z, tolerance, tolerance, eps)
    return [
        Verdict(claim.name, solver, dtype, factor, int(s.status[i]), bool(good[i]), bool(sharp[i]), bool(small[i]),
                f"{claim.name}, {solver}, {dtype}, start x {factor:g}: {ik.Status(int(s.status[i])).name} at "
                f"{[float(f'{v:.6g}') for v in z[i][:4].tolist()]}, |F| = {norm[i]:.3g}, |F(z0)| = {start[i]:.3g}")
        for i, factor in enumerate(factors)
    ]  # fmt: skip


def wrong_and_refused(verdicts: list[Verdict]) -> tuple[list[str], list[str]]:
    """Claims that are wrong; right points that were refused although their residual has fallen as far as was asked."""
    converged = int(ik.Status.CONVERGED)
    wrong = [v.text for v in verdicts if v.status == converged and not v.right]
    refused = [v.text for v in verdicts if v.status != converged and v.sharp and v.small]
    return wrong, refused


#: Claims that are wrong, and right points that are refused, by (system, dtype), and why.
_PERIODS = "at |z| = 1e3 and beyond the tolerance, rtol |J z|, is no small part of a period"
_LINES = "lines of singular solutions far out cannot be told from the way to infinity"
_ATOL = "|F| is below atol where J is all but singular: the promise is void"
EXCEPTIONS = {
    ("trigonometric10", torch.float32): _PERIODS,
    ("power_flow5", torch.float32): _PERIODS,
    ("robertson_closed", F64): _ATOL,
    ("robertson_closed", torch.float32): _ATOL,
    ("sample18", torch.float32): _LINES,
    ("1e-7 (z^3 - 8)", torch.float32): _ATOL,
    ("Box in three", torch.float32): _ATOL,
}
PAIRS = [(claim, solver, dtype) for claim in TABLE.values() for solver in claim.solvers
         for dtype in (torch.float64, torch.float32)]  # fmt: skip


def _check(pairs: list[tuple[Claim, str, torch.dtype]]) -> None:
    verdicts = [v for claim, solver, dtype in pairs for v in audit(claim, solver, dtype)]
    wrong, refused = wrong_and_refused([v for v in verdicts if (v.claim, v.dtype) not in EXCEPTIONS])
    assert not wrong, f"{len(wrong)} of {len(verdicts)} verdicts claim what is no solution:\n" + "\n".join(wrong[:20])
    assert not refused, f"{len(refused)} of {len(verdicts)} verdicts refuse a solution:\n" + "\n".join(refused[:20])


def test_there_are_over_a_hundred_systems() -> None:
    assert len(TABLE) >= 150 and max(FACTORS) / min(FACTORS) >= 1e12


@pytest.mark.parametrize("kind", sorted({claim.kind for claim in TABLE.values()}))
def test_no_claim_is_wrong_and_no_solution_refused(kind: str) -> None:
    """A seeded slice: small systems, each with some solver."""
    slow = ("df_sane", "integrate", "gradient_descent", "gauss_newton")
    pairs = [
        p for p in PAIRS if p[0].kind == kind and p[0].start.numel() <= 3 and "scipy" not in p[1] and p[1] not in slow
    ]
    _check(random.Random(11).sample(pairs, 10 if kind == "root" else 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_no_claim_is_wrong_and_no_solution_refused_anywhere(name: str) -> None:
    _check([p for p in PAIRS if p[0].name == name])


@pytest.mark.parametrize(
    ("name", "solver", "factor"),
    [
        ("economy 5", "newton", 1e2),
        ("tridiagonal50", "scipy.root.hybr", 1e6),
        ("Meyer", "gauss_newton", 1e4),
        ("Meyer", "levenberg_marquardt", 1.0),
        ("Rosenbrock fit", "levenberg_marquardt", 1e2),
        ("sine at a maximum", "newton", 1e6),
        ("homogeneous of degree zero", "newton", 1e4),
        ("Box in three", "newton", 1e4),
    ],
)
def test_far_out_in_low_precision(name: str, solver: str, factor: float) -> None:
    """Points that were claimed, and solutions that a test against that refused at first."""
    wrong, refused = wrong_and_refused(audit(TABLE[name], solver, torch.float32, (factor,)))
    assert not wrong and not refused


# ---------------------------------------------------------------------------------------------------- one by one, by name


def _status(solution: ik.Solution) -> ik.Status:
    return ik.Status(int(solution.status.max()))


@pytest.mark.parametrize(
    "solver",
    [
        "auto",
        "newton",
        "trust_region",
        "broyden",
        "scipy.root.hybr",
        "bisection",
        "chandrupatla",
        "scipy.root_scalar.brentq",
    ],
)
@pytest.mark.parametrize("start", [3.0, 30.0])
def test_the_start_and_the_name_of_the_solver_do_not_matter(solver: str, start: float) -> None:
    """exp(z) = 2, whose residual is 1e13 at the start: z was 5.0 by newton, -18 by brentq, and "converged"."""
    x = torch.tensor([2.0], dtype=F64, requires_grad=True)
    s = ik.root(lambda z, x: torch.exp(z) - x, torch.tensor([start], dtype=F64), (x,), solver=solver)
    assert s.value.item() == pytest.approx(math.log(2), abs=1e-9)
    assert torch.autograd.grad(s.value.sum(), x)[0].item() == pytest.approx(0.5, abs=1e-8)


def test_a_user_solver_is_judged_by_the_same_rule() -> None:
    residual = lambda z, x: torch.exp(z) - x  # noqa: E731

    @ik.implicit(ik.Root(residual), on_failure="raise")
    def lazy(z0: Tensor, x: Tensor) -> Tensor:
        return torch.full_like(z0, 3.69)

    with pytest.raises(ik.ConvergenceError):
        lazy(torch.tensor([20.0], dtype=F64), torch.tensor([2.0], dtype=F64))


@pytest.mark.parametrize("start", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_no_fixed_point_at_infinity(start: float, dtype: torch.dtype) -> None:
    """z + 1 had one at -4.5e15, sqrt(z^2 + 1) at 136,150."""
    for f in (lambda z: z + 1, lambda z: torch.sqrt(z * z + 1)):
        s = ik.fixed_point(f, torch.full((2,), start, dtype=dtype), on_failure="ignore")
        assert not bool(s.converged), s


def test_roots_at_infinity_have_diverged_and_the_message_says_how_far() -> None:
    with pytest.raises(ik.ConvergenceError, match=r"diverged.*\|z\| = .*certify"):
        ik.root(lambda z: torch.exp(-z), torch.ones(1, dtype=F64), solver="newton")


def _economies(batch: int) -> tuple[Tensor, Tensor]:
    """Tastes and endowments of CES exchange economies, five people and four goods."""
    g = torch.Generator().manual_seed(0)
    a = torch.rand(batch, 5, 4, generator=g, dtype=F64) + 0.1
    return a, torch.rand(batch, 5, 4, generator=g, dtype=F64) * 3


def _excess(logp: Tensor, a: Tensor, sigma: Tensor, W: Tensor) -> Tensor:
    """Excess demand for all goods but one, in log prices: it also vanishes as these go to infinity."""
    p = torch.cat([logp.exp(), torch.ones_like(logp[..., :1])], -1)[..., None, :]
    num = a**sigma * p ** (-sigma)
    return (num * (W * p).sum(-1, keepdim=True) / (num * p).sum(-1, keepdim=True) - W).sum(-2)[..., :-1]


@pytest.mark.parametrize("solver", ["trust_region", "scipy.root.hybr", "newton"])
def test_economies_with_prices_at_infinity(solver: str) -> None:
    """34 of 256 economies "converged" with log prices up to 249, and spoilt what all have in common: d/d sigma of the
    sum was nan, or 2.9e6."""
    (a, W), sigma = _economies(64), torch.tensor(0.3, dtype=F64, requires_grad=True)
    z0 = torch.zeros(64, 3, dtype=F64)
    options: dict[str, Any] = {"solver": solver, "batch_dims": 1, "in_dims": (0, None, 0)}
    s = ik.root(_excess, z0, (a, sigma, W), on_failure="ignore", **options)
    far = s.value.abs().amax(1) > 20
    assert bool(far.any()) and not bool((far & s.converged).any())
    assert bool((s.status[far] == int(ik.Status.DIVERGED)).any())
    assert int(s.converged.sum()) >= 48
    # the sum over all of them has the derivative of those that have a solution, alone and to any order
    good = s.converged
    alone = ik.root(_excess, s.value[good].detach(), (a[good], sigma, W[good]), **options)
    for values in (s.value, alone.value):
        (first,) = torch.autograd.grad(values.sum(), sigma, create_graph=True)
        (second,) = torch.autograd.grad(first, sigma)
        found = torch.stack([first.detach(), second])
        if values is s.value:
            mixed = found
    torch.testing.assert_close(mixed, found, rtol=1e-6, atol=0)
    _, tangent = torch.func.jvp(
        lambda t: ik.root(_excess, z0, (a, t, W), on_failure="ignore", **options).value,
        (sigma.detach(),),
        (sigma.new_ones(()),),
    )
    assert float(tangent[~good].abs().max()) == 0
    torch.testing.assert_close(tangent.sum(), found[0], rtol=1e-6, atol=0)


def test_a_failed_sample_keeps_a_derivative_only_if_its_linear_system_is_solved() -> None:
    """Under "ignore" and "warn": stopped short of a solution there still is one; where J is singular there is none."""
    x = torch.tensor([2.0, -2.0], dtype=F64, requires_grad=True)  # z^2 = -2: stalls at z = 0, where J = 0
    shared = torch.tensor(1.0, dtype=F64, requires_grad=True)
    s = ik.root(lambda z, x, t: z**2 - t * x, torch.tensor([1.0, 0.0], dtype=F64), (x, shared), solver="newton",
                batch_dims=1, in_dims=(0, None), on_failure="ignore")  # fmt: skip
    assert s.converged.tolist() == [True, False]
    gx, gt = torch.autograd.grad(s.value.sum(), (x, shared))
    torch.testing.assert_close(gx, torch.tensor([0.125**0.5, 0.0], dtype=F64))
    assert float(gt) == pytest.approx(0.5**0.5)
    y = torch.tensor(2.0, dtype=F64, requires_grad=True)
    short = ik.root(lambda z, y: z**2 - y, y.new_ones(1), (y,), solver="newton", max_steps=1, on_failure="ignore")
    assert not bool(short.converged)
    (gy,) = torch.autograd.grad(short.value.sum(), y)
    assert float(gy) == pytest.approx(1 / (2 * short.value.item()))


def test_every_node_of_a_composition_holds() -> None:
    """By the joint norm the last of 32 nodes was still at its start, and "converged"."""
    g = torch.Generator().manual_seed(0)
    k, x = 32, torch.randn(8, generator=g, dtype=F64)
    node = ik.FixedPoint(lambda z, i: torch.tanh(0.4 * z + 0.3 * i))
    chain = ik.compose({f"n{j}": (node, f"n{j - 1}" if j else "x") for j in range(k)}, output=f"n{k - 1}")
    for solver in ("auto", "picard", "scipy.root.krylov"):
        s = ik.solve(
            chain, {f"n{j}": torch.zeros(8, dtype=F64) for j in range(k)}, (x,), rtol=1e-8, atol=1e-14, solver=solver
        )
        y = x
        for _ in range(k):
            y = ik.solve(node, torch.zeros(8, dtype=F64), (y,), rtol=1e-8).value
        torch.testing.assert_close(s.value[f"n{k - 1}"], y, rtol=1e-3, atol=0)


@pytest.mark.parametrize("solver", ["auto", "lbfgs", "newton", "gradient_descent", "scipy.minimize.BFGS"])
def test_a_maximum_is_left_again(solver: str) -> None:
    """argmin started at a maximum returned it after no step."""
    s = ik.argmin(lambda z: torch.cos(z).sum(), torch.zeros(2, dtype=F64), solver=solver, on_failure="ignore")
    assert torch.cos(s.value).sum().item() == pytest.approx(-2) or _status(s) is ik.Status.SADDLE, s
    if solver != "newton":
        assert bool(s.converged), s


def test_a_saddle_on_an_axis_of_symmetry_is_left() -> None:
    f = lambda z: z[0] ** 4 / 4 - z[0] ** 2 / 2 + z[1] ** 2 / 2  # noqa: E731
    s = ik.argmin(f, torch.tensor([0.0, 1.0], dtype=F64), solver="lbfgs")
    torch.testing.assert_close(s.value.abs(), torch.tensor([1.0, 0.0], dtype=F64), rtol=1e-7, atol=1e-7)


def test_a_user_solver_that_returns_a_maximum_is_told_so() -> None:
    @ik.implicit(ik.Argmin(lambda z: torch.cos(z).sum()), on_failure="raise")
    def lazy(z0: Tensor) -> Tensor:
        return torch.zeros_like(z0)

    with pytest.raises(ik.ConvergenceError, match="saddle"):
        lazy(torch.ones(2, dtype=F64))


@pytest.mark.parametrize("solver", ["auto", "lbfgs", "bfgs", "gradient_descent", "newton_cg", "scipy.minimize.BFGS"])
def test_what_has_no_minimum_is_unbounded(solver: str) -> None:
    with pytest.raises(ik.ConvergenceError, match="unbounded"):
        ik.argmin(lambda z: z.sum(), torch.ones(3, dtype=F64), solver=solver, max_steps=400)


def test_a_kink_is_given_up_early() -> None:
    g = torch.Generator().manual_seed(0)
    A, b = torch.randn(60, 20, generator=g, dtype=F64), torch.randn(60, generator=g, dtype=F64)
    f = lambda z: torch.relu(A @ z - b).sum() + 0.5 * z.square().sum()  # noqa: E731
    s = ik.argmin(f, torch.zeros(20, dtype=F64), solver="lbfgs", on_failure="ignore")
    assert _status(s) is ik.Status.STALLED and int(s.steps) <= 550, s


def test_meyer_is_solved_from_every_start_it_is_claimed_from() -> None:
    """It was claimed at a Newton decrement of 100."""
    claim = TABLE["Meyer"]
    best = 87.9458
    for factor in (1.0, 1e2):
        z0 = factor * claim.start
        s = ik.least_squares(claim.function, z0, solver="levenberg_marquardt", on_failure="ignore")
        if bool(s.converged):
            assert claim.function(s.value).square().sum().item() == pytest.approx(best, rel=1e-4)


# --------------------------------------------------------------------------------------- what must not change the verdict
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e8])
def test_units_of_the_residual(unit: float) -> None:
    """Purely relative tolerances: F in other units gives the same point."""
    f = lambda z, u: u * torch.stack([torch.exp(z[0]) - 2, z[1] ** 3 + z[0] - 5])  # noqa: E731
    z0 = torch.tensor([8.0, 4.0], dtype=F64)
    values = [
        ik.root(f, z0, (torch.tensor(u, dtype=F64),), solver="newton", rtol=1e-9, atol=0.0).value for u in (1.0, unit)
    ]
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=0)


def test_solutions_at_zero_and_rounding_in_big_terms() -> None:
    for f in (
        lambda z: 1e6 * ((z - 1) ** 2 - 1), lambda z: torch.sin(z), lambda z: 1e8 * torch.expm1(z), lambda z: z**3
    ):  # fmt: skip
        for solver in ("newton", "broyden", "trust_region", "scipy.root.hybr"):
            s = ik.root(f, torch.full((1,), 0.3, dtype=F64), solver=solver)
            assert abs(s.value.item()) <= 1e-3, solver


def test_a_start_at_the_solution_needs_no_step() -> None:
    """The test is relative to the scale near z, not to the residual at the start, which here is rounding itself."""
    f = lambda z: 1e8 * (z**2 - 2)  # noqa: E731
    s = ik.root(f, torch.tensor([2.0], dtype=F64).sqrt(), solver="newton", rtol=1e-10, atol=0.0)
    assert bool(s.converged)


def test_samples_are_judged_one_by_one() -> None:
    z0 = torch.tensor([[0.5], [30.0], [300.0]], dtype=F64)
    s = ik.root(lambda z: torch.exp(z) - 2, z0, solver="newton", batch_dims=1, max_steps=400)
    torch.testing.assert_close(s.value, torch.full_like(z0, math.log(2)))


def test_the_claim_costs_nothing_where_the_residual_is_below_atol() -> None:
    calls = []

    def f(z: Tensor) -> Tensor:
        calls.append(z)
        return z**2 - 2

    s = ik.root(f, torch.ones(1, dtype=F64), solver="newton", rtol=0.0, atol=1e-9)
    plain = 2 * int(s.steps) + 1
    assert s.evaluations == plain
