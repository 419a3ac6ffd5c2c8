"""Rows dealt to parts by a key: row i goes to part key[i] modulo the number of parts, and back again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, not_differentiable
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths, segment_sums

_ARGS = {"pack_first_input": "1: keys in the outputs are divided by the number of parts (default 0)"}


def _parts(call: OperatorCall) -> int:
    """How many parts there are. Raises ShapeError unless each has an output for every input."""
    inputs, outputs = len(call.inputs), len(call.definition.output)
    if outputs % inputs:
        raise call.fail(f"expected an output of each part for each of {inputs} inputs, found {outputs}")
    call.arguments.bool("pack_first_input")
    return outputs // inputs


def _check_keys(call: OperatorCall, index: int) -> tuple[int, ...]:
    """The shape of the keys, with which the inputs behind them must begin. Raises ShapeError."""
    call.require_types(index, INT32, INT64)
    shape = call.inputs[index].shape
    for later in range(index + 1, len(call.inputs)):
        if call.inputs[later].shape[: len(shape)] != shape:
            raise call.fail(f"input {call.definition.input[later]!r} must begin with the axes {shape} of the keys")
    return shape


def infer_partition(call: OperatorCall) -> list[TensorType]:
    """For each part, so many rows of each input as have its keys."""
    parts, shape = _parts(call), _check_keys(call, 0)
    counts = np.bincount(call.known_value(0).reshape(-1) % parts, minlength=parts)
    return [TensorType((int(count), *kind.shape[len(shape) :]), kind.meta) for count in counts for kind in call.inputs]


def _dealt(call: OperatorCall, keys: Array, others: Sequence[Array]) -> list[list[Array]]:
    """For each part the rows of keys and of the others."""
    parts = _parts(call)
    flat = keys.reshape(-1)
    kept = flat // parts if call.arguments.bool("pack_first_input") else flat
    rows = [kept, *(other.reshape(flat.size, *other.shape[keys.ndim :]) for other in others)]
    return [[one[flat % parts == part] for one in rows] for part in range(parts)]


@array_function(
    "Partition",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_partition,
    doc="Keys and the rows that belong to them, dealt to parts: all outputs of the first part, then of the second.",
    input_names=("keys", "rows_1", "..."),
    output_names=("keys_of_part_0", "rows_1_of_part_0", "..."),
    args=_ARGS,
    value_inputs=(0,),
)
def partition(call: OperatorCall, keys: Array, *others: Array) -> Sequence[Array]:
    """The rows of each part."""
    return [one for part in _dealt(call, keys, others) for one in part]


def infer_lengths_partition(call: OperatorCall) -> list[TensorType]:
    """As Partition behind the lengths, which keep their number."""
    parts, shape = _parts(call), _check_keys(call, 1)
    checked_lengths(call, 0, shape[0] if shape else 0)
    counts = np.bincount(call.known_value(1).reshape(-1) % parts, minlength=parts)
    found = []
    for count in counts:
        found.append(call.inputs[0])
        found += [TensorType((int(count), *kind.shape[len(shape) :]), kind.meta) for kind in call.inputs[1:]]
    return found


@array_function(
    "LengthsPartition",
    inputs=(2, UNBOUNDED),
    outputs=(2, UNBOUNDED),
    infer=infer_lengths_partition,
    doc="Segments dealt to parts by the keys of their rows: lengths, keys and rows of each part.",
    input_names=("lengths", "keys", "rows_1", "..."),
    output_names=("lengths_of_part_0", "keys_of_part_0", "..."),
    args=_ARGS,
    value_inputs=(0, 1),
)
def lengths_partition(call: OperatorCall, lengths: Array, keys: Array, *others: Array) -> Sequence[Array]:
    """The rows of each part, and how many of each segment they are."""
    parts = _parts(call)
    here = keys.reshape(-1) % parts
    dealt = _dealt(call, keys, others)
    counts = [segment_sums((here == part).astype(np.float64), lengths) for part in range(parts)]
    return [one for part in range(parts) for one in (counts[part], *dealt[part])]


def infer_gather_by_key(call: OperatorCall) -> list[TensorType]:
    """A row for each key. Raises ShapeError unless each part has the rows that its keys ask for."""
    call.require_types(0, INT32, INT64)
    meta = call.require_same_type(*range(1, len(call.inputs)))
    parts, row = len(call.inputs) - 1, call.inputs[1].shape[1:]
    counts = np.bincount(call.known_value(0).reshape(-1) % parts, minlength=parts)
    for part, count in enumerate(counts):
        call.require_shape(part + 1, (int(count), *row), "a row for each key of the part")
    return [TensorType((*call.inputs[0].shape, *row), meta)]


@array_function(
    "GatherByKey",
    inputs=(2, UNBOUNDED),
    infer=infer_gather_by_key,
    doc="The rows of parts put together again in the order of the keys; undoes Partition.",
    input_names=("keys", "part_0", "part_1", "..."),
    output_names=("rows",),
    value_inputs=(0,),
)
def gather_by_key(_call: OperatorCall, keys: Array, *parts: Array) -> Sequence[Array]:
    """Row after row of each part, where its keys are."""
    here = keys.reshape(-1) % len(parts)
    found = np.empty((here.size, *parts[0].shape[1:]), parts[0].dtype)
    for number, rows in enumerate(parts):
        found[here == number] = rows
    return [found]


@gradient_of("GatherByKey")
def gather_by_key_gradient(request: GradientRequest) -> GradientOperators:
    """dY dealt to the parts again."""
    parts = range(1, len(request.definition.input))
    outputs = [name for index in parts for name in (f"_{request.dx(index)}_keys", request.dx(index))]
    made = request.operator("Partition", [request.x(0), request.dy(0)], outputs, pack_first_input=0)
    return request.result([made], {index: request.dx(index) for index in parts})


not_differentiable("Caffe2's goes by other operators; use GatherByKey", "Partition", "LengthsPartition")
