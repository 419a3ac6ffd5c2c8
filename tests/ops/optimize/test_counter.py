"""Iteration counters."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.proto import OperatorDef
from dagexec.errors import BlobTypeError, DagexecError, SchemaError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.optimize.updating import DEVICES, counter, run_steps
from tests.ops.running import Array, operator_def, workspace_of

LARGEST = np.iinfo(np.int64).max


def atomic_net(devices: str = "cpu") -> NetDef:
    """A mutex and a counter that is incremented twice."""
    count = operator_def("AtomicIter", ["mutex", "i"], ["i"])
    return NetDef(name="test", op=[operator_def("CreateMutex", [], ["mutex"]), count, count])


@pytest.mark.parametrize("device", DEVICES)
def test_a_counter_counts_runs(device: str) -> None:
    result = run_steps("Iter", ["i"], ["i"], {"i": counter(5)}, [{}] * 3, device=device)
    assert result["i"].tolist() == [8]
    assert result["i"].dtype == np.int64


def test_a_counter_without_input_begins_at_one_and_goes_on() -> None:
    workspace, net = Workspace(), NetDef(name="test", op=[operator_def("Iter", [], ["i"])])
    for expected in (2, 4):
        with SimpleNet(net, workspace) as made:
            made.run()
            made.run()
        assert workspace.fetch_blob("i").tolist() == [expected]


def test_a_counter_without_input_goes_on_from_what_is_fed() -> None:
    assert run_steps("Iter", [], ["i"], {"i": counter(41)}, [{}])["i"].tolist() == [42]


def test_an_atomic_counter_counts_under_its_mutex() -> None:
    workspace = workspace_of({"i": counter(0)})
    with SimpleNet(atomic_net(), workspace) as net:
        for _ in range(3):
            net.run()
    assert workspace.fetch_blob("i").tolist() == [6]


def test_two_nets_share_an_atomic_counter() -> None:
    workspace = workspace_of({"i": counter(0)})
    workspace.run_net_once(NetDef(name="init", op=[operator_def("CreateMutex", [], ["mutex"])]))
    count = NetDef(name="count", op=[operator_def("AtomicIter", ["mutex", "i"], ["i"])])
    with workspace.create_net(count, "dag", 2) as one, SimpleNet(count, workspace) as other:
        for _ in range(5):
            one.run()
            other.run()
    assert workspace.fetch_blob("i").tolist() == [10]


def test_a_mutex_that_is_there_stays() -> None:
    workspace = Workspace()
    with SimpleNet(NetDef(name="init", op=[operator_def("CreateMutex", [], ["mutex"])]), workspace) as net:
        net.run()
        first = workspace.get_blob("mutex").value
        net.run()
    assert workspace.get_blob("mutex").value is first


@pytest.mark.parametrize("value", [-1, LARGEST])
def test_a_counter_that_cannot_go_on_is_refused_and_stays(value: int) -> None:
    workspace = workspace_of({"i": counter(value)})
    expected = "must be at least 0, found -1" if value < 0 else "is the largest int64"
    with (
        SimpleNet(NetDef(name="test", op=[operator_def("Iter", ["i"], ["i"])]), workspace) as net,
        pytest.raises(DagexecError, match=expected),
    ):
        net.run()
    assert workspace.fetch_blob("i").tolist() == [value]


def test_a_learning_rate_of_a_negative_iteration_is_refused() -> None:
    with pytest.raises(DagexecError, match="must be at least 0, found -3"):
        run_steps("LearningRate", ["i"], ["r"], {"i": counter(-3)}, [{}], base_lr=0.1, policy="fixed")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(2, np.int64), r"must have one element, found shape \(2,\)"),
        (np.zeros(1, np.int32), "must be one of int64, found int32"),
    ],
)
def test_a_counter_is_one_int64(array: Array, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        run_steps("Iter", ["i"], ["i"], {"i": array}, [{}])
    with pytest.raises(ShapeError, match=message):
        run_steps("LearningRate", ["i"], ["r"], {"i": array}, [{}], base_lr=0.1, policy="fixed")


@pytest.mark.parametrize(
    "definition", [operator_def("Iter", ["i"], ["j"]), operator_def("AtomicIter", ["m", "i"], ["j"])], ids=str
)
def test_counters_are_in_place(definition: OperatorDef) -> None:
    workspace = Workspace()
    for name in definition.input:
        workspace.feed_blob(name, counter(0))
    with pytest.raises(SchemaError, match="must overwrite input"):
        SimpleNet(NetDef(name="test", op=[definition]), workspace)


def test_a_mutex_must_be_one() -> None:
    with pytest.raises(BlobTypeError, match="holds a Tensor; expected a Mutex"):
        run_steps("AtomicIter", ["m", "i"], ["i"], {"m": counter(0), "i": counter(0)}, [{}])
