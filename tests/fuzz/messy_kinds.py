"""Messes of kinds other than roots and fixed points: objectives, fits, constraints, programs, flows, graphs, layers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik

__all__ = ["MESSY_KINDS"]

D = torch.float64
Pair = tuple[Any, Any]


def _x(r: random.Random) -> Tensor:
    return torch.tensor([r.uniform(0.2, 0.6) for _ in range(r.randint(1, 3))], dtype=D)


def _of(z: Tensor, x: Tensor) -> Tensor:
    """What ``backward()`` leaves in ``x``."""
    z.sum().backward()
    return torch.zeros_like(x) if x.grad is None else x.grad


# ------------------------------------------------------------------------------------- the function of another moment
def _solved(r: random.Random, k: Any, x: Tensor) -> Tensor:
    """``2 k x``-like solutions of several kinds that read ``k[0]``; each is ``z = k x`` with ``dz/dx = k``."""
    zero = torch.zeros_like(x)
    kinds: list[Callable[[], Any]] = [
        lambda: ik.argmin(lambda z, x: 0.5 * (z - k[0] * x).square().sum(), zero, (x,)),
        lambda: ik.least_squares(lambda z, x: (z - k[0] * x, z - k[0] * x + 1, z - k[0] * x - 1), zero, (x,)),
        lambda: ik.steady_state(lambda z, x: k[0] * x - z, zero, (x,)),
        lambda: ik.argmin(
            lambda z, x: 0.5 * z.square().sum(), zero, (x,), constraints=[ik.Equality(lambda z, x: z - k[0] * x)]
        ),
        lambda: ik.argmin(lambda z, x: 0.5 * (z - k[0] * x).square().sum(), zero, (x,), bounds=(-9.0, 9.0)),
        lambda: ik.argmin(
            lambda z, x: 0.5 * (z - k[0] * x).square().sum(), zero, (x,), project=lambda v: v.clamp(-9, 9)
        ),
    ]
    return r.choice(kinds)().value


def changed_number(r: random.Random) -> Pair:
    x, k = _x(r).requires_grad_(), [0.7]
    z = _solved(r, k, x)
    k[0] = 0.1
    return _of(z, x), torch.full_like(x, 0.7)


def changed_tensor(r: random.Random) -> Pair:
    x, k = _x(r).requires_grad_(), torch.tensor([0.7], dtype=D)
    z = _solved(r, k, x)
    k.fill_(0.1)
    return _of(z, x), torch.full_like(x, 0.7)


def changed_in_graph(r: random.Random) -> Pair:
    x, k = _x(r).requires_grad_(), [0.7]
    joint = ik.FixedPoint(lambda a, x: 0.5 * a + 0.5 * k[0] * x) >> ik.FixedPoint(lambda b, a: 0.5 * b + 0.5 * a)
    names = list(joint.graph)
    z = ik.solve(joint, {name: torch.zeros_like(x) for name in names}, (x,)).value[names[-1]]
    k[0] = 0.1
    return _of(z, x), torch.full_like(x, 0.7)


def changed_in_nested(r: random.Random) -> Pair:
    x, k = _x(r).requires_grad_(), [0.7]

    def outer(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + 0.5 * ik.root(lambda u, x: u - k[0] * x, torch.zeros_like(x), (x,)).value

    z = ik.fixed_point(outer, torch.zeros_like(x), (x,)).value
    k[0] = 0.1
    return _of(z, x), torch.full_like(x, 0.7)


def changed_in_layer(r: random.Random) -> Pair:
    from implicitkit_deq import DEQ

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.tensor(0.7, dtype=D))

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * z + 0.5 * self.k * x

    x, cell = _x(r).requires_grad_(), Cell()
    z = DEQ(cell, (len(x),), rtol=1e-10)(x[None])
    cell.k.fill_(0.1)  # type: ignore[operator]
    return _of(z, x), torch.full_like(x, 0.7)


# ---------------------------------------------------------------------------------------------- derivatives that hide
def objective_without_grad(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    z = ik.argmin(torch.no_grad()(lambda z, x: 0.5 * (z - x).square().sum()), torch.zeros_like(x), (x,)).value
    return _of(z, x), torch.ones_like(x)


def objective_of_detached(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    z = ik.argmin(lambda z, x: 0.5 * (z.detach() - x).square().sum(), torch.zeros_like(x), (x,)).value
    return _of(z, x), torch.ones_like(x)


def constrained_objective_of_detached(r: random.Random) -> Pair:
    """The least of ``|z - x|^2 / 2`` above ``-1``, of which the objective hides ``z``."""
    x = _x(r).requires_grad_()
    below = ik.Inequality(lambda z, x: -z - 1)
    z = ik.argmin(
        lambda z, x: 0.5 * (z.detach() - x).square().sum(), torch.zeros_like(x), (x,), constraints=[below]
    ).value
    return _of(z, x), torch.ones_like(x)


def residuals_of_detached(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    z = ik.least_squares(lambda z, x: (z.detach() - x, x), torch.zeros_like(x), (x,)).value
    return _of(z, x), torch.ones_like(x)


def constraint_of_detached(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    z = ik.argmin(
        lambda z, x: 0.5 * z.square().sum(), torch.zeros_like(x), (x,),
        constraints=[ik.Equality(lambda z, x: z.detach() - x)],
    ).value  # fmt: skip
    return _of(z, x), torch.ones_like(x)


def flow_of_detached(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    z = ik.steady_state(lambda z, x: x - z.detach(), torch.zeros_like(x), (x,)).value
    return _of(z, x), torch.ones_like(x)


def root_of_detached(r: random.Random) -> Pair:
    x = _x(r).requires_grad_()
    solver = r.choice(["auto", "broyden", "scipy.root.hybr", "df_sane"])
    z = ik.root(lambda z, x: z.detach() - x, torch.zeros_like(x), (x,), solver=solver).value
    return _of(z, x), torch.ones_like(x)


def branch_in_objective(r: random.Random) -> Pair:
    x, a, b = _x(r), torch.tensor(0.3, dtype=D, requires_grad=True), torch.tensor(0.5, dtype=D, requires_grad=True)

    def objective(z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * z.square() - (a if bool((z.abs() < 0.01).any()) else b) * x * z).sum()

    z = ik.argmin(objective, torch.zeros_like(x), (x,)).value
    return _of(z, b), x.sum()


# ------------------------------------------------------------------------------------------------------- no functions
def random_objective(r: random.Random) -> Pair:
    x = _x(r)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ik.ImpureFunctionWarning)
        return ik.argmin(
            lambda z, x: (z - x + torch.rand_like(z)).square().sum(), torch.zeros_like(x), (x,)
        ).value, None


def in_place_objective(r: random.Random) -> Pair:
    x = _x(r)
    return ik.argmin(lambda z, x: z.sub_(x).square().sum(), torch.zeros_like(x), (x,)).value, x


def nan_objective(r: random.Random) -> Pair:
    x = _x(r)
    return ik.argmin(lambda z, x: (z - x).sqrt().sum(), torch.zeros_like(x), (x,)).value, None


def raising_node(r: random.Random) -> Pair:
    def node(b: Tensor, a: Tensor) -> Tensor:
        raise KeyError("weights of the cell are missing")

    x = _x(r)
    joint = ik.compose({"a": (lambda a, x: 0.5 * a + x, "x"), "b": (node, "a")}, output="b")
    return ik.solve(joint, {"a": torch.zeros_like(x), "b": torch.zeros_like(x)}, (x,)).value, None


def node_of_another_shape(r: random.Random) -> Pair:
    x = _x(r)
    joint = ik.compose({"a": (lambda a, x: 0.5 * a + x, "x"), "b": (lambda b, a: torch.cat([b, a]), "a")}, output="b")
    return ik.solve(joint, {"a": torch.zeros_like(x), "b": torch.zeros_like(x)}, (x,)).value, None


def failing_inside(r: random.Random) -> Pair:
    """The inner solve has no solution; the outer one must not swallow that."""
    x = _x(r)

    def outer(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * z + ik.root(lambda u, x: u * u + x, torch.ones_like(x), (x,)).value

    verb = r.choice([ik.root, ik.fixed_point, ik.steady_state])
    return verb(outer, torch.zeros_like(x), (x,)).value, None


def failing_inside_objective(r: random.Random) -> Pair:
    x = _x(r)

    def objective(z: Tensor, x: Tensor) -> Tensor:
        return (z - ik.fixed_point(lambda u, x: u + x, torch.zeros_like(x), (x,)).value).square().sum()

    return r.choice([ik.argmin, ik.least_squares])(objective, torch.zeros_like(x), (x,)).value, None


def contradicting_constraints(r: random.Random) -> Pair:
    x = _x(r)
    both = [ik.Equality(lambda z, x: z - x), ik.Equality(lambda z, x: z - x - 1)]
    return ik.argmin(lambda z, x: z.square().sum(), torch.zeros_like(x), (x,), constraints=both).value, None


def empty_program(r: random.Random) -> Pair:
    x = _x(r)
    one = torch.eye(len(x), dtype=D)
    program = ik.QuadraticProgram(one, x, G=torch.cat([one, -one]), h=torch.cat([x, -x - 1]))
    return ik.solve(program, solver=r.choice(["auto", "interior_point"])).value, None


def unbounded_program(r: random.Random) -> Pair:
    x = _x(r)
    one = torch.eye(len(x), dtype=D)
    return ik.solve(ik.QuadraticProgram(0 * one, x, G=one, h=x)).value, None


def concave_program(r: random.Random) -> Pair:
    x = _x(r)
    return ik.solve(ik.QuadraticProgram(-torch.eye(len(x), dtype=D), x)).value, None


def program_of_nan(r: random.Random) -> Pair:
    x = _x(r)
    x[0] = torch.nan
    return ik.solve(ik.QuadraticProgram(torch.eye(len(x), dtype=D), x)).value, None


def empty_layer(r: random.Random) -> Pair:
    import cvxpy as cp

    from implicitkit_cvxpy import ConvexLayer

    h, z = cp.Parameter(2), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(z)), [z <= h, z >= h + 1]), [h], [z])
    return layer(torch.tensor([0.1, 0.2], dtype=D))[0], None


def blowing_up(r: random.Random) -> Pair:
    """``y' = y^2`` from one is infinite at time one."""
    times = torch.tensor([0.0, 2.0], dtype=D)
    return ik.solve(ik.InitialValue(lambda t, y: y * y, times), torch.ones(1, dtype=D)).value[-1], None


