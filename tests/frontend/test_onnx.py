"""ONNX models as a whole: nine networks against onnxruntime, what the loader decides, and hostile files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.core import dtypes
from dagexec.core.model import InputInfo
from dagexec.errors import DagexecError, ModelFormatError, ShapeError, UnsupportedOperatorError
from dagexec.frontend.onnx import folding, from_model_proto, load_onnx
from tests.models import LIGHT_MODELS, he_normal_light_model, light_model_input, light_model_path

NETS = [("simple", 1), ("dag", 1), ("dag", 2), ("async_dag", 1), ("async_dag", 2)]


def tiny_model(nodes: list[onnx.NodeProto], outputs: list[str], opset: int = 13, **graph: object) -> onnx.ModelProto:
    """A model with float input x (1 x 2 x 4 x 4) and the given nodes."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])]
    returned = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    proto = helper.make_graph(nodes, "tiny", inputs, returned, **graph)  # type: ignore[arg-type]
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_light_model_agrees_with_onnxruntime_under_every_net(name: str) -> None:
    proto = he_normal_light_model(name)
    blob, image = light_model_input(name)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {blob: image})
    del session
    model = from_model_proto(proto)
    del proto
    assert list(model.inputs) == [blob]
    assert expected.std() > 0
    for net_type, workers in NETS:
        with dagexec.compile(model, net_type=net_type, num_workers=workers) as executor:
            [found] = executor.run({blob: image}).values()
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < 1e-4, f"{net_type} with {workers} workers is off by {error}"


def test_a_light_model_as_it_is_computes_its_weights_once_in_the_init_net() -> None:
    model = load_onnx(light_model_path("squeezenet"))
    assert model.init_net is not None
    assert {operator.type for operator in model.init_net.op} == {"ConstantFill"}
    assert "ConstantFill" not in {operator.type for operator in model.net.op}
    blob, image = light_model_input("squeezenet")
    expected = numpy_helper.to_array(
        onnx.load_tensor(str(light_model_path("squeezenet")).replace(".onnx", "_output_0.pb"))
    )
    with dagexec.compile(model) as executor:
        [found] = executor.run({blob: image}).values()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-4)


def test_nodes_over_constants_only_go_to_the_init_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_ELEMENTS", 1)
    scale = numpy_helper.from_array(np.arange(2, dtype=np.float32), "scale")
    nodes = [
        helper.make_node("Unsqueeze", ["scale"], ["wide"], axes=[1, 2], name="widen"),
        helper.make_node("Mul", ["x", "wide"], ["y"], name="apply"),
    ]
    model = from_model_proto(tiny_model(nodes, ["y"], opset=9, initializer=[scale]))
    assert model.init_net is not None
    assert [operator.name for operator in model.init_net.op] == ["widen"]
    assert [operator.name for operator in model.net.op] == ["apply"]
    assert list(model.net.external_input) == ["x", "wide"]
    assert list(model.init_net.external_input) == ["scale"]
    x = np.ones((1, 2, 4, 4), np.float32)
    with dagexec.compile(model) as executor:
        np.testing.assert_array_equal(executor.run({"x": x})["y"], x * np.array([0, 1]).reshape(2, 1, 1))


def test_a_constant_result_that_the_model_returns_stays_in_the_net() -> None:
    bias = numpy_helper.from_array(np.full(3, -2, np.float32), "bias")
    nodes = [helper.make_node("Abs", ["bias"], ["y"]), helper.make_node("Relu", ["x"], ["z"])]
    model = from_model_proto(tiny_model(nodes, ["y", "z"], initializer=[bias]))
    assert model.init_net is None
    with dagexec.compile(model) as executor:
        np.testing.assert_array_equal(executor.run({"x": np.zeros((1, 2, 4, 4), np.float32)})["y"], [2, 2, 2])


def test_parameters_nobody_reads_at_run_time_are_dropped() -> None:
    shape = numpy_helper.from_array(np.array([2, 16]), "shape")
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    model = from_model_proto(tiny_model([node], ["y"], initializer=[shape]))
    assert dict(model.parameters) == {}
    assert list(model.net.op[0].input) == ["x"]


