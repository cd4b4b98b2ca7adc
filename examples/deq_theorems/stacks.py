r"""Many small ReLU models of one kind, trained side by side as one stack: equilibria, or networks of some hidden layers.

    equilibrium   z = relu(W z + U x + b),                              y = v . z + c
    network       z_1 = relu(U x + b),  z_k = relu(W_k z_{k-1} + b_k),  y = v . z_L + c

Samples are solved one by one and the optimisers are elementwise, so that each is trained as it would be alone.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from implicitkit_deq import DEQ, Cell, Forgive, ForgivenWarning

from .cost import Cost, cost


@dataclass(frozen=True)
class Kind:
    """layers: hidden ones; 0 is an equilibrium.  lower: ``W`` of an equilibrium is held strictly lower triangular.  gain: of
    the orthogonal ``W`` that an equilibrium starts from."""

    layers: int
    width: int = 10
    lower: bool = False
    gain: float = 0.9


class Equilibrium(Cell):
    """``relu(W z + U x + b)``, a cell for each model; a sample goes with ``which`` of them it belongs to."""

    def __init__(self, W: nn.Parameter, lower: bool, points: int) -> None:
        super().__init__()
        self.W, self.lower, self.points = W, lower, points

    def inject(self, driven: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """``U x + b`` comes from outside."""
        return driven, which

    def update(self, z: Tensor, driven: Tensor, which: Tensor) -> Tensor:
        """All samples, in the order of the models, or any of them."""
        W = self.W.tril(-1) if self.lower else self.W
        if len(z) == len(W) * self.points:
            stacked = (t.view(len(W), self.points, -1) for t in (driven, z))
            return torch.relu(torch.baddbmm(*stacked, W.mT)).flatten(0, 1)
        return torch.relu(driven + (W[which] @ z.unsqueeze(2)).squeeze(2))


class Stack(nn.Module):
    """``count`` models of one kind, each with as many ``points`` of as many ``inputs``."""

    def __init__(self, count: int, points: int, inputs: int, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        n, equilibrium = kind.width, kind.layers == 0

        def uniform(bound: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(count, *shape).uniform_(-bound, bound))

        he = math.sqrt(6 / inputs)  # He et al. (2015)
        self.U, self.b = uniform(he, n, inputs), uniform(he / 2, n)
        self.v, self.c = uniform(n**-0.5, n), nn.Parameter(torch.zeros(count))
        self.hidden, self.biases, self.layer = nn.ParameterList(), nn.ParameterList(), None
        if equilibrium:
            W = nn.Parameter(torch.stack([nn.init.orthogonal_(torch.empty(n, n), kind.gain) for _ in range(count)]))
            self.layer = DEQ(Equilibrium(W, kind.lower, points), (n,), rtol=1e-4, on_failure=Forgive(share=1.0))
        for _ in range(kind.layers - 1):
            self.hidden.append(uniform(math.sqrt(6 / n), n, n))
            self.biases.append(uniform(n**-0.5, n))
        self.which = torch.arange(count).repeat_interleave(points)

    def features(self, x: Tensor) -> Tensor:
        """``(count, points, width)``: the equilibrium, or the last hidden layer."""
        driven = torch.baddbmm(self.b.unsqueeze(1), x, self.U.mT)
        if self.layer is not None:
            index = torch.arange(len(self.which)) if self.training else None
            return self.layer(driven.flatten(0, 1), self.which, index=index).view_as(driven)
        z = torch.relu(driven)
        for W, b in zip(self.hidden, self.biases, strict=True):
            z = torch.relu(torch.baddbmm(b.unsqueeze(1), z, W.mT))
        return z

    def forward(self, x: Tensor) -> Tensor:
        """``(count, points)`` outputs for ``(count, points, inputs)``."""
        return (self.features(x) @ self.v.unsqueeze(2)).squeeze(2) + self.c.unsqueeze(1)

    def size(self) -> int:
        """Parameters of one model, those counted that are free."""
        held = 0 if self.layer is None or not self.layer.cell.lower else self.v.shape[1] * (self.v.shape[1] + 1) // 2
        return sum(p[0].numel() for p in self.parameters()) - held

    def largest(self) -> Tensor:
        """The largest entry of each model's weights in absolute value, biases not counted, ``(count,)``."""
        inner: Iterable[Tensor] = self.hidden if self.layer is None else [self.layer.cell.W]
        parts = [self.U.flatten(1), self.v, *(W.flatten(1) for W in inner)]
        return torch.cat(parts, 1).detach().abs().amax(1)


