"""What a caller, the environment or a model may get wrong: the error says what was expected, and is a DagexecError."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.cli.train import _processes
from dagexec.core.dtypes import FLOAT32
from dagexec.core.proto import NetDef
from dagexec.core.schema import TensorType
from dagexec.errors import FeedError, ModelFormatError, ResourceError, SchemaError, SettingError, ShapeError
from dagexec.executor.executor import Executor
from dagexec.options import CompileOptions
from dagexec.scheduler.run.run import waiting_time
from dagexec.storage.net_file import load_net
from tests.ops.running import operator_def

X = np.arange(-2, 2, dtype=np.float32)


def net_of(*operators: object, inputs: tuple[str, ...] = ("x",)) -> NetDef:
    return NetDef(name="n", op=operators, external_input=inputs, external_output=["y"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def relu() -> Executor:
    with dagexec.compile(net_of(operator_def("Relu", ["x"], ["y"])), num_workers=1, net_type="simple") as executor:
        yield executor  # type: ignore[misc]


def test_a_net_with_one_input_takes_a_bare_array(relu: Executor) -> None:
    expected = np.maximum(X, 0)
    for array in (X, X[:1], np.float32(3)):
        np.testing.assert_array_equal(relu.run(array)["y"], np.maximum(array, 0))
    np.testing.assert_array_equal(asyncio.run(relu.run_async(X))["y"], expected)
    relu.warm_up(X)
    result = np.empty_like(X)
    relu.run(X, out={"y": result})
    np.testing.assert_array_equal(result, expected)


def test_a_net_with_two_inputs_takes_no_bare_array() -> None:
    net = net_of(operator_def("Add", ["x", "z"], ["y"]), inputs=("x", "z"))
    with (
        dagexec.compile(net) as executor,
        pytest.raises(FeedError, match=r"a net with one input, and this one has \['x', 'z'\].*found ndarray"),
    ):
        executor.run(X)


@pytest.mark.parametrize("feeds", [None, 5, "x", [("x", X)], {"x"}])
def test_feeds_that_are_neither_by_name_nor_an_array_are_refused(relu: Executor, feeds: object) -> None:
    with pytest.raises(FeedError, match=r"net 'n': feeds must be arrays by name, for \['x'\]; found"):
        relu.run(feeds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": 5}, "outputs must be a list of names, found 5"),
        ({"outputs": "y"}, "outputs must be a list of names, found 'y'"),
        ({"outputs": [["y"]]}, r"outputs must be names, found \['y'\]"),
        ({"out": [X]}, r"out must be arrays by name, for \['y'\]; found list"),
    ],
)
def test_results_that_are_not_named_are_refused(relu: Executor, options: dict[str, object], message: str) -> None:
    with pytest.raises(FeedError, match=message):
        relu.run({"x": X}, **options)  # type: ignore[arg-type]


def test_inputs_of_mixed_kinds_of_names_are_refused(relu: Executor) -> None:
    with pytest.raises(FeedError, match="unknown input"):
        relu.run({1: X, "z": X, "x": X})  # type: ignore[dict-item]


def test_a_timeout_is_a_number() -> None:
    assert waiting_time(np.int64(3)) == 3  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a timeout must be a number of seconds or None, found 'soon'"):
        waiting_time("soon")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: CompileOptions(num_workers="2"),  # type: ignore[arg-type]
        lambda: CompileOptions(num_workers=0),
        lambda: CompileOptions(num_workers=10**20),
        lambda: CompileOptions(replicas=1.5),  # type: ignore[arg-type]
        lambda: CompileOptions(intra_op_threads=-1),
        lambda: CompileOptions(tuning_seconds=float("nan")),
        lambda: CompileOptions(tuning_seconds="1"),  # type: ignore[arg-type]
        lambda: CompileOptions(dtype="float8"),  # type: ignore[arg-type]
        lambda: CompileOptions(layout="CHWN"),
        lambda: CompileOptions(max_queued="many"),  # type: ignore[arg-type]
        lambda: CompileOptions(when_full="drop"),  # type: ignore[arg-type]
    ],
)
def test_an_option_out_of_range_is_told_and_is_a_value_error_too(make: Callable[[], object]) -> None:
    with pytest.raises(SettingError, match=r"not |found "):
        make()


@pytest.mark.parametrize("text", ["abc", "-1", "nan", "\udcff"])
def test_a_variable_of_the_environment_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DAGEXEC_TUNING_SECONDS", text)
    with pytest.raises(SettingError, match="DAGEXEC_TUNING_SECONDS must be a number of seconds"):
        dagexec.compile(net_of(operator_def("Relu", ["x"], ["y"])))
    monkeypatch.setenv("PMI_SIZE", text)
    with pytest.raises(SettingError, match="PMI_SIZE must be a number of processes"):
        _processes("PMI_SIZE")


@pytest.mark.parametrize("count", [-5, 1 << 30])
@pytest.mark.parametrize("net_type", ["dag", "async_dag"])
def test_a_net_that_asks_for_odd_numbers_of_workers_is_refused(net_type: str, count: int) -> None:
    net = net_of(operator_def("Relu", ["x"], ["y"]))
    net.num_workers = count
    workspace = dagexec.Workspace()
    workspace.feed_blob("x", X)
    with pytest.raises(SettingError, match=f"expected 1 to 4096 workers, found {count}"):
        workspace.create_net(net, net_type).run()


def test_a_net_that_lacks_a_required_field_is_refused(tmp_path: Path) -> None:
    net = net_of(operator_def("GivenTensorFill", [], ["y"], shape=[1]), inputs=())
    net.op[0].arg.add(name="values").qtensors.add()
    with pytest.raises(SchemaError, match=r"required fields are missing: arg\[1\]\.qtensors\[0\]\.precision"):
        dagexec.compile(net)
    with pytest.raises(SchemaError, match="required fields are missing"):
        dagexec.Workspace().run_net_once(net)
    (tmp_path / "net.pbtxt").write_text('op { type: "Relu" arg { name: "a" qtensors {} } }')
    with pytest.raises(ModelFormatError, match="required fields are missing: op"):
        load_net(tmp_path / "net.pbtxt")


def test_batch_normalization_of_a_vector_after_relu_is_refused_by_shape() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("BatchNormalization", ["r", "s", "s", "s", "s"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    scale = numpy_helper.from_array(np.ones(4, np.float32), "s")
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=[scale])
    with pytest.raises(ShapeError, match="X must have at least 2 axes, found 1"):
        dagexec.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])).run(X)


@pytest.mark.parametrize("optimize", [True, False])
def test_sizes_that_double_until_they_overflow_are_refused(optimize: bool) -> None:
    names = ["x", *(f"y{number}" for number in range(69)), "y"]
    nodes = [helper.make_node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 13)]
    )
    with pytest.raises(ResourceError, match="Concat 'y"):
        dagexec.compile(model, optimize=optimize).run(np.ones((1, 2), np.float32))


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 31, 1 << 31), (1 << 63,), (0, 1 << 70), (-1,)])
def test_a_type_of_more_bytes_than_can_be_counted_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ResourceError, match=r"overflows|negative"):
        TensorType(shape, FLOAT32)
