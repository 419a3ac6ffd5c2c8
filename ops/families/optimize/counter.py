"""The iteration counter of training: Iter and AtomicIter, and CreateMutex, which AtomicIter uses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dagexec.core.dtypes import INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.operator import Array, Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType, first_to_first
from dagexec.ops.families.optimize.scalars import read_iteration, require_iteration
from dagexec.platform.forking import ProcessLock

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace

_LARGEST = np.iinfo(np.int64).max


class Mutex:
    """What CreateMutex puts into a blob.

    Attributes:
        lock: held while the operator that names the mutex does its work.
    """

    def __init__(self) -> None:
        """A mutex that nobody holds."""
        self.lock = ProcessLock()


@new_operator(
    "CreateMutex",
    infer=None,
    doc="A mutex for operators that take turns. A mutex that already exists stays.",
    output_names=("mutex",),
    effects=True,
)
class CreateMutex(Operator):
    """Makes a mutex."""

    def prepare(self) -> Step:
        """Nothing when there is one."""
        blob = self.output_blobs[0]

        def create() -> None:
            if not isinstance(blob.value, Mutex):
                blob.value = Mutex()

        return create


def increment(counter: Array, label: str) -> None:
    """Add 1 to a one-element int64 array.

    Raises ValueError, naming the operator, when it is negative or the largest int64 already.
    """
    iteration = read_iteration(counter, label)
    if iteration == _LARGEST:
        raise ValueError(f"{label}: the iteration {iteration} is the largest int64 and cannot be incremented")
    counter[0] = iteration + 1


def infer_iter(call: OperatorCall) -> list[TensorType]:
    """The counter's own type; one int64 when it has no input."""
    if not call.inputs:
        return [TensorType((1,), INT64)]
    counter = len(call.inputs) - 1
    require_iteration(call, counter)
    return [call.inputs[counter]]


@new_operator(
    "Iter",
    inputs=(0, 1),
    infer=infer_iter,
    doc="Adds 1 to an iteration counter (one int64), in place. Without input the output itself is the counter, and "
    "begins at 0, so that the first run leaves 1.",
    input_names=("counter",),
    output_names=("counter",),
    inplace=first_to_first,
    enforced_inplace=((0, 0),),
    cost=lambda _call, _outputs: Cost(1, 8, 8),
    effects=True,
)
class Iter(Operator):
    """Increments a counter."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Without input, an empty output blob becomes a counter that holds 0."""
        super().__init__(definition, workspace, index=index, net=net)
        if not self.input_blobs and self.output(0).is_empty:
            self.output(0).feed(np.zeros(1, np.int64))

    def prepare(self) -> Step:
        return partial(increment, self.y(0).reshape(-1), self.label)


@new_operator(
    "AtomicIter",
    infer=infer_iter,
    doc="Adds 1 to an iteration counter (one int64), in place, while it holds the mutex: several nets may share a "
    "counter.",
    input_names=("mutex", "counter"),
    output_names=("counter",),
    inplace=lambda source, target: (source, target) == (1, 0),
    enforced_inplace=((1, 0),),
    cost=lambda _call, _outputs: Cost(1, 8, 8),
    handles=(0,),
    effects=True,
)
class AtomicIter(Operator):
    """Increments a counter under a mutex."""

    def prepare(self) -> Step:
        """One increment. Raises BlobTypeError when input 0 is no mutex."""
        mutex, counter, label = self.handle(0, Mutex), self.y(0).reshape(-1), self.label

        def count() -> None:
            with mutex.lock.own:
                increment(counter, label)

        return count


no_gradient("CreateMutex", "Iter", "AtomicIter")
