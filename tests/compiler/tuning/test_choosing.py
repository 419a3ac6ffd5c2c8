from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dagexec.compiler.tuning import choosing
from dagexec.compiler.tuning.choosing import (
    Choice,
    ScheduleConstraints,
    choose_schedule,
    fastest_round,
    from_text,
    to_text,
)
from dagexec.compiler.tuning.layouts import fastest_layout
from dagexec.compiler.tuning.runner import Trial
from dagexec.compiler.tuning.schedule import Schedule
from dagexec.core.model import InputInfo, Model
from dagexec.platform.deadline import Deadline
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.run.overhead import SchedulingCosts
from tests.compiler.tuning.nets import CHAIN, FORK, model_of

MS = 1e-3


class Invented:
    """Measures that are made up: of operators by their number of threads, of runs by the kind of schedule."""

    def __init__(self, operators: dict[int, list[float]], runs: dict[tuple[str, int], float]) -> None:
        self.operators = operators
        self.runs = runs
        self.asked: list[Trial] = []
        self.probes: list[bool] = []

    def quiet(self) -> bool:
        return self.probes.pop(0) if self.probes else True

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        self.asked += trials
        return [self.runs[trial.options.net_type, trial.options.num_workers] for trial in trials]

    def run_rounds(self, trials: Sequence[Trial], seconds: float) -> list[list[float]]:
        return [[one] * 9 if math.isfinite(one) else [] for one in self.run_seconds(trials, seconds)]

    def operator_seconds(self, models: Sequence[Model], seconds: float) -> list[list[float]]:
        return [self.operators[max(_threads(model))] for model in models]

    def slowdown(self, model: Model, cores: int, seconds: float) -> float:
        return 1.0

    def scheduling_costs(self, plan: Plan) -> SchedulingCosts:
        return SchedulingCosts(0.0, 0.0)


def _threads(model: Model) -> list[int]:
    return [next((arg.i for arg in one.arg if arg.name == "threads"), 1) for one in model.net.op]


def test_what_is_measured_goes_before_what_is_predicted() -> None:
    measures = Invented({1: [1 * MS] * 4, 2: [0.6 * MS] * 4}, {("simple", 1): 2.3 * MS, ("dag", 2): 2.4 * MS})
    choice = choose_schedule(model_of(*FORK), ScheduleConstraints(2), measures, 1.0, None)
    assert [row.schedule.kind for row in choice.considered[:3]] == ["mixed", "one after another", "side by side"]
    assert choice.schedule.kind == "one after another"
    measures.runs["dag", 2] = 2.2 * MS
    assert choose_schedule(model_of(*FORK), ScheduleConstraints(2), measures, 1.0, None).schedule.kind == "side by side"


def test_several_workers_are_kept_only_where_they_gain_more_than_times_vary() -> None:
    measures = Invented({1: [1 * MS] * 4, 2: [1 * MS] * 4}, {("simple", 1): 2.0 * MS, ("dag", 2): 1.95 * MS})
    choice = choose_schedule(model_of(*FORK), ScheduleConstraints(2), measures, 1.0, None)
    assert (choice.considered[0].schedule.kind, choice.schedule.kind) == ("side by side", "on one thread")


def test_what_rules_would_choose_is_run_although_its_operators_seemed_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Schedule("one after another", "simple", 1, (2,) * 4)
    monkeypatch.setattr(choosing, "_by_estimates", lambda *_given: Choice(rule))
    measures = Invented({1: [1 * MS] * 4, 2: [3 * MS] * 4}, {})
    measures.run_seconds = lambda trials, seconds: [  # type: ignore[method-assign]
        (1 if max(_threads(trial.model)) == 2 else 4) * MS for trial in trials
    ]
    assert choose_schedule(model_of(*FORK), ScheduleConstraints(2), measures, 1.0, None).schedule == rule


ALONE, TOGETHER = "on one thread", "side by side"


@pytest.mark.parametrize(
    ("alone", "together", "kept"),
    [
        ([10.0] * 16, [5.0] * 4 + [20.0] * 12, ALONE),  # its fastest quarter is faster
        ([10.0] * 16, [5.0] * 13 + [20.0] * 3, TOGETHER),
        ([10.0] * 16, [5.0] * 11 + [20.0] * 5, ALONE),  # as in 1 case of 10 by chance
        ([10.0] * 16, [9.8] * 16, ALONE),
        ([10.0, 10.0], [5.0, 5.0], TOGETHER),
        ([], [5.0], TOGETHER),
        ([10.0] * 3, [5.0] * 16, TOGETHER),  # given up
        ([10.0] * 16, [15.0, 5.0, 15.0], ALONE),
        ([10.0] * 16, [], ALONE),
    ],
)
def test_a_schedule_is_kept_only_where_most_pairs_of_runs_say_that_it_is_faster(
    alone: list[float], together: list[float], kept: str
) -> None:
    kinds = (TOGETHER, ALONE)
    assert kinds[fastest_round(kinds, (together, alone))] == kept


