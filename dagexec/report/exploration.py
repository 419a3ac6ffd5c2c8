"""The section that shows an exploration: what its schedules covered, and the steps of one that failed."""

from __future__ import annotations

from typing import Any

from dagexec.analysis.story import Story
from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.scheduler.exploration import Exploration

_MOST_POINTS = 1000


@dataclass(frozen=True)
class ExplorationSection:
    """The outcome of a scenario under the schedules that `chosen` names.

    For a failure, `command` repeats it and `story` explains it.
    """

    result: Exploration[Any]
    chosen: str
    command: str = ""
    story: Story | None = None

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
            "failed": None if self.story is None else self._failed(self.story),
        }

    def _failed(self, story: Story) -> Json:
        """The story, and how its schedule was found."""
        assert self.result.failed is not None
        schedule = self.result.failed
        return {
            **story.as_json(),
            "strategy": schedule.strategy,
            "seed": schedule.seed,
            "command": self.command,
            "left": list(story.schedule.left),
        }
