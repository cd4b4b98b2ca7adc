"""What the plugin assumes of cvxpy's inside, and what it promises to users of cvxpylayers."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConvexLayer, compat  # noqa: E402
from implicitkit_cvxpy.cones import Cones, semidefinite  # noqa: E402

PLUGIN = Path(compat.__file__).parent
F64 = torch.float64


# --------------------------------------------------------------------------------------------------- cvxpy's inside
def test_this_release_of_cvxpy_is_one_that_was_tested() -> None:
    assert compat.tested_version(), (
        f"cvxpy {cp.__version__} is outside {compat.TESTED}: run this file, then widen the range"
    )
    assert compat.tested_version("1.9.0") and not compat.tested_version("1.10.2") and not compat.tested_version("1.8.1")


def test_another_release_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TESTED", ("1.0", "1.1"))
    p, x = cp.Parameter(), cp.Variable()
    with pytest.warns(RuntimeWarning, match=r"tested with cvxpy >= 1\.0, < 1\.1"):
        compat.canonicalise(cp.Problem(cp.Minimize(cp.square(x - p))), [p], [x])


def test_only_compat_reaches_inside_cvxpy() -> None:
    """Elsewhere the plugin uses ``import cvxpy as cp`` and documented names only."""
    offenders = []
    for path in PLUGIN.rglob("*.py"):
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("cvxpy.reductions", "cvxpy.utilities", "cvxpy.cvxcore")
            ):
                offenders.append((path.name, node.module))
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and isinstance(node.value, ast.Name)
                and node.value.id == "cp"
            ):
                offenders.append((path.name, node.attr))
    assert offenders == []


def _data(problem: Any, parameters: list[Any], values: list[Any]) -> tuple[Any, ...]:
    """``P, q, A, b`` of the canonical program for these values, by plain matrix products."""
    program = compat.canonicalise(problem, parameters, problem.variables())
    flat = [np.log(v) if e.log else np.asarray(v, dtype=float) for e in program.entries for v in [values[e.parameter]]]
    p = np.concatenate([f.ravel()[e.index] for f, e in zip(flat, program.entries, strict=True)] + [[1.0]])
    n = program.n
    return (program.P @ p).reshape(n, n), program.q @ p, (program.A @ p).reshape(-1, n), program.b @ p, program


def test_data_of_a_quadratic_program() -> None:
    """``b - A x in K``: equalities first, signs, row-major order, the factor of one half."""
    Q, q, G, h, x = (
        cp.Parameter((2, 2), PSD=True),
        cp.Parameter(2),
        cp.Parameter((3, 2)),
        cp.Parameter(3),
        cp.Variable(2),
    )
    problem = cp.Problem(cp.Minimize(0.5 * cp.quad_form(x, Q) + q @ x + 7), [G @ x <= h, x[0] == 2])
    rng = np.random.default_rng(0)
    values = [np.array([[2.0, 0.5], [0.5, 1.0]]), rng.normal(size=2), rng.normal(size=(3, 2)), rng.normal(size=3)]
    P, c, A, b, program = _data(problem, [Q, q, G, h], values)
    assert program.cones == Cones(zero=1, nonneg=3)
    np.testing.assert_allclose(P, values[0])
    np.testing.assert_allclose(c, values[1])
    point = np.array([2.0, 0.3])
    slack = b - A @ point
    np.testing.assert_allclose(slack[:1], 0, atol=1e-12)
    np.testing.assert_allclose(slack[1:], values[3] - values[2] @ point)


def test_data_of_every_cone() -> None:
    """Orders inside: ``(t, x)``; the upper triangle by columns times ``sqrt 2``; ``(x, y, z)`` for the last two."""
    x = cp.Variable(3)
    X = cp.Variable((2, 2), symmetric=True)
    problem = cp.Problem(
        cp.Minimize(cp.sum(x)),
        [cp.SOC(x[2], x[:2]), X >> 0, cp.ExpCone(x[0], x[1], x[2]), cp.PowCone3D(x[0], x[1], x[2], 0.3)],
    )
    _, _, A, b, program = _data(problem, [], [])
    cones = program.cones
    assert (cones.soc, cones.psd, cones.exp, cones.power) == ((3,), (2,), 1, (0.3,))
    where = {r.shape: r for r in compat.canonicalise(problem, [], [x, X]).variables}
    w = np.zeros(program.n)
    w[where[(3,)].index] = [1.0, 2.0, 3.0]
    square = np.array([[4.0, 5.0], [5.0, 6.0]])
    w[where[(2, 2)].index] = square.ravel()
    slack = b - A @ w
    np.testing.assert_allclose(slack, [3, 1, 2, 4, 5 * 2**0.5, 6, 1, 2, 3, 1, 2, 3])


def test_values_are_left_alone() -> None:
    p, x = cp.Parameter(2), cp.Variable(2)
    rows = x >= p
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x)), [rows])
    p.value = np.array([1.0, -1.0])
    problem.solve()
    before = (x.value.copy(), rows.dual_value.copy(), p.value.copy(), problem.value)
    ConvexLayer(problem, [p], [x, rows.dual_variables[0]])
    for old, new in zip(before, (x.value, rows.dual_value, p.value, problem.value), strict=True):
        np.testing.assert_array_equal(old, new)


def _one_of_each() -> dict[str, tuple[Any, list[Any], list[Any], bool, list[Tensor]]]:
    """A linear, a quadratic, a semidefinite and a geometric program, with parameters, variables and arguments."""
    c, b, x = cp.Parameter(2), cp.Parameter(2), cp.Variable(2)
    C, X = cp.Parameter((2, 2), symmetric=True), cp.Variable((2, 2), symmetric=True)
    r, u, v = cp.Parameter(pos=True), cp.Variable(pos=True), cp.Variable(pos=True)
    two, ones = torch.tensor([1.0, 2.0], dtype=F64), torch.ones(2, dtype=F64)
    semidefinite = cp.Problem(cp.Minimize(cp.sum_squares(X - C)), [X >> 0])
    return {
        "linear": (cp.Problem(cp.Minimize(c @ x), [x >= b]), [c, b], [x], False, [two, ones]),
        "quadratic": (cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x >= b]), [c, b], [x], False, [two, ones]),
        "semidefinite": (semidefinite, [C], [X], False, [torch.diag(two) - torch.eye(2, dtype=F64) * 1.5]),
        "geometric": (cp.Problem(cp.Minimize(1 / (u * v)), [u + v <= r]), [r], [u, v], True, [two[1]]),
    }


@pytest.mark.parametrize("name", list(_one_of_each()))
def test_any_number_of_layers_on_one_problem(name: str) -> None:
    """The second is built and gives the same; the user's problem still solves, and keeps its own reduction."""
    problem, parameters, variables, gp, values = _one_of_each()[name]
    answers = [ConvexLayer(problem, parameters, variables, gp=gp)(*values) for _ in range(3)]
    for later in answers[1:]:
        for a, b in zip(answers[0], later, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.value = value.numpy()
    problem.solve(gp=gp)
    ConvexLayer(problem, parameters, variables, gp=gp)
    problem.solve(gp=gp)
    for variable, value in zip(variables, answers[0], strict=True):
        np.testing.assert_allclose(variable.value, value.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "attributes", [{"symmetric": True}, {"PSD": True}, {"diag": True}, {"sparsity": ((0, 1), (1, 1))}], ids=str
)
def test_parameters_and_variables_with_structure(attributes: dict[str, Any]) -> None:
    """The matrix comes back where it was put in, whatever cvxpy keeps of it."""
    C, X = cp.Parameter((2, 2), **attributes), cp.Variable((2, 2), **attributes)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(X - C))), [C], [X])
    value = {"diag": [[2.0, 0.0], [0.0, 3.0]], "sparsity": [[0.0, 2.0], [0.0, 3.0]]}.get(
        next(iter(attributes)), [[2.0, 0.5], [0.5, 3.0]]
    )
    given = torch.tensor(value, dtype=F64)
    torch.testing.assert_close(layer(given)[0], given, rtol=0, atol=1e-8)


