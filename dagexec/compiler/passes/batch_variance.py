"""batch-variance: the bytes of a row may depend on its batch, which saves what keeps them the same; for who asks."""

from __future__ import annotations

from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.core.model import Model

_ARGUMENT = "batch_invariant"


def apply(model: Model) -> Rewritten:
    """`model` with argument batch_invariant=0 on every operator that does not have it."""
    program = model.program
    count = sum(_ARGUMENT not in one.values for one in program.op)
    if not count:
        return Rewritten(model)
    operators = (one if _ARGUMENT in one.values else one.changed(arguments={_ARGUMENT: 0}) for one in program.op)
    rewritten = model.changed(net=program.with_operators(operators))
    return Rewritten(rewritten, (f"{count} operators may give a row other bytes in other batches",))


BATCH_VARIANCE = Pass("batch-variance", "when asked for: the bytes of a row may depend on its batch", apply)
