"""Running one operator on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import CPU
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.scheduler.nets.simple import SimpleNet

Array = npt.NDArray[Any]


def run_operator(
    op_type: str, inputs: Sequence[npt.ArrayLike], outputs: int = 1, *, engine: str = "", **arguments: ArgumentValue
) -> list[Array]:
    """The outputs of one operator.

    It runs with all floats 1, then on the inputs, and on them again with rubbish in the outputs, so that a value that a
    run remembers shows: a memory plan may put other tensors there in between. Raises AssertionError when the second run
    gives other bytes, and what the operator raises.
    """
    names = [f"x{index}" for index in range(len(inputs))]
    definition = op(op_type, names, [f"y{index}" for index in range(outputs)], engine=engine, arg=arguments)
    workspace = Workspace()
    arrays = dict(zip(names, map(np.asarray, inputs), strict=True))
    for name, array in arrays.items():
        workspace.feed_blob(name, np.ones_like(array) if array.dtype.kind in "fV" else array)  # V: bfloat16
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
        for name, array in arrays.items():
            workspace.feed_blob(name, array)
        net.run()
        first = [workspace.fetch_blob(name).copy() for name in definition.output]
        for name in definition.output:
            tensor = workspace.get_blob(name).tensor()
            if tensor.device == CPU and not tensor.is_view:
                _spoil(tensor.array)
        net.run()
    again = [workspace.fetch_blob(name) for name in definition.output]
    for one, other in zip(first, again, strict=True):
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes() or one.dtype == object, "a second run gave other bytes"
    return again


def _spoil(array: Array) -> None:
    """Fill an array with rubbish, unless it holds what follows from shapes and no run writes it."""
    if not array.flags.writeable:
        return
    if array.dtype == object:
        array[...] = b"rubbish"
    elif array.size:
        array.reshape(-1).view(np.uint8)[...] = 0x5A
