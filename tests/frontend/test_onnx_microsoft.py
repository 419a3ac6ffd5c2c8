"""onnxruntime's own operators (com.microsoft), one node at a time, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import dagexec
from dagexec.errors import ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import from_model_proto
from tests.frontend.test_onnx_operators import Case, Const, build, floats

Array = npt.NDArray[Any]
RNG = np.random.default_rng(23)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def of_microsoft(case: Case) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The one-node model, whose node is onnxruntime's own, and its feeds."""
    proto, feeds = build(case)
    if case.op != "SimplifiedLayerNormalization":
        proto.graph.node[0].domain = "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return proto, feeds


def by_onnxruntime(proto: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def computed(proto: onnx.ModelProto, feeds: dict[str, Array], optimize: bool = True) -> list[Array]:
    with dagexec.compile(proto, optimize=optimize) as executor:
        found = executor.run(feeds)
    return [found[value.name] for value in proto.graph.output]


ROWS = normal(2, 5, 8)
IMAGE = normal(2, 3, 7, 6)
FILTER = Const(normal(4, 3, 3, 3))
GAMMA, BETA, BIAS = Const(normal(8)), Const(normal(8)), Const(normal(8))
IDS = RNG.integers(0, 11, (2, 5)).astype(np.int32)
WORDS, PLACES, KINDS = Const(normal(11, 8)), Const(normal(9, 8)), Const(normal(2, 8))
SEGMENTS = (IDS % 2).astype(np.int32)
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)

CASES = [
    Case("Gelu", 17, (ROWS,)),
    Case("QuickGelu", 17, (ROWS,)),
    Case("QuickGelu", 17, (ROWS,), {"alpha": 1.0}),
    Case("FastGelu", 17, (ROWS,)),
    Case("FastGelu", 17, (ROWS, BIAS)),
    Case("BiasGelu", 17, (ROWS, BIAS)),
    Case("FusedConv", 17, (IMAGE, FILTER), {"pads": [1, 1, 1, 1]}),
    Case("FusedConv", 17, (IMAGE, FILTER, floats(1, 2, 3, 4)), {"activation": "Relu", "strides": [2, 1]}),
    Case("FusedConv", 17, (IMAGE, FILTER, floats(1, 2, 3, 4), normal(2, 4, 7, 6)),
         {"activation": "Relu", "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}),
    Case("FusedConv", 17, (IMAGE, FILTER, None, normal(2, 4, 5, 4)), {}),
    *(Case("FusedConv", 17, (IMAGE, FILTER), {"activation": name}) for name in ("Tanh", "Sigmoid")),
    *(Case("FusedConv", 17, (IMAGE, FILTER), {"activation": name, "activation_params": parameters})
      for name, parameters in (("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.75]), ("HardSigmoid", [0.3, 0.4]))),
    Case("FusedGemm", 17, (ROWS[0], Const(normal(3, 8)), floats(1, 2, 3)),
         {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.3}),
    Case("FusedMatMul", 17, (ROWS, Const(normal(8, 3))), {"alpha": 0.125}),
    Case("FusedMatMul", 17, (ROWS, normal(2, 3, 8)), {"transB": 1}),
    Case("FusedMatMul", 17, (ROWS, normal(2, 5, 3)), {"transA": 1, "alpha": 2.0}),
    Case("FusedMatMul", 17, (normal(5, 2, 8), normal(2, 8, 3)), {"transBatchA": 1}),
    Case("FusedMatMul", 17, (normal(8, 2, 5), normal(3, 2, 8)),
         {"transBatchA": 1, "transA": 1, "transB": 1, "transBatchB": 1}),
    Case("SkipLayerNormalization", 17, (ROWS, normal(2, 5, 8), GAMMA, BETA, BIAS), {"epsilon": 1e-5}),
    Case("SkipLayerNormalization", 17, (ROWS, normal(1, 5, 8), GAMMA), {}),
    Case("SkipLayerNormalization", 17, (ROWS, normal(2, 5, 8), GAMMA, None, BIAS), outputs=4),
    Case("SimplifiedLayerNormalization", 17, (ROWS, GAMMA), {"axis": -1, "epsilon": 1e-3}),
    Case("SkipSimplifiedLayerNormalization", 17, (ROWS, normal(2, 5, 8), GAMMA, BIAS), outputs=4),
    Case("EmbedLayerNormalization", 17, (IDS, SEGMENTS, WORDS, PLACES, KINDS, GAMMA, BETA, MASK), outputs=3),
    Case("EmbedLayerNormalization", 17, (IDS, None, WORDS, PLACES, None, GAMMA, BETA), outputs=2),
    Case("EmbedLayerNormalization", 17, (IDS, SEGMENTS, WORDS, PLACES, KINDS, GAMMA, BETA, None, IDS % 9), outputs=2),
]  # fmt: skip

WEIGHTS, QKV = Const(normal(8, 12)), Const(normal(12))
NARROW = {"qkv_hidden_sizes": [8, 8, 4]}
PAST = normal(2, 2, 2, 3, 2)

CASES += [
    Case("Attention", 17, (ROWS, WEIGHTS, QKV), {"num_heads": 2}),
    Case("Attention", 17, (ROWS, Const(normal(8, 20)), Const(normal(20))), {"num_heads": 4, "scale": 0.3} | NARROW),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV, MASK), {"num_heads": 2, "mask_filter_value": -50.0}),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV, RNG.integers(0, 2, (2, 5, 5)).astype(np.int32)), {"num_heads": 1}),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV, np.array([3, 5], np.int32)), {"num_heads": 2}),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV, np.array([3, 5, 1, 0], np.int32)), {"num_heads": 2}),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV), {"num_heads": 2, "unidirectional": 1}),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV, np.ones((2, 8), np.int32), PAST),
         {"num_heads": 2, "unidirectional": 1}, outputs=2),
    Case("Attention", 17, (ROWS, WEIGHTS, QKV, MASK, None, normal(1, 2, 5, 5)), {"num_heads": 2}),
    Case("MultiHeadAttention", 17, (ROWS, normal(2, 5, 8), normal(2, 5, 8)), {"num_heads": 2}),
    Case("MultiHeadAttention", 17, (ROWS, normal(2, 3, 8), normal(2, 3, 12), Const(normal(28)), MASK[:, :3]),
         {"num_heads": 4, "scale": 0.7}),
    Case("MultiHeadAttention", 17, (ROWS, normal(2, 2, 3, 4), normal(2, 2, 3, 4)), {"num_heads": 2}),
    Case("MultiHeadAttention", 17, (ROWS, normal(2, 5, 8), normal(2, 5, 8), None, None, normal(1, 2, 5, 5)),
         {"num_heads": 2, "unidirectional": 1}),
    Case("MultiHeadAttention", 17, (ROWS, normal(2, 5, 8), normal(2, 5, 8), None, None, None, normal(2, 2, 3, 4),
                                    normal(2, 2, 3, 4)), {"num_heads": 2, "unidirectional": 1}, outputs=3),
]  # fmt: skip

