"""Workers that die are replaced, and a pool says clearly that it does not survive a fork."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable

import pytest

from dagexec import Workspace
from dagexec.core.device import Device
from dagexec.core.operator import Operator, Step
from dagexec.devices.sim import simulated
from dagexec.errors import ClosedError, OperatorError, WorkerLostError
from dagexec.platform import threads as threads_module
from dagexec.platform.locks import Mutex
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task
from dagexec.scheduler.run.work import ChainSteps, Work, chain_work
from tests.interrupts import InterruptedAtPoints
from tests.nets import net_of, temporary_operator
from tests.new_threads import new_threads
from tests.scheduler.run.test_pool import PATIENCE, run_of

DIAMOND = [[], [0], [0], [1, 2]]


class _Raises:
    """The children of a plan that cannot be read, which is done with the pool's lock held."""

    def __getitem__(self, chain: int) -> tuple[int, ...]:
        raise MemoryError("no children")


class _Plan:
    children = _Raises()
    parent_counts = (0, 1)
    policy = None


def fail() -> None:
    raise ValueError("on purpose")


def unnamed(_chain: int, _step: object) -> str:
    raise KeyError("no name")


def deadly_run(parents: list[list[int]], steps: ChainSteps, finished: Callable[[], object]) -> Run:
    """A run of which no operator can be named."""
    graph = run_of(parents, {}, threading.Event()).work.graph
    return Run("deadly", Work(graph, [(chain,) for chain in steps]), unnamed, finished)


def deadly_runs(finished: Callable[[], object]) -> dict[str, Run]:
    """Runs whose worker dies outside of any operator."""
    return {
        "with the pool's lock": Run("deadly", chain_work(_Plan(), [(), ()]), lambda *_: "", finished),  # type: ignore[arg-type]
        "while it reports a failure": deadly_run(DIAMOND, [(fail,)] * 4, finished),
    }  # fmt: skip


def runs_well(pool: WorkerPool) -> bool:
    """True when a whole run passes through `pool`, with as many workers inside at once as it has."""
    meeting = threading.Barrier(pool.num_workers)
    done = threading.Event()
    steps: dict[int, Step] = {index: lambda: meeting.wait(PATIENCE) for index in range(pool.num_workers)}
    run = run_of([[] for _ in range(pool.num_workers)], steps, done)
    pool.submit(run)
    return done.wait(PATIENCE) and run.error is None


