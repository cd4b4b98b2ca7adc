"""A factorisation that the user's own solver has serves the derivative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.func import jacrev, vmap

import implicitkit as ik

D = torch.float64
N = 40
L = sp.diags([-1.0, 2.2, -1.0], [-1, 0, 1], shape=(N, N), format="csc")


def residual(z: Tensor, x: Tensor) -> Tensor:
    ends = torch.nn.functional.pad(z, (1, 1))
    return 2.2 * z - ends[2:] - ends[:-2] + z**3 - x


def newton(x: Tensor) -> tuple[np.ndarray, Any]:
    z, b = np.zeros(N), x.numpy()
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


FORMS = {"object": lambda c: c, "pair": lambda c: (lambda b: c.solve(b, "N"), lambda b: c.solve(b, "T"))}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [1.0, 1.5, float("nan")], ids=["right", "half wrong", "useless"])
def test_found_factorisation_serves_the_derivative(form: str, wrong: float) -> None:
    counted: list[Counted] = []

    @ik.implicit(ik.Root(residual))
    def layer(z0: Tensor, x: Tensor) -> ik.Found:
        z, lu = newton(x)
        counted.append(Counted(lu, wrong))
        return ik.Found(z, factorisation=FORMS[form](counted[-1]))

    x = torch.linspace(0.5, 2, N, dtype=D)
    z, _ = newton(x)
    J = torch.from_numpy((L + sp.diags(3 * z**2)).toarray())
    want = torch.linalg.inv(J)
    y = x.clone().requires_grad_()
    out = layer(torch.zeros(N, dtype=D), y)
    (g,) = torch.autograd.grad(out.sum(), y)
    torch.testing.assert_close(g, want.sum(0), rtol=1e-8, atol=1e-10)
    assert "T" in counted[-1].used
    torch.testing.assert_close(jacrev(lambda t: layer(torch.zeros(N, dtype=D), t))(x), want, rtol=1e-8, atol=1e-10)
    both = vmap(lambda t: layer(torch.zeros(N, dtype=D), t))(torch.stack([x, x + 1]))
    torch.testing.assert_close(both[0], torch.from_numpy(z), rtol=1e-8, atol=1e-10)


def test_what_is_no_factorisation_is_refused() -> None:
    @ik.implicit(ik.Root(residual))
    def layer(z0: Tensor, x: Tensor) -> ik.Found:
        return ik.Found(newton(x)[0], factorisation=3)

    with pytest.raises(TypeError, match="solve\\(b, trans\\)"):
        layer(torch.zeros(N, dtype=D), torch.ones(N, dtype=D))


@pytest.mark.parametrize("wrong", [1.0, float("nan")], ids=["right", "useless"])
@pytest.mark.parametrize("mode", ["loop", "native"])
@pytest.mark.parametrize("batch", [1, 3])
def test_black_boxes_hand_over_theirs(batch: int, mode: str, wrong: float) -> None:
    counted: list[Counted] = []

    def find(f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> ik.Found:
        points, factors = [], []
        for row in range(len(z0) if mode == "native" else 1):
            z = np.zeros(N)
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
    x = torch.stack([torch.linspace(0.5, 2, N, dtype=D) + i for i in range(batch)]).requires_grad_()
    function = lambda z, x: torch.stack([residual(a, b) for a, b in zip(z, x, strict=True)])  # noqa: E731
    z = ik.root(function, torch.zeros(batch, N, dtype=D), (x,), solver=solver, batch_dims=1).value
    (g,) = torch.autograd.grad(z.sum(), x)
    for i in range(batch):
        J = torch.from_numpy((L + sp.diags(3 * z[i].detach().numpy() ** 2)).toarray())
        torch.testing.assert_close(g[i], torch.linalg.inv(J).sum(0), rtol=1e-8, atol=1e-10)
    assert all("T" in one.used for one in counted[-batch:])
