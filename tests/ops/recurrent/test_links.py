"""Rows of a sequence for a step, and sums of their gradients, as Caffe2's step nets have them."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.errors import DagexecError

SEQUENCE = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


def _workspace(step: int) -> Workspace:
    workspace = Workspace()
    workspace.feed_blob("t", np.array([step], np.int32))
    workspace.feed_blob("x", SEQUENCE)
    workspace.feed_blob("total", np.ones((5, 2, 3), np.float32))
    return workspace


def test_rows_of_a_step() -> None:
    workspace = _workspace(1)
    workspace.run_operator_once(op("rnn_internal_apply_link", ["t", "x"], ["rows", "x"], offset=1, window=2))
    np.testing.assert_array_equal(workspace.fetch_blob("rows"), SEQUENCE[2:4])
    add = op("rnn_internal_accumulate_gradient_input", ["t", "x", "total"], ["total"], offset=1)
    net = workspace.create_net(NetDef(name="n", op=[add]))
    for _ in range(2):
        net.run()
    expected = np.ones((5, 2, 3))
    expected[2] += 2 * SEQUENCE[1]
    np.testing.assert_array_equal(workspace.fetch_blob("total"), expected)


@pytest.mark.parametrize(
    ("step", "arguments", "message"),
    [
        (2, {"offset": 1, "window": 2}, "rows 3 to 4 are not there; there are 4"),
        (-2, {"offset": 1, "window": 1}, "rows -1 to -1 are not there"),
        (0, {"offset": -1, "window": 1}, "'offset' must be given, and not negative"),
        (0, {"offset": 0, "window": 0}, "at least one row of it"),
    ],
)
def test_rows_that_are_not_there_are_refused(step: int, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DagexecError, match=message):
        _workspace(step).run_operator_once(op("rnn_internal_apply_link", ["t", "x"], ["rows", "x"], **arguments))
