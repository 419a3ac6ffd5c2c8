"""Pass `layout`: the image part of a net in NHWC or in blocks of channels, with a Reorder only where two orders meet.

Convolutions are what gains; the operators around them go along as far as they can, those that cannot are fed NCHW.
Who works in which order is a minimum cut: an edge is a tensor, its capacity the elements that a Reorder would copy, the
source is all that seeks the order and the sink all that must have NCHW (Ford and Fulkerson 1956). A tensor is reordered
once for all its readers. What cannot be in blocks, as its channels fill none, becomes NHWC in a second cut.

Ranks and numbers of channels decide, so a net with free sizes is served as well.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dagexec.compiler.passes.channel_padding import pad_channels
from dagexec.compiler.passes.draft import Draft, Rewritten
from dagexec.compiler.passes.image_operators import (
    ONE_NUMBER,
    Array,
    Image,
    Role,
    describe,
    may_seek_order,
)
from dagexec.compiler.passes.kernels import Operand, has_kernel
from dagexec.compiler.passes.operator_traits import min_outputs
from dagexec.compiler.passes.owned_parameters import successors
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.single_assignment import Value, Values, constants_of
from dagexec.compiler.passes.types import BlobType, infer_types
from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.maximum_flow import UNLIMITED, MaximumFlow
from dagexec.core.model import Model
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.ops.base.layout import BLOCKS, LAYOUTS, NCHW, NHWC, PADDED, image_shape
from dagexec.ops.engines.onednn.availability import widest_blocks
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec")

Vertex = tuple[str, int]
SOURCE: Vertex = ("source", 0)
SINK: Vertex = ("sink", 0)

_COMMON_SIZE = 28  # pixels a side of images whose sizes nobody knows


@dataclass(frozen=True)
class LayoutAssignment:
    """A model whose images are in other orders. `reorders` were put in; `operators` work in an order by number."""

    model: Model
    reorders: int
    operators: Mapping[str, int]

    def changes(self) -> tuple[str, ...]:
        """For reports."""
        counts = ", ".join(f"{count} in {order}" for order, count in sorted(self.operators.items()))
        return (f"operators: {counts}; reorders: {self.reorders}",) if self.operators else ()


def assign_layout(model: Model, order: str, types: Types | None = None) -> LayoutAssignment:
    """`model` with its images in `order`, NHWC or a blocked one, where that is possible and useful.

    Parameters must be in the model (no init net); `types` are those of its blobs, where they are known. Results are
    those of the model up to the rounding of other kernels.
    """
    assignment = _Assignment(without_unread_outputs(model), infer_types(model) if types is None else types)
    if order in BLOCKS:
        assignment.cut(order)
    assignment.cut(NHWC)
    return _Rewriting(assignment).result()


class _Assignment:
    """The order that each operator reads its images in, and the one it writes them in."""

    def __init__(self, model: Model, types: Types) -> None:
        self.model = model
        self.values = Values(model)
        self.roles = _roles(model, types)
        self._types = types
        self._constants = constants_of(model)
        self.reads: list[str] = [NCHW] * len(self.roles)
        self.writes: list[str] = [NCHW] * len(self.roles)

    def cut(self, order: str) -> None:
        """Put into `order` what seeks it, and what is cheaper there than in NCHW. What has an order keeps it."""
        network = _Network()
        free = [self._is_free(index, order) for index in range(len(self.roles))]
        for index, role in enumerate(self.roles):
            if not free[index] or role is None:
                continue
            if role.seeks:
                network.join(("writes", index), SOURCE)
            if role.reads_plain and order in BLOCKS:
                network.join(("reads", index), SINK)
            elif not role.reads_plain:
                network.join(("reads", index), ("writes", index))
        for value in self.values.all:
            self._add_value(network, value, free)
        chosen = network.minimum_cut()
        for index, role in enumerate(self.roles):
            if free[index] and role is not None:
                self.writes[index] = order if chosen(("writes", index)) else self.writes[index]
                self.reads[index] = order if chosen(("reads", index)) else self.reads[index]

    def _is_free(self, index: int, order: str) -> bool:
        role = self.roles[index]
        if role is None or self.writes[index] != NCHW or not role.serves(order):
            return False
        return order not in BLOCKS or self._has_kernel(index, role, order)

    def _has_kernel(self, index: int, role: Role, order: str) -> bool:
        """True when the library has code for an operator in `order`, for the shapes that the model tells or common."""
        definition = self.model.program.op[index]
        reads = NCHW if role.reads_plain else order
        changed, constants = definition_in(definition, role, self._constants, reads, order)
        operands: list[Operand] = []
        for position, name in enumerate(definition.input):
            if position in role.inputs:
                own = reads if position == 0 else order
                operands.append((self._image_type(name, role.inputs[position], own), False))
            elif name in self._constants:
                array = constants.get(position, self._constants[name])
                operands.append((TensorType(tuple(array.shape), from_numpy(array.dtype)), True))
            else:
                return True
        return has_kernel(changed, operands)

    def _image_type(self, name: str, image: Image, order: str) -> TensorType:
        known = self._types.get(name)
        if known is not None and known.rank == image.axes + 2 and known.shapes[0][1] == image.channels:
            batch, channels, *sizes = known.shapes[0]
            return TensorType(image_shape(order, batch, channels, sizes, name), known.meta)
        sizes = [_COMMON_SIZE] * image.axes
        return TensorType(image_shape(order, 1, image.channels, sizes, name), FLOAT32)

    def _add_value(self, network: _Network, value: Value, free: list[bool]) -> None:
        """Edges for one tensor: cut once where it is written in the order and any reader is not, or the other way."""
        image = self.image(value)
        if image is None:
            return
        writer = self._end(value.writer, "writes", free)
        if value.writer is not None and value.position not in _outputs(self.roles[value.writer]):
            writer = SINK
        readers = {self._reader(index, position, free) for index, position in value.readers}
        if value.is_output:
            readers.add(SINK)
        network.connect(writer, readers, image.channels)

    def _reader(self, index: int, position: int, free: list[bool]) -> Vertex:
        role = self.roles[index]
        if role is None or position not in role.inputs:
            return SINK
        # further images of a convolution are added to what it writes
        return self._end(index, "reads" if position == 0 or not role.seeks else "writes", free)

    def _end(self, index: int | None, side: str, free: list[bool]) -> Vertex:
        """The node of an operator's side; who has its order already, or can have no other, stands with the sink."""
        return (side, index) if index is not None and free[index] else SINK

    def image(self, value: Value) -> Image | None:
        """What is known of a tensor from who writes it and who reads it."""
        if value.writer is not None:
            role = self.roles[value.writer]
            if role is not None and value.position in role.outputs:
                return role.outputs[value.position]
        for index, position in value.readers:
            role = self.roles[index]
            if role is not None and position in role.inputs:
                return role.inputs[position]
        return None

    def read_order(self, index: int, position: int) -> str:
        """The order in which operator `index` wants its input `position`."""
        role = self.roles[index]
        if role is None or position not in role.inputs:
            return NCHW
        return self.reads[index] if position == 0 or not role.seeks else self.writes[index]

    def written_order(self, value: Value) -> str:
        """The order in which a tensor comes to be."""
        if value.writer is None or value.position not in _outputs(self.roles[value.writer]):
            return NCHW
        return self.writes[value.writer]


