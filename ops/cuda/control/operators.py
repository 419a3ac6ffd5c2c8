"""Operators that compute nothing, on CUDA."""

from __future__ import annotations

from dagexec.ops.control.operators import NoOp
from dagexec.ops.cuda.base.kinds import on_cuda
from dagexec.ops.cuda.base.operator import CudaOperator
from dagexec.ops.shape.alias import Free, ZeroGradient


@on_cuda(NoOp, Free, ZeroGradient)
class CudaNoOp(CudaOperator):
    """Computes nothing."""
