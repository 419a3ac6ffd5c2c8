"""Passes of other packages: they run where the option `passes` names them, after what leaves operators as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagexec.compiler.passes.catalog import BEFORE_ISLANDS, GRAPH_PASSES
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.spelling import did_you_mean
from dagexec.errors import ArgumentError, SettingError
from dagexec.platform.plugins import PluginGroup, taken


def _pass_of_plugin(name: str, found: object) -> Pass:
    if any(one.name == name for one in GRAPH_PASSES):
        raise taken(name, "a pass")
    if not isinstance(found, Pass) or found.name != name:
        raise SettingError(f"expected a dagexec.compiler.passes.Pass called {name!r}, found {found!r:.200}")
    return found


PLUGINS = PluginGroup("passes", _pass_of_plugin)


def own_passes(names: Iterable[str]) -> tuple[Pass, ...]:
    """The passes that plugins have under these names. Raises ArgumentError for a name that none has."""
    passes = []
    for name in names:
        found = PLUGINS.find(name)
        if found is None:
            known = PLUGINS.names()
            hint = PLUGINS.problem(name) or did_you_mean(name, known)
            raise ArgumentError(
                f"no installed package has a pass {name!r}; there are {', '.join(known) or 'none'}{hint}"
            )
        passes.append(found)
    return tuple(passes)


def with_own(passes: Sequence[Pass], own: Sequence[Pass]) -> tuple[Pass, ...]:
    """`passes` with `own` after the last of the first ones, which fold constants and fuse nothing."""
    place = passes.index(BEFORE_ISLANDS[-1]) + 1
    return (*passes[:place], *own, *passes[place:])
