"""Streaming: the state is an input and an output of the model, and the caller hands it back."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.binding.block_sizes import BlockSizes

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FEATURES, HIDDEN = 10, 24


def streaming_model(op_type: str) -> onnx.ModelProto:
    """A layer for any number of steps, whose inputs and outputs h (and c) are its state."""
    rng, states = np.random.default_rng(5), ["h", "c"][: 2 if op_type == "LSTM" else 1]
    shapes = {"w": (1, GATES[op_type] * HIDDEN, FEATURES), "r": (1, GATES[op_type] * HIDDEN, HIDDEN)}
    weights = [numpy_helper.from_array(rng.uniform(-1, 1, shape).astype(np.float32), n) for n, shape in shapes.items()]
    last = [f"last_{name}" for name in states]
    node = helper.make_node(op_type, ["x", "w", "r", "", "", *states], ["y", *last], hidden_size=HIDDEN)
    sizes = {"x": ("steps", 1, FEATURES), "y": ("steps", 1, 1, HIDDEN)} | dict.fromkeys(states + last, (1, 1, HIDDEN))
    types = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()}
    graph = helper.make_graph(
        [node], "layer", [types[name] for name in ("x", *states)], [types[name] for name in ("y", *last)], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("pieces", [[1] * 7, [2, 4, 1]])
def test_a_sequence_in_pieces_gives_the_bytes_of_the_whole(op_type: str, pieces: list[int]) -> None:
    x = np.random.default_rng(6).standard_normal((7, 1, FEATURES), np.float32)
    state = dict.fromkeys(["h", "c"][: 2 if op_type == "LSTM" else 1], np.zeros((1, 1, HIDDEN), np.float32))
    with dagexec.compile(streaming_model(op_type)) as executor:
        whole = executor.run({"x": x, **state})
        outputs = []
        for piece in np.split(x, np.cumsum(pieces)[:-1]):
            found = executor.run({"x": piece, **state})
            outputs.append(found["y"])
            state = {name: found[f"last_{name}"] for name in state}
    assert np.concatenate(outputs).tobytes() == whole["y"].tobytes()
    for name, array in state.items():
        assert array.tobytes() == whole[f"last_{name}"].tobytes()


def test_lengths_that_are_no_rows_are_not_made_up_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for blocks among the lengths of a stream would be in vain: after some, nobody does."""
    asked: list[int] = []
    blocks = BlockSizes.blocks

    def counted(self: BlockSizes, kind: object, rows: int, ready: dict[int, float]) -> list[int] | None:
        asked.append(rows)
        return blocks(self, kind, rows, ready)

    monkeypatch.setattr(BlockSizes, "blocks", counted)
    state = {"h": np.zeros((1, 1, HIDDEN), np.float32)}
    with dagexec.compile(streaming_model("GRU")) as executor:
        for steps in range(1, 31):
            executor.run({"x": np.zeros((steps, 1, FEATURES), np.float32), **state})
    assert 0 < len(asked) < 20
