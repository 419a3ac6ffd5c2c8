"""Bad values that kernels find: every kind of net ends its run with the host's error, and goes on with the next one."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import INT64
from dagexec.core.model import InputInfo, Model
from dagexec.devices.cuda.pinned_flags import PAGE_WORDS, PinnedFlags
from dagexec.errors import OperatorError
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.captured import CapturedNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.nets.simple import SimpleNet
from tests.cuda.emulated import cuda_devices, emulated
from tests.cuda.test_nets import X, branches
from tests.ops.running import operator_def

CUDA = Device("cuda", 0)
NETS = (SimpleNet, DAGNet, AsyncDAGNet, CapturedNet)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
GOOD, BAD = np.array([3, 0, 2]), np.array([0, 7, -1])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def gathering(device: Device = CUDA, *, scaled: bool = False) -> NetDef:
    """y = tanh(rows[i]), beside another branch; with `scaled`, i is computed by the net."""
    index = [operator_def("Mul", ["i", "one"], ["j"])] if scaled else []
    ops = [
        *index,
        operator_def("Gather", ["rows", "j" if scaled else "i"], ["g"]),
        operator_def("Tanh", ["g"], ["y"]),
        operator_def("Abs", ["rows"], ["z"]),
        operator_def("Tanh", ["z"], ["z"]),
    ]
    return NetDef(name="gathering", op=ops, external_input=["rows", "i"], device_option=device.to_option())


def rows_at(indices: Any) -> Workspace:
    workspace = Workspace()
    workspace.feed_blob("rows", ROWS)
    workspace.feed_blob("i", indices)
    return workspace


def made(net_class: type[BaseNet], definition: NetDef, workspace: Workspace) -> BaseNet:
    options: dict[str, Any] = {} if net_class is SimpleNet else {"num_workers": 2}
    return net_class(definition, workspace, **options)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("net_class", NETS)
def test_a_bad_index_ends_the_run_with_the_hosts_error_and_the_next_run_is_good(
    net_class: type[BaseNet], asynchronous: bool
) -> None:
    with made(SimpleNet, gathering(CPU), rows_at(BAD)) as host, pytest.raises(OperatorError) as on_host:
        host.run()
    with emulated(asynchronous=asynchronous, seed=5 if asynchronous else None) as machine:
        workspace = rows_at(GOOD)
        with made(net_class, gathering(), workspace) as net:
            for indices in (GOOD, GOOD, BAD, GOOD, GOOD, BAD, BAD, GOOD, GOOD):
                workspace.feed_blob("i", indices)
                if indices is GOOD:
                    net.run(timeout=60)
                    np.testing.assert_allclose(workspace.fetch_blob("y"), np.tanh(ROWS[GOOD]), rtol=1e-5)
                    continue
                with pytest.raises(OperatorError, match=r"index 7 at place 1 must be in \[-4, 4\)") as caught:
                    net.run(timeout=60)
                cause = caught.value.__cause__
                assert isinstance(cause, IndexError)
                assert str(cause).partition(":")[2] == str(on_host.value.__cause__).partition(":")[2]
                assert caught.value.net == "gathering"
                assert "Gather" in caught.value.operator
                assert "of net 'gathering'" in caught.value.operator
        assert machine.races == []


def test_a_replay_finds_a_bad_index_too() -> None:
    with emulated() as machine:
        workspace = rows_at(GOOD)
        with made(CapturedNet, gathering(), workspace) as net:
            for _ in range(3):
                net.run()
            workspace.feed_blob("i", BAD)
            machine.calls.clear()
            with pytest.raises(OperatorError, match="index 7 at place 1"):
                net.run()
            assert [call.name for call in machine.calls].count("graphLaunch") == 1


def test_good_runs_cost_nothing_more_on_the_device() -> None:
    with emulated() as machine:
        workspace = rows_at(GOOD)
        with made(SimpleNet, gathering(), workspace) as net:
            net.run()
            calls = []
            for check in (True, False):
                net.checked = net.checked if check else ()
                machine.calls.clear()
                net.run()
                calls.append([call.name for call in machine.calls])
        assert calls[0] == calls[1]
        workspace.feed_blob("x", X)
        with made(AsyncDAGNet, branches(), workspace) as net:
            assert net.checked == ()


@pytest.mark.parametrize("net_class", NETS)
def test_of_several_faults_the_first_in_the_list_is_told_and_all_are_forgotten(net_class: type[BaseNet]) -> None:
    ops = [
        operator_def("Abs", ["rows"], ["a"]),
        operator_def("Gather", ["a", "i"], ["first"]),
        operator_def("Gather", ["rows", "i"], ["second"]),
    ]
    definition = NetDef(name="twice", op=ops, external_input=["rows", "i"], device_option=CUDA.to_option())
    with cuda_devices():
        workspace = rows_at(BAD)
        with made(net_class, definition, workspace) as net:
            with pytest.raises(OperatorError, match="'first'") as caught:
                net.run()
            assert not hasattr(caught.value, "__notes__")
            workspace.feed_blob("i", GOOD)
            net.run()


@pytest.mark.parametrize("net_class", NETS)
def test_steps_for_another_shape_have_a_word_of_their_own(net_class: type[BaseNet]) -> None:
    with cuda_devices():
        workspace = rows_at(GOOD)
        with made(net_class, gathering(), workspace) as net:
            for indices in (GOOD, np.array([1]), GOOD + 9, np.array([1]), np.array([-5]), GOOD, GOOD + 4):
                workspace.feed_blob("i", indices)
                wrong = [value for value in indices if not -4 <= value < 4]
                if wrong:
                    with pytest.raises(OperatorError, match=f"index {wrong[0]} at place"):
                        net.run()
                else:
                    net.run()


def test_words_are_given_back_with_the_steps() -> None:
    with cuda_devices():
        workspace = rows_at(GOOD)
        with SimpleNet(gathering(), workspace, options=RunOptions(preparation_bytes=0)) as net:
            for size in range(1, 9):
                workspace.feed_blob("i", np.zeros(size, np.int64))
                net.run()
            gc.collect()
            [gather] = [one for one in net.operators if isinstance(one, CheckedOperator)]
            assert sum(known() is not None for known in gather._faults) == 1
            words = gather.runtime.once("host words", PinnedFlags)  # type: ignore[arg-type]
            taken = PAGE_WORDS - len(words._free)
            assert taken == 1


def model_of(net: NetDef, parameters: dict[str, Any]) -> Model:
    inputs = {"i": InputInfo(INT64, (None,))}
    return Model("gathering", net, None, parameters, inputs, ("y",))


@pytest.mark.slow
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_calls_of_an_executor_fail_for_themselves_alone(net_type: str, asynchronous: bool, capture: bool) -> None:
    if capture and net_type != "async_dag":
        pytest.skip("captured nets are asynchronous")
    model = model_of(gathering(CPU, scaled=True), {"rows": ROWS, "one": np.ones(1, np.int64)})
    with (
        emulated(asynchronous=asynchronous, record=False) as machine,
        dagexec.compile(model, device="cuda:0", net_type=net_type, replicas=2, num_workers=2, capture=capture) as found,
    ):
        feeds = [BAD if number % 3 == 1 else np.roll(GOOD, number) for number in range(12)]
        calls = (found.run_async({"i": feed}, timeout=60) for feed in feeds)
        for feed, outputs in zip(feeds, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if feed is BAD:
                assert isinstance(outputs, OperatorError)
                assert "index 7 at place 1 must be in [-4, 4)" in str(outputs)
            else:
                np.testing.assert_allclose(outputs["y"], np.tanh(ROWS[feed]), rtol=1e-5)
        with pytest.raises(OperatorError, match="index 7 at place 1"):
            found.run({"i": BAD})
        found.run({"i": GOOD})
        assert machine.races == []


def feed(**arrays: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(array) for name, array in arrays.items()}


F = np.float32
ROW, TABLE, LOGITS = np.ones((1, 3), F), np.ones((4, 3), F), np.full((2, 3), 1 / 3, F)
SEQUENCES = {"x": np.ones((3, 2, 2), F), "w": np.ones((1, 8, 2), F), "r": np.ones((1, 8, 2), F)}
YELLOW = {name: np.ones(3, F) for name in ("p", "m", "mean", "square", "g")} | {
    name: np.ones(size, F) for name, size in (("rate", 1), ("factor", 1), ("window", 20), ("scalars", 5))
}
CASES: dict[str, tuple[OperatorDef, dict[str, Any]]] = {
    "BatchGather": (operator_def("BatchGather", ["x", "i"], ["y"]), feed(x=TABLE, i=[3])),
    "empty Gather": (operator_def("Gather", ["x", "i"], ["y"]), feed(x=TABLE[:, :0], i=[4])),
    "OneHot": (operator_def("OneHot", ["i", "n"], ["y"]), feed(i=[0, -1], n=[2])),
    "SparseToDense": (operator_def("SparseToDense", ["i", "v", "x"], ["y"]), feed(i=[4], v=ROW, x=TABLE)),
    "GatherGradient": (operator_def("GatherGradient", ["x", "i", "dy"], ["dx"]), feed(x=TABLE, i=[4], dy=ROW)),
    "ScatterAssign": (operator_def("ScatterAssign", ["x", "i", "v"], ["x"]), feed(x=TABLE, i=[4], v=ROW)),
    "empty ScatterAssign": (
        operator_def("ScatterAssign", ["x", "i", "v"], ["x"]),
        feed(x=TABLE[:, :0], i=[4], v=ROW[:, :0]),
    ),
    "ScatterWeightedSum": (
        operator_def("ScatterWeightedSum", ["x", "one", "i", "v", "w"], ["x"]),
        feed(x=TABLE, one=np.ones(1, F), i=[-1], v=ROW, w=np.ones(1, F)),
    ),
    "SparseAdagrad": (
        operator_def("SparseAdagrad", ["p", "m", "i", "g", "lr"], ["p", "m"]),
        feed(p=TABLE, m=TABLE, i=[9], g=ROW, lr=np.ones(1, F)),
    ),
    "Adam": (
        operator_def("Adam", ["p", "m", "s", "g", "lr", "t"], ["p", "m", "s"]),
        feed(p=ROW, m=ROW, s=ROW, g=ROW, lr=np.ones(1, F), t=[-2]),
    ),
    "YellowFin": (
        operator_def(
            "YellowFin",
            ["p", "m", "rate", "factor", "window", "mean", "square", "scalars", "g", "t"],
            ["p", "m", "rate", "factor", "window", "mean", "square", "scalars"],
        ),
        feed(**YELLOW, t=[0]),
    ),
    "LabelCrossEntropy": (
        operator_def("LabelCrossEntropy", ["x", "t"], ["y"]),
        feed(x=LOGITS, t=np.array([0, 3], np.int32)),
    ),
    "Accuracy": (operator_def("Accuracy", ["x", "t"], ["y"]), feed(x=LOGITS, t=np.array([0, -3], np.int32))),
    "SoftmaxWithLoss": (
        operator_def("SoftmaxWithLoss", ["x", "t"], ["p", "y"]),
        feed(x=LOGITS, t=np.array([5, 3], np.int32)),
    ),
    "distribution": (
        operator_def("SoftmaxWithLoss", ["x", "t"], ["p", "y"], label_prob=1),
        feed(x=LOGITS, t=LOGITS * np.array([[1], [2]], F)),
    ),
    "SliceGradient": (
        operator_def("SliceGradient", ["x", "b", "e", "dy"], ["dx"]),
        feed(x=TABLE, b=[0, 0], e=[2, 3], dy=ROW),
    ),
    "LSTM": (
        operator_def("LSTM", ["x", "w", "r", "n"], ["y"], hidden_size=2, sequence_lengths=1),
        feed(**SEQUENCES, n=np.array([3, 4], np.int32)),
    ),
    "QuantizeLinear": (operator_def("QuantizeLinear", ["x", "s"], ["y"]), feed(x=TABLE, s=np.float32(0))),
    "DequantizeLinear": (
        operator_def("DequantizeLinear", ["x", "s"], ["y"]),
        feed(x=TABLE.astype(np.int8), s=np.float32(np.nan)),
    ),
}


def error_on(device: Device, definition: OperatorDef, feeds: dict[str, Any]) -> OperatorError:
    workspace = Workspace()
    for name, array in feeds.items():
        workspace.feed_blob(name, array.copy())
    net = NetDef(name="n", op=[definition], external_input=list(feeds), device_option=device.to_option())
    with SimpleNet(net, workspace) as running:
        if device == CUDA:
            assert running.checked
        with pytest.raises(OperatorError) as caught:
            running.run()
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_what_the_host_raises_at_run_time_is_raised_on_cuda(name: str) -> None:
    definition, feeds = CASES[name]
    wanted = error_on(CPU, definition, feeds)
    with cuda_devices():
        found = error_on(CUDA, definition, feeds)
    assert type(found.__cause__) is type(wanted.__cause__)
    one, other = (str(error.__cause__).partition("of net")[2].partition(":")[2] for error in (found, wanted))
    assert one.replace("@cuda:0", "") == other
    assert other


def explained_late(change: Callable[[BaseNet], None]) -> OperatorError:
    """The error when the indices were replaced before anybody could look at them."""
    with cuda_devices():
        workspace = rows_at(BAD)
        with made(SimpleNet, gathering(), workspace) as net:
            change(net)
            with pytest.raises(OperatorError) as caught:
                net.run()
            return caught.value


def test_where_the_bad_value_is_gone_the_error_says_less() -> None:
    def forget(net: BaseNet) -> None:
        [gather] = [one for one in net.operators if isinstance(one, CheckedOperator)]
        gather._check_indices = lambda *_: None  # type: ignore[method-assign]

    assert str(explained_late(forget).__cause__).endswith("an index was not in [-4, 4)")


def test_indices_that_the_net_computes_are_kept_until_they_can_be_told() -> None:
    with cuda_devices():
        definition = gathering(scaled=True)
        definition.op.extend([operator_def("Add", ["i", "one"], ["k"]), operator_def("Add", ["k", "one"], ["l"])])
        workspace = rows_at(BAD)
        workspace.feed_blob("one", np.ones(1, np.int64))
        with SimpleNet(definition, workspace, keep=frozenset({"y", "l"})) as net:
            assert net.keep is not None
            assert any(name.startswith("j") for name in net.keep)
            with pytest.raises(OperatorError, match="index 7 at place 1"):
                net.run()
