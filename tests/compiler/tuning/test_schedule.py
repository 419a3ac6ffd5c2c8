from __future__ import annotations

import random

import networkx as nx
import pytest

from dagexec.compiler.tuning.schedule import (
    ScheduleProblem,
    candidates,
    for_throughput,
    mixed,
    parts,
    predicted_seconds,
    sequential,
)
from dagexec.core.graph import Graph, build_graph
from dagexec.scheduler.plan.simulate import Machine
from tests.compiler.tuning.nets import CHAIN, FORK, TWO_FORKS, graph_of, model_of

MS = 1e-3
FREE = Machine()


def problem(
    graph: Graph, one: list[float], two: list[float], machine: Machine = FREE, **fixed: object
) -> ScheduleProblem:
    return ScheduleProblem(graph, {1: one, 2: two}, machine, 2, **fixed)  # type: ignore[arg-type]


def best(found: ScheduleProblem) -> str:
    return next(iter(candidates(found))).kind


def test_a_chain_of_operators_that_scale_runs_one_after_another_on_all_cores() -> None:
    found = problem(graph_of(*CHAIN), [10 * MS] * 4, [5.2 * MS] * 4)
    chosen = next(iter(candidates(found)))
    assert (chosen.kind, chosen.net_type, chosen.workers) == ("one after another", "simple", 1)
    assert chosen.threads == (2, 2, 2, 2)
    assert predicted_seconds(found, chosen) == pytest.approx(4 * 5.2 * MS)


def test_branches_of_operators_that_do_not_scale_run_side_by_side() -> None:
    found = problem(graph_of(*FORK), [1 * MS] * 4, [1.1 * MS] * 4)
    chosen = next(iter(candidates(found)))
    assert (chosen.kind, chosen.net_type, chosen.workers) == ("side by side", "dag", 2)
    assert chosen.threads == (1, 1, 1, 1)
    assert predicted_seconds(found, chosen) == pytest.approx(3 * MS)


def test_a_net_with_both_changes_over_between_its_parts() -> None:
    one = [8 * MS, 1 * MS, 1 * MS, 8 * MS, 8 * MS, 4 * MS, 8 * MS]
    two = [4 * MS, 1 * MS, 1 * MS, 4 * MS, 4 * MS, 2 * MS, 4 * MS]
    found = problem(graph_of(*TWO_FORKS), one, two)
    chosen = next(iter(candidates(found)))
    assert chosen.kind == "mixed"
    assert chosen.threads == (2, 1, 1, 2, 2, 2, 2)
    assert chosen.order == ((4, 5),)  # d1 before d2, as both take all cores
    assert predicted_seconds(found, chosen) == pytest.approx((4 + 1 + 4 + 4 + 2 + 4) * MS)


def test_small_operators_of_a_chain_stay_on_one_thread() -> None:
    found = problem(graph_of(*CHAIN), [10 * MS, 2e-6, 4e-6, 10 * MS], [5 * MS, 4.7e-6, 3.5e-6, 9.9 * MS])
    assert sequential(found).threads == (2, 1, 1, 1)


def test_waking_a_worker_and_settling_chains_can_cost_more_than_branches_gain() -> None:
    graph, times = graph_of(*FORK), [20e-6] * 4
    assert best(problem(graph, times, times)) == "side by side"
    assert best(problem(graph, times, times, Machine(chain_seconds=5e-6, wake_seconds=40e-6))) == "on one thread"


def test_cores_that_slow_each_other_down_make_branches_less_attractive() -> None:
    graph, one, two = graph_of(*FORK), [1 * MS] * 4, [0.7 * MS] * 4
    assert best(problem(graph, [0.1 * MS, 1 * MS, 1 * MS, 0.1 * MS], [0.1 * MS, 0.7 * MS, 0.7 * MS, 0.1 * MS])) in (
        "side by side",
        "mixed",
    )
    assert best(problem(graph, one, two, Machine(slowdown=(1.0, 1.9)))) == "one after another"


def test_of_schedules_that_are_predicted_alike_the_one_that_waits_least_comes_first() -> None:
    graph = graph_of(*CHAIN)
    alike = problem(graph, [1 * MS] * 4, [0.985 * MS, 0.5 * MS, 1 * MS, 1 * MS], workers=1)
    assert best(alike) == "one after another"  # half a millisecond is worth it
    few = problem(graph, [1 * MS] * 4, [0.94 * MS, 1 * MS, 1 * MS, 1 * MS], workers=1)
    assert best(few) == "on one thread"  # 1.5% of the whole is not


