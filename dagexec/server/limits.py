"""Limits: how much one client, and all of them together, may ask of a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from dagexec.errors import SettingError
from dagexec.platform.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is refused beyond. Each is more than 0.

    Attributes:
        body_bytes: of one request, also after it has been decompressed.
        total_body_bytes: of all requests that are being read or in service.
        header_bytes: of the request line and the headers of one request.
        tensors: inputs, and outputs, of one request.
        axes: of one tensor.
        elements: of one tensor.
        connections: that are open at one time.
        header_seconds: from the first byte of a request to the end of its headers.
        body_seconds: from there to the end of its body.
        idle_seconds: that a connection stays open between requests.
    """

    body_bytes: int = 256 << 20
    total_body_bytes: int = 1 << 30
    header_bytes: int = 64 << 10
    tensors: int = 256
    axes: int = 16
    elements: int = 1 << 28
    connections: int = 10_000
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: float = 60.0

    def problem_with_shape(self, shape: object) -> str | None:
        """What is wrong with the sizes that a client gives for a tensor, None if nothing is."""
        if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
            return "shape must be a list of sizes"
        if len(shape) > self.axes:
            return f"{len(shape)} axes; at most {self.axes} are taken"
        for size in shape:
            if type(size) is not int or not 0 <= size <= self.elements:
                return f"sizes are from 0 to {self.elements}, not {size!r:.80}"
        if math.prod(shape) > self.elements:
            return f"shape {list(shape)} has more than {self.elements} elements"
        return None

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        for one in fields(self):
            value: Any = getattr(self, one.name)
            kinds = int if one.type == "int" else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                raise SettingError(f"{one.name} must be more than 0, not {value!r:.80}")
