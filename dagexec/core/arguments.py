"""Arguments of operators: their values, as plain Python ones, and typed reading with errors that name the operator.

The rules are Caffe2's (a scalar read of a repeated argument is an error, an integer is never read from a float) with
one relaxation: a float may be given as an integer.
"""

from __future__ import annotations

import builtins
import marshal
import math
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from dagexec.core.proto import Argument, NetDef, TensorProto
from dagexec.errors import ArgumentError

T = TypeVar("T")
ArgumentValue = bool | int | float | str | bytes | NetDef | TensorProto | list[int] | list[float] | list[str]

Value = int | float | bytes | NetDef | TensorProto | tuple[Any, ...] | Mapping[str, Any]
"""The value of an argument: a number, text, a net, a tensor, or several of one kind. Never change nets and tensors.

A message may give an argument values of several kinds: then it is a mapping by the field of the message.
"""

_WITHOUT_REFERENCES = 2  # marshal's version in which equal values are the same bytes, whoever else holds them


class Values(dict[str, Value]):
    """The arguments of an operator by name; never changed. Operators of equal arguments share one object.

    A dictionary, since nothing else of a net is read as often.

    Attributes:
        key: equal for equal arguments.
    """

    __slots__ = ("__weakref__", "_read", "key")

    def __init__(self, by_name: Mapping[str, Value], key: Hashable) -> None:
        super().__init__(by_name)
        self._read: dict[Hashable, Any] = {}
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and self.key == other.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]  # that of a dictionary is None
        return hash(self.key)

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """The result of `read`, which depends on the arguments alone; cached under `key`."""
        read_before = self._read
        if key not in read_before:
            read_before[key] = read()
        return cast(T, read_before[key])

    def changed(self, added: Mapping[str, Value | None]) -> Values:
        """These arguments with others; None removes one. Values are as `value_of` makes them."""
        by_name = {**self, **added}
        return shared({name: value for name, value in by_name.items() if value is not None})

    def messages(self) -> list[Argument]:
        """The arguments as messages, sorted by name: operators that share them may have had them in any order."""
        return [_message(name, value) for name, value in sorted(self.items(), key=itemgetter(0))]


NOTHING = Values({}, ())
"""No arguments."""

_shared: weakref.WeakValueDictionary[Hashable, Values] = weakref.WeakValueDictionary()
_by_bytes: weakref.WeakValueDictionary[tuple[bytes, ...], Values] = weakref.WeakValueDictionary()


def shared(by_name: Mapping[str, Value]) -> Values:
    """These arguments as the one object for all equal ones."""
    if not by_name:
        return NOTHING
    key = _key_of(by_name)
    existing = _shared.get(key)
    return _shared.setdefault(key, Values(by_name, key)) if existing is None else existing


def values_of(messages: Sequence[Argument], owner: str) -> Values:
    """The arguments in `messages`. Raises ArgumentError, naming the `owner`, when two of one name differ.

    Layers of a net repeat, and comparing serialized messages takes a tenth of the time of reading them.
    """
    stored = tuple([message.SerializePartialToString() for message in messages])
    values = _by_bytes.get(stored)
    if values is None:
        values = _by_bytes[stored] = _read(messages, owner)
    return values


def _read(messages: Sequence[Argument], owner: str) -> Values:
    by_name: dict[str, Value] = {}
    for message in messages:
        name, listed = message.name, [(field.name, value) for field, value in message.ListFields()]
        fields = {field: _content(value) for field, value in listed if field != "name"}
        if name in by_name:
            if any(other != message for other in messages if other.name == name):
                raise ArgumentError(f"{owner}: argument {name!r} is given twice with different values")
        elif len(fields) == 1:
            [by_name[name]] = fields.values()
        else:
            by_name[name] = MappingProxyType(fields) if fields else ()
    return shared(by_name)


