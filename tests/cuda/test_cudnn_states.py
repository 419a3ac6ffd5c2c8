"""Handles of cuDNN as states of a library: operators take turns on them, in any order and on any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.core.exclusive import LibraryState, library_state
from dagexec.core.graph import build_graph
from dagexec.core.stream import Kernel
from dagexec.devices.cuda.cudnn_handle import CudnnHandle, thread_handles
from dagexec.devices.cuda.runtime import cuda_runtime
from dagexec.errors import DeviceError
from dagexec.scheduler.hazards import check_net, named_accesses
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.captured import CapturedNet
from dagexec.scheduler.nets.options import RunOptions
from tests.cuda.emulated.cudnn import emulated_cudnn
from tests.cuda.test_cudnn import CUDA, executed
from tests.ops.running import on_device, operator_def, run_operator


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
