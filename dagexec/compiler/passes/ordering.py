"""Ordering: which operators of a draft come before which, whatever the threads, and how much room there is.

The order is that of the hazards of `dagexec.core.graph`; the times are nominal (`Cost.seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.post_operations import Types
from dagexec.core.graph import flow_of
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import DagexecError

_MIN_SECONDS = 2e-6


class Ordering:
    """The order of the operators of a draft as it is now; an edit makes it out of date until `edited` is told of it."""

    def __init__(self, draft: Draft, types: Types) -> None:
        self._draft = draft
        self._types = types
        self._numbers = draft.numbers()
        self._place = {number: place for place, number in enumerate(self._numbers)}
        self._parents: dict[int, list[int]] = {number: [] for number in self._numbers}
        definitions = [draft[number] for number in self._numbers]
        rows = flow_of(definitions, [schema_of(definition.type) for definition in definitions]).parents
        for number, row in zip(self._numbers, rows, strict=True):
            self._parents[number].extend(self._numbers[earlier] for earlier in row)
        self._seconds: dict[int, float] = {}
        self._current: _Times | None = None

    def edited(self, number: int) -> None:
        """Free operator `number` has changed, and those before it whose results it alone read may be gone into it."""
        draft = self._draft
        found = dict.fromkeys(writer for name in draft[number].input for writer in draft.writers(name))
        self._parents[number] = list(found)
        self._seconds.pop(number, None)
        self._current = None

    def is_before(self, earlier: int, later: int) -> bool:
        """True when operator `earlier` has ended whenever operator `later` begins."""
        return self.are_before({earlier}, later)

    @property
    def critical_path(self) -> float:
        """Seconds of the longest path through the net."""
        return self._times().critical_path

    def path_through(self, before: int, operator: int, after: int) -> float:
        """Seconds of the longest path that ends `before`, then does `operator`, then all that comes after `after`."""
        times = self._times()
        return times.finish[before] + times.seconds[operator] + times.rest[after]

    def finish(self, number: int) -> float:
        """Seconds after which operator `number` can have ended, with workers enough."""
        return self._times().finish[number]

    def are_before(self, wanted: set[int], later: int) -> bool:
        """True when a path leads from each of `wanted` to `later`: backwards, no further than to the first of them."""
        place, parents = self._place, self._parents
        left = set(wanted)
        first = min((place[number] for number in left), default=0)
        seen: set[int] = set()
        waiting = [later]
        while waiting and left:
            for parent in parents[waiting.pop()]:
                if parent not in seen and place[parent] >= first:
                    seen.add(parent)
                    left.discard(parent)
                    waiting.append(parent)
        return not left

    def _times(self) -> _Times:
        if self._current is None:
            self._numbers = [number for number in self._numbers if number in self._draft]
            for number in self._numbers:
                if number not in self._seconds:
                    self._seconds[number] = _nominal_seconds(self._draft, number, self._types)
            self._current = _Times(self._numbers, self._parents, self._seconds)
        return self._current

    def may_be_overwritten(self, name: str, number: int) -> bool:
        """True when operator `number`, a reader of blob `name`, may write its result there.

        The blob is an operator's result and nobody else's, all its other readers come before `number` in any case, so
        that nothing waits that would not wait anyway, and no other blob may share its memory or the result's.
        """
        others = other_readers(self._draft, name, number)
        return others is not None and self.are_before(others, number)


def other_readers(draft: Draft, name: str, number: int) -> set[int] | None:
    """Who must have read blob `name` before operator `number`, a reader, may write its result there; None for never.

    See `Ordering.may_be_overwritten`.
    """
    named_last = draft.last_named_reader(name)
    if named_last is not None and draft.is_listed_before(number, named_last):
        return None  # said first, as there may be many readers
    writer = draft.producer(name)
    if writer is None or not draft.is_inner(name) or shares_memory(draft[writer]):
        return None
    if any(shares_memory(draft[reader]) for result in draft[number].output for reader in draft.readers(result)):
        return None
    others = {reader for reader in draft.readers(name) if reader != number}
    return None if any(shares_memory(draft[reader]) for reader in others) else others


class _Times:
    """Nominal times of operators, by number: what each takes, when it can have ended, what comes after it."""

    def __init__(self, numbers: list[int], parents: Mapping[int, list[int]], seconds: Mapping[int, float]) -> None:
        self.seconds = seconds
        finish: dict[int, float] = {}
        for number in numbers:
            start = 0.0
            for parent in parents[number]:
                if finish[parent] > start:
                    start = finish[parent]
            finish[number] = start + seconds[number]
        rest = dict.fromkeys(numbers, 0.0)
        for number in reversed(numbers):
            total = rest[number] + seconds[number]
            for parent in parents[number]:
                if rest[parent] < total:
                    rest[parent] = total
        self.finish, self.rest = finish, rest
        self.critical_path = max(finish.values(), default=0.0)


def shares_memory(definition: Node) -> bool:
    """True when inputs and outputs of the operator may lie in one memory: views, and what joins or cuts."""
    schema = schema_of(definition.type)
    return schema.view or schema.joined is not None or schema.cut is not None


def _nominal_seconds(draft: Draft, number: int, types: Types) -> float:
    """The operator's cost at the first probe; that of a small operator when its types are unknown."""
    definition = draft[number]
    kinds = [types.get(name) for name in definition.input]
    results = [types.get(name) for name in definition.output]
    known = [TensorType(kind.shapes[0], kind.meta) for kind in kinds if kind is not None]
    outputs = [TensorType(kind.shapes[0], kind.meta) for kind in results if kind is not None]
    if len(known) != len(kinds) or len(outputs) != len(results):
        return _MIN_SECONDS
    label = draft.label(number)
    values = tuple(draft.constant(name) for name in definition.input)
    call = OperatorCall(definition, definition.arguments(label), tuple(known), values, label)
    try:
        return schema_of(definition.type).cost(call, outputs).seconds
    except DagexecError:
        return _MIN_SECONDS
