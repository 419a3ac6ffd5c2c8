"""Reorder, by NumPy and by oneDNN: one image tensor in every order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import Workspace
from dagexec.core.registry import create_operator
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.layout import BLOCKS, ORDERS
from tests.ops.onednn.engine import ENGINES, needs_onednn
from tests.ops.running import Array, operator_def, run_operator


def stored(image: Array, order: str) -> Array:
    """An N, C, spatial image in `order`, element by element."""
    batch, channels, *sizes = image.shape
    if order == "NCHW":
        return image.copy()
    block = BLOCKS.get(order, channels)
    shape = (batch, *sizes, channels) if order == "NHWC" else (batch, channels // block, *sizes, block)
    found = np.empty(shape, image.dtype)
    for channel in range(channels):
        if order == "NHWC":
            found[..., channel] = image[:, channel]
        else:
            found[:, channel // block, ..., channel % block] = image[:, channel]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40)
@given(data=st.data())
def test_any_order_gives_any_other(engine: str, data: st.DataObject) -> None:
    source, target = data.draw(st.sampled_from(ORDERS)), data.draw(st.sampled_from(ORDERS))
    block = max(BLOCKS.get(order, 1) for order in (source, target))
    channels = block * data.draw(st.integers(1, 3 if block > 1 else 40))
    shape = (data.draw(st.integers(1, 3)), channels, *data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([np.float32, np.float64, np.int8, np.int32, np.int64]))
    image = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    (found,) = run_operator("Reorder", [stored(image, source)], engine=engine, from_order=source, to_order=target)
    np.testing.assert_array_equal(found, stored(image, target))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_batch_is_reordered(engine: str) -> None:
    (found,) = run_operator("Reorder", [np.ones((0, 32, 5, 5), np.float32)], engine=engine, to_order="NCHW16c")
    assert found.shape == (0, 2, 5, 5, 16)


def test_channels_that_are_no_blocks_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="multiple of 16 channels, found 24"):
        run_operator("Reorder", [np.ones((1, 24, 5, 5), np.float32)], to_order="NCHW16c")


def test_blocks_of_another_size_are_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"last axis has size 16, found shape \(1, 2, 5, 5, 8\)"):
        run_operator("Reorder", [np.ones((1, 2, 5, 5, 8), np.float32)], from_order="NCHW16c")


def test_an_unknown_order_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="'to_order' must be NCHW, NHWC, NCHW8c or NCHW16c, found 'CHWN'"):
        run_operator("Reorder", [np.ones((1, 16, 5, 5), np.float32)], to_order="CHWN")


def test_a_matrix_is_no_image() -> None:
    with pytest.raises(ShapeError, match="at least 3 axes, found 2"):
        run_operator("Reorder", [np.ones((1, 16), np.float32)], to_order="NHWC")


@needs_onednn
def test_a_callers_memory_is_read_and_written_in_place_of_the_tensors() -> None:
    workspace = Workspace()
    image = np.random.default_rng(0).standard_normal((2, 16, 3, 5)).astype(np.float32)
    workspace.feed_blob("x", image)
    definition = operator_def("Reorder", ["x"], ["y"], to_order="NCHW16c", engine="ONEDNN")
    op = create_operator(definition, workspace)
    step = op.bind(op.infer())
    step()
    other, result = image[::-1].copy(), np.empty((2, 1, 3, 5, 16), np.float32)
    step.input_rebinds[0](other)
    step.output_rebinds[0](result)
    step()
    np.testing.assert_array_equal(result, stored(other, "NCHW16c"))
    np.testing.assert_array_equal(workspace.fetch_blob("y"), stored(image, "NCHW16c"))
