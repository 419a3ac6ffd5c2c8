"""Products of rows with a matrix in which a row's bytes depend neither on the other rows nor on how many there are.

A BLAS chooses kernels by the sizes of a product: one row goes to GEMV, which sums in another order than GEMM, and GEMM
has other kernels for few rows than for many, and others at the edges of its blocks than within. So Y = X W of any
number of rows is computed here in products of one size: `Blocks.rows` rows of X by `Blocks.columns` columns of W (and
one more size for the last columns). These numbers follow from W alone. What is left of the rows at the end is computed
with rows before it, again, or with rows of zeros if X has too few.

That a product of one size treats its rows alike is no matter of course either: OpenBLAS for Haswell sums the first
columns of a block in another order for 6 of 12 rows. `_alike` tries it on equal rows; where it is not so, there are
fewer rows in a product, down to one.

How large the products are is a question of speed. OpenBLAS for AVX-512 multiplies small matrices where they lie, which
takes no longer for 4 rows than for many; others copy W into an order of their own first, for which 8 rows pay.
`docs/precision.md` has what was measured.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.ops.base.blocks import Array
from dagexec.platform.processor import blas_core
from dagexec.platform.records import dataclass

_WITHOUT_COPIES = ("SkylakeX", "Cooperlake", "SapphireRapids")  # cores whose OpenBLAS has kernels for small matrices
_SMALL = 1_000_000  # multiplications of a product that these take
_SMALL_RESULT = 1_200  # elements of its result, if W lies transposed
_SMALL_ROWS, _ROWS = 4, 8  # of a product, for such cores and others
_LEAST, _LEAST_TRANSPOSED = 64, 16  # columns: with fewer, small products take longer than others
_COLUMNS = 256  # at most: W's part stays in a core's cache while all rows are multiplied with it
_PART = 1 << 20  # elements of such a part
_STEP = 16  # columns, a vector


@dataclass(frozen=True)
class Blocks:
    """The size of the products that compute Y = X W: rows of X and columns of W."""

    rows: int
    columns: int


def row_product(owner: Operator, x: Array, w: Array, y: Array) -> Step:
    """The step that computes y = x w for matrices x, N x K, and w, K x U: each row alike, whatever N is.

    With argument batch_invariant=0 of `owner`, or for types that no BLAS computes, it is one call of `numpy.matmul`.
    """
    if not owner.is_batch_invariant or not is_by_blas(y.dtype) or not (y.size and w.size):
        return partial(np.matmul, x, w, out=y)
    blocks = blocks_of(w)
    count = len(x)
    steps: list[Step] = []
    if count < blocks.rows or not _lies_in_rows(x):
        packed = owner.scratch((max(count, blocks.rows), x.shape[1]), x.dtype)
        packed.fill(0)
        steps.append(partial(np.copyto, packed[:count], x))
        x = packed
    if count < blocks.rows:
        found = owner.scratch((blocks.rows, y.shape[1]), y.dtype)
        return in_sequence([*steps, *_products(x, w, found, blocks), partial(np.copyto, y, found[:count])])
    full = count - count % blocks.rows
    steps += _products(x[:full], w, y[:full], blocks)
    if full < count:
        steps += _products(x[-blocks.rows :], w, y[-blocks.rows :], blocks)
    return in_sequence(steps)


def each_row(owner: Operator, x: Array, w: Array, y: Array) -> Step:
    """The step that computes y = x w for stacks of matrices, in products of one row, unless batch_invariant=0."""
    if owner.is_batch_invariant:
        x, w, y = x[..., None, :], w[..., None, :, :], y[..., None, :]
    return partial(np.matmul, x, w, out=y)


def multiply_rows(x: Array, w: Array) -> Array:
    """x w for matrices x, N x K, and w, K x U, as a new array: each row alike, as `row_product` has it."""
    y = np.empty((len(x), w.shape[1]), np.result_type(x, w))
    if not is_by_blas(y.dtype) or not (y.size and w.size):
        found: Array = np.matmul(x, w, out=y)
        return found
    blocks = blocks_of(w)
    padded = np.zeros((len(x) + -len(x) % blocks.rows, x.shape[1]), y.dtype)
    padded[: len(x)] = x
    found = np.empty((len(padded), w.shape[1]), y.dtype)
    for step in _products(padded, w, found, blocks):
        step()
    return found[: len(x)]


def is_by_blas(dtype: np.dtype[np.generic]) -> bool:
    """True for types whose sums a BLAS computes in an order of its own."""
    return dtype.kind == "f" and dtype.itemsize >= np.dtype(np.float32).itemsize


def blocks_of(w: Array) -> Blocks:
    """The size of products with `w`, K x U: it depends on its sizes, its type and which of its axes is without gaps."""
    inner, columns = w.shape
    return _blocks(inner, columns, w.dtype, w.strides[0] == w.itemsize and inner > 1)


def _lies_in_rows(x: Array) -> bool:
    """True for what a BLAS reads as rows, one behind the other; NumPy multiplies others in other ways."""
    outer, inner = x.strides
    return inner == x.itemsize and outer >= x.shape[1] * inner


def _products(x: Array, w: Array, y: Array, blocks: Blocks) -> list[Step]:
    """The steps of y = x w, with a multiple of `blocks.rows` rows: all rows with a block of columns, then the next.

    The stacks are blocks of columns, blocks of rows; `order` keeps NumPy from taking them the other way round.
    """
    (inner, columns), width = w.shape, blocks.columns
    count = columns // width
    rows = x.reshape(-1, blocks.rows, inner)
    results = y.reshape(-1, blocks.rows, columns)
    within = count * width
    steps: list[Step] = []
    if count:
        parts = w[:, :within].reshape(inner, count, width).transpose(1, 0, 2)
        targets = results[..., :within].reshape(*results.shape[:2], count, width).transpose(2, 0, 1, 3)
        steps.append(partial(np.matmul, rows[None], parts[:, None], out=targets, order="C"))
    if within < columns:
        steps.append(partial(np.matmul, rows, w[:, within:], out=results[..., within:]))
    return steps


@cache
def _blocks(inner: int, columns: int, dtype: np.dtype[np.generic], transposed: bool) -> Blocks:
    """The size of products with a matrix of `inner` x `columns`; `transposed`: its columns are without gaps."""
    most = _SMALL // (_SMALL_ROWS * inner)
    if transposed:
        most = min(most, _SMALL_RESULT // _SMALL_ROWS)
    least = min(columns, _LEAST_TRANSPOSED if transposed else _LEAST)
    small = blas_core() in _WITHOUT_COPIES and most >= least
    rows, most = (_SMALL_ROWS, most) if small else (_ROWS, _PART // inner)
    width = _even_width(columns, min(most, _COLUMNS))
    widths = {width, columns % width or width}
    while rows > 1 and not all(_alike(rows, inner, one, dtype, transposed) for one in widths):
        rows //= 2
    return Blocks(rows, width)


def _even_width(columns: int, most: int) -> int:
    """At most `most` columns, or one vector: the width of all blocks but the last, which are about equal."""
    if columns <= most:
        return columns
    most = max(_STEP, most - most % _STEP)
    parts = -(-columns // most)
    return min(columns, -(-columns // (parts * _STEP)) * _STEP)


def _alike(rows: int, inner: int, columns: int, dtype: np.dtype[np.generic], transposed: bool) -> bool:
    """True when equal rows have equal products, in one product of this size, with random numbers."""
    random = np.random.default_rng(0)
    x = np.broadcast_to(random.random(inner) - 0.5, (rows, inner)).astype(dtype)
    numbers = (random.random((columns, inner) if transposed else (inner, columns + 1)) - 0.5).astype(dtype)
    w = numbers.T if transposed else numbers[:, :columns]
    y = np.empty((rows, columns + 1), dtype)[:, :columns]  # a part of larger matrices
    np.matmul(x, w, out=y)
    return bool((y == y[0]).all())
