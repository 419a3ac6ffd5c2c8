"""The virtual clock of simulated devices: times follow from launches and events alone, whatever really runs when."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.device import Device
from dagexec.core.stream import Event, Kernel, Stream, StreamObserver
from dagexec.core.tensor import Tensor
from dagexec.devices.sim import SeededDriver, SimSettings, host_time, set_host_time, simulated
from dagexec.errors import DeviceError
from tests.devices.sim_programs import Await, Launch, Program, Record, programs, put

LAUNCH = 2.0


class Log(StreamObserver):
    """Everything an observer is told, as tuples."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        self.told.append(("launched", stream.name, kernel.label))

    def recorded(self, stream: Stream, event: Event) -> None:
        self.told.append(("recorded", stream.name, event.owner))

    def waits(self, stream: Stream, event: Event) -> None:
        self.told.append(("waits", stream.name, event.owner))

    def host_waited(self, event: Event | Stream) -> None:
        self.told.append(("host_waited", event.name if isinstance(event, Stream) else event.owner))

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        self.told.append(("executed", stream.name, kernel.label, start, end))

    def waited(self, stream: Stream, event: Event, start: float, end: float) -> None:
        self.told.append(("waited", stream.name, event.owner, start, end))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.told if entry[0] == kind]


def nothing() -> None:
    """A kernel that does nothing."""


def seconds_of(number: int) -> float:
    return float(1 + number * 7 % 5)


def expected_times(program: Program) -> tuple[dict[int, tuple[float, float]], list[float], float]:
    """Start and end of each kernel, the time of each event, and the host's time, worked out in program order."""
    host, streams, events = 0.0, [0.0] * 4, list[float]()
    kernels: dict[int, tuple[float, float]] = {}
    for instruction in program:
        here = streams[instruction.stream]
        match instruction:
            case Launch(stream, number):
                host += LAUNCH
                kernels[number] = (max(here, host), max(here, host) + seconds_of(number))
                streams[stream] = kernels[number][1]
            case Record(_, _):
                events.append(here)
            case Await(stream, event):
                streams[stream] = max(here, events[event])
    return kernels, events, host


@pytest.mark.slow
@given(programs(), st.one_of(st.none(), st.integers(0, 1000)))
@settings(max_examples=100, deadline=None)
def test_times_follow_from_the_program_under_every_driver(program: Program, seed: int | None) -> None:
    log = Log()
    with simulated(
        "sim:0",
        seed=seed,
        launch_seconds=LAUNCH,
        kernel_seconds=lambda kernel: seconds_of(int(kernel.label.split()[1])),
        observer=log,
    ) as runtime:
        events = put(program, runtime, [runtime.lease() for _ in range(4)], [])
        launched_at = host_time()
        runtime.synchronize()
        times = [event.time for event in events]  # type: ignore[attr-defined]
        finished_at = host_time()
    kernels, expected_events, host = expected_times(program)
    assert launched_at == host
    assert times == expected_events
    executed = {int(label.split()[1]): (start, end) for _, label, start, end in log.of("executed")}
    assert executed == kernels
    waits = [i for i in program if isinstance(i, Await)]
    ends = [end for _, end in kernels.values()] + ([max(times)] if waits and times else [])
    assert finished_at == max([host, *ends])


def test_a_host_thread_that_finishes_an_event_has_at_least_its_time() -> None:
    with simulated("sim:0", launch_seconds=1, kernel_seconds=10) as runtime:
        stream, event = runtime.lease(), runtime.event("e")
        assert host_time() == 0
        stream.launch(Kernel(nothing, "k"))
        event.record(stream)
        stream.launch(Kernel(nothing, "k"))
        assert host_time() == 2
        event.finish()
        assert event.time == 11
        assert host_time() == 11
        set_host_time(100)
        event.finish()
        assert host_time() == 100
        stream.launch(Kernel(nothing, "k"))
        stream.synchronize()
        assert host_time() == 111


def test_each_host_thread_has_a_time_of_its_own() -> None:
    with simulated("sim:0", launch_seconds=1) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "k"))
        seen: list[float] = []

        def other() -> None:
            seen.append(host_time())
            set_host_time(5)
            stream.launch(Kernel(nothing, "k"))
            seen.append(host_time())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [0, 6]
        assert host_time() == 1


