"""Nodes of one form, that differ in no more than names: the first is converted, the others are what it became, renamed.

A converter is a function of a node's attributes, of which inputs and outputs it has, and of what it asks of tensors:
sizes, values, whether one is a sequence. What it asked is compared anew; one that looked further is called every time.
Models have forms in common, so what nodes became is known beyond the model.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple

from dagexec.core.node import Node
from dagexec.frontend.onnx.node import Array, OnnxNode, Scope
from dagexec.frontend.onnx.scoping import Listed
from dagexec.platform.records import dataclass

_MAX_BYTES = 1 << 10
"""Of a constant, or of the attributes of a node, that are compared by their content."""

_KEPT = 1 << 12  # forms

Form = Hashable

_known: dict[Form, Conversions] = {}
"""Of all models that were loaded."""


def form_of(node: Listed, versions: Hashable, read: Container[str]) -> Form | None:
    """Equal for nodes that look the same to a converter, but for tensors.

    `versions` are those that decide what a node means, and `read` the tensors that somebody uses. None for a node
    without inputs, which is a constant or random, for one that holds graphs, and for one with large attributes.
    """
    if not node.inputs or node.holds_graphs:
        return None
    names = (*node.inputs, *node.outputs)
    attributes = tuple([attribute.SerializeToString() for attribute in node.attributes])
    if sum(map(len, attributes)) > _MAX_BYTES:
        return None
    return (
        node.op_type,
        node.domain,
        versions,
        len(node.inputs),
        tuple(map(names.index, names)),
        names.index("") if "" in names else None,
        tuple([name in read for name in node.outputs]),
        attributes,
    )


def conversions_of(form: Form) -> Conversions:
    """What nodes of a form became in any model."""
    known = _known.get(form)
    if known is None:
        if len(_known) >= _KEPT:
            _known.clear()
        known = _known.setdefault(form, Conversions())
    return known


class Asked(NamedTuple):
    """Which tensors a converter asked something of, as places among inputs and outputs."""

    values: tuple[int, ...]
    shapes: tuple[int, ...]
    variants: tuple[int, ...]

    def facts(self, names: Sequence[str], scope: Scope) -> Hashable:
        """What is so of these tensors; equal where a converter finds the same."""
        return (
            tuple([_content(scope.values.get(names[place])) for place in self.values]),
            tuple([scope.shape(names[place]) for place in self.shapes]),
            tuple([names[place] in scope.variants for place in self.variants]),
        )


class Conversions:
    """What nodes of one form became, by what their converters found out."""

    def __init__(self) -> None:
        self._by_asked: dict[Asked, dict[Hashable, Converted]] = {}

    def find(self, names: Sequence[str], scope: Scope) -> Converted | None:
        """What serves a node with these inputs and outputs, if there is any."""
        for asked, found in self._by_asked.items():
            converted = found.get(asked.facts(names, scope))
            if converted is not None:
                return converted
        return None

    def add(self, node: OnnxNode, operators: Sequence[Node], variant_outputs: Sequence[str]) -> None:
        """Note what a node became, unless others are to be converted nevertheless."""
        seen, names = node.seen, (*node.inputs, *node.outputs)
        converted = Converted.of(node, operators, variant_outputs) if seen.repeats else None
        if converted is None:
            return
        of_node = {name: place for place, name in enumerate(names)}  # of new tensors nothing is known
        asked = Asked(
            *(tuple([of_node[n] for n in one if n in of_node]) for one in (seen.values, seen.shapes, seen.variants))
        )
        values = [value for name, value in seen.values.items() if name in of_node]
        if any(value is not None and _is_large(value) for value in values):
            return
        facts = (
            tuple([_content(value) for value in values]),
            tuple([dims for name, dims in seen.shapes.items() if name in of_node]),
            tuple([known for name, known in seen.variants.items() if name in of_node]),
        )
        self._by_asked.setdefault(asked, {})[facts] = converted


@dataclass(slots=True)
class Converted:
    """What a node became, with places among its inputs, outputs and new tensors instead of names.

    Attributes:
        new: of each new tensor, the place of the name that its own was made from, and the suffix.
        operators: each with the places of its inputs and outputs.
        variant_outputs: outputs that are no tensors.
    """

    new: list[tuple[int, str]]
    operators: list[tuple[Node, list[int], list[int]]]
    variant_outputs: list[int]

    @classmethod
    def of(cls, node: OnnxNode, operators: Sequence[Node], variant_outputs: Sequence[str]) -> Converted | None:
        """What `operators` are of `node`; None where one has a name that is none of its tensors."""
        names = (*node.inputs, *node.outputs, *node.seen.new_names)
        places = {name: place for place, name in reversed([*enumerate(names)])}
        try:
            return cls(
                [(places[stem], suffix) for stem, suffix in node.seen.new_names.values()],
                [
                    (one, [places[name] for name in one.input], [places[name] for name in one.output])
                    for one in operators
                ],
                [places[name] for name in variant_outputs],
            )
        except KeyError:
            return None

    def operators_of(self, names: Sequence[str], label: str, scope: Scope) -> list[Node]:
        """What a node with these inputs and outputs becomes, under its name `label`."""
        tensors = [*names]
        for place, suffix in self.new:
            tensors.append(scope.new_name(f"{tensors[place]}/{suffix}"))
        scope.variants.update([tensors[place] for place in self.variant_outputs])
        return [
            operator.on([tensors[place] for place in inputs], [tensors[place] for place in outputs], label)
            for operator, inputs, outputs in self.operators
        ]


def _is_large(value: Array) -> bool:
    return value.nbytes > _MAX_BYTES or value.dtype.hasobject


def _content(value: Array | None) -> Hashable:
    """Equal for constants of the same content; of large ones and strings nothing is kept that could be equal."""
    if value is None:
        return None
    return id(value) if _is_large(value) else (value.dtype.str, value.shape, value.tobytes())
