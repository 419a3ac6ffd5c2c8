"""What planted bugs show in: functions that run something small, and raise when it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

import dagexec
from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Priority
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import DagexecError, RunTimeoutError
from dagexec.executor.executor import Executor
from dagexec.platform.threads import new_gate, threads
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.exploration.pool_states import Job, PoolStates
from dagexec.scheduler.exploration.run_states import RunStates
from dagexec.scheduler.exploration.state_search import SearchResult, search
from dagexec.scheduler.hazards import Detector, check_net
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.launching import DeviceStreams
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.worker import Worker
from tests.held import doubled_model
from tests.scheduler.pieced import SIZE, pieced_net, pieced_operator
from tests.scheduler.scenarios import Done, X, expected, fed, outputs_of, run_of, sums

Scene = Callable[[], object]
Parents = Sequence[Sequence[int]]

SIM = Device("sim", 0)
INDEPENDENT: Parents = ((), ())
FORK: Parents = ((), (0,), (0,))
DIAMOND: Parents = ((), (0,), (0,), (1, 2))
CROSS: Parents = ((), (), (0, 1), (0, 1))


def line(length: int) -> Parents:
    """Chains one after another."""
    return [[number - 1] if number else [] for number in range(length)]


# Machines


def tasks(pieces: Sequence[int], children: Parents) -> TaskGraph:
    """Tasks of so many pieces, and those that wait for each."""
    counts = [sum(task in row for row in children) for task in range(len(pieces))]
    return TaskGraph(pieces, children, counts, range(len(pieces)))


def all_states(graph: TaskGraph) -> Scene:
    """Every state of a run of these tasks on two workers."""

    def scene() -> None:
        _check_search(search(RunStates(graph, 2)))

    return scene


def all_pool_states(jobs: Sequence[Job], failures: int) -> Scene:
    """Every state of a pool of two workers with these runs, of which so many chains may fail."""

    def scene() -> None:
        _check_search(search(PoolStates(jobs, 2, failures=failures), must_end=True))

    return scene


def _check_search(found: SearchResult) -> None:
    assert found.holds, f"{found.fault}: {', '.join(found.path)}"


# Runs on a pool


def nothing() -> None:
    """The step of a chain where only its place counts."""


def finish_run(pool: WorkerPool, run: Run, done: Done) -> None:
    """Submit, wait for the end, and raise what went wrong."""
    pool.submit(run)
    done.wait()
    run.check_complete()
    run.raise_error()


def meeting(before: Callable[[WorkerPool], object] = lambda _pool: None, parents: Parents = INDEPENDENT) -> Scene:
    """The last two chains of a run wait for each other: if one of two workers sleeps on, nobody goes on."""

    def scene() -> None:
        with WorkerPool(2) as pool:
            before(pool)
            meet(pool, parents)

    return scene


def meet(pool: WorkerPool, parents: Parents = INDEPENDENT) -> None:
    """Have the last two chains of a run wait for each other."""
    done = Done()
    finish_run(pool, meeting_run(parents, done), done)


def meeting_run(parents: Parents, done: Done, first: Callable[[], object] = nothing) -> Run:
    """A run whose last two chains wait for each other; `first` is what those before do."""
    gates = [new_gate(), new_gate()]

    def come(number: int) -> None:
        gates[number].release()
        gates[1 - number].acquire()

    return run_of(parents, [first] * (len(parents) - 2) + [partial(come, 0), partial(come, 1)], done)


def one_at_a_time() -> None:
    """A run that one worker may be in, on a pool of two."""
    inside = [0]
    done = Done()

    def enter() -> None:
        inside[0] += 1
        threads().point("work")
        assert inside[0] == 1, "two workers in a run of width 1"
        inside[0] -= 1

    with WorkerPool(2) as pool:
        run = run_of(INDEPENDENT, [enter, enter], done)
        run.width = 1
        finish_run(pool, run, done)


def stopped_run(parents: Parents = FORK, workers: int = 1) -> Scene:
    """A run is stopped while it runs: nothing of it begins from then on, and its owner is told once."""

    def scene() -> None:
        done, stopped, late = Done(), [False], []
        with WorkerPool(workers) as pool:
            run = run_of(parents, [lambda: late.append(1) if stopped[0] else None] * len(parents), done)
            pool.submit(run)
            pool.stop(run, DagexecError("enough"))
            stopped[0] = True
            done.wait()
        assert not late, "a chain began after its run was stopped"
        assert done.told == 1, f"the owner was told {done.told} times"

    return scene


def stopped_in_a_chain() -> None:
    """A run is stopped by one thread while its only chain is let go on by another; its owner is told once."""
    begun, go_on, done = new_gate(), new_gate(), Done()

    def step() -> None:
        begun.release()
        go_on.acquire()

    with WorkerPool(1) as pool:
        run = run_of([[]], [step], done)
        pool.submit(run)
        begun.acquire()
        threads().start(lambda: pool.stop(run, DagexecError("enough")), "stopper")
        go_on.release()
        done.wait()
    assert done.told == 1, f"the owner was told {done.told} times"


def stopped_body() -> None:
    """An operator runs a net of its own on its worker, and the run that it is part of is stopped."""
    done, stopped, late = Done(), [False], []

    def body() -> None:
        inner = run_of(FORK, [lambda: late.append(1) if stopped[0] else None] * 3, nothing)
        pool.run_within(inner, outer)

    with WorkerPool(1) as pool:
        outer = run_of([[]], [body], done)
        pool.submit(outer)
        pool.stop(outer, DagexecError("enough"))
        stopped[0] = True
        done.wait()
    assert not late, "a chain of an operator's body began after the run was stopped"


def busy_elsewhere() -> None:
    """While one of two workers is in another run, a run gets two chains that wait for each other."""
    done, other = Done(), Done()
    entered, left = new_gate(), new_gate()

    def beside() -> None:
        entered.release()
        left.acquire()

    def first() -> None:
        entered.acquire()
        left.release()

    with WorkerPool(2) as pool:
        run = meeting_run(FORK, done, first)
        pool.submit(run)
        finish_run(pool, run_of([[]], [beside], other), other)
        done.wait()


def stop_of_one_of_two(length: int) -> Scene:
    """Of two runs on one worker the first is stopped in its first chain, and the second is not."""

    def scene() -> None:
        done, begun, go_on = [Done(), Done()], [new_gate(), new_gate()], [new_gate(), new_gate()]

        def hold(number: int) -> None:
            begun[number].release()
            go_on[number].acquire()

        with WorkerPool(1) as pool:
            first = run_of(line(length), [partial(hold, 0), *[nothing] * (length - 1)], done[0])
            second = run_of([[]], [partial(hold, 1)], done[1])
            pool.submit(first)
            pool.submit(second)
            begun[0].acquire()
            stopper = threads().start(lambda: pool.stop(first, DagexecError("enough")), "stopper")
            for number in range(2):
                go_on[number].release()
                done[number].wait()
            stopper.join()
            assert second.error is None, "a run was stopped that nobody stopped"

    return scene


def stop_of_an_ended_run(length: int) -> Scene:
    """A run that is stopped: its owner sees the same end however often it looks."""

    def scene() -> None:
        seen: list[BaseException | None] = []
        done = Done()

        def ended() -> None:
            seen.append(run.error)
            done()

        with WorkerPool(1) as pool:
            run = run_of(line(length), [nothing] * length, ended)
            pool.submit(run)
            pool.stop(run, DagexecError("enough"))
            done.wait()
        assert run.error is seen[0], "a run failed after it had ended well"

    return scene


def runs_then_meeting(count: int) -> Scene:
    """Runs one after another, and then one whose two chains wait for each other."""

    def before(pool: WorkerPool) -> None:
        for _ in range(count):
            done = Done()
            finish_run(pool, run_of([[]], [nothing], done), done)

    return meeting(before)


# Nets on a simulated device


def on_devices(net: NetDef, *devices: Device) -> NetDef:
    """A copy of `net` whose operators are on `devices`, in turn."""
    placed = NetDef()
    placed.CopyFrom(net)
    for index, definition in enumerate(placed.op):
        definition.device_option.CopyFrom(devices[index % len(devices)].to_option())
    return placed


def device_runs(parents: Parents, devices: Sequence[Device] = (SIM,), streams: int = 1, workers: int = 2) -> Scene:
    """Two runs with different inputs compute what SimpleNet does, under schedules of threads and streams."""
    net = sums(parents)
    right = [expected(net, x) for x in (X, -3 * X)]

    def scene() -> None:
        with simulated("sim:0", driver=ControlledDriver()):
            workspace = fed()
            options = RunOptions(streams_per_worker=streams)
            with AsyncDAGNet(on_devices(net, *devices), workspace, num_workers=workers, options=options) as made:
                for x, bytes_of in zip((X, -3 * X), right, strict=True):
                    workspace.feed_blob("x", x)
                    made.run()
                    assert outputs_of(workspace, net) == bytes_of, "other bytes than SimpleNet's"

    return scene


def detected(parents: Parents, devices: Sequence[Device] = (SIM,), streams: int = 1) -> Scene:
    """A run in which the detector sees nothing that is not ordered."""

    def scene() -> None:
        with simulated("sim:0"):
            options = RunOptions(streams_per_worker=streams)
            net = on_devices(sums(parents), *devices)
            with AsyncDAGNet(net, fed(), num_workers=1, options=options) as made:
                _watch(made)

    return scene


def _watch(net: AsyncDAGNet) -> None:
    detector = Detector()
    net.run(trace=detector)
    detector.raise_found()


def convolutions(device: Device, **arguments: int | str) -> NetDef:
    """Two convolutions side by side of a copy of x, and their sum."""
    net = NetDef(name="branches", external_input=["x", "w"], external_output=["z"])
    net.op.add(type="Copy", input=["x"], output=["c"])
    for index in range(2):
        definition = net.op.add(type="Conv", input=["c", "w"], output=[f"y{index}"])
        definition.arg.add(name="kernel", i=3)
        for name, value in arguments.items():
            if isinstance(value, str):
                definition.engine = value
            else:
                definition.arg.add(name=name, i=value)
    net.op.add(type="Sum", input=["y0", "y1"], output=["z"])
    return on_devices(net, device)


def convolution_workspace(device: Device) -> Workspace:
    """The inputs of `convolutions`, and a shared buffer, on a device."""
    random = np.random.default_rng(0)
    workspace = Workspace()
    workspace.feed_blob("x", random.standard_normal((1, 2, 4, 4)).astype(np.float32), device=str(device))
    workspace.feed_blob("w", random.standard_normal((2, 2, 3, 3)).astype(np.float32), device=str(device))
    dagexec.create_shared_buffer(workspace, device)
    return workspace


def turns_detected(**arguments: int | str) -> Scene:
    """A run of convolutions that take turns, with the detector."""

    def scene() -> None:
        with (
            simulated("sim:0"),
            AsyncDAGNet(
                convolutions(SIM, **arguments),
                convolution_workspace(SIM),
                num_workers=1,
                options=RunOptions(streams_per_worker=3),
            ) as net,
        ):
            net.prepared()
            _watch(net)

    return scene


def proved(parents: Parents, devices: Sequence[Device] = (SIM,), keep: frozenset[str] | None = None) -> Scene:
    """The proof holds for a net, on two workers; with `keep`, its memory is planned."""

    def scene() -> None:
        with (
            simulated("sim:0"),
            AsyncDAGNet(on_devices(sums(parents), *devices), fed(), num_workers=2, keep=keep) as net,
        ):
            net.prepared()
            prove(net)

    return scene


def prove(net: DAGNet) -> None:
    """Raise what the proof finds."""
    proof = check_net(net)
    found = [*proof.unordered, *proof.overwritten, *proof.faults]
    assert proof.holds, "; ".join(map(str, found))


def streams_of_the_dead() -> None:
    """A thread that had a stream of a device has ended, and two others that go on ask for one."""
    with simulated("sim:0", driver=ControlledDriver()):
        streams = DeviceStreams(SIM, 1, Priority.NORMAL)
        chosen: list[object] = []
        asked, over = [new_gate(), new_gate()], [new_gate(), new_gate()]

        def ask(number: int) -> None:
            chosen.append(streams.choose(()))
            asked[number].release()
            over[number].acquire()

        threads().start(lambda: streams.choose(()), "dead").join()
        both = [threads().start(partial(ask, number), f"asker {number}") for number in range(2)]
        for gate in asked:
            gate.acquire()
        for gate, thread in zip(over, both, strict=True):
            gate.release()
            thread.join()
        assert chosen[0] is not chosen[1], "two threads have one stream"
        streams.give_back()


def streams_given_back() -> None:
    """A thread gives its stream back, another user gets it, and the thread asks for a stream again."""
    with simulated("sim:0", driver=ControlledDriver()):
        streams = DeviceStreams(SIM, 1, Priority.NORMAL)
        streams.choose(())
        streams.give_back()
        other = runtime_of(SIM).lease()
        assert streams.choose(()) is not other, "a stream has two users"
        runtime_of(SIM).give_back(other)
        streams.give_back()


def hung_kernel() -> None:
    """A kernel that hangs is given up when its run's time is over, whenever that comes."""
    with (
        simulated("sim:0", driver=ControlledDriver(), faults=[Fault("hang")]),
        AsyncDAGNet(on_devices(sums([[]]), SIM), fed(), num_workers=1) as net,
        suppress(RunTimeoutError),
    ):
        net.run(timeout=100)


