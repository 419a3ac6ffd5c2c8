"""Gradients of matrix products: FCGradient, FCTransposedGradient, MatMulGradient, BatchMatMulGradient, and the makers.

With Y = A B and dY the gradient of Y, dA = dY B^T and dB = A^T dY (Magnus and Neudecker, "Matrix Differential
Calculus", chapter 9). Every product goes to BLAS, straight into the gradient, with transposed operands as views. The
gradients of a plain product are products themselves, so MatMul, BatchMatMul and Gemm are differentiated with their own
operators where no operand is stretched and no result reshaped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import Gradient, GradientOperators, GradientRequest, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import declares
from dagexec.core.rows import before_axis, gradients
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import OF_ALL_ROWS, Rows
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.gradient_selection import one_operator, wanted_inputs
from dagexec.ops.base.row_products import row_product
from dagexec.ops.families.conv.gradient_outputs import BIAS, INPUT, wanted_gradients
from dagexec.ops.families.product.products import (
    FC_ARGS,
    TRANSPOSE_ARGS,
    fc_matrices,
    infer_batch_matmul,
    infer_matmul,
    matmul_matrices,
)
from dagexec.platform.records import dataclass

WEIGHTS = "weights"
LAYER_GRADIENTS = (WEIGHTS, BIAS, INPUT)
WANTED_HELP = "which gradients the outputs are, in order"


def widened(owner: Operator, arrays: Sequence[Array]) -> tuple[list[Step], list[Array]]:
    """The passes that widen 16-bit floats to float32, and the arrays to compute with; others as they are."""
    if not any(is_narrow(array.dtype) for array in arrays):
        return [], list(arrays)
    wide = [owner.scratch(array.shape, compute_dtype(array.dtype)) for array in arrays]
    return [convert(array, other) for array, other in zip(arrays, wide, strict=True)], wide


def layer_gradients(call: OperatorCall) -> tuple[str, ...]:
    """What each output of a fully connected layer's gradient is the gradient of. Raises ArgumentError."""
    return wanted_gradients(call, LAYER_GRADIENTS)


def _infer_layer(call: OperatorCall, transposed: bool) -> list[TensorType]:
    call.require_types(0, *FLOAT_TYPES)
    meta = call.require_same_type()
    (_, w, axis) = fc_matrices(call, transposed)
    units = w[1] if transposed else w[0]
    call.require_shape(2, (*call.inputs[0].shape[:axis], units), "dY: what the layer gives for X and W")
    types = {WEIGHTS: call.inputs[1], BIAS: TensorType((units,), meta), INPUT: call.inputs[0]}
    return [types[name] for name in layer_gradients(call)]


def _layer_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """As many operations as forward for W, and as many for X; for the bias one an element of dY."""
    wanted, (_, inner) = layer_gradients(call), fc_matrices(call, call.definition.type.startswith("FCTransposed"))[0]
    elements = call.inputs[2].elements
    flops = 2 * elements * inner * ((WEIGHTS in wanted) + (INPUT in wanted)) + elements * (BIAS in wanted)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs))


@declares
def _layer_operator(name: str, transposed: bool) -> OpSchema:
    return OpSchema(
        f"{name}Gradient",
        outputs=(1, 3),
        infer=lambda call: _infer_layer(call, transposed),
        doc=f"The gradients of {name}, whose arguments it takes, from that of its output: dW, db and, if it has an "
        "output, dX; or what `wanted` names.",
        input_names=("X", "W", "dY"),
        output_names=("dW", "db", "dX"),
        args=FC_ARGS | {"wanted": f"{WANTED_HELP}: strings out of weights, bias and input (default: dW, db and dX)"},
        cost=_layer_cost,
        rows=gradients(before_axis(lambda call: fc_matrices(call, transposed)[2], 0, 2), layer_gradients, INPUT),
    )


