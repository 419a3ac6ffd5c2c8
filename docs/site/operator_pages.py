"""The pages of operators, made of their schemas: an index by family, one by letter, and each family on pages that are
not too long to look over.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, groupby

import dagexec  # noqa: F401 - registers the operators
from dagexec.core.gradient import has_maker, stops_gradients
from dagexec.core.registry import operator_module, registered_engines, registered_operators, schema_of
from dagexec.core.schema import OpSchema

FOLDER = "reference/operators/"
_PAGE_HEIGHT = 3300
"""Pixels that the operators of a page may be high by `_height`; tests/site measures that no page exceeds 5,000."""

_LINK = re.compile(r"\(operator:(\w+)\)")
"""The target of a link to an operator, before it is settled which page that is on."""

_MANY = 8
"""So many arguments that an operator has like another are told once."""

_FAMILIES = "dagexec.ops.families"
_WORD = re.compile(r"`[^`]*`|\w+|[<*\[\]]")
"""What `_prose` looks at: code, words, and what Markdown would take as markup."""


@cache
def operator_pages() -> dict[str, str]:
    """Pages by path."""
    families: dict[str, list[str]] = {}
    for op_type in registered_operators():
        families.setdefault(family_of(op_type), []).append(op_type)
    pages, place_of = {}, {}
    for family, types in sorted(families.items()):
        parts = list(_parts(types))
        for number, part in enumerate(parts, 1):
            name = family if number == 1 else f"{family}-{number}"
            title = family if len(parts) == 1 else f"{family}: {part[0]} to {part[-1]}"
            place_of |= {op_type: f"{name}.md#{op_type.lower()}" for op_type in part}
            pages[f"{FOLDER}{name}.md"] = f"# Operators: {title}\n\n" + "\n".join(map(operator_text, part))
    pages = {uri: _LINK.sub(lambda match: f"({place_of[match[1]]})", text) for uri, text in pages.items()}
    by_family = ((f"{name}: {_description(name)}", types) for name, types in sorted(families.items()))
    by_letter = ((letter, list(types)) for letter, types in groupby(sorted(place_of, key=str.lower), _initial))
    head = "---\nhide: [toc]\n---\n# Operators by"
    source = "Made from the schemas, which `dagexec operators NAME` prints; ∇ is the gradient of what stands before it."
    return {
        f"{FOLDER}index.md": f"{head} family\n\n{source} [By letter](letters.md)\n\n{_index(by_family, place_of)}",
        f"{FOLDER}letters.md": f"{head} letter\n\n{source} [By family](index.md)\n\n{_index(by_letter, place_of)}",
    } | pages


def _initial(name: str) -> str:
    return name[0].upper()


def _index(groups: Iterable[tuple[str, Sequence[str]]], place_of: dict[str, str]) -> str:
    """Operators of each group as links, each with its gradient behind it."""
    return "".join(f"**{title}**\n\n{_links(types, place_of)}\n{{: .names }}\n\n" for title, types in groups)


def _links(types: Sequence[str], place_of: dict[str, str]) -> str:
    of_gradients = {f"{one}Gradient": one for one in types}
    return " ".join(
        f'[∇]({place_of[one]} "{one}")' if one in of_gradients else f"[{one}]({place_of[one]})"
        for one in sorted(types, key=lambda one: (of_gradients.get(one, one).lower(), one))
    )


def family_of(op_type: str) -> str:
    """The package of `dagexec.ops.families` that implements it."""
    parts = operator_module(op_type).split(".")
    family = parts[3] if parts[:3] == _FAMILIES.split(".") and len(parts) > 4 else "other"
    return "indexing" if family == "index" else family  # index.md is the page of all


def _description(family: str) -> str:
    if family == "other":
        return "those of no family."
    module = importlib.import_module(f"{_FAMILIES}.{'index' if family == 'indexing' else family}")
    return (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")


def _parts(types: Sequence[str]) -> Iterator[list[str]]:
    """The operators of each page of a family, of about the same height; gradients after all others."""
    types = sorted(types, key=lambda op_type: (op_type.endswith("Gradient"), op_type))
    heights = list(map(_height, types))
    middles = [end - height / 2 for end, height in zip(accumulate(heights), heights, strict=True)]
    pages = -(-sum(heights) // _PAGE_HEIGHT)
    for _, part in groupby(zip(types, middles, strict=True), lambda one: one[1] * pages // sum(heights)):
        yield [op_type for op_type, _ in part]


def _height(op_type: str) -> int:
    """Pixels that its description takes, about; a fifth less."""
    rows = [line for line in operator_text(op_type).splitlines() if line.startswith("|")]
    return 140 + 23 * (len(schema_of(op_type).doc) // 85) + sum(24 + 18 * (len(row) // 115) for row in rows)


@cache
def operator_text(op_type: str) -> str:
    """What the reference says of an operator, in Markdown."""
    schema = schema_of(op_type)
    rows = [*_names("input", schema.input_names), *_names("output", schema.output_names)]
    model = _model_of(family_of(op_type))
    shared = [name for name, text in schema.args.items() if schema_of(model).args.get(name) == text]
    if op_type == model or len(shared) < _MANY:
        shared = []
    rows += [
        (f"`{name}`{_if_required(name, schema)}", text) for name, text in schema.args.items() if name not in shared
    ]
    rows += [(f"as in [{model}](operator:{model})", ", ".join(f"`{name}`" for name in shared))] if shared else []
    table = "".join(f"| {name} | {_prose(text).replace('|', '&#124;')} |\n" for name, text in rows)
    return f"## {op_type}\n\n{_prose(schema.doc)}\n\n*{'; '.join(_facts(schema))}*\n" + (
        f"\n| | |\n|---|---|\n{table}" if rows else ""
    )


@cache
def _model_of(family: str) -> str:
    """The operator whose arguments others of the family have as well, word by word."""
    types = [op_type for op_type in _operators() if family_of(op_type) == family]
    uses = Counter(item for op_type in types for item in schema_of(op_type).args.items())
    shared = {op_type: sum(uses[item] for item in schema_of(op_type).args.items()) for op_type in types}
    return min((one for one in types if shared[one] >= 0.8 * max(shared.values())), key=lambda one: (len(one), one))


@cache
def _operators() -> frozenset[str]:
    return frozenset(registered_operators())


def _if_required(argument: str, schema: OpSchema) -> str:
    return " (required)" if argument in schema.required_args else ""


def _facts(schema: OpSchema) -> Iterator[str]:
    yield f"engines on the host: {', '.join(registered_engines(schema.type)) or 'none'}"
    if has_maker(schema.type):
        yield "gradient: yes"
    else:
        yield f"gradient: {'none passes through it' if stops_gradients(schema.type) else 'an error'}"
    if schema.onnx:
        yield f"ONNX: {', '.join(f'{one.type} (version {one.version})' for one in schema.onnx)}"


def _names(kind: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Rows for the inputs or outputs: one for all where they are bare names."""
    named = [f"`{name}`" if re.fullmatch(r"[\w.]+", name) else name for name in names]
    if len(names) > 1 and all(name[0] == "`" for name in named):
        return [(f"{kind}s", ", ".join(named))]
    return [(f"{kind} {index}" if len(names) > 1 else kind, name) for index, name in enumerate(named)]


def _prose(text: str) -> str:
    """A text of a schema in Markdown: names of several words, by underscores or as operators have them, are code."""
    return _WORD.sub(lambda match: _marked(match[0]), " ".join(text.split()))


def _marked(word: str) -> str:
    if word in "<*[]":
        return f"\\{word}"
    if word in _operators() and re.search(r"[a-z0-9][A-Z]", word):
        return f"[`{word}`](operator:{word})"
    return f"`{word}`" if re.fullmatch(r"[a-zA-Z]\w*_\w*", word) else word
