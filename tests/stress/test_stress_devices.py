"""Stress on simulated devices: random nets give SimpleNet's bytes there, and what it has found stays mended."""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.device import CPU, Device
from dagexec.core.exclusive import library_state
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.core.stream import Kernel, Stream
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import DagexecError, OperatorError, RunTimeoutError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization
from dagexec.stress.case import NET_TYPES, make_case
from dagexec.stress.devices import HeldResources, leaked
from dagexec.stress.nets import LIBRARY_STATES, RandomNetOptions, random_net
from dagexec.stress.runner import CaseFailedError, Reference, differences, run_case
from tests.nets import temporary_operator
from tests.ops.running import operator_def

PATIENCE = 60
PLACES = [("sim:0",), ("sim:0", "sim:1"), ("sim:0", "sim:1", "cpu")]


@pytest.mark.slow
@pytest.mark.parametrize("devices", PLACES, ids=len)
@pytest.mark.parametrize("seed", [None, 5], ids=["threads", "seeded"])
@pytest.mark.parametrize("net_type", NET_TYPES)
def test_random_nets_on_devices_give_the_bytes_of_the_host(
    net_type: str, seed: int | None, devices: tuple[str, ...]
) -> None:
    for number in range(12):
        net = random_net(random.Random(number), RandomNetOptions(devices))
        reference = Reference(net)
        with (
            simulated(["sim:0", "sim:1"], seed=seed),
            dagexec.compile(
                net.model(), optimize=False, device="sim:0", net_type=net_type, num_workers=2, replicas=2
            ) as executor,
        ):
            for feed in range(3):
                result = executor.run(net.feeds(feed), timeout=PATIENCE)
                assert differences(result, reference[feed]) == [], f"net {number}, feed {feed}"


@pytest.mark.slow
def test_cases_on_devices_pass_and_meet_faults() -> None:
    tried: Counter[str] = Counter()
    for seed in range(25):
        tried += run_case(make_case(seed, "sim:0"))
    assert tried["cases"] == tried["driver: threads"] + tried["driver: seeded"] == 25
    assert tried["operators on sim:1"] > 0
    assert len([name for name in tried if name.startswith("faults met: ")]) >= 3


def one_convolution() -> Model:
    net = NetDef(
        name="conv",
        op=[operator_def("Conv", ["x", "filter", "bias"], ["y"], kernel=3, pad=1, shared_buffer=1)],
        external_input=["x", "filter", "bias"],
    )
    return Model(
        "conv",
        net,
        parameters={"filter": np.ones((2, 2, 3, 3), np.float32), "bias": np.ones(2, np.float32)},
        inputs={"x": InputInfo(dtypes.FLOAT32, (None, 2, 5, 5))},
        outputs=("y",),
    )


def test_a_convolution_works_on_the_shared_buffer_of_a_device() -> None:
    x = np.ones((2, 2, 5, 5), np.float32)
    with (
        simulated("sim:0"),
        dagexec.compile(one_convolution(), optimize=False, device="sim:0", net_type="async_dag") as executor,
    ):
        for _ in range(2):
            assert executor.run({"x": x}, timeout=PATIENCE)["y"][0, 0, 2, 2] == 19


def test_a_blob_whose_shape_only_a_run_tells_crosses_devices() -> None:
    net = NetDef(
        name="cut",
        op=[
            operator_def("Slice", ["x", "zero", "count"], ["cut"]),
            operator_def("Copy", ["cut"], ["copied"]),
            operator_def("Tanh", ["copied"], ["y"]),
        ],
        external_input=["x", "zero", "count"],
    )
    for definition, kind in zip(net.op, (0, 20901, 0), strict=True):
        definition.device_option.device_type = kind
    model = Model(
        "cut",
        net,
        parameters={"zero": np.zeros(1, np.int64)},
        inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3)), "count": InputInfo(dtypes.INT64, (1,))},
        outputs=("y",),
    )
    x = np.ones((4, 3), np.float32)
    with simulated("sim:0"), dagexec.compile(model, optimize=False, net_type="async_dag") as executor:
        for count in (2, 4, 0):
            found = executor.run({"x": x, "count": np.array([count])}, timeout=PATIENCE)["y"]
            np.testing.assert_array_equal(found, np.tanh(x[:count]))


def test_a_run_whose_end_cannot_be_recorded_ends_all_the_same() -> None:
    """A callback at the end of a run that raised used to leave the caller waiting for ever."""
    x = np.ones((2, 2, 5, 5), np.float32)
    fault = Fault("event", match="the end of a run of net 'conv' ")
    with (
        simulated("sim:0", faults=[fault]),
        dagexec.compile(one_convolution(), optimize=False, device="sim:0", net_type="async_dag") as executor,
    ):
        with pytest.raises(OperatorError, match=r"the end of a run of net 'conv' .*recording its event"):
            executor.run({"x": x}, timeout=PATIENCE)
        assert executor.run({"x": x}, timeout=PATIENCE)["y"][0, 0, 2, 2] == 19


