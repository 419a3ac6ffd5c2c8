"""The pages of public modules, which mkdocstrings fills from docstrings, and what it shall read for that."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]
FOLDER = "reference/modules/"
_ROW = re.compile(r"^\| `(dagexec[\w.]*)` \| (.*) \|$", re.MULTILINE)
_EXAMPLE = ast.Call | ast.Assign | ast.With | ast.AsyncWith | ast.Import | ast.ImportFrom


@cache
def module_pages() -> dict[str, str]:
    """A page for each module of docs/public-names.md, by path. What its row names comes first, in that order."""
    return {f"{FOLDER}{module}.md": _page(module, purpose) for module, purpose in _rows()}


@cache
def _rows() -> list[tuple[str, str]]:
    return _ROW.findall((ROOT / "docs/public-names.md").read_text())


def _page(module: str, purpose: str) -> str:
    names = _names(module)
    first = [name for name in re.findall(r"`(\w+)`", purpose) if name in names]
    order = f"    options:\n      members: [{', '.join(dict.fromkeys([*first, *names]))}]\n" if first else ""
    return f"# {module}\n\n*For {purpose.replace('](', '](../../')}.*\n\n::: {module}\n{order}"


def _names(module: str) -> list[str]:
    """Public names of a module that have documentation of their own."""
    return [name for name in _exports(module) if not name.endswith("Def")]  # messages, which are made from .proto files


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _exports(module: str) -> list[str]:
    """`__all__` of a module."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def parse_only_public_modules() -> None:
    """Have Griffe parse the modules that define public names, a tenth of all: the others have no page."""
    needed = {one for module, _ in _rows() for defining in _defining(module, _exports(module)) for one in _up(defining)}
    every = griffe.ModuleFinder.submodules

    def submodules(finder: griffe.ModuleFinder, module: griffe.Module) -> list[tuple[tuple[str, ...], Path]]:
        return [one for one in every(finder, module) if ".".join((module.path, *one[0])) in needed]

    griffe.ModuleFinder.submodules = submodules  # type: ignore[method-assign]


def _defining(module: str, names: Collection[str]) -> set[str]:
    """The module, and those that it has `names` of, and what these inherit from."""
    result, left = set(), [(module, name) for name in (*names, "")]
    visited = set(left)
    while left:
        module, name = left.pop()
        result.add(module)
        imported = {(source, original) for source, original, local in _imports(module) if local == name}
        imported |= {(module, base) for base in _bases(module).get(name, ())}
        left += imported - visited
        visited |= imported
    return result


@cache
def _imports(module: str) -> list[tuple[str, str, str]]:
    """From which modules of dagexec it has names, as they are called there and here."""
    return [
        (node.module, one.name, one.asname or one.name)
        for statement in _tree(module).body
        if not isinstance(statement, ast.ClassDef | ast.FunctionDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom) and node.module and re.match(r"dagexec\b(?!.*_pb2)", node.module)
        for one in node.names
    ]


@cache
def _bases(module: str) -> dict[str, list[str]]:
    """The names of what its classes inherit from."""
    return {
        node.name: [ast.unparse(base) for base in node.bases]
        for node in _tree(module).body
        if isinstance(node, ast.ClassDef)
    }


def _up(module: str) -> Iterator[str]:
    """The module and the packages that it is in."""
    parts = module.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


class ExamplesAsCode(griffe.Extension):
    """Examples in docstrings become blocks that are highlighted, and constructors that callers do not use go."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called for dagexec itself."""
        self.on_object(obj=pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each thing that is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)
        made_elsewhere = obj.members.get("__init__")
        if made_elsewhere and made_elsewhere.docstring and made_elsewhere.docstring.value.startswith("Called by"):
            obj.del_member("__init__")


def with_examples(text: str) -> str:
    """The docstring with paragraphs of Python as code blocks."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_block(one) if _is_example(one) else one for one in paragraphs)


def _block(paragraph: str) -> str:
    return f"```python\n{dedent(paragraph)}\n```"


def _is_example(paragraph: str) -> bool:
    try:
        tree = compile(dedent(paragraph), "example", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return any(isinstance(node, _EXAMPLE) for node in ast.walk(tree))
