"""A solver's author differentiates, or maps over points, the ``f`` that his solver is given: by autograd, by transforms of
``torch.func``, by ``vmap``; what he gets is the derivative of ``f``, and where there is none he is told.

    root:         f(z) = A z^2 - t                 Jacobian 2 A diag(z)
    fixed point:  f(z) = cos(A z) + t              Jacobian -diag(sin(A z)) A
    minimum:      phi(z) = sum(exp(A z)) - t'z     gradient A'exp(A z) - t, Hessian A'diag(exp(A z)) A
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

A = torch.tensor([[2.0, 1.0], [0.5, 3.0]], dtype=torch.float64)
T = torch.tensor([1.0, 2.0], dtype=torch.float64)
AT = torch.tensor([0.3, -0.2], dtype=torch.float64)

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "root": (ik.root, lambda z, t: z.square() @ A.T - t, lambda z: 2 * A * z),
    "fixed_point": (ik.fixed_point, lambda z, t: torch.cos(z @ A.T) + t, lambda z: -torch.sin(A @ z).unsqueeze(1) * A),
    "minimise": (
        ik.argmin,
        lambda z, t: torch.exp(z @ A.T).sum(-1) - z @ t,
        lambda z: A.T @ (torch.exp(A @ z).unsqueeze(1) * A),
    ),
}


def by_autograd(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    with torch.enable_grad():
        y = z.clone().requires_grad_()
        return torch.stack([torch.autograd.grad(out, y, retain_graph=True)[0] for out in f(y).reshape(-1)])


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "jacrev": lambda f, z: torch.func.jacrev(f)(z),
    "jacfwd": lambda f, z: torch.func.jacfwd(f)(z),
    "autograd": by_autograd,
    "functional": torch.autograd.functional.jacobian,
}


def asked_inside(kind: str, batch: str, question: Callable[[Any, Tensor], Any]) -> Any:
    """What ``question(f, z)`` gives at ``AT`` inside a black box (``batch``: how it is called) or a ``"method"``."""
    answers: list[Any] = []

    def find(f: Any, z: Tensor, **_: Any) -> ik.Found:
        answers.append(question(f, AT.reshape(z.shape)))
        return ik.Found(z)

    class Asks(ik.Method):
        solves = kind

        def init(self, f: Any, z: Tensor) -> None:
            return None

        def step(self, f: Any, z: Tensor, state: None) -> tuple[Tensor, None]:
            answers.append(question(f, AT.reshape(z.shape)))
            return z, None

    solver = Asks() if batch == "method" else ik.extend.BlackBox(find, "asks", kind, batch)
    verb, function, _ = FUNCTIONS[kind]
    verb(function, torch.zeros(2, dtype=torch.float64), (T,), solver=solver, on_failure="ignore", max_steps=1)
    return answers[0]


@pytest.mark.parametrize("batch", ["loop", "native", "joint", "method"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_jacobian_of_f_is_its_jacobian(kind: str, way: str, batch: str) -> None:
    found = asked_inside(kind, batch, WAYS[way])
    torch.testing.assert_close(found.reshape(2, 2), FUNCTIONS[kind][2](AT), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["root", "minimise"])
def test_the_residual_beside_the_gradient_is_the_problems(kind: str) -> None:
    """A minimiser of ``|F|^2 / 2`` is judged by ``F``, one of an objective by its gradient."""

    def find(f: Any, z: Tensor, **_: Any) -> ik.Found:
        answers.append(torch.func.jacrev(f.residual)(AT))
        return ik.Found(z)

    answers: list[Tensor] = []
    verb, function, jacobian = FUNCTIONS[kind]
    solver = ik.extend.BlackBox(find, "asks", "minimise", "loop")
    verb(function, torch.zeros(2, dtype=torch.float64), (T,), solver=solver, on_failure="ignore")
    torch.testing.assert_close(answers[0], jacobian(AT), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", ["loop", "native", "method"])
def test_the_hessian_of_the_objective_is_that_of_phi(batch: str) -> None:
    found = asked_inside("minimise", batch, lambda f, z: torch.func.hessian(lambda y: f.value(y).sum())(z))
    torch.testing.assert_close(found.reshape(2, 2), FUNCTIONS["minimise"][2](AT), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", ["loop", "native", "joint", "method"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_vmap_evaluates_f_at_many_points(kind: str, batch: str) -> None:
    def question(f: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        points = torch.stack([z, z + 1.0, 2 * z])
        return torch.vmap(f)(points), torch.stack([f(p) for p in points])

    mapped, one_by_one = asked_inside(kind, batch, question)
    assert mapped.shape == one_by_one.shape and not torch.equal(mapped[0], mapped[1])
    torch.testing.assert_close(mapped, one_by_one, rtol=1e-12, atol=1e-12)


def test_each_is_an_evaluation_and_none_is_taken_for_another() -> None:
    """What is known of a plain point is not given for the same numbers with a graph, nor the other way round."""

    def question(f: Any, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return f(z), torch.func.jacrev(f)(z), f(z)

    before, jacobian, after = asked_inside("root", "method", question)
    torch.testing.assert_close(jacobian.reshape(2, 2), 2 * A * AT)
    assert torch.equal(before, after) and not before.requires_grad and not after.requires_grad


def test_newton_by_jacrev_in_a_black_box_solves_and_is_differentiated() -> None:
    def newton(f: Any, z: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
        for _ in range(max_steps):
            if f(z).norm() <= atol:
                break
            z = z - torch.linalg.solve(torch.func.jacrev(f)(z), f(z))
        return ik.Found(z)

    solver = ik.extend.BlackBox(newton, "newton_by_jacrev", "root", "loop")
    t = T.clone().requires_grad_()
    z = ik.root(FUNCTIONS["root"][1], torch.ones(2, dtype=torch.float64), (t,), solver=solver).value
    torch.testing.assert_close(z.square(), torch.linalg.solve(A, T))
    (gradient,) = torch.autograd.grad(z.sum(), t)
    torch.testing.assert_close(gradient, torch.linalg.solve((2 * A * z.detach()).T, torch.ones_like(T)))


def _of_length(solves: Callable[..., Tensor], z: Tensor) -> Tensor:
    y = z.clone().requires_grad_()
    return z - 0.01 * torch.autograd.grad(solves(y).square().sum(), y)[0]


@dataclass(frozen=True)
class Descends(ik.LinearSolver):
    def solve(self, A: Any, b: Tensor, **_: Any) -> Any:
        return _of_length(A.mv, b)


@pytest.mark.parametrize("part", ["loop", "native", "method", "linear"])
def test_a_part_that_differentiates_without_gradients_is_told_where_they_are(part: str) -> None:
    """Parts are called under ``torch.no_grad``, and what torch says of it names nothing."""
    said = r"does not require grad.*use torch\.enable_grad\(\) inside"
    if part == "linear":
        t = T.clone().requires_grad_()
        z = ik.root(lambda z, t: z - t, torch.zeros_like(T), (t,), rule=ik.Implicit(linear_solver=Descends())).value
        with pytest.raises(RuntimeError, match=said):
            z.sum().backward()
        return
    verb, function, _ = FUNCTIONS["root"]
    how: dict[str, Any] = {"solves": "root"}
    step: Any = type("Descent", (ik.Method,), how | {"step": lambda self, f, z, state: (_of_length(f, z), state)})
    solver = step() if part == "method" else ik.extend.BlackBox(lambda f, z, **_: _of_length(f, z), "box", "root", part)
    with pytest.raises(RuntimeError, match=said):
        verb(function, torch.zeros(2, dtype=torch.float64), (T,), solver=solver)


@pytest.mark.parametrize("question", ["jacobian", "jvp", "second"])
def test_what_has_no_graph_says_so(question: str) -> None:
    def ask(f: Any, z: Tensor) -> Any:
        function = getattr(f, question)
        return torch.func.jacrev((lambda y: function(y, z)) if question == "jvp" else function)(z)

    with pytest.raises(TypeError, match=r"without a graph.*torch\.func\.jacrev\(f\)\(z\)"):
        asked_inside("root", "loop", ask)


WRONG = {  # what is given to f of a method: what is raised, and what it says
    "more rows": (lambda z: torch.cat([z, z]), ValueError, r"\(batch, n\) = \(1, 2\).*\(2, 2\).*torch\.vmap"),
    "one row, flat": (lambda z: z[0], ValueError, r"\(batch, n\) = \(1, 2\).*got \(2,\)"),
    "float32": (lambda z: z.float(), ValueError, "torch.float64 on cpu; got .*torch.float32"),
    "integers": (
        lambda z: torch.zeros_like(z, dtype=torch.int64),
        ValueError,
        "torch.float64 on cpu; got .*torch.int64",
    ),
    "a list": (lambda z: [0.0, 0.0], TypeError, "f takes a tensor .*; got list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_point_that_is_none_is_refused_in_words(name: str) -> None:
    give, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        asked_inside("root", "method", lambda f, z: f(give(z)))


@pytest.mark.parametrize("name", ["value", "residuals"])
def test_what_f_does_not_have_is_said(name: str) -> None:
    with pytest.raises(AttributeError, match=f"f.{name}: there is none where 'root' is solved"):
        asked_inside("root", "loop", lambda f, z: getattr(f, name)(z))


def test_a_black_box_that_gives_more_points_at_once_is_told_of_vmap() -> None:
    """Where a black box raises no mistake of the program, the solve has not converged, and says why."""
    solver = ik.extend.BlackBox(lambda f, z, **_: ik.Found(f(z.expand(3, 2))), "gives_more", "root", "loop")
    with pytest.raises(ik.ConvergenceError, match=r"of shape \(2,\); got \(3, 2\).*torch\.vmap\(f\)\(points\)"):
        ik.root(FUNCTIONS["root"][1], AT, (T,), solver=solver)