def test_inputs_have_types_and_symbolic_sizes_and_initializers_are_no_inputs() -> None:
    weight = numpy_helper.from_array(np.ones(1, np.float32), "w")
    proto = tiny_model([helper.make_node("Mul", ["x", "w"], ["y"])], ["y"], initializer=[weight])
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    proto.graph.input[0].type.tensor_type.shape.dim[3].Clear()
    proto.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, None))
    model = from_model_proto(proto)
    assert model.inputs == {
        "x": InputInfo(dtypes.FLOAT32, (None, 2, 4, None)),
        "labels": InputInfo(dtypes.INT64, None),
    }


def test_all_unsupported_nodes_are_listed_in_one_error() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="fine"),
        helper.make_node("ImageDecoder", ["r"], ["c"], name="up"),
        helper.make_node("Fancy", ["c"], ["f"], name="own", domain="com.example"),
        helper.make_node("Resize", ["f", "", "s"], ["y"], name="smooth", mode="spline"),
    ]
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s")
    proto = tiny_model(nodes, ["y"], opset=17, initializer=[scales])
    proto.opset_import.append(helper.make_opsetid("com.example", 3))
    with pytest.raises(UnsupportedOperatorError) as caught:
        from_model_proto(proto, foreign=False)
    message = str(caught.value)
    assert message.startswith("3 node(s) cannot be run")
    assert "node 'up': ImageDecoder (domain ai.onnx, opset 17)" in message
    assert "node 'own': Fancy (domain com.example, opset 3)" in message
    assert "node 'smooth': Resize (domain ai.onnx, opset 17): mode 'spline' is not supported" in message
    assert "fine" not in message
    help_lines = message.partition("what may help:\n")[2].splitlines()
    assert [line.split()[0] for line in help_lines] == ["foreign=True", "operators", "an"]


def test_a_refusal_for_want_of_sizes_names_inputs_whose_sizes_are_open() -> None:
    layer = helper.make_node("Conv", ["x", "w"], ["y"], name="layer")
    proto = tiny_model([layer], ["y"])
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedOperatorError, match=r"shapes=\) fixes sizes that .* open: 'w' float32\[...\]\n"):
        from_model_proto(proto, foreign=False)
    proto.graph.node[0].op_type = "Fancy"
    with pytest.raises(UnsupportedOperatorError) as caught:
        from_model_proto(proto, foreign=False)
    assert "shapes=" not in str(caught.value)


def test_a_refusal_for_element_types_names_the_input_and_not_the_operator_that_it_would_become() -> None:
    proto = tiny_model([helper.make_node("BatchNormalization", ["x", *"ssss"], ["y"])], ["y"], opset=9)
    del proto.graph.input[:]
    proto.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.INT32, sizes) for name, sizes in (("x", [None, 2]), ("s", [2]))
    )
    with pytest.raises(UnsupportedOperatorError, match=r"opset 9\): input 'x' must be one of .*, found int32\n"):
        from_model_proto(proto, foreign=False)


GEMM = [
    helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "w", "b"], ["g"]),
    helper.make_node("Relu", ["g"], ["y"]),
]  # fmt: skip


@pytest.mark.parametrize("net_type", ["simple", "dag"])
def test_shapes_that_do_not_fit_are_told_in_the_words_of_the_model(net_type: str) -> None:
    """The net that runs has an FC with transposed weights, and a Relu inside."""
    arrays = {"w": np.ones((32, 5), np.float32), "b": np.ones(5, np.float32)}
    proto = tiny_model(
        GEMM, ["y"], initializer=[numpy_helper.from_array(array, name) for name, array in arrays.items()]
    )
    proto.graph.input[0].type.tensor_type.shape.dim[3].Clear()
    message = r"^Gemm 'g' \(operator 1\) of net 'tiny': a 1 x 40 matrix cannot be multiplied by a 32 x 5 one "
    message += r"\(inputs: f: float32\[1, 40\], w: float32\[32, 5\], b: float32\[5\]\)$"
    with dagexec.compile(proto, net_type=net_type) as executor:
        executor.run({"x": np.ones((1, 2, 4, 4), np.float32)})
        for run in (executor.run, lambda feeds: asyncio.run(executor.run_async(feeds))):
            with pytest.raises(ShapeError, match=message):
                run({"x": np.ones((1, 2, 4, 5), np.float32)})


