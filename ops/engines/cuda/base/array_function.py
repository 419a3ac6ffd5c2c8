"""Operators that work on arrays of the host, on CUDA: the arrays come to the host, and the results go back."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import CudaOperator


@on_cuda(*registered_kinds(ArrayOperator))
class _CudaArrayOperator(CudaOperator):
    """What the host's class computes."""

    waits_for_device = True

    def prepare(self) -> Step:
        """Copies to the host, the function, and copies back."""
        assert isinstance(self, ArrayOperator)
        inputs = [self.x(index) for index in range(len(self.input_blobs))]
        outputs = [self.y(index) for index in range(len(self.output_blobs))]
        read = [np.empty(array.shape, array.dtype) for array in inputs]
        made = [np.empty(array.shape, array.dtype) for array in outputs]
        compute = self.computing(read, made)

        def step() -> None:
            for host, device in zip(read, inputs, strict=True):
                self.fetch_now(host, device)
            compute()
            for device, host in zip(outputs, made, strict=True):
                self.fetch_now(device, host)

        return step
