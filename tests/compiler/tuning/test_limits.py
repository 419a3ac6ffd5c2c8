"""Time limits of tuning: kept whatever a candidate takes, and Ctrl-C is heard whatever runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dagexec.compiler.tuning import bench as bench_module
from dagexec.compiler.tuning.bench import Bench
from dagexec.compiler.tuning.runner import Trial
from dagexec.core.model import Model
from dagexec.core.workspace import Workspace
from dagexec.errors import DeadlineExceededError, RunTimeoutError
from dagexec.ops.engines.onednn.binding import library
from dagexec.platform.deadline import Deadline, within_deadline
from dagexec.scheduler.nets.simple import SimpleNet
from tests.compiler.tuning.nets import CHAIN, model_of

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

MS = 1e-3
A_LONG_TIME = 120.0  # seconds: against a hang


class InventedRunner:
    """A runner on a clock of its own: preparing and running take what the test says, by the name of the net."""

    now = 0.0
    preparing = 0.0
    takes: dict[str, float] = {}
    runs: list[str] = []

    def __init__(self, trial: Trial, _parameters: object) -> None:
        self.trial = trial

    def __enter__(self) -> InventedRunner:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    @classmethod
    def _pass(cls, seconds: float) -> None:
        cls.now += seconds

    def prepare(self, _inputs: object) -> None:
        self._pass(self.preparing)

    def first(self, _inputs: object, seconds: float) -> float:
        """Like the real one: it stops when the time for the first run is over."""
        self.runs.append(self.trial.model.name)
        takes = self.takes[self.trial.model.name]
        self._pass(min(takes, seconds))
        if takes > seconds:
            raise RunTimeoutError("too long")
        return takes

    def timed(self, _inputs: object) -> float:
        self.runs.append(self.trial.model.name)
        self._pass(self.takes[self.trial.model.name])
        return self.takes[self.trial.model.name]

    def run_operators(self, _inputs: object) -> list[float]:
        count = len(self.trial.model.net.op)
        return [self.timed(None) / count] * count


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[InventedRunner]:
    monkeypatch.setattr(bench_module, "Runner", InventedRunner)
    monkeypatch.setattr(time, "perf_counter", lambda: InventedRunner.now)
    for name, value in {"now": 0.0, "preparing": 0.0, "takes": {}, "runs": []}.items():
        monkeypatch.setattr(InventedRunner, name, value)
    return InventedRunner


def named(name: str) -> Model:
    model = model_of(*CHAIN)
    return Model(name, model.net, None, {}, model.inputs, model.outputs)


def times_of(takes: dict[str, float], deadline: float, seconds: float = 1.0) -> dict[str, float]:
    InventedRunner.takes = takes
    bench = Bench({"x": np.zeros(4, np.float32)}, 0.0, Deadline(deadline))
    found = bench.run_seconds([Trial(named(name)) for name in takes], seconds)
    return dict(zip(takes, (round(one, 6) for one in found), strict=True))


def test_a_candidate_of_a_thousand_times_is_dropped_in_its_first_run(runner: type[InventedRunner]) -> None:
    found = times_of({"good": 4 * MS, "hopeless": 4.0, "better": 3 * MS}, deadline=10.0, seconds=0.1)
    assert found == {"good": 4 * MS, "hopeless": math.inf, "better": 3 * MS}
    assert runner.runs.count("hopeless") == 1
    assert runner.now < 0.3


@pytest.mark.parametrize("takes", [0.9, 1.1, 1.9, 3.0])
def test_measuring_ends_within_one_run_of_the_deadline(takes: float, runner: type[InventedRunner]) -> None:
    found = times_of({"first": takes, "second": takes}, deadline=3.0, seconds=60.0)
    assert found["first"] == takes
    assert runner.now <= 3.0 + takes


def test_a_net_that_takes_longer_than_there_is_time_is_not_run_to_its_end(runner: type[InventedRunner]) -> None:
    assert times_of({"first": 50.0, "second": 50.0}, deadline=3.0) == {"first": math.inf, "second": math.inf}
    assert runner.now == pytest.approx(3.0)


def test_where_there_is_no_time_nothing_is_run(runner: type[InventedRunner]) -> None:
    assert times_of({"first": 1 * MS}, deadline=0.0) == {"first": math.inf}
    assert runner.now == 0.0


def test_a_net_is_not_prepared_to_its_end_when_the_time_is_over() -> None:
    model = model_of(*CHAIN)
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(4, np.float32))
    with SimpleNet(model.net, workspace) as net:
        with within_deadline(Deadline(0.0)), pytest.raises(DeadlineExceededError):
            net.prepared()
        net.run()
        assert workspace.fetch_blob("d").tolist() == [1.0] * 4


def test_preparing_counts(runner: type[InventedRunner]) -> None:
    runner.preparing = 2.0
    found = times_of({"first": 0.1, "second": 0.1, "third": 0.1}, deadline=4.25)
    assert found == {"first": 0.1, "second": 0.1, "third": math.inf}
    assert runner.now == pytest.approx(4.2)


@pytest.mark.parametrize("takes", [0.6, 5.0])
def test_operators_that_there_is_no_time_for_are_said_to_be_late(takes: float, runner: type[InventedRunner]) -> None:
    runner.takes = {"one": takes}
    with pytest.raises(DeadlineExceededError, match="not enough time to measure"):
        Bench({}, 0.0, Deadline(1.0)).operator_seconds(named("one"), 1.0)


def test_tasks_that_there_is_no_time_for_are_said_to_be_late(runner: type[InventedRunner]) -> None:
    runner.takes = {"one": 5.0}
    with pytest.raises(RunTimeoutError):
        Bench({}, 0.0, Deadline(1.0)).tasks(named("one"), 1.0)
    assert runner.now == pytest.approx(1.0)
    with pytest.raises(DeadlineExceededError):
        Bench({}, 0.0, Deadline(0.0)).tasks(named("one"), 1.0)


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("kind", ["layout", "implementation"])
def test_compiling_does_not_wait_for_a_candidate_that_does_not_end(kind: str) -> None:
    command = [sys.executable, "-m", "tests.compiler.tuning.planted", kind, "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=A_LONG_TIME)
    assert done.returncode == 0, done.stderr
    assert "planted: begun" in done.stderr
    assert "planted: ended" not in done.stderr
    assert "schedule: " in done.stdout
    (layout,) = [line for line in done.stdout.splitlines() if line.startswith("layout: ") and "(" in line]
    if kind == "layout":
        assert layout == "layout: NHWC (measured)"


MOMENTS = {
    "passes": ("none", "compilation: passes"),
    "measuring": ("none", "compilation: measuring implementations"),
    "an implementation": ("implementation", "planted: begun"),
    "a hopeless layout": ("layout", "planted: begun"),
    "schedules": ("none", "compilation: schedule"),
}


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_a_command_that_compiles(moment: str, tmp_path: Path) -> None:
    kind, line = MOMENTS[moment]
    choices = tmp_path / "choices.json"
    environment = os.environ | {"DAGEXEC_CHOICES": str(choices), "DAGEXEC_TUNING_SECONDS": "600"}
    command = [sys.executable, "-m", "tests.compiler.tuning.planted", kind, "600", "run", "zoo:lenet_digits"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            seen = next((said for said in process.stderr if said.startswith(line)), None)
            assert seen is not None, f"it never said {line!r}"
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait(A_LONG_TIME) == 130
        finally:
            process.kill()
    assert "Traceback" not in said
    assert "planted: ended" not in said
    if choices.exists():
        assert json.loads(choices.read_text())["format"] == "dagexec choices"
