"""Where the rows of requests are: other axes, sizes left open, inputs for all rows, and what cannot be joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import onnx
import onnx.parser
import pytest

import dagexec
from dagexec.core.feeds import Array
from dagexec.errors import RowsError, SettingError
from dagexec.platform.threads import installed
from tests.executor.test_batching import StoppedClock
from tests.held import PATIENCE


def model(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')


@contextmanager
def pairs(graph: str, **options: object) -> Iterator[dagexec.Executor]:
    """An executor that joins two rows, however long that takes."""
    with (
        installed(StoppedClock()),
        dagexec.compile(model(graph), max_batch=2, max_wait=1000, num_workers=1, **options) as executor,  # type: ignore[arg-type]
    ):
        yield executor


def both(executor: dagexec.Executor, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """The results of two requests that come side by side."""
    with ThreadPoolExecutor(2) as callers:
        return list(callers.map(executor.run, feeds, timeout=PATIENCE))


def some(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


STEPS = """steps (float[3, N, 4] x, float[N, 4] h) => (float[3, N, 4] y, float[N, 4] last)
{ s = Add(x, h) y = Softmax<axis = 2>(s) last = ReduceMax<axes = [0], keepdims = 0>(y) }"""


def test_rows_of_another_axis_are_joined_and_have_the_bytes_of_the_lone_request() -> None:
    feeds = [{"x": some(3, 1, 4, seed=n), "h": some(1, 4, seed=n + 9)} for n in range(2)]
    with dagexec.compile(model(STEPS)) as plain:
        alone = [plain.run(one) for one in feeds]
    with pairs(STEPS, batch_axes={"x": 1, "h": 0}) as executor:
        found = both(executor, feeds)
        assert executor.statistics().batch_sizes == {2: 1}
    for one, other in zip(found, alone, strict=True):
        assert one["y"].shape == (3, 1, 4)
        for name, array in other.items():
            np.testing.assert_array_equal(one[name], array)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"z": 1}, r"batch_axes: 'z' is none of the inputs \['h', 'x'\]"),
        ({"x": 0, "h": 0}, r"batch_axes: axis 0 of input 'x' is not free in \(3, None, 4\)"),
        ({"x": 5, "h": 0}, "batch_axes: axis 5 of input 'x' is not free"),
    ],
)
def test_axes_that_the_inputs_do_not_have_are_refused(axes: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        dagexec.compile(model(STEPS), max_batch=2, batch_axes=axes)


def test_a_net_that_mixes_rows_is_refused_with_the_operator() -> None:
    mixed = "mixed (float[N, 4] x) => (float[N, 4] y) { y = Softmax<axis = 0>(x) }"
    with pytest.raises(RowsError, match="Softmax 'y'") as found:
        dagexec.compile(model(mixed), max_batch=2)
    assert "max_batch joins requests only where rows are shown to be apart" in found.value.__notes__


def test_a_net_whose_rows_follow_each_other_is_refused_where_its_batch_axis_is_inside() -> None:
    flat = "flat (float[3, N, 4] x) => (float[M, 4] y) { y = Reshape(x, rows) }"
    net = model(flat)
    net.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 4], np.int64), "rows"))
    with pytest.raises(RowsError, match="output 'y' has each row in 3 places of axis 0"):
        dagexec.compile(net, max_batch=2, batch_axes={"x": 1})


OPEN = "open (float[N, L] x) => (float[N, L] y) { y = Softmax<axis = 1>(x) }"


def test_where_sizes_are_open_the_first_request_of_each_runs_alone_and_later_ones_are_joined() -> None:
    with pairs(OPEN) as executor:
        for length in (3, 5):
            feeds = [{"x": some(1, length, seed=n)} for n in range(3)]
            first = executor.run(feeds[0])
            again, other = both(executor, [feeds[0], feeds[1]])
            np.testing.assert_array_equal(again["y"], first["y"])
            np.testing.assert_allclose(other["y"].sum(), 1, rtol=1e-5)
        assert executor.statistics().batch_sizes == {1: 2, 2: 2}


def test_a_size_for_which_rows_are_not_apart_runs_alone() -> None:
    """Rows of four numbers stay rows; of two, two rows become one."""
    net = model("some (float[N, L] x) => (float[A, B] y) { y = Reshape(x, rows) }")
    net.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 8], np.int64), "rows"))
    with dagexec.compile(net, max_batch=4, max_wait=0, num_workers=1) as executor, ThreadPoolExecutor(4) as callers:
        feeds = [{"x": some(2, 4, seed=n)} for n in range(40)]
        for one, found in zip(feeds, callers.map(executor.run, feeds, timeout=PATIENCE), strict=True):
            np.testing.assert_array_equal(found["y"], one["x"].reshape(-1, 8))
        assert executor.statistics().batch_sizes == {2: 40}


SHARED = "shared (float[N, 4] x, float[4] b) => (float[N, 4] y) { y = Add(x, b) }"


def test_requests_are_joined_where_an_input_for_all_rows_has_equal_bytes() -> None:
    with pairs(SHARED) as executor:
        b, other = some(4), some(4, seed=1)
        found = both(executor, [{"x": some(1, 4), "b": b}, {"x": some(1, 4, seed=3), "b": b.copy()}])
        np.testing.assert_array_equal(found[1]["y"], some(1, 4, seed=3) + b)
        assert executor.statistics().batch_sizes == {2: 1}
    with dagexec.compile(model(SHARED), max_batch=2, max_wait=0) as executor:
        found = both(executor, [{"x": some(1, 4), "b": b}, {"x": some(1, 4), "b": other}])
        for one, added in zip(found, (b, other), strict=True):
            np.testing.assert_array_equal(one["y"], some(1, 4) + added)
        assert executor.statistics().batch_sizes == {1: 2}


def test_a_large_input_for_all_rows_is_not_compared() -> None:
    large = SHARED.replace("4]", "2000]")
    with dagexec.compile(model(large), max_batch=2, max_wait=1000) as executor:  # which nobody waits for
        b = some(2000)
        np.testing.assert_array_equal(executor.run({"x": some(1, 2000), "b": b})["y"], some(1, 2000) + b)
        assert executor.statistics().batch_sizes == {1: 1}
