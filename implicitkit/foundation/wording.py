"""Words that messages share: a thing by its type, and what a wrong name may have meant."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapturedTensorError

_IN_NUMPY = ("Can't call numpy()", "data pointer of Tensor that doesn't have storage", "to numpy array")
_BY_TORCH = ("derivative", "differentiate twice", "differentiable twice", "double backward", "the backward or vjp")
NOT_DIFFERENTIABLE = (*_BY_TORCH, *_IN_NUMPY)
_AS_NUMBERS = ("converted to Python scalars", "write it in torch's operations", "converted to a Scalar")

# in what torch says of tensors that do not fit
OF_SHAPES = (
    "must match the size",
    "cannot be multiplied",
    "is invalid for input",
    "size mismatch",
    "not broadcastable",
    "inconsistent tensor size",
    "out of bounds for dimension",
    "of a 0-dim tensor",
    "too many indices for tensor",
    "out of range (expected to be in range of",
)

# the words of other libraries, and what may be called so here
_OTHER_WORDS = {
    "tol": ("rtol",), "tolerance": ("rtol",), "eps": ("rtol",), "xtol": ("rtol",), "ftol": ("atol",), "gtol": ("atol",),
    "maxiter": ("max_steps",), "max_iter": ("max_steps",), "maxit": ("max_steps",), "max_iters": ("max_steps",),
    "max_evals": ("max_steps",), "max_nfev": ("max_steps",), "niter": ("max_steps",), "iterations": ("max_steps",),
    "steps": ("max_steps", "terms"), "k": ("terms", "steps"), "method": ("solver",), "x0": ("z0",), "init": ("z0",),
    "init_params": ("z0",), "y0": ("z0",), "theta": ("args",), "params": ("args",), "strict": ("on_failure",),
    "throw": ("on_failure",), "verbose": ("callback",), "batch": ("batch_dims",), "m": ("memory",),
    "history": ("memory",), "history_size": ("memory",), "beta": ("damping",), "mixing": ("damping",),
    "relaxation": ("damping",), "alpha": ("damping", "step_size", "step"), "lr": ("step_size", "step"),
    "stepsize": ("step_size", "step"), "learning_rate": ("step_size", "step"), "order": ("terms",),
    "lam": ("weight",), "lmbda": ("weight",), "gamma": ("weight",), "low": ("lower", "bounds"), "lo": ("lower", "bounds"),
    "high": ("upper", "bounds"), "hi": ("upper", "bounds"), "lower": ("bounds",), "upper": ("bounds",), "lb": ("bounds",),
    "ub": ("bounds",), "equality": ("constraints",), "inequality": ("constraints",), "eq": ("constraints",),
    "ineq": ("constraints",), "projection": ("project",), "sparsity": ("jac_sparsity",), "vmap": ("batch_dims",),
    "vectorize": ("batch_dims",), "warm_start": ("z0",), "r": ("radius",), "size": ("radius",), "solve": ("linear_solver",),
    "linear_solve": ("linear_solver",), "solver": ("linear_solver",), "has_aux": (), "maxls": ("max_halvings",),
}  # fmt: skip
_OF_THE_SOLVE = ("rtol", "atol", "max_steps", "on_failure", "batch_dims", "in_dims", "trace", "callback", "norm")


COMPILED_ONCE = (
    "A function compiled by torch.compile has first derivatives only, and this solve, or its derivative, needs a second "
    "one: give the function as it was before torch.compile, and compile what is around the solve"
)

UNSTEADY = (
    "Two evaluations of the function at the same point differ by {:.3g}: it draws numbers anew (from a generator of its "
    "own, from NumPy or Python), counts its calls, or keeps something from one to the next. Draw, or compute, outside and "
    "pass that as an argument."
)


def kind_of(value: Any) -> str:
    """The type of a value with its article: ``an int``, ``a str``, ``an ndarray``."""
    name = type(value).__name__
    vowel = name[0] in "aeioAEIO" or (name.startswith(("nd", "Un", "un")) and not name.startswith(("Uni", "uni")))
    return f"{'an' if vowel else 'a'} {name}"


def shown(value: Any) -> str:
    """A value as messages show it: as it is written, if that is one line, else its type, with shape and dtype if it has."""
    text = repr(value)
    if len(text) <= _LINE and "\n" not in text:
        return text
    return (
        f"{kind_of(value)} of {value.dtype} and shape {tuple(value.shape)}"
        if hasattr(value, "dtype")
        else kind_of(value)
    )


_LINE = 100  # letters of a value
_OURS = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"
_LIBRARIES = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("torch", "numpy", "scipy"))


def place_of(error: BaseException, default: str = "") -> str:
    """Where an exception began, ``file:line, in name``: the innermost call that is nobody's but the user's own, or
    ``default``, or the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not any(name in frame.filename for name in (_OURS, *_LIBRARIES))]
    if not theirs and default:
        return default
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def raised(name: str, error: BaseException) -> str:
    """What is said of an exception of a solver's own, with which it gave up."""
    text = f": {error}" if str(error) else ""
    return f"{name} raised {type(error).__name__}{text} ({place_of(error)}){of_gradients(error)}"


