"""Caffe2's workspaces: several with names, one of which is current, for the whole process (`caffe2.python.workspace`).

What fails here raises Caffe2Error, a RuntimeError. Operators of these workspaces may read and write files anywhere, as
a script may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.caffe2 import native as C
from dagexec.caffe2 import scope
from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.caffe2.gpus import gpu_count, place, placed
from dagexec.caffe2.native_workspace import NativeWorkspace
from dagexec.caffe2.net import Net
from dagexec.caffe2.plans import ExecutionStep, Plan
from dagexec.caffe2.prediction import Predictor
from dagexec.caffe2.references import BlobReference
from dagexec.caffe2.scope import CurrentNameScope as GetNameScope
from dagexec.caffe2.utils import Caffe2TensorToNumpyArray
from dagexec.core.device import Device
from dagexec.core.dtypes import from_number
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef, PlanDef, TensorProto
from dagexec.core.schema import TensorType
from dagexec.core.scoped_bodies import is_added
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import Caffe2Error
from dagexec.frontend.caffe2_int8 import Int8Scales, lowered
from dagexec.platform.locks import new_lock
from dagexec.scheduler.caffe2_net_types import net_type
from dagexec.scheduler.plan_steps import run_plan

__all__ = [
    "Blobs",
    "C",
    "CreateBlob",
    "CreateNet",
    "CurrentWorkspace",
    "FeedBlob",
    "FetchBlob",
    "FetchBlobs",
    "FetchInt8Blob",
    "FetchInt8BlobRealVal",
    "GetNameScope",
    "GlobalInit",
    "HasBlob",
    "InferShapesAndTypes",
    "Int8Tensor",
    "NumCudaDevices",
    "Predictor",
    "RemoveBlob",
    "ResetWorkspace",
    "RootFolder",
    "RunNet",
    "RunNetOnce",
    "RunOperatorOnce",
    "RunOperatorsOnce",
    "RunPlan",
    "StringifyBlobName",
    "StringifyNetName",
    "StringifyProto",
    "SwitchWorkspace",
    "WorkspaceGuard",
    "Workspaces",
]

Name = str | BlobReference
Array = npt.NDArray[Any]
AnyNet = Net | NetDef | bytes

_DEFAULT = "default"


class _All:
    """The workspaces of the process, and which is current."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.by_name = {_DEFAULT: _new()}
        self.scales: dict[str, Int8Scales] = {}
        self.name = _DEFAULT

    @property
    def current(self) -> Workspace:
        return self.by_name[self.name]


def _new(root_folder: str | None = None) -> Workspace:
    return Workspace(root_folder=root_folder, allow_io=True)


_all = _All()


def _dropped(workspace: Workspace) -> None:
    for name in workspace.nets:
        workspace.delete_net(name)


def GlobalInit(args: Iterable[str]) -> bool:
    """Caffe2 reads its flags here. There are none in dagexec: nothing is done with `args`."""
    return True


def NumCudaDevices() -> int:
    """How many GPUs CUDA has here; 0 without CUDA."""
    return gpu_count()


def __getattr__(name: str) -> bool:
    """`has_gpu_support` and `has_cuda_support`, found out when they are asked for: both say whether there is a GPU."""
    if name in ("has_gpu_support", "has_cuda_support"):
        return NumCudaDevices() > 0
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Workspaces


def CurrentWorkspace() -> str:
    """The name of the current workspace; at first `default`."""
    return _all.name


def Workspaces() -> list[str]:
    """The names of all workspaces, sorted."""
    with _all.lock:
        return sorted(_all.by_name)


def SwitchWorkspace(name: str, create_if_missing: bool = False) -> None:
    """Make the workspace `name` the current one. Raises Caffe2Error where there is none and none is to be made."""
    with _all.lock:
        if name not in _all.by_name:
            if not create_if_missing:
                raise Caffe2Error(f"workspace {name!r} does not exist; there are {sorted(_all.by_name)}")
            _all.by_name[name] = _new()
        _all.name = name


@contextmanager
def WorkspaceGuard(workspace_name: str) -> Iterator[None]:
    """Have the workspace be the current one inside; it is made where there is none."""
    before = CurrentWorkspace()
    SwitchWorkspace(workspace_name, True)
    try:
        yield
    finally:
        SwitchWorkspace(before)