@pytest.mark.parametrize(
    "when", [pytest.param("with the pool's lock", marks=pytest.mark.unrecorded), "while it reports a failure"]
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_dead_worker_is_replaced_and_its_run_ends_with_an_error(when: str, workers: int) -> None:
    started = new_threads()
    with WorkerPool(workers, name="mine") as pool:
        for count in (1, 2):
            done = threading.Event()
            run = deadly_runs(done.set)[when]
            pool.submit(run)
            assert done.wait(PATIENCE)
            with pytest.raises(WorkerLostError, match=r"net 'deadly': worker mine-\d died: \w+Error: .*no "):
                run.raise_error()
            assert run.over
            assert run.active == 0
            assert runs_well(pool)
            assert pool.statistics().replaced == count
        assert len([thread for thread in pool._crew.threads if thread.is_alive()]) <= workers + 1
    assert started() == 0


@pytest.mark.parametrize(
    "when", [pytest.param("with the pool's lock", marks=pytest.mark.unrecorded), "while it reports a failure"]
)
def test_what_ends_a_worker_that_helps_ends_the_run_and_the_one_that_waits_for_it(when: str) -> None:
    over, done = threading.Event(), threading.Event()
    inner, share = deadly_runs(over.set)[when], Share("inner")
    inner.share = share

    def wait_for_inner() -> None:
        wait = pool.new_wait(share)
        pool.submit(inner)
        wait.wait(PATIENCE)

    with WorkerPool(1, name="mine") as pool:
        outer = run_of([[], [0]], {0: wait_for_inner}, done)
        pool.submit(outer)
        assert over.wait(PATIENCE)
        assert done.wait(PATIENCE)
        with pytest.raises(WorkerLostError, match=r"net 'deadly': worker mine-\d died: \w+Error: .*no "):
            inner.raise_error()
        with pytest.raises((MemoryError, OperatorError), match="no "):
            outer.raise_error()
        assert (inner.active, outer.active) == (0, 0)
        assert runs_well(pool)


@pytest.mark.unrecorded
def test_a_run_beside_the_dead_worker_does_not_notice() -> None:
    inside, go_on = threading.Event(), threading.Event()
    done = [threading.Event(), threading.Event()]

    def hold() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    with WorkerPool(2) as pool:
        other = run_of(DIAMOND, {0: hold}, done[0])
        pool.submit(other)
        assert inside.wait(PATIENCE)
        pool.submit(deadly_runs(done[1].set)["with the pool's lock"])
        assert done[1].wait(PATIENCE)
        assert pool.statistics().busy == 1
        go_on.set()
        assert done[0].wait(PATIENCE)
    other.check_complete()
    other.raise_error()


def test_the_other_workers_of_a_run_finish_their_chain_when_one_dies() -> None:
    inside, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    def fail_beside() -> None:
        assert inside.wait(PATIENCE)
        raise ValueError("on purpose")

    with WorkerPool(2) as pool:
        run = deadly_run([[], []], [(hold,), (fail_beside,)], done.set)
        pool.submit(run)
        while not pool.statistics().replaced:
            os.sched_yield()
        assert not done.is_set()
        go_on.set()
        assert done.wait(PATIENCE)
    assert isinstance(run.error, WorkerLostError)


def test_an_exception_sent_to_a_waiting_worker_costs_no_run() -> None:
    names: list[str] = []
    done = [threading.Event(), threading.Event()]
    with WorkerPool(1, name="sent") as pool:
        pool.submit(run_of([[]], {0: lambda: names.append(threading.current_thread().name)}, done[0]))
        assert done[0].wait(PATIENCE)
        (thread,) = pool._crew.threads
        assert isinstance(thread, threading.Thread)
        while pool.statistics().idle != 1:
            os.sched_yield()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        pool.submit(run_of([[]], {0: lambda: names.append(threading.current_thread().name)}, done[1]))
        assert done[1].wait(PATIENCE)
        assert pool.statistics().replaced == 1
    assert names == ["sent-0", "sent-1"]


def test_an_owner_whose_callback_kills_the_worker_is_told_again() -> None:
    calls: list[str] = []
    done = threading.Event()

    def finished() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            raise SystemExit
        done.set()

    with WorkerPool(1, name="told") as pool:
        run = run_of([[]], {}, done)
        run.finished = finished
        pool.submit(run)
        assert done.wait(PATIENCE)
        assert runs_well(pool)
    assert calls == ["told-0", "told-0"]


def test_a_worker_lives_on_when_no_thread_can_be_started_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with WorkerPool(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            done = threading.Event()
            pool.submit(deadly_runs(done.set)["while it reports a failure"])
            assert done.wait(PATIENCE)
            assert runs_well(pool)
        assert pool.statistics().replaced == 1
        while pool.statistics().busy:
            pass


def test_on_stop_is_called_for_a_stopped_run_even_after_its_workers_have_left() -> None:
    told: list[str] = []
    left = threading.Event()
    with WorkerPool(1) as pool:
        run = run_of([[]], {}, left)
        run.on_stop = lambda: told.append("stop")
        pool.submit(run)
        assert left.wait(PATIENCE)
        pool.stop(run, RuntimeError("hung device"))
        pool.stop(run, RuntimeError("again"))
    assert told == ["stop"]
    assert str(run.error) == "hung device"


def in_child(body: Callable[[], str]) -> str:
    """What `body` returns in a child made by `os.fork`; the child is ended after PATIENCE seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE)
        try:
            os.write(writing, body().encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    return text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("locked", [False, True])
def test_a_pool_says_in_a_forked_child_that_it_has_no_threads_there(locked: bool) -> None:
    with WorkerPool(2) as pool:

        def body() -> str:
            pool.statistics()
            try:
                pool.submit(run_of([[]], {}, threading.Event()))
            except ClosedError as error:
                pool.close()
                with WorkerPool(1) as another:
                    return f"{error} {runs_well(another)}"
            return "taken"

        holding, let_go = threading.Event(), threading.Event()

        def hold_the_lock() -> None:
            with pool.lock:
                holding.set()
                assert let_go.wait(PATIENCE)

        holder = threading.Thread(target=hold_the_lock)
        if locked:
            holder.start()
            assert holding.wait(PATIENCE)
        text = in_child(body)
        let_go.set()
        if locked:
            holder.join()
        assert f"made in process {os.getpid()} and this is process" in text
        assert "make a new one after it" in text
        assert text.endswith("True")
        assert runs_well(pool)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("net_type", ["dag", "async_dag"])
def test_a_net_with_a_pool_fails_in_a_forked_child_and_goes_on_in_the_parent(net_type: str) -> None:
    net = Workspace().create_net(net_of(DIAMOND), net_type, 2)
    assert isinstance(net, BaseNet)
    net.run()

    def body() -> str:
        try:
            net.run()
        finally:
            net.close()
        return "ran"

    assert in_child(body).startswith("ClosedError: net 'net': its worker pool was made in process")
    net.run()
    net.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("seed", [None, 3])
def test_a_simulated_device_works_in_a_forked_child_with_threads_of_its_own(seed: int | None) -> None:
    definition = net_of(DIAMOND)
    definition.device_option.CopyFrom(Device.parse("sim:0").to_option())
    with simulated("sim:0", seed=seed):

        def run_anew(net_type: str) -> None:
            net = Workspace().create_net(definition, net_type, 2)
            assert isinstance(net, BaseNet)
            with net:
                net.run()

        old = Workspace().create_net(definition, "simple")
        assert isinstance(old, BaseNet)
        old.run()
        run_anew("async_dag")

        def body() -> str:
            old.run()
            run_anew("simple")
            run_anew("async_dag")
            return "ran"

        assert in_child(body) == "ran"
        old.run()
        old.close()
        run_anew("async_dag")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(("net_type", "text"), [("dag", "ClosedError: net 'net': its worker pool"), ("simple", "ran")])
def test_a_child_forked_while_another_thread_runs_the_net_does_not_wait_for_that_thread(
    net_type: str, text: str
) -> None:
    """The child has the lock of the net as the parent's thread holds it, but not the thread."""
    inside, go_on = threading.Event(), threading.Event()

    def hold(_operator: Operator) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    with temporary_operator("TestHold", hold):
        net = Workspace().create_net(net_of([[]], op_type="TestHold"), net_type, 1)
        assert isinstance(net, BaseNet)
        runner = threading.Thread(target=net.run)
        runner.start()
        assert inside.wait(PATIENCE)

        def body() -> str:
            go_on.set()
            net.run()
            return "ran"

        found = in_child(body)
        go_on.set()
        runner.join()
        net.close()
    assert found.startswith(text)


@pytest.mark.unrecorded
@pytest.mark.parametrize(("net_type", "device"), [("dag", "cpu"), ("async_dag", "sim:0"), ("dag", "sim:0")])
def test_ctrl_c_at_any_point_of_a_net_s_run_leaves_net_and_pool_usable(net_type: str, device: str) -> None:
    definition = net_of(DIAMOND)
    definition.device_option.CopyFrom(Device.parse(device).to_option())
    net = Workspace().create_net(definition, net_type, 2)
    assert isinstance(net, BaseNet)
    with net:
        net.run()
        interrupted = InterruptedAtPoints("dagexec/")
        interrupted(lambda: interrupted.look(net.run))
        other = threading.Thread(target=net.run, daemon=True)
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive(), "the net is still held"


def test_ctrl_c_that_comes_with_the_end_of_a_run_does_not_wait_for_another_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is handled when the gate is taken already."""
    acquire = threads_module.acquire

    def taken_and_interrupted(lock: Mutex, seconds: float = -1) -> bool:
        taken = acquire(lock, seconds)
        monkeypatch.undo()
        if taken:
            raise KeyboardInterrupt
        return taken

    with Workspace().create_net(net_of(DIAMOND), "dag", 2) as net:
        assert isinstance(net, BaseNet)
        net.run()
        monkeypatch.setattr(threads_module, "acquire", taken_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            net.run()
        net.run()


def test_an_owner_that_stops_its_run_while_it_is_told_is_told_once() -> None:
    """Devices are at work for the run yet: `on_stop` is set."""
    told: list[bool] = []
    done = threading.Event()

    def finished() -> None:
        told.append(True)
        if len(told) == 1:
            pool.stop(run, ValueError("too late"))
        done.set()

    with WorkerPool(1) as pool:
        run = run_of([[]], {}, threading.Event())
        run.finished = finished
        run.on_stop = lambda: None
        pool.submit(run)
        assert done.wait(PATIENCE)
    assert told == [True]


def test_a_worker_may_close_its_pool() -> None:
    outcome: list[object] = []
    done = threading.Event()

    def close() -> None:
        try:
            outcome.append(pool.close())  # type: ignore[func-returns-value]
        except BaseException as error:
            outcome.append(error)
        done.set()

    pool = WorkerPool(2)
    pool.submit(task("close", close))
    assert done.wait(PATIENCE)
    pool.close()
    assert outcome == [None]


@pytest.mark.unrecorded
def test_workers_that_died_are_forgotten() -> None:
    with WorkerPool(1) as pool:
        for _ in range(5):
            done = threading.Event()
            pool.submit(deadly_runs(done.set)["with the pool's lock"])
            assert done.wait(PATIENCE)
            assert runs_well(pool)
            [living] = pool._roster.workers
            for thread in list(pool._crew.threads):
                if thread.name != living.name:
                    thread.join(PATIENCE)
        assert len(pool._crew.threads) <= 2


def test_a_worker_that_is_woken_for_nothing_waits_once() -> None:
    with WorkerPool(1) as pool:
        assert runs_well(pool)
        for _ in range(3):
            while pool.statistics().idle != 1:
                pass
            [worker] = pool._roster.workers
            worker.wake()
            assert runs_well(pool)
        while pool.statistics().busy:
            pass
        assert pool.statistics().idle <= 1


@pytest.mark.unrecorded
def test_devices_are_told_of_a_run_whose_worker_died() -> None:
    stopped, done = threading.Event(), threading.Event()
    with WorkerPool(1) as pool:
        run = deadly_runs(done.set)["with the pool's lock"]
        run.on_stop = stopped.set
        pool.submit(run)
        assert done.wait(PATIENCE)
    assert stopped.is_set()
