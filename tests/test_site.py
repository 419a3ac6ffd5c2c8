"""The reference of operators on the site, against the registry; `make docs` builds all of it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import dagexec  # noqa: F401 - registers the operators
from dagexec.core.gradient import has_maker
from dagexec.core.registry import registered_engines, registered_operators, schema_of

pytest.importorskip("mkdocs", reason="the site needs the extra docs: make docs")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", Path(__file__).parents[1] / "docs" / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_operator_is_described_once(hooks: ModuleType) -> None:
    pages = hooks.operator_pages()
    found = [
        name
        for uri, text in pages.items()
        if not uri.endswith("/index.md")
        for name in re.findall(r"^## (\w+)$", text, re.M)
    ]
    assert sorted(found) == registered_operators()
    index = pages["reference/operators/index.md"]
    for name, uri in re.findall(r"^\| \[(\w+)\]\(([\w.]+)#", index, re.M):
        assert f"## {name}\n" in pages[f"reference/operators/{uri}"]
    assert index.count("\n| [") == len(found)


@pytest.mark.parametrize("op_type", ["Conv", "Softmax", "ConvGradient", "Print", "Shape"])
def test_an_operator_has_its_engines_gradient_names_and_arguments(hooks: ModuleType, op_type: str) -> None:
    text = hooks.operator_text(op_type)
    schema = schema_of(op_type)
    assert f"- engines on the host: {', '.join(registered_engines(op_type))}" in text
    assert ("- gradient: yes" in text) is has_maker(op_type)
    for one in schema.onnx:
        assert f"{one.type} (version {one.version})" in text
    assert [name for name in schema.args if f"| `{name}`" not in text] == []


def test_every_public_module_has_a_page(hooks: ModuleType) -> None:
    pages = hooks.module_pages()
    assert "reference/modules/dagexec.errors.md" in pages
    assert all(text.count(":::") == 1 for text in pages.values())
