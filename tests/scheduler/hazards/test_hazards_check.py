"""The static proof: what it finds in plans with known mistakes, and that it agrees with a check of every pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.device import CPU, Device
from dagexec.core.graph import Graph, Hazard, build_graph
from dagexec.scheduler.hazards import Accesses, HappensBefore, Resource, check_plan, named_accesses
from dagexec.scheduler.plan.chains import single_operator_chains
from dagexec.scheduler.plan.plan import build_plan, build_sequence
from dagexec.scheduler.plan.synchronization import Synchronization, finished_chains, synchronize
from tests.nets import net_of, noop_nets, parents_from_edges

SIM = Device("sim", 0)


def on(net: NetDef, device: Device) -> Graph:
    net.device_option.CopyFrom(device.to_option())
    return build_graph(net, lambda _name: True)


def unordered_by_all_pairs(order: HappensBefore, accesses: Accesses, guards: Sequence[tuple[str, ...]]) -> bool:
    """True when some two conflicting accesses are unordered; every pair is looked at."""
    for first, second in itertools.combinations(range(len(accesses.reads)), 2):
        touched = [set(accesses.reads[i]) | set(accesses.writes[i]) for i in (first, second)]
        written = set(accesses.writes[first]) | set(accesses.writes[second])
        for number in touched[0] & touched[1] & written:
            turns = accesses.resources[number].exclusive and set(guards[first]) & set(guards[second])
            if not turns and not order.ordered([(first, second)]):
                return True
    return False


@pytest.mark.slow
@given(net=noop_nets(), device=st.sampled_from((SIM, CPU)), drop=st.data())
@settings(max_examples=150, deadline=None)
def test_the_check_finds_something_exactly_when_a_check_of_all_pairs_does(
    net: NetDef, device: Device, drop: st.DataObject
) -> None:
    graph = on(net, device)
    plan = build_plan(graph, [1.0] * len(graph))
    sync = synchronize(plan, [()] * len(graph))
    if drop.draw(st.booleans(), label="drop a wait") and any(sync.waits):
        chain = drop.draw(st.sampled_from([chain for chain, row in enumerate(sync.waits) if row]))
        sync = replace(sync, waits=tuple(row[1:] if c == chain else row for c, row in enumerate(sync.waits)))
    accesses = named_accesses(graph)
    proof = check_plan(plan, sync, accesses)
    order = HappensBefore(plan, sync)
    assert proof.holds == (not unordered_by_all_pairs(order, accesses, sync.guards))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_users_of_working_memory_are_found_exactly_when_two_of_them_are_neither_ordered_nor_guarded(count: int) -> None:
    """All graphs of so many operators, and all choices of those that hold the mutex."""
    edges = list(itertools.combinations(range(count), 2))
    accesses = Accesses((Resource("m", exclusive=True),), ((),) * count, ((0,),) * count)
    for chosen in itertools.product((False, True), repeat=len(edges)):
        kept = list(itertools.compress(edges, chosen))
        graph = on(net_of(parents_from_edges(count, kept)), SIM)
        plan = build_plan(graph, [1.0] * count, single_operator_chains(graph))
        order = HappensBefore(plan, synchronize(plan, [()] * count))
        for holders in itertools.product(((), ("m",)), repeat=count):
            proof = check_plan(plan, synchronize(plan, holders), accesses)
            assert proof.holds == (not unordered_by_all_pairs(order, accesses, holders)), (kept, holders)


@given(net=noop_nets(), device=st.sampled_from((SIM, CPU)))
@settings(max_examples=80, deadline=None)
def test_every_net_with_all_its_events_is_proved(net: NetDef, device: Device) -> None:
    graph = on(net, device)
    for plan in (build_plan(graph, [1.0] * len(graph)), build_sequence(graph)):
        for streams in (1, 2, None):
            assert check_plan(plan, synchronize(plan, [()] * len(graph), streams), streams=streams).holds
        assert check_plan(plan, finished_chains(plan, [()] * len(graph)), finished=True).holds


@pytest.mark.parametrize("kind", [Hazard.RAW, Hazard.WAR, Hazard.WAW])
def test_a_missing_wait_is_reported_with_both_operators_the_blob_the_kind_and_the_edge(kind: Hazard) -> None:
    net = NetDef(name="n")
    first = {Hazard.RAW: ([], ["a"]), Hazard.WAR: (["a"], ["b"]), Hazard.WAW: ([], ["a"])}[kind]
    second = {Hazard.RAW: (["a"], ["c"]), Hazard.WAR: ([], ["a"]), Hazard.WAW: ([], ["a"])}[kind]
    for (inputs, outputs), name in ((first, "first"), (second, "second")):
        net.op.add(type="NoOp", input=inputs, output=outputs, name=name)
    graph = on(net, SIM)
    plan = build_plan(graph, [1.0, 1.0], single_operator_chains(graph))
    proof = check_plan(plan, Synchronization((SIM, SIM), ((), ()), (True, False), ((), ())))
    [found] = proof.unordered
    assert (found.resource, found.kind) == ("blob 'a'", kind)
    assert "first" in found.earlier
    assert "second" in found.later
    assert found.missing == "chain 1 must wait for the event of chain 0"


def test_an_operator_that_takes_no_turn_is_reported_with_one_of_those_that_do() -> None:
    graph = on(net_of([[], [], []]), SIM)
    plan = build_plan(graph, [1.0] * 3)
    buffer = "shared buffer of sim:0"
    accesses = Accesses((Resource(buffer, exclusive=True),), ((),) * 3, ((0,),) * 3)
    assert check_plan(plan, synchronize(plan, [(buffer,)] * 3), accesses).holds
    proof = check_plan(plan, synchronize(plan, [(buffer,), (), (buffer,)]), accesses)
    assert [found.missing for found in proof.unordered] == [
        f"both need the mutex of the {buffer}, which {graph.label(1)} does not take"
    ] * 2
    proof = check_plan(plan, synchronize(plan, [()] * 3), accesses)
    assert len(proof.unordered) == 2
    assert f"{graph.label(0)} and {graph.label(1)} do not take" in proof.unordered[0].missing


def test_turns_do_not_order_reads_and_writes_of_blobs() -> None:
    """Two writers of one blob without a dependency: whoever takes the mutex last would win."""
    graph = on(net_of([[], []]), SIM)
    plan = build_plan(graph, [1.0] * 2)
    accesses = Accesses((Resource("blob 'a'"),), ((), ()), ((0,), (0,)))
    proof = check_plan(plan, synchronize(plan, [("m",)] * 2), accesses)
    assert [found.kind for found in proof.unordered] == [Hazard.WAW]


def test_a_control_input_is_an_order_to_be_kept() -> None:
    net = net_of([[], []])
    net.op[1].control_input.append("b0")
    graph = on(net, SIM)
    plan = build_plan(graph, [1.0] * 2, single_operator_chains(graph))
    sync = synchronize(plan, [(), ()])
    assert check_plan(plan, sync).holds
    [found] = check_plan(plan, replace(sync, waits=((), ()))).unordered
    assert found.resource == "order of blob 'b0'"


def test_a_wait_that_must_fail_at_run_time_is_reported_even_if_nothing_conflicts() -> None:
    graph = on(net_of([[], []]), SIM)
    plan = build_plan(graph, [1.0] * 2, single_operator_chains(graph))
    proof = check_plan(plan, Synchronization((SIM, SIM), ((), (0,)), (False, False), ((), ())))
    [found] = proof.unordered
    assert (found.kind, found.resource) == (Hazard.CONTROL, "event of chain 0")
    assert found.missing == "chain 0 never records its event, and chain 1 waits for it"


def test_the_pairs_are_as_many_as_the_accesses_and_not_as_their_square() -> None:
    """One writer, 1,000 readers, two writers."""
    net = NetDef(name="n")
    net.op.add(type="NoOp", output=["a"])
    for reader in range(1000):
        net.op.add(type="NoOp", input=["a"], output=[f"r{reader}"])
    net.op.add(type="NoOp", output=["a"])
    net.op.add(type="NoOp", output=["a"])
    graph = on(net, SIM)
    plan = build_plan(graph, [1.0] * len(graph))
    proof = check_plan(plan, synchronize(plan, [()] * len(graph)))
    assert proof.holds
    assert proof.pairs_checked == 2002
    assert (proof.operators, proof.resources, proof.guards) == (1003, 1, {})