# ------------------------------------------------------------------------------------------------------------- duals
def _dual_problems() -> dict[str, tuple[Any, Any, Any]]:
    """Problem, parameter and the constraint whose duals are asked for."""
    c = cp.Parameter(3)
    value = np.array([1.0, -0.5, 0.3])
    x, X, Y = cp.Variable(3), cp.Variable((2, 2), symmetric=True), cp.Variable((2, 3))
    reg = 0.5 * cp.sum_squares(x)
    fixed = np.random.default_rng(0).normal(size=(2, 3))
    rows = {
        "equality": cp.sum(x) == 1,
        "inequality": x >= np.array([0.5, 0.2, -1.0]),
        "matrix inequality": cp.reshape(x[:2], (1, 2), order="F") >= 1,
        "norm": cp.SOC(cp.Constant(0.4), x - 1),
        "exponential": cp.ExpCone(x[0], x[1], x[2] - 1),
        "power": cp.PowCone3D(x[0], x[1], x[2] - 1, 0.4),
    }
    table = {name: (cp.Problem(cp.Minimize(reg + c @ x), [row]), c, row) for name, row in rows.items()}
    table["maximise"] = (cp.Problem(cp.Maximize(-reg + c @ x), [row := x <= 0.1]), c, row)
    psd = X >> np.array([[1.0, 0.3], [0.3, 0.5]])
    table["semidefinite"] = (
        cp.Problem(cp.Minimize(cp.sum_squares(X - cp.diag(c[:2])) + c[2] * X[0, 1]), [psd]),
        c,
        psd,
    )
    columns = cp.SOC(cp.Constant(np.array([0.3, 0.2, 0.1])), Y - fixed)
    table["cones by columns"] = (cp.Problem(cp.Minimize(cp.sum_squares(Y - 2) + c @ Y[0]), [columns]), c, columns)
    for name in table:
        table[name][1].value = value
    return table


