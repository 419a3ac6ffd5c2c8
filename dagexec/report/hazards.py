"""The section that shows a check: the pairs of accesses that nothing orders, and what is missing between them."""

from __future__ import annotations

from dagexec.core.graph import Graph
from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.scheduler.hazards import Proof


@dataclass(frozen=True)
class HazardsSection:
    """The result of `proof` for the net of `graph`."""

    proof: Proof
    graph: Graph

    kind = "hazards"
    title = "Hazards"

    def as_json(self) -> Json:
        """Findings with the numbers of both operators, where they are operators of the net."""
        findings: list[Json] = [
            {
                "text": str(found),
                "kind": found.kind.name,
                "resource": found.resource,
                "earlier": found.earlier,
                "later": found.later,
                "missing": found.missing,
            }
            for found in self.proof.unordered
        ]
        findings += [
            {
                "text": str(found),
                "kind": "overwritten",
                "resource": found.blob,
                "earlier": found.writer,
                "later": found.reader,
                "missing": f"{found.value} is written there meanwhile",
            }
            for found in self.proof.overwritten
        ]
        findings += [
            {
                "text": str(found),
                "kind": found.kind.name,
                "resource": found.memory,
                "earlier": found.operator,
                "later": found.operator,
                "missing": found.what,
            }
            for found in self.proof.faults
        ]
        return {"holds": self.proof.holds, "pairs": self.proof.pairs_checked, "findings": findings}


def missing_edges(proof: Proof, graph: Graph) -> tuple[tuple[int, int], ...]:
    """The pairs of operators that race."""
    number = {graph.label(index): index for index in range(len(graph))}
    pairs = ((number.get(accesses.earlier), number.get(accesses.later)) for accesses in proof.unordered)
    return tuple(dict.fromkeys((a, b) for a, b in pairs if a is not None and b is not None and a != b))
