"""Scan: a net for each row of some arrays, with state variables carried from one row to the next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from dagexec.core import dtypes
from dagexec.core.blob import Blob, tensor_in
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Step
from dagexec.core.operator_with_bodies import OperatorWithBodies
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import UNBOUNDED, BodyCall, BodyTypes, TensorType
from dagexec.core.tensor import Tensor
from dagexec.core.traits import Rows
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, RunCancelledError, RunTimeoutError, SchemaError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.control.carrying import Carrying, Stacking, deliver, require_kept, with_axis
from dagexec.ops.families.control.conditional import CAPTURED
from dagexec.ops.families.control.loop import STACKED_SHAPES, STACKED_TYPES, row_types

_NET = "scan_net"


def _infer_bodies(call: BodyCall) -> BodyTypes:
    """States keep their types; what is stacked has as many rows as the scanned inputs. Not known of batched scans."""
    count = call.arguments.int("num_scan_inputs", 0)
    states, scanned = call.inputs[: len(call.inputs) - count], call.inputs[len(call.inputs) - count :]
    if call.arguments.bool("batched"):
        return BodyTypes([None] * len(call.definition.output), {})
    input_axes = call.arguments.ints("scan_input_axes") or [0] * count
    rows = [_row(kind, axis) for kind, axis in zip(scanned, input_axes, strict=False)]
    given = (*states, *(row for row, _ in rows))
    results = call.results(_NET, given)
    lengths = {length for _, length in rows}
    length = lengths.pop() if len(lengths) == 1 else None
    kept = [one if one == two else None for one, two in zip(states, results, strict=False)]
    if None in kept or length is None:
        return BodyTypes([None] * len(call.definition.output), {})
    output_axes = call.arguments.ints("scan_output_axes") or [0] * (len(results) - len(kept))
    stacked = [with_axis(kind, axis, length) for kind, axis in zip(results[len(kept) :], output_axes, strict=False)]
    return BodyTypes([*kept, *stacked], {_NET: given})


def _rows(asked: RowsCall) -> list[Rows | None]:
    """States keep their rows; those of what is scanned and stacked are on another axis than the one that is."""
    arguments = asked.call.arguments
    own, count = len(asked.rows) - len(arguments.strings("captured")), arguments.int("num_scan_inputs", 0)
    asked.require_uncounted(own)
    states = asked.rows[: own - count]
    scanned = []
    for index, axis in zip(range(own - count, own), arguments.ints("scan_input_axes") or [0] * count, strict=True):
        rows, axis = asked.rows[index], axis % asked.rank(index)
        if rows is not None and rows.axis == axis:
            raise asked.mixes(axis)
        scanned.append(rows and rows.at(rows.axis - (rows.axis > axis)))
    results = asked.results(_NET, (*states, *scanned))
    require_kept(asked, states, results[: len(states)])
    stacked: list[Rows | None] = []
    axes = arguments.ints("scan_output_axes") or [0] * (len(results) - len(states))
    for rows, axis, kind in zip(results[len(states) :], axes, asked.outputs[len(states) :], strict=True):
        stacked.append(rows and rows.at(rows.axis + (axis % len(kind.shape) <= rows.axis)))
    return [*states, *stacked]


def _row(kind: TensorType | None, axis: int) -> tuple[TensorType | None, int | None]:
    """The type of what is scanned without the axis that is, and its size; None for what is unknown."""
    if kind is None or not -len(kind.shape) <= axis < len(kind.shape):
        return None, None
    place = axis % len(kind.shape)
    return TensorType((*kind.shape[:place], *kind.shape[place + 1 :]), kind.meta), kind.shape[place]


@new_operator(
    "Scan",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    on_host=True,
    doc="Runs scan_net once for each index of an axis of the scanned inputs, which are as long as one another "
    "there. The net takes the state variables and the scanned inputs without that axis; it results in the next "
    "states, then in values to be stacked. Outputs are the states after the last row, then what was stacked.",
    input_names=("states...", "scanned...", "captured..."),
    output_names=("states...", "stacked..."),
    args={
        "scan_net": "the net",
        "num_scan_inputs": "how many inputs are scanned",
        "scan_input_axes": "the axis of each that is scanned (default: 0)",
        "scan_input_directions": "1 for each that is scanned from its end (default: 0)",
        "scan_output_axes": "the new axis of each stacked output (default: 0)",
        "scan_output_directions": "1 for each that is stacked from its end (default: 0)",
        "batched": "axis 0 of states, scanned inputs and outputs counts independent scans; the scanned axis is 1",
        "sequence_lengths": "input 0, before the states, says how many rows each scan of a batch has; what is "
        "stacked is 0 behind them",
        "stacked_types": STACKED_TYPES,
        "stacked_shapes": STACKED_SHAPES,
        "captured": CAPTURED,
    },
    required_args=(_NET, "num_scan_inputs"),
    sub_nets=(_NET,),
    infer_bodies=_infer_bodies,
    rows=_rows,
)
class Scan(OperatorWithBodies):
    """Executes its body for each row."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        self._scanned = self.arguments.int("num_scan_inputs", 0)
        self._batched = self.arguments.bool("batched")
        self._has_lengths = self.arguments.bool("sequence_lengths")
        self._states = len(self.input_blobs) - self.captured - self._scanned - self._has_lengths
        stacked = len(self.output_blobs) - self._states
        if self._scanned < 1 or self._states < 0 or stacked < 0:
            raise SchemaError(
                f"{self.label}: {len(self.input_blobs)} inputs, of which {self._scanned} are scanned, do not fit "
                f"{len(self.output_blobs)} outputs: outputs are the states and what is stacked"
            )
        self.expect(_NET, self._states + self._scanned, self._states + stacked)
        self._types = row_types(self, stacked)
        self._input_axes = self._for_each("scan_input_axes", self._scanned)
        self._from_end = self._for_each("scan_input_directions", self._scanned)
        self._output_axes = self._for_each("scan_output_axes", stacked)
        self._to_front = self._for_each("scan_output_directions", stacked)

    def _for_each(self, argument: str, count: int) -> list[int]:
        values = self.arguments.ints(argument) or [0] * count
        if len(values) != count:
            raise SchemaError(f"{self.label}: {argument} must have {count} entries, found {len(values)}")
        return values

    def prepare(self) -> Step:
        """Scan once, or once for each element of a batch."""
        results = self.results[_NET]
        self._next = Carrying(self.given[_NET][: self._states], results[: self._states])
        self._stacks = [Stacking(blob, self.label) for blob in results[self._states :]]
        return self._scan_batch if self._batched else self._scan_once

    def _arrays(self) -> tuple[list[Array], list[Array]]:
        """The states, and the scanned inputs."""
        first = int(self._has_lengths)
        arrays = [self.input(first + index).array for index in range(self._states + self._scanned)]
        return arrays[: self._states], arrays[self._states :]

    def _scan_once(self) -> None:
        states, scanned = self._arrays()
        done = self._scan(states, [self._rows(array, index) for index, array in enumerate(scanned)])
        for target, state in zip(self.output_blobs, self.given[_NET], strict=False):
            deliver(target, state.get(Tensor).array)
        for index, target in enumerate(self.output_blobs[self._states :]):
            deliver(target, self._placed(index, self._rows_of(index, done)))

    def _scan_batch(self) -> None:
        states, scanned = self._arrays()
        sizes = {array.shape[:1] for array in (*states, *scanned)}
        if len(sizes) != 1 or sizes == {()} or any(array.ndim < 2 for array in scanned):
            shapes = [array.shape for array in (*states, *scanned)]
            raise ShapeError(f"{self.label}: expected one batch size in axis 0 of all, found shapes {shapes}")
        length = scanned[0].shape[1]
        lengths = self._lengths(sizes.pop()[0], length)
        finals: list[list[Array]] = [[] for _ in self.output_blobs]
        for batch, rows in enumerate(lengths):
            directed = [array[batch, :rows] for array in scanned]
            directed = [array[::-1] if back else array for array, back in zip(directed, self._from_end, strict=True)]
            done = self._scan([array[batch] for array in states], directed)
            for found, blob in zip(finals, self.given[_NET][: self._states], strict=False):
                found.append(blob.get(Tensor).fetch())
            for index, found in enumerate(finals[self._states :]):
                stacked = self._rows_of(index, done)
                padded = np.zeros((length, *stacked.shape[1:]), stacked.dtype)
                padded[:rows] = stacked
                found.append(padded)
        for target, found in zip(self.output_blobs, finals, strict=True):
            deliver(target, np.stack(found))

    def _lengths(self, batch: int, length: int) -> list[int]:
        if not self._has_lengths:
            return [length] * batch
        array = self.input(0).array
        if array.shape != (batch,) or array.dtype.kind not in "iu" or not ((array >= 0) & (array <= length)).all():
            raise ShapeError(f"{self.label}: expected {batch} sequence lengths from 0 to {length}, found {array}")
        return [int(value) for value in array]

    def _rows(self, array: Array, index: int) -> Array:
        """Scanned input `index` with the axis that is scanned in front, in the order of the scan."""
        axis = self._input_axes[index]
        if not -array.ndim <= axis < array.ndim:
            raise ShapeError(f"{self.label}: scanned input {index} has no axis {axis}; its shape is {array.shape}")
        rows = np.moveaxis(array, axis, 0)
        return rows[::-1] if self._from_end[index] else rows

    def _scan(self, states: Sequence[Array], rows: Sequence[Array]) -> int:
        """Execute the body for each of `rows`, beginning with `states`; how many there were."""
        lengths = {len(array) for array in rows}
        if len(lengths) != 1:
            raise ShapeError(f"{self.label}: scanned inputs must be as long as one another, found {sorted(lengths)}")
        for target, state in zip(self.given[_NET], states, strict=False):
            deliver(target, state)
        for stack in self._stacks:
            stack.clear()
        inputs = self.given[_NET][self._states :]
        targets = [_sized(blob, array) for blob, array in zip(inputs, rows, strict=True)]
        body, carry, stacks = self.bodies[_NET], self._next, self._stacks
        done = 0
        try:
            for done in range(lengths.pop()):
                for place, array in zip(targets, rows):  # noqa: B905 - as many as scanned inputs
                    place.array[...] = array[done]  # where it lies now: the body's preparation may have moved it
                body()
                for stack in stacks:
                    stack.add()
                carry()
        except (RunCancelledError, RunTimeoutError):
            raise
        except DagexecError as error:
            raise self.failed(f"row {done}", error) from error
        return len(rows[0])

    def _rows_of(self, index: int, done: int) -> Array:
        """What was stacked for stacked output `index`, in the order of its direction."""
        stack = self._stacks[index]
        if not done:
            with suppress(DagexecError):
                self.bodies[_NET].prepare()
            return stack.no_rows(self._types[index])
        return stack.stacked()[::-1] if self._to_front[index] else stack.stacked()

    def _placed(self, index: int, stacked: Array) -> Array:
        """The stacked output with its new axis where it belongs."""
        axis = self._output_axes[index]
        if not -stacked.ndim <= axis < stacked.ndim:
            raise ShapeError(f"{self.label}: stacked output {index} of {stacked.ndim} axes has no axis {axis}")
        return np.moveaxis(stacked, 0, axis)


def _sized(blob: Blob, rows: Array) -> Tensor:
    """The tensor of `blob`, of the type of one of `rows`."""
    tensor = tensor_in(blob)
    tensor.resize(rows.shape[1:], dtypes.from_numpy(rows.dtype))
    return tensor


no_gradient("Scan")
