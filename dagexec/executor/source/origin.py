"""Origin: the source of an executor, to load its model again when it is saved."""

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
        source: None for a message, which is not kept in memory.
        is_calibrated: the options had inputs for calibration, which are not kept either.
        kept: the preparations of the net, from a plan.
    """

    source: ModelSource | None
    options: CompileOptions
    is_calibrated: bool = False
    kept: Kept | None = None

    @classmethod
    def of(cls, source: ModelSource, options: CompileOptions) -> Origin:
        """The origin that an executor may keep."""
        is_kept = isinstance(source, str | os.PathLike | Model | MakesModel)
        return cls(source if is_kept else None, options.kept(), bool(options.calibration_runs))

    def model(self, running: Model) -> Model:
        """The source model with its parameters; `running` is what the executor has of it.

        Raises PlanError where the source is not kept or has changed, and what `load_model` does.
        """
        if self.source is None:
            raise PlanError(
                f"net {running.name!r}: the message that it was compiled from is not kept: compile what "
                "dagexec.load_model makes of it, or build the plan from a file"
            )
        model = loaded(self.source, self.options)
        configured = as_asked(model, self.options)
        nets = (configured.program, running.program), (configured.init_program, running.init_program)
        if any(net.message() != other.message() for net, other in nets):
            where = self.source if isinstance(self.source, str | os.PathLike) else "what it was compiled from"
            raise PlanError(f"net {running.name!r}: {where} has another model now")
        return model


def loaded(source: ModelSource, options: CompileOptions) -> Model:
    """The model; if an ONNX file cannot run with all sizes, for those of `options.shapes` alone."""
    try:
        return load_model(source, allow_io=options.allow_io, foreign=options.foreign)
    except UnsupportedOperatorError:
        if not options.shapes:
            raise
        return load_model(source, allow_io=options.allow_io, foreign=options.foreign, shapes=options.shapes)
