"""Decoders, as PyTorch's exporters write them: what attention has read before are inputs and, with more, outputs."""

import math

import numpy as np
import onnx
from onnx import TensorProto

from random_models.graph import Graph

WORDS, POSITIONS = 1000, 2048


class _Layers(Graph):
    """Layers of transformers."""

    def __init__(self, name: str, width: int, heads: int, key_heads: int = 0) -> None:
        super().__init__(name)
        self.width, self.heads, self.key_heads = width, heads, key_heads or heads
        self.elements = width // heads

    def begin(self) -> tuple[str, str]:
        """Tokens `ids` [1, new]: the numbers of their positions, and the mask that hides later ones from each."""
        self.input("ids", [1, "new"], TensorProto.INT64)
        self.cache: list[int | str] = [1, self.key_heads, "past", self.elements]
        past = self.size(self.input("past_key.0", self.cache), 2)
        total = self.node("Add", past, self.size("ids", 1))
        one = self.constant(1)
        self.rows = self.node("Unsqueeze", self.node("Range", past, total, one), self.constant([1]))
        self.columns = self.node("Unsqueeze", self.node("Range", self.constant(0), total, one), self.constant([0]))
        hidden = self.node("Greater", self.columns, self.rows)
        mask = self.node("Where", hidden, self.constant(-1e9, np.float32), self.constant(0, np.float32))
        return self.node("Squeeze", self.rows, self.constant([1])), mask

    def normalized(self, x: str) -> str:
        """Layer normalization."""
        ones, zeros = self.constant(np.ones(self.width), np.float32), self.constant(np.zeros(self.width), np.float32)
        return self.node("LayerNormalization", x, ones, zeros, axis=-1)

    def scaled(self, x: str) -> str:
        """Normalization by the root of the mean of squares."""
        squares = self.node("ReduceMean", self.node("Mul", x, x), axes=[-1])
        root = self.node("Sqrt", self.node("Add", squares, self.constant(1e-6, np.float32)))
        return self.node("Mul", self.node("Div", x, root), self.constant(np.ones(self.width), np.float32))

    def by_head(self, x: str, heads: int, *, bias: bool = True) -> str:
        """[batch, heads, positions, elements] of a linear layer."""
        line = self.linear(x, self.width, heads * self.elements, bias=bias)
        split = self.node("Reshape", line, self.constant([0, 0, heads, self.elements]))
        return self.node("Transpose", split, perm=[0, 2, 1, 3])

    def append(self, kind: str, layer: int, new: str) -> str:
        """A cache with new positions behind it."""
        past = f"past_{kind}.{layer}"
        if past != "past_key.0":
            self.input(past, self.cache)
        return self.output(f"present_{kind}.{layer}", self.cache, "Concat", past, new, axis=2)

    def repeated(self, cache: str) -> str:
        """Each head of a cache for as many heads of queries."""
        times = self.heads // self.key_heads
        if times == 1:
            return cache
        more = self.node("Unsqueeze", cache, self.constant([2]))
        wide = self.node("Expand", more, self.constant([1, 1, times, 1, 1]))
        length = self.node("Unsqueeze", self.size(cache, 2), self.constant([0]))
        first, last = self.constant([1, self.heads]), self.constant([self.elements])
        return self.node("Reshape", wide, self.node("Concat", first, length, last, axis=0))

    def attended(self, q: str, keys: str, values: str, bias: str = "", *, scale: bool = True) -> str:
        """What queries read, through a last linear layer."""
        scores = self.node("MatMul", q, self.node("Transpose", self.repeated(keys), perm=[0, 1, 3, 2]))
        if scale:
            scores = self.node("Mul", scores, self.constant(self.elements**-0.5, np.float32))
        if bias:
            scores = self.node("Add", scores, bias)
        mixed = self.node("MatMul", self.node("Softmax", scores, axis=-1), self.repeated(values))
        line = self.node("Reshape", self.node("Transpose", mixed, perm=[0, 2, 1, 3]), self.constant([0, 0, self.width]))
        return self.linear(line, self.width, self.width)

    def gelu(self, x: str) -> str:
        """By the error function."""
        bent = self.node("Erf", self.node("Div", x, self.constant(2**0.5, np.float32)))
        half = self.node("Mul", x, self.constant(0.5, np.float32))
        return self.node("Mul", half, self.node("Add", bent, self.constant(1, np.float32)))

    def wide(self, x: str) -> str:
        """Two linear layers with gelu between them."""
        return self.linear(self.gelu(self.linear(x, self.width, 4 * self.width)), 4 * self.width, self.width)

    def end(self, x: str) -> onnx.ModelProto:
        """`scores` [1, new, words]."""
        weights = self.node("Transpose", self.weight(WORDS, self.width), perm=[1, 0])
        self.output("scores", [1, "new", WORDS], "MatMul", x, weights)
        return self.model()


