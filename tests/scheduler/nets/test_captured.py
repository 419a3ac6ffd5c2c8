"""Captured runs on a simulated device: what is captured, when it is captured anew, what is refused, how runs end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import Device
from dagexec.devices.sim import simulated
from dagexec.devices.sim.faults import Fault
from dagexec.devices.sim.stream import SimStream
from dagexec.errors import DeviceError, OperatorError, RunTimeoutError
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.captured import CapturedNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.run import drain
from tests.ops.running import operator_def
from tests.scheduler.nets.test_devices import conv_net, on_devices

SIM = Device("sim", 0)
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


def branches(device: Device = SIM, count: int = 4) -> NetDef:
    """x -> `count` branches of Tanh, Abs -> their Sum, on `device`."""
    operators: list[OperatorDef] = []
    for number in range(count):
        source = "x" if number % 2 == 0 else f"t{number - 1}"
        operators += [
            operator_def("Tanh", [source], [f"t{number}"]),
            operator_def("Abs", [f"t{number}"], [f"a{number}"]),
        ]
    operators.append(operator_def("Sum", [f"a{number}" for number in range(count)], ["y"]))
    return NetDef(name="branches", op=operators, external_input=["x"], device_option=device.to_option())


def workspace_of(**arrays: np.ndarray[Any, Any]) -> Workspace:
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    return workspace


def captured(definition: NetDef, workspace: Workspace, **options: Any) -> CapturedNet:
    return CapturedNet(definition, workspace, num_workers=2, **options)


def expected(x: np.ndarray[Any, Any], definition: NetDef | None = None) -> bytes:
    """The bytes of y from the ordinary net."""
    workspace = workspace_of(x=x)
    with AsyncDAGNet(definition or branches(), workspace, num_workers=2) as net:
        net.run()
        return workspace.fetch_blob("y").tobytes()


class Launches:
    """Counts what the host asks of streams outside of captures."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def take(self) -> list[str]:
        found, self.labels = self.labels, []
        return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted, launch = Launches(), SimStream.launch

    def counting(stream: SimStream, kernel: Any) -> None:
        if stream.capture is None:
            counted.labels.append(kernel.label)
        launch(stream, kernel)

    monkeypatch.setattr(SimStream, "launch", counting)
    return counted


def test_the_first_run_is_an_ordinary_one_and_later_ones_are_replays(launches: Launches) -> None:
    with simulated(SIM):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            for scale in (1.0, 0.5, -3.0, 0.0):
                workspace.feed_blob("x", (X * scale).astype(np.float32))
                launches.take()
                net.run()
                seen = launches.take()
                assert (len(seen) == 1) == (scale != 1.0), seen  # the copy of x
                assert workspace.fetch_blob("y").tobytes() == expected((X * scale).astype(np.float32))


@pytest.mark.slow
def test_results_under_any_interleaving_are_those_of_the_ordinary_net() -> None:
    wanted = expected(X)
    for seed in range(20):
        with simulated(SIM, seed=seed, kernel_seconds=lambda kernel: len(kernel.label) % 7 * 1e-6):
            workspace = workspace_of(x=X)
            with captured(branches(), workspace) as net:
                for _ in range(3):
                    net.run()
                    assert workspace.fetch_blob("y").tobytes() == wanted


def test_branches_overlap_in_a_replay() -> None:
    with simulated(SIM, seed=1, kernel_seconds=1e-3):
        workspace = workspace_of(x=X)
        definition = NetDef(
            name="wide",
            op=[
                *(operator_def("Tanh", ["x"], [f"t{number}"]) for number in range(4)),
                operator_def("Sum", [f"t{number}" for number in range(4)], ["y"]),
            ],
            external_input=["x"],
            device_option=SIM.to_option(),
        )
        with captured(definition, workspace) as net:
            net.run()
            net.run()
            assert net._capture_streams is not None
            main = net._capture_streams.all()[0]
            assert isinstance(main, SimStream)
            before = main.time
            net.run()
            assert main.time - before == pytest.approx(2e-3)  # four Tanh beside each other, Sum


def test_other_shapes_are_captured_anew_and_known_ones_are_not(launches: Launches) -> None:
    with simulated(SIM):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            for rows, replays in ((4, False), (4, True), (2, False), (2, True), (4, True), (2, True)):
                x = X[:rows].copy()
                workspace.feed_blob("x", x)
                launches.take()
                net.run()
                assert (len(launches.take()) == 1) == replays
                assert workspace.fetch_blob("y").tobytes() == expected(x)
            assert len(net._captures) == 2


