"""What is compared: equilibria, the same cells unrolled, tied and untied, and an LSTM; one embedding, one readout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from implicitkit_deq import DEQ, Forgive, cells

from .grammar import WORDS

SPREADS = {"Transformer": 0.3, "TrellisNet": 1.0}  # of the embedding at first: what suits the unrolled models best
CUTOFFS = [500, 2000, 5000]  # words by frequency: of all 10,000, a training step mostly needs the first 500


def cell(kind: str, inputs: int, features: int, skip: str) -> cells.Cell:
    """A cell of either kind; ``skip`` is of the transformer's first sum."""
    if kind == "TrellisNet":
        return cells.TrellisNet(inputs, features)
    return cells.Transformer(inputs, features, heads=4, hidden=2 * features, skip=skip, scale=0.5)


class Unrolled(nn.Module):
    """``z <- f_k(z; x)`` from zero, ``k = 1..depth``, with one cell for all layers or one for each."""

    def __init__(self, make: Callable[[], cells.Cell], depth: int, tied: bool) -> None:
        super().__init__()
        self.cells = nn.ModuleList([make() for _ in range(1 if tied else depth)])
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        """The output after ``depth`` layers, ``(batch, T, features)``."""
        first = self.cells[0]
        z = x.new_zeros(len(x), *first.state_shape(x))
        injected = [c.inject(x) for c in self.cells]
        for layer, given in itertools.islice(itertools.cycle(zip(self.cells, injected, strict=True)), self.depth):
            z = layer.update(z, *given)
        return first.output(z)


class Recurrent(nn.Module):
    """One layer of an LSTM."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.core = nn.LSTM(inputs, features, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The hidden states, ``(batch, T, features)``."""
        return self.core(x)[0]


class Model(nn.Module):
    """Embedding, ``body``, and the adaptive softmax of Grave et al. (2017), as in the source."""

    def __init__(self, body: nn.Module, width: int, features: int, spread: float = 1.0) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, width), body
        self.join = nn.Identity() if features == width else nn.Linear(features, width)
        self.read = nn.AdaptiveLogSoftmaxWithLoss(width, WORDS, CUTOFFS, div_value=2.0)
        nn.init.normal_(self.embed.weight, std=spread)

    def features(self, x: Tensor) -> Tensor:
        """What the readout sees, ``(batch, T, width)``."""
        return self.join(self.body(self.embed(x)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The logarithm of the probability of every word of ``y``, ``(batch, T)``."""
        found = self.read(self.features(x).flatten(0, 1), y.flatten())
        return found.output.view(y.shape)

    @property
    def parameters_inside(self) -> int:
        """Parameters without embedding and readout."""
        return _size(self.body) + _size(self.join)


@dataclass(frozen=True)
class Entry:
    """A model of the tables: ``make(skip)`` makes it, ``skips`` are the transformer's first sums that are tried."""

    name: str
    family: str
    make: Callable[[str], Model]
    skips: tuple[str, ...] = ("input",)

    @property
    def is_equilibrium(self) -> bool:
        """Is it solved for?"""
        return self.name.startswith("DEQ")


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def entries(width: int, depth: int) -> list[Entry]:
    """All models; as many parameters as the tied ones have the few untied layers of half the width, and the LSTM."""

    def equilibrium(kind: str) -> Callable[[str], Model]:
        # Broyden as in the source; the layer's own relay, which begins with the plain iteration, takes up to four times the
        # evaluations.  In evaluation up to one window in twenty may be left unsolved: they are counted
        settings: dict[str, Any] = {"solver": "broyden"} if kind == "Transformer" else {}
        settings["evaluation"] = {"on_failure": Forgive(share=0.05), "max_steps": 300}
        return lambda skip: Model(DEQ(cell(kind, width, width, skip), **settings), width, width, SPREADS[kind])

    def unrolled(kind: str, depth: int, tied: bool, features: int) -> Callable[[str], Model]:
        make = lambda skip: lambda: cell(kind, width, features, skip)  # noqa: E731
        return lambda skip: Model(Unrolled(make(skip), depth, tied), width, features, SPREADS[kind])

    found = []
    for kind, skips in (("Transformer", ("input", "state")), ("TrellisNet", ("input",))):
        one = cell(kind, width, width // 2, "input")
        shallow = round(_size(cell(kind, width, width, "input")) / _size(one))
        found += [
            Entry(f"DEQ-{kind}", kind, equilibrium(kind)),
            Entry(f"{kind}, {depth} tied layers", kind, unrolled(kind, depth, True, width), skips),
            Entry(f"{kind}, {depth} untied layers", kind, unrolled(kind, depth, False, width), skips),
            Entry(f"{kind}, untied, narrow", kind, unrolled(kind, shallow, False, width // 2), skips),
        ]
    goal = found[0].make("input").parameters_inside
    hidden = max(2, round((math.sqrt((5 * width + 8) ** 2 + 16 * goal) - 5 * width - 8) / 8))
    return [*found, Entry("LSTM", "LSTM", lambda skip: Model(Recurrent(width, hidden), width, hidden))]
