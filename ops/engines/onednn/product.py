"""Matrix products by oneDNN: fully connected layers, plain and fused, MatMul, BatchMatMul and Gemm.

A fully connected layer with constant weights is an inner product by the implementation that is measured to be fastest,
see `measured_product`. Measured on one core: 64 x 64 for one row takes 1.2 us (NumPy with bias and Relu 2.9), 8 x 2048
x 1000 takes 0.29 ms (1.8). Where nothing is measured weights are packed, but for one row large ones are read as they
are: 2048 x 1000 in 0.40 ms (packed 0.51).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, from_numpy
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW
from dagexec.ops.engines.onednn.accuracy import require_accurate
from dagexec.ops.engines.onednn.descriptors import (
    BIAS,
    DST,
    FORWARD_INFERENCE,
    SRC,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
)
from dagexec.ops.engines.onednn.dot_product import can_multiply, dot_step
from dagexec.ops.engines.onednn.finishing import finishing_step
from dagexec.ops.engines.onednn.matrix_product import matrix_step
from dagexec.ops.engines.onednn.measured_product import INNER_PRODUCT, MeasuredProduct, WeightedProduct
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.panel_product import is_for_panels, panels_of, product_step
from dagexec.ops.engines.onednn.post_ops import BINARY, append_post_ops, drops_nan
from dagexec.ops.engines.onednn.primitive import WEIGHTS_MD
from dagexec.ops.families.activation.post_ops import SUM, PostOp, read_post_ops
from dagexec.ops.families.product import einsum
from dagexec.ops.families.product import fused as fused_product
from dagexec.ops.families.product import products as product
from dagexec.ops.families.product.einsum import Labels
from dagexec.ops.kernels.post_ops import FUNCTIONS

STREAMED_BYTES = 3 << 20
"""Weights of more bytes than this are taken not to be in a cache when the layer runs."""

_PACKED_ROWS = 64  # of so many rows, packing weights in every run pays


class FullyConnected(MeasuredProduct, product.FullyConnected):
    """A fully connected layer, with post-ops where the definition has some."""

    repeats = True

    metas = (FLOAT32, BFLOAT16, FLOAT16)

    def prepare_primitive(self) -> Step:
        (rows, inner), w_matrix, _ = product.fc_matrices(self.call(), self.transposed)
        x, y = self.x(0).reshape(rows, inner), self.y(0).reshape(rows, w_matrix[1 if self.transposed else 0])
        if 0 in (inner, y.size):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to multiply")
        ways = (self._as_they_lie, self._in_panels, self._as_given)
        own = next((step for way in ways if (step := way(x, w_matrix, y)) is not None), None)
        if own is not None:
            return own
        weights = self._weights(w_matrix)
        post_ops, later = self.split_post_ops(read_post_ops(self.call()))
        require_accurate(self.onednn, post_ops, self.label)
        attributes = self.attributes()
        operands = {op.input: self._rows_of(op.input, y) for op in post_ops if op.kind in BINARY}
        further = append_post_ops(attributes, self.onednn, post_ops, operands, (2, NCHW), self.label)
        offered = {} if self.definition.input[0] in self.definition.input[1:] else {0: SRC}
        is_moved = not any(op.kind == SUM for op in post_ops)
        constant = self.input(1).constant is not None
        if constant or self.is_batch_invariant:

            def request(layouts: Mapping[int, Descriptor], attributes: Attributes) -> Sequence[object]:
                return [FORWARD_INFERENCE, *(layouts[number] for number in (SRC, WEIGHTS, BIAS, DST)), attributes]

            def matmul(layouts: Mapping[int, Descriptor], attributes: Attributes) -> Sequence[object]:
                return [*(layouts[number] for number in (SRC, WEIGHTS, BIAS, DST)), attributes]

            assembled = self.product(
                WeightedProduct(
                    INNER_PRODUCT,
                    request,
                    attributes,
                    {SRC: x, WEIGHTS: weights, BIAS: self.x(2).reshape(-1), DST: y},
                    further,
                    0,
                    rows > 1 or weights.nbytes <= STREAMED_BYTES,
                    _key(post_ops, further),
                    matmul,
                    constant,
                )
            )
            step = in_sequence([*assembled.steps, self._finished(later)])
            return self.rebindable(step, assembled.bound, offered, {0: DST}) if is_moved and not later else step
        layout, source, target, bias = (self.packed(array) for array in (weights, x, y, self.x(2)))
        wanted = Descriptor.any_layout(self.onednn, weights.shape, from_numpy(weights.dtype))
        if rows < _PACKED_ROWS:
            wanted = layout
        layouts_and_attributes = (source, wanted, bias, target, attributes)
        asked = (INNER_PRODUCT, self.onednn.engine, FORWARD_INFERENCE, *layouts_and_attributes)
        found = self.describe_fast(*asked)
        packed = found.descriptor(WEIGHTS_MD)
        memory, pack = self.parameter(1, weights, layout, packed)
        arguments = {SRC: (source, x), WEIGHTS: (packed, memory), BIAS: (bias, self.x(2)), DST: (target, y), **further}
        bound = self.bound(found, arguments)
        step = in_sequence([pack, bound.step, self._finished(later)])
        return self.rebindable(step, bound, offered, {0: DST}) if is_moved and not later else step

    def _as_they_lie(self, x: Array, w_matrix: tuple[int, int], y: Array) -> Step | None:
        """The step on weights that others read as well, which are not to be in memory twice; None elsewhere."""
        bias, is_one = self.x(2), self.input(1).meta == FLOAT32
        if self.input(1).constant is None or not self.arguments.bool("plain_weights") or self.transposed or not is_one:
            return None
        arrays = (x, y, bias, self.x(1))
        if read_post_ops(self.call()) or not all(a.dtype == np.float32 and a.flags.c_contiguous for a in arrays):
            return None
        if np.may_share_memory(x, y) or not can_multiply(self.onednn, x.shape[1]):
            return None
        self.answer(lambda: True)
        return dot_step(self.onednn, x, self.x(1).reshape(w_matrix), bias, y, self.label)

    def _in_panels(self, x: Array, w_matrix: tuple[int, int], y: Array) -> Step | None:
        """The step by kernels of our own; None where they are not for it.

        The plain weights, as a matrix of shape `w_matrix`, need not be in memory once they are in panels.
        """
        constant, bias, post_ops = self.input(1).constant, self.x(2), read_post_ops(self.call())
        outline = np.broadcast_to(np.zeros((), self.input(1).meta.numpy), (y.shape[1], x.shape[1]))
        adds = [one for one in post_ops[:1] if one.kind in (SUM, "add")]
        later, behind = post_ops[len(adds) :], post_ops[:0]
        if not self.onednn.has_primitives:
            place = next((place for place, one in enumerate(later) if one.kind not in FUNCTIONS), len(later))
            later, behind = later[:place], later[place:]
        addend = self.x(adds[0].input) if adds else None
        plain = (x, y, bias) if addend is None else (x, y, bias, addend)
        if (
            constant is None
            or not is_for_panels(self.onednn, outline)
            or any(one.kind not in FUNCTIONS for one in later)
            or (addend is not None and addend.shape != self.y(0).shape)
            or not all(array.dtype == np.float32 and array.flags.c_contiguous for array in plain)
            or np.may_share_memory(x, y)
        ):
            return None
        self.answer(lambda: True)
        lanes = self.onednn.isa.lanes
        own = tuple((one.kind, one.a, one.b) for one in later)
        packing = partial(_in_panels, outline.shape, self.transposed, lanes)
        panels = self.packed_by(packing(self), packing)
        step = product_step(x, panels, bias, y, addend, self.label, lanes, own)
        return in_sequence([step, self._finished(behind)]) if step is not None and behind else step

    def _as_given(self, x: Array, w_matrix: tuple[int, int], y: Array) -> Step | None:
        """The step on weights that a run brings, without oneDNN; None elsewhere."""
        post_ops = read_post_ops(self.call())
        if self.onednn.has_primitives or any(one.kind == SUM for one in post_ops):
            return None
        step = matrix_step(self, x, self._weights(w_matrix).T, y, has_examples=True)
        if step is None:
            return None
        self.answer(lambda: True)
        return in_sequence([step, self._finished([PostOp("add", input=2), *post_ops])])

    def _weights(self, w_matrix: tuple[int, int]) -> Array:
        """W as units x inner; it is a matrix of shape `w_matrix`."""
        w = self.x(1).reshape(w_matrix)
        weights: Array = w.T if self.transposed else w
        return weights

    def drops_nan(self) -> bool:
        """Where post-ops of the primitive do."""
        return drops_nan(self.split_post_ops(read_post_ops(self.call()))[0])

    def _finished(self, post_ops: Sequence[PostOp]) -> Step:
        """What is left to do behind the primitive."""
        operands = {one.input: self.x(one.input) for one in post_ops if one.input >= 0}
        return finishing_step(self, post_ops, self.y(0), operands)

    def _rows_of(self, index: int, y: Array) -> Array:
        """Operand `index` as a matrix that broadcasts to `y`."""
        operand = self.x(index)
        padded = (*(1,) * (self.y(0).ndim - operand.ndim), *operand.shape)
        leading = padded[:-1] if padded else ()
        if leading != self.y(0).shape[:-1] and any(size != 1 for size in leading):
            raise UnsupportedFeatureError(f"{self.label}: oneDNN cannot broadcast an operand of shape {operand.shape}")
        return operand.reshape(len(y) if leading == self.y(0).shape[:-1] else 1, -1)


@operator(product.FC.schema, engine="ONEDNN")
class FC(FullyConnected, product.FC):
    """Fully connected layer."""


@operator(product.FCTransposed.schema, engine="ONEDNN")
class FCTransposed(FullyConnected, product.FCTransposed):
    """Fully connected layer whose weights are stored transposed."""


@operator(fused_product.FusedFC.schema, engine="ONEDNN")
class FusedFC(FullyConnected, fused_product.FusedFC):
    """Fully connected layer with post-ops."""


class Product(MeasuredProduct):
    """Base of the products of two matrices, or stacks of them."""

    repeats = True

    def multiply(
        self, a: Array, b: Array, y: Array, post_ops: Sequence[PostOp] = (), addend: Array | None = None
    ) -> Step:
        """The step Y = post_ops(A B), of arrays with as many axes; `addend` is the operand 2 of post-ops.

        A and B may be transposed views, and broadcast to each other in the axes before the last two.
        """
        if 0 in (a.size, b.size):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to multiply")
        operands = {} if addend is None else {2: addend}
        is_alone = not self.onednn.has_primitives
        own = self._in_panels(a, b, y) if b.ndim == 2 and (is_alone or not post_ops) else None
        if own is None and is_alone:
            own = matrix_step(self, a, b, y, has_examples=self.x(1).ndim == 2)
            self.answer(lambda: own is not None)
        if own is not None:
            return in_sequence([own, finishing_step(self, post_ops, y, operands)]) if post_ops else own
        attributes = self.attributes()
        further = append_post_ops(attributes, self.onednn, post_ops, operands, (y.ndim, NCHW), self.label)
        constant = self.input(1).constant is not None
        if a.ndim == b.ndim == 2 and (constant or self.is_batch_invariant):

            def request(layouts: Mapping[int, Descriptor], attributes: Attributes) -> Sequence[object]:
                return [layouts[SRC], layouts[WEIGHTS], self.onednn.ffi.NULL, layouts[DST], attributes]

            def inner(layouts: Mapping[int, Descriptor], attributes: Attributes) -> Sequence[object]:
                return [FORWARD_INFERENCE, *request(layouts, attributes)]

            arrays, key = {SRC: a, WEIGHTS: b, DST: y}, _key(post_ops, further)
            asked = WeightedProduct("matmul", request, attributes, arrays, further, 1, True, key, inner, constant)
            return in_sequence(self.product(asked).steps)
        source, layout, target = (self.packed(array) for array in (a, b, y))
        wanted = Descriptor.any_layout(self.onednn, b.shape, from_numpy(b.dtype)) if constant else layout
        asked_for = ("matmul", self.onednn.engine, source, wanted, self.onednn.ffi.NULL, target, attributes)
        found = self.describe_fast(*asked_for)
        packed = found.descriptor(WEIGHTS_MD)
        memory, pack = self.parameter(1, b, layout, packed)
        packed = packed if constant else layout
        arguments = {SRC: (source, a), WEIGHTS: (packed, memory), DST: (target, y), **further}
        return in_sequence([pack, self.in_parts(found, arguments, range(y.ndim - 2)).step])

    def _in_panels(self, a: Array, b: Array, y: Array) -> Step | None:
        """The product with a constant matrix by kernels of our own; None where they are not for it."""
        constant, weights = self.input(1).constant, b.T
        alike = all(array.dtype == np.float32 and array.flags.c_contiguous for array in (a, y))
        if constant is None or not alike or not is_for_panels(self.onednn, weights) or np.may_share_memory(a, y):
            return None
        self.answer(lambda: True)
        lanes = self.onednn.isa.lanes
        packing = partial(_in_panels, weights.shape, not weights.flags.c_contiguous, lanes)
        panels = self.packed_by(packing(self), packing)
        bias = self.for_all(np.zeros(len(weights), np.float32))
        return product_step(a, panels, bias, y, None, self.label, lanes)


@operator(product.MatMul.schema, engine="ONEDNN")
class MatMul(Product, product.MatMul):
    """Product of two matrices."""

    def prepare_primitive(self) -> Step:
        a_matrix, b_matrix = product.matmul_matrices(self.call())
        a, b = self.x(0).reshape(a_matrix), self.x(1).reshape(b_matrix)
        a = a.T if self.arguments.bool("trans_a") else a
        b = b.T if self.arguments.bool("trans_b") else b
        return self.multiply(a, b, self.y(0).reshape(len(a), b.shape[1]))


@operator(product.BatchMatMul.schema, engine="ONEDNN")
class BatchMatMul(Product, product.BatchMatMul):
    """Products of two stacks of matrices."""

    def prepare_primitive(self) -> Step:
        """One matmul; vectors are matrices of one row or column, and missing axes of a stack have size 1.

        A stack times a single matrix is one product of the stack's rows.
        """
        a, b, y = self.x(0), self.x(1), self.y(0)
        a = a[None] if a.ndim == 1 else a.swapaxes(-1, -2) if self.arguments.bool("trans_a") else a
        b = b[:, None] if b.ndim == 1 else b.swapaxes(-1, -2) if self.arguments.bool("trans_b") else b
        if b.ndim == 2 and a.ndim > 2 and not self.arguments.bool("trans_a"):
            a = a.reshape(-1, a.shape[-1])
            return self.multiply(a, b, y.reshape(len(a), b.shape[1]))
        rank = max(a.ndim, b.ndim)
        a, b = (array[(None,) * (rank - array.ndim)] for array in (a, b))
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return self.multiply(a, b, y.reshape(*batch, a.shape[-2], b.shape[-1]))


@operator(product.Gemm.schema, engine="ONEDNN")
class Gemm(Product, product.Gemm):
    """General matrix product."""

    def prepare_primitive(self) -> Step:
        """One matmul, and Y = beta * (alpha / beta * A B + C) as post-ops."""
        a = self.x(0).T if self.arguments.bool("trans_a") else self.x(0)
        b = self.x(1).T if self.arguments.bool("trans_b") else self.x(1)
        alpha, beta = self.arguments.float("alpha", 1.0), self.arguments.float("beta", 1.0)
        if len(self.input_blobs) < 3 or beta == 0:
            return self.multiply(a, b, self.y(0), _scaled(alpha))
        links = [*_scaled(alpha / beta), PostOp("add", input=2), *_scaled(beta)]
        return self.multiply(a, b, self.y(0), links, self.x(2))


@operator(einsum.Einsum.schema, engine="ONEDNN")
class Einsum(OneDNNOperator, einsum.Einsum):
    """Sums of products, whose matrices are multiplied by kernels of our own."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """The default engine's plan."""
        if not self.onednn.machine.can_run:
            raise UnsupportedFeatureError(f"{self.label}: there are no kernels for it")
        self.answer(lambda: True)
        return einsum.Einsum.prepare(self)

    def multiply(self, a: Array, b: Array, y: Array, batch: Labels, rows: Labels, columns: Labels) -> Step:
        """By kernels, where they serve. Examples may be rows of A or columns of B, if there are any."""
        are_examples = bool(rows or columns)
        step = matrix_step(self, a, b, y, has_examples=are_examples, has_vectors=not columns)
        return step or super().multiply(a, b, y, batch, rows, columns)


def _in_panels(shape: tuple[int, int], is_turned: bool, lanes: int, operator: OneDNNOperator) -> Array:
    """Input 1 of an operator, weights [units, inner] of that shape, in panels; if it `is_turned`, [inner, units]."""

    def weights() -> Array:
        w: Array = operator.x(1).reshape(shape[::-1] if is_turned else shape)
        return w.T if is_turned else w

    return panels_of(operator.input(1), shape, is_turned, weights, lanes, operator.label)


def _key(post_ops: Sequence[PostOp], operands: Mapping[int, tuple[Descriptor, Array]]) -> str:
    """What an implementation's speed depends on of the post-ops: their kinds, and the shapes of their operands."""
    shapes = [str(list(array.shape)) for _, array in operands.values()]
    return " ".join(["post-ops", *(one.kind for one in post_ops), *shapes])


def _scaled(factor: float) -> list[PostOp]:
    return [] if factor == 1 else [PostOp("linear", factor, 0.0)]
