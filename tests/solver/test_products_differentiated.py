"""A part differentiates products with a matrix that it is given, or maps them over vectors, itself: ``A.mv`` and ``A.rmv``
in a linear solver, ``f.linearize(z).mv`` in a method, ``f.jvp`` in a black box.

    v -> A v                     Jacobian A
    v -> |A v - b|^2 / 2         gradient A'(A v - b), Hessian A'A
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import implicitkit as ik

B = torch.tensor([[0.3, 0.2, 0.0], [-0.1, 0.25, 0.3], [0.2, -0.3, 0.1]], dtype=torch.float64)
T = torch.tensor([[0.4, -0.2, 0.3], [0.1, 0.5, -0.6]], dtype=torch.float64)
ZERO = torch.zeros(2, 3, dtype=torch.float64)
V = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, 2.0]], dtype=torch.float64)
Question = Callable[[ik.extend.Operator, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Asks(ik.LinearSolver):
    """Solves by a dense matrix, and asks a question of the operator before."""

    question: Any = None
    answers: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def solve(
        self, A: ik.extend.Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None
    ) -> ik.extend.LinearSolution:
        self.answers.append(self.question(A, b))
        x = torch.linalg.solve(A.dense(), b.unsqueeze(2)).squeeze(2)
        sound = torch.ones(len(b), dtype=torch.bool)
        return ik.extend.LinearSolution(x, (A.mv(x) - b).norm(dim=1), sound.long(), sound)


def at(A: ik.extend.Operator) -> Tensor:
    return V.repeat(1, A.size // 3)


def full(A: ik.extend.Operator) -> Tensor:
    return torch.block_diag(*A.dense())


def square(J: Tensor) -> Tensor:
    return J.flatten(2).flatten(0, 1)


def by_autograd(A: ik.extend.Operator, b: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        v = at(A).clone().requires_grad_()
        (found,) = torch.autograd.grad(0.5 * (A.mv(v) - b).square().sum(), v)
    return found.reshape(-1), full(A).T @ (full(A) @ at(A).reshape(-1) - b.reshape(-1))


def objective(A: ik.extend.Operator, b: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: 0.5 * (A.mv(v) - b).square().sum()


def many_gradients(A: ik.extend.Operator, b: Tensor) -> tuple[Tensor, Tensor]:
    points = torch.stack([at(A), 2 * at(A), -at(A)])
    found = torch.func.vmap(torch.func.grad(objective(A, b)))(points).flatten(1)
    return found, (points.flatten(1) @ full(A).T - b.reshape(-1)) @ full(A)


QUESTIONS: dict[str, Question] = {
    "autograd": by_autograd,
    "grad": lambda A, b: (torch.func.grad(objective(A, b))(at(A)).reshape(-1), by_autograd(A, b)[1]),
    "jacrev": lambda A, b: (square(torch.func.jacrev(A.mv)(at(A))), full(A)),
    "jacfwd": lambda A, b: (square(torch.func.jacfwd(A.mv)(at(A))), full(A)),
    "hessian": lambda A, b: (square(torch.func.hessian(objective(A, b))(at(A))), full(A).T @ full(A)),
    "reverse_twice": lambda A, b: (
        square(torch.func.jacrev(torch.func.jacrev(objective(A, b)))(at(A))),
        full(A).T @ full(A),
    ),
    "vmap_of_grad": many_gradients,
    "vmap": lambda A, b: (
        torch.func.vmap(A.mv)(torch.stack([at(A), -at(A)])),
        torch.stack([A.mv(at(A)), -A.mv(at(A))]),
    ),
    "rmv": lambda A, b: (square(torch.func.jacrev(A.rmv)(at(A))), full(A).T),
    "transposed": lambda A, b: (square(torch.func.jacrev(A.T.mv)(at(A))), full(A).T),
    "stepped": lambda A, b: (square(torch.func.jacrev(A.stepped)(at(A))), full(A) + torch.eye(2 * A.size)),
    "shifted": lambda A, b: (
        square(torch.func.jacrev(ik.extend.shifted(A, 2.0, -1.0).mv)(at(A))),
        2 * torch.eye(2 * A.size) - full(A),
    ),
    "minus": lambda A, b: (square(torch.func.jacrev(ik.extend.minus(A, A.T).mv)(at(A))), full(A) - full(A).T),
}


def equation(z: Tensor, t: Tensor) -> Tensor:
    return z + torch.sin(z @ B.T) - t


def layer(kind: str, rule: ik.Rule) -> Callable[[Tensor], Tensor]:
    if kind == "fixed_point":
        return lambda t: ik.fixed_point(lambda z, t: torch.tanh(z @ B.T + t), ZERO, (t,), batch_dims=1, rule=rule).value
    if kind == "argmin":
        phi = lambda z, t: (z.square() + torch.sin(z @ B.T) - t * z).sum(1)  # noqa: E731
        return lambda t: ik.argmin(phi, ZERO, (t,), batch_dims=1, rule=rule).value
    if kind == "graph":
        joint = ik.compose(
            {"a": (lambda z, t: torch.tanh(z @ B.T + t), "t"), "b": (lambda z, a: torch.tanh(z @ B + a), "a")},
            output="b",
        )
        return lambda t: ik.solve(joint, {"a": ZERO, "b": ZERO}, (t,), batch_dims=1, rule=rule).value["b"]
    return lambda t: ik.root(equation, ZERO, (t,), batch_dims=1, rule=rule).value


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize("kind", ["root", "fixed_point", "argmin", "graph"])
def test_products_of_a_linear_solver_have_their_derivative(kind: str, mode: str) -> None:
    answers_are_right(kind, mode, Asks(all_of(QUESTIONS)))


def all_of(questions: dict[str, Question]) -> Callable[..., dict[str, tuple[Tensor, Tensor]]]:
    return lambda A, b: {name: question(A, b) for name, question in questions.items()}


def answers_are_right(kind: str, mode: str, asks: Asks, **options: Any) -> None:
    Asks.answers.clear()
    solve = layer(kind, ik.Implicit(linear_solver=asks, **options))
    if mode == "backward":
        torch.func.vjp(solve, T)[1](V)
    else:
        torch.func.jvp(solve, (T,), (V,))
    assert Asks.answers
    for name, (found, asked) in Asks.answers[0].items():  # type: ignore[attr-defined]
        torch.testing.assert_close(found, asked.to(found), rtol=1e-12, atol=1e-12, msg=lambda m: f"{name}: {m}")  # noqa: B023


def inverse_of(A: ik.extend.Operator) -> Tensor:
    """The matrix that the preconditioner of ``A`` stands for, one plain vector after another."""
    one = torch.eye(2 * A.size, dtype=torch.float64)
    return torch.stack([A.preconditioner.solve(e.view(2, -1)).reshape(-1) for e in one], 1)


def by_inverse(A: ik.extend.Operator) -> Callable[[Tensor], Tensor]:
    return lambda v: 0.5 * (A.preconditioner.solve(v) - V.repeat(1, A.size // 3)).square().sum()


INVERSES: dict[str, Question] = {
    "jacrev": lambda A, b: (square(torch.func.jacrev(A.preconditioner.solve)(at(A))), inverse_of(A)),
    "jacfwd": lambda A, b: (square(torch.func.jacfwd(A.preconditioner.solve)(at(A))), inverse_of(A)),
    "transposed": lambda A, b: (square(torch.func.jacrev(A.preconditioner.T.solve)(at(A))), inverse_of(A).T),
    "hessian": lambda A, b: (square(torch.func.hessian(by_inverse(A))(at(A))), inverse_of(A).T @ inverse_of(A)),
    "reverse_twice": lambda A, b: (
        square(torch.func.jacrev(torch.func.jacrev(by_inverse(A)))(at(A))),
        inverse_of(A).T @ inverse_of(A),
    ),
    "vmap": lambda A, b: (
        torch.func.vmap(A.preconditioner.solve)(torch.stack([at(A), -at(A)])).flatten(1),
        torch.stack([at(A), -at(A)]).flatten(1) @ inverse_of(A).T,
    ),
}


@dataclass(frozen=True)
class AsksInverse(Asks):
    preconditions: ClassVar[bool] = True


class _Factors:
    """A factorisation as SciPy's: arrays only."""

    def solve(self, b: Any, trans: str = "N") -> Any:
        M = (torch.eye(3, dtype=torch.float64) + 0.5 * B).numpy()
        return (M.T if trans == "T" else M) @ b


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize(
    "choice",
    [
        "jacobi",
        "block_jacobi",
        "ilu",
        lambda z, v: torch.cos(z) * v @ (torch.eye(3, dtype=torch.float64) + B),
        _Factors(),
    ],
    ids=["jacobi", "block_jacobi", "ilu", "function", "factors"],
)
def test_what_a_preconditioner_solves_has_its_derivative(choice: Any, mode: str) -> None:
    answers_are_right("root", mode, AsksInverse(all_of(INVERSES)), preconditioner=choice)


