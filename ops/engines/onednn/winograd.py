"""Winograd's algorithm for windows of 3x3 with stride 1 and images N, H, W, C, out of own transforms and products.

Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015, arXiv:1509.09308; the matrices are those of
`ops/families/conv/toom_cook.py`. A tile of t x t pixels gives m x m pixels of the result, t = m + 2. A row of tiles
goes through

    strip: t, columns, C      B^T along H: whole rows of the image, with zeros around it
    v: tiles, t x t, C        B^T along W
    z: tiles, t x t, M        a product over the channels at each of the t x t places
    strip: t, columns, M      A^T along W
    y: m rows of the result   A^T along H, the bias and post-ops

The transforms are kernels of `winograd_kernels`, the products those of `panel_kernels`: t x t of them, or G times as
many. Rows of tiles are taken in blocks whose v and z stay in a cache. Pieces are some of these; where an image has few,
its transforms are pieces of rows, and its products are shared, each piece with its places' part of v and z. Each number
of the result is computed from one tile in one order, whatever the blocks and the batch. Neither code nor weights know
height and width. oneDNN has the algorithm for AVX-512 only, in layout NCHW16c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import DST, POST_OP, SRC_1, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.panel_product import pack_panels
from dagexec.ops.engines.onednn.problem import (
    COMPOSED,
    Assembled,
    Candidate,
    Memory,
    MovedArguments,
    Pack,
    Problem,
    in_one,
    in_plain_order,
)
from dagexec.ops.engines.onednn.winograd_products import Products
from dagexec.ops.engines.onednn.winograd_tables import Tables, Working
from dagexec.ops.engines.onednn.winograd_tiling import OUTPUTS, TAPS, Layer, Tiling
from dagexec.ops.families.activation.post_ops import SUM, PostOp
from dagexec.ops.families.conv.toom_cook import kronecker, minimal_filter
from dagexec.ops.kernels import winograd_kernels as kernels
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.ops.kernels.post_ops import FUNCTIONS
from dagexec.ops.kernels.post_ops import PostOp as LaterPostOp
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.tables import in_phases, shares

_COLD = 7e-10  # seconds: ten times what each byte takes where a core goes on to a piece with other working memory
_TRANSFORMED = 1 << 14  # filters of one channel that are transformed at once: they stay in a cache
_PIECE = 4 << 20  # bytes of transformed filters that wait to be packed
_FLOAT = 4  # bytes


def finish(
    post_ops: Sequence[PostOp], operands: Mapping[int, Array], shape: tuple[int, ...], *, has_bias: bool
) -> tuple[kernels.Epilogue, int, tuple[LaterPostOp, ...]] | None:
    """How a layer with these post-ops ends, the argument that is added to the result, and post-ops behind that.

    None where it cannot. `operands` are the arrays that post-ops read, by input number, and `shape` is that of the
    result.
    """
    found: list[tuple[str, float, float]] = []
    later: list[LaterPostOp] = []
    other = 0
    for place, one in enumerate(post_ops):
        if one.kind in FUNCTIONS and (later or one.kind not in (kernels.RELU, kernels.CLIP)):
            later.append((one.kind, one.a, one.b))
        elif later:
            return None
        elif one.kind in (kernels.RELU, kernels.CLIP):
            found.append((one.kind, one.a, one.b))
        elif one.kind == SUM and not other:
            other = DST
            found.append((kernels.ADD_OTHER, 0.0, 0.0))
        elif one.kind == kernels.ADD_OTHER and not other and _is_alike(operands[one.input], shape):
            other = POST_OP * (place + 1) | SRC_1
            found.append((kernels.ADD_OTHER, 0.0, 0.0))
        else:
            return None
    if sum(kind != kernels.ADD_OTHER for kind, _, _ in found) > kernels.MAX_LIMITS:
        return None
    return kernels.Epilogue(has_bias, tuple(found)), other, tuple(later)


def _is_alike(operand: Array, shape: tuple[int, ...]) -> bool:
    return operand.shape == shape and operand.dtype == np.float32 and operand.flags.c_contiguous


def is_available(library: Library) -> bool:
    """True where the kernels run: on AVX2 with FMA, within what the library is limited to."""
    return library.machine.can_run


def candidates(library: Library, layer: Layer, limit: int, cold: bool) -> Iterator[Candidate]:
    """Those for a layer, with tiles of 2 x 2 and of 4 x 4 results; none where the processor lacks AVX2 and FMA.

    `limit` is the most bytes of working memory. `cold` is True when the weights come from memory in a run.
    """
    if not is_available(library):
        return
    group = layer.filters // layer.groups
    lanes = next(lanes for lanes in (AVX512, AVX2) if lanes <= layer.lanes and group % lanes == 0)
    isa = "avx512" if layer.lanes == AVX512 else "avx2"
    for outputs in OUTPUTS:
        tiling = Tiling(layer, outputs)
        nbytes = sum(tiling.memory)
        pieces = _pieces(tiling, cold, nbytes)
        if len(pieces) * nbytes <= limit:
            name = f"{COMPOSED}winograd {outputs}x{TAPS} in vectors of {lanes}:{isa}"
            assembled = partial(_assemble, tiling, pieces, lanes)
            yield Candidate(name, None, assembled, tiling.seconds(cold), is_in_pieces=True)


def _assemble(
    tiling: Tiling,
    pieces: Sequence[range],
    lanes: int,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    """The steps of a layer, pieces of blocks one after another."""
    weights = _weights(tiling, lanes, problem, arrays[WEIGHTS], pack)
    memories = [Working(v, z, strips) for v, z, *strips in (in_one(memory, tiling.memory) for _ in pieces)]
    tables = Tables(tiling, arrays, pieces, memories)
    products = Products(tiling, lanes, weights)

    def steps_of(block: int, working: Working) -> list[list[Array]]:
        multiplied = products.calls(len(tiling.blocks[block]), working.v, working.z)
        return [tables.read(block), multiplied, tables.write(block)]

    phases: list[list[Array]] = []
    for piece, working in zip(pieces, memories, strict=True):
        of_blocks = [phase for block in piece for phase in steps_of(block, working)]
        if tiling.cut > 1:  # all pieces of a phase are of one block
            phases += of_blocks
        else:
            phases[:1] = [[*(phases[0] if phases else []), np.concatenate([*chain.from_iterable(of_blocks)])]]
    step = in_phases(phases, (tables, products, weights, memories, dict(arrays)), problem.label)
    nbytes = tables.nbytes + products.nbytes
    return Assembled([step], MovedArguments(products.written, {WEIGHTS: weights}), frozenset(), nbytes)


def _weights(tiling: Tiling, lanes: int, problem: Problem, filters: Array, pack: Pack) -> Array:
    """The filter at every place, of every group, in panels."""
    layer = tiling.layer
    shape = tiling.places * layer.filters // lanes, layer.channels // layer.groups, lanes
    target = Descriptor.strided(problem.library, shape, FLOAT32, (shape[1] * lanes, lanes, 1))
    fill = partial(_transform, tiling, lanes, problem, filters)
    making = Making(f"winograd {tiling.outputs}x{TAPS}", target.nbytes, fill)
    return pack(WEIGHTS, filters, problem.tensors[WEIGHTS][0], target, making)[0]


def _pieces(tiling: Tiling, cold: bool, nbytes: int) -> list[range]:
    """The numbers of the blocks of each piece, which has working memory of so many bytes; if they are cut, all in one.

    Blocks of 1.3 MB, of 300 us, took 14% longer in four pieces than in one.
    """
    seconds = tiling.seconds(cold)
    most = max(2, int(seconds / (_COLD * nbytes)))
    return shares(len(tiling.blocks), 1 if tiling.cut > 1 else pieces_of(seconds, min(most, MOST_OF_ONE)))


def _transform(tiling: Tiling, lanes: int, problem: Problem, array: Array, packed: Array) -> None:
    """Set `packed` to the filter at every place, G w G^T, in panels.

    It is made for a few places at a time, so that beside the result there is only a part of it in another layout.
    """
    layer = tiling.layer
    is_in_a_row = array.ndim == 1  # bytes of the filter's layout, while implementations are measured
    windows = in_plain_order(problem, array).reshape(-1, TAPS, TAPS) if is_in_a_row else array
    filters = np.ascontiguousarray(np.moveaxis(windows, (-2, -1), (0, 1))).reshape(TAPS, TAPS, -1)
    rows = max(1, _PIECE // (_FLOAT * filters.shape[2]))
    size = _FLOAT * filters.shape[2] // layer.groups
    for first in range(0, tiling.places, rows):
        places = range(first, min(first + rows, tiling.places))
        found = np.empty((len(places), filters.shape[2]), np.float32)
        _at_places(places, _filter_lines(tiling.outputs), filters, found)
        for number, weights in enumerate(
            found.reshape(-1, layer.filters // layer.groups, layer.channels // layer.groups)
        ):
            start = (first * layer.groups + number) * size
            pack_panels(weights, lanes, packed[start : start + size])


@lru_cache(maxsize=2)
def _filter_lines(outputs: int) -> Array:
    """G, which transforms a line of taps to the places of a line of a tile."""
    return kronecker([minimal_filter(outputs, TAPS).filter], np.float32)


def _at_places(places: range, lines: Array, filters: Array, found: Array) -> None:
    """`filters` [rows, columns, M * C/G] at `places` of a tile, row by row, to `found` [places, M * C/G].

    Products are rounded before they are added, on every processor: a BLAS's sums depend on its threads, and `einsum`
    fuses products and sums on some. So the bytes of a place are the same wherever and beside whichever it is made.
    """
    for start in range(0, filters.shape[2], _TRANSFORMED):
        part = filters[..., start : start + _TRANSFORMED]
        line, products = np.empty((2, *part.shape[1:]), np.float32)
        for number, place in enumerate(places):
            row, column = divmod(place, len(lines))
            if number == 0 or column == 0:
                _weighted_sum(lines[row], part, line, products)
            target = found[number, start : start + _TRANSFORMED]
            _weighted_sum(lines[column], line, target, products[0])


def _weighted_sum(weights: Array, arrays: Array, total: Array, products: Array) -> None:
    """The sum of `arrays`, each times its weight, to `total`; `products` is memory of the same shape."""
    target = total
    for weight, array in zip(weights, arrays, strict=True):
        if weight:
            np.multiply(array, weight, out=target)
            if target is products:
                total += products
            target = products
