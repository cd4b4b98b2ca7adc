"""Cheap, approximate rules: an inverse replaced by a few terms of its series.

The inverse is that of ``I - J`` at a fixed point; for ``neumann`` also that of a Hessian at a minimum.

Their gradients descend on contractive maps, and are too short, the more so the closer the map is to losing
contraction; every one says so in its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation.options import at_least, between, check_options, optional, positive
from implicitkit.linear import DampedSeries, NeumannSeries, Richardson
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import register_rule
from implicitkit.rule.request import Request


class _Series(Rule):
    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)
    exact: ClassVar[bool] = False

    def _series(self) -> Any:
        raise NotImplementedError(type(self).__name__)

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        return request.solve(self._series(), rtol=0.0, atol=0.0, max_steps=None)


@register_rule("neumann")
@dataclass(frozen=True)
class Neumann(_Series):
    r"""A few terms of the series of the inverse (Lorraine, Vicol & Duvenaud 2020, arXiv 1911.02590, section 4.1).

    Fixed points: ``(I - J)^{-1} ~ sum_{i=0}^{terms} J^i``, error ``O(|J|^{terms + 1})``.  Minima without constraints, with
    the Hessian ``H``: ``H^{-1} ~ step sum_{i=0}^{terms} (I - step H)^i``, as if ``terms + 1`` steps of gradient descent had
    been differentiated at the minimum; the error in an eigenvector of eigenvalue ``h`` is ``(1 - step h)^{terms + 1}``
    of its part.

        ik.argmin(inner, w0, (theta,), rule=ik.Neumann(terms=20, step=0.1))

    Args:
        terms: highest power; that many products with the Jacobian.  0 is the identity alone, the Jacobian-free derivative.
        step: of a minimum, below ``2 / |H|``; ``None``: ``1 / |H|``, found by eight more products.  Of a fixed point in
            ``(0, 1]``, the damping of the map; ``None``: 1.

    Raises:
        ConvergenceError (when a derivative is taken): the step is so long that the series grows.
    """

    needs: ClassVar[tuple[str, ...]] = ("fixed_point", "argmin", "least_squares")
    terms: int = 10
    step: float | None = None

    def __post_init__(self) -> None:
        check_options(self, terms=at_least(0), step=optional(positive()))

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        series: Any
        if not request.system.problem.kind.iteration:
            series = Richardson(terms=self.terms, step=self.step)
        elif self.step is None:
            series = NeumannSeries(terms=self.terms)
        else:
            series = DampedSeries(steps=self.terms + 1, damping=self.step)
        return request.solve(series, rtol=0.0, atol=0.0, max_steps=None)


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
