"""Conv, FusedConv, ConvTranspose and their gradients by cuDNN.

A bias, a residual that is added, and a ReLU are part of the convolution's graph, where an engine takes that; otherwise
they are one kernel behind it. The bias of a transposed convolution and the gradient of a bias are always our kernels:
cuDNN has no engine for these in most layouts and types (docs/cudnn.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator, schema_of
from dagexec.core.schema import OperatorCall
from dagexec.devices.cuda.cudnn_graph import BIAS, FILTER, FORWARD, RESIDUAL, X, Y
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import image_order
from dagexec.ops.engines.cuda.activation.post_ops import epilogue
from dagexec.ops.engines.cuda.base.constants import uploaded
from dagexec.ops.engines.cuda.conv.operators import (
    CudaConv,
    CudaConvGradient,
    CudaConvOperator,
    CudaConvTranspose,
    CudaConvTransposeGradient,
    CudaFusedConv,
)
from dagexec.ops.engines.cuda.cudnn.operator import CudnnConvOperator
from dagexec.ops.families.activation.post_ops import SUM, PostOp, read_post_ops
from dagexec.ops.families.conv.convolution import SPATIAL_AXES, conv_window
from dagexec.ops.families.conv.fused import first_operand, output_order
from dagexec.ops.families.conv.problem import Array

logger = logging.getLogger("dagexec")


class CudnnConv(CudnnConvOperator, CudaConv):
    """Convolution."""

    def convolve(self, call: OperatorCall, bias: Array | None, y: Array) -> Step:
        """With the bias in the graph, or behind it."""
        if bias is not None:
            try:
                return self.fused(call, bias, None, y, relu=False)
            except UnsupportedFeatureError as reason:
                logger.info("%s: a separate kernel adds its bias: %s", self.label, reason)
        return super().convolve(call, bias, y)

    def fused(self, call: OperatorCall, bias: Array | None, residual: Array | None, y: Array, *, relu: bool) -> Step:
        """relu(X * filter + residual + bias) in one graph. Raises UnsupportedFeatureError where no engine takes it.

        cuDNN's engines want a bias: where there is none it is 0.
        """
        problem = self.arrays(self.x(0), self.x(1), y, conv_window(call)[1])
        graph = self.graph(FORWARD, problem, bias=True, residual=residual, relu=relu)
        if bias is None:
            bias = uploaded(self, np.zeros(problem.weights.shape[0], problem.weights.dtype))
        arrays = {X: problem.x, FILTER: problem.weights, Y: y, BIAS: bias}
        return self.planned_step(graph, arrays if residual is None else {**arrays, RESIDUAL: residual})


class CudnnFusedConv(CudnnConv, CudaFusedConv):
    """Convolution with post-ops: a leading `add` of a whole tensor, with nan="any" also a `relu`, is in the graph."""

    def prepare(self) -> Step:
        """One graph and perhaps a kernel for other post-ops; or one graph, and all post-ops in a kernel behind it."""
        call, y = self.call(), self.y(0)
        post_ops, own = read_post_ops(call), first_operand(call)
        if not y.size or output_order(call) != image_order(call) or any(one.kind == SUM for one in post_ops):
            return CudaFusedConv.prepare(self)
        bias = self.x(2) if own == 3 else None
        operands = {index: self.x(index) for index in range(own, len(call.inputs))}
        rest = list(post_ops)
        residual = self._take_residual(rest, operands, y)
        relu = self.takes_relu(rest, self.arguments.string("nan", "kept"))
        rest = rest[relu:]
        if bias is None and residual is None and not relu:
            return CudaFusedConv.prepare(self)
        try:
            whole = self.fused(call, bias, residual, y, relu=relu)
        except UnsupportedFeatureError as reason:
            logger.info("%s: a separate kernel computes its post-ops: %s", self.label, reason)
            return CudaFusedConv.prepare(self)
        return in_sequence([whole, epilogue(self, y, y, post_ops=rest, operands=operands)])

    @staticmethod
    def takes_relu(post_ops: Sequence[PostOp], nan: str) -> bool:
        """True when the first of `post_ops` becomes part of the graph, whose Relu may give 0 for NaN."""
        return nan == "any" and bool(post_ops) and post_ops[0].kind == "relu"

    @staticmethod
    def _take_residual(post_ops: list[PostOp], operands: dict[int, Array], y: Array) -> Array | None:
        """The operand of a leading `add` of a tensor like Y, which is taken from the list."""
        if not post_ops or post_ops[0].kind != "add" or operands[post_ops[0].input].shape != y.shape:
            return None
        return operands[post_ops.pop(0).input]


class CudnnConvGradient(CudnnConvOperator, CudaConvGradient):
    """The gradients of a convolution."""


class CudnnConvTranspose(CudnnConvOperator, CudaConvTranspose):
    """Transposed convolution."""


class CudnnConvTransposeGradient(CudnnConvOperator, CudaConvTransposeGradient):
    """The gradients of a transposed convolution."""


def _register(op_type: str, base: type[CudaConvOperator]) -> None:
    schema = schema_of(op_type)
    operator(schema, device="cuda", engine="CUDNN")(type(f"Cudnn{op_type}", (base,), {"__doc__": base.__doc__}))


_register("FusedConv", CudnnFusedConv)
for _suffix in SPATIAL_AXES:
    _register(f"Conv{_suffix}", CudnnConv)
    _register(f"Conv{_suffix}Gradient", CudnnConvGradient)
    _register(f"ConvTranspose{_suffix}", CudnnConvTranspose)
    _register(f"ConvTranspose{_suffix}Gradient", CudnnConvTransposeGradient)
