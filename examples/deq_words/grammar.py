r"""A language of 10,000 words whose best possible perplexity is known.

    S  -> NP VP .                          NP -> DET [ADJ] NOUN MOD
    VP -> VI [ADV] | VT NP                 MOD -> nothing | that VT NP | that NP VT | PREP NP

- Words belong to kinds, and nouns, verbs, adjectives, adverbs and prepositions to ten classes of meaning.  Within its
  list the word of rank ``r = 0, 1, ..`` has a probability in proportion to ``1 / (r + 2.7)`` (Zipf, Mandelbrot).
- Agreement: noun and verb have the number that the determiner of their phrase has, through whatever stands between.
- Meaning: four times in five a word is of the class that is expected of it (else of any): a verb of its subject's class, an
  object of that after its verb's, a noun of its adjective's, the subject of a sentence of that of the sentence before.
- Nesting: ``that NP VT`` is a clause inside a clause; the verb of the outer one waits until the inner one has ended.

Every word tells its kind, number and class, so that what was written so far determines the state of the writer: the
probability that the writer gave to a word is the best prediction that there is.  Its mean logarithm over a text is what no
model can beat on average, and its expectation, the entropy rate, is a sum over the expected numbers of phrases:

    h = E[bits of a sentence] / E[words of a sentence] = \sum_k n_k h_k / \sum_k n_k l_k

``n_k``: how often choice ``k`` is met in a sentence, ``h_k`` its entropy, ``l_k`` the words that it writes.

Source: the phrases are those of Elman (1991), "Distributed representations, simple recurrent networks, and grammatical
structure"; the measure of agreement is that of Linzen, Dupoux & Goldberg (2016), "Assessing the ability of LSTMs to learn
syntax-sensitive dependencies".
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

CLASSES = 5
EXPECTED = 0.8  # a word is of the class that is expected of it, else of any class
SINGULAR, ADJECTIVE, ADVERB, TRANSITIVE = 0.6, 0.4, 0.3, 0.6
MODIFIERS = {"none": 0.6, "subject": 0.15, "object": 0.15, "preposition": 0.1}
SIZES = {"noun": (2, CLASSES, 600), "vt": (2, CLASSES, 120), "vi": (2, CLASSES, 120), "adj": (1, CLASSES, 200)} | {
    "det": (2, 1, 4), "adv": (1, CLASSES, 117), "prep": (1, CLASSES, 1), "that": (1, 1, 1), ".": (1, 1, 1)
}  # fmt: skip  # by kind: numbers, classes, words of each
WORDS = sum(math.prod(size) for size in SIZES.values())


def zipf(count: int) -> list[float]:
    """Probabilities in proportion to ``1 / (rank + 2.7)``."""
    weights = [(rank + 1) ** -1.2 for rank in range(count)]
    return [w / sum(weights) for w in weights]


def entropy(*probabilities: float) -> float:
    """``-\\sum p log p``, in nats."""
    return -sum(p * math.log(p) for p in probabilities if p)


@dataclass
class Text:
    """What the writer wrote, word by word.

    ``group``: the kind, number and class of a word (the rank within a group is independent of everything else).
    ``number``, ``inside``: of a verb, its number (0, 1; -1 for other words), and the words between it and its subject.
    """

    words: Tensor
    group: Tensor
    log_probability: Tensor
    number: Tensor
    inside: Tensor

    def __len__(self) -> int:
        return len(self.words)

    @property
    def oracle(self) -> float:
        """The perplexity of the writer's own predictions."""
        return math.exp(-float(self.log_probability.mean()))

    def limit(self, before: int) -> float:
        """The perplexity of the best prediction from the last ``before`` words alone, 0 or 1, by counting groups.

        Ranks say nothing of what comes next, so that few enough things are counted: ``before = 1`` has under 100 contexts.
        """
        ranks = float(
            torch.tensor([rank_entropy(int(g)) for g in self.group.unique()])[
                self.group.unique(return_inverse=True)[1]
            ].mean()
        )
        here = self.group[1:]
        joint = here if before == 0 else self.group[:-1] * len(GROUPS) + here
        counts = joint.unique(return_counts=True)[1].double()
        groups = entropy(*(counts / counts.sum()).tolist())
        if before:
            context = self.group[:-1].unique(return_counts=True)[1].double()
            groups -= entropy(*(context / context.sum()).tolist())
        return math.exp(groups + ranks)

    def spelled(self, start: int, count: int) -> str:
        """Some of the words, by name."""
        return " ".join(NAMES[int(w)] for w in self.words[start : start + count])


# every group of words: (kind, number, class), its first word, and how many they are
GROUPS = [(k, n, c) for k, (numbers, classes, _) in SIZES.items() for n in range(numbers) for c in range(classes)]
_COUNTS = [SIZES[kind][2] for kind, _, _ in GROUPS]
FIRST = list(itertools.accumulate(_COUNTS, initial=0))
_INDEX = {group: i for i, group in enumerate(GROUPS)}
_ZIPF = {count: zipf(count) for count in set(_COUNTS)}
_CUMULATIVE = {count: list(itertools.accumulate(p)) for count, p in _ZIPF.items()}
NAMES = [
    kind if count == 1 and kind != "prep" else f"{kind}{'sp'[n] if SIZES[kind][0] == 2 else ''}{c}.{rank}"
    for (kind, n, c), count in zip(GROUPS, _COUNTS, strict=True)
    for rank in range(count)
]


