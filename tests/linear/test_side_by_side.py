"""How many products with a Jacobian go side by side while it is formed: so many that operations stay in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from implicitkit.foundation import autodiff, structured
from implicitkit.foundation.structured import side_by_side

D = torch.float64


@pytest.mark.parametrize(
    ("device", "numbers", "wanted"),
    [("cpu", 1, 1 << 20), ("cpu", 64 * 300, 54), ("cpu", 1 << 21, 1), ("cpu", 0, 1 << 20), ("meta", 64 * 300, 873)],
    ids=str,
)
def test_how_many(device: str, numbers: int, wanted: int) -> None:
    assert side_by_side(torch.empty(0, device=device), numbers) == wanted


def _dense(z: Tensor) -> Tensor:
    return autodiff.matrix(autodiff.rectangular(_wave, z)[1], z.shape[1], z)


def _one(z: Tensor) -> Tensor | None:
    return autodiff.one_for_all(autodiff.rectangular(lambda y: _wave(y - y.detach()), z)[1], z.shape[1], z)


def _rows(z: Tensor) -> Tensor | None:
    W = torch.randn(z.shape[1], z.shape[1], generator=torch.Generator().manual_seed(1), dtype=D)
    out, point = autodiff.recorded(lambda y: _wave(torch.tanh(y) @ W), z)
    return structured.rows_by_structure(out, point, 1 << 24)


def _wave(z: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(z) * torch.arange(z.shape[1] // 2 + 1), z.shape[1]) + z**3


@pytest.mark.parametrize("form", [_dense, _one, _rows], ids=lambda form: form.__name__)
def test_none_goes_through_more_numbers_at_once(
    form: Callable[[Tensor], Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same matrix, whatever the pieces; of all of them at once, none is larger than is said."""
    z = torch.randn(8, 200, generator=torch.Generator().manual_seed(0), dtype=D)
    whole, seen, vmap = form(z), [], torch.func.vmap

    def watched(function: Callable[..., Any], *options: Any, **more: Any) -> Callable[..., Any]:
        def run(*rows: Tensor) -> Any:
            seen.append(rows[0].shape[0])
            return vmap(function, *options, **more)(*rows)

        return run

    monkeypatch.setattr(torch.func, "vmap", watched)
    monkeypatch.setattr(structured, "_CHUNK", 7 * 8 * 200)
    parts = form(z)
    assert whole is not None and parts is not None and torch.allclose(parts, whole, rtol=1e-12, atol=1e-12)
    assert seen and max(seen) <= 7
