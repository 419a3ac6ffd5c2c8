"""Plugins: what installed packages add to dagexec, by entry points of six groups (docs/plugins.md).

Installed packages are looked through when a name is asked for that nothing else has, so a process that needs no plugin
does not pay for them; what an entry point names is imported when its own name is asked for. An entry point that cannot
be used is skipped, with a warning that names its package. Who asks, and for what, is in the modules of the groups.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from dagexec.errors import SettingError
from dagexec.platform.forking import ProcessLock, without_fork
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    metadata = LazyModule("importlib.metadata")
else:
    from importlib import metadata

VARIABLE = "DAGEXEC_PLUGINS"
"""The environment variable that turns plugins off: `off`."""

PREFIX = "dagexec."
"""What the names of all groups begin with."""

logger = logging.getLogger("dagexec")
Used = TypeVar("Used")


class Plugin(NamedTuple):
    """An entry point: its group and name, the object that it names, and the package that has it."""

    group: str
    name: str
    value: str
    package: str
    version: str

    def load(self) -> object:
        """Import the object. Raises what importing raises."""
        return metadata.EntryPoint(self.name, self.value, self.group).load()

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.group}) of {self.package} {self.version}"


class _Importing(threading.local):
    """The plugins that the calling thread is importing: their modules may ask for names themselves."""

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []


_importing = _Importing()
_scanned: tuple[object, dict[str, list[Plugin]]] = None, {}


def under_import() -> Plugin | None:
    """The plugin that the calling thread is importing, if there is one."""
    return _importing.plugins[-1] if _importing.plugins else None


def installed(group: str) -> Sequence[Plugin]:
    """The plugins of a group, in the order of `sys.path`; none if DAGEXEC_PLUGINS is `off`."""
    return _installed().get(group, ())


def groups() -> set[str]:
    """The groups that installed packages have entry points of."""
    return set(_installed())


def _installed() -> dict[str, list[Plugin]]:
    """All plugins, by group. Packages are looked through once for each `sys.path`."""
    global _scanned
    if os.environ.get(VARIABLE) == "off":
        return {}
    path = tuple(sys.path)
    known, found = _scanned
    if known != path:
        found = {}
        for plugin in _scan():
            found.setdefault(plugin.group, []).append(plugin)
        _scanned = path, found
    return found


def _scan() -> Iterable[Plugin]:
    packages: set[str] = set()
    for package in metadata.distributions():
        try:
            if f"[{PREFIX}" not in (package.read_text("entry_points.txt") or "") or package.name in packages:
                continue
            packages.add(package.name)
            for entry in package.entry_points:
                if entry.group.startswith(PREFIX):
                    yield Plugin(entry.group, entry.name, entry.value, package.name, package.version)
        except Exception as error:  # whatever a damaged file raises
            logger.warning("plugins of a package are skipped: %s: %s", type(error).__name__, str(error))


class PluginGroup(Generic[Used]):
    """The entry points of one group, each imported and checked once.

    `accept(name, object)` makes of an imported object what is used, and raises DagexecError for one that cannot be. It
    is called under a lock, so it must not import. Only with `shared_names` several packages may use a name.
    """

    def __init__(self, name: str, accept: Callable[[str, object], Used], *, shared_names: bool = False) -> None:
        self.name = f"{PREFIX}{name}"
        self._accept, self._shared_names = accept, shared_names
        self._used: dict[Plugin, Used] = {}
        self._problems: dict[Plugin, str] = {}
        self._lock = ProcessLock()

    def find(self, name: str) -> Used | None:
        """What the plugin of that name gives; None where there is none, or none that can be used."""
        self.load(lambda plugin: plugin.name == name)
        return next((self._used[one] for one in installed(self.name) if one.name == name and one in self._used), None)

    def load(self, wanted: Callable[[Plugin], bool] = lambda _: True) -> None:
        """Import all plugins of the group, or those that are `wanted`. Any thread may be the first."""
        for plugin in installed(self.name):
            if wanted(plugin) and not self.has_tried(plugin):
                self._load(plugin)

    def has_tried(self, plugin: Plugin) -> bool:
        """True when a plugin has been imported, or cannot be."""
        return plugin in self._used or plugin in self._problems

    def _load(self, plugin: Plugin) -> None:
        if plugin in _importing.plugins:
            return
        _importing.plugins.append(plugin)
        try:
            with without_fork():  # in a child forked meanwhile, the module would stay half imported
                found = plugin.load()
            with self._lock.own:  # not while importing: a thread that holds the lock of a module may come here, too
                if not self.has_tried(plugin):
                    self._check_name(plugin)
                    self._used[plugin] = self._accept(plugin.name, found)
        except (Exception, SystemExit) as error:
            problem = f"{plugin.value}: {type(error).__name__}: {error}"
            if self._problems.setdefault(plugin, problem) is problem:
                logger.warning("%s is skipped: %s", plugin, problem)
        finally:
            _importing.plugins.remove(plugin)

    def _check_name(self, plugin: Plugin) -> None:
        for other in self._used:
            if other.name == plugin.name and not self._shared_names:
                raise SettingError(f"the name is that of {other} already")

    def names(self) -> list[str]:
        """The names of the group's plugins."""
        return list(dict.fromkeys(plugin.name for plugin in installed(self.name)))

    def problem(self, name: str) -> str:
        """The end of a message: why a plugin of that name is not used, or nothing."""
        return "".join(f"; {one} is skipped: {why}" for one, why in self._problems.items() if one.name == name)

    def states(self) -> dict[Plugin, str]:
        """All plugins of the group, imported, each with what is wrong with it, or nothing."""
        self.load()
        return {plugin: self._problems.get(plugin, "") for plugin in installed(self.name)}


def taken(name: str, by: str) -> SettingError:
    """The error of a plugin whose name dagexec has already."""
    return SettingError(f"the name {name!r} is taken: it is {by} of dagexec")
