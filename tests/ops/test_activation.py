import numpy as np
import pytest

from dagexec.core.errors import ShapeError
from tests.ops.running import run_operator


def test_relu_keeps_positive_values_and_zeroes_the_rest() -> None:
    x = np.array([[-1.0, 0.0, 2.5], [3.0, -0.5, np.inf]], np.float32)
    [y] = run_operator("Relu", [x])
    np.testing.assert_array_equal(y, np.where(x > 0, x, 0))
    assert y.dtype == np.float32


def test_relu_refuses_integers_and_names_the_blob() -> None:
    with pytest.raises(ShapeError, match="'x0' must be one of float32"):
        run_operator("Relu", [np.array([1, 2], np.int32)])
