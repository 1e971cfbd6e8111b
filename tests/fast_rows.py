"""Rows of the shared tests that `make test` runs; their other rows are `slow`, run by `make test-full`.

A test that stands here has rows that differ little from each other, each of which takes a second or more.
"""

from zlib import crc32

METHODS = ("dsee", "id3")

ONE_EACH = (
    *("bert-lora", "gpt2-selective", "llama-id3", "t5-propetl"),
    *("deberta-v2-propetl", "modernbert-lora", "mpnet-selective", "distilbert-id3"),
)
"""Every architecture with one method, and every method with two architectures."""

FAST_ROWS = {
    # tests/compressor
    "test_a_cut_training_ends_in_the_same_bits": METHODS,
    "test_training_learns_repeats_and_moves_nothing_else": METHODS,
    "test_one_batch_is_two_accumulated_is_two_processes": ("dsee", "id3"),
    "test_a_cut_training_ends_in_the_same_bits_on_every_architecture": ONE_EACH,
    "test_another_base_is_refused": ONE_EACH,
    "test_a_price_is_what_removing_does_to_the_loss": ("bert", "t5"),
    "test_another_loss_is_the_same_over_two_processes": ("taught",),
    "test_removal_refit_and_inference": ("dsee",),
    "test_a_cut_training_keeps_the_same": ("lora", "mixout"),
    "test_tasks_that_share_all_but_their_heads": ("full-bert",),
    "test_a_trained_model_computes_in_fp32": METHODS,
    "test_bf16_learns_on_every_architecture": ("bert",),
    "test_a_cut_on_either_side_of_the_projection": ("25",),
    # tests/pipelines
    "test_it_is_the_dense_model_with_the_same_trainings": (),
    "test_a_pruned_model_is_refitted_stored_and_merged": ("full-target", "lora-weights"),
    "test_other_kinds_of_tasks": (),
    "test_variants_for_other_kinds_of_tasks": ("multilabel-logits",),
    "test_one_encoder_and_decoder_writes_the_answers_of_two_tasks": (),
    # tests/export
    "test_attention_is_joined_and_computes_the_same": ("bert-unequal",),
    "test_heads_are_joined_and_compute_the_same": ("bert-unequal",),
    "test_other_attentions_stay": (),
    "test_positions_are_projected_when_a_file_is_opened": (),
    "test_exported_equals_pytorch": ("bert-unequal",),
    "test_every_file_passes_the_full_check": ("bert-unequal",),
    "test_int8_is_close_and_small": ("bert-dense", "bert-unequal"),
    "test_the_matrix": (),
    "test_attention_is_one_operator_per_block": ("bert-unequal",),
    "test_attention_is_joined_where_an_architecture_has_it_in_this_form": (),
    "test_attention_in_int8_has_a_scale_for_each_column": ("unequal",),
    "test_no_session_joins_a_sum_with_its_norm": ("bert-fp32", "bert-int8"),
    "test_it_is_the_same_function_within_its_bound": (),
    "test_half_precision_is_the_same_function": (),
    "test_padded_rows_give_the_same_logits_with_any_id_where_the_mask_is_0": (),
    "test_padding_depends_on_the_length_and_on_the_precision": (),
    "test_a_mask_is_left_out_on_a_gpu_only_where_nothing_is_padded": (),
    "test_faulty_numbers_are_caught": (
        *("nan-fp32", "shifted-fp32", "drawn_together-int8", "shuffled-int8", "noisy-int8", "constant-fp32"),
    ),
    "test_what_the_head_reads_is_found_alike_in_the_model_and_in_the_graph": (),
    "test_the_last_block_computes_keys_and_values_of_all_tokens_and_the_rest_of_one": ("bert",),
    "test_what_is_made_of_such_a_graph_computes_the_same": ("bert",),
    "test_the_flops_that_a_file_saves_are_those_of_its_products": (),
    "test_where_every_token_is_read_all_are_computed": (),
    "test_rows_that_fit_only_without_padding_are_run_without": (),
    "test_every_operator_of_bf16_has_a_kernel_on_cuda": (),
    # tests/end_to_end
    "test_it_learns_and_keeps_what_it_learned": (),
    "test_a_method_is_stored_as_its_link": (),
    "test_files_are_those_of_the_cpu": (),
    # tests/serving
    "test_versions_come_and_go_without_a_failed_request": (),
    "test_levels_of_both_kinds_are_answered_and_checked": ("grpc",),
}
"""Test -> its rows in the fast suite, by what pytest shows in brackets."""

