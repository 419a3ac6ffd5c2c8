"""load_pipeline: the pipeline that a TOML file describes."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from dagexec.errors import ModelFormatError
from dagexec.pipelines.pipeline import Pipeline


def load_pipeline(path: str | os.PathLike[str]) -> Pipeline:
    """The pipeline that a TOML file describes (docs/pipelines.md); its name is that of the file where it says none.

    Functions that it names are imported, as code of yours. Raises ModelFormatError for a file that cannot be read or
    is no TOML, PipelineError for what is wrong in it, and what `Pipeline.stage` raises.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            content = tomllib.load(opened)
    except OSError as error:
        raise ModelFormatError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{file}: not a TOML file: {error}") from None
    return Pipeline.from_dict({"name": file.stem, **content}, file.parent)
