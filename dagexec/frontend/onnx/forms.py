"""Nodes of one form, that differ in no more than names: the first is converted, the others are what it became, renamed.

A converter is a function of a node's attributes, of which inputs and outputs it has, and of what it asks of tensors:
sizes, values, whether one is a sequence. What it asked is compared anew; one that looked further is called every time.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

from dagexec.core.node import Node
from dagexec.frontend.onnx.node import Array, Dims, OnnxNode, Scope
from dagexec.frontend.onnx.scoping import Listed
from dagexec.platform.records import dataclass

_MAX_BYTES = 1 << 10
"""Of a constant that is compared by its content."""

Form = Hashable


def form_of(node: Listed, opset: int, read: Container[str]) -> Form | None:
    """Equal for nodes that look the same to a converter, but for tensors; `read` are those that somebody uses.

    None for a node without inputs, which is a constant or random, and for one that holds graphs.
    """
    if not node.inputs or node.holds_graphs:
        return None
    proto, names = node.proto, (*node.inputs, *node.outputs)
    return (
        proto.op_type,
        proto.domain,
        opset,
        len(node.inputs),
        tuple(map(names.index, names)),
        names.index("") if "" in names else None,
        tuple([name in read for name in node.outputs]),
        tuple([attribute.SerializeToString() for attribute in proto.attribute]),
    )


@dataclass(slots=True)
class Converted:
    """What a node became, with places among its inputs, outputs and new tensors instead of names.

    Attributes:
        shapes, values, variants: what its converter found out of tensors.
        new: of each new tensor, the place of the name that its own was made from, and the suffix.
        operators: each with the places of its inputs and outputs.
        variant_outputs: outputs that are no tensors.
    """

    shapes: list[tuple[int, Dims | None]]
    values: list[tuple[int, Array | None]]
    variants: list[tuple[int, bool]]
    new: list[tuple[int, str]]
    operators: list[tuple[Node, list[int], list[int]]]
    variant_outputs: list[int]

    @classmethod
    def of(cls, node: OnnxNode, operators: Sequence[Node], variant_outputs: Sequence[str]) -> Converted | None:
        """What may serve further nodes of the form of `node`; None where they are to be converted."""
        seen = node.seen
        places = {name: place for place, name in reversed([*enumerate((*node.inputs, *node.outputs, *seen.new_names))])}
        try:
            return (
                cls(
                    [(places[name], dims) for name, dims in seen.shapes.items()],
                    [(places[name], value) for name, value in seen.values.items()],
                    [(places[name], is_variant) for name, is_variant in seen.variants.items()],
                    [(places[stem], suffix) for stem, suffix in seen.new_names.values()],
                    [(one, [places[n] for n in one.input], [places[n] for n in one.output]) for one in operators],
                    [places[name] for name in variant_outputs],
                )
                if seen.repeats
                else None
            )
        except KeyError:  # a name that is none of its tensors
            return None

    def fits(self, names: Sequence[str], scope: Scope) -> bool:
        """True when the tensors of a node, inputs and outputs, are to the converter as those of the first were."""
        count = len(names)  # what is asked of tensors behind them, new ones, is known to be nothing
        for place, value in self.values:
            if place < count and not _are_same(scope.values.get(names[place]), value):
                return False
        for place, dims in self.shapes:
            if place < count and scope.shape(names[place]) != dims:
                return False
        return all(place >= count or (names[place] in scope.variants) == known for place, known in self.variants)

    def operators_of(self, names: Sequence[str], label: str, scope: Scope) -> list[Node]:
        """What a node with these inputs and outputs becomes, under its name `label`."""
        tensors = [*names]
        for place, suffix in self.new:
            tensors.append(scope.new_name(f"{tensors[place]}/{suffix}"))
        scope.variants.update([tensors[place] for place in self.variant_outputs])
        return [
            operator.changed(
                inputs=[tensors[place] for place in inputs], outputs=[tensors[place] for place in outputs], name=label
            )
            for operator, inputs, outputs in self.operators
        ]


def _are_same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape or one.nbytes > _MAX_BYTES or one.dtype.hasobject:
        return False
    return one.tobytes() == other.tobytes()
