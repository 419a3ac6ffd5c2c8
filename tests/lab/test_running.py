"""Task graphs as nets: all runtimes keep the order, work takes its time, and the search finds the smallest task."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.analysis.rounds import Limits
from dagexec.core.native import can_run, phases_of
from dagexec.lab import kernels
from dagexec.lab.graph import WorkGraph, work_graph
from dagexec.lab.kernels import KINDS
from dagexec.lab.metg import metg
from dagexec.lab.nets import WORK_OPERATOR, expected_marks, work_net
from dagexec.lab.patterns import Bench, bench_graph
from dagexec.lab.running import MEASURES, Measured, run_graph
from dagexec.scheduler.nets.net import BaseNet
from tests.command_line import Cli


def marks_after_a_run(graph: WorkGraph, net_type: str, kind: str) -> list[int]:
    workspace = dagexec.Workspace()
    with workspace.create_net(work_net(graph, kind), net_type, 2) as net:
        net.run()
    return [int(workspace.fetch_blob(str(number))[0]) for number in range(len(graph.tasks))]


def test_marks_follow_from_the_marks_of_all_parents() -> None:
    graph = work_graph("g", [("a", 0, []), ("b", 0, []), ("c", 0, [0, 1])])
    assert expected_marks(graph) == [1, 2, (3 * 31 + 1) * 31 + 2]


def test_marks_wrap_as_integers_of_the_machine_do() -> None:
    mark = np.int64(1)
    with np.errstate(over="ignore"):
        for number in range(2, 101):
            mark = np.int64(number) * np.int64(31) + mark * np.int64(1)
    assert expected_marks(bench_graph("no_comm", Bench(1, 100)))[-1] == int(mark)


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_runtime_keeps_the_order(net_type: str, kind: str) -> None:
    graph = bench_graph("spread", Bench(5, 6, 1e-6, imbalance=1.0))
    assert marks_after_a_run(graph, net_type, kind) == expected_marks(graph)


@pytest.mark.parametrize("kind", KINDS)
def test_it_works_without_machine_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.lab.nets.can_run", lambda: False)
    graph = bench_graph("fft", Bench(4, 3, 1e-6))
    assert marks_after_a_run(graph, "dag", kind) == expected_marks(graph)


@pytest.mark.skipif(not can_run(), reason="no machine code runs here")
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_one_piece_of_native_calls(kind: str) -> None:
    net = dagexec.Workspace().create_net(work_net(work_graph("g", [("a", 1e-6, [])]), kind), "simple")
    assert isinstance(net, BaseNet)
    phases = phases_of(net.prepared().steps[0])
    assert phases is not None
    assert [len(pieces) for pieces in phases] == [1]


@pytest.mark.skipif(not can_run(), reason="no machine code runs here")
@pytest.mark.parametrize("number", [0, 123])
def test_as_many_lines_are_read_as_are_asked_for(number: int) -> None:
    lines = kernels.BUFFER_BYTES // 64 * 5 // 2
    rows, buffer = kernels.unit_rows("memory", lines, number)
    assert isinstance(buffer, np.ndarray)
    assert sum(row[2] for row in rows) == lines
    first, last = buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes
    assert all(first <= row[1] and row[1] + 64 * row[2] <= last for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_work_takes_no_less_than_its_time(kind: str) -> None:
    net = dagexec.Workspace().create_net(work_net(work_graph("g", [("a", 5e-3, [])]), kind), "simple")
    net.run()
    start = time.perf_counter()
    net.run()
    assert time.perf_counter() - start > 2.5e-3  # half, as processors change their clock


def test_a_run_measures_every_runtime_once() -> None:
    graph = bench_graph("stencil_1d", Bench(3, 4, 5e-6))
    runtimes = [("dag", 1), ("dag:heft", 2), ("simple", 1)]
    rows = run_graph(graph, "compute", runtimes, Limits(rounds=2))
    assert [(row.net_type, row.workers) for row in rows] == runtimes
    assert [len(row.samples) for row in rows] == [2, 2, 2]
    assert all(row.kept_order and row.predicted > 0 for row in rows)


def test_measures_of_a_known_run() -> None:
    run = Measured("g", "dag", 2, 3, 10.0, 4.0, 5.0, False, 8.0, (8.0,), 6.0, True)
    assert {name: of(run) for name, of in MEASURES.items()} == {
        "efficiency": 10 / 16, "over bound": 8 / 5, "prediction error": 6 / 8 - 1,
    }  # fmt: skip


@pytest.mark.parametrize("overhead", [0.3e-6, 7e-6, 2e-3])
@pytest.mark.parametrize("workers", [1, 4])
def test_where_a_task_costs_as_much_as_it_works_metg_is_twice_that(overhead: float, workers: int) -> None:
    found = metg(lambda seconds: 1000 * (seconds + overhead) / workers, 1000, workers)
    assert found.seconds == pytest.approx(2 * overhead, rel=0.02)


def test_a_system_that_never_gets_there_has_no_metg_and_a_perfect_one_the_shortest() -> None:
    assert metg(lambda seconds: 10 * seconds * 3, 10, 1).seconds is None
    perfect = metg(lambda seconds: 10 * seconds, 10, 1)
    assert perfect.seconds == perfect.trials[0].task_seconds


def test_the_command_prints_measures(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "chain.stg").write_text("1\n0 0 0\n1 3 1 0\n2 0 1 1\n")
    status, out, _ = cli("lab", "run", str(tmp_path / "chain.stg"), "--task-us", "20", "--repeat", "2", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0
    assert [(row["graph"], row["workers"], row["tasks"]) for row in rows] == [("chain", 1, 3), ("chain", 2, 3)]
    assert rows[0]["work"] == pytest.approx(20e-6)
    assert "efficiency" in rows[0]
    assert cli("lab", "run", str(tmp_path / "chain.stg"), "--repeat", "1")[0] == 0


@pytest.mark.slow
def test_the_command_finds_the_smallest_task(cli: Cli) -> None:
    words = ("lab", "metg", "trivial", "--steps", "10", "--workers", "1", "--repeat", "1")
    status, out, _ = cli(*words, "--json")
    assert status == 0
    assert json.loads(out)["rows"][0]["trials"]
    assert "METG(50%)" in cli(*words)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "--workers '0': expected counts of 1 or more"),
        (["--net-type", "fast"], "--net-type 'fast': expected simple, dag, async_dag"),
        (["--policy", "luck"], "policy 'luck' is unknown"),
        (["--kind", "magic"], "kind of work 'magic': expected compute, memory, sleep"),
        (["--task-us", "nan"], "--task-us nan: expected more than 0"),
        (["--imbalance", "2"], "imbalance of a Task Bench graph: expected 0 to 1, found 2"),
        (["--width", "0"], "width of a Task Bench graph: expected at least 1, found 0"),
    ],
)
def test_options_that_cannot_be_are_named(cli: Cli, words: list[str], message: str) -> None:
    status, _, error = cli("lab", "run", "taskbench:fft", *words)
    assert status == 2
    assert message in error


def test_work_of_an_unknown_kind_is_named() -> None:
    net = work_net(work_graph("g", [("a", 1e-6, [])]), "magic")
    with pytest.raises(dagexec.errors.DagexecError, match=f"{WORK_OPERATOR} 'a'.*expected compute"):
        dagexec.Workspace().create_net(net, "simple").run()
