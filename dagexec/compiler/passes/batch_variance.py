"""batch-variance: the bytes of a row may depend on its batch, which saves what keeps them the same; for who asks."""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass

_ARGUMENT = "batch_invariant"


def edit(draft: Draft) -> None:
    """Argument batch_invariant=0 for every operator that does not have it."""
    count = 0
    for number, definition in draft.operators():
        if _ARGUMENT not in definition.values:
            draft.exchange(number, definition.changed(arguments={_ARGUMENT: 0}))
            count += 1
    if count:
        draft.changed(f"{count} operators may give a row other bytes in other batches")


BATCH_VARIANCE = Pass("batch-variance", "when asked for: the bytes of a row may depend on its batch", edit)
