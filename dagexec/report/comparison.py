"""The sections of a comparison: runtimes side by side with all their runs, and times predicted for more workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagexec.analysis.comparison import RuntimeResult
from dagexec.analysis.what_if import WhatIf
from dagexec.report.document import Json


@dataclass(frozen=True)
class ComparisonSection:
    """A row for each runtime."""

    rows: Sequence[RuntimeResult]

    kind = "comparison"
    title = "Runtimes side by side"

    def as_json(self) -> Json:
        """Times in milliseconds."""
        return {
            "rows": [
                {
                    "name": row.runtime,
                    "samples": [round(one, 5) for one in row.samples_ms],
                    "quartiles": [row.quartile_1_ms, row.median_ms, row.quartile_3_ms],
                    "predicted": row.predicted_ms,
                    "speed_up": row.speed_up,
                    "bound": row.bound,
                    "same_bytes": row.same_bytes,
                }
                for row in self.rows
            ]
        }


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
                    "bound": row.bound_ms,
                    "speed_up": row.speed_up,
                }
                for row in self.predictions
            ]
        }
