"""Processes made by fork: a child computes with threads of its own, and serves with what its parent has compiled."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec.core import choices
from dagexec.core.arguments import make_argument
from dagexec.core.blobs_queue import BlobsQueue
from dagexec.core.choices import Choices, choose, measuring
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.tensor import Tensor
from dagexec.errors import ClosedError, DagexecError, QueueClosedError
from dagexec.executor.executor import Executor
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.families.storage.tensor_input import _Prefetch
from dagexec.platform import forking
from dagexec.platform.cached import cached_property
from dagexec.platform.weight_memory import weight_memory
from dagexec.storage.reader import DBReader
from dagexec.training.data import BatchLoader
from dagexec.training.data_parallel.solver_thread import SolverThread
from dagexec.training.queue_feeding import QueueFeeder
from tests.forked import PATIENCE, in_child, passed_alone

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

_WIDE = (128, 512)  # of the weights
_X = np.random.default_rng(0).standard_normal((64, 512), np.float32)


def product() -> tuple[NetDef, NetDef]:
    """Nets that make weights, and multiply by them."""
    fill = OperatorDef(type="XavierFill", output=["w"], arg=[make_argument("shape", _WIDE)])
    fill.device_option.random_seed = 1
    zeros = OperatorDef(type="ConstantFill", output=["b"], arg=[make_argument("shape", _WIDE[:1])])
    multiply = OperatorDef(type="FC", input=["x", "w", "b"], output=["y"], engine="ONEDNN")
    return NetDef(name="init", op=[fill, zeros]), NetDef(name="product", op=[multiply], external_input=["x", "w", "b"])


def compiled(**options: object) -> Executor:
    """The product as it is given."""
    return dagexec.compile(product(), optimize=False, **{"num_workers": 1, **options})  # type: ignore[arg-type]


def result(executor: Executor) -> bytes:
    """The bytes of a run."""
    return executor.run({"x": _X})["y"].tobytes()


@pytest.fixture
def executor() -> Iterator[Executor]:
    """An executor that has run in this thread."""
    with compiled() as made:
        result(made)
        yield made


def compile_and_run() -> bytes:
    """What a child does that makes everything anew, with passes, and with a worker that helps."""
    with dagexec.compile("zoo:lenet", net_type="dag", num_workers=2) as other:
        other.run({"data": np.zeros((1, 1, 28, 28), np.float32)})
    with compiled() as made:
        return result(made)


def _put(queue: multiprocessing.SimpleQueue[bytes]) -> None:
    queue.put(compile_and_run())


@needs_onednn
def test_a_child_of_multiprocessing_compiles_and_runs_as_its_parent_does() -> None:
    expected = compile_and_run()
    with compiled() as executor:
        assert result(executor) == expected
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_put, args=(queue,))
        child.start()
        child.join(PATIENCE)
        if child.is_alive():
            child.kill()
            child.join()
        assert child.exitcode == 0
        assert queue.get() == expected
        assert result(executor) == expected


@needs_onednn
def test_a_net_without_workers_goes_on_in_a_child() -> None:
    workspace = dagexec.Workspace()
    init, predict = product()
    workspace.run_net_once(init)
    workspace.feed_blob("x", _X)
    net = workspace.create_net(predict, net_type="simple")
    net.run()
    expected = workspace.fetch_blob("y").tobytes()

    def again() -> bytes:
        workspace.feed_blob("y", np.zeros((64, 128), np.float32))
        net.run()
        return bytes(workspace.fetch_blob("y").tobytes())

    assert in_child(again) == expected


@pytest.mark.slow
@needs_onednn
def test_where_native_code_forks_a_net_without_workers_goes_on_and_an_executor_is_reopened(
    executor: Executor, request: pytest.FixtureRequest
) -> None:
    """Some servers call fork themselves, and tell Python in the child only."""
    if passed_alone(request):  # a thread that another test left could hold a lock while this forks
        return
    # Such servers call PyOS_AfterFork_Child at once. Here the child first returns to the interpreter, which must not be
    # asked meanwhile to hand its lock to a thread that has stayed in the parent: the child would wait for it for good.
    sys.setswitchinterval(1000)
    workspace = dagexec.Workspace()
    init, predict = product()
    workspace.run_net_once(init)
    workspace.feed_blob("x", _X)
    net = workspace.create_net(predict, net_type="simple")
    net.run()
    child = ctypes.PyDLL(None).fork()
    if not child:
        signal.alarm(PATIENCE)
        try:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            net.run()
            executor.reopen()
            result(executor)
            compile_and_run()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_executor_of_the_parent_is_refused_in_the_child_until_it_is_reopened(executor: Executor) -> None:
    def refused() -> str:
        with pytest.raises(ClosedError) as told:
            executor.run({"x": _X})
        return str(told.value)

    assert "call reopen() in the child" in in_child(refused)


@pytest.mark.parametrize("options", [{}, {"net_type": "simple"}, {"num_workers": 2, "replicas": 2}])
def test_a_reopened_executor_gives_the_same_bytes_and_the_parent_goes_on(options: dict[str, object]) -> None:
    with compiled(**options) as executor:
        expected = result(executor)

        def reopened() -> tuple[bytes, int, bytes]:
            executor.reopen()
            with executor:
                return result(executor), executor.statistics().completed, result(executor)

        assert in_child(reopened) == (expected, 1, expected)
        assert result(executor) == expected


def test_an_executor_that_the_parent_has_closed_is_reopened_by_its_children_and_theirs() -> None:
    with compiled() as executor:
        expected = result(executor)

    def reopened() -> bytes:
        executor.reopen()
        return result(executor)

    def in_grandchild() -> tuple[bytes, object]:
        return reopened(), in_child(reopened)

    assert in_child(in_grandchild) == (expected, expected)


def test_reopening_is_for_children_and_once(executor: Executor) -> None:
    with pytest.raises(DagexecError, match="reopen is for a parent's executor"):
        executor.reopen()

    def twice() -> None:
        executor.reopen()
        executor.reopen()

    assert "reopen is for a parent's executor" in in_child(twice)


def test_a_reopened_executor_on_a_device_gives_the_same_bytes() -> None:
    with dagexec.compile(product(), optimize=False, device="sim:0", num_workers=1) as executor:
        expected = result(executor)

        def reopened() -> bytes:
            executor.reopen()
            with executor:
                return result(executor)

        assert in_child(reopened) == expected
        assert result(executor) == expected


def _shared_kilobytes(address: int) -> tuple[int, int]:
    """KiB of the mapping around `address` that other processes have too, and that only this one has, as of Linux."""
    shared = private = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= address < end
        elif inside and name.startswith("Shared_"):
            shared += int(values[0])
        elif inside and name.startswith("Private_"):
            private += int(values[0])
    return shared, private


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")
def test_the_memory_of_parameters_stays_shared_with_the_parent(request: pytest.FixtureRequest) -> None:
    if passed_alone(request):  # mappings that are next to one another are one line of smaps
        return
    megabytes = 32
    model = NetDef(name="sum", op=[OperatorDef(type="Add", input=["x", "w"], output=["y"])], external_input=["x", "w"])
    shape = (megabytes, 1 << 18)
    fill = OperatorDef(type="ConstantFill", output=["w"], arg=[make_argument("shape", shape)])
    x = np.ones(shape, np.float32)
    with dagexec.compile((NetDef(name="init", op=[fill]), model), optimize=False, num_workers=1) as executor:
        executor.run({"x": x})

        def reopened() -> tuple[int, int]:
            executor.reopen()
            executor.run({"x": x})
            weights = executor.net().workspace.get_blob("w").get(Tensor).array
            return _shared_kilobytes(weights.ctypes.data + weights.nbytes // 2)

        shared, private = in_child(reopened)
    assert shared >= 0.9 * megabytes * 1024
    assert private < 0.1 * megabytes * 1024


def test_packed_weights_are_the_parents_in_the_child(executor: Executor) -> None:
    weights = executor.net().workspace.get_blob("w").get(Tensor)
    assert weights.constant is not None
    known = set(weights.constant._packed)

    def reopened() -> bool:
        executor.reopen()
        result(executor)
        found = executor.net().workspace.get_blob("w").get(Tensor)
        return found is weights and found.constant is not None and set(found.constant._packed) == known

    assert in_child(reopened)


class Server:
    """A server that compiles once and serves with children that accept on one socket, like gunicorn with --preload."""

    def __init__(self, executor: Executor, workers: int) -> None:
        self._executor = executor
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(PATIENCE)
        self.children = [self._fork() for _ in range(workers)]

    def _fork(self) -> int:
        child = os.fork()
        if not child:
            signal.alarm(PATIENCE)
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._executor.reopen()
                while True:
                    self._serve()
            finally:
                os._exit(1)
        return child

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, connection.makefile("rb") as asked:
            x = np.frombuffer(asked.read(_X.nbytes), np.float32).reshape(_X.shape)
            connection.sendall(os.getpid().to_bytes(8, "little") + self._executor.run({"x": x})["y"].tobytes())

    def ask(self, x: npt.NDArray[np.float32]) -> tuple[int, bytes]:
        """The process that answered, and its answer."""
        with socket.create_connection(self._socket.getsockname(), PATIENCE) as connection:
            connection.sendall(x.tobytes())
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                found = answer.read()
        return int.from_bytes(found[:8], "little"), found[8:]

    def close(self) -> None:
        """End the children, which die of the signal and of nothing else."""
        self._socket.close()
        for child in self.children:
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM


@needs_onednn
def test_a_server_that_forks_after_it_has_compiled_answers_with_the_parents_bytes(executor: Executor) -> None:
    expected = result(executor)
    server = Server(executor, workers=2)
    try:
        answers = [server.ask(_X) for _ in range(6)]
    finally:
        server.close()
    assert {content for _, content in answers} == {expected}
    assert {process for process, _ in answers} <= set(server.children)
    assert result(executor) == expected


class Holder:
    """A thread that holds something while the process forks."""

    def __init__(self, *locks: object) -> None:
        self._holding, self._let_go = threading.Event(), threading.Event()
        self._locks = locks
        self._thread = threading.Thread(target=self._hold)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._holding.wait(PATIENCE)

    def __exit__(self, *_error: object) -> None:
        self._let_go.set()
        self._thread.join()

    def _hold(self) -> None:
        with measuring(PATIENCE):
            for lock in self._locks:
                lock.acquire()  # type: ignore[attr-defined]
            self._holding.set()
            self._let_go.wait()
            for lock in self._locks:
                lock.release()  # type: ignore[attr-defined]


def test_locks_that_another_thread_holds_are_free_in_the_child(executor: Executor) -> None:
    weights = executor.net().workspace.get_blob("w").get(Tensor)
    assert weights.constant is not None
    held = (
        choices.choices._lock.own, choices._turn, choices._lock.own, weight_memory._lock.own,
        weights.constant._lock.own, executor.net().workspace._lock.own, executor._pool.lock,
    )  # fmt: skip

    def everything() -> tuple[str | None, int, bytes, bytes]:
        executor.reopen()
        with measuring(PATIENCE):
            chosen = choose("key", lambda _seconds: "measured")
        return chosen, len(choices._blocks), compile_and_run(), result(executor)

    expected = result(executor)
    with Holder(*held):
        found = in_child(everything)
    assert found == ("measured", 0, expected, expected)


def test_a_property_that_another_thread_computes_is_computed_in_the_child() -> None:
    computing, go_on = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def answer(self) -> int:
            if threading.current_thread() is thread:
                computing.set()
                assert go_on.wait(PATIENCE)
            return 42

    thread = threading.Thread(target=lambda: Slow().answer)
    thread.start()
    assert computing.wait(PATIENCE)
    assert in_child(lambda: Slow().answer) == 42
    go_on.set()
    thread.join()


def test_what_is_put_off_until_measuring_ends_is_done_in_a_child_whose_parent_measures() -> None:
    done: list[int] = []
    with Holder():
        choices.at_end_of_measuring(lambda: done.append(1))
        assert in_child(lambda: done) == [1]
        assert done == []
    assert done == [1]


def test_a_lock_of_a_process_is_one_lock_as_long_as_nobody_forks() -> None:
    lock = forking.ProcessLock()
    with lock.own:
        assert lock.own.locked()
        assert in_child(lambda: lock.own.locked()) is False
        assert lock.own.locked()


def test_a_fork_waits_for_another_thread_in_a_block_without_fork() -> None:
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def load() -> None:
        with forking.without_fork():
            inside.set()
            assert go_on.wait(PATIENCE)
            order.append("loaded")

    loader = threading.Thread(target=load)
    loader.start()
    assert inside.wait(PATIENCE)
    waiting = threading.Timer(0.05, go_on.set)
    waiting.start()
    assert in_child(lambda: order) == ["loaded"]
    loader.join()


def test_a_thread_may_fork_in_its_own_block_without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "MAX_WAIT", float(PATIENCE))
    with forking.without_fork():
        assert in_child(lambda: forking._barring_fork) == [threading.get_ident()]


def test_choices_that_are_being_read_during_a_fork_are_read_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "choices.json"
    written = Choices()
    written.keep("key", "fast")
    monkeypatch.setenv("DAGEXEC_CHOICES", "off")
    written.save(file)
    monkeypatch.setenv("DAGEXEC_CHOICES", str(file))
    reading, go_on = threading.Event(), threading.Event()
    here = threading.current_thread()
    found = Choices()
    read = choices._read_or_warn

    def slow(path: Path) -> dict[str, str] | None:
        if threading.current_thread() is not here:
            reading.set()
            assert go_on.wait(PATIENCE)
        return read(path)

    monkeypatch.setattr(choices, "_read_or_warn", slow)
    reader = threading.Thread(target=found.find, args=("key",))
    reader.start()
    assert reading.wait(PATIENCE)
    assert in_child(lambda: found.find("key")) == "fast"
    go_on.set()
    reader.join()


def test_what_has_threads_of_its_own_says_in_a_child_that_they_are_not_there() -> None:
    """Else the child would wait for them."""
    queue = BlobsQueue(1)
    solver = SolverThread("solver")
    waits = threading.Event()

    def batches() -> Iterator[list[npt.NDArray[np.float32]]]:
        waits.wait()
        yield [_X]

    def in_vain() -> list[str]:
        found = []
        for call in (lambda: loader.take(), lambda: queue.dequeue(), lambda: solver.begin(lambda: None)):
            with pytest.raises((ClosedError, QueueClosedError)) as told:
                call()
            found.append(str(told.value))
        solver.wait()
        for one in (loader, feeder, solver):
            one.close()  # type: ignore[attr-defined]
        return found

    loader = BatchLoader({"x": _X}, 4)
    feeder = QueueFeeder.of_batches(queue, batches())
    try:
        assert all(forking.LEFT_BEHIND in text for text in in_child(in_vain))
        assert loader.take(PATIENCE)["x"].shape == (4, 512)
    finally:
        waits.set()
        for one in (loader, feeder, solver):
            one.close()  # type: ignore[attr-defined]


def test_a_batch_that_another_thread_was_reading_is_not_taken_for_read_in_a_child() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def read() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    ahead = _Prefetch(read, cast(DBReader, SimpleNamespace(path="some.db")), "reads ahead")
    assert inside.wait(PATIENCE)
    lost = f"StorageError: some.db: the batch that was being read is lost: {forking.LEFT_BEHIND}"
    assert in_child(ahead.wait) == lost
    go_on.set()
    ahead.wait()


@needs_onednn
@pytest.mark.slow
def test_children_compile_and_run_whatever_other_threads_of_the_parent_were_at() -> None:
    expected = compile_and_run()
    over = threading.Event()
    with compiled(num_workers=2, replicas=2) as executor:

        def busy() -> None:
            while not over.is_set():
                compile_and_run()
                result(executor)

        def reopen_and_run() -> tuple[bytes, bytes]:
            executor.reopen()
            return compile_and_run(), result(executor)

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_child(reopen_and_run) == (expected, expected)
        finally:
            over.set()
            for thread in threads:
                thread.join()
