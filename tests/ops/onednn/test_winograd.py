"""Winograd's algorithm out of own transforms and a product of oneDNN: results, bytes, and where it is offered."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.engines.onednn import convolution_family, winograd, winograd_tiling
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.problem import COMPOSED, Candidate, Problem
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.activation.test_post_ops import FORMULAS
from tests.ops.onednn.test_conv import SQUARE, Layer, from_order, net_of, to_order
from tests.ops.pieces import cut_into
from tests.ops.windows import Array, Geometry

_found = library()
pytestmark = pytest.mark.skipif(
    _found is None or not _found.machine.can_run,
    reason="it needs oneDNN, AVX2 with FMA, and memory that may be executable",
)


def window(height: int, width: int, pads: tuple[int, int, int, int] = (1, 1, 1, 1)) -> Geometry:
    return Geometry((height, width), (3, 3), (1, 1), (1, 1), pads)


GEOMETRIES = {
    "tiles that fit": window(8, 8),
    "tiles that stand out": window(7, 9),
    "no padding": window(9, 8, (0, 0, 0, 0)),
    "uneven padding": window(6, 11, (0, 2, 1, 0)),
    "much padding": window(3, 4, (2, 2, 2, 2)),
    "one pixel": window(1, 1),
    "one row": window(1, 21),
    "one column": window(13, 1),
}


class Chosen:
    """The tiles whose candidate computes, and the problems that were put."""

    def __init__(self) -> None:
        self.outputs = 4
        self.problems: list[Problem] = []

    def choose(self, problem: Problem, **_: object) -> Candidate:
        self.problems.append(problem)
        name = f"{COMPOSED}winograd {self.outputs}x3"
        return next(one for one in problem.candidates() if one.name.startswith(name))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    found = Chosen()
    monkeypatch.setattr(convolution_family, "choose_implementation", found.choose)
    return found


def run(
    layer: Layer, operand: Array | None = None, runs: int = 1, pieces: int = 0, **arguments: ArgumentValue
) -> Array:
    """Y as stored; `operand` is what Y holds before."""
    held = None if operand is None else operand.copy()
    workspace, net = net_of(layer, "NHWC", constant=True, operand=held, **arguments)
    with cut_into(pieces), SimpleNet(net, workspace) as running:
        for _ in range(runs):
            running.run()
    return workspace.fetch_blob("y")


def offered(layer: Layer, **arguments: ArgumentValue) -> list[str]:
    """Names of the candidates that are Winograd's algorithm."""
    put: list[Problem] = []

    def first(problem: Problem, **_: object) -> Candidate:
        put.append(problem)
        return next(problem.candidates())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_family, "choose_implementation", first)
        run(layer, **arguments)
    return [one.name for one in put[0].candidates() if one.name.startswith(f"{COMPOSED}winograd")]


def error(y: Array, exact: Array, scale: Array | None = None) -> float:
    """The largest error, relative to the largest element of the result, or of `scale`: before limits apply."""
    return float(np.abs(from_order(y, "NHWC") - exact).max() / np.abs(exact if scale is None else scale).max())


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_geometry(chosen: Chosen, geometry: Geometry, outputs: int) -> None:
    chosen.outputs = outputs
    layer = Layer(geometry, channels=24, filters=40)
    assert error(run(layer), layer.exact()) < 2e-6


@pytest.mark.parametrize("outputs", [2, 4])
def test_groups(chosen: Chosen, outputs: int) -> None:
    chosen.outputs = outputs
    layer = Layer(window(9, 10), channels=48, filters=96, group=3)
    assert error(run(layer), layer.exact()) < 2e-6


@pytest.mark.parametrize(("outputs", "bound"), [(2, 1e-6), (4, 4e-6)])
def test_rounding_of_long_sums_is_within_what_the_documentation_says(
    chosen: Chosen, outputs: int, bound: float
) -> None:
    chosen.outputs = outputs
    layer = Layer(window(14, 14), channels=512, filters=64, batch=1)
    assert error(run(layer), layer.exact()) < bound


