"""Limits: how much one client, and all of them together, may ask of a server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dagexec.server.validation import Count, Seconds, settings


@settings
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

    body_bytes: Count = 256 << 20
    total_body_bytes: Count = 1 << 30
    header_bytes: Count = 64 << 10
    tensors: Count = 256
    axes: Count = 16
    elements: Count = 1 << 28
    connections: Count = 10_000
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 60.0
    idle_seconds: Seconds = 60.0

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
