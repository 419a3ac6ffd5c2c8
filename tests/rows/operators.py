"""Cases of every operator that says how it passes rows on.

Those with a formula are drawn from it. Sizes of products, convolutions and recurrent layers are such that some library
computes a batch of some size in another order than a single row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from dagexec import NetDef, OperatorDef, op
from dagexec.core.caches import Caches
from dagexec.core.python_step import PythonStep
from dagexec.core.registry import schema_of
from tests.ops import formulas
from tests.rows.case import (
    Array,
    Case,
    Given,
    batch,
    case,
    constant,
    constant_values,
    examples_at,
    integers,
    normal,
    positive,
    shared,
)
from tests.rows.gradients import gradient_cases
from tests.rows.tables import table_cases

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INT8 = integers(-127, 127, np.int8)
UINT8 = integers(0, 255, np.uint8)
MEANS = PythonStep(lambda x, y: np.stack([x.mean(1), y[:, 0]], 1))
"""A function of the application, which is there as long as this module."""


def in_bfloat16(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Of a normal distribution, bfloat16."""
    return normal(random, shape).astype(BFLOAT16)


def of_formulas() -> Iterator[Case]:
    """Element by element, in widths that fill vectors and leave a rest, and with an operand that rows share."""
    for name in formulas.with_formulas():
        dtype = next(kind for kind in (np.float32, np.int32, np.bool_) if formulas.takes(name, kind))
        count = formulas.arity(name)
        for width in (1, 5, 37):
            yield case(name, *[batch(width, draw=_of_type(dtype))] * count, **_arguments(name))
        if count > 1 and _broadcasts(name):
            yield case(name, batch(3, 7, draw=_of_type(dtype)), *[constant(7, draw=_of_type(dtype))] * (count - 1))


def _of_type(dtype: Any) -> Any:
    return {np.float32: positive, np.int32: integers(1, 9, np.int32), np.bool_: integers(0, 2, np.bool_)}[dtype]


def _arguments(_name: str) -> dict[str, Any]:
    return {}


def _broadcasts(name: str) -> bool:
    return "broadcast" in schema_of(name).args


def products() -> Iterator[Case]:
    """Matrix products, of weights that are constant or fed."""
    for inner, units in ((64, 64), (300, 10), (300, 100), (1024, 1000), (1025, 40), (4096, 16)):
        yield case("FC", batch(inner), constant(units, inner), constant(units))
        yield case("FC", batch(inner), shared(units, inner), shared(units))
        yield case("FCTransposed", batch(inner), constant(inner, units), constant(units))
        yield case("MatMul", batch(inner), constant(inner, units))
    yield case("FC", batch(300, draw=in_bfloat16), *(constant(*s, draw=in_bfloat16) for s in ((100, 300), (100,))))
    yield case("FC", batch(5, 64), constant(32, 64), constant(32), axis=2)
    yield case("FusedFC", batch(300), constant(100, 300), constant(100), batch(100), post_ops=["relu", "add:3"])
    yield case("Gemm", batch(300), constant(300, 100), constant(100))
    yield case("Gemm", batch(300), constant(100, 300), batch(100), trans_b=1, alpha=0.5)
    yield case("MatMul", batch(300), constant(100, 300), trans_b=1)
    for steps in (5, 16):
        yield case("BatchMatMul", batch(steps, 64), constant(64, 48), broadcast=1)
        yield case("BatchMatMul", batch(4, steps, 32), batch(4, steps, 32), trans_b=1)
        yield case("BatchMatMul", batch(4, steps, steps), batch(4, steps, 32))


def images(*shape: int, order: str, draw: Any = normal) -> Given:
    """Images of C, then spatial axes, in an order of axes."""
    return batch(*(shape if order == "NCHW" else (*shape[1:], shape[0])), draw=draw)


def filters(*shape: int, order: str, is_constant: bool = True) -> Given:
    """Filters of M, C, then spatial axes, in an order of axes."""
    made = constant if is_constant else shared
    return made(*(shape if order == "NCHW" else (shape[0], *shape[2:], shape[1])))


