"""Picard, Anderson, Broyden and Aitken on maps with known fixed points, their safeguards, memory and bookkeeping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import trees
from implicitkit.solver.method import Method

F64 = torch.float64
B, N = 6, 8


@dataclass(frozen=True)
class Map:
    """A map ``f(z, *args)`` of ``(batch, n)`` with its fixed point and a start."""

    f: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    z0: Tensor
    solution: Tensor


def _symmetric(eigenvalues: Tensor, batch: int = B, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(batch, len(eigenvalues), len(eigenvalues), generator=g, dtype=F64))[0]
    return Q * eigenvalues @ Q.mT


def _linear(eigenvalues: Tensor, batch: int = B) -> Map:
    """``f(z) = A z + c``, ``z* = (I - A)^{-1} c`` by construction."""
    A = _symmetric(eigenvalues, batch)
    g = torch.Generator().manual_seed(1)
    solution = torch.randn(batch, len(eigenvalues), generator=g, dtype=F64)
    c = solution - (A @ solution.unsqueeze(2)).squeeze(2)
    return Map(lambda z, A, c: (A @ z.unsqueeze(2)).squeeze(2) + c, (A, c), torch.zeros_like(solution), solution)


def _tanh(radius: float) -> Map:
    """``f(z) = tanh(A z + c)`` with the fixed point planted; ``radius`` is the norm of ``A``."""
    A = _symmetric(torch.linspace(-radius, radius, N, dtype=F64))
    g = torch.Generator().manual_seed(2)
    solution = 0.8 * (2 * torch.rand(B, N, generator=g, dtype=F64) - 1)
    c = torch.atanh(solution) - (A @ solution.unsqueeze(2)).squeeze(2)
    return Map(lambda z, A, c: torch.tanh((A @ z.unsqueeze(2)).squeeze(2) + c), (A, c), 0.9 * solution, solution)


def _square_root() -> Map:
    """Heron's ``f(z) = (z + c / z) / 2``, ``z* = sqrt(c)``."""
    c = torch.linspace(0.5, 9.0, B * N, dtype=F64).reshape(B, N)
    return Map(lambda z, c: 0.5 * (z + c / z), (c,), torch.full((B, N), 2.0, dtype=F64), c.sqrt())


def _cosine() -> Map:
    """``cos z = z``, the Dottie number."""
    z0 = torch.linspace(-1, 2, B * N, dtype=F64).reshape(B, N)
    return Map(lambda z: torch.cos(z), (), z0, torch.full((B, N), 0.7390851332151606416553, dtype=F64))


def _stiff() -> Map:
    """A contraction whose factors run from 0 to 0.999."""
    return _linear(1 - torch.logspace(0, -3, N, dtype=F64))


MAPS: dict[str, Callable[[], Map]] = {
    "linear, contractive": lambda: _linear(torch.linspace(-0.7, 0.8, N, dtype=F64)),
    "tanh": lambda: _tanh(0.9),
    "Heron": _square_root,
    "cosine": _cosine,
    "linear, stiff": _stiff,
    "linear, not contractive": lambda: _linear(torch.tensor([-3.0, -1.5, -0.5, 0.1, 0.3, 0.6, 0.8, 1.4], dtype=F64)),
    "tanh, not contractive": lambda: _tanh(2.5),
}
CONTRACTIVE = list(MAPS)[:5]
SOLVERS: dict[str, Any] = {
    "picard": ik.Picard(),
    "picard, damped": ik.Picard(damping=0.7),
    "anderson": ik.Anderson(),
    "anderson, memory 1": ik.Anderson(memory=1),
    "anderson, every step": ik.Anderson(memory=5, period=1),
    "anderson, damped, restarted": ik.Anderson(memory=8, damping=0.6, restart=9),
    "anderson, ridge": ik.Anderson(ridge=1e-8),
    "broyden": ik.Broyden(),
    "broyden, bad": ik.Broyden(update="bad"),
    "broyden, line search": ik.Broyden(line_search=True),
    "broyden, ring": ik.Broyden(memory=4),
    "broyden, restart": ik.Broyden(memory=6, when_full="restart"),
    "broyden, bad, ring": ik.Broyden(update="bad", memory=4),
    "aitken": ik.Aitken(),
}
ROWS = [
    (s, m)
    for s in SOLVERS
    for m in MAPS
    if (m in CONTRACTIVE and (s, m) != ("picard, damped", "linear, stiff"))
    or s in ("anderson", "anderson, damped, restarted", "broyden", "broyden, bad")
]
ACCELERATED = ["anderson", "broyden", "broyden, bad"]


