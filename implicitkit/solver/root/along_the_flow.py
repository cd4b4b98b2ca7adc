r"""Where a flow ``dz/dt = s F(z)`` comes to rest, sample by sample, each by steps of its own.

Steps are those of the linearly implicit method RODAS, of order four with an error of order three, L-stable (Hairer &
Wanner 1996, *Solving Ordinary Differential Equations II*, 2nd ed., section IV.7 and the code of that name): with
``J = s dF/dz`` and ``M = I / (\gamma h) - J``,

    M U_i = s F(z + sum_j a_ij U_j) + sum_j c_ij U_j / h,    i = 1..6,

the step leads to ``z + sum_j a_5j U_j + U_5 + U_6``, and its error is ``U_6``: six evaluations, one Jacobian and one
factorisation.  As ``h`` grows it is Newton's method.

An implicit step damps what grows if it is long, and of what is small beside the rest (one infected of a million, a species
that comes into a community at rest) no error says so.  A step is therefore no longer than ``1 / |\lambda|`` for any
eigenvalue ``\lambda`` of ``J`` with a positive real part: there it lets grow what grows, from rounding on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import factor_batched
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.differences import in_working_precision

_GAMMA = 0.25
_A = (
    (),
    (1.544,),
    (0.9466785280815826, 0.2557011698983284),
    (3.314825187068521, 2.896124015972201, 0.9986419139977817),
    (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.6878860361058950),
)
_C = (
    (),
    (-5.6688,),
    (-2.430093356833875, -0.2063599157091915),
    (-0.1073529058151375, -9.594562251023355, -20.47028614809616),
    (7.496443313967647, -10.24680431464352, -33.99990352819905, 11.70890893206160),
    (8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136, -6.058818238834054),
)
_REST = 1e8  # times 1 / |J| is a step, by which next to nothing moves: the flow is at rest
_STILL = 1e-6  # of the units of a state, that is next to nothing
_SEEN = 1e-2  # of these units: more is seen
_ZERO, _ROUNDED = (
    1e-12,
    20.0,
)  # of the largest size so far, the least unit of a number; units of rounding, above accuracy
_LONGER, _SHORTER = 5.0, 0.1  # steps, from one to the next
_GROWING = 150  # steps, at most, in which something grows that is not seen: of 1e-13 to 1 it takes 30
_ALIKE = 0.1  # of a rate of growth, by which it may have changed since it was last asked for


def rest_of_flow(f: Evaluations, z0: Tensor, which: Tensor, accuracy: float, most: int) -> tuple[Tensor, Tensor]:
    """Where the flow is from ``z0`` ``(batch, n)`` after so many steps at ``most``, and whether it rests there,
    ``(batch,)``; those in which something grows that is not seen yet do not count.

    Args:
        which: samples that are followed, ``(batch,)``; the others stay. accuracy: of a step, of each number, which is as
            good as zero at 1e-12 of the largest ``|z|`` so far.
    """
    z, going, spent = z0.clone(), which, 0
    known: dict[str, Tensor] = {}
    while spent < most + _GROWING and bool(going.any()):
        samples, system, theta = subset(f, going)
        march = _March(f.beside("root", system, theta), z[samples], {k: v[samples] for k, v in known.items()})
        march.going = going[samples]
        enough = int(march.going.sum()) // 2
        while spent < most + _GROWING and int(march.going.sum()) > enough:
            march.step(accuracy)
            march.going = march.going & (march.known["steps"] < most)
            spent += 1
        z, going = z.index_copy(0, samples, march.z.to(z)), going.index_copy(0, samples, march.going)
        known = known or {k: v.new_zeros(len(z), *v.shape[1:]) for k, v in march.known.items()}
        known = {k: known[k].index_copy(0, samples, v) for k, v in march.known.items()}
    return z, which & (known["rests"] > 0) & torch.isfinite(z).all(1)


class _March:
    """Samples of a flow on their way.

    Attributes:
        z: where they are, ``(batch, n)``. going: which go on. known: of each the next step ``h``, the ``peaks`` of
            ``|z|``, the ``bound`` of a step that the ``growth`` of ``J`` sets, and the ``matrix`` of which that was found;
            how many ``steps`` count, and whether it ``rests``.
    """

    def __init__(self, f: Evaluations, z: Tensor, known: dict[str, Tensor]) -> None:
        self.f, self.like, self.z = f, z, in_working_precision(z)
        self.going, self.known = torch.ones(len(z), dtype=torch.bool, device=z.device), known
        self.J: Tensor | None = None

    def slope(self, z: Tensor) -> Tensor:
        """``s F``."""
        return self.f.kind.flow * in_working_precision(self.f.residual(z.to(self.like)))

    def step(self, accuracy: float) -> None:
        """A step of every sample, which stands where its error is small."""
        z, F = self.z, self.slope(self.z)
        if self.J is None:
            self.J = self.f.kind.flow * in_working_precision(self.f.linearize(z.to(self.like)).dense())
        J = torch.where(torch.isfinite(self.J).flatten(1).all(1)[:, None, None], self.J, 0)
        size = torch.linalg.matrix_norm(J)
        known = self.known or self._begun(z, F, size)
        known = self._watched(known, J, size)
        h = torch.minimum(known["h"], known["bound"])
        new, error = self._tried(z, F, J, h)
        peaks = torch.maximum(known["peaks"], torch.linalg.vector_norm(new, dim=1))
        least = max(_ZERO, _ROUNDED * self.f.eps / accuracy) * peaks.unsqueeze(1)
        units = torch.maximum(torch.maximum(z.abs(), new.abs()), least)
        sizes = [(v / torch.where(units > 0, units, 1)).square().mean(1).sqrt() for v in (error, new - z)]
        ratio = (sizes[0] / accuracy).nan_to_num(torch.inf, torch.inf)
        stands = (ratio <= 1) & torch.isfinite(new).all(1)
        factor = (0.9 * ratio.clamp_min(1e-8) ** -0.25).clamp(_SHORTER, _LONGER)
        moved = stands & self.going
        rests = moved & (h * size >= _REST) & (sizes[1] <= _STILL) & torch.isinf(known["bound"])
        self.z = torch.where(moved.unsqueeze(1), new, z)
        known["h"], known["peaks"] = h * factor, torch.where(moved, peaks, known["peaks"])
        known["steps"], known["rests"] = (
            known["steps"] + ((h < known["bound"]) | (sizes[1] > _SEEN)),
            known["rests"] + rests,
        )
        self.known, self.J = known, None if bool(moved.any()) else self.J
        self.going = self.going & ~rests & (known["h"] * size.clamp_min(1e-300) > 1e-12)

    def _begun(self, z: Tensor, F: Tensor, size: Tensor) -> dict[str, Tensor]:
        way = torch.linalg.vector_norm(z, dim=1) / torch.linalg.vector_norm(F, dim=1)
        first = torch.where(size > 0, 1 / size, way.nan_to_num(1.0, 1.0))
        return {
            "h": first, "peaks": torch.linalg.vector_norm(z, dim=1), "bound": torch.full_like(first, torch.inf),
            "growth": torch.zeros_like(first), "steps": torch.zeros_like(first), "rests": torch.zeros_like(first),
            "matrix": z.new_full((*z.shape, z.shape[1]), torch.nan),
        }  # fmt: skip

    def _watched(self, known: dict[str, Tensor], J: Tensor, size: Tensor) -> dict[str, Tensor]:
        """``bound``: no step is longer than what grows allows.  Eigenvalues are those of another matrix while it has changed
        by less than a tenth of the growth, and are not asked for while steps are shorter than ``1 / |J|``."""
        changed = torch.linalg.matrix_norm(J - known["matrix"])
        asked = self.going & ~(changed <= _ALIKE * known["growth"]) & (known["h"] * size > 1)
        if not bool(asked.any()):
            return known
        values = torch.linalg.eigvals(J[asked])
        margin = self.f.eps**0.5 * size[asked].unsqueeze(1)
        grows = values.real > margin
        fastest = torch.where(grows, values.abs(), 0).amax(1)
        slowest = torch.where(grows, values.real, torch.inf).amin(1)
        found = {"bound": 1 / fastest, "growth": slowest.nan_to_num(0, 0, 0), "matrix": J[asked]}
        return known | {name: known[name].masked_scatter(_like(asked, known[name]), v) for name, v in found.items()}

    def _tried(self, z: Tensor, F: Tensor, J: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """A step of lengths ``h (batch,)``, and its error."""
        matrix = -J
        matrix.diagonal(dim1=1, dim2=2).add_((1 / (_GAMMA * h)).unsqueeze(1))
        factor, there, each = factor_batched(matrix), z, (1 / h).unsqueeze(1)
        U: list[Tensor] = []
        for i, row in enumerate(_C):
            slope = F if i == 0 else self.slope(there if i == 5 else z + _sum(_A[i], U))
            b = slope if i == 0 else slope + each * _sum(row, U)
            U.append(factor.solve(torch.nan_to_num(b)))
            bad = ~torch.isfinite(b).all(1, keepdim=True)
            U[-1] = torch.where(bad, torch.nan, U[-1])
            if i == 4:
                there = z + _sum(_A[4], U[:4]) + U[4]
        return there + U[5], U[5]


def _sum(row: tuple[float, ...], U: list[Tensor]) -> Tensor:
    total = row[0] * U[0]
    for a, u in zip(row[1:], U[1:], strict=True):
        total = total + a * u
    return total


def _like(mask: Tensor, v: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (v.ndim - 1)).expand_as(v)