CONVOLUTIONS: tuple[tuple[tuple[int, int, int, int], dict[str, Any]], ...] = (
    ((64, 64, 1, 14), {}),
    ((64, 128, 1, 7), {}),
    ((300, 20, 1, 1), {}),
    ((32, 64, 1, 14), {"stride": 2}),
    ((64, 64, 3, 14), {"pad": 1}),
    ((3, 16, 3, 32), {"pad": 1}),
    ((64, 64, 3, 7), {"pad": 1}),
    ((32, 64, 3, 14), {"pad": 1, "stride": 2}),
    ((20, 50, 5, 12), {}),
    ((3, 32, 7, 32), {"pad": 3, "stride": 2}),
    ((32, 32, 3, 14), {"pad": 1, "group": 32}),
    ((32, 32, 3, 14), {"pad": 1, "group": 4}),
    ((1, 20, 5, 28), {}),
)
"""Channels, filters, kernel and size of the image; arguments."""


def convolutions(order: str) -> Iterator[Case]:
    """Of constant filters, and in NCHW of filters that are fed, too."""
    for (channels, count, kernel, size), arguments in CONVOLUTIONS:
        x = images(channels, size, size, order=order)
        per_group = channels // arguments.get("group", 1)
        for is_constant in (True, False)[: 1 + (order == "NCHW")]:
            w = filters(count, per_group, kernel, kernel, order=order, is_constant=is_constant)
            yield case("Conv", x, w, constant(count), kernel=kernel, order=order, **arguments)
    x, w = images(16, 14, 14, order=order), filters(32, 16, 3, 3, order=order)
    y = images(32, 14, 14, order=order)
    yield case("FusedConv", x, w, constant(32), y, kernel=3, pad=1, order=order, bias=1, post_ops=["relu", "add:3"])
    yield case("FusedConv", x, w, y, kernel=3, pad=1, order=order, post_ops=["add:2"])
    for kernel, stride in ((4, 2), (3, 1), (1, 1)):
        w = filters(16, 8, kernel, kernel, order=order)
        yield case("ConvTranspose", images(16, 7, 7, order=order), w, kernel=kernel, stride=stride, order=order)


def other_convolutions() -> Iterator[Case]:
    """Of one and three spatial axes, and of integers."""
    yield case("Conv", batch(16, 40), constant(32, 16, 5), kernels=[5])
    yield case("Conv1D", batch(16, 40), constant(32, 16, 5), kernels=[5])
    yield case("Conv2D", batch(3, 9, 9), constant(4, 3, 3, 3), kernel=3)
    yield case("Conv3D", batch(4, 6, 6, 6), constant(8, 4, 3, 3, 3), kernels=[3, 3, 3])
    yield case("ConvTranspose1D", batch(16, 10), constant(16, 8, 4), kernels=[4], strides=[2])
    yield case("ConvTranspose2D", batch(4, 6, 6), constant(4, 8, 3, 3), kernel=3)
    yield case("ConvTranspose3D", batch(4, 4, 4, 4), constant(4, 8, 2, 2, 2), kernels=[2, 2, 2])
    yield case("ConvInteger", batch(16, 14, 14, draw=UINT8), constant(32, 16, 3, 3, draw=INT8), kernel=3)
    yield case(
        "QuantConv", batch(16, 14, 14, draw=UINT8), constant(32, 16, 3, 3, draw=INT8),
        constant_values(np.float32(0.01)), kernel=3, x_scale=0.5, y_scale=3.0, to="uint8",
    )  # fmt: skip


def poolings() -> Iterator[Case]:
    """Windows, and all pixels of an image."""
    for order in ("NCHW", "NHWC"):
        x = images(16, 14, 14, order=order)
        for name in ("MaxPool", "AveragePool", "LpPool"):
            yield case(name, x, kernel=3, stride=2, pad=1, order=order)
            yield case(f"{name}2D", x, kernel=2, stride=2, order=order)
        yield case("AveragePool", x, global_pooling=1, order=order)
        yield case("LRN", x, size=5, alpha=1e-4, beta=0.75, order=order)
        yield case("ResizeNearest", x, width_scale=2.0, height_scale=2.0, order=order)
        statistics = (constant(16), constant(16), constant(16), constant(16, draw=positive))
        yield case("SpatialBN", x, *statistics, is_test=1, order=order)
        yield case("ChannelShuffle", x, group=4, order=order)
        yield case("PRelu", x, constant(16), order=order)
    for name in ("MaxPool", "AveragePool", "LpPool"):
        yield case(f"{name}1D", batch(8, 21), kernels=[3])
        yield case(f"{name}3D", batch(4, 6, 6, 6), kernels=[2, 2, 2])
    yield case("NCHW2NHWC", batch(3, 5, 7))
    yield case("NHWC2NCHW", batch(5, 7, 3))
    yield case("DepthToSpace", batch(8, 3, 5), block_size=2)
    yield case("SpaceToDepth", batch(3, 4, 6), block_size=2)
    yield case("PadImage", batch(3, 5, 6), pad=2, mode="reflect")
    yield case("Pad", batch(5, 6), constant_values([0, 1, 2, 0, 0, 3], np.int64))


