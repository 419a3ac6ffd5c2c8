"""Quantized operators by oneDNN: products of 8-bit integers summed in 32 bits, four a lane (VNNI).

Where the processor has no instruction that sums exactly (older ones saturate 16-bit pairs), NumPy computes, but for
products with constant weights (`integer_product`). Sums are
exact; scaling is in float32 as the schemas say it, but with the bias added after the scaling and factors multiplied in
another order, so that a result that lies halfway between two integers, within the rounding of float32, may be the
other one: outputs of integers are at most one step from the default engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT8, INT32, TypeMeta, from_numpy
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW, NHWC, channels_last
from dagexec.ops.engines.onednn.bound import BoundPrimitive
from dagexec.ops.engines.onednn.convolution_computation import geometry, grouped, padding_of, require_window
from dagexec.ops.engines.onednn.cutting import Parts, parts_of_whole
from dagexec.ops.engines.onednn.descriptors import (
    ATTR_SCALES,
    ATTR_ZERO_POINTS,
    BIAS,
    DST,
    FORWARD_INFERENCE,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
)
from dagexec.ops.engines.onednn.division import misreads
from dagexec.ops.engines.onednn.integer_product import byte_products
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.pieces import Part, rows_of_image
from dagexec.ops.engines.onednn.post_ops import append_post_ops, drops_nan
from dagexec.ops.engines.onednn.primitive import WEIGHTS_MD, PrimitiveDescriptor
from dagexec.ops.families.activation.post_ops import PostOp, read_post_ops
from dagexec.ops.families.quantized import addition, convolution, linear, product
from dagexec.ops.families.quantized.accumulation import Operand, fits_int32
from dagexec.ops.families.quantized.requantization import Requantization, clip_bounds
from dagexec.ops.families.quantized.scales import BYTES, checked_scales, scale_argument
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of_products
from dagexec.ops.kernels.tables import shares
from dagexec.platform.records import dataclass

_CONVOLUTION_DIRECT = 1
_BINARY_ADD = 0x1FFF0
_NARROW = 4  # products of bytes in the time of one of float32
_ROWS = 8  # of a piece of a matrix, at least

Arguments = dict[int, tuple[Descriptor, Array]]


@dataclass(frozen=True)
class Scaling:
    """How oneDNN scales a sum: in units of `unit`, in which an addend needs no scale of its own.

    Attributes:
        factor: what a weight's scale is multiplied by.
        destination: the scale of the destination in those units.
        post_ops: with bounds in those units, and the addend's zero point subtracted.
        shift: added to the bias: the addend's zero point, where the addend comes first.
    """

    factor: np.float32
    destination: np.float32
    post_ops: tuple[PostOp, ...]
    shift: float

    @classmethod
    def of(cls, what: Requantization, x_scale: np.float32, addend: TypeMeta | None) -> Scaling:
        """The scaling of an operator with an addend of that type, if it has one."""
        unit = what.y_scale if addend is None else np.float32(1) if addend is FLOAT32 else what.add_scale
        first_adds = bool(what.post_ops) and what.post_ops[0].kind == "add"
        post_ops: list[PostOp] = []
        for op in _bounds_in(what.post_ops, unit):
            post_ops.append(op)
            if op.kind == "add" and what.add_zero_point and not first_adds:
                post_ops.append(PostOp("linear", 1.0, -float(what.add_zero_point)))
        shift = -float(what.add_zero_point) if first_adds else 0.0
        return cls(np.float32(x_scale / unit), np.float32(what.y_scale / unit), tuple(post_ops), shift)


class QuantizedProduct(OneDNNOperator):
    """What QuantConv and QuantFC share: scales, zero points, and the bias in float32."""

    metas: ClassVar[Collection[TypeMeta]] = BYTES

    def drops_nan(self) -> bool:
        """Where a Y of float32 is the sum with an operand of float32, and bounded."""
        return _drops_nan(self)

    @property
    def sums_bytes(self) -> bool:
        """True where oneDNN is there and has instructions that sum products of bytes exactly."""
        return self.onednn.has_primitives and self.onednn.isa.int8

    def require_exact(self, terms: int, meta: TypeMeta) -> None:
        """Raise UnsupportedFeatureError where sums of so many products of a `meta` and int8 might not be exact."""
        if not self.onednn.isa.int8:
            raise UnsupportedFeatureError(f"{self.label}: the processor has no exact 8-bit products (VNNI)")
        if not fits_int32(terms, meta, INT8):
            raise UnsupportedFeatureError(f"{self.label}: a sum of {terms} products may not fit 32 bits")

    def vector(self, values: Array) -> tuple[Descriptor, Array]:
        """A vector as an argument of an execution."""
        return Descriptor.strided(self.onednn, values.shape, from_numpy(values.dtype), (1,)), values

    def scale_arguments(
        self, what: Requantization, scaling: Scaling, attributes: Attributes, mask: int, zero_point: int
    ) -> tuple[Arguments, list[Step]]:
        """Scales, zero points and the bias, and the steps that compute those that are not constant.

        `mask` says which axes of the weights have scales: one for each output channel.
        """
        units, scales = len(self.x(1)), self.x(2)
        factors = self.scratch((units,), np.float32)
        bias = self.scratch((units,), np.float32)
        steps: list[Step] = [partial(np.multiply, scales.reshape(-1), scaling.factor, out=factors)]
        bias.fill(scaling.shift)
        if self.arguments.bool("bias"):
            steps.append(partial(np.multiply, self.x(3), factors, out=bias, casting="same_kind"))
            if scaling.shift:
                steps.append(partial(np.add, bias, np.float32(scaling.shift), out=bias))
        attributes.scales(WEIGHTS, mask)
        arguments = {ATTR_SCALES | WEIGHTS: self.vector(factors)}
        if scaling.destination != 1:
            attributes.scales(DST, 0)
            arguments[ATTR_SCALES | DST] = self.vector(np.array([scaling.destination], np.float32))
        for argument, value in ((SRC, zero_point), (DST, what.y_zero_point)):
            if value:
                attributes.zero_points(argument, 0)
                arguments[ATTR_ZERO_POINTS | argument] = self.vector(np.array([value], np.int32))
        arguments[BIAS] = self.vector(bias)
        checks = checked_scales(self, 2)
        if all(self.input(index).constant is not None for index in range(2, 3 + self.arguments.bool("bias"))):
            in_sequence(steps)()
            return arguments, checks
        return arguments, checks + steps

    def last(self, array: Array, *, load: bool = True) -> tuple[Array, list[Step]]:
        """An image tensor of this operator as NHWC, and the steps that copy it there."""
        if channels_last(self.call()):
            return array, []
        shape = (array.shape[0], *array.shape[2:], array.shape[1])
        copy = self.scratch(shape, array.dtype)
        if not load:
            return copy, []
        return copy, [self.reorder(self.image(array, NCHW), self.image(copy, NHWC), array, copy).step]

    def in_given_parts(
        self, asked: Sequence[tuple[PrimitiveDescriptor, Arguments]], whole: Mapping[int, Array]
    ) -> BoundPrimitive | Parts:
        """Primitives on their arguments, parts of the `whole`."""
        return self.bound(*asked[0]) if len(asked) == 1 else parts_of_whole(asked, whole, self.bound)

    def fast(self, found: PrimitiveDescriptor, padding: int, *, adds_in_groups: bool = False) -> PrimitiveDescriptor:
        """The first implementation that is compiled for the processor, and right with so many columns of padding.

        A plain loop is slower than NumPy's BLAS. The library's product on unrolled windows adds other elements than
        those in the same place to the results of groups (oneDNN 3.1).
        """
        for implementation in found.implementations():
            name = implementation.name
            is_wrong = misreads(name, padding) or (adds_in_groups and "gemm" in name)
            if not (name.startswith(("ref", "gemm:ref")) or is_wrong):
                return implementation
        raise UnsupportedFeatureError(f"{self.label}: oneDNN has no fast convolution of this geometry")

    def addend_meta(self, what: Requantization) -> TypeMeta | None:
        """The type of what post_ops add."""
        return None if what.addend is None else self.input(what.addend).meta


def _drops_nan(owner: Operator) -> bool:
    return owner.y(0).dtype == np.float32 and drops_nan(read_post_ops(owner.call()))


@operator(convolution.QUANT_CONV, engine="ONEDNN")
class QuantConv(QuantizedProduct, convolution.QuantConv):
    """One convolution primitive on NHWC images; those in NCHW are copied before and after it."""

    def prepare_primitive(self) -> Step:
        """The primitive with what is done to its sums as attributes."""
        call = self.call()
        _, what = convolution.read_conv(call)
        window, axes = convolution.quant_window(call)
        require_window(axes, self.label)
        weights, group = self.x(1), self.arguments.int("group", 1)
        self.require_exact(weights[0].size, self.input(0).meta)
        if not weights.size or not self.x(0).size:
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        scaling = Scaling.of(what, scale_argument(call, "x_scale"), self.addend_meta(what))
        attributes = self.attributes()
        zero_point = self.arguments.int("x_zero_point", 0)
        arguments, before = self.scale_arguments(what, scaling, attributes, 3 if group > 1 else 1, zero_point)
        x, load = self.last(self.x(0))
        y, _ = self.last(self.y(0), load=False)
        operands = {}
        if what.addend is not None:
            operands[what.addend], fetch = self.last(self.x(what.addend))
            before += fetch
        logical = grouped(weights, group, window.channels_last)
        wanted = Descriptor.any_layout(self.onednn, logical.shape, INT8)
        layout = self.packed(logical)
        known: dict[Hashable, PrimitiveDescriptor] = {}
        packed: list[tuple[Descriptor, Array, Step]] = []

        def described(part: Part) -> tuple[PrimitiveDescriptor, Arguments]:
            own, inner = attributes.part({}), part.axes(axes)
            source, target = part.source(x, axes), part.result(y)
            added = {index: part.operand(operand, y) for index, operand in operands.items()}
            further = append_post_ops(own, self.onednn, scaling.post_ops, added, (y.ndim, NHWC), self.label)
            images = self.image(source, NHWC), self.image(target, NHWC)
            form = tuple(inner), images[0].key, images[1].key
            if form not in known:
                asked = images[0], wanted, arguments[BIAS][0], images[1], *geometry(inner), own
                kind = FORWARD_INFERENCE, _CONVOLUTION_DIRECT
                known[form] = self.fast(
                    self.describe("convolution_forward", self.onednn.engine, *kind, *asked),
                    padding_of("convolution_forward", inner[-1]),
                    adds_in_groups=group > 1 and bool(operands),
                )
            found = known[form]
            wished = found.descriptor(WEIGHTS_MD)
            filters = next((one for one in packed if one[0] == wished), None)
            if filters is None:
                filters = wished, *self.parameter(1, logical, layout, wished)
                packed.append(filters)
            given = {SRC: (images[0], source), WEIGHTS: filters[:2], DST: (images[1], target)}
            return found, {**arguments, **further, **given}

        products = y.size * weights[0].size // len(x)
        count = pieces_of_products(products // _NARROW, self.onednn.isa.lanes, MOST_OF_ONE)
        parts = [Part()]
        if self.input(1).constant is not None and not self.asks:
            rows = rows_of_image(axes, count)
            parts = [replace(part, images=(image, image + 1)) for image in range(len(x)) for part in rows]
        bound = self.in_given_parts([described(part) for part in parts], {SRC: x, DST: y})
        result, packing = self.image(y, NHWC), [step for _, _, step in packed]
        store = [] if y is self.y(0) else [self.reorder(result, self.image(self.y(0), NCHW), y, self.y(0)).step]
        step = in_sequence([*before, *load, *packing, bound.step, *store])
        return self.rebindable(step, bound, {0: SRC}, {0: DST}) if x is self.x(0) and y is self.y(0) else step


@operator(product.QUANT_FC, engine="ONEDNN")
class QuantFC(QuantizedProduct, product.QuantFC):
    """One matrix product."""

    def prepare_primitive(self) -> Step:
        """The primitive with what is done to its sums as attributes; where it would not be exact, a kernel's sums."""
        call = self.call()
        _, what = product.read_fc(call)
        units, inner = self.x(1).shape
        if not self.sums_bytes:
            factors = self.x(0).reshape(-1, inner), Operand(self, 1, None, np.asarray)
            own = byte_products(self, *factors, self.arguments.int("x_zero_point", 0), is_turned=False)
            if own is not None:
                self.answer(lambda: True)
                return self.finished(*own)
        self.require_exact(inner, self.input(0).meta)
        if not inner:
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        scaling = Scaling.of(what, scale_argument(call, "x_scale"), self.addend_meta(what))
        attributes = self.attributes()
        arguments, before = self.scale_arguments(what, scaling, attributes, 2, self.arguments.int("x_zero_point", 0))
        x, y, weights = self.x(0).reshape(-1, inner), self.y(0).reshape(-1, units), self.x(1).T
        operands = {} if what.addend is None else {what.addend: self.x(what.addend).reshape(y.shape)}
        bias = arguments[BIAS][1].reshape(1, units)
        arguments[BIAS] = (self.packed(bias), bias)
        wanted, layout = Descriptor.any_layout(self.onednn, weights.shape, INT8), self.packed(weights)
        packing: list[Step] = []

        def described(part: range) -> tuple[PrimitiveDescriptor, Arguments]:
            own, rows = attributes.part({}), slice(part.start, part.stop)
            added = {index: operand[rows] for index, operand in operands.items()}
            further = append_post_ops(own, self.onednn, scaling.post_ops, added, (2, NCHW), self.label)
            source, result = self.packed(x[rows]), self.packed(y[rows])
            found = self.describe("matmul", self.onednn.engine, source, wanted, arguments[BIAS][0], result, own)
            if found.is_reference:
                raise UnsupportedFeatureError(f"{self.label}: oneDNN has no fast product of these sizes")
            target = found.descriptor(WEIGHTS_MD)
            packed, pack = self.parameter(1, weights, layout, target)
            packing.append(pack)
            return found, {
                **arguments, **further, SRC: (source, x[rows]), WEIGHTS: (target, packed), DST: (result, y[rows])
            }  # fmt: skip

        count = 1
        if self.input(1).constant is not None and not self.asks:
            products = len(x) * weights.size // _NARROW
            count = max(1, min(pieces_of_products(products, self.onednn.isa.lanes), len(x) // _ROWS))
        bound = self.in_given_parts([described(part) for part in shares(len(x), count)], {SRC: x, DST: y})
        pack = packing[0]
        return self.rebindable(in_sequence([*before, pack, bound.step]), bound, {0: SRC}, {0: DST})


@operator(addition.QUANT_ADD, engine="ONEDNN")
class QuantAdd(OneDNNOperator, addition.QuantAdd):
    """One binary primitive with scales; zero points are constants that post-ops add."""

    metas: ClassVar = BYTES

    def drops_nan(self) -> bool:
        return _drops_nan(self)

    def prepare_primitive(self) -> Step:
        """The sum as the primitive, what comes after the addition as post-ops."""
        call = self.call()
        _, what = addition.read_add(call)
        if not what.post_ops or what.post_ops[0].kind != "add":
            raise UnsupportedFeatureError(f"{self.label}: a post-op comes before the addition")
        a, b, y = (array.reshape(-1) for array in (self.x(0), self.x(1), self.y(0)))
        attributes = self.attributes()
        a_scale = np.float32(scale_argument(call, "x_scale") / what.y_scale)
        b_scale = np.float32(what.add_scale / what.y_scale)
        arguments: Arguments = {}
        for argument, scale in ((SRC, a_scale), (SRC_1, b_scale)):
            attributes.scales(argument, 0)
            arguments[ATTR_SCALES | argument] = self._scale(scale)
        shift = -float(self.arguments.int("x_zero_point", 0) * a_scale + what.add_zero_point * b_scale)
        links = _bounds_in(what.post_ops[1:], what.y_scale)
        links = ([PostOp("linear", 1.0, shift)] if shift else []) + links
        if what.y_zero_point:
            links.append(PostOp("linear", 1.0, float(what.y_zero_point)))
        append_post_ops(attributes, self.onednn, links, {}, (1, NCHW), self.label)
        first, second, result = self.packed(a), self.packed(b), self.packed(y)
        found = self.describe("binary", self.onednn.engine, _BINARY_ADD, first, second, result, attributes)
        if found.is_reference:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no fast sum of these types")
        bound = self.in_parts(found, arguments | {SRC: (first, a), SRC_1: (second, b), DST: (result, y)})
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})

    def _scale(self, value: np.float32) -> tuple[Descriptor, Array]:
        return Descriptor.strided(self.onednn, (1,), FLOAT32, (1,)), np.array([value], np.float32)


