"""Documents and examples use public names only: those of the modules that docs/public-names.md lists."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/public-names.md"
PUBLIC = re.findall(r"^\| `(dagexec[\w.]*)` \|", (ROOT / PAGE).read_text(), re.MULTILINE)
DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py"))

IMPORTED_FROM = re.compile(r"\bfrom (dagexec[\w.]*) import (\([^)]*\)|[^\n`#]+)")
IMPORTED = re.compile(r"\bimport (dagexec[\w.]*)")
MENTIONED = re.compile(r"`(dagexec(?:\.\w+){2,})")


def used_in(document: str) -> Iterator[str]:
    """Dotted names of dagexec that a page imports or mentions, and those that its blocks of Python reach."""
    text = (ROOT / document).read_text()
    for module, names in IMPORTED_FROM.findall(text):
        yield from (f"{module}.{name.split()[0]}" for name in names.strip("()").split(",") if name.strip())
    yield from (*IMPORTED.findall(text), *MENTIONED.findall(text))
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from reached(block)


def reached(code: str) -> Iterator[str]:
    """Dotted names of dagexec in a program."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dagexec":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "dagexec")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dagexec":
            yield f"dagexec.{node.attr}"


def is_public(name: str) -> bool:
    module, _, member = name.rpartition(".")
    return name in PUBLIC or (module in PUBLIC and member in importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_names_what_it_has(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in found.__all__ if not hasattr(found, name)] == []
    assert len(set(found.__all__)) == len(found.__all__)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_uses_public_names_only(document: str) -> None:
    assert [name for name in used_in(document) if not is_public(name)] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_uses_public_names_only(example: str) -> None:
    used = list(reached((ROOT / example).read_text()))
    assert used
    assert [name for name in used if not is_public(name)] == []


def test_what_is_not_public_is_seen() -> None:
    assert {"dagexec", "dagexec.compile", "dagexec.errors.ClosedError"} <= set(used_in("docs/embedding.md"))
    assert list(reached("import dagexec.core.graph as graph")) == ["dagexec.core.graph"]
    assert not is_public("dagexec.core.graph")
    assert not is_public("dagexec.errors.Any")
