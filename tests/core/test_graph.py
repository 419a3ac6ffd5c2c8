"""The dependency graph, against its definition by brute force and networkx, on random nets."""

import itertools

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, OperatorDef
from dagexec.core.graph import Graph, Hazard, build_graph, transitive_reduction
from dagexec.errors import CycleError, NetOrderError, SchemaError, UnsupportedOperatorError
from tests.ops.running import operator_def

BLOBS = [f"b{index}" for index in range(6)]


@st.composite
def operators(draw: st.DrawFn) -> OperatorDef:
    """A NoOp with blobs it overwrites in place, reads, writes, and waits for."""
    names = draw(st.permutations(BLOBS))
    in_place, read, written = (draw(st.integers(0, most)) for most in (1, 2, 2))
    both, rest = names[:in_place], names[in_place:]
    return OperatorDef(
        type="NoOp",
        input=[*both, *rest[:read]],
        output=[*both, *rest[read : read + written]],
        control_input=draw(st.lists(st.sampled_from(BLOBS), max_size=2)),
    )


random_nets = st.lists(operators(), max_size=14).map(lambda ops: NetDef(name="random", op=ops))


def reads(definition: OperatorDef) -> set[str]:
    return {*definition.input, *definition.control_input}


def brute_force_hazards(net: NetDef) -> dict[tuple[int, int], Hazard]:
    """The definition: who wrote the value last that is read or replaced, and who read the value that is replaced."""
    found: dict[tuple[int, int], Hazard] = {}
    for i, j in itertools.combinations(range(len(net.op)), 2):
        one, other = net.op[i], net.op[j]
        hazard = Hazard(0)
        for blob in BLOBS:
            untouched = all(blob not in net.op[k].output for k in range(i + 1, j))
            if blob in one.output and untouched:
                hazard |= Hazard.RAW if blob in other.input else Hazard(0)
                hazard |= Hazard.CONTROL if blob in other.control_input else Hazard(0)
                hazard |= Hazard.WAW if blob in other.output else Hazard(0)
            elif blob in reads(one) and blob in other.output and untouched:
                hazard |= Hazard.WAR
        if hazard:
            found[i, j] = hazard
    return found


@pytest.mark.slow
@given(random_nets)
@settings(max_examples=200, deadline=None)
def test_edges_and_their_reasons_are_those_of_the_definition(net: NetDef) -> None:
    graph = build_graph(net)
    assert dict(graph.hazards) == brute_force_hazards(net)
    assert {(p, c) for c, parents in enumerate(graph.parents) for p in parents} == set(graph.hazards)
    assert {(p, c) for p, children in enumerate(graph.children) for c in children} == set(graph.hazards)


@pytest.mark.slow
@given(random_nets)
@settings(max_examples=100, deadline=None)
def test_operators_that_conflict_over_a_blob_are_joined_by_a_path_in_list_order(net: NetDef) -> None:
    graph = build_graph(net)
    for children in (graph.children, graph.reduced_children):
        reachable: list[set[int]] = [set() for _ in net.op]
        for index in reversed(range(len(net.op))):
            for child in children[index]:
                assert child > index
                reachable[index] |= {child} | reachable[child]
        for i, j in itertools.combinations(range(len(net.op)), 2):
            one, other = net.op[i], net.op[j]
            touched = (reads(one) | set(one.output)) & (reads(other) | set(other.output))
            if touched & (set(one.output) | set(other.output)):
                assert j in reachable[i], f"operators {i} and {j} conflict over {touched} and may run in any order"


@pytest.mark.slow
@given(random_nets)
@settings(max_examples=100, deadline=None)
def test_the_reduced_graph_is_the_transitive_reduction(net: NetDef) -> None:
    graph = build_graph(net)
    expected = nx.transitive_reduction(graph.to_networkx())
    reduced = graph.to_networkx(reduced=True)
    assert set(reduced.edges) == set(expected.edges)
    assert set(reduced.nodes) == set(range(len(net.op)))
    for earlier, later, hazard in reduced.edges(data="hazard"):
        assert hazard == graph.hazards[earlier, later]
    assert {(p, c) for p, children in enumerate(graph.reduced_children) for c in children} == set(expected.edges)


@given(st.sets(st.tuples(st.integers(0, 25), st.integers(0, 25))))
@settings(max_examples=100, deadline=None)
def test_any_dag_is_reduced_as_networkx_does(pairs: set[tuple[int, int]]) -> None:
    edges = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
    parents = [sorted(earlier for earlier, later in edges if later == node) for node in range(26)]
    digraph: nx.DiGraph[int] = nx.DiGraph(edges)
    found = {(p, c) for c, row in enumerate(transitive_reduction(parents)) for p in row}
    assert found == set(nx.transitive_reduction(digraph).edges)


def chain(*ops: tuple[list[str], list[str]], external: list[str] | None = None) -> NetDef:
    net = NetDef(name="n", external_input=external or [])
    for inputs, outputs in ops:
        net.op.append(operator_def("NoOp", inputs, outputs))
    return net


