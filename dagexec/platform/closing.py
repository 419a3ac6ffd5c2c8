"""Closing: context managers that close themselves at the end."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Self


class Closing:
    """Base of classes with `close`: a `with` block closes them, whatever happens inside."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what it holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
