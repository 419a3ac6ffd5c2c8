"""A small training task, as a script for `dagexec train`: a two-layer network on the 8x8 digits, with 5 steps an epoch.

Under mpiexec, rank KILLED_RANK (an environment variable) kills itself when it reads its KILLED_AT-th batch, or with
OTHER_RANK begins with other parameters.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dagexec.building.fillers import constant
from dagexec.core.dtypes import INT32
from dagexec.training.datasets import digits
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD, Optimizer
from dagexec.training.task import Results, TrainingTask

BATCH, STEPS = 48, 5
RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")


def make_task(seed: int, optimizer: Optimizer | None = None) -> TrainingTask:
    split = digits(8, seed=seed)
    return TrainingTask(
        "small",
        inputs,
        forward,
        optimizer or SGD(0.1, momentum=0.9),
        {name: array[: BATCH * STEPS] for name, array in split.train.items()},
        {name: array[:100] for name, array in split.test.items()},
        batch_size=BATCH,
        epochs=2,
        unit="images",
        transform=_Killer() if os.environ.get("KILLED_RANK") == RANK else None,
    )


def inputs(helper: ModelHelper, batch_size: int) -> None:
    helper.add_input("data", (batch_size, 1, 8, 8))
    helper.add_input("label", (batch_size,), INT32)


def forward(helper: ModelHelper) -> Results:
    start = constant(0.1) if os.environ.get("OTHER_RANK") == RANK else None
    x = helper.conv("data", "conv", 1, 8, kernel=3, pad=1, weight_init=start)
    x = helper.spatial_bn(x, "bn", 8)
    x = helper.relu(x, x)
    x = helper.dropout(helper.max_pool(x, "pool", kernel=2, stride=2), "drop", ratio=0.1)
    softmax, loss = helper.softmax_with_loss(helper.fc(x, "pred", 8 * 16, 10), "label")
    return Results([loss], {"loss": loss, "accuracy": helper.accuracy(softmax, "label")})


class _Killer:
    """Passes samples on until the batch that is the last."""

    def __init__(self) -> None:
        self._left = int(os.environ["KILLED_AT"]) * BATCH

    def __call__(
        self, sample: Mapping[str, npt.NDArray[np.generic]], _generator: np.random.Generator
    ) -> Mapping[str, npt.NDArray[np.generic]]:
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample
