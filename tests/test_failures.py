"""What goes wrong, and what is guaranteed then: the documented exception within one chain, and nothing else disturbed.

`docs/failures.md` is the table of these. Every test has a run in flight beside the failing one, which must end with the
right bytes, runs the executor again afterwards, and counts threads, streams, device bytes and replicas before and
after. Interleavings are forced with gates inside operators; nothing sleeps.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes, registry
from dagexec.core.errors import (
    ClosedError,
    DagexecError,
    OperatorError,
    ResourceError,
    RunCancelledError,
    RunTimeoutError,
    ShapeError,
    WorkerLostError,
)
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator, Step
from dagexec.core.schema import OpSchema, same_as_input
from dagexec.scheduler.run import Run
from dagexec.stress.devices import Holdings, lost
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

    def compile(self, **options: object) -> dagexec.Executor:
        """An executor of the two-branch net with 2 workers and 2 replicas."""
        chosen = {"num_workers": 2, "replicas": 2, **options}
        return dagexec.compile(two_branches(), device=self.device, net_type=self.net_type, **chosen)  # type: ignore[arg-type]


HOST = [Place("cpu", net_type) for net_type in ("simple", "dag", "async_dag")]
PLACES = HOST


@pytest.fixture(params=PLACES, ids=lambda place: f"{place.net_type} on {place.device}")
def place(request: pytest.FixtureRequest) -> Place:
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
    """

    def __init__(self) -> None:
        self.does: dict[int, Callable[[], object]] = {}
        self.behind: Counter[float] = Counter()

    def __call__(self, number: int, code: float) -> None:
        """Called in every step, with element 0, 0 of its input."""
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
        (1, 1),
        (1, 1),
        same_as_input,
        "A copy. For a test.",
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
def nothing_lost(place: Place) -> Iterator[None]:
    """Within it nothing may be lost: threads, leased streams, bytes of device memory."""
    before = Holdings.now([place.device])
    yield
    assert lost([place.device], before) == []


@contextmanager
def beside(executor: dagexec.Executor, acts: Acts, code: float = RIGHT) -> Iterator[Gate]:
    """A run is held in its right operator on one replica while the block lasts; then it must end with right bytes."""
    gate = Gate()
    acts.does[2] = gate
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(executor.run, feed(code))
        gate.wait_inside()
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


@pytest.mark.parametrize(
    "error", [ValueError("bad value"), SystemExit(3), MemoryError()], ids=lambda e: type(e).__name__
)
def test_an_operator_that_raises_fails_its_run_within_the_chain(place: Place, acts: Acts, error: BaseException) -> None:
    with nothing_lost(place), place.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(error)
            with pytest.raises(OperatorError, match=rf"Acting 'left' \(operator 0\).*{type(error).__name__}") as caught:
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

    with nothing_lost(place), place.compile(replicas=1) as executor, pytest.MonkeyPatch.context() as patch:
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
    place: Place, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagexec.core import device

    with nothing_lost(place), place.compile() as executor:
        with beside(executor, acts):
            monkeypatch.setattr(device, "memory_bytes", lambda: 100_000)
            with pytest.raises(ResourceError, match=r"needs [\d,]+ bytes; this machine has 100,000"):
                executor.run(feed(rows=5_000), timeout=PATIENCE)
            monkeypatch.undo()
        serves(executor, acts)


def test_an_operator_that_no_memory_is_left_for_fails_its_run_only(place: Place, acts: Acts) -> None:
    with nothing_lost(place), place.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(MemoryError("no memory"))
            with pytest.raises(OperatorError, match="MemoryError: no memory"):
                executor.run(feed(LEFT), timeout=PATIENCE)
        serves(executor, acts)


