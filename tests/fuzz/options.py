"""Options with a wrong type or value: each must be refused at once, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

__all__ = ["OPTIONS", "Option"]


def _solve(**options: Any) -> Callable[[], Any]:
    x = torch.linspace(0.2, 0.6, 6, dtype=torch.float64).reshape(3, 2)
    return lambda: ik.fixed_point(
        lambda z, x: 0.5 * z + x, options.pop("z0", torch.zeros(3, 2, dtype=torch.float64)), (x,), **options
    )


def _minimise(**options: Any) -> Callable[[], Any]:
    def objective(z: Tensor) -> Tensor:
        return (z - 1).square().sum()

    return lambda: ik.argmin(objective, torch.zeros(2, dtype=torch.float64), **options)


# what is called, and the words of which the message must have one
OPTIONS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "rtol_text": (_solve(rtol="1e-3"), ("rtol",)),
    "rtol_negative": (_solve(rtol=-1.0), ("rtol",)),
    "rtol_tensor_of_three": (_solve(rtol=torch.ones(3)), ("rtol",)),
    "rtol_nan": (_solve(rtol=float("nan")), ("rtol",)),
    "atol_text": (_solve(atol="0"), ("atol",)),
    "max_steps_zero_point_five": (_solve(max_steps=0.5), ("max_steps",)),
    "max_steps_negative": (_solve(max_steps=-3), ("max_steps",)),
    "batch_dims_negative": (_solve(batch_dims=-1), ("batch_dims",)),
    "batch_dims_three": (_solve(batch_dims=3), ("batch_dims", "batch dim")),
    "in_dims_too_long": (_solve(batch_dims=1, in_dims=(0, 0)), ("in_dims",)),
    "in_dims_out_of_range": (_solve(batch_dims=1, in_dims=(-5,)), ("in_dims",)),
    "in_dims_text": (_solve(batch_dims=1, in_dims="0"), ("in_dims",)),
    "on_failure_unknown": (_solve(on_failure="skip"), ("on_failure",)),
    "callback_text": (_solve(callback="print"), ("callback",)),
    "callback_of_no_arguments": (_solve(callback=lambda: None), ("callback",)),
    "solver_unknown": (_solve(solver="andersen"), ("anderson",)),
    "solver_class_of_torch_optim": (_solve(solver=torch.optim.Adam), ("TorchOptim", "torch_optim", "optim.")),
    "solver_number": (_solve(solver=3), ("solver",)),
    "rule_unknown": (_solve(rule="implicite"), ("implicit",)),
    "linear_solver_unknown": (lambda: ik.Implicit(linear_solver="gmress"), ("gmres",)),
    "keyword_tol": (_solve(tol=1e-3), ("rtol",)),
    "keyword_maxiter": (_solve(maxiter=3), ("max_steps",)),
    "z0_integers": (lambda: ik.root(lambda z: z - 1, torch.zeros(2, dtype=torch.int64)), ("z0", "dtype")),
    "z0_sparse": (lambda: ik.root(lambda z: z - 1, torch.eye(2).to_sparse()), ("z0", "sparse")),
    "z0_meta": (lambda: ik.root(lambda z: z - 1, torch.zeros(2, device="meta")), ("z0", "meta")),
    "z0_none": (lambda: ik.root(lambda z: z - 1, None), ("z0",)),
    "args_list": (lambda: ik.root(lambda z, x: z - x, torch.zeros(2), [torch.ones(2)]), ("args",)),
    "args_dict": (lambda: ik.root(lambda z, x: z - x, torch.zeros(2), {"x": torch.ones(2)}), ("args",)),
    "problem_function": (lambda: ik.solve(lambda z: z, torch.zeros(2)), ("Problem",)),  # type: ignore[arg-type]
    "problem_class": (lambda: ik.solve(ik.Root, torch.zeros(2)), ("Root", "Problem")),  # type: ignore[arg-type]
    "memory_two_and_a_half": (lambda: _solve(solver=ik.Anderson(memory=2.5))(), ("memory",)),  # type: ignore[arg-type]
    "memory_zero": (lambda: _solve(solver=ik.Anderson(memory=0))(), ("memory",)),
    "damping_text": (lambda: _solve(solver=ik.Anderson(damping="a"))(), ("damping",)),  # type: ignore[arg-type]
    "rule_rtol_text": (lambda: _solve(rule=ik.Implicit(rtol="x"))(), ("rtol",)),  # type: ignore[arg-type]
    "neumann_one_and_a_half": (lambda: _solve(rule=ik.Neumann(1.5))(), ("terms",)),  # type: ignore[arg-type]
    "unroll_one_and_a_half": (lambda: _solve(rule=ik.Unroll(1.5))(), ("steps",)),  # type: ignore[arg-type]
    "blocks_unknown": (lambda: ik.Blocks("andersen"), ("anderson",)),
    "bounds_number": (_minimise(bounds=1.0), ("bounds",)),
    "bounds_crossed": (_minimise(bounds=(1.0, 0.0)), ("bounds",)),
    "bounds_shape": (_minimise(bounds=(torch.zeros(3), None)), ("bound",)),
    "bounds_and_project": (_minimise(bounds=(0, 1), project=ik.project.simplex()), ("bounds", "project")),
    "constraints_function": (_minimise(constraints=[lambda z: z]), ("Equality",)),
    "prox_of_one_argument": (_minimise(prox=lambda v: v), ("prox",)),
    "prox_class": (_minimise(prox=ik.prox.l1), ("prox",)),
    "degenerate_unknown": (_minimise(degenerate="ignore"), ("degenerate",)),
    "q_missing": (lambda: ik.solve(ik.QuadraticProgram(torch.eye(2), None)), ("q",)),  # type: ignore[arg-type]
    "A_without_b": (lambda: ik.QuadraticProgram(torch.eye(2), torch.ones(2), A=torch.ones(1, 2)), ("A and b",)),
    "simplex_radius": (lambda: ik.project.simplex(-1.0), ("radius",)),
    "l1_weight": (lambda: ik.prox.l1(-1.0), ("weight",)),
}


@dataclass(frozen=True)
class Option:
    """One row; ``str`` and :meth:`parse` as of a :class:`~case.Case`."""

    name: str

    def __str__(self) -> str:
        return f"option.{self.name}"

    @classmethod
    def parse(cls, line: str) -> Option:
        name = line.removeprefix("option.").strip()
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name!r}; there are {', '.join(OPTIONS)}")
        return cls(name)

    def outcome(self) -> tuple[str, str]:
        """Refused if the message names the option; wrong if nothing is said."""
        call, words = OPTIONS[self.name]
        try:
            call()
        except Exception as error:
            said = any(word in str(error) for word in words)
            return "refused" if said else "unhelpful", f"{type(error).__name__}: {str(error)[:160]}"
        return "wrong", "accepted"
