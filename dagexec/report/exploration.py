"""The section that shows an exploration: what its schedules covered, and the steps of one that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagexec.report.document import Json
from dagexec.scheduler.exploration import Exploration, ExploredSchedule, compact

_MOST_POINTS = 1000


@dataclass(frozen=True)
class ExplorationSection:
    """What became of a scenario under the schedules that `chosen` names; `command` repeats the one that failed."""

    result: Exploration[Any]
    chosen: str
    command: str = ""

    kind = "exploration"
    title = "Schedules explored"

    def as_json(self) -> Json:
        """Handovers that were met by the number of schedules, and the schedule that failed."""
        handovers = self.result.handovers
        shown = sorted({*range(0, len(handovers), -(-len(handovers) // _MOST_POINTS) or 1), len(handovers) - 1} - {-1})
        return {
            "chosen": self.chosen,
            "tried": self.result.tried,
            "different": self.result.different,
            "strategies": [
                [name, count, self.result.new_by_strategy[name]] for name, count in self.result.by_strategy.items()
            ],
            "handovers": [[number + 1, handovers[number]] for number in shown],
            "failed": None if self.result.failed is None else self._failed(self.result.failed),
        }

    def _failed(self, schedule: ExploredSchedule[Any]) -> Json:
        """Lanes in the order in which they first went on; for each step the number of its lane and what was done."""
        lanes = list(dict.fromkeys(event.thread for event in schedule.trace))
        number = {who: place for place, who in enumerate(lanes)}
        return {
            "failure": f"{type(schedule.failure).__name__}: {schedule.failure}",
            "strategy": schedule.strategy,
            "seed": schedule.seed,
            "decisions": compact(schedule.decisions),
            "command": self.command,
            "lanes": lanes,
            "steps": [[number[event.thread], str(event)] for event in schedule.trace],
            "left": list(schedule.left),
        }
