"""Winograd's algorithm for windows of 3x3 with stride 1 and images N, H, W, C, out of a primitive and own transforms.

Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015, arXiv:1509.09308; the matrices are those of
`ops/families/conv/toom_cook.py`. A tile of t x t pixels gives m x m pixels of the result, t = m + 2. A row of tiles
goes through

    strip: t, columns, C      B^T along H: whole rows of the image, with zeros around it
    v: tiles, t x t, C        B^T along W
    z: tiles, t x t, M        a product over the channels at each of the t x t places
    strip: t, columns, M      A^T along W
    y: m rows of the result   A^T along H, the bias and post-ops

The transforms are kernels of `winograd_kernels`, the products one primitive: a convolution of one tap in t x t groups,
or G times as many. Rows of tiles are taken in blocks whose v and z stay in a cache. Pieces are some of these; where
an image has few, its transforms are pieces of rows, and its product is cut into products of some places, each of which
has its part of v and z. Each number of the result is computed from one tile in one order, whatever the blocks and the
batch. oneDNN has the algorithm for AVX-512 only, in layout NCHW16c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NHWC
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.bound import BoundPrimitive
from dagexec.ops.engines.onednn.descriptors import (
    DST,
    FORWARD_INFERENCE,
    POST_OP,
    SCRATCHPAD,
    SRC,
    SRC_1,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
    aligned_empty,
)
from dagexec.ops.engines.onednn.division import adds_up_alike
from dagexec.ops.engines.onednn.operator import reorder
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.pieces import Together, side_by_side
from dagexec.ops.engines.onednn.primitive import EXEC_ARG_MD, SCRATCHPAD_MD, PrimitiveDescriptor, describe
from dagexec.ops.engines.onednn.problem import (
    COMPOSED,
    Asked,
    Assembled,
    Candidate,
    Memory,
    Pack,
    Problem,
    in_one,
    in_plain_order,
)
from dagexec.ops.engines.onednn.winograd_tables import Tables
from dagexec.ops.engines.onednn.winograd_tiling import OUTPUTS, TAPS, Layer, Tiling
from dagexec.ops.families.activation.post_ops import SUM, PostOp
from dagexec.ops.families.conv.toom_cook import kronecker, minimal_filter
from dagexec.ops.kernels import winograd_kernels as kernels
from dagexec.ops.kernels.post_ops import FUNCTIONS
from dagexec.ops.kernels.post_ops import PostOp as LaterPostOp
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.tables import in_pieces, shares

_PRODUCT = "brgconv_1x1"  # the library's other implementations are slow in so many groups
_DIRECT = 1  # dnnl_alg_kind_t
_COLD = 7e-10  # seconds: ten times what each byte takes where a core goes on to a piece with other working memory
_TRANSFORMED = 2048  # filters of one channel that are transformed at once: they stay in a cache
_PIECE = 8 << 20  # bytes of transformed filters that wait for the layout of the product


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


def candidates(library: Library, label: str, layer: Layer, limit: int, cold: bool) -> Iterator[Asked]:
    """Those for a layer, with tiles of 2 x 2 and of 4 x 4 results; none where the processor lacks AVX2 and FMA.

    `limit` is the most bytes of working memory. `cold` is True when the weights come from memory in a run.
    """
    if not is_available(library):
        return
    for outputs in OUTPUTS:
        tiling = Tiling(layer, outputs)
        likely = Candidate(f"{COMPOSED}winograd {outputs}x{TAPS} ", None, seconds=tiling.seconds(cold))
        yield Asked(likely, partial(_candidate, library, label, tiling, likely, limit, cold))


def _candidate(
    library: Library, label: str, tiling: Tiling, likely: Candidate, limit: int, cold: bool
) -> Candidate | None:
    """With its product; None where there is none, or too little working memory."""
    try:
        description = _product(library, label, tiling)
    except UnsupportedFeatureError:
        return None
    nbytes = sum(tiling.memory(description))
    pieces = _pieces(tiling, cold, nbytes)
    if len(pieces) * nbytes > limit:
        return None
    assembled, alike = partial(_assemble, tiling, pieces, description), adds_up_alike(description.name)
    name = likely.name + description.name
    return replace(likely, name=name, description=description, assemble=assembled, is_in_pieces=alike)


def _product(library: Library, label: str, tiling: Tiling) -> PrimitiveDescriptor:
    """A product for a block. Raises UnsupportedFeatureError when there is no fast one."""
    layer = tiling.layer
    tiles = tiling.block_rows * tiling.columns
    source, target = (
        Descriptor.of_order(library, (1, tiling.places_apart * channels, tiles, 1), FLOAT32, NHWC)
        for channels in (layer.channels, layer.filters)
    )
    weights = Descriptor.any_layout(library, tiling.filter_shape, FLOAT32)
    images = source.handle, weights.handle, library.ffi.NULL, target.handle
    ones, zeros = library.dims((1, 1)), library.dims((0, 0))
    geometry = ones, zeros, zeros, zeros, Attributes(library).handle
    kind = FORWARD_INFERENCE, _DIRECT
    found = describe(library, label, "convolution_forward", library.engine, *kind, *images, *geometry)
    for one in found.implementations():
        if one.name.startswith(_PRODUCT):
            return one
    raise UnsupportedFeatureError(f"{label}: oneDNN has no fast product of many groups")


def _assemble(
    tiling: Tiling,
    pieces: Sequence[range],
    description: PrimitiveDescriptor,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    """The steps of a layer, pieces of blocks one after another."""
    layouts = {number: description.descriptor(EXEC_ARG_MD, number) for number in (SRC, WEIGHTS, DST)}
    filters, given = arrays[WEIGHTS], problem.tensors[WEIGHTS][0]
    fill = partial(_transform, tiling, problem, filters, layouts[WEIGHTS])
    making = Making(f"winograd {tiling.outputs}x{TAPS}", tiling.cut * layouts[WEIGHTS].nbytes, fill)
    weights, _ = pack(WEIGHTS, filters, given, layouts[WEIGHTS], making)
    computed: list[list[Step]] = []
    bounds: list[BoundPrimitive] = []
    nbytes = 0
    for piece in pieces:
        v, z, *others = in_one(memory, tiling.memory(description))
        scratchpads, strips = others[: tiling.cut], others[tiling.cut :]
        tables = Tables(tiling, arrays, v, z, strips)
        products = []
        for number, scratchpad in enumerate(scratchpads):
            parts = {
                argument: (layouts[argument], array[number * layouts[argument].nbytes :])
                for argument, array in ((SRC, v), (WEIGHTS, weights), (DST, z))
            }
            parts[SCRATCHPAD] = description.descriptor(SCRATCHPAD_MD), scratchpad
            products.append(description.create().bind(parts, problem.label))
        call = partial(in_pieces, keeps=(tables, v, z, strips, dict(arrays)), label=problem.label)
        computed.append([])
        for block in tiling.blocks[piece.start : piece.stop]:
            rows = [block[part.start : part.stop] for part in shares(len(block), len(strips))]
            read = call([tables.read(part, block.start, strip) for strip, part in enumerate(rows)])
            write = call([tables.write(part, block.start, strip) for strip, part in enumerate(rows)])
            computed[-1] += [read, *side_by_side([[bound.step] for bound in products]), write]
        bounds += products
        nbytes += tables.nbytes
    return Assembled(side_by_side(computed), Together(bounds, tiling.cut), frozenset(), nbytes)


def _pieces(tiling: Tiling, cold: bool, nbytes: int) -> list[range]:
    """The numbers of the blocks of each piece, which has working memory of so many bytes; if they are cut, all in one.

    Blocks of 1.3 MB, of 300 us, took 14% longer in four pieces than in one.
    """
    seconds = tiling.seconds(cold)
    most = max(2, int(seconds / (_COLD * nbytes)))
    return shares(len(tiling.blocks), 1 if tiling.cut > 1 else pieces_of(seconds, min(most, MOST_OF_ONE)))


def _transform(tiling: Tiling, problem: Problem, array: Array, wanted: Descriptor, packed: Array) -> None:
    """Set `packed` to the filter at every place, G w G^T, in the layout of the product.

    It is made for a few places at a time, so that beside the result there is only a part of it in another layout.
    """
    library, label = problem.library, problem.label
    matrix = _filter_matrix(tiling.outputs)
    is_in_a_row = array.ndim == 1  # bytes of the filter's layout, while implementations are measured
    windows = in_plain_order(problem, array).reshape(-1, TAPS, TAPS) if is_in_a_row else array
    filters = np.ascontiguousarray(np.moveaxis(windows, (-2, -1), (0, 1))).reshape(TAPS * TAPS, -1)
    parts, layout = _layouts(tiling, wanted)
    parts *= tiling.cut
    rows = len(matrix) // parts
    found = np.empty((rows, filters.shape[1]), np.float32)
    source = Descriptor.of(library, found.reshape(-1, *tiling.filter_shape[1:]), FLOAT32)
    for number in range(parts):
        _at_places(matrix[number * rows : (number + 1) * rows], filters, found)
        target = packed[number * layout.nbytes : (number + 1) * layout.nbytes]
        reorder(library, label, source, layout, found, target, aligned_empty).run_once()


@lru_cache(maxsize=2)
def _filter_matrix(outputs: int) -> Array:
    """What transforms the taps of a window to places."""
    return kronecker([minimal_filter(outputs, TAPS).filter] * 2, np.float32)


def _layouts(tiling: Tiling, wanted: Descriptor) -> tuple[int, Descriptor]:
    """In how many parts of equal layout, one behind another, the filter of the product is made, and that layout."""
    groups, *shape = tiling.filter_shape
    least = -(-wanted.nbytes // _PIECE)
    for pieces in range(min(least, tiling.places_apart), tiling.places_apart + 1):
        if tiling.places_apart % pieces == 0:
            piece = wanted.first([groups // pieces, *shape])
            if piece.nbytes * pieces == wanted.nbytes:
                return pieces, piece
    return 1, wanted


def _at_places(matrix: Array, filters: Array, found: Array) -> None:
    """`matrix` [places, taps] times `filters` [taps, M * C/G] to `found` [places, M * C/G].

    Not by a BLAS, whose sums depend on the threads that it has at the moment: batches may have the filter in layouts of
    their own, which are made at different times and must hold the same bytes. A row of the product has the same bytes
    whatever rows are beside it.
    """
    for start in range(0, filters.shape[1], _TRANSFORMED):
        part = slice(start, start + _TRANSFORMED)
        np.einsum("pt,tf->pf", matrix, filters[:, part], out=found[:, part])
