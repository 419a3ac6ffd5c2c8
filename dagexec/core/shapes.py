"""Shapes of tensors: how many elements they have."""

from __future__ import annotations

from dagexec.errors import ResourceError

_MAX_ELEMENTS = (1 << 63) - 1


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements of a tensor of `shape`.

    Raises ResourceError for a negative size, and for sizes whose product, zeros aside, does not fit 63 bits.
    """
    count = extent = 1
    for size in shape:
        if size < 0:
            raise ResourceError(f"shape {shape} has a negative size")
        count *= size
        extent *= size or 1
    if extent > _MAX_ELEMENTS:
        raise ResourceError(f"shape {shape} overflows: it has more than 2^63 - 1 elements")
    return count
