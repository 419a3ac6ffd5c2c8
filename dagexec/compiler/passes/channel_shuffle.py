"""channel-shuffle: Reshape, Transpose, Reshape that deal channels out in turn become one `ChannelShuffle`.

Channels seen as (g, C / g) and written as (C / g, g): Zhang et al. 2017, arXiv:1707.01083, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import is_reshape, of_type
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import new_node


def edit(draft: Draft) -> None:
    """Recognize the three operators by the shapes of what is between them, in NCHW and in NHWC."""
    types = draft.types()
    for number in draft.having(_is_transpose):
        if number in draft and draft.is_free(number):
            _rewrite(draft, number, types)


def _rewrite(draft: Draft, number: int, types: Mapping[str, BlobType]) -> None:
    transpose = draft[number]
    split_name, moved_name = transpose.input[0], transpose.output[0]
    first, last = draft.producer(split_name), draft.only_reader(moved_name)
    if first is None or last is None or draft.only_reader(split_name) != number:
        return
    if not all(draft[edge].type == "Reshape" and len(draft[edge].output) == 1 for edge in (first, last)):
        return
    if draft[last].input[0] != moved_name:
        return
    source, result = draft[first].input[0], draft[last].output[0]
    whole, split = types.get(source), types.get(split_name)
    if whole is None or split is None or types.get(result) != whole:
        return
    found = _groups(whole, split, draft.arguments(number).ints("axes"))
    if found is None:
        return
    draft.changed(f"{draft.label(first)}, {draft.label(number)} and {draft.label(last)} become a ChannelShuffle")
    draft.remove(first)
    draft.remove(number)
    draft.replace(last, new_node("ChannelShuffle", [source], [result], name=draft[last].name, arg=found))


def _groups(whole: BlobType, split: BlobType, axes: list[int]) -> dict[str, ArgumentValue] | None:
    """The arguments of the shuffle that splits the channels of `whole` as `split` does and swaps the two parts."""
    swapped = [index for index, axis in enumerate(axes) if axis != index]
    if len(swapped) != 2 or swapped[1] != swapped[0] + 1 or len(axes) != split.rank or whole.rank < 3:
        return None
    place = swapped[0]
    group, depth = split.shape[place], split.shape[place + 1]
    channels_last = place + 2 == split.rank
    channels = whole.shape[-1 if channels_last else 1]
    if group is None or depth is None or channels != group * depth or (not channels_last and place != 1):
        return None
    for full, parts in zip(whole.shapes, split.shapes, strict=True):
        if not channels_last and parts[0] != full[0]:
            return None
    return {"group": group, "order": "NHWC"} if channels_last else {"group": group}


_is_transpose = of_type("Transpose")
PASS = Pass(
    "channel-shuffle",
    "Reshape, Transpose, Reshape become a ChannelShuffle.",
    edit,
    needs=(_is_transpose, is_reshape),
)