def test_a_net_of_small_operators_is_run_on_one_thread_whatever_is_predicted() -> None:
    us = 1e-6
    measures = Invented({1: [60 * us] * 4, 2: [9 * us] * 4}, {("simple", 1): 90 * us, ("dag", 2): 80 * us})
    choose_schedule(model_of(*FORK), ScheduleConstraints(2), measures, 1.0, None)
    assert [1] * 4 in [_threads(trial.model) for trial in measures.asked if trial.options.net_type == "simple"]


def test_on_a_busy_machine_prediction_decides_alone() -> None:
    measures = Invented({1: [1 * MS] * 4}, {("simple", 1): 9.0})
    measures.probes = [False]
    choice = choose_schedule(model_of(*CHAIN), ScheduleConstraints(2), measures, 1.0, None)
    assert choice.schedule == Schedule("one after another", "simple", 1, (2, 2, 2, 2))
    assert [_threads(trial.model) for trial in measures.asked] == [[1] * 4, [2] * 4]  # not for their times
    assert [row.measured for row in choice.considered] == [None] * len(choice.considered)


def test_what_was_measured_while_others_came_to_use_the_machine_does_not_count() -> None:
    measures = Invented({1: [1 * MS] * 4, 2: [5 * MS] * 4}, {("simple", 1): 9.0, ("dag", 2): 1 * MS})
    measures.probes = [True, False]
    choice = choose_schedule(model_of(*CHAIN), ScheduleConstraints(2), measures, 1.0, None)
    assert choice.schedule == Schedule("one after another", "simple", 1, (2, 2, 2, 2))


def test_candidates_that_are_predicted_to_be_far_slower_are_not_run() -> None:
    measures = Invented({1: [4 * MS] * 4, 2: [2 * MS] * 4}, {})
    choice = choose_schedule(model_of(*CHAIN), ScheduleConstraints(2, RunOptions(num_workers=1)), measures, 1.0, None)
    assert (choice.schedule.net_type, choice.schedule.threads) == ("simple", (2, 2, 2, 2))
    assert not measures.asked


def test_the_nets_that_are_run_have_the_threads_of_their_schedules() -> None:
    measures = Invented({1: [1 * MS] * 4, 2: [0.6 * MS] * 4}, {("simple", 1): 2 * MS, ("dag", 2): 3 * MS})
    choose_schedule(model_of(*FORK), ScheduleConstraints(2), measures, 1.0, None)
    seen = {
        (trial.options.net_type, trial.options.num_workers, tuple(_threads(trial.model))) for trial in measures.asked
    }
    assert ("simple", 1, (2, 2, 2, 2)) in seen
    assert ("dag", 2, (1, 1, 1, 1)) in seen


def test_a_small_net_may_be_fastest_on_one_thread() -> None:
    us = 1e-6
    measures = Invented({1: [20 * us] * 4, 2: [13 * us] * 4}, {("simple", 1): 0.0})
    choice = choose_schedule(model_of(*CHAIN), ScheduleConstraints(2, RunOptions(num_workers=1)), measures, 1.0, None)
    assert [row.schedule.kind for row in choice.considered] == ["on one thread", "one after another"]
    assert [_threads(trial.model) for trial in measures.asked] == [[1] * 4, [2] * 4]


def test_several_runs_in_flight_are_not_measured() -> None:
    measures = Invented({}, {})
    choice = choose_schedule(model_of(*FORK), ScheduleConstraints(2, RunOptions(replicas=4)), measures, 1.0, None)
    assert (choice.schedule.kind, choice.schedule.net_type, choice.schedule.workers) == ("for throughput", "simple", 2)


def test_threads_that_the_caller_gave_are_the_most_an_operator_gets() -> None:
    measures = Invented({1: [1 * MS] * 4}, {("simple", 1): 4 * MS, ("dag", 2): 3 * MS})
    choice = choose_schedule(
        model_of(*FORK), ScheduleConstraints(2, RunOptions(intra_op_threads=1)), measures, 1.0, None
    )
    assert set(choice.schedule.threads) == {1}
    two = choose_schedule(
        model_of(*FORK), ScheduleConstraints(2, RunOptions(replicas=2, intra_op_threads=2)), measures, 1.0, None
    )
    assert (set(two.schedule.threads), two.schedule.workers) == ({2}, 1)


