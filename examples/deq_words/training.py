"""Training on the language and what is measured of it."""

from __future__ import annotations

import math
import random
import time
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, ForgivenWarning

from .grammar import WORDS, Text, Writer, verbs
from .models import Model

BATCH, POSITIONS = 16, 24


@dataclass(frozen=True)
class Corpus:
    """Texts of one language, words numbered by how often the first has them."""

    train: Text
    valid: Text
    test: Text

    @classmethod
    def written(cls, words: int, other: int, seed: int) -> Corpus:
        """As many words to train on, and twice ``other`` words to validate and test on."""
        train, valid, test = (
            Writer(random.Random(f"{seed} {part}")).text(n) for part, n in enumerate((words, other, other))
        )
        return cls(train, valid, test)

    def numbers(self) -> Tensor:
        """The number of each word, the most frequent first."""
        order = torch.bincount(self.train.words, minlength=WORDS).argsort(descending=True, stable=True)
        return torch.empty_like(order).scatter_(0, order, torch.arange(WORDS))


@dataclass
class Run:
    """What came of one training.  ``failure``: what the layer raised, if it did."""

    seed: int
    rate: float
    skip: str
    steps: int
    perplexity: float = math.inf
    trained: float = math.inf
    agreement: float = math.nan
    seconds: float = math.nan
    converged: float = 1.0
    backward_converged: float = 1.0
    unsolved: int = 0  # windows of the test
    residual: float = 0.0
    evaluations: float = 0.0
    products: float = 0.0
    failure: str = ""
    curve: list[tuple[float, float]] = field(default_factory=list)  # CPU seconds and loss of every step


def windows(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the text from random places and what follows each of their words, ``(batch, T)`` each."""
    starts = torch.randint(len(text) - POSITIONS - 1, (BATCH, 1), generator=generator)
    piece = text[starts + torch.arange(POSITIONS + 1)]
    return piece[:, :-1], piece[:, 1:]


def evaluate(model: Model, text: Text, numbers: Tensor, run: Run | None = None) -> tuple[float, float]:
    """Perplexity, and the share of verbs within a clause's reach of whose two numbers the right one is thought likelier.

    Windows overlap by half, and the second half counts: every word has at least as many before it.  Of verbs those count
    between which and their subject other words stand.
    """
    words, half = numbers[text.words], POSITIONS // 2
    of_number = [numbers[torch.tensor(verbs(n))] for n in (0, 1)]
    total, count, right, asked = 0.0, 0, 0, 0
    model.eval()
    with torch.no_grad():
        for starts in torch.arange(0, len(words) - POSITIONS - 1, half).split(64):
            places = starts.unsqueeze(1) + torch.arange(POSITIONS)
            h, scored = model.features(words[places])[:, half:].flatten(0, 1), places[:, half:].flatten() + 1
            found = model.read(h, words[scored]).output
            total, count = total + float(found.sum()), count + len(found)
            far = text.inside[scored] > 0
            likely = model.read.log_prob(h[far]).exp()
            singular, plural = (likely[:, group].sum(1) for group in of_number)
            right += int(((plural > singular) == (text.number[scored][far] == 1)).sum())
            asked += int(far.sum())
            if run is not None and isinstance(model.body, DEQ):
                solution = model.body.solution
                assert solution is not None
                size = solution.value.flatten(1).norm(dim=1)
                run.residual = max(run.residual, float((solution.residual_norm / size)[solution.converged].max()))
                run.unsolved += int((~solution.converged).sum())
    model.train()
    return math.exp(-total / count), right / max(1, asked)


def train(model: Model, run: Run, corpus: Corpus, test: Text) -> Run:
    """Adam with warm-up and cosine decay at ``run.rate``; perplexity on ``test``, and on a short training text."""
    numbers, generator = corpus.numbers(), torch.Generator().manual_seed(run.seed)
    text = numbers[corpus.train.words]
    optimizer = torch.optim.Adam(model.parameters(), lr=run.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) / (0.05 * run.steps)) * 0.5 * (1 + math.cos(math.pi * k / run.steps))
    )
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgivenWarning)  # counted below
            for _ in range(run.steps):
                loss = -model(*windows(text, generator)).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                run.curve.append((time.process_time() - start, float(loss.detach())))
                if isinstance(model.body, DEQ):
                    _note(run, model.body.solution)
        run.seconds = time.process_time() - start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgivenWarning)
            run.perplexity, run.agreement = evaluate(model, test, numbers, run)
            if len(corpus.train) <= len(test):
                run.trained = evaluate(model, corpus.train, numbers)[0]
    except ik.ConvergenceError as error:
        run.perplexity, run.failure = math.inf, f"after {len(run.curve)} steps: {str(error)[:90]}"
    return run


def _note(run: Run, solution: ik.Solution | None) -> None:
    """Shares of samples solved and what was spent, averaged over the steps."""
    assert solution is not None and solution.backward is not None
    run.converged -= float((~solution.converged).double().mean()) / run.steps
    run.backward_converged -= float((~solution.backward.converged).double().mean()) / run.steps
    run.evaluations += solution.evaluations / run.steps
    run.products += int(solution.backward.steps.max()) / run.steps


def saved_bytes(model: Model, x: Tensor, y: Tensor) -> int:
    """Bytes that the body saves for backward in one training step, parameters excepted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    embedded = model.embed(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model.body(embedded)
    (out.square().mean()).backward()
    model.zero_grad()
    return sum(seen.values())
