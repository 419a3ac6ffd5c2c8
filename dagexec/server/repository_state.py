"""Which versions of which models serve, are retired, or are gone: what a `Repository` decides.

A machine that waits for nothing and reads no clock: events are its methods, and what they return is what is to be
closed. The repository sees to it that of `loading` until what it ends with, of `unloading` and of the end of all only
one is under way at a time. A version that no request gets any more is *retired*: it is closed when its requests are
over, and until then counts among those that whoever closes the model, or all of them, waits for.

Models are alike but for their names, and so are versions but for who uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import field
from typing import Literal

from dagexec.errors import SettingError
from dagexec.platform.records import dataclass
from dagexec.server.config import ModelConfig
from dagexec.server.inference import RequestError
from dagexec.server.version import LoadedVersion

State = Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One row of the repository's index: a version, or a model of which no version is loaded (version "")."""

    name: str
    version: str
    state: State
    reason: str = ""


@dataclass(slots=True)
class Entry:
    """A name that clients may know.

    Attributes:
        versions: those that serve.
        current: the one for requests that name none.
        retiring: those that do not serve any more and are not closed yet.
        wanted: no client has unloaded it.
    """

    config: ModelConfig
    state: State = "UNAVAILABLE"
    reason: str = "not loaded yet"
    versions: dict[str, LoadedVersion] = field(default_factory=dict)
    current: LoadedVersion | None = None
    retiring: dict[LoadedVersion, None] = field(default_factory=dict)
    wanted: bool = True

    def put(self, loaded: LoadedVersion) -> None:
        """It serves, in place of all that did."""
        self.retire()
        self.versions, self.current = {loaded.version: loaded}, loaded
        self.state, self.reason = "READY", ""

    def retire(self) -> None:
        """No version serves."""
        self.retiring |= dict.fromkeys(self.versions.values())
        self.versions, self.current = {}, None


class RepositoryState:
    """The models of one server.

    Attributes:
        abandoned: nobody waits for requests any more.
    """

    def __init__(self, models: Iterable[ModelConfig]) -> None:
        self._entries = {model.name: Entry(model) for model in models}
        self._draining = False
        self.abandoned = False

    @property
    def names(self) -> list[str]:
        """Those of all models."""
        return list(self._entries)

    def entry(self, name: str) -> Entry:
        """Raises RequestError (404) for a name that nobody knows."""
        entry = self._entries.get(name)
        if entry is None:
            raise RequestError(404, f"unknown model {name!r:.80}")
        return entry

    def find(self, name: str, version: str | None) -> LoadedVersion:
        """The version that serves a request. Raises RequestError."""
        self._refuse_while_draining()
        entry = self.entry(name)
        if entry.current is None:
            again = 1 if entry.state == "LOADING" else None
            raise RequestError(503, f"model {name!r} is not ready: {entry.reason or entry.state.lower()}", again)
        if not version:
            return entry.current
        found = entry.versions.get(version)
        if found is None:
            raise RequestError(404, f"model {name!r} has no version {version!r:.80}; it has {sorted(entry.versions)}")
        return found

    def known(self, name: str, version: str | None) -> LoadedVersion | None:
        """The version that would serve, if there is one."""
        entry = self._entries.get(name)
        return None if entry is None else entry.versions.get(version) if version else entry.current

    def is_ready(self) -> bool:
        """All models serve, but for those that clients have unloaded."""
        return not self._draining and all(entry.current for entry in self._entries.values() if entry.wanted)

    def index(self) -> list[ModelState]:
        """All versions that serve, and the models without any."""
        rows = []
        for name, entry in self._entries.items():
            rows += [ModelState(name, version, "READY") for version in entry.versions]
            if not entry.versions or entry.state == "LOADING":
                rows.append(ModelState(name, "", entry.state, entry.reason))
        return rows

    def loaded(self) -> list[LoadedVersion]:
        """All versions that serve."""
        return [version for entry in self._entries.values() for version in entry.versions.values()]

    def add(self, name: str, config: ModelConfig, loaded: LoadedVersion) -> None:
        """A model that was loaded elsewhere serves."""
        entry = self._entries[name] = Entry(config)
        entry.put(loaded)

    def check_new(self, name: str) -> None:
        """Raise SettingError for a name that is taken."""
        if name in self._entries:
            raise SettingError(f"model {name!r} is there already")

    def loading(self, name: str) -> None:
        """A version is being loaded. Raises RequestError (503) at the end of all."""
        self._refuse_while_draining()
        entry = self.entry(name)
        entry.wanted = True
        entry.state, entry.reason = "LOADING", ""

    def not_loaded(self, name: str, reason: str) -> None:
        """It could not be loaded: what was there stays."""
        entry = self.entry(name)
        entry.state = "READY" if entry.versions else "UNAVAILABLE"
        entry.reason = reason

    def has_loaded(self, name: str, config: ModelConfig, loaded: LoadedVersion) -> list[LoadedVersion]:
        """It serves. What is to be closed, as it did."""
        entry = self.entry(name)
        old = list(entry.versions.values())
        entry.config = config
        entry.put(loaded)
        return old

    def unloading(self, name: str) -> list[LoadedVersion]:
        """A model is taken out of service. What is to be closed, or about to be, before it is `unloaded`."""
        entry = self.entry(name)
        entry.wanted = False
        entry.state, entry.reason = "UNLOADING", "unloading"
        entry.retire()
        return list(entry.retiring)

    def unloaded(self, name: str) -> None:
        """All of it is closed."""
        entry = self.entry(name)
        entry.state, entry.reason = "UNAVAILABLE", "unloaded"

    def drain(self) -> None:
        """No requests are taken any more, and no models loaded."""
        self._draining = True

    def retire_all(self) -> list[LoadedVersion]:
        """No model serves. What is to be closed, or about to be."""
        for entry in self._entries.values():
            entry.retire()
            entry.state, entry.reason = "UNAVAILABLE", "the server is shutting down"
        return self._retiring()

    def closed(self, version: LoadedVersion) -> None:
        """A retired version is no more."""
        self.entry(version.config.name).retiring.pop(version, None)

    def abandon(self) -> list[LoadedVersion]:
        """Nobody waits for requests any more. What is to be closed at once."""
        self.abandoned = True
        return self._retiring()

    def state(self, about: Callable[[LoadedVersion], Hashable]) -> Hashable:
        """All that what comes next depends on; `about` says what is known of a version beside."""
        models = tuple(
            (
                name,
                entry.state,
                entry.wanted,
                tuple(map(about, entry.versions.values())),
                tuple(map(about, entry.retiring)),
            )
            for name, entry in self._entries.items()
        )
        return models, self._draining, self.abandoned

    def _retiring(self) -> list[LoadedVersion]:
        return [version for entry in self._entries.values() for version in entry.retiring]

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise RequestError(503, "the server is shutting down", 1)
