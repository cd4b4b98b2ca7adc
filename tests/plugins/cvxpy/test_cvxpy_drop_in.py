"""What people bring from cvxpylayers: options, exceptions, failure policies, back ends, a forward and backward of theirs."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConvexLayer, ProgramError, cones  # noqa: E402

F64 = torch.float64
GIVEN = torch.tensor([[1.0, -2.0, 0.5], [-0.3, 0.2, -1.0]], dtype=F64)


def relu(**options: Any) -> ConvexLayer:
    """``max(p, 0)``: the solution of ``min |x - p|^2, x >= 0``."""
    p, x = cp.Parameter(3, name="p"), cp.Variable(3)
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - p)), [x >= 0]), [p], [x], **options)


def curved(**options: Any) -> ConvexLayer:
    """The projection on a ball and a polyhedron: second-order cones, and more than a step or two for any solver."""
    p, x = cp.Parameter(6, name="p"), cp.Variable(6)
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=F64).numpy()
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - p)), [rows @ x <= 1, cp.norm(x) <= 0.4])
    return ConvexLayer(problem, [p], [x], **options)


def polyhedral(**options: Any) -> ConvexLayer:
    """The same without the ball: a quadratic program."""
    p, x = cp.Parameter(6, name="p"), cp.Variable(6)
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=F64).numpy()
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - p)), [rows @ x <= 1]), [p], [x], **options)


# --------------------------------------------------------------------------------------------------------------- options
SOLVERS = [None, "CLARABEL", "SCS", "OSQP", "daqp", "interior_point"]
SPELT = [{"eps": 1e-8}, {"tol": 1e-8}, {"max_iters": 5000}, {"max_iter": 5000}, {"max_steps": 5000}, {"verbose": False}]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("options", SPELT, ids=lambda o: next(iter(o)))
def test_common_words_are_understood_by_every_solver(solver: Any, options: dict[str, Any]) -> None:
    for args in ({"solver": solver, "solver_args": options}, {"solver_args": options | {"solve_method": solver}}):
        if args.get("solver", solver) is None:
            args["solver_args"].pop("solve_method", None)
        (found,) = relu(**args)(GIVEN)
        torch.testing.assert_close(found, GIVEN.clamp_min(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "solver", "word"),
    [
        (curved, "CLARABEL", "max_iter"), (curved, "CLARABEL", "max_iters"), (curved, "SCS", "max_iter"),
        (curved, None, "max_iters"), (polyhedral, "daqp", "iter_limit"), (polyhedral, "daqp", "max_iter"),
        (polyhedral, "interior_point", "max_iter"), (polyhedral, "interior_point", "max_steps"),
    ],
)  # fmt: skip
def test_a_limit_is_one(make: Callable[..., ConvexLayer], solver: Any, word: str) -> None:
    """One step is not enough, whatever the word; nothing that is understood is dropped."""
    with pytest.raises(ProgramError, match=r"iteration limit|inaccurate"):
        make(solver=solver, solver_args={word: 1})(4 * torch.ones(6, dtype=F64))


REFUSED = [
    (None, {"epz": 1}, r"epz belong to a particular solver: name it .*eps \(or tol\), max_iters and verbose"),
    (None, {"eps_abs": 1e-6}, r'eps_abs belong to a particular solver.*solver="SCS" has eps_abs'),
    (None, {"acceleration_lookback": 0}, r'solver="SCS" has acceleration_lookback'),
    ("CLARABEL", {"max_itr": 3}, r"solver 'clarabel' has no option\(s\) max_itr; did you mean max_iter"),
    ("SCS", {"eps_abz": 3}, r"solver 'scs' has no option\(s\) eps_abz; did you mean eps_abs"),
    ("daqp", {"primal": 3}, r"solver 'daqp' has no option\(s\) primal; did you mean primal_tol"),
    ("interior_point", {"epsilon": 3}, r"solver 'interior_point' has no option\(s\) epsilon"),
    ("interior_point", {"zzz": 3}, r"has no option\(s\) zzz; it has: eps, max_iters, max_steps, tol, verbose"),
    ("OSQP", {"no_such": 3}, r"solver 'OSQP' refused its option\(s\) no_such"),
    ("HIGHS", {"eps": 3}, r"'HIGHS' is called through cvxpy and has no option 'eps': use its own word"),
    ("SCS", {"eps": 1e-6, "tol": 1e-6}, r"says the same thing twice: eps, tol"),
    ("SCS", {"max_iters": 1, "max_iter": 2}, r"says the same thing twice: max_iter, max_iters"),
]


@pytest.mark.parametrize(("solver", "options", "message"), REFUSED)
def test_other_words_are_refused_by_name(solver: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        relu(solver=solver, solver_args=options)(GIVEN)


def test_another_derivative_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='lpgd' of diffcp is another derivative.*smooth"):
        relu()(GIVEN, solver_args={"mode": "lpgd"})


@pytest.mark.parametrize("solver", [None, "daqp", "interior_point"])
def test_the_layer_prints_for_solvers_that_cannot(solver: Any, capsys: pytest.CaptureFixture[str]) -> None:
    relu(solver=solver)(GIVEN, solver_args={"verbose": True})
    assert "ConeSolution(2/2 solved" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- back ends
@pytest.mark.parametrize("name", ["CUCLARABEL", "cuclarabel", "MPAX", "CUOPT", "MOREAU"])
def test_back_ends_of_a_gpu_say_what_they_need(name: str) -> None:
    if name.upper() in cp.installed_solvers():
        pytest.skip("it is installed")
    with pytest.raises(
        ImportError, match=rf"solver '{name}' is not installed: .*interior_point. runs on a GPU without it"
    ):
        relu(solver=name)


# ------------------------------------------------------------------------------------------------------------ exceptions
def infeasible() -> tuple[ConvexLayer, Tensor]:
    low, x = cp.Parameter(name="low"), cp.Variable()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.square(x)), [x >= low, x <= 1]), [low], [x])
    return layer, torch.tensor([0.5, 3.0], dtype=F64)


def test_old_except_clauses_still_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, low = infeasible()
    for kind in (cp.SolverError, cp.error.SolverError, ProgramError, ik.ConvergenceError, RuntimeError):
        with pytest.raises(kind, match=r"infeasible.*sample 1"):
            layer(low)

    class TheirError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "diffcp", types.SimpleNamespace(SolverError=TheirError))
    with pytest.raises(TheirError) as caught:
        layer(low)
    assert isinstance(caught.value, (ProgramError, cp.SolverError)) and caught.value.samples == (1,)
    assert caught.value.report.status.tolist() == [0, int(ik.Status.INFEASIBLE)]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, ValueError, "parameter p is missing: the layer got None for it"),
        ("three", TypeError, "parameter p got a str, not a tensor"),
        ({"p": 1}, TypeError, "parameter p got a dict, not a tensor"),
        ([torch.ones(2)], TypeError, r"parameter p got a list, not a tensor: .* one by one, layer\(a, b\)"),
    ],
)
def test_what_is_no_tensor_is_named(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        relu()(value)
    np.testing.assert_allclose(relu()([1.0, -1.0, 2.0])[0], [1.0, 0.0, 2.0], atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- policies
def test_every_policy_of_the_core_is_one_here() -> None:
    assert extend.POLICIES == ("raise", "warn", "ignore", "nan")
    low, x = cp.Parameter(name="low"), cp.Variable()
    problem = cp.Problem(cp.Minimize(cp.square(x)), [x >= low, x <= 1])
    value = torch.tensor([0.5, 3.0], dtype=F64, requires_grad=True)
    for policy in ("warn", "ignore", "nan"):
        layer = ConvexLayer(problem, [low], [x], on_failure=policy)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (found,) = layer(value)
        assert [w.category for w in said] == ([ik.ConvergenceWarning] if policy == "warn" else [])
        assert all(w.filename == __file__ for w in said)
        assert found.isnan().tolist() == [False, True], "an infeasible program has no point, whatever the policy"
        (grad,) = torch.autograd.grad(found[0], value)
        torch.testing.assert_close(grad, torch.tensor([1.0, 0.0], dtype=F64))
    with pytest.raises(ProgramError):
        ConvexLayer(problem, [low], [x], on_failure="raise")(value)


@pytest.mark.parametrize("transformed", [False, True])
def test_a_point_that_is_not_good_enough_passes_where_that_was_asked_for(transformed: bool) -> None:
    p = 4 * torch.ones(2, 6, dtype=F64)
    p[1] = 0.01
    for policy, passes in (("ignore", True), ("nan", False)):
        layer = curved(solver="SCS", solver_args={"max_iters": 3}, on_failure=policy)
        (found,) = torch.func.vmap(layer)(p) if transformed else layer(p)
        assert layer.solution.converged.tolist() == [False, True]
        assert bool(found[0].isfinite().all()) is passes and bool(found[1].isfinite().all())


# ------------------------------------------------------------------------------------------------ forward and backward
def by_hand(seen: list[Any] | None = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``max(p, 0)`` and its pullback on arrays."""

    def forward(params: list[Any], context: Any) -> Any:
        if seen is not None:
            seen.append(context)
        return [np.maximum(params[0], 0)], {"on": params[0] > 0}

    def backward(cotangents: list[Any], context: Any) -> Any:
        assert (context.sol[0] == np.maximum(context.params[0], 0)).all()
        return [cotangents[0] * context.info["on"]], {}

    return forward, backward


