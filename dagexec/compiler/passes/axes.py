"""Where the axes of a blob come from: how views and transposes rearrange those of another blob.

An axis is a sequence of parts, the slowest first. A part (axis, size, step) runs through `size` indices of an axis of
the source, `step` apart; of a part that only repeats, axis and step are REPEATED and 0. Axes of size 1 have no parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.post_operations import Types
from dagexec.core.registry import schema_of

REPEATED = -1

Part = tuple[int, int, int]
Axis = tuple[Part, ...]


def source_axes(shape: Sequence[int]) -> list[Axis]:
    """The axes of the source itself."""
    return [((axis, size, 1),) if size != 1 else () for axis, size in enumerate(shape)]


def rearranged(draft: Draft, number: int, axes: Sequence[Axis], types: Types, probe: int) -> list[Axis] | None:
    """The axes of output 0 of operator `number`, from those of its input 0, in a probe of `types`.

    The operator is one that `rearranges`. None where its shape is not known, or takes apart what cannot be followed.
    """
    definition = draft[number]
    after = types.get(definition.output[0])
    if after is None:
        return None
    shape = after.shapes[probe]
    if definition.type == "Transpose":
        order = draft.arguments(number).ints("axes") or range(len(axes))[::-1]
        return [axes[axis] for axis in order]
    if definition.type == "Expand":
        padded = [*((),) * (len(shape) - len(axes)), *axes]
        return [
            ((REPEATED, size, 0),) if not axis and size != 1 else axis for axis, size in zip(padded, shape, strict=True)
        ]
    return _viewed(axes, shape)


def rearranges(draft: Draft, number: int) -> bool:
    """True when output 0 holds the elements of input 0 in another order, or under another shape, or repeated."""
    schema = schema_of(draft[number].type)
    return (schema.view and not schema.view_if) or schema.type in ("Transpose", "Expand")


def without_repeats(axis: Axis) -> Axis:
    """An axis whose every index is repeated, next to each other, without that."""
    return axis[:-1] if axis and axis[-1][0] == REPEATED else axis


def _viewed(axes: Iterable[Axis], shape: Sequence[int]) -> list[Axis] | None:
    """The same elements in their order, as `shape`; None where that cuts a part unevenly."""
    if 0 in shape:
        return None
    parts = [part for axis in axes for part in axis][::-1]
    found = []
    for size in shape:
        own: list[Part] = []
        while size > 1:
            if not parts:
                return None
            axis, count, step = parts.pop()
            if count > size:
                if count % size:
                    return None
                parts.append((axis, count // size, step))
                count, step = size, step * (count // size)
            if size % count:
                return None
            size //= count
            own.append((axis, count, step))
        found.append(_merged(own))
    return found


def _merged(parts: Iterable[Part]) -> Axis:
    """Neighbors that run through one axis without a gap, as one part."""
    found: list[Part] = []
    for axis, size, step in parts:
        if found and found[-1][0] == axis and found[-1][2] == size * step:
            found[-1] = (axis, found[-1][1] * size, step)
        else:
            found.append((axis, size, step))
    return tuple(found)
