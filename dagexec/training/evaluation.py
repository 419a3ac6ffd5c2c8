"""Evaluation: the metrics of a task in test mode, from parameters that are being trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.workspace import Workspace
from dagexec.errors import SchemaError
from dagexec.scheduler.nets.options import RunOptions
from dagexec.training.engines import name_engines
from dagexec.training.model_helper import ModelHelper
from dagexec.training.prediction import prediction_net
from dagexec.training.task import TrainingTask, check_batch

Array = npt.NDArray[Any]


class Evaluation:
    """The net of a task's metrics in test mode, with activations of its own beside the parameters of a workspace."""

    def __init__(self, task: TrainingTask, parameters: Workspace, options: RunOptions, device: Device = CPU) -> None:
        """The net is built when it is first used."""
        helper = ModelHelper(task.name, training=True)
        with helper.device_scope(device):
            task.build_inputs(helper, task.batch_size)
            results = task.build_forward(helper)
        self._inputs = helper.inputs
        self._metrics = {name: helper.blob(blob) for name, blob in results.metrics.items()}
        self._net = prediction_net(helper.net, None, list(self._metrics.values()))
        if device == CPU:
            name_engines(self._net)
        self._options = options
        self._workspace = Workspace(parameters)

    def evaluate(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """The metrics of a batch of any size. Raises FeedError for other inputs than the model declares."""
        check_batch(self._inputs, batch, complete=False)
        for name, array in batch.items():
            self._workspace.feed_blob(name, array)
        if self._net.name not in self._workspace.nets:
            self._workspace.create_net(self._net, self._options.net_type, self._options.num_workers)
        self._workspace.run_net(self._net.name)
        return {name: scalar(self._workspace, blob) for name, blob in self._metrics.items()}

    def close(self) -> None:
        """Close the net."""
        for name in self._workspace.nets:
            self._workspace.delete_net(name)


def scalar(workspace: Workspace, blob: str) -> float:
    """The one number of a blob. Raises SchemaError when it has more, or none."""
    array = workspace.fetch_blob(blob)
    if array.size != 1:
        raise SchemaError(f"blob {blob!r} is a metric and must hold one number, found shape {array.shape}")
    return float(array.reshape(()))
