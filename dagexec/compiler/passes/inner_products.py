"""inner-products: products with constant matrices become fully connected layers.

`Gemm`, `MatMul`, `BatchMatMul` and `FCTransposed` with constant weights become `FC`, Y = X W^T + b, whose weights are
N x K: transposed, and scaled by Gemm's alpha and beta, once. A constant added to each row afterwards is a bias, which
`batch-norm-folding` folds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagexec.compiler.passes.draft import Array, Draft
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.node import new_node

LAST = -1
"""The axis that is summed over where the number of axes is not known: the leading ones are joined in a run."""

_PRODUCTS = ("Gemm", "MatMul", "BatchMatMul", "FCTransposed")
_LAYERS = (*_PRODUCTS, "FC")
_is_product, _is_batched = of_type(*_PRODUCTS), of_type("BatchMatMul")

_SHARED_BYTES = 1 << 20
"""Weights of fewer bytes may be in memory twice."""


def edit(draft: Draft) -> None:
    """Rewrite each product whose second operand is a constant matrix of floats."""
    types = draft.types() if draft.has(_is_batched) else {}
    for number in draft.having(_is_product):
        if draft.is_free(number):
            _rewrite(draft, number, types)


def _rewrite(draft: Draft, number: int, types: Mapping[str, BlobType]) -> None:
    definition = draft[number]
    matrix = draft.constant(definition.input[1])
    if matrix is None or matrix.ndim != 2 or matrix.dtype not in (np.float32, np.float64):
        return
    arguments = draft.arguments(number)
    if arguments.int("trans_a", 0):
        return
    axis, bias = 1, None
    weights = matrix if arguments.int("trans_b", 0) else matrix.T
    if definition.type == "Gemm":
        bias = _gemm_bias(draft, number, len(weights), matrix.dtype)
        weights = _scaled(weights, arguments.float("alpha", 1.0))
    elif definition.type == "FCTransposed":
        axis, weights = arguments.int("axis", 1), matrix.T
        if arguments.int("axis_w", 1) != 1:
            return
        bias = draft.constant(definition.input[2])
    else:
        bias = np.zeros(len(weights), matrix.dtype)
        if definition.type == "BatchMatMul":
            kind = types.get(definition.input[0])
            axis = LAST if kind is None else kind.rank - 1
        elif len(definition.input) == 3 or arguments.int("axis_a", 1) != 1 or arguments.int("axis_b", 1) != 1:
            return
    if bias is None or axis == 0:
        return
    name = definition.input[1]
    if weights is not matrix:
        name = _same_parameter(draft, weights) or draft.add_parameter(f"{name}/transposed", weights)
    inputs = [definition.input[0], name, draft.add_parameter(f"{definition.output[0]}/bias", bias)]
    draft.changed(f"{draft.label(number)} becomes an FC")
    given = {} if axis == 1 else {"axis": axis}
    if any(draft[reader].type not in _LAYERS and reader != number for reader in draft.readers(name)):
        given["plain_weights"] = 1
    draft.replace(number, new_node("FC", inputs, definition.output, name=definition.name, arg=given))


def _same_parameter(draft: Draft, weights: Array) -> str | None:
    """A parameter that others read and that has the values of `weights`: an embedding, for a model's last layer."""
    if weights.nbytes < _SHARED_BYTES:
        return None
    few = slice(None, None, max(1, len(weights) // 8))
    for name, array in draft.parameters.items():
        if (array.shape, array.dtype) != (weights.shape, weights.dtype) or draft.constant(name) is None:
            continue
        if draft.readers(name) and np.array_equal(array[few], weights[few]) and np.array_equal(array, weights):
            return name
    return None


def _gemm_bias(draft: Draft, number: int, units: int, dtype: np.dtype[np.generic]) -> Array | None:
    """beta * C as one number for each column; None when C is not constant or differs from row to row."""
    definition, arguments = draft[number], draft.arguments(number)
    beta = arguments.float("beta", 1.0)
    if len(definition.input) < 3 or beta == 0:
        return np.zeros(units, dtype)
    addend = draft.constant(definition.input[2])
    if addend is None or addend.ndim > 2 or (addend.ndim == 2 and addend.shape[0] != 1):
        return None
    row = addend.reshape(-1)
    return None if row.size not in (1, units) else _scaled(np.broadcast_to(row, (units,)), beta)


def _scaled(array: Array, factor: float) -> Array:
    return array if factor == 1 else array * array.dtype.type(factor)


PASS = Pass(
    "inner-products", "Products with constant matrices become fully connected layers.", edit, needs=(_is_product,)
)
