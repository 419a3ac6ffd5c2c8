"""PaddedRows: a net on as many rows as a run decides, prepared for a few numbers of rows only.

What the net makes of a row depends on nothing but that row, so that it may be given more rows than there are: the last
one over and over. A number of rows that was never there costs no more than one that was, once the next larger number
that the net is prepared for has been.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dagexec.core.blob import Blob, tensor_in
from dagexec.core.body import SettledBody
from dagexec.core.dtypes import TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Step
from dagexec.core.operator_with_bodies import OperatorWithBodies
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, BodyCall, BodyTypes
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import SchemaError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.control.conditional import CAPTURED
from dagexec.platform.records import dataclass

_NET = "rows_net"

_MOST_BYTES = 32 << 20
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
        self._before = [(slice(None),) * axis for axis in self._axes]
        self._kept: OrderedDict[tuple[object, ...], _Padded] = OrderedDict()
        self._moving: Sequence[Blob] = ()

    def prepare(self) -> Step:
        """What there is to prepare follows from the rows of a run."""
        return self.for_any_sizes()

    def for_any_sizes(self) -> Step:
        """What else the net depends on: captured tensors that are not constant may move."""
        captured = self.input_blobs[len(self._axes) :]
        self._moving = [blob for blob in captured if blob.get(Tensor).constant is None]
        self._kept.clear()
        return self._execute

    def _execute(self) -> None:
        sources = [self.x(place) for place in range(len(self._axes))]
        count = sources[0].shape[self._axes[0]]
        captured = [blob.get(Tensor).array for blob in self._moving]
        kinds = []
        for source, axis in zip(sources, self._axes, strict=True):
            shape = source.shape
            kinds.append((shape[:axis], shape[axis + 1 :], source.dtype))
            if shape[axis : axis + 1] != (count,):
                raise ShapeError(f"{self.label}: the first input has {count} rows; {shape} has others on axis {axis}")
        # by arrays that are kept, so that no other has the id of one
        key = (padded_size(count), *kinds, *map(id, captured))
        padded = self._kept.get(key)
        if padded is None:
            padded = self._keep(key, self._prepared(padded_size(count), sources, captured))
        else:
            self._kept.move_to_end(key)
        if count:
            part, behind, last = slice(count), slice(count, None), slice(count - 1, count)
            for source, target, before in zip(sources, padded.rows, self._before, strict=True):
                target[(*before, part)] = source
                target[(*before, behind)] = source[(*before, last)]
            with self.naming("on padded rows"):
                padded.body.execute()
        for blob, (result, shape, before, meta) in zip(self.output_blobs, padded.results, strict=True):
            array = tensor_in(blob).resize((*shape[: len(before)], count, *shape[len(before) + 1 :]), meta)
            array[...] = result[(*before, slice(count))]

    def _keep(self, key: tuple[object, ...], made: _Padded) -> _Padded:
        """Keep what was prepared, and let go of what was not used for longest."""
        self._kept[key] = made
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _MOST_BYTES:
            self._kept.popitem(last=False)
        return made

    def _prepared(self, size: int, sources: Sequence[Array], captured: Sequence[Array]) -> _Padded:
        """The net for so many rows, and for what it captures where that is now."""
        rows = []
        for place, (blob, axis) in enumerate(zip(self.given[_NET], self._axes, strict=True)):
            shape = sources[place].shape
            if shape[axis : axis + 1] != sources[0].shape[self._axes[0] : self._axes[0] + 1]:
                raise ShapeError(
                    f"{self.label}: inputs have other rows than the first: {shape} has them on axis {axis}"
                )
            rows.append(tensor_in(blob).resize((*shape[:axis], size, *shape[axis + 1 :]), self.input(place).meta))
            rows[-1][...] = 0
        with self.naming("on padded rows"):
            body = self.bodies[_NET].settle()
        results = []
        for blob, axis in zip(self.results[_NET], self._result_axes, strict=True):
            tensor = blob.get(Tensor)
            if tensor.shape[axis : axis + 1] != (size,):
                raise ShapeError(f"{self.label}: of {size} rows the net makes {tensor.shape}, no rows on axis {axis}")
            results.append((tensor.array, tensor.shape, (slice(None),) * axis, tensor.meta))
        return _Padded(tuple(rows), body, tuple(results), tuple(captured))


@dataclass(frozen=True, eq=False)
class _Padded:
    """The net, prepared for a number of rows: its steps keep the arrays that they were prepared for.

    Attributes:
        rows: what it is given.
        body: the net.
        results: what it results in: an array, its shape, what selects all in front of the rows, the type of elements.
        captured: the arrays that it reads outside and that are not constant.
    """

    rows: tuple[Array, ...]
    body: SettledBody
    results: tuple[tuple[Array, tuple[int, ...], tuple[slice, ...], TypeMeta], ...]
    captured: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """About what it keeps."""
        return self.body.nbytes + sum(array.nbytes for array in (*self.rows, *self.captured))


no_gradient("PaddedRows")
