r"""Quadratic programs whose objectives have the size one, each by itself.

The norm of the natural map adds slopes of the objective to what is missing of constraints.  Beside an objective of 1e-12 any
feasible point would solve a program by that norm, and beside one of 1e12 a point that is not feasible; and methods whose
tolerances are absolute stop anywhere.  So programs are solved, and judged once more, with ``c P``, ``c q``, of which the
solution is ``z``, ``c y``, ``c lam``.  (Rows, and unknowns, have units of their own:
:mod:`implicitkit.problem.qp_units`, one choice for a batch.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.solver.base import Options

__all__ = ["Unit"]

_USUAL = 1e3  # size of an objective, or its inverse, up to which it is solved as it stands


class Unit(NamedTuple):
    """The programs with objectives of the size one.

    Attributes:
        c: ``(batch, 1)``, a power of two; 1 where the objective is within a thousand of one, and of relaxed programs, whose
            ``lam s = kappa`` has a unit of its own. part: the data, by name.
    """

    problem: Any
    c: Tensor
    part: dict[str, Tensor]

    @classmethod
    def of(cls, problem: Any, part: dict[str, Tensor]) -> Unit:
        """Of the data of :meth:`QPConditions.data`."""
        sizes = [
            part[name].detach().abs().flatten(1).amax(1) for name in ("P", "q") if name in part and part[name].numel()
        ]
        size = torch.stack(sizes).amax(0) if sizes else part["q"].new_ones(len(part["q"]))
        usual = ~(size > 0) | ~size.isfinite() | ((size >= 1 / _USUAL) & (size <= _USUAL))
        c = torch.where(usual, 1, torch.exp2(-torch.where(usual, 1, size).log2().round())).unsqueeze(1)
        if problem.kappa or bool(usual.all()):
            return cls(problem, torch.ones_like(c), part)
        scaled = {name: part[name] * c.view(-1, *(1,) * (part[name].ndim - 1)) for name in ("P", "q") if name in part}
        return cls(problem, c, part | scaled)

    @property
    def differs(self) -> bool:
        """Is an objective another one?"""
        return bool((self.c != 1).any())

    def back(self, w: Tensor) -> Tensor:
        """Packed states in the units of the user."""
        n = self.part["q"].shape[1]
        return torch.cat([w[:, :n], w[:, n:] / self.c], 1)

    def holds(self, w: Tensor, w0: Tensor, options: Options) -> Tensor:
        """Where the conditions hold in this unit, too, by the tolerance, ``(batch,)``; ``w0``: the start."""
        if not self.differs:
            return torch.ones(len(w), dtype=torch.bool, device=w.device)
        size = lambda x: options.size(self._residual(x))  # noqa: E731
        return size(w) <= options.atol + options.rtol * size(w0).nan_to_num(posinf=0)

    def _residual(self, w: Tensor) -> Tensor:
        n, p = self.part["q"].shape[1], self.part["b"].shape[1] if "b" in self.part else 0
        names = ("z", *("y" for _ in range("A" in self.part)), *("lam" for _ in range("G" in self.part)))
        z, y, lam = w.split([n, p, w.shape[1] - n - p], 1)
        state = {"z": z, "y": y * self.c, "lam": lam * self.c}
        out = self.problem.residual({name: state[name] for name in names}, *self.part.values())
        return torch.cat([out[name] for name in names], 1)
