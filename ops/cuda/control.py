"""Operators that compute nothing, on CUDA."""

from __future__ import annotations

from dagexec.ops.alias import Free, ZeroGradient
from dagexec.ops.control import NoOp
from dagexec.ops.cuda.kinds import on_cuda
from dagexec.ops.cuda.operator import CudaOperator


@on_cuda(NoOp, Free, ZeroGradient)
class CudaNoOp(CudaOperator):
    """Computes nothing."""