def solve(problem: Map, solver: Any, **options: Any) -> ik.Solution:
    defaults: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-10, "atol": 1e-12, "max_steps": 20_000}
    return ik.fixed_point(problem.f, problem.z0, problem.args, solver=solver, **(defaults | options))


# ----------------------------------------------------------------------------------------------------------- solutions
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("solver", "name"), ROWS)
def test_finds_the_fixed_point(solver: str, name: str) -> None:
    problem = MAPS[name]()
    solution = solve(problem, SOLVERS[solver])
    condition = 1e3 if "stiff" in name else 20
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.value, problem.solution, rtol=0, atol=condition * 1e-9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", ACCELERATED)
@pytest.mark.parametrize("name", ["linear, stiff", "tanh", "linear, contractive"])
def test_acceleration_pays(solver: str, name: str) -> None:
    """At most as many evaluations as Picard; on the stiff map a twentieth."""
    problem = MAPS[name]()
    ours, picard = (solve(problem, s).evaluations for s in (SOLVERS[solver], "picard"))
    assert ours <= (0.05 if "stiff" in name else 1.0) * picard, (ours, picard)


@pytest.mark.parametrize("solver", ["broyden", "broyden, bad"])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["+F", "-F"])
def test_broyden_serves_equations_of_either_sign(solver: str, sign: float) -> None:
    c = torch.linspace(1.0, 5.0, 4, dtype=F64).reshape(4, 1) * torch.ones(1, 3, dtype=F64)
    solution = ik.root(
        lambda z, c: sign * (z**3 + z - c), torch.ones_like(c), (c,), solver=SOLVERS[solver], batch_dims=1, rtol=1e-11
    )
    z = solution.value
    torch.testing.assert_close(z**3 + z, c, rtol=0, atol=1e-9)


@pytest.mark.parametrize("damping", [0.25, 0.5, 1.0, 1.5])
def test_broyden_takes_a_part_of_its_step(damping: float) -> None:
    """z <- z - damping B F(z), B the dense inverse of the first method, updated by Sherman and Morrison's formula."""
    torch.manual_seed(2)
    W, b = 0.8 * torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q, torch.randn(6, dtype=torch.float64)
    F = lambda z: torch.tanh(W @ z + b) - z  # noqa: E731
    seen: list[torch.Tensor] = []
    solver = ik.Broyden(damping=damping, safeguard=math.inf, patience=1000)
    found = ik.fixed_point(
        lambda z: torch.tanh(W @ z + b),
        torch.zeros(6, dtype=torch.float64),
        solver=solver,
        rtol=1e-10,
        callback=lambda step, z, norm: seen.append(z.clone()),
    )
    assert bool(found.converged)
    z, B = torch.zeros(6, dtype=torch.float64), -torch.eye(6, dtype=torch.float64)
    for step in range(10):
        s = -damping * B @ F(z)
        y = F(z + s) - F(z)
        B = B + torch.outer(s - B @ y, s @ B) / (s @ B @ y)
        z = z + s
        torch.testing.assert_close(seen[step], z, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="damping"):
        ik.Broyden(damping=2.0)


def test_good_broyden_ends_in_2n_steps_on_linear_systems() -> None:
    """Gay (1979): at most 2 n steps for nonsingular ``A``, whatever the start."""
    problem = _linear(torch.linspace(-1.2, 0.5, 5, dtype=F64))
    solution = solve(problem, ik.Broyden(safeguard=torch.inf), rtol=1e-9)
    assert int(solution.steps.max()) <= 2 * 5


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_anderson_keeps_no_more_differences_than_unknowns_span(n: int) -> None:
    """They say nothing new, and older ones are of a Jacobian farther off: fewer steps with ``n`` than with more, on average,
    of contractions with ``|J|`` of 0.9 or so."""
    steps = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        W = torch.randn(n, n, generator=generator, dtype=torch.float64) / n**0.5
        x = torch.randn(n, generator=generator, dtype=torch.float64)
        z0 = torch.zeros(n, dtype=torch.float64)
        found = ik.fixed_point(lambda z, W, x: torch.cos(0.9 * W @ z + x), z0, (W, x), solver="anderson")
        steps.append(int(found.steps.max()))
    assert sum(steps) / len(steps) < {1: 5.5, 2: 9, 4: 10, 7: 13}[n]


