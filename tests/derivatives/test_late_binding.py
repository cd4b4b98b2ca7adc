"""Loops that bind the variables of their functions anew, as marching in time does: each derivative is that of its step."""

# ruff: noqa: B023, E731

from __future__ import annotations

import abc
import collections
import functools
import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.lifting.late_binding import Bindings

D = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
X = torch.tensor([0.3, 0.7], dtype=D)


def march(solve: Callable[..., Tensor], x: Tensor, bound: bool) -> Tensor:
    """Three steps of the implicit Euler rule for ``u' = x sin u``, of lengths 0.1, 0.2, 0.3, from ``x``; ``bound``: each
    function holds what it uses by its defaults."""
    u = x
    for n in range(3):
        before, dt = u, 0.1 * (n + 1)
        if bound:
            residual = lambda v, before=before, dt=dt: v - before - dt * torch.sin(v) * x
            energy = lambda v, before=before, dt=dt: ((v - before) ** 2 / 2 + dt * torch.cos(v) * x).sum()
        else:
            residual = lambda v: v - before - dt * torch.sin(v) * x
            energy = lambda v: ((v - before) ** 2 / 2 + dt * torch.cos(v) * x).sum()
        u = solve(residual, energy, before)
    return u


def _helped(r: Any, e: Any, u: Tensor) -> Tensor:
    helper = lambda v: r(v)
    z = ik.root(lambda v: 2 * helper(v), u, **TIGHT).value
    helper = None
    return z


