"""Concat and Split: several tensors joined along an axis, and one cut along it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.device import CPU
from dagexec.core.dtypes import INT32, TypeMeta
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Prepared, Step, in_sequence
from dagexec.core.registry import declares, new_operator
from dagexec.core.rows import joined, reduced
from dagexec.core.schema import UNBOUNDED, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.integers import integers_of
from dagexec.ops.base.layout import NHWC, image_order
from dagexec.ops.base.pieces import copying, has_rows, is_same_memory, offsets_along
from dagexec.ops.families.shape.reshaping import copy_cost

AXIS_ARGS = {
    "axis": "the axis to work along; negative counts from the end",
    "order": "NHWC (the last axis), or NCHW or an order in blocks (axis 1, the default), instead of `axis`",
    "zero_copy": "1: inputs and outputs may share memory where a memory plan finds that nobody sees it (default 0)",
}


def joint_axis(call: OperatorCall, rank: int) -> int:
    """The axis to join or cut along, in a tensor of `rank` axes: `axis`, or the channel axis of `order`.

    Raises ArgumentError when both or an unknown order are given, ShapeError when there is no such axis.
    """
    if "axis" in call.arguments:
        if "order" in call.arguments:
            raise ArgumentError(f"{call.label}: expected 'axis' or 'order', found both")
        return call.axis("axis", 1, rank)
    axis = rank - 1 if image_order(call) == NHWC else 1
    if not 0 <= axis < rank:
        order = call.arguments.string("order", "NCHW")
        raise call.fail(f"order {order} puts the channels on axis {axis}, which a tensor of {rank} axes does not have")
    return axis


def _joint_axis_of_output(call: OperatorCall) -> tuple[int]:
    return (joint_axis(call, len(call.inputs[0].shape) + call.arguments.bool("add_axis")),)


def _cut_axis(call: OperatorCall) -> tuple[tuple[int], bool]:
    """The axis along which parts are cut, and whether it stays."""
    return (joint_axis(call, len(call.inputs[0].shape)),), not call.arguments.bool("add_axis")


def infer_concat(call: OperatorCall) -> list[TensorType]:
    """The sizes along the axis added up, or the number of inputs on a new axis; and an int32 per input."""
    first = call.inputs[0].shape
    meta = call.require_same_type()
    add_axis = call.arguments.bool("add_axis")
    axis = joint_axis(call, len(first) + add_axis)
    if add_axis:
        for index in range(len(call.inputs)):
            call.require_shape(index, first, "that of the first input")
        shape = (*first[:axis], len(call.inputs), *first[axis:])
    else:
        for index, kind in enumerate(call.inputs):
            own = kind.shape[axis] if len(kind.shape) == len(first) else first[axis]
            call.require_shape(index, _replaced(first, axis, own), f"that of the first input except on axis {axis}")
        shape = _replaced(first, axis, sum(kind.shape[axis] for kind in call.inputs))
    types = [TensorType(shape, meta)]
    return types if len(call.definition.output) == 1 else [*types, TensorType((len(call.inputs),), INT32)]


def _replaced(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def joined_pieces(call: OperatorCall, types: Sequence[TensorType]) -> Mapping[int, int]:
    """The byte of the result at which each input begins that is one piece of it."""
    add_axis = call.arguments.bool("add_axis")
    axis = joint_axis(call, len(call.inputs[0].shape) + add_axis)
    sizes = [1 if add_axis else kind.shape[axis] for kind in call.inputs]
    return _in_bytes(offsets_along(types[0].shape, axis, sizes), types[0])


def _in_bytes(offsets: Sequence[int | None], kind: TensorType) -> dict[int, int]:
    return {index: offset * kind.meta.itemsize for index, offset in enumerate(offsets) if offset is not None}


def _of_one_input(arguments: Arguments, _meta: TypeMeta, count: int) -> tuple[str, ...] | None:
    return () if count == 1 and not arguments.bool("add_axis") else None


@declares
def concat_operator(name: str, doc: str, onnx: tuple[OnnxName, ...] = ()) -> OpSchema:
    """The schema of an operator that joins its inputs."""
    return OpSchema(
        name,
        inputs=(1, UNBOUNDED),
        outputs=(1, 2),
        infer=infer_concat,
        doc=doc,
        input_names=("X1, X2, ...",),
        output_names=("concat_result", "split_info"),
        args=AXIS_ARGS | {"add_axis": "1: join along a new axis at `axis` of the output (default 0)"},
        cost=copy_cost,
        joined=joined_pieces,
        onnx=onnx,
        results=1,
        post_ops=_of_one_input,
        image_role=ImageRole.JOINING,
        moves_elements=True,
        rows=joined(_joint_axis_of_output),
    )


@concat_operator(
    "Concat",
    "The inputs one after another along an axis. split_info (int32) holds their sizes along it, for Split.",
    (OnnxName("Concat", 13, {"axis": "axis"}),),
)
class Concat(Operator):
    """Inputs joined along an axis."""

    def for_any_sizes(self) -> Step | None:
        """One `np.concatenate`, on the host."""
        definition = self.definition
        if self.runtime.device != CPU or len(definition.output) == 2 or definition.output[0] in definition.input:
            return None
        call = self.call()
        rank = len(call.inputs[0].shape)
        return None if self.arguments.bool("add_axis") else partial(self._join, joint_axis(call, rank), rank)

    def _join(self, axis: int, rank: int) -> None:
        parts = [self.x(index) for index in range(len(self.input_blobs))]
        kinds = {(part.ndim, part.shape[:axis], part.shape[axis + 1 :], part.dtype) for part in parts}
        if len(kinds) > 1 or parts[0].ndim != rank:
            call = self.call()
            self.bind(self.infer(call), call=call).step()
            return
        size = sum([part.shape[axis] for part in parts])
        y = self.output(0).resize(_replaced(parts[0].shape, axis, size), self.input(0).meta)
        np.concatenate(parts, axis, y)

    def prepare(self) -> Step:
        """One `np.concatenate` into the output, or copies of the inputs that are not there already; and the sizes.

        What is joined along one of the last axes is copied row by row, see `dagexec.ops.base.pieces.copying`.
        """
        call = self.call()
        add_axis = self.arguments.bool("add_axis")
        axis = joint_axis(call, len(call.inputs[0].shape) + add_axis)
        parts = [self.x(index) for index in range(len(self.input_blobs))]
        if add_axis:
            parts = [np.expand_dims(part, axis) for part in parts]
        ends = np.cumsum([part.shape[axis] for part in parts])
        places = np.split(self.y(0), [int(end) for end in ends[:-1]], axis)
        pairs = list(zip(parts, places, strict=True))
        there = tuple(index for index, pair in enumerate(pairs) if is_same_memory(*pair))
        steps: list[Step] = [partial(np.concatenate, parts, axis, self.y(0))]
        if there or has_rows(self.y(0), axis):
            missing = [pair for index, pair in enumerate(pairs) if index not in there and pair[0].size]
            steps = [copying(place, part, axis) for part, place in missing]
        if len(self.output_blobs) == 2:
            steps.append(partial(np.copyto, self.y(1), np.array([part.shape[axis] for part in parts], np.int32)))
        return Prepared(in_sequence(steps), inputs_in_place=there)


@concat_operator("DepthConcat", "Concat along the channel axis; an older name.")
class DepthConcat(Concat):
    """Inputs joined along the channels."""


def infer_split(call: OperatorCall) -> list[TensorType]:
    """The input's shape with each part's size along the axis, or without that axis."""
    shape, meta = call.inputs[0].shape, call.inputs[0].meta
    axis = joint_axis(call, len(shape))
    sizes = split_sizes(call, axis)
    if call.arguments.bool("add_axis"):
        if set(sizes) != {1}:
            raise call.fail(f"with 'add_axis' every part must have size 1 along axis {axis}, found {list(sizes)}")
        return [TensorType((*shape[:axis], *shape[axis + 1 :]), meta)] * len(sizes)
    return [TensorType(_replaced(shape, axis, size), meta) for size in sizes]


def cut_pieces(call: OperatorCall, _types: Sequence[TensorType]) -> Mapping[int, int]:
    """The byte of the input at which each output begins that is one piece of it."""
    shape = call.inputs[0].shape
    axis = joint_axis(call, len(shape))
    return _in_bytes(offsets_along(shape, axis, split_sizes(call, axis)), call.inputs[0])


def split_sizes(call: OperatorCall, axis: int) -> tuple[int, ...]:
    """The sizes of the parts along `axis`: given, or equal. Raises ShapeError when they do not add up."""
    total, count = call.inputs[0].shape[axis], len(call.definition.output)
    if len(call.inputs) == 2 and "split" in call.arguments:
        raise call.fail("the sizes are given by both an input and the argument 'split'; expected only one of them")
    given = integers_of(call, 1) if len(call.inputs) == 2 else tuple(call.arguments.ints("split"))
    if not given and "split" not in call.arguments and len(call.inputs) == 1:
        if call.arguments.bool("uneven"):
            part = -(-total // count)
            return tuple(max(0, min(part, total - part * index)) for index in range(count))
        if total % count:
            raise call.fail(f"axis {axis} of size {total} cannot be split into {count} equal parts")
        return (total // count,) * count
    if len(given) != count:
        raise call.fail(f"expected {count} sizes, one for each output, found {list(given)}")
    if min(given) < 0 or sum(given) != total:
        raise call.fail(f"the sizes {list(given)} must add up to {total}, the size of axis {axis}")
    return given


@new_operator(
    "Split",
    inputs=(1, 2),
    outputs=(1, UNBOUNDED),
    infer=infer_split,
    doc="The input cut along an axis, a part an output: of the sizes in `split` or input 1, else of equal sizes.",
    input_names=("input", "split"),
    output_names=("output_0, output_1, ...",),
    args=AXIS_ARGS
    | {
        "split": "the sizes of the parts along the axis",
        "uneven": "1: where no sizes are given, they are rounded up and the last is what remains (default 0)",
        "add_axis": "1: drop the axis, along which every part has size 1; undoes Concat's add_axis (default 0)",
    },
    cost=copy_cost,
    value_inputs=(1,),
    cut=cut_pieces,
    image_role=ImageRole.CUTTING,
    moves_elements=True,
    rows=reduced(_cut_axis),
)
class Split(Operator):
    """One tensor cut along an axis."""

    def prepare(self) -> Step:
        """A copy for each part that is not a view of the input."""
        call = self.call()
        x = self.x(0)
        axis = joint_axis(call, x.ndim)
        ends = np.cumsum(split_sizes(call, axis))
        parts = np.split(x, [int(end) for end in ends[:-1]], axis)
        targets = [self.y(index) for index in range(len(parts))]
        if self.arguments.bool("add_axis"):
            targets = [np.expand_dims(target, axis) for target in targets]
        pairs = list(zip(targets, parts, strict=True))
        return cut_in_place(pairs, axis)


def cut_in_place(pairs: Sequence[tuple[Array, Array]], axis: int) -> Prepared:
    """A copy for each target and its part of the input, but for those that are one memory."""
    there = tuple(index for index, pair in enumerate(pairs) if is_same_memory(*pair))
    missing = [pair for index, pair in enumerate(pairs) if index not in there]
    return Prepared(in_sequence([copying(*pair, axis) for pair in missing]), outputs_in_place=there)