def test_a_shape_that_an_operator_refuses_fails_its_run_only(place: Place, acts: Acts) -> None:
    model = two_branches()
    loose = Model("branches", model.net, parameters=model.parameters, inputs={"x": InputInfo()}, outputs=("y",))
    with (
        nothing_lost(place),
        dagexec.compile(loose, device=place.device, net_type=place.net_type, num_workers=2, replicas=2) as executor,
    ):
        with beside(executor, acts), pytest.raises(ShapeError, match=r"Add 'left1' .*do not broadcast"):
            executor.run({"x": np.full((2, 4), PLAIN, np.float32)}, timeout=PATIENCE)
        serves(executor, acts)


def test_a_run_past_its_timeout_ends_when_its_operator_does(place: Place, acts: Acts) -> None:
    hung = Gate()
    with nothing_lost(place), place.compile(num_workers=3) as executor:
        with beside(executor, acts):
            acts.does[1] = hung
            released = release_when_cancelled(executor, hung)
            with pytest.raises(RunTimeoutError, match=r"not done within 0\.01 seconds"):
                executor.run(feed(LEFT), timeout=0.01)
            assert len(released) == 1
            assert acts.behind[LEFT] == 0
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
            assert acts.behind[LEFT] == 0
            del acts.does[1]
            assert (await executor.run_async(feed(LEFT)))["y"].tobytes() == right_bytes(LEFT)

    with nothing_lost(place):
        anyio.run(main, backend=backend)


def test_closing_lets_runs_in_flight_finish_and_ends_queued_ones(place: Place, acts: Acts) -> None:
    with nothing_lost(place), ThreadPoolExecutor(3) as threads:
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


def test_draining_past_its_time_stops_runs_at_the_next_chain(place: Place, acts: Acts) -> None:
    with nothing_lost(place), ThreadPoolExecutor(2) as threads:
        executor = place.compile(replicas=1, num_workers=1)
        gate = Gate()
        acts.does[1] = gate
        release_when_cancelled(executor, gate)
        running = threads.submit(executor.run, feed(LEFT))
        gate.wait_inside()
        assert executor.drain(timeout=0) is False
        with pytest.raises(ClosedError, match="the executor was closed"):
            running.result(PATIENCE)
        assert acts.behind[LEFT] == 0


def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, which other threads bring about."""
    while not condition():
        os.sched_yield()


def test_a_worker_that_dies_is_replaced_and_only_its_run_ends(
    place: Place, acts: Acts, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Run.failure

    def die(run: Run, *arguments: object) -> BaseException:
        if any(isinstance(argument, LookupError) for argument in arguments):
            raise MemoryError("the worker dies while it reports")
        return failure(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "failure", die)
    with nothing_lost(place), place.compile() as executor:
        with beside(executor, acts):
            acts.does[1] = raising(LookupError("deadly"))
            with pytest.raises(WorkerLostError, match="died: MemoryError: the worker dies") as caught:
                executor.run(feed(LEFT), timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, MemoryError)
        serves(executor, acts)
        assert executor.statistics().pool.replaced == 1
        assert executor.statistics().pool.workers == 2


def test_ctrl_c_in_the_caller_stops_its_run_only(place: Place, acts: Acts) -> None:
    hung = Gate()
    with nothing_lost(place), place.compile(num_workers=3) as executor:
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
            assert acts.behind[LEFT] == 0
        serves(executor, acts)


def test_a_child_of_fork_is_told_and_the_parent_goes_on(place: Place, acts: Acts) -> None:
    with nothing_lost(place), place.compile() as executor:
        with beside(executor, acts) as gate:
            told = in_a_child(lambda: executor.run(feed(), timeout=PATIENCE))
            assert isinstance(told, ClosedError)
            assert "forked" in str(told)
            assert "compile the model again in the child" in str(told)
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


def test_many_failures_of_all_kinds_at_once_lose_nothing(place: Place, acts: Acts) -> None:
    acts.does[1] = raising(ValueError("left"))
    acts.does[2] = raising(KeyError("right"))
    codes = [PLAIN, LEFT, PLAIN, RIGHT, BOTH]
    with nothing_lost(place), place.compile(num_workers=3, replicas=3) as executor, ThreadPoolExecutor(6) as threads:
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
