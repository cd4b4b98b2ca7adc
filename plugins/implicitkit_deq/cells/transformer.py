r"""The weight-tied transformer block: self-attention with the input injected into queries, keys and values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell


class Transformer(Cell):
    r"""One transformer block with tied weights, the cell of the DEQ-Transformer.

        [Q K V] = z W_{QKV} + x U                      (injection; x U and x S are computed once)
        A_{ij}  = ((Q_i + a)^T K_j + (Q_i + b)^T R_{i-j}) / \sqrt{d_h},   j <= i if causal
        h       = LN(s + softmax(A) V W_O),   s = x S (skip="input"), z (skip="state") or 0 (skip="none")
        f(z; x) = LN(h + W_2 \phi(W_1 h + b_1) + b_2)

    With ``skip="none"`` this is the block as the paper writes it, ``LN(\phi(LN(SelfAttention(z W_{QKV} + \tilde x))))`` with
    a residual ``\phi``; its code adds the state (``"state"``), as Transformer-XL does.  With ``"state"`` the Jacobian is
    near the identity when attention and feed-forward part are small, and ``I - J`` near singular; with ``"input"`` it is
    then near zero, so that a small ``scale`` is a contraction to start training from.

    ``R_{i-j}`` is a linear function of sinusoids of the distance; ``a`` and ``b`` are learned.  Everything but the state is
    shared by all evaluations: the injection, the encoded distances, the mask.

    Shapes: ``x (batch, T, in_features)``, ``z (batch, T, features)``.  With ``memory (batch, M, features)`` and
    ``memory_x (batch, M, in_features)``, the (detached) equilibrium and input of the previous segment, positions attend to
    those ``M`` positions too: ``layer(x, memory, memory_x)``.

    Args:
        in_features: of ``x``. features: of the state, a multiple of ``heads``. heads: attention heads.
        hidden: width of the feed-forward part (default ``4 features``). causal: attend to ``j <= i`` only.
        skip: what the first sum adds to attention, ``"input"``, ``"state"`` or ``"none"``. scale: of the initial weights.
        dropout: in attention weights and after either part; one mask a solve.
        fused: attention by ``torch.nn.functional.scaled_dot_product_attention``, scores by distance as its mask: less
            memory and time for long sequences, where a fast kernel of PyTorch's takes such a mask; of it only first
            derivatives in reverse mode are.

    Raises:
        ValueError: sizes that do not fit.

    Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", section 3.2; Dai et al. (2019), "Transformer-XL",
    section 3.3 (relative positions).
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        heads: int = 1,
        *,
        hidden: int | None = None,
        causal: bool = True,
        skip: str = "input",
        dropout: float = 0.0,
        fused: bool = False,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size, flag = options.at_least(1), options.flag()
        options.check_arguments(
            "Transformer",
            in_features=(size, in_features),
            features=(size, features),
            heads=(size, heads),
            hidden=(options.optional(size), hidden),
            causal=(flag, causal),
            skip=(options.one_of("input", "state", "none"), skip),
            dropout=(options.part_of_one(), dropout),
            fused=(flag, fused),
            scale=(options.positive(), scale),
        )
        hidden = 4 * features if hidden is None else hidden
        if features % heads:
            raise ValueError(f"features ({features}) must be a multiple of heads ({heads})")
        if features % 2:
            raise ValueError(f"features must be even (sines and cosines of distances), got {features}")
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.features, self.heads, self.causal, self.skip, self.fused = features, heads, causal, skip, fused
        self.injection = nn.Linear(in_features, (4 if skip == "input" else 3) * features, **made)
        self.qkv = nn.Linear(features, 3 * features, bias=False, **made)
        self.distance = nn.Linear(features, features, bias=False, **made)
        self.content_bias = nn.Parameter(torch.zeros(heads, features // heads, **made))
        self.distance_bias = nn.Parameter(torch.zeros(heads, features // heads, **made))
        self.out = nn.Linear(features, features, bias=False, **made)
        self.first_norm, self.second_norm = nn.LayerNorm(features, **made), nn.LayerNorm(features, **made)
        self.up, self.down = nn.Linear(features, hidden, **made), nn.Linear(hidden, features, **made)
        self.dropout, self.drop = dropout, nn.Dropout(dropout)
        for weight in (self.qkv.weight, self.out.weight, self.up.weight, self.down.weight):
            nn.init.normal_(weight, std=scale * (2 / (5 * features)) ** 0.5)

    def inject(self, x: Tensor, memory: Tensor | None = None, memory_x: Tensor | None = None) -> tuple[Tensor, ...]:
        """``x U`` (and ``x S``), the keys and values of the memory ``(batch, M, 2 features)``, and ``R`` by distance.

        Distances run from ``M + T - 1`` down to ``1 - T``; if causal to -1, the only one of the future that
        :func:`_by_position` needs.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be (batch, positions, features), got shape {tuple(x.shape)}")
        if (memory is None) != (memory_x is None):
            raise ValueError("memory and memory_x go together: the state and the input of the previous segment")
        injected = self.injection(x)
        if memory is None or memory_x is None:
            past = injected.new_zeros(len(x), 0, 2 * self.features)
        else:
            if memory.shape[:2] != memory_x.shape[:2] or len(memory) != len(x):
                raise ValueError(
                    f"memory {tuple(memory.shape)} and memory_x {tuple(memory_x.shape)} must agree in batch and positions, "
                    f"and with the batch of x {tuple(x.shape)}"
                )
            injected_past = self.injection(memory_x)[..., : 3 * self.features]
            past = (self.qkv(memory) + injected_past)[..., self.features :]
        T, M = x.shape[1], past.shape[1]
        distances = torch.arange(M + T - 1, -2 if self.causal else -T, -1, device=x.device)
        encoded = relative_positions(distances, self.features).to(injected)
        return injected, past, self.distance(encoded).expand(len(x), -1, -1)

    def update(self, z: Tensor, injected: Tensor, past: Tensor, distance: Tensor) -> Tensor:
        """One block."""
        injected, skipped = injected.split([3 * self.features, injected.shape[-1] - 3 * self.features], -1)
        attended = self.drop(self._attend(z, injected, past, distance))
        if self.skip != "none":
            attended = attended + (skipped if self.skip == "input" else z)
        h = self.first_norm(attended)
        return self.second_norm(h + self.drop(self.down(torch.relu(self.up(h)))))

    def _attend(self, z: Tensor, injected: Tensor, past: Tensor, distance: Tensor) -> Tensor:
        d = z.shape[2]
        root = math.sqrt(d // self.heads)
        q, kv = (self.qkv(z) + injected).split([d, 2 * d], -1)
        k, v = torch.cat([past, kv], 1).chunk(2, -1)
        # each (B, heads, *, d_h)
        q, k, v, r = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v, distance))
        # queries are scaled, not scores, of which there are T times as many
        placed = _by_position(((q + self.distance_bias.unsqueeze(1)) / root) @ r.mT, k.shape[2])
        q = q + self.content_bias.unsqueeze(1)
        if self.fused:
            p = self.dropout if self.training else 0.0
            placed = self._past_only(placed)
            heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=placed, dropout_p=p)
        else:
            heads = self.drop(torch.softmax(self._past_only((q / root) @ k.mT + placed), -1)) @ v
        return self.out(heads.transpose(1, 2).flatten(2))

    def _past_only(self, scores: Tensor) -> Tensor:
        """Scores ``(..., T, M + T)``, minus infinity for keys in the future if causal."""
        if not self.causal:
            return scores
        T, keys = scores.shape[-2:]
        ahead = torch.ones(T, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - T)
        return scores.masked_fill(ahead, -torch.inf)

    def state_shape(self, x: Tensor, *memory: Tensor) -> tuple[int, ...]:
        """``(T, features)``."""
        return (x.shape[1], self.features)

    def recurrent_weights(self) -> list[Tensor]:
        """The weights of attention and of the feed-forward part."""
        return [layer.weight for layer in (self.qkv, self.out, self.up, self.down)]


def relative_positions(distances: Tensor, features: int) -> Tensor:
    """``[sin(d w_k); cos(d w_k)]``, ``w_k = 10000^{-2k / features}``, of distances ``(m,)``: shape ``(m, features)``."""
    rate = 10000 ** -(torch.arange(0, features, 2, dtype=torch.float64, device=distances.device) / features)
    angle = distances.to(torch.float64).unsqueeze(1) * rate
    return torch.cat([angle.sin(), angle.cos()], 1)


def _by_position(scores: Tensor, keys: int) -> Tensor:
    """From scores by distance to scores by key: row ``i`` of ``(..., T, w)`` from column ``T - 1 - i`` on.

    Element ``(i, j)`` lies at ``i w + T - 1 - i + j = (T - 1) + i (w - 1) + j`` of the flattened rows: a view whose rows are
    one shorter, ``w > keys`` (Dai et al. 2019, appendix B).  Where a row ends before ``j`` does, which are keys in the
    future, the view goes on with the next one.
    """
    T, w = scores.shape[-2:]
    if T == 1:
        return scores[..., :keys]
    return scores.flatten(-2)[..., T - 1 : T - 1 + T * (w - 1)].unflatten(-1, (T, w - 1))[..., :keys]
