"""What a problem is: a frozen object that knows one residual."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded, trees
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import Configured, check_options, flag
from implicitkit.foundation.trees import Layout
from implicitkit.linear.factors.sparse_form import SMALLEST, sparse_blocks
from implicitkit.linear.independence import why_coupled
from implicitkit.problem.auxiliary import ValueOnly
from implicitkit.problem.kind import ROOT, Kind, as_kind
from implicitkit.problem.linearised_samples import of_residual, selection
from implicitkit.problem.structurally_singular import idle, named
from implicitkit.system import System

_FLAG = flag()

Kernel = Callable[[Tensor], Tensor]
Pull = Callable[[Tensor, Sequence[int]], Sequence[Tensor]]


@dataclass(frozen=True)
class Restated:
    """A problem with hidden unknowns (the multipliers of a constrained minimisation), written over all of them.

    Attributes:
        problem: whose state is that of ``start``. start: the user's ``z0`` with starts for the hidden unknowns.
        args: what the function gets after the state. split: ``(state, *lead) -> (value, multipliers)``, for the user.
        batch_dims: of ``start``. lead: how many of ``args`` come before the user's own, each with the batch in front;
            ``split`` gets them too. shared: how many follow these that have no batch.
    """

    problem: Problem
    start: Any
    args: tuple[Any, ...]
    split: Callable[..., tuple[Any, Any]]
    batch_dims: int
    lead: int = 0
    shared: int = 0

    def dims(self, in_dims: Any) -> Any:
        """``in_dims`` of the user's arguments as those of all."""
        return (
            in_dims
            if in_dims is None or isinstance(in_dims, int)
            else (*(0,) * self.lead, *(None,) * self.shared, *in_dims)
        )

    def parts(self, state: Any) -> tuple[Any, Any]:
        """Value and multipliers of a state at the caller's level."""
        return self.split(state, *self.args[: self.lead])

    def plain_parts(self, state: Any, calls: int) -> tuple[Any, Any]:
        """Value and multipliers of a plain state, below all transforms: with ``calls`` of the caller's batches in front, if
        more than 1."""
        if not self.lead:
            return self.split(state)
        leaves, spec = trees.tree_flatten(self.args[: self.lead])
        known = [compat.batches_in_front(t) for t in leaves]
        if calls == 1:
            plain = [p.reshape(t.shape) for (p, _), t in zip(known, leaves, strict=True)]
            return self.split(state, *trees.tree_unflatten(plain, spec))
        rows = [p.flatten(0, k - 1) if k else p for p, k in known]
        if any(k and len(p) != calls for p, (_, k) in zip(rows, known, strict=True)):
            raise CapabilityError(
                "a callback (or the report of a failure) under several levels of torch.vmap, of which only some batch z0, "
                "cannot show z: batch z0 at every level"
            )
        dims = trees.tree_unflatten([0 if k else None for _, k in known], spec)
        absent = False

        def one(state: Any, lead: Any) -> Any:
            nonlocal absent
            value, multipliers = self.split(state, *lead)
            absent = multipliers is None
            return value, () if absent else multipliers

        value, multipliers = torch.func.vmap(one, in_dims=(0, dims))(state, trees.tree_unflatten(rows, spec))
        return value, None if absent else multipliers


def deeper(
    problem: Problem, start: Any, args: tuple[Any, ...], batch_dims: int, given: Any, back: Callable[[Any, Any], Any]
) -> Restated:
    """A problem over other unknowns, restated once more if it has to be.

    Args:
        problem: in the new unknowns; its function gets ``given`` before ``args``. start: of the new unknowns.
        back: ``(new unknowns, given) -> z``.
    """
    args = (given, *args)
    inner = problem.restate(start, args, batch_dims)
    if inner is None:
        return Restated(problem, start, args, lambda state, g: (back(state, g), None), batch_dims, lead=1)

    def split(state: Any, *lead: Any) -> tuple[Any, Any]:
        value, multipliers = inner.split(state, *lead[: inner.lead])
        return back(value, lead[inner.lead]), multipliers

    return Restated(inner.problem, inner.start, inner.args, split, inner.batch_dims, lead=inner.lead + 1)


