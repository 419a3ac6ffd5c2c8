"""Best paths, average precision and small sums, against all paths and examples by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.errors import OperatorError
from tests.ops.running import operator_def, run_operator

RNG = np.random.default_rng(53)


def measured(scores: np.ndarray, labels: np.ndarray, *, runs: int, **arguments: int) -> list[float]:
    """The average precision after several runs of one operator."""
    workspace = Workspace()
    workspace.feed_blob("scores", scores)
    workspace.feed_blob("labels", labels)
    meter = operator_def("APMeter", ["scores", "labels"], ["precision"], **arguments)
    net = workspace.create_net(NetDef(name="meter", op=[meter]))
    for _ in range(runs):
        net.run()
    return workspace.fetch_blob("precision").tolist()


@pytest.mark.parametrize(
    ("op_type", "inputs", "arguments", "expected"),
    [
        ("SplitByLengths", [np.arange(6), np.array([1, 2, 0, 3], np.int32)], {}, [[0, 1, 2], [3, 4, 5]]),
        ("SumElementsInt", [np.array([[1, 2], [3, 4]], np.int32)], {}, [10]),
        ("StumpFuncIndex", [np.array([1, 3, 2], np.float32)], {"threshold": 2.0}, [[0, 2], [1]]),
        ("SwapBestPath", [np.array([[1, 5, 2]], np.float32), np.array([2], np.int32)], {}, [[[1, 2, 5]]]),
    ],
)
def test_examples_by_hand(
    op_type: str, inputs: list[np.ndarray], arguments: dict[str, Any], expected: list[Any]
) -> None:
    assert [array.tolist() for array in run_operator(op_type, inputs, len(expected), **arguments)] == expected


def test_the_best_path_is_that_of_all_paths() -> None:
    predictions, transitions = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=(3, 3)).astype(np.float32)

    def score(path: tuple[int, ...]) -> float:
        steps = sum(transitions[pair] for pair in itertools.pairwise(path))
        return float(steps + sum(row[label] for row, label in zip(predictions, path, strict=True)))

    [found] = run_operator("ViterbiPath", [predictions, transitions])
    assert found.tolist() == list(max(itertools.product(range(3), repeat=4), key=score))


def test_average_precision_is_over_the_latest_rows() -> None:
    scores = np.array([[0.9], [0.1], [0.8], [0.3]], np.float32)
    labels = np.array([[1], [0], [0], [1]], np.int32)
    assert measured(scores, labels, runs=1) == pytest.approx([(1 + 2 / 3) / 2])
    last_two_and_all = [(1 + 2 / 4 + 3 / 5) / 3]
    assert measured(scores, labels, runs=2, buffer_size=6) == pytest.approx(last_two_and_all)


def test_parts_and_labels_that_are_not_there_are_refused() -> None:
    with pytest.raises(OperatorError, match="each of 2 outputs, found 1"):
        run_operator("SplitByLengths", [np.arange(3), np.array([3], np.int32)], 2)
    with pytest.raises(OperatorError, match="index 2"):
        run_operator("SwapBestPath", [np.zeros((1, 2), np.float32), np.array([2], np.int32)])
