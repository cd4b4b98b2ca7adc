"""The user's tensors: checked against what was declared, and laid out as one vector for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit_cvxpy.compat import CanonicalProgram

__all__ = ["Parameters"]

_SLACK = 1e-5  # relative; finite differences of a symmetric parameter, one entry at a time, pass


@dataclass(frozen=True)
class Declared:
    """What is known of one ``cvxpy.Parameter``, without cvxpy."""

    name: str
    shape: tuple[int, ...]
    sign: str
    symmetric: bool

    @property
    def complaint(self) -> str:
        """What to say of a value that breaks it."""
        what = f"is declared {self.sign}" if self.sign else "is declared symmetric (or PSD, or NSD), and is not symmetric"
        return f"parameter {self.name} {what}" + (", and a value violates that" if self.sign else "")


_SIGNS = {"pos": "positive (pos=True)", "neg": "negative (neg=True)", "nonneg": "nonnegative (nonneg=True)"}
_SIGNS["nonpos"] = "nonpositive (nonpos=True)"


class Parameters:
    """Checks tensors and makes the vector ``p`` ``(batch, k + 2)``: the parameters, then 1, then 0."""

    def __init__(self, parameters: Sequence[Any], program: CanonicalProgram) -> None:
        logged = {e.parameter for e in program.entries if e.log}
        self.declared = tuple(self._declare(p, i in logged) for i, p in enumerate(parameters))
        self.entries = [(e.parameter, _index(e.index, parameters[e.parameter]), e.log) for e in program.entries]

    @staticmethod
    def _declare(parameter: Any, positive: bool) -> Declared:
        attributes = parameter.attributes
        symmetric = any(attributes.get(k) for k in ("symmetric", "PSD", "NSD")) and parameter.ndim == 2
        sign = next((text for key, text in _SIGNS.items() if attributes.get(key)), "")
        return Declared(parameter.name(), tuple(parameter.shape), _SIGNS["pos"] if positive else sign, symmetric)

    def complaint(self, number: int) -> str:
        """What parameter ``number`` was declared to be."""
        return self.declared[number].complaint

    def only_in(self, positions: Any) -> tuple[tuple[int, str], ...]:
        """The parameters all of whose entries lie at these positions of ``p``."""
        wanted, start, verdict = set(np.asarray(positions).tolist()), 0, {}
        for number, index, _ in self.entries:
            size = self._size(number, index)
            inside = all(k in wanted for k in range(start, start + size))
            verdict[number] = verdict.get(number, True) and inside
            start += size
        return tuple((i, self.declared[i].name) for i, inside in verdict.items() if inside)

    def _size(self, number: int, index: Tensor | None) -> int:
        return int(np.prod(self.declared[number].shape, dtype=int)) if index is None else len(index)

    # ------------------------------------------------------------------------------------------------------ every call
    def check(self, values: Sequence[Any]) -> list[Tensor]:
        """The tensors, one for each parameter, of the right shapes."""
        if len(values) != len(self.declared):
            names = ", ".join(d.name for d in self.declared)
            raise ValueError(
                f"the layer takes {len(self.declared)} parameter tensor(s) ({names}), in that order; got {len(values)}"
            )
        tensors = []
        for value, declared in zip(values, self.declared, strict=True):
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
            if not tensor.is_floating_point():
                if tensor.is_complex():
                    raise TypeError(f"parameter {declared.name} got a complex tensor; cvxpy parameters here are real")
                tensor = tensor.to(torch.get_default_dtype())
            ndim = len(declared.shape)
            if tensor.ndim < ndim or tuple(tensor.shape[tensor.ndim - ndim :]) != declared.shape:
                raise ValueError(
                    f"parameter {declared.name} has shape {declared.shape}, with any batch dimensions in front; got "
                    f"{tuple(tensor.shape)}"
                )
            tensors.append(tensor)
        return tensors

    def batch(self, values: Sequence[Tensor]) -> tuple[int, ...]:
        """The batch shape, that of all tensors that have one."""
        found: tuple[int, ...] | None = None
        owner = ""
        for value, declared in zip(values, self.declared, strict=True):
            lead = tuple(value.shape[: value.ndim - len(declared.shape)])
            if not lead:
                continue
            if found is not None and lead != found:
                raise ValueError(
                    f"batch sizes disagree: parameter {owner} has batch shape {found}, parameter {declared.name} has {lead}; "
                    "give all the same, or none to those that the batch shares"
                )
            found, owner = lead, declared.name
        return found or ()

    def dtype(self, values: Sequence[Tensor]) -> torch.dtype:
        """That of the results."""
        dtype = torch.get_default_dtype() if not values else values[0].dtype
        for value in values[1:]:
            dtype = torch.promote_types(dtype, value.dtype)
        return dtype

    def vector(self, values: Sequence[Tensor], lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """``p (batch, k + 2)`` in float64, and ``flags (batch, 2 * parameters)``: positive where a sample's value of the
        parameter is not finite (first half), or by how much it breaks its declaration (second half).  Flagged samples
        get harmless values."""
        batch = int(np.prod(lead, dtype=int))
        device = values[0].device if values else None
        flat, breach, broken = [], [], []
        for value, declared in zip(values, self.declared, strict=True):
            wide = value.to(torch.float64)
            if declared.symmetric:
                gap = (wide - wide.mT).detach().abs().flatten(-2).amax(-1)
                breach.append((gap - _SLACK * (1 + wide.detach().abs().flatten(-2).amax(-1))).clamp_min(0))
                wide = (wide + wide.mT) * 0.5
            row = wide.reshape(*wide.shape[: wide.ndim - len(declared.shape)], -1)
            if not declared.symmetric:
                breach.append(_breach(row.detach(), declared.sign) if declared.sign else None)
            shared = row.ndim == 1
            broken.append((~row.detach().isfinite().all(-1)).to(torch.float64))
            flat.append(row if shared else row.reshape(batch, -1))
        none = torch.zeros(batch, dtype=torch.float64, device=device)
        columns = [none if t is None else t.reshape(-1).expand(batch).nan_to_num(0.0) for t in (*broken, *breach)]
        flags = torch.stack(columns, 1) if columns else none.new_zeros(batch, 0)
        good = ~(flags > 0).any(1, keepdim=True)
        parts = []
        for number, index, log in self.entries:
            part = flat[number] if index is None else flat[number].index_select(-1, index.to(flat[number].device))
            part = part.expand(batch, -1)
            if log:
                part = torch.where(good, part, 1.0).log()
            parts.append(part)
        ends = torch.tensor([1.0, 0.0], dtype=torch.float64, device=device).expand(batch, 2)
        p = torch.cat([*parts, ends], 1)
        return torch.where(good, p, ends[:, :1] * 0), flags


def _index(index: Any, parameter: Any) -> Tensor | None:
    """Positions to take, or ``None`` for all of them in order."""
    if len(index) == parameter.size and (np.asarray(index) == np.arange(parameter.size)).all():
        return None
    return torch.from_numpy(np.ascontiguousarray(index))


def _breach(row: Tensor, sign: str) -> Tensor:
    """How far the worst entry of each row is on the wrong side."""
    wrong = row if sign in (_SIGNS["neg"], _SIGNS["nonpos"]) else -row
    worst = wrong.amax(-1)
    if sign in (_SIGNS["pos"], _SIGNS["neg"]):
        return torch.where(worst >= 0, worst.clamp_min(torch.finfo(row.dtype).tiny), 0.0)
    return (worst - 1e-8).clamp_min(0)
