"""Rows of embedding tables that are kept within limits, in place: SparseNormalize and EnsureClipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT16, FLOAT32, INT32, INT64, TypeMeta
from dagexec.core.gradient import not_differentiable
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices

_LEAST = 1e-12
"""Added to norms, so that a row of zeros stays as it is."""


def _infer(*types: TypeMeta) -> Callable[[OperatorCall], list[TensorType]]:
    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *types)
        shape = call.inputs[0].shape
        if len(call.inputs) > 1:
            call.require_types(1, INT32, INT64)
            if not shape:
                raise call.fail("the tensor must have rows, found one without axes")
        if len(call.inputs) > 2:
            call.require_shape(2, (*call.inputs[1].shape, *shape[1:]), "a row for each index")
        return [call.inputs[0]]

    return infer


def _normalize(call: OperatorCall, table: Array, indices: Array, *_gradient: Array) -> Sequence[Array]:
    """Norms in float32, those of Caffe2."""
    check_indices(indices, 0, len(table), call.label)
    rows = np.unique(indices)
    limit = np.float32(call.arguments.float("norm", 1.0))
    found = table.copy()
    chosen = table[rows].astype(np.float32).reshape(rows.size, -1)
    norms = np.sqrt(np.square(chosen).sum(axis=1, keepdims=True)) + np.float32(_LEAST)
    changes = norms > limit if call.arguments.bool("use_max_norm", True) else np.True_
    found[rows] = np.where(changes, chosen * (limit / norms), chosen).reshape(rows.size, *table.shape[1:])
    return [found]


for _name, _meta in (("SparseNormalize", FLOAT32), ("Float16SparseNormalize", FLOAT16)):
    array_function(
        _name,
        inputs=(2, 3),
        infer=_infer(_meta),
        doc="In place: rows `indices` of a table scaled to a norm, by default only those whose norm is above it.",
        input_names=("param", "indices", "grad, which is not read"),
        output_names=("param",),
        args={"norm": "the norm (default 1)", "use_max_norm": "0: rows of smaller norms are scaled, too (default 1)"},
        inplace=first_to_first,
        enforced_inplace=((0, 0),),
    )(_normalize)


@array_function(
    "EnsureClipped",
    inputs=(1, 3),
    infer=_infer(FLOAT32),
    doc="A tensor whose elements below `min` are `min`, and those above `max` are `max`; with indices only in those "
    "rows, in place.",
    input_names=("param", "indices", "grad, which is not read"),
    output_names=("Y",),
    args={"min": "the smallest value (default: no limit)", "max": "the largest value (default: no limit)"},
    inplace=first_to_first,
)
def ensure_clipped(call: OperatorCall, param: Array, *others: Array) -> Sequence[Array]:
    """One clip."""
    low, high = (np.float32(call.arguments.float(name, end)) for name, end in (("min", -np.inf), ("max", np.inf)))
    if not others:
        return [np.clip(param, low, high)]
    check_indices(others[0], 0, len(param), call.label)
    found = param.copy()
    found[others[0]] = np.clip(param[others[0]], low, high)
    return [found]


not_differentiable(
    "it changes parameters, after the gradients are known", "SparseNormalize", "Float16SparseNormalize", "EnsureClipped"
)
