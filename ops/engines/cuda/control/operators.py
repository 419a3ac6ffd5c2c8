"""Operators that compute nothing, on CUDA."""

from __future__ import annotations

from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.control.operators import NoOp
from dagexec.ops.families.shape.alias import Free, ZeroGradient


@on_cuda(NoOp, Free, ZeroGradient)
class CudaNoOp(CudaOperator):
    """Computes nothing."""
