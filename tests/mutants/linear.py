"""Mutants of the linear solvers."""

from __future__ import annotations

from .row import mutants

METHODS = "tests/mutants/test_survivors_methods.py"
SELDOM = "tests/mutants/test_survivors_linear.py"
TOGETHER = "tests/linear/test_sparsity.py -k one_call"
OWN = f"tests/mutants/test_survivors.py {METHODS} -k linear"


def _of(words: str) -> str:
    return f"tests/linear/test_linear.py tests/mutants/test_survivors.py {METHODS} -k '{words}'"


MUTANTS = [
    *mutants(
        "implicitkit/linear/sparse_factors.py",
        "tests/linear/test_factors_elsewhere.py",
        ('return self.scale * np.asarray(self.factors.solve(b, "T"))', 'return np.asarray(self.factors.solve(b, "T"))'),
        ('return np.asarray(self.factors.solve(self.scale * b, "N"))', 'return np.asarray(self.factors.solve(b, "N"))'),
    ),
    *mutants(
        "implicitkit/linear/low_rank_blocks.py",
        "tests/solver/test_low_rank_parts.py -k 'border_are or hide'",
        ("other.values[:, -border:] = self.extended.values[:, -border:]", "pass"),
        ("signs * times(longer)[:, self.n :]", "times(longer)[:, self.n :]"),
        ("np.where(m < 0, -1.0, 1.0)", "np.ones_like(m)"),
    ),
    *mutants(
        "implicitkit/linear/gram.py",
        "tests/solver/test_low_rank_parts.py -k normal_equations",
        ("np.where(m < 0, -1.0, 1.0))", "np.ones_like(m))"),
        ("self.W = self.W * d", "pass"),
        ("[eye, np.zeros((k, k))]", "[eye, eye]"),
    ),
    *mutants(
        "implicitkit/sparsity/low_rank.py",
        "tests/solver/test_low_rank_parts.py -k 'products_alone or hold'",
        ("return entries - np.einsum", "return entries + np.einsum"),
        ("shows[g, columns] = False", "pass"),
        ("seeds[self.colours, np.arange(n)] = signs", "seeds[self.colours, np.arange(n)] = 1"),
    ),
    *mutants(
        "implicitkit/linear/kkt.py",
        "tests/problem/test_qp.py -k kink",
        ('met, doubt, reason = met & ~lost, "", SINGULAR', 'doubt = ""'),
        ("if isinstance(A, StructuredOperator) and A.other is not None:", "if False:"),
        ("lost = ~(norms(b - other.mv(", "lost = (norms(b - other.mv("),
    ),
    *mutants(
        "implicitkit/linear/claims.py",
        "tests/linear/test_linear.py -k plugin_claims",
        ("found.converged & ~refuted", "found.converged"),
        ("given = b if ours else b.clone()", "given = b"),
    ),
    *mutants(
        "implicitkit/linear/auto.py",
        OWN,
        ("            old.converged | found.converged,", "            old.converged | True,"),
        ("torch.where(kept.unsqueeze(1), old.x, found.x),", "old.x,"),
        ("converged=answer.converged & near)", "converged=answer.converged)", f"{METHODS} -k nearby"),
        ("torch.where(kept, old.residual_norm, found.residual_norm),", "old.residual_norm,"),
        (
            "return torch.where(self.total.converged.unsqueeze(1), 0, self.b)",
            "return torch.where(self.total.converged.unsqueeze(1), self.b, 0)",
            "tests/linear/test_linear.py -k dear_matrix",
        ),
        ("answer._replace(x=x + inverse(answer.x), ", "answer._replace(", "tests/derivatives/test_sparse_path.py"),
    ),
    *mutants(
        "implicitkit/linear/ordering.py",
        "tests/solver/test_large_least_squares.py -k looked_for_once",
        ("x[self.order] = self.lu.solve", "x[:] = self.lu.solve"),
        ("b[self.order]), trans)", "b[self.order]))"),
        ("A.data[self.moved.data]", "A.data"),
        ("np.array_equal(A.indices, self.indices)", "True", f"{SELDOM} -k order"),
        ("x[:, self.order] = self.lu.solve(flat, trans)", "x[:] = self.lu.solve(flat, trans)", TOGETHER),
        ("self.lu.solve(flat, trans)", "self.lu.solve(flat)", TOGETHER),
        ("np.take(values, moved.data, axis=1))", "values)", TOGETHER),
    ),
    *mutants(
        "implicitkit/linear/sparse_factors.py",
        TOGETHER,
        ("entries = np.take(self._scaled, places, axis=1)", "entries = self._scaled"),
        ("return found if _is_accurate(whole, x[:, :, 0], b[:, :, 0], bool(missing.any())) else None", "return found"),
        ("if small and analysis.symmetric and", "if False and"),
    ),
    *mutants(
        "implicitkit/linear/sparse_factors.py",
        "tests/linear/test_saddle_points.py",
        ("_DIAGONAL = 1e-8", "_DIAGONAL = 0.01"),
        ("_SWEEPS = 2", "_SWEEPS = 0"),
        ("_REFINED = 1e-13", "_REFINED = 1.0"),
        ("near[:, diagonal] += missing", "pass"),
        ("near.data[places] += missing", "pass"),
        ("A = self.A.T if trans", "A = self.A if trans"),
        ("(_Refined(lu, A),)", "(lu,)"),
        ("found = _Refined(found, whole) if missing.any() else found", "pass"),
        ("return sp.csc_matrix(A + sp.diags_array(missing))", "return A"),
    ),
    *mutants(
        "implicitkit/linear/conjugate.py",
        "tests/linear/test_frugal.py",
        ("~(curvature * side > 0)).any()", "~(curvature < torch.inf)).any()"),
        ("side = curvature.sign() if k == 1 else side", "side = torch.ones_like(curvature)"),
        ("(1 / torch.stack(squares, 1)).cumsum(1).rsqrt()", "torch.stack(squares, 1)"),
        ("if k in at and ask(", "if False and ask("),
        ("column(after / rs), p), p)", "column(rs / after), p), p)"),
        ("return symmetric & (ritz", "return (ritz"),
        ("return symmetric & (ritz[:, 0] * ritz[:, -1] > 0)", "return symmetric"),
        ("if k < 3:", "if False:"),
    ),
    *mutants(
        "implicitkit/linear/cg.py",
        _of("solves and cg or definite"),
        (
            "p = torch.where(keep, torch.addcmul(s, column(rs_next / rs), p), p)",
            "p = torch.where(keep, torch.addcmul(s, column(rs / rs_next), p), p)",
        ),
        ("definite = (curvature * side > 0) & (rs > 0)", "definite = rs > 0"),
        ("definite = (curvature * side > 0) & (rs > 0)", "definite = (curvature > 0) & (rs > 0)"),
        (
            "r = torch.where(keep, torch.addcmul(r, alpha, Ap, value=-1), r)",
            "r = torch.where(keep, torch.addcmul(r, alpha, Ap, value=1), r)",
        ),
    ),
    *mutants(
        "implicitkit/linear/bicgstab.py",
        _of("solves and bicgstab or linear and bicgstab"),
        (
            "return Correction(best, torch.maximum(steps, torch.ones_like(steps)))",
            "return Correction(x, torch.maximum(steps, torch.ones_like(steps)))",
        ),
        ("ratio = column(rho_next / rho) * (alpha / omega)", "ratio = column(rho_next / rho) * (omega / alpha)"),
        (
            "omega = column((Ah * half).sum(dim=1) / (Ah * Ah).sum(dim=1).clamp_min(tiny))",
            "omega = column((Ah * half).sum(dim=1))",
        ),
    ),
    *mutants(
        "implicitkit/linear/gmres.py",
        _of("gmres"),
        ("        if _cancelled(length, product):", "        if False:"),
        (
            "exhausted = broken.cumsum(dim=1) - broken.long() > 0",
            "exhausted = broken.cumsum(dim=1) < 0",
            f"{SELDOM} -k gmres",
        ),
        ("use = use & ~(noise & broken)", "use = use & ~(noise & ~noise)", f"{SELDOM} -k gmres"),
        ("entry = torch.addcdiv(null, dot, length, value=-1)", "entry = torch.addcdiv(null, dot, length, value=1)"),
        ("ratio = norm / (0.9 * target).clamp_min(info.tiny)", "ratio = norm / (90 * target).clamp_min(info.tiny)"),
        ("g = torch.where(use, beta.unsqueeze(1) * weight, 0)", "g = torch.where(use, weight, 0)"),
        ("scale * (1 + h[:, :1])", "scale * h[:, :1]", "tests/linear/test_contraction.py"),
    ),
    *mutants(
        "implicitkit/linear/frugal.py",
        "tests/linear/test_frugal.py",
        ("Correction(x + rest,", "Correction(rest,"),
        ("definite = bool((seems_definite(Ht) | ~open_).all())", "definite = False"),
        ("target, columns)).any())", "target, 0)).any())"),
        ("asked = not definite", "asked = True"),
        ("slow.copy_(open_ & is_slow(", "slow.copy_(~open_ & is_slow("),
        ("rate = (left[:, since] / left[:, j]).log() / (j - since)", "rate = 0 * left[:, since] + 9"),
        ("return (first, 2 * first, 4 * first) if", "return (first,) if"),
        ("if self.together and bool(slow.any()):", "if False:"),
        ("return bool(slow.any()) and not bool((open_ & ~slow).any())", "return False"),
        ("most = math.ceil(self.price)", "most = 1000"),
        ("first = min(max(_FIRST, int(_PART * min(price, 4.0 * _LAST))), _LAST)", "first = int(_PART * price)"),
    ),
    *mutants(
        "implicitkit/linear/price.py",
        "tests/linear/test_frugal.py -k price",
        ("    elif fill:", "    elif False:"),
        ("_DENSE_SEPARATOR * reach**3 / max(1.0, least))), _UNSURE)", "_DENSE_SEPARATOR * reach**3)), 1e9)"),
        ("_DENSE_SEPARATOR = 0.016", "_DENSE_SEPARATOR = 0.12"),
        ("filled = max(least, _SEPARATOR", "filled = min(least, _SEPARATOR"),
        ("_LAYERED = 10.0", "_LAYERED = 1.0"),
        ("factored = CALL + _BAND * numbers * band", "factored = CALL + _BAND * numbers * band**2"),
        ("_SEPARATOR = 0.12", "_SEPARATOR = 0.016"),
        ("min(reach**3, size**2)", "4 * reach**3"),
        ("(CALL + numbers + _WEIGHT * touched)", "(CALL + numbers)"),
    ),
    *mutants(
        "implicitkit/linear/contraction.py",
        "tests/linear/test_contraction.py",
        ("plain = not _some(~_pays(Ht, u, norm, target, budget, r.shape[1], _dearer(A, r)), open_)", "plain = True"),
        ("plain = not _some(~_pays(Ht, u, norm, target, budget, r.shape[1], _dearer(A, r)), open_)", "plain = False"),
        ("few = 2 * size * (", "few = 2e9 * size * ("),
        ("(here <= dearer * few * series) &", "(here <= few * series) &"),
        ("_ORTHOGONALISED * numbers * (1 + min(numbers / _CACHED, _BEYOND))", "_ORTHOGONALISED * numbers"),
        ("1 + min(numbers / _CACHED, _BEYOND)", "1 + numbers / _CACHED"),
        ("min(max(A.weight - A.size, 0), A.size)", "A.size"),
        ("min(max(A.weight - A.size, 0), A.size)", "max(A.weight - A.size, 0)"),
        ("y = torch.baddbmm(y, y[:, :, :k], Ht)", "y = torch.bmm(y[:, :, :k], Ht)"),
        ("v, open_, left = torch.where(column(going), v, 0), going, count", "open_, left = going, count"),
        ("crawls = going & ~(length <= _SLOW * before)", "crawls = going & ~going"),
        ("            if left <= few:\n", "            if False:\n"),
        ("            if left <= few:\n", "            if True:\n"),
        ("(length * (length / before) ** _AHEAD > aim)", "(length > aim)"),
        ("fast = ratio <= _SWIFT", "fast = ratio <= 0"),
        ("(ratio > _SLOWER * first)", "(ratio > 9 * first)"),
        ("slower & ~_shorter(A, r, known, norm, target, first, ratio)", "slower"),
        ("slower & ~_shorter(A, r, known, norm, target, first, ratio)", "slower & ~slower"),
        ("krylov = 2 * here /", "krylov = 4 * here /"),
        ("more = _START * CALL / _product(A, r) - len(known)", "more = 0.0"),
        ("(here + (first * second).log()) / -(second.square() / first).log()", "here / -first.log()"),
        ("left = left - w * (w * left)", "left = left - 0 * (w * left)"),
        (
            "v, before = after if left == len(r) else torch.where(column(open_), after, 0), length",
            "v, before = after, length",
        ),
    ),
    *mutants(
        "implicitkit/linear/lu.py",
        _of("conditioning or lu"),
        ("return 4 * A.size *", "return 4e12 * A.size *"),
        ("return refined(factor.solve, product", "return refined(lambda r: factor.solve(r, transpose=True), product"),
    ),
    *mutants(
        "implicitkit/linear/direct.py",
        "tests/linear/test_many_right_hand_sides.py",
        ("(share <= _BELOW) & ok", "(share <= 1e3) & ok"),
        (".to(b) / limit.unsqueeze(2)", ".to(b) / limit.mean(1, keepdim=True).unsqueeze(2) / 10"),
        ("(share <= _BELOW) & ok", "(share < 0) & ok"),
    ),
    *mutants(
        "implicitkit/linear/lsmr.py",
        _of("lsmr"),
        ("theta, alphab = s * alpha, c * alpha", "theta, alphab = c * alpha, s * alpha"),
        ("zeta, zetab = cb * zetab, -sb * zetab", "zeta, zetab = cb * zetab, sb * zetab"),
        (
            "h = torch.addcmul(v, column(theta / rho), h, value=-1)",
            "h = torch.addcmul(v, column(theta / rho), h, value=1)",
        ),
        (
            "hb = torch.addcmul(h, column(thetab * rho / (rho_old * rhob_old)), hb, value=-1)",
            "hb = torch.addcmul(h, column(thetab / (rho_old * rhob_old)), hb, value=-1)",
        ),
        (
            "done = (norm <= target) | (gradient <= normal_rtol * matrix_norm * norm)",
            "done = (norm <= target) | (gradient <= 1e6 * normal_rtol * matrix_norm * norm)",
        ),
    ),
    *mutants(
        "implicitkit/linear/neumann.py",
        _of("neumann or series"),
        (
            "best, best_norm, u = torch.zeros_like(b), start, 0 - b",
            "best, best_norm, u = torch.zeros_like(b), start, 0 + b",
            "tests/mutants/test_survivors_later.py -k series",
        ),
        ("    u = 0 - damping * b\n", "    u = 0 - b\n"),
        ("u = u + damping * (A.mv(u) - b)", "u = u + (A.mv(u) - b)"),
        (
            "return _truncated(A, b, products=self.steps - 1, damping=self.damping)",
            "return _truncated(A, b, products=self.steps, damping=self.damping)",
        ),
        (
            'converged = best_norm <= target\n        reason = ""',
            'converged = best_norm <= 1e9 * target\n        reason = ""',
            "tests/mutants/test_survivors_models.py -k series",
        ),
    ),
    *mutants(
        "implicitkit/linear/broyden.py",
        _of("broyden"),
        ("d = F - _through(F, Vk, Uk)", "d = F + _through(F, Vk, Uk)"),
        ("row = _through(s, Uk, Vk) - s", "row = _through(s, Uk, Vk) + s"),
        ("s = scaled * column(ss)", "s = scaled * column(denominator)"),
    ),
    *mutants(
        "implicitkit/linear/cycles.py",
        _of("solves or tolerance or max_steps or restarts"),
        (
            "return torch.where(scale < torch.inf, atol + rtol * scale, torch.nan)",
            "return torch.where(scale < torch.inf, atol + 100 * rtol * scale, torch.nan)",
        ),
        ("trial_residual = b - A.mv(trial)", "trial_residual = 1e-9 * (b - A.mv(trial))"),
        ("converged = norm <= target\n    reason", "converged = norm <= torch.inf\n    reason"),
    ),
    *mutants(
        "implicitkit/linear/kkt.py",
        "tests/mutants/test_survivors.py tests/problem/test_qp.py -k 'linear or least_norm or degenerate_raise'",
        (
            "found, ok, reason = lstsq_batched(A.dense()[bad], b[bad], rcond=1e-10)",
            "found, ok, reason = lstsq_batched(A.dense()[bad], b[bad], rcond=1e-2)",
        ),
        ("converged = (norm <= target) | zero", "converged = (norm <= torch.inf) | zero"),
        (
            "x = GMRES().solve(A, b, rtol=rtol, atol=atol, max_steps=max_steps).x",
            "x = GMRES().solve(A.T, b, rtol=rtol, atol=atol, max_steps=max_steps).x",
        ),
        (
            "rest = LSMR().solve(A, torch.where(bad.unsqueeze(1), b, 0), rtol=rtol, atol=atol, max_steps=None)",
            "rest = LSMR().solve(A, torch.where(bad.unsqueeze(1), 0, b), rtol=rtol, atol=atol, max_steps=None)",
        ),
    ),
    *mutants(
        "implicitkit/linear/saddle.py",
        "tests/mutants/test_survivors.py tests/problem/test_qp.py -k 'qp_jacobian or planted'",
        ("return x, weight * (torch.bmm(self.C, x) - c)", "return x, weight * (torch.bmm(self.C, x) + c)"),
        (
            "rc = rc + torch.where(self.present, self.e, 0).unsqueeze(2) * v",
            "rc = rc - torch.where(self.present, self.e, 0).unsqueeze(2) * v",
            "tests/mutants/test_survivors.py tests/problem/test_qp.py -k 'qp_jacobian or central_path'",
        ),
        (
            "ra = torch.baddbmm(torch.baddbmm(a, self.P, x, alpha=-1), self.C.mT, v, alpha=-1)",
            "ra = torch.baddbmm(torch.baddbmm(a, self.P, x, alpha=-1), self.C.mT, v, alpha=1)",
        ),
        (
            "            inverse=self.transposed_inverse,\n            transposed_inverse=self.inverse,",
            "            inverse=self.inverse,\n            transposed_inverse=self.transposed_inverse,",
        ),
    ),
    *mutants(
        "implicitkit/linear/dense.py",
        _of("dense or singular or bad_row"),
        (
            "        if self.row_scale is not None and not transpose:\n            rhs = rhs / self.row_scale",
            "        if self.row_scale is not None:\n            rhs = rhs / self.row_scale",
        ),
        ("            x = x / self.row_scale\n", "            x = x * self.row_scale\n"),
        ("keep = s > rcond * s[..., :1]", "keep = s > 1e-1 * s[..., :1]"),
        (
            "return (smallest >= threshold * largest) & (smallest > 0) & (largest < torch.inf)",
            "return (smallest >= 0) & (largest < torch.inf)",
        ),
        (
            "x = torch.linalg.lu_solve(self.lu, self.pivots, rhs, adjoint=transpose)",
            "x = torch.linalg.lu_solve(self.lu, self.pivots, rhs)",
        ),
    ),
    *mutants(
        "implicitkit/linear/blocks.py",
        "tests/composition/test_blocks.py -k 'substitution or explicit or large'",
        ("                parts[i] = -r\n", "                parts[i] = r\n"),
        ("rhs[j] = rhs[j] - change", "rhs[j] = rhs[j] + change"),
        (
            "converged = converged & answer.converged",
            "converged = converged & (answer.converged | True)",
            "tests/composition/test_blocks.py -k 'singular'",
        ),
        (
            "square = square + answer.residual_norm.to(square.dtype).square()",
            "square = square",
            f"{SELDOM} -k blocks",
        ),
    ),
    *mutants(
        "implicitkit/linear/preconditioned.py",
        "tests/linear/test_preconditioners.py -k 'itself or saves or refused'",
        ("if A.preconditioner is None and self.preconditioner is not None:", "if False:"),
        ('if name != "ilu" or "symmetric" not in self.needs)', "if name)"),
    ),
]
