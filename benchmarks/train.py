"""Training steps: against PyTorch, and what two workers gain.

    python benchmarks/train.py [--seconds 60] [--json benchmarks/results/train.json]

The models of `train_models.py`, images in either order, on one core (SimpleNet) and two (DAGNet with two workers of one
thread), against PyTorch's eager mode with as many threads, where it is installed, in each of its memory formats: in
turns, each in a process of its own. The ratios are to the faster of these.
Then googlenet's training step, one thread an operator: SimpleNet and DAGNet with two workers in turns in one process,
with the speed-up that list scheduling predicts; target: at least 0.9 of it.
What of an all-reduce hides behind the backward pass is measured by `data_parallel.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from environment import write_report

from dagexec import Workspace, zoo
from dagexec.compiler.passes.engine import ENGINE
from dagexec.core.model import Model
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.counting import TimeObserver
from dagexec.scheduler.run.overhead import measure_costs, slowdown_up_to
from dagexec.scheduler.run.prediction import Hardware, predict_host
from dagexec.training.optimizer import SGD
from dagexec.training.split_gradients import split_gradients

MODELS = (("lenet", 64), ("resnet20", 64), ("resnet18", 8), ("resnet50", 8), ("lstm", 32), ("transformer", 8))
ENGINES = ("dagexec", "dagexec-channels-last", "torch", "torch-channels-last")
TURN_SECONDS = 1.5


class Contender:
    """A process that trains when it is told."""

    def __init__(self, engine: str, model: str, batch: int, threads: int) -> None:
        self.engine = engine
        program = Path(__file__).parent / "train_child.py"
        environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        if engine.startswith("dagexec"):
            environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self._process = subprocess.Popen(
            [
                "taskset",
                "-c",
                ",".join(map(str, cores)),
                sys.executable,
                program,
                engine,
                model,
                str(batch),
                str(threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.started: dict[str, Any] = self._answer()
        self.seconds: list[float] = []
        self._steps = 1

    @property
    def absent(self) -> bool:
        return "absent" in self.started

    def turn(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        taken: list[float] = self._answer()
        if self._steps > 1 or taken[0] > TURN_SECONDS / 2:  # the first turn only finds how many steps a turn has
            self.seconds += taken
        self._steps = max(1, round(TURN_SECONDS / statistics.median(taken)))

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine}: the process died with status {self._process.wait()}")
        return json.loads(line)


def against_torch(model: str, batch: int, threads: int, seconds: float) -> dict[str, object]:
    contenders = [Contender(engine, model, batch, threads) for engine in ENGINES]
    try:
        present = [contender for contender in contenders if not contender.absent]
        if len({contender.started["parameters"] for contender in present}) > 1:
            raise SystemExit(f"{model}: the two models have other numbers of parameters; nothing is reported")
        end = time.monotonic() + seconds
        while time.monotonic() < end or any(len(contender.seconds) < 3 for contender in present):
            for contender in present:
                contender.turn()
    finally:
        for contender in contenders:
            contender.close()
    row: dict[str, object] = {"model": model, "batch": batch, "threads": threads}
    medians = {contender.engine: statistics.median(contender.seconds) * 1e3 for contender in present}
    row |= {f"{engine}_ms": ms for engine, ms in medians.items()}
    others = [ms for engine, ms in medians.items() if engine.startswith("torch")]
    if others:
        row |= {f"{engine}_ratio": ms / min(others) for engine, ms in medians.items() if engine.startswith("dagexec")}
    row["steps"] = {contender.engine: len(contender.seconds) for contender in present}
    return row


def training_net(model: str, batch: int) -> tuple[Workspace, Any]:
    helper = zoo.build_training(model, batch)
    helper.add_gradient_operators(["loss"])
    SGD(0.001, momentum=0.9).add_updates(helper)
    workspace = Workspace()
    helper.create(workspace)
    rng = np.random.default_rng(0)
    shape = [size or 0 for size in helper.inputs["data"].shape or ()]
    workspace.feed_blob("data", rng.standard_normal(shape, np.float32))
    workspace.feed_blob("label", rng.integers(0, 10, batch).astype(np.int32))
    net = ENGINE.apply(Model(helper.name, helper.net, inputs=helper.inputs)).model.net
    return workspace, split_gradients(net)


def timed(net: BaseNet) -> float:
    start = time.perf_counter()
    net.run()
    return time.perf_counter() - start


def same_steps(model: str, batch: int) -> None:
    """Refuse to report unless two steps of both nets give the same parameters."""
    found = []
    for net_type in ("simple", "dag"):
        workspace, definition = training_net(model, batch)
        net = workspace.create_net(definition, net_type, 2)
        net.run()
        net.run()
        names = [name for name in definition.external_input if name.endswith(("_w", "_b"))]
        found.append([workspace.fetch_blob(name).tobytes() for name in names])
        net.close()
    if not found[0] or found[0] != found[1]:
        raise SystemExit(f"{model}: DAGNet's parameters differ from SimpleNet's; nothing is reported")


def side_by_side(*nets: BaseNet) -> float:
    """The mean time of runs that go on at the same time, a thread each."""
    with ThreadPoolExecutor(len(nets)) as callers:
        return statistics.mean(callers.map(timed, nets))


def inter_op(model: str, batch: int, repeat: int) -> dict[str, object]:
    """SimpleNet and DAGNet in turns; what list scheduling makes of SimpleNet's operator times."""
    workspaces, definition = zip(*(training_net(model, batch) for _ in range(3)), strict=True)
    alone, crowd, parallel = workspaces
    observer = TimeObserver()
    with (
        SimpleNet(definition[0], alone) as simple,
        SimpleNet(definition[1], crowd) as other,
        DAGNet(definition[2], parallel, num_workers=2) as dag,
    ):
        for net in (simple, other, dag):
            net.run()
        simple_seconds, dag_seconds, crowded = [], [], []
        for _ in range(repeat):
            simple_seconds.append(timed(simple))
            dag_seconds.append(timed(dag))
            simple.run(trace=observer)
            crowded.append(side_by_side(simple, other))
        tasks = dag.tasks()
    same_steps(model, batch)
    times = observer.mean_operator_ms
    seconds = [times[index] / 1e3 for index in range(len(tasks.plan.graph))]
    scale = statistics.median(simple_seconds) / sum(seconds)
    seconds = [scale * value for value in seconds]
    slowdown = slowdown_up_to(2, statistics.median(crowded) / statistics.median(simple_seconds))
    costs = measure_costs(tasks.work)
    one, two = (Hardware(n, 0, costs.piece_seconds, costs.wake_seconds, 0.0, slowdown) for n in (1, 2))
    again = tasks.timed(seconds)
    predicted = predict_host(again, one) / predict_host(again, two)
    reached = statistics.median(simple_seconds) / statistics.median(dag_seconds)
    return {
        "model": model,
        "batch": batch,
        "simple_ms": statistics.median(simple_seconds) * 1e3,
        "dag_2_ms": statistics.median(dag_seconds) * 1e3,
        "speed_up": reached,
        "list_scheduling": predicted,
        "reached": reached / predicted,
        "slowdown_of_two": slowdown[-1],
    }


def show(row: dict[str, object]) -> None:
    values = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in row.items()}
    print("  ".join(f"{name} {value}" for name, value in values.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each comparison with PyTorch")
    parser.add_argument("--repeat", type=int, default=15, help="steps of each net of googlenet")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for model, batch in MODELS:
        for threads in (1, 2):
            row = against_torch(model, batch, threads, options.seconds)
            rows.append(row)
            print(
                "  ".join(
                    f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                )
            )
    towers = inter_op("googlenet", 4, options.repeat)
    print(
        "  ".join(
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in towers.items()
        )
    )
    if options.json:
        write_report(options.json, steps=rows, inter_op=towers)


if __name__ == "__main__":
    main()
