"""What does not fit, is not finite or is not pure: refused, or answered, with a message that says what and where."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik

D = torch.float64
LOW = torch.eye(3, dtype=torch.float32)


@dataclasses.dataclass
class Pair:
    a: Tensor
    b: Tensor


def zeros(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def half(z: Any, *_: Any) -> Any:
    """A contraction towards 2."""
    return 0.5 * z + 1.0


def no_root(z: Tensor, shift: Tensor | float = 1.0) -> Tensor:
    """z^2 + shift: without a root for shift > 0."""
    return z**2 + shift


def square(z: Tensor) -> Tensor:
    return (z**2).sum()


def write_z(z: Tensor, x: Tensor) -> Tensor:
    return z.mul_(0.5) + x


def write_second_leaf(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    z["b"].add_(1.0)
    return {"a": z["a"] * 0.5, "b": z["b"] * 0.5 + x}


def write_args(z: Tensor, x: Tensor, y: dict[str, Tensor]) -> Tensor:
    y["k"].mul_(2.0)
    return 0.5 * z + x


def shout(step: int, z: Any, norm: Tensor) -> None:
    raise KeyError(f"the callback's own error at step {step}")


def less(z: Tensor, a: Any) -> Tensor:
    return z - a


def less_one(z: Tensor, *_: Any) -> Tensor:
    return z - 1


def found_by(answer: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """A layer over ``z = a`` whose solver returns this."""

    def solver(z0: Tensor, a: Tensor) -> Any:
        return answer(z0, a)

    return lambda: ik.implicit(ik.Root(less))(solver)(zeros(3), torch.ones(3, dtype=D))


def batched(*args: Any, **options: Any) -> Callable[[], Any]:
    """A bracket of numbers over a batch."""
    return lambda: ik.root(lambda z, *a: z - 1, args=args, bracket=(0, 5), batch_dims=1, **options)


ONE = torch.ones(1, dtype=D)
LEAF = torch.ones(1, dtype=D, requires_grad=True)
Row = tuple[Callable[[], Any], type[Exception], str]


class Lonely(ik.Method):
    name, solves = "lonely", "fixed_point"

    def step(self, f: Any, z: Tensor, state: Any) -> Any:
        return f(z)


class FindsNothing(ik.extend.QPSolver):
    def find(self, data: Any, tol: float, max_steps: int) -> Any:
        return None


class Steps(ik.Method):
    solves = "fixed_point"

    def __init__(self, map: Any) -> None:
        self.map = map

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.map(f, z), state


class Narrow(ik.Method):
    name, solves = "narrow", "fixed_point"

    def step(self, f: Any, z: Tensor) -> Any:  # type: ignore[override]
        return f(z), ()


class Declared(ik.Method):
    name, solves = "declared", "fixed_point"
    depth: int = 3


REFUSED: dict[str, Row] = {
    # ------------------------------------------------------------------------------------------------ the problem
    "fixed point of no callable": (
        lambda: ik.fixed_point(3.0, zeros(2)), TypeError, r"FixedPoint needs a callable map\(z, \*args\).*got float"),
    "root of no callable": (lambda: ik.root(None, zeros(2)), TypeError, r"Root needs a callable .*got NoneType"),
    "argmin of no callable": (
        lambda: ik.argmin("f", zeros(2)), TypeError, r"Argmin needs a callable objective.*got str"),
    "least squares of no callable": (
        lambda: ik.least_squares(zeros(2), zeros(2)), TypeError, r"LeastSquares needs a callable residuals.*got Tensor"),
    "steady state of no callable": (
        lambda: ik.steady_state(7, zeros(2)), TypeError, r"SteadyState needs a callable rhs\(z, \*args\): .*got int"),
    "a function where a problem is due": (
        lambda: ik.solve(half, zeros(2)), TypeError, r"must be a Problem .*got function; wrap the function in one"),
    "no problem at all": (lambda: ik.solve(3, zeros(2)), TypeError, r"must be a Problem such as ik\.Root\(f\).*got int"),
    # -------------------------------------------------------------------------------------------------------- the state
    "integer z0": (
        lambda: ik.fixed_point(half, torch.zeros(2, dtype=torch.int64)),
        TypeError, r"z0 has dtype torch\.int64; an unknown must be real or complex.*z0\.to\("),
    "boolean leaf": (
        lambda: ik.fixed_point(half, {"a": zeros(2), "b": torch.ones(2, dtype=torch.bool)}),
        TypeError, r"z0\['b'\] has dtype torch\.bool"),
    "an integer for z0": (lambda: ik.fixed_point(half, 1), TypeError, r"z0 is an int, not a tensor: write it with a deci"),
    "a dataclass for z0": (
        lambda: ik.fixed_point(lambda z: Pair(0.5 * z.b, z.a), Pair(zeros(2), zeros(2))), TypeError,
        r"z0 is a Pair, not a tensor: .*torch\.export\.register_dataclass\(Pair\).*named tuple"),
    "a solution for z0": (
        lambda: ik.fixed_point(half, ik.fixed_point(half, zeros(2))), TypeError, r"z0 is a Solution, not .*z0\.value"),
    "a solution from the function": (
        lambda: ik.root(lambda z: ik.fixed_point(half, z), zeros(2)), TypeError, r"a Solution, not .*solution\.value"),
    "text for z0": (lambda: ik.fixed_point(half, "1"), TypeError, r"z0 is a str, not a tensor"),
    "sparse z0": (lambda: ik.fixed_point(half, zeros(3).to_sparse()), TypeError, r"z0 is sparse .*z0\.to_dense"),
    "z0 without numbers": (
        lambda: ik.fixed_point(half, torch.zeros(3, device="meta")), TypeError, r"z0 is on the meta device, which holds no"),
    "z0 of eight bits": (
        lambda: ik.fixed_point(half, {"a": torch.zeros(3).to(torch.float8_e4m3fn)}), TypeError,
        r"z0\['a'\] has dtype torch\.float8_e4m3fn, in which nothing can be computed"),
    "a number in z0": (lambda: ik.fixed_point(half, [zeros(2), 1]), TypeError, r"z0\[1\] is an int, not a tensor"),
    "no leaf": (lambda: ik.fixed_point(half, {}), ValueError, r"z0 is empty: the state has no tensor in it"),
    "mixed precision": (
        lambda: ik.fixed_point(half, (zeros(2), zeros(2, dtype=torch.float32))),
        TypeError, r"different precisions: z0\[1\] has torch\.float32, the first leaf has torch\.float64"),
    "mixed devices": (
        lambda: ik.fixed_point(half, {"a": zeros(2), "b": torch.zeros(2, dtype=D, device="meta")}),
        ValueError, r"different devices: z0\['b'\] on meta, the first leaf on cpu"),
    "leaves that disagree on the batch": (
        lambda: ik.fixed_point(half, (zeros(3, 2), zeros(4, 2)), batch_dims=1),
        ValueError, r"disagree on the batch: z0\[1\] has batch shape \(4,\), the first leaf \(3,\)"),
    "zero-size state": (lambda: ik.fixed_point(half, zeros(0)), ValueError, r"size zero \(shape \(0,\)\).*no unknown"),
    "zero-size samples": (
        lambda: ik.fixed_point(half, zeros(5, 0), batch_dims=1), ValueError, r"size zero \(shape \(5, 0\)\)"),
    # ---------------------------------------------------------------------------------------------- what the map returns
    "another shape": (
        lambda: ik.fixed_point(lambda z: z[:2], zeros(3)), ValueError,
        r"FixedPoint's function returned shape \(2,\), but z has shape \(3,\) there: .*one equation per unknown$"),
    "one equation per unknown, in a row": (
        lambda: ik.root(lambda z: z.flatten(), zeros(3, 2)), ValueError,
        r"returned shape \(6,\), but z has shape \(3, 2\) there: .*per unknown\. There is: reshape them, .*\(3, 2\)\)$"),
    "another shape in a leaf": (
        lambda: ik.root(lambda z: {"a": z["a"], "b": z["b"].sum()}, {"a": zeros(2), "b": zeros(3)}), ValueError,
        r"returned shape \(\) at \['b'\], but z has shape \(3,\) there"),
    "another structure": (
        lambda: ik.root(lambda z: [z["a"]], {"a": zeros(2)}), TypeError,
        r"another structure than z: got \[\(2,\)\], z is \{'a': \(2,\)\}"),
    "a tuple for a list": (
        lambda: ik.root(lambda z: tuple(z), [zeros(2), zeros(1)]), TypeError,
        r"got \(\(2,\), \(1,\)\), z is \[\(2,\), \(1,\)\]: a tuple where z is a list"),
    "a leaf too few": (
        lambda: ik.root(lambda z: {"a": z["a"]}, {"a": zeros(2), "b": zeros(1)}), TypeError, r"another structure than z"),
    "another dtype": (
        lambda: ik.fixed_point(lambda z: z.float(), zeros(3)), TypeError,
        r"returned dtype torch\.float32, but z has torch\.float64.*start from a z0 of the dtype"),
    "a module of another dtype": (
        lambda: ik.fixed_point(torch.nn.Linear(3, 3, dtype=torch.float32), zeros(3)), RuntimeError,
        r"z0 of torch\.float64 beside parameter weight of Linear of torch\.float32.*start from a z0 of the dtype"),
    "an argument of another dtype": (
        lambda: ik.root(lambda z, A: A @ z - 1, zeros(3), (torch.eye(3, dtype=torch.float32),)), RuntimeError,
        r"z0 of torch\.float64 beside args\[0\] of torch\.float32: start from"),
    "a captured tensor of another dtype": (
        lambda: ik.root(lambda z: LOW @ z - 1, zeros(3)), RuntimeError,
        r"z0 of torch\.float64 beside LOW of torch\.float32: start from"),
    "complex for real": (
        lambda: ik.root(lambda z: z + 1j, zeros(3)), TypeError, r"returned dtype torch\.complex128, but z has torch"),
    "real for complex": (
        lambda: ik.root(lambda z: z.real, zeros(3, dtype=torch.complex128)), TypeError,
        r"returned dtype torch\.float64, but z has complex torch\.float64"),
    "a number for a tensor": (
        lambda: ik.root(lambda z: 1.0, zeros(3)), TypeError, r"returned a float, not a tensor"),
    "nothing": (
        lambda: ik.root(lambda z: None, zeros(3)), TypeError,
        r"returned (a NoneType, not a tensor: a `return` is|another struct)"),
    "nothing for an objective": (
        lambda: ik.argmin(lambda z: None, zeros(3)), TypeError, "Argmin.* a NoneType, not a tensor: a `return` is missing"),
    "an objective in a list": (
        lambda: ik.argmin(lambda z: [z.square().sum()], zeros(3)), TypeError, r"function returned a list, not a tensor"),
    "an objective and something beside it": (
        lambda: ik.argmin(lambda z: (z.square().sum(), z), zeros(3)), ValueError, r"2 tensors.*pass has_aux=True"),
    "residuals and a number beside them": (
        lambda: ik.least_squares(lambda z: (z, 1), zeros(3)), TypeError, r"returned an int.*pass has_aux=True"),
    "an objective of another dtype": (
        lambda: ik.argmin(lambda z: z.square().sum().float(), zeros(3)), TypeError,
        r"returned dtype torch\.float32, but z has torch\.float64; start from a z0 of the dtype"),
    "vectors of two lengths": (
        lambda: ik.root(lambda z: z * (z @ torch.ones(7, dtype=D)), zeros(3)), RuntimeError,
        r"inconsistent tensor size.*The function was called with z \(3,\)"),
    "no residuals": (lambda: ik.least_squares(lambda z: [], zeros(3)), TypeError, "returned a list without a tensor in it"),
    "an array for a constraint": (
        lambda: ik.argmin(square, zeros(3), constraints=ik.Equality(lambda z: z.numpy())), TypeError,
        r"constraint 0 \(Equality\) returned an ndarray, not a tensor: write it in torch"),
    "an array": (
        lambda: ik.root(lambda z: z.numpy() - 1, zeros(3)), TypeError,
        r"returned an ndarray, not a tensor: write it in torch"),
    "a vector for an objective": (
        lambda: ik.argmin(lambda z: z**2, zeros(3)), ValueError,
        r"must return one number, shape \(\); it returned shape \(3,\).*batch_dims="),
    "one number for a batch of objectives": (
        lambda: ik.argmin(square, zeros(4, 3), batch_dims=1), ValueError,
        r"must return one number per sample, shape \(4,\); it returned shape \(\)\. Sum over what belongs to one sample"),
    "nothing among the arguments": (
        lambda: ik.root(lambda z, a: z - a, zeros(3), (None,)), TypeError,
        r"unsupported operand.*The function was called with args\[0\], a NoneType"),
    "a word among the arguments": (
        lambda: ik.root(lambda z, a, b: z - a - b, zeros(3), (zeros(3), "b")), TypeError,
        r"unsupported operand.*The function was called with args\[1\], a str"),
    "bounds the wrong way round": (
        lambda: ik.argmin(square, zeros(3), bounds=(torch.tensor([0.0, 2.0, 0.0]), 1.0)), ValueError,
        r"must not be above the upper one, neither may be NaN, and a number must lie between them; got 2 and 1"),
    "bounds with nothing between them": (
        lambda: ik.argmin(square, zeros(3), bounds=(torch.inf, None)), ValueError,
        r"a number must lie between them; got inf and inf"),
    "a box of nothing": (
        lambda: ik.project.box(None, torch.tensor([0.0, -torch.inf])), ValueError, r"Box: .*; got -inf and -inf"),
    "an index beyond the state": (
        lambda: ik.root(lambda z, a: z[5] - a, zeros(3), (zeros(2),)), IndexError,
        r"out of bounds.*The function was called with z \(3,\), args\[0\] \(2,\)"),
    "a model of all parameters at once": (
        lambda: ik.curve_fit(lambda x, p: p[0] * x, zeros(5), zeros(5), zeros(1)), IndexError,
        r"called as f\(xdata, \*p\), with a number of its own for each parameter"),
    "a model that unpacks its parameters": (
        lambda: ik.curve_fit(lambda x, p: next(iter(p)) * x, zeros(5), zeros(5), zeros(1)), TypeError,
        r"called as f\(xdata, \*p\), with a number of its own for each parameter"),
    "a time that never comes": (
        lambda: ik.solve(ik.InitialValue(lambda t, y: -y, (0.0, torch.inf)), zeros(3)), ValueError,
        r"t must be finite, got \[0\.0, inf\]"),
    "a set of another size": (
        lambda: ik.project.halfspace(zeros(4) + 1)(zeros(3)), ValueError,
        r"Halfspace with a of shape \(4,\) was called with shape \(3,\), and they do not fit"),
    "weights of another size": (
        lambda: ik.prox.l1(zeros(2))(zeros(3)), ValueError, r"l1 with weight of shape \(2,\) was called with shape \(3,\)"),
    "a step that no rotation takes": (
        lambda: ik.manifold.SO3().retract(torch.eye(3), zeros(2)), ValueError,
        r"SO3 was called with shape \(3, 3\), \(2,\), and they do not fit"),
    "a class that is no rule": (
        lambda: ik.register_rule("no_rule")(dict), TypeError,
        r"class dict as rule 'no_rule': .* subclass of implicitkit.Rule"),
    "a class that is no linear solver": (
        lambda: ik.register_linear_solver("no_solver")(dict), TypeError, r"subclass of implicitkit.LinearSolver"),
    "units below zero": (
        lambda: ik.least_squares(lambda z: z, zeros(3), x_scale=torch.tensor([1.0, -2.0, 1.0])), ValueError,
        r"x_scale must be positive and finite, got -2"),
    "a complex objective": (
        lambda: ik.argmin(lambda z: (z * 1j).sum(), zeros(3)), TypeError, r"complex numbers; what is minimised must be"),
    "a complex model": (
        lambda: ik.curve_fit(lambda x, a: a * x * 1j, zeros(3), zeros(3)), TypeError,
        r"f returned complex numbers: fit real and imaginary parts as twice as many data"),
    "residuals without the batch": (
        lambda: ik.least_squares(lambda z: z.sum(0), zeros(4, 3), batch_dims=1), ValueError,
        r"first dimensions are the batch \(4,\); it returned shape \(3,\)"),
    # ------------------------------------------------------------------------------------------------------- the options
    "batch_dims beyond the rank": (
        lambda: ik.fixed_point(half, zeros(3), batch_dims=2), ValueError,
        r"batch_dims=2 is larger than the rank of z0, which has shape \(3,\)"),
    "batch_dims beyond the rank of a leaf": (
        lambda: ik.fixed_point(half, {"a": zeros(3, 2), "b": zeros(3)}, batch_dims=2), ValueError,
        r"batch_dims=2 is larger than the rank of z0\['b'\]"),
    "negative batch_dims": (
        lambda: ik.fixed_point(half, zeros(3), batch_dims=-1), ValueError, r"batch_dims must be an integer >= 0, got -1"),
    "fractional batch_dims": (
        lambda: ik.fixed_point(half, zeros(3), batch_dims=1.0), ValueError, r"batch_dims must be an integer >= 0"),
    "in_dims without a batch": (
        lambda: ik.fixed_point(half, zeros(3), (zeros(3),), in_dims=(0,)), ValueError, r"batch_dims is 0: pass batch_dims"),
    "in_dims of the wrong length": (
        lambda: ik.fixed_point(half, zeros(3, 1), (zeros(3, 1),), in_dims=(0, None), batch_dims=1),
        ValueError, r"in_dims has 2 entries for 1 arguments"),
    "in_dims that do not fit": (
        lambda: ik.fixed_point(half, zeros(3, 1), (zeros(2, 1),), in_dims=(0,), batch_dims=1),
        ValueError, r"argument 0 carries the batch in dimension 0, but its shape is \(2, 1\) and the batch has 3 rows"),
    "negative rtol": (lambda: ik.fixed_point(half, zeros(3), rtol=-1e-3), ValueError, r"^rtol must.*negative, got -0\.001"),
    "negative atol": (lambda: ik.fixed_point(half, zeros(3), atol=-1.0), ValueError, r"^atol must.*not negative, got -1\.0"),
    "infinite rtol": (lambda: ik.fixed_point(half, zeros(3), rtol=float("inf")), ValueError, r"finite and not negative"),
    "in_dims of names": (
        lambda: ik.fixed_point(lambda z, x: 0.5 * z + x, zeros(3), zeros(3), batch_dims=1, in_dims="0"), TypeError,
        r"in_dims holds one dimension .* got '0'"),
    "NaN atol": (lambda: ik.fixed_point(half, zeros(3), atol=float("nan")), ValueError, r"finite and not negative"),
    "in_dims out of range": (
        lambda: ik.fixed_point(lambda z, x: 0.5 * z + x, zeros(3, 1), (zeros(3, 1),), in_dims=(-5,), batch_dims=1),
        ValueError, r"argument 0 carries the batch in dimension -5, but its shape is \(3, 1\)"),
    "another library's word": (
        lambda: ik.fixed_point(half, zeros(3), maxiter=5), TypeError, r"'maxiter'\. Did you mean 'max_steps'\?"),
    "yet another": (lambda: ik.root(half, zeros(3), tol=1e-5), TypeError, r"'tol'\. Did you mean 'rtol'\?.*Options: solver"),
    "two words for one": (lambda: ik.argmin(lambda z: z @ z, zeros(3), lower=0.0), TypeError,
        r"'lower'\. Did you mean 'bounds'\? It is an option of ik\.argmin and ik\.least_squares\."),
    "the name of a class": (lambda: ik.argmin(lambda z: z @ z, zeros(3), equality=half), TypeError,
        r"'equality'\. Did you mean 'constraints'\? It is an option of ik\.argmin\."),
    "misspelt": (lambda: ik.root(half, zeros(3), on_failur="warn"), TypeError, r"Did you mean 'on_failure'\?"),
    "sparse output": (lambda: ik.root(lambda z: z.to_sparse(), zeros(3)), TypeError, r"returned a sparse tensor: return a"),
    "negative steps": (lambda: ik.fixed_point(half, zeros(3), max_steps=-5), ValueError, r"integer >= 0.*got -5"),
    "fractional steps": (lambda: ik.fixed_point(half, zeros(3), max_steps=2.5), ValueError, r"max_steps must be .*2\.5"),
    "unknown policy": (
        lambda: ik.fixed_point(half, zeros(3), on_failure="ingore"), ValueError,
        r"on_failure must be one of 'raise', 'warn', 'ignore'.*, got 'ingore'"),
    "callback that is none": (
        lambda: ik.fixed_point(half, zeros(3), callback=7), TypeError,
        r"callback must be callable as callback\(step, z, residual_norm\), got int"),
    "option that is none": (
        lambda: ik.fixed_point(half, zeros(3), tolerance=1e-3), TypeError, r"unexpected keyword argument 'tolerance'"),
    # ----------------------------------------------------------------------------------------------------------- names
    "unknown solver": (
        lambda: ik.fixed_point(half, zeros(3), solver="andersen"), ik.UnknownNameError,
        r"unknown solver 'andersen'\. Did you mean 'anderson'\? Registered solvers: anderson, .*list solvers`"),
    "unknown rule": (
        lambda: ik.fixed_point(half, zeros(3), rule="implicite"), ik.UnknownNameError,
        r"unknown rule 'implicite'\. Did you mean 'implicit'\?.*one_step"),
    "unknown linear solver": (
        lambda: ik.fixed_point(half, zeros(3), rule=ik.Implicit(linear_solver="gmress")), ik.UnknownNameError,
        r"unknown linear solver 'gmress'\. Did you mean 'gmres'\?.*lsmr"),
    "a rule in the place of a solver": (
        lambda: ik.fixed_point(half, zeros(3), solver="phantom"), ik.UnknownNameError, r"There is a rule of that name"),
    "solver of the wrong type": (
        lambda: ik.fixed_point(half, zeros(3), solver=3), TypeError, r"solver must be a registered name.*got 3 \(an int\)"),
    "the last part of a name": (
        lambda: ik.root(half, zeros(3), solver="brentq"), ik.UnknownNameError, r"mean 'scipy\.root_scalar\.brentq'\?"),
    "another case": (
        lambda: ik.argmin(square, zeros(3), solver="scipy.minimize.bfgs"), ik.UnknownNameError,
        r"mean 'scipy\.minimize\.BFGS'\?"),
    "a solver that is not imported": (
        lambda: ik.root(half, zeros(3), solver="heavy_ball"), ik.UnknownNameError,
        r"list solvers`\. Your own parts are registered when the module that defines them is imported"),
    "the name of a linear solver for a rule": (
        lambda: ik.root(half, zeros(3), rule="gmres"), ik.UnknownNameError,
        r"linear solver of that name\.\) A rule uses it: rule=ik\.Implicit\(linear_solver='gmres'\)"),
    # ------------------------------------------------------------------------- options, of this verb or of something else
    "another library's word for an option": (
        lambda: ik.Anderson(m=3), TypeError,  # type: ignore[call-arg]
        r"Anderson has no option 'm'\. Did you mean 'memory'\? Its options: memory, damping"),
    "an option of the solve": (
        lambda: ik.Newton(tol=1e-3), TypeError,  # type: ignore[call-arg]
        r"Newton has no option 'tol': pass rtol= to the solve"),
    "the first letters of an option": (
        lambda: ik.Anderson(mem=3), TypeError, r"Did you mean 'memory'\?"),  # type: ignore[call-arg]
    "an option of a rule's": (
        lambda: ik.Implicit(solver="cg"), TypeError, r"Did you mean 'linear_solver'\?"),  # type: ignore[call-arg]
    "an option where none is": (
        lambda: Lonely(depth=3), TypeError, r"Lonely has no option 'depth'\. Its options: none\.$"),
    "an option that a class declares and is no dataclass": (
        lambda: Declared(depth=2), TypeError, r"Declared has no option 'depth'.*@dataclass\(frozen=True\) above it"),
    "an option that other problems have": (
        lambda: ik.Argmin(square, positive_definite=True), TypeError,  # type: ignore[call-arg]
        r"Argmin has no option 'positive_definite'\. Its options: .*has_aux\.$"),
    "a positional option where none is": (lambda: Lonely(3), TypeError, r"Lonely takes no arguments, got 3"),
    "an option of a set's": (
        lambda: ik.project.simplex(r=2.0), TypeError,  # type: ignore[call-arg]
        r"Simplex has no option 'r'\. Did you mean 'radius'\?"),
    "an option of a solver to the verb": (
        lambda: ik.fixed_point(half, zeros(3), memory=3), TypeError, r"It is an option of Anderson, .*solver=ik\.Anderson"),
    "an option of a rule to the verb": (
        lambda: ik.fixed_point(half, zeros(3), linear_solver="cg"), TypeError, r"rule=ik\.Implicit\(linear_solver="),
    "an option of another verb": (
        lambda: ik.root(half, zeros(3), bounds=(0, 1)), TypeError, r"It is an option of ik\.argmin and ik\.least_squares\."),
    "a truth value for steps": (
        lambda: ik.fixed_point(half, zeros(3), max_steps=True), ValueError, r"max_steps must be an integer.*got True"),
    "a truth value for the batch": (
        lambda: ik.fixed_point(half, zeros(3), batch_dims=True), ValueError, r"batch_dims must be an integer.*got True"),
    "numbers for a batch that nothing shows": (batched(), ValueError, r"nothing of the batch, and no argument has a batch"),
    "numbers for a batch that arguments disagree on": (
        batched(zeros(3), zeros(4)), ValueError, r"nothing of the batch, and args have \(3,\) and \(4,\)"),
    # ---------------------------------------------------------------------------------------- sets, terms and constraints
    "a number for a vector": (
        lambda: ik.project.simplex()(torch.tensor(1.0)), ValueError, r"Simplex projects vectors .*got shape \(\)"),
    "an empty vector": (
        lambda: ik.project.monotone()(zeros(2, 0)), ValueError, r"Monotone projects vectors .*got shape \(2, 0\)"),
    "a vector for a matrix": (
        lambda: ik.prox.nuclear()(zeros(3)), ValueError, r"nuclear takes matrices .*got shape \(3,\)"),
    "text for a direction": (
        lambda: ik.project.monotone("x"), TypeError, r"Monotone: decreasing must be True or False, got 'x'"),  # type: ignore[arg-type]
    "text for a radius": (
        lambda: ik.project.l1_ball("x"), TypeError, r"L1Ball: radius must be a number or a real tensor, got 'x'"),
    "no tensor for a normal": (
        lambda: ik.project.halfspace(2.0), TypeError, r"Halfspace: a must be a real tensor, got 2\.0"),  # type: ignore[arg-type]
    "half a pair": (
        lambda: ik.project.polyhedron(A=zeros(1, 3)), ValueError, r"Polyhedron needs A and b, or G and h"),
    "a step that is none": (lambda: ik.prox.l1()(zeros(3), -1.0), ValueError, r"l1: step must be positive, got -1\.0"),
    "a term for a set": (
        lambda: ik.argmin(square, zeros(3), project=ik.prox.l1()), ValueError, r"l1 is the proximal map of a term: pass it"),
    "a set for a term": (
        lambda: ik.argmin(square, zeros(3), prox=ik.project.simplex()), ValueError, r"a projection.*pass it as project="),
    "a constraint without the arguments": (
        lambda: ik.argmin(lambda z, a: square(z - a), zeros(3), (ONE,), constraints=ik.Equality(lambda z: z.sum())),
        TypeError, r"constraints among them, are called as f\(z, \*args\): here with z and 1 argument$"),
    "SciPy's constraints": (
        lambda: ik.argmin(square, zeros(3), constraints={"type": "eq", "fun": square}), TypeError,
        r"constraints\[0\] is a dict: wrap the function in ik\.Equality"),
    "a bare function as a constraint": (
        lambda: ik.argmin(square, zeros(3), constraints=square), TypeError, r"constraints\[0\] is a function: wrap"),
    "SciPy's bounds": (
        lambda: ik.argmin(square, zeros(2), bounds=[(0, 1), (0, 1)]), ValueError, r"list of pairs.*unbind\(1\)"),
    "a standard deviation of zero": (
        lambda: ik.curve_fit(lambda x, a: a * x, ONE.expand(3), ONE.expand(3), sigma=zeros(3)), ValueError,
        r"sigma holds standard deviations, which are positive"),
    # ------------------------------------------------------------------------------------- functions that hide z
    "an objective detaches z": (
        lambda: ik.argmin(lambda z: (z.detach() - 1).square().sum(), zeros(3)), RuntimeError, "autograd sees no z in it"),
    "residuals detach z": (
        lambda: ik.least_squares(lambda z: z.detach() - 1, zeros(3)), RuntimeError, "autograd sees no z in it"),
    "an objective within bounds detaches z": (
        lambda: ik.argmin(lambda z: (z.detach() - 1).square().sum(), zeros(3), bounds=(0.0, 1.0)), RuntimeError,
        "autograd sees no z in it"),
    "a map detaches z": (
        lambda: torch.autograd.grad(
            ik.fixed_point(lambda z, a: 0.5 * z.detach() + a, zeros(3), (LEAF,)).value.sum(), LEAF),
        ik.CapturedTensorError, "of one application of the function, not of its fixed point"),
    # ---------------------------------------------------------------------------------------------- what a solver returns
    "a solver returns complex numbers": (
        found_by(lambda z, a: a + 1e-3j),
        TypeError,
        r"solver returned complex numbers \(imaginary parts up to 0.001\) where z0 is real",
    ),
    "a solver returns NaN": (
        found_by(lambda z, a: a * float("nan")),
        ik.ConvergenceError,
        "The solver returned NaN or Inf, and the start, which is better, was kept instead",
    ),
    "a solver leaves the solution": (
        lambda: ik.implicit(ik.Root(lambda z, a: z - a))(lambda z0, a: a + 2)(zeros(1), zeros(1)), ik.ConvergenceError,
        r"The solver returned \|F\| = 2, and the start, which is better, was kept instead"),
    "SciPy's result": (found_by(lambda z0, a: type("Result", (), {"x": a})()), TypeError, r"returned a Result.*its \.x"),
    "a solution of ours": (
        found_by(lambda z0, a: ik.root(less, z0, (a,))), TypeError, r"returned a Solution: .*the point itself, its \.value"),
    "residuals left elsewhere": (
        lambda: ik.least_squares(lambda z: z.to("meta"), zeros(3)), ValueError, r"a tensor on meta, but z is on cpu"),
    "an objective left elsewhere": (
        lambda: ik.argmin(lambda z: z.sum().to("meta"), zeros(3)), ValueError, r"a tensor on meta, but z is on cpu"),
    "a count is minimised": (
        lambda: ik.argmin(lambda z: (z > 0).sum(), zeros(3)), TypeError, r"torch\.int64: return real numbers, not a compar"),
    "comparisons are fitted": (
        lambda: ik.least_squares(lambda z: z > 0, zeros(3)), TypeError, r"torch\.bool: return real numbers, not a compar"),
    "a number as a solver": (
        lambda: ik.implicit(ik.Root(less))(3), TypeError, r"ik\.implicit: solver must be callable as solver\(z0, \*args\)"),  # type: ignore[arg-type]
    "numbers left elsewhere": (found_by(lambda z0, a: z0.to("meta")), TypeError, r"returned a tensor on the meta device"),
    "text from a solver": (found_by(lambda z0, a: "x"), TypeError, r"returned a str: a solver returns tensors, arrays"),
    # ------------------------------------------------------------------------------------ what the function was called with
    "NumPy in the function": (
        lambda: ik.root(lambda z: np.cos(z), zeros(3)), RuntimeError, r"knows no derivative: use torch's .*@ik\.implicit"),  # type: ignore[call-overload]
    "math of one number": (
        lambda: ik.root(lambda z: math.cos(z), torch.zeros((), dtype=D)), TypeError,
        r"returned a float.*without a derivative: use torch\.cos"),
    "math of several": (
        lambda: ik.root(lambda z: math.cos(z), zeros(3)), ValueError, r"without a derivative: use torch\.cos\(z\)"),
    "a list for a vector": (
        lambda: ik.root(less, [1.0, 2.0], (zeros(2),)), TypeError, r"z is a list, as z0 was: for a vec.*torch\.tensor"),
    "a list for a vector, and a number times it": (
        lambda: ik.fixed_point(lambda z: 0.3 * z, [1.0, 2.0]), TypeError, r"z is a list, as z0 was: for a vec"),
    "a tuple for a vector, and more added to it": (
        lambda: ik.fixed_point(lambda z, x: z + x, (1.0, 2.0), (zeros(2),)), TypeError, r"z is a tuple, as z0 was"),
    "an array of another precision": (
        lambda: ik.root(less, zeros(3, dtype=torch.float32), (np.ones(3),)), TypeError,
        r"start from a z0 of the dtype.*given args\[0\] of torch\.float64"),
    "an argument on another device": (
        lambda: ik.root(less, zeros(3), (torch.zeros(3, dtype=D, device="meta"),)), RuntimeError,
        r"called with z0 on cpu beside args\[0\] on meta: put all of them where z0 is"),
    "a module on another device": (
        lambda: ik.fixed_point(nn.Linear(3, 3, dtype=D, device="meta"), zeros(3)), RuntimeError,
        r"called with z0 on cpu beside parameter weight of Linear on meta, parameter bias of Linear on meta: put"),
    "an argument too many": (
        lambda: ik.root(lambda z: z, zeros(3), (ONE, ONE)), TypeError,
        r"are called as f\(z, \*args\): here with z and 2 arguments"),
    "a function of the parts of z": (
        lambda: ik.fixed_point(lambda a, b: (b, a), (zeros(3), zeros(3))), TypeError,
        r"here with z \(a tuple, one argument; lambda z, \*args: f\(\*z, \*args\) unpacks it\) and no arguments"),
    "an argument too few": (lambda: ik.root(less, zeros(3)), TypeError, r"are called as f\(z, \*args\): .*z and no arg"),
    "shapes": (
        lambda: ik.root(lambda z, x: z - x, zeros(4, 3), zeros(5, 3)), RuntimeError,
        r"must match the size.*called with z \(4, 3\), args\[0\] \(5, 3\)"),
    "shapes, of a program": (
        lambda: ik.argmin(lambda z, x: (z - x).sum(), zeros(4, 3), zeros(5, 3), constraints=ik.Equality(lambda z, x: z[0])),
        RuntimeError, r"must match the size.*called with z \(4, 3\), args\[0\] \(5, 3\)$"),
    "a list of arguments, whose attribute is asked for": (
        lambda: ik.root(lambda z, p: z - p.exp(), zeros(1), [zeros(1)]), AttributeError,
        r"'exp'\. The function was called with z and one argument, a list"),
    "a step without state": (
        lambda: ik.fixed_point(half, zeros(2, 1), solver=Lonely(), batch_dims=1), TypeError,
        r"Lonely\.step must return a pair, z and the new state.*it returned a Tensor"),
    "a step that takes no state": (
        lambda: ik.fixed_point(half, zeros(2, 1), solver=Narrow(), batch_dims=1), TypeError,
        r"step\(\) takes 3 positional.*A method defines step\(f, z, state\), which returns z and the new state"),
    "shapes, in a step": (
        lambda: ik.fixed_point(half, zeros(2, 3), solver=Steps(lambda f, z: z @ zeros(2, 2)), batch_dims=1), RuntimeError,
        r"cannot be multiplied.*It was raised by lines of the solver's own, .*test_bad_input\.py:\d+, in <lambda>$"),
    "a precision, in a step": (
        lambda: ik.fixed_point(half, zeros(2, 3), solver=Steps(lambda f, z: z @ torch.zeros(3, 3)), batch_dims=1),
        RuntimeError, r"same dtype.*It was raised by lines of the solver's own, .*, in <lambda>$"),
    "shapes of the function's, in a step": (
        lambda: ik.fixed_point(
            lambda z: z @ zeros(2, 2) if bool(z.all()) else z + 0.1, zeros(2, 3),
            solver=Steps(lambda f, z: f(z + 1)), batch_dims=1,
        ), RuntimeError, r"cannot be multiplied.*The function was called with z \(2, 3\)$"),
    "a name that f has not, in a black box": (
        lambda: ik.root(half, zeros(2), solver=ik.extend.BlackBox(lambda f, z, **_: f.grad(z), "box", "root", "loop")),
        AttributeError, r"no attribute 'grad'\. It was raised by lines of the solver's own, .*, in <lambda>$"),
    "no point of a program": (
        lambda: ik.solve(ik.QuadraticProgram(torch.eye(2, dtype=D), zeros(2)), solver=FindsNothing()), TypeError,
        r"FindsNothing\.find must return ik\.extend\.QPPoint\(z, y, lam, status, steps\).* \(1, 2\), .*a NoneType$"),
    "a module as unknowns": (
        lambda: ik.argmin(square, nn.Linear(2, 1)), TypeError,
        r"z0 is a Linear, not a tensor: .*z0=dict\(module\.named_parameters\(\)\).*functional_call"),
    "parameters() as unknowns": (
        lambda: ik.argmin(square, nn.Linear(2, 1).parameters()), TypeError, r"a generator, not a tensor: write z0=tuple\("),
    "a problem where its function belongs": (
        lambda: ik.root(ik.Root(square), zeros(2)), TypeError, r"got Root; solve a problem with ik\.solve"),
    "a class misspelt": (lambda: ik.Andreson(), AttributeError, r"'Andreson'\. Did you mean ik\.Anderson\?"),
    "a class in small letters": (lambda: ik.quadraticprogram(), AttributeError, r"mean ik\.QuadraticProgram\?"),
    "nothing like it": (lambda: ik.xyzzy(), AttributeError, r"no attribute 'xyzzy'$"),
    "another library's verb": (lambda: ik.minimize(square, zeros(3)), AttributeError, r"mean ik\.argmin\?"),
    # ------------------------------------------------------------------------------------ one thing in another's place
    "a class where a problem is due": (
        lambda: ik.solve(ik.Root, zeros(2)), TypeError, r"got the class Root: create an instance first$"),
    "a class where a layer's problem is due": (
        lambda: ik.implicit(ik.Root), TypeError, r"got the class Root: create an instance first$"),
    "the class of a module": (
        lambda: ik.fixed_point(nn.Tanh, zeros(2)), TypeError, r"got the class Tanh: create an instance"),
    "a solver for a rule": (
        lambda: ik.fixed_point(half, zeros(2), rule=ik.Anderson()), TypeError, r"rule must be .*Implicit.*an Anderson"),
    "a linear solver for a rule": (
        lambda: ik.fixed_point(half, zeros(2), rule=ik.linear.GMRES()), TypeError, r"rule must be .*linear_solver='gmres'"),
    "a name for a prox": (lambda: ik.argmin(square, zeros(2), prox="l1"), TypeError, r"prox\(z, step\), such as ik\.prox"),
    "a word for trace": (lambda: ik.fixed_point(half, zeros(2), trace="yes"), TypeError, r"trace must be True or False"),
    "True in in_dims": (
        lambda: ik.root(less, zeros(2), (zeros(2),), batch_dims=1, in_dims=(True,)), TypeError, r"in_dims holds one dim"),
    "a comparison for a residual": (lambda: ik.root(lambda z: z > 0, zeros(2)), TypeError, r"not a comparison or a count"),
    "a negative f_scale": (
        lambda: ik.least_squares(half, zeros(2), f_scale=-ONE), ValueError, r"f_scale must be positive, got a tensor"),
    "data before the model": (
        lambda: ik.curve_fit(ONE, lambda x, a: a * x, ONE), TypeError, r"the model first, .*its first argument is a Tensor"),
    "more parameters than the model has": (
        lambda: ik.curve_fit(lambda x, a: a * x, zeros(4), zeros(4), zeros(3)), TypeError,
        r"called as f\(xdata, p0, p1, p2\)[^.]*$"),
    # -------------------------------------------------------------------------------- what is said of the Jacobian
    "text for a flag": (
        lambda: ik.root(half, zeros(3), symmetric="yes"), TypeError, r"Root: symmetric must be True or False, got 'yes'"),
    "a number for a flag": (
        lambda: ik.argmin(square, zeros(3), has_aux=1), TypeError, r"Argmin: has_aux must be True or False, got 1"),
    "a word for a pattern": (
        lambda: ik.least_squares(half, zeros(3), jac_sparsity="banded"), ValueError,
        r"jac_sparsity must be 'auto', None, a sparse matrix or bandwidths \(lower, upper\), got 'banded'"),
    "an option of torch's optimiser": (
        lambda: ik.TorchOptim(torch.optim.Adam, lr="a"), TypeError, r"optim\.Adam does not take these options, \{'lr'"),
    # ------------------------------------------------------------------------------------------------------ capabilities
    "picard for an equation": (
        lambda: ik.root(half, zeros(3), solver="picard"), ik.CapabilityError,
        r"'picard' \(solves='fixed_point'\) serves problems of kind fixed_point; Root is of kind 'root'.*fit: .*newton"),
    "anderson for a minimum": (
        lambda: ik.argmin(square, zeros(3), solver="anderson"), ik.CapabilityError,
        r"Argmin is of kind 'argmin'\. Solvers that fit: .*lbfgs"),
    "one_step for an equation": (
        lambda: ik.root(half, zeros(3), rule="one_step"), ik.CapabilityError,
        r"rule 'one_step' is made for problems of kind fixed_point, and Root is of kind root: use rule='implicit'"),
    "cg for a fixed point": (
        lambda: ik.fixed_point(half, zeros(3), rule=ik.Implicit(linear_solver="cg")), ik.CapabilityError,
        r"'cg' needs a symmetric system.*FixedPoint is not known to be one: say symmetric=True if it is, or use 'gmres'"),
    "neumann series for an equation": (
        lambda: ik.root(half, zeros(3), rule=ik.Implicit(linear_solver="neumann")), ik.CapabilityError,
        r"'neumann' needs a fixed point system"),
    "unrolled line search": (
        lambda: ik.root(half, zeros(3), solver="newton", rule="unroll"), ik.CapabilityError,
        r"rule 'unroll' differentiates the steps of the solver, and 'newton' does not offer that: use solver=\"picard\""),
    # -------------------------------------------------------------------------- sets, terms, programs and other parts
    "scores that are whole numbers": (
        lambda: ik.relax.soft_sort(torch.ones(2, dtype=torch.int64)), TypeError,
        r"soft_sort takes a real floating-point tensor, got torch\.int64"),
    "a choice among whole numbers": (
        lambda: ik.relax.Perturbed(half)(torch.ones(2, dtype=torch.int64)), TypeError,
        r"Perturbed takes a real floating-point tensor, got torch\.int64"),
    "events of more dimensions than there are": (
        lambda: ik.relax.Perturbed(half, dims=3)(zeros(2)), ValueError, r"an event has 3 dimension\(s\), the tensor 1"),
    "a loss without regulariser": (
        lambda: ik.relax.FenchelYoung(half), TypeError, r"a function needs its regulariser="),
    "a projection of whole numbers": (
        lambda: ik.project.simplex()(torch.ones(2, dtype=torch.int64)), TypeError,
        r"Simplex projects real floating-point tensors, got torch\.int64"),
    "a projection of a number": (
        lambda: ik.project.simplex()(torch.tensor(1.0)), ValueError, r"Simplex projects vectors .*got shape \(\)"),
    "an empty section of a box": (
        lambda: ik.project.box_section(0.0, 1.0, total=9.0)(zeros(2)), ValueError,
        r"1 of 1 sets are empty: w'x lies between 0 and 2 on the box, total is 9"),
    "doubly stochastic, and not square": (
        lambda: ik.project.birkhoff()(zeros(2, 3)), ValueError, r"Birkhoff projects square matrices, got shape \(2, 3\)"),
    "sums of other matrices": (
        lambda: ik.project.transport(zeros(2), zeros(2))(zeros(2, 3)), ValueError,
        r"2 x 3 need 2 row sums and 3 column sums; got 2, 2"),
    "bounds on complex unknowns": (
        lambda: ik.argmin(square, zeros(2, dtype=torch.complex128), bounds=(0, 1)), ValueError,
        r"bounds need real unknowns; z0 has complex leaves"),
    "a program without q": (
        lambda: ik.QuadraticProgram(None, None), TypeError, r"needs q; for a feasibility problem pass zeros"),
    "A without b": (
        lambda: ik.QuadraticProgram(LOW, LOW[0], A=LOW), ValueError, r"A and b come in pairs: give both, or neither"),
    "plain A without b": (
        lambda: ik.solve_qp(LOW, LOW[0], A=LOW), ValueError, r"A and b, and G and h, come in pairs"),
    "plain A of other unknowns": (
        lambda: ik.solve_qp(LOW, LOW[0], A=LOW[:1, :2], b=LOW[0, :1]), ValueError,
        r"A has shape \(1, 2\), but the other parts ask for \(1, 3\)"),
    "constraints for a method of bounds": (
        lambda: ik.argmin(square, zeros(2), constraints=[ik.Inequality(less_one)], solver="scipy.lbfgsb"),
        ik.CapabilityError, r"scipy\.lbfgsb takes bounds, but no constraints=: use 'scipy\.slsqp' or 'auto'"),
    "constraints for proximal gradients": (
        lambda: ik.argmin(square, zeros(2), constraints=[ik.Equality(less_one)], solver="proximal_gradient"),
        ik.CapabilityError, r"proximal_gradient takes a set .* but no constraints="),
    "constraints for blocks of coordinates": (
        lambda: ik.argmin(square, zeros(2), constraints=[ik.Equality(less_one)], solver="block_coordinate_descent"),
        ik.CapabilityError, r"block_coordinate_descent takes bounds, .* and no constraints="),
    "a bracket of one number": (
        lambda: ik.root(half, zeros(1), bracket=3), ValueError, r"bracket must be a pair \(low, high\), got 3"),
    "an event and three times": (
        lambda: ik.InitialValue(half, torch.linspace(0, 1, 3, dtype=D), event=less), ValueError,
        r"with an event t is \(begin, latest end\), got 3 times"),
    "a matrix too large for lu": (
        lambda: ik.root(less, zeros(2), (LEAF.expand(2),), rule=ik.Implicit(linear_solver=ik.linear.LU(max_size=1)))
        .value.sum().backward(),
        ValueError, r"forms a 2 x 2 matrix per sample, above max_size=1"),
    "the trace of no vector": (
        lambda: ik.linear.trace(torch.neg, zeros(2, 2)), ValueError, r"like must be a real vector \(n,\), got.*\(2, 2\)"),
    "a composition that reads too much": (
        lambda: ik.compose({"j": (ik.compose({"i": (less, "a")}, output="i"), "x", "y", "k")}, output="j"), TypeError,
        r"'j' is a composition with .* inputs .*, but it reads 3 \(x, y, k\)"),
    "a number for a kind of problem": (
        lambda: ik.register_problem(3), TypeError, r"register_problem takes a Problem subclass, not 3"),  # type: ignore[arg-type]
    "another class for a kind of problem": (
        lambda: ik.register_problem(int), TypeError, r"int is not a Problem subclass: its kind is None"),
    "a flow of no direction": (
        lambda: ik.extend.Kind("sideways", served_by=("root",), flow=3), ValueError, r"flow must be 1, -1 or 0 .*got 3"),
    "a kind without a name": (
        lambda: ik.extend.Kind("", served_by=("root",)), ValueError, r"a Kind needs a name"),
    "patience with what takes no steps": (
        lambda: ik.extend.Impatient("scipy.hybr"), TypeError, r"only an iterative method can be impatient, got str"),
    "one check where a list is due": (
        lambda: ik.testing.check_solver("picard", checks="a"), TypeError, r"checks must be a list of names of checks"),
    "one solver where a list is due": (
        lambda: ik.testing.parametrize_with_checks("picard"), TypeError, r"solvers must be a list of solvers"),
    # ------------------------------------------------------------------------------------------------ impure functions
    "z changed in place": (
        lambda: ik.fixed_point(write_z, zeros(3), (zeros(3),)), RuntimeError,
        r"changes its state z in place.*out-of-place operations, or clone"),
    "a leaf of z changed in place": (
        lambda: ik.fixed_point(write_second_leaf, {"a": zeros(2), "b": zeros(2)}, (zeros(2),)), RuntimeError,
        r"changes its state z in place"),
    "an argument changed in place": (
        lambda: ik.fixed_point(write_args, zeros(3), (zeros(3), {"k": zeros(1)})), RuntimeError,
        r"changes argument tensor number 1 in place"),
    "a callback that raises": (
        lambda: ik.fixed_point(half, zeros(3), callback=shout), KeyError, r"the callback's own error at step 1"),
    "a map that raises": (
        lambda: ik.fixed_point(lambda z: z @ torch.ones(4, 4, dtype=D), zeros(3)), RuntimeError, r"size|shape"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:__array_wrap__")  # by NumPy, of a tensor
@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str) -> None:
    call, error, message = REFUSED[row]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize(
    ("base", "method"),
    [
        (ik.Problem, "residual"),
        (ik.Rule, "attach"),
        (ik.Solver, "run"),
        (ik.Method, "step"),
        (ik.LinearSolver, "solve"),
        (ik.extend.QPSolver, "find"),
        (ik.prox.Prox, "apply"),
        (ik.project.Projection, "project"),
        *((ik.manifold.Manifold, name) for name in ("zero", "retract", "local", "project")),
    ],
)
def test_what_a_part_must_define_is_said_when_it_does_not(base: Any, method: str) -> None:
    part = type("Part", (base,), {})()
    count = len(inspect.signature(getattr(base, method)).parameters) - 1
    named = {"rtol": 0.0, "atol": 0.0, "max_steps": None} if method == "solve" else {}
    with pytest.raises(NotImplementedError, match=f"Part .*{method}"):
        getattr(part, method)(*(zeros(1) for _ in range(count - len(named))), **named)


@pytest.mark.parametrize("row", ["another shape", "another dtype", "unknown solver", "negative steps", "integer z0"])
def test_refused_inside_transforms_too(row: str) -> None:
    call, error, message = REFUSED[row]
    with pytest.raises(error, match=f"(?s){message}"):
        torch.func.grad(lambda t: call().value.sum() * t)(torch.tensor(1.0, dtype=D))


@pytest.mark.parametrize("row", ["z changed in place", "an argument changed in place"])
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_writing_in_place_inside_a_transform_is_refused(transform: str, row: str) -> None:
    def run(x: Tensor) -> Tensor:
        if row.startswith("z"):
            return ik.fixed_point(write_z, torch.zeros_like(x), (x,)).value.sum()
        return ik.fixed_point(write_args, torch.zeros_like(x), (x, {"k": x})).value.sum()

    x = torch.ones(3, dtype=D)
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(run)(x),
        "jvp": lambda: torch.func.jvp(run, (x,), (x,)),
        "vmap": lambda: torch.func.vmap(run)(torch.stack([x, x])),
    }
    with pytest.raises(
        RuntimeError, match=r"in place; an implicit equation|in-place operation"
    ):  # ours, or torch's own
        calls[transform]()
    assert torch.equal(x, torch.ones(3, dtype=D))


@pytest.mark.parametrize("solver", ["picard", "anderson", "newton", "scipy.newton_krylov"])
def test_callback_error_surfaces_and_leaves_nothing_behind(solver: str) -> None:
    if solver != "scipy.newton_krylov":  # a black box has no steps that we see
        with pytest.raises(KeyError, match="own error at step 1"):
            ik.fixed_point(half, zeros(3), solver=solver, callback=shout)
    z = ik.fixed_point(half, zeros(3), solver=solver).value
    torch.testing.assert_close(z, torch.full((3,), 2.0, dtype=D), rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------ allowed, and how
@pytest.mark.parametrize("rule", ["implicit", "one_step", "phantom", "neumann"])
@pytest.mark.parametrize("solver", ["picard", "anderson", "newton", "newton_krylov"])
def test_z0_that_requires_grad_has_derivative_zero(solver: str, rule: str) -> None:
    z0, x = zeros(3).requires_grad_(), torch.ones(3, dtype=D).requires_grad_()
    z = ik.fixed_point(lambda z, x: 0.5 * z + x, z0, (x,), solver=solver, rule=rule).value
    g0, gx = torch.autograd.grad(z.sum(), (z0, x))
    assert torch.equal(g0, zeros(3))
    assert bool((gx > 0.9).all())


def test_only_z0_requires_grad() -> None:
    z0 = zeros(3).requires_grad_()
    z = ik.fixed_point(half, z0).value
    (g,) = torch.autograd.grad(z.sum(), z0)
    assert torch.equal(g, zeros(3))
    assert torch.equal(torch.func.grad(lambda z0: ik.fixed_point(half, z0).value.sum())(zeros(3)), zeros(3))


# ----------------------------------------------------------------------- what a failed solve says: the cure of its cause
NAN_ROW = torch.tensor([[1.0, 2.0], [3.0, torch.nan]], dtype=D)
NINE = torch.tensor([4.0, 9.0], dtype=D)
NARROW = (torch.zeros(2), torch.full((2,), 2.5, dtype=D))
ADVICE: dict[str, tuple[Callable[[], Any], str, str]] = {  # what is said, and what is not
    "the tolerance": (
        lambda: ik.fixed_point(lambda z: 2 * z + 1, torch.zeros(4, dtype=D), solver="picard", max_steps=3, rtol=0, atol=0.5),
        r"\|F\| = 2 > tolerance 0\.5 after step 3.*Raise max_steps=", "no solution near|domain"),
    "the tolerance of the later solver": (
        lambda: ik.root(lambda z: z * z + 1, torch.ones(2, 1, dtype=D), rtol=0, atol=0.25, batch_dims=1),
        r"sample 1 \(stalled\): \|F\| = 1 > tolerance 0\.25", "max_steps="),
    "dropped neighbours": (
        lambda: ik.root(
            lambda z, c: z * z + c, torch.ones(5, 1, dtype=D), torch.tensor([-1.0, -1, -1, -1, 1], dtype=D).reshape(5, 1),
            batch_dims=1, in_dims=(0,), solver="newton", rtol=0, atol=0.25),
        r"1 of 5 .*sample 4 \(stalled\): \|F\| = 1 > tolerance 0\.25", "max_steps="),
    "a black box": (
        lambda: ik.root(lambda z: z * z + 1, torch.ones(2, dtype=D), solver="scipy.root.hybr", rtol=0, atol=0.25),
        r"> tolerance 0\.25", "domain"),
    "no root": (
        lambda: ik.root(lambda z: z * z + 1, torch.ones(2, dtype=D), solver="newton"),
        r"Perhaps there is no solution near: \|F\| may have a minimum there", "max_steps="),
    "a function that ignores its unknown": (
        lambda: ik.root(lambda z, a: a, zeros(3), torch.ones(3, dtype=D)),
        r"does not depend on its unknown z there", "max_steps=|no solution near"),
    "the same, in each of several samples": (
        lambda: torch.vmap(lambda a: ik.root(lambda z, a: a, zeros(3), a).value)(torch.ones(2, 3, dtype=D)),
        r"does not depend on its unknown z there", "max_steps=|no solution near"),
    "a function that ignores one of its unknowns": (
        lambda: ik.root(lambda z: {"a": z["a"] - 1, "b": z["a"] + 1 + 0 * z["b"]}, {"a": zeros(2), "b": zeros(2)}),
        r"does not depend on z\['b'\] there", "max_steps=|no solution near"),
    "an equation without an unknown": (
        lambda: ik.root(lambda z, a: torch.stack([z.sum() - a, a]), zeros(2), torch.ones((), dtype=D)),
        r"Nothing moves F\[1\] there", "max_steps=|no solution near|does not depend"),
    "a minimum of what should vanish": (
        lambda: ik.root(lambda z: z * z + 1, zeros(2) - 1), r"no solution near", "depend|moves"),
    "NaN in the data": (
        lambda: ik.root(lambda z, x: z - x, zeros(2, 2), NAN_ROW, batch_dims=1),
        r"args\[0\] \(first at \[1, 1\]\)\. Clean the data", "max_steps=|certify|no solution near"),
    "NaN in the data, told later": (
        lambda: ik.root(lambda z, x: z - x, zeros(2, 2), NAN_ROW, batch_dims=1, on_failure="ignore").raise_for_status(),
        r"not finite where the search begins: look for NaN or Inf", "left the domain|max_steps="),
    "NaN in the data of one sample, and another leaves the domain, told later": (
        lambda: ik.fixed_point(
            lambda z, x: z.sqrt() - x, torch.full((2, 1), 4.0, dtype=D), torch.tensor([[torch.nan], [1.0]], dtype=D),
            batch_dims=1, solver="picard", on_failure="ignore").raise_for_status(),
        r"where the search begins.*left the domain", "max_steps="),
    "outside the domain": (
        lambda: ik.root(lambda z: torch.log(z), zeros(2) - 1), r"start inside its domain", "max_steps=|certify"),
    "left the domain": (
        lambda: ik.fixed_point(lambda z: z.sqrt() - 1, torch.full((2,), 4.0, dtype=D), solver="picard"),
        r"left the domain of the function.*exp\(y\)", "max_steps="),
    "no change of sign": (
        lambda: ik.root(lambda z: z * z - 9, bracket=(-2.0, 0.0)),
        r"chandrupatla: .*residual does not change its sign between the ends, -2 and 0\..*no solution near", "max_steps="),
    "no change of sign, by bisection, in one sample": (
        lambda: ik.root(lambda z, c: z * z - c, None, NINE, bracket=NARROW, batch_dims=1, solver="bisection"),
        r"1 of 2 .*does not change its sign between the ends of sample\(s\) 1, 0 and 2\.5\.", "max_steps="),
    "no change of sign in the search": (
        lambda: ik.root(lambda z: z * z + 1, torch.ones((), dtype=D), solver="bisection"),
        r"no change of sign was found around 1: pass bracket=\(low, high\)", "max_steps="),
    "a bracket that ends outside the domain": (
        lambda: ik.root(lambda z: z.log() - 1, bracket=(-1.0, 5.0)),
        r"residual is not finite at one of the ends, -1 and 5", "max_steps=|its sign"),
    "constraints that exclude each other": (
        lambda: ik.argmin(
            lambda z: z.square().sum(), zeros(2),
            constraints=[ik.Inequality(lambda z: z - 1), ik.Inequality(lambda z: 2 - z)]),
        r"perhaps no z meets all of them\. Look at them alone", "Raise max_steps="),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", ADVICE)
def test_a_failed_solve_says_what_its_cause_asks_for(row: str) -> None:
    call, said, unsaid = ADVICE[row]
    with pytest.raises(ik.ConvergenceError, match=f"(?s){said}") as caught:
        call()
    assert not re.search(unsaid, str(caught.value)), caught.value


# -------------------------------------------------------------------------------------------------------- NaN and Inf
NONFINITE: dict[str, Row] = {
    "NaN in z0": (
        lambda: ik.fixed_point(half, torch.full((3,), torch.nan, dtype=D)), ik.ConvergenceError,
        r"1 x nonfinite.*after step 0.*NaN or Inf in: z0 \(first at \[0\]\)\."),
    "Inf in a leaf of z0": (
        lambda: ik.root(lambda z: z, {"a": zeros(2), "b": torch.full((2,), torch.inf, dtype=D)}), ik.ConvergenceError,
        r"NaN or Inf in: z0\['b'\]"),
    "NaN in args": (
        lambda: ik.fixed_point(lambda z, x, d: 0.5 * z + d["k"], zeros(2), (zeros(2), {"k": zeros(2) / 0})),
        ik.ConvergenceError, r"NaN or Inf in: args\[1\]\['k'\]"),
    "NaN in args of one sample": (
        lambda: ik.root(
            lambda z, x: z - x, zeros(4, 1), (torch.tensor([[1.0], [2.0], [torch.nan], [3.0]], dtype=D),), batch_dims=1),
        ik.ConvergenceError, r"1 of 4 samples.*sample 2 \(nonfinite\).*after step 0.*NaN or Inf in: args\[0\]"),
    "NaN that the function makes at z0": (
        lambda: ik.root(lambda z: torch.log(z - 1), zeros(2)), ik.ConvergenceError, r"not finite at z0"),
    "complex NaN in z0": (
        lambda: ik.root(lambda z: z, torch.full((2,), complex(torch.nan, 0), dtype=torch.complex128)),
        ik.ConvergenceError, r"NaN or Inf in: z0"),
    "NaN midway": (  # 4 -> 1 -> 0 -> -1, whose root is NaN
        lambda: ik.fixed_point(lambda z: z.sqrt() - 1, torch.full((2,), 4.0, dtype=D), solver="picard"),
        ik.ConvergenceError, r"1 x nonfinite \(the residual became NaN or Inf\).*after step 3"),
    "NaN midway in one sample": (
        lambda: ik.fixed_point(
            lambda z, c: z.sqrt() - c, torch.full((3, 1), 4.0, dtype=D), (torch.tensor([[0.0], [1.0], [0.2]], dtype=D),),
            solver="picard", batch_dims=1),
        ik.ConvergenceError, r"1 of 3 samples.*Worst: sample 1 \(nonfinite\): \|F\| = \S+ > tolerance \S+ after step 3"),
    "NaN midway in one sample, dropped neighbours": (
        lambda: ik.fixed_point(
            lambda z, c: z.sqrt() - c, torch.tensor([[1.0], [4.0], [1.0]], dtype=D),
            (torch.tensor([[0.0], [1.0], [0.0]], dtype=D),), solver="picard", batch_dims=1, in_dims=(0,)),
        ik.ConvergenceError, r"1 of 3 samples.*Worst: sample 1 \(nonfinite\): \|F\| = \S+ > tolerance \S+ after step 3"),
}  # fmt: skip


@pytest.mark.parametrize("row", NONFINITE)
def test_nonfinite_says_where(row: str) -> None:
    call, error, message = NONFINITE[row]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def _contraction(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(z.flip(1)) + x


def _energy(z: Tensor, x: Tensor) -> Tensor:
    return (0.5 * z**2 + 0.1 * z**4 - x * z).sum(1) + 0.1 * (z[:, 0] - z[:, 1]) ** 2


CONTAINED = [
    (ik.FixedPoint(_contraction), "anderson"),
    (ik.FixedPoint(_contraction), "picard"),
    (ik.FixedPoint(_contraction), "newton"),
    (ik.FixedPoint(_contraction), "newton_krylov"),
    (ik.FixedPoint(_contraction), "auto"),
    (ik.Argmin(_energy), "lbfgs"),
    (ik.Argmin(_energy), "gradient_descent"),
    (ik.Argmin(_energy), "newton"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("linear_solver", ["lu", "gmres"])
@pytest.mark.parametrize(("problem", "solver"), CONTAINED, ids=str)
def test_bad_sample_is_contained(problem: ik.Problem, solver: str, linear_solver: str, bad: float) -> None:
    """Values and gradients of the other samples are those of a solve without the bad one."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, 3, generator=g, dtype=D)
    bad_x = x.clone()
    bad_x[2, 1] = bad
    good = torch.tensor([0, 1, 3, 4])
    options: dict[str, Any] = {"solver": solver, "batch_dims": 1, "rtol": 1e-12, "atol": 1e-12}
    rule = ik.Implicit(linear_solver=linear_solver, rtol=1e-12)

    def run(x: Tensor, in_dims: Any = None) -> tuple[ik.Solution, Tensor]:
        x = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ik.ConvergenceWarning)
            solution = ik.solve(
                problem, torch.zeros_like(x), (x,), rule=rule, on_failure="warn", in_dims=in_dims, **options
            )
            weights = torch.linspace(0.5, 1.5, 3, dtype=D)
            (gradient,) = torch.autograd.grad((solution.value * weights).sum(), x)
        return solution, gradient

    alone, alone_gradient = run(x[good])
    assert bool(alone.converged.all())
    for in_dims in (None, (0,)):
        solution, gradient = run(bad_x, in_dims)
        assert solution.converged.tolist() == [True, True, False, True, True]
        assert ik.Status(int(solution.status[2])) is ik.Status.NONFINITE
        torch.testing.assert_close(solution.value[good], alone.value, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(gradient[good], alone_gradient, rtol=1e-9, atol=1e-10)
        backward = solution.backward
        assert backward is not None
        assert bool(backward.converged[good].all())


# ------------------------------------------------------------------------------------------------- failure policies
def test_raise_carries_the_solution() -> None:
    shift = torch.tensor([[-4.0], [1.0], [-9.0]], dtype=D)
    with pytest.raises(ik.ConvergenceError, match=r"newton: 1 of 3 samples did not converge.*sample 1") as caught:
        ik.root(no_root, torch.ones(3, 1, dtype=D), (shift,), solver="newton", batch_dims=1)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.samples == (1,)
    assert error.solution is not None
    assert error.solution.converged.tolist() == [True, False, True]
    torch.testing.assert_close(error.solution.value[[0, 2]], torch.tensor([[2.0], [3.0]], dtype=D))
    assert error.residual_norms[0] == pytest.approx(float(error.solution.residual_norm[1]))
    assert error.residual_norms[0] >= 1.0
    for way_out in ("z0=", "rtol=", "solver=", 'on_failure="warn"'):
        assert way_out in str(error)


def test_warn_and_ignore_return_the_solution() -> None:
    with pytest.warns(ik.ConvergenceWarning, match="did not converge: 1 x max_steps"):
        warned = ik.fixed_point(half, zeros(3), solver="picard", max_steps=3, on_failure="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ignored = ik.fixed_point(half, zeros(3), solver="picard", max_steps=3, on_failure="ignore")
    for solution in (warned, ignored):
        assert not bool(solution.converged)
        assert ik.Status(int(solution.status)) is ik.Status.MAX_STEPS
        torch.testing.assert_close(solution.value, torch.full((3,), 1.75, dtype=D))
        with pytest.raises(ik.ConvergenceError, match="max_steps"):
            solution.raise_for_status()


@pytest.mark.parametrize("transform", ["plain", "grad", "vmap"])
def test_policy_holds_inside_transforms(transform: str) -> None:
    def run(x: Tensor) -> Tensor:
        return ik.root(no_root, torch.ones_like(x), (x,), solver="newton").value.sum()

    x = torch.tensor([1.0], dtype=D)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: run(x),
        "grad": lambda: torch.func.grad(run)(x),
        "vmap": lambda: torch.func.vmap(run)(torch.tensor([[-4.0], [1.0]], dtype=D)),
    }
    with pytest.raises(ik.ConvergenceError, match=r"newton.*did not converge"):
        calls[transform]()


# ------------------------------------------------------------------------------------------------ singular backward
def _singular(z: Tensor, x: Tensor) -> Tensor:
    """Two equal equations: the Jacobian [[1, 1], [1, 1]] has rank one everywhere."""
    s = z.sum() - x.sum()
    return torch.stack([s, s])


def _singular_solution(linear_solver: str, on_failure: str = "raise") -> tuple[ik.Solution, Tensor]:
    x = torch.tensor([1.0, 2.0], dtype=D, requires_grad=True)
    rule = ik.Implicit(linear_solver=linear_solver)
    return ik.root(_singular, zeros(2), (x,), solver="newton", rule=rule, on_failure=on_failure), x


def test_singular_backward_lsmr_gives_the_minimum_norm_answer() -> None:
    solution, x = _singular_solution("lsmr")
    # J^T u = g = (1, 1): minimum norm u = (1/2, 1/2), and dF/dx = -1 everywhere: x.grad = u_1 + u_2 = 1 each
    (g,) = torch.autograd.grad(solution.value.sum(), x)
    torch.testing.assert_close(g, torch.ones(2, dtype=D))
    assert solution.backward is not None
    assert bool(solution.backward.converged)


@pytest.mark.parametrize("linear_solver", ["lu", "gmres", "bicgstab"])
def test_singular_backward_is_reported_with_the_way_out(linear_solver: str) -> None:
    solution, x = _singular_solution(linear_solver)
    with pytest.raises(ik.ConvergenceError, match=r"(?s)linear solve of the backward \(reverse mode\).*") as caught:
        solution.value[0].backward()  # g = (1, 0) lies outside the range of J^T
    assert linear_solver in str(caught.value)
    assert 'linear_solver="lsmr"' in str(caught.value)
    solution, x = _singular_solution(linear_solver, "warn")
    with pytest.warns(ik.ConvergenceWarning, match="linear solve of the backward"):
        solution.value[0].backward()
    assert x.grad is not None


@pytest.mark.parametrize("linear_solver", ["auto", "lu", "gmres"])
def test_a_singular_solution_is_reported_beside_a_failure(linear_solver: str) -> None:
    """Of a batch with a sample that has no solution, the singular one that has converged is not taken for lost as well."""
    t = torch.tensor([4.0, 0.0, -1.0], dtype=D, requires_grad=True)
    rule = ik.Implicit(linear_solver=linear_solver)
    start = torch.tensor([1.0, 0.0, 1.0], dtype=D)
    with pytest.warns(ik.ConvergenceWarning, match="1 of 3 samples did not converge"):
        solution = ik.root(
            lambda z, t: z**2 - t, start, (t,), solver="newton", rule=rule, batch_dims=1, on_failure="warn"
        )
    with pytest.warns(ik.ConvergenceWarning, match=r"(?s)linear solve of the backward.*1 of 3 samples"):
        (g,) = torch.autograd.grad(solution.value.sum(), t)
    assert g[0].item() == pytest.approx(0.25) and g[2].item() == 0


AIMS = torch.tensor([0.3, 0.7, 1.0], dtype=D)
JUMPS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], Tensor, bool]] = {
    "number times matrix": (
        ik.root,
        lambda z: torch.linalg.eigvals(POINTS[:3] + z * torch.eye(3)).real.max() - AIMS[1],
        torch.zeros((), dtype=D),
        True,
    ),
    "single precision": (ik.root, lambda z: (z.float() ** 3 + z).double() - AIMS, zeros(3), True),
    "in a map": (ik.fixed_point, lambda z: 0.5 * z.float().cos().double() + AIMS, zeros(3), True),
    "in residuals": (
        ik.least_squares,
        lambda z: torch.cat([(z.float() ** 2).double() - AIMS, 0.3 * z]),
        zeros(3) + 1,
        True,
    ),
    "no root": (ik.root, lambda z: z**2 + AIMS, zeros(3) + 1, False),
    "a jump": (ik.root, lambda z: torch.sign(z - 1.3) + 0.1 * z, zeros(3), False),
    "many kinks": (ik.argmin, lambda z: _signed(POINTS @ z - POINTS[:, 0].cos()).sum(), zeros(3) + 1, False),
}
POINTS = torch.randn(20, 3, dtype=D, generator=torch.Generator().manual_seed(0))


