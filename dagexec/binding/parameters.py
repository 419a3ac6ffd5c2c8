"""The parameters of a model as a workspace: what it was given, and what its init net makes of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.constant import MIN_BYTES
from dagexec.core.device import CPU
from dagexec.core.dtypes import STRING, from_numpy
from dagexec.core.model import Model
from dagexec.core.program import Program, program_of
from dagexec.core.proto import NetDef
from dagexec.core.registry import check_known
from dagexec.core.shared_buffer import SharedBuffer, create_shared_buffer, shared_buffer_forced
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace

Array = npt.NDArray[Any]


def initialized(model: Model) -> Model:
    """The model with its init net run: all parameters are arrays, which executors of the result share.

    Without this, every executor runs the init net for itself.
    """
    check_operators(model)
    given = model.parameters
    if not model.has_init_net and all(map(_is_held_as_given, given.values())):
        return model.changed(parameters=dict(given))
    workspace = parameter_workspace(model)
    blobs = [workspace.get_blob(name) for name in workspace.blobs()]
    parameters = {blob.name: blob.get(Tensor).array for blob in blobs if not isinstance(blob.value, SharedBuffer)}
    return model.changed(init_net=None, parameters=parameters)


def _is_held_as_given(array: Array) -> bool:
    """True for an array that a tensor takes as it is. Raises ShapeError for a dtype that tensors do not hold."""
    return from_numpy(array.dtype) is not STRING and array.flags.c_contiguous


def check_operators(model: Model) -> None:
    """Raise UnsupportedOperatorError, for all of them at once, when the nets have operators that dagexec lacks."""
    check_known([(net.name, net.op) for net in (model.init_program, model.program)], f"model {model.name!r}")


def parameter_workspace(model: Model) -> Workspace:
    """The parameters, and the results of the init net; with a shared buffer if that net uses one.

    All of it is on the host, wherever the init net runs: the net says which device reads what.
    """
    workspace = Workspace(root_folder=model.folder, allow_io=model.allow_io)
    for name, array in model.parameters.items():
        workspace.adopt_blob(name, array)
    if model.has_init_net:
        init = model.init_program
        if uses_shared_buffer(init):
            create_shared_buffer(workspace)
        workspace.run_net_once(init)
    for name in workspace.blobs():
        value = workspace.get_blob(name).value
        if isinstance(value, Tensor) and value.device != CPU and not value.is_empty:
            workspace.feed_blob(name, value.fetch(), device=CPU)
    return workspace


def uses_shared_buffer(net: NetDef | Program) -> bool:
    """True when an operator of `net` works in the buffer that operators share, or all must."""
    return shared_buffer_forced() or any(one.values.get("shared_buffer") for one in program_of(net).op)


_MOST_INDICES = 1 << 17
"""Of a byte each: there are no more of them in weights that are small."""


def _is_weight(tensor: Tensor) -> bool:
    """True for a large constant of floats, or of so many numbers of a byte, which kernels may read packed."""
    kind = tensor.meta.numpy
    is_packable = kind.kind not in "iubO" or (kind.itemsize == 1 and tensor.nbytes > _MOST_INDICES)
    return is_packable and tensor.constant is not None and tensor.nbytes >= MIN_BYTES


class Parameters(Mapping[str, Array]):
    """The parameters of a model as a workspace has them; one that is there packed is made anew when it is asked for."""

    def __init__(self, workspace: Workspace, names: Iterable[str]) -> None:
        """Of those called `names`, each of which holds a tensor."""
        self._workspace = workspace
        self._names = dict.fromkeys(names)

    def held(self) -> dict[str, Array]:
        """Those that are in memory as they are."""
        tensors = {name: self._workspace.get_blob(name).get(Tensor) for name in self._names}
        arrays = {name: tensor.current_array() for name, tensor in tensors.items()}
        return {name: array for name, array in arrays.items() if array is not None}

    def outlines(self) -> dict[str, Array]:
        """All of them; those that may be in memory in another form, now or later, only have shapes, types and zeros.

        Whoever keeps them keeps no weights in memory. Indices, and small arrays that shapes may follow from, are whole.
        """
        outlines: dict[str, Array] = {}
        for name in self._names:
            tensor = self._workspace.get_blob(name).get(Tensor)
            array = None if _is_weight(tensor) else tensor.current_array()
            outlines[name] = np.broadcast_to(np.zeros((), tensor.meta.numpy), tensor.shape) if array is None else array
        return outlines

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._workspace.get_blob(name).get(Tensor).array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
