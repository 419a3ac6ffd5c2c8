"""What documents name is there: files, members, commands, options, targets, variables, extras, links, measurements.

What a page writes as code is looked up in the repository, each kind by its own rule. Whether names are public is
tests/test_public_names.py's question; README.md and docs/tutorial.md are also run (test_readme.py, test_newcomer.py).
"""

from __future__ import annotations

import ast
import fnmatch
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import typer.main

from dagexec.cli import app
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.options import CompileOptions

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]
)
FOLDERS = ("dagexec", "ops", "scheduler", "tests", "benchmarks", "examples", "deploy", "docs", ".ci", ".github")
TEXTS = {".py", ".toml", ".yml", ".yaml", ".proto", ".js", ".css", ".html", ".ipynb", ""}
GROUP = typer.main.get_group(app).commands
NESTED = {
    f"{name} {inner}": one for name, group in GROUP.items() for inner, one in getattr(group, "commands", {}).items()
}
COMMANDS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    | {"--help"}
    for name, command in (GROUP | NESTED).items()
}
FOREIGN = {
    *("LC_ALL", "PROT_NONE", "MALLOC_", "KMP_", "MemoryDenyWriteExecute", "service.py"),
    *("torch.get_num_threads", "keep_initializers_as_inputs", "dnnl_forward_training"),
}
"""Of other programs and libraries, or a user's, that nothing here uses."""
COMPILE = {option.name for option in fields(CompileOptions)}
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()

BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w*{{}},./-]*\w")
MODULE = re.compile(r"-m ((?:dagexec|tests|benchmarks)[\w.]*)")
FIGURE = re.compile(r"\d(?:[\d.,]*\d)? (?:ns|us|ms|GFLOP/s)\b|\d\.\d+ (?:times|of)\b")
IN_CODE = re.compile(r"(?<![\w./-])(?:docs|tests|benchmarks|examples)/[\w./-]*\w\.(?:md|py|json)\b")
VARIABLE = re.compile(r"\bDAGEXEC_[A-Z_]*[A-Z]")
EXTRAS = re.compile(r"(?:'\.|\bdagexec)\[([a-z0-9,-]+)\]")


@cache
def files() -> dict[str, Path]:
    """Files and folders of the repository by all ends of their paths, those of programs without ".py" too."""
    given = (path for path in ROOT.iterdir() if path.name not in ("build", "dist"))  # which are made
    found = chain(given, *((ROOT / folder).rglob("*") for folder in FOLDERS))
    ends: dict[str, Path] = {}
    for path in found:
        parts = path.relative_to(ROOT).parts
        for start in range(0 if "__pycache__" in parts else len(parts)):
            ends["/".join(parts[start:]).removesuffix(".py")] = path
    return ends


@cache
def source() -> dict[Path, str]:
    """Texts of the repository that are not prose."""
    paths = {path for path in files().values() if path.suffix in TEXTS and path.is_file()} - {Path(__file__)}
    return {path: path.read_text(errors="replace") for path in sorted(paths)}


@cache
def everything() -> str:
    return "\n".join(source().values())


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", everything())).union(*(re.split(r"[/.]", end) for end in files()))


@cache
def members(owner: str) -> frozenset[str]:
    """What the classes of this name define and inherit; nothing if there is none in the repository."""
    found: set[str] = set()
    for path, text in source().items():
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" and f"class {owner}" in text else ():
            if isinstance(node, ast.ClassDef) and node.name == owner:
                bases = (base.rpartition(".")[2] for base in map(ast.unparse, node.bases))
                found.update(defined_in(node), *(members(base) for base in bases if base != owner))
    return frozenset(found)


