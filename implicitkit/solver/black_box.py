"""A function as a solver: what it is given, how it is called, and how its word is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options, function, instance, one_of, optional, string
from implicitkit.foundation.wording import in_a_solver, raised
from implicitkit.linear.factors.user_factor import UserFactor
from implicitkit.solution import Status
from implicitkit.solver.base import Found, Options, Outcome, Solver
from implicitkit.solver.evaluating.differentiated import plain
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.return_checks import point, steps_of
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.judge import Judge

#: Exceptions that tell of a mistake in the program of a user's solver, not of a point that it could not find.
#: (An IndexError may be of either kind: the first sign change of a sample that has none.)
MISTAKES = (NameError, AttributeError, TypeError, KeyError, ImportError, NotImplementedError)

_AIMS = 5  # how often a black box is asked, each time for what is known by then
_CLOSER = 0.5  # of what is asked, from the third on


class BlackBoxFunction:
    """``f(z)`` for a black box, with everything that PyTorch can tell it about ``f``.

    What ``f`` is depends on what the solver solves (table in :class:`~implicitkit.Method`).  Shapes, by ``batch`` of the
    solver: ``"loop"``: ``z`` is ``(n,)``, one sample; ``"native"``: ``(batch, n)``, and every result has the batch in
    front; ``"joint"``: ``(batch * n,)``, one system, with block-diagonal matrices and summed values.

    ========================  =========================================  ===============
    method                    result                                     shape (loop)
    ========================  =========================================  ===============
    ``f(z)``                  map, residual or gradient                  ``(n,)``
    ``f.residual(z)``         what convergence is judged by              ``(n,)``
    ``f.jacobian(z)``         Jacobian of ``f`` (minimisers: Hessian)    ``(n, n)``
    ``f.jvp(z, v)``           ``f.jacobian(z) @ v``, matrix-free         ``(n,)``
    ``f.value(z)``            objective (minimisers, least squares)      ``()``
    ``f.residuals(z)``        vector ``r`` of least squares              ``(m,)``
    ``f.residuals_jacobian``  ``dr/dz``                                  ``(m, n)``
    ``f.second(z)``           ``d^2 f/dz^2`` of scalar equations         ``(1,)``
    ========================  =========================================  ===============

    Arguments are copied and results belong to the caller: neither side can change the other's memory.  What is asked
    at one point (equal numbers) costs one evaluation for values and gradients together, and one for products and
    Jacobians together.  Those that return values (``f``, ``residual``, ``value``, ``residuals``) are functions of torch as
    well: ``torch.func.jacrev(f)``, ``torch.vmap(f)(points)`` and autograd through ``f(z)`` work; each costs an evaluation.

    Attributes:
        kind: the :class:`~implicitkit.extend.Kind` of the problem behind ``f``. x_scale: as in
            :class:`~implicitkit.Problem`.
        error: the exception of the user's function that was raised last, if any.
        sample: which sample this is, and of how many, where the solver is called once for each.
    """

    def __init__(self, function: Evaluations, context: Tensor, *, slot: int | None = None, joint: bool = False) -> None:
        self._function, self._context, self._slot, self._joint = function, context, slot, joint
        self._seen: Tensor | None = None
        self._matrix = context
        self._operator: Operator | None = None
        self.kind, self.x_scale = function.kind, function.problem.x_scale
        self.error: Exception | None = None
        self.sample = 0, 1

    def __call__(self, z: Any) -> Tensor:
        """``f(z)``."""
        return self._vector(self._value(self._function, z))

    def residual(self, z: Any) -> Tensor:
        """The residual of the problem."""
        return self._vector(self._value(self._function.residual, z))

    def value(self, z: Any) -> Tensor:
        """The objective."""
        values = self._value(self._function.value, z)
        return values.sum() if self._joint else values.clone() if self._slot is None else values[self._slot].clone()

    def residuals(self, z: Any) -> Tensor:
        """The vector of which half the squared norm is minimised."""
        return self._vector(self._value(self._function.residuals, z))

    def jacobian(self, z: Any) -> Tensor:
        """The Jacobian of ``f``."""
        return self._blocks(self._ask(lambda y: self._linearised(y).dense(), z))

    def residuals_jacobian(self, z: Any) -> Tensor:
        """The Jacobian of :meth:`residuals`."""
        return self._blocks(self._ask(self._function.residuals_jacobian, z))

    def jvp(self, z: Any, v: Any) -> Tensor:
        """The Jacobian of ``f`` times ``v`` (of minimisers the Hessian), differentiable with respect to ``v``."""
        v = torch.as_tensor(v, dtype=self._context.dtype, device=self._context.device)
        direction = self._expand(v, torch.zeros_like(self._context))
        return self._vector(self._ask(lambda y: self._linearised(y).mv(direction), z, tracked=compat.tracked(v)))

    def second(self, z: Any) -> Tensor:
        """The second derivative of scalar equations."""
        return self._vector(self._ask(self._function.second_derivative, z))

    # ------------------------------------------------------------------------------------------------------- details
    def _value(self, what: Callable[[Tensor], Tensor], z: Any) -> Tensor:
        """``what(z)``, with its graph, or in its batch of ``vmap``, where ``z`` has one."""
        if not (isinstance(z, Tensor) and compat.tracked(z)):
            return self._ask(what, z)
        try:
            return what(self._expand(z.to(self._context.dtype), self._context))
        except Exception as error:
            self.error = error
            raise

    def _ask(self, what: Callable[[Tensor], Tensor], z: Any, tracked: bool = False) -> Tensor:
        """``what(z)`` of a plain point, a plain value unless it depends on something else that is ``tracked``.

        Raises:
            TypeError: it is to be differentiated, or mapped by ``vmap``.
        """
        point = torch.as_tensor(plain(z), device=self._context.device).detach()
        if self._seen is None or point.dtype != self._seen.dtype or not torch.equal(point, self._seen):
            self._seen, self._operator = point.clone(), None
            self._matrix = self._expand(self._seen.to(self._context), self._context)
            if self._slot is None and torch.equal(self._matrix, self._context):  # the start, which is known
                self._matrix = self._context
        try:
            found = what(self._matrix)
            return found if tracked else found.detach()
        except Exception as error:
            self.error = error
            raise

    def _linearised(self, matrix: Tensor) -> Operator:
        if self._operator is None:
            self._operator = self._function.linearize(matrix)
        return self._operator

    def _expand(self, z: Tensor, context: Tensor) -> Tensor:
        one = context if self._slot is None else context[self._slot]
        if z.numel() != one.numel():
            asked = (one.numel(),) if self._joint else tuple(one.shape)
            raise ValueError(
                f"f takes a point of shape {asked}; got {tuple(z.shape)}. To evaluate it at several points: "
                "torch.vmap(f)(points)"
            )
        if self._slot is None:
            return z.reshape(context.shape)
        return context.index_copy(0, torch.tensor([self._slot], device=context.device), z.reshape(1, -1))

    def _vector(self, rows: Tensor) -> Tensor:
        """``(batch, k)`` as the black box wants it."""
        if self._slot is not None:
            return rows[self._slot].clone()
        return rows.reshape(-1).clone() if self._joint else rows.clone()

    def _blocks(self, blocks: Tensor) -> Tensor:
        """``(batch, m, n)`` as the black box wants it."""
        if self._slot is not None:
            return blocks[self._slot].clone()
        return torch.block_diag(*blocks) if self._joint else blocks.clone()


@dataclass(frozen=True, repr=False)
class BlackBox(Solver):
    """A registered function ``find(f, z0, *, rtol, atol, max_steps, **options) -> Found`` as a solver.

    ``batch``: ``"loop"`` calls it once per sample with ``z0`` of shape ``(n,)``; ``"native"`` gives it the matrix
    ``(batch, n)``; ``"joint"`` gives it one big system of shape ``(batch * n,)``.
    """

    find: Any
    name: str = ""  # type: ignore[misc]
    solves: str = "root"  # type: ignore[misc]
    batch: str = "loop"
    options: tuple[tuple[str, Any], ...] = ()
    max_size: int | None = None  # type: ignore[misc]
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(
            self,
            find=function("find(f, z0, *, rtol, atol, max_steps)"),
            name=string(),
            solves=string(),
            batch=one_of("loop", "native", "joint"),
            options=instance("a tuple of pairs (name, value)", tuple),
            max_size=optional(at_least(1)),
        )

    def __repr__(self) -> str:  # the function alone would be an address
        name = self.name or getattr(self.find, "__qualname__", type(self.find).__name__)
        given = [repr(name), *(f"{option}={value!r}" for option, value in self.options)]
        return f"get_solver({', '.join(given)})"

    @property
    def scales(self) -> bool:  # type: ignore[override]
        """Whether it has an option for it."""
        return any(name == "x_scale" for name, _ in getattr(self.find, "options", ()))

    def __call__(self, f: Any, z0: Tensor, *, rtol: float, atol: float, max_steps: int) -> Found:
        given = {"rtol": rtol, "atol": atol, "max_steps": max_steps} | dict(self.options)
        found = in_a_solver(self.find, f, z0, **given)
        return found if isinstance(found, Found) else Found(point(found, z0, self.name or "the solver"))

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """Call it on plain tensors, then judge what it returned by evaluating the residual."""
        max_steps = options.max_steps or self.default_max_steps
        judge = Judge(f, options)
        start = judge.norm(f.residual(z0))
        bound = judge.tolerance(z0, start)
        message, refused = "", torch.zeros(z0.shape[0], dtype=torch.bool, device=z0.device)
        z, steps = z0, torch.zeros(z0.shape[0], dtype=torch.int64, device=z0.device)
        # The tolerance is relative to what is known at the solution only: aim at what is known, judge, and aim again from
        # there if it was too loose.
        for attempt in range(_AIMS):
            target = judge.aim(z + f.residual(z)) if attempt == 0 and judge.relative_to_state else bound
            if attempt > 1 and self.batch == "loop":  # refused again: one equation's excess is little in the norm
                target = torch.where(refused, _CLOSER ** (attempt - 1) * bound, bound)
            z, taken, message, factors = _ask(self, f, z, target, options, max_steps - steps, absolute=attempt > 0)
            steps = steps + taken
            norm = judge.norm(f.residual(z))
            bound = judge.tolerance(z, norm)
            claims = norm <= bound
            if not judge.relative_to_state and bool(claims.any()):
                judge.examine(z, norm, claims)
                bound = judge.tolerance(z, norm)
            refused = ~(norm <= bound) & (norm <= target) & (steps < max_steps)
            if not bool(refused.any()):
                break
        outcome = verdict(judge, f, z0, z, start, steps, max_steps, options, message)
        if len(factors) == len(z0) and all(factor is not None for factor in factors):
            f.system.factored = UserFactor(factors)  # of the last point asked for, for the derivative
        return outcome


def verdict(
    judge: Judge,
    f: Evaluations,
    z0: Tensor,
    z: Tensor,
    start: Tensor,
    steps: Tensor,
    max_steps: int,
    options: Options,
    message: str,
) -> Outcome:
    """The outcome for a point ``z`` that somebody returned, judged by its residual; never anything worse than the start."""
    norm, start = judge.measured(z, judge.norm(f.residual(z))), judge.measured(z0, start)
    claims = norm <= judge.tolerance(z, norm)
    converged = judge.examine(z, norm, claims) if bool(claims.any()) else claims
    status = torch.where(converged, int(Status.CONVERGED), int(Status.STALLED))
    status = torch.where(~converged & (steps >= max_steps) & (steps > 0), int(Status.MAX_STEPS), status)
    status = torch.where(torch.isfinite(norm), status, int(Status.NONFINITE))
    status = judge.review(z, norm, status)
    finite, known = torch.isfinite(z).all(1), torch.isfinite(start)
    worse = (status != int(Status.CONVERGED)) & ~(norm <= start) & known
    lost = ~finite & torch.isfinite(z0).all(1)  # no point at all, where F is not finite at the start either
    if not message and bool((worse | lost).any()):
        found = "NaN or Inf" if bool(lost.any()) else f"|F| = {float(norm[worse].max()):.3g}"
        better = ", which is better," if bool(worse.any()) else ""
        message = f"The solver returned {found}, and the start{better} was kept instead"
    z = torch.where((worse | lost).unsqueeze(1), z0, z)
    norm = torch.where(worse, start, norm)
    status = torch.where(worse & (status == int(Status.NONFINITE)), int(Status.STALLED), status)
    tolerance = judge.tolerance(z, norm) if int(torch.count_nonzero(status)) else None
    trace = [start, norm] if options.trace else []
    return Outcome(z, norm, steps, status, f.evaluations, f.sample_evaluations, trace, message, tolerance=tolerance)


def _ask(
    solver: BlackBox, f: Evaluations, z0: Tensor, target: Tensor, options: Options, left: Tensor, absolute: bool
) -> tuple[Tensor, Tensor, str, list[Any]]:
    """One call (or one call a sample), with the target as an absolute tolerance where it is relative to the state: points,
    steps, what it says, and the factorisations that it gives.  ``left``: steps that a sample may still take."""
    absolute = absolute or f.kind.iteration or options.start_norm is not None

    def limits(sample: slice) -> dict[str, Any]:
        max_steps = max(1, int(left[sample].min()))
        if absolute:
            known = target[sample]
            known = known[known.isfinite()]  # a sample of NaN has no target, and takes none from the others
            atol = float(known.min()) if len(known) else options.atol
            return {"rtol": 0.0, "atol": atol, "max_steps": max_steps}
        return {"rtol": options.rtol, "atol": options.atol, "max_steps": max_steps}

    batch = z0.shape[0]
    if solver.batch == "joint" and batch > 1:  # one system has no solution where one of its equations is NaN
        samples, system, theta = subset(f, f.residual(z0).isfinite().all(1))
        if 0 < len(samples) < batch:
            part = f.beside(f.solves, system, theta)
            of_part = target.index_select(0, samples), options, left.index_select(0, samples), absolute
            z, steps, message, _ = _ask(solver, part, z0.index_select(0, samples), *of_part)
            return z0.index_copy(0, samples, z), torch.zeros_like(left).index_copy(0, samples, steps), message, []
    message, name = "", solver.name or "the solver"
    factors: list[Any] = []
    steps = torch.zeros(batch, dtype=torch.int64, device=z0.device)
    if solver.batch != "loop" or batch == 1:
        joint = solver.batch != "native"
        function, start = BlackBoxFunction(f, z0, joint=joint), z0.reshape(-1) if joint else z0
        found = _guarded(solver, function, start, **limits(slice(None)))
        z, steps = _accept(found, start, name).reshape(z0.shape), steps + steps_of(found, name)
        message, factors = found.message, _each(found, batch)
    else:
        z = z0.clone()
        for i in range(batch):
            if left[i] <= 0:
                factors.append(None)
                continue
            one = _one_sample(f, z, i)
            one.sample = i, batch
            found = _guarded(solver, one, z0[i], **limits(slice(i, i + 1)))
            z[i] = _accept(found, z0[i], name)
            steps[i] = steps_of(found, name)
            factors += _each(found, 1)
            message = found.message or message
    return z, steps, message, factors


def _each(found: Found, batch: int) -> list[Any]:
    """The factorisation of each sample, as far as they were given."""
    given = found.factorisation
    return [given] if batch == 1 or given is None else list(given)


def _one_sample(f: Evaluations, z: Tensor, i: int) -> BlackBoxFunction:
    """``f`` of sample ``i`` alone: on its own rows where the system allows it, else inside the whole batch."""
    per_row = f.system.samples_per_row
    row, inside = divmod(i, per_row)
    if not f.system.can_select:
        return BlackBoxFunction(f, z.clone(), slot=i)
    system, theta = f.system.select(torch.tensor([row], device=z.device), f.theta)
    part = f.beside(f.solves, system, theta)
    return BlackBoxFunction(part, z[row * per_row : (row + 1) * per_row].clone(), slot=inside)


def _guarded(solver: BlackBox, f: BlackBoxFunction, z0: Tensor, **keywords: Any) -> Found:
    """Call the black box; an exception of its own is a failure to converge, unless it tells of a mistake in the program; one
    of the user's function surfaces."""
    try:
        return solver(f, z0.detach().clone(), **keywords)
    except Exception as error:
        if f.error is not None:
            raise f.error from None
        if isinstance(error, MISTAKES):
            raise
        return Found(z0, message=raised(solver.name or "the solver", error))


def _accept(found: Found, z0: Tensor, name: str) -> Tensor:
    """The point found, as a tensor like ``z0``."""
    z = point(found.z, z0, name)
    if z.numel() != z0.numel() or (z.ndim == z0.ndim and z.shape != z0.shape):  # transposed, if not of another size
        raise ValueError(f"{name} returned a point of shape {tuple(z.shape)} for a start of shape {tuple(z0.shape)}")
    return z.reshape(z0.shape)
