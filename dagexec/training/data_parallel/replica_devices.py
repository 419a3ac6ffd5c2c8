"""The devices that a model is trained on, each with the name scope of its replica.

Replicas on `sim:1` and `cuda:0` have blobs called `sim_1/...` and `cuda_0/...`; the n-th on the host has `cpu_n/...`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.device import CPU, Device
from dagexec.core.proto import OperatorDef
from dagexec.core.runtime import runtime_of
from dagexec.devices.cuda.nccl import has_nccl
from dagexec.errors import DeviceError
from dagexec.platform.records import dataclass

REPLICA = Device("sim", 63)
"""Stands for the device of a replica, whichever that will be, while its operators are made."""


@dataclass(frozen=True)
class ReplicaDevice:
    """Where one replica is.

    Attributes:
        number: its position in the list of devices, and its rank.
        device: the device.
        scope: the prefix of its blobs, without the slash.
    """

    number: int
    device: Device
    scope: str

    def blob(self, name: str) -> str:
        """The name of the replica's blob that the model calls `name`."""
        return f"{self.scope}/{name}"

    def put(self, definition: OperatorDef, shared: frozenset[str] = frozenset()) -> OperatorDef:
        """The operator for this replica: its blobs in this scope, but those in `shared`; on this device.

        That is where operators on REPLICA go, and those that name no device; others stay where they are.
        """
        placed = OperatorDef()
        placed.CopyFrom(definition)
        for names in (placed.input, placed.output, placed.control_input):
            names[:] = [name if name in shared else self.blob(name) for name in names]
        if definition.name:
            placed.name = self.blob(definition.name)
        option = placed.device_option
        if not option.HasField("device_type") or Device.from_option(option) == REPLICA:
            mine = self.device.to_option()
            option.device_type, option.device_id = mine.device_type, mine.device_id
        return placed

    def __str__(self) -> str:
        return self.scope


def find_replica_devices(devices: Sequence[str | Device]) -> tuple[ReplicaDevice, ...]:
    """A replica device for each of `devices`, in their order; `cpu` may be named several times.

    Raises DeviceError for an empty list, a device that is named twice, and one that does not exist here.
    """
    if isinstance(devices, str) or not devices:
        raise DeviceError(f"data parallel training needs a list of at least one device; found {devices!r}")
    places: list[ReplicaDevice] = []
    for number, entry in enumerate(devices):
        device = entry if isinstance(entry, Device) else Device.parse(entry)
        if device != CPU and any(place.device == device for place in places):
            raise DeviceError(f"device {device} is listed twice in {[str(name) for name in devices]}")
        try:
            runtime_of(device)
        except DeviceError as error:
            raise DeviceError(f"entry {number} of the devices, {device}, is missing here: {error}") from None
        index = sum(place.device == CPU for place in places) if device == CPU else device.index
        places.append(ReplicaDevice(number, device, f"{device.kind}_{index}"))
    return tuple(places)


def sums_by_nccl(places: Sequence[ReplicaDevice]) -> bool:
    """True for several CUDA devices where NCCL is installed; the log says once when it is not."""
    return len(places) > 1 and all(place.device.kind == "cuda" for place in places) and has_nccl()
