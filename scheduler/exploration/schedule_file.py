"""A schedule as a JSON file: where it departs from the one without preemptions, by the names of threads.

    {
      "format": "dagexec schedule",
      "version": 1,
      "timeouts": false,
      "deviations": [{"thread": "main", "steps": 24, "to": "dagexec-0"}],
      "steps": [["main", "acquire", "lock 1"], ...],
      "failure": "DifferentResultError: ...",
      "python": "3.11.7"
    }

When `thread` has made `steps` steps, `to` continues; elsewhere nobody is preempted. With `timeouts`, deadlines may pass
although something else could go on. `steps` are the steps of the schedule, which are compared with those of a replay
that does not fail likewise (`nondeterminism.parting_from`). The file has no numbers of decisions and no lines of code,
so it holds in another process and on another version of Python, as long as threads reach the same points.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dagexec.errors import StorageError
from dagexec.platform.disk import reading
from dagexec.platform.files import write_atomically
from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.deviations import ByName, Deviation
from dagexec.scheduler.exploration.exploring import ExploredSchedule

_FORMAT = "dagexec schedule"
_VERSION = 1
_MOST_BYTES = 64 << 20


class Saved(NamedTuple):
    """A step that was made: as an event, without the place of its resource."""

    thread: str
    kind: str
    resource: str


@dataclass(frozen=True)
class SavedSchedule:
    """The content of a file.

    Attributes:
        deviations: where it departs from the schedule without preemptions.
        timeouts: deadlines may pass although something else could go on.
        steps: those that were made.
        failure: what was raised in the end.
    """

    deviations: tuple[Deviation, ...]
    timeouts: bool
    steps: tuple[Saved, ...]
    failure: str

    def strategy(self) -> ByName:
        """The strategy that repeats the schedule."""
        return ByName(self.deviations, timeouts=self.timeouts)

    def is_kind_of(self, failure: BaseException | None) -> bool:
        """True for a failure of the kind in the file."""
        return type(failure).__name__ == self.failure.partition(":")[0]


def unplaced(resource: str) -> str:
    """The name of a lock without the file and line that made it."""
    return resource.partition(" (")[0]


def write_schedule(path: Path, schedule: ExploredSchedule[Any], deviations: Sequence[Deviation]) -> None:
    """Write a schedule that failed. Raises OutputError if the file cannot be written."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "timeouts": schedule.timeouts,
        "deviations": [deviation._asdict() for deviation in deviations],
        "steps": [[event.thread, event.kind, unplaced(event.resource)] for event in schedule.trace],
        "failure": f"{type(schedule.failure).__name__}: {schedule.failure}",
        "python": platform.python_version(),
    }
    write_atomically(path, (json.dumps(content) + "\n").encode())


def read_schedule(path: Path) -> SavedSchedule:
    """The schedule in a file. Raises StorageError for any other file."""
    try:
        with reading(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES} bytes")
        return _read(json.loads(content))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path}: not a schedule: {error}") from None


def _read(content: object) -> SavedSchedule:
    """Raises ValueError that names what was expected and found."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f'expected an object whose format is "{_FORMAT}"')
    if content.get("version") != _VERSION:
        raise ValueError(f"expected version {_VERSION}, found {content.get('version')!r}")
    timeouts, failure = content.get("timeouts"), content.get("failure")
    if not isinstance(timeouts, bool):
        raise ValueError(f"expected true or false for timeouts, found {timeouts!r}")
    if not isinstance(failure, str):
        raise ValueError(f"expected a text for failure, found {failure!r:.200}")
    deviations = tuple(_deviation(number, row) for number, row in enumerate(_rows(content, "deviations")))
    steps = tuple(_step(number, row) for number, row in enumerate(_rows(content, "steps")))
    return SavedSchedule(deviations, timeouts, steps, failure)


def _rows(content: dict[object, object], name: str) -> list[object]:
    rows = content.get(name)
    if not isinstance(rows, list):
        raise ValueError(f"expected a list of {name}, found {type(rows).__name__}")
    return rows


def _step(number: int, row: object) -> Saved:
    if isinstance(row, list) and len(row) == len(Saved._fields) and all(isinstance(text, str) for text in row):
        return Saved(*row)
    raise ValueError(f"step {number}: expected a thread, what it does and with what, found {row!r:.200}")


def _deviation(number: int, row: object) -> Deviation:
    if isinstance(row, dict):
        thread, steps, to = (row.get(name) for name in Deviation._fields)
        if isinstance(thread, str) and type(steps) is int and steps >= 0 and isinstance(to, str):
            return Deviation(thread, steps, to)
    raise ValueError(f"deviation {number}: expected a thread, its steps and who continues, found {row!r:.200}")
