"""Nets on the simulated device: SimpleNet's bytes, events only where they are needed, a host that is not held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Event, Stream
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import DagexecError, DeviceError, OperatorError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization
from tests.nets import net_of, temporary_operator
from tests.scheduler.nets.test_results import INPUTS, SHAPE, arithmetic_nets, run_repeatedly

SIM = Device("sim", 0)
NETS = (SimpleNet, DAGNet, AsyncDAGNet)


def on_devices(net: NetDef, devices: list[Device]) -> NetDef:
    """A copy of `net` whose operators are on `devices`, in turn."""
    placed = NetDef()
    placed.CopyFrom(net)
    for index, definition in enumerate(placed.op):
        definition.device_option.CopyFrom(devices[index % len(devices)].to_option())
    return placed


def blobs_after(net_class: type[BaseNet], definition: NetDef, times: int = 3, **options: Any) -> list[dict[str, bytes]]:
    """What every blob of the definition holds after each of several runs."""
    workspace = Workspace()
    random = np.random.default_rng(0)
    for name in INPUTS:
        workspace.feed_blob(name, random.standard_normal(SHAPE).astype(np.float32))
    names = {name for op in definition.op for name in (*op.input, *op.output)} | set(INPUTS)
    found = []
    with net_class(definition, workspace, **options) as net:
        for _ in range(times):
            net.run(timeout=60)
            found.append({name: workspace.fetch_blob(name).tobytes() for name in sorted(names)})
    return found


@pytest.mark.slow
@given(
    arithmetic_nets(),
    st.sampled_from(NETS),
    st.lists(st.sampled_from([Device(), SIM, Device("sim", 1)]), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 2),
    st.one_of(st.none(), st.integers(0, 100)),
)
@settings(max_examples=100, deadline=None)
def test_every_blob_has_the_bytes_of_a_run_in_list_order_on_the_host(
    definition: NetDef,
    net_class: type[BaseNet],
    devices: list[Device],
    workers: int,
    streams: int,
    seed: int | None,
) -> None:
    try:
        host = run_repeatedly(SimpleNet, definition, 1, 3)
    except DagexecError:
        return  # a net that SimpleNet refuses says nothing about the others
    options: dict[str, Any] = {"options": RunOptions(streams_per_worker=streams)}
    if net_class is not SimpleNet:
        options["num_workers"] = workers
    with simulated(SIM, seed=seed), simulated(Device("sim", 1), seed=seed):
        found = blobs_after(net_class, on_devices(definition, devices), **options)
    assert [{name: run[name] for name in host[0]} for run in found] == host


@pytest.mark.slow
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
@pytest.mark.parametrize("model", ["zoo:lenet", "zoo:squeezenet"])
def test_a_model_gives_the_bytes_of_the_host(model: str, net_type: str) -> None:
    loaded = dagexec.load_model(model) if hasattr(dagexec, "load_model") else model
    feeds = {"data": np.random.default_rng(0).standard_normal(input_shape(model)).astype(np.float32)}
    with dagexec.compile(loaded, optimize=False, net_type="simple") as host:
        expected = host.run(feeds)
    with (
        simulated(SIM, seed=1),
        dagexec.compile(
            loaded, optimize=False, net_type=net_type, num_workers=2, replicas=2, device="sim:0"
        ) as executor,
    ):
        for _ in range(3):
            assert_same(executor.run(feeds, timeout=60), expected)


def input_shape(model: str) -> tuple[int, ...]:
    with dagexec.compile(model, optimize=False, net_type="simple") as executor:
        shape = executor.inputs["data"].shape
    assert shape is not None
    return tuple(size or 1 for size in shape)


def assert_same(found: Mapping[str, npt.NDArray[Any]], expected: Mapping[str, npt.NDArray[Any]]) -> None:
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


class Recorder(Observer):
    """Keeps what was asked of streams."""

    def __init__(self) -> None:
        self.recorded_on: list[str] = []
        self.waits_of: list[tuple[str, str]] = []

    def recorded(self, stream: Stream, event: Event) -> None:
        if event.owner.startswith("chain"):
            self.recorded_on.append(event.owner)

    def waits(self, stream: Stream, event: Event) -> None:
        assert event.stream is not None
        self.waits_of.append((event.stream.name, stream.name))


DIAMONDS = [[], [0], [0], [1, 2], [3], [3], [4, 5]]


def run_observed(parents: list[list[int]], workers: int, **options: Any) -> Recorder:
    recorder = Recorder()
    with (
        simulated(SIM),
        AsyncDAGNet(on_devices(net_of(parents), [SIM]), Workspace(), num_workers=workers, **options) as net,
    ):
        net.run(trace=recorder)
    return recorder


def test_one_stream_needs_no_event() -> None:
    recorder = run_observed(DIAMONDS, workers=1)
    assert recorder.recorded_on == []
    assert recorder.waits_of == []


def test_every_event_is_recorded_once_and_only_where_a_chain_depends_on_it() -> None:
    recorder = run_observed(DIAMONDS, workers=3)
    with AsyncDAGNet(net_of(DIAMONDS), Workspace(), num_workers=3) as net:
        needed = [f"chain {n} of net 'net'" for n, children in enumerate(net.plan.children) if children]
    assert sorted(recorder.recorded_on) == sorted(needed)


def test_a_stream_never_waits_for_itself() -> None:
    recorder = run_observed(DIAMONDS, workers=1, options=RunOptions(streams_per_worker=3))
    assert recorder.recorded_on
    assert all(waited != waiting for waited, waiting in recorder.waits_of)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Operators of type Held wait on the device until it is set."""
    opened = threading.Event()
    with temporary_operator("Held", lambda _operator: opened.wait(60)):
        yield opened
        opened.set()


