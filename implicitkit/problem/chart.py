r"""Unknowns on a manifold: ``z = retract(c, delta)`` with the centre ``c`` of the chart, solved for ``delta``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.trees import Layout
from implicitkit.manifold.product import Product, as_manifold
from implicitkit.problem.base import Problem, Restated, deeper
from implicitkit.problem.wrapping import Around


class OnChart(Around):
    """``function(retract(centre, delta), *args)`` as a function of ``delta``, with the centre the first of the arguments."""

    identified_by = ("function", "said")

    def __init__(self, function: Callable[..., Any], manifold: Product) -> None:
        super().__init__(function)
        self.manifold, self.said = manifold, repr(manifold)

    def __call__(self, delta: Any, centre: Any, *args: Any) -> Any:
        return self.function(self.manifold.retract(centre, delta), *args)


def on_chart(problem: Problem, function: str, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
    """A problem with ``manifold=`` in the chart about ``z0``; ``function`` is the name of its function.

    Raises:
        ValueError: ``z0`` is not on the manifold.
    """
    Layout(z0, batch_dims)  # refuses what cannot be an unknown
    manifold = as_manifold(problem.manifold)
    manifold.check(z0)
    centre = trees.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, z0)
    inner = replace(  # type: ignore[type-var]
        problem, **{function: OnChart(getattr(problem, function), manifold), "manifold": None}
    )
    return deeper(inner, manifold.zero(centre), args, batch_dims, centre, lambda d, c: manifold.retract(c, d))


def check_manifold(problem: Problem, *others: str) -> None:
    """Raise unless ``manifold=`` is one, and none of the ``others``, which speak of vectors, is given.

    Raises:
        TypeError: it is none. ValueError: it cannot be combined with these.
    """
    if problem.manifold is None:
        return
    as_manifold(problem.manifold)
    given = [name for name in others if getattr(problem, name) not in (None, ())]
    if given:
        raise ValueError(
            f"manifold= cannot be combined with {' and '.join(given)}=, which speak of vectors: state what must hold "
            "besides as residuals or in the objective"
        )
