"""attention: the products, masks and softmax that attention is spelled with become one operator.

Softmax(scale Q K^T, masked, + bias) V, of Vaswani et al. 2017, arXiv:1706.03762, as exporters write it: factors on Q,
K or the product; a cap by the hyperbolic tangent; a mask that is added or chooses (Where); weights that are no numbers
replaced by zero; heads split off and put together by Reshape and Transpose, keys and values repeated for groups of
heads by Expand. Where the heads come from is not matched by operators but by what happens to the axes (`axes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

from dagexec.compiler.passes.axes import Axis, rearranged, rearranges, source_axes, without_repeats
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import DagexecError
from dagexec.ops.families.activation.post_ops import as_post_ops
from dagexec.ops.families.attention.fused import FUSED_ATTENTION
from dagexec.platform.records import dataclass

_PRODUCT, _SOFTMAX = "BatchMatMul", "Softmax"
_MAX_STEPS = 12  # operators from a product back to where an operand comes from
_RANK = 4
_HEADS = 1


@dataclass
class _Scores:
    """What is between the product of queries and keys and the softmax.

    Attributes:
        product: number of the operator.
        scale: of the product.
        softcap: c, where scores become c tanh(scores / c) before mask and biases; 0 where they do not.
        mask: a blob of truth values, where `shown` keeps a score and others become `hidden`; '' for none.
        biases: blobs that are added.
        members: the operators, without the product.
    """

    product: int = -1
    scale: float = 1.0
    softcap: float = 0.0
    mask: str = ""
    shown: bool = True
    hidden: float = -math.inf
    biases: list[str] = field(default_factory=list)
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Operand:
    """A blob of four axes, and which of them are batch, heads, positions and elements; a factor."""

    name: str
    axes: tuple[int, ...]
    scale: float


def edit(draft: Draft) -> None:
    """Look around each softmax."""
    types, sums = draft.types(), dict[tuple[str, str], str]()
    for number in draft.having(_is_softmax):
        if draft.is_free(number):
            _Candidate(draft, types, number, sums).rewrite()


class _Candidate:
    """What is around one softmax.

    Probes that the model refuses are left out: what is known of blobs in those is not what it would make of them.
    """

    def __init__(self, draft: Draft, types: Types, softmax: int, sums: dict[tuple[str, str], str]) -> None:
        """`sums` are those of biases that are there already, by their operands."""
        self._draft = draft
        self._sums = sums
        self._types = types
        self._softmax = softmax
        self._probes: list[int] = []

    def rewrite(self) -> None:
        """Put one operator in the place of all, if it is attention."""
        draft = self._draft
        weights = self._weights()
        if weights is None:
            return
        last, behind = weights
        self._probes = self._accepted(last)
        scores = self._scores() if self._probes else None
        if scores is None or any(draft.arguments(last).bool(name) for name in ("trans_a", "trans_b")):
            return
        operands = self._operands(scores.product, last)
        if operands is None:
            return
        merge = self._merge(last)
        end = last if merge is None else merge
        inputs, arguments = self._call(operands, scores)
        sums, bias = self._sum(scores.biases)
        if bias:
            inputs.append(bias)
            arguments["bias"] = 1
        arguments["nan_to_zero"] = int(len(behind) > 0)
        if merge is not None:
            arguments["y_axes"] = draft.arguments(merge).ints("axes")
        members = {scores.product, last, self._softmax, *scores.members, *behind, end}
        read = [name for number in members for name in draft[number].input]
        draft.changed(f"{len(members)} operators up to {draft.label(end)} are attention")
        attention = new_node(FUSED_ATTENTION, inputs, list(draft[end].output), name=draft[end].name, arg=arguments)
        draft.replace(end, *sums, attention)
        for number in members - {end}:
            draft.remove(number)
        _remove_unread(draft, read)

    def _sum(self, biases: Sequence[str]) -> tuple[list[Node], str]:
        """The sum of biases, and the operators that compute it where no earlier attention has it."""
        made, total = list[Node](), ""
        for name in reversed(biases):  # in the order of the model
            key = total, name
            if total and key not in self._sums:
                self._sums[key] = self._draft.fresh(f"{total}/sum")
                made.append(new_node("Add", [total, name], [self._sums[key]]))
            total = self._sums[key] if total else name
        return made, total

    @staticmethod
    def _call(operands: Sequence[_Operand], scores: _Scores) -> tuple[list[str], dict[str, ArgumentValue]]:
        """Inputs and arguments of the operator."""
        inputs = [one.name for one in operands]
        arguments: dict[str, ArgumentValue] = {"scale": scores.scale * math.prod(one.scale for one in operands)}
        if scores.softcap:
            arguments["softcap"] = scores.softcap
        for name, operand in zip(("q_axes", "k_axes", "v_axes"), operands, strict=True):
            arguments[name] = list(operand.axes)
        if scores.mask:
            inputs.append(scores.mask)
            arguments |= {"mask": 1, "shown": int(scores.shown)}
            if math.isfinite(scores.hidden):
                arguments["hidden"] = scores.hidden
        return inputs, arguments

    def _shapes(self, name: str) -> list[tuple[int, ...]]:
        """The shapes of a blob in the probes that count."""
        return [self._types[name].shapes[probe] for probe in self._probes]

    def _accepted(self, last: int) -> list[int]:
        """The probes that neither product refuses, nor what is in between; none for other types than are computed."""
        kind = self._types.get(self._draft[last].output[0])
        if kind is None or kind.rank != _RANK or kind.meta not in (FLOAT32, FLOAT64):
            return []
        asked = [last, *_up_to_product(self._draft, self._draft[self._softmax].input[0])]
        probes = [probe for probe in range(len(kind.shapes)) if all(self._accepts(number, probe) for number in asked)]
        return [probe for probe in probes if self._has_usual_heads(asked, probe)]

    def _has_usual_heads(self, asked: Sequence[int], probe: int) -> bool:
        """False where a product has other heads than in the first probe, made by sizes that do not fit each other."""
        operands = [
            name for number in asked if self._draft[number].type == _PRODUCT for name in self._draft[number].input
        ]
        shapes = [self._types[name].shapes for name in operands]
        return all(one[probe][_HEADS] == one[0][_HEADS] for one in shapes if len(one[0]) == _RANK)

    def _accepts(self, number: int, probe: int) -> bool:
        """True when operator `number` takes its inputs as they are in a probe."""
        definition, label = self._draft[number], self._draft.label(number)
        kinds = [self._types.get(name) for name in definition.input]
        inputs = tuple(TensorType(kind.shapes[probe], kind.meta) for kind in kinds if kind is not None)
        if len(inputs) != len(kinds):
            return False
        infer = schema_of(definition.type).infer
        if infer is None:
            return False
        try:
            infer(OperatorCall(definition, self._draft.arguments(number), inputs, (None,) * len(inputs), label))
        except DagexecError:
            return False
        return True

    def _is_like(self, name: str, other: str) -> bool:
        """True for blobs of one type."""
        types = self._types
        if name not in types or other not in types or types[name].meta is not types[other].meta:
            return False
        return self._shapes(name) == self._shapes(other)

    def _is_spread(self, name: str, other: str) -> bool:
        """True for scores that are of the type of `other`, but that these of one example may be for a batch there."""
        types = self._types
        if name not in types or other not in types or types[name].meta is not types[other].meta:
            return False
        pairs = zip(self._shapes(name), self._shapes(other), strict=True)
        return all(own[1:] == wide[1:] and own[:1] in (wide[:1], (1,)) for own, wide in pairs)

    def _broadcasts(self, name: str, other: str) -> bool:
        """True for a blob that stretches to the type of `other`."""
        if name not in self._types:
            return False
        pairs = zip(self._shapes(name), self._shapes(other), strict=True)
        return all(
            len(own) <= len(wide) and all(a in (1, b) for a, b in zip(own[::-1], wide[::-1], strict=False))
            for own, wide in pairs
        )

    def _scores(self) -> _Scores | None:
        """From the softmax, along the last axis, back to the product."""
        draft, name = self._draft, self._draft[self._softmax].input[0]
        if draft.arguments(self._softmax).int("axis", 1) not in (-1, _RANK - 1):
            return None
        found, weights = _Scores(), draft[self._softmax].output[0]
        while True:
            number = draft.producer(name)
            if number is None or not self._is_spread(name, weights) or draft.only_reader(name) is None:
                return None
            if draft[number].type == _PRODUCT:
                found.product = number
                return found
            before = self._before(number, found)
            if before is None:
                return None
            found.members.append(number)
            name = before

    def _before(self, number: int, found: _Scores) -> str | None:
        """The scores that an operator scales, masks or adds to, which is noted; None when it does something else."""
        draft, definition = self._draft, self._draft[number]
        scaled = _scaled(draft, number)
        if scaled is not None:
            found.scale *= scaled[1]
            return scaled[0]
        if definition.type == "Tanh" and not found.softcap and 0 < found.scale < math.inf:
            found.softcap = found.scale  # a tanh(b s) is c tanh(scale s / c) for c = a and scale = a b
            return definition.input[0]
        result = definition.output[0]
        own = [name for name in definition.input if self._is_spread(name, result) and _up_to_product(draft, name)]
        if len(own) != 1 or found.scale != 1 or found.softcap or found.mask:
            return None  # a factor or a mask behind what is found already
        others = [name for name in definition.input if name != own[0]]
        if len(others) + 1 != len(definition.input) or not all(self._broadcasts(name, result) for name in others):
            return None
        if definition.type == "Add" and self._types[others[0]].meta is self._types[result].meta:
            found.biases += others
            return own[0]
        if definition.type == "Where" and definition.input[0] != own[0]:
            hidden = _number(draft, others[-1])
            if hidden is not None:
                found.mask, found.hidden = definition.input[0], hidden
                found.shown = definition.input[1] == own[0]
                return own[0]
        return None

    def _weights(self) -> tuple[int, list[int]] | None:
        """The product of weights and values, and the operators in between, which put zeros for what is no number."""
        draft, behind = self._draft, list[int]()
        name = draft[self._softmax].output[0]
        if len(draft.readers(name)) == 2 and draft.is_inner(name):
            behind = _without_nan(draft, name)
            if not behind:
                return None
            name = draft[behind[-1]].output[0]
        last = draft.only_reader(name)
        if last is None or draft[last].type != _PRODUCT or draft[last].input[0] != name:
            return None
        return last, behind

    def _operands(self, product: int, last: int) -> tuple[_Operand, _Operand, _Operand] | None:
        """Queries, keys and values."""
        arguments = self._draft.arguments(product)
        key_order = (0, 1, 2, 3) if arguments.bool("trans_b") else (0, 1, 3, 2)
        queries = self._operand(self._draft[product].input[0], (0, 1, 2, 3), is_scaled=True)
        keys = self._operand(self._draft[product].input[1], key_order, is_scaled=True)
        values = self._operand(self._draft[last].input[1], (0, 1, 2, 3), is_scaled=False)
        if arguments.bool("trans_a") or queries is None or keys is None or values is None:
            return None
        found = queries, keys, values
        return found if self._fit(*found) else None

    def _operand(self, name: str, order: tuple[int, ...], *, is_scaled: bool) -> _Operand | None:
        """The farthest blob of four axes that `name`, whose axes are taken in `order`, only rearranges or scales."""
        draft, chain, scale = self._draft, list[int](), 1.0
        found = None
        for _ in range(_MAX_STEPS):
            axes = self._origin(name, chain, order)
            if axes is not None:
                found = _Operand(name, axes, scale)
            number = draft.producer(name)
            if number is None or not draft[number].input:
                break
            scaled = _scaled(draft, number) if is_scaled else None
            if scaled is not None and self._is_like(scaled[0], name):
                name, scale = scaled[0], scale * scaled[1]
                continue
            chain.append(number)
            name = draft[number].input[0]
            if not rearranges(draft, number):
                break
        return found

    def _origin(self, name: str, chain: Sequence[int], order: tuple[int, ...]) -> tuple[int, ...] | None:
        """Which axes of `name` are batch, heads, positions and elements behind operators, of `chain`, the last first.

        Heads may be repeated, each as often as it takes.
        """
        kind = self._types.get(name)
        if kind is None or kind.rank != _RANK or not all(rearranges(self._draft, number) for number in chain):
            return None
        places: dict[int, int] = {}
        for probe in self._probes:
            shape = kind.shapes[probe]
            axes: list[Axis] | None = source_axes(shape)
            for number in reversed(chain):
                axes = None if axes is None else rearranged(self._draft, number, axes, self._types, probe)
            if axes is None or len(axes) != _RANK:
                return None
            for place, axis in enumerate(order):
                parts = without_repeats(axes[axis]) if place == _HEADS else axes[axis]
                if not parts:
                    continue
                source, size, _ = parts[0]
                if len(parts) > 1 or size != shape[source] or places.setdefault(place, source) != source:
                    return None
        free = [axis for axis in range(_RANK) if axis not in places.values()]
        if len(free) != _RANK - len(places):
            return None
        return tuple(places[place] if place in places else free.pop(0) for place in range(_RANK))

    def _fit(self, *operands: _Operand) -> bool:
        """True for one type, and where heads of keys divide those of queries."""
        types = self._types
        if len({types[one.name].meta for one in operands}) != 1:
            return False
        shapes = ([[shape[axis] for axis in one.axes] for shape in self._shapes(one.name)] for one in operands)
        return all(
            key[1] and query[1] % key[1] == 0 and value[1:3] == key[1:3]
            for query, key, value in zip(*shapes, strict=True)
        )

    def _merge(self, last: int) -> int | None:
        """The transpose that alone reads the product of weights and values."""
        reader = self._draft.only_reader(self._draft[last].output[0])
        if reader is None or self._draft[reader].type != "Transpose":
            return None
        return reader if len(self._draft.arguments(reader).ints("axes")) == _RANK else None


def _up_to_product(draft: Draft, name: str) -> list[int]:
    """The operators from a product to `name` that scale, mask or add, the product included; none without one."""
    waiting, found = [name], list[int]()
    while waiting and len(found) < _MAX_STEPS:
        number = draft.producer(waiting.pop())
        if number is None or number in found:
            continue
        definition = draft[number]
        if definition.type in (_PRODUCT, "Scale", "Where") or as_post_ops(definition) is not None:
            found.append(number)
        if definition.type != _PRODUCT and number in found:
            waiting += definition.input
    return found if any(draft[number].type == _PRODUCT for number in found) else []


def _scaled(draft: Draft, number: int) -> tuple[str, float] | None:
    """What operator `number` multiplies by a number, and the number; None when it does something else."""
    definition = draft[number]
    if definition.type == "Scale":
        return definition.input[0], draft.arguments(number).float("scale", 1.0)
    if definition.type not in ("Mul", "Div") or len(definition.input) != 2:
        return None
    left, right = (_number(draft, name) for name in definition.input)
    if right is not None and math.isfinite(right):
        if definition.type == "Mul":
            return definition.input[0], right
        return (definition.input[0], 1 / right) if right else None
    if definition.type == "Mul" and left is not None and math.isfinite(left):
        return definition.input[1], left
    return None


def _number(draft: Draft, name: str) -> float | None:
    """The value of a constant of one element that is a number."""
    array = draft.constant(name)
    if array is None or array.size != 1 or array.dtype.kind != "f":
        return None
    value = float(array.reshape(-1)[0])
    return None if math.isnan(value) else value


def _without_nan(draft: Draft, name: str) -> list[int]:
    """The operators that compare `name` with itself and take zeros where it is another; none when there are no such."""
    for number in draft.readers(name):
        if draft[number].type != "NE" or list(draft[number].input) != [name, name] or not draft.is_free(number):
            continue
        chooser = draft.only_reader(draft[number].output[0])
        if chooser is None or draft[chooser].type != "Where" or {number, chooser} != set(draft.readers(name)):
            continue
        condition, chosen, kept = draft[chooser].input
        if (condition, kept) == (draft[number].output[0], name) and _number(draft, chosen) == 0:
            return [number, chooser]
    return []


def _remove_unread(draft: Draft, names: list[str]) -> None:
    """Take out what wrote `names`, and what that read, as far as nobody reads it any more."""
    while names:
        name = names.pop()
        writer = draft.producer(name)
        if writer is None or draft.is_read(name) or not draft.is_inner(name) or len(draft[writer].output) > 1:
            continue
        names += draft[writer].input
        draft.remove(writer)


_is_softmax = of_type(_SOFTMAX)
PASS = Pass(
    "attention",
    "Products, masks and softmax that spell attention become one operator.",
    edit,
    needs=(_is_softmax, of_type(_PRODUCT)),
)
