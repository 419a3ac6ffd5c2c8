"""Traces and predictions of nets on the simulated device, whose clock makes every time exact."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import OperatorError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.observe.counting import TimeObserver
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.observe.trace_file import trace_events
from dagexec.scheduler.plan.plan import build_plan, retimed
from dagexec.scheduler.run.prediction import Hardware, device_bound, predict_device
from tests.nets import net_of, parents_from_edges, temporary_operator
from tests.ops.running import operator_def
from tests.scheduler.observe.test_trace import check_format, of_category, read

SIM = Device.parse("sim:0")
WIDE = parents_from_edges(10, [(0, index) for index in range(1, 9)] + [(index, 9) for index in range(1, 9)])
LAUNCH, KERNEL = 5e-6, 50e-6


def on_sim(net: NetDef) -> NetDef:
    net.device_option.CopyFrom(SIM.to_option())
    return net


def traced(net_def: NetDef, streams: int, runs: int = 1) -> tuple[Trace, AsyncDAGNet]:
    trace = Trace()
    with (
        simulated(SIM, seed=3, launch_seconds=LAUNCH, kernel_seconds=KERNEL),
        AsyncDAGNet(on_sim(net_def), Workspace(), num_workers=1, options=RunOptions(streams_per_worker=streams)) as net,
    ):
        for _ in range(runs):
            net.run(trace=trace)
    return trace, net


def makespan(trace: Trace) -> float:
    """Virtual seconds from the start of the launches to the end of the last kernel."""
    kernels = [kernel for track in trace.tracks for kernel in track.kernels]
    return max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels) + LAUNCH


def test_kernels_are_on_their_streams_with_the_devices_times_and_launches_on_the_worker(tmp_path: Path) -> None:
    trace, _ = traced(net_of(WIDE, name="wide"), streams=4)
    trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    kernels = of_category(events, "kernel")
    assert sorted(event["args"]["index"] for event in kernels) == list(range(10))
    assert all(event["dur"] == pytest.approx(50) for event in kernels)
    assert len({event["tid"] for event in kernels}) == 4
    launches = of_category(events, "operator")
    assert len(launches) == 10
    assert {event["name"] for event in launches} == {"launch NoOp"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {processes[event["pid"]] for event in kernels} == {"sim:0, virtual time"}
    assert {processes[event["pid"]] for event in launches} == {"net wide, run 1"}
    waits = of_category(events, "event wait")
    assert {processes[event["pid"]] for event in waits} == {"sim:0, virtual time"}  # the worker waits for none
    assert all(event["dur"] > 0 for event in waits)


def test_arrows_lead_from_the_kernel_before_each_event_to_the_one_that_waited() -> None:
    trace, net = traced(net_of(WIDE), streams=4)
    events = trace_events(trace)
    check_format(events)
    operator_at = {
        (event["tid"], round(event["ts"], 3)): event["args"]["index"] for event in of_category(events, "kernel")
    }
    arrows = of_category(events, "event")
    ends: dict[int, dict[str, int]] = {}
    for arrow in arrows:
        index = next(
            operator
            for (tid, start), operator in operator_at.items()
            if tid == arrow["tid"] and start - 1e-4 <= arrow["ts"] < start + 50 - 1e-4
        )
        ends.setdefault(arrow["id"], {})[arrow["ph"]] = index
    found = {(pair["s"], pair["f"]) for pair in ends.values()}
    stream_of = {event["args"]["index"]: event["tid"] for event in of_category(events, "kernel")}
    edges = {(parent, child) for child, row in enumerate(net.graph.reduced_parents) for parent in row}
    assert found == {(parent, child) for parent, child in edges if stream_of[parent] != stream_of[child]}


def test_a_stream_that_stands_still_for_an_event_shows_it() -> None:
    trace, _ = traced(net_of(parents_from_edges(3, [(0, 2), (1, 2)])), streams=2)
    waits = [wait for track in trace.tracks for wait in track.waits if wait.end > wait.start]
    kernels = {kernel.operator: kernel for track in trace.tracks for kernel in track.kernels}
    assert [(wait.end, kernels[2].start) for wait in waits] == [(kernels[1].end, kernels[1].end)]


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_the_makespan_of_siblings_is_the_prediction(streams: int) -> None:
    trace, net = traced(net_of(WIDE), streams)
    seconds = [KERNEL] * 10
    plan = retimed(build_plan(net.graph, [1.0] * 10), seconds)
    predicted = predict_device(plan, Hardware(1, streams, launch_seconds=LAUNCH), seconds)
    assert makespan(trace) == pytest.approx(predicted, rel=0.02)


@st.composite
def parents_of_operators(draw: st.DrawFn) -> list[list[int]]:
    count = draw(st.integers(1, 14))
    return [sorted(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else [] for index in range(count)]


@pytest.mark.slow
@given(parents_of_operators(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_makespan_of_any_net_is_near_the_prediction_and_not_below_the_bound(
    parents: list[list[int]], streams: int
) -> None:
    trace, net = traced(net_of(parents), streams)
    seconds = [KERNEL] * len(net.graph)
    hardware = Hardware(1, streams, launch_seconds=LAUNCH)
    plan = retimed(build_plan(net.graph, [1.0] * len(net.graph)), seconds)
    assert makespan(trace) >= device_bound(plan, hardware) - 1e-9
    assert makespan(trace) == pytest.approx(predict_device(plan, hardware, seconds), rel=0.1)


def test_runs_that_reuse_events_and_streams_keep_their_arrows_apart() -> None:
    once = len(of_category(trace_events(traced(net_of(WIDE), 4)[0]), "event"))
    trace, _ = traced(net_of(WIDE), streams=4, runs=3)
    events = trace_events(trace)
    check_format(events)
    assert once > 0
    assert len(of_category(events, "kernel")) == 30
    assert {event["args"]["run"] for event in of_category(events, "kernel")} == {1, 2, 3}
    assert len(of_category(events, "event")) >= 3 * 14


def test_a_run_that_fails_on_a_stream_has_a_trace_of_what_ran() -> None:
    trace = Trace()
    with (
        simulated(SIM, seed=1, faults=[Fault("kernel", "b5")]),
        AsyncDAGNet(on_sim(net_of(WIDE)), Workspace(), num_workers=1, options=RunOptions(streams_per_worker=2)) as net,
    ):
        with pytest.raises(OperatorError) as raised:
            net.run(trace=trace)
        net.run(trace=trace)
    events = trace_events(trace)
    check_format(events)
    (failure,) = of_category(events, "failure")
    assert (failure["pid"], failure["args"]["error"]) == (1, str(raised.value))
    ran = {event["args"]["index"] for event in of_category(events, "kernel") if event["args"]["run"] == 1}
    assert 0 in ran
    assert not {5, 9} & ran


def test_lines_and_mean_times_are_those_of_the_streams(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DAGEXEC_TRACE", "1")
    times = TimeObserver()
    with (
        simulated(SIM, seed=0, launch_seconds=LAUNCH, kernel_seconds=KERNEL),
        AsyncDAGNet(
            on_sim(net_of(WIDE, name="wide")), Workspace(), num_workers=1, options=RunOptions(streams_per_worker=2)
        ) as net,
    ):
        net.run(trace=times)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert all(re.fullmatch(r"wide\[\d\] +NoOp +b\d +sim:0 stream \d +0\.050 ms.*", line) for line in lines), lines
    assert times.mean_operator_ms == pytest.approx(dict.fromkeys(range(10), 0.05))


def test_what_fails_on_a_stream_is_told_of_by_the_line_of_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DAGEXEC_TRACE", "1")
    with (
        simulated(SIM, seed=1, faults=[Fault("kernel", "b5")]),
        AsyncDAGNet(on_sim(net_of(WIDE, name="wide")), Workspace(), num_workers=1) as net,
        pytest.raises(OperatorError),
    ):
        net.run()
    *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"wide  run failed: OperatorError: sim:0 stream 0: NoOp 'b5' .*", last)


def test_a_trace_on_a_device_is_json(tmp_path: Path) -> None:
    trace, _ = traced(net_of([[]]), streams=1)
    trace.write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_an_observed_host_operator_that_fails_behind_a_wait_for_a_device_is_named(net_type: str) -> None:
    def fail(operator: Operator) -> None:
        raise ValueError("on purpose")

    def on(device: str, op_type: str, source: str, target: str) -> OperatorDef:
        definition = operator_def(op_type, [source], [target])
        definition.device_option.CopyFrom(Device.parse(device).to_option())
        return definition

    operators = [
        on("sim:0", "Relu", "x", "a"),
        on("sim:0", "EnsureCPUOutput", "a", "b"),
        on("cpu", "Failing", "b", "c"),
        on("cpu", "Relu", "c", "d"),
        on("cpu", "Relu", "d", "y"),
    ]
    model = Model("n", NetDef(name="n", op=operators), inputs={"x": InputInfo()}, outputs=("y",))
    with (
        simulated("sim:0"),
        temporary_operator("Failing", fail),
        dagexec.compile(model, optimize=False, net_type=net_type, device="sim:0") as executor,
    ):
        for trace in (None, Trace()):
            with pytest.raises(OperatorError, match=r"^Failing 'c'"):
                executor.run({"x": np.ones(3, np.float32)}, trace=trace)
