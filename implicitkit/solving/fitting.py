r"""Fitting a model to data: ``scipy.optimize.curve_fit``, in batches, differentiable in everything.

    minimise over p   |L^{-1} (f(x, p) - y)|^2 / 2,     L = diag(\sigma), or the Cholesky factor of a covariance

The covariance of the parameters is ``(J^T J)^{-1}``, ``J`` the Jacobian of the weighted residuals at the fit, times
``|r|^2 / (m - n)`` unless the errors of the data are absolute (Bates & Watts 1988, *Nonlinear Regression Analysis*, section
2.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.solution import Solution
from implicitkit.solving.verbs import least_squares

__all__ = ["CurveFit", "curve_fit"]


class CurveFit(NamedTuple):
    """A fit: ``parameters`` ``(*batch, n)``, their ``covariance`` ``(*batch, n, n)``, and the whole ``solution``.

    Units: those of the parameters, and their products.
    """

    parameters: Tensor
    covariance: Tensor
    solution: Solution


def curve_fit(
    f: Callable[..., Tensor],
    xdata: Any,
    ydata: Tensor,
    p0: Tensor,
    sigma: Tensor | None = None,
    *,
    absolute_sigma: bool = False,
    batch_dims: int = 0,
    **options: Any,
) -> CurveFit:
    r"""Fit ``f(xdata, *p)`` to ``ydata`` by (robust, bounded) least squares.

        fit = ik.curve_fit(lambda x, a, k: a * torch.exp(-k * x), x, y, torch.tensor([1.0, 1.0]))
        fit.parameters, fit.covariance        # differentiable in x, y, sigma, bounds and whatever f captures

    It minimises ``|(f(x, p) - y) / sigma|^2``; the covariance is ``(J^T J)^{-1}`` of the weighted residuals.  Source:
    Seber & Wild (1989), *Nonlinear Regression*, chapter 2.

    Args:
        f: the model, called as ``f(xdata, *p)``, with one tensor for each parameter: a number, or with ``batch_dims`` of
            shape ``(*batch, 1)``, so that it broadcasts against data of shape ``(*batch, m)``.
        xdata: what the model is evaluated at, a pytree of tensors. ydata: ``(*batch, m)``.
        p0: where to start, ``(*batch, n)``.
        sigma: standard deviations of the data, ``(m,)`` or ``(*batch, m)``, or their covariance ``(m, m)``.
        absolute_sigma: ``sigma`` (one, if absent) is in the units of the data; else only its ratios count, as in SciPy.
        batch_dims: leading dimensions of independent fits.
        options: ``bounds=``, ``loss=``, ``f_scale=``, ``x_scale=`` of :class:`~implicitkit.LeastSquares`, and those of
            :func:`~implicitkit.solve`.

    Returns:
        A :class:`CurveFit`.

    Raises:
        ValueError: shapes that do not fit together. ConvergenceError: as in :func:`~implicitkit.solve`.

    Warns:
        ConvergenceWarning: no more data than parameters, so that the covariance is infinite.
    """
    _check(ydata, p0, sigma, batch_dims)
    m, n = ydata.shape[-1], p0.shape[-1]
    whole = sigma is not None and sigma.ndim == 2 and sigma.shape == (m, m) and batch_dims == 0

    def residuals(p: Tensor, x: Any, y: Tensor, s: Tensor | None = None) -> Tensor:
        parameters = p.unbind(-1) if not batch_dims else [q.unsqueeze(-1) for q in p.unbind(-1)]
        r = f(x, *parameters) - y
        if s is None:
            return r
        if whole:
            return torch.linalg.solve_triangular(torch.linalg.cholesky(s), r.unsqueeze(-1), upper=False).squeeze(-1)
        return r / s

    args = (xdata, ydata) if sigma is None else (xdata, ydata, sigma)
    solution = least_squares(residuals, p0, args, batch_dims=batch_dims, **options)
    p: Tensor = solution.value
    r, J = _linearised(residuals, p, args, batch_dims)
    inverse = torch.linalg.pinv(J)
    covariance = inverse @ inverse.mT
    if not absolute_sigma:
        if m <= n:
            warn(f"{m} data for {n} parameters say nothing of their covariance: it is infinite", ConvergenceWarning)
            covariance = torch.full_like(covariance, torch.inf)
        else:
            covariance = covariance * (r.square().sum(-1) / (m - n))[..., None, None]
    return CurveFit(p, covariance, solution)


def _linearised(residuals: Callable[..., Tensor], p: Tensor, args: Any, batch_dims: int) -> tuple[Tensor, Tensor]:
    """The residuals and ``J`` ``(*batch, m, n)`` at ``p``: samples are independent, so that one pass a parameter does."""
    r, pullback = torch.func.vjp(lambda q: residuals(q, *args), p)[:2]
    products = torch.func.vjp(lambda w: pullback(w)[0], torch.zeros_like(r))[1]  # v -> J v: the transpose of w -> J' w

    def column(i: int) -> Tensor:
        unit = torch.zeros_like(p)
        unit[..., i] = 1
        product: Tensor = products(unit)[0]
        return product

    return r, torch.stack([column(i) for i in range(p.shape[-1])], -1)


def _check(ydata: Any, p0: Any, sigma: Any, batch_dims: int) -> None:
    for name, value in (("ydata", ydata), ("p0", p0)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: pass torch.as_tensor({name})")
        if value.ndim != batch_dims + 1:
            raise ValueError(
                f"{name} must have {batch_dims + 1} dimension(s), batch_dims={batch_dims} and one more; its shape is "
                f"{tuple(value.shape)}"
            )
    if ydata.shape[:batch_dims] != p0.shape[:batch_dims]:
        raise ValueError(f"the batch of ydata is {tuple(ydata.shape[:-1])}, that of p0 {tuple(p0.shape[:-1])}")
    if sigma is not None:
        m = ydata.shape[-1]
        if not isinstance(sigma, Tensor) or (sigma.shape != (m, m) and sigma.shape[-1:] != (m,)):
            got = tuple(sigma.shape) if isinstance(sigma, Tensor) else type(sigma).__name__
            raise ValueError(
                f"sigma must hold a standard deviation for each of the {m} data, or their covariance; got {got}"
            )
