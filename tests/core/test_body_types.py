"""Types around bodies: what If, Loop and Scan give their nets and result in, known where it is so in every run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.dtypes import FLOAT32
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.schema import TensorType
from tests.ops.running import operator_def as op

X, ROWS, COUNT, YES = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32), np.array(4), np.array(True)
VALUES = {"x": X, "rows": ROWS, "count": COUNT, "yes": YES}


def body(operators: Sequence[OperatorDef], given: Sequence[str], results: Sequence[str], name: str = "b") -> NetDef:
    return NetDef(name=name, op=operators, external_input=given, external_output=results)


def branch(captured: str, **arguments: Any) -> NetDef:
    return body([op(arguments.pop("type"), [captured], ["y"], **arguments)], [captured], ["y"])


def choice(other: NetDef) -> OperatorDef:
    return op("If", ["yes", "x"], ["y"], then_net=branch("x", type="Relu"), else_net=other, captured=["x"])


def loop(operators: Sequence[OperatorDef], results: Sequence[str], outputs: Sequence[str]) -> OperatorDef:
    net = body(operators, ["i", "on", "s", "t", "c"], results)
    return op("Loop", ["count", "x", "x", "x"], outputs, loop_net=net, trip_count=1, captured=["c"])


GROW = op("Concat", ["s", "c"], ["u", "sizes"], axis=0)
ADD = op("Add", ["t", "c"], ["v"])
FOLLOW = op("Copy", ["s"], ["v"])
SCAN = body([op("Add", ["s", "r"], ["n"]), op("Concat", ["n", "r"], ["z", "q"], axis=0)], ["s", "r"], ["n", "z"])
CASES = {
    "branches agree": (choice(branch("x", type="Tanh")), {"y": (2, 3)}),
    "branches differ": (choice(branch("x", type="Transpose")), {"y": None}),
    "states": (loop([ADD], ["on", "t", "v"], ["u", "w"]), {"u": (2, 3), "w": (2, 3)}),
    "one grows": (loop([GROW, ADD], ["on", "u", "v"], ["u", "w"]), {"u": None, "w": (2, 3)}),
    "another follows": (loop([GROW, FOLLOW], ["on", "u", "v"], ["u", "w"]), {"u": None, "w": None}),
    "rows": (loop([ADD], ["on", "s", "v", "v"], ["u", "w", "z"]), {"u": (2, 3), "w": (2, 3), "z": (4, 2, 3)}),
    "rows until": (
        loop([ADD, op("Not", ["on"], ["off"])], ["off", "s", "v", "v"], ["u", "w", "z"]),
        {"u": (2, 3), "w": (2, 3), "z": None},
    ),
    "scan": (
        op("Scan", ["state", "rows"], ["y", "z"], scan_net=SCAN, num_scan_inputs=1, scan_input_axes=[1],
           scan_output_axes=[-1]),
        {"y": (3,), "z": (6, 5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_types_around_bodies_are_those_of_a_run(case: str) -> None:
    operator, expected = CASES[case]
    values = {**VALUES, "state": np.zeros(3, np.float32)}
    net = NetDef(name="n", op=[operator])
    types = {name: TensorType(array.shape, FLOAT32) for name, array in values.items()}
    found = infer_net(build_graph(net, values.__contains__), types, values).blobs
    workspace = Workspace()
    for name, array in values.items():
        workspace.feed_blob(name, array)
    workspace.run_net_once(net)
    for name, shape in expected.items():
        assert found[name] == (None if shape is None else TensorType(shape, FLOAT32))
        assert shape is None or workspace.fetch_blob(name).shape == shape


def test_what_a_constant_does_not_count_is_unknown() -> None:
    operator, _ = CASES["rows"]
    types = {"x": TensorType((2, 3), FLOAT32), "count": TensorType((), FLOAT32)}
    assert infer_net(build_graph(NetDef(name="n", op=[operator])), types).blobs["z"] is None


def test_bodies_that_do_not_fit_are_left_to_the_one_who_builds_them() -> None:
    nets = {"then_net": body([], ["a"], ["a"]), "else_net": body([], [], [])}
    wrong = op("If", ["yes", "x"], ["y"], captured=["x"], **nets)
    types = {"yes": TensorType((), FLOAT32), "x": TensorType((), FLOAT32)}
    assert infer_net(build_graph(NetDef(name="n", op=[wrong])), types).blobs["y"] is None
