"""Plan: what is fixed about running a graph - chains in order of priority, their dependencies, the first frontier.

A plan is immutable and shared by every net and run made from it; what changes during a run lives in `run.Run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dagexec.core.graph import Graph
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.chains import Chain, compute_chains, single_operator_chains
from dagexec.scheduling.paths import longest_paths
from dagexec.scheduling.planned import PlannedPolicy, checked_order, checked_pieces, decides_in_runs
from dagexec.scheduling.policy import Chains, Policy

_NO_OPERATORS: tuple[Chain, ...] = ((),)  # one empty chain, so that the plan of an empty net can be run like any other


@dataclass(frozen=True)
class Plan:
    """Chains and their order. Chains are numbered by priority, so the smallest ready number is the one to run next.

    Attributes:
        graph: the operators.
        chains: operator indices of each chain. There is at least one, if need be an empty one.
        children: chains that wait for a chain, ascending.
        parent_counts: how many chains a chain waits for.
        frontier: chains that wait for none.
        seconds: the estimated or measured time of each chain.
        levels: time from the start of a chain to the end of the net along the longest path: its priority, where no
            policy says otherwise.
        policy: decides in runs; None for the order of the chains.
        pieces: into how many pieces a policy lets operators of each chain be shared; empty without limits.
    """

    graph: Graph
    chains: tuple[Chain, ...]
    children: tuple[tuple[int, ...], ...]
    parent_counts: tuple[int, ...]
    frontier: tuple[int, ...]
    seconds: tuple[float, ...]
    levels: tuple[float, ...]
    policy: PlannedPolicy | None = None
    pieces: tuple[int, ...] = ()

    @property
    def chain_of(self) -> tuple[int, ...]:
        """The chain of each operator."""
        chain_of = [0] * len(self.graph)
        for number, chain in enumerate(self.chains):
            for operator in chain:
                chain_of[operator] = number
        return tuple(chain_of)

    @property
    def critical_path(self) -> float:
        """Seconds along the longest path: no number of workers can be faster."""
        return max(self.levels, default=0.0)

    @property
    def work(self) -> float:
        """Seconds of all chains together: the time of one worker."""
        return sum(self.seconds)


def build_plan(graph: Graph, seconds: Sequence[float], chains: Sequence[Chain] | None = None) -> Plan:
    """The plan of `graph` whose operator i takes about `seconds[i]`.

    The priority of a chain is its level, the length of the longest path from its start to the end of the net
    (critical-path or HLFET list scheduling; Adam, Chandy, Dickson 1974). Equal levels keep list order.
    """
    split = (compute_chains(graph) if chains is None else tuple(chains)) or _NO_OPERATORS
    chain_of = {operator: number for number, chain in enumerate(split) for operator in chain}
    children = [_chain_children(graph, chain, number, chain_of) for number, chain in enumerate(split)]
    times = [sum(seconds[operator] for operator in chain) for chain in split]
    levels = longest_paths(children, times)
    order = sorted(range(len(split)), key=lambda number: (-levels[number], split[number][:1]))
    return _ordered(graph, split, children, times, levels, order)


def _ordered(
    graph: Graph,
    chains: Sequence[Chain],
    children: Sequence[Sequence[int]],
    seconds: Sequence[float],
    levels: Sequence[float],
    order: Sequence[int],
) -> Plan:
    """The plan of these chains in another order."""
    rank = {number: position for position, number in enumerate(order)}
    ranked_children = tuple(tuple(sorted(rank[child] for child in children[number])) for number in order)
    parent_counts = [0] * len(order)
    for row in ranked_children:
        for child in row:
            parent_counts[child] += 1
    return Plan(
        graph=graph,
        chains=tuple(chains[number] for number in order),
        children=ranked_children,
        parent_counts=tuple(parent_counts),
        frontier=tuple(number for number, count in enumerate(parent_counts) if count == 0),
        seconds=tuple(seconds[number] for number in order),
        levels=tuple(levels[number] for number in order),
    )


def with_policy(plan: Plan, policy: Policy, workers: int) -> Plan:
    """`plan`, whose chains are in the order of a critical path, in the order of `policy` for `workers` workers.

    Raises PolicyError where the policy fails, or its order or limits are invalid.
    """
    graph = plan.graph
    names = [graph.label(chain[0]) if chain else "no operator" for chain in plan.chains]
    chains = Chains(graph.name, names, plan.children, plan.seconds, workers)
    limits = tuple(checked_pieces(policy, chains))
    if decides_in_runs(policy):
        return replace(plan, policy=PlannedPolicy(policy, chains), pieces=limits)
    order = checked_order(policy, chains)
    ordered = _ordered(graph, plan.chains, plan.children, plan.seconds, plan.levels, order)
    return replace(ordered, pieces=tuple(limits[chain] for chain in order) if limits else ())


def retimed(plan: Plan, operator_seconds: Sequence[float]) -> Plan:
    """The plan with measured times. Its chains keep the order that a net gives them, from estimates."""
    seconds = tuple(sum(operator_seconds[index] for index in chain) for chain in plan.chains)
    return replace(plan, seconds=seconds, levels=tuple(longest_paths(plan.children, seconds)))


def build_sequence(graph: Graph, settled: frozenset[int] = frozenset()) -> Plan:
    """A plan that keeps list order: every operator but the `settled` a chain that waits for the one before it."""
    chains = tuple(chain for chain in single_operator_chains(graph) if chain[0] not in settled) or _NO_OPERATORS
    count = len(chains)
    return Plan(
        graph=graph,
        chains=chains,
        children=tuple((index + 1,) if index + 1 < count else () for index in range(count)),
        parent_counts=tuple(min(index, 1) for index in range(count)),
        frontier=(0,),
        seconds=(0.0,) * count,
        levels=(0.0,) * count,
    )


def _chain_children(graph: Graph, chain: Chain, number: int, chain_of: dict[int, int]) -> list[int]:
    children = {chain_of[child] for operator in chain for child in graph.reduced_children[operator]}
    return sorted(children - {number})
