"""The executor on a simulated device: what holds on the CPU holds where runs end later than their workers."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.core.device import Device
from dagexec.core.errors import RunTimeoutError
from dagexec.core.runtime import runtime_of
from tests.held import PATIENCE, doubled_model, rows

BACKENDS = ["asyncio", "trio"]
SIM = Device("sim", 0)


def held_now() -> tuple[int, int]:
    """Streams leased and bytes allocated, by whatever is still referenced."""
    gc.collect()
    statistics = runtime_of(SIM).statistics()
    return statistics.leased, statistics.allocated_bytes


def test_stream_use_is_told_of_a_device() -> None:
    before = runtime_of(SIM).statistics()
    options = {"net_type": "async_dag", "device": "sim:0"}
    with dagexec.compile(doubled_model(), **options, replicas=2, warm_start=True) as executor:  # type: ignore[arg-type]
        executor.run({"x": rows(1)})
        streams = executor.statistics().streams
        assert streams is not None
        assert streams.launches >= before.launches + 6
        assert executor.statistics().runs_per_replica == (2, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_tasks_some_cancelled_all_others_right_and_nothing_stays_leased(backend: str) -> None:
    before = held_now()
    results: dict[int, np.ndarray] = {}

    async def main() -> None:
        async with dagexec.compile(
            doubled_model(), net_type="async_dag", device="sim:0", replicas=3, num_workers=2, max_queued=10
        ) as executor:

            async def one(value: int) -> None:
                if value % 5 == 0:
                    with anyio.move_on_after(0.0005 * (value % 3)):
                        await executor.run_async({"x": rows(value)})
                elif value % 7 == 0:
                    try:
                        await executor.run_async({"x": rows(value)}, timeout=0.001)
                    except RunTimeoutError:
                        return
                else:
                    results[value] = (await executor.run_async({"x": rows(value)}, priority=value % 2))["y"]

            async with anyio.create_task_group() as tasks:
                for value in range(100):
                    tasks.start_soon(one, value)
            statistics = executor.statistics()
            assert (statistics.running, statistics.queued, statistics.at_the_door) == (0, 0, 0)
            assert statistics.failed == 0
            assert statistics.completed + statistics.cancelled + statistics.timed_out <= 100
            assert await executor.drain_async(timeout=PATIENCE)

    anyio.run(main, backend=backend)
    assert len(results) == sum(1 for value in range(100) if value % 5 and value % 7)
    for value, result in results.items():
        np.testing.assert_array_equal(result, rows(2 * value))
    assert held_now() == before
