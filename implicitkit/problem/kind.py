"""Kinds of problems: everything that the rest of the library must know of a problem besides its equations.

No other module compares the name of a kind.  A new kind is a :class:`Kind` object on a problem class; it may come from a
plugin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from implicitkit.foundation.options import check_options, flag, instance, one_of, string, whole
from implicitkit.foundation.wording import did_you_mean

_RETURNS = ("state", "scalar", "vector", "program")


@dataclass(frozen=True)
class Kind:
    """A kind of problem.

    Attributes:
        name: what messages and listings call it.
        served_by: what a solver must solve (its ``solves``) to serve it; the first is the kind's own.
        returns: what the user's function returns: ``"state"`` (like ``z``), ``"scalar"`` (one number a sample),
            ``"vector"`` (any pytree, a residual vector) or ``"program"`` (an objective and constraints).
        iteration: the function is a map and the residual ``map(z) - z``, in units of ``z``: convergence is relative to
            ``|z|``, and the Jacobian of the residual is ``J - I``.
        like_state: the residual of an equation has the units of ``z`` as well, and the start may be near the solution: what
            is small is relative to both, not to the residual at the start alone.
        flow: the sign ``s`` with which ``dz/dt = s F`` comes to rest at a solution; 0: not known.
        symmetric: the Jacobian of the residual is symmetric.
        solver: the registered solver that ``solver="auto"`` stands for; empty: what the library thinks best.

    Raises:
        ValueError: an empty name, no ``served_by``, or another ``returns`` or ``flow``.
    """

    name: str
    served_by: tuple[str, ...] = ("root",)
    returns: str = "state"
    iteration: bool = False
    like_state: bool = field(default=False, kw_only=True)
    flow: int = 0
    symmetric: bool = False
    solver: str = ""

    def __post_init__(self) -> None:
        check_options(
            self,
            name=string(),
            served_by=instance("a tuple of words", tuple),
            returns=one_of(*_RETURNS),
            iteration=flag(),
            like_state=flag(),
            flow=whole(),
            symmetric=flag(),
            solver=string(),
        )
        if not self.name or not self.served_by:
            raise ValueError("a Kind needs a name, and at least one word in served_by")
        if self.flow not in (-1, 0, 1):
            raise ValueError(f"flow must be 1, -1 or 0 (not known), got {self.flow!r}")

    def __str__(self) -> str:
        return self.name

    @property
    def returns_state(self) -> bool:
        """The function returns something like ``z``: a map or a residual."""
        return self.returns == "state"

    @property
    def returns_scalar(self) -> bool:
        """The function returns one number a sample: an objective."""
        return self.returns == "scalar"

    @property
    def of_residuals(self) -> bool:
        """The function returns a residual vector, of which half the squared norm is minimised."""
        return self.returns == "vector"

    @property
    def returns_program(self) -> bool:
        """The function returns an objective and constraints."""
        return self.returns == "program"

    @property
    def equation(self) -> bool:
        """The function is the residual itself, in units of its own."""
        return self.returns_state and not self.iteration

    @property
    def minimisation(self) -> bool:
        """A solution is a minimum of something: the residual is a gradient."""
        return self.flow < 0


# What a solver solves, from the narrow to the general: a solver of a general problem serves the narrower ones, never the
# other way round in the derivative.
ROOT = Kind("root", ("root", "least_squares", "minimise"))
FIXED_POINT = Kind("fixed_point", ("fixed_point", "root", "least_squares", "minimise"), iteration=True, flow=1)
STEADY_STATE = Kind("steady_state", ("steady_state", "root", "least_squares", "minimise"), flow=1)
ARGMIN = Kind("argmin", ("minimise", "root"), returns="scalar", flow=-1, symmetric=True)
LEAST_SQUARES = Kind("least_squares", ("least_squares", "minimise", "root"), returns="vector", flow=-1, symmetric=True)
CONSTRAINED = Kind("constrained", ("constrained", "root"), returns="program")
QUADRATIC_PROGRAM = Kind("quadratic_program", ("quadratic_program", "root"), solver="qp")

_known: dict[str, Kind] = {
    kind.name: kind for kind in (ROOT, FIXED_POINT, ARGMIN, LEAST_SQUARES, STEADY_STATE, CONSTRAINED, QUADRATIC_PROGRAM)
}


def kinds() -> Iterable[Kind]:
    """Every kind, in the order in which they became known."""
    return tuple(_known.values())


def register_kind(kind: Kind) -> Kind:
    """Make a kind known by its name.

    Raises:
        ValueError: another kind has the name.
    """
    old = _known.setdefault(kind.name, kind)
    if old != kind:
        raise ValueError(f"there is another kind {kind.name!r}: {old!r}")
    return old


def as_kind(kind: Kind | str) -> Kind:
    """A kind, or the known one of this name.

    Raises:
        TypeError: neither.
    """
    if isinstance(kind, Kind):
        return kind
    if isinstance(kind, str) and kind in _known:
        return _known[kind]
    hint = did_you_mean(kind, list(_known))
    raise TypeError(
        f"kind must be one of {', '.join(_known)}, or an implicitkit.extend.Kind of your own; it is {kind!r}.{hint}"
    )
