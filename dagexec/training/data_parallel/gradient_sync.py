"""How the replicas of a training, each with a thread and a net of its own, come to the same parameters.

`TreeSync` is Caffe's P2PSync: at the start of a step the root's parameters go down the tree; the gradients
are summed up the tree; the root divides by their number and updates its parameters, alone. `RingSync` leaves
the mean gradients on all replicas, and each updates its own parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.ops.families.communication import CommonWorld, all_gather, all_reduce_ring
from dagexec.ops.families.communication.collectives import divide
from dagexec.training.data_parallel.flat_buffer import FlatBuffer
from dagexec.training.data_parallel.pairing import NO_PARENT, DevicePair

Array = npt.NDArray[Any]


class GradientSync(ABC):
    """What one replica does with the others, in every step."""

    def __init__(self, world: CommonWorld) -> None:
        """`world` is the replica's rank among them."""
        self.world = world

    @abstractmethod
    def on_start(self, parameters: FlatBuffer) -> None:
        """Before the first micro-batch. Raises CommunicationError."""

    @abstractmethod
    def on_gradients_ready(self, gradients: FlatBuffer, divisor: int) -> bool:
        """Sum over all replicas and divide; True when this replica is to update its parameters with what is there now.

        Raises CommunicationError.
        """

    def on_slices_ready(self, own: Array) -> Array:
        """The rows of a sparse gradient's blob from all replicas, concatenated. Raises CommunicationError."""
        every = np.empty((self.world.size, *own.shape), own.dtype)
        all_gather(self.world, np.ascontiguousarray(own), every)
        return every.reshape(-1, *own.shape[1:])


class TreeSync(GradientSync):
    """Along a tree of device pairs. Every sum is made in the order of the pairs, not of arrival."""

    def __init__(self, world: CommonWorld, pairs: Sequence[DevicePair]) -> None:
        """`pairs` are those of all replicas (`device_pairs`)."""
        super().__init__(world)
        self._parent = next(pair.parent for pair in pairs if pair.device == world.rank)
        self._children = [pair.device for pair in pairs if pair.parent == world.rank]

    def on_start(self, parameters: FlatBuffer) -> None:
        """Take the parameters from the parent and give them to the children, the one with most descendants first."""
        with self.world.collective("parameters down the tree") as tag:
            if self._parent != NO_PARENT:
                for array in parameters.arrays:
                    self.world.receive(array, self._parent, tag)
                parameters.write()
            elif self._children:
                parameters.read()
            posted = [
                self.world.post(array, child, tag) for child in reversed(self._children) for array in parameters.arrays
            ]
            for message in posted:
                message.wait()

    def on_gradients_ready(self, gradients: FlatBuffer, divisor: int) -> bool:
        """Add those of the children, nearest first, and pass the sum on; the root divides."""
        with self.world.collective("gradients up the tree") as tag:
            for child in self._children:
                for array in gradients.arrays:
                    self.world.receive_sum(array, child, tag)
            if self._parent != NO_PARENT:
                for array in gradients.arrays:
                    self.world.send(array, self._parent, tag)
                return False
            for array in gradients.arrays:
                divide(array, divisor)
            return True


class RingSync(GradientSync):
    """Around a ring. The replicas are the same before the first step, and stay so."""

    def on_start(self, parameters: FlatBuffer) -> None:
        """Nothing to do."""

    def on_gradients_ready(self, gradients: FlatBuffer, divisor: int) -> bool:
        """The mean, on every replica."""
        for array in gradients.arrays:
            all_reduce_ring(self.world, array, divisor=divisor)
        return True
