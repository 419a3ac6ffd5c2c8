"""Assert and EnforceFinite on CUDA: they wait for the device and look at a copy on the host."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.control.enforce import Assert, EnforceFinite, ValueCheck


@on_cuda(Assert, EnforceFinite)
class _CudaValueCheck(CudaOperator):
    """The host's check."""

    waits_for_device = True

    def prepare(self) -> Step:
        """A copy to the host, and the check of that."""
        assert isinstance(self, ValueCheck)
        x = self.x(0)
        on_host = np.empty(x.shape, x.dtype)
        check = self.check_of(on_host)

        def step() -> None:
            self.fetch_now(on_host, x)
            check()

        return step