def _bounds_in(post_ops: Iterable[PostOp], unit: np.float32) -> list[PostOp]:
    """`post_ops` with the bounds of a clip in units of `unit`."""

    def scaled(clip: PostOp) -> PostOp:
        low, high = clip_bounds(clip, unit)
        return replace(clip, a=float(low), b=float(high))

    return [scaled(op) if op.kind == "clip" else op for op in post_ops]


class _LinearCopy(OneDNNOperator):
    """A copy between floats and integers with one scale and one zero point, which must be constants."""

    def copied(self, argument: int) -> Step:
        """The reorder with the scale and zero point of `argument`, SRC or DST: the side that has the integers."""
        x, y = self.x(0), self.y(0)
        meta, zero = self.input(1).meta, 0
        if self.x(1).size != 1 or meta is not FLOAT32 or FLOAT32 not in (self.input(0).meta, self.output(0).meta):
            raise UnsupportedFeatureError(f"{self.label}: scales along an axis, or other types than float32")
        parameters = range(1, len(self.input_blobs))
        if any(self.input(index).constant is None for index in parameters):
            raise UnsupportedFeatureError(f"{self.label}: the scale or the zero point is not constant")
        checked_scales(self, 1)
        if len(self.input_blobs) == 3:
            zero = int(self.x(2).reshape(-1)[0])
        attributes = self.attributes()
        attributes.scales(argument, 0)
        scale = np.array([self.x(1).reshape(-1)[0]], np.float32)
        arguments: Arguments = {ATTR_SCALES | argument: (self.packed(scale), scale)}
        if zero:
            attributes.zero_points(argument, 0)
            point = np.array([zero], np.int32)
            arguments[ATTR_ZERO_POINTS | argument] = (Descriptor.strided(self.onednn, (1,), INT32, (1,)), point)
        source, target = self.packed(x.reshape(-1)), self.packed(y.reshape(-1))
        engine = self.onednn.engine
        found = self.describe("reorder", source, engine, target, engine, attributes)
        if found.is_reference:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no fast copy between these types")
        bound = self.in_parts(found, arguments | {SRC: (source, x), DST: (target, y)})
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})


@operator(linear.QuantizeLinear.schema, engine="ONEDNN")
class QuantizeLinear(_LinearCopy, linear.QuantizeLinear):
    """A copy with conversion; it multiplies with 1 / scale, so that a tie may go to the other neighbor."""

    metas: ClassVar = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        if self.output(0).meta not in BYTES:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no {self.output(0).meta}")
        return self.copied(DST)


@operator(linear.DequantizeLinear.schema, engine="ONEDNN")
class DequantizeLinear(_LinearCopy, linear.DequantizeLinear):
    """A copy with conversion."""

    metas: ClassVar = BYTES

    def prepare_primitive(self) -> Step:
        return self.copied(SRC)