@pytest.mark.parametrize("batch", [True, False])
def test_custom_method(batch: bool) -> None:
    """Value and gradient are those of the functions, which see arrays and a context; they agree with the layer's own."""
    seen: list[Any] = []
    value = (GIVEN if batch else GIVEN[0]).clone().requires_grad_()
    weight = torch.arange(1.0, 4.0, dtype=F64)
    results = []
    for options in ({"custom_method": by_hand(seen), "solver_args": {"eps": 1e-4}}, {}):
        (found,) = relu(**options)(value)
        results.append((found, *torch.autograd.grad((found * weight).sum(), value)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-9)
    context = seen[0]
    assert context.batch is batch and context.batch_size == (2 if batch else 1) and context.batch_sizes == [2 * batch]
    assert context.solver_args == {"eps": 1e-4} and context.solve_and_derivative and not context.gp
    assert relu(custom_method=by_hand())(GIVEN.float())[0].dtype == torch.float32


def test_custom_method_refuses_what_it_cannot_do() -> None:
    layer, value = relu(custom_method=by_hand()), GIVEN[0].clone().requires_grad_()
    with pytest.raises(ik.CapabilityError, match=r"first derivatives by backward.*second derivatives"):
        torch.autograd.grad(layer(value)[0].sum(), value, create_graph=True)
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.vmap):
        with pytest.raises(ik.CapabilityError, match=r"first derivatives by backward.*torch\.func"):
            transform(lambda p: layer(p)[0].sum())(GIVEN if transform is torch.func.vmap else GIVEN[0])
    with pytest.raises(ik.CapabilityError, match="one batch dimension"):
        layer(GIVEN[None])
    with pytest.raises(TypeError, match="pair of functions"):
        relu(custom_method=by_hand()[0])
    forward, backward = by_hand()
    with pytest.raises(ValueError, match=r"forward of custom_method returned arrays of shapes \[\(1,\)\].*\[\(3,\)\]"):
        relu(custom_method=(lambda p, c: ([np.zeros(1)], {}), backward))(value)
    with pytest.raises(ValueError, match="backward of custom_method must return two things"):
        relu(custom_method=(forward, lambda g, c: g))(value)[0].sum().backward()


