"""Nodes of one form, which differ only in names: the first is converted, the others reuse its conversion, renamed.

A conversion is a function of a node's attributes, of which inputs and outputs it has, and of what the converter asks of
tensors: sizes, values, whether one is a sequence. The answers are compared anew; a converter that looked further is
called every time. Models have forms in common, so conversions are kept beyond the model.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple

from dagexec.core.node import Node
from dagexec.frontend.onnx.node import Array, OnnxNode, Scope
from dagexec.frontend.onnx.scoping import Listed
from dagexec.platform.records import dataclass

_MAX_BYTES = 1 << 10
"""Limit of a constant, or of a node's attributes, that are compared by content."""

_KEPT = 1 << 12  # forms

Form = Hashable

_known: dict[Form, Conversions] = {}
"""The conversions of all models so far."""


def form_of(node: Listed, versions: Hashable, read: Container[str]) -> Form | None:
    """Equal for nodes that look the same to a converter, apart from tensors.

    `versions` are those that decide the meaning of a node, and `read` the tensors that are used. None for a node
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
    """The conversions of nodes of a form, in all models."""
    conversions = _known.get(form)
    if conversions is None:
        if len(_known) >= _KEPT:
            _known.clear()
        conversions = _known.setdefault(form, Conversions())
    return conversions


class Asked(NamedTuple):
    """The tensors that a converter asked something of, as places among inputs and outputs."""

    values: tuple[int, ...]
    shapes: tuple[int, ...]
    variants: tuple[int, ...]

    def facts(self, names: Sequence[str], scope: Scope) -> Hashable:
        """The answers about these tensors; equal where a converter would get the same."""
        return (
            tuple([_content(scope.values.get(names[place])) for place in self.values]),
            tuple([scope.shape(names[place]) for place in self.shapes]),
            tuple([names[place] in scope.variants for place in self.variants]),
        )


class Conversions:
    """Conversions of nodes of one form, by the answers that their converters got."""

    def __init__(self) -> None:
        self._by_asked: dict[Asked, dict[Hashable, Converted]] = {}

    def find(self, names: Sequence[str], scope: Scope) -> Converted | None:
        """A conversion that serves a node with these inputs and outputs; None without one."""
        for asked, conversions in self._by_asked.items():
            converted = conversions.get(asked.facts(names, scope))
            if converted is not None:
                return converted
        return None

    def add(self, node: OnnxNode, operators: Sequence[Node], variant_outputs: Sequence[str]) -> None:
        """Note the conversion of a node, unless others have to be converted anew."""
        seen, names = node.seen, (*node.inputs, *node.outputs)
        converted = Converted.of(node, operators, variant_outputs) if seen.repeats else None
        if converted is None:
            return
        of_node = {name: place for place, name in enumerate(names)}  # nothing is known of new tensors
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
    """A converted node, with places among its inputs, outputs and new tensors instead of names.

    Attributes:
        new: for each new tensor, the place of the name that its own was made from, and the suffix.
        operators: each with the places of its inputs and outputs.
        variant_outputs: outputs that are no tensors.
    """

    new: list[tuple[int, str]]
    operators: list[tuple[Node, list[int], list[int]]]
    variant_outputs: list[int]

    @classmethod
    def of(cls, node: OnnxNode, operators: Sequence[Node], variant_outputs: Sequence[str]) -> Converted | None:
        """The conversion of `node` into `operators`; None where these use a name that is none of its tensors."""
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
        """The operators for a node with these inputs and outputs, under its name `label`."""
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
    """Equal for constants of the same content; large constants and strings equal no other."""
    if value is None:
        return None
    return id(value) if _is_large(value) else (value.dtype.str, value.shape, value.tobytes())