def normalizations() -> Iterator[Case]:
    """Over what belongs to one example."""
    yield case("LayerNorm", batch(7, 100), axis=2, outputs=3)
    yield case("LayerNorm", batch(7, 10), axis=1, outputs=3)
    yield case("C10LayerNorm_DontUseThisOpYet", batch(7, 100), axis=2, outputs=3)
    yield case("GroupSpatialSoftmax", batch(6, 4, 5), num_classes=3)
    yield case("IntegralImage", batch(3, 4, 5))
    yield case("RootMeanSquareNorm", batch(7, 100), constant(100))
    yield case("InstanceNorm", batch(8, 9, 9), constant(8), constant(8))
    yield case("GroupNorm", batch(8, 9, 9), constant(8), constant(8), group=4)
    for name in ("Softmax", "LogSoftmax"):
        yield case(name, batch(7))
        yield case(name, batch(1000))
        yield case(name, batch(5, 7))
        yield case(name, batch(5, 7), axis=1, single_axis=1)
        yield case(name, batch(3, 5, 7), axis=-1)


def reductions() -> Iterator[Case]:
    """Of axes that rows are not on, with and without their axes afterwards."""
    for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceProd",
                 "ReduceLogSumExp"):  # fmt: skip
        for axes, keepdims in (([1], 1), ([2], 0), ([1, 2], 0)):
            yield case(name, batch(33, 21, draw=positive), axes=axes, keepdims=keepdims)
        yield case(name, examples_at(1, 5, 1, 3, draw=positive), axes=[0], keepdims=0)
    for name in ("ReduceBackSum", "ReduceBackMean", "ReduceBackMax"):
        yield case(name, batch(5, 7), num_reduce_dim=2)
    for name in ("ReduceFrontSum", "ReduceFrontMean", "ReduceFrontMax"):
        yield case(name, examples_at(1, 5, 1, 7), num_reduce_dim=1)
    yield case("RowwiseMax", batch(5, 7))
    yield case("ColwiseMax", batch(5, 7))


