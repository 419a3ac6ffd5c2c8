"""HappensBefore: which operators are surely done before which others begin, whatever the schedule.

An operator happens before another (Lamport 1978) when a path leads from its end to the other's start over

    program order   operators of one chain follow one another, on the host or on the chain's stream
    launch          a chain is launched when all chains it depends on were launched, and begins after that
    host            a chain on the host is done when its last step has returned, before its children are launched
    event           a chain that waits for an event begins after the chain that recorded it; when the two are not of
                    the same kind of device the host waits, so the chain is launched after that too
    stream          what is launched on one stream is done in the order of the launches

Which stream a chain finds itself on is decided while it runs, so the order must hold for every assignment. With one
stream a device all its chains are in the order of their launches, if dependencies order these. With two or more,
`stream` edges prove nothing: say the start of b is not reached from the end of a over the other edges. Put every
chain that is reached from the end of a on stream 1 of its device, a's own with them, and all others, b's among them,
on stream 2. A stream edge then joins two chains that both are reached, or that both are not, so b is not reached in
this schedule either. The order below is therefore exact for every number of streams: it holds in all assignments
of chains to streams, and what it leaves open is open in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.device import CPU
from dagexec.errors import CycleError
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization


class HappensBefore:
    """The order of the operators of a plan, with all that a synchronization adds to it.

    Sets of chains are integers, bit c for chain c: O(chains + dependencies) operations on n/64 words each. In all
    they take 3 n * n / 8 bytes at most: 38 MB for 10,000 chains.

    Attributes:
        faults: waits that fail at run time, as (recording chain, waiting chain, why).
    """

    def __init__(
        self, plan: Plan, synchronization: Synchronization, streams: int | None = None, *, finished: bool = False
    ) -> None:
        """`streams` is how many each device has in all, None for any number.

        With `finished`, workers wait for each chain before they go on, so that all are as chains of the host.
        Raises CycleError when chains depend on each other in a cycle.
        """
        self.plan = plan
        self.synchronization = synchronization
        self.parents = _parents(plan.children)
        self.order = _topological(plan.children, self.parents)
        self._chain_of = plan.chain_of
        self._place = [0] * len(plan.graph)
        for chain in plan.chains:
            for place, operator in enumerate(chain):
                self._place[operator] = place
        count = len(plan.chains)
        self._devices = (CPU,) * count if finished else synchronization.devices
        self.faults: list[tuple[int, int, str]] = []
        self._done = self._find_done(one_stream=streams == 1)

    def before(self, earlier: int, later: int) -> bool:
        """True when operator `earlier` is done before operator `later` begins, in every schedule."""
        first, second = self._chain_of[earlier], self._chain_of[later]
        if first == second:
            return self._place[earlier] < self._place[later]
        return bool(self._done[second] >> first & 1)

    def chain_before(self, earlier: int, later: int) -> bool:
        """True when chain `earlier` is done before chain `later` begins, in every schedule."""
        return bool(self._done[later] >> earlier & 1)

    def missing(self, earlier: int, later: int) -> str:
        """What would have to be added so that operator `earlier` came before operator `later`, in words."""
        first, last = self._chain_of[earlier], self._chain_of[later]
        if first == last:
            return f"chain {first} has the two in the other order"
        leading = self._leading_to(last)
        if not leading >> first & 1:
            return f"chain {last} must depend on chain {first}: no dependency leads from the one to the other"
        for chain in self.order:  # the first place where a path of dependencies loses the order
            if leading >> chain & 1 and (chain == first or self.chain_before(first, chain)):
                for child in self.plan.children[chain]:
                    if leading >> child & 1 and not self.chain_before(first, child):
                        return self._missing_between(chain, child)
        raise AssertionError(f"chain {first} comes before chain {last}")

    def _missing_between(self, parent: int, child: int) -> str:
        if parent not in self.synchronization.waits[child]:
            return f"chain {child} must wait for the event of chain {parent}"
        return f"chain {parent} never records its event, which chain {child} waits for"

    def _leading_to(self, chain: int) -> int:
        """The chains from which dependencies lead to `chain`, with itself."""
        found = 1 << chain
        for other in reversed(self.order):
            if any(found >> child & 1 for child in self.plan.children[other]):
                found |= 1 << other
        return found

    def _find_done(self, *, one_stream: bool) -> list[int]:
        """For each chain, the chains that are done when it begins."""
        devices, records = self._devices, self.synchronization.records
        waits = self.synchronization.waits
        found = [0] * len(self.order)
        launched = [0] * len(self.order)  # the chains that are done when this one is launched
        ancestors = [0] * len(self.order)  # the chains that are launched by then
        queued: list[dict[object, int]] = [{} for _ in self.order]  # one stream: done when its last chain so far is
        for chain in self.order:
            device = devices[chain]
            at_launch = 0
            for parent in self.parents[chain]:
                at_launch |= (found[parent] | 1 << parent) if devices[parent] == CPU else launched[parent]
                ancestors[chain] |= ancestors[parent] | 1 << parent
            at_start = 0
            for parent in waits[chain]:
                if not records[parent]:
                    self.faults.append((parent, chain, f"chain {parent} never records its event"))
                    continue
                if not ancestors[chain] >> parent & 1:
                    self.faults.append((parent, chain, f"chain {chain} may be launched before chain {parent}"))
                    continue
                if devices[parent].kind == device.kind:
                    at_start |= found[parent] | 1 << parent
                else:
                    at_launch |= found[parent] | 1 << parent
            if one_stream:
                for parent in self.parents[chain]:
                    for place, done in queued[parent].items():
                        queued[chain][place] = queued[chain].get(place, 0) | done
                at_start |= queued[chain].get(device, 0)
            launched[chain] = at_launch
            found[chain] = at_launch | at_start
            if one_stream and device != CPU:
                queued[chain][device] = found[chain] | 1 << chain
        return found


def _parents(children: Sequence[Sequence[int]]) -> list[list[int]]:
    parents: list[list[int]] = [[] for _ in children]
    for parent, row in enumerate(children):
        for child in row:
            parents[child].append(parent)
    return parents


def _topological(children: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> list[int]:
    """The chains, parents first (Kahn 1962)."""
    open_parents = [len(row) for row in parents]
    order = [chain for chain, count in enumerate(open_parents) if count == 0]
    for chain in order:
        for child in children[chain]:
            open_parents[child] -= 1
            if open_parents[child] == 0:
                order.append(child)
    if len(order) < len(children):
        rest = [f"chain {chain}" for chain, count in enumerate(open_parents) if count]
        raise CycleError(f"chains depend on each other in a cycle, among them {', '.join(rest[:5])}", rest)
    return order