class _Network:
    """The network of a cut. Nodes that can only be on one side together are joined to one, by whatever name."""

    def __init__(self) -> None:
        self._joined: dict[Vertex, Vertex] = {}
        self._numbers: dict[Vertex, int] = {SOURCE: 0, SINK: 1}
        self._count = itertools.count(len(self._numbers))
        self._edges: list[tuple[int, int, int, int]] = []  # from, to, and the capacity there and back

    def join(self, node: Vertex, other: Vertex) -> None:
        """Let `node`, of which nothing is known yet, be where `other` is."""
        self._joined[node] = other

    def connect(self, writer: Vertex, readers: Iterable[Vertex], capacity: int) -> None:
        """Cutting `writer` off any of `readers` costs `capacity` once; so does cutting any of them off `writer`."""
        start = self._number(writer)
        ends = {self._number(reader) for reader in readers}
        if ends <= {start}:
            return
        if len(ends) == 1:
            self._edges.append((start, ends.pop(), capacity, capacity))
            return
        elsewhere, here = next(self._count), next(self._count)
        self._edges += [(start, elsewhere, capacity, 0), (here, start, capacity, 0)]
        for end in sorted(ends):
            self._edges += [(elsewhere, end, UNLIMITED, 0), (end, here, UNLIMITED, 0)]

    def minimum_cut(self) -> Callable[[Vertex], bool]:
        """Tells who is on the side of the source, where as many are as can be."""
        flow = MaximumFlow(next(self._count))
        for tail, head, there, back in self._edges:
            flow.connect(tail, head, there, back)
        flow.run(self._numbers[SOURCE], self._numbers[SINK])
        away = flow.sink_side(self._numbers[SINK])
        return lambda node: self._number(node) not in away

    def _number(self, node: Vertex) -> int:
        while node in self._joined:
            node = self._joined[node]
        known = self._numbers.get(node)
        if known is None:
            known = self._numbers[node] = next(self._count)
        return known


