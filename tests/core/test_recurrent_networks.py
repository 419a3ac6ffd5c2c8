"""RecurrentNetwork: its outputs, and arguments that do not fit. Recordings of it and its gradient are replayed."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, OperatorDef, Workspace, op
from dagexec.core.program import program_of
from dagexec.errors import SchemaError

STEP = NetDef(op=[op("Add", ["before", "row"], ["after"])])


def _sums(**changed: object) -> OperatorDef:
    """Running sums of a sequence."""
    arguments: dict[str, object] = {
        "step_net": STEP, "recurrent_states": ["sums"], "initial_recurrent_state_ids": [1],
        "link_internal": ["before", "after", "row"], "link_external": ["sums", "sums", "x"], "link_offset": [0, 1, 0],
        "alias_src": ["sums"] * 3, "alias_dst": ["all", "last", "with_first"], "alias_offset": [1, -1, 0],
    }  # fmt: skip
    return op("RecurrentNetwork", ["x", "first"], ["all", "last", "with_first", "s"], arg={**arguments, **changed})  # type: ignore[dict-item]


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_outputs_are_parts_of_the_states(net_type: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    for first in (np.ones((1, 2, 2), np.float32), np.ones((2, 2), np.float32)):
        workspace = Workspace()
        workspace.feed_blob("x", x)
        workspace.feed_blob("first", first)
        net = workspace.build_net(NetDef(name="n", op=[_sums()]), net_type, 2)
        net.run()
        net.close()
        expected = np.cumsum([np.ones((2, 2)), *x], axis=0)
        np.testing.assert_array_equal(workspace.fetch_blob("all"), expected[1:])
        np.testing.assert_array_equal(workspace.fetch_blob("last"), expected[-1:])
        np.testing.assert_array_equal(workspace.fetch_blob("with_first"), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"link_offset": [0, 2, 0]}, r"must be linked with offsets 0 and 1, found \[0, 2\]"),
        ({"link_window": [1, 1, 2]}, "link_window other than 1"),
        ({"link_external": ["sums", "sums", "y"]}, "'y' must be an input that is linked with offset 0"),
        ({"initial_recurrent_state_ids": [2]}, "expected an input for each of the states"),
        ({"link_offset": [0, 1]}, "are not as long as one another"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        program_of(NetDef(op=[_sums(**changed)]))
