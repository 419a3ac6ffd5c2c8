"""Products of matrices in pieces: some rows of the result each, or some columns where it has more of these.

Each piece is a matmul of oneDNN's, with one thread. How many there are follows from the three sizes. Without oneDNN a
product is one of kernels of our own, which has pieces itself.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Step, parts_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import DST, SRC, WEIGHTS, Array
from dagexec.ops.engines.onednn.matrix_product import matrix_step
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.kernels.sharing import pieces_of_products
from dagexec.ops.kernels.tables import shares

_MOST = 8
"""Pieces of a product."""

_GRAIN = 16
"""Rows or columns that stay together: a vector's, so that no piece ends within one."""


def product_pieces(op: OneDNNOperator, a: Array, b: Array, target: Array) -> list[list[Step]]:
    """The pieces of target = A B, of matrices that may be transposed views; BLAS where oneDNN has none."""
    if 0 in (a.size, b.size):
        return [[partial(np.matmul, a, b, out=target)]]
    own = None if op.onednn.has_primitives else matrix_step(op, a, b, target, has_examples=True)
    if own is not None:
        return [[*parts_of(own)]]
    rows, columns = target.shape
    is_tall = rows >= columns
    groups = -(-max(rows, columns) // _GRAIN)
    count = min(groups, pieces_of_products(a.size * columns, op.onednn.machine.lanes, _MOST))
    found: list[list[Step]] = []
    for share in shares(groups, count):
        part = slice(share.start * _GRAIN, share.stop * _GRAIN)
        arrays = (a[part], b, target[part]) if is_tall else (a, b[:, part], target[:, part])
        found.append([_product(op, *arrays)])
    return found


def _product(op: OneDNNOperator, a: Array, b: Array, target: Array) -> Step:
    try:
        source, weights, result = (op.packed(array) for array in (a, b, target))
        handles = (source.handle, weights.handle, op.onednn.ffi.NULL, result.handle)
        found = op.describe_fast("matmul", op.onednn.engine, *handles, op.attributes().handle)
    except UnsupportedFeatureError:
        return partial(np.matmul, a, b, out=target)
    return op.bound(found, {SRC: (source, a), WEIGHTS: (weights, b), DST: (result, target)}).step
