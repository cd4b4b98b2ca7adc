"""For authors of parts: everything that a plugin may use besides ``implicitkit`` itself.

==================================  ==========================================================================
to write                            subclass or use
==================================  ==========================================================================
an iterative method                 :class:`implicitkit.Method`
a black box                         a function, :class:`implicitkit.Found`
a strategy made of solvers          :class:`Solver`: ``run(f, z0, options) -> Outcome``, with :class:`Evaluations`
a problem                           :class:`implicitkit.Problem`
a kind of problem                   :class:`Kind`
a constraint                        :class:`Constraint`
a solver of quadratic programs      :class:`QPSolver`: ``find(data, tol, max_steps) -> QPPoint``
a solver of constrained problems    :class:`Solver` with ``solves="constrained"`` and :class:`Model`
a rule                              :class:`implicitkit.Rule`: ``attach(request)``, a :class:`Request`
a linear solver                     :class:`implicitkit.LinearSolver`, :class:`Operator` and its combinations
==================================  ==========================================================================

Helpers of torch that are hard to get right: :func:`opaque_to_compile`, :func:`has_forward_level`,
:func:`transforms_active`, :func:`modules_held`.  :data:`POLICIES` is what ``on_failure=`` may be.
"""

from implicitkit.compat import has_forward_level, opaque_to_compile, transforms_active
from implicitkit.lifting.reach import modules_held
from implicitkit.operators import BlockStructure, Operator, minus, preconditioned, shifted, single
from implicitkit.problem.base import Problem, Restated
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.constraints import Constraint
from implicitkit.problem.kind import Kind
from implicitkit.problem.qp_data import QPData
from implicitkit.reporting import POLICIES, check_policy
from implicitkit.rule.request import Request
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.black_box import BlackBoxFunction
from implicitkit.solver.catalogue import serves
from implicitkit.solver.constrained.model import Local, Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.judging import Judge
from implicitkit.solver.qp.base import QPSolver
from implicitkit.solver.qp.polish import QPPoint
from implicitkit.system import LevelKernel, System
from implicitkit.trees import Layout

__all__ = [
    "POLICIES",
    "BlackBoxFunction",
    "BlockStructure",
    "ConstrainedMinimisation",
    "Constraint",
    "Evaluations",
    "Judge",
    "Kind",
    "Layout",
    "LevelKernel",
    "Local",
    "Model",
    "Operator",
    "Options",
    "Outcome",
    "Problem",
    "QPData",
    "QPPoint",
    "QPSolver",
    "Request",
    "Restated",
    "Solver",
    "System",
    "check_policy",
    "has_forward_level",
    "minus",
    "modules_held",
    "opaque_to_compile",
    "preconditioned",
    "serves",
    "shifted",
    "single",
    "transforms_active",
]
