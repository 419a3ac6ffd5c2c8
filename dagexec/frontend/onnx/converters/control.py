"""Converters of control flow: branches, loops, sequences and optionals.

`Scope.variants` has the names of all that are no tensors, as an operator that copies a tensor cannot copy them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from dagexec.core.node import Node, new_node
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.frontend.onnx.initializers import element_type
from dagexec.frontend.onnx.node import OnnxNode, converts

_CARRIED = 2  # the first carried value among the inputs of a Loop and of its body


@converts(If=25)
def branches(node: OnnxNode) -> list[Node]:
    """If; with a known condition, only the branch that it chooses."""
    names = ("then_branch", "else_branch")
    node.ignore(*names)
    if node.value(0) is not None:
        chosen = node.subgraph(names[not node.constant_scalar(0, "condition")], 0)
        return [*chosen.net.op, *_copies(node, chosen.outputs)]
    nets = [node.subgraph(name, 0) for name in names]
    for net in nets:
        _note_variants(node, node.outputs, net.outputs)
    captured = list(dict.fromkeys(name for net in nets for name in net.captured))
    arguments = dict(zip(("then_net", "else_net"), (net.net.message() for net in nets), strict=True))
    return [node.operator("If", [node.inputs[0], *captured], _outputs(node), captured=captured, **arguments)]


@converts(Loop=25)
def loop(node: OnnxNode) -> list[Node]:
    """Loop, whose trip count and condition may be left out."""
    carried = node.inputs[_CARRIED:]
    body = node.subgraph("body", _CARRIED + len(carried))
    _note_variants(node, node.outputs, body.outputs[1:])
    inputs = [name for name in node.inputs[:_CARRIED] if name]
    number = body.inputs[0] if body.inputs else ""
    operator = node.operator(
        "Loop", [*inputs, *carried, *body.captured], _outputs(node), loop_net=body.net.message(),
        captured=list(body.captured),
        trip_count=int(node.has_input(0)), condition=int(node.has_input(1)),
        number_axes=len(node.scope.shapes.get(number) or ()) or None,
        **_row_types(node, 1 + len(carried)),
    )  # fmt: skip
    return [operator]


@converts(Scan=25)
def scan(node: OnnxNode) -> list[Node]:
    """Scan; before opset 9 over batches, with lengths."""
    count = node.integer("num_scan_inputs", 0)
    arguments = {
        name: node.integers(name)
        for name in ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
    }
    batched = node.opset < 9
    if batched:
        arguments["scan_input_directions"] = node.integers("directions")
    inputs = [name for name in node.inputs if name]
    states = len(node.inputs) - count - batched
    body = node.subgraph("body", states + count)
    return [
        node.operator(
            "Scan", [*inputs, *body.captured], _outputs(node), scan_net=body.net.message(),
            captured=list(body.captured),
            num_scan_inputs=count, batched=int(batched) or None,
            sequence_lengths=int(batched and node.has_input(0)) or None, **_row_types(node, states),
            **arguments,
        )
    ]  # fmt: skip


@converts(SequenceEmpty=11)
def sequence_empty(node: OnnxNode) -> list[Node]:
    """An empty sequence, whatever its element type."""
    node.ignore("dtype")
    return _variant(node, [])


@converts(SequenceConstruct=11, SequenceInsert=11, SequenceErase=11)
def sequence(node: OnnxNode) -> list[Node]:
    """A sequence of what is given."""
    return _variant(node, [name for name in node.inputs if name])


@converts(SplitToSequence=24)
def split_to_sequence(node: OnnxNode) -> list[Node]:
    """Pieces of a tensor."""
    inputs = [name for name in node.inputs if name]
    return _variant(node, inputs, axis=node.integer("axis", 0), keepdims=node.integer("keepdims", 1))


@converts(SequenceAt=11, SequenceLength=11)
def of_sequence(node: OnnxNode) -> list[Node]:
    """A tensor computed from a sequence."""
    return [node.operator(node.op_type, node.inputs, node.only_output())]


@converts(ConcatFromSequence=11)
def concat_from_sequence(node: OnnxNode) -> list[Node]:
    """The arrays of a sequence as one."""
    axis, new_axis = node.integer("axis", 0), node.integer("new_axis", 0)
    return [node.operator("ConcatFromSequence", node.inputs, node.only_output(), axis=axis, new_axis=new_axis)]


@converts(SequenceMap=17)
def sequence_map(node: OnnxNode) -> list[Node]:
    """A loop over the elements of the first sequence, which inserts the results of the body into new sequences."""
    body = node.subgraph("body", len(node.inputs))
    length, item, condition = node.new_name("length"), node.new_name("item"), node.new_name("condition")
    elements: list[Node] = []
    captured = list(dict.fromkeys(body.captured))
    for index, (name, inside) in enumerate(zip(node.inputs, body.inputs, strict=False)):
        if index and not node.is_variant(name):
            elements.append(new_node("Copy", [name], [inside]))
        else:
            elements.append(new_node("SequenceAt", [name, item], [inside]))
        if name not in captured:
            captured.append(name)
    carried = [(node.new_name("before"), node.new_name("after"), result) for result in body.outputs]
    inserts = [new_node("SequenceInsert", [before, result], [after]) for before, after, result in carried]
    header = NetDef(
        name=body.net.name,
        external_input=[item, condition, *(before for before, _, _ in carried), *captured],
        external_output=[condition, *(after for _, after, _ in carried)],
    )
    net = Program((*elements, *body.net.op, *inserts), header).message()
    empty = [node.new_name("empty") for _ in carried]
    node.scope.variants.update(node.outputs)
    return [
        node.operator("SequenceLength", [node.inputs[0]], [length]),
        *(node.operator("SequenceEmpty", [], [name]) for name in empty),
        node.operator(
            "Loop", [length, *empty, *captured], _outputs(node), loop_net=net, captured=captured, trip_count=1
        ),
    ]


@converts(Optional=28)
def optional(node: OnnxNode) -> list[Node]:
    """An optional, whatever its type."""
    node.ignore("type")
    return _variant(node, [name for name in node.inputs if name])


@converts(OptionalHasElement=28)
def optional_has_element(node: OnnxNode) -> list[Node]:
    """Whether an optional has a value."""
    return [node.operator("OptionalHasElement", [name for name in node.inputs if name], node.only_output())]


@converts(OptionalGetElement=28)
def optional_get_element(node: OnnxNode) -> list[Node]:
    """What an optional holds: a tensor or a sequence."""
    return _variant(node, list(node.inputs))


def _variant(node: OnnxNode, inputs: Sequence[str], **arguments: int) -> list[Node]:
    """The operator of the node's name, whose output may be no tensor."""
    node.scope.variants.add(node.outputs[0])
    return [node.operator(node.op_type, inputs, node.only_output(), **arguments)]