def _signed(u: torch.Tensor) -> torch.Tensor:
    """``|u|``, by an operation in which nobody sees a kink."""
    return u * torch.sign(u)


@pytest.mark.filterwarnings("ignore::implicitkit.ImpureFunctionWarning")
@pytest.mark.parametrize("name", JUMPS)
def test_a_function_of_fewer_digits_than_its_unknown_is_told_from_one_without_a_solution(name: str) -> None:
    verb, function, z0, jumps = JUMPS[name]
    with pytest.raises(ik.ConvergenceError) as caught:
        verb(function, z0)
    assert ("computed in single precision" in str(caught.value)) == jumps


@pytest.mark.parametrize("solver", ["auto", "newton", "lbfgs"])
def test_an_objective_that_is_no_number_has_no_minimum(solver: str) -> None:
    """Where its gradient is zero, too, as torch's of ``|z - nan|`` is."""
    nan = torch.full((2,), float("nan"), dtype=D)
    found = ik.argmin(lambda z, a: (z - a).abs().sum(), zeros(2), (nan,), solver=solver, on_failure="ignore")
    assert found.status.item() == int(ik.Status.NONFINITE), found


@pytest.mark.parametrize("linear_solver", ["lu", "gmres"])
def test_of_many_derivatives_the_samples_are_counted_and_named(linear_solver: str) -> None:
    t, rule = torch.tensor([1.0, 2.0, 0.0], dtype=D), ik.Implicit(linear_solver=linear_solver)
    start = torch.full((3,), 2.0, dtype=D)  # a solution of the last equation
    solve = lambda t: ik.root(lambda z, t: t * (z - 1), start, (t,), batch_dims=1, rule=rule).value  # noqa: E731
    for derivative in (torch.func.jacrev(solve), torch.func.jacfwd(solve)):
        with pytest.raises(ik.ConvergenceError, match=r"1 of 3 samples; worst: sample 2: ") as caught:
            derivative(t)
        assert caught.value.samples == (2,)