WAYS: dict[str, Callable[..., Tensor]] = {
    "root": lambda r, e, u: ik.root(r, u, **TIGHT).value,
    "fixed point": lambda r, e, u: ik.fixed_point(lambda v: v - r(v), u, **TIGHT).value,
    "argmin": lambda r, e, u: ik.argmin(e, u, **TIGHT).value,
    "bounds": lambda r, e, u: ik.argmin(e, u, bounds=(-9.0, 9.0), **TIGHT).value,
    "constraint": lambda r, e, u: ik.solve(
        ik.Argmin(e, constraints=[ik.Inequality(lambda v: v - 9.0)]), u, **TIGHT).value,
    "least squares": lambda r, e, u: ik.least_squares(r, u, **TIGHT).value,
    "batch": lambda r, e, u: ik.root(r, u, batch_dims=1, **TIGHT).value,
    "black box": lambda r, e, u: ik.root(r, u, solver="scipy.root.hybr").value,
    "series": lambda r, e, u: ik.fixed_point(lambda v: v - r(v), u, rule=ik.Neumann(60), **TIGHT).value,
    "partial": lambda r, e, u: ik.root(functools.partial(r), u, **TIGHT).value,
    "gradient": lambda r, e, u: ik.root(torch.func.grad(e), u, **TIGHT).value,
    "a function by a name that is unbound": _helped,
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_that_binds_its_variables_anew(way: str) -> None:
    got, want = (
        torch.autograd.functional.jacobian(lambda x: march(WAYS[way], x, bound), X, create_graph=False)
        for bound in (False, True)
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    assert (want.diagonal() > 1).all()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("transform", ["hessian", "jacfwd", "vmap of grad", "backward twice", "linearize"])
def test_under_transforms(transform: str) -> None:
    loss = lambda x, bound: (march(WAYS["root"], x, bound) ** 2).sum()
    of: dict[str, Callable[..., Tensor]] = {
        "hessian": torch.func.hessian,
        "jacfwd": torch.func.jacfwd,
        "vmap of grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, 2 * x])),
        "linearize": lambda f: lambda x: torch.func.linearize(f, x)[1](torch.ones_like(x)),  # solved when it is called
        "backward twice": lambda f: functools.partial(torch.autograd.functional.hessian, f),
    }
    got, want = (of[transform](lambda x: loss(x, bound))(X) for bound in (False, True))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


_global: Any = None


def _of_global(z: Tensor) -> Tensor:
    return torch.tanh(_global * z + 0.3)


def _by_global(ks: Tensor) -> Tensor:
    global _global
    outs = []
    for k in ks:
        _global = k
        outs.append(ik.fixed_point(_of_global, torch.zeros(1, dtype=D), **TIGHT).value)
    _global = None
    return torch.cat(outs)


class _Simulation:
    def residual(self, z: Tensor) -> Tensor:
        self.last = z  # what a function sets itself is nobody's constant
        return torch.tanh(self.k * z + 0.3) - z


def _by_attribute(ks: Tensor) -> Tensor:
    simulation, outs = _Simulation(), []
    for k in ks:
        simulation.k = k  # type: ignore[attr-defined]
        outs.append(ik.root(simulation.residual, torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(outs)


def _by_attribute_of_a_captured_object(ks: Tensor) -> Tensor:
    simulation, outs = _Simulation(), []
    for k in ks:
        simulation.k = k  # type: ignore[attr-defined]
        outs.append(ik.root(lambda z: simulation.residual(z), torch.zeros(1, dtype=D), **TIGHT).value)
    del simulation.k  # type: ignore[attr-defined]
    return torch.cat(outs)


def _counting(ks: Tensor) -> Tensor:
    count, outs = 0, []
    for k in ks:

        def map(z: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return torch.tanh(k * z + 0.3)

        outs.append(ik.fixed_point(map, torch.zeros(1, dtype=D), **TIGHT).value)
    solved = count
    both = torch.cat(outs)
    if both.requires_grad:
        torch.autograd.grad(both.sum(), ks, retain_graph=True)
        assert count > solved
    return both


def _by_itself(ks: Tensor) -> Tensor:
    outs = []
    for k in ks:

        def map(z: Tensor, more: int = 2) -> Tensor:
            return map(z, more - 1) if more else torch.tanh(k * z + 0.3)

        outs.append(ik.fixed_point(map, torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(outs)


def _of_a_list_that_grows(ks: Tensor) -> Tensor:
    found, given = [], []
    for k in ks:
        given.append(k)
        found.append(ik.fixed_point(lambda z: torch.tanh(given[-1] * z + 0.3), torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(found)


def _of_a_dict(ks: Tensor) -> Tensor:
    found, now = [], {}
    for k in ks:
        now["of"] = {"k": k}
        found.append(
            ik.fixed_point(lambda z: torch.tanh(now["of"]["k"] * z + 0.3), torch.zeros(1, dtype=D), **TIGHT).value
        )
    now["of"].clear()
    return torch.cat(found)


def _of_a_composition(ks: Tensor) -> Tensor:
    found = []
    for k in ks:
        first = ik.FixedPoint(lambda u: torch.tanh(k * u + 0.3))
        joint = first >> ik.FixedPoint(lambda v, u: 0.5 * v + 0.5 * u)
        z = ik.solve(joint, {n: torch.zeros(1, dtype=D) for n in joint.graph}, **TIGHT).value
        found.append(joint.output(z))
    return torch.cat(found)


def _of_modules(ks: Tensor) -> Tensor:
    outs = []
    for k in ks:
        cell = nn.Linear(1, 1, dtype=D)
        with torch.no_grad():
            cell.weight.fill_(1.0), cell.bias.zero_()
        outs.append(ik.fixed_point(lambda z: torch.tanh(k * cell(z) + 0.3), torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(outs)


class _Cell(nn.Module):
    """Keeps the state of the step before, as recurrent modules do, and counts."""

    calls = 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.k * z + 0.3)


def _of_an_attribute_of_a_module(ks: Tensor) -> Tensor:
    cell, found = _Cell(), []
    for k in ks:
        cell.k = k
        found.append(ik.fixed_point(cell, torch.zeros(1, dtype=D), **TIGHT).value)
    del cell.k
    both = torch.cat(found)
    if both.requires_grad:
        torch.autograd.grad(both.sum(), ks, retain_graph=True)
    return both


def _kept_by_a_helper(ks: Tensor) -> Tensor:
    """What a function that this one calls binds is nobody's constant."""
    state, found = None, []
    for k in ks:

        def prepare(z: Tensor) -> None:
            nonlocal state
            state = k * z

        def map(z: Tensor) -> Tensor:
            prepare(z)
            return torch.tanh(state + 0.3)

        found.append(ik.fixed_point(map, torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(found)


def _keep(value: Tensor) -> None:
    global _global
    _global = value


def _kept_in_a_global_by_a_helper(ks: Tensor) -> Tensor:
    found = []
    for k in ks:

        def map(z: Tensor) -> Tensor:
            _keep(k * z)
            return torch.tanh(_global + 0.3)

        found.append(ik.fixed_point(map, torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(found)


_SHIFT = 0.3


def _with_a_class(z: Tensor) -> Tensor:
    class Shift:
        by = _SHIFT

    return torch.tanh(_global * z + Shift.by + eval("_SHIFT") - _SHIFT)


def _by_a_global_beside_a_class(ks: Tensor) -> Tensor:
    global _global
    found = []
    for k in ks:
        _global = k
        found.append(ik.fixed_point(_with_a_class, torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(found)


class _Slot:
    __slots__ = ("k",)


class _WithSlot(_Slot):
    def map(self, z: Tensor) -> Tensor:
        return torch.tanh(self.k * z + self.shift)


def _by_a_slot(ks: Tensor) -> Tensor:
    scene, found = _WithSlot(), []
    for k in ks:
        scene.k, scene.shift = k, torch.tensor(0.3, dtype=D)
        found.append(ik.fixed_point(scene.map, torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(found)


def _of_a_cached_function(ks: Tensor) -> Tensor:
    found = []
    for k in ks:
        factor = functools.lru_cache(lambda: k)
        found.append(ik.fixed_point(lambda z: torch.tanh(factor() * z + 0.3), torch.zeros(1, dtype=D), **TIGHT).value)
    return torch.cat(found)


def _of_what_is_given_beforehand(ks: Tensor) -> Tensor:
    scene, found = _Simulation(), []
    for k in ks:
        scene.k = k  # type: ignore[attr-defined]
        ways = (
            lambda z, scene=scene: scene.residual(z),
            lambda z, *, scene=scene: scene.residual(z),
            functools.partial(_Simulation.residual, scene),
            functools.partial(lambda z, scene: scene.residual(z), scene=scene),
        )
        found.append(sum(ik.root(way, torch.zeros(1, dtype=D), **TIGHT).value for way in ways) / 4)
    return torch.cat(found)


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "a global": _by_global,
    "an attribute": _by_attribute,
    "an attribute of a captured object": _by_attribute_of_a_captured_object,
    "beside a count that the function keeps": _counting,
    "a function that calls itself": _by_itself,
    "a list that grows": _of_a_list_that_grows,
    "a dict": _of_a_dict,
    "an attribute of a module": _of_an_attribute_of_a_module,
    "a composition": _of_a_composition,
    "a module": _of_modules,
    "beside what a helper keeps": _kept_by_a_helper,
    "beside what a helper keeps in a global": _kept_in_a_global_by_a_helper,
    "a global, beside a class and eval": _by_a_global_beside_a_class,
    "a slot": _by_a_slot,
    "defaults and partials": _of_what_is_given_beforehand,
    "a cached function": _of_a_cached_function,
}


@pytest.mark.parametrize("place", PLACES)
def test_where_names_are_bound(place: str) -> None:
    """``z = tanh(k z + 0.3)`` has ``dz/dk = s z / (1 - k s)``, ``s = 1 - z^2``."""
    ks = torch.tensor([0.2, 0.8], dtype=D, requires_grad=True)
    z = PLACES[place](ks)
    s = 1 - z.detach() ** 2
    want = s * z.detach() / (1 - ks.detach() * s)
    torch.testing.assert_close(torch.autograd.grad(z.sum(), ks)[0], want)
    torch.testing.assert_close(torch.func.jacrev(PLACES[place])(ks.detach()), torch.diag(want))


def test_what_is_not_bound_anew_is_the_users_own() -> None:
    k, simulation = X, _Simulation()
    noted = Bindings(lambda z: simulation.residual(z) + k)
    assert noted.restored() is None
    k = 2 * X
    copy = noted.restored()
    at = dict(zip(copy.__code__.co_freevars, [cell.cell_contents for cell in copy.__closure__], strict=True))
    assert at["k"] is X and at["simulation"] is simulation
    assert noted.restored() is copy


class _Step(nn.Module):
    def forward(self, v: Tensor, before: Tensor) -> Tensor:
        return v - before - self.dt * (v - v**3)


def _at_rest(way: str, x: Tensor) -> Tensor:
    us, steps, step = [x], [], _Step()
    for n in range(3):
        dt, before = 0.1 * (n + 1), us[-1]
        step.dt = dt
        steps.append(dt)
        residual = {
            "entry": lambda v, before=before: v - before - steps[-1] * (v - v**3),
            "entry that is tracked": lambda v, dt=dt: v - us[-1] - dt * (v - v**3),
            "attribute of a module": lambda v, before=before: step(v, before),
        }[way]
        us.append(ik.root(residual, before.detach(), **TIGHT).value)
    return us[-1]


@pytest.mark.parametrize("way", ["entry", "entry that is tracked", "attribute of a module"])
def test_at_rest_where_the_residual_shows_no_change(way: str) -> None:
    """``v - u - h (v - v^3) = 0`` at rest, ``u = v = 1``: ``dv/du = 1 / (1 + 2 h)`` of each step, and the residual is zero
    whatever the step, or the state before, is later."""
    want, x = torch.tensor([[1 / (1.2 * 1.4 * 1.6)]], dtype=D), torch.ones(1, dtype=D)
    torch.testing.assert_close(torch.autograd.functional.jacobian(functools.partial(_at_rest, way), x), want)
    torch.testing.assert_close(torch.func.jacrev(functools.partial(_at_rest, way))(x), want)


class _Settings(dict):
    """A dict whose entries are attributes too."""

    __getattr__ = dict.__getitem__


class _AllAttributes(dict):
    """Its entries are its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__ = self


class _Shared:
    step = 0.0

    @classmethod
    def of_class(cls) -> float:
        return cls.step

    @property
    def of_global(self) -> float:
        return _step


class _Of:
    def steps(self) -> float:
        return 1.0

    def rate(self) -> float:
        return 0 * _step


class _OfOther(_Of):
    def steps(self) -> float:
        return _step * super().steps()

    def rate(self) -> float:
        return 1.0


class _Late:
    pass


class _Rate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1, dtype=D))

    def forward(self) -> Tensor:
        return self.step * self.one


class _Seen:
    def __call__(self, v: Tensor) -> Tensor:
        return v - self.before - _step * (v - v**3)


class _Kept(nn.Module):
    step = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.steps, self.by_name = types.SimpleNamespace(), [], {}

    def by_global(self) -> float:
        return _step


class _Forward(nn.Module):
    def forward(self, v: Tensor) -> Tensor:
        return v - self.before - _step * (v - v**3)


class _History(list):
    pass


class _Path(tuple):
    pass


class _Abstract(abc.ABC):  # noqa: B024
    step = 0.0


_step: Any = None
_Steps = collections.namedtuple("_Steps", "of")


def _set_global(h: Any) -> None:
    global _step
    _step = h


def _none_at_first(h: float) -> None:
    _set_global(None if h == 0.1 else h)


def _rename(kind: Any, h: float) -> None:
    """Another name in place of one: as many as before."""
    delattr(kind, next(name for name in vars(kind) if name.startswith("of_")))
    setattr(kind, f"of_{h}", h)
    kind.step = h


def _residual(of: Callable[[], float]) -> Callable[[Tensor], Any]:
    return lambda before: lambda v: v - before - of() * (v - v**3)


def _with_before(x: Any, before: Tensor) -> Any:
    x.before = before
    return x


def _holders() -> dict[str, tuple[Callable[[float], Any], Callable[[Tensor], Any]]]:
    """Where the length of a step is kept: what sets it, and what makes the residual of a step from a state."""
    steps, last, history = collections.deque(maxlen=2), collections.OrderedDict(), _History()
    some, default, entries = set(), collections.defaultdict(float), _Settings()
    named, space, shared, kept = _Steps([]), types.SimpleNamespace(), _Shared(), _Kept()
    many, shadowed = [_Shared() for _ in range(100)], _Shared()
    plain, all_, path = nn.Module(), _AllAttributes(), _Path([[]])
    renamed: Any = type("Renamed", (), {"of_": 0.0, "step": 0.0})
    derived, rates, log = _OfOther(), collections.deque([_Rate()]), {"calls": 0}
    path.one = 1.0
    Bindings(lambda: _Late)  # what it has is known from now on

    def logged(v: Tensor) -> Tensor:
        log["calls"] += 1
        return log["step"]

    def of_itself() -> float:
        return of_itself.step

    return {
        "a deque": (steps.append, _residual(lambda: steps[-1] + steps.maxlen - 2)),
        "an ordered dict": (lambda h: last.update(h=h), _residual(lambda: last["h"])),
        "a dict with a default": (
            lambda h: default.update(h=h), _residual(lambda: default["h"] + default.default_factory())),
        "a dict of the user's": (lambda h: entries.update(h=h), _residual(lambda: entries.h)),
        "a list of the user's": (history.append, _residual(lambda: history[-1])),
        "an attribute of a list": (lambda h: setattr(history, "h", h), _residual(lambda: history.h)),
        "an attribute of a dict": (lambda h: setattr(entries, "of", h), _residual(lambda: entries.__dict__["of"])),
        "an attribute that is an entry": (lambda h: setattr(all_, "h", h), _residual(lambda: all_.h * all_["h"] / all_.h)),
        "a set": (some.add, _residual(lambda: max(some))),
        "a named tuple": (named.of.append, _residual(lambda: named.of[-1])),
        "a tuple with attributes": (path[0].append, _residual(lambda: path[0][-1] * path.one)),
        "an attribute of a tuple": (lambda h: setattr(path, "h", h), _residual(lambda: path.h)),
        "an abstract class": (lambda h: setattr(_Abstract, "step", h), _residual(lambda: _Abstract.step)),
        "a class": (lambda h: setattr(_Shared, "step", h), _residual(lambda: _Shared.step)),
        "a namespace": (lambda h: setattr(space, "h", h), _residual(lambda: space.h)),
        "a class with another name": (functools.partial(_rename, renamed), _residual(lambda: renamed.step)),
        "a class, by its object": (lambda h: setattr(_Shared, "step", h), _residual(lambda: shared.step)),
        "a class, by its method": (lambda h: setattr(_Shared, "step", h), _residual(lambda: shared.of_class())),
        "an object that hides its class's": (
            lambda h: setattr(_Shared if h == 0.1 else shadowed, "step", h), _residual(lambda: shadowed.step)),
        "a class that is given it later": (lambda h: setattr(_Late, "step", h), _residual(lambda: _Late.step)),
        "a global in a method of two classes": (_set_global, _residual(lambda: derived.steps() * derived.rate())),
        "a global in a property": (_set_global, _residual(lambda: shared.of_global)),
        "a global in what is called": (_set_global, lambda before: _with_before(_Seen(), before)),
        "a global in a module": (_set_global, lambda before: _with_before(_Forward(), before)),
        "a global in a module's method": (_set_global, _residual(lambda: kept.by_global())),
        "a global that was None": (_none_at_first, _residual(lambda: 0.1 if _step is None else _step)),
        "an object in a module": (lambda h: setattr(kept.settings, "h", h), _residual(lambda: kept.settings.h)),
        "a list in a module": (kept.steps.append, _residual(lambda: kept.steps[-1])),
        "a dict in a module": (lambda h: kept.by_name.update(h=h), _residual(lambda: kept.by_name["h"])),
        "a plain module": (lambda h: setattr(plain, "h", h), _residual(lambda: plain.h)),
        "a module's class": (lambda h: setattr(_Kept, "step", h), _residual(lambda: kept.step)),
        "a module that hides its class's": (
            lambda h: setattr(_Kept if h == 0.1 else kept, "step", h), _residual(lambda: kept.step)),
        "a module that only its call reveals": (
            lambda h: setattr(rates[0], "step", h), _residual(lambda: rates[0]())),
        "the last of many objects": (lambda h: setattr(many[-1], "step", h), _residual(lambda: many[-1].step)),
        "a function's attribute": (lambda h: setattr(of_itself, "step", h), _residual(of_itself)),
        "a dict that the function writes into": (lambda h: log.update(step=h), _residual(lambda: logged(0))),
    }  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", _holders())
def test_at_rest_wherever_the_step_is_kept(name: str) -> None:
    """As above; where a number is kept that a solve has read, all derivatives read it, and afterwards it is as it was."""
    x = torch.ones(1, dtype=D, requires_grad=True)
    set_step, make = _holders()[name]
    u = x
    for n in range(3):
        set_step(0.1 * (n + 1))
        u = ik.root(make(u), u.detach(), **TIGHT).value
    (first,) = torch.autograd.grad(u, x, retain_graph=True)
    (again,) = torch.autograd.grad(u, x)
    assert float(first) == float(again) == pytest.approx(1 / (1.2 * 1.4 * 1.6))
    now = make(torch.zeros(1, dtype=D))(torch.full((1,), 2.0, dtype=D))
    torch.testing.assert_close(now, torch.tensor([2 + 0.3 * 6], dtype=D))


class _Closing(_Simulation):
    closed = 0

    def __del__(self) -> None:
        _Closing.closed += 1


class _Dice(random.Random, _Simulation):
    """Made by code in C."""


@pytest.mark.parametrize("kind", [_Closing, _Dice])
def test_what_does_something_where_it_ends_or_cannot_be_made_is_not_copied(kind: Any) -> None:
    scene, closed = kind(), _Closing.closed
    scene.k = X
    noted = Bindings(scene.residual)
    scene.k = 2 * X
    assert noted.restored() is None and _Closing.closed == closed


def test_what_is_bound_anew_between_two_derivatives() -> None:
    scene, k = _Simulation(), X
    scene.k = X  # type: ignore[attr-defined]
    noted = Bindings(lambda z: scene.residual(z) + k)
    k = 2 * X
    first = noted.restored()
    scene.k = 3 * X  # type: ignore[attr-defined]
    z = torch.ones(2, dtype=D)
    want = torch.tanh(X + 0.3) - 1 + X
    torch.testing.assert_close(first(z), torch.tanh(3 * X + 0.3) - 1 + X)
    torch.testing.assert_close(noted.restored()(z), want)


def test_what_a_march_by_a_function_of_its_own_leaves_is_freed() -> None:
    def step(before: Tensor) -> Tensor:
        return ik.fixed_point(lambda v: torch.sin(v) / 2 + before, before).value

    x = torch.zeros(2, dtype=D, requires_grad=True)
    us = [step(x)]
    us.append(step(us[0]))
    us[1].sum().backward()
    left = [weakref.ref(u) for u in us]
    us.clear()
    gc.collect()
    assert [u() for u in left] == [None, None]


@pytest.mark.parametrize("base", [object, nn.Module, abc.ABC])
def test_a_class_of_a_function_is_freed(base: Any) -> None:
    """A class leads, by its methods and attributes, to what these hold."""

    def solve() -> list[Any]:
        large, x = torch.ones(3, dtype=D), X.clone().requires_grad_()

        class Sized(base):  # type: ignore[misc]
            __slots__ = ("by_slot",)
            held = large.clone()

            def __call__(self, v: Tensor) -> Tensor:
                return v + v**3 - large[0] * self.held[0] * x

        ik.root(Sized(), X).value.sum().backward()
        return [weakref.ref(kept) for kept in (large, Sized.held, Sized)]

    left = solve()
    gc.collect()
    assert [of() for of in left] == [None] * 3


@pytest.mark.parametrize("how", ["backward", "retained and backward"])
def test_a_backward_ends_the_circle_of_a_march(how: str) -> None:
    """``v = sin(v) / 2 + before``: the function's variable holds the solution whose graph holds the function."""

    def march(x: Tensor) -> Tensor:
        u = x
        for _ in range(3):
            before = u
            u = ik.fixed_point(lambda v: torch.sin(v) / 2 + before, before).value
            left.append(weakref.ref(u))
        return u

    x, left = torch.zeros(2, dtype=D, requires_grad=True), []
    u = march(x)
    if how != "backward":
        u.sum().backward(retain_graph=True)
    u.sum().backward()
    del u
    gc.collect()
    assert [v() for v in left] == [None] * 3


@pytest.mark.parametrize("policy", ["nan", "ignore"])
def test_beside_a_sample_that_failed(policy: str) -> None:
    """``v = 0.3 sin v + b`` has ``dv/db = 1 / (1 - 0.3 cos v)``; ``v = e^v + 1`` has no solution."""
    x = torch.tensor([[0.3], [5.0]], dtype=D, requires_grad=True)
    b = x
    map = lambda v: torch.where(b > 1, torch.exp(v) + 1, 0.3 * torch.sin(v) + b)
    v = ik.fixed_point(map, torch.zeros(2, 1, dtype=D), batch_dims=1, on_failure=policy, **TIGHT).value
    b = None
    got = torch.autograd.grad(v.sum(), x)[0]
    torch.testing.assert_close(got[0], 1 / (1 - 0.3 * torch.cos(v[0].detach())))
    assert got[1] == 0