def test_nodes_that_are_refused_alike_are_one_line_with_their_number() -> None:
    chain = [helper.make_node("Fancy", [f"t{i}" if i else "x"], [f"t{i + 1}"], name=f"own{i}") for i in range(6)]
    chain += [helper.make_node("Fancier", ["t6"], ["y"], name="last")]
    with pytest.raises(UnsupportedOperatorError) as caught:
        from_model_proto(tiny_model(chain, ["y"]), foreign=False)
    first, second, third, *_ = str(caught.value).splitlines()
    assert first == "7 node(s) cannot be run:"
    assert second.startswith("  6 nodes 'own0', 'own1', 'own2', 'own3' and 2 more: Fancy (domain ai.onnx, opset")
    assert third.startswith("  node 'last': Fancier (domain ai.onnx, opset")


def test_an_operator_set_from_the_future_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="operator set 999 is newer"):
        from_model_proto(tiny_model([helper.make_node("Relu", ["x"], ["y"])], ["y"], opset=999))


@pytest.mark.parametrize("what", ["RegexFullMatch", "ImageDecoder"])
def test_an_unknown_operator_names_the_node_by_its_output_when_it_has_no_name(what: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=f"node 'y': {what}"):
        from_model_proto(tiny_model([helper.make_node(what, ["x"], ["y"])], ["y"]), foreign=False)


MALFORMED = {
    "a tensor nobody provides": (
        lambda: tiny_model([helper.make_node("Relu", ["ghost"], ["y"])], ["y"]),
        "reads 'ghost', which nothing",
    ),
    "an output nobody provides": (
        lambda: tiny_model([helper.make_node("Relu", ["x"], ["y"])], ["z"]),
        "returns 'z', which nothing",
    ),
    "two writers of a tensor": (
        lambda: tiny_model([helper.make_node("Relu", ["x"], ["y"])] * 2, ["y"]),
        "'y' has two origins",
    ),
    "a writer of an input": (
        lambda: tiny_model([helper.make_node("Relu", ["x"], ["x"])], ["x"]),
        "'x' has two origins",
    ),
    "an unknown attribute": (
        lambda: tiny_model([helper.make_node("Relu", ["x"], ["y"], slope=1.0)], ["y"]),
        "slope",
    ),
    "an attribute of another type": (
        lambda: tiny_model([helper.make_node("Flatten", ["x"], ["y"], axis=1.5)], ["y"]),
        "axis",
    ),
    "too many inputs": (
        lambda: tiny_model([helper.make_node("Relu", ["x", "x"], ["y"])], ["y"]),
        "Relu",
    ),
    "no graph": (onnx.ModelProto, "no graph"),
    "axes that are floats": (
        lambda: tiny_model(
            [helper.make_node("Squeeze", ["x", "axes"], ["y"])], ["y"],
            initializer=[numpy_helper.from_array(np.ones(1, np.float32), "axes")],
        ),
        "must be integers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_model_is_refused(case: str) -> None:
    build, message = MALFORMED[case]
    with pytest.raises(ModelFormatError, match=message):
        from_model_proto(build())


def test_a_missing_file_and_a_file_of_random_bytes_are_refused_with_their_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"none\.onnx: cannot be read"):
        load_onnx(tmp_path / "none.onnx")
    path = tmp_path / "noise.onnx"
    path.write_bytes(np.random.default_rng(0).bytes(1000))
    with pytest.raises(ModelFormatError, match=r"noise\.onnx"):
        load_onnx(path)
    path.write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"noise\.onnx"):
        load_onnx(path)


def _prefixes(content: bytes) -> Iterator[bytes]:
    for part in range(1, 20):
        yield content[: len(content) * part // 20]


def test_a_truncated_model_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    content = light_model_path("squeezenet").read_bytes()
    path = tmp_path / "cut.onnx"
    for prefix in _prefixes(content):
        path.write_bytes(prefix)
        with pytest.raises(ModelFormatError, match=r"cut\.onnx"):
            load_onnx(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5))
def test_flipped_bytes_are_loaded_or_refused_but_never_crash(changes: list[tuple[float, int]]) -> None:
    content = bytearray(_small_convolution().SerializeToString())
    for place, value in changes:
        content[int(place * len(content))] = value
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(bytes(content))
    except DecodeError:
        return
    with contextlib.suppress(DagexecError):
        from_model_proto(proto)


def _small_convolution() -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), "w")
    shape = numpy_helper.from_array(np.array([1, -1]), "shape")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["p", "shape"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], axis=1),
    ]
    return tiny_model(nodes, ["y"], initializer=[weight, shape])
