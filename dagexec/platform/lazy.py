"""Modules that are imported when something of them is first used, so that `import dagexec` does not pay for them.

This is the one way in which dagexec puts an import off; what the command line alone needs is imported there as usual.
It is written so that mypy and import-linter see an import like any other:

    if not TYPE_CHECKING:
        nx = LazyModule("networkx")
    else:
        import networkx as nx

A package whose names are those of such modules says so in the same place:

    if not TYPE_CHECKING:
        __getattr__ = lazy_names(__name__, {"dagexec.scheduling.heft": ("Heft",)})
    else:
        from dagexec.scheduling.heft import Heft
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from types import ModuleType

from dagexec.platform.forking import without_fork
from dagexec.platform.garbage_collection import garbage_collection_paused


class LazyModule(ModuleType):
    """Stands for the module of a name, and imports it when an attribute is requested. Any thread may be the first.

    Nothing is put into `sys.modules` before that.
    """

    _module: ModuleType | None = None

    def __getattr__(self, name: str) -> object:
        if self._module is None:
            # in a child forked meanwhile, the module would stay half imported
            with without_fork(), garbage_collection_paused():
                self._module = importlib.import_module(self.__name__)
        return getattr(self._module, name)


def lazy_names(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a package that has the names which stand behind each module."""
    module_of = {name: LazyModule(module) for module, names in modules.items() for name in names}

    def found(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(module_of[name], name)

    return found
