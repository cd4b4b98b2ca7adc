r"""Perturbed optimisers: the expected choice under noise, differentiable whatever solver makes the choice.

Source: Berthet, Blondel, Teboul, Cuturi, Vert & Bach (2020), "Learning with differentiable perturbed optimizers".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.constants import constants
from implicitkit.foundation.options import Configured, at_least, check_options, function, one_of, optional, positive
from implicitkit.relax.envelope import envelope

_NOISES = ("normal", "gumbel")


@dataclass(frozen=True)
class Perturbed(Configured):
    r"""``y(\theta) = E[choose(\theta + \sigma Z)]``, with ``choose(\theta) = argmax_{y \in C} <\theta, y>`` of any origin: a
    sort, a shortest path, a matching, a program in another language.

    With ``p`` the density of ``Z``, ``y(\theta) = \int choose(u) p((u - \theta) / \sigma) du``: only the density depends on
    ``\theta``.  Each draw ``u`` is weighed by ``p((u - \theta) / \sigma) / p((u - \theta_0) / \sigma)``, which is 1 and has
    all derivatives, in every mode, so that the derivatives of the average are the unbiased estimates of all orders
    (Berthet et al., proposition 3.1, is the first).  The mean of the choices is taken off before weighing, which takes much
    of the noise out of the derivatives and no expectation away.

        def best(scores):  # the choice itself: one-hot of the largest
            return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)

        ik.relax.Perturbed(best, sigma=0.5, noise="gumbel")(scores)  # softmax(scores / 0.5), up to sampling error

    The standard error of the value falls as ``1 / sqrt(samples)``, that of a derivative of order ``k`` is ``sigma^-k`` times
    as large.  Memory: ``samples`` times the batch.

    Units: ``sigma`` has those of ``\theta``.  Source: Berthet et al. (2020), "Learning with differentiable perturbed
    optimizers".

    Args:
        choose: from ``(*batch, *event)`` to the choices, of the same shape; never differentiated.
        samples: draws, at least 2. sigma: size of the noise. noise: ``"normal"`` or ``"gumbel"``.
        dims: how many last dimensions are one event.
        batch: ``"native"``: ``choose`` takes a batch; ``"loop"``: it is called with one event at a time.
        seed: a number: the same draws at every call and for all samples of a batch (under ``torch.vmap`` too); ``None``:
            new ones from torch's generator.

    Raises:
        TypeError: ``choose`` is not callable. ValueError: an option out of range; (from the call) choices of another shape.
    """

    choose: Callable[[Tensor], Tensor]
    samples: int = 1000
    sigma: float = 1.0
    noise: str = "normal"
    dims: int = 1
    batch: str = "native"
    seed: int | None = None

    def __post_init__(self) -> None:
        check_options(
            self,
            choose=function("choose(theta)"),
            samples=at_least(2),
            sigma=positive(),
            noise=one_of(*_NOISES),
            dims=at_least(1),
            batch=one_of("native", "loop"),
            seed=optional(at_least(0)),
        )

    def __call__(self, theta: Tensor) -> Tensor:
        """The mean choice, of the shape of ``theta``."""
        return self._mean(theta, *self._draw(theta))

    def maximum(self, theta: Tensor) -> Tensor:
        r"""``E[max_y <\theta + \sigma Z, y>]``, ``(*batch,)``; its derivative is the mean choice."""
        drawn = self._draw(theta)
        at, noise, choices = drawn
        events = tuple(range(-self.dims, 0))
        highest = ((at.unsqueeze(0) + self.sigma * noise) * choices).sum(events).mean(0)
        return envelope(highest, theta, self._mean(theta, *drawn), self.dims)

    def _draw(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The point, the noise and the choices, as constants; the draws in front."""
        if not isinstance(theta, Tensor) or not theta.is_floating_point():
            got = theta.dtype if isinstance(theta, Tensor) else type(theta).__name__
            raise TypeError(f"Perturbed takes a real floating-point tensor, got {got}")
        if theta.ndim < self.dims:
            raise ValueError(f"Perturbed: an event has {self.dims} dimension(s), the tensor {theta.ndim}")
        at, noise, choices = constants(self._sample, theta)
        return at, noise.movedim(-1, 0), choices.movedim(-1, 0)

    def _sample(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On a plain tensor; the draws as last dimension, since ``torch.vmap`` adds its own in front."""
        generator, event = None, theta.shape
        if self.seed is not None:
            generator = torch.Generator(theta.device).manual_seed(self.seed)
            event = theta.shape[theta.ndim - self.dims :]
        drawn = torch.empty(self.samples, *event, dtype=theta.dtype, device=theta.device)
        if self.noise == "normal":
            drawn = drawn.normal_(generator=generator)
        else:
            tiny = torch.finfo(theta.dtype).tiny
            drawn = -drawn.exponential_(generator=generator).clamp_min(tiny).log()
        lead = (1,) * (theta.ndim - len(event))
        noise = drawn.reshape(self.samples, *lead, *event).expand(self.samples, *theta.shape)
        points = theta + self.sigma * noise
        if not points.numel():
            choices = points  # nothing to choose from, or nobody who does
        elif self.batch == "loop":
            shape = theta.shape[theta.ndim - self.dims :]
            events = [torch.as_tensor(self.choose(point), device=theta.device) for point in points.reshape(-1, *shape)]
            choices = torch.stack(events).reshape(points.shape) if all(e.shape == shape for e in events) else events[0]
        else:
            choices = torch.as_tensor(self.choose(points), device=theta.device)
        if choices.shape != points.shape:
            raise ValueError(
                f"choose returned shape {tuple(choices.shape)} for scores of shape "
                f"{tuple(points.shape if self.batch == 'native' else shape)}: a choice has the shape of the scores"
            )
        return theta.clone(), noise.movedim(0, -1).clone(), choices.detach().to(theta).movedim(0, -1).clone()

    def _mean(self, theta: Tensor, at: Tensor, noise: Tensor, choices: Tensor) -> Tensor:
        z = noise + (at - theta).unsqueeze(0) / self.sigma
        log = (
            -0.5 * (z.square() - noise.square()) if self.noise == "normal" else noise - z + (-noise).exp() - (-z).exp()
        )
        weight = log.sum(tuple(range(-self.dims, 0)), keepdim=True).exp()
        mean = choices.mean(0)
        return mean + ((choices - mean) * weight).sum(0) / (self.samples - 1)
