"""NCCLAllreduce on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.registry import operator
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.nccl import communicators
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.communication.device_sum import DEVICE_SUM, DeviceSum


@operator(DEVICE_SUM, device="cuda")
class CudaDeviceSum(DeviceSum, CudaOperator):
    """One call of NCCL for all devices, launched by one thread."""

    def prepare(self) -> Step:
        """Raises DeviceError when NCCL cannot connect the devices. Of one device it is a copy, or nothing."""
        count = len(self.input_blobs)
        pairs = [(self.x(index), self.y(index)) for index in range(count)]
        if not pairs[0][0].size:
            return nothing_to_do
        if count == 1:
            x, y = pairs[0]
            return nothing_to_do if x is y else copy_step(y, x)
        group = communicators([self.input(index).device for index in range(count)])
        return lambda: group.all_reduce(pairs, current.stream)
