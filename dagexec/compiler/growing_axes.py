"""Axes that are as long as a decoder's caches: where an operator that reads blobs with one has it in what it makes.

Such blobs may only go where each of their elements goes its own way: element-wise operators, views and permutations,
and masks of attention. What lies behind the positions that there are then stays there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.compiler.length_contents import Array, Domain, Sum
from dagexec.core.inferred_types import output_types
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.row_axes import rule_of
from dagexec.core.rows import elementwise, keeps_axes
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass

_PICKING = frozenset(("Gather", "GatherND"))


class NotSteppingError(Exception):
    """A net has no net of a step; the message says why."""


@dataclass(frozen=True)
class Known:
    """What is known of a blob.

    Attributes:
        type: with a full cache.
        grows: the axis that is as long as the cache, and by how much it is longer; None where there is none.
        content: its elements, where they follow from the length alone, and are few.
        varies: it depends on the length.
        cached: the state, and the blob that is put behind it, whose Concat this is.
        domain: what its elements may be, where that is told, and they are not followed.
    """

    type: TensorType
    grows: tuple[int, int] | None = None
    content: Sum | None = None
    varies: bool = False
    cached: tuple[str, str, tuple[int, ...]] | None = None
    domain: Domain | None = None

    def axis_of(self, rank: int) -> tuple[int, int] | None:
        """`grows` in a result of so many axes, of which the last are those of the blob."""
        return None if self.grows is None else (self.grows[0] + rank - len(self.type.shape), self.grows[1])


def types_after(
    node: Node, types: Sequence[TensorType], values: Sequence[Array | None] | None = None
) -> Sequence[TensorType]:
    """The outputs' types for these of the inputs, and values where they are needed. Raises NotSteppingError."""
    schema = schema_of(node.type)
    if not schema.can_infer(node) or schema.sub_nets or schema.handles:
        raise NotSteppingError(f"what {node.type} makes is not known before a run")
    values = (None,) * len(types) if values is None else tuple(values)
    try:
        return output_types(OperatorCall(node, node.arguments(node.type), tuple(types), values, node.type), schema)
    except DagexecError as error:
        raise NotSteppingError(f"{node.type}: {error}") from None


def axis_after(node: Node, inputs: Sequence[Known], types: Sequence[TensorType]) -> tuple[int, int] | None:
    """The axis of the output that grows, where inputs do, and by how much it is longer; None where none grows.

    `types` are the outputs'. Raises NotSteppingError.
    """
    schema = schema_of(node.type)
    if node.type == "Transpose" or (schema.is_view(node) and len(inputs) == 1):
        return _moved(node, inputs[0])
    if node.type in _PICKING:
        return _picked(node, inputs)
    if node.type == "Concat":
        return _side_by_side(node, inputs)
    if rule_of(schema) in (elementwise, keeps_axes) and len(types) == 1:
        return _joined(node, inputs, types[0])
    raise NotSteppingError(f"{node.type} reads {node.input[0]!r}, which grows")


def _moved(node: Node, source: Known) -> tuple[int, int]:
    """Of a view or a permutation."""
    assert source.grows is not None
    axis, more = source.grows
    shape = list(source.type.shape)
    size = shape[axis] = max(shape) + 1
    (kind,) = types_after(node, [TensorType(tuple(shape), source.type.meta)])
    if size not in kind.shape:
        raise NotSteppingError(f"{node.type} mixes an axis that grows with others")
    place = kind.shape.index(size)
    if node.type != "Transpose" and math.prod(shape[:axis]) != math.prod(kind.shape[:place]):
        raise NotSteppingError(f"{node.type} mixes an axis that grows with others")
    return place, more


def _picked(node: Node, inputs: Sequence[Known]) -> tuple[int, int] | None:
    """Of an operator that picks elements by indices, which are numbers of positions.

    An index of a position that there is leads to an element that there is.
    """
    data, indices = inputs
    arguments = node.arguments(node.type)
    if node.type == "Gather":
        picked = [arguments.int("axis", 0) % len(data.type.shape)]
    else:
        picked = list(range(indices.type.shape[-1])) if not arguments.int("batch_dims", 0) else []
    if data.grows and data.grows[0] not in picked:
        raise NotSteppingError(f"{node.type} keeps an axis of {node.input[0]!r} that grows")
    if indices.grows is None:
        return None
    _require_inside(node, data, indices, picked)
    axis, more = indices.grows
    if node.type == "GatherND" and axis == len(indices.type.shape) - 1:
        raise NotSteppingError(f"{node.type} takes indices {node.input[1]!r} of a length that grows")
    return axis + (picked[0] if node.type == "Gather" else 0), more


def _require_inside(node: Node, data: Known, indices: Known, axes: Sequence[int]) -> None:
    """Raise NotSteppingError unless all indices, with full caches, lead to elements that are in memory then."""
    sizes = np.array([data.type.shape[axis] for axis in axes])
    content, domain = indices.content, indices.domain
    if content is not None and content.is_constant:
        inside = bool(((content.base >= -sizes) & (content.base < sizes)).all())
    else:
        inside = domain is not None and bool(-sizes.min() <= domain.values.min() <= domain.values.max() < sizes.min())
    if not inside:
        raise NotSteppingError(f"{node.type} picks of {node.input[0]!r} what may not be there")


def _side_by_side(node: Node, inputs: Sequence[Known]) -> tuple[int, int]:
    """Of a Concat along another axis."""
    grows = {one.grows for one in inputs}
    axis = node.arguments(node.type).int("axis", 1) % len(inputs[0].type.shape)
    common = grows.pop()
    if grows or common is None or common[0] == axis or node.arguments(node.type).bool("add_axis"):
        raise NotSteppingError("Concat joins what grows with what does not")
    return common


def _joined(node: Node, inputs: Sequence[Known], result: TensorType) -> tuple[int, int]:
    """Of an element-wise operator."""
    rank = len(result.shape)
    axes = {found for one in inputs if (found := one.axis_of(rank)) is not None}
    if len(axes) > 1:
        raise NotSteppingError(f"{node.type} joins axes of several lengths")
    axis, more = axes.pop()
    sizes = {_size(one, axis - rank) for one in inputs}
    if not sizes <= {1, result.shape[axis]}:
        raise NotSteppingError(f"{node.type} joins axes of several lengths")
    if any(not one.grows and _size(one, axis - rank) > 1 for one in inputs):
        raise NotSteppingError(f"{node.type} joins what grows with what does not")
    return axis, more


def _size(one: Known, place: int) -> int:
    """Of an axis, from the last one; 1 where there is none."""
    shape = one.type.shape
    return shape[place] if len(shape) >= -place else 1
