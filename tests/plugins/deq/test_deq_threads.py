"""Another thread that runs the cell of a layer while the layer solves."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from implicitkit_deq import DEQ


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.owner = weight_norm(nn.Linear(4, 4)), threading.get_ident()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if threading.get_ident() != self.owner:
            time.sleep(2e-4)
        return torch.tanh(0.3 * self.lin(z) + x)


def test_reparametrised_weights_are_held_for_the_solving_thread() -> None:
    cell, x = Cell(), torch.linspace(-1, 1, 8).reshape(2, 4)
    layer = DEQ(cell, (4,))
    want, stop, failed, calls = cell(x, x), threading.Event(), [], []

    def work() -> None:
        try:
            while not stop.is_set():
                layer(x).sum().backward()
                calls.append(1)
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    end, out, readers = time.monotonic() + 0.3, want, set()
    while time.monotonic() < end:
        found: Any = cell.lin.parametrizations["weight"]
        readers.add(type(found).__name__)
        out = cell(x, x)
        assert torch.equal(out, want)
    stop.set()
    thread.join()
    assert not failed
    assert calls
    assert readers == {"ParametrizationList"}