@pytest.mark.parametrize("name", list(_dual_problems()))
def test_duals_are_those_that_cvxpy_reports(name: str) -> None:
    problem, c, row = _dual_problems()[name]
    layer = ConvexLayer(problem, [c], list(row.dual_variables))
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    wanted = [np.asarray(d.value) for d in row.dual_variables]
    found = layer(torch.as_tensor(c.value, dtype=F64))
    assert max(np.abs(w).max() for w in wanted) > 1e-2, "the constraint is active, so that the test can fail"
    for d, w, f in zip(row.dual_variables, wanted, found, strict=True):
        assert tuple(f.shape) == tuple(d.shape)
        np.testing.assert_allclose(f.numpy().reshape(w.shape), w, atol=2e-6)


# --------------------------------------------------------------------------------------- cvxpylayers' documented examples
def _readme() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    n, m = 2, 3
    x, A, b = cp.Variable(n), cp.Parameter((m, n)), cp.Parameter(m)
    problem = cp.Problem(cp.Minimize(0.5 * cp.pnorm(A @ x - b, p=1)), [x >= 0])
    generator = torch.Generator().manual_seed(1)
    return problem, [A, b], [x], [torch.randn(m, n, generator=generator), torch.randn(m, generator=generator)], {}


def _geometric() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    x, y, z = (cp.Variable(pos=True) for _ in range(3))
    a, b, c = cp.Parameter(pos=True), cp.Parameter(pos=True), cp.Parameter()
    problem = cp.Problem(cp.Minimize(1 / (x * y * z)), [a * (x * y + x * z + y * z) <= b, x >= y**c])
    values = [torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.5)]
    return problem, [a, b, c], [x, y, z], values, {"gp": True}


def _relu() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    x, y = cp.Parameter(4), cp.Variable(4)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(y - x)), [y >= 0])
    return problem, [x], [y], [torch.tensor([[1.0, -2.0, 0.5, -0.1]] * 2)], {}


def _sigmoid() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    x, y = cp.Parameter(4), cp.Variable(4)
    problem = cp.Problem(cp.Minimize(-x.T @ y - cp.sum(cp.entr(y) + cp.entr(1 - y))))
    return problem, [x], [y], [torch.tensor([1.0, -2.0, 0.5, -0.1])], {}


def _sparsemax() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    x, y = cp.Parameter(4), cp.Variable(4)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - y)), [cp.sum(y) == 1, y >= 0, y <= 1])
    return problem, [x], [y], [torch.tensor([1.0, 0.8, 0.5, -0.1])], {}


def _ellipsoid() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    A, z, x, y, t = cp.Parameter((3, 3)), cp.Parameter(3), cp.Parameter(3), cp.Variable(3), cp.Variable(3)
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(x - y)), [cp.norm(A @ t) <= 1, t == (y - z)])
    return problem, [A, z, x], [y], [torch.eye(3) + 0.1, torch.zeros(3), torch.tensor([1.0, 2.0, -1.0])], {}


def _semidefinite() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    C, X = cp.Parameter((3, 3), symmetric=True), cp.Variable((3, 3), symmetric=True)
    problem = cp.Problem(cp.Minimize(cp.trace(C @ X)), [X >> 0, cp.trace(X) == 1])
    return problem, [C], [X], [torch.tensor([[1.0, 0.2, 0.1], [0.2, 0.5, 0.3], [0.1, 0.3, 2.0]])], {}


def _with_duals() -> tuple[Any, list[Any], list[Any], list[Tensor], dict[str, Any]]:
    x, c, b = cp.Variable(2), cp.Parameter(2), cp.Parameter()
    equal, bound = cp.sum(x) == b, x >= 0
    problem = cp.Problem(cp.Minimize(c @ x + 0.5 * cp.sum_squares(x)), [equal, bound])
    duals = [equal.dual_variables[0], bound.dual_variables[0]]
    return problem, [c, b], [x, *duals], [torch.tensor([1.0, -3.0]), torch.tensor(1.0)], {}


DOCUMENTED = [_readme, _geometric, _relu, _sigmoid, _sparsemax, _ellipsoid, _semidefinite, _with_duals]


