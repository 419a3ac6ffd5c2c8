"""Convolutions of several taps as products of our own: results in all geometries, bytes, and where they are offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dagexec.errors import OperatorError
from dagexec.ops.engines.onednn import convolution_family, windows
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.primitive import primitives_made
from dagexec.ops.engines.onednn.problem import COMPOSED, Candidate, Problem
from dagexec.ops.kernels.post_ops import FUNCTIONS
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.activation.test_post_ops import FORMULAS
from tests.ops.onednn.test_conv import Layer, from_order, net_of, to_order
from tests.ops.onednn.test_direct import GEOMETRIES
from tests.ops.onednn.test_pointwise import error, run
from tests.ops.windows import Geometry

_found = library()
pytestmark = pytest.mark.skipif(
    _found is None or not _found.machine.can_run,
    reason="it needs oneDNN, AVX2 with FMA, and memory that may be executable",
)

NAME = f"{COMPOSED}windows"
IMAGE = Geometry((7, 9), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
LAYER = Layer(IMAGE, 12, 40)


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Has the candidate compute; the problems that were put."""
    put: list[Problem] = []

    def choose(problem: Problem, **_: object) -> Candidate:
        put.append(problem)
        return next(one for one in problem.candidates() if one.name.startswith(NAME))

    monkeypatch.setattr(convolution_family, "choose_implementation", choose)
    return put


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_geometries(geometry: Geometry) -> None:
    layer = replace(LAYER, geometry=geometry, filters=32)
    assert error(run(layer), layer.exact()) < 2e-6


@pytest.mark.parametrize(("channels", "filters"), [(4, 8), (8, 16), (4, 24), (20, 56), (16, 64), (512, 32)])
def test_channels(channels: int, filters: int) -> None:
    for geometry in (IMAGE, replace(IMAGE, size=(2, 12), stride=(1, 1), pads=(1, 0, 1, 0))):
        layer = Layer(geometry, channels, filters)
        assert error(run(layer), layer.exact()) < 2e-6


@pytest.mark.parametrize("columns", [64, 5])
def test_rows_are_copied_some_at_a_time(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And parts of them where they are long."""
    whole = [run(replace(LAYER, geometry=one)).tobytes() for one in GEOMETRIES.values()]
    monkeypatch.setattr(windows, "core_cache", lambda: 1 << 12)
    monkeypatch.setattr(windows, "_LEAST_COLUMNS", columns)
    assert [run(replace(LAYER, geometry=one)).tobytes() for one in GEOMETRIES.values()] == whole


@pytest.mark.parametrize("text", [text for text in FORMULAS if text.split(":")[0] in FUNCTIONS])
def test_post_ops(text: str) -> None:
    assert error(run(LAYER, post_ops=(text,)), FORMULAS[text](LAYER.exact())) < 2e-6


def test_what_y_held_is_added_before_the_activation() -> None:
    held = np.random.default_rng(2).standard_normal((2, 40, 7, 9)).astype(np.float32)
    y = run(LAYER, held, post_ops=("sum:3", "swish:1.0"))
    assert error(y, FORMULAS["swish:1.0"](held + LAYER.exact())) < 2e-6


@pytest.mark.parametrize(("post_ops", "is_last"), [(("add:3", "relu"), False), (("relu", "add:3"), True)])
def test_another_tensor_is_added(post_ops: tuple[str, ...], is_last: bool) -> None:
    other = np.random.default_rng(2).standard_normal((2, 40, 7, 9)).astype(np.float32)
    workspace, net = net_of(LAYER, "NHWC", constant=True, operand=to_order(other, "NHWC"), post_ops=post_ops)
    workspace.feed_blob("other", to_order(other, "NHWC"))
    net.op[0].input[3] = "other"
    with SimpleNet(net, workspace) as running:
        running.run()
    exact = LAYER.exact()
    wanted = np.maximum(exact, 0) + other if is_last else np.maximum(exact + other, 0)
    assert error(from_order(workspace.fetch_blob("y"), "NHWC"), wanted) < 2e-6


def test_bytes_do_not_depend_on_pieces_or_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(LAYER, post_ops=("swish:1.0",))
    for pieces in (2, 3, 11):
        assert run(LAYER, pieces=pieces, post_ops=("swish:1.0",)).tobytes() == whole.tobytes(), pieces
    x, *others = LAYER.fed("NHWC")
    for image in range(2):
        monkeypatch.setattr(Layer, "fed", lambda *_, image=image: [x[image : image + 1], *others])
        assert run(replace(LAYER, batch=1), post_ops=("swish:1.0",)).tobytes() == whole[image].tobytes(), image


def test_what_is_no_number_stays_where_windows_read_it() -> None:
    workspace, net = net_of(LAYER, "NHWC", constant=True, post_ops=("relu",))
    image = workspace.fetch_blob("x").copy()
    image[0, 3, 4] = np.nan
    workspace.feed_blob("x", image)
    with SimpleNet(net, workspace) as running:
        running.run()
    y = workspace.fetch_blob("y")
    assert np.isnan(y[0, 2:5, 3:6]).all()
    assert np.isnan(y).sum() == 9 * 40


def test_another_size_of_the_image_asks_nothing_of_the_library() -> None:
    """Neither are primitives made, nor is the filter packed again."""
    workspace, net = net_of(LAYER, "NHWC", constant=True)
    with SimpleNet(net, workspace) as running:
        running.run()
        forms, made = workspace.get_blob("w").tensor().constant.forms(), primitives_made()
        for layer in (replace(LAYER, geometry=replace(IMAGE, size=size)) for size in ((8, 11), (30, 2))):
            x, *_ = layer.fed("NHWC")
            workspace.feed_blob("x", x)
            running.run()
            assert error(from_order(workspace.fetch_blob("y"), "NHWC"), layer.exact()) < 2e-6
        assert workspace.get_blob("w").tensor().constant.forms() == forms
        assert primitives_made() == made


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, group=4),
        replace(LAYER, channels=22),
        replace(LAYER, filters=36),
        replace(LAYER, geometry=Geometry((3, 4, 5), (2, 2, 2), (1, 1, 1), (1, 1, 1), (0,) * 6)),
    ],
    ids=["groups", "channels", "filters", "three axes"],
)
def test_it_is_not_offered_for(layer: Layer) -> None:
    with pytest.raises(OperatorError, match="StopIteration"):
        run(layer)


def test_the_rule_takes_it_for_whatever_winograd_does_not_compute(problems: list[Problem]) -> None:
    strides = replace(IMAGE, stride=(2, 2))
    large = Geometry((28, 28), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2))
    for geometry, expected in ((strides, True), (large, True), (replace(IMAGE, size=(28, 28)), False)):
        run(Layer(geometry, 32, 64, batch=1))
        assert rule(problems.pop()).name.startswith(NAME) == expected, geometry