@pytest.mark.parametrize("linear_solver", ["lu", "gmres", "bicgstab"])
def test_failed_linear_solve_under_nan_is_nan(linear_solver: str) -> None:
    solution, x = _singular_solution(linear_solver, "nan")
    (g,) = torch.autograd.grad(solution.value[0], x)
    assert bool(torch.isnan(g).all())


def test_second_derivative_under_nan_ignores_samples_without_solution() -> None:
    t = torch.tensor(2.0, dtype=D, requires_grad=True)
    sign = torch.tensor([1.0, -1.0], dtype=D)  # z^2 = -t has no solution, and a singular Jacobian at its start
    start = torch.tensor([1.0, 0.0], dtype=D)
    z = ik.root(lambda z, t: z**2 - sign * t, start, (t,), batch_dims=1, on_failure="nan").value
    (g,) = torch.autograd.grad(z.nansum(), t, create_graph=True)
    (h,) = torch.autograd.grad(g, t)
    assert float(g.detach()) == pytest.approx(0.5 * 2**-0.5) and float(h) == pytest.approx(-0.25 * 2**-1.5)


def test_singular_forward_mode_is_reported_as_such() -> None:
    def run(x: Tensor) -> Tensor:
        rule = ik.Implicit(linear_solver="lu")
        return ik.root(lambda z, x: z * 0 * x + (z.sum() - z.sum()), zeros(2), (x,), rule=rule).value

    with pytest.raises(ik.ConvergenceError, match=r"linear solve of the forward-mode derivative.*singular"):
        torch.func.jvp(run, (torch.ones(2, dtype=D),), (torch.ones(2, dtype=D),))


