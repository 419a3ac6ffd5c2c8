"""Random small nets of what passes rewrite and fuse and engines compute by formulas of their own.

A seed decides everything. Blobs have one of three kinds: images (C, H, W), matrices (F,) and sequences (T, F), each
with a batch before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dagexec import InputInfo, Model, NetDef, OperatorDef, op
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32

Array = npt.NDArray[np.float32]
Shape = tuple[int, ...]

ROWS = (1, 2, 3, 5)
SPECIAL = (math.nan, math.inf, -math.inf, 1e-42, -1e-42, 0.0, -0.0)
HUGE = (1e30, -1e30, 3e38, -3e38)
"""Fed to nets alone in which nothing is computed in another order: whether that overflows depends on it."""

ACTIVATIONS: Sequence[tuple[str, dict[str, ArgumentValue]]] = (
    *((name, {}) for name in (
        "Relu", "Sigmoid", "Tanh", "Selu", "HardSigmoid", "HardSwish", "Swish", "Mish", "Gelu", "Softplus", "Softsign",
        "Abs", "Sqr", "Sqrt", "Exp", "Log", "Reciprocal", "Rsqrt", "Negative", "ReluN", "Erf", "Cube", "Round", "Floor",
        "Ceil", "Sign", "Sin", "Cos", "Tan", "Asin", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Cbrt",
    )),
    ("Elu", {"alpha": 0.7}), ("LeakyRelu", {"alpha": 0.1}), ("Gelu", {"fast_gelu": 1}), ("Celu", {"alpha": 0.5}),
    ("Clip", {"min": -1.0, "max": 1.5}), ("Clip", {"min": 0.0, "max": 6.0}), ("ThresholdedRelu", {"alpha": 0.5}),
    ("Scale", {"scale": 0.5}), *(("Pow", {"exponent": value}) for value in (2.0, 3.0, 0.5, -0.5, -1.0, 1.7)),
)  # fmt: skip
"""Operators of one tensor, and arguments."""

BROKEN = frozenset(
    {"Sqrt", "Log", "Reciprocal", "Rsqrt", "Pow", "Sign", "Tan", "Round", "Floor", "Ceil", "Atanh", "Acosh", "Asin"}
)
"""Applied to inputs alone: what is computed may be beside a step or a pole of theirs, or on it."""


class Builder:
    """A net in the making."""

    def __init__(self, seed: int, layers: int | None = None) -> None:
        self._random = random.Random(seed)
        self._values = np.random.default_rng(seed)
        self._blobs: dict[str, Shape] = {}
        self._operators: list[OperatorDef] = []
        self._parameters: dict[str, Array] = {}
        self._inputs: dict[str, Shape] = {}
        self._layers = self._random.choice([1, 1, 2, 2, 3, 4, 6]) if layers is None else layers
        self._free = self._random.random() < 0.7
        self.rows = self._random.choice(ROWS)
        self._is_reordered = False

    def build(self) -> Model:
        """Draw it."""
        kinds = [self._image_shape(), self._matrix_shape(), self._sequence_shape()]
        shape = self._random.choice(kinds)
        for number in range(self._random.choice([1, 1, 2])):
            self._inputs[f"x{number}"] = self._blobs[f"x{number}"] = shape
        for _ in range(self._layers):
            self._layer()
        read = {name for one in self._operators for name in one.input}
        written = [name for one in self._operators for name in one.output]
        outputs = [name for name in written if name not in read or self._random.random() < 0.1]
        outputs = [name for name in outputs if name in self._blobs]
        net = NetDef(name="nan", op=self._operators, external_input=[*self._inputs, *self._parameters])
        first = None if self._free else self.rows
        infos = {name: InputInfo(FLOAT32, (first, *shape)) for name, shape in self._inputs.items()}
        return Model("nan", net, None, self._parameters, infos, tuple(outputs))

    def feeds(self) -> dict[str, Array]:
        """Normal numbers, with some at the ends among them.

        oneDNN's maximum of a window of nothing but -infinity is the least number: nothing is infinite there.
        """
        pooled = any(one.type == "MaxPool" for one in self._operators)
        special = [value for value in SPECIAL if not (pooled and math.isinf(value))]
        chosen = self._random.sample(special, self._random.randint(1, 3))
        if not self._is_reordered and self._random.random() < 0.5:
            chosen += self._random.sample(HUGE, 2)
        share = self._random.choice([0.005, 0.02, 0.3])
        found = {}
        for name, shape in self._inputs.items():
            array = self._values.standard_normal((self.rows, *shape), np.float32)
            if self._random.random() < 0.3:
                array *= np.float32(10)
            array.flat[self._values.integers(array.size)] = chosen[0]
            places = self._values.random(array.shape) < share
            array[places] = self._values.choice(np.array(chosen, np.float32), int(places.sum()))
            found[name] = array
        return found

    def _image_shape(self) -> Shape:
        channels = self._random.choice([1, 3, 4, 8, 16, 24, 32])
        return (channels, self._random.choice([5, 6, 8, 9, 14]), self._random.choice([5, 6, 7, 8, 16]))

    def _matrix_shape(self) -> Shape:
        return (self._random.choice([1, 3, 7, 10, 16, 33, 64]),)

    def _sequence_shape(self) -> Shape:
        return (self._random.choice([1, 3, 5, 8, 16]), self._random.choice([8, 16, 20, 32]))

    def _layer(self) -> None:
        names = list(self._blobs)
        x = names[-1] if self._random.random() < 0.75 else self._random.choice(names)
        rank = len(self._blobs[x])
        own = {3: self._of_images, 1: self._of_matrices, 2: self._of_sequences}[rank]()
        makers: Sequence[Callable[[str], None]] = [*own, *self._of_any()]
        self._random.choice(makers)(x)

    def _of_any(self) -> Sequence[Callable[[str], None]]:
        return [self._activation, self._activation, self._spelled, self._spelled, self._binary, self._constant,
                self._several, self._reduction, self._normalization, self._softmax, self._chain]  # fmt: skip

    def _of_images(self) -> Sequence[Callable[[str], None]]:
        return [*[self._convolution] * 5, self._transposed, self._pooling, self._pooling, self._batch_norm,
                self._resize, self._image_normalization, self._concat, self._gate, self._moving, self._residual,
                self._flatten]  # fmt: skip

    def _of_matrices(self) -> Sequence[Callable[[str], None]]:
        return [self._product, self._product, self._product, self._root_mean_square]

    def _of_sequences(self) -> Sequence[Callable[[str], None]]:
        return [self._product, self._product, self._recurrent, self._attention, self._attention,
                self._root_mean_square]  # fmt: skip

    def _fresh(self) -> str:
        return f"t{len(self._operators)}"

    def _parameter(self, *shape: int, scale: float = 1.0, positive: bool = False) -> str:
        array = (self._values.standard_normal(shape) * scale).astype(np.float32)
        if positive:
            array = np.abs(array) + np.float32(0.1)
        elif self._random.random() < 0.1 and array.size:
            array.flat[self._values.integers(array.size)] = self._random.choice([0.0, -0.0, 1.0])
        name = f"p{len(self._parameters)}"
        self._parameters[name] = array
        return name

    def _add(self, op_type: str, inputs: Sequence[str], made: Shape | None = None, outputs: int = 1,
             **arguments: ArgumentValue) -> str:  # fmt: skip
        name = self._fresh()
        results = [name, *[f"{name}_{number}" for number in range(1, outputs)]]
        self._operators.append(op(op_type, list(inputs), results, **arguments))
        if made is not None:
            self._blobs[name] = made
        return name

    def _like(self, x: str) -> str:
        fitting = [name for name, shape in self._blobs.items() if shape == self._blobs[x]]
        return self._random.choice(fitting)

    def _activation(self, x: str) -> None:
        kind, arguments = self._random.choice(ACTIVATIONS)
        while kind in BROKEN and x not in self._inputs:
            kind, arguments = self._random.choice(ACTIVATIONS)
        self._is_reordered |= kind == "Celu"
        self._add(kind, [x], self._blobs[x], **arguments)

    def _chain(self, x: str) -> None:
        for _ in range(self._random.randint(2, 4)):
            self._random.choice([self._activation, self._constant, self._binary])(x)
            x = list(self._blobs)[-1]

    def _number(self, value: float) -> str:
        name = f"p{len(self._parameters)}"
        self._parameters[name] = np.array(value, np.float32)
        return name

    def _spelled(self, x: str) -> None:
        """An activation as exporters write it."""
        self._is_reordered = True
        shape = self._blobs[x]
        kind = self._random.choice(["swish", "gelu", "gelu by tanh", "hardswish", "mish", "hardswish2", "quick gelu"])
        if kind == "swish":
            gate = self._add("Sigmoid", [x])
        elif kind == "quick gelu":
            gate = self._add("Sigmoid", [self._add("Mul", [x, self._number(1.702)])])
        elif kind == "gelu":
            inner = self._add("Erf", [self._add("Div", [x, self._number(math.sqrt(2))])])
            wide = self._add("Add", [inner, self._number(1)])
            if self._random.random() < 0.5:
                self._add("Mul", [self._add("Mul", [x, wide]), self._number(0.5)], shape)
            else:
                self._add("Mul", [self._add("Mul", [x, self._number(0.5)]), wide], shape)
            return
        elif kind == "gelu by tanh":
            cube = self._add("Pow", [x, self._number(3)])
            inner = self._add("Add", [x, self._add("Mul", [cube, self._number(0.044715)])])
            tanh = self._add("Tanh", [self._add("Mul", [inner, self._number(math.sqrt(2 / math.pi))])])
            self._add(
                "Mul", [self._add("Mul", [x, self._number(0.5)]), self._add("Add", [tanh, self._number(1)])], shape
            )
            return
        elif kind == "hardswish":
            gate = self._add("HardSigmoid", [x], alpha=1 / 6, beta=0.5)
        elif kind == "hardswish2":
            clip = self._add("Clip", [self._add("Add", [x, self._number(3)])], min=0.0, max=6.0)
            self._add("Div", [self._add("Mul", [x, clip]), self._number(6)], shape)
            return
        else:
            gate = self._add("Tanh", [self._add("Softplus", [x])])
        self._add("Mul", [x, gate] if self._random.random() < 0.5 else [gate, x], shape)

    def _binary(self, x: str) -> None:
        kind = self._random.choice(["Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean"])
        self._add(kind, [x, self._like(x)], self._blobs[x])

    def _several(self, x: str) -> None:
        self._is_reordered = True
        kind = self._random.choice(["Sum", "Mean", "Max", "Min"])
        self._add(kind, [x, self._like(x), self._like(x)], self._blobs[x])

    def _constant(self, x: str) -> None:
        shape = self._blobs[x]
        kind = self._random.choice(["Add", "Sub", "Mul", "Div", "Max", "Min"])
        if self._random.random() < 0.4:
            least = [0.0] if kind != "Div" or x in self._inputs else []
            other = self._number(self._random.choice([*least, 1.0, 2.0, 0.5, -1.0, 3.0]))
        elif len(shape) == 3:
            other = self._parameter(shape[0], 1, 1, positive=kind == "Div")
        else:
            other = self._parameter(shape[-1], positive=kind == "Div")
        swapped = kind in ("Add", "Mul", "Sub") and self._random.random() < 0.2
        self._add(kind, [other, x] if swapped else [x, other], shape)

    def _reduction(self, x: str) -> None:
        self._is_reordered = True
        shape = self._blobs[x]
        kind = self._random.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceL1",
                                    "ReduceLogSumExp", "ReduceProd"])  # fmt: skip
        axis = self._random.randint(1, len(shape))
        axes = [2, 3] if len(shape) == 3 and self._random.random() < 0.6 else [axis]
        kept = tuple(1 if index + 1 in axes else size for index, size in enumerate(shape))
        if len(shape) == 3 and axes == [2, 3] and self._random.random() < 0.5:
            self._add(kind, [x], (shape[0],), axes=axes, keepdims=0)
            return
        reduced = self._add(kind, [x], kept, axes=axes, keepdims=1)
        if self._random.random() < 0.5:
            self._add(self._random.choice(["Sub", "Div", "Mul", "Add"]), [x, reduced], shape)

    def _normalization(self, x: str) -> None:
        self._is_reordered = True
        shape = self._blobs[x]
        axis = self._random.randint(1, len(shape))
        size = shape[axis - 1 :]
        if self._random.random() < 0.7:
            inputs = [x, self._parameter(*size), self._parameter(*size)]
            self._add("LayerNorm", inputs, shape, outputs=3, axis=axis, elementwise_affine=1)
        else:
            self._add("LayerNorm", [x], shape, outputs=3, axis=axis)

    def _softmax(self, x: str) -> None:
        self._is_reordered = True
        kind = self._random.choice(["Softmax", "Softmax", "LogSoftmax"])
        axis = self._random.randint(1, len(self._blobs[x]))
        self._add(kind, [x], self._blobs[x], axis=axis, single_axis=self._random.randint(0, 1))

    def _after_layer(self, y: str) -> None:
        """What follows a layer more often than not: batch normalization, an activation, a sum."""
        shape = self._blobs[y]
        if len(shape) == 3 and self._random.random() < 0.4:
            self._batch_norm(y)
            y = list(self._blobs)[-1]
        for _ in range(self._random.choice([0, 1, 1, 2])):
            step = self._random.choice([self._activation, self._activation, self._spelled, self._constant,
                                        self._binary])  # fmt: skip
            step(y)
            y = list(self._blobs)[-1]

    def _convolution(self, x: str) -> None:
        self._is_reordered = True
        channels, height, width = self._blobs[x]
        kernel = self._random.choice([1, 1, 3, 3, 3, 5])
        group = self._random.choice([one for one in (1, 1, 1, 2, 4, channels) if channels % one == 0])
        filters = group * self._random.choice([1, 2, 4, 8, 16]) if group > 1 else self._random.choice([1, 4, 8, 16, 32])
        if group == channels and self._random.random() < 0.7:
            filters = channels
        if filters > 64:
            filters = group
        stride, dilation = self._random.choice([1, 1, 1, 2]), self._random.choice([1, 1, 1, 2])
        pad = self._random.choice([0, kernel // 2, kernel // 2, kernel // 2 * dilation])
        reach = dilation * (kernel - 1) + 1
        sizes = [(size + 2 * pad - reach) // stride + 1 for size in (height, width)]
        if min(sizes) < 1 or min(height, width) + 2 * pad < reach:
            return
        inputs = [x, self._parameter(filters, channels // group, kernel, kernel, scale=0.5)]
        if self._random.random() < 0.6:
            inputs.append(self._parameter(filters))
        y = self._add("Conv", inputs, (filters, sizes[0], sizes[1]), kernel=kernel, pad=pad, stride=stride,
                      dilation=dilation, group=group)  # fmt: skip
        self._after_layer(y)

    def _transposed(self, x: str) -> None:
        self._is_reordered = True
        channels, height, width = self._blobs[x]
        kernel, stride, filters = (
            self._random.choice([2, 3, 4]),
            self._random.choice([1, 2]),
            self._random.choice([1, 4, 16]),
        )
        inputs = [x, self._parameter(channels, filters, kernel, kernel, scale=0.5), self._parameter(filters)]
        sizes = [(size - 1) * stride + kernel for size in (height, width)]
        y = self._add("ConvTranspose", inputs, (filters, sizes[0], sizes[1]), kernel=kernel, stride=stride)
        self._after_layer(y)

    def _pooling(self, x: str) -> None:
        channels, height, width = self._blobs[x]
        kind = self._random.choice(["MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool"])
        self._is_reordered |= kind != "MaxPool"
        if self._random.random() < 0.3:
            self._add(kind, [x], (channels, 1, 1), global_pooling=1)
            return
        kernel, stride = self._random.choice([2, 3]), self._random.choice([1, 2])
        pad = self._random.choice([0, 1])
        sizes = [(size + 2 * pad - kernel) // stride + 1 for size in (height, width)]
        if min(sizes) < 1:
            return
        self._add(kind, [x], (channels, sizes[0], sizes[1]), kernel=kernel, stride=stride, pad=pad)

    def _batch_norm(self, x: str) -> None:
        self._is_reordered = True
        count = self._blobs[x][0]
        statistics = [self._parameter(count) for _ in range(3)] + [self._parameter(count, positive=True)]
        self._add("SpatialBN", [x, *statistics], self._blobs[x], is_test=1)

    def _image_normalization(self, x: str) -> None:
        self._is_reordered = True
        count, shape = self._blobs[x][0], self._blobs[x]
        kind = self._random.choice(["InstanceNorm", "GroupNorm", "LRN", "PRelu", "Normalize"])
        if kind == "InstanceNorm":
            self._add(kind, [x, self._parameter(count), self._parameter(count)], shape)
        elif kind == "GroupNorm":
            group = self._random.choice([one for one in (1, 2, 4, 8) if count % one == 0])
            self._add(kind, [x, self._parameter(count), self._parameter(count)], shape, group=group)
        elif kind == "LRN":
            self._add(kind, [x], shape, size=5, alpha=1e-4, beta=0.75)
        elif kind == "PRelu":
            self._add(kind, [x, self._parameter(count)], shape)
        else:
            self._add(kind, [x], shape, axis=1)

    def _resize(self, x: str) -> None:
        channels, height, width = self._blobs[x]
        if self._random.random() < 0.4:
            self._add("ResizeNearest", [x], (channels, 2 * height, 2 * width), width_scale=2.0, height_scale=2.0)
            return
        self._is_reordered = True
        mode = self._random.choice(["nearest", "linear", "linear", "cubic"])
        sizes = [self._random.choice([height // 2, height + 1, 2 * height]), self._random.choice([width, 2 * width])]
        arguments: dict[str, ArgumentValue] = {}
        if self._random.random() < 0.5:
            arguments["coordinates"] = "align_corners"
        self._add("Resize", [x], (channels, sizes[0], sizes[1]), mode=mode, sizes=sizes, axes=[2, 3], **arguments)

    def _concat(self, x: str) -> None:
        fitting = [name for name, shape in self._blobs.items() if len(shape) == 3 and shape[1:] == self._blobs[x][1:]]
        other = self._random.choice(fitting)
        count = self._blobs[x][0] + self._blobs[other][0]
        y = self._add("Concat", [x, other], (count, *self._blobs[x][1:]), outputs=2, axis=1)
        if count <= 64:
            self._after_layer(y)

    def _gate(self, x: str) -> None:
        """Squeeze and excitation: a factor for each channel."""
        self._is_reordered = True
        channels, shape = self._blobs[x][0], self._blobs[x]
        if self._random.random() < 0.5:
            pooled = self._add("AveragePool", [x], global_pooling=1)
        else:
            pooled = self._add("ReduceMean", [x], axes=[2, 3], keepdims=1)
        weights = self._parameter(channels, channels, 1, 1, scale=0.3)
        layer = self._add("Conv", [pooled, weights, self._parameter(channels)], kernel=1)
        gate = self._add(self._random.choice(["Sigmoid", "HardSigmoid", "Tanh"]), [layer])
        self._add("Mul", [x, gate], shape)

    def _moving(self, x: str) -> None:
        channels, height, width = self._blobs[x]
        kind = self._random.choice(["ChannelShuffle", "Dropout", "Pad", "Copy"])
        if kind == "ChannelShuffle" and channels % 4 == 0:
            self._add(kind, [x], self._blobs[x], group=4)
        elif kind == "Pad":
            self._add("PadImage", [x], (channels, height + 2, width + 2), pad=1, mode=self._random.choice(
                ["constant", "edge"]))  # fmt: skip
        else:
            self._add("Dropout", [x], self._blobs[x], is_test=1)

    def _residual(self, x: str) -> None:
        self._is_reordered = True
        channels, shape = self._blobs[x][0], self._blobs[x]
        weights = self._parameter(channels, channels, 3, 3, scale=0.3)
        y = self._add("Conv", [x, weights, self._parameter(channels)], shape, kernel=3, pad=1)
        if self._random.random() < 0.5:
            self._batch_norm(y)
            y = list(self._blobs)[-1]
        total = self._add(self._random.choice(["Add", "Sum"]), [y, x], shape)
        if self._random.random() < 0.7:
            self._activation(total)

    def _flatten(self, x: str) -> None:
        size = math.prod(self._blobs[x])
        if size <= 2048:
            self._add("Flatten", [x], (size,))

    def _product(self, x: str) -> None:
        self._is_reordered = True
        *before, inner = self._blobs[x]
        units = self._random.choice([1, 4, 10, 16, 33, 64])
        shape = (*before, units)
        kind = (
            self._random.choice(["FC", "MatMul", "Gemm"]) if not before else self._random.choice(["FC", "BatchMatMul"])
        )
        weights = [units, inner] if kind in ("FC", "Gemm") else [inner, units]
        w = self._parameter(*weights, scale=0.5)
        if kind == "FC":
            y = self._add(kind, [x, w, self._parameter(units)], shape, axis=len(before) + 1)
        elif kind == "Gemm":
            alpha, beta = self._random.choice([(1.0, 1.0), (0.5, 2.0)])
            y = self._add(kind, [x, w, self._parameter(units)], shape, trans_b=1, alpha=alpha, beta=beta)
        else:
            y = self._add(kind, [x, w], shape, **({"broadcast": 1} if before else {}))
            if self._random.random() < 0.6:
                y = self._add("Add", [y, self._parameter(units)], shape)
        self._after_layer(y)

    def _root_mean_square(self, x: str) -> None:
        self._is_reordered = True
        shape = self._blobs[x]
        if self._random.random() < 0.4:
            self._add("RootMeanSquareNorm", [x, self._parameter(shape[-1])], shape)
            return
        square = self._add("Sqr", [x]) if self._random.random() < 0.5 else self._add("Mul", [x, x])
        mean = self._add("ReduceMean", [square], axes=[len(shape)], keepdims=1)
        wide = self._add("Add", [mean, self._number(1e-6)])
        if self._random.random() < 0.5:
            y = self._add("Mul", [x, self._add("Rsqrt", [wide])], shape)
        else:
            y = self._add("Div", [x, self._add("Sqrt", [wide])], shape)
        self._add("Mul", [y, self._parameter(shape[-1])], shape)

    def _attention(self, x: str) -> None:
        self._is_reordered = True
        steps, features = self._blobs[x]
        heads = self._random.choice([1, 2, 4])
        if features % heads:
            heads = 1
        parts = []
        for _ in range(3):
            weights = [self._parameter(features, features, scale=0.3), self._parameter(features)]
            layer = self._add("FC", [x, *weights], axis=2) if self._random.random() < 0.8 else x
            split = self._add("Reshape", [layer], shape=[0, 0, heads, -1])
            parts.append(self._add("Transpose", [split], axes=[0, 2, 1, 3]))
        scores = self._add("BatchMatMul", parts[:2], broadcast=1, trans_b=1)
        if self._random.random() < 0.7:
            scores = self._add("Mul", [scores, self._number(0.4)])
        if self._random.random() < 0.4:
            mask = f"p{len(self._parameters)}"
            lowest = self._random.choice([-1e4, -math.inf])
            self._parameters[mask] = np.triu(np.full((steps, steps), lowest, np.float32), 1)
            scores = self._add("Add", [scores, mask])
        weights = self._add("Softmax", [scores], axis=-1, single_axis=1)
        mixed = self._add("BatchMatMul", [weights, parts[2]], broadcast=1)
        turned = self._add("Transpose", [mixed], axes=[0, 2, 1, 3])
        self._add("Reshape", [turned], (steps, features), shape=[0, 0, -1])

    def _recurrent(self, x: str) -> None:
        self._is_reordered = True
        steps, features = self._blobs[x]
        kind, gates = self._random.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
        hidden = self._random.choice([4, 8, 16])
        turned = self._add("Transpose", [x], axes=[1, 0, 2])
        weights = [self._parameter(1, gates * hidden, features, scale=0.3),
                   self._parameter(1, gates * hidden, hidden, scale=0.3)]  # fmt: skip
        states = self._add(kind, [turned, *weights], outputs=3 if kind == "LSTM" else 2, hidden_size=hidden)
        squeezed = self._add("Squeeze", [states], dims=[1])
        self._add("Transpose", [squeezed], (steps, hidden), axes=[1, 0, 2])
