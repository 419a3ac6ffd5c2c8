"""Trainer: epochs of a training task, with batches read ahead, checkpoints, and a measure on samples held out.

    with Trainer(task, net_type="dag", num_workers=2, checkpoints=Path("run")) as trainer:
        trainer.train(on_step=print)
        print(trainer.evaluate())

`steps` has the nets that a step runs. A training that stops and continues from its checkpoint gives the same bytes as
one that never stopped: all that a step depends on is in the checkpoint, or follows from the seed and the step's number.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dagexec.core.device import Device
from dagexec.errors import ArgumentError, NonFiniteError, OutputError, SchemaError, StorageError
from dagexec.ops.families.communication import CommonWorld
from dagexec.platform.closing import Closing
from dagexec.platform.disk import make_folders
from dagexec.platform.processor import available_cores
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.options import RunOptions
from dagexec.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from dagexec.training.checkpoint import checkpoints as list_checkpoints
from dagexec.training.data import BatchLoader
from dagexec.training.data_parallel import find_replica_devices
from dagexec.training.data_parallel.parallelizing import REDUCTIONS
from dagexec.training.distributed import on_first_rank
from dagexec.training.folder_lock import FolderLock
from dagexec.training.parallel_steps import ParallelSteps
from dagexec.training.steps import LocalSteps
from dagexec.training.task import TrainingTask

__all__ = ["StepReport", "Trainer"]


@dataclass(frozen=True)
class StepReport:
    """What one step gave.

    Attributes:
        step: its number, from 1.
        epoch: the epoch it belongs to, from 1.
        metrics: those of the task; means over the batch.
        seconds: that the step took, waiting for its batch included; saving and measuring are not.
        samples: in the batch, of all ranks together.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    samples: int