class FullyConnectedGradient(Operator):
    """Base of the gradients of fully connected layers.

    Attributes:
        transposed: W is K x N.
    """

    transposed: ClassVar[bool] = False

    def prepare(self) -> Step:
        """One product for W, one for X, and a sum of the rows of dY for the bias, as far as they are wanted."""
        call = self.call()
        (rows, inner), w_matrix, _ = fc_matrices(call, self.transposed)
        units = w_matrix[1] if self.transposed else w_matrix[0]
        x, w, dy = (
            self.x(index).reshape(shape) for index, shape in enumerate(((rows, inner), w_matrix, (rows, units)))
        )
        steps, (x, w, dy) = widened(self, [x, w, dy])
        for index, name in enumerate(layer_gradients(call)):
            target, narrow = self._target(self.y(index))
            if name == BIAS:
                steps.append(partial(np.add.reduce, dy, axis=0, out=target))
            elif name == INPUT:
                steps.append(self.row_product(dy, w.T if self.transposed else w, target.reshape(rows, inner)))
            else:
                operands = (x.T, dy) if self.transposed else (dy.T, x)
                steps.append(self.product(*operands, target.reshape(w_matrix)))
            steps.append(narrow)
        return in_sequence(steps)

    def product(self, a: Array, b: Array, target: Array) -> Step:
        """The step target = A B, of matrices that may be transposed views; the target is packed."""
        return partial(np.matmul, a, b, out=target)

    def row_product(self, a: Array, b: Array, target: Array) -> Step:
        """As `product`, each row of A alike in any batch."""
        return row_product(self, a, b, target)

    def _target(self, result: Array) -> tuple[Array, Step]:
        """Where `result` is computed, and what brings it to its place."""
        if not is_narrow(result.dtype):
            return result, nothing_to_do
        wide = self.scratch(result.shape, compute_dtype(result.dtype))
        return wide, convert(wide, result)


@_layer_operator("FC", transposed=False)
class FCGradient(FullyConnectedGradient):
    """dW = dY^T X, db = the sum of the rows of dY, dX = dY W."""


@_layer_operator("FCTransposed", transposed=True)
class FCTransposedGradient(FullyConnectedGradient):
    """dW = X^T dY, db = the sum of the rows of dY, dX = dY W^T."""

    transposed = True


@dataclass(frozen=True, slots=True)
class Operands:
    """The arrays of a product Y = A B, each as a stack of matrices (or a single one), and how A and B are stored.

    Attributes:
        a, b: as stored; A is used transposed when `trans_a`, B when `trans_b`.
        dy: the gradient of the product.
    """

    a: Array
    b: Array
    dy: Array
    trans_a: bool
    trans_b: bool

    def factors(self, name: str, a: Array, b: Array, dy: Array) -> tuple[Array, Array]:
        """The two matrices whose product is the gradient of operand `name`, from those of this layout."""
        used_a, used_b = (a.swapaxes(-1, -2) if self.trans_a else a), (b.swapaxes(-1, -2) if self.trans_b else b)
        if name == "A":
            left, right, turned = dy, used_b.swapaxes(-1, -2), self.trans_a
        else:
            left, right, turned = used_a.swapaxes(-1, -2), dy, self.trans_b
        return (right.swapaxes(-1, -2), left.swapaxes(-1, -2)) if turned else (left, right)


class ProductGradient(Operator):
    """Base of the gradients of products of matrices, or stacks of them that are stretched to each other."""

    @abstractmethod
    def operands(self) -> Operands:
        """The arrays, as matrices or stacks."""

    def prepare(self) -> Step:
        """A product for each wanted operand, summed over the matrices that the operand was stretched to."""
        found = self.operands()
        steps, (a, b, dy) = widened(self, [found.a, found.b, found.dy])
        for index, name in enumerate(wanted_inputs(self.call(), "AB")):
            result = self.y(index).reshape((found.a if name == "A" else found.b).shape)
            left, right = found.factors(name, a, b, dy)
            batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
            own = (*(1,) * (len(batch) + 2 - result.ndim), *result.shape)
            stretched = tuple(axis for axis, size in enumerate(batch) if size != own[axis])
            total: Array = result
            if stretched or is_narrow(result.dtype):
                total = self.scratch((*batch, *result.shape[-2:]), left.dtype)
            product = total.reshape(*batch, *result.shape[-2:])
            is_of_rows = name == "A" and not found.trans_a and left.ndim == right.ndim == 2
            by_rows = row_product(self, left, right, product) if is_of_rows else None
            steps.append(by_rows or partial(np.matmul, left, right, out=product))
            if stretched:
                target, dtype = result.reshape(own), left.dtype
                if is_narrow(result.dtype):
                    target = self.scratch(own, dtype)
                steps.append(partial(np.add.reduce, total, axis=stretched, keepdims=True, out=target))
                total = target
            if is_narrow(result.dtype):
                steps.append(convert(total.reshape(result.shape), result))
        return in_sequence(steps)


