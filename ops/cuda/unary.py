"""Unary arithmetic on CUDA: a table of expressions."""

from __future__ import annotations

from dagexec.ops import unary as host
from dagexec.ops.cuda.pointwise import register_pointwise
from dagexec.ops.pointwise import Pointwise

EXPRESSIONS: dict[type[Pointwise], str] = {
    host.Exp: "exp(x)",
    host.Log: "log(x)",
    host.Sqrt: "sqrt(x)",
    host.Cbrt: "cbrt(x)",
    host.Sqr: "times(x, x)",
    host.Negative: "negated(x)",
    host.Abs: "magnitude(x)",
    host.Sign: "sign_of(x)",
    host.Floor: "floor(x)",
    host.Ceil: "ceil(x)",
    host.Round: "rint(x)",
    host.Sin: "sin(x)",
    host.Cos: "cos(x)",
    host.Tan: "tan(x)",
    host.Asin: "asin(x)",
    host.Acos: "acos(x)",
    host.Atan: "atan(x)",
    host.Sinh: "sinh(x)",
    host.Cosh: "cosh(x)",
    host.Not: "!x",
    host.Scale: "scale * x",
    host.Reciprocal: "A(1) / x",
    host.Rsqrt: "A(1) / sqrt(x)",
    host.Cube: "times(times(x, x), x)",
    host.Erf: "erf(x)",
}

for _cpu, _code in EXPRESSIONS.items():
    register_pointwise(_cpu, _code)
