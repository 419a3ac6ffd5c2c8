"""Pass `engine`: operators that oneDNN or our own kernels can compute name their engine.

Where neither can run nothing changes and NumPy computes. An engine that a def names already stays. What the engine
refuses when it is prepared, NumPy computes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.dtypes import FLOAT64
from dagexec.core.registry import has_engine, schema_of
from dagexec.core.schema import OpSchema
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.platform.processor import last_level_cache

ONEDNN = "ONEDNN"


def assign_engine(draft: Draft) -> None:
    """Engine ONEDNN for the operators that have it, if the library is there, or our own kernels run.

    Nets on float64 inputs, and operators with parameters of float64, are left to NumPy. Convolutions and products of a
    net whose parameters stay in the processor's cache from run to run are told so, for the choice of implementations.
    """
    model = draft.model
    found = engine_library()
    if found is None or any(info.dtype is FLOAT64 for info in model.inputs.values()):
        return
    stays_in_cache = sum(array.nbytes for array in model.parameters.values()) <= last_level_cache() // 2
    doubles = {name for name, array in draft.parameters.items() if array.dtype == np.float64}
    changed: Counter[str] = Counter()
    for number in draft.having(_has_onednn):
        definition = draft[number]
        if definition.engine or not draft.is_on_host(number) or not doubles.isdisjoint(definition.input):
            continue
        cached = stays_in_cache and schema_of(definition.type).has_weights
        arguments = {"cold_weights": 0} if cached and "cold_weights" not in definition.values else None
        draft.exchange(number, definition.changed(engine=ONEDNN, arguments=arguments))
        changed[definition.type] += 1
    who = "oneDNN" if found.has_primitives else "our own kernels"
    for kind, count in sorted(changed.items()):
        draft.changed(f"{count} {kind} by {who}")


def _has_onednn(schema: OpSchema) -> bool:
    return has_engine(schema.type, ONEDNN)


ENGINE = Pass(
    "engine", "operators that oneDNN can compute name its engine", assign_engine, needs=(_has_onednn,), keeps_types=True
)
