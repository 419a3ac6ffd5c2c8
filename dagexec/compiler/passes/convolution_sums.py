"""convolution-sums: convolutions of one image whose results are added become one, as they are linear in their filters.

    a (W x + b) + c (V x) + d x + e = (a W + c V + d I) x + (a b + e)

with factors a, c, d and shifts e for each channel, and I the filter that is 1 at the middle tap. Networks that are
trained with several branches a block, and meant to be computed with one (Ding et al. 2021, arXiv:2101.03697), are
often exported as they were trained. Filters are summed where one of them has the taps of all others: so the sum takes
as long as that one alone and reads what it read, and numbers that are not finite go where they went.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from dagexec.compiler.passes.affine import Affine, Channels, Vector, affine_of
from dagexec.compiler.passes.draft import Array, Draft
from dagexec.compiler.passes.linear_layer import LinearLayer, read_layer, write_layer
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.post_operations import is_sum
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.node import Node
from dagexec.core.schema import OperatorCall, OpSchema
from dagexec.errors import ArgumentError
from dagexec.ops.base.geometry import LegacyPad, read_window
from dagexec.platform.records import dataclass

Place = tuple[int, ...]


@dataclass(frozen=True)
class _Term:
    """A convolution of an image, or the image itself, times a factor for each channel.

    Attributes:
        factor: the factors.
        layer: the convolution, whose bias is not meant; None for the image itself.
        taps: by how many pixels each tap lies behind the first pixel of the image for the first of the result, its
            number in the filter.
        stride: of the window.
        growth: pixels that the result has more than the image, where the stride is 1.
    """

    factor: Vector
    layer: LinearLayer | None
    taps: Mapping[Place, int]
    stride: Place
    growth: Place

    def fits(self, layer: LinearLayer, widest: _Term) -> bool:
        """True when `widest`, of `layer`, has the taps of this term, and results of the same sizes for any image."""
        if self.stride != widest.stride or self.growth != widest.growth or not self.taps.keys() <= widest.taps.keys():
            return False
        if self.layer is None:
            return layer.source.count == layer.result.count
        return self.layer.group == layer.group and self.layer.source == layer.source

    def weights(self, layer: LinearLayer, widest: _Term) -> Array:
        """The weights of this term in float64 with the taps of `widest`, of `layer`."""
        rows, inner = layer.weights.shape[:2]
        result = np.zeros((rows, inner, len(widest.taps)))
        for place, tap in self.taps.items():
            target = result[:, :, widest.taps[place]]
            if self.layer is None:
                target[range(rows), np.arange(rows) % inner] = self.factor
            else:
                target[:] = self.layer.weights.reshape(rows, inner, -1)[:, :, tap] * self.factor[:, None]
        return result.reshape(layer.weights.shape)


@dataclass(frozen=True)
class _LinearMap:
    """A sum of terms of one image `source`, and a shift for each channel; `members` are the operators."""

    source: str
    channels: Channels
    terms: tuple[_Term, ...]
    shift: Vector
    members: tuple[int, ...] = ()

    def then(self, affine: Affine) -> _LinearMap:
        """This map, and `affine` after it."""
        terms = tuple(replace(term, factor=term.factor * affine.factor) for term in self.terms)
        return replace(self, terms=terms, shift=self.shift * affine.factor + affine.shift)

    def plus(self, other: _LinearMap) -> _LinearMap:
        """The sum with another of the same image."""
        members = self.members + other.members
        return replace(self, terms=self.terms + other.terms, shift=self.shift + other.shift, members=members)

    def as_layer(self) -> LinearLayer | None:
        """The convolution that computes it; None where no filter has room for all."""
        widest = max(self.terms, key=lambda term: -1 if term.layer is None else len(term.taps))
        layer = widest.layer
        if layer is None or len(self.terms) < 2 or not all(term.fits(layer, widest) for term in self.terms):
            return None
        weights = np.zeros(layer.weights.shape)
        for term in self.terms:
            weights += term.weights(layer, widest)
        dtype = layer.weights.dtype
        with np.errstate(over="ignore"):  # what is not finite then stays apart
            made = replace(layer, weights=weights.astype(dtype), bias=self.shift.astype(dtype))
        return made if made.is_finite else None


def edit(draft: Draft) -> None:
    """Find the linear map that each operator ends, from those of what it reads; then replace the longest."""
    maps: dict[str, _LinearMap] = {}
    for number in draft.having(_may_be_linear):
        linear = _ended_by(draft, number, maps) if draft.is_free(number) else None
        if linear is not None:
            maps[draft[number].output[0]] = replace(linear, members=(*linear.members, number))
    for linear in reversed(maps.values()):
        *_, last = linear.members
        layer = linear.as_layer() if last in draft else None
        if layer is not None:
            draft.changed(f"{', '.join(map(draft.label, linear.members))} become one convolution")
            write_layer(draft, layer, linear.source, last)
            for member in {*linear.members} - {last, layer.number}:
                draft.remove(member)


def _ended_by(draft: Draft, number: int, maps: Mapping[str, _LinearMap]) -> _LinearMap | None:
    """The map whose result operator `number` writes; None when that is none of one image."""
    definition = draft[number]
    if definition.type == "Conv":
        return _convolution(draft, number)
    variable = [name for name in definition.input if draft.constant(name) is None]
    if len(definition.output) != 1 or not variable or not _are_alike(draft, [*variable, definition.output[0]]):
        return None
    first, *others = [_read_as(draft, name, number, maps) for name in variable]
    if not others:
        affine = affine_of(draft, number, variable[0], first.channels)
        return None if affine is None else first.then(affine)
    sign = _sign(definition)
    if not sign or len(variable) < len(definition.input):
        return None
    for other in others:
        if (other.source, other.channels) != (first.source, first.channels):
            return None
        count = first.channels.count
        first = first.plus(other.then(Affine(np.full(count, sign), np.zeros(count))))
    return first


def _convolution(draft: Draft, number: int) -> _LinearMap | None:
    layer = read_layer(draft, number)
    if layer is None or layer.inner_axis != 1:
        return None
    definition, label = draft[number], draft.label(number)
    try:
        call = OperatorCall(definition, draft.arguments(number), (), (), label)
        window = read_window(call, layer.weights.ndim - 2)
    except ArgumentError:  # which the operator will refuse
        return None
    if window.legacy_pad not in (LegacyPad.NOTSET, LegacyPad.VALID) or window.kernel != layer.weights.shape[2:]:
        return None
    axes = list(zip(window.kernel, window.dilation, window.head, window.tail, strict=True))
    places = product(*([tap * dilation - head for tap in range(kernel)] for kernel, dilation, head, _ in axes))
    taps = {place: tap for tap, place in enumerate(places)}
    growth = tuple(head + tail - (kernel - 1) * dilation for kernel, dilation, head, tail in axes)
    term = _Term(np.ones(layer.result.count), layer, taps, window.stride, growth)
    shift = np.zeros(layer.result.count) if layer.bias is None else layer.bias.astype(np.float64)
    return _LinearMap(definition.input[0], layer.result, (term,), shift)


def _are_alike(draft: Draft, names: list[str]) -> bool:
    """True for images of floats of one type and shape whose channels are known."""
    types = draft.types()
    kind, *others = {types.get(name) for name in names}
    return not others and kind is not None and kind.meta in (FLOAT32, FLOAT64) and kind.rank > 2 and bool(kind.shape[1])


def _read_as(draft: Draft, name: str, reader: int, maps: Mapping[str, _LinearMap]) -> _LinearMap:
    """The map whose result a blob is, if nobody but `reader` sees it; else that of the blob itself."""
    if name in maps and draft.only_reader(name) == reader:
        return maps[name]
    kind = draft.types()[name]
    channels = Channels(kind.shapes[0][1], 1, kind.rank, kind.meta.numpy)
    nowhere, one = (0,) * (kind.rank - 2), (1,) * (kind.rank - 2)
    itself = _Term(np.ones(channels.count), None, {nowhere: 0}, one, nowhere)
    return _LinearMap(name, channels, (itself,), np.zeros(channels.count))


def _sign(definition: Node) -> float:
    """1 for an operator that adds what it reads, -1 for a difference, 0 for others."""
    return 1.0 if is_sum(definition) else -1.0 if definition.type == "Sub" and len(definition.input) == 2 else 0.0


def _may_be_linear(schema: OpSchema) -> bool:
    return schema.post_ops is not None or _is_convolution(schema) or schema.type == "SpatialBN"


_is_convolution = of_type("Conv")
PASS = Pass(
    "convolution-sums",
    "Convolutions of one image whose results are added become one.",
    edit,
    needs=(_is_convolution, _may_be_linear),
)
