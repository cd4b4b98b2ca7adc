"""Functions of one vector with the pattern of their Jacobian: exact (``extra=0``) or known to be over-estimated.

The reference is the set of entries that are not zero in any of several dense Jacobians at random points (and in the
positions where a value may hide an entry, those written down by hand).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PATTERNS", "Case"]


@dataclass(frozen=True)
class Case:
    """``function: (batch, n) -> (batch, m)``; ``extra``: entries that detection may add; ``hidden``: entries that random
    points do not show; ``guesses``: operations without a rule are expected."""

    name: str
    function: Callable[[Tensor], Tensor]
    n: int = 12
    extra: int = 0
    hidden: tuple[tuple[int, int], ...] = ()
    guesses: bool = False


_g = torch.Generator().manual_seed(7)
_LAPLACE = torch.diag(torch.full((12,), 2.0)) - torch.diag(torch.ones(11), 1) - torch.diag(torch.ones(11), -1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that its CSR tensors are in beta
    _SPARSE = _LAPLACE.double().to_sparse_csr()
_COO = _LAPLACE.double().to_sparse_coo()
_KERNEL = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=torch.float64)[None, None]
_EDGES = torch.tensor([[0, 0, 1, 2, 5, 7, 9], [3, 4, 4, 11, 6, 8, 10]])
_PERMUTED = torch.randperm(12, generator=_g)
_FIVE, _RANGE = torch.tensor([[0, 5]]), torch.arange(6.0, dtype=torch.float64)[None]
_STATISTICS = tuple(torch.rand(4, 4, generator=_g, dtype=torch.float64) + 0.1)
_POINTS = torch.randn(5, 3, generator=_g, dtype=torch.float64)
_FORM = torch.randn(2, 3, 3, generator=_g, dtype=torch.float64)
_MASK = torch.arange(12) % 3 == 0


def _grid(z: Tensor) -> Tensor:
    return z.view(-1, 3, 4)


def _image(z: Tensor) -> Tensor:
    return z.view(-1, 1, 6, 6)


def _inplace(z: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    out[:, 1:] = z[:, 1:] - z[:, :-1]
    out[:, 0] += z[:, 3]
    out.mul_(z)
    return out


def _rows(z: Tensor) -> Tensor:
    out = torch.empty_like(z)
    for i in range(z.shape[1]):
        out[:, i] = z[:, i] * z[:, (i * 5) % 12]
    return out


def _gradient(objective: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gradient(z: Tensor) -> Tensor:
        with torch.enable_grad():
            y = z.detach().requires_grad_() if not z.requires_grad else z
            (g,) = torch.autograd.grad(objective(y).sum(), y, create_graph=True)
        return g

    return gradient


def _functional(z: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: (x[1:] * x[:-1] ** 2).sum()))(z)


def _network(z: Tensor) -> Tensor:
    i, j = _EDGES
    flow = torch.sinh(z[:, i] - z[:, j])
    return torch.zeros_like(z).index_add(1, i, flow).index_add(1, j, -flow) + z


def _scatter(z: Tensor) -> Tensor:
    return torch.zeros_like(z).scatter_add(1, _PERMUTED.expand_as(z), z.roll(2, 1) ** 2)


def _put(z: Tensor) -> Tensor:
    out = z.clone()
    out[:, _EDGES[0, :3]] = z[:, 5:8].exp()
    return out


def _complex(z: Tensor) -> Tensor:
    w = torch.view_as_complex(z.view(-1, 6, 2).contiguous())
    return torch.view_as_real(w * w.roll(1, 1)).reshape(z.shape)


def _rosenbrock(z: Tensor) -> Tensor:
    return (100 * (z[:, 1:] - z[:, :-1] ** 2) ** 2 + (1 - z[:, :-1]) ** 2).sum(1)


def _sampled(z: Tensor) -> Tensor:
    x = torch.sin(torch.arange(50).double()).view(1, 2, 5, 5).expand(len(z), 2, 5, 5)
    return F.grid_sample(x, z.view(-1, 3, 4, 2) / 4, align_corners=False).flatten(1)


def _bags(mode: str = "sum", **options: Any) -> Callable[[Tensor], Tensor]:
    """Bags of rows of each sample's table; the second of three is empty, a row is twice in one, and one is padding."""
    rows, first = torch.tensor([0, 2, 2, 3, 1, 0]), torch.tensor([0, 3, 3])
    own = options.pop("own", False)

    def bags(z: Tensor) -> Tensor:
        numbers = [{"per_sample_weights": x[:6].sin()} if own else {} for x in z]
        tables = zip(z, numbers, strict=True)
        return torch.stack(
            [F.embedding_bag(rows, x.view(4, 3), first, mode=mode, **n, **options) for x, n in tables]
        ).flatten(1)

    return bags


