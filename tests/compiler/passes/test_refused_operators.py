"""What an operator will refuse is no business of the passes: they leave it, and the operator says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec
from dagexec.core.proto import OperatorDef
from dagexec.errors import DagexecError
from tests.compiler.passes.models import Array, model_of, normal, op


def strings(count: int) -> Array:
    array = np.empty(count, np.object_)
    array[:] = [b"text"] * count
    return array


W, FC, HALF = normal(4, 4, 3, 3), normal(5, 144), np.array(0.5, np.float32)
CONV = op("Conv", ["x", "w"], ["c"], kernel=3)
BATCH_NORM = op("SpatialBN", ["c", "s", "s", "s", "s"], ["y"], is_test=1)
CASES: dict[str, tuple[list[OperatorDef], dict[str, Array]]] = {
    "a convolution in no group": ([op("Conv", ["x", "w"], ["y"], kernel=3, group=0)], {"w": W}),
    "a transposed one in no group": ([op("ConvTranspose", ["x", "w"], ["y"], kernel=3, group=0)], {"w": W}),
    "a negative group": ([op("Conv", ["x", "w"], ["y"], kernel=3, group=-2)], {"w": W}),
    "channels shuffled in no group": ([CONV, op("ChannelShuffle", ["c"], ["y"], group=0)], {"w": W}),
    "a bias of strings": (
        [op("Conv", ["x", "w", "b"], ["c"], kernel=3), op("Mul", ["c", "k"], ["y"])],
        {"w": W, "b": strings(4), "k": HALF},
    ),
    "a layer's bias of strings": (
        [op("FC", ["x", "f", "b"], ["c"]), op("Mul", ["c", "k"], ["y"])],
        {"f": FC, "b": strings(5), "k": HALF},
    ),
    "a bias of another float": (
        [op("Conv", ["x", "w", "b"], ["c"], kernel=3), op("Mul", ["c", "k"], ["y"])],
        {"w": W, "b": np.ones(4), "k": HALF},
    ),
    "normalized by strings": ([CONV, BATCH_NORM], {"w": W, "s": strings(4)}),
    "a factor of strings": ([CONV, op("Mul", ["c", "k"], ["y"])], {"w": W, "k": strings(1)}),
    "a filter of strings": ([op("Conv", ["x", "w"], ["y"], kernel=3)], {"w": strings(144).reshape(4, 4, 3, 3)}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_an_operator_refuses_is_refused_by_it_and_not_by_a_pass(case: str) -> None:
    operators, parameters = CASES[case]
    model = model_of(operators, **parameters)
    messages = []
    for optimize in (False, True):
        with pytest.raises(DagexecError) as caught, dagexec.compile(model, optimize=optimize) as executor:
            executor.run({"x": np.ones((2, 4, 6, 6), np.float32)})
        messages.append(type(caught.value))
    assert messages[0] is messages[1]
