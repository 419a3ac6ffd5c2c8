"""Streams of CUDA devices: what is launched where, what fails, and what a lost device does to everybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import EventState, Kernel, KernelFailedError, Priority
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.runtime import CudaRuntime
from dagexec.errors import DeviceError, ResourceError
from tests.cuda.emulated import emulated
from tests.cuda.emulated.machine import Fault, Machine


def cuda(index: int = 0) -> CudaRuntime:
    """The runtime of an emulated device."""
    found = runtime_of(Device("cuda", index))
    assert isinstance(found, CudaRuntime)
    return found


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(asynchronous=True) as machine:
        yield machine


def fill(array: Any, value: int) -> Kernel:
    """A kernel that fills `array`."""
    runtime = cuda(array.data.device_id)
    step = lambda: runtime.api.memsetAsync(array.data.ptr, value, array.nbytes, current.stream_pointer)  # noqa: E731
    return Kernel(step, f"fill with {value}")


def names(machine: Machine) -> list[str]:
    """The calls so far."""
    return [call.name for call in machine.calls]


@pytest.mark.slow
def test_streams_do_not_block_and_a_lower_number_is_a_higher_priority(machine: Machine) -> None:
    runtime = cuda()
    runtime.lease()
    runtime.lease(Priority.HIGH)
    made = [call.arguments for call in machine.calls if call.name == "streamCreateWithPriority"]
    assert made == [(1, 0), (1, -1)]


@pytest.mark.slow
def test_a_launch_goes_to_its_own_stream_and_device_and_leaves_the_callers(machine: Machine) -> None:
    here, there = cuda(0), cuda(1)
    one, other = here.lease(), there.lease()
    seen: list[tuple[int, Any, int]] = []

    def look() -> None:
        seen.append((here.api.getDevice(), current.stream, current.stream_pointer))

    def nested() -> None:
        look()
        other.launch(Kernel(look, "inner"))
        look()

    one.launch(Kernel(nested, "outer"))
    assert seen == [(0, one, one.pointer), (1, other, other.pointer), (0, one, one.pointer)]
    assert (here.api.getDevice(), current.stream, current.stream_pointer) == (0, None, 0)
    other.launch(Kernel(lambda: 1 / 0, "division"))
    assert (here.api.getDevice(), current.stream, current.stream_pointer) == (0, None, 0)


@pytest.mark.slow
def test_a_guard_restores_the_device_of_before(machine: Machine) -> None:
    get = cuda(0).api.getDevice
    with cuda(1).guard():
        assert get() == 1
        with cuda(0).guard():
            assert get() == 0
        assert get() == 1
        with pytest.raises(ZeroDivisionError), cuda(0).guard():
            raise ZeroDivisionError
        assert get() == 1
    assert get() == 0


@pytest.mark.slow
def test_a_new_thread_is_given_a_context_before_its_first_launch(machine: Machine) -> None:
    stream = cuda().lease()
    asked: list[str] = []
    real = machine.memories

    class Api:
        """Says when the two calls are made that bind a thread."""

        def __getattr__(self, name: str) -> Any:
            if name in ("setDevice", "memGetInfo"):
                asked.append(name)
            return getattr(type(self).real, name)

    Api.real = stream.runtime.api  # type: ignore[attr-defined]
    stream.runtime.api = Api()

    def launch_twice() -> None:
        for _ in range(2):
            stream.launch(Kernel(lambda: asked.append("step"), "k"))

    thread = threading.Thread(target=launch_twice)
    thread.start()
    thread.join()
    assert asked == ["setDevice", "memGetInfo", "step", "step"]
    assert real is machine.memories


@pytest.mark.slow
def test_a_step_that_raises_fails_its_stream_and_what_follows_is_passed_over(machine: Machine) -> None:
    runtime = cuda()
    stream, done = runtime.lease(), list[str]()
    array = runtime.allocate(4)
    stream.launch(fill(array, 1))
    stream.launch(Kernel(lambda: 1 / 0, "division"))
    stream.launch(Kernel(lambda: done.append("late"), "late"))
    event = runtime.event("end")
    event.record(stream)
    with pytest.raises(ZeroDivisionError):
        event.finish()
    assert stream.failure is not None
    assert (stream.failure.label, done) == ("division", [])
    stream.reset()
    stream.launch(Kernel(lambda: done.append("again"), "again"))
    assert done == ["again"]


@pytest.mark.slow
def test_an_event_of_a_failed_stream_is_failed_only_when_its_earlier_work_is_done(machine: Machine) -> None:
    runtime, gate = cuda(), threading.Event()
    stream = runtime.lease()
    runtime.api.launchHostFunc(stream.pointer, lambda _: gate.wait(30), 0)
    stream.launch(Kernel(lambda: 1 / 0, "division"))
    event = runtime.event("end")
    event.record(stream)
    assert event.query() is EventState.SCHEDULED
    assert event.error is None
    gate.set()
    with pytest.raises(ZeroDivisionError):
        event.finish()
    assert event.query() is EventState.FAILED


@pytest.mark.slow
def test_a_kernel_may_be_told_of_its_failure_in_place_of_the_stream(machine: Machine) -> None:
    stream, told = cuda().lease(), list[BaseException]()
    stream.launch(Kernel(lambda: 1 / 0, "division", failed=told.append))
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert stream.failure is None


@pytest.mark.slow
def test_a_failure_of_another_stream_keeps_its_label(machine: Machine) -> None:
    stream, error = cuda().lease(), ValueError("x")

    def report() -> None:
        raise KernelFailedError("conv", error)

    stream.launch(Kernel(report, "end of turn"))
    assert stream.failure is not None
    assert (stream.failure.label, stream.failure.error) == ("conv", error)


@pytest.mark.slow
def test_what_interrupts_the_host_is_no_failure_of_the_stream(machine: Machine) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    stream = cuda().lease()
    with pytest.raises(KeyboardInterrupt):
        stream.launch(Kernel(interrupt, "k"))
    assert stream.failure is None
    assert current.stream is None


@pytest.mark.slow
def test_a_busy_stream_is_not_given_back_and_abandoning_it_stops_what_follows(machine: Machine) -> None:
    runtime, gate = cuda(), threading.Event()
    stream, done = runtime.lease(), list[str]()
    stream.abandon(TimeoutError())
    assert stream.failure is None
    runtime.api.launchHostFunc(stream.pointer, lambda _: gate.wait(30), 0)
    with pytest.raises(DeviceError, match="cuda:0 stream 0 cannot be reset: it is not idle"):
        runtime.give_back(stream)
    stream.abandon(TimeoutError("late"))
    stream.launch(Kernel(lambda: done.append("late"), "late"))
    assert isinstance(stream.failure.error if stream.failure else None, TimeoutError)
    assert not stream.synchronize(0.01)
    gate.set()
    assert stream.synchronize(30)
    runtime.give_back(stream)
    assert (stream.failure, done) == (None, [])


@pytest.mark.slow
def test_memory_that_runs_out_in_a_step_is_an_error_of_ours(machine: Machine) -> None:
    machine.faults.append(Fault("malloc"))
    stream = cuda().lease()
    stream.launch(Kernel(lambda: cuda().api.malloc(100), "workspace"))
    assert stream.failure is not None
    assert isinstance(stream.failure.error, ResourceError)
    assert "cuda:0: out of memory: workspace" in str(stream.failure.error)


def test_a_lost_device_fails_all_its_streams_and_ends_every_wait() -> None:
    with emulated(asynchronous=True, faults=[Fault("kernel", "memsetAsync", 1, 700)]) as machine:
        runtime, other = cuda(0), cuda(1)
        one, two, elsewhere = runtime.lease(), runtime.lease(), other.lease()
        array, called = runtime.allocate(8), threading.Event()
        gate = threading.Event()
        runtime.api.launchHostFunc(one.pointer, lambda _: gate.wait(30), 0)
        one.launch(fill(array, 1))
        event = runtime.event("chain 3")
        event.record(one)
        event.when_done(called.set)
        gate.set()
        assert called.wait(30)
        assert event.query() is EventState.FAILED
        with pytest.raises(DeviceError, match=r"illegal memory access.*the process has to be restarted.*BLOCKING=1"):
            event.finish()
        assert one.failing
        assert two.failing
        assert not elsewhere.failing
        assert two.synchronize()
        assert two.is_idle
        two.reset()
        assert two.failing
        runtime.give_back(two)
        with pytest.raises(DeviceError, match="has to be restarted"):
            runtime.lease()
        with pytest.raises(DeviceError, match="has to be restarted"):
            runtime.allocate(8)
        late = runtime.event("late")
        late.record(one)
        assert late.query() is EventState.FAILED
        assert elsewhere.synchronize()
        machine.errors.clear()


@pytest.mark.slow
def test_a_stream_has_things_of_its_own(machine: Machine) -> None:
    one, two = cuda().lease(), cuda().lease()
    assert one.once("handle", object) is one.once("handle", object)
    assert one.once("handle", object) is not two.once("handle", object)
