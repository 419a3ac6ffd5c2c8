"""TfIdfVectorizer: how often each of many n-grams occurs in a row of texts or integers, and weights of these counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, INT32, INT64, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ModelFormatError
from dagexec.ops.families.tabular.attributes import Array, check_length, integers, numbers, texts

_MOST_COLUMNS = 1 << 24
_MODES = ("TF", "IDF", "TFIDF")


class Grams:
    """The n-grams of a vectorizer.

    Attributes:
        columns: by n-gram, a tuple of its items, the place of its column in `weights`.
        width: the number of columns of the result.
        targets: of each n-gram, its column.
        weights: of each n-gram.
        lengths: from the shortest that counts to the longest.
        skips: the most items left out between two.
    """

    def __init__(self, arguments: Arguments, label: str) -> None:
        """Raises ModelFormatError."""
        names, values = texts(arguments, label, "pool_strings"), arguments.ints("pool_int64s")
        if bool(names.size) == bool(values):
            raise ModelFormatError(f"{label}: it must have either 'pool_strings' or 'pool_int64s'")
        self.is_text = bool(names.size)
        pool = names.tolist() if self.is_text else values
        begins = [*arguments.ints("ngram_counts"), len(pool)]
        grams: list[tuple[object, ...]] = []
        for length, (begin, end) in enumerate(pairwise(begins), start=1):
            if not 0 <= begin <= end <= len(pool) or (end - begin) % length:
                raise ModelFormatError(f"{label}: attribute 'ngram_counts' does not cut its pool into n-grams")
            grams += [tuple(pool[place : place + length]) for place in range(begin, end, length)]
        self.targets = integers(arguments, label, "ngram_indexes", len(grams))
        if not grams or self.targets.min() < 0 or self.targets.max() >= _MOST_COLUMNS:
            raise ModelFormatError(f"{label}: attribute 'ngram_indexes' must name columns, from 0 to {_MOST_COLUMNS}")
        self.width = int(self.targets.max()) + 1
        weights = numbers(arguments, label, "weights").astype(np.float32)
        if weights.size:
            check_length(weights, label, "weights", len(grams))
        self.weights = weights if weights.size else np.ones(len(grams), np.float32)
        self.columns = {gram: place for place, gram in enumerate(grams)}
        self.mode = arguments.string("mode", "")
        if self.mode not in _MODES:
            raise ModelFormatError(f"{label}: attribute 'mode' is {self.mode!r}; expected one of {_MODES}")
        first, last = (arguments.int(f"{which}_gram_length", 1) for which in ("min", "max"))
        self.skips = arguments.int("max_skip_count", 0)
        if not 1 <= first <= last or self.skips < 0:
            raise ModelFormatError(f"{label}: n-grams of {first} to {last} items, {self.skips} left out, mean nothing")
        self.lengths = range(first, min(last, len(begins) - 1) + 1)

    def vector(self, row: Sequence[object]) -> Array:
        """The numbers of one row."""
        counts = np.zeros(len(self.weights), np.float32)
        for length in self.lengths:
            for distance in range(1, (self.skips if length > 1 else 0) + 2):
                reach = (length - 1) * distance + 1
                if reach > len(row):
                    break
                for begin in range(len(row) - reach + 1):
                    place = self.columns.get(tuple(row[begin : begin + reach : distance]))
                    if place is not None:
                        counts[place] += 1
        if self.mode == "IDF":
            counts = (counts > 0) * self.weights
        elif self.mode == "TFIDF":
            counts *= self.weights
        found = np.zeros(self.width, np.float32)
        np.add.at(found, self.targets, counts)
        return found


def _grams(call: OperatorCall) -> Grams:
    return call.arguments.once("grams", lambda: Grams(call.arguments, call.label))


def infer_vectorizer(call: OperatorCall) -> Sequence[TensorType]:
    """float32 [columns], or [rows, columns]."""
    grams = _grams(call)
    call.require_types(0, *((STRING,) if grams.is_text else (INT32, INT64)))
    shape = call.require_rank(0, 1, 2)
    return [TensorType((*shape[:-1], grams.width), FLOAT32)]


def _rows(asked: RowsCall) -> list[Rows | None]:
    """Those of a matrix."""
    if asked.rank(0) != 2:
        raise asked.mixes(0)
    return list(along_axis(0)(asked))


_ARGS = {
    "max_gram_length": "items of the longest n-grams that count",
    "max_skip_count": "the most items left out between two of an n-gram",
    "min_gram_length": "items of the shortest n-grams that count",
    "mode": "TF: how often each n-gram occurs; IDF: its weight if it does; TFIDF: its weight each time",
    "ngram_counts": "where the n-grams of one item begin in the pool, those of two, and so on",
    "ngram_indexes": "the column of each n-gram",
    "pool_int64s": "the items of all n-grams",
    "pool_strings": "the items of all n-grams, if they are texts",
    "weights": "of each n-gram (default 1)",
}


@new_operator(
    "TfIdfVectorizer",
    infer=infer_vectorizer,
    on_host=True,
    doc="Counts of n-grams in each row of X. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args=_ARGS,
    required_args=("mode", "ngram_counts", "ngram_indexes"),
    rows=_rows,
    onnx=(OnnxName("TfIdfVectorizer", 9, {name: name for name in _ARGS}),),
)
class TfIdfVectorizer(Operator):
    """A column for each n-gram."""

    def prepare(self) -> Step:
        """Row by row."""
        grams, x, y = _grams(self.call()), self.x(0), self.y(0)
        rows, out = np.atleast_2d(x), np.atleast_2d(y)

        def step() -> None:
            for row, target in zip(rows.tolist(), out, strict=True):
                target[...] = grams.vector(row)

        return step


no_gradient("TfIdfVectorizer")
