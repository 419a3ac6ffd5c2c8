"""The model helper's LSTM and GRU: what they compute, and that a training changes all their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.dtypes import INT32
from dagexec.training.model_helper import ModelHelper
from tests.ops.running import Array, run_operator
from tests.training.as_written import as_written

STEPS, BATCH, DIM_IN, DIM_OUT = 5, 3, 4, 6


def build(kind: str, bidirectional: bool, rich: bool, **options: Any) -> tuple[ModelHelper, dict[str, Array]]:
    """A layer with its loss and gradients; `rich` gives it lengths and an initial state."""
    helper = ModelHelper("recurrent", seed=3, training=True)
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {"x": rng.uniform(-1, 1, (STEPS, BATCH, DIM_IN)).astype(np.float32)}
    helper.add_input("x", feeds["x"].shape)
    state = (2 if bidirectional else 1, BATCH, DIM_OUT)
    if rich:
        names = ["h", "c"][: 2 if kind == "lstm" else 1]
        feeds |= {name: rng.uniform(-1, 1, state).astype(np.float32) for name in names}
        feeds["lengths"] = np.array([5, 2, 3], np.int32)
        for name in names:
            helper.add_input(name, state)
        helper.add_input("lengths", (BATCH,), INT32)
        options |= {"lengths": "lengths", "initial": names if kind == "lstm" else names[0]}
    output, *last = getattr(helper, kind)("x", "y", DIM_IN, DIM_OUT, bidirectional=bidirectional, **options)
    assert output == "y"
    assert last == ["y_last_hidden", "y_last_cell"][: len(last)]
    helper.add_gradient_operators([helper.averaged_loss("y", "loss")])
    return helper, feeds


@pytest.mark.parametrize(("kind", "options"), [("lstm", {}), ("gru", {}), ("gru", {"linear_before_reset": True})])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("rich", [False, True])
def test_the_layer_is_the_operator_with_directions_side_by_side(
    kind: str, options: dict[str, Any], bidirectional: bool, rich: bool
) -> None:
    helper, feeds = build(kind, bidirectional, rich, **options)
    workspace = Workspace()
    helper.create(workspace)
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    workspace.create_net(as_written(helper.net), "dag", 2)
    workspace.run_net(helper.net.name)
    inputs = [feeds["x"], *(workspace.fetch_blob(f"y_{name}") for name in "wrb")]
    inputs += [feeds[name] for name in ("lengths", "h", "c") if name in feeds]
    arguments: dict[str, Any] = {"linear_before_reset": 1} if options else {}
    expected, *last = run_operator(
        kind.upper(),
        list(inputs),
        3 if kind == "lstm" else 2,
        direction="bidirectional" if bidirectional else "forward",
        bias=1,
        sequence_lengths=int(rich),
        initial_state=int(rich),
        **arguments,
    )
    side_by_side = np.concatenate(list(expected.swapaxes(0, 1)), axis=-1)
    np.testing.assert_array_equal(workspace.fetch_blob("y"), side_by_side)
    for name, array in zip(("y_last_hidden", "y_last_cell"), last, strict=False):
        np.testing.assert_array_equal(workspace.fetch_blob(name), array)
    assert set(helper.params_to_grad) == {"y_w", "y_r", "y_b"}
    for name, grad in helper.params_to_grad.items():
        assert isinstance(grad, str)
        found = workspace.fetch_blob(grad)
        assert found.shape == workspace.fetch_blob(name).shape
        assert np.abs(found).max() > 0


def test_the_layer_saves_what_its_gradient_reads() -> None:
    helper, _ = build("lstm", bidirectional=True, rich=True)
    types = [definition.type for definition in helper.net.op]
    assert types.count("LSTM") == types.count("LSTMGradient") == 1


def test_forget_gates_start_open() -> None:
    helper, _ = build("lstm", bidirectional=False, rich=False)
    workspace = Workspace()
    helper.create(workspace)
    bias = workspace.fetch_blob("y_b").reshape(2, 4, DIM_OUT)
    np.testing.assert_array_equal(bias.sum(axis=(0, 2)), [0, 0, DIM_OUT, 0])
