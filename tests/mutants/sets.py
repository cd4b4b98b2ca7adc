"""Mutants of sets, proximal maps, relaxations and compositions."""

from __future__ import annotations

from .row import mutants

PROJECT = "tests/problem/test_project.py"
PROX = "tests/problem/test_prox.py"
DERIVATIVES = "tests/problem/test_prox.py"
SMALL = "tests/problem/test_objectives_in_small_units.py"
EDGES = "tests/solver/test_edges_and_spheres.py"
STARTS = "tests/solver/test_starts_without_slope.py -k 'steps or plateaus'"
NATURAL = "tests/problem/test_natural_maps.py -k 'same_map or bounded_fits or (bounds and below)'"

MUTANTS = [
    *mutants(
        "implicitkit/problem/constrained.py",
        f"{SMALL} -k a_slope",
        ("state.step * args[0] if self.costed else state.step", "state.step", f"{SMALL} -k group"),
        ("value = value * args[0]", "pass"),
        (
            'is not None and not (self.costed and getattr(self.prox, "of_a_term", False))',
            "is not None",
            f"{SMALL} -k l1",
        ),
        ("if self.has_natural:", "if False:", NATURAL),
    ),
    *mutants("implicitkit/lifting/reach.py", f"{SMALL} -k modules_count", ("b.copy_(copy)", "pass")),
    *mutants(
        "implicitkit/problem/unit_of_objective.py",
        f"{SMALL} -k a_slope",
        ("if _any(c != 1) else None", "if False else None"),
        ("lambda t: t / cost.reshape(", "lambda t: t * cost.reshape(", f"{SMALL} -k multipliers"),
        ("torch.maximum(size, _length(step(", "torch.minimum(size, _length(step(", f"{SMALL} -k tiny"),
    ),
    *mutants(
        "implicitkit/problem/unit_of_objective.py",
        "tests/problem/test_natural_maps.py",
        ("_SEEN = 1e3", "_SEEN = 1.0"),
        ("_SEEN = 1e3", "_SEEN = 1e6"),
        ("_MOST**0.3", "_MOST"),
        ("(1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)", "(1e-4,)"),
        ("(1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)", "(1e2, 1e4, 1e6)"),
        ("finfo(z.dtype).eps ** 0.25\n", "finfo(z.dtype).eps ** 0.5\n"),
        ("eps ** -0.25", "eps ** -0.5"),
        ("eps ** -0.25", "0.0"),
        ("torch.log2(c).round()", "torch.log2(c)"),
        ("| (both & steep)", "", f"{SMALL} -k large"),
        ("if both and z.dtype != torch.float64:", "if False:", "tests/solver/test_single_precision.py -k string"),
        ("| (both & (c * apart < 1))", "", f"{SMALL} -k large"),
    ),
    *mutants("implicitkit/solver/user_solver.py", f"{SMALL} -k others", ("*args[hidden:]", "*args")),
    *mutants(
        "implicitkit/problem/natural_map.py",
        "tests/problem/test_natural_maps.py -k subclass",
        ("if any(name in vars(cls) for name in _MAPS):", "if False:"),
        ('("__call__", "apply", "project", "shrink")', '("__call__", "apply", "shrink")'),
        ('("__call__", "apply", "project", "shrink")', '("__call__", "project", "shrink")'),
    ),
    *mutants(
        "implicitkit/problem/natural_map.py",
        "tests/problem/test_project.py -k set_of_bounds",
        ('("__call__", "apply", "project", "shrink")', '("__call__", "apply", "project")'),
        ('return projection.ends if _speaks_of_its_map(projection, "ends") else None', "return None"),
    ),
    *mutants(
        "implicitkit/solver/constrained/inside_newton.py",
        "tests/solver/test_inside_newton.py -k 'entropies or log_det'",
        ('g + state["normal"], off', "g, off"),
    ),
    *mutants(
        "implicitkit/foundation/clamping.py",
        NATURAL,
        ("torch.where((v < low) | low.isnan(), low, v)", "v"),
        ("torch.where((v > high) | high.isnan(), high, v)", "v"),
        ("(v < low) | low.isnan()", "v < low", "tests/problem/test_natural_maps.py -k no_number"),
        ("(v > high) | high.isnan()", "v > high", "tests/problem/test_natural_maps.py -k no_number"),
    ),
    *mutants(
        "implicitkit/sets/box.py", NATURAL, ("return held(slope, least, most)", "return held(slope, most, least)")
    ),
    *mutants(
        "implicitkit/problem/argmin.py", NATURAL, ("slopes, self.upper, self.lower", "slopes, self.lower, self.upper")
    ),
    *mutants(
        "implicitkit/prox.py",
        NATURAL,
        ("return held(z, g - self.weight, g + self.weight)", "return held(z, g + self.weight, g - self.weight)"),
        ("return (self.l2 * z + held(", "return (z + held("),
        ("return held(g + self.weight, None, z)", "return held(g, None, z)"),
        ("return (self.weight * z + held(g, None, z))", "return (z + held(g, None, z))"),
        ("return (self.weight * z + g)", "return (z + g)"),
    ),
    *mutants(
        "implicitkit/sets/spectral.py",
        f"{DERIVATIVES} tests/mutants/test_survivors_bounds.py -k 'psd or nuclear'",
        (
            "return (Q * eigenvalues.clamp_min(0).unsqueeze(-2)) @ Q.mT",
            "return (Q * eigenvalues.abs().unsqueeze(-2)) @ Q.mT",
            PROJECT + " -k psd",
        ),
        (
            "return 0.5 * (g + X @ Y + Y @ X)",
            "return 0.5 * (g + 2 * X @ Y)",
            "tests/mutants/test_survivors_linear.py -k positive_part",
        ),
        (
            "return 0.5 * (dX + _lyapunov(2 * P - X, dX @ X + X @ dX))",
            "return 0.5 * (dX + _lyapunov(2 * P - X, 2 * dX @ X))",
        ),
        ("Y = _lyapunov(2 * P - X, 0.5 * (g + g.mT))", "Y = _lyapunov(P, 0.5 * (g + g.mT))"),
        ("inverse = torch.where(sums > tiny, 1 / torch.where(sums > tiny, sums, 1), 0)", "inverse = 1 / sums"),
        ("return -(W @ Y.mT + Y.mT @ W), W", "return -2 * W @ Y.mT, W"),
        ("rhs = rhs - dM @ Y - Y @ dM", "rhs = rhs - 2 * dM @ Y"),
        (
            "with compat.forward_ad_enabled(ctx.saved_tensors) as (M, Y):",
            "with compat.contextlib.nullcontext(ctx.saved_tensors) as (M, Y):",
        ),
    ),
    *mutants(
        "implicitkit/sets/hyperplanes.py",
        PROJECT + " -k 'box_section or section'",
        (
            "return torch.where(free, v, held) - w_free * (excess / torch.where(square > 0, square, 1))",
            "return torch.where(free, v, held) - w_free * excess",
        ),
        (
            "below, above = torch.where(open_ & left, middle, below), torch.where(open_ & ~left, middle, above)",
            "below, above = torch.where(open_ & ~left, middle, below), torch.where(open_ & left, middle, above)",
        ),
    ),
    *mutants(
        "implicitkit/sets/total_variation.py",
        PROX + " -k 'total_variation'",
        (
            "return middle + (total.gather(-1, last + 1) - total.gather(-1, first) + threshold * turn) / length",
            "return middle + (total.gather(-1, last + 1) - total.gather(-1, first) - threshold * turn) / length",
        ),
        (
            "low, high = torch.where(ends, d < 0, d < -threshold), torch.where(ends, d < 0, d < threshold)",
            "low, high = torch.where(ends, d < 0, d < threshold), torch.where(ends, d < 0, d < threshold)",
        ),
    ),
    *mutants(
        "implicitkit/sets/balls.py",
        PROJECT + " -k 'ball or nearest'",
        (
            "return torch.where(outside, radius * (v / torch.where(outside, norm, 1)), v)",
            "return torch.where(outside, v / torch.where(outside, norm, 1), v)",
        ),
        (
            "return torch.where(outside, v.sign() * onto_simplex(size, radius), v)",
            "return torch.where(outside, onto_simplex(size, radius), v)",
        ),
        (
            "self.centre + self.shrink(v - self.centre, radius)",
            "self.shrink(v - self.centre, radius)",
            "tests/mutants/test_survivors_linear.py -k origin",
        ),
    ),
    *mutants(
        "implicitkit/sets/cones.py",
        PROJECT + " tests/mutants/test_survivors_bounds.py -k 'second_order or monotone or nearest or cone'",
        (
            "scale = 0.5 * (1 + t / torch.where(between, norm, 1))",
            "scale = 0.5 * (1 - t / torch.where(between, norm, 1))",
        ),
        ("polar = (norm <= -t) & (t < 0)", "polar = norm <= -t"),
        ("return -self._increasing(-v)", "return self._increasing(-v)"),
        ("begin = least.argmax(-2)", "begin = least.argmin(-2)"),
    ),
    *mutants(
        "implicitkit/sets/simplex.py",
        PROJECT + " -k 'simplex'",
        ("support = (plain >= edge).to(v.dtype)", "support = (plain > edge).to(v.dtype)"),
        (
            "tau = ((v * support).sum(-1, keepdim=True) - radius) / support.sum(-1, keepdim=True)",
            "tau = ((v * support).sum(-1, keepdim=True) - radius.detach()) / support.sum(-1, keepdim=True)",
            PROJECT + " -k 'radius'",
        ),
        ("inside = ordered * count > excess", "inside = ordered * count > -excess"),
    ),
    *mutants(
        "implicitkit/prox.py",
        PROX + " -k 'minimises or weights'",
        (
            "return v.sign() * (v.abs() - threshold).clamp_min(0)",
            "return v.sign() * (v.abs() + threshold).clamp_min(0)",
        ),
        ("return _soft(v, t * self.l1) / (1 + t * self.l2)", "return _soft(v, t * self.l1) / (1 + self.l2)"),
        ("return (v - t * self.weight).clamp_min(0)", "return v.clamp_min(0) - t * self.weight"),
        ("return v.clamp_min(0) / (1 + t * self.weight)", "return v.clamp_min(0) / (1 + 2 * t * self.weight)"),
        ("v * (1 - threshold / torch.where(short, 1, norm)))", "v * (1 - threshold))"),
        (
            "return (positive_part(Y - shift) - positive_part(-Y - shift))[..., :n, n:]",
            "return (positive_part(Y - shift) + positive_part(-Y - shift))[..., :n, n:]",
        ),
    ),
    *mutants(
        "implicitkit/project/couplings.py",
        PROJECT + " tests/mutants/test_survivors_bounds.py -k 'transport or birkhoff'",
        (
            "A = torch.cat([eye_n.repeat_interleave(m, 1), eye_m.repeat(1, n)], 0)",
            "A = torch.cat([eye_n.repeat_interleave(m, 1), eye_m.repeat_interleave(n, 1)], 0)",
        ),
        (
            "flat = solve(QuadraticProgram(eye, -v.flatten(-2), A, b, -eye, zero)).value",
            "flat = solve(QuadraticProgram(eye, -v.flatten(-2), A, b, eye, zero + 10)).value",
        ),
    ),
    *mutants(
        "implicitkit/relax/perturbed.py",
        "tests/problem/test_relax.py -k 'noise or modes'",
        ("-0.5 * (z.square() - noise.square()) if", "-(z.square() - noise.square()) if"),
        (
            "return mean + ((choices - mean) * weight).sum(0) / (self.samples - 1)",
            "return mean + ((choices - mean) * weight).sum(0) / (0.5 * self.samples)",
        ),
    ),
    *mutants(
        "implicitkit/composition/jacobian.py",
        "tests/composition/test_blocks.py -k 'substitution or large'",
        (
            "self.residuals = [value - point for value, point in zip(self.values, self.points, strict=True)]",
            "self.residuals = [value + point for value, point in zip(self.values, self.points, strict=True)]",
        ),
    ),
    *mutants(
        "implicitkit/composition/gamma.py",
        "tests/composition/test_compose.py -k 'layers_solved_by_hand or graph'",
        (
            "                    if sweep:\n                        known[own] = value",
            "                    if not sweep:\n                        known[own] = value",
        ),
    ),
    *mutants(
        "implicitkit/solver/constrained/out_of_domain.py",
        EDGES + " -k no_value",
        ("~torch.isfinite(model.values(inside)[0])", "torch.zeros_like(which)"),
    ),
    *mutants(
        "implicitkit/solver/constrained/second_order.py",
        EDGES,
        ("inwards = _off_an_edge(look, which)", "inwards = None", EDGES + " -k barrier"),
        ("s = torch.where(past, 0.1 * s, s)", "pass", EDGES + " -k rayleigh"),
    ),
    *mutants(
        "implicitkit/solver/constrained/proximal_gradient.py",
        EDGES + " -k precision",
        ("(short & ~(rise.abs() > _STEEP * straight))", "short"),
        ("bad = ~short & (y != z).any(1) if trial == _OUTSIDE else bad", "pass"),
    ),
    *mutants(
        "implicitkit/sets/balls.py",
        EDGES + " -k any_slope",
        ("torch.where(off == 0, -slope, off)", "off - slope"),
        ("(slope - (u * slope).sum(-1, keepdim=True) * u)", "slope", EDGES + " -k rayleigh"),
    ),
    *mutants("implicitkit/sets/simplex.py", EDGES + " -k any_slope", ("rank + ahead", "rank")),
    *mutants(
        "implicitkit/rule/changed_function.py",
        EDGES + " -k shares",
        ("norm(A.mv(_ROUNDED * eps * largest * signs))", "accepted"),
    ),
    *mutants(
        "implicitkit/solver/functions_of_steps.py",
        STARTS,
        ("flat = flat & (slope == 0).all(1) & torch.isfinite(value)", "flat = flat & torch.isfinite(value)"),
        ("changed | (value != here)", "torch.ones_like(changed)"),
        ("_HALVINGS = 30", "_HALVINGS = 0"),
        ("flat & (here != 0)", "flat"),
    ),
]
