"""NanCheck on CUDA. It waits for the device: what stands behind it must not run on a NaN."""

from __future__ import annotations

import numpy as np

from dagexec.core import dtypes
from dagexec.core.operator import Step, in_sequence
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.control.nan_check import NanCheck, check_finite


@on_cuda(NanCheck)
class CudaNanCheck(CudaOperator):
    """The check of one tensor."""

    waits_for_device = True

    def prepare(self) -> Step:
        """Count what is not finite; a tensor that has some is fetched, for the host's message."""
        x, y = self.x(0), self.y(0)
        name = self.input_blobs[0].name
        producer = self.arguments.string("producer", "") or f"the run, or what fed blob {name!r}"
        steps: list[Step] = []
        if dtypes.from_numpy(x.dtype).is_float and x.size:
            bad, found = self.scratch((1,), np.int64), np.zeros(1, np.int64)
            code = "value = x - x == A(0) ? 0 : 1;"
            count = reduced(self, "not_finite", (x.size,), {"x": x.reshape(-1)}, bad, code)

            def check() -> None:
                count()
                self.fetch_now(found, bad)
                if found[0]:
                    host = np.empty(x.shape, x.dtype)
                    self.fetch_now(host, x)
                    check_finite(host, np.empty(x.shape, np.bool_), name, producer, self.label)

            steps.append(check)
        if address(x) != address(y):
            steps.append(copy_step(y, x))
        return in_sequence(steps)