def recurrent_layers() -> Iterator[Case]:
    """Sequences on axis 1, lengths of their own, and states that are given."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1, "GeneralLSTM": 4, "GeneralGRU": 3}
    for name, count in gates.items():
        states = 3 if "LSTM" in name else 2
        for features, hidden in ((16, 32), (64, 128)):
            for made in (constant, shared):
                weights = made(1, count * hidden, features), made(1, count * hidden, hidden)
                x = examples_at(1, 5, 1, features)
                yield case(name, x, *weights, outputs=states, hidden_size=hidden)
        lengths = batch(draw=integers(1, 6, np.int32))
        initial = [examples_at(1, 1, 1, 8)] * (states - 1)
        weights = constant(1, count * 8, 4), constant(1, count * 8, 8)
        yield case(name, examples_at(1, 5, 1, 4), *weights, lengths, *initial, outputs=states, hidden_size=8,
                   sequence_lengths=1, initial_state=1)  # fmt: skip


def along_other_axes() -> Iterator[Case]:
    """What is computed along axes that rows are not on."""
    x = batch(5, 6)
    yield case("Hardmax", x)
    yield case("Hardmax", x, axis=1, single_axis=1)
    yield case("Glu", x)
    yield case("Moments", x, outputs=2, axes=[1, 2])
    yield case("Moments", x, outputs=2, axes=[2], keepdims=0)
    yield case("MeanVarianceNorm", x, axes=[1, 2])
    yield case("Normalize", x)
    yield case("NormalizeL1", x, axis=1)
    yield case("CumSum", x, axis=1)
    yield case("CumProd", x, constant_values(2, np.int64), reverse=1)
    yield case("TopK", x, outputs=2, k=2)
    yield case("TopK", x, outputs=2, k=3, axis=1)
    for name in ("ArgMax", "ArgMin"):
        yield case(name, x, axis=1, keepdims=0)
        yield case(name, x)
        yield case(name, examples_at(1, 5, 1), axis=0, keepdims=0)
    yield case("Tile", x, tiles=3, axis=2)
    yield case("Tile", x, tiles=1)
    yield case("TileAxes", x, repeats=[1, 2, 3])
    yield case("Trilu", x)
    yield case("Reorder", batch(16, 4, 4), from_order="NCHW", to_order="NHWC")
    for mode in ("nearest", "linear", "cubic"):
        yield case("Resize", batch(3, 4, 5), mode=mode, sizes=[7, 3], axes=[2, 3])
        yield case("Resize", batch(3, 4, 5), mode=mode, scales=[1.0, 1.0, 2.0, 1.5])
    yield case("Einsum", batch(4, 5), constant(5, 6), equation="bij,jk->bik")
    yield case("Einsum", batch(4, 5), batch(5, 6), equation="b...j,bjk->kb...")
    yield case("Einsum", batch(5), batch(5), equation="bi,bi->b")
    yield case("OneHotAxis", batch(4, draw=integers(0, 5)), constant_values(5), constant_values([0.0, 1.0], np.float32))
    yield case("OneHotAxis", batch(draw=integers(0, 5)), constant_values(5), constant_values([0, 2], np.int32), axis=0)
    yield case("GatherElements", x, batch(5, 2, draw=integers(0, 6)), axis=2)
    yield case("GatherND", x, batch(3, 1, draw=integers(0, 5)), batch_dims=1)
    yield case("GatherND", constant(4, 3, 2), batch(7, 2, draw=integers(0, 3)))
    yield case("ReverseSequence", x, batch(draw=integers(1, 6)), time_axis=1, batch_axis=0)
    yield case("ReverseSequence", examples_at(1, 5, 1, 3), batch(draw=integers(1, 6)))
    yield case("GridSample", batch(3, 5, 6), batch(4, 4, 2))
    yield case("DeformConv", batch(4, 6, 6), constant(3, 4, 3, 3), batch(18, 4, 4))
    yield case("CausalConv", batch(4, 9), constant(4, 1, 3), constant(4), batch(4, 2), outputs=2, bias=1, state=1)
    q, angles = batch(6, 16), batch(6, 8)
    yield case("LinearAttention", q, q, q, batch(6, 16), batch(6, 2), outputs=2, q_num_heads=2, kv_num_heads=2)
    yield case("RotaryEmbedding", batch(6, 16), angles, angles, num_heads=1)
    places = batch(6, draw=integers(0, 9))
    yield case("RotaryEmbedding", batch(6, 16), constant(9, 8), constant(9, 8), places, num_heads=1)
    yield case("Mod", x, divisor=2)
    yield case("IsNaN", x)
    yield case("IsInf", x)
    yield case("Shrink", x)
    yield case("CastLike", x, constant(3, draw=integers(0, 3)))
    yield case("AffineChannel", batch(4, 3, 3), constant(4), constant(4))
    yield case("ElementwiseLinear", x, constant(6), constant(6), axis=2)


def moved() -> Iterator[Case]:
    """Elements that go elsewhere as they are."""
    x = batch(4, 6)
    for name in ("Alias", "AliasWithName", "EnsureDense", "NegateGradient", "StopGradient", "Copy"):
        yield case(name, x)
    yield case("Dropout", x, is_test=1)
    yield case("Flatten", batch(2, 3, 4))
    yield case("Flatten", batch(2, 3, 4), axis=2)
    yield case("FlattenToVec", x)
    yield case("PrependDim", x, dim_size=1)
    yield case("MergeDim", x)
    yield case("ExpandDims", x, dims=[0, 2])
    yield case("Squeeze", examples_at(1, 1, 1, 5), dims=[0])
    yield case("Reshape", batch(6, 4), outputs=2, unread=1, shape=[-1, 4])
    yield case("Reshape", batch(6, 4), outputs=2, unread=1, shape=[-1, 2, 12])
    yield case("Transpose", batch(3, 4), axes=[2, 0, 1])
    yield case("Concat", x, batch(4, 2), outputs=2, unread=1, axis=2)
    yield case("Concat", x, x, outputs=2, unread=1, axis=0, add_axis=1)
    yield case("DepthConcat", batch(3, 4, 4), batch(2, 4, 4), outputs=2, unread=1)
    yield case("Split", x, outputs=2, axis=2)
    yield case("Slice", x, starts=[0, 1, 2], ends=[-1, 3, -1])
    yield case("Expand", batch(1, 6), constant_values([1, 4, 1], np.int64))
    yield case("ConstantFill", x, value=2.0)
    yield case("Gather", constant(9, 5), batch(4, draw=integers(0, 9)))
    yield case("Gather", x, shared(3, draw=integers(0, 6)), axis=2)
    yield case("Gather", examples_at(2, 7, 2, 1), shared(3, 2, draw=integers(0, 7)))
    yield case("BatchGather", x, shared(3, draw=integers(0, 4)))
    yield case("Where", batch(4, draw=integers(0, 2, np.bool_)), batch(4), batch(4))
    yield case("Cast", x, to="float64")
    yield case("Logit", batch(5, draw=positive), eps=0.01)
    yield case("FusedElementwise", x, constant(6), post_ops=["add:1", "tanh"])
    yield case("FusedExpression", x, constant(6), nodes=["tanh x0", "multiply %0 x1", "add %1 x0"])
    rows = ["row_max x0", "subtract x0 %0", "exp %1", "row_sum %2", "divide %2 %3", "multiply %4 x1"]
    yield case("FusedRows", x, constant(6), nodes=rows)
    yield case("FusedRows", x, batch(4, 1), nodes=rows)


def quantized() -> Iterator[Case]:
    """Integers that stand for other numbers."""
    scale, zero = constant_values(np.float32(0.02)), constant_values(np.uint8(7))
    yield case("QuantizeLinear", batch(4, 5), scale, zero)
    yield case("DequantizeLinear", batch(4, 5, draw=UINT8), scale, zero)
    x, w = batch(300, draw=UINT8), constant(100, 300, draw=INT8)
    yield case("QuantFC", x, w, scale, constant(100, draw=integers(-99, 99, np.int32)), bias=1, x_scale=0.5)
    yield case("AddFixedPoint", x, x, a_scale=0.5, b_scale=0.25, y_scale=0.5)
    yield case("QuantAdd", x, x, x_scale=0.5, add_scale=0.25, post_ops=["add:1"])
    yield case("MatMulInteger", x, constant(300, 40, draw=INT8))
    yield case("MatMulInteger", batch(4, 30, draw=UINT8), batch(30, 5, draw=INT8), constant_values(np.uint8(9)))


def attention() -> Iterator[Case]:
    """Batch, heads, sequence, features of a head."""
    q = batch(4, 16, 32)
    yield case("Attention", q, q, q)
    yield case("Attention", q, q, q, is_causal=1)
    yield case("Attention", q, q, q, batch(1, 16, 16), mask=1)
    yield case("Attention", q, q, q, constant(16, 18), batch(4, 2, 32), batch(4, 2, 32), outputs=3, mask=1, cache=1)
    yield case("Attention", q, q, q, batch(draw=integers(1, 17)), lengths=1)
    yield case("FusedAttention", q, q, q, batch(1, 16, 16), bias=1)
    new, numbers = batch(4, 1, 32), (batch(draw=cache_numbers), batch(draw=integers(0, 21)))
    yield case("CachedAttention", new, new, new, *numbers, batch(1, 1, 64), bias=1, keys="k", values="v")
    yield case("OpenCaches", *numbers)
    yield case("CloseCaches", numbers[1], new, outputs=0)
    lying, order = batch(16, 4, 32), [0, 2, 1, 3]
    yield case("FusedAttention", lying, lying, lying, q_axes=order, k_axes=order, v_axes=order, y_axes=order)


_caches: deque[Caches] = deque(maxlen=512)
"""Those that are still read: examples are drawn once, and run behind whatever else draws."""


def cache_numbers(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A cache of 20 positions."""
    _caches.append(Caches())
    keys, values = (random.standard_normal((1, 4, 20, 32), np.float32) for _ in range(2))
    _caches[-1].take({"k": keys}, {"v": values}, 20, 64)
    return np.full(shape, _caches[-1].number)