def test_the_host_launches_everything_while_the_device_stands_still(gate: threading.Event) -> None:
    """Chains that depend on each other across streams: no dependency on the device holds a worker up."""
    parents = [[], [0], [0], [1, 2], [3], [3], [4, 5]]
    definition = on_devices(net_of(parents), [SIM])
    definition.op[0].type = "Held"
    with simulated(SIM), AsyncDAGNet(definition, Workspace(), num_workers=2) as net:
        gate.set()
        net.run()  # prepared, and the streams are leased
        gate.clear()
        before = runtime_of(SIM).statistics().launches
        launched = threading.Event()
        over = threading.Event()
        last = net.plan.chains[-1]

        class Watch(Observer):
            def chain_stopped(self, run: object, chain: int, *_rest: object) -> None:  # type: ignore[override]
                if chain == net.plan.chains.index(last):
                    launched.set()

        runner = threading.Thread(target=lambda: (net.run(trace=Watch()), over.set()))
        runner.start()
        assert launched.wait(30), "the last chain is not launched before the first has run"
        assert not over.is_set()
        assert runtime_of(SIM).statistics().launches - before == len(parents)
        gate.set()
        runner.join(30)
        assert over.is_set()


def test_a_host_chain_waits_for_the_device_chain_it_reads(gate: threading.Event) -> None:
    order: list[str] = []
    with temporary_operator("Note", lambda operator: order.append(operator.label)):
        net = net_of([[], [0]], op_type="Note")
        net.op[0].type = "Held"
        net.op[0].device_option.CopyFrom(SIM.to_option())
        with simulated(SIM), AsyncDAGNet(net, Workspace(), num_workers=2) as running:
            runner = threading.Thread(target=running.run)
            runner.start()
            assert order == []
            gate.set()
            runner.join(30)
    assert len(order) == 1


def test_an_operator_that_fails_on_the_device_is_named_and_the_net_runs_again() -> None:
    failing = [True]

    def body(operator: Operator) -> None:
        if failing[0]:
            raise ValueError("on purpose")

    with temporary_operator("Fail", body):
        definition = on_devices(net_of([[], [0], [0], [1, 2]]), [SIM])
        definition.op[1].type = "Fail"
        for net_class in NETS:
            failing[0] = True
            options = {} if net_class is SimpleNet else {"num_workers": 2}
            with simulated(SIM), net_class(definition, Workspace(), **options) as net:
                with pytest.raises(OperatorError, match=r"Fail 'b1' \(operator 1\).*on purpose") as caught:
                    net.run()
                assert isinstance(caught.value.__cause__, ValueError)
                assert all(stream.failure is None and stream.is_idle for stream in net.streams.all())
                failing[0] = False
                net.run()


def test_streams_are_leased_once_and_given_back() -> None:
    with simulated(SIM):
        net = AsyncDAGNet(
            on_devices(net_of(DIAMONDS), [SIM]), Workspace(), num_workers=2, options=RunOptions(streams_per_worker=2)
        )
        for _ in range(5):
            net.run()
        assert runtime_of(SIM).statistics().leased <= 4
        net.close()
        assert runtime_of(SIM).statistics().leased == 0


