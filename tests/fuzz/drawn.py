"""Operators and nets that a number decides, run where nothing beside an array may be touched (`tests.guarded`).

Sizes are odd ones, so that vectors, blocks and tiles have a rest. Results are compared with NumPy's of the model as
given, in ordinary memory: what reads memory that was never written gives NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec.core.model import Model
from dagexec.core.registry import has_engine
from dagexec.stress.nets import random_net
from tests.fuzz.near import require_near
from tests.guarded import Guards, guarded_memory
from tests.rows.case import Case, Given, batch, case, constant, examples_at, integers, positive, shared
from tests.rows.operators import UINT8, operator_cases

Array = npt.NDArray[Any]

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 64, 65)


@dataclass(frozen=True)
class Drawn:
    """A model, feeds for several runs of it one after another, and options of `compile`.

    Attributes:
        name: what it is, in words.
        plain: the model for NumPy.
    """

    name: str
    model: Model
    plain: Model
    feeds: Sequence[Mapping[str, Array]]
    options: Mapping[str, Any]

    def run(self, guards: Guards) -> None:
        """Run it in guarded memory. Raises WrongError when NumPy gives other results."""
        with guarded_memory(guards):
            model = replace(self.model, parameters=guards.copies(self.model.parameters))
            with dagexec.compile(model, **self.options) as executor:
                found = [executor.run(guards.copies(feeds)) for feeds in self.feeds]
        with dagexec.compile(self.plain, optimize=False, net_type="simple", num_workers=1) as executor:
            for results, feeds in zip(found, self.feeds, strict=True):
                for name, expected in executor.run(feeds).items():
                    require_near(name, expected, results[name])


def draw(source: random.Random) -> Drawn:
    """What `source` decides."""
    options = {
        "optimize": source.random() < 0.7,
        "net_type": source.choice(("simple", "dag")),
        "num_workers": 1,
        "intra_op_threads": source.choice((1, 1, 2, 3)),
    }
    if source.random() < 0.15:
        net = random_net(source)
        first = source.randrange(100)
        return Drawn(
            net.net.name, net.model(), net.model(), [net.feeds(first + number) for number in range(2)], options
        )
    chosen = source.choice(_operator_cases()) if source.random() < 0.2 else source.choice(_MAKERS)(source)
    engine = "ONEDNN" if has_engine(chosen.op_type, "ONEDNN") and source.random() < 0.8 else ""
    subject, plain = chosen.subject(engine), chosen.subject()
    feeds = [subject.feeds(range(count)) for count in source.sample(range(1, 10), 2)]
    return Drawn(" ".join(str(chosen).split()), subject.model, plain.model, feeds, options)


@cache
def _operator_cases() -> list[Case]:
    return operator_cases()


def _window(source: random.Random, rank: int) -> tuple[list[int], dict[str, Any]]:
    """Sizes of an image, and a window over it that fits."""
    kernels = [source.choice((1, 2, 3, 3, 4, 5, 7)) for _ in range(rank)]
    dilations = [source.choice((1, 1, 1, 2, 3)) for _ in range(rank)]
    pads = [source.randint(0, kernel // 2) for kernel in (*kernels, *kernels)]
    strides = [source.choice((1, 1, 2, 3)) for _ in range(rank)]
    reach = [dilation * (kernel - 1) + 1 for kernel, dilation in zip(kernels, dilations, strict=True)]
    sizes = [max(1, extent - source.choice((0, 0, 1))) + source.choice((0, *SIZES[:16])) for extent in reach]
    sizes = [max(size, extent - pads[axis] - pads[axis + rank], 1)
             for axis, (size, extent) in enumerate(zip(sizes, reach, strict=True))]  # fmt: skip
    return sizes, {"kernels": kernels, "dilations": dilations, "pads": pads, "strides": strides}


def _images(order: str, channels: int, sizes: Sequence[int], made: Callable[..., Given] = batch) -> Given:
    return made(channels, *sizes) if order == "NCHW" else made(*sizes, channels)


def _convolution(source: random.Random) -> Case:
    order = source.choice(("NCHW", "NHWC"))
    sizes, window = _window(source, source.choice((1, 2, 2, 2, 2, 3)))
    if len(sizes) != 2:
        order = "NCHW"
    group = source.choice((1, 1, 1, 1, 2, 3, 8, 16, 33))
    each = 1 if group > 4 else source.choice(SIZES)
    filters = group * (1 if group > 4 else source.choice(SIZES))
    made = source.choice((constant, constant, shared))
    inner = (each, *window["kernels"]) if order == "NCHW" else (*window["kernels"], each)
    bias = (made(filters),) if source.random() < 0.7 else ()
    return case("Conv", _images(order, group * each, sizes), made(filters, *inner), *bias, order=order, group=group,
                **window)  # fmt: skip


def _transposed_convolution(source: random.Random) -> Case:
    sizes, window = _window(source, 2)
    del window["dilations"], window["pads"]
    channels, filters = source.choice(SIZES[:16]), source.choice(SIZES[:16])
    weights = constant(channels, filters, *window["kernels"])
    return case("ConvTranspose", batch(channels, *(min(size, 12) for size in sizes)), weights, **window)


def _pooling(source: random.Random) -> Case:
    order = source.choice(("NCHW", "NHWC"))
    sizes, window = _window(source, 2)
    del window["dilations"]
    name = source.choice(("MaxPool", "AveragePool", "LpPool"))
    return case(name, _images(order, source.choice(SIZES), sizes), order=order, **window)


def _product(source: random.Random) -> Case:
    inner, units = source.choice(SIZES) * source.choice((1, 1, 7)), source.choice(SIZES) * source.choice((1, 1, 5))
    made = source.choice((constant, shared))
    if source.random() < 0.5:
        return case("FC", batch(inner), made(units, inner), made(units))
    if source.random() < 0.5:
        turned = source.random() < 0.5
        weights = made(units, inner) if turned else made(inner, units)
        return case("MatMul", batch(inner), weights, trans_b=int(turned))
    rows, heads = source.choice(SIZES[:14]), source.choice((1, 3, 4))
    turned = source.random() < 0.5
    other = batch(heads, units, inner) if turned else batch(heads, inner, units)
    return case("BatchMatMul", batch(heads, rows, inner), other, trans_b=int(turned))


def _normalization(source: random.Random) -> Case:
    rows, width = source.choice(SIZES[:8]), source.choice(SIZES) * source.choice((1, 1, 3))
    channels = source.choice(SIZES)
    sizes = source.choice(SIZES[:10]), source.choice(SIZES[:10])
    order = source.choice(("NCHW", "NHWC"))
    statistics = constant(channels), constant(channels), constant(channels), constant(channels, draw=positive)
    return source.choice((
        lambda: case("LayerNorm", batch(rows, width), outputs=3, axis=2),
        lambda: case("RootMeanSquareNorm", batch(rows, width), constant(width)),
        lambda: case("FusedRows", batch(rows, width), constant(width), nodes=[
            "row_max x0", "subtract x0 %0", "exp %1", "row_sum %2", "divide %2 %3", "multiply %4 x1"]),
        lambda: case("Softmax", batch(rows, width), axis=2),
        lambda: case("LogSoftmax", batch(rows, width), axis=2),
        lambda: case("InstanceNorm", batch(channels, *sizes), constant(channels), constant(channels)),
        lambda: case("SpatialBN", _images(order, channels, sizes), *statistics, is_test=1, order=order),
        lambda: case("LRN", _images(order, channels, sizes), size=source.choice((3, 5)), alpha=1e-4, beta=0.75,
                     order=order),
    ))()  # fmt: skip


def _reduction(source: random.Random) -> Case:
    sizes = [source.choice(SIZES[:14]) for _ in range(3)]
    axes = sorted(source.sample((1, 2, 3), source.randint(1, 3)))
    name = source.choice(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd"))
    return case(name, batch(*sizes, draw=positive), axes=axes, keepdims=source.randint(0, 1))


def _moved(source: random.Random) -> Case:
    sizes = [source.choice(SIZES[:16]) for _ in range(3)]
    x = batch(*sizes, draw=source.choice((positive, UINT8, integers(0, 99), integers(0, 2, np.bool_))))
    axes = [1, 2, 3]
    source.shuffle(axes)
    cut = [source.randrange(size) for size in sizes]
    ends = [source.randint(start + 1, size) for start, size in zip(cut, sizes, strict=True)]
    axis = source.randint(1, 3)
    other = [source.choice(SIZES[:8]) if place + 1 == axis else size for place, size in enumerate(sizes)]
    picks = shared(source.choice(SIZES), draw=integers(0, sizes[axis - 1], source.choice((np.int32, np.int64))))
    return source.choice((
        lambda: case("Transpose", x, axes=source.choice(([0, *axes], [*axes, 0]))),
        lambda: case("Slice", x, starts=[0, *cut], ends=[-1, *ends]),
        lambda: case("Concat", x, replace(x, shape=(1, *other)), x, outputs=2, unread=1, axis=axis),
        lambda: case("Gather", x, picks, axis=axis),
        lambda: case("Tile", x, tiles=source.randint(1, 3), axis=axis),
        lambda: case("Split", batch(*sizes[:2], 3 * sizes[2]), outputs=3, axis=3),
        lambda: case("Pad", batch(*sizes[:2]), _pads(source, 3), mode=source.choice(("constant", "edge"))),
        lambda: case("Expand", batch(sizes[0], 1), Given((3,), is_constant=True, values=np.array([1, 1, sizes[1]]))),
    ))()  # fmt: skip


def _pads(source: random.Random, rank: int) -> Given:
    pads = [0 if place % rank == 0 else source.randint(0, 5) for place in range(2 * rank)]
    return Given((2 * rank,), is_constant=True, values=np.array(pads))


def _elementwise(source: random.Random) -> Case:
    sizes = [source.choice(SIZES) for _ in range(source.randint(1, 2))]
    unary = ("Relu", "Tanh", "Sigmoid", "Exp", "Sqrt", "Swish", "Gelu", "Elu", "Abs", "Erf")
    if source.random() < 0.4:
        return case(source.choice(unary), batch(*sizes, draw=positive))
    name = source.choice(("Add", "Sub", "Mul", "Div"))
    others = (batch(*sizes, draw=positive), constant(sizes[-1], draw=positive), constant(1, draw=positive))
    return case(name, batch(*sizes, draw=positive), source.choice(others))


def _fused(source: random.Random) -> Case:
    sizes = [source.choice(SIZES) for _ in range(source.randint(1, 2))]
    other = source.choice((batch(*sizes), constant(sizes[-1])))
    post_ops = source.sample(("add:1", "mul:1", "tanh", "relu", "sigmoid"), 3)
    return case("FusedElementwise", batch(*sizes), other, post_ops=["add:1", *post_ops])


def _recurrent(source: random.Random) -> Case:
    name = source.choice(("LSTM", "GRU", "RNN"))
    gates, states = {"LSTM": (4, 3), "GRU": (3, 2), "RNN": (1, 2)}[name]
    features, hidden, steps = source.choice(SIZES), source.choice(SIZES), source.randint(1, 6)
    made = source.choice((constant, shared))
    weights = made(1, gates * hidden, features), made(1, gates * hidden, hidden)
    return case(name, examples_at(1, steps, 1, features), *weights, outputs=states, hidden_size=hidden)


def _attention(source: random.Random) -> Case:
    heads, steps, width = source.choice((1, 2, 3)), source.choice(SIZES), source.choice(SIZES[3:])
    keys = source.choice((steps, source.choice(SIZES)))
    q, k = batch(heads, steps, width), batch(heads, keys, width)
    return case("Attention", q, k, k, is_causal=int(keys == steps and source.random() < 0.5))


def _quantized(source: random.Random) -> Case:
    inner, units = source.choice(SIZES) * source.choice((1, 5)), source.choice(SIZES)
    return case("MatMulInteger", batch(inner, draw=UINT8), constant(inner, units, draw=integers(-127, 127, np.int8)))


_MAKERS = (
    _convolution, _convolution, _convolution, _transposed_convolution, _pooling, _product, _product, _normalization,
    _normalization, _normalization, _reduction, _moved, _moved, _moved, _elementwise, _elementwise, _elementwise,
    _fused, _recurrent, _attention, _quantized,
)  # fmt: skip