def images_in_parts() -> Iterator[Case]:
    """Blocks and regions of images, and layers with filters for each place."""
    yield case("LC", batch(3, 6, 6), constant(4, 4, 8, 3, 3, 3), constant(4, 4, 8), kernel=3)
    yield case("LC1D", batch(3, 6), constant(4, 8, 3, 3), kernel=3)
    yield case("LC2D", batch(3, 6, 6), constant(4, 4, 8, 3, 3, 3), kernel=3)
    yield case("LC3D", batch(2, 3, 3, 3), constant(2, 2, 2, 4, 2, 2, 2, 2), kernel=2)
    yield case("SpaceToBatch", batch(3, 4, 6), pad=1)
    yield case("BatchToSpace", batch(3, 4, 6), block_size=1, pad=1)
    for rank in (1, 2, 3):
        yield case(f"MaxPoolWithIndex{rank}D", batch(3, *[6] * rank), outputs=2, kernel=3, stride=2)
    yield case("MaxPoolWithIndex", batch(3, 6, 6), outputs=2, kernel=3)
    image, numbers = shared(2, 3, 9, 9), batch(draw=integers(0, 2))
    yield case("RoiAlign", image, batch(4, draw=positive), numbers, output_height=2, output_width=3)
    yield case("MaxRoiPool", shared(1, 3, 9, 9), batch(5, draw=_no_numbers), pooled_shape=[2, 2])