def of_gradients(error: BaseException) -> str:
    """What may be wrong where a solver's own backward finds no graph; else empty."""
    if "does not require grad" not in str(error):
        return ""
    return " (a solver is called under torch.no_grad: use torch.enable_grad() inside it)"


def in_a_solver(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a method of a part, a solver or linear solver, returns; where its backward finds no graph, the error says why."""
    try:
        return call(*arguments, **options)
    except RuntimeError as error:
        if not of_gradients(error):
            raise
        raise RuntimeError(f"{error}{of_gradients(error)}") from error


def of_a_part(error: BaseException) -> str:
    """Where an exception was raised by lines of a part's own (:func:`in_a_solver`), which called neither us nor, through
    us, the user's function; else empty."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [i for i, frame in enumerate(frames) if frame.f_code is in_a_solver.__code__]
    after = frames[inside[-1] + 1 :] if inside else []
    return place_of(error) if after and not any(_OURS in frame.f_code.co_filename for frame in after) else ""


def of_the_objective(name: str, batch: tuple[int, ...], got: str) -> str:
    """What is said of an objective that returned something else than one number a sample."""
    if not batch:
        advice = "For a batch of independent problems pass batch_dims="
        return f"{name} must return one number, shape (); it returned {got}. {advice}"
    advice = f"Sum over what belongs to one sample, not over the batch (the first {len(batch)} of z's dimensions)"
    return f"{name} must return one number per sample, shape {batch}; it returned {got}. {advice}"


def check_returned(
    leaf: Tensor, device: torch.device, what: str, at: Callable[[], str] = str, real: bool = False
) -> None:
    """Raise unless this tensor, which ``what`` returned (``at()`` says where in a tree), has numbers on this device, real or
    complex or only ``real``."""
    if leaf.device != device:
        raise ValueError(f"{what} returned a tensor on {leaf.device}, but z is on {device}")
    if not (leaf.is_floating_point() or leaf.is_complex()):
        raise TypeError(f"{what} returned dtype {leaf.dtype}{at()}: return real numbers, not a comparison or a count")
    if real and leaf.is_complex():
        way = "return the real view (torch.view_as_real) or a squared modulus"
        raise TypeError(f"{what} returned complex numbers; what is minimised must be real: {way}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Which of the known names may be meant: another library's word, a beginning, or the most alike; else empty."""
    plain = name.lower()
    said = [word for word in _OTHER_WORDS.get(plain, ()) if word in known]
    begun = [word for word in known if len(plain) > 1 and word.startswith(plain)]
    return next(iter([*said, *begun, *difflib.get_close_matches(plain, known, 1)]), "")


def did_you_mean(value: Any, choices: Sequence[str], cutoff: float = 0.6) -> str:
    """``" Did you mean 'root'?"``, the most alike of some words; empty where none is."""
    near = difflib.get_close_matches(str(value), choices, 1, cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def option_error(part: str, option: str, known: Sequence[str]) -> str:
    """The message for an option that a part does not have."""
    listed = f" Its options: {', '.join(known) or 'none'}."
    near = nearest(option, known)
    if near:
        return f"{part} has no option {option!r}. Did you mean {near!r}?{listed}"
    of_solve = nearest(option, _OF_THE_SOLVE)
    if of_solve:
        return f"{part} has no option {option!r}: pass {of_solve}= to the solve, beside solver= and rule=.{listed}"
    return f"{part} has no option {option!r}.{listed}"


def of_operations(text: str) -> str:
    """What may be wrong where torch says that an operation cannot be done: the function left torch; else empty."""
    if any(clause in text for clause in _IN_NUMPY):
        return (
            "The function hands a tensor to NumPy, which knows no derivative: use torch's operations (torch.cos, not np.cos)"
            " or keep NumPy in a solver of your own, @ik.implicit"
        )
    if "aot_autograd does not currently support double backward" in text:
        return COMPILED_ONCE
    if any(clause in text for clause in _AS_NUMBERS):
        return "math.cos(z), float(z) and z.item() turn a tensor into a number, without a derivative: use torch.cos(z)"
    return ""


def called(function: Callable[..., Any], z: Any, args: Sequence[Any]) -> Any:
    """``function(z, *args)``; where it leaves torch, the error says so, also in a backward pass."""
    try:
        return function(z, *args)
    except RuntimeError as error:
        if any(clause in str(error) for clause in _OF_LEVELS):
            raise CapturedTensorError(OUTSIDE) from error
        said = of_operations(str(error)) if type(error) is RuntimeError else ""
        if said:
            raise RuntimeError(f"{str(error).rstrip('.')}. {said}") from error
        raise


_OF_LEVELS = (  # of torch 2.13, the last from its compiler
    "wrapper == nullptr INTERNAL ASSERT",
    "wrapped->level() < level INTERNAL ASSERT",
    "dynamicLayerStack.size() >= level && level >= 1 INTERNAL ASSERT",
)
OUTSIDE = (
    "the function uses a tensor of a torch.func transform around the solve in a way that implicitkit cannot see: it gives "
    "it to a torch.func.grad or vjp of its own, captures it in a part that torch.compile compiles, or has it from a place "
    "where another was in the solve. Its derivative would be lost. Pass that tensor as an argument: "
    "ik.solve(problem, z0, (..., tensor))"
)


def raise_of_shapes(error: RuntimeError, part: Any, *given: Any) -> NoReturn:
    """Raise the error of a ``part`` that was called with these tensors again: as a ``ValueError`` that says their shapes and
    those of the tensors that it holds, if torch says that they do not fit."""
    if type(error) is not RuntimeError or not any(clause in str(error) for clause in OF_SHAPES):
        raise error
    shapes = ", ".join(str(tuple(t.shape)) for t in given if isinstance(t, Tensor))
    held = [f"{name} of shape {tuple(t.shape)}" for name, t in vars(part).items() if isinstance(t, Tensor)]
    owner = f"{type(part).__name__}{' with ' * bool(held)}{', '.join(held)}"
    raise ValueError(f"{owner} was called with shape {shapes}, and they do not fit. torch says: {error}") from error


UNSEEN = (
    "the function uses a tensor that requires grad, or belongs to a torch.func transform, in a way that implicitkit cannot "
    "see (through a custom autograd.Function, say, or a traced module): its derivative would be lost. Pass that tensor as "
    "an argument: ik.solve(problem, z0, (..., tensor))"
)
DRAWN = (
    'inside torch.vmap(..., randomness="different") the function draws numbers for each member anew, at every evaluation, '
    "and no solution would be that of one map. Draw them once outside the solve and pass them as an argument, or map with "
    'randomness="same"'
)
ELSEWHERE = (
    "at the solution the function uses a tensor that requires grad, or belongs to a torch.func transform, which it did not "
    "use at z0 (it branches on values, or what it reads, an attribute say, is another tensor since the solve): its "
    "derivative would be lost. Pass that tensor as an argument: ik.solve(problem, z0, (..., tensor))"
)
KEPT = (
    "the function keeps a tensor from one evaluation to the next that it computed from parameters or arguments (a cache "
    "filled at the first call, say): the derivative through it would be lost. Compute it anew in every call, or once "
    "outside the solve"
)
