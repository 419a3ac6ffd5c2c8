"""What a net says of its tasks: which operators they compute, and what they took."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import zoo
from dagexec.binding.parameters import initialized, parameter_workspace
from dagexec.compiler.compilation import compile_model
from dagexec.options import CompileOptions
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.run.engine import can_run
from dagexec.scheduler.run.prediction import Hardware, predict_host


def net_of_lenet(most: int | None = None) -> DAGNet:
    model = compile_model(initialized(zoo.build("lenet")), CompileOptions(tuning_seconds=0)).model
    workspace = parameter_workspace(model)
    workspace.feed_blob("data", np.ones((8, 1, 28, 28), np.float32))
    return DAGNet(model.net, workspace, num_workers=1, options=RunOptions(intra_op_threads=most))


def test_the_parts_of_each_operator_that_tasks_compute_are_all_of_it() -> None:
    with net_of_lenet() as net:
        tasks = net.tasks()
        preparation = net.prepared()
        runs = [index for index in range(len(net.graph)) if preparation.timed([index])]
        found = dict.fromkeys(runs, 0.0)
        for row in tasks.shares:
            for index, part in row:
                found[index] += part
        assert found == pytest.approx(dict.fromkeys(runs, 1.0))
        seconds = [float(index + 1) for index in range(len(net.graph))]
        assert tasks.timed(seconds).work == pytest.approx(sum(seconds[index] for index in runs))


@pytest.mark.skipif(not can_run(), reason="no machine code runs here")
def test_what_tasks_took_is_known_after_a_run_and_predicts_the_next() -> None:
    with net_of_lenet() as net:
        assert net.measured_tasks() is None
        net.run()
        measured = net.measured_tasks()
        assert measured is not None
        assert min(measured.seconds) > 0
        assert measured.graph is net.tasks().work.graph
        assert predict_host(measured, Hardware(1)) == pytest.approx(measured.work)
        net.workspace.feed_blob("data", np.ones((4, 1, 28, 28), np.float32))
        assert net.measured_tasks() is None  # of other shapes nothing is known


def test_a_limit_of_one_thread_an_operator_leaves_tasks_of_one_piece() -> None:
    with net_of_lenet(1) as limited:
        assert set(limited.tasks().work.graph.pieces) == {1}
