"""LC and its gradient in every geometry, against loops in float64 and central differences; and what they refuse.

The values are small integers, so every sum is exact in float32 and results are compared bit by bit.
"""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass, replace

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
from dagexec.errors import ArgumentError, DagexecError, ShapeError
from dagexec.ops.families.conv import locally_connected
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.gradients import numerical_gradients
from tests.ops.running import operator_def, run_net, run_operator
from tests.ops.windows import LEGACY, Array, Geometry, geometries, taps_inside, to_channels_first, to_channels_last

Named = dict[str, ArgumentValue]
DTYPES = ["float32", "float32", "float64", "float16", "bfloat16"]


@dataclass(frozen=True)
class Case:
    """A locally connected layer; its arrays are made from `seed`."""

    geometry: Geometry
    batch: int = 1
    group: int = 1
    per_group: int = 2
    filters_per_group: int = 3
    bias: bool = True
    order: str = "NCHW"
    dtype: str = "float32"
    seed: int = 0

    @property
    def out(self) -> tuple[int, ...]:
        return tuple(len(axis.taps) for axis in self.geometry.windows())

    @property
    def filters(self) -> int:
        return self.group * self.filters_per_group

    def arrays(self) -> list[Array]:
        """X as N, C, spatial, the filter as out, M, C/group, kernel, the bias as out, M if there is one."""
        rng = np.random.default_rng(self.seed)
        x = rng.integers(-4, 5, (self.batch, self.group * self.per_group, *self.geometry.size))
        weights = rng.integers(-3, 4, (*self.out, self.filters, self.per_group, *self.geometry.kernel))
        bias = [rng.integers(-3, 4, (*self.out, self.filters))] if self.bias else []
        return [array.astype(self.dtype) for array in (x, weights, *bias)]

    def output_gradient(self) -> Array:
        """dY as N, M, out."""
        rng = np.random.default_rng(self.seed + 1)
        return rng.integers(-2, 3, (self.batch, self.filters, *self.out)).astype(self.dtype)

    def image_layout(self, array: Array) -> Array:
        """N, C, spatial in the layout of `order`."""
        return to_channels_last(array) if self.order == "NHWC" else array

    def filter_layout(self, weights: Array) -> Array:
        """out, M, C/group, kernel in the layout of `order`."""
        if self.order == "NCHW":
            return weights
        return np.ascontiguousarray(np.moveaxis(weights, self.geometry.rank + 1, -1))

    def fed(self) -> list[Array]:
        """The inputs of LC."""
        x, weights, *bias = self.arrays()
        return [self.image_layout(x), self.filter_layout(weights), *bias]

    def fed_back(self) -> list[Array]:
        """The inputs of LCGradient."""
        return [*self.fed()[:2], self.image_layout(self.output_gradient())]

    def arguments(self) -> Named:
        return {**self.geometry.arguments(), "group": self.group, "order": self.order}


def forward(case: Case) -> Array:
    """Y as N, M, out in float64, read by read."""
    x, weights, *bias = (array.astype(np.float64) for array in case.arrays())
    y = np.zeros((case.batch, case.filters, *case.out))
    if bias:
        y += np.moveaxis(bias[0], -1, 0)
    for place, tap, pixel in taps_inside(case.geometry):
        for m in range(case.filters):
            first = m // case.filters_per_group * case.per_group
            for c in range(case.per_group):
                y[(slice(None), m, *place)] += x[(slice(None), first + c, *pixel)] * weights[(*place, m, c, *tap)]
    return y


def backward(case: Case) -> dict[str, Array]:
    """The gradients in float64, read by read, in the layouts of `arrays`."""
    x, weights = (array.astype(np.float64) for array in case.arrays()[:2])
    dy = case.output_gradient().astype(np.float64)
    dx, dweights = np.zeros_like(x), np.zeros_like(weights)
    for place, tap, pixel in taps_inside(case.geometry):
        for m in range(case.filters):
            first = m // case.filters_per_group * case.per_group
            slope = dy[(slice(None), m, *place)]
            for c in range(case.per_group):
                dx[(slice(None), first + c, *pixel)] += slope * weights[(*place, m, c, *tap)]
                dweights[(*place, m, c, *tap)] = slope @ x[(slice(None), first + c, *pixel)]
    return {"filter": dweights, "bias": np.moveaxis(dy.sum(axis=0), 0, -1), "input": dx}


