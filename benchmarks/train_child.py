"""One contender of `train.py` in a process of its own: builds a training step, and runs it as often as it is told.

    python benchmarks/train_child.py dagexec|torch|torch-channels-last MODEL BATCH THREADS

Each line on standard input is a number of steps; the answer is a JSON line of their seconds. The process sleeps in
between, so that only one contender computes at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

IMAGE_SIZES = {"lenet": None, "resnet50": 64}


def dagexec_step(model: str, batch: int, threads: int) -> tuple[Callable[[], float], int]:
    """A callable that trains one step on random data and returns the loss, and the number of parameters.

    Channels come last.
    """
    from dagexec import Workspace, zoo
    from dagexec.training.optimizer import SGD

    helper = zoo.build_training(model, batch, image_size=IMAGE_SIZES[model], order="NHWC")
    helper.add_gradient_operators(["loss"])
    SGD(0.001, momentum=0.9).add_updates(helper)
    workspace = Workspace()
    helper.create(workspace)
    rng = np.random.default_rng(0)
    shape = [size or 0 for size in helper.inputs["data"].shape or ()]
    classes = helper.parameters["pred_w"][0]
    workspace.feed_blob("data", rng.standard_normal(shape, np.float32))
    workspace.feed_blob("label", rng.integers(0, classes, batch).astype(np.int32))
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
            step, parameters = torch_step(model, batch, threads, channels_last=engine != "torch")
        except ImportError:
            print(json.dumps({"absent": engine}), flush=True)
            return
    else:
        step, parameters = dagexec_step(model, batch, threads)
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
