"""Cases of every operator on tables that says how it passes rows on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ops.tabular.drawn import random_rows, random_trees, weights
from tests.rows.case import Array, Case, Draw, batch, case, constant_values, integers, normal

TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
NAMES = [f"c{number}" for number in range(12)]


def missing(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Of a normal distribution, some whole and some NaN."""
    return random_rows(random, *shape)


def in_float64(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Of a normal distribution, float64."""
    return random.standard_normal(shape)


def words(count: int) -> Draw:
    """One of so many texts each."""

    def drawn(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        found = np.empty(shape, object)
        found.flat = [b"c%d" % number for number in random.integers(0, count, found.size)]
        return found

    return drawn


WHOLE = integers(-3, 9)


def table_cases() -> Iterator[Case]:
    """All of them."""
    yield from _columns()
    yield from _labels()
    yield from _linear()
    yield from _support_vectors()
    yield from _trees()


def _numbers(count: int) -> list[float]:
    found: list[float] = np.random.default_rng(count).standard_normal(count).astype(np.float32).tolist()
    return found


def _columns() -> Iterator[Case]:
    for width in (1, 5, 37):
        for draw in (normal, in_float64, WHOLE):
            x = batch(width, draw=draw)
            yield case("Scaler", x, offset=_numbers(width), scale=[0.5])
            yield case("Binarizer", x, threshold=0.5)
            for norm in ("MAX", "L1", "L2"):
                yield case("Normalizer", x, norm=norm)
        given = {"imputed_value_floats": _numbers(width), "replaced_value_float": float("nan")}
        yield case("Imputer", batch(width, draw=missing), **given)
        yield case("Imputer", batch(width, draw=WHOLE), imputed_value_int64s=[7], replaced_value_int64=2)
        yield case("FeatureVectorizer", batch(width), batch(2, draw=WHOLE), inputdimensions=[4, 3])
    for draw in (normal, words(3)):
        yield case("ArrayFeatureExtractor", batch(5, draw=draw), constant_values([4, 0, 4]))
    yield case("ArrayFeatureExtractor", batch(2, 5), constant_values([4, 0]))


def _labels() -> Iterator[Case]:
    text, place = batch(3, draw=words(9)), batch(3, draw=integers(0, 9))
    for x, keys in ((text, {"keys_strings": NAMES[:6]}), (place, {"keys_int64s": [5, 1, 7, 0, 8, 3]})):
        for values in ({"values_strings": NAMES[6:]}, {"values_floats": _numbers(6)}):
            yield case("LabelEncoder", x, **keys, **values)
    for x in (text, place):
        yield case("LabelEncoder", x, classes_strings=NAMES[:9])
        yield case("CategoryMapper", x, cats_strings=NAMES[:6], cats_int64s=[5, 1, 7, 0, 8, 3])
    yield case("LabelEncoder", batch(3, draw=missing), keys_floats=[1.0, float("nan")], values_int64s=[4, 6])
    yield case("OneHotEncoder", text, cats_strings=NAMES[:6])
    for draw in (normal, integers(0, 9)):
        yield case("OneHotEncoder", batch(3, draw=draw), cats_int64s=[5, 0, 1])
    pool = [1, 2, 0, 1, 3, 3, 1, 2, 3]
    grams: dict[str, Any] = {
        "max_gram_length": 3, "max_skip_count": 2, "min_gram_length": 1, "ngram_counts": [0, 2, 6],
        "ngram_indexes": [3, 0, 4, 1, 2], "weights": _numbers(5),
    }  # fmt: skip
    for mode in ("TF", "IDF", "TFIDF"):
        yield case("TfIdfVectorizer", batch(9, draw=integers(0, 4)), mode=mode, pool_int64s=pool, **grams)
    named = [NAMES[number] for number in pool]
    yield case("TfIdfVectorizer", batch(9, draw=words(4)), mode="TF", pool_strings=named, **grams)


def _linear() -> Iterator[Case]:
    for columns, targets in ((7, 1), (37, 3), (100, 12)):
        given = {"coefficients": _numbers(columns * targets), "intercepts": _numbers(targets)}
        for transform in TRANSFORMS:
            yield case("LinearRegressor", batch(columns), **given, targets=targets, post_transform=transform)
            labels = {"classlabels_strings": NAMES[: max(2, targets)]}
            yield case("LinearClassifier", batch(columns), outputs=2, **given, **labels, post_transform=transform)
        x, numbers = batch(columns, draw=in_float64), list(range(max(2, targets)))
        yield case("LinearClassifier", x, outputs=2, **given, classlabels_ints=numbers)


def _support_vectors() -> Iterator[Case]:
    for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        machine: dict[str, Any] = {"kernel_type": kernel, "kernel_params": [0.25, 0.5, 2.0]}
        one = {"coefficients": _numbers(19), "rho": [0.1], "support_vectors": _numbers(19 * 13), "n_supports": 19}
        for one_class in (0, 1):
            yield case("SVMRegressor", batch(13), **machine, **one, one_class=one_class)
        for counts in ([3, 5], [3, 5, 2, 4], [2] * 11):
            yield from _machines(counts, machine)
    for classes in (2, 3):
        own = {"coefficients": _numbers(classes * 13), "rho": [0.3], "classlabels_ints": list(range(classes))}
        yield case("SVMClassifier", batch(13), outputs=2, **own)


def _machines(counts: list[int], machine: dict[str, Any]) -> Iterator[Case]:
    """Between classes with so many vectors each, with probabilities and without."""
    classes, vectors = len(counts), sum(counts)
    pairs = classes * (classes - 1) // 2
    given = machine | {
        "coefficients": _numbers((classes - 1) * vectors), "rho": _numbers(pairs),
        "support_vectors": _numbers(vectors * 13), "vectors_per_class": counts,
    }  # fmt: skip
    for transform in TRANSFORMS[:: 1 if classes == 2 else 2]:
        labels = {"classlabels_strings": NAMES[:classes], "post_transform": transform}
        yield case("SVMClassifier", batch(13), outputs=2, **given, **labels)
    coupled = {"prob_a": [-1.5] * pairs, "prob_b": _numbers(pairs)}
    yield case("SVMClassifier", batch(13), outputs=2, **given, **coupled, classlabels_ints=list(range(classes)))


def _trees() -> Iterator[Case]:
    """More trees than are walked together, and rows of which numbers are missing."""
    nodes, leaves = random_trees(np.random.default_rng(0), 11, 4, 4)
    x = batch(4, draw=missing)
    for targets in (1, 3, 20):
        every = weights(np.random.default_rng(1), "target", leaves, [list(range(targets))], positive=False)
        for transform, aggregate in zip(TRANSFORMS, ("SUM", "AVERAGE", "MIN", "MAX"), strict=True):
            found = {"n_targets": targets, "aggregate_function": aggregate, "post_transform": transform}
            yield case("TreeEnsembleRegressor", x, **nodes, **every, **found)
    yield case("TreeEnsembleRegressor", batch(4, draw=WHOLE), **nodes, **every, n_targets=targets)
    for classes in (2, 3, 12):
        own = [[0]] if classes == 2 else [list(range(classes))]
        given = weights(np.random.default_rng(2), "class", leaves, own, positive=classes == 3)
        for transform in TRANSFORMS[:: 1 if classes == 2 else 2]:
            labels = {"classlabels_strings": NAMES[:classes], "post_transform": transform}
            yield case("TreeEnsembleClassifier", x, outputs=2, **nodes, **given, **labels)
        numbers = list(range(classes))
        yield case("TreeEnsembleClassifier", x, outputs=2, **nodes, **given, classlabels_int64s=numbers)
    stumps = 9
    for targets in (1, 2):
        yield case(
            "TreeEnsemble", x, tree_roots=list(range(stumps)), nodes_featureids=[i % 4 for i in range(stumps)],
            nodes_splits=_numbers(stumps), nodes_modes=[i % 6 for i in range(stumps)],
            nodes_truenodeids=list(range(stumps)), nodes_trueleafs=[1] * stumps,
            nodes_falsenodeids=[stumps + i for i in range(stumps)], nodes_falseleafs=[1] * stumps,
            leaf_targetids=[i % targets for i in range(2 * stumps)], leaf_weights=_numbers(2 * stumps),
            n_targets=targets,
        )  # fmt: skip
