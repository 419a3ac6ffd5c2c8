"""Matrix products of convolutions, in the work dtype: the BLAS, or float16 arithmetic rounded at every operation."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.families.conv.problem import Array


def product(a: Array, b: Array, out: Array) -> Step:
    """The step that computes out = a b, for stacks of matrices; a stack of one becomes a single call of the BLAS.

    float16 (`float16_compute`) multiplies and adds column by column, in order, with every result rounded to float16:
    NumPy's own product of float16 sums in float32. It shows what such arithmetic gives, and is not fast.
    """
    while out.ndim > 2 and out.shape[0] == 1:
        a, b, out = (array[0] if array.ndim == out.ndim else array for array in (a, b, out))
    if out.dtype != np.float16:
        return partial(np.matmul, a, b, out=out)

    def round_every_result() -> None:
        out.fill(0)
        for k in range(a.shape[-1]):
            np.add(out, a[..., :, k, None] * b[..., None, k, :], out=out)

    return round_every_result