def _attention(masked: Callable[[Tensor], Any] | None = None, causal: bool = False) -> Callable[[Tensor], Tensor]:
    def attention(z: Tensor) -> Tensor:
        x = z.view(-1, 2, 3, 2)
        mask = None if masked is None else masked(z)
        return F.scaled_dot_product_attention(x, 2 * x, x.sin(), mask, is_causal=causal).flatten(1)

    return attention


_SEEN = torch.tensor([[True, True, False], [False, True, True], [True, False, True]])


def _resized(**options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, **options)


_RESAMPLED = [
    ("bilinear", _resized(scale_factor=2, mode="bilinear"), 0),
    ("bilinear to five by three", _resized(size=(5, 3), mode="bilinear"), 0),
    ("bilinear, corners", _resized(size=(9, 4), mode="bilinear", align_corners=True), 0),
    ("bicubic", _resized(size=(11, 4), mode="bicubic"), 0),
    ("nearest", _resized(size=(4, 13), mode="nearest"), 0),
    ("nearest-exact", _resized(size=(4, 13), mode="nearest-exact"), 0),
    ("linear", lambda x: F.interpolate(x[:, :, 0], size=9, mode="linear"), 0),
    ("trilinear", lambda x: F.interpolate(x[:, :, None], size=(2, 4, 9), mode="trilinear"), 0),
    ("adaptive average", lambda x: F.adaptive_avg_pool2d(x, (4, 3)), 0),
    ("adaptive average, 3d", lambda x: F.adaptive_avg_pool3d(x.view(-1, 1, 4, 3, 3), (3, 2, 2)), 0),
]
_AIMS = torch.arange(12).double() / 4 - 1
_LOSSES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "mse": lambda z, r: F.mse_loss(z, z.roll(1, 1) ** 2, reduction=r),
    "huber": lambda z, r: F.huber_loss(z, _AIMS.expand_as(z), reduction=r, delta=3.0),
    "smooth l1": lambda z, r: F.smooth_l1_loss(z, _AIMS.expand_as(z), reduction=r, beta=4.0),
    "soft margin": lambda z, r: F.soft_margin_loss(z, _AIMS.sign().expand_as(z), reduction=r),
    "cross entropy": lambda z, r: F.binary_cross_entropy(z.sigmoid(), _AIMS.sigmoid().expand_as(z), reduction=r),
    "classes": lambda z, r: F.cross_entropy(z.view(-1, 4), torch.arange(3 * len(z)) % 4, reduction=r),
    "classes on a grid": lambda z, r: F.cross_entropy(
        z.view(-1, 3, 2, 2), (torch.arange(4 * len(z)) % 3).view(-1, 2, 2), reduction=r
    ),
    "leaky": lambda z, r: F.leaky_relu(z - z.roll(1, 1), 0.2) ** 2,
}


