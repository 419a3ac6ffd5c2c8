"""The happens-before order of a plan: known cases, and all launch orders and stream assignments by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.device import CPU, Device
from dagexec.core.graph import build_graph
from dagexec.errors import CycleError
from dagexec.scheduler.hazards import HappensBefore
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import Plan, build_plan
from dagexec.scheduler.plan.synchronization import Synchronization, synchronize
from tests.nets import net_of

SIM, OTHER = Device("sim", 0), Device("sim", 1)
CUDA = Device("cuda", 0)


def plan_of(parents: Sequence[Sequence[int]]) -> Plan:
    """A plan of one operator a chain, chain i being operator i."""
    graph = build_graph(net_of(parents))
    plan = build_plan(graph, [0.0] * len(parents), single_operator_chains(graph))
    children = tuple(
        tuple(child for child, row in enumerate(parents) if parent in row) for parent in range(len(parents))
    )
    counts = tuple(len(set(row)) for row in parents)
    frontier = tuple(chain for chain, count in enumerate(counts) if not count)
    chains = tuple((index,) for index in range(len(parents)))
    return replace(plan, chains=chains, children=children, parent_counts=counts, frontier=frontier)


def synchronization_of(
    devices: Sequence[Device], waits: Sequence[Sequence[int]], records: Sequence[bool]
) -> Synchronization:
    return Synchronization(tuple(devices), tuple(map(tuple, waits)), tuple(records), ((),) * len(devices))


def launch_orders(parents: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(len(parents))):
        place = {chain: index for index, chain in enumerate(order)}
        if all(place[parent] < place[chain] for chain, row in enumerate(parents) for parent in row):
            yield order


def ordered_in(
    parents: Sequence[Sequence[int]],
    sync: Synchronization,
    order: Sequence[int],
    stream: Sequence[int],
) -> set[tuple[int, int]]:
    """The pairs (a, b) of chains with a done before b starts in one schedule, by a search from every end."""
    edges: dict[tuple[str, int], list[tuple[str, int]]] = {}

    def edge(source: tuple[str, int], target: tuple[str, int]) -> None:
        edges.setdefault(source, []).append(target)

    place = {chain: index for index, chain in enumerate(order)}
    for chain, row in enumerate(parents):
        edge(("launch", chain), ("start", chain))
        edge(("start", chain), ("end", chain))
        for parent in row:
            edge(("end" if sync.devices[parent] == CPU else "launch", parent), ("launch", chain))
        for parent in sync.waits[chain]:
            if sync.records[parent] and place[parent] < place[chain]:
                host_waits = sync.devices[parent].kind != sync.devices[chain].kind
                edge(("end", parent), ("launch" if host_waits else "start", chain))
    for first, second in itertools.combinations(order, 2):
        if sync.devices[first] == sync.devices[second] != CPU and stream[first] == stream[second]:
            edge(("end", first), ("start", second))
    found = set()
    for chain in range(len(parents)):
        reached, todo = set(), [("end", chain)]
        while todo:
            for node in edges.get(todo.pop(), ()):
                if node not in reached:
                    reached.add(node)
                    todo.append(node)
        found |= {(chain, number) for kind, number in reached if kind == "start"}
    return found


def always_ordered(parents: Sequence[Sequence[int]], sync: Synchronization, streams: int) -> set[tuple[int, int]]:
    """The pairs that are ordered in every launch order and every assignment to `streams` streams a device."""
    count = len(parents)
    found = set(itertools.product(range(count), repeat=2))
    for order in launch_orders(parents):
        for stream in itertools.product(range(streams), repeat=count):
            found &= ordered_in(parents, sync, order, stream)
    return found


@st.composite
def synchronized_plans(draw: st.DrawFn) -> tuple[list[list[int]], Synchronization]:
    """Up to four chains on hosts and devices, with waits between any of them, even needless and wrong ones."""
    count = draw(st.integers(1, 4))
    parents = [[parent for parent in range(chain) if draw(st.booleans())] for chain in range(count)]
    devices = [draw(st.sampled_from((SIM, SIM, OTHER, CUDA, CPU))) for _ in range(count)]
    waits = [
        [other for other in range(chain) if devices[other] != CPU and draw(st.integers(0, 3))] for chain in range(count)
    ]
    records = [devices[chain] != CPU and draw(st.integers(0, 4)) > 0 for chain in range(count)]
    return parents, synchronization_of(devices, waits, records)


@pytest.mark.parametrize("streams", [1, 2, 3])
@given(case=synchronized_plans())
@settings(max_examples=60, deadline=None)
def test_the_order_is_what_all_launch_orders_and_stream_assignments_have_in_common(
    streams: int, case: tuple[list[list[int]], Synchronization]
) -> None:
    parents, sync = case
    order = HappensBefore(plan_of(parents), sync, streams)
    expected = always_ordered(parents, sync, streams)
    assert {(chain, other) for chain in range(len(parents)) for other in order.chains_after(chain)} == expected
    assert order.ordered(itertools.permutations(range(len(parents)), 2)) == expected


def before(order: HappensBefore, earlier: int, later: int) -> bool:
    return bool(order.ordered([(earlier, later)]))


def test_a_wait_for_a_recorded_event_orders_two_streams_and_its_absence_does_not() -> None:
    plan = plan_of([[], [0]])
    with_event = synchronize(plan_of_device(plan, SIM), [(), ()])
    assert before(HappensBefore(plan, with_event), 0, 1)
    without = replace(with_event, waits=((), ()))
    assert not before(HappensBefore(plan, without), 0, 1)
    assert before(HappensBefore(plan, without, streams=1), 0, 1)


def plan_of_device(plan: Plan, device: Device) -> Plan:
    net = net_of([[] for _ in plan.graph.operators])
    for definition, old in zip(net.op, plan.graph.operators, strict=True):
        definition.CopyFrom(old.message())
    net.device_option.CopyFrom(device.to_option())
    return replace(plan, graph=build_graph(net))


def test_a_host_chain_is_done_before_what_is_launched_long_after_it_even_past_unfinished_work() -> None:
    """0 on the host, then 1 on a stream, then 2 on another that does not wait for 1."""
    plan = plan_of([[], [0], [1]])
    sync = synchronization_of((CPU, SIM, SIM), ((), (), ()), (False, False, False))
    order = HappensBefore(plan, sync)
    assert before(order, 0, 2)
    assert not before(order, 1, 2)


def test_a_host_chain_that_waits_passes_the_order_on_to_its_children() -> None:
    plan = plan_of([[], [0], [1]])
    sync = synchronization_of((SIM, CPU, SIM), ((), (0,), ()), (True, False, False))
    assert before(HappensBefore(plan, sync), 0, 2)
    assert not before(HappensBefore(plan, replace(sync, waits=((), (), ()))), 0, 2)


def test_between_kinds_of_devices_the_host_waits_so_that_all_it_launches_later_comes_after() -> None:
    plan = plan_of([[], [0], [1]])
    sync = synchronization_of((SIM, CUDA, SIM), ((), (0,), ()), (True, False, False))
    assert before(HappensBefore(plan, sync), 0, 2)
    same_kind = replace(sync, devices=(SIM, OTHER, SIM))
    assert not before(HappensBefore(plan, same_kind), 0, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"waits": ((), (), (1,))}, "chain 1 must wait for the event of chain 0"),
        ({"records": (False, True, False)}, "chain 0 never records its event, which chain 1 waits for"),
    ],
)
def test_the_missing_edge_is_named(change: dict[str, tuple[object, ...]], words: str) -> None:
    sync = synchronization_of((SIM,) * 3, ((), (0,), (1,)), (True, True, False))
    order = HappensBefore(plan_of([[], [0], [1]]), replace(sync, **change))  # type: ignore[arg-type]
    assert not before(order, 0, 2)
    assert order.missing(0, 2) == words
    assert order.missing(0, 1) == words


def test_the_missing_edge_is_the_first_on_a_path_that_can_still_be_mended() -> None:
    """0 -> 1 -> 3 and 0 -> 2 -> 3; 3 waits for neither."""
    sync = synchronization_of((SIM,) * 4, ((), (0,), (0,), ()), (True, True, True, False))
    order = HappensBefore(plan_of([[], [0], [0], [1, 2]]), sync)
    assert order.missing(0, 3) == "chain 3 must wait for the event of chain 1"


def test_chains_without_a_dependency_are_told_to_have_one() -> None:
    sync = synchronization_of((CPU, CPU), ((), ()), (False, False))
    order = HappensBefore(plan_of([[], []]), sync)
    assert order.missing(0, 1) == "chain 1 must depend on chain 0: no dependency leads from the one to the other"


def test_a_wait_for_an_event_that_is_never_recorded_or_too_late_is_a_fault() -> None:
    sync = synchronization_of((SIM,) * 3, ((), (0,), (1,)), (False, True, False))
    order = HappensBefore(plan_of([[], [0], []]), sync)
    assert sorted(order.faults) == [
        (0, 1, "chain 0 never records its event"),
        (1, 2, "chain 2 may be launched before chain 1"),
    ]


def test_operators_of_one_chain_are_in_the_order_of_the_chain() -> None:
    graph = build_graph(net_of([[], [0], [1]]))
    plan = build_plan(graph, [1.0] * 3)
    assert plan.chains == ((0, 1, 2),)
    order = HappensBefore(plan, synchronize(plan, [()] * 3))
    assert before(order, 0, 2)
    assert not before(order, 2, 0)
    assert order.missing(2, 0) == "chain 0 has the two in the other order"


def test_chains_in_a_circle_are_refused() -> None:
    plan = replace(plan_of([[], [0]]), children=((1,), (0,)))
    with pytest.raises(CycleError, match="chain 0, chain 1"):
        HappensBefore(plan, synchronization_of((CPU, CPU), ((), ()), (False, False)))
