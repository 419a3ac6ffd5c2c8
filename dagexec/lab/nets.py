"""Task graphs as nets: an operator that works for a while, and a net of one for each task.

Each task writes a mark that follows from its own number and the marks of the tasks that it waits for, so that results
tell whether a schedule kept the order (`expected_marks`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import INT64
from dagexec.core.native import can_run
from dagexec.core.operator import Operator, Step
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef
from dagexec.core.registry import new_operator
from dagexec.core.schema import FLOPS_PER_SECOND, UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.lab.graph import WorkGraph
from dagexec.lab.kernels import KINDS, mark_row, work_rows, work_step
from dagexec.ops.kernels.tables import in_pieces

WORK_OPERATOR = "LabWork"
_BITS = (1 << 64) - 1


def _infer(call: OperatorCall) -> list[TensorType]:
    for index in range(len(call.inputs)):
        call.require_types(index, INT64)
    return [TensorType((1,), INT64)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return Cost(int(call.arguments.float("seconds", 0.0) * FLOPS_PER_SECOND), 0, 8)


@new_operator(
    WORK_OPERATOR,
    inputs=(0, UNBOUNDED),
    outputs=(1, 1),
    infer=_infer,
    cost=_cost,
    doc="Y = a mark made of `number` and the marks X, after some work. For the laboratory only.",
    args={
        "seconds": "of work on one core",
        "kind": f"of work: {', '.join(KINDS)}",
        "number": "that nobody else has",
    },
    required_args=("seconds", "number"),
)
class LabWork(Operator):
    """Works, then marks. Both are native calls where machine code runs."""

    def prepare(self) -> Step:
        """Calls of one piece. Raises ArgumentError for work that cannot be done."""
        kind, seconds = self.arguments.string("kind", KINDS[0]), self.arguments.float("seconds", 0.0)
        number = self.arguments.int("number", 0)
        if kind not in KINDS or not 0 <= seconds < 1e6:
            raise ArgumentError(f"{self.label}: expected {', '.join(KINDS)} for 0 to 1e6 s, found {kind} for {seconds}")
        marks, y = [self.x(index) for index in range(len(self.input_blobs))], self.y(0)
        if not can_run():
            work = work_step(kind, seconds)

            def step() -> None:
                work()
                y[0] = _signed(_mark(number, [int(mark[0]) for mark in marks]))

            return step
        rows, keeps = work_rows(kind, seconds, number)
        table = np.array([number, *(mark.ctypes.data for mark in marks)], np.uint64)
        return in_pieces([[*rows, mark_row(y.ctypes.data, table)]], (keeps, table, marks, y), self.label)


def work_net(graph: WorkGraph, kind: str = KINDS[0]) -> NetDef:
    """The net of a graph: an operator for each task, whose output has the task's place as its name."""
    net = NetDef(name=graph.name)
    for number, task in enumerate(graph.tasks):
        parents = [str(parent) for parent in task.parents]
        seconds = float(task.seconds)
        net.op.append(
            op(WORK_OPERATOR, parents, str(number), name=task.name, seconds=seconds, kind=kind, number=number + 1)
        )
    return net


def expected_marks(graph: WorkGraph) -> list[int]:
    """The marks of all tasks after a run that kept the order."""
    marks: list[int] = []
    for number, task in enumerate(graph.tasks):
        marks.append(_signed(_mark(number + 1, [marks[parent] for parent in task.parents])))
    return marks


def _mark(number: int, inputs: Sequence[int]) -> int:
    mark = number
    for one in inputs:
        mark = (mark * 31 + one) & _BITS
    return mark


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)
