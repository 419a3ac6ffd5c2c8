"""SharedBuffer: working memory that the operators of a workspace take turns to use, instead of each having its own.

A workspace has one for each device, under a blob name; child workspaces find their parent's. `create_shared_buffer`
makes it, or else the first operator that asks for it. The operators that use it run one at a time. Whoever holds its
lock waits for no other operator, only for the locks of tables under which no operator runs, so it cannot be part of a
deadlock.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.exclusive import StreamMutex, TurnLock
from dagexec.core.runtime import runtime_of
from dagexec.core.workspace import Workspace
from dagexec.errors import DeviceError
from dagexec.platform.host_memory import check_fits
from dagexec.platform.locks import new_lock

Array = npt.NDArray[Any]
Allocate = Callable[[Sequence[int], npt.DTypeLike], Array]
Step = Callable[[], object]
_ALIGNMENT = 64  # bytes: a cache line

_forced = [False]
_making = new_lock()


class SharedBuffer:
    """A block of device memory with a lock, as large as the largest need announced by `reserve`.

    Attributes:
        name: "shared buffer of cpu".
        turns: on a device that works on its own, the mutex under which users are launched; None on the host, where
            `use` blocks.
    """

    def __init__(self, device: Device) -> None:
        self._runtime = runtime_of(device)
        self.name = f"shared buffer of {device}"
        self.turns = None if device == CPU else StreamMutex(self.name, self._runtime)
        self._use = TurnLock(self.name)
        self._announce = new_lock()
        self._needed = 0
        self._memory = self._runtime.allocate(0)
        self._bound: weakref.WeakSet[_SharedStep] = weakref.WeakSet()  # read and changed by whoever holds `_use`

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds at present."""
        return int(self._memory.nbytes)

    @property
    def memory(self) -> Array:
        """The memory that it holds at present: for what has been captured over it, and must not outlive it."""
        return self._memory

    @property
    def in_use(self) -> bool:
        """True while an operator is using it."""
        return self._use.locked()

    def reserve(self, nbytes: int, what: str) -> None:
        """Announce that a coming use needs `nbytes`. Nothing is allocated before that use, and nothing is waited for.

        Raises ResourceError, naming `what`, when the machine cannot hold it.
        """
        check_fits(max(0, nbytes - self._memory.nbytes), what)
        with self._announce:
            self._needed = max(self._needed, nbytes)

    @contextmanager
    def use(self) -> Iterator[Array]:
        """The memory, as bytes for a step to work on, for this thread alone until the block ends. Undefined content.

        When it has to grow, the steps that `keep` was told of let go of the old memory before there is new one; what a
        stream of CUDA still does in the old one goes on, as a device hands no memory out again before all is done that
        was launched before it was freed. On a device nothing is waited for here: raises DeviceError when another kernel
        is using it, launched without `turns`.
        """
        if self.turns is not None and self._use.locked():
            raise DeviceError(f"the {self.name} is used by two kernels at the same time")
        with self._use:
            if self._memory.nbytes < self._needed:
                self._memory = self._runtime.allocate(0)
                self._unbind_all()
                self._memory = self._runtime.allocate(self._needed)
            yield self._runtime.host_view(self._memory)

    def stand_in(self, nbytes: int) -> Array:
        """What stands for `nbytes` of the memory, and is never touched, while a step is made that needs as many."""
        return self._runtime.stand_in(nbytes)

    def keep(self, step: _SharedStep) -> None:
        """Have `step`, which is using the memory, let go of it when it moves."""
        self._bound.add(step)

    def _unbind_all(self) -> None:
        for step in tuple(self._bound):
            step.unbind()
        self._bound.clear()


def shared_step(buffer: SharedBuffer, build: Callable[[Allocate], Step], label: str) -> Step:
    """A step whose working memory is `buffer`, held while it runs; one that needs no memory is not held up by it.

    `build` makes the step over memory from an Allocate. It is called again whenever the buffer has moved, and must not
    touch that memory: the step does. Raises ResourceError, naming `label`, when the machine cannot hold so much.
    """
    counted = _Pieces(None, buffer)
    step = build(counted)
    if not counted.used:
        return step
    buffer.reserve(counted.used, f"{label}: shared working memory")
    return _SharedStep(buffer, build)


class _SharedStep:
    """See `shared_step`."""

    def __init__(self, buffer: SharedBuffer, build: Callable[[Allocate], Step]) -> None:
        self._buffer = buffer
        self._build = build
        self._step: Step | None = None

    def __call__(self) -> None:
        """Run once, alone on the buffer."""
        with self._buffer.use() as memory:
            step = self._step
            if step is None:
                step = self._step = self._build(_Pieces(memory, self._buffer))
                self._buffer.keep(self)
            step()

    def unbind(self) -> None:
        """Hold no memory any more, until the next run."""
        self._step = None


class _Pieces:
    """Aligned arrays one after another in a block of memory; without one, the count of the bytes they would take."""

    def __init__(self, memory: Array | None, buffer: SharedBuffer) -> None:
        self._memory = memory
        self._buffer = buffer
        self.used = 0

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An array of `shape` and `dtype` behind the others."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        start = self.used
        self.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            return self._buffer.stand_in(nbytes).view(dtype).reshape(tuple(shape))
        return self._memory[start : start + nbytes].view(dtype).reshape(tuple(shape))


def shared_buffer_name(device: Device) -> str:
    """The blob that holds the shared buffer of a device; the name is Caffe2's."""
    suffix = device.kind.upper() + (f"_{device.index}" if device.index else "")
    return f"__CAFFE2_SHARED_CONV_BUFFER_{suffix}__"


def create_shared_buffer(workspace: Workspace, device: str | Device = CPU) -> SharedBuffer:
    """Save memory by letting convolutions share one buffer as working memory, at the price of running one by one.

    Creates the buffer of `workspace` for `device`, or returns the existing one; child workspaces use it, too. Operators
    with the argument `shared_buffer=1` take their working memory from it. It is released with the workspace and its
    nets. Raises DeviceError for an unknown device.
    """
    place = Device.parse(device) if isinstance(device, str) else device
    blob = workspace.create_local_blob(shared_buffer_name(place))
    if not isinstance(blob.value, SharedBuffer):
        blob.value = SharedBuffer(place)
    assert isinstance(blob.value, SharedBuffer)
    return blob.value


def find_shared_buffer(workspace: Workspace, device: Device) -> SharedBuffer:
    """The shared buffer that an operator in `workspace` uses; where none was created, its outermost parent gets one."""
    with _making:
        blob = workspace.get_blob_or_none(shared_buffer_name(device))
        if blob is not None and blob.value is not None:
            return blob.get(SharedBuffer)
        while workspace.parent is not None:
            workspace = workspace.parent
        return create_shared_buffer(workspace, device)


def force_shared_buffer(enabled: bool = True) -> None:
    """Make every operator created from now on use the shared buffer if it supports it, whatever its arguments."""
    _forced[0] = enabled


def shared_buffer_forced() -> bool:
    """True after `force_shared_buffer()`."""
    return _forced[0]
