"""Dataclasses whose methods Python need not compile while a module is imported.

`dataclasses.dataclass` writes up to six functions for each class as text, which takes half a millisecond: there are
several hundred classes, and it was a third of the time of `import dagexec`. Here the methods that compare, show and
refuse changes are closures, and `__init__` is written when the first instance is made. All else is as it was:
`fields`, `replace`, `asdict`, `match`, signatures and pickled bytes. mypy sees the decorator of the standard library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from inspect import get_annotations
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, eq=True, frozen=False, slots=False, kw_only=False):
        """`dataclasses.dataclass`; the options that are missing are those that nobody has used."""

        def made(cls):
            return _record(cls, eq, frozen, slots, kw_only)

        return made if cls is None else made(cls)


WRITTEN = "<record>"
"""The file that the code of an `__init__` is said to be of."""


def _record(cls: Any, eq: bool, frozen: bool, slots: bool, kw_only: bool) -> Any:
    """The class as a dataclass: the standard library finds its fields and adds slots."""
    of_records = any(map(dataclasses.is_dataclass, cls.__mro__[1:]))  # then it compares `frozen` with the bases'
    own = {"init": False, "repr": False, "eq": False, "frozen": frozen and of_records}
    if not cls.__doc__:  # the standard library would ask `inspect` for the signature, which takes milliseconds
        cls.__doc__ = f"{cls.__name__}({', '.join(get_annotations(cls))})"
    cls = dataclasses.dataclass(slots=slots, kw_only=kw_only, **own)(cls)
    fields = dataclasses.fields(cls)
    methods: dict[str, Any] = {"__init__": _Init(cls, frozen, slots), "__repr__": _repr}
    if eq:
        key = _key(field.name for field in fields if field.compare)
        methods["__eq__"] = _equality(key)
        hashed = _key(field.name for field in fields if (field.compare if field.hash is None else field.hash))
        if cls.__dict__.get("__hash__") is None:  # Python has set it to None if the class has an `__eq__`
            cls.__hash__ = _hash(hashed) if frozen else None
    if frozen and not of_records:
        cls.__dataclass_params__.frozen = True
        methods |= _refusals(cls, frozenset(field.name for field in fields))
    if frozen and slots:
        methods |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, method in methods.items():
        if name not in cls.__dict__:
            setattr(cls, name, method)
    return cls


class _Init:
    """Stands for the `__init__` of a class until somebody asks for it."""

    def __init__(self, cls: type, frozen: bool, slots: bool) -> None:
        self._cls: Any = cls
        self._frozen, self._slots = frozen, slots

    def __get__(self, instance: object, owner: type | None = None) -> object:
        function = _written(self._cls, self._frozen, self._slots)
        self._cls.__init__ = function
        return function.__get__(instance, owner)


class _Factory:
    """The default of a field that a call makes."""

    def __repr__(self) -> str:
        return "<factory>"


def _written(cls: Any, frozen: bool, slots: bool) -> Callable[..., None]:
    """The `__init__` of a class."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_factory": (factory := _Factory())}
    positional, types = ["_self"], {}
    keywords: list[str] = []
    body: list[str] = []
    for field in dataclasses.fields(cls):
        name, parameter, value = field.name, field.name, field.name
        made = field.default_factory is not dataclasses.MISSING
        if made:
            known[f"_make_{name}"] = field.default_factory
            value = f"_make_{name}() if {name} is _factory else {name}" if field.init else f"_make_{name}()"
        if made or field.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = factory if made else field.default
            parameter = f"{name}=_default_{name}"
        if field.init:
            (keywords if field.kw_only else positional).append(parameter)
            types[name] = field.type
        elif not made:
            if not slots or field.default is dataclasses.MISSING:
                continue
            value = f"_default_{name}"
        body.append(f"_set(_self, {name!r}, {value})" if frozen else f"_self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("_self.__post_init__()")
    parameters = [*positional, *(["*", *keywords] if keywords else ())]
    text = "\n ".join([f"def __init__({', '.join(parameters)}):", *body, "pass"])
    exec(compile(text, WRITTEN, "exec"), known)
    function: Any = known["__init__"]
    function.__qualname__ = f"{cls.__qualname__}.__init__"
    function.__module__ = cls.__module__
    function.__annotations__ = types | {"return": None}
    return function  # type: ignore[no-any-return]


def _key(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function of a record that returns the values of its fields `names`."""
    found = tuple(names)
    if not found:
        return lambda record: ()
    get = attrgetter(*found)
    return get if len(found) > 1 else lambda record: (get(record),)


def _equality(key: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:  # noqa: N807
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(key: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(key(self))

    return __hash__


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refusals(cls: Any, names: frozenset[str]) -> Mapping[str, Callable[..., None]]:
    """The methods that refuse to change a field of a class, and anything else of its own instances."""

    def __setattr__(self: Any, name: str, value: object) -> None:  # noqa: N807
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
