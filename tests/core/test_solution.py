"""What a solve returns: figures of every shape, what it cost, what it keeps, and what it says when it fails."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.optimize
import torch
from matrices import randn
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def half(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * z + x


# -------------------------------------------------------------------------------------------------------------- figures
@pytest.mark.parametrize("solver", ["picard", "anderson", "newton", "newton_krylov", "scipy.newton_krylov"])
@pytest.mark.parametrize(
    ("shape", "batch_dims"),
    [((4,), 0), ((), 0), ((2, 3), 0), ((5, 4), 1), ((5,), 1), ((2, 3, 4), 2), ((2, 3), 2), ((2, 3, 4, 1), 1)],
    ids=str,
)
def test_figures_have_the_shape_of_the_batch(shape: tuple[int, ...], batch_dims: int, solver: str) -> None:
    x = randn(*shape, seed=1)
    solution = ik.fixed_point(half, torch.zeros_like(x), (x,), solver=solver, batch_dims=batch_dims, trace=True)
    batch = shape[:batch_dims]
    assert solution.value.shape == shape
    for name, dtype in (
        ("converged", torch.bool),
        ("residual_norm", D),
        ("steps", torch.int64),
        ("status", torch.int64),
    ):
        figure = getattr(solution, name)
        assert figure.shape == batch, name
        assert figure.dtype == dtype, name
    assert isinstance(solution.evaluations, int)
    assert solution.evaluations >= 2
    samples = math.prod(batch)
    assert solution.evaluations <= solution.sample_evaluations <= samples * solution.evaluations
    assert solution.trace is not None
    assert solution.trace.shape[1:] == batch
    torch.testing.assert_close(solution.value, 2 * x, rtol=1e-8, atol=1e-8)
    residual = (half(solution.value, x) - solution.value).reshape(*batch, -1)
    torch.testing.assert_close(
        solution.residual_norm, torch.linalg.vector_norm(residual, dim=-1), rtol=1e-6, atol=1e-14
    )
    assert solution.raise_for_status() is solution


@pytest.mark.parametrize("in_dims", [None, (0,)], ids=["frozen", "dropped"])
@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_trace_is_the_residual_of_every_step(solver: str, in_dims: Any) -> None:
    x = randn(4, 3, seed=2) * torch.tensor([[1.0], [1e-3], [1e-6], [1.0]], dtype=D)
    f = lambda z, x: torch.tanh(0.5 * z.flip(1)) + x  # noqa: E731
    solution = ik.fixed_point(
        f, torch.zeros_like(x), (x,), solver=solver, batch_dims=1, trace=True, in_dims=in_dims, atol=1e-8
    )
    trace = solution.trace
    assert trace is not None
    assert len(trace) == int(solution.steps.max()) + 1
    start = torch.linalg.vector_norm(f(torch.zeros_like(x), x), dim=1)
    torch.testing.assert_close(trace[0], start)
    for i, steps in enumerate(solution.steps.tolist()):
        # a sample's own figure at its last step, and unchanged once it is frozen
        assert trace[steps, i] == pytest.approx(float(solution.residual_norm[i]))
        assert bool((trace[steps:, i] == trace[steps, i]).all())
    if solver == "picard":
        z = f(torch.zeros_like(x), x)
        torch.testing.assert_close(trace[1], torch.linalg.vector_norm(f(z, x) - z, dim=1))
    plain = ik.fixed_point(f, torch.zeros_like(x), (x,), solver=solver, batch_dims=1, atol=1e-8)
    assert plain.trace is None


def test_evaluations_are_counted() -> None:
    calls = 0

    def counted(z: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return half(z, x)

    for solver in ("picard", "anderson", "scipy.newton_krylov"):
        calls = 0
        solution = ik.fixed_point(counted, torch.zeros(3, dtype=D), (torch.ones(3, dtype=D),), solver=solver)
        assert solution.evaluations == calls, solver
    solution = ik.fixed_point(counted, torch.zeros(3, dtype=D), (torch.ones(3, dtype=D),), solver="picard")
    assert solution.evaluations == int(solution.steps) + 1


# the last: calls before a solver begins
LOOKED_AT: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "equations": (ik.root, lambda z: z.square() + 1, {}, 0),
    "no minimum beside a term": (ik.argmin, lambda z: -2 * z.sum(), {"prox": ik.prox.l1(1.0)}, 1),
    "no minimum within a set": (ik.argmin, lambda z: -z.sum(), {"project": ik.project.nonnegative()}, 1),
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_looks_between_the_methods_of_auto_are_counted(name: str) -> None:
    verb, function, options, before = LOOKED_AT[name]
    calls = 0

    def counted(z: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return function(z)

    found = verb(counted, torch.ones(4, dtype=D), on_failure="ignore", **options)
    assert not found.converged and found.evaluations == calls - before


def test_print() -> None:
    x = randn(5, 3, seed=3).requires_grad_()
    solution = ik.fixed_point(half, torch.zeros(5, 3, dtype=D), (x,), solver="anderson", batch_dims=1)
    text = str(solution)
    for part in (
        "5/5 converged",
        "solver=anderson",
        "rule=implicit",
        f"evaluations={solution.evaluations}",
        "residual=",
    ):
        assert part in text
    assert "backward" not in text
    solution.value.sum().backward()
    assert "backward: converged" in str(solution)
    assert str(solution.backward).startswith("LinearReport(converged, steps=1, residual=")
    failed = ik.fixed_point(half, torch.zeros(3, dtype=D), (x[0],), solver="picard", max_steps=2, on_failure="ignore")
    assert "max_steps" in str(failed)
    assert "steps=2" in str(failed)
    inside: list[str] = []

    def run(x: Tensor) -> Tensor:
        found = ik.fixed_point(half, torch.zeros(3, dtype=D), (x,), solver="anderson")
        inside.append(str(found))
        return found.value.sum()

    vmap(grad(run))(x.detach())
    assert "5/5 converged" in inside[0]


def test_backward_report() -> None:
    x = randn(4, 3, seed=4).requires_grad_()
    rule = ik.Implicit(linear_solver="gmres", rtol=1e-9)
    f = lambda z, x: 0.5 * torch.tanh(z.flip(1)) + x  # noqa: E731
    solution = ik.fixed_point(f, torch.zeros(4, 3, dtype=D), (x,), batch_dims=1, rule=rule)
    assert solution.backward is None
    g = randn(4, 3, seed=5)
    solution.value.backward(g)
    report = solution.backward
    assert report is not None
    assert report.transposed
    assert report.converged.shape == report.residual_norm.shape == report.steps.shape == (4,)
    assert bool(report.converged.all())
    assert bool((report.residual_norm <= 1e-9 * torch.linalg.vector_norm(g, dim=1)).all())
    assert 1 <= int(report.steps.min()) <= int(report.steps.max()) <= 3
    found: list[ik.Solution] = []

    def run(x: Tensor) -> Tensor:
        found.append(ik.fixed_point(f, torch.zeros(4, 3, dtype=D), (x,), batch_dims=1, rule=rule))
        return found[-1].value

    torch.func.jvp(run, (x.detach(),), (g,))
    assert found[0].backward
    assert not found[0].backward.transposed


def test_backward_is_no_method() -> None:
    x = randn(3, seed=1).requires_grad_()
    solution = ik.fixed_point(lambda z, x: 0.5 * torch.cos(z) + x, torch.zeros(3, dtype=D), (x,))
    solution.value.sum().backward()
    with pytest.raises(TypeError, match=r"is no method: .*solution\.value\.sum\(\)\.backward\(\)"):
        solution.backward()  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- trees and complex
def _tree_map(z: dict[str, Any], x: list[Tensor], k: dict[str, Any]) -> dict[str, Any]:
    a, (b, c) = z["a"], z["pair"]
    return {
        "a": 0.3 * torch.tanh(a) + 0.1 * b.sum(-1, keepdim=True) + x[0],
        "pair": (0.2 * b + 0.1 * a[..., :1] + k["shift"], 0.3j * c.conj() + k["scale"] * a[..., 0] + x[1]),
    }


@pytest.mark.parametrize("solver", ["picard", "anderson", "newton", "newton_krylov"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_trees_with_complex_leaves(batch: tuple[int, ...], solver: str) -> None:
    z0 = {
        "a": torch.zeros(*batch, 2, dtype=D),
        "pair": (torch.zeros(*batch, 2, dtype=D), torch.zeros(batch, dtype=torch.complex128)),
    }
    x = [randn(*batch, 2, seed=6).requires_grad_(), torch.ones(batch, dtype=D)]
    k = {"shift": torch.tensor(0.7, dtype=D, requires_grad=True), "scale": 0.5, "name": "kept"}
    solution = ik.fixed_point(_tree_map, z0, (x, k), solver=solver, batch_dims=len(batch), **TIGHT)
    value = solution.value
    assert list(value) == ["a", "pair"]
    assert isinstance(value["pair"], tuple)
    assert value["pair"][1].dtype == torch.complex128
    assert solution.steps.shape == batch
    unrolled: Any = z0
    for _ in range(60):
        unrolled = _tree_map(unrolled, x, k)
    torch.testing.assert_close(value, unrolled, rtol=1e-9, atol=1e-10)
    results = []
    for tree in (value, unrolled):
        loss = tree["a"].pow(2).sum() + tree["pair"][0].sum() + (tree["pair"][1] * (1 - 2j)).real.sum()
        results.append(torch.autograd.grad(loss, (x[0], k["shift"])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_best_iterate_on_failure(solver: str) -> None:
    """z <- z + 0.3 (z^2 + x) has no fixed point for x > 0: steps pass by the least residual and go on."""
    x = torch.tensor([[0.5, 0.1], [0.2, 0.3]], dtype=D)
    f = lambda z, x: z + 0.3 * (z**2 + x)  # noqa: E731
    z0 = torch.full((2, 2), -0.7, dtype=D)
    solution = ik.fixed_point(
        f, z0, (x,), solver=solver, batch_dims=1, max_steps=25, trace=True, on_failure="ignore", rtol=1e-14
    )
    assert not bool(solution.converged.any())
    assert solution.trace is not None
    norms = torch.where(torch.isfinite(solution.trace), solution.trace, torch.inf)
    torch.testing.assert_close(solution.residual_norm, norms.amin(0))
    assert bool((solution.residual_norm < 0.9 * norms[-1]).any()), "the last iterate was the best: nothing is tested"
    residual = torch.linalg.vector_norm(f(solution.value, x) - solution.value, dim=1)
    torch.testing.assert_close(residual, solution.residual_norm)


def test_a_callback_stops_and_says_so() -> None:
    seen: list[int] = []

    def callback(step: int, z: Tensor, norm: Tensor) -> bool:
        assert z.shape == (2, 3)
        assert norm.shape == (2,)
        seen.append(step)
        return step == 4

    x = randn(2, 3, seed=7)
    options: dict[str, Any] = {"solver": "picard", "batch_dims": 1, "callback": callback}
    solution = ik.fixed_point(half, torch.zeros_like(x), (x,), on_failure="ignore", **options)
    assert seen == [1, 2, 3, 4]
    assert [ik.Status(s).name for s in solution.status.tolist()] == ["STOPPED", "STOPPED"]
    with pytest.raises(ik.ConvergenceError, match="a callback asked to stop"):
        ik.fixed_point(half, torch.zeros_like(x), (x,), **options)


def test_copies() -> None:
    x = randn(3, seed=8).requires_grad_()
    solution = ik.fixed_point(half, torch.zeros(3, dtype=D), (x,))
    plain = solution.detach()
    assert not plain.value.requires_grad
    assert solution.value.requires_grad
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        torch.testing.assert_close(other.value, plain.value)
        assert other.evaluations == solution.evaluations
        assert str(other) == str(plain)


# ------------------------------------------------------------------------------------------- cost: one sample, its own
SAMPLES = 4096


def _rates() -> tuple[Tensor, Tensor]:
    """Rates of z <- a z + (1 - a) c for which Picard from 0 takes from under 10 to over 500 steps, in random order."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(9))
    steps = torch.logspace(math.log10(4), math.log10(600), SAMPLES, dtype=D)[order]
    return torch.exp(math.log(1e-6) / steps), 1 + torch.rand(
        SAMPLES, generator=torch.Generator().manual_seed(10), dtype=D
    )


