"""The net for any length up to that of its tensors: of a text, say, of which only the first part is there.

It is the net itself, run at the full length, with attention that is told how many positions there are. The first
positions of its outputs are right, as what is at a position of a blob follows from what is at the *first* positions of
others. That is shown operator by operator: they pass positions on as rows of a batch (`core.rows`), or look them up, or
sum up to them. Types are inferred for three lengths, at each of which all axes must have the sizes that are told. A net
in which an operator works along positions otherwise has no such net.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.compiler.length_rules import (
    OWN_RULES,
    Known,
    NotSizedError,
    first_type,
    growing_axes,
    linear,
    moved_positions,
    numbers,
    viewed,
)
from dagexec.compiler.length_tails import Followed, Tail, tail_of
from dagexec.compiler.positions import FIXED, LENGTH, Positions, result_of
from dagexec.core.dtypes import INT64
from dagexec.core.inference import Probed, probed_outputs
from dagexec.core.inferred_types import typing_form
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.row_axes import rule_of
from dagexec.core.rows import elementwise, keeps_axes
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.shape_values import asked_operators
from dagexec.core.traits import OF_ALL_ROWS, Rows
from dagexec.errors import RowsError
from dagexec.ops.families.attention.fused import FUSED_ATTENTION
from dagexec.ops.families.attention.sized import OPEN_LENGTH, SIZED_ATTENTION
from dagexec.platform.records import dataclass

LENGTH_INPUT = "length/length"
"""Input of the net: how many positions there are."""

_OPENED = "length/opened"
_LENGTHS = (11, 13, 7)
"""That types are inferred for."""


@dataclass(frozen=True)
class Sized:
    """A net for any length up to a full one.

    Attributes:
        model: it, with an input more, the length.
        outputs: the axes of each that are as long; of blobs that the tail reads, too.
        tail: what computes the other outputs of the model, from the first positions of those; None for none.
    """

    model: Model
    outputs: Mapping[str, tuple[int, ...]]
    tail: Tail | None


def sized_net(model: Model, types: Mapping[str, TensorType], axes: Mapping[str, int]) -> Sized:
    """The net for inputs of these types but for their `axes`, which are as long as a text, say.

    Raises NotSizedError.
    """
    return _Sized(model, types, axes).made()


class _Sized:
    """Such a net in the making."""

    def __init__(self, model: Model, types: Mapping[str, TensorType], axes: Mapping[str, int]) -> None:
        self._model, self._count = model, len(_LENGTHS)
        self._known = {
            name: Known(Probed.of_constant(array, self._count), positions=numbers(array))
            for name, array in model.parameters.items()
        }
        self._followed: list[Followed] = []
        self._writers: dict[str, int] = {}
        self._reason = "no attention is among positions"
        self._alike: dict[Hashable, tuple[str, Sequence[Known]]] = {}
        for node in model.init_program.op:
            self._follow(node, is_asked=False)
        self._followed.clear()  # they stay where they are
        self._writers.clear()
        for name, kind in types.items():
            axis = axes.get(name)
            sized = [_with_size(kind, axis, length) for length in _LENGTHS]
            self._known[name] = Known(Probed.of_types(sized), () if axis is None else (Rows(axis),))

    def made(self) -> Sized:
        """It. Raises NotSizedError."""
        model = self._model
        operators = model.program.op
        asked = asked_operators(operators, [schema_of(node.type) for node in operators])
        for index, node in enumerate(operators):
            self._follow(node, is_asked=index in asked)
        nodes = [one.sized for one in self._followed if one.sized is not None]
        if not any(node.type == SIZED_ATTENTION for node in nodes):
            raise NotSizedError(self._reason)
        writers = [(name, self._writers.get(name)) for name in model.outputs]
        late = [(name, number) for name, number in writers if number is not None and not self._is_cut(name, number)]
        tail = tail_of(model, self._followed, late) if late else None
        names = [name for name, number in writers if (name, number) not in late]
        names += [] if tail is None else [name for name in tail.blobs if name not in names]
        outputs = {name: tuple(self._known[name].axes) for name in names}
        made = model.changed(
            net=type(model.program)((new_node(OPEN_LENGTH, [LENGTH_INPUT], [_OPENED]), *nodes), model.program.header),
            inputs={**model.inputs, LENGTH_INPUT: InputInfo(INT64, (1,))},
            outputs=tuple(names),
        )
        return Sized(made, outputs, tail)

    def _is_cut(self, name: str, number: int) -> bool:
        return self._followed[number].is_cut(name)

    def _follow(self, node: Node, *, is_asked: bool) -> None:
        """Find out what is known of the outputs of an operator, and what takes its place."""
        writers = [self._writers.get(name) for name in node.input]
        try:
            op_type, known = self._shown(node, is_asked=is_asked)
        except NotSizedError as reason:
            if not any(number is not None and self._followed[number].sized is None for number in writers):
                self._reason = str(reason)
            self._followed.append(Followed(node, None, (), writers))
            for name in node.output:
                self._known.pop(name, None)
        else:
            sized = node
            if op_type != node.type:
                inputs_too = (*node.input, _OPENED)
                sized = Node(op_type, inputs_too, node.output, node.values, name=node.name, engine=node.engine)
            self._followed.append(Followed(node, sized, known, writers))
            self._known.update(zip(node.output, known, strict=True))
        self._writers.update(dict.fromkeys(node.output, len(self._followed) - 1))

    def _shown(self, node: Node, *, is_asked: bool) -> tuple[str, Sequence[Known]]:
        """As `_passed_on`, for operators that are alike once."""
        schema = schema_of(node.type)
        if schema.sub_nets or schema.handles or schema.effects or not schema.reproducible:
            raise NotSizedError(f"{node.type} does more than compute")
        for name in node.input:
            if name not in self._known:
                raise NotSizedError(f"{node.type}: nothing is known of {name!r}")
        inputs = [self._known[name] for name in node.input]
        form = None if is_asked else _form(node, schema, inputs)
        passed_on = None if form is None else self._alike.get(form)
        if passed_on is None:
            passed_on = self._passed_on(node, schema, inputs, is_asked=is_asked)
        if form is not None:
            self._alike[form] = passed_on
        return passed_on

    def _passed_on(
        self, node: Node, schema: OpSchema, inputs: Sequence[Known], *, is_asked: bool
    ) -> tuple[str, Sequence[Known]]:
        """The type of what takes the place of an operator, and what is known of its outputs. Raises NotSizedError."""
        asks = is_asked or schema.from_types is not None or all(one.has_contents for one in inputs)
        outputs = probed_outputs(node, [one.probed for one in inputs], self._count, self._count, is_asked=asks)
        if any(None in one.types for one in outputs):
            raise NotSizedError(f"what {node.type} makes is not known for {_LENGTHS} positions")
        op_type = node.type
        if schema.from_types is not None:
            known = [self._measured(node, inputs[0], outputs[0])]
        elif not any(one.rows or one.is_counted for one in inputs):
            known = [Known(one, positions=numbers(one.contents[0])) for one in outputs]
        elif any(one.rows for one in inputs) or any(map(growing_axes, outputs)):
            try:
                op_type, known = self._grown(node, schema, inputs, outputs)
            except RowsError as error:
                raise NotSizedError(str(error)) from None
        else:
            positions = linear(node, inputs)
            is_fixed = positions is not None and positions.is_fixed
            known = [Known(one, (), not is_fixed, positions) for one in outputs]
        for name, one in zip(node.output, known, strict=True):
            _check(node, name, one)
        return op_type, known

    def _measured(self, node: Node, source: Known, output: Probed) -> Known:
        """The sizes of a blob, by Shape; by others, only those of a blob that is always as large."""
        if not source.rows:
            content = output.contents[0]
            assert content is not None
            return Known(output, positions=Positions.of(content))
        if node.type != "Shape" or first_type(output).shape != (len(source.shape),):
            return Known(output, is_counted=True)
        fixed = np.array(source.shape)
        lengths = np.zeros(len(fixed), np.int64)
        for one in source.rows:
            fixed[one.axis], lengths[one.axis] = 0, one.size(1)
        return Known(output, is_counted=True, positions=Positions({FIXED: fixed, LENGTH: lengths}))

    def _grown(
        self, node: Node, schema: OpSchema, inputs: Sequence[Known], outputs: Sequence[Probed]
    ) -> tuple[str, list[Known]]:
        """An operator that reads or makes what has positions. Raises NotSizedError or RowsError."""
        if node.type == FUSED_ATTENTION:
            return self._attention(node, inputs, outputs)
        if rule_of(schema) in (elementwise, keeps_axes) and not node.arguments(node.type).bool("broadcast"):
            return node.type, self._elementwise(node, inputs, outputs)
        own = OWN_RULES.get(node.type)
        found = None if own is None else own(node, inputs, outputs[0])
        if found is not None:
            return node.type, [found]
        is_moved = node.type == "Transpose" or schema.is_view(node)
        if is_moved and len(inputs[0].rows) > 1 and not any(one.rows for one in inputs[1:]):
            return node.type, [viewed(node, inputs[0], outputs[0])]
        return node.type, self._by_rule(node, schema, inputs, outputs)

    def _by_rule(self, node: Node, schema: OpSchema, inputs: Sequence[Known], outputs: Sequence[Probed]) -> list[Known]:
        """Positions are passed on as the rows of a batch are."""
        rule = rule_of(schema)
        if rule is None or any(len(one.rows) > 1 for one in inputs):
            raise NotSizedError(f"{node.type} reads {node.input[0]!r}, of many positions")
        types = tuple(first_type(one.probed) for one in inputs)
        contents = tuple(one.probed.contents[0] for one in inputs)
        call = OperatorCall(node, node.arguments(node.type), types, contents, node.type)
        rows = [one.rows[0] if one.rows else None for one in inputs]
        counted = [place for place, one in enumerate(inputs) if one.is_counted]
        found = rule(
            RowsCall(
                call, list(map(first_type, outputs)), rows, counted, [growing_axes(one) for one in outputs],
                _LENGTHS[0], _LENGTHS, [one.probed.contents for one in inputs], partial(_no_results, node),
            )
        )  # fmt: skip
        if OF_ALL_ROWS in found:
            raise NotSizedError(f"{node.type} sums over positions")
        positions = None
        if len(outputs) == 1 and found[0] is not None and inputs[0].positions is not None:
            positions = moved_positions(node, inputs[0], {rows[0].axis if rows[0] else 0: found[0].axis})
        return [Known(one, () if own is None else (own,), positions=positions)
                for one, own in zip(outputs, found, strict=True)]  # fmt: skip

    def _elementwise(self, node: Node, inputs: Sequence[Known], outputs: Sequence[Probed]) -> list[Known]:
        """Each element from those in its place."""
        positions = result_of(node, [one.positions for one in inputs])
        if node.type in ("Cast", "Copy") and len(inputs) == 1:
            positions = inputs[0].positions
        if any(one.is_counted for one in inputs) and (positions is None or len(outputs) != 1):
            raise NotSizedError(f"{node.type} computes with the length")
        rank = len(first_type(outputs[0]).shape)
        axes: dict[int, Rows] = {}
        for one in inputs:
            for axis, rows in one.axes.items():
                place = axis + rank - len(one.shape)
                if axes.setdefault(place, rows.at(place)) != rows.at(place):
                    raise NotSizedError(f"{node.type} joins axes of several lengths")
        is_counted = any(one.is_counted for one in inputs) or (positions is not None and positions.is_of_length)
        return [Known(one, tuple(axes.values()), is_counted, positions) for one in outputs]

    def _attention(self, node: Node, inputs: Sequence[Known], outputs: Sequence[Probed]) -> tuple[str, list[Known]]:
        """Attention among positions is told how many there are; among others, for them, it goes its way."""
        arguments = node.arguments(node.type)
        orders = [tuple(arguments.ints(name)) or (0, 1, 2, 3) for name in ("q_axes", "k_axes", "v_axes", "y_axes")]
        places = [[order.index(axis) for axis in one.axes] for order, one in zip(orders, inputs[:3], strict=False)]
        y = Known(outputs[0], (Rows(orders[3].index(2)),))
        if any(one.is_counted or any(rows != Rows(rows.axis) for rows in one.rows) for one in inputs):
            raise NotSizedError("attention reads what depends on the length otherwise")
        masks = [{axis + 4 - len(one.shape) for axis in one.axes} for one in inputs[3:]]
        if places == [[2], [], []] and all(axes <= {2} for axes in masks):
            return node.type, [y]
        if places != [[2], [2], [2]] or not all(axes <= {2, 3} for axes in masks):
            raise NotSizedError("attention is among others than positions")
        if any(_LENGTHS[0] in one.shape[-1:] and not axes for one, axes in zip(inputs[3:], masks, strict=True)):
            raise NotSizedError("a mask is not as long as the positions")
        return SIZED_ATTENTION, [y]


def _no_results(node: Node, _argument: str, _rows: object) -> list[Rows | None]:
    raise NotSizedError(f"{node.type} runs a net")


def _with_size(kind: TensorType, axis: int | None, size: int) -> TensorType:
    if axis is None:
        return kind
    return TensorType((*kind.shape[:axis], size, *kind.shape[axis + 1 :]), kind.meta)


def _check(node: Node, name: str, known: Known) -> None:
    """Raise NotSizedError unless the axes of an output have the sizes that are told, at each length."""
    axes = known.axes
    for kind, length in zip(known.probed.types, _LENGTHS, strict=True):
        assert kind is not None
        if any(kind.shape[axis] != rows.size(length) for axis, rows in axes.items()):
            raise NotSizedError(f"{node.type}: {name!r} is not as long as its positions")
    if set(growing_axes(known.probed)) != set(axes):
        raise NotSizedError(f"{node.type}: {name!r} is as long as no positions")


def _form(node: Node, schema: OpSchema, inputs: Sequence[Known]) -> Hashable | None:
    """Equal for operators that pass on the same: layers of a net repeat. None for those that may look at numbers."""
    form = typing_form(node, schema, ()) if not schema.value_inputs else None
    if form is None or schema.from_types is not None or any(one.positions is not None for one in inputs):
        return None
    return form, *((one.probed.types, one.rows, one.is_counted) for one in inputs)
