"""Replicas as Ray actors: one process each, which compiles the model for itself and runs it for many callers at once.

The model's parameters are one object in Ray's store: a node gets it once, and the arrays of its replicas are read-only
views of it. Large inputs and results go through the store, too, where the replica reads its inputs in place.

A lost replica becomes another actor. Ray would start the same one again, but calls to it fail for a while after its
process has ended, which looks like an end of the next process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from dagexec.binding.io_binding import Array
from dagexec.cluster.failure import Failure
from dagexec.cluster.link import Answer, Call, Lost, Started
from dagexec.cluster.message import Message, packed, unpacked
from dagexec.core.model import Model
from dagexec.errors import DagexecError, RunCancelledError
from dagexec.executor.compile_async import compile_async
from dagexec.executor.dispatch.statistics import ExecutorStatistics
from dagexec.executor.executor import Executor
from dagexec.executor.source.loading import ModelSource
from dagexec.options import CompileOptions
from dagexec.plans.plan import PlanFile
from dagexec.platform.own_cores import OwnCores
from dagexec.platform.processor import limit_cores
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

_MOST_AT_ONCE = 1000


@dataclass(frozen=True)
class Parcel:
    """What replicas are made of: a model without its parameters, and how it is compiled.

    `plan` is the file that the model came from, where it is one that replicas open if they find it, too.
    """

    model: Model
    options: CompileOptions
    cores: int
    plan: PlanFile | None = None

    def source(self, parameters: Mapping[str, Array]) -> ModelSource:
        """What this process makes a replica of."""
        if self.plan is not None and self.plan.is_here():
            return self.plan.path
        return replace(self.model, parameters=parameters)


class ReplicaActor:
    """The process of a replica."""

    def __init__(self) -> None:
        self._executor: Executor | None = None

    async def prepare(self, references: Sequence[ray.ObjectRef[Any]]) -> tuple[Failure | None, str]:
        """Compile the model, of which `references` are of the `Parcel` and of the parameters by name, unless it did.

        Why it cannot serve, or None; and where it runs.
        """
        place = f"process {os.getpid()} on {socket.gethostname()}"
        if self._executor is None:
            try:
                parcel: Parcel = await references[0]
                parameters = await references[1]
                limit_cores(parcel.cores)
                self._cores = OwnCores(parcel.cores)
                self._cores.use()
                self._executor = await compile_async(parcel.source(parameters), parcel.options)
            except Exception as error:
                return Failure.of(error), place
        return None, place

    async def run(self, written: bytes, large: dict[str, Array] | None = None) -> bytes | Message | Failure | None:
        """What the executor gives for the arguments of `RayReplica.run`, as a message both.

        None if they were meant for the process before this one, which was lost.
        """
        if self._executor is None:
            return None
        try:
            feeds, (names, priority, timeout) = unpacked(written, large)
            results = packed(await self._executor.run_async(feeds, outputs=names, priority=priority, timeout=timeout))
            return results[0] if results[1] is None else results
        except Exception as error:
            return Failure.of(error)

    async def statistics(self) -> ExecutorStatistics | None:
        """Those of its executor; None before there is one."""
        return None if self._executor is None else self._executor.statistics()


class RayReplica:
    """A `ReplicaLink` to an actor, which it makes when it is started."""

    def __init__(self, number: int, cores: int, references: Sequence[ray.ObjectRef[Any]]) -> None:
        self.place = "not started"
        self._number = number
        self._references = references
        options = {"num_cpus": cores, "max_restarts": 0, "max_concurrency": _MOST_AT_ONCE}
        self._new_actor = ray.remote(ReplicaActor).options(**options)
        self._lock = threads().lock()
        self._stopped = False
        self._actor: Any = None

    def start(self, done: Callable[[Started], object]) -> None:
        """As `ReplicaLink.start`: a new actor, and the end of the one before, which may be out of reach only."""
        with self._lock:
            if self._stopped:
                return
            lost, self._actor = self._actor, self._new_actor.remote()
            asked = self._actor.prepare.remote(self._references)
        _kill(lost)
        asked.future().add_done_callback(partial(self._told, done))

    def run(
        self,
        feeds: Mapping[str, Array],
        names: Sequence[str],
        priority: int,
        timeout: float | None,
        done: Callable[[Answer], object],
    ) -> Call:
        """As `ReplicaLink.run`."""
        written, large = packed(feeds, (names, priority, timeout))
        run = self._actor.run
        return _RayCall(run.remote(written) if large is None else run.remote(written, large), done)

    def ask(self, done: Callable[[], object]) -> None:
        """As `ReplicaLink.ask`."""
        self.statistics().future().add_done_callback(lambda told: None if told.exception() else done())

    def statistics(self) -> ray.ObjectRef[ExecutorStatistics | None]:
        """Those of its executor, when they are there."""
        reference: ray.ObjectRef[ExecutorStatistics | None] = self._actor.statistics.remote()
        return reference

    def stop(self) -> None:
        """As `ReplicaLink.stop`."""
        with self._lock:
            self._stopped = True
            actor, self._actor = self._actor, None
        _kill(actor)

    def _told(self, done: Callable[[Started], object], told: Future[tuple[Failure | None, str]]) -> None:
        error = told.exception()
        if error is None:
            failure, self.place = told.result()
            done(None if failure is None else failure.error())
        else:
            done(Lost(_reason(error)))


class _RayCall:
    """A `Call` of an actor's method."""

    def __init__(self, reference: ray.ObjectRef[Any], done: Callable[[Answer], object]) -> None:
        self._reference = reference
        self._done = done
        reference.future().add_done_callback(self._answered)

    def cancel(self) -> None:
        """As `Call.cancel`."""
        ray.cancel(self._reference, recursive=False)

    def _answered(self, future: Future[Any]) -> None:
        error = future.exception()
        done, self._done = self._done, _nothing  # which refers to this call: the result would stay in the store
        done(_answer(future.result()) if error is None else _answer_of_error(error))


def _kill(actor: Any) -> None:
    if actor is not None:
        with suppress(Exception):  # it has ended; or Ray was shut down, and its actors ended with it
            ray.kill(actor)


def _nothing(_: Answer) -> None:
    """Of a call that was answered."""


def _answer(result: bytes | Message | Failure | None) -> Answer:
    if result is None:
        return Lost("its process had ended, and another was started")
    if isinstance(result, Failure):
        return result.error()
    arrays, _ = unpacked(result) if isinstance(result, bytes) else unpacked(*result)
    return arrays


def _answer_of_error(error: BaseException) -> Answer:
    lost = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError)
    if isinstance(error, lost):
        return Lost(_reason(error))
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return RunCancelledError("the run was cancelled")
    return DagexecError(f"{type(error).__name__}: {error}")


def _reason(error: BaseException) -> str:
    """The first sentence of what Ray says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}"
