"""The pages that docs/site makes, against the registry and docstrings; `make docs` builds all of the site."""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import dagexec  # noqa: F401 - registers the operators
from dagexec.core.gradient import has_maker
from dagexec.core.registry import registered_engines, registered_operators, schema_of

pytest.importorskip("mkdocs", reason="the site needs the extra docs: make docs")

SITE = Path(__file__).parents[2] / "docs" / "site"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hooks, which know each maker of pages."""
    monkeypatch.syspath_prepend(str(SITE))
    module = import_module("hooks")
    yield module
    for name in ("hooks", "api_pages", "operator_pages", "notebook_pages"):
        sys.modules.pop(name, None)


def test_every_operator_is_described_once_and_in_both_indexes(made: ModuleType) -> None:
    pages = made.operator_pages()
    indexes = {"reference/operators/index.md", "reference/operators/letters.md"}
    described = [name for uri in pages.keys() - indexes for name in re.findall(r"^## (\w+)$", pages[uri], re.M)]
    assert sorted(described) == registered_operators()
    for uri in indexes:
        links = re.findall(r'\[(?:∇|(\w+))\]\(([\w.-]+)#(\w+)(?: "(\w+)")?\)', pages[uri])
        assert sorted(name or gradient for name, _, _, gradient in links) == registered_operators()
        names = [name for name, *_ in links]
        assert all(names[number - 1] + "Gradient" == one for number, (*_, one) in enumerate(links) if one)
        for name, page, anchor, gradient in links:
            assert f"## {name or gradient}\n" in pages[f"reference/operators/{page}"]
            assert anchor == (name or gradient).lower()


@pytest.mark.parametrize("op_type", ["Conv", "Softmax", "ConvGradient", "Print", "Shape", "MaxPool2D"])
def test_an_operator_has_its_engines_gradient_names_and_arguments(made: ModuleType, op_type: str) -> None:
    text = import_module("operator_pages").operator_text(op_type)
    schema = schema_of(op_type)
    assert f"engines on the host: {', '.join(registered_engines(op_type))}" in text
    assert ("gradient: yes" in text) is has_maker(op_type)
    for one in schema.onnx:
        assert f"{one.type} (version {one.version})" in text
    assert [name for name in schema.args if f"`{name}`" not in text] == []


def test_links_between_operators_lead_to_their_sections(made: ModuleType) -> None:
    pages = made.operator_pages()
    assert not any("operator:" in text for text in pages.values())
    links = re.findall(r"\[`?(\w+)`?\]\(([\w.-]+)#\w+\)", "".join(pages.values()))
    assert all(f"## {name}\n" in pages[f"reference/operators/{page}"] for name, page in links)
    assert len(links) > len(registered_operators())


def test_every_public_module_has_a_page_that_begins_with_what_is_called_first(made: ModuleType) -> None:
    pages = made.module_pages()
    assert "reference/modules/dagexec.errors.md" in pages
    assert all(text.count(":::") == 1 for text in pages.values())
    assert "\n      members: [compile, Executor, " in pages["reference/modules/dagexec.md"]


def test_examples_in_docstrings_become_code_and_prose_does_not(made: ModuleType) -> None:
    with_examples = import_module("api_pages").with_examples
    example = "with dagexec.open(path) as executor:\n    await executor.run_async(feeds)"
    shown = f"```python\n{example}\n```"
    indented = example.replace("with", "    with").replace("    await", "        await")
    prose = "Raises ModelFormatError for what is no plan.\n\nArgs:\n    path: of the file.\n\n`x = f(y)` is not code."
    assert with_examples(f"First.\n\n{example}") == f"First.\n\n{shown}"
    assert with_examples(f"First.\n\n{indented}\n\n{prose}") == f"First.\n\n{shown}\n\n{prose}"
    assert with_examples("Deprecated\n\nDone") == "Deprecated\n\nDone"


def test_a_notebook_is_a_page_with_its_outputs(made: ModuleType) -> None:
    pages = made.notebook_pages()
    assert pages["notebooks/see_a_net.md"].count('<div class="output">') == 6
    assert "](../scheduling.md)" in pages["notebooks/policies.md"]
    assert "<svg" in pages["notebooks/policies.md"]
    assert not any("<?xml" in text or "<!DOCTYPE" in text for text in pages.values())
