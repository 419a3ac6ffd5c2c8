"""Whole nets on CUDA devices: all kinds of nets, replicas, errors, traces, and proofs that what runs is ordered."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, OperatorDef, Workspace
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.runtime import runtime_of
from dagexec.errors import DagexecError, OperatorError, ResourceError
from dagexec.scheduler.hazards import Detector, check_net
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.nets.simple import SimpleNet
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.synchronization import Synchronization
from tests.cuda.emulated import cuda_devices, emulated
from tests.cuda.emulated.cudnn import emulated_cudnn
from tests.cuda.emulated.machine import Fault
from tests.ops.running import operator_def

CUDA = Device("cuda", 0)
NETS = (SimpleNet, DAGNet, AsyncDAGNet)
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


def feeds_of(inputs: Any, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random inputs, with 1 for an axis of any size."""
    generator = np.random.default_rng(seed)
    return {
        name: generator.random([size if isinstance(size, int) and size > 0 else 1 for size in info.shape], np.float32)
        for name, info in inputs.items()
    }


def branches(count: int = 4, device: Device = CUDA) -> NetDef:
    """x -> `count` branches of Tanh, Abs, Tanh -> their Sum."""
    operators: list[OperatorDef] = []
    for number in range(count):
        row = ["x", f"a{number}", f"b{number}", f"c{number}"]
        for kind, (source, target) in zip(("Tanh", "Abs", "Tanh"), itertools.pairwise(row), strict=True):
            operators.append(operator_def(kind, [source], [target]))
    operators.append(operator_def("Sum", [f"c{number}" for number in range(count)], ["y"]))
    return NetDef(name="branches", op=operators, external_input=["x"], device_option=device.to_option())


def y_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return 4 * np.tanh(np.abs(np.tanh(x.astype(np.float64))))


@pytest.mark.parametrize("net_class", NETS)
def test_every_kind_of_net_gives_the_same_bytes_run_after_run(net_class: type[BaseNet]) -> None:
    with cuda_devices():
        reference = Workspace()
        reference.feed_blob("x", X)
        with SimpleNet(branches(), reference) as net:
            net.run()
        wanted = reference.fetch_blob("y")
        np.testing.assert_allclose(wanted, y_of(X), rtol=1e-5)
        workspace = Workspace()
        workspace.feed_blob("x", X)
        options = {} if net_class is SimpleNet else {"num_workers": 3}
        with net_class(branches(), workspace, **options) as net:
            for scale in (1, 2, 1):
                workspace.feed_blob("x", X * np.float32(scale))
                net.run(timeout=60)
                if scale == 1:
                    assert workspace.fetch_blob("y").tobytes() == wanted.tobytes()
        assert runtime_of(CUDA).statistics().leased <= 2  # those of the threads that copied


