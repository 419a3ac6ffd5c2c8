"""Random convolutions and small nets of them: all engines, in all orders, give what float64 gives.

The engines are NumPy's (default, WINOGRAD, FFT, DIRECT) and oneDNN's; orders in blocks are oneDNN's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dagexec
from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.ops.base.layout import BLOCKS, ORDERS
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.drawing import drawn
from tests.ops.onednn.engine import AVX512, has_vectors_of
from tests.ops.onednn.test_conv import from_order, to_order
from tests.ops.running import operator_def, run_operator, workspace_of
from tests.ops.windows import Array, Geometry, convolve, geometries, to_channels_last

NUMPY_ENGINES = ["", "WINOGRAD", "FFT", "DIRECT"]
WAYS = [(engine, order) for order in ("NCHW", "NHWC") for engine in NUMPY_ENGINES]
if engine_library() is not None:
    WAYS += [("ONEDNN", order) for order in ORDERS]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-7, "float16": 2.0**-9}
POST_OPS = ["relu", "clip:-0.5:0.75", "sigmoid", "hardswish", "linear:0.5:0.25", "square", "tanh", "elu:0.5"]


@dataclass(frozen=True)
class Drawn:
    """A convolution of random numbers, its arrays made from `seed`."""

    geometry: Geometry
    batch: int
    group: int
    per_group: int
    filters_per_group: int
    bias: bool
    post_ops: tuple[str, ...]
    dtype: str
    constant: bool
    threads: int
    seed: int

    def arrays(self) -> list[Array]:
        """X as N, C, spatial, the filter as M, C/group, kernel, the bias if there is one, and an operand."""
        rng = np.random.default_rng(self.seed)
        filters = self.group * self.filters_per_group
        x = rng.standard_normal((self.batch, self.group * self.per_group, *self.geometry.size))
        weights = rng.standard_normal((filters, self.per_group, *self.geometry.kernel))
        weights /= np.sqrt(max(1, weights[0].size))
        return [x, weights, *([rng.standard_normal(filters)] if self.bias else [])]

    def exact(self) -> Array:
        """Y in float64, of the values as they are in `dtype`."""
        x, weights, *bias = (array.astype(self.dtype).astype(np.float64) for array in self.arrays())
        y = convolve(x, weights, bias[0] if bias else None, self.geometry, self.group)
        for text in self.post_ops:
            y = apply(text, y)
        return y

    def fits_blocks(self) -> bool:
        """False for what NumPy must compute, not in blocks then: float16, bfloat16 without AVX-512, and windows that
        leave pixels out."""
        leaves_out = any(window.low > 0 for window in self.geometry.windows())
        return (self.dtype == "float32" or (self.dtype == "bfloat16" and has_vectors_of(AVX512))) and not leaves_out

    def computed(self, engine: str, order: str) -> Array:
        """Y as N, M, spatial."""
        x, weights, *bias = (array.astype(self.dtype) for array in self.arrays())
        fed = [to_order(x, order), to_channels_last(weights) if order == "NHWC" else weights, *bias]
        workspace = Workspace()
        names = ["x", "w", "b"][: len(fed)]
        for name, array in zip(names, fed, strict=True):
            workspace.feed_blob(name, array)
            if self.constant and name != "x":
                workspace.get_blob(name).tensor().freeze()
        definition = operator_def(
            "FusedConv",
            names,
            ["y"],
            order=order,
            group=self.group,
            bias=int(self.bias),
            post_ops=list(self.post_ops),
            threads=self.threads,
            **self.geometry.arguments(),
            engine=engine,
        )
        with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
            net.run()
            first = workspace.fetch_blob("y")
            net.run()
        assert workspace.fetch_blob("y").tobytes() == first.tobytes()
        return from_order(first, order)


def apply(text: str, y: Array) -> Array:
    """A post-op in float64."""
    kind, *numbers = text.split(":")
    a, b = [*map(float, numbers), 0.0, 0.0][:2]
    gate = np.minimum(np.maximum(y / 6 + 0.5, 0), 1)
    return {
        "relu": np.maximum(y, 0),
        "clip": np.minimum(np.maximum(y, a), b),
        "sigmoid": 1 / (1 + np.exp(-y)),
        "hardswish": y * gate,
        "linear": a * y + b,
        "square": y * y,
        "tanh": np.tanh(y),
        "elu": np.where(y > 0, y, a * np.expm1(np.minimum(y, 0))),
    }[kind]


@st.composite
def convolutions(draw: st.DrawFn, *, blocks: bool) -> Drawn:
    """A convolution; with `blocks`, of channels that fill blocks of 16."""
    group = draw(st.sampled_from([1, 1, 2, 16] if blocks else [1, 1, 2, 3, 5]))
    width = 16 // min(group, 16)
    per_group, filters = draw(st.integers(1, 2)) * width, draw(st.integers(1, 2)) * width
    if not blocks:
        per_group, filters = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    elif group == 2:
        per_group, filters = per_group * 2, filters * 2
    return Drawn(
        draw(geometries()),
        batch=draw(st.sampled_from([0, 1, 1, 3])),
        group=group,
        per_group=per_group,
        filters_per_group=filters,
        bias=draw(st.booleans()),
        post_ops=tuple(draw(st.lists(st.sampled_from(POST_OPS), max_size=2))),
        dtype=np.dtype(draw(st.sampled_from([np.float32, np.float32, np.float16, ml_dtypes.bfloat16]))).name,
        constant=draw(st.booleans()),
        threads=draw(st.sampled_from([1, 1, 2])),
        seed=draw(st.integers(0, 99)),
    )


def check(case: Drawn, ways: Sequence[tuple[str, str]]) -> None:
    """Every way gives the exact result within the tolerance of the element type, and so what every other gives."""
    exact = case.exact()
    largest = np.abs(exact).max(initial=1.0)
    for engine, order in ways:
        if order in BLOCKS and not case.fits_blocks():
            continue
        found = case.computed(engine, order)
        assert found.shape == exact.shape, f"check({case}, [{(engine, order)}])"
        assert found.dtype == np.dtype(case.dtype)
        error = np.abs(found.astype(np.float64) - exact).max(initial=0.0) / largest
        tolerance = TOLERANCE[case.dtype] * (1 + len(case.post_ops))
        assert error <= tolerance, f"{engine or 'DEFAULT'} in {order} is off by {error:.1e}: check({case}, ...)"


@pytest.mark.slow
@given(convolutions(blocks=False))
@drawn(60)
def test_all_engines_agree_on_any_convolution(case: Drawn) -> None:
    check(case, [(engine, order) for engine, order in WAYS if order not in BLOCKS])


@pytest.mark.slow
@given(convolutions(blocks=True))
@drawn(60)
def test_all_engines_agree_on_blocks_of_channels(case: Drawn) -> None:
    check(case, WAYS)


# Small nets.

Layer = tuple[str, int, int]
"""A kind of layer, and two numbers that say which blobs it reads, or how many filters it has."""


@dataclass(frozen=True)
class DrawnNet:
    """A net: layers in order, each on blobs that are there."""

    channels: int
    size: int
    layers: tuple[Layer, ...]
    seed: int


KINDS = ["conv 3x3", "conv 1x1", "conv stride 2", "depthwise", "relu", "max pool", "average pool", "add", "concat"]


@st.composite
def nets(draw: st.DrawFn) -> DrawnNet:
    layer = st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7))
    return DrawnNet(
        draw(st.sampled_from([16, 32])),
        draw(st.integers(4, 11)),
        tuple(draw(st.lists(layer, min_size=2, max_size=7))),
        draw(st.integers(0, 99)),
    )


class Building:
    """A net under construction in one order, with one engine."""

    def __init__(self, drawn_net: DrawnNet, engine: str, order: str) -> None:
        self.order, self.engine = order, engine
        self.rng = np.random.default_rng(drawn_net.seed)
        self.ops: list[OperatorDef] = []
        self.parameters: dict[str, Array] = {}
        self.shapes = {"x": (drawn_net.channels, drawn_net.size)}
        for kind, one, other in drawn_net.layers:
            self._add(kind, one, other)

    def _add(self, kind: str, one: int, other: int) -> None:
        names = list(self.shapes)
        source = names[one % len(names)]
        channels, size = self.shapes[source]
        same = [name for name in names if self.shapes[name] == (channels, size)]
        if kind.startswith(("conv", "depthwise")):
            filters = channels if kind == "depthwise" else 16 * (1 + other % 2)
            taps, stride = (1 if "1x1" in kind else 3), (2 if "stride" in kind else 1)
            group = channels if kind == "depthwise" else 1
            self._convolve(source, filters, taps, stride, group, (size - 1) // stride + 1)
        elif kind == "relu":
            self._emit("Relu", [source], (channels, size))
        elif kind.endswith("pool"):
            op_type = "MaxPool" if kind == "max pool" else "AveragePool"
            self._emit(op_type, [source], (channels, size), kernel=3, pad=1, order=self.order)
        elif kind == "add":
            self._emit("Add", [source, same[other % len(same)]], (channels, size))
        else:
            second = same[other % len(same)]
            self._emit("Concat", [source, second], (2 * channels, size), order=self.order)

    def _convolve(self, source: str, filters: int, taps: int, stride: int, group: int, size: int) -> None:
        channels = self.shapes[source][0]
        weights = self.rng.standard_normal((filters, channels // group, taps, taps))
        weights = (weights / np.sqrt(weights[0].size)).astype(np.float32)
        number = len(self.parameters)
        self.parameters[f"w{number}"] = to_channels_last(weights) if self.order == "NHWC" else weights
        self.parameters[f"b{number}"] = (self.rng.standard_normal(filters) / 4).astype(np.float32)
        self._emit(
            "Conv",
            [source, f"w{number}", f"b{number}"],
            (filters, size),
            kernel=taps,
            pad=taps // 2,
            stride=stride,
            group=group,
            order=self.order,
        )

    def _emit(self, op_type: str, inputs: list[str], shape: tuple[int, int], **arguments: ArgumentValue) -> None:
        name = f"y{len(self.ops)}"
        definition = operator_def(op_type, inputs, [name], **arguments, engine=self.engine)
        self.ops.append(definition)
        self.shapes[name] = shape

    def run(self, x: Array) -> Array:
        """The last blob as N, C, spatial."""
        workspace = workspace_of({"x": to_order(x, self.order)})
        for name, array in self.parameters.items():
            workspace.feed_blob(name, array if x.dtype == np.float32 else array.astype(x.dtype))
        with SimpleNet(NetDef(name="test", op=self.ops), workspace) as net:
            net.run()
        return from_order(workspace.fetch_blob(self.ops[-1].output[0]), self.order)


@pytest.mark.slow
@given(nets())
@drawn(25)
def test_all_engines_agree_on_small_nets(case: DrawnNet) -> None:
    x = np.random.default_rng(case.seed + 1).standard_normal((2, case.channels, case.size, case.size))
    exact = Building(case, "", "NCHW").run(x)
    largest = np.abs(exact).max()
    for engine, order in WAYS:
        found = Building(case, engine, order).run(x.astype(np.float32))
        error = np.abs(found - exact).max() / largest
        assert error <= 2e-5, f"{engine or 'DEFAULT'} in {order} is off by {error:.1e}: {case}"


@given(nets())
@drawn(10)
def test_a_compiled_net_gives_what_the_net_gives(case: DrawnNet) -> None:
    x = np.random.default_rng(case.seed + 1).standard_normal((2, case.channels, case.size, case.size))
    x = x.astype(np.float32)
    built = Building(case, "", "NCHW")
    exact = built.run(x.astype(np.float64))
    output = built.ops[-1].output[0]
    net = NetDef(name="test", op=built.ops, external_input=["x", *built.parameters], external_output=[output])
    model = Model(
        "test", net, parameters=built.parameters, inputs={"x": InputInfo(FLOAT32, x.shape)}, outputs=(output,)
    )
    with dagexec.compile(model) as executor:
        found = executor.run({"x": x})[output]
    assert np.abs(found - exact).max() <= 2e-5 * np.abs(exact).max(), f"{case}"


@pytest.mark.parametrize(("engine", "order"), WAYS)
def test_every_engine_is_there(engine: str, order: str) -> None:
    x, weights = np.ones((1, 16, 5, 5), np.float32), np.ones((16, 16, 3, 3), np.float32)
    fed = [to_order(x, order), to_channels_last(weights) if order == "NHWC" else weights]
    (y,) = run_operator("Conv", fed, kernel=3, order=order, engine=engine)
    np.testing.assert_allclose(from_order(y, order), np.full((1, 16, 3, 3), 144.0), rtol=1e-5)
