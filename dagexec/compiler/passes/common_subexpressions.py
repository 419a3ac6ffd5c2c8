"""common-subexpressions: of operators that compute the same from the same, one stays.

Value numbering over the operators in list order (Alpern, Wegman, Zadeck 1988): an operator's number is its type, its
arguments and the blobs it reads, once reads of a merged operator's outputs have been redirected.
"""

from __future__ import annotations

from collections.abc import Hashable

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.node import Node
from dagexec.core.purity import is_pure

Key = tuple[str, Hashable, bytes, int]


def edit(draft: Draft) -> None:
    """Merge equal operators, also those that are equal once their inputs have been merged."""
    if len({(definition.type, definition.input) for definition in draft.nodes()}) == len(draft):
        return
    alike: dict[tuple[str, tuple[str, ...]], dict[Key, int] | int] = {}
    """Of a type on the same inputs: the first, or all that may be merged."""
    merged: dict[str, str] = {}  # by blob that nothing writes any more, the one that is the same
    for number, definition in draft.operators():
        if not merged.keys().isdisjoint(definition.input):
            definition = definition.changed(inputs=[merged.get(name, name) for name in definition.input])
            draft.replace(number, definition)
        kind = definition.type, definition.input
        known = alike.setdefault(kind, number)
        if known == number or not _may_be_merged(draft, number):
            continue
        if isinstance(known, int):
            if not _may_be_merged(draft, known):
                alike[kind] = number
                continue
            known = alike[kind] = {_key(draft[known]): known}
        kept = known.setdefault(_key(definition), number)
        if kept == number or draft.outputs.intersection(definition.output):
            continue
        draft.changed(f"{draft.label(number)} is the same as {draft.label(kept)}")
        draft.remove(number)
        merged.update(zip(definition.output, draft[kept].output, strict=True))


def _may_be_merged(draft: Draft, number: int) -> bool:
    return draft.is_free(number) and is_pure(draft[number]) and bool(draft[number].output)


def _key(definition: Node) -> Key:
    option = definition.device_option
    device = b"" if option is None else option.SerializeToString(deterministic=True)
    return definition.engine, definition.values.key, device, len(definition.output)


PASS = Pass("common-subexpressions", "Of operators that compute the same from the same, one stays.", edit)
