"""Weights in a Caffe2 init net: large lists of its fillers, read straight into arrays and left out of the message.

A list of floats takes five bytes of the file for each, four of the message, and many times that as Python's numbers.
Only lists that are certainly weights are left out; fillers compute, or refuse, all others.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from dagexec.core.node import node_of
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import ArgumentError, ModelFormatError
from dagexec.platform.disk import disk
from dagexec.platform.host_memory import unshared_bytes
from dagexec.storage.net_file import load_net, parse_message
from dagexec.storage.wire import LENGTH, WireError
from dagexec.storage.wire_file import WireFile

Array = npt.NDArray[Any]

_MIN_FILE = 1 << 18  # bytes
_MIN_DATA = 1 << 12
_AT_ONCE = 5 << 16

_FILLER = b"GivenTensorFill"
_OP, _OUTPUT, _TYPE, _ARGUMENT = 2, 2, 4, 5  # of NetDef and OperatorDef
_NAMED_VALUES = b"\x0a\x06values"  # an argument's name, its first field
_FLOAT = 0x2D  # the byte before each of an argument's floats


def load_init_net(path: Path) -> tuple[NetDef, dict[str, Array]]:
    """The net in a file without its fillers of weights, and the weights that they would have made.

    Raises what `load_net` does, and ModelFormatError for a file that changes meanwhile.
    """
    if path.suffix == ".pb" and path.stat().st_size >= _MIN_FILE:
        before = _state(path)
        try:
            net, weights = _divided(path)
        except (OSError, ValueError, WireError, DecodeError, ArgumentError, ModelFormatError):
            weights = {}  # the library says what is wrong
        if before != _state(path):
            raise ModelFormatError(f"{path}: it changed while it was read; load it again")
        if weights:
            return net, weights
    return load_net(path), {}


def _state(path: Path) -> tuple[int, ...]:
    """Identifies the content of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _divided(path: Path) -> tuple[NetDef, dict[str, Array]]:
    with disk().open(path, "rb") as file:
        content, weights = _without_weights(WireFile(file.fileno(), path.stat().st_size), str(path))
    net = parse_message(content, NetDef, str(path)) if weights else NetDef()
    if not weights.keys().isdisjoint(name for operator in net.op for name in operator.output):
        raise WireError("a weight is written by another operator as well")
    return net, weights


def _without_weights(source: WireFile, path: str) -> tuple[bytes, dict[str, Array]]:
    parts: list[bytes] = []
    weights: dict[str, Array] = {}
    copied = 0
    for number, kind, start, begin, end in source.fields(0, source.size):
        if number != _OP or kind != LENGTH or end - begin < _MIN_DATA:
            continue
        weight = _weight(source, begin, end, path)
        if weight is not None:
            if weight[0] in weights:
                raise WireError("a weight is given twice")
            weights[weight[0]] = weight[1]
            parts.append(source.read(copied, start))
            copied = end
    return b"".join([*parts, source.read(copied, source.size)]), weights


def _weight(source: WireFile, begin: int, end: int, path: str) -> tuple[str, Array] | None:
    """The blob that an operator fills, and its values; None for anything but a filler of listed floats."""
    fields = source.fields(begin, end)
    types = [source.read(first, stop) for number, _, _, first, stop in fields if number == _TYPE]
    large = [field for field in fields if field[0] == _ARGUMENT and field[4] - field[3] >= _MIN_DATA]
    if types != [_FILLER] or len(large) != 1:
        return None
    _, _, start, first, stop = large[0]
    behind = first + len(_NAMED_VALUES)
    count, rest = divmod(stop - behind, 5)
    if rest or source.read(first, behind) != _NAMED_VALUES:
        return None
    node = node_of(OperatorDef.FromString(source.read(begin, start) + source.read(stop, end)))
    arguments = node.arguments()
    is_plain = not node.input and len(node.output) == 1 and node.device_option is None and not node.engine
    if not is_plain or arguments.names() != ["shape"]:
        return None
    shape = arguments.ints("shape")
    if math.prod(shape) != count or min(shape, default=0) < 0:
        return None
    values = unshared_bytes(4 * count, f"{path}: weight {node.output[0]!r}").reshape(count, 4)
    for place in range(0, 5 * count, _AT_ONCE):
        piece = source.read(behind + place, min(behind + place + _AT_ONCE, stop))
        records = np.frombuffer(piece, np.uint8).reshape(-1, 5)
        if np.any(records[:, 0] != _FLOAT):
            return None
        values[place // 5 : place // 5 + len(records)] = records[:, 1:]
    array = values.reshape(-1).view("<f4").astype(np.float32, copy=False).reshape(shape)
    array.flags.writeable = False
    return node.output[0], array