def _no_numbers(_random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape, np.float32)


def with_nets() -> Iterator[Case]:
    """Operators that run nets, on inputs x and what the nets capture under the name w."""
    x, w, yes = batch(300), constant(300, 300), constant_values(True)
    by_w = _net([op("MatMul", ["x", "w"], ["y"])], [], ["y"])
    other = _net([op("Relu", ["x"], ["y"])], [], ["y"])
    yield case("If", yes, x, w, then_net=by_w, else_net=other, captured=["x", "w"])
    step = [op("MatMul", ["s", "w"], ["m"]), op("Tanh", ["m"], ["t"]), op("Sum", ["s", "t"], ["v"])]
    again = _net(step, ["i", "on", "s"], ["on", "v", "t"])
    count = constant_values(3, np.int64)
    yield case("Loop", count, x, w, outputs=2, loop_net=again, trip_count=1, captured=["w"])
    steps = _net([op("Add", ["s", "r"], ["a"]), *step[:-1], op("Add", ["a", "t"], ["v"])], ["s", "r"], ["v", "t"])
    scanned: dict[str, Any] = {"scan_net": steps, "num_scan_inputs": 1, "captured": ["w"]}
    yield case("Scan", x, examples_at(1, 4, 1, 300), w, outputs=2, **scanned)
    yield case("Scan", x, batch(4, 300), w, outputs=2, **scanned, scan_input_axes=[1], scan_output_axes=[-1])


def of_the_application() -> Iterator[Case]:
    """A function in Python, said to be of one row at a time."""
    types: dict[str, Any] = {"takes": ["float32[N, 7]", "float32[N, 1]"], "gives": ["float32[N, 2]"], "results": ["y"]}
    step = {"function": MEANS.token, "inferred": 1, "row_wise": 1}
    yield case("Python", batch(7), batch(1), **types, **step)


def _net(operators: list[OperatorDef], given: list[str], results: list[str]) -> NetDef:
    captured = {name for one in operators for name in one.input} & {"x", "w"}
    return NetDef(name="net", op=operators, external_input=[*given, *sorted(captured)], external_output=results)


def operator_cases() -> list[Case]:
    """All of them."""
    groups = (
        of_formulas(), products(), convolutions("NCHW"), convolutions("NHWC"), other_convolutions(), poolings(),
        normalizations(), reductions(), recurrent_layers(), along_other_axes(), moved(), quantized(), attention(),
        images_in_parts(), with_nets(), of_the_application(), gradient_cases(), table_cases(),
    )  # fmt: skip
    return [one for group in groups for one in group]
