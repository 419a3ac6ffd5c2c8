"""Concat, DepthConcat, Split and ConcatGradient on CUDA: one kernel for up to 16 pieces."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Prepared, Step, in_sequence
from dagexec.ops.engines.cuda.base.constants import constant_step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.pieces import cutting, in_place, joining
from dagexec.ops.families.shape.concat import Concat, DepthConcat, Split, joint_axis
from dagexec.ops.families.shape.concat_gradient import ConcatGradient


@on_cuda(Concat, DepthConcat)
class _CudaConcat(CudaOperator):
    """Inputs joined along an axis."""

    def prepare(self) -> Step:
        """One kernel, and the sizes."""
        call = self.call()
        add_axis = self.arguments.bool("add_axis")
        axis = joint_axis(call, len(call.inputs[0].shape) + add_axis)
        parts = [self.x(index) for index in range(len(self.input_blobs))]
        steps = [joining(self, self.y(0), parts, axis)]
        if len(self.output_blobs) == 2:
            sizes = np.array([1 if add_axis else part.shape[axis] for part in parts], np.int32)
            steps.append(constant_step(self, self.y(1), sizes))
        return Prepared(in_sequence(steps), inputs_in_place=in_place(self.y(0), parts, axis))


@on_cuda(Split, ConcatGradient)
class _CudaCut(CudaOperator):
    """One tensor cut along an axis."""

    def prepare(self) -> Step:
        whole, axis = self.x(0), joint_axis(self.call(), self.x(0).ndim)
        parts = [self.y(index) for index in range(len(self.output_blobs))]
        return Prepared(cutting(self, whole, parts, axis), outputs_in_place=in_place(whole, parts, axis))