def _infer_product(call: OperatorCall) -> list[TensorType]:
    """The types of the wanted operands; dY must have the shape of the product."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1, 2)
    forward = infer_matmul if call.definition.type.startswith("MatMul") else infer_batch_matmul
    operands = OperatorCall(call.definition, call.arguments, call.inputs[:2], call.values[:2], call.label)
    (product,) = forward(operands)
    if call.definition.type.startswith("MatMul"):
        if call.inputs[2].elements != product.elements:
            raise call.fail(f"dY must have the {product.elements} elements of the product, found {call.inputs[2]}")
    else:
        call.require_shape(2, product.shape, "dY: the shape of the product")
    return [call.inputs["AB".index(name)] for name in wanted_inputs(call, "AB")]


def _product_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """For each gradient as many operations as the product takes."""
    a = call.inputs[0].shape
    if call.definition.type.startswith("MatMul"):
        inner = matmul_matrices(call)[0][0 if call.arguments.bool("trans_a") else 1]
    else:
        inner = a[-2] if call.arguments.bool("trans_a") else a[-1]
    flops = 2 * call.inputs[2].elements * inner * len(outputs)
    return Cost(flops, sum(kind.nbytes for kind in call.inputs), sum(kind.nbytes for kind in outputs))


def _product_rows(asked: RowsCall) -> list[Rows | None]:
    """Rows on the first axis of the stacks; or those of A alone, which may be a matrix that is not transposed."""
    rows = asked.only(0, 1, 2)
    ranks = asked.rank(0), asked.rank(1)
    turned = asked.call.arguments.bool("trans_a")
    of_b = asked.rows[1] is not None
    fits = ranks[0] == ranks[1] > 2 if of_b else ranks[0] > 2 or (ranks[1] == 2 and not turned)
    if rows.axis != 0 or asked.rows[0] is None or asked.rows[2] is None or not fits or max(ranks) > ranks[0]:
        raise asked.mixes(rows.axis)
    found = {"A": rows, "B": rows if of_b else OF_ALL_ROWS}
    return [found[name] for name in wanted_inputs(asked.call, "AB")]


@declares
def _product_operator(name: str, doc: str, args: dict[str, str]) -> OpSchema:
    return OpSchema(
        f"{name}Gradient",
        outputs=(1, 2),
        infer=_infer_product,
        doc=f"The gradients of {name}, whose arguments it takes, from that of its output. {doc}",
        input_names=("A", "B", "dY"),
        output_names=("dA", "dB"),
        args=args | TRANSPOSE_ARGS | {"wanted": f"{WANTED_HELP}: strings out of A and B (default: both)"},
        cost=_product_cost,
        rows=_product_rows if name == "BatchMatMul" else None,
    )


@_product_operator(
    "MatMul",
    "dY may have any shape with the elements of the product. (dagexec's own, for a MatMul with a third input.)",
    {"axis_a": "where A is folded (default 1)", "axis_b": "where B is folded (default 1)"},
)
class MatMulGradient(ProductGradient):
    """dA = dY B^T and dB = A^T dY, or the transposes."""

    def operands(self) -> Operands:
        a_matrix, b_matrix = matmul_matrices(self.call())
        trans_a, trans_b = self.arguments.bool("trans_a"), self.arguments.bool("trans_b")
        dy = self.x(2).reshape(a_matrix[1 if trans_a else 0], b_matrix[0 if trans_b else 1])
        return Operands(self.x(0).reshape(a_matrix), self.x(1).reshape(b_matrix), dy, trans_a, trans_b)


@_product_operator(
    "BatchMatMul",
    "The gradient of an operand that was stretched is the sum over all matrices that it met. (dagexec's own, for a "
    "BatchMatMul with broadcast=1.)",
    {"broadcast": "1: NumPy's rules for the batch axes (default 0: they are equal)"},
)
class BatchMatMulGradient(ProductGradient):
    """dA = dY B^T and dB = A^T dY, or the transposes, for each matrix of the stack."""

    def operands(self) -> Operands:
        """Vectors are matrices of one row or column; a stack times a single matrix is one product of its rows."""
        a, b, dy = self.x(0), self.x(1), self.x(2)
        trans_a, trans_b = self.arguments.bool("trans_a"), self.arguments.bool("trans_b")
        if b.ndim == 1:
            b, dy = b[:, None], dy[..., None]
        if a.ndim == 1:
            a, dy = a[None], dy[..., None, :]
        if b.ndim == 2 and a.ndim > 2 and not trans_a:
            rows = math.prod(a.shape[:-1])
            a, dy = a.reshape(rows, a.shape[-1]), dy.reshape(rows, dy.shape[-1])
        return Operands(a, b, dy, trans_a, trans_b)


@gradient_of("FC", "FCTransposed")
def fully_connected_gradient(request: GradientRequest) -> GradientOperators:
    """FCGradient(X, W, dY) -> dW, db, dX, with `wanted` when another input than X is left out."""
    names = {1: WEIGHTS, 2: BIAS, 0: INPUT}
    found = [index for index in names if index in request.wanted]
    inputs = [request.x(0), request.x(1), request.dy(0)]
    op_type = f"{request.definition.type}Gradient"
    if found[:2] == [1, 2]:
        return request.single(op_type, inputs, found)
    return request.single(op_type, inputs, found, wanted=[names[index] for index in found])


def _operand_gradient(request: GradientRequest, name: str) -> OperatorDef:
    """The product that is the gradient of operand `name` of MatMul, BatchMatMul or Gemm, on operands as stored."""
    a, b, dy = request.x(0), request.x(1), request.dy(0)
    trans_a, trans_b = request.arguments.bool("trans_a"), request.arguments.bool("trans_b")
    folds = {0: request.arguments.int("axis_a", 1), 1: request.arguments.int("axis_b", 1), 2: 1}
    if name == "A":
        operands = [(1, b, trans_b), (2, dy, True)] if trans_a else [(2, dy, False), (1, b, not trans_b)]
    else:
        operands = [(2, dy, True), (0, a, trans_a)] if trans_b else [(0, a, not trans_a), (2, dy, False)]
    arguments: dict[str, int] = {}
    for side, (number, _, transpose) in zip("ab", operands, strict=True):
        arguments[f"trans_{side}"] = int(transpose)
        if request.definition.type == "MatMul":
            arguments[f"axis_{side}"] = folds[number]
    inputs = [blob for _, blob, _ in operands]
    index = "AB".index(name)
    if request.definition.type == "MatMul":
        inputs.append(request.x(index))
    return request.operator(request.definition.type, inputs, [request.dx(index)], **arguments)


def _by_products(request: GradientRequest) -> tuple[list[OperatorDef], dict[int, Gradient]]:
    """A product for each wanted operand."""
    wanted = [index for index in (0, 1) if index in request.wanted]
    return [_operand_gradient(request, "AB"[index]) for index in wanted], {index: request.dx(index) for index in wanted}


@gradient_of("MatMul", "BatchMatMul")
def matmul_gradient(request: GradientRequest) -> GradientOperators:
    """Two products; MatMulGradient or BatchMatMulGradient where a result is reshaped or an operand stretched."""
    wanted = [index for index in (0, 1) if index in request.wanted]
    if request.has_x(2) or request.arguments.bool("broadcast"):
        if not wanted:
            return request.result([], {})
        inputs = [request.x(0), request.x(1), request.dy(0)]
        return one_operator(request, f"{request.definition.type}Gradient", inputs, "AB")
    return request.result(*_by_products(request))


@gradient_of("Gemm")
def gemm_gradient(request: GradientRequest) -> GradientOperators:
    """Two products with the same alpha, and beta times dY summed to C's shape; none for a C that is not read."""
    operators, gradients = _by_products(request)
    beta = request.arguments.float("beta", 1.0)
    if request.has_x(2) and 2 in request.wanted and beta != 0:
        inputs, outputs = [request.dy(0), request.x(2)], [request.dx(2)]
        operators.append(request.plain_operator("ExpandGradient", inputs, outputs, factor=beta))
        gradients[2] = request.dx(2)
    return request.result(operators, gradients)
