"""Matrix products on CUDA: FC, FCTransposed, MatMul, BatchMatMul, Gemm, FusedFC, and their gradients, by cuBLAS.

float32 is multiplied as such (not rounded to TF32); 16-bit floats are summed in float32. A bias stands in the result
before the product is added to it, so that it is rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.ops.base.blocks import compute_dtype, is_narrow
from dagexec.ops.base.gradient_selection import wanted_inputs
from dagexec.ops.engines.cuda.activation.post_ops import epilogue
from dagexec.ops.engines.cuda.base.expression import converted, elementwise
from dagexec.ops.engines.cuda.base.matrices import product_of, stretched_sums, sums_of
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.activation.post_ops import SUM, read_post_ops
from dagexec.ops.families.conv.gradient_outputs import BIAS, INPUT
from dagexec.ops.families.product.fused import FusedFC
from dagexec.ops.families.product.gradient import (
    BatchMatMulGradient,
    FCGradient,
    FCTransposedGradient,
    FullyConnectedGradient,
    MatMulGradient,
    ProductGradient,
    layer_gradients,
)
from dagexec.ops.families.product.products import (
    FC,
    BatchMatMul,
    FCTransposed,
    FullyConnected,
    Gemm,
    MatMul,
    fc_matrices,
    matmul_matrices,
)


class CudaFullyConnected(CudaOperator, FullyConnected):
    """Fully connected layer."""

    def operands(self) -> tuple[Array, Array, tuple[int, int]]:
        """X and the weights as matrices to be multiplied, and the shape of the product."""
        x_matrix, w_matrix, _ = fc_matrices(self.call(), self.transposed)
        x, w = self.x(0).reshape(x_matrix), self.x(1).reshape(w_matrix)
        weights = w if self.transposed else w.swapaxes(0, 1)
        return x, weights, (x_matrix[0], weights.shape[1])

    def prepare(self) -> Step:
        """The bias in every row, and the product on top."""
        x, weights, shape = self.operands()
        y = self.y(0).reshape(shape)
        return in_sequence([converted(self, self.x(2), y), product_of(self, x, weights, y, beta=1.0)])


class CudaFusedFC(CudaFullyConnected):
    """Fully connected layer with post-ops: a product, and a kernel for all that follows."""

    def prepare(self) -> Step:
        """The product into Y, or into memory of its own where Y's old value is added."""
        x, weights, shape = self.operands()
        y, post_ops = self.y(0), read_post_ops(self.call())
        operands = {post_op.input: self.x(post_op.input) for post_op in post_ops if post_op.input >= 0}
        adds_itself = any(post_op.kind == SUM for post_op in post_ops)
        result = self.scratch(y.shape, y.dtype) if adds_itself else y
        return in_sequence(
            [
                product_of(self, x, weights, result.reshape(shape)),
                epilogue(self, result, y, bias=self.x(2), post_ops=post_ops, operands=operands),
            ]
        )


class CudaMatMul(CudaOperator, MatMul):
    """Product of two matrices."""

    def prepare(self) -> Step:
        a_matrix, b_matrix = matmul_matrices(self.call())
        a, b = self.x(0).reshape(a_matrix), self.x(1).reshape(b_matrix)
        a = a.swapaxes(0, 1) if self.arguments.bool("trans_a") else a
        b = b.swapaxes(0, 1) if self.arguments.bool("trans_b") else b
        return product_of(self, a, b, self.y(0).reshape(a.shape[0], b.shape[1]))


class CudaBatchMatMul(CudaOperator, BatchMatMul):
    """Products of two stacks of matrices."""

    def prepare(self) -> Step:
        """One product; a vector is a matrix of one row or column."""
        a, b, y = self.x(0), self.x(1), self.y(0)
        shape = tuple(y.shape)
        a_is_matrix, b_is_matrix = a.ndim > 1, b.ndim > 1
        a = a if a_is_matrix else a.reshape(1, -1)
        b = b if b_is_matrix else b.reshape(-1, 1)
        if not b_is_matrix:
            shape = (*shape, 1)
        if not a_is_matrix:
            shape = (*shape[:-1], 1, shape[-1])
        if self.arguments.bool("trans_a"):
            a = a.swapaxes(-1, -2)
        if self.arguments.bool("trans_b"):
            b = b.swapaxes(-1, -2)
        return product_of(self, a, b, y.reshape(shape))


