"""ParallelSteps: the nets of a task on several devices of one process, or with micro-batches (`data_parallel`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.errors import SchemaError
from dagexec.scheduler.nets.options import RunOptions
from dagexec.training.data_parallel import parallelize
from dagexec.training.data_parallel.replica_devices import REPLICA
from dagexec.training.engines import name_engines, use_whole_batches
from dagexec.training.evaluation import Evaluation
from dagexec.training.model_helper import ModelHelper
from dagexec.training.task import Results, TrainingTask, check_batch, task_workspace

Array = npt.NDArray[Any]


class ParallelSteps:
    """Makes training steps on several devices, and measures on the host.

    Attributes:
        workspace: a copy of the parameters and the state: what `collect` took and `spread` gives.
    """

    def __init__(
        self,
        task: TrainingTask,
        devices: Sequence[str],
        *,
        reduction: str = "allreduce",
        iter_size: int = 1,
        options: RunOptions,
        seed: int = 0,
        allow_io: bool = False,
    ) -> None:
        """Build the model on every device, with equal parameters. What operators may reach: see `task_workspace`.

        Raises SchemaError for a batch that the devices and their micro-batches cannot divide equally, and what
        `parallelize` raises.
        """
        parts = len(devices) * iter_size
        if parts and task.batch_size % parts:
            raise SchemaError(
                f"task {task.name!r}: a batch of {task.batch_size} cannot be divided equally among {len(devices)} "
                f"device(s) with {iter_size} micro-batch(es) each"
            )
        found: list[Results] = []

        def forward(helper: ModelHelper) -> Sequence[str]:
            found.append(task.build_forward(helper))
            if all(Device.parse(name) == CPU for name in devices):
                name_engines(helper.net, REPLICA)
                use_whole_batches(helper.net)
            return found[-1].losses

        self._model = parallelize(
            lambda helper: task.build_inputs(helper, task.batch_size // parts),
            forward,
            task.optimizer,
            devices=devices,
            reduction=reduction,
            iter_size=iter_size,
            name=task.name,
            seed=seed,
            net_type=options.net_type,
            num_workers=options.num_workers,
            workspace=task_workspace(allow_io),
        )
        self._metrics = dict(found[0].metrics)
        self.workspace = task_workspace(allow_io)
        self._evaluation = Evaluation(task, self.workspace, options)
        self._collected = False
        self.collect()

    def checkpoint_blobs(self) -> list[str]:
        """What a training needs to go on."""
        return self._model.replicas[0].helper.checkpoint_blobs()

    def start(self) -> None:
        """Give the devices what the workspace has."""
        self._model.load_state({name: self.workspace.fetch_blob(name) for name in self.checkpoint_blobs()})

    def collect(self) -> None:
        """Take the parameters and the state from the first device to the workspace."""
        if not self._collected:
            for name, array in self._model.state().items():
                self.workspace.feed_blob(name, array)
            self._collected = True

    def run(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """One step on a whole batch; returns the metrics, means over the devices.

        With micro-batches, metrics other than losses are those of the last one. Raises FeedError for other inputs than
        the model declares.
        """
        check_batch(self._model.replicas[0].helper.inputs, batch)
        self._collected = False
        losses = self._model.step(batch)
        found = {}
        for name, blob in self._metrics.items():
            values = [losses[blob]] if blob in losses else self._model.fetch(blob)
            found[name] = float(np.mean([np.asarray(value).reshape(()) for value in values], dtype=np.float64))
        return found

    def evaluate(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """The metrics of a batch in test mode, on the host."""
        self.collect()
        return self._evaluation.evaluate(batch)

    def close(self) -> None:
        """Close the nets and end the threads."""
        self._model.close()
        self._evaluation.close()
