"""Pytrees of tuples of tensors are taken apart by hand, as torch takes them apart."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from implicitkit.foundation import compat, trees

Pair = namedtuple("Pair", "a b")
T = torch.zeros(2)
TREES: dict[str, Any] = {
    "one": T,
    "empty": (),
    "pair": (T, T + 1),
    "nested": ((), T, (T + 1, (T + 2,))),
    "with None": (T, None),
    "with a number": (T, (1.0, T)),
    "with a list": (T, [T]),
    "with a dict": ((T,), {"b": T, "a": T + 1}),
    "named": Pair(T, (T,)),
    "named inside": (Pair(T, T),),
    "ordered": (OrderedDict(b=T, a=T),),
    "size": (torch.Size([2]), T),
    "parameter": (torch.nn.Parameter(T.clone()),),
    "nothing in it": ((), ((),)),
}


@pytest.mark.parametrize("name", TREES)
def test_the_same_leaves_and_structure(name: str) -> None:
    tree = TREES[name]
    leaves, spec = compat.tree_flatten(tree)
    right, wanted = _pytree.tree_flatten(tree)
    assert len(leaves) == len(right) and all(a is b for a, b in zip(leaves, right, strict=True))
    assert spec == wanted and repr(spec) == repr(wanted)
    again = compat.tree_unflatten(leaves, spec)
    assert type(again) is type(tree)
    leaves.append(None)  # what somebody does with the leaves is nobody else's
    assert len(compat.tree_flatten(tree)[0]) == len(right)


def test_one_structure_is_made_once() -> None:
    assert compat.tree_flatten((T, (T,)))[1] is compat.tree_flatten((T + 1, (T,)))[1]
    assert compat.tree_flatten((T, (T,)))[1] != compat.tree_flatten(((T,), T))[1]


def test_leaves_that_somebody_names() -> None:
    leaves, _ = compat.tree_flatten((T, (T,)), is_leaf=lambda x: isinstance(x, tuple) and len(x) == 1)
    assert len(leaves) == 2 and leaves[1] == (T,)


def test_arguments_without_arrays_stay_what_they_are() -> None:
    import numpy as np

    args = ((), T, {"a": 1.0})
    assert trees.as_args(args) is args
    found = trees.as_args((np.ones(2), (np.float64(2.0), T)))
    assert isinstance(found[0], torch.Tensor) and found[1][0] == 2.0 and type(found[1][0]) is float
