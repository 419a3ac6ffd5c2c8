"""Operators of one form that are nothing but calls of NumPy, prepared together: one table of native calls for all.

One of them was prepared as usual, and its calls were found (`numpy_calls`). Others make the same calls with other
addresses: of their inputs and outputs, and of scratch that each of them has, which begins with what that of the first
one held when it was prepared. What else the calls read are constants that follow from the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dagexec.core.native import ALL_BITS, NativeCall, Phases, table_code
from dagexec.core.native_tables import AlikeStep, AlikeSteps, lie_apart
from dagexec.core.numpy_calls import NumpyCalls
from dagexec.core.operator import Operator, Prepared, Repeat
from dagexec.errors import DagexecError
from dagexec.platform.addresses import address_of
from dagexec.platform.host_memory import aligned_bytes
from dagexec.platform.records import dataclass

_Numbers = npt.NDArray[np.int64]

_LINE, _MOST_SCRATCH = 64, 4 << 10
"""Bytes: where a piece of scratch begins, and how much of it an operator may have."""


def repeat_of(operator: Operator, prepared: Prepared) -> Repeat | None:
    """What prepares others of the form of `operator`, which was just `prepared`; None where it does more than calls.

    Operators that draw random numbers, and those with constants, may have read more than the form tells.
    """
    numpy_calls = prepared.keeps
    if not isinstance(numpy_calls, NumpyCalls) or not operator.schema.reproducible:
        return None
    if prepared.inputs_in_place or prepared.outputs_in_place or prepared.shared_buffer is not None:
        return None
    tensors = [blob.tensor() for blob in (*operator.input_blobs, *operator.output_blobs)]
    if any(tensor.constant is not None or not tensor.is_packed for tensor in tensors):
        return None
    calls = numpy_calls.calls
    if any(pieces is None or len(pieces) > 1 for pieces in calls.steps):
        return None
    starts = list(accumulate((-(-one.nbytes // _LINE) * _LINE for one in prepared.scratch), initial=0))
    if starts[-1] > _MOST_SCRATCH:
        return None
    own = [(tensor.address, tensor.nbytes) for tensor in tensors]
    own += [(address_of(one), one.nbytes) for one in prepared.scratch]
    places = [_place(address_of(array), own) for array in numpy_calls.arrays]
    if any(number == len(places) or places[number] is None for number in calls.written):
        return None  # working memory in an arena, or what an operator keeps for itself
    names = (*operator.definition.input, *operator.definition.output)
    distinct = [place for place, name in enumerate(names) if names.index(name) == place]
    sizes = tuple(tensors[one].nbytes for one in distinct)
    if not lie_apart(np.array([[tensors[one].address for one in distinct]]), np.array(sizes))[0]:
        return None
    content = np.zeros(starts[-1], np.uint8)
    for one, start in zip(prepared.scratch, starts[:-1], strict=True):
        content[start : start + one.nbytes] = one.reshape(-1).view(np.uint8)
    return _Repeated(numpy_calls, tuple(places), tuple(starts), content, tuple(distinct), sizes).steps


_Place = tuple[int, int]
"""The number of a tensor, or behind these of scratch, and an offset in it."""


def _place(address: int, own: Sequence[tuple[int, int]]) -> _Place | None:
    """Where an array lies; None for a constant."""
    for number, (start, nbytes) in enumerate(own):
        if start <= address < start + nbytes:
            return number, address - start
    return None


@dataclass(frozen=True)
class _Repeated:
    """Operators like one that was prepared.

    Attributes:
        found: the calls of that one.
        places: of its arrays.
        scratch: where each piece of scratch begins in the block of an operator, and how large that is.
        content: what a block holds before the first run.
        distinct: the tensors of different names.
        sizes: bytes of these.
    """

    found: NumpyCalls
    places: tuple[_Place | None, ...]
    scratch: tuple[int, ...]
    content: npt.NDArray[np.uint8]
    distinct: tuple[int, ...]
    sizes: tuple[int, ...]

    def steps(self, operators: Sequence[Operator], addresses: _Numbers) -> list[AlikeStep | None]:
        """The step of each; None for one whose tensors overlap. See `Repeat`."""
        apart = lie_apart(addresses[:, list(self.distinct)], np.array(self.sizes, np.int64))
        chosen = np.flatnonzero(apart).tolist()
        steps: list[AlikeStep | None] = [None] * len(operators)
        native_steps = self._made([operators[number] for number in chosen], addresses[chosen]) if len(chosen) else []
        for number, step in zip(chosen, native_steps, strict=True):
            steps[number] = step
        return steps

    def _made(self, operators: Sequence[Operator], addresses: _Numbers) -> list[AlikeStep]:
        count, calls = len(operators), self.found.calls
        block = aligned_bytes(count * self.scratch[-1], f"{operators[0].label}: scratch of {count} operators")
        block.reshape(count, -1)[:] = self.content
        own = address_of(block) + self.scratch[-1] * np.arange(count)
        starts = np.zeros((count, len(self.places) + 1), np.int64)
        for number, place in enumerate(self.places):
            if place is None:
                starts[:, number] = address_of(self.found.arrays[number])
            elif place[0] < addresses.shape[1]:
                starts[:, number] = addresses[:, place[0]] + place[1]
            else:
                starts[:, number] = own + self.scratch[place[0] - addresses.shape[1]] + place[1]
        read = np.ascontiguousarray(np.take(starts, calls.arrays, axis=1) + calls.offsets)
        rows = np.repeat(calls.rows[np.newaxis], count, axis=0)
        rows[:, :, 1] += (address_of(read) + read.strides[0] * np.arange(count)).astype(np.uint64)[:, np.newaxis]
        keeps = self.found, block, read, rows
        pieces = [piece for pieces in calls.steps for piece in pieces or ()]
        run = table_code()
        assert run is not None, "no machine code runs here"
        phases: Phases = tuple(
            ((NativeCall(run, (0, last - first, 0, 0), None, _failed, keeps),),) for first, last in pieces
        )
        tables = np.zeros((count, len(pieces), 6), np.uint64)
        tables[:, :, 0] = run
        first_rows = np.array([first for first, _ in pieces], np.int64) * rows.strides[1]
        tables[:, :, 1] = address_of(rows) + first_rows + rows.strides[0] * np.arange(count)[:, np.newaxis]
        tables[:, :, 2] = [last - first for first, last in pieces]
        tables[:, :, 5] = ALL_BITS
        return AlikeSteps(phases, tables, partial(_named, operators), keeps).steps()


def _named(operators: Sequence[Operator], number: int, call: NativeCall) -> NativeCall:
    label = operators[number].label
    return replace(call, failure=lambda: DagexecError(f"{label}: a table of native calls did not end"))


def _failed() -> DagexecError:
    return DagexecError("a table of native calls did not end")
