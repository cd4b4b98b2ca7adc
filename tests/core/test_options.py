"""Declared options: each requirement takes what it should, and refuses the rest by the name of the option."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import implicitkit as ik
from implicitkit.foundation import wording
from implicitkit.foundation.options import (
    Requirement,
    above,
    at_least,
    between,
    check_options,
    finite,
    flag,
    not_negative,
    number,
    one_of,
    optional,
    or_tensor,
    part,
    positive,
    tensor,
)

NAN, INF = float("nan"), float("inf")
GOOD: dict[str, tuple[Requirement, tuple[Any, ...]]] = {
    "at_least": (at_least(2), (2, 7, np.int64(3))),
    "positive": (positive(), (1, 0.1, INF, np.float32(2.0), torch.tensor(0.5))),
    "not_negative": (not_negative(), (0, 0.0, 3.5)),
    "above": (above(1), (1.5, INF)),
    "between": (between(0, 2), (1, 1.999)),
    "between, closed": (between(0, 1, closed=True), (1, 0.5)),
    "finite": (finite(), (0, -3.0)),
    "one_of": (one_of("good", "bad"), ("good", "bad")),
    "optional": (optional(at_least(1)), (None, 1)),
    "flag": (flag(), (True, False, np.True_)),
    "number": (number(), (-INF, 0, 2.5)),
    "tensor": (tensor(), (torch.ones(2), torch.ones(2, dtype=torch.int64))),
    "or_tensor": (or_tensor(positive()), (2.0, torch.ones(2), -torch.ones(2))),
    "part": (part("rule", ik.Rule), ("implicit", ik.Implicit, ik.OneStep())),
}
BAD: dict[str, tuple[Requirement, Any, type[Exception], str]] = {
    "too small": (at_least(2), 1, ValueError, "x must be at least 2, got 1"),
    "negative": (at_least(0), -1, ValueError, "x cannot be negative, got -1"),
    "not whole": (at_least(1), 2.5, TypeError, "x must be an integer, got 2.5"),
    "a truth value": (at_least(0), True, TypeError, "x must be an integer, got True"),
    "text": (positive(), "a", TypeError, "x must be a number, got 'a'"),
    "a number as text": (not_negative(), "1e-3", TypeError, "x must be a number, got '1e-3'"),
    "none": (positive(), None, TypeError, "x must be a number, got None"),
    "a vector": (positive(), torch.ones(2), TypeError, "x must be a number, got tensor"),
    "zero": (positive(), 0.0, ValueError, "x must be positive, got 0.0"),
    "not a number": (not_negative(), NAN, ValueError, "x cannot be negative, got nan"),
    "the bound": (above(1), 1, ValueError, "x must be larger than 1, got 1"),
    "outside": (between(0, 2), 2, ValueError, r"x must be in \(0, 2\), got 2"),
    "above the closed end": (between(0, 1, closed=True), 1.1, ValueError, r"x must be in \(0, 1\], got 1.1"),
    "the open end": (between(0, 1, closed=True), 0.0, ValueError, r"x must be in \(0, 1\], got 0.0"),
    "a truth value for a number": (positive(), True, TypeError, "x must be a number, got True"),
    "infinite": (finite(), INF, ValueError, "x must be finite, got inf"),
    "another word": (
        one_of("good", "bad"),
        "god",
        ValueError,
        "x must be 'good' or 'bad', got 'god'. Did you mean 'good'",
    ),
    "optional": (optional(at_least(1)), "a", TypeError, "x must be an integer or None, got 'a'"),
    "a number for a flag": (flag(), 1, TypeError, "x must be True or False, got 1"),
    "no number": (number(), NAN, ValueError, "x must not be NaN, got nan"),
    "a number for a tensor": (tensor(), 1.0, TypeError, "x must be a real tensor, got 1.0"),
    "a complex tensor": (
        or_tensor(positive()),
        torch.ones(1) * 1j,
        TypeError,
        "x must be a number or a real tensor, got",
    ),
    "a truth value for a tensor": (tensor(), torch.ones(1, dtype=torch.bool), TypeError, "x must be a real tensor"),
    "a long tensor": (
        positive(),
        torch.ones(9, 9),
        TypeError,
        r"a number, got a Tensor of torch\.float32 and shape \(9, 9\)$",
    ),
    "a long list": (positive(), [0] * 99, TypeError, "x must be a number, got a list$"),
    "the sign beside tensors": (or_tensor(positive()), -1.0, ValueError, "x must be positive, got -1.0"),
    "another part": (
        part("rule", ik.Rule),
        ik.Anderson,
        ValueError,
        "x must be the name of a rule or a configured one",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_accepts(name: str) -> None:
    requirement, values = GOOD[name]
    for value in values:
        requirement.check("x", value)


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str) -> None:
    requirement, value, error, message = BAD[name]
    with pytest.raises(error, match=message):
        requirement.check("x", value)


def test_every_option_is_checked() -> None:
    @dataclass(frozen=True)
    class Part:
        a: int = 1
        b: float = 1.0

    check_options(Part(), a=at_least(1), b=positive())
    with pytest.raises(ValueError, match="b must be positive"):
        check_options(Part(b=-1.0), a=at_least(1), b=positive())


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "anderson": (lambda: ik.Anderson(memory=2.5), TypeError, "memory must be an integer, got 2.5"),  # type: ignore[arg-type]
    "damping": (lambda: ik.Anderson(damping="a"), TypeError, "damping must be a number, got 'a'"),  # type: ignore[arg-type]
    "implicit": (lambda: ik.Implicit(rtol="x"), TypeError, "rtol must be a number or None"),  # type: ignore[arg-type]
    "neumann": (lambda: ik.Neumann(1.5), TypeError, "terms must be an integer"),  # type: ignore[arg-type]
    "unroll": (lambda: ik.Unroll(1.5), TypeError, "steps must be an integer or None"),  # type: ignore[arg-type]
    "blocks": (lambda: ik.Blocks("andersen"), ik.UnknownNameError, "Did you mean 'anderson'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_options_of_our_own_parts(name: str) -> None:
    make, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        make()


def configurable() -> Iterator[tuple[str, Any]]:
    """Every class of ours that is made with options."""
    bases = (ik.extend.Solver, ik.Rule, ik.LinearSolver, ik.project.Projection, ik.prox.Prox)
    for room in (ik, ik.linear, ik.project, ik.prox):
        for name in dir(room):
            found = getattr(room, name)
            if inspect.isclass(found) and issubclass(found, bases) and found not in bases:
                yield name, found


OPTIONS = [
    pytest.param(cls, option, id=f"{name}-{option}")
    for name, cls in dict(configurable()).items()
    for option, p in inspect.signature(cls).parameters.items()
    if p.kind is p.POSITIONAL_OR_KEYWORD
]


@pytest.mark.parametrize(("cls", "option"), OPTIONS)
def test_nonsense_is_refused_when_a_part_is_made(cls: Any, option: str) -> None:
    needed = {"method": "picard", "optimizer": torch.optim.SGD, "max_nonzero": 1, "stages": ()}
    parameters = inspect.signature(cls).parameters
    given = {n: needed.get(n, torch.ones(1)) for n, p in parameters.items() if p.default is p.empty and n != "options"}
    with pytest.raises((TypeError, ValueError)):
        cls(**given | {option: object()})


def test_there_are_options_to_check() -> None:
    assert len(OPTIONS) > 120


KINDS = {"an int": 1, "a str": "", "an object": object(), "an ndarray": np.ones(1), "a float": 1.0, "a NoneType": None}


@pytest.mark.parametrize("words", KINDS)
def test_a_type_has_its_article(words: str) -> None:
    assert wording.kind_of(KINDS[words]) == words


def test_what_the_body_of_a_subclass_says_is_a_default() -> None:
    """A dataclass would look at annotated names of decorated classes only, and ignore the rest without a word."""

    class Short(ik.Anderson):
        memory = 3

    class Restarting(ik.linear.GMRES):
        restart = 4

    class Symmetric(ik.Root):
        symmetric = True

    @dataclass(frozen=True)
    class Decorated(Short):
        damping: float = 0.5

    assert (Short().memory, Short(5).memory, Short(damping=0.7).memory, ik.Anderson().memory) == (3, 5, 3, 8)
    assert (Restarting().restart, ik.linear.GMRES().restart) == (4, None)
    assert Symmetric(lambda z: z).symmetric
    assert not Symmetric(lambda z: z, symmetric=False).symmetric
    assert (Decorated().memory, Decorated().damping) == (3, 0.5)
    with pytest.raises(ValueError, match="memory must be at least 1"):
        type("Wrong", (ik.Anderson,), {"memory": 0})()


class _Plain(ik.Method):
    solves = "root"


class _Layer(ik.extend.Configured, torch.nn.Module):
    def extra_repr(self) -> str:
        return "width=3"


@pytest.mark.parametrize(
    ("part", "written"),
    [
        (lambda: ik.get_solver("scipy.root.hybr", factor=3.0), "get_solver('scipy.root.hybr', factor=3.0)"),
        (lambda: ik.get_solver("integrate"), "get_solver('integrate')"),
        (_Plain, "_Plain()"),
        (_Layer, "_Layer(width=3)"),
        (lambda: ik.Argmin(math.dist, bounds=(0, 1)), "Argmin(dist, bounds=...)"),
        (lambda: ik.Root(math.dist, symmetric=True), "Root(dist, symmetric=...)"),
        (lambda: ik.FixedPoint(math.dist), "FixedPoint(dist)"),
    ],
)
def test_a_part_is_shown_by_what_makes_it(part: Any, written: str) -> None:
    assert repr(part()) == written