SIMILAR = ("electra", "roberta", "xlm-roberta", "qwen3", "t5-gated")
"""Architectures that differ from another one in names or in one part."""

ONCE_A_FAMILY = (
    "test_identity_at_the_start",
    "test_merge_is_bit_equal",
    "test_state_reloads_bit_equal",
    "test_checkpoint_reloads_bit_equal",
    "test_every_method_comes_back_bit_equal",
    "test_removed_is_masked",
    "test_gradients_are_those_of_the_weight",
    "test_it_is_merged_and_reloaded_in_bits",
)
"""Tests whose rows of SIMILAR architectures are slow."""


A_THIRD = (
    "test_every_row_and_column_of_a_table_is_a_valid_pipeline",
    "test_no_method_revives_a_weight",
    "test_a_task_comes_back_bit_equal",
    "test_what_is_left_of_a_pruned_model_can_be_scored",
    "test_loss_criteria_are_the_first_order_change_of_the_loss",
    "test_loss_criteria_of_weights_are_the_first_order_change_of_the_loss",
    "test_reconstruction_is_the_error_of_a_refit_without_the_unit",
    "test_no_record_at_all",
    "test_states_that_are_kept_change_nothing",
    "test_with_nothing_removed_nothing_changes",
    "test_no_sublayer_gets_worse_and_the_model_gets_nearer",
    "test_peft_reads_our_lora",
    "test_a_head_for_other_labels_is_not_taken_over",
    "test_a_gradient_that_is_not_finite_ends_every_method_there",
    "test_what_is_settled_computes_the_same_and_can_be_cut",
    "test_it_loads_with_the_same_bits",
    "test_it_loads_saves_and_loads_again_with_the_same_bits",
    "test_what_was_loaded_can_be_pruned_on",
    "test_a_weightless_model_is_cut_to_the_same_shapes",
    "test_state_and_delta_file_reload_bit_equal",
    "test_what_cannot_be_merged_is_counted",
    "test_gradients_see_nothing_behind_a_zero",
    "test_every_arm_is_a_pipeline",
    "test_the_file_passes_check_as_it_is",
    "test_a_row_is_proposed_proven_and_read_back",
    "test_sealed",
    "test_two_removals_restore_from_original_indices",
    "test_what_is_removed_later_is_what_is_masked",
    "test_what_is_found_is_the_row_by_hand",
    "test_exactly_the_lowest_go_and_nothing_else_is_touched",
)
"""Tests of many rows that differ in one name: a third of them is fast."""


MANY = 6
"""A test of more architectures takes half of them in the fast suite."""


def is_fast(test: str, row: str, architecture: str | None = None) -> bool:
    """Whether a row of a test belongs to the fast suite, unless it is marked otherwise.

    `architecture`: that of a row of a test of `MANY`; each such test has another half of them.
    """
    if test in ONCE_A_FAMILY and any(name in row for name in SIMILAR):
        return False
    if test in A_THIRD:
        return _in_turn(row, 3)
    if test in FAST_ROWS:
        return row in FAST_ROWS[test]
    return architecture is None or _in_turn(f"{test} {architecture}", 2)


def _in_turn(name: str, number: int) -> bool:
    """Whether it is the turn of a name, as it is of one in a number: a new row moves no other."""
    return crc32(name.encode()) % number == 0
