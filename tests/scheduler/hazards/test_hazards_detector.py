"""The detector on streams made for the test, where every launch, record and wait is in the hands of the test; and on
executors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.device import CPU, Device
from dagexec.core.graph import Hazard
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Event, Kernel, Stream
from dagexec.devices.sim import simulated
from dagexec.errors import HazardError
from dagexec.platform.threads import new_gate
from dagexec.scheduler.hazards import Detector, detecting
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import Plan, build_plan
from tests.nets import net_of

SIM = Device("sim")
FORK: list[list[int]] = [[], [0], [0], [1, 2]]


class Script:
    """Tells a detector of a run step by step, as workers and streams would. Chain i holds operator i alone."""

    def __init__(self, net: BaseNet, plan: Plan) -> None:
        self.net = net
        self.chain_of = plan.chain_of
        self.detector = Detector()
        self.run = ObservedRun(self.detector, net.graph, net.operators, plan, net.prepared().prepared)
        self.streams: dict[int, Stream] = {}

    def stream(self, number: int) -> Stream:
        if number not in self.streams:
            self.streams[number] = runtime_of(SIM).lease()
        self.streams[number].observer = self.detector
        return self.streams[number]

    def launch(self, operator: int, stream: int, waits: Sequence[Event] = (), turns: Sequence[Event] = ()) -> Event:
        """Launch the chain of an operator, after the events `waits`; gives the event recorded at its end.

        The launch itself follows the events `turns`.
        """
        chain, place = self.chain_of[operator], self.stream(stream)
        self.detector.chain_started(self.run, chain, "worker", 0, 0)
        for event in waits:
            place.wait(event)
        self.detector.operator_started(self.run, operator, "worker")
        for event in turns:
            place.follow(event)
        place.launch(Kernel(lambda: None, "kernel", operator=self.net.operators[operator]))
        self.detector.operator_stopped(self.run, operator, "worker", 0, 0, None)
        event = runtime_of(SIM).event(f"chain {chain}")
        event.record(place)
        self.detector.chain_stopped(self.run, chain, "worker", 0, 0, None)
        return event

    def races(self) -> list[tuple[str, int, int]]:
        labels = [self.net.graph.label(index) for index in range(len(self.net.graph))]
        return [(race.resource, labels.index(race.earlier), labels.index(race.later)) for race in self.detector.races]


@pytest.fixture
def fork() -> Script:
    definition = net_of(FORK)
    definition.device_option.CopyFrom(SIM.to_option())
    with simulated(), AsyncDAGNet(definition, Workspace(), num_workers=2) as net:
        yield Script(net, net.plan)  # type: ignore[misc]


def test_events_between_streams_order_what_is_launched_behind_them(fork: Script) -> None:
    first = fork.launch(0, stream=0)
    second, third = fork.launch(1, 1, [first]), fork.launch(2, 2, [first])
    fork.launch(3, 3, [second, third])
    assert fork.races() == []


def test_a_wait_too_few_is_a_race_with_both_operators_and_streams(fork: Script) -> None:
    first = fork.launch(0, stream=0)
    second = fork.launch(1, 1, [first])
    fork.launch(2, 2, [first])
    fork.launch(3, 3, [second])
    assert fork.races() == [("blob 'b2'", 2, 3)]
    [race] = fork.detector.races
    assert race.kind == Hazard.RAW
    assert (race.earlier_place, race.later_place) == (fork.stream(2).name, fork.stream(3).name)
    with pytest.raises(HazardError, match="RAW on blob 'b2'") as caught:
        fork.detector.raise_found()
    assert len(caught.value.races) == 1


def test_an_event_passes_on_what_its_stream_had_waited_for(fork: Script) -> None:
    """3 reads what 0 wrote only through 1 and 2; here it is enough that they waited for it."""
    first = fork.launch(0, stream=0)
    second = fork.launch(1, 1, [first])
    third = fork.launch(2, 1)
    fork.launch(3, 3, [second, third])
    assert fork.races() == [("blob 'b0'", 0, 2)]  # 2 is behind 1 on its stream by chance only


def test_one_stream_orders_what_the_plan_launches_one_after_the_other(fork: Script) -> None:
    for operator in range(4):
        fork.launch(operator, stream=0)
    assert fork.races() == []


def test_a_stream_orders_chains_that_are_launched_in_order_through_others() -> None:
    """0 and 2 are on one stream, 1 between them on another, and 2 does not wait for it."""
    definition = net_of([[], [0], [0, 1]])
    definition.device_option.CopyFrom(SIM.to_option())
    with simulated(), AsyncDAGNet(definition, Workspace(), num_workers=2) as net:
        script = Script(net, build_plan(net.graph, [0.0] * 3, single_operator_chains(net.graph)))
        script.launch(1, 1, [script.launch(0, stream=0)])
        script.launch(2, stream=0)
        assert script.races() == [("blob 'b1'", 1, 2)]


def test_a_turn_at_working_memory_orders_nothing_else(fork: Script) -> None:
    first = fork.launch(0, stream=0)
    fork.launch(1, 1, turns=[first])
    assert fork.races() == [("blob 'b0'", 0, 1)]


def test_the_host_comes_only_after_what_the_plan_has_launched_on_a_stream_it_waited_for(fork: Script) -> None:
    """The chain of 1 waits for a stream that the chain of 2 is on by chance."""
    first = fork.launch(0, stream=0)
    fork.launch(2, 1, [first])
    chain = fork.chain_of[1]
    fork.detector.chain_started(fork.run, chain, "worker", 0, 0)
    fork.stream(1).synchronize()
    fork.detector.chain_stopped(fork.run, chain, "worker", 0, 0, None)
    assert not fork.detector._runs[fork.run].host[chain] >> 2 & 1
    assert fork.detector._runs[fork.run].host[chain] == 0


def test_runs_of_one_net_follow_one_another_even_while_another_net_runs() -> None:
    with simulated():
        workspace = Workspace()
        workspace.feed_blob("x", np.ones((1, 4, 6, 6), np.float32), device="sim:0")
        workspace.feed_blob("w", np.ones((4, 4, 3, 3), np.float32), device="sim:0")
        dagexec.create_shared_buffer(workspace, SIM)
        with AsyncDAGNet(conv_net(1), workspace) as net, AsyncDAGNet(NetDef(name="other"), workspace) as other:
            script = Script(net, net.plan)
            ObservedRun(script.detector, other.graph, other.operators, other.plan)  # goes on for ever
            for _ in range(2):
                script.launch(0, stream=0)  # with no turn taken
                script.stream(0).synchronize()
                script.run.stopped(None)
                script.run = ObservedRun(script.detector, net.graph, net.operators, net.plan, script.run.prepared)
            assert script.races() == []


def test_the_order_on_a_stream_does_not_hide_a_dependency_that_the_plan_lacks() -> None:
    definition = net_of([[], []])
    definition.op[1].input.append("b0")
    definition.device_option.CopyFrom(SIM.to_option())
    with simulated(), AsyncDAGNet(definition, Workspace(), num_workers=2) as net:
        graph = net.graph
        without = Plan(graph, ((0,), (1,)), ((), ()), (0, 0), (0, 1), (0.0, 0.0), (0.0, 0.0))
        script = Script(net, without)
        script.launch(0, stream=0)
        script.launch(1, stream=0)
        assert script.races() == [("blob 'b0'", 0, 1)]


def test_a_wait_for_a_chain_that_need_not_have_been_launched_orders_nothing() -> None:
    definition = net_of([[], []])
    definition.op[1].input.append("b0")
    definition.device_option.CopyFrom(SIM.to_option())
    with simulated(), AsyncDAGNet(definition, Workspace(), num_workers=2) as net:
        script = Script(net, Plan(net.graph, ((0,), (1,)), ((), ()), (0, 0), (0, 1), (0.0, 0.0), (0.0, 0.0)))
        script.launch(1, 1, [script.launch(0, stream=0)])
        assert script.races() == [("blob 'b0'", 0, 1)]


def test_what_the_host_has_waited_for_comes_before_all_it_launches_later(fork: Script) -> None:
    """The chain of operator 1 ends with a wait for its stream, as in a DAGNet."""
    first = fork.launch(0, stream=0)
    chain = fork.chain_of[1]
    fork.launch(2, 2, [first])
    fork.detector.chain_started(fork.run, chain, "worker", 0, 0)
    fork.stream(1).wait(first)
    fork.detector.operator_started(fork.run, 1, "worker")
    fork.stream(1).launch(Kernel(lambda: None, "kernel", operator=fork.net.operators[1]))
    fork.detector.operator_stopped(fork.run, 1, "worker", 0, 0, None)
    fork.stream(1).synchronize()
    fork.detector.chain_stopped(fork.run, chain, "worker", 0, 0, None)
    fork.launch(3, 3)
    assert fork.races() == [("blob 'b2'", 2, 3)]


def test_a_run_that_ends_before_its_streams_do_is_found(fork: Script) -> None:
    gate = new_gate()
    chain = fork.chain_of[0]
    fork.detector.chain_started(fork.run, chain, "worker", 0, 0)
    fork.stream(0).launch(Kernel(gate.acquire, "held"))
    fork.detector.chain_stopped(fork.run, chain, "worker", 0, 0, None)
    fork.run.stopped(None)
    gate.release()
    [race] = fork.detector.races
    assert (race.resource, race.later) == ("the results", "the end of the run")
    assert race.earlier == fork.net.graph.label(0)
    assert race.earlier_place == fork.stream(0).name


@pytest.mark.parametrize("net_class", [SimpleNet, DAGNet, AsyncDAGNet])
@pytest.mark.parametrize("devices", [(CPU,), (SIM,), (SIM, CPU)])
def test_nets_of_every_type_are_clean_on_every_device(net_class: type[BaseNet], devices: tuple[Device, ...]) -> None:
    definition = net_of([*FORK, [3], [3], [4, 5]])
    for index, operator in enumerate(definition.op):
        operator.device_option.CopyFrom(devices[index % len(devices)].to_option())
    with simulated(), net_class(definition, Workspace()) as net, detecting() as detector:
        for _ in range(3):
            net.run(trace=detector)
    assert detector.accesses >= 3 * 7
    assert not detector._runs
    assert detector._next_bit == 0


def test_detecting_raises_at_the_end_of_the_block_what_was_found() -> None:
    memory = np.zeros((4, 5), np.float32)
    workspace = Workspace()
    workspace.feed_blob("x", np.ones((4, 5), np.float32))
    for name in ("t", "u"):
        workspace.create_blob(name).tensor().adopt(memory, writable=True)
    net_def = NetDef(name="net", external_input=["x"])
    net_def.op.add(type="Relu", input=["x"], output=["t"])
    net_def.op.add(type="Tanh", input=["x"], output=["u"])
    with (
        DAGNet(net_def, workspace, num_workers=1) as net,
        pytest.raises(HazardError, match=r"WAW on memory of blobs 't', 'u': Relu 't' .* and Tanh 'u' .* not ordered"),
        detecting() as detector,
    ):
        net.run(trace=detector)


def conv_net(branches: int) -> NetDef:
    net = NetDef(name="conv", external_input=["x", "w"])
    for index in range(branches):
        definition = net.op.add(type="Conv", input=["x", "w"], output=[f"y{index}"], engine="CUDNN")
        definition.arg.add(name="kernel", i=3)
        definition.arg.add(name="shared_buffer", i=1)
        definition.device_option.CopyFrom(SIM.to_option())
    return net


def test_runs_of_two_nets_at_once_take_turns_at_the_state_of_the_device() -> None:
    """Both launch before either has run: their library states are one, their blobs and buffers are not."""
    with simulated():
        nets = []
        for _ in range(2):
            workspace = Workspace()
            workspace.feed_blob("x", np.ones((1, 4, 6, 6), np.float32), device="sim:0")
            workspace.feed_blob("w", np.ones((4, 4, 3, 3), np.float32), device="sim:0")
            dagexec.create_shared_buffer(workspace, SIM)
            nets.append(AsyncDAGNet(conv_net(3), workspace, num_workers=2))
        with nets[0], nets[1], detecting() as detector:
            for _ in range(2):
                over = [new_gate() for _ in nets]
                runs = [net.new_run(gate.release, detector) for net, gate in zip(nets, over, strict=True)]
                for net, run in zip(nets, runs, strict=True):
                    net._running_pool().submit(run)
                for gate, run in zip(over, runs, strict=True):
                    assert gate.acquire(timeout=60)
                    run.raise_error()
            assert detector.accesses == 2 * 2 * 3 * 5  # x, w, y, the buffer and the state


def test_the_runs_of_an_executor_are_watched_by_one_detector() -> None:
    with (
        simulated(),
        dagexec.compile(
            "zoo:lenet", optimize=False, net_type="async_dag", device="sim:0", num_workers=2, replicas=2
        ) as executor,
        detecting() as detector,
    ):
        shape = executor.inputs["data"].shape
        assert shape is not None
        feeds = {"data": np.ones(tuple(size or 1 for size in shape), np.float32)}
        for _ in range(3):
            executor.run(feeds, trace=detector)
        once = detector.accesses
    assert once > 0
