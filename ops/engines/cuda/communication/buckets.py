"""Buckets on CUDA: several tensors as one flat array, one kernel for up to sixteen of them."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.pieces import cutting, joining
from dagexec.ops.engines.cuda.elementwise.arithmetic import folded
from dagexec.ops.families.communication.buckets import BucketSum, PackBucket, UnpackBucket


@on_cuda(PackBucket)
class CudaPackBucket(CudaOperator):
    """Tensors into a bucket."""

    def prepare(self) -> Step:
        tensors = [self.x(index).reshape(-1) for index in range(len(self.input_blobs))]
        return joining(self, self.y(0), tensors, 0)


@on_cuda(UnpackBucket)
class CudaUnpackBucket(CudaOperator):
    """A bucket into tensors."""

    def prepare(self) -> Step:
        """Each out of its part."""
        tensors = [self.y(index).reshape(-1) for index in range(len(self.output_blobs))]
        return cutting(self, self.x(0).reshape(-1), tensors, 0)


@on_cuda(BucketSum)
class CudaBucketSum(CudaOperator):
    """A sum, or a mean; 16-bit floats are added in float."""

    def prepare(self) -> Step:
        """One kernel, or one for each sixteen inputs."""
        arrays = [self.x(index) for index in range(len(self.input_blobs))]
        divisor = self.arguments.int("divisor", 1)
        finish = "y = y / count;" if divisor > 1 else ""
        return folded(self, arrays, self.y(0), "plus", finish, divisor)
