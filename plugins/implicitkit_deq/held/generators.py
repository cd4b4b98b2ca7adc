"""Python's and NumPy's generators, from which cells draw too: ``if random.random() < p`` drops a part of one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.random import get_state, set_state

from implicitkit_deq.compat import numbers_of_numpy


class Drawing(Exception):
    """The cell draws random numbers, and its call has to begin again: rows of its batch were to be dropped, of which the
    same draw could not be repeated, or (``elsewhere``) it draws from Python's or NumPy's generator, which was not held."""

    def __init__(self, elsewhere: bool = False) -> None:
        super().__init__()
        self.elsewhere = elsewhere


def marks() -> Any:
    """What is another after somebody has drawn from one of them: told in a tenth of the time of :func:`states`."""
    _, words, gauss = random.getstate()
    return words[0], words[-1], gauss, numbers_of_numpy()


def states() -> tuple[Any, Any]:
    """Where both stand, to be compared and to be put back (:func:`put`)."""
    name, words, *rest = get_state(legacy=True)
    return random.getstate(), (name, np.asarray(words).tobytes(), *rest)  # as bytes they can be compared


def put(both: tuple[Any, Any]) -> None:
    """Let both stand there."""
    random.setstate(both[0])
    name, words, *rest = both[1]
    set_state((name, np.frombuffer(words, np.uint32), *rest))
