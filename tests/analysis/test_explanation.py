"""Three sentences about a comparison, with the figures that it has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dagexec.analysis.bounds import Idle, IdleInterval, PathStep, RunBounds
from dagexec.analysis.comparison import Comparison
from dagexec.analysis.explanation import explain
from dagexec.analysis.statistics import Finding, Verdict
from dagexec.analysis.what_if import CostModel
from tests.command_line import Cli
from tests.nets import net_of
from tests.report.pages import made_up_row, plan_of


def test_the_sentences_name_the_largest_cause_first() -> None:
    plan = plan_of(net_of([[], [0], [0], [1, 2]]))
    faster = Verdict(0.5, 0.48, 0.52, Finding.FASTER, 0.03)
    rows = (made_up_row("simple", 1, 20.0), replace(made_up_row("dag", 2, 10.0), verdict=faster))
    comparison = Comparison("net", 4, 15, rows, CostModel((1e-3, 4e-3, 1e-3, 2e-3)))
    path = (PathStep(0, (0,), 1e-3, 0.0, False), PathStep(1, (1, 3), 6e-3, 1e-3, False))
    intervals = (IdleInterval(0, 1_000_000, 1, "serial", 0), IdleInterval(2_000_000, 5_000_000, 1, "imbalance", 1))
    bounds = RunBounds(2, 8e-3, 11e-3, path, Idle(1e-3, 3e-3, 1e-3), intervals, 1.25)
    speed, way, causes = explain(comparison, bounds, plan)
    assert speed.startswith("dag, 2 workers, takes 10 ms and SimpleNet 20 ms: 2 times as fast (1.92 to 2.08); the DAG")
    assert "3 of 4 operators from NoOp 'b0' to NoOp 'b3', computes for 7 ms of the 8 ms" in way
    assert "4 ms, goes to NoOp 'b1'" in way
    assert "69% is computing; idle are 19% while branches differ in length" in causes
    assert "6% while nothing can run beside the chain from NoOp 'b0' (serial bottleneck)" in causes
    assert "take 1.25 times as long as alone" in causes


def test_a_runtime_that_is_slower_than_simplenet_is_called_slower() -> None:
    slower = Verdict(1.25, 1.2, 1.3, Finding.SLOWER, 0.05)
    rows = (made_up_row("simple", 1, 20.0), replace(made_up_row("dag", 2, 25.0), verdict=slower))
    comparison = Comparison("net", 1, 15, rows, CostModel((1e-3,)))
    bounds = RunBounds(2, 1e-3, 1e-3, (PathStep(0, (0,), 1e-3, 0.0, False),), Idle(1e-3, 0, 0), (), None)
    assert "1.25 times as slow (1.2 to 1.3)" in explain(comparison, bounds, plan_of(net_of([[]])))[0]
    assert comparison.finding == "dag, 2 workers, against SimpleNet: 1.25 times as slow (1.2 to 1.3)."


@pytest.mark.slow
def test_the_commands_say_it_and_write_pages(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, shown, _ = cli("compare", "zoo:lenet", "--repeat", "2", "--explain", "--report", str(page))
    assert status == 0
    assert " ".join(shown.split()).count("Its critical path, ") == 1
    assert page.read_text().startswith("<!DOCTYPE html>")
    status, shown, _ = cli("compare", "zoo:lenet", "--repeat", "2", "--explain", "--json")
    assert len(json.loads(shown)["explanation"]) == 3
    for command in ("inspect", "run"):
        page = tmp_path / f"{command}.html"
        assert cli(command, "zoo:lenet", "--report", str(page))[0] == 0
        assert '"kind":"graph"' in page.read_text()


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_known_before_the_work(cli: Cli, tmp_path: Path) -> None:
    for command in ("inspect", "run", "compare"):
        status, _, error = cli(command, "zoo:lenet", "--report", str(tmp_path / "page.png"))
        assert status == 2
        assert "ends with .html" in error
    status, _, error = cli("compare", "zoo:lenet", "--dtype", "int8", "--explain")
    assert status == 2
    assert "cannot be combined with --dtype" in error
