"""Gradients through If and While against central differences in float64, the same under all nets, and proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.caffe2 import core, workspace
from dagexec.caffe2.net_builder import NetBuilder, ops
from dagexec.errors import GradientError
from dagexec.scheduler.hazards import check_net
from dagexec.training.backward import add_gradient_operators

Array = npt.NDArray[Any]
Function = Callable[..., float]

FEEDS = {
    "x": np.array([0.5, -0.3, 0.8], np.float32),
    "w": np.array([1.3, 0.7, -0.9], np.float32),
    "n": np.array(3),
    "flag": np.array(True),
    "i": np.array(0),
    "j": np.array(0),
    "one": np.array(1),
    "two": np.array(2),
}


def _built(build: Callable[[], None]) -> core.Net:
    with NetBuilder(_use_control_ops=True, initial_scope=FEEDS) as builder:
        build()
    return builder._net()


def _while(counter: str, limit: str) -> Any:
    block = ops.WhileNet()
    block.__enter__()
    with ops.Condition():
        ops.Add([counter, "one"], [counter])
        ops.LE([counter, limit])
    return block


def _branches_in_a_loop() -> None:
    ops.Copy("x", "y")
    block = _while("i", "n")
    ops.Copy("y", "before")
    ops.Mul(["before", "w"], "z")
    with ops.IfNet(ops.GT(["i", "two"])):
        ops.Tanh("z", "y")
    with ops.Else():
        ops.Mul(["z", "before"], "y")
    block.__exit__(None, None, None)
    ops.SumElements("y", "loss")


def _loop_in_a_loop() -> None:
    ops.Copy("x", "y")
    outer = _while("i", "n")
    ops.Sub(["one", "one"], "j")
    ops.Sigmoid("y", "r")
    ops.Copy("r", "s")
    inner = _while("j", "two")
    ops.Copy("s", "t")
    ops.Mul(["t", "w"], "u")
    ops.Sin("u", "s")
    inner.__exit__(None, None, None)
    ops.Add(["s", "y"], "y")
    outer.__exit__(None, None, None)
    ops.SumElements("y", "loss")


def _a_branch_that_leaves_it_alone() -> None:
    ops.Mul(["x", "w"], "y")
    with ops.IfNet("flag"):
        ops.Copy("y", "before")
        ops.Mul(["before", "before"], "y")
    ops.SumElements("y", "loss")


def _rows() -> None:
    """A gradient of rows, and a state that each turn writes without reading it."""
    ops.Mul(["x", "x"], "s")
    ops.Copy("x", "y")
    block = _while("i", "n")
    ops.Gather(["w", "two"], "row")
    ops.Copy("s", "held")
    ops.Sqr("held", "t")
    ops.Mul(["t", "row"], "y", broadcast=1)
    ops.Mul(["held", "x"], "v")
    ops.Cos("v", "s")
    block.__exit__(None, None, None)
    ops.SumElements("y", "loss")


def _of_branches_in_a_loop(x: Array, w: Array, n: int) -> float:
    y = x
    for i in range(1, n + 1):
        y = np.tanh(y * w) if i > 2 else y * w * y
    return float(y.sum())


def _of_loop_in_a_loop(x: Array, w: Array, n: int) -> float:
    y = x
    for _ in range(n):
        s = 1 / (1 + np.exp(-y))
        for _ in range(2):
            s = np.sin(s * w)
        y = y + s
    return float(y.sum())


def _of_branch(x: Array, w: Array, n: int) -> float:
    return float(((x * w) ** 2 if n else x * w).sum())


def _of_rows(x: Array, w: Array, n: int) -> float:
    s, y = x * x, x
    for _ in range(n):
        y = s**2 * w[2]
        s = np.cos(s * x)
    return float(y.sum())


def _numeric(function: Function, x: Array, w: Array, n: int) -> list[Array]:
    step = 1e-6 * np.eye(3)
    return [
        np.array([(function(x + e, w, n) - function(x - e, w, n)) / 2e-6 for e in step]),
        np.array([(function(x, w + e, n) - function(x, w - e, n)) / 2e-6 for e in step]),
    ]


@pytest.mark.parametrize("turns", [0, 4])
@pytest.mark.parametrize(
    ("build", "function"),
    [
        (_branches_in_a_loop, _of_branches_in_a_loop),
        (_loop_in_a_loop, _of_loop_in_a_loop),
        (_a_branch_that_leaves_it_alone, _of_branch),
        (_rows, _of_rows),
    ],
)  # fmt: skip
def test_gradients(build: Callable[[], None], function: Function, turns: int) -> None:
    net = _built(build)
    gradients = net.AddGradientOperators(["loss"])
    feeds = FEEDS | {"n": np.array(turns), "flag": np.array(turns > 0)}
    expected = _numeric(function, feeds["x"].astype(float), feeds["w"].astype(float), turns)
    bytes_of: list[bytes] = []
    for net_type in ("simple", "dag", "async_dag") if turns else ("simple",):
        here = Workspace()
        for name, value in feeds.items():
            here.feed_blob(name, value)
        made = here.create_net(net.Proto(), net_type, 2)
        made.run()
        found = [here.fetch_blob(str(gradients[name])) for name in ("x", "w")]
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
        bytes_of.append(b"".join(one.tobytes() for one in found))
        assert check_net(made).holds  # type: ignore[arg-type]
        made.close()
    assert len(set(bytes_of)) == 1


def test_a_script_with_a_loop_trains() -> None:
    """A power of a matrix, learned by descent."""
    workspace.ResetWorkspace()
    target = np.array([[0.4, 0.3], [-0.2, 0.5]], np.float32)
    for name, value in {"w": np.eye(2, dtype=np.float32), "wanted": target @ target @ target, **_counts()}.items():
        workspace.FeedBlob(name, value)

    def build() -> None:
        ops.Sub(["i", "i"], "i")
        ops.Copy("w", "y")
        block = _while("i", "two")
        ops.Copy("y", "before")
        ops.MatMul(["before", "w"], "y")
        block.__exit__(None, None, None)
        ops.SquaredL2Distance(["y", "wanted"], "distance")
        ops.SumElements("distance", "loss")

    net = _built(build)
    gradient = net.AddGradientOperators(["loss"])["w"]
    net.WeightedSum(["w", "unit", gradient, "rate"], "w")
    workspace.CreateNet(net)
    w = np.eye(2)
    for _ in range(30):
        workspace.RunNet(net)
        error = w @ w @ w - target.astype(float) @ target @ target
        w = w - 0.05 * (error @ (w @ w).T + w.T @ error @ w.T + (w @ w).T @ error)
    np.testing.assert_allclose(workspace.FetchBlob("w"), w, rtol=1e-4, atol=1e-5)
    assert not [name for name in workspace.Blobs() if ":" in name]


def _counts() -> dict[str, Array]:
    rates = {"unit": np.ones(1, np.float32), "rate": np.array([-0.05], np.float32)}
    return {name: FEEDS[name] for name in ("i", "one", "two")} | rates


def test_subnets_without_workspaces_have_gradients_in_branches_alone() -> None:
    then, other = (
        NetDef(op=[op("Sqr", ["x"], ["t"]), op("Negative", ["t"], ["y"])]),
        NetDef(op=[op("Copy", ["x"], ["y"])]),
    )
    branch = op("If", ["flag", "x"], ["y"], then_net=then, else_net=other)
    net = NetDef(name="flat", op=[branch, op("SumElements", ["y"], ["loss"])])
    gradients = add_gradient_operators(net, ["loss"], wanted=["x"])
    for flag in (True, False):
        here = Workspace()
        here.feed_blob("flag", np.array(flag))
        here.feed_blob("x", FEEDS["x"])
        here.run_net_once(net)
        expected = -2 * FEEDS["x"] if flag else np.ones(3)
        np.testing.assert_allclose(here.fetch_blob(str(gradients["x"])), expected, rtol=1e-6)
    loop = op("While", ["go", "y", "x"], ["y"], loop_net=NetDef(op=[op("Mul", ["x", "x"], ["y"])]))
    net = NetDef(op=[loop, op("SumElements", ["y"], ["loss"])])
    with pytest.raises(GradientError, match="must be a single Do"):
        add_gradient_operators(net, ["loss"])


def test_what_a_condition_changes_has_no_gradient() -> None:
    with NetBuilder(_use_control_ops=True, initial_scope=["y", "x", "limit"]) as builder:
        with ops.WhileNet():
            with ops.Condition():
                ops.Mul(["x", "x"], "y")
                ops.LT(["y", "limit"])
            ops.Add(["y", "x"], "y")
        ops.SumElements("y", "loss")
    with pytest.raises(GradientError, match=r"which changes \['y'\]"):
        builder._net().AddGradientOperators(["loss"])
