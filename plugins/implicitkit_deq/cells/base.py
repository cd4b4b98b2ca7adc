"""What a cell is: the map ``z = cell(z, x)``, split into what depends on the state and what does not."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from implicitkit import extend


class Cell(extend.Configured, nn.Module):
    r"""A map ``z -> f(z; x)`` whose dependence on the inputs is computed once per solve.

        f(z; x_1, x_2, ...) = update(z, *inject(x_1, x_2, ...))

    A subclass defines :meth:`update`, and :meth:`inject` where something depends on the inputs only (``U x + b``); a
    :class:`DEQ` calls ``inject`` once and ``update`` at every evaluation.  ``cell(z, x)`` is the whole map, so that a cell
    can be used wherever a function ``(z, x) -> z`` can.

    Any other callable ``(z, *inputs) -> z`` serves a :class:`DEQ` as well; it has no injection to compute once.

    Class attributes:
        injected_dims: as ``in_dims`` of :func:`ik.solve`, for what ``inject`` returns: ``0`` (every tensor of it has the
            batch first), ``None`` (shared by the batch, or not known), or a tuple with one such entry each.  Where known,
            converged samples are dropped from later evaluations; not so where one evaluation, before the first solve,
            shows that an argument which counts as one row a sample is shared.
        causal: position ``t`` of the state (its first dimension after the batch) depends on positions ``<= t`` only.

    Shapes: a state is ``(batch, *state_shape)``, inputs have the batch first.  Units: ``f(z)`` has those of ``z``.

    Raises (when called): what torch raises for shapes that do not fit; ``TypeError`` from :meth:`state_shape` where a cell
        does not say the shape of its state.
    """

    injected_dims: Any = 0
    causal: bool = False

    def inject(self, *inputs: Any) -> tuple[Any, ...]:
        """What ``update`` gets after the state, computed once per solve: a tuple (default: the inputs themselves)."""
        return inputs

    def update(self, z: Any, *injected: Any) -> Any:
        """The next state, of the structure, shapes and dtypes of ``z``."""
        own = type(self).forward is not Cell.forward
        hint = "; with forward(z, *inputs) alone it is a cell as a plain nn.Module" if own else ""
        raise NotImplementedError(f"{type(self).__name__} must define update(z, *injected){hint}")

    def forward(self, z: Any, *inputs: Any) -> Any:
        """``update(z, *inject(*inputs))``."""
        return self.update(z, *self.inject(*inputs))

    def output(self, z: Any) -> Any:
        """What the layer returns of the equilibrium ``z`` (default: all of it)."""
        return z

    def state_shape(self, *inputs: Any) -> Any:
        """The shape of one sample's state (a pytree of shapes), for a :class:`DEQ` that is given none."""
        raise TypeError(
            f"{type(self).__name__} does not say the shape of its state (method state_shape): pass it, as in "
            "DEQ(cell, state=(dim,))"
        )

    def recurrent_weights(self) -> list[Tensor]:
        """The weights that multiply the state: what initialisation scales (default: none are known)."""
        return []


def check_image(x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` is a batch of images."""
    if x.ndim != 4:
        raise ValueError(f"x must be (batch, channels, height, width), got shape {tuple(x.shape)}")
