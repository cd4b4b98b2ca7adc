"""Every error and warning implicitkit raises by name."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

_SKIPPED = ("torch", "contextlib", "functools", "implicitkit")


class ConvergenceError(RuntimeError):
    """A solve, or the linear solve of its derivative, did not reach its tolerance.

    Attributes:
        solution: the :class:`~implicitkit.Solution` with the best iterates found; its tensors are detached.
        samples: flat indices of the samples that failed, worst first.
        residual_norms: their residual norms, in the same order.
    """

    def __init__(
        self, message: str, solution: Any = None, samples: tuple[int, ...] = (), residual_norms: tuple[float, ...] = ()
    ) -> None:
        super().__init__(message)
        self.solution = solution
        self.samples = samples
        self.residual_norms = residual_norms


class ConvergenceWarning(RuntimeWarning):
    """What :class:`ConvergenceError` says, under ``on_failure="warn"``."""


class ImpureFunctionWarning(RuntimeWarning):
    """The user's function is not a function: it draws random numbers or updates its own buffers.  Or it is not the one that
    autograd sees: a part of it uses ``z`` behind ``detach``, ``item`` or ``numpy``, or has a wrong ``backward``."""


class DegenerateWarning(RuntimeWarning):
    """A derivative of a constrained solution is zero by its structure: the vertex of a linear program does not move when
    its objective does.  Or the conditions of optimality do not determine it: a whole edge is optimal."""


class SparsityWarning(RuntimeWarning):
    """A sparsity pattern, given or found, does not hold.  It is not used: the result is right, but slower to
    compute."""


class CapturedTensorError(RuntimeError):
    """The function uses a tensor whose derivative would be lost, because nothing shows where it comes from."""


class ChangedFunctionError(RuntimeError):
    """The function changed between the solve and the derivative that is taken of it."""


class UnknownNameError(ValueError):
    """No solver, rule, linear solver or problem is registered under that name."""


class CapabilityError(TypeError):
    """The chosen parts do not fit together: a solver that does not serve the problem, a rule for another kind of problem."""


def warn(message: str, category: type[Warning]) -> None:
    """``warnings.warn`` at the nearest line that is neither in this library, its plugins, nor in torch: the user's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _SKIPPED or package.startswith("implicitkit_")
