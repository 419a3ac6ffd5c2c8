"""What has been tried of networks, in a file of JSON lines: a long comparison goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Setting:
    """How a batch of a network was run.

    Attributes:
        isa, engine: as `python -m tests.rows` names them.
        options: of `dagexec.compile`, as text.
    """

    isa: str
    engine: str
    network: str
    options: str
    threads: int
    size: int


class Record:
    """Settings with what was found, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, setting: Setting, found: Iterable[str]) -> None:
        """Append a line. The last one may have been cut off by a time limit: it ends here, and does not count."""
        is_cut = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" * is_cut + json.dumps({**asdict(setting), "found": list(found)}) + "\n")

    def read(self) -> dict[Setting, list[str]]:
        """What was found by setting, of the last line where there are several."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        known: dict[Setting, list[str]] = {}
        for line in lines:
            if line.endswith("}"):
                entry = json.loads(line)
                found = entry.pop("found")
                known[Setting(**entry)] = found
        return known
