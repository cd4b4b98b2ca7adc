"""Nonlinear programs of the COPS collection, small: control, shape and identification, from the starts given there.

Dolan, Moré & Munson (2004), "Benchmarking optimization software with COPS 3.0", ANL/MCS-TM-273.  Differential equations are
discretised by the trapezoidal rule on ``n`` intervals, as there.  ``best`` is the objective at the solution: for as many
intervals or corners as here that of the polygon and of the chain is published; all are where SciPy's ``SLSQP`` ends from
beside the solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import implicitkit as ik

__all__ = ["PROGRAMS", "Program"]

F64 = torch.float64
Unknowns = dict[str, Tensor]


class Program(NamedTuple):
    """``minimise objective(z) subject to h(z) = 0, g(z) <= 0, lower <= z <= upper``; what is not there is ``None``."""

    objective: Callable[[Any], Tensor]
    z0: Any
    equalities: Callable[[Any], Tensor] | None
    inequalities: Callable[[Any], Tensor] | None
    bounds: tuple[Any, Any] | None
    best: float

    @property
    def options(self) -> dict[str, Any]:
        """As ``ik.argmin`` takes them."""
        constraints = [
            kind(part)
            for kind, part in ((ik.Equality, self.equalities), (ik.Inequality, self.inequalities))
            if part is not None
        ]
        return {"constraints": constraints, **({} if self.bounds is None else {"bounds": self.bounds})}

    def violation(self, z: Any) -> float:
        """The largest."""
        left = [] if self.equalities is None else [self.equalities(z).abs()]
        left += [] if self.inequalities is None else [self.inequalities(z)]
        if self.bounds is not None:
            names = z if isinstance(z, dict) else {"": z}
            low, high = (b if isinstance(b, dict) else {"": b} for b in self.bounds)
            left += [torch.maximum(low[k] - names[k], names[k] - high[k]).flatten() for k in names]
        return float(torch.cat(left).max())


def _line(n: int, start: float = 0.0, end: float = 1.0) -> Tensor:
    return torch.linspace(start, end, n + 1, dtype=F64)


def _full(n: int, value: float) -> Tensor:
    return torch.full((n + 1,), value, dtype=F64)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


def _free(z: Unknowns, **limits: tuple[float, float]) -> tuple[Unknowns, Unknowns]:
    """Bounds of some unknowns, and none of the others."""
    low, high = ({k: limits.get(k, (-math.inf, math.inf))[side] for k in z} for side in (0, 1))
    return {k: torch.full_like(z[k], low[k]) for k in z}, {k: torch.full_like(z[k], high[k]) for k in z}


def _follows(x: Tensor, rate: Tensor, h: Tensor | float) -> Tensor:
    """The defects of ``x' = rate``."""
    return x[1:] - x[:-1] - 0.5 * h * (rate[1:] + rate[:-1])


def polygon(n: int = 6) -> Program:
    """The largest polygon of diameter one."""
    i = torch.arange(1, n, dtype=F64)
    z0 = {"r": 4 * i * (n + 1 - i) / (n + 1) ** 2, "angle": math.pi * i / n}
    first, second = torch.triu_indices(n, n, 1)

    def whole(z: Unknowns) -> tuple[Tensor, Tensor]:
        return torch.cat([z["r"], z["r"].new_zeros(1)]), torch.cat([z["angle"], z["angle"].new_full((1,), math.pi)])

    def area(z: Unknowns) -> Tensor:
        r, angle = whole(z)
        return -0.5 * (r[1:] * r[:-1] * torch.sin(angle[1:] - angle[:-1])).sum()

    def too_far(z: Unknowns) -> Tensor:
        r, angle = whole(z)
        between = r[first] ** 2 + r[second] ** 2 - 2 * r[first] * r[second] * torch.cos(angle[first] - angle[second])
        return torch.cat([between - 1, angle[:-1] - angle[1:]])

    return Program(area, z0, None, too_far, _free(z0, r=(0, 1), angle=(0, math.pi)), -0.674981443)


def chain(n: int = 50) -> Program:
    """A chain of length 4 between heights 1 and 3."""
    t, h = _line(n), 1 / n
    z0 = {"x": 8 * t * (0.5 * t - 0.25) + 1, "slope": 8 * (t - 0.25)}
    weight = _full(n, h)
    weight[[0, -1]] = h / 2
    stretch = lambda z: (1 + z["slope"] ** 2).sqrt()  # noqa: E731

    def hangs(z: Unknowns) -> Tensor:
        ends = torch.stack([(weight * stretch(z)).sum() - 4, z["x"][0] - 1, z["x"][-1] - 3])
        return torch.cat([_follows(z["x"], z["slope"], h), ends])

    return Program(lambda z: (weight * z["x"] * stretch(z)).sum(), z0, hangs, None, None, 5.07226149)


