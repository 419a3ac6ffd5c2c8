"""Normalizations, Dropout and random numbers of ONNX: against onnxruntime where it has them, else onnx's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import dagexec
from dagexec.errors import DagexecError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(5)
IMAGE = RNG.standard_normal((2, 6, 4, 3)).astype(np.float32)
CHANNELS = RNG.uniform(0.5, 1.5, (4, 6)).astype(np.float32)


def model_of(op_type: str, opset: int, inputs: list[Any], outputs: int = 1, **attributes: Any) -> onnx.ModelProto:
    """A node whose inputs are fed as x0, x1, ..."""
    names = [f"x{index}" for index in range(len(inputs))]
    node = helper.make_node(op_type, names, [f"y{index}" for index in range(outputs)], **attributes)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(name) for name in node.output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def computed(model: onnx.ModelProto, inputs: list[Any]) -> list[np.ndarray]:
    with dagexec.compile(model) as executor:
        found = executor.run({f"x{index}": array for index, array in enumerate(inputs)})
    return [found[value.name] for value in model.graph.output]


CASES: list[tuple[str, int, list[Any], int, dict[str, Any]]] = [
    ("GroupNormalization", 21, [IMAGE, *CHANNELS[:2]], 1, {"num_groups": 2, "epsilon": 0.1}),
    ("RMSNormalization", 23, [IMAGE, IMAGE[0, 0, 0]], 1, {}),
    ("RMSNormalization", 23, [IMAGE, IMAGE[0]], 1, {"axis": 1, "epsilon": 0.5}),
    ("RMSNormalization", 23, [IMAGE, IMAGE[:, :1, :, :1]], 1, {"axis": -2}),
    ("RMSNormalization", 23, [IMAGE[:, :0], IMAGE[0, 0, 0]], 1, {}),
    ("LayerNormalization", 17, [IMAGE, IMAGE[0, 0, 0], IMAGE[1, 0, 0]], 3, {}),
    ("LayerNormalization", 17, [IMAGE, IMAGE[0]], 3, {"axis": 1}),
    ("LayerNormalization", 17, [IMAGE, IMAGE[0, 0, :, :1], IMAGE[0, 0, 0]], 2, {"axis": -2}),
    ("MeanVarianceNormalization", 13, [IMAGE], 1, {}),
    ("MeanVarianceNormalization", 13, [IMAGE[0]], 1, {"axes": [1]}),
    ("InstanceNormalization", 6, [IMAGE[:, :, :, 0], *CHANNELS[:2]], 1, {}),
    ("InstanceNormalization", 22, [IMAGE[..., None], *CHANNELS[:2]], 1, {"epsilon": 0.1}),
    ("LpNormalization", 1, [IMAGE], 1, {"axis": 1, "p": 1}),
    ("LpNormalization", 22, [np.abs(IMAGE) * (IMAGE > 0)], 1, {}),
    ("BatchNormalization", 15, [IMAGE, *CHANNELS], 3, {"training_mode": 1, "momentum": 0.7}),
    ("Dropout", 13, [IMAGE, np.float32(0.3), np.bool_(False)], 2, {}),
    ("Dropout", 22, [IMAGE, np.float32(0), np.bool_(True)], 2, {"seed": 1}),
]
REFERENCE_ONLY = ("RMSNormalization", "GroupNormalization", "BatchNormalization")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[4]}")
def test_a_layer_computes_what_onnx_says(case: tuple[str, int, list[Any], int, dict[str, Any]]) -> None:
    op_type, opset, arrays, outputs, attributes = case
    inputs = [np.asarray(array) for array in arrays]
    model = model_of(op_type, opset, inputs, outputs, **attributes)
    feeds = {f"x{index}": array for index, array in enumerate(inputs)}
    if op_type in REFERENCE_ONLY:
        expected = ReferenceEvaluator(model).run(None, feeds)
    else:
        expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for ours, theirs in zip(computed(model, inputs), expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rms_norm_of_half_floats_sums_in_float32() -> None:
    x = np.full((2, 5000), 20, np.float16)
    (found,) = run_operator("RootMeanSquareNorm", [x, np.ones(5000, np.float16)])
    np.testing.assert_array_equal(found, np.ones_like(x))
    with pytest.raises(ShapeError, match="the scale must broadcast to X"):
        run_operator("RootMeanSquareNorm", [x, np.ones(7, np.float16)])


def test_dropout_in_training_drops_the_part_that_it_is_told() -> None:
    x = np.ones((200, 100), np.float32)
    model = model_of("Dropout", 13, [x, np.array(0.25, np.float32), np.array(True)], 2, seed=4)
    y, mask = computed(model, [x, np.array(0.25, np.float32), np.array(True)])
    assert 0.73 < mask.mean() < 0.77
    np.testing.assert_allclose(y, mask / 0.75, rtol=1e-6)
    again, _ = computed(model, [x, np.array(0.25, np.float32), np.array(True)])
    np.testing.assert_array_equal(y, again)
    with pytest.raises(DagexecError, match=r"the ratio must be in \[0, 1\), found 1"):
        computed(model, [x, np.array(1, np.float32), np.array(True)])


DRAWS: list[tuple[str, list[Any], dict[str, Any], tuple[float, float], type]] = [
    ("RandomNormal", [], {"shape": [100, 200], "mean": 2.0, "scale": 3.0}, (2, 3), np.float32),
    ("RandomUniform", [], {"shape": [100, 200], "high": 12.0, "dtype": TensorProto.DOUBLE}, (6, 12**0.5), np.float64),
    ("RandomNormalLike", [np.zeros((100, 200))], {}, (0, 1), np.float64),
    ("RandomUniformLike", [np.zeros((100, 200))], {"dtype": TensorProto.FLOAT16}, (0.5, 12**-0.5), np.float16),
    ("Bernoulli", [np.full((100, 200), 0.2)], {"dtype": TensorProto.INT32}, (0.2, 0.4), np.int32),
    (
        "Multinomial",
        [np.log([[1.0, 2, 1]] * 100)],
        {"sample_size": 200, "dtype": TensorProto.INT64},
        (1, 0.5**0.5),
        np.int64,
    ),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "moments", "dtype"), DRAWS)
def test_random_numbers_have_the_distribution_and_follow_the_seed(
    op_type: str, inputs: list[Any], attributes: dict[str, Any], moments: tuple[float, float], dtype: type
) -> None:
    model = model_of(op_type, 22, inputs, **attributes, seed=3.0)
    (first,), (again,) = computed(model, inputs), computed(model, inputs)
    (other,) = computed(model_of(op_type, 22, inputs, **attributes), inputs)
    assert first.dtype == dtype
    assert first.shape == (100, 200)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_allclose([first.mean(dtype=float), first.std(dtype=float)], moments, rtol=0.03, atol=0.03)


def test_a_run_draws_anew() -> None:
    model = model_of("RandomUniform", 22, [], shape=[50])
    with dagexec.compile(model) as executor:
        assert (executor.run({})["y0"] != executor.run({})["y0"]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"sample_size": -1}, "found -1 of int32"), ({"dtype": TensorProto.FLOAT}, "found 1 of float32")],
)
def test_samples_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=f"Multinomial 'y0'.*{message}"):
        run_operator("Multinomial", [np.zeros((2, 3), np.float32)], **arguments)
