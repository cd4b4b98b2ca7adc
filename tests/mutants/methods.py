"""Mutants of the solvers."""

from __future__ import annotations

from .row import mutants

STEPS = "tests/mutants/test_survivors_steps.py"
FIXED = "tests/solver/test_fixed_point_solvers.py"
ROOTS = "tests/solver/test_root_solvers.py tests/mutants/test_survivors.py"
SCALAR = "tests/solver/test_scalar_solvers.py"
CANCEL = "tests/solver/test_cancellation.py"
MINIMA = "tests/solver/test_argmin_solvers.py"
CONSTRAINED = "tests/problem/test_constrained.py -k 'closed_forms'"

LATER = "tests/mutants/test_survivors_later.py"
MODELS = "tests/mutants/test_survivors_models.py"

FEW = "tests/solver/test_few_unknowns.py"
LOW_RANK = "tests/solver/test_low_rank_programs.py"
ROTATIONS = "tests/peers/test_peer_theseus_pypose.py -k 'mean_of_rotations'"

MUTANTS = [
    *mutants(
        "implicitkit/solver/minimise/convex_newton.py",
        FEW + " -k 'quadratic or derivative or overshoots or hessian or dear or shortened or valley'",
        ("d = -torch.cholesky_solve(", "d = -0.5 * torch.cholesky_solve("),
        ("            if not autodiff.lacks_second_derivative(error):\n                raise\n", ""),
        ('good = convex & search.found & (idle <= int(state["cheap"]))', "good = convex & search.found"),
        ("f.price(z) <= _CHEAP", "True"),
        ("f.price(z) <= _CHEAP", "False"),
        ("(left <= _PAYS * norm)", "(left >= 0)"),
        ("_HALVINGS = 10", "_HALVINGS = 0"),
    ),
    *mutants("implicitkit/solver/charts.py", ROTATIONS, ("return self._as_before(f, z0, norm)", "pass")),
    *mutants(
        "implicitkit/solver/evaluations.py",
        ROTATIONS,
        (
            'if self._point.get("z") is z and "vector" in self._point:\n            return autodiff.jacobian_of',
            "if False:\n            return autodiff.jacobian_of",
        ),
    ),
    *mutants(
        "implicitkit/solver/auto.py",
        FEW + " -k robust",
        ('_stage("newton_cg", max_steps=30, scale=None),\n    _stage("lev', '_stage("lev'),
    ),
    *mutants(
        "implicitkit/solver/judging.py",
        "tests/problem/test_initial_value.py -k single_precision_is",
        ("self._size(z) + norm if self.f.kind.like_state else norm", "norm"),
    ),
    *mutants(
        "implicitkit/solver/driver.py",
        "tests/core/test_solution.py tests/mutants/test_survivors.py -k 'best_iterate or figures or driver or trace'",
        ("norm.lt(self.best_norm) if", "norm.gt(self.best_norm) if"),
        ("self.best_norm = torch.where(improved, norm, self.best_norm)", "self.best_norm = norm"),
        (
            "self.status.masked_fill_(failed, int(Status.NONFINITE))",
            "pass",
            "tests/core/test_bad_input.py -k nonfinite",
        ),
        ("f.tolerance, f.best_norm = self.tolerance * units,", "f.tolerance, f.best_norm = self.tolerance,", LATER),
        ("self.tolerance * units, self.best_norm * units", "self.tolerance * units, self.best_norm", LATER),
        ("self.steps.masked_fill_(ended, self.step)", "self.steps.masked_fill_(ended, self.step + 1)"),
        (
            "        samples = rows.repeat_interleave(per_row).nonzero().squeeze(1)",
            "        samples = rows.repeat_interleave(per_row).nonzero().squeeze(1).flip(0)",
            FIXED + " -k 'dropping or batch_equals'",
        ),
        (
            "self.values[name].index_copy_(0, self.index, value)",
            "self.values[name].index_copy_(0, self.index.flip(0), value)",
            FIXED + " -k 'dropping or batch_equals'",
        ),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/aitken.py",
        FIXED + " -k 'aitken'",
        (
            "found = -(dz * dr).sum(1, keepdim=True) / dr.square().sum(1, keepdim=True)",
            "found = (dz * dr).sum(1, keepdim=True) / dr.square().sum(1, keepdim=True)",
        ),
        (
            "z_next = z - r.square() / (twice - once - r)",
            "z_next = z - r.square() / (twice - once + r)",
            SCALAR + " -k steffensen",
        ),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/anderson.py",
        FIXED + " tests/mutants/test_survivors_methods.py -k 'anderson'",
        (
            "z_next = torch.baddbmm(mixed.unsqueeze(1), gamma.mT, dW, alpha=-1).squeeze(1)",
            "z_next = torch.baddbmm(mixed.unsqueeze(1), gamma.mT, dW, alpha=1).squeeze(1)",
        ),
        ("gram[:, :, piece] = rows.mT", "pass"),
        ("_remember(history[:, (k - 1) % m], (r, mixed)", "_remember(history[:, 0], (r, mixed)"),
        ('_remember(state["history"][:, (k - 1) % self.memory]', '_remember(state["history"][:, 0]'),
        ("if not _most(f, far, _HALF):", "if True:"),
        ("z.shape[1] < _WIDE or f.ahead < _PERIOD:", "z.shape[1] < _WIDE:"),
        ("f.taken = _PERIOD", "pass"),
        ("relative = 10 * memory * torch.finfo(dtype).eps if ridge is None else ridge", "relative = 1e-2"),
        ("history.masked_fill_(wiped.unsqueeze(2), 0)", "pass"),
        ("fast = f.norm <= _SWIFT * before", "fast = f.norm <= 0 * before"),
        ("fast = f.norm <= _SWIFT * before", "fast = f.norm <= 9 * before"),
        ("len(path) != 2 or _most", "True or _most"),
        ('"since": count, "new": count - 1', '"since": 1, "new": 0'),
        ("if _most(f, little):", "if False:"),
        ("if _most(f, little):", "if True:"),
        ("k, state = 0, state | _memory(z, m)", "state = state | _memory(z, m)"),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/continuation.py",
        "tests/solver/test_relay.py -k 'continuation'",
        ("matrix[:, :n, n] = by_t", "matrix[:, :n, n] = -by_t"),
        (
            'H = z - torch.lerp(state["start"], fz, t.unsqueeze(1))',
            'H = z - torch.lerp(fz, state["start"], t.unsqueeze(1))',
        ),
        (
            "return H, correction, (sign / _size(along)).unsqueeze(1) * along, sign < 0",
            "return H, correction, (1 / _size(along)).unsqueeze(1) * along, sign < 0",
        ),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/relay.py",
        "tests/solver/test_relay.py -k chain_of_layers",
        ("    *_CHEAP,\n    _PLAIN,\n", "    *_CHEAP,\n"),
        ("        if steps < _FEWEST:", "        if False:", "tests/solver/test_relay.py -k granted"),
        (
            "return replace(stage, max_steps=steps if stage.max_steps is None else min(steps, stage.max_steps))",
            "return stage",
            "tests/solver/test_relay.py -k granted",
        ),
        (
            "replace(method, inner_steps=products)",
            "method",
            "tests/solver/test_relay.py -k granted",
        ),
        ("total.message = _LEFT_OUT", "pass", "tests/solver/test_relay.py -k granted"),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/impatient.py",
        "tests/solver/test_relay.py tests/mutants/test_survivors_methods.py -k 'gives_up or gets_nowhere or given_up'",
        (
            "slow = ~((best / before).log() <= (tolerance / best).log() * (since / self.horizon))",
            "slow = ~((best / before).log() <= (tolerance / best).log())",
        ),
        ("slow.logical_and_(best > tolerance)", "pass"),
        ('"since": since + f.taken', '"since": since + 1', FIXED + " -k taken_at_once"),
    ),
    *mutants(
        "implicitkit/solver/root/broyden.py",
        FIXED + " tests/mutants/test_survivors.py -k 'broyden or inverse'",
        ("p = torch.addcmul(p, U[:, slot], (V[:, slot] * last_F).sum(1, keepdim=True))", "p = p"),
        ("u = torch.where(usable, (s - By) / denominator, 0)", "u = torch.where(usable, (s + By) / denominator, 0)"),
        ("return torch.addcmul(g, u, along).neg_()", "return g.neg_()"),
        ("g = _apply(scale, F, used[1], used[0])", "g = _apply(scale, F, used[0], used[1])"),
        ("denominator, along = _dot(v, v), _dot(v, F)", "denominator, along = _dot(v, v), _dot(v, s)"),
    ),
    *mutants(
        "implicitkit/solver/auto.py",
        "tests/linear/test_frugal.py -k many_minima",
        ("return _SPARSE_MINIMISE if size >= SMALLEST else", "return _SPARSE_MINIMISE if batch == 1 else"),
    ),
    *mutants(
        "implicitkit/solver/root/frugal.py",
        "tests/linear/test_frugal.py",
        ("return found.x if bool(found.converged.all()) else None", "return found.x"),
        ("share = price * float(", "share = price + 0 * float("),
        ("        if price >= _WORTH:", "        if False:"),
        ("price, None if is_large(f, z) else _FRESH)", "price, _FRESH)"),
        ("(left / math.log(10)).log2()", "(left / left).log2()"),
        ("bool(((weak > self.patience) & f.active).any())", "True"),
        ("bool(((weak > self.patience) & f.active).any())", "False"),
        ('f.norm.to(z.dtype), state["newton"], self', "f.norm.to(z.dtype), None, self"),
        ('"alike": alike, "newton": weak}', '"alike": alike}'),
    ),
    *mutants(
        "implicitkit/solver/root/newton.py",
        ROOTS + " tests/mutants/test_survivors_methods.py -k 'batch_is_solved or singular_jacobian or by_hand'",
        (
            "d, regular, _ = solve_batched(J, -residual)",
            "d, regular, _ = solve_batched(J.mT, -residual)",
            "tests/solver/test_root_solvers.py -k finishers",
        ),
        ("d[bad] = lstsq_batched(J[bad], -residual[bad])[0]", "d[bad] = lstsq_batched(J[bad], residual[bad])[0]"),
        ("        d = -residual / J.squeeze(2)", "        d = residual / J.squeeze(2)"),
    ),
    *mutants(
        "implicitkit/solver/root/trust_region.py",
        ROOTS + " -k 'trust_region'",
        (
            "a, b = leg.square().sum(1), (cauchy * leg).sum(1)",
            "a, b = leg.square().sum(1), -(cauchy * leg).sum(1)",
            STEPS,
        ),
        ("trial = z + p / scale", "trial = z + p"),
        (
            "self.cauchy_length = (length / steepest.square()).nan_to_num(torch.inf)",
            "self.cauchy_length = (length * steepest.square()).nan_to_num(torch.inf)",
            "tests/mutants/test_survivors_steps.py -k dogleg",
        ),
        (
            "step = lam + (length - target) / (target * slope)",
            "step = lam - (length - target) / (target * slope)",
            "tests/mutants/test_survivors_models.py -k minimiser",
        ),
        (
            "slope = (q.square() / shifted).sum(1) / length.square()",
            "slope = q.square().sum(1) / length.square()",
            "tests/mutants/test_survivors_models.py -k minimiser",
        ),
        (
            "rho = torch.where(predicted > 0, actual / predicted, -1).nan_to_num(-1, -1, -1)",
            "rho = torch.ones_like(actual)",
            "tests/mutants/test_survivors_models.py -k uphill",
        ),
    ),
    *mutants(
        "implicitkit/solver/root/df_sane.py",
        ROOTS + " tests/solver/test_conformance.py tests/mutants/test_survivors_methods.py -k 'df_sane'",
        ("sigma = s.square().sum(1) / (s * y).sum(1)", "sigma = (s * y).sum(1) / s.square().sum(1)"),
        ("accept = f.active & ~found & (trial_phi <= bound - _GAMMA * alpha**2 * phi)", "accept = f.active & ~found"),
        ("for i, sign in enumerate((1, -1)):", "for i, sign in enumerate((1, 1)):", STEPS),
    ),
    *mutants(
        "implicitkit/solver/root/pseudo_transient.py",
        "tests/problem/test_steady_state.py -k 'reaches or newton_steps or sign or large_systems_go'",
        (
            "return newton_direction(sign[:, None, None] * J.dense - shift, F)",
            "return newton_direction(sign[:, None, None] * J.dense + shift, F)",
        ),
        (
            'delta = (state["delta"] * state["norm"] / norm).nan_to_num(torch.inf, torch.inf, 0)',
            'delta = (state["delta"]).nan_to_num(torch.inf, torch.inf, 0)',
        ),
        (
            "return GMRES(restart=50).solve(shifted(J.A, inverse, -sign), rhs,",
            "return GMRES(restart=50).solve(shifted(J.A, inverse, sign), rhs,",
            LATER + " -k euler",
        ),
        (
            "return -torch.ones_like(speeding)",
            "return torch.ones_like(speeding)",
            "tests/problem/test_steady_state.py -k serves_every_kind",
        ),
    ),
    *mutants(
        "implicitkit/solver/root/bisection.py",
        SCALAR + " -k 'bisection or brentq or jump'",
        ("left = torch.sign(F) == torch.sign(fa)", "left = torch.sign(F) == torch.sign(fb)"),
    ),
    *mutants(
        "implicitkit/solver/root/chandrupatla.py",
        SCALAR + " -k 'chandrupatla or brentq'",
        ("same = torch.sign(F) == torch.sign(fa)", "same = torch.sign(F) != torch.sign(fa)"),
        (
            "inverse = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)",
            "inverse = fa / (fb - fa) * fc / (fb - fc)",
        ),
        (
            "trust = (phi.square() < xi) & ((1 - phi).square() < 1 - xi)",
            "trust = (phi.square() < xi) & ((1 - phi).square() < 1 + xi)",
            STEPS,
        ),
    ),
    *mutants(
        "implicitkit/solver/steps/bracketing.py",
        SCALAR + " -k 'bracket or brentq or jump'",
        ("missing = missing & ~found.squeeze(1)", "missing = missing & found.squeeze(1)"),
        ("outer = inner + side * step", "outer = inner + step"),
    ),
    *mutants(
        "implicitkit/solver/steps/line_search.py",
        MINIMA + " -k 'finds_the_minimum or steps_of or rounding'",
        (
            "found = decrease(f, z, value, g, trial) >= -share * t * slope",
            "found = decrease(f, z, value, g, trial) >= 1e6 * t * slope",
            MINIMA + " -k armijo",
        ),
        ("found = (new_slope >= curvature * slope) & ~long", "found = ~long"),
        (
            "by_slopes = -0.5 * ((g + g_new) * moved).sum(1)",
            "by_slopes = 0.5 * ((g + g_new) * moved).sum(1)",
        ),
        (
            "lost = lost | (open_ & (difference.abs() <= noise) & (slope <= EXPECTED * noise))",
            "pass",
            CANCEL + " -k 'newton_cg and cosh'",
        ),
        (
            "left = unresolved(f, here.z, here.value, here.g, there.z - here.z)",
            "left = torch.zeros_like(promised)",
            CANCEL + " -k 'bfgs and cosh'",
        ),
        (
            "(f.value(near) - value - by_slopes).abs(), nan=0.0, posinf=0.0)",
            "torch.full_like(value, 1e6))",
            CANCEL + " -k contradicts",
        ),
        ("t, slope, value=_ARMIJO)", "t, slope.abs(), value=10)"),
    ),
    *mutants(
        "implicitkit/solver/steps/newton_damping.py",
        ROOTS + " -k 'damping or batch_is_solved or missing'",
        (
            "searching = f.active & ~(trial_norm < (1 - _DECREASE) * norm)",
            "searching = f.active & ~(trial_norm < torch.inf)",
        ),
        ("better = searching & (trial_norm < best_norm)", "better = searching & (trial_norm > best_norm)"),
    ),
    *mutants(
        "implicitkit/solver/steps/restarts.py",
        FIXED + " -k 'safeguard or badly or stagnat'",
        (
            "bad.logical_or_(best >= checked)",
            "pass",
            FIXED + " tests/mutants/test_survivors.py -k 'safeguard or badly or stagnat'",
        ),
        (
            "bad = norm > safeguard * (best if floor is None else torch.maximum(best, floor))",
            "bad = norm > 1e30 * (best if floor is None else torch.maximum(best, floor))",
            LATER + " -k safeguard",
        ),
    ),
    *mutants(
        "implicitkit/solver/minimise/lbfgs.py",
        MINIMA + " -k 'lbfgs'",
        ('+ torch.bmm(scaled, memory["YY"])', '- torch.bmm(scaled, memory["YY"])'),
        ("inverse[:, k], inverse[:, :, k] = 0, 0  # the oldest goes", "inverse[:, :, k] = 0", MODELS + " -k lbfgs"),
        (
            'inverse = torch.where(which[:, None, None], 0, memory["inverse"])',
            'inverse = memory["inverse"]',
            MODELS + " -k lbfgs",
        ),
        (
            "scale = torch.where(good, 1 / YY[:, k, k], scale)",
            "scale = torch.where(good, YY[:, k, k], scale)",
            MODELS + " -k lbfgs",
        ),
        ("        if not bool(good.all()):\n", "        if False:\n", MODELS + " -k lbfgs"),
    ),
    *mutants(
        "implicitkit/solver/minimise/newton_cg.py",
        MINIMA + " -k 'newton_cg'",
        (
            "inside = (curvature > 0) & (torch.linalg.vector_norm(ahead, dim=1) < radius)",
            "inside = torch.linalg.vector_norm(ahead, dim=1) < radius",
            "tests/mutants/test_survivors_models.py -k steihaug",
        ),
        (
            "return p, -0.5 * ((g + r) * p).sum(1)",
            "return p, -(g * p).sum(1)",
            "tests/mutants/test_survivors_models.py -k steihaug",
        ),
        (
            "d = torch.addcmul(-r, (new / rr).unsqueeze(1), d)",
            "d = torch.addcmul(-r, (rr / new).unsqueeze(1), d)",
            "tests/linear/test_frugal.py -k eigenvalues",
        ),
    ),
    *mutants(
        "implicitkit/solver/minimise/gradient_descent.py",
        MINIMA + " -k 'gradient_descent'",
        (
            "new = 0.5 * (1 + (1 + 4 * a.square()).sqrt())",
            "new = a",
            "tests/mutants/test_survivors_models.py -k nesterov",
        ),
        (
            "return z.add(g, alpha=-self.step_size), state",
            "return z.add(g, alpha=self.step_size), state",
            "tests/derivatives/test_closed_forms.py -k unroll_of_gradient",
        ),
        ("length = s.square().sum(1) / curvature", "length = curvature / s.square().sum(1)"),
    ),
    *mutants(
        "implicitkit/solver/minimise/newton_cg.py",
        "tests/linear/test_frugal.py -k 'minimum or trust_region or late'",
        ("if price is not None and price.factors >= _WORTH:", "if False:"),
        ("_WORTH = 7.0", "_WORTH = 20.0"),
        ("        if k >= price:", "        if False:"),
        ("target, price) & ~done).any()):", "target, price) & done).any()):"),
        ("frugal = tried is not None", "frugal = True"),
    ),
    *mutants(
        "implicitkit/solver/least_squares/levenberg_marquardt.py",
        MINIMA + " -k 'levenberg'",
        (
            "return p, 0.5 * (q * (s * b + mu.unsqueeze(1) * q)).sum(1)",
            "return p, 0.5 * (q * (s * b - mu.unsqueeze(1) * q)).sum(1)",
            "tests/mutants/test_survivors_models.py -k levenberg",
        ),
        (
            "p = -torch.bmm(self.Vh.mT, q.unsqueeze(2)).squeeze(2) / self.D",
            "p = -torch.bmm(self.Vh.mT, q.unsqueeze(2)).squeeze(2)",
        ),
        (
            "mu = torch.where(found, mu, torch.where(accept, easier, harder))",
            "mu = torch.where(found, mu, torch.where(accept, harder, easier))",
        ),
        (
            "taken, open_ = taken | good, open_ & ~good",
            "open_ = open_ & ~good",
            "tests/solver/test_large_least_squares.py -k refused",
        ),
        (
            'largest = state["largest"] if by_products else model.scale(scale)',
            "largest = model.scale(scale)",
            "tests/solver/test_large_least_squares.py -k largest",
        ),
        (
            "(n >= _FEW and f.residuals(z).numel() * n * n >= _WORK)",
            "False",
            "tests/solver/test_large_least_squares.py -k small_fits",
        ),
    ),
    *mutants(
        "implicitkit/solver/minimise/convex_newton.py",
        "tests/solver/test_few_unknowns.py -k not_formed",
        ("    hands_over: ClassVar[bool] = True\n", ""),
    ),
    *mutants(
        "implicitkit/solver/least_squares/frugal.py",
        "tests/solver/test_frugal_fits.py",
        ("    if factorisations * price < _WORTH:", "    if False:"),
        ('    left = factorisations * price - state["spent"]', "    left = factorisations * price"),
        ("share = eta.to(z) * f.norm.to(z), min(price, _share(f, eta, left))", "share = eta.to(z) * f.norm.to(z), 1e9"),
        ("    for _ in range(_TRIALS):", "    for _ in range(60):"),
        ("clamp(_PART, 1)", "clamp(0, 1)"),
        ('if not asked or f.problem.x_scale == "jac":', "if not asked:"),
        (" and z.dtype in (torch.float32, torch.float64)", ""),
        ("asked = n >= _FEW and", "asked ="),
    ),
    *mutants(
        "implicitkit/solver/steps/normal_equations.py",
        "tests/solver/test_large_least_squares.py -k 'products or let_go or takes_over'",
        ("            self.f.frugal = False", "            pass"),
        ("            self.dense.scale(self.D)", "            pass"),
        ("                self.dense.restrict(self.free.bool())", "                pass"),
        ("        self.factors = self.dense.factors", "        pass"),
        ("            if self.reached:", "            if True:"),
        ("self.most = int(_SHARE * z.shape[1])", "self.most = 10**6"),
        ("if fits and f.frugal and", "if fits and"),
        (
            "return torch.cat([self.times(free * y / D), root * y], 1)",
            "return torch.cat([self.times(free * y / D), 0 * y], 1)",
        ),
        (
            "return free * self.rmv(w[:, :m].contiguous()) / D + root",
            "return self.rmv(w[:, :m].contiguous()) / D + root",
        ),
        ("self.times(free * y / D), root", "self.times(free * y), root"),
        ("return found.x / D", "return found.x"),
        ("_FORCING = 0.1", "_FORCING = 9.0"),  # 0.9 leaves a hundredth of the gradient, a tenth is promised
        ("rtol=min(rtol, _FORCING), atol=0.0", "rtol=_FORCING, atol=0.0"),
        ("        f.system.factored = None", "        pass"),
    ),
    *mutants(
        "implicitkit/solver/constrained/augmented_lagrangian.py",
        CONSTRAINED,
        ("raw = multipliers + rho * constraints", "raw = multipliers - rho * constraints"),
        (
            "return value + ((force(constraints).square() - multipliers.square()) / (2 * rho)).sum(1)",
            "return value + (force(constraints).square() / rho).sum(1)",
        ),
        ("f.stuck = waited >= _PATIENCE", "pass", "tests/problem/test_no_solution.py -k gives_up"),
        ("_NEAR = 1e-4", "_NEAR = 1.0", "tests/problem/test_no_solution.py -k is_defined"),
        (
            "self.penalty * _unit(model, model.split(z)[0])",
            "torch.full_like(z[:, 0], self.penalty)",
            LOW_RANK + " -k units",
        ),
        ("unit = curvature / steep", "unit = curvature", LOW_RANK + " -k units"),
        ("unit = curvature / steep", "unit = 1 / steep", LOW_RANK + " -k units"),
    ),
    *mutants(
        "implicitkit/solver/constrained/sparse_step.py",
        LOW_RANK,
        (
            "elif not point.shift and program.size == self.d.shape[1]",
            "elif not point.shift",
            LOW_RANK + " -k portfolio",
        ),
    ),
    *mutants(
        "implicitkit/linear/lifted_saddle.py",
        LOW_RANK + " -k portfolio",
        ("np.concatenate([J[i], -V[i]])", "np.concatenate([J[i], -2 * V[i]])"),
        ("np.concatenate([np.zeros(n), signs[i]])", "np.concatenate([np.zeros(n), abs(signs[i])])"),
    ),
    *mutants(
        "implicitkit/linear/low_rank_blocks.py",
        LOW_RANK + " -k portfolio",
        ("V = np.sqrt(np.abs(m))[:, :, None]", "V = np.abs(m)[:, :, None]"),
    ),
    *mutants(
        "implicitkit/solver/returned.py",
        "tests/core/test_returned.py -k what_a_method_keeps",
        ("if not isinstance(found, dict):", "if False:"),
        ("or value.shape[:1] != (rows,)", ""),
    ),
    *mutants(
        "implicitkit/testing/answers.py",
        "tests/solver/test_conformance.py -k 'found_out and starts_where'",
        ("z0 = 1.01 * chosen", "z0 = 1.01 * chosen.abs(); chosen = chosen.abs()"),
    ),
    *mutants(
        "implicitkit/testing/answers.py",
        "tests/solver/test_conformance.py -k 'found_out and one_unknown'",
        ("for size in (1, 9):", "for size in (1, 4):"),
        ("for size in (1, 9):", "for size in (4, 9):"),
    ),
    *mutants(
        "implicitkit/testing/answers.py",
        "tests/solver/test_conformance.py -k 'found_out and the_norm'",
        ("strict = lambda z: 1e3 * z.norm(dim=1)", "strict = lambda z: z.norm(dim=1)"),
    ),
    *mutants(
        "implicitkit/testing/answers.py",
        "tests/solver/test_conformance.py -k 'found_out and the_steps'",
        ("close(gradients[1], gradients[0], allowed", "close(gradients[0], gradients[0], allowed"),
    ),
    *mutants(
        "implicitkit/testing/conduct.py",
        "tests/solver/test_conformance.py -k 'found_out and (process or nested or counts)'",
        ("assert torch.get_default_dtype() == dtype", "assert True"),
        ("assert not moved", "assert True"),
        ("assert same", "assert True"),
        ("assert calls - 2 <= told <= calls", "assert told <= calls"),
    ),
    *mutants(
        "implicitkit/solver/constrained/proximal_gradient.py",
        CONSTRAINED,
        ("z_next = prox(y - t.unsqueeze(1) * g, t)", "z_next = prox(y - t.unsqueeze(1) * g, 2 * t)"),
        (
            "model = base + (g * d).sum(1) + 0.5 * square / t",
            "model = base + (g * d).sum(1) + 5.0 * square / t",
            "tests/problem/test_constrained.py tests/mutants/test_survivors.py -k 'closed_forms or proximal'",
        ),
    ),
    *mutants(
        "implicitkit/solver/least_squares/levenberg_marquardt.py",
        "tests/solver/test_low_rank_parts.py -k rounding",
        ("leave(f, hopeless & at_rounding(f, model.equations.factors, z))", "pass"),
    ),
    *mutants(
        "implicitkit/linear/sparse_normal.py",
        "tests/solver/test_fits_at_rest.py",
        ("if not asked[i] and self._lus[i] is not None:", "if False:"),
        ("which.cpu().numpy() & ~self.settled", "~self.settled"),
        ("np.where(self.settled[:, None], self.D, self._array(D))", "self._array(D)"),
        ("np.where(self.settled[:, None], before.D, 1.0)", "np.ones(like.shape)"),
        ("[None] * len(like) if before is None else list(before.lus)", "[None] * len(like)"),
        ("* ~self.settled[:, None])", ")"),
        ("for i in np.flatnonzero(columns.any((1, 2))):", "for i in range(1):"),
    ),
    *mutants(
        "implicitkit/solver/steps/normal_equations.py",
        "tests/solver/test_fits_at_rest.py",
        ("z, before if kept else None, ~f.active)", "z, None, ~f.active)"),
        ("if which is None or self.made is None:", "if True:"),
        ("torch.where(which.unsqueeze(1), p, 0)", "p"),
        ("old.index_copy(0, rows, new)", "old"),
    ),
    *mutants(
        "implicitkit/linear/sparse_normal.py",
        "tests/solver/test_large_least_squares.py -k bounded_before",
        ("float(d.max() * N.most())", "float(d.min() * N.most())"),
    ),
    *mutants(
        "implicitkit/solver/steps/factored.py",
        "tests/solver/test_large_least_squares.py -k bounded_before",
        ("not bool((norm <= _ROUNDING * eps * most(z)).any())", "False"),
    ),
    *mutants(
        "implicitkit/sparsity/compression.py",
        "tests/linear/test_sparsity.py -k cancel",
        ("_SURE = 1e-8", "_SURE = 1e8"),
    ),
    *mutants(
        "implicitkit/linear/auto.py",
        "tests/solver/test_large_least_squares.py -k let_go",
        ("A.known.let_go()", "pass"),
    ),
    *mutants(
        "implicitkit/rule/request.py",
        "tests/solver/test_large_least_squares.py -k let_go",
        ('getattr(self.system.factored, "gone", False)', "False"),
    ),
    *mutants(
        "implicitkit/solver/constrained/sqp.py",
        "tests/problem/test_constrained.py -k 'closed_forms or standard or sqp'",
        ("h = torch.cat([h, bounds[1] - z, z - bounds[0]], 1)", "h = torch.cat([h, bounds[1] - z, bounds[0] - z], 1)"),
        (
            "A, b = at.jacobian[:, ~sided], -at.constraints[:, ~sided]",
            "A, b = at.jacobian[:, ~sided], at.constraints[:, ~sided]",
        ),
        ("multipliers_next[:, ~sided] = point.y.to(z) * unit", "multipliers_next[:, ~sided] = -point.y.to(z) * unit"),
        (
            "curved_by = multipliers if known is None else",
            "curved_by = 0 * multipliers if True else",
            "tests/mutants/test_survivors_models.py -k sqp",
        ),
        (
            "reach = 10 * (1 + _largest(z)) / _largest(d)",
            "reach = 10 * (1 + torch.linalg.vector_norm(z, dim=1)) / torch.linalg.vector_norm(d, dim=1)",
            "tests/solver/test_sparse_programs.py -k reach_of",
        ),
    ),
    *mutants(
        "implicitkit/solver/qp/sparse.py",
        "tests/solver/test_sparse_programs.py -k 'quadratic or convex or infeasible or multipliers or penalties_by'",
        ("force = -(program.q + product[:n] + shift * d)", "force = -(program.q + product[:n])"),
        ("np.where(active.rows, y > -weak, violated)", "active.rows | violated"),
        ("rho = weight * (1 + sizes) /", "rho = 1e-9 * weight * (1 + sizes) /"),
        ("free = np.concatenate([np.ones(n, dtype=bool), rows])", "free = np.ones(n + m, dtype=bool)"),
    ),
    *mutants(
        "implicitkit/solver/evaluations.py",
        "tests/solver/test_sparse_programs.py -k made_of",
        ('and "saddle" in self._point:', 'and "no saddle" in self._point:'),
    ),
    *mutants(
        "implicitkit/linear/sparse_saddle.py",
        "tests/solver/test_sparse_programs.py -k 'factors or made_of'",
        ("Layout(K) if layout is None else layout", "Layout(K)"),
        ("signs[:n] = regularised *", "signs[:n] = -1e-2 - regularised *"),
        ("x, left, norm = trial, rest, new", "left, norm = rest, new"),
    ),
    *mutants(
        "implicitkit/solver/steps/sparse_trust_region.py",
        "tests/solver/test_sparse_methods.py -k in_the_region",
        ("_band_layout if narrow else _layout", "_layout"),
        (" if most == np.inf else 0.5 * (least + most)", ""),
    ),
    *mutants(
        "implicitkit/linear/banded.py",
        "tests/solver/test_sparse_methods.py -k in_the_region",
        ("b if self.order is None else b[self.order]", "b"),
        ("placed[self.order] = x", "placed = x"),
        (
            "return BandCholesky(factors, back, self.order) if info == 0 else None",
            "return BandCholesky(factors, back, self.order)",
        ),
    ),
    *mutants(
        "implicitkit/solver/constrained/sparse_step.py",
        "tests/solver/test_sparse_programs.py -k 'sparse_step or batch or penalties'",
        ("np.concatenate([-out[n:], none])", "np.concatenate([out[n:], none])"),
        ("_array(b[i] - self.z[i])", "_array(b[i])"),
        ("reach is not None, near=y", "reach is not None", "tests/solver/test_sparse_programs.py -k short_last"),
    ),
    *mutants(
        "implicitkit/solver/constrained/sparse_step.py",
        "tests/solver/test_sparse_programs.py -k 'estimated or active_set_as or bounds_alone'",
        ("if bool(blank[i]) else None", "if False else None"),
        ("> rounding", "> 0 * rounding - 1"),
        ("np.where(point.active.rows & program.one_sided, -1.0, 1.0)", "np.where(point.active.rows, 1.0, 1.0)"),
    ),
    *mutants(
        "implicitkit/linear/active_factors.py",
        "tests/solver/test_sparse_programs.py -k 'active_set_as or last_factors or dependent'",
        ("b - self.K @ known, 0.0", "b, 0.0"),
        ("x, b - self.K @ x)", "x, b + self.K @ x)"),
        ("b = self.sign * b", "b = 1 * b"),
        ("return self.sign * np", "return np"),
        ("_AMPLIFIED = 1e6", "_AMPLIFIED = 1e60"),
    ),
    *mutants(
        "implicitkit/linear/kkt.py",
        "tests/solver/test_sparse_programs.py -k last_factors",
        ("if A.known is not None and", "if A.known is None and"),
    ),
    *mutants(
        "implicitkit/solver/qp/polish.py",
        "tests/problem/test_qp.py tests/mutants/test_survivors.py -k 'planted or rounding or weakly'",
        ("active = v + mv(part.G, x) - part.h > 0", "active = mv(part.G, x) - part.h > -1e-3"),
        ("active = v + mv(part.G, x) - part.h > 0", "active = v - mv(part.G, x) + part.h > 0"),
        ("better = new < norm[rows]", "better = new > norm[rows]", "tests/problem/test_qp.py -k against_scipy"),
    ),
    *mutants(
        "implicitkit/testing/conduct.py",
        "tests/solver/test_conformance.py -k 'broken and keeps_dtype_and_device'",
        ("torch.set_default_dtype(other)", "pass"),
    ),
    *mutants(
        "implicitkit/solver/steps/robust_model.py",
        "tests/solver/test_robust_fits.py",
        ("torch.where(ratio > _KEPT, share / _TIMES, share)", "share"),
        ("~at_once | (ratio < _POOR)", "~at_once"),
        ("~at_once | (ratio < _POOR)", "ratio < _POOR"),
        ("_LEAST = 1e-4", "_LEAST = 1e-12"),
        ("return None if k is None else", "return None if True else"),
    ),
    *mutants(
        "implicitkit/problem/robust.py",
        "tests/solver/test_robust_fits.py -k 'curvature or model'",
        ("share * (2 * q / (q + 1))", "share * (q / (q + 1))"),
        ("torch.maximum(1 / u, share * u) * 2 / (u + 1)", "share * u * 2 / (u + 1)"),
        ("torch.maximum(1 - torch.expm1(q), share * torch.exp(q))", "1 - torch.expm1(q)"),
        ("torch.maximum(1 - 4 * torch.sin(q).square(), share) * over", "share * over"),
        (".clamp_min(torch.finfo(q.dtype).eps)", ""),
        ("(scale.numel() != 1 or compat.is_wrapped(scale))", "False"),
    ),
    *mutants(
        "implicitkit/solver/steps/normal_equations.py",
        "tests/solver/test_robust_fits.py -k outliers",
        ("entries = ready.with_rows(entries, weights", "entries = ready.with_rows(entries, 0 * weights"),
    ),
    *mutants(
        "implicitkit/solver/qp/bounds.py",
        "tests/solver/test_bounded_programs.py",
        ("order = mine[torch.argsort(sign * place[mine], descending=True)]", "order = mine"),
        ("down = (mu < 0) & (below | held)", "down = (mu < 0) & below"),
        ("up = ~down & ((mu > 0) & above | held |", "up = ~down & ((mu > 0) & above |"),
        ("lam[rows] = mu[columns] / G[rows, columns]", "lam[rows] = mu[columns]"),
        ("-(q + P @ z).index_select(0, f)", "-q.index_select(0, f)"),
        ("A_f @ x[:, 0] + A @ z - b", "A_f @ x[:, 0] - b"),
        ("bool((data.G.count_nonzero(2) == 1).all())", "bool((data.G.count_nonzero(2) <= 1).all())"),
        ("bool((data.G.count_nonzero(2) == 1).all())", "True"),
        ("if bool(part.G.isfinite().all()):", "if True:"),
    ),
    *mutants(
        "implicitkit/solver/qp/builtin.py",
        "tests/solver/test_bounded_programs.py",
        ("_MANY = 150", "_MANY = 1500"),
        ("rest = solve(data.rows(left))", "return point"),
    ),
]
