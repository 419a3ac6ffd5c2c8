"""A small world around the machine of a server's models: clients that load, unload and ask, and a server that drains.

Each operation is as in `repository`: one at a time holds the lock, and a version is closed when its requests are over,
its time is, or nobody waits any more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dagexec.scheduler.exploration.state_search import ModelFault
from dagexec.server.config import ModelConfig
from dagexec.server.inference import RequestError
from dagexec.server.repository_state import RepositoryState
from tests.machines.worlds import Event


@dataclass(frozen=True)
class Setting:
    """How many models there are, and how often what may happen to them."""

    models: int = 1
    loads: int = 0
    unloads: int = 0
    requests: int = 0
    cancels: bool = True
    closes: bool = False

    def world(self) -> RepositoryWorld:
        """At the beginning."""
        return RepositoryWorld(self)


@dataclass(eq=False)
class _Version:
    config: ModelConfig
    running: int = 0
    is_closed: bool = False


@dataclass(eq=False)
class _Operation:
    """A load, an unload or a drain under way.

    Attributes:
        has_begun: it holds the lock, or held it.
        closes: what it is to close yet.
        saw: what was open of its models when it began.
    """

    what: str
    name: str
    has_begun: bool = False
    is_loading: bool = False
    closes: list[_Version] = field(default_factory=list)
    saw: list[_Version] = field(default_factory=list)


class RepositoryWorld:
    """What there is at one moment."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.configs = [ModelConfig(name=f"m{one}", source="m") for one in range(setting.models)]
        self.state = RepositoryState(self.configs)
        self.left = {"load": setting.loads, "unload": setting.unloads, "ask": setting.requests}
        self.versions: list[_Version] = []
        self.operations: list[_Operation] = []
        self.lock: list[_Operation] = []  # who holds it, then those who wait
        self.is_draining = False

    def events(self) -> Iterator[Event]:
        yield from self._progress()
        for config in self.configs:
            yield from ((what, config.name) for what, count in self.left.items() if count)
        for place, operation in enumerate(self.operations):
            if self.setting.cancels and not operation.closes and operation.what != "drain":
                yield "cancel", place
            if not self.state.abandoned:
                in_use = (one for one, version in enumerate(operation.closes) if version.running)
                yield from (("time is over", place, one) for one in in_use)
        if self.setting.closes and not self.is_draining:
            yield ("drain",)
        if self.is_draining and not self.state.abandoned:
            yield ("abandon",)

    def _progress(self) -> Iterator[Event]:
        for place, operation in enumerate(self.operations):
            if operation.is_loading:
                yield "loaded", place
                yield "fail", place
            for one, version in enumerate(operation.closes):
                if version.is_closed or not version.running or self.state.abandoned:
                    yield "close", place, one
        yield from (("answer", place) for place, version in enumerate(self.versions) if version.running)

    def do(self, event: Event) -> None:
        what, *rest = event
        getattr(self, "_" + str(what).replace(" ", "_"))(*rest)

    # operations

    def _load(self, name: str) -> None:
        self._want("load", name)

    def _unload(self, name: str) -> None:
        self._want("unload", name)

    def _want(self, what: str, name: str) -> None:
        self.left[what] -= 1
        self._begin(_Operation(what, name))

    def _drain(self) -> None:
        self.is_draining = True
        self.state.drain()
        self._begin(_Operation("drain", ""))

    def _begin(self, operation: _Operation) -> None:
        self.operations.append(operation)
        self.lock.append(operation)
        self._go_on()

    def _go_on(self) -> None:
        """Whoever has the lock begins."""
        if not self.lock or self.lock[0].has_begun:
            return
        operation = self.lock[0]
        operation.has_begun = True
        of_it = [one for one in self.versions if operation.name in ("", one.config.name)]
        operation.saw = [one for one in of_it if not one.is_closed]
        if operation.what == "load":
            try:
                self.state.loading(operation.name)
                operation.is_loading = True
            except RequestError:
                self._expect(self.is_draining, "a load is refused")
                self._end(operation)
            return
        closes: Any = self.state.unloading(operation.name) if operation.what == "unload" else self.state.retire_all()
        operation.closes = list(closes)
        self._end_if_closed(operation)

    def _loaded(self, place: int) -> None:
        operation = self.operations[place]
        operation.is_loading = False
        config = next(one for one in self.configs if one.name == operation.name)
        version: Any = _Version(config)
        version.version = "1"
        self.versions.append(version)
        closes: Any = self.state.has_loaded(operation.name, config, version)
        operation.closes = list(closes)
        self._unlock(operation)
        self._end_if_closed(operation)

    def _fail(self, place: int) -> None:
        self._not_loaded(self.operations[place])

    def _cancel(self, place: int) -> None:
        operation = self.operations[place]
        if operation.is_loading:
            self._not_loaded(operation)
        else:
            self._end(operation)

    def _not_loaded(self, operation: _Operation) -> None:
        self.state.not_loaded(operation.name, "")
        self._end(operation)

    def _close(self, place: int, one: int) -> None:
        operation = self.operations[place]
        version: Any = operation.closes.pop(one)
        version.is_closed, version.running = True, 0
        self.state.closed(version)
        self._end_if_closed(operation)

    def _time_is_over(self, place: int, one: int) -> None:
        self._close(place, one)

    def _end_if_closed(self, operation: _Operation) -> None:
        if operation.closes:
            return
        if operation.what == "unload":
            self.state.unloaded(operation.name)
        if operation.what != "load":
            self._expect(all(one.is_closed for one in operation.saw), f"{operation.what} ends before all is closed")
        self._end(operation)

    def _end(self, operation: _Operation) -> None:
        self.operations.remove(operation)
        self._unlock(operation)

    def _unlock(self, operation: _Operation) -> None:
        if operation in self.lock:
            self.lock.remove(operation)
        self._go_on()

    def _abandon(self) -> None:
        for version in self.state.abandon():
            version.is_closed, version.running = True, 0  # type: ignore[attr-defined]

    # requests

    def _ask(self, name: str) -> None:
        self.left["ask"] -= 1
        try:
            found: Any = self.state.find(name, None)
        except RequestError:
            serves = any(one.config.name == name for one in self.state.loaded())
            self._expect(self.is_draining or not serves, "a request is refused although the model serves")
            return
        self._expect(not self.is_draining, "a request is taken at the end")
        self._expect(not found.is_closed, "a request gets a version that is closed")
        self._expect(found not in self.state.entry(name).retiring, "a request gets a version that is retired")
        found.running += 1

    def _answer(self, place: int) -> None:
        self.versions[place].running -= 1

    # what has to hold

    @staticmethod
    def _expect(holds: bool, text: str) -> None:
        if not holds:
            raise ModelFault(text)

    def fault(self) -> str | None:
        serving: list[Any] = list(self.state.loaded())
        closing = [one for operation in self.operations for one in operation.closes]
        for version in self.versions:
            if not version.is_closed and version not in serving and version not in closing:
                return "nobody closes a version that does not serve"
            if version.is_closed and version in serving:
                return "a version serves that is closed"
        for row in self.state.index():
            busy = [one for one in self.lock[:1] if one.name == row.name]
            if row.state == "LOADING" and not any(one.is_loading for one in busy):
                return "a model is being loaded, and nobody does that"
            if row.state == "UNLOADING" and not any(one.what == "unload" for one in busy):
                return "a model is being unloaded, and nobody does that"
            if row.state == "READY" and not row.version:
                return "a model is ready, and no version of it"
        if not self.operations and any(self.state.entry(config.name).retiring for config in self.configs):
            return "what is closed counts as if it were not"
        if self.operations and not any(True for _ in self._progress()):
            return "somebody waits for ever"
        if self.is_draining and not self.operations and (serving or not all(one.is_closed for one in self.versions)):
            return "something serves after the end"
        return None

    def is_over(self) -> bool:
        return not self.operations

    def key(self) -> Hashable:
        used = [one for one in self.versions if one.running or not one.is_closed]

        def about(version: Any) -> Hashable:
            return (used.index(version), version.running) if version in used else None

        def under_way(operation: _Operation) -> Hashable:
            turn = self.lock.index(operation) if operation in self.lock else None
            closes, saw = tuple(map(about, operation.closes)), tuple(map(about, operation.saw))
            return operation.what, operation.name, turn, operation.has_begun, operation.is_loading, closes, saw

        operations = tuple(map(under_way, self.operations))
        return self.state.state(about), operations, tuple(self.left.values()), self.is_draining
