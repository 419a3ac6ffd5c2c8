"""Small networks shaped like those of the benchmark's families, in ONNX as exporters write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.executor.decoders import CACHES, ELEMENTS, KEY_HEADS, WORDS, Writer, decoder

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
Net = tuple[onnx.ModelProto, Feeds]

_TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class _Net(Writer):
    """What layers of several families come to."""

    def number(self, value: float) -> str:
        return self.constant(value, np.float32)

    def ones(self, count: int) -> str:
        """Numbers near one."""
        return self.constant(1 + _random(count, seed=count) / 8, np.float32)

    def dense(self, x: str, inner: int, units: int) -> str:
        return self.node("Add", self.node("MatMul", x, self.weight(inner, units)), self.weight(units))

    def normalized(self, x: str, width: int) -> str:
        return self.node("LayerNormalization", x, self.ones(width), self.weight(width), axis=-1)

    def gelu(self, x: str) -> str:
        erf = self.node("Erf", self.node("Div", x, self.number(2**0.5)))
        return self.node("Mul", self.node("Mul", x, self.node("Add", erf, self.number(1))), self.number(0.5))

    def attention(self, x: str, width: int, heads: int, bias: str = "", way: str = "") -> str:
        """`bias` is added to scores; what is looked at is `way`, or x."""
        split = self.constant([0, 0, heads, width // heads])
        q, k, v = (self.node("Reshape", self.dense(one, width, width), split) for one in (x, way or x, way or x))
        q, v = (self.node("Transpose", one, perm=[0, 2, 1, 3]) for one in (q, v))
        k = self.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = self.node("Div", self.node("MatMul", q, k), self.number((width // heads) ** 0.5))
        weights = self.node("Softmax", self.node("Add", scores, bias) if bias else scores, axis=-1)
        mixed = self.node("Transpose", self.node("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self.dense(self.node("Reshape", mixed, self.constant([0, 0, width])), width, width)

    def conv(self, x: str, channels: int, filters: int, kernel: int, **arguments: Any) -> str:
        group = arguments.get("group", 1)
        rank = arguments.pop("rank", 2)
        pads = [arguments.pop("pad", kernel // 2)] * 2 * rank
        weights = self.constant(
            _random(filters, channels // group, *[kernel] * rank, seed=filters) / (channels // group * kernel) ** 0.5,
            np.float32,
        )
        return self.node("Conv", x, weights, self.weight(filters), pads=pads, **arguments)

    def done(self, results: Sequence[str], feeds: Feeds) -> Net:
        """The network that gives `results`, and what it is fed."""
        inputs = [helper.make_tensor_value_info(name, _TYPES[one.dtype], one.shape) for name, one in feeds.items()]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
        weights = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        graph = helper.make_graph(self.nodes, "net", inputs, outputs, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), feeds


def sentences() -> Net:
    """Of BERT's kind: words, positions and a mask, layers normalized behind their sums, a pooled first word."""
    net, width, words = _Net(), 48, 19
    ids = np.arange(2 * words, dtype=np.int64).reshape(2, words) % 50
    mask = np.ones((2, words), np.int64)
    mask[1, -5:] = 0
    hidden = net.node("Cast", net.node("Unsqueeze", "mask", net.constant([1, 2])), to=TensorProto.FLOAT)
    bias = net.node("Mul", net.node("Sub", net.number(1), hidden), net.number(-1e9))
    x = net.node("Add", net.node("Gather", net.weight(50, width), "ids"), net.weight(words, width))
    x = net.normalized(x, width)
    for _ in range(2):
        x = net.normalized(net.node("Add", x, net.attention(x, width, 4, bias)), width)
        x = net.normalized(net.node("Add", x, net.dense(net.gelu(net.dense(x, width, 96)), 96, width)), width)
    first = net.node("Gather", x, net.constant(0), axis=1)
    return net.done([net.node("Tanh", net.dense(first, width, width)), x], {"ids": ids, "mask": mask})