class Trainer(Closing):
    """Trains a task: runs steps, evaluates, saves checkpoints and resumes from them.

        with Trainer(task, net_type="dag", num_workers=2, checkpoints=Path("run"), resume=True) as trainer:
            trainer.train()
            print(trainer.evaluate())  # {"loss": ..., "accuracy": ...}

    It must not be used by several threads at the same time.

    Attributes:
        task: the task to train.
        steps: the nets of the task.
        step: number of completed steps, including those before a checkpoint.
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
        ignore_damaged: bool = False,
        stop_on_nan: bool = False,
        world: CommonWorld | None = None,
        allow_io: bool = False,
    ) -> None:
        """Initialize the parameters, or with `resume` load the newest complete checkpoint, if there is one.

        If there are checkpoints but all are damaged, StorageError is raised unless `ignore_damaged`.

        Without `resume` there must be no checkpoints, so that a new training does not mix with an earlier one.
        Checkpoints of another model, seed, batch size or number of samples are refused, because the order of the
        samples depends on them. Checkpoints are saved in the folder `checkpoints`, every `checkpoint_steps` steps (by
        default after every epoch) and at the end. With `stop_on_nan` a NaN ends the training at the operator that
        produced it, before anything reads it; otherwise a NaN in a metric ends it after the step, and one in a
        parameter when it would be saved. With a `world` this is one rank of several.
        On several `devices`, gradients are reduced by `reduction`, and a step may consist of `iter_size` micro-batches
        on each: see `data_parallel.parallelize`; neither can be combined with several ranks or `stop_on_nan`.
        Operators may use databases in the working directory, and with `allow_io` files anywhere.
        Raises DeviceError for a missing device, CommunicationError if ranks start with different parameters,
        ArgumentError for an unknown reduction, StorageError for a folder that does not match or cannot be written, and
        what building and loading raise.
        """
        if reduction not in REDUCTIONS:
            raise ArgumentError(f"reduction must be one of {', '.join(REDUCTIONS)}, found {reduction!r}")
        self.task = task
        self.seed = seed
        self.step = 0
        self._world = world
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps or task.steps_per_epoch
        self._saved: int | None = None
        options = RunOptions(net_type=net_type, num_workers=num_workers or available_cores())
        find_replica_devices(devices)
        self.steps: LocalSteps | ParallelSteps
        if len(devices) == 1 and iter_size == 1:
            self.steps = LocalSteps(
                task,
                options=options,
                device=Device.parse(devices[0]),
                seed=seed,
                stop_on_nan=stop_on_nan,
                world=world,
                allow_io=allow_io,
            )
        else:
            if stop_on_nan or (world is not None and world.size > 1):
                raise SchemaError(
                    f"task {task.name!r}: stop_on_nan and several ranks require one device and undivided batches; "
                    f"found {len(devices)} devices and iter_size={iter_size}"
                )
            self.steps = ParallelSteps(
                task,
                devices,
                reduction=reduction,
                iter_size=iter_size,
                options=options,
                seed=seed,
                allow_io=allow_io,
            )
        self._lock: FolderLock | None = None
        try:
            if checkpoints is not None:
                self._begin_in(checkpoints, resume, ignore_damaged)
            self.steps.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the nets, and the folder of the checkpoints."""
        self.steps.close()
        if self._lock is not None:
            self._lock.close()

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
        """Train until `epochs` epochs are complete (by default the task's number), then save.

        `on_step` is called after every step, and `on_epoch` after every epoch, with its number from 1. Raises
        NonFiniteError if a metric, or a parameter about to be saved, is NaN or infinite; FeedError for samples that do
        not match the model's declaration; OperatorError; and what reading samples raises. The last checkpoint is not
        affected.
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
                if self.step % self._checkpoint_steps == 0:
                    self.save()
                if on_epoch is not None and self.step % self.task.steps_per_epoch == 0:
                    on_epoch(self.epoch)
                before = time.perf_counter()
        self.save()

    def evaluate(self, batch_size: int | None = None) -> dict[str, float]:
        """The metrics over all held-out samples, in test mode; empty if there are none."""
        count, size = self.task.test_samples, batch_size or self.task.batch_size
        sums: dict[str, float] = {}
        for first in range(0, count, size):
            batch = {name: array[first : first + size] for name, array in self.task.test.items()}
            samples = min(size, count - first)
            for name, value in self.steps.evaluate(batch).items():
                sums[name] = sums.get(name, 0.0) + value * samples
        return {name: total / count for name, total in sums.items()}

    def save(self) -> None:
        """Write a checkpoint of this step, if there is a folder for it and none has been written. Rank 0 writes.

        Raises NonFiniteError, without writing, if a parameter or a state has a NaN or an infinity; StorageError.
        """
        if self._saved == self.step:
            return
        self.steps.collect()
        self._check_state()
        if self._checkpoints is not None:
            on_first_rank(self._world, partial(self._write, self._checkpoints))
        self._saved = self.step

    def _begin_in(self, folder: Path, resume: bool, ignore_damaged: bool) -> None:
        """Take the newest checkpoint in the folder, or see to it that one can be written there."""
        if self._world is None or self._world.rank == 0:
            self._lock = _locked(folder)
        there = list_checkpoints(folder)
        found = latest_checkpoint(folder) if resume else None
        if found is None and resume and there and not ignore_damaged:
            raise StorageError(
                f"{folder}: none of its {len(there)} checkpoint(s) is complete, the newest is {there[0].name} (the log "
                f"gives the reasons); ignore_damaged=True (--ignore-damaged) starts over"
            )
        if found is not None:
            expected = self.steps.checkpoint_blobs()
            loaded = load_checkpoint(self.steps.workspace, found, expected=expected, check=self._check_settings)
            self.step = self._saved = loaded.step
        elif not resume and there:
            raise StorageError(
                f"{folder}: holds checkpoints of an earlier training, the newest {there[0].name}: resume it, or use "
                f"another folder"
            )

    def _settings(self) -> dict[str, str]:
        """What decides which samples a step sees, besides its number."""
        task = self.task
        return {
            "task": task.name,
            "seed": str(self.seed),
            "batch size": str(task.batch_size),
            "samples": str(task.train_samples),
        }

    def _check_settings(self, found: Checkpoint) -> None:
        differing = [
            f"{name} {found.extra[name]}, and this training has {value}"
            for name, value in self._settings().items()
            if found.extra.get(name, value) != value
        ]
        if differing:
            raise StorageError(f"{found.path}: was written with {'; '.join(differing)}: it cannot be resumed")

    def _write(self, folder: Path) -> None:
        blobs = self.steps.checkpoint_blobs()
        save_checkpoint(self.steps.workspace, blobs, folder, self.step, extra=self._settings())

    def _check_state(self) -> None:
        for name in self.steps.checkpoint_blobs():
            array = self.steps.workspace.fetch_blob(name)
            if array.dtype.kind in "fV" and not np.isfinite(array).all():
                raise NonFiniteError(
                    f"task {self.task.name!r}: {name} has a NaN or an infinity after step {self.step}; "
                    f"stop_on_nan=True names the operator that produces it",
                    blob=name,
                    producer=f"step {self.step}",
                )

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


def _locked(folder: Path) -> FolderLock:
    """The folder, made if need be, held against other trainings. Raises StorageError."""
    try:
        make_folders(folder)
    except OSError as error:
        raise OutputError(f"{folder}: checkpoints cannot be written there: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: checkpoints cannot be written there: permission denied")
    return FolderLock(folder)
