"""slice-indices: elements that are picked or put by one index for a whole slice become slices.

A GatherElements whose indices are the same on all axes but the one that they count along, and that takes these axes as
they are, is a Gather; a ScatterElements along the first axis is a ScatterND. PyTorch has no other way to write sums of
the rows of a segment, as graph networks compute them, than indices that are expanded to the shape of the rows.
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.node import Node, new_node

_is_by_element = of_type("GatherElements", "ScatterElements")
_REPEATING = ("Expand", "TileAxes")


def edit(draft: Draft) -> None:
    """Look before each operator on elements for indices that were repeated."""
    types = draft.types()
    for number in draft.having(_is_by_element):
        data, indices = (types.get(name) for name in draft[number].input[:2])
        if draft.is_free(number) and data is not None and indices is not None and data.rank == indices.rank > 1:
            _rewrite(draft, number, data, indices, types)


def _rewrite(draft: Draft, number: int, data: BlobType, indices: BlobType, types: Types) -> None:
    node, axis = draft[number], draft.arguments(number).int("axis", 0) % data.rank
    others = [other for other in range(data.rank) if other != axis]
    is_whole = all(
        own[other] == whole[other] for own, whole in zip(indices.shapes, data.shapes, strict=True) for other in others
    )
    if not is_whole or (axis and node.type == "ScatterElements"):
        return
    source = _unrepeated(draft, node.input[1], indices, axis, types)
    if source is None:
        return
    wanted = [-1] if node.type == "GatherElements" else [-1, 1]
    vector, first = source, list[Node]()
    if data.rank != len(wanted):
        vector = draft.fresh(f"{source}/slices")
        first.append(new_node("Reshape", [source], [vector], shape=wanted))
    if node.type == "GatherElements":
        made = new_node("Gather", [node.input[0], vector], node.output, name=node.name, axis=axis, wrap_indices=1)
    else:
        reduction = draft.arguments(number).string("reduction", "none")
        inputs = [node.input[0], vector, node.input[2]]
        made = new_node("ScatterND", inputs, node.output, name=node.name, reduction=reduction)
    draft.changed(f"{draft.label(number)} becomes {made.type}: it has an index for each slice")
    draft.replace(number, *first, made)


def _unrepeated(draft: Draft, name: str, indices: BlobType, axis: int, types: Types) -> str | None:
    """The blob of which `name` repeats what it has along `axis`; None where there is none such."""
    array = draft.constant(name)
    if array is not None:
        first = array[tuple(slice(None) if other == axis else slice(1) for other in range(array.ndim))]
        return draft.add_parameter(f"{name}/slices", first) if (array == first).all() else None
    number = draft.producer(name)
    if number is None or draft[number].type not in _REPEATING:
        return None
    source = draft[number].input[0]
    kind = types.get(source)
    if kind is None or kind.rank != indices.rank:
        return None
    for own, whole in zip(kind.shapes, indices.shapes, strict=True):
        if any(size != (whole[axis] if other == axis else 1) for other, size in enumerate(own)):
            return None
    return source


PASS = Pass(
    "slice-indices",
    "Elements that are picked or put by one index for a whole slice become slices.",
    edit,
    needs=(_is_by_element,),
)
