"""Devices that fail, hang or are full; see `test_operators`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import dagexec
from dagexec.devices.sim import Fault
from dagexec.errors import DeviceError, OperatorError, ResourceError, RunTimeoutError
from dagexec.scheduler.run import drain
from tests.failures.acting import BOTH, LEFT, PATIENCE, Acts, Place, Setting, beside, feed, serves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "match", "message"),
    [
        ("launch", "Acting 'left'", r"Acting 'left'.*fault of kind 'launch'"),
        ("kernel", "Acting 'left'", r"Acting 'left'.*fault of kind 'kernel'"),
        ("copy", "x", r"'x@sim:0'.*fault of kind 'copy'"),
        ("event", "the end of a run", r"the end of a run.*fault of kind 'event'"),
    ],
)
def test_a_device_that_fails_fails_one_run(
    device: Place, simulate: Setting, acts: Acts, kind: str, match: str, message: str
) -> None:
    armed = [False]
    fault = Fault(kind, match=lambda label: armed[0] and match in label)
    runtime = simulate(faults=[fault])
    with device.compile() as executor:
        with beside(executor, acts):
            armed[0] = True
            with pytest.raises(OperatorError, match=message) as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, DeviceError)
            assert runtime.faults.met == {kind: 1}
        serves(executor, acts)


@pytest.mark.slow
def test_a_kernel_that_hangs_is_given_up_when_the_timeout_is_over(
    device: Place, simulate: Setting, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "ABANDON_AFTER", 0.01)
    hang = Fault("hang", match="Acting 'left'", nth=2)
    runtime = simulate(faults=[hang])
    with device.compile() as executor:
        with beside(executor, acts), pytest.raises(RunTimeoutError, match=r"not done within 0\.5 seconds"):
            executor.run(feed(LEFT), timeout=0.5)
        assert runtime.faults.met == {"hang": 1}
        assert acts.behind[LEFT] == 0
        serves(executor, acts)


@pytest.mark.slow
async def test_a_cancelled_await_gives_up_a_kernel_that_hangs(
    device: Place, simulate: Setting, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "ABANDON_AFTER", 0.01)
    hang = Fault("hang", match="Acting 'left'", nth=2)

    runtime = simulate(faults=[hang])
    with device.compile() as executor:
        with beside(executor, acts):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(executor.run_async, feed(LEFT))
                    while not runtime.faults.met:
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
            assert scope.cancelled_caught
            assert executor.statistics().running == 1  # the one beside
        serves(executor, acts)


@pytest.mark.slow
def test_memory_of_a_device_that_does_not_suffice_fails_the_run_that_asks_for_it(
    device: Place, simulate: Setting, acts: Acts
) -> None:
    runtime = simulate(memory_limit=100_000)
    with device.compile() as executor:
        with beside(executor, acts):
            for _ in range(2):
                with pytest.raises(ResourceError, match=r"sim:0: out of memory: .* of 100,000 bytes"):
                    executor.run(feed(rows=2_000), timeout=PATIENCE)
        serves(executor, acts)
        assert runtime.statistics().peak_bytes <= 100_000


def test_memory_of_a_device_that_does_not_suffice_for_a_feed_leaves_the_blob_as_it_was(simulate: Setting) -> None:
    runtime = simulate(memory_limit=1_000)
    workspace = dagexec.Workspace()
    workspace.feed_blob("x", np.ones(100, np.float32), device="sim:0")
    with pytest.raises(ResourceError, match=r"sim:0: out of memory: an allocation of [\d,]+ bytes"):
        workspace.feed_blob("y", np.ones(1_000, np.float32), device="sim:0")
    np.testing.assert_array_equal(workspace.fetch_blob("x"), np.ones(100))
    assert runtime.statistics().allocated_bytes <= 1_000
    workspace.feed_blob("y", np.zeros(3, np.float32), device="sim:0")
    np.testing.assert_array_equal(workspace.fetch_blob("y"), np.zeros(3))


def test_the_first_error_of_two_streams_is_kept_and_the_other_attached(simulate: Setting, acts: Acts) -> None:
    place = Place("sim:0", "async_dag")
    both = threading.Barrier(2)

    def fail(side: str) -> Callable[[], object]:
        def act() -> None:
            both.wait(PATIENCE)
            raise ValueError(side)

        return act

    simulate()
    with place.compile(replicas=1, streams_per_worker=2) as executor:
        acts.does.update({1: fail("the left one"), 2: fail("the right one")})
        with pytest.raises(OperatorError, match=r"ValueError: the \w+ one") as caught:
            executor.run(feed(BOTH), timeout=PATIENCE)
        other = "right" if "left one" in str(caught.value) else "left"
        assert [f"the {other} one" in note for note in caught.value.__notes__] == [True]
        assert caught.value.__notes__[0].startswith(f"secondary error: Acting '{other}'")
        acts.does.clear()
        serves(executor, acts)
