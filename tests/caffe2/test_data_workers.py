"""Threads that feed a net of dagexec.caffe2: batches, the end of them, errors, and threads that end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from dagexec.caffe2 import core, data_workers, workspace


def numbers(sizes: Callable[[int], int]) -> Callable[[int, int], list[Any]]:
    """A fetch function whose rows count up, so many at a time."""
    calls, begin = count(), count()

    def fetch(worker: int, batch_size: int) -> list[Any]:
        rows = np.array([next(begin) for _ in range(sizes(next(calls)))], np.int64)
        return [np.stack([rows, rows], 1).astype(np.float32), rows]

    return fetch


def test_rows_become_batches_in_order() -> None:
    before = set(threading.enumerate())
    made = core.Net("fed")
    called: list[Any] = []
    coordinator = data_workers.init_data_input_workers(
        made, ["data", "label"], numbers(lambda call: 1 + call % 5), 4, num_worker_threads=1, max_buffered_batches=2,
        init_fun=lambda *both: called.append(both),
    )  # fmt: skip
    assert not called
    made.Scale("data", "twice", scale=2.0)
    coordinator.start()
    with pytest.raises(RuntimeError, match="already"):
        coordinator.start()
    assert called == [(coordinator, coordinator)]
    workspace.CreateNet(made)
    for step in range(6):
        workspace.RunNet(made)
        rows = np.arange(4 * step, 4 * step + 4)
        assert workspace.FetchBlob("label").tolist() == rows.tolist()
        np.testing.assert_array_equal(workspace.FetchBlob("twice"), np.stack([2 * rows, 2 * rows], 1))
    coordinator.stop()
    workspace.ResetWorkspace()
    assert not set(threading.enumerate()) - before


def test_several_threads_give_all_rows() -> None:
    seen: set[float] = set()
    made = core.Net("fed")
    parts = {worker: iter(np.arange(6 * worker, 6 * worker + 6).reshape(3, 2)) for worker in (0, 1)}

    def fetch(worker: int, batch_size: int) -> Any:
        part = next(parts[worker], None)
        return None if part is None else [part.astype(np.float32)]

    coordinator = data_workers.init_data_input_workers(made, ["data"], fetch, 2)
    coordinator.start()
    for _ in range(6):
        workspace.RunNetOnce(made)
        seen.update(workspace.FetchBlob("data").tolist())
    assert seen == set(range(12))
    with pytest.raises(RuntimeError, match="Error running net"):
        workspace.RunNetOnce(made)
    coordinator.stop()


def test_what_a_thread_raises_is_the_cause() -> None:
    def fails(worker: int, batch_size: int) -> Any:
        raise OSError("the disk is gone")

    for fetch, words in ((fails, "the disk is gone"), (lambda worker, size: [np.zeros(2)], "expected arrays")):
        made = core.Net("fed")
        coordinator = data_workers.init_data_input_workers(made, ["a", "b"], fetch, 2, input_source_name=words)
        coordinator.start()
        with pytest.raises(RuntimeError) as caught:
            workspace.RunNetOnce(made)
        chain, error = [], caught.value
        while error is not None:
            chain.append(str(error))
            error = error.__cause__
        assert any(words in text for text in chain)
        coordinator.stop()
