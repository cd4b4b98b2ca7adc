"""What a solver is: it is given the equations as plain ``(batch, n)`` matrices, and says what came of it.

:class:`Solver` has one method, ``run``.  Most solvers are iterative and derive from
:class:`~implicitkit.solver.method.Method`, whose ``run`` is the driver's loop; functions become
:class:`~implicitkit.solver.black_box.BlackBox` when they are registered; a solver made of solvers derives from
:class:`Solver` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import recording
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import Configured
from implicitkit.solution import Status
from implicitkit.solver.evaluations import Evaluations


def counting_on(callback: Callable[..., Any] | None, shown: int) -> Any:
    """The user's callback, which has seen so many steps already."""
    return callback and (lambda step, z, norm: callback(step + shown, z, norm))


@dataclass(frozen=True)
class Options:
    """How a solve is run: tolerances (``|F| <= atol + rtol * scale``), limits, what is watched.

    ``start_norm``: ``|F|`` ``(batch,)`` where the whole solve began, if that is not where this solver does.
    ``start_size``: the largest entry there, likewise.  ``start_rows``: ``|F_i|`` there, ``(batch, n)``, likewise.
    ``norm``: what ``|F|`` is in tests of convergence, ``(batch, n) -> (batch,)``; ``None``: the 2-norm.
    ``lifts``: what meets kinks is left to the epigraphs of these.
    ``atol_is_default``: nobody gave ``atol``, so that it must follow the units (:meth:`floor`).
    """

    rtol: float
    atol: float
    max_steps: int | None = None
    trace: bool = False
    callback: Callable[[int, Tensor, Tensor], Any] | None = None  # (step, packed z, residual norms)
    start_norm: Tensor | None = None
    norm: Callable[[Tensor], Tensor] | None = None
    atol_is_default: bool = False
    start_size: Tensor | None = None
    start_rows: Tensor | None = None
    lifts: bool = False

    def size(self, rows: Tensor) -> Tensor:
        """``|F|`` of each row, ``(batch,)``; of half precision in float32."""
        rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        return torch.linalg.vector_norm(rows, dim=1) if self.norm is None else self.norm(rows)

    def floor(self, start: Tensor) -> float | Tensor:
        """What is small whatever the scale, ``(batch,)``: ``atol``; where nobody gave one, at most ``rtol`` times the size
        of things at the ``start`` ``(batch,)``, in their units."""
        if not self.atol_is_default or self.rtol == 0:
            return self.atol
        rtol, atol = start.new_full((), self.rtol), start.new_full((), self.atol)
        return torch.fmin(start.mul(rtol), atol)  # atol where the size is NaN

    @property
    def watched(self) -> bool:
        """Does anybody look at every step?"""
        return self.trace or self.callback is not None

    def after(self, taken: int, shown: int) -> Options:
        """For what goes on after so many steps of a sample, at most: fewer are left; and so many that a callback has seen,
        of all samples: it counts on."""
        left = None if self.max_steps is None else self.max_steps - taken
        return replace(self, max_steps=left, callback=counting_on(self.callback, shown))


@dataclass
class Outcome:
    """What came of a solve, one entry a sample: ``z (batch, n)``, the rest ``(batch,)``.

    ``tolerance``: what ``|F|`` had to come down to, for messages; ``None``: not known.
    """

    z: Tensor
    residual_norm: Tensor
    steps: Tensor
    status: Tensor
    evaluations: int = 0
    sample_evaluations: int = 0
    trace: list[Tensor] = field(default_factory=list)
    message: str = ""
    solver: str = ""  # which solver finished, where several took part
    kept: dict[str, Tensor] = field(default_factory=dict)  # what the method keeps of its final state
    error: Exception | None = None  # what a user's own solver raised
    said: list[Any] = field(default_factory=list)  # what it returned beside the point, one entry a call
    tolerance: Tensor | None = None
    more: int = 0  # steps that a callback has seen beyond those of any sample: of several loops in turn
    onward: Tensor | None = None  # where others should go on from, if not at z
    left: Tensor | None = None  # where a minimisation stood in the end, if not at z
    halted: bool = False  # has a callback asked to stop, be it in the step with which the last sample ended?
    examined: bool = False  # is every point known to be a minimum, not only stationary?
    blind: Tensor | None = (
        None  # minima found by a method for equations, which does not see the objective, ``(batch,)``
    )
    descended: bool = False  # did a method find this that only takes steps down?
    lifts: bool = False  # has it met kinks, whose epigraphs are to be looked at?
    kink: Any = None  # where a program of one sample has its solution in a kink of its inequalities
    _counted: tuple[Tensor, bool] | None = field(default=None, init=False, repr=False)  # a status; is all well in it?

    def __getstate__(self) -> dict[str, Any]:  # an exception need not be picklable, nor what a solver says
        return self.__dict__ | {"error": None, "said": []}

    @property
    def taken(self) -> int:
        """The most steps of a sample."""
        return int(self.steps.max()) if len(self.steps) else 0

    @property
    def shown(self) -> int:
        """How many steps a callback has seen."""
        return self.taken + self.more

    @shown.setter
    def shown(self, steps: int) -> None:
        self.more = steps - self.taken

    def move(self, which: Tensor, z: Tensor, residual: Tensor, status: Any) -> None:
        """Put the samples ``which`` at ``z`` ``(batch, n)``, or one row for all of them, with that ``residual``."""
        self.z = torch.where(which.unsqueeze(1), z, self.z)
        self.residual_norm = torch.where(which, torch.linalg.vector_norm(residual, dim=1), self.residual_norm)
        self.status = torch.where(which, int(status), self.status)

    def obey(self, status: Tensor) -> None:
        """A callback's word is final: where it has stopped one of these samples, all that have not converged are stopped."""
        if bool((status == int(Status.STOPPED)).any()):
            self.status = torch.where(self.status != int(Status.CONVERGED), int(Status.STOPPED), self.status)

    @property
    def all_converged(self) -> bool:
        """Did every sample converge?"""
        if self._counted is None or self._counted[0] is not self.status:
            self._counted = self.status, not recording.holds(self.status.any())  # CONVERGED is 0
        return self._counted[1]