def _relax(z: Tensor, a: Tensor, c: Tensor) -> Tensor:
    return a * z + (1 - a) * c


OWN: dict[str, Any] = {"solver": "picard", "rtol": 1e-9, "atol": 1e-9}


def _own_counts(a: Tensor, c: Tensor) -> Tensor:
    """Evaluations that each sample needs alone, from the recurrence written out."""
    z, counts = torch.zeros_like(a), torch.zeros(len(a), dtype=torch.int64)
    going = torch.ones_like(a, dtype=torch.bool)
    while bool(going.any()):
        counts += going
        out = _relax(z, a, c)
        going = going & ((out - z).abs() > 1e-9 + 1e-9 * z.abs())
        z = torch.where(going, out, z)
    return counts


@pytest.mark.parametrize("how", ["in_dims", "vmap", "nested vmap"])
def test_samples_cost_their_own_evaluations(how: str) -> None:
    a, c = _rates()
    own = _own_counts(a, c)
    assert int(own.max()) >= 50 * int(own.min())
    found: list[ik.Solution] = []

    def one(a: Tensor, c: Tensor) -> Tensor:
        found.append(ik.fixed_point(_relax, torch.zeros_like(a), (a, c), **OWN))
        return found[-1].value

    if how == "in_dims":
        found.append(ik.fixed_point(_relax, torch.zeros_like(a), (a, c), batch_dims=1, in_dims=(0, 0), **OWN))
        value = found[0].value
    elif how == "vmap":
        value = vmap(one)(a, c)
    else:
        value = vmap(vmap(one))(a.view(64, 64), c.view(64, 64)).flatten()
    torch.testing.assert_close(value, c, rtol=1e-6, atol=1e-6)
    spent = found[0].sample_evaluations
    total = int(own.sum())
    ceiling = 1.3 * total if how != "nested vmap" else own.max() * SAMPLES
    assert total <= spent <= ceiling, f"{spent} sample-evaluations, {spent / total:.2f} times the samples' own"
    if how == "in_dims":
        assert torch.equal(found[0].steps + 1, own)
        frozen = ik.fixed_point(_relax, torch.zeros_like(a), (a, c), batch_dims=1, **OWN)
        assert frozen.sample_evaluations == SAMPLES * int(own.max())
        torch.testing.assert_close(frozen.value, value, rtol=0, atol=0)


