"""MaxPool and AveragePool in every geometry, against loops over windows in float64 and against onnxruntime.

The values are small integers, so sums are exact and a mean is rounded once: results are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError, DagexecError, ShapeError
from dagexec.ops.families.pool import window as pool_module
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.pooling import FLOATS, onnx_pools, starts_inside
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import LEGACY, Array, Geometry, geometries, pool, run_onnx, to_channels_first, to_channels_last

Named = dict[str, ArgumentValue]


@dataclass(frozen=True)
class Case:
    """A pooling; its image is made from `seed`."""

    op_type: str
    geometry: Geometry
    batch: int = 1
    channels: int = 2
    count_include_pad: bool = False
    order: str = "NCHW"
    dtype: str = "float32"
    seed: int = 0

    def image(self) -> Array:
        """X as N, C, spatial: integers that every type holds."""
        rng = np.random.default_rng(self.seed)
        low = 0 if self.dtype.startswith("uint") else -100
        return rng.integers(low, 100, (self.batch, self.channels, *self.geometry.size)).astype(self.dtype)

    def fed(self) -> Array:
        return to_channels_last(self.image()) if self.order == "NHWC" else self.image()

    def arguments(self) -> Named:
        count: Named = {"count_include_pad": 1} if self.count_include_pad else {}
        return {**self.geometry.arguments(), **count, "order": self.order}


def run_case(case: Case) -> Array:
    """Y as N, C, spatial."""
    (y,) = run_operator(case.op_type, [case.fed()], **case.arguments())
    assert y.dtype == np.dtype(case.dtype)
    return to_channels_first(y) if case.order == "NHWC" else y


def check(case: Case) -> None:
    """Compare with the loops and, where it has the same pooling, with onnxruntime."""
    reproduction = f"reproduce with: check({case})"
    x = case.image()
    expected = pool(x, case.geometry, case.op_type, case.count_include_pad)
    if np.dtype(case.dtype).itemsize == 2:  # computed in float32 and then rounded
        expected = expected.astype(np.float32)
    if np.dtype(case.dtype).kind in "iu":  # a window of nothing but padding, which dilation can give
        expected[np.isneginf(expected)] = np.iinfo(case.dtype).min
    y = run_case(case)
    assert y.shape == expected.shape, f"{y.shape}, not {expected.shape}; {reproduction}"
    np.testing.assert_array_equal(y, expected.astype(case.dtype), err_msg=reproduction)
    if case.dtype == "float32" and case.batch and onnx_pools(case.geometry) and np.isfinite(expected).all():
        attributes = case.geometry.onnx_attributes() | {"ceil_mode": int(case.geometry.ceil_mode)}
        if case.op_type == "AveragePool":
            attributes["count_include_pad"] = int(case.count_include_pad)
        found = run_onnx(case.op_type, [x], attributes)
        np.testing.assert_allclose(y, found, rtol=1e-6, err_msg=f"onnxruntime differs; {reproduction}")


@st.composite
def cases(draw: st.DrawFn, op_type: str) -> Case:
    types = FLOATS if op_type == "AveragePool" else [*FLOATS, "int8", "uint8", "int32", "int64"]
    return Case(
        op_type,
        draw(geometries(pooling=True).filter(starts_inside)),
        batch=draw(st.sampled_from([0, 1, 1, 3])),
        channels=draw(st.integers(1, 4)),
        count_include_pad=op_type == "AveragePool" and draw(st.booleans()),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype=draw(st.sampled_from(types)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@given(cases("MaxPool"))
@drawn(300)
def test_max_pool_takes_the_largest_pixel_of_each_window(case: Case) -> None:
    check(case)


@pytest.mark.slow
@given(cases("AveragePool"))
@drawn(300)
def test_average_pool_takes_the_mean_of_each_window(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("size", "pad", "out"), [(6, 0, 3), (7, 0, 3), (8, 0, 4), (6, 1, 4), (7, 1, 4), (8, 1, 5)])
def test_caffe_legacy_pooling_has_the_sizes_that_caffe2_gives(op_type: str, size: int, pad: int, out: int) -> None:
    case = Case(op_type, Geometry((size,) * 2, (3, 3), (2, 2), (1, 1), (pad,) * 4, LEGACY))
    assert run_case(case).shape == (1, 2, out, out)
    check(case)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [(7,), (5, 6), (3, 4, 2)])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_global_pooling_covers_the_image(op_type: str, size: tuple[int, ...], dtype: str, order: str) -> None:
    rank = len(size)
    case = Case(op_type, Geometry(size, size, (1,) * rank, (1,) * rank, (0,) * 2 * rank), 2, order=order, dtype=dtype)
    (y,) = run_operator(op_type, [case.fed()], global_pooling=1, order=order)
    y = to_channels_first(y) if order == "NHWC" else y
    expected = pool(case.image(), case.geometry, op_type).astype(np.float32 if dtype.endswith("16") else dtype)
    np.testing.assert_array_equal(y, expected.astype(dtype))


@pytest.mark.parametrize("kernel", [{"kernel": 0}, {"kernels": [0, 0]}, {"kernel": 2}])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_global_pooling_ignores_the_kernel_which_nets_translated_from_caffe_give_as_zero(
    op_type: str, kernel: Named
) -> None:
    image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    (y,) = run_operator(op_type, [image], global_pooling=1, stride=1, pad=0, legacy_pad=3, **kernel)
    assert y.reshape(-1).tolist() == ([11, 23] if op_type == "MaxPool" else [5.5, 17.5])


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_a_window_as_large_as_the_image_may_lie_beside_it(op_type: str) -> None:
    check(Case(op_type, Geometry((3, 4), (3, 4), (5, 5), (1, 1), (1, 2, 0, 0))))


def test_halves_are_summed_in_single_precision() -> None:
    """2048 + 1 is 2048 in float16."""
    x = np.array([[[2048, 1, 1, 1, 0]]], np.float16)
    np.testing.assert_array_equal(run_operator("AveragePool", [x], kernel=4)[0], [[[513, 0.75]]])


def test_a_window_of_one_pixel_copies() -> None:
    case = Case("MaxPool", Geometry((4, 5), (1, 1), (1, 1), (1, 1), (0,) * 4))
    np.testing.assert_array_equal(run_case(case), case.image())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_padding_never_wins_and_nan_does(dtype: Any) -> None:
    x = np.full((1, 1, 4, 4), -np.inf, dtype)
    x[0, 0, 3, 3] = np.nan
    (y,) = run_operator("MaxPool", [x], kernel=3, stride=1, pad=1)
    expected = np.full((1, 1, 4, 4), -np.inf, np.float32)
    expected[0, 0, 2:, 2:] = np.nan
    np.testing.assert_array_equal(y.astype(np.float32), expected)


def test_the_least_integer_is_a_maximum_too() -> None:
    x = np.full((1, 1, 3, 3), -128, np.int8)
    (y,) = run_operator("MaxPool", [x], kernel=2, pad=1)
    np.testing.assert_array_equal(y, np.full((1, 1, 4, 4), -128))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_planes_in_blocks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch, op_type: str, order: str) -> None:
    case = Case(op_type, Geometry((11, 9), (3, 2), (2, 1), (1, 1), (1, 0, 1, 1)), 3, 5, order=order)
    whole = run_case(case)
    monkeypatch.setattr(pool_module, "BLOCK", 250)
    check(case)
    assert run_case(case).tobytes() == whole.tobytes()


# Runs after the first.

# What is refused.

IMAGE = (2, 4, 6, 5)
REFUSED: dict[str, tuple[str, Named, type[DagexecError], str]] = {
    "larger kernel": ("MaxPool", {"kernel": 7}, ArgumentError, r"axis 0: kernel 7 .* 6 \+ 0 \+ 0"),
    "pad as large": ("MaxPool", {"kernel": 2, "pad": 2}, ArgumentError, "less than the kernel 2, found 2 and 2"),
    "legacy pad": ("MaxPool", {"kernel": 2, "pad": 2, "legacy_pad": 3}, ArgumentError, "less than the kernel 2"),
    "tail pad": ("AveragePool", {"kernel": 2, "pads": [0, 0, 0, 3]}, ArgumentError, "kernel 2, found 0 and 3"),
    "zero stride": ("MaxPool", {"kernel": 2, "stride": 0}, ArgumentError, r"strides must be at least 1.*\[0, 0\]"),
    "zero kernel": ("AveragePool", {"kernel": 0}, ArgumentError, r"kernels must be at least 1.*\[0, 0\]"),
    "negative pad": ("MaxPool", {"kernel": 2, "pad": -1}, ArgumentError, "pads must be at least 0"),
    "global with stride": (
        "MaxPool",
        {"global_pooling": 1, "stride": 2},
        ArgumentError,
        "global_pooling cannot be combined",
    ),
    "global with pad": ("MaxPool", {"global_pooling": 1, "pad": 1}, ArgumentError, "global_pooling cannot be combined"),
    "no kernel": ("MaxPool", {}, ArgumentError, "'kernel' .*is required"),
    "order": ("MaxPool", {"kernel": 2, "order": "NWHC"}, ArgumentError, "NCHW, NHWC, NCHW8c or NCHW16c, found 'NWHC'"),
    "behind": ("MaxPool", {"kernel": 1, "stride": 4, "legacy_pad": 3}, ArgumentError, "3 windows, .*stride 4.* 6 pix"),
    "rank": ("MaxPool1D", {"kernel": 2}, ShapeError, "'x0' must have 3 axes, found 4"),
}


@pytest.mark.parametrize(("op_type", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    op_type: str, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, [np.zeros(IMAGE, np.float32)], **arguments)


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"nothing to pool.*\[2, 4, 0, 5\]"):
        run_operator("MaxPool", [np.zeros((2, 4, 0, 5), np.float32)], global_pooling=1)


def test_types_that_have_no_maximum_or_mean_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"AveragePool 'y0'.*must be one of float32.*found int32"):
        run_operator("AveragePool", [np.zeros(IMAGE, np.int32)], kernel=2)
    with pytest.raises(ShapeError, match=r"MaxPool 'y0'.*found bool"):
        run_operator("MaxPool", [np.zeros(IMAGE, np.bool_)], kernel=2)


def test_cost_counts_the_taps() -> None:
    definition = operator_def("MaxPool", ["x"], ["y"], kernels=[3, 2], strides=[1, 3])
    call = OperatorCall(
        definition, arguments_of(definition, "MaxPool"), (TensorType(IMAGE, FLOAT32),), (None,), "MaxPool"
    )
    schema = schema_of("MaxPool")
    assert schema.infer is not None
    assert schema.cost(call, schema.infer(call)) == Cost(64 * 6, 4 * 240, 4 * 64)


POOLINGS: list[tuple[str, Named]] = [
    ("MaxPool", {}),
    ("AveragePool", {}),
    ("LpPool", {"p": 3.0}),
    ("MaxPoolWithIndex", {}),
]


@pytest.mark.parametrize(("name", "arguments"), POOLINGS)
@pytest.mark.parametrize("dilation", [1, 2])
def test_taps_that_never_meet_the_image_cost_nothing(name: str, arguments: Named, dilation: int) -> None:
    """Of a window of 2^18 taps, the image meets the last ones only, as it does of one of 8."""
    x = np.random.default_rng(0).standard_normal((2, 1, 6))
    dy = np.random.default_rng(1).standard_normal((2, 1, 6))
    results: list[list[Array]] = []

    def compute(kernel: int) -> None:
        window: Named = {"kernel": kernel, "pads": [dilation * (kernel - 1), 0], "dilation": dilation, **arguments}
        if name == "MaxPoolWithIndex":
            y, mask = run_operator(name, [x], outputs=2, **window)
            results.append([y, mask, *run_operator(f"{name}Gradient", [x, dy, mask], **window)])
        else:
            (y,) = run_operator(name, [x], **window)
            results.append([y, *run_operator(f"{name}Gradient", [x, y, dy], **window)])

    small, large = (peak_memory(partial(compute, kernel)) for kernel in (8, 1 << 18))
    for few, many in zip(*results, strict=True):
        np.testing.assert_array_equal(few, many)
    assert large - small < 1 << 18