class CudaGemm(CudaOperator, Gemm):
    """General matrix product."""

    def prepare(self) -> Step:
        """C in the result, and the product on top."""
        a = self.x(0).swapaxes(0, 1) if self.arguments.bool("trans_a") else self.x(0)
        b = self.x(1).swapaxes(0, 1) if self.arguments.bool("trans_b") else self.x(1)
        y = self.y(0)
        alpha, beta = self.arguments.float("alpha", 1.0), self.arguments.float("beta", 1.0)
        adds = len(self.input_blobs) == 3 and beta != 0
        if y.dtype.kind not in "iu":
            before = [converted(self, self.x(2), y)] if adds else []
            return in_sequence([*before, product_of(self, a, b, y, alpha=alpha, beta=beta if adds else 0.0)])
        steps = [product_of(self, a, b, y)]
        scalars: dict[str, Any] = {"alpha": np.asarray(alpha, y.dtype)[()]}
        inputs, formula = {"x": y}, "y = (C)(U(alpha) * U(x)"
        if adds:
            inputs["c"] = self.x(2)
            scalars["beta"] = np.asarray(beta, y.dtype)[()]
            formula += " + U(beta) * U(c)"
        if adds or alpha != 1:
            kind = "typedef decltype(y) C; typedef {} U; ".format("u64" if y.dtype.itemsize == 8 else "u32")
            steps.append(elementwise(self, "scaled_sum", inputs, {"y": y}, f"{kind}{formula});", scalars))
        return in_sequence(steps)


class CudaFullyConnectedGradient(CudaOperator, FullyConnectedGradient):
    """Gradients of a fully connected layer."""

    def prepare(self) -> Step:
        call = self.call()
        (rows, inner), w_matrix, _ = fc_matrices(call, self.transposed)
        units = w_matrix[1] if self.transposed else w_matrix[0]
        x, w, dy = (
            self.x(index).reshape(shape) for index, shape in enumerate(((rows, inner), w_matrix, (rows, units)))
        )
        steps: list[Step] = []
        for index, name in enumerate(layer_gradients(call)):
            result = self.y(index)
            if name == BIAS:
                steps.append(sums_of(self, dy.reshape(rows, units, 1), result.reshape(-1)))
            elif name == INPUT:
                weights = w.swapaxes(0, 1) if self.transposed else w
                steps.append(product_of(self, dy, weights, result.reshape(rows, inner)))
            else:
                left, right = (x, dy) if self.transposed else (dy, x)
                steps.append(product_of(self, left.swapaxes(0, 1), right, result.reshape(w_matrix)))
        return in_sequence(steps)


class CudaProductGradient(CudaOperator, ProductGradient):
    """Gradients of products of matrices, or stacks of them that are stretched to each other."""

    def prepare(self) -> Step:
        """A product for each wanted operand, and its sum over the matrices that the operand was stretched to."""
        found = self.operands()
        steps: list[Step] = []
        for index, name in enumerate(wanted_inputs(self.call(), "AB")):
            result = self.y(index).reshape((found.a if name == "A" else found.b).shape)
            left, right = found.factors(name, found.a, found.b, found.dy)
            batch = np.broadcast_shapes(tuple(left.shape[:-2]), tuple(right.shape[:-2]))
            own = (*(1,) * (len(batch) + 2 - result.ndim), *result.shape)
            if all(size == own[axis] for axis, size in enumerate(batch)):
                steps.append(product_of(self, left, right, result))
                continue
            dtype = compute_dtype(result.dtype) if is_narrow(result.dtype) else result.dtype
            total = self.scratch((*batch, *result.shape[-2:]), dtype)
            steps.append(product_of(self, left, right, total))
            steps.append(stretched_sums(self, total, own, result))
        return in_sequence(steps)


def _register(kind: type[Operator], base: type[CudaOperator]) -> None:
    """Register a class of `base` for the operator that `kind` is on the host."""
    bases = (base,) if issubclass(base, kind) else (base, kind)
    operator(kind.schema, device="cuda")(type(f"Cuda{kind.__name__}", bases, {"__doc__": kind.__doc__}))


for _kind, _base in (
    (FC, CudaFullyConnected),
    (FCTransposed, CudaFullyConnected),
    (FusedFC, CudaFusedFC),
    (MatMul, CudaMatMul),
    (BatchMatMul, CudaBatchMatMul),
    (Gemm, CudaGemm),
    (FCGradient, CudaFullyConnectedGradient),
    (FCTransposedGradient, CudaFullyConnectedGradient),
    (MatMulGradient, CudaProductGradient),
    (BatchMatMulGradient, CudaProductGradient),
):
    _register(_kind, _base)
