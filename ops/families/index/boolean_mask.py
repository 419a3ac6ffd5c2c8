"""Rows chosen by a mask, rows put back by masks, and where values are in a list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import BOOL, INT32, INT64
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices

_MAX_PAIRS = 32


def infer_boolean_mask(call: OperatorCall) -> list[TensorType]:
    """The rows where the mask is true, and their numbers."""
    data = call.inputs[0]
    call.require_types(1, BOOL)
    call.require_shape(1, data.shape[:1], "a truth value for each row")
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    count = int(np.count_nonzero(call.known_value(1)))
    return [TensorType((count, *data.shape[1:]), data.meta), TensorType((count,), INT64)][: len(call.definition.output)]


@array_function(
    "BooleanMask",
    outputs=(1, 2),
    infer=infer_boolean_mask,
    doc="The rows of the data where the mask is true, and their numbers.",
    input_names=("data", "mask"),
    output_names=("masked_data", "masked_indices"),
    value_inputs=(1,),
)
def boolean_mask(call: OperatorCall, data: Array, mask: Array) -> Sequence[Array]:
    """A selection."""
    return [data[mask], np.flatnonzero(mask)][: len(call.definition.output)]


def infer_boolean_mask_gradient(call: OperatorCall) -> list[TensorType]:
    """A row for each truth value."""
    mask, dy = call.inputs
    call.require_types(0, BOOL)
    call.require_rank(0, 1)
    count = int(np.count_nonzero(call.known_value(0)))
    call.require_shape(1, (count, *dy.shape[1:]), "a row for each that the mask keeps")
    return [TensorType((*mask.shape, *dy.shape[1:]), dy.meta)]


@array_function(
    "BooleanMaskGradient",
    infer=infer_boolean_mask_gradient,
    doc="Gradient of BooleanMask: the rows of dY where the mask is true, zeros elsewhere.",
    input_names=("mask", "dY"),
    output_names=("dX",),
    value_inputs=(0,),
)
def boolean_mask_rows(_call: OperatorCall, mask: Array, dy: Array) -> Sequence[Array]:
    """The rows put back."""
    dx = np.zeros((*mask.shape, *dy.shape[1:]), dy.dtype)
    dx[mask] = dy
    return [dx]


gradient_by("BooleanMask", "BooleanMaskGradient", ("X1", "dY"))


def infer_boolean_unmask(call: OperatorCall) -> list[TensorType]:
    """A value for each place. Raises ShapeError unless the masks have one shape and each place is in one of them."""
    if len(call.inputs) % 2:
        raise call.fail("expected pairs of a mask and its values")
    masks = range(0, len(call.inputs), 2)
    meta = call.require_same_type(*range(1, len(call.inputs), 2))
    taken = np.zeros(call.require_rank(0, 1), np.bool_)
    for index in masks:
        call.require_types(index, BOOL)
        call.require_shape(index, taken.shape, "that of the first mask")
        mask = call.known_value(index)
        count = int(np.count_nonzero(mask))
        call.require_shape(index + 1, (count,), "a value for each place that its mask has")
        taken |= mask
    if not taken.all():
        raise call.fail(f"position {int(np.argmin(taken))} is in none of the masks")
    return [TensorType(taken.shape, meta)]


@array_function(
    "BooleanUnmask",
    inputs=(2, _MAX_PAIRS * 2),
    infer=infer_boolean_unmask,
    doc="Values put where their mask is true; where several masks are, the first.",
    input_names=("mask_0", "values_0", "..."),
    output_names=("Y",),
    value_inputs=tuple(range(0, 2 * _MAX_PAIRS, 2)),
)
def boolean_unmask(_call: OperatorCall, *inputs: Array) -> Sequence[Array]:
    """The masks from the last to the first, so that the first one wins."""
    found = np.zeros(inputs[0].shape, inputs[1].dtype)
    for index in reversed(range(0, len(inputs), 2)):
        found[inputs[index]] = inputs[index + 1]
    return [found]


def infer_find(call: OperatorCall) -> list[TensorType]:
    """A place for each element of X, of the type of X."""
    call.require_rank(0, 1)
    call.require_types(0, INT32, INT64)
    call.require_same_type()
    call.arguments.int("missing_value", -1)
    return [call.inputs[1]]


@array_function(
    "Find",
    infer=infer_find,
    doc="Where each element of X is in the vector `index`, the last place of several; `missing_value` where not.",
    input_names=("index", "X"),
    output_names=("places",),
    args={"missing_value": "what stands for no place (default -1)"},
)
def find(call: OperatorCall, index: Array, x: Array) -> Sequence[Array]:
    """A search in the sorted vector."""
    missing = call.arguments.int("missing_value", -1)
    if not index.size:
        return [np.full(x.shape, missing)]
    order = np.argsort(index, kind="stable")
    place = np.searchsorted(index, x, side="right", sorter=order) - 1
    last = order[np.maximum(place, 0)]
    return [np.where((place >= 0) & (index[last] == x), last, missing)]


def infer_mask_lengths(call: OperatorCall) -> list[TensorType]:
    """That of the lengths. Raises ShapeError unless the mask is a vector."""
    call.require_types(0, INT32, INT64)
    call.require_types(1, BOOL)
    call.require_rank(0, 1)
    call.require_rank(1, 1)
    return [call.inputs[0]]


@array_function(
    "BooleanMaskLengths",
    infer=infer_mask_lengths,
    doc="How many rows of each segment are left when BooleanMask has taken those where the mask is true.",
    input_names=("lengths", "mask"),
    output_names=("masked_lengths",),
)
def mask_lengths(call: OperatorCall, lengths: Array, mask: Array) -> Sequence[Array]:
    """A count for each segment. Raises ShapeError for lengths that do not add up to the rows of the mask."""
    if (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != len(mask):
        raise call.fail(f"lengths must be at least 0 and add up to {len(mask)} truth values")
    return [np.bincount(np.repeat(np.arange(len(lengths)), lengths)[mask], minlength=len(lengths))]


def infer_duplicates(call: OperatorCall) -> list[TensorType]:
    """As many as there are elements that were there before."""
    (count,) = call.require_rank(0, 1)
    return [TensorType((count - len(np.unique(call.known_value(0))),), INT64)]


@array_function(
    "FindDuplicateElements",
    infer=infer_duplicates,
    doc="The places of elements of a vector that are there before, too, in rising order.",
    input_names=("data",),
    output_names=("places",),
    value_inputs=(0,),
)
def duplicates(_call: OperatorCall, data: Array) -> Sequence[Array]:
    """All places but the first of each element."""
    again = np.ones(data.shape, np.bool_)
    again[np.unique(data, return_index=True)[1]] = False
    return [np.flatnonzero(again)]


def infer_remove_blocks(call: OperatorCall) -> list[TensorType]:
    """The rows that no index names. Raises ShapeError, IndexError."""
    data, (count,) = call.inputs[0], call.require_rank(1, 1)
    if not data.shape:
        raise call.fail("the data must have at least 1 axis")
    if not count:
        return [data]
    call.require_types(1, INT32, INT64)
    indices = call.known_value(1)
    check_indices(indices, 0, data.shape[0], call.label)
    return [TensorType((data.shape[0] - len(np.unique(indices)), *data.shape[1:]), data.meta)]


@array_function(
    "RemoveDataBlocks",
    infer=infer_remove_blocks,
    doc="The data without rows `indices`, which come in any order, and more than once if they like.",
    input_names=("data", "indices"),
    output_names=("Y",),
    value_inputs=(1,),
)
def remove_blocks(_call: OperatorCall, data: Array, indices: Array) -> Sequence[Array]:
    """A selection of the other rows."""
    kept = np.ones(len(data), np.bool_)
    kept[indices.astype(np.int64)] = False
    return [data[kept]]


no_gradient("BooleanUnmask", "Find", "BooleanMaskLengths", "FindDuplicateElements", "RemoveDataBlocks")
