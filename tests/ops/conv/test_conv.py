"""Conv in every geometry, against sums over taps in float64 and against onnxruntime; and what it refuses.

The values are small integers, so every sum is exact in float32 and results are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError, DagexecError, ResourceError, ShapeError
from dagexec.ops.families.conv import im2col
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops import problems
from tests.ops.drawing import drawn
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import (
    Array,
    Geometry,
    convolve,
    geometries,
    onnx_has,
    run_onnx,
    to_channels_first,
    to_channels_last,
)

DTYPES = [np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
Named = dict[str, ArgumentValue]


class Case(problems.Case):
    """A convolution that is run as an operator."""

    def fed(self) -> list[Array]:
        """The arrays in the layout of `order`."""
        x, weights, *bias = self.arrays()
        if self.order == "NHWC":
            x, weights = to_channels_last(x), to_channels_last(weights)
        return [x, weights, *bias]

    def arguments(self) -> Named:
        return {**self.geometry.arguments(), "group": self.group, "order": self.order}


def run_case(case: Case) -> Array:
    """Y as N, M, spatial."""
    (y,) = run_operator("Conv", list(case.fed()), **case.arguments())
    assert y.dtype == np.dtype(case.dtype)
    return to_channels_first(y) if case.order == "NHWC" else y


def check(case: Case) -> None:
    """Compare with the loops and, where it has the same convolution, with onnxruntime."""
    reproduction = f"reproduce with: check({case})"
    x, weights, *bias = case.arrays()
    expected = convolve(x, weights, bias[0] if bias else None, case.geometry, case.group).astype(case.dtype)
    y = run_case(case)
    assert y.shape == expected.shape, f"{y.shape}, not {expected.shape}; {reproduction}"
    np.testing.assert_array_equal(y, expected, err_msg=reproduction)
    if case.dtype == "float32" and case.batch and onnx_has(case.geometry):
        found = run_onnx("Conv", case.arrays(), case.geometry.onnx_attributes() | {"group": case.group})
        np.testing.assert_array_equal(y, found, err_msg=f"onnxruntime differs; {reproduction}")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["dense", "grouped", "depthwise", "one by one"]))
    geometry = draw(geometries())
    if kind == "one by one":
        ones = (1,) * geometry.rank
        geometry = Geometry(geometry.size, ones, ones, geometry.dilation, (0,) * 2 * geometry.rank)
    group = 1 if kind == "dense" else draw(st.integers(2, 4)) if kind == "depthwise" else draw(st.integers(1, 3))
    return Case(
        geometry,
        batch=draw(st.sampled_from([0, 1, 1, 3])),
        group=group,
        per_group=1 if kind == "depthwise" else draw(st.integers(1, 3)),
        filters_per_group=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype=np.dtype(draw(st.sampled_from(DTYPES))).name,
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@given(cases())
@drawn(400)
def test_every_geometry_gives_the_sum_over_its_taps(case: Case) -> None:
    check(case)


SQUARE = Geometry((9, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
LINE = Geometry((9,), (3,), (2,), (1,), (1, 0))
DILATED = Geometry((12, 11), (3, 2), (1, 1), (2, 3), (1, 0, 0, 2))
STRIDED = Geometry((12, 11), (4, 3), (3, 2), (1, 3), (2, 0, 0, 4))
CUBE = Geometry((5, 4, 6), (2, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1, 1, 0, 1))
SPARSE = Geometry((12, 17), (2, 2), (3, 4), (2, 3), (1, 0, 0, 2))
GEOMETRIES = {"line": LINE, "square": SQUARE, "dilated": DILATED, "strided": STRIDED, "sparse": SPARSE, "cube": CUBE}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("group", "per_group", "multiplier"), [(1, 3, 4), (2, 3, 2), (4, 1, 1), (4, 1, 3), (1, 1, 2)])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_way_to_compute_serves_every_type_order_and_rank(
    geometry: Geometry, group: int, per_group: int, multiplier: int, order: str, dtype: str
) -> None:
    check(Case(geometry, 2, group, per_group, multiplier, order=order, dtype=dtype))


def test_no_channels_leave_the_bias() -> None:
    x, weights = np.zeros((2, 0, 4, 4), np.float32), np.zeros((3, 0, 3, 3), np.float32)
    (y,) = run_operator("Conv", [x, weights, np.array([1, 2, 3], np.float32)], kernel=3)
    np.testing.assert_array_equal(y, np.broadcast_to(np.array([1, 2, 3])[:, None, None], (2, 3, 2, 2)))
    (y,) = run_operator("Conv", [x, weights], kernel=3)
    np.testing.assert_array_equal(y, np.zeros((2, 3, 2, 2)))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_image_of_padding_only_gives_the_bias(order: str, dtype: str) -> None:
    geometry = Geometry((0, 3), (3, 3), (1, 1), (1, 1), (2, 0, 2, 0))
    check(Case(geometry, 2, order=order, dtype=dtype))


SPELLINGS: list[Named] = [
    {"dilation": 2},
    {"dilation": 2, "stride": 1},
    {"dilations": [2, 2]},
    {"dilation_h": 2, "dilation_w": 2},
]


@pytest.mark.parametrize("arguments", SPELLINGS)
def test_dilation_gives_a_5_by_5_output_however_it_is_spelled(arguments: Named) -> None:
    """Caffe2's own shape inference says 4x4 or 7x7 here; its runs give 5x5."""
    case = Case(Geometry((9, 9), (3, 3), (1, 1), (2, 2), (0, 0, 0, 0)), bias=False)
    x, weights = case.arrays()
    (y,) = run_operator("Conv", [x, weights], kernel=3, **arguments)
    assert y.shape == (1, 3, 5, 5)
    np.testing.assert_array_equal(y, convolve(x, weights, None, case.geometry, 1))


