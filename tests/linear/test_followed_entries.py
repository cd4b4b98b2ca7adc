"""Entries of sparse Jacobians from one evaluation that is followed, and products with torch's sparse matrices in solves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import sparse_products
from implicitkit.sparsity import compression
from implicitkit.sparsity.accumulation import accumulated
from implicitkit.sparsity.detection import detect

D = torch.float64
N = 2100


def _edges(n: int) -> tuple[np.ndarray, np.ndarray]:
    """A graph without layers in which one node is linked to 200 others."""
    rng = np.random.default_rng(0)
    i, j = rng.integers(n, size=2 * n), rng.integers(n, size=2 * n)
    i = np.concatenate([i, np.arange(n - 1), np.zeros(200, dtype=int)])
    j = np.concatenate([j, np.arange(1, n), rng.choice(np.arange(2, n), 200, replace=False)])
    return i[i != j], j[i != j]


def _laplacian(n: int) -> sp.csr_matrix:
    i, j = _edges(n)
    A = sp.coo_matrix((np.ones(len(i)), (i, j)), shape=(n, n)).tocsr()
    A = A + A.T
    return sp.csr_matrix(sp.diags_array(np.asarray(A.sum(1)).ravel()) - A)


def _sparse(L: sp.csr_matrix, layout: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coo = L.tocoo()
        T = torch.sparse_coo_tensor(np.stack([coo.row, coo.col]), coo.data, L.shape, dtype=D).coalesce()
        return {"coo": T, "csr": T.to_sparse_csr(), "csc": T.to_sparse_csc()}[layout]


FROM, TO = (torch.from_numpy(k) for k in _edges(N))
CSR, COO = (_sparse(_laplacian(N), layout) for layout in ("csr", "coo"))
SLOPES = torch.linspace(-1, 1, N, dtype=D)


def _written_into(z: Tensor) -> Tensor:
    out = (z + 0).clone()
    out[: N // 2] *= z[N // 2 :]
    out[::3].sub_(2 * z[::3])
    return torch.tanh(out)


def _by_columns(z: Tensor) -> Tensor:
    both = torch.stack([z, z.flip(0)], 1)
    return torch.sparse.mm(CSR, both) @ torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quotients and powers": lambda z: (1 + z[FROM] ** 2) / (2 + z[TO] ** 4) - (3 - z[TO]) / 2,
    "functions of one number": lambda z: torch.sin(z) * torch.exp(z).log1p() + torch.sqrt(1 + z * z).reciprocal(),
    "others": lambda z: torch.cosh(z) - torch.asinh(z) + torch.sinh(z) + torch.nn.functional.softplus(3 * z, 2.0),
    "choices": lambda z: torch.where(SLOPES > 0, torch.sigmoid(z), -torch.atan(z).cos()),
    "sums at places": lambda z: torch.zeros(N, dtype=D).index_add(0, FROM, torch.rsqrt(2 + (z[FROM] - z[TO]) ** 2)),
    "means": lambda z: torch.cat([z[1:] * z[:-1], (z[:12].view(3, 4) ** 2).mean(1)]),
    "writing": _written_into,
    "compressed rows": lambda z: CSR @ (z * (CSR @ z)),
    "coordinates": lambda z: z * torch.mv(COO, torch.expm1(z)),
    "columns": _by_columns,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_entries_are_those_of_the_jacobian(name: str) -> None:
    """Products with random vectors tell; and of a gradient they are those of the Hessian."""
    f, g = FUNCTIONS[name], torch.Generator().manual_seed(0)
    z = torch.randn(1, N, dtype=D, generator=g)

    def gradient(y: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            return torch.autograd.grad((0.5 * f(leaf[0]) ** 2).sum(), leaf)[0]

    whole = lambda y: f(y[0]).reshape(1, -1)  # noqa: E731
    for function, product in (
        (whole, lambda v: torch.autograd.functional.jvp(whole, z, v)[1]),
        (gradient, lambda v: torch.autograd.functional.vhp(lambda y: (0.5 * f(y[0]) ** 2).sum(), z, v)[1]),
    ):
        pattern = detect(function, z).pattern
        assert pattern is not None
        values = accumulated(function, z, pattern)
        assert values is not None
        A = sp.csr_matrix((values[0], pattern.indices, pattern.indptr), shape=pattern.shape)
        v = torch.randn(1, N, dtype=D, generator=g)
        torch.testing.assert_close(torch.from_numpy(A @ v[0].numpy()), product(v)[0], rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(
    "f",
    [
        lambda z: torch.erf(z),
        lambda z: torch.sqrt(z - 0.1) * z,
        lambda z: torch.zeros_like(z).index_add(0, FROM[:N], z, alpha=2.0),
        lambda z: z ** (2 + z * z),
    ],
    ids=["no derivative", "not finite", "a factor", "a power of unknowns"],
)
def test_what_cannot_be_followed_is_nothing(f: Callable[[Tensor], Tensor]) -> None:
    z = torch.linspace(0.1, 0.9, N, dtype=D).unsqueeze(0)
    function = lambda y: f(y[0]).unsqueeze(0)  # noqa: E731
    pattern = detect(function, z).pattern
    assert pattern is not None and accumulated(function, z, pattern) is None


def test_entries_that_a_product_denies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solve goes on by products, and is right."""
    asked = []

    def wrong(function: object, z: Tensor, pattern: sp.csr_matrix) -> np.ndarray:
        asked.append(z)
        return np.ones((1, pattern.nnz))

    monkeypatch.setattr(compression, "accumulated", wrong)
    L, y = _laplacian(N), torch.linspace(-1, 1, N, dtype=D)
    found = ik.root(lambda z, y: z + CSR @ z - y, torch.zeros(N, dtype=D), (y,), solver="newton")
    assert len(asked) == 1
    torch.testing.assert_close(found.value + torch.from_numpy(L @ found.value.numpy()), y)


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_entries_that_were_followed_are_used_in_either_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of single precision a product differs from that of the entries by its own rounding."""
    by_products = []
    values = compression.Coloured.values
    monkeypatch.setattr(compression.Coloured, "values", lambda *args: (by_products.append(1), values(*args))[1])
    y, z = torch.linspace(-1, 1, N).to(dtype), torch.zeros(N, dtype=dtype)
    s = ik.argmin(
        lambda z, y: ((z - y) ** 2).sum() + (torch.cosh(z[FROM] - z[TO]) - 1).sum(), z, (y,), solver="newton_cg"
    )
    assert bool(s.converged) and not by_products


@pytest.mark.parametrize("form", ["csr", "coo", "csc", "edges"])
def test_a_fit_on_a_graph_takes_few_products_and_two_steps(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``|z - y|^2 / 2 + z'Lz`` with nodes of many links: its matrix is written down, and no product sorts it anew."""
    applied, times = [], sparse_products._applied
    monkeypatch.setattr(sparse_products, "_applied", lambda A, X: (applied.append(A.layout), times(A, X))[1])
    L, T = _laplacian(N), None if form == "edges" else _sparse(_laplacian(N), form)
    y = torch.randn(N, dtype=D, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def objective(z: Tensor, y: Tensor) -> Tensor:
        smooth = ((z[FROM] - z[TO]) ** 2).sum() if T is None else (z * (T @ z)).sum()
        return 0.5 * ((z - y) ** 2).sum() + smooth

    found = ik.argmin(objective, torch.zeros(N, dtype=D), (y,))
    weights = torch.linspace(-1, 1, N, dtype=D)
    (grad,) = torch.autograd.grad((weights * found.value).sum(), y)
    A = sp.csr_matrix(sp.identity(N) + 2 * L)
    torch.testing.assert_close(torch.from_numpy(A @ found.value.detach().numpy()), y.detach())
    torch.testing.assert_close(torch.from_numpy(A @ grad.numpy()), weights, rtol=1e-6, atol=1e-8)
    assert int(found.steps) <= 3 and found.evaluations <= 25, found
    assert (len(applied) > 0) == (form != "edges")


def test_other_products_are_left_to_torch() -> None:
    """Integers, few entries, and results that are asked for in part."""
    small, x = torch.eye(4, dtype=D).to_sparse_csc(), torch.ones(4, dtype=D)
    with sparse_products.as_they_lie(True):
        torch.testing.assert_close(small @ x, x)
        torch.testing.assert_close(torch.addmm(x[:, None], small, x[:, None], beta=2.0), 3 * x[:, None])
        big = _sparse(_laplacian(N), "csr")
        left = torch.linspace(0, 1, N, dtype=D)
        torch.testing.assert_close(left @ big, big @ left)  # symmetric
        torch.testing.assert_close(big.t().float() @ left.float(), (big @ left).float(), rtol=1e-4, atol=1e-4)


def test_rows_of_few_entries_are_coloured() -> None:
    """The conditions of a pendulum's steps, four entries a row, are shown by a few products: a followed evaluation, which
    takes as long as sixteen, made a program of 6,000 unknowns twice as dear.  A node with 200 links is worth one."""
    k, m = np.arange(2100), 4200
    rows = np.concatenate([2 * k, 2 * k + 1, 2 * k + 1, 2 * k[1:], 2 * k[1:], 2 * k[1:] + 1, 2 * k[1:] + 1])
    before = 3 * k[:-1]
    columns = np.concatenate([3 * k, 3 * k + 1, 3 * k + 2, before, before + 1, before, before + 1])
    steps = sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(m, 6300))
    conditions = sp.block_array([[sp.eye_array(6300), steps.T], [steps, None]])
    for pattern, followed in ((conditions, False), (_laplacian(N), True)):
        found = compression.coloured(pattern, followed=True)
        assert found is not None and found.accumulates == followed