ANGLES = tuple(Const(function(normal(16, 4))) for function in (np.cos, np.sin))
PLACE = np.array([3], np.int64)
LATER = [
    Case("RotaryEmbedding", 17, (normal(2, 5, 24), RNG.integers(0, 16, (2, 5)), *ANGLES)),
    Case("RotaryEmbedding", 17, (normal(2, 5, 24), PLACE, *ANGLES)),
    Case("RotaryEmbedding", 17, (normal(2, 3, 5, 8), PLACE, *ANGLES), {"interleaved": 1}),
    Case("RotaryEmbedding", 17, (normal(2, 5, 48), PLACE, *ANGLES), {"num_heads": 3, "rotary_embedding_dim": 8}),
    Case("Trilu", 17, (normal(4, 5),)),
    Case("Trilu", 17, (normal(2, 4, 5), Const(np.array(1, np.int64))), {"upper": 0}),
    Case("Pad", 17, (ROWS[0], Const(np.array([1, 0, 2, 1], np.int64)), floats(2.0)), {"mode": "constant"}),
    Case("GatherND", 17, (ROWS, np.array([[0, 4], [1, 0]], np.int64))),
    Case("Range", 17, (Const(np.float32(1)), Const(np.float32(5)))),
    Case("Range", 17, (Const(np.int32(1)), Const(np.int32(9)), Const(np.int32(3)))),
    Case("ExpandDims", 17, (ROWS, Const(np.array(1, np.int32)))),
]
"""Operators that ONNX has as well by now."""


def without_training_outputs(proto: onnx.ModelProto) -> None:
    """Leave the outputs of mean and deviation out, which only training has."""
    node = proto.graph.node[0]
    if len(node.output) == 4:
        node.output[1] = node.output[2] = ""
        kept = [value for value in proto.graph.output if value.name in node.output]
        del proto.graph.output[:]
        proto.graph.output.extend(kept)


@pytest.mark.parametrize("case", [*CASES, *LATER], ids=str)
def test_node_computes_what_onnxruntime_does(case: Case) -> None:
    proto, feeds = of_microsoft(case)
    without_training_outputs(proto)
    assert "OnnxSession" not in {definition.type for definition in from_model_proto(proto).net.op}
    for found, expected in zip(computed(proto, feeds), by_onnxruntime(proto, feeds), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if "Attention" in case.op], ids=str)
