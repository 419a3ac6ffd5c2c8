"""Shape and cost inference over a whole net, without running it.

Unlike a preparation (`dagexec.scheduler.nets.net`), this needs no workspace and allocates nothing: `inspect` and the
frontends use it. Values that follow from shapes are computed, as shapes may depend on them (`core.shape_values`). An
output whose shape only a run can tell is unknown (None), as is all that follows from it alone; the rest is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any, Self, TypeGuard

import numpy.typing as npt

from dagexec.core.body_types import Seen, Types, types_with_bodies
from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import Graph
from dagexec.core.inferred_types import answer_of, content_form, known_answer, output_types, typing_form
from dagexec.core.node import Node, operator_label
from dagexec.core.program import Program
from dagexec.core.registry import schema_of
from dagexec.core.schema import BodyTypes, Cost, OperatorCall, OpSchema, TensorType, UnknownValueError
from dagexec.core.shape_values import asked_operators, results_of
from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_MAX_NESTING = 4
"""The depth of operators that run nets: each may infer its own several times."""


@dataclass(frozen=True)
class NetTypes:
    """The result of inference: the type of every blob after its last write, and the cost of every operator.

    `outputs[i]` are the types of operator i's outputs. None stands for unknown.
    """

    blobs: Mapping[str, TensorType | None]
    outputs: tuple[tuple[TensorType | None, ...], ...]
    costs: tuple[Cost | None, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of one run, over the operators whose cost is known."""
        return sum(cost.flops for cost in self.costs if cost)


def infer_net(
    graph: Graph,
    inputs: Mapping[str, TensorType],
    values: Mapping[str, Array] | None = None,
) -> NetTypes:
    """Types of every blob of `graph` from those of the blobs that exist before it runs.

    `values` holds the contents of blobs that are constant, for operators whose output shapes depend on a value; values
    that follow from shapes are computed. Raises ShapeError, naming the operator, when inputs do not fit together.
    """
    return infer_listed(graph.name, graph.operators, inputs, values)


def infer_listed(
    net: str,
    operators: Sequence[Node],
    inputs: Mapping[str, TensorType],
    values: Mapping[str, Array] | None = None,
) -> NetTypes:
    """As `infer_net`, for operators in the order they are listed in a net of that name."""
    blobs: dict[str, TensorType | None] = {}
    rows = list(_each(net, operators, inputs.get, blobs, values or {}))
    return NetTypes({**inputs, **blobs}, tuple([types for types, _ in rows]), tuple([cost for _, cost in rows]))


def costs_of(
    graph: Graph, given: Callable[[str], TensorType | None], values: Mapping[str, Array]
) -> Iterator[Cost | None]:
    """The cost of each operator, None where it is unknown; inferred lazily.

    `given` returns the types of blobs that exist before the net runs. Raises what `infer_net` raises.
    """
    return (cost for _, cost in _each(graph.name, graph.operators, given, {}, values))


def _each(
    net: str,
    operators: Sequence[Node],
    given: Callable[[str], TensorType | None],
    blobs: dict[str, TensorType | None],
    values: Mapping[str, Array],
) -> Iterator[tuple[tuple[TensorType | None, ...], Cost | None]]:
    """Types of the outputs of each operator, and its cost; `blobs` gets the types of what they write."""
    schemas = [schema_of(definition.type) for definition in operators]
    asked = asked_operators(operators, schemas)
    contents = _Contents(values)
    for index, (definition, schema) in enumerate(zip(operators, schemas, strict=True)):
        kinds = tuple([blobs[name] if name in blobs else given(name) for name in definition.input])
        read = contents.of(definition.input)
        types: tuple[TensorType | None, ...] = (None,) * len(definition.output)
        cost: Cost | None = None
        results: Sequence[Array] = ()
        if schema.infer_bodies is not None:
            around = body_types(definition, Seen(kinds, read))
            types = types if around is None else tuple(around.outputs)
        if _all_known(kinds) and schema.can_infer(definition):
            known = None if index in asked else known_answer(definition, schema, kinds, read)
            if known is not None:
                types, cost = known.types, known.known_cost
            else:
                label = operator_label(definition, index, net)
                call = OperatorCall(definition, definition.arguments(label), kinds, read, label)
                with suppress(UnknownValueError):
                    answer = answer_of(call, schema)
                    results = (results_of(call, schema, answer.types) or ()) if index in asked else ()
                    types, cost = answer.types, answer.cost(call, schema)
        blobs.update(zip(definition.output, types, strict=True))
        contents.written(definition.output, results)
        yield types, cost