def gpt(layers: int = 2, width: int = 64, heads: int = 4) -> onnx.ModelProto:
    """As GPT-2: `ids` [1, new], `past_key.0` [1, heads, past, elements] and so on; `scores`, `present_key.0`, ..."""
    g = _Layers("gpt", width, heads)
    positions, mask = g.begin()
    places = g.node("Gather", g.table(POSITIONS, width), positions)
    x = g.node("Add", g.node("Gather", g.table(WORDS, width), "ids"), places)
    for layer in range(layers):
        read = g.normalized(x)
        q, k, v = (g.by_head(read, heads) for _ in "qkv")
        keys, values = g.append("key", layer, k), g.append("value", layer, v)
        x = g.node("Add", x, g.attended(q, keys, values, mask))
        x = g.node("Add", x, g.wide(g.normalized(x)))
    return g.end(g.normalized(x))


def llama(layers: int = 2, width: int = 64, heads: int = 4, key_heads: int = 2) -> onnx.ModelProto:
    """As Llama: positions turn queries and keys, several heads of queries share one of keys, and layers have gates."""
    g = _Layers("llama", width, heads, key_heads)
    positions, mask = g.begin()
    x = g.node("Gather", g.table(WORDS, width), "ids")
    angles = np.arange(POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, g.elements, 2) / g.elements)
    tables = [np.concatenate([function(angles)] * 2, 1) for function in (np.cos, np.sin)]
    cosine, sine = (g.node("Gather", g.constant(table, np.float32), positions) for table in tables)

    def turned(x: str) -> str:
        first, second = g.nodes("Split", 2, x, g.constant([g.elements // 2] * 2), axis=3)
        crossed = g.node("Concat", g.node("Neg", second), first, axis=3)
        return g.node("Add", g.node("Mul", x, cosine), g.node("Mul", crossed, sine))

    for layer in range(layers):
        read = g.scaled(x)
        q = turned(g.by_head(read, heads, bias=False))
        k, v = (g.by_head(read, key_heads, bias=False) for _ in "kv")
        keys, values = g.append("key", layer, turned(k)), g.append("value", layer, v)
        x = g.node("Add", x, g.attended(q, keys, values, mask))
        read = g.scaled(x)
        gate, up = (g.linear(read, width, 3 * width, bias=False) for _ in range(2))
        product = g.node("Mul", g.node("Mul", gate, g.node("Sigmoid", gate)), up)
        x = g.node("Add", x, g.linear(product, 3 * width, width, bias=False))
    return g.end(g.scaled(x))


def whisper_decoder(layers: int = 2, width: int = 64, heads: int = 4) -> onnx.ModelProto:
    """As Whisper's: beside its own caches it reads `cross_key.0` [1, heads, frames, elements] and so on."""
    g = _Layers("whisper_decoder", width, heads)
    positions, mask = g.begin()
    places = g.node("Gather", g.table(POSITIONS, width), positions)
    x = g.node("Add", g.node("Gather", g.table(WORDS, width), "ids"), places)
    for layer in range(layers):
        read = g.normalized(x)
        q, k, v = (g.by_head(read, heads) for _ in "qkv")
        keys, values = g.append("key", layer, k), g.append("value", layer, v)
        x = g.node("Add", x, g.attended(q, keys, values, mask))
        cross = [g.input(f"cross_{kind}.{layer}", [1, heads, "frames", g.elements]) for kind in ("key", "value")]
        x = g.node("Add", x, g.attended(g.by_head(g.normalized(x), heads), *cross))
        x = g.node("Add", x, g.wide(g.normalized(x)))
    return g.end(g.normalized(x))


def whisper_encoder(layers: int = 2, width: int = 64, heads: int = 4, bands: int = 16) -> onnx.ModelProto:
    """Whisper's other half: of `sound` [1, bands, 2 frames] it makes all that the decoder reads, `cross_key.0`, ..."""
    g = _Layers("whisper_encoder", width, heads)
    x = g.input("sound", [1, bands, "samples"])
    for inner, stride in ((bands, 1), (width, 2)):
        kernel, bias = g.weight(width, inner, 3), g.weight(width)
        x = g.gelu(g.node("Conv", x, kernel, bias, kernel_shape=[3], pads=[1, 1], strides=[stride]))
    x = g.node("Transpose", x, perm=[0, 2, 1])
    frames = g.node("Range", g.constant(0), g.size(x, 1), g.constant(1))
    x = g.node("Add", x, g.node("Gather", g.table(POSITIONS, width), frames))
    for _ in range(layers):
        read = g.normalized(x)
        x = g.node("Add", x, g.attended(*(g.by_head(read, heads) for _ in "qkv")))
        x = g.node("Add", x, g.wide(g.normalized(x)))
    x = g.normalized(x)
    for layer in range(layers):
        for kind in ("key", "value"):
            g.output(f"cross_{kind}.{layer}", [1, heads, "frames", g.elements], "Identity", g.by_head(x, heads))
    return g.model()


def t5_decoder(layers: int = 2, width: int = 64, heads: int = 4) -> onnx.ModelProto:
    """As T5's: no positions, but a number that each distance adds to scores; those far away share one."""
    near, buckets, furthest = 16, 32, 128
    g = _Layers("t5_decoder", width, heads)
    _, mask = g.begin()
    distance = g.node("Max", g.node("Sub", g.rows, g.columns), g.constant(0))
    x = g.node("Div", g.node("Cast", distance, to=TensorProto.FLOAT), g.constant(near, np.float32))
    factor = g.constant((buckets - near) / math.log(furthest / near), np.float32)
    steps = g.node("Cast", g.node("Mul", g.node("Log", x), factor), to=TensorProto.INT64)
    far = g.node("Min", g.node("Add", steps, g.constant(near)), g.constant(buckets - 1))
    bucket = g.node("Where", g.node("Less", distance, g.constant(near)), distance, far)
    added = g.node("Transpose", g.node("Gather", g.table(buckets, heads), bucket), perm=[2, 0, 1])
    bias = g.node("Add", g.node("Unsqueeze", added, g.constant([0])), mask)
    x = g.node("Gather", g.table(WORDS, width), "ids")
    for layer in range(layers):
        read = g.scaled(x)
        q, k, v = (g.by_head(read, heads, bias=False) for _ in "qkv")
        keys, values = g.append("key", layer, k), g.append("value", layer, v)
        x = g.node("Add", x, g.attended(q, keys, values, bias, scale=False))
        cross = [g.input(f"cross_{kind}.{layer}", [1, heads, "frames", g.elements]) for kind in ("key", "value")]
        x = g.node("Add", x, g.attended(g.by_head(g.scaled(x), heads, bias=False), *cross, scale=False))
        bent = g.node("Relu", g.linear(g.scaled(x), width, 4 * width, bias=False))
        x = g.node("Add", x, g.linear(bent, 4 * width, width, bias=False))
    return g.end(g.scaled(x))
