"""Faults of the simulated device: each kind shows where a real one would, and leaves the rest of the device alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.core.device import Device
from dagexec.core.stream import EventState, Kernel
from dagexec.core.tensor import Tensor
from dagexec.devices.sim import Fault, RandomFaults, simulated
from dagexec.errors import DeviceError, ResourceError

DRIVERS: list[dict[str, Any]] = [{}, {"seed": 5}]


def nothing() -> None:
    """A kernel that does nothing."""


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_a_launch_fails_at_the_host_and_leaves_the_stream_usable(driver: dict[str, Any]) -> None:
    with simulated("sim:0", faults=[Fault("launch", "conv", nth=2)], **driver) as runtime:
        stream, log = runtime.lease(), list[str]()
        for label in ("conv 1", "relu", "conv 2", "conv 3"):
            kernel = Kernel(lambda label=label: log.append(label), label)
            if label == "conv 2":
                with pytest.raises(DeviceError, match="sim:0 stream 0: the launch of conv 2 failed: a fault of kind"):
                    stream.launch(kernel)
            else:
                stream.launch(kernel)
        stream.synchronize(30)
        assert log == ["conv 1", "relu", "conv 3"]
        assert stream.failure is None
        assert runtime.faults.met == {"launch": 1}


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_a_kernel_fails_on_its_stream(driver: dict[str, Any]) -> None:
    error = ArithmeticError("bit flip")
    with simulated("sim:0", faults=[Fault("kernel", "b", error=error), Fault("kernel", "c")], **driver) as runtime:
        stream, other, log = runtime.lease(), runtime.lease(), list[str]()
        for label in "ab":
            stream.launch(Kernel(lambda label=label: log.append(label), label))
        other.launch(Kernel(nothing, "c"))
        runtime.synchronize()
        assert log == ["a"]
        assert stream.failure is not None
        assert (stream.failure.label, stream.failure.error) == ("b", error)
        assert other.failure is not None
        assert str(other.failure.error) == "sim:0 stream 1: c failed: a fault of kind 'kernel'"


def test_a_copy_fails_on_its_stream_and_a_blocking_one_at_the_host() -> None:
    with simulated("sim:0", seed=0, faults=[Fault("copy", "to sim:0", times=2)]) as runtime:
        tensor = Tensor(Device("sim", 0))
        with pytest.raises(DeviceError, match="sim:0: copy from cpu to sim:0 failed: a fault of kind 'copy'"):
            tensor.feed(np.zeros(3))
        stream = runtime.lease()
        runtime.copy(tensor.array, np.ones(3), stream)
        stream.synchronize()
        assert stream.failure is not None
        assert stream.failure.label == "copy from cpu to sim:0"
        tensor.feed(np.full(3, 2.0))
        assert tensor.fetch().tolist() == [2, 2, 2]


def test_recording_an_event_fails_at_the_host_and_the_event_stays_as_it_was() -> None:
    with simulated("sim:0", faults=[Fault("event", "chain 1")]) as runtime:
        stream, event = runtime.lease(), runtime.event("chain 1")
        with pytest.raises(DeviceError, match="the recording of the event of chain 1 failed: a fault of kind 'event'"):
            event.record(stream)
        assert event.query() is EventState.INITIALIZED
        event.record(stream)
        assert event.finish(30)


def test_an_allocation_fails_as_if_memory_were_full() -> None:
    with simulated("sim:0", faults=[Fault("allocation", nth=2)]) as runtime:
        kept = runtime.allocate(10)
        with pytest.raises(ResourceError, match="sim:0: out of memory: an allocation of 20 bytes failed, a fault"):
            runtime.allocate(20)
        assert runtime.statistics().allocated_bytes == kept.nbytes == 10


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_a_hung_kernel_lets_go_when_its_stream_is_abandoned(driver: dict[str, Any]) -> None:
    with simulated("sim:0", faults=[Fault("hang", "slow")], **driver) as runtime:
        stream, waiting, beside, log = runtime.lease(), runtime.lease(), runtime.lease(), list[str]()
        stream.launch(Kernel(lambda: log.append("slow"), "slow"))
        event = runtime.event("slow")
        event.record(stream)
        waiting.wait(event)
        waiting.launch(Kernel(lambda: log.append("waiting"), "waiting"))
        beside.launch(Kernel(lambda: log.append("beside"), "beside"))
        assert beside.synchronize(30)
        assert not event.finish(timeout=0.02)
        assert [s.is_idle for s in (stream, waiting, beside)] == [False, False, True]
        assert runtime.statistics().busy == 2
        stream.abandon(TimeoutError("deadline"))
        with pytest.raises(TimeoutError, match="deadline"):
            event.finish(30)
        assert waiting.synchronize(30)
        assert log == ["beside"]
        assert waiting.failure is stream.failure
        for leased in (stream, waiting, beside):
            runtime.give_back(leased)
        assert (runtime.statistics().leased, runtime.statistics().busy) == (0, 0)
        again = runtime.lease()
        again.launch(Kernel(lambda: log.append("again"), "again"))
        again.synchronize(30)
        assert log == ["beside", "again"]


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_a_device_with_a_hung_kernel_can_be_closed(driver: dict[str, Any]) -> None:
    with simulated("sim:0", faults=[Fault("hang")], **driver) as runtime:
        stream = runtime.lease()
        stream.launch(Kernel(nothing, "k"))
    assert stream.is_idle
    assert stream.failure is not None
    assert str(stream.failure.error) == "sim:0 is closed"


def fault_pattern(seed: int) -> list[str]:
    found: list[str] = []
    rates = {"launch": 0.1, "kernel": 0.1, "event": 0.1}
    with simulated("sim:0", faults=[RandomFaults(seed, rates)]) as runtime:
        for number in range(200):
            stream = runtime.lease()
            try:
                stream.launch(Kernel(nothing, "k"))
                event = runtime.event("e")
                event.record(stream)
                event.finish(30)
                found.append("")
            except DeviceError as error:
                found.append(str(error).partition("kind ")[2])
            assert stream.synchronize(30), number
            runtime.give_back(stream)
        met = runtime.faults.met
    assert met["launch"] == found.count("'launch'")  # the others may both come to one kernel
    assert all(met[kind] >= found.count(f"'{kind}'") for kind in rates)
    return found


def test_random_faults_come_by_their_rates_and_again_by_their_seed() -> None:
    found = fault_pattern(3)
    assert found == fault_pattern(3)
    assert found != fault_pattern(4)
    for kind in ("launch", "kernel", "event"):
        assert 5 <= found.count(f"'{kind}'") <= 45


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(DeviceError, match="fault kind 'meteor' is unknown; expected one of launch, kernel, copy"):
        Fault("meteor")
    with pytest.raises(DeviceError, match="a fault is counted from 1: found nth=0"):
        Fault("launch", nth=0)
    with pytest.raises(DeviceError, match="random faults: 'kernel' with rate 2"):
        RandomFaults(1, {"kernel": 2})


def test_a_fault_may_be_chosen_by_a_function() -> None:
    with simulated("sim:0", faults=[Fault("kernel", lambda label: label.endswith("7"))]) as runtime:
        streams = [runtime.lease() for _ in range(10)]
        for number, stream in enumerate(streams):
            stream.launch(Kernel(nothing, f"kernel {number}"))
        runtime.synchronize()
        assert [number for number, stream in enumerate(streams) if stream.failure is not None] == [7]
