"""What goes wrong, and what is guaranteed then: the documented exception within one chain, and nothing else disturbed.

`docs/failures.md` is the table of these. Every test has a run in flight beside the failing one, which must end with the
right bytes, runs the executor again afterwards, and counts threads, streams, device bytes and replicas before and
after. Interleavings are forced with gates inside operators; nothing sleeps.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes, registry
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OpSchema, same_as_input
from dagexec.devices.sim import Fault, SimRuntime, simulated
from dagexec.errors import (
    ClosedError,
    DagexecError,
    DeviceError,
    OperatorError,
    ResourceError,
    RunCancelledError,
    RunTimeoutError,
    ShapeError,
    WorkerLostError,
)
from dagexec.scheduler.run import drain
from dagexec.scheduler.run.run import Run
from dagexec.stress.devices import HeldResources, leaked
from tests.memory_limits import leave
from tests.ops.running import operator_def

Array = npt.NDArray[np.float32]

PATIENCE = 60
LEFT, RIGHT, BOTH, PLAIN = 1.0, 2.0, 3.0, 9.0
"""What x[0, 0] says: which of the two acting operators of the net act; with PLAIN, none does."""


@dataclass(frozen=True)
class Place:
    """Where a net runs."""

    device: str
    net_type: str

    @property
    def finishes_what_is_launched(self) -> bool:
        """Chains are launched before those they wait for are done, and a stopped run finishes what it has launched."""
        return self.device != "cpu" and self.net_type == "async_dag"

    def compile(self, **options: object) -> dagexec.Executor:
        """An executor of the two-branch net with 2 workers and 2 replicas."""
        chosen = {"num_workers": 2, "replicas": 2, **options}
        return dagexec.compile(two_branches(), optimize=False, device=self.device, net_type=self.net_type, **chosen)  # type: ignore[arg-type]


NET_TYPES = ("simple", "dag", "async_dag")
HOST = [Place("cpu", net_type) for net_type in NET_TYPES]
DEVICE = [Place("sim:0", net_type) for net_type in NET_TYPES]


def described(place: Place) -> str:
    return f"{place.net_type} on {place.device}"


Setting = Callable[..., SimRuntime]


@pytest.fixture
def simulate() -> Iterator[Setting]:
    """Sets up the device sim:0. When the test is over, the device must hold what it held before, threads included.

    The checks come so late because a test's variables hold the executor, and with it memory of the device.
    """
    with ExitStack() as devices:
        before: list[HeldResources] = []

        def set_up(**settings: object) -> SimRuntime:
            runtime = devices.enter_context(simulated("sim:0", **settings))
            before.append(HeldResources.now(["sim:0"]))
            return runtime

        yield set_up
        assert [leaked(["sim:0"], held) for held in before] == [[]] * len(before)


@pytest.fixture(autouse=True)
def no_thread_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is logged meanwhile: pytest keeps the records, and their errors refer to all there was."""
    monkeypatch.setattr(logging.getLogger("dagexec"), "disabled", True)
    before = HeldResources.now([])
    yield
    assert leaked([], before) == []


@pytest.fixture(params=HOST + DEVICE, ids=described)
def place(request: pytest.FixtureRequest, simulate: Setting) -> Place:
    found: Place = request.param
    if found.device != "cpu":
        simulate()
    return found


@pytest.fixture(params=HOST, ids=described)
def host(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(params=DEVICE, ids=described)
def device(request: pytest.FixtureRequest) -> Place:
    """A place on a device that the test sets up itself."""
    found: Place = request.param
    return found


def two_branches() -> Model:
    """y = (x + 1) + 2 x, in two branches that begin with an operator that acts, and a chain behind both that counts."""
    net = NetDef(
        name="branches",
        op=[
            operator_def("Acting", ["x"], ["left"], number=1),
            operator_def("Acting", ["x"], ["right"], number=2),
            operator_def("Add", ["left", "one"], ["left1"]),
            operator_def("Add", ["right", "right"], ["right2"]),
            operator_def("Add", ["left1", "right2"], ["sum"]),
            operator_def("Acting", ["sum"], ["y"], number=0),
        ],
        external_input=["x", "one"],
        external_output=["y"],
    )
    return Model(
        "branches",
        net,
        parameters={"one": np.ones(3, np.float32)},
        inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3))},
        outputs=("y",),
    )


