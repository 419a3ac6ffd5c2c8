"""Write the file that says which modules each operator type needs: `python -m tests.operator_index`.

All modules of operators are imported, with registries that note whose body each entry comes from.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

from dagexec.core import gradient, operator_index, registry
from dagexec.platform.files import write_atomically


class _Noting(dict[Any, Any]):
    """A registry that tells which module has put in each entry."""

    def __init__(self, entries: dict[Any, Any], note: Callable[[Any, str], object]) -> None:
        super().__init__(entries)
        self._note = note

    def __setitem__(self, key: Any, value: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        assert frame is not None
        self._note(key, frame.f_globals["__name__"])
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def made_anew() -> str:
    """What the file should say; asked in a process that has not imported any operator."""
    assert not registry._schemas, "operators were imported before"
    of_types: dict[str, set[str]] = defaultdict(set)
    of_gradients: dict[str, set[str]] = defaultdict(set)

    def note(key: Any, module: str) -> None:
        of_types[key[1] if isinstance(key, tuple) else key].add(module)

    def note_gradient(key: Any, module: str) -> None:
        of_gradients[key].add(module)

    registry._schemas = _Noting(registry._schemas, note)
    registry._operators = _Noting(registry._operators, note)
    gradient._makers = _Noting(gradient._makers, note_gradient)
    gradient._refusals = _Noting(gradient._refusals, note_gradient)
    operator_index.import_modules(operator_index.PACKAGE)
    for found in [of_types.pop(name) for name in set(of_types) - set(registry._schemas)]:
        assert not found
    registry._operators = dict(registry._operators)  # what completions register is of their modules
    operator_index._importing.depth += 1
    for complete in operator_index._completions:
        for name in registry._schemas:
            engines = len(registry._operators)
            complete(name)
            if len(registry._operators) > engines:
                of_types[name].add(complete.__module__)
    modules = sorted(set().union(*of_types.values(), *of_gradients.values()))
    start = len(operator_index.PACKAGE) + 1
    number = {module: place for place, module in enumerate(modules)}
    onnx: dict[str, dict[str, str]] = defaultdict(dict)
    for (domain, name), (schema, _) in sorted(registry._onnx.items()):
        onnx[domain][name] = schema.type
    types = {name: sorted(map(number.__getitem__, found)) for name, found in sorted(of_types.items())}
    beside = {name: found - of_types[name] for name, found in sorted(of_gradients.items())}
    gradients = {name: sorted(map(number.__getitem__, found)) for name, found in beside.items() if found}
    completions = sorted({complete.__module__[start:] for complete in operator_index._completions})
    names = [module[start:] for module in modules]
    content = {"completions": completions, "gradients": gradients, "modules": names, "onnx": onnx, "types": types}
    return json.dumps(content, separators=(",", ":")).replace("],", "],\n") + "\n"


if __name__ == "__main__":
    write_atomically(operator_index.index_file(), made_anew().encode())
