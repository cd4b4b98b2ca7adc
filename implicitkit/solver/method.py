"""Iterative methods: ``init`` once, then ``step`` until the driver is satisfied.

A method author sees plain ``(batch, n)`` matrices.  The driver (``driver.py``) owns everything else: pytrees, dtypes,
termination, freezing and dropping of converged samples, the best iterate, traces, callbacks and failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.driver import iterate
from implicitkit.solver.evaluations import Evaluations
from implicitkit.system import System


class Method(Solver):
    """An iterative method: ``init`` once, then ``step`` until the driver is satisfied.

    ``f`` is callable, ``f(z)`` maps ``(batch, n)`` to ``(batch, n)``; what it is depends on what the method solves:

    =================  ======================================  ==========================================
    ``solves``         ``f(z)``                                also
    =================  ======================================  ==========================================
    ``fixed_point``    the map                                 ``f.residual(z) = f(z) - z``
    ``root``           the residual                            ``f.jacobian(z)``, ``f.linearize(z)``
    ``minimise``       the gradient                            ``f.value(z)``: objective, shape ``(batch,)``
    ``least_squares``  the gradient of half the squared norm   ``f.residuals(z)``: shape ``(batch, m)``
    ``steady_state``   the right-hand side ``dz/dt``           as for ``root``
    =================  ======================================  ==========================================

    The driver has evaluated ``f`` at ``z`` before each step, and ``f`` remembers its last argument (by identity), so
    ``f(z)`` inside ``step`` costs nothing.  Rows of ``z`` are independent samples: a step must treat them row by row.

    ``state`` is any pytree; **every tensor in it has the batch as its first dimension** (the driver drops rows of it
    when samples converge), whatever is shared by the batch is kept as plain Python numbers.
    """

    solves: ClassVar[str] = ""
    default_max_steps: ClassVar[int] = 1000
    #: Is the point with the smallest residual returned (else the last finite one, which then is ``f.best``)?
    keeps_best: ClassVar[bool] = True
    #: Do others go on from where it gives up?  Then nobody asks there whether that may be a solution after all.
    hands_over: ClassVar[bool] = False
    #: Does every step shrink an interval with a zero inside, so that it gets on whatever the residual is after it?
    encloses: ClassVar[bool] = False
    #: Is every step of a minimisation one down?  Then nobody asks whether the objective is higher in the end.
    descends: ClassVar[bool] = False

    @property
    def differentiable(self) -> bool:
        """Is a step made of plain differentiable operations, so that it can be unrolled?"""
        return False

    def init(self, f: Evaluations, z: Tensor) -> Any:
        """The state before the first step (default: none)."""
        return ()

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step: a **new** tensor ``z_next`` (never ``z`` changed in place) and the new state."""
        raise NotImplementedError(f"{type(self).__name__} has no step method")

    def keep(self, state: Any) -> dict[str, Tensor]:
        """What is kept of the final state of every sample, in ``Outcome.kept``: tensors ``(batch, ...)`` (default: none)."""
        return {}

    def select(self, state: Any, index: Tensor) -> Any:
        """The state of the samples ``index`` only (default: rows of every tensor in it)."""
        return _rows(state, index)

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """The driver's loop."""
        f.system.lifted.call.kept()
        return iterate(self, f, z0, options)

    def unroll(self, f: Evaluations, z0: Tensor, steps: int) -> Tensor:
        if not self.differentiable:
            return super().unroll(f, z0, steps)
        z, state = z0, self.init(f, z0)
        for _ in range(steps):
            z, state = self.step(f, z, state)
        return z


def _rows(state: Any, index: Tensor) -> Any:
    """These rows of every tensor in a state; containers of Python's own by hand, which is many times faster."""
    if isinstance(state, Tensor):
        if state.ndim > 1 and state.stride(0) < state.stride(1):  # one entry of all samples after another stays so
            return state.transpose(0, 1).index_select(1, index).transpose(0, 1)
        return state.index_select(0, index) if state.ndim else state
    if type(state) is dict:
        return {name: _rows(part, index) for name, part in state.items()}
    if type(state) in (tuple, list):
        return type(state)(_rows(part, index) for part in state)
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    return trees.tree_map(lambda t: t.index_select(0, index) if isinstance(t, Tensor) and t.ndim else t, state)


class TrackedEvaluations(Evaluations):
    """``f`` with every operation visible to autograd and to the transforms around the call."""

    def __init__(self, system: System, theta: Sequence[Tensor], solves: str) -> None:
        super().__init__(system, theta, solves)
        self._how, self.fits = "visible", None
