"""More replicas while requests have to wait, for an executor whose user did not say how many.

The executor begins with one replica, whose runs use all idle cores, and makes others when requests come concurrently
for the first time, up to one per core.

The calling threads compute with these replicas. Where runs are short, each thread gets its own: to put a thread to
sleep and wake another takes as long as the run. Until it is made, the thread waits for one of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dagexec.binding.replicas import Replica, Replicas
from dagexec.core.io_access import IO
from dagexec.core.schema import OpSchema
from dagexec.errors import ClosedError, DagexecError, ResourceError
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.requests.request import Request
from dagexec.options import CompileOptions
from dagexec.platform.processor import available_cores
from dagexec.platform.threads import threads
from dagexec.scheduler.run.run import task
from dagexec.scheduler.workers.place import Place

logger = logging.getLogger("dagexec")


SHORT_SECONDS = 1e-3
"""Estimated seconds of a run that is short."""

MOST_FOR_SHORT = 64
"""Maximum number of replicas for short runs of threads."""


def may_grow(options: CompileOptions, replicas: Replicas) -> bool:
    """True where the number of replicas is open, requests are not joined, and any replica may serve one.

    Any replica may where a run has no side effects, neither in its net nor elsewhere, and gives the same bytes every
    time. Operators that run nets are not looked into.
    """
    first = replicas.members[0].net
    open_for_all = (
        options.replicas is None
        and options.max_batch == 1
        and options.optimize
        and first.on_host
        and not first.has_bodies
    )
    return open_for_all and not replicas.updates_parameters and all(map(_is_pure, replicas.graph.schemas))


def _is_pure(schema: OpSchema) -> bool:
    touched = schema.effects or schema.does_io != IO.NONE or schema.handles or schema.mutates
    return schema.reproducible and not touched


class Growth:
    """Makes replicas of an executor, one at a time, on a worker."""

    def __init__(
        self, dispatcher: Dispatcher, replicas: Replicas, place: Place, serve: Callable[[Request], object]
    ) -> None:
        """`serve` has a request, which was given a replica, served on a worker."""
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._place = place
        self._serve = serve
        self._first = replicas.members[0]
        self._lock = threads().lock()  # held while a replica is made
        self._over = False

    def consider(self, *, of_thread: bool) -> None:
        """A request may have to wait: have a replica made, unless there are enough or one is being made.

        `of_thread`: it comes from a thread, which may compute it itself.
        """
        if self._over or self._dispatcher.state.idle or len(self._replicas.members) >= self._most(of_thread):
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._place.grow(available_cores())
            name = f"making a replica of {self._dispatcher.name}"
            self._place.workers.submit(task(name, self._grow, share=self._place.share))
        except BaseException as error:
            self._lock.release()
            if isinstance(error, ResourceError):
                self._give_up(error)
            elif not isinstance(error, ClosedError):
                raise

    def _most(self, of_thread: bool) -> int:
        binding = self._first.io_binding
        short = of_thread and binding is not None and binding.estimated_seconds <= SHORT_SECONDS
        return MOST_FOR_SHORT if short else available_cores()

    def _grow(self) -> None:
        """On a worker: make one more, and give it to a waiting request."""
        following: Request | None = None
        try:
            replica = self._replicas.make(portions=self._most(of_thread=True))
            following = self._add(replica)
        except DagexecError as error:
            self._give_up(error)
        finally:
            self._lock.release()
        if following is not None:
            self._serve(following)

    def _give_up(self, error: DagexecError) -> None:
        self._over = True
        logger.warning("net %r: no further replica: %s", self._dispatcher.name, str(error))

    def _add(self, replica: Replica) -> Request | None:
        self._replicas.members.append(replica)  # first: whoever closes the executor now closes its net
        added, following = self._dispatcher.add(replica)
        if not added:
            self._over = True
            replica.net.close()
        return following
