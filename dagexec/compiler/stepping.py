"""The net of one step of a decoder: its caches stay where they are, and its length is a number that a run reads.

It is made of a compiled net for one size of its inputs and for so many positions that there is room for. A blob *grows*
where an axis of it is as long as the cache: it gets the size for a full cache, and what lies behind the positions that
there are is never read. Sizes that the net asks for with `Shape` are sums of a number and a multiple of the length;
operators that would make tensors of such sizes make them full. A Concat of past and new keys, one of values, and the
FusedAttention that reads both become `CachedAttention`, and so does ONNX's Attention (`attention_with_past`).

Where growing blobs may go, and where the axis is then, `growing_axes.py` says; a net in which they go elsewhere has no
such net.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from dagexec.compiler.attention_with_past import AttentionWithPast, NotCachedError
from dagexec.compiler.growing_axes import Known, NotSteppingError, axis_after, types_after
from dagexec.compiler.length_contents import MOST_ELEMENTS, Array, Domain, Sum, constant, contents_after
from dagexec.core.arguments import shared
from dagexec.core.dtypes import FLOAT32, INT64, from_numpy
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.row_axes import rule_of
from dagexec.core.rows import elementwise, keeps_axes
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.families.attention.attention import ATTENTION
from dagexec.ops.families.attention.cached import CACHED_ATTENTION
from dagexec.ops.families.attention.fused import FUSED_ATTENTION
from dagexec.ops.families.attention.opening import CLOSE_CACHES, OPEN_CACHES
from dagexec.platform.records import dataclass

CACHE, LENGTH = "session/cache", "session/length"
"""Inputs of the net: the number of the caches, and how many positions they hold."""

OPENED = "session/opened"
"""The latter, once all layers have found the caches."""


@dataclass(frozen=True)
class Layer:
    """What an attention keeps: inputs of the model, whose axes are in this order batch, heads, positions, elements."""

    keys: str
    values: str
    key_axes: tuple[int, ...]
    value_axes: tuple[int, ...]


@dataclass(frozen=True)
class Stepping:
    """A net of one step.

    Attributes:
        model: it; without the states that are caches among inputs and outputs.
        layers: what its caches hold.
        growing: of inputs, the axis that is as long as the cache, and by how much it is longer.
    """

    model: Model
    layers: Sequence[Layer]
    growing: Mapping[str, tuple[int, int]]

    def computes_as(self, other: Stepping) -> bool:
        """Whether it is the same net, found for inputs of other sizes, such as an encoder's results."""
        own, others = self.model.parameters, other.model.parameters
        return (
            (self.layers, self.growing) == (other.layers, other.growing)
            and list(map(_description, self.model.program.op)) == list(map(_description, other.model.program.op))
            and own.keys() == others.keys()
            and all(array is others[name] or np.array_equal(array, others[name]) for name, array in own.items())
        )


def _description(node: Node) -> Hashable:
    return node.type, tuple(node.input), tuple(node.output), node.values, node.engine, node.name, node.device


def stepping_net(
    model: Model,
    states: Mapping[str, str],
    types: Mapping[str, TensorType],
    growing: Mapping[str, tuple[int, int]],
    length: int,
) -> Stepping:
    """The net of a step in which the cache comes to hold up to `length` positions and those that are added.

    `states` says which output becomes each input that is a cache; `types` are those of the inputs with `length`
    positions in it, `growing` the axes that are as long. Raises NotSteppingError.
    """
    return _Stepping(model, states, types, growing, length).made()


