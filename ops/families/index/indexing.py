"""Operators that pick elements by index, or give indices: Gather, BatchGather, OneHot, TopK.

Indices are values, so they are checked by every run, before anything is written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT32, INT32, INT64, STRING
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import declares, new_operator
from dagexec.core.rows import apart_from, gathered
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.shapes import element_count
from dagexec.core.traits import Rows
from dagexec.errors import DagexecError
from dagexec.ops.base.integers import integers_of
from dagexec.ops.families.shape.reshaping import copy_cost
from dagexec.ops.kernels.gather_kernel import gather_step

Array = npt.NDArray[Any]


def check_indices(indices: Array, low: int, high: int, label: str) -> None:
    """Raise IndexError, naming the operator `label` and the first bad place, unless low <= indices < high."""
    if indices.size == 0 or (indices.min() >= low and indices.max() < high):
        return
    flat = indices.reshape(-1)
    place = int(np.argmax((flat < low) | (flat >= high)))
    raise IndexError(f"{label}: index {flat[place]} at place {place} must be in [{low}, {high})")


GATHER_ARGS = {
    "match_outer": "1: the axes of INDICES before `axis` are DATA's, and each of their places has its own picks "
    "(default 0)",
    "wrap_indices": "as ONNX's Gather: 1: negative indices count from the end, 0: they are errors; an axis without "
    "elements has no index. Without it as Caffe2's: negative ones count from the end on axis 0 only, and of an axis "
    "without elements nothing is picked, whatever the indices: the output has DATA's shape",
}


def picked_shape(call: OperatorCall, axis: int) -> tuple[int, ...]:
    """The shape of what input 1 picks from input 0 along `axis`. Raises ShapeError where they do not fit together."""
    data, indices = call.inputs[0].shape, call.inputs[1].shape
    if picks_nothing(call, data[axis]):
        return data
    if not call.arguments.bool("match_outer"):
        return (*data[:axis], *indices, *data[axis + 1 :])
    if indices[:axis] != data[:axis]:
        raise call.fail(f"with match_outer, INDICES must begin with the axes {data[:axis]} of DATA, found {indices}")
    return (*indices, *data[axis + 1 :])


def picks_nothing(call: OperatorCall, size: int) -> bool:
    """True where indices are not looked at, as the axis has no elements."""
    return size == 0 and "wrap_indices" not in call.arguments


def wraps(call: OperatorCall, axis: int) -> bool:
    """True where negative indices count from the end of `axis`."""
    return call.arguments.bool("wrap_indices", axis == 0)


def failure_of(check: Step, label: str) -> Exception:
    """What `check` raises."""
    try:
        check()
    except IndexError as error:
        return error
    return DagexecError(f"{label}: an index out of range was there, and is no more: somebody writes the indices")


class GatherAlongAxis(Operator):
    """Slices of the data along an axis, picked by index."""

    @abstractmethod
    def axis(self) -> int:
        """The axis of the data that indices count along."""

    def prepare(self) -> Step:
        """Machine code; or a check of the indices, then one `np.take` that need not check them again."""
        data, indices, y, call = self.x(0), self.x(1), self.y(0), self.call()
        axis = self.axis()
        size, wrap = data.shape[axis], wraps(call, axis)
        check = partial(check_indices, indices, -size if wrap else 0, size, self.label)
        if picks_nothing(call, size):
            return nothing_to_do
        if y.size == 0:
            return check
        if call.arguments.bool("match_outer"):
            return in_sequence([check, *self._matched(axis, wrap=wrap)])
        native = gather_step(data, indices, y, axis, wraps=wrap, failure=partial(failure_of, check, self.label))
        if native is not None:
            return native
        wide = indices if indices.dtype == np.int64 else self.scratch(indices.shape, np.int64)
        take = partial(np.take, data, wide, axis=axis, out=y, mode="wrap" if wrap else "clip")

        def gather() -> None:
            check()
            if wide is not indices:
                np.copyto(wide, indices)
            take()

        return gather

    def _matched(self, axis: int, *, wrap: bool) -> list[Step]:
        """Indices as numbers of rows, of which DATA has `size` for each place of the axes before `axis`; one take."""
        data, indices, y = self.x(0), self.x(1), self.y(0)
        size, outer = data.shape[axis], element_count(data.shape[:axis])
        rows = self.scratch((outer, indices.size // outer), np.int64)
        first = np.arange(outer, dtype=np.int64)[:, np.newaxis] * size
        return [
            partial(np.copyto, rows, indices.reshape(rows.shape)),
            *([partial(np.remainder, rows, size, out=rows)] if wrap else []),
            partial(np.add, rows, first, out=rows),
            partial(np.take, data.reshape(outer * size, -1), rows, axis=0, out=y.reshape(*rows.shape, -1), mode="clip"),
        ]


@declares
def gather_operator(
    name: str,
    axis: Callable[[OperatorCall], int],
    doc: str,
    args: dict[str, str] | None = None,
    onnx: tuple[OnnxName, ...] = (),
) -> OpSchema:
    """The schema of an operator that picks slices of input 0 along `axis(call)` by the indices in input 1."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(1, INT32, INT64)
        return [TensorType(picked_shape(call, axis(call)), call.inputs[0].meta)]

    return OpSchema(
        name,
        infer=infer,
        doc=doc,
        input_names=("DATA", "INDICES"),
        output_names=("OUTPUT",),
        args=GATHER_ARGS | (args or {}),
        cost=copy_cost,
        onnx=onnx,
        rows=gathered(axis),
    )


