"""Reading and writing NetDefs and other messages as files, binary or text; and tensors as TensorProtos.

Fields that dagexec does not know survive a binary round trip. Files are written to a temporary name and renamed, so a
reader never sees half of one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from dagexec.core.proto import NetDef, missing_fields
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
            message.ParseFromString(content)
            _check_strings(message)
        if missing := missing_fields(message):
            raise DecodeError(f"required fields are missing: {missing}")
    except (DecodeError, text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFormatError(f"{source}: not a {name} ({len(content)} bytes): {error}") from None
    return message


_SKIPPED, _TEXT, _TEXTS, _MESSAGE, _MESSAGES = range(5)


def _check_strings(message: Message) -> None:
    """Raise DecodeError for a string that is not UTF-8, which the parser lets pass and hands out as bytes."""
    for field, value in _fields(message):
        kind = _kind(field)
        if kind == _MESSAGES:
            for part in value:
                _check_strings(part)
        elif kind == _MESSAGE:
            _check_strings(value)
        elif (kind == _TEXT and isinstance(value, bytes)) or (kind == _TEXTS and bytes in map(type, value)):
            wrong = value if kind == _TEXT else next(part for part in value if isinstance(part, bytes))
            raise DecodeError(f"the string {field.full_name} is not UTF-8: {wrong[:40]!r}")


def _fields(message: Message) -> Sequence[tuple[FieldDescriptor, Any]]:
    """The fields that are set; of a tensor only those with text: `ListFields` copies weights."""
    kind = message.DESCRIPTOR
    if kind.name != "TensorProto":
        return message.ListFields()
    text = ((field, field.name) for field in _text_fields(kind))
    return [(field, getattr(message, name)) for field, name in text if field.is_repeated or message.HasField(name)]


@functools.cache
def _text_fields(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    return tuple(field for field in kind.fields if _kind(field) != _SKIPPED)


@functools.cache
def _kind(field: FieldDescriptor) -> int:
    if field.type == FieldDescriptor.TYPE_STRING:
        return _TEXTS if field.is_repeated else _TEXT
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _MESSAGES if field.is_repeated else _MESSAGE
    return _SKIPPED


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