def test_nan_in_the_incoming_gradient_goes_through() -> None:
    """As through any operation of torch: it is no failure of the solve."""
    x = torch.ones(2, dtype=D, requires_grad=True)
    z = ik.fixed_point(lambda z, x: 0.5 * z + x, zeros(2), (x,)).value
    z.backward(torch.tensor([1.0, torch.nan], dtype=D))
    assert bool(torch.isnan(x.grad).all())


# --------------------------------------------------------------------------------------------------- impure functions
class Noisy(nn.Module):
    def __init__(self, noise: nn.Module) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(4, 4, dtype=D), noise.to(D)
        with torch.no_grad():
            self.linear.weight.mul_(0.2)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.noise(self.linear(z))) + x


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, z: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        return z - self.mean


IMPURE = {
    "dropout": (nn.Dropout(0.5), r"draws random numbers \(dropout in training.*Call \.eval\(\) on the module"),
    "batch norm": (
        nn.BatchNorm1d(4),
        r"updates 3 buffer\(s\).*running_mean, running_var, num_batches_tracked of BatchNorm1d.*call \.eval\(\)",
    ),
    "average put in a buffer's place": (
        Average(),
        r"updates 1 buffer\(s\).*mean of Average.*held at their present values",
    ),
}


@pytest.mark.parametrize("name", IMPURE)
def test_randomness_and_moving_statistics_are_warned_about(name: str) -> None:
    noise, message = IMPURE[name]
    module = Noisy(noise)
    before = {k: v.clone() for k, v in module.named_buffers()}
    x = torch.randn(6, 4, dtype=D)
    with pytest.warns(ik.ImpureFunctionWarning, match=message):
        ik.fixed_point(module, torch.zeros_like(x), (x,), solver="picard", max_steps=5, on_failure="ignore")
    after = dict(module.named_buffers())
    assert all(torch.equal(before[k], after[k]) for k in before)
    module.eval()  # the recommended fix
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = ik.fixed_point(module, torch.zeros_like(x), (x,))
    assert bool(solution.converged)


