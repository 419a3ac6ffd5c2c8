"""Workspace: named blobs and nets. A child workspace reads through to its parent and keeps its own writes to itself.

Several threads may use one workspace: a lock guards its maps. The contents of blobs are not guarded: the scheduler
orders the accesses of a net's operators, and a blob must not be fed while a net that uses it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob, set_content
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.device import Device
from dagexec.core.dtypes import STRING
from dagexec.core.io_access import IO, check_inside
from dagexec.core.node import Node, node_of
from dagexec.core.program import Program, header_of, program_with
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.tensor import Tensor
from dagexec.core.variant import Variant, as_texts
from dagexec.errors import DagexecError, MissingBlobError, SchemaError, ShapeError
from dagexec.platform.forking import ProcessLock


class Net(Protocol):
    """What a workspace knows of a net: it can be run, and closed."""

    @property
    def name(self) -> str:
        """The net's name, unique in its workspace."""

    def run(self) -> None:
        """Run once, blocking."""

    def close(self) -> None:
        """Release threads and memory."""


NetFactory = Callable[..., Net]
"""Of the workspace, the definition and the number of workers; and with keyword `policy` where one is given."""
_net_types: dict[str, NetFactory] = {}


def register_net_type(name: str, factory: NetFactory) -> None:
    """Make `factory(workspace, definition, num_workers)` build the nets of type `name`."""
    _net_types[name] = factory


FORM = "form"
"""The argument of a net that names the form it is to be made in; any for which none is registered is ignored."""

NetForm = Callable[[NetDef, "Workspace"], NetDef]
_forms: dict[str, NetForm] = {}


def register_form(name: str, make: NetForm) -> None:
    """Have `Workspace.create_net` make, of a net whose argument `form` is `name`, what `make` makes of it there."""
    _forms[name] = make


def net_types() -> list[str]:
    """The registered net types."""
    return sorted(_net_types)


_HERE = Path()


