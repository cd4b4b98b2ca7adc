"""Verdicts of the table of convergence that are known to be wrong claims or refused solutions, one by one, and why.

An exception is for one system, precision, solver and start; one that is no longer needed fails the test of its system,
but for those of ``ROUNDED``, which are needed on some machines only.
"""

from __future__ import annotations

__all__ = ["EXCEPTIONS", "ROUNDED", "Key"]

Key = tuple[str, str, str, float]  # system, precision, solver, what its start was multiplied by

_Rows = dict[str, tuple[tuple[str, str, str, tuple[float, ...]], ...]]

#: The last bit of F decides, and that is another one on processors with other instructions.
_BY_ROUNDING: _Rows = {
    "at |z| = 1e5 neighbouring numbers of float32 are 0.008 apart, and F is nothing but that": (
        *(
            ("trigonometric10", "float32", solver, (1e6,))
            for solver in (
                "auto",
                "newton",
                "trust_region",
                "broyden",
                "newton_krylov",
                "chord",
                "pseudo_transient",
                "scipy.root.hybr",
                "scipy.root.lm",
            )
        ),
    ),
    "at |z| = 100 to 1000 a unit in the last place of float32 moves F by 2e-4 to 1e-3, and ten are taken for rounding": (
        *(
            ("trigonometric10", "float32", solver, (1e4,))
            for solver in ("auto", "newton", "newton_krylov", "chord", "scipy.root.hybr")
        ),
        ("trigonometric10", "float32", "auto", (1e2,)),
    ),
    "a saddle whose negative curvature, 3e-5 of the largest, does not show in differences of float32; or |F| at atol": (
        ("Kowalik-Osborne", "float32", "newton", (1e2, 1e6)),
        ("Kowalik-Osborne", "float32", "trust_region", (1e2, 1e4, 1e6)),
    ),
    "far out the lower rank of a Jacobian of condition 1e6 is a line of solutions to half the digits of float32": (
        # where MINPACK ends is another place on each machine
        ("variably_dimensioned10", "float32", "scipy.root.hybr", (1e2, 1e4, 1e6)),
        ("variably_dimensioned10", "float32", "scipy.root.lm", (1e4,)),
        ("variably_dimensioned10", "float32", "scipy.root.broyden1", (1e6,)),
        ("watson9", "float32", "scipy.root.hybr", (1e6,)),
        ("watson9", "float32", "scipy.root.lm", (1e2, 1e4, 1e6)),
    ),
    "a Jacobian that is singular to half the digits: refused, since it could be a way to infinity": (
        ("channel_flow40", "float32", "auto", (1e4,)),
        *(("channel_flow40", "float32", solver, (1e6,)) for solver in ("newton", "chord")),
        ("countercurrent50", "float32", "newton_krylov", (1e-4,)),
    ),
    "beside a double zero at which BDF's steps end on either side, as rounding has it: 600 do not do, 964 may": (
        ("robertson_closed", "float64", "integrate", (1e-4,)),
    ),
    "from 1e-6 beside a solution at zero, where F is rounding of terms that do not vanish with it, and less is asked": (
        ("exponential20", "float64", "newton_krylov", (1e-6,)),
        ("exponential20", "float64", "scipy.root.broyden1", (1e-6,)),
        ("all at zero, big terms", "float64", "df_sane", (1e-6, 1e-4)),
        ("all at zero, big terms", "float64", "chord", (1e-6,)),
        ("all at zero, big terms", "float32", "newton_krylov", (1e-6,)),
    ),
    "beside a singular solution at zero, from 1e-4: a hundred steps more or fewer, as the last bit of the start has it": (
        ("powell_singular", "float32", "scipy.root.broyden1", (1e-4,)),
        ("extended_powell_singular20", "float32", "scipy.root.broyden1", (1e-4, 1e-2)),
        ("powell_stationary", "float32", "scipy.root.broyden1", (1e-6,)),
    ),
}
_BY_REASON: _Rows = {
    "from 1e-6 beside a singular zero two equations are squares, 1e-12 at the start, and come down to a twentieth": tuple(
        (name, "float32", solver, (1e-6,))
        for name in ("powell_singular", "extended_powell_singular20")
        for solver in ("newton_krylov", "scipy.root.broyden1")
    ),
    "at z_1 = 11000 neighbouring frequencies of float32 are 0.001 apart, and the best of them is not told from others": (
        ("sine of unknown frequency", "float32", "levenberg_marquardt", (1e4,)),
    ),
    "a singular solution at the end of a bent valley: the oracle is too slow there to say that it is one": (
        ("two equal exponentials", "float32", "scipy.least_squares.trf", (1e-6, 1e-4)),
        ("two equal exponentials", "float32", "scipy.least_squares.lm", (1e-6,)),
    ),
    "far out in a bent valley of condition 1e20 F is nothing but rounding": (
        ("Beale", "float64", "newton_cg", (1e6,)),
    ),
    "|F| is below atol where J is all but singular: the promise is void": (
        ("Box in three", "float32", "trust_region", (1e-2,)),
    ),
    "a triple root at zero, from 1e-6: that |F| = 1e-17 is small nothing says, and steps towards it are slow": (
        ("tan z = z", "float64", "df_sane", (1e-6, 1e-4)),
        ("tan z = z", "float32", "broyden", (1e-6,)),
        ("tan z = z", "float32", "df_sane", (1e-6,)),
        ("z^3, triple at zero", "float64", "df_sane", (1e-6, 1e-4, 1e-2)),
        ("z^3, triple at zero", "float32", "broyden", (1e-6,)),
        ("z^3, triple at zero", "float32", "df_sane", (1e-6, 1e-4)),
        ("sample19", "float64", "df_sane", (1e-6, 1e-4)),
        ("sample19", "float32", "broyden", (1e-6,)),
        ("sample19", "float32", "df_sane", (1e-6,)),
        ("quartic at zero", "float64", "gradient_descent", (1e-6,)),
        ("quartic at zero", "float64", "df_sane", (1e-6, 1e-4)),
        ("quartic at zero", "float32", "bfgs", (1e-6,)),
        ("quartic at zero", "float32", "newton_cg", (1e-6,)),
        ("quartic at zero", "float32", "df_sane", (1e-6,)),
    ),
    "beside a singular solution at zero, from 1e-6 or 1e-4: the tolerance follows |F| there, and steps are slow": (
        ("powell_singular", "float32", "broyden", (1e-6,)),
        ("powell_singular", "float32", "df_sane", (1e-6,)),
        ("extended_powell_singular20", "float32", "broyden", (1e-6,)),
        ("extended_powell_singular20", "float32", "df_sane", (1e-6,)),
        ("robertson_closed", "float32", "broyden", (1e-6, 1e-4)),
        ("robertson_closed", "float32", "df_sane", (1e-4,)),
        ("robertson_closed", "float32", "scipy.root.broyden1", (1e-4,)),
        ("powell_stationary", "float32", "broyden", (1e-6,)),
        ("powell_stationary", "float32", "newton_krylov", (1e-6, 1e-4)),
        *(("z (1 - z / 1e6), double at zero", "float64", solver, (1e-4,))
          for solver in ("picard", "anderson", "broyden", "aitken", "scipy.root.anderson")),
    ),
    "an equation that holds at the start says nothing of its units: steps towards its double or triple zero are slow": (
        ("extended_cragg_levy48", "float64", "df_sane", (1e-6,)),
        ("robertson_closed", "float64", "pseudo_transient", (1e-2,)),
        ("robertson_closed", "float32", "newton_krylov", (1e-6, 1e-4)),
        ("robertson_closed", "float32", "df_sane", (1e-6,)),
        ("robertson_closed", "float32", "pseudo_transient", (1e-6, 1e-4)),
        ("robertson_closed", "float32", "integrate", (1e-6,)),
    ),
    "an equation that began at a hundredth of another or less has not come down as is asked, and broyden sees |F|": (
        *((name, "float32", "broyden", (1e-4,)) for name in ("hammarling2", "hammarling3")),
        ("chemostat", "float64", "broyden", (1e-4,)),
        ("chemostat", "float32", "broyden", (1e-2,)),
    ),
    "beside a minimum at zero whose sum of squares is 1: what is left of z, 1e-13, does not show in it, and lm ends there": (
        ("no solution in two", "float64", "scipy.least_squares.lm", (1e-6, 1e-4)),
    ),
    "beside a minimum one of whose unknowns is zero: what is left of it, 1e-10, does not show in an objective of 1": (
        ("entropy", "float32", "scipy.minimize.BFGS", (1e-6,)),
    ),
    "beside an equilibrium at zero that repels: it is near in units of one only, and the steps lead away from it": (
        ("logistic 3.4", "float32", "picard", (1e-6,)),
        ("lotka_volterra", "float32", "pseudo_transient", (1e-6,)),
        ("lotka_volterra", "float32", "integrate", (1e-6,)),
    ),
    "at a solution at zero F is rounding of terms that do not vanish with it, and less is asked": (
        ("all at zero, big terms", "float32", "scipy.root.hybr", (1e-2,)),
        ("Rastrigin", "float64", "scipy.minimize.BFGS", (1e-6,)),
        ("Planck", "float32", "scipy.root.broyden1", (1e-4,)),
    ),
    "at |z| = 3e10, where F is 1e-17 of its terms: refused, since it could be the way to infinity": (
        ("tridiagonal50", "float64", "scipy.root.lm", (1e4, 1e6)),
    ),
    "one residual of 16 is zero and the others do not change with z, to 1e-8 of them: in single precision a plateau": (
        ("Meyer", "float32", "newton", (1e4,)),
    ),
    "the exponential underflows: a plateau of zeros far out": (
        ("Meyer", "float64", "gauss_newton", (1e2,)),
        ("Meyer", "float64", "scipy.least_squares.trf", (1e-4,)),
        ("Meyer", "float32", "gauss_newton", (1e-6,)),
    ),
}  # fmt: skip


def _keys(rows: _Rows) -> dict[Key, str]:
    return {
        (system, dtype, solver, factor): reason
        for reason, of in rows.items()
        for system, dtype, solver, factors in of
        for factor in factors
    }


ROUNDED = _keys(_BY_ROUNDING)
EXCEPTIONS = _keys(_BY_REASON) | ROUNDED
