"""Matrix products: FC, FCTransposed, MatMul, BatchMatMul and Gemm.

All go to the BLAS behind `np.matmul` with `out=`; a transposed operand is a view. 16-bit floats are widened to float32
first, since BLAS has no product for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares, new_operator
from dagexec.core.rows import folded_product, fully_connected, matrix_product
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import LayerKind
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.broadcasting import broadcast_shape
from dagexec.ops.base.row_products import row_product

PRODUCT_TYPES = (*FLOAT_TYPES, INT32, INT64)
Matrix = tuple[int, int]


def product_steps(owner: Operator, a: Array, b: Array, c: Array) -> tuple[list[Step], Array]:
    """Passes for a product of matrices (or stacks of them), and the array it is left in, to be narrowed into `c`.

    That array is `c` itself unless its elements are 16-bit floats; see `narrowed`.
    """
    if not is_narrow(c.dtype):
        return [_product(owner, a, b, c)], c
    work = compute_dtype(c.dtype)
    wide_a, wide_b, wide_c = (owner.scratch(array.shape, work) for array in (a, b, c))
    return [convert(a, wide_a), convert(b, wide_b), _product(owner, wide_a, wide_b, wide_c)], wide_c


def _product(owner: Operator, a: Array, b: Array, c: Array) -> Step:
    """The step of c = a b: rows of a matrix each alike, however many there are; matrices of a stack each by itself."""
    return row_product(owner, a, b, c) if a.ndim == b.ndim == 2 else partial(np.matmul, a, b, out=c)


def narrowed(steps: list[Step], computed: Array, c: Array) -> Step:
    """One step of `steps`, and of the conversion of `computed` to `c` when they are not one array."""
    return in_sequence(steps if computed is c else [*steps, convert(computed, c)])


def _cost(call: OperatorCall, outputs: Sequence[TensorType], inner: int) -> Cost:
    return Cost(
        2 * outputs[0].elements * inner, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs)
    )


def _fold(shape: tuple[int, ...], axis: int) -> Matrix:
    """`shape` as a matrix: the axes before `axis` are its rows, the others its columns."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def fc_matrices(call: OperatorCall, transposed: bool) -> tuple[Matrix, Matrix, int]:
    """X as an M x K matrix, W as an N x K one (K x N when `transposed`), and X's axis. Raises ShapeError."""
    x, w = call.inputs[0].shape, call.inputs[1].shape
    axis = call.axis("axis", 1, len(x), end=True)
    folded_x, folded_w = _fold(x, axis), _fold(w, call.axis("axis_w", 1, len(w), end=True))
    inner = folded_w[0] if transposed else folded_w[1]
    if folded_x[1] != inner:
        side = "rows" if transposed else "columns"
        raise call.fail(
            f"X folded to {folded_x[0]} x {folded_x[1]} needs a W of {folded_x[1]} {side}, "
            f"found {folded_w[0]} x {folded_w[1]}"
        )
    return folded_x, folded_w, axis


FC_ARGS = {
    "axis": "first axis of X that is summed over (default 1)",
    "axis_w": "where W is folded to a matrix (default 1)",
    "plain_weights": "1: other operators read W as well, so that packing it would keep it twice (default 0)",
    "float16_compute": "accepted; 16-bit floats are always computed in float32",
}


def infer_fc(call: OperatorCall, transposed: bool = False) -> TensorType:
    """The leading axes of X and one of W's units. Raises ShapeError when X, W and b do not fit."""
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_same_type()
    call.arguments.bool("float16_compute")
    _, w, axis = fc_matrices(call, transposed)
    units = w[1] if transposed else w[0]
    call.require_shape(2, (units,), "one element for each unit of W")
    return TensorType((*call.inputs[0].shape[:axis], units), meta)


def fc_cost(call: OperatorCall, outputs: Sequence[TensorType], transposed: bool = False) -> Cost:
    """Cost of the product."""
    return _cost(call, outputs, fc_matrices(call, transposed)[0][1])


@declares
def _fc_operator(name: str, doc: str, transposed: bool, **traits: Any) -> OpSchema:
    return OpSchema(
        name,
        infer=lambda call: [infer_fc(call, transposed)],
        doc=f"{doc} X is folded to M x K at `axis`, whose leading axes the output keeps; W is folded at `axis_w`.",
        input_names=("X", "W", "b"),
        output_names=("Y",),
        args=FC_ARGS,
        cost=lambda call, outputs: fc_cost(call, outputs, transposed),
        has_weights=True,
        rows=fully_connected,
        **traits,
    )


class FullyConnected(Operator):
    """Base of the fully connected layers.

    Attributes:
        transposed: W is K x N.
    """

    transposed: ClassVar[bool] = False

    def prepare(self) -> Step:
        """A product and the bias."""
        x_matrix, w_matrix, _ = fc_matrices(self.call(), self.transposed)
        x, w = self.x(0).reshape(x_matrix), self.x(1).reshape(w_matrix)
        weights = w if self.transposed else w.T
        y = self.y(0).reshape(x_matrix[0], weights.shape[1])
        steps, product = product_steps(self, x, weights, y)
        return narrowed([*steps, partial(np.add, product, self.x(2), out=product)], product, y)