def defined_in(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.id if isinstance(inner, ast.Name) else inner.attr


def spans(text: str) -> list[str]:
    """What prose sets as code, without strings and what is not of this repository."""
    plain = (re.sub(r'"[^"]*"|\s+', " ", span) for span in SPAN.findall(BLOCK.sub("", text)))
    return [span for span in plain if not any(name in span for name in FOREIGN)]


def lines_of_code(text: str) -> Iterator[str]:
    for part in (*BLOCK.findall(text), *spans(text)):
        yield from (line.partition("  #")[0].removeprefix("$ ") for line in part.replace("\\\n", " ").splitlines())


def missing_paths(text: str) -> Iterator[str]:
    """Paths from the root; in prose also those that begin in any folder, dotted ones, and names of programs alone."""
    partial = (span for span in spans(text) if re.fullmatch(r"[\w{},.*-]+(/[\w{},.*-]+)+/?|\w+\.py", span))
    named = {span for span in partial if span.endswith(".py") or is_folder(span.partition("/")[0])}
    dotted = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)\.\w+`", text)
    named |= {name.replace(".", "/") for name in dotted if (ROOT / "dagexec" / name.partition(".")[0]).is_dir()}
    for path in named.union(PATH.findall(text)):
        for one in alternatives(path.removeprefix("dagexec/").rstrip("/").removesuffix(".py")):
            if one not in files() and not fnmatch.filter(files(), one) and f'"{path}"' not in everything():
                yield path


def is_folder(name: str) -> bool:
    return name in files() and files()[name].is_dir()


def alternatives(path: str) -> list[str]:
    """`a/{b,c}` as two paths."""
    before, brace, rest = path.partition("{")
    inside, _, after = rest.partition("}")
    return [one for part in inside.split(",") for one in alternatives(before + part + after)] if brace else [path]


def missing_names(text: str) -> Iterator[str]:
    """Names of several words that the repository has nowhere, and members that a class of it has not."""
    shown = set(re.findall(r"\w+", "".join(BLOCK.findall(text))))
    for span in spans(text):
        for word in re.findall(r"\b_?[A-Za-z][A-Za-z0-9]*(?:_\w+|[a-z0-9][A-Z]\w*)", span):
            bare = word.strip("_")
            known = bare in shown or bare in words() or (word[0] == "_" and word in everything())
            yield from () if known else (word,)
        for owner, member in re.findall(r"\b([A-Z]\w+)\.(\w+)", span):
            if members(owner) and member not in members(owner):
                yield f"{owner}.{member}"


def missing_commands(text: str) -> Iterator[str]:
    """Commands of `dagexec` and their options, targets of `make`, modules that are run and what they take."""
    for line in lines_of_code(text):
        options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)
        tool = re.match(r"(?:\.venv/bin/)?dagexec ([a-z]+)\b", line)
        if tool:
            nested = re.match(r"[\w-]+ [\w-]+", line.partition("dagexec ")[2])
            taken = COMMANDS.get(nested[0] if nested else "", COMMANDS.get(tool[1]))
            yield from [tool[0]] if taken is None else (f"{tool[0]} {one}" for one in options if one not in taken)
        elif re.search(r"\bbenchmarks/\w+\.py|-m tests\b", line):
            yield from (option for option in options if f'"{option}"' not in everything())
        for target in re.findall(r" ([\w-]+)", line) if line.startswith("make ") else ():
            if not re.search(rf"^(PHONY.* )?{re.escape(target)}(:| [:?]?=)", MAKEFILE, re.MULTILINE):
                yield f"make {target}"
    yield from (module for module in MODULE.findall(text) if module.replace(".", "/") not in files())


def missing_settings(text: str) -> Iterator[str]:
    """Variables of the environment, extras, and options of `compile`."""
    yield from (variable for variable in VARIABLE.findall(text) if variable not in everything())
    yield from (extra for found in EXTRAS.findall(text) for extra in found.split(",") if extra not in DECLARED)
    for call in re.findall(r"(?<![\w.])(?:dagexec\.)?compile(?:_async)?\(((?:[^()]|\([^()]*\))*)\)", text):
        given = re.findall(r"\b(\w+)=(?!=)", re.sub(r"\([^()]*\)", "", call))
        yield from (name for name in given if name not in COMPILE)


def missing_links(text: str, page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page get on GitHub."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_source(text: str) -> Iterator[str]:
    """Sections with several figures that name no program that has them, and scripts whose records are not named."""
    for part in re.split(r"^(?=# )", text, flags=re.MULTILINE):
        above, *sections = re.split(r"^(?=## )", part, flags=re.MULTILINE)
        for section in (above, *sections):
            figures = FIGURE.findall(BLOCK.sub("", section))
            if len(figures) > 2 and not re.search(r"\w/\w+\.py\b|benchmarks(\.md|/results)", above + section):
                yield f"{section.partition(chr(10))[0]}: {figures}"
    for name in re.findall(r"benchmarks/(\w+)\.py", text) if FIGURE.search(text) else ():
        if f"results/{name}.json" in files() and f"results/{name}.json" not in text:
            yield f"{name}.json"


MISSING = (missing_paths, missing_names, missing_commands, missing_settings, without_source)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists_and_its_figures_have_a_source(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [name for missing in MISSING for name in missing(text)] == []
    assert list(missing_links(text, ROOT / page)) == []


def test_the_page_of_passes_has_all_of_them_in_their_order() -> None:
    shown = re.findall(r"^\*\*([a-z-]+)\*\*", (ROOT / "docs" / "passes.md").read_text(), re.MULTILINE)
    once = list(dict.fromkeys(one.name for one in GRAPH_PASSES))
    assert [name for name in shown if name in once] == [name for name in once if name != "zero-copy"]


def test_code_names_files_that_exist() -> None:
    named, missing = 0, []
    for path, text in source().items():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests":
            one_line = re.findall(r"`([^`\n]+)`", text)
            named += len(one_line)
            missing += [(str(path), name) for name in missing_paths("".join(f"`{span}` " for span in one_line))]
            paths = (name for name in IN_CODE.findall(text) if "results/" not in name)
            missing += [(str(path), name) for name in paths if not (ROOT / name).exists()]
    assert named > 1000
    assert missing == []


def test_what_programs_say_of_their_use_is_right() -> None:
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    usage = [ast.get_docstring(ast.parse(program.read_text())) or "" for program in programs]
    lines = "".join(f"{line.strip()}\n" for text in usage for line in text.splitlines() if line.startswith("    "))
    assert lines.count("python ") > 30
    assert list(missing_commands(f"```\n{lines}```\n")) == []


def test_a_variable_that_is_read_is_described() -> None:
    product = (
        text for path, text in source().items() if path.relative_to(ROOT).parts[0] in ("dagexec", "ops", "scheduler")
    )
    read = {name for text in product for name in re.findall(r'"(DAGEXEC_[A-Z_]+)"', text)} - {
        "DAGEXEC_IN_OPENVINO_TRIAL"
    }
    assert read - set(VARIABLE.findall("".join((ROOT / page).read_text() for page in PAGES))) == set()


def test_every_record_of_a_measurement_is_named() -> None:
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    assert [
        path.name for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")) if path.name not in pages
    ] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `compiler/nowhere.py`", ["compiler/nowhere.py"]),
        ("see `passes/{engine,nowhere}.py`", ["passes/{engine,nowhere}.py"]),
        ("run benchmarks/nowhere.py", ["benchmarks/nowhere.py"]),
        ("`Executor.run`, `Executor.nowhere_done`", ["nowhere_done", "Executor.nowhere_done"]),
        ("`NowhereOperator`", ["NowhereOperator"]),
        ("`Executor.zoo`", ["Executor.zoo"]),
        ("```\ndagexec run M --trace t --seeds 3\n```", ["dagexec run --seeds"]),
        ("`dagexec ran MODEL`", ["dagexec ran"]),
        ("`make lint nowhere`", ["make nowhere"]),
        ("`.venv/bin/python -m tests.fuzz --nowhere 3`", ["--nowhere"]),
        ("python -m tests.nowhere", ["tests.nowhere"]),
        ("`DAGEXEC_NOWHERE=1`", ["DAGEXEC_NOWHERE"]),
        ("pip install '.[serve,nowhere]'", ["nowhere"]),
        ("`compile(model, replicas=2, thread_count=3)`", ["thread_count"]),
        ("It takes 3 ms, not 4.5 ms or 6 us.", ["It takes 3 ms, not 4.5 ms or 6 us.: ['3 ms', '4.5 ms', '6 us']"]),
        ("By `benchmarks/tiny.py`, 3 us.", ["tiny.json"]),
    ],
)
def test_what_does_not_exist_is_seen(text: str, missing: list[str]) -> None:
    found = [name for look in MISSING for name in look(text)]
    assert set(missing) <= set(found)
    assert len(found) <= 2