def cam(n: int = 30) -> Program:
    """The cam of the largest valve opening: convex, and nowhere too steep."""
    step = 2 * math.pi / (5 * (n + 1))

    def shape(r: Tensor) -> Tensor:
        low, high = r.new_ones(1), r.new_full((1,), 2.0)
        e = torch.cat([low, low, r, high, r[-1:]])
        convex = -e[:-2] * e[1:-1] - e[1:-1] * e[2:] + 2 * e[:-2] * e[2:] * math.cos(step)
        rise = torch.cat([low, r, high]).diff()
        return torch.cat([convex, rise - 1.5 * step, -1.5 * step - rise])

    z0 = torch.full((n,), 1.5, dtype=F64)
    return Program(
        lambda r: -math.pi / n * r.sum(), z0, None, shape, (torch.ones_like(z0), 2 * torch.ones_like(z0)), -4.30997926
    )


def mixing(n: int = 25) -> Program:
    """The best mixture of two catalysts along a reactor; on a singular arc."""
    z0 = {"x": _full(n, 1.0), "y": _full(n, 0.0), "u": _full(n, 0.0)}

    def reacts(z: Unknowns) -> Tensor:
        x, y, u = z["x"], z["y"], z["u"]
        rate = u * (10 * y - x)
        ends = torch.stack([x[0] - 1, y[0]])
        return torch.cat([_follows(x, rate, 1 / n), _follows(y, -rate - (1 - u) * y, 1 / n), ends])

    return Program(lambda z: -1 + z["x"][-1] + z["y"][-1], z0, reacts, None, _free(z0, u=(0, 1)), -0.0482845307)


def rocket(n: int = 15) -> Program:
    """Goddard's: the highest flight, drag and gravity falling with height; thrust and final time are free."""
    t = _line(n)
    z0 = {"h": _full(n, 1.0), "v": t * (1 - t), "m": 1 - 0.4 * t, "thrust": _full(n, 1.75), "step": _number(1.0)}

    def flies(z: Unknowns) -> Tensor:
        h, v, m, thrust, step = z["h"], z["v"], z["m"], z["thrust"], z["step"] / n
        drag, gravity = 310 * v**2 * torch.exp(-500 * (h - 1)), 1 / h**2
        ends = torch.stack([h[0] - 1, v[0], m[0] - 1, m[-1] - 0.6])
        up, faster = _follows(h, v, step), _follows(v, (thrust - drag) / m - gravity, step)
        return torch.cat([up, faster, _follows(m, -2 * thrust, step), ends])

    far = math.inf
    bounds = _free(z0, h=(1, far), v=(0, far), m=(0.6, 1), thrust=(0, 3.5), step=(0, far))
    return Program(lambda z: -z["h"][-1], z0, flies, None, bounds, -1.01262076)


def robot(n: int = 10) -> Program:
    """A robot's arm from one place to another in the least time; its rates are bounded, its length is not fixed."""
    t, zero = _line(n), _full(n, 0.0)
    z0 = {"rho": _full(n, 4.5), "theta": 2 * math.pi / 3 * t**2, "phi": _full(n, math.pi / 4), "d_rho": zero,
          "d_theta": 4 * math.pi / 3 * t, "d_phi": zero, "u_rho": zero, "u_theta": zero, "u_phi": zero,
          "time": _number(1.0)}  # fmt: skip

    def moves(z: Unknowns) -> Tensor:
        step, rho = z["time"] / n, z["rho"]
        lift = ((5 - rho) ** 3 + rho**3) / 3
        inertia = {"rho": 5.0, "theta": lift * torch.sin(z["phi"]) ** 2, "phi": lift}
        ends = {"rho": (4.5, 4.5), "theta": (0, 2 * math.pi / 3), "phi": (math.pi / 4, math.pi / 4)}
        parts = []
        for name, (start, end) in ends.items():
            x, rate = z[name], z[f"d_{name}"]
            parts += [_follows(x, rate, step), _follows(rate, z[f"u_{name}"] / inertia[name], step)]
            parts += [torch.stack([x[0] - start, x[-1] - end, rate[0], rate[-1]])]
        return torch.cat(parts)

    pi = math.pi
    limits = {"rho": (0, 5), "theta": (-pi, pi), "phi": (0, pi), "time": (0, math.inf)}
    bounds = _free(z0, **limits, u_rho=(-1, 1), u_theta=(-1, 1), u_phi=(-1, 1))
    return Program(lambda z: z["time"], z0, moves, None, bounds, 9.30169173)


def steering(n: int = 20) -> Program:
    """A particle under a thrust of fixed size to a given height and speed in the least time."""
    t, zero = _line(n), _full(n, 0.0)
    z0 = {"x": zero, "y": 5 * t, "v": 45 * t, "w": zero, "u": zero, "time": _number(1.0)}

    def steers(z: Unknowns) -> Tensor:
        step = z["time"] / n
        parts = [_follows(z["x"], z["v"], step), _follows(z["y"], z["w"], step)]
        parts += [_follows(z["v"], 100 * torch.cos(z["u"]), step), _follows(z["w"], 100 * torch.sin(z["u"]), step)]
        starts = torch.stack([z[k][0] for k in "xyvw"])
        return torch.cat([*parts, starts, torch.stack([z["y"][-1] - 5, z["v"][-1] - 45, z["w"][-1]])])

    bounds = _free(z0, u=(-math.pi / 2, math.pi / 2), time=(0, math.inf))
    return Program(lambda z: z["time"], z0, steers, None, bounds, 0.555179894)


PROGRAMS: dict[str, Callable[..., Program]] = {
    f.__name__: f for f in (polygon, chain, cam, mixing, rocket, robot, steering)
}
