"""Copies of a CUDA device: within it, from and to the host, from and to other CUDA devices; packed or strided.

`issue` puts a copy on a stream. What the host has in memory that may move goes through pinned blocks: towards the
device it is read as the copy is issued, towards the host it is written by whoever finds that the stream was there.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.device import Device
from dagexec.core.runtime import check_copy, runtime_of
from dagexec.core.stream import Kernel
from dagexec.devices.cuda.arrays import address, is_on_device
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.errors import PEER_ACCESS_ALREADY_ENABLED, device_error, status_of
from dagexec.devices.cuda.in_flight import staged_downloads
from dagexec.devices.cuda.kernels import Launch, compiled
from dagexec.devices.cuda.staging import CHUNK, is_pinned
from dagexec.devices.cuda.stream import CudaStream
from dagexec.devices.cuda.streams import CudaStreams
from dagexec.errors import DeviceError, ShapeError
from dagexec.platform.locks import new_lock

Array = npt.NDArray[Any]

MAX_AXES = 8
_UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}

STRIDED = r"""
struct layout_t { i64 shape[8], to[8], of[8]; };
extern "C" __global__ void copy_strided(unit_t* to, const unit_t* of, layout_t layout, int axes, i64 n) {
    FOR_EACH(i, n) {
        i64 rest = i, target = 0, source = 0;
        for (int axis = axes - 1; axis >= 0; --axis) {
            i64 next = rest / layout.shape[axis], index = rest - next * layout.shape[axis];
            target += index * layout.to[axis];
            source += index * layout.of[axis];
            rest = next;
        }
        to[target] = of[source];
    }
}
"""
"""Strides count elements. Axes are as few as the two layouts allow."""

_peers: set[tuple[int, int]] = set()
_peers_lock = new_lock()


def place_of(array: Array) -> Device:
    """The device that an array is on."""
    return Device("cuda", int(cast(Any, array).data.device_id)) if is_on_device(array) else Device()


def copy_kernel(runtime: CudaStreams, destination: Array, source: Array) -> Kernel:
    """What copies `source` to `destination`. Raises ShapeError when shapes or dtypes differ."""
    check_copy(destination, source)
    label = f"copy from {place_of(source)} to {place_of(destination)}"
    return Kernel(partial(issue, runtime, destination, source), label, copied_bytes=source.nbytes)


def issue(runtime: CudaStreams, destination: Array, source: Array) -> None:
    """Put a copy on the stream that the calling thread launches to at present. Shapes and dtypes are equal.

    Raises DeviceError for one that needs the host, on a stream that is captured.
    """
    stream = cast(CudaStream, current.stream)
    if not source.nbytes:
        return
    to_device, of_device = is_on_device(destination), is_on_device(source)
    if to_device and of_device:
        _on_devices(runtime, destination, source, stream)
    elif to_device:
        _from_host(runtime, destination, source, stream)
    elif of_device:
        _to_host(runtime, destination, source, stream)
    else:
        stream.check_not_captured("used to copy within the host")
        stream.native.synchronize()
        staged_downloads.land()
        np.copyto(destination, source)


def broadcast_to(array: Array, shape: tuple[int, ...]) -> Array:
    """The elements in a larger shape, without a copy, by NumPy's rules."""
    if not is_on_device(array):
        return np.broadcast_to(array, shape)
    lead = len(shape) - array.ndim
    if lead < 0 or any(n not in (1, m) for n, m in zip(array.shape, shape[lead:], strict=True)):
        raise ShapeError(f"a copy of an array of shape {array.shape} to one of shape {shape}: expected the same")
    strides = [0] * lead + [0 if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
    return cast(Array, cupy().ndarray(shape, array.dtype, memptr=cast(Any, array).data, strides=tuple(strides)))


def _is_packed(array: Array) -> bool:
    return bool(array.flags.c_contiguous)


def _memcpy(runtime: CudaStreams, to: int, of: int, nbytes: int, stream: CudaStream) -> None:
    runtime.api.memcpyAsync(to, of, nbytes, runtime.api.memcpyDefault, stream.pointer)


def _on_devices(runtime: CudaStreams, destination: Array, source: Array, stream: CudaStream) -> None:
    target, origin, here = place_of(destination).index, place_of(source).index, stream.device.index
    if target == origin:
        if _is_packed(destination) and _is_packed(source):
            _memcpy(runtime, address(destination), address(source), source.nbytes, stream)
        else:
            _beside(strided(destination, source), runtime_at(target), stream, here == target)
        return
    enable_peers(runtime, target, origin)
    if not _is_packed(source):
        source = _gathered(source, stream, here == origin)
    landing = destination if _is_packed(destination) else _packed_like(runtime_at(target), destination)
    runtime.api.memcpyPeerAsync(address(landing), target, address(source), origin, source.nbytes, stream.pointer)
    if landing is not destination:
        _beside(strided(destination, landing), runtime_at(target), stream, here == target)


def _gathered(source: Array, stream: CudaStream, is_here: bool) -> Array:
    """A packed copy of `source` on its device, made before what follows on `stream`."""
    owner = runtime_at(place_of(source).index)
    packed = _packed_like(owner, source)
    _beside(strided(packed, source), owner, stream, is_here)
    return packed


def _beside(step: Any, runtime: CudaStreams, stream: CudaStream, is_here: bool) -> None:
    """Call `step`, which launches on the device of `runtime`, between what is before and after it on `stream`."""
    if is_here:
        step()
        return
    other = runtime.lease()
    try:
        other.wait_for(stream.mark())
        other.launch(Kernel(step, "a strided copy"))
        stream.wait_for(other.mark())
        if other.failure is not None:
            raise other.failure.error
    finally:
        runtime.give_back_later(other)


def _packed_like(runtime: CudaStreams, array: Array) -> Array:
    return runtime.allocate(array.nbytes).view(array.dtype).reshape(array.shape)


def runtime_at(index: int) -> CudaStreams:
    """The runtime of `cuda:index`."""
    return cast(CudaStreams, runtime_of(Device("cuda", index)))


def _from_host(runtime: CudaStreams, destination: Array, source: Array, stream: CudaStream) -> None:
    if is_pinned(source) and _is_packed(source) and _is_packed(destination):
        _memcpy(runtime, address(destination), address(source), source.nbytes, stream)
        if stream.capture is None:
            runtime.uses(source, stream, writes=False)
        return
    stream.check_not_captured("given a copy from memory of the host that is not pinned")
    runtime.finish_in_flight(source)
    landing = destination if _is_packed(destination) else _packed_like(runtime, destination)
    flat, start = _bytes_of(source), address(landing)
    for offset in range(0, flat.nbytes, CHUNK):
        piece = flat[offset : offset + CHUNK]
        block = runtime.staging.take(piece.nbytes)
        np.copyto(block.array[: piece.nbytes], piece)
        _memcpy(runtime, start + offset, block.pointer, piece.nbytes, stream)
        runtime.staging.give_after(block, stream.mark())
    if landing is not destination:
        strided(destination, landing)()


def _bytes_of(array: Array) -> Array:
    """The elements in the order of their indices, as bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _to_host(runtime: CudaStreams, destination: Array, source: Array, stream: CudaStream) -> None:
    if not _is_packed(source):
        packed = _packed_like(runtime, source)
        strided(packed, source)()
        source = packed
    if is_pinned(destination) and _is_packed(destination):
        _memcpy(runtime, address(destination), address(source), source.nbytes, stream)
        if stream.capture is None:
            runtime.uses(destination, stream, writes=True)
        return
    stream.check_not_captured("given a copy to memory of the host that is not pinned")
    if not destination.flags.writeable:
        raise DeviceError(f"a copy from {runtime.device} to an array of the host that is read-only")
    block = runtime.staging.take(source.nbytes)
    _memcpy(runtime, block.pointer, address(source), source.nbytes, stream)
    staged_downloads.expect(runtime.staging, runtime.uses(destination, stream, writes=True), block, destination)


def fetch(runtime: CudaStreams, destination: Array, source: Array, stream: CudaStream) -> None:
    """Copy from the device to the host after what is on `stream`, and return when it is done.

    The host empties one staging block while the device fills the next. Raises what the stream failed with.
    """
    packed: list[Array] = []

    def pack() -> None:
        found = source
        if not _is_packed(found):
            found = _packed_like(runtime, source)
            strided(found, source)()
        packed.append(found)

    label = f"copy from {runtime.device} to cpu"
    stream.launch(Kernel(pack, label))
    direct = is_pinned(destination) and _is_packed(destination)
    into = _bytes_of(destination) if _is_packed(destination) else np.empty(source.nbytes, np.uint8)
    waiting: deque[Any] = deque()
    step = source.nbytes if direct else CHUNK
    try:
        for offset in range(0, source.nbytes, step):
            size = min(step, source.nbytes - offset)
            block = None if direct else runtime.staging.take(size)
            to = address(destination) if block is None else block.pointer

            def copy(to: int = to, offset: int = offset, size: int = size) -> None:
                _memcpy(runtime, to, address(packed[0]) + offset, size, stream)

            stream.launch(Kernel(copy, label, copied_bytes=size))
            event = runtime.event(label)
            event.record(stream)
            waiting.append((event, block, offset, size))
            if len(waiting) > 1:
                _empty(runtime, into, *waiting.popleft())
        while waiting:
            _empty(runtime, into, *waiting.popleft())
    finally:
        for event, block, _offset, _size in waiting:
            if block is not None:
                runtime.staging.give_after(block, event.native)
    if not _is_packed(destination):
        np.copyto(destination, into.view(source.dtype).reshape(source.shape))


def _empty(runtime: CudaStreams, into: Array, event: Any, block: Any, offset: int, size: int) -> None:
    if block is None:
        event.finish()
        return
    try:
        event.finish()
        np.copyto(into[offset : offset + size], block.array[:size])
    finally:  # when the stream has failed, the device may yet be at it
        runtime.staging.give_after(block, event.native)


def strided(destination: Array, source: Array) -> Launch:
    """A step that copies between arrays of one device, or of peers, of any strides. To be made on that device."""
    size = destination.itemsize
    unit = next(n for n in (8, 4, 2, 1) if size % n == 0)
    shape, to, of = list(source.shape), list(destination.strides), list(source.strides)
    if size != unit:  # such as complex128: its parts as one more axis
        shape, to, of = [*shape, size // unit], [*to, unit], [*of, unit]
    axes = _merged(shape, to, of)
    if len(axes) > MAX_AXES:
        raise DeviceError(f"a strided copy of {len(axes)} axes, shape {source.shape}: expected {MAX_AXES} at most")
    layout = np.ones((3, MAX_AXES), np.int64)
    for place, (n, target, origin) in enumerate(axes):
        layout[:, place] = n, target // unit, origin // unit
    count = int(np.prod(shape, dtype=np.int64))
    index = place_of(destination).index
    function = compiled("copy_strided", STRIDED, index, unit_t=_UNITS[unit])
    arguments = (destination, source, layout, np.int32(len(axes)), np.int64(count))
    return Launch(function, arguments, elements=count, device=index)


def _merged(shape: list[int], to: list[int], of: list[int]) -> list[tuple[int, int, int]]:
    """Size and the two strides of each axis, where axes that one step runs through in both layouts are one."""
    axes: list[tuple[int, int, int]] = []
    for n, target, origin in zip(shape, to, of, strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == target * n and axes[-1][2] == origin * n:
            axes[-1] = (axes[-1][0] * n, target, origin)
        else:
            axes.append((n, target, origin))
    return axes


def enable_peers(runtime: CudaStreams, one: int, other: int) -> bool:
    """Let two devices read and write each other's memory, once; False where they cannot, and CUDA goes by the host."""
    api = runtime.api
    with _peers_lock:
        if (one, other) in _peers:
            return True
        if not (api.deviceCanAccessPeer(one, other) and api.deviceCanAccessPeer(other, one)):
            return False
        for device, peer in ((one, other), (other, one)):
            with runtime_at(device).guard():
                try:
                    api.deviceEnablePeerAccess(peer)
                except Exception as error:
                    if status_of(error) != PEER_ACCESS_ALREADY_ENABLED:
                        raise device_error(Device("cuda", device), error, f"access to cuda:{peer}") from error
            _peers.add((device, peer))
        return True


def forget_peers() -> None:
    """Enable them anew: other devices are there."""
    with _peers_lock:
        _peers.clear()
