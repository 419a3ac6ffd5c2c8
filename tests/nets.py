"""Small nets and test operators that several test modules build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core import registry
from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Operator, Step
from dagexec.core.rows import first_axis
from dagexec.core.schema import UNBOUNDED, OperatorCall, OpSchema, TensorType, one_to_one


def net_of(parents: Sequence[Sequence[int]], name: str = "net", op_type: str = "NoOp") -> NetDef:
    """A net of operators that each write a blob of their own and read those of their parents."""
    net = NetDef(name=name)
    for index, row in enumerate(parents):
        net.op.add(type=op_type, input=[f"b{parent}" for parent in row], output=[f"b{index}"])
    return net


def parents_from_edges(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows of parents from (parent, child) pairs."""
    rows: list[list[int]] = [[] for _ in range(count)]
    for parent, child in edges:
        rows[child].append(parent)
    return rows


@st.composite
def noop_nets(draw: st.DrawFn, most: int = 14) -> NetDef:
    """Random nets: shared blobs with several writers, in-place operators, control inputs."""
    names = [f"b{index}" for index in range(draw(st.integers(1, 7)))]
    blobs = st.lists(st.sampled_from(names), max_size=3, unique=True)
    net = NetDef(name="random")
    for _ in range(draw(st.integers(1, most))):
        inputs, outputs = draw(blobs), draw(blobs)
        both = [name for name in outputs if name in inputs]
        inputs = both + [name for name in inputs if name not in both]
        outputs = both + [name for name in outputs if name not in both]
        net.op.add(type="NoOp", input=inputs, output=outputs, control_input=draw(blobs))
    return net


@contextmanager
def temporary_operator(
    name: str, body: Callable[[Operator], object], args: Sequence[str] = (), *, row_by_row: bool = False
) -> Iterator[None]:
    """While the context lasts, operators of type `name`, with arguments `args`, call `body(operator)` in their step.

    Their outputs have one element; `row_by_row` they are like the first input, and each row is computed by itself.
    """

    def infer(call: OperatorCall) -> list[TensorType]:
        return [call.inputs[0] if row_by_row else TensorType((1,), FLOAT32)] * len(call.definition.output)

    schema = OpSchema(
        name,
        inputs=(0, UNBOUNDED),
        outputs=(0, UNBOUNDED),
        infer=infer,
        doc="For a test.",
        args=dict.fromkeys(args, "for a test"),
        inplace=one_to_one,
        rows=first_axis if row_by_row else None,
    )

    class TestOperator(Operator):
        def prepare(self) -> Step:
            return lambda: body(self)

    registry.operator(schema)(TestOperator)
    try:
        yield
    finally:
        registry._schemas.pop(name)
        registry._operators.pop(("cpu", name, ""))
