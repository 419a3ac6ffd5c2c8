"""A workspace as an object, as Caffe2's extension module has it: `workspace.C.Workspace`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.caffe2.gpus import place, placed
from dagexec.core.device import Device
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef, PlanDef
from dagexec.core.scoped_bodies import is_added
from dagexec.core.tensor import Tensor
from dagexec.core.variant import Variant
from dagexec.core.workspace import Net, Workspace
from dagexec.errors import Caffe2Error
from dagexec.scheduler.caffe2_net_types import net_type
from dagexec.scheduler.plan_steps import run_plan


class NativeBlob:
    """A blob of a workspace."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self._workspace = workspace
        self._name = name

    def fetch(self) -> npt.NDArray[Any]:
        """A copy of the array that it holds. Raises Caffe2Error where it holds none."""
        with failing_as_caffe2(f"fetch of {self._name!r}"):
            return self._workspace.fetch_blob(self._name)

    def feed(self, arg: Any, device_option: DeviceOption | None = None) -> bool:
        """Let it hold a copy of an array."""
        with failing_as_caffe2(f"feed of {self._name!r}"):
            device = None if device_option is None else Device.from_option(placed(device_option))
            self._workspace.feed_blob(self._name, np.asarray(arg), device=device)
        return True


class _Blobs(Mapping[str, NativeBlob]):
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def __getitem__(self, name: str) -> NativeBlob:
        if not self._workspace.has_blob(str(name)):
            raise KeyError(name)
        return NativeBlob(self._workspace, str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(name for name in self._workspace.blobs() if not is_added(name))

    def __len__(self) -> int:
        return len(list(iter(self)))


class NativeWorkspace:
    """A workspace beside those that have names, or one of these, as a function gets it."""

    def __init__(self, workspace: Workspace | NativeWorkspace | None = None) -> None:
        """A new one, which sees the blobs of another NativeWorkspace; or a Workspace itself."""
        around = workspace.inside() if isinstance(workspace, NativeWorkspace) else None
        self._workspace: Workspace = workspace if isinstance(workspace, Workspace) else Workspace(around, allow_io=True)

    def inside(self) -> Workspace:
        """The workspace as the rest of dagexec has it."""
        return self._workspace

    @property
    def blobs(self) -> Mapping[str, NativeBlob]:
        """Its blobs, by name."""
        return _Blobs(self._workspace)

    @property
    def nets(self) -> Mapping[str, Net]:
        """Its nets, by name."""
        return self._workspace.nets

    def create_blob(self, name: Any) -> NativeBlob:
        """The blob of that name, made where there is none."""
        self._workspace.create_blob(str(name))
        return NativeBlob(self._workspace, str(name))

    def has_blob(self, name: Any) -> bool:
        """True where there is a blob of that name."""
        return self._workspace.has_blob(str(name))

    def fetch_blob(self, name: Any) -> npt.NDArray[Any]:
        """A copy of the array in a blob."""
        return NativeBlob(self._workspace, str(name)).fetch()

    def fetch(self, name: Any) -> Any:
        """A copy of the array in a blob; a string as bytes; of any other object its class, as text in bytes.

        Raises Caffe2Error where there is no blob of that name.
        """
        blob = str(name)
        with failing_as_caffe2(f"FetchBlob of {blob!r}"):
            value = self._workspace.get_blob(blob).value
            if isinstance(value, Tensor | Variant) and not (isinstance(value, Tensor) and value.is_empty):
                return self._workspace.fetch_blob(blob)
        if isinstance(value, bytes):
            return value
        kind = "nullptr (uninitialized)" if value is None else type(value).__name__
        return f"{blob}, a C++ native class of type {kind}.".encode()

    def feed_blob(self, name: Any, arr: Any, device_option: DeviceOption | None = None) -> bool:
        """Copy an array into a blob, which is made where there is none."""
        return self.create_blob(name).feed(arr, device_option)

    def create_net(self, net: Any, overwrite: bool = False) -> Net:
        """A net of this workspace, which has a method `run`."""
        definition = _copy(net)
        place(definition)
        with failing_as_caffe2(f"cannot make net {definition.name!r}"):
            kind = net_type(definition.type, definition.name)
            return self._workspace.create_net(definition, kind, definition.num_workers or None, overwrite=overwrite)

    def run(self, obj: Any) -> None:
        """Run a plan, a net or an operator once, given as such or as its message. Raises Caffe2Error."""
        message = _copy(obj)
        with failing_as_caffe2(f"Error running {message.DESCRIPTOR.name} {message.name!r}"):
            if isinstance(message, PlanDef):
                for net in message.network:
                    place(net)
                run_plan(self._workspace, message)
            elif isinstance(message, NetDef):
                place(message)
                made = self._workspace.build_net(
                    message, net_type(message.type, message.name), message.num_workers or None
                )
                try:
                    made.run()
                finally:
                    made.close()
            elif isinstance(message, OperatorDef):
                self._workspace.run_operator_once(message)
            else:
                raise Caffe2Error(f"expected a plan, a net or an operator, found {type(obj).__name__}")


def _copy(obj: Any) -> Any:
    message = obj.Proto() if hasattr(obj, "Proto") else obj
    return type(message).FromString(message.SerializeToString())
