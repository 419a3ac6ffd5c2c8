"""dagexec's own format for foreign graphs; docs/hazards.md describes it.

{"name": "step", "operators": [
   {"name": "copy", "writes": ["x"], "stream": "copies", "records": ["copied"]},
   {"name": "conv", "reads": ["x", "w"], "writes": ["y"], "stream": "main", "waits": ["copied"]}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dagexec.errors import ModelFormatError
from dagexec.scheduler.hazards.foreign import ByteRange, ForeignGraph, ForeignOperator

MAX_OPERATORS = 2_000_000
_LARGEST = 2**63
_FIELDS = frozenset(("name", "reads", "writes", "stream", "thread", "after", "waits", "records"))
_NOTHING: tuple[str, ...] = ()


def parse(name: str, found: Mapping[str, Any]) -> ForeignGraph:
    """The graph that a JSON object describes. Raises ModelFormatError, which names operator and field."""
    unknown = found.keys() - {"name", "operators", "memories"}
    if unknown:
        raise ModelFormatError(f"unknown field {min(unknown)!r}: expected name, operators and memories")
    name = found.get("name", name)
    if not isinstance(name, str):
        raise ModelFormatError(f"name: expected a string, found {name!r:.50}")
    rows = found["operators"]
    if not isinstance(rows, list) or len(rows) > MAX_OPERATORS:
        raise ModelFormatError(f"operators: expected a list of at most {MAX_OPERATORS:,}")
    places: dict[str, int] = {}
    recorded: dict[str, tuple[str, int]] = {}  # by event, the thread and how often
    operators = []
    for place, row in enumerate(rows):
        operator = _operator(place, row, places, rows)
        operators.append(operator)
        if places.setdefault(operator.name, place) != place:
            _fail(place, operator.name, "name", f"operator {places[operator.name]} has it, too")
        for event in operator.waits:
            if event not in recorded:
                _fail(place, operator.name, "waits", f"no operator listed before records event {event!r}")
        for event in operator.records:
            thread, times = recorded.get(event, (operator.thread, 0))
            if thread != operator.thread:
                _fail(place, operator.name, "records", f"thread {thread!r} records event {event!r}, too")
            recorded[event] = (thread, times + 1)
    for place, operator in enumerate(operators):
        for event in operator.waits:
            thread, times = recorded[event]
            if times > 1 and thread != operator.thread:
                _fail(
                    place,
                    operator.name,
                    "waits",
                    f"event {event!r} is of another thread, which records it {times} times",
                )
    return ForeignGraph(name, tuple(operators), _memories(found.get("memories", {})))


def _operator(place: int, row: object, places: Mapping[str, int], rows: Sequence[object]) -> ForeignOperator:
    if not isinstance(row, dict):
        raise ModelFormatError(f"operators[{place}]: expected an object, found {row!r:.50}")
    name = row.get("name")
    if not isinstance(name, str):
        raise ModelFormatError(f"operators[{place}]: name: expected a string, found {name!r:.50}")
    if not row.keys() <= _FIELDS:
        _fail(place, name, min(row.keys() - _FIELDS), f"unknown field; known are {', '.join(sorted(_FIELDS))}")
    stream, thread = row.get("stream"), row.get("thread", "main")
    if stream is not None and not isinstance(stream, str):
        _fail(place, name, "stream", f"expected a string, found {stream!r:.50}")
    if not isinstance(thread, str):
        _fail(place, name, "thread", f"expected a string, found {thread!r:.50}")
    after = []
    for other in _names(place, name, row, "after"):
        if other not in places:
            behind = any(isinstance(one, dict) and one.get("name") == other for one in rows[place:])
            why = (
                "is listed behind it, or is itself: dependencies and list order are a cycle" if behind else "is unknown"
            )
            _fail(place, name, "after", f"operator {other!r:.100} {why}")
        after.append(places[other])
    return ForeignOperator(
        name, _names(place, name, row, "reads"), _names(place, name, row, "writes"), stream, thread, tuple(after),
        _names(place, name, row, "waits"), _names(place, name, row, "records"),
    )  # fmt: skip


def _names(place: int, name: str, row: Mapping[str, Any], field: str) -> tuple[str, ...]:
    if field not in row:
        return _NOTHING
    names: list[str] = row[field]
    if type(names) is not list or not {str}.issuperset(map(type, names)):
        _fail(place, name, field, f"expected a list of strings, found {names!r:.50}")
    return tuple(names)


def _memories(found: object) -> dict[str, ByteRange]:
    if not isinstance(found, dict):
        raise ModelFormatError(f"memories: expected an object, found {found!r:.50}")
    memories = {}
    for name, row in found.items():
        if not isinstance(row, dict) or row.keys() != {"space", "low", "high"} or not isinstance(row["space"], str):
            raise ModelFormatError(f"memories: {name!r}: expected space, low and high, found {row!r:.50}")
        low, high = row["low"], row["high"]
        if type(low) is not int or type(high) is not int or not 0 <= low < high < _LARGEST:
            raise ModelFormatError(f"memories: {name!r}: expected 0 <= low < high, found {low!r:.30} and {high!r:.30}")
        memories[name] = ByteRange(row["space"], low, high)
    return memories


def _fail(place: int, name: str, field: str, why: str) -> NoReturn:
    raise ModelFormatError(f"operators[{place}] {name!r:.100}: {field}: {why}")
