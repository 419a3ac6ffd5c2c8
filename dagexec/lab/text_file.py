"""Reading the text of a graph's file, no more of it than a graph may need."""

from __future__ import annotations

from pathlib import Path

from dagexec.errors import ModelFormatError, ResourceError
from dagexec.platform.disk import reading
from dagexec.platform.files import reason

MOST_BYTES = 64 << 20


def read_text(path: Path) -> str:
    """The file as UTF-8. Raises ModelFormatError when it cannot be read, ResourceError when it is too large."""
    try:
        with reading(path) as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ModelFormatError(
            f"{path}: cannot be read: {reason(error) if isinstance(error, OSError) else error}"
        ) from None
    if len(content) > MOST_BYTES:
        raise ResourceError(f"{path}: a task graph's file has at most {MOST_BYTES >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ModelFormatError(f"{path}: line {line}: no UTF-8: {error.reason}") from None