def run_forward(case: Case, op_type: str = "LC") -> Array:
    """Y as N, M, out."""
    (y,) = run_operator(op_type, list(case.fed()), **case.arguments())
    assert y.dtype == np.dtype(case.dtype)
    return to_channels_first(y) if case.order == "NHWC" else y


def run_backward(case: Case, wanted: list[str]) -> dict[str, Array]:
    """The gradients in the layouts of `order`."""
    found = run_operator("LCGradient", list(case.fed_back()), len(wanted), **case.arguments(), wanted=wanted)
    return dict(zip(wanted, found, strict=True))


def check(case: Case) -> None:
    """Compare the output with the loops."""
    np.testing.assert_array_equal(
        run_forward(case), forward(case).astype(case.dtype), strict=True, err_msg=f"reproduce with: check({case})"
    )


def check_gradients(case: Case, wanted: list[str]) -> None:
    """Compare the gradients with the loops."""
    found, expected = run_backward(case, wanted), backward(case)
    expected["input"] = case.image_layout(expected["input"])
    expected["filter"] = case.filter_layout(expected["filter"])
    for name in wanted:
        reproduction = f"d{name}; reproduce with: check_gradients({case}, {wanted})"
        np.testing.assert_array_equal(found[name], expected[name].astype(case.dtype), reproduction, strict=True)


