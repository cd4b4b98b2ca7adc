r"""TrellisNet: a weight-tied, dilated, causal convolution with the gates of an LSTM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell


class TrellisNet(Cell):
    r"""The cell of the DEQ-TrellisNet on states ``z = [c, h]``, for position ``t`` and dilation ``s``:

        [i, o, g, f]_t = \sum_{j<k} W_j h_{t - (k-1-j) s} + \sum_{j<k'} U_j x_{t - (k'-1-j) s} + b
        c_t <- \sigma(f) c_{t-s} + \sigma(i) tanh(g)
        h_t <- \sigma(o) tanh(c_t)

    that is ``\psi(Conv1D([u, z]; W) + \tilde x)``, ``\tilde x = Conv1D(x; U)``, with the history ``u`` of ``(k-1) s``
    positions (at least ``s``) in front: zeros, or the end of the state of the previous segment, with which (and with the end
    of its input) a sequence cut in two gives what it gives whole.

    Shapes: ``x (batch, T, in_features)``, ``z (batch, T, 2 features)``, history ``(batch, m, 2 features)`` with any
    ``m >= max((k-1) s, s)``, input history ``(batch, m', in_features)`` with any ``m' >= (k'-1) s``, of which the last are
    used: ``layer(x, history, input_history)``.  The output is ``h`` unless ``full_output``.

    What a position remembers comes from the one before, so that the equilibrium is reached front by front, from the first
    position to the last.  Plain iteration (``solver="picard"``) follows; Anderson's or Broyden's coefficients of single
    positions do not know of the front and can send the positions behind it far away while it passes.

    Args:
        in_features: of ``x``. features: of ``h`` and of ``c``. kernel: ``k``. dilation: ``s``.
        input_kernel: ``k'``, of the convolution over the input; ``None``: ``k``, as in the paper; 1: ``U x_t`` alone.
        full_output: return ``[c, h]``, which is what a history is made of.
        scale: spectral norm of the recurrent weights at the start.

    Raises:
        ValueError: a size that is not positive; a history that is too short.

    Source: Bai, Kolter & Koltun (2019), "Trellis networks for sequence modeling" (the gates); (2019), "Deep equilibrium
    models", section 3.2.
    """

    causal = True

    def __init__(
        self,
        in_features: int,
        features: int,
        kernel: int = 2,
        dilation: int = 1,
        *,
        input_kernel: int | None = None,
        full_output: bool = False,
        scale: float = 0.5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size = options.at_least(1)
        options.check_arguments(
            "TrellisNet",
            in_features=(size, in_features),
            features=(size, features),
            kernel=(size, kernel),
            dilation=(size, dilation),
            input_kernel=(options.optional(size), input_kernel),
            full_output=(options.flag(), full_output),
            scale=(options.positive(), scale),
        )
        input_kernel = kernel if input_kernel is None else input_kernel
        self.features, self.kernel, self.dilation, self.full_output = features, kernel, dilation, full_output
        self.input_kernel = input_kernel
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.injection: nn.Module = nn.Linear(in_features, 4 * features, **made)
        if input_kernel > 1:
            self.injection = nn.Conv1d(in_features, 4 * features, input_kernel, dilation=dilation, **made)
        self.recurrent = nn.Conv1d(
            features, 4 * features, kernel, dilation=dilation, bias=False, dtype=dtype, device=device
        )
        with torch.no_grad():
            flat = torch.empty(4 * features, features * kernel, dtype=dtype, device=device)
            nn.init.orthogonal_(flat, gain=scale)
            self.recurrent.weight.copy_(flat.unflatten(1, (features, kernel)))

    @property
    def history_length(self) -> int:
        """Positions of the past that the cell looks back on: ``max((k-1) s, s)``."""
        return max((self.kernel - 1) * self.dilation, self.dilation)

    def inject(
        self, x: Tensor, history: Tensor | None = None, input_history: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``Conv1D(x; U) + b`` and the history, ``(batch, m, 2 features)``."""
        if x.ndim != 3:
            raise ValueError(f"x must be (batch, positions, features), got shape {tuple(x.shape)}")
        needed = (self.input_kernel - 1) * self.dilation
        before = self._past(input_history, x, needed, x.shape[2], "an input history")
        injected = self.injection(torch.cat([before, x], 1).mT).mT if self.input_kernel > 1 else self.injection(x)
        return injected, self._past(history, injected, self.history_length, 2 * self.features, "a history")

    @staticmethod
    def _past(given: Tensor | None, like: Tensor, needed: int, features: int, name: str) -> Tensor:
        """The last ``needed`` positions of what came before, zeros if there was nothing."""
        if given is None:
            return like.new_zeros(len(like), needed, features)
        if given.ndim != 3 or len(given) != len(like) or given.shape[1] < needed or given.shape[2] != features:
            raise ValueError(
                f"{name} is (batch, at least {needed} positions, {features}), with the batch of x ({len(like)}); got shape "
                f"{tuple(given.shape)}"
            )
        return given[:, given.shape[1] - needed :]

    def update(self, z: Tensor, injected: Tensor, history: Tensor) -> Tensor:
        """One layer of the trellis."""
        T, past, reach = z.shape[1], history.shape[1], (self.kernel - 1) * self.dilation
        c, h = torch.cat([history, z], 1).chunk(2, -1)
        gates = self.recurrent(h[:, past - reach :].mT).mT + injected
        i, o, g, f = gates.chunk(4, -1)
        before = c[:, past - self.dilation :][:, :T]
        c = torch.sigmoid(f) * before + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([c, torch.sigmoid(o) * torch.tanh(c)], -1)

    def output(self, z: Tensor) -> Tensor:
        """``h``, or the whole state."""
        return z if self.full_output else z[..., self.features :]

    def state_shape(self, x: Tensor, *past: Tensor) -> tuple[int, ...]:
        """``(T, 2 features)``."""
        return (x.shape[1], 2 * self.features)

    def recurrent_weights(self) -> list[Tensor]:
        """The kernel of the convolution."""
        return [self.recurrent.weight]
