"""Copies on CUDA: within a device, between two, and to and from the host."""

from __future__ import annotations

from functools import partial

from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.tensor import Tensor
from dagexec.devices.cuda.arrays import address, is_on_device
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.copies import issue, place_of, runtime_at
from dagexec.devices.cuda.current import current
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.shape.alias import CopyOnDeviceLike
from dagexec.ops.families.shape.reshaping import Copy, CopyCPUToGPU, CopyFromCPUInput, CopyGPUToCPU, EnsureCPUOutput


def copy_step(destination: Array, source: Array) -> Step:
    """A step that copies between packed arrays of one size, each on the host or a device."""
    if not source.nbytes:
        return nothing_to_do
    if not is_on_device(destination) or place_of(destination) != place_of(source):
        device = source if is_on_device(source) else destination
        return partial(issue, runtime_at(place_of(device).index), destination, source)
    runtime = cupy().cuda.runtime
    to, of, nbytes, kind = address(destination), address(source), int(source.nbytes), runtime.memcpyDefault
    kept = (destination, source)

    def copy() -> None:
        runtime.memcpyAsync(to, of, nbytes, kind, current.stream_pointer)

    copy.__dict__["arrays"] = kept
    return copy


class CudaCopy(CudaOperator):
    """A copy, of a blob on this device or another."""

    crosses_devices = True

    def prepare(self) -> Step:
        return copy_step(self.y(0), self.x(0))


class CudaCopyToHost(CudaCopy):
    """A copy to the host."""

    def output(self, index: int) -> Tensor:
        return self.output_blobs[index].tensor()


for _kind in (Copy, CopyCPUToGPU, CopyFromCPUInput, CopyOnDeviceLike):
    operator(_kind.schema, device="cuda")(type(f"Cuda{_kind.__name__}", (CudaCopy,), {"__doc__": _kind.__doc__}))
for _kind in (EnsureCPUOutput, CopyGPUToCPU):
    operator(_kind.schema, device="cuda")(type(f"Cuda{_kind.__name__}", (CudaCopyToHost,), {"__doc__": _kind.__doc__}))
