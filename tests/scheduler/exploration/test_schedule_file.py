"""A saved schedule fails again in the same way in another process, under other hashes and another version of Python.

`DAGEXEC_OTHER_PYTHON` names the interpreter of the other process; by default it is this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagexec.errors import StorageError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import ExploredSchedule, explore, explore_seeds
from dagexec.scheduler.exploration.event_loop import run
from dagexec.scheduler.exploration.fewest import fewest_preemptions
from dagexec.scheduler.exploration.nondeterminism import parting_from
from dagexec.scheduler.exploration.schedule_file import read_schedule, write_schedule
from tests.scheduler.exploration.test_exploration import lost_update
from tests.scheduler.exploration.test_exploration_device import CROSS, WithoutWaits, device_scenario
from tests.scheduler.exploration.test_exploration_pool import TwoStepPool
from tests.scheduler.scenarios import DIAMOND, pool_scenario


def on_an_event_loop() -> None:
    """Two tasks have threads add to a number, which they read and write under a lock, but not both at once."""
    lock, number = threads().lock(), [0]

    def add() -> None:
        with lock:
            seen = number[0]
        with lock:
            number[0] = seen + 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(asyncio.wait_for(loop.run_in_executor(None, add), 5))

    run(main)
    assert number[0] == 2, "an update is lost"


SCENARIOS = {
    "event loop": on_an_event_loop,
    "lost update": lost_update,
    "pool": pool_scenario(DIAMOND, 2, TwoStepPool),
    "device": device_scenario(CROSS, net_class=WithoutWaits),
}

REPLAY = """
import json, sys
from pathlib import Path
from dagexec.scheduler.exploration import explore
from dagexec.scheduler.exploration.schedule_file import read_schedule
from tests.scheduler.exploration.test_schedule_file import SCENARIOS, told
for name, path in zip(SCENARIOS, sys.argv[1:]):
    print(json.dumps(told(explore(SCENARIOS[name], read_schedule(Path(path)).strategy()))))
"""


def told(schedule: ExploredSchedule[object]) -> list[object]:
    """How it failed, and its steps but for rounds of an event loop: asyncio needs more of them in some versions."""
    steps = [f"{event.thread}: {event.kind}" for event in schedule.trace if event.resource != "run callbacks"]
    return [type(schedule.failure).__name__, steps]


@pytest.mark.slow
def test_schedules_fail_again_in_another_process_with_other_hashes(tmp_path: Path) -> None:
    expected, paths = [], []
    for number, scenario in enumerate(SCENARIOS.values()):
        failed = explore_seeds(scenario, range(2000)).failed
        assert failed is not None
        shrunk = fewest_preemptions(scenario, failed, most=60)
        paths.append(tmp_path / f"{number}.json")
        write_schedule(paths[-1], shrunk.schedule, shrunk.deviations)
        expected.append(told(shrunk.schedule))
    for seed in "1", "2":
        ran = subprocess.run(
            [os.environ.get("DAGEXEC_OTHER_PYTHON", sys.executable), "-c", REPLAY, *map(str, paths)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert [json.loads(line) for line in ran.stdout.splitlines()] == expected


def test_a_file_makes_the_schedule_again(tmp_path: Path) -> None:
    failed = explore_seeds(lost_update, range(100)).failed
    assert failed is not None
    shrunk = fewest_preemptions(lost_update, failed)
    path = tmp_path / "schedule.json"
    write_schedule(path, shrunk.schedule, shrunk.deviations)
    saved = read_schedule(path)
    again = explore(lost_update, saved.strategy())
    assert again.trace == shrunk.schedule.trace
    assert saved.is_kind_of(again.failure)
    assert not saved.is_kind_of(None)
    assert [step.thread for step in saved.steps] == [event.thread for event in again.trace]
    assert parting_from(lost_update, saved) is None


def test_a_scenario_that_has_changed_parts_from_the_saved_steps(tmp_path: Path) -> None:
    def taking(which: int) -> None:
        locks = [threads().lock() for _ in range(2)]
        with locks[0]:
            pass
        with locks[which]:
            raise ValueError("in the end")

    path = tmp_path / "schedule.json"
    write_schedule(path, explore(lambda: taking(0)), ())
    assert parting_from(lambda: taking(0), read_schedule(path)) is None
    found = parting_from(lambda: taking(1), read_schedule(path))
    assert found is not None
    assert (found.step, found.first) == (2, "main: acquire lock 1")
    assert found.second.startswith("main: acquire lock 2 (test_schedule_file.py:")


BY_SET_OF_STRINGS = """
from pathlib import Path
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore
from dagexec.scheduler.exploration.nondeterminism import parting_from
from dagexec.scheduler.exploration.schedule_file import read_schedule, write_schedule

PATH = Path({path!r})

def scenario():
    locks = {{name: threads().lock() for name in map(str, range(40))}}
    waiting = set(locks)
    for name in waiting:
        with locks[name]:
            pass
    raise ValueError("in the end")

if PATH.exists():
    print(parting_from(scenario, read_schedule(PATH)))
else:
    write_schedule(PATH, explore(scenario), ())
"""


@pytest.mark.slow
def test_the_order_of_a_set_of_strings_is_named_where_another_process_has_another(tmp_path: Path) -> None:
    program = BY_SET_OF_STRINGS.format(path=str(tmp_path / "schedule.json"))
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "1", "2")
    ]
    assert said[1] == "None\n"
    assert "part after 0 steps: main: acquire lock " in said[2]
    assert "the order of the set 'waiting' of strings, which hash anew in each process, at " in said[2]


GOOD = {"format": "dagexec schedule", "version": 1, "timeouts": False, "deviations": [], "steps": [], "failure": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not a schedule"),
        (b"[" * 100_000, "not a schedule"),
        ([], 'expected an object whose format is "dagexec schedule"'),
        ({**GOOD, "format": "other"}, "expected an object whose format"),
        ({**GOOD, "version": 2}, "expected version 1, found 2"),
        ({**GOOD, "timeouts": 0}, "expected true or false for timeouts, found 0"),
        ({**GOOD, "deviations": {}}, "expected a list of deviations, found dict"),
        ({**GOOD, "steps": None}, "expected a list of steps, found NoneType"),
        ({**GOOD, "steps": [["main", "acquire"]]}, "step 0: expected a thread, what it does and with what"),
        ({**GOOD, "failure": 1}, "expected a text for failure, found 1"),
        ({**GOOD, "deviations": [{"thread": "main", "steps": True, "to": "a"}]}, "deviation 0: expected a thread"),
        ({**GOOD, "deviations": [{"thread": "main", "steps": -1, "to": "a"}]}, "deviation 0: expected a thread"),
        ({**GOOD, "deviations": [{"thread": "main", "to": "a"}]}, "deviation 0: expected a thread"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_was_expected(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(StorageError, match=message) as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(StorageError, match="not a schedule"):
            read_schedule(path)
