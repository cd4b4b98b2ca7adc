r"""Fenchel-Young losses: a convex loss for every smoothed choice, whose gradient is ``prediction - label``.

Source: Blondel, Martins & Niculae (2020), "Learning with Fenchel-Young losses", J. Mach. Learn. Res. 21.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.options import Configured, at_least, check_options, function, optional
from implicitkit.relax.envelope import envelope
from implicitkit.relax.perturbed import Perturbed
from implicitkit.sets.base import Projection


@dataclass(frozen=True)
class FenchelYoung(Configured):
    r"""``L(\theta, y) = max_p [<\theta, p> - \Omega(p)] + \Omega(y) - <\theta, y>``, not negative, zero where
    ``y = p*(\theta)``, the maximiser, and convex in ``\theta`` with the gradient ``p*(\theta) - y``.

        loss = ik.relax.FenchelYoung(ik.project.simplex())       # the sparsemax loss (Martins & Astudillo 2016)
        loss = ik.relax.FenchelYoung(ik.project.kl_simplex())    # the logistic loss, cross entropy
        loss = ik.relax.FenchelYoung(ik.project.birkhoff(), dims=2)
        loss = ik.relax.FenchelYoung(ik.relax.Perturbed(cheapest_path))
        loss(scores, labels).mean().backward()

    Units: those of ``<\theta, p>``.

    Args:
        predict: ``p*``, one of: a projection of ``ik.project`` (``\Omega = |p|^2 / 2`` on its set, or ``\sum p log p - p``
            in the Kullback-Leibler divergence); a :class:`Perturbed` choice (``\Omega`` is the conjugate of the perturbed
            maximum, and the constant ``\Omega(y)`` is left out); any function, with its ``regulariser``.
        regulariser: ``\Omega``, from ``p`` to ``(*batch,)``.
        dims: how many last dimensions are one event.

    Raises:
        TypeError: ``predict`` is a function and ``regulariser`` is missing, or one of them is not callable.
        ValueError: ``dims`` below 1; (from the call) labels of another shape than the scores.
    """

    predict: Callable[[Tensor], Tensor]
    regulariser: Callable[[Tensor], Tensor] | None = None
    dims: int = 1

    def __post_init__(self) -> None:
        called = function()
        check_options(self, predict=called, regulariser=optional(called), dims=at_least(1))
        if self.regulariser is None and not isinstance(self.predict, (Projection, Perturbed)):
            raise TypeError(
                "FenchelYoung: a function needs its regulariser=; only projections and Perturbed bring their own"
            )
        if isinstance(self.predict, Perturbed) and self.predict.dims != self.dims:
            raise ValueError(f"FenchelYoung: dims is {self.dims}, that of the Perturbed choice {self.predict.dims}")

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        r"""The loss of each sample.

        Args:
            scores: ``\theta``, ``(*batch, *event)``. labels: ``y``, of the same shape (a class as a unit vector).
        """
        if not isinstance(labels, Tensor):
            raise TypeError(
                f"labels must be a tensor like the scores, got {type(labels).__name__}; turn numbers of classes into unit "
                "vectors with torch.nn.functional.one_hot"
            )
        if labels.shape != scores.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, scores {tuple(scores.shape)}: both must agree; turn numbers of "
                "classes into unit vectors with torch.nn.functional.one_hot"
            )
        labels = labels.to(scores.dtype)
        linear = self._inner(scores, labels)
        if isinstance(self.predict, Perturbed):
            return self.predict.maximum(scores) - linear
        p = self.predict(scores)
        highest = envelope(self._inner(scores, p) - self._omega(p), scores, p, self.dims)
        return highest + self._omega(labels) - linear

    def _inner(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(tuple(range(-self.dims, 0)))

    def _omega(self, p: Tensor) -> Tensor:
        if self.regulariser is not None:
            return self.regulariser(p)
        if getattr(self.predict, "euclidean", True):
            return 0.5 * self._inner(p, p)
        return (torch.xlogy(p, p) - p).sum(tuple(range(-self.dims, 0)))
