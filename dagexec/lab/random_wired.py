"""Randomly wired networks (Xie and others, ICCV 2019): random graphs, each edge from the smaller number to the larger.

All nodes but one that comes first and one that goes last do the same work. The parameters are the paper's: 32 nodes,
Watts-Strogatz with k = 4 and p = 0.75, Barabasi-Albert with m = 5, Erdos-Renyi with p = 0.2.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx

from dagexec.lab.graph import WorkGraph, check_size, work_graph

NODES = 32

MODELS: dict[str, Callable[[int, int], networkx.Graph[int]]] = {
    "watts_strogatz": lambda nodes, seed: networkx.connected_watts_strogatz_graph(nodes, 4, 0.75, seed=seed),
    "barabasi_albert": lambda nodes, seed: networkx.barabasi_albert_graph(nodes, 5, seed=seed),
    "erdos_renyi": lambda nodes, seed: networkx.gnp_random_graph(nodes, 0.2, seed=seed),
}


def random_wired(model: str, seed: int = 0, nodes: int = NODES, seconds: float = 100e-6) -> WorkGraph:
    """The graph of one of `MODELS`, of at least 8 nodes. Raises ResourceError for one too large to be made."""
    check_size(f"random graph {model!r}", nodes, nodes * nodes // 2)
    undirected = MODELS[model](nodes, seed)
    parents = [sorted(other for other in undirected[node] if other < node) for node in range(nodes)]
    inner = [(f"node{node}", seconds, [1 + one for one in row] or [0]) for node, row in enumerate(parents)]
    last = [1 + node for node in range(nodes) if all(other < node for other in undirected[node])]
    return work_graph(f"{model} {seed}", [("first", 0.0, []), *inner, ("last", 0.0, last)])
