"""Which requests are joined, when, and whose rows are whose: the queue, the groups and the batch, each by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import dagexec
from dagexec.binding.replicas import Replica
from dagexec.core import dtypes
from dagexec.core.feeds import Array
from dagexec.core.model import InputInfo, Model
from dagexec.core.traits import Rows
from dagexec.executor.batching.axes import BatchAxes
from dagexec.executor.batching.joining import Batching
from dagexec.executor.batching.queue import BatchQueue
from dagexec.executor.requests.request import Batch, Group, Request
from dagexec.options import CompileOptions
from dagexec.platform.threads import installed
from tests.executor.test_batching import StoppedClock
from tests.held import PATIENCE, doubled_model, rows

GROUP = Group({"x": 0}, {"y": Rows(0)})


def request(value: float, count: int = 1, created: float = 0.0) -> Request:
    one = Request({"x": rows(value, count)}, ("y",))
    one.group, one.rows, one.created = GROUP, count, created
    return one


def test_the_oldest_request_of_a_group_decides_when_it_is_due() -> None:
    queue = BatchQueue(max_batch=8, max_wait=3.0)
    old, young = request(1, created=10.0), request(2, created=12.0)
    queue.push(old)
    queue.push(young)
    assert queue.next_due() == 13.0
    assert not queue.is_ready(12.9, hurried=False)
    assert queue.pop_batch(12.9, hurried=False) == []
    assert queue.pop_batch(13.0, hurried=False) == [old, young]


class Doubling:
    """In place of a replica: y = 2 x."""

    net = SimpleNamespace(name="doubled")

    def feed_rows(self, parts: Sequence[Mapping[str, Array]], axes: Mapping[str, int]) -> None:
        self.x = np.concatenate([part["x"] for part in parts], axes["x"])

    def peek(self, names: Sequence[str]) -> dict[str, Array]:
        return dict.fromkeys(names, 2 * self.x)


@pytest.mark.parametrize("leaves_before_the_run", [0, 1, 2, None])
@pytest.mark.parametrize("leaves_during_the_run", [0, 1, 2, None])
def test_rows_stay_their_members_own_whoever_leaves(
    leaves_before_the_run: int | None, leaves_during_the_run: int | None
) -> None:
    members = [request(1, 2), request(2, 1), request(3, 3)]
    batch = Batch(members)
    batch.replica = cast(Replica, Doubling())
    if leaves_before_the_run is not None:
        batch.drop(members[leaves_before_the_run])
    batch.feed_replica()
    if leaves_during_the_run is not None and members[leaves_during_the_run].batch is not None:
        batch.drop(members[leaves_during_the_run])
    for member in batch.requests:
        member.taken = True
    batch.fetch()
    for number, member in enumerate(members):
        if number in (leaves_before_the_run, leaves_during_the_run):
            assert member.result is None
        else:
            assert member.error is None
            assert member.result is not None
            np.testing.assert_array_equal(member.result["y"], 2 * member.feeds["x"])


def scaled_model() -> Model:
    """y = relu(x) * scale, with a scale that is fed, for all rows."""
    model = doubled_model()
    inputs = {**model.inputs, "scale": InputInfo(dtypes.FLOAT32, (3,))}
    return dataclasses.replace(model, parameters={}, inputs=inputs)


def scaled(value: float, scale: float) -> dict[str, Array]:
    return {"x": rows(value, 1), "scale": np.full(3, scale, np.float32)}


def test_requests_are_of_one_group_when_what_is_for_all_rows_is_the_same() -> None:
    model = scaled_model()
    options = CompileOptions(max_batch=4, batch_axes={"x": 0})
    batching = Batching(model, BatchAxes(model, options), 4, lambda later: later())

    def placed(scale: float) -> Request:
        one = Request(scaled(1, scale), ("y",))
        batching.place(one)
        assert one.rows == 1
        return one

    first, other, again = placed(2), placed(5), placed(2)
    assert first.group is not None
    assert other.group is not None
    assert other.group is not first.group, "another scale, asked for right after the first"
    assert again.group is first.group


def test_requests_with_another_input_for_all_rows_get_results_of_their_own() -> None:
    options: dict[str, Any] = {"optimize": False, "max_batch": 2, "max_wait": 1000.0, "batch_axes": {"x": 0}}
    clock = StoppedClock()
    with (
        installed(clock),
        ThreadPoolExecutor(4) as callers,
        dagexec.compile(scaled_model(), num_workers=1, **options) as executor,
    ):
        asked = {
            (value, scale): callers.submit(executor.run, scaled(value, scale))
            for scale, value in ((2, 1), (5, 3), (2, 4), (5, 6))
        }
        for (value, scale), one in asked.items():
            np.testing.assert_array_equal(one.result(PATIENCE)["y"], rows(value * scale, 1))
        assert executor.statistics().batch_sizes == {2: 2}