def conv_net(**arguments: object) -> NetDef:
    """Four convolutions side by side, and their sum."""
    net = NetDef(name="branches", external_input=["x", "w"])
    for index in range(4):
        definition = net.op.add(type="Conv", input=["x", "w"], output=[f"y{index}"])
        definition.arg.add(name="kernel", i=3)
        for name, value in arguments.items():
            if name == "engine":
                definition.engine = str(value)
            else:
                definition.arg.add(name=name, i=int(str(value)))
    net.op.add(type="Sum", input=[f"y{index}" for index in range(4)], output=["z"])
    return net


def conv_bytes(net: NetDef, device: str, workers: int) -> bytes:
    random = np.random.default_rng(0)
    workspace = Workspace()
    workspace.feed_blob("x", random.standard_normal((1, 4, 12, 12)).astype(np.float32))
    workspace.feed_blob("w", random.standard_normal((4, 4, 3, 3)).astype(np.float32))
    dagexec.create_shared_buffer(workspace, device)
    with AsyncDAGNet(on_devices(net, [Device.parse(device)]), workspace, num_workers=workers) as running:
        for _ in range(5):
            running.run(timeout=60)
        return workspace.fetch_blob("z").tobytes()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_convolutions_take_turns_at_the_shared_buffer_of_a_device(seed: int | None) -> None:
    net = conv_net(shared_buffer=1)
    with simulated(SIM, seed=seed):
        assert conv_bytes(net, "sim:0", 3) == conv_bytes(net, "cpu", 1)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_convolutions_take_turns_at_a_library_state(seed: int | None) -> None:
    net = conv_net(engine="CUDNN", cudnn_state=1)
    with simulated(SIM, seed=seed):
        assert conv_bytes(net, "sim:0", 3) == conv_bytes(net, "cpu", 1)
        assert runtime_of(SIM).statistics().leased == 1  # the state's own


def test_an_operator_that_reads_another_device_is_refused_by_name() -> None:
    workspace = Workspace()
    with simulated(SIM):
        workspace.feed_blob("x", np.zeros(3, np.float32), device="sim:0")
        net = NetDef(name="net", op=[dagexec.OperatorDef(type="Relu", input=["x"], output=["y"])])
        graph = SimpleNet(NetDef(name="net"), workspace).graph
        del graph
        with SimpleNet(net, workspace) as running:
            running.run()  # a copy was put in
        assert workspace.fetch_blob("y").tolist() == [0, 0, 0]
        with pytest.raises(DeviceError, match="the host touches elements"):
            workspace.get_blob("x").get(dagexec.core.tensor.Tensor).array + 1


def test_an_executor_leases_streams_for_each_worker_and_replica() -> None:
    feeds = {"data": np.zeros(input_shape("zoo:lenet"), np.float32)}
    with simulated(SIM) as runtime:
        options: dict[str, Any] = {"num_workers": 1, "replicas": 2, "streams_per_worker": 3}
        with dagexec.compile("zoo:lenet", optimize=False, net_type="async_dag", device="sim:0", **options) as executor:
            for _ in range(4):
                executor.run(feeds)
            assert runtime.statistics().leased == 6
        assert runtime.statistics().leased == 0
        assert runtime.statistics().busy == 0


def test_the_streams_of_an_executor_have_the_priority_that_was_asked_for() -> None:
    feeds = {"data": np.zeros(input_shape("zoo:lenet"), np.float32)}
    with simulated(SIM):
        for priority in ("normal", "high"):
            with dagexec.compile(
                "zoo:lenet", optimize=False, net_type="dag", device="sim:0", stream_priority=priority
            ) as executor:
                executor.run(feeds)
                assert {stream.priority.name.lower() for stream in executor.net().streams.all()} == {priority}
    with pytest.raises(ValueError, match="stream_priority is 'normal' or 'high', not 'urgent'"):
        dagexec.compile("zoo:lenet", optimize=False, stream_priority="urgent")


def test_the_observer_of_a_device_is_told_of_runs_that_nobody_else_observes() -> None:
    always, once = Recorder(), Recorder()
    with simulated(SIM, observer=always):
        definition = on_devices(net_of(DIAMONDS), [SIM])
        with AsyncDAGNet(definition, Workspace(), num_workers=1, options=RunOptions(streams_per_worker=2)) as net:
            net.run()
            first = len(always.recorded_on)
            net.run(trace=once)
            assert len(always.recorded_on) == first
            net.run()
    assert first == len(once.recorded_on) > 0
    assert len(always.recorded_on) == 2 * first


