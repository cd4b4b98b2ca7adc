"""Mutants of the minimisers that search, of brackets, of soft choices and of entropic couplings."""

from __future__ import annotations

from .row import mutants

MINIMA = "tests/solver/test_argmin_solvers.py"
DIRECT = "tests/solver/test_direct_search.py"
RELAX = "tests/problem/test_relax.py"
PROJECT = "tests/problem/test_project.py"
SCALAR = "tests/solver/test_scalar_solvers.py"
ATTRACTING = "tests/solver/test_attracting.py"
STARTS = "tests/solver/test_starts_without_slope.py"
DOMAIN = "tests/solver/test_failing_trials.py"
VALLEYS = "tests/solver/test_minima_in_kinks.py -m 'not slow'"

MUTANTS = [
    *mutants(
        "implicitkit/solver/user_solver.py",
        "tests/core/test_layer_calls.py",
        ("torch.where(model.one_sided, at.constraints / (size * length), 0)", "0 * at.constraints"),
        ("J = at.jacobian / size.unsqueeze(2)", "J, size = at.jacobian, torch.ones_like(size)"),
        ("b = -torch.cat([gap, weight * lam], 1)", "b = torch.cat([gap, weight * lam], 1)"),
        ("_STEPS = 20", "_STEPS = 1"),
    ),
    *mutants(
        "implicitkit/solver/user_solver.py",
        "tests/core/test_layer_calls.py",
        ("z = with_multipliers(f, z)", "z = torch.cat([z, 0 * z0[:, layout.size :]], 1)"),
    ),
    *mutants(
        "implicitkit/problem/trajectory/accuracy_remarks.py",
        "tests/problem/test_initial_value.py -k fail_in_words",
        ("or compat.batches_in_front(followed)[1] or", "or"),
    ),
    *mutants(
        "implicitkit/problem/trajectory/events.py",
        "tests/problem/test_explicit_equations.py -k 'turn or followed or event'",
        ("alike & (g[1:-1].abs() <=", "~alike & (g[1:-1].abs() <="),
        ("(m - b) * (fm - fa)", "(m - b) * (fm - fb)"),
        ("shrinks_left = (x < m) == (f < fm)", "shrinks_left = (x < m)"),
        ("self.seen = at._replace(place=at.place + begin)", "self.seen = at"),
        ("torch.where((fraction >= 0) & (fraction <= 1), fraction, 0.5)", "fraction"),
    ),
    *mutants(
        "implicitkit/solver/evaluating/failing_trials.py",
        "tests/solver/test_failing_trials.py -k 'which_samples or fails_by_itself or (cholesky and auto)'",
        ("if known is None or len(known) != len(z):", "if True:"),
        ("if len(rows) == 1:", "if True:"),
        ("{k: z.index_select(0, samples) for k, z in", "{k: z for k, z in"),
        ("return torch.where(_rows(failed, out), torch.nan *", "return torch.where(_rows(failed, out), 0 *"),
    ),
    *mutants(
        "implicitkit/solver/finding.py",
        "tests/solver/test_stops_and_limits.py",
        ("options.after(int(outcome.steps[open_].max()), outcome.shown)", "options.after(0, outcome.shown)"),
        ("        if outcome.halted:\n", "        if False:\n"),
        (
            "_take(outcome, again, claimed | (open_ & halted & torch.isfinite(again.residual_norm)), open_)",
            "_take(outcome, again, claimed, open_)",
        ),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/attracting.py",
        "tests/solver/test_stops_and_limits.py -k who",
        ("if bool(own.any()) else PATH.name", "if False else PATH.name"),
        (
            "own = (outcome.status == int(Status.CONVERGED)).index_fill(0, index, False)",
            "own = outcome.status == int(Status.CONVERGED)",
        ),
    ),
    *mutants(
        "implicitkit/solver/polyalgorithm.py",
        VALLEYS,
        ("onward, latest = _lowest(f, onward, latest, total), None", "onward = total.z"),
        (
            "onward, latest, kinks = total.z if total.onward is None else",
            "onward, latest, kinks = total.z if True else",
        ),
        ("open_ = open_ & (falls < _ENOUGH)", "pass"),
        ("total.obey(found.status)", "pass", ATTRACTING),
        ("total.shown = shown + found.shown", "pass", ATTRACTING),
        ("waiting = failed & (total.z == z0).all(1)", "waiting = failed & (total.z != z0).all(1)", STARTS),
        (
            "torch.where(gave_up, int(Status.MAX_STEPS), total.status)",
            "total.status",
            "tests/solver/test_stops_and_limits.py -k hands_over",
        ),
    ),
    *mutants("implicitkit/solver/base.py", ATTRACTING, ("callback(step + shown, z", "callback(step + taken, z")),
    *mutants(
        "implicitkit/solver/coming_back.py",
        DOMAIN,
        ("return torch.where(lost.unsqueeze(1), last.z + last.F, z)", "return last.z + last.F"),
        ("if halving:", "if True:"),
        ("open_, share = open_ & ~back, 0.5 ** (halving + 1)", "open_, share = open_ & ~back, 0.0"),
    ),
    *mutants(
        "implicitkit/solver/meeting_kinks.py",
        VALLEYS,
        ("counts = _have_closed(seen, _seen(f, since))", "counts = False"),
    ),
    *mutants(
        "implicitkit/foundation/nesting.py", VALLEYS, ("_solves.set(_solves.get() + 1)", "_solves.set(_solves.get())")
    ),
    *mutants(
        "implicitkit/solver/driver.py",
        VALLEYS,
        ("z = torch.where(self.active.unsqueeze(1), self.z, self.best)", "z = self.best"),
        (
            "if (self.f.kind.iteration or self.f.kind.minimisation) and self.own and self._comes_back():",
            "if False:",
            DOMAIN,
        ),
        ("if f.falling is not None or Progress.due(f, self.step):", "if Progress.due(f, self.step):"),
        (
            "status = torch.where(status != int(Status.CONVERGED), int(Status.STOPPED), status)",
            "pass",
            "tests/solver/test_stops_and_limits.py -k stop",
        ),
    ),
    *mutants(
        "implicitkit/lifting/fewer_rows.py",
        DOMAIN,
        ("b.nan_to_num(0, 0, 0).abs().max()", "b.abs().max()"),
        ("b.nan_to_num(0, 0, 0).abs().max()", "b.abs().nan_to_num(0).max()"),
    ),
    *mutants(
        "implicitkit/solver/verdict/unbounded.py",
        VALLEYS,
        ("return self.unbounded | (self.endless >= _PATIENCE)", "return self.unbounded"),
        ("min(_FALLEN, _STEADY / self.looks)", "_FALLEN", "tests/solver/test_minima_in_kinks.py -m slow"),
        (
            "least.minimum(self.fall)",
            "least.minimum(8 * self.fall)",
            "tests/solver/test_argmin_solvers.py -k as_much_as_before",
        ),
        ("if self.fall is not None:", "if False:", "tests/solver/test_argmin_solvers.py -k as_much_as_before"),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/attracting.py",
        "tests/solver/test_attracting.py",
        (
            "alike(there, far * said)",
            "alike(moved(far * way), far * said)",
            "tests/solver/test_attracting.py -k away",
        ),
        ("far = sign * length * 8.0**j", "far = sign * length"),
        ("_MOST = 64  #", "_MOST = 10  #"),
        ("for sign in (1, -1):", "for sign in ():"),
        ("ways.append((along,", "ways.pop(); ways.append((0 * along,"),
        ("return which & torch.zeros_like(which).index_copy(0, samples, found)", "return which"),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/attracting.py",
        ATTRACTING,
        ("dZ = dW - history[:, :, :n]", "dZ = dW"),
        ("gram, moved = dZ @ dZ.mT, dZ @ dW.mT", "gram, moved = dZ @ dZ.mT, dZ @ dZ.mT"),
        ("(1 + _DOUBT) ** (2 * k)", "9 ** (2 * k)"),
        ("samples = samples.index_select(0, above)", "pass"),
        ("(radius > 1 + _DOUBT)", "(radius > 2)"),
        ("history = in_working_precision(history)", "pass"),
        ("later = options.after(outcome.taken, outcome.shown)", "later = options"),
        ("whole=options.watched", "whole=False"),
        ("outcome.obey(found.status)", "pass"),
        ("found.steps[mine]", "0 * found.steps[mine]"),
        ("grows, open_ = grows | now,", "grows, open_ = grows,"),
        ("settled & (sizes[-1].squeeze(1) > least)", "settled & (sizes[-1].squeeze(1) < least)"),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/impatient.py",
        ATTRACTING,
        ("slow.logical_and_(best <= _RISES * before)", "pass"),
        ("slow, missed = slow & missed, slow", "pass"),
        ("best, tolerance = f.norm if self.follow else f.best_norm, ", "best, tolerance = f.best_norm, "),
    ),
    *mutants(
        "implicitkit/solver/fixed_point/frugal.py",
        ATTRACTING,
        ('if f.at_work < state["at_work"]:', "if False:"),
        ("return seen.index_copy(0, samples, found)", "return seen"),
        ("t if whole else t.index_select(0, samples) for t in (dR, dW)", "t[: len(samples)] for t in (dR, dW)"),
    ),
    *mutants(
        "implicitkit/solver/starts_without_slope.py",
        STARTS,
        ("& _has_value(probe, z).unsqueeze(1)", ""),
        ("missing = torch.zeros_like(z, dtype=torch.bool)", "raise"),
        ("_MOVES = (1e-3, -1e-3, 1e-6, -1e-6, 0.1)", "_MOVES = (1e-3, 1e-6, 0.1)"),
        ("torch.where(good.unsqueeze(1), moved, start), open_ & ~good", "moved, open_ & ~good"),
        ("good = open_ & torch.isfinite(_slope(probe, moved)).all(1) & _has_value(probe, moved)", "good = open_"),
    ),
    *mutants(
        "implicitkit/solver/finding.py",
        STARTS,
        ("failed = failed & (outcome.z == z0).all(1)", "pass"),
        ("outcome.message = _NO_SLOPE", "pass"),
        ("later = options.after(outcome.taken, outcome.shown)", "later = options"),
        ("| (new_norm < old_norm) | ~torch.isfinite(old_norm)", ""),
        ("outcome.status = torch.where(which, again.status, outcome.status)", "pass"),
        ("outcome.status = torch.where(moved, int(Status.MAX_STEPS), outcome.status)", "pass"),
        ("subset(f, which, whole=options.watched)", "subset(f, which, whole=True)"),
    ),
    *mutants(
        "implicitkit/solver/steps/newton_damping.py",
        STARTS,
        ("f.stuck = (d == 0).all(1)  # no", "f.stuck = None  # no"),
    ),
    *mutants(
        "implicitkit/solver/minimise/nonlinear_cg.py",
        MINIMA + " -k '(nonlinear_cg or conjugate or hager) and not conformance'",
        ('d = state["d"] * self._beta(g, state).unsqueeze(1) - g', "d = -g"),
        ("beta = ((y * g).sum(1) / square).clamp_min(0)", "beta = (g * g).sum(1) / (y * g).sum(1)"),
        ("(y - d * (2 * y.square().sum(1) / dy).unsqueeze(1))", "(y - d * (8 * y.square().sum(1) / dy).unsqueeze(1))"),
    ),
    *mutants(
        "implicitkit/solver/minimise/gradient_descent.py",
        MINIMA + " -k 'armijo and not conformance'",
        ("above, noise = value - self.optimum,", "above, noise = 2 * (value - self.optimum),"),
        ('longest = 2 * state["t"]', 'longest = 2e9 * state["t"] * f(z).square().sum(1)'),
        ("f(z), 60, share=0.5)", "f(z), 60)"),
        ("shortest = torch.minimum(state[", "shortest = 9 * torch.maximum(state["),
        (
            "rests = (z_next == z).all(1) & (g == 0).all(1)",
            "rests = torch.zeros_like(f.active)",
            "tests/solver/test_settled.py",
        ),
    ),
    *mutants(
        "implicitkit/solver/minimise/direct_search.py",
        DIRECT + " -k nelder",
        (
            "expansion, contraction, shrinking = 1 + 2 / many,",
            "expansion, contraction, shrinking = 1 + 4 / many,",
            DIRECT + " -k first_steps",
        ),
        (
            "points = torch.where(shrink[:, None, None], first + shrinking * (points - first), points)",
            "pass",
            DIRECT + " -k first_steps",
        ),
        (
            "merit = torch.where(left < 0, torch.linalg.vector_norm(f(z), dim=1), merit)",
            "pass",
            "tests/mutants/test_survivors_methods.py",
        ),
    ),
    *mutants(
        "implicitkit/solver/minimise/direct_search.py",
        DIRECT + " -k golden",
        ("_PART = 0.5 * (3 - math.sqrt(5))", "_PART = 0.1 * (3 - math.sqrt(5))"),
        ("return torch.where(lost, by_slopes, rise)", "return rise"),
        (
            "lost = lost | (open_ & (rise.abs() <= noise) & (by_slopes.abs() <= EXPECTED * noise))",
            "pass",
            "tests/solver/test_minima_in_kinks.py -k golden",
        ),
        ('"b": torch.where(lower, torch.where(left, m, b), torch.where(left, b, x)),', '"b": b,'),
    ),
    *mutants(
        "implicitkit/solver/least_squares/dogleg.py",
        MINIMA + " -k 'dogleg and not conformance'",
        ("bent = R.times(slope / scale).square().sum(1)", "bent = slope.square().sum(1) * 1e-6"),
        ("p = _path(cauchy, newton, region.radius)", "p = cauchy"),
        (
            "promised = -(slope * p).sum(1) - 0.5 * R.times(p / scale).square().sum(1)",
            "promised = -1e6 * (slope * p).sum(1)",
        ),
    ),
    *mutants(
        "implicitkit/solver/steps/region.py",
        "tests/solver/test_region.py",
        ("_TAKEN, POOR, _GOOD = 1e-4", "_TAKEN, POOR, _GOOD = -2.0"),
        ("rho = torch.where(promised > 0, rho, -1)", "pass"),
        ("torch.where(length > 0, length, self.radius)", "length"),
        ("(rho > _GOOD) & self.reaches(length)", "rho > _GOOD"),
        (
            "self.radius = torch.where(self.found, self.radius, ",
            "self.radius = torch.where(self.found & False, self.radius, ",
        ),
        ("accept = ~self.found & (rho > _TAKEN)", "accept = rho > _TAKEN"),
        ("return ~self.found & ~(self.radius > smallest)", "return ~(self.radius > smallest)"),
    ),
    *mutants(
        "implicitkit/solver/accelerated.py",
        "tests/solver/test_accelerated.py",
        ("self.plain, self.moved = plain, plain - z", "self.plain, self.moved = plain, plain"),
        ('z_next, mixing = self.mixing.step(view, z, state["mixing"])', 'z_next, mixing = plain, state["mixing"]'),
    ),
    *mutants(
        "implicitkit/solver/steps/bracketing.py",
        SCALAR + " -k bracket",
        (
            "missing = ~(torch.sign(f_low) != torch.sign(f_high)) |",
            "missing = (f_low != f_low) |",
            "tests/core/test_bad_input.py -k failed_solve",
        ),
        ("found.append(t.reshape(-1, 1).expand(len(z), 1))", "found.append(t.reshape(-1, 1)[:1].expand(len(z), 1))"),
    ),
    *mutants(
        "implicitkit/solver/black_box.py", SCALAR + " -k bracket", ("one.sample = i, batch", "one.sample = 0, batch")
    ),
    *mutants(
        "implicitkit/relax/sorting.py",
        RELAX + " -k permutahedron",
        ("return z.expand_as(w) - _FALLING.project(z - w)", "return z.expand_as(w) + _FALLING.project(w - z)"),
        ("return z - moved.gather(-1, order.argsort(-1))", "return z - moved.gather(-1, order)"),
    ),
    *mutants(
        "implicitkit/relax/envelope.py",
        RELAX,
        ("moved = 0 * slope if dtheta is None else slope * dtheta", "moved = slope.detach() * dtheta"),
        (
            "with compat.forward_ad_enabled(ctx.saved_tensors) as (slope,):",
            "with compat.contextlib.nullcontext(ctx.saved_tensors) as (slope,):",
        ),
    ),
    *mutants(
        "implicitkit/relax/fenchel_young.py",
        RELAX + " -k loss",
        ("return 0.5 * self._inner(p, p)", "return self._inner(p, p)"),
        ("return (torch.xlogy(p, p) - p)", "return (2 * torch.xlogy(p, p) - p)", RELAX),
        ("return highest + self._omega(labels) - linear", "return highest - linear", RELAX),
    ),
    *mutants(
        "implicitkit/relax/perturbed.py",
        RELAX,
        ("noise - z + (-noise).exp() - (-z).exp()", "noise - z"),
        ("highest = ((at.unsqueeze(0) + self.sigma * noise) * choices)", "highest = (self.sigma * noise * choices)"),
    ),
    *mutants(
        "implicitkit/project/couplings.py",
        PROJECT + " -k bad_input",
        ("check_values(_check_sums, rows.expand(*lead, n), columns.expand(*lead, m))", "pass"),
        ("if least < 0:", "if False:"),
        (
            "return rows.unsqueeze(-1) * torch.softmax(v + g.unsqueeze(-2), -1)",
            "return rows.unsqueeze(-1) * torch.softmax(v + 2 * g.unsqueeze(-2), -1) * 1.001",
            PROJECT + " -k 'coupling or bad_input'",
        ),
    ),
]
