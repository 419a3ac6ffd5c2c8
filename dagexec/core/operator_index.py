"""Which modules an operator type needs: those that register its schema and its engines, and those of its gradient.

`dagexec.ops` has several hundred modules, and a net uses a few of them. A file in that package says which, written by
`python -m tests.operator_index`. For a type that it does not know all modules are imported; so a new operator is
found before anybody has written the file again. Types of other packages are registered by their plugins, which are
asked before that (`platform.plugins`).
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagexec.errors import SchemaError, UnsupportedOperatorError
from dagexec.platform.lazy import LazyModule
from dagexec.platform.locks import new_rlock
from dagexec.platform.plugins import Plugin, PluginGroup, under_import

if not TYPE_CHECKING:
    pkgutil = LazyModule("pkgutil")
else:
    import pkgutil


PACKAGE = "dagexec.ops"
"""The package that has them."""

_NOT_FOR_THE_HOST = (f"{PACKAGE}.engines.cuda", f"{PACKAGE}.engines.onednn.declared")

PLUGINS = PluginGroup("operators", lambda _, registered: registered, shared_names=True)
"""Modules of other packages, or objects in them: importing one registers operators."""

_loaded: set[str] = set()  # types whose modules have all been imported
_elsewhere: dict[str, Plugin | None] = {}  # types of other packages, with the plugins whose modules registered them
_differentiable: set[str] = set()  # those that the modules of the gradient have been imported of as well
_everything = threading.Event()
_completions: list[Callable[[str], object]] = []
_completing = new_rlock()


class _Importing(threading.local):
    """Whether the calling thread is importing modules of operators; these ask for what they have imported."""

    depth = 0


_importing = _Importing()


def load_operator(operator_type: str) -> None:
    """Import what `operator_type` needs, unless it has been; plugins, then all modules, if it is not in the file."""
    if operator_type in _loaded or _importing.depth:
        return
    modules = _index()["types"].get(operator_type)
    if modules is None:
        if not _is_made(operator_type):
            load_plugins(operator_type)
        if not _is_made(operator_type):
            load_plugins()
        if operator_type in _elsewhere:
            _complete_elsewhere(operator_type)
        else:
            load_all()
    else:
        names = _index()["modules"]
        _import(f"{PACKAGE}.{names[module]}" for module in modules)
        _complete([operator_type])


def load_gradient(operator_type: str) -> None:
    """Import what `operator_type` needs, and what makes its gradient. Nets that are not trained do without."""
    load_operator(operator_type)
    if operator_type not in _differentiable and not _importing.depth:
        names = _index()["modules"]
        _import(f"{PACKAGE}.{names[module]}" for module in _index()["gradients"].get(operator_type, ()))
        _differentiable.add(operator_type)


def load_all() -> None:
    """Import all modules of operators, and the plugins."""
    if _importing.depth:
        return
    if not _everything.is_set():
        import_modules(PACKAGE)
        _complete(_index()["types"])
        _everything.set()
    load_plugins()


def load_plugins(name: str | None = None) -> None:
    """Import the plugins, or those of that name."""
    PLUGINS.load((lambda plugin: plugin.name == name) if name else lambda _: True)


def _is_made(operator_type: str) -> bool:
    """True when another package has registered the type, in a module of which nothing is left to be imported."""
    plugin = _elsewhere.get(operator_type)
    return operator_type in _elsewhere and (plugin is None or PLUGINS.has_tried(plugin))


def _complete_elsewhere(operator_type: str) -> None:
    """Let another package's type have the engines that follow from its schema."""
    if _is_made(operator_type):
        _import(f"{PACKAGE}.{module}" for module in _index()["completions"])
        with suppress(UnsupportedOperatorError, SchemaError):  # without a class for the host, or with that engine
            _complete([operator_type])
        _loaded.add(operator_type)


def load_onnx(domain: str, name: str) -> bool:
    """Import what is needed for the type that is an ONNX operator; False if the file has none."""
    found = _index()["onnx"].get(domain, {}).get(name)
    if found is not None:
        load_operator(found)
    return found is not None


def load_own(operator_type: str) -> None:
    """Import what a type needs that the file has; it is no other package's."""
    if operator_type in _index()["types"]:
        load_operator(operator_type)


def made_elsewhere(operator_type: str) -> None:
    """A type is registered that another package's module declares."""
    if operator_type not in _index()["types"]:
        plugin = under_import()
        _elsewhere[operator_type] = plugin if plugin and plugin.group == PLUGINS.name else None
        _loaded.discard(operator_type)


def known_types() -> Iterable[str]:
    """The types that the file has."""
    types: dict[str, list[int]] = _index()["types"]
    return types.keys()


def completes(function: Callable[[str], object]) -> Callable[[str], object]:
    """Decorator: it is called, once, with each type that is loaded, and may register what follows from its schema."""
    _completions.append(function)
    return function


def _complete(types: Iterable[str]) -> None:
    with _completing:
        _importing.depth += 1
        try:
            for operator_type in types:
                if operator_type not in _loaded:
                    for function in _completions:
                        function(operator_type)
                    _loaded.add(operator_type)
        finally:
            _importing.depth -= 1


def import_modules(package: str) -> None:
    """Import all modules in `package` and below, for what they register."""
    _import(_modules(package))


def _import(modules: Iterable[str]) -> None:
    _importing.depth += 1
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        _importing.depth -= 1


def _modules(package: str) -> list[str]:
    """The modules in `package` and below; of packages it imports what they are."""
    found = []
    for one in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if one.name not in _NOT_FOR_THE_HOST:
            found += [one.name, *(_modules(one.name) if one.ispkg else ())]
    return found


def index_file() -> Path:
    """Where it is."""
    return Path(importlib.import_module(PACKAGE).__path__[0]) / "operator_index.json"


@cache
def _index() -> dict[str, Any]:
    """`modules` are names, `types` the numbers of those that each type needs, `onnx` types by domain and operator.

    `gradients` are the numbers of those that a gradient needs beside them, `completions` the names of those that
    register what follows from schemas.
    """
    found: dict[str, Any] = json.loads(index_file().read_text())
    return found
