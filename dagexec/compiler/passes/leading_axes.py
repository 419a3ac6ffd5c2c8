"""leading-axes: a layer on a matrix that is made of more axes, and made of them again, takes the axes as they are.

PyTorch's Conv1D and exporters of Gemm write Reshape, FC, Reshape. Without the second Reshape what follows the layer,
an activation or a sum, becomes a part of it.
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import is_fully_connected, is_reshape
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.node import Node


def edit(draft: Draft) -> None:
    """Look behind each fully connected layer of a matrix."""
    types = draft.types()
    for number in draft.having(is_fully_connected):
        if draft.is_free(number):
            _rewrite(draft, number, types)


def _rewrite(draft: Draft, number: int, types: Types) -> None:
    layer, arguments = draft[number], draft.arguments(number)
    behind = draft.only_reader(layer.output[0])
    if behind is None or draft[behind].type != "Reshape" or len(draft[behind].output) != 1:
        return
    result = draft[behind].output[0]
    source, plain, wide = (types.get(name) for name in (layer.input[0], layer.output[0], result))
    if source is None or plain is None or wide is None or (source.rank, plain.rank) != (2, 2) or wide.rank < 3:
        return
    if arguments.int("axis", 1) != 1 or draft[behind].input[0] != layer.output[0]:
        return
    if any(shape[-1] != matrix[-1] for shape, matrix in zip(wide.shapes, plain.shapes, strict=True)):
        return
    wanted = tuple((*shape[:-1], matrix[-1]) for shape, matrix in zip(wide.shapes, source.shapes, strict=True))
    name, first = _unshaped(draft, layer.input[0], wanted, types), list[Node]()
    if name is None and source.shapes == plain.shapes:  # the same reshape, before the layer
        name = draft.fresh(f"{layer.input[0]}/wide")
        reshape = draft[behind]
        inputs, outputs = (layer.input[0], *reshape.input[1:]), (name, *reshape.output[1:])
        first.append(reshape.changed(inputs=inputs, outputs=outputs))
    if name is None:
        return
    inputs, outputs = (name, *layer.input[1:]), (result, *layer.output[1:])
    changed = layer.changed(inputs=inputs, outputs=outputs, arguments={"axis": wide.rank - 1})
    draft.changed(f"{draft.label(number)} takes {wide.rank} axes as they are")
    draft.remove(number)
    draft.replace(behind, *first, changed)


def _unshaped(draft: Draft, name: str, shapes: tuple[tuple[int, ...], ...], types: Types) -> str | None:
    """The blob of these shapes that `name` is another view of."""
    before = draft.producer(name)
    if before is None or draft[before].type != "Reshape":
        return None
    source = draft[before].input[0]
    return source if source in types and types[source].shapes == shapes else None


PASS = Pass(
    "leading-axes",
    "Layers between two reshapes take the axes as they are.",
    edit,
    needs=(is_fully_connected, is_reshape),
)
