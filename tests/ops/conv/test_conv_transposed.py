"""ConvTranspose in every geometry, against scattering each input pixel in float64 and against onnxruntime.

The values are small integers, so every sum is exact in float32 and results are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.errors import ArgumentError, DagexecError, ShapeError
from tests.ops.conv.test_conv import DTYPES, Named, cost_of
from tests.ops.drawing import drawn
from tests.ops.running import run_operator
from tests.ops.windows import SAME, SAME_LOWER, SAME_UPPER, VALID, Array, run_onnx, to_channels_first, to_channels_last


@dataclass(frozen=True)
class TransposedCase:
    """A transposed convolution; its arrays are made from `seed`."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]
    adj: tuple[int, ...]
    legacy_pad: int = 0
    batch: int = 1
    group: int = 1
    per_group: int = 2
    filters_per_group: int = 3
    bias: bool = True
    order: str = "NCHW"
    dtype: str = "float32"
    seed: int = 0

    def arrays(self) -> list[Array]:
        """X as N, C, spatial, the filter as C, M/group, kernel, and the bias if there is one."""
        rng = np.random.default_rng(self.seed)
        channels = self.group * self.per_group
        x = rng.integers(-4, 5, (self.batch, channels, *self.size))
        weights = rng.integers(-3, 4, (channels, self.filters_per_group, *self.kernel))
        bias = [rng.integers(-3, 4, self.group * self.filters_per_group)] if self.bias else []
        return [array.astype(self.dtype) for array in (x, weights, *bias)]

    def fed(self) -> list[Array]:
        """The arrays in the layout of `order`."""
        x, weights, *bias = self.arrays()
        if self.order == "NHWC":
            x, weights = to_channels_last(x), to_channels_last(weights)
        return [x, weights, *bias]

    def arguments(self) -> Named:
        found: Named = {"kernels": list(self.kernel), "strides": list(self.stride), "dilations": list(self.dilation)}
        found |= {"adjs": list(self.adj), "group": self.group, "order": self.order, "legacy_pad": self.legacy_pad}
        return found if self.legacy_pad else {**found, "pads": list(self.pads)}

    def cut(self) -> tuple[list[int], list[int]]:
        """How many pixels go at the head and the tail of the full output along each axis; below 0, that many come."""
        rank = len(self.size)
        if self.legacy_pad in (SAME_UPPER, SAME_LOWER):
            heads, tails = [], []
            for full, size, stride in zip(self.full(), self.size, self.stride, strict=True):
                most = max(0, full - size * stride)
                head = most // 2 if self.legacy_pad == SAME_UPPER else -(-most // 2)
                heads.append(head)
                tails.append(full - head - size * stride)
            return heads, tails
        pads = (0,) * 2 * rank if self.legacy_pad else self.pads
        return list(pads[:rank]), list(pads[rank:])

    def full(self) -> list[int]:
        """The output's size without pads."""
        axes = zip(self.size, self.kernel, self.stride, self.dilation, self.adj, strict=True)
        return [(size - 1) * stride + dilation * (kernel - 1) + 1 + adj for size, kernel, stride, dilation, adj in axes]


def scatter(case: TransposedCase) -> Array:
    """Y in float64: every input pixel adds its multiple of the filter around its place."""
    x, weights, *bias = (array.astype(np.float64) for array in case.arrays())
    groups = case.group
    images = x.reshape(case.batch, groups, case.per_group, *case.size)
    matrices = weights.reshape(groups, case.per_group, *weights.shape[1:])
    heads, tails = case.cut()
    room = [full + max(0, -tail) for full, tail in zip(case.full(), tails, strict=True)]
    y = np.zeros((case.batch, groups, case.filters_per_group, *room))
    for pixel in product(*map(range, case.size)):
        for tap in product(*map(range, case.kernel)):
            place = [p * s + t * d for p, s, t, d in zip(pixel, case.stride, tap, case.dilation, strict=True)]
            y[(..., *place)] += np.einsum("ngc,gcm->ngm", images[(..., *pixel)], matrices[(..., *tap)])
    inside = [slice(head, full - tail) for head, full, tail in zip(heads, case.full(), tails, strict=True)]
    y = y[(..., *inside)].reshape(case.batch, groups * case.filters_per_group, *y[(..., *inside)].shape[3:])
    return y + bias[0].reshape(-1, *(1,) * len(case.size)) if bias else y


