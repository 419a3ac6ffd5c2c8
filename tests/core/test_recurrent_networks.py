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
    for shape in ((1, 2, 2), (2, 2), (2,)):
        first = np.ones(shape, np.float32)
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
        ({"link_offset": [0, 0, 0]}, r"must give one row of state 'sums', .* offsets \[0, 0\]"),
        ({"link_window": [3, 1, 1]}, "behind those that it reads"),
        ({"link_window": [1, 1, 2]}, "'x' must be an input that is linked with offset 0, window 1"),
        ({"link_external": ["sums", "sums", "y"]}, "'y' must be an input that is linked with offset 0"),
        ({"initial_recurrent_state_ids": [2]}, "expected an input for each of the states"),
        ({"link_offset": [0, 1]}, "are not as long as one another"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        program_of(NetDef(op=[_sums(**changed)]))


@pytest.mark.parametrize("window", [2, 3])
def test_a_step_may_read_the_last_rows_of_a_state_with_its_own(window: int) -> None:
    """A convolution over what the steps themselves give, with a sequence that is there for its length alone."""
    step = NetDef(
        op=[
            op("Cos", ["newest"], ["made"]),
            op("ReduceFrontSum", ["rows"], ["sum"], num_reduce_dim=1),
            op("ExpandDims", ["sum"], ["total"], dims=[0]),
        ]
    )
    network = op(
        "RecurrentNetwork", ["x", "first", "zero"], ["rows_all", "totals", "s"],
        step_net=step, recurrent_states=["in", "out"], initial_recurrent_state_ids=[1, 2],
        link_internal=["rows", "newest", "made", "total"], link_external=["in", "in", "in", "out"],
        link_offset=[0, window - 2, window - 1, 1], link_window=[window, 1, 1, 1],
        alias_src=["in", "out"], alias_dst=["rows_all", "totals"], alias_offset=[window - 1, 1],
    )  # fmt: skip
    workspace = Workspace()
    first = np.linspace(-1, 1, (window - 1) * 6, dtype=np.float32).reshape(window - 1, 2, 3)
    for name, value in {"x": np.zeros((4, 2, 1)), "first": first, "zero": np.zeros(3)}.items():
        workspace.feed_blob(name, value.astype(np.float32))
    workspace.run_net_once(NetDef(op=[network]))
    rows = [*first.astype(float)]
    for _ in range(4):
        rows.append(np.cos(rows[-1]))
    np.testing.assert_allclose(workspace.fetch_blob("rows_all"), rows[window - 1 :], rtol=1e-6)
    totals = [np.sum(rows[t : t + window], axis=0) for t in range(4)]
    np.testing.assert_allclose(workspace.fetch_blob("totals"), totals, rtol=1e-6)
    gradient = op("RecurrentNetworkGradient", ["d", "x", "first", "zero", "s"], ["x_grad"])
    gradient.arg.extend(network.arg)
    with pytest.raises(SchemaError, match="of each state one alone"):
        program_of(NetDef(op=[gradient]))