def event_that_never_comes(r: random.Random) -> Pair:
    times = torch.tensor([0.0, 2.0], dtype=D)
    fall = ik.InitialValue(lambda t, y: -y, times, lambda t, y: y[0] + 1)
    return ik.solve(fall, torch.ones(1, dtype=D)).value["time"], None


def no_rest(r: random.Random) -> Pair:
    x = _x(r)
    return ik.steady_state(lambda z, x: x + z * z, torch.zeros_like(x), (x,)).value, None


def wrong_bracket(r: random.Random) -> Pair:
    x = _x(r)[:1]
    return ik.root(lambda z, x: z - x, 2 + x, (x,), bracket=(2.0, 3.0)).value, None


def prox_of_another_shape(r: random.Random) -> Pair:
    x = _x(r)
    return ik.argmin(
        lambda z, x: (z - x).square().sum(), torch.zeros_like(x), (x,), prox=lambda v, step: torch.cat([v, v])
    ).value, None


def constraint_that_is_nan(r: random.Random) -> Pair:
    x = _x(r)
    condition = ik.Equality(lambda z, x: torch.log(-z.abs() - x))
    return ik.argmin(lambda z, x: z.square().sum(), torch.zeros_like(x), (x,), constraints=[condition]).value, None


_CHANGED = ("no longer", "changed")
_CUT = ("no_grad", "detach")
_FAILED = ("did not converge",)

