"""No function of torch makes a derivative wrong without a word: each is asked inside a fixed point, in every mode.

Where torch's own rule is wrong another takes its place (:mod:`implicitkit.foundation.faithful`), or an error or a warning
says so.  The oracle are central differences of the plain iteration.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik
from implicitkit.foundation import autodiff, faithful
from implicitkit.foundation.faithful_factors import FACTORS, IN_ANY_MODE
from implicitkit.rule import hidden_dependence
from tests.tables.torch_functions import table

AT = [0.2, -0.3, 0.5]
FIRST = ("backward", "jacfwd", "jacrev", "vmap of grad")
#: torch's rules of these are wrong, or right up to some order only
WRONG = [
    "F.layer_norm",
    "F.layer_norm_w",
    "F.batch_norm",
    "F.instance_norm",
    "logcumsumexp",
    "complex.logcumsumexp",
    "scatter_reduce.prod",
    "scatter_reduce_x.prod",
    "select_scatter",
    "sparse_sum",
    "special.airy_ai",
    "special.bessel_j0",
    "special.cheb_t",
    "linspace_t",
    "la.solve",
    "la.det",
    "la.slogdet",
    "logdet",
    "lu_solve",
    "complex.solve",
    "la.eigvals",
]


pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:There is a performance drop")


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _names() -> list[str]:
    return list(table())


def _problem(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A number that depends on three by a fixed point, by the library and by the plain iteration."""
    seeded = torch.Generator().manual_seed(1)
    g, off = table()[name]
    about = torch.rand(12, generator=seeded) * 0.8 - 0.4 + off
    A, B = torch.randn(12, 2, generator=seeded) * 0.15, torch.randn(12, 3, generator=seeded) * 0.3
    v = g(about + B @ torch.tensor(AT)).reshape(-1).detach()  # a cell has weights of its own
    W = torch.randn(2, len(v), generator=seeded)
    W = W * (0.2 / (1 + W.norm() * (1 + v.abs().max())))
    sums = torch.tensor([1.0, 0.7])

    def f(z: Tensor, p: Tensor) -> Tensor:
        return 0.3 * torch.sin(z) + p[:2] + W @ g(about + A @ z + B @ p).reshape(-1)

    def plain(p: Tensor) -> Tensor:
        z = torch.zeros(2)
        with torch.no_grad():
            for _ in range(200):
                z, before = f(z, p), z
                if torch.equal(z, before):
                    break
        return (z * sums).sum()

    def value(p: Tensor) -> Tensor:
        return (ik.fixed_point(f, torch.zeros(2), (p,), rtol=1e-13, atol=1e-14, max_steps=400).value * sums).sum()

    return value, plain


def _differences(f: Callable[[Tensor], Tensor], p: Tensor, h: float) -> Tensor:
    return torch.stack([(f(p + h * e) - f(p - h * e)) / (2 * h) for e in torch.eye(len(p))])


