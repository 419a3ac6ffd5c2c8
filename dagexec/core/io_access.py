"""Access of operators beyond the blobs of their workspace: none, files in one folder, or anything.

A model from a file is data, and whoever wrote it chooses its operators and their arguments. So an operator that reads
or writes files says so in its schema (`OpSchema.does_io`), and is only made in a workspace that allows it.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from dagexec.errors import AccessError


class IO(IntEnum):
    """Levels of access that operators need and workspaces allow: each includes those before it."""

    NONE = 0
    READ_FOLDER = 1
    """Read files in the workspace's root folder."""
    WRITE_FOLDER = 2
    """Write there, too."""
    ANY = 3
    """Files anywhere, and other processes."""


_NEEDS = {
    IO.READ_FOLDER: "reads files",
    IO.WRITE_FOLDER: "writes files",
    IO.ANY: "talks to others outside of its net",
}
_HOW = "compile(..., allow_io=True), --allow-io or Workspace(allow_io=True) allows it"


def needs_of(needed: IO) -> str:
    """In words, what an operator does that needs this access."""
    return _NEEDS[needed]


def check_allowed(needed: IO, allowed: IO, owner: str) -> None:
    """Raise AccessError, saying how to allow it, when an operator needs more than is allowed."""
    if needed > allowed:
        raise AccessError(f"{owner}: it {_NEEDS[needed]}, which a model is not allowed to do; {_HOW}")


def check_inside(path: Path, folder: Path, owner: str) -> None:
    """Raise AccessError unless `path`, with its contents if it is a folder, is in `folder` after symbolic links."""
    root = folder.resolve()
    try:
        parts = (path, *path.iterdir()) if path.is_dir() else (path,)
        inside = all(part.resolve().is_relative_to(root) for part in parts)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character, a loop of links
        raise AccessError(f"{owner}: {str(path)[:200]!r} cannot be looked up: {error}") from None
    if not inside:
        raise AccessError(f"{owner}: {str(path)[:200]!r} is outside the folder {str(root)!r}; {_HOW}")