def test_without_measuring_the_cost_of_operators_decides_and_always_in_the_same_way() -> None:
    inputs = {"x": np.zeros((4,), np.float32)}
    choices = {choose_schedule(model_of(*FORK), ScheduleConstraints(2), None, 0.0, inputs).schedule for _ in range(3)}
    assert choices == {Schedule("on one thread", "simple", 1, (1, 1, 1, 1))}
    large = {"x": np.broadcast_to(np.float32(1), (1 << 28,))}
    wide = choose_schedule(model_of(*CHAIN), ScheduleConstraints(2), None, 0.0, large).schedule
    assert (wide.kind, wide.threads) == ("one after another", (2, 2, 2, 2))


def test_operators_of_unknown_shapes_are_predicted_as_small_and_get_threads_by_their_work() -> None:
    choice = choose_schedule(model_of(*FORK), ScheduleConstraints(2), None, 0.0, None)
    assert choice.schedule == Schedule("by work", "simple", 1, (2, 2, 2, 2), by_work=True)
    assert choice.considered[0].predicted == pytest.approx(4 * 2e-6)
    one = choose_schedule(model_of(*FORK), ScheduleConstraints(2, RunOptions(intra_op_threads=1)), None, 0.0, None)
    assert set(one.schedule.threads) == {1}


def test_a_model_whose_shapes_are_open_gets_threads_by_the_work_of_each_run() -> None:
    model = replace(model_of(*CHAIN), inputs={"x": InputInfo(shape=(None,))})
    chosen = choose_schedule(model, ScheduleConstraints(2), None, 0.0, {"x": np.zeros((1,), np.float32)}).schedule
    assert chosen.by_work
    arguments = [(arg.name, arg.i) for one in chosen.applied(model).net.op for arg in one.arg]
    assert arguments == [("max_threads", 2)] * 4


@pytest.mark.parametrize(("elements", "threads"), [(1 << 10, 1), (1 << 14, 1), (1 << 18, 2)])
def test_only_operators_with_work_for_two_get_two_threads_by_rule(elements: int, threads: int) -> None:
    inputs = {"x": np.zeros((elements,), np.float32)}
    chosen = choose_schedule(model_of(*CHAIN), ScheduleConstraints(2), None, 0.0, inputs).schedule
    assert chosen.threads == (threads,) * 4


def test_a_schedule_comes_back_from_the_text_that_is_kept_of_it() -> None:
    schedule = Schedule("mixed", "dag", 2, (2, 1, 1, 2), ((1, 2),))
    assert from_text(to_text(schedule), model_of(*FORK).net) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        to_text(Schedule("mixed", "dag", 2, (1, 1, 1))),
        to_text(Schedule("mixed", "dag", 0, (1, 1, 1, 1))),
        to_text(Schedule("mixed", "fast", 2, (1, 1, 1, 1))),
        to_text(Schedule("mixed", "dag", 2, (1, 1, 0, 1))),
        to_text(Schedule("mixed", "dag", 2, (1, 1, 1, 1), ((2, 1),))),
        to_text(Schedule("mixed", "dag", 2, (1, 1, 1, 1), ((2, 9),))),
    ],
)
def test_text_that_is_no_schedule_of_this_net_is_measured_anew(text: str) -> None:
    assert from_text(text, model_of(*FORK).net) is None


class Timed(Invented):
    """Runs whose times are given in the order of trials."""

    def __init__(self, times: list[float]) -> None:
        super().__init__({}, {})
        self.times = times

    def run_seconds(self, trials: Sequence[Trial], seconds: float) -> list[float]:
        self.asked += trials
        return self.times


def test_the_fastest_layout_is_kept_and_the_first_where_another_hardly_gains() -> None:
    nets = {"NHWC": model_of(*CHAIN), "NCHW16c": model_of(*FORK)}
    assert fastest_layout(list(nets), nets.__getitem__, Timed([3 * MS, 2 * MS]), 1.0, Deadline(60.0)) == "NCHW16c"
    assert fastest_layout(list(nets), nets.__getitem__, Timed([3 * MS, 2.98 * MS]), 1.0, Deadline(60.0)) == "NHWC"


def test_a_layout_in_which_the_net_does_not_run_is_not_chosen() -> None:
    nets = {"NHWC": model_of(*CHAIN), "NCHW16c": model_of(*FORK)}
    assert fastest_layout(list(nets), nets.__getitem__, Timed([math.inf, 2 * MS]), 1.0, Deadline(60.0)) == "NCHW16c"
    assert fastest_layout(list(nets), nets.__getitem__, Timed([math.inf, math.inf]), 1.0, Deadline(60.0)) is None


def test_layouts_that_give_the_same_net_are_run_once() -> None:
    measures = Timed([1 * MS, 2 * MS])
    nets = {"NHWC": model_of(*CHAIN), "NCHW16c": model_of(*FORK), "NCHW16c padded": model_of(*FORK)}
    assert fastest_layout(list(nets), nets.__getitem__, measures, 1.0, Deadline(60.0)) == "NHWC"
    assert len(measures.asked) == 2
