"""The section that shows a net: its DAG with a color for each chain, and facts about each operator."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.drawing.layers import layered
from dagexec.core.drawing.modules import Group, module_tree
from dagexec.core.drawing.names import operator_name
from dagexec.core.inference import NetTypes
from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class GraphSection:
    """The operators of `plan`.

    Attributes:
        types: shapes and costs, where they are known.
        seconds: the time of each operator, if it ran.
        critical: the operators on the critical path.
        missing: edges that should be there and are not.
        given: the plan of the net before it was rewritten.
    """

    plan: Plan
    types: NetTypes | None = None
    seconds: Sequence[float] | None = None
    critical: frozenset[int] = frozenset()
    missing: tuple[tuple[int, int], ...] = ()
    given: Plan | None = None

    kind = "graph"
    title = "The net"

    def as_json(self) -> Json:
        """Operators in list order, and drawings by the path of their module; the whole net is at the empty path."""
        graph = self.plan.graph
        names = [operator_name(definition) for definition in graph.operators]
        drawings: dict[str, Json] = {}
        self._draw(module_tree(names), "", drawings)
        result: Json = {
            "operators": [
                self._operator(index, name, chain)
                for index, (name, chain) in enumerate(zip(names, self.plan.chain_of, strict=True))
            ],
            "chains": len(self.plan.chains),
            "drawings": drawings,
            "missing": [list(pair) for pair in self.missing],
        }
        return result if self.given is None else result | {"given": GraphSection(self.given).as_json()}

    def _operator(self, index: int, name: str, chain: int) -> Json:
        definition = self.plan.graph.operators[index]
        cost = None if self.types is None else self.types.costs[index]
        kinds = [] if self.types is None else self.types.outputs[index]
        result: Json = {
            "type": definition.type,
            "name": name,
            "chain": chain,
            "inputs": list(definition.input),
            "outputs": list(definition.output),
            "shapes": ["unknown until it runs" if kind is None else str(kind) for kind in kinds],
            "engine": definition.engine or "default",
        }
        if cost is not None:
            result |= {"flops": cost.flops, "bytes": cost.bytes_read + cost.bytes_written}
        if self.seconds is not None:
            result["seconds"] = self.seconds[index]
        if index in self.critical:
            result["critical"] = True
        return result

    def _draw(self, group: Group, path: str, drawings: dict[str, Json]) -> None:
        """Add the drawing of `group`, and those of the groups in it."""
        place_of = {operator: n for n, member in enumerate(group.members) for operator in _operators(member)}
        children = self.plan.graph.reduced_children
        pairs = {
            (place_of[parent], place_of[child])
            for parent in place_of
            for child in children[parent]
            if child in place_of and place_of[parent] != place_of[child]
        }
        edges = sorted((min(pair), max(pair)) for pair in pairs)  # groups may need each other: drawn one way
        edges = list(dict.fromkeys(edges))
        layout = layered(len(group.members), edges)
        nodes: list[Json] = []
        for member, (x, y) in zip(group.members, layout.nodes, strict=True):
            node: Json = {"x": round(x, 2), "y": y}
            if isinstance(member, Group):
                inside = f"{path}/{member.name}" if path else member.name
                node |= {"group": inside, "label": member.name, "operators": sorted(member.operators())}
                self._draw(member, inside, drawings)
            else:
                node["operator"] = member
            nodes.append(node)
        drawings[path] = {
            "nodes": nodes,
            "edges": [
                [*edge, [[round(x, 2), y] for x, y in bends]] for edge, bends in zip(edges, layout.bends, strict=True)
            ],
        }


def _operators(member: int | Group) -> Sequence[int]:
    return (member,) if isinstance(member, int) else tuple(member.operators())
