"""Of every claim of the table of convergence: is there a solution?  Of every refusal: was there one?

The oracle is independent of the library: Newton with least-squares steps in float64 from the point that was returned.  A
claim is *wrong* if that leads nowhere, or further away than a thousand times what the tolerance promises,
``|J^-1| (atol + rtol |J z|)``, or, of a minimisation, to no minimum.  It is asked once a system, for the end points of all
solvers, starts and precisions together, and only where the answer matters.

As a command, ``python tests/tables/convergence_audit.py [--slice 0/8] [--only NAME ...] [--out FILE]`` prints every
wrong claim and every right solution that is refused.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from convergence_table import FACTORS, Claim, claims
from torch import Tensor

import implicitkit as ik

__all__ = ["DTYPES", "Verdict", "audit", "right", "wrong_and_refused"]

DTYPES = {"float64": torch.float64, "float32": torch.float32}
_LOOSE, _SHARP = 1e3, 0.5  # times the promise: what no claim may exceed, and what must not be refused
_STEPS = 60
_BUDGET = 150  # steps, of methods whose steps are cheap
_DEAR = ("newton", "trust_region", "newton_krylov", "newton_cg", "chord", "pseudo_transient", "gauss_newton")
_FEWER = 80  # ... of those that take Newton's
_OUTSIDE = 40  # ... of SciPy's, which are asked up to five times


@dataclass(frozen=True)
class Verdict:
    """How a solve from one start ended, and what the oracle says: is there a solution within the loosened promise?

    Attributes:
        claim, dtype, solver, factor: which solve: system, precision, solver, and what the start was multiplied by.
        right, sharp: is there a solution within a thousand times the promise, and within half of it?  ``None``: not asked,
            since the sample did not converge and its residual is not small.
        small: the test of ``|F|`` against ``|F(z0)|`` would have been passed.
    """

    claim: str
    dtype: str
    solver: str
    factor: float
    status: str
    right: bool | None
    sharp: bool | None
    small: bool
    text: str

    @property
    def key(self) -> tuple[str, str, str, float]:
        """What an exception is made for."""
        return self.claim, self.dtype, self.solver, self.factor

    @property
    def wrong(self) -> bool:
        """Claimed, and no solution."""
        return self.status == "CONVERGED" and not self.right

    @property
    def refused(self) -> bool:
        """A solution, with a residual as small as was asked at first, and refused."""
        return self.status != "CONVERGED" and self.small and bool(self.sharp)


# ------------------------------------------------------------------------------------------------------------ the oracle
def polished(claim: Claim, z: Tensor) -> tuple[Tensor, Tensor]:
    """``(batch, n)``: where damped Newton steps of least squares lead, and whether they arrive, ``(batch,)``."""
    ends, arrived = z.clone(), torch.zeros(len(z), dtype=torch.bool)
    open_ = torch.arange(len(z))
    for step in range(_STEPS):
        z, d, hopeless, F = _newton_step(claim, ends[open_])
        size = z.abs().clamp_min(1)
        moved, there = _halved(claim, z, d, F)
        done = torch.linalg.vector_norm(d, dim=1) <= 1e-15 * torch.linalg.vector_norm(z, dim=1)
        last = done | ~moved | (step + 1 == _STEPS)
        ends[open_] = torch.where(done.unsqueeze(1), z, there)
        F_end = torch.func.vmap(claim.residual)(ends[open_])
        # at a singular solution Newton's steps are no smaller than rounding in F lets them be
        terms = torch.func.vmap(claim.jacobian)(z).abs() @ z.abs().unsqueeze(2)
        rounding = (F.abs() <= 1e-12 * terms.squeeze(2)).all(1) & (d.abs() <= 1e-5).all(1)
        arrived[open_] = (~hopeless & ((d.abs() <= 1e-7 * size).all(1) | rounding)) | (F_end == 0).all(1)
        open_ = open_[~last]
        if not len(open_):
            break
    return ends, arrived & torch.isfinite(ends).all(1)


def _newton_step(claim: Claim, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``z``, the step of least squares ``(batch, n)`` from there (infinite where there is none), whether some equation does
    not depend on anything, and ``F``."""
    F, J = torch.func.vmap(claim.residual)(z), torch.func.vmap(claim.jacobian)(z)
    unit = z.abs().maximum(1e-6 * z.abs().amax(1, keepdim=True))  # else a bent valley far out has a null space
    unit = torch.where(unit > 0, unit, 1)
    scaled = J * unit.unsqueeze(1)
    usable = torch.isfinite(scaled).flatten(1).all(1) & torch.isfinite(F).all(1)
    J, scaled = (torch.where(usable[:, None, None], matrix, 0) for matrix in (J, scaled))
    F = torch.where(usable[:, None], F, torch.inf)
    rows = scaled.abs().amax(2, keepdim=True)
    rows = torch.where(rows > 0, rows, 1)
    b = torch.where(usable[:, None], -F, 0).unsqueeze(2).div(rows)
    step = (torch.linalg.pinv(scaled / rows, rtol=1e-14) @ b).squeeze(2)
    hopeless = ((J == 0).all(2) & (F != 0)).any(1)  # an equation that nothing changes
    return z, torch.where(usable[:, None], unit * step, torch.inf), hopeless, F