def _content(value: Any) -> Any:
    """The content of a field, copied: the message may be changed or large."""
    if isinstance(value, int | float | bytes):
        return value
    if isinstance(value, Message):
        copy = type(value)()
        copy.CopyFrom(value)
        return copy
    items = tuple(value)
    return tuple(map(_content, items)) if items and isinstance(items[0], Message) else items


def _message(name: str, value: Value) -> Argument:
    message = Argument(name=name)
    for field, content in value.items() if isinstance(value, Mapping) else ((_kind(value), value),):
        if isinstance(content, Message):
            getattr(message, field).CopyFrom(content)
        elif not isinstance(content, tuple):
            setattr(message, field, content)
        elif content:
            getattr(message, field).extend(content)
    return message


def _key_of(by_name: Mapping[str, Value]) -> Hashable:
    """Equal for arguments that are the same to the bit."""
    items = sorted(by_name.items(), key=itemgetter(0))
    try:
        return marshal.dumps(items, _WITHOUT_REFERENCES)
    except ValueError:  # of messages
        return tuple([(name, _key_of_one(value)) for name, value in items])


def _key_of_one(value: Any) -> Hashable:
    if isinstance(value, Message):
        return type(value).__name__, value.SerializePartialToString(deterministic=True)
    if isinstance(value, Mapping):
        return tuple([(field, _key_of_one(content)) for field, content in sorted(value.items(), key=itemgetter(0))])
    if isinstance(value, tuple) and value and isinstance(value[0], Message):
        return tuple(map(_key_of_one, value))
    return marshal.dumps(value, _WITHOUT_REFERENCES)


def _kind(value: Any) -> str:
    """The field of the message that holds such a value."""
    if isinstance(value, tuple):
        return _LISTS.get(type(value[0]), "qtensors") if value else "nothing"
    return _KINDS.get(type(value), "nothing")


_KINDS = {int: "i", float: "f", bytes: "s", NetDef: "n", TensorProto: "t"}
_LISTS = {int: "ints", float: "floats", bytes: "strings", NetDef: "nets", TensorProto: "tensors"}

_WORDS = {
    "i": "an integer", "f": "a float", "s": "a string", "n": "a net", "t": "a tensor", "ints": "a list of integers",
    "floats": "a list of floats", "strings": "a list of strings", "nets": "a list of nets",
    "tensors": "a list of tensors", "qtensors": "a list of quantized tensors",
}  # fmt: skip


