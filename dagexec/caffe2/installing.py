"""`from caffe2.python import core` in scripts: the names of Caffe2's modules, as names of those of this package.

A finder on `sys.meta_path` answers for `caffe2` and what begins with `caffe2.`. A module has one object, whichever name
it is imported by.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

from dagexec.caffe2.gpus import simulate_gpus
from dagexec.errors import Caffe2Error

_HERE = "dagexec.caffe2"
_PLACES = {"caffe2.python": _HERE, "caffe2.proto": f"{_HERE}.proto"}


class _Alias(Loader):
    """Loads a module of this package under a name of Caffe2's."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of the alias there


class _Package(Loader):
    """Makes the package `caffe2`, which has nothing but packages."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


class Finder(MetaPathFinder):
    """Finds modules of this package under Caffe2's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of that name; None for one that is not Caffe2's, or is not there."""
        if fullname == "caffe2":
            return ModuleSpec(fullname, _Package(), is_package=True)
        for name, place in _PLACES.items():
            if fullname == name or fullname.startswith(f"{name}."):
                here = place + fullname.removeprefix(name)
                found = find_spec(here)
                if found is None:
                    return None
                return ModuleSpec(fullname, _Alias(here), is_package=found.submodule_search_locations is not None)
        return None


def install(simulated_gpus: int | None = None) -> None:
    """Let scripts of this process import `caffe2.python` and `caffe2.proto`, and get dagexec's.

    They find so many GPUs, which dagexec simulates; by default those of the machine. Raises Caffe2Error where there
    is a Caffe2 already.
    """
    simulate_gpus(simulated_gpus)
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if "caffe2" in sys.modules or PathFinder.find_spec("caffe2") is not None:
        raise Caffe2Error("a package called caffe2 is installed here: dagexec does not take its place")
    sys.meta_path.insert(0, Finder())  # before what would find the files a second time


def uninstall() -> None:
    """Take back what `install` did; modules that a script has imported stay with it."""
    simulate_gpus(None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "caffe2"]:
        del sys.modules[name]
