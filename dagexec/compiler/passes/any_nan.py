"""any-nan: operators of libraries may give a number for NaN, which saves looking for one; for who asks."""

from __future__ import annotations

from dagexec.compiler.passes.cudnn_engine import CUDNN
from dagexec.compiler.passes.engine import ONEDNN
from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.core.model import Model


def apply(model: Model) -> Rewritten:
    """`model` with argument nan="any" on the operators that name an engine of a library."""
    program = model.program
    count = sum(one.engine in (ONEDNN, CUDNN) for one in program.op)
    if not count:
        return Rewritten(model)
    operators = (one.changed(arguments={"nan": "any"}) if one.engine in (ONEDNN, CUDNN) else one for one in program.op)
    rewritten = model.changed(net=program.with_operators(operators))
    return Rewritten(rewritten, (f"{count} operators may give a number for NaN",))


ANY_NAN = Pass("any-nan", "when asked for: operators of libraries may give a number for NaN", apply)
