"""A wrong value of any argument of a name of ``implicitkit_deq`` is refused at once, by name (rule: ``wrong_values``)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from wrong_values import Row, complaints

import implicitkit as ik
import implicitkit_deq as deq
from implicitkit_deq import cells

F64 = {"dtype": torch.float64}
STATE = torch.ones(2, 3, **F64)


def half(z: Any, *inputs: Any) -> Any:
    return 0.5 * z + 1


def layer() -> deq.DEQ:
    torch.manual_seed(0)
    return deq.DEQ(cells.MLP(4, 6, **F64))


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4))


class Writer:
    """Something to write figures to."""

    def add_scalar(self, *what: Any) -> None:
        return None


SIZES = {"in_features": 4, "features": 6}
SETTINGS = dict.fromkeys(("rtol", "atol", "max_steps", "callback"), "none")
JACOBIAN = {"z": "tensor"}
PLACE = "dtype device"  # torch's own words name them
ROWS: dict[str, Row] = {
    "DEQ": Row(
        deq.DEQ,
        lambda: {"cell": cells.MLP(4, 6)},
        {"state": "list", "in_dims": "whole negative none list dict"},
        said="Settings",  # whose names are those of evaluation=
    ),
    "Settings": Row(deq.Settings, takes=SETTINGS),
    "Pretraining": Row(deq.Pretraining, lambda: {"calls": 1, "steps": 2}),
    "Monitor": Row(deq.Monitor, lambda: {"layer": layer()}),
    "TensorBoard": Row(deq.TensorBoard, lambda: {"target": Writer()}, {"prefix": "text", "target": "text"}),
    "PerPosition": Row(
        deq.PerPosition, free="method sizes positions length and_then options begun"
    ),  # made by per_position, as is
    "InTurn": Row(
        deq.InTurn, lambda: {"inner": ik.Picard(), "sizes": (4,), "positions": 5}, free="inner sizes positions length"
    ),
    "per_position": Row(deq.per_position, lambda: {"solver": "anderson", "state": STATE}, {"state": "tensor"}),
    "future_leak": Row(deq.future_leak, lambda: {"layer": half, "x": torch.ones(2, 4, 3, **F64), "position": 1}),
    "jacobian_penalty": Row(deq.jacobian_penalty, lambda: {"cell": half, "z": STATE}, JACOBIAN),
    "spectral_radius": Row(deq.spectral_radius, lambda: {"cell": half, "z": STATE}, JACOBIAN),
    "condition_number": Row(deq.condition_number, lambda: {"cell": half, "z": STATE}, JACOBIAN),
    "bound_weights": Row(deq.bound_weights, lambda: {"module": linear(), "bound": 0.9}, said="weight"),
    "weight_norm": Row(deq.weight_norm, lambda: {"module": linear()}, said="weight"),
    "free_weights": Row(deq.free_weights, lambda: {"module": linear()}),
    "WeightBound": Row(deq.WeightBound, lambda: {"bound": 0.9}),
    "scale_to_radius": Row(
        deq.scale_to_radius,
        lambda: {"layer": layer(), "inputs": (torch.ones(5, 4, **F64),), "radius": 0.5},
        said="weight",
    ),
    "fixed_point_correction": Row(
        deq.fixed_point_correction, lambda: {"criterion": torch.sum, "states": [STATE, STATE]}, said="sum()"
    ),
    "merge": Row(deq.merge, lambda: {"first": layer(), "second": deq.DEQ(cells.MLP(6, 4, **F64))}),
    "tie_weights": Row(deq.tie_weights, lambda: {"network": linear()}),
    "load_torchdeq": Row(
        deq.load_torchdeq, lambda: {"module": linear(), "state": linear().state_dict()}, said="checkpoint"
    ),
    "cells.MLP": Row(cells.MLP, lambda: SIZES, free=PLACE),
    "cells.ConvBlock": Row(cells.ConvBlock, lambda: {"in_channels": 3, "channels": 8}, free=PLACE),
    "cells.Graph": Row(cells.Graph, lambda: {"adjacency": torch.eye(3), **SIZES}, said="adjacency"),
    "cells.Monotone": Row(cells.Monotone, lambda: SIZES, free=PLACE),
    "cells.Multiscale": Row(cells.Multiscale, lambda: {"in_channels": 3}, free=PLACE),
    "cells.Stacked": Row(lambda **options: cells.Stacked(cells.MLP(4, 6), cells.MLP(6, 4), **options)),
    "cells.Tied": Row(cells.Tied, lambda: {"network": linear()}, said="tie_weights"),
    "cells.Transformer": Row(cells.Transformer, lambda: SIZES, free=PLACE),
    "cells.TrellisNet": Row(cells.TrellisNet, lambda: SIZES, free=PLACE),
    "cells.Wrapped": Row(
        cells.Wrapped,
        lambda: {"function": half, "state": (3,)},
        {"state": "list", "injected_dims": "whole negative list dict"},
    ),
    "cells.normalised_adjacency": Row(
        cells.normalised_adjacency, lambda: {"edges": torch.tensor([[0, 1], [1, 0]]), "nodes": 3}
    ),
}
NOT_ASKED = {"Cell", "Shine", "cells.Cell", "cells.Composed"}  # bases, and a rule without options


def public() -> dict[str, Any]:
    found = {n: getattr(deq, n) for n in deq.__all__}
    found |= {f"cells.{n}": getattr(cells, n) for n in cells.__all__}
    errors = {n for n, thing in found.items() if inspect.isclass(thing) and issubclass(thing, BaseException)}
    return {n: thing for n, thing in found.items() if callable(thing) and n not in errors}


def asked() -> dict[str, Row]:
    return {n: Row(thing) for n, thing in public().items() if n not in NOT_ASKED} | ROWS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", asked())
def test_wrong_values_are_refused_at_once_and_by_name(name: str) -> None:
    if name != "PerPosition":
        assert complaints(name.rpartition(".")[2], asked()[name]) == []


def test_the_lists_are_those_of_the_plugin() -> None:
    assert set(ROWS) | NOT_ASKED <= set(public())


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "pretraining": (
        {"pretraining": 3},
        TypeError,
        r"DEQ: pretraining must be a Pretraining\(calls, steps\) or None, got 3",
    ),
    "dtype": ({"dtype": "float32"}, TypeError, r"dtype must be a torch.dtype or None.*Did you mean torch.float32\?"),
    "whole dtype": (
        {"dtype": torch.int64},
        ValueError,
        "DEQ: dtype must be floating point or complex, got torch.int64",
    ),
    "evaluation": ({"evaluation": 3}, TypeError, "DEQ: evaluation must be a dict of settings or None, got 3"),
    "in evaluation": ({"evaluation": {"maxiter": 5}}, TypeError, "no option 'maxiter'. Did you mean 'max_steps'"),
    "causal": ({"causal": "x"}, TypeError, "DEQ: causal must be True or False or None, got 'x'"),
    "maxiter": ({"maxiter": 5}, TypeError, "DEQ has no option 'maxiter'. Did you mean 'max_steps'"),
    "tol": ({"tol": 1e-3}, TypeError, "DEQ has no option 'tol'. Did you mean 'rtol'"),
    "rule": ({"rule": "phantm"}, ik.UnknownNameError, "Did you mean 'phantom'"),
    "solver": ({"solver": 3}, TypeError, "solver must be a registered name"),
    "trace": ({"trace": 1}, TypeError, "trace must be True or False, got 1"),
    "callback": ({"callback": dict}, ValueError, "callback must be an object, not a class"),
    "in_dims": ({"in_dims": "x"}, TypeError, "DEQ: in_dims must say in which dimension the batch is"),
    "batch_dims": ({"batch_dims": True}, ValueError, "batch_dims must be 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_names_the_nearest_right_thing(name: str) -> None:
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        deq.DEQ(cells.MLP(4, 6), **options)


def test_other_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="MLP has no option 'width'"):
        cells.MLP(4, 6, width=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Monitor has no option 'krilov'. Did you mean 'krylov'"):
        deq.Monitor(layer(), krilov=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Forgive has no option 'shares'. Did you mean 'share'"):
        deq.Forgive(shares=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Monitor: sink must be callable"):
        deq.Monitor(layer(), 3)  # type: ignore[arg-type]
    with (
        layer().using(rtol=1e-3) as changed,
        pytest.raises(TypeError, match="Did you mean 'rtol'"),
        changed.using(tol=1),
    ):
        pass
