"""The cores that the threads of a team may use."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from dagexec.ops.kernels.team_cores import restrict_others
from dagexec.ops.onednn.binding import library, require_library, usable_threads
from dagexec.platform import teams

_found = library()
pytestmark = pytest.mark.skipif(
    _found is None or not _found.machine.can_run or usable_threads(2) < 2, reason="there is no team"
)


def _masks() -> dict[int, set[int]]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def test_the_other_threads_of_a_team_are_restricted_and_nobody_else() -> None:
    team = require_library("test").machine.team
    assert team is not None
    core = min(os.sched_getaffinity(0))
    found: list[tuple[dict[int, set[int]], dict[int, set[int]]]] = []

    def with_a_team_of_its_own() -> None:
        before = _masks()
        restrict_others(team, 3, {core})
        found.append((before, _masks()))
        teams.leave()

    thread = threading.Thread(target=with_a_team_of_its_own)
    thread.start()
    thread.join()
    [(before, after)] = found
    new = after.keys() - before.keys()
    assert [after[one] for one in new] == [{core}] * 2
    assert all(after[one] == before[one] for one in after.keys() & before.keys())
