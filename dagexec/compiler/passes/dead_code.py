"""dead-code: operators whose results nothing reads go, and so do parameters and outputs that nothing reads.

Results are the model's outputs and what operators with effects beyond their outputs read.
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import min_outputs
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.purity import has_no_effects


def edit(draft: Draft) -> None:
    """Remove, from the end of the list to its front, what has become unread."""
    for number in reversed(draft.numbers()) if draft.unread() else ():
        definition = draft[number]
        unread = [name for name in definition.output if not draft.is_read(name) and name not in draft.outputs]
        if not unread or not draft.is_free(number):
            continue
        if len(unread) == len(definition.output) and has_no_effects(definition):
            draft.changed(f"{draft.label(number)} is removed: nobody reads it")
            draft.remove(number)
        else:
            _drop_outputs(draft, number, unread)
    _drop_parameters(draft)


def _drop_outputs(draft: Draft, number: int, unread: list[str]) -> None:
    """Take unread outputs off the end of an operator that may leave them out."""
    definition = draft[number]
    needed = min_outputs(definition)
    if len(definition.output) <= needed or definition.output[-1] not in unread:
        return
    count = len(definition.output)
    while count > needed and definition.output[count - 1] in unread:
        count -= 1
    dropped = ", ".join(map(repr, definition.output[count:]))
    draft.changed(f"{draft.label(number)} no longer writes {dropped}")
    draft.replace(number, definition.changed(outputs=definition.output[:count]))


def _drop_parameters(draft: Draft) -> None:
    unread = draft.unused_parameters()
    for name in unread:
        del draft.parameters[name]
    if unread:
        draft.changed(f"{len(unread)} parameters that nobody reads are removed")


PASS = Pass("dead-code", "Operators and parameters that nobody reads are removed.", edit)
