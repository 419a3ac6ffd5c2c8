"""The executor on a simulated device: what holds on the CPU holds where runs end later than their workers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.binding.replicas import Replica
from dagexec.core.device import Device
from dagexec.core.operator import Operator
from dagexec.core.runtime import runtime_of
from dagexec.devices.sim import simulated
from dagexec.errors import OperatorError, RunTimeoutError
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.run.run import Run, task
from tests.held import PATIENCE, doubled_model, rows
from tests.nets import net_of, temporary_operator

SIM = Device("sim", 0)


def held_now() -> tuple[int, int]:
    """Streams leased and bytes allocated, by whatever is still referenced."""
    gc.collect()
    statistics = runtime_of(SIM).statistics()
    return statistics.leased, statistics.allocated_bytes


def test_stream_use_is_told_of_a_device() -> None:
    before = runtime_of(SIM).statistics()
    options = {"net_type": "async_dag", "device": "sim:0"}
    with dagexec.compile(doubled_model(), optimize=False, **options, replicas=2, warm_start=True) as executor:  # type: ignore[arg-type]
        executor.run({"x": rows(1)})
        streams = executor.statistics().streams
        assert streams is not None
        assert streams.launches >= before.launches + 6
        assert executor.statistics().runs_per_replica == (2, 1)


@pytest.mark.slow
async def test_many_tasks_some_cancelled_all_others_right_and_nothing_stays_leased() -> None:
    before = held_now()
    results: dict[int, np.ndarray] = {}

    async def serve() -> None:
        async with dagexec.compile(
            doubled_model(),
            optimize=False,
            net_type="async_dag",
            device="sim:0",
            replicas=3,
            num_workers=2,
            max_queued=10,
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
            assert (statistics.running, statistics.queued, statistics.awaiting_admission) == (0, 0, 0)
            assert statistics.failed == 0
            assert statistics.completed + statistics.cancelled + statistics.timed_out <= 100
            assert await executor.drain_async(timeout=PATIENCE)

    await serve()
    assert len(results) == sum(1 for value in range(100) if value % 5 and value % 7)
    for value, result in results.items():
        np.testing.assert_array_equal(result, rows(2 * value))
    assert held_now() == before


@pytest.mark.slow
def test_an_executor_dropped_without_close_gives_its_streams_and_its_memory_back() -> None:
    before = held_now()
    threads_before = set(threading.enumerate())
    executor = dagexec.compile(
        doubled_model(), optimize=False, net_type="async_dag", device="sim:0", replicas=2, num_workers=2
    )
    for _ in range(2):
        executor.run({"x": rows(1)})
    workers = [thread for thread in set(threading.enumerate()) - threads_before if thread.name.startswith("dagexec-")]
    assert held_now()[0] > before[0]
    del executor
    for thread in workers:
        thread.join(PATIENCE)
    assert held_now() == before


@pytest.mark.parametrize("priority", [0, 5])
def test_the_end_of_a_run_goes_before_the_chains_of_less_urgent_runs(priority: int) -> None:
    """The only worker is kept busy while the device finishes; then it has the choice."""
    order: list[str] = []
    busy, go_on = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        assert go_on.wait(PATIENCE)

    with dagexec.compile(
        doubled_model(), optimize=False, net_type="async_dag", device="sim:0", num_workers=1
    ) as executor:
        pool = executor._pool
        submit = pool.submit

        def submit_behind_others(run: Run) -> None:
            if run.name.startswith("end of"):
                submit(task("busy", keep_busy, 100))
                assert busy.wait(PATIENCE)
                submit(task("other", lambda: order.append("other"), 1))
                submit(run)
                go_on.set()
            else:
                submit(run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "submit", submit_behind_others)
            fetch = Replica.fetch

            def noting(replica: Replica, names: Sequence[str], out: None) -> dict[str, np.ndarray]:
                order.append("end")
                return fetch(replica, names, out)

            patch.setattr(Replica, "fetch", noting)
            executor.run({"x": rows(1)}, priority=priority)
    assert order == (["end", "other"] if priority > 1 else ["other", "end"])


ACTS: dict[str, Callable[[dagexec.Executor], object]] = {
    "run": lambda executor: executor.run({"x": rows(1)}, timeout=PATIENCE),
    "run_async": lambda executor: anyio.run(partial(executor.run_async, {"x": rows(1)})),
    "close": lambda executor: executor.close(),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_a_kernel_cannot_use_the_executor_that_runs_it(net_type: str, seed: int | None) -> None:
    """It would wait for its stream to go on, and no timeout would end that: a kernel cannot be stopped."""
    found: list[Callable[[], object]] = []

    def body(operator: Operator) -> None:
        if found:
            found.pop()()

    with (
        simulated(SIM, seed=seed),
        temporary_operator("Calling", body),
        dagexec.compile(
            doubled_model("Calling"), optimize=False, net_type=net_type, num_workers=2, replicas=2, device="sim:0"
        ) as executor,
    ):
        for act in ACTS.values():
            executor.run({"x": rows(1)})
            found.append(partial(act, executor))
            with pytest.raises(OperatorError, match="it would wait for itself"):
                executor.run({"x": rows(1)}, timeout=PATIENCE)
        executor.run({"x": rows(1)})


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_a_kernel_cannot_run_or_close_the_net_that_runs_it(net_type: str, seed: int | None) -> None:
    acts: list[str] = []

    def body(operator: Operator) -> None:
        if acts:
            getattr(net, acts.pop())()

    definition = net_of([[], [0]], op_type="Calling")
    definition.device_option.CopyFrom(SIM.to_option())
    with simulated(SIM, seed=seed), temporary_operator("Calling", body):
        net = dagexec.Workspace().create_net(definition, net_type, 2)
        assert isinstance(net, BaseNet)
        with net:
            for act in ("run", "close"):
                acts.append(act)
                with pytest.raises(OperatorError, match="it would wait for itself"):
                    net.run(timeout=PATIENCE)


@pytest.mark.parametrize(("seed", "device"), [(None, "sim:0"), (1, "cpu"), (1, "sim:1")])
def test_a_kernel_may_use_another_executor(seed: int | None, device: str) -> None:
    """Of its own device where several streams go on at once."""
    with simulated(SIM, seed=seed), dagexec.compile(doubled_model(), optimize=False, device=device) as other:
        seen: list[bytes] = []

        def body(operator: Operator) -> None:
            seen.append(other.run({"x": rows(3)}, timeout=PATIENCE)["y"].tobytes())

        with (
            temporary_operator("Calling", body),
            dagexec.compile(doubled_model("Calling"), optimize=False, device="sim:0") as executor,
        ):
            executor.run({"x": rows(1)}, timeout=PATIENCE)
        assert seen == [rows(6).tobytes()]


def test_a_kernel_of_a_device_that_does_one_thing_at_a_time_cannot_use_another_executor_there() -> None:
    with simulated(SIM, seed=1), dagexec.compile(doubled_model(), optimize=False, device="sim:0") as other:

        def body(operator: Operator) -> None:
            other.run({"x": rows(3)}, timeout=PATIENCE)

        with (
            temporary_operator("Calling", body),
            dagexec.compile(doubled_model("Calling"), optimize=False, device="sim:0") as executor,
            pytest.raises(OperatorError, match="it would wait for itself"),
        ):
            executor.run({"x": rows(1)}, timeout=PATIENCE)
