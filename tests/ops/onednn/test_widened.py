"""Convolutions in groups of few channels, computed by oneDNN as if there were no groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.engines.onednn import convolution_family
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.problem import Candidate, Problem
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.onednn.engine import AVX2, has_vectors_of
from tests.ops.onednn.test_conv import ONE_BY_ONE, SQUARE, Layer, from_order, net_of
from tests.ops.pieces import cut_into

pytestmark = pytest.mark.skipif(not has_vectors_of(AVX2), reason="without AVX2 oneDNN has no fast implementation")
NARROW = Layer(ONE_BY_ONE, channels=24, filters=48, group=4)


def run(layer: Layer, pieces: int = 0, **arguments: ArgumentValue) -> np.ndarray:
    workspace, net = net_of(layer, "NHWC", constant=True, **arguments)
    with cut_into(pieces), SimpleNet(net, workspace) as running:
        running.run()
        running.run()
    return workspace.fetch_blob("y")


def offered(layer: Layer) -> list[Candidate]:
    """The candidates that are computed without groups."""
    put: list[Problem] = []

    def watched(problem: Problem, **_: object) -> Candidate:
        put.append(problem)
        return rule(problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_family, "choose_implementation", watched)
        run(layer)
    return [one for one in put[0].candidates() if "widened" in one.name]


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(problem: Problem, **_: object) -> Candidate:
        return next(one for one in problem.candidates() if "widened" in one.name)

    monkeypatch.setattr(convolution_family, "choose_implementation", choose)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("layer", [NARROW, Layer(SQUARE, 10, 15, group=5), Layer(SQUARE, 8, 32, group=2)])
def test_groups_stay_apart(layer: Layer) -> None:
    exact = np.maximum(layer.exact(), 0)
    for pieces in (1, 2):
        y = from_order(run(layer, post_ops=("relu",), pieces=pieces), "NHWC")
        assert np.abs(y - exact).max() < 1e-6 * np.abs(exact).max()


@pytest.mark.usefixtures("widened")
def test_bytes_do_not_depend_on_pieces_or_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(NARROW)
    assert run(NARROW, pieces=2).tobytes() == whole.tobytes()
    x, *others = NARROW.fed("NHWC")
    monkeypatch.setattr(Layer, "fed", lambda *_: [x[:1], *others])
    assert run(replace(NARROW, batch=1)).tobytes() == whole[0].tobytes()


def test_it_is_offered_for_few_channels_in_groups_only() -> None:
    assert offered(NARROW)
    assert not offered(replace(NARROW, group=24)), "depthwise"
    assert not offered(replace(NARROW, group=1))
    assert not offered(replace(NARROW, channels=256, group=4))
    assert not offered(replace(NARROW, geometry=SQUARE)), "24 channels times 9 taps"


def test_the_rule_takes_it_where_the_library_has_a_narrow_product_a_group_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it has with AVX2, and not with AVX-512."""
    names: list[str] = []

    def watched(problem: Problem, **_: object) -> Candidate:
        candidates = list(problem.candidates())
        kept = [one for one in candidates if one.is_general or one.is_composed]
        monkeypatch.setattr(Problem, "candidates", lambda *_: iter(kept))
        names.append(rule(problem).name)
        monkeypatch.setattr(Problem, "candidates", lambda *_: iter([one for one in candidates if one not in kept]))
        if len(kept) < len(candidates):
            names.append(rule(problem).name)
        return candidates[0]

    monkeypatch.setattr(convolution_family, "choose_implementation", watched)
    run(NARROW)
    assert "widened" in names[0]
    assert not any("widened" in name for name in names[1:])
