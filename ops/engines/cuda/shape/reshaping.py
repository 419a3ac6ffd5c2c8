"""Shape operators on CUDA: views, transposes, shapes; `dagexec.ops.engines.cuda.base.strided_copy` moves elements."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.constants import constant_step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.strided_copy import strided_copy
from dagexec.ops.families.index.indexing_gradient import IndexRows
from dagexec.ops.families.shape.alias import Alias, AliasWithName, EnsureDense, NegateGradient
from dagexec.ops.families.shape.reorder import Reorder, in_common_blocks, orders_of
from dagexec.ops.families.shape.reshaping import (
    NCHW2NHWC,
    NHWC2NCHW,
    ExpandDims,
    Flatten,
    FlattenToVec,
    MergeDim,
    PrependDim,
    Reshape,
    Shape,
    Size,
    Squeeze,
    StopGradient,
    Transpose,
    permutation,
)
from dagexec.ops.families.shape.reshaping_gradient import ResizeLike


def view_step(op: CudaOperator, x: Array, y: Array) -> Step:
    """A step that puts the elements of `x` into `y`, packed, in their order; nothing where they share memory."""
    if x.size == 0 or (x.flags.c_contiguous and address(x) == address(y)):
        return nothing_to_do
    return strided_copy(op, y.reshape(x.shape), x)


@on_cuda(
    Alias, AliasWithName, EnsureDense, ExpandDims, Flatten, FlattenToVec, IndexRows, MergeDim, NegateGradient,
    PrependDim, ResizeLike, Squeeze, StopGradient,
)  # fmt: skip
class _CudaView(CudaOperator):
    """An operator whose output 0 holds the elements of input 0 in the same order."""

    reads_strided = True

    def prepare(self) -> Step:
        """Nothing to do where output and input share memory, one copy where not."""
        return view_step(self, self.x(0), self.y(0))


@on_cuda(Reshape)
class _CudaReshape(CudaOperator, Reshape):
    """New shape, same elements."""

    def prepare(self) -> Step:
        move = view_step(self, self.x(0), self.y(0))
        if len(self.output_blobs) == 1:
            return move
        return in_sequence([move, constant_step(self, self.y(1), np.array(self.old_shape, np.int64))])


@on_cuda(Transpose)
class _CudaTranspose(CudaOperator):
    """Axes in another order."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        x = self.x(0)
        return strided_copy(self, self.y(0), x.transpose(permutation(self.call())) if x.ndim else x)


def channels_moved(array: Array, *, last: bool) -> Array:
    """A view with axis 1 last, or with the last axis as axis 1."""
    rest = range(2, array.ndim) if last else range(1, array.ndim - 1)
    return array.transpose(0, *rest, 1) if last else array.transpose(0, array.ndim - 1, *rest)


@on_cuda(NCHW2NHWC)
class _CudaNCHW2NHWC(CudaOperator):
    """Channels last."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        return strided_copy(self, self.y(0), channels_moved(self.x(0), last=True))


@on_cuda(NHWC2NCHW)
class _CudaNHWC2NCHW(CudaOperator):
    """Channels first."""

    reads_strided = writes_strided = True

    def prepare(self) -> Step:
        return strided_copy(self, self.y(0), channels_moved(self.x(0), last=False))


@on_cuda(Reorder)
class _CudaReorder(CudaOperator):
    """One transposing copy."""

    def prepare(self) -> Step:
        """Both tensors seen with their axes in one order."""
        x, y = self.x(0), self.y(0)
        if not x.size:
            return nothing_to_do
        source, target = orders_of(self.call())
        return strided_copy(self, in_common_blocks(y, target, source), in_common_blocks(x, source, target))


@on_cuda(Shape)
class _CudaShape(CudaOperator):
    """The sizes of a tensor."""

    reads_strided = True

    def prepare(self) -> Step:
        """The sizes are known now; the step copies them."""
        shape = self.x(0).shape
        axes = self.arguments.ints("axes") if "axes" in self.arguments else range(len(shape))
        return constant_step(self, self.y(0), np.array([shape[axis] for axis in axes], np.int64))


@on_cuda(Size)
class _CudaSize(CudaOperator):
    """The number of elements of a tensor."""

    reads_strided = True

    def prepare(self) -> Step:
        """The number is known now; the step copies it."""
        return constant_step(self, self.y(0), np.int64(self.x(0).size))
