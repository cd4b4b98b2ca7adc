"""Broyden's methods: quasi-Newton with a low-rank estimate of the inverse Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from implicitkit.foundation.options import above, at_least, between, check_options, finite, flag, one_of, optional
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.newton_damping import halve
from implicitkit.solver.steps.restarts import in_vain, maybe_any, return_to_best, watch


@register_solver("broyden", solves="root")
@dataclass(frozen=True)
class Broyden(Method):
    r"""``z <- z - t damping B F(z)``, ``B`` an estimate of the inverse Jacobian that gains one secant pair a step.

    With ``s`` the step just taken and ``y`` the change of ``F`` along it, Sherman-Morrison gives

        "good":  B <- B + (s - B y) (B^T s)^T / (s^T B y)      "bad":  B <- B + (s - B y) y^T / (y^T y)

    (Broyden 1965, methods 1 and 2; Kelley 1995, section 7.3), kept as ``B = scale I + U^T V`` per sample.  At the start
    ``B = -I`` for fixed points, where ``F = f(z) - z``, so that the first step is Picard's (Bai, Kolter & Koltun 2019);
    for other equations ``B = a I`` with ``a = F.JF / |JF|^2``, the multiple of ``I`` that best inverts ``J`` along
    ``F``, from one Jacobian-vector product.  A pair with no usable denominator is left out.

    A sample that does badly forgets its pairs and takes the first kind of step from its best point
    (:func:`~implicitkit.solver.steps.restarts.watch`); one whose residual 200 steps have not lowered is given up, but for
    fixed points.

    Memory: two arrays ``(batch, memory, n)``, allocated once.  One evaluation a step, and one a halving.

    Args:
        update: which of the two. memory: pairs kept. damping: length of the full step, in (0, 2).
        when_full: ``"ring"`` overwrites the oldest pair, ``"restart"`` forgets all.
        scale: the start ``B = scale I``; ``None``: as above.
        line_search: halve steps that do not lower ``|F|``; ``None``: for all problems but fixed points. halvings: at most.
        safeguard: growth of the residual at which a sample restarts, greater than 1; ``inf`` switches it off.
        patience: steps without a new best residual after which a sample restarts.
        keep_inverse: offer the estimate as ``solution.inverse_estimate``.

    Raises:
        ValueError: an option out of range.
    """

    update: Literal["good", "bad"] = "good"
    memory: int = 30
    when_full: Literal["ring", "restart"] = "ring"
    scale: float | None = None
    line_search: bool | None = None
    halvings: int = 8
    safeguard: float = 10.0
    patience: int = 50
    keep_inverse: bool = False
    damping: float = 1.0
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(
            self,
            update=one_of("good", "bad"),
            memory=at_least(1),
            when_full=one_of("ring", "restart"),
            halvings=at_least(0),
            damping=between(0, 2),
            scale=optional(finite()),
            line_search=optional(flag()),
            keep_inverse=flag(),
            safeguard=above(1),
            patience=at_least(2),
        )
        if self.scale == 0:
            raise ValueError("Broyden: scale must be a finite number other than zero, got 0")

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        batch, n = z.shape
        return {
            "scale": self._start(f, z),
            "U": z.new_zeros(batch, self.memory, n),
            "V": z.new_zeros(batch, self.memory, n),
            "pairs": 0,
            "last": None,  # where the last step began, F there and the direction taken
            "failed": None,  # samples whose last step was no use at any length
            "guard": {},
            "idle": {},
        }

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        F, scale, pairs = f.residual(z), state["scale"], state["pairs"]
        forget, guard = watch(f, state["guard"], self.safeguard, self.patience)
        if state["failed"] is not None:
            forget = state["failed"] if forget is None else forget | state["failed"]
        if forget is not None:
            for rows in (state["U"], state["V"]):
                rows.masked_fill_(forget.view(-1, 1, 1), 0)
            if not f.kind.iteration:
                scale = torch.where(forget.unsqueeze(1), self._start(f, z), scale)
        if self.when_full == "restart" and pairs == self.memory:
            pairs = 0
        if pairs == 0 and (state["last"] is None or state["pairs"]):
            p = -scale * F
        else:
            p = self._update(z, F, scale, pairs, forget, state)
            pairs += 1
        idle = state["idle"]
        if not f.kind.iteration:
            f.stuck, idle = in_vain(f, idle)
        z_next, failed = self._advance(f, z, p)
        changed = {"scale": scale, "pairs": pairs, "last": (z, F, p), "failed": failed, "guard": guard, "idle": idle}
        return return_to_best(f, z_next, guard), state | changed

    def keep(self, state: dict[str, Any]) -> dict[str, Tensor]:
        if not self.keep_inverse:
            return {}
        used = torch.arange(self.memory, device=state["U"].device) < state["pairs"]
        return {"scale": state["scale"], "U": state["U"] * used.view(-1, 1), "V": state["V"]}

    def _start(self, f: Evaluations, z: Tensor) -> Tensor:
        """The first estimate, ``(batch, 1)``."""
        F = f.residual(z)
        if self.scale is not None or f.kind.iteration:
            return F.new_full((len(F), 1), -1.0 if self.scale is None else self.scale)
        JF = f.linearize(z).mv(F)
        length, norm = (torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (JF, F))
        a = (F * JF).sum(1, keepdim=True) / length.square()
        least = 0.1 * norm / length
        a = torch.where(a.abs() < least, torch.where(a < 0, -least, least), a)
        return torch.where(torch.isfinite(a), a, -1)

    def _update(
        self, z: Tensor, F: Tensor, scale: Tensor, pairs: int, forget: Tensor | None, state: dict[str, Any]
    ) -> Tensor:
        """Take in the last step; the new direction ``-B F``."""
        slot, held = pairs % self.memory, min(pairs, self.memory)
        U, V = state["U"], state["V"]
        last_z, last_F, p = state["last"]
        if pairs >= self.memory:  # without the oldest pair the last direction would have been another
            p = torch.addcmul(p, U[:, slot], (V[:, slot] * last_F).sum(1, keepdim=True))
            U[:, slot] = 0
        s, used = z - last_z, (U[:, :held], V[:, :held])
        g = _apply(scale, F, used[1], used[0])  # B F, and by the old B as below
        By = g + p
        if self.update == "good":
            v = _apply(scale, s, *used)
            denominator, size, along = _dot(s, By), _dot(s, s), _dot(s, g)
        else:
            v = F - last_F
            denominator, along = _dot(v, v), _dot(v, F)
            size = denominator
        usable = denominator.abs() > torch.finfo(F.dtype).eps * size
        if forget is not None:
            usable = usable & ~forget.unsqueeze(1)
        u = torch.where(usable, (s - By) / denominator, 0)
        U[:, slot], V[:, slot] = u, v
        return torch.addcmul(g, u, along).neg_()

    def _advance(self, f: Evaluations, z: Tensor, p: Tensor) -> tuple[Tensor, Tensor | None]:
        search = not f.kind.iteration if self.line_search is None else self.line_search
        if self.damping != 1.0:
            p = self.damping * p
        if not search:
            return z + p, None
        z_next, _, norm = halve(f, z, p, f.norm.to(z.dtype), self.halvings)
        failed = f.active & ~(norm < f.norm)
        return z_next, failed if maybe_any(failed) else None


def _apply(scale: Tensor, x: Tensor, P: Tensor, Q: Tensor) -> Tensor:
    """``scale x + Q^T P x`` per sample."""
    return torch.baddbmm((scale * x).unsqueeze(1), torch.bmm(x.unsqueeze(1), P.mT), Q).squeeze(1)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(1, keepdim=True)
