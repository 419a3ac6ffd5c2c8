"""Conversions of element types on CUDA, as NumPy converts on x86-64.

A float beyond an integer's range, and NaN, become the least int32 or int64, of which smaller integers keep the low
bits, uint32 those of int64; to uint64, those from 2**63 on are converted less that. CUDA's own conversion would
saturate. float64 is rounded to float16 once, not by way of float32.
"""

from __future__ import annotations

from dagexec.core import dtypes
from dagexec.core.dtypes import BOOL, FLOAT16, FLOAT64, INT64, UINT32, UINT64
from dagexec.core.operator import Step, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.elementwise.cast import Cast, CastLike, FloatToHalf, HalfToFloat

CONVERSIONS = r"""
__device__ inline int to_int(double x) { return x > -2147483649.0 && x < 2147483648.0 ? (int)x : (int)0x80000000u; }
__device__ inline i64 to_long(double x) {
    return x >= -9223372036854775808.0 && x < 9223372036854775808.0 ? (i64)x : (i64)0x8000000000000000ull;
}
__device__ inline u64 to_ulong(double x) {
    const double high = 9223372036854775808.0;
    return x >= high ? (u64)to_long(x - high) ^ 0x8000000000000000ull : (u64)to_long(x);
}
__device__ inline float to_odd(double x) {
    float f = (float)x;
    if (is_nan(x) || (double)f == x) return f;
    u32 b = bits_of(f);
    if (fabs((double)f) > fabs(x)) b -= 1u;
    return float_of(b | 1u);
}
"""
"""`to_odd` rounds to float so that rounding the result to half rounds x: Boldo and Melquiond, "When double rounding is
odd", 2005."""


@on_cuda(Cast, CastLike, FloatToHalf, HalfToFloat)
class CudaConversion(CudaOperator):
    """The input's elements in the output's type."""

    def prepare(self) -> Step:
        """One kernel; a copy when the type stays."""
        x, y = self.x(0), self.y(0)
        if x.dtype == y.dtype:
            return nothing_to_do if address(x) == address(y) else copy_step(y, x)
        source, target = dtypes.from_numpy(x.dtype), dtypes.from_numpy(y.dtype)
        value = "x"
        if target is BOOL:
            value = "x != (decltype(x + 0))0"
        elif source.is_float and target.is_integer:
            by = {UINT64: "to_ulong", INT64: "to_long", UINT32: "to_long"}.get(target, "to_int")
            value = f"{by}((double)x)"
        elif source is FLOAT64 and target is FLOAT16:
            value = "to_odd(x)"
        code = f"y = (decltype(y))({value});"
        return elementwise(self, "cast", {"x": x}, {"y": y}, code, helpers=CONVERSIONS)
