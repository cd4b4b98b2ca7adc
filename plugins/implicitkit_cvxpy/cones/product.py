"""The dual of a product of cones: its projection, and the derivative of that projection by blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit import extend
from implicitkit_cvxpy.cones.exponential import project_exponential
from implicitkit_cvxpy.cones.form import Cones
from implicitkit_cvxpy.cones.power import project_power
from implicitkit_cvxpy.cones.second_order import project_second_order
from implicitkit_cvxpy.cones.semidefinite import project_semidefinite


class Group(NamedTuple):
    """Adjacent cones of one kind and size: rows ``start`` to ``start + number * size``."""

    start: int
    number: int
    size: int
    kind: str
    alpha: tuple[float, ...] = ()


@dataclass(frozen=True)
class DualCone:
    """``K*`` for a product cone ``K``: free for equalities, then orthant, and so on in the order of :class:`Cones`.

    Args:
        cones: ``K``. smoothing: ``mu > 0`` replaces the projection by that of the central path, where each spectral value
            of ``y`` times that of ``s`` is ``mu`` (exponential and power cones, which have no spectral values, stay exact).
    """

    cones: Cones
    smoothing: float = 0.0

    @property
    def groups(self) -> tuple[Group, ...]:
        """The cones that are no half-lines, grouped."""
        cones, row = self.cones, self.cones.linear
        found: list[Group] = []
        sizes = [("soc", d, d) for d in cones.soc] + [("psd", k * (k + 1) // 2, k) for k in cones.psd]
        for kind, size, _ in sizes:
            if found and found[-1].kind == kind and found[-1].size == size:
                found[-1] = found[-1]._replace(number=found[-1].number + 1)
            else:
                found.append(Group(row, 1, size, kind))
            row += size
        if cones.exp:
            found.append(Group(row, cones.exp, 3, "exp"))
            row += 3 * cones.exp
        if cones.power:
            found.append(Group(row, len(cones.power), 3, "power", cones.power))
        return tuple(found)

    @property
    def heads(self) -> Tensor:
        """The first rows of the second-order cones, on the CPU."""
        sizes = torch.tensor(self.cones.soc, dtype=torch.int64, device="cpu")
        return self.cones.linear + sizes.cumsum(0) - sizes

    def part(self, v: Tensor, group: Group) -> Tensor:
        """The rows of a group, ``(..., number, size)`` of ``(..., m)``."""
        return v[..., group.start : group.start + group.number * group.size].unflatten(-1, (group.number, group.size))

    @property
    def first_exponential(self) -> int:
        """The row at which the exponential cones begin."""
        return self.cones.size - 3 * (self.cones.exp + len(self.cones.power))

    def project(self, v: Tensor) -> Tensor:
        """Projection onto ``K*`` of each row, ``(..., m)``."""
        zero, linear = self.cones.zero, self.cones.linear
        parts = [v[..., :zero], extend.plus(v[..., zero:linear], self.smoothing)]
        for group in self.groups:
            parts.append(self._function(group)(self.part(v, group)).flatten(-2))
        return torch.cat(parts, -1)

    def _function(self, group: Group) -> Callable[[Tensor], Tensor]:
        if group.kind == "soc":
            return lambda v: project_second_order(v, self.smoothing)
        if group.kind == "psd":
            return lambda v: project_semidefinite(v, self.smoothing)
        if group.kind == "exp":
            return lambda v: v + project_exponential(-v)  # Moreau
        alpha = torch.tensor(group.alpha, dtype=torch.float64, device="cpu")
        return lambda v: v + project_power(-v, alpha.to(v.device))

    def derivative(self, v: Tensor) -> tuple[Tensor, list[tuple[Group, Tensor]]]:
        """At plain ``v`` ``(batch, m)``: the diagonal on the linear rows ``(batch, linear)``, and for each group its blocks
        ``(batch, number, size, size)``."""
        zero, linear = self.cones.zero, self.cones.linear
        inner = extend.plus_slope(v[:, zero:linear], self.smoothing)
        diagonal = torch.cat([torch.ones_like(v[:, :zero]), inner], 1)
        blocks = []
        for group in self.groups:
            part = v[:, group.start : group.start + group.number * group.size].detach()
            part = part.reshape(-1, group.number, group.size).requires_grad_()
            with torch.enable_grad():
                out = self._function(group)(part)
            eye = torch.eye(group.size, dtype=v.dtype, device=v.device)
            units = eye[:, None, None, :].expand(-1, *part.shape)
            rows = torch.func.vmap(
                lambda e, out=out, part=part: torch.autograd.grad(out, part, e, retain_graph=True)[0]
            )(units)
            if not self.smoothing:  # D is of norm one, or zero: what is that small is rounding, and has no size
                rows = torch.where(rows.abs() > group.size * torch.finfo(v.dtype).eps, rows, 0)
            blocks.append((group, rows.movedim(0, -2)))
        return diagonal, blocks
