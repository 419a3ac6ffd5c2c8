"""Transposed convolutions of images N, H, W, C whose windows lie side by side, as products of our own.

With strides as large as the window each element of Y = N, H kernel, W kernel, M has one tap. Of a row of taps, results
of a row of X are a row of Y: W times [taps of the row, M] numbers, one after another. So each row of taps is a product
of the pixels of X with [C, taps of the row x M] weights, whose lines are rows of Y.

oneDNN computes them as the gradient of a convolution. The four of a U-Net took 7.9 ms with AVX-512 and 9.6 with AVX2
on one core of an Intel Xeon, and take 1.6 and 2.4 so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import BIAS, DST, SRC, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.panel_product import fits_panels, out_of_panels, pack_panels, product_step
from dagexec.ops.engines.onednn.problem import (
    COMPOSED,
    Assembled,
    Candidate,
    Memory,
    Pack,
    Problem,
    StillArguments,
    in_plain_order,
)
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.platform.records import dataclass

_PRODUCTS, _STREAM = 8e10, 2.5e10  # a second: products, bytes of weights; one core's, in `implementation`'s measure


@dataclass(frozen=True)
class Layer:
    """A transposed convolution that can be computed so.

    Attributes:
        batch, height, width, channels: of X.
        filters: M.
        rows, columns: taps of the window.
        has_bias: a number for each filter is added.
    """

    batch: int
    height: int
    width: int
    channels: int
    filters: int
    rows: int
    columns: int
    has_bias: bool

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core."""
        weights = self.channels * self.filters * self.rows * self.columns
        return self.batch * self.height * self.width * weights / _PRODUCTS + 4 * weights / _STREAM


def is_side_by_side(axes: Sequence[Axis]) -> bool:
    """True for two axes on which every element of Y has one tap: those of the convolution that is transposed."""
    return len(axes) == 2 and all(
        axis.kernel == axis.stride and axis.dilation == 1 and axis.head == 0 and axis.size == axis.kernel * axis.out
        for axis in axes
    )


def candidates(library: Library, layer: Layer) -> Iterator[Candidate]:
    """The one for a layer, with the widest vectors that fit; none where the processor lacks AVX2 and FMA."""
    machine = library.machine
    if not machine.can_run:
        return
    for lanes in (AVX512, AVX2):
        if lanes <= machine.lanes and fits_panels(layer.columns * layer.filters, layer.channels, lanes):
            isa = "avx512" if machine.lanes == AVX512 else "avx2"
            name = f"{COMPOSED}rows of taps, vectors of {lanes}:{isa}"
            yield Candidate(name, None, partial(_assemble, layer, lanes), layer.seconds, is_in_pieces=True)
            return


def _assemble(
    layer: Layer, lanes: int, problem: Problem, arrays: Mapping[int, Array], memory: Memory, pack: Pack
) -> Assembled:
    panels = _panels(layer, lanes, problem, arrays[WEIGHTS], pack)
    units, lines = layer.columns * layer.filters, layer.batch * layer.height
    bias = arrays[BIAS] if layer.has_bias else np.zeros(layer.filters, np.float32)
    bias = np.tile(bias, layer.columns)
    x = arrays[SRC].reshape(lines, layer.width, layer.channels)
    y = arrays[DST].reshape(lines, layer.rows, layer.width, units)
    steps = []
    for row in range(layer.rows):
        product = (x, panels[row], bias, y[:, row], None, problem.label, lanes)
        step = product_step(*product)
        if step is None:
            raise UnsupportedFeatureError(f"{problem.label}: no machine code can be written here")
        steps.append(step)
    return Assembled(steps, StillArguments(), frozenset())


def _panels(layer: Layer, lanes: int, problem: Problem, filters: Array, pack: Pack) -> Array:
    """The weights of each row of taps as panels: [rows, bytes]."""
    units = layer.columns * layer.filters
    shape = layer.rows, units // lanes, layer.channels, lanes
    strides = units * layer.channels, layer.channels * lanes, lanes, 1
    target = Descriptor.strided(problem.library, shape, FLOAT32, strides)

    def fill(packed: Array) -> None:
        plain = in_plain_order(problem, filters).reshape(layer.filters, layer.channels, layer.rows, layer.columns)
        for row, panels in enumerate(packed.reshape(layer.rows, -1)):
            weights = plain[:, :, row].transpose(2, 0, 1).reshape(units, layer.channels)
            pack_panels(weights, lanes, panels)

    def unpack(packed: Array, plain: Array) -> None:
        weights = np.empty((units, layer.channels), np.float32)
        for row, panels in enumerate(packed.view(np.float32).reshape(layer.rows, -1)):
            out_of_panels(panels, lanes, weights)
            plain[:, :, row] = weights.reshape(layer.columns, layer.filters, -1).transpose(1, 2, 0)

    making = Making("rows of panels", target.nbytes, fill, unpack)
    return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, making)[0].reshape(layer.rows, -1)
