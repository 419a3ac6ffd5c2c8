"""LinearLayer: a convolution or fully connected layer with constant weights, and how affine maps go into those."""

from __future__ import annotations

import numpy as np

from dagexec.compiler.passes.affine import Affine, Channels
from dagexec.compiler.passes.draft import Array, Draft
from dagexec.core.arguments import Arguments
from dagexec.core.registry import schema_of
from dagexec.core.traits import LayerKind
from dagexec.platform.records import dataclass

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_NOT_SET, _VALID = 0, 1  # values of legacy_pad without padding


@dataclass(frozen=True)
class LinearLayer:
    """A layer y = W x + b.

    Attributes:
        number: of the operator.
        weights: M, C/group, kernel (or M, kernel, C/group) of a convolution, C, M/group, kernel (or C, kernel,
            M/group) of a transposed one, M, C of a fully connected one.
        bias: of M elements; None when there is none.
        group: groups of channels.
        inner_axis: the axis of `weights` that counts channels of a group.
        is_transposed: the first axis of `weights` counts input channels.
        is_padded: some results read something else than x: padding.
        source, result: x and y.
    """

    number: int
    weights: Array
    bias: Array | None
    group: int
    inner_axis: int
    is_transposed: bool
    is_padded: bool
    source: Channels
    result: Channels

    @property
    def is_finite(self) -> bool:
        """True when no weight or bias is infinite or NaN, nor their sums."""
        sums = [np.add.reduce(array, axis=None) for array in (self.weights, self.bias) if array is not None]
        return bool(np.isfinite(sums).all())

    def with_output_map(self, affine: Affine) -> LinearLayer:
        """The layer with `affine` after it: each output channel's weights are scaled, and its bias is mapped."""
        factor = self._along_first(affine.factor) if not self.is_transposed else self._per_group(affine.factor)
        bias = affine.shift if self.bias is None else self.bias * affine.factor + affine.shift
        return self._with(self._scaled(affine, factor), bias)

    def with_input_map(self, affine: Affine) -> LinearLayer:
        """The layer with `affine` before it: weights are scaled by input channel, and W shift joins the bias."""
        factor = self._per_group(affine.factor) if not self.is_transposed else self._along_first(affine.factor)
        bias = None if self.bias is None else self.bias.astype(np.float64)
        if affine.shift.any():
            shifted = self.weights * self._per_group(affine.shift)
            moved = shifted.reshape(len(shifted), -1).sum(axis=1)
            bias = moved if bias is None else bias + moved
        return self._with(self._scaled(affine, factor), bias)

    def _scaled(self, affine: Affine, factor: Array) -> Array:
        """The weights times `factor`, that of `affine` along one of their axes; themselves where it is 1."""
        return self.weights if np.all(affine.factor == 1) else self.weights * factor.astype(self.weights.dtype)

    def _with(self, weights: Array, bias: Array | None) -> LinearLayer:
        typed = None if bias is None else np.asarray(bias).astype(weights.dtype)
        return LinearLayer(
            self.number, weights, typed, self.group, self.inner_axis, self.is_transposed, self.is_padded, self.source,
            self.result,
        )  # fmt: skip

    def _along_first(self, vector: Array) -> Array:
        """`vector` along the first axis of the weights."""
        return vector.reshape(-1, *(1,) * (self.weights.ndim - 1))

    def _per_group(self, vector: Array) -> Array:
        """A vector over the channels of all groups, for each row of the weights its group's part on `inner_axis`."""
        rows = vector.reshape(self.group, -1)
        if self.group > 1:  # otherwise one row serves all, and none is as large as the weights
            rows = np.repeat(rows, len(self.weights) // self.group, axis=0)
        shape = [1] * self.weights.ndim
        shape[0], shape[self.inner_axis] = rows.shape
        return rows.reshape(shape)


def read_layer(draft: Draft, number: int) -> LinearLayer | None:
    """The layer of free operator `number` with constant weights of floats; None when it is none."""
    definition = draft[number]
    kind = schema_of(definition.type).layer
    if kind is None or not draft.is_free(number):
        return None
    weights = draft.constant(definition.input[1])
    bias = draft.constant(definition.input[2]) if len(definition.input) > 2 else None
    if weights is None or weights.dtype not in _FLOATS or (len(definition.input) > 2 and bias is None):
        return None
    if bias is not None and bias.dtype != weights.dtype:  # which the operator will refuse
        return None
    if draft.constant(definition.input[0]) is not None:
        return None
    arguments = draft.arguments(number)
    layer = _fully_connected if kind is LayerKind.FULLY_CONNECTED else _convolution
    found = layer(number, kind, weights, bias, arguments)
    return found if found is None or bias is None or bias.shape == (found.result.count,) else None


def _fully_connected(
    number: int, _kind: LayerKind, weights: Array, bias: Array | None, arguments: Arguments
) -> LinearLayer | None:
    axis = arguments.int("axis", 1)
    if axis == -1:  # after axes whose number is not known, so that constants have one axis
        axis = 0
    elif axis < 1:
        return None
    if weights.ndim != 2 or arguments.int("axis_w", 1) != 1:
        return None
    units, inner = weights.shape
    source, result = (Channels(count, axis, axis + 1, weights.dtype) for count in (inner, units))
    return LinearLayer(number, weights, bias, 1, 1, False, False, source, result)


def _convolution(
    number: int, kind: LayerKind, weights: Array, bias: Array | None, arguments: Arguments
) -> LinearLayer | None:
    order, group, rank = arguments.string("order", "NCHW").upper(), arguments.int("group", 1), weights.ndim
    if rank < 3 or order not in ("NCHW", "NHWC") or group < 1 or len(weights) % group:
        return None
    inner_axis = rank - 1 if order == "NHWC" else 1
    rows, per_group = len(weights), weights.shape[inner_axis] * group
    axis = rank - 1 if order == "NHWC" else 1
    transposed = kind is LayerKind.TRANSPOSED_CONVOLUTION
    counts = (rows, per_group) if transposed else (per_group, rows)
    source, result = (Channels(count, axis, rank, weights.dtype) for count in counts)
    padded = transposed or _pads(arguments)
    return LinearLayer(number, weights, bias, group, inner_axis, transposed, padded, source, result)


def _pads(arguments: Arguments) -> bool:
    """True when the window may read padding."""
    if arguments.int("legacy_pad", _NOT_SET) not in (_NOT_SET, _VALID):
        return True
    single = any(arguments.int(name, 0) for name in ("pad", "pad_t", "pad_l", "pad_b", "pad_r"))
    return single or any(arguments.ints("pads"))


def write_layer(draft: Draft, layer: LinearLayer, source: str, slot: int) -> None:
    """Put `layer`, reading blob `source`, in the place of operator `slot`, whose output it writes.

    The operator that the layer was is taken out where it is another one.
    """
    definition = draft[layer.number]
    weights = draft.add_parameter(definition.input[1], layer.weights)
    biases = [] if layer.bias is None else [draft.add_parameter(f"{definition.output[0]}/bias", layer.bias)]
    draft.replace(slot, definition.changed(inputs=[source, weights, *biases], outputs=draft[slot].output))
    if slot != layer.number:
        draft.remove(layer.number)