def _outputs(role: Role | None) -> Mapping[int, Image]:
    return {} if role is None else role.outputs


def _roles(model: Model, types: Types) -> list[Role | None]:
    """The role of every operator; what is known of images continues from each to those that read its outputs."""
    constants = constants_of(model)
    images = {name: _image_by_type(types.get(name)) for name in model.inputs}
    roles: list[Role | None] = []
    for definition in model.program.op:
        role = describe(definition, images, constants, types)
        if role is not None and any(definition.input[position] in constants for position in role.inputs):
            role = None  # a constant comes in the order it has: only values of the net are turned
        roles.append(role)
        for position, name in enumerate(definition.output):
            images[name] = _outputs(role).get(position) or _image_by_type(types.get(name))
    return roles


def _image_by_type(kind: BlobType | None) -> Image | None:
    """What a tensor is that no image operator writes: an image, if its rank and second axis are those of one."""
    if kind is None:
        return None
    if kind.rank <= 1:
        return ONE_NUMBER if all(shape in ((), (1,)) for shape in kind.shapes) else None
    channels = {shape[1] for shape in kind.shapes}
    return Image(kind.rank - 2, channels.pop()) if 3 <= kind.rank <= 5 and len(channels) == 1 else None


class _Rewriting:
    """The net of an assignment."""

    def __init__(self, assignment: _Assignment) -> None:
        self._assignment = assignment
        self._model = assignment.model
        self._values = assignment.values
        self._operators: list[Node] = []
        self._parameters = dict(self._model.parameters)
        self._names = {*self._values.names, *self._parameters}
        self._constants: dict[tuple[str, str, tuple[int, ...]], str] = {}
        self._places: dict[tuple[int, str], str] = {}  # of a value in an order, the blob
        self._reorders = 0
        self._mixed = self._names_in_several_orders()

    def result(self) -> LayoutAssignment:
        """The layout."""
        counts: dict[str, int] = {}
        for index, definition in enumerate(self._model.program.op):
            self._add(index, definition)
            order = self._assignment.writes[index]
            if order != NCHW:
                counts[order] = counts.get(order, 0) + 1
        read = {name for definition in self._operators for name in (*definition.input, *definition.control_input)}
        replaced = {name for name, _, _ in self._constants}
        kept = read | set(self._model.outputs)
        parameters = {name: array for name, array in self._parameters.items() if name in kept or name not in replaced}
        model = self._model.changed(net=self._model.program.with_operators(self._operators), parameters=parameters)
        return LayoutAssignment(model, self._reorders, counts)

    def _names_in_several_orders(self) -> frozenset[str]:
        """Blobs that an image in another order than NCHW must not be called: somebody needs that name in NCHW."""
        orders: dict[str, set[str]] = {}
        for value in self._values.all:
            orders.setdefault(value.name, set()).add(self._assignment.written_order(value))
        outputs = {*self._model.outputs, *self._model.program.external_output}
        return frozenset(name for name, found in orders.items() if len(found) > 1 or name in outputs)

    def _add(self, index: int, definition: Node) -> None:
        role, order = self._assignment.roles[index], self._assignment.writes[index]
        inputs = [
            name if value is None else self._in_order(value, self._assignment.read_order(index, position))
            for position, (name, value) in enumerate(zip(definition.input, self._values.read[index], strict=True))
        ]
        changed = definition
        if role is not None and order != NCHW:
            changed = self._in_order_of(definition, inputs, role, index)
        outputs = [
            self._place(value, self._assignment.written_order(value), definition, inputs)
            for value in self._values.written_by[index]
        ]
        self._operators.append(changed.changed(inputs=inputs, outputs=outputs))
        for value in self._values.written_by[index]:
            if value.is_output and (place := self._in_order(value, NCHW)) != value.name:
                # written in place, where others read it
                self._operators.append(Node("Copy", [place], [value.name]))

    def _in_order_of(self, definition: Node, inputs: list[str], role: Role, index: int) -> Node:
        """An operator that writes an order; constants among its `inputs` are replaced."""
        order, reads = self._assignment.writes[index], self._assignment.reads[index]
        changed, constants = definition_in(definition, role, self._parameters, reads, order)
        for position, array in constants.items():
            inputs[position] = self._constant(inputs[position], array, order)
        return changed

    def _constant(self, name: str, array: Array, order: str) -> str:
        """The name of a parameter that has been changed to `array`, one of its kind for all operators."""
        key = (name, order, array.shape)
        if key not in self._constants:
            self._constants[key] = self._new_name(f"{name}/{order}")
            self._parameters[self._constants[key]] = array
            array.flags.writeable = False
        return self._constants[key]

    def _place(self, value: Value, order: str, definition: Node, inputs: Sequence[str]) -> str:
        """The blob that an operator writes a value to; in place where it was in place."""
        if value.name in definition.input:
            place = inputs[definition.input.index(value.name)]
        elif order == NCHW or value.name not in self._mixed:
            place = value.name
        else:
            place = self._new_name(f"{value.name}/{order}")
        self._places[value.number, order] = place
        return place

    def _in_order(self, value: Value, order: str) -> str:
        """The blob that holds a value in `order`, which a Reorder makes if need be."""
        written = self._assignment.written_order(value)
        self._places.setdefault((value.number, written), value.name)
        place = self._places.get((value.number, order))
        if place is None:
            source = self._places[value.number, written]
            final = order == NCHW and value.is_output
            place = value.name if final else self._new_name(f"{value.name}/{order}")
            reorder = new_node("Reorder", [source], [place], from_order=written, to_order=order)
            self._operators.append(reorder.changed(name=f"{value.name} to {order}", engine="ONEDNN"))
            self._reorders += 1
            self._places[value.number, order] = place
        return place

    def _new_name(self, wanted: str) -> str:
        """`wanted`, or with a number where that is taken."""
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted}.{number}"
        self._names.add(name)
        return name


