r"""The path that conjugate gradients walk in a trust region, ``0 = p_0, p_1, p_2, ...``, once for all radii of a step.

The ``p_k`` are the same whatever the radius is, and ever further out (Steihaug 1983, theorem 2.1): the step within a smaller
ball ends where the line through them crosses its boundary.  The gradients of the model, ``r_k = H p_k + g``, are linear
between them.  So a trial that is refused costs no products.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = 1 << 23  # numbers, at most: 64 MB of float64


class End:
    """Where it ends.

    Attributes:
        left: the gradient of the model there, ``(batch, n)``, ``None`` before the first step.
    """

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def add(self, p: Tensor, r: Tensor) -> None:
        """One point more, with the gradient of the model there, ``(batch, n)`` both."""
        self.left = r


class Path(End):
    """What has been walked.

    Args:
        g: gradients where it starts, ``(batch, n)``.

    Attributes:
        walked: points, which is products.
    """

    def __init__(self, g: Tensor) -> None:
        super().__init__()
        self.g = g
        self.walked = 0
        self._points, self._gradients = list[Tensor](), list[Tensor]()

    def add(self, p: Tensor, r: Tensor) -> None:
        """One point more; too many are not kept."""
        super().add(p, r)
        self.walked += 1
        self._points.append(p)
        self._gradients.append(r)
        if 2 * len(self._points) * p.numel() > _KEPT:
            self._points, self._gradients = [], []

    def cut(self, radius: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where it crosses ``|p| = radius``, ``(batch,)``, or ends within; and the decrease of the model there, as
        :func:`~implicitkit.solver.minimise.newton_cg.steihaug` has them.  ``None`` where nothing is known of it."""
        if not self._points:
            return None
        lengths = torch.stack([torch.linalg.vector_norm(p, dim=1) for p in self._points])
        outside = lengths >= radius
        crosses = outside.any(0)
        after = torch.where(crosses, outside.to(torch.uint8).argmax(0), len(lengths) - 1).tolist()
        p, p_next = (self._at(self._points, after, back, torch.zeros_like(self.g)) for back in (1, 0))
        r, r_next = (self._at(self._gradients, after, back, self.g) for back in (1, 0))
        part = torch.where(crosses, way_to_boundary(p, p_next - p, radius), 1).nan_to_num(0, 0, 0).unsqueeze(1)
        p, r = torch.lerp(p, p_next, part), torch.lerp(r, r_next, part)
        p = torch.where(torch.isfinite(p), p, 0)
        return p, -0.5 * ((self.g + r) * p).sum(1)

    @staticmethod
    def _at(rows: list[Tensor], after: list[int], back: int, start: Tensor) -> Tensor:
        """For each sample one of its ``rows``, the ``back``-th before the one it comes ``after``."""
        return torch.stack([rows[k - back][i] if k >= back else start[i] for i, k in enumerate(after)])


def way_to_boundary(p: Tensor, d: Tensor, radius: Tensor) -> Tensor:
    """``tau`` with ``|p + tau d| = radius``, ``(batch,)``: the positive root, in the form that does not cancel."""
    dd, pd = d.square().sum(1), (p * d).sum(1)
    room = (radius.square() - p.square().sum(1)).clamp_min(0)
    root = (pd.square() + dd * room).sqrt()
    return torch.where(pd > 0, room / (pd + root), (root - pd) / dd)