PATTERNS = [
    Case("square", lambda z: z**2),
    Case("affine", lambda z: 3 * z + 1),
    Case("zero times z", lambda z: 0 * z + z.roll(1, 1), hidden=tuple((i, i) for i in range(12))),
    Case("value hides", lambda z: z * (z * 0).roll(1, 1) + z, hidden=tuple((i, (i - 1) % 12) for i in range(12))),
    Case("roll", lambda z: z * z.roll(1, 1)),
    Case("flip", lambda z: torch.sin(z.flip(1)) + z),
    Case("slices", lambda z: torch.cat([z[:, :1], z[:, 1:] - z[:, :-1]], 1)),
    Case("pad constant", lambda z: F.pad(z, (1, 1))[:, 2:] + F.pad(z, (1, 1))[:, :-2]),
    Case("pad with seven", lambda z: F.pad(z, (1, 1), value=7.0)[:, 2:] * z),
    Case("pad with much", lambda z: F.pad(_grid(z), (1, 1, 1, 1), value=-1e9)[:, 2:, 1:-1].clamp(min=-9).flatten(1)),
    Case("pad circular", lambda z: F.pad(z[:, None], (1, 1), mode="circular")[:, 0, 2:] * z),
    Case("pad reflect", lambda z: F.pad(z[:, None], (2, 2), mode="reflect")[:, 0, 4:] + z),
    Case("pad replicate", lambda z: F.pad(z[:, None], (1, 1), mode="replicate")[:, 0, :-2] * z),
    Case("stencil in place", _inplace),
    Case("row by row", _rows),
    Case("diff", lambda z: torch.diff(z, prepend=z[:, :1]) ** 2 + z),
    Case("grid", lambda z: (F.pad(_grid(z), (1, 1, 1, 1))[:, 2:, 1:-1] * _grid(z)).flatten(1), extra=4),
    Case("transpose", lambda z: _grid(z).mT.reshape(-1, 12) + z),
    Case("permute", lambda z: z.view(-1, 2, 3, 2).permute(0, 3, 1, 2).reshape(-1, 12) * 2),
    Case("select", lambda z: z[:, 3:4] + z),
    Case("index", lambda z: z[:, _PERMUTED].cos() + z),
    Case("index by mask", lambda z: z[:, _MASK] ** 2),
    Case("index_select", lambda z: z.index_select(1, _EDGES[1]) ** 3),
    Case("gather", lambda z: z.gather(1, _PERMUTED.expand_as(z)) * z),
    Case("take_along_dim", lambda z: torch.take_along_dim(z, _PERMUTED.expand_as(z), 1).exp()),
    Case("index_add", _network),
    Case("scatter_add", _scatter),
    Case("index_put", _put),
    Case("index_copy", lambda z: z.index_copy(1, torch.tensor([0, 4]), z[:, 6:8] ** 2)),
    Case("scatter", lambda z: z.scatter(1, torch.tensor([[0, 5]]).expand(len(z), 2), z[:, 8:10].exp()), extra=2),
    Case("index_fill", lambda z: z.index_fill(1, torch.tensor([0, 4]), 2.0) ** 2),
    Case("masked_fill", lambda z: z.masked_fill(_MASK, 0.0) + z.roll(3, 1), extra=12, hidden=((0, 0),)),
    Case("where, both branches", lambda z: torch.where(z > 0, z, z.roll(1, 1)), extra=24),
    Case("relu", lambda z: torch.relu(z) + z.roll(1, 1), extra=12),
    Case("clamp and abs", lambda z: z.abs() + z.clamp(-9, 9)),
    Case("leaves", lambda z: torch.cat([t * z[:, 0:1] for t in z.split(4, 1)], 1)),
    Case("unbind, stack", lambda z: torch.stack([t**2 for t in z.unbind(1)][::-1], 1)),
    Case("chunk sums", lambda z: z.view(-1, 4, 3).sum(2)),
    Case("mean kept", lambda z: (z.view(-1, 4, 3) - z.view(-1, 4, 3).mean(2, keepdim=True)).flatten(1)),
    Case("norms", lambda z: z.view(-1, 4, 3).norm(dim=2)),
    Case("logsumexp", lambda z: z.view(-1, 4, 3).logsumexp(2)),
    Case("softmax", lambda z: z.view(-1, 4, 3).softmax(2).flatten(1)),
    Case("batch norm, given statistics", lambda z: F.batch_norm(z.view(-1, 4, 3), *_STATISTICS).flatten(1)),
    Case("its gradient", _gradient(lambda z: F.batch_norm(z.view(-1, 4, 3), *_STATISTICS).pow(3).sum((1, 2)))),
    Case("instance norm", lambda z: F.instance_norm(z.view(-1, 4, 3)).flatten(1)),
    Case("gradient of instance norm", _gradient(lambda z: F.instance_norm(z.view(-1, 4, 3)).pow(3).sum((1, 2)))),
    Case("group norm", lambda z: F.group_norm(z.view(-1, 4, 3), 2, *_STATISTICS[2:]).flatten(1)),
    Case("gradient of group norm", _gradient(lambda z: F.group_norm(z.view(-1, 4, 3), 2).pow(3).sum((1, 2)))),
    Case("masked scatter", lambda z: z.masked_scatter(_MASK, (z[:, 1:] ** 2).T.contiguous().T[:, :4])),
    Case(
        "gradient of a masked scatter",
        _gradient(lambda z: z.masked_scatter(_MASK, z.sin()[:, :4]).pow(3).sum(1)),
        extra=5,
    ),
    Case("distances", lambda z: torch.cdist(z.view(-1, 4, 3), _POINTS.expand(len(z), 5, 3)).flatten(1)),
    Case(
        "distances of itself",
        lambda z: torch.cdist(z.view(-1, 4, 3), z.view(-1, 4, 3).flip(1), p=3.0).flatten(1),
        extra=12,
    ),
    Case("distances of pairs", lambda z: torch.stack([F.pdist(x.view(4, 3)) for x in z])),
    Case("bilinear form", lambda z: F.bilinear(z.view(-1, 4, 3), z.view(-1, 4, 3).flip(1), _FORM).flatten(1)),
    Case(
        "gradient of a bilinear form",
        _gradient(lambda z: F.bilinear(z.view(-1, 4, 3), z.view(-1, 4, 3).cos(), _FORM).pow(2).sum((1, 2))),
    ),
    Case("bags", _bags()),
    Case("bags, mean", _bags("mean", padding_idx=3)),
    Case("bags, largest", _bags("max"), extra=9),
    Case("bags with numbers of their own", _bags(own=True)),
    Case("attention", _attention()),
    Case("attention to what came before", _attention(causal=True), extra=4),
    Case("attention to what a mask shows", _attention(lambda z: _SEEN)),
    Case("attention with a mask of numbers", _attention(lambda z: z.view(-1, 2, 3, 2).flip(1)[..., :1] * _AIMS[:3])),
    Case("attention to what values show", _attention(lambda z: _SEEN | (z.view(-1, 2, 3, 2)[..., :1] > 0))),
    Case(
        "attention of two heads to one",
        lambda z: F.scaled_dot_product_attention(
            z[:, :8].view(-1, 2, 2, 2), *z[:, 4:].view(-1, 2, 1, 2, 2).unbind(1), is_causal=True, enable_gqa=True
        ).flatten(1),
        extra=12,
    ),
    Case(
        "a factor that values choose", lambda z: ((z[:, :6].view(-1, 2, 3) > 0).double() @ z.view(-1, 3, 4)).flatten(1)
    ),
    Case("a kernel that values choose", lambda z: F.conv1d(z[None], (z[:, None, 3:6] > 0).double(), groups=len(z))[0]),
    Case(
        "views in place",
        lambda z: (z.view(-1, 3, 4) ** 2).transpose_(1, 2).unsqueeze_(1).squeeze_(1).sum(2).flatten(1),
    ),
    Case("layer norm", lambda z: F.layer_norm(z.view(-1, 4, 3), (3,)).flatten(1)),
    Case("cumsum, whole", lambda z: z.view(-1, 4, 3).cumsum(2).flatten(1), extra=12),
    Case("amax", lambda z: z.view(-1, 4, 3).amax(2), extra=12),
    Case("sort", lambda z: z.view(-1, 4, 3).sort(2).values.flatten(1), extra=36),
    Case("argsort decides", lambda z: z.gather(1, z.argsort(1)), extra=144),
    Case("the largest of each line", lambda z: _grid(z).gather(2, _grid(z).argmax(2, True)).flatten(1), extra=12),
    Case(
        "two of each line, of some lines",
        lambda z: _grid(z).gather(2, _grid(z).argsort(2)[:, :3, :2]).flatten(1),
        extra=18,
    ),
    Case(
        "a row that values choose",
        lambda z: _grid(z).index_select(1, _grid(z)[0, :, 0].argmax()[None]).flatten(1),
        extra=12,
    ),
    Case(
        "gradient of a choice",
        _gradient(lambda z: _grid(z).gather(2, _grid(z).argmax(2, True)).pow(3).sum((1, 2))),
        extra=45,
    ),
    Case(
        "a place that values choose",
        lambda z: (_grid(z) * 0).scatter(2, _grid(z).argmax(2, True), _grid(z).sin()[..., :1]).flatten(1),
        extra=36,
    ),
    Case(
        "cross product",
        lambda z: torch.linalg.cross(z.view(-1, 4, 3), z.view(-1, 4, 3).roll(1, 1)).flatten(1),
        extra=24,
    ),
    Case("sum of all", lambda z: z + z.sum(1, keepdim=True)),
    Case("scalar sum", lambda z: z.square().sum(1, keepdim=True)),
    Case("unfold", lambda z: z.unfold(1, 3, 1).prod(2)),
    Case("dense matrix with zeros", lambda z: z @ _LAPLACE.double().T + z**3),
    Case("matrix from the left", lambda z: (_LAPLACE.double() @ z.T).T),
    Case("sparse csr matrix", lambda z: torch.mv(_SPARSE, z[0])[None] if len(z) == 1 else (_SPARSE @ z.T).T),
    Case("sparse coo matrix", lambda z: torch.sparse.mm(_COO, z.T).T),
    Case("batched matmul", lambda z: (z.view(-1, 3, 2, 2) @ torch.ones(2, 2).double()).flatten(1)),
    Case("both factors", lambda z: (z.view(-1, 3, 2, 2) @ z.view(-1, 3, 2, 2)).flatten(1)),
    Case("einsum", lambda z: torch.einsum("bij,jk->bik", z.view(-1, 6, 2), torch.eye(2).double()).flatten(1)),
    Case("inverse by blocks", lambda z: (z.view(-1, 3, 2, 2) + 3 * torch.eye(2)).inverse().flatten(1)),
    Case(
        "solve by blocks",
        lambda z: torch.linalg.solve(z.view(-1, 3, 2, 2) + 3 * torch.eye(2), torch.ones(2, 1).double()).flatten(1),
    ),
    Case("conv1d", lambda z: F.conv1d(z[:, None], torch.ones(1, 1, 3).double(), padding=1)[:, 0] * z),
    Case("conv1d dilated", lambda z: F.conv1d(z[:, None], torch.ones(1, 1, 3).double(), padding=2, dilation=2)[:, 0]),
    Case("conv2d five points", lambda z: F.conv2d(_image(z), _KERNEL, padding=1).flatten(1) + z**3, n=36),
    Case("conv2d strided", lambda z: F.conv2d(_image(z), torch.ones(2, 1, 2, 2).double(), stride=2).flatten(1), n=36),
    Case(
        "conv2d groups",
        lambda z: F.conv2d(z.view(-1, 2, 3, 3), torch.ones(2, 1, 3, 3).double(), padding=1, groups=2).flatten(1),
        n=18,
    ),
    Case("conv transposed", lambda z: F.conv_transpose1d(z[:, None], torch.ones(1, 1, 3).double(), padding=1)[:, 0]),
    Case("avg_pool", lambda z: F.avg_pool2d(_image(z), 2).flatten(1), n=36),
    Case("max_pool", lambda z: F.max_pool2d(_image(z), 2).flatten(1), n=36, extra=36),
    Case("upsample", lambda z: F.interpolate(z[:, None, ::2], scale_factor=2, mode="nearest")[:, 0] * z),
    Case("embedding-like table", lambda z: F.embedding(_EDGES[0], z[0][:, None])[None, :, 0].expand(len(z), -1)),
    Case("fft by rows", lambda z: torch.fft.rfft(z.view(-1, 4, 3), dim=2).abs().flatten(1)),
    Case("complex pairs", _complex),
    Case("gradient of Rosenbrock", _gradient(_rosenbrock)),
    Case("gradient with exp, cat, pad", _gradient(lambda z: (F.pad(z, (0, 1))[:, 1:] * z.exp()).sum(1)), extra=1),
    Case(
        "gradient of a convolution",
        _gradient(lambda z: F.conv2d(_image(z), _KERNEL, padding=1).pow(4).sum((1, 2, 3))),
        n=36,
    ),
    Case("gradient of unfold", _gradient(lambda z: z.unfold(1, 3, 1).prod(2).pow(2).sum(1))),
    Case("gradient of windows", _gradient(lambda z: F.unfold(_image(z), 2).prod(1).pow(2).sum(1)), n=36),
    Case("windows put together", lambda z: F.fold(z.view(-1, 4, 9), (4, 4), 2).flatten(1) ** 2, n=36),
    *(
        Case(
            f"gradient of pad {mode}",
            _gradient(lambda z, m=mode: F.pad(z[:, None], (2, 2), mode=m).diff().pow(4).sum((1, 2))),
        )
        for mode in ("reflect", "replicate")
    ),
    Case(
        "gradient of pad replicate, in two dimensions",
        _gradient(lambda z: F.pad(_image(z), (1, 1, 1, 1), mode="replicate").diff().pow(4).sum((1, 2, 3))),
        n=36,
    ),
    Case(
        "gradient of a table",
        _gradient(lambda z: (F.embedding(_EDGES[0], z.T) - F.embedding(_EDGES[1], z.T)).pow(4).sum(0)),
    ),
    Case(
        "scatter of a part of constants",
        lambda z: z.scatter(1, _FIVE.expand(len(z), 2), _RANGE.expand(len(z), -1)) ** 2,
    ),
    Case("rows that values choose", lambda z: z[:, z[0].argsort()[:3]].sin(), extra=36, guesses=True),
    Case("added where values say", lambda z: z.index_add(1, z[0].argsort()[:2], z[:, :2]), extra=144, guesses=True),
    Case(
        "put where values say",
        lambda z: z.index_put((torch.arange(len(z))[:, None], z.argsort(1)[:, :2]), z[:, :2]),
        extra=144,
        guesses=True,
    ),
    Case(
        "kernel of unknowns",
        lambda z: F.conv1d(z[None], z[:, None, :3], padding=1, groups=len(z))[0],
        extra=144,
        guesses=True,
    ),
    Case(
        "gradient of a kernel of unknowns",
        _gradient(lambda z: F.conv1d(z[None], z[:, None, :3], padding=1, groups=len(z))[0].pow(2).sum(1)),
        extra=144,
        guesses=True,
    ),
    Case("gradient of gather", _gradient(lambda z: (z[:, _EDGES[0]] - z[:, _EDGES[1]]).pow(4).sum(1))),
    Case("vmap of grad inside", _functional),
    Case(
        "linspace loop",
        lambda z: sum((z.roll(k, 1) * k for k in range(3)), torch.zeros_like(z)),
        hidden=tuple((i, i) for i in range(12)),
    ),
    Case(
        "dropout off, linear layer",
        lambda z: F.linear(z.view(-1, 4, 3), torch.ones(3, 3).double(), torch.ones(3).double()).flatten(1),
    ),
    Case(
        "unknown operation",
        lambda z: torch.special.i0e(z) + torch.linalg.lstsq(torch.eye(12).double(), z.T).solution.T,
        extra=144,
        guesses=True,
    ),
    Case("detached part", lambda z: z.detach().roll(1, 1) * z, extra=12),
    Case("tril", lambda z: z.view(-1, 3, 2, 2).tril().flatten(1) ** 2, hidden=()),
    Case("distances from what is no batch", lambda z: torch.cdist(z.view(-1, 4, 3), _POINTS).flatten(1)),
    Case("distances by products", lambda z: torch.cdist(_POINTS, z.view(-1, 26, 3)).flatten(1), n=78),
    Case("repeat", lambda z: z[:, :6].repeat(1, 2) * z),
    Case("outer with constants", lambda z: (z.view(-1, 6, 2)[:, :, :, None] * torch.ones(2).double()).flatten(1)),
    Case("renorm", lambda z: z.view(-1, 6, 2).flatten(0, 1).renorm(2, 0, 0.5).view(z.shape)),
    Case("hardswish", lambda z: F.hardswish(z - z.roll(1, 1))),
    Case("samples of an image", _sampled, n=24),
    Case("gradient of samples of an image", _gradient(lambda z: _sampled(z).exp().sum(1)), n=24),
    Case(
        "gradient of samples that are compared",
        _gradient(lambda z: (_sampled(z) * _sampled(z).roll(1, 1)).sum(1)),
        n=24,
        extra=24,  # a bilinear image is linear in each coordinate of a place
    ),
    Case("glu", lambda z: F.glu(z.view(-1, 3, 4), 2).flatten(1)),
    Case("gradient of glu", _gradient(lambda z: F.glu(z.view(-1, 3, 4), 2).exp().sum((1, 2)))),
    Case("gradient of layer norm", _gradient(lambda z: F.layer_norm(z.view(-1, 3, 4), (4,)).exp().sum((1, 2)))),
    Case("gradient of avg_pool", _gradient(lambda z: F.avg_pool2d(_image(z), 3, 2, 1).exp().sum((1, 2, 3))), n=36),
    Case("gradient of max_pool", _gradient(lambda z: F.max_pool2d(_image(z), 2).exp().sum((1, 2, 3))), n=36, extra=124),
    *(
        Case(f"{mode}, {how}", turn(lambda z, f=function: f(_image(z)).flatten(1)), n=36, extra=extra)
        for mode, function, extra in _RESAMPLED
        for how, turn in (("forward", lambda f: f), ("gradient", lambda f: _gradient(lambda z: f(z).exp().sum(1))))
    ),
    *(
        Case(f"gradient of {name}, {reduction}", _gradient(lambda z, f=f, r=reduction: f(z, r).sum() + (z**3).sum()))
        for name, f in _LOSSES.items()
        for reduction in ("none", "mean", "sum")
    ),
    Case("losses one by one", lambda z: sum(f(z, "none").reshape(len(z), -1) for f in list(_LOSSES.values())[:4])),
]