class Workspace:
    """Holds named blobs and nets, as in Caffe2.

        ws = dagexec.Workspace()
        ws.run_net_once(dagexec.load_net("init_net.pb"))
        ws.feed_blob("data", array)
        ws.create_net(dagexec.load_net("predict_net.pb"), net_type="dag", num_workers=2).run()
        probabilities = ws.fetch_blob("softmax")

    With a `parent`, blobs that are not here are looked up there; blobs created here stay here. Replicas share
    parameters in this way: parameters are in the parent, activations in the children.

    Attributes:
        root_folder: the folder to which paths of storage operators are relative; a child inherits its parent's.
        allow_io: what operators may access besides blobs; a child inherits its parent's.
        texts: strings are fetched as `str`, as ONNX's bindings have them, and not as `bytes`, as Caffe2's.
    """

    texts = False

    def __init__(
        self,
        parent: Workspace | None = None,
        root_folder: str | os.PathLike[str] | None = None,
        *,
        allow_io: bool | IO | None = None,
    ) -> None:
        """Allow operators to read and write databases in `root_folder`, or with `allow_io=True` anywhere.

        Without either, and without a parent that allows it, operators that access files or communicate with other
        processes are refused.
        """
        self.parent = parent
        inherited = _HERE if parent is None else parent.root_folder
        self.root_folder: Path = inherited if root_folder is None else Path(root_folder)
        if allow_io is None and root_folder is not None:
            allow_io = IO.WRITE_FOLDER
        if allow_io is None:
            allow_io = IO.NONE if parent is None else parent.allow_io
        self.allow_io: IO = IO.ANY if allow_io is True else IO(allow_io)
        self._blobs: dict[str, Blob] = {}
        self._nets: dict[str, Net] = {}
        self._channels_last: dict[str, str] = {}
        self._lock = ProcessLock()

    def create_blob(self, name: str) -> Blob:
        """The blob `name` if it is visible here, otherwise a new, empty one in this workspace."""
        found = self.get_blob_or_none(name)
        return found if found is not None else self.create_local_blob(name)

    def create_local_blob(self, name: str) -> Blob:
        """The blob `name` of this workspace itself, created if necessary; it hides a parent's blob of that name."""
        return self._blobs.setdefault(name, Blob(name))

    def link_blob(self, name: str, blob: Blob) -> None:
        """Let `name` mean here a blob of another workspace, which may have another name there.

        Raises SchemaError when there is another blob of that name.
        """
        with self._lock.own:
            if self._blobs.setdefault(name, blob) is not blob:
                raise SchemaError(f"blob {name!r} exists already in this workspace")

    def get_blob_or_none(self, name: str) -> Blob | None:
        """The blob `name` here or in a parent, or None."""
        workspace: Workspace | None = self
        while workspace is not None:
            blob = workspace._blobs.get(name)
            if blob is not None:
                return blob
            workspace = workspace.parent
        return None

    def get_blob(self, name: str) -> Blob:
        """The blob `name` here or in a parent. Raises MissingBlobError."""
        blob = self.get_blob_or_none(name)
        if blob is None:
            raise MissingBlobError(f"blob {name!r} does not exist in this workspace or its parents")
        return blob

    def has_blob(self, name: str) -> bool:
        """True when the blob exists here or in a parent."""
        return self.get_blob_or_none(name) is not None

    def blobs(self) -> list[str]:
        """Names of all visible blobs, sorted."""
        inherited = set(self.parent.blobs()) if self.parent is not None else set()
        with self._lock.own:
            return sorted(inherited | self._blobs.keys())

    def local_blobs(self) -> list[str]:
        """Names of the blobs of this workspace itself, sorted."""
        with self._lock.own:
            return sorted(self._blobs)

    def remove_blob(self, name: str) -> None:
        """Forget a blob of this workspace itself; nets made before keep the object. Raises MissingBlobError."""
        with self._lock.own:
            if self._blobs.pop(name, None) is None:
                raise MissingBlobError(f"blob {name!r} is not in this workspace itself")

    def feed_blob(
        self,
        name: str,
        value: npt.ArrayLike,
        descriptor: TensorDescriptor | None = None,
        *,
        device: str | Device | None = None,
    ) -> None:
        """Copy an array (or a number, or nested lists) into tensor blob `name`, which is created if necessary.

        The tensor is packed, or has the layout of `descriptor`. It is on `device`; by default an existing tensor stays
        where it is and a new one is on the host. Raises ShapeError for a value that is not an array, has an unsupported
        dtype or does not match the layout, BlobTypeError if the blob holds something else, DeviceError for an unknown
        device.
        """
        if isinstance(value, Variant):
            set_content(self.create_blob(name), value.content)
            return
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:  # lists of unequal lengths
            raise ShapeError(f"blob {name!r} cannot be fed: {error}") from None
        blob = self.create_blob(name)
        if device is not None:
            place = Device.parse(device) if isinstance(device, str) else device
            if blob.value is None or blob.get(Tensor).device != place:
                blob.value = Tensor(place)
        blob.tensor().feed(array, descriptor)

    def adopt_blob(self, name: str, array: npt.NDArray[Any]) -> None:
        """Make `array`'s own memory the content of blob `name`, read-only and without a copy (for parameters)."""
        self.create_local_blob(name).tensor().adopt(array)

    def adopt_strided_blob(self, name: str, array: npt.NDArray[Any], writable: bool = False) -> None:
        """Make `array`'s own memory, with its own strides, the content of blob `name`, without a copy.

        A net may write results to it if it is `writable` and no two of its elements overlap. It must not share memory
        with another blob of the net, because operators are ordered by the names of blobs alone.
        """
        self.create_local_blob(name).tensor().adopt_strided(array, writable)

    def give_channels_first(self, moved: Mapping[str, str]) -> None:
        """Where there is no blob of a name in `moved`, `fetch_blob` gives that blob's images: N, spatial, channels.

        They become N, channels, spatial.
        """
        with self._lock.own:
            self._channels_last.update(moved)

    def fetch_blob(self, name: str) -> npt.NDArray[Any]:
        """A copy of tensor blob `name`; of a sequence a list of arrays, and of an optional without a value None.

        Raises MissingBlobError, or BlobTypeError if it holds something else.

        A blob that a net does not keep is not available after the run, because its memory is reused.
        """
        if name in self._channels_last and not self.has_blob(name):
            return np.ascontiguousarray(np.moveaxis(self.fetch_blob(self._channels_last[name]), -1, 1))
        blob = self.get_blob(name)
        if isinstance(blob.value, Variant):
            return cast(npt.NDArray[Any], blob.value.fetched(texts=self.texts))
        tensor = blob.get(Tensor)
        if tensor.is_empty:
            raise MissingBlobError(f"blob {name!r} is empty")
        storage = tensor.storage()
        if storage is not None and storage.reused:
            raise MissingBlobError(
                f"blob {name!r} is not available after a run, because its memory is reused: name it in `keep`"
            )
        return as_texts(tensor.array) if self.texts and tensor.meta is STRING else tensor.fetch()

    def place(self, path: str, *, absolute: bool = False, owner: str) -> Path:
        """Resolve an operator's `path`: relative to the root folder unless it is `absolute`.

        Raises AccessError, naming `owner`, for a path outside that folder unless `allow_io` is IO.ANY.
        """
        found = Path(path) if absolute else self.root_folder / path
        if self.allow_io is not IO.ANY:
            check_inside(found, self.root_folder, owner)
        return found

    def create_net(
        self,
        definition: NetDef,
        net_type: str | None = None,
        num_workers: int | None = None,
        *,
        overwrite: bool = False,
        policy: object = None,
    ) -> Net:
        """Build a net here and keep it under its name.

        `net_type` and `num_workers` default to the def's own (`type`, else simple; `num_workers`). `policy` is what
        `dagexec.scheduling.find_policy` takes; None leaves the order of chains to the critical path. A def that names a
        form (`register_form`) is brought into it first. Raises SchemaError for an empty or used name (unless
        `overwrite`) and whatever building the net raises.
        """
        if not definition.name:
            raise SchemaError("a net needs a name")
        if definition.name in self._nets and not overwrite:
            raise SchemaError(f"net {definition.name!r} already exists; pass overwrite=True to replace it")
        forms = [_forms.get(argument.s.decode()) for argument in definition.arg if argument.name == FORM]
        for make in filter(None, forms):
            definition = make(definition, self)
        net = self.build_net(definition, net_type, num_workers, policy)
        with self._lock.own:
            other = self._nets.get(definition.name)
            if other is None or overwrite:
                self._nets[definition.name] = net
        if other is not None and overwrite:
            other.close()
        elif other is not None:  # made by another thread in the meantime
            net.close()
            raise SchemaError(f"net {definition.name!r} already exists; pass overwrite=True to replace it")
        return net

    def build_net(
        self,
        definition: NetDef | Program,
        net_type: str | None = None,
        num_workers: int | None = None,
        policy: object = None,
    ) -> Net:
        """Build a net on this workspace's blobs without keeping it. The caller closes it."""
        kind = net_type or header_of(definition).type or "simple"
        factory = _net_types.get(kind)
        if factory is None:
            raise SchemaError(f"net {definition.name!r}: type {kind!r} is unknown; expected one of {net_types()}")
        settings = {} if policy is None else {"policy": policy}
        return factory(self, definition, num_workers, **settings)

    @property
    def nets(self) -> Mapping[str, Net]:
        """The nets kept here, by name."""
        with self._lock.own:
            return dict(self._nets)

    def run_net(self, name: str) -> None:
        """Run net `name` once. Raises DagexecError when there is none of that name."""
        net = self._nets.get(name)
        if net is None:
            raise DagexecError(f"net {name!r} does not exist in this workspace; nets: {sorted(self._nets)}")
        net.run()

    def delete_net(self, name: str) -> None:
        """Close and forget net `name`. Raises DagexecError when there is none of that name."""
        with self._lock.own:
            net = self._nets.pop(name, None)
        if net is None:
            raise DagexecError(f"net {name!r} does not exist in this workspace; nets: {sorted(self._nets)}")
        net.close()

    def run_net_once(self, definition: NetDef | Program) -> None:
        """Build a net, run it in list order and discard it, as is usual for an init net."""
        net = self.build_net(definition, "simple")
        try:
            net.run()
        finally:
            net.close()

    def run_operator_once(self, definition: OperatorDef | Node) -> None:
        """Run a single operator on this workspace's blobs."""
        self.run_net_once(program_with([node_of(definition)], NetDef(name=definition.type)))