# ------------------------------------------------------------------------------------------------- kinks and duplicates
@pytest.mark.parametrize(
    ("v", "slope"), [([2.0, 0.0, 0.0], 1.0), ([-2.0, 0.0, 0.0], 0.0), ([2.0, 1e-9, 0.0], 1.0)], ids=str
)
@pytest.mark.parametrize("mu", [0.0, 1e-6])
def test_derivative_of_the_second_order_projection_on_its_axis(v: list[float], slope: float, mu: float) -> None:
    """Inside the cone the projection is the identity, and its derivative too, also where ``x = 0``."""
    J = torch.func.jacrev(lambda v: cones.project_second_order(v, mu))(torch.tensor(v, dtype=F64))
    torch.testing.assert_close(J, slope * torch.eye(3, dtype=F64), rtol=0, atol=1e-6)


def test_the_dual_of_a_norm_on_its_axis() -> None:
    """``min |x - p| + |x - c|^2 / 20``: the kink at ``p`` holds ``x``, so that it moves with ``p``; also where ``c = p``."""
    p, c, x = cp.Parameter(2), cp.Parameter(2), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.norm(x - p) + 0.05 * cp.sum_squares(x - c))), [p, c], [x])
    at, eye = torch.tensor([0.3, -0.2], dtype=F64), torch.eye(2, dtype=F64)
    for other in (at, at + 0.1):
        by_p, by_c = torch.func.jacrev(lambda p, c: layer(p, c)[0], argnums=(0, 1))(at, other)
        torch.testing.assert_close(by_p, eye, rtol=0, atol=1e-7)
        torch.testing.assert_close(by_c, 0 * eye, rtol=0, atol=1e-7)


def test_at_a_kink_all_ways_take_the_same_side() -> None:
    """``x = max(p, b)`` at ``p = b = 0`` exactly: the derivatives in ``p`` and ``b`` add up to one, by every mode."""
    p, b, x = cp.Parameter(), cp.Parameter(), cp.Variable()
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.square(x - p)), [x >= b]), [p, b], [x])
    zero = [torch.zeros((), dtype=F64, requires_grad=True) for _ in range(2)]
    eager = torch.autograd.grad(layer(*zero)[0], zero)
    f = lambda p, b: layer(p, b)[0]  # noqa: E731
    plain = [z.detach() for z in zero]
    ways = [eager, torch.func.jacrev(f, (0, 1))(*plain), torch.func.jacfwd(f, (0, 1))(*plain)]
    for by_p, by_b in ways:
        assert float(by_p + by_b) == pytest.approx(1.0, abs=1e-9)
        assert float(by_b) == pytest.approx(float(eager[1]), abs=1e-9)


def test_one_table_of_ends() -> None:
    clarabel = pytest.importorskip("clarabel")
    named = {name for name in dir(clarabel.SolverStatus) if name[0].isupper()}
    assert set(extend.CLARABEL_ENDS) <= named
    for table in (extend.CLARABEL_ENDS, extend.DAQP_ENDS, extend.SCS_ENDS):
        assert [end for end in table.values()].count(ik.Status.CONVERGED) == 1, "almost solved is not solved"
