r"""The DEQ-Transformer as a language model: characters of Python's own manual.

    f(z; x) = LN(h + W_2 relu(W_1 h)),  h = LN(z + W_O softmax(scores(z W_QKV + x U; R)) V)

with relative positions ``R``, causal attention and the segment before as memory: ``cells.Transformer(skip="state")`` is this
block.  Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models"; deq-zoo/deq-seq.
"""

from __future__ import annotations

import functools
from pydoc_data.topics import topics
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.zoo.base import Model
from implicitkit_deq import cells

__all__ = ["LanguageModel"]

WIDTH, LENGTH, MEMORY, BATCH = 32, 24, 12, 8


class LanguageModel(Model):
    """Shapes: ``x (batch, T, width)``, embedded characters; memory and its ``x`` ``(batch, M, width)``; ``z`` as ``x``."""

    causal = True
    zoo: ClassVar[dict[str, Any]] = {
        "ift": True, "f_solver": "broyden", "b_solver": "broyden", "f_stop_mode": "rel", "b_stop_mode": "rel",
        "f_tol": 1e-3, "b_tol": 1e-3, "f_max_iter": 35, "b_max_iter": 35,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        symbols = int(_text().max()) + 1
        self.embedding = nn.Embedding(symbols, WIDTH)
        self.block = cells.Transformer(WIDTH, WIDTH, 4, hidden=2 * WIDTH, skip="state", scale=0.5)
        self.head = nn.Linear(WIDTH, symbols)

    def inject(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """``x U``, keys and values of the memory, and ``R``."""
        return self.block.inject(x, *memory)

    def update(self, z: Tensor, injected: Tensor, past: Tensor, distance: Tensor) -> Tensor:
        """One block."""
        return self.block.update(z, injected, past, distance)

    def state_shape(self, x: Tensor, *memory: Tensor) -> tuple[int, ...]:
        """``(T, width)``."""
        return self.block.state_shape(x)

    def batch(self, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Pieces of the text, the segment before included, and each one's next characters."""
        text, generator = _text(), torch.Generator().manual_seed(seed)
        size = MEMORY + LENGTH + 1
        starts = torch.randint(len(text) - size, (BATCH, 1), generator=generator)
        piece = text[starts + torch.arange(size)]
        return (piece[:, :-1],), piece[:, MEMORY + 1 :]

    def encode(self, piece: Tensor) -> tuple[Tensor, ...]:
        """Embedded characters, and the segment before with its state: what twelve steps make of it, without derivative."""
        before, x = self.embedding(piece).split([MEMORY, LENGTH], 1)
        before = before.detach()
        with torch.no_grad():
            injected, memory = self.inject(before), torch.zeros_like(before)
            for _ in range(12):
                memory = self.update(memory, *injected)
        return x, memory, before

    def loss(self, z: Tensor, target: Tensor) -> Tensor:
        """Nats a character."""
        return nn.functional.cross_entropy(self.head(z).flatten(0, 1), target.flatten())


@functools.cache
def _text() -> Tensor:
    """The manual's pages on the language, small letters, as numbers."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).lower().split())
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])
