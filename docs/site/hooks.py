"""What MkDocs asks while it builds the site: the pages that are made and not written, and links that leave docs/."""

from __future__ import annotations

import re
from pathlib import Path

from api_pages import module_pages, parse_only_public_modules
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import notebook_pages
from operator_pages import operator_pages

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\]\((?:\.\./)([\w./-]+)")
"""A link from docs/ to a file beside it."""

_PAGES = {"README.md": "overview.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files beside docs/ that are pages."""

_FOUND_LATER = (
    *("reference/", "source/", "notebooks/", "architecture.md", "benchmarks.md", "contributing.md", "cudnn.md"),
    *("dependencies.md", "literature.md", "onednn.md", "onnx-models.md"),
)
"""Pages that have much of everything: a search shows those first that say how something is done."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the pages that are made in the navigation."""
    parse_only_public_modules()
    made = {
        "reference/modules/": module_pages(),
        "reference/operators/": operator_pages(),
        "notebooks/": notebook_pages(),
    }
    config.nav = [_with_pages(entry, made) for entry in config.nav or []]
    return config


def _with_pages(entry: object, made: dict[str, dict[str, str]]) -> object:
    if isinstance(entry, dict):
        return {
            name: [{_label(made[value][uri]): uri} for uri in made[value]]
            if isinstance(value, str) and value in made
            else _with_pages(value, made)
            for name, value in entry.items()
        }
    return [_with_pages(one, made) for one in entry] if isinstance(entry, list) else entry


def _label(text: str) -> str:
    """What the navigation calls a page: its title, without that of the section."""
    return text[text.index("# ") + 2 : text.index("\n", text.index("# "))].removeprefix("Operators: ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made."""
    pages = module_pages() | operator_pages() | notebook_pages()
    pages |= {uri: (ROOT / name).read_text().replace("](docs/", "](") for name, uri in _PAGES.items()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    texts = [page.content_string for page in files.documentation_pages()]
    for target in sorted({found for text in texts for found in OUTSIDE.findall(text)} | _linked_by_readme()):
        path = ROOT / target
        if _page(target) or not path.exists():
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
    """Lead links that leave docs/ to the copies, and say where a search looks first."""
    uri = page.file.src_uri
    page.meta["search"] = {"exclude": uri == "changelog.md", "boost": 1 if uri.startswith(_FOUND_LATER) else 4}
    if page.file.src_uri in _PAGES.values():
        for target in _linked_by_readme():
            markdown = markdown.replace(f"]({target})", f"]({_copy(target)})")
        return markdown
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(lambda found: f"]({_copy(found[1])}", markdown)


def _page(target: str) -> str | None:
    """The page that a file beside docs/ is shown as, if it is."""
    return f"notebooks/{Path(target).stem}.md" if target.endswith(".ipynb") else _PAGES.get(target)


def _copy(target: str) -> str:
    if page := _page(target):
        return page
    is_folder = (ROOT / target).is_dir()
    return f"source/{target.rstrip('/')}/index.md" if is_folder else f"source/{target}"


def _linked_by_readme() -> set[str]:
    found = re.findall(r"\]\((?!docs/|https?:|#)([\w./-]+)\)", (ROOT / "README.md").read_text())
    return {target for target in found if (ROOT / target).exists()}


def _listing(folder: Path) -> str:
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
