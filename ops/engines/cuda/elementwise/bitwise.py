"""Bitwise logic and remainders on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.expressed import register
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.elementwise.arithmetic import BinaryExpression
from dagexec.ops.families.elementwise import bitwise as host

for _op_type, _sign in {"BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^"}.items():
    register(_op_type, BinaryExpression, code=f"c = a {_sign} b;")


_REMAINDERS = r"""
__device__ inline float left_over(float a, float b) { return fmodf(a, b); }
__device__ inline double left_over(double a, double b) { return fmod(a, b); }
template <class I> __device__ inline I left_over(I a, I b) { return b == I(0) || b == I(-1) ? I(0) : I(a % b); }
"""
"""The remainder with the sign of a; -1 divides all integers, and the quotient may not be one."""


@on_cuda(host.Mod)
class _CudaMod(CudaOperator):
    """Remainder."""

    def prepare(self) -> Step:
        inputs, scalars = {"x": self.x(0)}, {}
        if len(self.input_blobs) == 2:
            inputs["divisor"] = self.x(1)
        else:
            scalars["divisor"] = computed_scalar(self.x(0), self.arguments.int("divisor", 0))
        code = "A left = left_over((A)x, (A)divisor);"
        follow = self.arguments.bool("sign_follow_divisor")
        if follow:
            code += " if (left != A(0) && (left < A(0)) != (divisor < A(0))) left = left + divisor;"
        name = "mod_of_divisor" if follow else "mod"
        return elementwise(self, name, inputs, {"y": self.y(0)}, f"{code} y = left;", scalars, _REMAINDERS)
