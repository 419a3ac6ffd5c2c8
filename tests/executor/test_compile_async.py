"""compile_async, as users of asyncio and trio write it: off the event loop, and gone when the task is cancelled."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.errors import ClosedError, SettingError, UnsupportedOperatorError
from dagexec.platform import deadline
from dagexec.platform.switching import SECONDS
from dagexec.testing import random_feeds
from tests.held import PATIENCE, doubled_model, rows


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    before, interval, collects = set(threading.enumerate()), sys.getswitchinterval(), gc.isenabled()
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert {name for name in left if not name.startswith(("AnyIO", "Trio", "attempt"))} == set()
    assert sys.getswitchinterval() == interval
    assert gc.isenabled() == collects


@pytest.fixture
async def executor(anyio_backend: str) -> AsyncIterator[dagexec.Executor]:
    async with dagexec.compile_async(doubled_model(), replicas=2, warm_start=True) as made:
        yield made


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_executor_from_a_fixture_runs(executor: dagexec.Executor) -> None:
    results = await asyncio.gather(*(executor.run_async({"x": rows(n)}) for n in range(8)))
    assert [found["y"].tolist() for found in results] == [rows(2 * n).tolist() for n in range(8)]


@pytest.mark.usefixtures("leaves_nothing")
async def test_it_is_what_compile_makes_and_the_block_closes_it() -> None:
    feeds = {"x": rows(3)}
    with dagexec.compile(doubled_model()) as expected:
        async with dagexec.compile_async(doubled_model(), num_workers=1) as executor:
            np.testing.assert_array_equal((await executor.run_async(feeds))["y"], expected.run(feeds)["y"])
    with pytest.raises(ClosedError):
        await executor.run_async(feeds)


async def test_nothing_is_compiled_or_prepared_in_the_thread_of_the_event_loop() -> None:
    """Functions of dagexec that this thread calls meanwhile, by module: those that start the thread and wait."""
    seen: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("dagexec."):
            seen.add(frame.f_globals["__name__"])

    pending = dagexec.compile_async("zoo:lenet", warm_start=True)
    sys.setprofile(note)
    try:
        executor = await pending
    finally:
        sys.setprofile(None)
    await executor.aclose()
    waiting = {"compile_async", "requests.waiting"}
    assert {name for name in seen if name.removeprefix("dagexec.executor.") not in waiting} <= {
        "dagexec.platform.locks",
        "dagexec.platform.threads",
        "dagexec.platform.shutdown",
        "dagexec.platform.lazy",
    }


@pytest.mark.usefixtures("leaves_nothing")
async def test_errors_are_those_of_compile() -> None:
    with pytest.raises(UnsupportedOperatorError, match="NoSuchOperator"):
        await dagexec.compile_async(doubled_model("NoSuchOperator"))
    with pytest.raises(SettingError, match="replica"):
        dagexec.compile_async(doubled_model(), replicas=0)


class Stages:
    """Holds a compilation at one of its stages until it is told to stop."""

    def __init__(self, held: str) -> None:
        self.seen: list[str] = []
        self.reached = threading.Event()
        self._held = held

    def __call__(self, stage: str) -> None:
        self.seen.append(stage)
        if stage.startswith(self._held) and not self.reached.is_set():
            self.reached.set()
            stop = deadline._stop.get()
            assert stop is not None
            assert stop.wait(PATIENCE)


@contextmanager
def without_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(dagexec.choices, "find", lambda _key: None)
        patch.setattr(dagexec.choices, "keep", lambda _key, found: found)
        yield


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("held", "never"),
    [
        ("init net", "passes"),
        pytest.param("running candidate 1", "running candidate 2", marks=pytest.mark.slow),
        pytest.param("measuring implementations", "running candidate", marks=pytest.mark.slow),
    ],
)
async def test_a_cancelled_await_stops_before_the_next_piece_of_work(
    held: str, never: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns when nothing is left, and the pools of all that was built have been closed."""
    stages = Stages(held)

    async def compiling() -> None:
        await dagexec.compile_async("zoo:lenet", tuning_seconds=60, progress=stages)

    with without_choices(monkeypatch):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compiling)
            assert await anyio.to_thread.run_sync(stages.reached.wait, PATIENCE)
            tasks.cancel_scope.cancel()
    assert stages.seen[-1].startswith(held)
    assert [stage for stage in stages.seen if stage.startswith(never)] == []


