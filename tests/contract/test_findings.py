"""What reviews and fuzzing have found wrong once, by class, and the tests that would notice it again.

Every row names files and functions; that they are there, and are no skipped ones, is what this file tests.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

#: The class of finding: where, and which tests.
FINDINGS: dict[str, dict[str, str]] = {
    # ---------------------------------------------------------------------------------- derivatives that are silently wrong
    "a captured tensor of an outer level is not seen while an inner level runs": {
        "derivatives/test_captured_levels": "two_levels_over_a_closure three_levels "
        "the_pairs_that_torch_hides_from_each_other",
        "derivatives/test_transforms": "matches_oracle",
    },
    "a solve inside the function of another, whose function captures what is differentiated or batched": {
        "derivatives/test_interplay": "nested_solves nested_solves_backward_twice",
        "derivatives/test_captured_levels": "three_levels",
    },
    "the backward evaluates another function than was solved: late binding, buffers, masks, constants": {
        "derivatives/test_trust": "function_changed_before_its_derivative function_changed_inside_transforms "
        "function_changed_before_its_second_derivative a_function_that_has_not_changed_is_not_accused",
        "derivatives/test_interplay": "parameter_changed_before_backward_is_detected",
        "derivatives/test_late_binding": "a_loop_that_binds_its_variables_anew",
    },
    "branches on values, and shapes that depend on them, in compositions and nested solves": {
        "derivatives/test_trust": "branches_on_values_inside shapes_that_depend_on_values",
        "derivatives/test_interplay": "tensor_used_in_a_branch_that_the_start_does_not_take",
    },
    "a module that caches a derived tensor at its first call": {
        "derivatives/test_trust": "a_cache_filled_by_the_first_evaluation a_cache_in_a_closure"
    },
    "a function under no_grad, or that detaches": {
        "derivatives/test_trust": "a_function_that_tracks_nothing",
        "contract/test_compat": "a_map_that_detaches_its_state_is_refused",
    },
    "an argument on which the solution does not depend": {
        "derivatives/test_trust": "an_argument_that_does_not_matter_has_derivative_zero"
    },
    "unrolled steps report another point than they return; a callback writes into the iterate": {
        "core/test_machinery": "unrolled_steps_are_reported_as_they_are a_callback_cannot_write_into_the_iterate"
    },
    "second derivatives of sets and proximal maps, in every order of modes": {
        "problem/test_prox": "second_derivatives third_derivatives_agree_in_every_mode every_public_name_has_a_row",
        "contract/test_forward_guard": "every_jvp_goes_through_the_guard the_check_sees_what_is_wrong",
    },
    "complex unknowns: mixed derivatives, and many cotangents at once": {
        "derivatives/test_closed_forms": "complex_mixed_derivatives many_complex_cotangents_at_once complex_gradcheck"
    },
    "a tensor whose values make no sense is taken on trust: a negative weight or radius, crossed bounds": {
        "core/test_values_below_transforms": "refused_under_every_transform a_covariance_that_is_not_symmetric"
    },
    "squares that overflow or vanish in a norm of a set": {
        "problem/test_project": "squares_neither_overflow_nor_vanish"
    },
    "an eigenvector's free phase": {
        "derivatives/test_gauges": "the_phase_is_free_and_what_does_not_depend_on_it_has_its_derivative "
        "factors_of_a_singular_matrix_are_refused_or_right"
    },
    "a write into the state behind autograd's back": {
        "core/test_recorded": "a_write_behind_the_back_of_autograd_is_noticed a_step_that_writes_so_is_noticed"
    },
    # ----------------------------------------------------------------------------------------------- claims of convergence
    "converged far from any root: the start, or the name of the solver, decides": {
        "solver/test_convergence": "the_start_and_the_name_of_the_solver_do_not_matter "
        "no_claim_is_wrong_and_no_solution_refused there_are_over_a_hundred_systems",
        "solver/test_root_solvers": "a_far_start_does_not_excuse_a_large_residual no_root_is_never_claimed",
    },
    "roots and fixed points at infinity": {
        "solver/test_convergence": "no_fixed_point_at_infinity economies_with_prices_at_infinity "
        "roots_at_infinity_have_diverged_and_the_message_says_how_far"
    },
    "maxima, saddle points and inflections called minima": {
        "solver/test_convergence": "a_maximum_is_left_again a_saddle_on_an_axis_of_symmetry_is_left "
        "an_inflection_is_left_again a_saddle_without_curvature_is_left a_user_solver_that_returns_a_maximum_is_told_so",
        "solver/test_second_order": "a_maximum_within_constraints_is_left_or_refused",
    },
    "a fit that is claimed where its decrement is large": {
        "solver/test_convergence": "meyer_is_solved_from_every_start_it_is_claimed_from",
        "mutants/test_survivors_verdicts": "a_fit_with_a_large_correction_is_not",
    },
    "what falls for ever, and kinks, run to the last step": {
        "solver/test_convergence": "what_has_no_minimum_is_unbounded a_kink_is_given_up_early",
        "solver/test_second_order": "what_falls_for_ever_within_its_constraints_is_unbounded",
    },
    "a small node of a composition hidden by the joint norm": {
        "composition/test_blocks": "every_node_meets_the_tolerance_where_a_joint_norm_would_hide_the_small_one",
        "solver/test_convergence": "every_node_of_a_composition_holds",
    },
    "a linear solver of the backward that fails, or claims what is not so": {
        "linear/test_linear": "what_a_plugin_claims_is_judged_by_a_product gmres_gives_up_where_it_would_not_get_there",
        "mutants/test_survivors": "linear_auto_goes_on_with_gmres_where_cg_cannot",
        "core/test_bad_input": "singular_backward_is_reported_with_the_way_out",
    },
    # ------------------------------------------------------------------------------------------------ PyTorch's machinery
    "a module used by another thread during a solve; a fork while one runs": {
        "core/test_threads": "another_thread_sees_the_module_as_it_is what_another_thread_writes_stays",
        "core/test_machinery": "a_child_forked_while_another_thread_solves",
    },
    "samples are dropped: sets, bounds, and captured tensors that carry the batch": {
        "core/test_machinery": "sets_where_one_sample_converges_first a_captured_tensor_that_carries_the_batch_is_named "
        "captured_rows_that_are_not_those_left in_dims_count_from_the_end",
        "mutants/test_survivors": "samples_are_dropped_whatever_dimension_carries_them",
    },
    "tensors made in inference mode": {
        "core/test_machinery": "tensors_made_in_inference_mode_may_be_captured",
        "derivatives/test_modes": "a_transform_of_what_uses_tensors_made_in_inference_mode",
    },
    "plugins: an interrupt while they load, defaults that they change, the test suite beside them": {
        "core/test_registry": "an_interrupt_while_plugins_load_loses_none what_a_plugin_sets_while_it_loads_is_undone "
        "broken_plugin_is_reported_and_stops_nobody_else"
    },
    "compiled maps with batches of several sizes, and the compiler around a solve": {
        "core/test_machinery": "a_compiled_map_with_batches_of_two_sizes traced_solves_are_refused",
        "derivatives/test_interplay": "compile_around_the_call compile_of_a_transform compile_with_complex_states",
    },
    "scaled losses that overflow, hooks, sharded parameters, the meta device": {
        "core/test_machinery": "an_overflowing_scaled_loss_is_no_failure parameters_that_fsdp_has_moved",
        "plugins/deq/test_deq_defects": "overflowing_scaled_losses_are_skipped_as_without_a_layer",
        "plugins/deq/test_training": "hooks_of_a_library_cell_fire_and_change_nothing shapes_on_the_meta_device "
        "nan_policy_marks_the_failures_and_keeps_gradients_finite",
    },
    "a solution that keeps the graph and the arguments of its call": {
        "core/test_machinery": "a_detached_solution_holds_neither_graph_nor_arguments",
        "contract/test_compat": "nothing_is_kept_alive",
    },
    "a default device that is not the data's": {
        "contract/test_architecture": "tensors_are_made_on_a_device_that_is_named what_makes_tensors_is_what_torch_says",
        "core/test_machinery": "a_solve_is_where_its_tensors_are_whatever_the_default_device",
    },
    "empty batches, no steps": {
        "core/test_machinery": "an_empty_batch_has_an_empty_solution no_steps_are_an_evaluation "
        "a_batch_of_vmap_that_is_empty_is_refused"
    },
    # ----------------------------------------------------------------------------------------------------------- messages
    "wrong types and values of options and arguments, and messages that name nothing": {
        "core/test_bad_input": "refused refused_inside_transforms_too",
        "core/test_options": "every_option_is_checked nonsense_is_refused_when_a_part_is_made",
        "core/test_wrong_values": "wrong_values_are_refused_at_once_and_by_name the_lists_are_those_of_the_library",
        "core/test_returned": "a_step a_black_box a_rule",
    },
    "a user's own solver: what it raises, differentiates and returns": {
        "core/test_machinery": "what_a_users_solver_raises_is_the_cause inside_enable_grad_a_users_solver_may_differentiate",
        "core/test_layer_calls": "what_a_solver_could_not_find_is_a_failure_to_converge",
    },
    # -------------------------------------------------------------------------------------------------------------- tests
    "numbers of a test that could hardly fail: bounds of certificates, margins, one-sided programs": {
        "mutants/test_survivors_bounds": "certificate_of_a_parabola_by_its_formulas "
        "certificate_does_not_hold_above_one_half "
        "backward_error_bounds_what_a_loose_backward_leaves stability_is_not_told_within_its_margin "
        "transport_plans_meet_both_margins_and_are_nearest",
        "problem/test_qp": "gradcheck two_sided_constraints degeneracy_report",
    },
    "convex layers: above 64 unknowns, nested vmap, programs that are claimed but not solved": {
        "mutants/test_survivors_plugins": "convex_layers_above_64_unknowns "
        "convex_layer_in_nested_vmap_with_a_matrix_parameter convex_layer_beside_a_sample_that_is_not_finite "
        "a_solver_that_claims_a_point_where_newton_stands_still_is_not_believed "
        "a_warm_start_where_newton_stands_still_is_no_solution"
    },
    "the fuzzer calls an error right": {
        "fuzz/test_judge": "a_planted_error_is_called_wrong what_only_the_solve_says_is_its_fault",
        "fuzz/test_slice": "the_answer_is_right_or_refused",
    },
    # ---------------------------------------------------------------------------------------------------------- the claims
    "pages whose code does not run, or prints something else": {
        "docs/test_code_blocks": "a_page_runs_and_prints_what_it_says a_wrong_page_is_found",
        "docs/test_docstring_code": "code_in_docstrings_runs comments_of_the_readme_are_compared",
    },
    "a source distribution without its tests; benchmarks that do not say what they compare": {
        "contract/test_packaging": "the_source_distribution_holds_what_its_tests_need version_is_said_once",
        "docs/test_benchmark_page": "a_result_says_where_it_was_measured",
    },
}


@functools.cache
def _tests_of(file: str) -> dict[str, bool]:
    """The tests of a file, and whether they always run: neither skipped nor slow, whatever else they are marked with."""
    found = {}
    for node in ast.parse((TESTS / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = {ast.unparse(mark).split("(")[0] for mark in node.decorator_list}
            found[node.name.removeprefix("test_")] = not marks & {
                "pytest.mark.skip",
                "pytest.mark.xfail",
                "pytest.mark.slow",
            }
    return found


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_was_found_once_has_tests_that_run(finding: str) -> None:
    missing = [
        f"{file}::{name}"
        for file, names in FINDINGS[finding].items()
        for name in names.split()
        if not _tests_of(file).get(name)
    ]
    assert FINDINGS[finding] and missing == []


def test_a_test_that_is_gone_or_skipped_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.py").write_text(
        "def test_kept(): ...\n@pytest.mark.skip('why')\ndef test_skipped(): ...\n@pytest.mark.slow\ndef test_slow(): ...\n"
    )
    monkeypatch.setitem(globals(), "TESTS", tmp_path)
    assert _tests_of("some") == {"kept": True, "skipped": False, "slow": False}
