"""Predictions from measured times: by hand-made cost models, and beside what the runtimes really take."""

import itertools
import json
import threading

import numpy as np
import pytest

import dagexec
from dagexec.analysis.comparison import compare, random_feeds
from dagexec.analysis.what_if import CostModel, CostProfiler, slowdown_up_to, what_if
from dagexec.compiler.compilation import compile_model
from dagexec.core.graph import build_graph
from dagexec.options import CompileOptions
from dagexec.scheduler.observe.spans import Span
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import build_plan
from dagexec.scheduler.run.engine import can_run
from dagexec.scheduler.run.prediction import tasks_of_chains
from tests.command_line import Cli
from tests.nets import net_of, parents_from_edges

DIAMOND = parents_from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
SECONDS = (1e-3, 4e-3, 3e-3, 1e-3)


def test_predictions_for_more_workers_end_at_the_critical_path() -> None:
    plan = build_plan(build_graph(net_of(DIAMOND)), [1.0] * 4)
    one, two, many = what_if(tasks_of_chains(plan), CostModel(SECONDS), (1, 2, 64))
    assert (one.predicted_ms, one.speed_up, one.bound_ms) == pytest.approx((9.0, 1.0, 9.0))
    assert (two.predicted_ms, two.speed_up, two.bound_ms) == pytest.approx((6.0, 1.5, 6.0))
    assert (many.workers, many.streams, many.predicted_ms) == (64, 0, pytest.approx(6.0))


def test_what_a_run_and_its_chains_cost_is_part_of_a_prediction_but_not_of_the_bound() -> None:
    plan = build_plan(build_graph(net_of(DIAMOND)), [1.0] * 4)
    cost_model = CostModel(SECONDS, run_seconds=2e-3, piece_seconds=0.1e-3, wake_seconds=0.5e-3)
    one, two = what_if(tasks_of_chains(plan), cost_model, (1, 2))
    assert one.predicted_ms == pytest.approx(2 + 9 + 4 * 0.1)
    assert two.predicted_ms == pytest.approx(2 + 6 + 3 * 0.1)  # the branch that wakes a worker is the shorter one
    assert (one.bound_ms, two.bound_ms) == pytest.approx((9.0, 6.0))


def test_workers_that_launch_are_predicted_for_each_number_of_streams() -> None:
    plan = build_plan(build_graph(net_of(DIAMOND)), [1.0] * 4)
    rows = what_if(tasks_of_chains(plan), CostModel(SECONDS), (1, 2), (1, 4), launch_seconds=0.1e-3)
    assert [(row.workers, row.streams) for row in rows] == [(1, 0), (2, 0), (1, 1), (2, 2), (1, 4), (2, 4)]
    alone = rows[2]
    assert alone.predicted_ms == pytest.approx(0.1 + 9.0)
    assert rows[4].predicted_ms == pytest.approx(0.1 + 6.0)
    assert all(row.predicted_ms >= row.bound_ms - 1e-9 for row in rows)


def test_the_slowdown_between_one_core_and_all_is_on_a_straight_line() -> None:
    assert slowdown_up_to(1, 3.0) == (1.0,)
    assert slowdown_up_to(2, 1.5) == (1.0, 1.5)
    assert slowdown_up_to(3, 1.5) == (1.0, 1.25, 1.5)
    assert slowdown_up_to(2, 0.9) == (1.0, 1.0)


class TimedExecutor:
    """Each run adds spans of the next row of seconds, one an operator, to the trace it is given."""

    num_workers = 2

    def __init__(self, *runs: tuple[float, ...]) -> None:
        self._runs = list(enumerate(runs))
        self._lock = threading.Lock()

    def run(self, inputs: object, trace: Trace) -> None:
        with self._lock:
            number, seconds = self._runs.pop(0)
            ends = [0, *itertools.accumulate(round(second * 1e9) for second in seconds)]
            trace.spans += [Span(index, "w", *ends[index : index + 2], run=number) for index in range(len(seconds))]


def test_a_cost_model_is_made_of_medians_and_of_what_the_operators_take_longer_on_all_cores() -> None:
    plan = build_plan(build_graph(net_of([[], [0]])), [1.0, 1.0])
    alone = TimedExecutor((1e-3, 3e-3), (2e-3, 4e-3), (1e-3, 5e-3))
    crowd = TimedExecutor((4e-3, 4e-3), (2e-3, 4e-3), (4e-3, 4e-3), (5e-3, 5e-3), (6e-3, 6e-3), (6e-3, 6e-3))
    profiler = CostProfiler(alone, crowd, {})  # type: ignore[arg-type]
    for _ in range(3):
        profiler.run()
    found = profiler.cost_model(tasks_of_chains(plan))
    # medians 1 and 4 ms, brought to the median of the runs' sums 4, 6 and 6 ms
    assert found.operator_seconds == pytest.approx((1e-3 * 6 / 5, 4e-3 * 6 / 5))
    # (8 + 6) / 2 over 4, (8 + 10) / 2 over 6, 12 over 6: the median is 7 / 4
    assert found.slowdown == pytest.approx((1.0, 1.75))
    assert found.run_seconds < 0  # no time has passed beside the operators' made-up times
    assert found.piece_seconds >= 0
    assert found.wake_seconds > 0


