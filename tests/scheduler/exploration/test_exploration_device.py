"""Simulated streams in a controlled schedule: nets are right, a missing wait shows, times are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dagexec import NetDef
from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Kernel
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import DagexecError, DeviceError, OperatorError, RunTimeoutError
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import EarliestFirst, RandomStrategy, explore, explore_seeds, systematic
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization
from tests.scheduler.scenarios import DIAMOND, X, expected, fed, outputs_of, sums

SIM = Device.parse("sim:0")
CROSS = [[], [], [0, 1], [0, 1]]


class WithoutWaits(AsyncDAGNet):
    """Planted: no stream waits for another."""

    def synchronization(self, plan: Plan) -> Synchronization:
        """Records stay."""
        right = super().synchronization(plan)
        return replace(right, waits=tuple(() for _ in right.waits))


def on_sim(net: NetDef) -> NetDef:
    """`net`, on sim:0."""
    moved = NetDef()
    moved.CopyFrom(net)
    moved.device_option.CopyFrom(SIM.to_option())
    return moved


def device_scenario(
    parents: list[list[int]], workers: int = 2, net_class: type[AsyncDAGNet] = AsyncDAGNet, **settings: Any
) -> Callable[[], list[float]]:
    """Two runs on sim:0 with different inputs; fails unless each computes what SimpleNet does. Gives their times."""
    net = sums(parents)
    right = [expected(net, x) for x in (X, -3 * X)]

    def scenario() -> list[float]:
        seconds = []
        with simulated("sim:0", driver=ControlledDriver(), **settings):
            workspace = fed()
            with net_class(on_sim(net), workspace, num_workers=workers) as made:
                for x, bytes_of in zip((X, -3 * X), right, strict=True):
                    workspace.feed_blob("x", x)
                    start = threads().monotonic()
                    made.run()
                    seconds.append(threads().monotonic() - start)
                    assert outputs_of(workspace, net) == bytes_of, "other bytes than SimpleNet's"
                assert runtime_of(SIM).statistics().busy == 0
            assert runtime_of(SIM).statistics().leased == 0
        return seconds

    return scenario


@pytest.mark.slow
@pytest.mark.parametrize(("parents", "workers"), [(DIAMOND, 2), (CROSS, 2), (CROSS, 3)])
def test_a_net_on_a_device_is_right_for_many_seeds(parents: list[list[int]], workers: int) -> None:
    explore_seeds(device_scenario(parents, workers), range(60)).raise_failure()


@pytest.mark.slow
def test_a_net_on_a_device_is_right_under_every_schedule_without_preemption() -> None:
    search = systematic(device_scenario([[], [0], [0]]), preemptions=0)
    search.raise_failure()
    assert search.exhausted


@pytest.mark.slow
def test_a_net_on_a_device_is_right_under_many_schedules_with_preemptions() -> None:
    systematic(device_scenario(CROSS), preemptions=2, limit=300).raise_failure()


def test_one_seed_fixes_the_order_of_streams_and_threads() -> None:
    scenario = device_scenario(CROSS)
    traces = [explore(scenario, seed).trace for seed in range(5)]
    assert traces == [explore(scenario, seed).trace for seed in range(5)]
    assert len(set(traces)) == 5
    assert {event.thread for event in traces[0]} >= {"main", "dagexec-sums-0", "dagexec-sums-1", "sim:0 stream 0"}


def test_the_earliest_first_makes_the_makespan_of_the_model() -> None:
    """Three kernels one after another, each 50 us; the first launch is 5 us after the start, the last far ahead."""
    schedule = explore(device_scenario(DIAMOND, launch_seconds=5e-6, kernel_seconds=50e-6), EarliestFirst())
    schedule.raise_failure()
    assert schedule.result == pytest.approx([160e-6, 160e-6])


def test_eight_kernels_on_four_workers_take_two_rounds() -> None:
    independent: list[list[int]] = [[] for _ in range(8)]
    schedule = explore(device_scenario(independent, 4, launch_seconds=5e-6, kernel_seconds=50e-6), EarliestFirst())
    schedule.raise_failure()
    assert schedule.result == pytest.approx([105e-6, 105e-6], rel=0.1)


@pytest.mark.slow
def test_a_kernel_that_fails_ends_its_run_in_every_schedule_and_not_the_next() -> None:
    net = sums(CROSS)
    right = expected(net)

    def scenario() -> None:
        with simulated("sim:0", driver=ControlledDriver(), faults=[Fault("kernel", match="Sum")]):
            workspace = fed()
            with AsyncDAGNet(on_sim(net), workspace, num_workers=2) as made:
                with pytest.raises(OperatorError, match="Sum"):
                    made.run()
                made.run()
                assert outputs_of(workspace, net) == right

    explore_seeds(scenario, range(40)).raise_failure()


@pytest.mark.slow
def test_a_kernel_that_hangs_past_the_deadline_is_given_up_in_every_schedule_and_no_real_time() -> None:
    net = sums(CROSS)
    right = expected(net)

    def scenario() -> None:
        with simulated("sim:0", driver=ControlledDriver(), faults=[Fault("hang", match="Sum")]):
            workspace = fed()
            with AsyncDAGNet(on_sim(net), workspace, num_workers=2) as made:
                with pytest.raises(RunTimeoutError, match="after 100 seconds"):
                    made.run(timeout=100)
                assert threads().monotonic() >= 100
                made.run()
                assert outputs_of(workspace, net) == right

    explore_seeds(scenario, range(40)).raise_failure()


@pytest.mark.slow
@pytest.mark.parametrize("net_type", ["simple", "async_dag"])
def test_a_kernel_that_hangs_after_the_streams_were_given_up_once_is_given_up_too(net_type: str) -> None:
    """Deadlines may pass at any point: also before a worker that is in its chain yet has launched the kernel."""
    net = sums([[]])

    def scenario() -> None:
        with simulated("sim:0", driver=ControlledDriver(), faults=[Fault("hang")]):
            workspace = fed()
            made = workspace.create_net(on_sim(net), net_type, 1)
            assert isinstance(made, BaseNet)
            with made, pytest.raises(RunTimeoutError):
                made.run(timeout=100)

    systematic(scenario, preemptions=1, limit=80, timeouts=True).raise_failure()


def test_a_driver_is_made_in_scenarios_only() -> None:
    with pytest.raises(DagexecError, match="in a function given to explore"):
        ControlledDriver()


def test_work_of_a_stream_that_waits_for_the_device_is_refused() -> None:
    def scenario() -> None:
        with simulated("sim:0", driver=ControlledDriver()) as runtime:
            stream, other = runtime.lease(), runtime.lease()
            other.launch(Kernel(lambda: None, "never reached"))
            stream.launch(Kernel(lambda: other.synchronize(), "waits for the other"))
            stream.synchronize()
            assert stream.failure is not None
            assert isinstance(stream.failure.error, DeviceError)

    schedule = explore(scenario, RandomStrategy(3))  # the other stream has not come to its kernel then
    schedule.raise_failure()