@pytest.mark.slow
def test_an_executor_that_cannot_be_compiled_leaves_nothing_behind() -> None:
    model = random_net(random.Random(3), RandomNetOptions(("sim:0", "sim:1"))).model()
    for kind in ("launch", "kernel", "event", "allocation", "copy"):
        with simulated(["sim:0", "sim:1"], faults=[Fault(kind, nth=6)]):
            for device in (Device("sim", 0), Device("sim", 1)):
                for index in range(LIBRARY_STATES):
                    library_state(device, index)  # they are the device's, and stay with it
            before = HeldResources.now(["sim:0", "sim:1"])
            with suppress(DagexecError):
                dagexec.compile(model, optimize=False, device="sim:0", net_type="async_dag").close()
            assert leaked(["sim:0", "sim:1"], before) == [], kind


def kernel(step: Callable[[], object]) -> Kernel:
    return Kernel(step, "work for a library")


def test_work_for_a_library_that_was_given_up_does_not_run_later() -> None:
    """It used to run when the failed stream of its run had been reset, on memory that the next run was using."""
    ran: list[str] = []
    with simulated("sim:0", seed=1) as device:
        state, stream = library_state(Device("sim", 0), 0), device.lease()
        with state.use(stream) as put:
            put(kernel(lambda: ran.append("given up")))
        stream.abandon(RunTimeoutError("enough"))
        told: list[bool] = []
        until_idle(stream)
        state.give_up([stream], lambda: told.append(True))
        assert told == [True]
        stream.reset()
        with state.use(stream) as put:
            put(kernel(lambda: ran.append("next run")))
        device.synchronize()
        assert ran == ["next run"]


def until_idle(stream: Stream) -> None:
    """Wait for `stream` only: a host thread that waits for others would have their work done too."""
    while not stream.is_idle:
        os.sched_yield()


def test_work_for_a_library_that_is_under_way_is_waited_for() -> None:
    inside, go_on, told = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    with simulated("sim:0") as device:
        state, stream = library_state(Device("sim", 0), 0), device.lease()
        with state.use(stream) as put:
            put(kernel(work))
        assert inside.wait(PATIENCE)
        stream.abandon(RunTimeoutError("enough"))
        assert stream.synchronize(PATIENCE)
        state.give_up([stream], told.set)
        assert not told.is_set()
        go_on.set()
        assert told.wait(PATIENCE)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)], ids=["ValueError", "SystemExit"])
def test_the_operator_that_failed_on_a_device_is_named_by_a_host_chain_that_waits(error: BaseException) -> None:
    """An error that is no Exception used to be blamed on the operator that waited."""

    def body(operator: Operator) -> None:
        raise error

    net = NetDef(
        name="mixed",
        op=[operator_def("Raising", ["x"], ["y"]), operator_def("Relu", ["y"], ["z"])],
        external_input=["x"],
    )
    net.op[0].device_option.device_type = 20901
    model = Model("mixed", net, inputs={"x": InputInfo(dtypes.FLOAT32, (1,))}, outputs=("z",))
    with (
        temporary_operator("Raising", body),
        simulated("sim:0"),
        dagexec.compile(model, optimize=False, net_type="async_dag", num_workers=1) as executor,
    ):
        for _ in range(3):
            with pytest.raises(OperatorError, match=r"^Raising 'y'"):
                executor.run({"x": np.ones(1, np.float32)}, timeout=PATIENCE)


@pytest.mark.slow
def test_events_that_nobody_waits_for_are_found_as_unordered_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector watches a third of the cases; it needs no wrong result to see what is wrong."""
    right = AsyncDAGNet.synchronization

    def without_waits(net: AsyncDAGNet, plan: Plan) -> Synchronization:
        synchronization = right(net, plan)
        on_host = [device == CPU for device in synchronization.devices]
        waits = (row if on_host[chain] else () for chain, row in enumerate(synchronization.waits))
        return replace(synchronization, waits=tuple(waits))

    monkeypatch.setattr(AsyncDAGNet, "synchronization", without_waits)
    found = []
    for seed in range(0, 120, 3):
        try:
            run_case(make_case(seed, "sim:0", "async_dag"))
        except CaseFailedError as error:
            found.append(str(error))
            if "unordered accesses" in found[-1]:
                return
    pytest.fail(f"nothing unordered was found; failures: {found}")
