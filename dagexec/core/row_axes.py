"""Proof that the examples of a batch are computed apart, and on which axis each blob has them.

Types are inferred for several numbers of examples, and operators say how they pass rows on (`OpSchema.rows`); that
every axis then has the size it must have is checked in each of the inferences. What is computed from shapes may depend
on the number of examples as long as only shapes follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.body_types import Seen
from dagexec.core.inference import Probed, body_types, probed_outputs
from dagexec.core.model import Model
from dagexec.core.node import Node, operator_label
from dagexec.core.registry import schema_of, sub_nets_of
from dagexec.core.rows import elementwise, first_axis, image_rows
from dagexec.core.rows_call import RowsCall, RowsRule
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.shape_values import asked_operators
from dagexec.core.traits import OF_ALL_ROWS, ImageRole, Rows
from dagexec.errors import RowsError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_EXAMPLES = (2, 3, 1)
"""Numbers of examples that types are inferred for. Rules see the first, as sizes of 1 tell no axis from another."""

_BY_ROLE: Mapping[ImageRole, RowsRule] = {
    ImageRole.ELEMENTWISE: elementwise,
    ImageRole.CONVOLUTION: image_rows,
    ImageRole.TRANSPOSED_CONVOLUTION: image_rows,
    ImageRole.QUANTIZED_CONVOLUTION: image_rows,
    ImageRole.POOLING: first_axis,
    ImageRole.SAME_CHANNELS: first_axis,
}


@dataclass(frozen=True)
class RowAxes:
    """Where a net's blobs have the examples of a batch.

    Attributes:
        inputs: of the inputs of the model; one that is not in it is shared by all examples.
        outputs: of its outputs; one that is not in it is the same for any examples.
        blobs: of all blobs, as the last operator that wrote them left them.
    """

    inputs: Mapping[str, Rows]
    outputs: Mapping[str, Rows]
    blobs: Mapping[str, Rows]


def find_row_axes(model: Model, types: Mapping[str, TensorType], axes: Mapping[str, int] | None = None) -> RowAxes:
    """Follow the batch axis of the inputs through the net.

    `types` are those of inputs in a run of any number of examples, `axes` the batch axis of each input that has one;
    by default that is axis 0 where the model leaves its size free. Raises RowsError where examples are not apart, or
    nothing is known of an operator.
    """
    if axes is None:
        axes = _free_first_axes(model)
    RowFollower.check_axes(model, types, axes)
    follower = RowFollower(model.program.name)
    follower.begin(model, types, axes)
    follower.follow_all(model.program.op)
    return follower.result(model, axes)


def _free_first_axes(model: Model) -> dict[str, int]:
    """Axis 0 of the inputs that the net needs and whose size there is free."""
    infos = {name: model.inputs[name] for name in model.needed_inputs()}
    return {name: 0 for name, info in infos.items() if info.shape is None or info.shape[:1] == (None,)}


def rule_of(schema: OpSchema) -> RowsRule | None:
    """What the operator says, or what follows from its formula or its part in layouts of images."""
    if schema.rows is not None:
        return schema.rows
    if schema.formula is not None:
        return elementwise
    return None if schema.image_role is None else _BY_ROLE.get(schema.image_role)


class RowFollower:
    """What is known of blobs while operators are gone through in list order.

    A blob that is there before is given by `take`, or with all of a model by `begin`.
    """

    def __init__(self, net: str) -> None:
        self._net = net
        self._known: dict[str, Probed] = {}
        self._rows: dict[str, Rows] = {}
        self._counted: set[str] = set()
        self._of_all: set[str] = set()
        self._unknown = Probed.of_types((None,) * len(_EXAMPLES))

    def begin(self, model: Model, types: Mapping[str, TensorType], axes: Mapping[str, int]) -> None:
        """Take what a model has before a run, and is fed."""
        self._known |= {name: Probed.of_constant(array, len(_EXAMPLES)) for name, array in model.parameters.items()}
        for definition in model.init_program.op:
            self._known.update(zip(definition.output, self._probed(definition, is_asked=False), strict=True))
        for name, kind in types.items():
            self._known[name] = Probed.of_types(_with_size(kind, axes.get(name), examples) for examples in _EXAMPLES)
        self._rows.update({name: Rows(axis) for name, axis in axes.items()})

    @staticmethod
    def check_axes(model: Model, types: Mapping[str, TensorType], axes: Mapping[str, int]) -> None:
        """Raise RowsError unless every batch axis is one of an input whose type is given."""
        if not axes:
            raise RowsError(f"model {model.name!r}: no input has a batch axis, that is, a first axis of free size")
        for name, axis in axes.items():
            if name not in types:
                raise RowsError(f"model {model.name!r}: the type of input {name!r} is needed, found {sorted(types)}")
            if not 0 <= axis < len(types[name].shape):
                raise RowsError(f"model {model.name!r}: input {name!r}, {types[name]}, has no axis {axis}")

    def follow_all(self, operators: Sequence[Node]) -> None:
        """Go through the operators of a net. Raises RowsError."""
        asked = asked_operators(operators, [schema_of(definition.type) for definition in operators])
        for index, definition in enumerate(operators):
            self.follow(index, definition, is_asked=index in asked)

    def follow(self, index: int, definition: Node, *, is_asked: bool) -> None:
        """Find types, contents and rows of the outputs of an operator."""
        schema = schema_of(definition.type)
        label = operator_label(definition, index, self._net)
        for name in self._of_all.intersection(definition.input):
            raise RowsError(f"{label}: input {name!r} was computed from all rows together")
        rows = [self._rows.get(name) for name in definition.input]
        asks = is_asked or schema.from_types is not None or all(map(_is_known, self._inputs(definition)))
        outputs = self._probed(definition, is_asked=asks)
        counted = self._is_counted(definition, schema, outputs, rows)
        found: Sequence[Rows | None] = [None] * len(outputs)
        if not counted and (any(rows) or any(map(_grows, outputs)) or self._reads_count(definition)):
            try:
                found = self._passed_on(definition, schema, label, outputs, rows)
            except RowsError:
                if not all(map(_is_known, outputs)):
                    raise
                counted = True  # it follows from the number of examples alone: the numbers of the rows, say
        if (schema.effects and schema.rows is None) or not (schema.reproducible or schema.is_view(definition)):
            raise RowsError(f"{label}: does not give the same in every run, so rows depend on their batch")
        picks = is_asked or schema.from_types is not None or (schema.moves_elements and schema.formula is None)
        for name, made, own in zip(definition.output, outputs, found, strict=True):
            self._known[name] = made
            self._forget(name)
            if own is OF_ALL_ROWS:
                self._of_all.add(name)
                continue
            if own is not None:
                self._rows[name] = own
            if own is None and (counted or any(rows)) and not (picks and _is_constant(made)):
                self._counted.add(name)  # a shape, say

    def _inputs(self, definition: Node) -> list[Probed]:
        return [self._known.get(name, self._unknown) for name in definition.input]

    def _probed(self, definition: Node, *, is_asked: bool) -> list[Probed]:
        return probed_outputs(definition, self._inputs(definition), len(_EXAMPLES), len(_EXAMPLES), is_asked=is_asked)

    def _forget(self, name: str) -> None:
        self._rows.pop(name, None)
        self._counted.discard(name)
        self._of_all.discard(name)

    def _reads_count(self, definition: Node) -> bool:
        return not self._counted.isdisjoint(definition.input)

    def _is_counted(
        self, definition: Node, schema: OpSchema, outputs: Sequence[Probed], rows: Sequence[Rows | None]
    ) -> bool:
        """True when outputs of fixed shape follow from shapes and counts alone."""
        if any(map(_grows, outputs)):
            return False
        return schema.from_types is not None or (self._reads_count(definition) and not any(rows))

    def _passed_on(
        self,
        definition: Node,
        schema: OpSchema,
        label: str,
        outputs: Sequence[Probed],
        rows: Sequence[Rows | None],
    ) -> Sequence[Rows | None]:
        rule = rule_of(schema)
        if rule is None:
            why = (
                "" if not schema.value_inputs else ", and how large its outputs are follows from values of all of them"
            )
            raise RowsError(f"{label}: {definition.type} does not say whether its rows are independent{why}")
        inputs = self._inputs(definition)
        columns = [blob.types for blob in (*inputs, *outputs)]
        if any(kind is None for column in columns for kind in column):
            raise RowsError(f"{label}: its shapes are not known for {' and '.join(map(str, _EXAMPLES))} rows")
        first = [kind for kind, *_ in columns if kind is not None]
        contents = tuple(blob.contents[0] for blob in inputs)
        call = OperatorCall(definition, definition.arguments(label), tuple(first[: len(inputs)]), contents, label)
        counted = [place for place, name in enumerate(definition.input) if name in self._counted]
        growing = [_growing_axes(blob) for blob in outputs]
        results = partial(self._results, definition, label)
        known = [blob.contents for blob in inputs]
        asked = RowsCall(call, first[len(inputs) :], rows, counted, growing, _EXAMPLES[0], _EXAMPLES, known, results)
        found = rule(asked)
        for name, blob, own in zip(definition.output, outputs, found, strict=True):
            _check_sizes(label, name, blob, own)
        return found

    def _results(self, definition: Node, label: str, argument: str, given: Sequence[Rows | None]) -> list[Rows | None]:
        """The rows of what the net in `argument` results in; see `RowsCall.results`."""
        arguments = definition.arguments(label)
        captured = arguments.strings("captured")
        net = sub_nets_of(definition, schema_of(definition.type)).get(argument)
        around = self._given(definition, argument)
        if net is None or around is None or len(around) != len(given):
            raise RowsError(f"{label}: {argument}: the types of what it is given are not known")
        inside = RowFollower(f"{self._net}: {argument}")
        for name, outside in zip(captured, definition.input[len(definition.input) - len(captured) :], strict=True):
            inside.take(name, self._known.get(outside, self._unknown), self._rows.get(outside))
            inside._counted |= {name} if outside in self._counted else set()
        formal = [name for name in net.external_input if name not in captured]
        for name, blob, rows in zip(formal, around, given, strict=True):
            inside.take(name, blob, rows)
        inside.follow_all(net.op)
        for name in inside._counted.intersection(net.external_output):
            raise RowsError(f"{label}: {argument}: result {name!r} depends on the number of rows")
        for name in inside._of_all.intersection(net.external_output):
            raise RowsError(f"{label}: {argument}: result {name!r} is computed from all rows together")
        return [inside._rows.get(name) for name in net.external_output]

    def take_type(self, name: str, kind: TensorType, axis: int | None) -> None:
        """Let a blob of a type be there, with rows on an axis, or without."""
        self.take(name, Probed.of_types(_with_size(kind, axis, examples) for examples in _EXAMPLES), None)
        if axis is not None:
            self._rows[name] = Rows(axis)

    def take_constant(self, name: str, array: Array) -> None:
        """Let a blob with that content be there."""
        self.take(name, Probed.of_constant(array, len(_EXAMPLES)), None)

    def rows_of(self, name: str) -> Rows | None:
        """Where a blob has the examples; None where it has none, or what it holds depends on their number."""
        return None if name in self._of_all else self._rows.get(name)

    def take(self, name: str, blob: Probed, rows: Rows | None) -> None:
        """Let a blob be there before the net runs."""
        self._known[name] = blob
        if rows is not None:
            self._rows[name] = rows

    def _given(self, definition: Node, argument: str) -> list[Probed] | None:
        """What is known of the values that an operator hands the net in `argument`."""
        columns = []
        inputs = self._inputs(definition)
        for probe in range(len(_EXAMPLES)):
            seen = Seen([blob.types[probe] for blob in inputs], [blob.contents[probe] for blob in inputs])
            around = body_types(definition, seen)
            if around is None or argument not in around.given:
                return None
            columns.append(around.given[argument])
        return [Probed.of_types(types) for types in zip(*columns, strict=True)]

    def result(self, model: Model, axes: Mapping[str, int]) -> RowAxes:
        """What was found. Raises RowsError for an output that depends on the number of examples otherwise."""
        for name in model.outputs:
            if name in self._counted:
                raise RowsError(f"model {model.name!r}: output {name!r} depends on the number of rows")
            if name in self._of_all:
                raise RowsError(f"model {model.name!r}: output {name!r} is computed from all rows together")
        outputs = {name: self._rows[name] for name in model.outputs if name in self._rows}
        return RowAxes({name: Rows(axis) for name, axis in axes.items()}, outputs, dict(self._rows))


def _with_size(kind: TensorType, axis: int | None, size: int) -> TensorType:
    if axis is None:
        return kind
    return TensorType((*kind.shape[:axis], size, *kind.shape[axis + 1 :]), kind.meta)


def _shapes(blob: Probed) -> list[tuple[int, ...]]:
    return [kind.shape for kind in blob.types if kind is not None]


def _grows(blob: Probed) -> bool:
    return len(set(_shapes(blob))) > 1


def _growing_axes(blob: Probed) -> tuple[int, ...]:
    sizes = zip(*_shapes(blob), strict=False)
    return tuple(axis for axis, found in enumerate(sizes) if len(set(found)) > 1)


def _is_known(blob: Probed) -> bool:
    """True when the content is known for every number of examples."""
    return all(content is not None for content in blob.contents)


def _is_constant(blob: Probed) -> bool:
    """True when the content is known and the same for every number of examples."""
    known: list[npt.NDArray[Any]] = [content for content in blob.contents if content is not None]
    return len(known) == len(blob.contents) and all(np.array_equal(known[0], other) for other in known)


def _check_sizes(label: str, name: str, blob: Probed, rows: Rows | None) -> None:
    """Raise RowsError unless the sizes of an output are what `rows` says, for each number of examples."""
    shapes = _shapes(blob)
    ranks = {len(shape) for shape in shapes}
    expected = () if rows is None or rows is OF_ALL_ROWS else (rows.axis,)
    sized = (
        not expected
        or rows is None
        or all(
            rows.axis < len(shape) and shape[rows.axis] == rows.size(examples)
            for shape, examples in zip(shapes, _EXAMPLES, strict=True)
        )
    )
    if len(ranks) != 1 or _growing_axes(blob) != expected or not sized:
        listed = ", ".join(f"{shape} for {examples}" for shape, examples in zip(shapes, _EXAMPLES, strict=True))
        where = "no axis has rows" if rows is None else f"axis {rows.axis} has {rows.size(1)} of each example"
        raise RowsError(f"{label}: output {name!r} has other sizes than rows give it, where {where}: {listed}")
