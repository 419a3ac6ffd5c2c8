"""Rows that are sums of a few other rows, each times a number: interpolation along an axis, as machine code.

An axis that is not the last is resized by them as it is, and the last one between two transposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of

Array = npt.NDArray[Any]

MOST_TERMS = 4
"""Rows of a sum, whose addresses and weights stay in registers."""

_COUNT, _ROWS, _TERMS = range(3)
"""Places of the 64-bit numbers that a kernel is told: elements of a row, rows of the result, and the address of their
terms: of each the bytes to the row that is read, and the weight."""

_TERM = np.dtype([("offset", np.int64), ("weight", np.float32), ("", np.float32)])


def weighted_rows_step(machine: Machine, x: Array, y: Array, places: Array, weights: Array, label: str) -> Step | None:
    """The step y[:, i] = sum over t of weights[t, i] * x[:, places[t, i]], of packed float32 arrays [blocks, rows, n].

    None where there are too many terms, or the kernel cannot run.
    """
    if not machine.can_run or len(places) > MOST_TERMS:
        return None
    kernel = _kernel(machine.lanes, len(places))
    if kernel is None:
        return None
    terms = np.zeros(places.T.shape, _TERM)
    terms["offset"] = places.T * x.strides[1]
    terms["weight"] = weights.T
    kept: list[Array] = [terms]
    blocks, rows = y.shape[:2]
    pieces = pieces_of_bytes(y.nbytes * (1 + len(places)))
    parts = [range(rows)] * pieces if blocks >= pieces else shares(rows, pieces)
    shared = shares(blocks, pieces) if blocks >= pieces else [range(blocks)] * len(parts)

    def calls(part: range, images: range) -> Iterator[tuple[int, int, int, int, int]]:
        fields = np.array([y.shape[2], len(part), address_of(terms[part.start :])], np.int64)
        kept.append(fields)
        for image in images:
            target = address_of(y) + image * y.strides[0] + part.start * y.strides[1]
            yield kernel, address_of(x) + image * x.strides[0], target, address_of(fields), 0

    tables = [list(calls(part, images)) for part, images in zip(parts, shared, strict=False)]
    return in_pieces(tables, (kept, x, y), label)


@lru_cache
def _kernel(lanes: int, terms: int) -> int | None:
    """The address of a function of source, target and fields; None where it cannot run."""
    return _written(lanes, terms).function()


def _written(lanes: int, terms: int) -> Builder:
    build = Builder(lanes)
    source, target, fields = build.arguments(3)
    count, rows = build.number(fields, 8 * _COUNT), build.number(fields, 8 * _ROWS)
    table = build.number(fields, 8 * _TERMS)
    with build.repeat(rows):
        read = [source + build.number(table, term * _TERM.itemsize) for term in range(terms)]
        weights = [build.broadcast(table, offset=term * _TERM.itemsize + 8) for term in range(terms)]

        def body(place: Scalar, mask: Mask | None) -> None:
            value = build.load(read[0], place, mask=mask) * weights[0]
            for row, weight in zip(read[1:], weights[1:], strict=True):
                value = build.fma(build.load(row, place, mask=mask), weight, value)
            build.store(value, target, place, mask=mask)

        build.each(count, body, together=2)
        target.set(target + count * BYTES)
        table.set(table + terms * _TERM.itemsize)
    return build
