"""What the pictures of pages, gallery, README and benchmarks share: colours, and the width at which they must be read."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))

from common import COLOURS, COLUMN, PAGE  # noqa: E402

__all__ = ["COLOURS", "COLUMN", "PAGE", "faults", "is_stale", "save", "style"]

LEAST = 5.9  # points: letters smaller than these are not read on paper
MOVED = 0.1  # of an axis: where its ends are further from those of a picture, that is of something else


def style() -> None:
    """Colours that colour-blind readers tell apart."""
    import matplotlib.pyplot as plt

    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLOURS)


def faults(figure: Any, width: float = COLUMN) -> list[str]:
    """Letters that are too small when the figure is ``width`` inches wide, and legends that lie over what is drawn."""
    from matplotlib.text import Text

    figure.canvas.draw()
    shrunk = width / figure.get_figwidth()
    small = {
        (text.get_text(), round(text.get_fontsize() * shrunk, 1))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text.get_fontsize() * shrunk < LEAST
    }
    found = [f"{words!r} has {points} points at {width} inches" for words, points in sorted(small)]
    return found + [
        f"a legend lies over {artist.get_label() or type(artist).__name__}"
        for axes in figure.axes
        if axes.get_legend() is not None
        for artist in _covered(axes)
    ]


def save(figure: Any, path: Path) -> None:
    """The figure as a PNG that knows what its axes show."""
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Description": json.dumps(_ends(figure))})


def is_stale(figure: Any, path: Path) -> bool:
    """Is the picture at ``path``, which :func:`save` has made, of other numbers than the figure?"""
    from PIL import Image

    with Image.open(path) as picture:
        kept = json.loads(picture.text.get("Description", "[]"))
    now = _ends(figure)
    return len(kept) != len(now) or any(
        abs(old - new) > MOVED * abs(ends[1] - ends[0])
        for was, ends in zip(kept, now, strict=True)
        for old, new in zip(was, ends, strict=True)
    )


def _ends(figure: Any) -> list[list[float]]:
    """From where to where the axes go, logarithms on logarithmic scales."""
    limits = [(axes.get_xlim(), axes.get_xscale(), axes.get_ylim(), axes.get_yscale()) for axes in figure.get_axes()]
    return [
        [math.log10(end) if scale == "log" else float(end) for end in ends]
        for x, x_scale, y, y_scale in limits
        for ends, scale in ((x, x_scale), (y, y_scale))
    ]


def _covered(axes: Any) -> list[Any]:
    """Lines, points and areas of these axes that reach below their legend."""
    box = axes.get_legend().get_window_extent()
    return [
        *(line for line in axes.lines if _meets(line.get_path(), line.get_transform(), box, line.get_linestyle())),
        *(patch for patch in axes.patches if _meets(patch.get_path(), patch.get_transform(), box, "-", filled=True)),
        *(some for some in axes.collections if _any(some, box)),
    ]


def _meets(path: Any, transform: Any, box: Any, line: str, filled: bool = False) -> bool:
    """Does a path enter a box?  Markers alone do where one of them lies in it."""
    drawn = path.transformed(transform)
    if line in ("None", " ", ""):
        return any(box.contains(*point) for point in drawn.vertices)
    return bool(drawn.intersects_bbox(box, filled=filled))


def _any(some: Any, box: Any) -> bool:
    """Does a collection enter a box: one of its points, or one of its areas?"""
    offsets = some.get_offsets()
    if len(offsets) and (offsets != 0).any():
        return any(box.contains(*point) for point in some.get_offset_transform().transform(offsets))
    return any(_meets(path, some.get_transform(), box, "-", filled=True) for path in some.get_paths())
