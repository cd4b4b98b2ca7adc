"""Functions of torch, each of twelve numbers: what an implicit function may be made of."""

# ruff: noqa: B023, E501, E731, SIM905

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

__all__ = ["table"]


def table() -> dict[str, tuple[Callable[[Tensor], Tensor], float]]:
    """By name: the function, and near which number each of the twelve shall be.  Of the default dtype at the call."""
    T: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {}
    S = torch.special

    def t(name: str, f: Callable[[Tensor], Tensor], off: float = 0.0) -> None:
        T[name] = (f, off)

    i3 = torch.tensor([0, 2, 1, 0, 2, 1, 1, 0, 2, 2, 0, 1])

    def img(x):
        return x.reshape(1, 1, 3, 4)

    def sq(x):
        return x[:9].reshape(3, 3)

    def spd(x):
        a = sq(x)
        return a @ a.mT + 2 * torch.eye(3)

    def cell(c, h):
        return lambda x: c(
            x[:3].reshape(1, 3), (x[3:6].reshape(1, 3), x[6:9].reshape(1, 3)) if h else x[3:6].reshape(1, 3)
        )

    for n in "abs acos acosh:2 asin asinh atan atanh ceil cos cosh deg2rad digamma:2 erf erfc erfinv exp exp2 expm1 floor frac i0 lgamma:2 log:2 log10:2 log1p:1 log2:2 logit:.5 nan_to_num neg positive rad2deg reciprocal:2 relu round rsqrt:2 sigmoid sign sgn sin sinc sinh softmax sqrt:2 square tan tanh trunc".split():
        n, _, o = n.partition(":")
        if n == "softmax":
            t(n, lambda x: torch.softmax(x, 0))
            continue
        if n in ("acosh",):
            t(n, torch.acosh, 2.0)
            continue
        t(n, getattr(torch, n), float(o or 0))
    for n in "airy_ai bessel_j0 bessel_j1 bessel_y0:2 bessel_y1:2 entr:2 erfcx gammaln:2 i0e i1 i1e log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0:2 modified_bessel_k1:2 scaled_modified_bessel_k0:2 scaled_modified_bessel_k1:2 ndtr ndtri:.5 psi:2 spherical_bessel_j0 expit".split():
        n, _, o = n.partition(":")
        t("special." + n, getattr(S, n), float(o or 0))
    t("special.polygamma", lambda x: S.polygamma(1, x), 2)
    t("special.multigammaln", lambda x: S.multigammaln(x, 2), 3)
    t("special.xlogy", lambda x: S.xlogy(x, x + 1), 2)
    t("special.xlog1py", lambda x: S.xlog1py(x, x), 2)
    t("special.zeta", lambda x: S.zeta(torch.tensor(2.5) + 0 * x, x), 3)
    t("special.gammainc", lambda x: S.gammainc(torch.tensor(1.5), x), 2)
    t("special.gammaincc", lambda x: S.gammaincc(torch.tensor(1.5), x), 2)
    t("special.gammainc_a", lambda x: S.gammainc(x, torch.tensor(1.5)), 2)
    t("special.logsumexp", lambda x: S.logsumexp(x.reshape(3, 4), 1))
    t("special.log_softmax", lambda x: S.log_softmax(x, 0))
    t("special.cheb_t", lambda x: S.chebyshev_polynomial_t(x, torch.tensor(3)))
    for n in "atan2 hypot logaddexp logaddexp2 maximum minimum fmax fmin copysign remainder fmod pow float_power heaviside dist nextafter ldexp true_divide".split():
        t(
            n,
            (lambda n: lambda x: getattr(torch, n)(x, x.flip(0) * 0.7 + 0.1))(n),
            2 if n in ("pow", "float_power", "true_divide") else 0,
        )
    for n in "cumsum cumprod logcumsumexp cummax cummin".split():
        t(
            n,
            (
                lambda n: (
                    lambda x: (lambda r: r if isinstance(r, torch.Tensor) else r[0])(
                        getattr(torch, n)(x.reshape(3, 4), 1)
                    )
                )
            )(n),
        )
    for n in "sum prod mean std var amax amin max min median nanmedian nansum nanmean logsumexp norm aminmax".split():
        t(
            n,
            (
                lambda n: (
                    lambda x: (lambda r: r if isinstance(r, torch.Tensor) else r[0])(
                        getattr(torch, n)(x.reshape(3, 4), dim=1)
                    )
                )
            )(n),
        )
    t("mode", lambda x: torch.mode(x.reshape(3, 4), 1)[0])
    t("kthvalue", lambda x: torch.kthvalue(x.reshape(3, 4), 2, 1)[0])
    t("quantile", lambda x: torch.quantile(x.reshape(3, 4), 0.3, dim=1))
    t("nanquantile", lambda x: torch.nanquantile(x.reshape(3, 4), 0.3, dim=1))
    t("sort", lambda x: torch.sort(x.reshape(3, 4), 1)[0])
    t("msort", lambda x: torch.msort(x.reshape(3, 4)))
    t("topk", lambda x: torch.topk(x.reshape(3, 4), 2, 1)[0])
    t("std_mean", lambda x: torch.cat(torch.std_mean(x.reshape(3, 4), 1)))
    t("renorm", lambda x: torch.renorm(x.reshape(3, 4), 2, 0, 0.5))
    t("prod_zero", lambda x: torch.prod(torch.cat([x[:3], 0 * x[:1]])).reshape(1))
    t("cov", lambda x: torch.cov(x.reshape(3, 4)))
    t("corrcoef", lambda x: torch.corrcoef(x.reshape(3, 4)))
    t("trapezoid", lambda x: torch.trapezoid(x.reshape(3, 4)))
    t("cumulative_trapezoid", lambda x: torch.cumulative_trapezoid(x.reshape(3, 4)))
    t("gradient", lambda x: torch.gradient(x)[0])
    t("diff", torch.diff)
    t("cross", lambda x: torch.linalg.cross(x.reshape(4, 3), x.reshape(4, 3).flip(0) + 1))
    t("cdist", lambda x: torch.cdist(x.reshape(3, 4), x.reshape(3, 4).flip(1) * 0.3 + 1))
    t("cdist1", lambda x: torch.cdist(x.reshape(3, 4), x.reshape(3, 4).flip(1) * 0.3 + 1, p=1))
    t(
        "cdist_mm",
        lambda x: torch.cdist(
            x.reshape(3, 4), x.reshape(3, 4).flip(1) * 0.3 + 1, compute_mode="use_mm_for_euclid_dist"
        ),
    )
    t("pdist", lambda x: F.pdist(x.reshape(4, 3)))
    t("gather", lambda x: x.gather(0, i3))
    t("index_select", lambda x: x.index_select(0, i3))
    t("take", lambda x: torch.take(x, i3))
    t("take_along_dim", lambda x: torch.take_along_dim(x, i3, 0))
    t("index_add", lambda x: torch.zeros(3).index_add(0, i3, x))
    t(
        "index_copy",
        lambda x: torch.zeros(12).index_copy(0, torch.randperm(12, generator=torch.Generator().manual_seed(0)), x),
    )
    t("index_put", lambda x: torch.zeros(3).index_put((i3,), x, accumulate=True))
    t("index_fill", lambda x: x.index_fill(0, i3[:1], 0.3))
    t("masked_select", lambda x: x.masked_select(torch.arange(12) % 2 == 0))
    t("masked_scatter", lambda x: torch.zeros(12).masked_scatter(torch.arange(12) % 2 == 0, x))
    t("masked_fill", lambda x: x.masked_fill(torch.arange(12) % 2 == 0, 1.0))
    for r in "sum prod mean amax amin".split():
        t("scatter_reduce." + r, (lambda r: lambda x: torch.ones(3).scatter_reduce(0, i3, x, r))(r))
        t(
            "scatter_reduce_x." + r,
            (lambda r: lambda x: torch.ones(3).scatter_reduce(0, i3, x, r, include_self=False))(r),
        )
        t(
            "segment_reduce." + r,
            (
                lambda r: (
                    lambda x: torch.segment_reduce(
                        x, {"amax": "max", "amin": "min"}.get(r, r), lengths=torch.tensor([4, 5, 3])
                    )
                )
            )(r),
        )
    for r in "prod mean amax amin".split():
        t("index_reduce." + r, (lambda r: lambda x: torch.ones(3).index_reduce(0, i3, x, r))(r))
        t("index_reduce_self." + r, (lambda r: lambda x: x[:3].index_reduce(0, i3, x, r))(r))
    t("scatter", lambda x: torch.zeros(12).scatter(0, torch.arange(12).flip(0), x))
    t("scatter_add", lambda x: torch.zeros(3).scatter_add(0, i3, x))
    t("select_scatter", lambda x: torch.zeros(3, 4).select_scatter(x[:4], 0, 1))
    t("slice_scatter", lambda x: torch.zeros(12).slice_scatter(x[:4], 0, 1, 5))
    t("diagonal_scatter", lambda x: torch.zeros(3, 3).diagonal_scatter(x[:3]))
    t("as_strided", lambda x: torch.as_strided(x, (3, 3), (2, 1)))
    t("as_strided_scatter", lambda x: torch.as_strided_scatter(torch.zeros(12), x[:9].reshape(3, 3), (3, 3), (4, 1)))
    t("as_strided_self", lambda x: (x * 1).as_strided((3, 3), (2, 1), 1))
    t("put", lambda x: torch.zeros(12).put(i3, x, accumulate=True))
    t("bucket", lambda x: x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 4)))
    t("roll", lambda x: x.roll(3))
    t("flip", lambda x: x.flip(0))
    t("rot90", lambda x: torch.rot90(x.reshape(3, 4)))
    t("tril", lambda x: torch.tril(x.reshape(3, 4)))
    t("kron", lambda x: torch.kron(x[:3], x[3:6]))
    t("repeat_interleave", lambda x: x.repeat_interleave(2))
    t("tile", lambda x: x.tile(2))
    t("unfold", lambda x: x.unfold(0, 3, 2))
    t("block_diag", lambda x: torch.block_diag(x[:4].reshape(2, 2), x[4:8].reshape(2, 2)))
    t("vander", lambda x: torch.vander(x[:3]))
    t("cartesian", lambda x: torch.cartesian_prod(x[:2], x[2:4]))
    t("combinations", lambda x: torch.combinations(x[:4]))
    t("diag_embed", lambda x: torch.diag_embed(x[:3]))
    t("tensor_split", lambda x: torch.tensor_split(x, 3)[1])
    t("lerp", lambda x: torch.lerp(x, x.flip(0), 0.3))
    t("addcdiv", lambda x: torch.addcdiv(x, x, x.flip(0) + 3))
    t("einsum", lambda x: torch.einsum("ij,ij,kj->ik", x.reshape(3, 4), x.reshape(3, 4), x.reshape(3, 4)))
    t("tensordot", lambda x: torch.tensordot(x.reshape(3, 4), x.reshape(3, 4), dims=([1], [1])))
    t("bilinear", lambda x: F.bilinear(x[:3], x[3:6], torch.ones(2, 3, 3) * torch.arange(18.0).reshape(2, 3, 3) * 0.05))
    t("where", lambda x: torch.where(x > 0, x * 2, x.exp()))
    t("clamp", lambda x: x.clamp(-0.2, 0.3))
    t("clamp_t", lambda x: torch.clamp(x, min=x.flip(0) * 0.5))
    for n in "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus softshrink softsign tanhshrink".split():
        t("F." + n, getattr(F, n))
    t("F.gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
    t("F.prelu", lambda x: F.prelu(x, x[:1].abs()))
    t("F.rrelu", lambda x: F.rrelu(x, training=False))
    t("F.glu", lambda x: F.glu(x))
    t("F.threshold", lambda x: F.threshold(x, 0.1, 0.2))
    t("F.gumbel", lambda x: F.softmin(x, 0))
    t("F.normalize", lambda x: F.normalize(x, dim=0))
    y = torch.linspace(0.1, 0.9, 12)
    for n in "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss".split():
        t("F." + n, (lambda n: lambda x: getattr(F, n)(x, y).reshape(1))(n))
    t("F.bce", lambda x: F.binary_cross_entropy(x.sigmoid(), y).reshape(1))
    t("F.bce_logits", lambda x: F.binary_cross_entropy_with_logits(x, y).reshape(1))
    t("F.kl_div", lambda x: F.kl_div(F.log_softmax(x, 0), y, reduction="sum").reshape(1))
    t("F.kl_div_t", lambda x: F.kl_div(y.log(), x.softmax(0), reduction="sum").reshape(1))
    t("F.cross_entropy", lambda x: F.cross_entropy(x.reshape(3, 4), torch.tensor([0, 3, 1])).reshape(1))
    t(
        "F.cross_entropy_ls",
        lambda x: F.cross_entropy(
            x.reshape(3, 4), torch.tensor([0, 3, 1]), label_smoothing=0.1, weight=torch.arange(1.0, 5.0)
        ).reshape(1),
    )
    t("F.cross_entropy_p", lambda x: F.cross_entropy(x.reshape(3, 4), x.flip(0).reshape(3, 4).softmax(1)).reshape(1))
    t("F.nll", lambda x: F.nll_loss(F.log_softmax(x.reshape(3, 4), 1), torch.tensor([0, 3, 1])).reshape(1))
    t("F.poisson_nll", lambda x: F.poisson_nll_loss(x, y).reshape(1))
    t("F.gaussian_nll", lambda x: F.gaussian_nll_loss(x, y, x.exp()).reshape(1))
    t("F.hinge", lambda x: F.hinge_embedding_loss(x, torch.ones(12)).reshape(1))
    t("F.margin_rank", lambda x: F.margin_ranking_loss(x, x.flip(0), torch.ones(12)).reshape(1))
    t(
        "F.multilabel_margin",
        lambda x: F.multilabel_margin_loss(x.reshape(3, 4), torch.tensor([[0, 1, -1, -1]] * 3)).reshape(1),
    )
    t("F.multi_margin", lambda x: F.multi_margin_loss(x.reshape(3, 4), torch.tensor([0, 3, 1])).reshape(1))
    t(
        "F.multilabel_soft",
        lambda x: F.multilabel_soft_margin_loss(x.reshape(3, 4), (y.reshape(3, 4) > 0.5).double()).reshape(1),
    )
    t(
        "F.triplet",
        lambda x: F.triplet_margin_loss(
            x.reshape(3, 4), x.reshape(3, 4).flip(0) + 1, x.reshape(3, 4).flip(1) * 0.2
        ).reshape(1),
    )
    t(
        "F.cosine_embedding",
        lambda x: F.cosine_embedding_loss(x.reshape(3, 4), x.reshape(3, 4).flip(0) + 1, torch.ones(3)).reshape(1),
    )
    t("F.cosine_similarity", lambda x: F.cosine_similarity(x.reshape(3, 4), x.reshape(3, 4).flip(1) + 1))
    t("F.pairwise_distance", lambda x: F.pairwise_distance(x.reshape(3, 4), x.reshape(3, 4).flip(1) + 1))
    t(
        "F.ctc",
        lambda x: F.ctc_loss(
            F.log_softmax(x.reshape(4, 1, 3), 2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
        ).reshape(1),
    )
    t("F.conv1d", lambda x: F.conv1d(x[:9].reshape(1, 1, 9), x[9:].reshape(1, 1, 3)))
    t("F.conv2d", lambda x: F.conv2d(img(x), x[:4].reshape(1, 1, 2, 2)))
    t("F.conv_t", lambda x: F.conv_transpose2d(img(x), x[:4].reshape(1, 1, 2, 2)))
    t("F.conv3d", lambda x: F.conv3d(x.reshape(1, 1, 2, 2, 3), x[:4].reshape(1, 1, 2, 2, 1)))
    for p in ("max_pool2d", "avg_pool2d"):
        t("F." + p, (lambda p: lambda x: getattr(F, p)(img(x), 2, 1))(p))
    t("F.lp_pool2d", lambda x: F.lp_pool2d(img(x) + 2, 2.0, 2))
    t("F.lp_pool1d", lambda x: F.lp_pool1d(x.reshape(1, 1, 12) + 2, 3.0, 2))
    t("F.adaptive_avg", lambda x: F.adaptive_avg_pool2d(img(x), 2))
    t("F.adaptive_max", lambda x: F.adaptive_max_pool2d(img(x), 2))
    t("F.max_pool1d", lambda x: F.max_pool1d(x.reshape(1, 1, 12), 3))
    t("F.max_pool3d", lambda x: F.max_pool3d(x.reshape(1, 1, 2, 2, 3), (2, 2, 1)))
    t(
        "F.fractional",
        lambda x: F.fractional_max_pool2d(img(x), 2, output_size=2, _random_samples=torch.full((1, 1, 2), 0.3)),
    )
    t("F.max_unpool", lambda x: F.max_unpool1d(*F.max_pool1d(x.reshape(1, 1, 12), 3, return_indices=True), 3))
    t("F.avg_pool1d", lambda x: F.avg_pool1d(x.reshape(1, 1, 12), 3))
    t("F.avg_pool3d", lambda x: F.avg_pool3d(x.reshape(1, 1, 2, 2, 3), (2, 2, 1)))
    t("F.adaptive_avg1d", lambda x: F.adaptive_avg_pool1d(x.reshape(1, 1, 12), 5))
    t("F.adaptive_max1d", lambda x: F.adaptive_max_pool1d(x.reshape(1, 1, 12), 5))
    t("F.layer_norm", lambda x: F.layer_norm(x.reshape(3, 4), (4,)))
    t("F.layer_norm_w", lambda x: F.layer_norm(x.reshape(3, 4), (4,), x[:4], x[4:8]))
    t("F.group_norm", lambda x: F.group_norm(x.reshape(1, 4, 3), 2))
    t("F.group_norm_w", lambda x: F.group_norm(x.reshape(1, 4, 3), 2, x[:4], x[4:8]))
    t("F.batch_norm", lambda x: F.batch_norm(x.reshape(3, 4), None, None, training=True))
    t("F.batch_norm_eval", lambda x: F.batch_norm(x.reshape(3, 4), torch.zeros(4), torch.ones(4)))
    t("F.instance_norm", lambda x: F.instance_norm(x.reshape(1, 3, 4)))
    t("F.rms_norm", lambda x: F.rms_norm(x.reshape(3, 4), (4,)))
    t("F.local_response", lambda x: F.local_response_norm(x.reshape(1, 4, 3), 2))
    for m in "nearest bilinear bicubic area nearest-exact".split():
        t("F.interpolate." + m, (lambda m: lambda x: F.interpolate(img(x), scale_factor=1.7, mode=m))(m))
    t("F.interpolate.bilinear_aa", lambda x: F.interpolate(img(x), size=(2, 2), mode="bilinear", antialias=True))
    t("F.interpolate.bicubic_aa", lambda x: F.interpolate(img(x), size=(2, 2), mode="bicubic", antialias=True))
    t("F.interpolate.linear", lambda x: F.interpolate(x.reshape(1, 1, 12), size=7, mode="linear"))
    t("F.interpolate.trilinear", lambda x: F.interpolate(x.reshape(1, 1, 2, 2, 3), scale_factor=1.5, mode="trilinear"))
    for m in "bilinear nearest bicubic".split():
        for pm in "zeros border reflection".split():
            t(
                f"F.grid_sample.{m}.{pm}",
                (
                    lambda m, pm: (
                        lambda x: F.grid_sample(
                            img(x), x[:8].reshape(1, 2, 2, 2) * 0.9, mode=m, padding_mode=pm, align_corners=False
                        )
                    )
                )(m, pm),
            )
    t("F.affine_grid", lambda x: F.affine_grid(x[:6].reshape(1, 2, 3), (1, 1, 2, 2)))
    t(
        "F.grid_sample3d",
        lambda x: F.grid_sample(x.reshape(1, 1, 2, 2, 3), x.reshape(1, 2, 2, 1, 3) * 0.7, align_corners=True),
    )
    t(
        "F.sdpa",
        lambda x: F.scaled_dot_product_attention(
            x.reshape(1, 3, 4), x.reshape(1, 3, 4).flip(1), x.reshape(1, 3, 4).flip(2)
        ),
    )
    t(
        "F.sdpa_causal",
        lambda x: F.scaled_dot_product_attention(
            x.reshape(1, 1, 3, 4), x.reshape(1, 1, 3, 4).flip(2), x.reshape(1, 1, 3, 4).flip(3), is_causal=True
        ),
    )
    t("F.embedding", lambda x: F.embedding(torch.tensor([0, 2, 2]), x.reshape(3, 4)))
    for m in "sum mean max".split():
        t(
            "F.embedding_bag." + m,
            (
                lambda m: (
                    lambda x: F.embedding_bag(torch.tensor([0, 2, 2, 1]), x.reshape(3, 4), torch.tensor([0, 2]), mode=m)
                )
            )(m),
        )
    t(
        "F.embedding_bag.w",
        lambda x: F.embedding_bag(
            torch.tensor([0, 2, 2, 1]), x.reshape(3, 4), torch.tensor([0, 2]), mode="sum", per_sample_weights=x[:4]
        ),
    )
    t("F.unfold", lambda x: F.unfold(img(x), 2))
    t("F.fold", lambda x: F.fold(x.reshape(1, 4, 3), (2, 4), 2))
    t("F.pad_reflect", lambda x: F.pad(img(x), (1, 1, 1, 1), mode="reflect"))
    t("F.pad_rep", lambda x: F.pad(img(x), (1, 1, 1, 1), mode="replicate"))
    t("F.pad_circ", lambda x: F.pad(img(x), (1, 1, 1, 1), mode="circular"))
    t("F.pixel_shuffle", lambda x: F.pixel_shuffle(x.reshape(1, 4, 1, 3), 2))
    t("F.channel_shuffle", lambda x: F.channel_shuffle(x.reshape(1, 4, 3), 2))
    _l, _g, _r = (torch.nn.LSTMCell(3, 3), torch.nn.GRUCell(3, 3), torch.nn.RNNCell(3, 3))
    t("LSTMCell", lambda x: cell(_l, 1)(x)[0])
    t("GRUCell", cell(_g, 0))
    t("RNNCell", cell(_r, 0))
    _L = torch.nn.LSTM(3, 3)
    t("LSTM", lambda x: _L(x.reshape(4, 1, 3))[0])
    _G = torch.nn.GRU(3, 3)
    t("GRU", lambda x: _G(x.reshape(4, 1, 3))[0])
    _M = torch.nn.MultiheadAttention(4, 2)
    t("MHA", lambda x: _M(*[x.reshape(3, 1, 4)] * 3)[0])
    _TE = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    t("TransformerLayer", lambda x: _TE(x.reshape(3, 1, 4)))
    LA = torch.linalg
    for n in "cholesky inv det slogdet eigvalsh matrix_exp".split():
        t(
            "la." + n,
            (
                lambda n: (
                    lambda x: (lambda r: r if isinstance(r, torch.Tensor) else r[1])(getattr(LA, n)(spd(x))).reshape(-1)
                )
            )(n),
        )
    t("la.svdvals", lambda x: LA.svdvals(x.reshape(3, 4)))
    t("la.pinv", lambda x: LA.pinv(x.reshape(3, 4)))
    t("la.qr", lambda x: LA.qr(x.reshape(4, 3))[1])
    t("la.lu", lambda x: LA.lu(sq(x) + 2 * torch.eye(3))[1])
    t("la.lu_factor", lambda x: LA.lu_factor(sq(x) + 2 * torch.eye(3))[0])
    t("la.solve", lambda x: LA.solve(sq(x) + 2 * torch.eye(3), x[9:]))
    t("la.solve_tri", lambda x: LA.solve_triangular(sq(x).tril() + 2 * torch.eye(3), x[9:].reshape(3, 1), upper=False))
    t("la.lstsq", lambda x: LA.lstsq(x.reshape(4, 3), x[:4].reshape(4, 1))[0])
    t("la.matrix_power", lambda x: LA.matrix_power(sq(x), 3))
    t("la.matrix_norm", lambda x: LA.matrix_norm(sq(x), "nuc").reshape(1))
    t("la.matrix_norm2", lambda x: LA.matrix_norm(sq(x), 2).reshape(1))
    t("la.cond", lambda x: LA.cond(sq(x) + 2 * torch.eye(3)).reshape(1))
    t("la.vector_norm3", lambda x: LA.vector_norm(x, 3).reshape(1))
    t("la.vector_norminf", lambda x: LA.vector_norm(x, float("inf")).reshape(1))
    t("la.vander", lambda x: LA.vander(x[:3]))
    t("la.householder", lambda x: LA.householder_product(x.reshape(4, 3).tril(), x[:3]))
    t("la.eigh_proj", lambda x: (lambda e: e[1] * e[0].exp() @ e[1].mT)(LA.eigh(spd(x))))
    t("la.eigvals", lambda x: LA.eigvals(sq(x) + torch.diag(torch.tensor([0.0, 3, 6]))).real.sort()[0])
    t("la.ldl", lambda x: LA.ldl_factor(spd(x))[0])
    t("cholesky_solve", lambda x: torch.cholesky_solve(x[9:].reshape(3, 1), LA.cholesky(spd(x))))
    t("cholesky_inverse", lambda x: torch.cholesky_inverse(LA.cholesky(spd(x))))
    t("lu_solve", lambda x: LA.lu_solve(*LA.lu_factor(sq(x) + 2 * torch.eye(3)), x[9:].reshape(3, 1)))
    t("ormqr", lambda x: torch.ormqr(x.reshape(4, 3), x[:3], x[:4].reshape(4, 1)))
    t("multi_dot", lambda x: LA.multi_dot([sq(x), sq(x), x[9:]]))
    t("tensorinv", lambda x: LA.tensorinv((sq(x) + 2 * torch.eye(3)).reshape(3, 3), 1))
    t("logdet", lambda x: torch.logdet(spd(x)).reshape(1))
    t("trace", lambda x: torch.trace(sq(x)).reshape(1))
    t("baddbmm", lambda x: torch.baddbmm(x.reshape(1, 3, 4), sq(x)[None], x.reshape(1, 3, 4)))
    t("chain_matmul", lambda x: torch.addmv(x[:3], sq(x), x[9:]))
    t("svd_lowrank_like", lambda x: LA.svd(x.reshape(3, 4), full_matrices=False)[1])
    c = lambda x: torch.complex(x[:6], x[6:])
    rv = lambda z: torch.view_as_real(z.resolve_conj()).reshape(-1)
    for n in "fft ifft rfft irfft hfft ihfft fftshift".split():
        t(
            "fft." + n,
            (
                lambda n: (
                    lambda x: (lambda r: rv(r) if r.is_complex() else r)(
                        getattr(torch.fft, n)(x if n in ("rfft", "ihfft", "fftshift") else c(x))
                    )
                )
            )(n),
        )
    for n in "fft2 rfft2 irfft2 fftn rfftn hfft2 hfftn".split():
        t(
            "fft." + n,
            (
                lambda n: (
                    lambda x: (lambda r: rv(r) if r.is_complex() else r)(
                        getattr(torch.fft, n)(x.reshape(3, 4) if n[0] == "r" else c(x).reshape(2, 3))
                    )
                )
            )(n),
        )
    t("stft", lambda x: rv(torch.stft(x, 4, 2, window=torch.hann_window(4), return_complex=True)))
    t(
        "istft",
        lambda x: torch.istft(torch.complex(x[:6].reshape(3, 2), x[6:].reshape(3, 2)), 4, 2, window=torch.ones(4)),
    )
    for n in "abs angle sqrt exp log sin tanh reciprocal square sgn conj_physical".split():
        t(
            "complex." + n,
            (lambda n: lambda x: (lambda r: rv(r) if r.is_complex() else r)(getattr(torch, n)(c(x) + (1.3 + 0.4j))))(n),
        )
    for n in "real imag".split():
        t("complex." + n, (lambda n: lambda x: getattr(torch, n)(c(x) ** 2))(n))
    t("complex.polar", lambda x: rv(torch.polar(x[:6].exp(), x[6:])))
    t("complex.mul", lambda x: rv(c(x) * c(x).conj() * c(x).flip(0)))
    t("complex.pow", lambda x: rv((c(x) + 2) ** 1.5))
    t("complex.cumprod", lambda x: rv(torch.cumprod(c(x), 0)))
    t("complex.prod", lambda x: rv(torch.prod(c(x)).reshape(1)))
    t("complex.solve", lambda x: rv(LA.solve(c(x)[:4].reshape(2, 2) + 2 * torch.eye(2), c(x)[4:])))
    t("complex.inv", lambda x: rv(LA.inv(c(x)[:4].reshape(2, 2) + 2 * torch.eye(2))))
    t("complex.matmul", lambda x: rv(c(x).reshape(2, 3) @ c(x).reshape(3, 2)))
    t("complex.vdot", lambda x: rv(torch.vdot(c(x), c(x).flip(0)).reshape(1)))
    t("complex.norm", lambda x: LA.vector_norm(c(x)).reshape(1))
    t("complex.logsumexp", lambda x: rv(torch.logsumexp(c(x), 0).reshape(1)))
    t("complex.logcumsumexp", lambda x: rv(torch.logcumsumexp(c(x), 0)))
    t("complex.sigmoid", lambda x: rv(torch.sigmoid(c(x))))
    t("complex.view", lambda x: (lambda v: rv(torch.view_as_complex(v) ** 2))(x.reshape(6, 2)))
    t("logcumsumexp_rev", lambda x: x.flip(0).logcumsumexp(0))
    t("cumprod_zero", lambda x: torch.cumprod(torch.cat([x[:3], 0 * x[:1], x[4:]]), 0))
    t("histc_like", lambda x: torch.histogram(x.detach())[0] + x.sum())
    t("searchsorted", lambda x: x * torch.searchsorted(torch.linspace(-1, 1, 5), x.detach()))
    t("unique", lambda x: torch.unique(x))
    t("bincount_w", lambda x: torch.bincount(i3, weights=x))
    t("polar2", lambda x: torch.polygamma(2, x), 2.0)
    t("mvlgamma", lambda x: torch.mvlgamma(x, 3), 3.0)
    t("igamma", lambda x: torch.igamma(torch.tensor(2.0), x), 2.0)
    t("erfcx_neg", S.erfcx, -1.0)
    t("sparse_mm", lambda x: torch.sparse.mm(torch.eye(3).to_sparse(), x.reshape(3, 4)))
    t("sparse_sum", lambda x: torch.sparse_coo_tensor(torch.arange(12)[None], x, (12,)).to_dense())
    t("nested", lambda x: torch.cat([torch.atleast_1d(v) for v in x]))
    t("unsafe_chunk", lambda x: x.chunk(3)[1])
    t("stack", lambda x: torch.stack([x, x.flip(0)]))
    t("movedim", lambda x: x.reshape(2, 2, 3).movedim(0, 2))
    t("frexp", lambda x: torch.frexp(x)[0])
    t("logspace", lambda x: torch.linspace(0, 1, 4) * x[:4])
    t("linspace_t", lambda x: torch.linspace(x[0], x[1], 4))
    t("arange_w", lambda x: torch.outer(x[:3], x[:3]))
    t("bernoulli_w", lambda x: torch.dropout(x, 0.0, True))
    t("alpha_dropout", lambda x: F.alpha_dropout(x, 0.0, True))
    t("fake_quant", lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127).double())
    t("checkpoint", lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False))
    t("unflatten", lambda x: x.unflatten(0, (3, 4)).exp())
    t("triangular_solve", lambda x: torch.triangular_solve(x[9:].reshape(3, 1), sq(x).triu() + 2 * torch.eye(3))[0])
    t("geqrf", lambda x: torch.geqrf(x.reshape(4, 3))[0])
    t("pca", lambda x: torch.addr(sq(x), x[:3], x[3:6]))
    t("celu", lambda x: F.celu(x, 0.7))
    t("isclose", lambda x: x * torch.isclose(x, x))
    t("rsub", lambda x: torch.rsub(x, 1.0))
    t("nan_where", lambda x: torch.where(x > -9, x, torch.sqrt(-x * x - 1)))
    t("hstack", lambda x: torch.hstack([x[:3], x[3:]]))
    t("bmm", lambda x: torch.bmm(x[:9].reshape(1, 3, 3), x[:9].reshape(1, 3, 3)))
    t("swapaxes", lambda x: x.reshape(3, 4).swapaxes(0, 1) @ x.reshape(3, 4))
    t("dstack", lambda x: torch.dstack([x, x]))
    t("masked.amax", lambda x: torch.masked.amax(x.reshape(3, 4), 1, mask=torch.arange(12).reshape(3, 4) % 3 > 0))
    t(
        "masked.softmax",
        lambda x: torch.masked.softmax(x.reshape(3, 4), 1, mask=torch.arange(12).reshape(3, 4) % 3 > 0).nan_to_num(),
    )
    t("masked.mean", lambda x: torch.masked.mean(x.reshape(3, 4), 1, mask=torch.arange(12).reshape(3, 4) % 3 > 0))
    return T