@pytest.mark.parametrize("example", DOCUMENTED, ids=lambda e: e.__name__.strip("_"))
def test_documented_examples_agree_with_cvxpylayers(example: Any) -> None:
    """The same call, values to its solver's accuracy and gradients to its derivative's."""
    theirs = pytest.importorskip("cvxpylayers.torch").CvxpyLayer
    problem, parameters, variables, values, options = example()
    results = []
    for make in (theirs, ConvexLayer):
        layer = make(problem, parameters=parameters, variables=variables, **options)
        args = [v.double().requires_grad_() for v in values]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = layer(*args, solver_args={"eps": 1e-10, "max_iters": 200_000})
            sum(s.sum() for s in solution).backward()
        assert isinstance(solution, tuple)
        results.append((solution, [a.grad for a in args]))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-4, atol=2e-4)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        if example is _semidefinite:  # they put all of a symmetric gradient on the upper triangle
            a = (a + a.mT) / 2
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


def test_back_end_words_of_cvxpylayers() -> None:
    problem, parameters, variables, values, _ = _relu()
    expected = values[0].clamp_min(0)
    for options in (
        {"solve_method": "SCS", "eps": 1e-8, "max_iters": 10_000, "acceleration_lookback": 0},
        {"solve_method": "Clarabel"},
    ):
        (y,) = ConvexLayer(problem, parameters, variables, solver_args=options)(*values)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    layer = ConvexLayer(problem, parameters, variables)
    with pytest.warns(UserWarning, match=r"without an effect here \(n_jobs_forward: .*; mode: .*\): leave them out"):
        (y,) = layer(*values, solver_args={"solve_method": "SCS", "mode": "lsqr", "n_jobs_forward": 1})
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- installation
@pytest.mark.slow
def test_without_cvxpy_the_plugin_loads_and_the_layer_names_the_extra() -> None:
    script = """
        import sys
        sys.modules["cvxpy"] = None
        import implicitkit as ik
        import implicitkit_cvxpy
        assert "cone_kkt" in ik.linear_solvers()
        try:
            from implicitkit_cvxpy import ConvexLayer
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert "ConvexLayer needs cvxpy: pip install 'implicitkit[cvxpy]'" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------------- construction
@pytest.mark.parametrize("limit", [math.inf, pytest.param(2.0, marks=pytest.mark.slow)], ids=["memory", "time"])
def test_construction_of_a_large_layer_is_fast_and_small(limit: float) -> None:
    """n = 400, 320,800 scalar parameters: under 1 GB and 2 seconds of CPU time (cvxpylayers: 2.35 GB, 5.7 s)."""
    script = """
        import re, time
        import cvxpy as cp
        from implicitkit_cvxpy import ConvexLayer
        n = 400
        S, q, G, h, x = cp.Parameter((n, n)), cp.Parameter(n), cp.Parameter((n, n)), cp.Parameter(n), cp.Variable(n)
        problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ x) + q @ x), [G @ x <= h])
        start = time.process_time()
        ConvexLayer(problem, [S, q, G, h], [x])
        seconds = time.process_time() - start
        # of this program alone: what getrusage says begins with the memory of the process that started it
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
        print(seconds, int(peak[1]) / 1e6)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=True
    )
    seconds, gigabytes = map(float, out.stdout.split())
    assert seconds < limit and gigabytes < 1.0, out.stdout


@pytest.mark.parametrize("cone", ["semidefinite", "power"])
def test_a_layer_is_where_its_parameters_are_whatever_the_default_device(cone: str) -> None:
    shape, given = ((2, 2), [[1.0, 2.0], [2.0, -1.0]]) if cone == "semidefinite" else ((3,), [1.0, 2.0, 3.0])
    a, x = cp.Parameter(shape), cp.Variable(shape, symmetric=cone == "semidefinite")
    inside = x >> 0 if cone == "semidefinite" else cp.PowCone3D(x[0], x[1], x[2], 0.3)
    program = cp.Problem(cp.Minimize(cp.sum_squares(x - a)), [inside])
    found = []
    for device in ("meta", "cpu"):  # what the first of them leaves in a cache, the second meets
        if device == "meta":
            semidefinite._positions.cache_clear()
        layer, point = ConvexLayer(program, [a], [x]), torch.tensor(given, dtype=F64, requires_grad=True)
        with torch.device(device):
            (value,) = layer(point)
            found.append((value, *torch.autograd.grad(value.sum(), point)))
    torch.testing.assert_close(found[0], found[1])


def test_arrays_go_where_the_other_parameters_are_whatever_the_default_device() -> None:
    a, b, x = cp.Parameter(2), cp.Parameter(2), cp.Variable(2)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - a)), [x >= b]), [a, b], [x])
    with torch.device("meta"):
        (value,) = layer(torch.tensor([1.0, -1.0], dtype=F64, device="cpu"), np.zeros(2))
    torch.testing.assert_close(value, torch.tensor([1.0, 0.0], dtype=F64))