@_fc_operator(
    "FC", "Y = X W^T + b, with W of N x K.", transposed=False, layer=LayerKind.FULLY_CONNECTED, fused="FusedFC"
)
class FC(FullyConnected):
    """Fully connected layer."""


@_fc_operator("FCTransposed", "Y = X W + b, with W of K x N.", transposed=True)
class FCTransposed(FullyConnected):
    """Fully connected layer whose weights are stored transposed."""

    transposed = True


TRANSPOSE_ARGS = {"trans_a": "1: use A transposed (default 0)", "trans_b": "1: use B transposed (default 0)"}


def _transposed(matrix: Matrix, transpose: bool) -> Matrix:
    return (matrix[1], matrix[0]) if transpose else matrix


def _meet(call: OperatorCall, a: Matrix, b: Matrix) -> Matrix:
    """The size of the product of an `a` by a `b` matrix. Raises ShapeError when the inner sizes differ."""
    if a[1] != b[0]:
        raise call.fail(f"a {a[0]} x {a[1]} matrix cannot be multiplied by a {b[0]} x {b[1]} one")
    return a[0], b[1]


def matmul_matrices(call: OperatorCall) -> tuple[Matrix, Matrix]:
    """A and B as matrices, before they are transposed. Raises ShapeError for a bad axis."""
    a, b = call.inputs[0].shape, call.inputs[1].shape
    return (
        _fold(a, call.axis("axis_a", 1, len(a), end=True)),
        _fold(b, call.axis("axis_b", 1, len(b), end=True)),
    )


def infer_matmul(call: OperatorCall) -> list[TensorType]:
    """The output is a matrix, or has the shape of input 2."""
    call.require_types(0, *PRODUCT_TYPES)
    meta = call.require_same_type(0, 1)
    a, b = matmul_matrices(call)
    trans_a, trans_b = call.arguments.bool("trans_a"), call.arguments.bool("trans_b")
    shape: tuple[int, ...] = _meet(call, _transposed(a, trans_a), _transposed(b, trans_b))
    if len(call.inputs) == 3:
        like = call.inputs[2].shape
        if math.prod(like) != math.prod(shape):
            raise call.fail(f"the {shape[0]} x {shape[1]} product does not fit the shape of input 2, {like}")
        shape = like
    return [TensorType(shape, meta)]


def _matmul_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    a, _ = matmul_matrices(call)
    return _cost(call, outputs, _transposed(a, call.arguments.bool("trans_a"))[1])


@new_operator(
    "MatMul",
    inputs=(2, 3),
    infer=infer_matmul,
    doc="Y = A B. A is folded to a matrix at `axis_a`, B at `axis_b`, and then transposed where asked. "
    "The product is a matrix, or takes the shape of the third input.",
    input_names=("A", "B", "like"),
    output_names=("Y",),
    args={"axis_a": "where A is folded (default 1)", "axis_b": "where B is folded (default 1)", **TRANSPOSE_ARGS},
    cost=_matmul_cost,
    has_weights=True,
    rows=folded_product,
)
class MatMul(Operator):
    """Product of two matrices."""

    def prepare(self) -> Step:
        a_matrix, b_matrix = matmul_matrices(self.call())
        a, b = self.x(0).reshape(a_matrix), self.x(1).reshape(b_matrix)
        a = a.T if self.arguments.bool("trans_a") else a
        b = b.T if self.arguments.bool("trans_b") else b
        y = self.y(0).reshape(a.shape[0], b.shape[1])
        return narrowed(*product_steps(self, a, b, y), y)


def infer_batch_matmul(call: OperatorCall) -> list[TensorType]:
    """The output has the batch axes of the operands, which must be equal unless `broadcast`, and a product's two."""
    call.require_types(0, *PRODUCT_TYPES)
    meta = call.require_same_type()
    a, b = call.inputs[0].shape, call.inputs[1].shape
    broadcast = call.arguments.bool("broadcast")
    least = 1 if broadcast else 2
    for name, shape in (("A", a), ("B", b)):
        if len(shape) < least:
            raise call.fail(f"{name} must have at least {least} axes, found {len(shape)}")
        if len(shape) == 1 and call.arguments.bool(f"trans_{name.lower()}"):
            raise call.fail(f"{name} has one axis and cannot be transposed")
    matrix_a = _transposed(a[-2:] if len(a) > 1 else (1, a[0]), call.arguments.bool("trans_a"))  # type: ignore[arg-type]
    matrix_b = _transposed(b[-2:] if len(b) > 1 else (b[0], 1), call.arguments.bool("trans_b"))  # type: ignore[arg-type]
    rows, columns = _meet(call, matrix_a, matrix_b)
    if not broadcast and a[:-2] != b[:-2]:
        raise call.fail(f"without broadcast=1 the batch axes must be equal, found {a[:-2]} and {b[:-2]}")
    batch = broadcast_shape(call, [a[:-2], b[:-2]])
    return [TensorType((*batch, *((rows,) if len(a) > 1 else ()), *((columns,) if len(b) > 1 else ())), meta)]