def _gather_axis(call: OperatorCall) -> int:
    return call.axis("axis", 0, len(call.inputs[0].shape))


def _batch_axis(call: OperatorCall) -> int:
    if len(call.inputs[0].shape) < 2:
        raise call.fail("the data must have at least 2 axes, the first of them the batch")
    return 1


@gather_operator(
    "Gather",
    _gather_axis,
    "DATA at the indices along `axis`; that axis is replaced by the axes of INDICES (int32 or int64).",
    {
        "axis": "the axis of DATA to pick along (default 0)",
        "dense_gradient": "1: the gradient of DATA is a tensor of its shape, not indices and rows (default 0)",
    },
    (OnnxName("Gather", 13, {"axis": "axis"}, fixed={"wrap_indices": 1}),),
)
class Gather(GatherAlongAxis):
    """Slices picked by index."""

    def axis(self) -> int:
        return _gather_axis(self.call())


@gather_operator("BatchGather", _batch_axis, "DATA[:, INDICES]: the same picks from every batch element.")
class BatchGather(GatherAlongAxis):
    """Slices picked by index from every batch element."""

    def axis(self) -> int:
        """The axis after the batch."""
        return 1


def infer_one_hot(call: OperatorCall) -> list[TensorType]:
    """A float32 row of the given size per index."""
    (count,) = call.require_rank(0, 1)
    call.require_types(0, INT32, INT64)
    sizes = integers_of(call, 1)
    if len(sizes) != 1 or sizes[0] < 0:
        raise call.fail(f"the row size must be one number of at least 0, found {list(sizes)}")
    return [TensorType((count, sizes[0]), FLOAT32)]


@new_operator(
    "OneHot",
    infer=infer_one_hot,
    doc="A row per index, of the size in input 1, with a 1 at the index and 0 elsewhere (float32).",
    input_names=("indices", "index_size_tensor"),
    output_names=("one_hots",),
    cost=copy_cost,
    value_inputs=(1,),
)
class OneHot(Operator):
    """Indices as rows of zeros with a single one."""

    def prepare(self) -> Step:
        """Clear the output, then set one place in each row."""
        indices, y, label = self.x(0), self.y(0), self.label
        count, size = y.shape
        first = np.arange(count, dtype=np.int64) * size
        places = self.scratch((count,), np.int64)
        flat = y.reshape(-1)

        def encode() -> None:
            check_indices(indices, 0, size, label)
            flat.fill(0)
            np.add(first, indices, out=places)
            flat[places] = 1

        return encode


_LONG = 2048
"""Rows of so many elements are searched one by one for the few that are wanted."""


def topk_plan(call: OperatorCall) -> tuple[int, int]:
    """How many elements to keep, and along which axis. Raises ShapeError unless 0 <= k <= the size of the axis."""
    shape = call.inputs[0].shape
    axis = call.axis("axis", -1, len(shape))
    if len(call.inputs) == 1 and "k" not in call.arguments:
        raise call.fail("'k' is missing: give the argument or a second input")
    counts = integers_of(call, 1) if len(call.inputs) == 2 else (call.arguments.int("k", 0),)
    if len(counts) != 1 or not 0 <= counts[0] <= shape[axis]:
        raise call.fail(f"'k' must be one number in [0, {shape[axis]}], the size of axis {axis}, found {list(counts)}")
    return counts[0], axis


