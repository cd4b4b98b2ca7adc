"""A point at which a step has been looked for is not evaluated a second time, whatever became of the trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.compat import transforms_active
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.factored import chord_steps

D = torch.float64
_N = 160


def _valleys(z: Tensor) -> Tensor:
    return torch.cat([3 * (z[1:] - z[:-1] ** 2), 1 - z])


def _rosenbrock(z: Tensor) -> Tensor:
    return torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])


#: verb, solver, function, unknowns, start, and how often a point on the way is evaluated: once more to linearise there
_CASES: dict[str, tuple[Callable[..., ik.Solution], str, Callable[[Tensor], Tensor], int, float, int]] = {
    "parts of a step": (ik.least_squares, "levenberg_marquardt", _valleys, _N, -0.5, 1),
    "dogleg": (ik.least_squares, "dogleg", _valleys, _N, -0.5, 1),
    "products": (ik.least_squares, "newton_cg", _valleys, _N, -0.5, 2),
    "trust region": (ik.root, "trust_region", _rosenbrock, 2, -1.2, 2),
    "df_sane": (ik.root, "df_sane", _rosenbrock, 2, -1.2, 1),
}
_LOOKED_AT = 3  # points that are looked at once more: the first, the last, and the best


@pytest.mark.parametrize("name", list(_CASES))
def test_no_point_is_evaluated_twice_in_its_steps(name: str) -> None:
    verb, solver, function, n, start, most = _CASES[name]
    seen: Counter[bytes] = Counter()

    def counted(z: Tensor) -> Tensor:
        if not transforms_active():
            seen[z.detach().numpy().tobytes()] += 1
        return function(z)

    verb(counted, torch.full((n,), start, dtype=D), solver=solver, on_failure="ignore", max_steps=8)
    assert len(seen) >= 8
    assert all(count <= most for _, count in seen.most_common()[_LOOKED_AT:]), seen.values()


@pytest.mark.parametrize(("far", "evaluations"), [(1e6, 1), (1.0, 0)])
def test_steps_with_old_factors_in_vain_cost_one_evaluation(far: float, evaluations: int) -> None:
    """The point that they have not led away from is as well known as before; a step that is longer than the last one (here
    ``far``) is not tried."""

    class Far:
        """Factors of quite another matrix."""

        def solve(self, b: Tensor) -> Tensor:
            return -100 * b

        def size(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    seen = []

    class Once(ik.Method):
        solves = "root"

        def init(self, f: Evaluations, z: Tensor) -> None:
            return None

        def step(self, f: Evaluations, z: Tensor, state: None) -> tuple[Tensor, None]:
            f(z)
            before = f.evaluations
            assert chord_steps(f, Far(), z, 10 * f.norm, z + far) is z
            f(z)
            seen.append(f.evaluations - before)
            return z - f(z), state

    ik.root(lambda z: 0.5 * z - 1, torch.zeros(3, dtype=D), solver=Once(), max_steps=4, on_failure="ignore")
    assert seen and set(seen) == {evaluations}
