"""Lists of identifiers, as values and lengths: from dense rows, merged, and from the scores of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.sparse.segments import checked_lengths


def infer_dense_to_ids(call: OperatorCall) -> list[TensorType]:
    """A length for each row, and as many identifiers as there are positive elements."""
    call.require_types(0, *NUMBER_TYPES)
    rows = call.require_rank(0, 2)[0]
    count = int(np.count_nonzero(call.known_value(0) > 0))
    return [TensorType((rows,), INT32), TensorType((count,), INT32)]


@array_function(
    "DenseVectorToIdList",
    infer=infer_dense_to_ids,
    doc="The columns of the positive elements, row by row.",
    input_names=("X",),
    output_names=("lengths", "ids"),
    value_inputs=(0,),
)
def dense_to_ids(_call: OperatorCall, x: Array) -> Sequence[Array]:
    """How many there are in each row, and which."""
    return [np.count_nonzero(x > 0, axis=1), np.nonzero(x > 0)[1]]


def _merged(inputs: Sequence[Array]) -> list[Array]:
    """The identifiers of each row, each once, sorted."""
    pieces = [np.split(values, np.cumsum(lengths)[:-1]) for lengths, values in _pairs(inputs)]
    return [np.unique(np.concatenate(row)) for row in zip(*pieces, strict=True)]


def _pairs(inputs: Sequence[Array]) -> list[tuple[Array, Array]]:
    return list(zip(inputs[::2], inputs[1::2], strict=True))


_MAX_LISTS = 32


def infer_merge(call: OperatorCall) -> list[TensorType]:
    """A length for each row, and all different identifiers of it."""
    if len(call.inputs) % 2:
        raise call.fail("expected pairs of lengths and values")
    rows = call.require_rank(0, 1)
    meta = call.require_same_type(*range(1, len(call.inputs), 2))
    call.require_types(1, INT32, INT64)
    for index in range(0, len(call.inputs), 2):
        call.require_shape(index, rows, "that of the first lengths")
        checked_lengths(call, index, call.require_rank(index + 1, 1)[0])
    merged = _merged([call.known_value(index) for index in range(len(call.inputs))]) if rows[0] else []
    return [TensorType(rows, INT32), TensorType((sum(map(len, merged)),), meta)]


@array_function(
    "MergeIdLists",
    inputs=(2, 2 * _MAX_LISTS),
    infer=infer_merge,
    doc="For each row the identifiers of all lists, each once, sorted.",
    input_names=("lengths_0", "values_0", "..."),
    output_names=("lengths", "values"),
    value_inputs=tuple(range(2 * _MAX_LISTS)),
)
def merge(_call: OperatorCall, *inputs: Array) -> Sequence[Array]:
    """Row by row."""
    merged = _merged(inputs) if len(inputs[0]) else []
    return [np.array([len(row) for row in merged], np.int32), np.concatenate([inputs[1][:0], *merged])]


def _decoded(call: OperatorCall, scores: Array, lengths: Array | None) -> list[list[int]]:
    """The labels of each sequence: the best of each time, without blanks (0) and, merged, without repetitions."""
    best = scores.argmax(axis=2)
    found = []
    for number in range(scores.shape[1]):
        path = [0, *best[: len(best) if lengths is None else lengths[number], number].tolist()]
        merge_repeated = call.arguments.bool("merge_repeated", True)
        found.append([now for last, now in pairwise(path) if now and not (merge_repeated and now == last)])
    return found


def infer_greedy_decoder(call: OperatorCall) -> list[TensorType]:
    """A length for each sequence, and all labels."""
    call.require_types(0, *FLOAT_TYPES)
    times, sequences, labels = call.require_rank(0, 3)
    if not labels:
        raise call.fail("there must be at least one label, which is the blank")
    lengths = None
    if len(call.inputs) == 2:
        call.require_types(1, INT32)
        call.require_shape(1, (sequences,), "a length for each sequence")
        lengths = call.known_value(1)
        if ((lengths < 0) | (lengths > times)).any():
            raise call.fail(f"lengths must be in [0, {times}]")
    count = sum(map(len, _decoded(call, call.known_value(0), lengths)))
    return [TensorType((sequences,), INT32), TensorType((count,), INT32)]


@array_function(
    "CTCGreedyDecoder",
    inputs=(1, 2),
    infer=infer_greedy_decoder,
    doc="The best label of each time, without blanks (label 0), one sequence after another (Graves et al. 2006).",
    input_names=("scores", "lengths"),
    output_names=("lengths", "labels"),
    args={"merge_repeated": "0: a label that stays is a new one each time (default 1)"},
    value_inputs=(0, 1),
)
def greedy_decoder(call: OperatorCall, scores: Array, *lengths: Array) -> Sequence[Array]:
    """Sequence by sequence."""
    found = _decoded(call, scores, lengths[0] if lengths else None)
    return [np.array([len(row) for row in found]), np.array([label for row in found for label in row], np.int32)]


def infer_perplexity(call: OperatorCall) -> list[TensorType]:
    """One number."""
    call.require_types(0, FLOAT32)
    if not call.inputs[0].elements:
        raise call.fail("there must be at least one probability")
    return [TensorType((), FLOAT32)]


@array_function(
    "Perplexity",
    infer=infer_perplexity,
    doc="exp(-mean of ln P): of how many equal choices the probabilities P of what came are those.",
    input_names=("P",),
    output_names=("perplexity",),
)
def perplexity(_call: OperatorCall, p: Array) -> Sequence[Array]:
    """In float64."""
    return [np.exp(-np.log(p.astype(np.float64)).mean())]


no_gradient("DenseVectorToIdList", "MergeIdLists", "CTCGreedyDecoder", "Perplexity")
