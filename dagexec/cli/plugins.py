"""`dagexec plugins`: what installed packages add to dagexec, and what of it cannot be used."""

from __future__ import annotations

import logging
import os
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dagexec  # noqa: F401 - registers what plugins may not be called
from dagexec.cli.feeds import JsonOption
from dagexec.cli.json_output import print_json
from dagexec.compiler.passes.own import PLUGINS as PASSES
from dagexec.core.operator_index import PLUGINS as OPERATORS
from dagexec.core.runtime import PLUGINS as DEVICES
from dagexec.executor.source.loading import PLUGINS as FRONTENDS
from dagexec.platform.plugins import VARIABLE, Plugin, PluginGroup, groups, installed, logger
from dagexec.scheduler.observe.installed import PLUGINS as OBSERVERS
from dagexec.scheduling.catalog import PLUGINS as POLICIES

_GROUPS: tuple[PluginGroup[Any], ...] = (OPERATORS, DEVICES, PASSES, POLICIES, OBSERVERS, FRONTENDS)


def plugins_command(as_json: JsonOption = False) -> None:
    """List the plugins of installed packages, each imported to see whether it can be used.

    The exit status is 1 if one cannot. DAGEXEC_PLUGINS=off turns plugins off.
    """
    off = os.environ.get(VARIABLE) == "off"
    problems = {} if off else _problems()
    if as_json:
        rows = [{**plugin._asdict(), "usable": not why, "problem": why} for plugin, why in problems.items()]
        print_json({"off": off, "plugins": rows})
    elif not problems:
        print(f"plugins are turned off: {VARIABLE}=off" if off else "no installed package has plugins")
    else:
        Console().print(_table(problems))
    if any(problems.values()):
        raise typer.Exit(1)


def _problems() -> dict[Plugin, str]:
    """All plugins, and what is wrong with each."""
    found: dict[Plugin, str] = {}
    logger.addFilter(_nothing)  # the table says it
    try:
        for group in _GROUPS:
            found.update(group.states())
    finally:
        logger.removeFilter(_nothing)
    names = [group.name for group in _GROUPS]
    for name in groups().difference(names):
        found.update(dict.fromkeys(installed(name), f"there is no group {name}; the groups are {', '.join(names)}"))
    return found


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def _table(problems: dict[Plugin, str]) -> Table:
    table = Table(title="plugins")
    for column in ("group", "name", "package", "state"):
        table.add_column(column)
    for plugin, why in problems.items():
        state = Text(f"skipped: {why}", "red") if why else Text("usable")
        table.add_row(plugin.group, Text(plugin.name), Text(f"{plugin.package} {plugin.version}"), state)
    return table
