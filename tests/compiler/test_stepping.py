"""Nets of steps: what follows from the length is told by numbers, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dagexec.compiler.growing_axes import NotSteppingError
from dagexec.compiler.stepping import CACHE, LENGTH, OPENED, Stepping, stepping_net
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.program import program_of
from dagexec.core.proto import NetDef
from dagexec.core.schema import TensorType

FULL = 64
CACHED = InputInfo(FLOAT32, (1, 2, None, 8))
ATTENTION = [
    new_node("Concat", ["k", "new_k"], ["k2"], axis=2),
    new_node("Concat", ["v", "new_v"], ["v2"], axis=2),
    new_node("FusedAttention", ["q", "k2", "v2"], ["y"]),
]
MASKED = [*ATTENTION[:2], new_node("FusedAttention", ["q", "k2", "v2", "bias"], ["y"], bias=1)]


def stepping(nodes: Sequence[Node], outputs: Sequence[str] = ("y",), **parameters: Any) -> Stepping:
    """The net of a step of these operators; `grown` is an input [1, length + 1] of int64."""
    new = InputInfo(FLOAT32, (1, 2, 1, 8))
    inputs = {"q": new, "new_k": new, "new_v": new, "k": CACHED, "v": CACHED, "grown": InputInfo(INT64, (1, None))}
    program = type(program_of(NetDef(name="net")))(tuple(nodes), NetDef(name="net"))
    arrays = {name: np.array(value) for name, value in parameters.items()}
    model = Model("net", NetDef(name="net"), inputs=inputs, outputs=(*outputs, "k2", "v2"))
    model = model.changed(net=program, parameters=arrays)
    types = {name: TensorType(tuple(FULL if n is None else n for n in info.shape or ()), info.dtype or FLOAT32)
             for name, info in inputs.items()}  # fmt: skip
    types["grown"] = TensorType((1, FULL + 1), INT64)
    growing: Mapping[str, tuple[int, int]] = {"k": (2, 0), "v": (2, 0), "grown": (1, 1)}
    return stepping_net(model, {"k": "k2", "v": "v2"}, types, growing, FULL)


def inner(made: Stepping) -> Sequence[Node]:
    """What is done while caches are open."""
    return made.model.program.op[1:-1]


LENGTH_OF_CACHE = [
    new_node("Shape", ["k"], ["sizes"]),
    new_node("Gather", ["sizes", "two"], ["past"]),
    new_node("Add", ["past", "one"], ["total"]),
]
NUMBERS: dict[str, Any] = {"two": 2, "one": 1, "zero": 0}


def test_caches_leave_the_inputs_and_outputs() -> None:
    made = stepping(ATTENTION)
    opening, attention, closing = made.model.program.op
    assert (opening.type, opening.input, opening.output) == ("OpenCaches", (CACHE, LENGTH), (OPENED,))
    assert (attention.type, attention.input) == ("CachedAttention", ("q", "new_k", "new_v", CACHE, OPENED))
    assert (closing.type, closing.input) == ("CloseCaches", (OPENED, "y"))
    assert made.model.outputs == ("y",)
    assert set(made.model.inputs) == {"q", "new_k", "new_v", "grown", CACHE, LENGTH}
    assert [(layer.keys, layer.values) for layer in made.layers] == [("k", "v")]


def test_the_engine_of_attention_stays() -> None:
    by_kernels = [*ATTENTION[:2], new_node("FusedAttention", ["q", "k2", "v2"], ["y"], engine="ONEDNN")]
    assert [node.engine for node in inner(stepping(by_kernels))] == ["ONEDNN"]


def test_what_follows_from_the_length_is_a_sum() -> None:
    position = [
        *LENGTH_OF_CACHE,
        new_node("Range", ["past", "total", "one"], ["positions"]),
        new_node("Cast", ["positions"], ["row"], to=FLOAT32.number),
        new_node("Mul", ["q", "row"], ["q2"]),
        *ATTENTION[:2],
        new_node("FusedAttention", ["q2", "k2", "v2"], ["y"]),
    ]
    made = stepping(position, **NUMBERS)
    kinds = [node.type for node in inner(made)]
    assert kinds == ["Mul", "Add", "Cast", "Mul", "CachedAttention"]
    numbers = [
        made.model.parameters[name]
        for node in inner(made)[:2]
        for name in node.input[::1]
        if name in made.model.parameters
    ]
    assert [array.tolist() for array in numbers] == [[1], [0]], "1 * length + 0"


def test_masks_are_made_for_full_caches() -> None:
    mask = [
        *LENGTH_OF_CACHE,
        new_node("Range", ["zero", "total", "one"], ["columns"]),
        new_node("LE", ["columns", "past"], ["seen"]),
        new_node("Where", ["seen", "nothing", "hidden"], ["bias"]),
        *MASKED,
    ]
    made = stepping(mask, nothing=np.float32(0), hidden=np.float32(-1e9), **NUMBERS)
    assert [node.type for node in inner(made)] == ["Squeeze", "Mul", "Add", "LE", "Where", "CachedAttention"]
    (columns,) = (array for array in made.model.parameters.values() if array.size > 1)
    assert columns.tolist() == list(range(FULL + 1))


BUCKETS = [
    *ATTENTION[:2],
    new_node("Shape", ["k2"], ["sizes2"]),
    new_node("Gather", ["sizes2", "two"], ["total"]),
    *LENGTH_OF_CACHE[:2],
    new_node("Range", ["zero", "total", "one"], ["columns"]),
    new_node("Sub", ["past", "columns"], ["distance"]),
    new_node("Max", ["distance", "zero"], ["back"]),
    new_node("Cast", ["back"], ["x"], to=FLOAT32.number),
    new_node("Log", ["x"], ["log"]),
    new_node("Cast", ["log"], ["far"], to=INT64.number),
    new_node("LT", ["back", "two"], ["is_near"]),
    new_node("Where", ["is_near", "back", "far"], ["bucket"]),
    new_node("Gather", ["table", "bucket"], ["bias"]),
    MASKED[2],
]
"""Distances in buckets that grow with their logarithm, as T5's."""