# -------------------------------------------------------------------------------------------- memory: one evaluation
class Cell(nn.Module):
    """z = tanh(W z + U x) with so large a W that no iteration ends, and any number of steps can be had."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(dim, dim), nn.Linear(dim, dim)
        with torch.no_grad():
            self.W.weight.mul_(6 / torch.linalg.matrix_norm(self.W.weight, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


class _Held:
    """What autograd keeps of one tensor, counted while it is kept: distinct storages, once each."""

    storages: ClassVar[Counter[int]] = Counter()
    sizes: ClassVar[dict[int, int]] = {}
    peak = 0

    def __init__(self, t: Tensor) -> None:
        self.tensor, self.key = (
            t.detach(),
            t.untyped_storage().data_ptr(),
        )  # detached: an output would hold its own graph
        self.storages[self.key] += 1
        self.sizes[self.key] = t.untyped_storage().nbytes()
        _Held.peak = max(_Held.peak, self.now())

    @classmethod
    def now(cls) -> int:
        return sum(cls.sizes[key] for key, count in cls.storages.items() if count)

    def __del__(self) -> None:
        self.storages[self.key] -= 1


def _saved_bytes(run: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes of distinct storage that autograd holds for backward: the most while ``run`` computes, and when it has."""
    _Held.storages.clear()
    _Held.peak = 0
    with torch.autograd.graph.saved_tensors_hooks(_Held, lambda held: held.tensor):
        out = run()
    assert out.requires_grad
    return _Held.peak, _Held.now()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["picard", "anderson"])
