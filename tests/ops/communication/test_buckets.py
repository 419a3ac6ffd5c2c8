"""Buckets: what is packed is unpacked again, sums are made from left to right, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.errors import DagexecError
from tests.ops.running import operator_def, run_operator

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shapes=shapes, dtype=st.sampled_from(["float32", "float64", "int64"]))
def test_a_packed_bucket_is_the_elements_in_order_and_unpacks_to_the_tensors(
    shapes: list[tuple[int, ...]], dtype: str
) -> None:
    tensors = [
        np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) + index for index, shape in enumerate(shapes)
    ]
    (bucket,) = run_operator("PackBucket", list(tensors))
    assert bucket.tolist() == [value for tensor in tensors for value in tensor.ravel().tolist()]
    assert bucket.dtype == dtype
    found = run_operator("UnpackBucket", [bucket, *(np.zeros_like(tensor) for tensor in tensors)], len(tensors))
    for one, tensor in zip(found, tensors, strict=True):
        assert one.shape == tensor.shape
        assert one.tobytes() == tensor.tobytes()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 4), divisor=st.sampled_from([1, 2, 3]), place=st.sampled_from(["y", "x0", "x1"]))
def test_the_sum_goes_from_left_to_right_wherever_it_is_written(count: int, divisor: int, place: str) -> None:
    arrays = [np.random.default_rng(index).standard_normal(6).astype(np.float32) for index in range(count)]
    if place == "x1" and count < 2:
        place = "x0"
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    workspace = Workspace()
    for index, array in enumerate(arrays):
        workspace.feed_blob(f"x{index}", array)
    definition = operator_def("BucketSum", [f"x{index}" for index in range(count)], [place], divisor=divisor)
    workspace.run_net_once(NetDef(name="sum", op=[definition]))
    assert workspace.fetch_blob(place).tobytes() == (total / np.float32(divisor)).tobytes()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DagexecError, match="must have the 5 elements of the tensors, found 4"):
        run_operator("UnpackBucket", [np.ones(4), np.ones(2), np.ones(3)], 2)
    with pytest.raises(DagexecError, match="an output for each of 2 tensors, found 1"):
        run_operator("UnpackBucket", [np.ones(5), np.ones(2), np.ones(3)], 1)
    with pytest.raises(DagexecError, match="share one element type"):
        run_operator("PackBucket", [np.ones(4), np.ones(2, np.float32)])
    with pytest.raises(DagexecError, match=r"must have shape \(4,\)"):
        run_operator("BucketSum", [np.ones(4), np.ones(5)])
    with pytest.raises(DagexecError, match="'divisor' must be at least 1, found 0"):
        run_operator("BucketSum", [np.ones(4)], divisor=0)
    with pytest.raises(DagexecError, match="the mean of integers"):
        run_operator("BucketSum", [np.ones(4, np.int64)], divisor=2)
    definition = operator_def("BucketSum", ["a", "b", "c"], ["c"])
    with pytest.raises(DagexecError, match="output 0 may not overwrite input 2"):
        Workspace().run_operator_once(definition)
