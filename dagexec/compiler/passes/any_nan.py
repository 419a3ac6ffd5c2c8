"""any-nan: operators of libraries may give a number for NaN, which saves looking for one; for who asks."""

from __future__ import annotations

from dataclasses import replace

from dagexec.compiler.passes.cudnn_engine import CUDNN
from dagexec.compiler.passes.engine import ONEDNN
from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.core.arguments import make_argument
from dagexec.core.model import Model
from dagexec.core.proto import NetDef


def apply(model: Model) -> Rewritten:
    """`model` with argument nan="any" on the operators that name an engine of a library."""
    net = NetDef()
    net.CopyFrom(model.net)
    chosen = [definition for definition in net.op if definition.engine in (ONEDNN, CUDNN)]
    for definition in chosen:
        definition.arg.append(make_argument("nan", "any"))
    if not chosen:
        return Rewritten(model)
    return Rewritten(replace(model, net=net), (f"{len(chosen)} operators may give a number for NaN",))


ANY_NAN = Pass("any-nan", "when asked for: operators of libraries may give a number for NaN", apply)
