"""Python's numbers in the function of a solve, in float32 and forward mode: torch's tangents of ``0.5 * s`` are float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vjp
from torch.testing import assert_close

import implicitkit as ik
from implicitkit.foundation.numbers_in_forward_mode import NUMBERS

A = torch.tensor([[1.0, 0.3, 0.0], [0.2, 0.9, -0.4], [0.1, 0.0, 1.2]])


def _half(z: Tensor, b: Tensor) -> Tensor:
    return 0.5 * (A.to(z) @ z - b).square().sum() + (z**4).sum() / 10


SOLVES: dict[str, Callable[[Tensor], Tensor]] = {
    "free": lambda b: ik.argmin(_half, torch.zeros_like(b), (b,)).value,
    "bounds": lambda b: ik.argmin(_half, torch.zeros_like(b), (b,), bounds=(-1.0, 0.4)).value,
    "simplex": lambda b: ik.argmin(_half, torch.full_like(b, 1 / 3), (b,), project=ik.project.simplex()).value,
    "equality": lambda b: (
        ik.argmin(
            _half, torch.zeros_like(b), (b,), constraints=[ik.Equality(lambda z, b: 2.0 * (A.to(z) @ z)[:1] - 1.0)]
        ).value
    ),
    "inequality": lambda b: (
        ik.argmin(
            _half, torch.zeros_like(b), (b,), constraints=[ik.Inequality(lambda z, b: 0.5 * z.sum()[None] - 0.2)]
        ).value
    ),
    "prox": lambda b: ik.argmin(_half, torch.zeros_like(b), (b,), prox=ik.prox.l1(0.1)).value,
    "beside what torch derives wrongly": lambda b: (
        ik.argmin(
            lambda z, b: _half(z, b) + torch.logcumsumexp(z, 0)[-1], torch.zeros_like(b), (b,), bounds=(-1.0, 0.4)
        ).value
    ),
    "operands by name": lambda b: (
        ik.root(
            lambda z, b: torch.add(other=z / 2, input=torch.mul(input=z.sum(), other=0.5) * (A.to(z) @ z)) - b, b, (b,)
        ).value
    ),
    "root": lambda b: ik.root(lambda z, b: 0.5 * z.sum() * (A.to(z) @ z) + z / 2 - b, b, (b,)).value,
    "fixed point": lambda b: (
        ik.fixed_point(
            lambda z, b: torch.tanh(0.3 * (z * b).sum() + 0.5) * (A.to(z) @ b) / 4.0, torch.zeros_like(b), (b,)
        ).value
    ),
    "least squares": lambda b: (
        ik.least_squares(lambda z, b: A.to(z) @ (0.5 * z.sum() + z) - b, torch.zeros_like(b), (b,)).value
    ),
}
TRANSFORMS: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "jacfwd": jacfwd,
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "hessian of half the square": lambda f: hessian(lambda b: 0.5 * f(b).square().sum()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("solve", SOLVES)
def test_derivatives_have_the_precision_of_what_they_are_of(solve: str, transform: str) -> None:
    b = torch.tensor([0.9, -0.2, 0.5])
    found = TRANSFORMS[transform](SOLVES[solve])(b)
    assert found.dtype == torch.float32
    assert_close(found.double(), TRANSFORMS[transform](SOLVES[solve])(b.double()), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "__mul__", "__radd__", "__truediv__", "multiply"])
@pytest.mark.parametrize("number", [0.5, 0.5j], ids=["real", "complex"])
def test_a_number_is_of_the_precision_of_the_tensor_beside_it(name: str, number: complex) -> None:
    function = getattr(torch.Tensor, name)
    x = torch.tensor([0.3, 0.8], dtype=torch.complex64 if isinstance(number, complex) else torch.float32)

    def pulled(instead: Callable[..., Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def both(t: Tensor) -> tuple[Tensor, Tensor]:  # the value, and the cotangent that is handed back
            value, pull = vjp(lambda x: instead(x.sum() * x.sum(), number), t * x)
            return value, pull(t)[0]

        return both

    one = torch.ones_like(x[0])
    values, moved = jvp(pulled(NUMBERS[function]), (one,), (one,))
    truth = jvp(pulled(function), (one,), (one,))
    assert all(t.dtype == x.dtype for t in (*values, *moved))
    assert any(t.dtype != x.dtype for t in truth[1])  # torch's own, and why this is: if not, it may go
    for found, want in zip((*values, *moved), (*truth[0], *truth[1]), strict=True):
        assert_close(found, want.to(x.dtype))


def test_operands_may_be_given_by_name() -> None:
    s, x = torch.tensor(0.3), torch.tensor([1.0, 2.0])
    add, sub, rsub = NUMBERS[torch.add], NUMBERS[torch.Tensor.sub], NUMBERS[torch.Tensor.__rsub__]
    assert float(add(input=s, other=0.5)) == float(add(other=0.5, input=s)) == float(torch.add(s, 0.5))
    assert float(sub(s, other=0.5, alpha=2)) == float(s.sub(0.5, alpha=2)) and float(rsub(s, 0.5)) == float(0.5 - s)
    assert torch.equal(add(x, x2=x), x + x)  # NumPy's name for it is torch's business


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_those_of_torch_where_the_precision_cannot_hold_the_number(dtype: torch.dtype) -> None:
    """As ``s / 1e5`` is in half precision, and ``s / 1e39`` in single."""
    s, times, into = torch.tensor(3.1, dtype=dtype), NUMBERS[torch.Tensor.mul], NUMBERS[torch.Tensor.mul_]
    eps = torch.finfo(dtype).eps  # once more rounded, as torch's ``c / s`` is by way of ``1 / s``
    for c in (1e5, 1e-9, 1e39, -1e39, 0.1, float("inf"), float("nan")):
        for name in ("__truediv__", "__rtruediv__", "__mul__", "__rsub__"):
            function = getattr(torch.Tensor, name)
            assert_close(NUMBERS[function](s, c), function(s, c), rtol=eps, atol=0, equal_nan=True)
        assert_close(times(s, 1e4) * s, (s * 1e4) * s, rtol=0, atol=0)
        assert_close(into(s.clone(), c), s.clone().mul_(c), rtol=0, atol=0, equal_nan=True)
    b = torch.tensor([3.0, 2.0], dtype=dtype)
    solve = lambda b: ik.root(lambda z, b: z - ((b.sum() * 1000) / 1e5) * b, torch.zeros_like(b), (b,)).value  # noqa: E731
    found = jacfwd(solve)(b)
    assert found.dtype == dtype
    assert_close(found.float(), torch.tensor([[0.08, 0.03], [0.02, 0.07]]), rtol=1e-2, atol=0)
