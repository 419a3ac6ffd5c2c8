"""ParallelModel: the common interface of all ways to train on several devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.building.net_builder import ITERATION
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.schema import TensorType
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Net, Workspace
from dagexec.errors import FeedError, MissingBlobError
from dagexec.platform.closing import Closing
from dagexec.training.data_parallel.replica import DRAW, Replica
from dagexec.training.data_parallel.replica_devices import ReplicaDevice

Array = npt.NDArray[Any]
Feeds = Mapping[str, npt.ArrayLike]

_INTEGERS = frozenset("iu")


class ParallelModel(ABC, Closing):
    """A model that is trained on several devices at once. One thread uses it at a time.

    Attributes:
        replicas: the model on each device.
        places: where they are.
        losses: the blobs that are minimized, as the builder calls them.
        iter_size: micro-batches a device goes through in a step.
        closed: `close` was called, or a step has failed.
    """

    def __init__(self, replicas: Sequence[Replica], iter_size: int, common: Workspace | None) -> None:
        """The blobs of `common` are in no scope: all replicas have them. Nothing runs yet."""
        self.replicas = tuple(replicas)
        self.places: tuple[ReplicaDevice, ...] = tuple(replica.place for replica in replicas)
        self.losses = replicas[0].losses
        self.iter_size = iter_size
        self.closed = False
        self._common = common
        self._shared = frozenset(common.blobs() if common is not None else ())

    @abstractmethod
    def step(self, feeds: Feeds | None = None) -> dict[str, float]:
        """One step: returns each loss, the mean over all devices and micro-batches.

        `feeds` are the inputs of the whole batch. Their first axis is cut into as many equal parts as there are
        devices and micro-batches: the first device gets the first `iter_size` of them. Inputs without axes go to all.
        Raises FeedError when that does not work out, ClosedError after `close` or a failed step, and what a net raises.
        A step that fails may leave parameters, or running statistics, changed in part: load the last state.
        """

    @abstractmethod
    def workspace_of(self, place: ReplicaDevice) -> Workspace:
        """The workspace with the blobs of a replica."""

    @abstractmethod
    def nets(self) -> tuple[Net, ...]:
        """All nets that steps run."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and streams; nothing runs any more. Parameters can still be read. Idempotent."""

    def fetch(self, blob: str) -> list[Array]:
        """The blob that the builder calls `blob`, on each device. Raises MissingBlobError."""
        return [self.workspace_of(place).fetch_blob(place.blob(blob)) for place in self.places]

    def parameters(self) -> dict[str, Array]:
        """The trained and the computed parameters, as they are on the first device."""
        helper = self.replicas[0].helper
        return self._fetched([*helper.parameters, *helper.computed_parameters])

    def state(self) -> dict[str, Array]:
        """All that a training needs to go on (`ModelHelper.checkpoint_blobs`), as it is on the first device."""
        return self._fetched(self.replicas[0].helper.checkpoint_blobs())

    def load_state(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Give every device what `state` returned, here or on other devices.

        Raises MissingBlobError when something is missing, FeedError when a shape or element type is not the model's.
        """
        arrays = {}
        for name in self.replicas[0].helper.checkpoint_blobs():
            if name not in state:
                raise MissingBlobError(f"the state has no {name!r}; it has {sorted(state)}")
            array, own = np.asarray(state[name]), self._tensor(self.places[0], name)
            if tuple(array.shape) != own.shape or array.dtype != own.meta.numpy:
                raise FeedError(
                    f"the state's {name!r} must be {own.meta} of shape {own.shape}, found {array.dtype} of "
                    f"{array.shape}"
                )
            arrays[name] = array
        for place in self.places:
            for name, array in arrays.items():
                self._tensor(place, name).feed(array)

    def _fetched(self, names: Sequence[str]) -> dict[str, Array]:
        return {name: self._tensor(self.places[0], name).fetch() for name in names}

    def _tensor(self, place: ReplicaDevice, name: str) -> Tensor:
        return self.workspace_of(place).get_blob(place.blob(name)).get(Tensor)

    def _initialize(self) -> None:
        """Fill the parameters on the first device and copy them to the others.

        Other objects than tensors, such as a mutex, each makes for itself.
        """
        self._run_init(self.replicas[0], list(self.replicas[0].init))
        for name, array in self.replicas[0].helper.arrays.items():
            self._tensor(self.places[0], name).feed(array)
        for replica in self.replicas[1:]:
            own: list[OperatorDef] = []
            for definition in replica.init:
                names = list(definition.output)
                values = [self.workspace_of(self.places[0]).get_blob(self.places[0].blob(name)).value for name in names]
                if all(isinstance(value, Tensor) for value in values):
                    for name, value in zip(names, values, strict=True):
                        assert isinstance(value, Tensor)
                        self._copy_to(replica.place, name, value)
                else:
                    own.append(definition)
            self._run_init(replica, own)

    def _copy_to(self, place: ReplicaDevice, name: str, value: Tensor) -> None:
        """Put the first device's tensor on another device of the same kind of use: what is on the host stays there."""
        device = place.device if value.device == self.places[0].device else value.device
        self.workspace_of(place).feed_blob(place.blob(name), value.fetch(), device=device)

    def _run_init(self, replica: Replica, definitions: Sequence[OperatorDef]) -> None:
        placed = [replica.place.put(definition, self._shared) for definition in definitions]
        self.workspace_of(replica.place).run_net_once(NetDef(name=f"{replica.helper.name}_init", op=placed))

    def _parameter_types(self) -> dict[str, TensorType]:
        names = self.replicas[0].gradients
        tensors = {name: self._tensor(self.places[0], name) for name in names}
        return {name: TensorType(tensor.shape, tensor.meta) for name, tensor in tensors.items()}

    def _shares(self, feeds: Feeds | None) -> list[list[dict[str, Array]]]:
        """The inputs by device and micro-batch. Raises FeedError."""
        inputs = self.replicas[0].inputs
        arrays = {name: np.asarray(value) for name, value in (feeds or {}).items()}
        if set(arrays) != set(inputs):
            raise FeedError(f"expected the inputs {sorted(inputs)}, found {sorted(arrays)}")
        parts = len(self.places) * self.iter_size
        for name, array in arrays.items():
            if array.ndim and array.shape[0] % parts:
                raise FeedError(
                    f"input {name!r} has {array.shape[0]} rows, which {len(self.places)} device(s) with "
                    f"{self.iter_size} micro-batch(es) each cannot divide equally"
                )
        for name, array in arrays.items():
            self._check_feed(name, array, parts)
        rows = {name: array.shape[0] // parts for name, array in arrays.items() if array.ndim}
        return [
            [
                {
                    name: array[(part := device * self.iter_size + micro) * rows[name] : (part + 1) * rows[name]]
                    if array.ndim
                    else array
                    for name, array in arrays.items()
                }
                for micro in range(self.iter_size)
            ]
            for device in range(len(self.places))
        ]

    def _check_feed(self, name: str, array: Array, parts: int) -> None:
        """Raise FeedError unless the array is as the model declares the input. Integers may have any width."""
        info = self.replicas[0].helper.inputs[name]
        share = (array.shape[0] // parts, *array.shape[1:]) if array.ndim else ()
        kinds = {array.dtype.kind} if info.dtype is None else {array.dtype.kind, info.dtype.numpy.kind}
        fits = info.dtype is None or array.dtype == info.dtype.numpy or kinds <= _INTEGERS
        if fits and info.shape is not None and array.ndim:
            fits = len(share) == len(info.shape) and all(
                size in (None, actual) for size, actual in zip(info.shape, share, strict=True)
            )
        if not fits:
            raise FeedError(
                f"input {name!r} is declared as {info}, found {array.dtype}{list(share)} for a micro-batch of a device"
            )

    def _feed(self, replica: Replica, arrays: Mapping[str, Array], micro_batch: int) -> None:
        """Feed a replica's inputs on the host; its net copies them to the device."""
        workspace, place = self.workspace_of(replica.place), replica.place
        for name, array in arrays.items():
            workspace.feed_blob(place.blob(name), array)
        if replica.draws:
            step = int(self._tensor(place, ITERATION).fetch().item())
            part = place.number * self.iter_size + micro_batch
            drawn = np.array([step * len(self.places) * self.iter_size + part], np.int64)
            workspace.feed_blob(place.blob(DRAW), drawn)

    def _loss(self, replica: Replica, loss: str) -> float:
        return float(np.sum(self._tensor(replica.place, loss).fetch(), dtype=np.float64))
