"""Draws by weights: how often each comes, and that none comes twice where none may."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import OperatorError
from tests.ops.running import operator_def, run_net, workspace_of


def drawn(op_type: str, *inputs: np.ndarray, outputs: int = 1, **arguments: int) -> list[np.ndarray]:
    """What one run draws."""
    blobs = {f"x{index}": array for index, array in enumerate(inputs)}
    workspace, names = workspace_of(blobs), [f"y{index}" for index in range(outputs)]
    definition = operator_def(op_type, list(blobs), names, **arguments)
    definition.device_option.random_seed = 11
    run_net(workspace, definition)
    return [workspace.fetch_blob(name) for name in names]


def test_places_are_drawn_in_proportion_to_their_weights() -> None:
    weights = np.tile(np.array([1, 0, 3, 0], np.float32), (4000, 1))
    values = np.tile(np.arange(4, dtype=np.float32) * 10, (4000, 1))
    places, chosen = drawn("WeightedSample", weights, values, outputs=2)
    assert (places.shape, places.dtype) == ((4000, 1), np.int32)
    np.testing.assert_array_equal(chosen, places * 10)
    counts = np.bincount(places[:, 0], minlength=4)
    assert counts[1] == counts[3] == 0
    assert abs(counts[0] - 1000) < 150
    sums = np.array([1, 1, 4, 4], np.float32)
    [many] = drawn("WeightedMultiSampling", sums, num_samples=4000)
    counts = np.bincount(many, minlength=4)
    assert counts[1] == counts[3] == 0
    assert abs(counts[0] - 1000) < 150
    assert drawn("WeightedSample", weights[:0])[0].shape == (0,)


def test_numbers_are_drawn_once_and_some_never() -> None:
    avoided = np.array([2, 9, 5, 5, 77], np.int64)
    [found] = drawn("UniqueUniformFill", np.array([7]), avoided, min=0, max=9, input_as_shape=1)
    assert sorted(found.tolist()) == [0, 1, 3, 4, 6, 7, 8]
    with pytest.raises(OperatorError, match="cannot draw 8 different numbers of 7"):
        drawn("UniqueUniformFill", np.array([8]), avoided, min=0, max=9, input_as_shape=1)
