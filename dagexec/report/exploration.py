"""The section that shows a schedule that was explored: who went on at each step, as swim lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagexec.report.document import Json
from dagexec.scheduler.exploration import ExploredSchedule, compact


@dataclass(frozen=True)
class ExplorationSection:
    """What became of a scenario under `schedule`; `command` repeats it."""

    schedule: ExploredSchedule[Any]
    command: str = ""

    kind = "exploration"
    title = "The failing schedule"

    def as_json(self) -> Json:
        """Lanes in the order in which they first went on; for each step the number of its lane and what was done."""
        failure = self.schedule.failure
        lanes = list(dict.fromkeys(who for who, _ in self.schedule.trace))
        number = {who: place for place, who in enumerate(lanes)}
        return {
            "failure": "" if failure is None else f"{type(failure).__name__}: {failure}",
            "decisions": compact(self.schedule.decisions),
            "command": self.command,
            "lanes": lanes,
            "steps": [[number[who], what] for who, what in self.schedule.trace],
            "left": list(self.schedule.left),
        }
