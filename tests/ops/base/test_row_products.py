"""Products of rows: each row has the bytes that it has alone, in any batch and at any place, by any BLAS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dagexec.core.operator import Operator
from dagexec.ops.base import row_products
from dagexec.ops.base.row_products import Blocks, blocks_of, multiply_rows, row_product
from tests.ops.running import Array, run_operator

MOST = 64
BATCHES = (2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 31, 33, MOST)
SIZES = ((1, 1), (1, 5), (5, 1), (2, 3), (5, 7), (64, 64), (100, 17), (300, 10), (300, 100), (64, 257), (512, 272))
"""Inner size and units."""

LARGE = ((1024, 1000), (9000, 40))


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def weights(inner: int, units: int, dtype: Any, transposed: bool) -> Array:
    return normal(units, inner, dtype=dtype).T if transposed else normal(inner, units, dtype=dtype)


def by_step(x: Array, w: Array) -> Array:
    """The product as operators prepare it."""
    owner = SimpleNamespace(is_batch_invariant=True, scratch=np.empty)
    y = np.empty((len(x), w.shape[1]), x.dtype)
    row_product(cast(Operator, owner), x, w, y)()
    return y


def others(sizes: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The products in which a row has other bytes than alone."""
    ways = (by_step, multiply_rows)
    for (inner, units), dtype, transposed in product(sizes, (np.float32, np.float64), (False, True)):
        x, w = normal(MOST, inner, dtype=dtype), weights(inner, units, dtype, transposed)
        alone = np.concatenate([by_step(x[row : row + 1], w) for row in range(MOST)])
        for batch, multiply in product(BATCHES, ways):
            ends = MOST - batch
            if (
                not multiply(x[ends:], w).tobytes()
                == multiply(x[ends:][::-1], w)[::-1].tobytes()
                == alone[ends:].tobytes()
            ):
                yield f"{inner} x {units} {np.dtype(dtype)} {transposed=} {batch=} {multiply.__name__}"


def test_a_row_has_the_bytes_that_it_has_alone() -> None:
    assert not list(others(SIZES[::4]))  # all of them: below


@pytest.mark.slow
@pytest.mark.parametrize(("core", "threads"), [("", 1), ("", 2), ("Haswell", 1), ("Nehalem", 1)])
def test_a_row_has_the_bytes_that_it_has_alone_by_other_kernels(core: str, threads: int) -> None:
    """In a process of its own, whose OpenBLAS takes this machine for another, with loops of NumPy that fit that."""
    program = (
        "from tests.ops.base.test_row_products import *; from dagexec.platform.processor import blas_core\n"
        "print(blas_core(), *others(SIZES + LARGE), sep='\\n')"
    )
    narrow = {"OPENBLAS_CORETYPE": core, "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX"} if core else {}
    environment = os.environ | narrow | {"OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, *different = done.stdout.splitlines()
    assert not different
    assert core not in ("Haswell", "Nehalem") or found in (core, "")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_the_product_is_that_of_float64(rows: int, transposed: bool) -> None:
    x, w = normal(rows, 300), weights(300, 290, np.float32, transposed)
    expected = x.astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_allclose(by_step(x, w), expected, rtol=1e-5, atol=1e-4)


def test_nothing_of_it_is_done_where_it_is_not_asked_for() -> None:
    x, w = normal(7, 512), normal(512, 272)
    assert run_operator("MatMul", [x, w], batch_invariant=0)[0].tobytes() == (x @ w).tobytes()


def test_a_transposed_operand_has_the_same_rows() -> None:
    x, w = normal(9, 300), normal(300, 100)
    (turned,) = run_operator("MatMul", [x.T.copy(), w], trans_a=1)
    assert turned.tobytes() == by_step(x, w).tobytes()


@pytest.mark.parametrize("shape", [(0, 5, 7), (4, 0, 7), (4, 5, 0)])
def test_products_without_elements(shape: tuple[int, int, int]) -> None:
    rows, inner, units = shape
    x, w = np.ones((rows, inner), np.float32), np.ones((inner, units), np.float32)
    for found in (by_step(x, w), multiply_rows(x, w)):
        np.testing.assert_array_equal(found, np.zeros((rows, units), np.float32))


def test_products_have_fewer_rows_where_rows_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_products, "_alike", lambda rows, *_: rows <= 2)
    row_products._blocks.cache_clear()
    try:
        x, w = normal(5, 33), normal(33, 48)
        assert blocks_of(w) == Blocks(2, 48)
        np.testing.assert_allclose(by_step(x, w), x.astype(np.float64) @ w.astype(np.float64), rtol=1e-5, atol=1e-5)
    finally:
        row_products._blocks.cache_clear()


def test_columns_are_cut_into_blocks_of_about_one_width() -> None:
    widths = {columns: row_products._even_width(columns, 100) for columns in (1, 100, 101, 192, 193, 1000)}
    assert widths == {1: 1, 100: 100, 101: 64, 192: 96, 193: 80, 1000: 96}


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("bi,ij->bj", (300, 100)), ("bti,ij->btj", (4, 300, 100)), ("bhi,bij->bhj", (3, 64, 300, 64))],
)
def test_a_row_of_an_einsum_has_the_bytes_that_it_has_alone(equation: str, shape: tuple[int, ...]) -> None:
    *of_row, inner, units = shape
    if equation.count("b") == 3:  # both operands have rows
        heads, inner, _, units = shape
        x, w = normal(5, heads, inner), normal(5, inner, units)
        alone = [run_operator("Einsum", [x[row : row + 1], w[row : row + 1]], equation=equation)[0] for row in range(5)]
    else:
        x, w = normal(5, *of_row, inner), normal(inner, units)
        alone = [run_operator("Einsum", [x[row : row + 1], w], equation=equation)[0] for row in range(5)]
    (found,) = run_operator("Einsum", [x, w], equation=equation)
    assert found.tobytes() == np.concatenate(alone).tobytes()
