"""Bad input of tasks: an error with its numbers for who gave it, and nothing lost for the others."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import dagexec
from dagexec.errors import ClosedError, DagexecError, FeedError, ResourceError, SettingError
from tests.executor.test_arena_budget import large, needed
from tests.executor.test_batching import two_inputs
from tests.held import PATIENCE, Held, doubled_model, rows


@pytest.fixture
async def joining(anyio_backend: str) -> AsyncIterator[dagexec.Executor]:
    async with dagexec.compile_async(two_inputs(), optimize=False, max_batch=4) as executor:
        yield executor


async def add(executor: dagexec.Executor, value: float) -> None:
    found = await executor.run_async({"a": rows(value), "b": rows(1)}, timeout=PATIENCE)
    np.testing.assert_array_equal(found["y"], rows(value + 1))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 3), r"disagree on the number of rows: \{'a': 2, 'b': 3\}"),
        ((5, 5), "at most max_batch=4 rows, found 5"),
    ],
)
async def test_rows_that_cannot_be_joined_are_refused_and_those_beside_them_are_served(
    joining: dagexec.Executor, counts: tuple[int, int], message: str
) -> None:
    async with anyio.create_task_group() as tasks:
        for value in range(6):
            tasks.start_soon(add, joining, value)
        with pytest.raises(FeedError, match=message):
            await joining.run_async({"a": rows(1, counts[0]), "b": rows(1, counts[1])}, timeout=PATIENCE)
    found = joining.statistics()
    assert (found.completed, found.running, found.queued) == (6, 0, 0)


async def test_a_model_that_cannot_be_joined_is_refused_when_it_is_awaited() -> None:
    fixed = dataclasses.replace(two_inputs().inputs["a"], shape=(2, 3))
    model = dataclasses.replace(two_inputs(), inputs={"a": fixed, "b": fixed})
    with pytest.raises(SettingError, match=r"any number of rows, found .*\(2, 3\)"):
        await dagexec.compile_async(model, optimize=False, max_batch=4)


async def test_a_budget_too_small_for_one_run_fails_that_one_alone() -> None:
    one = needed()
    with dagexec.Pool(1, arena_bytes=one - 1, name="small") as pool:
        async with dagexec.compile_async(doubled_model(), pool=pool) as executor:
            for _ in range(2):
                with pytest.raises(
                    ResourceError, match=f"needs {one:,} bytes of arenas; pool 'small' has .*={one - 1:,}"
                ):
                    await executor.run_async(large(1))
                np.testing.assert_array_equal((await executor.run_async({"x": rows(3)}))["y"], rows(6))


async def test_a_pool_that_models_use_is_not_closed_and_their_tasks_get_all_results(held: Held) -> None:
    results: list[float] = []

    async def call(executor: dagexec.Executor) -> None:
        results.append((await executor.run_async({"x": rows(1)}, timeout=PATIENCE))["y"].flat[0])

    pool = dagexec.Pool(1, name="shared")
    async with dagexec.compile_async(doubled_model("Held"), pool=pool, optimize=False) as executor:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(call, executor)
            while executor.statistics().queued < 2:
                await anyio.lowlevel.checkpoint()
            await anyio.to_thread.run_sync(held.wait_inside)
            with pytest.raises(DagexecError, match=r"pool 'shared': 1 executor\(s\) with 3 unfinished request\(s\)"):
                pool.close()
            held.go_on.release(3)
        assert results == [2, 2, 2]
    pool.close()
    with pytest.raises(ClosedError, match=r"pool 'shared' of 1 worker.* is closed"):
        await dagexec.compile_async(doubled_model(), pool=pool, optimize=False)
