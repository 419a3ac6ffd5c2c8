"""Im2Col against a gather window by window, Col2Im against a scatter, each as the gradient of the other; refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import NUMBER_TYPES
from dagexec.errors import ArgumentError, DagexecError, ResourceError, ShapeError
from dagexec.ops.families.conv import unrolled
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.gradients import numerical_gradients
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Array, Geometry, geometries, taps_inside, to_channels_last

Named = dict[str, ArgumentValue]
NUMBERS = [meta.name for meta in NUMBER_TYPES]


@dataclass(frozen=True)
class Case:
    """An image and a window over it; the arrays are made from `seed`."""

    geometry: Geometry
    batch: int = 2
    channels: int = 3
    order: str = "NCHW"
    dtype: str = "float32"
    seed: int = 0

    @property
    def out(self) -> tuple[int, ...]:
        return tuple(len(axis.taps) for axis in self.geometry.windows())

    def image(self) -> Array:
        """N, C, spatial."""
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, 9, (self.batch, self.channels, *self.geometry.size)).astype(self.dtype)

    def columns(self) -> Array:
        """N, C, kernel, out; small enough for all sums to be exact."""
        rng = np.random.default_rng(self.seed + 1)
        shape = (self.batch, self.channels, *self.geometry.kernel, *self.out)
        return rng.integers(0, 3, shape).astype(self.dtype)

    def laid_out_image(self, image: Array) -> Array:
        return to_channels_last(image) if self.order == "NHWC" else image

    def laid_out_columns(self, columns: Array) -> Array:
        """N, C, kernel, out as Im2Col gives it."""
        rank, depth = self.geometry.rank, self.channels * math.prod(self.geometry.kernel)
        if self.order == "NCHW":
            return columns.reshape(self.batch, depth, *self.out)
        last = np.moveaxis(columns, range(2 + rank, 2 + 2 * rank), range(1, 1 + rank))
        last = np.ascontiguousarray(np.moveaxis(last, 1 + rank, -1))
        return last.reshape(self.batch, *self.out, depth)

    def arguments(self) -> Named:
        return {**self.geometry.arguments(), "order": self.order}


def check_im2col(case: Case) -> None:
    """Im2Col gives the pixel of every tap, and zero outside."""
    x = case.image()
    expected = np.zeros_like(case.columns())
    for place, tap, pixel in taps_inside(case.geometry):
        expected[(..., *tap, *place)] = x[(..., *pixel)]
    (y,) = run_operator("Im2Col", [case.laid_out_image(x)], **case.arguments())
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(
        y, case.laid_out_columns(expected), strict=True, err_msg=f"reproduce with: check_im2col({case})"
    )


def check_col2im(case: Case) -> None:
    """Col2Im adds every column to its pixel; sums are exact, but may have to be rounded to a 16-bit float."""
    columns = case.columns()
    total = np.zeros((case.batch, case.channels, *case.geometry.size))
    for place, tap, pixel in taps_inside(case.geometry):
        total[(..., *pixel)] += columns[(..., *tap, *place)].astype(np.float64)
    expected = total.astype(np.int64).astype(case.dtype) if columns.dtype.kind in "iu" else total.astype(case.dtype)
    image = case.laid_out_image(np.full_like(case.image(), np.nan if columns.dtype.kind in "fV" else 7))
    (y,) = run_operator("Col2Im", [case.laid_out_columns(columns), image], **case.arguments())
    assert y.dtype == columns.dtype
    np.testing.assert_array_equal(
        y, case.laid_out_image(expected), strict=True, err_msg=f"reproduce with: check_col2im({case})"
    )


CASES = st.builds(
    Case,
    geometries(),
    batch=st.sampled_from([0, 1, 2, 3]),
    channels=st.integers(0, 4),
    order=st.sampled_from(["NCHW", "NHWC"]),
    dtype=st.sampled_from(["float32", "float32", "float64", "float16", "bfloat16", "int32"]),
    seed=st.integers(0, 99),
)


@pytest.mark.slow
@given(CASES)
@drawn(200)
def test_im2col_gathers_every_geometry(case: Case) -> None:
    check_im2col(case)


@pytest.mark.slow
@given(CASES)
@drawn(200)
def test_col2im_scatters_every_geometry(case: Case) -> None:
    check_col2im(case)


SQUARE = Geometry((9, 8), (3, 2), (2, 1), (1, 2), (1, 0, 0, 2))
EVERY_RANK = {
    "line": Geometry((9,), (3,), (2,), (1,), (1, 0)),
    "square": SQUARE,
    "cube": Geometry((5, 4, 6), (2, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1, 1, 0, 1)),
    "padding only": Geometry((0, 3), (3, 3), (1, 1), (1, 1), (2, 0, 2, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("geometry", EVERY_RANK.values(), ids=EVERY_RANK)
def test_every_number_type_and_rank_is_served(geometry: Geometry, order: str, dtype: str) -> None:
    case = Case(geometry, order=order, dtype=dtype)
    check_im2col(case)
    check_col2im(case)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1, 7, 50, 200])
def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, block: int, dtype: str, order: str) -> None:
    cut = unrolled.block_indices
    monkeypatch.setattr(unrolled, "block_indices", lambda shape: cut(shape, block))
    for geometry in EVERY_RANK.values():
        check_im2col(Case(geometry, order=order, dtype=dtype))
        check_col2im(Case(geometry, order=order, dtype=dtype))


def test_an_image_of_several_blocks_is_right() -> None:
    assert unrolled.BLOCK < 300 * 301
    case = Case(Geometry((300, 301), (2, 2), (1, 1), (1, 1), (1, 1, 1, 1)), 1, 1, dtype="float16")
    x = case.image()
    (y,) = run_operator("Im2Col", [x], **case.arguments())
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    shifted = [padded[:, 0, i : i + 301, j : j + 302] for i in (0, 1) for j in (0, 1)]
    np.testing.assert_array_equal(y, np.stack(shifted, 1))
    (back,) = run_operator("Col2Im", [y, x], **case.arguments())
    np.testing.assert_array_equal(back, 4 * x)


def test_all_spellings_of_a_window_mean_the_same() -> None:
    (x,) = [Case(SQUARE).image()]
    pairs: Named = {"kernel_h": 3, "kernel_w": 2, "stride_h": 2, "stride_w": 1, "dilation_h": 1, "dilation_w": 2}
    (sides,) = run_operator("Im2Col", [x], **pairs, pad_t=1, pad_l=0, pad_b=0, pad_r=2)
    (plural,) = run_operator("Im2Col", [x], **SQUARE.arguments())
    np.testing.assert_array_equal(sides, plural)
    (scalar,) = run_operator("Im2Col", [x], kernel=2, pad=1, stride=3, dilation=2)
    (lists,) = run_operator("Im2Col", [x], kernels=[2, 2], pads=[1] * 4, strides=[3, 3], dilations=[2, 2])
    np.testing.assert_array_equal(scalar, lists)


def test_bfloat16_columns_are_summed_in_float32() -> None:
    """Ones added one by one in bfloat16 would stop at 256."""
    columns = np.ones((1, 300, 300), ml_dtypes.bfloat16)
    (y,) = run_operator("Col2Im", [columns, np.zeros((1, 1, 599), np.float32)], kernel=300)
    assert y[0, 0, 299] == ml_dtypes.bfloat16(300)


# Gradients.

SMALL = {
    "line": Geometry((5,), (3,), (1,), (1,), (1, 2)),
    "square": Geometry((4, 5), (3, 2), (2, 1), (1, 2), (1, 0, 0, 1)),
    "same": Geometry((5, 4), (2, 3), (2, 2), (1, 1), (0,) * 4, 2),
    "cut": Geometry((6, 5), (1, 2), (3, 3), (1, 1), (0,) * 4, 2),
    "caffe": Geometry((5, 6), (2, 3), (2, 2), (1, 1), (1, 1, 1, 1), 3),
    "cube": Geometry((3, 2, 3), (2, 1, 2), (1, 1, 2), (1, 1, 1), (0, 1, 1, 0, 0, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("geometry", SMALL.values(), ids=SMALL)
def test_each_is_the_gradient_of_the_other(geometry: Geometry, order: str) -> None:
    case = Case(geometry, 2, 2, order, "float64")
    image, columns = case.laid_out_image(case.image()), case.laid_out_columns(case.columns())
    forward = operator_def("Im2Col", ["X"], ["Y"], **case.arguments())
    (expected,) = numerical_gradients(forward, [image], [columns], [0])
    (found,) = run_operator("Col2Im", [columns, image], **case.arguments())
    np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{case}")
    back = operator_def("Col2Im", ["X", "image"], ["Y"], **case.arguments())
    expected, nothing = numerical_gradients(back, [columns, image], [image], [0, 1])
    (found,) = run_operator("Im2Col", [image], **case.arguments())
    np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{case}")
    assert not nothing.any()


# Runs after the first.

LARGE = Case(Geometry((96, 80), (3, 2), (1, 2), (2, 1), (1, 1, 1, 1)), 2, 8)
LIMIT = 100_000  # bytes: below an image; NumPy's own iterators may use up to 8192 elements an operand


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op_type", ["Im2Col", "Col2Im"])
def test_a_second_run_allocates_no_tensor_and_reads_its_input_anew(op_type: str, dtype: str, order: str) -> None:
    case = replace(LARGE, order=order, dtype=dtype)
    image, columns = case.laid_out_image(case.image()), case.laid_out_columns(case.columns())
    inputs = [image] if op_type == "Im2Col" else [columns, image]
    workspace, names = Workspace(), ["x0", "x1"][: len(inputs)]
    for name, array in zip(names, inputs, strict=True):
        workspace.feed_blob(name, np.full_like(array, np.nan))
    with SimpleNet(NetDef(name="n", op=[operator_def(op_type, names, ["y"], **case.arguments())]), workspace) as net:
        net.run()
        assert np.isnan(workspace.fetch_blob("y")).any()
        workspace.feed_blob("x0", inputs[0])
        peak = peak_memory(net.run)
        assert not np.isnan(workspace.fetch_blob("y")).any()
    assert peak < LIMIT, f"{peak} bytes"


# What is refused.

IMAGE = (2, 4, 6, 5)
HUGE = (1 << 31) - 1
Shapes = tuple[tuple[int, ...], ...]
REFUSED: dict[str, tuple[str, Shapes, Named, type[DagexecError], str]] = {
    "kernel": ("Im2Col", (IMAGE,), {"kernel": 7}, ArgumentError, r"axis 0: kernel 7 .*6 \+ 0 \+ 0"),
    "no kernel": ("Im2Col", (IMAGE,), {}, ArgumentError, "'kernel' .*is required"),
    "zero stride": ("Im2Col", (IMAGE,), {"kernel": 2, "stride": 0}, ArgumentError, r"at least 1.*\[0, 0\]"),
    "global": ("Im2Col", (IMAGE,), {"global_pooling": 1}, ArgumentError, "global_pooling"),
    "ceil": ("Im2Col", (IMAGE,), {"kernel": 2, "ceil_mode": 1}, ArgumentError, "ceil_mode"),
    "order": ("Im2Col", (IMAGE,), {"kernel": 2, "order": "CHWN"}, ArgumentError, "'CHWN'"),
    "rank": ("Im2Col", ((4, 6),), {"kernel": 2}, ShapeError, "'x0' must have 3 or 4 or 5 axes, found 2"),
    "overflow": ("Im2Col", (IMAGE,), {"kernel": 3, "pad": HUGE}, ResourceError, "4294967298.*overflows"),
    "memory": ("Im2Col", (IMAGE,), {"kernel": 3, "pad": 1 << 20}, ResourceError, "needs [0-9,]+ bytes; this machine"),
    "image rank": ("Col2Im", ((2, 16, 5, 4), (2, 4)), {"kernel": 2}, ShapeError, "'x1' must have 3 or 4 or 5 axes"),
    "image size": ("Col2Im", ((2, 16, 5, 4), (2, 4, 1, 5)), {"kernel": 2}, ArgumentError, "axis 0: kernel 2.*has 1"),
    "columns": (
        "Col2Im",
        ((2, 16, 5, 5), IMAGE),
        {"kernel": 2},
        ShapeError,
        r"\(2, 16, 5, 4\) \(N, C \* kernel, out for an image of shape \(2, 4, 6, 5\).*found \(2, 16, 5, 5\)",
    ),
    "columns of NHWC": (
        "Col2Im",
        ((2, 16, 5, 4), IMAGE),
        {"kernel": 2, "order": "NHWC"},
        ShapeError,
        r"\(2, 3, 5, 20\) \(N, out, kernel \* C for .*found \(2, 16, 5, 4\)",
    ),
}


@pytest.mark.parametrize(("op_type", "shapes", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    op_type: str, shapes: Shapes, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, [np.zeros(shape, np.float32) for shape in shapes], **arguments)


def test_booleans_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found bool"):
        run_operator("Im2Col", [np.zeros(IMAGE, np.bool_)], kernel=2)
