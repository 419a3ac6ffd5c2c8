import json
from pathlib import Path

import pytest

from dagexec import Workspace
from dagexec.core.errors import ModelFormatError
from dagexec.scheduler.dag import DAGNet
from dagexec.scheduler.trace import Span, Trace
from tests.nets import net_of


def test_the_file_holds_one_complete_event_an_operator_and_names_the_threads(tmp_path: Path) -> None:
    with DAGNet(net_of([[], [0], [0], [1, 2]], name="diamond"), Workspace(), num_workers=2) as net:
        trace = Trace()
        net.run(trace=trace)
        path = tmp_path / "trace.json"
        trace.write(path, net.graph, net.plan.chain_of)
    events = json.loads(path.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 1
    complete = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in complete) == 0
    assert sorted(event["args"]["index"] for event in complete) == [0, 1, 2, 3]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["name"] == "NoOp" for event in complete)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in complete} == set(named)
    assert all(name.startswith("dagexec-diamond-") for name in named.values())
    order = {event["args"]["index"]: (event["ts"], event["ts"] + event["dur"]) for event in complete}
    assert order[0][1] <= order[1][0]
    assert max(order[1][1], order[2][1]) <= order[3][0]


def test_operator_seconds_are_medians_over_runs() -> None:
    trace = Trace()
    trace.spans.extend(Span(0, "t", 0, nanoseconds) for nanoseconds in (5, 1_000, 3))
    assert trace.operator_seconds(2) == [5e-9, 0.0]


def test_a_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with DAGNet(net_of([[]]), Workspace()) as net, pytest.raises(ModelFormatError, match="nowhere"):
        Trace().write(tmp_path / "nowhere" / "trace.json", net.graph, net.plan.chain_of)