def _halved(claim: Claim, z: Tensor, d: Tensor, F: Tensor) -> tuple[Tensor, Tensor]:
    """Where the step, halved up to 25 times, lowers ``|F|`` ``(batch,)``, and the points it leads to."""
    residual = torch.func.vmap(claim.residual)
    t, found = torch.ones(len(z), 1, dtype=z.dtype), torch.zeros(len(z), 1, dtype=torch.bool)
    old, d = torch.linalg.vector_norm(F, dim=1, keepdim=True), torch.nan_to_num(d, posinf=0.0)
    for _ in range(25):
        left = ~found.squeeze(1)
        found[left] = torch.linalg.vector_norm(residual((z + t * d)[left]), dim=1, keepdim=True) < old[left]
        if bool(found.all()):
            break
        t = torch.where(found, t, t / 2)
    return found.squeeze(1), torch.where(found, z + t * d, z)


def _fitted(claim: Claim, p: Tensor) -> Tensor:
    """Of least squares: is Gauss and Newton's correction small?  A Hessian of condition 1e20 has lost what this sees."""
    if claim.kind != "least_squares":
        return torch.ones(len(p), dtype=torch.bool)
    r, J = (torch.nan_to_num(torch.func.vmap(g)(p)) for g in (claim.function, torch.func.jacrev(claim.function)))
    size = torch.linalg.vector_norm(J, dim=1).clamp_min(1e-300)
    d = (torch.linalg.pinv(J / size.unsqueeze(1), rtol=1e-12) @ r.unsqueeze(2)).squeeze(2) / size
    return (d.abs() <= 0.1 * p.abs().maximum(p.abs().amax(1, keepdim=True).clamp_min(1) * 1e-3)).all(1)


