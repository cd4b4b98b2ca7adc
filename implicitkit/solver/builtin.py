"""The built-in solvers: importing this module registers every one of them."""

# ruff: noqa: F401

from implicitkit.solver.constrained import (
    augmented_lagrangian,
    filter_interior_point,
    proximal_gradient,
    sqp,
)
from implicitkit.solver.fixed_point import aitken, anderson, continuation, picard, relay
from implicitkit.solver.least_squares import dogleg, gauss_newton, levenberg_marquardt
from implicitkit.solver.minimise import (
    direct_search,
    gradient_descent,
    newton_cg,
    nonlinear_cg,
    quasi_newton,
    torch_optim,
)
from implicitkit.solver.qp import builtin, external
from implicitkit.solver.root import (
    bisection,
    broyden,
    df_sane,
    newton,
    newton_krylov,
    pseudo_transient,
    trust_region,
)