def test_predictions_say_when_they_are_weak() -> None:
    assert CostModel(SECONDS).weakness == ""
    assert CostModel((10e-6, 20e-6)).weakness == "a run of 30 us is too short to be predicted"
    busy = CostModel(SECONDS, spread=(0.9, 1.4))
    assert busy.weakness == "operators took from 0.90 to 1.40 of the median run's time: the machine was busy"
    plan = build_plan(build_graph(net_of(DIAMOND)), [1.0] * 4)
    (row,) = what_if(tasks_of_chains(plan), busy, (1,))
    assert (row.low_ms, row.predicted_ms, row.high_ms) == pytest.approx((8.1, 9.0, 12.6))


@pytest.mark.skipif(not can_run(), reason="no machine code runs here")
def test_operators_take_what_tasks_took_in_machine_code_shared_out_as_traced() -> None:
    with dagexec.compile("zoo:lenet", net_type="dag", num_workers=1) as executor:
        executor.run(random_feeds(executor.model))
        tasks = executor.net().tasks()
    traced = [float(index + 1) for index in range(len(executor.graph))]
    took = [10.0 * whole for whole in tasks.timed(traced).seconds]
    assert tasks.operator_seconds(took, traced) == pytest.approx([10.0 * one for one in traced])
    assert tasks.operator_seconds([0.0] * len(took), traced) == traced


def test_compare_predicts_from_simple_nets_times_alone() -> None:
    done: list[float] = []
    settings = {"repeat": 2, "workers": (1, 2), "what_if_workers": (1, 8), "progress": done.append}
    comparison = compare("zoo:lenet", CompileOptions(optimize=False), **settings)  # type: ignore[arg-type]
    assert comparison.agrees
    cost_model = comparison.cost_model
    assert len(cost_model.operator_seconds) == comparison.operators == 8
    assert all(seconds > 0 for seconds in cost_model.operator_seconds)
    simple = comparison.rows[0]
    work = sum(cost_model.operator_seconds) * 1e3
    assert cost_model.run_seconds > 0
    assert simple.predicted_ms == pytest.approx(work + cost_model.run_seconds * 1e3)
    for row in comparison.rows:
        assert row.predicted_ratio == pytest.approx(row.predicted_ms / row.median_ms)
        assert row.predicted_ms >= work - 1e-9  # LeNet is one chain
    assert [row.workers for row in comparison.what_if] == [1, 8]
    assert done == sorted(done)
    assert done[-1] == 1.0


@pytest.mark.slow
@pytest.mark.slow
def test_a_row_is_predicted_from_its_own_plan_and_workers() -> None:
    model = compile_model(dagexec.load_model("zoo:squeezenet"), CompileOptions()).model
    comparison = compare(model, CompileOptions(optimize=False), net_types=("dag",), workers=(1, 2), repeat=1)
    with dagexec.compile(model, optimize=False, net_type="dag") as executor:
        executor.run(random_feeds(executor.model))
        tasks = executor.net().tasks()
    assert max(tasks.work.graph.pieces) > 1
    for row in comparison.rows[1:]:
        seconds = comparison.cost_model.predict(tasks, comparison.cost_model.hardware(row.workers))
        assert row.predicted_ms == pytest.approx(seconds * 1e3)
        assert row.predicted_ratio == pytest.approx(row.predicted_ms / row.median_ms)


@pytest.mark.slow
def test_the_command_prints_a_table_of_what_if_and_the_same_as_json(cli: Cli) -> None:
    options = ("compare", "zoo:lenet", "--repeat", 1, "--net-type", "dag", "--what-if", "1,4", "--streams", "2")
    status, out, _ = cli(*options)
    assert status == 0
    assert "what if" in out
    status, out, _ = cli(*options, "--json")
    found = json.loads(out)
    assert status == 0
    assert [(row["workers"], row["streams"]) for row in found["what_if"]] == [(1, 0), (4, 0), (1, 2), (4, 4)]
    assert all(np.isfinite(row["predicted_ms"]) for row in found["what_if"])
    assert {"predicted_ms", "predicted_ratio"} <= set(found["rows"][1])
    assert len(found["cost_model"]["operator_seconds"]) == found["operators"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--what-if", "1,x"), "--what-if '1,x': expected counts of 1 or more"),
        (("--what-if", "0"), "--what-if '0': expected counts"),
        (("--what-if", "1", "--streams", "0"), "--streams '0': expected counts"),
        (("--streams", "4"), "needs --what-if with the numbers of workers"),
    ],
)
def test_counts_that_make_no_sense_are_refused_before_anything_runs(
    cli: Cli,
    options: tuple[str, ...],
    message: str,
) -> None:
    status, out, err = cli("compare", "zoo:lenet", *options)
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())
