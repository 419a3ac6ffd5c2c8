"""A model as compilation leaves it, and the report of what was done to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagexec.compiler.passes.rewriting import PassOutcome
from dagexec.compiler.tuning.choosing import Choice
from dagexec.core.model import Model
from dagexec.options import CompileOptions


@dataclass(frozen=True)
class CompilationReport:
    """What was done to a model.

    Attributes:
        passes: what each pass changed, in order.
        layout: of images, one of `ops.base.layout.LAYOUTS`; all that a pipeline's stages have.
        schedule: how the net runs, and what it was chosen from; None where nothing was chosen.
        origin: of layout and schedule: "measured", "known" from an earlier measurement, or "estimated" by rules.
        seconds: what each stage of compilation took.
        islands: how islands were judged, a line each.
    """

    passes: tuple[PassOutcome, ...]
    layout: str
    schedule: Choice | None
    origin: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    islands: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report in words."""
        found = [f"{outcome.name}: {change}" for outcome in self.passes for change in outcome.changes]
        found += [f"islands: {line}" for line in self.islands]
        if self.schedule is None:
            return found
        chosen = self.schedule.schedule
        wide = sum(threads > 1 for threads in chosen.threads)
        found.append(f"layout: {self.layout} ({self.origin})")
        ran = any(row.measured is not None for row in self.schedule.considered)
        origin = "predicted" if self.origin == "measured" and not ran else self.origin
        found.append(
            f"schedule: {chosen.kind} ({origin}), net type {chosen.net_type}, {chosen.workers} worker(s), "
            f"{wide} of {len(chosen.threads)} operators on several threads"
        )
        for row in self.schedule.considered:
            measured = "" if row.measured is None else f", measured {row.measured * 1e3:.3f} ms"
            found.append(f"  {row.schedule.kind}: predicted {row.predicted * 1e3:.3f} ms{measured}")
        found.append("seconds: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items()))
        return found


@dataclass(frozen=True)
class Compiled:
    """A model as it is going to run.

    Attributes:
        options: how; net type and workers are no longer open.
        report: what was done to the model; None when nothing was.
    """

    model: Model
    options: CompileOptions
    report: CompilationReport | None = None
