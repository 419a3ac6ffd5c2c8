"""Origin: what an executor was asked to be made of, as far as it can be had again to be saved with it."""

from __future__ import annotations

import os

from dagexec.binding.kept import Kept
from dagexec.core.model import MakesModel, Model
from dagexec.errors import PlanError, UnsupportedOperatorError
from dagexec.executor.source.loading import ModelSource, load_model
from dagexec.executor.source.options import as_asked
from dagexec.options import CompileOptions
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Origin:
    """A source, and options as the caller gave them.

    Attributes:
        source: None for a message of the caller, which is not kept in memory.
        is_calibrated: the options had inputs for calibration, which are not kept either.
        kept: what a plan has of how its net was prepared.
    """

    source: ModelSource | None
    options: CompileOptions
    is_calibrated: bool = False
    kept: Kept | None = None

    @classmethod
    def of(cls, source: ModelSource, options: CompileOptions) -> Origin:
        """What an executor may keep of its caller's."""
        kept = isinstance(source, str | os.PathLike | Model | MakesModel)
        return cls(source if kept else None, options.kept(), bool(options.calibration_runs))

    def model(self, running: Model) -> Model:
        """The model as it was given, with its parameters; `running` is what the executor has of it.

        Raises PlanError where that cannot be had, or is not the same any more, and what `load_model` does.
        """
        if self.source is None:
            raise PlanError(
                f"net {running.name!r}: the message that it was compiled from is not kept: compile what "
                "dagexec.load_model makes of it, or build the plan from a file"
            )
        found = loaded(self.source, self.options)
        asked = as_asked(found, self.options)
        nets = (asked.program, running.program), (asked.init_program, running.init_program)
        if any(one.message() != other.message() for one, other in nets):
            where = self.source if isinstance(self.source, str | os.PathLike) else "what it was compiled from"
            raise PlanError(f"net {running.name!r}: {where} has another model now")
        return found


def loaded(source: ModelSource, options: CompileOptions) -> Model:
    """The model; one of an ONNX file that cannot be run for all sizes with those of `options.shapes` alone."""
    try:
        return load_model(source, allow_io=options.allow_io, foreign=options.foreign)
    except UnsupportedOperatorError:
        if not options.shapes:
            raise
        return load_model(source, allow_io=options.allow_io, foreign=options.foreign, shapes=options.shapes)
