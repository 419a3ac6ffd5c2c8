"""The section that shows a training: its metrics by step, those of held-out samples, and how long steps took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.training.trainer import StepReport

_MOST_POINTS = 2000


@dataclass(frozen=True)
class TrainingSection:
    """Reports of all steps, and the metrics of held-out samples after some of them."""

    steps: Sequence[StepReport]
    measures: Sequence[tuple[int, Mapping[str, float]]]

    kind = "training"
    title = "Learning curve"

    def as_json(self) -> Json:
        """A curve for each metric; of very many steps, means of neighbors."""
        size = max(1, -(-len(self.steps) // _MOST_POINTS))
        groups = [self.steps[start : start + size] for start in range(0, len(self.steps), size)]
        names = list(self.steps[0].metrics) if self.steps else []
        curves = {name: [_mean([report.metrics[name] for report in group]) for group in groups] for name in names}
        return {
            "steps": [group[-1].step for group in groups],
            "curves": curves | {"seconds a step": [_mean([report.seconds for report in group]) for group in groups]},
            "measures": [[step, dict(values)] for step, values in self.measures],
        }


def _mean(values: Sequence[float]) -> float | str:
    """Words for NaN and infinity, which JSON lacks."""
    mean = sum(values) / len(values)
    return mean if abs(mean) < float("inf") else str(mean)