def inception() -> Model:
    """A block of four branches and a classifier, small."""
    random = np.random.default_rng(7)
    shapes = {"w1": (4, 3, 1, 1), "w3": (4, 4, 3, 3), "w5": (4, 3, 5, 5), "wp": (4, 3, 1, 1), "wl": (6, 12, 3, 3)}
    parameters = {name: random.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    parameters |= {"b": random.normal(size=6).astype(np.float32), "wf": random.normal(size=(5, 6)).astype(np.float32)}
    parameters["bf"] = np.zeros(5, np.float32)
    operators = [
        operator_def("Conv", ["x", "w1"], ["a"], kernel=1), operator_def("Relu", ["a"], ["ar"]),
        operator_def("Conv", ["ar", "w3"], ["a3"], kernel=3, pad=1), operator_def("Relu", ["a3"], ["a3r"]),
        operator_def("Conv", ["x", "w5"], ["c5"], kernel=5, pad=2), operator_def("Relu", ["c5"], ["c5r"]),
        operator_def("MaxPool", ["x"], ["p"], kernel=3, pad=1), operator_def("Conv", ["p", "wp"], ["pc"], kernel=1),
        operator_def("Concat", ["a3r", "c5r", "pc"], ["j", "jd"], axis=1),
        operator_def("Conv", ["j", "wl", "b"], ["l"], kernel=3, stride=2), operator_def("Relu", ["l"], ["l"]),
        operator_def("AveragePool", ["l"], ["g"], global_pooling=1), operator_def("FC", ["g", "wf", "bf"], ["f"]),
        operator_def("Softmax", ["f"], ["y"]),
    ]  # fmt: skip
    net = NetDef(name="inception", op=operators, external_input=["x", *parameters])
    return Model("inception", net, None, parameters, {"x": InputInfo(FLOAT32, (2, 3, 9, 9))}, ("y",))


MODELS = {"inception": inception, "lenet": lambda: "zoo:lenet"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimize", [False, True])
def test_nets_agree_with_the_host_and_with_each_other(name: str, optimize: bool) -> None:
    with cuda_devices(), dagexec.compile(MODELS[name](), optimize=False, net_type="simple") as host:
        feeds = feeds_of(host.inputs)
        wanted = host.run(feeds)
        found = []
        for net_type in ("simple", "dag", "async_dag"):
            with dagexec.compile(
                MODELS[name](), device="cuda:0", optimize=optimize, net_type=net_type, num_workers=2
            ) as executor:
                net = executor.net()
                assert all(net.graph.device(index) == CUDA for index in range(len(net.graph)))
                found.append(executor.run(feeds))
        for outputs, (key, array) in itertools.product(found, wanted.items()):
            np.testing.assert_allclose(outputs[key], array, rtol=1e-3, atol=1e-6)
            assert outputs[key].tobytes() == found[0][key].tobytes()


def test_float16_is_computed_on_the_device() -> None:
    with cuda_devices(), dagexec.compile("zoo:lenet", optimize=False, net_type="simple") as host:
        feeds = feeds_of(host.inputs)
        wanted = host.run(feeds)
        with dagexec.compile("zoo:lenet", device="cuda:0", dtype="float16") as executor:
            found = executor.run(feeds)
            convolutions = [op for op in executor.model.net.op if "Conv" in op.type]
            filters = {executor.model.parameters[op.input[1]].dtype for op in convolutions}
        assert filters == {np.dtype(np.float16)}
        for key, array in wanted.items():
            assert found[key].dtype == array.dtype
            np.testing.assert_allclose(found[key], array, atol=2e-3)


def test_float16_is_refused_on_the_host() -> None:
    with pytest.raises(ValueError, match="dtype 'float16' is for cuda:N"):
        dagexec.compile("zoo:lenet", dtype="float16")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_replicas_share_parameters_on_the_device_and_run_at_once() -> None:
    with cuda_devices(), dagexec.compile("zoo:lenet", optimize=False, net_type="simple") as host:
        feeds = [feeds_of(host.inputs, seed) for seed in range(8)]
        with dagexec.compile(
            "zoo:lenet", device="cuda:0", net_type="async_dag", num_workers=2, streams_per_worker=2, replicas=2
        ) as executor:
            replicas = executor._replicas
            shared = [name for name in replicas.parameters.blobs() if name.endswith("@cuda:0")]
            assert shared
            assert not any(name in member.workspace.local_blobs() for name in shared for member in replicas.members)
            results = await asyncio.gather(*(executor.run_async(feed, timeout=60) for feed in feeds))
            for feed, outputs in zip(feeds, results, strict=True):
                for key, array in host.run(feed).items():
                    np.testing.assert_allclose(outputs[key], array, atol=1e-5)


def test_what_only_the_host_has_runs_there_between_the_others() -> None:
    net = NetDef(
        name="queued",
        op=[
            operator_def("Tanh", ["x"], ["a"]),
            operator_def("EnqueueBlobs", ["queue", "a"], ["a"]),
            operator_def("DequeueBlobs", ["queue"], ["b"]),
            operator_def("Abs", ["b"], ["y"]),
        ],
        external_input=["x", "queue"],
        device_option=CUDA.to_option(),
    )
    with cuda_devices():
        workspace = Workspace()
        workspace.run_operator_once(operator_def("CreateBlobsQueue", [], ["queue"], capacity=2, num_blobs=1))
        workspace.feed_blob("x", X)
        with AsyncDAGNet(net, workspace, num_workers=2) as running:
            devices = {op.type: running.graph.device(index) for index, op in enumerate(running.graph.operators)}
            running.run(timeout=60)
            running.run(timeout=60)
        assert devices["EnqueueBlobs"] == devices["DequeueBlobs"] == CPU
        assert devices["Tanh"] == devices["Abs"] == CUDA
        np.testing.assert_allclose(workspace.fetch_blob("y"), np.abs(np.tanh(X)), rtol=1e-6)


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_an_error_with_the_numbers() -> None:
    with emulated(memory_limit=1 << 20):
        workspace = Workspace()
        workspace.feed_blob("x", np.zeros((512, 1024), np.float32))
        with AsyncDAGNet(branches(), workspace, num_workers=2) as net:
            with pytest.raises(ResourceError, match="cuda:0"):
                net.run()
            workspace.feed_blob("x", X)
            net.run()
            np.testing.assert_allclose(workspace.fetch_blob("y"), y_of(X), rtol=1e-5)


@pytest.mark.parametrize("net_class", NETS)
def test_a_launch_that_fails_fails_its_run_and_names_its_operator(net_class: type[BaseNet]) -> None:
    with emulated() as machine:
        workspace = Workspace()
        workspace.feed_blob("x", X)
        with net_class(branches(), workspace) as net:
            machine.faults.append(Fault("launch", "", 3, 701))
            with pytest.raises(OperatorError, match=r"cuda") as caught:
                net.run()
            assert "of net 'branches'" in caught.value.operator
            net.run()
            np.testing.assert_allclose(workspace.fetch_blob("y"), y_of(X), rtol=1e-5)


def spans_of(trace: Trace) -> list[tuple[str, float, float]]:
    return [(track.stream.name, kernel.start, kernel.end) for track in trace.tracks for kernel in track.kernels]


def test_branches_overlap_on_several_streams_in_a_trace_of_device_time(tmp_path: Path) -> None:
    with emulated(asynchronous=True, seed=1, kernel_seconds=1e-3) as machine:
        workspace = Workspace()
        workspace.feed_blob("x", X)
        trace = Trace()
        with AsyncDAGNet(branches(), workspace, num_workers=1, options=RunOptions(streams_per_worker=4)) as net:
            net.run()
            net.run(trace=trace)
        trace.write(tmp_path / "trace.json")
        assert machine.races == []
    spans = spans_of(trace)
    assert len({name for name, _start, _end in spans}) == 4
    overlapping = [
        (one, other)
        for one, other in itertools.combinations(spans, 2)
        if one[0] != other[0] and min(one[2], other[2]) - max(one[1], other[1]) > 1e-4
    ]
    assert len(overlapping) >= 3
    assert "cuda:0, device time" in (tmp_path / "trace.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimize", [False, True])
def test_the_very_plans_that_run_are_proved_and_no_race_is_met(name: str, optimize: bool) -> None:
    with emulated(asynchronous=True, record=False) as machine:
        with dagexec.compile(
            MODELS[name](), device="cuda:0", optimize=optimize, net_type="async_dag", num_workers=2,
            streams_per_worker=2,
        ) as executor:  # fmt: skip
            detector = Detector()
            feeds = feeds_of(executor.inputs)
            outputs = executor.run(feeds, trace=detector)
            again = executor.run(feeds)
            assert all(again[key].tobytes() == outputs[key].tobytes() for key in outputs)
            assert detector.races == []
            proof = check_net(executor.net())
            assert proof.holds, [str(found) for found in (*proof.unordered, *proof.overwritten)]
            assert proof.pairs_checked
        assert machine.races == []


class LessOrdered(AsyncDAGNet):
    """Leaves out the wait of the last chain for one of its parents."""

    def synchronization(self, plan: Plan) -> Synchronization:
        found = super().synchronization(plan)
        last = max(range(len(found.waits)), key=lambda chain: len(found.waits[chain]))
        less = (*found.waits[:last], found.waits[last][1:], *found.waits[last + 1 :])
        return replace(found, waits=less)


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_found_by_the_proof_by_the_detector_and_in_the_emulation() -> None:
    races: list[str] = []
    for seed in range(10):
        with emulated(asynchronous=True, seed=seed, kernel_seconds=1e-5) as machine:
            workspace = Workspace()
            workspace.feed_blob("x", X)
            with LessOrdered(branches(), workspace, num_workers=1, options=RunOptions(streams_per_worker=4)) as net:
                detector = Detector()
                net.run(trace=detector)
                net.run()
                assert any("'c" in str(race) for race in detector.races)
                proof = check_net(net)
                assert not proof.holds
                assert all("Sum" in str(found) for found in proof.unordered)
            races += machine.races
    assert races


def test_errors_say_what_mends_them() -> None:
    with emulated(devices=1), pytest.raises(DagexecError, match="cuda:3"):
        dagexec.compile("zoo:lenet", device="cuda:3")


@pytest.mark.parametrize("options", [{}, {"library_states": True}, {"layout": "NHWC"}, {"capture": True}], ids=str)
def test_convolutions_are_given_to_cudnn(options: dict[str, Any]) -> None:
    with dagexec.compile(inception(), optimize=False, net_type="simple") as host:
        feeds = feeds_of(host.inputs)
        wanted = host.run(feeds)["y"]
    chosen: dict[str, Any] = {"net_type": "async_dag", "num_workers": 2, "streams_per_worker": 2} | options
    with emulated_cudnn() as (machine, _), dagexec.compile(inception(), device="cuda:0", **chosen) as executor:
        for _ in range(3):
            np.testing.assert_allclose(executor.run(feeds)["y"], wanted, rtol=1e-4)
        operators = executor.net().operators
        engines = [operator.definition.engine for operator in operators if "Conv" in operator.definition.type]
        assert engines == ["CUDNN"] * len(engines)
        assert engines
        states = {operator.library_state for operator in operators} - {None}
        assert bool(states) == options.get("library_states", False)
        assert len(states) != 1
        assert any(call.name == "cudnn.execute" for call in machine.calls)
        if "layout" in options:
            assert any(operator.arguments.string("order", "") == "NHWC" for operator in operators)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "resnet50", "nasnet_a"])
def test_large_nets_are_on_the_device_as_a_whole_and_proved_before_they_run(name: str) -> None:
    with (
        emulated(record=False),
        dagexec.compile(
            f"zoo:{name}", device="cuda:0", net_type="async_dag", num_workers=2, streams_per_worker=2
        ) as executor,
    ):
        net = executor.net()
        assert {net.graph.device(index) for index in range(len(net.graph))} == {CUDA}
        for blob, array in feeds_of(executor.inputs).items():
            net.workspace.feed_blob(blob, array)
        proof = check_net(net)
        assert proof.holds
        assert proof.events > 10
