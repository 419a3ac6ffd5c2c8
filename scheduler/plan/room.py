"""Room: operators whose sizes a run decides, prepared for more rows than there are.

A loop whose values grow has new sizes in each iteration, and to prepare an operator takes longer than to compute it.
Where rows are computed apart (`OpSchema.rows`), an operator may compute more of them than there are: its tensors lie in
memory that grows where it is, and nothing reads what is behind the last row. So one preparation is for all numbers of
rows up to the one that it has room for. A row's bytes do not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagexec.core.blob import Blob
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import TensorType
from dagexec.core.tensor import Storage, Tensor, array_on
from dagexec.core.traits import Rows
from dagexec.errors import RowsError
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.bindings import Binding

if not TYPE_CHECKING:
    row_axes = LazyModule("dagexec.core.row_axes")
else:
    from dagexec.core import row_axes

_LEAST = 8
"""Rows that there is room for at least."""

_MOST = 64
"""Preparations of an operator."""

_PREPARATION_SECONDS = 0.5e-3
"""What a preparation takes, about."""

_MOST_PARTS = 16


@dataclass(frozen=True)
class GrowingRows:
    """The axes of rows by the place of an input or an output. The axes before have size 1."""

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]


def growing_axes(before: Sequence[TensorType], now: Sequence[TensorType]) -> Mapping[int, int] | None:
    """By input, the axis on which `now` there are other numbers of rows than `before`.

    None where this is not all that differs, or there are several numbers of rows, or none.
    """
    found: dict[int, int] = {}
    for place, (one, other) in enumerate(zip(before, now, strict=True)):
        if one == other:
            continue
        if one.meta is not other.meta or len(one.shape) != len(other.shape):
            return None
        axes = [axis for axis, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if sizes[0] != sizes[1]]
        if len(axes) > 1 or not set(other.shape[: axes[0]]) <= {1}:
            return None
        found[place] = axes[0]
    counts = {now[place].shape[axis] for place, axis in found.items()}
    return found if len(counts) == 1 and 0 not in counts else None


def growing_rows(operator: Operator, axes: Mapping[int, int]) -> GrowingRows | None:
    """Where `operator` has rows, if its inputs have them on these axes; None where they are not apart.

    Only those of floating-point numbers may be of any value: an index that is behind the last row may not be one.
    """
    inputs = range(len(operator.input_blobs))
    types = [operator.input_type(place) for place in inputs]
    values = [place for place in operator.values_read if place in inputs]
    if any(types[place].meta.numpy.kind != "f" for place in axes) or not operator.is_batch_invariant:
        return None
    if any(operator.input(place).constant is None for place in values):
        return None
    follower = row_axes.RowFollower(operator.label)
    for place, name in enumerate(operator.definition.input):
        if place in values:
            follower.take_constant(name, operator.host_value(place))
        else:
            follower.take_type(name, types[place], axes.get(place))
    try:
        follower.follow(0, operator.definition, is_asked=False)
    except RowsError:
        return None
    rows = [follower.rows_of(name) for name in operator.definition.output]
    found = {place: one.axis for place, one in enumerate(rows) if one is not None and one == Rows(one.axis)}
    return GrowingRows(axes, found) if len(found) == len(rows) else None


def _with_size(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


@dataclass(frozen=True)
class _Place:
    """A blob with rows on an axis, and where the tensor is that it holds, which is of a kind."""

    blob: Blob
    axis: int
    tensor: Tensor
    storage: Storage | None
    kind: TensorType

    @classmethod
    def of(cls, blob: Blob, axis: int) -> _Place:
        tensor = blob.get(Tensor)
        return cls(blob, axis, tensor, tensor.storage(), TensorType(tensor.shape, tensor.meta))

    def holds(self, rows: int) -> bool:
        """Whether there are so many rows at that place."""
        tensor, kind = self.tensor, self.kind
        is_alike = tensor.shape == _with_size(kind.shape, self.axis, rows) and tensor.meta is kind.meta
        return is_alike and self.is_there()

    def is_there(self) -> bool:
        """Whether the tensor is still in that memory."""
        return self.blob.value is self.tensor and self.tensor.storage() is self.storage

    def bind(self, rows: int, tensor: Tensor | None = None) -> None:
        """Have so many rows there, or in another tensor on the same memory."""
        tensor, storage = tensor or self.tensor, self.storage
        assert storage is not None
        array = array_on(storage.buffer, _with_size(self.kind.shape, self.axis, rows), self.kind.meta)
        tensor.rebind(array, storage, is_view=self.tensor.is_view)


class Rooms:
    """The preparations of an operator with room, by numbers of rows."""

    def __init__(self, operator: Operator, as_view: bool) -> None:
        self._operator = operator
        self._as_view = as_view
        self._kinds: Sequence[TensorType] = ()  # of inputs with one row, for which rows were looked for last
        self._growing: GrowingRows | None = None
        self._latest: Room | None = None
        self._all: list[Room] = []

    def step(self) -> Step | None:
        """What computes the operator for what its blobs hold, if there is room for it; the outputs have its sizes."""
        latest = self._latest
        if latest is None or latest.serves():
            return None if latest is None else latest.step
        self._latest = next((room for room in self._all if room.serves()), latest)
        return None if self._latest is latest else self._latest.step

    def prepared(self, before: Sequence[TensorType], now: Sequence[TensorType]) -> Step | None:
        """The same after the inputs had types `before`; None where no rows have been added or taken away."""
        axes = growing_axes(before, now) if len(before) == len(now) else None
        if not axes:
            return None
        kinds = [
            TensorType(_with_size(kind.shape, axes[place], 1), kind.meta) if place in axes else kind
            for place, kind in enumerate(now)
        ]
        if kinds != self._kinds:
            self._kinds, self._growing = kinds, growing_rows(self._operator, axes)
        room = None if self._growing is None else prepare_with_room(self._operator, self._growing, self._as_view)
        if room is None:
            return None
        self._all = [room, *(one for one in self._all if one.is_there())][:_MOST]
        self._latest = room
        return room.step


class Room:
    """A preparation of an operator for any number of rows from one to another.

    Attributes:
        step: computes as many as there is room for.
    """

    __slots__ = ("_fixed", "_inputs", "_outputs", "_rows", "step")

    def __init__(self, step: Step, rows: range, fixed: Sequence[Blob], places: Sequence[Sequence[_Place]]) -> None:
        self.step = step
        self._rows = rows
        self._inputs, self._outputs = places
        self._fixed = [Binding.of(blob, blob.get(Tensor)) for blob in fixed]

    def is_there(self) -> bool:
        """Whether its memory is still that of the operator's tensors."""
        return all(place.is_there() for place in (*self._inputs, *self._outputs))

    def serves(self) -> bool:
        """Whether the step is for what the operator's blobs hold; if so, the outputs have as many rows afterwards."""
        first = self._inputs[0]
        shape = first.tensor.shape
        rows = shape[first.axis] if len(shape) > first.axis else 0
        if rows not in self._rows:
            return False
        if not all([place.holds(rows) for place in self._inputs] + [binding.holds() for binding in self._fixed]):
            return False
        for place in self._outputs:
            if not place.is_there():
                return False
            place.bind(rows)
        return True