def ResetWorkspace(root_folder: str | None = None) -> bool:
    """Drop the blobs and the nets of the current workspace, whose operators then read and write below `root_folder`."""
    with _all.lock:
        before, _all.by_name[_all.name] = _all.current, _new(root_folder)
        _all.scales.pop(_all.name, None)
    _dropped(before)
    return True


def RootFolder() -> str:
    """The folder to which paths of operators are relative."""
    return str(_all.current.root_folder)


# Blobs


def Blobs() -> list[str]:
    """The names of the blobs of the current workspace, sorted, without those that dagexec has added to loops."""
    return [name for name in _all.current.blobs() if not is_added(name)]


def HasBlob(name: Name) -> bool:
    """True when the current workspace has the blob, be it empty."""
    return _all.current.has_blob(str(name))


def CreateBlob(name: Name) -> bool:
    """Make an empty blob, unless there is one of that name."""
    _all.current.create_blob(str(name))
    return True


def current() -> NativeWorkspace:
    """The current workspace as an object."""
    return NativeWorkspace(_all.current)


def hold(name: str, value: object) -> None:
    """Let a blob hold an object, a queue, say."""
    _all.current.create_blob(name).value = value


def RemoveBlob(name: Name) -> None:
    """Forget a blob. Raises Caffe2Error where there is none of that name."""
    with failing_as_caffe2("RemoveBlob"):
        _all.current.remove_blob(str(name))


def FeedBlob(name: Name, arr: Any, device_option: DeviceOption | None = None) -> bool:
    """Copy an array, a TensorProto or a string into a blob, on `device_option` or the device of the scope.

    Raises Caffe2Error for anything else, numbers and lists included, as Caffe2 does.
    """
    blob, workspace = str(name), _all.current
    value = Caffe2TensorToNumpyArray(arr) if isinstance(arr, TensorProto) else arr
    with failing_as_caffe2(f"FeedBlob of {blob!r}"):
        if isinstance(value, str | bytes):
            workspace.create_blob(blob).value = value.encode() if isinstance(value, str) else value
            return True
        if not isinstance(value, np.ndarray | np.generic):
            raise Caffe2Error(f"FeedBlob of {blob!r}: expected an array or a string, found {value!r:.80}")
        option = device_option if device_option is not None else scope.CurrentDeviceScope()
        holder = workspace.create_blob(blob)
        if not isinstance(holder.value, Tensor):
            holder.value = None
        workspace.feed_blob(blob, value, device=None if option is None else Device.from_option(placed(option)))
    return True


def FetchBlob(name: Name) -> Any:
    """A copy of the array in a blob; a string as bytes; of any other object its class, as text in bytes.

    Raises Caffe2Error where there is no blob of that name.
    """
    return current().fetch(name)


class Int8Tensor(NamedTuple):
    """A blob of an int8 net: bytes that stand for (data - zero_point) * scale."""

    data: Array
    scale: float
    zero_point: int


def FetchInt8Blob(name: Name) -> Int8Tensor:
    """A copy of a blob of an int8 net, and its scale. Raises Caffe2Error for another blob."""
    scale = _all.scales.get(_all.name, {}).get(str(name))
    if scale is None:
        raise Caffe2Error(f"FetchInt8Blob: no operator of the int8 family has made blob {str(name)!r}")
    return Int8Tensor(FetchBlob(name), scale.scale, scale.zero_point)


def FetchInt8BlobRealVal(name: Name) -> Array:
    """The numbers that a blob of an int8 net stands for. Raises Caffe2Error for another blob."""
    data, scale, zero_point = FetchInt8Blob(name)
    return (data.astype(np.int32) - zero_point).astype(np.float32) * np.float32(scale)


def FetchBlobs(names: Iterable[Name]) -> list[Any]:
    """What each of several blobs holds, as `FetchBlob` gives it."""
    return [FetchBlob(name) for name in names]


# Nets and operators


def StringifyNetName(name: Any) -> str:
    """The name of a net, given as text, as a net or as its message."""
    if isinstance(name, Net):
        return name.Name()
    return name.name if isinstance(name, NetDef) else str(name)


def StringifyBlobName(name: Name) -> str:
    """The name of a blob, given as text or as a reference."""
    return str(name)


