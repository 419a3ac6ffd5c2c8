"""DAGEXEC_OBSERVERS=NAME,NAME: observers of installed packages are told of every run of every net.

The variable is read when a net is made; without it a run pays nothing. Names are those of entry points
(docs/plugins.md); of a class each net gets an observer of its own.
"""

from __future__ import annotations

import os

from dagexec.core.spelling import did_you_mean
from dagexec.errors import SettingError
from dagexec.platform.plugins import PluginGroup
from dagexec.scheduler.observe.observers import Observer, together
from dagexec.scheduler.observe.trace_lines import line_observer

VARIABLE = "DAGEXEC_OBSERVERS"


def _observer_of_plugin(_name: str, found: object) -> Observer | type[Observer]:
    if isinstance(found, Observer) or (isinstance(found, type) and issubclass(found, Observer)):
        return found
    raise SettingError(f"expected a dagexec.tracing.Observer or its class, found {found!r:.200}")


PLUGINS = PluginGroup("observers", _observer_of_plugin)


def environment_observer() -> Observer | None:
    """What the environment asks for: printed lines (DAGEXEC_TRACE) and observers of plugins; None without either.

    Raises SettingError for a name that no plugin has.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return together(line_observer(), *(_observer(name) for name in names if name))


def _observer(name: str) -> Observer:
    found = PLUGINS.find(name)
    if found is None:
        known = PLUGINS.names()
        hint = PLUGINS.problem(name) or did_you_mean(name, known)
        there = ", ".join(known) or "none"
        raise SettingError(f"{VARIABLE}: no installed package has an observer {name!r}; there are {there}{hint}")
    return found if isinstance(found, Observer) else _made(name, found)


def _made(name: str, observer: type[Observer]) -> Observer:
    try:
        return observer()
    except Exception as error:
        raise SettingError(f"{VARIABLE}: observer {name!r} cannot be made: {type(error).__name__}: {error}") from error
