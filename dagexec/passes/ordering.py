"""Ordering: which operators of a draft come before which, whatever the threads, and how much room there is.

The order is that of the hazards of `dagexec.core.graph`; the times are nominal (`Cost.seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.core.arguments import Arguments
from dagexec.core.errors import DagexecError
from dagexec.core.graph import find_hazards
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.passes.draft import Draft
from dagexec.passes.post_operations import Types

_LEAST_SECONDS = 2e-6
Timed = tuple[OperatorDef, float]
_JOINING = frozenset({"Concat", "DepthConcat", "Split"})


class Ordering:
    """The order of the operators of a draft as it is now; edits make it out of date, and `after_edits` a new one."""

    def __init__(self, draft: Draft, types: Types, known: Mapping[int, Timed] | None = None) -> None:
        """`known` are the times of defs that were looked at before, by number of the operator."""
        self._draft = draft
        self._types = types
        self._numbers = draft.numbers()
        self._place = {number: place for place, number in enumerate(self._numbers)}
        definitions = [draft[number] for number in self._numbers]
        parents: list[list[int]] = [[] for _ in definitions]
        for earlier, later in find_hazards(definitions):
            parents[later].append(earlier)
        self._known = {number: self._timed(number, (known or {}).get(number)) for number in self._numbers}
        self._seconds = [self._known[number][1] for number in self._numbers]
        self._ancestors: list[int] = []
        self._finish: list[float] = []
        for place, row in enumerate(parents):
            reached = 0
            for parent in row:
                reached |= self._ancestors[parent] | 1 << parent
            self._ancestors.append(reached)
            self._finish.append(max((self._finish[parent] for parent in row), default=0.0) + self._seconds[place])
        self._rest = [0.0] * len(definitions)
        for place in reversed(range(len(definitions))):
            for parent in parents[place]:
                self._rest[parent] = max(self._rest[parent], self._rest[place] + self._seconds[place])

    def _timed(self, number: int, known: Timed | None) -> Timed:
        definition = self._draft[number]
        if known is not None and known[0] is definition:
            return known
        return definition, _nominal_seconds(self._draft, number, self._types)

    def after_edits(self) -> Ordering:
        """The order of the draft as it has become since."""
        return Ordering(self._draft, self._types, self._known)

    def is_before(self, earlier: int, later: int) -> bool:
        """True when operator `earlier` has ended whenever operator `later` begins."""
        return bool(self._ancestors[self._place[later]] >> self._place[earlier] & 1)

    @property
    def critical_path(self) -> float:
        """Seconds of the longest path through the net."""
        return max(self._finish, default=0.0)

    def path_through(self, before: int, operator: int, after: int) -> float:
        """Seconds of the longest path that ends `before`, then does `operator`, then all that comes after `after`."""
        return self._finish[self._place[before]] + self._seconds[self._place[operator]] + self._rest[self._place[after]]

    def finish(self, number: int) -> float:
        """Seconds after which operator `number` can have ended, with workers enough."""
        return self._finish[self._place[number]]

    def may_be_overwritten(self, name: str, number: int) -> bool:
        """True when operator `number`, a reader of blob `name`, may write its result there.

        The blob is an operator's result and nobody else's, all its other readers come before `number` in any case, so
        that nothing waits that would not wait anyway, and no other blob may share its memory or the result's.
        """
        draft = self._draft
        writer = draft.producer(name)
        if writer is None or not draft.is_inner(name) or shares_memory(draft[writer]):
            return False
        if any(shares_memory(draft[reader]) for result in draft[number].output for reader in draft.readers(result)):
            return False
        return all(
            reader == number or (self.is_before(reader, number) and not shares_memory(draft[reader]))
            for reader in draft.readers(name)
        )


def shares_memory(definition: OperatorDef) -> bool:
    """True when inputs and outputs of the operator may lie in one memory: views, and what joins or cuts."""
    return definition.type in _JOINING or schema_of(definition.type).view


def _nominal_seconds(draft: Draft, number: int, types: Types) -> float:
    """The operator's cost at the first probe; that of a small operator when its types are unknown."""
    definition = draft[number]
    kinds = [types.get(name) for name in definition.input]
    results = [types.get(name) for name in definition.output]
    known = [TensorType(kind.shapes[0], kind.meta) for kind in kinds if kind is not None]
    outputs = [TensorType(kind.shapes[0], kind.meta) for kind in results if kind is not None]
    if len(known) != len(kinds) or len(outputs) != len(results):
        return _LEAST_SECONDS
    label = draft.label(number)
    values = tuple(draft.constant(name) for name in definition.input)
    call = OperatorCall(definition, Arguments(definition, label), tuple(known), values, label)
    try:
        return schema_of(definition.type).cost(call, outputs).seconds
    except DagexecError:
        return _LEAST_SECONDS
