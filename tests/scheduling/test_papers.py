"""Bundled policies against the worked examples of their papers, and against makespans that can be found by hand."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from dagexec.core.graph import build_graph
from dagexec.scheduler.plan.plan import Plan, build_plan, with_policy
from dagexec.scheduler.run.prediction import predict_makespan
from dagexec.scheduling import Chains, Ios, Policy, RunState, WorkStealing, find_policy
from dagexec.scheduling import ios as ios_module
from dagexec.scheduling.heft import upward_ranks
from dagexec.scheduling.ios import parts_of
from dagexec.scheduling.paths import longest_paths
from dagexec.scheduling.peft import optimistic_costs
from dagexec.scheduling.placement import Costs, place
from tests.nets import net_of

Edges = dict[tuple[int, int], float]

TOPCUOGLU = (  # Figure 2: seconds of ten tasks on three processors, and of transfers
    [[14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10], [13, 16, 9], [7, 15, 11], [5, 11, 14],
     [18, 12, 20], [21, 7, 16]],
    {(1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23, (4, 8): 27,
     (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13},
)  # fmt: skip
ARABNEJAD = (  # Figure 1 of PEFT's paper
    [[22, 21, 36], [22, 18, 18], [32, 27, 43], [7, 10, 4], [29, 27, 35], [26, 17, 24], [14, 25, 30], [29, 23, 36],
     [15, 21, 8], [13, 16, 33]],
    {(1, 2): 17, (1, 3): 31, (1, 4): 29, (1, 5): 13, (1, 6): 7, (2, 8): 3, (2, 9): 30, (3, 7): 16, (4, 8): 11,
     (4, 9): 7, (5, 9): 57, (6, 8): 5, (7, 10): 9, (8, 10): 42, (9, 10): 7},
)  # fmt: skip


def costs_of(table: Sequence[Sequence[float]], edges: Edges) -> Costs:
    """An example, whose tasks the paper counts from 1."""
    children: list[list[int]] = [[] for _ in table]
    for parent, child in edges:
        children[parent - 1].append(child - 1)
    return Costs(children, table, {(parent - 1, child - 1): seconds for (parent, child), seconds in edges.items()})


def plan_of(parents: list[list[int]], seconds: list[float]) -> Plan:
    """Each operator a chain."""
    return build_plan(build_graph(net_of(parents)), seconds, [(index,) for index in range(len(parents))])


def makespan(plan: Plan, policy: Policy | str, workers: int = 2) -> float:
    """As it is predicted under a policy."""
    return predict_makespan(with_policy(plan, find_policy(policy), workers), workers)


def chains_of(plan: Plan, workers: int) -> Chains:
    """What a policy is told."""
    return Chains("net", list(map(str, plan.chains)), plan.children, plan.seconds, workers)


def random_plan(source: random.Random, most: int = 7) -> Plan:
    """Up to `most` operators with up to three parents each."""
    count = source.randint(1, most)
    parents = [sorted({source.randrange(child) for _ in range(source.randrange(4))}) if child else []
               for child in range(count)]  # fmt: skip
    return plan_of(parents, [float(source.randint(1, 9)) for _ in range(count)])


def test_heft_finds_the_ranks_and_the_schedule_of_its_paper_on_unequal_processors() -> None:
    costs = costs_of(*TOPCUOGLU)
    ranks = upward_ranks(costs)
    published = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert list(ranks) == pytest.approx(published, abs=1e-3)
    assert place(costs, ranks).makespan == 80


def test_peft_finds_the_table_and_the_schedule_of_its_paper_where_heft_takes_longer() -> None:
    costs = costs_of(*ARABNEJAD)
    table = optimistic_costs(costs)
    ranks = [sum(row) / 3 for row in table]
    assert ranks == pytest.approx([72.7, 41.0, 37.0, 43.7, 31.0, 41.7, 17.0, 20.7, 16.3, 0.0], abs=0.05)
    assert place(costs, ranks, table).makespan == 122
    assert place(costs, upward_ranks(costs)).makespan == 133


@pytest.mark.parametrize("name", ["heft", "peft"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_that_follows_a_placement_takes_as_long_as_that(name: str, workers: int) -> None:
    source = random.Random(workers)
    for _ in range(50):
        plan = random_plan(source, 12)
        policy = find_policy(name)
        placement = policy.place(chains_of(plan, workers))  # type: ignore[attr-defined]
        assert makespan(plan, policy, workers) == pytest.approx(placement.makespan)


def test_what_the_optimistic_costs_of_equal_workers_are_is_the_longest_path_behind_a_chain() -> None:
    source = random.Random(0)
    for _ in range(20):
        plan = random_plan(source, 12)
        table = optimistic_costs(Costs(plan.children, [[one, one] for one in plan.seconds]))
        behind = [level - seconds for level, seconds in zip(plan.levels, plan.seconds, strict=True)]
        assert [row[0] for row in table] == pytest.approx(behind)


def test_a_task_is_placed_in_a_gap_that_it_fits_into() -> None:
    # what 0 passes to 1 comes to the first worker at 4, and until then 2 has time there
    costs = Costs([[1], [], []], [[9.0, 1.0], [2.0, 9.0], [3.0, 9.0]], {(0, 1): 3.0})
    assert place(costs, [9.0, 8.0, 7.0]).rows == [[(0.0, 3.0, 2), (4.0, 6.0, 1)], [(0.0, 1.0, 0)]]


FORK = [[], [], [], [], [2]]
"""Four that wait for nothing; the last waits for the third."""


@pytest.mark.parametrize(
    ("policy", "seconds", "expected"),
    [
        # the critical path (2 and 4) at once, the others beside it
        ("critical_path", [3.0, 3.0, 2.0, 1.0, 6.0], 8.0),
        ("heft", [3.0, 3.0, 2.0, 1.0, 6.0], 8.0),
        # shortest first: 3 | 2, then 0 at 1 and 1 at 2, and 4 from 4 to 10
        ("min_min", [3.0, 3.0, 2.0, 1.0, 6.0], 10.0),
        # those ready at first are in the order of the plan, 2, 0, 1, 3: 1 at 2, 3 at 3, and 4 from 4 to 10
        ("fifo", [3.0, 3.0, 2.0, 1.0, 6.0], 10.0),
        # the newest of them is 3: 3 | 1, 0 at 1, 2 at 3, then 4 from 5 to 11
        ("lifo", [3.0, 3.0, 2.0, 1.0, 6.0], 11.0),
    ],
)
def test_two_workers_take_what_can_be_counted_on_fingers(policy: str, seconds: list[float], expected: float) -> None:
    assert makespan(plan_of(FORK, seconds), policy) == expected


def test_random_priorities_are_those_of_their_seed() -> None:
    chains = chains_of(plan_of([[] for _ in range(20)], [1.0] * 20), 2)
    assert find_policy("random").order(chains) == find_policy("random").order(chains)
    assert sorted(find_policy("random").order(chains)) == list(range(20))


def test_a_thief_takes_the_oldest_and_an_owner_the_newest() -> None:
    state = RunState(released_by=[-1, 0, 0, 1, 1])
    policy = WorkStealing()
    assert policy.choose((1, 2, 3, 4), 0, state) == 2
    assert policy.choose((1, 3, 4), 1, state) == 4
    assert policy.choose((3, 4), 0, state) == 3
    assert policy.choose((0,), 1, state) == 0


def closed_ends(left: frozenset[int], children: Sequence[Sequence[int]]) -> Iterator[frozenset[int]]:
    for size in range(1, len(left) + 1):
        for chosen in map(frozenset, combinations(sorted(left), size)):
            if all(child in chosen or child not in left for task in chosen for child in children[task]):
                yield chosen


def stage_seconds(stage: frozenset[int], plan: Plan, workers: int) -> float | None:
    """Groups are what is connected in the stage, and follow one another where there are more than workers."""
    groups: list[set[int]] = []
    for task in stage:
        near = {*plan.children[task], *(other for other in stage if task in plan.children[other])}
        touching = [group for group in groups if group & near]
        groups = [group for group in groups if group not in touching] + [{task}.union(*touching)]
    if max(map(len, groups)) > 3 or len(groups) > 8:
        return None
    busy = [0.0] * workers
    for seconds in sorted((sum(plan.seconds[task] for task in group) for group in groups), reverse=True):
        busy[busy.index(min(busy))] += seconds
    return max(busy)


def least(left: frozenset[int], plan: Plan, workers: int) -> float:
    """What the best stages take, found by trying all."""
    if not left:
        return 0.0
    return min(
        seconds + least(left - stage, plan, workers)
        for stage in closed_ends(left, plan.children)
        if (seconds := stage_seconds(stage, plan, workers)) is not None
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_dynamic_program_finds_stages_as_good_as_the_best_of_all(seed: int) -> None:
    plan = random_plan(random.Random(seed), 6)
    policy = Ios()
    policy.begin(chains_of(plan, 2))
    took = [stage_seconds(frozenset(stage), plan, 2) for stage in policy.stages]
    assert sum(filter(None, took)) == pytest.approx(least(frozenset(range(len(plan.chains))), plan, 2))
    assert sorted(chain for stage in policy.stages for chain in stage) == list(range(len(plan.chains)))
    assert makespan(plan, "ios") <= sum(filter(None, took)) + 1e-9


def test_a_group_of_three_runs_beside_a_chain_that_takes_as_long_and_one_of_four_does_not() -> None:
    def took(count: int) -> float:
        parents = [[], [0], *([child] for child in range(1, count)), [0]]
        plan = plan_of([*parents, [count, count + 1]], [1.0, *[2.0] * count, 2.0 * count, 1.0])
        policy = Ios()
        policy.begin(chains_of(plan, 2))
        return sum(filter(None, (stage_seconds(frozenset(stage), plan, 2) for stage in policy.stages)))

    assert [took(count) for count in (1, 2, 3)] == [4.0, 6.0, 8.0]
    assert took(4) == 10.0 + 2.0


def test_parts_are_cut_where_all_paths_meet_and_nowhere_else() -> None:
    plan = plan_of([[], [0], [0], [1, 2], [3], [3], [4, 5]], [1.0] * 7)
    assert [list(part) for part in parts_of(chains_of(plan, 2))] == [[0], [1, 2, 3], [4, 5, 6]]
    two = plan_of([[], [], [0, 1], [2], []], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert sum(map(len, parts_of(chains_of(two, 2)))) == 5


def test_a_net_too_wide_for_stages_goes_by_the_critical_path_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ios_module, "MOST_STAGES", 1000)
    count = 40
    plan = plan_of([[], *([0] for _ in range(count))], [1.0, *map(float, range(1, count + 1))])
    with caplog.at_level(logging.WARNING, logger="dagexec"):
        found = makespan(plan, "ios")
    assert f"{count} of {count + 1} chains are too wide for policy 'ios'" in caplog.text
    assert found == makespan(plan, "critical_path")


@pytest.mark.parametrize("seed", range(10))
def test_no_policy_beats_the_bounds_nor_loses_more_than_graham_allows_to_those_that_never_wait(seed: int) -> None:
    plan = random_plan(random.Random(seed), 12)
    bound = max(plan.critical_path, plan.work / 2)
    for name in ("critical_path", "fifo", "lifo", "min_min", "random", "work_stealing", "heft", "peft", "ios"):
        found = makespan(plan, name)
        assert bound - 1e-9 <= found <= plan.work + 1e-9, name
        if name not in ("heft", "peft", "ios"):
            assert found <= (plan.work + plan.critical_path) / 2 + 1e-9, name


def test_longest_paths_of_a_graph_in_any_order_of_its_nodes() -> None:
    assert longest_paths([[1, 2], [3], [3], []], [1.0, 5.0, 2.0, 1.0]) == [7.0, 6.0, 3.0, 1.0]
    assert longest_paths([[], [0], [0], [1, 2]], [1.0, 2.0, 5.0, 1.0]) == [1.0, 3.0, 6.0, 7.0]