def windows() -> Net:
    """Of Swin's kind: attention within windows of an image, that are moved, and merged to half the height and width."""
    net, width, side, window = _Net(), 32, 16, 4
    count = side // window
    x = net.conv("image", 3, width, 4, strides=[4, 4], pad=0)
    x = net.node("Transpose", x, perm=[0, 2, 3, 1])
    for shift in (0, 2):
        y = net.normalized(x, width)
        if shift:
            parts = [((shift, side), (0, shift)), ((0, side - shift), (side - shift, side))]
            for axis, ends in zip((1, 2), (parts[0], parts[0]), strict=True):
                y = net.node("Concat", *(_slice(net, y, start, stop, axis) for start, stop in ends), axis=axis)
        y = net.node("Reshape", y, net.constant([-1, count, window, count, window, width]))
        y = net.node("Reshape", net.node("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), net.constant([-1, 16, width]))
        bias = net.node("Unsqueeze", net.constant(_random(4, 16, 16), np.float32), net.constant([0]))
        y = net.attention(y, width, 4, bias)
        y = net.node("Reshape", y, net.constant([-1, count, count, window, window, width]))
        y = net.node(
            "Reshape", net.node("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), net.constant([-1, side, side, width])
        )
        x = net.node("Add", x, y)
        x = net.node("Add", x, net.dense(net.gelu(net.dense(net.normalized(x, width), width, 64)), 64, width))
    corners = [
        _slice(net, _slice(net, x, down, side, 1, 2), across, side, 2, 2)
        for down, across in itertools.product((0, 1), repeat=2)
    ]
    x = net.node("MatMul", net.normalized(net.node("Concat", *corners, axis=-1), 4 * width), net.weight(4 * width, 64))
    pooled = net.node("ReduceMean", x, axes=[1, 2], keepdims=0)
    return net.done([net.dense(pooled, 64, 10)], {"image": _random(2, 3, 4 * side, 4 * side)})


def _slice(net: _Net, x: str, start: int, stop: int, axis: int, step: int = 1) -> str:
    return net.node("Slice", x, *(net.constant([number]) for number in (start, stop, axis, step)))


def across() -> Net:
    """Of XCiT's kind: attention between channels, whose queries and keys have a length of 1, and local convolutions."""
    net, width, heads, places = _Net(), 32, 4, 49
    x = net.dense("x", width, width)
    split = net.constant([0, places, 3, heads, width // heads])
    qkv = net.node("Transpose", net.node("Reshape", net.dense(x, width, 3 * width), split), perm=[2, 0, 3, 4, 1])
    q, k, v = (net.node("Gather", qkv, net.constant(number), axis=0) for number in range(3))
    lengths = [net.node("ReduceL2", one, axes=[-1], keepdims=1) for one in (q, k)]
    q, k = (net.node("Div", one, length) for one, length in zip((q, k), lengths, strict=True))
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 1, 3, 2]))
    scores = net.node("Mul", scores, net.constant(1 + _random(heads, 1, 1) / 8, np.float32))
    y = net.node("Transpose", net.node("MatMul", net.node("Softmax", scores, axis=-1), v), perm=[0, 3, 1, 2])
    x = net.node("Add", x, net.dense(net.node("Reshape", y, net.constant([0, 0, width])), width, width))
    image = net.node("Reshape", net.node("Transpose", x, perm=[0, 2, 1]), net.constant([0, width, 7, 7]))
    image = net.gelu(net.conv(image, width, width, 3, group=width))
    return net.done([net.conv(image, width, width, 3, group=width)], {"x": _random(2, places, width)})


def writing() -> Net:
    """A decoder that goes on behind 7 words."""
    feeds: Feeds = {name: _random(2, KEY_HEADS, 7, ELEMENTS, seed=n) for n, name in enumerate(CACHES)}
    ids = np.arange(6, dtype=np.int64).reshape(2, 3) % WORDS
    return decoder(2, masked=True), {"ids": ids, "attention_mask": np.ones((2, 10), np.int64), **feeds}


def turning() -> Net:
    """Of Llama's kind, over a whole text: root mean squares, positions as rotations, a gate, and no biases."""
    net, width, heads, words = _Net(), 48, 4, 11
    size = width // heads
    angles = np.outer(np.arange(words), 100.0 ** -(np.arange(size // 2) / size))
    cos, sin = (net.constant(np.tile(f(angles), 2), np.float32) for f in (np.cos, np.sin))
    hidden = net.constant(np.triu(np.full((words, words), -1e9), 1), np.float32)
    x = net.node("Gather", net.weight(50, width), "ids")

    def scaled(x: str) -> str:
        mean = net.node("ReduceMean", net.node("Pow", x, net.number(2)), axes=[-1])
        root = net.node("Sqrt", net.node("Add", mean, net.number(1e-6)))
        return net.node("Mul", net.node("Mul", x, net.node("Reciprocal", root)), net.ones(width))

    def turned(x: str) -> str:
        halves = _slice(net, x, size // 2, size, 3), _slice(net, x, 0, size // 2, 3)
        other = net.node("Concat", net.node("Neg", halves[0]), halves[1], axis=-1)
        return net.node("Add", net.node("Mul", x, cos), net.node("Mul", other, sin))

    for _ in range(2):
        y = scaled(x)
        split = net.constant([0, 0, heads, size])
        q, k, v = (
            net.node(
                "Transpose",
                net.node("Reshape", net.node("MatMul", y, net.weight(width, width)), split),
                perm=[0, 2, 1, 3],
            )
            for _ in range(3)
        )
        scores = net.node("MatMul", turned(q), net.node("Transpose", turned(k), perm=[0, 1, 3, 2]))
        weights = net.node("Softmax", net.node("Add", net.node("Mul", scores, net.number(size**-0.5)), hidden), axis=-1)
        y = net.node("Transpose", net.node("MatMul", weights, v), perm=[0, 2, 1, 3])
        x = net.node(
            "Add", x, net.node("MatMul", net.node("Reshape", y, net.constant([0, 0, width])), net.weight(width, width))
        )
        y, gate = scaled(x), net.node("MatMul", scaled(x), net.weight(width, 80))
        gate = net.node(
            "Mul", net.node("Mul", gate, net.node("Sigmoid", gate)), net.node("MatMul", y, net.weight(width, 80))
        )
        x = net.node("Add", x, net.node("MatMul", gate, net.weight(80, width)))
    ids = np.arange(2 * words, dtype=np.int64).reshape(2, words)
    return net.done([net.node("MatMul", scaled(x), net.weight(width, 50))], {"ids": ids})


def tagging() -> Net:
    """Words through an LSTM both ways and a GRU to classes."""
    net, width, words = _Net(), 24, 13
    x = net.node("Transpose", net.node("Gather", net.weight(50, width), "ids"), perm=[1, 0, 2])
    for kind, gates, directions in (("LSTM", 4, 2), ("GRU", 3, 1)):
        weights = [
            net.constant(_random(directions, *shape) / 5, np.float32)
            for shape in ((gates * 20, width), (gates * 20, 20), (gates * 40,))
        ]
        more = {"linear_before_reset": 1} if kind == "GRU" else {"direction": "bidirectional"}
        x = net.node(kind, x, *weights, hidden_size=20, **more)
        x = net.node("Reshape", net.node("Transpose", x, perm=[0, 2, 1, 3]), net.constant([0, 0, directions * 20]))
        width = directions * 20
    ids = np.arange(2 * words, dtype=np.int64).reshape(2, words)
    return net.done([net.node("LogSoftmax", net.dense(x, width, 9), axis=-1)], {"ids": ids})


def clicks() -> Net:
    """Of DLRM's kind: tables, products of all pairs of rows, perceptrons."""
    net, width, tables = _Net(), 16, 6
    x = net.node("Relu", net.dense(net.node("Relu", net.dense("numbers", 13, 32)), 32, width))
    rows = [x]
    for table in range(tables):
        which = net.node("Gather", "categories", net.constant(table), axis=1)
        rows.append(net.node("Gather", net.weight(40, width), which))
    stack = net.node("Concat", *(net.node("Unsqueeze", row, net.constant([1])) for row in rows), axis=1)
    pairs = net.node("MatMul", stack, net.node("Transpose", stack, perm=[0, 2, 1]))
    flat = net.node("Reshape", pairs, net.constant([0, (tables + 1) ** 2]))
    below = np.ravel_multi_index(np.tril_indices(tables + 1, -1), (tables + 1, tables + 1))
    y = net.node("Concat", x, net.node("Gather", flat, net.constant(below), axis=1), axis=1)
    y = net.node("Relu", net.dense(y, width + len(below), 24))
    categories = np.arange(5 * tables, dtype=np.int64).reshape(5, tables)
    return net.done(
        [net.node("Sigmoid", net.dense(y, 24, 1)), pairs], {"numbers": _random(5, 13), "categories": categories}
    )


def waves() -> Net:
    """Of Conv-TasNet's kind: convolutions of one axis, strided and dilated, with normalization of all and PRelu."""
    net, width = _Net(), 24
    x = net.node("Relu", net.conv("wave", 1, width, 16, strides=[8], pad=0, rank=1))
    for number in range(3):
        y = net.node("PRelu", net.conv(x, width, 40, 1, rank=1), net.constant(_random(40, 1) / 4, np.float32))
        y = net.node("Reshape", y, net.constant([0, 1, -1]))
        y = net.node("InstanceNormalization", y, net.constant([1], np.float32), net.constant([0], np.float32))
        y = net.node("Reshape", y, net.constant([0, 40, -1]))
        y = net.conv(y, 40, 40, 3, rank=1, group=40, dilations=[2**number], pad=2**number)
        x = net.node("Add", x, net.conv(y, 40, width, 1, rank=1))
    return net.done([net.conv(x, width, 8, 1, rank=1)], {"wave": _random(2, 1, 400)})


def masks() -> Net:
    """Of U-Net's kind: twice down and up, by poolings and transposed convolutions."""
    net = _Net()

    def twice(x: str, channels: int, filters: int) -> str:
        x = net.node("Relu", net.conv(x, channels, filters, 3))
        return net.node("Relu", net.conv(x, filters, filters, 3))

    kept = [twice("image", 3, 16)]
    for width in (16, 32):
        kept.append(twice(net.node("MaxPool", kept[-1], kernel_shape=[2, 2], strides=[2, 2]), width, 2 * width))
    x = kept.pop()
    for width in (32, 16):
        weights = net.constant(_random(2 * width, width, 2, 2) / width**0.5, np.float32)
        x = net.node("ConvTranspose", x, weights, net.weight(width), strides=[2, 2])
        x = twice(net.node("Concat", kept.pop(), x, axis=1), 2 * width, width)
    return net.done([net.conv(x, 16, 2, 1)], {"image": _random(2, 3, 32, 24)})


def places() -> Net:
    """Segmentation and detection: dilated layers, a pooled image, images made larger, pixels out of channels."""
    net = _Net()
    x = net.conv("image", 3, 16, 3, strides=[2, 2])
    x = net.node("Mul", x, net.node("Sigmoid", x))
    pooled = net.node("Relu", net.conv(net.node("GlobalAveragePool", x), 16, 16, 1))
    sizes = net.constant([2, 16, 20, 20])
    wide = net.node("Resize", pooled, "", "", sizes, mode="linear")
    parts = [net.node("Relu", net.conv(x, 16, 16, 3, dilations=[d, d], pad=d)) for d in (1, 2, 4)]
    x = net.node("Concat", *parts, wide, net.node("MaxPool", x, kernel_shape=[5, 5], pads=[2] * 4), axis=1)
    x = net.conv(x, 80, 36, 1)
    scales = net.constant([1, 1, 2, 2], np.float32)
    nearest = net.node(
        "Resize", x, "", scales, mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"
    )
    linear = net.node("Resize", x, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
    larger = net.node("DepthToSpace", net.node("Tanh", net.conv(x, 36, 36, 3)), blocksize=2, mode="CRD")
    flat = net.node("Reshape", net.node("Transpose", x, perm=[0, 2, 3, 1]), net.constant([0, -1, 9]))
    return net.done([nearest, linear, larger, net.node("Softmax", flat, axis=-1)], {"image": _random(2, 3, 40, 40)})


def blocks() -> Net:
    """Of modern networks' kind: inverted residuals with hard functions and squeezed gates, ConvNeXt's normalization."""
    net = _Net()
    x = net.conv("image", 3, 16, 3, strides=[2, 2])
    x = net.node("HardSwish", x)
    y = net.node("HardSwish", net.conv(net.node("HardSwish", net.conv(x, 16, 64, 1)), 64, 64, 5, group=64))
    gate = net.node("Relu", net.conv(net.node("ReduceMean", y, axes=[2, 3]), 64, 16, 1))
    gate = net.node("HardSigmoid", net.conv(gate, 16, 64, 1), alpha=1 / 6)
    x = net.node("Add", x, net.conv(net.node("Mul", y, gate), 64, 16, 1))
    y = net.node("Transpose", net.conv(x, 16, 16, 7, group=16), perm=[0, 2, 3, 1])
    y = net.dense(net.gelu(net.dense(net.normalized(y, 16), 16, 64)), 64, 16)
    y = net.node("Transpose", net.node("Mul", y, net.ones(16)), perm=[0, 3, 1, 2])
    x = net.node("Relu", net.conv(net.node("Add", x, y), 16, 32, 3, group=4, strides=[2, 2]))
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    return net.done([net.node("Gemm", x, net.weight(32, 10), net.weight(10))], {"image": _random(2, 3, 40, 40)})


NETS: dict[str, Callable[[], Net]] = {
    net.__name__: net
    for net in (sentences, windows, across, writing, turning, tagging, clicks, waves, masks, places, blocks)
}