def right(claim: Claim, z: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """``(batch,)`` each: is there a solution within a thousand times the promise of ``z``, and within half of it?

    At a singular solution no distance is promised: the residual must be small there by the scale at ``z`` itself.
    ``eps``: of the precision of each point.
    """
    rtol = atol = eps ** (2 / 3)
    if claim.solutions is not None:
        known = torch.stack([torch.as_tensor(s, dtype=z.dtype).expand_as(z) for s in (*claim.solutions, torch.inf)])
        promised = atol + rtol * torch.linalg.vector_norm(known, dim=2).clamp_min(
            1
        )  # relative to the solution, from 1 on
        excess = (torch.linalg.vector_norm(z - known, dim=2) / promised).nan_to_num(torch.inf).amin(0)
        return excess <= _LOOSE, excess <= _SHARP
    p, arrived = polished(claim, z)
    J = torch.nan_to_num(torch.func.vmap(claim.jacobian)(p))
    values = torch.linalg.svdvals(J)
    size = torch.linalg.vector_norm(p, dim=1)
    aside = torch.ones_like(p).index_fill_(1, torch.arange(0, p.shape[1], 2), -1.0)
    there = torch.func.vmap(claim.jacobian)(p + 0.01 * size.clamp_min(1)[:, None] * aside)
    beside = torch.linalg.svdvals(torch.nan_to_num(there))
    singular = (values[:, -1] <= 1e-12 * values[:, 0]) | (values[:, -1] <= 1e-4 * beside[:, -1])

    def scale(matrix: Tensor, point: Tensor) -> Tensor:
        if claim.kind == "fixed_point":
            return torch.linalg.vector_norm(point, dim=1)
        return torch.linalg.vector_norm((matrix @ point.unsqueeze(2)).squeeze(2), dim=1)

    promise = (atol + rtol * scale(J, p)) / values[:, -1].clamp_min(1e-300) + eps * size.clamp_min(1)
    arrived = arrived & (p.abs().amax(1) <= claim.within)
    error = torch.linalg.vector_norm(p - z, dim=1)
    near = error <= torch.maximum(0.1 * size.clamp_min(0.1), 10 * promise)
    there = torch.nan_to_num(torch.func.vmap(claim.jacobian)(z))
    excess = torch.linalg.vector_norm(torch.func.vmap(claim.residual)(z), dim=1) / (atol + rtol * scale(there, z))
    if claim.kind in ("argmin", "least_squares"):
        curvature = torch.linalg.eigvalsh(0.5 * (J + J.mT))
        arrived = arrived & _fitted(claim, p) & (curvature[:, 0] >= -1e-6 * curvature[:, -1].abs().clamp_min(1e-300))
    near = [near, error <= 0.1 * size.clamp_min(0.1)]
    return tuple(
        arrived & close & torch.where(singular, excess <= k, error <= k * promise)
        for k, close in zip((_LOOSE, _SHARP), near, strict=True)
    )  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------------- the audit
def audit(
    claim: Claim,
    solvers: tuple[str, ...] | None = None,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    factors: tuple[float, ...] = FACTORS,
    more: int = 1,
) -> list[Verdict]:
    """One solve for each solver and precision, the starts its samples; then all end points before the oracle.

    What the steps did not suffice for is no refusal: those solves are made again with four times as many (``more``).
    """
    rows = [FACTORS.index(factor) for factor in factors]
    residual = torch.func.vmap(claim.residual)
    runs, ends, smalls, epss, statuses, norms = [], [], [], [], [], []
    for dtype in dtypes:
        z0, eps = claim.starts(DTYPES[dtype])[rows], torch.finfo(DTYPES[dtype]).eps
        start = torch.linalg.vector_norm(residual(z0.double()), dim=1)
        for solver in solvers or claim.solvers:
            budget = _OUTSIDE if solver.startswith("scipy") else _FEWER if solver in _DEAR else _BUDGET
            s = ik.solve(claim.problem(), z0, batch_dims=1, solver=solver, on_failure="ignore", max_steps=more * budget)
            z = s.value.double()
            norm = torch.linalg.vector_norm(residual(z), dim=1)
            scale = torch.linalg.vector_norm(z, dim=1) if claim.kind == "fixed_point" else start
            small = norm <= eps ** (2 / 3) * (1 + torch.nan_to_num(scale, posinf=0.0))
            runs += [(dtype, solver, factor, float(begin)) for factor, begin in zip(factors, start, strict=True)]
            ends.append(z), smalls.append(small), epss.append(torch.full_like(norm, eps))
            statuses.append(s.status), norms.append(norm)
    z, small, eps, status, norm = (torch.cat(parts) for parts in (ends, smalls, epss, statuses, norms))
    asked = ((status == 0) | small).nonzero().squeeze(1)
    good, sharp = [None] * len(z), [None] * len(z)
    if len(asked):
        for i, one, other in zip(asked.tolist(), *right(claim, z[asked], eps[asked]), strict=True):
            good[i], sharp[i] = bool(one), bool(other)
    verdicts = [
        Verdict(claim.name, dtype, solver, factor, ik.Status(int(status[i])).name, good[i], sharp[i], bool(small[i]),
                f"{claim.name}, {dtype}, {solver}, start x {factor:g}: {ik.Status(int(status[i])).name} at "
                f"{[float(f'{v:.6g}') for v in z[i][:4].tolist()]}, |F| = {norm[i]:.3g}, |F(z0)| = {begin:.3g}")
        for i, (dtype, solver, factor, begin) in enumerate(runs)
    ]  # fmt: skip
    return [
        audit(claim, (v.solver,), (v.dtype,), (v.factor,), more=4)[0]
        if v.refused and v.status == "MAX_STEPS" and more == 1
        else v
        for v in verdicts
    ]


def wrong_and_refused(verdicts: list[Verdict]) -> tuple[list[str], list[str]]:
    """Claims that are wrong; right points that were refused although their residual has fallen as far as was asked."""
    return [v.text for v in verdicts if v.wrong], [v.text for v in verdicts if v.refused]


def _done(path: str | None) -> set[str]:
    """Systems that are in the file already: a run that was stopped goes on."""
    if path is None or not Path(path).exists():
        return set()
    return {json.loads(line)["claim"] for line in Path(path).read_text().splitlines()}


def main() -> None:
    """The table, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", default="0/1", help="k/n: every n-th system, from the k-th")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", default=None, help="a file to which all verdicts go, one in a line")
    parser.add_argument("--seconds", type=float, default=None, help="begin no further system after so much CPU time")
    given = parser.parse_args()
    k, n = map(int, given.slice.split("/"))
    table = claims()[k::n] if given.only is None else [c for c in claims() if c.name in given.only]
    total = claimed = 0
    done = _done(given.out)
    for claim in table:
        if claim.name in done:
            continue
        if given.seconds is not None and time.process_time() > given.seconds:
            break
        begin = time.process_time()
        verdicts = audit(claim)
        total, claimed = total + len(verdicts), claimed + sum(v.status == "CONVERGED" for v in verdicts)
        for v in verdicts:
            if v.wrong or v.refused:
                print("WRONG  " if v.wrong else "REFUSED", v.text, flush=True)
        if given.out:
            with open(given.out, "a") as file:
                file.writelines(json.dumps(asdict(v)) + "\n" for v in verdicts)
        print(f"-- {claim.name}: {time.process_time() - begin:.1f} CPU s", flush=True)
    print(f"{len(table)} systems, {total} verdicts, {claimed} claims, {time.process_time():.0f} CPU s")


if __name__ == "__main__":
    main()
