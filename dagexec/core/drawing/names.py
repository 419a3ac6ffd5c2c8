"""Names of operators in drawings and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Named(Protocol):
    """An operator, as a record or as a message."""

    @property
    def type(self) -> str:
        """Of the operator."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def output(self) -> Sequence[str]:
        """The blobs that it writes."""


def operator_name(definition: Named) -> str:
    """Its name, or that of its first output, or else its type."""
    return definition.name or next(iter(definition.output), definition.type)


def operator_title(definition: Named) -> str:
    """Its type and its name."""
    return f"{definition.type} {operator_name(definition)}"
