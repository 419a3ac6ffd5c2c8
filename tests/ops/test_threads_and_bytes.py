"""The same bytes in one piece and in several: products of operands that are fed, convolutions, gradients, LSTM.

How many pieces an operator has follows from its sizes, never from threads, so a sum over the batch (`dw` of a product)
may have other bytes in another number of pieces: what each row of the batch has of its own may not.
Where constant weights are concerned, `test_onednn_measured_product` and `test_onednn_choice` have more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.ops.engines.onednn.binding import engine_library
from tests.ops.running import computed

pytestmark = pytest.mark.skipif(engine_library() is None, reason="NumPy computes all")
Array = npt.NDArray[Any]
Case = tuple[str, dict[str, Array], list[str], dict[str, Any]]


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32).astype(dtype)


def products(rows: int, inner: int, units: int, dtype: Any = np.float32) -> Iterator[Case]:
    """Every operator that multiplies matrices."""
    a, b = normal(rows, inner, dtype=dtype), normal(inner, units, dtype=dtype)
    bias, dy = normal(units, dtype=dtype), normal(rows, units, dtype=dtype)
    turned_a, turned_b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    yield "MatMul", {"a": a, "b": b}, ["y"], {}
    yield "MatMul", {"a": turned_a, "b": b}, ["y"], {"trans_a": 1}
    yield "MatMul", {"a": a, "b": turned_b}, ["y"], {"trans_b": 1}
    yield "Gemm", {"a": a, "b": b, "c": bias}, ["y"], {"alpha": 0.5}
    yield "FC", {"a": a, "b": turned_b, "c": bias}, ["y"], {}
    yield "FCTransposed", {"a": a, "b": b, "c": bias}, ["y"], {}
    yield "FusedFC", {"a": a, "b": turned_b, "c": bias}, ["y"], {"post_ops": ["relu"]}
    yield "FCGradient", {"a": a, "b": turned_b, "dy": dy}, ["dw", "db", "dx"], {}
    yield "BatchMatMul", {"a": a[None], "b": b[None]}, ["y"], {}
    yield "BatchMatMul", {"a": np.stack([a, a]), "b": np.stack([turned_b, turned_b])}, ["y"], {"trans_b": 1}


def assert_same_bytes(cases: Iterator[Case], frozen: str = "") -> None:
    for op_type, arrays, results, given_arguments in cases:
        alone = computed(op_type, arrays, results, frozen, pieces=1, **given_arguments)
        shared = computed(op_type, arrays, results, frozen, pieces=2, **given_arguments)
        shapes = [array.shape for array in arrays.values()]
        for name, one, other in zip(results, alone, shared, strict=True):
            if (op_type, name) != ("FCGradient", "dw"):
                assert one.tobytes() == other.tobytes(), (op_type, name, shapes, given_arguments)


GEOMETRIES = [(1, 300, 100), (1, 300, 512), (1, 4096, 16), (2, 4096, 16), (7, 1024, 16), (7, 64, 512), (33, 1024, 512),
              (64, 4096, 5), (1, 9216, 5), (17, 300, 64), (130, 3, 64), (1, 1, 1)]  # fmt: skip
"""Rows, inner size, units: most gave other bytes on two threads in some operator, under some instruction set."""


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_products_of_fed_operands(geometry: tuple[int, int, int]) -> None:
    assert_same_bytes(products(*geometry))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 70), st.sampled_from([1, 7, 64, 300, 1000, 3000]), st.integers(1, 200))
def test_products_of_any_size(rows: int, inner: int, units: int) -> None:
    assert_same_bytes(products(rows, inner, units))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_products_of_sixteen_bits(dtype: Any) -> None:
    for geometry in ((1, 300, 100), (7, 1024, 16), (33, 512, 64)):
        assert_same_bytes(products(*geometry, dtype=dtype))


def convolutions(order: str) -> Iterator[Case]:
    """Convolutions and their gradients."""
    for batch, channels, filters, kernel, groups, size in (
        (1, 64, 64, 1, 1, 7), (2, 3, 16, 5, 1, 20), (1, 16, 16, 3, 1, 14),
        (2, 32, 32, 3, 32, 12), (8, 20, 50, 5, 1, 12),
    ):  # fmt: skip
        x, w = normal(batch, channels, size, size), normal(filters, channels // groups, kernel, kernel)
        dy = normal(batch, filters, size, size)
        if order == "NHWC":
            x, w, dy = (np.moveaxis(array, 1, -1).copy() for array in (x, w, dy))
        window = {"kernel": kernel, "pad": kernel // 2, "group": groups, "order": order}
        yield "Conv", {"x": x, "w": w, "b": normal(filters)}, ["y"], window
        yield "ConvGradient", {"x": x, "w": w, "dy": dy}, ["dw", "db", "dx"], window


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["", "w"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_convolutions_and_their_gradients(order: str, frozen: str) -> None:
    assert_same_bytes(convolutions(order), frozen)


@pytest.mark.slow
def test_recurrent_layers() -> None:
    for steps, batch, features, hidden in ((5, 1, 16, 32), (3, 8, 64, 128), (4, 2, 300, 20)):
        arrays = {"x": normal(steps, batch, features), "w": normal(1, 4 * hidden, features)}
        arrays["r"] = normal(1, 4 * hidden, hidden)
        assert_same_bytes(iter([("LSTM", arrays, ["y"], {"hidden_size": hidden})]))