def test_all_spellings_of_a_window_mean_the_same() -> None:
    inputs: list[Any] = list(Case(Geometry((9, 8), (3, 2), (1, 2), (2, 1), (1, 2, 0, 1))).arrays())
    (plural,) = run_operator(
        "Conv", inputs, kernels=[3, 2], strides=[1, 2], dilations=[2, 1], pads=[1, 2, 0, 1], order="nchw"
    )
    pairs: Named = {"kernel_h": 3, "kernel_w": 2, "stride_h": 1, "stride_w": 2, "dilation_h": 2, "dilation_w": 1}
    (sides,) = run_operator("Conv", inputs, **pairs, pad_t=1, pad_l=2, pad_b=0, pad_r=1)
    np.testing.assert_array_equal(plural, sides)
    inputs[1] = inputs[1][..., :1].repeat(3, -1)
    (scalars,) = run_operator("Conv", inputs, kernel=3, stride=2, dilation=2, pad=3)
    (lists,) = run_operator("Conv", inputs, kernels=[3] * 2, strides=[2] * 2, dilations=[2] * 2, pads=[3] * 4)
    np.testing.assert_array_equal(scalars, lists)


# A large image is cut into blocks.


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("limit", [1, 3000, 20_000])
def test_columns_in_blocks_give_what_one_buffer_gives(
    monkeypatch: pytest.MonkeyPatch, order: str, group: int, limit: int
) -> None:
    case = Case(Geometry((23, 11), (3, 2), (2, 1), (1, 2), (1, 0, 2, 1)), 2, group, 3, 2, order=order)
    whole = run_case(case)
    monkeypatch.setattr(im2col, "_FEW_BYTES", limit)
    check(case)
    assert run_case(case).tobytes() == whole.tobytes()


@pytest.mark.slow
def test_an_image_larger_than_the_column_buffer_is_right() -> None:
    case = Case(Geometry((300, 301), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), per_group=3)
    assert im2col._FEW_BYTES < 300 * 301 * 27 * 4
    np.testing.assert_array_equal(run_case(case), run_onnx("Conv", case.arrays(), {"pads": [1] * 4}))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_channels_in_several_blocks_are_right(order: str, stride: int) -> None:
    geometry = Geometry((90, 70), (3, 3), (stride, stride), (1, 1), (1, 1, 1, 1))
    case = Case(geometry, group=43, per_group=1, filters_per_group=2, order=order)
    expected = run_onnx("Conv", case.arrays(), geometry.onnx_attributes() | {"group": 43})
    np.testing.assert_array_equal(run_case(case), expected)


# Runs after the first.

STEADY = {
    "padded im2col": Case(Geometry((96, 80), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), 2, 1, 8, 8),
    "grouped im2col": Case(Geometry((96, 80), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0)), 2, 2, 4, 4),
    "depthwise": Case(Geometry((96, 80), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), 2, 8, 1, 1),
    "depthwise with stride": Case(Geometry((96, 80), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)), 2, 8, 1, 2),
    "one by one": Case(Geometry((96, 80), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)), 2, 1, 8, 8),
    "grouped one by one": Case(Geometry((96, 80), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)), 2, 2, 4, 4),
}
LIMIT = 100_000  # bytes: below an image of the output; NumPy's own iterators may use up to 8192 elements an operand


def prepared(case: Case) -> tuple[Workspace, SimpleNet]:
    """A net of the one convolution, which has run once."""
    workspace = Workspace()
    names = []
    for index, array in enumerate(case.fed()):
        names.append(f"x{index}")
        workspace.feed_blob(names[-1], array)
    net = SimpleNet(NetDef(name="n", op=[operator_def("Conv", names, ["y"], **case.arguments())]), workspace)
    net.run()
    return workspace, net


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", STEADY.values(), ids=STEADY)
def test_a_second_run_allocates_no_tensor(case: Case, dtype: str, order: str) -> None:
    _, net = prepared(replace(case, dtype=dtype, order=order))
    with net:
        net.run()
        peak = peak_memory(net.run)
    assert peak < LIMIT, f"{peak} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", STEADY.values(), ids=STEADY)
