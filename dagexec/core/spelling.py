"""What somebody probably meant who wrote a name that is not there, for messages of errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    difflib = LazyModule("difflib")
else:
    import difflib


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: `; did you mean 'data'?`, or nothing where no known name is close to `name`."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
