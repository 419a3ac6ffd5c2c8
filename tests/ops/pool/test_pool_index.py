"""MaxPoolWithIndex: where the maximum of each window is, against a walk over its taps and against onnxruntime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from dagexec.core.dtypes import FLOAT32, INT32, INT64
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.families.pool import window as blocks_module
from tests.ops.drawing import drawn
from tests.ops.pooling import FLOATS, PoolCase, first_maxima, onnx_pools, pool_cases
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Geometry, pool, run_onnx_outputs

OP = "MaxPoolWithIndex"
SMALL = Geometry((11, 9), (3, 2), (2, 1), (1, 1), (1, 0, 1, 1))


def check(case: PoolCase) -> None:
    """Compare Y and mask with the loops and, where it has the same pooling, with onnxruntime."""
    reproduction = f"reproduce with: check({case})"
    x = case.integers()
    y, mask = case.run(OP, x, outputs=2)
    expected = pool(x, case.geometry, "MaxPool")
    if np.dtype(case.dtype).kind in "iu":
        expected[np.isneginf(expected)] = np.iinfo(case.dtype).min
    assert mask.dtype == (np.int64 if case.flat_indices else np.int32), reproduction
    assert mask.shape == y.shape == expected.shape, reproduction
    np.testing.assert_array_equal(y, expected.astype(case.dtype), err_msg=reproduction)
    np.testing.assert_array_equal(mask, first_maxima(x, case), err_msg=reproduction)
    if case.flat_indices and case.dtype == "float32" and case.batch and onnx_pools(case.geometry) and (mask >= 0).all():
        attributes = case.geometry.onnx_attributes() | {"ceil_mode": int(case.geometry.ceil_mode)}
        found = run_onnx_outputs("MaxPool", [x], attributes | {"storage_order": case.storage_order}, 2)
        np.testing.assert_array_equal(y, found[0], err_msg=f"onnxruntime differs; {reproduction}")
        np.testing.assert_array_equal(mask, found[1], err_msg=f"onnxruntime differs; {reproduction}")


@pytest.mark.slow
@given(pool_cases(OP, [*FLOATS, "int8", "uint8", "int64"]))
@drawn(200)
def test_the_mask_is_the_first_maximum_of_each_window(case: PoolCase) -> None:
    check(case)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_the_default_counts_the_pixels_of_a_plane_whatever_the_order(order: str) -> None:
    x = np.zeros((2, 2, 2, 3), np.float32)
    x[0, 0, 0, 1] = x[0, 1, 1, 2] = x[1, 0, 1, 0] = x[1, 1, 0, 2] = 1
    case = PoolCase(OP, Geometry((2, 3), (2, 3), (1, 1), (1, 1), (0,) * 4), order=order)
    _, mask = case.run(OP, x, outputs=2)
    assert mask.reshape(-1).tolist() == [1, 5, 3, 2]


@pytest.mark.parametrize("size", [(6,), (4, 5), (3, 2, 4)])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_global_pooling_finds_the_first_maximum_of_the_image(size: tuple[int, ...], order: str, dtype: str) -> None:
    rank = len(size)
    geometry = Geometry(size, size, (1,) * rank, (1,) * rank, (0,) * 2 * rank)
    for flat, storage in ((False, 0), (True, 0), (True, 1)):
        check(PoolCase(OP, geometry, 2, 3, order, dtype, whole=True, flat_indices=flat, storage_order=storage))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_nan_wins_and_the_index_is_that_of_the_first(dtype: Any, order: str, whole: bool) -> None:
    geometry = Geometry((7, 6), (7, 6) if whole else (3, 3), (1, 1) if whole else (2, 1), (1, 1), (0,) * 4)
    case = PoolCase(OP, geometry, 2, 2, order, np.dtype(dtype).name, whole=whole)
    x = case.integers()
    x[0, 0, 2, 3] = x[0, 0, 3, 2] = x[0, 0, 6, 5] = x[1, 1, 4, 4] = np.nan
    y, mask = case.run(OP, x, outputs=2)
    np.testing.assert_array_equal(np.isnan(y.astype(np.float32)), np.isnan(pool(x, geometry, "MaxPool")))
    np.testing.assert_array_equal(mask, first_maxima(x, case))
    assert np.isnan(y.astype(np.float32)).any()


@pytest.mark.parametrize(("dtype", "least"), [(np.float32, -np.inf), (np.int8, -128), (np.float32, 0.0)])
def test_padding_is_never_the_maximum_even_where_it_is_as_large(dtype: Any, least: float) -> None:
    x = np.full((1, 1, 3, 3), least, dtype)
    _, mask = run_operator(OP, [x], 2, kernel=2, pad=1)
    assert mask.tolist() == [[[[0, 0, 1, 2], [0, 0, 1, 2], [3, 3, 4, 5], [6, 6, 7, 8]]]]


@pytest.mark.parametrize("flat", [0, 1])
def test_a_window_of_nothing_but_padding_has_index_minus_one(flat: int) -> None:
    x = np.ones((1, 2, 1), np.float32)
    y, mask = run_operator(OP, [x], 2, kernel=2, dilation=2, pads=[1, 1], flat_indices=flat)
    assert y.tolist() == [[[-np.inf], [-np.inf]]]
    assert mask.tolist() == [[[-1], [-1]]]


@pytest.mark.slow
def test_windows_of_more_than_255_taps_are_counted_right() -> None:
    check(PoolCase(OP, Geometry((20, 18), (17, 16), (1, 1), (1, 1), (3, 2, 1, 0)), 1, 1))
    falling = np.arange(400, 0, -1, dtype=np.float32).reshape(1, 1, 20, 20)
    _, mask = run_operator(OP, [falling], 2, kernel=18)
    assert mask.tolist() == [[[[0, 1, 2], [20, 21, 22], [40, 41, 42]]]]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_images_in_blocks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    case = PoolCase(OP, SMALL, 3, 5, order)
    monkeypatch.setattr(blocks_module, "BLOCK", 700)
    check(case)
    check(PoolCase(OP, Geometry((5, 4), (5, 4), (1, 1), (1, 1), (0,) * 4), 7, 3, order, whole=True))


REFUSED = {
    "order without flat": ({"kernel": 2, "storage_order": 1}, ArgumentError, "'storage_order'.*flat_indices.*found 1"),
    "order": ({"kernel": 2, "storage_order": 2, "flat_indices": 1}, ArgumentError, "'storage_order'.*found 2"),
    "larger kernel": ({"kernel": 7}, ArgumentError, r"axis 0: kernel 7 .* 6 \+ 0 \+ 0"),
    "no pixels": ({"kernel": 1}, ShapeError, r"nothing to pool.*\[2, 4, 0, 5\]"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(arguments: Any, error: Any, message: str) -> None:
    shape = (2, 4, 0, 5) if error is ShapeError else (2, 4, 6, 5)
    with pytest.raises(error, match=f"(?s){OP} 'y0'.*({message})"):
        run_operator(OP, [np.zeros(shape, np.float32)], 2, **arguments)


def test_types_without_an_order_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"MaxPoolWithIndex 'y0'.*found bool"):
        run_operator(OP, [np.zeros((1, 1, 3, 3), np.bool_)], 2, kernel=2)


def inferred(shape: tuple[int, ...], **arguments: int) -> tuple[list[TensorType], Cost]:
    """The types of the outputs for an input that nobody allocates, and the cost."""
    definition = operator_def(OP, ["x"], ["y", "mask"], **arguments)
    call = OperatorCall(definition, arguments_of(definition, OP), (TensorType(shape, FLOAT32),), (None,), OP)
    schema = schema_of(OP)
    assert schema.infer is not None
    found = list(schema.infer(call))
    return found, schema.cost(call, found)


def test_more_pixels_than_an_int32_can_count_are_refused() -> None:
    with pytest.raises(ShapeError, match=f"int32 index cannot count {50_000**2} pixels; flat_indices=1 gives int64"):
        inferred((1, 1, 50_000, 50_000), kernel=2, stride=2)
    types, _ = inferred((1, 1, 50_000, 50_000), kernel=2, stride=2, flat_indices=1)
    assert types == [TensorType((1, 1, 25_000, 25_000), FLOAT32), TensorType((1, 1, 25_000, 25_000), INT64)]


def test_cost_counts_the_taps() -> None:
    types, cost = inferred((2, 4, 6, 5), kernel_h=3, kernel_w=2, stride_h=1, stride_w=3)
    assert types[1] == TensorType((2, 4, 4, 2), INT32)
    assert cost == Cost(64 * 6 * 2, 4 * 240, (4 + 4) * 64)
