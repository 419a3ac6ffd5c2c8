"""Running one operator on arrays, for the tests of what operators compute."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.arguments import ArgumentValue, make_argument
from dagexec.core.device import Device
from dagexec.scheduler.simple import SimpleNet

Array = npt.NDArray[Any]

SIM = Device("sim", 0)
ON_DEVICE_EVERY = int(os.environ.get("DAGEXEC_ON_DEVICE_EVERY", "4"))
"""Of the calls of `run_operator`, one in so many runs its operator on the simulated device, too."""

_calls = itertools.count()


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

    It runs with all floats 1, then on the inputs, and on them again with rubbish in the outputs, so that a value that a
    run remembers shows: a memory plan may put other tensors there in between. Now and then it runs on the simulated
    device, too, which must give the same bytes.
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
            if not workspace.get_blob(name).tensor().is_view:
                _spoil(workspace.get_blob(name).tensor().array)
        net.run()
    again = [workspace.fetch_blob(name) for name in definition.output]
    for one, other in zip(first, again, strict=True):
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes() or one.dtype == object, "a second run gave other bytes"
    if next(_calls) % ON_DEVICE_EVERY == 0 and not any(array.dtype == object for array in (*arrays.values(), *again)):
        for one, other in zip(again, _on_device(definition, arrays), strict=True):
            assert (one.shape, one.tobytes()) == (other.shape, other.tobytes()), "the simulated device gave other bytes"
    return again


def _spoil(array: Array) -> None:
    """Fill an array with rubbish."""
    if array.dtype == object:
        array[...] = b"rubbish"
    elif array.size:
        array.reshape(-1).view(np.uint8)[...] = 0x5A


def _on_device(definition: OperatorDef, arrays: dict[str, Array]) -> list[Array]:
    """The outputs of the operator on the simulated device; the net copies its inputs there."""
    placed = OperatorDef()
    placed.CopyFrom(definition)
    placed.device_option.CopyFrom(SIM.to_option())
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    logging.disable()  # tests read what is logged for the host
    try:
        with SimpleNet(NetDef(name="test", op=[placed]), workspace) as net:
            net.run()
            return [workspace.fetch_blob(name) for name in definition.output]
    finally:
        logging.disable(logging.NOTSET)
