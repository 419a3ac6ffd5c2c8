"""Operators of ranks besides collectives of all: messages from one to another, parts of a sum, and another world.

SendTensor and ReceiveTensor are a pair: they meet by rank and tag, and the tensor's type goes before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import INT32, INT64, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.families.communication.collectives import Array, reduce_scatter
from dagexec.ops.families.communication.common_world import CommonWorld
from dagexec.ops.families.communication.operators import WorldOperator
from dagexec.platform.host_memory import check_fits

_MOST_AXES = 14
"""Of a tensor that is sent."""


@new_operator(
    "CloneCommonWorld",
    infer=None,
    doc="Another common world of the same ranks, whose operators have an order and failures of their own. All ranks "
    "must run it, in the same order.",
    input_names=("existing_comm_world",),
    output_names=("comm_world",),
    unread_args=("sync", "status_blob"),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class CloneCommonWorld(WorldOperator):
    """Puts a rank's handle in its output."""

    def prepare(self) -> Step:
        """A second run leaves the first group."""
        blob = self.output_blobs[0]

        def clone() -> None:
            if isinstance(blob.value, CommonWorld):
                blob.value.close()
            blob.value = self.world().clone()

        return clone


def _has_counts(call: OperatorCall) -> bool:
    return len(call.inputs) == len(call.definition.output) + 2


def infer_scatter(call: OperatorCall) -> Sequence[TensorType] | None:
    """Only a run knows how many ranks there are. Raises ShapeError for a number of inputs that does not fit."""
    outputs = len(call.definition.output)
    if len(call.inputs) not in (outputs + 1, outputs + 2):
        raise call.fail(f"expected {outputs} tensors behind the common world, and maybe the counts of their elements")
    if _has_counts(call):
        call.require_types(len(call.inputs) - 1, INT32, INT64)
        call.require_rank(len(call.inputs) - 1, 1)
    return None


@new_operator(
    "ReduceScatter",
    inputs=(2, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="Y_i = a part of the sum of X_i over all ranks: as many rows for each rank, whose number must divide them; "
    "or, with counts, so many elements, as one axis.",
    input_names=("comm_world", "X0, X1, ...", "counts, integers, one for each rank (optional)"),
    output_names=("Y0, Y1, ...",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class ReduceScatter(WorldOperator):
    """One sum a tensor."""

    def prepare(self) -> Step:
        """The outputs have a size for the world that there is now."""
        call = self.call()
        infer_scatter(call)
        world = self.world()
        counts = self.x(len(self.input_blobs) - 1).tolist() if _has_counts(call) else None
        parts: list[tuple[Array, Array, Array, list[int]]] = []
        for index, blob in enumerate(self.output_blobs):
            x = self.x(index + 1)
            if counts is None and (not x.shape or x.shape[0] % world.size):
                raise ShapeError(
                    f"{self.label}: {world.size} ranks must divide the rows of {x.shape}, of {blob.name!r}"
                )
            own = counts or [x.size // world.size] * world.size
            if len(own) != world.size:
                raise ShapeError(f"{self.label}: expected a count for each of {world.size} ranks, found {len(own)}")
            shape = (x.shape[0] // world.size, *x.shape[1:]) if counts is None else (own[world.rank],)
            self.output(index).resize(shape, self.input(index + 1).meta)
            parts.append((x, self.scratch(x.shape, x.dtype), self.y(index), own))

        def run() -> None:
            for x, total, y, own in parts:
                np.copyto(total, x)
                reduce_scatter(self.world(), total, y, own)

        return run


class _Message(WorldOperator):
    """Of this rank and another, which an input or an argument says, and so a tag."""

    def peer(self, name: str, place: int) -> tuple[int, int]:
        """The other rank, and the tag. Raises ArgumentError where nothing says the rank, ShapeError for no integers."""
        if len(self.input_blobs) > place:
            if len(self.input_blobs) != place + 2:
                raise ShapeError(f"{self.label}: an input for the other rank needs one for the tag behind it")
            numbers = [self.x(index).reshape(-1) for index in (place, place + 1)]
            if any(number.size != 1 or number.dtype.kind not in "iu" for number in numbers):
                raise ShapeError(f"{self.label}: the other rank and the tag must be one integer each")
            return int(numbers[0][0]), int(numbers[1][0])
        if name not in self.arguments:
            raise ArgumentError(f"{self.label}: argument {name!r} must be the other rank")
        return self.arguments.int(name, 0), self.arguments.int("tag", 0)


_RAW = {"raw_buffer": "1: only the elements are sent; the receiver has a tensor of that type already (default 0)"}


@new_operator(
    "SendTensor",
    inputs=(2, 4),
    infer=lambda _call: [],
    doc="Sends a tensor to another rank, where ReceiveTensor with the same tag takes it; ends when it has been read.",
    input_names=("comm_world", "X", "dst, an integer", "tag, an integer"),
    args={"dst": "the rank that gets it, if no input says it", "tag": "a number (default 0)", **_RAW},
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class SendTensor(_Message):
    """The type first, then the elements."""

    def prepare(self) -> Step:
        """Raises ShapeError for strings, and for tensors of very many axes."""
        x, meta = self.x(1), self.input(1).meta
        if meta is STRING or x.ndim > _MOST_AXES:
            raise ShapeError(f"{self.label}: {meta} of {x.ndim} axes cannot be sent")
        head = np.array([meta.number, x.ndim, *x.shape, *[0] * (_MOST_AXES - x.ndim)], np.int64)
        raw = self.arguments.bool("raw_buffer")

        def run() -> None:
            rank, number = self.peer("dst", 2)
            world = self.world()
            with world.message(number) as tag:
                if not raw:
                    world.send(head, rank, tag)
                world.send(x, rank, tag)

        return run


@new_operator(
    "ReceiveTensor",
    inputs=(2, 4),
    outputs=(3, 3),
    infer=None,
    doc="Takes the tensor that another rank sends by SendTensor with the same tag.",
    input_names=("comm_world", "Y, which is overwritten", "src, an integer", "tag, an integer"),
    output_names=("Y", "src", "tag"),
    args={"src": "the rank that sends it, if no input says it", "tag": "a number (default 0)", **_RAW},
    inplace=lambda input_index, output_index: (input_index, output_index) == (1, 0),
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class ReceiveTensor(_Message):
    """A tensor of which only the sender knows the type."""

    def prepare(self) -> Step:
        """Raises ShapeError unless Y is overwritten in place."""
        if self.input_blobs[1] is not self.output_blobs[0]:
            raise ShapeError(f"{self.label}: output 0 must be input 1, {self.input_blobs[1].name!r}")
        raw, head = self.arguments.bool("raw_buffer"), np.zeros(_MOST_AXES + 2, np.int64)
        for index in (1, 2):
            self.output(index).resize((1,), INT32)
        source, mark = self.y(1), self.y(2)

        def run() -> None:
            rank, number = self.peer("src", 2)
            world = self.world()
            with world.message(number) as tag:
                if not raw:
                    world.receive(head, rank, tag)
                    meta, shape = dtypes.from_number(int(head[0])), tuple(head[2 : 2 + int(head[1])].tolist())
                    check_fits(meta.itemsize * int(np.prod(shape)), self.label)
                    self.output(0).resize(shape, meta)
                world.receive(self.y(0), rank, tag)
            source[0], mark[0] = rank, number

        return run


no_gradient("CloneCommonWorld", "ReduceScatter", "SendTensor", "ReceiveTensor")
