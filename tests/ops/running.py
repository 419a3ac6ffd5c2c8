"""Running one operator on arrays, for the tests of what operators compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue, make_argument
from dagexec.scheduler.simple import SimpleNet

Array = npt.NDArray[Any]


def operator_def(op_type: str, inputs: list[str], outputs: list[str], **arguments: ArgumentValue) -> OperatorDef:
    """An OperatorDef from Python values."""
    definition = OperatorDef(type=op_type, input=inputs, output=outputs)
    definition.arg.extend(make_argument(name, value) for name, value in arguments.items())
    return definition


def _is_float(value: Array) -> bool:
    return value.dtype.kind in "fV"  # bfloat16 is of kind V


def run_operator(
    op_type: str, inputs: list[npt.ArrayLike], outputs: int = 1, *, engine: str = "", **arguments: ArgumentValue
) -> list[Array]:
    """The outputs of one operator.

    It runs with all floats 1, then on the inputs, and on them again with cleared outputs, so that a value that a run
    remembers shows.
    """
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    definition.engine = engine
    workspace = Workspace()
    arrays = dict(zip(names, map(np.asarray, inputs), strict=True))
    for name, array in arrays.items():
        workspace.feed_blob(name, np.ones_like(array) if _is_float(array) else array)
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
        for name, array in arrays.items():
            workspace.feed_blob(name, array)
        net.run()
        first = [workspace.fetch_blob(name).copy() for name in definition.output]
        for name in definition.output:
            array = workspace.get_blob(name).tensor().array
            if not workspace.get_blob(name).tensor().is_view:
                array[...] = array.dtype.type(0)
        net.run()
    again = [workspace.fetch_blob(name) for name in definition.output]
    for one, other in zip(first, again, strict=True):
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes() or one.dtype == object, "a second run gave other bytes"
    return again
