"""Systems of the kind that users bring: poles, plateaus, kinks, flat valleys, extreme units, zeros at infinity.

Rows ``(kind, name, start, function, solutions, within)`` of ``convergence_table``; ``solutions=None``: the oracle finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["strangers"]

Row = tuple[str, str, tuple[float, ...], Callable[[Tensor], Tensor], tuple[float, ...] | None, float]
_INF = torch.inf


def strangers() -> Iterator[Row]:
    """All rows."""
    yield from _scalar_roots()
    yield from _systems()
    yield from _others()


def _scalar_roots() -> Iterator[Row]:
    e = torch.exp
    for name, start, f, solutions in (
        ("(z - 2)/(z^2 + 1), also at infinity", 1.0, lambda z: (z - 2) / (z**2 + 1), (2.0,)),
        ("(z^2 - 2)/(z^4 + 1), also at infinity", 1.0, lambda z: (z**2 - 2) / (z**4 + 1), (2.0**0.5, -(2.0**0.5))),
        ("pole beside the root", 1.0, lambda z: (z - 1) / (z - 1.001), (1.0,)),
        ("tan z = z", 4.4, lambda z: torch.tan(z) - z, None),
        ("log z = 10", 2.0, lambda z: torch.log(z.abs()) - 10, None),
        ("erf z = 1/2", 0.3, lambda z: torch.erf(z) - 0.5, None),
        ("erfc z, at infinity", 1.0, torch.erfc, ()),
        ("exp(-z^4), at infinity", 1.0, lambda z: e(-(z**4)), ()),
        ("exp(-z^20), at infinity", 1.0, lambda z: e(-(z**20)), ()),
        ("exp(-z / 0.026), at infinity", 0.01, lambda z: e(-z / 0.026), ()),
        ("1 - tanh(1000 z), at infinity", 1e-3, lambda z: 1 - torch.tanh(1000 * z), ()),
        ("exp(-z) (2 + sin 5 z), at infinity", 1.0, lambda z: e(-z) * (2 + torch.sin(5 * z)), ()),
        ("z / (1 + |z|)^3, also at infinity", 0.5, lambda z: z / (1 + z.abs()) ** 3, (0.0,)),
        ("unknown of 1e-12", 1e-12, lambda z: (z / 1e-12) ** 3 + z / 1e-12 - 10, None),
        ("unknown of 1e12", 1e12, lambda z: (z / 1e12) ** 3 + z / 1e12 - 10, None),
        ("residual of 1e12", 1.0, lambda z: 1e12 * (z**3 - 8), None),
        ("double root at 1e-3", 0.01, lambda z: (1000 * z - 1) ** 2, None),
        ("Planck", 3.0, lambda z: z - 5 * (1 - e(-z)), None),
        ("diode", 0.5, lambda z: 1e-12 * (e(z / 0.026) - 1) - (5 - z) / 1e3, None),
        ("dose at a plateau", 1.0, lambda z: z**4 / (1 + z**4) - 0.999, (999.0**0.25, -(999.0**0.25))),
        ("steps of a staircase", 0.3, lambda z: torch.floor(z) - 1.5 + 0 * z, ()),
        ("Lorentz peak, no root", 1.0, lambda z: 1 / (1 + (z - 3) ** 2) + 1e-6, ()),
    ):
        yield "root", name, (start,), f, solutions, _INF


def _systems() -> Iterator[Row]:
    def cobb_douglas(logp: Tensor) -> Tensor:  # excess demand of two goods, the third has price one
        p = torch.cat([logp.exp(), logp.new_ones(1)])
        share = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], dtype=logp.dtype)
        owned = torch.tensor([[1.0, 0.0, 2.0], [0.5, 3.0, 0.1]], dtype=logp.dtype)
        return ((share * (owned @ p).unsqueeze(1) / p) - owned).sum(0)[:2]

    for name, start, f in (
        ("Cobb-Douglas", (0.0, 0.0), cobb_douglas),
        (
            "Gaussian beside linear, no root",
            (1.0, 2.0),
            lambda z: torch.stack([torch.exp(-(z[0] ** 4) - z[1] ** 2), z[1] - z[0]]),
        ),
        ("nearly parallel", (1.0, 1.0), lambda z: torch.stack([z[0] + z[1] - 2, z[0] + (1 + 1e-5) * z[1] - 2 - 1e-5])),
        ("oscillating beside linear", (0.5, 0.5), lambda z: torch.stack([torch.sin(3 * z[0]) + z[1] - 1, z[0] - z[1]])),
    ):
        yield "root", name, start, f, () if "no root" in name else None, _INF
    for name, start, f in (
        ("chemostat", (0.5, 2.0),
         lambda z: torch.stack([z[0] * (z[1] / (1 + z[1]) - 0.4), 0.4 * (5 - z[1]) - z[0] * z[1] / (1 + z[1])])),
        ("genetic switch", (2.0, 0.1),
         lambda z: torch.stack([4 / (1 + z[1] ** 2) - z[0], 4 / (1 + z[0] ** 2) - z[1]])),
        ("Michaelis-Menten, none", (1.0,), lambda z: 2 - z / (1 + z.abs())),
    ):  # fmt: skip
        yield "steady_state", name, start, f, () if "none" in name else None, _INF


def _others() -> Iterator[Row]:
    e = torch.exp
    w = torch.tensor([1.0, 1e-2, 1e-4], dtype=torch.float64)
    s = torch.linspace(0.5, 4, 9, dtype=torch.float64)
    titration = 3 * s / (0.7 + s) + 0.02 * torch.cos(7 * s)
    for kind, name, start, f, solutions in (
        ("fixed_point", "z + 1e-3 (1 - z), slow", (0.0,), lambda z: z + 1e-3 * (1 - z), None),
        ("fixed_point", "z (1 - z / 1e6), double at zero", (1.0,), lambda z: z * (1 - z / 1e6), None),
        ("fixed_point", "z + 1 / (1 + z^2), none", (1.0,), lambda z: z + 1 / (1 + z**2), ()),
        ("fixed_point", "2 log(1 + |z|)", (2.0,), lambda z: 2 * torch.log1p(z.abs()), None),
        ("argmin", "flat valley", (3.0, 3.0), lambda z: (z[0] - z[1]) ** 2 + 1e-8 * (z[0] + z[1] - 2) ** 2, None),
        ("argmin", "entropy", (0.3, 0.3, 0.3), lambda z: (e(z) - w * z).sum(), None),
        ("argmin", "sum of |z - 1|, a kink", (0.0, 3.0), lambda z: (z - 1).abs().sum(), (1.0,)),
        ("argmin", "sech, a maximum", (0.0, 0.5), lambda z: 1 / torch.cosh(z.clamp(-300, 300)).prod(), ()),
        ("argmin", "1 / (1 + z^2), at infinity", (0.5,), lambda z: 1 / (1 + z**2).sum(), ()),
        ("argmin", "Lennard-Jones", (1.2,), lambda z: (z**-12 - 2 * z**-6).sum(), (1.0, -1.0)),
        ("argmin", "Rastrigin", (0.4, -0.3), lambda z: (z**2 - 10 * torch.cos(2 * torch.pi * z)).sum(), None),
        ("argmin", "unknowns of 1e-9 and 1e9", (1e-9, 1e9), lambda z: (z[0] * 1e9 - 3) ** 2 + (z[1] / 1e9 - 2) ** 2, None),
        ("argmin", "-log, unbounded", (1.0,), lambda z: -torch.log1p(z**2).sum(), ()),
        ("least_squares", "saturation", (1.0, 1.0), lambda z: z[0] * s / (z[1] + s) - titration, None),
        ("least_squares", "two equal exponentials", (1.0, 1.0, 1.0),
         lambda z: z[0] * e(-z[1] * s) + z[0] * e(-z[2] * s) - 2 * e(-s), None),
        ("least_squares", "sine of unknown frequency", (0.9, 1.1),
         lambda z: z[0] * torch.sin(z[1] * s) - torch.sin(s), None),
        ("least_squares", "power law", (1.0, 1.0), lambda z: z[0] * s ** z[1] - 1e6 * s**2.5, None),
    ):  # fmt: skip
        # beyond, exponentials have underflowed: plateaus
        yield kind, name, start, f, solutions, 1e3 if name == "two equal exponentials" else _INF
