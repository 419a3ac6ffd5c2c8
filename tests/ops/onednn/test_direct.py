"""Convolutions by machine code of our own: results in all orders, bytes, and where it is offered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.errors import OperatorError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn import convolution_family, direct
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.problem import COMPOSED, Candidate, Problem
from dagexec.ops.kernels.direct_kernels import COUNTS, NEXT_RUN, Row, row_kernel
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.ops.kernels.post_ops import FUNCTIONS
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.activation.test_post_ops import FORMULAS
from tests.ops.onednn.test_conv import Layer, from_order, net_of, to_order
from tests.ops.pieces import cut_into
from tests.ops.windows import Array, Geometry

_found = library()
pytestmark = pytest.mark.skipif(
    _found is None or not _found.machine.can_run,
    reason="it needs oneDNN, AVX2 with FMA, and memory that may be executable",
)

NAME = f"{COMPOSED}direct"

GEOMETRIES = {
    "square": Geometry((9, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "wide": Geometry((5, 61), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "large window": Geometry((8, 33), (7, 7), (1, 1), (1, 1), (3, 3, 3, 3)),
    "window in parts": Geometry((3, 40), (2, 17), (1, 1), (1, 1), (0, 8, 1, 8)),
    "strides": Geometry((11, 30), (5, 5), (2, 3), (1, 1), (2, 2, 2, 2)),
    "dilations": Geometry((9, 29), (3, 3), (1, 1), (2, 5), (2, 5, 2, 5)),
    "taps that never meet the image": Geometry((3, 4), (3, 3), (1, 1), (6, 6), (6, 6, 6, 6)),
    "uneven padding": Geometry((6, 11), (3, 2), (2, 1), (1, 2), (0, 2, 3, 0)),
    "padding beyond the window": Geometry((4, 5), (2, 2), (1, 1), (1, 1), (3, 3, 3, 3)),
    "one pixel": Geometry((1, 1), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "one tap": Geometry((5, 13), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    "one long axis": Geometry((421,), (3,), (1,), (4,), (8, 0)),
    "one axis": Geometry((57,), (3,), (1,), (4,), (8, 0)),
}
GROUPS = {  # channels, filters, groups
    "depthwise": (32, 32, 32),
    "depthwise, ragged": (37, 37, 37),
    "two": (32, 32, 16),
    "four, ragged": (36, 36, 9),
    "eight": (32, 32, 4),
    "sixteen": (48, 48, 3),
    "thirty-two": (64, 64, 2),
    "others than are read": (9, 48, 3),
    "the whole image": (3, 24, 1),
}


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Has the candidate compute; the problems that were put."""
    put: list[Problem] = []

    def choose(problem: Problem, **_: object) -> Candidate:
        put.append(problem)
        return next(one for one in problem.candidates() if one.name.startswith(NAME))

    monkeypatch.setattr(convolution_family, "choose_implementation", choose)
    return put


