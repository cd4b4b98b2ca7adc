"""Mutants of what is claimed: points far out, samples that failed, linear systems that would not get there."""

from __future__ import annotations

from .row import mutants

CANCEL = "tests/solver/test_minima_in_kinks.py"
JUMPS = "tests/mutants/test_survivors_verdicts.py -k jump"
FITS = "tests/mutants/test_survivors_verdicts.py -k fit"
ROUNDED = (
    "tests/solver/test_convergence.py tests/mutants/test_survivors_verdicts.py "
    "-k 'rounding_alone or other_reasons or rounded_to_zero or jump_across'"
)
BESIDE = "tests/solver/test_convergence.py -k 'points_far_out_that_were_claimed and brusselator'"
LIMITS = "tests/solver/test_fits_at_rest.py"
FAR = "tests/solver/test_convergence.py -k 'far_out'"
CLIMBED = "tests/solver/test_convergence.py -k has_climbed_to"
UNITS = "tests/solver/test_units.py -k 'composition or exponential or single'"
UNITS_OF_MAPS = "tests/solver/test_units.py -k 'cosine'"
FEWER = "tests/core/test_states_of_their_own.py"
SECOND = "tests/solver/test_second_order.py"
STAYED = "tests/solver/test_nothing_ran_away.py"
KINKS = "tests/solver/test_minima_in_kinks.py"
STRANGERS = "tests/solver/test_minima_by_strangers.py"
FAILED = "tests/solver/test_convergence.py -k 'failed_sample or (economies and newton)'"

SINGLE = "tests/solver/test_units_of_single_unknowns.py"