def _note_variants(node: OnnxNode, outputs: Iterable[str], results: Iterable[str]) -> None:
    """Note which outputs are no tensors, by the results of a body that they stand for."""
    variants = node.scope.variants
    variants.update(output for output, result in zip(outputs, results, strict=False) if result in variants)


def _outputs(node: OnnxNode) -> list[str]:
    return [name or node.new_name("unread") for name in node.outputs]


def _copies(node: OnnxNode, results: Sequence[str]) -> list[Node]:
    """Operators that give the results of a branch the names of the node's outputs."""
    _note_variants(node, node.outputs, results)
    copies = []
    for output, result in zip(node.outputs, results, strict=False):
        value = node.scope.values.get(result)
        if value is not None:
            node.scope.values[output] = value
        else:
            copies.append(node.operator("CopyValue" if result in node.scope.variants else "Copy", [result], [output]))
    return copies


def _row_types(node: OnnxNode, first: int) -> dict[str, list[int] | list[str]]:
    """The types that the body declares for its results from `first` on, as arguments; none where it leaves one open."""
    rows = [value.type.tensor_type for value in node.graph("body").output[first:]]
    if not rows or any(row.elem_type == onnx.TensorProto.UNDEFINED for row in rows):
        return {}
    types = [element_type(row.elem_type, node.label).number for row in rows]
    sizes = [",".join(str(max(0, dim.dim_value)) for dim in row.shape.dim) for row in rows]
    shapes = [text if row.HasField("shape") else "?" for text, row in zip(sizes, rows, strict=True)]
    return {"stacked_types": types, "stacked_shapes": shapes}
