"""op: an OperatorDef from Python values.

    op("Conv", ["x", "w"], ["y"], kernel=3, engine="ONEDNN")

The kind of an argument follows from its value: `kernel=3` is an integer, `alpha=3.0` a float, and an operator that
wants a float takes an integer, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue, make_argument
from dagexec.core.device import Device
from dagexec.core.proto import Argument, DeviceOption, NetDef, OperatorDef
from dagexec.errors import ArgumentError

OpValue = ArgumentValue | Sequence[NetDef] | npt.NDArray[Any] | np.generic | None
"""What `op` takes for an argument."""

Names = str | Sequence[str]


def op(
    op_type: str,
    inputs: Names = (),
    outputs: Names = (),
    *,
    name: str = "",
    engine: str = "",
    device_option: str | Device | DeviceOption | None = None,
    control_input: Names = (),
    arg: Mapping[str, OpValue] | None = None,
    **arguments: OpValue,
) -> OperatorDef:
    """Create an operator of a net, without spelling out protobuf messages.

        net = NetDef(name="n", op=[dagexec.op("Conv", ["x", "w"], ["y"], kernel=3), dagexec.op("Relu", "y", "y")])

    Args:
        op_type: the name that `dagexec operators` lists.
        inputs, outputs: blobs, in order; a string is one blob.
        name: a name for messages and traces.
        engine: the implementations to try, separated by commas.
        device_option: a device such as "cuda:0", a Device, or the message; by default the net's own.
        control_input: blobs that must be computed before the operator runs, but that it does not read.
        arg: further arguments, whose names are parameters of this function: `arg={"name": "x"}`.
        arguments: numbers, strings, bytes, nets, tensors (TensorProto), and lists of numbers, strings or nets. NumPy
            scalars count as numbers, and an array as the list of its elements. None omits an argument.

    The schema is checked when a net is created from it. Raises ArgumentError for a value that no argument can hold, for
    a name given twice and for blobs that are not strings; DeviceError for a device that does not exist.
    """
    twice = sorted(set(arg or {}) & set(arguments))
    if twice:
        raise ArgumentError(f"{op_type}: argument {twice[0]!r} is given twice")
    made = OperatorDef(type=op_type)
    for field, blobs in (("input", inputs), ("output", outputs), ("control_input", control_input)):
        getattr(made, field).extend(_names(op_type, field, blobs))
    if name:
        made.name = name
    if engine:
        made.engine = engine
    if device_option is not None:
        made.device_option.CopyFrom(_option(device_option))
    for key, value in {**(arg or {}), **arguments}.items():
        if value is not None:
            made.arg.append(_argument(op_type, key, value))
    return made


def _names(op_type: str, field: str, blobs: Names) -> list[str]:
    names = [blobs] if isinstance(blobs, str) else list(blobs)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"{op_type}: expected the name of a blob as {field}, found {name!r:.60}")
    return names


def _option(device: str | Device | DeviceOption) -> DeviceOption:
    if isinstance(device, DeviceOption):
        return device
    return (Device.parse(device) if isinstance(device, str) else device).to_option()


def _argument(op_type: str, name: str, value: Any) -> Argument:
    plain = value.ravel().tolist() if isinstance(value, np.ndarray) else value
    if isinstance(plain, np.generic):
        plain = plain.item()
    if isinstance(plain, list | tuple):
        kinds = set(map(type, plain))
        if any(issubclass(kind, np.generic) for kind in kinds):
            plain = [item.item() if isinstance(item, np.generic) else item for item in plain]
        if kinds == {NetDef}:
            return Argument(name=name, nets=plain)
    try:
        return make_argument(name, plain)
    except ArgumentError as error:
        raise ArgumentError(f"{op_type}: {error}") from None
