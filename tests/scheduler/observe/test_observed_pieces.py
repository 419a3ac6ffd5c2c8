"""Observed runs share operators as others do: who executed which piece, and when, is told and drawn."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.analysis.bounds import run_bounds
from dagexec.core.native import can_run
from dagexec.errors import OperatorError
from dagexec.scheduler.exploration import explore
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.observe.trace import Trace
from tests.scheduler.pieced import PIECES, SIZE, pieced_net, pieced_operator, turned

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

X = np.arange(SIZE, dtype=np.float32)


def run_observed(observer: Observer, definition: NetDef, workers: int = 2) -> np.ndarray:
    workspace = Workspace()
    workspace.feed_blob("x", X)
    with DAGNet(definition, workspace, num_workers=workers) as net:
        net.run(trace=observer)
        return cast(np.ndarray, workspace.fetch_blob("y"))


class Events(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def operator_started(self, run: ObservedRun, operator: int, worker: str) -> None:
        self.seen.append(("operator started", operator))

    def piece_started(self, run: ObservedRun, operator: int, phase: int, piece: int, worker: str) -> None:
        assert worker == threading.current_thread().name
        self.seen.append(("piece started", operator, phase, piece))

    def piece_stopped(self, run, operator, phase, piece, worker, start, end, error) -> None:  # type: ignore[no-untyped-def]
        assert start <= end
        self.seen.append(("piece stopped", operator, phase, piece))

    def operator_stopped(self, run, operator, worker, start, end, error) -> None:  # type: ignore[no-untyped-def]
        self.seen.append(("operator stopped", operator))


def test_an_operator_starts_before_its_first_piece_and_stops_after_its_last() -> None:
    events = Events()
    with pieced_operator():
        np.testing.assert_array_equal(run_observed(events, pieced_net(2)), X)  # turned twice
    for operator in (0, 1):
        own = [event for event in events.seen if event[1] == operator]
        assert (own[0][0], own[-1][0]) == ("operator started", "operator stopped")
        assert len(own) == 2 + 2 * 2 * PIECES
        places = {event: place for place, event in enumerate(own)}
        first = [places["piece stopped", operator, 0, piece] for piece in range(PIECES)]
        then = [places["piece started", operator, 1, piece] for piece in range(PIECES)]
        assert max(first) < min(then)
    assert events.seen.index(("operator stopped", 0)) < events.seen.index(("operator started", 1))


def test_both_workers_are_seen_to_take_pieces_where_the_schedule_lets_them() -> None:
    def scenario() -> set[str]:
        trace = Trace()
        assert run_observed(trace, pieced_net()).tolist() == turned(X).tolist()
        return {piece.thread for piece in trace.pieces}

    with pieced_operator():
        found = [explore(scenario, seed) for seed in range(10)]
    assert all(one.failure is None for one in found)
    assert max(len(one.result or ()) for one in found) == 2


def test_the_file_of_a_trace_has_a_span_for_each_piece_and_one_around_them(tmp_path: Path) -> None:
    trace = Trace()
    with pieced_operator():
        run_observed(trace, pieced_net())
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    pieces = [event for event in events if event.get("cat") == "piece"]
    assert {(event["args"]["phase"], event["args"]["piece"]) for event in pieces} == {
        (phase, piece) for phase in (0, 1) for piece in range(PIECES)
    }
    [begin, end] = [event for event in events if event.get("cat") == "operator"]
    assert (begin["ph"], end["ph"]) == ("b", "e")
    assert begin["ts"] <= min(event["ts"] for event in pieces)
    assert end["ts"] >= max(event["ts"] + event["dur"] for event in pieces) - 1e-3


def test_the_work_of_a_run_is_its_pieces_and_not_the_time_from_the_first_to_the_last() -> None:
    trace = Trace()
    with pieced_operator():
        run_observed(trace, pieced_net())
    [found] = trace.run_seconds()
    assert found.operators == pytest.approx(sum(piece.seconds for piece in trace.pieces))
    assert run_bounds(trace, 2).busy == pytest.approx(found.operators)


def test_an_operator_whose_piece_fails_has_stopped_with_its_error_when_the_run_has() -> None:
    class Failing(Trace):
        def piece_started(self, run: ObservedRun, operator: int, phase: int, piece: int, worker: str) -> None:
            if (phase, piece) == (1, 2):
                raise ValueError("a piece fails")

    trace = Failing()
    with pieced_operator(), pytest.raises(OperatorError, match=r"TurnedParts 'y' \(operator 0\) .* a piece fails"):
        run_observed(trace, pieced_net())
    [span] = trace.spans
    assert span.error is not None
    assert trace.failures
