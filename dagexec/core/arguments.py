"""Arguments: typed reading of an OperatorDef's arguments, with errors that name the operator and the argument.

The rules are Caffe2's (a scalar read of a repeated argument is an error, an integer is never read from a float) with
one relaxation: a float may be given as an integer.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from dagexec.core.proto import Argument, NetDef, OperatorDef, TensorProto
from dagexec.errors import ArgumentError

T = TypeVar("T")
ArgumentValue = bool | int | float | str | bytes | NetDef | TensorProto | list[int] | list[float] | list[str]


class Arguments:
    """The arguments of one operator, by name. An absent argument gives the caller's default."""

    __slots__ = ("_args", "_owner", "_read")

    def __init__(self, definition: OperatorDef | NetDef, owner: str) -> None:
        """Raises ArgumentError when two arguments of one name differ. `owner` names the operator in messages."""
        self._owner = owner
        self._read: dict[Hashable, Any] = {}
        self._args: dict[str, Argument] = {arg.name: arg for arg in definition.arg}
        if len(self._args) < len(definition.arg):
            for arg in definition.arg:
                if (kept := self._args[arg.name]) is not arg and kept != arg:
                    raise ArgumentError(f"{owner}: argument {arg.name!r} is given twice with different values")

    def __contains__(self, name: str) -> builtins.bool:
        return name in self._args

    def names(self) -> list[str]:
        """The names of all arguments given."""
        return list(self._args)

    def int(self, name: str, default: builtins.int) -> builtins.int:
        """An integer."""
        arg = self._args.get(name)
        return default if arg is None else int(self._scalar(arg, "i", "an integer"))

    def bool(self, name: str, default: builtins.bool = False) -> builtins.bool:
        """An integer read as a truth value."""
        return bool(self.int(name, int(default)))

    def float(self, name: str, default: builtins.float) -> builtins.float:
        """A float; an integer is converted. NaN is refused."""
        arg = self._args.get(name)
        if arg is None:
            return default
        value = float(arg.i if arg.HasField("i") and not arg.HasField("f") else self._scalar(arg, "f", "a float"))
        if math.isnan(value):
            raise ArgumentError(f"{self._owner}: argument {name!r} is not a number")
        return value

    def string(self, name: str, default: str) -> str:
        """A string (bytes in the message, UTF-8)."""
        arg = self._args.get(name)
        if arg is None:
            return default
        return self._decode(name, bytes(self._scalar(arg, "s", "a string")))

    def net(self, name: str) -> NetDef | None:
        """A nested net, or None."""
        arg = self._args.get(name)
        return None if arg is None else self._scalar(arg, "n", "a net")

    def ints(self, name: str, default: list[builtins.int] | None = None) -> list[builtins.int]:
        """A list of integers."""
        arg = self._repeated(name, "ints", "integers")
        return list(default or []) if arg is None else list(arg.ints)

    def floats(self, name: str, default: list[builtins.float] | None = None) -> list[builtins.float]:
        """A list of floats; NaN stays, for fillers."""
        arg = self._args.get(name)
        if arg is not None and arg.ints and not arg.floats:
            return [float(value) for value in arg.ints]
        arg = self._repeated(name, "floats", "floats")
        return list(default or []) if arg is None else list(arg.floats)

    def strings(self, name: str, default: list[str] | None = None) -> list[str]:
        """A list of strings (UTF-8)."""
        arg = self._repeated(name, "strings", "strings")
        return list(default or []) if arg is None else [self._decode(name, value) for value in arg.strings]

    def raw(self, name: str) -> Argument | None:
        """The message itself, for arguments whose kind depends on another (fillers)."""
        return self._args.get(name)

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """What `read` makes of the arguments alone, under this `key`; it is called for the first who asks."""
        if key not in self._read:
            self._read[key] = read()
        found: T = self._read[key]
        return found

    def _decode(self, name: str, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ArgumentError(f"{self._owner}: argument {name!r} is not UTF-8 text: {value[:40]!r}") from None

    def _scalar(self, arg: Argument, field: str, kind: str) -> T:  # type: ignore[type-var]
        if not arg.HasField(field):
            raise ArgumentError(f"{self._owner}: argument {arg.name!r} must be {kind}; found {_kind(arg)}")
        value: T = getattr(arg, field)
        return value

    def _repeated(self, name: str, field: str, kind: str) -> Argument | None:
        arg = self._args.get(name)
        if arg is not None and not getattr(arg, field) and _kind(arg) != "nothing":
            raise ArgumentError(f"{self._owner}: argument {name!r} must be a list of {kind}; found {_kind(arg)}")
        return arg


def _kind(arg: Argument) -> str:
    kinds = {
        "i": "an integer", "f": "a float", "s": "a string", "n": "a net", "t": "a tensor", "ints": "a list of integers",
        "floats": "a list of floats", "strings": "a list of strings", "nets": "a list of nets",
        "tensors": "a list of tensors", "qtensors": "a list of quantized tensors",
    }  # fmt: skip
    for descriptor, _ in arg.ListFields():
        if descriptor.name in kinds:
            return kinds[descriptor.name]
    return "nothing"


def make_argument(name: str, value: ArgumentValue) -> Argument:
    """The Argument message for a Python value: int and bool to `i`, float to `f`, str and bytes to `s`, and lists.

    A list that mixes ints and floats becomes `floats`; an empty list becomes an argument with no values.
    Raises ArgumentError for any other type.
    """
    arg = Argument(name=name)
    if isinstance(value, bool | int):
        _check_int64(name, [int(value)])
        arg.i = int(value)
    elif isinstance(value, float):
        arg.f = value
    elif isinstance(value, str):
        arg.s = value.encode()
    elif isinstance(value, bytes):
        arg.s = value
    elif isinstance(value, NetDef):
        arg.n.CopyFrom(value)
    elif isinstance(value, TensorProto):
        arg.t.CopyFrom(value)
    elif isinstance(value, list | tuple):
        _fill_repeated(arg, list(value))
    else:
        raise ArgumentError(f"argument {name!r}: a {type(value).__name__} cannot be an operator argument")
    return arg


def _check_int64(name: str, values: list[int]) -> None:
    for value in values:
        if not -(1 << 63) <= value < 1 << 63:
            raise ArgumentError(f"argument {name!r}: {value} does not fit an int64")


def _fill_repeated(arg: Argument, values: list[object]) -> None:
    if all(isinstance(value, bool | int) for value in values):
        integers = [int(value) for value in values]  # type: ignore[call-overload]
        _check_int64(arg.name, integers)
        arg.ints.extend(integers)
    elif all(isinstance(value, int | float) for value in values):
        arg.floats.extend(float(value) for value in values)  # type: ignore[arg-type]
    elif all(isinstance(value, str | bytes) for value in values):
        arg.strings.extend(value.encode() if isinstance(value, str) else value for value in values)  # type: ignore[misc]
    else:
        raise ArgumentError(f"argument {arg.name!r}: a list must hold only ints, floats or strings; found {values[:4]}")
