"""How often a test runs: `make test` leaves out what is `SLOW` here, `make test-all` has it, and both leave more of the
same to ``--whole``, which nightly runs have. By what they cost on two cores, most of which is compiling."""

from fnmatch import fnmatchcase

WHOLE = (
    "test_calibration.py::test_generate_is_one_graph_and_equals_the_eager_path[[]pre-*",
    "test_codebooks.py::test_compiled_attention_is_that_over_decoded_tokens[[]5-*",
    "test_custom.py::test_lossless_pages_change_nothing_and_codes_are_those_of_eager[[]BySlice*",
    "test_eviction.py::test_the_fused_attention_pays_what_the_reference_does[[]5-*",
    "test_evicting_models.py::test_the_compiled_step_is_the_eager_one[[]squat*",
    "test_evicting_models.py::test_the_compiled_step_is_the_eager_one[[]kivi+streaming*",
    "test_forms.py::test_a_model_is_called_in_thirty_two_forms[[]qaq]",
    "test_generate.py::test_every_scheme_generates_compiled_what_it_generates_eagerly[[]asymkv]",
    "test_generate.py::test_every_scheme_generates_compiled_what_it_generates_eagerly[[]quarot]",
    "test_generate.py::test_every_scheme_generates_compiled_what_it_generates_eagerly[[]rtn]",
    "test_generate.py::test_every_scheme_generates_compiled_what_it_generates_eagerly[[]*lsq]",
    "test_qaq.py::test_the_compiled_step_is_the_eager_one[[]demote*",
    "test_rotary.py::test_attention_rotates_what_it_reads[[]interleaved-8-*",
    "test_smollm2.py::test_squat_is_closer_to_full_precision_than_kivi_at_the_shipped_default*",
    "test_threads.py::test_threads_compile_and_get_what_one_gets[[]8-*",
)
SLOW = (
    *WHOLE,
    "test_api.py::test_a_cache_filled_in_inference_mode_goes_on_outside_of_it*",
    "test_calibration.py::test_a_lossless_backbone_gives_the_untouched_model*",
    "test_calibration.py::test_an_interrupted_calibration_goes_on*",
    "test_calibration.py::test_copies_of_a_cache_share_the_predictors*",
    "test_calibration.py::test_generate_is_one_graph*",
    "test_calibration.py::test_the_same_weights_in_another_dtype*",
    "test_codebooks.py::test_compiled_attention_is_that_over_decoded_tokens*",
    "test_custom.py::test_lossless_pages_change_nothing_and_codes_are_those_of_eager[[]ByIndex*",
    "test_evicting_models.py::test_a_padded_batch_of_another_size_follows*",
    "test_evicting_models.py::test_a_padded_batch_may_take_several_turns*",
    "test_evicting_models.py::test_generate_beams_copies_and_crops*",
    "test_evicting_models.py::test_predicted_layers_evict_the_same_tokens*",
    "test_evicting_models.py::test_the_compiled_step_is_the_eager_one*",
    "test_eviction.py::test_the_fused_attention_pays_what_the_reference_does*",
    "test_faults.py::*kivi before RoPE*",
    "test_faults.py::*kivi+*",
    "test_faults.py::*qaq*",
    "test_forms.py::test_a_form_that_reaches_the_limit_starts_again*",
    "test_forms.py::test_a_model_is_called_in_thirty_two_forms*",
    "test_forms.py::test_no_form_of_a_compiled_step_counts*",
    "test_generate.py::test_compiled_generation_equals_eager_packed_generation[[]squat*",
    "test_generate.py::test_compiled_generation_equals_eager_packed_generation[[]*prompt lookup]",
    "test_generate.py::test_drafts_of_any_length_are_verified_by_one_graph*",
    "test_generate.py::test_every_scheme_generates_compiled_what_it_generates_eagerly*",
    "test_generated_code.py::*",
    "test_graph.py::test_models_of_other_shapes_in_the_same_process*",
    "test_histories.py::*",
    "test_ops.py::test_masks_may_differ_from_head_to_head_and_be_shared_by_the_batch[[]inductor]",
    "test_ops.py::test_one_query_attends_to_everything_the_mask_allows[[]sinks, b*inductor]",
    "test_ops.py::test_one_query_with_softcap*inductor]",
    "test_predict.py::test_fused_attention_over_centred_keys*",
    "test_qaq.py::test_generate_beams_copies_crops_and_resets*",
    "test_qaq.py::test_the_compiled_step_is_the_eager_one*padded]",
    "test_rotary.py::test_attention_rotates_what_it_reads*",
    "test_rotary.py::test_beams_and_crops_take_the_tables_along*",
    "test_rotary.py::test_with_an_identity_codec_outputs_are_those_of_the_untouched_model*",
    "test_smollm2.py::*",
    "test_threads.py::test_eager_threads_get_what_one_gets[[]2-qaq]",
    "test_threads.py::test_threads_compile_and_get_what_one_gets*",
    "test_triton_compiles.py::*",
    "test_users.py::test_padding_on_the_right_is_masked*",
    "test_users.py::test_ways_to_generate_equal_the_untouched_model[[]drafts*",
    "test_users.py::test_weights_quantized_by_torchao*",
    "test_versions.py::test_importing_kvpass_says_so_once*",
    "test_zoo.py::test_zoo[[][!BGT]*",
    "test_zoo.py::test_zoo[[]G[LPR]*",
)


def tier(nodeid: str) -> str | None:
    """ "whole" or "slow" for a test that does not always run."""
    test = nodeid.removeprefix("tests/")
    for name, patterns in (("whole", WHOLE), ("slow", SLOW)):
        if any(fnmatchcase(test, pattern) for pattern in patterns):
            return name
    return None