class Clock:
    """Numbers that a function draws anew at every call without torch's default generator."""

    def __init__(self, kind: str) -> None:
        self.calls, self.torch, self.numpy = 0, torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.python, self.kind = random.Random(0), kind

    def __call__(self) -> Any:
        self.calls += 1
        draws = {
            "a generator of its own": lambda: torch.rand(2, dtype=D, generator=self.torch),
            "numpy": lambda: torch.from_numpy(self.numpy.random(2)),
            "python": self.python.random,
            "a counter": lambda: 0.1 * self.calls,
            "nothing": lambda: 0.5,
        }
        return draws[self.kind]()


FEW: dict[str, Any] = {"max_steps": 150}  # noise does not become less with more of them
DRAWN: dict[str, Callable[[Callable[[], Any]], ik.Solution]] = {
    "fixed point": lambda r: ik.fixed_point(
        lambda z: 0.5 * torch.cos(z) + 1e-3 * r(), zeros(2), solver="picard", **FEW
    ),
    "root": lambda r: ik.root(lambda z: z**3 + z - 2 + 1e-3 * r(), zeros(2), **FEW),
    "minimum": lambda r: ik.argmin(lambda z: (z - 1 - 1e-3 * r()).square().sum(), zeros(2), **FEW),
    "fit": lambda r: ik.least_squares(lambda z: torch.cat([z - 1 - 1e-3 * r(), z.square() - 2]), zeros(2), **FEW),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["a generator of its own", "numpy", "python", "a counter"])
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_that_nobody_sees_drawn_are_named(name: str, kind: str) -> None:
    """In the error, or, where the noise was taken for rounding, in a warning."""
    said = "Two evaluations of the function at the same point differ by"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            clock = Clock(kind)
            solution = DRAWN[name](clock)
        except ik.ConvergenceError as error:
            assert said in str(error) and "Perhaps there is no solution" not in str(error)
            solution = error.solution
        else:
            assert any(said in str(w.message) for w in caught if w.category is ik.ImpureFunctionWarning)
    assert solution.evaluations <= clock.calls <= solution.evaluations + 8  # no more was spent on asking


