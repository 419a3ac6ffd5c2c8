"""The proof for foreign graphs beside all orders of launches by brute force, and paths beside a plain search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.errors import ResourceError
from dagexec.scheduler.hazards import foreign, reachability
from dagexec.scheduler.hazards.foreign import ByteRange, ForeignGraph, ForeignOperator, check_graph
from dagexec.scheduler.hazards.reachability import joined


@given(st.data(), st.integers(1, 40), st.sampled_from((1, 3, 4096)))
@settings(max_examples=60, deadline=None)
def test_pairs_are_joined_as_a_search_finds(data: st.DataObject, count: int, batch: int) -> None:
    edges = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
    edges = [(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]]
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(count))
    predecessors = [list(graph.predecessors(node)) for node in range(count)]
    pairs = list(itertools.permutations(range(count), 2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reachability, "_BATCH", batch)
        assert joined(predecessors, pairs) == {(a, b) for a in range(count) for b in nx.descendants(graph, a)}


def launches(operators: Sequence[ForeignOperator]) -> Iterator[tuple[int, ...]]:
    """All orders in which the threads may launch: of their own operators as listed, and behind those in `after`."""
    for order in itertools.permutations(range(len(operators))):
        place = {index: position for position, index in enumerate(order)}
        if all(
            place[first] < place[last]
            for first, last in itertools.combinations(range(len(operators)), 2)
            if operators[first].thread == operators[last].thread or first in operators[last].after
        ):
            yield order


def done_before(operators: Sequence[ForeignOperator], order: Sequence[int]) -> set[tuple[int, int]] | None:
    """The pairs that one order of launches orders; None if it cannot be, as a host operator waits for what follows."""
    graph = nx.DiGraph()
    recorded: dict[str, int] = {}
    on_stream: dict[str, int] = {}
    of_thread: dict[str, int] = {}
    for index in order:
        one = operators[index]
        graph.add_edge(("launch", index), ("start", index))
        graph.add_edge(("start", index), ("end", index))
        followed = [of_thread[one.thread]] if one.thread in of_thread else []
        for before in (*one.after, *followed):
            graph.add_edge(("end" if operators[before].stream is None else "launch", before), ("launch", index))
        for event in one.waits:
            if event in recorded:
                graph.add_edge(("end", recorded[event]), ("launch" if one.stream is None else "start", index))
        if one.stream is not None:
            if one.stream in on_stream:
                graph.add_edge(("end", on_stream[one.stream]), ("start", index))
            on_stream[one.stream] = index
        of_thread[one.thread] = index
        recorded.update(dict.fromkeys(one.records, index))
    return {(a, b) for a in order for kind, b in nx.descendants(graph, ("end", a)) if kind == "start"}


@st.composite
def operators(draw: st.DrawFn) -> list[ForeignOperator]:
    """Up to five operators of two threads on two streams and the host; each event is recorded once."""
    found: list[ForeignOperator] = []
    for index in range(draw(st.integers(1, 5))):
        earlier = range(index)
        found.append(
            ForeignOperator(
                str(index),
                reads=("x",) if draw(st.booleans()) else (),
                writes=("x",) if draw(st.booleans()) else (),
                stream=draw(st.sampled_from((None, "s", "t"))),
                thread=draw(st.sampled_from(("main", "main", "other"))),
                after=tuple(one for one in earlier if draw(st.integers(0, 3)) == 0),
                waits=tuple(str(one) for one in earlier if draw(st.integers(0, 2)) == 0),
                records=(str(index),),
            )
        )
    return found


@pytest.mark.slow
@given(operators())
@settings(max_examples=150, deadline=None)
def test_a_proof_holds_in_all_orders_of_launches(listed: list[ForeignOperator]) -> None:
    """And what it finds unordered is so in one of them, where one thread launches everything."""
    proof = check_graph(ForeignGraph("drawn", tuple(listed)))
    always = set.intersection(
        *(found for order in launches(listed) if (found := done_before(listed, order)) is not None)
    )
    conflicts = {
        (a, b)
        for a, b in itertools.combinations(range(len(listed)), 2)
        if (listed[a].writes and (listed[b].reads or listed[b].writes)) or (listed[a].reads and listed[b].writes)
    }
    unordered = [one for one in proof.unordered if one.kind.name != "CONTROL"]
    if proof.holds:
        assert conflicts <= always
    if not {one.thread for one in listed} - {"main"}:
        assert bool(unordered) == bool(conflicts - always)


def test_a_finding_names_memory_operators_and_what_is_missing() -> None:
    copy = ForeignOperator("copy", writes=("x",), stream="copies", records=("copied",))
    conv = ForeignOperator("conv", reads=("x",), stream="main")
    [found] = check_graph(ForeignGraph("step", (copy, conv))).unordered
    assert str(found) == (
        "RAW on memory 'x': operator 'copy' on stream 'copies', then operator 'conv' on stream 'main'; "
        "'conv' must wait for event 'copied'"
    )
    waits = ForeignOperator("conv", reads=("x",), stream="main", waits=("copied",))
    assert check_graph(ForeignGraph("step", (copy, waits))).holds


def test_a_wait_in_another_thread_that_may_come_too_early_is_found() -> None:
    record = ForeignOperator("record", stream="s", records=("e",))
    wait = ForeignOperator("wait", stream="t", thread="other", waits=("e",))
    [found] = check_graph(ForeignGraph("threads", (record, wait))).unordered
    assert (found.kind.name, found.resource) == ("CONTROL", "event 'e'")
    wait = ForeignOperator("wait", stream="t", thread="other", waits=("e",), after=(0,))
    assert check_graph(ForeignGraph("threads", (record, wait))).holds


def test_neighboring_parts_of_a_space_do_not_conflict_and_overlapping_ones_do() -> None:
    def proof(low: int) -> foreign.Proof:
        memories = {"a": ByteRange("arena", 0, 64), "b": ByteRange("arena", low, low + 64)}
        one, other = (ForeignOperator(name, writes=(name,), stream=name) for name in "ab")
        return check_graph(ForeignGraph("arena", (one, other), memories))

    assert proof(64).holds
    [found] = proof(63).unordered
    assert found.resource == "bytes 63 to 64 of 'arena'"


def test_memories_that_overlap_everywhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_MAX_STRETCHES", 1000)
    memories = {str(depth): ByteRange("arena", depth, 200 - depth) for depth in range(100)}
    users = tuple(ForeignOperator(name, reads=(name,)) for name in memories)
    with pytest.raises(ResourceError, match="'nested': its memories overlap so that operators touch 10,000 parts"):
        check_graph(ForeignGraph("nested", users, memories))