# Memory


def overwriting() -> None:
    """A blob is read, and then written by an operator that depends on nothing else."""
    net = NetDef(name="overwriting", external_input=["x", "z"])
    net.op.add(type="Copy", input=["x"], output=["b"])
    net.op.add(type="Copy", input=["b"], output=["c"])
    net.op.add(type="Copy", input=["z"], output=["b"])
    workspace = fed()
    workspace.feed_blob("z", X)
    with DAGNet(net, workspace, num_workers=2) as made:
        made.prepared()
        prove(made)


def planned(parents: Parents, *keep: str) -> Scene:
    """The memory plan of a net that keeps these blobs."""

    def scene() -> None:
        with DAGNet(sums(parents), fed(), num_workers=2, keep=frozenset(keep)) as made:
            made.prepared()
            prove(made)

    return scene


def phases_proved() -> None:
    """An operator of two phases of pieces, with scratch for each piece."""
    workspace = Workspace()
    workspace.feed_blob("x", np.arange(SIZE, dtype=np.float32))
    with pieced_operator(), DAGNet(pieced_net(), workspace, num_workers=2, keep=frozenset("y")) as net:
        net.prepared()
        prove(net)


# Executors

ROWS = np.tile(X, (1024, 1))


def check_call(executor: Executor, x: npt.NDArray[np.float32]) -> None:
    """A call of `doubled_model` gives what it should."""
    assert_doubled(executor.run({"x": x}, timeout=1000)["y"], x)