def test_each_hazard_in_its_smallest_net() -> None:
    assert build_graph(chain(([], ["a"]), (["a"], ["b"]))).hazards == {(0, 1): Hazard.RAW}
    assert build_graph(chain((["a"], ["b"]), ([], ["a"]))).hazards == {(0, 1): Hazard.WAR}
    assert build_graph(chain(([], ["a"]), ([], ["a"]))).hazards == {(0, 1): Hazard.WAW}
    assert build_graph(chain(([], ["a"]), (["a"], ["a"]))).hazards == {(0, 1): Hazard.RAW | Hazard.WAW}
    controlled = chain(([], ["a"]), ([], ["b"]))
    controlled.op[1].control_input.append("a")
    assert build_graph(controlled).hazards == {(0, 1): Hazard.CONTROL}
    assert build_graph(chain((["a"], ["b"]), (["a"], ["c"]))).hazards == {}


def test_a_circle_is_reported_with_its_operators_in_order() -> None:
    net = chain((["in"], ["x"]), (["c"], ["a"]), (["a"], ["b"]), (["b"], ["c"]), external=["in"])
    with pytest.raises(CycleError, match="net 'n': operators depend on each other in a cycle: NoOp ") as caught:
        build_graph(net)
    found = caught.value.operators
    circle = [f"NoOp {name!r} (operator {index})" for index, name in ((1, "a"), (2, "b"), (3, "c"))]
    start = circle.index(found[0])
    assert found == circle[start:] + circle[:start]
    assert " -> ".join(found) in str(caught.value)


@given(st.integers(2, 8), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_circle_of_any_length_is_found_whole(length: int, random: object) -> None:
    order = list(range(length))
    random.shuffle(order)  # type: ignore[attr-defined]
    net = chain(*(([f"r{i}"], [f"r{(i + 1) % length}"]) for i in order), external=["in"])
    with pytest.raises(CycleError) as caught:
        build_graph(net)
    produced = {f"NoOp 'r{(i + 1) % length}' (operator {place})": i for place, i in enumerate(order)}
    steps = [produced[label] for label in caught.value.operators]
    assert sorted(steps) == list(range(length))
    assert all((one + 1) % length == other for one, other in itertools.pairwise(steps))


def test_an_early_reader_is_reported_with_its_writer() -> None:
    net = chain((["a"], ["b"]), (["in"], ["a"]), external=["in"])
    with pytest.raises(
        NetOrderError,
        match=r"^NoOp 'b' \(operator 0\) of net 'n' reads blob 'a', which only NoOp 'a' \(operator 1\) writes, later",
    ) as caught:
        build_graph(net)
    assert not isinstance(caught.value, CycleError)


def test_a_blob_that_exists_before_the_run_may_be_read_first() -> None:
    net = chain((["a"], ["b"]), (["b"], ["a"]), external=["a"])
    assert build_graph(net).hazards == {(0, 1): Hazard.RAW | Hazard.WAR}
    assert build_graph(chain((["a"], ["b"]), (["b"], ["a"]))).parents == ((), (0,))
    with pytest.raises(CycleError):
        build_graph(net, lambda _name: False)


def test_a_net_that_breaks_a_schema_is_refused_with_operator_and_net() -> None:
    net = NetDef(name="n", op=[operator_def("Relu", ["x"], ["y"]), operator_def("Relu", ["x", "y"], ["z"])])
    with pytest.raises(SchemaError, match=r"Relu 'z' \(operator 1\) of net 'n': expected 1 input\(s\), found 2"):
        build_graph(net)
    net.op[1].type = "Rellu"
    with pytest.raises(UnsupportedOperatorError, match=r"Rellu 'z' \(operator 1\) of net 'n': .*close names: .*Relu"):
        build_graph(net)


def views(*ops: OperatorDef) -> frozenset[int]:
    return build_graph(NetDef(name="n", op=ops)).views


def test_only_a_view_of_a_value_that_stays_may_share_storage() -> None:
    flatten = operator_def("Flatten", ["x"], ["y"])
    assert views(flatten) == {0}
    assert views(operator_def("Relu", ["q"], ["x"]), flatten, operator_def("FlattenToVec", ["y"], ["z"])) == {1, 2}
    assert views(operator_def("Relu", ["x"], ["y"])) == frozenset()
    assert views(operator_def("Flatten", ["x"], ["x"])) == frozenset()
    assert views(operator_def("Relu", ["y"], ["q"]), flatten) == frozenset()  # it reads what the run before left
    assert views(flatten, operator_def("Relu", ["y"], ["y"])) == frozenset()
    assert views(flatten, operator_def("Relu", ["q"], ["x"])) == frozenset()
    assert views(operator_def("Relu", ["q"], ["x"]), operator_def("Relu", ["x"], ["x"]), flatten) == frozenset()


def test_operators_without_a_device_get_the_nets() -> None:
    net = chain(([], ["a"]), ([], ["b"]))
    net.device_option.device_type, net.device_option.device_id = 20901, 3
    net.op[1].device_option.random_seed = 4
    graph = build_graph(net)
    assert [str(graph.device(index)) for index in range(2)] == ["sim:3", "cpu"]
    assert not net.op[0].HasField("device_option"), "the caller's def was changed"


def test_a_graph_knows_its_size_labels_and_ends() -> None:
    net = chain((["x"], ["y"]), external=["x"])
    net.external_output.append("y")
    graph: Graph = build_graph(net)
    assert len(graph) == 1
    assert graph.label(0) == "NoOp 'y' (operator 0) of net 'n'"
    assert (graph.external_inputs, graph.external_outputs) == (("x",), ("y",))
    assert len(build_graph(NetDef(name="empty"))) == 0