@pytest.mark.parametrize("rule", ["implicit", "one_step", "phantom"])
def test_memory_is_that_of_one_evaluation(rule: str, solver: str) -> None:
    cell, x = Cell(64), torch.randn(256, 64).requires_grad_()
    z0 = torch.zeros(256, 64)

    def after(steps: int, rule: str = rule, solver: str = solver) -> tuple[int, int]:
        def run() -> Tensor:
            solution = ik.fixed_point(
                cell, z0, (x,), solver=solver, rule=rule, batch_dims=1, max_steps=steps, on_failure="ignore",
            )  # fmt: skip
            assert int(solution.steps.max()) == steps
            return solution.value

        return _saved_bytes(run)

    once, _ = _saved_bytes(lambda: cell(z0.clone().requires_grad_(), x))
    counts = {steps: after(steps) for steps in (5, 50, 500)}
    assert len(set(counts.values())) == 1, counts
    peak, held = counts[5]
    assert held <= peak <= 1.1 * once
    assert held >= 256 * 64 * 4 * 2  # the solution and the input, at the least
    assert after(50, "unroll", "picard")[1] > 20 * held  # what the rule is for; and the count does count


# ------------------------------------------------------------------------------------------- any solver as a layer
def _kepler(E: Tensor, M: Tensor, e: Tensor) -> Tensor:
    """Kepler's equation: E - e sin E = M; dE/dM = 1/(1 - e cos E), dE/de = sin E/(1 - e cos E)."""
    return E - e * torch.sin(E) - M


