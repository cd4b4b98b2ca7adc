"""What a picture is refused for: letters too small for the width it is read at, a legend over what is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import pictures

LEGEND = {"loc": "upper right"}


def _line(axes: Any) -> None:
    axes.plot([0, 1], [0, 1], label="line")


def _across(axes: Any) -> None:
    """No point of the line lies below the legend, only a stretch between two of them."""
    axes.plot([0.6, 1, 0, 0.05], [1, 0.7, 0, 0.05], label="line")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _points(axes: Any) -> None:
    axes.plot([0, 1], [0, 1], "o", label="points")


def _scattered(axes: Any) -> None:
    axes.scatter([0, 1], [0, 1], label="points")


def _areas(axes: Any) -> None:
    """The legend lies inside an area, and meets none of its edges."""
    axes.stackplot([0, 1], [[1, 1], [1, 1]], labels=["one", "two"])
    axes.set(xlim=(0.2, 0.8), ylim=(1.1, 1.9))


def _around(axes: Any) -> None:
    """A line round the legend, which is no area."""
    axes.plot([-1, -1, 2, 2], [2, -1, -1, 2], label="line")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _bars(axes: Any) -> None:
    axes.bar([0, 1], [1, 2], label="bars")


@pytest.mark.parametrize("drawn", [_line, _across, _points, _scattered, _areas, _bars])
def test_a_legend_over_what_is_drawn_is_a_fault(drawn: Callable[[Any], None]) -> None:
    figure, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")
    drawn(axes)
    axes.legend(**LEGEND)
    assert any("legend lies over" in fault for fault in pictures.faults(figure))
    plt.close(figure)


@pytest.mark.parametrize("drawn", [_line, _points, _scattered, _bars, _around])
def test_a_legend_beside_what_is_drawn_is_none(drawn: Callable[[Any], None]) -> None:
    figure, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")
    drawn(axes)
    axes.legend(loc="upper left")
    assert pictures.faults(figure) == []
    plt.close(figure)


def test_letters_are_measured_at_the_width_a_picture_is_read_at() -> None:
    figure, axes = plt.subplots(figsize=(6.8, 2.6))
    _line(axes)
    axes.set_xlabel("written", fontsize=11)
    assert {"'written' has 5.5 points at 3.4 inches"} <= set(pictures.faults(figure))
    assert pictures.faults(figure, 6.8) == []
    plt.close(figure)


def test_pages_are_drawn_in_colours_that_colour_blind_readers_tell_apart() -> None:
    with plt.rc_context():
        pictures.style()
        assert plt.rcParams["axes.prop_cycle"].by_key()["color"] == list(pictures.COLOURS)


@pytest.mark.parametrize(("scale", "floor", "stale"), [("log", 0.9, False), ("log", 0.5, True), ("linear", 0.5, False)])
def test_a_picture_of_other_numbers_is_stale(scale: str, floor: float, stale: bool, tmp_path: Path) -> None:
    """The lower of two lines has moved to ``floor``, the upper goes to 100: half of it is much on a logarithmic scale."""
    for low in (1.0, floor):
        figure, axes = plt.subplots()
        axes.plot([0, 1], [low, 100])
        axes.set(yscale=scale)
        if low == 1:
            pictures.save(figure, tmp_path / "drawn.png")
    assert pictures.is_stale(figure, tmp_path / "drawn.png") is stale
    figure.add_subplot()
    assert pictures.is_stale(figure, tmp_path / "drawn.png")
    plt.close("all")
