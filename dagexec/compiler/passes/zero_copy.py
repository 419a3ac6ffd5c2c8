"""zero-copy: operators that join or cut tensors let their operands lie in each other's memory.

An operator is marked, with the argument zero_copy=1, when for some shape of the model's inputs an operand is one piece
of the result (of what is cut, the other way round) and nobody outside the net sees it. The memory plan then has the
operand's writer write it there, where that is right for the shapes of a run (`dagexec.scheduler.memory.buffers`);
what it cannot lay there is copied as before.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import joins_or_cuts
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType


def edit(draft: Draft) -> None:
    """Mark the operators; order and names stay."""
    candidates = [number for number in draft.having(joins_or_cuts) if _may_share(draft, number)]
    if not candidates:
        return
    types = draft.types()
    for number in candidates:
        pieces = _pieces(draft, number, types)
        if not pieces:
            continue
        marked = draft[number].changed(arguments={"zero_copy": 1})
        what = "is cut where it lies" if schema_of(marked.type).joined is None else "is joined where it lies"
        draft.changed(f"{draft.label(number)}: {', '.join(map(repr, sorted(pieces)))} {what}")
        draft.replace(number, marked)


def _may_share(draft: Draft, number: int) -> bool:
    return draft.is_free(number) and "zero_copy" not in draft.arguments(number)


def _pieces(draft: Draft, number: int, types: Types) -> set[str]:
    """The blobs that are one piece of the result, or of what is cut, for some input of the model."""
    definition = draft[number]
    schema = schema_of(definition.type)
    names, pieces = (definition.input, schema.joined) if schema.joined is not None else (definition.output, schema.cut)
    wanted = {name for name in names if draft.is_inner(name)}
    if pieces is None or not (schema.joined is not None or draft.is_inner(definition.input[0])):
        return set()
    found: set[str] = set()
    for call, outputs in _calls(draft, number, types):
        found |= wanted.intersection([names[index] for index in pieces(call, outputs)])
        if found == wanted:
            break
    return found


def _calls(draft: Draft, number: int, types: Types) -> Iterator[tuple[OperatorCall, list[TensorType]]]:
    """What inference sees of an operator, and the types of its outputs, for each probe at which they are known."""
    definition = draft[number]
    kinds = [types.get(name) for name in (*definition.input, *definition.output)]
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        return
    values = tuple(draft.constant(name) for name in definition.input)
    if any(values[index] is None for index in schema_of(definition.type).values_read(definition)):
        return
    label = draft.label(number)
    for probe in dict.fromkeys(zip(*(kind.shapes for kind in known), strict=True)):
        shapes = [TensorType(shape, kind.meta) for shape, kind in zip(probe, known, strict=True)]
        inputs, outputs = shapes[: len(definition.input)], shapes[len(definition.input) :]
        yield OperatorCall(definition, definition.arguments(label), tuple(inputs), values, label), outputs


PASS = Pass(
    "zero-copy", "What is joined or cut in one piece is written where it is read.", edit, needs=(joins_or_cuts,)
)