def _comparable(graph: Graph, index: int) -> bool:
    """True when operator `index` is ordered with all others, by networkx."""
    found = graph.to_networkx()
    return len(nx.ancestors(found, index)) + len(nx.descendants(found, index)) == len(graph) - 1


@pytest.mark.parametrize("seed", range(25))
def test_operators_on_all_cores_never_run_beside_others(seed: int) -> None:
    rng = random.Random(seed)
    rows: list[tuple[str, list[str]]] = [("b0", ["x"])]
    for number in range(1, 14):
        rows.append((f"b{number}", rng.sample([name for name, _ in rows[-4:]], min(len(rows), rng.choice((1, 1, 2))))))
    graph = graph_of(*rows)
    one = [rng.choice((0.01, 1.0, 5.0)) * MS for _ in rows]
    two = [seconds * rng.choice((0.5, 0.6, 1.1)) for seconds in one]
    found = problem(graph, one, two)
    schedule = mixed(found, 1)
    applied = build_graph(schedule.applied(model_of(*rows)).net, lambda _name: True)
    for index, threads in enumerate(schedule.threads):
        assert threads == 1 or schedule.workers == 1 or _comparable(applied, index)


@pytest.mark.parametrize("seed", range(10))
def test_parts_are_cut_at_exactly_the_operators_that_are_ordered_with_all_others(seed: int) -> None:
    rng = random.Random(seed)
    rows: list[tuple[str, list[str]]] = [("b0", ["x"])]
    for number in range(1, 20):
        rows.append((f"b{number}", rng.sample([name for name, _ in rows[-3:]], min(len(rows), rng.choice((1, 2))))))
    graph = graph_of(*rows)
    found = parts(graph)
    assert [index for part in found for index in part.operators] == list(range(len(graph)))
    for part in found:
        assert {_comparable(graph, index) for index in part.operators} == {not part.branches}


def test_branches_that_hold_the_interpreter_lock_do_not_run_side_by_side() -> None:
    graph, times = graph_of(*FORK), [1 * MS] * 4
    assert best(problem(graph, times, times)) == "side by side"
    assert best(problem(graph, times, times, held=times)) == "on one thread"
    assert best(problem(graph, times, times, held=[0.01 * MS] * 4)) == "side by side"


def test_the_price_of_a_schedule_is_what_it_must_gain() -> None:
    graph, times = graph_of(*FORK), [1 * MS] * 4  # 3 ms with branches side by side
    assert best(problem(graph, times, times, prices={"side by side": 1.3, "mixed": 1.3})) == "side by side"
    assert best(problem(graph, times, times, prices={"side by side": 1.4, "mixed": 1.4})) == "on one thread"


def test_a_team_that_has_to_be_woken_must_gain_more() -> None:
    graph, one, two = graph_of(*CHAIN), [1 * MS] * 4, [0.6 * MS] * 4
    assert best(problem(graph, one, two, team_seconds=1.5 * MS)) == "one after another"
    assert best(problem(graph, one, two, team_seconds=1.6 * MS)) == "on one thread"


def test_what_the_caller_fixed_is_kept() -> None:
    graph, one, two = graph_of(*FORK), [1 * MS] * 4, [0.5 * MS] * 4
    several = problem(graph, one, two, workers=2, alone="async_dag", together="async_dag")
    assert {schedule.workers for schedule in candidates(several)} == {2}
    assert {schedule.net_type for schedule in candidates(several)} == {"async_dag"}
    assert next(iter(candidates(several))).order == ((1, 2),)  # both branches take all cores
    single = problem(graph, one, two, workers=1, alone="dag", together="dag")
    assert [(schedule.workers, schedule.net_type) for schedule in candidates(single)] == [(1, "dag")] * 2


def test_with_several_runs_in_flight_every_operator_has_one_thread() -> None:
    graph = graph_of(*FORK)
    assert for_throughput(graph, 2, 2, None).net_type == "simple"
    assert for_throughput(graph, 2, 4, None).workers == 2
    few = for_throughput(graph, 8, 2, None)
    assert (few.net_type, few.workers, few.threads) == ("dag", 8, (1, 1, 1, 1))


def test_more_cores_are_shared_out_between_workers() -> None:
    one, two, four = [4 * MS] * 4, [2 * MS] * 4, [1.9 * MS] * 4
    found = ScheduleProblem(graph_of(*FORK), {1: one, 2: two, 4: four}, FREE, 4)
    chosen = next(iter(candidates(found)))
    assert chosen.kind in ("side by side", "mixed")
    assert chosen.workers == 2
    assert chosen.threads[1:3] == (2, 2)
