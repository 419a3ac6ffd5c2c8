"""The baselines of IOS's table schedule as the paper says."""

from __future__ import annotations

from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

from dagexec.core.workspace import Workspace
from dagexec.lab.graph import work_graph
from dagexec.lab.nets import work_net
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.run.prediction import Hardware, predict_host


@pytest.mark.parametrize(("name", "seconds"), [("Sequential", 8), ("Greedy", 6), ("CriticalPath", 4)])
def test_stages_wait_for_the_longest_of_them_and_a_sequence_for_all(
    name: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # greedily, (a, b) take 3 s together, then (c, d) 3 s; c could begin after 1 s
    tasks = work_graph("fork", [("a", 1, []), ("b", 3, []), ("c", 3, [0]), ("d", 1, [0])])
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    policy = getattr(import_module("literature"), name)()
    with closing(Workspace().create_net(work_net(tasks), "dag", 2, policy=policy)) as net:
        assert isinstance(net, BaseNet)
        timed = net.tasks().timed([task.seconds for task in tasks.tasks])
    assert predict_host(timed, Hardware(2)) == seconds
