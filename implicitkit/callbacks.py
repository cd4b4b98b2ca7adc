"""Callbacks for ``solve(..., callback=...)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["progress"]


class progress:
    """A progress bar: steps so far and the worst residual norm.

        solution = ik.fixed_point(cell, z0, (x,), callback=ik.callbacks.progress("equilibrium"))

    One object serves any number of solves, one after another: each gets a bar of its own.  The bar is closed when the
    next solve starts, on leaving the ``with`` block, by :meth:`close`, or when the object is collected.

    Args:
        description: text in front of the bar.
        tqdm_kwargs: passed to ``tqdm.auto.tqdm`` (``total=``, ``disable=``, ``file=``, ``leave=``, ...).

    Raises:
        ImportError: tqdm is not installed (``pip install implicitkit[progress]``).
    """

    def __init__(self, description: str | None = None, **tqdm_kwargs: Any) -> None:
        self._bar: Any = None
        self._step = 0
        if not (description is None or isinstance(description, str)):
            raise TypeError(f"progress: description must be a str or None, got {description!r}")
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("a progress bar needs tqdm: pip install implicitkit[progress]") from error
        self._tqdm = tqdm
        self._options = {"desc": description, "unit": "step", **tqdm_kwargs}

    def __call__(self, step: int, z: Any, residual_norm: Tensor) -> None:
        """Called by the solve after each step."""
        if self._bar is None or step <= self._step:
            self.close()
            self._bar = self._tqdm(**self._options)
        if not self._bar.disable:
            norms = residual_norm.detach()
            worst = float(torch.nan_to_num(norms, nan=torch.inf).max()) if norms.numel() else 0.0
            self._bar.set_postfix_str(f"worst residual {worst:.2e}", refresh=False)
        self._bar.update(step - self._step)
        self._step = step

    def close(self) -> None:
        """Finish the bar; the next call starts a new one."""
        bar, self._bar, self._step = self._bar, None, 0
        if bar is not None:
            bar.close()

    def __enter__(self) -> progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
