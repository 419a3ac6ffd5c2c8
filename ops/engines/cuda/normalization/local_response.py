"""LRN on CUDA, and its gradient: a thread an element, which reads the channels around it."""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.base.layout import channel_axis
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, by_groups
from dagexec.ops.families.normalization.local_response import LRN, window_size
from dagexec.ops.families.normalization.local_response_gradient import LRNGradient

_WINDOW = r"""
template <class T> __device__ inline typename computed<T>::type window(
    const T* p, i64 at, i64 r, i64 length, i64 half, i64 stride, bool squares) {
    typedef typename computed<T>::type A;
    const i64 first = r < half ? -r : -half, last = length - 1 - r < half ? length - 1 - r : half;
    A sum = A(0);
    for (i64 d = first; d <= last; ++d) {
        const A x = get(p, at + d * stride);
        sum += squares ? x * x : x;
    }
    return sum;
}
"""
"""`window(...)`: the sum over the channels at most `half` away from channel `r`, of elements or of their squares."""


class _CudaWindows(CudaOperator):
    """What both share."""

    def view(self) -> tuple[int, int, int]:
        """X as outer x channels x inner."""
        shape, axis = self.x(0).shape, channel_axis(self.call())
        return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])

    def numbers(self) -> dict[str, np.generic]:
        """The scalars of the kernels."""
        x, size = self.x(0), window_size(self.call())
        alpha, beta = self.arguments.float("alpha", 0.0), self.arguments.float("beta", 0.0)
        return {
            "half": np.int64(size // 2),
            "stride": np.int64(self.view()[2]),
            "share": computed_scalar(x, alpha / size),
            "bias": computed_scalar(x, self.arguments.float("bias", 1.0)),
            "beta": computed_scalar(x, beta),
            "slope": computed_scalar(x, -2 * alpha * beta / size),
        }

    def over_power(self, value: str) -> str:
        """`value` * scale^(-beta) as C++."""
        if self.arguments.float("beta", 0.0) == 0.75:
            return f"{value} / (sqrt(scale) * sqrt(sqrt(scale)))"
        return f"{value} * pow(scale, -beta)"

    @property
    def form(self) -> str:
        """Which of two forms the power has, as a part of a kernel's name."""
        return "quarters" if self.arguments.float("beta", 0.0) == 0.75 else "power"


_SCALE = "scale = window(x_p, x_at, r, w.length, half, stride, true) * share + bias;"


@on_cuda(LRN)
class _CudaLRN(_CudaWindows):
    """Local response normalization across channels."""

    def prepare(self) -> Step:
        view = self.view()
        outputs = {"y": self.y(0).reshape(view)}
        each = f"const A {_SCALE} y = {self.over_power('x')};"
        if len(self.output_blobs) > 1:
            outputs["kept"] = self.y(1).reshape(view)
            each += " kept = scale;"
        groups, inputs = Groups(each=each, helpers=_WINDOW), {"x": self.x(0).reshape(view)}
        return by_groups(self, f"lrn_{self.form}", view, (1,), groups, inputs, outputs, self.numbers())


@on_cuda(LRNGradient)
class _CudaLRNGradient(_CudaWindows):
    """The gradient of local response normalization."""

    def prepare(self) -> Step:
        """Scales and quotients of all elements, then the sums of these around each."""
        view = self.view()
        inputs = {name: self.x(index).reshape(view) for index, name in enumerate(("x", "y", "dy"))}
        memory = {name: self.scratch(view, compute_dtype(self.x(0).dtype)) for name in ("scale", "ratio")}
        first = Groups(each=f"{_SCALE} ratio = dy * y / scale;", helpers=_WINDOW)
        around = "window(ratio_p, ratio_at, r, w.length, half, stride, false)"
        second = Groups(each=f"dx = {self.over_power('dy')} + {around} * x * slope;", helpers=_WINDOW)
        given = {"x": inputs["x"], "dy": inputs["dy"], **memory}
        dx, numbers = {"dx": self.y(0).reshape(view)}, self.numbers()
        return in_sequence(
            [
                by_groups(self, "lrn_ratios", view, (1,), first, inputs, memory, numbers),
                by_groups(self, f"lrn_gradient_{self.form}", view, (1,), second, given, dx, numbers),
            ]
        )