CASES = st.builds(
    Case,
    geometries(),
    batch=st.sampled_from([0, 1, 1, 3]),
    group=st.integers(1, 3),
    per_group=st.integers(1, 3),
    filters_per_group=st.integers(1, 3),
    bias=st.booleans(),
    order=st.sampled_from(["NCHW", "NHWC"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
EVERY = ["filter", "bias", "input"]
WANTED = st.lists(st.sampled_from(EVERY), min_size=1, max_size=3, unique=True)


@pytest.mark.slow
@given(CASES)
@drawn(200)
def test_every_geometry_gives_the_sum_over_its_taps(case: Case) -> None:
    check(case)


@pytest.mark.slow
@given(CASES, WANTED)
@drawn(200)
def test_every_geometry_gives_the_gradients_that_are_wanted(case: Case, wanted: list[str]) -> None:
    check_gradients(case, wanted)


SQUARE = Geometry((5, 4), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
LINE = Geometry((9,), (3,), (2,), (1,), (1, 0))
STRIDED = Geometry((8, 9), (3, 2), (3, 2), (1, 3), (2, 0, 0, 3))
CUBE = Geometry((4, 3, 4), (2, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1, 1, 0, 1))
SAME = Geometry((6, 5), (2, 3), (2, 2), (1, 1), (0,) * 4, 2)
CAFFE = Geometry((6, 5), (2, 3), (2, 2), (1, 1), (1,) * 4, LEGACY)
GEOMETRIES = {"line": LINE, "square": SQUARE, "strided": STRIDED, "cube": CUBE, "same": SAME, "caffe": CAFFE}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("group", "per_group", "multiplier"), [(1, 3, 4), (2, 3, 2), (4, 1, 1)])
def test_every_rank_type_order_and_group_is_served(
    group: int, per_group: int, multiplier: int, order: str, dtype: str
) -> None:
    for geometry in (LINE, STRIDED, CUBE):
        case = Case(geometry, 2, group, per_group, multiplier, order=order, dtype=dtype)
        check(case)
        check_gradients(case, EVERY)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_equal_filters_at_all_positions_make_a_convolution(geometry: Geometry, group: int, order: str) -> None:
    case = Case(geometry, 2, group, order=order)
    x, weights, bias = case.fed()
    first = (0,) * geometry.rank
    (expected,) = run_operator("Conv", [x, weights[first], bias[first]], **case.arguments())
    same = [x, np.broadcast_to(weights[first], weights.shape).copy(), np.broadcast_to(bias[first], bias.shape).copy()]
    (y,) = run_operator("LC", list(same), **case.arguments())
    np.testing.assert_array_equal(y, expected)


def test_no_channels_leave_the_bias() -> None:
    case = Case(SQUARE, 2, per_group=0)
    check(case)
    check_gradients(case, EVERY)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_image_of_padding_only_gives_the_bias(order: str, dtype: str) -> None:
    case = Case(Geometry((0, 3), (3, 3), (1, 1), (1, 1), (2, 0, 2, 0)), 2, order=order, dtype=dtype)
    check(case)
    check_gradients(case, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_in_float32(dtype: str) -> None:
    """Ones added one by one in these types would stop at 2048, or at 256."""
    x, weights = np.ones((2500, 1, 2500), dtype), np.ones((1, 1, 1, 2500), dtype)
    expected = np.array(2500, dtype)
    (y,) = run_operator("LC", [x[:1], weights], kernel=2500)
    assert y.item() == expected
    (dbias,) = run_operator("LCGradient", [x, weights, x[:, :, :1]], kernel=2500, wanted=["bias"])
    assert dbias.item() == expected
    ones = np.ones((1, 1, 4999), dtype)
    dy, many = np.ones((1, 1, 2500), dtype), np.ones((2500, 1, 1, 2500), dtype)
    (dx,) = run_operator("LCGradient", [ones, many, dy], kernel=2500, wanted=["input"])
    assert dx[0, 0, 2499] == expected


# Central differences.


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Layers of few elements."""
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    legacy = draw(st.sampled_from([0, 0, 1, 2, 3, 4, 5]))
    rows = []
    for _ in range(rank):
        kernel, stride = draw(st.integers(1, 2 if rank == 3 else 3)), draw(st.integers(1, 2))
        dilation = 1 if legacy == LEGACY else draw(st.integers(1, 2))
        head, tail = (draw(st.integers(0, 2)), draw(st.integers(0, 2))) if legacy in (0, LEGACY) else (0, 0)
        least = dilation * (kernel - 1) + 1 - (2 * head if legacy == LEGACY else head + tail)
        rows.append((max(1, least) + draw(st.integers(0, 1)), kernel, stride, dilation, head, tail))
    sizes, kernels, strides, dilations, heads, tails = zip(*rows, strict=True)
    return Case(
        Geometry(sizes, kernels, strides, dilations, (*heads, *tails), legacy),
        batch=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 2)),
        per_group=draw(st.integers(1, 2)),
        filters_per_group=draw(st.integers(1, 2)),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype="float64",
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@given(small_cases())
@drawn(60)
def test_gradients_are_what_central_differences_say(case: Case) -> None:
    definition = operator_def("LC", ["X", "filter", "bias"], ["Y"], **case.arguments())
    inputs = case.fed()
    dy = case.fed_back()[2]
    numbers = [index for index, array in enumerate(inputs) if array.size < 500]
    expected = numerical_gradients(definition, inputs, [dy], numbers)
    found = run_backward(case, ["input", "filter", "bias"])
    names = list(found)
    for index, gradient in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(
            found[names[index]], gradient, rtol=1e-6, atol=1e-6, err_msg=f"d{names[index]} of {case}"
        )


# Which gradients.


@pytest.mark.parametrize(
    ("outputs", "no_bias", "names"),
    [(2, 0, ["filter", "bias"]), (3, 0, EVERY), (1, 1, ["filter"]), (2, 1, ["filter", "input"])],
)
def test_without_wanted_the_outputs_are_those_of_caffe2(outputs: int, no_bias: int, names: list[str]) -> None:
    case = Case(STRIDED, 2, 2)
    found = run_operator("LCGradient", list(case.fed_back()), outputs, **case.arguments(), no_bias=no_bias)
    expected = run_backward(case, EVERY)
    for name, gradient in zip(names, found, strict=True):
        np.testing.assert_array_equal(gradient, expected[name])


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("name", "unread"), [("input", [0]), ("filter", [1]), ("bias", [0, 1])])
def test_what_a_gradient_does_not_depend_on_is_not_read(name: str, unread: list[int], dtype: str, order: str) -> None:
    case = Case(STRIDED, 2, 2, dtype=dtype, order=order)
    expected = run_backward(case, EVERY)[name]
    inputs = case.fed_back()
    for index in unread:
        inputs[index] = np.full_like(inputs[index], np.nan)
    (found,) = run_operator("LCGradient", list(inputs), **case.arguments(), wanted=[name])
    assert found.tobytes() == expected.tobytes()


# Blocks.


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("limit", [1, 1000, 5000])
def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, limit: int, dtype: str, order: str) -> None:
    monkeypatch.setattr(locally_connected, "_BLOCK_BYTES", limit)
    for geometry in GEOMETRIES.values():
        case = Case(geometry, 2, 2, order=order, dtype=dtype)
        check(case)
        check_gradients(case, EVERY)


def traced_peak(case: Case, op_type: str, inputs: list[Array], outputs: list[str], **arguments: ArgumentValue) -> int:
    """The most bytes that building a net of one operator and running it allocates, without the outputs."""
    workspace, names = Workspace(), [f"x{index}" for index in range(len(inputs))]
    for name, array in zip(names, inputs, strict=True):
        workspace.feed_blob(name, array)
    definition = operator_def(op_type, names, outputs, **case.arguments(), **arguments)
    tracemalloc.start()
    try:
        run_net(workspace, definition)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak - sum(workspace.get_blob(name).tensor().array.nbytes for name in outputs)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_working_memory_is_bounded_whatever_the_size_of_the_image(order: str) -> None:
    case = Case(Geometry((300, 201), (3, 3), (1, 1), (1, 1), (1,) * 4), 2, 1, 4, 1, order=order)
    x, weights = case.arrays()[:2]
    assert 2 * weights.nbytes > 16 << 20  # what all rows of taps would take
    assert traced_peak(case, "LC", case.fed(), ["y"]) < 6 << 20
    assert traced_peak(case, "LCGradient", case.fed_back(), ["dw", "db", "dx"]) < (6 << 20) + x.nbytes


# Runs after the first.

STEADY = {
    "padded": Case(Geometry((40, 48), (3, 3), (1, 1), (1, 1), (1,) * 4), 3, 1, 6, 8),
    "one image": Case(Geometry((40, 48), (3, 3), (1, 1), (1, 1), (0,) * 4), 1, 1, 6, 8),
    "grouped": Case(Geometry((40, 48), (3, 2), (1, 1), (2, 1), (1,) * 4), 3, 8, 1, 1),
}
LIMIT = 50_000  # bytes: below an image of the output; NumPy's own iterators may use up to 8192 elements an operand


def second_run(case: Case, op_type: str, inputs: list[Array], outputs: list[str]) -> int:
    """The bytes that a second run allocates; the first sees NaN, of which nothing may be left."""
    workspace, names = Workspace(), [f"x{index}" for index in range(len(inputs))]
    for name, array in zip(names, inputs, strict=True):
        workspace.feed_blob(name, np.full_like(array, np.nan))
    definition = operator_def(op_type, names, outputs, **case.arguments())
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        assert np.isnan(workspace.fetch_blob(outputs[-1])).any()
        for name, array in zip(names, inputs, strict=True):
            workspace.feed_blob(name, array)
        peak = peak_memory(net.run)
        for name in outputs:
            assert not np.isnan(workspace.fetch_blob(name)).any()
    return peak


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", STEADY.values(), ids=STEADY)
def test_a_second_run_allocates_no_tensor_and_reads_its_inputs_anew(case: Case, dtype: str, order: str) -> None:
    case = replace(case, dtype=dtype, order=order)
    assert math.prod(case.out) * case.filters * np.dtype(dtype).itemsize * case.batch > LIMIT / 2
    assert second_run(case, "LC", case.fed(), ["y"]) < LIMIT
    assert second_run(case, "LCGradient", case.fed_back(), ["dw", "db", "dx"]) < LIMIT


# What is refused.

IMAGE, FILTER, BIAS, OUT = (2, 4, 6, 5), (4, 3, 6, 4, 3, 3), (4, 3, 6), (2, 6, 4, 3)
Shapes = tuple[tuple[int, ...], ...]
BOTH, BACK = (IMAGE, FILTER), (IMAGE, FILTER, OUT)
K3: Named = {"kernel": 3}
REFUSED: dict[str, tuple[str, Shapes, Named, type[DagexecError], str]] = {
    "kernel": ("LC", BOTH, {"kernel": 7}, ArgumentError, r"axis 0: kernel 7.* 7 pix.* 6 \+ 0 \+ 0"),
    "zero stride": ("LC", BOTH, K3 | {"stride": 0}, ArgumentError, r"strides must be at least 1.*\[0, 0\]"),
    "two forms": ("LC", BOTH, K3 | {"kernels": [3, 3]}, ArgumentError, "mean the same"),
    "global": ("LC", BOTH, {"global_pooling": 1}, ArgumentError, "global_pooling"),
    "channels": ("LC", BOTH, K3 | {"group": 3}, ArgumentError, "divide the 4 input channels, found 3"),
    "filters": ("LC", (IMAGE, (4, 3, 5, 2, 3, 3)), K3 | {"group": 2}, ArgumentError, "2 must divide the 5 filters"),
    "zero group": ("LC", BOTH, K3 | {"group": 0}, ArgumentError, "group must divide .*found 0"),
    "image rank": ("LC", ((4, 6), FILTER), K3, ShapeError, "'x0' must have 3 or 4 or 5 axes, found 2"),
    "fixed rank": ("LC1D", BOTH, K3, ShapeError, "'x0' must have 3 axes, found 4"),
    "filter rank": ("LC", (IMAGE, (6, 4, 3, 3)), K3, ShapeError, "'x1' must have 6 axes, found 4"),
    "positions": ("LC", BOTH, K3 | {"pad": 1}, ShapeError, r"\(6, 5, 6, 4, 3, 3\) \(out, M, C/group, kernel for"),
    "groups": ("LC", BOTH, K3 | {"group": 2}, ShapeError, r"\(4, 3, 6, 2, 3, 3\).*2 group.*found \(4, 3, 6, 4, 3, 3\)"),
    "order": ("LC", BOTH, K3 | {"order": "NHWC"}, ShapeError, r"\(2, 4, 6, 3, 3, 5\) \(out, M, kernel, C/group"),
    "bias": ("LC", (*BOTH, (6,)), K3, ShapeError, r"'x2' must have shape \(4, 3, 6\) \(out, M\), found \(6,\)"),
    "gradient": ("LCGradient", (*BOTH, (2, 6, 4, 4)), K3, ShapeError, r"\(2, 6, 4, 3\).*found \(2, 6, 4, 4\)"),
    "gradient's filter": ("LCGradient", (IMAGE, BIAS, OUT), K3, ShapeError, "'x1' must have 6 axes, found 3"),
    "gradient's rank": ("LC3DGradient", BACK, K3, ShapeError, "'x0' must have 5 axes, found 4"),
    "outputs": ("LCGradient", BACK, K3, ArgumentError, r"no_bias=0 .*filter, bias, input.*found 1 output"),
    "wanted": ("LCGradient", BACK, K3 | {"wanted": ["dX"]}, ArgumentError, "filter, bias, input; found 'dX'"),
    "wanted bias": ("LCGradient", BACK, K3 | {"wanted": ["bias"], "no_bias": 1}, ArgumentError, "no_bias=1"),
}


@pytest.mark.parametrize(("op_type", "shapes", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    op_type: str, shapes: Shapes, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, [np.zeros(shape, np.float32) for shape in shapes], **arguments)


def test_integers_and_mixed_types_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found int32"):
        run_operator("LC", [np.zeros(shape, np.int32) for shape in BOTH], kernel=3)
    mixed = [np.zeros(IMAGE, np.float32), np.zeros(FILTER, ml_dtypes.bfloat16)]
    with pytest.raises(ShapeError, match="one element type, found bfloat16, float32"):
        run_operator("LC", list(mixed), kernel=3)


# Cost.


def cost_of(op_type: str, shapes: Shapes, outputs: int = 1, **arguments: ArgumentValue) -> Cost:
    names = [f"x{index}" for index in range(len(shapes))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    types = tuple(TensorType(shape, FLOAT32) for shape in shapes)
    call = OperatorCall(definition, arguments_of(definition, op_type), types, (None,) * len(types), op_type)
    schema = schema_of(op_type)
    assert schema.infer is not None
    return schema.cost(call, schema.infer(call))


def test_cost_counts_groups_and_what_is_wanted() -> None:
    y = math.prod(OUT)
    read = 4 * (math.prod(IMAGE) + math.prod(FILTER))
    assert cost_of("LC", BOTH, kernel=3) == Cost(2 * y * 36, read, 4 * y)
    assert cost_of("LC", (*BOTH, BIAS), kernel=3).flops == 2 * y * 36 + y
    assert cost_of("LC", (IMAGE, (4, 3, 6, 2, 3, 3)), kernel=3, group=2).flops == 2 * y * 18
    assert cost_of("LCGradient", BACK, kernel=3, wanted=["bias"]) == Cost(y, read + 4 * y, 4 * math.prod(BIAS))
    assert cost_of("LCGradient", BACK, 3, kernel=3).flops == 4 * y * 36 + y
