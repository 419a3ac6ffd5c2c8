"""What an operator knows when it is prepared: tables in device memory, outputs that are constant, zeros."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.current import current
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator


def uploaded(operator: CudaOperator, table: npt.ArrayLike) -> Array:
    """A table of the host in device memory of this prepared step."""
    host = np.ascontiguousarray(table)
    device = operator.scratch(host.shape, host.dtype)
    if host.size:
        operator.runtime.copy_now(device, host)
    return device


def constant_step(operator: CudaOperator, target: Array, value: npt.ArrayLike) -> Step:
    """A step that writes a value known now to `target`."""
    host = np.asarray(value, target.dtype).reshape(target.shape)
    return copy_step(target, uploaded(operator, host)) if host.size else nothing_to_do


def zero_step(target: Array) -> Step:
    """A step that fills packed memory with zero bits."""
    if not target.nbytes:
        return nothing_to_do
    runtime = cupy().cuda.runtime
    place, nbytes, kept = address(target), int(target.nbytes), target

    def zero() -> None:
        runtime.memsetAsync(place, 0, nbytes, current.stream_pointer)

    zero.__dict__["arrays"] = (kept,)
    return zero
