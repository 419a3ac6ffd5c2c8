"""Operators and devices as messages, made from Python values in the scopes that are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from dagexec.caffe2 import scope
from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.caffe2.references import BlobReference, as_references
from dagexec.core.operator_def import op
from dagexec.core.proto import Argument, DeviceOption, NetDef, OperatorDef, TensorProto
from dagexec.export.caffe2 import filler


def make_device_option(
    device_type: int,
    device_id: int = 0,
    random_seed: int | None = None,
    node_name: str | None = None,
    numa_node_id: int | None = None,
    extra_info: Sequence[str] | None = None,
) -> DeviceOption:
    """A device by the number of its kind, such as `caffe2_pb2.CUDA`, and its index."""
    option = DeviceOption(device_type=device_type, device_id=device_id)
    if node_name is not None:
        option.node_name = node_name
    if random_seed is not None:
        option.random_seed = random_seed
    if numa_node_id is not None:
        option.numa_node_id = numa_node_id
    option.extra_info.extend(extra_info or ())
    return option


def CreateOperator(
    operator_type: str,
    inputs: Any,
    outputs: Any,
    name: str = "",
    control_input: Any = None,
    device_option: DeviceOption | None = None,
    arg: Any = None,
    engine: str | None = None,
    **kwargs: Any,
) -> OperatorDef:
    """The message of an operator. Names given as text are in the name scope that is open.

    It runs on `device_option`, by default on the device of the scope that is open. `arg` are Argument messages, or a
    dictionary of further arguments. Raises TypeError for what is no name, ArgumentError for what no argument can hold.
    """
    seed = kwargs.pop("random_seed", None)
    messages = [] if arg is None or isinstance(arg, dict) else [arg] if isinstance(arg, Argument) else list(arg)
    arguments = {**(arg if isinstance(arg, dict) else {}), **kwargs}
    made = op(
        operator_type,
        [str(blob) for blob in as_references(inputs)],
        [str(blob) for blob in as_references(outputs)],
        name=name,
        engine=engine or "",
        device_option=device_option if device_option is not None else scope.CurrentDeviceScope(),
        control_input=[str(blob) for blob in as_references(control_input)],
        arg={key: plain(value) for key, value in arguments.items()},
    )
    made.arg.extend(messages)
    if seed is not None:
        made.device_option.random_seed = seed
    return made


def given_tensor(name: Any, array: npt.NDArray[Any]) -> OperatorDef:
    """The operator that fills a blob with an array. Raises Caffe2Error for elements of other types."""
    with failing_as_caffe2(f"blob {str(name)!r}"):
        made = filler(str(name), array)
    device = scope.CurrentDeviceScope()
    if device is not None:
        made.device_option.CopyFrom(device)
    return made


def plain(value: Any) -> Any:
    """The value of an argument without the classes of this package: nets as messages, blobs as names."""
    if isinstance(value, BlobReference):
        return str(value)
    if isinstance(value, NetDef | TensorProto):
        return value
    if isinstance(value, Message):
        return value.SerializeToString()
    if hasattr(value, "Proto"):
        return value.Proto()
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value
