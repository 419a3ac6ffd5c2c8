"""The compiler has no tables of operator names: what it wants to know of an operator, the operator says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dagexec
from dagexec.core.registry import registered_operators

COMPILER = Path(dagexec.__file__).parent / "compiler"

PATTERNS = {
    "passes/activation_patterns.py": "what a pattern is made of and what it becomes",
    "passes/attention.py": "how attention is spelled, factors, sums and choices in between",
    "length_rules.py": "how positions are passed on where rows are not",
    "lengths.py": "what leaves numbers as they are",
    "positions.py": "of which operators numbers of positions are linear",
    "length_contents.py": "of which operators sums of the length are sums",
    "growing_axes.py": "what picks elements by their numbers",
    "stepping.py": "what makes tensors as large as it is told",
    "passes/axes.py": "what moves or repeats elements without being a view",
    "passes/before_resize.py": "resizing by factors for two axes alone",
    "passes/constant_folding.py": "Shape, Size and Reshape, each folded in its own way",
    "passes/embedding_bags.py": "what a loop over bags is made of",
    "passes/inner_products.py": "products, each rewritten to an FC in its own way",
    "passes/slice_indices.py": "what repeats elements",
}
"""Modules that match operators one by one to rewrite each of them, and what they match."""


def tables(source: str, known: set[str]) -> Iterator[tuple[int, list[str]]]:
    """The line and the names of each set, tuple, list or dict with two or more operator types in it."""
    for node in ast.walk(ast.parse(source)):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        found = [item.value for item in items if isinstance(item, ast.Constant) and item.value in known]
        if len(found) > 1:
            yield node.lineno, found


MODULES = sorted(path.relative_to(COMPILER).as_posix() for path in COMPILER.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_compiler_has_no_table_of_operators(module: str) -> None:
    """Or the next operator will be missing in it."""
    found = list(tables((COMPILER / module).read_text(), set(registered_operators())))
    assert bool(found) == (module in PATTERNS), found


def test_a_table_is_found_in_every_form() -> None:
    """A frozenset of a set, a tuple in a comparison, the keys of a mapping."""
    lines = [
        'A = frozenset({"Relu", "Tanh"})',
        'B = kind in ("Conv", "FC")',
        'C = ["Relu"]',
        'D = {"Add": 1, "Sub": 2}',
    ]
    found = sorted(tables("\n".join(lines), set(registered_operators())))
    assert found == [(1, ["Relu", "Tanh"]), (2, ["Conv", "FC"]), (4, ["Add", "Sub"])]
