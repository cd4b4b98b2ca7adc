"""Every linear solver, rule and solver of programs passes its suite, and each wrong toy is found out in one way."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import LinearSolution
from implicitkit.testing import SolverCheck, check_linear_solver, check_rule, check_solver

_ELSEWHERE = ("cholmod", "pardiso", "piqp", "proxqp")  # need packages that need not be there


@pytest.mark.one_in(3)
@ik.testing.parametrize_with_checks([n for n in ik.linear_solvers() if n not in _ELSEWHERE], kind="linear_solvers")
def test_linear_solvers(solver: Any, check: SolverCheck) -> None:
    check(solver)


@pytest.mark.one_in(2)
@ik.testing.parametrize_with_checks([name for name in ik.rules() if name != "shine"], kind="rules")
def test_rules(solver: Any, check: SolverCheck) -> None:
    check(solver)


def test_a_rule_that_needs_a_certain_solver() -> None:
    assert check_rule("shine", solver=ik.Broyden(keep_inverse=True)).passed


@pytest.mark.one_in(3)
@ik.testing.parametrize_with_checks(
    [
        "filter_interior_point",
        "sqp",
        "projected_gradient",
        "block_coordinate_descent",
        "scipy.lbfgsb",
        "scipy.slsqp",
        "qp",
        "interior_point",
        "daqp",
        "clarabel",
        "osqp",
    ]
)
def test_solvers_of_programs(solver: Any, check: SolverCheck) -> None:
    check(solver)


# ------------------------------------------------------------------------------------------------------ linear solvers
@dataclass(frozen=True)
class Direct(ik.LinearSolver):
    """Right, by dense factors."""

    matrix_free: ClassVar[bool] = False

    def x(self, A: Any, b: Tensor) -> Tensor:
        return torch.linalg.solve_ex(A.dense(), b.unsqueeze(2))[0].squeeze(2)

    def figures(self, A: Any, x: Tensor, b: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        norm = (A.mv(x) - b).norm(dim=1)
        return norm, norm <= bound + 1e-13 * b.norm(dim=1)

    def solve(self, A: Any, b: Tensor, *, rtol: float, atol: float, max_steps: int | None = None) -> LinearSolution:
        x = torch.where((b == 0).all(1, keepdim=True), 0.0, self.x(A, b))
        norm, converged = self.figures(A, x, b, atol + rtol * b.norm(dim=1))
        reason = "" if bool(converged.all()) else "the matrix is singular"
        return LinearSolution(x, norm, torch.zeros_like(norm, dtype=torch.int64), converged, reason)


class Bare(Direct):
    """No ``LinearSolution``."""

    def solve(self, A: Any, b: Tensor, **options: Any) -> Any:
        return self.x(A, b)


class Negative(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return -super().x(A, b)


class Untransposed(Direct):
    """Keeps the matrix of the first operator that it sees."""

    seen: ClassVar[list[Any]] = []

    def x(self, A: Any, b: Tensor) -> Tensor:
        A = next((S for S in self.seen if S.like.shape == A.like.shape and S.like.dtype == A.like.dtype), A)
        self.seen[:] = [A]
        return super().x(A, b)


class ClaimsAll(Direct):
    def figures(self, A: Any, x: Tensor, b: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        norm, converged = super().figures(A, x, b, bound)
        return norm, torch.ones_like(converged)


class ClaimsNothing(Direct):
    def figures(self, A: Any, x: Tensor, b: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        norm, converged = super().figures(A, x, b, bound)
        return norm, torch.zeros_like(converged)


class TellsOfNoResidual(Direct):
    def figures(self, A: Any, x: Tensor, b: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        norm, converged = super().figures(A, x, b, bound)
        return norm.nan_to_num(1.0) * 0 + 1, converged


class Raises(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return torch.linalg.solve(A.dense(), b)


class SpreadsNaN(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return super().x(A, b) + 0 * A.dense().sum()


class OneUnit(Direct):
    """Adds what is small beside the largest sample."""

    def x(self, A: Any, b: Tensor) -> Tensor:
        return super().x(A, b) + 1e-12 * b.nan_to_num().abs().max()


class DoubleOnly(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return super().x(A, b).double()


class Squeezes(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return torch.linalg.solve_ex(A.dense(), b.unsqueeze(2))[0].squeeze()


class RowsAway(Direct):
    def solve_many(self, A: Any, b: Tensor, **options: Any) -> LinearSolution:
        return super().solve_many(A, b.flip(0), **options)


class WritesIntoB(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        x = super().x(A, b)
        b.mul_(1.0)
        return x


class Prints(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        print("residual", 0.0)
        return super().x(A, b)


class Grows(Direct):
    history: ClassVar[list[float]] = []

    def x(self, A: Any, b: Tensor) -> Tensor:
        self.history.append(0.0)
        return super().x(A, b)


class Random(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return super().x(A, b) * (1 + 1e-7 * torch.rand(1, dtype=b.dtype))


class SharesItsBuffer(Direct):
    kept: ClassVar[dict[Any, Tensor]] = {}

    def solve(self, A: Any, b: Tensor, **options: Any) -> LinearSolution:
        found = super().solve(A, b, **options)
        return found._replace(x=self.kept.setdefault((b.shape, b.dtype), torch.empty_like(b)).copy_(found.x))


class SwallowsInterrupts(Direct):
    def solve(self, A: Any, b: Tensor, **options: Any) -> LinearSolution:
        try:
            return super().solve(A, b, **options)
        except KeyboardInterrupt:
            norm = b.norm(dim=1)
            return LinearSolution(b * 0, norm, torch.zeros_like(norm, dtype=torch.int64), norm < 0, "interrupted")


class SaysYesInNumbers(Direct):
    def figures(self, A: Any, x: Tensor, b: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        norm, converged = super().figures(A, x, b, bound)
        return norm, converged.to(norm)


class OnTheDefaultDevice(Direct):
    def x(self, A: Any, b: Tensor) -> Tensor:
        return super().x(A, b) * torch.ones(b.shape[1], dtype=b.dtype)


class ForgetsItsPreconditioner(Direct):
    preconditions: ClassVar[bool] = True


class SymmetricOnly(Direct):
    """Uses the upper half, and does not say so."""

    def x(self, A: Any, b: Tensor) -> Tensor:
        M = A.dense().triu()
        return torch.linalg.solve_ex(M + M.triu(1).mT, b.unsqueeze(2))[0].squeeze(2)


class SaysSymmetric(SymmetricOnly):
    needs: ClassVar[tuple[str, ...]] = ("symmetric",)


@dataclass(frozen=True)
class Steps(ik.LinearSolver):
    """Right: ``u <- u + (A u - b)``, for ``A = J - I``."""

    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)
    most: int = 200

    def looks(self, A: Any, r: Tensor) -> None:
        return

    def told(self, k: int) -> int:
        return k

    def solve(self, A: Any, b: Tensor, *, rtol: float, atol: float, max_steps: int | None = None) -> LinearSolution:
        x, bound, k = torch.zeros_like(b), atol + rtol * b.norm(dim=1), 0
        r = -b
        while k < (max_steps or self.most) and bool((r.norm(dim=1) > bound).any()):
            x, k = torch.where((r.norm(dim=1) > bound).unsqueeze(1), x + r, x), k + 1
            self.looks(A, r)
            r = A.mv(x) - b
        norm = r.norm(dim=1)
        told = torch.full_like(norm, self.told(k), dtype=torch.int64)
        return LinearSolution(x, norm, told, norm <= bound, "it does not contract")


class CountsNoProducts(Steps):
    def told(self, k: int) -> int:
        return 0


class TwiceTheProducts(Steps):
    def looks(self, A: Any, r: Tensor) -> None:
        A.mv(r)


class FormsTheMatrix(Steps):
    def looks(self, A: Any, r: Tensor) -> None:
        A.dense()


class NeverStops(Steps):
    def solve(self, A: Any, b: Tensor, *, rtol: float, atol: float, max_steps: int | None = None) -> LinearSolution:
        return super().solve(A, b, rtol=1e-14, atol=0.0, max_steps=max_steps)


@dataclass(frozen=True)
class Series(Steps):
    """Right, and an approximation by intention."""

    exact: ClassVar[bool] = False
    most: int = 3

    def solve(self, A: Any, b: Tensor, *, rtol: float, atol: float, max_steps: int | None = None) -> LinearSolution:
        found = super().solve(A, b, rtol=0.0, atol=0.0, max_steps=None)
        return found._replace(converged=found.residual_norm.isfinite())


class OtherWay(Series):
    def solve(self, A: Any, b: Tensor, **options: Any) -> LinearSolution:
        return super().solve(A, -b, **options)


@dataclass(frozen=True)
class Cached(Direct):
    """Right, with a bounded memory."""

    last: dict[str, int] = field(default_factory=dict)

    def x(self, A: Any, b: Tensor) -> Tensor:
        self.last["size"] = A.size
        return super().x(A, b)


RIGHT_LINEAR = [
    Direct(),
    SaysSymmetric(),
    Steps(),
    Series(),
    Cached(),
    ik.linear.GMRES(restart=3),
    ik.linear.CG(),
    ik.linear.LU(),
]
WRONG_LINEAR = [
    ("solves_well_conditioned_systems", Negative()),
    ("solves_transposed_systems", Untransposed()),
    ("tells_of_failure", ClaimsAll()),
    ("solves_well_conditioned_systems", ClaimsNothing()),
    ("tells_the_residual", TellsOfNoResidual()),
    ("tells_of_failure", Raises()),
    ("nan_stays_in_its_sample", SpreadsNaN()),
    ("batch_equals_loop", OneUnit()),
    ("keeps_dtype_and_device", DoubleOnly()),
    ("any_size", Squeezes()),
    ("many_right_hand_sides", RowsAway()),
    ("is_deterministic", WritesIntoB()),
    ("leaves_the_process_alone", Prints()),
    ("grows_no_state", Grows()),
    ("is_deterministic", Random()),
    ("uses_a_preconditioner", ForgetsItsPreconditioner()),
    ("solves_well_conditioned_systems", SymmetricOnly()),
    ("counts_products", CountsNoProducts()),
    ("counts_products", TwiceTheProducts()),
    ("needs_no_matrix", FormsTheMatrix()),
    ("honours_tolerance", NeverStops()),
    ("comes_nearer", OtherWay()),
    ("is_deterministic", SharesItsBuffer()),
    ("errors_of_the_products_surface", SwallowsInterrupts()),
    ("solves_well_conditioned_systems", SaysYesInNumbers()),
    ("names_a_device", OnTheDefaultDevice()),
]


# --------------------------------------------------------------------------------------------------------------- rules
@dataclass(frozen=True)
class Plain(ik.Rule):
    """Right."""

    def attach(self, request: Any) -> Any:
        return self.after(*request.solve("lu"))

    def after(self, z: Tensor, stats: Any) -> Any:
        return z, stats


class ByProducts(Plain):
    def attach(self, request: Any) -> Any:
        return request.solve("gmres")


class FixedPointsOnly(Plain):
    needs: ClassVar[tuple[str, ...]] = ("fixed_point",)


class Refuses(Plain):
    """Right: what it cannot differentiate it refuses."""

    def attach(self, request: Any) -> Any:
        if not request.system.problem.kind.iteration:
            raise ik.CapabilityError("fixed points only")
        return super().attach(request)


@dataclass(frozen=True)
class Listed(Plain):
    """Right, with an option that has no hash."""

    of: list[int] = field(default_factory=list)


class RefusesAll(Plain):
    def attach(self, request: Any) -> Any:
        raise ik.CapabilityError("nothing suits me")


class Loose(Plain):
    def attach(self, request: Any) -> Any:
        return request.solve("gmres", rtol=1e-1)


class SaysLoose(Loose):
    exact: ClassVar[bool] = False


class Halved(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return 0.5 * z + 0.5 * z.detach(), stats


class UphillAndSaysSo(Plain):
    exact: ClassVar[bool] = False

    def after(self, z: Tensor, stats: Any) -> Any:
        return 2 * z.detach() - z, stats


class Detached(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return z.detach(), stats


class Moves(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return z + 1e-3, stats


class AlwaysAGraph(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return z + 0 * torch.zeros(1, dtype=z.dtype, requires_grad=True), stats


class _Once(torch.autograd.Function):
    """The identity, whose derivative is a constant."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.detach()


