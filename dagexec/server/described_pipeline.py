"""Pipelines in a server's configuration: a pipeline that is put together whenever it is loaded.

Who writes the configuration of a server decides what it runs, so a stage may be a Python function, where the
configuration says that this is meant (`python_steps`). Files of models and clients cannot name functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagexec.core.model import Model
from dagexec.errors import SettingError
from dagexec.pipelines.pipeline import Pipeline
from dagexec.platform.records import dataclass

DESCRIPTION_KEYS = frozenset(("name", "inputs", "stages", "outputs"))


@dataclass(frozen=True)
class DescribedPipeline:
    """A pipeline as data (`Pipeline.from_dict`), of which files are relative to `folder`.

    Its files are read, and its functions imported, each time that it is loaded, so that a server that loads it again
    has what they are then.
    """

    description: Mapping[str, Any]
    folder: Path

    def as_model(self) -> Model:
        """The model. Raises PipelineError, and what `Pipeline.stage` raises."""
        return Pipeline.from_dict(self.description, self.folder).as_model()


def check_python_steps(description: Mapping[str, Any]) -> None:
    """Raise SettingError, which names pipeline and stage, if a stage is a Python function."""
    stages = description.get("stages")
    for stage, table in stages.items() if isinstance(stages, Mapping) else ():
        if isinstance(table, Mapping) and "python" in table:
            raise SettingError(
                f"pipeline {description['name']!r}: stage {stage!r}: a Python step, {table['python']!r:.80}, is "
                f"imported and called only where [server] has python_steps = true"
            )
