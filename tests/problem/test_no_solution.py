"""Quadratic programs without a solution, sparse ones among them: the verdict, and the proof that comes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.problem.constraint_qualification import balances_by_rounding

N = 2500  # above what the dense method is asked for a verdict


def chain(n: int = N) -> sp.csc_matrix:
    return sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n)).tocsc()


def box(n: int = N) -> sp.csr_matrix:
    return sp.csr_matrix(sp.vstack([sp.identity(n), -sp.identity(n)]))


def row(entries: dict[int, float], n: int = N) -> sp.csr_matrix:
    return sp.csr_matrix((list(entries.values()), ([0] * len(entries), list(entries))), shape=(1, n))


def flows(n: int = N) -> sp.csr_matrix:
    """``z_i = z_{i + n / 2}``."""
    half = sp.identity(n // 2)
    return sp.csr_matrix(sp.hstack([half, -half]))


def flat(n: int = N) -> sp.csr_matrix:
    """Curvature in the first half of the unknowns only."""
    return sp.csr_matrix(sp.diags(np.r_[np.ones(n // 2), np.zeros(n - n // 2)]))


Q = np.random.default_rng(0).standard_normal(N)
SIDES = np.r_[np.ones(N), np.zeros(N)]
#: name -> (P, q, A, b, G, h), what is named in the message
INFEASIBLE: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "bounds against a row": ((chain(), Q, row({3: 1.0, 4: 1.0}), [3.0], box(), SIDES), ("A[0]", "G[3]", "G[4]")),
    "the same, linear": ((None, Q, row({3: 1.0, 4: 1.0}), [3.0], box(), SIDES), ("A[0]", "G[3]", "G[4]")),
    "two rows": ((chain(), Q, sp.vstack([row({3: 1.0}), row({3: 2.0})]), [1.0, 3.0], None, None), ("A[0]", "A[1]")),
    "in units of 1e6": ((chain(), Q, 1e6 * row({3: 1.0, 4: 1.0}), [3e6], box(), SIDES), ("A[0]", "G[3]")),
    "unbounded if it were feasible": (
        (None, -np.ones(N), sp.vstack([row({0: 1.0}), row({0: 1.0})]), [0.0, 1.0], -sp.identity(N), np.zeros(N)),
        ("A[0]", "A[1]"),
    ),
}
UNBOUNDED: dict[str, tuple[Any, ...]] = {
    "a flat half": (flat(), Q, None, None, -sp.identity(N), np.zeros(N)),
    "a flat half, no rows": (flat(), Q, None, None, None, None),
    "linear on a cone": (None, Q, flows(), np.zeros(N // 2), -sp.identity(N), np.zeros(N)),
    "linear, in small units": (None, 1e-9 * Q, flows(), np.zeros(N // 2), -sp.identity(N), np.zeros(N)),
}


def solve(parts: tuple[Any, ...], **options: Any) -> ik.Solution:
    def tensor(t: Any) -> Any:
        return t if t is None else sp.csr_matrix(t) if sp.issparse(t) else torch.as_tensor(np.asarray(t))

    P, q, A, b, G, h = map(tensor, parts)
    return ik.solve(ik.QuadraticProgram(P, q, A=A, b=b, G=G, h=h), **options)


def number(t: Tensor | None, rows: int) -> np.ndarray:
    return np.zeros(rows) if t is None else t.detach().numpy()


@pytest.mark.parametrize("name", INFEASIBLE)
def test_infeasible_with_multipliers_of_farkas(name: str) -> None:
    (P, q, A, b, G, h), named = INFEASIBLE[name]
    found = solve((P, q, A, b, G, h), on_failure="ignore")
    assert ik.Status(int(found.status)) is ik.Status.INFEASIBLE
    y, lam = number(found.multipliers[0], len(b)), number(found.multipliers[1], 0 if h is None else len(h))
    left = A.T @ y + (0 if G is None else G.T @ lam)
    right = np.dot(b, y) + (0 if h is None else np.dot(h, lam))
    assert (lam >= 0).all() and right < 0 and np.abs(left).max() < 1e-7 * -right
    with pytest.raises(ik.ConvergenceError) as error:
        found.raise_for_status()
    assert all(word in str(error.value) for word in named) and "contradict" in str(error.value)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_unbounded_with_a_ray(name: str) -> None:
    P, q, A, b, G, h = UNBOUNDED[name]
    found = solve((P, q, A, b, G, h), on_failure="ignore")
    assert ik.Status(int(found.status)) is ik.Status.UNBOUNDED
    d = found.value.numpy()
    slope = -np.dot(q, d) / np.abs(q).max()
    assert slope > 1e-3
    for rows, least in ((P, True), (A, True), (G, False)):
        if rows is not None:
            assert (np.abs(rows @ d) if least else rows @ d).max() < 1e-7 * slope
    with pytest.raises(ik.ConvergenceError, match="direction"):
        found.raise_for_status()


@pytest.mark.slow
def test_a_little_curvature_is_no_ray() -> None:
    """Weights from 1 to 1e4 along a chain that is held at one end by 1e-3: of condition 5e10, and bounded."""
    n = 1200
    w = np.logspace(0, 4, n - 1)
    steps = sp.diags([np.ones(n - 1), -np.ones(n - 1)], [1, 0], shape=(n - 1, n))
    P = sp.csr_matrix(steps.T @ sp.diags(w) @ steps + sp.diags(np.r_[1e-3, np.zeros(n - 1)]))
    apart = [row({i + 3: 1.0, i: -1.0}, n) for i in range(0, n - 3, 3)]
    rows = sp.vstack(
        [*apart, *(apart[2 * i] + apart[2 * i + 1] for i in range(10))]
    )  # the last ten depend on the others
    b = np.r_[np.full(len(apart), 0.1), np.full(10, 0.2)]
    found = solve((P, np.random.default_rng(0).standard_normal(n), rows, b, None, None), on_failure="ignore")
    assert ik.Status(int(found.status)) not in (ik.Status.UNBOUNDED, ik.Status.INFEASIBLE)


def test_one_of_a_batch_has_no_solution() -> None:
    """The other keeps its own."""
    b = torch.tensor([[1.5], [3.0]], dtype=torch.float64)
    A, G = row({3: 1.0, 4: 1.0}), box()
    program = ik.QuadraticProgram(chain(), torch.as_tensor(Q), A=A, b=b, G=G, h=torch.as_tensor(SIDES))
    found = ik.solve(program, on_failure="ignore")
    assert [ik.Status(int(s)) for s in found.status] == [ik.Status.CONVERGED, ik.Status.INFEASIBLE]
    alone = solve((chain(), Q, A, [1.5], G, SIDES)).value
    torch.testing.assert_close(found.value[0], alone, rtol=0, atol=1e-9)


def test_rows_of_lower_bounds_are_named_so() -> None:
    n = 300
    program = ik.QuadraticProgram(
        chain(n), torch.as_tensor(Q[:n]), G=row({5: 1.0, 6: 1.0}, n), h=torch.tensor([1.0]).double(),
        lower=torch.tensor([2.0]).double(),
    )  # fmt: skip
    with pytest.raises(ik.ConvergenceError, match=r"lower\[0\]"):
        ik.solve(program)


@pytest.mark.parametrize(
    "constraint",
    [lambda z: z.square().sum(-1, keepdim=True) + 1, lambda z: torch.cat([z - 1, 2 - z], -1)],
    ids=["none", "two"],
)
def test_the_augmented_lagrangian_gives_up(constraint: Any) -> None:
    """A penalty that can grow no more brings a point no nearer to what no point meets; another sample goes on."""
    far = torch.tensor([[0.0], [1e3]], dtype=torch.float64)
    found = ik.argmin(
        lambda z, far: (z - 3).square().sum(-1), torch.ones(2, 2, dtype=torch.float64), (far,), batch_dims=1,
        constraints=ik.Inequality(lambda z, far: constraint(z) - far), solver=ik.AugmentedLagrangian(inner_steps=5),
        on_failure="ignore",
    )  # fmt: skip
    assert [ik.Status(int(s)) for s in found.status] == [ik.Status.STALLED, ik.Status.CONVERGED]
    assert 20 < int(found.steps[0]) < 50  # of 100


def test_the_augmented_lagrangian_stays_where_the_function_is_defined() -> None:
    """Its first penalty is in units of curvature, and these are looked at beside the start."""

    def entropy(z: torch.Tensor) -> torch.Tensor:
        if bool((z <= 0).any()):
            raise ValueError("the logarithm of nothing")
        return (z * z.log()).sum(-1)

    found = ik.argmin(
        entropy, torch.full((3,), 0.25, dtype=torch.float64), solver="augmented_lagrangian",
        constraints=ik.Equality(lambda z: z.sum(-1, keepdim=True) - 1),
    )  # fmt: skip
    torch.testing.assert_close(found.value, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Multipliers that balance a gradient by rounding only are told from large ones that are right: cusps, and constraints in
# small units or of small unknowns beside large ones.
F32, F64 = torch.float32, torch.float64

# the constraint, the point, the slope of the objective: multipliers are those that balance it best, and is it a cusp?
_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float], bool]] = {
    "a cube at zero": (lambda z: z[0] ** 3, [1e-9, 5.0], [1, 0], True),
    "a square at zero": (lambda z: z[0] ** 2, [1e-8, 5.0], [1, 0], True),
    "a fourth power at zero": (lambda z: z[0] ** 4, [-1e-5, 5.0], [1, 0], True),
    "a square of a difference": (lambda z: (z[0] - z[1]) ** 2, [1.0, 1.0 + 1e-12], [1, -1], True),
    "an expanded square": (lambda z: z[0] ** 2 - 2 * z[0] * z[1] + z[1] ** 2, [1.0, 1.0 + 1e-12], [1, -1], True),
    "a cube at one": (lambda z: (1 - z[0]) ** 3, [1 + 1e-9, 0.0], [1, 0], True),
    "small units": (lambda z: 1e-12 * (z.sum() - 1), [0.4, 0.6], [3, 3], False),
    "a circle in small units": (lambda z: 1e-14 * (z.square().sum() - 1), [0.6, 0.8], [3, 4], False),
    "a large objective": (lambda z: z.square().sum() - 1, [0.6, 0.8], [3e12, 4e12], False),
    "a small circle": (lambda z: z.square().sum() - 1e-12, [6e-7, 8e-7], [3, 4], False),
    "a small circle beside a large unknown": (
        lambda z: z[:2].square().sum() - 1e-8,
        [6e-5, 8e-5, 1e6],
        [3, 4, 0],
        False,
    ),
    "one of small unknowns in small units": (
        lambda z: 1e-6 * (z[:2].square().sum() - 1e-8),
        [6e-5, 8e-5, 1e9],
        [3, 4, 0],
        False,
    ),
}


@pytest.mark.parametrize("name", list(_ROWS))
def test_cusps_are_told_from_large_multipliers(name: str) -> None:
    constraint, point, slope, cusp = _ROWS[name]
    z, g = torch.tensor(point, dtype=F64), torch.tensor(slope, dtype=F64)
    J = torch.func.grad(constraint)(z)
    lam = -(g @ J) / (J @ J)

    def kernel(w: Tensor) -> Tensor:
        rows = w[:, : len(z)]
        return torch.stack([rows @ g, torch.func.vmap(constraint)(rows)], 1)

    w = torch.cat([z, lam.reshape(1)]).repeat(2, 1)
    found = balances_by_rounding(kernel, w, len(z), torch.tensor([True, False]))
    assert found.tolist() == [cusp, False], (name, float(lam))


@pytest.mark.parametrize("solver", ["auto", "sqp", "filter_interior_point"])
@pytest.mark.parametrize(("radius", "far", "dtype"), [(1e-4, 1e6, F64), (1e-2, 100.0, F32)])
def test_small_circles_beside_large_unknowns_are_met(
    solver: str, radius: float, far: float, dtype: torch.dtype
) -> None:
    end = torch.tensor([1.0, 1.0, far], dtype=dtype)
    circle = ik.Equality(lambda z: z[:2].square().sum() - radius**2)
    start = torch.tensor([10 * radius, 20 * radius, far], dtype=dtype)
    found = ik.argmin(lambda z: (z - end).square().sum(), start, constraints=[circle], solver=solver)
    close = 1e-8 if dtype == F64 else 1e-3
    torch.testing.assert_close(
        found.value[:2] / radius, torch.full((2,), 0.5**0.5, dtype=dtype), rtol=close, atol=close
    )


#: name -> a small problem without a solution, the one advice that its message has
WITHOUT: dict[str, tuple[Callable[[], Any], str]] = {
    "infeasible": (
        lambda: ik.QuadraticProgram(torch.eye(2), torch.ones(2), None, None, torch.tensor([[1.0, 0], [-1, 0]]),
                                    -torch.ones(2)), "Check the data of the constraints."),
    "unbounded": (
        lambda: ik.QuadraticProgram(None, torch.ones(2), None, None, torch.tensor([[1.0, 0]]), torch.ones(1)),
        "State what keeps z back: bounds=, constraints=, or a term that grows."),
    "nonconvex": (
        lambda: ik.QuadraticProgram(-torch.eye(2), torch.ones(2), None, None, torch.eye(2), torch.ones(2)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_the_advice_is_that_of_the_verdict(name: str) -> None:
    make, advice = WITHOUT[name]
    with pytest.raises(ik.ConvergenceError) as caught:
        ik.solve(make())
    said = str(caught.value)
    assert advice in said
    for other in ("depend", "Nothing moves", "start elsewhere", "Loosen", "The constraints hold"):
        assert other not in said


def test_the_advice_of_an_objective_that_falls_forever() -> None:
    below = ik.Inequality(lambda z: z[0] - 1)
    with pytest.raises(ik.ConvergenceError, match="State what keeps z back") as caught:
        ik.argmin(lambda z: z.sum(), torch.zeros(2, dtype=torch.float64), constraints=[below])
    assert "hardly at all" not in str(caught.value) and "The constraints hold" not in str(caught.value)


def test_constraints_that_contradict_each_other_are_not_said_to_hold() -> None:
    """Multipliers run away where no point is feasible: they say nothing of how large the unknowns are."""
    both = ik.Equality(lambda z: torch.stack([z, z - 1]))
    with pytest.raises(ik.ConvergenceError, match="violated there by up to") as caught:
        ik.argmin(
            lambda z: (z - 2).square().sum(),
            torch.zeros(2, dtype=torch.float64),
            constraints=[both],
            solver="filter_interior_point",
            max_steps=10,
        )
    assert float(caught.value.solution.multipliers[0].abs().max()) > 1e8 and "|z|" not in str(caught.value)