@dataclass(frozen=True)
class Trained:
    """By target and seed, ``(targets, seeds)``: mean squared errors on the points that were fitted and on those held out,
    largest weights, the share of samples, over all steps, that had an equilibrium.  The rate of each target, the models in
    their order, and CPU seconds."""

    error: Tensor
    held: Tensor
    largest: Tensor
    solved: Tensor
    rates: tuple[float, ...]
    models: Stack = field(repr=False)
    seconds: float


Optimiser = Callable[..., torch.optim.Optimizer]


def train(
    kind: Kind,
    x: Tensor,
    y: Tensor,
    steps: int,
    rates: Sequence[float],
    seeds: int,
    seed: int,
    *,
    hold: bool = False,
    optimiser: Optimiser = torch.optim.Adam,
) -> Trained:
    """``seeds`` models for each of the targets ``x (targets, points, inputs)``, ``y (targets, points)``, each target at its
    rate, which falls to zero by a cosine.  hold: every fifth point is held out."""
    torch.manual_seed(seed)
    x, y = (t.repeat_interleave(seeds, 0) for t in (x, y))
    models = Stack(*x.shape, kind)
    seen = torch.arange(x.shape[1]) % 5 != 2 if hold else torch.ones(x.shape[1], dtype=torch.bool)
    used = optimiser(models.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(used, steps)
    each = torch.tensor(rates).repeat_interleave(seeds)
    solved, start = torch.zeros(len(x)), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgivenWarning)  # counted here
        for _ in range(steps):
            used.zero_grad()
            (models(x) - y)[:, seen].square().mean(1).sum().backward()
            before = [p.detach().clone() for p in models.parameters()]
            used.step()
            schedule.step()
            with torch.no_grad():  # a step is linear in its rate, and every model has its own
                for p, old in zip(models.parameters(), before, strict=True):
                    p.copy_(old + each.view(-1, *(1,) * (p.ndim - 1)) * (p - old))
            solution = None if models.layer is None else models.layer.solution
            solved += 1.0 if solution is None else solution.converged.view(y.shape).float().mean(1)
        with torch.no_grad():
            squares = (models(x) - y).square()
    seconds, shape = time.process_time() - start, (len(rates), seeds)
    error, held = (squares[:, which].mean(1).view(shape) for which in (seen, ~seen if hold else seen))
    return Trained(
        error, held, models.largest().view(shape), (solved / steps).view(shape), tuple(rates), models, seconds
    )


def at_best_rate(
    kind: Kind,
    x: Tensor,
    y: Tensor,
    steps: int,
    rates: Sequence[float],
    seeds: int,
    seed: int,
    *,
    optimiser: Optimiser = torch.optim.Adam,
) -> Trained:
    """Every target at the rate whose error on points held out is least, the mean of four seeds that no result uses."""
    best = [rates[0]] * len(x)
    if len(rates) > 1:
        tried = [t.repeat_interleave(len(rates), 0) for t in (x, y)]
        one = train(kind, *tried, steps, tuple(rates) * len(x), 4, 10_000, hold=True, optimiser=optimiser)
        errors = one.held.mean(1).view(len(x), len(rates)).nan_to_num(math.inf)
        best = [rates[k] for k in errors.argmin(1).tolist()]
    return train(kind, x, y, steps, best, seeds, seed, optimiser=optimiser)


def price(models: Stack, k: int, x: Tensor, y: Tensor) -> tuple[Cost, int]:
    """What one step of model ``k`` costs, ``x (1, points, inputs)``, ``y (1, points)``, solved from zero; evaluations."""
    alone = Stack(1, *x.shape[1:], models.kind)
    alone.load_state_dict({name: t[k : k + 1] for name, t in models.state_dict().items()})
    used = cost(lambda: (alone(x) - y).square().mean(), (x, y, *alone.parameters()))
    solution = None if alone.layer is None else alone.layer.solution
    return used, 0 if solution is None else solution.evaluations
