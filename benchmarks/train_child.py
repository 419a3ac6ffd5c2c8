"""One contender of `train.py` in a process of its own: builds a training step, and runs it as often as it is told.

    python benchmarks/train_child.py dagexec|dagexec-channels-last|torch|torch-channels-last MODEL BATCH THREADS

Each line on standard input is a number of steps; the answer is a JSON line of their seconds. The process sleeps in
between, so that only one contender computes at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np


def dagexec_step(model: str, batch: int, threads: int, order: str) -> tuple[Callable[[], float], int]:
    """A callable that trains one step on random data and returns the loss, and the number of parameters."""
    from train_models import build

    from dagexec import Workspace

    helper, feeds = build(model, batch, order)
    workspace = Workspace()
    helper.create(workspace)
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    net = helper.create_net(workspace, "simple" if threads == 1 else "dag", threads)

    def step() -> float:
        net.run()
        return float(workspace.fetch_blob("loss"))

    return step, sum(int(np.prod(shape)) for shape in helper.parameters.values())


def main() -> None:
    engine, model, batch, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if engine.startswith("torch"):
        from train_torch import torch_step

        try:
            step, parameters = torch_step(model, batch, threads, channels_last=engine.endswith("channels-last"))
        except ImportError:
            print(json.dumps({"absent": engine}), flush=True)
            return
    else:
        step, parameters = dagexec_step(model, batch, threads, "NHWC" if engine.endswith("channels-last") else "NCHW")
    losses = [step() for _ in range(3)]
    print(json.dumps({"parameters": parameters, "losses": losses}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