def infer_topk(call: OperatorCall) -> list[TensorType]:
    """Values of the input's type and int64 indices, with `k` in place of the axis; then a vector of flat indices."""
    if call.inputs[0].meta in (STRING, BOOL):
        raise call.fail(f"expected numbers, found {call.inputs[0].meta}")
    call.arguments.bool("largest", True)
    k, axis = topk_plan(call)
    shape = call.inputs[0].shape
    kept = (*shape[:axis], k, *shape[axis + 1 :])
    types = [TensorType(kept, call.inputs[0].meta), TensorType(kept, INT64), TensorType((element_count(kept),), INT64)]
    return types[: len(call.definition.output)]


_along_axis = apart_from(lambda call: [call.axis("axis", -1, len(call.inputs[0].shape))])


def _topk_rows(asked: RowsCall) -> list[Rows | None]:
    """The flattened indices count through all rows."""
    values, indices, *_ = _along_axis(asked)
    return [values, indices, None][: len(asked.outputs)]


@new_operator(
    "TopK",
    inputs=(1, 2),
    outputs=(2, 3),
    infer=infer_topk,
    doc=(
        "The k largest elements along an axis, in descending order, or the k smallest in ascending order, and "
        "where they were (int64). Of equal elements the one with the lower index comes first; NaN counts as larger "
        "than any number."
    ),
    input_names=("X", "k"),
    output_names=("Values", "Indices", "Flattened_indices"),
    args={
        "k": "how many, when there is no input 1",
        "axis": "along which axis (default -1)",
        "largest": "0: the smallest elements (default 1)",
    },
    cost=copy_cost,
    value_inputs=(1,),
    onnx=(OnnxName("TopK", 24, {"k": "k", "axis": "axis", "largest": "largest"}, ignored=("sorted",)),),
    rows=_topk_rows,
)
class TopK(Operator):
    """The largest or smallest elements along an axis, and their indices."""

    def prepare(self) -> Step:
        """Rank the elements of each row, then take the first k ranks of every row."""
        x, values, indices = self.x(0), self.y(0), self.y(1)
        k, axis = topk_plan(self.call())
        rows = np.moveaxis(x, axis, -1)
        picked = self.scratch((*rows.shape[:-1], k), np.int64)
        largest = self.arguments.bool("largest", True)
        if x.size and k and x.dtype.kind in "fiu" and rows.shape[-1] >= max(_LONG, 8 * k):
            rank = self._selecting(rows, picked, largest=largest)
        elif x.dtype.itemsize <= 4:
            rank = self._packed_ranking(rows, picked, largest=largest)
        else:
            rank = _sorted_ranking(rows, picked, largest=largest)
        places = self.scratch(picked.shape, np.int64)
        starts = _flat_places(x.shape, axis)
        stride = element_count(x.shape[axis + 1 :])
        flat_x = x.reshape(-1)
        by_axis = np.moveaxis(places, -1, axis)
        flat_output = self.y(2).reshape(indices.shape) if len(self.output_blobs) == 3 else None
        flat_places = self.scratch(indices.shape, np.int64) if flat_output is None else flat_output

        def top() -> None:
            rank()
            np.copyto(indices, np.moveaxis(picked, -1, axis))
            np.multiply(picked, stride, out=places)
            np.add(places, starts, out=places)
            np.copyto(flat_places, by_axis)
            if values.size:
                np.take(flat_x, flat_places, out=values, mode="clip")

        return top

    def _selecting(self, rows: Array, picked: Array, *, largest: bool) -> Step:
        """Rank, of each long row, what is at least as large as a bound that k elements reach.

        That is the k-th largest of the maxima of 2k and more groups. A row with NaN is sorted as a whole.
        """
        size, k = rows.shape[-1], picked.shape[-1]
        groups = max(2 * k, 128)
        flat, targets = self.scratch((picked.size // k, size), rows.dtype), picked.reshape(-1, k)
        parts = flat[:, : size // groups * groups].reshape(len(flat), -1, groups)
        bounds = self.scratch((len(flat), groups), rows.dtype)
        chosen = self.scratch((size,), np.bool_)
        place, compare = (groups - k, np.greater_equal) if largest else (k - 1, np.less_equal)
        reduce = np.maximum.reduce if largest else np.minimum.reduce

        def rank() -> None:
            np.copyto(flat.reshape(rows.shape), rows)
            reduce(parts, axis=1, out=bounds)
            bounds.partition(place, axis=-1)
            for row, target, bound, last in zip(flat, targets, bounds[:, place], bounds.max(axis=1), strict=True):
                if last != last or np.isnan(row[parts.shape[1] * groups :]).any():
                    _sorted_ranking(row, target, largest=largest)()
                    continue
                candidates = np.flatnonzero(compare(row, bound, out=chosen))
                _sorted_ranking(row[candidates], target, largest=largest)()
                np.copyto(target, candidates[target])

        return rank

    def _packed_ranking(self, rows: Array, picked: Array, *, largest: bool) -> Step:
        """Rank by sorting one uint64 per element: its key, inverted where large comes first, above its index."""
        packed = self.scratch(rows.shape, np.uint64)
        width = 8 * rows.dtype.itemsize
        bits = self.scratch(rows.shape, f"u{rows.dtype.itemsize}")
        sign = self.scratch(rows.shape, bits.dtype)
        chosen = self.scratch(rows.shape, np.bool_) if rows.dtype.kind not in "iu" else None
        numbers = np.arange(rows.shape[-1], dtype=np.uint64)
        k = picked.shape[-1]
        first = packed[..., :k] if 2 * k < packed.shape[-1] else packed
        top_bit = bits.dtype.type(1 << (width - 1))
        low_bits = np.uint64(0xFFFFFFFF)

        def rank() -> None:
            np.copyto(bits.view(rows.dtype), rows)
            if chosen is not None:
                _order_float_bits(rows, bits, sign, chosen, top_bit)
            elif rows.dtype.kind == "i":
                np.bitwise_xor(bits, top_bit, out=bits)
            if largest:
                np.invert(bits, out=bits)
            np.copyto(packed, bits)
            np.left_shift(packed, np.uint64(32), out=packed)
            np.bitwise_or(packed, numbers, out=packed)
            if 2 * k < packed.shape[-1]:
                packed.partition(k, axis=-1)
            first.sort(axis=-1)
            np.bitwise_and(first, low_bits, out=first)
            np.copyto(picked, first[..., :k], casting="unsafe")

        return rank


def _order_float_bits(values: Array, bits: Array, sign: Array, chosen: Array, top_bit: np.generic) -> None:
    """Turn the bit patterns of floats into unsigned keys of the same order: all NaN largest, -0 equal to 0.

    A positive float gets its top bit set, a negative one has every bit inverted (IEEE 754 totalOrder).
    """
    np.equal(values, values.dtype.type(0), out=chosen)
    np.copyto(bits, bits.dtype.type(0), where=chosen)
    np.right_shift(bits, 8 * bits.dtype.itemsize - 1, out=sign)
    np.negative(sign, out=sign)
    np.bitwise_or(sign, top_bit, out=sign)
    np.bitwise_xor(bits, sign, out=bits)
    np.not_equal(values, values, out=chosen)
    np.copyto(bits, np.invert(bits.dtype.type(0)), where=chosen)


def _sorted_ranking(rows: Array, picked: Array, *, largest: bool) -> Step:
    """Rank elements of 8 bytes, whose key and index do not fit one word: a stable sort, which makes its own memory.

    Sorting the reversed row in ascending order and reading it backwards puts the lower index first among equals.
    """
    size, k = rows.shape[-1], picked.shape[-1]
    backwards = rows[..., ::-1]

    def rank_smallest() -> None:
        np.copyto(picked, np.argsort(rows, axis=-1, kind="stable")[..., :k])

    def rank() -> None:
        order = np.argsort(backwards, axis=-1, kind="stable")
        np.subtract(size - 1, order[..., ::-1][..., :k], out=picked)

    return rank if largest else rank_smallest


def _flat_places(shape: tuple[int, ...], axis: int) -> npt.NDArray[np.int64]:
    """The flat index of the first element of every row along `axis`, with a last axis of size 1."""
    inner = element_count(shape[axis + 1 :])
    outer = np.arange(element_count(shape[:axis]), dtype=np.int64)
    outer = outer.reshape(shape[:axis] + (1,) * (len(shape) - axis - 1))
    within = np.arange(inner, dtype=np.int64).reshape(shape[axis + 1 :])
    return (outer * (shape[axis] * inner) + within)[..., np.newaxis]
