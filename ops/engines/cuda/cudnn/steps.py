"""Steps that execute a plan of cuDNN: on the stream of a library state, or on the operator's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy.typing as npt

from dagexec.core.exclusive import LibraryState
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.cudnn_handle import CudnnHandle, ThreadHandles
from dagexec.devices.cuda.cudnn_plans import CudnnPlan
from dagexec.devices.cuda.current import current

Array = npt.NDArray[Any]

WORKSPACE_ALIGNMENT = 256
"""Bytes: where a workspace of cuDNN begins, as a block of its own from CUDA does."""


class InlineStep:
    """Executes a plan on the calling thread's current stream, with that thread's handle and a workspace of its own."""

    __slots__ = ("_addresses", "_handles", "_kept", "_workspace", "plan")

    def __init__(
        self, plan: CudnnPlan, arrays: Mapping[int, Array], workspace: Array | None, handles: ThreadHandles
    ) -> None:
        self.plan = plan
        self._addresses = {number: address(array) for number, array in arrays.items()}
        self._workspace = (
            0 if workspace is None else -(-address(workspace) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        )
        self._handles = handles
        self._kept = (dict(arrays), workspace)

    def __call__(self) -> None:
        """Launch it."""
        with self._handles.get() as handle:
            handle.work_on(current.stream_pointer)
            self.plan.execute(self._addresses, self._workspace, handle)


class StateStep:
    """Executes a plan with the handle and the workspace of a library state; it is launched within `state.use`.

    Workspaces that it was launched with are kept: a captured run may be replayed with one that the state has outgrown.
    """

    __slots__ = ("_addresses", "_arrays", "_kept", "_state", "plan")

    def __init__(self, plan: CudnnPlan, arrays: Mapping[int, Array], state: LibraryState) -> None:
        self.plan = plan
        self._arrays = dict(arrays)
        self._addresses = {number: address(array) for number, array in arrays.items()}
        self._state = state
        self._kept: list[Array] = []

    def __call__(self) -> None:
        """Launch it."""
        state = self._state
        workspace = 0
        if self.plan.workspace_nbytes:
            memory = state.workspace(self.plan.workspace_nbytes)
            if not self._kept or self._kept[-1] is not memory:
                self._kept.append(memory)
            workspace = address(memory)
        with cast(CudnnHandle, state.handle) as handle:
            handle.work_on(current.stream_pointer)
            self.plan.execute(self._addresses, workspace, handle)