def test_copies_take_time_by_their_bytes() -> None:
    with simulated("sim:0", copy_seconds=1, copy_seconds_per_byte=0.5, kernel_seconds=100) as runtime:
        tensor = Tensor(Device("sim", 0))
        tensor.feed(np.arange(4, dtype=np.float32))
        assert host_time() == 1 + 0.5 * 16
        stream = runtime.lease()
        target = np.empty(4, np.float32)
        runtime.copy(target, tensor.array, stream)
        assert host_time() == 9
        stream.synchronize()
        assert host_time() == 18
        assert target.tolist() == [0, 1, 2, 3]


def test_a_blocking_copy_on_a_current_stream_comes_after_its_work() -> None:
    with simulated("sim:0", seed=0, copy_seconds=1, kernel_seconds=10) as runtime:
        tensor = Tensor(Device("sim", 0))
        tensor.feed(np.zeros(3))
        inside = tensor.runtime.host_view(tensor.array)
        stream = runtime.lease()
        stream.launch(Kernel(lambda: inside.fill(7), "fill"))
        assert tensor.fetch().tolist() == [0, 0, 0]  # nobody has waited
        with runtime.using(stream):
            assert tensor.fetch().tolist() == [7, 7, 7]
        assert host_time() == 12  # fed by 1, filled from 1 to 11, fetched by 12


def test_a_kernels_own_estimate_is_its_time_when_the_settings_say_none() -> None:
    with simulated("sim:0", kernel_seconds=None) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "known", 3.0))
        stream.launch(Kernel(nothing, "unknown"))
        stream.synchronize()
        assert host_time() == 3


def test_a_kernel_cannot_take_less_than_no_time() -> None:
    with simulated("sim:0", kernel_seconds=lambda kernel: -1) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "k"))
        stream.synchronize()
        assert stream.failure is not None
        assert str(stream.failure.error) == "kernel_seconds says that k takes -1 seconds"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launch_seconds": -1}, "times of a simulated device are 0 or more seconds"),
        ({"kernel_seconds": float("nan")}, "times of a simulated device are 0 or more seconds"),
        ({"copy_seconds": float("inf")}, "times of a simulated device are 0 or more seconds"),
        ({"memory_limit": -1}, "a memory limit is 0 or more bytes, found -1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        SimSettings(**settings)


def test_a_driver_and_a_seed_are_too_much() -> None:
    with pytest.raises(DeviceError, match="has a driver or a seed, not both"):
        SimSettings(driver=SeededDriver(1), seed=1)


def test_an_observer_is_told_of_what_happens_in_order() -> None:
    log = Log()
    with simulated("sim:0", seed=1, kernel_seconds=1, observer=log) as runtime:
        one, two = runtime.lease(), runtime.lease()
        event = runtime.event("e")
        one.launch(Kernel(nothing, "first"))
        event.record(one)
        two.wait(event)
        two.launch(Kernel(nothing, "second"))
        two.synchronize()
        event.finish()
    assert log.told == [
        ("launched", "sim:0 stream 0", "first"),
        ("recorded", "sim:0 stream 0", "e"),
        ("waits", "sim:0 stream 1", "e"),
        ("launched", "sim:0 stream 1", "second"),
        ("executed", "sim:0 stream 0", "first", 0.0, 1.0),
        ("waited", "sim:0 stream 1", "e", 0.0, 1.0),
        ("executed", "sim:0 stream 1", "second", 1.0, 2.0),
        ("host_waited", "sim:0 stream 1"),
        ("host_waited", "e"),
    ]


def test_a_stream_tells_an_observer_of_its_own_from_the_moment_it_has_it() -> None:
    log = Log()
    with simulated("sim:0", seed=0) as runtime:
        stream = runtime.lease()
        assert stream.observer is None
        stream.launch(Kernel(nothing, "before"))
        stream.observer = log
        assert stream.observer is log
        stream.launch(Kernel(nothing, "during"))
        stream.observer = None
        stream.launch(Kernel(nothing, "after"))
        stream.synchronize()
        assert [label for _, label, *_ in log.of("executed")] == ["during"]
        stream.observer = log
        runtime.give_back(stream)
        assert runtime.lease() is stream
        assert stream.observer is None


def test_an_observer_that_raises_fails_the_stream_it_watches() -> None:
    class Broken(Log):
        def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
            raise ValueError("no pen")

    with simulated("sim:0", observer=Broken()) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "k"))
        assert stream.synchronize(30)
        assert stream.failure is not None
        assert str(stream.failure.error) == "no pen"
