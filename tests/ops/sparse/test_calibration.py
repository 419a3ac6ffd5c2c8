"""Features and predictions mapped by pieces, against loops over values."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError
from tests.ops.running import run_operator

RNG = np.random.default_rng(41)


def test_percentiles_are_lines_between_the_values_of_a_table() -> None:
    raw = [1.0, 2.0, 4.0, 10.0, 20.0]
    mapping, lower, upper = [0.1, 0.4, 0.8, 0.2, 0.9], [0.05, 0.3, 0.7, 0.1, 0.7], [0.2, 0.5, 0.9, 0.3, 0.95]
    x = np.array([[0.5, 15], [1, 10], [1.5, 9], [3, 20], [2, 21], [4, 12]], np.float32)
    tables = dict(zip(("raw", "mapping", "lower", "upper"), (raw, mapping, lower, upper), strict=True))
    arguments = {f"percentile_{name}": values for name, values in tables.items()}
    [found] = run_operator("BisectPercentile", [x], lengths=[3, 2], **arguments)
    first = [0, 0.1, 0.2 + 0.5 * (0.3 - 0.2), 0.5 + 0.5 * (0.7 - 0.5), 0.4, 0.8]
    second = [0.3 + 0.5 * (0.7 - 0.3), 0.2, 0, 0.9, 1, 0.3 + 0.2 * (0.7 - 0.3)]
    np.testing.assert_allclose(found, np.column_stack([first, second]), rtol=1e-6)
    with pytest.raises(ArgumentError, match="'percentile_raw' must have 6 numbers"):
        run_operator("BisectPercentile", [x], lengths=[3, 3], **arguments)


def mapped(value: float, bounds: np.ndarray, slopes: np.ndarray, intercepts: np.ndarray) -> float:
    if value <= bounds[0]:
        return float(slopes[0] * bounds[0] + intercepts[0])
    for number in range(len(slopes)):
        if value <= bounds[number + 1]:
            return float(slopes[number] * value + intercepts[number])
    return float(slopes[-1] * bounds[-1] + intercepts[-1])


@pytest.mark.parametrize("as_inputs", [False, True])
@pytest.mark.parametrize(("columns", "binary"), [(3, 0), (1, 1), (2, 1)])
def test_predictions_are_mapped_by_lines(columns: int, binary: int, as_inputs: bool) -> None:
    groups = 1 if binary else columns
    bounds = np.sort(RNG.uniform(size=(groups, 5)), 1).astype(np.float32)
    slopes, intercepts = (RNG.normal(size=(groups, 4)).astype(np.float32) for _ in range(2))
    x = RNG.uniform(-0.2, 1.2, (9, columns)).astype(np.float32)
    lines = [bounds, slopes, intercepts]
    x[:5, -1] = bounds[-1]
    if as_inputs:
        [found] = run_operator("PiecewiseLinearTransform", [x, *(one.reshape(-1) for one in lines)], binary=binary)
    else:
        names = zip(("bounds", "slopes", "intercepts"), lines, strict=True)
        arguments = {name: one.reshape(-1).tolist() for name, one in names}
        [found] = run_operator("PiecewiseLinearTransform", [x], binary=binary, pieces=4, **arguments)
    for row in range(len(x)):
        last = [mapped(x[row, -1], bounds[-1], slopes[-1], intercepts[-1])]
        others = [mapped(x[row, n], bounds[n], slopes[n], intercepts[n]) for n in range(groups - 1)]
        expected = [1 - last[0], *last] if binary and columns == 2 else others + last
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match="bounds more; found 3 bounds, 3 slopes"):
        run_operator(
            "PiecewiseLinearTransform", [x], binary=binary, bounds=[0.0, 1, 2], slopes=[1.0] * 3, intercepts=[]
        )


def test_a_value_has_a_one_in_its_bucket() -> None:
    x = np.array([[0.5, 3], [1, 1], [7, 2]], np.float32)
    boundaries = np.array([1, 2, 2], np.float32)
    [found] = run_operator("BatchBucketOneHot", [x, np.array([2, 1], np.int32), boundaries])
    assert found.tolist() == [[1, 0, 0, 0, 1], [1, 0, 0, 1, 0], [0, 0, 1, 1, 0]]
    with pytest.raises(OperatorError, match="the boundaries of all columns"):
        run_operator("BatchBucketOneHot", [x, np.array([2, 2], np.int32), boundaries])
