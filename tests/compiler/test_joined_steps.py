"""Steps of several sessions as one net: each row is what the net of a step for one session makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.compiler.growing_axes import NotSteppingError
from dagexec.compiler.joined_steps import joined_step
from dagexec.compiler.stepping import CACHE, LENGTH, Stepping, stepping_net
from dagexec.core.caches import Caches
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.program import program_of
from dagexec.core.proto import NetDef
from dagexec.core.row_axes import find_row_axes
from dagexec.core.schema import TensorType
from dagexec.core.traits import Rows
from dagexec.core.workspace import Workspace
from dagexec.scheduler.nets.simple import SimpleNet
from tests.compiler.test_stepping import ATTENTION, LENGTH_OF_CACHE, MASKED, NUMBERS

Array = npt.NDArray[Any]

FULL = 64
LENGTHS = (3, 17, 0, 40)

BEHIND = [*ATTENTION[:2], new_node("FusedAttention", ["q2", "k2", "v2"], ["y"])]
COLUMNS = [*LENGTH_OF_CACHE, new_node("Range", ["zero", "total", "one"], ["columns"])]
FLOATS = [new_node("Cast", ["grown"], ["bias"], to=FLOAT32.number)]
FOUR_AXES = [new_node("Cast", ["grown"], ["floats"], to=FLOAT32.number),
             new_node("ExpandDims", ["floats"], ["wide"], dims=[1, 2])]  # fmt: skip


def step(nodes: Sequence[Node], inputs: Mapping[str, InputInfo], **parameters: Any) -> tuple[Stepping, Any]:
    """The net of a step for one session, and the types of its inputs."""
    program = type(program_of(NetDef(name="net")))(tuple(nodes), NetDef(name="net"))
    arrays = {name: np.array(value) for name, value in parameters.items()}
    model = Model("net", NetDef(name="net"), inputs=inputs, outputs=("y", "k2", "v2"))
    model = model.changed(net=program, parameters=arrays)
    types = {name: TensorType(tuple(1 if axis == 0 else FULL if size is None else size
                                    for axis, size in enumerate(info.shape or ())), info.dtype or FLOAT32)
             for name, info in inputs.items()}  # fmt: skip
    types["grown"] = TensorType((1, FULL + 1), INT64)
    growing = {"k": (2, 0), "v": (2, 0), "grown": (1, 1)}
    return stepping_net(model, {"k": "k2", "v": "v2"}, types, growing, FULL), types


NEW, CACHED = InputInfo(FLOAT32, (None, 2, 1, 8)), InputInfo(FLOAT32, (None, 2, None, 8))
INPUTS = {"q": NEW, "new_k": NEW, "new_v": NEW, "k": CACHED, "v": CACHED, "grown": InputInfo(INT64, (None, None))}


class Sessions:
    """One for each length, with caches of several sizes."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.caches = [self._new(length, 64 + 16 * place) for place, length in enumerate(LENGTHS)]
        self.feeds = {name: self._random.standard_normal((len(LENGTHS), 2, 1, 8), np.float32)
                      for name in ("q", "new_k", "new_v")}  # fmt: skip
        self.feeds["grown"] = self._random.integers(0, 2, (len(LENGTHS), FULL + 1))

    def _new(self, length: int, capacity: int) -> Caches:
        caches = Caches()
        keys, values = (self._random.standard_normal((1, 2, length, 8), np.float32) for _ in range(2))
        caches.take({"k": keys}, {"v": values}, length, capacity)
        return caches

    def run(self, model: Model, rows: slice) -> Array:
        workspace = Workspace()
        numbers = {CACHE: np.array([one.number for one in self.caches])[rows], LENGTH: np.array(LENGTHS)[rows]}
        for name, array in {**model.parameters, **numbers, **{k: v[rows] for k, v in self.feeds.items()}}.items():
            workspace.feed_blob(name, array)
        with SimpleNet(model.net, workspace) as net:
            net.run()
        return workspace.fetch_blob("y")


