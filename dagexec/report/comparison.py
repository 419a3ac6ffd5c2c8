"""The sections of a comparison: runtimes side by side with all their runs, and times predicted for more workers."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.analysis.comparison import Comparison, PeerResult, RuntimeResult
from dagexec.analysis.statistics import Finding
from dagexec.analysis.what_if import WhatIf
from dagexec.platform.records import dataclass
from dagexec.report.document import Figure, Json

_LITTLE = 0.05
"""The gain, as a part of the time, below which more workers do not pay."""


@dataclass(frozen=True)
class ComparisonSection:
    """A row for each runtime and each peer."""

    rows: Sequence[RuntimeResult | PeerResult]

    kind = "comparison"
    title = "Runtimes side by side"

    def as_json(self) -> Json:
        """Times in milliseconds. Values that only runtimes have are None for a peer."""
        return {"rows": list(map(_row, self.rows))}


def _row(row: RuntimeResult | PeerResult) -> Json:
    verdict = row.verdict
    result: Json = {
        "name": row.runtime,
        "samples": [round(one, 5) for one in row.samples_ms],
        "quartiles": [row.quartile_1_ms, row.median_ms, row.quartile_3_ms],
        "predicted": None,
        "speed_up": None if verdict is None else 1 / verdict.ratio,
        "interval": None if verdict is None else [1 / verdict.high, 1 / verdict.low],
        "finding": None if verdict is None else str(verdict.finding),
        "bound": None,
        "difference": row.largest_difference if row.largest_difference < float("inf") else None,
        "same_bytes": False,
        "remarks": list(row.remarks),
    }
    if isinstance(row, RuntimeResult):
        result |= {
            "predicted": row.predicted_ms,
            "speed_up": row.speed_up,
            "bound": row.bound,
            "same_bytes": row.same_bytes,
        }
    return result


def figures(comparison: Comparison, explained: RuntimeResult) -> tuple[Figure, ...]:
    """What is seen first: how fast the `explained` runtime is, what the DAG allows it, and what more workers give."""
    shown = [
        _speed_up(explained),
        Figure(f"\u2264 {explained.bound:.2f}\u00d7", "allowed by the DAG", "on any number of workers"),
    ]
    on_host = [prediction for prediction in comparison.what_if if not prediction.streams]
    if on_host:
        best = min(prediction.predicted_ms for prediction in on_host)
        enough = min(
            (prediction for prediction in on_host if prediction.predicted_ms <= best * (1 + _LITTLE)),
            key=lambda prediction: prediction.workers,
        )
        workers = f"{enough.workers} worker{'s' if enough.workers > 1 else ''}"
        detail = (
            f"over one; of up to {max(prediction.workers for prediction in on_host)}, more gain less than {_LITTLE:.0%}"
        )
        shown.append(Figure(f"{enough.speed_up:.2f}\u00d7", f"predicted for {workers}", detail))
    return tuple(shown)


def _speed_up(row: RuntimeResult) -> Figure:
    label, verdict = f"{row.runtime}, over SimpleNet", row.verdict
    if verdict is None:
        return Figure(f"{row.speed_up:.2f}\u00d7", label, "too few rounds for an interval")
    detail = f"{1 / verdict.high:.2f} to {1 / verdict.low:.2f}"
    return Figure(
        f"{row.speed_up:.2f}\u00d7",
        label,
        detail if verdict.finding is not Finding.SAME else f"{detail}: {verdict.finding}",
    )


@dataclass(frozen=True)
class WhatIfSection:
    """Predicted times by the number of workers."""

    predictions: Sequence[WhatIf]

    kind = "what_if"
    title = "What if there were more workers"

    def as_json(self) -> Json:
        """Times in milliseconds; `streams` is 0 on the host."""
        return {
            "rows": [
                {
                    "workers": row.workers,
                    "streams": row.streams,
                    "predicted": row.predicted_ms,
                    "low": row.low_ms,
                    "high": row.high_ms,
                    "bound": row.bound_ms,
                    "speed_up": row.speed_up,
                }
                for row in self.predictions
            ]
        }
