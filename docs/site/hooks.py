"""What MkDocs asks while it builds the site: the pages that are made and not written, and links that leave docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import dagexec  # noqa: F401 - registers the operators
from dagexec.core.gradient import has_maker, stops_gradients
from dagexec.core.registry import operator_module, registered_engines, registered_operators, schema_of
from dagexec.core.schema import OpSchema

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\]\((?:\.\./)([\w./-]+)")
"""A link from docs/ to a file beside it."""

_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files beside docs/ that are pages."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the pages of modules and operators in the navigation."""
    made = {"reference/modules/": module_pages(), "reference/operators/": operator_pages()}
    config.nav = [_with_pages(entry, made) for entry in config.nav or []]
    return config


def _with_pages(entry: object, made: dict[str, dict[str, str]]) -> object:
    if isinstance(entry, dict):
        return {
            name: list(made[value]) if isinstance(value, str) and value in made else _with_pages(value, made)
            for name, value in entry.items()
        }
    return [_with_pages(one, made) for one in entry] if isinstance(entry, list) else entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made."""
    pages = module_pages() | operator_pages()
    pages |= {uri: (ROOT / name).read_text().replace("](docs/", "](") for name, uri in _PAGES.items()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    texts = [page.content_string for page in files.documentation_pages()]
    for target in sorted({found for text in texts for found in OUTSIDE.findall(text)} | _linked_by_readme()):
        path = ROOT / target
        if target in _PAGES or not path.exists():
            continue
        if path.is_dir():
            files.append(File.generated(config, f"source/{target.rstrip('/')}/index.md", content=_listing(path)))
            inside = [one for one in path.iterdir() if one.is_file()]
        else:
            inside = [path]
        for one in inside:
            uri = f"source/{one.relative_to(ROOT).as_posix()}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(one)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to the copies."""
    if page.file.src_uri in _PAGES.values():
        for target in _linked_by_readme():
            markdown = markdown.replace(f"]({target})", f"]({_copy(target)})")
        return markdown
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(lambda found: f"]({_copy(found[1])}", markdown)


def _copy(target: str) -> str:
    if target in _PAGES:
        return _PAGES[target]
    is_folder = (ROOT / target).is_dir()
    return f"source/{target.rstrip('/')}/index.md" if is_folder else f"source/{target}"


def _linked_by_readme() -> set[str]:
    found = re.findall(r"\]\((?!docs/|https?:|#)([\w./-]+)\)", (ROOT / "README.md").read_text())
    return {target for target in found if (ROOT / target).exists()}


def _listing(folder: Path) -> str:
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def module_pages() -> dict[str, str]:
    """A page for each public module, by path."""
    rows = re.findall(r"^\| `(dagexec[\w.]*)` \| (.*) \|$", (ROOT / "docs/public-names.md").read_text(), re.MULTILINE)
    return {f"reference/modules/{name}.md": f"# {name}\n\n::: {name}\n" for name, _ in rows}


def operator_pages() -> dict[str, str]:
    """A page for each family of operators, by path, after one with all of them."""
    families: dict[str, list[str]] = {}
    for op_type in registered_operators():
        families.setdefault(family_of(op_type), []).append(op_type)
    pages = {f"reference/operators/{name}.md": _family_page(name, types) for name, types in sorted(families.items())}
    rows = [
        f"| [{op_type}]({name}.md#{op_type.lower()}) | {_first_sentence(schema_of(op_type))} |"
        for name, types in families.items()
        for op_type in types
    ]
    head = ["# Operators", "", "Made from the schemas, which `dagexec operators NAME` prints.", ""]
    head += ["| operator | computes |", "|---|---|"]
    return {"reference/operators/index.md": "\n".join([*head, *sorted(rows), ""])} | pages


def family_of(op_type: str) -> str:
    """The package of `dagexec.ops.families` that implements it."""
    parts = operator_module(op_type).split(".")
    family = parts[3] if parts[:3] == ["dagexec", "ops", "families"] and len(parts) > 4 else "other"
    return "indexing" if family == "index" else family  # index.md is the page of all


def _family_page(name: str, types: list[str]) -> str:
    return f"# Operators: {name}\n\n" + "\n".join(operator_text(op_type) for op_type in types)


def operator_text(op_type: str) -> str:
    """What the reference says of an operator, in Markdown."""
    schema = schema_of(op_type)
    lines = [f"## {op_type}", "", _text(schema.doc), "", *_facts(schema), ""]
    lines += _names("input", schema.input_names)
    lines += _names("output", schema.output_names)
    if schema.args:
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| `{name}`{_if_required(name, schema)} | {_cell(text)} |" for name, text in schema.args.items()]
    return "\n".join(lines) + "\n"


def _if_required(argument: str, schema: OpSchema) -> str:
    return " (required)" if argument in schema.required_args else ""


def _facts(schema: OpSchema) -> Iterator[str]:
    yield f"- engines on the host: {', '.join(registered_engines(schema.type)) or 'none'}"
    if has_maker(schema.type):
        yield "- gradient: yes"
    else:
        yield f"- gradient: {'none passes through it' if stops_gradients(schema.type) else 'an error'}"
    if schema.onnx:
        yield f"- ONNX: {', '.join(f'{one.type} (version {one.version})' for one in schema.onnx)}"


def _names(kind: str, names: Sequence[str]) -> list[str]:
    rows = [f"| {kind} {index} | {_cell(name)} |" for index, name in enumerate(names)]
    return [f"| {kind} | |", "|---|---|", *rows, ""] if rows else []


def _first_sentence(schema: OpSchema) -> str:
    return _cell(schema.doc.strip().splitlines()[0])


def _text(text: str) -> str:
    return re.sub(r"([<*_\[\]])", r"\\\1", text.strip())


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|").replace("\n", " ")