def test_captures_are_dropped_with_their_preparations() -> None:
    with simulated(SIM):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace, options=RunOptions(preparation_bytes=100 << 10)) as net:
            for rows in range(1, 8):
                for _ in range(2):
                    workspace.feed_blob("x", np.ones((rows, 2), np.float32))
                    net.run()
            gc.collect()
            assert 1 <= len(net._captures) == net.preparation_statistics().kept < 7


def test_a_blob_that_gets_other_memory_is_not_read_where_it_was() -> None:
    weights = np.arange(6, dtype=np.float32)
    definition = NetDef(
        name="weighted", op=[operator_def("Mul", ["x", "w"], ["y"])], external_input=["x", "w"],
        device_option=SIM.to_option(),
    )  # fmt: skip
    with simulated(SIM):
        workspace = workspace_of(x=X, w=weights)
        with captured(definition, workspace) as net:
            for step in range(8):
                w = weights + step
                if step % 2:
                    workspace.feed_blob("w", np.zeros(3, np.float32))
                workspace.feed_blob("w", w)
                net.run()
                np.testing.assert_array_equal(workspace.fetch_blob("y"), X * w)


def test_an_observed_run_is_traced_and_not_replayed() -> None:
    with simulated(SIM, seed=0):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            net.run()
            net.run()
            trace = Trace()
            net.run(trace=trace)
            assert workspace.fetch_blob("y").tobytes() == expected(X)
            net.run()
            assert workspace.fetch_blob("y").tobytes() == expected(X)


def refused() -> Mapping[str, tuple[NetDef, str]]:
    def net(*operators: OperatorDef) -> NetDef:
        return NetDef(name="net", op=operators, external_input=["x"], device_option=SIM.to_option())

    host = operator_def("Abs", ["t"], ["a"])
    host.device_option.CopyFrom(Device().to_option())
    other = operator_def("Abs", ["t"], ["a"])
    other.device_option.CopyFrom(Device("sim", 1).to_option())
    random = operator_def("UniformFill", [], ["r"], shape=[2])
    tanh = operator_def("Tanh", ["x"], ["t"])
    back = operator_def("EnsureCPUOutput", ["t"], ["h"])
    again = operator_def("CopyFromCPUInput", ["h"], ["d"])
    return {
        "on the host": (net(tanh, host, operator_def("Tanh", ["a"], ["y"])), r"Abs.*it runs on the host"),
        "another device": (net(tanh, other), r"it runs on sim:1, others on sim:0"),
        "random": (net(random, tanh), r"UniformFill.*draws random numbers"),
        "dynamic": (
            net(tanh, operator_def("Shape", ["t"], ["s"]), operator_def("Reshape", ["t", "s"], ["y", "old"])),
            r"its shapes depend on values",
        ),
        "a copy in the middle": (net(tanh, back, again), r"copies to or from the host in the middle"),
    }


@pytest.mark.parametrize("why", refused())
def test_what_cannot_be_captured_is_refused_by_name(why: str) -> None:
    definition, message = refused()[why]
    with simulated([SIM, Device("sim", 1)]) as runtime:
        with pytest.raises(DeviceError, match=message + ".*; compile the net without capture"):
            captured(definition, workspace_of(x=X))
        assert runtime.statistics().leased == 0


def test_compile_refuses_the_host_and_other_net_types() -> None:
    with pytest.raises(DeviceError, match=r"capture is for cuda:N and sim:N: on cpu there is nothing to capture"):
        dagexec.compile("zoo:lenet", capture=True)
    with pytest.raises(ValueError, match="capture is for net type 'async_dag', not 'dag'"):
        dagexec.compile("zoo:lenet", capture=True, net_type="dag", device="sim:0")


def test_a_kernel_that_fails_in_a_replay_fails_its_run_alone() -> None:
    fails = [False]
    with simulated(SIM, faults=[Fault("kernel", lambda label: fails[0] and "Sum" in label)]):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            net.run()
            net.run()
            fails[0] = True
            with pytest.raises(OperatorError, match=r"Sum.* failed") as caught:
                net.run()
            assert "kernel" in str(caught.value)
            net.run()
            assert workspace.fetch_blob("y").tobytes() == expected(X)


