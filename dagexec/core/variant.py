"""Variant: what a blob may hold in place of a tensor: a sequence of arrays, or an optional array or sequence.

The arrays are nobody's to write any more, so variants share them: to copy a sequence is to copy references. A blob
keeps its Variant from run to run, so that steps which hold the blob stay valid; only the content changes. Models of
ONNX have mappings of texts or integers to numbers, too, as `dict`, alone or in a sequence; their texts are `str`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Content = Array | tuple[Any, ...] | None
"""A mapping stands in the place of an array, and a sequence may do so."""


class Variant:
    """A tuple of arrays (a sequence), or an array, or None (an optional without a value)."""

    __slots__ = ("_content", "_make")

    def __init__(self, content: Content = None) -> None:
        self.content = content

    @property
    def content(self) -> Content:
        """What it holds, which whoever asks may keep."""
        if self._make is not None:
            self.content = self._make()
        return self._content

    @content.setter
    def content(self, content: Content) -> None:
        self._content = content
        self._make: Callable[[], Content] | None = None

    def set_made(self, make: Callable[[], Content]) -> None:
        """Hold what `make` makes, anew for each who fetches it, who then need not copy it."""
        self._content, self._make = None, make

    def fetched(self, *, texts: bool) -> Any:
        """What the caller may change: an array, a list of arrays, or None; strings as `str` if these are `texts`."""
        made = self._make is not None
        content = self._content if self._make is None else self._make()
        if isinstance(content, tuple):
            return list(content) if made else [_own(one, texts=texts) for one in content]
        return None if content is None else content if made else _own(content, texts=texts)

    def __repr__(self) -> str:
        return f"Variant({described(self.content)})"


def described(content: Content) -> str:
    """What a variant holds, for messages."""
    if content is None:
        return "nothing"
    if isinstance(content, tuple):
        return f"a sequence of {len(content)}"
    if isinstance(content, dict):
        return f"a mapping of {len(content)}"
    return f"{content.dtype}{list(content.shape)}"


def _own(array: Any, *, texts: bool) -> Any:
    """A copy of an array, a mapping or a sequence."""
    if isinstance(array, tuple):
        return [_own(one, texts=texts) for one in array]
    is_text = texts and isinstance(array, np.ndarray) and array.dtype == np.object_
    return as_texts(array) if is_text else array.copy()


def as_texts(array: Array) -> Array:
    """An object array of `str` from one of `bytes` in UTF-8; bytes that are not become surrogates."""
    found = np.empty(array.size, np.object_)
    found[:] = [item.decode(errors="surrogateescape") for item in array.reshape(-1).tolist()]
    return found.reshape(array.shape)
