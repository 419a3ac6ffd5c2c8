"""Modules that are imported when something of them is first used, so that `import dagexec` does not pay for them.

This is the one way in which dagexec puts an import off; what the command line alone needs is imported there as usual.
It is written so that mypy and import-linter see an import like any other (import-linter passes over what is under
`if TYPE_CHECKING`):

    if not TYPE_CHECKING:
        nx = LazyModule("networkx")
    else:
        import networkx as nx
"""

from __future__ import annotations

import importlib
from types import ModuleType

from dagexec.platform.forking import without_fork


class LazyModule(ModuleType):
    """Stands for the module of a name, and imports it when an attribute is requested. Any thread may be the first.

    Nothing is put into `sys.modules` before that.
    """

    _module: ModuleType | None = None

    def __getattr__(self, name: str) -> object:
        if self._module is None:
            with without_fork():  # in a child forked meanwhile, the module would stay half imported
                self._module = importlib.import_module(self.__name__)
        return getattr(self._module, name)
