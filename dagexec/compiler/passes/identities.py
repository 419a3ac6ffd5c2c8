"""identities: operators that give their input back go, and their readers read that instead.

`Dropout` in inference, `Copy` on one device, reshapes and resizing to the same shape, casts to the same type,
permutations that change nothing, and sums and concatenations of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import Arguments
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.core.traits import ImageRole
from dagexec.ops.families.activation.post_ops import as_post_ops

Types = Mapping[str, BlobType]

_ELSEWHERE = ("tf_crop_and_resize", "tf_half_pixel_for_nn")
"""Places of a Resize that are not those of X where nothing changes its size."""


def edit(draft: Draft) -> None:
    """Remove what gives its input back, unless both its input and its output must keep their names."""
    candidates = {number: as_post_ops(draft[number]) == () for number in draft.having(_may_give_back)}
    keeping = {number for number, always in candidates.items() if not always and _keeps_elements(draft[number])}
    types = draft.types() if keeping else {}
    for number, always in candidates.items():
        if (always or number in keeping) and _is_identity(draft, number, always, types):
            _bypass(draft, number)


def _may_give_back(schema: OpSchema) -> bool:
    return schema.post_ops is not None or schema.view or _may_keep_all(schema)


def _may_keep_all(schema: OpSchema) -> bool:
    return schema.type == "Cast" or schema.type == "Transpose" or schema.image_role is ImageRole.RESIZING


def _is_identity(draft: Draft, number: int, always: bool, types: Types) -> bool:
    """True for an operator that `always` gives its input back, and for one that keeps elements, and types here."""
    definition = draft[number]
    if not (draft.is_free(number) and definition.input and definition.output):
        return False
    if any(draft.is_read(name) or name in draft.outputs for name in definition.output[1:]):
        return False
    if always:
        return True
    source, target = types.get(definition.input[0]), types.get(definition.output[0])
    if source is None or target is None or source != target:
        return False
    return definition.type != "Transpose" or _moves_nothing(draft.arguments(number), source)


def _keeps_elements(definition: Node) -> bool:
    """True for an operator that gives its input back where the types, shapes included, are the same."""
    schema = schema_of(definition.type)
    if _may_keep_all(schema):
        return schema.image_role is not ImageRole.RESIZING or _gives_sizes(definition.arguments())
    return schema.is_view(definition) and as_post_ops(definition) is None


def _gives_sizes(arguments: Arguments) -> bool:
    """True for a Resize that gives X back where it keeps the sizes: the factor is theirs, and nothing is cropped."""
    by_sizes = "sizes" in arguments or arguments.bool("sizes_input")
    stretches = arguments.string("keep_aspect_ratio_policy", "stretch") == "stretch"
    return by_sizes and stretches and arguments.string("coordinates", "half_pixel") not in _ELSEWHERE


def _moves_nothing(arguments: Arguments, kind: BlobType) -> bool:
    """True when the permutation only moves axes of size 1."""
    axes = arguments.ints("axes") or list(reversed(range(kind.rank)))
    moved = [axis for axis in axes if kind.shape[axis] != 1]
    return moved == sorted(moved)


def _bypass(draft: Draft, number: int) -> None:
    definition = draft[number]
    source, target = definition.input[0], definition.output[0]
    must_keep_name = target in draft.outputs
    if must_keep_name and not draft.is_inner(source):
        return
    draft.changed(f"{draft.label(number)} is removed: it gives {source!r} back")
    draft.remove(number)
    if must_keep_name:
        draft.rename(source, target)
    else:
        draft.redirect(target, source)


PASS = Pass("identities", "Operators that give their input back are removed.", edit, needs=(_may_give_back,))