def rank_entropy(group: int) -> float:
    """Of the word, when its group is known."""
    return entropy(*_ZIPF[_COUNTS[group]])


def verbs(number: int) -> list[int]:
    """All verbs of a number."""
    return [
        w
        for i, (k, n, _) in enumerate(GROUPS)
        if k in ("vt", "vi") and n == number
        for w in range(FIRST[i], FIRST[i + 1])
    ]


@dataclass
class Writer:
    """Writes sentences; ``pending`` is the probability of the decisions since the last word."""

    random: random.Random
    topic: int = 0
    pending: float = 0.0
    written: list[tuple[int, int, float, int, int]] = field(default_factory=list)

    def text(self, words: int) -> Text:
        """As many words, and the rest of the last sentence."""
        self.written = []
        while len(self.written) < words:
            self.sentence()
        columns = zip(*self.written, strict=True)
        return Text(*(torch.tensor(c, dtype=torch.float64 if i == 2 else torch.int64) for i, c in enumerate(columns)))

    def sentence(self) -> None:
        """``S -> NP VP .``"""
        number, self.topic, place = self.phrase(self.topic)
        if self.choose({True: TRANSITIVE, False: 1 - TRANSITIVE}):
            self.phrase((self.verb("vt", number, self.topic, place) + 1) % CLASSES)
        else:
            self.verb("vi", number, self.topic, place)
            if self.choose({True: ADVERB, False: 1 - ADVERB}):
                self.say("adv", 0, self.of_class(self.topic))
        self.say(".", 0, 0)

    def phrase(self, expected: int) -> tuple[int, int, int]:
        """``NP -> DET [ADJ] NOUN MOD``: its number, its class, and where its noun stands."""
        number = self.choose({0: SINGULAR, 1: 1 - SINGULAR})
        self.say("det", number, 0)
        if self.choose({True: ADJECTIVE, False: 1 - ADJECTIVE}):
            expected = self.say("adj", 0, self.of_class(expected))
        meaning = self.say("noun", number, self.of_class(expected))
        place = len(self.written)
        match self.choose(MODIFIERS):
            case "subject":
                self.say("that", 0, 0)
                self.phrase((self.verb("vt", number, meaning, place) + 1) % CLASSES)
            case "object":
                self.say("that", 0, 0)
                inner, subject, there = self.phrase((meaning + 2) % CLASSES)
                self.verb("vt", inner, subject, there)
            case "preposition":
                self.phrase(self.say("prep", 0, self.of_class(meaning)))
        return number, meaning, place

    def verb(self, kind: str, number: int, subject: int, place: int) -> int:
        """A verb that agrees with a subject whose noun was word ``place``; its class."""
        inside = len(self.written) - place
        return self.say(kind, number, self.of_class(subject), number, inside)

    def choose(self, options: dict) -> object:
        """One of the options, by its probability."""
        chosen = self.random.choices(list(options), options.values())[0]
        self.pending += math.log(options[chosen])
        return chosen

    def of_class(self, expected: int) -> int:
        """The expected class, four times in five, or any."""
        by_chance = self.random.random() >= EXPECTED
        chosen = self.random.randrange(CLASSES) if by_chance else expected
        self.pending += math.log((1 - EXPECTED) / CLASSES + (EXPECTED if chosen == expected else 0))
        return chosen

    def say(self, kind: str, number: int, meaning: int, agrees: int = -1, inside: int = 0) -> int:
        """Write a word of a group; its class."""
        group = _INDEX[kind, number, meaning]
        count = _COUNTS[group]
        rank = self.random.choices(range(count), cum_weights=_CUMULATIVE[count])[0]
        log_probability = self.pending + math.log(_ZIPF[count][rank])
        self.written.append((FIRST[group] + rank, group, log_probability, agrees, inside))
        self.pending = 0.0
        return meaning


def entropy_rate() -> tuple[float, float]:
    """Nats a word, and words a sentence, in closed form."""
    other = (1 - EXPECTED) / CLASSES
    of_class = entropy(EXPECTED + other, *[other] * (CLASSES - 1))
    word = {kind: entropy(*zipf(count)) for kind, (_, _, count) in SIZES.items()}
    clause = MODIFIERS["subject"] + MODIFIERS["object"]
    # one phrase, without those inside it
    nats = entropy(SINGULAR, 1 - SINGULAR) + word["det"] + entropy(ADJECTIVE, 1 - ADJECTIVE)
    nats += ADJECTIVE * (of_class + word["adj"]) + of_class + word["noun"] + entropy(*MODIFIERS.values())
    nats += clause * (of_class + word["vt"]) + MODIFIERS["preposition"] * of_class
    length = 2 + ADJECTIVE + 2 * clause + MODIFIERS["preposition"]
    phrases = (1 + TRANSITIVE) / (1 - clause - MODIFIERS["preposition"])  # each has as many inside on average
    # the sentence around them
    intransitive = 1 - TRANSITIVE
    around = entropy(TRANSITIVE, intransitive) + TRANSITIVE * (of_class + word["vt"])
    around += intransitive * (of_class + word["vi"] + entropy(ADVERB, 1 - ADVERB) + ADVERB * (of_class + word["adv"]))
    nats, length = phrases * nats + around, phrases * length + 2 + intransitive * ADVERB
    return nats / length, length