def account(whole: Evaluations | Outcome, part: Evaluations | Outcome) -> None:
    """Count what a part of a solve has cost in the whole, too."""
    whole.evaluations += part.evaluations
    whole.sample_evaluations += part.sample_evaluations


class Found(NamedTuple):
    """What a black-box solver returns: the point and, if it knows them, its own figures.

    Success is never taken from the solver: the residual at ``z`` is evaluated again and judged.

    ``steps``: one whole number, or a tensor with one for each sample, ``(batch,)``.
    ``factorisation``: of ``dF/dz`` (of the problem's residual ``F``) at ``z`` or near it, for the derivative's linear
    systems: an object with ``solve(b, trans)``, as ``scipy.sparse.linalg.splu`` returns, or a pair of functions
    ``(b -> A^-1 b, b -> A^-T b)``; one for each sample, in a list, where there is a batch.
    """

    z: Any
    steps: Any = 0
    evaluations: int = 0
    message: str = ""
    factorisation: Any = None


class Solver(Configured):
    """Finds a point with ``f(z) = 0``, the residual of any problem: a subclass defines :meth:`run`.

    Class attributes:
        name: what it is registered as, and what messages call it.
        solves: what kind of ``f`` it is given: ``"fixed_point"``, ``"root"``, ``"minimise"``, ``"least_squares"``,
            ``"constrained"``, ``"quadratic_program"``, or the word of a plugin's own kind.
        max_size: the most unknowns that one sample may have; ``None``: any number.
        general: serves every kind of problem, whatever it solves (a user's own solver of his own problem).
        scales: measures the unknowns by the columns of a Jacobian (``x_scale="jac"``).

    Shapes: it sees every problem as a matrix ``z (batch, n)`` of independent samples; ``f(z)`` has the same shape
    (``(batch, m)`` for residuals of least squares).

    Units: a solver computes with plain numbers.  Its options are dimensionless unless they say that they are lengths
    (widths, radii, brackets: in units of ``z``) or step lengths (in units of ``z`` by those of what the step follows).

    Raises (from the solve): :class:`~implicitkit.ConvergenceError` for what it has not found, which the driver raises, not
        the solver; :class:`~implicitkit.CapabilityError` for a problem that it is not made for.
    """

    name: ClassVar[str] = ""
    solves: ClassVar[str] = ""
    max_size: ClassVar[int | None] = None
    general: ClassVar[bool] = False
    scales: bool = False

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """Solve from ``z0`` ``(batch, n)``; the outcome has one entry a sample."""
        raise NotImplementedError(f"{type(self).__name__} has no run method")

    def keeps_graphs(self, z0: Tensor) -> bool:
        """Are the graphs of gradients kept at the points that it tries from ``z0`` on, the start among them, since it goes
        on with the Hessian at one of them (default: no)?"""
        return False

    def unroll(self, f: Evaluations, z0: Tensor, steps: int) -> Tensor:
        """``steps`` steps from ``z0`` on a tracked ``f``, every operation visible to autograd.

        Raises:
            CapabilityError: the solver is not an iteration of plain differentiable operations.
        """
        raise CapabilityError(
            f"rule 'unroll' differentiates the steps of the solver, and {self.name or type(self).__name__!r} does not offer "
            'that: use solver="picard" or a gradient descent with fixed step_size (methods with differentiable = True), or '
            "the rule 'implicit', which needs nothing from the solver"
        )