def test_a_capture_that_fails_says_so_and_is_tried_again() -> None:
    with simulated(SIM, faults=[Fault("launch", "a capture of")]):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            net.run()
            with pytest.raises(OperatorError, match=r"net 'branches', captured failed: .*launch"):
                net.run()
            net.run()
            assert workspace.fetch_blob("y").tobytes() == expected(X)


def test_what_goes_wrong_during_the_capture_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = SimStream.launch

    def failing(stream: SimStream, kernel: Any) -> None:
        if stream.capture is not None and "Sum" in kernel.label:
            raise DeviceError("operation not permitted when stream is capturing")
        launch(stream, kernel)

    with simulated(SIM) as runtime:
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            net.run()
            monkeypatch.setattr(SimStream, "launch", failing)
            with pytest.raises(OperatorError, match=r"net 'branches' cannot be captured: .*Sum.*without capture") as e:
                net.run()
            assert "Sum" in e.value.operator
            monkeypatch.undo()
            net.run()
            assert workspace.fetch_blob("y").tobytes() == expected(X)
        assert runtime.statistics().leased == 0


def test_a_replay_that_hangs_is_stopped_by_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "ABANDON_AFTER", 0.05)
    hangs = [False]
    with simulated(SIM, faults=[Fault("hang", lambda label: hangs[0] and "Abs" in label)]):
        workspace = workspace_of(x=X)
        with captured(branches(), workspace) as net:
            net.run()
            net.run()
            hangs[0] = True
            with pytest.raises(RunTimeoutError):
                net.run(timeout=0.05)
            hangs[0] = False
            net.run()
            assert workspace.fetch_blob("y").tobytes() == expected(X)


@pytest.mark.parametrize("arguments", [{"shared_buffer": 1}, {"engine": "CUDNN", "cudnn_state": 1}])
def test_operators_that_take_turns_are_captured_beside_others_that_use_the_same(arguments: dict[str, Any]) -> None:
    definition = on_devices(conv_net(**arguments), [SIM])

    def workspace() -> Workspace:
        made = workspace_of(
            x=np.random.default_rng(1).normal(size=(1, 4, 12, 12)).astype(np.float32),
            w=np.random.default_rng(2).normal(size=(4, 4, 3, 3)).astype(np.float32),
        )
        dagexec.create_shared_buffer(made, SIM)
        return made

    outputs = [name for op in definition.op for name in op.output]
    with simulated(SIM):
        first, second = workspace(), workspace()
        reference = workspace()
        with AsyncDAGNet(definition, reference, num_workers=2) as plain:
            plain.run()
        wanted = {name: reference.fetch_blob(name).tobytes() for name in outputs}
        with captured(definition, first) as one, AsyncDAGNet(definition, second, num_workers=2) as other:
            nets: list[tuple[BaseNet, Workspace]] = [(one, first), (other, second)]
            failures: list[BaseException] = []

            def run(net: BaseNet, own: Workspace) -> None:
                try:
                    for _ in range(5):
                        net.run()
                        assert {name: own.fetch_blob(name).tobytes() for name in outputs} == wanted
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=run, args=pair) for pair in nets]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not failures


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_replica_of_an_executor_has_a_capture_of_its_own() -> None:
    generator = np.random.default_rng(0)
    with (
        dagexec.compile("zoo:lenet", optimize=False, net_type="simple") as plain,
        dagexec.compile(
            "zoo:lenet", device="sim:0", capture=True, optimize=False, replicas=3, num_workers=2
        ) as executor,
    ):
        assert executor.net_type == "async_dag"
        [(name, info)] = executor.inputs.items()
        shape = [size if isinstance(size, int) and size > 0 else 1 for size in info.shape or ()]
        feeds = [{name: generator.random(shape, np.float32)} for _ in range(24)]
        found = await asyncio.gather(*(executor.run_async(feed, timeout=60) for feed in feeds))
        for feed, outputs in zip(feeds, found, strict=True):
            wanted = plain.run(feed)
            assert all(outputs[key].tobytes() == wanted[key].tobytes() for key in wanted)


def test_closing_gives_the_streams_back() -> None:
    with simulated(SIM) as runtime:
        workspace = workspace_of(x=X)
        net = captured(branches(), workspace)
        for _ in range(3):
            net.run()
        assert runtime.statistics().leased > 0
        net.close()
        net.close()
        assert runtime.statistics().leased == 0