class FirstOrderOnly(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return _Once.apply(z), stats


class MixesSamples(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return z + 1e-3 * (z - z.detach()).mean(0), stats


class SinglePrecision(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return z.float().to(z), stats


class PrintsRule(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        print("attached")
        return z, stats


class GrowsRule(Plain):
    log: ClassVar[list[int]] = []

    def after(self, z: Tensor, stats: Any) -> Any:
        self.log.append(len(z))
        return z, stats


class Holds(Plain):
    held: ClassVar[list[Any]] = []

    def attach(self, request: Any) -> Any:
        self.held[:] = [request]
        return super().attach(request)


class Noise(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        return z + 1e-7 * torch.rand_like(z) * (z - z.detach()), stats


class Reseeds(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        torch.manual_seed(0)
        return z, stats


class Silences(Plain):
    def after(self, z: Tensor, stats: Any) -> Any:
        warnings.simplefilter("ignore")
        return z, stats


class ByASeries(Plain):
    """A series of fixed points, of everything."""

    def attach(self, request: Any) -> Any:
        return request.solve(ik.linear.NeumannSeries(terms=2))


class ForgetsCaptured(Plain):
    """Only the first argument has a derivative."""

    def attach(self, request: Any) -> Any:
        first = request.system.lifted.from_args
        theta = tuple(t if i < first else t.detach() for i, t in enumerate(request.theta))
        return replace(request, theta=theta).solve("lu")


RIGHT_RULES = [
    Plain(),
    ByProducts(),
    FixedPointsOnly(),
    Refuses(),
    Listed(),
    SaysLoose(),
]
WRONG_RULES = [
    ("gradient_is_exact", Loose()),
    ("gradient_is_exact", Halved()),
    ("gradient_points_the_same_way", UphillAndSaysSo()),
    ("keeps_the_solution", Detached()),
    ("keeps_the_solution", Moves()),
    ("keeps_the_solution", AlwaysAGraph()),
    ("second_order", FirstOrderOnly()),
    ("batch_equals_loop", MixesSamples()),
    ("keeps_the_solution", SinglePrecision()),
    ("leaves_the_process_alone", PrintsRule()),
    ("grows_no_state", GrowsRule()),
    ("keeps_nothing_alive", Holds()),
    ("is_deterministic", Noise()),
    ("leaves_the_process_alone", Reseeds()),
    ("leaves_the_process_alone", Silences()),
    ("gradient_is_exact", ByASeries()),
    ("reaches_captured_tensors", ForgetsCaptured()),
]


# ------------------------------------------------------------------------------------------------- solvers of programs
@dataclass(frozen=True)
class Program(ik.extend.Solver):
    """Right, by the interior-point method that is there."""

    solves: ClassVar[Any] = "quadratic_program"

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        inner = "interior_point" if self.solves == "quadratic_program" else "sqp"
        return self.spoilt(ik.extend.get_solver(inner).run(f, z0, options), f, options)

    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        return found


class Constrained(Program):
    solves: ClassVar[Any] = "constrained"


class BoundsOnly(Constrained):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        if ik.extend.Model(f).count:
            raise ik.CapabilityError("bounds only")
        return found


@dataclass(frozen=True)
class ManySteps(Constrained):
    """Right, in ten times as many steps, with an option that has no hash."""

    of: list[int] = field(default_factory=list)

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        most = options.max_steps or 1000
        found = super().run(f, z0, replace(options, max_steps=max(1, most // 10)))
        found.steps = (10 * found.steps).clamp_max(most)
        return found


class Elsewhere(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.z = found.z + 1e-3
        return found


class OtherSign(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.z = torch.cat([found.z[:, :2], -found.z[:, 2:]], 1)
        return found


class NoMultipliers(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.z = torch.cat([found.z[:, :2], 0 * found.z[:, 2:]], 1)
        return found


class CallsAllSolved(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.status = 0 * found.status
        return found


class CallsNoneSolved(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.status = 0 * found.status + 1
        return found


class OneFailureIsAll(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.status = found.status.amax().expand_as(found.status).clone()
        return found


class RaisesForOne(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        if bool(found.status.any()):
            raise ArithmeticError("primal infeasible")
        return found


class RaisesForUnbounded(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        if bool((found.status == int(ik.Status.UNBOUNDED)).any()):
            raise ArithmeticError("dual infeasible")
        return found


class FirstSampleOnly(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.z = found.z[:1].expand_as(found.z).clone()
        return found


class PrintsProgram(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        print("optimal")
        return found


class GrowsProgram(Program):
    log: ClassVar[list[str]] = []

    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        self.log.append("optimal")
        return found


class RandomProgram(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.z = found.z * (1 + 1e-9 * torch.rand_like(found.z))
        return found


class DefaultDtype(Program):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return found


class StopsEarly(Constrained):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.z = found.z + 0.1 * options.rtol**0.5
        return found


class CountsTooMany(Constrained):
    def spoilt(self, found: Any, f: Any, options: Any) -> Any:
        found.steps = found.steps + 5
        return found


@dataclass(frozen=True)
class OtherSigns(ik.extend.QPSolver):
    """Multipliers of the other sign, of which Newton's steps afterwards made solutions."""

    def find(self, data: Any, tol: float, max_steps: int) -> Any:
        point = ik.extend.InteriorPoint().find(data, tol, max_steps)
        return point._replace(y=-point.y, lam=-point.lam)


@dataclass(frozen=True)
class OtherOrder(ik.extend.QPSolver):
    """Programs in another order."""

    def find(self, data: Any, tol: float, max_steps: int) -> Any:
        point = ik.extend.InteriorPoint().find(data, tol, max_steps)
        return point._replace(z=point.z.flip(0), y=point.y.flip(0), lam=point.lam.flip(0))


RIGHT_PROGRAMS = [Program(), BoundsOnly(), ManySteps()]
WRONG_PROGRAMS = [
    ("finds_known_solutions", Elsewhere()),
    ("multipliers_are_those_of_the_lagrangian", OtherSign()),
    ("multipliers_are_those_of_the_lagrangian", NoMultipliers()),
    ("tells_of_infeasible_samples", CallsAllSolved()),
    ("finds_known_solutions", CallsNoneSolved()),
    ("tells_of_infeasible_samples", OneFailureIsAll()),
    ("tells_of_infeasible_samples", RaisesForOne()),
    ("tells_of_unbounded_samples", RaisesForUnbounded()),
    ("finds_known_solutions", FirstSampleOnly()),
    ("gradient_of_the_solution", NoMultipliers()),
    ("leaves_the_process_alone", PrintsProgram()),
    ("grows_no_state", GrowsProgram()),
    ("is_deterministic", RandomProgram()),
    ("leaves_the_process_alone", DefaultDtype()),
    ("honours_tolerance", StopsEarly()),
    ("honours_max_steps", CountsTooMany()),
    ("finds_points_that_need_little_polish", OtherSigns()),
    ("finds_points_that_need_little_polish", OtherOrder()),
]
CHECKS_OF = {"linear": check_linear_solver, "rule": check_rule, "program": check_solver}
RIGHT = {"linear": RIGHT_LINEAR, "rule": RIGHT_RULES, "program": RIGHT_PROGRAMS}
WRONG = {"linear": WRONG_LINEAR, "rule": WRONG_RULES, "program": WRONG_PROGRAMS}


@pytest.mark.slow  # half a minute; the parts of the library pass the same suites
@pytest.mark.parametrize(("of", "part"), [(of, part) for of, parts in RIGHT.items() for part in parts], ids=repr)
def test_a_right_part_passes(of: str, part: Any) -> None:
    assert CHECKS_OF[of](part).passed


@pytest.mark.parametrize(
    ("of", "name", "part"),
    [(of, *row) for of, rows in WRONG.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_part_is_found_out(of: str, name: str, part: Any, capfd: Any) -> None:
    default = torch.get_default_dtype()
    try:
        report = CHECKS_OF[of](part, checks=[name], raise_on_failure=False)
    finally:
        torch.set_default_dtype(default)
    (result,) = report.results
    assert result.outcome == "failed" and result.message
    assert result.mend in str(report) or "mend: what raises this" in str(report)


@pytest.mark.parametrize(
    ("of", "part", "said", "times"),
    [
        ("linear", Negative(), "solves_well_conditioned_systems", 1),
        ("linear", Bare(), "solves_well_conditioned_systems", 1),
        ("rule", RefusesAll(), "keeps_the_solution", 1),
    ],
    ids=lambda value: value if isinstance(value, (str, int)) else type(value).__name__,
)
def test_one_fault_is_told_once(of: str, part: Any, said: str, times: int) -> None:
    text = str(CHECKS_OF[of](part, raise_on_failure=False))
    assert text.count("saw:") == times and f"as in {said}: mend that first" in text, text


def test_names_of_other_nouns_are_no_solvers() -> None:
    with pytest.raises(ik.UnknownNameError, match="There is a linear solver of that name"):
        check_solver("cholmod")
    with pytest.raises(ValueError, match="kind must be one of"):
        ik.testing.parametrize_with_checks(["lu"], kind="linear")


def test_nan_in_one_program_does_not_end_those_beside_it() -> None:
    assert check_solver("scipy.trust_constr", checks=["nan_stays_in_its_sample"]).passed
