"""Splitting a graph into chains: linear runs of operators that one worker executes with no synchronization between.

The rules are Caffe2's, on an exact transitive reduction. An operator joins the chain of its parent when the edge
between them is the only one into it and the only one out of the parent, both are on one device, and it has at most one
child itself: an operator with several children is a chain of its own. So is an operator that another runtime computes,
as that may take long, and a run is stopped between chains.

A chain costs no parallelism: whatever depends on one of its operators depends on the last one anyway.
"""

from __future__ import annotations

from dagexec.core.graph import Graph

Chain = tuple[int, ...]


def compute_chains(graph: Graph) -> tuple[Chain, ...]:
    """The chains of `graph`, by first operator; every operator is in exactly one."""
    return graph.derived("chains", lambda: _chains(graph))


def _chains(graph: Graph) -> tuple[Chain, ...]:
    chain_of: dict[int, list[int]] = {}
    chains: list[list[int]] = []
    for index in range(len(graph)):
        chain = chain_of[graph.reduced_parents[index][0]] if _joins_parent(graph, index) else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(index)
        chain_of[index] = chain
    return tuple(tuple(chain) for chain in chains)


def single_operator_chains(graph: Graph) -> tuple[Chain, ...]:
    """Every operator a chain of its own: chaining switched off, to compare with."""
    return tuple((index,) for index in range(len(graph)))


def _joins_parent(graph: Graph, index: int) -> bool:
    parents = graph.reduced_parents[index]
    if len(parents) != 1 or len(graph.reduced_children[index]) > 1:
        return False
    parent = parents[0]
    if graph.schemas[index].foreign or graph.schemas[parent].foreign:
        return False
    if len(graph.reduced_children[parent]) != 1:
        return False
    return len(graph.devices) == 1 or graph.device(parent) == graph.device(index)