def _backward(f: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    q = p.clone().requires_grad_()
    f(q).backward()
    assert q.grad is not None
    return q.grad


def _wrong(name: str) -> list[str]:
    """The modes in which the derivatives of this function are wrong, and nothing says so."""
    hidden_dependence._asked.clear()  # all functions of the table have one code, and few of one code are looked into
    value, plain = _problem(name)
    p = torch.tensor(AT)
    pair = torch.stack([p, p + 0.003])
    first = _differences(plain, p, 3e-5)
    modes: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], float]] = {
        "backward": (lambda: _backward(value, p), lambda: first, 2e-6),
        "jacfwd": (lambda: jacfwd(value)(p), lambda: first, 2e-6),
        "jacrev": (lambda: jacrev(value)(p), lambda: first, 2e-6),
        "vmap of grad": (
            lambda: vmap(grad(value))(pair),
            lambda: torch.stack([_differences(plain, q, 3e-5) for q in pair]),
            2e-6,
        ),
    }
    second: list[Tensor] = []

    def true() -> Tensor:
        second[:] = second or [_differences(lambda q: _backward(value, q), p, 1e-4)]
        return second[0]

    for mode, how in {
        "hessian": lambda: hessian(value)(p),
        "jacrev of grad": lambda: jacrev(grad(value))(p),
        "jacfwd of jacfwd": lambda: jacfwd(jacfwd(value))(p),
        "jacrev of jacfwd": lambda: jacrev(jacfwd(value))(p),
    }.items():
        modes[mode] = (how, true, 1e-5)
    other = lambda: _differences(lambda q: _backward(value, q), pair[1], 1e-4)  # noqa: E731
    others = lambda: torch.stack([true(), other()])  # noqa: E731
    modes["vmap of hessian"] = (lambda: vmap(hessian(value))(pair), others, 1e-5)
    modes["vmap of jacrev of grad"] = (lambda: vmap(jacrev(grad(value)))(pair), others, 1e-5)
    modes["vmap of jacfwd"] = (lambda: vmap(jacfwd(value))(pair), modes["vmap of grad"][1], 2e-6)
    found = []
    for mode, (how, right, tolerance) in modes.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                got = how()
            except (
                RuntimeError,
                NotImplementedError,
                IndexError,
                ValueError,
                ik.CapabilityError,
                ik.ConvergenceError,
            ) as error:
                if mode == "backward" and not str(error):  # what is raised says something
                    found.append(mode)
                continue
        if any(issubclass(w.category, ik.ImpureFunctionWarning) for w in said):
            return []
        if not torch.allclose(got, right(), rtol=tolerance, atol=tolerance):
            found.append(f"{mode}: {got.tolist()} for {right().tolist()}")
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_of_torch(name: str) -> None:
    assert _wrong(name) == [], name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_function() -> None:
    # jumps, that of fmod within a difference of where it is asked; fake_quant's derivative is another function's by design
    unsolved = {"histc_like", "frexp", "fmod", "fake_quant"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = {name: _wrong(name) for name in _names() if name not in unsolved}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("name", ["cdist", "cdist1", "cdist_mm", "pdist"])
def test_distances_have_more_than_the_one_derivative_of_torch(name: str) -> None:
    value, _ = _problem(name)
    p = torch.tensor(AT)
    second = _differences(grad(value), p, 1e-5)
    for derivative in (hessian(value), jacrev(grad(value)), jacfwd(jacfwd(value))):
        torch.testing.assert_close(derivative(p), second, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("between", [lambda z: torch.cdist(z, z), F.pdist])
def test_a_minimum_with_distances_between_its_own_rows(between: Callable[[Tensor], Tensor]) -> None:
    x, w = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 10).view(5, 2)
    energy = lambda z, x: (z - x).square().sum() + 0.1 * (-between(z)).exp().sum()  # noqa: E731
    value = lambda x: (ik.argmin(energy, x.detach(), (x,)).value * w).sin().sum()  # noqa: E731
    y = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(value(y), y)
    far = (value(x + 1e-5 * w) - value(x - 1e-5 * w)) / 2e-5
    torch.testing.assert_close((g * w).sum(), far, rtol=1e-6, atol=1e-7)


X = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PER_CHANNEL, INDEX = torch.tensor([1.5, 0.3, -0.2, 2.0], dtype=torch.float64), torch.tensor([0, 2, 1])


def _third(norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A third derivative of a fixed point through a norm, by three reverse passes, and by differences of the second."""
    x = torch.linspace(-1, 1, 12).square().reshape(3, 4)

    def value(t: Tensor) -> Tensor:
        def f(z: Tensor, t: Tensor) -> Tensor:
            return 0.2 * norm((x + z).unsqueeze(0) * (1 + t.sin() * x))[0].sin() + t

        return ik.fixed_point(f, torch.zeros(3, 4), (t,), rtol=1e-13, atol=1e-14).value.square().sum()

    t = torch.tensor(0.4)
    second = grad(grad(value))
    return grad(second)(t), (second(t + 1e-4) - second(t - 1e-4)) / 2e-4


OTHER_NAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.layer_norm": lambda x: torch.layer_norm(x, (4,), cudnn_enable=False),
    "torch.native_layer_norm": lambda x: torch.native_layer_norm(x, [4], None, None, 1e-5)[0],
    "torch.batch_norm": lambda x: torch.batch_norm(x[0], None, None, None, None, True, 0.1, 1e-5, False).unsqueeze(0),
    "torch.native_batch_norm": lambda x: torch.native_batch_norm(x[0], None, None, None, None, True, 0.1, 1e-5)[0][
        None
    ],
    "torch.instance_norm": lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    "Tensor.scatter_reduce_": lambda x: torch.ones_like(x).scatter_reduce_(
        1, INDEX.view(1, 3, 1).expand(1, 3, 4) // 2, x, "prod"
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["layer", "batch", "instance", *OTHER_NAMES])
def test_third_derivatives_of_norms(name: str) -> None:
    norms: dict[str, Callable[[Tensor], Tensor]] = {
        "layer": lambda x: F.layer_norm(x, (4,)),
        "batch": lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).unsqueeze(0),
        "instance": F.instance_norm,
        **OTHER_NAMES,
    }
    found, true = _third(norms[name])
    assert torch.allclose(found, true, rtol=1e-5), (name, found, true)


@pytest.mark.parametrize("made", [Tensor.scatter_reduce, Tensor.scatter_reduce_], ids=lambda made: made.__name__)
def test_products_by_index_in_hessians(made: Callable[..., Tensor]) -> None:
    """Of a product of two, of one, and of two of which one is zero; torch's own tangents are those of no product."""
    places = torch.tensor([0, 0, 1, 2, 2])

    def value(products: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def solved(t: Tensor) -> Tensor:
            def f(z: Tensor, t: Tensor) -> Tensor:
                return 0.1 * products(torch.cat([t[:2], t[2:] + z.sin()])) * (1 + z.sin())

            return ik.fixed_point(f, torch.zeros(3), (t,), rtol=1e-13, atol=1e-14).value.sin().sum()

        return solved

    t = torch.tensor([0.5, 2.0, 3.0, 0.0, 1.5])
    found = hessian(value(lambda x: made(torch.ones(3), 0, places, x, "prod")))(t)
    true = hessian(value(lambda x: torch.stack([x[0] * x[1], x[2], x[3] * x[4]])))(t)
    assert torch.allclose(found, true, atol=1e-10), (found, true)


VALUES: dict[str, Callable[[], Tensor]] = {
    "layer norm": lambda: F.layer_norm(X, (4, 3), X[0], X[1], 1e-3),
    "layer norm, one number": lambda: F.layer_norm(X, (3,)),
    "batch norm": lambda: F.batch_norm(X, None, None, PER_CHANNEL, PER_CHANNEL, True, 0.1, 1e-3),
    "batch norm, as it was trained": lambda: F.batch_norm(X, PER_CHANNEL, PER_CHANNEL.exp(), training=False),
    "instance norm": lambda: F.instance_norm(X, weight=PER_CHANNEL, bias=PER_CHANNEL, eps=1e-3),
    "logcumsumexp": lambda: torch.logcumsumexp(300 * X, 1),
    "logcumsumexp of complex numbers": lambda: torch.logcumsumexp(torch.complex(X, X.flip(0)), 0),
    "products": lambda: torch.scatter_reduce(X, 2, INDEX.expand(5, 4, 3), X.flip(0), "prod"),
    "products, fewer": lambda: torch.scatter_reduce(X, 0, INDEX.expand(3, 2, 3).clone(), X, "prod", include_self=False),
    "products, many": lambda: torch.scatter_reduce(X.flatten(), 0, torch.arange(60) ** 2 % 7, X.flatten(), "prod"),
    "products, in place": lambda: X.clone().scatter_reduce_(1, INDEX.view(1, 3, 1) // 2, X.flip(0), "prod"),
    "batch norm, by torch's name": lambda: torch.batch_norm(
        X, PER_CHANNEL, 1 + PER_CHANNEL, None, None, True, 0.1, 1e-3, False
    ),
    "instance norm, by torch's name": lambda: torch.instance_norm(
        X, PER_CHANNEL, 1 + PER_CHANNEL, None, None, True, 0.1, 1e-3, False
    ),
    **{
        f"native layer norm, {i}": lambda i=i: torch.native_layer_norm(X, [4, 3], X[0], X[1], 1e-3)[i]  # type: ignore[misc]
        for i in range(3)
    },
    **{
        f"native batch norm, {i}": lambda i=i: torch.native_batch_norm(  # type: ignore[misc]
            X, PER_CHANNEL, 1 + PER_CHANNEL, None, None, True, 0.1, 1e-3
        )[i]
        for i in range(3)
    },
    "native batch norm, as it was trained": lambda: torch.native_batch_norm(
        X, None, None, PER_CHANNEL, PER_CHANNEL.exp(), False, 0.1, 1e-3
    )[0],
    "minus infinity": lambda: torch.logcumsumexp(torch.tensor([-torch.inf, -torch.inf, 1, -torch.inf, 2]), 0).exp(),
    "sums": lambda: torch.scatter_reduce(X, 1, INDEX.expand(5, 4, 3), X, "sum"),
    "a row": lambda: torch.select_scatter(X, X[:, 0].exp(), -2, -1),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_torch(name: str) -> None:
    right = VALUES[name]()
    with faithful.faithful(), faithful.mapped():
        found = VALUES[name]()
    assert torch.allclose(found, right, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_equations_and_determinants_are_those_of_torch(dtype: torch.dtype) -> None:
    A = torch.randn(4, 3, 3, dtype=dtype, generator=torch.Generator().manual_seed(2)) + torch.eye(3, dtype=dtype)
    B, LU = A[..., :2].cos(), torch.linalg.lu_factor(A)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-12)
    for left in (True, False):
        right = B if left else B.mT
        close(FACTORS[torch.linalg.solve](A, right, left=left), torch.linalg.solve(A, right, left=left))
        for adjoint in (True, False):
            found = IN_ANY_MODE[torch.linalg.lu_solve](*LU, right, left=left, adjoint=adjoint)
            close(found, torch.linalg.lu_solve(*LU, right, left=left, adjoint=adjoint))
    for vector in (B[:, :, 0], B[0, :, 0]):
        one = A if vector.ndim > 1 else A[0]
        close(FACTORS[torch.linalg.solve](one, vector), torch.linalg.solve(one, vector))
    B = B.expand(6, 4, 3, 2).transpose(0, 1)  # of which torch's lu_solve takes the factors of others
    by_hand = torch.linalg.inv(A).unsqueeze(1) @ B
    close(IN_ANY_MODE[torch.linalg.lu_solve](LU[0].unsqueeze(1), LU[1].unsqueeze(1), B), by_hand)
    singular = torch.cat([A, torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=dtype)).unsqueeze(0)])
    for of in (torch.linalg.slogdet, torch.logdet, torch.linalg.det):
        found, right = (FACTORS | IN_ANY_MODE)[of](A), of(A)
        close(
            tuple(found) if of is torch.linalg.slogdet else found,
            tuple(right) if of is torch.linalg.slogdet else right,
            equal_nan=True,
        )
    close(IN_ANY_MODE[torch.linalg.det](singular), torch.linalg.det(singular))
    with pytest.raises(torch.linalg.LinAlgError, match="Batch element 4"):
        FACTORS[torch.linalg.solve](singular, singular)


def test_equations_of_shared_matrices_and_those_that_have_no_inverse() -> None:
    torch.manual_seed(0)
    one, b = torch.eye(3), torch.randn(2, 4, 3, 2)
    own, matrix = FACTORS | IN_ANY_MODE, lambda x: 3 * one + x.outer(x.sin())
    solve = own[torch.linalg.solve]
    cases: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda x: solve(matrix(x), x[2] * b), lambda x: torch.linalg.inv(matrix(x)) @ (x[2] * b)),
        (lambda x: solve(matrix(x), b.mT, left=False), lambda x: b.mT @ torch.linalg.inv(matrix(x))),
        (
            lambda x: solve(torch.stack([matrix(x), matrix(2 * x)])[:, None], b[0]),
            lambda x: torch.stack([torch.linalg.inv(matrix(x)), torch.linalg.inv(matrix(2 * x))])[:, None] @ b[0],
        ),
        (
            lambda x: own[torch.linalg.solve_ex](matrix(x)[None, None], b).result,
            lambda x: torch.linalg.inv(matrix(x)) @ b,
        ),
        (
            lambda x: own[torch.linalg.tensorsolve](matrix(x).view(1, 3, 3), x[None], dims=(0, 2)),
            lambda x: torch.linalg.inv(matrix(x)) @ x,
        ),
        (
            lambda x: own[torch.cholesky_inverse](matrix(x).triu(), upper=True),
            lambda x: torch.linalg.inv(matrix(x).triu().mT @ matrix(x).triu()),
        ),
        (lambda x: own[torch.det](input=matrix(x)), lambda x: 9 * (3 + (x * x.sin()).sum())),
    ]
    x, weight = torch.rand(2, 3), lambda y: (y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum()
    for of, right in cases:
        wanted = torch.stack([jacrev(grad(lambda x: weight(right(x))))(x) for x in x])  # noqa: B023
        for outer in (jacrev, jacfwd):
            for inner in (jacrev, jacfwd):
                found = vmap(outer(inner(lambda x: weight(of(x)))))(x)  # noqa: B023
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    A = torch.tensor([[0.7, 2.6, 0.5], [1.8, 1.7, 1.9], [2.5, 4.3, 2.4]])  # rows: 1 + 2 = 3
    cofactors = torch.stack([torch.linalg.cross(A[i - 2], A[i - 1]) for i in range(3)])
    for matrices in (A, torch.stack([A, torch.zeros_like(A)])):  # of no inverse by some factors only, or by all
        slope = jacrev(lambda A: own[torch.det](A).sum())(matrices)
        torch.testing.assert_close(slope.view(-1, 3, 3)[0], cofactors)
    found = own[torch.linalg.solve_ex](torch.stack([A, torch.zeros_like(A)]), b[0, :2])
    assert found.info.tolist() == [0, 1] and found.result[1].isnan().all()
    for of in (torch.linalg.slogdet, torch.logdet, torch.linalg.det):
        with pytest.raises(RuntimeError, match="square"):
            own[of](A[:2])


def test_derivatives_of_factors_are_not_taken_where_torch_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``n`` directions cost ``n`` times as much as those of a solve."""
    monkeypatch.setattr(torch.linalg, "lu_factor", lambda A: pytest.fail("factors"))
    of = lambda b: FACTORS[torch.linalg.solve](torch.eye(3) + b.outer(b), b)  # noqa: E731
    torch.testing.assert_close(jacfwd(of)(torch.ones(3)), torch.eye(3) / 4 - torch.ones(3, 3) / 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer", "batch", "instance"])
def test_norms_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """As torch's: squares do not leave the range, and weights in single precision leave the dtype as it is."""
    x, weight = (300 * X + 40).to(dtype), PER_CHANNEL.float()
    norms: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: F.layer_norm(x.mT, (4,), weight, weight),
        "batch": lambda: F.batch_norm(x, None, None, weight, weight, True),
        "instance": lambda: F.instance_norm(x, weight=weight, bias=weight),
    }
    right = norms[name]()
    with faithful.faithful():
        found = norms[name]()
    assert found.dtype == right.dtype == dtype, (found.dtype, right.dtype)
    torch.testing.assert_close(found, right, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_products_and_sums_of_many_take_little_memory() -> None:
    """All pairs of 30,000 would be 7 GB."""
    x = (1 + torch.arange(30_000.0) % 3 / 1e4).requires_grad_()
    index = torch.arange(30_000) % 10_000
    with faithful.faithful():
        y = torch.logcumsumexp(x, 0), torch.scatter_reduce(torch.ones(10_000), 0, index, x, "prod")
    (g,) = torch.autograd.grad(y[0][-1], x)
    assert torch.allclose(g, torch.softmax(x.detach(), 0), rtol=1e-10)
    (g,) = torch.autograd.grad(y[1].sum(), x)
    assert torch.allclose(g * x, y[1].repeat(3), rtol=1e-12)


def test_masked_entries_of_logcumsumexp_leave_derivatives_finite() -> None:
    x = torch.tensor([-torch.inf, -torch.inf, 1.0, -torch.inf, 2.0])
    with faithful.faithful():
        H = hessian(lambda t: torch.logcumsumexp(t, 0)[2:].sum())(x)
    kept = x[[2, 4]]
    right = hessian(lambda t: 2 * t[0] + torch.logsumexp(t, 0))(kept)
    assert torch.allclose(H[[2, 4]][:, [2, 4]], right), H
    assert torch.isfinite(H).all(), H


def test_running_statistics_move_as_torch_moves_them() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    F.batch_norm(X, mean, var, training=True)
    with faithful.faithful():
        again = torch.zeros(4), torch.ones(4)
        F.batch_norm(X, *again, training=True)
    assert torch.equal(mean, again[0])
    assert torch.equal(var, again[1])


def test_errors_are_those_of_torch() -> None:
    with faithful.faithful(), pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(X, (7,))
    with faithful.faithful(), pytest.raises(RuntimeError, match="at least 1-dimensional"):
        F.layer_norm(X, ())
    with faithful.faithful(), pytest.raises(RuntimeError, match="weight"):
        F.layer_norm(X, (3,), X[0, 0, :1])
    with faithful.faithful(), pytest.raises(ValueError, match="more than 1 value"):
        F.batch_norm(X[:1, :, 0], None, None, training=True)


def test_a_lost_derivative_of_a_sparse_tensor_is_refused() -> None:
    def f(z: Tensor, t: Tensor) -> Tensor:
        return 0.3 * z.sin() + torch.sparse_coo_tensor(torch.arange(3).unsqueeze(0), t * z, (3,)).to_dense()

    def value(t: Tensor) -> Tensor:
        return ik.fixed_point(f, torch.ones(3), (t,)).value.sum()

    t = torch.tensor([0.1, 0.2, 0.3])
    assert torch.isfinite(_backward(value, t)).all()
    with pytest.raises(ik.CapabilityError, match="index_put"):
        jacfwd(value)(t)


def test_forward_mode_beside_a_sparse_matrix() -> None:
    """Which has no tangent, and of which torch cannot ask for one; captured, or given."""
    A = torch.tensor([[2.0, 0.0, 0.1], [0.0, 3.0, 0.0], [0.2, 0.0, 4.0]], dtype=torch.float64)
    b, start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    f = lambda z, b, A: A @ z + 0.1 * z**3 - b  # noqa: E731
    want = jacfwd(lambda b: ik.root(f, start, (b, A)).value)(b)
    S = A.to_sparse()
    torch.testing.assert_close(jacfwd(lambda b: ik.root(f, start, (b, S)).value)(b), want)
    torch.testing.assert_close(jacfwd(lambda b: ik.root(lambda z: f(z, b, S), start).value)(b), want)


def test_products_by_a_transposed_derivative_are_finite() -> None:
    """``J v`` of ``logcumsumexp``, whose derivative takes the logarithm of a cotangent."""
    z = torch.linspace(-1, 1, 5).unsqueeze(0)
    _, A = autodiff.linearise(lambda z: torch.logcumsumexp(z, 1), z)
    J = jacrev(lambda z: torch.logcumsumexp(z, 0))(z[0])
    assert torch.allclose(A.mv(torch.ones_like(z))[0], J.sum(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("factor", [1.3, 1.7, 2.0])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_nearest_neighbours_by_a_factor(dims: int, factor: float) -> None:
    """They are linear: torch 2.13 sends the cotangent of some back to other numbers than they were made of."""
    for n in (2, 3, 5, 8):
        x = torch.randn(1, 1, n, *[2] * (dims - 1), dtype=torch.float64)

        def picked(x: Tensor) -> Tensor:
            y = torch.nn.functional.interpolate(x, scale_factor=factor, mode="nearest")
            return y * torch.arange(1.0, y.numel() + 1, dtype=torch.float64).view_as(y)

        linear = torch.stack([picked(e.view_as(x)).sum() for e in torch.eye(x.numel(), dtype=torch.float64)])
        solve = lambda x: ik.root(lambda z, x: z - picked(x), torch.zeros_like(picked(x)), (x,)).value  # noqa: E731
        assert torch.equal(solve(x), picked(x))
        x.requires_grad_()
        (by_x,) = torch.autograd.grad(solve(x).sum(), x)
        assert torch.allclose(by_x.flatten(), linear)


def _by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


@pytest.mark.parametrize(
    "use", ["product", "newton_krylov", "units of their own", "forward mode", "Hessian", "penalty on a gradient"]
)
def test_fused_attention_has_the_products_that_solvers_take(use: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, c = (torch.randn(2, 1, 5, 4, generator=g) for _ in range(2))  # of four dimensions: torch takes a kernel
    Map = Callable[[Tensor, Tensor], Tensor]

    def of(attend: Callable[..., Tensor]) -> Map:
        return lambda z, x: 0.9 * torch.sin(attend(2 * z, z + x, z - x) + x)

    def answer(step: Map) -> Tensor:
        if use == "product":
            flat: Callable[[Tensor], Tensor] = lambda z: step(z.view_as(x), x).flatten(1)  # noqa: E731
            return autodiff.linearise(flat, x.flatten(1), fixed_point=True, of_map=True)[1].mv(c.flatten(1))

        def found(x: Tensor) -> Tensor:
            solver = use if use == "newton_krylov" else "auto"
            return ik.fixed_point(step, torch.zeros_like(x), (x,), batch_dims=1, solver=solver).value

        if use == "forward mode":
            return torch.func.jvp(found, (x,), (c,))[1]
        if use == "Hessian":
            return hessian(lambda x: (found(x) * c).sum())(x)
        if use == "penalty on a gradient":
            y = x.clone().requires_grad_()
            (first,) = torch.autograd.grad((found(y) * c).sum(), y, create_graph=True)
            return torch.autograd.grad(first.square().sum(), y)[0]
        b = torch.where(torch.arange(4) == 0, 1e-9, c) if use == "units of their own" else c
        return torch.func.grad(lambda x: (found(x) * b).sum())(x)

    fused, plain = (answer(of(attend)) for attend in (F.scaled_dot_product_attention, _by_formula))
    torch.testing.assert_close(fused, plain, rtol=1e-7, atol=1e-9)


def test_hessians_of_a_minimum_with_a_determinant() -> None:
    """They take its third derivatives, which torch has as NaN; ``det(A + z B) = 2 + 3 z + z^2``."""
    A, B = torch.diag(torch.tensor([1.0, 2.0])), torch.eye(2)
    energy = lambda z, t: (z - t).square().sum() + 0.1 * torch.linalg.det(A + z * B)  # noqa: E731
    value = lambda t: ik.argmin(energy, torch.zeros(1), (t,)).value.pow(3).sum()  # noqa: E731
    t = torch.tensor(0.7)
    z = (2 * t - 0.3) / 2.2
    for mode in (hessian(value), jacrev(grad(value))):
        assert torch.allclose(mode(t), 6 * z / 1.1**2), (mode(t), z)
