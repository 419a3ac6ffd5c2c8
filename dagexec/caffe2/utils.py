"""Tensors and arguments between messages and Python values: the part of `caffe2.python.utils` that scripts call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from dagexec.caffe2.creation import plain
from dagexec.core.operator_def import op
from dagexec.core.proto import Argument, TensorProto
from dagexec.errors import Caffe2Error
from dagexec.platform.files import write_atomically
from dagexec.storage.tensor_proto import decode_tensor, encode_tensor

__all__ = [
    "NCHW2NHWC",
    "NHWC2NCHW",
    "ArgsToDict",
    "Caffe2TensorToNumpyArray",
    "ConvertProtoToBinary",
    "EnumClassKeyVals",
    "GetContentFromProto",
    "MakeArgument",
    "NumpyArrayToCaffe2Tensor",
    "TryReadProtoWithClass",
]

Array = npt.NDArray[Any]
M = TypeVar("M", bound=Message)


def NumpyArrayToCaffe2Tensor(arr: npt.ArrayLike, name: str | None = None) -> TensorProto:
    """An array, or a number, as a TensorProto."""
    tensor = TensorProto.FromString(encode_tensor(name or "", np.asarray(arr)))
    if name is None:
        tensor.ClearField("name")
    return tensor


def Caffe2TensorToNumpyArray(tensor: TensorProto) -> Array:
    """The values of a TensorProto."""
    content = tensor.SerializeToString()
    most = 8 * max(len(content), int(np.prod(tensor.dims, dtype=np.int64)))
    segment = decode_tensor(memoryview(content), most)
    return segment.values.reshape(tuple(tensor.dims))


def MakeArgument(key: str, value: Any) -> Argument:
    """A Python value as an argument. Raises ArgumentError for one that no argument can hold."""
    return op("", arg={key: plain(value)}).arg[0]


def ArgsToDict(args: Iterable[Argument]) -> dict[str, Any]:
    """Arguments as Python values, by name."""
    found = {}
    for argument in args:
        fields = [value for field, value in argument.ListFields() if field.name != "name"]
        value = fields[0] if fields else []
        found[argument.name] = value if isinstance(value, int | float | bytes | Message) else list(value)
    return found


def NCHW2NHWC(tensor: Array) -> Array:
    """Channels from the second axis to the last."""
    return np.moveaxis(tensor, 1, -1)


def NHWC2NCHW(tensor: Array) -> Array:
    """Channels from the last axis to the second."""
    return np.moveaxis(tensor, -1, 1)


def TryReadProtoWithClass(cls: type[M], s: str | bytes) -> M:
    """The message in `s`, written as text or binary. Raises Caffe2Error where it is neither."""
    content = s.encode() if isinstance(s, str) else s
    try:
        return text_format.Parse(content.decode(), cls())
    except (text_format.ParseError, UnicodeDecodeError):
        pass
    try:
        return cls.FromString(content)
    except DecodeError as error:
        raise Caffe2Error(f"not a {cls.__name__}, neither as text nor binary: {error}") from None


def GetContentFromProto(proto: Any, function_map: Any) -> Any:
    """What the function of the message's class in `function_map` says of it; None where there is none."""
    return next((function(proto) for cls, function in function_map.items() if type(proto) is cls), None)


def ConvertProtoToBinary(proto_class: type[Message], filename: str, out_filename: str) -> None:
    """Write the message in a file of text or binary to another one, binary."""
    with open(filename, "rb") as source:
        message = TryReadProtoWithClass(proto_class, source.read())
    write_atomically(Path(out_filename), message.SerializeToString())


def EnumClassKeyVals(cls: type) -> dict[str, Any]:
    """The public constants of a class, by name."""
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and isinstance(value, int)}
