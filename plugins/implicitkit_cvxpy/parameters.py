"""The user's tensors: checked against what was declared, and laid out as one vector for each sample."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit import extend
from implicitkit_cvxpy.affine import Vector
from implicitkit_cvxpy.compat import CanonicalProgram

_SLACK = 1e-5  # relative; finite differences of a symmetric parameter, one entry at a time, pass
_SIGNS = {
    "pos": "positive (pos=True)",
    "neg": "negative (neg=True)",
    "nonneg": "nonnegative (nonneg=True)",
    "nonpos": "nonpositive (nonpos=True)",
}


@dataclass(frozen=True)
class Declared:
    """What is known of one ``cvxpy.Parameter``, without cvxpy."""

    name: str
    shape: tuple[int, ...]
    sign: str
    symmetric: bool
    definite: int  # 1: PSD, -1: NSD
    ndim: int
    pattern: Any = None  # flat, True where an entry must be zero: declared diagonal or sparse

    bounds: Any = None  # lower and upper, one after the other, flat

    @property
    def complaint(self) -> str:
        """What to say of a value that breaks what was declared."""
        claims = [f"{self.sign}, and a value violates that"] if self.sign else []
        if self.pattern is not None:
            claims.append("diagonal or sparse, and an entry outside that pattern is not zero")
        if self.bounds is not None:
            claims.append("with bounds=, and a value is outside them")
        if self.symmetric:
            sense = {0: "symmetric, and is not symmetric", 1: "PSD, and is not symmetric with eigenvalues >= 0"}
            claims.append(sense.get(self.definite, "NSD, and is not symmetric with eigenvalues <= 0"))
        return f"parameter {self.name} is declared {', or '.join(claims)}"


class Parameters:
    """Checks tensors and makes :class:`Vector`: each parameter (or its logarithm) row by row, then 1, then 0.

    Attributes:
        program: the canonical program with its columns in this order. offsets: where each part begins.
    """

    def __init__(self, parameters: Sequence[Any], program: CanonicalProgram) -> None:
        logged = {e.parameter for e in program.entries if e.log}
        self.declared = tuple(_declare(p, i in logged) for i, p in enumerate(parameters))
        self.parts = list(dict.fromkeys((e.parameter, e.log) for e in program.entries))
        sizes = [math.prod(self.declared[i].shape) for i, _ in self.parts]
        self.offsets = np.cumsum([0, *sizes])
        begin = dict(zip(self.parts, self.offsets, strict=False))
        columns = [begin[e.parameter, e.log] + np.asarray(e.index) for e in program.entries]
        place = np.concatenate([*columns, [self.offsets[-1]]]).astype(np.int64)
        self.program = dataclasses.replace(
            program, **{name: _moved(getattr(program, name), place) for name in ("P", "q", "A", "b")}
        )

    def only_objective(self, constraining: Any) -> tuple[tuple[int, str], ...]:
        """The parameters none of whose entries is at one of these positions."""
        used = {int(k) for k in np.searchsorted(self.offsets, constraining, side="right") - 1}
        inside = {self.parts[k][0] for k in used if k < len(self.parts)}
        return tuple((i, self.declared[i].name) for i, _ in self.parts if i not in inside)

    # ------------------------------------------------------------------------------------------------------ every call
    def check(self, values: Sequence[Any]) -> list[Tensor]:
        """The tensors, one for each parameter, of the right shapes."""
        if len(values) != len(self.declared):
            names = ", ".join(d.name for d in self.declared)
            raise ValueError(
                f"the layer takes {len(self.declared)} parameter tensor(s) ({names}), in that order; got {len(values)}"
            )
        tensors, device = [], next((value.device for value in values if isinstance(value, Tensor)), None)
        for value, declared in zip(values, self.declared, strict=True):
            tensor = value if isinstance(value, Tensor) else _tensor(value, declared.name, device)
            extend.trees.check_numbers(tensor, f"parameter {declared.name}")
            if tensor.layout != torch.strided:
                tensor = tensor.to_dense()
            if not tensor.is_floating_point():
                if tensor.is_complex():
                    raise TypeError(f"parameter {declared.name} got a complex tensor; cvxpy parameters here are real")
                tensor = tensor.to(torch.get_default_dtype())
            if tuple(tensor.shape[max(tensor.ndim - declared.ndim, 0) :]) != declared.shape:
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
            lead = tuple(value.shape[: value.ndim - declared.ndim])
            if not lead:
                continue
            if found is not None and lead != found:
                raise ValueError(
                    f"batch sizes disagree: parameter {owner} has batch shape {found}, parameter {declared.name} has "
                    f"{lead}; give all the same, or none to those that the batch shares"
                )
            found, owner = lead, declared.name
        return found or ()

    def dtype(self, values: Sequence[Tensor]) -> torch.dtype:
        """The dtype of the results."""
        dtype = torch.get_default_dtype() if not values else values[0].dtype
        for value in values[1:]:
            dtype = torch.promote_types(dtype, value.dtype)
        return dtype

    def vector(self, values: Sequence[Tensor], lead: tuple[int, ...]) -> tuple[Vector, Tensor]:
        """The vector in float64, and ``flags (batch, 2 * parameters)``: positive where a sample's parameter is
        not finite (first half), or by how much it breaks its declaration (second half).  Flagged samples get zeros, so
        that nothing of them can reach the rest."""
        batch = math.prod(lead)
        device = values[0].device if values else torch.device("cpu")
        found = [_row(value, declared, batch) for value, declared in zip(values, self.declared, strict=True)]
        flags, clean = _flags([row.detach() for row, _ in found], [gap for _, gap in found], batch, device)
        good = None if clean else ~(flags > 0).any(1, keepdim=True)
        parts = []
        for number, log in self.parts:
            part = found[number][0].expand(batch, -1)
            if good is not None:
                part = torch.where(good, part, 1.0 if log else 0.0)
            parts.append(part.log() if log else part)
        return Vector(parts, self.offsets, batch, device), flags


def _row(value: Tensor, declared: Declared, batch: int) -> tuple[Tensor, Tensor | None]:
    """A parameter in float64, one row a sample (or one for all), and by how much each breaks what was declared."""
    wide = value.to(torch.float64)
    gaps: list[Tensor] = []
    if declared.symmetric:
        gap = (wide - wide.mT).detach().abs().flatten(-2).amax(-1)
        slack = _SLACK * (1 + wide.detach().abs().flatten(-2).amax(-1))
        wide = (wide + wide.mT) * 0.5
        if declared.definite:
            lowest = torch.linalg.eigvalsh(declared.definite * wide.detach().nan_to_num(0.0, 0.0, 0.0)).amin(-1)
            gap = torch.maximum(gap, -lowest)
        gaps.append((gap - slack).reshape(-1))
    row = wide.reshape((batch, -1) if value.ndim > declared.ndim else (1, -1))
    plain = row.detach()
    if declared.pattern is not None:
        stray = (plain * torch.from_numpy(declared.pattern).to(plain)).abs().amax(1)
        gaps.append(stray - _SLACK * (1 + plain.abs().amax(1)))
    if declared.bounds is not None:
        lower, upper = torch.from_numpy(declared.bounds).to(plain)
        gaps.append(torch.maximum(lower - plain, plain - upper).amax(1) - _SLACK * (1 + plain.abs().amax(1)))
    if declared.sign:
        gaps.append(_breach(plain, declared.sign))
    return row, torch.stack(gaps).amax(0).clamp_min(0) if gaps else None


def _flags(rows: list[Tensor], gaps: list[Tensor | None], batch: int, device: Any) -> tuple[Tensor, bool]:
    """``(batch, 2 * parameters)``, not finite and declaration broken; and are all known to be zero?"""
    none = torch.zeros(batch, dtype=torch.float64, device=device)
    if all(gap is None for gap in gaps):
        with contextlib.suppress(RuntimeError):  # under vmap nobody may look
            if all(math.isfinite(row.sum().item()) for row in rows):
                return none.new_zeros(batch, 2 * len(rows)), True
    totals = torch.stack([row.sum(1).expand(batch) for row in rows], 1) if rows else none.new_zeros(batch, 0)
    broken = (~totals.isfinite()).to(torch.float64)
    breach = [none if gap is None else gap.reshape(-1).expand(batch).nan_to_num(0.0) for gap in gaps]
    flags = torch.cat([broken, torch.stack(breach, 1) if breach else broken], 1)
    clean = False
    with contextlib.suppress(RuntimeError):
        clean = not bool(flags.any())
    return flags, clean


def _tensor(value: Any, name: str, device: torch.device | None) -> Tensor:
    if value is None:
        raise ValueError(f"parameter {name} is missing: the layer got None for it")
    try:
        return torch.as_tensor(value.toarray() if hasattr(value, "toarray") else value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        listed = isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value)
        why = "parameters are given one by one, layer(a, b)" if listed else error
        raise TypeError(f"parameter {name} got a {type(value).__name__}, not a tensor: {why}") from error


def _declare(parameter: Any, positive: bool) -> Declared:
    attributes = parameter.attributes
    symmetric = any(attributes.get(k) for k in ("symmetric", "PSD", "NSD")) and parameter.ndim == 2
    sign = next((text for key, text in _SIGNS.items() if attributes.get(key)), "")
    shape = tuple(parameter.shape)
    definite = 1 if attributes.get("PSD") else -1 if attributes.get("NSD") else 0
    return Declared(
        parameter.name(), shape, _SIGNS["pos"] if positive else sign, symmetric, definite, len(shape), _zeros(parameter),
        _limits(parameter),
    )  # fmt: skip


def _zeros(parameter: Any) -> Any:
    """Where a parameter that is declared diagonal or sparse must be zero; ``None``: nowhere."""
    if parameter.attributes.get("diag"):
        return ~np.eye(parameter.shape[0], dtype=bool).ravel()
    where = parameter.attributes.get("sparsity")
    if where is None or isinstance(where, bool):
        return None
    outside = np.ones(parameter.shape, dtype=bool)
    outside[tuple(np.asarray(i) for i in where)] = False
    return outside.ravel()


def _limits(parameter: Any) -> Any:
    """The declared bounds, ``(2, size)``; ``None``: none."""
    limits = parameter.attributes.get("bounds")
    if limits is None:
        return None
    missing = (-np.inf, np.inf)
    return np.stack([
        np.broadcast_to(np.asarray(none if limit is None else limit, dtype=np.float64), parameter.shape).ravel()
        for limit, none in zip(limits, missing, strict=True)
    ])  # fmt: skip


def _moved(matrix: Any, place: Any) -> Any:
    """The matrix with its column ``j`` at ``place[j]``."""
    matrix = matrix.tocoo()
    return type(matrix)((matrix.data, (matrix.row, place[matrix.col])), shape=(matrix.shape[0], int(place[-1]) + 1))


def _breach(row: Tensor, sign: str) -> Tensor:
    """How far the worst entry of each row is on the wrong side."""
    worst = (row if sign in (_SIGNS["neg"], _SIGNS["nonpos"]) else -row).amax(1)
    if sign in (_SIGNS["pos"], _SIGNS["neg"]):
        return torch.where(worst >= 0, worst.clamp_min(torch.finfo(row.dtype).tiny), 0.0)
    return (worst - 1e-8).clamp_min(0)
