"""Geometries that are drawn: a row has the same bytes in any batch of 1 to 9, on one thread, two and three.

`python -m tests.rows.drawn --seconds 600` tries one after another on oneDNN, or NumPy with `--engine ""`; a geometry
follows from its number alone, and `--first` says where to begin. What differs is printed; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from dagexec import Workspace
from dagexec.core.registry import create_operator, has_engine
from dagexec.core.row_axes import find_row_axes
from dagexec.core.tensor import Tensor
from dagexec.errors import DagexecError
from dagexec.ops.base.layout import BLOCKS, image_shape
from dagexec.ops.engines.onednn.availability import widest_blocks
from tests.rows.case import Case, Given, batch, case, constant, examples_at, of_examples, positive, shared

SIZES, THREADS = range(1, 10), (1, 2, 3)
_MOST_PRODUCTS = 2e7  # of an image: a case takes part of a second then

_BLOCKED = widest_blocks() or "NHWC"
_ORDERS = (
    *[("NHWC", "NHWC")] * 3,
    ("NCHW", "NCHW"),
    ("NCHW", "NHWC"),
    ("NCHW", _BLOCKED),
    *[(_BLOCKED, _BLOCKED)] * 3,
)
_POST_OPS: tuple[tuple[str, ...], ...] = (("relu",), ("clip:0:6",), ("swish:1",), ("sigmoid",), ("add:3", "relu"))


def drawn_case(number: int) -> Case:
    """The case of that number."""
    draw = random.Random(number)
    others = _pooling, _product, _normalization, _attention, _recurrent, _reduction
    kinds: Sequence[Callable[[random.Random], Case | None]] = *(_convolution,) * 6, *(_transposed,) * 3, *others
    made = None
    while made is None:
        made = draw.choice(kinds)(draw)
    return made


def differing(one: Case, engine: str = "ONEDNN", threads: Sequence[int] = THREADS) -> str:
    """Which row of which batch on how many threads has other bytes than before; empty where none has."""
    subject = one.subject(engine)
    axes = find_row_axes(subject.model, subject.types(), subject.axes()).outputs
    known: dict[tuple[str, int], bytes] = {}
    for count in threads:
        workspace = Workspace()
        for name, array in subject.model.parameters.items():
            workspace.feed_blob(name, array)
            workspace.get_blob(name).get(Tensor).freeze()
        definition = subject.model.net.op[0]
        definition.arg.extend(case(one.op_type, threads=count).subject().model.net.op[0].arg)
        operator = None
        for size in random.Random(f"{one} {count}").sample(SIZES, len(SIZES)):
            for name, array in subject.feeds(range(size)).items():
                workspace.feed_blob(name, array)
            operator = operator or create_operator(definition, workspace)
            operator.bind(operator.infer())()
            for name in subject.model.outputs:
                array = np.array(workspace.fetch_blob(name))
                for row in range(size):
                    found = of_examples(array, axes.get(name), [row], size).tobytes()
                    if known.setdefault((name, row), found) != found:
                        return f"row {row} of {size}, {count} thread(s), {name}"
        del definition.arg[-1]
    return ""


def _given(draw: random.Random) -> Callable[..., Given]:
    return draw.choice([constant, shared])


def _window(draw: random.Random, axes: int) -> dict[str, Any]:
    kernels = [1] * axes if draw.random() < 0.3 else [draw.choice([1, 1, 2, 3, 3, 3, 4, 5, 7]) for _ in range(axes)]
    pads = [draw.randint(0, 3) if draw.random() < 0.6 else 0 for _ in range(2 * axes)]
    return {"kernels": kernels, "strides": [draw.choice([1, 1, 1, 2, 2, 3, 4]) for _ in range(axes)], "pads": pads}


def _channels(draw: random.Random) -> tuple[int, int, int]:
    """Channels, filters and groups."""
    if draw.random() < 0.3:
        groups, sizes = draw.choice([2, 3, 4, 8, 16, 32]), [1, 1, 2, 4, 8, 16]
        channels = groups * draw.choice(sizes)
        return (
            (channels, channels, channels) if draw.random() < 0.3 else (channels, groups * draw.choice(sizes), groups)
        )
    return draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 40, 48, 64, 100, 128]), draw.choice(
        [1, 2, 4, 5, 8, 10, 16, 24, 32, 33, 48, 64, 80, 128]
    ), 1  # fmt: skip


def _sizes(draw: random.Random, axes: int) -> list[int]:
    most = {1: 300, 2: 70, 3: 12}[axes]
    return [
        min(most, draw.choice([1, 2, 3, 5, 7, 13, 14, 16, 27, 28, 48, 65, draw.randint(1, most)])) for _ in range(axes)
    ]


def _image(channels: int, sizes: Sequence[int], order: str) -> Given:
    return batch(*image_shape(order, 1, channels, sizes, "an image")[1:])


def _convolution(draw: random.Random) -> Case | None:
    axes = draw.choice([2, 2, 2, 2, 1, 3])
    (channels, filters, groups), sizes, window = _channels(draw), _sizes(draw, axes), _window(draw, axes)
    dilations = [draw.choice([1, 1, 1, 2, 3]) for _ in range(axes)]
    kernels, strides, pads = window["kernels"], window["strides"], window["pads"]
    extents = [(kernel - 1) * dilation + 1 for kernel, dilation in zip(kernels, dilations, strict=True)]
    padded = [size + pads[axis] + pads[axes + axis] for axis, size in enumerate(sizes)]
    out = [(size - extent) // stride + 1 for size, extent, stride in zip(padded, extents, strides, strict=True)]
    if min(out) < 1 or prod(out) * filters * channels // groups * prod(kernels) > _MOST_PRODUCTS:
        return None
    order, result = draw.choice(_ORDERS)
    made, shape = _given(draw), (channels // groups, *kernels)
    if any(count % BLOCKS.get(one, 1) for one, count in ((order, channels), (result, filters))):
        return None
    weights = made(filters, *((*shape[1:], shape[0]) if order == "NHWC" else shape))
    common = {**window, "dilations": dilations, "group": groups, "order": order}
    inputs = [_image(channels, sizes, order), weights, made(filters)]
    if draw.random() < 0.6 and order == result:
        return case("Conv", *inputs, **common)
    post_ops = draw.choice(_POST_OPS)
    inputs += [_image(filters, out, result)] if post_ops[0].startswith("add") else []
    return case("FusedConv", *inputs, **common, output_order=result, bias=1, post_ops=list(post_ops))


def _transposed(draw: random.Random) -> Case | None:
    axes = draw.choice([2, 2, 1])
    (channels, filters, groups), window = _channels(draw), _window(draw, axes)
    sizes = [min(size, 20) for size in _sizes(draw, axes)]
    if prod(sizes) * filters * channels // groups * prod(window["kernels"]) > _MOST_PRODUCTS:
        return None
    order, shape = draw.choice(["NHWC", "NCHW"]), (filters // groups, *window["kernels"])
    weights = _given(draw)(channels, *(shape if order == "NCHW" else (*shape[1:], shape[0])))
    return case("ConvTranspose", _image(channels, sizes, order), weights, **window, group=groups, order=order)


def _pooling(draw: random.Random) -> Case:
    order, channels, sizes = draw.choice(["NHWC", "NCHW"]), draw.randint(1, 70), [draw.randint(5, 30) for _ in "hw"]
    kernel, kind = draw.randint(1, 5), draw.choice(["MaxPool", "AveragePool", "LpPool"])
    pad, stride = draw.randint(0, kernel // 2), draw.randint(1, 3)
    return case(kind, _image(channels, sizes, order), kernel=kernel, pad=pad, stride=stride, order=order)


def _product(draw: random.Random) -> Case:
    inner, units = draw.choice([1, 7, 64, 300, 1024, 1025, 2100, 4096]), draw.choice([1, 2, 5, 16, 48, 100, 202, 512])
    made, steps = _given(draw), draw.randint(1, 20)
    return draw.choice([
        case("FC", batch(inner), made(units, inner), made(units)),
        case("FC", batch(steps, inner), made(units, inner), made(units), axis=2),
        case("FusedFC", batch(inner), made(units, inner), made(units), batch(units), post_ops=["relu", "add:3"]),
        case("MatMul", batch(inner), made(inner, units)),
        case("Gemm", batch(inner), made(units, inner), made(units), trans_b=1, alpha=0.5),
        case("BatchMatMul", batch(steps, inner), made(inner, units), broadcast=1),
        case("BatchMatMul", batch(2, steps, min(inner, 300)), batch(2, units, min(inner, 300)), trans_b=1),
    ])  # fmt: skip


def _normalization(draw: random.Random) -> Case:
    order, groups, size = draw.choice(["NHWC", "NCHW"]), draw.choice([1, 2, 4]), draw.randint(1, 20)
    channels = groups * draw.randint(1, 20)
    x, statistics = _image(channels, [size, draw.randint(1, 20)], order), [constant(channels) for _ in range(3)]
    return draw.choice([
        case("LayerNorm", batch(draw.randint(1, 40), draw.randint(1, 900)), axis=2, outputs=3),
        case("SpatialBN", x, *statistics, constant(channels, draw=positive), is_test=1, order=order),
        case("LRN", x, size=5, alpha=1e-4, beta=0.75, order=order),
        case("InstanceNorm", _image(channels, [size, 7], "NCHW"), *statistics[:2]),
        case("GroupNorm", _image(channels, [size, 7], "NCHW"), *statistics[:2], group=groups),
        case("Softmax", batch(draw.randint(1, 3000))),
    ])  # fmt: skip


def _attention(draw: random.Random) -> Case:
    heads, queries, keys, width = draw.randint(1, 8), draw.randint(1, 70), draw.randint(1, 140), draw.randint(1, 80)
    q, k = batch(heads, queries, width), batch(heads, keys, width)
    if draw.random() < 0.5:
        return case(draw.choice(["Attention", "FusedAttention"]), q, k, k)
    return case("FusedAttention", q, k, k, batch(1, queries, keys), bias=1)


def _recurrent(draw: random.Random) -> Case:
    name, gates = draw.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    steps, features, hidden, made = (
        draw.randint(1, 6),
        draw.randint(1, 150),
        draw.choice([1, 8, 20, 64, 128]),
        _given(draw),
    )
    weights = made(1, gates * hidden, features), made(1, gates * hidden, hidden)
    x = examples_at(1, steps, 1, features)
    return case(name, x, *weights, outputs=3 if name == "LSTM" else 2, hidden_size=hidden)


def _reduction(draw: random.Random) -> Case:
    kind = draw.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceProd", "ReduceLogSumExp"])
    axes = draw.choice([[1], [2], [1, 2]])
    return case(kind, batch(draw.randint(1, 60), draw.randint(1, 200)), axes=axes, keepdims=0)


def main() -> int:
    """Exit status 1 if a row differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.rows.drawn", description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engine", default="ONEDNN")
    options = parser.parse_args()
    end, number, tried, refused, wrong = time.monotonic() + options.seconds, options.first, 0, 0, 0
    while time.monotonic() < end:
        one = drawn_case(number)
        try:
            found = differing(one, options.engine if has_engine(one.op_type, options.engine) else "")
            tried += 1
        except DagexecError:
            found, refused = "", refused + 1
        if found:
            wrong += 1
            print(f"{number}: {one}: {found}", flush=True)
        number += 1
    print(f"{wrong} of {tried} differ, {refused} were refused; next: --first {number}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
