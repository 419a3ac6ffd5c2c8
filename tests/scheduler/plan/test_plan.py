import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.graph import build_graph
from dagexec.scheduler.plan.plan import build_plan, build_sequence, retimed
from dagexec.scheduler.run.prediction import lower_bound, predict_makespan, timed_chains
from tests.nets import net_of, noop_nets, parents_from_edges

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


@pytest.mark.slow
@given(noop_nets(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_levels_are_longest_paths_and_order_the_chains(net: NetDef, random: object) -> None:
    graph = build_graph(net)
    seconds = [random.choice([1.0, 2.0, 5.0]) for _ in range(len(graph))]  # type: ignore[attr-defined]
    plan = build_plan(graph, seconds)
    weighted = nx.DiGraph()
    weighted.add_node("end")
    for index in range(len(graph)):
        weighted.add_edge(index, "end", weight=seconds[index])
    weighted.add_weighted_edges_from((a, b, seconds[a]) for b, row in enumerate(graph.parents) for a in row)
    for number, chain in enumerate(plan.chains):
        descendants = nx.descendants(weighted, chain[0]) | {chain[0]}
        assert plan.levels[number] == pytest.approx(nx.dag_longest_path_length(weighted.subgraph(descendants)))
    assert list(plan.levels) == sorted(plan.levels, reverse=True)
    assert plan.critical_path == max(plan.levels)


@pytest.mark.slow
@given(noop_nets())
@settings(max_examples=150, deadline=None)
def test_chain_dependencies_order_every_hazard_pair(net: NetDef) -> None:
    graph = build_graph(net)
    plan = build_plan(graph, [1.0] * len(graph))
    order = nx.DiGraph()
    order.add_nodes_from(range(len(graph)))
    for chain in plan.chains:
        nx.add_path(order, chain)
    for number, children in enumerate(plan.children):
        order.add_edges_from((plan.chains[number][-1], plan.chains[child][0]) for child in children)
    closure = nx.transitive_closure_dag(order)
    for earlier, later in graph.hazards:
        assert closure.has_edge(earlier, later), (earlier, later)
    counts = [0] * len(plan.chains)
    for row in plan.children:
        for child in row:
            counts[child] += 1
    assert tuple(counts) == plan.parent_counts
    assert plan.frontier == tuple(number for number, count in enumerate(counts) if count == 0)


def test_an_empty_net_has_one_empty_chain_to_run() -> None:
    plan = build_plan(build_graph(NetDef(name="empty")), [])
    assert (plan.chains, plan.frontier) == (((),), (0,))


def test_a_sequence_keeps_list_order() -> None:
    plan = build_sequence(build_graph(net_of([[], [], []])))
    assert (plan.chains, plan.children, plan.parent_counts) == (((0,), (1,), (2,)), ((1,), (2,), ()), (0, 1, 1))


def test_two_workers_are_predicted_to_run_the_branches_of_a_diamond_side_by_side() -> None:
    plan = build_plan(build_graph(net_of(DIAMOND)), [1.0, 4.0, 3.0, 1.0])
    assert predict_makespan(plan, 1) == 9.0
    assert predict_makespan(plan, 2) == 6.0
    assert predict_makespan(plan, 64) == 6.0
    assert lower_bound(timed_chains(plan), 2) == 6.0
    assert lower_bound(timed_chains(plan), 1) == 9.0


def test_the_longer_branch_is_predicted_to_start_first() -> None:
    parents = parents_from_edges(4, [(2, 3)])  # 0 and 1 short and alone, 2 -> 3 long
    plan = build_plan(build_graph(net_of(parents)), [2.0, 2.0, 3.0, 3.0])
    assert plan.chains[0] == (2, 3)
    assert predict_makespan(plan, 2) == 6.0


def test_measured_times_replace_estimates_and_keep_the_order_of_the_chains() -> None:
    plan = build_plan(build_graph(net_of(DIAMOND)), [1.0, 4.0, 3.0, 1.0])
    measured = retimed(plan, [1.0, 2.0, 9.0, 1.0])
    assert measured.chains == plan.chains
    assert measured.seconds == (1.0, 2.0, 9.0, 1.0)
    assert measured.levels == (11.0, 3.0, 10.0, 1.0)
    assert predict_makespan(measured, 2) == 11.0


@pytest.mark.slow
@given(noop_nets(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_predictions_lie_between_the_bound_and_grahams(net: NetDef, workers: int) -> None:
    graph = build_graph(net)
    plan = build_plan(graph, [float(1 + index % 3) for index in range(len(graph))])
    makespan = predict_makespan(plan, workers)
    assert lower_bound(timed_chains(plan), workers) - 1e-9 <= makespan
    assert makespan <= plan.work / workers + (1 - 1 / workers) * plan.critical_path + 1e-9