@pytest.mark.parametrize("net_class", NETS)
def test_threads_that_come_and_go_leave_no_streams_behind(net_class: type[BaseNet]) -> None:
    options: dict[str, Any] = {} if net_class is SimpleNet else {"num_workers": 2}
    with simulated(SIM) as runtime, net_class(on_devices(net_of(DIAMONDS), [SIM]), Workspace(), **options) as net:
        for _ in range(10):
            caller = threading.Thread(target=net.run)
            caller.start()
            caller.join(30)
        assert runtime.statistics().leased <= 2


def test_the_end_of_a_run_that_is_announced_twice_comes_when_every_stream_is_done(gate: threading.Event) -> None:
    """As by the worker that takes the place of one that died while it announced it."""
    other_gate = threading.Event()
    definition = on_devices(net_of([[], []], op_type="Held"), [SIM])
    definition.op[1].type = "HeldToo"
    with (
        temporary_operator("HeldToo", lambda _operator: other_gate.wait(60)),
        simulated(SIM),
        AsyncDAGNet(definition, Workspace(), num_workers=1, options=RunOptions(streams_per_worker=2)) as net,
    ):
        told, announced = threading.Semaphore(0), threading.Event()
        run = net.new_run(told.release)
        announce = run.finished
        run.finished = lambda: (announce(), announce(), announced.set())
        net._running_pool().submit(run)
        assert announced.wait(30)
        other_gate.set()
        assert net.streams.all()[1].synchronize(30)
        assert not told.acquire(timeout=0.05)
        gate.set()
        assert told.acquire(timeout=30)
        net.run(timeout=30)


@pytest.mark.parametrize("net_class", NETS)
def test_a_blob_that_is_empty_when_the_net_is_made_is_fed_on_the_host(net_class: type[BaseNet]) -> None:
    net = NetDef(name="net")
    net.op.add(type="Relu", input=["x"], output=["a"], device_option=SIM.to_option())
    net.op.add(type="Relu", input=["x"], output=["b"])
    workspace = Workspace()
    workspace.create_blob("x")
    with simulated(SIM), net_class(net, workspace) as running:
        workspace.feed_blob("x", np.array([-1, 2], np.float32))
        running.run()
        assert workspace.fetch_blob("a").tolist() == workspace.fetch_blob("b").tolist() == [0, 2]


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_an_init_net_may_fill_parameters_on_a_device(device: str, updated: bool) -> None:
    init = NetDef(name="init")
    fill = init.op.add(type="ConstantFill", output=["w"], device_option=SIM.to_option())
    fill.arg.add(name="shape", ints=[3])
    fill.arg.add(name="value", f=-2)
    net = NetDef(name="net", external_input=["x", "w"], external_output=["y"])
    net.op.add(type="Add", input=["x", "w"], output=["y"])
    if updated:
        net.op.add(type="Relu", input=["w"], output=["w"])
    model = Model("net", net, init, inputs={"x": InputInfo(shape=(3,))}, outputs=("y",))
    x = np.ones(3, np.float32)
    with simulated(SIM), dagexec.compile(model, optimize=False, device=device, net_type="async_dag") as executor:
        assert executor.run({"x": x})["y"].tolist() == [-1, -1, -1]
        assert executor.run({"x": x})["y"].tolist() == ([1, 1, 1] if updated else [-1, -1, -1])


def test_an_event_that_cannot_be_recorded_or_waited_for_is_named() -> None:
    definition = on_devices(net_of(DIAMONDS), [SIM])
    message = r"chain \d of net 'net': recording its event failed: .*a fault of kind 'event'"
    with (
        simulated(SIM, faults=[Fault("event", "chain")]),
        AsyncDAGNet(definition, Workspace(), num_workers=2) as net,
        pytest.raises(OperatorError, match=message),
    ):
        net.run(timeout=30)

    class WithoutRecords(AsyncDAGNet):
        def synchronization(self, plan: Plan) -> Synchronization:
            return replace(super().synchronization(plan), records=(False,) * len(plan.chains))

    message = r"chain \d of net 'net'.*: waiting for its event failed: .*was never recorded"
    with (
        simulated(SIM),
        WithoutRecords(definition, Workspace(), num_workers=2) as net,
        pytest.raises(OperatorError, match=message),
    ):
        net.run(timeout=30)
