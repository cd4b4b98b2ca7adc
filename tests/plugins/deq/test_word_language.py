"""The language of the word-level experiment: what its writer says of its own probabilities is so."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def grammar(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from deq_words import grammar

    return grammar


@pytest.fixture
def text(grammar: Any) -> Any:
    return grammar.Writer(random.Random(0)).text(40_000)


def test_the_vocabulary_has_ten_thousand_words_each_with_a_name(grammar: Any) -> None:
    assert grammar.WORDS == len(grammar.NAMES) == len(set(grammar.NAMES)) == grammar.FIRST[-1] == 10_000


def test_the_mean_surprise_of_the_writer_is_the_entropy_rate(grammar: Any, text: Any) -> None:
    """A cross-entropy is above the entropy unless the probabilities are the true ones, so that this holds for no others."""
    rate, length = grammar.entropy_rate()
    ends = grammar.NAMES.index(".")
    sentences = int((text.words == ends).sum())
    assert len(text) / sentences == pytest.approx(length, rel=0.02)
    # sentences depend on one another by their topic only: errors from blocks of them
    blocks = torch.stack([block.mean() for block in text.log_probability.tensor_split(100)])
    error = float(blocks.std()) / 10
    assert error < 0.02 and abs(-float(text.log_probability.mean()) - rate) < 4 * error


def test_the_first_word_of_a_sentence_has_its_probability(grammar: Any, text: Any) -> None:
    starts = (text.words[:-1] == grammar.NAMES.index(".")).nonzero()[:, 0] + 1
    chances = {
        f"det{letter}0.{rank}": p * share
        for letter, p in (("s", grammar.SINGULAR), ("p", 1 - grammar.SINGULAR))
        for rank, share in enumerate(grammar.zipf(4))
    }
    assert sum(chances.values()) == pytest.approx(1)
    for place in starts.tolist():
        name = grammar.NAMES[int(text.words[place])]
        assert float(text.log_probability[place]) == pytest.approx(math.log(chances[name])), name


def test_verbs_agree_with_their_subjects_through_clauses(grammar: Any, text: Any) -> None:
    verbs = (text.number >= 0).nonzero()[:, 0]
    assert int(text.inside[verbs].max()) > 6
    for place in verbs.tolist():
        kind, number, _ = grammar.GROUPS[int(text.group[place - 1 - int(text.inside[place])])]
        assert kind == "noun" and number == int(text.number[place]), text.spelled(max(0, place - 20), 21)


def test_what_less_memory_can_reach_is_worse(grammar: Any, text: Any) -> None:
    other = grammar.Writer(random.Random(1)).text(40_000)
    share = torch.bincount(text.group, minlength=len(grammar.GROUPS)).double() / len(text)
    chances = torch.cat([torch.tensor(grammar.zipf(grammar.SIZES[kind][2])) for kind, _, _ in grammar.GROUPS]).double()
    found = share[other.group].log() + chances[other.words].log()
    assert math.exp(-float(found.mean())) == pytest.approx(text.limit(0), rel=0.03)
    assert text.oracle < 0.6 * text.limit(1) and text.limit(1) < 0.3 * text.limit(0)
