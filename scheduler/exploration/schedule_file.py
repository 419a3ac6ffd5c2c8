"""A schedule as a file: where it leaves the one without preemptions, by the names of threads, as JSON.

    {
      "format": "dagexec schedule",
      "version": 1,
      "timeouts": false,
      "deviations": [{"thread": "main", "steps": 24, "to": "dagexec-0"}],
      "failure": "DifferentResultError: ...",
      "python": "3.11.7"
    }

When `thread` has made `steps` steps, `to` continues; elsewhere nobody is preempted. With `timeouts`, deadlines may pass
although something else could go on. The last two are for people. No number of a decision and no line of code is in it,
so it holds in another process and on another version of Python, as long as threads come to the same points.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

from dagexec.errors import StorageError
from dagexec.platform.disk import reading
from dagexec.platform.files import write_atomically
from dagexec.scheduler.exploration.deviations import ByName, Deviation

_FORMAT = "dagexec schedule"
_VERSION = 1
_MOST_BYTES = 64 << 20


def write_schedule(path: Path, deviations: Sequence[Deviation], *, timeouts: bool, failure: str) -> None:
    """Write a schedule that ends with `failure`. Raises OutputError if the file cannot be written."""
    found = {
        "format": _FORMAT,
        "version": _VERSION,
        "timeouts": timeouts,
        "deviations": [one._asdict() for one in deviations],
        "failure": failure,
        "python": platform.python_version(),
    }
    write_atomically(path, (json.dumps(found, indent=2) + "\n").encode())


def read_schedule(path: Path) -> ByName:
    """The strategy that makes the schedule of a file again. Raises StorageError for what is none."""
    try:
        with reading(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES} bytes")
        return _read(json.loads(content))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path}: not a schedule: {error}") from None


def _read(found: object) -> ByName:
    """Raises ValueError that says what was expected and found."""
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f'expected an object whose format is "{_FORMAT}"')
    if found.get("version") != _VERSION:
        raise ValueError(f"expected version {_VERSION}, found {found.get('version')!r}")
    timeouts, rows = found.get("timeouts"), found.get("deviations")
    if not isinstance(timeouts, bool):
        raise ValueError(f"expected true or false for timeouts, found {timeouts!r}")
    if not isinstance(rows, list):
        raise ValueError(f"expected a list of deviations, found {type(rows).__name__}")
    return ByName([_deviation(number, row) for number, row in enumerate(rows)], timeouts=timeouts)


def _deviation(number: int, row: object) -> Deviation:
    if isinstance(row, dict):
        thread, steps, to = (row.get(name) for name in Deviation._fields)
        if isinstance(thread, str) and type(steps) is int and steps >= 0 and isinstance(to, str):
            return Deviation(thread, steps, to)
    raise ValueError(f"deviation {number}: expected a thread, its steps and who continues, found {row!r:.200}")