def feed(code: float = PLAIN, rows: int = 2) -> dict[str, Array]:
    return {"x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) * 0.37 + code}


def right_bytes(code: float = PLAIN, rows: int = 2) -> bytes:
    x = feed(code, rows)["x"]
    return ((x + np.float32(1)) + (x + x)).tobytes()


class Acts:
    """What the operators of type Acting do besides copying: `does[n]` is called by operator number n when x says so.

    Attributes:
        behind: how often the chain behind both branches ran, by what x said.
        entered: how often each acting operator ran, by its number and what its input said.
    """

    def __init__(self) -> None:
        self.does: dict[int, Callable[[], object]] = {}
        self.behind: Counter[float] = Counter()
        self.entered: Counter[tuple[int, float]] = Counter()

    def __call__(self, number: int, code: float) -> None:
        """Called in every step, with element 0, 0 of its input."""
        self.entered[number, code] += 1
        if number == 0:
            self.behind[(code - 1) / 3] += 1
        elif code in (number, BOTH) and number in self.does:
            self.does[number]()


@pytest.fixture(autouse=True)
def acts() -> Iterator[Acts]:
    """The operator type Acting while a test runs."""
    control = Acts()
    schema = OpSchema(
        "Acting",
        inputs=(1, 1),
        outputs=(1, 1),
        infer=same_as_input,
        doc="A copy. For a test.",
        args={"number": "which"},
        required_args=("number",),
    )

    class Acting(Operator):
        def prepare(self) -> Step:
            x, y = self.x(0), self.y(0)
            number = self.arguments.int("number", 0)

            def step() -> None:
                control(number, float(x[0, 0]))
                np.copyto(y, x)

            return step

    registry.operator(schema)(Acting)
    yield control
    registry._schemas.pop("Acting")
    registry._operators.pop(("cpu", "Acting", ""))


class Gate:
    """A place in an operator: who comes there says so and waits until it is opened."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def __call__(self) -> None:
        self.inside.release()
        assert self.go_on.acquire(timeout=PATIENCE)

    def wait_inside(self) -> None:
        assert self.inside.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self.go_on.release()


@contextmanager
def beside(executor: dagexec.Executor, acts: Acts, code: float = RIGHT) -> Iterator[Gate]:
    """A run is held in its right operator on one replica while the block lasts; then it must end with right bytes.

    Its left operator has run, or is behind the other on a stream.
    """
    gate = Gate()
    acts.does[2] = gate
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(executor.run, feed(code))
        gate.wait_inside()
        until(lambda: acts.entered[1, code] > 0 or executor.statistics().busy_workers == 0)
        try:
            yield gate
        finally:
            gate.open()
        assert held.result(PATIENCE)["y"].tobytes() == right_bytes(code)


def serves(executor: dagexec.Executor, acts: Acts) -> None:
    """Every replica serves a run with the right bytes, all at the same time, and the executor is idle then."""
    replicas = executor.statistics().replicas
    if executor.num_workers >= replicas:
        meeting = threading.Barrier(replicas)
        acts.does[1] = lambda: meeting.wait(PATIENCE)
    with ThreadPoolExecutor(replicas) as threads:
        results = [threads.submit(executor.run, feed(LEFT)) for _ in range(replicas)]
        for result in results:
            assert result.result(PATIENCE)["y"].tobytes() == right_bytes(LEFT)
    moment = executor.statistics()
    assert (moment.running, moment.queued, moment.replicas) == (0, 0, replicas)
    del acts.does[1]


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ValueError, SystemExit, MemoryError])
def test_an_operator_that_raises_fails_its_run_within_the_chain(
    place: Place, acts: Acts, kind: type[BaseException]
) -> None:
    with place.compile() as executor:
        with beside(executor, acts):
            error = kind("on purpose")
            acts.does[1] = raising(error)
            with pytest.raises(
                OperatorError, match=rf"Acting 'left' \(operator \d\).*{kind.__name__}: on purpose"
            ) as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert caught.value.__cause__ is error
            assert acts.behind[LEFT] == 0
        serves(executor, acts)
        assert executor.statistics().failed == 1


def test_the_first_error_is_kept_and_the_others_are_attached(acts: Acts) -> None:
    place = Place("cpu", "dag")
    first, second = threading.Semaphore(0), threading.Semaphore(0)

    def fail_first() -> None:
        assert first.acquire(timeout=PATIENCE)  # the other operator is inside
        second.release()
        raise ValueError("the first")

    def fail_second() -> None:
        first.release()
        assert second.acquire(timeout=PATIENCE)
        stopped.wait_inside()
        raise KeyError("the second")

    stopped = Gate()
    stop = Run.stop

    def stop_and_tell(run: Run, error: BaseException) -> None:
        stop(run, error)
        stopped.inside.release()

    with place.compile(replicas=1) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "stop", stop_and_tell)
        acts.does.update({1: fail_first, 2: fail_second})
        with pytest.raises(OperatorError, match="the first") as caught:
            executor.run(feed(BOTH), timeout=PATIENCE)
        assert len(caught.value.__notes__) == 1
        assert "secondary error: Acting 'right'" in caught.value.__notes__[0]
        assert "the second" in caught.value.__notes__[0]
        acts.does.clear()
        serves(executor, acts)


def test_memory_that_does_not_suffice_for_a_shape_is_an_error_before_anything_runs(
    host: Place, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host.compile() as executor:
        with beside(executor, acts):
            leave(monkeypatch, 100_000)
            with pytest.raises(ResourceError, match=r"needs [\d,]+ bytes; this machine has 100,000"):
                executor.run(feed(rows=5_000), timeout=PATIENCE)
            monkeypatch.undo()
        serves(executor, acts)


def test_an_operator_that_no_memory_is_left_for_fails_its_run_only(place: Place, acts: Acts) -> None:
    with place.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(MemoryError("no memory"))
            with pytest.raises(OperatorError, match="MemoryError: no memory"):
                executor.run(feed(LEFT), timeout=PATIENCE)
        serves(executor, acts)


def test_a_shape_that_an_operator_refuses_fails_its_run_only(place: Place, acts: Acts) -> None:
    model = two_branches()
    loose = Model("branches", model.net, parameters=model.parameters, inputs={"x": InputInfo()}, outputs=("y",))
    with (
        dagexec.compile(
            loose, optimize=False, device=place.device, net_type=place.net_type, num_workers=2, replicas=2
        ) as executor,
    ):
        with beside(executor, acts), pytest.raises(ShapeError, match=r"Add 'left1' .*do not broadcast"):
            executor.run({"x": np.full((2, 4), PLAIN, np.float32)}, timeout=PATIENCE)
        serves(executor, acts)


def test_a_run_past_its_timeout_ends_when_its_operator_does(place: Place, acts: Acts) -> None:
    hung = Gate()
    with place.compile(num_workers=3) as executor:
        with beside(executor, acts):
            acts.does[1] = hung
            released = release_when_cancelled(executor, hung)
            with pytest.raises(RunTimeoutError, match=r"not done within 0\.01 seconds"):
                executor.run(feed(LEFT), timeout=0.01)
            assert len(released) == 1
            assert acts.behind[LEFT] <= place.finishes_what_is_launched
        serves(executor, acts)


def release_when_cancelled(executor: dagexec.Executor, gate: Gate) -> list[BaseException]:
    """Open `gate` each time a request has been told to end early, not before; the reasons so far."""
    reasons: list[BaseException] = []
    dispatcher = executor._dispatcher
    cancel = dispatcher.cancel

    def cancel_and_open(request: object, error: DagexecError) -> bool:
        waits = cancel(request, error)  # type: ignore[arg-type]
        reasons.append(error)
        gate.open()
        return waits

    dispatcher.cancel = cancel_and_open  # type: ignore[method-assign]
    return reasons


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_await_ends_when_nothing_works_for_it_any_more(place: Place, acts: Acts, backend: str) -> None:
    held = Gate()

    async def main() -> None:
        with place.compile(num_workers=3) as executor, beside(executor, acts):
            acts.does[1] = held
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(executor.run_async, feed(LEFT))
                await anyio.to_thread.run_sync(held.wait_inside)
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    for _ in range(10):
                        await anyio.lowlevel.checkpoint()
                    assert executor.statistics().running == 2  # the task has not returned: the operator is at work
                held.open()
            assert executor.statistics().running == 1
            assert executor.statistics().cancelled == 1
            assert acts.behind[LEFT] <= place.finishes_what_is_launched
            del acts.does[1]
            assert (await executor.run_async(feed(LEFT)))["y"].tobytes() == right_bytes(LEFT)

    anyio.run(main, backend=backend)


@pytest.mark.slow
def test_closing_lets_runs_in_flight_finish_and_ends_queued_ones(place: Place, acts: Acts) -> None:
    with ThreadPoolExecutor(3) as threads:
        executor = place.compile(replicas=1)
        gate = Gate()
        acts.does[2] = gate
        running = threads.submit(executor.run, feed(RIGHT))
        gate.wait_inside()
        queued = threads.submit(executor.run, feed())
        until(lambda: executor.statistics().queued == 1)
        closing = threads.submit(executor.close)
        with pytest.raises(ClosedError, match="the executor was closed"):
            queued.result(PATIENCE)
        gate.open()
        assert running.result(PATIENCE)["y"].tobytes() == right_bytes(RIGHT)
        closing.result(PATIENCE)
        with pytest.raises(ClosedError, match="the executor is closed"):
            executor.run(feed())


@pytest.mark.slow
def test_draining_past_its_time_stops_runs_at_the_next_chain(place: Place, acts: Acts) -> None:
    with ThreadPoolExecutor(2) as threads:
        executor = place.compile(replicas=1, num_workers=1)
        gate = Gate()
        acts.does[1] = gate
        release_when_cancelled(executor, gate)
        running = threads.submit(executor.run, feed(LEFT))
        gate.wait_inside()
        assert executor.drain(timeout=0) is False
        with pytest.raises(ClosedError, match="the executor was closed"):
            running.result(PATIENCE)
        assert acts.behind[LEFT] <= place.finishes_what_is_launched


def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, which other threads bring about."""
    while not condition():
        os.sched_yield()


def test_a_worker_that_dies_is_replaced_and_only_its_run_ends(
    host: Place, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Run.failure

    def die(run: Run, *arguments: object) -> BaseException:
        if any(isinstance(argument, LookupError) for argument in arguments):
            raise MemoryError("the worker dies while it reports")
        return failure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "failure", die)
    with host.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(LookupError("deadly"))
            with pytest.raises(WorkerLostError, match="died: MemoryError: the worker dies") as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, MemoryError)
        serves(executor, acts)
        assert executor.statistics().pool.replaced == 1
        assert executor.statistics().pool.workers == 2


