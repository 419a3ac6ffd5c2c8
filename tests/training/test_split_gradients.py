"""Gradients of layers in two operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import INT32
from dagexec.core.workspace import Net
from dagexec.ops.engines.onednn.binding import library
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD
from dagexec.training.split_gradients import split_gradients
from tests.ops.running import operator_def
from tests.training.as_written import as_written

SHAPES: dict[str, tuple[int, ...]] = {"x": (2, 3, 6, 6), "w": (4, 3, 3, 3), "dy": (2, 4, 4, 4)}


def _net(op_type: str, outputs: list[str], **arguments: ArgumentValue) -> tuple[NetDef, Workspace]:
    """A net of one gradient operator, and a workspace with what it reads."""
    workspace, rng = Workspace(), np.random.default_rng(3)
    shapes = dict(SHAPES)
    if op_type.startswith("FC"):
        shapes = {"x": (5, 7), "w": (4, 7), "dy": (5, 4)}
    if op_type.startswith("FCTransposed"):
        shapes = shapes | {"w": (7, 4)}
    if op_type.startswith("ConvTranspose"):
        shapes = {"x": (2, 3, 6, 6), "w": (3, 4, 3, 3), "dy": (2, 4, 8, 8)}
    for name, shape in shapes.items():
        workspace.feed_blob(name, rng.standard_normal(shape).astype(np.float32))
    return NetDef(name="one", op=[operator_def(op_type, ["x", "w", "dy"], outputs, **arguments)]), workspace


def _computed(net: NetDef, workspace: Workspace, names: list[str]) -> dict[str, bytes]:
    workspace.run_net_once(net)
    return {name: np.asarray(workspace.fetch_blob(name)).tobytes() for name in names}


@pytest.mark.parametrize("engine", ["", "ONEDNN"])
@pytest.mark.parametrize(
    ("op_type", "outputs", "arguments"),
    [
        ("ConvGradient", ["dw", "db", "dx"], {"kernel": 3}),
        ("ConvGradient", ["dw", "dx"], {"kernel": 3, "no_bias": 1}),
        ("ConvGradient", ["dx", "db"], {"kernel": 3, "wanted": ["input", "bias"]}),
        ("ConvTransposeGradient", ["dw", "db", "dx"], {"kernel": 3}),
        ("FCGradient", ["dw", "db", "dx"], {}),
        ("FCTransposedGradient", ["db", "dw", "dx"], {"wanted": ["bias", "weights", "input"]}),
    ],
)
def test_two_operators_give_the_bytes_of_one(
    op_type: str, outputs: list[str], arguments: dict[str, ArgumentValue], engine: str
) -> None:
    net, workspace = _net(op_type, outputs, **arguments)
    net.op[0].engine = engine
    apart = split_gradients(net)
    assert [list(one.output) for one in apart.op] == [["dx"], [name for name in outputs if name != "dx"]]
    assert all(one.type == op_type and one.engine == engine for one in apart.op)
    expected = _computed(net, workspace, outputs)
    for name in outputs:
        workspace.feed_blob(name, np.zeros(1, np.float32))
    assert _computed(apart, workspace, outputs) == expected


@pytest.mark.parametrize(
    ("op_type", "outputs", "arguments"),
    [
        ("ConvGradient", ["dw", "db"], {"kernel": 3}),
        ("ConvGradient", ["dx"], {"kernel": 3, "wanted": ["input"]}),
        ("ReluGradient", ["dx"], {}),
        ("LCGradient", ["dw", "db", "dx"], {"kernel": 3}),
    ],
)
def test_others_stay_as_they_are(op_type: str, outputs: list[str], arguments: dict[str, ArgumentValue]) -> None:
    net = NetDef(name="one", op=[operator_def(op_type, ["x", "w", "dy"], outputs, **arguments)])
    assert split_gradients(net) == net


def test_the_layer_before_waits_for_no_gradient_of_weights() -> None:
    helper = ModelHelper("chain", training=True)
    helper.add_input("data", (2, 3, 8, 8))
    helper.add_input("label", (2,), INT32)
    x = helper.relu(helper.conv("data", "first", 3, 4, kernel=3), "relu")
    x = helper.conv(x, "second", 4, 5, kernel=3)
    helper.softmax_with_loss(helper.fc(x, "pred", 5 * 16, 3), "label")
    helper.add_gradient_operators(["loss"])
    SGD(0.1).add_updates(helper)
    workspace = Workspace()
    helper.create(workspace)
    workspace.feed_blob("data", np.zeros((2, 3, 8, 8), np.float32))
    workspace.feed_blob("label", np.zeros(2, np.int32))
    graph = SimpleNet(split_gradients(helper.net), workspace).graph
    place = {name: index for index, one in enumerate(graph.operators) for name in one.output}
    needed, todo = set(), [place["first_w_grad"]]
    while todo:
        for parent in graph.parents[todo.pop()]:
            if parent not in needed:
                needed.add(parent)
                todo.append(parent)
    assert place["second_grad"] in needed
    assert not needed & {place["second_w_grad"], place["pred_w_grad"]}


def _three_steps(create: Callable[[ModelHelper, Workspace], Net]) -> tuple[float, list[OperatorDef]]:
    """The loss of the third step of a small net, and the operators that computed it."""
    helper = ModelHelper("tiny", seed=1, training=True)
    helper.add_input("x", (8, 3, 6, 6))
    helper.add_input("label", (8,), INT32)
    hidden = helper.relu(helper.conv("x", "first", 3, 4, kernel=3), "active")
    hidden = helper.conv(hidden, "second", 4, 4, kernel=3)
    _, loss = helper.softmax_with_loss(helper.fc(hidden, "scores", 16, 5), "label")
    helper.add_gradient_operators([loss])
    SGD(0.1).add_updates(helper)
    workspace, rng = Workspace(), np.random.default_rng(0)
    helper.create(workspace)
    workspace.feed_blob("x", rng.standard_normal((8, 3, 6, 6), np.float32))
    workspace.feed_blob("label", rng.integers(0, 5, 8).astype(np.int32))
    made = create(helper, workspace)
    assert isinstance(made, BaseNet)
    with made:
        for _ in range(3):
            made.run()
        return float(workspace.fetch_blob(loss)), list(made.graph.operators)


def test_a_helper_makes_its_net_in_the_fastest_form_and_that_learns_the_same() -> None:
    loss, operators = _three_steps(lambda helper, workspace: helper.create_net(workspace, "dag", 2))
    expected, plain = _three_steps(lambda helper, workspace: workspace.create_net(as_written(helper.net), "simple"))
    assert loss == pytest.approx(expected, rel=1e-5)
    gradients = [one for one in operators if one.type == "ConvGradient"]
    assert [len(one.output) for one in gradients] == [1, 2, 2]  # no gradient of the images is wanted
    engine = "" if library() is None else "ONEDNN"
    assert {one.engine for one in gradients} == {engine}
    assert not any(one.engine for one in plain)


def test_a_workspace_makes_the_net_that_the_helper_makes() -> None:
    loss, operators = _three_steps(lambda helper, workspace: workspace.create_net(helper.net, "simple"))
    expected, others = _three_steps(lambda helper, workspace: helper.create_net(workspace, "simple"))
    assert loss == expected
    assert [one.message() for one in operators] == [one.message() for one in others]
