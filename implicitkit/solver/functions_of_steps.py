r"""Is the gradient zero because ``z`` is a minimum, or because the objective has no other: ``round``, ``floor``, ``sign``?

    df = 0   at z and at  y = z + r s,   s = 1, 10, 100 times max(1, |z|),

while ``f`` takes different values there, and on the way from ``z`` to such a ``y``, which is halved between both values,
says that autograd sees a function of steps: every point would be a minimum.  A plateau (``relu`` where it is off) has a
slope farther off, a narrow well or what is flat on both sides one on the way, and what is constant has one value everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solution import Status
from implicitkit.solver.base import Outcome
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

_HIDDEN = "autograd sees no z"  # what fits say of such a function themselves
_REACH = (1.0, 10.0, 100.0)
_HALVINGS = 30  # of a way between two values
STEPS = (
    "The objective changes with z, and yet its gradient is zero wherever it was asked, near and far: torch takes round, "
    "floor, sign, argmax and comparisons for constants, so that every point would be a minimum. Put something smooth in "
    "their place (a sigmoid for a comparison)"
)


def refuse_steps(f: Evaluations, outcome: Outcome) -> None:
    """``STALLED`` where the gradient is exactly zero at the start, and everywhere else, and the objective changes; two to
    four evaluations, more where it does.  Residuals that are zero are at their minimum."""
    flat = (outcome.status == int(Status.CONVERGED)) & (outcome.residual_norm == 0) & (outcome.steps == 0)
    if not bool(flat.any()) or (f.kind.returns_program and Model(f).count):
        return
    z = outcome.z
    (here, slope), changed = _at(f, z), torch.zeros_like(flat)
    flat = flat & (slope == 0).all(1)
    if f.kind.of_residuals:
        flat = flat & (here != 0)
    size, far = z.abs().amax(1, keepdim=True).clamp_min(1), z
    for number, reach in enumerate(_REACH):
        if not bool(flat.any()):
            return
        way = (2 * seeded.uniform(1, z.shape[1], seed=number) - 1).to(z)
        there = z + reach * size * (way + 0.5 * way.sign())
        try:
            value, slope = _at(f, there)
        except Exception as error:  # the function is not to be asked so far off
            if _HIDDEN in str(error):
                raise
            return
        flat = flat & (slope == 0).all(1) & torch.isfinite(value)
        far = torch.where((changed | (value == here)).unsqueeze(1), far, there)
        changed = changed | (value != here)
    flat = _flat_between(f, z, far, here, flat & changed)
    if bool(flat.any()):
        outcome.status, outcome.message = torch.where(flat, int(Status.STALLED), outcome.status), STEPS


def _flat_between(f: Evaluations, z: Tensor, far: Tensor, here: Tensor, flat: Tensor) -> Tensor:
    """Which of the samples ``flat`` have no slope between ``z``, of value ``here``, and ``far``, of another, ``(batch,)``:
    what is continuous rises or falls on the way."""
    near = z
    for _ in range(_HALVINGS):
        if not bool(flat.any()):
            break
        middle = 0.5 * (near + far)
        value, slope = _at(f, middle)
        flat, same = flat & (slope == 0).all(1), (value == here).unsqueeze(1)
        near, far = torch.where(same, middle, near), torch.where(same, far, middle)
    return flat


def _at(f: Evaluations, z: Tensor) -> tuple[Tensor, Tensor]:
    """The objective ``(batch,)`` and its gradient ``(batch, n)``; of a program in the nearest point of its set."""
    if f.kind.returns_program:
        model = Model(f)
        value, _, slope = model.slope(model.proximal(z, 1.0))
        return value, slope
    probe = f.beside("minimise")
    return probe.value(z), probe(z)