def assert_doubled(found: npt.NDArray[np.float32], x: npt.NDArray[np.float32]) -> None:
    """What `doubled_model` comes to, by NumPy."""
    assert np.array_equal(found, 2 * np.maximum(x, 0)), "other numbers than NumPy's"


def call_beside(executors: Sequence[Executor], x: npt.NDArray[np.float32]) -> None:
    """A thread for a call of each."""
    callers = [threads().start(partial(check_call, one, x), f"caller {place}") for place, one in enumerate(executors)]
    for caller in callers:
        caller.join()


def two_callers() -> None:
    """Two threads call an executor of one replica."""
    with dagexec.compile(doubled_model(), net_type="dag", num_workers=1, replicas=1) as executor:
        call_beside([executor, executor], X)


def results_of_two_calls() -> None:
    """What a call has returned is still there after the next one."""
    with dagexec.compile(doubled_model(), net_type="dag", num_workers=1, replicas=1) as executor:
        first = executor.run({"x": X})["y"]
        executor.run({"x": -3 * X})
    assert_doubled(first, X)


def two_models() -> None:
    """Two models share a pool whose budget is enough for the arena of one, and are called at once."""
    with dagexec.Pool(2, arena_bytes=arena_bytes()) as pool:
        executors = [dagexec.compile(doubled_model(), pool=pool) for _ in range(2)]
        call_beside(executors, ROWS)
        for executor in executors:
            executor.close()


