"""Operators on sequences: lists of arrays that a blob holds as a Variant (`dagexec.core.variant`).

Sequences share their arrays, which nothing writes; what goes in and comes out of one as a tensor is copied.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.blob import Blob, content_of, set_content, tensor_in
from dagexec.core.dtypes import INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, first_to_first
from dagexec.core.variant import Variant, described
from dagexec.errors import BlobTypeError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.platform.host_memory import check_fits


class VariantOperator(Operator):
    """Base of operators that look at what their blobs hold whenever they run."""

    reads_strided = True
    writes_strided = True

    def prepare(self) -> Step:
        """`compute`."""
        return self.compute

    def compute(self) -> None:
        """Compute the outputs from what the inputs hold."""
        raise NotImplementedError

    def sequence(self, index: int = 0) -> tuple[Array, ...]:
        """The arrays of input `index`. Raises BlobTypeError unless it is a sequence."""
        blob = self.input_blobs[index]
        content = blob.value.content if isinstance(blob.value, Variant) else content_of(blob)
        if not isinstance(content, tuple):
            raise BlobTypeError(f"{self.label}: {blob.name!r} must be a sequence, found {described(content)}")
        return content

    def integer(self, index: int) -> int:
        """The one integer of input `index`. Raises ShapeError."""
        array = self.input(index).array
        if array.size != 1 or array.dtype.kind not in "iu":
            raise self.unfit(index, "one integer", array)
        return int(array.item())

    def unfit(self, index: int, expected: str, found: Array) -> ShapeError:
        """The error for an input that is not what it must be."""
        name = self.input_blobs[index].name
        return ShapeError(f"{self.label}: {name!r} must be {expected}, found {found.dtype}{list(found.shape)}")

    def place(self, index: int, length: int, what: str) -> int:
        """Input `index` as a place in `length` of them; negative counts from the end. Raises ShapeError."""
        place = self.integer(index)
        if not -length <= place < length:
            raise ShapeError(f"{self.label}: there is no {what} {place}; the sequence has {length}")
        return place % length

    def give(self, array: Array) -> None:
        """Have output 0 hold a copy of `array`."""
        put(self.output_blobs[0], array)


def put(blob: Blob, array: Array) -> None:
    """Have `blob` hold a copy of `array`."""
    check_fits(array.nbytes, f"blob {blob.name!r} of shape {array.shape}")
    tensor_in(blob).feed(array)


@new_operator(
    "SequenceEmpty",
    infer=None,
    on_host=True,
    doc="A sequence without arrays.",
    inputs=(0, 0),
    output_names=("sequence",),
    args={"dtype": "data type of the arrays it is for"},
)
class SequenceEmpty(VariantOperator):
    """Nothing yet."""

    def compute(self) -> None:
        set_content(self.output_blobs[0], ())


@new_operator(
    "SequenceConstruct",
    infer=None,
    on_host=True,
    doc="A sequence of copies of the inputs.",
    inputs=(1, UNBOUNDED),
    input_names=("tensors...",),
    output_names=("sequence",),
)
class SequenceConstruct(VariantOperator):
    """All inputs, in order."""

    def compute(self) -> None:
        arrays = [self.input(index).fetch() for index in range(len(self.input_blobs))]
        if len({array.dtype for array in arrays}) > 1:
            found = ", ".join(str(array.dtype) for array in arrays)
            raise ShapeError(f"{self.label}: the arrays of a sequence have one data type, found {found}")
        set_content(self.output_blobs[0], tuple(arrays))


@new_operator(
    "SequenceInsert",
    infer=None,
    inplace=first_to_first,
    on_host=True,
    doc="The sequence with a copy of the tensor before a place, by default at its end.",
    inputs=(2, 3),
    input_names=("sequence", "tensor", "place"),
    output_names=("result",),
)
class SequenceInsert(VariantOperator):
    """A new sequence, which shares the other arrays."""

    def compute(self) -> None:
        arrays, length = self.sequence(), len(self.sequence())
        place = self.integer(2) if len(self.input_blobs) > 2 else length
        if not -length <= place <= length:
            raise ShapeError(f"{self.label}: cannot insert at {place}; the sequence has {length}")
        place += length if place < 0 else 0
        new = content_of(self.input_blobs[1])
        if arrays and isinstance(new, np.ndarray) and arrays[0].dtype != new.dtype:
            raise self.unfit(1, f"of the sequence's data type, {arrays[0].dtype}", new)
        set_content(self.output_blobs[0], (*arrays[:place], new, *arrays[place:]))


@new_operator(
    "SequenceErase",
    infer=None,
    inplace=first_to_first,
    on_host=True,
    doc="The sequence without the array at a place, by default its last.",
    inputs=(1, 2),
    input_names=("sequence", "place"),
    output_names=("result",),
)
class SequenceErase(VariantOperator):
    """A new sequence, which shares the other arrays."""

    def compute(self) -> None:
        arrays, length = self.sequence(), len(self.sequence())
        if not arrays:
            raise ShapeError(f"{self.label}: nothing can be erased from an empty sequence")
        place = self.place(1, length, "array") if len(self.input_blobs) > 1 else length - 1
        set_content(self.output_blobs[0], (*arrays[:place], *arrays[place + 1 :]))


@new_operator(
    "SequenceAt",
    infer=None,
    on_host=True,
    doc="A copy of the array at a place of the sequence; negative places count from the end.",
    input_names=("sequence", "place"),
    output_names=("tensor",),
)
class SequenceAt(VariantOperator):
    """One of the arrays."""

    def compute(self) -> None:
        arrays = self.sequence()
        found = arrays[self.place(1, len(arrays), "array")]
        if isinstance(found, tuple):
            set_content(self.output_blobs[0], found)
        else:
            self.give(found)


@new_operator(
    "SequenceLength",
    infer=None,
    on_host=True,
    doc="How many arrays the sequence has, an int64 without axes.",
    input_names=("sequence",),
    output_names=("length",),
)
class SequenceLength(VariantOperator):
    """Count."""

    def compute(self) -> None:
        tensor_in(self.output_blobs[0]).resize((), INT64)[...] = len(self.sequence())


@new_operator(
    "SplitToSequence",
    infer=None,
    on_host=True,
    doc="The tensor in pieces along an axis: of the lengths that `split` lists, or all of its one length but for "
    "the last; without it of length 1, and without the axis unless keepdims.",
    inputs=(1, 2),
    input_names=("tensor", "split"),
    output_names=("sequence",),
    args={"axis": "the axis (default: 0)", "keepdims": "pieces of length 1 keep the axis (default: 1)"},
)
class SplitToSequence(VariantOperator):
    """Copies of the pieces."""

    def compute(self) -> None:
        array = self.input(0).array
        axis = self.arguments.int("axis", 0)
        if not -array.ndim <= axis < array.ndim:
            raise self.unfit(0, f"of a rank that has axis {axis}", array)
        lengths = self._lengths(array.shape[axis])
        parts = np.split(array, np.cumsum(lengths)[:-1], axis) if lengths else []
        pieces = [np.array(part, order="C") for part in parts]
        if len(self.input_blobs) < 2 and not self.arguments.bool("keepdims", True):
            pieces = [piece.squeeze(axis) for piece in pieces]
        set_content(self.output_blobs[0], tuple(pieces))

    def _lengths(self, length: int) -> list[int]:
        if len(self.input_blobs) < 2:
            return [1] * length
        split = self.input(1).array
        if split.dtype.kind not in "iu" or split.ndim > 1 or (split.ndim == 0 and split < 1) or (split < 0).any():
            raise self.unfit(1, "positive lengths", split)
        if split.ndim == 1:
            lengths = [int(value) for value in split]
            if sum(lengths) != length:
                raise ShapeError(f"{self.label}: pieces of lengths {lengths} do not make up {length}")
            return lengths
        whole, rest = divmod(length, int(split))
        return [int(split)] * whole + ([rest] if rest else [])


@new_operator(
    "ConcatFromSequence",
    infer=None,
    on_host=True,
    doc="The arrays of the sequence joined along an axis, with new_axis along one that they get.",
    input_names=("sequence",),
    output_names=("tensor",),
    args={"axis": "the axis", "new_axis": "it is a new one (default: 0)"},
    required_args=("axis",),
)
class ConcatFromSequence(VariantOperator):
    """One array."""

    def compute(self) -> None:
        arrays, axis = self.sequence(), self.arguments.int("axis", 0)
        if not arrays:
            raise ShapeError(f"{self.label}: there is nothing to join in an empty sequence")
        check_fits(sum(array.nbytes for array in arrays), f"{self.label}: {len(arrays)} arrays joined")
        join = np.stack if self.arguments.bool("new_axis") else np.concatenate
        try:
            self.give(join(arrays, axis=axis))
        except ValueError as error:
            shapes = ", ".join(str(list(array.shape)) for array in arrays[:4])
            raise ShapeError(f"{self.label}: arrays of shapes {shapes} cannot be joined: {error}") from None


for _type in (
    "SequenceEmpty", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength",
    "SplitToSequence", "ConcatFromSequence",
):  # fmt: skip
    no_gradient(_type)
