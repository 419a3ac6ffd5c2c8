"""Variant: what a blob may hold in place of a tensor: a sequence of arrays, or an optional array or sequence.

The arrays are nobody's to write any more, so variants share them: to copy a sequence is to copy references. A blob
keeps its Variant from run to run, so that steps which hold the blob stay valid; only the content changes.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Content = Array | tuple[Array, ...] | None


class Variant:
    """A tuple of arrays (a sequence), or an array, or None (an optional without a value)."""

    __slots__ = ("content",)

    def __init__(self, content: Content = None) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"Variant({described(self.content)})"


def described(content: Content) -> str:
    """What a variant holds, for messages."""
    if content is None:
        return "nothing"
    if isinstance(content, tuple):
        return f"a sequence of {len(content)}"
    return f"{content.dtype}{list(content.shape)}"


def fetched(content: Content) -> Any:
    """A copy that the caller may change: an array, a list of arrays, or None."""
    if isinstance(content, tuple):
        return [array.copy() for array in content]
    return None if content is None else content.copy()