@ik.implicit(ik.Root(_kepler))
def kepler_scipy(E0: Tensor, M: Tensor, e: Tensor) -> Any:
    assert not M.requires_grad
    m, ecc = M.numpy(), e.numpy()
    return scipy.optimize.fsolve(lambda E: E - ecc * np.sin(E) - m, E0.numpy(), xtol=1e-13)


@ik.implicit(ik.Root(_kepler))
def kepler_numpy(E0: Tensor, M: Tensor, e: Tensor) -> Any:
    E, m, ecc = E0.numpy(), M.numpy(), e.numpy()
    for _ in range(20):
        E -= (E - ecc * np.sin(E) - m) / (1 - ecc * np.cos(E))  # in place: what it is given is its own
    return E


def _kepler_list(E0: Tensor, M: Tensor, e: Tensor) -> Tensor:
    return torch.stack([kepler_one(E0[i], M[i], e) for i in range(len(M))])


@ik.implicit(ik.Root(_kepler))
def kepler_one(E0: Tensor, M: Tensor, e: Tensor) -> float:
    return scipy.optimize.brentq(lambda E: E - float(e) * math.sin(E) - float(M), -10, 10, xtol=1e-14)


KEPLER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scipy": kepler_scipy,
    "numpy": kepler_numpy,
    "one number": _kepler_list,
}


@pytest.mark.parametrize("name", KEPLER)
def test_black_box_layer(name: str) -> None:
    solve = KEPLER[name]
    M, e = torch.tensor([0.3, 1.2, 2.5], dtype=D), torch.tensor(0.4, dtype=D)
    E0 = M.clone()
    E = solve(E0, M, e)
    torch.testing.assert_close(E - e * E.sin(), M, rtol=1e-10, atol=1e-12)
    slope = 1 / (1 - e * E.cos())
    dM, de = torch.diag(slope), E.sin() * slope
    for jacobian in (jacrev, jacfwd):
        got = jacobian(lambda M, e: solve(E0, M, e), (0, 1))(M, e)
        torch.testing.assert_close(got, (dM, de), rtol=1e-9, atol=1e-10)
    leaves = (M.clone().requires_grad_(), e.clone().requires_grad_())
    g = torch.arange(1.0, 4.0, dtype=D)
    got = torch.autograd.grad(solve(E0, *leaves), leaves, g)
    torch.testing.assert_close(got, (g @ dM, g @ de), rtol=1e-9, atol=1e-10)
    # second order: d2E/dM2 = -e sin E slope^3
    second = hessian(lambda M: solve(E0, M, e).sum())(M)
    torch.testing.assert_close(second, torch.diag(-e * E.sin() * slope**3), rtol=1e-8, atol=1e-9)
    # vmap: one call of the black box a sample
    es = torch.tensor([0.1, 0.4, 0.7], dtype=D)
    batched = vmap(lambda e: solve(E0, M, e))(es)
    torch.testing.assert_close(batched, torch.stack([solve(E0, M, e) for e in es]), rtol=1e-9, atol=1e-10)
    slopes = vmap(grad(lambda e: solve(E0, M, e).sum()))(es)
    want = torch.stack([(E.sin() / (1 - e * E.cos())).sum() for E, e in zip(batched, es, strict=True)])
    torch.testing.assert_close(slopes, want, rtol=1e-8, atol=1e-9)
    assert torch.equal(E0, M)  # the solver's writing in place stays its own affair


def test_black_box_layer_gradcheck() -> None:
    M, e = torch.tensor([0.3, 1.2], dtype=D, requires_grad=True), torch.tensor(0.4, dtype=D, requires_grad=True)
    f = lambda M, e: kepler_scipy(torch.ones(2, dtype=D), M, e)  # noqa: E731
    assert torch.autograd.gradcheck(f, (M, e), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (M, e))


