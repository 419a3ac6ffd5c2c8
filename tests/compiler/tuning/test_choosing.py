from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dagexec.compiler.tuning.choosing import Estimated, Known, choose
from dagexec.compiler.tuning.layouts import fastest_layout
from dagexec.compiler.tuning.runner import Trial
from dagexec.core.model import InputInfo, Model
from dagexec.platform import processor
from dagexec.platform.deadline import Deadline
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.overhead import WORTH_SHARING
from dagexec.scheduler.run.prediction import TimedTasks
from tests.compiler.tuning.nets import CHAIN, FORK, model_of, net_of

MS = 1e-3
BY_NUMPY = Model("drawn", net_of(*FORK, engine=""), inputs={"x": InputInfo(shape=(4,))}, outputs=("last",))


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "available_cores", lambda: 4)


def in_pieces(seconds: float, pieces: int = 4) -> TimedTasks:
    return TimedTasks(TaskGraph([pieces], [[]], [0], [0]), [seconds])


def net_for(options: RunOptions, tasks: TimedTasks | None, model: Model | None = None) -> tuple[str, int]:
    chosen = choose(model or model_of(*FORK), options, Known(tasks))
    return chosen.net_type, chosen.workers


def test_what_is_worth_sharing_gets_all_cores_and_what_is_not_stays_in_its_caller_s_thread() -> None:
    assert net_for(RunOptions(), in_pieces(2 * WORTH_SHARING)) == ("dag", 4)
    assert net_for(RunOptions(), in_pieces(WORTH_SHARING / 2)) == ("simple", 1)
    assert net_for(RunOptions(replicas=3), in_pieces(WORTH_SHARING / 2)) == ("simple", 3)
    assert net_for(RunOptions(replicas=3), in_pieces(2 * WORTH_SHARING)) == ("dag", 4)


def test_where_shapes_are_open_a_run_may_be_worth_sharing() -> None:
    model = replace(model_of(*FORK), inputs={"x": InputInfo(shape=(None,))})
    assert net_for(RunOptions(), in_pieces(WORTH_SHARING / 2), model) == ("dag", 4)
    assert net_for(RunOptions(), None) == ("dag", 4)


def test_on_one_core_there_is_nobody_to_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "available_cores", lambda: 1)
    assert net_for(RunOptions(), in_pieces(1.0)) == ("simple", 1)
    assert net_for(RunOptions(num_workers=2), in_pieces(1.0)) == ("dag", 2)


@pytest.mark.parametrize("seconds", [WORTH_SHARING / 2, 2 * WORTH_SHARING])
def test_what_the_user_says_counts(seconds: float) -> None:
    assert net_for(RunOptions(net_type="simple"), in_pieces(seconds)) == ("simple", 1)
    assert net_for(RunOptions(net_type="async_dag", num_workers=3), in_pieces(seconds)) == ("async_dag", 3)
    assert net_for(RunOptions(net_type="dag"), in_pieces(seconds)) == ("dag", 4)


def test_runs_are_predicted_for_one_worker_and_more() -> None:
    found = choose(model_of(*FORK), RunOptions(), Known(in_pieces(8 * MS))).predicted(6)
    assert list(found) == [1, 2, 4, 6]
    assert found[1] == 8 * MS
    assert 8 / 2 * MS < found[2] < 0.6 * found[1]
    assert 8 / 4 * MS < found[4] < 0.3 * found[1]
    assert found[6] > 8 / 4 * MS  # there are four pieces
    assert choose(model_of(*FORK), RunOptions(), Known(None)).predicted(6) == {}


def test_estimates_follow_from_the_work_of_operators() -> None:
    large = {"x": np.broadcast_to(np.float32(1), (1 << 26,))}
    found = Estimated(model_of(*FORK), large).tasks
    assert found is not None
    assert found.work > 10 * MS
    assert min(found.graph.pieces) > 1
    assert sorted(map(len, found.graph.children)) == [0, 1, 1, 2]
    small = Estimated(model_of(*FORK), {"x": np.zeros(4, np.float32)}).tasks
    assert small is not None
    assert small.work < WORTH_SHARING
    assert set(small.graph.pieces) == {1}
    assert Estimated(model_of(*FORK), None).tasks is None


def test_operators_of_numpy_are_one_piece_and_keep_the_interpreter_lock_while_they_compute_little() -> None:
    found = Estimated(BY_NUMPY, {"x": np.broadcast_to(np.float32(1), (1 << 26,))}).tasks
    assert found is not None
    assert set(found.graph.pieces) == {1}
    assert set(found.held) == {20e-6}
    small = Estimated(BY_NUMPY, {"x": np.zeros(4, np.float32)}).tasks
    assert small is not None
    assert list(small.held) == list(small.seconds)


class Timed:
    """Runs whose times are given in the order of trials."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.asked: list[Trial] = []

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