_FILTER = 1  # the input that is in the order that is read; operands of post-ops are in the one that is written


def definition_in(
    definition: Node, role: Role, parameters: Mapping[str, Array], reads: str, writes: str
) -> tuple[Node, dict[int, Array]]:
    """`definition` as it reads images in one order and writes them in another; and its constants that change."""
    op_type, arguments = definition.type, dict(role.arguments(writes))
    if reads != writes:
        arguments |= {"order": reads, "output_order": writes}
        if definition.type != "FusedConv":
            arguments["bias"] = int(len(definition.input) > 2)
            op_type = "FusedConv"
    changed = definition.changed(op_type=op_type, arguments=arguments)
    constants: dict[int, Array] = {}
    for position, change in role.constants.items():
        array = parameters[definition.input[position]]
        if (other := change(array, reads if position <= _FILTER else writes)) is not array:
            constants[position] = other
    return changed, constants


def without_unread_outputs(model: Model) -> Model:
    """`model` with operators that leave out the optional outputs at their end which nothing reads."""
    program = model.program
    used = {*model.outputs, *program.external_output}
    for definition in program.op:
        used.update((*definition.input, *definition.control_input))
    operators = [_without_unread(definition, used) for definition in program.op]
    return model.changed(net=program.with_operators(operators))