# name: what is done, and the words of which a refusal must have one
MESSY_KINDS: dict[str, tuple[Callable[[random.Random], Pair], tuple[str, ...]]] = {
    "changed_number": (changed_number, _CHANGED),
    "changed_tensor": (changed_tensor, _CHANGED),
    "changed_in_graph": (changed_in_graph, _CHANGED),
    "changed_in_nested": (changed_in_nested, _CHANGED),
    "changed_in_layer": (changed_in_layer, _CHANGED),
    "objective_without_grad": (objective_without_grad, _CUT),
    "objective_of_detached": (objective_of_detached, _CUT),
    "constrained_objective_of_detached": (constrained_objective_of_detached, _CUT),
    "residuals_of_detached": (residuals_of_detached, _CUT),
    "constraint_of_detached": (constraint_of_detached, (*_CUT, "singular", "rank", *_FAILED)),
    "flow_of_detached": (flow_of_detached, (*_CUT, "singular", *_FAILED)),
    "root_of_detached": (root_of_detached, (*_CUT, "singular", *_FAILED)),
    "branch_in_objective": (branch_in_objective, ("branches",)),
    "random_objective": (random_objective, ("random", *_FAILED)),
    "in_place_objective": (in_place_objective, ("in place",)),
    "nan_objective": (nan_objective, ("not finite", "NaN", *_FAILED)),
    "raising_node": (raising_node, ("weights of the cell are missing",)),
    "node_of_another_shape": (node_of_another_shape, ("shape",)),
    "failing_inside": (failing_inside, _FAILED),
    "failing_inside_objective": (failing_inside_objective, _FAILED),
    "contradicting_constraints": (contradicting_constraints, (*_FAILED, "constraints")),
    "empty_program": (empty_program, ("infeasible", *_FAILED)),
    "unbounded_program": (unbounded_program, ("unbounded", *_FAILED)),
    "concave_program": (concave_program, ("convex", "semidefinite", "unbounded", *_FAILED)),
    "program_of_nan": (program_of_nan, ("NaN", "not finite")),
    "empty_layer": (empty_layer, ("infeasible",)),
    "blowing_up": (blowing_up, ("not finite", "integrator", "step", *_FAILED)),
    "event_that_never_comes": (event_that_never_comes, ("event",)),
    "no_rest": (no_rest, _FAILED),
    "wrong_bracket": (wrong_bracket, ("bracket", "sign")),
    "prox_of_another_shape": (prox_of_another_shape, ("prox",)),
    "constraint_that_is_nan": (constraint_that_is_nan, ("not finite", "NaN", *_FAILED)),
}
