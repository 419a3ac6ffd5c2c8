"""Reading and writing NetDefs and other messages as files, binary or text; and tensors as TensorProtos.

Fields that dagexec does not know survive a binary round trip. Files are written under a temporary name and renamed, so
that a reader never sees half of one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from dagexec.core.proto import NetDef, PlanDef, missing_fields
from dagexec.errors import ModelFormatError
from dagexec.platform.disk import reading
from dagexec.platform.files import reason, write_atomically

M = TypeVar("M", bound=Message)

TEXT_SUFFIXES = (".pbtxt", ".prototxt", ".txt")


def load_net(path: str | os.PathLike[str]) -> NetDef:
    """Read a NetDef file, such as Caffe2's init_net.pb and predict_net.pb.

    A name that ends with .pbtxt, .prototxt or .txt means text format, any other name binary. Raises ModelFormatError if
    the file cannot be read or is not a NetDef.
    """
    net = load_message(path, NetDef)
    if not net.op and not net.name and not net.external_input and Path(path).stat().st_size:
        raise ModelFormatError(f"{path}: not a NetDef: it has no operators, no name and no external inputs")
    return net


def load_plan(path: str | os.PathLike[str]) -> PlanDef | None:
    """Read a plan of Caffe2, named as for `load_net`; None for a file that is something else, such as a NetDef."""
    try:
        plan = load_message(path, PlanDef)
    except ModelFormatError:
        return None
    return plan if plan.execution_step and not len(UnknownFieldSet(plan)) else None


def save_net(net: NetDef, path: str | os.PathLike[str]) -> None:
    """Write a NetDef atomically, in the format that its name implies (see `load_net`). Raises OutputError, and
    ModelFormatError for a message that has no such form."""
    save_message(net, path)


def load_message(path: str | os.PathLike[str], kind: type[M]) -> M:
    """Read one message of `kind` from a file. Raises ModelFormatError with the path and what is wrong."""
    try:
        with reading(path, regular=False) as file:  # or a pipe
            content = file.read()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ModelFormatError(f"{path}: cannot be read: {reason(error)}") from None
    return parse_message(content, kind, str(path), text=Path(path).suffix in TEXT_SUFFIXES)


def parse_message(content: bytes, kind: type[M], source: str, *, text: bool = False) -> M:
    """Parse `content` as a message of `kind`; `source` names it in errors. Raises ModelFormatError."""
    message = kind()
    name = kind.DESCRIPTOR.name
    try:
        if text:
            text_format.Parse(content.decode(), message)
        else:
            is_strict = _is_strict(content, kind)
            message.ParseFromString(content)
            if not is_strict:
                _check_strings(message)
        if missing := missing_fields(message):
            raise DecodeError(f"required fields are missing: {missing}")
    except (DecodeError, text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFormatError(f"{source}: not a {name} ({len(content)} bytes): {error}") from None
    return message


@functools.cache
def _strict(kind: Descriptor) -> type[Message]:
    """Messages of the fields of `kind` in protobuf's third syntax, whose parser refuses strings that are not UTF-8.

    The second, in which NetDefs and ONNX models are written, accepts them and returns bytes.
    """
    file = FileDescriptorProto()
    kind.file.CopyToProto(file)
    file.syntax = "proto3"
    del file.enum_type[:]
    _modernize(file.message_type)
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(kind.full_name))


def _modernize(messages: Iterable[DescriptorProto]) -> None:
    """Remove what the third syntax lacks: defaults, required fields, enumerations."""
    for message in messages:
        del message.enum_type[:]
        for field in message.field:
            field.ClearField("default_value")
            field.label = field.LABEL_REPEATED if field.label == field.LABEL_REPEATED else field.LABEL_OPTIONAL
            if field.type == field.TYPE_ENUM:
                field.type = field.TYPE_INT32
                field.ClearField("type_name")
        _modernize(message.nested_type)


def _is_strict(content: bytes, kind: type[Message]) -> bool:
    try:
        _strict(kind.DESCRIPTOR).FromString(content)
    except DecodeError:
        return False
    return True


def _check_strings(message: Message) -> None:
    """Raise DecodeError for the first string that is not UTF-8."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in values:
                _check_strings(part)
        elif field.type == FieldDescriptor.TYPE_STRING:
            for part in values:
                if isinstance(part, bytes):
                    raise DecodeError(f"the string {field.full_name} is not UTF-8: {part[:40]!r}")


def save_message(message: Message, path: str | os.PathLike[str]) -> None:
    """Write a message to a file atomically, as text or binary by its name. Raises what `save_net` raises."""
    try:
        if Path(path).suffix in TEXT_SUFFIXES:
            content = text_format.MessageToString(message, print_unknown_fields=False).encode()
        else:
            content = message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelFormatError(f"{path}: the message cannot be written: {error}") from None
    write_atomically(Path(path), content)
