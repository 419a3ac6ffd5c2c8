"""Transposed convolutions whose windows lie side by side, as products of our own: results, bytes, what they are for.

The values are small integers, so every sum is exact in float32 and results are compared bit by bit with the scattering
of each pixel in float64.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.errors import OperatorError
from dagexec.ops.engines.onednn import convolution_family
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.implementation import rule
from dagexec.ops.engines.onednn.problem import COMPOSED, Candidate, Problem
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.conv.test_conv_transposed import TransposedCase, scatter
from tests.ops.pieces import cut_into
from tests.ops.running import operator_def
from tests.ops.windows import Array, to_channels_first

_found = library()
pytestmark = pytest.mark.skipif(
    _found is None or not _found.machine.can_run,
    reason="it needs oneDNN, AVX2 with FMA, and memory that may be executable",
)

NAME = f"{COMPOSED}rows of taps"
CASE = TransposedCase((5, 11), (2, 2), (2, 2), (1, 1), (0,) * 4, (0, 0), 0, 2, 1, 12, 24, order="NHWC")


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Has the candidate compute; the problems that were put."""
    put: list[Problem] = []

    def choose(problem: Problem, **_: object) -> Candidate:
        put.append(problem)
        return next(one for one in problem.candidates() if one.name.startswith(NAME))

    monkeypatch.setattr(convolution_family, "choose_implementation", choose)
    return put


def run(case: TransposedCase, images: slice = slice(None), pieces: int = 0, **arguments: ArgumentValue) -> Array:
    """Y of some images as N, C, spatial, by parameters that never change."""
    x, *parameters = case.fed()
    workspace, names = Workspace(), ["x", "w", "b"][: 1 + len(parameters)]
    for name, array in zip(names, [x[images], *parameters], strict=True):
        workspace.feed_blob(name, array)
        if name != "x":
            workspace.get_blob(name).tensor().freeze()
    definition = operator_def("ConvTranspose", names, ["y"], **case.arguments(), **arguments, engine="ONEDNN")
    with cut_into(pieces), SimpleNet(NetDef(name="test", op=[definition]), workspace) as running:
        running.run()
    y = workspace.fetch_blob("y")
    return to_channels_first(y) if case.order == "NHWC" else y


@pytest.mark.parametrize("taps", [(1, 1), (1, 2), (2, 2), (3, 2), (4, 4)])
@pytest.mark.parametrize("size", [(1, 1), (5, 11), (2, 16), (7, 40)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_sizes(taps: tuple[int, int], size: tuple[int, int], bias: bool) -> None:
    case = replace(CASE, size=size, kernel=taps, stride=taps, bias=bias)
    np.testing.assert_array_equal(run(case), scatter(case))


@pytest.mark.parametrize(("channels", "filters"), [(4, 8), (20, 40), (1024, 12), (8, 100)])
def test_channels(channels: int, filters: int) -> None:
    case = replace(CASE, per_group=channels, filters_per_group=filters)
    np.testing.assert_array_equal(run(case), scatter(case))


def test_bytes_do_not_depend_on_pieces_or_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    fractions = [rng.standard_normal(array.shape).astype(np.float32) for array in CASE.fed()]
    monkeypatch.setattr(TransposedCase, "fed", lambda _: fractions)
    whole = run(CASE)
    for pieces in (2, 3):
        assert run(CASE, pieces=pieces).tobytes() == whole.tobytes(), pieces
    for image in range(2):
        assert run(CASE, slice(image, image + 1)).tobytes() == whole[image].tobytes(), image


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, stride=(2, 3)),
        replace(CASE, kernel=(3, 3)),
        replace(CASE, pads=(0, 0, 1, 1)),
        replace(CASE, pads=(1, 1, 0, 0)),
        replace(CASE, adj=(1, 1)),
        replace(CASE, group=2),
        replace(CASE, per_group=10),
        replace(CASE, filters_per_group=3),
        replace(CASE, order="NCHW"),
    ],
    ids=["gaps", "overlap", "tail", "head", "more pixels", "groups", "channels", "filters", "order"],
)
def test_it_is_not_offered_for(case: TransposedCase) -> None:
    with pytest.raises(OperatorError, match="StopIteration"):
        run(case)


@pytest.mark.parametrize("size", [(8, 8), (64, 64)])
def test_the_rule_takes_it(size: tuple[int, int], problems: list[Problem]) -> None:
    run(replace(CASE, size=size, per_group=64, filters_per_group=32, batch=1))
    assert rule(problems.pop()).name.startswith(NAME)
