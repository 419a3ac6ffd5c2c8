"""PaddedRows: sizes that a net is prepared for, and rows on other axes."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace, op
from dagexec.errors import OperatorError, SchemaError
from dagexec.ops.families.control.padded_rows import padded_size


def test_few_sizes_are_at_most_a_quarter_larger() -> None:
    sizes = [padded_size(count) for count in range(2000)]
    assert all(size >= count for count, size in enumerate(sizes))
    assert all(
        size <= max(2 * count, 8) if count <= 32 else size <= 1.25 * count for count, size in enumerate(sizes) if count
    )
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 50


def squares(**arguments: object) -> NetDef:
    """Columns of `a`, times 2, less a captured vector; rows of `c` are columns of the result."""
    body = NetDef(
        name="body",
        op=[op("Mul", ["a", "two"], ["b"]), op("Sub", ["b", "v"], ["d"]), op("Transpose", ["d"], ["e"])],
        external_input=["a", "v", "two"],
        external_output=["d", "e"],
    )
    made = op("PaddedRows", ["x", "u", "two"], ["y", "z"], rows_net=body, captured=["v", "two"], **arguments)
    return NetDef(name="net", op=[made], external_input=["x", "u", "two"])


def test_rows_may_be_on_any_axis() -> None:
    workspace = Workspace()
    workspace.feed_blob("two", np.float32(2))
    workspace.feed_blob("x", np.ones((3, 1), np.float32))
    workspace.feed_blob("u", np.ones((3, 1), np.float32))
    random = np.random.default_rng(0)
    net = workspace.create_net(squares(axes=[1], result_axes=[1, 0]))
    for count in (5, 1, 0, 21, 5):
        x, u = random.standard_normal((3, count)).astype(np.float32), random.standard_normal((3, 1)).astype(np.float32)
        workspace.feed_blob("x", x)
        workspace.feed_blob("u", u)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), 2 * x - u)
        np.testing.assert_array_equal(workspace.fetch_blob("z"), (2 * x - u).T)


def test_axes_that_do_not_fit_are_refused() -> None:
    workspace = Workspace()
    for name in ("x", "u", "two"):
        workspace.feed_blob(name, np.ones((3, 5), np.float32))
    with pytest.raises(SchemaError, match="an axis for each of 1 inputs and 2 outputs"):
        workspace.create_net(squares(axes=[1], result_axes=[0]))
    net = workspace.create_net(squares(axes=[1], result_axes=[1, 0]))
    with pytest.raises(OperatorError, match="PaddedRows"):
        net.run()  # the captured vector has as many columns, and is not padded


def test_inputs_have_as_many_rows_and_may_change_all_else() -> None:
    body = NetDef(name="body", op=[op("Mul", ["a", "b"], ["c"])], external_input=["a", "b"], external_output=["c"])
    made = op("PaddedRows", ["x", "w"], ["y"], rows_net=body, axes=[0, 0], result_axes=[0])
    workspace, random = Workspace(), np.random.default_rng(1)
    workspace.feed_blob("x", np.ones((3, 2), np.float32))
    workspace.feed_blob("w", np.ones((3, 2), np.float32))
    net = workspace.create_net(NetDef(name="net", op=[made], external_input=["x", "w"]))
    for shape in ((3, 2), (4, 2), (3, 5), (4, 2)):
        x, w = random.standard_normal((2, *shape)).astype(np.float32)
        workspace.feed_blob("x", x)
        workspace.feed_blob("w", w)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), x * w)
    workspace.feed_blob("w", np.ones((1, 2), np.float32))
    with pytest.raises(OperatorError, match=r"the first input has 4 rows; \(1, 2\) has others on axis 0"):
        net.run()
