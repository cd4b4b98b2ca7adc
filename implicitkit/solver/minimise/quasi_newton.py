"""BFGS, with a dense inverse Hessian for each sample, and with limited memory.

The two share the line search, the test of a pair of changes, and what happens when a search fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, optional
from implicitkit.linear.factors.dense import mv
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.line_search import wolfe

_PAIRS, _MOST = 10, 40  # kept at first, and at most, ...
_SHARE, _NUMBERS = 8, 1 << 18  # ... where they are a share of the unknowns, and no more numbers in all
_PATIENCE = 3  # searches in a row that use up their trials


class QuasiNewton(Method):
    """``z <- z + t d``, ``d = -H g``, where ``H`` learns from the pairs ``s = dz``, ``y = dg``.

    A subclass keeps ``H``, whatever it is made of, in a dictionary of tensors with the batch in front, and defines
    :meth:`blank`, :meth:`direction` and :meth:`learn`.  A pair counts only where ``s'y`` is clearly positive.  A sample
    whose search fails forgets ``H`` and tries steepest descent; if that fails too, it is given up.  So it is where search
    after search uses up its trials: values and slopes there are rounding errors, which agree on no length.
    """

    trials: int

    def blank(self, z: Tensor) -> dict[str, Any]:
        """``H`` of nothing learnt yet; its entry ``"scale"`` ``(batch,)`` is zero until the first pair."""
        raise NotImplementedError

    def direction(self, g: Tensor, memory: dict[str, Any]) -> Tensor:
        """``-H g``."""
        raise NotImplementedError

    def learn(self, memory: dict[str, Any], s: Tensor, y: Tensor, sy: Tensor, good: Tensor) -> dict[str, Any]:
        """``H`` after a pair, for the samples where it is ``good``."""
        raise NotImplementedError

    def forget(self, memory: dict[str, Any], which: Tensor) -> dict[str, Any]:
        """``H`` of nothing learnt yet, for the samples ``which``."""
        raise NotImplementedError

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        none = torch.zeros(z.shape[0], dtype=torch.bool, device=z.device)
        return {"memory": self.blank(z), "failed": none, "spent": none.long()}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        memory, g = state["memory"], f(z)
        d = self.direction(g, memory)
        slope = (d * g).sum(1)
        downhill = (slope < 0) & torch.isfinite(slope)
        if not bool((downhill | ~f.active).all()):
            d = torch.where(downhill.unsqueeze(1), d, -g)
            slope = torch.where(downhill, slope, -g.square().sum(1))
        fresh, t = ~downhill | (memory["scale"] == 0), torch.ones_like(slope)
        if bool(fresh.any()):  # a first step is no longer than 1
            norm = torch.linalg.vector_norm(g, dim=1)
            t = torch.where(fresh & (norm > 1), 1 / norm, t)
        search = wolfe(f, z, d, slope, t, self.trials)
        trial = search.z
        s, y = trial - z, f(trial) - g
        sy = (s * y).sum(1)
        lengths = torch.linalg.vector_norm(y, dim=1) * torch.linalg.vector_norm(s, dim=1)
        good = search.found & (sy > torch.finfo(z.dtype).eps * lengths)
        memory = self.learn(memory, s, y, sy, good)
        failed = f.active & ~search.found
        if bool(failed.any()):
            memory = self.forget(memory, failed)
            f.stuck = failed & (state["failed"] | fresh)
        spent = state["spent"]
        if search.spent is not None or int(spent.count_nonzero()):
            spent = torch.zeros_like(spent) if search.spent is None else torch.where(search.spent, spent + 1, 0)
            lost = f.active & (spent >= _PATIENCE)
            f.stuck = lost if f.stuck is None else f.stuck | lost
        return trial, {"memory": memory, "failed": failed, "spent": spent}


@register_solver("bfgs", solves="minimise")
@dataclass(frozen=True)
class BFGS(QuasiNewton):
    r"""``z <- z - t H g`` with ``H <- (I - \rho s y') H (I - \rho y s') + \rho s s'``, ``\rho = 1 / s'y``.

    Nocedal & Wright (2006, eq. 6.17); ``H`` is scaled by ``s'y / y'y`` before the first update (eq. 6.20), and a pair with
    ``s'y`` not clearly positive is skipped.  Weak Wolfe conditions, approximate ones near the minimum (see
    :func:`~implicitkit.solver.steps.line_search.wolfe`).

    Memory: one array ``(batch, n, n)``; beyond some thousand unknowns use ``lbfgs``.

    Args:
        trials: evaluations of one line search at most.

    Raises:
        ValueError: ``trials`` below 1.
    """

    trials: int = 30
    default_max_steps: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        check_options(self, trials=at_least(1))

    def blank(self, z: Tensor) -> dict[str, Any]:
        return {"H": _identity(z).expand(z.shape[0], -1, -1), "scale": z.new_zeros(z.shape[0])}

    def direction(self, g: Tensor, memory: dict[str, Any]) -> Tensor:
        return -mv(memory["H"], g)

    def learn(self, memory: dict[str, Any], s: Tensor, y: Tensor, sy: Tensor, good: Tensor) -> dict[str, Any]:
        H, scale = memory["H"], memory["scale"]
        first = good & (scale == 0)
        gamma = torch.where(first, sy / y.square().sum(1), 1)
        H = H * gamma[:, None, None]
        rho = torch.where(good, 1 / sy, 0)
        s, y = torch.where(good.unsqueeze(1), s, 0), torch.where(good.unsqueeze(1), y, 0)
        Hy = mv(H, y)
        # H - rho (s (Hy)' + Hy s') + (rho + rho^2 y'Hy) s s' = H + s w' + w s'
        half = 0.5 * (rho + rho.square() * (y * Hy).sum(1))
        w = half.unsqueeze(1) * s - rho.unsqueeze(1) * Hy
        outer = s.unsqueeze(2) * w.unsqueeze(1)
        return {"H": H + outer + outer.mT, "scale": torch.where(first, gamma, scale)}

    def forget(self, memory: dict[str, Any], which: Tensor) -> dict[str, Any]:
        H = torch.where(which[:, None, None], _identity(memory["H"][:, 0]), memory["H"])
        return {"H": H, "scale": torch.where(which, 0, memory["scale"])}


def _identity(z: Tensor) -> Tensor:
    return torch.eye(z.shape[1], dtype=z.dtype, device=z.device).unsqueeze(0)


@register_solver("lbfgs", solves="minimise")
@dataclass(frozen=True)
class LBFGS(QuasiNewton):
    r"""``z <- z - t H g`` with ``H`` from the last ``memory`` pairs ``s = dz``, ``y = dg``.

    In the compact form of Byrd, Nocedal & Schnabel (1994; Nocedal & Wright 2006, eq. 7.24), of pairs in units in which
    ``s'y = 1``, the columns of ``S`` and ``Y``:

        H = \gamma I + [S, \gamma Y] [[R^{-T} (I + \gamma Y'Y) R^{-1}, -R^{-T}], [-R^{-1}, 0]] [S, \gamma Y]'

    with ``R`` the upper triangle of ``S'Y``, in the order of time, and ``\gamma = 1 / y'y`` of the last pair (eq. 7.20).
    ``R^{-1}`` is kept: a new pair gives it a column, ``-R^{-1} S'y`` above one, and of the pairs that are left, once the
    oldest goes, it is what is left of it.  So a step is a handful of products of matrices, however many the pairs.

    A pair with ``s'y`` not clearly positive is skipped.  Weak Wolfe conditions, approximate ones near the minimum (see
    :func:`~implicitkit.solver.steps.line_search.wolfe`).

    Memory: one array ``(batch, 2 memory, n)``.

    Args:
        memory: pairs kept, at least 1; ``None``: 10, and as these fill 20 and 40, of no more than eight unknowns a pair and
            2^18 numbers in all (an ill-conditioned quadratic takes a seventh of the evaluations).
        trials: evaluations of one line search at most.

    Raises:
        ValueError: an option below 1.
    """

    memory: int | None = None
    trials: int = 30
    default_max_steps: ClassVar[int] = 15000

    def __post_init__(self) -> None:
        check_options(self, memory=optional(at_least(1)), trials=at_least(1))

    def blank(self, z: Tensor) -> dict[str, Any]:
        (batch, n), m = z.shape, self.memory or _PAIRS
        return {
            "pairs": z.new_zeros(batch, 2 * m, n),  # the rows of S', then of Y'
            "inverse": z.new_zeros(batch, m, m),  # of R; zero where a pair is none
            "YY": z.new_zeros(batch, m, m),
            "scale": z.new_zeros(batch),
            "step": 0,
        }

    def direction(self, g: Tensor, memory: dict[str, Any]) -> Tensor:
        r"""``-H g = -\gamma g - S b + \gamma Y a`` with ``a = R^{-1} S'g``, ``b = R^{-T} (a + \gamma (Y'Y a - Y'g))``."""
        if not memory["step"]:
            return -g
        pairs, inverse, scale = memory["pairs"], memory["inverse"], memory["scale"]
        gamma = torch.where(scale > 0, scale, 1)[:, None, None]
        Sg, Yg = torch.bmm(g.unsqueeze(1), pairs.mT).chunk(2, 2)  # all vectors as rows: several times as fast
        a = torch.bmm(Sg, inverse.mT)
        scaled = gamma * a
        b = torch.bmm(a + torch.bmm(scaled, memory["YY"]) - gamma * Yg, inverse)
        return torch.baddbmm(-gamma * g.unsqueeze(1), torch.cat([-b, scaled], 2), pairs).squeeze(1)

    def learn(self, memory: dict[str, Any], s: Tensor, y: Tensor, sy: Tensor, good: Tensor) -> dict[str, Any]:
        if self.memory is None and memory["step"] == memory["inverse"].shape[1]:
            memory = _grown(memory)
        pairs, inverse, YY = memory["pairs"], memory["inverse"], memory["YY"]
        m, scale = inverse.shape[1], memory["scale"]
        k = memory["step"] % m
        unit = sy.rsqrt().unsqueeze(1)
        s, y = unit * s, unit * y
        if not bool(good.all()):
            s, y = torch.where(good.unsqueeze(1), s, 0), torch.where(good.unsqueeze(1), y, 0)
        pairs[:, k], pairs[:, m + k] = s, y
        Sy, Yy = torch.bmm(y.unsqueeze(1), pairs.mT).squeeze(1).chunk(2, 1)
        inverse[:, k], inverse[:, :, k] = 0, 0  # the oldest goes
        inverse[:, :, k] = -torch.bmm(Sy.unsqueeze(1), inverse.mT).squeeze(1)
        inverse[:, k, k] = 1
        YY[:, k] = YY[:, :, k] = Yy
        scale = torch.where(good, 1 / YY[:, k, k], scale)
        return {**memory, "scale": scale, "step": memory["step"] + 1}

    def forget(self, memory: dict[str, Any], which: Tensor) -> dict[str, Any]:
        inverse = torch.where(which[:, None, None], 0, memory["inverse"])
        return {**memory, "inverse": inverse, "scale": torch.where(which, 0, memory["scale"])}


def _grown(memory: dict[str, Any]) -> dict[str, Any]:
    """Room for twice as many pairs, if that is allowed; all there are have come in order."""
    pairs, m = memory["pairs"], memory["inverse"].shape[1]
    if 2 * m > _MOST or 2 * m * _SHARE < pairs.shape[2] or 2 * pairs.numel() > _NUMBERS:
        return memory
    S, Y = pairs.chunk(2, 1)
    room = pairs.new_zeros(S.shape)
    squares = {name: torch.nn.functional.pad(memory[name], (0, m, 0, m)) for name in ("inverse", "YY")}
    return memory | squares | {"pairs": torch.cat([S, room, Y, room], 1)}
