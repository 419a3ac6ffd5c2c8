"""Models as ONNX: what is exported passes the onnx package's checker and gives the same outputs in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec import NetDef, op, zoo
from dagexec.analysis.comparison import random_feeds
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import onnx_operators
from dagexec.errors import DagexecError, ModelFormatError, UnsupportedOperatorError
from dagexec.export import save_onnx, to_onnx
from tests.frontend.suite.cases import Case, all_cases, require_similar

LARGE = ("vgg19", "alexnet")  # the operators of the others, in half a gigabyte
RNG = np.random.default_rng(5)


def in_onnxruntime(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    types = {"tensor(double)": np.float64, "tensor(float)": np.float32, "tensor(float16)": np.float16}
    wanted = {info.name: types.get(info.type) for info in session.get_inputs()}
    given = {name: np.asarray(value, wanted[name]) for name, value in feeds.items() if name in wanted}
    found: list[Any] = session.run(None, given)
    return found


def agrees(model: Model, feeds: dict[str, Any], **settings: Any) -> onnx.ModelProto:
    proto = to_onnx(model, **settings)
    with dagexec.compile(model, optimize=False) as executor:
        expected = executor.run(feeds)
    for array, found in zip(expected.values(), in_onnxruntime(proto, feeds), strict=True):
        np.testing.assert_allclose(found, array, rtol=1e-4, atol=1e-6)
    return proto


def model_of(*operators: OperatorDef, shape: tuple[int | None, ...] | None = (2, 3, 6, 8), **parameters: Any) -> Model:
    net = NetDef(name="net", op=operators, external_input=["x", *parameters], external_output=["y"])
    return Model("net", net, None, parameters, {"x": InputInfo(FLOAT32, shape)}, ("y",))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "lenet" else [pytest.mark.slow])
        for name in zoo.names()
        if name not in LARGE
    ],
)
def test_networks_of_the_zoo(name: str) -> None:
    model = zoo.build(name)
    agrees(model, random_feeds(model))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(32))
def test_what_the_suite_of_onnx_loads_as_comes_out_the_same(part: int) -> None:
    """A case is loaded, exported and run by onnxruntime; it must give what the suite expects of the case."""
    cases = [case for case in all_cases() if case.is_ordinary()][part::32]
    outcomes = [came_to(case) for case in cases]
    assert [outcome for outcome in outcomes if outcome not in ("same", "not loaded", "refused", "no kernel")] == []
    assert outcomes.count("same") > 0.3 * len(cases)


def came_to(case: Case) -> str:
    try:
        proto = to_onnx(dagexec.load_model(case.model))
    except UnsupportedOperatorError:
        return "refused"
    except DagexecError:
        return "not loaded"
    names = [value.name for value in case.model.graph.input]
    for inputs, expected in case.data_sets():
        try:
            found = in_onnxruntime(proto, dict(zip(names, inputs, strict=False)))
            require_similar(expected, found, *case.tolerances)
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
            return "no kernel"  # onnxruntime has none for the type
        except Exception as error:
            return f"{case.name}: {error}"
    return "same"


IMAGE = RNG.standard_normal((2, 3, 6, 8)).astype(np.float32)
LAST = np.ascontiguousarray(IMAGE.transpose(0, 2, 3, 1))
FILTER = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)


@pytest.mark.parametrize("legacy_pad", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_pooling_with_pads_of_every_kind(kind: str, legacy_pad: int) -> None:
    pads: dict[str, Any] = {"pad": 1} if legacy_pad in (0, 3) else {}
    model = model_of(op(kind, ["x"], ["y"], arg={"kernel": 3, "stride": 2, "legacy_pad": legacy_pad, **pads}))
    if kind == "AveragePool" and legacy_pad == 3:
        with pytest.raises(UnsupportedOperatorError, match="averages of windows that Caffe pads"):
            to_onnx(model)
        return
    agrees(model, {"x": IMAGE})


def test_images_with_channels_last_are_transposed() -> None:
    nhwc = {"order": "NHWC"}
    operators = (
        op("Conv", ["x", "w"], ["c"], arg={"kernel": 3, **nhwc}),
        op("PRelu", ["c", "s"], ["p"], arg=nhwc),
        op("MaxPool", ["p"], ["y"], arg={"kernel": 2, **nhwc}),
    )
    weights = np.ascontiguousarray(FILTER.transpose(0, 2, 3, 1))
    agrees(model_of(*operators, shape=LAST.shape, w=weights, s=np.float32([0.1, 0.2, 0.3, 0.4])), {"x": LAST})


def test_a_blob_that_is_written_again_has_a_name_for_each_value() -> None:
    operators = (op("Relu", ["x"], ["x"]), op("Exp", ["x"], ["y"]), op("Add", ["y", "x"], ["y"]))
    proto = agrees(model_of(*operators), {"x": IMAGE})
    assert [list(node.output) for node in proto.graph.node] == [["x_1"], ["y_1"], ["y"]]


def test_parameters_that_an_init_net_computes_are_written() -> None:
    fill = NetDef(name="init", op=[op("ConstantFill", [], ["w"], arg={"shape": [3], "value": 2.0})])
    net = NetDef(name="net", op=[op("Mul", ["x", "w"], ["y"])], external_input=["x", "w"], external_output=["y"])
    model = Model("net", net, fill, {}, {"x": InputInfo(FLOAT32, (3,))}, ("y",))
    proto = agrees(model, {"x": np.float32([1, 2, 3])})
    assert [tensor.name for tensor in proto.graph.initializer] == ["w"]


def test_axes_that_are_open_stay_open() -> None:
    w, b = FILTER, np.zeros(4, np.float32)
    convolution = op("Conv", ["x", "w", "b"], ["c"], arg={"kernel": 3, "pad": 1})
    model = model_of(convolution, op("Softmax", ["c"], ["y"]), shape=(None, 3, None, None), w=w, b=b)
    proto = agrees(model, {"x": IMAGE})
    for shape in ((1, 3, 5, 5), (4, 3, 9, 7)):
        image = RNG.standard_normal(shape).astype(np.float32)
        with dagexec.compile(model, optimize=False) as executor:
            np.testing.assert_allclose(
                in_onnxruntime(proto, {"x": image})[0], executor.run({"x": image})["y"], rtol=1e-4
            )


def test_inputs_without_a_shape_are_given_one() -> None:
    model = model_of(op("Tile", ["x"], ["y"], arg={"tiles": 2, "axis": 1}), shape=None)
    with pytest.raises(UnsupportedOperatorError, match="give shapes= for the inputs"):
        to_onnx(model)
    agrees(model, {"x": IMAGE}, shapes={"x": (None, 3, 6, 8)})
    with pytest.raises(ModelFormatError, match=r"'z' is no input; expected one of \['x'\]"):
        to_onnx(model, shapes={"z": (1,)})


def test_all_that_has_no_counterpart_is_named_at_once() -> None:
    dropped = op("Dropout", ["x"], ["d"], name="drop", arg={"ratio": 0.3})
    model = model_of(dropped, op("NormalizeL1", ["d"], ["e"]), op("Copy", ["e"], ["y"]))
    with pytest.raises(UnsupportedOperatorError) as error:
        to_onnx(model)
    assert "2 operator(s)" in str(error.value)
    assert "'drop': Dropout: only inference" in str(error.value)
    assert "'e': NormalizeL1: no ONNX operator" in str(error.value)


def test_an_argument_without_a_counterpart_is_refused() -> None:
    cut = op("Slice", ["x"], ["y"], arg={"starts": [0], "ends": [1], "axes": [0]})
    agrees(model_of(cut), {"x": IMAGE})
    shared = op("Split", ["x"], ["y", "z", "w"], arg={"axis": 1, "add_axis": 1})
    with pytest.raises(UnsupportedOperatorError, match="Split: add_axis has no counterpart"):
        to_onnx(model_of(shared))
    transposed = op("MatMul", ["x", "x"], ["y"], arg={"axis_a": 2, "trans_b": 1, "axis_b": 2})
    with pytest.raises(UnsupportedOperatorError, match="only the product of two matrices"):
        to_onnx(model_of(transposed))


def test_a_file_is_what_the_checker_accepts(tmp_path: Path) -> None:
    save_onnx(model_of(op("Relu", ["x"], ["y"])), tmp_path / "relu.onnx")
    onnx.checker.check_model(tmp_path / "relu.onnx", full_check=True)
    with dagexec.compile(tmp_path / "relu.onnx") as executor:
        np.testing.assert_array_equal(executor.run({"x": IMAGE})["y"], np.maximum(IMAGE, 0))


def test_large_parameters_lie_in_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.export.onnx_model._MOST_IN_ONE_FILE", 10)
    weights = RNG.standard_normal((8, 4000)).astype(np.float32)
    save_onnx(model_of(op("MatMul", ["x", "w"], ["y"]), shape=(2, 8), w=weights), tmp_path / "product.onnx")
    assert (tmp_path / "product.onnx.data").stat().st_size >= weights.nbytes
    x = np.ones((2, 8), np.float32)
    with dagexec.compile(tmp_path / "product.onnx") as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], x @ weights, rtol=1e-4, atol=1e-5)


DECLARED = {schema.type: schema for schema, name in onnx_operators().values() if name.attributes and schema.formula}


@pytest.mark.parametrize("kind", sorted(DECLARED))
def test_defaults_of_arguments_are_those_of_attributes(kind: str) -> None:
    """An operator without arguments is exported without attributes, so both defaults must be the same."""
    inputs = ["x", "z"][: DECLARED[kind].inputs[0]]
    model = model_of(op(kind, inputs, ["y"]), shape=IMAGE.shape, z=np.abs(IMAGE) + 1)
    agrees(model, {"x": IMAGE})


@pytest.mark.parametrize(
    ("kind", "arguments", "parameters"),
    [
        ("TopK", {"k": 2, "axis": 1, "largest": 0}, {}),
        ("TopK", {}, {"k": np.array([3])}),
        ("ArgMax", {"last": 1}, {}),
        ("CumSum", {"axis": -2, "reverse": 1}, {}),
        ("CumSum", {"exclusive": 1}, {"axis": np.array(1)}),
        ("Hardmax", {"axis": 2}, {}),
        ("ReduceLogSumExp", {"axes": [1, -1], "keepdims": 0}, {}),
        ("GatherElements", {"axis": 1}, {"indices": np.array([[[[-1, 2]]]])}),
        ("ScatterND", {"reduction": "add"}, {"indices": np.array([[1, -1]]), "updates": IMAGE[0, :1]}),
        ("Einsum", {"equation": "abcd,d->ac"}, {"v": IMAGE[0, 0, 0]}),
    ],
)
def test_operators_whose_arguments_are_inputs_of_the_node(
    kind: str, arguments: dict[str, Any], parameters: dict[str, Any]
) -> None:
    outputs = ["y", "places"] if kind == "TopK" else ["y"]
    agrees(model_of(op(kind, ["x", *parameters], outputs, arg=arguments), **parameters), {"x": IMAGE})
