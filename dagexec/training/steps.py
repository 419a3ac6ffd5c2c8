"""LocalSteps: the nets of a task on one device, of one process or of one rank of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.gradient import fill_like
from dagexec.core.workspace import Workspace
from dagexec.errors import SchemaError
from dagexec.ops.families.communication import CommonWorld, all_reduce
from dagexec.scheduler.nets.options import RunOptions
from dagexec.training.channels_last import with_channels_last
from dagexec.training.distributed import WORLD, add_all_reduce, check_equal, draw_for_rank, share_of
from dagexec.training.engines import ONEDNN, name_engines, use_whole_batches
from dagexec.training.evaluation import Evaluation, scalar
from dagexec.training.model_helper import ModelHelper
from dagexec.training.numerics import with_nan_checks
from dagexec.training.split_gradients import split_gradients
from dagexec.training.task import TrainingTask, check_batch, task_workspace

Array = npt.NDArray[Any]


class LocalSteps:
    """Makes training steps and measures on one device.

    Attributes:
        helper: the model, with gradients and updates.
        workspace: parameters and state.
        activations: what a step computes besides; a workspace below that one.
    """

    def __init__(
        self,
        task: TrainingTask,
        *,
        options: RunOptions,
        device: Device = CPU,
        seed: int = 0,
        stop_on_nan: bool = False,
        world: CommonWorld | None = None,
        allow_io: bool = False,
    ) -> None:
        """Build the model and fill its parameters. What its operators may reach: see `task_workspace`.

        Raises SchemaError for a batch with less samples than ranks, and what building the model raises.
        """
        ranks, rank = (1, 0) if world is None else (world.size, world.rank)
        if task.batch_size < ranks:
            raise SchemaError(f"task {task.name!r}: a batch of {task.batch_size} is too small for {ranks} ranks")
        self._share = share_of(rank, ranks, task.batch_size)
        self._weight = (self._share.stop - self._share.start) / task.batch_size
        self._world = world if ranks > 1 else None
        self._options = options
        self.helper = ModelHelper(task.name, seed=seed, training=True)
        with self.helper.device_scope(device):
            task.build_inputs(self.helper, self._share.stop - self._share.start)
            results = task.build_forward(self.helper)
            draw_for_rank(self.helper.net, rank)
            if device == CPU:
                name_engines(self.helper.net)
                use_whole_batches(self.helper.net)
            self.helper.add_gradient_operators(
                self._loss_gradients([self.helper.blob(loss) for loss in results.losses])
            )
            if self._world is not None:
                add_all_reduce(self.helper)
            task.optimizer.add_updates(self.helper)
        del self.helper.net.arg[:]  # its form is what is chosen here
        self._metrics = {name: self.helper.blob(blob) for name, blob in results.metrics.items()}
        self.workspace = task_workspace(allow_io)
        self.helper.create(self.workspace)
        if self._world is not None:
            self.workspace.create_blob(WORLD).value = self._world
        net, _ = with_channels_last(split_gradients(self.helper.net), self.workspace, ONEDNN)
        self._net = with_nan_checks(net) if stop_on_nan else net
        self.activations = Workspace(self.workspace)
        self._evaluation = Evaluation(task, self.workspace, options, device)

    def checkpoint_blobs(self) -> list[str]:
        """What a training needs to go on."""
        return self.helper.checkpoint_blobs()

    def start(self) -> None:
        """Begin with what the workspace has. Raises CommunicationError when that differs between ranks."""
        if self._world is not None:
            check_equal(self._world, self.workspace, self.checkpoint_blobs())

    def collect(self) -> None:
        """The workspace has all that is to be saved."""

    def run(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """One step on a whole batch, of which this rank takes its part; returns the metrics of the whole batch.

        Raises FeedError for other inputs than the model declares.
        """
        check_batch(self.helper.inputs, batch)
        for name, array in batch.items():
            self.activations.feed_blob(name, array[self._share])
        if self._net.name not in self.activations.nets:
            self.activations.create_net(self._net, self._options.net_type, self._options.num_workers)
        self.activations.run_net(self._net.name)
        values = np.array([scalar(self.activations, blob) for blob in self._metrics.values()])
        if self._world is not None:
            values *= self._weight
            all_reduce(self._world, values)
        return dict(zip(self._metrics, values.tolist(), strict=True))

    def evaluate(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """The metrics of a batch in test mode; every rank computes all of it."""
        return self._evaluation.evaluate(batch)

    def close(self) -> None:
        """Close the nets."""
        self._evaluation.close()
        for name in self.activations.nets:
            self.activations.delete_net(name)

    def _loss_gradients(self, losses: list[str]) -> dict[str, str | None]:
        """The gradients of the losses: the share of the samples that this rank has."""
        if self._world is None:
            return dict.fromkeys(losses)
        found: dict[str, str | None] = {}
        for loss in losses:
            found[loss] = f"{loss}_share"
            self.helper.net.op.append(fill_like(loss, f"{loss}_share", self._weight))
        return found
