"""Convolutions of one tap as products of our own: results, bytes, and where the rule takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.errors import OperatorError
from dagexec.ops.engines.onednn import convolution_family
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.problem import COMPOSED, Candidate, Problem
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

NAME = f"{COMPOSED}panels"
IMAGE = Geometry((7, 9), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0))
LAYER = Layer(IMAGE, 24, 40)


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Has the candidate compute; the problems that were put."""
    put: list[Problem] = []

    def choose(problem: Problem, **_: object) -> Candidate:
        put.append(problem)
        return next(one for one in problem.candidates() if one.name.startswith(NAME))

    monkeypatch.setattr(convolution_family, "choose_implementation", choose)
    return put


def run(layer: Layer, operand: Array | None = None, pieces: int = 0, **arguments: ArgumentValue) -> Array:
    """Y as N, C, spatial; `operand` is what Y holds before."""
    held = None if operand is None else to_order(operand, "NHWC")
    workspace, net = net_of(layer, "NHWC", constant=True, operand=held, **arguments)
    with cut_into(pieces), SimpleNet(net, workspace) as running:
        running.run()
    return from_order(workspace.fetch_blob("y"), "NHWC")


def error(y: Array, exact: Array) -> float:
    """The largest error, relative to the largest element of the result."""
    assert y.shape == exact.shape
    return float(np.abs(y - exact).max() / max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize(("channels", "filters"), [(4, 8), (16, 96), (20, 56), (100, 64), (1024, 32)])
def test_sizes(channels: int, filters: int) -> None:
    for geometry in (IMAGE, replace(IMAGE, size=(1, 1)), Geometry((31,), (1,), (1,), (1,), (0, 0))):
        layer = Layer(geometry, channels, filters)
        assert error(run(layer), layer.exact()) < 2e-6


@pytest.mark.parametrize("text", [text for text in FORMULAS if text.split(":")[0] in FUNCTIONS])
def test_post_ops(text: str) -> None:
    assert error(run(LAYER, post_ops=(text,)), FORMULAS[text](LAYER.exact())) < 2e-6


def test_what_y_held_is_added_before_the_activation() -> None:
    held = np.random.default_rng(2).standard_normal((2, 40, 7, 9)).astype(np.float32)
    y = run(LAYER, held, post_ops=("sum:3", "swish:1.0"))
    assert error(y, FORMULAS["swish:1.0"](held + LAYER.exact())) < 2e-6


def test_bytes_do_not_depend_on_pieces_or_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(LAYER, post_ops=("swish:1.0",))
    for pieces in (2, 3):
        assert run(LAYER, pieces=pieces, post_ops=("swish:1.0",)).tobytes() == whole.tobytes(), pieces
    x, *others = LAYER.fed("NHWC")
    for image in range(2):
        monkeypatch.setattr(Layer, "fed", lambda *_, image=image: [x[image : image + 1], *others])
        assert run(replace(LAYER, batch=1), post_ops=("swish:1.0",)).tobytes() == whole[image].tobytes(), image


@pytest.mark.parametrize(
    "layer",
    [
        replace(LAYER, geometry=replace(IMAGE, stride=(2, 2))),
        replace(LAYER, geometry=replace(IMAGE, pads=(1, 1, 1, 1))),
        replace(LAYER, geometry=replace(IMAGE, kernel=(1, 2))),
        replace(LAYER, group=4),
        replace(LAYER, channels=22),
        replace(LAYER, filters=36),
    ],
    ids=["strides", "padding", "two taps", "groups", "channels", "filters"],
)
def test_it_is_not_offered_for(layer: Layer) -> None:
    with pytest.raises(OperatorError, match="StopIteration"):
        run(layer)


def test_the_rule_takes_it(problems: list[Problem]) -> None:
    for text in ("swish:1.0", "gelu_tanh", "relu", "hardswish"):
        run(replace(LAYER, filters=48), post_ops=(text,))
        assert rule(problems.pop()).name.startswith(NAME), text
