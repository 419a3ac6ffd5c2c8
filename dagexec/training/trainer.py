"""Trainer: epochs of a training task, with batches read ahead, checkpoints, and a measure on samples held out.

    with Trainer(task, net_type="dag", num_workers=2, checkpoints=Path("run")) as trainer:
        trainer.train(on_step=print)
        print(trainer.evaluate())

`steps` has the nets that a step runs. A training that stops and goes on from its checkpoint gives the same bytes as
one that never stopped: all that a step depends on is in the checkpoint, or follows from the seed and the step's number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dagexec.core.device import Device
from dagexec.core.errors import NonFiniteError, SchemaError
from dagexec.ops.communication import CommonWorld, barrier
from dagexec.scheduler.intra_op import available_cores
from dagexec.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from dagexec.training.data import BatchLoader
from dagexec.training.data_parallel import find_places
from dagexec.training.parallel_steps import ParallelSteps
from dagexec.training.steps import LocalSteps
from dagexec.training.task import TrainingTask


@dataclass(frozen=True)
class StepReport:
    """What one step gave.

    Attributes:
        step: its number, from 1.
        epoch: the epoch it belongs to, from 1.
        metrics: those of the task; means over the batch.
        seconds: since the step before, reading the batch included.
        samples: in the batch, of all ranks together.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    samples: int


class Trainer:
    """Trains a task. Not for several threads at once.

    Attributes:
        task: what is trained.
        steps: its nets.
        step: how many steps have been made, those before a checkpoint included.
    """

    def __init__(
        self,
        task: TrainingTask,
        *,
        net_type: str = "dag",
        num_workers: int | None = None,
        devices: Sequence[str] = ("cpu",),
        reduction: str = "allreduce",
        iter_size: int = 1,
        seed: int = 0,
        checkpoints: Path | None = None,
        checkpoint_steps: int | None = None,
        resume: bool = False,
        stop_on_nan: bool = False,
        world: CommonWorld | None = None,
    ) -> None:
        """Make the parameters, or with `resume` take them from the newest checkpoint, if there is one.

        Checkpoints go to the folder `checkpoints`, every `checkpoint_steps` steps (by default after every epoch) and at
        the end. With `stop_on_nan` a NaN ends the training at the operator that made it, before anything is updated;
        else one in a metric does, after the step. With a `world` this is one rank of several.
        On several `devices`, gradients meet by `reduction`, and a step may go through `iter_size` micro-batches on
        each: see `data_parallel.parallelize`; neither goes together with several ranks or `stop_on_nan`.
        Raises DeviceError for a device that is not here, CommunicationError when ranks begin with different parameters,
        and what building and loading raise.
        """
        self.task = task
        self.seed = seed
        self.step = 0
        self._world = world
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps or task.steps_per_epoch
        self._saved: int | None = None
        workers = num_workers or available_cores()
        find_places(devices)
        self.steps: LocalSteps | ParallelSteps
        if len(devices) == 1 and iter_size == 1:
            self.steps = LocalSteps(
                task,
                net_type=net_type,
                num_workers=workers,
                device=Device.parse(devices[0]),
                seed=seed,
                stop_on_nan=stop_on_nan,
                world=world,
            )
        else:
            if stop_on_nan or (world is not None and world.size > 1):
                raise SchemaError(
                    f"task {task.name!r}: stop_on_nan and several ranks are for one device and whole batches; found "
                    f"{len(devices)} devices and iter_size={iter_size}"
                )
            self.steps = ParallelSteps(
                task,
                devices,
                reduction=reduction,
                iter_size=iter_size,
                net_type=net_type,
                num_workers=workers,
                seed=seed,
            )
        if resume and checkpoints is not None and (found := latest_checkpoint(checkpoints)) is not None:
            self.step = self._saved = load_checkpoint(self.steps.workspace, found).step
        self.steps.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the nets."""
        self.steps.close()

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self.step // self.task.steps_per_epoch

    def train(
        self,
        epochs: int | None = None,
        *,
        on_step: Callable[[StepReport], object] | None = None,
        on_epoch: Callable[[int], object] | None = None,
    ) -> None:
        """Go on until so many epochs are complete (by default the task's), then save.

        `on_step` is told of every step, and `on_epoch` of every epoch that is complete, by its number from 1.
        Raises NonFiniteError when a metric is no number any more, OperatorError, and what reading samples raises; the
        last checkpoint stays as it is.
        """
        last = (self.task.epochs if epochs is None else epochs) * self.task.steps_per_epoch
        with BatchLoader(
            self.task.train, self.task.batch_size, seed=self.seed, start_step=self.step, transform=self.task.transform
        ) as loader:
            before = time.perf_counter()
            while self.step < last:
                metrics = self.steps.run(next(loader))
                self._check(metrics)
                self.step += 1
                now = time.perf_counter()
                if on_step is not None:
                    on_step(
                        StepReport(self.step, self._epoch_of(self.step), metrics, now - before, self.task.batch_size)
                    )
                before = now
                if self.step % self._checkpoint_steps == 0:
                    self.save()
                if on_epoch is not None and self.step % self.task.steps_per_epoch == 0:
                    on_epoch(self.epoch)
        self.save()

    def evaluate(self, batch_size: int | None = None) -> dict[str, float]:
        """The metrics over all samples held out, in test mode; empty when there are none."""
        count, size = self.task.test_samples, batch_size or self.task.batch_size
        sums: dict[str, float] = {}
        for first in range(0, count, size):
            batch = {name: array[first : first + size] for name, array in self.task.test.items()}
            samples = min(size, count - first)
            for name, value in self.steps.measure(batch).items():
                sums[name] = sums.get(name, 0.0) + value * samples
        return {name: total / count for name, total in sums.items()}

    def save(self) -> None:
        """Write a checkpoint of this step, if there is a folder for it and it is not there yet. Rank 0 writes."""
        if self._checkpoints is None or self._saved == self.step:
            return
        if self._world is None or self._world.rank == 0:
            self.steps.collect()
            save_checkpoint(self.steps.workspace, self.steps.checkpoint_blobs(), self._checkpoints, self.step)
        self._saved = self.step
        if self._world is not None:
            barrier(self._world)

    def _check(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"task {self.task.name!r}: {name} is {value} in step {self.step + 1}; stop_on_nan=True names the "
                    f"operator that makes it",
                    blob=name,
                    producer=f"step {self.step + 1}",
                )

    def _epoch_of(self, step: int) -> int:
        return (step - 1) // self.task.steps_per_epoch + 1
