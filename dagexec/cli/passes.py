"""What `dagexec inspect --passes` shows: what each pass of the graph compiler changes in a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from dagexec.compiler.compilation import compile_model
from dagexec.compiler.passes import PassOutcome
from dagexec.core.model import Model
from dagexec.options import CompileOptions

_MAX_CHANGES = 4  # of one pass in the table; --json has all


def pass_outcomes(
    model: Model, shapes: Mapping[str, Sequence[int]], own: Sequence[str], without: Collection[str]
) -> Sequence[PassOutcome]:
    """What each pass does when the model is compiled without measuring; passes named in `without` are skipped.

    `own` are names of passes of installed packages that run, too.

    Raises ArgumentError, with the list of passes, for an unknown name, and what compiling raises.
    """
    options = CompileOptions(tuning_seconds=0, shapes=shapes, passes=own, without_passes=without)
    report = compile_model(model, options).report
    return () if report is None else report.passes


def pass_table(outcomes: Sequence[PassOutcome]) -> Table:
    """A row for each pass: operators before and after, and the first of its changes."""
    table = Table(title="passes")
    for column in ("pass", "before", "after", "changes", "ms", "what"):
        table.add_column(column, justify="left" if column in ("pass", "what") else "right")
    for outcome in outcomes:
        shown = list(outcome.changes[:_MAX_CHANGES])
        rest = len(outcome.changes) - len(shown)
        lines = [*shown, *([f"and {rest} more"] if rest else [])]
        table.add_row(
            outcome.name,
            str(outcome.operators_before),
            str(outcome.operators_after),
            str(len(outcome.changes)),
            f"{outcome.seconds * 1e3:.1f}",
            Text("\n".join(lines)),
        )
    return table


def passes_as_list(outcomes: Sequence[PassOutcome]) -> list[dict[str, object]]:
    """The outcomes for JSON."""
    return [
        {
            "name": outcome.name,
            "operators_before": outcome.operators_before,
            "operators_after": outcome.operators_after,
            "changes": list(outcome.changes),
            "seconds": outcome.seconds,
        }
        for outcome in outcomes
    ]
