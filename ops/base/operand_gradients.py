"""Operators that give the gradients of several operands, each summed to the operand's shape: what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.expressions import Expression, element
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import OF_ALL_ROWS, Rows
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.expression_steps import expression_steps
from dagexec.ops.base.gradient_selection import WANTED_ARGS, wanted_inputs

Views = Mapping[str, tuple[int, ...]]
"""By what an input is called, the shape under which it broadcasts to that of the output; all of as many axes."""

Form = tuple[Sequence[str], Expression]
"""A gradient: what it is computed from, and an expression of these, which are elements 0, 1 and so on."""


class OperandGradients(Operator):
    """Base of operators that give the gradients of several operands, each summed to the operand's shape.

    Attributes:
        given: what the gradient of the output is called among the inputs.
        untyped: the inputs that need not have the element type of the others.
    """

    given: ClassVar[str]
    untyped: ClassVar[tuple[str, ...]] = ()

    def prepare(self) -> Step:
        """One computation for each gradient that is requested; one that overwrites that of the output is the last."""
        call = self.call()
        views = self.views(call)
        roles = self.roles(call)
        arrays = {name: self.x(index).reshape(views[name]) for name, index in roles.items()}
        given = self.definition.input[roles[self.given]]
        wanted = list(enumerate(wanted_inputs(call, self.operands(call))))
        wanted.sort(key=lambda entry: self.definition.output[entry[0]] == given)
        steps = []
        for index, name in wanted:
            sources, expression = self.form(name)
            target = self.y(index).reshape(views[name])
            passes = None if expression is element(0) else partial(_passes, expression)
            steps.append(reduced(self, views[self.given], [arrays[source] for source in sources], target, passes))
        return in_sequence(steps)

    @classmethod
    @abstractmethod
    def roles(cls, call: OperatorCall) -> dict[str, int]:
        """What each input is called, and its index."""

    @classmethod
    @abstractmethod
    def operands(cls, call: OperatorCall) -> tuple[str, ...]:
        """The inputs of the forward operator that may have a gradient."""

    @classmethod
    @abstractmethod
    def views(cls, call: OperatorCall) -> Views:
        """See Views. Raises ShapeError or ArgumentError when the inputs are not the forward operator's."""

    @abstractmethod
    def form(self, name: str) -> Form:
        """How the gradient of operand `name` is computed."""


def _passes(expression: Expression, pieces: Sequence[Array], out: Array, scratch: Scratch) -> list[Step]:
    return expression_steps([expression], dict(enumerate(pieces)), [out], scratch)


def infer_operands(cls: type[OperandGradients], call: OperatorCall) -> list[TensorType]:
    """Each gradient has the type of its operand; that of the output must have the shape that they broadcast to."""
    roles = cls.roles(call)
    given = roles[cls.given]
    meta = call.require_types(given, *FLOAT_TYPES)
    call.require_same_type(*(index for name, index in roles.items() if name not in cls.untyped))
    shape = cls.views(call)[cls.given]
    call.require_shape(given, shape, "that of the forward operator's output")
    outputs = []
    for index, name in enumerate(wanted_inputs(call, cls.operands(call))):
        source = roles.get(name, given)
        kind = TensorType(call.inputs[source].shape, meta)
        if call.definition.output[index] == call.definition.input[given] and kind != call.inputs[given]:
            raise call.fail(f"the gradient of {name}, {kind}, cannot overwrite {cls.given}, {call.inputs[given]}")
        outputs.append(kind)
    return outputs


def register_gradients(
    cls: type[OperandGradients],
    op_type: str,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    names: tuple[tuple[str, ...], tuple[str, ...]],
    doc: str,
    args: Mapping[str, str],
    given: int,
    flops: float = 2.0,
) -> None:
    """Register an operator; input `given` is the gradient of the output, which one output may overwrite."""

    def cost(call: OperatorCall, kinds: Sequence[TensorType]) -> Cost:
        work = flops * len(kinds) * call.inputs[given].elements
        return Cost(int(work), sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in kinds))

    schema = OpSchema(
        op_type,
        inputs=inputs,
        outputs=outputs,
        infer=lambda call: infer_operands(cls, call),
        doc=doc,
        input_names=names[0],
        output_names=names[1],
        args={**args, **WANTED_ARGS},
        inplace=lambda source, _target: source == given,
        cost=cost,
        rows=partial(_rows, cls),
    )
    operator(schema)(cls)


def _rows(cls: type[OperandGradients], asked: RowsCall) -> list[Rows | None]:
    """An operand with rows gets those of its gradient; if something is summed for it, they must be on the first axis.

    Tensors with rows have as many axes as the gradient of the output.
    """
    asked.require_uncounted()
    roles = cls.roles(asked.call)
    given = roles[cls.given]
    rows = asked.common({index: one for index, one in enumerate(asked.rows) if one is not None})
    shape, found = asked.call.inputs[given].shape, list[Rows | None]()
    if any(one is not None and asked.rank(index) != len(shape) for index, one in enumerate(asked.rows)):
        raise asked.mixes(rows.axis)
    for name in wanted_inputs(asked.call, cls.operands(asked.call)):
        operand = roles.get(name, given)
        own = asked.rows[operand]
        if own is not None and rows.axis > 0 and asked.call.inputs[operand].shape != shape:
            raise asked.mixes(rows.axis)
        found.append(OF_ALL_ROWS if own is None else own)
    return found


def stretched_views(shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes with axes of size 1 in front, as many axes as `shape`."""
    return {name: (*(1,) * (len(shape) - len(own)), *own) for name, own in shapes.items()}
