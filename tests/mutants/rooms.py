"""Mutants of rooms of their own: threads, fits, relaxations, options, patterns of Jacobians, manifolds, trajectories."""

from __future__ import annotations

from .row import mutants

THREADS = "tests/core/test_threads.py"

MUTANTS = [
    *mutants(
        "implicitkit/lifting/overlay.py",
        THREADS,
        ("if not everywhere and type", "if False and type"),
        ("if key not in self._replaced:\n            self._under[key] = value", "if False:\n            pass"),
        (
            "return super().get(key, default) if self._mine() else self._under.get(key, default)",
            "return super().get(key, default)",
        ),
        ("attributes[kind] = overlay.end()", "attributes[kind] = overlay"),
        ("        return dict, (self._view(),)", "        return dict, (dict(super().items()),)"),
    ),
    *mutants(
        "implicitkit/lifting/lifted.py",
        THREADS,
        ("len(self.slots), self.compiled)", "len(self.slots), True)"),
        ("len(self.slots), self.compiled) if", "len(self.slots), False) if"),
    ),
    *mutants(
        "plugins/implicitkit_deq/hoist.py",
        "tests/plugins/deq/test_deq_threads.py",
        ("everywhere=any(compiled for *_, compiled in where)", "everywhere=True"),
    ),
    *mutants(
        "implicitkit/lifting/watch.py",
        "tests/core/test_bad_input.py -k moving_statistics",
        ("if _changed(t, copy) or _rebound(t, copy, now)", "if _changed(t, copy)"),
    ),
    *mutants(
        "plugins/implicitkit_deq/frozen.py",
        "tests/plugins/deq/test_deq.py -k instance_norm",
        ("_TRACKING = (*BATCH_NORMS, nn.InstanceNorm1d,", "_TRACKING = (*BATCH_NORMS,"),
        ("if independent and isinstance(m, BATCH_NORMS):", "if independent:"),
    ),
    *mutants(
        "plugins/implicitkit_deq/forgive.py",
        "tests/plugins/deq/test_training.py -k singular",
        ("backward_share: float = 1.0", "backward_share: float = 0.25"),
        ("self.policy.backward_share * len(failed)", "self.policy.share * len(failed)"),
    ),
    *mutants(
        "implicitkit/rule/request.py",
        "tests/core/test_machinery.py -k 'huge'",
        ("if not bool(large.any()):", "if True:"),
        ("found._replace(x=found.x * unit,", "found._replace(x=found.x,"),
    ),
    *mutants(
        "implicitkit/foundation/autocast.py",
        "tests/core/test_ambient_modes.py -k 'autocast'",
        ("if dtype is torch.float64 or device_type", "if device_type"),
    ),
    *mutants(
        "implicitkit/lifting/inference.py",
        "tests/core/test_ambient_modes.py tests/derivatives/test_modes.py -k 'inference'",
        ("with compat.autograd_on():", "if True:"),
        ("args = tuple(tree_map(compat.ordinary, a) for a in args)", "pass"),
    ),
    *mutants(
        "implicitkit/foundation/tracers.py",
        "tests/core/test_recorded.py -k 'compiled_minimisation'",
        ("type(node).__name__ == _COMPILED_TWICE", "False"),
        ("left.extend(after for after, _ in node.next_functions)", "pass"),
    ),
    *mutants(
        "implicitkit/foundation/written.py",
        "tests/core/test_recorded.py -k 'writes_so or behind_the_back or nan'",
        ("if values and values.changed():", "if False:"),
        ("if plain.count_nonzero().item():", "if True:"),
        (" or bool(((now == before) | (before != before)).all())", ""),
        ("self._left = 0 if values else self._left - 1", "self._left = 0"),
    ),
    *mutants(
        "implicitkit/foundation/tracers.py",
        "tests/core/test_machinery.py tests/core/test_recorded.py -k 'traced or symbolic or fake'",
        ("torch.jit.is_tracing() or torch.compiler", "torch.compiler"),
        ("torch.jit.is_tracing() or torch.compiler.is_exporting()", "torch.jit.is_tracing()"),
        ('"_is_fx_tracing_flag", False)', '"_is_fx_tracing_flag", False) and False'),
        ("_get_dispatch_mode(_MODES.FAKE) is not None", "_get_dispatch_mode(_MODES.FAKE) is False"),
    ),
    *mutants(
        "implicitkit/solving/fitting.py",
        "tests/problem/test_fitting.py",
        ("/ (m - n))", "/ m)"),
        ("upper=False).squeeze", "upper=True).squeeze"),
        (
            "covariance = inverse @ inverse.mT",
            "covariance = inverse.mT @ inverse if m == n else inverse @ inverse.mT * 2",
        ),
        ("            r = r / s\n", "            r = r / s.square()\n"),
        ("if not absolute_sigma:", "if absolute_sigma:"),
    ),
    *mutants(
        "implicitkit/relax/envelope.py",
        "tests/problem/test_relax.py",
        ("* slope, None, None", "* slope.square(), None, None"),
        ("moved = 0 * slope if dtheta is None else slope * dtheta", "moved = slope if dtheta is None else slope"),
    ),
    *mutants(
        "implicitkit/relax/fenchel_young.py",
        "tests/problem/test_relax.py",
        ("return highest + self._omega(labels) - linear", "return highest - linear"),
        ("return 0.5 * self._inner(p, p)", "return self._inner(p, p)"),
        ("(torch.xlogy(p, p) - p)", "(2 * torch.xlogy(p, p) - p)"),
    ),
    *mutants(
        "implicitkit/relax/perturbed.py",
        "tests/problem/test_relax.py",
        ("-0.5 * (z.square()", "-(z.square()"),
        (
            "((choices - mean) * weight).sum(0) / (self.samples - 1)",
            "((choices - mean) * weight).sum(0) / self.samples / 2",
        ),
        ("noise - z + (-noise).exp() - (-z).exp()", "noise - z"),
    ),
    *mutants(
        "implicitkit/relax/sorting.py",
        "tests/problem/test_relax.py",
        ("_FALLING = Monotone(decreasing=True)", "_FALLING = Monotone(decreasing=False)"),
    ),
    *mutants(
        "implicitkit/foundation/options.py",
        "tests/core/test_options.py",
        ("low < value <= high if closed", "low <= value <= high if closed"),
        ("lambda value: value > 0, ", "lambda value: value >= 0, "),
        ("lambda value: value >= bound, text", "lambda value: value > bound, text"),
        ("isinstance(value, numbers.Integral) and not isinstance(value, bool)", "isinstance(value, numbers.Real)"),
        ("isinstance(value, numbers.Real) and not isinstance(value, bool)", "isinstance(value, numbers.Real)"),
        ("    return replace(requirement, absent=True)", "    return requirement"),
    ),
    *mutants(
        "implicitkit/sparsity/colouring.py",
        "tests/linear/test_sparsity.py",
        ("lines = pattern.astype(np.int32)", "lines = pattern.astype(np.int8)"),
        (
            "if 0 < len(multipliers) < pattern.shape[0]:",
            "if False:",
            "tests/solver/test_sparse_programs.py -k made_of",
        ),
        ("if (distances % p).all():", "if (distances % p).any():"),
        ("return np.bincount(who[which == place], minlength=owners)", "return np.zeros(owners, dtype=np.int64)"),
        ("waiting[later] -= count", "waiting[later] = 0", "tests/mutants/test_survivors_linear.py -k coloured"),
        ("rest = pattern[keep][:, keep] if len(apart) else pattern", "rest = pattern[keep] if len(apart) else pattern"),
        ("seen[np.abs(indices[left + gap] - indices[left])] = True", "seen[gap] = True"),
        (
            "place[np.repeat(np.arange(len(counts)), counts)])  # not",
            "place[np.repeat(np.arange(len(counts)), counts)] * 0)  # not",
        ),
    ),
    *mutants(
        "implicitkit/linear/auto.py",
        "tests/linear/test_linear.py -k 'dear_matrix'",
        ("if worth >= _WORTH and not alone:", "if False:"),
        (
            "(not A.fixed_point or self._dense_price(A) < _WORTH)",
            "(not A.fixed_point or True)",
            "tests/linear/test_contraction.py -k factor",
        ),
    ),
    *mutants(
        "implicitkit/sparsity/compression.py",
        "tests/linear/test_sparsity.py -k 'symmetric or compressed'",
        ("first + number[group_of] * other_width + inside", "first + number[group_of] * other_width + group_of"),
        ("self.places[here] - begin]", "self.places[here]]", "tests/linear/test_sparsity.py -k 'few_at_a_time'"),
        ("self.number + other.groups", "other.groups", "tests/linear/test_sparsity.py -k 'few_at_a_time'"),
        ("each * inner", "each * 0", "tests/linear/test_sparsity.py -k 'compressed'"),
    ),
    *mutants(
        "implicitkit/manifold/so3.py",
        "tests/problem/test_manifold.py",
        ("return rotation_vector(quaternion_of(z.mT @ y))", "return rotation_vector(quaternion_of(y @ z.mT))"),
        ("sign[..., 2] = torch.linalg.det(U @ Vh)", "sign[..., 2] = 1"),
        ("cosine_part(s) * (K @ K)", "0.5 * (K @ K)"),
    ),
    *mutants(
        "implicitkit/manifold/se3.py",
        "tests/problem/test_manifold.py",
        ("_left(phi) @ rho.unsqueeze(-1)", "rho.unsqueeze(-1)"),
        ("- 0.5 * K + inverse_part", "+ 0.5 * K + inverse_part"),
    ),
    *mutants(
        "implicitkit/linear/independence.py",
        "tests/derivatives/test_independence.py",
        ("foreign = torch.where(given, 0, pulled)", "foreign = torch.where(given, pulled, 0)"),
        ("    _SEEN[key] = None", "    pass"),
        ("    for given in _looks(A.batch).to", "    for given in _looks(A.batch)[:2].to"),
        ("[order % len(pairs)].T", "[order % 2].T"),
    ),
    *mutants(
        "implicitkit/manifold/exponential.py",
        "tests/problem/test_manifold.py",
        ("q = torch.where(q[..., :1] < 0, -q, q)", "q = q"),
        ("(t - t.sin()) / t**3", "(t - t.sin()) / t**2"),
        ("(1 - 0.5 * t / torch.tan(0.5 * t)) / t.square()", "(1 - 0.5 * t / torch.tan(t)) / t.square()"),
    ),
    *mutants(
        "implicitkit/problem/collocation.py",
        "tests/problem/test_initial_value.py",
        ("h[:, None, None] * (A @ slopes)", "h[:, None, None] * (A.mT @ slopes)"),
        ("t = torch.stack((t[0], end))", "t = torch.stack((t[0], t[0] + end))"),
        ("* steps - 1)", "* steps - 2)"),
        (
            "below, before = first[1:] + within, first[1:] - n",
            "below, before = first[1:] + within, first[1:] - 2 * n",
        ),
    ),
    *mutants(
        "implicitkit/solver/charts.py",
        "tests/problem/test_manifold.py",
        ("again = far & ended", "again = far & ~ended"),
        ("claimed & (norm <= _SAME", "claimed & (norm >= _SAME"),
        ("outcome.steps = history.steps + outcome.steps", "pass"),
        ("left -= int(outcome.steps.max())", "left -= 0 * int(outcome.steps.max())"),
    ),
]
