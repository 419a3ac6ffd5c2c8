from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.graph import build_graph
from dagexec.scheduler.plan.plan import Plan, build_plan, retimed
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run import overhead
from dagexec.scheduler.run.overhead import SchedulingCosts, measure_costs
from dagexec.scheduler.run.prediction import (
    Hardware,
    TimedTasks,
    device_bound,
    lower_bound,
    predict_device,
    predict_host,
    predict_makespan,
    tasks_of_chains,
    timed_chains,
)
from tests.nets import net_of, noop_nets, parents_from_edges

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


def plan_of(parents: list[list[int]], seconds: list[float]) -> Plan:
    return build_plan(build_graph(net_of(parents)), seconds)


def predict(plan: Plan, hardware: Hardware, seconds: list[float] | None = None) -> float:
    if hardware.streams:
        assert seconds is not None
        return predict_device(plan, hardware, seconds)
    return predict_host(timed_chains(plan), hardware)


def bound_on(plan: Plan, hardware: Hardware) -> float:
    return device_bound(plan, hardware) if hardware.streams else lower_bound(timed_chains(plan), hardware.workers)


def test_every_chain_costs_its_worker_the_settling_of_it() -> None:
    plan = plan_of(DIAMOND, [1.0, 4.0, 3.0, 1.0])
    assert predict_host(timed_chains(plan), Hardware(1, piece_seconds=0.25)) == 9.0 + 4 * 0.25
    assert predict_host(timed_chains(plan), Hardware(2, piece_seconds=0.25)) == 6.0 + 3 * 0.25


def test_a_worker_that_sleeps_is_woken_first_and_one_that_is_done_goes_on_at_once() -> None:
    plan = plan_of(DIAMOND, [1.0, 4.0, 4.0, 1.0])
    assert predict_host(timed_chains(plan), Hardware(1, wake_seconds=0.5)) == 10.0
    assert predict_host(timed_chains(plan), Hardware(2, wake_seconds=0.5)) == 1.0 + (0.5 + 4.0) + 1.0


def test_operators_take_longer_while_other_workers_compute() -> None:
    plan = plan_of([[], []], [1.0, 3.0])
    # both at half the speed until the short one is done after 2 s, the other's last 2 s alone
    assert predict_host(timed_chains(plan), Hardware(2, slowdown=(1.0, 2.0))) == pytest.approx(4.0)
    assert predict_host(timed_chains(plan), Hardware(1, slowdown=(1.0, 2.0))) == pytest.approx(4.0)
    three = plan_of([[], [], []], [2.0, 2.0, 2.0])
    assert predict_host(timed_chains(three), Hardware(3, slowdown=(1.0, 1.5))) == pytest.approx(
        3.0
    )  # the last holds for more


def tasks_of(pieces: list[int], children: list[list[int]], seconds: list[float], *held: float) -> TimedTasks:
    counts = [sum(task in row for row in children) for task in range(len(pieces))]
    return TimedTasks(TaskGraph(pieces, children, counts, range(len(pieces))), seconds, held)


def test_workers_share_the_pieces_of_a_task_and_what_waits_for_it_begins_after_the_last() -> None:
    tasks = tasks_of([4, 1], [[1], []], [8.0, 1.0])
    assert [predict_host(tasks, Hardware(count)) for count in (1, 2, 3, 4, 64)] == [9.0, 5.0, 5.0, 3.0, 3.0]
    assert [lower_bound(tasks, count) for count in (1, 2, 3, 4, 64)] == [9.0, 5.0, 5.0, 3.0, 3.0]


def test_a_worker_takes_a_task_that_nobody_is_in_before_pieces_of_one_that_another_is_in() -> None:
    tasks = tasks_of([4, 1, 1], [[], [2], []], [8.0, 2.0, 9.0])
    # the second goes on with the long chain, while the first does all of its task: 2 + 9, not 2 + 2 + 9
    assert predict_host(tasks, Hardware(2)) == 11.0


def test_a_worker_goes_on_with_the_task_that_it_is_in() -> None:
    tasks = tasks_of([4, 1, 1, 1], [[3], [], [], []], [4.0, 3.0, 3.0, 5.0])
    # one worker does all of the first and then what waits for it: 4 + 5, though another task is ready from the start
    assert predict_host(tasks, Hardware(2)) == 9.0


def test_every_piece_costs_its_worker_the_taking_of_it() -> None:
    tasks = tasks_of([4, 1], [[1], []], [8.0, 1.0])
    assert predict_host(tasks, Hardware(2, piece_seconds=0.25)) == 2 * (2.0 + 0.25) + 1.0 + 0.25


def test_tasks_that_hold_the_interpreter_lock_wait_for_each_other() -> None:
    apart = tasks_of([1, 1], [[], []], [4.0, 4.0])
    assert predict_host(apart, Hardware(2)) == 4.0
    assert predict_host(replace(apart, held=(4.0, 4.0)), Hardware(2)) == 8.0
    assert predict_host(replace(apart, held=(3.0, 2.0)), Hardware(2)) == pytest.approx(5.0)
    assert predict_host(replace(apart, held=(1.0, 1.0)), Hardware(2)) == 4.0