def test_attention_becomes_one_operator_whatever_its_masks(case: Case) -> None:
    proto, _ = of_microsoft(case)
    with dagexec.compile(proto) as executor:
        types = [definition.type for definition in executor.model.net.op]
    assert types.count("FusedAttention") == 1
    assert not {"Softmax", "BatchMatMul"}.intersection(types)


CACHE = normal(1, 2, 6, 16)
TOTAL = Const(np.array(7, np.int32))
BY_ADAPTER = [
    Case("GroupQueryAttention", 17, (normal(1, 1, 64), normal(1, 1, 32), normal(1, 1, 32), CACHE, CACHE,
                                     np.array([[6]], np.int32), TOTAL, Const(normal(16, 8)), Const(normal(16, 8))),
         {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 4}, outputs=3),
    Case("GroupQueryAttention", 17, (normal(1, 1, 128), None, None, CACHE, CACHE, np.array([[6]], np.int32), TOTAL),
         {"num_heads": 4, "kv_num_heads": 2}, outputs=3),
    Case("DecoderMaskedMultiHeadAttention", 17, (normal(1, 1, 16), normal(1, 1, 16), normal(1, 1, 16), None, None,
                                                 normal(1, 2, 6, 8), normal(1, 2, 6, 8), np.array([5], np.int32)),
         {"num_heads": 2, "past_present_share_buffer": 1}, outputs=3),
    Case("Inverse", 17, (normal(2, 3, 3),)),
    Case("GridSample", 17, (IMAGE, np.tanh(normal(2, 3, 4, 2)))),
    Case("CropAndResize", 17, (IMAGE, Const(np.float32([[0, 0, 0.5, 0.5], [0.1, 0.2, 0.9, 1]])),
                               Const(np.int32([0, 1])), Const(np.int32([3, 4])))),
    Case("MaxpoolWithMask", 17, (IMAGE, (IMAGE > 0).astype(np.int32)), {"kernel_shape": [2, 2]}),
    Case("CDist", 17, (normal(3, 4), normal(5, 4)), {"metric": "euclidean"}),
    Case("Unique", 17, (np.float32([2, 1, 1, 3]),), outputs=3),
]  # fmt: skip


@pytest.mark.parametrize("case", BY_ADAPTER, ids=str)
def test_what_has_no_operator_here_runs_in_a_session_of_onnxruntime(case: Case) -> None:
    proto, feeds = of_microsoft(case)
    for found, expected in zip(computed(proto, feeds), by_onnxruntime(proto, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_inputs_that_are_missing_or_too_many_are_named() -> None:
    for inputs, message in ((ROWS,), "input gamma is missing"), ((ROWS,) * 6, "it has 7 inputs; expected at most 5"):
        case = Case("SkipLayerNormalization", 17, (ROWS, *inputs))
        with pytest.raises(ModelFormatError, match=message):
            from_model_proto(of_microsoft(case)[0])


def test_what_only_training_needs_is_refused() -> None:
    proto, _ = of_microsoft(Case("SkipLayerNormalization", 17, (ROWS, ROWS, GAMMA, BETA), outputs=2))
    with pytest.raises(UnsupportedOperatorError, match="its outputs 1 and 2, for training, are not supported"):
        from_model_proto(proto, foreign=False)


def test_an_attribute_that_nothing_reads_is_refused() -> None:
    proto, _ = of_microsoft(Case("Gelu", 17, (ROWS,), {"approximate": "tanh"}))
    with pytest.raises(UnsupportedOperatorError, match="its attribute approximate = b'tanh' is not supported"):
        from_model_proto(proto, foreign=False)


def test_embeddings_and_attention_of_any_batch_and_length_agree_with_onnxruntime() -> None:
    proto, _ = of_microsoft(
        Case("EmbedLayerNormalization", 17, (IDS, SEGMENTS, WORDS, PLACES, KINDS, GAMMA, BETA, MASK), outputs=2)
    )
    attention = helper.make_node(
        "Attention", ["out0", "weights", "bias", "out1"], ["y"], domain="com.microsoft", num_heads=2
    )
    proto.graph.node.append(attention)
    for name, value in (("weights", WEIGHTS), ("bias", QKV)):
        proto.graph.initializer.append(numpy_helper.from_array(value.array, name))
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    for value in proto.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"size_{axis}"
    with dagexec.compile(proto) as executor:
        for batch, length in ((2, 5), (3, 4)):
            ids = RNG.integers(0, 11, (batch, length)).astype(np.int32)
            mask = (np.arange(length) < RNG.integers(1, length, (batch, 1))).astype(np.int32)
            feeds = {"in0": ids, "in1": ids % 2, "in7": mask}
            [expected] = by_onnxruntime(proto, feeds)
            np.testing.assert_allclose(executor.run(feeds)["y"], expected, rtol=2e-5, atol=2e-5)
