"""Captures on the simulated device: what was asked is asked again, in the same order, at the cost of one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.device import Device
from dagexec.core.stream import EventState, Kernel
from dagexec.core.tensor import Tensor
from dagexec.devices.sim import Fault, host_time, simulated
from dagexec.errors import DeviceError
from tests.devices.sim_programs import Program, predecessors, programs, put


def nothing() -> None:
    """A kernel that does nothing."""


@pytest.mark.slow
@given(programs(), st.one_of(st.none(), st.integers(0, 1000)), st.sampled_from([0.0, 1.0]))
@settings(max_examples=60, deadline=None)
def test_a_replay_keeps_forks_and_joins(program: Program, seed: int | None, seconds: float) -> None:
    before = predecessors(program)
    with simulated("sim:0", seed=seed, kernel_seconds=seconds) as runtime:
        streams: list[Any] = [runtime.lease() for _ in range(4)]
        log: list[int] = []
        with runtime.capture(streams) as capture:
            events = put(program, runtime, streams, log)
        runtime.synchronize()
        assert log == []
        for _ in range(3):
            for event in events:
                event.reset()
            capture.replay()
            runtime.synchronize()
            assert all(event.query() is EventState.SUCCESS for event in events)
            place = {number: position for position, number in enumerate(log)}
            assert sorted(log) == sorted(before)
            for number, earlier in before.items():
                assert all(place[other] < place[number] for other in earlier)
            log.clear()


def test_a_replay_costs_one_launch() -> None:
    with simulated("sim:0", launch_seconds=5, kernel_seconds=1) as runtime:
        stream, other = runtime.lease(), runtime.lease()
        with runtime.capture([stream, other]) as capture:
            fork = runtime.event("fork")
            for _ in range(10):
                stream.launch(Kernel(nothing, "k"))
            fork.record(stream)
            other.wait(fork)
            other.launch(Kernel(nothing, "k"))
        assert host_time() == 0
        assert len(capture) == 11
        capture.replay()
        assert host_time() == 5
        runtime.synchronize()
        assert host_time() == 5 + 10 + 1
        assert runtime.statistics().launches == 11


def test_copies_are_captured_too() -> None:
    with simulated("sim:0", seed=1) as runtime:
        stream, tensor, source = runtime.lease(), Tensor(Device("sim", 0)), np.zeros(3)
        tensor.feed(source)
        with runtime.capture([stream]) as capture:
            runtime.copy(tensor.array, source, stream)
        for value in (1.0, 2.0):
            source[:] = value
            capture.replay()
            stream.synchronize()
            assert tensor.fetch().tolist() == [value] * 3


def test_a_wait_for_work_outside_the_capture_is_refused() -> None:
    with simulated("sim:0") as runtime:
        stream, other = runtime.lease(), runtime.lease()
        outside = runtime.event("something else")
        outside.record(other)
        with runtime.capture([stream]), pytest.raises(DeviceError) as caught:
            stream.wait(outside)
        assert str(caught.value).startswith(
            "sim:0 stream 0 is captured and waits for the event of something else, which the capture did not record"
        )
        with runtime.capture([stream]):
            inside = runtime.event("inside")
            inside.record(stream)
            with pytest.raises(DeviceError, match="event of inside is waited for but was never recorded"):
                other.wait(inside)
            with pytest.raises(DeviceError, match="recorded twice in one capture"):
                inside.record(stream)
            with pytest.raises(DeviceError, match="sim:0 stream 0 is captured: what was asked of it is not done"):
                stream.synchronize()


def test_captures_do_not_nest_and_are_not_replayed_inside() -> None:
    with simulated("sim:0") as runtime:
        stream = runtime.lease()
        with runtime.capture([stream]) as capture:
            with (
                pytest.raises(DeviceError, match="sim:0 stream 0 is already being captured"),
                runtime.capture([stream]),
            ):
                pass
            with pytest.raises(DeviceError, match="a capture can only be replayed after it has ended"):
                capture.replay()
            with pytest.raises(DeviceError, match="sim:0 stream 0 is captured: it cannot be given back"):
                runtime.give_back(stream)
        stream.launch(Kernel(nothing, "k"))
        stream.synchronize()
        assert runtime.statistics().launches == 1


def test_an_event_of_a_capture_must_be_reset_before_the_next_replay() -> None:
    with simulated("sim:0") as runtime:
        stream, event = runtime.lease(), runtime.event("the end")
        with runtime.capture([stream]) as capture:
            stream.launch(Kernel(nothing, "k"))
            event.record(stream)
        capture.replay()
        assert event.finish(30)
        with pytest.raises(DeviceError, match="event of the end must be reset before a replay records it"):
            capture.replay()
        assert runtime.statistics().launches == 1


def test_an_exception_in_a_capture_leaves_the_stream_as_it_was() -> None:
    with simulated("sim:0") as runtime:
        stream, log = runtime.lease(), list[str]()

        def capture_badly() -> None:
            with runtime.capture([stream]):
                stream.launch(Kernel(lambda: log.append("captured"), "k"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            capture_badly()
        stream.launch(Kernel(lambda: log.append("done"), "k"))
        stream.synchronize()
        assert log == ["done"]


def test_the_launch_of_a_replay_can_fail() -> None:
    with simulated("sim:0", faults=[Fault("launch", "a capture of 2 launches")]) as runtime:
        stream = runtime.lease()
        with runtime.capture([stream]) as capture:
            stream.launch(Kernel(nothing, "k"))
            stream.launch(Kernel(nothing, "k"))
        with pytest.raises(DeviceError, match="the launch of a capture of 2 launches failed"):
            capture.replay()
        assert runtime.statistics().launches == 0
        capture.replay()
        stream.synchronize()
        assert runtime.statistics().launches == 2
