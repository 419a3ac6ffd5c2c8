import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dagexec import Workspace
from dagexec.core.conversion import Conversion
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.operator import Operator
from dagexec.core.stream import Event, Kernel
from dagexec.devices.sim import SimEvent
from dagexec.errors import OperatorError, OutputError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.observe.spans import ChainSpan, RunSeconds, Span
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.observe.trace_file import trace_events
from tests.nets import net_of, parents_from_edges, temporary_operator
from tests.scheduler.observe.test_observers import stream

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])

TraceEvents = list[dict[str, Any]]


def check_format(events: TraceEvents) -> None:
    """What the Trace Event Format asks for: fields by phase, named tracks, spans that nest, arrows with both ends."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert len({tid for _, tid in named} | processes) == len(named) + len(processes)  # Perfetto knows a thread by tid
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    asynchronous: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "s", "f", "b", "e", "i")
        assert event["pid"] in processes
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert event["ts"] >= 0
        assert event["cat"]
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert track in named
            spans[track].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] == "p"
        else:
            (arrows if event["ph"] in "sf" else asynchronous)[event["cat"], event["id"]].append(event)
    assert len({event["id"] for pair in (*arrows.values(), *asynchronous.values()) for event in pair}) == len(
        arrows
    ) + len(asynchronous)
    for row in spans.values():
        open_until: list[float] = []
        for start, end in sorted(row, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, "spans of one track overlap without nesting"
            open_until.append(end)
    for pairs, phases in ((arrows, "sf"), (asynchronous, "be")):
        for pair in pairs.values():
            assert "".join(event["ph"] for event in pair) == phases
            assert pair[0]["name"] == pair[1]["name"]
            assert pair[0]["ts"] <= pair[1]["ts"]
    for start, finish in arrows.values():
        assert finish["bp"] == "e"
        for event in (start, finish):
            within = spans[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] + 1e-6 and event["ts"] <= end + 1e-6 for begin, end in within)


def read(path: Path) -> TraceEvents:
    events: TraceEvents = json.loads(path.read_text())["traceEvents"]
    check_format(events)
    return events


def of_category(events: TraceEvents, category: str) -> TraceEvents:
    return [event for event in events if event.get("cat") == category]


@pytest.mark.parametrize("net_class", [SimpleNet, DAGNet, AsyncDAGNet])
def test_the_file_holds_one_span_an_operator_and_names_the_threads(net_class: type[BaseNet], tmp_path: Path) -> None:
    with net_class(net_of(DIAMOND, name="diamond"), Workspace()) as net:
        trace = Trace()
        net.run(trace=trace)
        trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    [process] = [event for event in events if event["name"] == "process_name"]
    assert process["args"]["name"] == "net diamond, run 1"
    complete = of_category(events, "operator")
    assert sorted(event["args"]["index"] for event in complete) == [0, 1, 2, 3]
    assert all(event["name"] == "NoOp" for event in complete)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in complete} == set(threads)
    prefix = "MainThread" if net_class is SimpleNet else "dagexec-diamond-"
    assert all(name.startswith(prefix) for name in threads.values())
    order = {event["args"]["index"]: (event["ts"], event["ts"] + event["dur"]) for event in complete}
    assert order[0][1] <= order[1][0]
    assert max(order[1][1], order[2][1]) <= order[3][0]


def test_operators_lie_within_their_chain_and_a_chain_waits_in_the_queue_before_it(tmp_path: Path) -> None:
    with DAGNet(net_of([[], [0], []]), Workspace(), num_workers=1) as net:
        trace = Trace()
        net.run(trace=trace)
        trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    chains = {event["args"]["chain"]: event for event in of_category(events, "chain")}
    assert sorted(event["args"]["operators"] for event in chains.values()) == [1, 2]
    for event in of_category(events, "operator"):
        outer = chains[event["args"]["chain"]]
        assert outer["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 1e-6
    waits = of_category(events, "queue wait")
    assert min(event["ts"] for event in waits) == 0  # times count from the start of the run
    ends = {event["args"]["chain"]: event["ts"] for event in waits if event["ph"] == "e"}
    assert ends == {chain: event["ts"] for chain, event in chains.items()}
    second = max(chains.values(), key=lambda event: event["ts"])
    assert second["args"]["queue wait us"] == pytest.approx(second["ts"])


def test_an_arrow_leads_to_a_chain_from_the_parent_that_another_worker_ran(tmp_path: Path) -> None:
    span_of: dict[str, str] = {}
    trace = Trace()
    with SimpleNet(net_of(DIAMOND), Workspace()) as net:
        run = ObservedRun(trace, net.graph, net.operators, net.plan)
        now = run.started
        for chain, thread, start, end in ((0, "w0", 10, 20), (1, "w0", 25, 50), (2, "w1", 30, 45), (3, "w1", 60, 70)):
            run.stopped_at[chain] = now + end
            trace.chain_stopped(run, chain, thread, now + start, now + end, None)
            span_of[f"chain {chain}"] = thread
        run.stopped(None)
        trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    arrows = of_category(events, "dependency")
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = [(event["ph"], threads[event["tid"]], round(event["ts"] * 1e3)) for event in arrows]
    assert found == [("s", "w0", 19), ("f", "w1", 30), ("s", "w0", 49), ("f", "w1", 60)]


def test_each_run_is_a_process_of_its_own_on_one_time_line(tmp_path: Path) -> None:
    trace = Trace()
    with DAGNet(net_of([[]], name="a"), Workspace()) as first, SimpleNet(net_of([[]], name="b"), Workspace()) as second:
        first.run(trace=trace)
        second.run(trace=trace)
        first.run(trace=trace)
    trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "net a, run 1", 2: "net b, run 2", 3: "net a, run 3"}
    starts = {event["pid"]: event["ts"] for event in of_category(events, "operator")}
    assert 0 < starts[1] < starts[2] < starts[3]


def test_a_worker_that_waits_for_events_shows_it_within_the_chain(tmp_path: Path) -> None:
    trace = Trace()
    with SimpleNet(net_of([[]]), Workspace()) as net:
        run = ObservedRun(trace, net.graph, net.operators, net.plan)
        for step in run.chain(0, [lambda: None], waits=[lambda: None]):
            step()
        run.stopped(None)
    trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    [wait] = of_category(events, "event wait")
    [chain] = of_category(events, "chain")
    [operator] = of_category(events, "operator")
    assert wait["name"] == "chain 0 waits for events"
    assert chain["ts"] <= wait["ts"] <= wait["ts"] + wait["dur"] <= operator["ts"] + 1e-6


def kernel(label: str, operator: Operator | None = None) -> Kernel:
    return Kernel(lambda: None, label, operator=operator)


def event(owner: str) -> Event:
    return SimEvent(owner)


def test_streams_are_tracks_of_a_process_of_their_own_on_the_clock_of_the_device(tmp_path: Path) -> None:
    trace = Trace()
    left, right = stream("sim:0 stream 0"), stream("sim:0 stream 1")
    with SimpleNet(net_of([[], [0]]), Workspace()) as net:
        run = ObservedRun(trace, net.graph, net.operators)
        first, second, copy = (kernel("a", net.operators[0]), kernel("b", net.operators[1]), kernel("copy x"))
        done = event("chain 0 of net 'net'")
        trace.launched(left, first)
        trace.recorded(left, done)
        trace.launched(left, copy)  # after the event: the arrow does not start here
        trace.waits(right, done)
        trace.launched(right, second)
        trace.executed(left, first, 100.0, 100.5)
        trace.executed(left, copy, 100.5, 102.0)
        trace.waited(right, done, 100.0, 100.5)
        trace.executed(right, second, 100.5, 101.0)
        run.stopped(None)
    trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    [device] = [event for event in events if event["name"] == "process_name" and event["pid"] > 1]
    assert device["args"]["name"] == "sim:0, virtual time"
    named = [event for event in events if event["name"] == "thread_name" and event["pid"] == device["pid"]]
    tracks = {event["args"]["name"]: event["tid"] for event in named}
    assert set(tracks) == {"sim:0 stream 0", "sim:0 stream 1"}
    kernels = [(event["name"], event["tid"], event["ts"], event["dur"]) for event in of_category(events, "kernel")]
    assert sorted(kernels) == [
        ("NoOp", tracks["sim:0 stream 0"], 0.0, 5e5),
        ("NoOp", tracks["sim:0 stream 1"], 5e5, 5e5),
        ("copy x", tracks["sim:0 stream 0"], 5e5, 15e5),
    ]
    [wait] = of_category(events, "event wait")
    assert (wait["name"], wait["tid"], wait["ts"], wait["dur"]) == (
        "wait for chain 0 of net 'net'", tracks["sim:0 stream 1"], 0.0, 5e5,
    )  # fmt: skip
    start, finish = of_category(events, "event")
    assert (start["tid"], finish["tid"]) == (tracks["sim:0 stream 0"], tracks["sim:0 stream 1"])
    assert start["ts"] == pytest.approx(5e5, abs=0.01)
    assert finish["ts"] == 5e5


def test_there_is_no_arrow_to_or_from_a_kernel_that_never_ran() -> None:
    trace = Trace()
    left, right = stream("sim:0 stream 0"), stream("sim:0 stream 1")
    ran, passed_over, waiting = kernel("ran"), kernel("passed over"), kernel("waiting")
    done = event("chain 0")
    trace.launched(left, ran)
    trace.launched(left, passed_over)
    trace.recorded(left, done)
    trace.waits(right, done)
    trace.launched(right, waiting)
    trace.waits(right, event("of somebody whom nobody watched"))
    trace.executed(left, ran, 0.0, 1.0)
    trace.executed(right, waiting, 1.0, 2.0)
    events = trace_events(trace)
    check_format(events)
    assert not of_category(events, "event")
    assert len(of_category(events, "kernel")) == 2


def test_there_is_no_arrow_from_a_stream_to_itself() -> None:
    trace = Trace()
    only, done = stream("sim:0 stream 0"), event("chain 0")
    before, after = kernel("before"), kernel("after")
    trace.launched(only, before)
    trace.recorded(only, done)
    trace.waits(only, done)
    trace.launched(only, after)
    trace.executed(only, before, 0.0, 1.0)
    trace.executed(only, after, 1.0, 2.0)
    assert len(of_category(trace_events(trace), "kernel")) == 2
    assert not of_category(trace_events(trace), "event")


def test_tracks_of_streams_are_in_the_order_of_their_numbers() -> None:
    trace = Trace()
    for number in (10, 2, 9):
        trace.executed(stream(f"sim:0 stream {number}"), kernel("k"), 0.0, 1.0)
    tracks = [(event["tid"], event["args"]["name"]) for event in trace_events(trace) if event["name"] == "thread_name"]
    assert [name for _, name in sorted(tracks)] == ["sim:0 stream 2", "sim:0 stream 9", "sim:0 stream 10"]


def test_a_span_comes_before_those_within_it_that_start_at_the_same_time() -> None:
    trace = Trace()
    with SimpleNet(net_of([[]]), Workspace()) as net:
        ObservedRun(trace, net.graph, net.operators)
        trace.spans.append(Span(0, "w", trace.runs[0].started, trace.runs[0].started + 5))
        trace.chains.append(ChainSpan(0, "w", *[trace.runs[0].started] * 2, trace.runs[0].started + 9, 0))
        trace.spans.append(Span(0, "w", trace.runs[0].started, trace.runs[0].started + 3, run=0))
    spans = [event for event in trace_events(trace) if event["ph"] == "X"]
    assert [event["dur"] for event in spans] == [0.009, 0.005, 0.003]


def test_the_next_use_of_an_event_starts_its_arrow_anew() -> None:
    trace = Trace()
    left, right = stream("sim:0 stream 0"), stream("sim:0 stream 1")
    before, after, done = kernel("before"), kernel("after"), event("chain 0")
    for time in (0.0, 10.0):
        trace.launched(left, before)
        trace.recorded(left, done)
        trace.waits(right, done)
        trace.launched(right, after)
        trace.executed(left, before, time, time + 1)
        trace.executed(right, after, time + 1, time + 2)
    events = trace_events(trace)
    check_format(events)
    assert [event["ts"] for event in of_category(events, "event") if event["ph"] == "f"] == [1e6, 11e6]


def test_the_trace_of_a_run_that_failed_can_be_written_too(tmp_path: Path) -> None:
    def body(operator: Operator) -> None:
        if operator.output_blobs[0].name == "b1":
            raise ValueError("no")

    trace = Trace()
    with (
        temporary_operator("Fail", body),
        DAGNet(net_of(DIAMOND, op_type="Fail"), Workspace(), num_workers=1) as net,
    ):
        with pytest.raises(OperatorError):
            net.run(trace=trace)
        trace.write(tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    found = {event["args"]["index"]: event["args"].get("failed") for event in of_category(events, "operator")}
    assert {0, 1} <= set(found)
    assert 3 not in found
    assert {index for index, name in found.items() if name} == {1}
    assert found[1] == "ValueError"
    (failure,) = of_category(events, "failure")
    assert (failure["name"], failure["pid"]) == ("run failed: OperatorError", 1)
    assert "no" in failure["args"]["error"]
    assert failure["ts"] >= max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")


def test_operator_seconds_are_medians_over_runs_and_those_of_the_device_where_there_is_one() -> None:
    trace = Trace()
    trace.spans.extend(Span(0, "t", 0, nanoseconds) for nanoseconds in (5, 1_000, 3))
    packed = TensorDescriptor.packed((2,))
    conversion = Conversion("x", packed, packed, lambda: None)  # within the operator's span, which has its time
    trace.spans.extend(Span(0, "t", 0, nanoseconds, conversion) for nanoseconds in (1, 1, 1))
    assert trace.operator_seconds(2) == [5e-9, 0.0]
    with SimpleNet(net_of([[]]), Workspace()) as net:
        ObservedRun(trace, net.graph, net.operators)
        trace.executed(stream(), kernel("a", net.operators[0]), 2.0, 2.5)
    assert trace.operator_seconds(1) == [0.5]


def test_the_operators_of_each_run_are_added_up() -> None:
    trace = Trace()
    trace.spans += [Span(0, "t", 0, 500, None, 0), Span(1, "t", 550, 750, None, 0), Span(0, "t", 0, 100, None, 2)]
    assert trace.run_seconds() == [RunSeconds(700e-9, 750e-9), RunSeconds(100e-9, 100e-9)]


@pytest.mark.slow
def test_a_trace_does_not_keep_the_tensors_of_a_net_alive() -> None:
    import gc
    import weakref

    trace = Trace()
    with DAGNet(net_of(DIAMOND), Workspace()) as net:
        net.run(trace=trace)
        operators = [weakref.ref(operator) for operator in net.operators]
    del net
    gc.collect()
    assert all(reference() is None for reference in operators)
    assert len(trace.runs) == 1


def test_an_empty_trace_is_a_file_with_no_events(tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_a_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/trace\.json: cannot be written: No such file or directory"):
        Trace().write(tmp_path / "nowhere" / "trace.json")
