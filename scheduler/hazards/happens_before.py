"""HappensBefore: which operators are done before which others begin, in every schedule.

An operator happens before another (Lamport 1978) when a path leads from its end to the other's start over

    program order   operators of one chain follow one another, on the host or on the chain's stream
    launch          a chain is launched when all chains it depends on were launched, and begins after that
    host            a chain on the host is done when its last step has returned, before its children are launched
    event           a chain that waits for an event begins after the chain that recorded it; when the two are not of
                    the same kind of device the host waits, so the chain is launched after that too
    stream          work on one stream is done in the order of the launches

The stream of a chain is chosen while it runs, so the order must hold for every assignment. With one stream a device,
all its chains are in the order of their launches, if dependencies order these. With two or more, `stream` edges prove
nothing: suppose that the start of b is not reached from the end of a over the other edges. Put every chain that is
reached from the end of a on stream 1 of its device, with a's own chain, and all others, with b's, on stream 2. A stream
edge then joins two chains that are both reached or both not, so b is not reached in this schedule either. The order
below is therefore exact for every number of streams: it holds in all assignments of chains to streams, and what it
leaves open is open in one of them.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Sequence

from dagexec.core.device import CPU, Device
from dagexec.errors import CycleError
from dagexec.scheduler.hazards.reachability import joined
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization


class HappensBefore:
    """The order of the operators of a plan, with what a synchronization adds to it.

    Each chain has nodes for its launch and its end, and one for each device with a single stream: all that was launched
    there by then is done.

    Attributes:
        faults: waits that fail at run time, as (recording chain, waiting chain, why).
    """

    def __init__(
        self, plan: Plan, synchronization: Synchronization, streams: int | None = None, *, finished: bool = False
    ) -> None:
        """`streams` is the number on each device, None for any number.

        With `finished`, workers wait for each chain before they go on, as on the host.
        Raises CycleError when chains depend on each other in a cycle.
        """
        self.plan = plan
        self.synchronization = synchronization
        self.parents = _parents(plan.children)
        self.order = _topological(self.parents)
        self._chain_of = plan.chain_of
        self._place = [0] * len(plan.graph)
        for chain in plan.chains:
            for place, operator in enumerate(chain):
                self._place[operator] = place
        count = len(plan.chains)
        devices = (CPU,) * count if finished else synchronization.devices
        self.faults: list[tuple[int, int, str]] = []
        self._end = [0] * count  # the node of each chain's end
        self._before = self._nodes(devices, one_stream=streams == 1)

    def ordered(self, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those pairs (a, b) of operators for which a is done before b begins, in every schedule."""
        result, between = set(), {}
        for pair in pairs:
            first, second = self._chain_of[pair[0]], self._chain_of[pair[1]]
            if first != second:
                between[pair] = (self._end[first], self._end[second])
            elif self._place[pair[0]] < self._place[pair[1]]:
                result.add(pair)
        joined_ends = joined(self._before, set(between.values()))
        return result | {pair for pair, ends in between.items() if ends in joined_ends}

    def chains_after(self, chain: int) -> set[int]:
        """The chains that begin, in every schedule, when `chain` is done."""
        first = self._end[chain]
        after = bytearray(len(self._before))
        after[first] = 1
        for node in range(first + 1, len(self._before)):
            after[node] = any(after[before] for before in self._before[node])
        return {other for other, end in enumerate(self._end) if after[end] and other != chain}

    def missing(self, earlier: int, later: int) -> str:
        """What would have to be added so that operator `earlier` comes before operator `later`, in words."""
        first, last = self._chain_of[earlier], self._chain_of[later]
        if first == last:
            return f"chain {first} has the two in the other order"
        leading = self._leading_to(last)
        if first not in leading:
            return f"chain {last} must depend on chain {first}: no dependency leads from the one to the other"
        after = self.chains_after(first)
        for chain in self.order:  # the first place where a path of dependencies loses the order
            if chain in leading and (chain == first or chain in after):
                for child in self.plan.children[chain]:
                    if child in leading and child not in after:
                        return self._missing_between(chain, child)
        raise AssertionError(f"chain {first} comes before chain {last}")

    def _missing_between(self, parent: int, child: int) -> str:
        if parent not in self.synchronization.waits[child]:
            return f"chain {child} must wait for the event of chain {parent}"
        return f"chain {parent} never records its event, which chain {child} waits for"

    def _leading_to(self, chain: int) -> set[int]:
        """`chain` and the chains from which dependencies lead to it."""
        ancestors = {chain}
        for other in reversed(self.order):
            if not ancestors.isdisjoint(self.plan.children[other]):
                ancestors.add(other)
        return ancestors

    def _nodes(self, devices: Sequence[Device], *, one_stream: bool) -> list[list[int]]:
        """For each node, those that come before it."""
        launched_first = self._launched_first()
        nodes: list[list[int]] = []
        launch = [0] * len(self.order)
        queued: list[dict[Device, int]] = [{} for _ in self.order]  # the nodes of the devices with one stream
        for chain in self.order:
            device, parents = devices[chain], self.parents[chain]
            at_launch = [self._end[parent] if devices[parent] == CPU else launch[parent] for parent in parents]
            at_start: list[int] = []
            for parent in self.synchronization.waits[chain]:
                if not self.synchronization.records[parent]:
                    self.faults.append((parent, chain, f"chain {parent} never records its event"))
                elif (parent, chain) not in launched_first:
                    self.faults.append((parent, chain, f"chain {chain} may be launched before chain {parent}"))
                else:
                    (at_start if devices[parent].kind == device.kind else at_launch).append(self._end[parent])
            launch[chain] = len(nodes)
            nodes.append(at_launch)
            self._end[chain] = len(nodes)
            nodes.append([launch[chain], *at_start])
            if one_stream:
                nodes[-1] += [queued[parent][device] for parent in parents if device in queued[parent]]
                for other in {device, *(earlier for parent in parents for earlier in queued[parent])} - {CPU}:
                    queued[chain][other] = len(nodes)
                    nodes.append([queued[parent][other] for parent in parents if other in queued[parent]])
                    if other == device:
                        nodes[-1].append(self._end[chain])
        return nodes

    def _launched_first(self) -> set[tuple[int, int]]:
        """The pairs (recording chain, waiting chain) whose first is launched before the second in every schedule."""
        place = [0] * len(self.order)
        for number, chain in enumerate(self.order):
            place[chain] = number
        waits = [(place[parent], place[chain]) for chain in self.order for parent in self.synchronization.waits[chain]]
        ordered = joined([[place[parent] for parent in self.parents[chain]] for chain in self.order], waits)
        return {(self.order[first], self.order[last]) for first, last in ordered}


def _parents(children: Sequence[Sequence[int]]) -> list[list[int]]:
    parents: list[list[int]] = [[] for _ in children]
    for parent, row in enumerate(children):
        for child in row:
            parents[child].append(parent)
    return parents


def _topological(parents: Sequence[Sequence[int]]) -> list[int]:
    """The chains, parents first."""
    try:
        return list(graphlib.TopologicalSorter(dict(enumerate(parents))).static_order())
    except graphlib.CycleError as error:
        cycle = [f"chain {chain}" for chain in error.args[1]]
        raise CycleError(f"chains depend on each other in a cycle: {', '.join(cycle[:5])}", cycle) from None
