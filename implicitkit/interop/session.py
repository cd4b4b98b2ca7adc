"""One sample's solve by a library that works on float64 NumPy vectors: what it may ask, and what of its word is believed.

A :class:`Session` stands between PyTorch and the library and trusts it with nothing:

- every vector is a fresh float64 copy in each direction, while ``f`` is evaluated in the dtype and on the device of ``z0``;
- the point of least residual that was ever evaluated is kept, and the library is interrupted the moment one meets the
  tolerance: flags, returned points and exceptions decide nothing;
- steps and evaluations are counted and limited here, whatever the library calls its limits;
- an exception of the user's function surfaces, one of the library becomes a message.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.solver.base import Found
from implicitkit.solver.black_box import BlackBoxFunction

_ATTEMPTS = 12
_PROGRESS = 0.5
_NOISE = 100  # differences of values below so many units of rounding are taken from gradients ...
_EXPECTED = 1e3  # ... if the slope promised no more than so many times that
_NEAR, _AGREES = 1 / 256, 0.1  # as in the line searches


class _Enough(Exception):
    """The target is met, or a limit is reached."""


class Session:
    """``f`` for a NumPy library.

    Args:
        f, z0, rtol, atol, max_steps: as a black-box solver gets them; ``z0`` of shape ``(n,)``.
        step: what counts as a step: ``"iteration"`` (the library calls :meth:`count`) or ``"evaluation"`` (of ``f``, at
            a new point).

    Attributes:
        start, best: the start and the best point so far, float64. start_norm: ``|F|`` at the start.
        kind: the kind of the problem. sample: which sample this is, and of how many. x_scale: of the problem.
    """

    def __init__(
        self, f: BlackBoxFunction, z0: Tensor, *, rtol: float, atol: float, max_steps: int, step: str = "iteration"
    ) -> None:
        self._f, self._like, self._step = f, z0, step
        self._max_steps, self._budget = max_steps, 100 * max_steps + 100
        self.kind, self.sample, self.x_scale = f.kind, f.sample, f.x_scale
        self.steps = self.evaluations = 0
        self._best, self._best_norm, self._lowest = z0.detach().clone(), np.inf, np.inf
        self._target = -1.0
        self._noise, self._measured_at = 0.0, np.inf
        self._last: np.ndarray | None = None
        self._reference: tuple[np.ndarray, float, np.ndarray, float] | None = None
        self._eps = torch.finfo(z0.dtype).eps
        self.start = self._array(z0)
        self._judge(self.start)
        self.start_norm = self._best_norm
        self._target = atol + rtol * self.start_norm

    # ------------------------------------------------------------------------------------- what the library may ask for
    def f(self, x: np.ndarray) -> np.ndarray:
        """Residual or gradient, ``(n,)``; judged."""
        self._judge(x)
        return self._array(self._f(self._tensor(x)))

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        """Jacobian of the residual, or Hessian, ``(n, n)``."""
        return self._array(self._f.jacobian(self._tensor(x)))

    def jvp(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The Jacobian at ``x`` times ``v``, ``(n,)``."""
        return self._array(self._f.jvp(self._tensor(x), self._tensor(v)))

    def value(self, x: np.ndarray) -> float:
        """The objective less its value where this attempt began, over the norm of its gradient there; judged where it has
        never been so low.

        Near a minimum differences of values drown in rounding long before the gradient vanishes.  There the difference
        comes from the gradients ``g`` at both ends instead, ``(g(x) + g(x_0))' (x - x_0) / 2``, whose error is of third
        order in ``x - x_0`` (the idea of Hager & Zhang's approximate Wolfe conditions, 2005, section 4; what drowns is
        measured).  The scale keeps absolute thresholds inside the library from meaning anything.
        """
        x0, value0, g0, scale = self._origin(x)
        value = float(self._f.value(self._tensor(x)))
        difference = value - value0
        noise = _NOISE * self._eps * max(abs(value), abs(value0))
        slope = abs(float(g0 @ (x - x0)))
        if not _AGREES * slope <= abs(difference) <= slope and np.isfinite(difference):
            noise = max(noise, self._unresolved(x, difference))
        if abs(difference) <= noise and slope <= _EXPECTED * noise:
            g = self._array(self._f(self._tensor(x)))
            difference = 0.5 * float((g + g0) @ (x - x0))
        if difference < self._lowest:
            self._lowest = difference
            self._judge(x)
        else:
            self._count_evaluation(x)
        return difference / scale

    def _unresolved(self, x: np.ndarray, difference: float) -> float:
        """What differences of values do not resolve, where they and the slopes along ``x - x_0`` contradict each other:
        measured at 1/256 of the way, as in :func:`~implicitkit.solver.steps.line_search.unresolved`, once for each tenth
        that the way has become shorter by."""
        x0, value0, g0, _ = self._origin(x)
        way, slope = x - x0, float(g0 @ (x - x0))
        last = float(self._array(self._f(self._tensor(x))) @ way)
        odd = abs(difference) <= _AGREES * 0.5 * abs(slope + last) or abs(difference) > max(abs(slope), abs(last))
        length = float(np.linalg.norm(way))
        if odd and length < 0.1 * self._measured_at:
            near = self._tensor(x0 + _NEAR * way)
            by_slopes = 0.5 * _NEAR * (slope + float(self._array(self._f(near)) @ way))
            self._noise, self._measured_at = _NOISE * abs(float(self._f.value(near)) - value0 - by_slopes), length
        return self._noise if odd and np.isfinite(self._noise) else 0.0

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Its gradient, on the scale of :meth:`value`; judged."""
        return self.f(x) / self._origin(x)[3]

    def hessian(self, x: np.ndarray) -> np.ndarray:
        """Its Hessian, on the scale of :meth:`value`."""
        return self.jacobian(x) / self._origin(x)[3]

    def hessp(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Its Hessian times ``v``, on the scale of :meth:`value`."""
        return self.jvp(x, v) / self._origin(x)[3]

    def _origin(self, x: np.ndarray) -> tuple[np.ndarray, float, np.ndarray, float]:
        """Where this attempt began (at the first ``x`` asked for): point, objective, gradient and its norm."""
        if self._reference is None:
            point = self._tensor(x)
            value, g = float(self._f.value(point)), self._array(self._f(point))
            norm = float(np.linalg.norm(g))
            self._reference = np.array(x), value, g, norm if 0 < norm < np.inf else 1.0
            self._lowest = np.inf
        return self._reference

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """The vector of least squares, ``(m,)``; judged."""
        values = self._array(self._f.residuals(self._tensor(x)))
        self._judge(x)
        return values

    def residuals_jacobian(self, x: np.ndarray) -> np.ndarray:
        """Its Jacobian, ``(m, n)``."""
        return self._array(self._f.residuals_jacobian(self._tensor(x)))

    def second(self, x: np.ndarray) -> float:
        """Second derivative of a scalar equation."""
        return float(self._f.second(self._tensor(x)))

    def count(self, *_: Any) -> None:
        """The library's callback: an iteration is done."""
        self.steps += 1
        if self.steps >= self._max_steps:
            raise _Enough

    # ------------------------------------------------------------------------------------------------------------ running
    @property
    def best(self) -> np.ndarray:
        return self._array(self._best)

    @property
    def target(self) -> float:
        """What the norm of the residual must come down to."""
        return self._target

    def flow_sign(self) -> float:
        """The sign ``s`` for which ``dz/dt = s F`` leads to rest: the problem's own, or that with ``s F'JF <= 0`` here."""
        if self.kind.flow:
            return float(self.kind.flow)
        return -1.0 if self.quotient() > 0 else 1.0

    def quotient(self) -> float:
        """``F'JF / F'F`` at the start."""
        F = self._array(self._f(self._tensor(self.start)))
        with np.errstate(all="ignore"):
            square = float(F @ F)
            return float(F @ self.jvp(self.start, F)) / square if square > 0 else float("nan")

    @property
    def settled(self) -> bool:
        """Is there nothing to do: ``f`` vanishes at the best point, or is not finite at the start?"""
        return self._best_norm <= self._target or not np.isfinite(self._best_norm)

    def run(self, attempt: Callable[[np.ndarray], Any]) -> Found:
        """``attempt(x)`` from the start, and again from the best point as long as that halves the residual.

        (A library that gives up close to a solution, for want of progress by its own measure or with a stale model, often
        goes on when asked again.)
        """
        message = ""
        for _ in range(_ATTEMPTS):
            if self.settled:
                break
            before = self._best_norm
            message, ended = self._attempt(attempt, self.best)
            if ended or not self._best_norm <= _PROGRESS * before:
                break
        done = self._best_norm <= self._target
        return Found(self._best, min(self.steps, self._max_steps), self.evaluations, "" if done else message)

    def _attempt(self, attempt: Callable[[np.ndarray], Any], x: np.ndarray) -> tuple[str, bool]:
        """What the library said, and whether it was interrupted."""
        self._reference = None
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.filterwarnings("ignore", module=r"scipy|numpy")
                said = attempt(x)
            return (f"SciPy: {said}" if isinstance(said, str) and said else ""), False
        except _Enough:
            if self._step == "iteration":
                self.steps += 1
            return "", True
        except Exception as error:
            if self._f.error is not None:
                raise self._f.error from None
            text = " ".join(str(error).split())[:120]
            return f"SciPy raised {type(error).__name__}" + (f": {text}" if text else ""), False

    # ------------------------------------------------------------------------------------------------------------ details
    def _judge(self, x: np.ndarray) -> None:
        """Evaluate the residual at ``x``; keep the best; stop when it is good enough."""
        point = self._tensor(x)
        norm = float(torch.linalg.vector_norm(self._f.residual(point).double()))
        if norm < self._best_norm:
            self._best, self._best_norm = point, norm
            if norm <= self._target:
                if self._step == "evaluation":
                    self._count_evaluation(x)
                raise _Enough
        self._count_evaluation(x)

    def _count_evaluation(self, x: np.ndarray) -> None:
        if self._last is not None and np.array_equal(x, self._last):
            return
        first, self._last = self._last is None, np.array(x)
        self.evaluations += 1
        if self._step == "evaluation" and not first:
            self.steps += 1
            if self.steps >= self._max_steps:
                raise _Enough
        if self.evaluations > self._budget:
            raise _Enough

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(x, dtype=np.float64)).reshape(self._like.shape).to(self._like)

    def _array(self, t: Tensor) -> np.ndarray:
        return t.detach().cpu().double().numpy().copy()