@pytest.mark.parametrize(
    ("post_ops", "formula"),
    [
        (("relu",), lambda y: np.maximum(y, 0)),
        (("clip:-0.5:0.75",), lambda y: np.clip(y, -0.5, 0.75)),
        (("relu", "clip:0.1:0.5"), lambda y: np.clip(np.maximum(y, 0), 0.1, 0.5)),
    ],
)
def test_post_ops(chosen: Chosen, post_ops: tuple[str, ...], formula: object) -> None:
    layer = Layer(window(9, 7))
    assert callable(formula)
    assert error(run(layer, post_ops=post_ops), formula(layer.exact()), layer.exact()) < 2e-6


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize("text", ["swish:1.0", "tanh", "gelu_erf", "hardswish", "leaky_relu:0.1"])
def test_activations_of_more_than_a_limit(chosen: Chosen, text: str, outputs: int) -> None:
    chosen.outputs = outputs
    layer = Layer(window(9, 7))
    exact = layer.exact()
    assert error(run(layer, post_ops=(text,)), FORMULAS[text](exact), exact) < 2e-6
    assert error(run(layer, post_ops=("relu", text)), FORMULAS[text](np.maximum(exact, 0)), exact) < 2e-6
    assert run(layer, pieces=2, post_ops=(text,)).tobytes() == run(layer, post_ops=(text,)).tobytes()


@pytest.mark.parametrize("last", [(), ("relu",)])
def test_another_tensor_is_added_before_or_after_the_activation(chosen: Chosen, last: tuple[str, ...]) -> None:
    layer = Layer(window(9, 7))
    other = np.random.default_rng(3).standard_normal((2, 32, 9, 7)).astype(np.float32)
    workspace, net = net_of(layer, "NHWC", constant=True, post_ops=("relu", "add:3", *last))
    workspace.feed_blob("other", to_order(other, "NHWC"))
    net.op[0].input.append("other")
    with SimpleNet(net, workspace) as running:
        running.run()
    exact = np.maximum(layer.exact(), 0) + other
    assert error(workspace.fetch_blob("y"), np.maximum(exact, 0) if last else exact) < 2e-6


def test_the_result_is_added_in_place_in_every_run(chosen: Chosen) -> None:
    layer = Layer(window(6, 7))
    held = np.random.default_rng(2).standard_normal((2, 32, 6, 7)).astype(np.float32)
    y = run(layer, to_order(held, "NHWC"), runs=3, post_ops=("sum:3",))
    assert error(y, held + 3 * layer.exact()) < 2e-6


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize(("channels", "size"), [(64, 30), (128, 14), (256, 7)])
def test_bytes_do_not_depend_on_pieces_or_on_the_batch(
    chosen: Chosen, monkeypatch: pytest.MonkeyPatch, outputs: int, channels: int, size: int
) -> None:
    chosen.outputs = outputs
    layer = Layer(window(size, size), channels, filters=64, batch=3)
    whole = run(layer)
    for pieces in (2, 3):
        assert run(layer, pieces=pieces).tobytes() == whole.tobytes(), pieces
    monkeypatch.setattr(winograd_tiling, "core_cache", lambda: 1)
    assert run(layer).tobytes() == whole.tobytes(), "one row of tiles after another"
    single = replace(layer, batch=1)
    x, *others = layer.fed("NHWC")
    for image in range(3):
        monkeypatch.setattr(Layer, "fed", lambda *_, image=image: [x[image : image + 1], *others])
        assert run(single).tobytes() == whole[image].tobytes(), image


def test_the_filter_has_the_same_bytes_with_any_threads_of_a_blas(chosen: Chosen) -> None:
    """OpenBLAS for Haswell, as on processors with AVX2 alone, gives a product of this size other bytes on two."""
    found = []
    for pieces in (1, 2):
        workspace, net = net_of(Layer(window(8, 8), channels=128, filters=32), "NHWC", constant=True)
        with SimpleNet(net, workspace, options=RunOptions(intra_op_threads=pieces)) as running:
            running.run()
        found.append(workspace.fetch_blob("y").tobytes())
    assert found[0] == found[1]


class Transformations:
    """What the filters became, and by how many bytes memory grew meanwhile."""

    def __init__(self, transform: Callable[..., None]) -> None:
        self._transform = transform
        self.found: list[Array] = []
        self.peaks: list[int] = []

    def __call__(self, *arguments: object) -> None:
        *_, packed = arguments
        assert isinstance(packed, np.ndarray)
        tracemalloc.start()
        try:
            self._transform(*arguments)
            self.peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        self.found.append(packed)


