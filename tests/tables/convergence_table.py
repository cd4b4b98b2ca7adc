"""Systems for one question: is what is called converged a solution?  Equations, fixed points, minimisations, fits.

Every function is written for one point ``(n,)`` and is batched by ``torch.func.vmap``, so that all starts of a system are
the samples of one solve.  Some have no solution, or only one at infinity; some have maxima, saddles, kinks, jumps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import implicitkit as ik

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from convergence_strangers import strangers

from benchmarks.systems import systems

__all__ = ["FACTORS", "SOLVERS", "Claim", "claims"]

#: Starts over twelve orders of magnitude: what the system's own start is multiplied by.
FACTORS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
KINDS = {
    "root": ik.Root,
    "steady_state": ik.SteadyState,
    "fixed_point": ik.FixedPoint,
    "argmin": ik.Argmin,
    "least_squares": ik.LeastSquares,
}
_EQUATIONS = ("auto", "newton", "trust_region", "broyden", "newton_krylov", "df_sane", "chord", "pseudo_transient",
              "scipy.root.hybr", "scipy.root.lm", "scipy.root.broyden1")  # fmt: skip
_SCALAR = (
    "bisection",
    "chandrupatla",
    "scipy.root_scalar.brentq",
    "scipy.root_scalar.newton",
    "scipy.root_scalar.toms748",
)
#: The named solvers of each kind of problem; those of scalar equations besides where there is one unknown.
SOLVERS = {
    "root": _EQUATIONS,
    "steady_state": (*_EQUATIONS, "integrate"),
    "fixed_point": ("auto", "picard", "anderson", "broyden", "aitken", "newton", "scipy.root.anderson", "scipy.root.hybr"),
    "argmin": ("auto", "lbfgs", "bfgs", "newton_cg", "gradient_descent", "newton", "trust_region", "df_sane",
               "scipy.minimize.BFGS", "scipy.minimize.trust-exact", "scipy.root.hybr"),
    "least_squares": ("auto", "levenberg_marquardt", "gauss_newton", "lbfgs", "newton_cg", "newton", "trust_region",
                      "scipy.least_squares.trf", "scipy.least_squares.lm", "scipy.minimize.L-BFGS-B"),
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A system and its start, float64.

    Attributes:
        kind: of the problem. function: of one point, ``(n,)``: residual, map, objective or residual vector.
        within: no solution has a larger component.
        solutions: all there are, for functions with jumps and kinks, where the oracle of derivatives cannot be asked.
    """

    name: str
    kind: str
    function: Callable[[Tensor], Tensor]
    start: Tensor
    solutions: tuple[float, ...] | None = None
    within: float = torch.inf

    @property
    def solvers(self) -> tuple[str, ...]:
        """Every named solver that is tried."""
        more = _SCALAR if self.kind in ("root", "steady_state") and self.start.numel() == 1 else ()
        return SOLVERS[self.kind] + more

    def starts(self, dtype: torch.dtype) -> Tensor:
        """One row for each of :data:`FACTORS`; a start at the origin becomes ``(factor, ..., factor)``."""
        origin = not bool(self.start.any())
        base = torch.ones_like(self.start) if origin else self.start
        return torch.stack([factor * base for factor in FACTORS]).to(dtype)

    def problem(self) -> ik.Problem:
        """The problem on a batch of points, in the precision of the point (constants are float64)."""
        batched = torch.func.vmap(self.function)

        def function(z: Tensor) -> Tensor:
            return batched(z.double()).to(z.dtype)

        return KINDS[self.kind](function)

    def residual(self, z: Tensor) -> Tensor:
        """What vanishes at a solution, at one float64 point."""
        if self.kind == "fixed_point":
            return self.function(z) - z
        if self.kind == "argmin":
            return torch.func.grad(self.function)(z)
        if self.kind == "least_squares":
            return torch.func.grad(lambda y: 0.5 * self.function(y).square().sum())(z)
        return self.function(z)

    def jacobian(self, z: Tensor) -> Tensor:
        """Its derivative."""
        return torch.func.jacrev(self.residual)(z)


_table: list[Claim] = []


