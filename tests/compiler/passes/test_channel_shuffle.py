"""channel-shuffle: Reshape, Transpose, Reshape."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.channel_shuffle import PASS
from tests.compiler.passes.models import model_of, op, rewritten, unchanged

IMAGE = {"x": (2, 6, 4, 5)}


def shuffled(split: list[int], axes: list[int], joined: list[int]) -> list:
    return [
        op("Reshape", ["x"], ["a"], shape=split),
        op("Transpose", ["a"], ["b"], axes=axes),
        op("Reshape", ["b"], ["y"], shape=joined),
    ]


@pytest.mark.parametrize(
    ("split", "axes", "joined"),
    [
        ([2, 3, 2, 4, 5], [0, 2, 1, 3, 4], [2, 6, 4, 5]),
        ([0, 2, 3, 4, 5], [0, 2, 1, 3, 4], [0, -1, 4, 5]),
        ([2, 2, 3, 20], [0, 2, 1, 3], [2, 6, 4, 5]),
    ],
)
def test_channels_dealt_out_in_turn_are_a_shuffle(split: list[int], axes: list[int], joined: list[int]) -> None:
    model = model_of(shuffled(split, axes, joined), inputs=IMAGE)
    assert rewritten(PASS, model) == ["ChannelShuffle x -> y"]


def test_channels_last_and_a_free_batch() -> None:
    model = model_of(shuffled([-1, 4, 5, 2, 3], [0, 1, 2, 4, 3], [-1, 4, 5, 6]), inputs={"x": (None, 4, 5, 6)})
    assert rewritten(PASS, model) == ["ChannelShuffle x -> y"]


@pytest.mark.parametrize(
    ("split", "axes", "joined"),
    [
        ([2, 3, 2, 4, 5], [0, 2, 1, 4, 3], [2, 6, 4, 5]),
        ([2, 3, 2, 4, 5], [0, 2, 1, 3, 4], [2, 6, 5, 4]),
        ([2, 6, 2, 2, 5], [0, 1, 3, 2, 4], [2, 6, 4, 5]),
        ([3, 2, 2, 4, 5], [0, 2, 1, 3, 4], [2, 6, 4, 5]),
        ([4, 3, 2, 10], [0, 2, 1, 3], [2, 6, 4, 5]),
        ([2, 2, 2, 6, 5], [0, 2, 1, 3, 4], [2, 6, 4, 5]),
        ([1, 2, 6, 4, 5], [0, 2, 1, 3, 4], [2, 6, 4, 5]),
    ],
)
def test_other_permutations_stay(split: list[int], axes: list[int], joined: list[int]) -> None:
    assert unchanged(PASS, model_of(shuffled(split, axes, joined), inputs=IMAGE))


def test_what_others_see_stays() -> None:
    operators = shuffled([2, 3, 2, 4, 5], [0, 2, 1, 3, 4], [2, 6, 4, 5])
    for name in "ab":
        assert unchanged(PASS, model_of(operators, ["y", name], inputs=IMAGE))
        assert unchanged(PASS, model_of([*operators, op("Relu", [name], ["z"])], ["y", "z"], inputs=IMAGE))
