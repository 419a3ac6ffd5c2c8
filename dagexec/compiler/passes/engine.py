"""Pass `engine`: operators that oneDNN can compute name its engine.

Where the library is absent nothing changes and NumPy computes. An engine that a def names already stays. What oneDNN
refuses when it is prepared, NumPy computes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.compiler.passes.types import keep_types
from dagexec.core.device import CPU
from dagexec.core.dtypes import FLOAT64
from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.core.program import Program
from dagexec.core.registry import has_engine, schema_of
from dagexec.ops.onednn.binding import library
from dagexec.platform.processor import last_level_cache

ONEDNN = "ONEDNN"


def assign_engine(model: Model) -> Rewritten:
    """`model` with engine ONEDNN on the operators that have it, if the library is there.

    Nets on float64 inputs, and operators with parameters of float64, are left to NumPy. Convolutions and products of a
    net whose parameters stay in the processor's cache from run to run are told so, for the choice of implementations.
    """
    if library() is None or any(info.dtype is FLOAT64 for info in model.inputs.values()):
        return Rewritten(model)
    program = model.program
    stays_in_cache = sum(array.nbytes for array in model.parameters.values()) <= last_level_cache() // 2
    changed: Counter[str] = Counter()
    operators = list(program.op)
    for index, definition in enumerate(operators):
        if definition.engine or not _suits(definition, program, model):
            continue
        cached = stays_in_cache and schema_of(definition.type).has_weights
        arguments = {"cold_weights": 0} if cached and "cold_weights" not in definition.values else None
        operators[index] = definition.changed(engine=ONEDNN, arguments=arguments)
        changed[definition.type] += 1
    if not changed:
        return Rewritten(model)
    rewritten = model.changed(net=program.with_operators(operators))
    keep_types(model, rewritten)
    return Rewritten(rewritten, tuple(f"{count} {kind} by oneDNN" for kind, count in sorted(changed.items())))


def _suits(definition: Node, program: Program, model: Model) -> bool:
    if program.device_of(definition) != CPU or not has_engine(definition.type, ONEDNN):
        return False
    return all(model.parameters[name].dtype != np.float64 for name in definition.input if name in model.parameters)


ENGINE = Pass("engine", "operators that oneDNN can compute name its engine", assign_engine)
