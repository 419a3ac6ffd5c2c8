"""Orders in blocks: what schemas infer for them, and that NumPy's operators refuse them when they are made."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import arguments_of
from dagexec.core.registry import create_operator, schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, DagexecError, ShapeError, UnsupportedOperatorError
from dagexec.ops.base.layout import BLOCKS, ORDERS, channel_count, image_shape, logical_shape
from tests.ops.running import operator_def, run_operator

Shape = tuple[int, ...]

INFERRED: list[tuple[str, list[Shape], dict[str, ArgumentValue], Shape]] = [
    ("Conv", [(2, 2, 7, 8, 16), (48, 32, 3, 3), (48,)], {"kernel": 3, "pad": 1}, (2, 3, 7, 8, 16)),
    ("Conv", [(2, 2, 7, 8, 16), (48, 2, 3, 3)], {"kernel": 3, "group": 16}, (2, 3, 5, 6, 16)),
    ("Conv1D", [(1, 1, 9, 16), (16, 16, 2)], {"kernel": 2, "stride": 2}, (1, 1, 4, 16)),
    ("Conv3D", [(1, 1, 4, 5, 6, 16), (16, 16, 2, 2, 2)], {"kernel": 2}, (1, 1, 3, 4, 5, 16)),
    ("ConvTranspose", [(1, 2, 4, 5, 16), (32, 16, 2, 2)], {"kernel": 2, "stride": 2}, (1, 1, 8, 10, 16)),
    ("ConvTranspose", [(1, 2, 4, 5, 16), (32, 8, 2, 2), (16,)], {"kernel": 2, "group": 2}, (1, 1, 5, 6, 16)),
    ("MaxPool", [(1, 3, 8, 9, 16)], {"kernel": 3, "stride": 2}, (1, 3, 3, 4, 16)),
    ("AveragePool", [(1, 3, 8, 9, 16)], {"global_pooling": 1}, (1, 3, 1, 1, 16)),
    ("SpatialBN", [(1, 3, 8, 9, 16), *[(48,)] * 4], {"is_test": 1}, (1, 3, 8, 9, 16)),
    ("LRN", [(1, 3, 8, 9, 16)], {"size": 5}, (1, 3, 8, 9, 16)),
    ("ResizeNearest", [(1, 3, 8, 9, 16)], {"height_scale": 2.0}, (1, 3, 16, 9, 16)),
    ("ChannelShuffle", [(1, 3, 8, 9, 16)], {"group": 12}, (1, 3, 8, 9, 16)),
    ("PRelu", [(1, 3, 8, 9, 16), (48,)], {}, (1, 3, 8, 9, 16)),
    ("Concat", [(1, 3, 8, 9, 16), (1, 1, 8, 9, 16)], {}, (1, 4, 8, 9, 16)),
]


def call_of(op_type: str, shapes: list[Shape], order: str = "NCHW16c", **arguments: ArgumentValue) -> OperatorCall:
    definition = operator_def(op_type, [f"x{i}" for i in range(len(shapes))], ["y"], order=order, **arguments)
    types = tuple(TensorType(shape, FLOAT32) for shape in shapes)
    return OperatorCall(definition, arguments_of(definition, op_type), types, (None,) * len(types), op_type)


def in_blocks(block: int, shape: Shape) -> Shape:
    """A shape in blocks of 16 channels in others; that of a filter or a vector stays."""
    return (shape[0], shape[1] * 16 // block, *shape[2:-1], block) if len(shape) > 3 and shape[-1] == 16 else shape


@pytest.mark.parametrize(("order", "block"), BLOCKS.items())
@pytest.mark.parametrize(("op_type", "shapes", "arguments", "expected"), INFERRED)
def test_blocks_of_channels_are_inferred(
    op_type: str, shapes: list[Shape], arguments: dict[str, ArgumentValue], expected: Shape, order: str, block: int
) -> None:
    infer = schema_of(op_type).infer
    assert infer is not None
    call = call_of(op_type, [in_blocks(block, shape) for shape in shapes], order, **arguments)
    assert infer(call)[0].shape == in_blocks(block, expected)


REFUSED: list[tuple[str, list[Shape], dict[str, ArgumentValue], type[DagexecError], str]] = [
    ("Conv", [(1, 2, 7, 8, 16), (24, 32, 1, 1)], {"kernel": 1}, ArgumentError, "a multiple of 16 channels, found 24"),
    ("Conv", [(1, 2, 7, 8, 8), (16, 16, 1, 1)], {"kernel": 1}, ArgumentError, "must be N, C/16, spatial, 16; found"),
    ("Conv2D", [(1, 32, 7, 8), (16, 32, 1, 1)], {"kernel": 1}, ShapeError, "must have 5 axes, found 4"),
    ("MaxPool", [(1, 2, 7, 8, 17)], {"kernel": 1}, ArgumentError, "must be N, C/16, spatial, 16; found"),
    ("SpatialBN", [(1, 3, 9, 16), *[(3,)] * 4], {"is_test": 1}, ShapeError, r"must have shape \(48,\)"),
    ("PRelu", [(1, 3, 9, 16), (3,)], {}, ShapeError, r"48 \(a channel each\)"),
    ("ChannelShuffle", [(1, 3, 9, 16)], {"group": 5}, ArgumentError, "must divide the 48 channels, found 5"),
    ("InstanceNorm", [(1, 3, 9, 16), (48,), (48,)], {}, ArgumentError, "must be NCHW or NHWC, found 'NCHW16C'"),
]


@pytest.mark.parametrize(("op_type", "shapes", "arguments", "error", "message"), REFUSED)
def test_what_is_no_image_in_blocks_is_refused(
    op_type: str, shapes: list[Shape], arguments: dict[str, ArgumentValue], error: type[DagexecError], message: str
) -> None:
    infer = schema_of(op_type).infer
    assert infer is not None
    with pytest.raises(error, match=message):
        infer(call_of(op_type, shapes, **arguments))


NUMPY_ONLY = ["Conv", "ConvTranspose", "ConvGradient", "MaxPool", "AveragePool", "LpPool", "MaxPoolGradient"]


@pytest.mark.parametrize("order", BLOCKS)
@pytest.mark.parametrize("op_type", [*NUMPY_ONLY, "LRN", "SpatialBN", "ResizeNearest", "ChannelShuffle"])
def test_numpy_refuses_blocks_when_the_operator_is_made(
    op_type: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagexec.ops.engines.onednn.binding._found", [None])
    schema = schema_of(op_type)
    workspace = Workspace()
    names = [f"x{index}" for index in range(schema.inputs[0])]
    for name in names:
        workspace.feed_blob(name, np.zeros((1, 1, 4, 4, 16), np.float32))
    arguments = {name: value for name, value in {"is_test": 1, "size": 3}.items() if name in schema.args}
    definition = operator_def(op_type, names, ["y"], order=order.lower(), **arguments)
    message = f"NumPy does not support order {order}.*onednn-cpu-gomp"
    with pytest.raises(UnsupportedOperatorError, match=message):
        create_operator(definition, workspace)


@pytest.mark.parametrize(("order", "block"), BLOCKS.items())
def test_a_slope_a_channel_is_found_in_its_block(order: str, block: int) -> None:
    slopes = np.arange(2 * block, dtype=np.float32)
    x = np.full((2, 2, 3, 4, block), -1, np.float32)
    (y,) = run_operator("PRelu", [x, slopes], order=order)
    np.testing.assert_array_equal(y, np.broadcast_to(-slopes.reshape(2, 1, 1, block), y.shape))


@pytest.mark.parametrize("order", ORDERS)
def test_shapes_there_and_back(order: str) -> None:
    shape = image_shape(order, 2, 48, (5, 6), "x")
    assert logical_shape(order, shape) == (2, 48, 5, 6)
    assert channel_count(order, shape) == 48