def test_a_worker_that_dies_while_it_launches_is_replaced(
    device: Place, simulate: Setting, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Run.failure

    def die(run: Run, *arguments: object) -> BaseException:
        if any(isinstance(argument, OperatorError) for argument in arguments):
            raise MemoryError("the worker dies while it reports")
        return failure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "failure", die)
    simulate(faults=[Fault("launch", match="Acting 'left'", nth=2)])
    with device.compile() as executor:
        with beside(executor, acts), pytest.raises(WorkerLostError, match="died: MemoryError: the worker dies"):
            executor.run(feed(LEFT), timeout=PATIENCE)
        serves(executor, acts)
        assert executor.statistics().pool.replaced == 1


@pytest.mark.slow
def test_ctrl_c_in_the_caller_stops_its_run_only(place: Place, acts: Acts) -> None:
    hung = Gate()
    with place.compile(num_workers=3) as executor:
        with beside(executor, acts), ThreadPoolExecutor(1) as threads:
            acts.does[1] = hung
            reasons = release_when_cancelled(executor, hung)

            def interrupt() -> None:
                hung.wait_inside()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            interrupting = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                executor.run(feed(LEFT))
            interrupting.result(PATIENCE)
            assert [type(reason) for reason in reasons] == [RunCancelledError]
            assert acts.behind[LEFT] <= place.finishes_what_is_launched
        serves(executor, acts)


