"""batch-variance: the bytes of a row may depend on its batch, which saves what keeps them the same; for who asks."""

from __future__ import annotations

from dataclasses import replace

from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.core.arguments import make_argument
from dagexec.core.model import Model
from dagexec.core.proto import NetDef

_ARGUMENT = "batch_invariant"


def apply(model: Model) -> Rewritten:
    """`model` with argument batch_invariant=0 on every operator that does not have it."""
    net = NetDef()
    net.CopyFrom(model.net)
    chosen = [definition for definition in net.op if all(one.name != _ARGUMENT for one in definition.arg)]
    for definition in chosen:
        definition.arg.append(make_argument(_ARGUMENT, 0))
    if not chosen:
        return Rewritten(model)
    return Rewritten(replace(model, net=net), (f"{len(chosen)} operators may give a row other bytes in other batches",))


BATCH_VARIANCE = Pass("batch-variance", "when asked for: the bytes of a row may depend on its batch", apply)