def _without_unread(definition: Node, used: Collection[str]) -> Node:
    count = len(definition.output)
    while count > min_outputs(definition) and definition.output[count - 1] not in used:
        count -= 1
    return definition if count == len(definition.output) else definition.changed(outputs=definition.output[:count])


def orders_of(definitions: Iterable[Node]) -> frozenset[str]:
    """The orders other than NCHW that operators work in."""
    names = ("order", "output_order", "to_order")
    found = {one.arguments().string(name, "") for one in definitions for name in names}
    return frozenset(found & {NHWC, *BLOCKS})


def layout_pass(layout: str | Callable[[Model], str]) -> Pass:
    """The pass for one of `ops.base.layout.LAYOUTS`, or for that which a function chooses for the model as it is then.

    See `layouts` for what to try.
    """

    def edit(draft: Draft) -> None:
        name = layout if isinstance(layout, str) else layout(draft.model)
        if name != NCHW:
            found = laid_out(draft.model, name, draft.types())
            draft.become(found.model, found.changes)

    return Pass("layout", _DOC, edit, needs=(may_seek_order,), retypes=True)


def laid_out(model: Model, name: str, types: Types | None = None) -> Rewritten:
    """`model`, of whose blobs `types` are known, in the layout called `name`, one of LAYOUTS; as it is in NCHW."""
    if name == NCHW or not any(may_seek_order(schema_of(one.type)) for one in model.program.op):
        return Rewritten(model)
    order = PADDED.get(name, name)
    source = pad_channels(model, BLOCKS[order]) if name in PADDED else model
    layout = assign_layout(source, order, types if source is model else None)
    if order in BLOCKS and order not in layout.operators:
        if order != widest_blocks():
            known = ", ".join(layouts())
            logger.warning("layout %s: oneDNN has no code for it here, NHWC is taken; layouts here: %s", name, known)
        source, layout = model, assign_layout(model, NHWC, types)
    if not layout.operators:
        return Rewritten(model)
    padded = (f"channels padded to blocks of {BLOCKS[order]}",) if source is not model else ()
    parameters = successors(model.parameters, dict(layout.model.parameters))
    return Rewritten(layout.model.changed(parameters=parameters), (*padded, *layout.changes()))


_DOC = "images in NHWC or in blocks where oneDNN computes, with a Reorder only where two orders meet"


def layouts() -> tuple[str, ...]:
    """The layouts that may be the fastest on this processor, NHWC first: plain ones, and blocks with kernels.

    Those are of 16 channels with AVX-512 and of 8 with older instructions; see `widest_blocks`.
    """
    order = widest_blocks()
    blocked = () if order is None else (order, *(name for name, padded in PADDED.items() if padded == order))
    return (NHWC, *blocked, NCHW)


LAYOUT = layout_pass(LAYOUTS[0])
