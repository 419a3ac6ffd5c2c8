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
        blob_copy: the same in other element types, by the number of the type; None without any.
        optimizer: what updates it in the place of the model's optimizer; see `optimizer_context`.
    """

    def __init__(
        self, blob: BlobReference, shape: Sequence[int] | None = None, blob_copy: dict[int, Any] | None = None
    ) -> None:
        self.blob = blob
        self.shape = None if shape is None else tuple(shape)
        self.grad: Any = None
        self.tags: set[str] = set()
        self.blob_copy = blob_copy
        self.optimizer: Any = None

    @property
    def name(self) -> str:
        """The name of the blob."""
        return str(self.blob)
