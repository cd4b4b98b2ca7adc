"""``torch.func.linearize`` over solves: the solve is a constant of the graph, its tangent one linear solve a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, linearize, vjp, vmap

import implicitkit as ik
from implicitkit.foundation import recording
from implicitkit_deq import DEQ, cells

pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's, of any captured tensor
D = torch.float64
AT, TANGENT, ZERO = torch.tensor([0.3, 0.7], dtype=D), torch.tensor([1.0, -2.0], dtype=D), torch.zeros(2, dtype=D)
HESSIAN = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=D)
COLUMN = torch.zeros(2, 1, dtype=D)


def _cubic(z: Tensor, t: Tensor) -> Tensor:
    return z**3 + z - t


def _halved(z: Tensor, t: Tensor) -> Tensor:
    return 0.5 * torch.tanh(z) + t


def _cosh(z: Tensor, t: Tensor) -> Tensor:
    return (torch.cosh(z) - z * t.tanh()).sum()


@ik.implicit(ik.Root(_cubic))
def _cardano(z0: Tensor, t: Tensor) -> Tensor:
    root = (t / 2 + (t**2 / 4 + 1 / 27).sqrt()) ** (1 / 3)
    return root - 1 / (3 * root)


def _masked(z: Tensor, t: Tensor) -> Tensor:
    mask = torch.zeros_like(z)
    mask[0] = 1.0  # which torch.func.linearize loses of what it records
    return z**3 + z - t * (1 + mask)


def _fit(t: Tensor, **options: Any) -> ik.CurveFit:
    x = torch.linspace(0, 2, 9, dtype=D)
    y = (1 + t[0]) * torch.exp(-(0.5 + t[1]) * x) + 0.3 * torch.sin(9 * x)
    return ik.curve_fit(lambda x, a, b: a * torch.exp(-b * x), x, y, (1.0, 1.0), **options)


def _nested(t: Tensor) -> Tensor:
    inner = lambda z: ik.root(lambda y, z: torch.sinh(y) - z, ZERO, (z,)).value  # noqa: E731
    return ik.root(lambda z, t: inner(z) - torch.asinh(t) * t, ZERO, (t,)).value


def _layer(training: bool) -> DEQ:
    torch.manual_seed(0)
    return DEQ(cells.MLP(2, 2)).double().train(training)


EVALUATED, TRAINED = _layer(training=False), _layer(training=True)


SOLVES: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda t: ik.root(_cubic, ZERO, (t.sin(),)).value.cos(),
    "captured": lambda t: ik.root(lambda z: _cubic(z, t), ZERO).value,
    "batch": lambda t: ik.root(_cubic, COLUMN, (t[:, None],), batch_dims=1).value[:, 0],
    "a sample without a root": lambda t: ik.root(
        lambda z, t: z**2 + t - 0.5, COLUMN + 0.4, (t[:, None],), batch_dims=1, on_failure="nan"
    ).value.nan_to_num()[:, 0],
    "scipy": lambda t: ik.root(_cubic, ZERO, (t,), solver="scipy.root.hybr").value,
    "black box": lambda t: _cardano(ZERO, t),
    "nested": _nested,
    "gradient": lambda t: grad(lambda t: ik.root(_cubic, ZERO, (t,)).value.square().sum())(t),
    "of a gradient": lambda t: ik.root(_cubic, ZERO, (SOLVES["gradient"](t),)).value,
    "fixed point": lambda t: ik.fixed_point(_halved, ZERO, (t,)).value,
    "neumann": lambda t: ik.fixed_point(_halved, ZERO, (t,), rule="neumann").value,
    "one step": lambda t: ik.fixed_point(_halved, ZERO, (t,), rule="one_step").value,
    "unrolled": lambda t: ik.fixed_point(_halved, ZERO, (t,), rule="unroll").value,
    "minimum": lambda t: ik.argmin(_cosh, ZERO, (t,)).value,
    "three steps": lambda t: ik.fixed_point(_halved, ZERO, (t,), rule=ik.Unroll(3)).value,
    "within bounds": lambda t: ik.argmin(_cosh, ZERO, (t,), bounds=(-0.4, 0.5)).value,
    "under a constraint": lambda t: (
        ik.argmin(_cosh, ZERO, (t,), constraints=ik.Equality(lambda z, t: z.sum() - t[0])).value
    ),
    "least squares": lambda t: ik.least_squares(lambda z, t: torch.cat([_cubic(z, t), z - t]), ZERO, (t,)).value,
    "trajectory": lambda t: ik.solve(
        ik.InitialValue(lambda s, y, t: -t * y, torch.linspace(0, 1, 3, dtype=D)), ZERO + 1, (t,)
    ).value[-1],
    "program": lambda t: (
        ik.solve(ik.QuadraticProgram(HESSIAN, -t, None, None, torch.eye(2, dtype=D), ZERO + 0.25)).value
    ),
    "between": lambda t: ik.root(_cubic, None, (t[:, None],), bracket=(COLUMN - 2, COLUMN + 2), batch_dims=1).value[
        :, 0
    ],
    "fit": lambda t: _fit(t).parameters,
    "covariance": lambda t: _fit(t).covariance[0],
    "covariance, robust": lambda t: _fit(t, loss="cauchy", f_scale=0.2).covariance[0],
    "written in place": lambda t: ik.root(_masked, ZERO, (t,)).value,
    "a minimum written in place": lambda t: ik.argmin(lambda z, t: (_masked(z, t) ** 2 + z**2).sum(), ZERO, (t,)).value,
    "unrolled, filled in place": lambda t: (
        ik.fixed_point(
            lambda z, t: 0.5 * torch.tanh(z) + t * torch.empty_like(z).fill_(2.0), ZERO, (t,), rule="unroll"
        ).value
    ),
    "a repelling map": lambda t: ik.fixed_point(lambda z, t: 0.6 * (z**3 + z - t), ZERO, (t,)).value,
    "projection": lambda t: ik.project.simplex()(t),
    "DEQ": lambda t: EVALUATED(t[None])[0],
    "DEQ in training": lambda t: TRAINED(t[None])[0],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "covariance, robust")) for n in SOLVES],
)
def test_a_solve_is_linearised(name: str) -> None:
    torch.manual_seed(0)
    f = SOLVES[name]
    value, push = linearize(f, AT)
    want = [jvp(f, (AT,), (v,))[1] for v in (TANGENT, -3 * TANGENT)]
    assert bool(want[0].any())
    close = torch.testing.assert_close
    close(value, f(AT))
    close(push(TANGENT), want[0])
    close(vmap(push)(torch.stack([TANGENT, -3 * TANGENT])), torch.stack(want))


def test_a_product_takes_two_evaluations_and_no_solve() -> None:
    calls = itertools.count()  # which is not among what tells one function from another, as a number would be

    def counted(z: Tensor, t: Tensor) -> Tensor:
        next(calls)
        return _cubic(z, t)

    _, push = linearize(lambda t: ik.root(counted, ZERO, (t,)).value, AT)
    push(TANGENT)  # which looks whether the function is still the same
    before = next(calls)
    push(TANGENT)
    assert next(calls) - before - 1 == 2  # one for each Jacobian


def test_what_linearize_returns_has_a_derivative() -> None:
    _, push = linearize(lambda t: ik.root(_cubic, ZERO, (t,)).value, AT)
    torch.testing.assert_close(jacrev(push)(TANGENT), jacrev(lambda t: ik.root(_cubic, ZERO, (t,)).value)(AT))


@pytest.mark.parametrize("transform", [jacrev, lambda f: lambda t: vjp(f, t)[1](t)], ids=["jacrev", "vjp"])
def test_inside_another_transform_it_is_refused(transform: Callable[..., Any]) -> None:
    """torch gives the contents of fresh memory there: ``jacrev(lambda t: linearize(torch.sin, t)[1](t))``."""
    product = lambda t: linearize(lambda t: ik.root(_cubic, ZERO, (t,)).value, t)[1](TANGENT)  # noqa: E731
    with pytest.raises(ik.CapabilityError, match="inside another transform"):
        transform(product)(AT)


@pytest.mark.parametrize(
    "transform", [jacrev, lambda f: grad(lambda t: f(t).sum()), vmap, lambda f: vmap(f, chunk_size=1)]
)
def test_inside_a_transform_of_what_it_captures_it_is_refused(transform: Callable[..., Any]) -> None:
    product = lambda s: linearize(lambda t: ik.root(_cubic, ZERO, (s * t,)).value, AT)[1](TANGENT)  # noqa: E731
    with pytest.raises(ik.CapabilityError, match="inside another transform"):
        transform(product)(torch.ones(2, dtype=AT.dtype))


def test_transforms_inside_what_is_linearised_are_none_around_it() -> None:
    def summed(t: Tensor) -> Tensor:
        return vmap(lambda s: ik.root(_cubic, ZERO, (s * t,)).value)(torch.ones(2, dtype=t.dtype)).sum(0)

    assert torch.allclose(linearize(summed, AT)[1](TANGENT), jvp(summed, (AT,), (TANGENT,))[1])


def test_a_value_that_is_read_is_refused() -> None:
    def jumping(z: Tensor, t: Tensor) -> Tensor:
        return _cubic(z, t) if bool(t.sum() > 0) else -_cubic(z, t)

    with pytest.raises(ik.CapabilityError, match="depends on values"):
        linearize(lambda t: ik.root(jumping, ZERO, (t,)).value, AT)


FORGOTTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gradient": lambda t: grad(lambda t: ik.root(_masked, ZERO, (t,)).value.square().sum())(t),
    "pulled": lambda t: vjp(lambda s: ik.root(_masked, ZERO, (s,)).value, AT)[1](t)[0],
    "unrolled": lambda t: ik.fixed_point(lambda z, t: z - 0.2 * _masked(z, t), ZERO, (t,), rule=ik.Unroll(3)).value,
    "beside": lambda t: ik.root(lambda z, t: (_cubic(z, t), _masked(z, t)), ZERO, (t,), has_aux=True).aux,
    "covariance": lambda t: (
        ik.curve_fit(lambda x, a, b: _masked(a * x, b * x), AT.repeat(4), t.repeat(4), (1.0, 1.0)).covariance
    ),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_writes_that_torch_forgets_are_refused(name: str) -> None:
    with pytest.raises(ik.CapabilityError, match="forgets what a function writes"):
        linearize(FORGOTTEN[name], AT)


def test_a_recorder_around_linearize_is_refused() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def product(t: Tensor) -> Tensor:
        return linearize(lambda s: ik.root(_cubic, ZERO, (s,)).value, t)[1](TANGENT)

    with pytest.raises(ik.CapabilityError, match="make_fx"):
        make_fx(product)(AT)


def test_nothing_is_paused_where_nothing_is_recorded() -> None:
    assert recording.recorder() is None and not recording.paused()
    with recording.unrecorded():
        assert not recording.paused()
    assert recording.holds(AT.any()) and recording.recorded(lambda b: b, [AT], AT) is None


class _Around(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return ik.root(_cubic, ZERO, (t,)).value


def test_a_module_is_linearised_by_its_input() -> None:
    _, push = linearize(_Around(), AT)
    torch.testing.assert_close(push(TANGENT), jvp(_Around(), (AT,), (TANGENT,))[1])
