"""What the BFGS methods share: a line search, the test of a pair, and what happens when a search fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.line_search import wolfe

__all__ = ["QuasiNewton"]

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
