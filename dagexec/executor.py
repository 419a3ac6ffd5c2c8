"""Executor: a compiled model to embed in a larger application. `compile` makes one.

An executor owns a worker pool and `replicas` nets over shared parameters, so that many runs may be in flight. A request
waits in a queue until a replica is free; `run` blocks its thread meanwhile, `run_async` only its task.

The executor's lock guards its queue, its idle replicas and its counters, and is never held while anything is fed,
run or fetched. It is taken before the pool's lock, never after.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import anyio

from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import Device, make_context
from dagexec.core.errors import ClosedError, DagexecError, FeedError, RunCancelledError, RunTimeoutError, SchemaError
from dagexec.core.feeds import Feeds, check_feeds
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator_arguments import with_arguments
from dagexec.model_source import ModelSource, load_model
from dagexec.replicas import Outputs, Replica, build_replicas
from dagexec.requests import Request, on_loop
from dagexec.scheduler import intra_op
from dagexec.scheduler.net import BaseNet
from dagexec.scheduler.pool import PoolStatistics, WorkerPool
from dagexec.scheduler.run import Run, task, waiting_time
from dagexec.scheduler.trace import Trace

_LATENCIES_KEPT = 1000


def compile(
    model: ModelSource,
    *,
    net_type: str = "dag",
    num_workers: int | None = None,
    replicas: int = 1,
    device: str = "cpu",
    intra_op_threads: int = 1,
    operator_arguments: Mapping[str, ArgumentValue] | None = None,
) -> Executor:
    """Load a model and make it ready to run.

    Args:
        model: what `dagexec.model_source.load_model` takes: a file, a folder, a message, or "zoo:NAME".
        net_type: `simple`, `dag` or `async_dag`.
        num_workers: threads of the pool; by default the cores divided by `intra_op_threads`, and for `simple` no
            more than `replicas`.
        replicas: how many runs may be in flight at once. Parameters are shared; each replica has its own activations.
        device: where the net runs.
        intra_op_threads: BLAS threads inside one operator. With more than 1, results may differ in the last bits
            from those with 1.
        operator_arguments: arguments for every operator that knows them and has them not: `{"shared_buffer": 1}` lets
            all convolutions work in one buffer, `{"exhaustive_search": 1}` measures their algorithms.

    Raises ModelFormatError, SchemaError, UnsupportedOperatorError, CycleError, ShapeError, DeviceError, ArgumentError
    for an argument that no operator knows, and ValueError for a count below 1.
    """
    loaded = load_model(model)
    if net_type not in ("simple", "dag", "async_dag"):
        raise SchemaError(f"net type {net_type!r} is unknown; expected one of simple, dag, async_dag")
    make_context(Device.parse(device))
    if replicas < 1:
        raise ValueError(f"at least 1 replica is needed, not {replicas}")
    if intra_op_threads < 1:
        raise ValueError(f"at least 1 intra-op thread is needed, not {intra_op_threads}")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"at least 1 worker is needed, not {num_workers}")
    workers = num_workers or max(1, intra_op.available_cores() // intra_op_threads)
    if num_workers is None and net_type == "simple":
        workers = min(workers, replicas)
    if operator_arguments:
        loaded = replace(loaded, net=with_arguments(loaded.net, operator_arguments))
    return Executor(loaded, net_type, workers, replicas, Device.parse(device), intra_op_threads)


@dataclass(frozen=True)
class ExecutorStatistics:
    """A moment of an executor. Latencies are seconds from request to result, over the last 1,000 completed runs."""

    replicas: int
    running: int
    queued: int
    completed: int
    failed: int
    cancelled: int
    median_latency: float | None
    p99_latency: float | None
    pool: PoolStatistics


class Executor:
    """A compiled model. Use it as a context manager, or call `close`.

    `run` may be called from many threads and `run_async` from many tasks at once.
    """

    def __init__(
        self, model: Model, net_type: str, num_workers: int, replicas: int, device: Device, intra_op_threads: int
    ) -> None:
        """Use `compile`."""
        self.model = model
        self._needed = model.needed_inputs()
        self.net_type = net_type
        self.num_workers = num_workers
        self._lock = threading.Lock()
        self._queue: deque[Request] = deque()
        self._running: dict[Request, Replica] = {}
        self._closed = False
        self._all_done = threading.Condition(self._lock)
        self._completed = self._failed = self._cancelled = 0
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._pool = WorkerPool(num_workers, name=f"dagexec-{model.net.name or 'net'}")
        weakref.finalize(self, self._pool.close).atexit = False  # for an executor that is dropped without being closed
        try:
            self._replicas = build_replicas(model, net_type, replicas, device, self._pool, intra_op_threads)
        except BaseException:
            self._pool.close()
            raise
        self._idle = list(self._replicas.members)
        self.graph = self._replicas.graph

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        """Names, dtypes and shapes a run must be fed with."""
        return self.model.inputs

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the results a run returns."""
        return self.model.outputs

    def run(
        self,
        feeds: Feeds,
        *,
        outputs: Iterable[str] | None = None,
        timeout: float | None = None,
        trace: Trace | None = None,
    ) -> Outputs:
        """Run the model once and block until it is done.

        Args:
            feeds: an array for every input.
            outputs: names of blobs to return, by default the model's outputs.
            timeout: seconds until the run is cancelled, waiting for a replica included.
            trace: collects when each operator ran.

        Returns arrays that belong to the caller. Raises FeedError, OperatorError, RunTimeoutError, ClosedError,
        and ValueError for a negative `timeout`.
        """
        longest = waiting_time(timeout)
        request = self._request(feeds, outputs, trace)
        gate = threading.Lock()
        gate.acquire()
        request.notify = gate.release
        self._submit(request, start_here=True)
        try:
            in_time = gate.acquire(timeout=longest)
        except BaseException:  # KeyboardInterrupt: nothing runs on behind the caller's back
            self._cancel(request, RunCancelledError(f"net {self.model.name!r}: the calling thread was interrupted"))
            gate.acquire()
            raise
        if not in_time:
            self._cancel(request, self._timed_out(timeout))
            gate.acquire()
        return request.outcome()

    async def run_async(
        self,
        feeds: Feeds,
        *,
        outputs: Iterable[str] | None = None,
        timeout: float | None = None,
        trace: Trace | None = None,
    ) -> Outputs:
        """Run the model once; the task waits, the event loop (asyncio or trio) does not.

        The arguments and results are those of `run`; the arrays fed must not change until it returns. A cancelled
        await stops the run at the next chain boundary and returns when no worker uses the replica any more.
        """
        waiting_time(timeout)
        request = self._request(feeds, outputs, trace)
        done = anyio.Event()
        request.notify = on_loop(done.set)
        self._submit(request, start_here=False)
        try:
            with anyio.move_on_after(timeout) as scope:
                await done.wait()
        except BaseException:
            self._cancel(request, RunCancelledError(f"net {self.model.name!r}: the awaiting task was cancelled"))
            with anyio.CancelScope(shield=True):
                await done.wait()
            raise
        if scope.cancelled_caught:
            self._cancel(request, self._timed_out(timeout))
            with anyio.CancelScope(shield=True):
                await done.wait()
        return request.outcome()

    def statistics(self) -> ExecutorStatistics:
        """What the executor is doing at this moment, and what it has done."""
        pool = self._pool.statistics()
        with self._lock:
            ordered = sorted(self._latencies)
            return ExecutorStatistics(
                replicas=len(self._replicas.members),
                running=len(self._running),
                queued=len(self._queue),
                completed=self._completed,
                failed=self._failed,
                cancelled=self._cancelled,
                median_latency=ordered[len(ordered) // 2] if ordered else None,
                p99_latency=ordered[len(ordered) * 99 // 100] if ordered else None,
                pool=pool,
            )

    def close(self) -> None:
        """Cancel queued requests, let running ones finish, and join the workers. Idempotent.

        Raises DagexecError on one of the executor's own workers, which would wait for itself.
        """
        if self._pool.is_worker():
            raise DagexecError(f"net {self.model.name!r}: an operator cannot close the executor that runs it")
        with self._lock:
            self._closed = True
            abandoned = list(self._queue)
            self._queue.clear()
        for request in abandoned:
            self._complete(request, None, ClosedError(f"net {self.model.name!r}: the executor was closed"))
        with self._all_done:
            while self._running:
                self._all_done.wait()
        self._pool.close()
        self._replicas.close()

    def net(self) -> BaseNet:
        """The net of the first replica, to look at (graph, plan, operators); not to run beside the executor."""
        return self._replicas.members[0].net

    def _timed_out(self, timeout: float | None) -> RunTimeoutError:
        return RunTimeoutError(f"net {self.model.name!r}: not done within {timeout} seconds; the run was cancelled")

    def _request(self, feeds: Feeds, outputs: Iterable[str] | None, trace: Trace | None) -> Request:
        names = tuple(self.outputs if outputs is None else outputs)
        for name in names:
            if not self._replicas.members[0].workspace.has_blob(name):
                raise FeedError(f"net {self.model.name!r}: output {name!r} is not a blob of this net")
        return Request(check_feeds(self.model, feeds, self._needed), names, trace)

    def _submit(self, request: Request, *, start_here: bool) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"net {self.model.name!r}: the executor is closed")
            if not self._idle:
                self._queue.append(request)
                return
            replica = self._idle.pop()
            self._running[request] = replica
        if start_here:
            self._start(request, replica)
        else:
            self._pool.submit(task(f"feeding {self.model.name}", lambda: self._start(request, replica)))

    def _start(self, request: Request, replica: Replica) -> None:
        """Feed the replica and hand its run to the pool. Errors end the request, not the caller."""
        try:
            replica.feed(request.feeds)
            run = replica.net.new_run(lambda: self._over(request, replica, run), request.trace)
            if request.cancelled is not None:
                raise request.cancelled
            self._pool.submit(run)
        except BaseException as error:
            self._release(replica, request, None, error)
            return
        with self._lock:
            request.run = run
            cancelled = request.cancelled
        if cancelled is not None:  # between the two looks; a run that is over already stays as it is
            self._pool.stop(run, cancelled)

    def _over(self, request: Request, replica: Replica, run: Run) -> None:
        """The end of a run, on the worker that left it last: fetch, then free the replica."""
        result = None
        try:
            run.check_complete()
            run.raise_error()
            result = replica.fetch(request.names)
            error = None
        except BaseException as caught:
            error = caught
        self._release(replica, request, result, error)

    def _release(
        self, replica: Replica, request: Request, result: Outputs | None, error: BaseException | None
    ) -> None:
        with self._lock:
            del self._running[request]
            following = self._queue.popleft() if self._queue else None
            if following is None:
                self._idle.append(replica)
            else:
                self._running[following] = replica
        self._complete(request, result, error)
        if following is not None:
            self._pool.submit(task(f"feeding {self.model.name}", lambda: self._start(following, replica)))

    def _complete(self, request: Request, result: Outputs | None, error: BaseException | None) -> None:
        request.result, request.error = result, error
        with self._all_done:
            if error is None:
                self._completed += 1
                self._latencies.append(time.perf_counter() - request.started)
            elif isinstance(error, RunCancelledError | RunTimeoutError | ClosedError):
                self._cancelled += 1
            else:
                self._failed += 1
            self._all_done.notify_all()
        assert request.notify is not None
        request.notify()

    def _cancel(self, request: Request, error: DagexecError) -> None:
        """End `request` with `error` as soon as no worker needs its replica. Nothing happens if it is over already."""
        with self._lock:
            request.cancelled = error
            queued = request in self._queue
            if queued:
                self._queue.remove(request)
            run = request.run
        if queued:
            self._complete(request, None, error)
        elif run is not None:
            self._pool.stop(run, error)
