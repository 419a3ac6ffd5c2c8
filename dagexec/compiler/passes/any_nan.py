"""any-nan: operators of libraries may give a number for NaN, which saves looking for one; for who asks."""

from __future__ import annotations

from dagexec.compiler.passes.cudnn_engine import CUDNN
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.engine import ONEDNN
from dagexec.compiler.passes.rewriting import Pass


def edit(draft: Draft) -> None:
    """Argument nan="any" for the operators that name an engine of a library."""
    count = 0
    for number, definition in draft.operators():
        if definition.engine in (ONEDNN, CUDNN):
            draft.exchange(number, definition.changed(arguments={"nan": "any"}))
            count += 1
    if count:
        draft.changed(f"{count} operators may give a number for NaN")


ANY_NAN = Pass("any-nan", "when asked for: operators of libraries may give a number for NaN", edit)