@pytest.fixture
def transformations(monkeypatch: pytest.MonkeyPatch) -> Transformations:
    found = Transformations(winograd._transform)
    monkeypatch.setattr(winograd, "_transform", found)
    return found


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize(("channels", "filters", "group"), [(48, 96, 1), (48, 96, 3), (16, 512, 1)])
def test_the_filter_has_the_same_bytes_in_any_pieces(
    chosen: Chosen,
    transformations: Transformations,
    monkeypatch: pytest.MonkeyPatch,
    outputs: int,
    channels: int,
    filters: int,
    group: int,
) -> None:
    chosen.outputs = outputs
    layer = Layer(window(9, 10), channels, filters, group=group)
    for piece in (1 << 30, 100_000, 50_000, 1):
        monkeypatch.setattr(winograd, "_PIECE", piece)
        assert error(run(layer), layer.exact()) < 2e-6
    whole, *others = (one.tobytes() for one in transformations.found)
    assert others == [whole] * 3


def test_the_transformed_filter_is_in_memory_once(chosen: Chosen, transformations: Transformations) -> None:
    """Four times the bytes of the filter; a part of it, and two copies of the filter, are there meanwhile."""
    run(Layer(window(8, 8), channels=512, filters=512, batch=1))
    (found,), (peak,) = transformations.found, transformations.peaks
    assert found.nbytes >= 36 * 512 * 512 * 4
    assert peak < 0.6 * found.nbytes


def test_what_is_no_number_stays_none(chosen: Chosen) -> None:
    workspace, net = net_of(Layer(SQUARE), "NHWC", constant=True, post_ops=("clip:0.0:6.0",))
    image = workspace.fetch_blob("x").copy()
    image[0, 4, 4] = math.nan
    workspace.feed_blob("x", image)
    with SimpleNet(net, workspace) as running:
        running.run()
    y = workspace.fetch_blob("y")
    assert np.isnan(y[0, 3:6, 3:6]).all()
    assert np.isfinite(y[1]).all()


def test_the_filter_is_transformed_once_for_all_who_read_it(chosen: Chosen) -> None:
    workspace, net = net_of(Layer(SQUARE), "NHWC", constant=True)
    workspace.feed_blob("z", workspace.fetch_blob("x"))
    second = net.op.add()
    second.CopyFrom(net.op[0])
    second.input[0], second.output[0] = "z", "u"
    with SimpleNet(net, workspace) as running:
        running.run()
        assert len(workspace.get_blob("w").tensor().constant.forms()) == 1
    assert workspace.fetch_blob("u").tobytes() == workspace.fetch_blob("y").tobytes()


def test_it_is_offered_for_constant_dense_filters_of_3x3_with_whole_vectors() -> None:
    layer = Layer(SQUARE)
    assert [name.split()[2] for name in offered(layer)] == ["2x3", "4x3"]
    assert not offered(replace(layer, channels=20))
    assert not offered(replace(layer, filters=20))
    assert not offered(replace(layer, group=4)), "four channels in a group"
    assert not offered(replace(layer, group=16)), "depthwise"
    assert not offered(replace(layer, geometry=replace(SQUARE, stride=(2, 2))))
    assert not offered(replace(layer, geometry=replace(SQUARE, dilation=(2, 2))))
    assert not offered(layer, post_ops=("abs",))
    assert not offered(layer, post_ops=("relu", "clip:0.0:1.0", "relu"))
    assert not offered(layer, ws_nbytes_limit=1000)


def test_without_machine_code_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.ops.kernels.machine.can_run", lambda: False)
    assert not offered(Layer(SQUARE))


def test_the_rule_takes_it_for_layers_with_many_channels_only(chosen: Chosen) -> None:
    for channels, size, expected in ((64, 56, True), (256, 14, True), (16, 5, False)):
        run(Layer(window(size, size), channels, filters=max(16, channels), batch=1))
        name = rule(chosen.problems.pop()).name
        assert name.startswith(f"{COMPOSED}winograd") == expected, (channels, size, name)


def kept_bytes(batch: int) -> int:
    """Bytes that the preparation of a layer keeps."""
    workspace, net = net_of(Layer(window(32, 32), channels=64, filters=64, batch=batch), "NHWC", constant=True)
    with SimpleNet(net, workspace) as running:
        (prepared,) = running.prepared().prepared
    return prepared.nbytes


def test_images_have_most_calls_in_common(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of tiles of F(4x4, 3x3) takes 14 calls of 192 bytes."""
    monkeypatch.setattr(winograd_tiling, "core_cache", lambda: 1 << 20)
    few, many = kept_bytes(10), kept_bytes(20)  # in blocks of ten rows
    assert 0 < many - few <= 10 * 8 * 600
