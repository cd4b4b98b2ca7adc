r"""For authors of parts: everything that a plugin may use besides ``implicitkit`` itself.

==================================  ==========================================================================
to write                            subclass or use
==================================  ==========================================================================
an iterative method                 :class:`implicitkit.Method`
a black box                         a function, :class:`implicitkit.Found`
a strategy made of solvers          :class:`Solver`: ``run(f, z0, options) -> Outcome``, with :class:`Evaluations`, or a
                                    :class:`Polyalgorithm` of :class:`Stage`\ s
a problem                           :class:`implicitkit.Problem`
a kind of problem                   :class:`Kind`
a constraint                        :class:`Constraint`
a solver of quadratic programs      :class:`QPSolver`: ``find(data, tol, max_steps) -> QPPoint``;
                                    :func:`solve_qp`, :class:`AutoQP`, :class:`InteriorPoint`
what constraints share              :func:`plus`, :data:`DEGENERATE`, :class:`KKT`, :class:`QPJacobian`, :func:`regularity`
a solver of constrained problems    :class:`Solver` with ``solves="constrained"`` and :class:`Model`
a rule                              :class:`implicitkit.Rule`: ``attach(request)``, a :class:`Request`
a linear solver                     :class:`implicitkit.LinearSolver`, :class:`Operator` and its combinations,
                                    :class:`LinearSolution`; sparse factors of another package: :class:`FactorsElsewhere`;
                                    a matrix whose entries are known: :func:`of_entries`, its :class:`Places`
anything made with options          :class:`Configured` refuses the names of options, ``options`` their values
==================================  ==========================================================================

Helpers of torch that are hard to get right: :func:`opaque_to_compile`, :func:`own_graphs`, :func:`has_forward_level`,
:func:`transforms_active`, :func:`modules_held`, :func:`below`, :func:`replaced`, :func:`holds_compiled`,
:func:`refuse_tracing`, :func:`holds`, :func:`despite_inference_mode`.  :data:`POLICIES` is what ``on_failure=`` may be.
"""

from implicitkit.diagnostics.kkt_regularity import Degeneracy, regularity
from implicitkit.foundation import autodiff, options, trees
from implicitkit.foundation.compat import has_forward_level, own_graphs, transforms_active
from implicitkit.foundation.constants import constants
from implicitkit.foundation.errors import DegenerateWarning, warn
from implicitkit.foundation.operators import BlockStructure, Operator, minus, preconditioned, shifted, single
from implicitkit.foundation.options import Configured
from implicitkit.foundation.recording import holds
from implicitkit.foundation.tracers import opaque_to_compile, refuse_tracing
from implicitkit.foundation.trees import Layout
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.lifting.overlay import replaced
from implicitkit.lifting.reach import below, holds_compiled, modules_held
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.conditions.kkt import KKT, SINGULAR
from implicitkit.linear.factors.entries import of_entries
from implicitkit.linear.factors.external import FactorsElsewhere
from implicitkit.problem.base import Problem, Restated
from implicitkit.problem.complementarity import DEGENERATE, check_degenerate, plus, plus_slope, warn_zero_gradient
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.constraints import Constraint
from implicitkit.problem.kind import Kind
from implicitkit.problem.qp_data import QPData
from implicitkit.problem.qp_jacobian import QPJacobian
from implicitkit.problem.sparse_conditions import Places
from implicitkit.reporting import POLICIES, check_policy
from implicitkit.rule.catalogue import get_rule
from implicitkit.rule.request import Request
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.black_box import BlackBox, BlackBoxFunction
from implicitkit.solver.catalogue import get_solver, serves
from implicitkit.solver.constrained.model import Local, Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.continuation import Continuation
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage
from implicitkit.solver.qp.base import QPSolver
from implicitkit.solver.qp.builtin import AutoQP, InteriorPoint
from implicitkit.solver.qp.plain import solve_qp
from implicitkit.solver.qp.polish import QPPoint
from implicitkit.solver.qp.statuses import CLARABEL_ENDS, DAQP_ENDS, SCS_ENDS
from implicitkit.solver.steps.refinement import damped_newton
from implicitkit.solver.verdict.judge import Judge
from implicitkit.system import LevelKernel, System

__all__ = [
    "CLARABEL_ENDS",
    "DAQP_ENDS",
    "DEGENERATE",
    "KKT",
    "POLICIES",
    "SCS_ENDS",
    "SINGULAR",
    "AutoQP",
    "BlackBox",
    "BlackBoxFunction",
    "BlockStructure",
    "Configured",
    "ConstrainedMinimisation",
    "Constraint",
    "Continuation",
    "Degeneracy",
    "DegenerateWarning",
    "Evaluations",
    "FactorsElsewhere",
    "Impatient",
    "InteriorPoint",
    "Judge",
    "Kind",
    "Layout",
    "LevelKernel",
    "LinearSolution",
    "Local",
    "Model",
    "Operator",
    "Options",
    "Outcome",
    "Places",
    "Polyalgorithm",
    "Problem",
    "QPData",
    "QPJacobian",
    "QPPoint",
    "QPSolver",
    "Request",
    "Restated",
    "Solver",
    "Stage",
    "System",
    "autodiff",
    "below",
    "check_degenerate",
    "check_policy",
    "constants",
    "damped_newton",
    "despite_inference_mode",
    "get_rule",
    "get_solver",
    "has_forward_level",
    "holds",
    "holds_compiled",
    "minus",
    "modules_held",
    "of_entries",
    "opaque_to_compile",
    "options",
    "own_graphs",
    "plus",
    "plus_slope",
    "preconditioned",
    "refuse_tracing",
    "regularity",
    "replaced",
    "serves",
    "shifted",
    "single",
    "solve_qp",
    "transforms_active",
    "trees",
    "warn",
    "warn_zero_gradient",
]
