"""The adversary: it finds graphs on which a policy loses, the same ones for a seed, as files that others can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagexec.lab.adversary import LONGEST, SHORTEST, find_loss, predicted_loss
from dagexec.lab.graph import work_graph
from dagexec.lab.wfformat import read_wfformat, write_wfformat
from dagexec.scheduling import CriticalPath, Fifo, Heft, MinMin
from tests.command_line import Cli

EASY = ("lab", "adversary", "--policy", "min_min", "--against", "critical_path", "--steps", "20")


def test_the_loss_of_a_graph_is_that_of_the_two_schedules() -> None:
    graph = work_graph("g", [("long", 3, []), ("short", 1, []), ("other", 2, [])])
    loss = predicted_loss(graph, MinMin(), CriticalPath(), 2)
    assert (loss.seconds, loss.against_seconds) == (4, 3)  # 1 + 3 beside 2; 3 beside 2 + 1
    assert loss.ratio == pytest.approx(4 / 3)


def test_a_policy_that_takes_short_tasks_first_soon_loses_a_fifth() -> None:
    loss = find_loss(MinMin(), CriticalPath(), 2, tasks=8, steps=200, seed=1)
    assert loss.ratio > 1.2
    assert len(loss.graph.tasks) == 8
    assert all(SHORTEST <= task.seconds <= LONGEST for task in loss.graph.tasks)


def test_the_search_comes_further_than_its_first_graphs() -> None:
    first, last = (find_loss(Fifo(), Heft(), 2, tasks=8, steps=steps, seed=3).ratio for steps in (4, 150))
    assert last > first


def test_a_seed_finds_the_same_graph_and_another_seed_another_one() -> None:
    one, same, other = (find_loss(Fifo(), Heft(), 2, tasks=6, steps=40, seed=seed) for seed in (5, 5, 6))
    assert one == same
    assert one.graph.tasks != other.graph.tasks


def test_nothing_is_lost_against_oneself() -> None:
    assert find_loss(Heft(), Heft(), 2, tasks=5, steps=20, seed=0).ratio == 1


def test_a_file_has_the_same_graph_and_loss(tmp_path: Path) -> None:
    loss = find_loss(MinMin(), Heft(), 3, tasks=9, steps=40, seed=2)
    write_wfformat(loss.graph, tmp_path / "graph.json")
    again = read_wfformat(tmp_path / "graph.json")
    assert again.tasks == loss.graph.tasks
    found = predicted_loss(again, MinMin(), Heft(), 3)
    assert (found.seconds, found.against_seconds) == (loss.seconds, loss.against_seconds)


@pytest.mark.slow
def test_the_command_saves_what_it_found_and_runs_it(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    status, out, _ = cli(*EASY, "--task-us", "20", "--repeat", "8", "--output", str(file), "--json")
    assert status == 0
    (row,) = json.loads(out)["rows"]
    assert row["predicted_ratio"] == row["seconds"] / row["against_seconds"]
    assert row["measured"]["low"] <= row["measured"]["ratio"] <= row["measured"]["high"]
    assert [task.seconds for task in read_wfformat(file).tasks] == [task["seconds"] for task in row["graph"]["tasks"]]
    assert cli("lab", "run", str(file), "--policy", "min_min", "--task-us", "20", "--repeat", "1")[0] == 0


def test_all_pairs_are_searched_for_and_saved_in_a_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagexec.scheduling.catalog._BUNDLED", {"fifo": Fifo, "min_min": MinMin})
    words = ("lab", "adversary", "--all", "--steps", "8", "--tasks", "4", "--task-us", "20", "--repeat", "8")
    status, out, _ = cli(*words, "--output", str(tmp_path / "found"))
    assert status == 0
    assert sorted(line.partition(":")[0] for line in out.splitlines()) == [
        "fifo against min_min",
        "min_min against fifo",
    ]
    assert sorted(file.name for file in (tmp_path / "found").iterdir()) == ["fifo-min_min.json", "min_min-fifo.json"]
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in cli(*words, "--output", str(tmp_path / "file"))[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "fifo"], "--against is missing: expected two policies, or --all"),
        (["--against", "fifo"], "--policy is missing"),
        (["--policy", "fifo", "--against", "fifo"], "--against 'fifo': expected another policy"),
        (["--policy", "fifo", "--against", "luck"], "policy 'luck' is unknown"),
        (["--all", "--policy", "fifo"], "--all is for every pair of policies"),
        ([*EASY[2:], "--output", "graph.stg"], "--output 'graph.stg': expected a name that ends with .json"),
        ([*EASY[2:], "--kind", "magic"], "kind of work 'magic'"),
        ([*EASY[2:], "--task-us", "0"], "--task-us 0.0: expected more than 0"),
        ([*EASY[2:], "--workers", "1"], "--workers"),
    ],
)
def test_options_that_cannot_be_are_named(cli: Cli, words: list[str], message: str) -> None:
    status, _, error = cli("lab", "adversary", *words)
    assert status == 2
    assert message in error
