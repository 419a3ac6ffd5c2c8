"""Nodes of a cluster in this process: each has an executor of its own, and links that lose messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dagexec.binding.io_binding import Array
from dagexec.cluster.link import Answer, Lost, Started
from dagexec.errors import DagexecError
from dagexec.executor.executor import Executor
from dagexec.platform.threads import Thread, threads
from dagexec.stress.simulated_network import Network

_CRASHES = 0.05
_BROKEN = "the connection broke"


class Node:
    """A `ReplicaLink`, and the process at its other end, which may end at any request.

    Attributes:
        life: counts its processes.
    """

    def __init__(self, number: int, network: Network, new_executor: Callable[[], Executor]) -> None:
        self.place = f"node {number}"
        self.number = number
        self.life = 0
        self._network = network
        self._new_executor = new_executor
        self._executor: Executor | None = None
        self._waiting: dict[object, Callable[[Answer], object]] = {}
        self._threads: list[Thread] = []

    def start(self, done: Callable[[Started], object]) -> None:
        """Start a new process, which compiles the model."""
        self.life += 1
        life, has_answered = self.life, [False]  # a message may come twice

        def tell(answer: Started) -> None:
            if not has_answered[0]:
                has_answered[0] = True
                done(answer)

        def begin() -> None:
            self._end(Lost("another process was started"))
            try:
                executor = self._new_executor()
            except DagexecError as error:
                tell(Lost(f"it could not read its model: {error}"))
                return
            if life != self.life:
                executor.close()
                tell(Lost("it was stopped"))
                return
            self._executor = executor
            tell(None)

        self._network.send(self.number, lambda: self._thread(begin), lambda: tell(Lost(_BROKEN)))

    def run(
        self,
        feeds: Mapping[str, Array],
        names: Sequence[str],
        priority: int,
        timeout: float | None,
        done: Callable[[Answer], object],
    ) -> Node:
        """Send a request. Its answer counts once, however often it comes."""
        key = object()
        self._waiting[key] = done

        def serve() -> None:
            executor = self._executor
            if executor is None:
                broken()
                return
            if self._network.happens("node crashed", _CRASHES):
                self.life += 1
                self._end(Lost("its process ended"))
                return
            answer: Answer
            try:
                answer = executor.run(feeds, outputs=names, priority=priority, timeout=timeout)
            except DagexecError as error:
                answer = error
            self._network.send(self.number, lambda: self._answered(key, answer), broken)

        def broken() -> None:
            self._answered(key, Lost(_BROKEN))

        self._network.send(self.number, lambda: self._thread(serve), broken)
        return self

    def cancel(self) -> None:
        """A run that is no longer wanted ends by itself."""

    def ask(self, done: Callable[[], object]) -> None:
        """Ask whether the process is there."""
        life = self.life

        def there() -> None:
            if self._executor is not None and life == self.life:
                self._network.send(self.number, done)

        self._network.send(self.number, there)

    def stop(self) -> None:
        """End the process."""
        self.life += 1
        self._waiting.clear()
        self._thread(lambda: self._end(Lost("it was stopped")))

    def join(self) -> None:
        """Return when nothing works for it any more."""
        while self._threads:
            self._threads.pop().join()

    def _thread(self, body: Callable[[], object]) -> None:
        self._threads.append(threads().start(body, f"{self.place}, {len(self._threads)}"))

    def _answered(self, key: object, answer: Answer) -> None:
        done = self._waiting.pop(key, None)
        if done is not None:
            done(answer)

    def _end(self, lost: Lost) -> None:
        executor, self._executor = self._executor, None
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(lost)
        if executor is not None:
            executor.close()
