"""What a model knows of a parameter: its blob, its shape, its gradient, and what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagexec.caffe2.references import BlobReference

__all__ = ["ParameterInfo", "ParameterTags"]


class ParameterTags:
    """What a parameter is for."""

    BIAS = "BIAS"
    WEIGHT = "WEIGHT"
    COMPUTED_PARAM = "COMPUTED_PARAM"


class ParameterInfo:
    """A parameter.

    Attributes:
        blob: its blob, in the init net.
        shape: its shape; None where nobody said.
        grad: its gradient, once there is one.
        tags: what it is for.
    """

    def __init__(self, blob: BlobReference, shape: Sequence[int] | None = None) -> None:
        self.blob = blob
        self.shape = None if shape is None else tuple(shape)
        self.grad: Any = None
        self.tags: set[str] = set()

    @property
    def name(self) -> str:
        """The name of the blob."""
        return str(self.blob)