@st.composite
def task_graphs(draw: st.DrawFn) -> TimedTasks:
    count = draw(st.integers(1, 9))
    children = [sorted(draw(st.sets(st.integers(task + 1, count), max_size=3)) - {count}) for task in range(count)]
    pieces = [draw(st.integers(1, 5)) for _ in range(count)]
    return tasks_of(pieces, children, [float(draw(st.integers(1, 4)) * one) for one in pieces])


@pytest.mark.slow
@given(task_graphs(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_predictions_lie_between_the_bound_and_grahams(tasks: TimedTasks, workers: int) -> None:
    makespan = predict_host(tasks, Hardware(workers))
    assert lower_bound(tasks, workers) - 1e-9 <= makespan
    path = tasks.critical_path(10**9)
    assert makespan <= tasks.work / workers + (1 - 1 / workers) * path + 1e-9


def test_launches_hide_behind_kernels_on_one_stream() -> None:
    plan = plan_of([[], [0], [1]], [1.0, 1.0, 1.0])
    assert predict_device(plan, Hardware(1, 1, launch_seconds=0.1), [1.0] * 3) == pytest.approx(0.1 + 3.0)
    # kernels shorter than launches: the device waits for the host
    assert predict_device(plan, Hardware(1, 1, launch_seconds=1.0), [0.1] * 3) == pytest.approx(3.0 + 0.1)


def test_the_branches_of_a_diamond_run_side_by_side_on_two_streams_of_two_workers() -> None:
    seconds = [1.0, 4.0, 3.0, 1.0]
    plan = plan_of(DIAMOND, seconds)
    assert predict_device(plan, Hardware(2, 2), seconds) == 6.0
    assert predict_device(plan, Hardware(1, 1), seconds) == 9.0


def test_a_chain_is_launched_when_its_parents_are_not_when_they_are_done() -> None:
    plan = plan_of(DIAMOND, [1.0] * 4)
    # 0 launched at 0.1; 1 and 2 at 0.2 by two workers; 3 at 0.3: long before 0 is done
    assert predict_device(plan, Hardware(2, 2, launch_seconds=0.1), [1.0] * 4) == pytest.approx(0.1 + 3.0)
    # with `finish` each worker waits for its chain before the next can be launched
    finished = predict_device(plan, Hardware(2, 2, launch_seconds=0.1), [1.0] * 4, finish=True)
    assert finished == pytest.approx(3 * (0.1 + 1.0))


def test_a_stream_keeps_its_order_even_when_a_later_chain_could_go_on() -> None:
    parents = parents_from_edges(4, [(0, 2), (1, 2)])  # 2 waits for 0 and 1; 3 is alone
    plan = build_plan(build_graph(net_of(parents)), [9.0, 1.0, 5.0, 0.5])
    # by priority: 0 and 1 first; the second worker then launches 2 behind 1 on its stream, or 3
    seconds = [9.0, 1.0, 5.0, 0.5]
    assert predict_device(plan, Hardware(2, 2), seconds) == pytest.approx(14.0)


def test_a_worker_launches_on_another_of_its_streams_what_need_not_wait() -> None:
    plan = plan_of([[], []], [1.0, 1.0])
    assert predict_device(plan, Hardware(1, 2, launch_seconds=0.1), [1.0] * 2) == pytest.approx(1.2)
    assert predict_device(plan, Hardware(1, 1, launch_seconds=0.1), [1.0] * 2) == pytest.approx(2.1)


def test_siblings_do_not_queue_up_behind_each_other_on_the_stream_of_their_parent() -> None:
    plan = plan_of(DIAMOND, [1.0] * 4)
    assert predict_device(plan, Hardware(1, 2), [1.0] * 4) == pytest.approx(3.0)
    assert predict_device(plan, Hardware(1, 1), [1.0] * 4) == pytest.approx(4.0)


def test_a_worker_settles_a_chain_before_it_launches_the_next() -> None:
    plan = plan_of([[], [], []], [0.1, 0.1, 0.1])
    found = predict(plan, Hardware(1, 3, piece_seconds=10.0, launch_seconds=0.5), [0.1, 0.1, 0.1])
    assert found == pytest.approx(3 * (0.5 + 10.0))


def test_a_chain_goes_to_a_stream_that_is_idle_before_the_next_in_turn() -> None:
    plan = plan_of([[], [], []], [10.0, 1.0, 1.0])
    hardware = Hardware(1, 2, piece_seconds=2.0, launch_seconds=0.5)
    assert predict(plan, hardware, [10.0, 1.0, 1.0]) == pytest.approx(0.5 + 10.0)


def test_workers_launch_side_by_side_and_launching_is_part_of_the_bound() -> None:
    plan = plan_of([[], [], []], [0.1, 0.1, 0.1])
    for workers in (1, 2, 3):
        hardware = Hardware(workers, 3, launch_seconds=1.0)
        launches = -(-3 // workers)
        assert predict(plan, hardware, [0.1, 0.1, 0.1]) == pytest.approx(launches + 0.1)
        assert bound_on(plan, hardware) == pytest.approx(3 / workers)


def test_a_chain_on_the_host_waits_for_what_it_needs_of_the_device() -> None:
    plan = plan_of([[], [0], [1]], [1.0, 1.0, 1.0])
    chain_of = {chain: number for number, chain in enumerate(plan.chains)}
    assert len(chain_of) == 1  # one device: one chain
    mixed = build_plan(build_graph(net_of([[], [0], [1]])), [1.0] * 3, [(0,), (1,), (2,)])
    on_device = [chain != (1,) for chain in mixed.chains]
    found = predict_device(mixed, Hardware(1, 1, launch_seconds=0.1), [2.0, 5.0, 1.0], on_device)
    assert found == pytest.approx((0.1 + 2.0) + 5.0 + (0.1 + 1.0))


@pytest.mark.slow
@given(noop_nets(), st.sampled_from([0.0, 0.5]))
@settings(max_examples=50, deadline=None)
def test_workers_and_streams_beyond_the_chains_change_nothing_and_cost_nothing(
    net: NetDef, launch_seconds: float
) -> None:
    graph = build_graph(net)
    seconds = [float(1 + index % 3) for index in range(len(graph))]
    plan = build_plan(graph, seconds)
    chains = max(1, len(plan.chains))
    many = Hardware(10**9, 10**18)
    for enough, more in ((Hardware(1, chains), Hardware(1, 10**18)), (Hardware(chains, chains**2), many)):
        found = (predict(plan, replace(one, launch_seconds=launch_seconds), seconds) for one in (enough, more))
        assert next(found) == pytest.approx(next(found))


@pytest.mark.slow
@given(noop_nets(), st.integers(1, 4), st.integers(0, 6), st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=150, deadline=None)
def test_no_prediction_beats_the_bound(net: NetDef, workers: int, streams: int, launch_seconds: float) -> None:
    graph = build_graph(net)
    seconds = [float(1 + index % 3) for index in range(len(graph))]
    plan = build_plan(graph, seconds)
    hardware = Hardware(workers, streams, launch_seconds=launch_seconds)
    makespan = predict(plan, hardware, seconds)
    assert makespan >= bound_on(plan, hardware) - 1e-9
    launching = launch_seconds * len(graph) if streams else 0.0
    assert makespan <= plan.work + launching + 1e-9


@pytest.mark.slow
@given(noop_nets(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_hardware_without_costs_is_plain_list_scheduling(net: NetDef, workers: int) -> None:
    graph = build_graph(net)
    plan = build_plan(graph, [float(1 + index % 3) for index in range(len(graph))])
    assert predict(plan, Hardware(workers)) == predict_makespan(plan, workers)
    doubled = Hardware(workers, slowdown=(2.0,))
    assert predict(plan, doubled) == pytest.approx(2 * predict_makespan(plan, workers))


@pytest.mark.slow
@given(noop_nets())
@settings(max_examples=100, deadline=None)
def test_the_levels_of_measured_times_are_those_of_a_plan_built_from_them(net: NetDef) -> None:
    graph = build_graph(net)
    seconds = [float(1 + (7 * index) % 5) for index in range(len(graph))]
    measured = retimed(build_plan(graph, [1.0] * len(graph)), seconds)
    anew = build_plan(graph, seconds, measured.chains)
    assert dict(zip(measured.chains, measured.levels, strict=True)) == dict(zip(anew.chains, anew.levels, strict=True))
    assert measured.critical_path == anew.critical_path


def test_hardware_has_a_worker() -> None:
    with pytest.raises(ValueError, match="at least 1 worker"):
        Hardware(0)
    assert Hardware(4, 2).streams_per_worker == 1
    assert Hardware(2, 5).streams_per_worker == 2


def test_the_cost_of_a_chain_is_what_a_run_takes_after_the_wake_up_over_its_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overhead, "_wake_seconds", lambda pool: 1.0)
    monkeypatch.setattr(overhead, "_run_seconds", lambda pool, work: 1.0 + 0.5 * len(work.graph.pieces))
    assert measure_costs(tasks_of_chains(plan_of([[], [], []], [1.0] * 3)).work, 3) == SchedulingCosts(1.0, 0.5)
    monkeypatch.setattr(overhead, "_run_seconds", lambda pool, work: 0.9)
    assert measure_costs(tasks_of_chains(plan_of([[]], [1.0])).work, 3).piece_seconds == 0.0


def test_what_scheduling_costs_is_measured() -> None:
    costs = measure_costs(tasks_of_chains(plan_of([[] for _ in range(200)], [1.0] * 200)).work, repeat=5)
    assert 0 < costs.wake_seconds < 0.1
    assert 0 <= costs.piece_seconds < 0.001
