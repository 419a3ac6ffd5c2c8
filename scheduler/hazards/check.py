"""The static proof: every pair of conflicting accesses is ordered or takes turns, or else is reported.

Not all pairs need to be checked. On ordered memory it suffices that every reader comes after the last writer before it
in the list, and every writer after the last writer before it and after the readers since. Take two accesses that
conflict, at least one a write. If no write lies between them in the list, the pair itself is checked. Otherwise the
earlier one is ordered before the first writer after it, each writer before the next, and the last writer before the
later access; and happens-before is transitive. So there are at most twice as many pairs to check as accesses.

On working memory any order will do, also that of turns. Two users that hold one mutex exclude each other; a user that
shares no mutex with all others has to be ordered with each. The same argument applies: with such a user between two
others, both are ordered against it, hence with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

from dagexec.core.graph import Graph, Hazard
from dagexec.platform.records import dataclass
from dagexec.scheduler.hazards.accesses import Accesses, Resource, named_accesses, prepared_accesses, touched_memory
from dagexec.scheduler.hazards.happens_before import HappensBefore
from dagexec.scheduler.hazards.overwriting import Overwritten, find_overwritten
from dagexec.scheduler.hazards.pieces import PieceFault, check_pieces
from dagexec.scheduler.hazards.tasks import check_work
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.plan import Plan, build_plan, build_sequence
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.plan.synchronization import Synchronization, finished_chains, synchronize
from dagexec.scheduler.run.work import SingleChain


@dataclass(frozen=True, slots=True)
class UnorderedAccesses:
    """Two accesses that nothing orders.

    Attributes:
        resource: what both touch.
        kind: RAW, WAR or WAW, in list order; CONTROL for a wait for an event that never comes.
        earlier, later: the labels of the operators, in list order.
        missing: what would order them: "chain 7 must wait for the event of chain 3".
    """

    resource: str
    kind: Hazard
    earlier: str
    later: str
    missing: str

    def __str__(self) -> str:
        return f"{self.kind.name} on {self.resource}: {self.earlier}, then {self.later}; {self.missing}"


@dataclass(frozen=True)
class Proof:
    """The result of checking a net; it is a proof when `unordered` is empty.

    Attributes:
        operators, chains, dependencies: the size of the plan; dependencies are those between chains.
        events, waits: how many events are recorded, and how many waits there are for one.
        guards: how many operators take turns at each working memory.
        resources: how many of them two operators touch and one writes.
        pairs_checked: of conflicting accesses.
        unordered: the pairs that are not ordered.
        overwritten: where memory is planned, the blobs whose values are lost before their last use.
        pieces: how many pieces of host operators were executed alone, in phases of several.
        faults: what is wrong with pieces, or with the tasks that they are handed out in.
    """

    operators: int
    chains: int
    dependencies: int
    events: int
    waits: int
    guards: dict[str, int]
    resources: int
    pairs_checked: int
    unordered: tuple[UnorderedAccesses, ...]
    overwritten: tuple[Overwritten, ...] = ()
    pieces: int = 0
    faults: tuple[PieceFault, ...] = ()

    def together(self, other: Proof) -> Proof:
        """The sum of two proofs."""
        guards = Counter(self.guards) + Counter(other.guards)
        names = [attribute.name for attribute in fields(self) if attribute.name != "guards"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Proof(guards=dict(guards), **sums)

    @property
    def holds(self) -> bool:
        """True when every pair is ordered, every reader sees the values of its blob, and pieces are apart."""
        return not self.unordered and not self.overwritten and not self.faults


Pair = tuple[int, int, Hazard]


def check_plan(
    plan: Plan,
    synchronization: Synchronization,
    accesses: Accesses | None = None,
    streams: int | None = None,
    *,
    finished: bool = False,
) -> Proof:
    """Prove that `plan`, run as `synchronization` says, orders all conflicting `accesses`, or find those it does not.

    `accesses` default to those by name, `streams` (in all, on each device) to any number. With `finished`, workers
    wait for each chain before they go on.
    Raises CycleError when chains depend on each other in a cycle.
    """
    touched = named_accesses(plan.graph) if accesses is None else accesses
    order = HappensBefore(plan, synchronization, streams, finished=finished)
    graph, guards = plan.graph, synchronization.guards
    unordered = [_fault(plan, *fault) for fault in order.faults]
    candidates: list[tuple[Resource, str | None, Pair]] = []
    contested = 0
    for number, users in enumerate(touched.users()):
        resource = touched.resources[number]
        mutex = _common_mutex(users, guards) if resource.exclusive else None
        pairs = _turns(users, guards, mutex) if resource.exclusive else conflicts(users, number, touched)
        contested += bool(pairs)
        candidates += [(resource, mutex, pair) for pair in pairs]
    ordered = order.ordered({(earlier, later) for _, _, (earlier, later, _) in candidates})
    for resource, mutex, (earlier, later, kind) in candidates:
        if (earlier, later) in ordered or (mutex in guards[earlier] and mutex in guards[later]):
            continue
        missing = (
            _missing_turn(earlier, later, mutex or resource.name, graph, guards)
            if resource.exclusive
            else order.missing(earlier, later)
        )
        unordered.append(UnorderedAccesses(resource.name, kind, graph.label(earlier), graph.label(later), missing))
    return Proof(
        operators=len(graph),
        chains=sum(1 for chain in plan.chains if chain),
        dependencies=sum(map(len, plan.children)),
        events=synchronization.events,
        waits=sum(map(len, synchronization.waits)),
        guards=dict(Counter(name for row in guards for name in row)),
        resources=contested,
        pairs_checked=len(candidates),
        unordered=tuple(unordered),
    )


def check_net(net: BaseNet, streams: int | None = None, *, by_name: bool = False) -> Proof:
    """Prove that runs of `net`, for the shapes its blobs have now, order all conflicting accesses; prepares if need be.

    Where memory is planned, proves also that no operator reads another tensor's values in it. Operators of several
    pieces are executed, piece by piece (`hazards.pieces`), so the net must not be running.
    `streams` replaces the net's own number of streams on each device. With `by_name` nothing is prepared: blobs stand
    for memory, and views for whatever they may view. Raises what preparing raises.
    """
    if by_name:
        plan = build_plan(net.graph, [0.0] * len(net.graph))
        return _with_bodies(net, check_order(net, plan, named_accesses(net.graph), streams))
    preparation = net.prepared()
    touched = touched_memory(net.graph, net.operators, preparation.prepared)
    accesses = prepared_accesses(net.graph, net.operators, preparation.prepared, touched)
    proof = check_order(net, preparation.plan, accesses, streams)
    if preparation.memory is not None:
        inputs = [binding.blob for binding in preparation.bindings.inputs]
        proof = replace(proof, overwritten=find_overwritten(net.graph, net.operators, touched, inputs, net.keep))
    return _with_bodies(net, _with_pieces(net, preparation, proof))


def _with_pieces(net: BaseNet, preparation: Preparation, proof: Proof) -> Proof:
    """`proof`, extended by the pieces of operators and the tasks of a run on the host."""
    inputs = [binding.blob for binding in preparation.bindings.inputs]
    results = [
        check_pieces(net.graph, index, operator, prepared, inputs)
        for index, (operator, prepared) in enumerate(zip(net.operators, preparation.prepared, strict=True))
    ]
    faults = [fault for _, row in results for fault in row]
    if net.on_host:
        plan = SingleChain() if net.in_list_order else preparation.plan
        chains = [range(len(net.graph))] if net.in_list_order else preparation.plan.chains
        faults += check_work(net.graph, preparation, plan, chains, net.work(preparation))
    return replace(proof, pieces=sum(count for count, _ in results), faults=tuple(faults))


def _with_bodies(net: BaseNet, proof: Proof) -> Proof:
    """`proof`, extended by the nets that operators run, by memory where these are prepared and else by name.

    What a body shares with the outer net are inputs of the operator that runs it.
    """
    for operator in net.operators:
        for body in operator.bodies.values():
            assert isinstance(body, BaseNet)
            proof = proof.together(check_net(body, by_name=not body.is_prepared))
    return proof


def check_order(net: BaseNet, chained: Plan, accesses: Accesses, streams: int | None = None) -> Proof:
    """`check_plan` for the way the kind of `net` runs."""
    if isinstance(net, AsyncDAGNet):
        own = net.streams_of_a_device()
        synchronization = (
            net.synchronization(chained) if streams in (None, own) else synchronize(chained, net.guards(), streams)
        )
        return check_plan(chained, synchronization, accesses, streams or own)
    plan = build_sequence(net.graph) if net.in_list_order else chained
    return check_plan(plan, finished_chains(plan, net.guards()), accesses, streams, finished=True)


def conflicts(users: Sequence[int], resource: int, accesses: Accesses) -> list[Pair]:
    """Neighboring conflicting accesses to ordered memory, as the module's docstring explains."""
    pairs: list[Pair] = []
    writer = -1
    readers: list[int] = []
    for user in users:
        reads, writes = resource in accesses.reads[user], resource in accesses.writes[user]
        if writer >= 0:
            pairs.append((writer, user, Hazard.RAW if reads else Hazard.WAW))
        if writes:
            pairs += [(reader, user, Hazard.WAR) for reader in readers]
            writer, readers = user, []
        else:
            readers.append(user)
    return pairs


