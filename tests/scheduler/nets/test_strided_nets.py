"""Nets on strided tensors: the bytes of the packed run, conversions where they are needed and only there, refusals."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numpy.lib.stride_tricks import as_strided

from dagexec import NetDef, Workspace
from dagexec.core.conversion import Conversion, ConvertedStep
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.proto import OperatorDef
from dagexec.errors import OperatorError, ShapeError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.spans import Span
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.dynamic import CheckedStep
from tests.memory_limits import peak_memory
from tests.ops.running import operator_def

Array = npt.NDArray[Any]
SHAPE = (2, 6, 8, 8)
NETS: list[type[BaseNet]] = [SimpleNet, DAGNet, AsyncDAGNet]
LAYOUTS = {
    "NHWC": TensorDescriptor.ordered(SHAPE, "NHWC"),
    "CHWN": TensorDescriptor.ordered(SHAPE, "CHWN"),
    "padded": TensorDescriptor(SHAPE, (1200, 200, 20, 2)),
}


def sample(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def net_of(*operators: OperatorDef) -> NetDef:
    return NetDef(name="n", op=operators)


BRANCHES = net_of(
    operator_def("Conv", ["x", "w"], ["conv"], kernel=3, pad=1),
    operator_def("Tanh", ["x"], ["tanh"]),
    operator_def("Abs", ["x"], ["abs"]),
    operator_def("Add", ["x", "x"], ["twice"]),
    operator_def("Flatten", ["x"], ["flat"]),
    operator_def("Transpose", ["x"], ["turned"], axes=[3, 0, 1, 2]),
    operator_def("NCHW2NHWC", ["x"], ["last"]),
    operator_def("Sum", ["conv", "tanh", "abs", "twice"], ["sum"]),
    operator_def("MaxPool", ["sum"], ["pool"], kernel=2, stride=2),
    operator_def("Shape", ["x"], ["shape"]),
)


def results(net: BaseNet) -> dict[str, bytes]:
    names = [name for definition in net.graph.operators for name in definition.output]
    return {name: net.workspace.fetch_blob(name).tobytes() for name in names}


def converted(net: BaseNet) -> list[tuple[str, str]]:
    """(operator type, blob) of every conversion that is prepared, before the operator or after it."""
    steps = [step.current() if isinstance(step, CheckedStep) else step for step in net.prepared().steps]
    return [
        (net.graph.operators[index].type, conversion.blob)
        for index, step in enumerate(steps)
        if isinstance(step, ConvertedStep)
        for conversion in (*step.before, *step.after)
    ]


@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "broadcast"])
def test_a_strided_input_gives_the_bytes_of_the_packed_one(net_class: type[BaseNet], layout: str) -> None:
    workspace = Workspace()
    workspace.feed_blob("w", sample((6, 6, 3, 3), 1))
    workspace.feed_blob("x", sample())
    with net_class(BRANCHES, workspace) as net:
        for seed in (2, 3):
            values = sample(seed=seed)
            if layout == "broadcast":
                values = np.broadcast_to(values[:1, :1], SHAPE)
            workspace.feed_blob("x", values)
            net.run()
            expected = results(net)
            if layout == "broadcast":
                workspace.adopt_strided_blob("x", values)
            else:
                workspace.feed_blob("x", values, LAYOUTS[layout])
            assert not workspace.get_blob("x").tensor().is_packed
            for _ in range(2):
                net.run()
                assert results(net) == expected
        assert converted(net) == [("Conv", "x"), ("Tanh", "x"), ("Add", "x")]


def test_values_written_to_adopted_memory_between_runs_are_seen() -> None:
    workspace, memory = Workspace(), np.arange(12, dtype=np.float32).reshape(3, 4)
    workspace.adopt_strided_blob("x", memory.T)
    net_def = net_of(operator_def("Softmax", ["x"], ["y"]), operator_def("Negative", ["x"], ["z"]))
    with SimpleNet(net_def, workspace) as net:
        net.run()
        memory[1] = 50
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("z"), -memory.T)
        packed = Workspace()
        packed.feed_blob("x", memory.T)
        packed.run_operator_once(operator_def("Softmax", ["x"], ["y"]))
        assert workspace.fetch_blob("y").tobytes() == packed.fetch_blob("y").tobytes()


EXACT = ("Sqr", "Sqrt", "Abs", "Negative", "Sign", "Floor", "Ceil", "Round")
STRIDED_READERS = [
    operator_def("Transpose", ["x"], ["y"], axes=[0, 2, 3, 1]),
    operator_def("NCHW2NHWC", ["x"], ["y"]),
    operator_def("NHWC2NCHW", ["x"], ["y"]),
    operator_def("Copy", ["x"], ["y"]),
    operator_def("Reshape", ["x"], ["y", "old"], shape=[-1, 8]),
    operator_def("Flatten", ["x"], ["y"]),
    operator_def("Squeeze", ["x"], ["y"], dims=[]),
    operator_def("Size", ["x"], ["y"]),
    *(operator_def(name, ["x"], ["y"]) for name in EXACT),
]


@pytest.mark.parametrize("definition", STRIDED_READERS, ids=lambda definition: definition.type)
def test_operators_that_read_any_strides_copy_nothing_first(definition: OperatorDef) -> None:
    shape = (4, 16, 64, 64)
    workspace = Workspace()
    workspace.feed_blob("x", sample(shape))
    with SimpleNet(net_of(definition), workspace) as net:
        net.run()
        expected = results(net)
        workspace.feed_blob("x", sample(shape), TensorDescriptor.ordered(shape, "NHWC"))
        net.prepared()
        assert converted(net) == []
        peak = peak_memory(net.run)
        assert results(net) == expected
    assert peak < 2**20 // 2  # the tensor has 1 MiB


@pytest.mark.parametrize("name", ["Sqrt", "Negative", "Round"])
def test_half_precision_is_read_with_any_strides_too(name: str) -> None:
    workspace, x = Workspace(), sample((3, 70, 500)).astype(np.float16)
    workspace.feed_blob("x", x)
    with SimpleNet(net_of(operator_def(name, ["x"], ["y"])), workspace) as net:
        net.run()
        expected = results(net)
        workspace.feed_blob("x", x, TensorDescriptor.ordered(x.shape, "NWC"))
        net.run()
        assert results(net) == expected
        assert converted(net) == []


def test_a_view_of_a_strided_tensor_is_a_packed_copy() -> None:
    workspace, memory = Workspace(), np.arange(6, dtype=np.float32).reshape(2, 3)
    workspace.adopt_strided_blob("x", memory.T)
    net_def = net_of(operator_def("StopGradient", ["x"], ["s"]), operator_def("FlattenToVec", ["s"], ["v"]))
    with SimpleNet(net_def, workspace) as net:
        net.run()
        memory[0, 0] = 9
        net.run()
        x, s, v = (workspace.get_blob(name).tensor() for name in "xsv")
        assert s.is_packed
        assert not s.shares_storage_with(x)
        assert v.shares_storage_with(s)
        assert v.fetch().tolist() == [9, 3, 1, 4, 2, 5]


def test_a_run_without_strided_tensors_has_the_plain_steps() -> None:
    workspace = Workspace()
    workspace.feed_blob("w", sample((6, 6, 3, 3)))
    workspace.feed_blob("x", sample())
    with SimpleNet(BRANCHES, workspace) as net:
        assert not any(isinstance(step, ConvertedStep) for step in net.prepared().in_order)


@pytest.mark.parametrize("net_class", NETS)
def test_the_trace_says_what_is_converted_within_the_span_of_its_operator(
    net_class: type[BaseNet], tmp_path: Path
) -> None:
    workspace = Workspace()
    workspace.feed_blob("w", sample((6, 6, 3, 3)))
    workspace.feed_blob("x", sample(), LAYOUTS["NHWC"])
    with net_class(BRANCHES, workspace) as net:
        trace = Trace()
        net.run(trace=trace)
        net.run(trace=trace)
        trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    conversions = [event for event in events if event.get("cat") == "conversion"]
    whole = [event for event in events if event.get("cat") == "operator"]
    assert len(whole) == 2 * (len(BRANCHES.op) - 1)  # Shape is settled before the run
    assert sorted(event["args"]["index"] for event in conversions) == [0, 0, 1, 1, 3, 3]
    for event in conversions:
        assert event["name"] == "convert x"
        found = event["args"]
        assert (found["blob"], found["shape"]) == ("x", list(SHAPE))
        assert found["from"] == "NHWC fully packed, strides (384, 1, 48, 6)"
        assert found["to"] == "NCHW fully packed"
        assert any(
            outer["args"]["index"] == found["index"]
            and outer["tid"] == event["tid"]
            and outer["ts"] <= event["ts"]
            and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-6
            for outer in whole
        )


def test_operator_seconds_count_a_conversion_once_as_part_of_its_operator() -> None:
    layout = TensorDescriptor.packed((2, 3))
    trace = Trace()
    conversions = [Span(0, "t", start, start + 2, Conversion("x", layout, layout, lambda: None)) for start in (1, 5)]
    trace.spans.extend([*conversions, Span(0, "t", 0, 1000)])
    assert trace.operator_seconds(1) == [1e-6]


def test_preparing_logs_each_conversion_once(caplog: pytest.LogCaptureFixture) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", sample(), LAYOUTS["CHWN"])
    net_def = net_of(operator_def("Tanh", ["x"], ["y"]))
    with caplog.at_level(logging.INFO, "dagexec"), SimpleNet(net_def, workspace) as net:
        net.run()
        net.run()
    [message] = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
    assert message == (
        "Tanh 'y' (operator 0) of net 'n': input blob 'x' of shape (2, 6, 8, 8) is converted in every run, "
        "from CHWN fully packed, strides (1, 128, 16, 2) to NCHW fully packed"
    )


def overlapping(shape: tuple[int, ...] = (3, 4)) -> Array:
    """Rows that begin one element after each other."""
    return as_strided(np.zeros(20, np.float32), shape, (4, 4))


@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.parametrize("writable", [False, True])
def test_an_overlapping_output_is_refused_before_anything_runs(net_class: type[BaseNet], writable: bool) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((3, 4), np.float32))
    workspace.adopt_strided_blob("y", overlapping(), writable)
    net_def = net_of(operator_def("Copy", ["x"], ["first"]), operator_def("Tanh", ["first"], ["y"]))
    with net_class(net_def, workspace) as net:
        with pytest.raises(ShapeError) as refused:
            net.run()
        for part in ("Tanh 'y' (operator 1) of net 'n'", "output blob 'y'", "overlapping", "(3, 4)", "(1, 1)"):
            assert part in str(refused.value)
        assert workspace.get_blob("first").tensor().is_empty
        workspace.feed_blob("y", np.zeros((3, 4), np.float32))
        net.run()
        workspace.adopt_strided_blob("y", overlapping(), writable)
        with pytest.raises(ShapeError, match="overlapping"):
            net.run()


def test_working_in_place_on_an_overlapping_tensor_is_refused() -> None:
    workspace = Workspace()
    workspace.adopt_strided_blob("x", np.broadcast_to(np.float32(2), (3, 4)))
    with (
        SimpleNet(net_of(operator_def("Negative", ["x"], ["x"])), workspace) as net,
        pytest.raises(ShapeError, match=r"Negative 'x'.* overlapping layout, shape \(3, 4\) and strides \(0, 0\)"),
    ):
        net.run()


@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.parametrize("op_type", ["Tanh", "Negative"])
def test_results_go_to_the_strided_memory_of_the_caller(net_class: type[BaseNet], op_type: str) -> None:
    workspace, memory = Workspace(), np.full((3, 8), -5, np.float32)
    workspace.feed_blob("x", sample((3, 4)))
    packed = Workspace()
    packed.feed_blob("x", sample((3, 4)))
    packed.run_operator_once(operator_def(op_type, ["x"], ["y"]))
    workspace.adopt_strided_blob("y", memory[:, 2:6], writable=True)
    net_def = net_of(operator_def(op_type, ["x"], ["y"]), operator_def("Abs", ["y"], ["z"]))
    with net_class(net_def, workspace) as net:
        for _ in range(2):
            trace = Trace()
            net.run(trace=trace)
            found = [(span.operator, span.conversion.blob) for span in trace.spans if span.conversion is not None]
            assert found == ([(0, "y")] if op_type == "Tanh" else [])
            np.testing.assert_array_equal(memory[:, 2:6], packed.fetch_blob("y"))
            np.testing.assert_array_equal(workspace.fetch_blob("z"), abs(packed.fetch_blob("y")))
            assert (memory[:, :2] == -5).all()
            assert (memory[:, 6:] == -5).all()
            memory[:, 2:6] = 0
        assert converted(net) == ([("Tanh", "y")] if op_type == "Tanh" else [])


@pytest.mark.parametrize(
    ("op_type", "arguments"), [("Tanh", {}), ("Negative", {}), ("Softsign", {}), ("Dropout", {"is_test": 1})]
)
def test_an_operator_works_in_place_on_strided_memory_it_may_write(op_type: str, arguments: dict[str, int]) -> None:
    workspace, memory = Workspace(), np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    values = memory[:, 1:3].copy()
    workspace.adopt_strided_blob("x", memory[:, 1:3], writable=True)
    packed = Workspace()
    packed.feed_blob("x", values)
    definition = operator_def(op_type, ["x"], ["x"], **arguments)
    with SimpleNet(net_of(definition), workspace) as net:
        for _ in range(3):
            net.run()
            packed.run_operator_once(definition)
            np.testing.assert_array_equal(memory[:, 1:3], packed.fetch_blob("x"))
    np.testing.assert_array_equal(memory[:, 0], [0, 0.5, 1])


def test_an_operator_in_place_on_memory_it_may_not_write_leaves_it() -> None:
    workspace, memory = Workspace(), np.arange(6, dtype=np.float32).reshape(2, 3)
    workspace.adopt_strided_blob("x", memory.T)
    with SimpleNet(net_of(operator_def("Negative", ["x"], ["x"])), workspace) as net:
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("x"), -np.arange(6).reshape(2, 3).T)
    np.testing.assert_array_equal(memory, np.arange(6).reshape(2, 3))


def test_a_view_is_copied_to_memory_between_the_elements_it_reads() -> None:
    workspace, memory = Workspace(), np.arange(12, dtype=np.float32).reshape(3, 4)
    workspace.adopt_strided_blob("x", memory[:, 0])
    workspace.adopt_strided_blob("y", memory[1, 1:4], writable=True)
    workspace.run_operator_once(operator_def("FlattenToVec", ["x"], ["y"]))
    assert memory[1].tolist() == [4, 0, 4, 8]


def test_a_step_may_be_prepared_from_the_values_of_a_strided_tensor() -> None:
    workspace, bounds = Workspace(), np.array([[1, 3], [2, 4]])
    workspace.feed_blob("x", sample((5, 6)))
    workspace.adopt_strided_blob("starts", bounds[:, 0])
    workspace.adopt_strided_blob("ends", bounds[:, 1])
    with SimpleNet(net_of(operator_def("Slice", ["x", "starts", "ends"], ["y"])), workspace) as net:
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), sample((5, 6))[1:3, 2:4])
        bounds[:, 0] = (0, 3)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), sample((5, 6))[0:3, 3:4])


def test_a_reshape_in_place_keeps_the_values_of_a_strided_tensor() -> None:
    for writable in (False, True):
        workspace, memory = Workspace(), np.arange(6, dtype=np.float32).reshape(2, 3)
        workspace.adopt_strided_blob("x", memory.T, writable)
        workspace.run_operator_once(operator_def("Reshape", ["x"], ["x", "old"], shape=[2, 3]))
        assert workspace.fetch_blob("x").tolist() == [[0, 3, 1], [4, 2, 5]]
        assert workspace.fetch_blob("old").tolist() == [3, 2]


def test_an_earlier_preparation_does_not_take_a_tensor_back_from_its_layout() -> None:
    workspace = Workspace()
    results_in = [np.zeros((4, 3), np.float32).T for _ in range(2)]
    workspace.feed_blob("x", sample((3, 4)))
    with SimpleNet(net_of(operator_def("Negative", ["x"], ["y"])), workspace) as net:
        net.run()
        for target in results_in:
            workspace.adopt_strided_blob("y", target, writable=True)
            net.run()
            np.testing.assert_array_equal(target, -sample((3, 4)))
        workspace.feed_blob("x", sample((3, 4), 1), TensorDescriptor.ordered((3, 4), "CN"))
        net.run()
        np.testing.assert_array_equal(results_in[1], -sample((3, 4), 1))
        np.testing.assert_array_equal(results_in[0], -sample((3, 4)))
        source = sample((4, 3), 2).T
        workspace.adopt_strided_blob("x", source, writable=True)
        net.run()
        workspace.adopt_strided_blob("x", sample((4, 3), 3).T, writable=True)
        net.run()
        np.testing.assert_array_equal(results_in[1], -sample((4, 3), 3).T)
        np.testing.assert_array_equal(source, sample((4, 3), 2).T)
        workspace.feed_blob("y", np.zeros((3, 4), np.float32))
        workspace.feed_blob("x", np.zeros((3, 4), np.float32))
        net.run()
        assert not workspace.fetch_blob("y").any()
        for target in results_in:
            assert target.all()


def test_a_strided_run_in_between_does_not_cost_the_packed_preparation() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", sample())
    with SimpleNet(net_of(operator_def("Tanh", ["x"], ["y"])), workspace) as net:
        packed = net.prepared()
        workspace.feed_blob("x", sample(seed=1), LAYOUTS["NHWC"])
        assert net.prepared() is not packed
        workspace.feed_blob("x", sample(seed=2))
        assert net.prepared() is packed
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), np.tanh(sample(seed=2)))


@pytest.mark.parametrize("net_class", NETS)
def test_operators_of_unknown_shapes_convert_too_and_their_trace_says_so(net_class: type[BaseNet]) -> None:
    workspace, shape = Workspace(), np.array([[4, 0], [3, 0]])
    workspace.feed_blob("v", np.arange(12, dtype=np.float32))
    workspace.adopt_strided_blob("s", shape[:, 0])
    workspace.feed_blob("x", sample((4, 3)), TensorDescriptor.ordered((4, 3), "CN"))
    net_def = net_of(
        operator_def("Reshape", ["v", "s"], ["r", "old"]),
        operator_def("Add", ["r", "x"], ["y"], broadcast=1),
    )
    with net_class(net_def, workspace) as net:
        for rows in (4, 2):
            shape[:, 0] = (rows, 12 // rows)
            if rows == 2:
                workspace.feed_blob("x", sample((2, 6)), TensorDescriptor.ordered((2, 6), "CN"))
            trace = Trace()
            net.run(trace=trace)
            expected = np.arange(12, dtype=np.float32).reshape(rows, -1) + sample((rows, 12 // rows))
            np.testing.assert_array_equal(workspace.fetch_blob("y"), expected)
            [span] = [span for span in trace.spans if span.conversion is not None]
            assert (span.operator, span.conversion.blob if span.conversion else "") == (1, "x")
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("y"), expected)


def test_an_overlapping_output_of_unknown_shape_is_refused_too() -> None:
    workspace = Workspace()
    workspace.feed_blob("v", np.arange(12, dtype=np.float32))
    workspace.feed_blob("s", np.array([3, 4]))
    workspace.adopt_strided_blob("y", overlapping())
    net_def = net_of(operator_def("Reshape", ["v", "s"], ["r", "old"]), operator_def("Negative", ["r"], ["y"]))
    with SimpleNet(net_def, workspace) as net:
        with pytest.raises(ShapeError, match=r"Negative 'y'.*overlapping"):
            net.run()
        workspace.feed_blob("y", np.zeros((3, 4), np.float32))
        net.run()
        workspace.adopt_strided_blob("y", overlapping())
        with pytest.raises((ShapeError, OperatorError), match=r"Negative 'y'.*overlapping"):
            net.run()


def test_a_strided_tensor_of_constant_values_is_packed_once_for_all_its_readers() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", sample())
    weights = sample((6, 6, 3, 3), 1)
    workspace.feed_blob("w", weights, TensorDescriptor.ordered(weights.shape, "NHWC"))
    workspace.get_blob("w").tensor().freeze()
    convolutions = [operator_def("Conv", ["x", "w"], [name], kernel=3) for name in ("y", "z")]
    packed = Workspace()
    packed.feed_blob("x", sample())
    packed.feed_blob("w", weights)
    packed.run_operator_once(convolutions[0])
    with SimpleNet(net_of(*convolutions), workspace) as net:
        net.run()
        assert converted(net) == []
        for name in ("y", "z"):
            assert workspace.fetch_blob(name).tobytes() == packed.fetch_blob("y").tobytes()
    constant = workspace.get_blob("w").tensor().constant
    assert constant is not None
    found = constant.derived("packed", _not_again)
    assert found.flags.c_contiguous
    assert not found.flags.writeable


def _not_again() -> Array:
    raise AssertionError("the packed copy is kept")


def test_strings_are_converted_as_numbers_are() -> None:
    words = np.array([[b"a", b"bc"], [b"", b"d"]], object)
    workspace = Workspace()
    workspace.adopt_strided_blob("x", words.T)
    workspace.run_operator_once(operator_def("Concat", ["x", "x"], ["y", "sizes"], axis=0))
    assert workspace.fetch_blob("y").tolist() == words.T.tolist() * 2


def test_a_child_workspace_reads_a_strided_blob_of_its_parent() -> None:
    parent = Workspace()
    parent.feed_blob("x", sample(), LAYOUTS["NHWC"])
    descriptor = parent.get_blob("x").tensor().descriptor
    child = Workspace(parent)
    child.create_local_blob("y")
    child.run_operator_once(operator_def("Negative", ["x"], ["y"]))
    np.testing.assert_array_equal(child.fetch_blob("y"), -sample())
    assert parent.get_blob("x").tensor().descriptor == descriptor


def test_a_failing_operator_is_named_when_its_step_is_converted() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.array([[0, 1, 2], [3, 4, 99]]), TensorDescriptor.ordered((2, 3), "CN"))
    workspace.feed_blob("data", np.arange(10, dtype=np.float32))
    for net_class in NETS:
        with (
            net_class(net_of(operator_def("Gather", ["data", "x"], ["y"])), workspace) as net,
            pytest.raises(OperatorError, match="Gather 'y'"),
        ):
            net.run()


@pytest.mark.parametrize("net_class", NETS)
@pytest.mark.parametrize("given", ["adopted", "strided", "frozen"])
def test_an_input_written_in_place_leaves_foreign_memory_before_anyone_holds_it(
    net_class: type[BaseNet], given: str
) -> None:
    workspace, x = Workspace(), sample()
    if given == "frozen":
        workspace.feed_blob("x", x)
        workspace.get_blob("x").tensor().freeze()
    elif given == "adopted":
        workspace.adopt_blob("x", x)
    else:
        workspace.adopt_strided_blob("x", x.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2))
    net_def = net_of(operator_def("Abs", ["x"], ["before"]), operator_def("Negative", ["x"], ["x"]))
    with net_class(net_def, workspace) as net:
        for values in (x, sample(seed=1), sample(seed=2)):
            if values is not x:
                workspace.feed_blob("x", values)
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("before"), np.abs(values))
            np.testing.assert_array_equal(workspace.fetch_blob("x"), -values)
    np.testing.assert_array_equal(x, sample())
