"""A server, its cluster, its clients and its disk on virtual time: a seed says what goes wrong, and repeats it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the server is an extra")

from dagexec.cluster.dispatcher import Dispatcher
from dagexec.errors import DeadlockError
from dagexec.stress.simulated_disk import SimulatedDisk
from dagexec.stress.simulation import Simulated, SimulationError, simulate
from tests.command_line import Cli


def simulated(seeds: Iterable[int]) -> list[Simulated]:
    return [simulate(seed) for seed in seeds]


@pytest.mark.slow
def test_a_seed_repeats_its_simulation_to_the_step() -> None:
    assert simulated(range(3)) == simulated(range(3))


@pytest.mark.slow
def test_each_request_is_answered_once_and_all_is_of_use_again_whatever_goes_wrong() -> None:
    answers: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for found in simulated(range(40)):
        answers += found.answers
        met += found.met
    assert answers["200"] > answers.total() // 2
    network = {"message lost", "message twice", "connection reset", "partition", "node crashed"}
    assert network | {"model not loaded", "checkpoint not saved"} <= set(met)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["nothing is synchronized", "answers get lost", "what was lost is not started again"]
)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "nothing is synchronized":

        def nothing(_disk: SimulatedDisk, _path: Path) -> None:
            return

        monkeypatch.setattr(SimulatedDisk, "synchronize", nothing)
    elif mistake == "answers get lost":
        numbers = itertools.count()
        answered = Dispatcher._answered

        def every_other(dispatcher: Dispatcher, attempt: object, answer: object) -> None:
            if next(numbers) % 2:
                answered(dispatcher, attempt, answer)  # type: ignore[arg-type]

        monkeypatch.setattr(Dispatcher, "_answered", every_other)
    else:
        monkeypatch.setattr(Dispatcher, "_start", lambda *_: None)
    with pytest.raises((SimulationError, DeadlockError)):
        simulated(range(10))


@pytest.mark.slow
def test_the_command_counts_what_went_wrong(cli: Cli) -> None:
    status, out, _ = cli("stress", "--simulate", 2, "--json")
    assert status == 0
    assert json.loads(out)["answers"]["200"] > 10


@pytest.mark.slow
def test_the_command_says_how_a_failure_is_repeated(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "_start", lambda *_: None)
    status, _, error = cli("stress", "--simulate", 3, "--seed", 5)
    assert status == 1
    assert "again: dagexec stress --simulate 1 --seed 5" in error
