"""Sparse factors by another package: the plug, with SciPy in the other package's place, and the packages that are here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

import implicitkit as ik
from implicitkit.linear.factors.external import FactorsElsewhere

D = torch.float64
N = 300
X = torch.linspace(0.5, 1.5, N, dtype=D)


@dataclass(frozen=True)
class Other(FactorsElsewhere):
    """SuperLU of each matrix as it is, but for one."""

    name: ClassVar[str] = "other"
    package: ClassVar[str] = "scipy"
    module: ClassVar[str] = "scipy.sparse.linalg"
    asked: ClassVar[list[sp.csc_matrix]] = []

    def factorise(self, A: sp.csc_matrix) -> Any:
        self.asked.append(A)
        return sla.splu(A) if A.diagonal().min() != 0.3 else None


def needs(module: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


SOLVERS = [
    pytest.param(Other(), id="other"),
    pytest.param("cholmod", marks=needs("cvxopt")),
    pytest.param("pardiso", marks=needs("pypardiso")),
]


def solved(linear_solver: Any, x: Tensor, slope: Tensor | float = 4.5, batch_dims: int = 0, **said: Any) -> Tensor:
    """The root of ``slope z + z^3 - neighbours = x`` on a path with bonds from end to end: symmetric, and definite for
    slopes above three."""

    def f(z: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        bonds = torch.nn.functional.pad(z, (1, 1))
        return slope * z + z**3 - bonds[..., 2:] - bonds[..., :-2] - z.flip(-1) - x

    slope = torch.as_tensor(slope, dtype=D)
    problem, rule = ik.Root(f, **({"symmetric": True} | said)), ik.Implicit(linear_solver=linear_solver)
    return ik.solve(problem, torch.zeros_like(x), (x, slope), rule=rule, batch_dims=batch_dims).value


@pytest.mark.parametrize("linear_solver", SOLVERS)
def test_derivatives_are_those_of_dense_factors(linear_solver: Any) -> None:
    def loss(x: Tensor, by: Any) -> Tensor:
        return solved(by, x).square().sum()

    torch.testing.assert_close(grad(loss)(X, linear_solver), grad(loss)(X, "lu"), rtol=1e-9, atol=1e-11)
    along = lambda by: jvp(lambda x: solved(by, x), (X,), (X.cos(),))[1]  # noqa: E731
    torch.testing.assert_close(along(linear_solver), along("lu"), rtol=1e-9, atol=1e-11)
    few = lambda by: hessian(lambda s: loss(X * s[0] + s[1], by))(torch.tensor([1.0, 0.2], dtype=D))  # noqa: E731
    torch.testing.assert_close(few(linear_solver), few("lu"), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("linear_solver", [SOLVERS[0], SOLVERS[2]])
def test_rows_of_other_sizes_and_no_symmetry(linear_solver: Any) -> None:
    rows = torch.logspace(-6, 6, N, dtype=D)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return rows * (3 * z + z**3 - 0.9 * z.roll(1) + 0.5 * z.roll(7) - x)

    def root(x: Tensor, by: Any) -> Tensor:
        return ik.root(f, torch.zeros(N, dtype=D), (x,), rule=ik.Implicit(linear_solver=by)).value

    for slope in (
        lambda by: grad(lambda x: root(x, by).square().sum())(X),
        lambda by: jvp(lambda x: root(x, by), (X,), (X.cos(),))[1],
    ):
        torch.testing.assert_close(slope(linear_solver), slope("lu"), rtol=1e-8, atol=1e-10)


def test_one_factorisation_serves_every_row_of_a_jacobian() -> None:
    Other.asked.clear()
    found = jacrev(lambda x: solved(Other(), x))(X)
    assert len(Other.asked) == 1 and Other.asked[0].shape == (N, N)
    torch.testing.assert_close(found, jacrev(lambda x: solved("lu", x))(X), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("linear_solver", "slope", "said"),
    [
        pytest.param(Other(), [4.5, 0.3, 5.0], "the matrix is singular", id="other"),
        pytest.param("cholmod", [4.5, 0.3, 5.0], "not definite", marks=needs("cvxopt"), id="cholmod"),
    ],
)
def test_a_sample_without_factors_is_named_and_harms_no_other(
    linear_solver: Any, slope: list[float], said: str
) -> None:
    """The matrix of sample 1, whose solution is zero, is not definite."""
    x = (X * torch.tensor([[1.0], [0.0], [2.0]], dtype=D)).requires_grad_()
    slopes = torch.tensor(slope, dtype=D).unsqueeze(1)
    z = solved(linear_solver, x, slopes, batch_dims=1)
    with pytest.raises(ik.ConvergenceError, match=f"1 of 3 samples; worst: sample 1.*{said}"):
        torch.autograd.grad(z.square().sum() + z.sum(), x)


def test_negative_definite_blocks_have_factors_too() -> None:
    pytest.importorskip("cvxopt")
    x = X.clone().requires_grad_()

    def f(z: Tensor, x: Tensor) -> Tensor:
        return -4.5 * z - z**3 + z.flip(-1) - x

    def slope(by: str) -> Tensor:
        problem = ik.Root(f, symmetric=True)
        z = ik.solve(problem, torch.zeros_like(x), (x,), rule=ik.Implicit(linear_solver=by)).value
        return torch.autograd.grad(z.square().sum(), x)[0]

    torch.testing.assert_close(slope("cholmod"), slope("lu"), rtol=1e-9, atol=1e-11)


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(ik.CapabilityError, match="none of the Jacobian's zeros are known: say jac_sparsity="):
        torch.autograd.grad(solved(Other(), x, jac_sparsity=None).sum(), x)
    with pytest.raises(ik.CapabilityError, match="'cholmod' needs a symmetric system"):
        torch.autograd.grad(solved("cholmod", x, symmetric=False).sum(), x)
    monkeypatch.setattr(Other, "module", "no_such_module")
    with pytest.raises(ImportError, match=r"'other' needs the package scipy: pip install \"implicitkit\[other\]\""):
        torch.autograd.grad(solved(Other(), x).sum(), x)


# ---------------------------------------------------------------------------------------------------------------------
# A factorisation that the user's own solver has serves the derivative.
UNKNOWNS = 40
L = sp.diags([-1.0, 2.2, -1.0], [-1, 0, 1], shape=(UNKNOWNS, UNKNOWNS), format="csc")


def residual(z: Tensor, x: Tensor) -> Tensor:
    ends = torch.nn.functional.pad(z, (1, 1))
    return 2.2 * z - ends[2:] - ends[:-2] + z**3 - x


def newton(x: Tensor) -> tuple[np.ndarray, Any]:
    z, b = np.zeros(UNKNOWNS), x.numpy()
    for _ in range(30):
        lu = sla.splu((L + sp.diags(3 * z**2)).tocsc())
        z = z - lu.solve(L @ z + z**3 - b)
    return z, lu


class Counted:
    """SciPy's factors, and how often they are used; ``wrong`` scales what they give."""

    def __init__(self, lu: Any, wrong: float = 1.0) -> None:
        self.lu, self.wrong, self.used = lu, wrong, []

    def solve(self, b: np.ndarray, trans: str) -> np.ndarray:
        self.used.append(trans)
        return self.wrong * self.lu.solve(b, trans)


