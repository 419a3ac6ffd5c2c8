"""A step that has run once allocates nothing of the size of its tensors when it runs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.registry import schema_of
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.formulas import arity, takes, with_formulas
from tests.ops.onednn.engine import needs_onednn
from tests.ops.running import operator_def

X = np.random.default_rng(0).uniform(0.5, 1, (2, 8, 128, 160))
M = X.reshape(-1, 512)[:400]
ONE_INPUT = [
    *(name for name in with_formulas() if arity(name) == 1 and takes(name, np.float32)),
    *("Softmax", "LogSoftmax", "SumElements", "SumSqrElements", "Sum", "Mean", "Max"),
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceFrontSum", "ReduceBackMean"),
    *("ReduceBackMax", "ArgMax"),
]
CONSTANT = ("Sign", "Floor", "Ceil", "ThresholdedRelu", "ReduceProd")
"""Operators that give one number for all that lies between 0 and 1."""
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((name, [X], {}) for name in ONE_INPUT),
    ("Gelu", [X], {"fast_gelu": 1}),
    ("Softmax", [X], {"axis": 1, "single_axis": 1}),
    ("ReduceMean", [X], {"axes": [0, 2]}),
    ("ReduceL2", [X], {"axes": [1]}),
    ("ArgMax", [X], {"axis": 1}),
    ("LRN", [X], {"size": 5, "alpha": 0.1, "beta": 0.75}),
    ("LRN", [X], {"size": 3, "alpha": 0.1, "beta": 0.5, "order": "NHWC"}),
    ("LayerNorm", [X], {}),
    ("InstanceNorm", [X, X[0, :, 0, 0], X[0, :, 0, 0]], {}),
    ("GroupNorm", [X, X[0, 0, 0], X[0, 0, 0]], {"group": 10, "order": "NHWC"}),
    ("SpatialBN", [X, *[X[0, :, 0, 0]] * 4], {"is_test": 1}),
    ("PRelu", [X, X[0, :, 0, 0]], {}),
    ("Dropout", [X], {"is_test": 1}),
    *((name, [X, X[0, 0, 0]], {}) for name in ("Add", "Sub", "Mul", "Div", "Pow", "EQ", "LT", "Sum", "Max")),
    ("Pow", [X], {"exponent": 1.5}),
    ("Add", [X, X[0, :, 0, 0]], {"broadcast": 1, "axis": 1}),
    ("Where", [X > 0.7, X, X[0, 0, 0]], {}),
    ("FC", [M, M, M[:, 0]], {}),
    ("FCTransposed", [M, M.T, M[:, 0]], {}),
    ("BatchMatMul", [X, X], {"trans_b": 1}),
    ("BatchMatMul", [X, X[0, 0].T], {"broadcast": 1}),
    ("MatMul", [M, M], {"trans_a": 1}),
    ("Gemm", [M, M, M[0]], {"trans_a": 1, "alpha": 0.5, "beta": 2.0}),
    ("Pad", [X], {"pads": [0, 1, 2, 3, 0, -1, 4, 5]}),
    ("PadImage", [X], {"pad": 3, "mode": "reflect"}),
    ("PadImage", [X], {"pad": 3, "mode": "edge", "order": "NHWC"}),
    ("PadImageGradient", [X], {"pad": 3}),
    ("PadImageGradient", [X], {"pad": 3, "mode": "reflect"}),
    ("PadImageGradient", [X], {"pad": 1, "mode": "reflect", "order": "NHWC"}),
    ("PadImageGradient", [X], {"pad": 30, "mode": "edge"}),
    ("PadImageGradient", [X], {"pads": [1, 30, 0, 1], "mode": "edge", "order": "NHWC"}),
    ("SumReduceLike", [X, X[0, 0, 0]], {}),
    *(("ResizeNearest", [X], {"height_scale": 1.5, "width_scale": 0.7, "order": order}) for order in ("NCHW", "NHWC")),
    *(("ChannelShuffle", [X], {"group": 2, "order": order}) for order in ("NCHW", "NHWC")),
    *(
        (name, [X], {"order": order, **window})
        for name in ("MaxPool", "AveragePool", "LpPool", "MaxPoolWithIndex")
        for order in ("NCHW", "NHWC")
        for window in ({"kernel": 3, "pad": 1}, {"kernel": 3, "stride": 2}, {"global_pooling": 1})
    ),
    ("MaxPoolWithIndex", [X], {"kernel": 3, "pad": 1, "order": "NHWC", "flat_indices": 1, "storage_order": 1}),
]
LIMIT = 100_000  # bytes: well below a tensor here; NumPy's own iterators may use up to 8192 elements an operand


ONEDNN_CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *CASES,
    *((name, [X], {"kernel": 3, "stride": 2, "pad": 1}) for name in ("MaxPool", "AveragePool")),
    ("AveragePool", [X], {"kernel": 3, "stride": 2, "pad": 1, "ceil_mode": 1, "count_include_pad": 1}),
    ("Reorder", [X], {"to_order": "NHWC"}),
    ("ChannelShuffle", [X], {"group": 4}),
    ("Concat", [X, X], {"axis": 1, "threads": 2}),
    ("ResizeNearest", [X], {"height_scale": 2.0, "width_scale": 2.0}),
    *(("Resize", [X], {"sizes": [2, 8, 150, 90], **how}) for how in ({"mode": "linear"}, {"mode": "cubic"})),
    ("Resize", [X], {"sizes": [2, 8, 150, 90], "coordinates": "align_corners"}),
    ("FusedFC", [M, M, M[:, 0], M[:, 0]], {"post_ops": ["relu", "mul:3"]}),
    ("FusedElementwise", [X, X, X[0, 0, 0]], {"post_ops": ["add:1", "tanh", "mul:2", *["linear:-1.0:0.5"] * 40]}),
]


def prepared(
    op_type: str, inputs: list[Any], arguments: dict[str, Any], dtype: type, engine: str = ""
) -> tuple[Workspace, SimpleNet]:
    """A net of one operator from x0, x1, ... to y, which has run once on `inputs`."""
    workspace = Workspace()
    feed(workspace, inputs, dtype)
    names = [f"x{index}" for index in range(len(inputs))]
    results = ["y", "y1", "y2", "y3", "y4"][: schema_of(op_type).outputs[0]]
    definition = operator_def(op_type, names, results, engine=engine, **arguments)
    net = SimpleNet(NetDef(name="n", op=[definition]), workspace)
    net.run()
    return workspace, net


def feed(workspace: Workspace, inputs: list[Any], dtype: type) -> None:
    for index, value in enumerate(inputs):
        array = value if value.dtype == np.bool_ else np.ascontiguousarray(value, dtype)
        workspace.feed_blob(f"x{index}", array)


@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "inputs", "arguments"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_second_run_allocates_no_tensor(
    op_type: str, inputs: list[Any], arguments: dict[str, Any], dtype: type
) -> None:
    assert_no_allocation(*prepared(op_type, inputs, arguments, dtype))


@needs_onednn
@pytest.mark.parametrize(("op_type", "inputs", "arguments"), ONEDNN_CASES)
def test_second_run_by_onednn_allocates_no_tensor(op_type: str, inputs: list[Any], arguments: dict[str, Any]) -> None:
    assert_no_allocation(*prepared(op_type, inputs, arguments, np.float32, "ONEDNN"))


def assert_no_allocation(_workspace: Workspace, net: SimpleNet) -> None:
    with net:
        net.run()
        peak = peak_memory(net.run)
    assert peak < LIMIT, f"{peak} bytes"


@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "inputs", "arguments"), CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_second_run_reads_its_inputs_anew(op_type: str, inputs: list[Any], arguments: dict[str, Any]) -> None:
    assert_reads_anew(op_type, inputs, arguments, "")


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize(("op_type", "inputs", "arguments"), ONEDNN_CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_second_run_by_onednn_reads_its_inputs_anew(op_type: str, inputs: list[Any], arguments: dict[str, Any]) -> None:
    assert_reads_anew(op_type, inputs, arguments, "ONEDNN")


def assert_reads_anew(op_type: str, inputs: list[Any], arguments: dict[str, Any], engine: str) -> None:
    others = [np.sort(value, axis=0)[::-1] ** 2 if value.dtype != np.bool_ else ~value for value in inputs]
    workspace, net = prepared(op_type, inputs, arguments, np.float32, engine)
    with net:
        first = workspace.fetch_blob("y")
        feed(workspace, others, np.float32)
        net.run()
        second = workspace.fetch_blob("y")
    fresh, other_net = prepared(op_type, others, arguments, np.float32, engine)
    with other_net:
        np.testing.assert_array_equal(second, fresh.fetch_blob("y"))
    assert op_type in CONSTANT or not np.array_equal(first, second)
