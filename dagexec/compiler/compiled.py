"""A model as compilation leaves it, and the report of what was done to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dagexec.compiler.passes.rewriting import PassOutcome
from dagexec.compiler.tuning.choosing import Choice
from dagexec.core.model import Model
from dagexec.options import CompileOptions
from dagexec.platform import processor
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class CompilationReport:
    """What was done to a model.

    Attributes:
        passes: what each pass changed, in order.
        layout: of images, one of `ops.base.layout.LAYOUTS`; all that a pipeline's stages have.
        schedule: how the net runs, and what that is predicted to take; None where nothing was chosen.
        origin: of the layout: "measured", "known" from an earlier measurement, or "estimated" by rules.
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
        found.append(f"layout: {self.layout} ({self.origin})")
        found.append(f"schedule: net type {self.schedule.net_type}, {self.schedule.workers} worker(s)")
        for workers, seconds in self.schedule.predicted(processor.available_cores()).items():
            found.append(f"  {workers} worker(s): predicted {seconds * 1e3:.3f} ms ({self.schedule.origin})")
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
