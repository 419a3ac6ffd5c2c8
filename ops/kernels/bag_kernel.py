"""Sums of rows of a table that ranges of indices pick, as machine code: all bags of a batch in one call.

The rows of a bag are added in their order. An index is checked where it is used, and whether all were right at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeCall, NativeStep
from dagexec.core.operator import Step
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import shares
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import A0, GREATER, LESS, NOT_LESS, RESULT
from dagexec.platform.assembly.native import GeneralAssembler
from dagexec.platform.machine_code import executable

Array = npt.NDArray[Any]

_BAD, _COUNT, _COLUMNS, _TABLE, _ROWS, _LOWEST, _INDICES, _PLACES, _STARTS, _ENDS, _OUT = (8 * n for n in range(11))
"""Places of the 64-bit numbers that a kernel is told: whether an index was out of range, which it notes; how many bags
and columns there are; the table, its rows and the lowest index; the indices and their number; bounds; the result."""

_INDEX_BYTES = 8


def bag_step(
    machine: Machine,
    tensors: tuple[Array, Array, Array, Array | None],
    y: Array,
    *,
    is_mean: bool,
    wraps: bool,
    failure: Callable[[], Exception],
) -> Step | None:
    """The step of operator EmbeddingBag on packed data, starts, ends and indices; see there.

    Where an index is out of range, `failure` makes what is raised. None where no kernel runs.
    """
    data, starts, ends, indices = tensors
    if not machine.can_run or not y.size:
        return None
    run, look = _kernel(machine.lanes, indices is not None, is_mean), _bad_code()
    if run is None or look is None:
        return None
    rows, columns = len(data), y.size // len(y)
    places = data if indices is None else indices
    pieces = pieces_of_bytes(len(places) * columns * BYTES)
    phase = []
    for part in shares(len(ends), pieces):
        fields = np.array(
            [
                *(0, len(part), columns, address_of(data), rows, -rows if wraps else 0),
                *(address_of(places), len(places), address_of(starts) + _INDEX_BYTES * part.start),
                *(address_of(ends) + _INDEX_BYTES * part.start, address_of(y) + BYTES * columns * part.start),
            ],
            np.int64,
        )
        keeps, arguments = (fields, tensors, y), (address_of(fields), 0, 0, 0)
        phase.append(tuple(NativeCall(code, arguments, None, failure, keeps) for code in (run, look)))
    return NativeStep((tuple(phase),))


@cache
def _bad_code() -> int | None:
    """The address of a function that returns what is in the first field; None where none runs."""
    code = GeneralAssembler()
    code.load_number(RESULT, A0, None, offset=_BAD)
    code.end_call()
    return executable(code.code())


@lru_cache
def _kernel(lanes: int, has_indices: bool, is_mean: bool) -> int | None:
    """The address of a function of the fields, which returns 0; None where it cannot run."""
    build = Builder(lanes)
    (fields,) = build.arguments(1)
    starts, ends = build.number(fields, _STARTS), build.number(fields, _ENDS)
    out = build.number(fields, _OUT)
    build.store_number(build.zero(), fields, _BAD)
    with build.repeat(build.number(fields, _COUNT)):
        first, behind = _bound(build, fields, starts), _bound(build, fields, ends)
        count = build.copied(behind - first)
        with build.when(count, LESS, 0):
            count.set(build.zero())
        columns = build.number(fields, _COLUMNS)
        step = first << 3 if has_indices else first * (columns << 2)
        picked = build.number(fields, _INDICES) + step

        def body(place: Scalar, mask: Mask | None, picked: Scalar = picked, count: Scalar = count) -> None:
            total = build.constant(0.0)
            at = build.copied(picked)
            with build.repeat(count):
                row = _row(build, fields, at) if has_indices else at
                total.set(total + build.load(row, place, mask=mask))
                at.set(at + (_INDEX_BYTES if has_indices else build.number(fields, _COLUMNS) << 2))
            if is_mean:
                divisor = build.copied(count)
                with build.when(divisor, LESS, 1):
                    divisor.set(divisor + 1)
                total.set(total / build.from_integer(build.repeated(divisor)))
            build.store(total, out, place, mask=mask)

        build.each(columns, body)
        out.set(out + (columns << 2))
        starts.set(starts + _INDEX_BYTES)
        ends.set(ends + _INDEX_BYTES)
    return build.function()


def _bound(build: Builder, fields: Scalar, at: Scalar) -> Scalar:
    """A start or an end, from the end where it is negative, cut to the places that there are."""
    bound, places = build.copied(build.number(at)), build.number(fields, _PLACES)
    with build.when(bound, LESS, 0):
        bound.set(bound + places)
    with build.when(bound, LESS, 0):
        bound.set(build.zero())
    with build.when(bound, GREATER, places):
        bound.set(places)
    return bound


def _row(build: Builder, fields: Scalar, at: Scalar) -> Scalar:
    """The address of the row whose index is there; of row 0 where it is out of range, which is noted."""
    index, rows = build.copied(build.number(at)), build.number(fields, _ROWS)
    with build.when(index, LESS, 0):
        index.set(index - build.number(fields, _LOWEST))
    for condition, bound in ((LESS, 0), (NOT_LESS, rows)):
        with build.when(index, condition, bound):
            index.set(build.zero())
            build.store_number(build.number_of(1), fields, _BAD)
    return build.number(fields, _TABLE) + index * (build.number(fields, _COLUMNS) << 2)
