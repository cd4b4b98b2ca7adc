"""Weights that come from elsewhere: weight normalisation as TorchDEQ has it, and checkpoints of theirs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from implicitkit_deq import DEQ, Cell, bound_weights, load_torchdeq, weight_norm

F64 = torch.float64


class Attention(nn.Module):
    """Weights of every sort: linear, convolution, embedding, and the biases of relative attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.conv = nn.Linear(8, 24, dtype=F64), nn.Conv1d(4, 6, 3, dtype=F64)
        self.back = nn.ConvTranspose1d(4, 6, 2, dtype=F64)
        self.emb = nn.Embedding(5, 8, dtype=F64)
        self.norm = nn.LayerNorm(8, dtype=F64)
        self.r_w_bias = nn.Parameter(torch.rand(2, 4, dtype=F64))


NORMALISED = ("qkv", "conv", "back")


def _theirs() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same module under torch's old weight_norm, whose names TorchDEQ and locuslab/deq have."""
    torch.manual_seed(1)
    model = Attention()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for name in NORMALISED:
            torch.nn.utils.weight_norm(getattr(model, name))
    state = model.state_dict()
    for name in state:
        if name.endswith("_g"):
            state[name] *= 1.7  # as after training: g is no longer |V|
    model.load_state_dict(state)
    for name in NORMALISED:  # the hook computes the weight at a call
        for hook in getattr(model, name)._forward_pre_hooks.values():
            hook(getattr(model, name), ())
    return model, state


def test_by_default_the_weights_of_linear_and_convolution_layers_are_normalised() -> None:
    model = Attention()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weight_norm(model)
    names = set(dict(model.named_parameters()))
    assert {"emb.weight", "r_w_bias", "norm.weight", "qkv.bias"} <= names
    assert {f"{n}.parametrizations.weight.original{i}" for n in NORMALISED for i in (0, 1)} <= names
    for name in NORMALISED:
        torch.testing.assert_close(getattr(model, name).weight, before[f"{name}.weight"], rtol=1e-14, atol=1e-15)


def test_other_weights_by_name_and_a_module_without_any() -> None:
    model = Attention()
    weight_norm(model, weights=[model.emb.weight])
    assert "emb.parametrizations.weight.original0" in dict(model.named_parameters())
    with pytest.raises(ValueError, match="no linear or convolution layer"):
        weight_norm(nn.Embedding(3, 4))
    bound_weights(Attention(), 0.5)  # bounds every matrix, as before


@pytest.mark.parametrize("normalised", [True, False], ids=["with weight_norm", "plain"])
@pytest.mark.parametrize("prefix", ["", "func.", "deq.core.func."])
@pytest.mark.parametrize("told", [True, False])
def test_a_checkpoint_of_theirs(normalised: bool, prefix: str, told: bool) -> None:
    theirs, state = _theirs()
    mine = weight_norm(Attention()) if normalised else Attention()
    found = {prefix + name: value for name, value in state.items()}
    found["embedding_of_the_model.weight"] = torch.zeros(3, 3)
    if not prefix:
        del found["embedding_of_the_model.weight"]
    result = load_torchdeq(mine, found, prefix=prefix if told else None)
    assert not result.missing_keys and not result.unexpected_keys
    for name in NORMALISED:
        torch.testing.assert_close(getattr(mine, name).weight, getattr(theirs, name).weight, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(getattr(mine, name).bias, getattr(theirs, name).bias)
    torch.testing.assert_close(mine.r_w_bias, theirs.r_w_bias)


@pytest.mark.parametrize("normalised", [True, False], ids=["with weight_norm", "plain"])
@pytest.mark.parametrize("prefix", ["", "deq.func."])
def test_a_checkpoint_of_pytorchs_parametrisation(normalised: bool, prefix: str) -> None:
    torch.manual_seed(2)
    theirs = Attention()
    for name in NORMALISED:
        torch.nn.utils.parametrizations.weight_norm(getattr(theirs, name))
        with torch.no_grad():
            getattr(theirs, name).parametrizations.weight.original0.mul_(1.7)  # as after training: g is no longer |V|
    mine = weight_norm(Attention()) if normalised else Attention()
    result = load_torchdeq(mine, {prefix + name: value for name, value in theirs.state_dict().items()})
    assert not result.missing_keys and not result.unexpected_keys
    for name in (*NORMALISED, "emb"):
        torch.testing.assert_close(getattr(mine, name).weight, getattr(theirs, name).weight, rtol=1e-13, atol=1e-14)


def test_other_parametrisations_are_loaded_as_they_are() -> None:
    theirs, mine = nn.Linear(3, 3, dtype=F64), nn.Linear(3, 3, dtype=F64)
    for layer in (theirs, mine):
        torch.nn.utils.parametrizations.orthogonal(layer)
    load_torchdeq(mine, theirs.state_dict())
    torch.testing.assert_close(mine.weight, theirs.weight)


def test_every_parameter_twice_is_loaded_once() -> None:
    _, state = _theirs()
    twice = {prefix + name: value for prefix in ("func.", "deq.func.") for name, value in state.items()}
    assert not load_torchdeq(weight_norm(Attention()), twice).unexpected_keys


def test_the_cell_of_a_layer() -> None:
    class Mine(Cell):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.U = nn.Linear(6, 6, dtype=F64), nn.Linear(4, 6, dtype=F64)

        def update(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.W(z) + self.U(x))

    theirs = Mine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(theirs.W)
    layer = DEQ(Mine(), (6,))
    load_torchdeq(layer.cell, {f"func.{k}": v for k, v in theirs.state_dict().items()})
    z, x = torch.randn(3, 6, dtype=F64), torch.randn(3, 4, dtype=F64)
    torch.testing.assert_close(layer.cell(z, x), theirs(z, x), rtol=1e-13, atol=1e-14)
    assert list(layer.state_dict()) == ["cell.W.weight", "cell.W.bias", "cell.U.weight", "cell.U.bias"]


def test_what_does_not_fit_is_said() -> None:
    _, state = _theirs()
    with pytest.raises(ValueError, match="no name of the checkpoint fits Linear"):
        load_torchdeq(nn.Linear(2, 2), {"a.b": torch.zeros(2)})
    half = {name: value for name, value in state.items() if name != "qkv.weight_g"}
    with pytest.raises(ValueError, match=r"'qkv.weight_v' without its other half"):
        load_torchdeq(Attention(), half)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_torchdeq(Attention(), {name: value for name, value in state.items() if name != "emb.weight"})
    result = load_torchdeq(Attention(), {n: v for n, v in state.items() if n != "emb.weight"}, strict=False)
    assert result.missing_keys == ["emb.weight"]
