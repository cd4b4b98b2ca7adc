"""A case: everything about one run, in one line of text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import implicitkit as ik

from .holders import HOLDERS, IN_ARGS, hold
from .kinds import KINDS
from .nested import NESTED
from .rows import Row, Setting
from .sets import SETS
from .smooth import SMOOTH
from .states import STATES
from .structures import STRUCTURES
from .transforms import WITHOUT_TRANSFORMS, compose, draw_levels, order

__all__ = ["ROWS", "Case", "draw_case"]

ROWS: dict[str, Row] = {**SMOOTH, **KINDS, **SETS, **STRUCTURES, **NESTED}
LAYOUTS = ("plain", "strided", "expanded", "offset", "columns")
CONFIGURED: dict[str, Callable[[], Any]] = {
    "anderson2": lambda: ik.Anderson(memory=2),
    "blocks": lambda: ik.Blocks("anderson"),
    "accelerated": lambda: ik.Accelerated("picard"),
}
RULES: dict[str, Callable[[], Any]] = {"neumann80": lambda: ik.Neumann(80)}  # 0.6^80 is less than rounding
DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "complex128", "complex64")
}
HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One run.  ``str(case)`` is the line, :meth:`parse` its inverse; what has its default is left out.

    Attributes:
        row: of :data:`ROWS`. do: the composition, outermost first. x, w: how each is held. outer: which holder is outside.
        seed, n: of the data. dtype, xl, wl, zl: dtype, layouts of ``x``, ``w`` and the start. wn: ``w`` is one number.
        batch: variables with a batch dimension (``""``, ``"x"`` or ``"xw"``). dims: give ``in_dims``.
        solver, rule, linear: the parts. state: the structure of the unknowns. cp: the variables are complex too.
        cb: a callback looks on, and writes into what it is shown.
    """

    row: str
    do: str = ""
    x: str = "args"
    w: str = "args"
    outer: str = "xw"
    seed: int = 0
    n: int = 2
    dtype: str = "float64"
    xl: str = "plain"
    wl: str = "plain"
    zl: str = "plain"
    wn: int = 0
    batch: str = ""
    dims: int = 0
    solver: str = "auto"
    rule: str = "implicit"
    linear: str = "auto"
    state: str = ""
    cp: int = 0
    cb: int = 0

    def __str__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.row, *shown])

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case that a line describes.

        Raises:
            ValueError: an unknown row or field.
        """
        row, *rest = line.split()
        if row not in ROWS:
            raise ValueError(f"unknown row {row!r}; there are {', '.join(ROWS)}")
        types = {f.name: f.type for f in fields(cls)}
        given: dict[str, Any] = {}
        for word in rest:
            key, _, value = word.partition("=")
            if key not in types:
                raise ValueError(f"unknown field {key!r} in {line!r}; there are {', '.join(types)}")
            given[key] = int(value) if types[key] == "int" else value
        return cls(row, **given)

    @property
    def levels(self) -> list[tuple[str, str]]:
        pairs = [word.split(":") for word in self.do.split(",") if word]
        return [(name, variable) for name, variable in pairs]

    @property
    def order(self) -> int:
        return order(self.levels)

    # ---------------------------------------------------------------------------------------------------------- running
    def values(self) -> dict[str, Tensor]:
        """``x`` in (0.6, 1.4) and ``w`` in (0.7, 1.1), with imaginary parts in (0, 0.3) where they are complex, in the
        case's dtype and layouts; and ``s``, in which the start moves."""
        g = torch.Generator().manual_seed(self.seed)
        made = {}
        for name, low, high, layout in (("x", 0.6, 1.4, self.xl), ("w", 0.7, 1.1, self.wl)):
            shape: tuple[int, ...] = (3, self.n) if name in self.batch else (self.n,)
            shape = () if name == "w" and self.wn else shape
            t = low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)
            if self.cp:
                t = torch.complex(t, 0.3 * torch.rand(shape, generator=g, dtype=torch.float64))
            made[name] = lay_out(t.to(DTYPES[self.dtype] if self.cp else self.real), layout)
        if any(variable == "s" for _, variable in self.levels):
            made["s"] = torch.linspace(0.1, 0.2, self.n, dtype=self.real)
        return made

    @property
    def real(self) -> torch.dtype:
        """Of the variables, or of their parts."""
        return DTYPES[self.dtype].to_real()

    def solve(self, values: dict[str, Tensor]) -> Tensor:
        """The solution, by implicitkit."""
        row = ROWS[self.row]
        shape = (3, self.n) if self.batch else (self.n,)

        def start(number: float) -> Tensor:
            z0 = lay_out(torch.full(shape, number, dtype=DTYPES[self.dtype]), self.zl)
            return z0 + 0.1 * values["s"] if "s" in values else z0

        def held(kernel: Callable[..., Any], **tensors: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            ways = {name: getattr(self, name) for name in tensors}
            return hold(kernel, tensors, ways, [name for name in self.outer if name in tensors])

        return row.run(Setting(values["x"], values["w"], held, self._options(row), start, bool(self.batch), self.state))

    def _options(self, row: Row) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.solver != "auto":
            options["solver"] = CONFIGURED[self.solver]() if self.solver in CONFIGURED else self.solver
        if self.rule != "implicit":
            options["rule"] = RULES[self.rule]() if self.rule in RULES else self.rule
        elif self.linear != "auto":
            options["rule"] = ik.Implicit(linear_solver=self.linear)
        if self.batch:
            options["batch_dims"] = 1
            if self.dims:
                given = [name for name in row.held if getattr(self, name) in IN_ARGS]
                options["in_dims"] = tuple(self._in_dim(name) if name in self.batch else None for name in given)
        if self.cb:
            options["callback"] = _watch
        return options

    def _in_dim(self, name: str) -> int:
        return -1 if getattr(self, name) == "args_last" else 0

    def got(self) -> Tensor:
        """The composition, applied to the solve."""
        prepare = ROWS[self.row].prepare
        if prepare is not None:
            prepare(self.n)
        torch.manual_seed(0)
        return compose(self.solve, self.levels)(self.values()).detach()

    def want(self, by_reverse: bool = False, disabled: str = "", entangled: bool = False) -> Tensor:
        """The composition, applied to the closed form, in double precision; ``disabled``: ``"all"`` of it is unseen by
        ``torch.compile``, or ``"itself"``, but not what it calls; ``entangled``: times a function of all variables, so that
        every derivative depends on every one."""
        closed = form = ROWS[self.row].closed
        if disabled == "all":
            closed = torch.compiler.disable(form)
        elif disabled:
            closed = torch.compiler.disable(lambda x, w: form(1 * x, 1 * w), recursive=False)
        layouts = {"x": self.xl, "w": self.wl}
        precise = torch.complex128 if self.cp else torch.float64
        given = self.values()
        values = {name: lay_out(given[name].to(precise), layouts[name]) for name in ("x", "w")}
        if "s" in given:
            values["s"] = given["s"].double()

        def solution(v: dict[str, Tensor]) -> Tensor:
            z = closed(v["x"], v["w"])
            z = torch.complex(z, torch.zeros_like(z)) if DTYPES[self.dtype].is_complex and not z.is_complex() else z
            if "s" in v:  # a start is made in the same way, of a tensor that this variable tracks
                s = (
                    v["s"]
                    if disabled != "itself"
                    else torch.compiler.disable(lambda s: form(1 * s, 1 * s), recursive=False)(v["s"])
                )
                z = z + 0 * s.sum()
            return z * torch.exp(0.1 * sum(t.sum() for t in v.values())) if entangled else z

        return compose(solution, self.levels, by_reverse)(values).detach()


def _watch(step: int, z: Any, residual_norm: Tensor) -> None:
    """A callback that writes into what it is shown."""
    for leaf in tree_leaves(z):
        leaf.mul_(0.5)


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same shape, other strides.  (An expanded tensor takes the values of its first entry.)"""
    if t.ndim == 0 or layout == "plain":
        return t
    if layout == "strided" or (layout == "columns" and t.ndim == 1):
        return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]
    if layout == "offset":
        return torch.cat([torch.full_like(t, torch.nan), t], 0)[t.shape[0] :]
    if layout == "columns":
        return t.mT.contiguous().mT
    return t[..., :1].expand(t.shape)


def _possible(dtype: str, levels: list[tuple[str, str]]) -> bool:
    """Half precision has digits for first derivatives; the vmap of ``is_grads_batched`` fails on conjugates inside the
    transforms of ``torch.func``, where a solve refuses it too."""
    names = {name for name, _ in levels}
    batched = "complex" in dtype and "batched_backward" in names and not names <= WITHOUT_TRANSFORMS
    return not ((dtype in HALF and order(levels) > 1) or batched)


def draw_case(r: random.Random) -> Case:
    """A random case."""
    name = r.choices(list(ROWS), [row.weight for row in ROWS.values()])[0]
    row = ROWS[name]
    ways = [*HOLDERS, *["args"] * 6, *["closure"] * 3, *["args_dict", "args_nested", "args_last"]]
    held = {v: r.choice(ways) if v in row.held else "args" for v in ("x", "w")}
    if name == "layer.deq" and held["w"] in IN_ARGS:
        held["w"] = "closure"
    dtype = r.choice(row.dtypes) if r.random() < 0.3 else row.dtypes[0]
    batch = r.choice(["x", "xw"]) if row.batch and r.random() < 0.25 else ""
    n = r.choice(row.sizes)
    number = int(row.scalar_w and r.random() < 0.15)
    batch = "x" if number and batch else batch
    variables = ("x", "w", "x", "w", "x", "w", "s") if row.starts else ("x", "w")
    levels = draw_levels(r, variables)
    while not _possible(dtype, levels):
        levels = draw_levels(r, variables)
    if any(level == "in_thread" for level, _ in levels):  # a variable set in a thread's context is set nowhere else
        held = {v: "closure" if way == "context" else way for v, way in held.items()}
    rule = r.choice(row.rules) if r.random() < 0.3 else "implicit"
    every_batched_in_args = all(held[v] in IN_ARGS or v not in batch for v in row.held)
    return Case(
        name,
        ",".join(f"{a}:{b}" for a, b in levels),
        held["x"],
        held["w"],
        r.choice(["xw", "wx"]),
        r.randrange(1000),
        n,
        dtype,
        *(r.choice(LAYOUTS) if r.random() < 0.15 else "plain" for _ in range(3)),
        wn=number,
        batch=batch,
        dims=int(bool(batch) and row.in_dims and every_batched_in_args and r.random() < 0.5),
        solver="picard" if rule == "unroll" else r.choice(row.solvers) if r.random() < 0.5 else "auto",
        rule=rule,
        linear=r.choice(row.linear) if rule == "implicit" and r.random() < 0.4 else "auto",
        state=r.choice(list(STATES)) if row.states and r.random() < 0.25 else "",
        cp=int("complex" in dtype and r.random() < 0.5),
        cb=int(row.callback and rule != "unroll" and r.random() < 0.05),
    )