def test_a_linear_solver_by_gradients_is_right() -> None:
    """``min |A v - b|^2 / 2`` by torch's LBFGS, as its author would write it."""

    @dataclass(frozen=True)
    class ByGradients(ik.LinearSolver):
        def solve(
            self, A: ik.extend.Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None
        ) -> ik.extend.LinearSolution:
            v = torch.zeros_like(b).requires_grad_()
            search = torch.optim.LBFGS([v], max_iter=200, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe")  # fmt: skip  # noqa: E501

            def closure() -> Tensor:
                search.zero_grad()
                loss = 0.5 * (A.mv(v) - b).square().sum()
                loss.backward()
                return loss

            with torch.enable_grad():
                search.step(closure)
            x = v.detach()
            left = (A.mv(x) - b).norm(dim=1)
            return ik.extend.LinearSolution(x, left, torch.ones_like(left).long(), left <= atol + rtol * b.norm(dim=1))

    t = T.clone().requires_grad_()
    found = torch.autograd.grad(layer("root", ik.Implicit(linear_solver=ByGradients()))(t).sum(), t)[0]
    exact = torch.autograd.grad(layer("root", ik.Implicit())(t).sum(), t)[0]
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------------------- methods
def asked_inside(batch: str, question: Callable[[Any, Tensor], Any]) -> Any:
    """What ``question(f, z)`` gives at ``T`` inside a black box (``batch``: how it is called) or a ``"method"``."""
    answers: list[Any] = []

    def find(f: Any, z: Tensor, **_: Any) -> ik.Found:
        answers.append(question(f, T[: max(1, z.numel() // 3)].reshape(z.shape)))
        return ik.Found(z)

    class AsksToo(ik.Method):
        solves = "root"

        def init(self, f: Any, z: Tensor) -> None:
            return None

        def step(self, f: Any, z: Tensor, state: None) -> tuple[Tensor, None]:
            answers.append(question(f, T))
            return z, None

    solver = AsksToo() if batch == "method" else ik.extend.BlackBox(find, "asks", "root", batch)
    ik.root(equation, ZERO, (T,), batch_dims=1, solver=solver, on_failure="ignore", max_steps=1)
    return answers[0]


@pytest.mark.parametrize("batch", ["loop", "native", "joint", "method"])
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.autograd.functional.jacobian])
def test_products_of_f_have_their_derivative(transform: Any, batch: str) -> None:
    def question(f: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        product = f.linearize(z).mv if batch == "method" else lambda v: f.jvp(z, v)
        matrix = f.jacobian(z)
        one = torch.ones_like(z)
        with torch.enable_grad():
            found = (
                transform(product, one) if transform is torch.autograd.functional.jacobian else transform(product)(one)
            )
        dense = torch.block_diag(*matrix) if matrix.ndim == 3 else matrix
        return found.reshape(dense.shape), dense

    found, matrix = asked_inside(batch, question)
    torch.testing.assert_close(found, matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["linearize", "jacobian"])
@pytest.mark.parametrize("way", ["autograd", "jacrev", "vmap"])
def test_a_matrix_has_no_graph_in_the_point_and_says_so(what: str, way: str) -> None:
    def ask(f: Any, z: Tensor) -> Any:
        def of(y: Tensor) -> Tensor:
            return f.linearize(y).mv(torch.ones_like(y)) if what == "linearize" else f.jacobian(y)

        if way == "autograd":
            return of(z.clone().requires_grad_())
        return torch.func.jacrev(of)(z) if way == "jacrev" else torch.func.vmap(of)(torch.stack([z, z]))

    with pytest.raises(TypeError, match=r"without a graph in z.*torch\.func\.jacrev\(f\)\(z\)"):
        asked_inside("method", ask)


# -------------------------------------------------------------------------------------------------------- no point at all
@pytest.mark.parametrize("batch", ["loop", "native"])
def test_a_black_box_that_returns_nan_leaves_its_start(batch: str) -> None:
    """Where the function is NaN a black box of Newton steps returns NaN: the start stands in its place, as for a method, and
    the sample is said to have failed."""

    def find(f: Any, z: Tensor, *, rtol: float, atol: float, max_steps: int) -> Tensor:
        for _ in range(20):
            z = z - torch.linalg.solve(f.jacobian(z), f(z))
        return z

    t = T.clone()
    t[1, 0] = torch.nan
    solver = ik.extend.BlackBox(find, "newton", "root", batch)
    solution = ik.root(equation, ZERO + 0.25, (t,), batch_dims=1, solver=solver, on_failure="ignore", in_dims=(0,))
    assert solution.converged.tolist() == [True, False]
    assert torch.equal(solution.value[1], ZERO[1] + 0.25) and solution.residual_norm[1].isnan()
    assert solution.status[1].item() == ik.Status.NONFINITE
    with pytest.raises(ik.ConvergenceError, match="returned NaN or Inf, and the start was kept instead"):
        ik.root(equation, ZERO + 0.25, (t,), batch_dims=1, solver=solver, in_dims=(0,))
