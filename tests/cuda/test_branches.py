"""Branches of inception modules overlap on several streams, in traces from the events of a device.

The networks are the real ones, at their real sizes. The device is emulated, and computes nothing: each kernel and each
product of cuBLAS takes 20 us of its virtual clock, whatever its size, and each launch 2 us of the host's. So the traces
show which work streams and events let overlap, and nothing of how long it would take.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import dagexec
from dagexec.cli import app
from dagexec.core.graph import Graph
from dagexec.devices.cuda import timing
from dagexec.scheduler.observe.spans import KernelSpan
from dagexec.scheduler.observe.trace import Trace
from tests.cuda.emulated import emulated

KERNEL_SECONDS, LAUNCH_SECONDS = 2e-5, 2e-6
MODULES = {"googlenet": 9, "inception_v3": 11}
Span = tuple[str, KernelSpan]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """An emulated device that takes time and computes nothing. What its clock counts from stays: it is no real one."""
    with (
        pytest.MonkeyPatch.context() as patch,
        emulated(
            asynchronous=True, seed=1, computes=False, record=False,
            kernel_seconds=KERNEL_SECONDS, launch_seconds=LAUNCH_SECONDS,
        ),
    ):  # fmt: skip
        patch.setattr(timing, "RENEWED_AFTER", math.inf)
        yield


def traced(name: str, streams: int, **options: Any) -> Trace:
    """The trace of the second run of a network."""
    trace = Trace()
    with dagexec.compile(
        f"zoo:{name}", device="cuda:0", net_type="async_dag", num_workers=1, streams_per_worker=streams, **options
    ) as executor:
        [(blob, info)] = executor.inputs.items()
        feeds = {blob: np.zeros([size or 1 for size in info.shape or ()], np.float32)}
        executor.run(feeds)
        executor.run(feeds, trace=trace)
    return trace


def spans_of(trace: Trace) -> list[Span]:
    return [(track.stream.name, span) for track in trace.tracks for span in track.kernels]


def ancestors(graph: Graph, operator: int) -> set[int]:
    """An operator and all before it."""
    found: set[int] = set()
    todo = [operator]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += graph.parents[one]
    return found


def branches(graph: Graph) -> dict[str, list[set[int]]]:
    """For each module, by the blob that joins it, the operators that only one of its branches has."""
    modules = {}
    for index, operator in enumerate(graph.operators):
        if operator.type == "Concat" and len(graph.parents[index]) > 2:
            before = [ancestors(graph, parent) for parent in graph.parents[index]]
            alone = [own - set().union(*(o for o in before if o is not own)) for own in before]
            modules[operator.output[0]] = alone
    return modules


def most_at_once(members: list[set[int]], spans: list[Span]) -> int:
    """How many branches have a kernel under way at one moment, each on a stream of its own."""
    rows = [(stream, span, b) for b, own in enumerate(members) for stream, span in spans if span.operator in own]
    most = 0
    for _, at, _ in rows:
        now = at.start + KERNEL_SECONDS / 10
        under_way = {(stream, b) for stream, span, b in rows if span.start <= now < span.end}
        most = max(most, min(len({s for s, _ in under_way}), len({b for _, b in under_way})))
    return most


def extent(spans: list[Span]) -> float:
    return max(span.end for _, span in spans) - min(span.start for _, span in spans)


def seconds(spans: list[Span]) -> float:
    return sum(span.seconds for _, span in spans)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("optimize", [False, True])
def test_branches_of_every_module_overlap_on_streams_of_their_own(name: str, optimize: bool, tmp_path: Path) -> None:
    trace = traced(name, 4, optimize=optimize)
    spans, modules = spans_of(trace), branches(trace.runs[0].graph)
    assert len(modules) >= MODULES[name]
    at_once = {joined: most_at_once(members, spans) for joined, members in modules.items()}
    assert min(at_once.values()) >= 3, at_once
    assert extent(spans) < 0.6 * seconds(spans)
    assert len({stream for stream, _ in spans}) == 4
    for stream in {stream for stream, _ in spans}:  # what is on one stream is one after the other
        own = sorted((span.start, span.end) for name, span in spans if name == stream)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(own))
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {f"cuda:0 stream {number}" for number in range(4)} <= names
    assert sum(event["ph"] == "s" for event in events) >= 3 * len(modules)  # arrows: the joins wait for events


@pytest.mark.slow
def test_on_one_stream_nothing_overlaps() -> None:
    trace = traced("googlenet", 1)
    spans, modules = spans_of(trace), branches(trace.runs[0].graph)
    assert {most_at_once(members, spans) for members in modules.values()} == {1}
    assert extent(spans) == pytest.approx(seconds(spans), rel=1e-3)


@pytest.mark.slow
def test_the_command_writes_such_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = ["--device", "cuda:0", "--net-type", "async_dag", "--num-workers", "1", "--streams-per-worker", "4"]
    result = CliRunner().invoke(app, ["run", "zoo:googlenet", *options, "--trace", str(file), "--json"])
    assert result.exit_code == 0, result.output
    events = json.loads(file.read_text())["traceEvents"]
    [device] = [event["pid"] for event in events if event.get("args", {}).get("name") == "cuda:0, device time"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == device and event["dur"] > 0]
    for module in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        own = [e for e in spans if f"inception_{module}/" in e["args"].get("outputs", [""])[0]]
        overlapping = {
            (one["tid"], other["tid"])
            for one, other in itertools.combinations(own, 2)
            if min(one["ts"] + one["dur"], other["ts"] + other["dur"]) - max(one["ts"], other["ts"]) > 1
        }
        assert all(one != other for one, other in overlapping)
        assert len(overlapping) >= 3