def StringifyProto(obj: Any) -> bytes:
    """A message, or that of a net, as bytes."""
    message = obj.Proto() if hasattr(obj, "Proto") else obj
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def CreateNet(net: AnyNet, overwrite: bool = False, input_blobs: Iterable[Name] | None = None) -> bool:
    """Make a net in the current workspace, whose blobs it must find there; `input_blobs` are made where they are not.

    Raises Caffe2Error where there is a net of that name and no `overwrite`, and for a net that cannot be made.
    """
    for blob in input_blobs or ():
        CreateBlob(blob)
    definition = _definition(net)
    with failing_as_caffe2(f"CreateNet of {definition.name!r}"):
        kind = net_type(definition.type, definition.name)
        _all.current.create_net(definition, kind, definition.num_workers or None, overwrite=overwrite)
    return True


def RunNet(name: Any, num_iter: int = 1, allow_fail: bool = False) -> bool:
    """Run a net that `CreateNet` made, so many times. Where it fails, Caffe2Error, or False with `allow_fail`."""
    called = StringifyNetName(name)
    try:
        with failing_as_caffe2(f"Error running net {called}"):
            for _ in range(num_iter):
                _all.current.run_net(called)
    except Caffe2Error:
        if not allow_fail:
            raise
        return False
    return True


def RunNetOnce(net: AnyNet) -> bool:
    """Make a net, run it and drop it. Raises Caffe2Error where it fails."""
    definition = _definition(net)
    with failing_as_caffe2(f"Error running net {definition.name}"):
        made = _all.current.build_net(
            definition, net_type(definition.type, definition.name), definition.num_workers or None
        )
        try:
            made.run()
        finally:
            made.close()
    return True


def RunPlan(plan_or_step: Plan | ExecutionStep | PlanDef | bytes) -> bool:
    """Run a plan, or a step as the only one of a plan, in the current workspace. Raises Caffe2Error where it fails.

    Its nets are made there, and stay. The first failure stops what runs beside it.
    """
    plan = Plan(plan_or_step) if isinstance(plan_or_step, ExecutionStep) else plan_or_step
    definition = PlanDef.FromString(StringifyProto(plan))
    with failing_as_caffe2(f"Error running plan {definition.name}"):
        for net in definition.network:
            place(net)
        run_plan(_all.current, definition)
    return True


def RunOperatorOnce(operator: OperatorDef | bytes) -> bool:
    """Run a single operator. Raises Caffe2Error where it fails."""
    definition = OperatorDef.FromString(operator) if isinstance(operator, bytes) else operator
    with failing_as_caffe2(f"Error running operator {definition.type}"):
        for part in _definition(NetDef(op=[definition])).op:
            _all.current.run_operator_once(part)
    return True


def RunOperatorsOnce(operators: Iterable[OperatorDef | bytes]) -> bool:
    """Run operators one after another. Raises Caffe2Error where one fails."""
    return all(map(RunOperatorOnce, operators))


def InferShapesAndTypes(
    nets: Iterable[AnyNet],
    blob_dimensions: Mapping[str, Sequence[int]] | None = None,
    nets_proto: bool = False,
    blob_types: Mapping[str, int] | None = None,
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The shape and the element type of each blob of nets that run one after another, as far as they are known.

    Blobs that are there before have those of `blob_dimensions` and `blob_types`, which is float where it says nothing;
    without either, those of the current workspace. Raises Caffe2Error where they do not fit each other.
    """
    if blob_dimensions is None:
        held = {name: _all.current.get_blob(name).value for name in Blobs()}
        tensors = {name: value for name, value in held.items() if isinstance(value, Tensor) and not value.is_empty}
        types = {name: TensorType(value.shape, value.meta) for name, value in tensors.items()}
    else:
        numbers = blob_types or {}
        types = {
            name: TensorType(tuple(shape), from_number(numbers.get(name, TensorProto.FLOAT)))
            for name, shape in blob_dimensions.items()
        }
    with failing_as_caffe2("InferShapesAndTypes"):
        for net in nets:
            inferred = infer_net(build_graph(_definition(net)), types).blobs
            types = {name: kind for name, kind in inferred.items() if kind is not None}
    shapes = {name: list(kind.shape) for name, kind in types.items()}
    return shapes, {name: kind.meta.number for name, kind in types.items()}


def _definition(net: AnyNet) -> NetDef:
    """A copy, which the script cannot change any more, on the devices that are there.

    Operators of the int8 family are made into others, by the scales of blobs that nets before have made.
    """
    definition = NetDef.FromString(StringifyProto(net))
    place(definition)
    with failing_as_caffe2(f"net {definition.name!r}"):
        return lowered(definition, _all.scales.setdefault(_all.name, {}))
