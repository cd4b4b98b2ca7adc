"""Newton's steps in a trust region, for as long as each costs little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.minimise.newton_cg import Model, NewtonCG, steihaug
from implicitkit.solver.steps.paths import Path
from implicitkit.solver.steps.spectral_trust_region import price_of_spectrum
from implicitkit.sparsity.patterns import SMALLEST

_CHEAP = 25.0  # products of conjugate gradients, of which a step of L-BFGS costs some five


@dataclass(frozen=True)
class FrugalNewtonCG(NewtonCG):
    """``newton_cg`` while a step costs no more than 25 products: those of conjugate gradients, or what they cost that show a
    dense Hessian, and its eigenvalues (an objective of a few operations, up to some hundred unknowns, or thirty in each of
    64 samples).  As soon as one takes more, or would at the rate of its first few products, every sample is given up.

    Out of a well, past an inflection or along a curved valley it takes a quarter of the steps of L-BFGS, which goes on from
    where it gives up.
    """

    name: ClassVar[str] = "newton_cg"
    hands_over: ClassVar[bool] = True

    def _begun(
        self, f: Evaluations, model: Model, path: Path | None, made: float, rent: float = 0.0, begins: bool = False
    ) -> Any:
        if f.eps > torch.finfo(model.g.dtype).eps:  # what is left to L-BFGS
            f.stuck = f.active
            return None, None
        if model.g.shape[1] < SMALLEST and (made or price_of_spectrum(model.H) <= _CHEAP):
            return super()._begun(f, model, path, made, rent)
        tried = steihaug(*model, _CHEAP, path=path)
        if tried is None:
            f.stuck = f.active
        return tried, None