def _batch_matmul_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    a = call.inputs[0].shape
    return _cost(call, outputs, a[-2] if call.arguments.bool("trans_a") else a[-1])


@new_operator(
    "BatchMatMul",
    infer=infer_batch_matmul,
    doc="Y[i] = A[i] B[i]: a product for each index of the leading axes. With broadcast=1 operands of one axis, "
    "and batch axes that differ, are treated as by `numpy.matmul`.",
    input_names=("A", "B"),
    output_names=("Y",),
    args={**TRANSPOSE_ARGS, "broadcast": "1: NumPy's rules for the batch axes (default 0: they are equal)"},
    cost=_batch_matmul_cost,
    onnx=(OnnxName("MatMul", 13, fixed={"broadcast": 1}),),
    has_weights=True,
    rows=matrix_product,
)
class BatchMatMul(Operator):
    """Products of two stacks of matrices."""

    def prepare(self) -> Step:
        """One call; a stack times a single matrix is one product of the stack's rows."""
        a, b, y = self.x(0), self.x(1), self.y(0)
        if self.arguments.bool("trans_b"):
            b = b.swapaxes(-1, -2)
        if self.arguments.bool("trans_a"):
            a = a.swapaxes(-1, -2)
        elif a.ndim > 2 and b.ndim == 2:
            rows = math.prod(a.shape[:-1])
            a, y = a.reshape(rows, a.shape[-1]), y.reshape(rows, y.shape[-1])
        return narrowed(*product_steps(self, a, b, y), y)


def _gemm_matrices(call: OperatorCall) -> tuple[Matrix, Matrix]:
    a, b = call.require_rank(0, 2), call.require_rank(1, 2)
    trans_a, trans_b = call.arguments.bool("trans_a"), call.arguments.bool("trans_b")
    return _transposed((a[0], a[1]), trans_a), _transposed((b[0], b[1]), trans_b)


def infer_gemm(call: OperatorCall) -> list[TensorType]:
    """The output is a matrix of A's rows by B's columns, to which C must broadcast."""
    call.require_types(0, *PRODUCT_TYPES)
    meta = call.require_same_type()
    shape = _meet(call, *_gemm_matrices(call))
    call.arguments.float("alpha", 1.0)
    call.arguments.float("beta", 1.0)
    if len(call.inputs) == 3 and broadcast_shape(call, [shape, call.inputs[2].shape]) != shape:
        raise call.fail(f"C of shape {call.inputs[2].shape} does not broadcast to the product's shape {shape}")
    return [TensorType(shape, meta)]


@new_operator(
    "Gemm",
    inputs=(2, 3),
    infer=infer_gemm,
    doc="Y = alpha A B + beta C, for matrices A and B, and a C that broadcasts to the product. C is not read when "
    "beta is 0, as in BLAS. (dagexec's own, for ONNX.)",
    input_names=("A", "B", "C"),
    output_names=("Y",),
    args={"alpha": "factor of the product (default 1)", "beta": "factor of C (default 1)", **TRANSPOSE_ARGS},
    cost=lambda call, outputs: _cost(call, outputs, _gemm_matrices(call)[0][1]),
    onnx=(
        OnnxName(
            "Gemm",
            13,
            {"alpha": "alpha", "beta": "beta", "transA": "trans_a", "transB": "trans_b"},
            ignored=("broadcast",),  # before opset 7 it only allowed what is now always allowed
        ),
    ),
    has_weights=True,
    rows=folded_product,
)
class Gemm(Operator):
    """General matrix product."""

    def prepare(self) -> Step:
        """The product, its factor, and the scaled C."""
        a = self.x(0).T if self.arguments.bool("trans_a") else self.x(0)
        b = self.x(1).T if self.arguments.bool("trans_b") else self.x(1)
        y = self.y(0)
        alpha, beta = self.arguments.float("alpha", 1.0), self.arguments.float("beta", 1.0)
        steps, product = product_steps(self, a, b, y)
        if alpha != 1:
            steps.append(partial(np.multiply, product, np.asarray(alpha, product.dtype), out=product))
        if len(self.input_blobs) == 3 and beta != 0:
            addend = self.x(2)
            if beta != 1:
                scaled = self.scratch(addend.shape, product.dtype)
                steps.append(partial(np.multiply, addend, np.asarray(beta, product.dtype), out=scaled))
                addend = scaled
            steps.append(partial(np.add, product, addend, out=product))
        return narrowed(steps, product, y)