def test_what_each_distance_picks_of_a_table_is_told() -> None:
    made = stepping(BUCKETS, table=np.zeros(5, np.float32), **NUMBERS)
    assert inner(made)[-1].type == "CachedAttention"
    with pytest.raises(NotSteppingError, match="Gather picks of 'table' what may not be there"):
        stepping(BUCKETS, table=np.zeros(4, np.float32), **NUMBERS)  # log 64 is 4.2


@pytest.mark.parametrize(
    ("nodes", "outputs", "why"),
    [
        ([new_node("ReduceMean", ["k2"], ["mean"], axes=[2])], ["mean"], "ReduceMean reads a cache"),
        (
            [new_node("FusedAttention", ["q", "k2", "v2"], ["z"])],
            ["z"],
            "attention reads cache 'k', as another does",
        ),
        ([new_node("ReduceSum", ["grown"], ["sum"], axes=[1])], ["sum"], "ReduceSum reads 'grown', which grows"),
        ([new_node("Copy", ["grown"], ["same"])], ["same"], "output 'same' grows"),
        ([new_node("Reshape", ["grown"], ["flat"], shape=[5, -1])], [], "Reshape"),
        (LENGTH_OF_CACHE, ["total"], "output 'total' follows from the length alone"),
        ([new_node("Gather", ["table", "grown"], ["rows"])], ["rows"], "picks of 'table' what may not be there"),
        ([new_node("Add", ["grown", "table"], ["sum"])], ["sum"], "Add"),
        ([*LENGTH_OF_CACHE, new_node("Slice", ["table", "past", "total"], ["part"])], ["part"], "Slice makes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_step_is_refused(nodes: Sequence[Node], outputs: Sequence[str], why: str) -> None:
    with pytest.raises(NotSteppingError, match=why):
        stepping([*ATTENTION, *nodes], ["y", *outputs], table=np.arange(7), **NUMBERS)


def test_a_cache_is_one_that_attention_reads() -> None:
    with pytest.raises(NotSteppingError, match="no attention reads the cache"):
        stepping(ATTENTION[:2], [])
