"""`dagexec explore`: what it prints, and that the command it prints fails in the same way."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dagexec import NetDef, load_net, save_net
from dagexec.cli import app
from dagexec.core.operator import Operator
from dagexec.errors import DagexecError, DeviceError
from tests.nets import temporary_operator
from tests.scheduler.scenarios import DIAMOND, sums


def explore(*words: str) -> Result:
    """What the command does."""
    return CliRunner().invoke(app, ["explore", *words], env={"COLUMNS": "200"})


@pytest.fixture
def right(tmp_path: Path) -> str:
    """The file of a net that is right."""
    path = tmp_path / "right.pbtxt"
    save_net(sums(DIAMOND), path)
    return str(path)


@pytest.fixture
def racy(tmp_path: Path) -> Iterator[str]:
    """The file of a net two of whose operators count up a blob they should only read; others are beside them."""

    def restart(operator: Operator) -> None:
        operator.y(0)[0] = 0

    def tell(operator: Operator) -> None:
        operator.y(0)[0] = operator.x(0)[0]
        operator.x(0)[0] += 1

    net = NetDef(name="racy")
    net.op.add(type="TestRestart", output=["start"])
    net.op.add(type="TestRestart", output=["apart"])
    net.op.add(type="Sum", input=["apart"], output=["beside"])
    for name in ("one", "other"):
        net.op.add(type="TestTell", input=["start"], output=[name])
    net.op.add(type="Sum", input=["beside"], output=["behind"])
    net.external_output.extend(["one", "other", "behind"])
    path = tmp_path / "racy.pbtxt"
    save_net(net, path)
    with temporary_operator("TestRestart", restart), temporary_operator("TestTell", tell):
        yield str(path)
    gc.collect()  # schedules that failed did not come to the point where they close their nets


@pytest.mark.parametrize("how", [[], ["--net-type", "async_dag", "--device", "sim:0"], ["--callers", "2"]])
def test_a_right_net_passes_all_schedules(right: str, how: list[str]) -> None:
    result = explore(right, "--shape", "x=2,3", "--seeds", "10", *how)
    assert result.exit_code == 0, result.output
    assert "schedules tried" in result.stdout
    assert "10" in result.stdout


@pytest.mark.slow
def test_the_reduction_of_a_right_net_passes(right: str) -> None:
    result = json.loads(explore(right, "--shape", "x=2,3", "--strategy", "reduction", "--limit", "4", "--json").stdout)
    assert (result["schedules"] + result["cut"], result["exhausted"], result["failure"]) == (4, False, None)


@pytest.mark.slow
def test_a_search_says_whether_it_tried_everything(right: str) -> None:
    words = (right, "--shape", "x=2,3", "--systematic", "--preemptions", "0", "--json")
    whole = json.loads(explore(*words).stdout)
    assert whole["exhausted"] is True
    assert whole["schedules"] > 5
    part = json.loads(explore(*words, "--limit", "3").stdout)
    assert (part["exhausted"], part["schedules"]) == (False, 3)


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--systematic"], ["--strategy", "surw"]])
def test_a_racy_net_fails_and_the_printed_command_fails_in_the_same_way(
    racy: str, how: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = explore(racy, *how, "--report", str(page))
    assert result.exit_code == 1, result.output
    assert "DifferentResultError: model 'racy', caller 0" in page.read_text()
    assert "DifferentResultError: model 'racy', caller 0: 'one', 'other' differ from what SimpleNet" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("again: "))
    program, command, *words = shlex.split(line.removeprefix("again: "))
    assert (program, command) == ("dagexec", "explore")
    again = explore(*words, "--json")
    assert again.exit_code == 1
    report = json.loads(again.stdout)
    assert report["schedules"] == 1
    assert report["failure"] in result.stdout
    assert len([part for part in words[words.index("--replay") + 1].split(",") if part]) <= 3


@pytest.mark.slow
def test_the_story_of_a_racy_net_names_what_nothing_orders(racy: str) -> None:
    result = explore(racy, "--json")
    story = json.loads(result.stdout)["story"]
    (finding,) = story["findings"]
    assert finding["kind"] == "swapped"
    assert "TestTell 'other' (operator 4) on dagexec-racy-" in finding["text"]
    assert "came before TestTell 'one' (operator 3)" in finding["text"]
    assert "blob 'start'" in finding["text"]
    assert story["preemptions"] <= 1
    printed = explore(racy).stdout
    assert [line for line in story["text"] if line not in printed] == []


@pytest.mark.slow
def test_a_saved_schedule_is_replayed_from_its_file(racy: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    result = explore(racy, "--save", str(path), "--json")
    found = json.loads(result.stdout)
    assert json.loads(path.read_text())["deviations"] == found["story"]["deviations"]
    *_, option, value = shlex.split(found["replay"])
    assert (option, value) == ("--replay", str(path))
    again = json.loads(explore(racy, "--replay", str(path), "--json").stdout)
    assert (again["schedules"], again["failure"]) == (1, found["failure"])
    assert again["decisions"] == found["story"]["decisions"]


@pytest.mark.slow
def test_a_failing_net_is_shrunk(racy: str, tmp_path: Path) -> None:
    smaller = tmp_path / "smaller.pbtxt"
    result = explore(racy, "--shrink", str(smaller))
    assert result.exit_code == 1
    types = [op.type for op in load_net(smaller).op]
    assert f"a failing net of {len(types)} operators: {smaller}" in result.stdout
    assert types.count("TestTell") == 2
    assert len(types) < 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "1", "--replay", "1:1"], "give only one of them"),
        (["--seed", "1", "--systematic"], "cannot be combined with --seed"),
        (["--seed", "1", "--strategy", "reduction"], "has no seeds"),
        (["--replay", "x"], "NUMBER:CHOICE"),
        (["--replay", "nowhere.json"], "nowhere.json: not a schedule"),
        (["--net-type", "fast"], "net type 'fast' is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(right: str, words: list[str], message: str) -> None:
    result = explore(right, "--shape", "x=2,3", *words)
    assert isinstance(result.exception, DagexecError)
    assert message in str(result.exception)


def test_a_device_that_is_not_under_control_is_refused(right: str) -> None:
    for device in ("cuda:0", "sim:99"):
        result = explore(right, "--shape", "x=2,3", "--device", device, "--seeds", "1")
        assert isinstance(result.exception, DeviceError)
