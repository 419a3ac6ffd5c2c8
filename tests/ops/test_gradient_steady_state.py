"""Gradient operators that have run once allocate nothing of the size of their tensors, and read what is fed anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.gradient import gradient
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.onednn.engine import ENGINES
from tests.ops.running import operator_def, run_net

Array = npt.NDArray[Any]

LIMIT = 100_000  # bytes: well below a tensor here; NumPy's own iterators may use up to 8192 elements an operand
X = np.random.default_rng(0).uniform(0.5, 1, (2, 8, 128, 160))
M = X.reshape(-1, 512)[:400]
PICKS = np.random.default_rng(1).integers(0, 8, 60)
REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2")

CASES: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    ("FC", [M, M, M[:, 0]], 1, {}),
    ("FCTransposed", [M, M.T, M[:, 0]], 1, {}),
    ("MatMul", [M, M], 1, {"trans_b": 1}),
    ("MatMul", [M, M, X.reshape(-1)[:160_000].reshape(160, 1000)], 1, {"trans_b": 1}),
    ("BatchMatMul", [X, X], 1, {"trans_b": 1}),
    ("BatchMatMul", [X, X[0, 0].T], 1, {"broadcast": 1}),
    ("BatchMatMul", [X[:, :1], X], 1, {"broadcast": 1, "trans_b": 1}),
    ("Gemm", [M, M, M[:, 0]], 1, {"trans_b": 1, "alpha": 0.5, "beta": 2.0}),
    *((f"Reduce{name}", [X], 1, {"axes": [1, 3]}) for name in REDUCTIONS),
    *((f"Reduce{side}{name}", [X], 1, {}) for side in ("Front", "Back") for name in ("Sum", "Mean", "Max")),
    ("RowwiseMax", [X[0]], 1, {}),
    ("SumSqrElements", [X], 1, {}),
    ("Concat", [X, X], 1, {"axis": 1}),
    ("Split", [X], 2, {"axis": 1}),
    ("Transpose", [X], 1, {}),
    ("Slice", [X], 1, {"starts": [0, 1], "ends": [-1, 7]}),
    ("Slice", [X, np.array([0, 1]), np.array([2, 7])], 1, {}),
    ("Tile", [X], 1, {"tiles": 2, "axis": 1}),
    ("Expand", [X], 1, {"shape": [2, 1, 1, 1, 1]}),
    ("Gather", [X[0], PICKS], 1, {"dense_gradient": 1}),
    ("Gather", [X, PICKS], 1, {"axis": 1}),
    ("BatchGather", [X, PICKS], 1, {}),
    ("TopK", [X], 2, {"k": 100}),
    ("ResizeNearest", [X], 1, {"height_scale": 2.0, "width_scale": 2.0}),
    ("ResizeNearest", [X], 1, {"height_scale": 0.7, "width_scale": 1.3}),
    ("ChannelShuffle", [X], 1, {"group": 4}),
    ("Pad", [X], 1, {"pads": [0, 0, 2, -1, 0, 0, 3, 1], "mode": "edge"}),
    ("MaxPool", [X], 1, {"kernel": 3, "stride": 2}),
    ("AveragePool", [X], 1, {"kernel": 3, "stride": 2}),
    *(
        (name, [X], 1 + (name == "MaxPoolWithIndex"), {"order": order, **window})
        for name in ("MaxPool", "AveragePool", "LpPool", "MaxPoolWithIndex")
        for order in ("NCHW", "NHWC")
        for window in ({"kernel": 3, "pad": 1}, {"global_pooling": 1})
    ),
    ("MaxPoolWithIndex", [X], 2, {"kernel": 3, "order": "NHWC", "flat_indices": 1, "storage_order": 1}),
    *((name, [X], 1, {}) for name in ("Relu", "Tanh", "Clip", "Gelu", "Selu", "Softmax", "LeakyRelu", "Swish", "Erf")),
    ("PRelu", [X, X[0, :, 0, 0]], 1, {}),
    ("Add", [X, X[0, 0, 0]], 1, {}),
    ("Mul", [X, X[:, :1]], 1, {}),
    ("Div", [X, X], 1, {}),
    ("Pow", [X, X[0, 0, 0]], 1, {}),
    ("Max", [X, X[0, 0, 0]], 1, {}),
    ("Mean", [X, X], 1, {}),
    ("Where", [X > 0.7, X[0, 0, 0], X], 1, {}),
]


def feed(workspace: Workspace, values: Mapping[str, Array]) -> None:
    for name, value in values.items():
        workspace.feed_blob(name, value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("op_type", "inputs", "outputs", "arguments"), CASES)
def test_gradients_allocate_nothing_and_follow_their_inputs(
    op_type: str, inputs: list[Any], outputs: int, arguments: dict[str, Any], engine: str, dtype: type
) -> None:
    names = [f"x{index}" for index in range(len(inputs))]
    forward = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments, engine=engine)
    values = {
        name: value.astype(dtype if value.dtype == np.float64 else value.dtype)
        for name, value in zip(names, inputs, strict=True)
    }
    slopes: list[str | None] = [f"y{index}_grad" for index in range(outputs)]
    if op_type in ("TopK", "MaxPoolWithIndex"):
        slopes[1] = None
    made = gradient(forward, slopes)
    found = [str(one) for one in made.inputs if one is not None]

    def run_forward(given: Mapping[str, Array]) -> dict[str, Array]:
        workspace = Workspace()
        feed(workspace, given)
        run_net(workspace, forward)
        return {name: workspace.fetch_blob(name).copy() for name in forward.output}

    def fed(given: Mapping[str, Array], seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        results = run_forward(given)
        drawn = {f"{name}_grad": rng.uniform(-1, 1, y.shape).astype(y.dtype) for name, y in results.items()}
        return {**given, **results, **drawn}

    def started(operators: tuple[OperatorDef, ...], given: Mapping[str, Array]) -> tuple[Workspace, SimpleNet]:
        workspace = Workspace()
        feed(workspace, given)
        net = SimpleNet(NetDef(name="backward", op=operators), workspace)
        net.run()
        return workspace, net

    others = {name: value * dtype(0.5) if value.dtype == dtype else value for name, value in values.items()}
    first, second = fed(values, 0), fed(others, 1)
    workspace, net = started(made.operators, first)
    feed(workspace, second)
    peak = peak_memory(net.run)
    net.close()
    assert peak < LIMIT
    fresh, other = started(made.operators, second)
    other.close()
    for name in found:
        assert workspace.fetch_blob(name).tobytes() == fresh.fetch_blob(name).tobytes(), name
