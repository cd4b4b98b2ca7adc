"""Verdicts of the table of convergence that are known to be wrong claims or refused solutions, one by one, and why.

An exception is for one system, precision, solver and start; one that is no longer needed fails the test of its system.
"""

from __future__ import annotations

__all__ = ["EXCEPTIONS", "Key"]

Key = tuple[str, str, str, float]  # system, precision, solver, what its start was multiplied by

_BY_REASON: dict[str, tuple[tuple[str, str, str, tuple[float, ...]], ...]] = {
    "at |z| = 1e5 neighbouring numbers of float32 are 0.008 apart, and F is nothing but that": (
        *(("trigonometric10", "float32", solver, (1e6,)) for solver in
          ("auto", "newton", "trust_region", "broyden", "newton_krylov", "chord", "scipy.root.hybr",
           "scipy.root.lm")),
    ),
    "far out the lower rank of a Jacobian of condition 1e6 is a line of solutions to half the digits of float32": (
        ("variably_dimensioned10", "float32", "scipy.root.hybr", (1e4,)),
        ("watson9", "float32", "scipy.root.lm", (1e2,)),
        ("hammarling2", "float32", "chord", (1e4,)),
    ),
    "|F| is below atol where J is all but singular: the promise is void": (
        ("robertson_closed", "float64", "auto", (1e-4, 1e-2, 1.0)),
        ("robertson_closed", "float64", "broyden", (1e-2,)),
        ("robertson_closed", "float64", "newton_krylov", (1e-4, 1e-2)),
        ("robertson_closed", "float64", "pseudo_transient", (1e-4, 1e-2, 1.0)),
        ("robertson_closed", "float64", "scipy.root.hybr", (1e-2,)),
        ("1e-7 (z^3 - 8)", "float32", "df_sane", (1e4,)),
        ("1e-7 (z^3 - 8)", "float32", "bisection", (1e2, 1e4, 1e6)),
        ("1e-7 (z^3 - 8)", "float32", "chandrupatla", (1e2, 1e4, 1e6)),
        ("Box in three", "float64", "scipy.least_squares.trf", (1e6,)),
        ("Box in three", "float32", "newton", (1e-4,)),
        ("Box in three", "float32", "trust_region", (1e-4, 1e-2)),
        ("Box in three", "float32", "scipy.least_squares.trf", (1e4, 1e6)),
    ),
    "angles of many turns, powers on a line of solutions: refused, since it could be the way to infinity": (
        ("power_flow5", "float32", "trust_region", (1e6,)),
        ("power_flow5", "float32", "newton_krylov", (1e2, 1e4, 1e6)),
        ("power_flow5", "float32", "df_sane", (1e6,)),
        ("power_flow5", "float32", "pseudo_transient", (1e2, 1e4, 1e6)),
    ),
}  # fmt: skip

EXCEPTIONS: dict[Key, str] = {
    (system, dtype, solver, factor): reason
    for reason, rows in _BY_REASON.items()
    for system, dtype, solver, factors in rows
    for factor in factors
}
