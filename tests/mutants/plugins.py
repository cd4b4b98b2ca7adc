"""Mutants of the DEQ and the convex plugin."""

from __future__ import annotations

from .row import mutants

SPARSE = "tests/plugins/cvxpy/test_sparse_cvxpy.py"
LAYER = "tests/plugins/cvxpy/test_cvxpy_layer.py tests/mutants/test_survivors_plugins.py"
USES = "tests/plugins/deq/test_ordinary_uses.py"
TOOLS = "tests/plugins/deq/test_deq_tools.py tests/mutants/test_survivors_plugins.py"

MUTANTS = [
    *mutants(
        "plugins/implicitkit_deq/forgive.py",
        "tests/plugins/deq/test_training.py -k goes_on",
        ("found = find(granted, found)", "found = find(granted)"),
        ("masked(before.converged, extend", "masked(~before.converged, extend"),
        ("(solution.status == int(ik.Status.NONFINITE)).sum()", "0", "tests/plugins/deq/test_training.py -k numbers"),
    ),
    *mutants(
        "plugins/implicitkit_deq/inputs.py",
        USES + " -k 'names_of_the_cell or names_that'",
        ("given: tuple[Any, ...] = bound.args[1:]", "given: tuple[Any, ...] = inputs"),
        ("bound.apply_defaults()", "pass"),
        ("except TypeError as error:", "except KeyError as error:"),
        ("if name not in by_place]", "if name in by_place]"),
    ),
    *mutants(
        "plugins/implicitkit_deq/frozen.py",
        USES + " -k reentrant",
        (" and computed_again():", " and False:"),
        ("if independent and any(isinstance(m, BATCH_NORMS)", "if any(isinstance(m, BATCH_NORMS)"),
        ("any(isinstance(m, BATCH_NORMS) and m.momentum != 0 for", "any(m.momentum != 0 for"),
        (" and m.momentum != 0 for", " for"),
    ),
    *mutants(
        "plugins/implicitkit_deq/forgive.py",
        USES + " -k does_not_see",
        (", watched=True, **options)", ", **options)"),
    ),
    *mutants(
        "implicitkit/rule/request.py",
        USES + " -k does_not_see",
        ('watched or self.on_failure != "ignore",', "watched,"),
        ('watched or self.on_failure != "ignore",', "True,", "tests/derivatives/test_hidden.py -k 'all_is_ignored'"),
    ),
    *mutants(
        "plugins/implicitkit_deq/compat.py",
        USES + " -k reentrant",
        ("(torch.autograd.backward.__code__, ", "("),
        (" inspect.unwrap(ik.solve).__code__)", ")"),
        ("f_code is CheckpointFunction.backward.__code__", "f_code is CheckpointFunction.forward.__code__"),
    ),
    *mutants(
        "plugins/implicitkit_deq/settings.py",
        "tests/plugins/deq/test_deq.py -k 'varied_depth or deepest'",
        ("torch.randint(self.steps, self.deepest + 1,", "torch.randint(self.steps, self.deepest,"),
        ("torch.Generator().manual_seed(call)", "torch.Generator().manual_seed(0)"),
        ("generator=own, ", ""),
        ("self.deepest < self.steps:", "self.deepest <= 0:"),
        ("deepest=options.optional(count)", ""),
    ),
    *mutants(
        "plugins/implicitkit_deq/layer.py",
        "tests/plugins/deq/test_deq.py -k 'varied_depth'",
        ("self.pretraining.depth(int(self.calls))", "self.pretraining.steps"),
        ("self.pretraining.depth(int(self.calls))", "self.pretraining.depth(0)"),
    ),
    *mutants(
        "examples/deq_copy_memory.py",
        "tests/plugins/deq/test_experiments.py -k hands_over",
        ("began == 1 and loss < self.hand_over * self.alone and", "began == 1 and"),
        ("and self.model.unrest(x, 2 * self.deepest) < RESTS", ""),
        ("self.model.unrest(x, 2 * self.deepest)", "self.model.unrest(x, self.deepest)"),
        ("(began == 0 and loss < LEFT * self.alone)", "began == 0"),
        ("(run.steps % LOOKS and run.steps < self.shallow)", "(run.steps % LOOKS)"),
        ("if len(run.began) == 2 else run.steps if phases else 0)", "if len(run.began) == 2 else 0)"),
        ("v for _, v in run.curve[-LOOKS:]) / LOOKS", "v for _, v in run.curve) / LOOKS"),
        ("update(z, *injected) - z", "update(z, *injected)"),
    ),
    *mutants(
        "plugins/implicitkit_deq/prefix_newton.py",
        "tests/plugins/deq/test_causality.py -k newton_krylov",
        ("(left <= goal).cummin(1).values", "(left <= goal)"),
        ("g = (Y @ r.unsqueeze(3)).squeeze(3).cumsum(1)", "g = (Y @ r.unsqueeze(3)).squeeze(3).sum(1, keepdim=True)"),
    ),
    *mutants(
        "plugins/implicitkit_deq/in_turn.py",
        "tests/plugins/deq/test_causality.py -k in_turn",
        ("open_ = ~solved & (total.status == int(ik.Status.CONVERGED))", "open_ = ~solved"),
    ),
    *mutants(
        "plugins/implicitkit_deq/positions.py",
        "tests/plugins/deq/test_causality.py -k missed_is_said",
        ('total.tolerance = total.kept["asked"]', "pass"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/kkt.py",
        LAYER + " -k 'vertex or policies'",
        ('policy = "raise" if self.degenerate == "raise" else "lstsq"', 'policy = "lstsq"'),
        ("return self.solve(A, b).x", "return -self.solve(A, b).x", LAYER + " -k 'convex or scs'"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/finish.py",
        "tests/mutants/test_survivors_plugins.py -k 'stands_still'",
        (
            "status = torch.where(valid & (norm <= _SOLVED * scale), int(Status.CONVERGED), status)",
            "status = torch.where(valid, int(Status.CONVERGED), status)",
        ),
        ("verdict = torch.where(status == int(Status.CONVERGED), int(Status.INACCURATE), status)", "verdict = status"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/program.py",
        LAYER + " -k 'gradcheck or vmap or transforms or convex_layer'",
        ("else (t.movedim(d + level, level))", "else (t.movedim(d, level))"),
        (
            "torch.cat([DENSE.times(self.P, x) - DENSE.back(self.A, turned)",
            "torch.cat([DENSE.times(self.P, x) + DENSE.back(self.A, turned)",
            "tests/mutants/test_survivors_plugins.py -k 'products_of_the_conditions'",
        ),
        ("J[:, n:, :n] = -self.project(self.A)", "J[:, n:, :n] = self.project(self.A)"),
        ("return J.mT if self.transposed else J", "return J"),
        (
            "return torch.cat([stationarity, y - self.dual.project(y - b + self.A_held.times(A, x))], 1)",
            "return torch.cat([stationarity, y - self.dual.project(y + b - self.A_held.times(A, x))], 1)",
        ),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/sparse_kkt.py",
        SPARSE + " -k 'those_of_the_dense_form'",
        ("(n + row[plain], column[plain], -D * A[:, plain]),", "(n + row[plain], column[plain], D * A[:, plain]),"),
        ("pieces.append((own[0].flatten(), own[1].flatten(), -block.flatten(1)))", "pass"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/held.py",
        SPARSE + " -k 'those_of_the_dense_form'",
        ("return a.index_select(1, at.at_row) * b", "return -a.index_select(1, at.at_row) * b"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/sparse_assembly.py",
        SPARSE + " -k 'transforms'",
        ("return n + m >= _LARGE and", "return False and"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/units.py",
        SPARSE + " -k 'units or unit'",
        ("t = 1 / _unit(P, q / s)", "t = torch.ones_like(s)"),
        ("s = _unit(torch.where(linear, 0, q), b)", "s = torch.ones_like(q[:, :1])"),
        (
            "torch.where(large, least, 1.0)",
            "torch.where(largest > _ORDINARY, largest, 1.0)",
            SPARSE + " -k 'is_no_unit'",
        ),
        ("[s.expand_as(data.q), (s / t).expand_as(data.b)]", "[s.expand_as(data.q), s.expand_as(data.b)]"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/finish.py",
        SPARSE + " -k 'not_unique'",
        ("problem.jacobian(z, P, A, b, _NEAR)", "problem.jacobian(z, P, A, b)"),
        ("if len(rough):", "if False:", SPARSE + " -k 'does_not_tell'"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/cones/second_order.py",
        LAYER + " -k 'projections or second_order'",
        ("low = torch.where(apex, t, t - r)", "low = torch.where(apex, t, t + r)"),
        ("(high - low) / (2 * r)", "(high - low) / r"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/cones/semidefinite.py",
        LAYER + " -k 'projections or semidefinite or isometry'",
        ("step = (change - step @ step) * inverse", "step = change * inverse"),
        ("change = D @ zero + zero @ D + zero @ zero", "change = D @ zero + zero @ D"),
        ("scale[row == column] = 1.0", "scale[row == column] = 2.0"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/cones/exponential.py",
        LAYER + " -k 'projections'",
        (
            "return torch.stack([a * rho + c * e, a + c * (1 - rho) * e, a * e - c], -1)",
            "return torch.stack([a * rho + c * e, a + c * rho * e, a * e - c], -1)",
        ),
        ("face = (r <= 0) & (s <= 0) & ~polar & ~inside", "face = (r <= 0) & ~polar & ~inside"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/cones/product.py",
        LAYER + " -k 'gradcheck or convex_layer or solvers_agree'",
        (
            "inner = extend.plus_slope(v[:, zero:linear], self.smoothing)",
            "inner = 1 - extend.plus_slope(v[:, zero:linear], self.smoothing)",
        ),
        ("return lambda v: v + project_exponential(-v)", "return lambda v: v - project_exponential(-v)"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/affine.py",
        LAYER + " -k 'gradcheck or planted'",
        (
            "return piece if coefficient == 1.0 else -piece if coefficient == -1.0 else piece * coefficient",
            "return piece",
            "tests/plugins/cvxpy/test_cvxpy_contract.py -k any_number_of_layers",
        ),
        (
            "ends = torch.tensor([1.0, 0.0]",
            "ends = torch.tensor([0.0, 0.0]",
            "tests/plugins/cvxpy/test_cvxpy_layer.py -k logistic",
        ),
    ),
    *mutants(
        "plugins/implicitkit_deq/normalise.py",
        TOOLS + " -k 'bound or weight_norm'",
        (
            "return torch.linalg.vector_norm(W) * (W[0, 0].numel() ** 0.5 if W.ndim > 2 else 1.0)",
            "return torch.linalg.vector_norm(W)",
        ),
        ("together = len(taps) ** 0.5 *", "together ="),
        ("return W.abs().flatten(1).sum(1).max()", "return W.abs().flatten(1).sum(1).min()"),
    ),
    *mutants(
        "plugins/implicitkit_deq/cells/monotone.py",
        "tests/mutants/test_survivors_plugins.py -k 'monotone'",
        ("self.margin / size.square()", "2.5 * self.margin / size.square()"),
        (
            "return torch.relu(z - step * (z @ operator.mT - injected))",
            "return torch.relu(z - step * (z @ operator - injected))",
            "tests/plugins/deq/test_deq_cells.py -k 'monotone'",
        ),
        (
            "self.P.mT @ self.P - self.Q + self.Q.mT",
            "self.P.mT @ self.P - self.Q - self.Q.mT",
            "tests/plugins/deq/test_deq_cells.py -k 'monotone'",
        ),
    ),
    *mutants(
        "plugins/implicitkit_deq/forgive.py",
        "tests/plugins/deq/test_training.py -k 'in_vain or are_spared'",
        ("self.pause = policy.every - 1 if dear else 0", "self.pause = 0"),
        ("if policy.spares(~found.converged):", "if True:"),
        ("max(1.0, _RESTING * self.share * failed.numel())", "self.share * failed.numel()"),
        ("max(1.0, _RESTING * self.share * failed.numel())", "_RESTING * self.share * failed.numel()"),
        ("or spent > _DEAR", "or spent >= _DEAR"),
        (
            "for work in (_WORK, _MORE)]",
            "for work in (math.inf, _MORE)]",
            "tests/plugins/deq/test_training.py -k takes_long_to_say",
        ),
        ("for work in (_WORK, _MORE)]", "for work in (_WORK,)]", "tests/plugins/deq/test_training.py -k granted_more"),
        ("self.spared = False\n        if not", "if not"),
    ),
    *mutants(
        "plugins/implicitkit_deq/start.py",
        "tests/plugins/deq/test_training.py -k 'repeated or so_many or evaluation_finds or recomputes'",
        ("start = self._trend.expected() if self._followed.again() else None", "start = self._trend.expected()"),
        ("self.calls = (self.calls + 1) % _ANEW", "self.calls = self.calls + 1"),
        ("not self._followed.again(_written(trained)))", "False)"),
        ("if written is not None and written == self._written:", "if False:"),
        ("(trained), self._start) if known", "(trained), None) if known"),
    ),
    *mutants(
        "plugins/implicitkit_deq/inputs.py",
        "tests/plugins/deq/test_training.py -k 'unbatched or listens'",
        ("if g is not None and bool(g[1:].any()):", "if g is not None and bool(g.any()):"),
        ("if first.ndim != 1 or len(first) < 2", "if first.ndim != 2 or len(first) < 2"),
    ),
    *mutants(
        "plugins/implicitkit_deq/layer.py",
        "tests/mutants/test_survivors_plugins.py -k 'start_loss'",
        ("size = goal.square().sum(1).clamp_min", "size = goal.square().sum(1).sqrt().clamp_min"),
    ),
    *mutants(
        "plugins/implicitkit_cvxpy/layer.py",
        "tests/plugins/cvxpy/test_cvxpy_layer.py -k in_place",
        ("t.to(dtype, copy=True) for t in self._variables_out", "t.to(dtype) for t in self._variables_out"),
        ("t.to(dtype, copy=True) for t in self._general", "t.to(dtype) for t in self._general"),
    ),
    *mutants(
        "plugins/implicitkit_deq/visit.py",
        USES + " -k in_place",
        ("t.clone() if isinstance(t, Tensor) else t", "t"),
    ),
    *mutants(
        "plugins/implicitkit_deq/inputs.py",
        USES + " -k checkpoint",
        ("torch.enable_grad(), ik.extend.own_graphs(), statistics_held", "torch.enable_grad(), statistics_held"),
    ),
    *mutants(
        "plugins/implicitkit_deq/frozen.py",
        USES + " -k 'keeps or no_oftener'",
        ("if self.shown.anything():", "if False:"),
        ("if self.shown.anything():", "if True:"),
        ("with _may_draw(self.name):", "if True:", USES + " -k named_where_torch"),
        ("with _may_draw(self.name), called(", "with called(", USES + " -k named_where_torch"),
    ),
    *mutants(
        "plugins/implicitkit_deq/shown.py",
        USES + " -k 'keeps or no_oftener'",
        ("any(map(observed, self.modules)) or ", ""),
        ("return known is None or known() is not t", "return False"),
        ("value.values() if type(value) is dict else value if", "value if"),
    ),
    *mutants(
        "plugins/implicitkit_deq/layer.py",
        USES + " -k keeps",
        ("the_map.finish(z, weights, injected)", "the_map.finish(state, weights, injected)"),
    ),
    *mutants(
        "implicitkit/lifting/lifted.py",
        USES + " -k checkpoint",
        ("with compat.own_graphs():  # how often", "if True:  # how often"),
    ),
]
