"""Mutants of the derivative: the primitive, products with Jacobians, lifting, problems, certificates."""

# ruff: noqa: E501
from __future__ import annotations

from .row import mutants

FORMS = "tests/derivatives/test_closed_forms.py -k 'ridge or cubic or second_order or linear_fixed_point'"
RULES = "tests/derivatives/test_closed_forms.py -k 'rules or phantom or unroll'"
TRANSFORMS = "tests/derivatives/test_transforms.py -k 'matches_oracle and root and newton and not krylov'"
CAPTURE = "tests/mutants/test_survivors.py -k reach"
SLICE = "tests/fuzz/test_slice.py"
QP = "tests/problem/test_qp.py -k 'derivatives or two_sided or gradcheck or absent or planted'"
CERTIFICATE = "tests/diagnostics/test_certificate.py tests/mutants/test_survivors_bounds.py -k 'certificate or bound or certif or backward_error or fixed_point'"
STABILITY = "tests/problem/test_steady_state.py tests/mutants/test_survivors_bounds.py -k 'hopf or saddle or arnoldi or modulus or minimum or stab'"
DEGENERACY = "tests/problem/test_qp.py tests/mutants/test_survivors.py -k 'degeneracy'"

ANSWERS = "tests/core/test_answers_of_functions.py"
MUTANTS = [
    *mutants(
        "implicitkit/lifting/lifted.py",
        ANSWERS,
        ("return _each(resolve, self.call(self.function, z, args))", "return self.call(self.function, z, args)"),
        ("            _each(Tensor.detach, lifted(z, plain))", "            lifted(z, plain)"),
    ),
    *mutants(
        "implicitkit/foundation/graph.py",
        "tests/derivatives/test_once_differentiable.py",
        ("own = _own_functions(outs, points, judge) if create_graph else []", "own = []"),
        ("own.extend(_own_functions((out,), given, judge))", "pass"),
        ('while "autograd_function" in', 'if "autograd_function" in'),
        ("for n in own if edge in behind[n])", "for n in own)"),
        ("g.detach() if own.whole else g", "g.detach()"),
    ),
    *mutants(
        "implicitkit/foundation/own_functions.py",
        "tests/derivatives/test_once_differentiable.py",
        ("_PART * torch.maximum(found, said.abs())", "torch.maximum(found, said.abs())"),
    ),
    *mutants(
        "implicitkit/problem/trajectory/integrators.py",
        "tests/problem/test_initial_value.py -k 'vmap_over_integrators'",
        ("batches_in_front(zero + mapped)", "batches_in_front(mapped)"),
        ("samples.movedim(tuple(range(-2 - len(sizes), -2)), tuple(range(len(sizes))))", "samples.flatten(0, -3)"),
    ),
    *mutants(
        "implicitkit/solving/one_solve.py",
        "tests/derivatives/test_lost_samples.py -k forward_mode",
        ('if not failed or on_failure != "raise"', 'if True or on_failure != "raise"'),
    ),
    *mutants(
        "implicitkit/foundation/compat.py",
        "tests/derivatives/test_functions_of_torch.py -k beside_a_sparse",
        ("t.is_inference() or t.layout != torch.strided", "t.is_inference()"),
        (".primal if t.layout == torch.strided else t for t", ".primal for t"),
    ),
    *mutants(
        "implicitkit/solver/polyalgorithm.py",
        "tests/derivatives/test_once_differentiable.py -k minimum",
        ("        found = _run(stages[0].make(), f,", "        found = stages[0].make().run(f,"),
    ),
    *mutants(
        "implicitkit/solving/settings.py",
        ANSWERS,
        ("if math.prod(answer.shape) != 1:", "if False:"),
        ("        return answer is True\n", "        return bool(answer)\n"),
        ("    return bool(answer)\n", "    return answer is True\n"),
    ),
    *mutants("implicitkit/problem/trajectory/events.py", ANSWERS, ("if not g.is_floating_point():", "if False:")),
    *mutants(
        "implicitkit/foundation/pytrees.py",
        "tests/core/test_keys_in_any_order.py",
        ("return None if None in shapes else tuple(shapes)", "return tuple(shapes)"),
        ("if type(tree) is tuple and is_leaf is None:", "if type(tree) is tuple:"),
    ),
    *mutants(
        "implicitkit/lifting/purity.py",
        "tests/core/test_states_of_their_own.py",
        ("            beside()\n", "            pass\n"),
        ("if _differ(out, again):", "if not _differ(out, again):"),
        ("if threading.active_count() == 1:", "if True:", "tests/core/test_threads.py -k draws"),
        ("draws.any or _differ(out, other)", "_differ(out, other)", "tests/core/test_threads.py -k draws"),
        ("[compat.physical(t) for", "[t for"),
        ("for name, t, before in held if version(t) != before)", "for name, t, before in held if False)"),
    ),
    *mutants(
        "implicitkit/solution.py",
        "tests/core/test_states_of_their_own.py -k deep",
        ("if any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in leaves):", "if not leaves:"),
    ),
    *mutants(
        "implicitkit/rule/hidden_dependence.py",
        "tests/derivatives/test_hidden.py",
        ("_TIMES_K = 10.0", "_TIMES_K = 0.0"),
        ("_PART, _SAME = 0.03, 0.1", "_PART, _SAME = 0.3, 0.1"),
        ("_PART, _SAME = 0.03, 0.1", "_PART, _SAME = 0.03, 1e9"),
        ("slope = (_tried(f, z, z) * v)", "slope = 0.5 * (_tried(f, z, z) * v)"),
        ("return (g * v).sum(1)", "return 1.1 * (g * v).sum(1)"),
        ("(there - back) / (2 * h)", "(there - self.F) / (2 * h)"),
        ("change.noise(_APART * h) if known else 0.0", "0.0", "tests/derivatives/test_hidden.py -k few_digits"),
        ("_WIDER, _APART = 4.0, 16.0", "_WIDER, _APART = 4.0, 1.0", "tests/derivatives/test_hidden.py -k few_digits"),
        ("(torch.complex(*weights) if t.is_complex() else weights[0])", "weights[0]"),
        (
            "sigma + sigma.nan_to_num(0, 0, 0).mean(1, keepdim=True)",
            "sigma",
            "tests/derivatives/test_hidden.py -k few_digits",
        ),
        ("& (left > -_DECIDED) & (norm(wide) > 0)", "", "tests/derivatives/test_hidden.py -k small_units"),
        ("told = _compare_program(", "return _compare_program("),
        ("range(_SIGNS if", "range(0 if", "tests/derivatives/test_hidden.py -k across"),
        ("if system.lifted.numbers and not told:", "if not told:"),
        ("if system.lifted.numbers and not told:", "if False:"),
    ),
    *mutants(
        "implicitkit/rule/when_to_ask.py",
        "tests/derivatives/test_hidden.py -k 'costs or sixteen or of_the_code'",
        ("_CLOSED_OVER, _SET = 16, 64", "_CLOSED_OVER, _SET = 64, 64"),
        ("_CLOSED_OVER, _SET = 16, 64", "_CLOSED_OVER, _SET = 16, 0"),
        ("derivatives % _AT_LEAST == 0 or", ""),
        ("return derivatives >= _FIRST and (", "return (", "tests/derivatives/test_hidden.py -k costs"),
        ("whole = hash((identity, settings))", "whole = hash(identity)"),
    ),
    *mutants(
        "implicitkit/rule/detached_numbers.py",
        "tests/derivatives/test_hidden.py -k 'number or step_size'",
        ("return _copied(self.known[len(self.made) - 1])", "return out"),
        ("_LOOSE = 10.0", "_LOOSE = 0.0"),
        ("_PART = 1e-3", "_PART = 0.3"),
        ("if len(again.made) != len(here.made):", "if False:"),
        ("same = torch.linalg.vector_norm(far - near, dim=1) <= _SAME * found", "same = found < 0"),
    ),
    *mutants(
        "implicitkit/lifting/watch.py",
        "tests/derivatives/test_hidden.py -k numbers",
        ("if name in self.NUMBERS and torch.is_grad_enabled():", "if name in self.NUMBERS:"),
        (""" "linspace",""", ""),
        ("self.numbers = self.numbers or bool(given)", "pass"),
        ("self.outside = self.outside or any(", "self.outside = False and any("),
        (
            "if torch.compiler.is_dynamo_compiling() or _asks_only(func):",
            "if _asks_only(func):",
            "tests/derivatives/test_as_torch_does_it.py -k cond",
        ),
        ("            *_UNDERIVED,\n", "", "tests/derivatives/test_functions_of_torch.py -k 'bessel or airy'"),
    ),
    *mutants(
        "implicitkit/lifting/lifted.py",
        "tests/derivatives/test_hidden.py -k numbers",
        ("((looks and looks.outside) or not known", "(not known"),
        ("enumerate(lifted.theta) if differentiated(t)]", "enumerate(lifted.theta)]"),
        ("branch or not lifted.compiled", "branch"),
    ),
    *mutants(
        "implicitkit/rule/unroll.py",
        "tests/derivatives/test_trust.py -k unrolling_from",
        ("if steps == 0 and request.on_failure", "if steps < 0 and request.on_failure"),
        ("return (torch.is_grad_enabled() or compat.has_forward_level()) and any", "return any"),
        ("z = request.unroll(steps)", "z = request.unroll(steps + 1)", RULES),
    ),
    *mutants(
        "implicitkit/rule/primitive.py",
        FORMS,
        (
            "found: Sequence[Tensor | None] = _pull_theta(request, z, theta, needed, -u)",
            "found: Sequence[Tensor | None] = _pull_theta(request, z, theta, needed, u)",
        ),
        ("u = solved(request, True, z, g, theta)", "u = solved(request, False, z, g, theta)"),
        (
            "dz = solved(request, False, z, -autodiff.jvp(",
            "dz = solved(request, False, z, autodiff.jvp(",
            TRANSFORMS,
        ),
        (
            "dz = solved(request, False, z, -autodiff.jvp(",
            "dz = solved(request, True, z, -autodiff.jvp(",
            TRANSFORMS,
        ),
        (
            "_saved(ctx, compat.unwrap_dead_wrappers(ctx.saved_tensors))",
            "_saved(ctx, ctx.saved_tensors)",
            "tests/derivatives/test_captured_levels.py -k 'nested and pairs'",
        ),
        (
            "return u, graph.pulled(out, wanted, -u, retain_graph=False)",
            "return u, graph.pulled(out, wanted, u, retain_graph=False)",
        ),
        (
            "    u = request.solve_linear(A.T, g, True)\n    if A.structure",
            "    u = request.solve_linear(A, g, True)\n    if A.structure",
        ),
        (
            "return u, pull(-u, needed)",
            "return u, pull(u, needed)",
            QP,
        ),
        (
            "return u, pull(-u, needed)",
            "return u, pull(-request.solve_linear(A, g, True), needed)",
            QP,
        ),
        (
            "flat = front(z0, z_dim, batch).reshape(-1, request.system.size)",
            "flat = front(z0, None, batch).reshape(-1, request.system.size)[: batch * z0.shape[0]]",
            TRANSFORMS,
        ),
    ),
    *mutants(
        "implicitkit/rule/linear_functions.py",
        FORMS,
        (
            "if transposed else request, not transposed, z, g, theta)",
            "if transposed else request, transposed, z, g, theta)",
        ),
        ("p, q = (x, w) if transposed else (w, x)", "p, q = (w, x)", TRANSFORMS),
        ("pullback(-p if batched else -q)", "pullback(p if batched else q)"),
        ("return (grads[0], own, *grads[1:])", "return (None, own, *grads[1:])"),
        (
            "return solved(request, transposed, z, as_primal(db, x) - change, theta)",
            "return solved(request, transposed, z, as_primal(db, x) + change, theta)",
            TRANSFORMS,
        ),
        ("self.tangents = [as_primal(dz, z),", "self.tangents = [torch.zeros_like(z),", TRANSFORMS),
        (
            "return autodiff.vjp(residual, y)[1](v)[0] if transposed else autodiff.jvp(residual, (y,), (v,))",
            "return autodiff.jvp(residual, (y,), (v,))",
            TRANSFORMS,
        ),
        ("            A = A.T if transposed else A\n", ""),
        ("        full[i] = t\n    return full", "        pass\n    return full"),
    ),
    *mutants(
        "implicitkit/rule/linear_functions.py",
        "tests/derivatives/test_conserved_sums.py",
        (
            "return t.expand(batch, *t.shape) if dim is None else t.movedim(dim, 0)",
            "return t.expand(batch, *t.shape) if dim is None else t",
            "tests/mutants/test_survivors.py -k starts",
        ),
        ('held.product(columns, what == "back")', "held.product(columns, False)"),
        ('"to" if back else "back"', "ctx.how"),
        ("own, not back and compat.is_legacy_batched(g)", "own, compat.is_legacy_batched(g)"),
    ),
    *mutants(
        "implicitkit/foundation/autocast.py",
        "tests/plugins/deq/test_deq.py -k half_precision_is",
        ("2 * eps if iteration and eps", "2 * eps if False and eps"),
        ("2 * eps if iteration and eps", "2 * eps if eps", "tests/solver/test_convergence.py -k by_default_for_what"),
    ),
    *mutants(
        "implicitkit/foundation/autodiff.py",
        FORMS,
        (
            "return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(grads, points, strict=True))",
            "return tuple(torch.ones_like(p) if g is None else g for g, p in zip(grads, points, strict=True))",
            TRANSFORMS,
        ),
        (
            "unfused() if torch.is_grad_enabled() else",
            "unfused() if False else",
            "tests/derivatives/test_functions_of_torch.py -k fused",
        ),
        (
            "if not lacks_second_derivative(error) or out.shape[1]",
            "if True or out.shape[1]",
            "tests/derivatives/test_once_differentiable.py -k multiply",
        ),
        (
            "return values, pullback(torch.ones_like(values))[0]",
            "return values, -pullback(torch.ones_like(values))[0]",
            "tests/solver/test_argmin_solvers.py -k finds_the_minimum",
        ),
        (
            "rmv if symmetric else mv,",
            "rmv,",
            "tests/linear tests/derivatives/test_closed_forms.py -k 'does_not_depend_on_the_linear_solver'",
        ),
        (
            "return _grad(g, w, v) if g.requires_grad else torch.zeros_like(out)",
            "return _grad(g, w, v)",
            "tests/mutants/test_survivors_linear.py -k products",
        ),
        (
            "return matrix(lambda e: _grad(g, w, e), n, z).mT",
            "return matrix(lambda e: _grad(g, w, e), n, z)",
            "tests/mutants/test_survivors.py -k jacobian",
        ),
        (
            "return torch.cat(parts).transpose(0, 1)",
            "return torch.cat(parts[:1] * len(parts)).transpose(0, 1)",
            "tests/mutants/test_survivors.py -k jacobian",
        ),
        (
            "            w = torch.ones_like(out",
            "            w = torch.zeros_like(out",
            "tests/derivatives/test_functions_of_torch.py -k finite",
        ),
    ),
    *mutants(
        "implicitkit/foundation/operators.py",
        "tests/linear/test_linear.py -k transposed_operator",
        (
            "            self._rmv,\n            self._mv,\n            lambda: self.dense().mT,",
            "            self._mv,\n            self._rmv,\n            lambda: self.dense().mT,",
        ),
        (
            "found = A.derived(lambda v: a * v + b * A.mv(v), lambda w: a * w + b * A.rmv(w), dense, symmetric=A.symmetric)",
            "found = A.derived(lambda v: a * v - b * A.mv(v), lambda w: a * w + b * A.rmv(w), dense, symmetric=A.symmetric)",
            "tests/mutants/test_survivors.py tests/diagnostics/test_certificate.py -k 'operator or contraction'",
        ),
        (
            "return a.unsqueeze(2) * eye + b.unsqueeze(2) * A.dense()",
            "return a.unsqueeze(2) * eye - b.unsqueeze(2) * A.dense()",
            "tests/mutants/test_survivors.py tests/diagnostics/test_certificate.py -k 'operator or contraction'",
        ),
        ("lambda v: A.mv(v) - B.mv(v),", "lambda v: A.mv(v) + B.mv(v),", "tests/mutants/test_survivors.py -k operator"),
        (
            "lambda w: A.rmv(w) - B.rmv(w),",
            "lambda w: A.rmv(w) + B.rmv(w),",
            "tests/mutants/test_survivors.py -k operator",
        ),
        (
            "return A.derived(lambda v: A.mv(M(v)), A.rmv, A.dense)",
            "return A.derived(lambda v: M(A.mv(v)), A.rmv, A.dense)",
            "tests/mutants/test_survivors.py -k operator",
        ),
    ),
    *mutants(
        "implicitkit/rule/series.py",
        RULES,
        ("return NeumannSeries(terms=0)", "return NeumannSeries(terms=1)"),
        ("series = NeumannSeries(terms=self.terms)", "series = NeumannSeries(terms=self.terms + 1)"),
        (
            "return DampedSeries(steps=self.steps, damping=self.damping)",
            "return DampedSeries(steps=self.steps, damping=1.0)",
        ),
    ),
    *mutants(
        "implicitkit/lifting/reach.py",
        CAPTURE,
        ("for v in (x.func, *x.args, *x.keywords.values()):", "for v in (x.func, *x.args):"),
        ("for v in (x.func, *x.args, *x.keywords.values()):", "for v in (x.func, *x.keywords.values()):"),
        ("        for v in x.__defaults__ or ():", "        for v in ():"),
        ("if isinstance(v, (nn.Module, types.FunctionType, functools.partial)):", "if isinstance(v, nn.Module):"),
        ("        for cell in x.__closure__ or ():", "        for cell in ():"),
        ("        for v in x.values():", "        for v in ():"),
        (
            "                todo.append((x, depth + 1))\n",
            "                pass\n",
            "tests/core/test_states_of_their_own.py",
        ),
    ),
    *mutants(
        "implicitkit/problem/constrained.py",
        "tests/problem/test_constrained.py -k 'closed_forms or gradcheck or multipliers'",
        (
            "slope = z[:, :n] - self.proximal(kernel, z[:, :n] - slope, 1.0)",
            "slope = z[:, :n] - self.proximal(kernel, z[:, :n] - slope, 2.0)",
            "tests/problem/test_objectives_in_small_units.py -k group",
        ),
        (
            "slope = z[:, :n] - self.proximal(kernel, z[:, :n] - slope, 1.0)",
            "slope = z[:, :n] - self.proximal(kernel, z[:, :n] + slope, 1.0)",
        ),
        ("natural = lesser(multipliers, -values, kappa)", "natural = lesser(multipliers, values, kappa)"),
        (
            "return torch.cat([slope, torch.where(self.sides(z), natural, values)], 1)",
            "return torch.cat([slope, torch.where(self.sides(z), values, natural)], 1)",
        ),
        (
            'kappa = KAPPA if self.degenerate == "smooth" else 0.0\n        natural',
            "kappa = 0.0\n        natural",
            "tests/problem/test_constrained.py -k 'smooth'",
        ),
    ),
    *mutants(
        "implicitkit/problem/qp_units.py",
        "tests/problem/test_qp.py -k units_of_their_own",
        ("> UNEVEN * float(sizes.min())", "> torch.inf"),
    ),
    *mutants(
        "implicitkit/problem/complementarity.py",
        "tests/problem/test_qp.py -k promise",
        (
            'lam = lam + plus(ends["lower"] - v, kappa)',
            'lam = lam - plus(ends["lower"] - v, kappa)',
            "tests/fuzz/test_slice.py tests/mutants/test_survivors.py -k 'qp or lower'",
        ),
        ("<= _KEPT * kappa + _SLACK * eps * lam.abs() * reach", "<= torch.inf"),
        ("+ _SLACK * eps * lam.abs() * reach", "+ 0 * reach"),
    ),
    *mutants(
        "implicitkit/problem/quadratic_program.py",
        QP,
        (
            "            lam = -lam\n",
            "            lam = +lam\n",
            "tests/fuzz/test_slice.py tests/mutants/test_survivors.py -k 'qp or lower'",
        ),
        ("            lam = above - below", "            lam = above + below"),
        (
            "slope = slope + 0.5 * (torch.bmm(row, P) + torch.bmm(row, P.mT)).squeeze(1)",
            "slope = slope + torch.bmm(row, P).squeeze(1)",
            "tests/mutants/test_survivors.py -k not_symmetric",
        ),
        (
            'slope = slope + 0.5 * (self.times("P", part["P"], z)',
            'slope = slope + 1.0 * (self.times("P", part["P"], z)',
        ),
        (
            'P = 0.5 * (part["P"] + part["P"].mT) if "P" in part else q.new_zeros(batch, n, n)\n        G, h = [], []',
            'P = part["P"] if "P" in part else q.new_zeros(batch, n, n)\n        G, h = [], []',
            "tests/mutants/test_survivors_linear.py -k as_data",
        ),
        ("KAPPA * self.cost if", "KAPPA if", "tests/problem/test_qp.py -k promise"),
    ),
    *mutants(
        "implicitkit/problem/sparse_conditions.py",
        "tests/problem/test_sparse_qp.py -k 'derivatives or two_sided'",
        (
            "put(at.at_column, at.at_row, 0.5 * part",
            "put(at.at_row, at.at_column, 0.5 * part",
            "tests/mutants/test_survivors_linear.py -k sparse",
        ),
        ("-D.index_select(1, at.at_row) * part", "-part"),
        ("D = D + plus_slope(part", "D = D - plus_slope(part", "tests/mutants/test_survivors_linear.py -k sparse"),
        ("put(diagonal, diagonal, 1 - D)", "put(diagonal, diagonal, D)"),
    ),
    *mutants(
        "implicitkit/problem/qp_jacobian.py",
        "tests/mutants/test_survivors.py -k qp_jacobian",
        ('"b": lambda: -w_y,', '"b": lambda: w_y,', QP),
        ('"P": lambda: _symmetric(w_z, z),', '"P": lambda: _outer(w_z, z),', QP),
        ('"A": lambda: _outer(y, w_z) + _outer(w_y, z),', '"A": lambda: _outer(y, w_z) - _outer(w_y, z),', QP),
        ('"h": lambda: self.above * w_l,', '"h": lambda: -self.above * w_l,', QP),
        (
            '"lower": lambda: self.below * w_l,',
            '"lower": lambda: -self.below * w_l,',
            "tests/mutants/test_survivors_linear.py -k blocks",
        ),
        ("z.unsqueeze(1), alpha=-1),", "z.unsqueeze(1), alpha=1),", QP),
        (
            "e, C = torch.where(self.D > 0, (1 - self.D) / self.D, torch.inf), self.G",
            "e, C = torch.where(self.D > 0, (1 - self.D), torch.inf), self.G",
            "tests/mutants/test_survivors.py tests/problem/test_qp.py -k 'qp_jacobian or central_path'",
        ),
        (
            "x, v, norm = self.saddle.solve(r_z - mv(self.G.mT, free), torch.cat([r_y, c], 1))",
            "x, v, norm = self.saddle.solve(r_z, torch.cat([r_y, c], 1))",
        ),
        (
            "return torch.cat([x, y, torch.where(on, -lam / self.D, g_l - mv(self.G, x))], 1), norm",
            "return torch.cat([x, y, torch.where(on, -lam / self.D, g_l)], 1), norm",
        ),
        ("c = torch.where(on, -r_l / self.D, 0)", "c = torch.where(on, r_l / self.D, 0)"),
        (
            "return torch.cat([top, mv(self.A, z), lam - self.D * (mv(self.G, z) + lam)], 1)",
            "return torch.cat([top, mv(self.A, z), lam - self.D * (mv(self.G, z) - lam)], 1)",
        ),
        (
            "top = mv(self.P, z) + mv(self.A.mT, y) - mv(self.G.mT, self.D * lam)",
            "top = mv(self.P, z) + mv(self.A.mT, y) + mv(self.G.mT, self.D * lam)",
        ),
    ),
    *mutants(
        "implicitkit/problem/qp_data.py",
        "tests/mutants/test_survivors.py -k qp_jacobian",
        ("torch.diag_embed(1 - D)", "torch.diag_embed(D)"),
    ),
    *mutants(
        "implicitkit/diagnostics/certificate.py",
        CERTIFICATE,
        ("holds = h <= 0.5", "holds = h <= 5"),
        ("_newton_kantorovich(inverse * curvature * newton,", "_newton_kantorovich(inverse * newton,"),
        (
            "2 * eta / (1 + torch.sqrt((1 - 2 * h).clamp_min(0)))",
            "0.5 * eta / (1 + torch.sqrt((1 - 2 * h).clamp_min(0)))",
        ),
        (
            "derivative = torch.where(epsilon < 1, epsilon / (1 - epsilon), math.inf)",
            "derivative = torch.where(epsilon < 1, epsilon, math.inf)",
        ),
        (
            "backward_error=shaped(inverse * backward.residual_norm",
            "backward_error=shaped(1.0 * backward.residual_norm",
        ),
        ("return 2 * largest", "return largest"),
        ("return residual_norm / (1 - nearby),", "return residual_norm / (1 + nearby),"),
        ("    for _ in range(steps):\n        image = mv(v)", "    for _ in range(1):\n        image = mv(v)"),
        (
            "error = torch.where(contracts, torch.fmin(error, banach), error)",
            "error = torch.where(contracts, 0.1 * torch.fmin(error, banach), error)",
        ),
        ("torch.where(finite, 1 / values[:, -1], torch.nan)", "torch.where(finite, 1 / values[:, 0], torch.nan)"),
    ),
    *mutants(
        "implicitkit/diagnostics/kkt_regularity.py",
        DEGENERACY,
        (
            "weak, active = (distance.abs() <= scale).sum(1), (distance > scale).sum(1)",
            "weak, active = (distance.abs() <= 0).sum(1), (distance > scale).sum(1)",
        ),
        (
            "weak, active = (distance.abs() <= scale).sum(1), (distance > scale).sum(1)",
            "weak, active = (distance.abs() <= scale).sum(1), (distance < -scale).sum(1)",
        ),
        (
            'sides += [data["lower"] - v] if "lower" in data else []',
            'sides += [data["lower"] * torch.nan] if "lower" in data else []',
        ),
        ("kept = s > 1e-10 * s[:, :1]", "kept = s > -1 * s[:, :1]"),
    ),
    *mutants(
        "implicitkit/diagnostics/linear_stability.py",
        STABILITY,
        ("shaped(rate < -margin),", "shaped(rate < 0),"),
        ("shaped(rate > margin),", "shaped(rate > -margin),"),
        ("rate = worst.abs().log() if discrete else worst.real", "rate = worst.abs() if discrete else worst.real"),
        ("key = values.abs() if shift else values.real\n    order", "key = values.abs()\n    order"),
        ("J = sign * A.dense()", "J = A.dense()"),
        (
            "return sign * A.mv(full)[i].cpu().double().numpy() + shift * v.reshape(-1)",
            "return A.mv(full)[i].cpu().double().numpy() + shift * v.reshape(-1)",
            "tests/mutants/test_survivors_methods.py",
        ),
    ),
    *mutants(
        "implicitkit/lifting/lifted.py",
        "tests/derivatives/test_as_torch_does_it.py",
        ("not (looks.seen or looks.rewritten)", "not looks.rewritten"),
        ("not (looks.seen or looks.rewritten)", "not looks.seen"),
        ("not (looks.seen or looks.rewritten)", "False"),
    ),
    *mutants(
        "implicitkit/lifting/watch.py",
        "tests/derivatives/test_as_torch_does_it.py",
        ("is_replaced(func) or func in _OF_TRACKING", "is_replaced(func)"),
        ('("requires_grad", "grad_fn", "is_leaf")', '("grad_fn", "is_leaf")'),
        ('("requires_grad", "grad_fn", "is_leaf")', '("requires_grad", "grad_fn")'),
    ),
    *mutants(
        "implicitkit/foundation/faithful.py",
        "tests/derivatives/test_functions_of_torch.py -m 'not slow'",
        ("    F.layer_norm: _layer_norm,\n", "", "tests/derivatives/test_functions_of_torch.py -k 'layer'"),
        ("    F.batch_norm: _batch_norm,\n", "", "tests/derivatives/test_functions_of_torch.py -k 'batch'"),
        ("    F.instance_norm: _instance_norm,\n", "", "tests/derivatives/test_functions_of_torch.py -k 'instance'"),
        ("    torch.select_scatter: _select_scatter,\n    Tensor.select_scatter: _select_scatter,\n", ""),
        ("made = part * torch.where(hit, made, 1)", "made = torch.where(hit, made, 1)"),
        ("torch.where(places[..., k:] == places[..., :-k], x[..., :-k], 1)", "x[..., :-k]"),
        (
            "    Tensor.scatter_reduce_: _scatter_reduce_,\n",
            "",
            "tests/derivatives/test_functions_of_torch.py -k by_index",
        ),
        ("    torch.native_layer_norm: _native_layer_norm,\n", ""),
        ("    torch.batch_norm: _in_torchs_order(_batch_norm),\n", ""),
        ("    torch.native_batch_norm: _native_batch_norm,\n", ""),
        ("    torch.instance_norm: _in_torchs_order(_instance_norm),\n", ""),
        ("wide = x.float() if x.dtype in _HALF else x", "wide = x"),
        ("(y if bias is None else y + bias).to(x.dtype)", "y if bias is None else y + bias"),
        ("none = summed == 0", "none = summed < 0"),
        ("2 * math.pi * turns.round()", "0 * turns"),
        ("if isinstance(values, Tensor) and compat.tracked(values):", "if False:"),
        ("    if running_mean is not None:  # which it moves", "    if False:"),
        ("keepdim=True) + eps).rsqrt()\n    y = y if", "keepdim=True)).rsqrt()\n    y = y if"),
    ),
    *mutants(
        "implicitkit/lifting/lifted.py",
        "tests/derivatives/test_modes.py",
        ("with inside(), Recomputing(inside):", "with inside():"),
        ("if not self.live or self._recomputes():", "if not self.live:"),
        ("by_name or fresh or self._recomputes()):", "by_name or fresh):"),
        ("looks.recomputed if needed or levels else None", "looks.recomputed"),
    ),
    *mutants(
        "implicitkit/foundation/faithful.py",
        "tests/derivatives/test_numbers_in_forward_mode.py",
        ("_PLAINLY if as_torch else _FORWARD", "_PLAINLY if as_torch else _INSTEAD"),
        ("_PLAINLY if as_torch else _FORWARD", "{} if as_torch else _FORWARD"),
    ),
    *mutants(
        "implicitkit/foundation/numbers_in_forward_mode.py",
        "tests/derivatives/test_numbers_in_forward_mode.py",
        ("if len(operands) != 2:", "if False:"),
    ),
    *mutants(
        "implicitkit/lifting/recomputing.py",
        "tests/derivatives/test_modes.py",
        ("        contextlib.nullcontext() if lifted.compiled else faithful(as_torch=lifted.as_torch),\n", ""),
        ("        swapped(slots, tensors, len(lifted.slots), lifted.compiled),\n", ""),
        ("        lifted.substitute(dict(zip(map(id, lifted.captured), captured, strict=True))),\n", ""),
    ),
]