@pytest.mark.parametrize("kind", ["argmin", "fixed_point", "least_squares"])
def test_black_box_layer_of_every_kind(kind: str) -> None:
    """min (z - t)^2/2 + z^4/4, that is z + z^3 = t: dz/dt = 1/(1 + 3 z^2)."""
    problems: dict[str, ik.Problem] = {
        "argmin": ik.Argmin(lambda z, t: 0.5 * (z - t) ** 2 + z**4 / 4),
        "fixed_point": ik.FixedPoint(lambda z, t: z - 0.2 * (z + z**3 - t)),
        "least_squares": ik.LeastSquares(lambda z, t: torch.stack([z - t, z**2 / 2**0.5])),
    }

    @ik.implicit(problems[kind])
    def solve(z0: Tensor, t: Tensor) -> Any:
        return np.asarray(scipy.optimize.brentq(lambda z: z + z**3 - float(t), -10, 10, xtol=1e-14))

    t, z0 = torch.tensor(2.0, dtype=D), torch.zeros((), dtype=D)
    assert float(solve(z0, t)) == pytest.approx(1.0)
    assert float(grad(lambda t: solve(z0, t))(t)) == pytest.approx(0.25)
    assert float(grad(grad(lambda t: solve(z0, t)))(t)) == pytest.approx(-6 / 64)
    assert solve.solve(z0, t).solver == "solve"
    assert solve.__name__ == "solve"


def test_black_box_layer_with_trees() -> None:
    """u + v = s, u - v = d: linear, from the normal equations by NumPy."""

    @ik.implicit(ik.Root(lambda z, p: {"u": z["u"] + z["v"] - p["s"], "v": z["u"] - z["v"] - p["d"]}), batch_dims=1)
    def solve(z0: dict[str, Tensor], p: dict[str, Tensor]) -> dict[str, np.ndarray]:
        s, d = p["s"].numpy(), p["d"].numpy()
        assert s.shape == (4, 2)  # batch_dims is the function's own affair: it is given the whole batch
        return {"u": (s + d) / 2, "v": (s - d) / 2}

    p = {"s": randn(4, 2, seed=11).requires_grad_(), "d": randn(4, 2, seed=12).requires_grad_()}
    z0 = {"u": torch.zeros(4, 2, dtype=D), "v": torch.zeros(4, 2, dtype=D)}
    z = solve(z0, p)
    torch.testing.assert_close(z["v"], (p["s"] - p["d"]) / 2)
    gs, gd = torch.autograd.grad(z["u"].sum() + 3 * z["v"].sum(), (p["s"], p["d"]))
    torch.testing.assert_close((gs, gd), (torch.full_like(gs, 2.0), torch.full_like(gd, -1.0)))


def _liar(z0: Tensor, t: Tensor) -> Tensor:
    return z0 + 1.0


def _thrower(z0: Tensor, t: Tensor) -> Tensor:
    raise ArithmeticError("no such luck")


def _wrong_shape(z0: Tensor, t: Tensor) -> Tensor:
    return torch.zeros(5)