def check(case: TransposedCase) -> None:
    reproduction = f"reproduce with: check({case})"
    expected = scatter(case).astype(case.dtype)
    (y,) = run_operator("ConvTranspose", list(case.fed()), **case.arguments())
    y = to_channels_first(y) if case.order == "NHWC" else y
    assert y.shape == expected.shape, f"{y.shape}, not {expected.shape}; {reproduction}"
    assert y.dtype == np.dtype(case.dtype)
    np.testing.assert_array_equal(y, expected, err_msg=reproduction)
    onnx_has = all(adj < stride for adj, stride in zip(case.adj, case.stride, strict=True)) and not case.legacy_pad
    if case.dtype == "float32" and onnx_has:
        attributes = {"kernel_shape": case.kernel, "strides": case.stride, "dilations": case.dilation}
        attributes |= {"pads": case.pads, "output_padding": case.adj, "group": case.group}
        found = run_onnx("ConvTranspose", case.arrays(), attributes)
        np.testing.assert_array_equal(y, found, err_msg=f"onnxruntime differs; {reproduction}")


@st.composite
def transposed_cases(draw: st.DrawFn) -> TransposedCase:
    rank = draw(st.sampled_from([1, 2, 2, 2, 3]))
    legacy = draw(st.sampled_from([0, 0, 0, 0, VALID, SAME, SAME_UPPER, SAME_LOWER]))
    most = 3 if rank == 3 else 4
    rows = []
    for _ in range(rank):
        size, kernel = draw(st.integers(1, most)), draw(st.integers(1, most))
        stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        adj = draw(st.integers(0, max(stride, dilation) - 1))
        full = (size - 1) * stride + dilation * (kernel - 1) + 1 + adj
        head = draw(st.integers(0, min(3, full - 1)))
        tail = draw(st.integers(0, min(3, full - 1 - head)))
        rows.append((size, kernel, stride, dilation, adj, head, tail))
    sizes, kernels, strides, dilations, adjs, heads, tails = zip(*rows, strict=True)
    pads = (0,) * 2 * rank if legacy else (*heads, *tails)
    return TransposedCase(
        sizes, kernels, strides, dilations, pads, adjs, legacy,
        batch=draw(st.sampled_from([1, 1, 3])),
        group=draw(st.integers(1, 3)),
        per_group=draw(st.integers(1, 3)),
        filters_per_group=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype=np.dtype(draw(st.sampled_from(DTYPES))).name,
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@pytest.mark.slow
@given(transposed_cases())
@drawn(300)
def test_every_geometry_gives_the_scattered_filters(case: TransposedCase) -> None:
    check(case)


PLAIN = TransposedCase((4, 5), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (1, 1))
UNIT = TransposedCase((4, 5), (3, 2), (1, 1), (2, 1), (1, 0, 2, 1), (0, 0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("group", "per_group", "filters"), [(1, 3, 4), (2, 3, 2), (4, 1, 1), (4, 1, 3)])
@pytest.mark.parametrize("case", [PLAIN, UNIT], ids=["strided", "unit"])
def test_every_type_order_and_group_is_served(
    case: TransposedCase, group: int, per_group: int, filters: int, order: str, dtype: str
) -> None:
    check(replace(case, batch=2, group=group, per_group=per_group, filters_per_group=filters, order=order, dtype=dtype))


def test_the_three_spellings_of_adj_say_the_same() -> None:
    case = replace(PLAIN, adj=(0, 0))
    inputs = list(case.fed())
    arguments = {name: value for name, value in case.arguments().items() if name != "adjs"}
    (expected,) = run_operator("ConvTranspose", inputs, **arguments, adjs=[1, 1])
    for form in ({"adj": 1}, {"adj_h": 1, "adj_w": 1}):
        (found,) = run_operator("ConvTranspose", inputs, **arguments, **form)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("legacy_pad", "auto_pad"), [(0, "NOTSET"), (SAME_UPPER, "SAME_UPPER")])
def test_output_sizes_find_the_pads_as_onnx_does(legacy_pad: int, auto_pad: str) -> None:
    case = replace(PLAIN, kernel=(4, 3), adj=(0, 0))
    arguments = {name: value for name, value in case.arguments().items() if name != "pads"}
    arguments |= {"output_sizes": [7, 10], "legacy_pad": legacy_pad}
    (y,) = run_operator("ConvTranspose", list(case.fed()), **arguments)
    attributes = {"kernel_shape": case.kernel, "strides": case.stride, "output_shape": [7, 10], "auto_pad": auto_pad}
    np.testing.assert_array_equal(y, run_onnx("ConvTranspose", case.arrays(), attributes))


@pytest.mark.parametrize("dilation", [1, 4])
@pytest.mark.parametrize("legacy_pad", [0, SAME_UPPER])
def test_output_sizes_go_as_far_as_adj_would(legacy_pad: int, dilation: int) -> None:
    adj = max(2, dilation) - 1
    inputs = list(replace(PLAIN, size=(3, 3)).fed())
    arguments: Named = {"kernel": 3, "stride": 2, "dilation": dilation}
    (expected,) = run_operator("ConvTranspose", inputs, **arguments, adj=adj)
    most = expected.shape[-1]
    arguments["legacy_pad"] = legacy_pad
    (y,) = run_operator("ConvTranspose", inputs, **arguments, output_sizes=[most, most])
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(ArgumentError, match=f"output_sizes of axis 1 must be at most {most}: .*found {most + 1}"):
        run_operator("ConvTranspose", inputs, **arguments, output_sizes=[most, most + 1])


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
def test_no_channels_leave_the_bias_and_no_filters_a_gradient_of_zeros(group: int, order: str) -> None:
    x, weights, gradient = np.ones((2, 0, 3, 3)), np.ones((0, 2, 3, 3)), np.ones((2, 2 * group, 5, 5))
    no_filters, nothing, image = np.ones((2, 0, 3, 3)), np.ones((2, 0, 5, 5)), np.ones((2, 2, 3, 3))
    bias = np.arange(2.0 * group)
    arrays = [x, weights, gradient, no_filters, nothing, image]
    if order == "NHWC":
        x, weights, gradient, no_filters, nothing, image = map(to_channels_last, arrays)
    arguments: Named = {"kernel": 3, "group": group, "order": order}
    (y,) = run_operator("ConvTranspose", [x, weights, bias], **arguments)
    (plain,) = run_operator("ConvTranspose", [x, weights], **arguments)
    np.testing.assert_array_equal(y, np.zeros(gradient.shape) + (bias if order == "NHWC" else bias[:, None, None]))
    np.testing.assert_array_equal(plain, np.zeros(gradient.shape))
    found = run_operator("ConvTransposeGradient", [x, weights, gradient], 3, **arguments)
    np.testing.assert_array_equal(found[1], np.full(2 * group, 50.0))
    found = run_operator("ConvTransposeGradient", [image, no_filters, nothing], 3, **arguments)
    np.testing.assert_array_equal(found[2], np.zeros(image.shape))


def test_the_cost_counts_two_operations_for_each_input_tap_and_filter_of_the_group() -> None:
    cost = cost_of(((2, 4, 5, 5), (4, 3, 3, 3), (6,)), "ConvTranspose", kernel=3, group=2, stride=2)
    assert cost.flops == 2 * (2 * 4 * 25) * (3 * 9) + 2 * 6 * 121


IMAGE, FILTER = (2, 4, 6, 5), (4, 3, 3, 3)
Shapes = tuple[tuple[int, ...], ...]
REFUSED: dict[str, tuple[Shapes, Named, type[DagexecError], str]] = {
    "adj": ((IMAGE, FILTER), {"kernel": 3, "stride": 2, "adj": 2}, ArgumentError,
            "adj of axis 0 must be less than stride 2 or dilation 1, found 2"),
    "negative adj": ((IMAGE, FILTER), {"kernel": 3, "adj": -1}, ArgumentError, r"adjs must be at least 0.*\[-1, -1\]"),
    "legacy": ((IMAGE, FILTER), {"kernel": 3, "legacy_pad": 3}, ArgumentError, "CAFFE_LEGACY_POOLING only applies"),
    "nothing left": ((IMAGE, FILTER), {"kernel": 3, "pad": 4}, ArgumentError,
                     r"axis 0 of the output has no pixels: \(6 - 1\) \* stride 1 \+ 3 .*pads 4 and 4 is 0"),
    "group": ((IMAGE, FILTER), {"kernel": 3, "group": 3}, ArgumentError, "divide the 4 input channels, found 3"),
    "filter": ((IMAGE, (6, 4, 3, 3)), {"kernel": 3}, ShapeError, r"'x1' must have shape \(4, 4, 3, 3\)"),
    "filter rank": ((IMAGE, (4, 3, 3)), {"kernel": 3}, ShapeError, "'x1' must have 4 axes, found 3"),
    "bias": ((IMAGE, FILTER, (4,)), {"kernel": 3}, ShapeError, r"'x2' must have shape \(3,\).*found \(4,\)"),
    "sizes": ((IMAGE, FILTER), {"kernel": 3, "output_sizes": [4]}, ArgumentError, r"needs 2 entries.*\[4\]"),
    "pads": ((IMAGE, FILTER), {"kernel": 3, "output_sizes": [4, 4], "pad": 1}, ArgumentError, "determines the pads"),
    "no pixels": (((2, 4, 0, 5), FILTER), {"kernel": 3}, ShapeError, "axis 0 has no pixels"),
    "overflow": ((IMAGE, FILTER), {"kernel": 3, "stride": (1 << 31) - 1}, DagexecError, "overflow|needs"),
}  # fmt: skip


@pytest.mark.parametrize(("shapes", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    shapes: Shapes, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s)ConvTranspose 'y0'.*({message})"):
        run_operator("ConvTranspose", [np.ones(shape, np.float32) for shape in shapes], **arguments)
