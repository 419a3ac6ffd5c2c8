"""The loss of a tree of softmaxes, against float64 and differences."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import OperatorError
from dagexec.storage.wire import length_field, varint
from tests.ops.running import run_operator

RNG = np.random.default_rng(3)
PATHS = {0: [(0, 2, 0)], 1: [(0, 2, 1), (2, 3, 0)], 2: [(0, 2, 1), (2, 3, 1)], 5: [(0, 2, 1), (2, 3, 2)]}
LABELS = np.array([2, 0, 5, 1, 2], np.int32)


def tree(paths: dict[int, list[tuple[int, int, int]]], size: int) -> bytes:
    """The message that says the tree."""

    def numbers(*values: int) -> bytes:
        return b"".join(varint(place << 3) + varint(value) for place, value in enumerate(values, 1))

    ways = [
        numbers(word) + b"".join(length_field(2, numbers(*node)) for node in nodes) for word, nodes in paths.items()
    ]
    return numbers(size) + b"".join(length_field(2, way) for way in ways)


def loss(x: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The formula, in float64."""
    found = np.zeros(len(x))
    for row, label in enumerate(LABELS.tolist()):
        for first, count, target in PATHS[label]:
            logits = weights[first : first + count] @ x[row] + bias[first : first + count]
            found[row] += np.log(np.exp(logits).sum()) - logits[target]
    return found


def test_losses_and_gradients() -> None:
    x, weights, bias = (RNG.normal(size=shape) for shape in ((5, 4), (5, 4), 5))
    arrays = [array.astype(np.float32) for array in (x, weights, bias)]
    hierarchy = tree(PATHS, 5)
    found, between = run_operator("HSoftmax", [*arrays, LABELS], 2, hierarchy=hierarchy)
    np.testing.assert_allclose(found, loss(x, weights, bias), rtol=1e-5)
    dy = RNG.normal(size=5)
    slopes = run_operator("HSoftmaxGradient", [*arrays, LABELS, between, dy.astype(np.float32)], 4, hierarchy=hierarchy)
    for place, array in enumerate((x, weights, bias)):
        for index in np.ndindex(array.shape):
            moved = [a.copy() for a in (x, weights, bias)]
            moved[place][index] += 1e-6
            slope = ((loss(*moved) - loss(x, weights, bias)) / 1e-6) @ dy
            assert slopes[place][index] == pytest.approx(slope, abs=2e-4)


def test_trees_and_labels_are_checked() -> None:
    arrays = [np.zeros(shape, np.float32) for shape in ((5, 4), (5, 4), 5)]
    for wrong, message in ((b"\x0a", "no HierarchyProto"), (tree({0: [(4, 2, 0)]}, 5), "not among 5 rows")):
        with pytest.raises(OperatorError, match=message):
            run_operator("HSoftmax", [*arrays, LABELS], 2, hierarchy=wrong)
    with pytest.raises(OperatorError, match="label 2 has no path"):
        run_operator("HSoftmax", [*arrays, LABELS], 2, hierarchy=tree({0: [(0, 2, 0)]}, 5))
