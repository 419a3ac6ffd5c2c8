"""The onnx package's suite for backends: every case passes, or is excluded with its reason in `exclusions.toml`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.cuda.emulated import emulated
from tests.frontend.suite.cases import Case, all_cases, exclusions

PARTS = 4  # few, as the package computes what all cases expect first, in 15 s
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "optimized": {},
    "as given, two workers": {"optimize": False, "net_type": "dag", "num_workers": 2},
    "on a simulated device": {"device": "sim:0", "net_type": "async_dag", "num_workers": 2},
}
VARIED = [
    "test_ai_onnx_ml_label_encoder_string_int", "test_ai_onnx_ml_tree_ensemble_single_tree", "test_adam",
    "test_affine_grid_2d", "test_argmax_keepdims_example", "test_ai_onnx_ml_array_feature_extractor",
    "test_attention_4d",
    "test_averagepool_2d_ceil", "test_basic_conv_with_padding", "test_batchnorm_epsilon", "test_bitshift_left_uint8",
    "test_cast_FLOAT16_to_FLOAT", "test_center_crop_pad_crop", "test_col2im", "test_compress_1", "test_convtranspose",
    "test_cumsum_2d_axis_1", "test_deform_conv_with_mask_bias", "test_det_nd", "test_dft", "test_einsum_batch_diagonal",
    "test_equal_string", "test_eyelike_with_dtype", "test_gather_elements_1", "test_gridsample_bilinear",
    "test_group_normalization_epsilon", "test_gru_defaults", "test_hammingwindow", "test_identity_sequence", "test_if",
    "test_if_seq", "test_instancenorm_epsilon", "test_layer_normalization_2d_axis1", "test_loop11", "test_loop13_seq",
    "test_loop16_seq_none", "test_lppool_2d_default", "test_lstm_with_peepholes", "test_matmulinteger",
    "test_maxunpool_export_with_output_shape", "test_melweightmatrix", "test_nllloss_NCd1d2_with_weight",
    "test_nonmaxsuppression_suppress_by_IOU", "test_nonzero_example", "test_onehot_with_axis",
    "test_optional_get_element_sequence", "test_qlinearconv", "test_range_int32_type_negative_delta",
    "test_reduce_l2_keep_dims_example", "test_resize_upsample_scales_cubic", "test_reversesequence_time",
    "test_roialign_aligned_true", "test_scan9_sum", "test_scatternd_add", "test_sequence_insert_at_back",
    "test_sequence_map_extract_shapes", "test_split_to_sequence_1", "test_stft", "test_string_split_maxsplit",
    "test_strnormalizer_export_monday_casesensintive_upper", "test_tfidfvectorizer_tf_batch_onlybigrams_skip5",
    "test_top_k", "test_wrap_pad",
    "test_argmin_no_keepdims_random_select_last_index", "test_unique_sorted_with_axis_3d", "test_where_example",
]  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_pass_or_are_excluded(cases: list[Case], part: int) -> None:
    """Half of them optimized, a quarter as given, a quarter on a device; one that is excluded must not pass."""
    excluded = exclusions()
    wrong = []
    for index, case in list(enumerate(cases))[part::PARTS]:
        way = {0: "as given, two workers", 2: "on a simulated device"}.get(index // 24 % 4, "optimized")
        outcome = case.run(**OPTIONS[way])
        if outcome.result == "broken" or (outcome.result == "passed") == (case.name in excluded):
            wrong.append(f"{case.name} ({way}): {outcome}")
    assert wrong == []


@pytest.mark.slow
def test_varied_cases_pass_on_cuda(cases: list[Case]) -> None:
    """Devices compute what they have operators for, and the host the rest."""
    named = {case.name: case for case in cases}
    with emulated(record=False):
        assert {name: named[name].run(device="cuda:0").result for name in VARIED} == dict.fromkeys(VARIED, "passed")


@pytest.mark.slow
def test_the_excluded_are_few_and_exist(cases: list[Case]) -> None:
    """At least 97% of the ordinary cases of the default domain pass, and 90% of all."""
    excluded = exclusions()
    assert set(excluded) - {case.name for case in cases} == set()
    assert all(excluded.values())
    ordinary = [case for case in cases if case.is_ordinary()]
    assert sum(case.name in excluded for case in ordinary) <= 0.03 * len(ordinary)
    assert len(excluded) <= 0.1 * len(cases)