def arena_bytes() -> int:
    """What a run of `doubled_model` needs for `ROWS`."""
    with dagexec.Pool(1) as pool, dagexec.compile(doubled_model(), pool=pool) as alone:
        alone.run({"x": ROWS})
        return pool.arena_statistics().used_bytes


def hung_request() -> None:
    """A request of a model whose kernel hangs is over when its time is."""
    with (
        simulated("sim:0", driver=ControlledDriver(), faults=[Fault("hang")]),
        dagexec.compile(
            sums([[]]), optimize=False, net_type="async_dag", num_workers=1, replicas=1, device="sim:0"
        ) as executor,
        suppress(RunTimeoutError),
    ):
        executor.run({"x": X}, timeout=1)


# Deaths


class KilledError(BaseException):
    """Raised in a worker."""


def death_of_a_waker() -> None:
    """A worker dies when it is about to wake another one."""
    died = [False]
    wake = Worker.wake

    def deadly(worker: Worker, *, as_helper: bool = False) -> None:
        if as_helper and not died[0]:
            died[0] = True
            raise KilledError
        wake(worker, as_helper=as_helper)

    Worker.wake = deadly  # type: ignore[method-assign, assignment]
    try:
        done = Done()
        with WorkerPool(2) as pool:
            pool.submit(run_of(FORK, [nothing] * 3, done))
            done.wait()
            meet(pool)
    finally:
        Worker.wake = wake  # type: ignore[method-assign]
