"""What a solver is: an iterative :class:`Method`, or a black-box function that returns :class:`Found`.

A method author sees plain ``(batch, n)`` matrices.  The driver (``driver.py``) owns everything else: pytrees, dtypes,
termination, freezing and dropping of converged samples, the best iterate, traces, callbacks and failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit import trees

if TYPE_CHECKING:
    from implicitkit.solver.driver import Options, Outcome
    from implicitkit.solver.evaluations import Function

__all__ = ["BlackBox", "Direct", "Found", "Method", "Strategy"]


class Method:
    """An iterative method: ``init`` once, then ``step`` until the driver is satisfied.

    ``f`` is callable, ``f(z)`` maps ``(batch, n)`` to ``(batch, n)``; what it is depends on what the method solves:

    =================  ======================================  ==========================================
    ``solves``         ``f(z)``                                also
    =================  ======================================  ==========================================
    ``fixed_point``    the map                                 ``f.residual(z) = f(z) - z``
    ``root``           the residual                            ``f.jacobian(z)``, ``f.linearize(z)``
    ``minimise``       the gradient                            ``f.value(z)``: objective, shape ``(batch,)``
    ``least_squares``  the gradient of half the squared norm   ``f.residuals(z)``: shape ``(batch, m)``
    =================  ======================================  ==========================================

    The driver has evaluated ``f`` at ``z`` before each step, and ``f`` remembers its last argument (by identity), so
    ``f(z)`` inside ``step`` costs nothing.  Rows of ``z`` are independent samples: a step must treat them row by row.

    ``state`` is any pytree; **every tensor in it has the batch as its first dimension** (the driver drops rows of it
    when samples converge), whatever is shared by the batch is kept as plain Python numbers.
    """

    name: ClassVar[str] = ""
    solves: ClassVar[str] = ""
    max_size: ClassVar[int | None] = None
    default_max_steps: ClassVar[int] = 1000
    #: Is the point with the smallest residual returned (else the last finite one, which then is ``f.best``)?
    keeps_best: ClassVar[bool] = True

    def init(self, f: Function, z: Tensor) -> Any:
        """The state before the first step (default: none)."""
        return ()

    def step(self, f: Function, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step: a **new** tensor ``z_next`` (never ``z`` changed in place) and the new state."""
        raise NotImplementedError(f"{type(self).__name__} has no step method")

    def keep(self, state: Any) -> dict[str, Tensor]:
        """What is kept of the final state of every sample, in ``Outcome.kept``: tensors ``(batch, ...)`` (default: none)."""
        return {}

    def select(self, state: Any, index: Tensor) -> Any:
        """The state of the samples ``index`` only (default: rows of every tensor in it)."""
        return trees.tree_map(lambda t: t.index_select(0, index) if isinstance(t, Tensor) and t.ndim else t, state)


class Strategy:
    """A solver made of solvers: :meth:`run` hands the system, or parts of it, to others through the driver."""

    name: ClassVar[str] = ""

    @property
    def solves(self) -> str:
        """What kind of ``f`` it is given (table in :class:`Method`)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it solves")

    def run(self, f: Function, z0: Tensor, options: Options) -> Outcome:
        """Solve from ``z0`` ``(batch, n)``; the outcome has one entry a sample."""
        raise NotImplementedError(f"{type(self).__name__} has no run method")


class Found(NamedTuple):
    """What a black-box solver returns: the point and, if it knows them, its own figures.

    Success is never taken from the solver: the residual at ``z`` is evaluated again and judged.
    """

    z: Any
    steps: int = 0
    evaluations: int = 0
    message: str = ""


@dataclass(frozen=True)
class BlackBox:
    """A registered function ``find(f, z0, *, rtol, atol, max_steps, **options) -> Found`` as a solver.

    ``batch``: ``"loop"`` calls it once per sample with ``z0`` of shape ``(n,)``; ``"native"`` gives it the matrix
    ``(batch, n)``; ``"joint"`` gives it one big system of shape ``(batch * n,)``.
    """

    find: Any
    name: str = ""
    solves: str = "root"
    batch: str = "loop"
    options: tuple[tuple[str, Any], ...] = ()
    max_size: int | None = None
    default_max_steps: ClassVar[int] = 1000

    def __call__(self, f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Found:
        found = self.find(f, z0, rtol=rtol, atol=atol, max_steps=max_steps, **dict(self.options))
        if isinstance(found, Found):
            return found
        return Found(
            torch.as_tensor(found, dtype=z0.dtype, device=z0.device) if not isinstance(found, Tensor) else found
        )


@dataclass(frozen=True)
class Direct:
    """A user's function ``(z0, *args) -> z`` as a solver: it is given his own pytrees, detached, one call a sample."""

    function: Any
    name: str
    kind: str

    @property
    def solves(self) -> str:
        """What the function solves is the user's word."""
        return "direct"