def test_full_memory_anderson_ends_in_n_steps_on_linear_maps() -> None:
    """Equivalent to GMRES (Walker & Ni 2011, theorem 2.2): at most n + 1 steps."""
    problem = _linear(torch.linspace(-1.2, 0.5, 5, dtype=F64))
    assert int(solve(problem, ik.Anderson(memory=5, period=1, safeguard=torch.inf), rtol=1e-9).steps.max()) <= 5 + 1


# ------------------------------------------------------------------------------------------------------ sample by sample
@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("in_dims", [None, 0], ids=["frozen", "dropped"])
def test_batch_equals_loop_and_permutation(solver: str, in_dims: int | None) -> None:
    problem = _tanh(0.9)
    options: dict[str, Any] = {"in_dims": in_dims, "rtol": 1e-8}
    whole = solve(problem, SOLVERS[solver], **options)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = Map(problem.f, tuple(a[order] for a in problem.args), problem.z0[order], problem.solution[order])
    other = solve(permuted, SOLVERS[solver], **options)
    torch.testing.assert_close(other.value, whole.value[order], rtol=0, atol=1e-9)
    assert torch.equal(other.steps, whole.steps[order])
    for i in range(B):
        row = slice(i, i + 1)
        one = Map(problem.f, tuple(a[row] for a in problem.args), problem.z0[row], problem.solution[row])
        alone = solve(one, SOLVERS[solver], rtol=1e-8)
        torch.testing.assert_close(alone.value, whole.value[row], rtol=0, atol=1e-9)
        assert torch.equal(alone.steps, whole.steps[row])


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_stays_in_its_sample(solver: str) -> None:
    problem = _tanh(0.9)
    A, c = problem.args
    c = c.clone()
    c[2, 0] = torch.nan
    broken = Map(problem.f, (A, c), problem.z0, problem.solution)
    solution = solve(broken, SOLVERS[solver], on_failure="ignore")
    others = torch.arange(B) != 2
    assert solution.converged.tolist() == others.tolist()
    torch.testing.assert_close(solution.value[others], problem.solution[others], rtol=0, atol=1e-8)
    assert bool(torch.isfinite(solution.value).all())


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", "aitken"])
def test_dropping_saves_evaluations_of_samples(solver: str) -> None:
    rates = torch.tensor([0.1] * 7 + [0.95], dtype=F64).unsqueeze(1)
    c = torch.ones(8, 3, dtype=F64)
    problem = Map(lambda z, a, c: a * torch.sin(z) + c, (rates, c), torch.zeros(8, 3, dtype=F64), c)
    kept, dropped = (solve(problem, SOLVERS[solver], in_dims=d, rtol=1e-9) for d in (None, 0))
    assert kept.evaluations == dropped.evaluations
    assert kept.sample_evaluations == 8 * kept.evaluations
    assert dropped.sample_evaluations < 0.8 * kept.sample_evaluations
    torch.testing.assert_close(kept.value, dropped.value, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", ["anderson", "broyden", "picard", "newton_krylov"])
def test_dropping_rows_of_several_samples_keeps_them_in_order(solver: str) -> None:
    """Eight rows of three samples, each of another solution, of which three rows are at work for longer."""
    rates = torch.full((8, 1, 1), 0.1, dtype=F64).index_fill(0, torch.tensor([1, 4, 6]), 0.95)
    c = torch.linspace(-1, 2, 8 * 3 * 2, dtype=F64).view(8, 3, 2)
    function, z0 = (lambda z, a, c: a * torch.sin(z) + c), torch.zeros(8, 3, 2, dtype=F64)
    s = ik.fixed_point(function, z0, (rates, c), batch_dims=2, in_dims=0, solver=solver, rtol=1e-9)
    assert s.sample_evaluations < 0.9 * 24 * s.evaluations
    torch.testing.assert_close(function(s.value, rates, c), s.value, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("solver", "each"), [("picard", 1), ("anderson", 1), ("broyden", 1), ("aitken", 1)])
def test_evaluations_are_counted(solver: str, each: int) -> None:
    calls = [0]
    problem = _linear(torch.linspace(-0.7, 0.8, N, dtype=F64), batch=1)

    def counted(z: Tensor, *args: Tensor) -> Tensor:
        calls[0] += 1
        return problem.f(z, *args)

    solution = solve(Map(counted, problem.args, problem.z0, problem.solution), SOLVERS[solver])
    assert solution.evaluations == calls[0] == each * int(solution.steps.max()) + 1


# ------------------------------------------------------------------------------------------------------------ safeguards
def _piecewise(batch: int = 16, n: int = 2) -> Map:
    """A contraction with kinks, on which unguarded acceleration cycles: ``f(z) = A |z - c| + d``."""
    g = torch.Generator().manual_seed(5)
    A = torch.randn(batch, n, n, generator=g, dtype=F64)
    A = 0.95 * A / torch.linalg.matrix_norm(A, 2, dim=(1, 2), keepdim=True)
    c, d = (torch.randn(batch, n, generator=g, dtype=F64) for _ in range(2))
    return Map(lambda z, A, c, d: (A @ (z - c).abs().unsqueeze(2)).squeeze(2) + d, (A, c, d), 3 * d, d)


@pytest.mark.parametrize("solver", [ik.Anderson(patience=10), ik.Broyden(patience=10)], ids=["anderson", "broyden"])
def test_safeguard_never_long_worse_than_picard(solver: Any) -> None:
    """On a contraction the best residual after ``2 (patience + 1) k`` steps is at most Picard's bound after ``k``."""
    problem = _piecewise()
    trace = solve(problem, solver, trace=True, max_steps=400, rtol=1e-9, atol=0.0, on_failure="ignore").trace
    assert trace is not None
    best = torch.cummin(trace, 0).values
    window = 2 * (solver.patience + 1)
    for k in range(0, len(best), window):
        assert bool((best[k] <= trace[0] * 0.95 ** (k // window) * (1 + 1e-9)).all())


def test_safeguard_matters() -> None:
    """Without the safeguard the iteration of some samples runs away or cycles on a contraction; with it none does."""
    problem = _piecewise(batch=512)
    guarded, bare = (
        solve(problem, s, rtol=1e-9, max_steps=2000, on_failure="ignore")
        for s in (ik.Anderson(memory=5, period=1), ik.Anderson(memory=5, period=1, safeguard=torch.inf, patience=10**9))
    )
    assert bool(guarded.converged.all())
    assert not bool(bare.converged.all())


@pytest.mark.parametrize("period", [2, 3, 5])
def test_anderson_between_its_steps_is_picard(period: int) -> None:
    problem = _tanh(0.9)
    seen: list[Tensor] = []
    solve(
        problem,
        ik.Anderson(period=period, safeguard=torch.inf),
        callback=lambda step, z, norm: seen.append(z.clone()),
        max_steps=2 * period + 1,
        on_failure="ignore",
        batch_dims=1,
    )
    # seen[i] holds the point after i + 1 steps; the first mixed step is number period + 1
    plain = [float((seen[i] - problem.f(seen[i - 1], *problem.args)).abs().max()) < 1e-13 for i in range(1, 2 * period)]
    assert plain == [i % period != 0 for i in range(1, 2 * period)]


def test_a_sample_that_does_badly_mixes_in_every_step() -> None:
    """Plain steps multiply its error by up to 6; its neighbours contract, and go their way as if alone."""
    generator = torch.Generator().manual_seed(3)
    Q = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=F64))[0]
    wild, tame = (Q * torch.linspace(-6.0, 0.5, 12, dtype=F64)) @ Q.T, 0.3 * Q
    A, b = torch.stack([wild, tame, tame]), torch.randn(3, 12, generator=generator, dtype=F64)
    f = lambda z, A, b: torch.tanh((A @ z.unsqueeze(-1)).squeeze(-1)) + b  # noqa: E731
    options: dict[str, Any] = {"solver": ik.Anderson(memory=12, period=6), "batch_dims": 1, "rtol": 1e-9}
    together = ik.fixed_point(f, torch.zeros_like(b), (A, b), **options)
    alone = ik.fixed_point(f, torch.zeros_like(b[1:]), (A[1:], b[1:]), **options)
    assert bool(together.converged.all())
    assert together.steps[1:].tolist() == alone.steps.tolist()
    torch.testing.assert_close(together.value[1:], alone.value, rtol=0, atol=1e-12)


def test_restart_forgets() -> None:
    """With ``restart=2`` every other step is the plain one: two points on, Anderson stands where Picard's step leads."""
    problem = _tanh(0.9)
    seen: list[Tensor] = []
    solve(
        problem,
        ik.Anderson(period=1, restart=2, safeguard=torch.inf),
        callback=lambda step, z, norm: seen.append(z.clone()),
        max_steps=5,
        on_failure="ignore",
        batch_dims=1,
    )
    # seen holds the best points; on this contraction every step improves
    torch.testing.assert_close(seen[2], problem.f(seen[1], *problem.args), rtol=0, atol=1e-13)
    assert float((seen[3] - problem.f(seen[2], *problem.args)).abs().max()) > 1e-6


# ---------------------------------------------------------------------------------------------------------------- memory
class _Watched:
    """A method's state after every step: bytes held, and where its large arrays lie."""

    def __init__(self, solver: Method) -> None:
        self.solver, self.bytes, self.places = solver, [], set()  # type: ignore[var-annotated]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cls, original = type(self.solver), type(self.solver).step

        def step(method: Any, f: Any, z: Tensor, state: Any) -> Any:
            z_next, state = original(method, f, z, state)
            tensors = {t.data_ptr(): t for t in trees.tree_flatten(state)[0] if isinstance(t, Tensor)}
            self.bytes.append(sum(t.numel() * t.element_size() for t in tensors.values()))
            large = [t for t in tensors.values() if t.ndim == 3 and t.shape[2] >= z.shape[1]]
            self.places.add(tuple(sorted(t.data_ptr() for t in large)))
            return z_next, state

        monkeypatch.setattr(cls, "step", step)


@pytest.mark.parametrize(
    ("solver", "vectors"),
    [
        (ik.Anderson(memory=4), 2 * 5 + 1),
        (ik.Anderson(memory=12), 2 * 13 + 1),
        (ik.Broyden(memory=4), 2 * 4 + 4),
        (ik.Broyden(memory=12, update="bad"), 2 * 12 + 4),
        (ik.Aitken(), 2),
    ],
)
def test_memory_is_bounded_and_allocated_once(solver: Method, vectors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, batch = 200, 3
    watched = _Watched(solver)
    watched.install(monkeypatch)
    problem = _linear(torch.linspace(-0.9, 0.95, n, dtype=F64), batch=batch)
    solve(problem, solver, rtol=1e-12, max_steps=60, on_failure="ignore")
    assert len(watched.bytes) > 20
    extra = 16 * batch * (getattr(solver, "memory", 1) ** 2 + 16)  # Gram matrices, one number a sample
    assert max(watched.bytes) <= 8 * batch * n * vectors + extra
    assert len(watched.places - {()}) <= 1, "the history moved"


# ------------------------------------------------------------------------------------------------------ inverse estimate
def _dense_broyden(problem: Map, sample: int, steps: int, update: str) -> Tensor:
    """The estimate after ``steps`` full steps from ``B = -I``, by the dense formulas."""
    args = tuple(a[sample : sample + 1] for a in problem.args)

    def F(z: Tensor) -> Tensor:
        return (problem.f(z.unsqueeze(0), *args) - z.unsqueeze(0)).squeeze(0)

    z = problem.z0[sample]
    inverse = -torch.eye(len(z), dtype=F64)
    for _ in range(steps - 1):
        s = -inverse @ F(z)
        y = F(z + s) - F(z)
        v = inverse.T @ s if update == "good" else y
        inverse = inverse + torch.outer(s - inverse @ y, v) / (v @ y)
        z = z + s
    return inverse


@pytest.mark.parametrize("update", ["good", "bad"])
@pytest.mark.parametrize("dropped", [False, True], ids=["frozen", "dropped"])
@pytest.mark.parametrize("name", ["linear, contractive", "tanh"])
def test_inverse_estimate(update: Any, dropped: bool, name: str) -> None:
    """It is what the dense formulas give, sample by sample, and its transpose is its transpose."""
    problem = MAPS[name]()
    solver = ik.Broyden(update=update, keep_inverse=True, safeguard=torch.inf)
    solution = solve(problem, solver, rtol=1e-5, in_dims=0 if dropped else None)
    estimate = solution.inverse_estimate
    assert estimate is not None
    eye = torch.eye(N, dtype=F64)
    found = torch.stack([estimate.mv(e.expand(B, N)) for e in eye], 2)
    transposed = torch.stack([estimate.rmv(e.expand(B, N)) for e in eye], 1)
    torch.testing.assert_close(found, transposed, rtol=0, atol=1e-12)
    for i, steps in enumerate(solution.steps.tolist()):
        # the last step of a sample is taken in only if others went on after it
        errors = [float((found[i] - _dense_broyden(problem, i, k, update)).abs().max()) for k in (steps, steps + 1)]
        assert errors[0] <= 1e-6 if steps == int(solution.steps.max()) else min(errors) <= 1e-6, f"sample {i}: {errors}"


def test_inverse_estimate_is_kept_only_when_asked() -> None:
    problem = _tanh(0.5)
    assert solve(problem, ik.Broyden()).inverse_estimate is None
    assert solve(problem, ik.Anderson()).inverse_estimate is None


# -------------------------------------------------------------------------------------------------------- expanding maps
@pytest.mark.parametrize("in_dims", [None, (0, 0)], ids=["frozen", "dropped"])
@pytest.mark.parametrize("period", [1, 3])
def test_anderson_on_maps_whose_plain_step_overshoots_the_safeguard(period: int, in_dims: Any) -> None:
    """``z = M z + c`` with eigenvalues far beyond the factor at which a sample restarts, among contractions."""
    solver = ik.Anderson(period=period)
    M = torch.tensor([[0.5, -0.5], [5.0, 5.0], [-6.0, -6.0], [100.0, 0.3], [0.9, 0.1], [10.0, -7.0]], dtype=F64)
    c = torch.linspace(-1, 2, M.numel(), dtype=F64).reshape(M.shape)
    options: dict[str, Any] = {"solver": solver, "batch_dims": 1, "max_steps": 100}
    f = lambda z, M, c: M * z + c  # noqa: E731
    solution = ik.fixed_point(f, torch.zeros_like(c), (M, c), in_dims=in_dims, **options)
    torch.testing.assert_close(solution.value, c / (1 - M), rtol=1e-8, atol=1e-8)
    alone = [
        ik.fixed_point(f, torch.zeros(1, 2, dtype=F64), (M[i, None], c[i, None]), **options) for i in range(len(M))
    ]
    assert solution.steps.tolist() == [int(one.steps) for one in alone]


# --------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ik.Picard(damping=2.0), "damping must be in"),
        (lambda: ik.Anderson(memory=0), "memory must be at least 1"),
        (lambda: ik.Anderson(period=0), "period must be at least 1"),
        (lambda: ik.Anderson(damping=0.0), "damping must be in"),
        (lambda: ik.Anderson(ridge=-1.0), "ridge cannot be negative"),
        (lambda: ik.Anderson(ridge=float("nan")), "ridge cannot be negative"),
        (lambda: ik.Anderson(restart=1), "restart must be at least 2"),
        (lambda: ik.Anderson(safeguard=1.0), "safeguard must be larger than 1"),
        (lambda: ik.Anderson(patience=1), "patience must be at least 2"),
        (lambda: ik.Broyden(update="ugly"), "update must be 'good' or 'bad'"),  # type: ignore[arg-type]
        (lambda: ik.Broyden(memory=0), "memory must be at least 1"),
        (lambda: ik.Broyden(when_full="stop"), "when_full must be"),  # type: ignore[arg-type]
        (lambda: ik.Broyden(scale=0.0), "scale must be a finite number other than zero"),
        (lambda: ik.Broyden(halvings=-1), "halvings cannot be negative"),
        (lambda: ik.Aitken(bound=0.0), "bound must be positive"),
        (lambda: ik.Aitken(damping=3.0), "damping must be in"),
    ],
)
def test_bad_options(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", "aitken"])
def test_low_precision(solver: str, dtype: torch.dtype) -> None:
    c = torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    solution = ik.fixed_point(
        lambda z, c: 0.5 * torch.tanh(z) + c,
        torch.zeros_like(c),
        (c,),
        solver=solver,
        batch_dims=1,
        rtol=rtol,
        atol=rtol,
    )
    assert solution.value.dtype == dtype and bool(solution.converged.all())


def _disk(radius: float, n: int = 80) -> Tensor:
    """A matrix whose eigenvalues fill a disk."""
    core = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=F64)
    return core * (radius / torch.linalg.eigvals(core).abs().max())


@pytest.mark.parametrize("fast", [True, False])
def test_anderson_mixes_nothing_while_plain_steps_are_fast(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spectrum within a fifth of the unit disk: the points of Picard, and no least squares.  Beside a sample whose plain
    steps are slow, all mix from the first difference on, as with ``period=3``."""
    mixed: list[int] = []
    plain = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a: (mixed.append(0), plain(*a))[1])
    A = torch.stack([_disk(0.2)] * 3 + [_disk(0.2 if fast else 0.9)])
    c = torch.ones(4, 80, dtype=F64)

    def points(solver: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        step = lambda z: (A @ z.unsqueeze(2)).squeeze(2) + c  # noqa: E731
        watch = lambda k, z, norm: seen.append(z.clone())  # noqa: E731
        found = ik.fixed_point(step, 0 * c, batch_dims=1, solver=solver, callback=watch)
        assert bool(found.converged.all())
        return seen

    found = points("anderson")
    assert bool(mixed) != fast
    other = points("picard") if fast else points(ik.Anderson(period=3))
    for at, there in zip(found[: len(found) if fast else 3], other, strict=False):
        torch.testing.assert_close(at, there, rtol=1e-13, atol=1e-13)


def _dear(out: Tensor) -> Tensor:
    """The same after so many operations that a few evaluations less are worth much."""
    for _ in range(50):
        out = out.view_as(out)
    return out


@pytest.mark.parametrize("spectrum", ["real", "one slow"])
def test_anderson_loses_nothing_where_plain_steps_are_fast_at_first(spectrum: str) -> None:
    """Real eigenvalues up to 0.3 (the second step leaves more than the first), or one at 0.95 that little of the start lies
    along: as few evaluations, where these are dear, as with ``period=3``."""
    A = _symmetric(torch.linspace(-0.3, 0.3, 80, dtype=F64), 4)
    c = torch.ones(4, 80, dtype=F64)
    if spectrum == "one slow":
        A = torch.stack([_disk(0.15)] * 4)
        A[:, :, 0] = 0
        A[:, 0, 0] = 0.95
        c[:, 0] = 1e-5

    def evaluations(solver: Any) -> int:
        step = lambda z: _dear((A @ z.unsqueeze(2)).squeeze(2) + c)  # noqa: E731
        found = ik.fixed_point(step, 0 * c, batch_dims=1, solver=solver)
        assert bool(found.converged.all())
        return found.evaluations

    assert evaluations("anderson") <= evaluations(ik.Anderson(period=3))


@pytest.mark.parametrize(("outer", "plain"), [([], True), ([0.97, 0.96, 0.95], False)], ids=["disk", "outliers"])
def test_anderson_takes_plain_steps_where_mixing_is_worth_little(
    outer: list[float], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of eigenvalues: a few least squares, and no more evaluations than the plain iteration; where some lie apart,
    and evaluations are dear, one in three steps mixes."""
    g, n = torch.Generator().manual_seed(0), 200
    core = torch.randn(n, n, generator=g, dtype=F64)
    core *= (0.3 if outer else 0.85) / torch.linalg.eigvals(core).abs().max()
    core[: len(outer)], core[:, : len(outer)] = 0, 0
    core[: len(outer), : len(outer)] = torch.diag(torch.tensor(outer, dtype=F64))
    c = torch.randn(4, n, generator=g, dtype=F64)
    mixings, coefficients = [0], ik.Anderson._coefficients

    def counted(*given: Any) -> Any:
        mixings[0] += 1
        return coefficients(*given)

    monkeypatch.setattr(ik.Anderson, "_coefficients", counted)

    def solve(solver: Any) -> Any:
        mixings[0] = 0
        step = lambda z: _dear(z @ core.mT + c)  # noqa: E731
        return ik.fixed_point(step, torch.zeros_like(c), solver=solver, batch_dims=1, rtol=1e-6)

    found = solve("anderson")
    share = mixings[0] / found.evaluations
    assert bool(found.converged.all()) and (share < 0.2 if plain else share > 0.25), share
    assert mixings[0] < solve(ik.Anderson(period=3)).evaluations / 3  # every third
    assert found.evaluations <= solve("picard").evaluations * (1 if plain else 0.3)


@pytest.mark.parametrize("outer", [[], [0.97, 0.96, 0.95]], ids=["disk", "outliers"])
def test_anderson_takes_steps_that_nobody_looks_at_where_nothing_depends_on_them(
    outer: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plain steps after each look while far away: as many steps and evaluations as with a look at each (which a trace
    asks for), the same answer, and no step more than was allowed."""
    n = 80
    A = _disk(0.3 if outer else 0.85, n)
    A[: len(outer)], A[:, : len(outer)] = 0, 0
    A[: len(outer), : len(outer)] = torch.diag(torch.tensor(outer, dtype=F64))
    c = 0.02 * torch.randn(3, n, generator=torch.Generator().manual_seed(1), dtype=F64)
    looks, step = [0], ik.Anderson.step

    def counted(*given: Any) -> Any:
        looks[0] += 1
        return step(*given)

    monkeypatch.setattr(ik.Anderson, "step", counted)

    def solve(**options: Any) -> tuple[Any, int]:
        looks[0] = 0
        found = ik.fixed_point(lambda z: z @ A.mT + c, 0 * c, solver="anderson", batch_dims=1, rtol=1e-7, **options)
        return found, looks[0]

    (found, few), (watched, each) = solve(), solve(trace=True)
    assert each == watched.evaluations - 1 and few < 0.7 * each
    assert abs(found.evaluations - watched.evaluations) <= 2
    assert int(found.steps.max()) == found.evaluations - 1
    exact = torch.linalg.solve(torch.eye(n, dtype=F64) - A, c.mT).mT
    torch.testing.assert_close(found.value, exact, rtol=0.0, atol=1e-5)
    for most in (5, 6, 7):
        short, _ = solve(max_steps=most, on_failure="ignore")
        assert short.evaluations == most + 1 and short.steps.tolist() == [most] * 3


def test_steps_taken_at_once_count_as_so_many() -> None:
    """Patience is measured in steps: three at once, two looks 12 apart."""

    class Leaps(Method):
        solves = "fixed_point"
        name = "leaps"

        def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
            f.taken = min(3, f.ahead)
            return z + 1, state

    solver = ik.extend.Impatient(Leaps(), window=10)
    found = ik.fixed_point(lambda z: z + 1, torch.zeros(1), solver=solver, on_failure="ignore", max_steps=50)
    assert found.status.item() == ik.Status.STALLED and int(found.steps) == 15
    short = ik.fixed_point(lambda z: z + 1, torch.zeros(1), solver=Leaps(), on_failure="ignore", max_steps=7)
    assert int(short.steps) == 7


def test_a_slow_contraction_in_float32_is_said_to_be_one() -> None:
    """Bellman's equation at a discount of 0.9999: in float64 it is solved."""
    g = torch.Generator().manual_seed(1)
    P = torch.softmax(3 * torch.randn(3, 20, 20, generator=g, dtype=torch.float64), -1)
    r = torch.rand(3, 20, generator=g, dtype=torch.float64)
    bellman = lambda v, P, r: (r + 0.9999 * (P @ v)).max(0).values  # noqa: E731
    assert bool(ik.fixed_point(bellman, torch.zeros(20, dtype=torch.float64), (P, r)).converged)
    with pytest.raises(ik.ConvergenceError, match=r"contracts slowly.*solve in torch\.float64"):
        ik.fixed_point(bellman, torch.zeros(20), (P.float(), r.float()))
