"""Engine CUDNN on emulated devices, with the stand-in for cuDNN: protocol, handles, plans, results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.choices import choices
from dagexec.core.device import Device
from dagexec.core.exclusive import LibraryState, library_state
from dagexec.core.graph import build_graph
from dagexec.core.stream import Kernel
from dagexec.devices.cuda.cudnn_graph import FORWARD, ConvGraph, ConvParameters, TensorLayout, aligned
from dagexec.devices.cuda.cudnn_handle import CudnnHandle, thread_handles
from dagexec.devices.cuda.cudnn_plans import PlanOptions, plan_cache
from dagexec.devices.cuda.runtime import cuda_runtime
from dagexec.errors import DeviceError, UnsupportedFeatureError
from dagexec.scheduler.hazards import check_net, named_accesses
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.captured import CapturedNet
from dagexec.scheduler.nets.options import RunOptions
from tests.cuda.emulated.cudnn import CudnnModule, Engine, emulated_cudnn, numerical_note
from tests.cuda.emulated.machine import Machine
from tests.ops.running import Array, on_device, operator_def, run_operator

CUDA = Device("cuda", 0)
LIMIT = 1 << 20
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def executed(machine: Machine) -> list[Any]:
    """The calls of `execute`."""
    return [call for call in machine.calls if call.name == "cudnn.execute"]


def conv_graph(channels: int = 4, size: int = 6, **options: Any) -> ConvGraph:
    """A 3x3 convolution of float32."""
    x = TensorLayout.of(np.empty((2, channels, size, size), np.float32), channels_last=False)
    weights = TensorLayout.of(np.empty((4, channels, 3, 3), np.float32), channels_last=False)
    y = TensorLayout.of(np.empty((2, 4, size, size), np.float32), channels_last=False)
    return ConvGraph(FORWARD, "float32", x, weights, y, ConvParameters((1, 1), (1, 1), (1, 1), (1, 1)), **options)


def compare(op_type: str, arrays: list[Array], outputs: int, dtype: Any, executions: int, **arguments: Any) -> None:
    """Run on CUDA with engine CUDNN and on the host in float64; cuDNN must have been asked `executions` times."""
    kind = np.dtype(dtype)
    given = [array.astype(kind) for array in arrays]
    expected = run_operator(op_type, [array.astype(np.float64) for array in given], outputs, **arguments)
    names = [f"x{index}" for index in range(len(given))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    definition.engine = "CUDNN"
    with emulated_cudnn() as (machine, _):
        found = on_device(CUDA, definition, dict(zip(names, given, strict=True)))
        assert len(executed(machine)) == executions
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, kind)
        limit = TOLERANCE[kind.name] * float(np.abs(other).max(initial=1.0))
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=0, atol=limit)


GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((2, 4, 5, 5), (6, 4, 1, 1), {"kernel": 1}),
    "3x3": ((2, 4, 7, 6), (6, 4, 3, 3), {"kernel": 3, "pad": 1}),
    "strides, and pads on one side": ((1, 3, 8, 9), (4, 3, 3, 3), {"kernel": 3, "stride": 2, "pads": [0, 0, 1, 1]}),
    "groups": ((2, 4, 5, 5), (6, 2, 3, 3), {"kernel": 3, "group": 2, "pads": [1, 0, 1, 2]}),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), {"kernel": 3, "group": 4, "stride": 2, "pad": 1}),
    "dilation": ((1, 2, 9, 9), (3, 2, 3, 3), {"kernel": 3, "dilation": 2, "pad": 2}),
    "pixels that no window reads": ((1, 2, 8, 8), (3, 2, 3, 3), {"kernel": 3, "stride": 3}),
    "SAME_LOWER": ((1, 2, 7, 8), (3, 2, 4, 4), {"kernel": 4, "stride": 2, "legacy_pad": 5}),
    "one spatial axis": ((2, 3, 9), (4, 3, 3), {"kernels": [3], "strides": [2], "pads": [1, 0]}),
    "three spatial axes": ((1, 2, 4, 5, 6), (4, 1, 2, 3, 2), {"kernels": [2, 3, 2], "group": 2, "pads": [1] * 6}),
}


def image(shape: tuple[int, ...], order: str) -> Array:
    """Random numbers, in that order."""
    found = np.random.default_rng(sum(shape)).standard_normal(shape)
    return np.ascontiguousarray(np.moveaxis(found, 1, -1)) if order == "NHWC" else found


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions_and_their_gradients_are_those_of_the_host(name: str, order: str) -> None:
    shape, weights, arguments = GEOMETRIES[name]
    x, filters, bias = image(shape, order), image(weights, order), np.arange(float(weights[0]))
    arguments = {**arguments, "order": order}
    compare("Conv", [x, filters, bias], 1, np.float32, 1, **arguments)
    compare("Conv", [x, filters], 1, np.float16, 1, **arguments)
    (y,) = run_operator("Conv", [x, filters], **arguments)
    gradient = np.random.default_rng(1).standard_normal(y.shape)
    compare("ConvGradient", [x, filters, gradient], 3, np.float32, 2, **arguments)
    compare("ConvGradient", [x, filters, gradient], 2, ml_dtypes.bfloat16, 2, no_bias=1, **arguments)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("shape", "weights", "arguments"),
    [
        ((2, 4, 4, 5), (4, 3, 3, 3), {"kernel": 3, "stride": 2, "pad": 1, "adj": 1}),
        ((1, 4, 5, 5), (4, 2, 2, 2), {"kernel": 2, "group": 2}),
        ((1, 2, 6), (2, 3, 4), {"kernels": [4], "strides": [3]}),
    ],
)
def test_transposed_convolutions_and_their_gradients_are_those_of_the_host(
    shape: tuple[int, ...], weights: tuple[int, ...], arguments: dict[str, Any], order: str
) -> None:
    x, filters = image(shape, order), image(weights, order)
    arguments = {**arguments, "order": order}
    bias = np.arange(float(weights[1] * arguments.get("group", 1)))
    compare("ConvTranspose", [x, filters, bias], 1, np.float32, 1, **arguments)
    (y,) = run_operator("ConvTranspose", [x, filters, bias], **arguments)
    gradient = np.random.default_rng(1).standard_normal(y.shape)
    compare("ConvTransposeGradient", [x, filters, gradient], 3, np.float32, 2, **arguments)


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize(
    ("bias", "post_ops"),
    [
        (1, ["relu"]),
        (0, ["relu"]),
        (1, ["add:3", "relu"]),
        (0, ["add:2", "relu"]),
        (0, ["add:2"]),
        (1, []),
        (1, ["clip:-0.5:0.5"]),
        (1, ["add:3", "relu", "linear:2:1"]),
    ],
)
def test_bias_residual_and_relu_are_one_graph_or_one_kernel_behind_it(
    bias: int, post_ops: list[str], fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = (Engine("eng0", fuses=fuses), Engine("eng1", fuses=False))
    monkeypatch.setattr("tests.cuda.emulated.cudnn.ENGINES", engines)
    x, filters, more = image((2, 3, 5, 5), "NCHW"), image((4, 3, 3, 3), "NCHW"), image((2, 4, 5, 5), "NCHW")
    given = [x, filters, *([np.arange(4.0) - 2] if bias else []), *([more] if "add" in str(post_ops) else [])]
    compare("FusedConv", given, 1, np.float32, 1, kernel=3, pad=1, bias=bias, post_ops=post_ops, nan="any")


@pytest.mark.parametrize(("nan", "left"), [("kept", 27), ("any", 0)])
def test_nan_stays_nan_unless_anything_will_do(nan: str, left: int) -> None:
    x, filters = image((2, 3, 5, 5), "NCHW").astype(np.float32), image((3, 3, 3, 3), "NCHW").astype(np.float32)
    x[1, 2, 2, 2] = np.nan
    definition = operator_def("FusedConv", ["x", "w"], ["y"], kernel=3, pad=1, post_ops=["relu"], nan=nan)
    definition.engine = "CUDNN"
    with emulated_cudnn() as (machine, _):
        (found,) = on_device(CUDA, definition, {"x": x, "w": filters})
        assert len(executed(machine)) == 1
    assert np.isnan(found).sum() == left


@pytest.mark.parametrize("bias", [0, 1])
def test_what_is_summed_into_the_output_in_place_is_read_before_it_is_written(bias: int) -> None:
    x, filters, old = (image(shape, "NCHW").astype(np.float32) for shape in ((1, 2, 4, 4), (2, 2, 1, 1), (1, 2, 4, 4)))
    names, post_ops = ["x", "w", *["b"] * bias, "y"], [f"sum:{2 + bias}", "relu"]
    definition = operator_def("FusedConv", names, ["y"], kernel=1, bias=bias, post_ops=post_ops)
    definition.engine = "CUDNN"
    shift = np.array([0.5, -0.5], np.float32)
    with emulated_cudnn() as (machine, _):
        (found,) = on_device(CUDA, definition, {"x": x, "w": filters, "b": shift, "y": old})
        assert len(executed(machine)) == 1
    (product,) = run_operator("Conv", [x, filters, *[shift] * bias], kernel=1)
    np.testing.assert_allclose(found, np.maximum(product + old, 0), atol=1e-5)


def test_an_output_in_the_other_order_is_written_by_cudnn_or_behind_it() -> None:
    x, filters = image((2, 3, 5, 4), "NCHW"), image((4, 3, 3, 3), "NCHW")
    compare("FusedConv", [x, filters], 1, np.float32, 1, kernel=3, post_ops=["relu"], output_order="NHWC")


def test_float64_and_tensors_without_elements_are_for_the_default_engine() -> None:
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=1)
    definition.engine = "CUDNN"
    with emulated_cudnn() as (machine, _):
        (y,) = on_device(CUDA, definition, {"x": np.ones((1, 2, 2, 2)), "w": np.ones((1, 2, 1, 1))})
        assert (y == 2).all()
        none = {"x": np.ones((0, 2, 2, 2), np.float32), "w": np.ones((1, 2, 1, 1), np.float32)}
        assert on_device(CUDA, definition, none)[0].shape == (0, 1, 2, 2)
        assert not executed(machine)


# Library states


def test_a_library_state_is_used_between_two_events_on_its_own_stream() -> None:
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3, pad=1, cudnn_state=2)
    definition.engine = "CUDNN"
    arrays = {"x": np.ones((1, 2, 4, 4), np.float32), "w": np.ones((2, 2, 3, 3), np.float32)}
    with emulated_cudnn() as (machine, _):
        on_device(CUDA, definition, arrays)
        state = library_state(CUDA, 2)
        names = ("cudnn.execute", "cudnn.set_stream", "eventRecord", "streamWaitEvent")
        calls = [call for call in machine.calls if call.name in names]
        at = next(index for index, call in enumerate(calls) if call.name == "cudnn.execute")
        before, waits, sets, execute, after, goes_on = calls[at - 3 : at + 3]
    assert [call.name for call in (before, waits, sets, execute, after, goes_on)] == [
        "eventRecord", "streamWaitEvent", "cudnn.set_stream", "cudnn.execute", "eventRecord", "streamWaitEvent",
    ]  # fmt: skip
    own, user = state.stream.pointer, before.stream  # type: ignore[attr-defined]
    assert user != own
    assert [call.stream for call in (waits, sets, execute, after)] == [own] * 4
    assert goes_on.stream == user
    assert waits.arguments[0] == before.arguments[0]
    assert goes_on.arguments[0] == after.arguments[0]
    assert execute.arguments[0] is state.handle.native  # type: ignore[attr-defined]


def branches(states: list[int | None]) -> tuple[NetDef, Workspace]:
    """Convolutions of one input, each with that library state, or inline."""
    net = NetDef(name="branches")
    net.device_option.CopyFrom(CUDA.to_option())
    rng = np.random.default_rng(0)
    workspace = Workspace()
    workspace.feed_blob("x", rng.standard_normal((1, 4, 6, 6)).astype(np.float32), device=CUDA)
    for index, state in enumerate(states):
        workspace.feed_blob(f"w{index}", rng.standard_normal((4, 4, 3, 3)).astype(np.float32), device=CUDA)
        more = {} if state is None else {"cudnn_state": state}
        definition = operator_def("Conv", ["x", f"w{index}"], [f"y{index}"], kernel=3, pad=1, **more)
        definition.engine = "CUDNN"
        net.op.append(definition)
    return net, workspace


class Overlap:
    """How many kernels of cuDNN are at work at once; `expected` of them wait for each other."""

    def __init__(self, expected: int) -> None:
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(expected) if expected > 1 else None

    def __call__(self, what: str) -> None:
        if what != "compute":
            return
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        if self._barrier is not None:
            self._barrier.wait(30)
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize(("states", "most"), [([1, 1, 1], 1), ([0, 3], 2), ([None, None], 2)])
def test_operators_on_one_state_never_overlap_and_others_do(states: list[int | None], most: int) -> None:
    with emulated_cudnn(asynchronous=True) as (_, module):
        net, workspace = branches(states)
        with AsyncDAGNet(net, workspace, num_workers=1, options=RunOptions(streams_per_worker=3)) as running:
            running.run(timeout=60)
            module.pause = overlap = Overlap(most)
            running.run(timeout=60)
        assert overlap.most == most


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("states", [[0, 0, 1, 1], [None] * 4, [2, None, 2, None]])
def test_results_are_those_of_the_host_whatever_the_order(states: list[int | None], seed: int) -> None:
    with emulated_cudnn(asynchronous=True, seed=seed):  # which raises at its end when memory is raced for
        net, workspace = branches(states)
        with AsyncDAGNet(net, workspace, num_workers=2, options=RunOptions(streams_per_worker=2)) as running:
            for _ in range(2):
                running.run(timeout=60)
        found = [workspace.fetch_blob(f"y{index}") for index in range(len(states))]
        inputs = [workspace.fetch_blob(name) for name in ("x", *(f"w{index}" for index in range(len(states))))]
    for index, one in enumerate(found):
        (expected,) = run_operator("Conv", [inputs[0], inputs[1 + index]], kernel=3, pad=1)
        np.testing.assert_allclose(one, expected, atol=1e-4)


@pytest.mark.slow
def test_the_workspace_grows_when_the_stream_of_the_state_is_idle() -> None:
    opened, started, grown = threading.Event(), threading.Event(), threading.Event()

    def hold(what: str) -> None:
        if what == "compute":
            started.set()
            opened.wait(30)

    with emulated_cudnn(asynchronous=True) as (_, module):
        net, workspace = branches([1])
        with AsyncDAGNet(net, workspace) as running:
            running.run(timeout=60)
            state = library_state(CUDA, 1)
            assert state.workspace(0).nbytes > 0
            module.pause = hold
            runner = threading.Thread(target=running.run)
            runner.start()
            assert started.wait(30)
            grower = threading.Thread(target=lambda: (state.reserve(1 << 20), grown.set()))
            grower.start()
            assert not grown.wait(0.05)
            opened.set()
            for thread in (grower, runner):
                thread.join(30)
            assert grown.is_set()
            assert state.workspace(0).nbytes == 1 << 20


@pytest.fixture
def state() -> Iterator[LibraryState]:
    """A library state of an emulated device that works at once."""
    with emulated_cudnn():
        yield library_state(CUDA, 0)


def test_what_fails_in_a_library_state_fails_its_user_and_no_other(state: LibraryState) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    done: list[str] = []
    runtime = cuda_runtime(CUDA)
    stream, other = runtime.lease(), runtime.lease()
    with state.use(stream) as launch:
        launch(Kernel(fail, "failing"))
        launch(Kernel(lambda: done.append("behind it"), "behind it"))
    with state.use(other) as launch:
        launch(Kernel(lambda: done.append("other's"), "other's"))
    assert done == ["other's"]
    assert stream.failure is not None
    assert (stream.failure.label, str(stream.failure.error)) == ("failing", "on purpose")
    assert other.failure is None
    assert state.stream.failure is None


@pytest.mark.slow
def test_work_given_up_is_waited_for_as_it_cannot_be_taken_back() -> None:
    opened, started, told = threading.Event(), threading.Event(), threading.Event()

    def hold(what: str) -> None:
        if what == "compute":
            started.set()
            opened.wait(30)

    with emulated_cudnn(asynchronous=True) as (_, module):
        net, workspace = branches([1])
        with AsyncDAGNet(net, workspace) as running:
            running.run(timeout=60)
            step = running.operators[0].bind(None).step
            module.pause = hold
            state, runtime = library_state(CUDA, 1), cuda_runtime(CUDA)
            first, second = runtime.lease(), runtime.lease()
            with state.use(second) as launch:
                launch(Kernel(step, "held"))
            with state.use(first) as launch:
                launch(Kernel(lambda: None, "behind it"))
            assert started.wait(30)
            state.give_up([first], told.set)
            assert not told.wait(0.05)
            opened.set()
            assert told.wait(30)
            for stream in (first, second):
                stream.synchronize()
                runtime.give_back(stream)


@pytest.mark.slow
def test_a_state_that_hangs_refuses_whoever_comes_next() -> None:
    opened, started = threading.Event(), threading.Event()

    def hold(what: str) -> None:
        if what == "compute":
            started.set()
            opened.wait(30)

    with emulated_cudnn(asynchronous=True) as (_, module):
        net, workspace = branches([1])
        with AsyncDAGNet(net, workspace) as running:
            running.run(timeout=60)
            step = running.operators[0].bind(None).step
            module.pause = hold
            state, runtime = library_state(CUDA, 1), cuda_runtime(CUDA)
            first, second = runtime.lease(), runtime.lease()
            with state.use(first) as launch:
                launch(Kernel(step, "hanging"))
            assert started.wait(30)
            state.abandon([first])
            with pytest.raises(DeviceError, match="given up"), state.use(second):
                pass
            opened.set()
            first.synchronize()
            state.stream.synchronize()
            with state.use(second) as launch:
                launch(Kernel(lambda: None, "nothing"))
            assert state.stream.failure is None


@pytest.mark.parametrize(("state", "guards"), [(2, {"library state 2 of cuda:0": 3}), (None, {})])
def test_the_static_check_accepts_the_plan_and_knows_who_takes_turns(state: int | None, guards: dict[str, int]) -> None:
    with emulated_cudnn():
        net, workspace = branches([state] * 3)
        names = {resource.name for resource in named_accesses(build_graph(net)).resources}
        assert names >= set(guards)
        assert guards or not any("library state" in name for name in names)
        with AsyncDAGNet(net, workspace, num_workers=2) as running:
            running.run(timeout=60)
            proof = check_net(running)
        assert proof.holds
        assert proof.guards == guards


@pytest.mark.slow
@pytest.mark.parametrize("states", [[1, 1, 1], [None] * 3, [0, 1, None]])
def test_a_captured_net_replays_what_cudnn_was_asked_for(states: list[int | None]) -> None:
    with emulated_cudnn(asynchronous=True) as (machine, _):
        nets = [branches(states) for _ in range(2)]
        with (
            CapturedNet(*nets[0], num_workers=2) as first,
            CapturedNet(*nets[1], num_workers=2) as second,
        ):
            for running in (first, second, first, second):  # once as it is, once captured
                running.run(timeout=60)
            asked = len(executed(machine))
            for number, (running, (_, workspace)) in enumerate(zip((first, second), nets, strict=True)):
                x = np.random.default_rng(number).standard_normal((1, 4, 6, 6)).astype(np.float32)
                workspace.feed_blob("x", x, device=CUDA)
                running.run(timeout=60)
                for index in range(len(states)):
                    (expected,) = run_operator("Conv", [x, workspace.fetch_blob(f"w{index}")], kernel=3, pad=1)
                    np.testing.assert_allclose(workspace.fetch_blob(f"y{index}"), expected, atol=1e-4)
            assert len(executed(machine)) == asked


# Handles


def test_a_handle_is_for_one_thread_at_a_time() -> None:
    with emulated_cudnn():
        handle = CudnnHandle(cuda_runtime(CUDA), "mine")
        entered, leave = threading.Event(), threading.Event()

        def use() -> None:
            with handle, handle:
                entered.set()
                leave.wait(30)

        other = threading.Thread(target=use, name="other")
        other.start()
        assert entered.wait(30)
        with pytest.raises(DeviceError, match=r"mine is used by thread .* while thread other is using it"):
            handle.__enter__()
        leave.set()
        other.join(30)
        with handle:
            pass


def test_a_handle_is_made_and_destroyed_on_its_device_whatever_is_current() -> None:
    with emulated_cudnn() as (machine, module):
        handle = CudnnHandle(cuda_runtime(Device("cuda", 1)), "mine")
        assert module.handles[-1].device_index == 1
        assert machine.device == 0
        handle.close()
        handle.close()
        assert not module.handles[-1].alive
        with pytest.raises(DeviceError, match="closed"):
            handle.__enter__()


def test_threads_have_handles_of_their_own_and_leave_them_to_others() -> None:
    with emulated_cudnn():
        handles = thread_handles(cuda_runtime(CUDA))
        found: dict[str, CudnnHandle] = {}
        both = threading.Barrier(2)

        def take(name: str, wait: bool) -> None:
            found[name] = handles.get()
            assert handles.get() is found[name]
            if wait:
                both.wait(30)

        for names in (["a", "b"], ["c"]):
            threads = [threading.Thread(target=take, args=(name, len(names) > 1)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert found["a"] is not found["b"]
        assert found["c"] in (found["a"], found["b"])
        assert len(handles) == 2


@pytest.mark.parametrize("states", [[0] * 6, [None] * 6])
def test_workers_never_meet_in_a_handle(states: list[int | None]) -> None:
    """The stand-in refuses a handle, and a graph, that two threads use."""
    with emulated_cudnn() as (machine, module):
        net, workspace = branches(states)
        module.pause = lambda _what: threading.Event().wait(0.001)
        with AsyncDAGNet(net, workspace, num_workers=3) as running:
            for _ in range(5):
                running.run(timeout=60)
        assert len(executed(machine)) == 30


# Plans


def test_options_take_engines_out() -> None:
    with emulated_cudnn():
        plans, graph = plan_cache(cuda_runtime(CUDA)), conv_graph()

        def workspace(**options: Any) -> int:
            return plans.get(graph, PlanOptions(**{"limit": LIMIT, **options})).workspace_nbytes

        assert workspace(allow_tf32=True) == 4096
        assert workspace() == 1 << 16
        assert workspace(deterministic=True) == 2048
        assert workspace(deterministic=True, limit=100) == 0
        assert plans.built == 4


def test_the_refused_notes_of_16_bit_data_are_others() -> None:
    with emulated_cudnn():
        assert numerical_note.TENSOR_CORE not in PlanOptions(LIMIT).refused_notes("float16")
        assert PlanOptions(LIMIT).refused_notes("float16") == [numerical_note.REDUCED_PRECISION_REDUCTION]
        assert PlanOptions(LIMIT, reduced_sums=True).refused_notes("bfloat16") == []


def test_one_thread_builds_a_plan_and_others_wait_for_it() -> None:
    with emulated_cudnn() as (_, module):
        plans = plan_cache(cuda_runtime(CUDA))
        started, go_on = threading.Event(), threading.Event()

        def pause(what: str) -> None:
            started.set()
            go_on.wait(30)

        module.pause = pause
        found: list[object] = []
        threads = [
            threading.Thread(target=lambda: found.append(plans.get(conv_graph(), PlanOptions(LIMIT)))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        assert started.wait(30)
        go_on.set()
        for thread in threads:
            thread.join(30)
        assert len(found) == 6
        assert len(set(map(id, found))) == 1
        assert plans.built == 1


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.devices.cuda.cudnn_plans.MAX_PLANS", 2)
    with emulated_cudnn():
        plans = plan_cache(cuda_runtime(CUDA))
        for size in (5, 6, 5, 7, 5, 6):
            plans.get(conv_graph(size=size), PlanOptions(LIMIT))
        assert len(plans) == 2
        assert plans.built == 4


def test_a_geometry_without_an_engine_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with emulated_cudnn() as (_, module):
        module.engines = ()
        plans = plan_cache(cuda_runtime(CUDA))
        with caplog.at_level(logging.WARNING, "dagexec"):
            for _ in range(3):
                with pytest.raises(UnsupportedFeatureError, match="no engine for the forward convolution"):
                    plans.get(conv_graph(), PlanOptions(LIMIT))
        assert len(caplog.records) == 1
        x, weights = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 3, 3), np.float32)
        definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3)
        definition.engine = "CUDNN"
        (y,) = on_device(CUDA, definition, {"x": x, "w": weights})
        assert (y == 18).all()


def test_a_graph_that_fails_for_another_reason_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_cudnn():
        plans = plan_cache(cuda_runtime(CUDA))

        def fail(_graph: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched:
            patched.setattr("tests.cuda.emulated.cudnn.Graph.check_support", fail)
            with pytest.raises(UnsupportedFeatureError, match=r"cuDNN fails at .* out of memory"):
                plans.get(conv_graph(), PlanOptions(LIMIT))
        assert plans.get(conv_graph(), PlanOptions(LIMIT)).workspace_nbytes == 1 << 16


def test_a_plan_that_cannot_be_built_gives_way_to_the_next() -> None:
    with emulated_cudnn() as (_, module):
        plans = plan_cache(cuda_runtime(CUDA))
        failing = [1]

        def fail(_what: str) -> None:
            if failing:
                failing.pop()
                raise RuntimeError("this one is broken")

        module.pause = fail
        assert plans.get(conv_graph(), PlanOptions(LIMIT)).engine == "eng1"
        failing += [1] * 9
        with pytest.raises(UnsupportedFeatureError, match="none of its plans can be built: this one is broken"):
            plans.get(conv_graph(size=7), PlanOptions(LIMIT))


def test_a_search_measures_the_engines_and_its_choice_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = (
        Engine("slow", repeats=60),
        Engine("too large", workspace=2 * LIMIT),
        Engine("fast", workspace=512),
        Engine("rounds", (numerical_note.TENSOR_CORE,)),
    )
    options = PlanOptions(LIMIT, exhaustive=True)
    monkeypatch.setenv("DAGEXEC_CHOICES", str(tmp_path / "choices.json"))
    choices.forget()
    try:
        with emulated_cudnn() as (machine, module):
            module.engines = engines
            assert plan_cache(cuda_runtime(CUDA)).get(conv_graph(), options).engine == "fast"
            names = {call.arguments[1] for call in executed(machine)}
            assert names == {"slow", "fast"}
        choices.forget()
        with emulated_cudnn() as (machine, module):
            module.engines = engines
            plans = plan_cache(cuda_runtime(CUDA))
            assert plans.get(conv_graph(), options).engine == "fast"
            assert plans.get(conv_graph(), PlanOptions(LIMIT)).engine == "slow"
            deterministic = PlanOptions(LIMIT, deterministic=True, exhaustive=True)
            assert plans.get(conv_graph(), deterministic).engine == "slow"
            assert not executed(machine)
    finally:
        choices.forget()


@pytest.mark.parametrize("deterministic", [0, 1])
def test_the_arguments_of_an_operator_are_what_its_plans_are_asked_for(deterministic: int) -> None:
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=3, deterministic=deterministic, ws_nbytes_limit=4000)
    definition.engine = "CUDNN"
    arrays = {"x": np.ones((1, 2, 4, 4), np.float32), "w": np.ones((2, 2, 3, 3), np.float32)}
    with emulated_cudnn() as (machine, module):
        module.engines = (
            Engine("large", workspace=4001),
            Engine("atomics", (numerical_note.NONDETERMINISTIC,)),
            Engine("steady"),
        )
        on_device(CUDA, definition, arrays)
        assert [call.arguments[1] for call in executed(machine)] == ["steady" if deterministic else "atomics"]


def test_addresses_are_of_16_bytes() -> None:
    assert aligned([0, 16, 4096])
    assert not aligned([16, 24])


# A library that is missing


def raising(error: BaseException) -> Callable[[], int]:
    def version() -> int:
        raise error

    return version


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda module: setattr(module, "version", 8907), "cuDNN 8907 is too old, 90000 .* pip install"),
        (
            lambda module: setattr(module, "backend_version", raising(RuntimeError("no libcudnn.so.9"))),
            "cuDNN cannot be loaded .no libcudnn.so.9.; .*pip install",
        ),
    ],
)
def test_without_a_library_that_serves_the_default_engine_computes(
    spoil: Callable[[CudnnModule], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated_cudnn() as (machine, module):
        spoil(module)
        with pytest.raises(DeviceError, match=message):
            CudnnHandle(cuda_runtime(CUDA), "mine")
        net, workspace = branches([None, 1])
        with caplog.at_level(logging.WARNING, "dagexec"), AsyncDAGNet(net, workspace) as running:
            running.run(timeout=60)
            assert all(operator.library_state is None for operator in running.operators)
        assert not executed(machine)
    assert len(caplog.records) <= 1


def test_a_state_that_does_not_exist_is_refused() -> None:
    with emulated_cudnn():
        net, workspace = branches([4])
        with pytest.raises(DeviceError, match="library state 4 of cuda:0: expected 0 to 3"):
            AsyncDAGNet(net, workspace)
