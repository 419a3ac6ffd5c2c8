"""RotaryEmbedding: pairs of elements of queries and keys turned by an angle of their position.

Su et al., 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.rows import along_axis
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype


def _view(call: OperatorCall) -> tuple[int, int, int, int]:
    """Batch, positions, heads and elements of a head. Raises ArgumentError or ShapeError."""
    shape = call.require_rank(0, 3, 4)
    if len(shape) == 4:
        return shape[0], shape[2], shape[1], shape[3]
    heads = call.arguments.int("num_heads", 0)
    if heads < 1 or shape[2] % heads:
        raise ArgumentError(f"{call.label}: 'num_heads' must divide the {shape[2]} elements, found {heads}")
    return shape[0], shape[1], heads, shape[2] // heads


def _turned(call: OperatorCall) -> int:
    """How many elements of a head are turned, an even number. Raises ArgumentError."""
    width = _view(call)[3]
    turned = call.arguments.int("rotary_embedding_dim", 0) or width
    if not 0 <= turned <= width or turned % 2:
        raise ArgumentError(f"{call.label}: an even number of {width} elements can be turned, found {turned}")
    return turned


def infer_rotary(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 1, 2)
    batch, positions, *_ = _view(call)
    half = _turned(call) // 2
    call.arguments.bool("interleaved")
    if len(call.inputs) == 3:
        shape = (batch, positions, half)
    else:
        call.require_types(3, INT32, INT64)
        call.require_shape(3, (batch, positions), "a place for each position")
        shape = (call.require_rank(1, 2)[0], half)  # type: ignore[assignment]
    for index in (1, 2):
        call.require_shape(index, shape, "an angle for each pair of elements")
    return [call.inputs[0]]


def _rows(asked: RowsCall) -> Sequence[Rows | None]:
    """The batch; tables of angles, where places choose from them, are shared."""
    with_places = len(asked.rows) == 4
    return along_axis(0, 0, *((3,) if with_places else (1, 2)))(asked)


@array_function(
    "RotaryEmbedding",
    inputs=(3, 4),
    infer=infer_rotary,
    doc="Pairs (a, b) of elements of a head become (a cos - b sin, a sin + b cos), for the angles of their place. "
    "X is batch x heads x positions x elements, or batch x positions x (heads side by side). (dagexec's own, for "
    "ONNX.)",
    input_names=("X", "cos", "sin, each batch x positions x pairs, or places x pairs", "places of positions"),
    output_names=("Y",),
    args={
        "num_heads": "heads, where they are side by side",
        "rotary_embedding_dim": "how many elements, the first ones, are turned (default 0: all)",
        "interleaved": "1: pairs are neighbors; else elements of the first half and of the second (default 0)",
    },
    cost=lambda call, outputs: memory_cost(call, outputs, 6),
    onnx=(
        OnnxName("RotaryEmbedding", 23, {name: name for name in ("num_heads", "rotary_embedding_dim", "interleaved")}),
    ),
    rows=_rows,
)
def rotary_embedding(
    call: OperatorCall, x: Array, cosine: Array, sine: Array, places: Array | None = None
) -> Sequence[Array]:
    """Two halves, mixed. Raises ShapeError for a place that has no angle."""
    batch, positions, heads, width = _view(call)
    turned = _turned(call)
    if places is not None:
        if places.size and not (places.min() >= 0 and places.max() < len(cosine)):
            raise ShapeError(f"{call.label}: a place must be in [0, {len(cosine) - 1}]")
        cosine, sine = cosine[places], sine[places]
    work = compute_dtype(x.dtype)
    y = x.astype(work)
    by_head = y if x.ndim == 4 else y.reshape(batch, positions, heads, width).swapaxes(1, 2)
    cos, sin = (angle.astype(work)[:, None] for angle in (cosine, sine))
    if call.arguments.bool("interleaved"):
        first, second = by_head[..., 0:turned:2], by_head[..., 1:turned:2]
    else:
        first, second = by_head[..., : turned // 2], by_head[..., turned // 2 : turned]
    mixed = first * sin + second * cos
    np.copyto(first, first * cos - second * sin)
    np.copyto(second, mixed)
    return [y]


not_differentiable("train with Mul, Slice and Concat", "RotaryEmbedding")
