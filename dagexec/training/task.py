"""TrainingTask: what is trained, on what, and how; data for `Trainer` and for `dagexec train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dagexec.core.io_access import IO
from dagexec.core.model import InputInfo
from dagexec.core.workspace import Workspace
from dagexec.errors import FeedError, SchemaError
from dagexec.platform.records import dataclass
from dagexec.training.data import Transform
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Optimizer

__all__ = ["Results", "TrainingTask"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Results:
    """The blobs that a model under training computes.

    Attributes:
        losses: what is made small; scalars.
        metrics: what is shown, by the name it is shown under, each a scalar that is a mean over the batch.
    """

    losses: Sequence[str]
    metrics: Mapping[str, str]


def check_batch(inputs: Mapping[str, InputInfo], batch: Mapping[str, Array], *, complete: bool = True) -> None:
    """Raise FeedError, saying what differs, unless the arrays are of samples as a model declares its `inputs`.

    Unless `complete`, some of the inputs may be missing. Element types are left to the operators that read them.
    """
    if (complete and set(inputs) != set(batch)) or not set(batch) <= set(inputs):
        raise FeedError(f"expected the inputs {sorted(inputs)}, found {sorted(batch)}")
    for name, array in batch.items():
        declared = inputs[name].shape
        if declared is not None and not (
            array.ndim == len(declared)
            and all(extent in (None, found) for extent, found in zip(declared[1:], array.shape[1:], strict=True))
        ):
            raise FeedError(
                f"input {name!r}: expected samples of shape {list(declared[1:])}, as the model declares them, found "
                f"{list(array.shape[1:])}"
            )


@dataclass(frozen=True)
class TrainingTask:
    """A model, its data, and how it is trained.

    Attributes:
        name: of the task, and of its net.
        build_inputs: declares the inputs of the model, for batches of so many samples, in the current scopes.
        build_forward: adds the layers, the losses and the metrics, in the current scopes.
        optimizer: adds the updates.
        train: the samples by input; the first axis counts them.
        test: those that are held out; empty for none.
        batch_size: samples a step.
        epochs: how many times all samples are seen.
        unit: what a sample is called, in the plural.
        transform: makes a sample to train on of one of `train`, by a generator of its own; None takes them as they are.
    """

    name: str
    build_inputs: Callable[[ModelHelper, int], object]
    build_forward: Callable[[ModelHelper], Results]
    optimizer: Optimizer
    train: Mapping[str, Array]
    test: Mapping[str, Array]
    batch_size: int
    epochs: int
    unit: str = "samples"
    transform: Transform | None = None

    def __post_init__(self) -> None:
        """Raises SchemaError for arrays of different lengths, and when there is not one full batch."""
        for what, arrays in (("train", self.train), ("test", self.test)):
            lengths = {name: len(array) for name, array in arrays.items()}
            if len(set(lengths.values())) > 1:
                raise SchemaError(f"task {self.name!r}: the {what} arrays must be of one length, found {lengths}")
        if self.batch_size < 1 or self.epochs < 0:
            raise SchemaError(
                f"task {self.name!r}: the batch size must be at least 1 and the epochs at least 0, found "
                f"{self.batch_size} and {self.epochs}"
            )
        if self.train_samples < self.batch_size:
            raise SchemaError(
                f"task {self.name!r}: a batch of {self.batch_size} needs as many samples, found {self.train_samples}"
            )

    @property
    def train_samples(self) -> int:
        """How many samples there are to train on."""
        return min((len(array) for array in self.train.values()), default=0)

    @property
    def test_samples(self) -> int:
        """How many samples are held out."""
        return min((len(array) for array in self.test.values()), default=0)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches; what is left over of an epoch is not used."""
        return self.train_samples // self.batch_size


def task_workspace(allow_io: bool) -> Workspace:
    """A workspace in which operators may read and write files in the working directory, or with `allow_io` anywhere."""
    return Workspace(root_folder=Path(), allow_io=allow_io or IO.WRITE_FOLDER)
