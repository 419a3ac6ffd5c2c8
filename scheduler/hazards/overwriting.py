"""Overwriting: reads of memory that, although everything is ordered, holds another tensor's values by then.

When all conflicting accesses are ordered, every schedule does to each byte what list order does. So it is enough to
walk the operators in list order and note the last writer of each byte: a reader must see the values of its blob, or of
the blobs that it consists of without a copy, as they were then; and after the last operator the blobs that are wanted
after the run or by the next one must still have their values. Nor may an operator overwrite bytes that it uses under
another name. Nothing is taken from the memory plan: bytes are those of the arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator
from dagexec.platform.records import dataclass
from dagexec.scheduler.hazards.accesses import TouchedMemory

_BEFORE_THE_RUN = -1


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A blob whose values are lost before their last use.

    Attributes:
        blob: which: "blob 'x'"; or working memory.
        reader: the label of the operator that reads it; "the end of the run" for one that is kept.
        writer: the label of the operator that wrote there meanwhile.
        value: what it wrote.
    """

    blob: str
    reader: str
    writer: str
    value: str

    def __str__(self) -> str:
        when = "within" if self.reader == self.writer else "before"
        return f"{self.blob} is overwritten {when} {self.reader}: by {self.writer}, with {self.value}"


class _Stretches:
    """The bytes between neighboring ends of regions of one address space, and the last writer of each stretch."""

    def __init__(self, ends: Collection[int]) -> None:
        self._cuts = np.unique(np.fromiter(ends, np.int64, len(ends)))
        self.owner = np.zeros(len(self._cuts), np.int64)  # what was written: a key
        self.writer = np.full(len(self._cuts), _BEFORE_THE_RUN, np.int64)

    def slice(self, low: int, high: int) -> slice:
        """The stretches from `low` up to `high`."""
        first, last = np.searchsorted(self._cuts, (low, high))
        return slice(int(first), int(last))


def find_overwritten(
    graph: Graph,
    operators: Sequence[Operator],
    touched: TouchedMemory,
    inputs: Collection[Blob],
    keep: Collection[str] | None,
) -> tuple[Overwritten, ...]:
    """The reads that see other values, in list order, then the blobs that are lost at the end, each once.

    Wanted at the end are the blobs in `keep` (None: all), and `inputs`, which were there before the run.
    """
    return _Walk(graph, operators, touched, inputs, keep).run()


class _Walk:
    def __init__(
        self,
        graph: Graph,
        operators: Sequence[Operator],
        touched: TouchedMemory,
        inputs: Collection[Blob],
        keep: Collection[str] | None,
    ) -> None:
        self._graph = graph
        self._operators = operators
        self._touched = touched
        self._regions = {key: region for key, region in touched.regions.items() if region.is_packed}
        self._inputs = {id(blob) for blob in inputs}
        self._keep = keep
        self._made: dict[int, tuple[int, tuple[int, ...]]] = {}  # by blob: the operator that made it of which others
        ends: dict[object, set[int]] = {}
        for region in self._regions.values():
            ends.setdefault(region.space, set()).update((region.low, region.high))
        self._spaces = {space: _Stretches(found) for space, found in ends.items()}

    def run(self) -> tuple[Overwritten, ...]:
        findings: dict[tuple[int, int], Overwritten] = {}
        for index, operator in enumerate(self._operators):
            untouched = self._touched.untouched[index]
            self._check_apart(findings, index, operator)
            for blob in operator.input_blobs:
                if id(blob) not in untouched.inputs:
                    self._read(findings, id(blob), index)
            for array in self._touched.working[index]:
                self._write(array, index, ())
            for place, blob in enumerate(operator.output_blobs):
                parts = untouched.kept_parts if place == 0 else ()
                if place in untouched.outputs:
                    self._made[id(blob)] = (index, tuple(map(id, operator.input_blobs[:1])))
                    continue
                if place == 0:
                    self._made[id(blob)] = (index, parts)
                self._write(id(blob), index, parts)
        for operator in self._operators:
            for blob in (*operator.input_blobs, *operator.output_blobs):
                if id(blob) in self._inputs or self._keep is None or blob.name in self._keep:
                    self._read(findings, id(blob), len(self._operators))
        return tuple(findings.values())

    def _check_apart(self, findings: dict[tuple[int, int], Overwritten], index: int, operator: Operator) -> None:
        """Note what an operator overwrites while it uses it under another name."""
        untouched = self._touched.untouched[index]
        written = {number: self._written(number, ()) for number in self._touched.working[index]}
        for place, blob in enumerate(operator.output_blobs):
            if place not in untouched.outputs:
                written[id(blob)] = self._written(id(blob), untouched.kept_parts if place == 0 else ())
        used = dict(written)
        for blob in operator.input_blobs:
            if id(blob) not in untouched.inputs and id(blob) not in used:
                used[id(blob)] = self._written(id(blob), ())
        for key, there in used.items():
            for value, over in written.items():
                if key != value and self._space(key) == self._space(value) and np.any(there & over):
                    self._note(findings, key, index, index, value)

    def _space(self, key: int) -> object:
        return self._regions[key].space if key in self._regions else None

    def _written(self, key: int, but: Sequence[int]) -> npt.NDArray[np.bool_]:
        """The stretches of a blob or of working memory, without those of the blobs `but`."""
        region = self._regions.get(key)
        if region is None:
            return np.zeros(0, np.bool_)
        stretches = self._spaces[region.space]
        written = np.zeros(len(stretches.owner), np.bool_)
        written[stretches.slice(region.low, region.high)] = True
        for part in but:
            if part in self._regions:
                written[stretches.slice(self._regions[part].low, self._regions[part].high)] = False
        return written

    def _write(self, key: int, index: int, but: Sequence[int]) -> None:
        if key in self._regions:
            stretches, written = self._spaces[self._regions[key].space], self._written(key, but)
            stretches.owner[written] = key
            stretches.writer[written] = index

    def _read(self, findings: dict[tuple[int, int], Overwritten], key: int, index: int) -> None:
        region = self._regions.get(key)
        if region is None:
            return
        stretches = self._spaces[region.space]
        part = stretches.slice(region.low, region.high)
        values = set(zip(stretches.owner[part].tolist(), stretches.writer[part].tolist(), strict=True))
        right = self._values(key, index)
        for value, writer in sorted(values):
            if writer != _BEFORE_THE_RUN and writer >= right.get(value, 0):
                self._note(findings, key, index, writer, value)

    def _note(
        self, findings: dict[tuple[int, int], Overwritten], key: int, index: int, writer: int, value: int
    ) -> None:
        reader = self._graph.label(index) if index < len(self._graph) else "the end of the run"
        finding = Overwritten(self._shown(key), reader, self._graph.label(writer), self._shown(value))
        findings.setdefault((key, writer), finding)

    def _shown(self, key: int) -> str:
        return f"blob {self._touched.names[key]!r}" if key >= 0 else self._touched.names[key]

    def _values(self, key: int, index: int) -> Mapping[int, int]:
        """The blobs whose values a read of `key` by operator `index` may see, each with when it was written."""
        right: dict[int, int] = {key: index}
        waiting = [key]
        while waiting:
            maker = self._made.get(waiting.pop())
            if maker is not None:
                for part in maker[1]:
                    if part not in right:
                        right[part] = min(maker[0], index)
                        waiting.append(part)
        return right