@pytest.mark.usefixtures("leaves_nothing")
async def test_an_executor_that_is_ready_when_the_task_is_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dagexec.Executor] = []
    compile = dagexec.compile

    def compile_and_cancel(*arguments: Any) -> dagexec.Executor:
        made.append(compile(*arguments))
        anyio.from_thread.run_sync(scope.cancel, token=token)
        return made[0]

    monkeypatch.setattr("dagexec.executor.compile_async.compile", compile_and_cancel)
    token = anyio.lowlevel.current_token()
    with anyio.CancelScope() as scope:
        await dagexec.compile_async(doubled_model())
    assert scope.cancelled_caught
    with pytest.raises(ClosedError):
        made[0].run({"x": rows(1)})


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("when", ["under way", "ready"])
def test_a_dropped_coroutine_stops_its_compilation(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends by itself and leaves nothing open, with no event loop left to tell."""
    stages = Stages("init net" if when == "under way" else "ready")
    made: list[dagexec.Executor] = []
    compile = dagexec.compile

    def noted(*arguments: Any) -> dagexec.Executor:
        made.append(compile(*arguments))
        stages("ready")
        return made[0]

    async def begin() -> None:
        waiting = dagexec.compile_async("zoo:lenet", progress=stages).__await__()
        waiting.send(None)
        await asyncio.to_thread(stages.reached.wait, PATIENCE)
        waiting.close()  # throws GeneratorExit into it, as the collector does

    monkeypatch.setattr("dagexec.executor.compile_async.compile", noted)
    asyncio.run(begin())
    for thread in threading.enumerate():
        if thread.name == "dagexec-compiling":
            thread.join(PATIENCE)
    assert stages.seen[-1] == ("init net" if when == "under way" else "ready")
    for executor in made:
        with pytest.raises(ClosedError):
            executor.run(random_feeds(executor.model, seed=0))


class StopAt(threading.Event):
    """Notes the functions that look whether to stop, and tells them to in one of them."""

    def __init__(self, place: str = "") -> None:
        super().__init__()
        self.places: set[str] = set()
        self._place = place

    def is_set(self) -> bool:
        frame = sys._getframe(2)
        while frame.f_code.co_name == "check_deadline":
            assert frame.f_back is not None
            frame = frame.f_back
        self.places.add(frame.f_code.co_name)
        return frame.f_code.co_name == self._place


PLACES = ["_compiled", "run_passes", "_begin_stage", "_rounds", "choose", "fastest", "_warm_up"]


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("place", PLACES)
def test_every_piece_of_a_compilation_may_be_its_last(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between passes, candidates, rounds, operators and replicas it looks whether it is wanted, and leaves nothing."""
    stop = StopAt(place)
    with without_choices(monkeypatch), deadline.stoppable(stop), pytest.raises(deadline.StopRequested):
        dagexec.compile("zoo:lenet", tuning_seconds=2, warm_start=True).close()
    assert place in stop.places


async def test_two_compile_at_once_and_threads_switch_quickly_meanwhile() -> None:
    intervals: list[float] = []
    before = sys.getswitchinterval()

    async def one(seed: int) -> None:
        progress = lambda _stage: intervals.append(sys.getswitchinterval())  # noqa: E731
        async with dagexec.compile_async("zoo:lenet", progress=progress) as executor:
            await executor.run_async(random_feeds(executor.model, seed=seed))

    async with anyio.create_task_group() as tasks:
        for seed in range(2):
            tasks.start_soon(one, seed)
    assert intervals == pytest.approx([SECONDS] * len(intervals))
    assert sys.getswitchinterval() == before
