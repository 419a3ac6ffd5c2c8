"""PaddedRows: a net on as many rows as a run decides, prepared for a few numbers of rows only.

What the net makes of a row depends on nothing but that row, so that it may be given more rows than there are: the last
one over and over. A number of rows that was never there costs no more than one that was, once the next larger number
that the net is prepared for has been.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from dagexec.core.blob import tensor_in
from dagexec.core.body import SettledBody
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Step
from dagexec.core.operator_with_bodies import OperatorWithBodies
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, BodyCall, BodyTypes, TensorType
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import SchemaError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.control.conditional import CAPTURED
from dagexec.platform.records import dataclass

_NET = "rows_net"

_MOST_BYTES = 8 << 20
"""Of what an operator keeps prepared; the latest is kept in any case."""

_UNIT = 8
"""Rows: from so many on, a net is prepared for multiples."""


def padded_size(count: int) -> int:
    """How many rows a net is prepared for where there are `count`: a power of 2, or a multiple of an eighth of one."""
    if count <= _UNIT:
        return 1 << max(0, count - 1).bit_length()
    unit = max(_UNIT, 1 << ((count - 1).bit_length() - 3))
    return -(-count // unit) * unit


def _infer_bodies(call: BodyCall) -> BodyTypes:
    """Where the types of all inputs are known, the net takes them as they are."""
    own = len(call.inputs) - len(call.arguments.strings("captured"))
    given = tuple(call.inputs[:own])
    return BodyTypes([*call.results(_NET, given)], {_NET: given})


@new_operator(
    "PaddedRows",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    on_host=True,
    doc="Runs rows_net on its inputs, each of which has rows on the axis that `axes` says for it, as many as the "
    "first. The net makes a row of each result, on the axis that `result_axes` says, of the same row of what it is "
    "given, and of what it captures. It may be run on more rows, copies of the last one, whose results are dropped.",
    input_names=("rows...", "captured..."),
    output_names=("results...",),
    args={
        _NET: "the net",
        "axes": "the axis of the rows of each input that is not captured",
        "result_axes": "that of each result",
        "captured": CAPTURED,
    },
    required_args=(_NET, "axes", "result_axes"),
    sub_nets=(_NET,),
    infer_bodies=_infer_bodies,
)
class PaddedRows(OperatorWithBodies):
    """Executes its body on padded rows."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        self._axes, self._result_axes = self.arguments.ints("axes"), self.arguments.ints("result_axes")
        own = len(self.input_blobs) - self.captured
        if (len(self._axes), len(self._result_axes)) != (own, len(self.output_blobs)) or not own:
            raise SchemaError(
                f"{self.label}: expected an axis for each of {own} inputs and {len(self.output_blobs)} outputs, "
                f"found {self._axes} and {self._result_axes}"
            )
        self.expect(_NET, own, len(self.output_blobs))
        self._kept: OrderedDict[tuple[object, ...], _Padded] = OrderedDict()

    def prepare(self) -> Step:
        """What there is to prepare follows from the rows of a run."""
        return self._execute

    def for_any_sizes(self) -> Step:
        """The same."""
        return self._execute

    def _execute(self) -> None:
        sources = [
            np.moveaxis(self.input(place).array, axis, 0) if axis else self.input(place).array
            for place, axis in enumerate(self._axes)
        ]
        count = len(sources[0])
        if any(len(source) != count for source in sources):
            raise ShapeError(f"{self.label}: inputs have {[*map(len, sources)]} rows; expected as many in each")
        padded = self._padded(padded_size(count), sources)
        if count:
            for source, target in zip(sources, padded.rows, strict=True):
                target[:count] = source
                target[count:] = source[-1]
            with self.naming("on padded rows"):
                padded.body.execute()
        for place, (result, axis) in enumerate(zip(padded.results, self._result_axes, strict=True)):
            part = result[(slice(None),) * axis + (slice(count),)]
            np.copyto(self.output(place).resize(part.shape, padded.types[place].meta), part)

    def _padded(self, size: int, sources: Sequence[Array]) -> _Padded:
        """The net as it is prepared for `size` rows, and what it captures as it is now."""
        captured = [
            None if tensor.constant is not None else tensor.array
            for tensor in map(self.input, range(len(sources), len(self.input_blobs)))
        ]
        kinds = [(source.shape[1:], source.dtype) for source in sources]
        key = (size, *map(id, captured), *kinds)  # arrays that are kept, so that no other has the id of one
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        with self.naming("on padded rows"):
            found = self._kept[key] = self._prepared(size, sources, captured)
        while len(self._kept) > 1 and sum(one.body.nbytes for one in self._kept.values()) > _MOST_BYTES:
            self._kept.popitem(last=False)
        return found

    def _prepared(self, size: int, sources: Sequence[Array], captured: Sequence[Array | None]) -> _Padded:
        rows = []
        for place, (blob, axis) in enumerate(zip(self.given[_NET], self._axes, strict=True)):
            shape = sources[place].shape[1:]
            array = tensor_in(blob).resize((*shape[:axis], size, *shape[axis:]), self.input(place).meta)
            array[...] = 0
            rows.append(np.moveaxis(array, axis, 0))
        body = self.bodies[_NET].settle()
        results = [blob.get(Tensor) for blob in self.results[_NET]]
        types = tuple(TensorType(tensor.shape, tensor.meta) for tensor in results)
        for kind, axis in zip(types, self._result_axes, strict=True):
            if axis >= len(kind.shape) or kind.shape[axis] != size:
                raise ShapeError(f"{self.label}: of {size} rows the net makes {kind}; expected as many on axis {axis}")
        arrays = tuple(tensor.array for tensor in results)
        return _Padded(tuple(rows), body, arrays, types, tuple(captured))


@dataclass(frozen=True, eq=False)
class _Padded:
    """The net, prepared for a number of rows: its steps keep the arrays that they were prepared for.

    Attributes:
        rows: what it is given, rows first.
        body: the net.
        results: what it results in.
        types: of that.
        captured: the arrays that it reads outside and that are not constant.
    """

    rows: tuple[Array, ...]
    body: SettledBody
    results: tuple[Array, ...]
    types: tuple[TensorType, ...]
    captured: tuple[Array | None, ...]


no_gradient("PaddedRows")