class _Stepping:
    """A net of a step in the making."""

    def __init__(
        self,
        model: Model,
        states: Mapping[str, str],
        types: Mapping[str, TensorType],
        growing: Mapping[str, tuple[int, int]],
        length: int,
    ) -> None:
        self._model, self._states, self._length = model, states, length
        self._growing = growing
        self._known: dict[str, Known] = {}
        for name, array in model.parameters.items():
            kind = TensorType(tuple(array.shape), from_numpy(array.dtype))
            few = array.size <= (MOST_ELEMENTS if array.dtype.kind in "iub" else 1)
            content = constant(np.asarray(array)) if few else None
            self._known[name] = Known(kind, content=content)
        for name, kind in types.items():
            self._known[name] = Known(kind, growing.get(name), varies=name in growing)
        self._known[LENGTH] = Known(
            TensorType((1,), INT64), content=Sum(np.zeros(1, np.int64), np.ones(1, np.int64)), varies=True
        )
        for name in (CACHE, OPENED):
            self._known[name] = Known(TensorType((1,), INT64), varies=True)
        self._nodes: list[Node] = []
        self._constants: dict[str, Array] = {}
        self._layers: list[Layer] = []
        self._numbers = itertools.count()
        self._unwritten: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._windows: dict[object, str] = {}

    def made(self) -> Stepping:
        """It. Raises NotSteppingError."""
        model = self._model
        for node in model.program.op:
            self._follow(node)
        left = set(self._states) - {name for layer in self._layers for name in (layer.keys, layer.values)}
        if left or not self._layers:
            raise NotSteppingError(f"no attention reads the cache {sorted(left)}")
        outputs = tuple(name for name in model.outputs if name not in self._states.values())
        for name in outputs:
            if name in self._unwritten:
                raise NotSteppingError(f"output {name!r} follows from the length alone")
            if self._known[name].grows or self._known[name].cached:
                raise NotSteppingError(f"output {name!r} grows")
        inputs = {name: info for name, info in model.inputs.items() if name not in self._states}
        number = InputInfo(INT64, (1,))
        attended = [node.output[0] for node in self._nodes if node.type == CACHED_ATTENTION]
        opening = new_node(OPEN_CACHES, [CACHE, LENGTH], [OPENED])
        nodes = opening, *self._nodes, new_node(CLOSE_CACHES, [OPENED, *attended])
        program = type(model.program)(nodes, model.program.header)
        parameters = {**model.parameters, **self._constants}
        made = model.changed(
            net=program, outputs=outputs, parameters=parameters, inputs={**inputs, CACHE: number, LENGTH: number}
        )
        return Stepping(made, tuple(self._layers), {k: v for k, v in self._growing.items() if k not in self._states})

    def _follow(self, node: Node) -> None:
        """Put an operator, or what does its work, into the net, and find out what is known of its outputs."""
        for name in node.input:
            if name not in self._known:
                raise NotSteppingError(f"{node.type}: nothing is known of {name!r}")
        inputs = [self._known[name] for name in node.input]
        if node.type in ("Shape", "Size") and inputs[0].grows:
            self._measure(node, inputs[0])
        elif node.type == ATTENTION and not self._states.keys().isdisjoint(node.input):
            self._attend_and_append(node, inputs)
        elif any(one.cached for one in inputs):
            self._attend(node, inputs)
        elif node.type == "Concat" and node.input[0] in self._states and inputs[0].grows:
            self._append(node, inputs)
        elif node.type == "Range" and any(one.varies for one in inputs):
            self._count(node, inputs)
        elif self._is_sized_by_length(node, inputs):
            self._fill(node, inputs)
        else:
            self._keep(node, inputs)

    def _is_sized_by_length(self, node: Node, inputs: Sequence[Known]) -> bool:
        read = schema_of(node.type).values_read(node)
        return any(inputs[index].varies for index in read if index < len(inputs))

    def _keep(self, node: Node, inputs: Sequence[Known]) -> None:
        """An operator that stays as it is."""
        schema = schema_of(node.type)
        types = self._types(node, [one.type for one in inputs], [one.content for one in inputs])
        grows = axis_after(node, inputs, types) if any(one.grows for one in inputs) else None
        contents = contents_after(node, [(one.type, one.content) for one in inputs], types)
        is_followed = not schema.effects and None not in contents
        domain = None
        if not is_followed:
            self._put(node)
            if rule_of(schema) in (elementwise, keeps_axes) and len(types) == 1:
                domain = self._domain(node, inputs)
        varies = any(one.varies for one in inputs)
        for name, kind, content in zip(node.output, types, contents, strict=True):
            varies_still = varies and (content is None or not content.is_constant)
            self._learn(name, Known(kind, grows, content, varies_still, domain=domain))
            if is_followed:
                self._unwritten.add(name)

    def _put(self, node: Node) -> None:
        """Have an operator in the net, which reads what has to be there for it."""
        for name in node.input:
            if name in self._unwritten:
                self._write(name)
        names = [self._aliases.get(name, name) for name in node.input]
        if names != list(node.input):
            node = Node(node.type, names, node.output, node.values, name=node.name, engine=node.engine)
        self._nodes.append(node)

    def _learn(self, name: str, known: Known) -> None:
        """A blob is written."""
        self._known[name] = known
        self._unwritten.discard(name)
        self._aliases.pop(name, None)

    def _types(self, node: Node, types: Sequence[TensorType], contents: Sequence[Sum | None]) -> Sequence[TensorType]:
        read = schema_of(node.type).values_read(node)
        values = [
            None if index not in read or content is None else content.at(self._length)
            for index, content in enumerate(contents)
        ]
        return types_after(node, types, values)

    def _domain(self, node: Node, inputs: Sequence[Known]) -> Domain | None:
        """What the elements may be that an element-wise operator makes."""
        given: list[Domain | Array] = []
        for one in inputs:
            content, domain = one.content, one.domain
            if content is not None and not content.is_constant:
                domain = Domain.all(content, self._length)
            elif content is not None and content.base.size and (content.base == content.base.flat[0]).all():
                given.append(content.base)
                continue
            if domain is None:
                return None
            given.append(domain)
        return Domain.after(node, given)

    def _constant(self, array: Array, name: str = "") -> str:
        """A parameter of the net."""
        name = name or f"session/{next(self._numbers)}"
        self._constants[name] = array
        kind = TensorType(tuple(array.shape), from_numpy(array.dtype))
        self._known[name] = Known(kind, content=constant(array))
        return name

    def _write(self, name: str) -> None:
        """Have a blob in the net whose elements follow from the length."""
        self._unwritten.discard(name)
        content = self._known[name].content
        assert content is not None
        if content.is_constant:
            self._aliases[name] = self._constant(content.base)
            return
        product, length = f"session/{next(self._numbers)}", LENGTH
        if not content.base.ndim:
            length = f"session/{next(self._numbers)}"
            self._nodes.append(new_node("Squeeze", [LENGTH], [length], dims=[0]))
        self._nodes.append(new_node("Mul", [self._constant(content.slope), length], [product]))
        self._nodes.append(new_node("Add", [product, self._constant(content.base)], [name]))

    def _follows(self, name: str, content: Sum, grows: tuple[int, int] | None = None) -> None:
        """A blob whose elements follow from the length."""
        kind = TensorType(tuple(content.base.shape), INT64)
        self._learn(name, Known(kind, grows, content, not content.is_constant or grows is not None))
        self._unwritten.add(name)

    def _measure(self, node: Node, source: Known) -> None:
        """Shape and Size, of what grows."""
        assert source.grows is not None
        schema, (axis, more) = schema_of(node.type), source.grows
        assert schema.from_types is not None
        arrays = []
        for size in (self._length + more, self._length + more + 1):
            shape = list(source.type.shape)
            shape[axis] = size
            kind = TensorType(tuple(shape), source.type.meta)
            call = OperatorCall(node, node.arguments(node.type), (kind,), (None,), node.type)
            arrays.append(np.asarray(schema.from_types(call)[0]))
        slope = arrays[1] - arrays[0]
        self._follows(node.output[0], Sum(arrays[0] - slope * self._length, slope))

    def _count(self, node: Node, inputs: Sequence[Known]) -> None:
        """Range: as many numbers as with a full cache, from where it begins."""
        contents = [one.content for one in inputs]
        if len(contents) != 3 or any(one is None for one in contents):
            raise NotSteppingError("Range begins or ends with what only a run knows")
        start, limit, delta = (one for one in contents if one is not None)
        if not delta.is_constant or delta.base != 1 or start.base.size != 1:
            raise NotSteppingError("Range has steps that vary")
        more, slope = int(limit.base - start.base), int(limit.slope - start.slope)
        if slope not in (0, 1):
            raise NotSteppingError(f"Range has {slope} numbers a position")
        count = more + slope * self._length
        zeros = np.zeros(count, np.int64)
        content = Sum(np.arange(count) + int(start.base), zeros + int(start.slope))
        self._follows(node.output[0], content, (0, more) if slope else None)

    def _fill(self, node: Node, inputs: Sequence[Known]) -> None:
        """Operators that are told the shape of what they make: they make it full."""
        schema = schema_of(node.type)
        read = [index for index in schema.values_read(node) if inputs[index].varies]
        sums = {index: inputs[index].content for index in read}
        data = [one for index, one in enumerate(inputs) if index not in read and one.grows]
        if node.type not in ("Expand", "Reshape", "ConstantFill", "ConstantOfShape") or None in sums.values():
            raise NotSteppingError(f"{node.type} makes what is as large as only a run knows")
        types = {
            length: self._types(
                node,
                [self._shaped(one, length) for one in inputs],
                [None if one is None else constant(one.at(length)) for one in (i.content for i in inputs)],
            )[0]
            for length in (self._length, self._length + 1)
        }
        full, longer = types[self._length], types[self._length + 1]
        axes = [axis for axis, sizes in enumerate(zip(full.shape, longer.shape, strict=True)) if sizes[0] != sizes[1]]
        if len(axes) > 1 or (axes and longer.shape[axes[0]] - full.shape[axes[0]] != 1):
            raise NotSteppingError(f"{node.type} makes what grows along {len(axes)} axes")
        grows = (axes[0], full.shape[axes[0]] - self._length) if axes else None
        if node.type == "Reshape" and data:
            (axis, _), *_ = (one.grows for one in data if one.grows is not None)
            before = data[0].type.shape[:axis], full.shape[: axes[0]] if axes else ()
            if not axes or math.prod(before[0]) != math.prod(before[1]):
                raise NotSteppingError("Reshape mixes an axis that grows with others")
        elif data and (grows is None or any(one.axis_of(len(full.shape)) != grows for one in data)):
            raise NotSteppingError(f"{node.type} joins axes of several lengths")
        names = list(node.input)
        for index, content in sums.items():
            assert content is not None
            names[index] = self._constant(content.at(self._length))
        made = Node(node.type, names, node.output, node.values, name=node.name, engine=node.engine)
        known = [self._known[name] for name in names]
        (content,) = contents_after(made, [(one.type, one.content) for one in known], [full])
        if content is not None:
            self._learn(node.output[0], Known(full, grows, content, not content.is_constant))
            self._unwritten.add(node.output[0])
        else:
            self._put(made)
            self._learn(node.output[0], Known(full, grows, varies=any(one.varies for one in inputs)))

    def _shaped(self, one: Known, length: int) -> TensorType:
        if one.grows is None:
            return one.type
        axis, more = one.grows
        return TensorType((*one.type.shape[:axis], length + more, *one.type.shape[axis + 1 :]), one.type.meta)

    def _append(self, node: Node, inputs: Sequence[Known]) -> None:
        """A Concat of past and new positions: nothing happens before attention reads it."""
        state, (axis, more) = node.input[0], inputs[0].grows or (0, 0)
        rank = len(inputs[0].type.shape)
        joined = node.arguments(node.type).int("axis", 1) % rank
        if len(inputs) != 2 or joined != axis or more or inputs[1].grows or inputs[0].type.meta is not FLOAT32:
            raise NotSteppingError(f"Concat puts more than new positions behind {state!r}")
        if self._states[state] != node.output[0]:
            raise NotSteppingError(f"state {state!r} becomes {self._states[state]!r}, not what is put behind it")
        (kind,) = types_after(node, [one.type for one in inputs])
        cached = state, node.input[1], inputs[1].type.shape
        self._learn(node.output[0], Known(kind, (axis, inputs[1].type.shape[axis]), None, True, cached))

    def _attend(self, node: Node, inputs: Sequence[Known]) -> None:
        """FusedAttention over caches."""
        operands = inputs[1:3]
        if node.type != FUSED_ATTENTION or not all(one.cached for one in operands):
            raise NotSteppingError(f"{node.type} reads a cache")
        arguments = node.arguments(node.type)
        keys, values = (one.cached for one in operands if one.cached)
        axes = [tuple(arguments.ints(name)) or (0, 1, 2, 3) for name in ("k_axes", "v_axes")]
        for order, one in zip(axes, operands, strict=True):
            if one.grows is None or order[2] != one.grows[0]:
                raise NotSteppingError("positions of a cache are not those of attention")
        added = operands[0].grows[1] if operands[0].grows else 0
        self._require_columns(inputs[3:], added)
        names = [node.input[0], keys[1], values[1], CACHE, OPENED, *node.input[3:]]
        values_of_node = shared({**node.values, "keys": keys[0].encode(), "values": values[0].encode()})
        made = Node(CACHED_ATTENTION, names, node.output, values_of_node, name=node.name, engine=node.engine)
        self._keep_layer(Layer(keys[0], values[0], axes[0], axes[1]))
        self._put_varying(made)

    def _require_columns(self, masks: Sequence[Known], added: int) -> None:
        for one in masks:
            if one.axis_of(4) != (3, added):
                raise NotSteppingError("a mask has not one column for each position")

    def _keep_layer(self, layer: Layer) -> None:
        """What an attention reads and puts positions behind, which no other does."""
        if not {layer.keys, layer.values}.isdisjoint(name for one in self._layers for name in (one.keys, one.values)):
            raise NotSteppingError(f"attention reads cache {layer.keys!r}, as another does")
        self._layers.append(layer)

    def _put_varying(self, node: Node) -> None:
        """Have an operator in the net whose result depends on the length."""
        (kind,) = types_after(node, [self._known[name].type for name in node.input])
        self._put(node)
        self._learn(node.output[0], Known(kind, varies=True))

    def _attend_and_append(self, node: Node, inputs: Sequence[Known]) -> None:
        """ONNX's Attention, which is given the past."""
        types = tuple(one.type for one in inputs)
        call = OperatorCall(node, node.arguments(node.type), types, (None,) * len(types), node.type)
        try:
            attention = AttentionWithPast(call)
        except NotCachedError as error:
            raise NotSteppingError(str(error)) from None
        sizes, states = attention.sizes, attention.states
        added = sizes.keys - sizes.past
        _, *present = types_after(node, types)
        for state, output, kind in zip(states, attention.present, present, strict=True):
            known = self._known[state]
            if known.grows != (2, 0) or self._states.get(state) != output:
                raise NotSteppingError(f"state {state!r} does not become what is put behind it")
            self._learn(output, Known(kind, (2, added), None, True, (state, output, ())))
        self._require_columns([] if sizes.mask is None else [inputs[sizes.mask]], added)
        self._keep_layer(Layer(states[0], states[1], (0, 1, 2, 3), (0, 1, 2, 3)))
        constants: dict[str, Array] = {}
        for made in attention.nodes((CACHE, OPENED), LENGTH, constants, self._windows):
            for name in constants.keys() - self._constants.keys():
                self._constant(constants[name], name)
            self._put_varying(made)