class Problem(Configured):
    r"""What must hold at the solution.

    A subclass (a frozen dataclass) either holds the user's function or defines :meth:`residual` itself, over pytrees:

        @dataclass(frozen=True)
        class Balance(ik.Problem):                # register it with ik.register_problem(Balance)
            rate: float
            def residual(self, z, inflow):        # zero at the solution
                return inflow - self.rate * z ** 2

    Class attributes:
        kind: a :class:`~implicitkit.extend.Kind`, or the name of a known one (``"root"``, ``"fixed_point"``,
            ``"argmin"``, ``"least_squares"``, ``"steady_state"``): which solvers serve it, what its function returns, what
            convergence is relative to.
        symmetric: the Jacobian of the residual is symmetric (default: what the kind says).
        jac_sparsity: the pattern of that Jacobian: a SciPy or torch sparse matrix, bandwidths ``(lower, upper)``, ``None``
            (there is none), or ``"auto"``: it is found by itself from 128 unknowns on.
        positive_definite: that Jacobian is, and so symmetric. by_blocks: :meth:`linearise` says the blocks of the Jacobian.
        is_step: the residual is what the function returns, as a matrix, less ``z``.
        closed: the function is the problem's own and uses nothing but its arguments, which are tensors.
        under_autocast: a state in half precision is solved for in single precision, the function under autocast.
        share_of_function: about the part of a change of the residual that is the function's, at least.
        manifold: what ``z`` lies on (``ik.manifold``), if it is no vector. has_aux: the function returns ``(value, aux)``.
        x_scale: what methods of least squares with a trust region measure the unknowns by: ``"auto"`` and ``"jac"``, their
            own scales by the Jacobian; else units of one.
        orders: derivatives of higher ones lack what ``beyond`` says.
        no_start: for messages, why ``z0`` is NaN where the problem looked for a start and found none.

    Units: ``z`` may have any, and so may the residual; norms add up squares over all unknowns of a sample, so bring
    unknowns and equations of different units to a common scale.  ``dz/d\theta`` has the units of ``z`` by those of
    ``\theta``.

    Raises (when solved): :class:`~implicitkit.ConvergenceError` where no point was found, ``TypeError`` and ``ValueError``
        where the function does not return what the kind asks for.

    The ``flat_*`` methods see the packed matrix ``z`` of shape ``(batch, n)`` and the ``kernel``, the user's function
    on such matrices with everything else bound; the core uses nothing but these.
    """

    kind: ClassVar[Kind] = ROOT
    symmetric: bool = False
    jac_sparsity: Any = "auto"
    positive_definite: bool = False
    by_blocks: ClassVar[bool] = False
    is_step: ClassVar[bool] = False
    closed: ClassVar[bool] = False
    under_autocast: ClassVar[bool] = False
    share_of_function: ClassVar[float] = 1.0
    x_scale: Any = "auto"
    manifold: Any = None
    has_aux: bool = False
    no_start: str = ""
    orders: float = math.inf
    beyond: str = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "kind" in cls.__dict__:
            cls.kind = as_kind(cls.__dict__["kind"])
            if "symmetric" not in cls.__dict__:
                cls.symmetric = cls.kind.symmetric
        if "flat_residual" in cls.__dict__ and "is_step" not in cls.__dict__:
            cls.is_step = False  # another residual than that of the class above

    @property
    def title(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function ``(z, *args)``."""
        return self.residual

    def _value_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The user's function without what it returns beside its value."""
        return ValueOnly(function) if self.has_aux else function

    def residual(self, z: Any, *args: Any) -> Any:
        """``F(z, *args)``, of the structure of ``z``; zero at the solution."""
        raise NotImplementedError(f"{type(self).__name__} must define residual(z, *args)")

    # ---- hooks that few problems need
    def within(self, rtol: float | None) -> Problem:
        """The problem as it is solved to a tolerance that the user gave: itself, unless its steps are chosen by that."""
        return self

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated | None:
        """The problem over more unknowns than the user's own that is solved in its place; ``None``: it is solved itself."""
        return None

    @property
    def linear_solver(self) -> Any:
        """The linear solver for derivatives of this very problem; ``None``: the one registered for its class."""
        return None

    def probe(self, z0: Any) -> Any:
        """A state on which one evaluation of :attr:`function` uses every tensor that any evaluation uses."""
        return z0

    def drops_rows(self) -> bool:
        """May converged samples be dropped (is there nothing, beside the arguments, that has one entry a sample)?"""
        return True

    def pieces(self, layout: Layout) -> tuple[int, ...] | None:
        """The sizes of parts of the packed state that must hold each by its own size; ``None``: it is judged as a whole."""
        return None

    def unpack(self, layout: Layout, matrix: Tensor) -> Any:
        """What :attr:`function` is given for the matrix that the kernel is given."""
        return layout.unpack(matrix)

    def unusable(self, theta: Sequence[Tensor]) -> list[str]:
        """Data that have no solution whatever ``z`` is, NaN above all, as messages name them (default: none known)."""
        return []

    def explain(self, system: System, z: Tensor, theta: Sequence[Tensor], failed: Tensor) -> str:
        """A sentence on why no solution was found, for the message: packed points ``z``, and which samples ``failed``.

        Here of equations: unknowns on which none of them depends around where the search has ended, and equations that
        depend on no unknown.  Products with a random vector show both: where it has ended, and beside, so that a minimum of
        ``z^2 + 1`` is none.
        """
        if not self.kind.equation:
            return ""
        try:
            unused, fixed = (t[failed].all(0) for t in idle(lambda y: system.residual(y, *theta), z))
        except Exception:  # the function is not to be differentiated, or not to be called beside z
            return ""
        if bool(unused.all()):
            return (
                "The function does not depend on its unknown z there: all its derivatives by z are zero. Return what must "
                "vanish as a function of the first argument, or start where it depends on it."
            )
        parts = (("The function does not depend on", "z", unused), ("Nothing moves", "F", fixed))
        said = [f"{words} {', '.join(named(system, t, name))} there." for words, name, t in parts if bool(t.any())]
        return " ".join([*said, "No step along a derivative changes that: start elsewhere."]) if said else ""

    def coupled(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> str:
        """A sentence, if samples that ``batch_dims`` calls independent are not."""
        return why_coupled(lambda y: system.residual(y, *theta), z)

    @property
    def near_inverse(self) -> Any:
        """What is near ``(dF/dz)^{-1}`` and costs little, for Krylov methods: ``solve(b)`` and ``T``; ``None``: unknown."""
        return None

    @property
    def determined(self) -> bool:
        """Have the equations one solution, whatever they are made of, so that a point that meets them is it?  Then nothing
        can have run away, nor vanish elsewhere."""
        return False

    @property
    def wants_factors(self) -> bool:
        """Is it known that Krylov methods would take more products than factors cost?"""
        return False

    def linearise(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
        """``F`` at a plain ``z``, on its graph, and ``dF/dz`` there (a problem that knows its blocks says them)."""
        expression = lambda y: system.residual(y, *theta)  # noqa: E731
        sparse = sparse_blocks(system.sparsity, expression, z) if z.shape[1] >= self.sparse_from else None
        claimed = self.symmetric and not self.kind.symmetric
        known: dict[str, Any] = {
            "symmetric": self.symmetric,
            "fixed_point": self.kind.iteration,
            "of_map": self.is_step,
        }
        equations = _of_map if self.is_step else of_residual
        out, A = autodiff.linearise(equations(system, theta), z, sparse=sparse, **known)
        A.near, A.wants_factors = self.near_inverse, self.wants_factors
        if claimed:
            check_symmetric(A, autodiff.linearise(expression, z)[1], self.title)
        A.selected_anew(selection(system, z, theta, equations, **known))
        return out, A

    def _state_structure(self) -> None:
        """Draw what follows from what the user says about the Jacobian.

        Raises:
            TypeError: a flag that is none. ValueError: a word for a pattern.
        """
        flags: Any = (self.symmetric, self.positive_definite)
        if type(flags[0]) is not bool or type(flags[1]) is not bool:
            check_options(self, symmetric=_FLAG, positive_definite=_FLAG)
        self._what_is_said()
        if self.positive_definite:
            object.__setattr__(self, "symmetric", True)

    def _what_is_said(self) -> None:
        aux: Any = self.has_aux
        if type(aux) is not bool:
            check_options(self, has_aux=_FLAG)
        said = self.jac_sparsity
        if not (said is None or (isinstance(said, str) and said == "auto") or _is_pattern(said)):
            raise (ValueError if isinstance(said, (str, tuple, list)) else TypeError)(
                f"{self.title}: jac_sparsity must be 'auto', None, a sparse matrix or bandwidths (lower, upper), got "
                f"{said!r}"
            )

    @property
    def sparse_from(self) -> int:
        """Unknowns from which a sparse Jacobian may pay."""
        return SMALLEST if isinstance(self.jac_sparsity, str) else 2

    def pattern_of(self, what: str) -> Any:
        """What the user says of the sparsity of the Jacobian of ``"residual"`` or ``"residuals"``."""
        return self.jac_sparsity if what == "residual" else "auto"

    def first_order(self, system: System, z: Tensor, theta: Sequence[Tensor]) -> tuple[Operator, Pull] | None:
        """``dF/dz`` at a plain ``z``, and the map ``(w, needed) -> (dF/dtheta_i)^T w`` for the tensors ``needed``, where
        the problem knows both in closed form; ``None``: by automatic differentiation."""
        return None

    # ---- on packed states
    def flat_residual(self, kernel: Kernel, z: Tensor) -> Tensor:
        """``F`` on the packed state: ``(batch, n) -> (batch, n)``."""
        return kernel(z)

    def flat_residuals(self, kernel: Kernel, z: Tensor) -> Tensor:
        """The vector ``r`` of which half the squared norm is minimised, ``(batch, m)``: for equations, ``F``."""
        return self.flat_residual(kernel, z)

    def flat_curvature(self, r: Tensor, share: Tensor) -> Tensor | None:
        """Weights of the squares in the quadratic term of a method's model, ``(batch, m)``, where Gauss and Newton's, all
        one, are not the best (:mod:`implicitkit.problem.robust`); ``None``: they are."""
        return None

    def flat_objective(self, kernel: Kernel, z: Tensor) -> Tensor:
        """What a minimiser minimises, ``(batch,)``: for equations, ``|F|^2 / 2``."""
        return 0.5 * self.flat_residuals(kernel, z).square().sum(1)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        own: Any = self
        others = fields(own)[1:] if is_dataclass(own) else ()
        given = [f"{f.name}=..." for f in others if f.init and getattr(own, f.name, f.default) is not f.default]
        return f"{type(self).__name__}({', '.join([name, *given])})"


def _of_map(system: System, theta: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda y: system.kernel(y, *theta)


def check_symmetric(said: Operator, true: Operator, title: str) -> None:
    """Raise unless products with the operator and its transposed agree.

    Raises:
        ValueError: they do not.
    """
    v = seeded.uniform(*said.like.shape, seed=0).to(said.like) + 0.5
    forward, back = true.mv(v), true.rmv(v)
    size = torch.linalg.vector_norm(forward, dim=1) + torch.linalg.vector_norm(back, dim=1)
    wrong = torch.linalg.vector_norm(forward - back, dim=1) > torch.finfo(v.dtype).eps ** 0.4 * size
    if bool(wrong.any()):
        raise ValueError(
            f"{title} was said to have a symmetric Jacobian (symmetric=True or positive_definite=True), but has not: "
            "products with it and with its transpose differ"
        )


def _is_pattern(given: Any) -> bool:
    """May this say where a Jacobian has entries: a matrix, or bandwidths ``(lower, upper)``?"""
    if isinstance(given, (tuple, list)):
        return len(given) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in given)
    return not isinstance(given, type) and hasattr(given, "shape") and len(given.shape) == 2


def require_callable(problem: Problem, function: Any, role: str, form: str = "") -> None:
    """Raise unless ``function`` can be called (``form``: how), as the class of a module cannot."""
    if isinstance(function, type):
        raise TypeError(
            f"{type(problem).__name__}: {role}: got the class {function.__name__}: create an instance first"
        )
    if not callable(function):
        form = form or _FORMS.get(role, f"{role}(z, *args): a function or an nn.Module")
        made = "; solve a problem with ik.solve" if isinstance(function, Problem) else ""
        raise TypeError(f"{type(problem).__name__} needs a callable {form}; got {type(function).__name__}{made}")


_FORMS = {
    "prox": "prox(z, step), such as ik.prox.l1(weight)",
    "project": "project(z), such as ik.project.simplex()",
    "event": "event(t, y, *args)",
}
