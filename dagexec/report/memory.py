"""The section that shows a memory plan: each buffer as a rectangle over the operators between which it is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagexec.core.drawing.names import operator_title
from dagexec.core.graph import Graph
from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.scheduler.memory.plan import MemoryPlan


@dataclass(frozen=True)
class MemorySection:
    """The buffers and the working memory of `plan`. Time is the place of an operator in the list.

    `chain_of` has the chain of each operator.
    """

    plan: MemoryPlan
    graph: Graph
    chain_of: Sequence[int]

    kind = "memory"
    title = "Memory"

    def as_json(self) -> Json:
        """Sizes in bytes."""
        return {
            "operators": list(map(operator_title, self.graph.operators)),
            "peak": self.plan.peak_bytes,
            "unshared": self.plan.unshared_bytes + self.plan.unshared_working_bytes,
            "lower_bound": self.plan.lower_bound,
            "buffers": [*self._buffers(), *self._working_memory()],
        }

    def _buffers(self) -> Iterator[Json]:
        last = len(self.graph) - 1
        for buffer, offset in self.plan.placed():
            first = buffer.users[0] if buffer.users else 0
            yield {
                "name": buffer.name,
                "device": str(buffer.device),
                "offset": offset,
                "bytes": buffer.nbytes,
                "first": first,
                "chain": self.chain_of[first],
                "last": last if buffer.kept or not buffer.users else buffer.users[-1],
                "kept": buffer.kept,
            }

    def _working_memory(self) -> Iterator[Json]:
        for memory in self.plan.placed_working_memory():
            if memory.block == 0:  # others lie outside the arena that is drawn
                yield {
                    "name": "working memory",
                    "device": "cpu",
                    "offset": memory.offset,
                    "bytes": memory.nbytes,
                    "first": memory.operator,
                    "chain": self.chain_of[memory.operator],
                    "last": memory.operator,
                    "kept": False,
                }