def _turns(users: Sequence[int], guards: Sequence[tuple[str, ...]], mutex: str | None) -> list[Pair]:
    """Pairs of users of working memory: each without `mutex` is paired with all since the last such, and with that one.

    Users that hold it are paired with their neighbors only, to be counted.
    """
    pairs: list[Pair] = []
    since: list[int] = []  # the last user without the mutex, and all after it
    for user in users:
        if mutex in guards[user]:
            pairs += [(other, user, Hazard.WAW) for other in since[-1:]]
            if since and mutex not in guards[since[0]] and len(since) > 1:
                pairs.append((since[0], user, Hazard.WAW))
            since.append(user)
        else:
            pairs += [(other, user, Hazard.WAW) for other in since]
            since = [user]
    return pairs


def _common_mutex(users: Sequence[int], guards: Sequence[tuple[str, ...]]) -> str | None:
    """The mutex that most of `users` hold."""
    counts = Counter(name for user in users for name in guards[user])
    return max(sorted(counts), key=counts.__getitem__) if counts else None


def _missing_turn(earlier: int, later: int, mutex: str, graph: Graph, guards: Sequence[tuple[str, ...]]) -> str:
    without = [graph.label(user) for user in (earlier, later) if mutex not in guards[user]]
    who = f"{without[0]} does not take" if len(without) == 1 else f"{without[0]} and {without[1]} do not take"
    return f"both need the mutex of the {mutex}, which {who}"


def _fault(plan: Plan, recording: int, waiting: int, why: str) -> UnorderedAccesses:
    earlier, later = (
        plan.graph.label(plan.chains[chain][place]) if plan.chains[chain] else f"chain {chain}"
        for chain, place in ((recording, -1), (waiting, 0))
    )
    return UnorderedAccesses(
        f"event of chain {recording}", Hazard.CONTROL, earlier, later,
        f"{why}, and chain {waiting} waits for it" if "records" in why else f"{why}, whose event it waits for",
    )  # fmt: skip
