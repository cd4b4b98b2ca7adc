"""Residuals that are zero only because a number on the way there has overflowed: no solution."""

import pytest
import torch

import implicitkit as ik

#: name -> residual without a zero, whose ``z^2`` or ``exp(z)`` is infinite far out
OVERFLOW = {
    "(1 + z^2)^-0.05": lambda z: (1 + z * z) ** -0.05,
    "1 / log(log(z^2 + 20))": lambda z: 1 / torch.log(torch.log(z * z + 20)),
    "exp(z)^-0.01": lambda z: torch.exp(z) ** -0.01,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OVERFLOW)
def test_a_zero_that_is_an_overflow(name, dtype):
    """At a point where it is zero to the last bit, beside samples that have a root, one of them a plateau's."""
    far = {"exp(z)^-0.01": 2000.0}.get(name, torch.finfo(dtype).max ** 0.6)
    z0 = torch.tensor([[far], [far], [1.0], [7.0]], dtype=dtype)
    kind = torch.tensor([[0], [0], [1], [2]], device="cpu")

    def residual(z, kind):
        cut = torch.relu(6.0 - z)  # zero from there on, as it says
        return torch.where(kind == 0, OVERFLOW[name](z), torch.where(kind == 1, z**3 - 2, cut))

    found = ik.root(residual, z0, (kind,), batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinities_that_are_meant(dtype):
    """A mask's are there on both sides of a jump, which is a plateau then."""
    mask = torch.tensor([0.0, -torch.inf], dtype=dtype)

    def residual(z):
        share = torch.softmax(torch.stack([z[0], z[0]]) + mask, 0)[0]
        return torch.where(z > 6, 0.0, share * (z + 1) ** 2)

    found = ik.root(residual, torch.full((1,), 7.0, dtype=dtype))
    assert found.value.item() == 7.0