IN_NHWC = "NHWC", "NHWC"
WIDEST = AVX2 if _found is None else _found.machine.lanes
BLOCKED = f"NCHW{WIDEST}c"
IN_ORDERS = {  # orders of X and Y, channels, filters, groups
    "three channels in NCHW, and NHWC": (("NCHW", "NHWC"), 3, 48, 1),
    "three channels in NCHW, and blocks": (("NCHW", BLOCKED), 3, 48, 1),
    "one channel in NCHW": (("NCHW", "NHWC"), 1, 16, 1),
    "blocks": ((BLOCKED, BLOCKED), 32, 48, 1),
    "depthwise in blocks": ((BLOCKED, BLOCKED), 32, 32, 32),
    "groups of half a block": ((BLOCKED, BLOCKED), 48, 48, 96 // WIDEST),
    "groups of blocks": ((BLOCKED, BLOCKED), 64, 64, 2),
    "groups of blocks to others": ((BLOCKED, BLOCKED), 64, 32, 2),
    "vectors in threes": ((BLOCKED, BLOCKED), 16, 48, 1),
    "blocks, and NHWC": ((BLOCKED, "NHWC"), 32, 32, 1),
}


def run(
    layer: Layer,
    operand: Array | None = None,
    runs: int = 1,
    pieces: int = 0,
    orders: tuple[str, str] = IN_NHWC,
    **arguments: ArgumentValue,
) -> Array:
    """Y as N, C, spatial; `operand` is what Y holds before."""
    held = None if operand is None else to_order(operand, orders[1])
    arguments |= {"output_order": orders[1]} if orders[0] != orders[1] else {}
    workspace, net = net_of(layer, orders[0], constant=True, operand=held, **arguments)
    with cut_into(pieces), SimpleNet(net, workspace) as running:
        for _ in range(runs):
            running.run()
    return from_order(workspace.fetch_blob("y"), orders[1])


def error(y: Array, exact: Array) -> float:
    """The largest error, relative to the largest element of the result."""
    assert y.shape == exact.shape
    return float(np.abs(y - exact).max() / max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_every_geometry(sizes: tuple[int, int, int]) -> None:
    channels, filters, group = sizes
    for name, geometry in GEOMETRIES.items():
        if filters // group <= 4 or math.prod(geometry.kernel) > 1:  # one tap of many channels is a product
            layer = Layer(geometry, channels, filters, group)
            assert error(run(layer), layer.exact()) < 2e-6, name


@pytest.mark.parametrize("kind", IN_ORDERS)
def test_every_geometry_in_other_orders(kind: str) -> None:
    orders, channels, filters, group = IN_ORDERS[kind]
    for name, geometry in GEOMETRIES.items():
        if math.prod(geometry.kernel) > 1 or (group == 1 and orders[0] == BLOCKED):
            layer = Layer(geometry, channels, filters, group)
            assert error(run(layer, orders=orders), layer.exact()) < 2e-6, name


@pytest.mark.parametrize("kind", IN_ORDERS)
def test_bytes_in_other_orders_do_not_depend_on_pieces_and_are_added_to_what_is_there(kind: str) -> None:
    orders, channels, filters, group = IN_ORDERS[kind]
    layer = Layer(GEOMETRIES["square"], channels, filters, group, batch=3)
    held = np.random.default_rng(2).standard_normal((3, filters, 9, 8)).astype(np.float32)
    whole = run(layer, held, orders=orders, post_ops=("sum:3", "relu"))
    assert error(whole, np.maximum(layer.exact() + held, 0)) < 2e-6
    for pieces in (2, 7):
        found = run(layer, held, pieces=pieces, orders=orders, post_ops=("sum:3", "relu"))
        assert found.tobytes() == whole.tobytes(), pieces


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_image_in_nchw_that_is_not_read_so_is_copied_to_nhwc_first(dtype: str) -> None:
    layer = Layer(GEOMETRIES["square"], 3, 20, dtype=dtype)
    workspace, net = net_of(layer, "NCHW", constant=True, output_order="NHWC")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_family, "choose_implementation", rule_of_library)
        with SimpleNet(net, workspace) as running:
            running.run()
    assert error(from_order(workspace.fetch_blob("y"), "NHWC"), layer.exact()) < (2e-6 if dtype == "float32" else 2e-3)


@pytest.mark.parametrize("kind", [*IN_ORDERS, "NHWC"])
def test_a_callers_memory_is_read_and_written_in_place(kind: str) -> None:
    orders, channels, filters, group = IN_ORDERS.get(kind, (IN_NHWC, 36, 36, 9))
    layer = Layer(GEOMETRIES["square"], channels, filters, group)
    arguments: dict[str, ArgumentValue] = {"output_order": orders[1]} if orders[0] != orders[1] else {}
    workspace, net = net_of(layer, orders[0], constant=True, **arguments)
    with SimpleNet(net, workspace) as running:
        running.run()
        (prepared,) = running.prepared().prepared
        x, y = workspace.fetch_blob("x"), workspace.fetch_blob("y")
        image, result = -x, np.empty_like(y)
        prepared.input_rebinds[0](image)
        prepared.output_rebinds[0](result)
        prepared.step()
    bias = layer.arrays()[2].reshape(1, -1, 1, 1)
    assert error(from_order(result, orders[1]), 2 * bias - layer.exact()) < 2e-6


@pytest.mark.parametrize("lanes", [AVX2, AVX512])
def test_both_sizes_of_vectors(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    assert _found is not None
    if lanes > _found.machine.lanes:
        pytest.skip("the processor has no AVX-512")
    fits = direct.Layer.fits
    monkeypatch.setattr(direct.Layer, "fits", lambda self, wanted: wanted == lanes and fits(self, wanted))
    for channels, group in ((48, 48), (48, 12), (48, 6), (48, 3)):
        if direct.Layer.fits(_layer(channels, group), lanes):
            layer = Layer(GEOMETRIES["wide"], channels, channels, group)
            assert error(run(layer), layer.exact()) < 2e-6, group


def _layer(channels: int, group: int) -> direct.Layer:
    axis = Axis(9, 3, 1, 1, 1, 1, 9)
    return direct.Layer(1, channels, channels, group, axis, axis, False, (), ())


@pytest.mark.parametrize("text", [text for text in FORMULAS if text.split(":")[0] in FUNCTIONS])
def test_post_ops(text: str) -> None:
    layer = Layer(GEOMETRIES["square"], 21, 21, 21)
    assert error(run(layer, post_ops=(text,)), FORMULAS[text](layer.exact())) < 2e-6


def test_other_tensors_are_added_before_or_after_the_activation() -> None:
    layer = Layer(GEOMETRIES["square"], 37, 37, 37)
    others = np.random.default_rng(3).standard_normal((2, 2, 37, 9, 8)).astype(np.float32)
    added = np.maximum(layer.exact(), 0) + others[0]
    for last, exact in (((), added), (("relu",), np.maximum(added, 0)), (("add:4",), added + others[1])):
        workspace, net = net_of(layer, "NHWC", constant=True, post_ops=("relu", "add:3", *last))
        for name, other in zip(("other", "another"), others[: 2 if last == ("add:4",) else 1], strict=False):
            workspace.feed_blob(name, to_order(other, "NHWC"))
            net.op[0].input.append(name)
        with SimpleNet(net, workspace) as running:
            running.run()
        assert error(from_order(workspace.fetch_blob("y"), "NHWC"), exact) < 2e-6, last


def test_the_result_is_added_in_place_in_every_run() -> None:
    layer = Layer(GEOMETRIES["square"], 32, 32, 8)
    held = np.random.default_rng(2).standard_normal((2, 32, 9, 8)).astype(np.float32)
    y = run(layer, held, runs=3, post_ops=("sum:3",))
    assert error(y, held + 3 * layer.exact()) < 2e-6


@pytest.mark.parametrize(("channels", "group", "size"), [(37, 37, 9), (64, 16, 3), (64, 2, 5), (96, 96, 1)])
def test_bytes_do_not_depend_on_pieces_or_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, channels: int, group: int, size: int
) -> None:
    layer = Layer(Geometry((size, 7), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), channels, channels, group, batch=3)
    whole = run(layer, post_ops=("swish:1.0",))
    for pieces in (2, 3):
        assert run(layer, pieces=pieces, post_ops=("swish:1.0",)).tobytes() == whole.tobytes(), pieces
    single = replace(layer, batch=1)
    x, *others = layer.fed("NHWC")
    for image in range(3):
        monkeypatch.setattr(Layer, "fed", lambda *_, image=image: [x[image : image + 1], *others])
        assert run(single, post_ops=("swish:1.0",)).tobytes() == whole[image].tobytes(), image


@pytest.mark.parametrize("post_op", ["clip:0.0:6.0", "swish:1.0", "hardswish", "sigmoid"])
def test_what_is_no_number_stays_none(post_op: str) -> None:
    layer = Layer(GEOMETRIES["square"], 32, 32, 32)
    workspace, net = net_of(layer, "NHWC", constant=True, post_ops=(post_op,))
    image = workspace.fetch_blob("x").copy()
    image[0, 4, 4, 5] = math.nan
    workspace.feed_blob("x", image)
    with SimpleNet(net, workspace) as running:
        running.run()
    y = workspace.fetch_blob("y")
    assert np.isnan(y[0, 3:6, 3:6, 5]).all()
    assert np.isnan(y).sum() == 9


@pytest.mark.parametrize("kind", IN_ORDERS)
def test_what_is_no_number_stays_none_in_other_orders(kind: str) -> None:
    orders, channels, filters, group = IN_ORDERS[kind]
    layer = Layer(GEOMETRIES["square"], channels, filters, group)
    arguments: dict[str, ArgumentValue] = {"output_order": orders[1]} if orders[0] != orders[1] else {}
    workspace, net = net_of(layer, orders[0], constant=True, post_ops=("relu",), **arguments)
    image = from_order(workspace.fetch_blob("x"), orders[0]).copy()
    image[0, 0, 4, 4] = math.nan
    workspace.feed_blob("x", to_order(image, orders[0]))
    with SimpleNet(net, workspace) as running:
        running.run()
    y = from_order(workspace.fetch_blob("y"), orders[1])
    assert np.isnan(y[0, : filters // group, 3:6, 3:6]).all()
    assert np.isnan(y).sum() == 9 * filters // group


def is_offered(layer: Layer, **arguments: ArgumentValue) -> bool:
    try:
        run(layer, **arguments)
    except OperatorError:
        return False
    return True


def test_it_is_offered_for_groups_that_are_parts_of_vectors_or_whole_ones() -> None:
    layer = Layer(GEOMETRIES["square"], 48, 48, 12)
    assert is_offered(layer)
    assert not is_offered(replace(layer, group=16)), "three channels in a group"
    assert not is_offered(replace(layer, group=1)), "all channels"
    assert not is_offered(replace(layer, channels=24)), "two to four channels"
    assert not is_offered(Layer(GEOMETRIES["square"], 4, 4, 4)), "less than a vector"
    assert not is_offered(replace(layer, geometry=GEOMETRIES["one tap"], group=1))
    assert not is_offered(layer, post_ops=("abs",))
    assert not is_offered(replace(layer, group=1, channels=16), orders=("NCHW", "NHWC")), "many planes"
    half = Layer(GEOMETRIES["square"], 4 * WIDEST, 8 * WIDEST, 8)
    assert is_offered(half)
    assert not is_offered(half, orders=(BLOCKED, BLOCKED)), "two groups read a block"


def rule_of_library(problem: Problem, **_: object) -> Candidate:
    """What is chosen by rule."""
    return rule(problem)


def test_without_machine_code_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.ops.kernels.machine.can_run", lambda: False)
    assert not is_offered(Layer(GEOMETRIES["square"], 32, 32, 32))


def test_the_rule_takes_it(problems: list[Problem]) -> None:
    for group in (32, 8):
        run(Layer(GEOMETRIES["wide"], 32, 32, group))
        assert rule(problems.pop()).name.startswith(NAME), group


def kept_bytes(channels: int) -> int:
    """Bytes that the preparation of a layer keeps."""
    geometry = Geometry((64, 9), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
    workspace, net = net_of(Layer(geometry, channels, channels, channels), "NHWC", constant=True)
    with SimpleNet(net, workspace) as running:
        (prepared,) = running.prepared().prepared
    return prepared.nbytes


def test_a_row_is_one_call_whatever_the_channels() -> None:
    assert kept_bytes(256) - kept_bytes(64) < 64 * 48


def test_rows_of_any_width_share_code_that_stays_for_good() -> None:
    """Of 481 widths there are blocks of a few sizes, and of each a few that are left over."""
    found = library()
    assert found is not None
    lanes = found.machine.lanes
    bias, relu = True, (("relu", 0.0, 0.0),)
    rows = [
        Row(lanes, 1, 1, 3, 1, 1, 1, width, width, 32, width * width * 32, 32, lanes, 3, 1, bias, relu)
        for width in range(32, 513)
    ]
    kernels = [row_kernel(row) for row in rows]
    assert len({kernel.address for kernel in kernels}) < 60
    for row, kernel in zip(rows, kernels, strict=True):
        single = sum(count == 1 for count, _ in row.blocks())
        assert sum(kernel.fields[COUNTS - NEXT_RUN :]) + single == -(-row.result // row.block)
