"""common-subexpressions: of operators that compute the same from the same, one stays.

Value numbering over the operators in list order (Alpern, Wegman, Zadeck 1988): an operator's number is its type, its
arguments and the blobs it reads, once reads of a merged operator's outputs have been redirected.
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft, copied
from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from dagexec.core.purity import is_pure

Key = tuple[str, tuple[bytes, ...], bytes, int]


def apply(model: Model) -> Rewritten:
    """Merge equal operators, also those that are equal once their inputs have been merged."""
    draft = Draft(model)
    alike: dict[
        tuple[str, tuple[str, ...]], dict[Key, int] | int
    ] = {}  # of a type on the same inputs: the first, or all
    merged: dict[str, str] = {}  # by blob that nothing writes any more, the one that is the same
    for number, definition in draft.operators():
        if not merged.keys().isdisjoint(definition.input):
            definition = copied(definition)
            definition.input[:] = [merged.get(name, name) for name in definition.input]
            draft.replace(number, definition)
        if not (draft.is_free(number) and is_pure(definition) and definition.output):
            continue
        kind = definition.type, tuple(definition.input)
        known = alike.setdefault(kind, number)
        if known == number:
            continue
        if isinstance(known, int):
            known = alike[kind] = {_key(draft[known]): known}
        kept = known.setdefault(_key(definition), number)
        if kept == number or draft.outputs.intersection(definition.output):
            continue
        draft.changed(f"{draft.label(number)} is the same as {draft.label(kept)}")
        draft.remove(number)
        merged.update(zip(definition.output, draft[kept].output, strict=True))
    return draft.finish()


def _key(definition: OperatorDef) -> Key:
    arguments = tuple(sorted(argument.SerializeToString(deterministic=True) for argument in definition.arg))
    device = definition.device_option.SerializeToString(deterministic=True)
    return definition.engine, arguments, device, len(definition.output)


PASS = Pass("common-subexpressions", "Of operators that compute the same from the same, one stays.", apply)
