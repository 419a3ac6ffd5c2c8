"""Cases of every gradient operator that says how it passes rows on.

Gradients of weights, which are sums over all rows, are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.arguments import ArgumentValue
from dagexec.core.registry import registered_operators, schema_of
from dagexec.core.rows import elementwise
from tests.rows.case import Case, batch, case, constant, examples_at, integers, normal, positive, shared

Shape = tuple[int, ...]

CONVOLUTIONS: Sequence[tuple[tuple[int, int, int, int], dict[str, ArgumentValue]]] = (
    ((32, 48, 1, 9), {}),
    ((32, 32, 1, 9), {"stride": 2}),
    ((3, 16, 3, 15), {"pad": 1}),
    ((32, 32, 3, 9), {"pad": 1}),
    ((16, 32, 3, 13), {"pad": 1, "stride": 2}),
    ((12, 20, 5, 12), {}),
    ((32, 32, 3, 9), {"pad": 1, "group": 32}),
    ((16, 16, 3, 9), {"pad": 1, "group": 4}),
)
"""Channels, filters, kernel and size of the image; arguments."""


def of_one_tensor() -> Iterator[Case]:
    """Element by element."""
    for name in registered_operators():
        if name.endswith("Gradient") and schema_of(name).rows is elementwise:
            yield case(name, *[batch(37, draw=positive)] * len(schema_of(name).input_names))
    yield case("DropoutGrad", batch(37), batch(37, draw=integers(0, 2, np.bool_)), is_test=0, ratio=0.5)


def of_operands() -> Iterator[Case]:
    """Sums over what was stretched within a row."""
    for name in ("Add", "Sub", "Mul", "Div"):
        dy = batch(24, 7, 7)
        quotient = [dy] if name == "Div" else []
        for b in (dy, batch(24, 1, 1, draw=positive), batch(1, 7, 7, draw=positive), batch(1, 1, 7, draw=positive)):
            yield case(f"{name}Gradient", dy, dy, b, *quotient, outputs=2)
        if not quotient:
            yield case(f"{name}Gradient", batch(300), batch(1), batch(300), outputs=2)
        yield case(f"{name}Gradient", dy, dy, constant(24, 1, 1, draw=positive), *quotient, outputs=2, unread=1)
    yield case("PowGradient", batch(30), batch(30, draw=positive), exponent=2.5)
    yield case("WhereGradient", batch(9, draw=integers(0, 2, np.bool_)), *[batch(9)] * 3, outputs=2)
    for name in ("Max", "Min"):
        yield case(f"{name}Gradient", *[batch(9)] * 4, outputs=2)
    yield case("MeanGradient", *[batch(9)] * 3, outputs=2)


def of_groups() -> Iterator[Case]:
    """Of what normalizes within a row."""
    for name in ("SoftmaxGradient", "LogSoftmaxGradient"):
        for shape in ((7,), (10,), (300,), (1000,), (5, 130)):
            yield case(name, batch(*shape, draw=positive), batch(*shape))
        yield case(name, batch(6, 5, draw=positive), batch(6, 5), axis=1, single_axis=1)
    yield case("GroupSpatialSoftmaxGradient", *[batch(6, 4, 5)] * 2, num_classes=3)
    yield case("IntegralImageGradient", batch(3, 4, 5), batch(3, 5, 6))
    x = batch(7, 100)
    yield case("LayerNormGradient", x, x, axis=2)
    yield case("LayerNormGradient", x, x, constant(100), constant(100), outputs=3, unread=2, axis=2)
    statistics = batch(7, 1), batch(7, 1, draw=positive)
    yield case("LayerNormGradient", x, x, *statistics, x, constant(100), outputs=3, unread=2, axis=2)
    x, scale = batch(8, 9, 9), constant(8)
    yield case("InstanceNormGradient", x, scale, scale, x, outputs=3, unread=2)
    yield case("GroupNormGradient", x, x, scale, scale, outputs=3, unread=2, group=4)
    yield case("NormalizeGradient", batch(5, 6), batch(5, 6))
    yield case("AffineChannelGradient", batch(4, 3, 3), constant(4))
    yield case("AffineChannelGradient", batch(4, 3, 3), batch(4, 3, 3), constant(4), outputs=3, unread=2)
    yield case("ElementwiseLinearGradient", batch(6), batch(6), constant(6), outputs=3, unread=2)


def of_products() -> Iterator[Case]:
    """The gradient of X, and those of both operands where each row has its own."""
    for inner, units in ((64, 64), (300, 10), (300, 100), (1024, 1000)):
        for made in (constant, shared)[: 1 if inner > 300 else 2]:
            given: dict[str, ArgumentValue] = {"wanted": ["input"]}
            yield case("FCGradient", batch(inner), made(units, inner), batch(units), **given)
            yield case("FCTransposedGradient", batch(inner), made(inner, units), batch(units), **given)
    yield case("FCGradient", batch(5, 64), constant(32, 64), batch(5, 32), axis=2, wanted=["input"])
    a, b, dy = batch(4, 16, 32), batch(4, 32, 20), batch(4, 16, 20)
    yield case("BatchMatMulGradient", a, b, dy, outputs=2, broadcast=1)
    yield case("BatchMatMulGradient", a, constant(1, 4, 32, 20), dy, broadcast=1, wanted=["A"])
    yield case("BatchMatMulGradient", batch(16, 64), constant(64, 48), batch(16, 48), outputs=2, unread=1, broadcast=1)


def of_images() -> Iterator[Case]:
    """Windows and what moves pixels, for images in both orders."""
    for order in ("NCHW", "NHWC"):

        def image(*shape: int, order: str = order) -> Shape:
            return shape if order == "NCHW" else (*shape[1:], shape[0])

        x, y = batch(*image(16, 13, 13)), batch(*image(16, 7, 7))
        for name in ("MaxPool", "AveragePool", "LpPool"):
            yield case(f"{name}Gradient", x, y, y, kernel=3, stride=2, pad=1, order=order)
            yield case(f"{name}2DGradient", x, y, y, kernel=3, stride=2, pad=1, order=order)
        for name in ("MaxPoolWithIndexGradient", "MaxPoolWithIndex2DGradient"):
            mask = batch(*image(16, 7, 7), draw=integers(0, 169, np.int32))
            yield case(name, x, y, mask, kernel=3, stride=2, pad=1, order=order)
        yield case("LRNGradient", x, x, x, size=5, alpha=1e-4, beta=0.75, order=order)
        yield case("PReluGradient", x, x, x, constant(16), outputs=2, unread=1, order=order)
        yield case("ChannelShuffleGradient", x, group=4, order=order)
        enlarged: dict[str, ArgumentValue] = {"height_scale": 2.0, "width_scale": 2.0, "order": order}
        yield case("ResizeNearestGradient", batch(*image(3, 8, 6)), batch(*image(3, 4, 3)), **enlarged)
        for (channels, count, kernel, size), arguments in CONVOLUTIONS:
            pad, stride, group = (int(str(arguments.get(key, least))) for key, least in _LEAST.items())
            out = (size + 2 * pad - kernel) // stride + 1
            x, dy = batch(*image(channels, size, size)), batch(*image(count, out, out))
            given = {"kernel": kernel, "order": order, **arguments, "wanted": ["input"]}
            w = constant(count, *image(channels // group, kernel, kernel))
            yield case("ConvGradient", x, w, dy, **given)
            yield case("ConvTransposeGradient", dy, w, x, **given)
    for rank in (1, 3):
        x, y = batch(8, *[6] * rank), batch(8, *[4] * rank)
        for name in ("MaxPool", "AveragePool", "LpPool"):
            yield case(f"{name}{rank}DGradient", x, y, y, kernels=[3] * rank)
        mask = batch(8, *[4] * rank, draw=integers(0, 6**rank, np.int32))
        yield case(f"MaxPoolWithIndex{rank}DGradient", x, y, mask, kernels=[3] * rank)
    for rank in (1, 2, 3):
        x, y, w = batch(4, *[6] * rank), batch(6, *[4] * rank), constant(6, 4, *[3] * rank)
        window: dict[str, ArgumentValue] = {"kernels": [3] * rank, "wanted": ["input"]}
        yield case(f"Conv{rank}DGradient", x, w, y, **window)
        yield case(f"ConvTranspose{rank}DGradient", y, w, x, **window)
    yield case("UpsampleBilinearGradient", batch(3, 8, 6), batch(3, 4, 3), height_scale=2.0, width_scale=2.0)


_LEAST = {"pad": 0, "stride": 1, "group": 1}


def of_reductions() -> Iterator[Case]:
    """Of axes that rows are not on."""
    x = batch(5, 6, draw=positive)
    for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2"):
        for axes, keepdims in (([1], 1), ([2], 0), ([1, 2], 0)):
            kept = [size for axis, size in enumerate((5, 6), 1) if axis not in axes]
            y = batch(*([1 if axis in axes else size for axis, size in enumerate((5, 6), 1)] if keepdims else kept))
            yield case(f"Reduce{name}Gradient", y, x, y, axes=axes, keepdims=keepdims)
    for name in ("Sum", "Mean", "Max"):
        read = 2 if name == "Max" else 1
        back, front = [batch()] * read, [examples_at(0, 1, 6)] * read
        yield case(f"ReduceBack{name}Gradient", back[0], x, *back[1:], num_reduce_dim=2)
        yield case(f"ReduceFront{name}Gradient", front[0], examples_at(1, 5, 1, 6), *front[1:], num_reduce_dim=1)
    yield case("RowwiseMaxGradient", x, batch(5), batch(5))
    yield case("ColwiseMaxGradient", x, batch(6), batch(6))


def of_losses() -> Iterator[Case]:
    """A number a row, from which each row has its gradient."""
    x, z = batch(40, draw=positive), batch()
    for name in ("SquaredL2Distance", "L1Distance", "DotProduct", "CosineSimilarity"):
        yield case(name, x, batch(40))
        yield case(f"{name}Gradient", x, batch(40), z, outputs=2)
    for name, count in (("SigmoidCrossEntropyWithLogits", 2), ("WeightedSigmoidCrossEntropyWithLogits", 3)):
        yield case(name, *[x] * count)
        yield case(f"{name}Gradient", z, *[x] * count)
    label = batch(draw=integers(0, 40, np.int32))
    yield case("CrossEntropy", x, x)
    yield case("CrossEntropyGradient", x, x, z)
    yield case("LabelCrossEntropy", x, label)
    yield case("LabelCrossEntropyGradient", x, label, z)
    yield case("UpsampleBilinear", batch(3, 4, 3, draw=normal), height_scale=2.0, width_scale=2.0)


def gradient_cases() -> list[Case]:
    """All of them."""
    groups = (of_one_tensor, of_operands, of_groups, of_products, of_images, of_reductions, of_losses)
    return [one for group in groups for one in group()]
