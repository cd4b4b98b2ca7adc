"""Cheap, approximate rules for fixed points: the inverse of ``I - J`` replaced by a few terms of a series.

Their gradients descend on contractive maps, and are too short, the more so the closer the map is to losing
contraction; every one says so in its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation.options import at_least, between, check_options
from implicitkit.linear import DampedSeries, NeumannSeries
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import register_rule
from implicitkit.rule.request import Request

__all__ = ["Neumann", "OneStep", "Phantom"]


class _Series(Rule):
    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)

    def _series(self) -> Any:
        raise NotImplementedError(type(self).__name__)

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        return request.solve(self._series(), rtol=0.0, atol=0.0, max_steps=None)


@register_rule("neumann")
@dataclass(frozen=True)
class Neumann(_Series):
    r"""``(I - J)^{-1} ~ sum_{i=0}^{terms} J^i``: error ``O(|J|^{terms + 1})`` (Lorraine, Vicol & Duvenaud 2020, eq. 8).

    Args:
        terms: highest power of ``J``; that many products with the Jacobian.
    """

    terms: int = 10

    def __post_init__(self) -> None:
        check_options(self, terms=at_least(0))

    def _series(self) -> Any:
        return NeumannSeries(terms=self.terms)


@register_rule("one_step")
@dataclass(frozen=True)
class OneStep(_Series):
    r"""``(I - J)^{-1} ~ I``: the derivative of one application of the map at the solution, no products with the Jacobian.

    The Jacobian-free backward of Fung et al. 2022 (arXiv 2103.12803), also "one-step differentiation" (Bolte, Pauwels &
    Vaiter 2023); a descent direction if the map is contractive enough (Fung et al., theorem 3.1).
    """

    def _series(self) -> Any:
        return NeumannSeries(terms=0)


@register_rule("phantom")
@dataclass(frozen=True)
class Phantom(_Series):
    r"""The phantom gradient of Geng et al. 2021 (arXiv 2111.05177, eq. 7): ``steps`` damped steps at the solution.

    ``(I - J)^{-1} ~ damping * sum_{i=0}^{steps-1} ((1 - damping) I + damping J)^i``, the derivative of
    ``z <- (1 - damping) z + damping f(z)`` applied ``steps`` times.  ``Phantom(1, 1.0)`` is :class:`OneStep`.

    Args:
        steps: at least 1. damping: in (0, 1].
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, steps=at_least(1), damping=between(0, 1, closed=True))

    def _series(self) -> Any:
        return DampedSeries(steps=self.steps, damping=self.damping)
