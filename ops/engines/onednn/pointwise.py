"""Convolutions of one tap on images N, H, W, C as products of our own with constant weights (`panel_product`).

oneDNN's are as fast with AVX2, or take up to a third more; of 3136 x 144 results, SiLU takes 290 us in its primitive,
100 in ours. Its primitives are to be made for each size of the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn import direct
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, SRC, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.panel_product import (
    fits_panels,
    out_of_panels,
    pack_panels,
    product_step,
)
from dagexec.ops.engines.onednn.panel_rows import on_panels
from dagexec.ops.engines.onednn.problem import (
    Assembled,
    Candidate,
    Memory,
    MovedArguments,
    Pack,
    Problem,
    in_plain_order,
)
from dagexec.ops.families.activation.post_ops import PostOp as GivenPostOp
from dagexec.ops.kernels.moving import tables_of
from dagexec.ops.kernels.post_ops import ADD_OTHER, PostOp
from dagexec.platform.records import dataclass

_SLOW = frozenset({"sigmoid", "tanh", "swish", "gelu_erf", "gelu_tanh", "mish"})
"""Post-ops that take long in the library's primitives."""

_PRODUCTS, _STREAM = 7e10, 2.5e10
"""A second of one core: products, bytes of weights. The library takes as long, but is to be asked for each size."""

_SAVED = 4e-10  # seconds for each result of a slow post-op


@dataclass(frozen=True)
class Layer:
    """A convolution of one tap.

    Attributes:
        rows: pixels of all images.
        channels, filters: C, M.
        has_bias: a number for each channel is added.
        cold: the weights come from memory in a run.
        post_ops: what is done then; ADD_OTHER is among them where it is not the first.
        other: the argument that is added to the result, 0 for none; DST for what it held before.
    """

    rows: int
    channels: int
    filters: int
    has_bias: bool
    cold: bool
    post_ops: tuple[PostOp, ...]
    other: int

    def fits(self, lanes: int) -> bool:
        """True for whole vectors and passes."""
        return fits_panels(self.filters, self.channels, lanes)

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core, less what the post-ops take in the library."""
        slow = sum(kind in _SLOW for kind, _, _ in self.post_ops)
        weights = 4 * self.channels * self.filters
        computed = self.rows * self.filters * max(0.0, self.channels / _PRODUCTS - slow * _SAVED)
        return computed + self.cold * weights / _STREAM


def finish(
    post_ops: Sequence[GivenPostOp], operands: Mapping[int, Array], shape: tuple[int, ...]
) -> tuple[tuple[PostOp, ...], int] | None:
    """As `direct.finish`, for one addition; where it is the first post-op, ADD_OTHER is not among those returned."""
    found = direct.finish(post_ops, operands, shape)
    if found is None or len(found[1]) > 1:
        return None
    kinds, other = [kind for kind, _, _ in found[0]], next(iter(found[1]), 0)
    if other == DST and kinds[0] != ADD_OTHER:
        return None
    return found[0][1:] if kinds[:1] == [ADD_OTHER] else found[0], other


def candidates(library: Library, layer: Layer) -> Iterator[Candidate]:
    """The one for a layer; none where the processor lacks AVX2 and FMA."""
    return on_panels(library, "panels", layer, _assemble)


def _assemble(
    layer: Layer, lanes: int, problem: Problem, arrays: Mapping[int, Array], memory: Memory, pack: Pack
) -> Assembled:
    x, y = _matrix(arrays[SRC], layer.channels), _matrix(arrays[DST], layer.filters)
    panels = _panels(layer, lanes, problem, arrays[WEIGHTS], pack)
    bias = arrays[BIAS] if layer.has_bias else np.zeros(layer.filters, np.float32)
    other = _matrix(arrays[layer.other], layer.filters) if layer.other else None
    step = product_step(x, panels, bias, y, other, problem.label, lanes, layer.post_ops)
    if step is None:
        raise UnsupportedFeatureError(f"{problem.label}: no machine code can be written here")
    moving = MovedArguments(tables_of(step), {SRC: arrays[SRC], WEIGHTS: panels})
    return Assembled([step], moving, moving.numbers)


def _matrix(image: Array, channels: int) -> Array:
    """Pixels and channels, of an image or of bytes."""
    matrix: Array = image.reshape(-1).view(np.float32).reshape(-1, channels)
    return matrix


def _panels(layer: Layer, lanes: int, problem: Problem, filters: Array, pack: Pack) -> Array:
    width = layer.channels * lanes
    shape = -(-layer.filters // lanes), layer.channels, lanes
    target = Descriptor.strided(problem.library, shape, FLOAT32, (width, lanes, 1))

    def fill(packed: Array) -> None:
        pack_panels(in_plain_order(problem, filters).reshape(layer.filters, layer.channels), lanes, packed)

    def unpack(packed: Array, plain: Array) -> None:
        matrix: Array = np.moveaxis(plain, (0, 1), (-2, -1))[(0,) * (plain.ndim - 2)]
        out_of_panels(packed.view(np.float32), lanes, matrix)

    making = Making("panels", target.nbytes, fill, unpack)
    return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, making)[0]