class _Contents:
    """The known contents of blobs, in a walk over the operators."""

    def __init__(self, values: Mapping[str, Array]) -> None:
        """`values` exist before the walk."""
        self._values = values
        self._written: dict[str, Array | None] = {}

    def of(self, names: Sequence[str]) -> tuple[Array | None, ...]:
        """Those of blobs called `names`."""
        written, values = self._written, self._values
        return tuple([written[name] if name in written else values.get(name) for name in names])

    def written(self, names: Sequence[str], contents: Sequence[Array]) -> None:
        """An operator wrote the blobs `names`; the contents of the first ones are known."""
        for name in names:
            if name in self._written or name in self._values:
                self._written[name] = None
        self._written.update(zip(names, contents, strict=False))


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The type and the content of a blob in each of several probes; None where unknown.

    A probe is a choice of types for the inputs of a net: with trial sizes, say.
    """

    types: tuple[TensorType | None, ...]
    contents: tuple[Array | None, ...]

    @classmethod
    def of_types(cls, types: Iterable[TensorType | None]) -> Self:
        """A blob of these types, whose content is unknown."""
        listed = tuple(types)
        return cls(listed, (None,) * len(listed))

    @classmethod
    def of_constant(cls, array: Array, probes: int) -> Self:
        """A blob that holds `array` in every one of so many probes."""
        kind = TensorType(tuple(array.shape), from_numpy(array.dtype))
        return cls((kind,) * probes, (array,) * probes)


_Row = tuple[tuple[TensorType | None, ...], tuple[Array | None, ...]]  # types and contents of blobs, in one probe


def probed_outputs(
    definition: Node,
    inputs: Sequence[Probed],
    probes: int,
    told_by_first: int,
    *,
    is_asked: bool,
) -> list[Probed]:
    """The outputs of an operator in several `probes`, from its inputs.

    Where an operator refuses its inputs, its outputs are unknown; from probe `told_by_first` on they then equal those
    of the first. Contents of outputs are computed where shapes depend on them (`is_asked`).
    """
    schema = schema_of(definition.type)
    unknown: _Row = (None,) * len(definition.output), (None,) * len(definition.output)
    if schema.infer_bodies is not None:
        return _outputs_with_bodies(definition, inputs, probes, told_by_first)
    if not schema.can_infer(definition):
        return [Probed.of_types((None,) * probes) for _ in definition.output]
    arguments = definition.arguments()
    first: _Row = (), ()
    rows: list[_Row] = []
    for probe, seen in enumerate(_rows(inputs, probes)):
        if rows and _are_same(seen, first):
            rows.append(rows[0])
            continue
        first = first if rows else seen
        row = rows[0] if probe >= told_by_first else unknown
        types, contents = seen
        if _all_known(types):
            with suppress(DagexecError):
                row = _probed_row(
                    OperatorCall(definition, arguments, types, contents, definition.type), schema, is_asked
                )
        rows.append(row)
    return [
        Probed(tuple([types[place] for types, _ in rows]), tuple([contents[place] for _, contents in rows]))
        for place in range(len(definition.output))
    ]


def probed_net(operators: Sequence[Node], given: Mapping[str, Probed], probes: int) -> dict[str, Probed]:
    """Every blob in several `probes`, from the `given` ones; unknown after operators that refuse their inputs."""
    blobs = dict(given)
    unknown = Probed.of_types((None,) * probes)
    asked = asked_operators(operators, [schema_of(definition.type) for definition in operators])
    kinds: dict[tuple[TensorType | None, ...], Probed] = {unknown.types: unknown}  # each kind once, without contents
    kind_of = {name: kinds.setdefault(blob.types, Probed.of_types(blob.types)) for name, blob in given.items()}
    made_before: dict[Hashable, tuple[list[Probed], list[Probed]]] = {}
    for index, definition in enumerate(operators):
        inputs = [blobs.get(name, unknown) for name in definition.input]
        form = None if index in asked else _probed_form(definition, inputs)
        if form is not None:
            form = form, *(kind_of.get(name, unknown) for name in definition.input)
        outputs = None if form is None else made_before.get(form)
        if outputs is None:
            probed = probed_outputs(definition, inputs, probes, probes, is_asked=index in asked)
            outputs = probed, [kinds.setdefault(blob.types, Probed.of_types(blob.types)) for blob in probed]
            made_before[form] = outputs
        blobs.update(zip(definition.output, outputs[0], strict=True))
        kind_of.update(zip(definition.output, outputs[1], strict=True))
    return blobs


def _probed_form(definition: Node, inputs: Sequence[Probed]) -> Hashable | None:
    """`typing_form` of an operator that sees the same values in all probes; else None."""
    schema = schema_of(definition.type)
    values: list[Array | None] = [None] * len(inputs)
    for index in schema.value_inputs:
        if index < len(inputs):
            contents = inputs[index].contents
            values[index] = contents[0]
            if any(content is not contents[0] for content in contents):
                return None
    return typing_form(definition, schema, values)


def _rows(blobs: Sequence[Probed], probes: int) -> Sequence[_Row]:
    """Types and contents of blobs, probe by probe."""
    if not blobs:
        return [((), ())] * probes
    types, contents = (
        zip(*[blob.types for blob in blobs], strict=True),
        zip(*[blob.contents for blob in blobs], strict=True),
    )
    return list(zip(types, contents, strict=True))


def _outputs_with_bodies(definition: Node, inputs: Sequence[Probed], probes: int, told_by_first: int) -> list[Probed]:
    columns: list[Types] = []
    rows = _rows(inputs, probes)
    for probe, row in enumerate(rows):
        if columns and _are_same(row, rows[0]):
            columns.append(columns[0])
            continue
        types: Types = _row_with_bodies(definition, row, 0)[0]
        if probe >= told_by_first:
            types = [kind or first for kind, first in zip(types, columns[0], strict=True)]
        columns.append(types)
    return [Probed.of_types(column) for column in zip(*columns, strict=True)]


def body_types(definition: Node, inputs: Seen, nesting: int = 0) -> BodyTypes | None:
    """The types around the nets that an operator runs; None when they are unknown, or an operator refuses."""
    try:
        return types_with_bodies(definition, inputs, partial(_net_outputs, nesting=nesting + 1))
    except DagexecError:
        return None


def _net_outputs(net: Program, given: Mapping[str, tuple[TensorType | None, Array | None]], nesting: int) -> Types:
    """The types of a body's results, cached by its inputs: each pass asks for them."""
    find = partial(_found_outputs, net, given, nesting)
    seen = [(name, kind, content_form(content)) for name, (kind, content) in given.items()]
    return find() if any(form is None for *_, form in seen) else net.once((nesting, *seen), find)


