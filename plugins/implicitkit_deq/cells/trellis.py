r"""TrellisNet: a weight-tied, dilated, causal convolution with the gates of an LSTM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicitkit_deq.cells.base import Cell

__all__ = ["TrellisNet"]


class TrellisNet(Cell):
    r"""The cell of the DEQ-TrellisNet on states ``z = [c, h]``, for position ``t`` and dilation ``s``:

        [i, o, g, f]_t = \sum_{j<k} W_j h_{t - (k-1-j) s} + U x_t + b
        c_t <- \sigma(f) c_{t-s} + \sigma(i) tanh(g)
        h_t <- \sigma(o) tanh(c_t)

    that is ``\psi(Conv1D([u, z]; W) + \tilde x)`` with the history ``u`` of ``(k-1) s`` positions (at least ``s``) in front:
    zeros, or the end of the state of the previous segment, with which a sequence cut in two gives what it gives whole.

    Shapes: ``x (batch, T, in_features)``, ``z (batch, T, 2 features)``, history ``(batch, m, 2 features)`` with any
    ``m >= max((k-1) s, s)``, of which the last are used: ``layer(x, history)``.  The output is ``h`` unless ``full_output``.

    What a position remembers comes from the one before, so that the equilibrium is reached front by front, from the first
    position to the last.  Plain iteration (``solver="picard"``) follows; Anderson's or Broyden's coefficients of single
    positions do not know of the front and can send the positions behind it far away while it passes.

    Args:
        in_features: of ``x``. features: of ``h`` and of ``c``. kernel: ``k``. dilation: ``s``.
        full_output: return ``[c, h]``, which is what a history is made of.
        scale: spectral norm of the recurrent weights at the start.

    Raises:
        ValueError: a size that is not positive; a history that is too short.

    Source: Bai, Kolter & Koltun (2019), "Trellis networks for sequence modeling", section 4 (gates); (2019), "Deep
    equilibrium models", section 3.2.
    """

    causal = True

    def __init__(
        self,
        in_features: int,
        features: int,
        kernel: int = 2,
        dilation: int = 1,
        *,
        full_output: bool = False,
        scale: float = 0.5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"in_features": in_features, "features": features, "kernel": kernel, "dilation": dilation}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.features, self.kernel, self.dilation, self.full_output = features, kernel, dilation, full_output
        self.injection = nn.Linear(in_features, 4 * features, dtype=dtype, device=device)
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

    def inject(self, x: Tensor, history: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``U x + b`` and the history, ``(batch, m, 2 features)``."""
        if x.ndim != 3:
            raise ValueError(f"x must be (batch, positions, features), got shape {tuple(x.shape)}")
        injected, needed = self.injection(x), self.history_length
        if history is None:
            return injected, injected.new_zeros(len(x), needed, 2 * self.features)
        if history.ndim != 3 or len(history) != len(x) or history.shape[1] < needed:
            raise ValueError(
                f"a history is (batch, at least {needed} positions, {2 * self.features}), with the batch of x "
                f"({len(x)}); got shape {tuple(history.shape)}"
            )
        return injected, history[:, -needed:]

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

    def state_shape(self, x: Tensor, *history: Tensor) -> tuple[int, ...]:
        """``(T, 2 features)``."""
        return (x.shape[1], 2 * self.features)

    def recurrent_weights(self) -> list[Tensor]:
        """The kernel of the convolution."""
        return [self.recurrent.weight]
