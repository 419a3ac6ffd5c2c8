"""Models of a pool give back the memory that their runs work in, and no result differs for it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dagexec
from dagexec.binding.io_binding import Array
from dagexec.errors import ResourceError, SettingError
from dagexec.executor.executor import Executor
from tests.held import PATIENCE, Held, doubled_model, rows

ROWS = 4096


def used(executor: Executor) -> int:
    return executor.statistics().preparations[0].arena_bytes


def large(value: float) -> dict[str, Array]:
    return {"x": rows(value, ROWS)}


def needed() -> int:
    """Bytes of the arena of `doubled_model` for these rows."""
    with dagexec.Pool(1) as pool, dagexec.compile(doubled_model(), pool=pool) as executor:
        executor.run(large(1))
        return used(executor)


def test_those_that_ran_longest_ago_give_their_arenas_back_and_get_them_again() -> None:
    one = needed()
    with dagexec.Pool(1, arena_bytes=2 * one) as pool:
        executors = [dagexec.compile(doubled_model(), pool=pool) for _ in range(3)]
        for number, left in ((0, [1, 0, 0]), (1, [1, 1, 0]), (0, [1, 1, 0]), (2, [1, 0, 1]), (1, [0, 1, 1])):
            np.testing.assert_array_equal(executors[number].run(large(number))["y"], rows(2 * number, ROWS))
            assert [used(executor) // one for executor in executors] == left
        found = pool.arena_statistics()
        assert (found.used_bytes, found.budget_bytes, found.given_back) == (2 * one, 2 * one, 2)
        for executor in executors:
            executor.close()
        assert pool.arena_statistics().used_bytes == 0


def test_a_budget_too_small_for_one_run_is_an_error_with_numbers_for_that_run_alone() -> None:
    one = needed()
    with (
        dagexec.Pool(1, arena_bytes=one - 1, name="small") as pool,
        dagexec.compile(doubled_model(), pool=pool) as model,
    ):
        np.testing.assert_array_equal(model.run({"x": rows(3)})["y"], rows(6))
        for _ in range(2):
            with pytest.raises(ResourceError, match=f"needs {one:,} bytes of arenas; pool 'small' has .*={one - 1:,}"):
                model.run(large(1))
            np.testing.assert_array_equal(model.run({"x": rows(4)})["y"], rows(8))
        assert pool.arena_statistics().used_bytes < one


def test_a_model_in_a_run_keeps_its_arena(held: Held) -> None:
    with dagexec.Pool(2, arena_bytes=needed()) as pool, ThreadPoolExecutor(1) as threads:
        busy = dagexec.compile(doubled_model("Held"), pool=pool)
        other = dagexec.compile(doubled_model(), pool=pool)
        running = threads.submit(busy.run, large(1), timeout=PATIENCE)
        assert held.inside.acquire(timeout=PATIENCE)
        before = used(busy)
        np.testing.assert_array_equal(other.run(large(2))["y"], rows(4, ROWS))
        assert used(busy) == before > 0
        held.go_on.release()
        np.testing.assert_array_equal(running.result(PATIENCE)["y"], [2, 2, 2])
        busy.close()
        other.close()


def test_a_model_that_was_dropped_is_charged_for_nothing() -> None:
    with dagexec.Pool(1) as pool:
        dagexec.compile(doubled_model(), pool=pool).run(large(1))
        gc.collect()
        assert any(pool.arena_statistics().used_bytes == 0 for _ in range(1_000_000))


def test_whoever_takes_whose_arena_results_are_right() -> None:
    with dagexec.Pool(2, arena_bytes=needed()) as pool, ThreadPoolExecutor(4) as threads:
        executors = [dagexec.compile(doubled_model(), pool=pool, replicas=2) for _ in range(3)]
        runs = [threads.submit(executors[number % 3].run, large(number)) for number in range(150)]
        for number, run in enumerate(runs):
            np.testing.assert_array_equal(run.result(PATIENCE)["y"], rows(2 * number, ROWS))
        assert pool.arena_statistics().given_back > 0
        for executor in executors:
            executor.close()


@pytest.mark.parametrize("name", ["lenet", pytest.param("squeezenet", marks=pytest.mark.slow)])
def test_a_run_needs_nothing_that_the_one_before_it_left_in_the_arena(name: str) -> None:
    with dagexec.compile(f"zoo:{name}") as executor:
        (given,) = executor.inputs.values()
        feeds = np.random.default_rng(0).standard_normal([size or 1 for size in given.shape], np.float32)
        expected = executor.run(feeds)
        (block,) = executor.net().arena_memory._blocks.values()
        block.array[: block.used] = 0xFF
        for output, values in executor.run(feeds).items():
            np.testing.assert_array_equal(values, expected[output])
        replica = executor._replicas.members[0]
        given_back = replica.give_back_arena()
        assert given_back > 0
        assert not block.array[:given_back].any()
        for output, values in executor.run(feeds).items():
            np.testing.assert_array_equal(values, expected[output])


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "1 GB"])
def test_a_budget_is_a_number_of_bytes(nbytes: object) -> None:
    with pytest.raises(SettingError, match="arena_bytes must be a number of bytes, 1 or more, not"):
        dagexec.Pool(1, arena_bytes=nbytes)  # type: ignore[arg-type]
