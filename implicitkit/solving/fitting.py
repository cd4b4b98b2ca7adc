r"""Fitting a model to data: ``scipy.optimize.curve_fit``, in batches, differentiable in everything.

    minimise over p   |L^{-1} (f(x, p) - y)|^2 / 2,     L = diag(\sigma), or the Cholesky factor of a covariance

The covariance of the parameters is ``(J^T J)^{-1}``, ``J`` the Jacobian of the weighted residuals at the fit, times
``|r|^2 / (m - n)`` unless the errors of the data are absolute (Bates & Watts 1988, *Nonlinear Regression Analysis*, section
2.3).  Under a robust loss, its Hessian and its value at the fit stand for ``J^T J`` and ``|r|^2``, as in SciPy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, recording
from implicitkit.foundation.arrays import from_arrays, from_numbers
from implicitkit.foundation.constants import look
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.foundation.options import at_least, check_arguments, check_call, flag, one_of, optional
from implicitkit.foundation.tracers import opaque_to_compile
from implicitkit.foundation.trees import tree_map
from implicitkit.foundation.wording import kind_of
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.problem.robust import Robust
from implicitkit.solution import Solution
from implicitkit.solving.users_errors import raise_in_words
from implicitkit.solving.verbs import least_squares


class _Fit(NamedTuple):
    parameters: Tensor
    covariance: Tensor


class CurveFit(_Fit):
    """The result of a fit: the pair of ``parameters`` ``(*batch, n)`` and their ``covariance`` ``(*batch, n, n)``.  The
    whole solution is in ``solution`` (``None`` if the fit has come through a transform of ``torch.func``).

    Units: those of the parameters, and their products.
    """

    solution: Solution | None

    def __new__(cls, parameters: Tensor, covariance: Tensor, solution: Solution | None = None) -> CurveFit:
        fit = super().__new__(cls, parameters, covariance)
        fit.solution = solution
        return fit


@opaque_to_compile
def curve_fit(
    f: Callable[..., Tensor],
    xdata: Any,
    ydata: Any,
    p0: Any = None,
    sigma: Any = None,
    *,
    absolute_sigma: bool = False,
    nan_policy: str | None = None,
    batch_dims: int = 0,
    has_aux: bool = False,
    **options: Any,
) -> CurveFit:
    r"""Fit ``f(xdata, *p)`` to ``ydata`` by (robust, bounded) least squares.

        fit = ik.curve_fit(lambda x, a, k: a * torch.exp(-k * x), x, y, torch.tensor([1.0, 1.0]))
        p, covariance = fit           # differentiable in x, y, sigma, bounds and whatever f captures
        fit.solution                  # what least_squares returned

    It minimises ``|(f(x, p) - y) / sigma|^2``; the covariance is ``(J^T J)^{-1}`` of the weighted residuals.  Source:
    Seber & Wild (1989), *Nonlinear Regression*, chapter 2.

    Args:
        f: the model, called as ``f(xdata, *p)``, with one tensor for each parameter: a number, or with ``batch_dims`` of
            shape ``(*batch, 1)``, so that it broadcasts against data of shape ``(*batch, m)``.
        xdata: what the model is evaluated at, a pytree of tensors. ydata: ``(*batch, m)``.  Here and below NumPy arrays
            and lists of numbers become tensors.
        p0: where to start, ``(*batch, n)``; ``None``: at ones, one for each parameter in the signature of ``f``.
        sigma: standard deviations of the data, ``(m,)`` or ``(*batch, m)``, one number for all, or their covariance
            ``(m, m)``, which the batch shares (of a batch of ``m``, standard deviations).
        absolute_sigma: ``sigma`` (one, if absent) is in the units of the data; else only its ratios count, as in SciPy.
        nan_policy: ``"omit"`` leaves out the data with NaN in ``ydata`` or in a leaf of ``xdata`` whose last dimension is
            ``m``, sample by sample; ``"raise"`` refuses them before the solve; ``None``: they fail it.
        batch_dims: leading dimensions of independent fits. has_aux: ``f`` returns ``(value, aux)``; ``fit.solution.aux``.
        options: ``bounds=``, ``loss=``, ``f_scale=``, ``x_scale=`` of :class:`~implicitkit.LeastSquares`, and those of
            :func:`~implicitkit.solve`.

    Returns:
        A :class:`CurveFit`.

    Raises:
        ValueError: shapes that do not fit together, or NaN under ``nan_policy="raise"``.
        ConvergenceError: as in :func:`~implicitkit.solve`.

    Warns:
        ConvergenceWarning: no more data than parameters, or data that do not tell parameters apart (a Jacobian of lower
            rank), so that the covariance is infinite.
    """
    if not callable(f):
        raise TypeError(
            f"curve_fit takes the model first, f(xdata, *p), then xdata and ydata; its first argument is {kind_of(f)}"
        )
    given = {"absolute_sigma": (flag(), absolute_sigma), "has_aux": (flag(), has_aux)}
    policy = (optional(one_of("omit", "raise")), nan_policy)
    check_arguments("curve_fit", batch_dims=(at_least(0), batch_dims), nan_policy=policy, **given)
    data, p0 = _read(f, xdata, ydata, p0, sigma, batch_dims)
    if nan_policy is not None:
        data = _filled(data, batch_dims)
        if nan_policy == "raise" and not compat.is_wrapped(data.use) and not recording.holds(data.use.all()):
            raise ValueError("xdata or ydata contain NaN: nan_policy='omit' leaves such data out")
    if data.sigma is not None and data.whole:
        look(_check_covariance, data.sigma)
    residuals = _residuals(f, data, batch_dims, has_aux)
    args = (data.x, data.y) if data.sigma is None else (data.x, data.y, data.sigma)
    solution = least_squares(residuals, p0, args, batch_dims=batch_dims, has_aux=has_aux, **options)
    p: Tensor = solution.value
    alone = (lambda *given: residuals(*given)[0]) if has_aux else residuals
    try:
        r, J = _linearised(alone, p, args, batch_dims)
    except Exception as error:
        raise_in_words(error, p, args)
    if options.get("loss", "linear") != "linear":
        r, J = _robust(r, J, Robust(lambda r: r, options["loss"], options.get("f_scale", 1.0)))
    count = data.y.shape[-1] if data.use is None else data.use.sum(-1)
    return CurveFit(p, _covariance(r, J, absolute_sigma, count), solution)


class _Data(NamedTuple):
    """What a model is fitted to.

    Attributes:
        x: what the model is evaluated at. y: ``(*batch, m)``. sigma: standard deviations, or their covariance.
        whole: the latter. use: which data count, of the shape of ``y``; ``None``: all.
    """

    x: Any
    y: Tensor
    sigma: Tensor | None
    whole: bool
    use: Any = None


def _read(f: Any, xdata: Any, ydata: Any, p0: Any, sigma: Any, batch_dims: int) -> tuple[_Data, Tensor]:
    """The data and the start as tensors whose shapes fit together."""
    ydata = _tensor(ydata)
    xdata = from_numbers(from_arrays(xdata), ydata)
    sigma = None if sigma is None else _tensor(sigma, ydata)
    if type(sigma) in (int, float) and isinstance(ydata, Tensor):
        sigma = torch.full_like(ydata, sigma)
    p0 = _ones(f, ydata, batch_dims) if p0 is None else _tensor(p0, ydata)
    _check(ydata, p0, sigma, batch_dims)
    check_call(f"f(xdata{''.join(f', p{i}' for i in range(p0.shape[-1]))})", f)
    m = ydata.shape[-1]
    return _Data(xdata, ydata, sigma, sigma is not None and sigma.shape == (m, m) != ydata.shape), p0


def _residuals(f: Callable[..., Any], data: _Data, batch_dims: int, has_aux: bool) -> Callable[..., Any]:
    """``L^{-1} (f(x, p) - y)`` as a function of ``p`` and of the data, zero where these do not count."""
    whole, use = data.whole, data.use

    def residuals(p: Tensor, x: Any, y: Tensor, s: Tensor | None = None) -> Any:
        parameters = p.unbind(-1) if not batch_dims else [q.unsqueeze(-1) for q in p.unbind(-1)]
        value = _evaluated(f, x, parameters)
        value, *aux = value if has_aux else (value,)
        _check_values(value, y)
        r = value - y if use is None else torch.where(use, value - y, 0)
        if whole and s is not None:
            r = torch.linalg.solve_triangular(torch.linalg.cholesky(s), r.unsqueeze(-1), upper=False).squeeze(-1)
        elif s is not None:
            r = r / s
        return (r, *aux) if has_aux else r

    return residuals


def _evaluated(f: Callable[..., Any], x: Any, parameters: Sequence[Tensor]) -> Any:
    try:
        return f(x, *parameters)
    except (IndexError, TypeError) as error:
        if "0-d" not in str(error):
            raise
        said = (
            "The model is called as f(xdata, *p), with a number of its own for each parameter: f(x, a, b), not f(x, p)"
        )
        raise type(error)(f"{str(error).rstrip('.')}. {said}") from error


def _missing(x: Any, y: Tensor, batch_dims: int) -> Tensor | None:
    """Which data have a NaN in ``x``, of the shape of ``ydata`` or, where all samples share them, ``(m,)``; ``None``: ``x``
    is no tensor of data."""
    if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] != y.shape[-1]:
        return None
    nan, shared = x.detach().isnan(), x.ndim <= batch_dims or x.shape[:batch_dims] != y.shape[:batch_dims]
    kept = 0 if shared else batch_dims
    return nan.flatten(kept, -2).any(kept) if nan.ndim > kept + 1 else nan


def _filled(data: _Data, batch_dims: int) -> _Data:
    """The data with numbers in the place of NaN, and which data have none.

    In ``y`` the number is zero; in ``x`` that of the first datum without, at which the model has a value; in the
    covariance of the data, a datum stands by itself.
    """
    y, sigma = data.y, data.sigma
    use = ~y.detach().isnan()

    def leaf(x: Any) -> Any:
        nonlocal use
        missing = _missing(x, y, batch_dims)
        if missing is None:
            return x
        use = use & ~missing
        missing = missing.reshape(missing.shape[:-1] + (1,) * (x.ndim - missing.ndim) + missing.shape[-1:])
        first = missing.long().argmin(-1, keepdim=True)
        return torch.where(missing, x.gather(-1, first.expand(*x.shape[:-1], 1)), x)

    x = tree_map(leaf, data.x)
    if sigma is not None and data.whole:
        both = use.unsqueeze(-1) & use.unsqueeze(-2)
        sigma = torch.where(both, sigma, torch.eye(len(sigma), dtype=sigma.dtype, device=sigma.device))
    elif sigma is not None:
        sigma = torch.where(use, sigma, 1)
    return _Data(x, torch.where(use, y, 0), sigma, data.whole, use)


@despite_inference_mode
def _robust(r: Tensor, J: Tensor, loss: Robust) -> tuple[Tensor, Tensor]:
    r"""What stands for ``r`` and ``J`` under a robust loss ``h(r) = f_s^2 \rho((r / f_s)^2) / 2``: residuals whose squares
    add up to it, and ``\sqrt{h''} J``, so that an outlier counts in neither as a datum does."""

    def slope(q: Tensor) -> Tensor:
        g: Tensor = autodiff.vjp(lambda q: loss(q).square() / 2, q)[1](torch.ones_like(q))[0]
        return g

    curvature = autodiff.vjp(slope, r)[1](torch.ones_like(r))[0].clamp_min(torch.finfo(r.dtype).eps)
    curvature = curvature if _is_differentiated(r) else curvature.detach()
    return loss(r), curvature.sqrt().unsqueeze(-1) * J


def _covariance(r: Tensor, J: Tensor, absolute_sigma: bool, m: Any) -> Tensor:
    """``(J' J)^{-1}`` ``(*batch, n, n)``, times ``|r|^2 / (m - n)`` unless sigma is absolute; infinite, and said, where the
    data do not tell.  ``r``: ``(*batch, m)``; ``J``: ``(*batch, m, n)``.  Columns are taken in units of their length: which
    parameters the data determine does not depend on the units of these."""
    n = J.shape[-1]
    units = torch.linalg.vector_norm(J.detach(), dim=-2, keepdim=True)
    units = torch.where(units > 0, units, 1)
    inverse = torch.linalg.pinv(J / units) / units.mT
    covariance = inverse @ inverse.mT
    m = torch.as_tensor(m, device=J.device)
    if not absolute_sigma:
        few = m <= n
        if not compat.is_wrapped(few) and recording.holds(few.any()):
            data = f"{int(m.min())} data are"
            warn(f"{data} too few to estimate the covariance of {n} parameters: it is infinite", ConvergenceWarning)
        covariance = covariance * (r.square().sum(-1) / (m - n).clamp_min(1))[..., None, None]
        covariance = torch.where(few[..., None, None], torch.inf, covariance)
    blind = torch.linalg.matrix_rank((J / units).detach()) < n
    if not compat.is_wrapped(blind) and recording.holds(blind.any()):
        warn("the data do not determine all parameters: their covariance is infinite", ConvergenceWarning)
    return torch.where(blind[..., None, None], torch.inf, covariance)


@recording.refusing()
@despite_inference_mode
def _linearised(residuals: Callable[..., Tensor], p: Tensor, args: Any, batch_dims: int) -> tuple[Tensor, Tensor]:
    """The residuals and ``J`` ``(*batch, m, n)`` at ``p``: samples are independent, so that one pass a parameter does."""
    r = residuals(p, *args)
    again, pullback = autodiff.vjp(lambda q: residuals(q, *args), p)
    # v -> J v: the transpose of w -> J' w
    products = autodiff.vjp(lambda w: pullback(w)[0], torch.ones_like(again))[1]

    def column(i: int) -> Tensor:
        unit = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)[i].expand_as(p)
        product: Tensor = products(unit)[0]
        return product

    J = torch.stack([column(i) for i in range(p.shape[-1])], -1)
    return r, J if _is_differentiated(r) else J.detach()


def _is_differentiated(r: Tensor) -> bool:
    return r.requires_grad or compat.transforms_active() or compat.has_forward_level()


def _tensor(given: Any, like: Tensor | None = None) -> Any:
    """Arrays and lists of numbers as a tensor: lists and integers of the dtype of ``like``, lists on its device."""
    dtype, device = (like.dtype, like.device) if isinstance(like, Tensor) else (torch.get_default_dtype(), None)
    if isinstance(given, (list, tuple)):
        return torch.tensor(given, dtype=dtype, device=device)
    given = from_arrays(given)
    counts = isinstance(given, Tensor) and not given.is_floating_point() and not given.is_complex()
    return given.to(dtype) if counts else given


def _ones(f: Callable[..., Tensor], ydata: Tensor, batch_dims: int) -> Tensor:
    """A start of ones for the parameters that ``f`` names."""
    parameters = list(inspect.signature(f).parameters.values())[1:]
    if not parameters or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise ValueError("the signature of f does not say how many parameters there are: pass p0")
    return ydata.new_ones(*ydata.shape[:batch_dims], len(parameters))


def _check_values(value: Any, y: Tensor) -> None:
    if isinstance(value, Tensor) and value.is_complex():
        raise TypeError(
            "f returned complex numbers: fit real and imaginary parts as twice as many data, or minimise "
            "f - y by ik.least_squares, which takes them as they are"
        )
    fits = (
        isinstance(value, Tensor)
        and value.dim() <= y.dim()
        and all(have in (1, want) for have, want in zip(reversed(value.shape), reversed(y.shape), strict=False))
    )
    if not fits:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
        raise ValueError(f"f must return one number for each of the data, shape {tuple(y.shape)}; it returned {got}")


def _check_covariance(sigma: Tensor) -> None:
    """Raise where a covariance is none: its Cholesky factor would not be there, or be that of its lower half."""
    near = torch.finfo(sigma.dtype).eps ** 0.5 * sigma.abs().amax((-2, -1), keepdim=True)
    if bool(((sigma - sigma.mT).abs() > near).any()) or bool(torch.linalg.cholesky_ex(sigma).info.any()):
        raise ValueError("sigma, the covariance of the data, must be symmetric and positive definite, and is not")


def _check(ydata: Any, p0: Any, sigma: Any, batch_dims: int) -> None:
    for name, value in (("ydata", ydata), ("p0", p0)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: pass torch.as_tensor({name})")
        if value.is_complex():
            raise TypeError(f"{name} is complex: pass real and imaginary parts, or minimise f - y by ik.least_squares")
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
        if sigma.ndim < 2 and not compat.is_wrapped(sigma) and not bool((sigma > 0).all()):
            raise ValueError("sigma holds standard deviations, which are positive: leave out data with none")
