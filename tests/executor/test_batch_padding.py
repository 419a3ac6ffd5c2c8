"""Requests of different lengths, padded to be joined: values, shapes, bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnx.parser
import pytest

import dagexec
from dagexec.core.feeds import Array
from dagexec.errors import FeedError, SettingError
from dagexec.platform.threads import installed
from tests.executor.test_batching import StoppedClock
from tests.held import PATIENCE

LENGTHS = (3, 5, 8, 6)
PADDING = dagexec.BatchPadding({"tokens": 1, "mask": 1}, mask="mask", sizes=(4, 8))

ENCODER = """
<ir_version: 8, opset_import: ["" : 17]>
encoder (int64[N, L] tokens, float[N, L] mask) => (float[N, L, 4] hidden, float[N, 4] pooled)
<int64[1] first = {1}, int64[1] second = {2}, float one = {1.0}, float far = {-1e9}>
{
    e = Gather(table, tokens)
    t = Transpose<perm = [0, 2, 1]>(e)
    scores = MatMul(e, t)
    absent = Sub(one, mask)
    away = Mul(absent, far)
    row = Unsqueeze(away, first)
    seen = Add(scores, row)
    weights = Softmax<axis = -1>(seen)
    hidden = MatMul(weights, e)
    column = Unsqueeze(mask, second)
    kept = Mul(hidden, column)
    sum = ReduceSum<keepdims = 0>(kept, first)
    count = ReduceSum<keepdims = 0>(column, first)
    pooled = Div(sum, count)
}
"""


@pytest.fixture(scope="module")
def encoder() -> onnx.ModelProto:
    """One layer of attention over the words that the mask has, and their mean."""
    model = onnx.parser.parse_model(ENCODER)
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return model


def text(length: int, count: int = 1) -> dict[str, Array]:
    """Words other than 0, which fills up."""
    words = np.random.default_rng(length).integers(1, 50, (count, length))
    return {"tokens": words, "mask": np.ones((count, length), np.float32)}


@pytest.fixture
def clock() -> Iterator[StoppedClock]:
    clock = StoppedClock()
    with installed(clock):
        yield clock


@pytest.fixture(scope="module")
def alone(encoder: onnx.ModelProto) -> dict[int, dict[str, Array]]:
    """The results of requests that nobody joined, by length."""
    with dagexec.compile(encoder, max_batch=4, max_wait=0, batch_padding=PADDING) as executor:
        found = {length: executor.run(text(length)) for length in LENGTHS}
        assert executor.statistics().batch_sizes == {1: 4}
    return found


def test_padded_results_have_the_shapes_and_the_values_of_runs_without_padding(
    encoder: onnx.ModelProto, alone: dict[int, dict[str, Array]]
) -> None:
    with dagexec.compile(encoder) as plain:
        for length, found in alone.items():
            expected = plain.run(text(length))
            assert found["hidden"].shape == (1, length, 4)
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_the_lone_request_whoever_is_in_its_batch(
    encoder: onnx.ModelProto, alone: dict[int, dict[str, Array]], clock: StoppedClock
) -> None:
    options = {"max_batch": 4, "max_wait": 1000.0, "num_workers": 1, "batch_padding": PADDING}
    with dagexec.compile(encoder, **options) as executor, ThreadPoolExecutor(4) as callers:
        executor.run(text(8))  # the first of its size runs alone, while it is shown that rows are apart
        out = {"hidden": np.empty((1, 5, 4), np.float32)}
        asked = [
            callers.submit(executor.run, text(length), out=out if length == 5 else None) for length in (5, 6, 7, 8)
        ]
        joined = {length: one.result(PATIENCE) for length, one in zip((5, 6, 7, 8), asked, strict=True)}
        assert executor.statistics().batch_sizes == {1: 1, 4: 1}
    assert joined[5]["hidden"] is out["hidden"]
    for length in (5, 6, 8):
        assert {n: a.tobytes() for n, a in joined[length].items()} == {n: a.tobytes() for n, a in alone[length].items()}


def test_lengths_that_cannot_be_padded_are_refused_with_their_numbers(encoder: onnx.ModelProto) -> None:
    with dagexec.compile(encoder, max_batch=4, max_wait=0, batch_padding=PADDING) as executor:
        with pytest.raises(FeedError, match="a request has a length of 9, batch_padding at most 8"):
            executor.run(text(9))
        with pytest.raises(FeedError, match=r"disagree on the length: \{'tokens': 4, 'mask': 3\}"):
            executor.run({"tokens": text(4)["tokens"], "mask": text(3)["mask"]})
        executor.warm_up(text(3))
        assert executor.run(text(3, 2))["hidden"].shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("axes", "mask", "message"),
    [
        ({"tokens": 1, "mask": 1}, "masks", "the mask 'masks' is none of"),
        ({"words": 1, "mask": 1}, "mask", r"'words' is none of the inputs \['mask', 'tokens'\]"),
        ({"tokens": 0, "mask": 1}, "mask", "axis 0 of input 'tokens' is that of its rows"),
        ({"tokens": 2, "mask": 1}, "mask", "axis 2 of input 'tokens' is not free"),
    ],
)
def test_axes_that_do_not_fit_the_model_are_refused(
    encoder: onnx.ModelProto, axes: dict[str, int], mask: str, message: str
) -> None:
    padding = dagexec.BatchPadding(axes, mask, (4, 8))
    with pytest.raises(SettingError, match=message):
        dagexec.compile(encoder, max_batch=4, batch_padding=padding)


def test_a_result_of_twice_the_length_is_refused() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        twice (float[N, L] x, float[N, L] mask) => (float[N, M] y) { m = Mul(x, mask) y = Concat<axis = 1>(m, m) }
    """)
    padding = dagexec.BatchPadding({"x": 1, "mask": 1}, "mask", (4, 8))
    with pytest.raises(SettingError, match="result 'y' depends on the length, but has no axis that is as long"):
        dagexec.compile(model, max_batch=4, batch_padding=padding)


@pytest.mark.parametrize("sizes", [(), (8, 4), (1, 4), (4, 4), (2.5,)])
def test_sizes_come_in_order(sizes: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match="sizes must be 2 or more, the smallest first"):
        dagexec.BatchPadding({"x": 1}, "x", sizes)


def test_padding_is_for_requests_that_are_joined(encoder: onnx.ModelProto) -> None:
    with pytest.raises(SettingError, match="give max_batch, too"):
        dagexec.compile(encoder, batch_padding=PADDING)