def test_inputs_fed_anew_leave_no_trace_of_the_old_ones(case: Case, dtype: str, order: str) -> None:
    case = replace(case, dtype=dtype, order=order)
    inputs = case.fed()
    workspace, net = prepared(case)
    with net:
        first = workspace.fetch_blob("y").copy()
        for index, array in enumerate(inputs):
            workspace.feed_blob(f"x{index}", np.full_like(array, np.nan))
        net.run()
        assert np.isnan(workspace.fetch_blob("y")).all()
        for index, array in enumerate(inputs):
            workspace.feed_blob(f"x{index}", array)
        net.run()
        assert workspace.fetch_blob("y").tobytes() == first.tobytes()
        workspace.feed_blob("x1", (inputs[1] * 2).astype(dtype))
        workspace.feed_blob("x2", (inputs[2] * 2).astype(dtype))
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), first * 2)


# What is refused.

IMAGE, FILTER, BIAS = (2, 4, 6, 5), (6, 4, 3, 3), (6,)
Shapes = tuple[tuple[int, ...], ...]
BOTH = (IMAGE, FILTER)
HUGE = (1 << 31) - 1
REFUSED: dict[str, tuple[Shapes, Named, type[DagexecError], str]] = {
    "larger kernel": ((IMAGE, (6, 4, 7, 7)), {"kernel": 7}, ArgumentError, r"axis 0: kernel 7.* 7 pix.* 6 \+ 0 \+ 0"),
    "dilated": (BOTH, {"kernel": 3, "dilations": [1, 3]}, ArgumentError, "axis 1: .*dilation 3 spans 7.* 5"),
    "legacy": ((IMAGE, (6, 4, 8, 8)), {"kernel": 8, "legacy_pad": 3}, ArgumentError, "kernel 8 is larger than 6"),
    "group of channels": (BOTH, {"kernel": 3, "group": 3}, ArgumentError, "divide the 4 input.* found 3"),
    "group of filters": ((IMAGE, (5, 2, 3, 3)), {"kernel": 3, "group": 2}, ArgumentError, "2 must divide the 5 filter"),
    "zero group": (BOTH, {"kernel": 3, "group": 0}, ArgumentError, "group must divide .*found 0"),
    "negative group": (BOTH, {"kernel": 3, "group": -1}, ArgumentError, "found -1"),
    "zero stride": (BOTH, {"kernel": 3, "stride": 0}, ArgumentError, r"strides must be at least 1.*\[0, 0\]"),
    "zero kernel": ((IMAGE, (6, 4, 0, 0)), {"kernel": 0}, ArgumentError, r"kernels must be at least 1.*\[0, 0\]"),
    "zero dilation": (BOTH, {"kernel": 3, "dilation": 0}, ArgumentError, "dilations must be at least 1"),
    "negative pad": (BOTH, {"kernel": 3, "pads": [0, 0, -1, 0]}, ArgumentError, r"at least 0.*\[0, 0, -1, 0\]"),
    "huge stride": (BOTH, {"kernel": 3, "stride": 1 << 40}, ArgumentError, "1099511627776"),
    "no kernel": (BOTH, {}, ArgumentError, "'kernel' .*is required"),
    "short kernels": (BOTH, {"kernels": [3]}, ArgumentError, r"kernels needs 2 entries.*\[3\]"),
    "short pads": (BOTH, {"kernel": 3, "pads": [1, 1]}, ArgumentError, r"pads needs 4 entries.*\[1, 1\]"),
    "half a pair": (BOTH, {"kernel_h": 3}, ArgumentError, "kernel_h and kernel_w must be given together"),
    "two forms": (BOTH, {"kernel": 3, "kernels": [3, 3]}, ArgumentError, "'kernels', 'kernel'.* mean the same"),
    "two strides": (BOTH, {"kernel": 3, "stride": 1, "stride_h": 2}, ArgumentError, "'stride', 'stride_h'"),
    "two pads": (BOTH, {"kernel": 3, "pad": 1, "pads": [1] * 4}, ArgumentError, "'pads', 'pad'.* mean the same"),
    "three sides": (BOTH, {"kernel": 3, "pad_t": 1, "pad_l": 1, "pad_b": 1}, ArgumentError, "must be given together"),
    "VALID pads": (BOTH, {"kernel": 3, "legacy_pad": 1, "pad": 1}, ArgumentError, r"VALID.*\[1, 1, 1, 1\]"),
    "SAME pads": (BOTH, {"kernel": 3, "legacy_pad": 2, "pad": 1}, ArgumentError, r"SAME.*\[1, 1, 1, 1\]"),
    "legacy dilation": (BOTH, {"kernel": 3, "legacy_pad": 3, "dilation": 2}, ArgumentError, "no dilation.*2"),
    "legacy 6": (BOTH, {"kernel": 3, "legacy_pad": 6}, ArgumentError, "'legacy_pad' must be 0 to 5, found 6"),
    "order": (BOTH, {"kernel": 3, "order": "CHWN"}, ArgumentError, "NCHW, NHWC, NCHW8c or NCHW16c, found 'CHWN'"),
    "global": (BOTH, {"global_pooling": 1}, ArgumentError, "global_pooling"),
    "ceil": (BOTH, {"kernel": 3, "ceil_mode": 1}, ArgumentError, "ceil_mode"),
    "image rank": (((4, 6), FILTER), {"kernel": 3}, ShapeError, "'x0' must have 3 or 4 or 5 axes, found 2"),
    "filter rank": ((IMAGE, (6, 4, 3)), {"kernel": 3}, ShapeError, "'x1' must have 4 axes, found 3"),
    "filter channels": ((IMAGE, (6, 3, 3, 3)), {"kernel": 3}, ShapeError, r"\(6, 4, 3, 3\).*found \(6, 3, 3, 3\)"),
    "filter kernel": ((IMAGE, (6, 4, 3, 2)), {"kernel": 3}, ShapeError, r"\(6, 4, 3, 3\).*found \(6, 4, 3, 2\)"),
    "filter order": (BOTH, {"kernel": 3, "order": "NHWC"}, ShapeError, r"\(6, 3, 3, 5\) \(M, kernel, C/group"),
    "bias length": ((*BOTH, (4,)), {"kernel": 3}, ShapeError, r"'x2' must have shape \(6,\).*found \(4,\)"),
    "bias rank": ((*BOTH, (6, 1)), {"kernel": 3}, ShapeError, r"\(6,\).*found \(6, 1\)"),
    "overflow": (BOTH, {"kernel": 3, "pad": HUGE}, ResourceError, r"\(2, 6, 4294967298, .*overflows"),
    "large output": (BOTH, {"kernel": 3, "pad": 1 << 20}, ResourceError, "needs [0-9,]+ bytes; this machine"),
}


