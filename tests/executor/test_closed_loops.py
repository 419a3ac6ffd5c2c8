"""Requests whose event loop is closed have nobody to go to: they do not run, and nobody waits for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

import dagexec
from tests.held import PATIENCE, doubled_model, held_operators, rows


@pytest.mark.parametrize(
    ("op_type", "options"),
    [("Held", {}), ("HeldRows", {"max_batch": 2, "max_wait": 0}), ("Held", {"max_queued": 3})],
    ids=["one by one", "joined", "awaiting admission"],
)
def test_requests_of_a_closed_event_loop_do_not_run(op_type: str, options: dict[str, float]) -> None:
    """But for that which ran when it was closed; the next caller waits for no other."""
    count = 10
    loop = asyncio.new_event_loop()
    with (
        held_operators() as held,
        ThreadPoolExecutor(1) as threads,
        dagexec.compile(doubled_model(op_type), optimize=False, num_workers=1, replicas=1, **options) as executor,
    ):

        def waiting() -> int:
            found = executor.statistics()
            return found.queued + found.awaiting_admission

        async def ask(number: int) -> None:
            await executor.run_async({"x": rows(number, 1)})

        async def all_wait() -> list[asyncio.Task[None]]:
            asked = [asyncio.create_task(ask(number)) for number in range(count)]
            while not executor.statistics().running or waiting() < count - executor.statistics().running:
                await asyncio.sleep(0)
            return asked

        asked = loop.run_until_complete(all_wait())
        first = executor.statistics().running
        held.wait_inside()
        for task in asked:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        last = threads.submit(executor.run, {"x": rows(100, 1)})
        while waiting() < count - first + 1:
            pass
        held.go_on.release(2)
        last.result(PATIENCE)
        found = executor.statistics()
    assert held.seen == [0, 100]
    assert (found.completed, found.cancelled, found.failed) == (first + 1, count - first, 0)
