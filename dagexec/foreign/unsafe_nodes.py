"""Nodes that are not given to a runtime, because with hostile attributes it would not fail but do harm.

onnxruntime 1.31 computes a TfIdfVectorizer with fewer `ngram_indexes` than n-grams, and writes where it should not;
`onnx.reference` matches patterns with Python's `re`, which for some takes time exponential in the length of a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagexec.errors import UnsupportedOperatorError
from dagexec.foreign.message import nodes_of

if TYPE_CHECKING:
    import onnx

_MAX_INDEX = (1 << 31) - 1


def check_for_onnxruntime(model: onnx.ModelProto) -> None:
    """Raise UnsupportedOperatorError for a TfIdfVectorizer whose attributes contradict each other."""
    for node in nodes_of(model):
        if node.op_type == "TfIdfVectorizer":
            attributes = {one.name: one for one in node.attribute}
            counts, indexes = (
                list(attributes[name].ints) if name in attributes else [] for name in ("ngram_counts", "ngram_indexes")
            )
            pool = sum(
                len(attributes[name].ints or attributes[name].strings)
                for name in ("pool_int64s", "pool_strings")
                if name in attributes
            )
            if problem := _problem(counts, indexes, pool):
                raise UnsupportedOperatorError(f"TfIdfVectorizer {node.name or node.output[0]!r}: {problem}")


def _problem(counts: Sequence[int], indexes: Sequence[int], pool: int) -> str | None:
    """What is wrong with where the n-grams of each length begin in a pool of so many items, and with their indexes."""
    bounds = [*counts, pool]
    if any(not 0 <= start <= end <= pool for start, end in itertools.pairwise(bounds)):
        return f"ngram_counts {list(counts)[:8]} do not divide a pool of {pool} items"
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    if any(size % length for length, size in enumerate(sizes, 1)):
        return f"ngram_counts {list(counts)[:8]} leave n-grams incomplete in a pool of {pool} items"
    count = sum(size // length for length, size in enumerate(sizes, 1))
    if len(indexes) != count:
        return f"there are {count} n-grams, and {len(indexes)} ngram_indexes"
    if any(not 0 <= index <= _MAX_INDEX for index in indexes):
        return f"ngram_indexes are from {min(indexes)} to {max(indexes)}"
    return None


def check_for_reference(model: onnx.ModelProto) -> None:
    """Raise UnsupportedOperatorError for a pattern that the model's text is to be matched with."""
    for node in nodes_of(model):
        if node.op_type == "RegexFullMatch":
            raise UnsupportedOperatorError("RegexFullMatch may take unbounded time there; onnxruntime's does not")
