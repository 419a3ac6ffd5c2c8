"""global-pooling: means over all pixels."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.global_pooling import PASS
from tests.compiler.passes.models import model_of, op, rewritten, unchanged


@pytest.mark.parametrize("axes", [[2, 3], [-1, -2], [1, 2]])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_mean_over_the_spatial_axes_becomes_global_pooling(axes: list[int], keepdims: int) -> None:
    model = model_of([op("ReduceMean", ["x"], ["y"], axes=axes, keepdims=keepdims)], inputs={"x": (None, 3, 4, 5)})
    wanted = ["AveragePool x -> y"] if keepdims else ["AveragePool x -> y/pooled", "Squeeze y/pooled -> y"]
    assert rewritten(PASS, model) == wanted


def test_other_means_stay() -> None:
    assert unchanged(PASS, model_of([op("ReduceMean", ["x"], ["y"], axes=[1])]))
    assert unchanged(PASS, model_of([op("ReduceMean", ["x"], ["y"], axes=[1, 2, 3])]))
    assert unchanged(PASS, model_of([op("ReduceMean", ["x"], ["y"])]))
    assert unchanged(PASS, model_of([op("ReduceMean", ["x"], ["y"], axes=[1])], inputs={"x": (3, 4)}))