MUTANTS = [
    *mutants(
        "implicitkit/problem/scaling.py",
        SINGLE + " -k 'not_matter or samples or small_entries'",
        ("apart = apart & _measured", "apart = apart | _measured"),
        ("_EVENER = 0.5", "_EVENER = 50.0", SINGLE + " -k small_entries"),
        ("(_decades(z * g) <=", "(_decades(z / g) <="),
        ("torch.exp2(torch.log2(z.abs()).round())", "torch.exp2(-torch.log2(z.abs()).round())"),
        ("(size > 0).all(1) &", "(size >= 0).all(1) &", SINGLE + " -k small_entries"),
        ("torch.minimum((there - g).abs(), there.abs())", "(there - g).abs()", SINGLE + " -k small_entries"),
        ("torch.minimum((there - g).abs(), there.abs())", "there.abs()", SINGLE + " -k small_entries"),
        ("_FAR = (1e4, -1e4, 30.0, -30.0)", "_FAR = (1e4,)"),
    ),
    *mutants(
        "implicitkit/problem/argmin.py",
        SINGLE + " -k not_matter",
        (
            "            if units is not None:\n                return self._rescaled",
            "            if False:\n                return self._rescaled",
        ),
        ("bounds = tuple(divided(trees.from_numbers(bound, z0), s)", "bounds = tuple((trees.from_numbers(bound, z0))"),
    ),
    *mutants(
        "implicitkit/solver/minimise/convex_newton.py",
        SINGLE + " -k newtons",
        ("    if bool(doubtful.any()):\n        unit", "    if False:\n        unit"),
        (
            "d = torch.where(doubtful.unsqueeze(1), unit * scaled, d)",
            "d = torch.where(doubtful.unsqueeze(1), scaled, d)",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        SINGLE + " -k 'shows_no or hides'",
        ("torch.where(rows <= NOISE * noise, torch.maximum(rows, least), rows)", "torch.maximum(rows, least)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/excess.py",
        SINGLE + " -k hides",
        ("careful, began, both_sides", "careful, both_sides"),
        (", both_sides=f.kind.returns_program)", ")"),
        ("rounding(f, z, refused, began)", "rounding(f, z, refused)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/underflow.py",
        "tests/solver/test_nothing_ran_away.py",
        ("self.count += int(torch.isinf(t).count_nonzero())", "pass"),
        (
            "(mine & (_infinities(f, torch.where(mine.unsqueeze(1), z, point)) > before))",
            "(mine & (_infinities(f, z) > before))",
        ),
        (
            "_infinities(f, torch.where(mine.unsqueeze(1), z, point)) > before",
            "_infinities(f, torch.where(mine.unsqueeze(1), z, point)) > 0",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        SECOND + " -k leave_open",
        ("if f.kind.returns_program:  # multipliers", "if False:  # multipliers"),
    ),
    *mutants(
        "implicitkit/solver/verdict/strides.py",
        "tests/solver/test_nothing_ran_away.py -k vanishes",
        ("_LEAP, _OF_A_LEAP = 0.1, 0.5", "_LEAP, _OF_A_LEAP = 0.1, 0.02"),
        ("_FAR, _HARDLY = 1e-3, 0.02", "_FAR, _HARDLY = 0.1, 0.02"),
        ("<= least * step)", "<= 1e-9 * size)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_differences_in_rows.py -k 'decay and float32 and 50'",
        ("line = ~(regular & full)  #", "line = torch.ones_like(full)  #"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_nothing_ran_away.py -k hands_on",
        ("rounded = rounded + 2 * eps * point.abs() / rows if f.kind.iteration else rounded", "pass"),
    ),
    *mutants(
        "implicitkit/solver/driver.py",
        "tests/solver/test_nothing_ran_away.py -k vanishes",
        ("doubted = f.doubted if self.judge.relative_to_state else None", "doubted = None"),
    ),
    *mutants(
        "implicitkit/solver/finding.py",
        "tests/problem/test_steady_state.py -k 'flow_leaves or spiral'",
        ("growth > torch.finfo(z.dtype).eps ** 0.5 *", "growth > -1e9 *"),
        ("torch.linalg.eigvals(J).real.amax(1)", "torch.linalg.eigvals(J).real.amin(1)"),
        ("J = f.kind.flow * in_working", "J = -f.kind.flow * in_working"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        LIMITS + " -k any_units",
        ("largest > (_FAR if self._unit is None else _FAR * self._unit)", "largest > _FAR"),
    ),
    *mutants(
        "implicitkit/solver/verdict/crossings.py",
        STAYED + " -k 'discount or company'",
        ("clear = (there * back < 0) &", "clear = (there * back > 0) &"),
        ("found = found & (~asked | (clear & straight))", "found = found & ~asked"),
        ("vague = S * sound < 10 * eps", "vague = S * sound < 1e9 * eps"),
        ("straight = ((there - back) - said).abs()", "straight = ((there - back) + said).abs()"),
    ),
    *mutants(
        "implicitkit/solver/verdict/crossings.py",
        "tests/solver/test_convergence.py -k 'low_precision and valley'",
        ("return which & (other < value - NOISE", "return which & (other < 0 * value - NOISE"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py -k 'low_precision and (valley or Kowalik)'",
        ("line = line & ~is_lower(f, z, origin, line & ~full)", "pass"),
        ("falls = _FALLS * _LEFT if f.kind.of_residuals", "falls = _FALLS**2 if f.kind.of_residuals"),
    ),
    *mutants(
        "implicitkit/solver/verdict/crossings.py",
        STAYED + " -k unit_that_is_off",
        ("return torch.where(off.unsqueeze(2), fixed, kept), torch.where(off, 0, b)", "return M, b"),
    ),
    *mutants(
        "implicitkit/solver/verdict/underflow.py",
        STAYED + " -k unit_that_is_off",
        ("known & rises & flat.all(1, keepdim=True)", "known & rises"),
        (
            "known & rises & flat.all(1, keepdim=True)",
            "known & rises & flat.all(1)",
            STAYED + " -k judged_sample_by_sample",
        ),
    ),
    *mutants(
        "implicitkit/solver/starts.py",
        KINKS,
        ("found & ((there > level) | ~moved.any(1))", "found & ((there < level) | ~moved.any(1))"),
        ("(missing | (slope.abs() <= atol)).all(1)", "(missing | (slope.abs() >= 0)).all(1)"),
        ("(missing.cumsum(1) == k) if k else missing", "(missing.cumsum(1) == k) if False else missing"),
    ),
    *mutants("implicitkit/solver/driver.py", KINKS, ("if self.step and self.f.kind.minimisation:", "if False:")),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        "tests/mutants/test_survivors_verdicts.py -k unit_in_the_last_place",
        ("> max(_OWN, 8 * eps) * z.abs()) & (z != 0)", "> 1e9 * z.abs()) & (z != 0)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_nothing_ran_away.py -k resistors",
        ("enough = count > 1 and bool((moved", "enough = count > 1 or bool((moved"),
        ("moved = (size > least) |", "moved = (size > 0) |"),
    ),
    *mutants(
        "implicitkit/rule/gauge.py",
        "tests/derivatives/test_gauges.py",
        ("& (left <= rtol * torch.linalg.vector_norm(b, dim=1))", ""),
        ("doubt=found.doubt or _SAID", "doubt=found.doubt"),
    ),
    *mutants(
        "implicitkit/rule/request.py",
        "tests/derivatives/test_gauges.py",
        ("if transposed and not whole and isinstance(self.linear_solver, Auto):", "if False:"),
        (
            "if transposed and not whole and isinstance(self.linear_solver, Auto):",
            "if not whole and isinstance(self.linear_solver, Auto):",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        BESIDE,
        ("(matrix * (point / unit).unsqueeze(1)).abs().sum(2))", "matrix.abs().sum(2))"),
    ),
    *mutants(
        "implicitkit/solver/verdict/limiting_fits.py",
        LIMITS,
        ("return still & moved", "return still & ~still"),
        ("return still & moved", "return still"),
        ("still = still & (at(times) <= norm + same)", "still = still & (at(times) <= norm + 1e9 * same)"),
        ("which & (terms > _OTHER * same)", "which"),
        ("which & (terms > _OTHER * same)", "(terms > _OTHER * same)"),
        (".nan_to_num(torch.inf, torch.inf)", ".nan_to_num(0.0, torch.inf)"),
        ("_OUT = (1.1, 2.0, 16.0, 256.0, 4096.0)", "_OUT = (1.1,)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py", LIMITS, ("~near | has_a_limit(f, *fit, z, open_ & near)", "~near")
    ),
    *mutants(
        "implicitkit/solver/finding.py",
        "tests/solver/test_bounded_minima.py -k 'equations or valleys'",
        ("descended if outcome.blind is None else descended & ~outcome.blind", "descended"),
    ),
    *mutants(
        "implicitkit/solver/constrained/second_order.py",
        SECOND,
        (
            "torch.where(length > torch.finfo(v.dtype).eps ** 0.5, v / length, 0)",
            "torch.where(length > 0, v / length, 0)",
            SECOND + " -k corner",
        ),
        (
            "return self._along(v / self.s + self._derivative(Hv - v / self.s))",
            "return self._along(self._derivative(Hv))",
        ),
        ("return ~((low | high) & ~at_rest)", "return ~(low | high)"),
        ("return ~((low | high) & ~at_rest)", "return ~(low & high)"),
        ("return self._derivative(self._along(u))", "return self._derivative(u)"),
        ("z = z - lstsq_batched(rows, violated", "z = z + lstsq_batched(rows, violated"),
        ("falls = falls & within.all(1)", "falls = falls"),
        ("((constraints >= 0) & (slopes < 0))", "(constraints >= 0)"),
        ("self.slope = self.slope + (self.forces", "self.slope = self.slope - (self.forces"),
        ("return torch.where(size > 0, _LONG / size, 1.0)", "return torch.ones_like(size)"),
    ),
    *mutants(
        "implicitkit/solver/finding.py",
        SECOND,
        ("if not (f.kind.minimisation or f.kind.returns_program) or", "if not f.kind.minimisation or"),
        (
            "if f.kind.returns_program else (downhill, falls_forever)\n    falls_by",
            "if False else (downhill, falls_forever)\n    falls_by",
        ),
    ),
    *mutants(
        "implicitkit/lifting/fewer_rows.py",
        "tests/core/test_machinery.py -k 'captured_rows or rows_that or asked_once'",
        ("compare = (bool(names) or key not in _ALIKE) and", "compare = bool(names) and"),
        ("for _ in range(4)]", "for _ in range(1)]", "tests/core/test_machinery.py -k changes_between"),
        ("[a for a in again if not _near(out, a)]", "[]", "tests/core/test_machinery.py -k changes_between"),
        ("            _ALIKE[key] = None\n", ""),
        ("(_COUPLED if before.couples(z)", "(_COUPLED if False", FEWER),
        ("(_COUPLED if before.couples(z)", "(_COUPLED if True", FEWER),
        ("for shift in (0, 1))", "for shift in (0, 0))", FEWER),
        (
            "except (RuntimeError, ValueError, IndexError):\n                return False",
            "except KeyError:\n                return False",
            FEWER,
        ),
    ),
    *mutants(
        "implicitkit/system.py",
        "tests/plugins/deq/test_ordinary_uses.py -k mask",
        ('in_dims=(0, *dims), randomness="same")', 'in_dims=(0, *dims), randomness="different")'),
    ),
    *mutants(
        "implicitkit/foundation/options.py",
        "tests/core/test_options.py -k subclass",
        ("cls.__annotations__ = own | said", "cls.__annotations__ = own"),
        ("and field.name not in own and not hasattr", "and field.name in own and not hasattr"),
    ),
    *mutants(
        "implicitkit/solver/base.py",
        UNITS,
        ("return torch.fmin(start.mul(rtol), atol)", "return atol.expand_as(start).clone()"),
        (
            "if not self.atol_is_default or self.rtol == 0:",
            "if self.rtol == 0:",
            "tests/solver/test_units.py -k 'atol_that_is_given'",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        UNITS,
        ("claims & (norm > self.floor)", "claims & (norm > self.atol)"),
        (
            "self._least = self.floor if isinstance(self.floor, Tensor) else",
            "self._least = size.new_full((), self.atol) if True else",
            UNITS_OF_MAPS,
        ),
    ),
    *mutants(
        "implicitkit/composition/stepper.py",
        UNITS,
        ("self.tolerance = self._floor + self", "self.tolerance = self.options.atol + self"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        CANCEL + " -k 'costs_few or looked_at_once'",
        ("for known in (self._healthy, self._held):", "for known in (self._held,):"),
    ),
    *mutants(
        "implicitkit/solver/verdict/strides.py",
        "tests/solver/test_convergence.py -k 'by_their_units'",
        ("healthy = (norm * step <= _SOUND * last * largest) & (step <= _LOCAL * largest)", "healthy = norm < last"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py -k 'by_their_units'",
        ("stands = (d == 0).all(1)", "stands = (d != d).all(1)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py -k rounding_in_one",
        (" + (matrix * (point / unit).unsqueeze(1)).abs().sum(2))", ")"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py -k 'held or runaway'",
        ("which = which & ~is_held(f, z)", "pass"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        "tests/solver/test_convergence.py -k 'held or runaway'",
        ("held = torch.isfinite(torch.linalg.vector_norm(z, dim=1))", "held = torch.isfinite(z).all(1)"),
        ("small = size < _LARGE * size.amax(1, keepdim=True)", "small = size < size.amax(1, keepdim=True)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py tests/mutants/test_survivors_verdicts.py "
        "-k 'that_were_claimed or steep_root or does_not_follow'",
        ("near = near & _moves_as_said(f, A, z, F, scale)", "pass"),
        ("steep = (step >= eps**0.5 * scale) &", "steep = (step < 0) &"),
        ("(product > _MORE * torch.maximum(far, near))", "(product > _MORE * far)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/underflow.py",
        "tests/solver/test_argmin_solvers.py -k plateau_behind",
        ("asked = known & ~lost & (edge <= torch.finfo(z.dtype).eps ** _SHARE * size)", "asked = known & ~lost"),
    ),
    *mutants(
        "implicitkit/solver/verdict/underflow.py",
        "tests/solver/test_convergence.py -k 'vanishes_beyond or that_were_claimed or behind_a_bump or zero_everywhere'",
        ("size = torch.maximum(size, at(share * inner))", "pass"),
        ("rises = torch.where(flat, f.residual(point) * z, 0).sum(1, keepdim=True) > 0", "rises = ~known"),
        ("_BLIND = 8", "_BLIND = 2"),
        ("plateau = (known & ~lost) | (size == 0) | ~flat", "plateau = (known & ~lost) | ~flat"),
        ("return torch.where(outer > 2 * inner, far, (inner + outer) / 2)", "return (inner + outer) / 2"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        CANCEL + " -k costs_few",
        ("if bool((smooth | ~which).all()):", "if False:"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        "tests/solver/test_differences_in_rows.py",
        ("yield from directions(z, share=_SHARE, most=_FEW + 2 * math.ceil(math.log2(n)), began=began)[_FEW:]", "pass"),
        ("    elif n > 2:", "    elif n > 8:"),
        ("(0, 1, 4, 9, 15, 22, 32, 34)", "(0, 1, 2, 3, 4, 5, 6, 7)"),
        (" or (asked >= _FEW and refused > 1 + _CHANCE * F.numel() * 2.0**-asked)", ""),
        ("        if asked >= _FEW and not careful and _takes", "        if asked >= _FEW and _takes"),
        ("        if asked >= _FEW and not careful and _takes", "        if not careful and _takes"),
        ("return bool((size > _STEP * most).any()) and not bool((size > _CANCELLED * most).any())", "return False"),
        (" and not bool((size > _CANCELLED * most).any())", ""),
        ("return bool((size > _STEP * most).any()) and not", "return not"),
    ),
    *mutants(
        "implicitkit/solver/steps/newton_damping.py",
        "tests/solver/test_differences_in_rows.py",
        ("f.stuck = f.stuck | (waiting & _is_short(d, z))", "pass"),
        ("f.stuck = f.stuck | (waiting & _is_short(d, z))", "f.stuck = f.stuck | waiting"),
        ("torch.maximum(_SHORT * eps**0.5 * size, least)", "_SHORT * eps**0.5 * size.amax(1, keepdim=True)"),
    ),
    *mutants(
        "implicitkit/solver/driver.py",
        "tests/solver/test_differences_in_rows.py -k below_rounding",
        ("rests = near & ~self.judge.hides(self.z)", "rests = near & False"),
    ),
    *mutants(
        "implicitkit/interop/session.py",
        CANCEL + " -k 'scipy and cosh'",
        ("noise = max(noise, self._unresolved(x, difference))", "pass"),
    ),
    *mutants(
        "implicitkit/solver/minimise/gradient_descent.py",
        CANCEL + " -k 'gradient_descent and cosh'",
        ("enough = enough | ((value <= reference + noise) & (promised <= EXPECTED * noise) & flatter)", "pass"),
    ),
    *mutants(
        "implicitkit/reporting.py",
        "tests/core/test_bad_input.py -k 'another and dtype'",
        (
            "_others(z, args, attribute, word) + _others_held(z, function, attribute, word)",
            "_others(z, args, attribute, word)",
        ),
    ),
    *mutants(
        "implicitkit/reporting.py",
        "tests/core/test_bad_input.py -k 'list or tuple'",
        (""" "sequence", f"concatenate {kind}")""", ")"),
    ),
    *mutants(
        "docs/_ext/pictures.py",
        "tests/docs/test_pictures.py",
        ("shrunk = width / figure.get_figwidth()", "shrunk = 1.0"),
        ("* shrunk < LEAST", "< LEAST"),
        ("return any(box.contains(*point) for point in drawn.vertices)", "return False"),
        ("drawn.intersects_bbox(box, filled=filled)", "drawn.intersects_bbox(box, filled=True)"),
        ("drawn.intersects_bbox(box, filled=filled)", "drawn.intersects_bbox(box, filled=False)"),
        ("drawn.intersects_bbox(box, filled=filled)", "any(box.contains(*p) for p in drawn.vertices)"),
        ("for point in some.get_offset_transform().transform(offsets)", "for point in offsets"),
        ("""box, "-", filled=True) for path""", """box, "None") for path"""),
        ("plt.cycler(color=COLOURS)", "plt.cycler(color=COLOURS[::-1])"),
    ),
    *mutants(
        "implicitkit/rule/doubtful.py",
        "tests/derivatives/test_singular_solutions.py",
        ("size = max(_ASKED * rtol**0.5, _LOOSE * rtol)", "size = _ASKED * rtol**0.5"),
        ("large = torch.linalg.vector_norm(x - changed.x, dim=1) >=", "large = torch.linalg.vector_norm(x, dim=1) >="),
        ("there = (z - d).detach()", "there = z"),
        ("A.mv(part * w) * u for", "A.mv(part) * u for"),
        ("A.mv(part * w) * u for", "A.mv(part * w) * u[0] for"),
        ("few = size(made.x) < _ROUNDED *", "few = size(made.x) < 0 *"),
        ("few = size(made.x) < _ROUNDED *", "few = size(made.x) < 1e3 *"),
        ("draws[:, 1] *= torch.finfo(x.dtype).eps", "draws[:, 1] *= torch.finfo(x.dtype).eps ** 2"),
    ),
    *mutants(
        "plugins/implicitkit_deq/causal/positions.py",
        "tests/plugins/deq/test_causality.py -k units",
        ("self.options.floor(size + view.norm)", "self.options.atol"),
    ),
    *mutants(
        "implicitkit/rule/lost_samples.py",
        FAILED,
        ("(Status.DIVERGED, Status.UNBOUNDED, Status.NONFINITE)", "(Status.UNBOUNDED,)"),
    ),
    *mutants(
        "implicitkit/rule/request.py",
        FAILED,
        ("zero = lost.squeeze(1) | (failed &", "zero = lost.squeeze(1) & (failed &"),
        (
            "failed = self._status(len(lost)) != int(Status.CONVERGED)",
            "failed = self._status(len(lost)) >= 0",
            "tests/core/test_bad_input.py -k 'beside_a_failure'",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        FAR,
        ("unit = torch.where(columns > 0, rows / columns, unit)", "unit = unit"),
        ("torch.where(ray, _SHORT, 0)", "torch.where(ray, 0, 0)"),
        ("if not f.kind.of_residuals or z.shape[1] > DENSE:", "if True:"),
        (
            "line = line if lines else line & full",
            "pass",
            "tests/solver/test_convergence.py -k 'parameters_at_infinity'",
        ),
        ("suspect = which & ~is_healthy(F, scale)", "suspect = which & (F != F).all(1)"),
    ),
    *mutants("implicitkit/solver/verdict/scales.py", FAR, ("if bool(lifted.any()):", "if False:")),
    *mutants(
        "implicitkit/solver/verdict/strides.py",
        "tests/solver/test_convergence.py -k 'beyond_every_power or behind_zeros'",
        ("_STEEPEST = 1e5", "_STEEPEST = 700.0"),
        ("outwards = torch.where(across, size + start, size - start)", "outwards = torch.zeros_like(size)"),
        (
            "fell = (F.abs() < before.abs()).all(1)",
            "fell = norm < last",
            "tests/solver/test_convergence.py -k every_equation_fell",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_nothing_ran_away.py",
        ("return not self.relative_to_state or self.rtol <=", "return True or self.rtol <="),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py -k 'beyond_every_power or behind_zeros'",
        ("_OUTWARD, _BESIDE_ZERO = 1e-5,", "_OUTWARD, _BESIDE_ZERO = 1e-2,"),
        ("cut = has_underflowed(f, z, flat)[0] if bool(flat.any()) else", "cut ="),
        ("plateau, vanished = vanished & ends, underflowed | (vanished & ~ends)", "plateau = ends & vanished"),
        ("suspect = suspect & ~(high & (behind.abs() >= F.abs()).all(1))", "pass"),
        ("return open_ & (~outwards | (torch.stack(behind) >= before).any(0))", "return open_"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        "tests/solver/test_convergence.py -k 'beyond_every_power'",
        ("_HEALTHY = 1e-6", "_HEALTHY = 1e-3"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_sparse_programs.py -k cancel_far_out",
        ("_MANY = 10", "_MANY = 2"),
    ),
    *mutants(
        "implicitkit/solver/verdict/underflow.py",
        ROUNDED,
        ("lost = lost | (asked & ~grows(", "lost = lost & (asked & ~grows("),
        ("_NOISE = 1e3", "_NOISE = 0.0"),
        ("return (known & lost).any(1), plateau.all(1) & flat.any(1)", "return (known & lost).any(1), known.any(1)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        ROUNDED,
        ("which = which & ~plateau", "pass"),
        ("scale = torch.where(still & ~grows(f, z, F, still, seen), 0, scale)\n    sound", "scale = scale\n    sound"),
        ("scale = torch.where(still & ~grows(f, z, F, still), 0, scale)\n    suspect", "scale = scale\n    suspect"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        ROUNDED,
        ("_DOUBLES = 1.9", "_DOUBLES = 0.9"),
        ("found = found | (asked & crosses)", "pass"),
        ("found = found | (asked & doubles)", "pass"),
    ),
    *mutants(
        "implicitkit/solver/verdict/inflection.py",
        "tests/solver/test_convergence.py -k inflection",
        ("(curvature.square() <= _NEAR * slope * third)", "(curvature >= 0)"),
        ("torch.where(every.unsqueeze(1), steepest, direction)", "direction"),
        ("every = which & (largest <= _FLAT_ALL * beside)", "every = which & (largest < 0)"),
        ("known & (lowest.abs() <= share * largest)", "known & (lowest.abs() < 0)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/inflection.py",
        "tests/solver/test_minima_in_kinks.py",
        ("if z.shape[1] > 1 and (z.shape[1] > steps or bool(small.any())):", "if False:"),
        ("(z.shape[1] > steps or bool(small.any()))", "bool(small.any())"),
        ("(z.shape[1] > steps or bool(small.any()))", "z.shape[1] > steps"),
    ),
    *mutants(
        "implicitkit/solver/verdict/minima.py",
        "tests/solver/test_minima_in_kinks.py -k lanczos",
        ("unsqueeze(1).expand_as(spent)[spent]", "unsqueeze(1).expand_as(spent)[spent] * 0"),
    ),
    *mutants(
        "implicitkit/sparsity/compression.py",
        "tests/linear/test_sparsity.py -k rounding",
        (" & (shown != 0)", ""),
        ("more &= grown <= _AS_MUCH * times * np.abs(shown - inside)", "pass"),
        ("more &= grown <= _AS_MUCH * times * np.abs(shown - inside)", "more &= False"),
    ),
    *mutants(
        "implicitkit/solver/finding.py",
        "tests/solver/test_convergence.py -k inflection",
        ("claimed = claimed & ~forever(f, again.z, claimed)", "pass"),
        ("    _look_down(f, z0, outcome)", "    pass", "tests/solver/test_convergence.py -k gradient_may_vanish"),
        ("torch.where(still & lower, int(Status.SADDLE)", "torch.where(still, int(Status.SADDLE)", CLIMBED),
        ("    if f.kind.minimisation:\n        _look_back", "    if False:\n        _look_back", CLIMBED),
    ),
    *mutants(
        "implicitkit/solver/constrained/second_order.py",
        "tests/solver/test_convergence.py -k inflection",
        ("suspect, u = suspect | flat, torch.where(flat.unsqueeze(1), along, u)", "pass"),
    ),
    *mutants(
        "implicitkit/solver/verdict/underflow.py",
        "tests/solver/test_convergence.py -k 'beyond_every_power or plateaus'",
        ("edge <= _TINY * torch.finfo(z.dtype).eps * size", "edge >= 0"),
        ("flat = flat & ~_has_derivative(f, z, flat)", "pass", "tests/solver/test_convergence.py -k with_a_derivative"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_convergence.py -k 'beyond_every_power'",
        ("several = 2 * math.sqrt(z.shape[1]) if", "several = 1 if"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        "tests/solver/test_convergence.py -k 'kinks_meet or takes_all or do_not_vanish or beside_zero'",
        ("direction, h / 16) > 4 * size, 0, size)", "direction, h / 16) > 4 * size, size, size)"),
        ("<= 0.5 * moved.abs(), 0, left)", "<= 0.5 * moved.abs(), left, left)"),
        ("_UNIT = 0.7", "_UNIT = 1.0"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        "tests/solver/test_units.py",
        (
            "yield from directions(z, share=_SHARE, most=_FEW, began=began)",
            "yield from directions(z, most=_FEW)",
            "tests/solver/test_units.py -k trillion",
        ),
        ("<= _ROUGH * near)", "<= 8 * near)", "tests/solver/test_units.py -k 'kinks and root'"),
        ("_left(_Smooth(f), z,", "_left(f, z,", "tests/solver/test_units.py -k 'box or violates'"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/solver/test_convergence.py -k 'kinks_meet or takes_all or do_not_vanish or beside_zero'",
        (" & _explains(J, r, in_working_precision(z))[1]", ""),
        ("near = near | (orthogonal & _by_factors(f, H", "near = near & (orthogonal & _by_factors(f, H"),
    ),
    *mutants(
        "implicitkit/solver/root/pseudo_transient.py",
        "tests/mutants/test_survivors.py -k 'pseudo_time'",
        ("torch.where(speeding > 0, -1.0, 1.0)", "torch.where(speeding > 0, 1.0, -1.0)"),
        (
            "return -torch.ones_like(speeding)",
            "return torch.ones_like(speeding)",
            "tests/problem/test_steady_state.py -k serves_every_kind",
        ),
        ("return torch.ones_like(speeding)", "return -torch.ones_like(speeding)"),
    ),
    *mutants(
        "implicitkit/problem/complementarity.py",
        "tests/problem/test_constrained.py -k 'smooth or huge_multiplier'",
        ("least = torch.where(gap >= 0, b, a)", "least = a - plus(gap)"),
        ("torch.where(gap >= 0, plus(-gap, kappa), plus(gap, kappa))", "plus(gap, kappa)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_convergence.py -k 'economies or infinity or runs_away or diverge'",
        ("return self.largest(z) <= _FAR and (self._unit is None or", "return True or (self._unit is None or"),
        ("return self.largest(z) <= _FAR_FIXED and not", "return not"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_convergence.py -k 'factors_of_a_point'",
        ("noise = noise & (_UNSIGNED * steep >= size)", "pass"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        "tests/problem/test_initial_value.py -k 'has_not_run_away'",
        ("terms = torch.maximum(scale, rows * matrix.abs().sum(2)) if square else scale", "terms = scale"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_large_least_squares.py -k 'questions_of_the_judge'",
        ("self._away = z, asked | open_, away", "pass"),
        ("noise=not fast", "noise=True"),
    ),
    *mutants(
        "implicitkit/solver/constrained/sparse_step.py",
        "tests/solver/test_sparse_programs.py -k 'one_factorisation or bounds_alone'",
        ("sets=1, convex", "convex"),
    ),
    *mutants(
        "implicitkit/project/couplings.py",
        "tests/problem/test_project.py -k 'couplings'",
        ("return _coupling(v, rows, unit * found.value)", "return _coupling(v, rows, found.value)"),
    ),
    *mutants(
        "implicitkit/solver/verdict/minima.py",
        FAR,
        (
            "return torch.maximum(step, _UNITS *",
            "return torch.maximum(relative * relative * size / size.clamp_min(1) + relative * size, _UNITS *",
        ),
    ),
    *mutants(
        "implicitkit/solver/verdict/minima.py",
        "tests/solver/test_large_least_squares.py -k 'like or saddle'",
        ("_LIKE = 0.5", "_LIKE = 50.0"),
        ("which = which & ~_is_like(product, known, z, steps)", "pass"),
        ("w = w - share * Nq", "w = w - 0 * share * Nq"),
        ("alive = alive & ~(square.abs() <= torch.finfo(z.dtype).eps)", "pass"),
    ),
    *mutants(
        "implicitkit/linear/iterative/cycles.py",
        "tests/linear/test_linear.py -k 'gmres'",
        (
            "return (norm > 0.5 * before) & ~(needed <= limit - steps)",
            "return (norm > 0.5 * before) & (needed <= limit - steps)",
        ),
        ("return (norm > 0.5 * before) & ~(needed <= limit - steps)", "return norm > 0.5 * before"),
    ),
    *mutants(
        "implicitkit/solver/verdict/settled.py",
        "tests/solver/test_settled.py",
        ("asked & near & (secant | ~tenth)", "asked & near"),
        ("asked & near & (secant | ~tenth)", "asked & (secant | ~tenth)"),
        ("_LINEAR = 1e-6", "_LINEAR = 1e-2"),
        ("(tenth | _is_linear(known, step, F, before, ~tenth))", "tenth"),
        ("tenth = length <= _LONGER * _SHORT", "tenth = length < torch.inf"),
        ("if bool((F == 0).any()):", "if False:"),
        ("~tenth)) & known.factor.ok.to(z.device)", "~tenth))"),
        ("torch.where(short, _SECANT, _FAITHFUL) * length", "_SECANT * length"),
        ("torch.where(short, _SECANT, _FAITHFUL) * length", "_FAITHFUL * length"),
        ("asked = asked & (_share_of_damping(known, z) <= _DAMPED)", "pass"),
        ("known.solve(mu * D * v", "known.solve(mu * v"),
        ("torch.nan_to_num(D * known.solve", "torch.nan_to_num(known.solve"),
        ("_SWEEPS = 2", "_SWEEPS = 1"),
        ("held = which & ((size <= _STEEPER * moved) & (size > 0)).all(1)", "held = which"),
        ("held = which & ((size <= _STEEPER * moved) & (size > 0)).all(1)", "held = which & (size > 0).all(1)"),
        ("(size <= _STEEPER * moved) & (size > 0)", "size <= _STEEPER * moved"),
        ("held = which & ((size", "held = ((size"),
        ("(size > 0)).all(1) & known.factor.ok.to(z.device)", "(size > 0)).all(1)"),
        ("_NEXT = 1e-10", "_NEXT = 1e-3"),
        ("_STEEPER = 1e6", "_STEEPER = 1e12"),
        ("_STEEPER = 1e6", "_STEEPER = 10.0"),
        ("(known.solve(F).abs() <= _NEXT * unit).all(1)", "True"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_settled.py",
        ("torch.where(F.abs() <= self._floor(), 0, F)", "F"),
        ("for known in (self._healthy, self._held):", "for known in (self._healthy,):"),
        ("unknown = open_ & ~self._is_settled(z)", "unknown = open_"),
        ("unknown = open_ & ~self._is_settled(z)", "unknown = open_ & False"),
        ("beginning = beginning & ~self._is_settled(z)", "pass"),
    ),
    *mutants(
        "implicitkit/solver/verdict/scales.py",
        JUMPS,
        ("size = torch.minimum(size, change(f, z, F, direction, -h))", "pass"),
        ("torch.minimum(slope.abs(), back.abs())", "slope.abs()"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        FITS,
        ("regular = regular & (values[:, -1] >", "regular = regular | (values[:, -1] >"),
        ("return regular & _is_small(d / columns, z) &", "return regular &"),
        ("return regular & _is_small(d / columns, z) &", "return regular & _is_small(d, z) &"),
        (" & (columns > 0).all(1) & (F != 0).any(1)", " & (columns > 0).all(1)"),
        ("return d, ok & (condition < torch.finfo(A.dtype).eps ** -0.25)", "return d, ok"),
        ("    if not bool((regular | ~which).all()):", "    if False:"),
        (
            "    if not bool((regular | ~which).all()):",
            "    if True:",
            "tests/solver/test_few_unknowns.py -k singular_values",
        ),
        ("if fit is not None and bool((_well_fitted(*fit, z, F, which) | ~which).all()):", "if False:"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        "tests/solver/test_settled.py -k holds_at_the_start",
        ("_LEAST = 2e-16", "_LEAST = 0.0"),
    ),
    *mutants(
        "implicitkit/solver/verdict/probing.py",
        STRANGERS + " -k 'begins_where or underflows'",
        ("return zero & ~(J != 0).any(2) & ~(J != 0).any(1)", "return zero & False"),
    ),
    *mutants(
        "implicitkit/solver/verdict/judging.py",
        STRANGERS + " -k larger_than_the_slope",
        ("open_ & ((norm < began) |", "open_ & (~failed | failed |"),
    ),
    *mutants(
        "implicitkit/solver/verdict/minima.py",
        STRANGERS + " -k 'on_waves or valley'",
        ("return self.runs >= _RUNS", "return self.runs > 1000"),
        ("self.runs + 1, 0)\n        self.far", "self.runs + 1, self.runs + 1)\n        self.far"),
    ),
    *mutants(
        "implicitkit/solver/minimise/quasi_newton.py", STRANGERS + " -k noise", ("_PATIENCE = 3", "_PATIENCE = 3000")
    ),
    *mutants(
        "implicitkit/solver/outside.py",
        "tests/solver/test_failing_trials.py",
        (
            "isinstance(error, (torch.linalg.LinAlgError, ConvergenceError)) or",
            "isinstance(error, torch.linalg.LinAlgError) or",
        ),
    ),
    *mutants(
        "implicitkit/solver/auto.py",
        "tests/solver/test_changes_of_sign.py",
        ("_SCALAR_NEWTON if size == 1 else _DENSE_NEWTON", "_DENSE_NEWTON"),
        ("Stage(Impatient(DFSANE(), window=50, horizon=500), max_steps=500)", '_stage("df_sane", max_steps=500)'),
    ),
    *mutants(
        "implicitkit/solver/polyalgorithm.py",
        STRANGERS + " -k believed",
        ("forever = (falls >= _ENOUGH) &", "forever = (falls > 100) &"),
    ),
]