@pytest.mark.parametrize(
    "nodes",
    [
        ATTENTION,
        [*FLOATS, *MASKED],
        [*FOUR_AXES, new_node("Copy", ["wide"], ["bias"]), *MASKED],
        [*FLOATS[:-1], new_node("Cast", ["grown"], ["floats"], to=FLOAT32.number),
         new_node("Transpose", ["floats"], ["turned"], axes=[1, 0]),
         new_node("Transpose", ["turned"], ["bias"], axes=[1, 0]), *MASKED],
        [*FOUR_AXES, new_node("Concat", ["wide", "wide"], ["bias"], axis=1), *MASKED],
        [*LENGTH_OF_CACHE, *FOUR_AXES, new_node("ExpandDims", ["total"], ["columns"], dims=[0]),
         new_node("Concat", ["sizes_of_bias", "columns"], ["sizes2"], axis=0),
         new_node("Expand", ["wide", "sizes2"], ["bias"]), *MASKED],
        [*FOUR_AXES, new_node("Mul", ["wide", "q_sums"], ["bias"]), *MASKED],
        [*COLUMNS, new_node("Gather", ["grown", "columns"], ["picked"], axis=1),
         new_node("Cast", ["picked"], ["bias"], to=FLOAT32.number), *MASKED],
        [*COLUMNS, new_node("ExpandDims", ["columns"], ["right"], dims=[1]),
         new_node("Mul", ["right", "zero"], ["left"]), new_node("Concat", ["left", "right"], ["places"], axis=1),
         new_node("GatherND", ["grown", "places"], ["picked"]),
         new_node("Cast", ["picked"], ["bias"], to=FLOAT32.number), *MASKED],
        [*COLUMNS, new_node("LT", ["columns", "past"], ["seen"]),
         new_node("Where", ["seen", "nothing", "much"], ["bias"]), *MASKED],
        [*LENGTH_OF_CACHE, new_node("Gather", ["table", "past"], ["place"], axis=0),
         new_node("Add", ["q", "place"], ["q2"]), *BEHIND],
        [new_node("Reshape", ["q"], ["flat"], shape=[1, 16]), new_node("Tanh", ["flat"], ["bent"]),
         new_node("Reshape", ["bent", "sizes_of_q"], ["q2"]), *BEHIND],
    ],
    ids=["plain", "two axes", "four axes", "turned", "side by side", "expanded", "times", "picked", "picked by places",
         "compared", "placed", "under another shape"],
)  # fmt: skip
def test_each_row_is_what_it_is_alone(nodes: Sequence[Node]) -> None:
    parameters = {
        **NUMBERS, "nothing": np.float32(0), "much": np.float32(-3), "q_sums": np.float32([[[[0.5]]]]),
        "table": np.random.default_rng(1).standard_normal((FULL, 8)).astype(np.float32),
        "sizes_of_bias": np.array([1, 2, 1]), "sizes_of_q": np.array([1, 2, 1, 8]),
    }  # fmt: skip
    net, types = step(nodes, INPUTS, **parameters)
    made, sessions = joined_step(net, types), Sessions()
    assert all(info.shape is not None and info.shape[0] is None for info in made.inputs.values())
    kinds = {name: TensorType(tuple(size or 1 for size in info.shape or ()), info.dtype or FLOAT32)
             for name, info in made.inputs.items()}  # fmt: skip
    assert find_row_axes(made, kinds).outputs == {"y": Rows(0)}
    together = sessions.run(made, slice(None))
    for row in range(len(LENGTHS)):
        own = slice(row, row + 1)
        alone = sessions.run(net.model, own)
        assert sessions.run(made, own).tobytes() == alone.tobytes()
        assert together[own].tobytes() == alone.tobytes()


@pytest.mark.parametrize(
    ("nodes", "inputs", "why"),
    [
        (ATTENTION, {"q": InputInfo(FLOAT32, (1, 2, 1, 8))}, "input 'q' has no row for each session"),
        ([new_node("Softmax", ["place"], ["soft"], axis=0), new_node("Add", ["q", "soft"], ["q2"]), *BEHIND], {},
         "Softmax reads 'place', which follows"),
        ([new_node("BatchMatMul", ["q", "place"], ["q2"], broadcast=1), *BEHIND], {},
         "BatchMatMul joins what follows from the length with rows"),
    ],
    ids=["fixed", "an operator along the axis", "a product"],
)  # fmt: skip
def test_what_has_no_rows_is_refused(nodes: Sequence[Node], inputs: Mapping[str, InputInfo], why: str) -> None:
    sizes = (8, 8) if nodes[0].type == "BatchMatMul" else (8,)
    before = [
        new_node("Cast", ["grown"], ["floats"], to=FLOAT32.number), *LENGTH_OF_CACHE,
        new_node("Gather", ["squares", "past"], ["place"], axis=0),
    ]  # fmt: skip
    net, types = step([*before, *nodes], {**INPUTS, **inputs}, **NUMBERS, squares=np.ones((FULL, *sizes), np.float32))
    with pytest.raises(NotSteppingError, match=why):
        joined_step(net, types)