def _two_for_one(z0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return z0, z0


def _not_a_number(z0: Tensor, t: Tensor) -> Tensor:
    return z0 / 0


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_liar, ik.ConvergenceError, r"_liar: (the solve|2 of 2 samples) did not converge: [12] x stalled.*\|F\| = "),
        (_thrower, ik.ConvergenceError, r"_thrower raised ArithmeticError: no such luck"),
        (_wrong_shape, ValueError, r"_wrong_shape returned shape \(5,\) where z0 has \(2,\)"),
        (_two_for_one, ValueError, r"_two_for_one returned 2 tensor\(s\), but z0 has 1"),
        (_not_a_number, ik.ConvergenceError, r"_not_a_number: (the solve|2 of 2 samples) did not converge"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("transform", ["plain", "grad", "vmap"])
def test_black_box_that_fails(
    transform: str, function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    layer = ik.implicit(ik.Root(lambda z, t: z - t))(function)
    t, z0 = torch.tensor([5.0, 7.0], dtype=D), torch.zeros(2, dtype=D)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: layer(z0, t),
        "grad": lambda: grad(lambda t: layer(z0, t).sum())(t),
        "vmap": lambda: vmap(lambda t: layer(z0, t))(torch.stack([t, t])),
    }
    with pytest.raises(error, match=f"(?s){message}"):
        calls[transform]()


def test_black_box_that_fails_for_one_sample_under_vmap() -> None:
    @ik.implicit(ik.Root(lambda z, t: z**2 - t), on_failure="ignore")
    def root(z0: Tensor, t: Tensor) -> float:
        return math.sqrt(float(t))  # raises for negative t

    t = torch.tensor([4.0, -1.0, 9.0], dtype=D)
    z0 = torch.tensor(0.5, dtype=D)
    values = vmap(lambda t: root(z0, t))(t)
    torch.testing.assert_close(values, torch.tensor([2.0, 0.5, 3.0], dtype=D))
    slopes = vmap(grad(lambda t: root(z0, t)))(t)
    torch.testing.assert_close(slopes[[0, 2]], torch.tensor([1 / 4, 1 / 6], dtype=D))


def test_implicit_needs_a_problem() -> None:
    with pytest.raises(TypeError, match=r"ik\.implicit needs a problem, as in @ik\.implicit\(ik\.Root\(residual\)\)"):
        ik.implicit(_kepler)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- warnings at the user's line
def _here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def _two(z: Tensor) -> Tensor:
    return z**2 + 1


WEAK: dict[str, Any] = {"solver": "newton", "on_failure": "warn", "max_steps": 3}
SPOILT = ik.Implicit(linear_solver=ik.linear.GMRES(), max_steps=1, rtol=1e-14)


def _warn_solve() -> tuple[Any, int]:
    return ik.solve(ik.Root(_two), torch.ones(2, dtype=D), **WEAK), _here()


def _warn_sugar() -> tuple[Any, int]:
    return ik.root(_two, torch.ones(2, dtype=D), **WEAK), _here()


def _warn_vmap() -> tuple[Any, int]:
    lines: list[int] = []

    def run(z: Tensor) -> Tensor:
        lines.append(_here() + 1)
        return ik.root(_two, z, **WEAK).value

    return vmap(grad(lambda z: run(z).sum()))(torch.ones(3, 2, dtype=D)), lines[0]


def _warn_random() -> tuple[Any, int]:
    noisy = lambda z: 1e-30 * torch.rand_like(z)  # noqa: E731
    return ik.fixed_point(noisy, torch.ones(2, dtype=D), solver="picard"), _here()


def _warn_statistics() -> tuple[Any, int]:
    norm = nn.BatchNorm1d(2).double()
    f = lambda z: 0.1 * norm(z + torch.eye(2, dtype=D))  # noqa: E731
    return ik.fixed_point(f, torch.ones(2, 2, dtype=D), batch_dims=0, on_failure="ignore"), _here()


def _stiff(x: Tensor) -> Tensor:
    A = torch.diag(torch.linspace(0.1, 0.9, 6, dtype=D))
    return ik.fixed_point(lambda z, x: A @ z + x, torch.zeros(6, dtype=D), (x,), rule=SPOILT, on_failure="warn").value


def _warn_backward() -> tuple[Any, int]:
    z = _stiff(torch.ones(6, dtype=D, requires_grad=True))
    return z.sum().backward(), _here()


def _warn_autograd_grad() -> tuple[Any, int]:
    x = torch.ones(6, dtype=D, requires_grad=True)
    z = _stiff(x)
    return torch.autograd.grad(z.sum(), x, create_graph=True), _here()


def _warn_func_grad() -> tuple[Any, int]:
    return grad(lambda x: _stiff(x).sum())(torch.ones(6, dtype=D)), _here()


WARNERS = [
    _warn_solve, _warn_sugar, _warn_vmap, _warn_random, _warn_statistics, _warn_backward, _warn_autograd_grad,
    _warn_func_grad,
]  # fmt: skip


@pytest.mark.parametrize("warner", WARNERS, ids=lambda w: w.__name__[6:])
def test_warnings_point_at_the_users_line(warner: Callable[[], tuple[Any, int]]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, line = warner()
    ours = [w for w in caught if issubclass(w.category, (ik.ConvergenceWarning, ik.ImpureFunctionWarning))]
    assert ours
    for w in ours:
        assert (w.filename, w.lineno) == (__file__, line), str(w.message)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_warnings_point_at_the_users_line_beside_the_compiler() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # the compiler is loaded: other frames lie between
    test_warnings_point_at_the_users_line(_warn_sugar)
    test_warnings_point_at_the_users_line(_warn_backward)
    torch.compiler.reset()


def test_a_solution_says_that_it_is_no_tensor() -> None:
    solution = ik.fixed_point(half, torch.zeros(2), (torch.ones(2),))
    with pytest.raises(AttributeError, match=r"solution\.value\.sum"):
        solution.sum()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'answer'"):
        solution.answer  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(solution).value.equal(solution.value) and not hasattr(solution, "__torch_function__")
