"""Handles of cuDNN: one for each library state, one for each thread that uses cuDNN on its own streams.

A handle must not be used by two threads at once, and works on the stream that it was set to last. Who enters it uses
it; a second thread that enters meanwhile is told so, with both names, before cuDNN does something undefined.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from typing import Any

from dagexec.devices.cuda.binding import INSTALL, cudnn
from dagexec.devices.cuda.device import CudaDevice
from dagexec.errors import DeviceError, UnsupportedFeatureError
from dagexec.platform.locks import new_lock

OLDEST_CUDNN = 90000
"""The oldest cuDNN whose graphs serve: 9.0.0."""

_open: weakref.WeakSet[CudnnHandle] = weakref.WeakSet()


class CudnnHandle:
    """A handle of cuDNN on one device.

    Attributes:
        name: whose it is, in messages: "library state 0 of cuda:0".
        native: the `cudnn.Handle`; None once it is closed.
    """

    def __init__(self, runtime: CudaDevice, name: str) -> None:
        """Raises DeviceError, with the command that mends it, where there is no cuDNN that serves."""
        require_library()
        self.name = name
        self._runtime = runtime
        self._lock = new_lock()
        self._user: threading.Thread | None = None
        self._depth = 0
        try:
            with runtime.guard():
                self.native: Any = cudnn().create_handle()
        except Exception as error:
            raise DeviceError(f"{name}: cuDNN cannot create a handle: {error}") from error
        _open.add(self)

    def __enter__(self) -> CudnnHandle:
        """Begin to use the handle on this thread, which may do so again within. Raises DeviceError while another does.

        The handle must be open.
        """
        me = threading.current_thread()
        with self._lock:
            if self._user is not None and self._user is not me:
                raise DeviceError(
                    f"the cuDNN handle of {self.name} is used by thread {me.name} while thread {self._user.name} is "
                    f"using it"
                )
            if self.native is None:
                raise DeviceError(f"the cuDNN handle of {self.name} is closed")
            self._user = me
            self._depth += 1
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._user = None

    def work_on(self, stream_pointer: int) -> None:
        """What is executed with the handle from now on goes to that stream. The handle must have been entered."""
        cudnn().set_stream(handle=self.native, stream=stream_pointer)

    def close(self) -> None:
        """Destroy the handle. Nothing executed with it may be under way on the host. Idempotent."""
        with self._lock:
            native, self.native = self.native, None
        if native is not None:
            _open.discard(self)
            with self._runtime.guard():
                cudnn().destroy_handle(native)


class ThreadHandles:
    """The handles of the threads that use cuDNN on the streams of their own operators, one each.

    The handle of a thread that has ended goes to the next thread that needs one, so there are never more than threads
    have been alive at once.
    """

    def __init__(self, runtime: CudaDevice) -> None:
        self._runtime = runtime
        self._own = threading.local()
        self._lock = new_lock()
        self._owned: list[tuple[threading.Thread, CudnnHandle]] = []

    def get(self) -> CudnnHandle:
        """The calling thread's. Raises DeviceError where there is no cuDNN that serves."""
        found: CudnnHandle | None = getattr(self._own, "handle", None)
        if found is None or found.native is None:
            found = self._own.handle = self._take()
        return found

    def before_capture(self, _streams: object) -> None:
        """Make the calling thread's: within the capture that follows it cannot be made."""
        self.get()

    def __len__(self) -> int:
        """How many there are."""
        with self._lock:
            return len(self._owned)

    def _take(self) -> CudnnHandle:
        me = threading.current_thread()
        with self._lock:
            for number, (owner, handle) in enumerate(self._owned):
                if (owner is me or not owner.is_alive()) and handle.native is not None:
                    self._owned[number] = (me, handle)
                    return handle
            handle = CudnnHandle(self._runtime, f"inline cuDNN {len(self._owned)} of {self._runtime.device}")
            self._owned.append((me, handle))
            return handle


def thread_handles(runtime: CudaDevice) -> ThreadHandles:
    """Those of a device, made at their first use."""
    return runtime.once("cuDNN handles of threads", lambda: ThreadHandles(runtime))


def require_library() -> int:
    """The version of cuDNN, as its own number (9.28.0 is 92800).

    Raises DeviceError, with the command that mends it, when cuDNN or its front end is missing or too old.
    """
    module = cudnn()
    try:
        version = int(module.backend_version())
    except Exception as error:
        raise DeviceError(f"cuDNN cannot be loaded ({error}); {INSTALL}") from error
    if version < OLDEST_CUDNN:
        raise DeviceError(f"cuDNN {version} is too old, {OLDEST_CUDNN} (9.0.0) or newer is needed; {INSTALL}")
    return version


def require_cudnn(label: str) -> int:
    """As `require_library`, for the operator `label`. Raises UnsupportedFeatureError: another engine may serve."""
    try:
        return require_library()
    except DeviceError as error:
        raise UnsupportedFeatureError(f"{label}: {error}") from error


def close_handles() -> None:
    """Destroy every handle. For the end of the process, when CUDA itself may be gone already."""
    for handle in list(_open):
        with contextlib.suppress(Exception):
            handle.close()


atexit.register(close_handles)
