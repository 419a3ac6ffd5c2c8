"""Print and Summarize on CUDA: they wait for the device and tell of a copy on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.control.watching import Print, Summarize, Watcher


@on_cuda(Print, Summarize)
class _CudaWatcher(CudaOperator):
    """What the host's class tells."""

    waits_for_device = True

    def prepare(self) -> Step:
        """A copy to the host, and the line of that."""
        assert isinstance(self, Watcher)
        self.warn_of_file()
        x = self.x(0)
        on_host = np.empty(x.shape, x.dtype)
        tell = self.telling(on_host)

        def step() -> None:
            self.fetch_now(on_host, x)
            tell()

        return step

    def deliver(self, summary: Array | None, found: npt.NDArray[np.float64]) -> None:
        """Copy the numbers to the device."""
        if summary is not None:
            self.fetch_now(summary, found.astype(summary.dtype))
