"""CTCBeamSearchDecoder against all paths: a beam that loses no prefix gives each its exact likelihood."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, product

import numpy as np
import pytest

from dagexec.errors import OperatorError
from tests.ops.running import run_operator

RNG = np.random.default_rng(43)


def likelihoods(rows: np.ndarray) -> Counter[tuple[int, ...]]:
    """Of all labels that paths collapse to, the sum over these paths."""
    found: Counter[tuple[int, ...]] = Counter()
    for path in product(range(rows.shape[1]), repeat=len(rows)):
        labels = tuple(label for label, _ in groupby(path) if label)
        found[labels] += float(np.prod([row[label] for row, label in zip(rows.astype(float), path, strict=True)]))  # type: ignore[assignment]
    return found


def test_the_likeliest_labels_of_each_sequence() -> None:
    scores = RNG.dirichlet(np.ones(3), (5, 3)).astype(np.float32)
    lengths = np.array([5, 3, 0], np.int32)
    arguments = {"beam_width": 400, "num_candidates": 6, "prune_threshold": 0.0}
    sizes, labels, found = run_operator("CTCBeamSearchDecoder", [scores, lengths], 3, **arguments)
    at = 0
    for number, length in enumerate(lengths[:2]):
        best = likelihoods(scores[:length, number]).most_common(6)
        for place, (expected, likelihood) in enumerate(best):
            size = sizes[6 * number + place]
            assert tuple(labels[at : at + size]) == expected
            np.testing.assert_allclose(found[6 * number + place], likelihood, rtol=1e-5)
            at += size
    assert at == len(labels)
    assert not sizes[12:].any()
    assert not found[12:].any()


def test_unlikely_labels_are_not_tried_unless_all_are_unlikely() -> None:
    scores = np.array([[0.1, 0.3, 0.6], [0.5, 0.2, 0.3], [0.2, 0.2, 0.2]], np.float32)[:, None]
    rows = scores[:, 0].copy()
    rows[0, :2], rows[1, 1:] = 0, 0
    _, labels, found = run_operator("CTCBeamSearchDecoder", [scores], 3, beam_width=50, prune_threshold=0.4)
    [(expected, likelihood)] = likelihoods(rows).most_common(1)
    assert tuple(labels) == expected
    np.testing.assert_allclose(found, [likelihood], rtol=1e-6)
    with pytest.raises(OperatorError, match="'num_candidates' must be from 1 to 'beam_width', found 11"):
        run_operator("CTCBeamSearchDecoder", [scores], 2, num_candidates=11)
    with pytest.raises(OperatorError, match=r"lengths must be in \[0, 3\]"):
        run_operator("CTCBeamSearchDecoder", [scores, np.array([4], np.int32)], 2)
