"""Operators that compute nothing, on CUDA."""

from __future__ import annotations

from dagexec.ops.control import NoOp
from dagexec.ops.cuda.kinds import on_cuda
from dagexec.ops.cuda.operator import CudaOperator


@on_cuda(NoOp)
class CudaNoOp(CudaOperator):
    """Computes nothing."""