class Arguments:
    """The arguments of one operator, by name. An absent argument gives the caller's default."""

    __slots__ = ("_owner", "values")

    def __init__(self, values: Values, owner: str) -> None:
        """`owner` names the operator in messages."""
        self._owner = owner
        self.values = values

    def __contains__(self, name: str) -> builtins.bool:
        return name in self.values

    def names(self) -> list[str]:
        """The names of all arguments given."""
        return list(self.values)

    def int(self, name: str, default: builtins.int) -> builtins.int:
        """An integer."""
        value = self.values.get(name)
        return value if type(value) is int else default if value is None else self._scalar(name, "i")

    def bool(self, name: str, default: builtins.bool = False) -> builtins.bool:
        """An integer read as a truth value."""
        value = self.values.get(name)
        return value != 0 if type(value) is int else default if value is None else bool(self._scalar(name, "i"))

    def float(self, name: str, default: builtins.float) -> builtins.float:
        """A float; an integer is converted. NaN is refused."""
        value = self.values.get(name)
        if value is None:
            return default
        number = float(value) if type(value) is int or type(value) is float else cast(float, self._scalar(name, "f"))
        if math.isnan(number):
            raise ArgumentError(f"{self._owner}: argument {name!r} is not a number")
        return number

    def string(self, name: str, default: str) -> str:
        """A string (bytes in the message, UTF-8)."""
        value = self.values.get(name)
        if value is None:
            return default
        return self._decode(name, value if type(value) is bytes else self._scalar(name, "s"))

    def net(self, name: str) -> NetDef | None:
        """A nested net, or None."""
        return None if name not in self.values else self._scalar(name, "n")

    def ints(self, name: str, default: list[builtins.int] | None = None) -> list[builtins.int]:
        """A list of integers."""
        return list(default or []) if name not in self.values else list(self._list(name, "ints"))

    def floats(self, name: str, default: list[builtins.float] | None = None) -> list[builtins.float]:
        """A list of floats, which may be given as integers; NaN stays, for fillers."""
        value: Any = self.values.get(name)
        if value is None:
            return list(default or [])
        return list(map(float, value if _kind(value) == "ints" else self._list(name, "floats")))

    def strings(self, name: str, default: list[str] | None = None) -> list[str]:
        """A list of strings (UTF-8)."""
        if name not in self.values:
            return list(default or [])
        return [self._decode(name, value) for value in self._list(name, "strings")]

    def field(self, name: str, field: str) -> Any:
        """The content of a `field` ("i", "strings") of argument `name`'s message, None where it is empty.

        For arguments that may be of several kinds, as those of fillers.
        """
        value = self.values.get(name)
        if isinstance(value, Mapping):
            return value.get(field)
        return value if value is not None and _kind(value) == field else None

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """The result of `read`, which depends on the arguments alone; cached under `key` for all equal arguments."""
        return self.values.once(key, read)

    def _decode(self, name: str, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ArgumentError(f"{self._owner}: argument {name!r} is not UTF-8 text: {value[:40]!r}") from None

    def _scalar(self, name: str, field: str) -> Any:
        value = self.values[name]
        if isinstance(value, Mapping) and field in value:
            return value[field]
        if _kind(value) != field:
            raise ArgumentError(f"{self._owner}: argument {name!r} must be {_WORDS[field]}; found {_word(value)}")
        return value

    def _list(self, name: str, field: str) -> tuple[Any, ...]:
        return () if self.values[name] == () else cast("tuple[Any, ...]", self._scalar(name, field))


def _word(value: Value) -> str:
    kinds = value if isinstance(value, Mapping) else (_kind(value),)
    return next((_WORDS[kind] for kind in _WORDS if kind in kinds), "nothing")


def value_of(name: str, value: ArgumentValue | tuple[Any, ...]) -> Value:
    """The value of an argument from Python's: an integer from int and bool, float32 from float, bytes from str, tuples.

    A list that mixes ints and floats has floats; an empty one has no values. Raises ArgumentError for any other type.
    """
    if isinstance(value, bool | int):
        _check_int64(name, (int(value),))
        return int(value)
    if isinstance(value, float):
        return array("f", (value,))[0]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | NetDef | TensorProto):
        return value
    if isinstance(value, list | tuple):
        return _values_of(name, value)
    raise ArgumentError(f"argument {name!r}: a {type(value).__name__} cannot be an operator argument")


def _values_of(name: str, values: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = set(map(type, values))  # few, however long the list
    if all(issubclass(kind, int) for kind in kinds):
        integers = tuple(values) if kinds == {int} else tuple(map(int, values))
        _check_int64(name, (min(integers), max(integers)) if integers else ())
        return integers
    if all(issubclass(kind, int | float) for kind in kinds):
        return tuple(array("f", values))
    if all(issubclass(kind, str | bytes) for kind in kinds):
        encoded = [value.encode() if isinstance(value, str) else value for value in values] if str in kinds else values
        return tuple(encoded)
    if all(issubclass(kind, NetDef) for kind in kinds):
        return tuple(values)
    raise ArgumentError(f"argument {name!r}: a list must hold only ints, floats or strings; found {list(values[:4])}")


def _check_int64(name: str, values: Iterable[int]) -> None:
    for value in values:
        if not -(1 << 63) <= value < 1 << 63:
            raise ArgumentError(f"argument {name!r}: {value} does not fit an int64")


def make_argument(name: str, value: ArgumentValue) -> Argument:
    """The Argument message for a Python value, as `value_of` takes it; raises what that raises."""
    return _message(name, value_of(name, value))
