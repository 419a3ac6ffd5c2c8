"""The learning curve of a training: metrics of every step and every epoch, and their plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dagexec.analysis.plot import new_figure, save_figure
from dagexec.report.training import TrainingSection
from dagexec.training.trainer import StepReport


class Curve:
    """Collects the reports of a training.

    Attributes:
        seconds: total time of all steps.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._steps: list[StepReport] = []
        self._measures: list[tuple[int, dict[str, float]]] = []

    def add(self, report: StepReport) -> None:
        """Add the report of a step."""
        self.seconds += report.seconds
        self._steps.append(report)

    def add_measure(self, measured: Mapping[str, float]) -> None:
        """Add the metrics of held-out samples after the last step."""
        self._measures.append((self._steps[-1].step if self._steps else 0, dict(measured)))

    def last_measure(self) -> dict[str, float] | None:
        """The metrics of held-out samples after the last step, or None if they were not measured."""
        if not self._measures or (self._steps and self._measures[-1][0] != self._steps[-1].step):
            return None
        return self._measures[-1][1]

    def last_epoch(self) -> dict[str, float]:
        """The mean metrics over the steps of the last epoch."""
        if not self._steps:
            return {}
        last = [report for report in self._steps if report.epoch == self._steps[-1].epoch]
        return {name: sum(report.metrics[name] for report in last) / len(last) for name in last[0].metrics}

    def section(self) -> TrainingSection:
        """The same for a report."""
        return TrainingSection(self._steps, self._measures)

    def plot(self, title: str, path: Path) -> None:
        """Plot each metric over the steps, with the held-out metrics. Raises DagexecError without matplotlib."""
        names = list(self._steps[0].metrics) if self._steps else []
        figure, grid = new_figure(8, 3.2 * max(1, len(names)), rows=max(1, len(names)))
        for axes, name in zip(grid, names, strict=False):
            axes.plot(
                [report.step for report in self._steps],
                [report.metrics[name] for report in self._steps],
                linewidth=0.6,
                alpha=0.6,
                label="batch",
            )
            measured = [(step, values[name]) for step, values in self._measures if name in values]
            if measured:
                axes.plot(*zip(*measured, strict=True), marker="o", markersize=3, label="held out")
            axes.set_ylabel(name)
            axes.legend()
        grid[0].set_title(f"{title}: learning curve")
        grid[-1].set_xlabel("step")
        save_figure(figure, path)
