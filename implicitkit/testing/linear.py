"""Checks of a linear solver: right, honest, sample by sample, transposed, for many right-hand sides, and in derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.testing.check import Suite, Unsolved, close, solved
from implicitkit.testing.common import add_common_checks
from implicitkit.testing.known import ERRORS
from implicitkit.testing.rules import RULES
from implicitkit.testing.systems import LinearSubject

_FAR = 20  # times the tolerance: the largest error of a solution whose residual is within it (condition below 10)
_LOOKS = 3  # products that are counted as steps or are not: the first residual, the last
_MANY = 10  # products: fewer may be what any tolerance takes

LINEAR_SOLVERS = Suite("linear solver", LinearSubject)


def _is_exact(solver: Any) -> bool:
    return bool(solver.exact)


def _is_matrix_free(solver: Any) -> bool:
    return bool(solver.exact and solver.matrix_free)


check = LINEAR_SOLVERS.check


def _converged(found: Any, what: str, keep: Any = slice(None)) -> None:
    if not bool(found.converged[keep].all()):
        raise Unsolved(f"{what}: converged is {found.converged.tolist()}")


def _solved(found: Any, M: Tensor, b: Tensor, rtol: float, what: str) -> None:
    """Assert that everything is called converged, and solved."""
    b = b.flatten(0, -2)
    M = M.repeat(len(b) // len(M), 1, 1)
    said = f" ({found.reason})" if found.reason else ""
    _converged(found, f"{what}{said}")
    wanted = torch.linalg.solve(M, b)
    allowed = _FAR * (rtol + 10 * torch.finfo(b.dtype).eps) * (1e-300 + float(wanted.abs().max()))
    solved(found.x, wanted, allowed, f"{what}: the solution")


# ------------------------------------------------------------------------------------------------------ right and honest
@check(
    "The solution of well-conditioned systems is not found: check the sign (A x = b, not A x + b = 0), that A is not taken "
    "for its transposed (A.rmv, A.dense().mT), and that the last iterate is returned. Made for some matrices only? Say so: "
    "needs = ('symmetric',) or ('fixed_point',), which is A = J - I; and if it is an approximation by intention, exact = "
    "False.",
    _is_exact,
)
def solves_well_conditioned_systems(subject: LinearSubject) -> None:
    """Systems of condition 4 are solved to the tolerance, with right-hand sides of any size."""
    M, b = subject.matrices(), subject.right_sides(3, 5)
    for unit in (1.0, 1e-9, 1e9):
        _solved(subject.solve(M, unit * b), M, unit * b, subject.accuracy, f"|b| of about {2 * unit:g}")


@check(
    "A truncated series is to come nearer to A^{-1} b than zero is: check the sign of A (A = J - I of fixed points).",
    lambda solver: not solver.exact,
)
def comes_nearer(subject: LinearSubject) -> None:
    """An approximation is nearer to the solution than zero is, and calls itself converged."""
    M, b = subject.matrices(), subject.right_sides(3, 5)
    found, wanted = subject.solve(M, b), torch.linalg.solve(M, b)
    left = (found.x - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert bool((left < 0.9).all()), f"|x - A^-1 b| / |A^-1 b| is {left.tolist()}"
    assert bool(found.converged.all()), f"converged is {found.converged.tolist()}"


@check(
    "Where products are all there is of a matrix, it must do with A.mv and A.rmv. A direct method says matrix_free = False.",
    _is_matrix_free,
)
def needs_no_matrix(subject: LinearSubject) -> None:
    """With products alone, of 40 unknowns, the solution is found."""
    M, b = subject.matrices(2, 40), subject.right_sides(2, 40)
    formed = type(subject.part).__module__.startswith("implicitkit.")  # ours form small ones by choice
    found = subject.answer(subject.products(M, formed=formed).operator, b)
    _solved(found, M, b, subject.accuracy, "products alone")


@check("A.T of an operator has A.rmv for A.mv, and A.dense() transposed: ask the operator that is given, nothing else.")
def solves_transposed_systems(subject: LinearSubject) -> None:
    """``A^T u = b``, as backward asks it, is another system than ``A x = b``, and both are solved."""
    M, b = subject.matrices(), subject.right_sides(3, 5)
    A = subject.products(M).operator
    first = subject.answer(A, b).x.clone()
    for _ in range(2 if subject.part.exact else 0):
        _solved(subject.answer(A.T, b), M.mT, b, subject.accuracy, "the transposed system")
    close(subject.answer(A, b).x, first, 1e-6, "A x = b after the transposed system: the solution")


@check(
    "The tolerance is |A x - b| <= atol + rtol |b| for each sample: stop by it, and pass both on. The residual is of x.",
    _is_exact,
)
def honours_tolerance(subject: LinearSubject) -> None:
    """What is called converged is within the tolerance, as a product shows; an iteration spends less on a loose one."""
    M, b = subject.matrices(3, 40), subject.right_sides(3, 40) * torch.tensor([[1e-3], [1.0], [1e3]], device="cpu")
    spent = []
    for rtol, atol in ((1e-2, 0.0), (0.0, 1e-2), (1e-5, 0.0), (subject.accuracy, 0.0)):
        if max(rtol, atol) < subject.accuracy:
            continue
        A = subject.products(M)
        found = subject.answer(A.operator, b, rtol=rtol, atol=atol)
        norm, bound = _residual(M, found.x, b), atol + rtol * b.norm(dim=1)
        allowed = 1.01 * bound + 1e-14 * b.norm(dim=1)
        _converged(found, f"rtol={rtol:g}, atol={atol:g}")
        assert bool((norm <= allowed).all()), f"asked for {bound.tolist()}, but |A x - b| is {norm.tolist()}"
        spent.append(A.count)
    assert spent[-1] < _MANY or spent[0] < spent[-1], (
        f"{spent[0]} products for two digits, {spent[-1]} for all of them: it does not stop when it may"
    )


@check("residual_norm is |A x - b| at the x returned, by a product if need be: recurrences drift.", _is_exact)
def tells_the_residual(subject: LinearSubject) -> None:
    """``residual_norm`` is that of the answer."""
    M, b = subject.matrices(3, 12), subject.right_sides(3, 12)
    for options in ({"rtol": max(1e-3, subject.accuracy)}, {"max_steps": 2}):
        found = subject.solve(M, b, **options)
        norm = _residual(M, found.x, b)
        wrong = (found.residual_norm - norm).abs() > 1e-2 * norm + 1e-12 * b.norm(dim=1)
        assert not bool(wrong.any()), f"told of {found.residual_norm.tolist()}, but |A x - b| is {norm.tolist()}"


@check("steps are products with A (or A^T): count each, and stop after max_steps of them.", _is_matrix_free)
def counts_products(subject: LinearSubject) -> None:
    """No more products are taken than ``max_steps`` and a look or two; those that were are told of."""
    M, b = subject.matrices(3, 30), subject.right_sides(3, 30)
    for limit in (1, 4, None):
        A = subject.products(M)
        found = subject.answer(A.operator, b, max_steps=limit)
        told = int(found.steps.max())
        if A.operator.matrix is None:  # else a matrix was formed, which is no product
            assert limit is None or told <= limit, f"with max_steps={limit} it tells of {told} steps"
            assert limit is None or A.count <= limit + _LOOKS, f"with max_steps={limit} it takes {A.count} products"
            most = told + max(_LOOKS, told // 2)  # a look at each restart
            assert A.count <= most, f"{told} steps are told of, and there were {A.count} products"
        norm, bound = _residual(M, found.x, b), subject.accuracy * b.norm(dim=1)
        wrong = found.converged & (norm > 1.01 * bound + 1e-14)
        assert not bool(wrong.any()), f"with max_steps={limit} converged is claimed at |A x - b| = {norm.tolist()}"


@check(
    "What has no solution is marked in converged, with a reason for people; nothing is raised, and the other "
    "samples are solved: a decomposition that raises for the whole batch is asked matrix by matrix (torch.linalg.*_ex).",
    _is_exact,
)
def tells_of_failure(subject: LinearSubject) -> None:
    """A singular matrix beside two regular ones: that sample is not called solved, or with a ``doubt``."""
    M, b = subject.matrices(), subject.right_sides(3, 5)
    M[1] = 0
    M[1, 0, 0] = -1 if subject.fixed_point else 2.0
    found = subject.solve(M, b)
    assert not bool(found.converged[1]) or found.doubt, "a singular system without a solution is called solved"
    assert bool(found.converged[1]) or found.reason, "a singular system without a solution fails without a reason"
    keep = torch.tensor([0, 2], device="cpu")
    _solved(_rows(found, keep), M[keep], b[keep], subject.accuracy, "the samples beside a singular one")


@check("Let exceptions of products pass, and Ctrl-C (KeyboardInterrupt): catch only your own, never a bare `except`.")
def errors_of_the_products_surface(subject: LinearSubject) -> None:
    """An exception that a product raises (it evaluates the user's function) arrives as it was raised."""
    for error in (own("of the user") for own in ERRORS):
        A = subject.products(subject.matrices(), error=error).operator
        try:
            subject.answer(A, subject.right_sides(3, 5))
        except ERRORS:
            continue
        raise AssertionError(f"the {type(error).__mro__[1].__name__} that a product raised was swallowed")


# --------------------------------------------------------------------------------------------------------------- batches
@check(
    "NaN spreads over the batch, or is called a solution: work row by row, and call converged what is finite and small.",
)
def nan_stays_in_its_sample(subject: LinearSubject) -> None:
    """A sample with NaN in its matrix, or in its right-hand side, fails alone."""
    keep = torch.tensor([0, 2], device="cpu")
    for where in ("matrix", "right-hand side"):
        M, b = subject.matrices(), subject.right_sides(3, 5)
        (M if where == "matrix" else b)[1] = torch.nan
        found = subject.solve(M, b)
        assert not bool(found.converged[1]), f"NaN in the {where} of a sample: it is called solved"
        _converged(found, f"NaN in the {where} of a sample ({found.reason})", keep)
        alone = subject.solve(M[keep], b[keep])
        close(found.x[keep], alone.x, 1e3 * subject.accuracy + 1e-12, f"NaN in the {where} of a sample: the others")


@check("Step lengths, norms and tests are those of a row (dim=1, keepdim=True), never of the whole matrix.")
def batch_equals_loop(subject: LinearSubject) -> None:
    """A batch of systems in units of their own gives what each of them gives alone."""
    M, b = subject.matrices(4), subject.right_sides(4, 5) * torch.tensor([[1.0], [1e-6], [1e3], [1.0]], device="cpu")
    together = subject.solve(M, b)
    for i in range(4):
        alone, size = subject.solve(M[i : i + 1], b[i : i + 1]), float(b[i].norm())
        allowed = (1e2 * subject.accuracy + 1e-12) * size
        close(together.x[i], alone.x[0], allowed, f"sample {i} of the batch, against the sample alone")
        assert bool(together.converged[i] == alone.converged[0]), f"sample {i} alone: converged is another"


@check("0 / 0 is NaN: a residual of zero is a solution, before anything is divided by it.")
def zero_has_the_solution_zero(subject: LinearSubject) -> None:
    """A right-hand side that is zero, alone or beside another, has the solution zero."""
    M, b = subject.matrices(), subject.right_sides(3, 5)
    for zeros in (torch.tensor([1], device="cpu"), torch.tensor([0, 1, 2], device="cpu")):
        b = b.index_fill(0, zeros, 0.0)
        found = subject.solve(M, b)
        assert bool((found.x[zeros] == 0).all()), f"x is {found.x[zeros].tolist()} for b = 0"
        _converged(found, "right-hand sides of zero")


@check(
    "solve_many has b (k, batch, n) and k * batch rows, the samples running fastest: b.flatten(0, 1) is their order. "
    "Without a method of your own, the base class has one that repeats the operator.",
)
def many_right_hand_sides(subject: LinearSubject) -> None:
    """Several right-hand sides a block, as Jacobians ask for, are solved as one after another."""
    M, b = subject.matrices(), subject.right_sides(4, 3, 5)
    many = subject.solve(M, b)
    single = torch.cat([subject.solve(M, part).x for part in b])
    close(many.x, single, 1e2 * subject.accuracy + 1e-12, "several right-hand sides, against one after another: x")


@check("Nothing may depend on the number of unknowns, or of samples: squeeze() drops a dimension of size one.")
def any_size(subject: LinearSubject) -> None:
    """One unknown, one sample, twenty-five unknowns; and of no samples the solution has none."""
    for batch, n in ((3, 1), (1, 1), (1, 5), (2, 25)):
        M, b = subject.matrices(batch, n), subject.right_sides(batch, n)
        found = subject.solve(M, b)
        if subject.part.exact:
            _solved(found, M, b, subject.accuracy, f"{batch} samples of {n} unknowns")
    subject.solve(subject.matrices(1)[:0], subject.right_sides(0, 5))


@check("Create tensors with b.new_* / *_like, and find what is small by torch.finfo(b.dtype).eps, not by 1e-12.")
def keeps_dtype_and_device(subject: LinearSubject) -> None:
    """float32 and float64 come back as they came, whatever torch's default is."""
    default = torch.get_default_dtype()
    try:
        for dtype, other in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
            torch.set_default_dtype(other)
            M, b = subject.matrices(dtype=dtype), subject.right_sides(3, 5, dtype=dtype)
            found = subject.solve(M, b)
            assert found.x.dtype == dtype, f"{dtype} came back as {found.x.dtype}"
            if subject.part.exact:
                rtol = max(subject.accuracy, torch.finfo(dtype).eps ** (2 / 3))
                _solved(found, M, b, rtol, f"{dtype}")
    finally:
        torch.set_default_dtype(default)


class _Near:
    """A preconditioner: the inverse of the diagonal, counted."""

    def __init__(self, diagonal: Tensor, calls: list[int]) -> None:
        self.diagonal, self.calls = diagonal, calls

    @property
    def T(self) -> _Near:
        """The transposed."""
        return self

    def solve(self, b: Tensor) -> Tensor:
        """``b`` by the diagonal, ``(batch, n)`` or ``(batch, n, k)``."""
        self.calls[0] += 1
        return b / (self.diagonal if b.ndim == 2 else self.diagonal.unsqueeze(-1))


@check(
    "preconditions = True promises that A.preconditioner.solve(r) is used, and that the answer is that of A x = b.",
    lambda solver: bool(solver.preconditions and solver.exact),
)
def uses_a_preconditioner(subject: LinearSubject) -> None:
    """A preconditioner that is there is used, and the solution does not depend on it."""
    M, b, calls = subject.matrices(3, 30), subject.right_sides(3, 30), [0]
    A = subject.products(M).operator
    A.preconditioner = _Near(M.diagonal(dim1=1, dim2=2), calls)
    _solved(subject.answer(A, b), M, b, subject.accuracy, "with a preconditioner")
    assert calls[0] > 0, "the preconditioner is never asked"


add_common_checks(LINEAR_SOLVERS)
for _name in ("gradient_is_exact", "jacobians_in_both_modes", "second_order", "vmap_of_the_gradient"):
    _of = RULES.checks[_name]

    def _through(subject: LinearSubject, run: Callable[[Any], None] = _of.run) -> None:
        run(subject.rule())

    _through.__name__, _through.__doc__ = _name, _of.doc
    check("A derivative is the solution of a system with A or A^T, or of many at once. " + _of.mend, _is_exact)(
        _through
    )


def _residual(M: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return ((M @ x.unsqueeze(-1)).squeeze(-1) - b).norm(dim=1)


def _rows(found: Any, keep: Tensor) -> Any:
    return found._replace(x=found.x[keep], converged=found.converged[keep], reason=found.reason)