def prepare_with_room(operator: Operator, growing: GrowingRows, as_view: bool) -> Room | None:
    """`operator` prepared for as many rows as it has, and more; None where its tensors have no room."""
    inputs = {operator.input_blobs[place]: axis for place, axis in growing.inputs.items()}
    tensors = {blob: blob.get(Tensor) for blob in inputs}
    now = next(tensor.shape[inputs[blob]] for blob, tensor in tensors.items())
    call = operator.call()
    kinds = operator.infer(call)
    if kinds is None:
        return None
    rows = _range_with(now, operator.schema.cost(call, kinds).seconds)
    most = rows[-1]
    if not all(tensor.make_room(tensor.nbytes // now * most) for tensor in tensors.values()):
        return None
    places = [_Place.of(blob, axis) for blob, axis in inputs.items()]
    made = [blob for blob in operator.output_blobs if blob not in inputs]
    with _more_rows(operator, places, most):
        call = operator.call()
        prepared = operator.bind(operator.infer(call), as_view=as_view, call=call)
    results = [_Place.of(blob, growing.outputs[operator.output_blobs.index(blob)]) for blob in made]
    for place in results:
        place.bind(now)
    fixed = [blob for blob in operator.input_blobs if blob not in inputs]
    return Room(prepared.step, rows, fixed, (places, results))


@contextmanager
def _more_rows(operator: Operator, places: Sequence[_Place], rows: int) -> Iterator[None]:
    """Within it the operator has so many rows there, in blobs of its own: other workers may read those of the net."""
    before = operator.input_blobs, operator.output_blobs
    own = {place.blob: Blob(place.blob.name) for place in places}
    for place in places:
        place.bind(rows, own[place.blob].tensor(place.tensor.device))
    operator.input_blobs, operator.output_blobs = (tuple([own.get(blob, blob) for blob in blobs]) for blobs in before)
    try:
        yield
    finally:
        operator.input_blobs, operator.output_blobs = before


def _range_with(rows: int, seconds: float) -> range:
    """The numbers of rows to prepare for together, of which one is `rows`, that take so long.

    Where they grow one by one, what is computed in vain takes about as long as the preparations.
    """
    whole = 1 << (rows - 1).bit_length()
    parts = min(_MOST_PARTS, 1 << round(math.log2(1 + math.sqrt(rows * seconds / (2 * _PREPARATION_SECONDS)))))
    step = max(_LEAST, whole // (2 * parts))
    most = -(-rows // step) * step
    return range(most - step + 1, most + 1)