FORMS = {"object": lambda c: c, "pair": lambda c: (lambda b: c.solve(b, "UNKNOWNS"), lambda b: c.solve(b, "T"))}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [1.0, 1.5, float("nan")], ids=["right", "half wrong", "useless"])
def test_found_factorisation_serves_the_derivative(form: str, wrong: float) -> None:
    counted: list[Counted] = []

    @ik.implicit(ik.Root(residual))
    def layer(z0: Tensor, x: Tensor) -> ik.Found:
        z, lu = newton(x)
        counted.append(Counted(lu, wrong))
        return ik.Found(z, factorisation=FORMS[form](counted[-1]))

    x = torch.linspace(0.5, 2, UNKNOWNS, dtype=D)
    z, _ = newton(x)
    J = torch.from_numpy((L + sp.diags(3 * z**2)).toarray())
    want = torch.linalg.inv(J)
    y = x.clone().requires_grad_()
    out = layer(torch.zeros(UNKNOWNS, dtype=D), y)
    (g,) = torch.autograd.grad(out.sum(), y)
    torch.testing.assert_close(g, want.sum(0), rtol=1e-8, atol=1e-10)
    assert "T" in counted[-1].used
    torch.testing.assert_close(
        jacrev(lambda t: layer(torch.zeros(UNKNOWNS, dtype=D), t))(x), want, rtol=1e-8, atol=1e-10
    )
    both = vmap(lambda t: layer(torch.zeros(UNKNOWNS, dtype=D), t))(torch.stack([x, x + 1]))
    torch.testing.assert_close(both[0], torch.from_numpy(z), rtol=1e-8, atol=1e-10)


def test_what_is_no_factorisation_is_refused() -> None:
    @ik.implicit(ik.Root(residual))
    def layer(z0: Tensor, x: Tensor) -> ik.Found:
        return ik.Found(newton(x)[0], factorisation=3)

    with pytest.raises(TypeError, match="solve\\(b, trans\\)"):
        layer(torch.zeros(UNKNOWNS, dtype=D), torch.ones(UNKNOWNS, dtype=D))


@pytest.mark.parametrize("wrong", [1.0, float("nan")], ids=["right", "useless"])
@pytest.mark.parametrize("mode", ["loop", "native"])
@pytest.mark.parametrize("batch", [1, 3])
def test_black_boxes_hand_over_theirs(batch: int, mode: str, wrong: float) -> None:
    counted: list[Counted] = []

    def find(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
        points, factors = [], []
        for row in range(len(z0) if mode == "native" else 1):
            z = np.zeros(UNKNOWNS)
            for _ in range(30):
                everything = torch.from_numpy(z).expand_as(z0) if mode == "native" else torch.from_numpy(z)
                at, J = f(everything), f.jacobian(everything)
                lu = sla.splu(sp.csc_matrix((J[row] if mode == "native" else J).numpy()))
                z = z - lu.solve((at[row] if mode == "native" else at).numpy())
            points.append(torch.from_numpy(z))
            factors.append(Counted(lu, wrong))
        counted.extend(factors)
        whole = torch.stack(points) if mode == "native" else points[0]
        return ik.Found(whole, factorisation=factors if len(z0) > 1 and mode == "native" else factors[0])

    solver = ik.extend.BlackBox(find, name="by_hand", solves="root", batch=mode)
    x = torch.stack([torch.linspace(0.5, 2, UNKNOWNS, dtype=D) + i for i in range(batch)]).requires_grad_()
    function = lambda z, x: torch.stack([residual(a, b) for a, b in zip(z, x, strict=True)])  # noqa: E731
    z = ik.root(function, torch.zeros(batch, UNKNOWNS, dtype=D), (x,), solver=solver, batch_dims=1).value
    (g,) = torch.autograd.grad(z.sum(), x)
    for i in range(batch):
        J = torch.from_numpy((L + sp.diags(3 * z[i].detach().numpy() ** 2)).toarray())
        torch.testing.assert_close(g[i], torch.linalg.inv(J).sum(0), rtol=1e-8, atol=1e-10)
    assert all("T" in one.used for one in counted[-batch:])
