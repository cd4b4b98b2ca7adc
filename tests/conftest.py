"""Shared set-up: one thread (the matrices are tiny), a fixed seed, and which rows of a product are quick."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

# Read when NumPy and SciPy load their linear algebra, of which idle threads wait in loops: with two workers on two cores
# tests/solver/test_fits_at_rest.py took five times as long.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


# Without a device ``torch.manual_seed`` writes the whole stack down three times, for the devices that may come.
_seed_all = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed() -> None:
    _seed_all(0)


# What is imported and collected stays to the end: looking for garbage among it took a third of the time of collecting.
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test marked ``one_in(m)`` a row is quick where its places along the axes of the table have a sum that ``m``
    divides: with axes of ``m`` values or more, any values of all axes but one are together in a quick row.  The others
    are slow."""
    marker = item.get_closest_marker("one_in")
    if marker and _place(item) % marker.args[0]:
        item.add_marker(pytest.mark.slow)


def _place(item: pytest.Item) -> int:
    number = next(iter(item.callspec.indices.values()))  # type: ignore[attr-defined]  # of the row, the first axis outermost
    place = 0
    for marker in reversed(list(item.iter_markers("parametrize"))):
        number, along = divmod(number, len(marker.args[1]))
        place += along
    return place


def _scale_after(middle: nn.Module, factor: float, rate: float) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(4):
        optimizer.zero_grad()
        loss = ((net(torch.randn(8, 4)) * factor) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())
    return float(scaler.get_scale())


@pytest.fixture
def scale_after() -> Callable[[nn.Module, float, float], float]:
    """A scaler's scale after four steps of a net with ``middle`` in it, from a scale that overflows: less, if some step
    was skipped."""
    return _scale_after