def _found_outputs(net: Program, given: Mapping[str, tuple[TensorType | None, Array | None]], nesting: int) -> Types:
    types = {name: kind for name, (kind, _) in given.items()}
    contents = {name: content for name, (_, content) in given.items()}
    schemas = net.once("schemas of operators", lambda: [schema_of(definition.type) for definition in net.op])
    asked = net.once("asked operators", lambda: asked_operators(net.op, schemas))
    for index, (definition, schema) in enumerate(zip(net.op, schemas, strict=True)):
        names = definition.input
        seen = tuple([types.get(name) for name in names]), tuple([contents.get(name) for name in names])
        row = _row_of(definition, schema, seen, is_asked=index in asked, nesting=nesting)
        types.update(zip(definition.output, row[0], strict=True))
        contents.update(zip(definition.output, row[1], strict=True))
    return [types.get(name) for name in net.external_output]


def _row_of(definition: Node, schema: OpSchema, seen: _Row, *, is_asked: bool, nesting: int) -> _Row:
    """The outputs of an operator in a body; `nesting` is the depth of nets within nets."""
    if schema.infer_bodies is not None and nesting < _MAX_NESTING:
        return _row_with_bodies(definition, seen, nesting)
    types, contents = seen
    if _all_known(types) and schema.can_infer(definition):
        with suppress(DagexecError):
            call = OperatorCall(definition, definition.arguments(), types, contents, definition.type)
            return _probed_row(call, schema, is_asked)
    return (None,) * len(definition.output), (None,) * len(definition.output)


def _row_with_bodies(definition: Node, seen: _Row, nesting: int) -> _Row:
    types_of_bodies = body_types(definition, Seen(*seen), nesting)
    unknown = (None,) * len(definition.output)
    return unknown if types_of_bodies is None else tuple(types_of_bodies.outputs), unknown


def _are_same(row: _Row, other: _Row) -> bool:
    return row[0] == other[0] and all(map(is_, row[1], other[1]))


def _probed_row(call: OperatorCall, schema: OpSchema, is_asked: bool) -> _Row:
    missing = (None,) * len(call.definition.output)
    types = output_types(call, schema)
    results = results_of(call, schema, types) if is_asked else None
    return (*types, *missing)[: len(missing)], (*(results or ()), *missing)[: len(missing)]


def _all_known(types: tuple[TensorType | None, ...]) -> TypeGuard[tuple[TensorType, ...]]:
    """True when all are known."""
    return None not in types
