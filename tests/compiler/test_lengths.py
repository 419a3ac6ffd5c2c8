"""Nets for any length: what is shown to be right, and what is refused because positions depend on later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dagexec.compiler.length_rules import NotSizedError
from dagexec.compiler.lengths import LENGTH_INPUT, Sized, sized_net
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.program import program_of
from dagexec.core.proto import NetDef
from dagexec.core.schema import TensorType

INPUTS = {"x": InputInfo(FLOAT32, (None, None, 4, 8)), "ids": InputInfo(INT64, (None, None))}
ATTENTION = new_node("FusedAttention", ["x", "x", "x"], ["y"], q_axes=[0, 2, 1, 3], k_axes=[0, 2, 1, 3],
                     v_axes=[0, 2, 1, 3], y_axes=[0, 2, 1, 3])  # fmt: skip


def sized(nodes: Sequence[Node], outputs: Sequence[str] = ("y", "z"), **parameters: Any) -> Sized:
    """The net of attention over `x` [2, length, 4, 8] and these operators; `ids` is [2, length]."""
    program = type(program_of(NetDef(name="net")))((ATTENTION, *nodes), NetDef(name="net"))
    arrays = {name: np.array(value) for name, value in parameters.items()}
    model = Model("net", NetDef(name="net"), inputs=INPUTS, outputs=tuple(outputs))
    types = {"x": TensorType((2, 40, 4, 8), FLOAT32), "ids": TensorType((2, 40), INT64)}
    return sized_net(model.changed(net=program, parameters=arrays), types, {"x": 1, "ids": 1})


def test_attention_is_told_the_length_and_all_else_stays() -> None:
    made = sized([new_node("Relu", ["y"], ["z"])])
    opening, attention, relu = made.model.program.op
    assert (opening.type, opening.input) == ("OpenLength", (LENGTH_INPUT,))
    assert (attention.type, attention.input) == ("SizedAttention", (*ATTENTION.input, *opening.output))
    assert relu.type == "Relu"
    assert made.outputs == {"y": (1,), "z": (1,)}


LENGTH = [new_node("Shape", ["ids"], ["sizes"]), new_node("Gather", ["sizes", "one"], ["length"])]
COUNTED = [*LENGTH, new_node("Range", ["zero", "length", "one"], ["places"])]
NUMBERS: dict[str, Any] = {"zero": 0, "one": 1, "two": 2, "last": -1, "table": np.zeros((64, 3), np.float32)}

RIGHT = {
    "a table looked up by ids": [new_node("Gather", ["table", "ids"], ["z"])],
    "and by positions": [*COUNTED, new_node("Gather", ["table", "places"], ["z"])],
    "a table cut to the length": [
        *LENGTH, new_node("Reshape", ["length"], ["end"], shape=[1]),
        new_node("Slice", ["table", "starts", "end"], ["z"], onnx_style=1, axes=[0], steps=[1]),
    ],
    "the first position": [new_node("Gather", ["y", "zero"], ["z"], axis=1)],
    "a causal mask": [
        *COUNTED, new_node("ExpandDims", ["places"], ["rows"], dims=[1]), new_node("LE", ["places", "rows"], ["z"]),
    ],
    "sums of what came before": [new_node("CumSum", ["ids"], ["z"], axis=1)],
    "a view back and forth": [
        new_node("Reshape", ["y"], ["flat"], shape=[0, 0, 32]),
        new_node("Reshape", ["flat"], ["z"], shape=[0, 0, 4, 8]),
    ],
    "a mask looked up by a grid, flat": [
        *COUNTED, new_node("Reshape", ["ids"], ["flat"], shape=[-1]), new_node("Mul", ["batch", "length"], ["begins"]),
        new_node("Add", ["begins", "places"], ["grid"]), new_node("Gather", ["flat", "grid"], ["z"]),
    ],
    "and by pairs of numbers": [
        *COUNTED, new_node("ExpandDims", ["places"], ["row"], dims=[0]), new_node("Shape", ["ids"], ["both"]),
        new_node("Expand", ["batch", "both"], ["b"]), new_node("Expand", ["row", "both"], ["p"]),
        new_node("ExpandDims", ["b"], ["b1"], dims=[2]), new_node("ExpandDims", ["p"], ["p1"], dims=[2]),
        new_node("Concat", ["b1", "p1"], ["pairs"], axis=2), new_node("GatherND", ["ids", "pairs"], ["z"]),
    ],
}  # fmt: skip

WRONG = {
    "a sum over positions": [new_node("ReduceSum", ["y"], ["z"], axes=[1], keepdims=1)],
    "a softmax along positions": [new_node("Softmax", ["y"], ["z"], axis=1)],
    "the last position": [new_node("Gather", ["y", "last"], ["z"], axis=1)],
    "a position that may not be there": [new_node("Gather", ["y", "twenty"], ["z"], axis=1)],
    "sums of what comes behind": [new_node("CumSum", ["ids"], ["z"], axis=1, reverse=1)],
    "positions with others in one axis": [new_node("Reshape", ["y"], ["z"], shape=[2, -1])],
    "the length": [*LENGTH, new_node("Copy", ["length"], ["z"])],
    "computing with the length": [*LENGTH, new_node("Add", ["ids", "length"], ["z"])],
    "positions counted from the end": [*LENGTH, new_node("Range", ["length", "far", "one"], ["places"]),
                                       new_node("Copy", ["places"], ["z"])],
    "the next position": [
        *COUNTED, new_node("Add", ["places", "one"], ["next"]), new_node("Gather", ["ids", "next"], ["z"], axis=1),
    ],
    "a grid of another step": [
        *COUNTED, new_node("Reshape", ["ids"], ["flat"], shape=[-1]), new_node("Mul", ["places", "two"], ["grid"]),
        new_node("Gather", ["flat", "grid"], ["z"]),
    ],
    "positions picked by values": [new_node("Gather", ["y", "ids"], ["z"], axis=1)],
    "chance": [new_node("Dropout", ["y"], ["z", "mask"], ratio=0.5)],
}  # fmt: skip

MORE: dict[str, Any] = {"starts": [0], "batch": [[0], [1]], "twenty": 20, "far": 100}


@pytest.mark.parametrize("case", RIGHT)
def test_what_follows_from_first_positions(case: str) -> None:
    made = sized(RIGHT[case], **NUMBERS, **MORE)
    assert [node.type for node in made.model.program.op[2:]] == [node.type for node in RIGHT[case]]


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_follows_in_a_tail(case: str) -> None:
    made = sized(WRONG[case], **NUMBERS, **MORE)
    assert made.tail is not None
    assert (made.tail.model.outputs, "z" in made.outputs) == (("z",), False)
    assert made.tail.model.program.op[-1].output[0] == "z"
    assert "SizedAttention" not in {node.type for node in made.tail.model.program.op}


def test_a_tail_begins_at_blobs_whose_first_positions_are_right() -> None:
    """What depends on the length otherwise is computed again."""
    made = sized([
        new_node("Relu", ["y"], ["r"]), new_node("Reshape", ["r"], ["rows"], shape=[-1, 32]),
        new_node("Tanh", ["rows"], ["t"]), new_node("ReduceSum", ["t"], ["z"], axes=[0], keepdims=1),
    ])  # fmt: skip
    assert made.tail is not None
    assert [node.type for node in made.tail.model.program.op] == ["Reshape", "Tanh", "ReduceSum"]
    assert made.tail.blobs == ("r",)
    assert made.outputs == {"y": (1,), "r": (1,)}


REFUSED = {
    "attention behind a pooling": [
        new_node("ReduceSum", ["y"], ["s"], axes=[1], keepdims=1), new_node("FusedAttention", ["s", "s", "s"], ["z"]),
    ],
    "a tail that reads what is overwritten": [
        new_node("ReduceSum", ["y"], ["z"], axes=[1], keepdims=1), new_node("Relu", ["y"], ["y"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_tail(case: str) -> None:
    with pytest.raises(NotSizedError):
        sized(REFUSED[case])


def test_other_attention_is_left_alone_and_a_net_without_any_has_none() -> None:
    """Queries of many positions over keys that are always as many."""
    axes = {name: [0, 2, 1, 3] for name in ("q_axes", "y_axes")}
    cross = new_node("FusedAttention", ["y", "keys", "keys"], ["z"], **axes)
    made = sized([cross], keys=np.zeros((2, 4, 9, 8), np.float32))
    assert made.model.program.op[-1] is cross
    program = type(program_of(NetDef(name="net")))((new_node("Relu", ["x"], ["z"]),), NetDef(name="net"))
    model = Model("net", NetDef(name="net"), inputs=INPUTS, outputs=("z",)).changed(net=program)
    with pytest.raises(NotSizedError, match="no attention"):
        sized_net(model, {"x": TensorType((2, 40, 4, 8), FLOAT32)}, {"x": 1})


@pytest.mark.parametrize("keys", [0, 1])
def test_attention_among_others_than_all_positions_is_refused(keys: int) -> None:
    axes = {name: [0, 2, 1, 3] for name in ("q_axes", "k_axes", "v_axes", "y_axes")[1 - keys : 3 if keys else 4]}
    inputs = ["few", "y", "y"] if keys else ["y", "y", "few"]
    with pytest.raises(NotSizedError):
        sized([new_node("FusedAttention", inputs, ["z"], **axes)], few=np.zeros((2, 4, 9, 8), np.float32))
