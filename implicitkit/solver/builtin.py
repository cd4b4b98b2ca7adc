"""The built-in solvers: importing this module registers every one of them."""

# ruff: noqa: F401

from implicitkit.solver.constrained import (
    augmented_lagrangian,
    block_coordinate_descent,
    filter_interior_point,
    mirror_descent,
    proximal_gradient,
    sqp,
)
from implicitkit.solver.fixed_point import aitken, anderson, continuation, picard, relay
from implicitkit.solver.least_squares import dogleg, gauss_newton, levenberg_marquardt
from implicitkit.solver.minimise import (
    bfgs,
    golden_section,
    gradient_descent,
    lbfgs,
    nelder_mead,
    newton_cg,
    nonlinear_cg,
    torch_optim,
)
from implicitkit.solver.qp import builtin, external
from implicitkit.solver.root import (
    bisection,
    broyden,
    chord,
    df_sane,
    newton,
    newton_krylov,
    pseudo_transient,
    trust_region,
)
