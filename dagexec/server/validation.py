"""Settings whose annotations say what they may be: pydantic checks them, and what is wrong is told in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict, ValidationError
from pydantic.dataclasses import dataclass

from dagexec.core.spelling import did_you_mean
from dagexec.errors import SettingError


def _in_urls(name: str) -> str:
    if not name or len(name) > 200 or not name.isprintable() or "/" in name:
        raise ValueError(f"must be 1 to 200 printable characters without '/', not {name!r:.80}")
    return name


def _file(path: object) -> Path:
    if not isinstance(path, str | PathLike) or not str(path):
        raise ValueError(f"must be a file, not {path!r:.80}")
    return Path(path)


Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Whole = Annotated[int, Strict()]
Count = Annotated[Whole, Field(ge=1)]
Real = Annotated[float, Strict()]
Seconds = Annotated[Real, Field(gt=0)]
Name = Annotated[Text, AfterValidator(_in_urls)]
File = Annotated[Path, PlainValidator(_file)]

_Kind = TypeVar("_Kind")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(kind: type[_Kind]) -> type[_Kind]:
    """A frozen dataclass whose making raises SettingError for values that the annotations do not allow.

    A table, as files have them, may stand for an instance of such a class.
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    checked: Any = dataclass(frozen=True, kw_only=True, config=config)(kind)
    check = checked.__init__

    @wraps(check)
    def init(self: object, **values: object) -> None:
        try:
            check(self, **values)
        except ValidationError as error:
            raise SettingError(_sentence(checked, min(error.errors(), key=_after_unknown_keys))) from None

    checked.__init__ = init
    result: type[_Kind] = checked
    return result


def check_keys(table: Mapping[str, Any], known: set[str]) -> None:
    """Raise SettingError for a key that is not known, with the one that was probably meant."""
    for key in table:
        if key not in known:
            raise SettingError(f"unknown key {key!r:.80}{did_you_mean(key, known)}")


def _after_unknown_keys(problem: Mapping[str, Any]) -> bool:
    """A key that is not known may be why another is missing."""
    return bool(problem["type"] != "unexpected_keyword_argument")


def _sentence(kind: type, problem: Mapping[str, Any]) -> str:
    """One of pydantic's errors: where it is, what must be there, and what is."""
    place = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "unexpected_keyword_argument":
            *tables, key = problem["loc"]
            return f"unknown key {key!r:.80}{did_you_mean(key, _keys(kind, tables))}"
        case "missing":
            return f"{place} is missing"
        case "value_error":
            error = problem["ctx"]["error"]
            return str(error) if isinstance(error, SettingError) else f"{place} {error}"
        case "dataclass_type" | "dict_type":
            rule = "must be a table"
        case "tuple_type":
            rule = "must be a list"
        case _:
            rule = problem["msg"].replace("Input should", "must")
    return f"{place} {rule}, not {problem['input']!r:.80}"


def _keys(kind: Any, tables: Sequence[str]) -> list[str]:
    """Those of the table that `tables` lead to."""
    for name in tables:
        hint = get_type_hints(kind)[name]
        kind = next(filter(is_dataclass, (hint, *get_args(hint))))
    return [one.name for one in fields(kind)]
