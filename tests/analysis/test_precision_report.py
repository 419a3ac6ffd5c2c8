"""Models in bfloat16 and int8 from end to end: compile, reports, the command, and QDQ models of onnxruntime."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.analysis.comparison import random_feeds
from dagexec.analysis.precision_report import _output_error, precision_report
from dagexec.errors import ArgumentError, FeedError, SchemaError
from dagexec.options import CompileOptions
from dagexec.zoo import build
from tests.command_line import Cli
from tests.compiler.passes.models import model_of, normal, op

Array = npt.NDArray[Any]
F32 = np.float32


def report(dtype: Any, **options: Any) -> dagexec.PrecisionReport:
    samples = [random_feeds(build("lenet"), seed=100 + number) for number in range(3)] if dtype == "int8" else ()
    return precision_report(
        "zoo:lenet", dtype, 4, calibration=samples, repeat=3, options=CompileOptions(tuning_seconds=0), **options
    )


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("int8", 0.1)])
def test_the_report_tells_what_the_outputs_lose(dtype: Any, most: float) -> None:
    found = report(dtype, per_layer=True)
    [output] = found.outputs
    assert (found.model, found.dtype, found.inputs, output.name) == ("lenet", dtype, 4, "softmax")
    assert 0 < output.rms < most
    assert 0 < output.largest < 2 * most
    assert found.largest == output.largest
    assert 1 - most < output.cosine < 1
    assert output.top_1 == 1.0
    assert found.speed_up == pytest.approx(found.float32_ms / found.dtype_ms)
    assert [layer.error for layer in found.layers] == sorted((layer.error for layer in found.layers), reverse=True)
    assert {layer.output for layer in found.layers} == {"conv1", "conv2", "fc3/1", "pred"}
    json.dumps(found.as_dict())


def test_errors_are_those_of_the_formulas() -> None:
    random = np.random.default_rng(1)
    wanted = [{"y": random.standard_normal((3, 4)).astype(F32)} for _ in range(2)]
    found = [{"y": one["y"] + F32(0.3) * random.standard_normal((3, 4)).astype(F32)} for one in wanted]
    a, b = (np.concatenate([one["y"].ravel() for one in runs]).astype(float) for runs in (wanted, found))
    error = _output_error("y", wanted, found)
    assert error.largest == pytest.approx(np.abs(b - a).max() / np.abs(a).max())
    assert error.rms == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    assert error.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    rows, other_rows = (np.concatenate([one["y"] for one in runs]) for runs in (wanted, found))
    assert error.top_1 == pytest.approx(np.mean(rows.argmax(1) == other_rows.argmax(1)))
    same_error = _output_error("y", wanted, wanted)
    assert (same_error.largest, same_error.rms, same_error.top_1) == (0, 0, 1)
    zeros = [{"y": np.zeros(1, F32)}]
    assert _output_error("y", zeros, zeros).cosine == 1
    assert _output_error("y", zeros, zeros).top_1 is None
    assert _output_error("y", zeros, [{"y": np.ones(1, F32)}]).largest == float("inf")


def test_what_the_report_cannot_do_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="bfloat16 or int8, not 'float16'"):
        precision_report("zoo:lenet", "float16")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at least 1 input and 1 run are needed; found 0 and 15"):
        precision_report("zoo:lenet", "bfloat16", [])
    with pytest.raises(FeedError, match="int8 needs sample inputs to calibrate with"):
        precision_report("zoo:lenet", "int8", 1)


def test_compile_names_what_is_missing_or_wrong_in_the_samples() -> None:
    with pytest.raises(FeedError, match="int8 needs sample inputs to calibrate with"):
        dagexec.compile("zoo:lenet", dtype="int8")
    with pytest.raises(FeedError, match=r"input 'data' must have shape \('any', 1, 28, 28\), found \(1, 28, 28\)"):
        dagexec.compile("zoo:lenet", dtype="int8", calibration=[{"data": np.zeros((1, 28, 28), F32)}])
    with pytest.raises(FeedError, match="is not finite in a calibration run"):
        dagexec.compile("zoo:lenet", dtype="int8", calibration=[{"data": np.full((1, 1, 28, 28), np.nan, F32)}])
    with pytest.raises(ValueError, match="dtype"):
        dagexec.compile("zoo:lenet", dtype="int4")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_without_onednn_numpy_computes_the_same_model(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [random_feeds(build("lenet"), seed=number) for number in range(3)]
    feeds = random_feeds(build("lenet"), seed=9)
    results = []
    for absent in (False, True):
        if absent:
            for module in (
                "dagexec.ops.engines.onednn.binding",
                "dagexec.compiler.passes.engine",
                "dagexec.compiler.compilation",
            ):
                monkeypatch.setattr(f"{module}.engine_library", lambda: None)
        with dagexec.compile("zoo:lenet", dtype=dtype, calibration=samples if dtype == "int8" else None) as executor:
            results.append(executor.run(feeds)["softmax"])
    assert np.linalg.norm(results[0] - results[1]) < 0.02 * np.linalg.norm(results[1])


def residual_net() -> onnx.ModelProto:
    """Convolutions, a residual sum, pooling, a depthwise and a fully connected layer."""
    random = np.random.default_rng(5)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        spread = np.sqrt(2 / max(1, np.prod(shape[1:])))
        return numpy_helper.from_array((random.standard_normal(shape) * spread).astype(F32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2", "b2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "p1"], ["s"]),
        helper.make_node("Relu", ["s"], ["r2"]),
        helper.make_node("Conv", ["r2", "w3"], ["c3"], group=16, pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c3"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"], transB=1),
    ]
    weights = [
        weight("w1", 16, 3, 3, 3), weight("b1", 16), weight("w2", 16, 16, 3, 3), weight("b2", 16),
        weight("w3", 16, 1, 3, 3), weight("w4", 10, 16), weight("b4", 10),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])],
        initializer=weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def qdq_model(tmp_path: Path, per_channel: bool, weights: Any = None) -> Path:
    """The residual net in QDQ form, made by onnxruntime; int8 weights of 7 bits, as it saturates sums without VNNI."""
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.samples = [np.random.default_rng(n).standard_normal((2, 3, 12, 12)).astype(F32) for n in range(4)]

        def get_next(self) -> dict[str, Array] | None:
            return {"x": self.samples.pop()} if self.samples else None

    plain, quantized = tmp_path / "plain.onnx", tmp_path / "qdq.onnx"
    onnx.save(residual_net(), plain)
    logging.disable()
    try:
        quantization.quantize_static(
            plain, quantized, Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=per_channel,
            activation_type=quantization.QuantType.QUInt8, weight_type=weights or quantization.QuantType.QInt8,
            reduce_range=weights is None,
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return quantized


def onnxruntime_result(path: Path, x: Array, *, exact: bool) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("per_channel", [False, True])
def test_qdq_models_agree_with_onnxruntime(tmp_path: Path, per_channel: bool) -> None:
    path = qdq_model(tmp_path, per_channel)
    x = np.random.default_rng(77).standard_normal((2, 3, 12, 12)).astype(F32)
    simulated, fused = (onnxruntime_result(path, x, exact=exact) for exact in (True, False))
    plain = onnxruntime_result(tmp_path / "plain.onnx", x, exact=True)
    lost = np.linalg.norm(simulated - plain)
    for dtype in ("float32", "int8"):
        with dagexec.compile(path, dtype=dtype, tuning_seconds=0) as executor:
            found = executor.run({"x": x})["y"]
            types = [definition.type for definition in executor.net().plan.graph.operators]
        # a value that lies halfway between two integers, within rounding, may become either, and so on through the net
        assert np.linalg.norm(found - simulated) < 0.5 * lost
        assert np.linalg.norm(found - fused) < 0.5 * lost
        if dtype == "int8":
            assert types.count("QuantConv") == 3
            assert types.count("QuantFC") == 1
            assert not {"Conv", "FusedConv", "FC", "Gemm"} & set(types)


def test_qdq_models_with_unsigned_weights_keep_to_floats_where_int8_does_not_hold_them(tmp_path: Path) -> None:
    path = qdq_model(tmp_path, False, onnxruntime.quantization.QuantType.QUInt8)
    x = np.random.default_rng(78).standard_normal((2, 3, 12, 12)).astype(F32)
    simulated = onnxruntime_result(path, x, exact=True)
    with dagexec.compile(path, dtype="int8", tuning_seconds=0) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], simulated, atol=0.05 * np.abs(simulated).max())


@pytest.mark.slow
def test_a_calibrated_model_takes_any_batch_size() -> None:
    samples = [{"x": np.random.default_rng(n).standard_normal((2, 3, 12, 12)).astype(F32)} for n in range(4)]
    with dagexec.compile(residual_net(), dtype="int8", calibration=samples, tuning_seconds=0) as executor:
        both = executor.run(samples[0])["y"]
        for row in range(2):
            one = executor.run({"x": samples[0]["x"][row : row + 1]})["y"]
            np.testing.assert_allclose(one[0], both[row], atol=1e-5)


def test_scale_and_zero_point_errors_reach_the_caller() -> None:
    convolution = op("QuantConv", ["x", "w", "s"], ["y"], kernel=1, x_scale=0.5)
    quantization = op("QuantizeLinear", ["x", "k"], ["q"])
    weights = {"w": np.ones((2, 4, 1, 1), np.int8), "s": np.array([1, -1], F32), "k": np.array(np.nan, F32)}
    convolution.input[0] = "q"
    model = model_of([quantization, convolution], **weights)
    with (
        dagexec.compile(model, optimize=False) as executor,
        pytest.raises(ArgumentError, match="must be finite and above 0"),
    ):
        executor.run({"x": normal(2, 4, 6, 6)})


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(cli: Cli) -> None:
    options = ("--samples", 2, "--repeat", 2)
    status, out, _ = cli("compare", "zoo:lenet", "--dtype", "int8", "--layers", *options)
    assert status == 0
    assert "int8 against float32, 2 input(s)" in out
    assert "softmax" in out
    assert "Conv 'conv1'" in out
    assert "times as fast" in out
    status, out, _ = cli("compare", "zoo:lenet", "--dtype", "bfloat16", "--json", *options)
    found = json.loads(out)
    assert status == 0
    assert found["dtype"] == "bfloat16"
    assert found["outputs"][0]["top_1"] == 1.0


@pytest.mark.slow
def test_the_command_compares_on_the_inputs_of_a_file(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", data=np.ones((1, 1, 28, 28), F32))
    arguments = ("compare", "zoo:lenet", "--dtype", "int8", "--input", tmp_path / "in.npz", "--repeat", 1, "--json")
    status, out, _ = cli(*arguments)
    assert (status, json.loads(out)["inputs"]) == (0, 1)


def test_the_command_refuses_other_types(cli: Cli) -> None:
    status, _, error = cli("compare", "zoo:lenet", "--dtype", "int4")
    assert status != 0
    assert "expected bfloat16 or int8" in error
    assert SchemaError.__name__ in error