def test_a_child_of_fork_is_told_and_the_parent_goes_on(place: Place, acts: Acts) -> None:
    with place.compile() as executor:
        with beside(executor, acts) as gate:
            told = in_a_child(lambda: executor.run(feed(), timeout=PATIENCE))
            assert isinstance(told, ClosedError)
            assert "forked" in str(told)
            assert "call reopen() in the child, or compile the model again there" in str(told)
            assert gate.inside.acquire(blocking=False) is False
        serves(executor, acts)


def in_a_child(function: Callable[[], object]) -> BaseException | None:
    """What `function` raises in a child process made by fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        error: BaseException | None = None
        try:
            function()
        except BaseException as caught:
            error = type(caught)(str(caught))
        try:
            os.write(writing, pickle.dumps(error))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found: BaseException | None = pickle.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return found


@pytest.mark.slow
def test_many_failures_of_all_kinds_at_once_lose_nothing(place: Place, acts: Acts) -> None:
    acts.does[1] = raising(ValueError("left"))
    acts.does[2] = raising(KeyError("right"))
    codes = [PLAIN, LEFT, PLAIN, RIGHT, BOTH]
    with place.compile(num_workers=3, replicas=3) as executor, ThreadPoolExecutor(6) as threads:
        futures: list[tuple[float, Future[dict[str, Array]]]] = [
            (code, threads.submit(executor.run, feed(code), timeout=PATIENCE)) for code in codes * 20
        ]
        for code, future in futures:
            if code == PLAIN:
                assert future.result(PATIENCE)["y"].tobytes() == right_bytes()
            else:
                with pytest.raises(OperatorError, match="Acting"):
                    future.result(PATIENCE)
        moment = executor.statistics()
        assert (moment.completed, moment.failed) == (40, 60)
        acts.does.clear()
        serves(executor, acts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "match", "message"),
    [
        ("launch", "Acting 'left'", r"Acting 'left'.*fault of kind 'launch'"),
        ("kernel", "Acting 'left'", r"Acting 'left'.*fault of kind 'kernel'"),
        ("copy", "x", r"'x@sim:0'.*fault of kind 'copy'"),
        ("event", "the end of a run", r"the end of a run.*fault of kind 'event'"),
    ],
)
def test_a_device_that_fails_fails_one_run(
    device: Place, simulate: Setting, acts: Acts, kind: str, match: str, message: str
) -> None:
    armed = [False]
    fault = Fault(kind, match=lambda label: armed[0] and match in label)
    runtime = simulate(faults=[fault])
    with device.compile() as executor:
        with beside(executor, acts):
            armed[0] = True
            with pytest.raises(OperatorError, match=message) as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, DeviceError)
            assert runtime.faults.met == {kind: 1}
        serves(executor, acts)


@pytest.mark.slow
def test_a_kernel_that_hangs_is_given_up_when_the_timeout_is_over(
    device: Place, simulate: Setting, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "ABANDON_AFTER", 0.01)
    hang = Fault("hang", match="Acting 'left'", nth=2)
    runtime = simulate(faults=[hang])
    with device.compile() as executor:
        with beside(executor, acts), pytest.raises(RunTimeoutError, match=r"not done within 0\.5 seconds"):
            executor.run(feed(LEFT), timeout=0.5)
        assert runtime.faults.met == {"hang": 1}
        assert acts.behind[LEFT] == 0
        serves(executor, acts)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_await_gives_up_a_kernel_that_hangs(
    device: Place, simulate: Setting, acts: Acts, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(drain, "ABANDON_AFTER", 0.01)
    hang = Fault("hang", match="Acting 'left'", nth=2)

    runtime = simulate(faults=[hang])

    async def main(executor: dagexec.Executor) -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(executor.run_async, feed(LEFT))
                while not runtime.faults.met:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        assert scope.cancelled_caught
        assert executor.statistics().running == 1  # the one beside

    with device.compile() as executor:
        with beside(executor, acts):
            anyio.run(main, executor, backend=backend)
        serves(executor, acts)


@pytest.mark.slow
def test_memory_of_a_device_that_does_not_suffice_fails_the_run_that_asks_for_it(
    device: Place, simulate: Setting, acts: Acts
) -> None:
    runtime = simulate(memory_limit=100_000)
    with device.compile() as executor:
        with beside(executor, acts):
            for _ in range(2):
                with pytest.raises(ResourceError, match=r"sim:0: out of memory: .* of 100,000 bytes"):
                    executor.run(feed(rows=2_000), timeout=PATIENCE)
        serves(executor, acts)
        assert runtime.statistics().peak_bytes <= 100_000


def test_memory_of_a_device_that_does_not_suffice_for_a_feed_leaves_the_blob_as_it_was(simulate: Setting) -> None:
    runtime = simulate(memory_limit=1_000)
    workspace = dagexec.Workspace()
    workspace.feed_blob("x", np.ones(100, np.float32), device="sim:0")
    with pytest.raises(ResourceError, match=r"sim:0: out of memory: an allocation of [\d,]+ bytes"):
        workspace.feed_blob("y", np.ones(1_000, np.float32), device="sim:0")
    np.testing.assert_array_equal(workspace.fetch_blob("x"), np.ones(100))
    assert runtime.statistics().allocated_bytes <= 1_000
    workspace.feed_blob("y", np.zeros(3, np.float32), device="sim:0")
    np.testing.assert_array_equal(workspace.fetch_blob("y"), np.zeros(3))


def test_the_first_error_of_two_streams_is_kept_and_the_other_attached(simulate: Setting, acts: Acts) -> None:
    place = Place("sim:0", "async_dag")
    both = threading.Barrier(2)

    def fail(side: str) -> Callable[[], object]:
        def act() -> None:
            both.wait(PATIENCE)
            raise ValueError(side)

        return act

    simulate()
    with place.compile(replicas=1, streams_per_worker=2) as executor:
        acts.does.update({1: fail("the left one"), 2: fail("the right one")})
        with pytest.raises(OperatorError, match=r"ValueError: the \w+ one") as caught:
            executor.run(feed(BOTH), timeout=PATIENCE)
        other = "right" if "left one" in str(caught.value) else "left"
        assert [f"the {other} one" in note for note in caught.value.__notes__] == [True]
        assert caught.value.__notes__[0].startswith(f"secondary error: Acting '{other}'")
        acts.does.clear()
        serves(executor, acts)