def _vector(values: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(values if isinstance(values, tuple) else (values,), dtype=torch.float64)


def _add(
    kind: str,
    name: str,
    start: float | tuple[float, ...],
    function: Callable[[Tensor], Tensor],
    solutions: tuple[float, ...] | None = None,
    within: float = torch.inf,
) -> None:
    _table.append(Claim(name, kind, function, _vector(start), solutions, within))


def claims() -> tuple[Claim, ...]:
    """All of them: the systems of the literature, those below, and the strangers."""
    if not _table:
        _literature()
        _scalars()
        _equations()
        _fixed_points()
        _minimisations()
        _fits()
        for kind, name, start, function, solutions, within in strangers():
            _table.append(Claim(name, kind, function, _vector(start), solutions, within))
    return tuple(_table)


def _literature() -> None:
    for s in systems("mgh", "classic", "equilibrium", "engineering"):
        if not s.batch_dims and s.size <= 60:
            _table.append(Claim(s.name, s.kind, lambda z, s=s: s.function(z, s.theta), s.start))


def _scalars() -> None:
    e = torch.exp
    for name, f, start in (
        ("exp = 2", lambda z: e(z) - 2, 3.0),
        ("exp = 2, units of 1e12", lambda z: 1e12 * (e(z) - 2), 3.0),
        ("exp = 2, units of 1e-9", lambda z: 1e-9 * (e(z) - 2), 3.0),
        ("exp(-z) = 2", lambda z: e(-z) - 2, 3.0),
        ("z^2 = 2", lambda z: z**2 - 2, 1.0),
        ("z^3 = 2", lambda z: z**3 - 2, 1.0),
        ("z^5 = 1", lambda z: z**5 - 1, 2.0),
        ("z^3 - 2 z - 5", lambda z: z**3 - 2 * z - 5, 2.0),
        ("z^3 - 2 z + 2, cycles", lambda z: z**3 - 2 * z + 2, 1.0),
        ("cos z = z", lambda z: torch.cos(z) - z, 1.0),
        ("sin z = 1/2", lambda z: torch.sin(z) - 0.5, 1.0),
        ("tanh z = 1/2", lambda z: torch.tanh(z) - 0.5, 1.0),
        ("atan z = 1", lambda z: torch.atan(z) - 1, 1.0),
        ("atan z = 2, none", lambda z: torch.atan(z) - 2, 1.0),
        ("z e^z = 1", lambda z: z * e(z) - 1, 1.0),
        ("z e^-z, also at infinity", lambda z: z * e(-z), 2.0),
        ("1/z = 1e-3", lambda z: 1 / z - 1e-3, 1.0),
        ("1/z, at infinity", lambda z: 1 / z, 1.0),
        ("e^-z, at infinity", lambda z: e(-z), 1.0),
        ("sqrt(1 + z^2) - z, at infinity", lambda z: torch.sqrt(1 + z**2) - z, 1.0),
        ("1/(1 + z^2), at infinity", lambda z: 1 / (1 + z**2), 1.0),
        ("z^2 + 1, none", lambda z: z**2 + 1, 1.0),
        ("e^z + 1, none", lambda z: e(z) + 1, 1.0),
        ("(z - 2)^2, double", lambda z: (z - 2) ** 2, 1.0),
        ("(z - 1)^3, triple", lambda z: (z - 1) ** 3, 2.0),
        ("z^3, triple at zero", lambda z: z**3, 1.0),
        ("sin z, zero", lambda z: torch.sin(z), 1.0),
        ("e^z - 1, zero", lambda z: e(z) - 1, 1.0),
        ("1e8 (e^z - 1), zero", lambda z: 1e8 * (e(z) - 1), 1.0),
        ("1e10 ((z - 1)^2 - 1), zero", lambda z: 1e10 * ((z - 1) ** 2 - 1), 0.3),
        ("1e-7 (z^3 - 8)", lambda z: 1e-7 * (z**3 - 8), 1.0),
        ("z = 1e6", lambda z: z - 1e6, 1.0),
        ("z^3 = 1e18", lambda z: z**3 - 1e18, 1.0),
        ("z = 1e-8", lambda z: 1e8 * z - 1, 1.0),
        ("sign(z) + 1/2, a jump", lambda z: torch.sign(z) + 0.5 + 0 * z, 1.0),
        ("e^z with a jump at 1", lambda z: e(z) + torch.where(z > 1, 5.0, -5.0), 3.0),
        ("|z| + 1, a kink", lambda z: z.abs() + 1, 1.0),
        ("|z| - 1", lambda z: z.abs() - 1, 0.5),
    ):
        known = {"|z| - 1": (-1.0, 1.0), "z e^-z, also at infinity": (0.0,)}.get(name)
        if known is None and any(word in name for word in ("jump", "|", "none", "at infinity")):
            known = ()
        _add("root", name, start, f, known)
    for eccentricity in (0.1, 0.99):
        for anomaly in (0.01, 3.0):
            _add(
                "root",
                f"Kepler {eccentricity} {anomaly}",
                1.0,
                lambda z, k=eccentricity, m=anomaly: z - k * torch.sin(z) - m,
            )


def _economy(seed: int, goods: int = 3) -> Callable[[Tensor], Tensor]:
    """Excess demand of a CES exchange economy in log prices; demand can vanish with prices at infinity only."""
    g = torch.Generator().manual_seed(seed)
    a = (torch.rand(4, goods + 1, generator=g, dtype=torch.float64) + 0.1) ** 0.3
    W = torch.rand(4, goods + 1, generator=g, dtype=torch.float64) * 3

    def excess(logp: Tensor) -> Tensor:
        p = torch.cat([logp.exp(), logp.new_ones(1)])
        numerator = a * p ** (-0.3)
        return (numerator * (W * p).sum(-1, keepdim=True) / (numerator * p).sum(-1, keepdim=True) - W).sum(0)[:-1]

    return excess


def _equations() -> None:
    for seed in range(6):
        _table.append(Claim(f"economy {seed}", "root", _economy(seed), _vector((0.0, 0.0, 0.0)), within=15.0))
    H = torch.tensor([[1 / (i + j + 1) for j in range(6)] for i in range(6)], dtype=torch.float64)
    small = torch.tensor([1.0, 1e-6], dtype=torch.float64)
    for name, start, f in (
        ("Hilbert", (1.0,) * 6, lambda z: H @ z - H.sum(1)),
        ("rows of different units", (2.0, 2.0), lambda z: torch.stack([1e8 * (z[0] - 1), 1e-4 * (z[1] ** 3 - 8)])),
        ("unknowns of different units", (1.0, 1e-6), lambda z: (z / small) ** 3 - 8),
        ("one at zero", (1.0, 1.0), lambda z: torch.stack([torch.exp(z[0]) - 2, torch.sin(z[1]) + z[1] * z[0]])),
        ("one at infinity", (1.0, 1.0), lambda z: torch.stack([torch.exp(z[0]) - 2, torch.exp(-z[1])])),
        (
            "exp in five",
            (1.0,) * 5,
            lambda z: torch.exp(z) + 0.1 * z.sum() - torch.arange(2.0, 7.0, dtype=torch.float64),
        ),
        ("product and sum", (1.0, 3.0), lambda z: torch.stack([z[0] * z[1] - 2, z[0] + z[1] - 3])),
        ("circle and line, none", (1.0, 1.0), lambda z: torch.stack([(z**2).sum() - 1, z[0] + z[1] - 3])),
        ("circle and tangent", (1.0, 0.5), lambda z: torch.stack([(z**2).sum() - 2, z[0] + z[1] - 2])),
        (
            "all at zero, big terms",
            (1.0, 1.0),
            lambda z: 1e6 * torch.stack([(z[0] - 1) ** 2 - 1 + z[1], torch.sin(z[1]) - z[0]]),
        ),
        ("homogeneous of degree zero", (1.0, 2.0), lambda z: torch.stack([z[0] / z[1] - 3, z[1] / z[0] - 1 / 3])),
    ):
        _add("root", name, start, f)


def _fixed_points() -> None:
    g = torch.Generator().manual_seed(0)
    W = torch.randn(4, 4, generator=g, dtype=torch.float64) * 0.3
    x = torch.randn(4, generator=g, dtype=torch.float64)
    for name, start, f in (
        ("cos", 1.0, torch.cos),
        ("half of it, and one", 1.0, lambda z: 0.5 * z + 1),
        ("0.999 z + 1", 1.0, lambda z: 0.999 * z + 1),
        ("1e-6 (cos of 1e6 z)", 1e-6, lambda z: 1e-6 * torch.cos(1e6 * z)),
        ("z / 2, zero", 1.0, lambda z: 0.5 * z),
        ("sin z / 2, zero", 1.0, lambda z: 0.5 * torch.sin(z)),
        ("2 z + 1, expands", 1.0, lambda z: 2 * z + 1),
        ("z + 1, none", 1.0, lambda z: z + 1),
        ("sqrt(z^2 + 1), none", 1.0, lambda z: torch.sqrt(z * z + 1)),
        ("z + e^-z, none", 1.0, lambda z: z + torch.exp(-z)),
        ("log(1 + e^z), none", 1.0, torch.nn.functional.softplus),
        ("z^2 + 1, none (fixed)", 1.0, lambda z: z * z + 1),
        ("e^-z (fixed)", 1.0, lambda z: torch.exp(-z)),
        ("Babylonian", 1.0, lambda z: 0.5 * (z + 2 / z)),
        ("logistic 2.8", 0.3, lambda z: 2.8 * z * (1 - z)),
        ("logistic 3.4", 0.3, lambda z: 3.4 * z * (1 - z)),
        ("tanh in four", (0.1,) * 4, lambda z: torch.tanh(W @ z + x)),
        ("runaway beside cos", (1.0, 1.0), lambda z: torch.stack([torch.sqrt(z[0] ** 2 + 1), torch.cos(z[1])])),
        ("shift beside halves", (1.0, 1.0), lambda z: torch.stack([z[0] + 1e-3, 0.5 * z[1] + 1])),
        ("two scales", (1.0, 1.0), lambda z: torch.stack([0.5 * z[0] + 1e6, 0.5 * torch.cos(z[1])])),
    ):
        _add("fixed_point", name, start, f, () if "none" in name or "shift" in name or "runaway" in name else None)


def _minimisations() -> None:
    cos = torch.cos
    g = torch.Generator().manual_seed(1)
    A = torch.randn(12, 4, generator=g, dtype=torch.float64)
    b = torch.randn(12, generator=g, dtype=torch.float64)
    scales = torch.tensor([1.0, 1e2, 1e4], dtype=torch.float64)
    for name, start, f in (
        ("Rosenbrock", (-1.2, 1.0), lambda z: 100 * (z[1] - z[0] ** 2) ** 2 + (1 - z[0]) ** 2),
        (
            "Beale",
            (1.0, 1.0),
            lambda z: (
                (1.5 - z[0] + z[0] * z[1]) ** 2
                + (2.25 - z[0] + z[0] * z[1] ** 2) ** 2
                + (2.625 - z[0] + z[0] * z[1] ** 3) ** 2
            ),
        ),
        ("Himmelblau", (1.0, 1.0), lambda z: (z[0] ** 2 + z[1] - 11) ** 2 + (z[0] + z[1] ** 2 - 7) ** 2),
        ("Booth", (1.0, 2.0), lambda z: (z[0] + 2 * z[1] - 7) ** 2 + (2 * z[0] + z[1] - 5) ** 2),
        ("Styblinski-Tang", (0.3, -0.2), lambda z: 0.5 * (z**4 - 16 * z**2 + 5 * z).sum()),
        ("sum of cosines", (0.1, 0.1), lambda z: cos(z).sum()),
        ("double well, symmetric start", (0.0, 1.0), lambda z: z[0] ** 4 / 4 - z[0] ** 2 / 2 + z[1] ** 2 / 2),
        ("monkey saddle with walls", (0.0, 1.0), lambda z: z[0] ** 3 - 3 * z[0] * z[1] ** 2 + (z**4).sum()),
        ("log cosh", (2.0, 1.0), lambda z: torch.log(torch.cosh((z - 1).clamp(-300, 300))).sum()),
        ("quadratic of condition 1e4", (1.0, 1.0, 1.0), lambda z: 0.5 * (scales * (z - 2) ** 2).sum()),
        ("1e8 quadratic", (1.0, 1.0, 1.0), lambda z: 1e8 * ((z - 2) ** 2).sum()),
        ("quadratic at zero", (1.0, -1.0), lambda z: (z**2).sum() + z[0] * z[1]),
        ("quartic at zero", (1.0, 1.0), lambda z: (z**4).sum()),
        (
            "logistic regression",
            (0.0,) * 4,
            lambda z: torch.nn.functional.softplus(A @ z).sum() - (A @ z)[:6].sum() + 0.05 * (z**2).sum(),
        ),
        ("sum, unbounded", (1.0, 1.0, 1.0), lambda z: z.sum()),
        ("-z^2, unbounded", (1.0, 1.0), lambda z: -(z**2).sum()),
        ("-z^2 + z^4/100", (0.0, 0.0), lambda z: -(z**2).sum() + 0.01 * (z**4).sum()),
        ("z^3, unbounded", (0.5,), lambda z: (z**3).sum()),
        ("z^3, unbounded, in two", (0.5, 0.3), lambda z: (z**3).sum()),
        ("z^3 + z^4, an inflection", (1.0,), lambda z: (z**3 + z**4).sum()),
        ("e^z, at infinity", (1.0, 1.0), lambda z: torch.exp(z).sum()),
        ("Gaussian well", (0.5, 0.5), lambda z: -torch.exp(-(z**2).sum())),
        ("hyperbolic saddle, unbounded", (1.0, 1.0), lambda z: z[0] ** 2 - z[1] ** 2),
        (
            "Powell singular",
            (3.0, -1.0, 0.0, 1.0),
            lambda z: (
                (z[0] + 10 * z[1]) ** 2 + 5 * (z[2] - z[3]) ** 2 + (z[1] - 2 * z[2]) ** 4 + 10 * (z[0] - z[3]) ** 4
            ),
        ),
    ):
        known = {"Gaussian well": (0.0,), "e^z, at infinity": (), "z^3 + z^4, an inflection": (-0.75,)}.get(name)
        known = () if name.startswith("z^3, ") else known
        # one is clamped beyond: a plateau; the minima of two are known, and far out their valleys are rounding
        within = {"log cosh": 300.0, "Rosenbrock": 1e3, "Beale": 1e3}.get(name, torch.inf)
        _add("argmin", name, start, f, known, within)
    _add("argmin", "hinge", (0.0,) * 4, lambda z: torch.relu(A @ z - b).sum() + 0.5 * (z**2).sum(), ())


def _fits() -> None:
    t = torch.arange(1, 17, dtype=torch.float64)
    meyer = torch.tensor([34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307,
                          2872], dtype=torch.float64)  # fmt: skip
    j = torch.arange(1, 11, dtype=torch.float64)
    bard = torch.tensor([0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39],
                        dtype=torch.float64)  # fmt: skip
    u = torch.arange(1, 16, dtype=torch.float64)
    v, w = 16 - u, torch.minimum(u, 16 - u)
    ky = torch.tensor([0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246],
                      dtype=torch.float64)  # fmt: skip
    ku = torch.tensor([4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625], dtype=torch.float64)
    s = torch.linspace(0, 2, 15, dtype=torch.float64)
    noisy = 2 * torch.exp(-1.3 * s) + 0.05 * torch.sin(17 * s)
    X = torch.stack([torch.ones_like(s), s, s**2], 1)
    ten = torch.arange(1, 11, dtype=torch.float64)
    tenth = 0.1 * ten
    fifth = torch.arange(1, 21, dtype=torch.float64) / 5
    for name, start, f in (
        ("Meyer", (0.02, 4000.0, 250.0), lambda z: z[0] * torch.exp(z[1] / (45 + 5 * t + z[2])) - meyer),
        ("variably dimensioned fit", tuple(1 - k / 10 for k in range(1, 11)),
         lambda z: torch.cat([z - 1, (j * (z - 1)).sum().view(1), ((j * (z - 1)).sum() ** 2).view(1)])),
        ("Bard", (1.0, 1.0, 1.0), lambda z: bard - (z[0] + u / (v * z[1] + w * z[2]))),
        ("Kowalik-Osborne", (0.25, 0.39, 0.415, 0.39),
         lambda z: ky - z[0] * (ku**2 + ku * z[1]) / (ku**2 + ku * z[2] + z[3])),
        ("exponential with noise", (1.0, -1.0), lambda z: z[0] * torch.exp(z[1] * s) - noisy),
        ("line through a curve", (0.0, 0.0, 0.0), lambda z: X @ z - noisy),
        ("Box in three", (0.0, 10.0, 20.0), lambda z: torch.exp(-tenth * z[0]) - torch.exp(-tenth * z[1])
         - z[2] * (torch.exp(-tenth) - torch.exp(-ten))),
        ("Jennrich-Sampson", (0.3, 0.4), lambda z: 2 + 2 * ten - torch.exp(ten * z[0]) - torch.exp(ten * z[1])),
        ("Brown-Dennis", (25.0, 5.0, -5.0, -1.0), lambda z: (z[0] + fifth * z[1] - torch.exp(fifth)) ** 2
         + (z[2] + torch.sin(fifth) * z[3] - torch.cos(fifth)) ** 2),
        ("Freudenstein-Roth fit", (0.5, -2.0), lambda z: torch.stack([-13 + z[0] + ((5 - z[1]) * z[1] - 2) * z[1],
                                                                     -29 + z[0] + ((z[1] + 1) * z[1] - 14) * z[1]])),
        ("Rosenbrock fit", (-1.2, 1.0), lambda z: torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])),
        ("sine at a maximum", (0.1,), lambda z: torch.stack([torch.cos(z[0]), 0.1 * torch.cos(z[0])])),
        ("no solution in two", (1.0, 1.0), lambda z: torch.stack([z[0] - 1, z[0] + 1, 1e-3 * z[1]])),
        ("decay at infinity", (1.0,), lambda z: torch.exp(-z * s[1:6])),
    ):  # fmt: skip
        # beyond, exponentials have underflowed, or are 1: plateaus
        within = {"Box in three": 1e3, "exponential with noise": 1e3, "Meyer": 1e10}.get(name, torch.inf)
        known = () if "infinity" in name else None
        _table.append(Claim(name, "least_squares", f, _vector(start), known, within))