@pytest.mark.parametrize("name", DRAWN)
def test_a_function_that_draws_nothing_is_not_accused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(DRAWN[name](Clock("nothing")).converged.all())
    with pytest.raises(ik.ConvergenceError) as info:
        ik.root(lambda z: z.square() + 1, zeros(2))
    assert "Perhaps there is no solution" in str(info.value) and "differ" not in str(info.value)


# ------------------------------------------------------------------------------- what is no mistake, and was once refused
TAKEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "numbers over the batch of args": (batched(zeros(4, dtype=torch.float64)), [1.0] * 4),
    "numbers over the batch that in_dims shows": (batched(zeros(2, 4), zeros(3), in_dims=(1, None)), [1.0] * 4),
    "an array in args": (lambda: ik.root(less, zeros(2), (np.array([1.0, 2.0]),)), [1.0, 2.0]),
    "one number of NumPy's": (
        lambda: ik.root(lambda z, a: a - z, zeros(2, dtype=torch.float32), (np.float64(2),)), [2.0] * 2),
    "no arguments": (lambda: ik.root(lambda z: z - 1, zeros(2), None), [1.0, 1.0]),
    "arrays in a program": (lambda: ik.solve(ik.QuadraticProgram(np.eye(2), np.ones(2))), [-1.0, -1.0]),  # type: ignore[arg-type]
    "arrays in a set": (lambda: ik.project.box(np.zeros(2), 1.0)(torch.tensor([-1.0, 3.0])), [0.0, 1.0]),
    "a list from a solver": (found_by(lambda z0, a: a.tolist()), [1.0] * 3),
    "integers of NumPy's": (
        lambda: ik.root(less, zeros(2), (torch.ones(2, dtype=D),), max_steps=np.int64(9), batch_dims=np.int64(1)),
        [1.0, 1.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_looks_wrong_and_is_not_is_taken(name: str) -> None:
    call, expected = TAKEN[name]
    found = call()
    value = found.value if isinstance(found, ik.Solution) else found
    torch.testing.assert_close(value, torch.tensor(expected, dtype=value.dtype))


@pytest.mark.filterwarnings("ignore:__array_wrap__")
def test_numpy_is_named_in_a_backward_pass() -> None:
    a = torch.tensor([0.3, 0.5], dtype=D, requires_grad=True)
    solution = ik.fixed_point(lambda z, a: np.cos(z) * a, zeros(2), (a,), solver="picard")  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="knows no derivative"):
        solution.value.sum().backward()


@pytest.mark.parametrize(
    ("name", "ours"), [("x", "value"), ("params", "value"), ("success", "converged"), ("nit", "steps")]
)
def test_other_names_of_what_a_solution_has(name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': did you mean solution\.{ours}\?"):
        getattr(ik.root(lambda z: z - 1, zeros(1)), name)
