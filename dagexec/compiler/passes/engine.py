"""Pass `engine`: operators that oneDNN can compute name its engine.

Where the library is absent nothing changes and NumPy computes. An engine that a def names already stays. What oneDNN
refuses when it is prepared, NumPy computes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from dagexec.compiler.passes.rewriting import Pass, Rewritten
from dagexec.compiler.passes.types import keep_types
from dagexec.core.arguments import make_argument
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import FLOAT64
from dagexec.core.model import Model
from dagexec.core.proto import NetDef, OperatorDef
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
    net = NetDef()
    net.CopyFrom(model.net)
    stays_in_cache = sum(array.nbytes for array in model.parameters.values()) <= last_level_cache() // 2
    changed: Counter[str] = Counter()
    for definition in net.op:
        if definition.engine or not _suits(definition, net, model):
            continue
        definition.engine = ONEDNN
        if stays_in_cache and schema_of(definition.type).has_weights:
            definition.arg.append(make_argument("cold_weights", 0))
        changed[definition.type] += 1
    if not changed:
        return Rewritten(model)
    rewritten = replace(model, net=net)
    keep_types(model, rewritten)
    return Rewritten(rewritten, tuple(f"{count} {kind} by oneDNN" for kind, count in sorted(changed.items())))


def _suits(definition: OperatorDef, net: NetDef, model: Model) -> bool:
    option = definition.device_option if definition.HasField("device_option") else net.device_option
    if Device.from_option(option) != CPU or not has_engine(definition.type, ONEDNN):
        return False
    return all(model.parameters[name].dtype != np.float64 for name in definition.input if name in model.parameters)


ENGINE = Pass("engine", "operators that oneDNN can compute name its engine", assign_engine)