@pytest.mark.parametrize(("shapes", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    shapes: Shapes, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s)Conv 'y0'.*({message})"):
        run_operator("Conv", [np.zeros(shape, np.float32) for shape in shapes], **arguments)


def test_integers_and_mixed_types_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"Conv 'y0'.*'x0' must be one of float32.*found int32"):
        run_operator("Conv", [np.zeros(shape, np.int32) for shape in (*BOTH, BIAS)], kernel=3)
    with pytest.raises(ShapeError, match="one element type, found float32, float64"):
        run_operator("Conv", [np.zeros(IMAGE, np.float32), np.zeros(FILTER, np.float64)], kernel=3)
    half_bias = [np.zeros(IMAGE, np.float32), np.zeros(FILTER, np.float32), np.zeros(BIAS, np.float16)]
    with pytest.raises(ShapeError, match="one element type, found float16, float32"):
        run_operator("Conv", list(half_bias), kernel=3)


# Cost.


def cost_of(shapes: Shapes, op_type: str = "Conv", outputs: int = 1, **arguments: ArgumentValue) -> Cost:
    """The cost of an operator of the family on float32 inputs of `shapes`."""
    names = [f"x{index}" for index in range(len(shapes))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    types = tuple(TensorType(shape, FLOAT32) for shape in shapes)
    call = OperatorCall(definition, arguments_of(definition, op_type), types, (None,) * len(types), op_type)
    schema = schema_of(op_type)
    assert schema.infer is not None
    return schema.cost(call, schema.infer(call))


def test_cost_counts_groups_and_dilation() -> None:
    outputs = 2 * 6 * 4 * 3
    assert cost_of(BOTH, kernel=3) == Cost(
        flops=2 * outputs * 4 * 9, bytes_read=4 * (2 * 4 * 30 + 6 * 4 * 9), bytes_written=4 * outputs
    )
    assert cost_of((IMAGE, (6, 2, 3, 3)), kernel=3, group=2).flops == outputs * 4 * 9
    assert cost_of(BOTH, kernel=3, dilation=2).flops == 2 * (2 * 6 * 2 * 1) * 4 * 9
    assert cost_of((*BOTH, BIAS), kernel=3).flops == 2 * outputs * 4 * 9 + outputs
    assert cost_of(((2, 6, 5, 4), (6, 3, 3, 4)), kernel=3, order="NHWC").flops == 2 * outputs * 4 * 9
